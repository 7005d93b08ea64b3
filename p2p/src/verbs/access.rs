//! Rights in libfabric's words and in verbs' words, and the flags that only verbs has.

use hmem_core::{Access, Errno, Error, ErrorKind, Result};

use super::sys::AccessFlags;

bitflags::bitflags! {
    /// Registration flags that fi_mr(3) has no word for, with verbs' values.
    ///
    /// Each reaches the driver if the device has it, and is Unsupported with the device's name if not.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct VerbsOptions: u32 {
        /// Memory windows may be bound to the region. Gives peers nothing by itself.
        const MW_BIND = AccessFlags::MW_BIND.bits();
        /// Addresses start at 0, on both sides. One page-aligned range, in one registration.
        const ZERO_BASED = AccessFlags::ZERO_BASED.bits();
        /// Pages are brought in when the NIC reaches for them, and are not pinned.
        const ON_DEMAND = AccessFlags::ON_DEMAND.bits();
        /// The memory lies in huge pages.
        const HUGETLB = AccessFlags::HUGETLB.bits();
        /// PCIe writes may pass each other. A driver may drop it silently.
        const RELAXED_ORDERING = AccessFlags::RELAXED_ORDERING.bits();
    }
}

/// What is known about an option that a registration asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grant {
    /// The driver took it: it refuses what it does not have.
    Granted,
    /// The driver was asked, and may have dropped it without a word (VRB-02).
    RequestedNotConfirmable,
}

impl VerbsOptions {
    /// What is known about each of these options after a registration with them worked.
    pub fn grants(self) -> impl Iterator<Item = (Self, Grant)> {
        self.iter().map(|option| {
            let grant = match option {
                Self::RELAXED_ORDERING => Grant::RequestedNotConfirmable,
                _ => Grant::Granted,
            };
            (option, grant)
        })
    }

    pub(super) const fn flags(self) -> AccessFlags {
        AccessFlags::from_bits_truncate(self.bits())
    }
}

/// What of a device the translation of rights depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceRights {
    /// It has atomics.
    pub atomics: bool,
    /// It speaks iWARP, where the sink of an RMA read must be remotely writable.
    pub iwarp: bool,
}

/// Rights in verbs' words: exactly as wide as asked, but for the LOCAL_WRITE that verbs demands under remote rights
/// to change memory (`ibv_reg_mr(3)`), and iWARP's rule for RMA reads.
///
/// ```
/// use hmem_core::Access;
/// use hmem_p2p::verbs::{DeviceRights, access_flags, sys::AccessFlags};
///
/// let device = DeviceRights { atomics: true, iwarp: false };
/// assert_eq!(access_flags(Access::SEND | Access::WRITE, device), AccessFlags::empty());
/// assert_eq!(
///     access_flags(Access::REMOTE_WRITE, device),
///     AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC | AccessFlags::LOCAL_WRITE,
/// );
/// ```
#[must_use]
pub fn access_flags(access: Access, device: DeviceRights) -> AccessFlags {
    let mut flags = AccessFlags::empty();
    if access.intersects(Access::READ | Access::RECV) {
        flags |= AccessFlags::LOCAL_WRITE;
    }
    if device.iwarp && access.contains(Access::READ) {
        flags |= AccessFlags::REMOTE_WRITE;
    }
    if access.contains(Access::REMOTE_READ) {
        flags |= AccessFlags::REMOTE_READ;
    }
    if access.contains(Access::REMOTE_WRITE) {
        flags |= AccessFlags::REMOTE_WRITE | AccessFlags::LOCAL_WRITE;
        flags.set(AccessFlags::REMOTE_ATOMIC, device.atomics);
    }
    flags
}

/// What [`access_flags`] gives beyond what was asked for: verbs' LOCAL_WRITE and iWARP's REMOTE_WRITE (VRB-03).
pub(super) fn added(access: Access, device: DeviceRights) -> AccessFlags {
    let mut asked = AccessFlags::empty();
    asked.set(AccessFlags::LOCAL_WRITE, access.intersects(Access::READ | Access::RECV));
    asked.set(AccessFlags::REMOTE_WRITE, access.contains(Access::REMOTE_WRITE));
    let limits = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
    access_flags(access, device).intersection(limits).difference(asked)
}

/// Rights in libfabric's words, for regions registered in verbs' words.
pub(super) fn access_of(flags: AccessFlags) -> Access {
    let mut access = Access::WRITE | Access::SEND;
    if flags.contains(AccessFlags::LOCAL_WRITE) {
        access |= Access::READ | Access::RECV;
    }
    access.set(Access::REMOTE_READ, flags.contains(AccessFlags::REMOTE_READ));
    access.set(Access::REMOTE_WRITE, flags.contains(AccessFlags::REMOTE_WRITE));
    access
}

/// What every driver refuses with EINVAL (VRB-01), refused before it is asked.
///
/// # Errors
/// BadAccess for REMOTE_WRITE or REMOTE_ATOMIC without LOCAL_WRITE, and for bits that verbs does not define.
pub fn check_flags(flags: AccessFlags) -> Result<()> {
    let refuse = |why: &'static str| {
        Err(Error::new(ErrorKind::BadAccess, "ibv_reg_mr")
            .errno(Errno(22))
            .context("access", names(flags))
            .remedy(why))
    };
    if !flags.difference(AccessFlags::all()).is_empty() {
        return refuse("these bits are not access flags of ibv_reg_mr(3)");
    }
    let changes = flags.intersects(AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC);
    if changes && !flags.contains(AccessFlags::LOCAL_WRITE) {
        return refuse("REMOTE_WRITE and REMOTE_ATOMIC need LOCAL_WRITE (ibv_reg_mr(3))");
    }
    Ok(())
}

/// Flag names for messages.
pub(super) fn names(flags: AccessFlags) -> String {
    let mut names: Vec<_> = flags.iter_names().map(|(name, _)| name.to_owned()).collect();
    let unknown = flags.bits() & !AccessFlags::all().bits();
    if unknown != 0 {
        names.push(format!("{unknown:#x}"));
    }
    if names.is_empty() { "none".to_owned() } else { names.join("|") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vrb_03_what_is_added_is_told_apart_from_what_was_asked_for() {
        let (plain, iwarp) = (DeviceRights::default(), DeviceRights { atomics: true, iwarp: true });
        for (access, device, expected) in [
            (Access::REMOTE_WRITE, plain, AccessFlags::LOCAL_WRITE),
            (Access::REMOTE_WRITE | Access::READ, plain, AccessFlags::empty()),
            (Access::READ, plain, AccessFlags::empty()),
            (Access::READ, iwarp, AccessFlags::REMOTE_WRITE),
            (Access::READ | Access::REMOTE_WRITE, iwarp, AccessFlags::empty()),
            (Access::REMOTE_READ, iwarp, AccessFlags::empty()),
        ] {
            assert_eq!(added(access, device), expected, "{access} on {device:?}");
        }
    }
}

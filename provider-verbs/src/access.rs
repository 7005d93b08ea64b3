//! Translation of rights between libfabric and verbs, and the flags that only verbs has.

use std::any::Any;

use hmem_core::{Access, Errno, Error, ErrorKind, Result, WriteOrdering};

use super::sys::AccessFlags;

bitflags::bitflags! {
    /// Registration flags of verbs that fi_mr(3) does not have. The bits are those of
    /// `ibv_access_flags`.
    ///
    /// If the device does not support a flag, a registration with the flag fails with Unsupported,
    /// and the error names the device. There are two exceptions: a driver may ignore
    /// RELAXED_ORDERING, and HUGETLB without ON_DEMAND.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct VerbsOptions: u32 {
        /// Memory windows may be bound to the region. The flag alone grants peers nothing.
        const MW_BIND = AccessFlags::MW_BIND.bits();
        /// Local and remote requests address the region from 0 on. The region must be one
        /// page-aligned range that fits in one registration.
        const ZERO_BASED = AccessFlags::ZERO_BASED.bits();
        /// Pages are not pinned. The NIC faults them in on access.
        const ON_DEMAND = AccessFlags::ON_DEMAND.bits();
        /// The memory lies in huge pages; the provider checks this. Only devices with on-demand
        /// paging support the flag. A driver may ignore the flag if ON_DEMAND is not set as well.
        const HUGETLB = AccessFlags::HUGETLB.bits();
        /// The NIC may reorder its PCIe writes. A driver may ignore the flag silently.
        ///
        /// [`hmem_core::Domain`] sets this flag for
        /// [`WriteOrdering::Relaxed`](hmem_core::WriteOrdering::Relaxed).
        /// [`Settings`](super::Settings) of one request may have the flag, but not
        /// [`Builder::options`](super::Builder::options).
        const RELAXED_ORDERING = AccessFlags::RELAXED_ORDERING.bits();
    }
}

/// Verbs-specific settings of one request
/// ([`Request::extension`](hmem_core::Request::extension)).
///
/// ```no_run
/// use hmem_core::{Access, Domain, Region, Request, Result};
/// use hmem_provider_verbs::{Settings, VerbsOptions};
///
/// /// Registers memory whose pages the NIC faults in.
/// fn on_demand(domain: &Domain, buffer: Vec<u8>) -> Result<Region<Vec<u8>>> {
///     let settings = Settings { options: VerbsOptions::ON_DEMAND, ..Settings::default() };
///     Ok(domain.submit(Request::new(buffer, Access::REMOTE_READ).extension(settings))?)
/// }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Options in addition to those of [`Builder::options`](super::Builder::options).
    pub options: VerbsOptions,
    /// The address by which work requests name the first byte; `None` for the application's
    /// address. Both addresses must have the same offset in their pages. The ranges of the region
    /// follow one another from this address on. Unless the memory is a dma-buf, an address other
    /// than the application's needs `ibv_reg_mr_iova2` of libibverbs (IBVERBS_1.8).
    pub iova: Option<u64>,
}

impl Settings {
    /// Returns the verbs settings of a request, or the defaults if the request has none.
    pub(super) fn of(extension: Option<&(dyn Any + Send + Sync)>) -> Self {
        extension.and_then(|settings| settings.downcast_ref()).copied().unwrap_or_default()
    }
}

/// Tells if the driver may have ignored one option of a successful registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptionResult {
    /// The driver supports the option. A driver without support would have refused the
    /// registration.
    Accepted,
    /// The driver received the option but may have ignored it, which no verbs call reports
    /// (requirement VRB-02).
    RequestedNotConfirmable,
}

impl VerbsOptions {
    /// Returns each option of this set, and tells if the driver may have ignored the option. The
    /// set is all options of one successful registration, because the result for HUGETLB depends on
    /// ON_DEMAND.
    pub fn results(self) -> impl Iterator<Item = (Self, OptionResult)> {
        self.iter().map(move |option| {
            let result = match option {
                Self::RELAXED_ORDERING => OptionResult::RequestedNotConfirmable,
                Self::HUGETLB if !self.contains(Self::ON_DEMAND) => {
                    OptionResult::RequestedNotConfirmable
                }
                _ => OptionResult::Accepted,
            };
            (option, result)
        })
    }

    pub(super) const fn flags(self) -> AccessFlags {
        AccessFlags::from_bits_truncate(self.bits())
    }
}

/// Properties of a device that [`access_flags`] depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceRights {
    /// True if the device supports atomics.
    pub atomics: bool,
    /// True for iWARP devices. On iWARP the local target buffer of an RMA read must be remotely
    /// writable.
    pub iwarp: bool,
}

/// Translates access rights to verbs flags. The flags grant exactly the rights of `access`, with
/// two exceptions:
///
/// - LOCAL_WRITE is added to the flags by which peers change memory (`ibv_reg_mr(3)`).
/// - On iWARP, REMOTE_WRITE is added for the right READ.
///
/// The right REMOTE_WRITE grants RMA writes, and atomics if the device has them. REMOTE_RMA_WRITE
/// grants RMA writes only, and REMOTE_ATOMIC atomics only. On a device without atomics a
/// registration with REMOTE_ATOMIC fails with Unsupported.
///
/// ```
/// use hmem_core::Access;
/// use hmem_provider_verbs::{DeviceRights, access_flags, sys::AccessFlags};
///
/// let device = DeviceRights { atomics: true, iwarp: false };
/// assert_eq!(access_flags(Access::SEND | Access::WRITE, device), AccessFlags::empty());
/// assert_eq!(
///     access_flags(Access::REMOTE_WRITE, device),
///     AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC | AccessFlags::LOCAL_WRITE,
/// );
/// assert_eq!(
///     access_flags(Access::REMOTE_ATOMIC, device),
///     AccessFlags::REMOTE_ATOMIC | AccessFlags::LOCAL_WRITE,
/// );
/// ```
#[must_use]
pub fn access_flags(access: Access, device: DeviceRights) -> AccessFlags {
    let mut flags = remote_changes(access, device);
    let changes = access.intersects(Access::READ | Access::RECV) || access.peers_write();
    flags.set(AccessFlags::LOCAL_WRITE, changes);
    flags.set(AccessFlags::REMOTE_READ, access.contains(Access::REMOTE_READ));
    if device.iwarp && access.contains(Access::READ) {
        flags |= AccessFlags::REMOTE_WRITE;
    }
    flags
}

/// Returns the verbs flags for the rights in `access` by which peers change memory. Includes
/// REMOTE_ATOMIC only if the device supports atomics.
pub(super) fn remote_changes(access: Access, device: DeviceRights) -> AccessFlags {
    let mut flags = AccessFlags::empty();
    flags.set(AccessFlags::REMOTE_WRITE, access.intersects(Access::ANY_REMOTE_WRITE));
    let atomics = device.atomics && access.intersects(Access::ANY_REMOTE_ATOMIC);
    flags.set(AccessFlags::REMOTE_ATOMIC, atomics);
    flags
}

/// Returns the flags that [`access_flags`] sets although `access` does not ask for them, because
/// verbs requires them: LOCAL_WRITE on all devices, REMOTE_WRITE on iWARP (requirement VRB-03).
pub(super) fn added(access: Access, device: DeviceRights) -> AccessFlags {
    let mut asked = AccessFlags::empty();
    asked.set(AccessFlags::LOCAL_WRITE, access.intersects(Access::READ | Access::RECV));
    asked.set(AccessFlags::REMOTE_WRITE, access.intersects(Access::ANY_REMOTE_WRITE));
    let limits = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
    access_flags(access, device).intersection(limits).difference(asked)
}

/// Translates the flags of an `ibv_reg_mr` call to rights, for programs that replace the call. The
/// rights are those that the driver would grant. [`access_flags`] translates rights back to flags.
/// For RELAXED_ORDERING, which is no right, [`WriteOrdering`] has the same conversion.
///
/// ```
/// use hmem_core::{Access, WriteOrdering};
/// use hmem_provider_verbs::sys::AccessFlags;
///
/// # fn main() -> hmem_core::Result<()> {
/// let flags = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ | AccessFlags::RELAXED_ORDERING;
/// let local = Access::SEND | Access::RECV | Access::READ | Access::WRITE;
/// assert_eq!(Access::try_from(flags)?, local | Access::REMOTE_READ);
/// assert_eq!(WriteOrdering::from(flags), WriteOrdering::Relaxed);
/// # Ok(()) }
/// ```
///
/// # Errors
/// - BadAccess: the errors of [`check_flags`].
/// - Unsupported: ZERO_BASED, ON_DEMAND or HUGETLB, which are [`VerbsOptions`] and no rights.
impl TryFrom<AccessFlags> for Access {
    type Error = Error;

    fn try_from(flags: AccessFlags) -> Result<Self> {
        check_flags(flags)?;
        let rights = AccessFlags::LOCAL_WRITE
            | AccessFlags::REMOTE_READ
            | AccessFlags::REMOTE_WRITE
            | AccessFlags::REMOTE_ATOMIC
            | AccessFlags::MW_BIND
            | AccessFlags::RELAXED_ORDERING;
        let options = flags.difference(rights);
        if !options.is_empty() {
            return Err(Error::new(ErrorKind::Unsupported, "rights of verbs flags")
                .context("flags", names(options))
                .remedy("set these with Builder::options: they are no rights"));
        }
        let has = |flag| flags.contains(flag);
        let mut access = Self::WRITE | Self::SEND;
        access.set(Self::READ | Self::RECV, has(AccessFlags::LOCAL_WRITE));
        access.set(Self::REMOTE_READ, has(AccessFlags::REMOTE_READ));
        access.set(Self::MW_BIND, has(AccessFlags::MW_BIND));
        // REMOTE_WRITE of fi_mr(3) grants both RMA writes and atomics.
        access |= match (has(AccessFlags::REMOTE_WRITE), has(AccessFlags::REMOTE_ATOMIC)) {
            (true, true) => Self::REMOTE_WRITE,
            (true, false) => Self::REMOTE_RMA_WRITE,
            (false, true) => Self::REMOTE_ATOMIC,
            (false, false) => Self::empty(),
        };
        Ok(access)
    }
}

/// Returns Relaxed for flags with RELAXED_ORDERING, and Strict for others.
impl From<AccessFlags> for WriteOrdering {
    fn from(flags: AccessFlags) -> Self {
        if flags.contains(AccessFlags::RELAXED_ORDERING) { Self::Relaxed } else { Self::Strict }
    }
}

/// Returns an error for flags that every driver refuses with EINVAL (requirement VRB-01).
///
/// # Errors
/// BadAccess for REMOTE_WRITE or REMOTE_ATOMIC without LOCAL_WRITE, and for bits that verbs does
/// not define.
pub fn check_flags(flags: AccessFlags) -> Result<()> {
    let refuse = |why: &'static str| {
        Err(Error::new(ErrorKind::BadAccess, "ibv_reg_mr")
            .errno(Errno(22))
            .context("access", names(flags))
            .remedy(why))
    };
    if !flags.difference(AccessFlags::all()).is_empty() {
        return refuse("use access flags of ibv_reg_mr(3) only: other bits are set");
    }
    let changes = flags.intersects(AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC);
    if changes && !flags.contains(AccessFlags::LOCAL_WRITE) {
        return refuse("add LOCAL_WRITE: REMOTE_WRITE and REMOTE_ATOMIC need it (ibv_reg_mr(3))");
    }
    Ok(())
}

/// Returns the names of the set flags, for messages.
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

    /// VRB-03: `added` returns only flags that the caller did not request.
    #[test]
    fn added_rights_are_distinguished_from_requested_rights() {
        let (plain, iwarp) = (DeviceRights::default(), DeviceRights { atomics: true, iwarp: true });
        for (access, device, expected) in [
            (Access::REMOTE_WRITE, plain, AccessFlags::LOCAL_WRITE),
            (Access::REMOTE_WRITE | Access::READ, plain, AccessFlags::empty()),
            (Access::READ, plain, AccessFlags::empty()),
            (Access::READ, iwarp, AccessFlags::REMOTE_WRITE),
            (Access::READ | Access::REMOTE_WRITE, iwarp, AccessFlags::empty()),
            (Access::REMOTE_READ, iwarp, AccessFlags::empty()),
            (Access::REMOTE_ATOMIC, plain, AccessFlags::LOCAL_WRITE),
            (Access::REMOTE_RMA_WRITE | Access::RECV, iwarp, AccessFlags::empty()),
        ] {
            assert_eq!(added(access, device), expected, "{access} on {device:?}");
        }
    }

    /// VRB-03: verbs flags for access rights are unchanged after a conversion to rights and back.
    #[test]
    fn rights_of_valid_verbs_flags_translate_back_to_the_same_flags() {
        let device = DeviceRights { atomics: true, iwarp: false };
        let strict = (0..1 << 9).map(AccessFlags::from_bits_retain);
        for flags in strict.flat_map(|flags| [flags, flags | AccessFlags::RELAXED_ORDERING]) {
            let rights = flags.difference(AccessFlags::RELAXED_ORDERING | AccessFlags::MW_BIND);
            match Access::try_from(flags) {
                Ok(access) => {
                    assert_eq!(access_flags(access, device), rights, "{}", names(flags));
                    let binds = flags.contains(AccessFlags::MW_BIND);
                    assert_eq!(access.contains(Access::MW_BIND), binds);
                }
                Err(error) if check_flags(flags).is_err() => {
                    assert_eq!(error.kind(), ErrorKind::BadAccess, "{}", names(flags));
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Unsupported, "{}", names(flags));
                    let options =
                        VerbsOptions::ZERO_BASED | VerbsOptions::ON_DEMAND | VerbsOptions::HUGETLB;
                    assert!(flags.intersects(options.flags()), "{error}");
                }
            }
        }
    }
}

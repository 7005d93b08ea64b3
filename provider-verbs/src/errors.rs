//! Translation of errno values of libibverbs and its drivers to kinds, causes and remedies.

use std::{borrow::Cow, ffi::c_int};

use hmem_core::{AddressRange, Errno, Error, ErrorKind, provider::Nic};
use rustix::process::{Resource, getrlimit};

use super::{access::names, sys::AccessFlags};

/// Returns the errno of a library call that has just returned a null pointer.
pub(super) fn last() -> Errno {
    Errno::of(&std::io::Error::last_os_error())
}

/// Converts the return value of a library call to a result. Most calls return the errno. Some
/// return -1 and set `errno`.
pub(super) fn status(returned: c_int) -> Result<(), Errno> {
    match returned {
        0 => Ok(()),
        errno if errno > 0 => Err(Errno(errno)),
        _ => Err(last()),
    }
}

/// Returns the error of a failed library call.
pub(super) fn call(nic: &Nic, symbol: &'static str, errno: Errno) -> Error {
    Error::os(errno, symbol).provider(nic.to_string())
}

/// Sets the remedy of a failed call, unless the call failed because the device is lost.
pub(super) fn advise(error: Error, remedy: impl Into<Cow<'static, str>>) -> Error {
    if error.is_unavailable() { error } else { error.remedy(remedy) }
}

/// A library call that registers memory, for the message of its error.
#[derive(Clone, Copy, Debug)]
pub(super) struct RegistrationCall {
    pub(super) symbol: &'static str,
    pub(super) range: AddressRange,
    pub(super) flags: AccessFlags,
    pub(super) backing: BackingKind,
}

/// Kind of the memory behind a registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BackingKind {
    Host,
    DmaBuf,
    PeerMemory,
}

/// Optional access flags that may be the reason for a refusal: a driver that does not support one
/// of them refuses the registration. Drivers ignore the other optional flags.
const OPTIONS: AccessFlags = AccessFlags::MW_BIND
    .union(AccessFlags::ZERO_BASED)
    .union(AccessFlags::ON_DEMAND)
    .union(AccessFlags::HUGETLB);

/// Returns the error of a registration that the driver refused.
pub(super) fn registration(nic: &Nic, errno: Errno, what: &RegistrationCall) -> Error {
    let base = |kind| {
        Error::new(kind, what.symbol)
            .errno(errno)
            .provider(nic.to_string())
            .context("range", what.range)
            .context("access", names(what.flags))
    };
    let options = what.flags.intersection(OPTIONS);
    if let (1 | 12, BackingKind::Host) = (errno.0, what.backing)
        && let Some(limit) = getrlimit(Resource::Memlock).current
    {
        // VRB-05
        let why = format!("the locked-memory limit (RLIMIT_MEMLOCK) is {limit} bytes");
        return base(ErrorKind::OutOfResources).context("why", why).remedy(
            "raise it (ulimit -l, LimitMEMLOCK= in systemd), since each registration counts its \
             pages again; if it is not reached, the NIC is out of regions",
        );
    }
    match (errno.0, what.backing) {
        (12, _) => base(ErrorKind::OutOfResources).remedy(
            "close regions, or use larger pages: the NIC is out of regions or translation tables",
        ),
        (14, BackingKind::Host) => base(ErrorKind::BadAddress).remedy(
            "map the whole range, with write permission if the NIC is to write, before \
             registering it",
        ),
        (14, BackingKind::PeerMemory) => base(ErrorKind::BadAddress).remedy(
            "load the peer-memory client of the memory's vendor (NVIDIA: modprobe nvidia-peermem), \
             or use dma-buf: no client knows the address",
        ),
        (9, BackingKind::DmaBuf) => {
            base(ErrorKind::InvalidArgument).remedy("pass an open dma-buf: the fd is closed")
        }
        (22, BackingKind::DmaBuf) => base(ErrorKind::InvalidArgument).remedy(
            "pass a dma-buf, a range inside it, and an address and offset that are equal within a \
             page",
        ),
        (38 | 95, BackingKind::DmaBuf) => base(ErrorKind::Unsupported).remedy(
            "update the kernel or NIC driver, which imports no dma-buf, or use peer memory or \
             staged copies",
        ),
        (524, BackingKind::DmaBuf) => base(ErrorKind::Unsupported)
            .remedy("try the other mapping type, or a NIC that can reach the device"),
        (38 | 95 | 524, _) if !options.is_empty() => base(ErrorKind::Unsupported)
            .context("options", names(options))
            .remedy("register without the options: this device lacks one of them"),
        (22, _) if !options.is_empty() => base(ErrorKind::InvalidArgument)
            .context("options", names(options))
            .remedy("check the range, the rights and the options: the driver refused one of them"),
        (22, _) => base(ErrorKind::InvalidArgument)
            .remedy("check the range and the rights: the driver refused one of them"),
        _ => base(errno.kind()),
    }
}

//! Translation of libfabric's error numbers to kinds and remedies.

use std::ffi::c_int;

use hmem_core::{Errno, Error, ErrorKind};

use super::sys::{FI_EBADFLAGS, FI_EDOMAIN, FI_ENOKEY, FI_ENOMR, FI_EOPBADSTATE, FI_ETRUNC};

const EKEYREJECTED: c_int = 129;

/// The number with which the verbs provider reports a failed work completion.
pub(super) const EIO: c_int = 5;

/// Numbers of the operating system for a connection that cannot be made or was lost: EPIPE,
/// ENETDOWN to ENETRESET, ECONNABORTED, ECONNRESET, ENOTCONN to ECONNREFUSED without ETOOMANYREFS,
/// EHOSTDOWN and EHOSTUNREACH.
const LOST: [c_int; 11] = [32, 100, 101, 102, 103, 104, 107, 108, 110, 112, 113];

/// Returns the error of the libfabric call `operation`, which returned a negated error number.
/// `nic` names the domain.
pub(super) fn call(nic: impl ToString, operation: &'static str, returned: c_int) -> Error {
    let errno = Errno(returned.saturating_neg());
    Error::new(kind(errno), operation).errno(errno).provider(nic.to_string())
}

/// Returns the error of a transfer that ended with the negated error number `returned`. `verbs` is
/// true for a provider over verbs. With the number [`EIO`], `prov_errno` is then the status of a
/// work completion (`enum ibv_wc_status`).
pub(super) fn transfer(
    nic: impl ToString,
    returned: c_int,
    prov_errno: c_int,
    verbs: bool,
) -> Error {
    const ACCESS_REFUSED: c_int = 10;
    const NO_ANSWER: c_int = 12;
    const NO_RECEIVE: c_int = 13;
    let (own, why) = match prov_errno {
        ACCESS_REFUSED if verbs && returned == -EIO => (
            Some(ErrorKind::AccessDenied),
            "use a valid key, a range inside the region and a right that it grants: the peer's \
             NIC refused the access",
        ),
        NO_ANSWER | NO_RECEIVE if verbs && returned == -EIO => (
            Some(ErrorKind::Unreachable),
            "check that the peer's process runs, and the network: the peer does not answer",
        ),
        _ => (None, ""),
    };
    let errno = Errno(returned.saturating_neg());
    let error = Error::new(own.unwrap_or_else(|| kind(errno)), "transfer")
        .errno(errno)
        .provider(nic.to_string())
        .context("prov_errno", prov_errno);
    if why.is_empty() { error } else { error.remedy(why) }
}

/// Returns the error kind of a number. Numbers below 256 are those of the operating system.
fn kind(errno: Errno) -> ErrorKind {
    match errno.0 {
        EKEYREJECTED => ErrorKind::KeyRejected,
        FI_EOPBADSTATE => ErrorKind::BadState,
        FI_EBADFLAGS => ErrorKind::BadFlags,
        FI_EDOMAIN => ErrorKind::InvalidArgument,
        FI_ENOKEY => ErrorKind::NoKey,
        FI_ENOMR => ErrorKind::OutOfResources,
        FI_ETRUNC => ErrorKind::Truncated,
        lost if LOST.contains(&lost) => ErrorKind::Unreachable,
        _ => errno.kind(),
    }
}

/// Adds the remedy to an error of `fi_mr_regattr`. `device_memory` is true for memory of a device.
pub(super) fn registration(error: Error, device_memory: bool) -> Error {
    match error.kind() {
        ErrorKind::NoKey => {
            error.remedy("request another key: a region of the domain has this one")
        }
        ErrorKind::KeyRejected => error.remedy("request a key that the provider accepts"),
        ErrorKind::OutOfResources | ErrorKind::PermissionDenied => error.remedy(
            "close regions, or raise the locked-memory limit (ulimit -l, LimitMEMLOCK= in systemd)",
        ),
        ErrorKind::BadAddress => error.remedy(
            "map the whole range, with write permission if the NIC is to write, before \
             registering it",
        ),
        ErrorKind::NoSys | ErrorKind::Unsupported if device_memory => error.remedy(
            "use a libfabric that was built for this kind of memory, or a provider that imports \
             dma-bufs: this one does neither",
        ),
        ErrorKind::InvalidArgument => error
            .remedy("check the range, the rights and the key: the provider refused one of them"),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_above_those_of_the_system_have_kinds() {
        for (number, expected) in [
            (14, ErrorKind::BadAddress),
            (129, ErrorKind::KeyRejected),
            (258, ErrorKind::BadState),
            (260, ErrorKind::BadFlags),
            (262, ErrorKind::InvalidArgument),
            (266, ErrorKind::NoKey),
            (270, ErrorKind::OutOfResources),
            (265, ErrorKind::Truncated),
            (104, ErrorKind::Unreachable),
            (111, ErrorKind::Unreachable),
            (256, ErrorKind::Driver),
        ] {
            let error = call("libfabric/tcp:lo", "fi_mr_regattr", -number);
            assert_eq!((error.kind(), error.os_errno()), (expected, Some(Errno(number))));
        }
        for (status, verbs, expected) in [
            (10, true, ErrorKind::AccessDenied),
            (12, true, ErrorKind::Unreachable),
            (13, true, ErrorKind::Unreachable),
            (4, true, Errno(EIO).kind()),
            (10, false, Errno(EIO).kind()),
        ] {
            let error = transfer("libfabric/verbs;ofi_rxm:rxe0", -EIO, status, verbs);
            assert_eq!((error.kind(), error.os_errno()), (expected, Some(Errno(EIO))), "{status}");
        }
        assert_eq!(call("libfabric/tcp:lo", "fi_close", c_int::MIN).kind(), ErrorKind::Driver);
    }
}

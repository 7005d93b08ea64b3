//! Conversion of driver codes to errors with a kind and a remedy.

use hmem_core::{Error, ErrorKind, IfaceKind, Result};
use hmem_iface_kit::IfaceErrors;

use crate::sys::CuResult;

/// Maker of the errors of the CUDA iface.
pub(crate) const CUDA: IfaceErrors = IfaceErrors(IfaceKind::CUDA);

/// Returns the error for an optional symbol that the loaded library does not have.
pub(crate) fn lacks_symbol(operation: &'static str, symbol: &'static str) -> Error {
    CUDA.lacks(operation, "the loaded driver is older than a call that this needs")
        .context("symbol", symbol)
        .remedy("update the NVIDIA driver")
}

/// Converts a code of the driver to an error, or to Ok for success.
pub(crate) fn check(code: CuResult, operation: &'static str) -> Result<()> {
    if code.is_success() { Ok(()) } else { Err(refused(code, operation)) }
}

#[cold]
pub(crate) fn refused(code: CuResult, operation: &'static str) -> Error {
    let error = coded(CUDA.error(kind(code), operation), code);
    match remedy(code, operation) {
        Some(remedy) => error.remedy(remedy),
        None => error,
    }
}

/// Adds a code of the driver, and the name of the code, to an error.
pub(crate) fn coded(error: Error, code: CuResult) -> Error {
    error.driver_code(code.name().unwrap_or_default(), code.0.into())
}

fn kind(code: CuResult) -> ErrorKind {
    match code {
        // A sticky error means that the process has lost the device and cannot use it again.
        sticky if sticky.is_sticky() => ErrorKind::Unavailable,
        CuResult::CUDA_ERROR_INVALID_VALUE
        | CuResult::CUDA_ERROR_INVALID_DEVICE
        | CuResult::CUDA_ERROR_INVALID_HANDLE
        | CuResult::CUDA_ERROR_NOT_FOUND
        | CuResult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED => ErrorKind::InvalidArgument,
        CuResult::CUDA_ERROR_OUT_OF_MEMORY
        | CuResult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
        | CuResult::CUDA_ERROR_MAP_FAILED
        | CuResult::CUDA_ERROR_TOO_MANY_PEERS => ErrorKind::OutOfResources,
        CuResult::CUDA_ERROR_NOT_INITIALIZED
        | CuResult::CUDA_ERROR_DEINITIALIZED
        | CuResult::CUDA_ERROR_STUB_LIBRARY
        | CuResult::CUDA_ERROR_DEVICE_UNAVAILABLE
        | CuResult::CUDA_ERROR_NO_DEVICE
        | CuResult::CUDA_ERROR_DEVICE_NOT_LICENSED
        | CuResult::CUDA_ERROR_SYSTEM_NOT_READY
        | CuResult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => ErrorKind::Unavailable,
        CuResult::CUDA_ERROR_INVALID_CONTEXT
        | CuResult::CUDA_ERROR_CONTEXT_IS_DESTROYED
        | CuResult::CUDA_ERROR_ILLEGAL_STATE => ErrorKind::BadState,
        CuResult::CUDA_ERROR_NOT_READY => ErrorKind::Again,
        CuResult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED => ErrorKind::Busy,
        CuResult::CUDA_ERROR_NOT_PERMITTED => ErrorKind::PermissionDenied,
        CuResult::CUDA_ERROR_NOT_SUPPORTED
        | CuResult::CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER
        | CuResult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
        | CuResult::CUDA_ERROR_UNSUPPORTED_LIMIT
        | CuResult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE
        | CuResult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED => ErrorKind::Unsupported,
        _ => ErrorKind::Driver,
    }
}

/// Driver calls for which INVALID_VALUE means that the driver does not know the address. For other
/// calls, the code can mean that any argument is invalid.
const ADDRESS_CALLS: [&str; 11] = [
    "cuIpcCloseMemHandle",
    "cuIpcGetMemHandle",
    "cuMemFree_v2",
    "cuMemFreeAsync",
    "cuMemFreeHost",
    "cuMemGetAddressRange_v2",
    "cuMemHostGetFlags",
    "cuMemHostUnregister",
    "cuMemRetainAllocationHandle",
    "cuMemcpyAsync",
    "cuPointerSetAttribute",
];

/// Returns the remedy for a code of the driver, or `None` if there is no general remedy.
pub(crate) fn remedy(code: CuResult, operation: &str) -> Option<&'static str> {
    Some(match code {
        sticky if sticky.is_sticky() => {
            "the device is lost for this process, and every further call fails in the same way: \
             end the process and start it again; see `dmesg` for the Xid"
        }
        CuResult::CUDA_ERROR_OUT_OF_MEMORY => {
            "free device memory, or ask for less: see `nvidia-smi`"
        }
        CuResult::CUDA_ERROR_NO_DEVICE => {
            "no NVIDIA device is visible: see `nvidia-smi -L` and CUDA_VISIBLE_DEVICES"
        }
        CuResult::CUDA_ERROR_STUB_LIBRARY => {
            "this is the toolkit's stub: take its folder out of LD_LIBRARY_PATH, so that the \
             driver's own library is found"
        }
        CuResult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
            "the library and the kernel module are of different versions: reload the module or \
             restart"
        }
        CuResult::CUDA_ERROR_INVALID_CONTEXT => {
            "the memory's CUDA context is not usable: it was destroyed, or the address belongs to \
             no context"
        }
        CuResult::CUDA_ERROR_CONTEXT_IS_DESTROYED => {
            "the device's primary context was reset (cudaDeviceReset): open the iface again"
        }
        CuResult::CUDA_ERROR_DEINITIALIZED => {
            "the process is ending: close the iface before `main` returns"
        }
        CuResult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED => {
            "a part of the range is page-locked already: unregister it first"
        }
        CuResult::CUDA_ERROR_INVALID_VALUE if ADDRESS_CALLS.contains(&operation) => {
            "the driver does not know the address: it was freed, or belongs to another process"
        }
        CuResult::CUDA_ERROR_NOT_INITIALIZED => {
            "the driver was not started in this process, or did not start: open the iface here, \
             and after a fork only once the child runs a program of its own"
        }
        CuResult::CUDA_ERROR_DEVICE_UNAVAILABLE => {
            "another process uses the device exclusively, or its compute mode (EXCLUSIVE_PROCESS, \
             PROHIBITED) keeps this process out: see `nvidia-smi -q -d COMPUTE`"
        }
        CuResult::CUDA_ERROR_OPERATING_SYSTEM => {
            "the operating system refused the driver a call: see the limits of the process \
             (`ulimit -a`) and `dmesg`"
        }
        CuResult::CUDA_ERROR_NOT_PERMITTED => {
            "CUDA does not permit the call here: do not call CUDA within a callback of a stream"
        }
        CuResult::CUDA_ERROR_NOT_SUPPORTED => {
            "this system or device lacks the feature: see the capability of the iface, and the \
             device in `nvidia-smi -q`"
        }
        CuResult::CUDA_ERROR_SYSTEM_NOT_READY => {
            "a daemon that the driver needs is not running, such as the fabric manager: see \
             `systemctl status nvidia-fabricmanager`"
        }
        CuResult::CUDA_ERROR_UNKNOWN => {
            "the driver gives no reason: see `dmesg` for an Xid and `nvidia-smi` for the state of \
             the device; if every further call fails alike, end the process and start it again"
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_device_is_unavailable_with_a_remedy() {
        let error = check(CuResult::CUDA_ERROR_ILLEGAL_ADDRESS, "cuStreamSynchronize").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.remedy_text().is_some_and(|remedy| remedy.contains("end the process")));
    }

    #[test]
    fn codes_have_their_remedies() {
        for (code, word) in [
            (CuResult::CUDA_ERROR_NOT_INITIALIZED, "open the iface"),
            (CuResult::CUDA_ERROR_DEVICE_UNAVAILABLE, "compute mode"),
            (CuResult::CUDA_ERROR_OPERATING_SYSTEM, "dmesg"),
            (CuResult::CUDA_ERROR_NOT_PERMITTED, "callback"),
            (CuResult::CUDA_ERROR_NOT_SUPPORTED, "capability"),
            (CuResult::CUDA_ERROR_SYSTEM_NOT_READY, "fabric"),
            (CuResult::CUDA_ERROR_UNKNOWN, "Xid"),
        ] {
            let error = refused(code, "cuMemAlloc_v2");
            assert!(error.remedy_text().is_some_and(|remedy| remedy.contains(word)), "{error}");
        }
    }

    /// For a call without an address, the remedy for INVALID_VALUE must not speak of a wrong
    /// address.
    #[test]
    fn invalid_value_means_unknown_address_only_for_address_queries() {
        let remedy = |call| {
            refused(CuResult::CUDA_ERROR_INVALID_VALUE, call).remedy_text().map(str::to_owned)
        };
        for call in
            ["cuInit", "cuMemAlloc_v2", "cuMemHostAlloc", "cuMemHostRegister_v2", "cuStreamCreate"]
        {
            assert_eq!(remedy(call), None, "{call}");
        }
        for call in ADDRESS_CALLS {
            assert!(remedy(call).is_some_and(|remedy| remedy.contains("it was freed")), "{call}");
            let mut table = crate::sys::Functions::SYMBOLS
                .iter()
                .chain(crate::sys::Functions::OPTIONAL_SYMBOLS);
            assert!(table.any(|symbol| *symbol == call), "{call} is a function");
        }
    }

    #[test]
    fn every_code_but_success_is_an_error_with_its_own_name() {
        for code in CuResult::ALL {
            match check(*code, "cuInit") {
                Ok(()) => assert!(code.is_success()),
                Err(error) => assert_eq!(error.driver().unwrap().name, code.name().unwrap()),
            }
        }
    }
}

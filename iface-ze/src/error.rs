//! Conversion of driver codes to errors with a kind and a remedy.

use hmem_core::{Error, ErrorKind, IfaceKind, Result};
use hmem_iface_kit::IfaceErrors;

use crate::sys::ZeResult;

/// Maker of the errors of the Level Zero iface.
pub(crate) const ZE: IfaceErrors = IfaceErrors(IfaceKind::ZE);

/// Converts a code of the driver to an error, or to Ok for success.
pub(crate) fn check(code: ZeResult, operation: &'static str) -> Result<()> {
    let kind = match code {
        ZeResult::ZE_RESULT_SUCCESS => return Ok(()),
        ZeResult::ZE_RESULT_ERROR_INVALID_ARGUMENT
        | ZeResult::ZE_RESULT_ERROR_INVALID_NULL_HANDLE
        | ZeResult::ZE_RESULT_ERROR_INVALID_NULL_POINTER
        | ZeResult::ZE_RESULT_ERROR_INVALID_SIZE
        | ZeResult::ZE_RESULT_ERROR_OVERLAPPING_REGIONS
        | ZeResult::ZE_RESULT_ERROR_ADDRESS_NOT_FOUND
        | ZeResult::ZE_RESULT_ERROR_INVALID_ENUMERATION => ErrorKind::InvalidArgument,
        ZeResult::ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY
        | ZeResult::ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY => ErrorKind::OutOfResources,
        ZeResult::ZE_RESULT_ERROR_UNINITIALIZED
        | ZeResult::ZE_RESULT_ERROR_DEVICE_LOST
        | ZeResult::ZE_RESULT_ERROR_DEVICE_REQUIRES_RESET
        | ZeResult::ZE_RESULT_ERROR_SURVIVABILITY_MODE_DETECTED
        | ZeResult::ZE_RESULT_ERROR_DEPENDENCY_UNAVAILABLE => ErrorKind::Unavailable,
        ZeResult::ZE_RESULT_ERROR_DEVICE_IN_LOW_POWER_STATE => ErrorKind::BadState,
        ZeResult::ZE_RESULT_NOT_READY => ErrorKind::Again,
        ZeResult::ZE_RESULT_ERROR_HANDLE_OBJECT_IN_USE
        | ZeResult::ZE_RESULT_ERROR_NOT_AVAILABLE => ErrorKind::Busy,
        ZeResult::ZE_RESULT_ERROR_INSUFFICIENT_PERMISSIONS => ErrorKind::PermissionDenied,
        ZeResult::ZE_RESULT_ERROR_UNSUPPORTED_VERSION
        | ZeResult::ZE_RESULT_ERROR_UNSUPPORTED_FEATURE
        | ZeResult::ZE_RESULT_ERROR_UNSUPPORTED_SIZE
        | ZeResult::ZE_RESULT_ERROR_UNSUPPORTED_ALIGNMENT
        | ZeResult::ZE_RESULT_ERROR_UNSUPPORTED_ENUMERATION => ErrorKind::Unsupported,
        _ => ErrorKind::Driver,
    };
    let error = coded(ZE.error(kind, operation), code);
    Err(match remedy(code) {
        Some(remedy) => error.remedy(remedy),
        None => error,
    })
}

fn remedy(code: ZeResult) -> Option<&'static str> {
    Some(match code {
        ZeResult::ZE_RESULT_ERROR_DEVICE_LOST | ZeResult::ZE_RESULT_ERROR_DEVICE_REQUIRES_RESET => {
            "the device was reset or removed: see the kernel log (dmesg), and start the process \
             again"
        }
        ZeResult::ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY => "free memory of the host, or ask for less",
        ZeResult::ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY => "free device memory, or ask for less",
        ZeResult::ZE_RESULT_ERROR_UNSUPPORTED_SIZE => {
            "ask for less: one allocation has a limit (maxMemAllocSize) below the device's memory"
        }
        ZeResult::ZE_RESULT_ERROR_INSUFFICIENT_PERMISSIONS => {
            "this user may not open /dev/dri/renderD*: join the group of that file (`render`)"
        }
        ZeResult::ZE_RESULT_ERROR_DEPENDENCY_UNAVAILABLE => {
            "a library or kernel driver that Level Zero needs is missing: see \
             ZE_ENABLE_LOADER_DEBUG_TRACE=1"
        }
        _ => return None,
    })
}

/// Adds a code of the driver, and the name of the code, to an error.
pub(crate) fn coded(error: Error, code: ZeResult) -> Error {
    error.driver_code(code.name().unwrap_or_default(), code.0.into())
}

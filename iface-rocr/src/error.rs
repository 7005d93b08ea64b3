//! Conversion of the runtime's codes to errors with a kind and a remedy.

use hmem_core::{Error, ErrorKind, IfaceKind, Result};
use hmem_iface_kit::IfaceErrors;

use crate::sys::HsaStatus;

/// Maker of the errors of the ROCr iface.
pub(crate) const ROCR: IfaceErrors = IfaceErrors(IfaceKind::ROCR);

/// Converts a code of the runtime to an error, or to Ok for success.
pub(crate) fn check(code: HsaStatus, operation: &'static str) -> Result<()> {
    let kind = match code {
        HsaStatus::HSA_STATUS_SUCCESS | HsaStatus::HSA_STATUS_INFO_BREAK => return Ok(()),
        HsaStatus::HSA_STATUS_ERROR_INVALID_ARGUMENT
        | HsaStatus::HSA_STATUS_ERROR_INVALID_ALLOCATION
        | HsaStatus::HSA_STATUS_ERROR_INVALID_AGENT
        | HsaStatus::HSA_STATUS_ERROR_INVALID_REGION
        | HsaStatus::HSA_STATUS_ERROR_INVALID_SIGNAL
        | HsaStatus::HSA_STATUS_ERROR_INVALID_MEMORY_POOL
        | HsaStatus::HSA_STATUS_ERROR_INCOMPATIBLE_ARGUMENTS => ErrorKind::InvalidArgument,
        HsaStatus::HSA_STATUS_ERROR_OUT_OF_RESOURCES
        | HsaStatus::HSA_STATUS_ERROR_REFCOUNT_OVERFLOW => ErrorKind::OutOfResources,
        HsaStatus::HSA_STATUS_ERROR_NOT_INITIALIZED => ErrorKind::Unavailable,
        HsaStatus::HSA_STATUS_ERROR_INVALID_RUNTIME_STATE
        | HsaStatus::HSA_STATUS_ERROR_RESOURCE_FREE => ErrorKind::BadState,
        HsaStatus::HSA_STATUS_ERROR_RESOURCE_BUSY => ErrorKind::Busy,
        HsaStatus::HSA_STATUS_ERROR_MEMORY_FAULT
        | HsaStatus::HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION => ErrorKind::BadAddress,
        HsaStatus::HSA_STATUS_ERROR_NOT_SUPPORTED => ErrorKind::Unsupported,
        _ => ErrorKind::Driver,
    };
    Err(coded(ROCR.error(kind, operation), code))
}

/// Adds a code of the runtime, and the name of the code, to an error.
pub(crate) fn coded(error: Error, code: HsaStatus) -> Error {
    error.driver_code(code.name().unwrap_or_default(), code.0.into())
}

/// Returns an optional function of the library, or an error that names the absent function.
pub(crate) fn symbol<F>(function: Option<F>, symbol: &'static str) -> Result<F> {
    function.ok_or_else(|| lacks_symbol(symbol, symbol))
}

/// Returns the error for an operation that needs a function which the library lacks.
pub(crate) fn lacks_symbol(operation: &'static str, symbol: &'static str) -> Error {
    ROCR.lacks(operation, "the library lacks the function").context("symbol", symbol)
}

/// Like [`check`], for calls that export memory. Adds a remedy to some errors.
pub(crate) fn refused(code: HsaStatus, call: &'static str) -> Result<()> {
    check(code, call).map_err(|error| match code {
        HsaStatus::HSA_STATUS_ERROR_INVALID_AGENT => {
            error.remedy("the device of the memory exports none: allocate it from a GPU's pool")
        }
        HsaStatus::HSA_STATUS_ERROR_INVALID_ALLOCATION => error.remedy(
            "the runtime exports ranges inside one live allocation of a pool: no reserved \
             addresses, and no freed memory",
        ),
        HsaStatus::HSA_STATUS_ERROR_OUT_OF_RESOURCES => {
            error.remedy("the process may be out of file descriptors (`ulimit -n`)")
        }
        _ => error,
    })
}

//! Conversion of the runtime's codes to errors with a kind and a remedy.

use hmem_core::{Error, ErrorKind, IfaceKind, Result};
use hmem_iface_kit::IfaceErrors;

use super::sys::NrtStatus;

/// Makes the errors of the Neuron iface.
pub(crate) const NEURON: IfaceErrors = IfaceErrors(IfaceKind::NEURON);

/// Converts a code of the runtime to an error, or to Ok for success.
pub(crate) fn check(code: NrtStatus, operation: &'static str) -> Result<()> {
    match code {
        NrtStatus::NRT_SUCCESS => Ok(()),
        refused => Err(refusal(refused, operation)),
    }
}

/// Returns the error for a failure code of the runtime.
pub(crate) fn refusal(code: NrtStatus, operation: &'static str) -> Error {
    let kind = match code {
        NrtStatus::NRT_INVALID | NrtStatus::NRT_INVALID_HANDLE => ErrorKind::InvalidArgument,
        NrtStatus::NRT_RESOURCE | NrtStatus::NRT_FAIL_HOST_MEM_ALLOC => ErrorKind::OutOfResources,
        NrtStatus::NRT_QUEUE_FULL | NrtStatus::NRT_EXEC_NC_BUSY => ErrorKind::Busy,
        NrtStatus::NRT_UNINITIALIZED | NrtStatus::NRT_CLOSED => ErrorKind::Unavailable,
        _ => ErrorKind::Driver,
    };
    let error = coded(NEURON.error(kind, operation), code);
    match code {
        NrtStatus::NRT_UNINITIALIZED => error.remedy(
            "set HMEM_NEURON_START_RUNTIME=1 to let hmem initialise the Neuron runtime (in Rust: \
             Neuron::builder().start_runtime(true)), or call nrt_init in the application",
        ),
        NrtStatus::NRT_CLOSED => {
            error.remedy("nrt_close was called: the process no longer uses Neuron devices")
        }
        NrtStatus::NRT_HW_ERROR => {
            error.remedy("see `neuron-ls` and `dmesg` for the device's state")
        }
        _ => error,
    }
}

/// Adds the code of the runtime, and the name of the code, to an error.
pub(crate) fn coded(error: Error, code: NrtStatus) -> Error {
    error.driver_code(code.name().unwrap_or_default(), code.0.into())
}

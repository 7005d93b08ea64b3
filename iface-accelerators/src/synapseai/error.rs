//! Conversion of the runtime's codes to errors with a kind and a remedy.

use hmem_core::{Error, ErrorKind, IfaceKind, Result};
use hmem_iface_kit::IfaceErrors;

use super::sys::SynStatus;

/// Makes the errors of the SynapseAI iface.
pub(crate) const SYNAPSEAI: IfaceErrors = IfaceErrors(IfaceKind::SYNAPSEAI);

/// Converts a code of the runtime to an error, or to Ok for success.
pub(crate) fn check(code: SynStatus, operation: &'static str) -> Result<()> {
    let kind = match code {
        SynStatus::SUCCESS => return Ok(()),
        SynStatus::INVALID_ARGUMENT | SynStatus::MAPPING_NOT_FOUND => ErrorKind::InvalidArgument,
        SynStatus::OUT_OF_HOST_MEMORY
        | SynStatus::OUT_OF_DEVICE_MEMORY
        | SynStatus::FAILED_TO_ALLOCATE_DEVICE_MEMORY
        | SynStatus::ALL_RESOURCES_TAKEN
        | SynStatus::OUT_OF_RESOURCES => ErrorKind::OutOfResources,
        SynStatus::OBJECT_NOT_INITIALIZED
        | SynStatus::NO_DEVICE_FOUND
        | SynStatus::FAILED_NOT_ENOUGH_DEVICES_FOUND
        | SynStatus::UNINITIALIZED => ErrorKind::Unavailable,
        SynStatus::UNSUPPORTED | SynStatus::DEVICE_TYPE_MISMATCH => ErrorKind::Unsupported,
        SynStatus::BUSY | SynStatus::DEVICE_ALREADY_ACQUIRED => ErrorKind::Busy,
        _ => ErrorKind::Driver,
    };
    let error = coded(SYNAPSEAI.error(kind, operation), code);
    Err(match code {
        SynStatus::DEVICE_RESET => error.remedy("the device was reset: see `hl-smi` and `dmesg`"),
        _ => error,
    })
}

/// Adds the code of the runtime, and the name of the code, to an error.
pub(crate) fn coded(error: Error, code: SynStatus) -> Error {
    error.driver_code(code.name().unwrap_or_default(), code.0.into())
}

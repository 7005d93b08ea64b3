//! Conversion of the runtime's codes to errors with a kind and a remedy.

use hmem_core::{Error, ErrorKind, IfaceKind, Result};
use hmem_iface_kit::IfaceErrors;

use super::sys::SynStatus;

/// Makes the errors of the SynapseAI iface.
pub(crate) const SYNAPSEAI: IfaceErrors = IfaceErrors(IfaceKind::SYNAPSEAI);

/// Converts a code of the runtime to an error, or to Ok for success.
pub(crate) fn check(code: SynStatus, operation: &'static str) -> Result<()> {
    let kind = match code {
        SynStatus::synSuccess => return Ok(()),
        SynStatus::synInvalidArgument | SynStatus::synMappingNotFound => ErrorKind::InvalidArgument,
        SynStatus::synOutOfHostMemory
        | SynStatus::synOutOfDeviceMemory
        | SynStatus::synFailedToAllocateDeviceMemory
        | SynStatus::synAllResourcesTaken
        | SynStatus::synOutOfResources => ErrorKind::OutOfResources,
        SynStatus::synObjectNotInitialized
        | SynStatus::synNoDeviceFound
        | SynStatus::synFailedNotEnoughDevicesFound
        | SynStatus::synUninitialized => ErrorKind::Unavailable,
        SynStatus::synUnsupported | SynStatus::synDeviceTypeMismatch => ErrorKind::Unsupported,
        SynStatus::synBusy | SynStatus::synDeviceAlreadyAcquired => ErrorKind::Busy,
        _ => ErrorKind::Driver,
    };
    let error = coded(SYNAPSEAI.error(kind, operation), code);
    Err(match code {
        SynStatus::synDeviceReset => error.remedy("the device was reset: see `hl-smi` and `dmesg`"),
        _ => error,
    })
}

/// Adds the code of the runtime, and the name of the code, to an error.
pub(crate) fn coded(error: Error, code: SynStatus) -> Error {
    error.driver_code(code.name().unwrap_or_default(), code.0.into())
}

//! Causes of refusals by Level Zero, and general causes of refusals, with remedies for Level Zero.

use hmem_core::{
    ErrorKind, Path,
    cause::{Answer, RefusalCause, Step},
};

/// Causes of refusals by Level Zero. A general cause whose name is in this list is replaced by the
/// entry here, which has a cause or remedy for Level Zero.
pub const CAUSES: &[RefusalCause] = &[
    RefusalCause {
        name: "ze-not-exportable",
        rank: 140,
        paths: &[Path::DmaBuf],
        steps: &[Step::Export],
        answers: &[Answer::UNSUPPORTED, Answer::Kind(&[ErrorKind::InvalidArgument])],
        cause: "Level Zero exports only memory that was allocated to be exported, of devices that \
                export any",
        remedy: "allocate with ze_external_memory_export_desc_t and \
                 ZE_EXTERNAL_MEMORY_TYPE_FLAG_DMA_BUF, or through this library, on a device whose \
                 memoryAllocationExportTypes is not 0",
        ..RefusalCause::ANY
    },
    RefusalCause {
        paths: &[Path::DmaBuf, Path::PeerMemory, Path::Staged],
        remedy: "give the user (or container) /dev/infiniband/uverbs* and /dev/dri/renderD*, and \
                 export for writing",
        ..RefusalCause::DEVICE_FILES
    },
];

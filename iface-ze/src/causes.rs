//! The causes of refusals that only this driver gives, beside the general ones.

use hmem_core::{
    ErrorKind, Path,
    cause::{Answer, RefusalCause, Step},
};

/// The causes of refusals that only Level Zero's driver gives.
pub const CAUSES: &[RefusalCause] = &[RefusalCause {
    name: "ze-not-exportable",
    rank: 140,
    paths: &[Path::DmaBuf],
    steps: &[Step::Export],
    answers: &[Answer::UNSUPPORTED, Answer::Kind(&[ErrorKind::InvalidArgument])],
    cause: "Level Zero exports only memory that was allocated to be exported",
    remedy: "allocate with ze_external_memory_export_desc_t and ZE_EXTERNAL_MEMORY_TYPE_FLAG_DMA_BUF, or through this library",
    ..RefusalCause::ANY
}];

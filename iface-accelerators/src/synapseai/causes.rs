//! Causes of refusals by the Gaudi drivers, in addition to the general causes.

use hmem_core::{
    Path,
    cause::{Answer, RefusalCause, Step},
};

/// `EINVAL`, which the kernel driver returns for a range outside the mapped device memory.
const EINVAL: i32 = 22;

/// Causes of refusals by the Gaudi drivers, in addition to the general causes.
pub const CAUSES: &[RefusalCause] = &[RefusalCause {
    name: "synapseai-export-invalid",
    rank: 136,
    paths: &[Path::DmaBuf],
    steps: &[Step::Export],
    answers: &[Answer::Errno(&[EINVAL])],
    cause: concat!(
        "the Gaudi kernel driver exports ranges of the mapping of all device memory only, ",
        "from Gaudi 2 on",
    ),
    remedy: "install kernel driver and SynapseAI software of one release",
    ..RefusalCause::ANY
}];

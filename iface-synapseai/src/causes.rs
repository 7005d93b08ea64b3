//! The causes of refusals that only this driver gives, beside the general ones.

use hmem_core::{
    Path,
    cause::{Answer, RefusalCause, Step},
};

/// EINVAL: the kernel driver's answer for a range that it does not find in the mapping.
const EINVAL: i32 = 22;

/// The causes of refusals that only the Gaudi drivers give.
pub const CAUSES: &[RefusalCause] = &[RefusalCause {
    name: "synapseai-export-invalid",
    rank: 136,
    paths: &[Path::DmaBuf],
    steps: &[Step::Export],
    answers: &[Answer::Errno(&[EINVAL])],
    cause: "the Gaudi kernel driver exports ranges of the mapping of all device memory only, from Gaudi 2 on",
    remedy: "install kernel driver and SynapseAI software of one release",
    ..RefusalCause::ANY
}];

//! Causes of refusals by the Neuron runtime, in addition to the general causes.

use hmem_core::{
    Path,
    cause::{Answer, RefusalCause, Step},
};

use super::sys::NrtStatus;

/// Causes of refusals by the Neuron runtime, in addition to the general causes.
pub const CAUSES: &[RefusalCause] = &[RefusalCause {
    name: "neuron-export-invalid",
    rank: 135,
    paths: &[Path::DmaBuf],
    steps: &[Step::Export],
    answers: &[Answer::Driver(&[NrtStatus::NRT_INVALID.0 as i64])],
    cause: concat!(
        "libnrt exports no dma-bufs while NEURON_RT_ENABLE_P2P is 0, ",
        "and release 2.32.31 refuses each export",
    ),
    remedy: concat!(
        "unset NEURON_RT_ENABLE_P2P, ",
        "and install another release of aws-neuronx-runtime-lib if it is 2.32.31",
    ),
    ..RefusalCause::ANY
}];

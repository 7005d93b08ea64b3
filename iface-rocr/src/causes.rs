//! The causes of refusals that only this driver gives, beside the general ones.

use hmem_core::{
    Path,
    cause::{Answer, Facts, Needs, RefusalCause, Step},
};

fn lacks_options(facts: &Facts) -> bool {
    ["DMABUF_MOVE_NOTIFY", "PCI_P2PDMA"].iter().any(|name| facts.has_option(name) == Some(false))
}

/// The causes of refusals that only ROCr's driver gives.
pub const CAUSES: &[RefusalCause] = &[RefusalCause {
    name: "rocr-kernel-options",
    rank: 130,
    paths: &[Path::DmaBuf],
    steps: &[Step::Export],
    answers: &[Answer::UNSUPPORTED],
    needs: Needs::some(
        "the kernel was built without DMABUF_MOVE_NOTIFY or PCI_P2PDMA",
        lacks_options,
    ),
    cause: "amdgpu exports dma-bufs to other devices only in kernels with CONFIG_DMABUF_MOVE_NOTIFY and CONFIG_PCI_P2PDMA",
    remedy: "run a kernel that has both options",
    ..RefusalCause::ANY
}];

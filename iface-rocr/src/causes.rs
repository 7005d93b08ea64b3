//! Causes of refusals by ROCr, and general causes of refusals, with remedies for ROCr.

use hmem_core::{
    Path,
    cause::{Answer, Facts, Needs, RefusalCause, Step},
    iface::DmaBufMapping,
};

/// Returns true if the options of the kernel are known, and the kernel lacks one that exports need.
fn lacks_options(facts: &Facts) -> bool {
    ["DMABUF_MOVE_NOTIFY", "PCI_P2PDMA"].iter().any(|name| facts.has_option(name) == Some(false))
}

/// Causes of refusals by ROCr. A general cause whose name is in this list is replaced by the entry
/// here, which has a cause or remedy for ROCr.
pub const CAUSES: &[RefusalCause] = &[
    RefusalCause {
        name: "rocr-file-descriptors",
        rank: 5,
        paths: &[Path::DmaBuf],
        steps: &[Step::Export],
        // Code 0x1008 is `HSA_STATUS_ERROR_OUT_OF_RESOURCES`.
        answers: &[Answer::Driver(&[0x1008])],
        cause: "the runtime could not make the dma-buf's file descriptor: the process is out of \
                descriptors, or the kernel out of memory",
        remedy: "raise the limit (`ulimit -n`), or close registrations",
        ..RefusalCause::ANY
    },
    RefusalCause {
        name: "rocr-not-exportable",
        rank: 35,
        paths: &[Path::DmaBuf],
        steps: &[Step::Export],
        // Code 0x1003 is `HSA_STATUS_ERROR_INVALID_ALLOCATION`, and 0x1004 is
        // `HSA_STATUS_ERROR_INVALID_AGENT`.
        answers: &[Answer::Driver(&[0x1003, 0x1004])],
        cause: "the runtime exports only memory of a GPU's pools, and only ranges inside one \
                allocation; it exports no freed memory and no memory of another process",
        remedy: "allocate from a GPU's pool (hipMalloc, hsa_amd_memory_pool_allocate), and free \
                 the memory after the region is closed",
        ..RefusalCause::ANY
    },
    RefusalCause {
        name: "rocr-small-bar",
        rank: 45,
        paths: &[Path::DmaBuf],
        steps: &[Step::Export],
        mapping: Some(DmaBufMapping::Pcie),
        // Code 0x2f is `HSA_STATUS_ERROR_NOT_SUPPORTED`.
        answers: &[Answer::Driver(&[0x2f])],
        cause: "the device's BAR does not hold all of its memory, which the PCIe mapping needs",
        remedy: "none needed if the default mapping works, which is tried next; otherwise enable \
                 Above 4G Decoding and Resizable BAR in the firmware",
        ..RefusalCause::ANY
    },
    RefusalCause {
        cause: "the driver or the device has no PCIe mapping for exports (ROCr from 7.2)",
        ..RefusalCause::NO_PCIE_MAPPING
    },
    RefusalCause {
        name: "rocr-old-runtime",
        rank: 125,
        paths: &[Path::DmaBuf],
        steps: &[Step::Export],
        answers: &[Answer::Errno(&[38])],
        cause: "the HSA runtime is older than its export of dma-bufs",
        remedy: "update ROCm to 5.6 or newer, or load amdgpu's peer-memory client",
        ..RefusalCause::ANY
    },
    RefusalCause {
        name: "rocr-kernel-options",
        rank: 130,
        paths: &[Path::DmaBuf],
        steps: &[Step::Export],
        answers: &[Answer::UNSUPPORTED],
        needs: Needs::some(
            "the kernel was built without DMABUF_MOVE_NOTIFY or PCI_P2PDMA",
            lacks_options,
        ),
        cause: "amdgpu exports dma-bufs to other devices only in kernels with \
                CONFIG_DMABUF_MOVE_NOTIFY and CONFIG_PCI_P2PDMA",
        remedy: "run a kernel that has both options",
        ..RefusalCause::ANY
    },
    RefusalCause {
        remedy: "use a driver that exports (ROCr 5.6 or newer) and device memory; or load a \
                 peer-memory client",
        ..RefusalCause::DEVICE_WITHOUT_DMA_BUF
    },
    RefusalCause {
        paths: &[Path::DmaBuf, Path::PeerMemory, Path::Staged],
        remedy: "give the user (or container) /dev/infiniband/uverbs*, /dev/kfd and \
                 /dev/dri/renderD*, and export for writing",
        ..RefusalCause::DEVICE_FILES
    },
];

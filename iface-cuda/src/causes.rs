//! Causes of refusals by CUDA, and general causes of refusals, with remedies for CUDA.

use hmem_core::{
    ErrorKind, Path,
    cause::{Answer, Facts, Needs, RefusalCause, Step},
};

/// Path below `/` of the file in which the loaded NVIDIA kernel module states its version.
const KERNEL_MODULE: &str = "proc/driver/nvidia/version";

/// Returns true if the loaded kernel modules are known, and none of them is a peer-memory client
/// for NVIDIA GPUs.
fn no_client(facts: &Facts) -> bool {
    ["nvidia_peermem", "nv_peer_mem"].iter().all(|name| facts.has_module(name) == Some(false))
}

/// Returns true if the loaded kernel module is NVIDIA's proprietary variant. The first line of
/// [`KERNEL_MODULE`] for the open variant is `NVRM version: NVIDIA UNIX Open Kernel Module for
/// x86_64  535.161.08 ..`.
fn has_closed_modules(facts: &Facts) -> bool {
    let text = facts.text(KERNEL_MODULE).unwrap_or_default();
    let line = text.lines().next().unwrap_or_default();
    line.contains("Kernel Module") && !line.contains("Open Kernel Module")
}

/// Causes of refusals by CUDA. A general cause whose name is in this list is replaced by the entry
/// here, which has a cause or remedy for CUDA.
pub const CAUSES: &[RefusalCause] = &[
    RefusalCause {
        name: "nvidia-closed-modules",
        rank: 40,
        paths: &[Path::DmaBuf],
        steps: &[Step::Export],
        answers: &[Answer::Driver(&[801]), Answer::UNSUPPORTED],
        needs: Needs::some("NVIDIA's kernel modules are the closed ones", has_closed_modules),
        cause: "the closed variant of NVIDIA's kernel modules exports no dma-bufs",
        remedy: "install the open kernel modules (Turing or newer, driver 515 or newer), or load \
                 nvidia-peermem",
        ..RefusalCause::ANY
    },
    RefusalCause {
        cause: "the driver or the device has no PCIe mapping for exports (CUDA from 12.8)",
        ..RefusalCause::NO_PCIE_MAPPING
    },
    RefusalCause {
        cause: "the range was mapped by hand (VMM, expandable segments) from physical memory that \
                was not created for RDMA, or spans a hole between two mappings",
        // PyTorch sets the flag where the device has GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED. Its
        // pull request 153261 was merged in May 2025, between the branches of 2.7 and 2.8, and
        // 189941 in July 2026, between those of 2.13 and 2.14.
        remedy: "create the physical memory as RDMA capable (gpuDirectRDMACapable = 1 in \
                 CUmemAllocationProp; the attribute IS_GPU_DIRECT_RDMA_CAPABLE of a pointer shows \
                 it); PyTorch does so for expandable segments from 2.8 on (pull request 153261) \
                 and for symmetric memory from 2.14 on (189941), without a setting: update \
                 PyTorch and keep expandable_segments; register mapped ranges only, or let a \
                 SparseRegion follow them",
        ..RefusalCause::VMM_RANGE
    },
    RefusalCause {
        remedy: "allocate with the plain allocator (cuMemAlloc), or from a pool with \
                 gpuDirectRDMACapable in CUmemPoolProps (CUDA 13 or newer), which only dma-bufs \
                 reach",
        ..RefusalCause::STREAM_ORDERED_POOL
    },
    RefusalCause {
        name: "wrong-context",
        rank: 90,
        paths: &[Path::DmaBuf, Path::PeerMemory],
        steps: &[Step::Segments, Step::ExportWhole, Step::Export],
        answers: &[Answer::Driver(&[3, 4, 201, 709])],
        cause: "the driver does not know the calling thread's context: none is current, it was \
                destroyed, or the process is a fork of the one that made it",
        remedy: "use the memory while the context that allocated it lives, and register after a \
                 fork, not before it",
        ..RefusalCause::ANY
    },
    RefusalCause {
        remedy: "use a driver that exports (CUDA 11.7 or newer) and device memory; or load \
                 nvidia-peermem",
        ..RefusalCause::DEVICE_WITHOUT_DMA_BUF
    },
    RefusalCause {
        name: "peer-memory-module-missing",
        rank: 200,
        paths: &[Path::PeerMemory],
        steps: &[Step::Import, Step::Register],
        answers: &[
            Answer::Errno(&[14]),
            Answer::UNSUPPORTED,
            Answer::Kind(&[ErrorKind::BadAddress]),
        ],
        needs: Needs::some("no peer-memory client is loaded", no_client),
        cause: "no peer-memory client is loaded, so that the kernel treats the device address as \
                unmapped host memory",
        remedy: "load the client (`modprobe nvidia-peermem`; it needs a kernel or RDMA stack with \
                 peer-memory clients, such as MLNX_OFED), or use dma-buf",
        ..RefusalCause::ANY
    },
    RefusalCause {
        paths: &[Path::DmaBuf, Path::PeerMemory, Path::Staged],
        remedy: "give the user (or container) /dev/infiniband/uverbs* and /dev/nvidia*, and \
                 export for writing",
        ..RefusalCause::DEVICE_FILES
    },
    // Code 101 is `CUDA_ERROR_INVALID_DEVICE`, which has the kind InvalidArgument. The general rule
    // matches the kind Unavailable.
    RefusalCause { answers: &[Answer::Driver(&[101])], ..RefusalCause::DEVICE_LOST },
];

#[cfg(test)]
mod tests {
    use super::*;

    /// DIAG-03: the remedy for a refused range of VMM memory names the first PyTorch release that
    /// creates RDMA-capable memory, and the pointer attribute that shows this ability.
    #[test]
    fn vmm_range_remedy_names_the_pytorch_release_and_the_attribute_to_check() {
        let named = |rule: &&RefusalCause| rule.name == RefusalCause::VMM_RANGE.name;
        let rule = CAUSES.iter().find(named).expect("a rule");
        for word in ["PyTorch", "2.8", "153261", "IS_GPU_DIRECT_RDMA_CAPABLE", "SparseRegion"] {
            assert!(rule.remedy.contains(word), "{word}: {}", rule.remedy);
        }
        let advises_against = rule.remedy.contains("PYTORCH_CUDA_ALLOC_CONF");
        assert!(!advises_against, "such segments need not be switched off: {}", rule.remedy);
    }
}

//! The causes of refusals that only this driver gives, and general causes with this driver's
//! remedies.

use hmem_core::{
    AllocationKind, ErrorKind, Path,
    cause::{Answer, Facts, Needs, RefusalCause, Step},
    iface::DmaBufMapping,
};

/// The kernel module's statement about itself, if it is loaded.
const KERNEL_MODULE: &str = "proc/driver/nvidia/version";

/// The first line is `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.161.08 ..`; that
/// of the closed variant lacks the word.
fn has_closed_modules(facts: &Facts) -> bool {
    let text = facts.text(KERNEL_MODULE).unwrap_or_default();
    let line = text.lines().next().unwrap_or_default();
    line.contains("Kernel Module") && !line.contains("Open Kernel Module")
}

/// The causes of refusals that CUDA's driver gives.
pub const CAUSES: &[RefusalCause] = &[
    RefusalCause {
        name: "nvidia-closed-modules",
        rank: 40,
        paths: &[Path::DmaBuf],
        steps: &[Step::Export],
        answers: &[Answer::Driver(&[801]), Answer::UNSUPPORTED],
        needs: Needs::some("NVIDIA's kernel modules are the closed ones", has_closed_modules),
        cause: "the closed variant of NVIDIA's kernel modules exports no dma-bufs",
        remedy: "install the open kernel modules (Turing or newer, driver 515 or newer), or load nvidia-peermem",
        ..RefusalCause::ANY
    },
    RefusalCause {
        name: "no-pcie-mapping",
        rank: 50,
        paths: &[Path::DmaBuf],
        steps: &[Step::Export],
        mapping: Some(DmaBufMapping::Pcie),
        answers: &[Answer::UNSUPPORTED, Answer::Kind(&[ErrorKind::InvalidArgument])],
        cause: "the driver or the device has no PCIe mapping for exports (CUDA from 12.8)",
        remedy: "none needed if the default mapping works, which is tried next; otherwise update \
                 the driver",
        ..RefusalCause::ANY
    },
    RefusalCause {
        name: "vmm-range",
        rank: 60,
        paths: &[Path::DmaBuf, Path::PeerMemory],
        steps: &[Step::Segments, Step::Export],
        kind: Some(AllocationKind::Virtual),
        answers: &[Answer::Kind(&[
            ErrorKind::Unsupported,
            ErrorKind::InvalidArgument,
            ErrorKind::OutOfBounds,
        ])],
        cause: "the range was mapped by hand (VMM, expandable segments) from physical memory that was not created for RDMA, or \
                spans a hole between two mappings",
        remedy: "create the physical memory as RDMA capable (gpuDirectRDMACapable = 1 in CUmemAllocationProp); in PyTorch, turn \
                 expandable_segments off",
        ..RefusalCause::ANY
    },
    RefusalCause {
        name: "stream-ordered-pool",
        rank: 70,
        paths: &[Path::DmaBuf, Path::PeerMemory],
        steps: &[Step::Segments, Step::Export, Step::Register],
        kind: Some(AllocationKind::StreamOrdered),
        answers: &[
            Answer::Errno(&[14, 22]),
            Answer::Kind(&[ErrorKind::Unsupported, ErrorKind::InvalidArgument]),
        ],
        cause: "the driver does not export memory of this stream-ordered pool: the pool was not \
                created for RDMA, or the driver has no such pools",
        remedy: "allocate what is registered with the plain allocator; where the driver has RDMA for pools (gpuDirectRDMACapable in \
                 CUmemPoolProps, CUDA 13), from one made with it, which only dma-bufs reach",
        ..RefusalCause::ANY
    },
    RefusalCause {
        name: "wrong-context",
        rank: 90,
        paths: &[Path::DmaBuf, Path::PeerMemory],
        steps: &[Step::Segments, Step::ExportWhole, Step::Export],
        answers: &[Answer::Driver(&[3, 4, 201, 709])],
        cause: "the driver does not know the calling thread's context: none is current, it was destroyed, or the process is a fork \
                of the one that made it",
        remedy: "use the memory while the context that allocated it lives, and register after a fork, not before it",
        ..RefusalCause::ANY
    },
    RefusalCause {
        name: "device-without-dma-buf",
        rank: 160,
        paths: &[Path::DmaBuf],
        steps: &[Step::Export],
        answers: &[Answer::Errno(&[38, 95]), Answer::UNSUPPORTED],
        cause: "the device, its driver or this kind of memory has no dma-buf export",
        remedy: "use a driver that exports (CUDA 11.7 or newer) and device memory; or load nvidia-peermem",
        ..RefusalCause::ANY
    },
    RefusalCause {
        name: "device-files",
        rank: 310,
        paths: &[Path::DmaBuf, Path::PeerMemory, Path::Staged],
        steps: &[Step::Segments, Step::ExportWhole, Step::Export, Step::Register],
        answers: &[
            Answer::Errno(&[1, 13]),
            Answer::Kind(&[ErrorKind::PermissionDenied, ErrorKind::AccessDenied]),
        ],
        cause: "the process may not use the device's files, or the buffer was opened read-only",
        remedy: "give the user (or container) /dev/infiniband/uverbs* and /dev/nvidia*, and export for writing",
        ..RefusalCause::ANY
    },
    // `CUDA_ERROR_INVALID_DEVICE`: the general row knows a lost device by the kind `Unavailable`.
    RefusalCause {
        name: "device-lost",
        rank: 320,
        paths: &[Path::DmaBuf, Path::PeerMemory],
        steps: &[Step::Segments, Step::ExportWhole, Step::Export],
        answers: &[Answer::Driver(&[101])],
        cause: "the device fell off the bus, was reset, or was taken from this process",
        remedy: "look at the kernel log (`dmesg`), and restart the process when the device answers",
        ..RefusalCause::ANY
    },
];

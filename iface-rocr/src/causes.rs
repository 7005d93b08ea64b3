//! The causes of refusals that only this driver gives, and general causes with this driver's
//! remedies.

use hmem_core::{
    ErrorKind, Path,
    cause::{Answer, Facts, Needs, RefusalCause, Step},
    iface::DmaBufMapping,
};

fn lacks_options(facts: &Facts) -> bool {
    ["DMABUF_MOVE_NOTIFY", "PCI_P2PDMA"].iter().any(|name| facts.has_option(name) == Some(false))
}

/// The causes of refusals that ROCr's driver gives.
pub const CAUSES: &[RefusalCause] = &[
    RefusalCause {
        name: "rocr-file-descriptors",
        rank: 5,
        paths: &[Path::DmaBuf],
        steps: &[Step::Export],
        // `HSA_STATUS_ERROR_OUT_OF_RESOURCES`
        answers: &[Answer::Driver(&[0x1008])],
        cause: "the runtime could not make the dma-buf's file descriptor: the process is out of them, or the kernel out of memory",
        remedy: "raise the limit (`ulimit -n`), or close registrations",
        ..RefusalCause::ANY
    },
    RefusalCause {
        name: "rocr-not-exportable",
        rank: 35,
        paths: &[Path::DmaBuf],
        steps: &[Step::Export],
        // `HSA_STATUS_ERROR_INVALID_ALLOCATION`, `HSA_STATUS_ERROR_INVALID_AGENT`
        answers: &[Answer::Driver(&[0x1003, 0x1004])],
        cause: "the runtime exports memory of a GPU's pools only, whole in one allocation: not what was freed meanwhile, and not \
                what another process shares",
        remedy: "allocate from a GPU's pool (hipMalloc, hsa_amd_memory_pool_allocate) and register before it is freed",
        ..RefusalCause::ANY
    },
    RefusalCause {
        name: "rocr-small-bar",
        rank: 45,
        paths: &[Path::DmaBuf],
        steps: &[Step::Export],
        mapping: Some(DmaBufMapping::Pcie),
        // `HSA_STATUS_ERROR_NOT_SUPPORTED`
        answers: &[Answer::Driver(&[0x2f])],
        cause: "the device's BAR does not hold all of its memory, which the PCIe mapping needs",
        remedy: "nothing where the default mapping works, which is tried next; else switch resizable BAR and decoding above 4 GiB \
                 on in the firmware",
        ..RefusalCause::ANY
    },
    RefusalCause {
        name: "no-pcie-mapping",
        rank: 50,
        paths: &[Path::DmaBuf],
        steps: &[Step::Export],
        mapping: Some(DmaBufMapping::Pcie),
        answers: &[Answer::UNSUPPORTED, Answer::Kind(&[ErrorKind::InvalidArgument])],
        cause: "the driver or the device has no PCIe mapping for exports (ROCr from 7.2)",
        remedy: "none needed if the default mapping works, which is tried next; otherwise update \
                 the driver",
        ..RefusalCause::ANY
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
        cause: "amdgpu exports dma-bufs to other devices only in kernels with CONFIG_DMABUF_MOVE_NOTIFY and CONFIG_PCI_P2PDMA",
        remedy: "run a kernel that has both options",
        ..RefusalCause::ANY
    },
    RefusalCause {
        name: "device-without-dma-buf",
        rank: 160,
        paths: &[Path::DmaBuf],
        steps: &[Step::Export],
        answers: &[Answer::Errno(&[38, 95]), Answer::UNSUPPORTED],
        cause: "the device, its driver or this kind of memory has no dma-buf export",
        remedy: "use a driver that exports (ROCr 5.6 or newer) and device memory; or load a peer-memory client",
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
        remedy: "give the user (or container) /dev/infiniband/uverbs*, /dev/kfd and /dev/dri/renderD*, and export for writing",
        ..RefusalCause::ANY
    },
];

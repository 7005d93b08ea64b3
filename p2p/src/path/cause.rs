//! The causes that hold for the memory of any iface. Those of one driver are its iface's
//! ([`Iface::causes`](hmem_core::Iface::causes)), as are the words of its vendor: an iface's row
//! with the name and rank of a general one is preferred to it.
//!
//! `docs/causes.md` is all of them as a page; a test compares the two.

use hmem_core::{
    ErrorKind, Path,
    cause::{Answer, Facts, Needs, RefusalCause, Step},
};

use crate::topology::PEER_MEMORY;

const DMA_BUF: &[Path] = &[Path::DmaBuf];
const PEER: &[Path] = &[Path::PeerMemory];
const DIRECT: &[Path] = &[Path::DmaBuf, Path::PeerMemory];
const HOST: &[Path] = &[Path::PlainHost, Path::Staged];
const EVERY: &[Path] = &[Path::PlainHost, Path::DmaBuf, Path::PeerMemory, Path::Staged];
const EXPORT: &[Step] = &[Step::Export];
/// Steps that export a range of one segment, or one of several whose segments are exported by
/// themselves.
const ANY_EXPORT: &[Step] = &[Step::ExportWhole, Step::Export];
const SEGMENTS_OR_EXPORT: &[Step] = &[Step::Segments, Step::ExportWhole, Step::Export];
const EXPORT_OR_REGISTER: &[Step] = &[Step::ExportWhole, Step::Export, Step::Register];
const NOT_IMPORT: &[Step] = &[Step::Segments, Step::ExportWhole, Step::Export, Step::Register];
const REGISTER: &[Step] = &[Step::Register];
const IMPORT_OR_REGISTER: &[Step] = &[Step::Import, Step::Register];
const BAR_FULL: &[Answer] = &[Answer::Errno(&[12, 28]), Answer::Kind(&[ErrorKind::OutOfResources])];
const NOT_REACHABLE: &[Answer] =
    &[Answer::Errno(&[524, 121]), Answer::Kind(&[ErrorKind::Unreachable])];

/// The cause that holds only while the default mapping is not refused as well.
pub(super) const NO_PCIE_MAPPING: &str = RefusalCause::NO_PCIE_MAPPING.name;

/// The fields that most entries share: no further condition.
const ANY: RefusalCause = RefusalCause::ANY;

fn old_kernel(facts: &Facts) -> bool {
    facts.kernel.is_some_and(|version| version < (5, 12))
}

fn no_client(facts: &Facts) -> bool {
    PEER_MEMORY.iter().all(|name| facts.has_module(name) == Some(false))
}

/// Every general cause, in the order of the ranks: special cases stand before the general.
pub const CAUSES: &[RefusalCause] = &[
    RefusalCause {
        name: "file-descriptors",
        rank: 10,
        paths: EVERY,
        steps: NOT_IMPORT,
        answers: &[Answer::Errno(&[24, 23])],
        cause: "the process, or the machine, has no file descriptor left: each export is one as long as it is registered",
        remedy: "raise the limit (ulimit -n, LimitNOFILE= in systemd, fs.file-max), or register larger ranges in fewer regions",
        ..ANY
    },
    RefusalCause {
        name: "kernel-without-dma-buf",
        rank: 20,
        paths: DMA_BUF,
        steps: IMPORT_OR_REGISTER,
        answers: &[Answer::Errno(&[38, 95]), Answer::UNSUPPORTED],
        needs: Needs::some("the kernel is older than 5.12", old_kernel),
        cause: "the kernel is older than the dma-buf registration of its RDMA core, which came with Linux 5.12",
        remedy: "run Linux 5.12 or newer, or a vendor's RDMA stack that has it (MLNX_OFED 5.5), or load a peer-memory client",
        ..ANY
    },
    RefusalCause {
        name: "nic-driver-without-dma-buf",
        rank: 30,
        paths: DMA_BUF,
        steps: IMPORT_OR_REGISTER,
        answers: &[Answer::Errno(&[38, 95]), Answer::UNSUPPORTED],
        cause: "the NIC's driver, in the kernel or in libibverbs, does not register dma-bufs",
        remedy: "use a NIC whose driver does (mlx5, efa, irdma, bnxt_re) with rdma-core 34 or newer, or load a peer-memory client",
        ..ANY
    },
    RefusalCause::NO_PCIE_MAPPING,
    RefusalCause::VMM_RANGE,
    RefusalCause::STREAM_ORDERED_POOL,
    RefusalCause {
        name: "segment-not-exportable",
        rank: 80,
        paths: DIRECT,
        steps: &[Step::Segments],
        answers: &[Answer::UNSUPPORTED],
        cause: "the driver says of a physical segment of the range that it cannot be exported",
        remedy: "allocate it as RDMA capable, or register the part of the range that is",
        ..ANY
    },
    RefusalCause {
        name: "freed-or-outside",
        rank: 100,
        paths: DIRECT,
        steps: SEGMENTS_OR_EXPORT,
        answers: &[Answer::Kind(&[ErrorKind::OutOfBounds, ErrorKind::BadState])],
        cause: "the range is not, or no longer, wholly inside one allocation",
        remedy: "register inside one allocation, and close the region before the allocation is freed",
        ..ANY
    },
    RefusalCause {
        name: "bar-small",
        rank: 110,
        paths: DIRECT,
        steps: ANY_EXPORT,
        answers: BAR_FULL,
        needs: Needs::some("the device's BAR has at most 256 MiB", |facts| {
            facts.bar.is_some_and(|bytes| bytes <= 256 << 20)
        }),
        cause: "the firmware gave the device a small BAR, of which most is taken: only what it maps can be exported",
        remedy: "switch Above 4G Decoding and Resizable BAR on in the firmware, or export less at a time",
        ..ANY
    },
    RefusalCause {
        name: "bar-full",
        rank: 120,
        paths: DIRECT,
        steps: ANY_EXPORT,
        answers: BAR_FULL,
        cause: "the device's BAR has no room left to map the range: everything exported occupies it, by each NIC",
        remedy: "close regions or register less at a time; enable the large BAR (Above 4G Decoding and Resizable BAR in the \
                 firmware)",
        ..ANY
    },
    RefusalCause {
        name: "segments-not-in-one",
        rank: 150,
        paths: DMA_BUF,
        steps: &[Step::ExportWhole],
        answers: &[Answer::UNSUPPORTED, Answer::Kind(&[ErrorKind::InvalidArgument])],
        cause: "the driver makes no one dma-buf of several mappings, or their physical memory differs in device or properties",
        remedy: "nothing where each segment is exported by itself, which is tried next; for one key over the range, create all \
                 of its physical memory with the same properties",
        ..ANY
    },
    RefusalCause::DEVICE_WITHOUT_DMA_BUF,
    RefusalCause {
        name: "acs",
        rank: 170,
        paths: DIRECT,
        steps: EXPORT_OR_REGISTER,
        answers: NOT_REACHABLE,
        needs: Needs::some("ACS redirects requests between the two", |facts| {
            facts.acs_redirects == Some(true)
        }),
        cause: "ACS on a PCIe bridge between device and NIC sends their requests to the root complex, which does not pass them on",
        remedy: "switch ACS redirection off on the bridges between the two (firmware, or setpci ECAP_ACS+6.w=0 at boot); in a \
                 virtual machine let the NIC use ATS",
        ..ANY
    },
    RefusalCause {
        name: "iommu",
        rank: 180,
        paths: DIRECT,
        steps: EXPORT_OR_REGISTER,
        answers: NOT_REACHABLE,
        needs: Needs::some("the IOMMU translates for the NIC or the device", |facts| {
            facts.iommu_translates == Some(true)
        }),
        cause: "the IOMMU translates the NIC's addresses and has no mapping of the device's BAR for it",
        remedy: "boot with iommu=pt (or intel_iommu=off, amd_iommu=off), or pass both devices into the guest in one group",
        ..ANY
    },
    RefusalCause {
        name: "device-not-reachable-from-nic",
        rank: 190,
        paths: DIRECT,
        steps: EXPORT_OR_REGISTER,
        answers: NOT_REACHABLE,
        cause: "the NIC cannot reach the device over PCIe, or the mapping is of the wrong type (a coherent link's instead of the \
                BAR's)",
        remedy: "use a NIC under the same PCIe switch or root port as the device (`hmem topo` shows them), or the PCIe mapping \
                 where the driver has it",
        ..ANY
    },
    RefusalCause {
        name: "peer-memory-module-missing",
        rank: 200,
        paths: PEER,
        steps: IMPORT_OR_REGISTER,
        answers: &[
            Answer::Errno(&[14]),
            Answer::UNSUPPORTED,
            Answer::Kind(&[ErrorKind::BadAddress]),
        ],
        needs: Needs::some("no peer-memory client is loaded", no_client),
        cause: "no peer-memory client is loaded, so that the kernel takes the device address for one of unmapped host memory",
        remedy: "load it (modprobe nvidia-peermem; it needs a kernel or RDMA stack with peer-memory clients, such as MLNX_OFED), or \
                 use dma-buf",
        ..ANY
    },
    RefusalCause {
        name: "peer-memory-range",
        rank: 210,
        paths: PEER,
        steps: REGISTER,
        answers: &[Answer::Errno(&[14, 22]), Answer::Kind(&[ErrorKind::BadAddress])],
        cause: "the peer-memory client does not know the range as memory of its device: it was freed, was mapped by hand, or \
                belongs to another process",
        remedy: "register whole allocations of the plain allocator while they live",
        ..ANY
    },
    RefusalCause {
        name: "nic-without-peer-memory",
        rank: 220,
        paths: PEER,
        steps: IMPORT_OR_REGISTER,
        answers: &[Answer::UNSUPPORTED],
        cause: "the NIC's RDMA stack has no peer-memory clients",
        remedy: "use dma-buf, or an RDMA stack with peer-memory clients (MLNX_OFED)",
        ..ANY
    },
    RefusalCause {
        name: "device-without-peer-memory",
        rank: 230,
        paths: PEER,
        steps: EXPORT,
        answers: &[Answer::UNSUPPORTED],
        cause: "no peer-memory client exists for this device or kind of memory",
        remedy: "use dma-buf",
        ..ANY
    },
    RefusalCause {
        name: "memlock",
        rank: 240,
        paths: HOST,
        answers: &[Answer::Errno(&[1, 12]), Answer::Kind(&[ErrorKind::OutOfResources])],
        needs: Needs::some("the locked-memory limit is finite", |facts| {
            facts.memlock.is_some_and(|limit| limit != u64::MAX)
        }),
        cause: "the process may lock no more memory (RLIMIT_MEMLOCK); each registration counts its pages, the same pages again too",
        remedy: "raise the limit (ulimit -l unlimited, memlock in limits.conf, LimitMEMLOCK= in systemd, --ulimit memlock in a \
                 container)",
        ..ANY
    },
    RefusalCause {
        name: "rdma-cgroup",
        rank: 250,
        paths: EVERY,
        answers: &[Answer::Errno(&[11])],
        cause: "the process's control group may have no more RDMA objects (rdma.max)",
        remedy: "raise hca_object in rdma.max of the group, or register larger ranges in fewer regions",
        ..ANY
    },
    RefusalCause {
        name: "nic-tables-full",
        rank: 260,
        paths: EVERY,
        answers: &[Answer::Errno(&[12, 28]), Answer::Kind(&[ErrorKind::OutOfResources])],
        cause: "the NIC has no region or translation entry left, or the kernel no memory for them",
        remedy: "close regions, register larger ranges in fewer regions, or use huge pages; raise the driver's table sizes",
        ..ANY
    },
    RefusalCause {
        name: "beyond-the-export",
        rank: 270,
        paths: DMA_BUF,
        answers: &[
            Answer::Errno(&[22]),
            Answer::Kind(&[ErrorKind::InvalidArgument, ErrorKind::OutOfBounds]),
        ],
        cause: "the range reaches past the end of the dma-buf, the fd is no dma-buf, or address and offset differ within a page",
        remedy: "give the offset in the dma-buf and not in the allocation, and check the length against the exported buffer",
        ..ANY
    },
    RefusalCause {
        name: "dma-buf-not-mappable",
        rank: 280,
        paths: DMA_BUF,
        answers: &[Answer::Errno(&[14]), Answer::Kind(&[ErrorKind::BadAddress])],
        cause: "the exporter could not give the NIC's driver the pages: they moved away, or the device is suspended",
        remedy: "keep the device awake and its memory resident (not managed) as long as it is registered",
        ..ANY
    },
    RefusalCause {
        name: "bad-host-pages",
        rank: 290,
        paths: HOST,
        answers: &[Answer::Errno(&[14]), Answer::Kind(&[ErrorKind::BadAddress])],
        cause: "part of the range is not mapped, is protected, is mapped read-only, or lies past the end of its file",
        remedy: "map the whole range before registering it, writable if the NIC is to write",
        ..ANY
    },
    RefusalCause {
        name: "closed-descriptor",
        rank: 300,
        paths: DMA_BUF,
        answers: &[Answer::Errno(&[9])],
        cause: "the file descriptor is not open",
        remedy: "keep the dma-buf open until the registration returns",
        ..ANY
    },
    RefusalCause::DEVICE_FILES,
    RefusalCause::DEVICE_LOST,
    RefusalCause {
        name: "nic-lost",
        rank: 330,
        paths: EVERY,
        answers: &[Answer::Errno(&[5, 19]), Answer::Kind(&[ErrorKind::Unavailable])],
        cause: "the NIC went down or was taken away while it was asked",
        remedy: "look at the kernel log (dmesg), and open a new domain once the NIC is back",
        ..ANY
    },
    RefusalCause {
        name: "nic-takes-no-copies",
        rank: 340,
        paths: &[Path::Staged],
        steps: IMPORT_OR_REGISTER,
        answers: &[Answer::UNSUPPORTED],
        cause: "hardware cannot reach memory through copies by itself",
        remedy: "make a direct way work, or copy through a registered host buffer (hmem_p2p::staging)",
        ..ANY
    },
];

//! Causes of refusals that are the same for the memory of every iface.
//!
//! Each iface adds the causes of its driver ([`Iface::causes`](hmem_core::Iface::causes)). A cause
//! of an iface may have the name and rank of a general cause, with the vendor's own texts. If both
//! fit, the cause of the iface is reported.
//!
//! `docs/causes.md` lists all causes. A test compares it with the tables.

use std::collections::BTreeSet;

use hmem_core::{
    Access, AllocationKind, Error, ErrorKind, Path, ProbableCause,
    cause::{Answer, CoherentLink, Facts, IpcLock, Needs, RefusalCause, RefusalContext, Step},
    iface::DmaBufMapping,
};

use super::cgroup::{self, RdmaLimit};
use crate::topology::PEER_MEMORY;

const DMA_BUF: &[Path] = &[Path::DmaBuf];
const PEER: &[Path] = &[Path::PeerMemory];
const DIRECT: &[Path] = &[Path::DmaBuf, Path::PeerMemory];
const HOST: &[Path] = &[Path::PlainHost, Path::Staged];
const EVERY: &[Path] = &[Path::PlainHost, Path::DmaBuf, Path::PeerMemory, Path::Staged];
const EXPORT: &[Step] = &[Step::Export];
/// The steps that export memory as one dma-buf: [`Step::ExportWhole`] for a range of several
/// physical segments, and [`Step::Export`] for a single segment.
const ANY_EXPORT: &[Step] = &[Step::ExportWhole, Step::Export];
const SEGMENTS_OR_EXPORT: &[Step] = &[Step::Segments, Step::ExportWhole, Step::Export];
const EXPORT_OR_REGISTER: &[Step] = &[Step::ExportWhole, Step::Export, Step::Register];
/// The steps at which a refusal can mean that the NIC does not reach the device.
const REACH: &[Step] = &[Step::ExportWhole, Step::Export, Step::Register, Step::Transfer];
const NOT_IMPORT: &[Step] = &[Step::Segments, Step::ExportWhole, Step::Export, Step::Register];
const REGISTER: &[Step] = &[Step::Register];
const IMPORT_OR_REGISTER: &[Step] = &[Step::Import, Step::Register];
const BAR_FULL: &[Answer] = &[Answer::Errno(&[12, 28]), Answer::Kind(&[ErrorKind::OutOfResources])];
const NOT_REACHABLE: &[Answer] =
    &[Answer::Errno(&[524, 121]), Answer::Kind(&[ErrorKind::Unreachable])];

/// Errors with which the kernel refuses to pin pages beyond the locked-memory limit: EPERM for a
/// limit of 0, otherwise ENOMEM.
const MEMLOCK: &[Answer] = &[Answer::Errno(&[1, 12]), Answer::Kind(&[ErrorKind::OutOfResources])];
const NO_NODE: &[Answer] = &[Answer::Errno(&[2, 6, 19]), Answer::Kind(&[ErrorKind::Unavailable])];
const NO_ACCESS: &[Answer] = &[
    Answer::Errno(&[1, 13]),
    Answer::Kind(&[ErrorKind::PermissionDenied, ErrorKind::AccessDenied]),
];
/// Errors of drivers for a device that the process may not open. Some drivers report such a device
/// as missing.
const NO_ACCESS_OR_DEVICE: &[Answer] = &[
    Answer::Errno(&[1, 13]),
    Answer::Kind(&[ErrorKind::PermissionDenied, ErrorKind::AccessDenied, ErrorKind::Unavailable]),
];

/// Name of the cause for a refused PCIe mapping of a dma-buf. The cause applies only if the default
/// mapping works.
pub(super) const NO_PCIE_MAPPING: &str = RefusalCause::NO_PCIE_MAPPING.name;

/// A cause without conditions. Entries of [`CAUSES`] take their unset fields from it.
const ANY: RefusalCause = RefusalCause::ANY;

fn old_kernel(facts: &Facts) -> bool {
    facts.kernel.is_some_and(|version| version < (5, 12))
}

fn no_client(facts: &Facts) -> bool {
    PEER_MEMORY.iter().all(|name| facts.has_module(name) == Some(false))
}

/// Returns true if the process has a locked-memory limit that the request may exceed.
fn may_exceed_memlock(facts: &Facts) -> bool {
    has_memlock_limit(facts) && facts.memlock_has_room() != Some(true)
}

fn has_memlock_limit(facts: &Facts) -> bool {
    facts.memlock.is_some_and(|limit| limit != u64::MAX)
}

fn memlock_use(facts: &Facts) -> Option<String> {
    let mut text = format!("the limit is {} bytes", facts.memlock?);
    if let Some(pinned) = facts.pinned {
        text += &format!(", of which the process has pinned {pinned}");
    }
    if let Some(request) = facts.request {
        text += &format!("; the request needs {}", request.len);
    }
    Some(text)
}

fn inert_ipc_lock(facts: &Facts) -> Option<String> {
    let state = match facts.ipc_lock? {
        IpcLock::UserNamespace => "the process has it in a user namespace of its own",
        IpcLock::NotInherited => {
            "it is in the bounding set of the container but not in the effective set of the \
             process, which does not run as root"
        }
        _ => return None,
    };
    Some(format!("{state}; {}", memlock_use(facts)?))
}

fn regions_of_domain(facts: &Facts) -> Option<String> {
    let request = facts.request?;
    Some(format!(
        "this domain has {} regions, and the NIC has room for {}",
        request.regions, request.max_regions
    ))
}

fn rdma_group(facts: &Facts) -> Option<String> {
    match cgroup::rdma_limit(facts) {
        RdmaLimit::Reached(evidence) => Some(evidence),
        RdmaLimit::NotReached | RdmaLimit::Unknown => None,
    }
}

fn memory_only_nodes(facts: &Facts) -> Option<String> {
    let nodes: Vec<_> = facts.memory_only_nodes.iter().map(u32::to_string).collect();
    (!nodes.is_empty()).then(|| format!("nodes {}", nodes.join(", ")))
}

/// Returns the device nodes in `all` that `step` concerns, as a list of paths: nodes of NICs if
/// `step` opens a NIC, and otherwise nodes of other devices. Returns `None` if `all` has no such
/// node.
fn nodes(all: &BTreeSet<String>, step: Step) -> Option<String> {
    let of_step = |node: &&String| node.starts_with("/dev/infiniband/") == (step == Step::OpenNic);
    let nodes: Vec<_> = all.iter().filter(of_step).map(String::as_str).collect();
    (!nodes.is_empty()).then(|| nodes.join(", "))
}

/// Returns the probable causes of a refusal, out of the causes of an iface and the general causes.
/// The most probable cause comes first. `facts` reads many files, so this function calls `facts`
/// only if a cause that may fit depends on the machine.
pub(super) fn causes_of(
    of_iface: &[RefusalCause],
    context: &RefusalContext<'_>,
    facts: impl FnOnce() -> Facts,
) -> Vec<ProbableCause> {
    let rows = || of_iface.iter().chain(CAUSES).filter(|row| row.may_fit(context));
    let depends = rows().any(|row| row.needs.is_some() || row.detail.is_some());
    let facts = if depends { facts() } else { Facts::default() };
    let ranked = RefusalCause::ranked(rows(), context, &facts);
    ranked.into_iter().map(|row| row.explain(&facts)).collect()
}

/// Returns the probable causes of an error at `step` of a registration of host memory.
pub(super) fn host_causes(
    step: Step,
    error: &Error,
    facts: impl FnOnce() -> Facts,
) -> Vec<ProbableCause> {
    let context = RefusalContext {
        path: Path::PlainHost,
        step,
        kind: AllocationKind::System,
        mapping: DmaBufMapping::Default,
        error,
    };
    causes_of(&[], &context, facts)
}

/// The causes that apply to every iface, sorted by rank. A specific cause comes before a less
/// specific one.
pub const CAUSES: &[RefusalCause] = &[
    RefusalCause {
        name: "file-descriptors",
        rank: 10,
        paths: EVERY,
        steps: NOT_IMPORT,
        answers: &[Answer::Errno(&[24, 23])],
        cause: "the process or the machine has no file descriptor left; each export holds one \
                while it is registered",
        remedy: "raise the limit (`ulimit -n`, LimitNOFILE= in systemd, `sysctl fs.file-max`), or \
                 register larger ranges in fewer regions",
        ..ANY
    },
    RefusalCause {
        name: "kernel-without-dma-buf",
        rank: 20,
        paths: DMA_BUF,
        steps: IMPORT_OR_REGISTER,
        answers: &[Answer::Errno(&[38, 95]), Answer::UNSUPPORTED],
        needs: Needs::some("the kernel is older than 5.12", old_kernel),
        cause: "the kernel is older than Linux 5.12, the first with dma-buf registration in its \
                RDMA core",
        remedy: "run Linux 5.12 or newer, or a vendor's RDMA stack with dma-buf registration \
                 (MLNX_OFED 5.5), or load a peer-memory client",
        ..ANY
    },
    RefusalCause {
        name: "nic-without-data-direct",
        rank: 22,
        paths: DMA_BUF,
        steps: &[Step::Import],
        mapping: Some(DmaBufMapping::DataDirect),
        answers: &[Answer::UNSUPPORTED],
        cause: "the NIC has no Data Direct function, or its driver does not report one",
        remedy: "use an mlx5 NIC with a Data Direct function (`hmem topo` shows it), with Linux \
                 6.12 and rdma-core 54 or newer, or leave dma-buf-data-direct out of the list",
        ..ANY
    },
    RefusalCause {
        name: "data-direct-unaligned",
        rank: 24,
        paths: DMA_BUF,
        steps: REGISTER,
        mapping: Some(DmaBufMapping::DataDirect),
        answers: &[Answer::Errno(&[95]), Answer::UNSUPPORTED],
        cause: "Data Direct registers only memory that begins at a boundary of the kernel's pages \
                (64 KiB on many machines with Grace CPUs)",
        remedy: "none needed if another mapping works, which is tried next; for Data Direct, let \
                 the registered range begin at a page boundary",
        ..ANY
    },
    RefusalCause {
        name: "data-direct-function",
        rank: 26,
        paths: DMA_BUF,
        steps: &[Step::Register, Step::Transfer],
        mapping: Some(DmaBufMapping::DataDirect),
        answers: &[Answer::Errno(&[19, 22, 121, 524]), Answer::Kind(&[ErrorKind::Unreachable])],
        cause: "the NIC's Data Direct function does not reach the device, or is not bound to the \
                driver; only a function in the device's PCI domain reaches it",
        remedy: "leave dma-buf-data-direct out of DomainAttr::direct_paths and HMEM_DIRECT_PATHS, \
                 or use the NIC whose Data Direct function is below the device's switch (`hmem \
                 topo` shows it)",
        ..ANY
    },
    RefusalCause {
        name: "nic-driver-without-dma-buf",
        rank: 30,
        paths: DMA_BUF,
        steps: IMPORT_OR_REGISTER,
        answers: &[Answer::Errno(&[38, 95]), Answer::UNSUPPORTED],
        cause: "the NIC's driver, in the kernel or in libibverbs, does not register dma-bufs",
        remedy: "use a NIC with a driver that does (mlx5, efa, irdma, bnxt_re) and rdma-core 34 or \
                 newer, or load a peer-memory client",
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
        cause: "the driver reports that a physical segment of the range cannot be exported",
        remedy: "allocate the segment as RDMA capable, or register only the exportable part of the \
                 range",
        ..ANY
    },
    RefusalCause {
        name: "freed-or-outside",
        rank: 100,
        paths: DIRECT,
        steps: SEGMENTS_OR_EXPORT,
        answers: &[Answer::Kind(&[ErrorKind::OutOfBounds, ErrorKind::BadState])],
        cause: "the range does not lie inside one live allocation",
        remedy: "register inside one allocation, and close the region before you free the \
                 allocation",
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
        cause: "the firmware gave the device a small BAR, which is nearly full; only memory that \
                the BAR maps can be exported",
        remedy: "enable Above 4G Decoding and Resizable BAR in the firmware, or export less at a \
                 time",
        ..ANY
    },
    RefusalCause {
        name: "bar-full",
        rank: 120,
        paths: DIRECT,
        steps: ANY_EXPORT,
        answers: BAR_FULL,
        cause: "the device's BAR has no room left to map the range; each export occupies a part of \
                it for each NIC",
        remedy: "close regions or register less at a time; enable Above 4G Decoding and Resizable \
                 BAR in the firmware",
        ..ANY
    },
    RefusalCause {
        name: "segments-not-in-one",
        rank: 150,
        paths: DMA_BUF,
        steps: &[Step::ExportWhole],
        answers: &[Answer::UNSUPPORTED, Answer::Kind(&[ErrorKind::InvalidArgument])],
        cause: "the driver cannot export several mappings as one dma-buf, or their physical memory \
                differs in device or properties",
        remedy: "none needed if exporting each segment separately works, which is tried next; for \
                 one key over the range, create all of its physical memory with the same \
                 properties",
        ..ANY
    },
    RefusalCause {
        name: "other-export-unit",
        rank: 155,
        paths: DMA_BUF,
        steps: &[Step::ExportUnit],
        answers: &[
            Answer::UNSUPPORTED,
            Answer::Kind(&[ErrorKind::InvalidArgument, ErrorKind::BadAddress, ErrorKind::Driver]),
        ],
        cause: "the driver does not export, or the NIC does not import, exactly this memory as a \
                dma-buf: some need whole segments or allocations, or aligned ranges",
        remedy: "none needed: another unit of export works and is tried first from now on, and the \
                 key still covers the requested range only",
        ..ANY
    },
    RefusalCause {
        name: "integrated-device",
        rank: 158,
        paths: DIRECT,
        steps: EXPORT_OR_REGISTER,
        answers: &[
            Answer::Errno(&[14, 22, 38, 95, 524]),
            Answer::UNSUPPORTED,
            Answer::Kind(&[ErrorKind::BadAddress, ErrorKind::InvalidArgument]),
        ],
        needs: Needs::some("the device is integrated (GB10)", |facts| {
            facts.coherent_link == Some(CoherentLink::Integrated)
        }),
        cause: "the device is integrated (GB10) and uses the CPU's memory; its driver opens the \
                memory that it allocates for the device to no NIC, as dma-buf or by peer memory",
        remedy: "allocate the buffers as page-locked host memory (cuMemHostAlloc), which NICs \
                 register as host pages",
        ..ANY
    },
    RefusalCause::DEVICE_WITHOUT_DMA_BUF,
    RefusalCause {
        name: "c2c-pcie-mapping",
        rank: 162,
        paths: DMA_BUF,
        steps: REACH,
        mapping: Some(DmaBufMapping::Pcie),
        answers: NOT_REACHABLE,
        needs: Needs::some(
            "the device has NVLink-C2C, and the NIC shares no PCIe switch with it",
            |facts| facts.coherent_link == Some(CoherentLink::C2c { shares_switch: false }),
        ),
        cause: "the PCIe mapping leads to the device's BAR, which only NICs below the same PCIe \
                switch reach; this NIC reaches the device's memory over NVLink-C2C, with the \
                default mapping",
        remedy: "let the default mapping come first: unset HMEM_VERBS_PCIE_MAPPING, \
                 Builder::pcie_mapping_first of verbs and HMEM_DIRECT_PATHS; or use a NIC below \
                 the device's switch, with its port up (`hmem topo` shows them)",
        ..ANY
    },
    RefusalCause {
        name: "c2c-default-mapping",
        rank: 164,
        paths: DMA_BUF,
        steps: REACH,
        mapping: Some(DmaBufMapping::Default),
        answers: NOT_REACHABLE,
        needs: Needs::some("the device has NVLink-C2C", |facts| {
            matches!(facts.coherent_link, Some(CoherentLink::C2c { .. }))
        }),
        cause: "the default mapping leads over NVLink-C2C, and the NIC does not reach the device's \
                memory there",
        remedy: "use the PCIe mapping (CUDA 12.8 and driver 570 or newer) with a NIC below the \
                 device's PCIe switch (`hmem topo` shows them)",
        ..ANY
    },
    RefusalCause {
        name: "acs",
        rank: 170,
        paths: DIRECT,
        steps: REACH,
        answers: NOT_REACHABLE,
        needs: Needs::some("ACS redirects requests between the two", |facts| {
            facts.acs_redirects == Some(true)
        }),
        cause: "ACS on a PCIe bridge between device and NIC redirects their requests to the root \
                complex, which does not forward them",
        remedy: "disable ACS redirection on the bridges between the two (in the firmware, or \
                 `setpci ECAP_ACS+6.w=0` at boot); in a virtual machine let the NIC use ATS",
        ..ANY
    },
    RefusalCause {
        name: "iommu",
        rank: 180,
        paths: DIRECT,
        steps: REACH,
        answers: NOT_REACHABLE,
        needs: Needs::some("the IOMMU translates for the NIC or the device", |facts| {
            facts.iommu_translates == Some(true)
        }),
        cause: "the IOMMU translates the NIC's addresses and does not map the device's BAR for the \
                NIC",
        remedy: "boot with iommu=pt (or intel_iommu=off, amd_iommu=off), or pass both devices into \
                 the guest in one group",
        ..ANY
    },
    RefusalCause {
        name: "device-not-reachable-from-nic",
        rank: 190,
        paths: DIRECT,
        steps: REACH,
        answers: NOT_REACHABLE,
        cause: "the NIC cannot reach the device over PCIe, or the export has the mapping of a \
                coherent link instead of the BAR's",
        remedy: "use a NIC under the same PCIe switch or root port as the device (`hmem topo` \
                 shows them), or the PCIe mapping if the driver has it",
        ..ANY
    },
    RefusalCause {
        name: "peer-memory-module-missing",
        rank: 200,
        paths: PEER,
        steps: IMPORT_OR_REGISTER,
        answers: &[
            Answer::Errno(&[14, 22]),
            Answer::UNSUPPORTED,
            Answer::Kind(&[ErrorKind::BadAddress]),
        ],
        needs: Needs::some("no peer-memory client is loaded", no_client),
        cause: "no peer-memory client is loaded, so that the kernel treats the device address as \
                unmapped host memory",
        remedy: "load the client of the device's vendor, if there is one (it needs a kernel or \
                 RDMA stack with peer-memory clients, such as MLNX_OFED), or use dma-buf",
        ..ANY
    },
    RefusalCause {
        name: "peer-memory-range",
        rank: 210,
        paths: PEER,
        steps: REGISTER,
        answers: &[Answer::Errno(&[14, 22]), Answer::Kind(&[ErrorKind::BadAddress])],
        ambiguous: true,
        cause: "the peer-memory client does not recognise the range: it was freed, was mapped by \
                hand, or belongs to another process",
        remedy: "register whole live allocations of the plain allocator",
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
        name: "ipc-lock-inert",
        rank: 235,
        paths: HOST,
        answers: MEMLOCK,
        needs: Needs::some(
            "CAP_IPC_LOCK was granted without effect, and the locked-memory limit may be exceeded",
            |facts| may_exceed_memlock(facts) && inert_ipc_lock(facts).is_some(),
        ),
        ambiguous: true,
        cause: "the process has reached the locked-memory limit (RLIMIT_MEMLOCK), because the \
                capability IPC_LOCK that was granted to it has no effect",
        detail: Some(inert_ipc_lock),
        remedy: "raise the limit instead: LimitMEMLOCK=infinity in the systemd unit of the \
                 container runtime, `docker run --ulimit memlock=-1`; or make IPC_LOCK effective: \
                 run as root outside of a user namespace (hostUsers: true in Kubernetes), or give \
                 it to the program (`setcap cap_ipc_lock+ep FILE`)",
        ..ANY
    },
    RefusalCause {
        name: "memlock",
        rank: 240,
        paths: HOST,
        answers: MEMLOCK,
        needs: Needs::some(
            "the locked-memory limit is finite, and has no room for the request if its use is \
             known",
            may_exceed_memlock,
        ),
        ambiguous: true,
        cause: "the process has reached the locked-memory limit (RLIMIT_MEMLOCK); each \
                registration counts all of its pages, even if another one counted them",
        detail: Some(memlock_use),
        remedy: "raise the limit: `ulimit -l unlimited` in a shell, `docker run --ulimit \
                 memlock=-1`, LimitMEMLOCK=infinity in the systemd unit of the service or \
                 (Kubernetes) of the container runtime, memlock in limits.conf",
        ..ANY
    },
    RefusalCause {
        name: "memlock-of-user",
        rank: 245,
        paths: HOST,
        answers: &[Answer::Limit("locked memory of the user")],
        needs: Needs::some(
            "the locked-memory limit is finite and has room for the request",
            |facts| has_memlock_limit(facts) && facts.memlock_has_room() == Some(true),
        ),
        cause: "other processes of the user use up the locked-memory limit (RLIMIT_MEMLOCK): the \
                NIC pins pages with io_uring, which counts them for the user, not for one process",
        detail: Some(memlock_use),
        remedy: "raise the limit (`ulimit -l unlimited`, `docker run --ulimit memlock=-1`, \
                 LimitMEMLOCK=infinity in systemd), or end the other processes",
        ..ANY
    },
    RefusalCause {
        name: "rdma-cgroup",
        rank: 250,
        paths: EVERY,
        answers: &[Answer::Errno(&[11])],
        needs: Needs::some(
            "a control group has reached its limit of RDMA objects, or its limit is unknown",
            |facts| cgroup::rdma_limit(facts) != RdmaLimit::NotReached,
        ),
        ambiguous: true,
        cause: "the process's control group has reached its limit of RDMA objects (rdma.max)",
        detail: Some(rdma_group),
        remedy: "raise hca_object in rdma.max of the group, or register larger ranges in fewer \
                 regions",
        ..ANY
    },
    RefusalCause {
        name: "nic-keys-used-up",
        rank: 252,
        paths: EVERY,
        steps: REGISTER,
        answers: &[Answer::Errno(&[11])],
        cause: "the NIC has no memory key left, and no control group is known to limit them; \
                processes that crashed may still hold some",
        detail: Some(regions_of_domain),
        remedy: "find the processes that hold regions (`rdma resource show mr`) and end them, \
                 close regions, or register larger ranges in fewer regions; if nobody holds them, \
                 reload the NIC's driver",
        ..ANY
    },
    RefusalCause {
        name: "memory-only-node",
        rank: 255,
        paths: HOST,
        answers: &[Answer::Errno(&[12]), Answer::Kind(&[ErrorKind::OutOfResources])],
        needs: Needs::some("a NUMA node has memory and no CPUs", |facts| {
            !facts.memory_only_nodes.is_empty()
        }),
        ambiguous: true,
        cause: "the memory may lie on a NUMA node without CPUs, such as the memory of a GPU with \
                NVLink-C2C or of a CXL device; such memory is often movable, and the kernel found \
                no other place for the pages when it pinned them",
        detail: Some(memory_only_nodes),
        remedy: "allocate memory to register on a node with CPUs (numactl --membind, mbind), or \
                 free memory there; register GPU memory as device memory",
        ..ANY
    },
    RefusalCause {
        name: "nic-tables-full",
        rank: 260,
        paths: EVERY,
        answers: &[Answer::Errno(&[12, 28]), Answer::Kind(&[ErrorKind::OutOfResources])],
        ambiguous: true,
        cause: "the NIC has no region or translation entry left, or the kernel has no memory for \
                them",
        detail: Some(regions_of_domain),
        remedy: "close regions, register larger ranges in fewer regions, or use huge pages; raise \
                 the driver's table sizes",
        ..ANY
    },
    RefusalCause {
        name: "too-many-segments",
        rank: 265,
        paths: DMA_BUF,
        steps: REGISTER,
        answers: &[Answer::Limit("mr_iov_limit")],
        cause: "the range has more physical segments than the NIC registers as one region",
        remedy: "register shorter ranges, or allocate the memory in longer segments",
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
        ambiguous: true,
        cause: "the range ends past the dma-buf, the fd is no dma-buf, or address and offset \
                differ within a page",
        remedy: "pass the offset in the dma-buf, not in the allocation, and check the length \
                 against the exported buffer",
        ..ANY
    },
    RefusalCause {
        name: "atomic-right",
        rank: 275,
        paths: DIRECT,
        answers: &[Answer::Errno(&[22])],
        needs: Needs::some("the request grants atomics to peers", |facts| {
            facts
                .request
                .is_some_and(|request| request.access.intersects(Access::ANY_REMOTE_ATOMIC))
        }),
        cause: "the NIC's driver refuses the right of peers to use atomics on this memory, though \
                the NIC has atomics (seen with AMD's ionic)",
        remedy: "grant REMOTE_RMA_WRITE instead of REMOTE_WRITE, which includes atomics, and leave \
                 REMOTE_ATOMIC out",
        ..ANY
    },
    RefusalCause {
        name: "dma-buf-not-mappable",
        rank: 280,
        paths: DMA_BUF,
        answers: &[Answer::Errno(&[14]), Answer::Kind(&[ErrorKind::BadAddress])],
        cause: "the exporter could not map the pages for the NIC's driver: they have moved, or the \
                device is suspended",
        remedy: "keep the device awake and its memory resident (not managed) while it is \
                 registered",
        ..ANY
    },
    RefusalCause {
        name: "bad-host-pages",
        rank: 290,
        paths: HOST,
        answers: &[Answer::Errno(&[14]), Answer::Kind(&[ErrorKind::BadAddress])],
        cause: "a part of the range is unmapped, protected, mapped read-only, or past the end of \
                its file",
        remedy: "map the whole range before you register it, writable if the NIC writes to it",
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
    RefusalCause {
        name: "seccomp-filter",
        rank: 302,
        paths: EVERY,
        steps: &[Step::SystemCall],
        answers: &[
            Answer::Errno(&[1, 13, 38]),
            Answer::Kind(&[ErrorKind::PermissionDenied, ErrorKind::NoSys]),
        ],
        needs: Needs::some("a seccomp filter is active", |facts| facts.seccomp == Some(true)),
        cause: "a seccomp filter is active, as in most containers, and refuses the system call",
        remedy: "allow the call that the error names in the container's seccomp profile \
                 (`docker run --security-opt seccomp=profile.json`, seccompProfile in Kubernetes)",
        ..ANY
    },
    RefusalCause {
        name: "nic-node-missing",
        rank: 304,
        paths: EVERY,
        steps: &[Step::OpenNic],
        answers: NO_NODE,
        needs: Needs::some("the kernel announces a NIC whose node /dev lacks", |facts| {
            nodes(&facts.missing_nodes, Step::OpenNic).is_some()
        }),
        cause: "the kernel has the NIC, but its node is missing from /dev",
        detail: Some(|facts| nodes(&facts.missing_nodes, Step::OpenNic)),
        remedy: "pass the node into the container (`docker run --device=/dev/infiniband/uverbs0`, \
                 an RDMA device plug-in in Kubernetes), or `modprobe ib_uverbs` and start udev \
                 outside of one",
        ..ANY
    },
    RefusalCause {
        name: "device-node-missing",
        rank: 306,
        paths: EVERY,
        steps: &[Step::OpenDevice],
        answers: NO_NODE,
        needs: Needs::some("the kernel announces a device whose node /dev lacks", |facts| {
            nodes(&facts.missing_nodes, Step::OpenDevice).is_some()
        }),
        cause: "the kernel has the device, but its node is missing from /dev",
        detail: Some(|facts| nodes(&facts.missing_nodes, Step::OpenDevice)),
        remedy: "pass the nodes into the container (`docker run --gpus all` for NVIDIA, \
                 `--device=/dev/kfd --device=/dev/dri` for AMD, `--device=/dev/dri` for Intel, the \
                 vendor's device plug-in in Kubernetes)",
        ..ANY
    },
    RefusalCause {
        name: "nic-node-forbidden",
        rank: 307,
        paths: EVERY,
        steps: &[Step::OpenNic],
        answers: NO_ACCESS,
        cause: "the process may not read and write the NIC's node in /dev",
        detail: Some(|facts| nodes(&facts.forbidden_nodes, Step::OpenNic)),
        remedy: "give the user read and write permission (`chmod`, or a udev rule), and pass the \
                 node into the container with `docker run --device=/dev/infiniband/uverbs0`: a \
                 bind mount alone is not enough",
        ..ANY
    },
    RefusalCause {
        name: "device-node-forbidden",
        rank: 308,
        paths: EVERY,
        steps: &[Step::OpenDevice],
        answers: NO_ACCESS_OR_DEVICE,
        needs: Needs::some("the process may not use a device node", |facts| {
            nodes(&facts.forbidden_nodes, Step::OpenDevice).is_some()
        }),
        cause: "the process may not read and write the device's node in /dev",
        detail: Some(|facts| nodes(&facts.forbidden_nodes, Step::OpenDevice)),
        remedy: "add the user to the node's group (`usermod -aG render USER`; `ls -l` shows the \
                 group), or pass the node into the container with `docker run --device=NODE`",
        ..ANY
    },
    RefusalCause::DEVICE_FILES,
    RefusalCause::DEVICE_LOST,
    RefusalCause {
        name: "nic-lost",
        rank: 330,
        paths: EVERY,
        answers: &[Answer::Errno(&[5, 19]), Answer::Kind(&[ErrorKind::Unavailable])],
        ambiguous: true,
        cause: "the NIC went down or was removed during the call",
        remedy: "open a domain when the NIC is back, or on another NIC, and register again \
                 (RoamingRegion::reopen); the kernel log (`dmesg`) may have the reason",
        ..ANY
    },
    RefusalCause {
        name: "dma-buf-revoked",
        rank: 335,
        paths: DMA_BUF,
        steps: REGISTER,
        answers: &[Answer::Errno(&[19])],
        cause: "the exporter revoked the dma-buf: its device was reset or removed, or given to \
                another user (vfio)",
        remedy: "export the memory again once its device is usable, and register the new dma-buf",
        ..ANY
    },
    RefusalCause {
        name: "nic-takes-no-copies",
        rank: 340,
        paths: &[Path::Staged],
        steps: IMPORT_OR_REGISTER,
        answers: &[Answer::UNSUPPORTED],
        cause: "hardware cannot reach memory through copies by itself",
        remedy: "make a direct path work, or copy through a registered host buffer \
                 (hmem_p2p::staging)",
        ..ANY
    },
];

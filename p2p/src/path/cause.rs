//! Why ways are refused, and what to do about it: one table, from what was tried and what it
//! answered to the probable cause.
//!
//! `docs/causes.md` is this table as a page; a test compares the two.

use hmem_core::{AllocationKind, Error, ErrorKind, IfaceKind, Path, iface::DmaBufMapping};

use super::facts::Facts;

/// What was being done when a way was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Looking at what the NIC imports at all.
    Import,
    /// Finding the physical segments.
    Segments,
    /// Exporting a range of several physical segments as one dma-buf. Where a segment is refused in
    /// the same way, the refusal of the whole is one of [`Step::Export`].
    ExportWhole,
    /// Exporting, as a dma-buf or to peer-memory clients.
    Export,
    /// Registering with the NIC.
    Register,
}

impl Step {
    /// The name as it is printed.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Import => "import",
            Self::Segments => "segments",
            Self::ExportWhole => "export of several segments in one",
            Self::Export => "export",
            Self::Register => "register",
        }
    }
}

/// What a refusal answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// One of these numbers of the operating system.
    Errno(&'static [i32]),
    /// One of these codes of the iface's driver.
    Driver(&'static [i64]),
    /// One of these kinds, in whatever dialect.
    Kind(&'static [ErrorKind]),
}

/// A refusal to find the cause of.
#[derive(Clone, Copy, Debug)]
pub struct Circumstance<'a> {
    /// Which way.
    pub path: Path,
    /// What was being done.
    pub step: Step,
    /// Whose memory.
    pub iface: IfaceKind,
    /// Which kind of memory.
    pub kind: AllocationKind,
    /// The mapping of the dma-buf that may be at fault: the default one where that is refused as
    /// well.
    pub mapping: DmaBufMapping,
    /// The answer.
    pub error: &'a Error,
}

/// A fact that a cause needs.
#[derive(Clone, Copy, Debug)]
pub struct Needs {
    /// The fact as a clause.
    pub text: &'static str,
    /// Whether it is known to hold.
    pub holds: fn(&Facts) -> bool,
}

/// A known cause. Every condition must hold.
#[derive(Clone, Copy, Debug)]
pub struct Cause {
    /// Its name: a heading in `docs/causes.md`.
    pub name: &'static str,
    /// The ways that meet it.
    pub paths: &'static [Path],
    /// When.
    pub steps: &'static [Step],
    /// Whose memory; `None` for anyone's.
    pub iface: Option<IfaceKind>,
    /// Which kind of memory; `None` for any.
    pub kind: Option<AllocationKind>,
    /// Under which mapping; `None` for any.
    pub mapping: Option<DmaBufMapping>,
    /// What is answered: any of these.
    pub answers: &'static [Answer],
    /// What must be known of the machine.
    pub needs: Option<Needs>,
    /// The probable cause, in a sentence.
    pub cause: &'static str,
    /// What to do.
    pub remedy: &'static str,
}

const DMA_BUF: &[Path] = &[Path::DmaBuf];
const PEER: &[Path] = &[Path::PeerMemory];
const DIRECT: &[Path] = &[Path::DmaBuf, Path::PeerMemory];
const HOST: &[Path] = &[Path::PlainHost, Path::Staged];
const EVERY: &[Path] = &[Path::PlainHost, Path::DmaBuf, Path::PeerMemory, Path::Staged];
const EXPORT: &[Step] = &[Step::Export];
/// What holds for a range of one segment, and for one of several whose segments are exported by
/// themselves.
const ANY_EXPORT: &[Step] = &[Step::ExportWhole, Step::Export];
const SEGMENTS_OR_EXPORT: &[Step] = &[Step::Segments, Step::ExportWhole, Step::Export];
const EXPORT_OR_REGISTER: &[Step] = &[Step::ExportWhole, Step::Export, Step::Register];
const NOT_IMPORT: &[Step] = &[Step::Segments, Step::ExportWhole, Step::Export, Step::Register];
const REGISTER: &[Step] = &[Step::Register];
const IMPORT_OR_REGISTER: &[Step] = &[Step::Import, Step::Register];
const UNSUPPORTED: Answer = Answer::Kind(&[ErrorKind::Unsupported, ErrorKind::NoSys]);
const BAR_FULL: &[Answer] =
    &[Answer::Errno(&[12, 28]), Answer::Driver(&[2]), Answer::Kind(&[ErrorKind::OutOfResources])];
const NOT_REACHABLE: &[Answer] =
    &[Answer::Errno(&[524, 121]), Answer::Kind(&[ErrorKind::Unreachable])];

/// The cause that holds only while the default mapping is not refused as well.
pub(super) const NO_PCIE_MAPPING: &str = "no-pcie-mapping";

/// What most entries have: nothing more is asked.
const ANY: Cause = Cause {
    name: "",
    paths: EVERY,
    steps: REGISTER,
    iface: None,
    kind: None,
    mapping: None,
    answers: &[],
    needs: None,
    cause: "",
    remedy: "",
};

const fn needs(text: &'static str, holds: fn(&Facts) -> bool) -> Option<Needs> {
    Some(Needs { text, holds })
}

fn old_kernel(facts: &Facts) -> bool {
    facts.kernel.is_some_and(|version| version < (5, 12))
}

fn no_client(facts: &Facts) -> bool {
    const CLIENTS: [&str; 3] = ["nvidia_peermem", "nv_peer_mem", "amdkfd"];
    facts.modules.is_some() && CLIENTS.iter().all(|name| facts.has_module(name) == Some(false))
}

fn rocr_options_missing(facts: &Facts) -> bool {
    ["DMABUF_MOVE_NOTIFY", "PCI_P2PDMA"].iter().any(|name| facts.has_option(name) == Some(false))
}

/// Every known cause. The first that fits is the probable one: special cases stand before the
/// general.
pub const CAUSES: &[Cause] = &[
    Cause {
        name: "file-descriptors",
        paths: EVERY,
        steps: NOT_IMPORT,
        answers: &[Answer::Errno(&[24, 23])],
        cause: "the process, or the machine, has no file descriptor left: each export is one as long as it is registered",
        remedy: "raise the limit (ulimit -n, LimitNOFILE= in systemd, fs.file-max), or register larger ranges in fewer regions",
        ..ANY
    },
    Cause {
        name: "kernel-without-dma-buf",
        paths: DMA_BUF,
        steps: IMPORT_OR_REGISTER,
        answers: &[Answer::Errno(&[38, 95]), UNSUPPORTED],
        needs: needs("the kernel is older than 5.12", old_kernel),
        cause: "the kernel is older than the dma-buf registration of its RDMA core, which came with Linux 5.12",
        remedy: "run Linux 5.12 or newer, or a vendor's RDMA stack that has it (MLNX_OFED 5.5), or load a peer-memory client",
        ..ANY
    },
    Cause {
        name: "nic-driver-without-dma-buf",
        paths: DMA_BUF,
        steps: IMPORT_OR_REGISTER,
        answers: &[Answer::Errno(&[38, 95]), UNSUPPORTED],
        cause: "the NIC's driver, in the kernel or in libibverbs, does not register dma-bufs",
        remedy: "use a NIC whose driver does (mlx5, efa, irdma, bnxt_re) with rdma-core 34 or newer, or load a peer-memory client",
        ..ANY
    },
    Cause {
        name: "nvidia-closed-modules",
        paths: DMA_BUF,
        steps: EXPORT,
        iface: Some(IfaceKind::CUDA),
        answers: &[Answer::Driver(&[801]), UNSUPPORTED],
        needs: needs("NVIDIA's kernel modules are the closed ones", |facts| {
            facts.nvidia_modules_open == Some(false)
        }),
        cause: "the closed variant of NVIDIA's kernel modules exports no dma-bufs",
        remedy: "install the open kernel modules (Turing or newer, driver 515 or newer), or load nvidia-peermem",
        ..ANY
    },
    Cause {
        name: NO_PCIE_MAPPING,
        paths: DMA_BUF,
        steps: EXPORT,
        mapping: Some(DmaBufMapping::Pcie),
        answers: &[
            Answer::Driver(&[1, 801]),
            UNSUPPORTED,
            Answer::Kind(&[ErrorKind::InvalidArgument]),
        ],
        cause: "the driver or the device has no PCIe mapping for exports (CUDA from 12.8, ROCr from 7.2)",
        remedy: "nothing where the default mapping works, which is tried next; update the driver where it does not",
        ..ANY
    },
    Cause {
        name: "vmm-range",
        paths: DIRECT,
        steps: &[Step::Segments, Step::Export],
        kind: Some(AllocationKind::Virtual),
        answers: &[
            Answer::Driver(&[1, 801]),
            Answer::Kind(&[
                ErrorKind::Unsupported,
                ErrorKind::InvalidArgument,
                ErrorKind::OutOfBounds,
            ]),
        ],
        cause: "the range was mapped by hand (VMM, expandable segments) from physical memory that was not created for RDMA, or \
                spans a hole between two mappings",
        remedy: "create the physical memory as RDMA capable (gpuDirectRDMACapable = 1 in CUmemAllocationProp); in PyTorch, turn \
                 expandable_segments off",
        ..ANY
    },
    Cause {
        name: "stream-ordered-pool",
        paths: DIRECT,
        steps: &[Step::Segments, Step::Export, Step::Register],
        kind: Some(AllocationKind::StreamOrdered),
        answers: &[
            Answer::Errno(&[14, 22]),
            Answer::Driver(&[1, 801]),
            Answer::Kind(&[ErrorKind::Unsupported, ErrorKind::InvalidArgument]),
        ],
        cause: "the driver hands out no memory of this stream-ordered pool, as it was not made for RDMA or pools cannot be",
        remedy: "allocate what is registered with the plain allocator; where the driver has RDMA for pools (gpuDirectRDMACapable in \
                 CUmemPoolProps, CUDA 13), from one made with it, which only dma-bufs reach",
        ..ANY
    },
    Cause {
        name: "segment-not-exportable",
        paths: DIRECT,
        steps: &[Step::Segments],
        answers: &[UNSUPPORTED],
        cause: "the driver says of a physical segment of the range that it cannot be exported",
        remedy: "allocate it as RDMA capable, or register the part of the range that is",
        ..ANY
    },
    Cause {
        name: "wrong-context",
        paths: DIRECT,
        steps: SEGMENTS_OR_EXPORT,
        iface: Some(IfaceKind::CUDA),
        answers: &[Answer::Driver(&[3, 4, 201, 709])],
        cause: "the driver does not know the calling thread's context: none is current, it was destroyed, or the process is a fork \
                of the one that made it",
        remedy: "use the memory while the context that allocated it lives, and register after a fork, not before it",
        ..ANY
    },
    Cause {
        name: "freed-or-outside",
        paths: DIRECT,
        steps: SEGMENTS_OR_EXPORT,
        answers: &[Answer::Kind(&[ErrorKind::OutOfBounds, ErrorKind::BadState])],
        cause: "the range is not, or no longer, wholly inside one allocation",
        remedy: "register inside one allocation, and close the region before the allocation is freed",
        ..ANY
    },
    Cause {
        name: "bar-small",
        paths: DIRECT,
        steps: ANY_EXPORT,
        answers: BAR_FULL,
        needs: needs("the device's BAR has at most 256 MiB", |facts| {
            facts.bar.is_some_and(|bytes| bytes <= 256 << 20)
        }),
        cause: "the firmware gave the device a small BAR, of which most is taken: only what it maps can be exported",
        remedy: "switch Above 4G Decoding and Resizable BAR on in the firmware, or export less at a time",
        ..ANY
    },
    Cause {
        name: "bar-full",
        paths: DIRECT,
        steps: ANY_EXPORT,
        answers: BAR_FULL,
        cause: "the device's BAR has no room left to map the range: everything exported occupies it, by each NIC",
        remedy: "close regions or register less at a time; enable the large BAR (Above 4G Decoding and Resizable BAR in the \
                 firmware)",
        ..ANY
    },
    Cause {
        name: "rocr-kernel-options",
        paths: DMA_BUF,
        steps: EXPORT,
        iface: Some(IfaceKind::ROCR),
        answers: &[UNSUPPORTED],
        needs: needs(
            "the kernel was built without DMABUF_MOVE_NOTIFY or PCI_P2PDMA",
            rocr_options_missing,
        ),
        cause: "amdgpu exports dma-bufs to other devices only in kernels with CONFIG_DMABUF_MOVE_NOTIFY and CONFIG_PCI_P2PDMA",
        remedy: "run a kernel that has both options",
        ..ANY
    },
    Cause {
        name: "ze-not-exportable",
        paths: DMA_BUF,
        steps: EXPORT,
        iface: Some(IfaceKind::ZE),
        answers: &[UNSUPPORTED, Answer::Kind(&[ErrorKind::InvalidArgument])],
        cause: "Level Zero exports only memory that was allocated to be exported",
        remedy: "allocate with ze_external_memory_export_desc_t and ZE_EXTERNAL_MEMORY_TYPE_FLAG_DMA_BUF, or through this library",
        ..ANY
    },
    Cause {
        name: "segments-not-in-one",
        paths: DMA_BUF,
        steps: &[Step::ExportWhole],
        answers: &[
            Answer::Driver(&[1, 801]),
            UNSUPPORTED,
            Answer::Kind(&[ErrorKind::InvalidArgument]),
        ],
        cause: "the driver makes no one dma-buf of several mappings, or their physical memory differs in device or properties",
        remedy: "nothing where each segment is exported by itself, which is tried next; for one key over the range, create all \
                 of its physical memory with the same properties",
        ..ANY
    },
    Cause {
        name: "device-without-dma-buf",
        paths: DMA_BUF,
        steps: EXPORT,
        answers: &[Answer::Errno(&[38, 95]), Answer::Driver(&[801]), UNSUPPORTED],
        cause: "the device, its driver or this kind of memory has no dma-buf export",
        remedy: "use a driver that exports (CUDA 11.7, ROCr 5.6, or newer) and device memory; or load a peer-memory client",
        ..ANY
    },
    Cause {
        name: "acs",
        paths: DIRECT,
        steps: EXPORT_OR_REGISTER,
        answers: NOT_REACHABLE,
        needs: needs("ACS redirects requests between the two", |facts| {
            facts.acs_redirects == Some(true)
        }),
        cause: "ACS on a PCIe bridge between device and NIC sends their requests to the root complex, which does not pass them on",
        remedy: "switch ACS redirection off on the bridges between the two (firmware, or setpci ECAP_ACS+6.w=0 at boot); in a \
                 virtual machine let the NIC use ATS",
        ..ANY
    },
    Cause {
        name: "iommu",
        paths: DIRECT,
        steps: EXPORT_OR_REGISTER,
        answers: NOT_REACHABLE,
        needs: needs("the IOMMU translates for the NIC or the device", |facts| {
            facts.iommu_translates == Some(true)
        }),
        cause: "the IOMMU translates the NIC's addresses and has no mapping of the device's BAR for it",
        remedy: "boot with iommu=pt (or intel_iommu=off, amd_iommu=off), or pass both devices into the guest in one group",
        ..ANY
    },
    Cause {
        name: "device-not-reachable-from-nic",
        paths: DIRECT,
        steps: EXPORT_OR_REGISTER,
        answers: NOT_REACHABLE,
        cause: "the NIC cannot reach the device over PCIe, or the mapping is of the wrong type (a coherent link's instead of the \
                BAR's)",
        remedy: "use a NIC under the same PCIe switch or root port as the device (`hmem topo` shows them), or the PCIe mapping \
                 where the driver has it",
        ..ANY
    },
    Cause {
        name: "peer-memory-module-missing",
        paths: PEER,
        steps: IMPORT_OR_REGISTER,
        answers: &[Answer::Errno(&[14]), UNSUPPORTED, Answer::Kind(&[ErrorKind::BadAddress])],
        needs: needs("no peer-memory client is loaded", no_client),
        cause: "no peer-memory client is loaded, so that the kernel takes the device address for one of unmapped host memory",
        remedy: "load it (modprobe nvidia-peermem; it needs a kernel or RDMA stack with peer-memory clients, such as MLNX_OFED), or \
                 use dma-buf",
        ..ANY
    },
    Cause {
        name: "peer-memory-range",
        paths: PEER,
        steps: REGISTER,
        answers: &[Answer::Errno(&[14, 22]), Answer::Kind(&[ErrorKind::BadAddress])],
        cause: "the peer-memory client does not know the range as memory of its device: it was freed, was mapped by hand, or \
                belongs to another process",
        remedy: "register whole allocations of the plain allocator while they live",
        ..ANY
    },
    Cause {
        name: "nic-without-peer-memory",
        paths: PEER,
        steps: IMPORT_OR_REGISTER,
        answers: &[UNSUPPORTED],
        cause: "the NIC's RDMA stack has no peer-memory clients",
        remedy: "use dma-buf, or an RDMA stack with peer-memory clients (MLNX_OFED)",
        ..ANY
    },
    Cause {
        name: "device-without-peer-memory",
        paths: PEER,
        steps: EXPORT,
        answers: &[UNSUPPORTED],
        cause: "no peer-memory client exists for this device or kind of memory",
        remedy: "use dma-buf",
        ..ANY
    },
    Cause {
        name: "memlock",
        paths: HOST,
        answers: &[Answer::Errno(&[1, 12]), Answer::Kind(&[ErrorKind::OutOfResources])],
        needs: needs("the locked-memory limit is finite", |facts| {
            facts.memlock.is_some_and(|limit| limit != u64::MAX)
        }),
        cause: "the process may lock no more memory (RLIMIT_MEMLOCK); each registration counts its pages, the same pages again too",
        remedy: "raise the limit (ulimit -l unlimited, memlock in limits.conf, LimitMEMLOCK= in systemd, --ulimit memlock in a \
                 container)",
        ..ANY
    },
    Cause {
        name: "rdma-cgroup",
        paths: EVERY,
        answers: &[Answer::Errno(&[11])],
        cause: "the process's control group may have no more RDMA objects (rdma.max)",
        remedy: "raise hca_object in rdma.max of the group, or register larger ranges in fewer regions",
        ..ANY
    },
    Cause {
        name: "nic-tables-full",
        paths: EVERY,
        answers: &[Answer::Errno(&[12, 28]), Answer::Kind(&[ErrorKind::OutOfResources])],
        cause: "the NIC has no region or translation entry left, or the kernel no memory for them",
        remedy: "close regions, register larger ranges in fewer regions, or use huge pages; raise the driver's table sizes",
        ..ANY
    },
    Cause {
        name: "beyond-the-export",
        paths: DMA_BUF,
        answers: &[
            Answer::Errno(&[22]),
            Answer::Kind(&[ErrorKind::InvalidArgument, ErrorKind::OutOfBounds]),
        ],
        cause: "the range reaches past the end of the dma-buf, the fd is no dma-buf, or address and offset differ within a page",
        remedy: "give the offset in the dma-buf and not in the allocation, and check the length against the exported buffer",
        ..ANY
    },
    Cause {
        name: "dma-buf-not-mappable",
        paths: DMA_BUF,
        answers: &[Answer::Errno(&[14]), Answer::Kind(&[ErrorKind::BadAddress])],
        cause: "the exporter could not give the NIC's driver the pages: they moved away, or the device is suspended",
        remedy: "keep the device awake and its memory resident (not managed) as long as it is registered",
        ..ANY
    },
    Cause {
        name: "bad-host-pages",
        paths: HOST,
        answers: &[Answer::Errno(&[14]), Answer::Kind(&[ErrorKind::BadAddress])],
        cause: "part of the range is not mapped, is protected, is mapped read-only, or lies past the end of its file",
        remedy: "map the whole range before registering it, writable if the NIC is to write",
        ..ANY
    },
    Cause {
        name: "closed-descriptor",
        paths: DMA_BUF,
        answers: &[Answer::Errno(&[9])],
        cause: "the file descriptor is not open",
        remedy: "keep the dma-buf open until the registration returns",
        ..ANY
    },
    Cause {
        name: "device-files",
        paths: EVERY,
        steps: NOT_IMPORT,
        answers: &[
            Answer::Errno(&[1, 13]),
            Answer::Kind(&[ErrorKind::PermissionDenied, ErrorKind::AccessDenied]),
        ],
        cause: "the process may not use the device's files, or the buffer was opened for reading only",
        remedy: "give the user (or container) /dev/infiniband/uverbs* and the device's own files (/dev/nvidia*, /dev/kfd, \
                 /dev/dri/renderD*), and export for writing",
        ..ANY
    },
    Cause {
        name: "device-lost",
        paths: DIRECT,
        steps: SEGMENTS_OR_EXPORT,
        answers: &[
            Answer::Errno(&[5, 19]),
            Answer::Driver(&[46, 100, 101]),
            Answer::Kind(&[ErrorKind::Unavailable]),
        ],
        cause: "the device fell off the bus, was reset, or was taken from this process",
        remedy: "look at the kernel log (dmesg), and start again once the device answers",
        ..ANY
    },
    Cause {
        name: "nic-lost",
        paths: EVERY,
        answers: &[Answer::Errno(&[5, 19]), Answer::Kind(&[ErrorKind::Unavailable])],
        cause: "the NIC went down or was taken away while it was asked",
        remedy: "look at the kernel log (dmesg), and open a new domain once the NIC is back",
        ..ANY
    },
    Cause {
        name: "nic-takes-no-copies",
        paths: &[Path::Staged],
        steps: IMPORT_OR_REGISTER,
        answers: &[UNSUPPORTED],
        cause: "hardware cannot reach memory through copies by itself",
        remedy: "make a direct way work, or copy through a registered host buffer (hmem_p2p::staging)",
        ..ANY
    },
];

impl Cause {
    fn fits(&self, circumstance: &Circumstance<'_>, facts: &Facts) -> bool {
        let Circumstance { path, step, iface, kind, mapping, error } = circumstance;
        self.paths.contains(path)
            && self.steps.contains(step)
            && self.iface.is_none_or(|wanted| wanted == *iface)
            && self.kind.is_none_or(|wanted| wanted == *kind)
            && self.mapping.is_none_or(|wanted| wanted == *mapping)
            && self.answers.iter().any(|answer| answer.is(error))
            && self.needs.is_none_or(|needs| (needs.holds)(facts))
    }
}

impl Answer {
    fn is(self, error: &Error) -> bool {
        match self {
            Self::Errno(numbers) => {
                error.os_errno().is_some_and(|errno| numbers.contains(&errno.0))
            }
            Self::Driver(codes) => {
                error.driver().is_some_and(|driver| codes.contains(&driver.code))
            }
            // These two numbers are turned into kinds that say less.
            Self::Kind(kinds) => {
                let exact = error.os_errno().is_some_and(|errno| matches!(errno.0, 121 | 524));
                !exact && kinds.contains(&error.kind())
            }
        }
    }
}

/// The probable cause of a refusal, where it is a known one.
#[must_use]
pub fn probable(circumstance: &Circumstance<'_>, facts: &Facts) -> Option<&'static Cause> {
    CAUSES.iter().find(|cause| cause.fits(circumstance, facts))
}

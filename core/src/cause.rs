//! The probable causes of refused paths, and their remedies.
//!
//! A rule maps a refusal (path, step and error) to a cause. Rules for one driver belong to its
//! iface ([`Iface::causes`](crate::Iface::causes)). General rules belong to the path search.

use std::{collections::BTreeSet, fs, path::PathBuf};

use crate::{
    Access, AllocationKind, Error, ErrorKind, Path, ProbableCause, dma_buf::DmaBufMapping,
    named_enum,
};

named_enum! {
    /// A step of an attempt to register memory. Each refusal names the step that failed. The steps
    /// from [`Step::Import`] on are in the order of a path search.
    #[non_exhaustive]
    pub enum Step {
        /// Opening a NIC.
        OpenNic = "opening the NIC",
        /// Opening the driver of a device.
        OpenDevice = "opening the device",
        /// Making a system call that the library needs for itself, such as `io_uring_setup`.
        SystemCall = "system call",
        /// Checking that the NIC supports the path at all.
        Import = "import",
        /// Finding the physical segments of the memory.
        Segments = "segments",
        /// Exporting a range of several physical segments as one dma-buf. If a single segment is
        /// refused with the same error, the step is [`Step::Export`] instead.
        ExportWhole = "export of several segments in one",
        /// Exporting the memory as a range, a segment or a whole allocation
        /// ([`ExportUnit`](crate::path::ExportUnit)), or registering that export. A refusal has
        /// this step only if an export in another unit succeeded afterwards. Otherwise its step is
        /// [`Step::Export`] or [`Step::Register`].
        ExportUnit = "export in one unit",
        /// Exporting the memory as a dma-buf, or opening it to peer-memory clients.
        Export = "export",
        /// Registering the memory with the NIC.
        Register = "register",
        /// Transferring a page of the memory between the NIC and the device, as a check
        /// ([`DomainAttr::reach_check`](crate::DomainAttr::reach_check)).
        Transfer = "transfer",
    }
}

/// A condition on the error of a refused path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Holds if the operating system's error number is in this list.
    Errno(&'static [i32]),
    /// Holds if the driver's error code is in this list.
    Driver(&'static [i64]),
    /// Holds if the kind of the error is in this list.
    Kind(&'static [ErrorKind]),
    /// Holds if the error names this limit in its context value `limit`.
    Limit(&'static str),
}

impl Answer {
    /// The condition for errors that mean "the operation is not supported".
    pub const UNSUPPORTED: Self = Self::Kind(&[ErrorKind::Unsupported, ErrorKind::NoSys]);

    fn is(self, error: &Error) -> bool {
        match self {
            Self::Errno(numbers) => {
                error.os_errno().is_some_and(|errno| numbers.contains(&errno.0))
            }
            Self::Driver(codes) => {
                error.driver().is_some_and(|driver| codes.contains(&driver.code))
            }
            // An error with the number 121 (EREMOTEIO) or 524 (ENOTSUPP) never matches by its kind,
            // because its number is more precise.
            Self::Kind(kinds) => {
                let exact = error.os_errno().is_some_and(|errno| matches!(errno.0, 121 | 524));
                !exact && kinds.contains(&error.kind())
            }
            Self::Limit(name) => error.context_value("limit") == Some(name),
        }
    }
}

/// A refused path, as the input of a search for the cause.
#[derive(Clone, Copy, Debug)]
pub struct RefusalContext<'a> {
    /// The refused path.
    pub path: Path,
    /// The step that was refused.
    pub step: Step,
    /// The kind of memory.
    pub kind: AllocationKind,
    /// The dma-buf mapping that was refused. This is the default mapping if both dma-buf mappings
    /// were refused, or if the path uses no dma-buf.
    pub mapping: DmaBufMapping,
    /// The error of the refusal.
    pub error: &'a Error,
}

/// A coherent link between a device and the CPU, as a NIC sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CoherentLink {
    /// NVLink-C2C. A NIC can reach the device's memory through the CPU and this link (the default
    /// mapping of a dma-buf), or through the device's BAR (the PCIe mapping).
    C2c {
        /// True if a PCIe switch or root port is above both the NIC and the device. If false, the
        /// NIC cannot reach the BAR.
        shares_switch: bool,
    },
    /// The device has no memory of its own and uses the CPU's. NICs reach only memory that was
    /// allocated as host memory.
    Integrated,
}

/// The state of the capability `CAP_IPC_LOCK`, which exempts a process from the locked-memory
/// limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IpcLock {
    /// The process does not have the capability.
    Absent,
    /// The process has the capability, so the locked-memory limit does not apply.
    Effective,
    /// The process has the capability in a user namespace of its own. The capability has no effect
    /// on the limit, because the kernel checks for it in the initial user namespace.
    UserNamespace,
    /// The container was given the capability, but the process does not have it, because the
    /// process does not run as root.
    NotInherited,
}

/// Facts about a refused request, and about the NIC that refused it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestFacts {
    /// The length in bytes of all pages that the request touches.
    pub len: u64,
    /// The rights of the request.
    pub access: Access,
    /// The number of regions that the domain has now.
    pub regions: u64,
    /// The largest number of regions of the NIC
    /// ([`ProviderAttr::max_mr_count`](crate::provider::ProviderAttr::max_mr_count)).
    pub max_regions: u64,
}

/// Facts about a machine. An optional fact is `None` if it is unknown. The sets
/// [`Facts::missing_nodes`] and [`Facts::forbidden_nodes`] are empty if no such node is known.
///
/// The facts never choose a path, because a path search tries every path. They distinguish causes
/// that lead to the same error. [`Facts::coherent_link`] also decides which mapping of a dma-buf is
/// tried first.
///
/// ```
/// use hmem_core::cause::Facts;
///
/// let facts = Facts { kernel: Some((5, 4)), ..Facts::default() };
/// assert_eq!(facts.has_module("nvidia_peermem"), None);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// The kernel's major and minor version, such as `(6, 12)`; `None` if unknown.
    pub kernel: Option<(u32, u32)>,
    /// The kernel modules that are loaded, or built in and listed in `/sys/module`; `None` if
    /// unknown. The set contains only modules that the general rules name. Names have underscores.
    pub modules: Option<BTreeSet<String>>,
    /// The kernel options that are set to `y` or `m`; `None` if unknown. The set contains only
    /// options that the rules name. Names are without `CONFIG_`.
    pub kernel_options: Option<BTreeSet<String>>,
    /// The locked-memory limit of the process in bytes; `None` if unknown. `u64::MAX` means no
    /// limit.
    pub memlock: Option<u64>,
    /// The bytes of the pages that the process has pinned now, as the kernel counts them for the
    /// locked-memory limit; `None` if unknown.
    pub pinned: Option<u64>,
    /// The state of the capability `CAP_IPC_LOCK`, which lifts the locked-memory limit; `None` if
    /// unknown.
    pub ipc_lock: Option<IpcLock>,
    /// True if a seccomp filter restricts the system calls of the process; `None` if unknown.
    pub seccomp: Option<bool>,
    /// Device nodes that the kernel announces and `/dev` lacks, such as
    /// `/dev/infiniband/uverbs0`.
    pub missing_nodes: BTreeSet<String>,
    /// Device nodes that the process has no permission to open for reading and writing.
    pub forbidden_nodes: BTreeSet<String>,
    /// True if an IOMMU translates the addresses that the NIC or the device uses; `None` if
    /// unknown.
    pub iommu_translates: Option<bool>,
    /// True if PCI access control (ACS) redirects requests between the NIC and the device through
    /// the root complex; `None` if unknown.
    pub acs_redirects: Option<bool>,
    /// The size of the device's largest BAR in bytes; `None` if unknown.
    pub bar: Option<u64>,
    /// The coherent link between the device and the CPU; `None` if no such link is known.
    pub coherent_link: Option<CoherentLink>,
    /// NUMA nodes that have memory and no processors: memory of GPUs or CXL devices that the kernel
    /// uses as host memory.
    pub memory_only_nodes: BTreeSet<u32>,
    /// The request that was refused; `None` if unknown.
    pub request: Option<RequestFacts>,
    /// The folder that [`Facts::text`] reads from: `/`, or a folder with a recorded copy of `/`.
    /// `None` means that no file is read.
    pub root: Option<PathBuf>,
}

impl Facts {
    /// Returns true if [`Facts::modules`] contains the kernel module `name`; `None` if unknown.
    /// `name` has underscores.
    ///
    /// The set contains only modules that the general rules name. A rule of an iface for another
    /// module calls [`Facts::text`] with `sys/module/NAME/initstate`.
    #[must_use]
    pub fn has_module(&self, name: &str) -> Option<bool> {
        self.modules.as_ref().map(|modules| modules.contains(name))
    }

    /// Returns true if the locked-memory limit has room for the request: pinning the pages of the
    /// request would not exceed the limit. Returns `None` if unknown.
    #[must_use]
    pub fn memlock_has_room(&self) -> Option<bool> {
        let needed = self.pinned?.saturating_add(self.request?.len);
        Some(needed <= self.memlock?)
    }

    /// Returns true if [`Facts::kernel_options`] contains the kernel option `name`; `None` if
    /// unknown. `name` is without `CONFIG_`.
    #[must_use]
    pub fn has_option(&self, name: &str) -> Option<bool> {
        self.kernel_options.as_ref().map(|options| options.contains(name))
    }

    /// Reads a file of the machine, such as a driver's file in procfs. Returns `None` if
    /// [`Facts::root`] is `None` or the file cannot be read as UTF-8. `path` has no leading slash.
    #[must_use]
    pub fn text(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.root.as_ref()?.join(path)).ok()
    }
}

/// A condition that a rule places on the machine, for example that the kernel is older than 5.12.
#[derive(Clone, Copy, Debug)]
pub struct Needs {
    /// The condition in words, such as `the kernel is older than 5.12`.
    pub text: &'static str,
    /// A function that returns true if the facts meet the condition.
    pub holds: fn(&Facts) -> bool,
}

impl Needs {
    /// Creates a condition, as the value of [`RefusalCause::needs`].
    #[must_use]
    pub const fn some(text: &'static str, holds: fn(&Facts) -> bool) -> Option<Self> {
        Some(Self { text, holds })
    }
}

/// A rule for a known cause. The rule matches a refusal if all its conditions hold.
///
/// ```
/// use hmem_core::{
///     Path,
///     cause::{Answer, RefusalCause, Step},
/// };
///
/// // A rule of an iface, for an error of its driver. The rank puts it before the general rule
/// // `NO_PCIE_MAPPING`, which has rank 50.
/// const NOT_SHARED: RefusalCause = RefusalCause {
///     name: "mine-not-shared",
///     rank: 35,
///     paths: &[Path::DmaBuf],
///     steps: &[Step::Export],
///     answers: &[Answer::Driver(&[7])],
///     cause: "the memory was not allocated to be shared",
///     remedy: "allocate it with MY_SHARED",
///     ..RefusalCause::ANY
/// };
/// ```
#[derive(Clone, Copy, Debug)]
pub struct RefusalCause {
    /// The name of the cause, and for a rule of this workspace a heading in `docs/causes.md`. Start
    /// the names of a plug-in's rules with the name of its iface.
    pub name: &'static str,
    /// The rank of the rule. Of all rules that match, the rule with the lowest rank is the most
    /// probable cause.
    ///
    /// Specific causes have lower ranks than general causes. General rules have ranks from 10 up.
    /// An iface may repeat the name and rank of a general rule, with a remedy for its own driver.
    /// The iface's rule is then preferred.
    pub rank: u32,
    /// The paths that the rule applies to.
    pub paths: &'static [Path],
    /// The steps that the rule applies to.
    pub steps: &'static [Step],
    /// The kind of memory that the rule applies to. `None` means any.
    pub kind: Option<AllocationKind>,
    /// The dma-buf mapping that the rule applies to. `None` means any.
    pub mapping: Option<DmaBufMapping>,
    /// The conditions on the error. At least one of them must hold.
    pub answers: &'static [Answer],
    /// The condition on the machine that must hold for this rule to match. `None` for no condition.
    pub needs: Option<Needs>,
    /// True if rules of higher rank are reported too, as less probable causes. Set this for an
    /// error that has several causes which the facts do not tell apart.
    pub ambiguous: bool,
    /// The text of the cause, in one sentence.
    pub cause: &'static str,
    /// A function that returns the evidence: numbers of this machine that point to the cause, for
    /// example the value of a limit.
    pub detail: Option<fn(&Facts) -> Option<String>>,
    /// The text of the remedy: an instruction for the user.
    pub remedy: &'static str,
}

impl RefusalCause {
    /// Default values for rules: any path, and the step [`Step::Register`]. This rule itself
    /// matches no refusal, because its list of `answers` is empty.
    pub const ANY: Self = Self {
        name: "",
        rank: u32::MAX,
        paths: &[Path::PlainHost, Path::DmaBuf, Path::PeerMemory, Path::Staged],
        steps: &[Step::Register],
        kind: None,
        mapping: None,
        answers: &[],
        needs: None,
        ambiguous: false,
        cause: "",
        detail: None,
        remedy: "",
    };

    /// General rule for a driver or device that has no PCIe mapping for exports.
    ///
    /// An iface can reuse this rule and the following general rules, with a remedy for its own
    /// driver.
    ///
    /// ```
    /// use hmem_core::cause::RefusalCause;
    ///
    /// const NO_EXPORT: RefusalCause = RefusalCause {
    ///     remedy: "update MyDriver to 2.0, and use device memory",
    ///     ..RefusalCause::DEVICE_WITHOUT_DMA_BUF
    /// };
    /// assert_eq!(NO_EXPORT.name, "device-without-dma-buf");
    /// ```
    pub const NO_PCIE_MAPPING: Self = Self {
        name: "no-pcie-mapping",
        rank: 50,
        paths: &[Path::DmaBuf],
        steps: &[Step::Export],
        mapping: Some(DmaBufMapping::Pcie),
        answers: &[Answer::UNSUPPORTED, Answer::Kind(&[ErrorKind::InvalidArgument])],
        cause: "the driver or the device has no PCIe mapping for exports",
        remedy: "none needed if the default mapping works, which is tried next; otherwise update \
                 the driver",
        ..Self::ANY
    };

    /// General rule for memory that was mapped with the driver's virtual memory API and was not
    /// created for RDMA.
    pub const VMM_RANGE: Self = Self {
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
        cause: "the range was mapped by hand from physical memory that was not created for RDMA, \
                or spans a hole between two mappings",
        remedy: "create the physical memory as RDMA capable, and register inside mapped ranges",
        ..Self::ANY
    };

    /// General rule for memory of a stream-ordered pool that the driver does not export.
    pub const STREAM_ORDERED_POOL: Self = Self {
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
        remedy: "allocate memory to register with the plain allocator, or from a pool created for \
                 RDMA if the driver has such pools",
        ..Self::ANY
    };

    /// General rule for a device, a driver or a kind of memory that has no dma-buf export.
    pub const DEVICE_WITHOUT_DMA_BUF: Self = Self {
        name: "device-without-dma-buf",
        rank: 160,
        paths: &[Path::DmaBuf],
        steps: &[Step::Export],
        answers: &[Answer::Errno(&[38, 95]), Answer::UNSUPPORTED],
        cause: "the device, its driver or this kind of memory has no dma-buf export",
        remedy: "use device memory and a driver that exports dma-bufs, or load a peer-memory \
                 client",
        ..Self::ANY
    };

    /// General rule for a process that has no permission to use the files of the NIC or the device,
    /// and for a dma-buf that was opened read-only.
    pub const DEVICE_FILES: Self = Self {
        name: "device-files",
        rank: 310,
        steps: &[Step::Segments, Step::ExportWhole, Step::Export, Step::Register],
        answers: &[
            Answer::Errno(&[1, 13]),
            Answer::Kind(&[ErrorKind::PermissionDenied, ErrorKind::AccessDenied]),
        ],
        cause: "the process may not use the device's files, or the buffer was opened \
                read-only",
        remedy: "give the user (or container) access to /dev/infiniband/uverbs* and to the \
                 device's files in /dev, and export for writing",
        ..Self::ANY
    };

    /// General rule for a device that no longer responds or is no longer available to the process.
    pub const DEVICE_LOST: Self = Self {
        name: "device-lost",
        rank: 320,
        paths: &[Path::DmaBuf, Path::PeerMemory],
        steps: &[Step::Segments, Step::ExportWhole, Step::Export],
        answers: &[Answer::Errno(&[5, 19]), Answer::Kind(&[ErrorKind::Unavailable])],
        cause: "the device fell off the bus, was reset, or was taken from this process",
        remedy: "look at the kernel log (`dmesg`), and restart the process when the device answers",
        ..Self::ANY
    };

    /// Returns the cause with its evidence.
    #[must_use]
    pub fn explain(&self, facts: &Facts) -> ProbableCause {
        let evidence = self.detail.and_then(|detail| detail(facts));
        ProbableCause::new(self.name, self.cause, self.remedy).evidence(evidence)
    }

    /// Returns true if all conditions of the rule hold except [`RefusalCause::needs`], which
    /// depends on the machine.
    #[must_use]
    pub fn may_fit(&self, context: &RefusalContext<'_>) -> bool {
        let RefusalContext { path, step, kind, mapping, error } = context;
        self.paths.contains(path)
            && self.steps.contains(step)
            && self.kind.is_none_or(|wanted| wanted == *kind)
            && self.mapping.is_none_or(|wanted| wanted == *mapping)
            && self.answers.iter().any(|answer| answer.is(error))
    }

    /// Returns true if the rule matches the refusal: all its conditions hold on a machine with
    /// these facts.
    #[must_use]
    pub fn fits(&self, context: &RefusalContext<'_>, facts: &Facts) -> bool {
        self.may_fit(context) && self.needs.is_none_or(|needs| (needs.holds)(facts))
    }

    /// Returns the rules for the probable causes of a refusal, the most probable first. Empty if no
    /// rule matches.
    ///
    /// The matching rules are sorted by rank. The list ends with the first rule that is not
    /// [ambiguous](RefusalCause::ambiguous). Of several rules with the same name, only the first is
    /// listed. Pass the iface's rules before the general rules.
    #[must_use]
    pub fn ranked<'r>(
        rows: impl IntoIterator<Item = &'r Self>,
        context: &RefusalContext<'_>,
        facts: &Facts,
    ) -> Vec<&'r Self> {
        let mut fitting: Vec<_> = rows.into_iter().filter(|row| row.fits(context, facts)).collect();
        fitting.sort_by_key(|row| row.rank);
        let mut names = BTreeSet::new();
        fitting.retain(|row| names.insert(row.name));
        if let Some(last) = fitting.iter().position(|row| !row.ambiguous) {
            fitting.truncate(last + 1);
        }
        fitting
    }
}

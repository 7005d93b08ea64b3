//! The probable causes of refused paths, and their remedies.
//!
//! A rule maps a refusal (path, step and error) to a cause. Rules for one driver belong to its
//! iface ([`Iface::causes`](crate::Iface::causes)). General rules belong to the path search.

use std::{collections::BTreeSet, fs, path::PathBuf};

use crate::{AllocationKind, Error, ErrorKind, Path, dma_buf::DmaBufMapping};

/// The step of a path that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// Checking that the NIC supports the path at all.
    Import,
    /// Finding the physical segments.
    Segments,
    /// Exporting a range of several physical segments as one dma-buf. If a single segment is
    /// refused with the same error, the step is [`Step::Export`] instead.
    ExportWhole,
    /// Exporting the memory as a dma-buf, or opening it to peer-memory clients.
    Export,
    /// Registering with the NIC.
    Register,
}

impl Step {
    /// Every step, in the order of a path search.
    pub const ALL: [Self; 5] =
        [Self::Import, Self::Segments, Self::ExportWhole, Self::Export, Self::Register];

    /// Returns the name, as it is printed.
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

/// The errors of a refusal that a rule matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// One of these numbers of the operating system.
    Errno(&'static [i32]),
    /// One of these codes of the iface's driver.
    Driver(&'static [i64]),
    /// One of these kinds of errors.
    Kind(&'static [ErrorKind]),
}

impl Answer {
    /// The operation is not supported.
    pub const UNSUPPORTED: Self = Self::Kind(&[ErrorKind::Unsupported, ErrorKind::NoSys]);

    fn is(self, error: &Error) -> bool {
        match self {
            Self::Errno(numbers) => {
                error.os_errno().is_some_and(|errno| numbers.contains(&errno.0))
            }
            Self::Driver(codes) => {
                error.driver().is_some_and(|driver| codes.contains(&driver.code))
            }
            // These two numbers say more than the kinds that they map to.
            Self::Kind(kinds) => {
                let exact = error.os_errno().is_some_and(|errno| matches!(errno.0, 121 | 524));
                !exact && kinds.contains(&error.kind())
            }
        }
    }
}

/// A refusal whose cause is wanted.
#[derive(Clone, Copy, Debug)]
pub struct RefusalContext<'a> {
    /// The path.
    pub path: Path,
    /// The step that was refused.
    pub step: Step,
    /// The kind of memory.
    pub kind: AllocationKind,
    /// The mapping of the dma-buf. The default mapping if that was refused too.
    pub mapping: DmaBufMapping,
    /// The error of the refusal.
    pub error: &'a Error,
}

/// Facts about a machine. A fact is `None` if it is unknown.
///
/// The facts never choose a path, because a path search tries every path. They only distinguish
/// causes that lead to the same error.
///
/// ```
/// use hmem_core::cause::Facts;
///
/// let facts = Facts { kernel: Some((5, 4)), ..Facts::default() };
/// assert_eq!(facts.has_module("nvidia_peermem"), None);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// The kernel's version and patch level: `(6, 12)`.
    pub kernel: Option<(u32, u32)>,
    /// The relevant kernel modules that are loaded, or built in with parameters. Names have
    /// underscores.
    pub modules: Option<BTreeSet<String>>,
    /// The relevant kernel options that are set to `y` or `m`, without `CONFIG_`.
    pub kernel_options: Option<BTreeSet<String>>,
    /// The locked-memory limit of the process in bytes. `u64::MAX` means no limit.
    pub memlock: Option<u64>,
    /// Set if an IOMMU translates the addresses that the NIC or the device uses.
    pub iommu_translates: Option<bool>,
    /// Set if PCI access control (ACS) redirects requests between the NIC and the device through
    /// the root complex.
    pub acs_redirects: Option<bool>,
    /// The size of the device's largest BAR in bytes.
    pub bar: Option<u64>,
    /// The root folder of the machine's files, for [`Facts::text`].
    pub root: Option<PathBuf>,
}

impl Facts {
    /// Returns true if a relevant kernel module is present. `name` has underscores. `None` if
    /// unknown.
    #[must_use]
    pub fn has_module(&self, name: &str) -> Option<bool> {
        self.modules.as_ref().map(|modules| modules.contains(name))
    }

    /// Returns true if a relevant kernel option is set. `name` is without `CONFIG_`. `None` if
    /// unknown.
    #[must_use]
    pub fn has_option(&self, name: &str) -> Option<bool> {
        self.kernel_options.as_ref().map(|options| options.contains(name))
    }

    /// Reads a file of the machine, for example a driver's file in procfs. `path` has no leading
    /// slash.
    #[must_use]
    pub fn text(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.root.as_ref()?.join(path)).ok()
    }
}

/// A fact that a rule requires.
#[derive(Clone, Copy, Debug)]
pub struct Needs {
    /// The fact as text.
    pub text: &'static str,
    /// Returns true if the fact is known to be true.
    pub holds: fn(&Facts) -> bool,
}

impl Needs {
    /// Creates the value of [`RefusalCause::needs`].
    #[must_use]
    pub const fn some(text: &'static str, holds: fn(&Facts) -> bool) -> Option<Self> {
        Some(Self { text, holds })
    }
}

/// A rule for a known cause. It matches a refusal if all its conditions hold.
///
/// ```
/// use hmem_core::{
///     Path,
///     cause::{Answer, RefusalCause, Step},
/// };
///
/// // A rule of an iface, for an error of its driver. Its rank is lower than that of general rules.
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
    /// The name of the cause: a heading in `docs/causes.md`.
    pub name: &'static str,
    /// The rank. Of all rules that match, the one with the lowest rank is the probable cause.
    ///
    /// Special causes have lower ranks than general ones. The ranks of general causes are multiples
    /// of
    /// 10. An iface may have a rule with the name and rank of a general one, with a remedy for its
    /// driver. Then the iface's rule is preferred.
    pub rank: u32,
    /// The paths.
    pub paths: &'static [Path],
    /// The steps.
    pub steps: &'static [Step],
    /// The kind of memory. `None` matches any.
    pub kind: Option<AllocationKind>,
    /// The mapping of the dma-buf. `None` matches any.
    pub mapping: Option<DmaBufMapping>,
    /// The errors. One of them must match.
    pub answers: &'static [Answer],
    /// A fact about the machine that must be true.
    pub needs: Option<Needs>,
    /// The text of the cause, in one sentence.
    pub cause: &'static str,
    /// The text of the remedy, an instruction.
    pub remedy: &'static str,
}

impl RefusalCause {
    /// Default values for rules: every path, and the step [`Step::Register`]. The default matches
    /// no refusal, because it has no errors.
    pub const ANY: Self = Self {
        name: "",
        rank: u32::MAX,
        paths: &[Path::PlainHost, Path::DmaBuf, Path::PeerMemory, Path::Staged],
        steps: &[Step::Register],
        kind: None,
        mapping: None,
        answers: &[],
        needs: None,
        cause: "",
        remedy: "",
    };

    /// Returns true if the rule matches the refusal.
    #[must_use]
    pub fn fits(&self, context: &RefusalContext<'_>, facts: &Facts) -> bool {
        let RefusalContext { path, step, kind, mapping, error } = context;
        self.paths.contains(path)
            && self.steps.contains(step)
            && self.kind.is_none_or(|wanted| wanted == *kind)
            && self.mapping.is_none_or(|wanted| wanted == *mapping)
            && self.answers.iter().any(|answer| answer.is(error))
            && self.needs.is_none_or(|needs| (needs.holds)(facts))
    }

    /// Returns the probable cause of a refusal: the matching rule with the lowest rank, and the
    /// first one among equal ranks. Pass the iface's rules before the general ones.
    #[must_use]
    pub fn probable<'r>(
        rows: impl IntoIterator<Item = &'r Self>,
        context: &RefusalContext<'_>,
        facts: &Facts,
    ) -> Option<&'r Self> {
        rows.into_iter().filter(|row| row.fits(context, facts)).min_by_key(|row| row.rank)
    }
}

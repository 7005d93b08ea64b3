//! Variants of paths (the path and its dma-buf mapping), and the refusals of paths.

use std::fmt;

use hmem_core::{
    Error, ErrorKind, Path,
    cause::Step,
    iface::DmaBufMapping,
    path::{Attempt, DirectPath, ExportUnit},
};

/// The number of physical segments of a registration, and the number of dma-bufs that contain these
/// segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DmaBufLayout {
    pub(super) segments: usize,
    pub(super) dma_bufs: usize,
}

impl DmaBufLayout {
    /// Returns true if at least one dma-buf holds several segments.
    pub(super) fn spans(self) -> bool {
        self.dma_bufs < self.segments
    }
}

impl fmt::Display for DmaBufLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ending = if self.dma_bufs == 1 { "" } else { "s" };
        write!(f, "{} segments in {} dma-buf{ending}", self.segments, self.dma_bufs)
    }
}

/// The exports of a registration: their unit, and the numbers of segments and dma-bufs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ExportShape {
    pub(super) unit: ExportUnit,
    /// The numbers of segments and dma-bufs. `None` if every range is one segment, or if the path
    /// uses no dma-bufs.
    pub(super) layout: Option<DmaBufLayout>,
}

/// Returns text about the unit of export, to append to the description of a call. The text is empty
/// if the unit is exactly the range.
pub(super) const fn unit_note(unit: ExportUnit) -> &'static str {
    match unit {
        ExportUnit::Range => "",
        ExportUnit::Segment => ", whole segments",
        ExportUnit::Allocation => ", whole allocation",
    }
}

/// A path, with the dma-buf mapping if the path has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PathVariant {
    HostPages,
    DmaBuf(DmaBufMapping),
    PeerMemory,
    Staged,
}

impl PathVariant {
    pub(super) const fn path(self) -> Path {
        match self {
            Self::HostPages => Path::PlainHost,
            Self::DmaBuf(_) => Path::DmaBuf,
            Self::PeerMemory => Path::PeerMemory,
            Self::Staged => Path::Staged,
        }
    }

    pub(super) const fn mapping(self) -> DmaBufMapping {
        match self {
            Self::DmaBuf(mapping) => mapping,
            _ => DmaBufMapping::Default,
        }
    }

    /// Returns a description of the registration call for an attempt.
    pub(super) fn call(self, shape: ExportShape) -> String {
        match self {
            Self::HostPages => "register(host pages)".into(),
            Self::DmaBuf(mapping) => {
                let layout = shape.layout.map_or(String::new(), |layout| format!(", {layout}"));
                format!("register(dma-buf, {mapping:?} mapping{layout}{})", unit_note(shape.unit))
            }
            Self::PeerMemory => "register(peer memory)".into(),
            Self::Staged => "register(staged)".into(),
        }
    }

    /// Returns a description of the reach check of the path for an attempt.
    pub(super) fn check(self) -> String {
        self.call(ExportShape::default()).replacen("register", "check_reach", 1)
    }

    /// Returns the attempt that records a successful registration over this path.
    pub(super) fn success(self, shape: ExportShape) -> Attempt {
        let unit = matches!(self, Self::DmaBuf(_)).then_some(shape.unit);
        Attempt { unit, ..Attempt::success(self.path(), self.call(shape)) }
    }
}

impl From<DirectPath> for PathVariant {
    fn from(path: DirectPath) -> Self {
        match path {
            DirectPath::DmaBuf(mapping) => Self::DmaBuf(mapping),
            DirectPath::PeerMemory => Self::PeerMemory,
        }
    }
}

/// The refusal of a path: the failed call and its error.
#[derive(Clone, Debug)]
pub(super) struct PathRefusal {
    pub(super) step: Step,
    pub(super) call: String,
    pub(super) error: Error,
    /// The memory that was exported or was to be exported; `None` for a path without dma-bufs, and
    /// for a dma-buf of the application.
    pub(super) unit: Option<ExportUnit>,
    /// True if the reason for the refusal is known to be the buffer: its physical segments, or its
    /// start for Data Direct. Other buffers may be accepted. No driver was asked to export or
    /// register the memory.
    pub(super) only_this_buffer: bool,
    /// Earlier refusals on this path, of other exports of the same memory.
    pub(super) before: Vec<PathRefusal>,
    /// Failed releases of the exports that this refusal made useless.
    pub(super) also: Vec<Attempt>,
}

impl PathRefusal {
    pub(super) fn new(step: Step, call: String, error: Error) -> Self {
        Self {
            step,
            call,
            error,
            unit: None,
            only_this_buffer: false,
            before: Vec::new(),
            also: Vec::new(),
        }
    }

    /// Returns true if the request itself is invalid, so that every path would refuse it.
    pub(super) fn is_about_the_request(&self) -> bool {
        matches!(
            self.error.kind(),
            ErrorKind::NoKey
                | ErrorKind::KeyRejected
                | ErrorKind::BadFlags
                | ErrorKind::BadAccess
                | ErrorKind::BadPageSize
                | ErrorKind::TooManyRanges
                | ErrorKind::TooLong
                | ErrorKind::ZeroLength
                | ErrorKind::AddressWraps
                | ErrorKind::ModeMismatch
                | ErrorKind::BadState
                | ErrorKind::Canceled
        )
    }

    /// Returns true if a larger export of the same memory may succeed after this refusal. The error
    /// kind decides: drivers and NICs may return BadAddress, Driver or "not supported" for a range
    /// only because it does not begin at a certain boundary, or because it is not a whole
    /// allocation.
    pub(super) fn larger_may_help(&self) -> bool {
        let by_kind = matches!(self.error.kind(), ErrorKind::BadAddress | ErrorKind::Driver);
        !self.only_this_buffer && (by_kind || self.is_unsupported())
    }

    /// Returns true if both refusals have the same error kind, or both mean "not supported".
    pub(super) fn is_like(&self, other: &Self) -> bool {
        self.error.kind() == other.error.kind() || (self.is_unsupported() && other.is_unsupported())
    }

    /// Returns true for the error kinds that drivers use for "not supported". The kinds differ
    /// between driver releases.
    pub(super) fn is_unsupported(&self) -> bool {
        matches!(
            self.error.kind(),
            ErrorKind::Unsupported | ErrorKind::NoSys | ErrorKind::InvalidArgument
        )
    }

    /// Returns true if the error kind is permanent: a later registration would be refused too.
    pub(super) fn is_permanent(&self) -> bool {
        matches!(
            self.error.kind(),
            ErrorKind::Unsupported
                | ErrorKind::NoSys
                | ErrorKind::Unreachable
                | ErrorKind::InvalidArgument
                | ErrorKind::BadAddress
                | ErrorKind::PermissionDenied
                | ErrorKind::AccessDenied
        )
    }
}

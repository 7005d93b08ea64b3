//! The variants of a path, and their refusals.

use std::fmt;

use hmem_core::{Error, ErrorKind, Path, cause::Step, iface::DmaBufMapping, path::Attempt};

/// Number of dma-bufs that hold a range of several segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DmaBufLayout {
    pub(super) segments: usize,
    pub(super) dma_bufs: usize,
}

impl DmaBufLayout {
    /// Returns true if a dma-buf holds several segments.
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

/// A path with the details that are needed to use it again.
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

    /// Returns the registering call as attempts display it. `layout` is set for ranges of several
    /// segments.
    pub(super) fn call(self, layout: Option<DmaBufLayout>) -> String {
        match (self, layout) {
            (Self::HostPages, _) => "register(host pages)".into(),
            (Self::DmaBuf(mapping), None) => format!("register(dma-buf, {mapping:?} mapping)"),
            (Self::DmaBuf(mapping), Some(layout)) => {
                format!("register(dma-buf, {mapping:?} mapping, {layout})")
            }
            (Self::PeerMemory, _) => "register(peer memory)".into(),
            (Self::Staged, _) => "register(staged)".into(),
        }
    }

    /// Returns the attempt that succeeded.
    pub(super) fn success(self, layout: Option<DmaBufLayout>) -> Attempt {
        Attempt::success(self.path(), self.call(layout))
    }
}

/// The refusal of a path.
#[derive(Debug)]
pub(super) struct PathRefusal {
    pub(super) step: Step,
    pub(super) call: String,
    pub(super) error: Error,
    /// Set if the refusal concerns only this buffer, because of its segments. No driver was called.
    pub(super) own: bool,
    /// Refusals of the same path before this one, which had more of the range in one dma-buf.
    pub(super) before: Vec<PathRefusal>,
    /// Errors of calls that undid parts of the path.
    pub(super) also: Vec<Attempt>,
}

impl PathRefusal {
    pub(super) fn new(step: Step, call: String, error: Error) -> Self {
        Self { step, call, error, own: false, before: Vec::new(), also: Vec::new() }
    }

    /// Returns true if every path would be refused for the same reason: the request itself is at
    /// fault.
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

    /// Returns true if both refusals have the same error kind, or both mean "not supported".
    pub(super) fn is_like(&self, other: &Self) -> bool {
        self.error.kind() == other.error.kind() || (self.is_unsupported() && other.is_unsupported())
    }

    /// Returns true for the error kinds by which drivers say "not supported". They differ by
    /// release.
    pub(super) fn is_unsupported(&self) -> bool {
        matches!(
            self.error.kind(),
            ErrorKind::Unsupported | ErrorKind::NoSys | ErrorKind::InvalidArgument
        )
    }

    /// Returns true if later registrations of the class would be refused too, judging by the error
    /// kind.
    pub(super) fn lasts(&self) -> bool {
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

//! Memory of regions and requests, and copies between them.
//!
//! - Memory that stays mapped, and files that the NIC has mapped, are copied directly.
//! - Memory that the application may unmap is copied by the kernel, which reports a fault as an
//!   error.
//! - All other memory is *indirect*: function calls copy it to and from a buffer. It comprises
//!   pinned pages, files that can shrink, device memory and staged memory.

mod file;
mod host;
mod indirect;
mod pinned;

use std::{cell::Cell, sync::Arc};

pub(super) use file::{DmaBufAccess, Mapping, import as import_fd};
use hmem_core::{Error, Result, racing_copy};
use hmem_p2p::staging::{
    ChunkPlan, Claim, FailedStep, Pipeline, Pool, Posted, Run as StagedRun, StagedRange,
    Use as PoolUse, View,
};
use host::Written;
pub(super) use host::{AnnouncedPages, direct_pointer, populate};
pub(super) use indirect::{DeviceMemory, IndirectMemory, staged};
pub(super) use pinned::{Pinned, Pinner};

use super::Few;

/// The maximum size of the buffer that [`bounce`] copies through.
const MAX_BOUNCE_LEN: usize = 256 << 10;

/// The memory behind a piece of a region. A piece is a contiguous part of one kind of memory.
#[derive(Clone, Debug)]
pub(super) enum PieceMemory {
    /// Addresses that stay mapped as long as the region exists.
    Owned,
    /// Addresses that the application may remap or unmap.
    Borrowed,
    /// A file that the NIC has mapped.
    Mapped(Arc<Mapping>),
    /// Pinned pages: those that were mapped at the addresses at registration or at the last
    /// refresh.
    Pinned(Arc<Pinned>),
    /// Indirect memory, which is read and written through function calls.
    Indirect(Arc<dyn IndirectMemory>),
}

impl PieceMemory {
    /// Returns true for host memory that is registered by its addresses.
    pub(super) fn is_host(&self) -> bool {
        matches!(self, Self::Owned | Self::Borrowed | Self::Pinned(_))
    }

    /// Returns the span of the `len` bytes at `at`. Owned, borrowed and pinned memory takes an
    /// address for `at`, and a mapped file takes an offset. For indirect memory, the implementation
    /// of [`IndirectMemory`] defines `at`.
    #[inline]
    pub(super) fn span(&self, at: u64, len: u64) -> Span<'_> {
        match self {
            Self::Owned => Span::mapped(at, len),
            Self::Borrowed => Span::Kernel { at, len },
            Self::Mapped(mapping) => {
                Span::Direct { at: mapping.address(at), len, mapping: Some(mapping) }
            }
            Self::Pinned(memory) => Span::Indirect { at, len, memory: &**memory },
            Self::Indirect(memory) => Span::Indirect { at, len, memory: &**memory },
        }
    }
}

/// Contiguous bytes of one kind of memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum Span<'a> {
    /// Bytes that stay mapped while the span is in use. They may be in a buffer of the NIC.
    /// Otherwise they are in a region's memory or mapped file. The user of the span then holds a
    /// guard of the region, which keeps the bytes mapped.
    Direct { at: u64, len: u64, mapping: Option<&'a Mapping> },
    /// Addresses that may be unmapped, so the kernel copies their bytes.
    Kernel { at: u64, len: u64 },
    /// Bytes of indirect memory, which are read and written through function calls.
    Indirect { at: u64, len: u64, memory: &'a dyn IndirectMemory },
}

impl<'a> Span<'a> {
    /// Creates the span of `len` bytes at address `at`, which stay mapped while the span is in use.
    const fn mapped(at: u64, len: u64) -> Self {
        Self::Direct { at, len, mapping: None }
    }

    pub(super) const fn len(&self) -> u64 {
        match *self {
            Self::Direct { len, .. } | Self::Kernel { len, .. } | Self::Indirect { len, .. } => len,
        }
    }

    /// Returns the staged memory and the offset of the span in it, or `None` if the memory is not
    /// staged.
    pub(super) fn staged(self) -> Option<(&'a StagedRange, u64)> {
        match self {
            Self::Indirect { at, memory, .. } => Some((memory.staged()?, at)),
            Self::Direct { .. } | Self::Kernel { .. } => None,
        }
    }

    /// Returns true for memory that was imported as a dma-buf or as a device address.
    pub(super) fn is_imported(self) -> bool {
        match self {
            Self::Direct { mapping, .. } => mapping.is_some(),
            Self::Indirect { memory, .. } => memory.staged().is_none(),
            Self::Kernel { .. } => false,
        }
    }

    fn mapping(&self) -> Option<&'a Mapping> {
        match self {
            Self::Direct { mapping, .. } => *mapping,
            Self::Kernel { .. } | Self::Indirect { .. } => None,
        }
    }

    /// Returns true if a read of the span cannot fail. Such a span is mapped, and is not in a file
    /// that may be a dma-buf: announcing an access to a dma-buf can fail.
    pub(super) const fn reads_never_fail(&self) -> bool {
        matches!(self, Self::Direct { mapping: None, .. })
    }

    /// Returns the part of the span that starts at offset `skip` and has `len` bytes.
    pub(super) const fn part(self, skip: u64, len: u64) -> Self {
        match self {
            Self::Direct { at, mapping, .. } => Self::Direct { at: at + skip, len, mapping },
            Self::Kernel { at, .. } => Self::Kernel { at: at + skip, len },
            Self::Indirect { at, memory, .. } => Self::Indirect { at: at + skip, len, memory },
        }
    }

    /// Copies the bytes of the span to `into`. Both have the same length.
    pub(super) fn load(self, into: &mut [u8]) -> Result<()> {
        if let Self::Indirect { at, memory, .. } = self {
            return memory.load(at, into);
        }
        let at = into.as_mut_ptr().expose_provenance();
        copy_span(self, Span::mapped(at as u64, into.len() as u64))
    }

    /// Copies the bytes of `from` to the span. Both have the same length.
    pub(super) fn store(self, from: &[u8]) -> Result<()> {
        if let Self::Indirect { at, memory, .. } = self {
            return memory.store(at, from);
        }
        let at = from.as_ptr().expose_provenance();
        copy_span(Span::mapped(at as u64, from.len() as u64), self)
    }

    /// Makes written bytes persistent if they outlive the process, as in a file or on a DAX device.
    /// [`host`] lists the method for each kind of memory. Bytes in device memory become persistent
    /// later, when the region flushes the device.
    pub(super) fn persist(self) -> Result<()> {
        match self {
            Self::Indirect { at, len, memory } => memory.persist(at, len),
            Self::Direct { at, len, mapping: Some(mapping) } => mapping.persist(at, len),
            Self::Direct { at, len, mapping: None } => Written { at, len, owned: true }.persist(),
            Self::Kernel { at, len } => Written { at, len, owned: false }.persist(),
        }
    }
}

/// Copies like [`copy`], and also reports which side failed. If no read of a source span can fail
/// ([`Span::reads_never_fail`]), the target has failed. Otherwise the error says that the side is
/// not known.
#[inline]
pub(super) fn copy_reporting_side(from: &[Span<'_>], to: &[Span<'_>]) -> Result<u64, CopyError> {
    copy(from, to).map_err(|error| {
        let is_target = from.iter().all(Span::reads_never_fail);
        let step = if is_target { FailedStep::TargetCopy } else { FailedStep::NicTransfer };
        CopyError { step, error }
    })
}

/// Copies a list of spans to a list of the same total length, and returns the number of bytes. The
/// spans of the two lists may have different lengths.
#[inline]
fn copy(from: &[Span<'_>], to: &[Span<'_>]) -> Result<u64> {
    if let ([from], [to]) = (from, to) {
        copy_span(*from, *to)?;
        return Ok(to.len());
    }
    let mut moved = 0;
    let (mut sources, mut source_skip) = (from.iter(), 0);
    let mut source = sources.next();
    for target in to {
        let mut target_skip = 0;
        while target_skip < target.len() {
            let Some(span) = source else { return Ok(moved) };
            let part = (span.len() - source_skip).min(target.len() - target_skip);
            if part > 0 {
                copy_span(span.part(source_skip, part), target.part(target_skip, part))?;
            }
            moved += part;
            target_skip += part;
            source_skip += part;
            if source_skip == span.len() {
                (source, source_skip) = (sources.next(), 0);
            }
        }
    }
    Ok(moved)
}

/// Copies between two spans of the same length.
#[inline]
#[allow(unsafe_code, reason = "copies between ranges that the caller keeps mapped")]
pub(super) fn copy_span(from: Span<'_>, to: Span<'_>) -> Result<()> {
    match (from, to) {
        (
            Span::Direct { at: from, len, mapping: None },
            Span::Direct { at: to, mapping: None, .. },
        ) => {
            // SAFETY: both ranges are mapped while their spans are in use (`Span::Direct`). The
            // application upholds the conditions of the registration and of the request. These
            // imply the conditions of `racing_copy` on references and on racing accesses.
            unsafe { racing_copy(direct_pointer(from), direct_pointer(to), len as usize) };
            Ok(())
        }
        (Span::Indirect { .. }, _) | (_, Span::Indirect { .. }) => bounce(from, to),
        _ => {
            let _reading = DmaBufAccess::begin(from.mapping(), false)?;
            let _writing = DmaBufAccess::begin(to.mapping(), true)?;
            copy_near(from, to)
        }
    }
}

/// Copies between two spans of the same length. The caller has announced the accesses to dma-bufs
/// ([`DmaBufAccess`]).
#[allow(unsafe_code, reason = "copies between ranges that the caller keeps mapped")]
fn copy_near(from: Span<'_>, to: Span<'_>) -> Result<()> {
    match (from, to) {
        (Span::Direct { at: from, len, .. }, Span::Direct { at: to, .. }) => {
            // SAFETY: both ranges are mapped while their spans are in use (`Span::Direct`). The
            // application upholds the conditions of the registration and of the request. These
            // imply the conditions of `racing_copy` on references and on racing accesses.
            unsafe { racing_copy(direct_pointer(from), direct_pointer(to), len as usize) };
            Ok(())
        }
        (
            Span::Kernel { at: from, len },
            Span::Direct { at: to, .. } | Span::Kernel { at: to, .. },
        ) => host::kernel_read(from, to, len),
        (Span::Direct { at: from, len, .. }, Span::Kernel { at: to, .. }) => {
            host::kernel_write(from, to, len)
        }
        (Span::Indirect { .. }, _) | (_, Span::Indirect { .. }) => bounce(from, to),
    }
}

/// Copies between two spans of the same length through a buffer, in parts of at most
/// [`MAX_BOUNCE_LEN`] bytes. Used if one of the spans is indirect memory.
fn bounce(from: Span<'_>, to: Span<'_>) -> Result<()> {
    let len = to.len();
    let mut buffer = vec![0; MAX_BOUNCE_LEN.min(usize::try_from(len).unwrap_or(MAX_BOUNCE_LEN))];
    let mut done = 0;
    while done < len {
        let part = (len - done).min(buffer.len() as u64);
        let chunk = &mut buffer[..part as usize];
        from.part(done, part).load(chunk)?;
        to.part(done, part).store(chunk)?;
        done += part;
    }
    Ok(())
}

/// Returns spans that cover the first `len` bytes of `spans`, or all bytes if there are fewer.
pub(super) fn head<'a>(spans: &[Span<'a>], len: u64) -> Few<Span<'a>> {
    let (mut head, mut left) = (Few::new(), len);
    for span in spans {
        let part = span.len().min(left);
        if part == 0 {
            break;
        }
        head.push(span.part(0, part));
        left -= part;
    }
    head
}

/// Returns a copy of the first `len` bytes of `spans`, which have at least `len` bytes.
pub(super) fn gather(spans: &[Span<'_>], len: u64) -> Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(len).expect("local memory fits the address space")];
    let mut rest = bytes.as_mut_slice();
    for span in head(spans, len).iter() {
        let (part, after) = rest.split_at_mut(span.len() as usize);
        span.load(part)?;
        rest = after;
    }
    Ok(bytes)
}

/// Writes `bytes` to the start of `spans`, which have at least as many bytes.
pub(super) fn scatter(mut bytes: &[u8], spans: &[Span<'_>]) -> Result<()> {
    for span in head(spans, bytes.len() as u64).iter() {
        let (part, rest) = bytes.split_at(span.len() as usize);
        span.store(part)?;
        bytes = rest;
    }
    Ok(())
}

/// The error of a copy, and the step that failed.
#[derive(Debug)]
pub(super) struct CopyError {
    /// `SourceCopy` or `TargetCopy` if the memory of that side failed. `NicTransfer` if the failed
    /// side is not known, or if the transfer failed for another reason.
    pub(super) step: FailedStep,
    pub(super) error: Error,
}

impl From<CopyError> for Error {
    fn from(failed: CopyError) -> Self {
        failed.error
    }
}

/// Copies a list of spans to a list of the same total length, and returns the number of bytes. At
/// least one span is staged.
///
/// The copy goes chunk by chunk through staging buffers, so that the copy engine and the NIC work
/// at the same time. Before each chunk, the function calls `canceled` and `enter`. `canceled`
/// reports a closed endpoint, and `enter` injects faults. An error of either one ends the copy.
pub(super) fn pipe(
    from: &[Span<'_>],
    to: &[Span<'_>],
    pool: &Arc<Pool>,
    canceled: impl Fn() -> Option<Error>,
    enter: impl Fn() -> Result<()>,
) -> Result<u64, CopyError> {
    let len = to.iter().map(Span::len).sum();
    if len == 0 {
        return Ok(0);
    }
    let plan = ChunkPlan::chunks(len, pool.slot_len());
    let (sources, targets) = (staged_runs(from), staged_runs(to));
    let pipeline = Pipeline::new(Claim::new(pool), PoolUse::Rma, plan, sources, targets);
    // The step that failed when the NIC copied a chunk. The pipeline reports such a failure as
    // `NicTransfer`.
    let failed = Cell::new(FailedStep::NicTransfer);
    let carry = |view: View<'_>| {
        enter()?;
        let (near, far) = (near(from, &view), near(to, &view));
        // If both sides are staged, the chunk is already in the staging buffer that they share.
        if near.iter().zip(&far).any(|(near, far)| !same(near, far)) || near.len() != far.len() {
            copy_reporting_side(&near, &far).map_err(|CopyError { step, error }| {
                failed.set(step);
                error
            })?;
        }
        Ok(Posted::Done)
    };
    pipeline.run(canceled, carry).map_err(|(step, error)| {
        let step = if step == FailedStep::NicTransfer { failed.get() } else { step };
        CopyError { step, error }
    })
}

/// Returns the staged spans. Each comes with its position: the number of bytes of `spans` before
/// it.
fn staged_runs<'a>(spans: &[Span<'a>]) -> Vec<StagedRun<&'a StagedRange>> {
    let mut at = 0;
    let mut runs = Vec::new();
    for span in spans {
        if let Some((memory, offset)) = span.staged() {
            runs.push(StagedRun { at, len: span.len(), memory, offset });
        }
        at += span.len();
    }
    runs
}

/// Returns the part of `spans` that the chunk `view` covers. Staging buffers take the place of
/// staged memory.
fn near<'a>(spans: &[Span<'a>], view: &View<'_>) -> Vec<Span<'a>> {
    let end = view.at + view.len;
    let mut at = 0;
    let mut near = Vec::new();
    for span in spans {
        let (start, stop) = (at.max(view.at), (at + span.len()).min(end));
        if start < stop {
            if span.staged().is_some() {
                let parts = view.parts(start, stop - start);
                near.extend(parts.map(|(address, _, len)| Span::mapped(address.0, len)));
            } else {
                near.push(span.part(start - at, stop - start));
            }
        }
        at += span.len();
        if at >= end {
            break;
        }
    }
    near
}

/// Returns true if both spans are the same bytes of mapped memory.
fn same(near: &Span<'_>, far: &Span<'_>) -> bool {
    match (near, far) {
        (
            Span::Direct { at: a, len: m, mapping: None },
            Span::Direct { at: b, len: n, mapping: None },
        ) => (a, m) == (b, n),
        _ => false,
    }
}

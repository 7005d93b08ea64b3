//! Parts of regions for safe transfers.

use super::region::MemoryRegion;
use crate::{Access, AddressRange, Error, ErrorKind, Result, transfer::LocalSegment};

/// A part of a registered region, for the safe transfers of an [`Endpoint`](super::Endpoint).
///
/// A slice may outlive its region: the provider refuses the slice's descriptor once the region is
/// closed. Until then the memory stays allocated, because the region owns it, a scope borrows it,
/// or the promise of a [`Raw`](super::Raw) covers it.
#[derive(Clone, Copy, Debug)]
pub struct RegionSlice {
    pub(super) segment: LocalSegment,
    pub(super) access: Access,
    /// True if the memory is promised for reading only.
    read_only: bool,
}

impl RegionSlice {
    pub(super) fn of(region: &MemoryRegion, offset: u64, len: u64) -> Result<Self> {
        Self::within(region, region.range(), offset, len)
    }

    /// Returns a slice of the region: `len` bytes, beginning `offset` bytes after the start of
    /// `within`. The range `within` must be a part of the region.
    pub(super) fn within(
        region: &MemoryRegion,
        within: AddressRange,
        offset: u64,
        len: u64,
    ) -> Result<Self> {
        let range = within.slice(offset, len).ok_or_else(|| {
            Error::new(ErrorKind::OutOfBounds, "slice")
                .context("why", format_args!("{len} bytes at {offset} of {}", within.len()))
                .context("offset", offset)
                .context("length", len)
                .context("region", within)
                .remedy("pass an offset and a length inside the region")
        })?;
        let segment = LocalSegment { address: range.start(), len, desc: Some(region.desc()?) };
        let read_only = region.inner.read_only;
        Ok(Self { segment, access: region.access(), read_only })
    }

    /// Returns a part of the slice. The caller has checked that the part is inside.
    pub(super) fn part(mut self, offset: u64, len: u64) -> Self {
        debug_assert!(offset + len <= self.segment.len, "a part outside its slice");
        self.segment.address.0 += offset;
        self.segment.len = len;
        self
    }

    /// Fails if a transfer must not write to the slice, because its memory is promised for reading
    /// only.
    #[inline]
    pub(super) fn check_sink(&self, operation: &'static str) -> Result<()> {
        if self.read_only { Err(self.refuse_sink(operation)) } else { Ok(()) }
    }

    #[cold]
    fn refuse_sink(&self, operation: &'static str) -> Error {
        Error::new(ErrorKind::AccessDenied, operation)
            .context("range", self.segment.address)
            .context("why", "transfers may only read this region")
            .remedy(
                "use memory that may be written (Promise::ReadWrite, Vec<u8>), and for a cached \
                 region ask for READ or RECV",
            )
    }
}

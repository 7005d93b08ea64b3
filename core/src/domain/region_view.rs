//! Views: parts of regions, with keys for the part.

use super::{region::MemoryRegion, region_slice::RegionSlice};
use crate::{Access, AddressRange, LocalKey, RemoteKey, Result};

/// A part of a region. The region may cover more memory and have other views.
#[derive(Clone, Copy, Debug)]
pub struct RegionView<'r> {
    region: &'r MemoryRegion,
    range: AddressRange,
}

impl<'r> RegionView<'r> {
    /// Returns the range of the view.
    #[must_use]
    pub fn range(&self) -> AddressRange {
        self.range
    }

    /// Returns the rights of the region. A cached region may have more rights than the lookup asked
    /// for.
    #[must_use]
    pub fn access(&self) -> Access {
        self.region.access()
    }

    /// Returns the region. It may cover more memory than the view.
    #[must_use]
    pub fn region(&self) -> &'r MemoryRegion {
        self.region
    }

    pub(super) fn new(region: &'r MemoryRegion, range: AddressRange) -> Self {
        Self { region, range }
    }

    /// Returns the remote key of the view's range.
    ///
    /// If the region covers more memory, the NIC does not enforce the view's bounds: see
    /// [`Growth`](super::Growth).
    ///
    /// # Errors
    /// The errors of [`MemoryRegion::key`] and [`RemoteKey::narrow`].
    pub fn key(&self) -> Result<RemoteKey> {
        let (key, whole) = (self.region.key()?, self.region.range());
        if self.range == whole {
            return Ok(key);
        }
        key.narrow(self.range.start().0 - whole.start().0, self.range.len())
    }

    /// Returns the local descriptor.
    ///
    /// # Errors
    /// The errors of [`MemoryRegion::desc`].
    pub fn desc(&self) -> Result<LocalKey> {
        self.region.desc()
    }

    /// Returns a part of the view for the safe transfers of an endpoint.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`](crate::ErrorKind::OutOfBounds) if the part reaches outside the
    /// view.
    pub fn slice(&self, offset: u64, len: u64) -> Result<RegionSlice> {
        RegionSlice::within(self.region, self.range, offset, len)
    }
}

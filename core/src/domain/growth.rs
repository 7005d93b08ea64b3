//! Limits of registrations that reach beyond the memory that was asked for.

use super::{DomainInner, region::MemoryRegion};
use crate::{
    AddressRange, AllocationKind, Error, ErrorKind, IfaceExt, Path, Rejected, Result,
    path::P2pPolicy, registry::AddressOwner,
};

/// A permission to register more memory than was asked for, so that one registration serves several
/// views of an allocation.
///
/// **Growth exposes memory.** The NIC knows one key for the whole registration. A peer that has the
/// key of one view can use it, with the view's rights, for every byte of the registration, whatever
/// the bounds of the key that it was sent. The rights never grow. Grow only where the peers may
/// reach the whole allocation anyway; [`MemoryRegion::sub`](crate::MemoryRegion::sub) makes keys of
/// part of a region that the NIC enforces.
///
/// A registration stays as it was asked for where it cannot grow:
///
/// - The allocation is not known. Host memory has none; a buffer that a safe call owns is its own.
/// - The allocation is another process's, or has several physical segments.
/// - The result would be longer than the limit, or than the NIC registers at once
///   ([`ProviderAttr::max_mr_size`](crate::provider::ProviderAttr::max_mr_size)).
/// - The NIC or the driver refuses the grown range, or the NIC reaches it only through staging
///   buffers: a GPU may expose less to NICs than it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Growth {
    /// Registers what was asked for.
    #[default]
    None,
    /// Registers up to the whole allocation.
    Allocation,
    /// Registers up to this number of bytes of the allocation at once.
    UpTo(u64),
}

impl Growth {
    /// Returns the largest number of bytes of a grown registration; 0 if none grows.
    fn limit(self) -> u64 {
        match self {
            Self::None => 0,
            Self::Allocation => u64::MAX,
            Self::UpTo(bytes) => bytes,
        }
    }
}

impl DomainInner {
    /// Returns the largest number of bytes of a grown registration of this domain.
    pub(super) fn growth_limit(&self, growth: Growth) -> u64 {
        growth.limit().min(self.provider_attr.max_mr_size)
    }

    /// Returns true if growth has put memory behind staging buffers that may be reached directly.
    pub(super) fn is_staged_by_growth(&self, region: &MemoryRegion) -> bool {
        let staged = region.decision().is_ok_and(|decision| decision.path == Path::Staged);
        staged && self.attr.p2p != P2pPolicy::Disabled
    }

    /// Refuses a grown region that the NIC reaches only through staging buffers, and closes it. One
    /// that cannot be closed goes to `left`.
    pub(super) fn without_staging(
        &self,
        region: MemoryRegion,
        left: &mut Vec<MemoryRegion>,
    ) -> Result<MemoryRegion> {
        if !self.is_staged_by_growth(&region) {
            return Ok(region);
        }
        if let Err(Rejected { value, error }) = region.close() {
            tracing::error!(%error, "a grown region could not be closed");
            left.push(value);
        }
        Err(Error::new(ErrorKind::Unsupported, "grow").context("path", Path::Staged))
    }

    /// Returns the range that registrations of a view of this owner may grow to, or `None` if they
    /// cannot grow. `held` is the range of the buffer that owns the view.
    pub(super) fn growth_bound(
        &self,
        owner: &AddressOwner,
        held: Option<AddressRange>,
    ) -> Option<AddressRange> {
        let Some(allocation) = owner.allocation else { return held };
        let bound = match held {
            Some(held) => allocation.range.intersection(held)?,
            None => allocation.range,
        };
        match allocation.kind {
            AllocationKind::Imported => return None,
            AllocationKind::Virtual => {}
            _ => return Some(bound),
        }
        let segments = self
            .registry
            .get(owner.iface)
            .and_then(|iface| iface.physical_segments(bound))
            .inspect_err(|error| tracing::debug!(%error, range = %bound, "segments are unknown"));
        segments.is_ok_and(|segments| segments.len() == 1).then_some(bound)
    }
}

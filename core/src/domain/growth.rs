//! The limits of registrations that cover more memory than was requested.

use super::{DomainInner, region::MemoryRegion};
use crate::{
    AddressRange, AllocationKind, IfaceExt, Path, path::P2pPolicy, registry::AddressOwner,
};

/// A permission to register more memory than requested, so that one registration serves several
/// views of an allocation.
///
/// **Growth exposes memory.** The NIC does not enforce the bounds of a view's key. A peer with the
/// key can use the view's rights for every byte of the registration. Use growth only if the peers
/// may reach the whole allocation. [`MemoryRegion::sub`](crate::MemoryRegion::sub) makes keys with
/// bounds that the NIC enforces.
///
/// A registration does not grow in these cases:
///
/// - The allocation is unknown, as for all host memory. A view of a batch and a part of a
///   [`CachedBuffer`](crate::CachedBuffer) may still grow inside their memory or buffer.
/// - The allocation belongs to another process, or has several physical segments.
/// - The result would be longer than the limit, or longer than the NIC can register at once
///   ([`ProviderAttr::max_mr_size`](crate::provider::ProviderAttr::max_mr_size)).
/// - The NIC or the driver refuses the grown range, or the NIC could reach it only through staging
///   buffers. For example, a GPU may expose only part of its memory to NICs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Growth {
    /// Registers exactly the requested memory.
    #[default]
    None,
    /// Registers up to the whole allocation.
    Allocation,
    /// Registers up to this number of bytes of the allocation at once. 0 means no growth.
    UpTo(u64),
    /// Registers the whole host pages around the requested memory, within its allocation. Some
    /// drivers register only whole pages, which have 64 KiB on some kernels.
    ///
    /// Only cache entries grow in this way. In a batch, each view has a registration of its own.
    HostPages,
}

impl Growth {
    /// Returns the part of `bound` to which a registration of `range` may grow with this setting.
    /// Returns `None` if `range` lies outside `bound`.
    pub(super) fn narrow(self, range: AddressRange, bound: AddressRange) -> Option<AddressRange> {
        match self {
            Self::HostPages => {
                range.page_aligned(rustix::param::page_size() as u64).intersection(bound)
            }
            _ => Some(bound),
        }
    }
}

impl DomainInner {
    /// Returns the largest length of a registration of this domain for several views, in bytes, or
    /// 0 if growth is disabled.
    pub(super) fn growth_limit(&self, growth: Growth) -> u64 {
        let limit = match growth {
            Growth::None | Growth::HostPages => 0,
            Growth::Allocation => u64::MAX,
            Growth::UpTo(bytes) => bytes,
        };
        limit.min(self.provider_attr.max_mr_size)
    }

    /// Returns the largest length to which an entry of this domain's cache may grow, in bytes, or 0
    /// if growth is disabled.
    pub(super) fn entry_growth_limit(&self, growth: Growth) -> u64 {
        let whole_pages = growth == Growth::HostPages;
        self.growth_limit(if whole_pages { Growth::Allocation } else { growth })
    }

    /// Returns true if a region is staged although the domain's policy allows direct access. If the
    /// region covers more than the requested range, that range alone might have a direct path.
    pub(super) fn is_staged_by_growth(&self, region: &MemoryRegion) -> bool {
        let staged = region.decision().is_ok_and(|decision| decision.path == Path::Staged);
        staged && self.attr.p2p != P2pPolicy::Disabled
    }

    /// Returns the largest range to which a registration of this owner's memory may grow, without
    /// regard to [`DomainInner::growth_limit`]. Returns `None` if the registration must not grow.
    ///
    /// `held` is the range of the cached buffer, or of the batch's memory, to which the
    /// registration is confined. `None` means that it is confined only to the allocation.
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
            .and_then(|iface| iface.segments_of(bound, &allocation))
            .inspect_err(|error| tracing::debug!(%error, range = %bound, "segments are unknown"));
        segments.is_ok_and(|segments| segments.len() == 1).then_some(bound)
    }
}

//! The owner of the memory of a request, checked against the [`Claim`] of the caller: the iface,
//! the device and the HMEM flags of the request.

use smallvec::SmallVec;

use super::{DomainInner, region_state::RegionInner, terms::Terms};
use crate::{
    AddressRange, Allocation, AllocationKind, DeviceId, Error, ErrorKind, IfaceKind, MrFlags,
    Registry, Result, registry::AddressOwner,
};

const HMEM_FLAGS: MrFlags = MrFlags::HMEM_DEVICE_ONLY.union(MrFlags::HMEM_HOST_ALLOC);

/// The allocations that contain the ranges of a request, if these are device memory. Empty for
/// other memory.
pub(super) type Allocations = SmallVec<[Allocation; 1]>;

/// The iface, device and HMEM flags that a request names for its memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    /// The iface that the caller named, if any.
    iface: Option<IfaceKind>,
    /// The device that the caller named, if any.
    device: Option<DeviceId>,
    /// HMEM_DEVICE_ONLY, HMEM_HOST_ALLOC or neither.
    flags: MrFlags,
}

/// The owner with which a [`Claim`] is compared: the iface and device that own the memory.
///
/// The owner of a dma-buf cannot be queried. For a dma-buf, this value has the owner that the
/// request names. For a part of a dma-buf, it has the owner that the request for the whole dma-buf
/// named.
#[derive(Clone, Copy, Debug)]
struct Known {
    iface: IfaceKind,
    device: Option<DeviceId>,
    /// The kind of memory. `None` if unknown, as for a dma-buf of a device iface, which cannot be
    /// queried.
    kind: Option<AllocationKind>,
}

impl Known {
    fn of(owner: &AddressOwner) -> Self {
        let AddressOwner { iface, device, allocation } = *owner;
        let kind = allocation.map_or(AllocationKind::System, |allocation| allocation.kind);
        Self { iface, device, kind: Some(kind) }
    }

    /// Returns true if memory of a device API's host allocator was claimed as system memory. This
    /// claim is accepted, because the memory consists of ordinary host pages. The claim would be
    /// wrong for managed memory, which migrates.
    fn is_host_memory_named_as_such(self, claimed: IfaceKind) -> bool {
        claimed == IfaceKind::SYSTEM && self.kind == Some(AllocationKind::Host)
    }
}

impl Claim {
    /// Returns the claim that memory belongs to an iface and, if given, to a device.
    pub(super) fn named(iface: IfaceKind, device: Option<DeviceId>) -> Self {
        let device = device.filter(|_| iface != IfaceKind::SYSTEM);
        Self { iface: Some(iface), device, flags: MrFlags::empty() }
    }

    /// Returns the claim of a request, without the fields that `fi_mr(3)` ignores. `hmem` is
    /// [`DomainAttr::hmem`](super::DomainAttr::hmem). Ignored are:
    ///
    /// - the iface, if `hmem` is false
    /// - the device, if the claim has no iface or the system iface, or has HMEM_HOST_ALLOC
    fn of(terms: &Terms<'_>, hmem: bool) -> Self {
        let flags = terms.flags;
        let iface = terms.iface.filter(|_| hmem);
        let has_device = iface.is_some_and(|iface| iface != IfaceKind::SYSTEM)
            && !flags.contains(MrFlags::HMEM_HOST_ALLOC);
        Self { iface, device: terms.device.filter(|_| has_device), flags: flags & HMEM_FLAGS }
    }

    fn is_empty(&self) -> bool {
        self.iface.is_none() && self.flags.is_empty()
    }

    /// Fails if the owner of the memory contradicts this claim. If the memory belongs to no
    /// particular device, every device of the claimed iface is accepted.
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidArgument`] for another iface, device or kind of memory, and for a
    ///   device that the iface does not have.
    /// - The errors of [`Registry::get`] for the claimed iface.
    #[inline]
    pub(super) fn check(
        &self,
        registry: &Registry,
        operation: &'static str,
        range: AddressRange,
        owner: &AddressOwner,
    ) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        self.check_known(registry, operation, range, Known::of(owner), Some(owner))
    }

    /// Fails if the memory's actual owner, `known`, has another iface, device or kind of memory
    /// than this claim names. `queried` is only for the error: the owner as the ifaces reported it,
    /// or `None` for a dma-buf, which cannot be queried.
    fn check_known(
        &self,
        registry: &Registry,
        operation: &'static str,
        range: AddressRange,
        known: Known,
        queried: Option<&AddressOwner>,
    ) -> Result<()> {
        let wrong = |iface| {
            Error::new(ErrorKind::InvalidArgument, operation)
                .iface(registry.name_of(iface))
                .context("range", range)
        };
        if let Some(claimed) = self.iface {
            registry.get(claimed)?;
            if known.iface != claimed && !known.is_host_memory_named_as_such(claimed) {
                return Err(match queried {
                    Some(owner) => registry.refuse_claim(operation, range, owner, claimed),
                    None => wrong(claimed)
                        .context("owner", registry.name_of(known.iface))
                        .remedy("name the iface that owns the memory, or none"),
                });
            }
        }
        if let Some(device) = self.device.filter(|device| known.device != Some(*device)) {
            self.check_device(registry, operation, device)?;
            if let Some(actual) = known.device {
                return Err(wrong(known.iface)
                    .device(device)
                    .context("owner", actual)
                    .remedy("name the device that has the memory, or none to detect it"));
            }
        }
        let refuse = |remedy: &'static str| {
            Err(wrong(known.iface)
                .context("kind", known.kind.map_or("unknown", AllocationKind::name))
                .context("flags", self.flags)
                .remedy(remedy))
        };
        let Some(kind) = known.kind else { return Ok(()) };
        if self.flags.contains(MrFlags::HMEM_DEVICE_ONLY) && kind.cpu_accessible() {
            return refuse(
                "clear HMEM_DEVICE_ONLY: the CPU can access this memory; for a dma-buf of a device \
                 name the iface",
            );
        }
        if self.flags.contains(MrFlags::HMEM_HOST_ALLOC) && kind != AllocationKind::Host {
            return refuse(
                "clear HMEM_HOST_ALLOC: no device API allocated this host memory; for a dma-buf of \
                 a device API's host memory name the iface",
            );
        }
        Ok(())
    }

    /// Fails if the claimed iface does not have the device.
    fn check_device(
        &self,
        registry: &Registry,
        operation: &'static str,
        device: DeviceId,
    ) -> Result<()> {
        let Some(claimed) = self.iface else { return Ok(()) };
        let iface = registry.get(claimed)?;
        let devices = iface.devices()?;
        if devices.iter().any(|known| known.id == device) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::InvalidArgument, operation)
            .iface(iface)
            .device(device)
            .context("devices", devices.len())
            .remedy("name a device that the iface lists"))
    }
}

impl DomainInner {
    /// Checks the claim about the owner of a dma-buf, and returns the device, if the request named
    /// one. The owner cannot be queried, so the claimed iface counts as the owner. A dma-buf
    /// without a claimed iface counts as system memory.
    pub(super) fn dma_buf_device(
        &self,
        range: AddressRange,
        terms: &Terms<'_>,
    ) -> Result<Option<DeviceId>> {
        let claim = Claim::of(terms, self.attr.hmem);
        let iface = claim.iface.unwrap_or(IfaceKind::SYSTEM);
        let kind = (iface == IfaceKind::SYSTEM).then_some(AllocationKind::System);
        let known = Known { iface, device: None, kind };
        claim.check_known(&self.registry, "regattr", range, known, None)?;
        Ok(claim.device)
    }

    /// Checks the claim of a sub-region against the owner of its memory.
    ///
    /// - A request without a claim is not checked, and queries no iface.
    /// - For memory by addresses, the method queries the owner.
    /// - The owner of a dma-buf cannot be queried. The claim is compared with the iface and device
    ///   of the region of the whole dma-buf, and with the HMEM flags of that region and of all
    ///   sub-regions that contain the part.
    pub(super) fn check_part(
        &self,
        base: &RegionInner,
        range: AddressRange,
        terms: &Terms<'_>,
    ) -> Result<()> {
        let claim = Claim::of(terms, self.attr.hmem);
        if claim.is_empty() {
            return Ok(());
        }
        let (mut claimed, mut whole) = (base.flags, base);
        while let Some(parent) = whole.parent() {
            whole = parent;
            claimed |= whole.flags;
        }
        if !whole.flags.contains(MrFlags::MR_DMABUF) {
            let owner = self.registry.owner_of_range(range);
            let owner = owner.map_err(|error| error.of_call("regattr"))?;
            return claim.check(&self.registry, "regattr", range, &owner);
        }
        let decision = whole.recorded_decision();
        let (iface, device) = decision
            .map_or((IfaceKind::SYSTEM, None), |decision| (decision.iface, decision.device));
        let kind = match iface {
            IfaceKind::SYSTEM => Some(AllocationKind::System),
            _ if claimed.contains(MrFlags::HMEM_DEVICE_ONLY) => Some(AllocationKind::Device),
            _ if claimed.contains(MrFlags::HMEM_HOST_ALLOC) => Some(AllocationKind::Host),
            _ => None,
        };
        let known = Known { iface, device, kind };
        claim.check_known(&self.registry, "regattr", range, known, None)
    }

    /// Queries the owner of each range, and checks the owner against the claim of the request.
    /// Returns the iface of the memory, and adds the allocations of device memory to `allocations`.
    /// Fails if the ranges belong to different ifaces or devices.
    #[inline]
    pub(super) fn owner(
        &self,
        ranges: &[AddressRange],
        terms: &Terms<'_>,
        allocations: &mut Allocations,
    ) -> Result<IfaceKind> {
        let of_call = |error: &Error| error.clone().of_call("regattr");
        let claim = Claim::of(terms, self.attr.hmem);
        // The owner is borrowed, because a move would be a wide load right after narrow stores,
        // which stalls the processor.
        let owner = self.registry.owner_of_range(ranges[0]);
        let owner = owner.as_ref().map_err(of_call)?;
        claim.check(&self.registry, "regattr", ranges[0], owner)?;
        allocations.extend(owner.allocation);
        for range in &ranges[1..] {
            let other = self.registry.owner_of_range(*range);
            let other = other.as_ref().map_err(of_call)?;
            if (other.iface, other.device) != (owner.iface, owner.device) {
                return Err(Error::new(ErrorKind::InvalidArgument, "regattr")
                    .context("range", range)
                    .context("iface", other.iface)
                    .context("expected", owner.iface)
                    .remedy("register memory of different ifaces or devices as separate regions"));
            }
            claim.check(&self.registry, "regattr", *range, other)?;
            allocations.extend(other.allocation);
        }
        Ok(owner.iface)
    }
}

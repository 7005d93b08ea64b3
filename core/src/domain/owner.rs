//! The owner of the memory of a request, checked against the iface and device that the caller
//! named.

use super::{DomainInner, MrAttr};
use crate::{
    AddressRange, AllocationKind, DeviceId, Error, ErrorKind, IfaceKind, MrFlags, Result,
    registry::AddressOwner,
};

impl DomainInner {
    /// Returns the owner that the caller named. Used for dma-bufs, because their addresses cannot
    /// be queried.
    pub(super) fn claimed_owner(&self, attr: &MrAttr<'_>, flags: MrFlags) -> Result<AddressOwner> {
        let Some(iface) = attr.iface.filter(|_| self.attr.hmem) else {
            return Ok(AddressOwner::SYSTEM);
        };
        let device = self.claimed_device(iface, attr, flags)?;
        Ok(AddressOwner { iface, device, allocation: None })
    }

    /// Returns the device that the caller named. Returns `None` if the caller named no device, or
    /// set `HMEM_HOST_ALLOC`. Fails if the iface does not have the device, unless the iface is
    /// `SYSTEM`.
    fn claimed_device(
        &self,
        claimed: IfaceKind,
        attr: &MrAttr<'_>,
        flags: MrFlags,
    ) -> Result<Option<DeviceId>> {
        let iface = self.registry.get(claimed)?;
        // HOST_ALLOC memory has an iface but no device: fi_mr(3) says to ignore the field.
        let Some(device) = attr.device.filter(|_| !flags.contains(MrFlags::HMEM_HOST_ALLOC)) else {
            return Ok(None);
        };
        let devices = iface.devices()?;
        if claimed != IfaceKind::SYSTEM && !devices.iter().any(|known| known.id == device) {
            return Err(Error::new(ErrorKind::InvalidArgument, "regattr")
                .iface(iface)
                .device(device)
                .context("devices", devices.len())
                .remedy("name a device that the iface lists"));
        }
        Ok(Some(device))
    }

    /// Resolves the owner of the ranges, and checks it against the owner and the flags of the
    /// request. Fails if the ranges belong to different ifaces or devices.
    #[inline]
    pub(super) fn owner(
        &self,
        ranges: &[AddressRange],
        attr: &MrAttr<'_>,
        flags: MrFlags,
    ) -> Result<AddressOwner> {
        let owner_of = |range: &AddressRange| {
            let owner = self.registry.owner_of_range(*range);
            owner.map_err(|error| error.of_call("regattr"))
        };
        let owner = owner_of(&ranges[0])?;
        for range in &ranges[1..] {
            let other = owner_of(range)?;
            if (other.iface, other.device) != (owner.iface, owner.device) {
                return Err(Error::new(ErrorKind::InvalidArgument, "regattr")
                    .context("range", range)
                    .context("iface", other.iface)
                    .context("expected", owner.iface)
                    .remedy("register memory of different ifaces or devices as separate regions"));
            }
        }
        if self.attr.hmem
            && let Some(claimed) = attr.iface
        {
            self.check_claim(ranges[0], &owner, claimed, attr, flags)?;
        }
        self.check_hmem_flags(&owner, flags)?;
        Ok(owner)
    }

    fn check_claim(
        &self,
        range: AddressRange,
        owner: &AddressOwner,
        claimed: IfaceKind,
        attr: &MrAttr<'_>,
        flags: MrFlags,
    ) -> Result<()> {
        let device = self.claimed_device(claimed, attr, flags)?;
        if owner.iface != claimed {
            return Err(self.registry.refuse_claim("regattr", range, owner, claimed));
        }
        let Some(device) = device else { return Ok(()) };
        match owner.device {
            Some(actual) if actual != device => {
                Err(Error::new(ErrorKind::InvalidArgument, "regattr")
                    .iface(self.registry.name_of(claimed))
                    .device(device)
                    .context("owner", actual)
                    .remedy("name the device that has the memory, or none to detect it"))
            }
            _ => Ok(()),
        }
    }

    #[inline]
    fn check_hmem_flags(&self, owner: &AddressOwner, flags: MrFlags) -> Result<()> {
        if !flags.intersects(MrFlags::HMEM_DEVICE_ONLY | MrFlags::HMEM_HOST_ALLOC) {
            return Ok(());
        }
        let kind = owner.allocation.map_or(AllocationKind::System, |allocation| allocation.kind);
        let refuse = |remedy: &'static str| {
            Err(Error::new(ErrorKind::InvalidArgument, "regattr")
                .iface(self.registry.name_of(owner.iface))
                .context("kind", kind.name())
                .context("flags", flags)
                .remedy(remedy))
        };
        if flags.contains(MrFlags::HMEM_DEVICE_ONLY) && kind.cpu_accessible() {
            return refuse("clear HMEM_DEVICE_ONLY: the CPU can access this memory");
        }
        if flags.contains(MrFlags::HMEM_HOST_ALLOC) && kind != AllocationKind::Host {
            return refuse("clear HMEM_HOST_ALLOC: no device API allocated this host memory");
        }
        Ok(())
    }
}

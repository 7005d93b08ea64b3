//! The implementation of the `Iface` trait and of its facets for host memory.

#![allow(unsafe_code, reason = "implements the trait, with copies by address")]

use std::sync::Arc;

use hmem_core::{
    Address, AddressRange, Allocation, AllocationKind, Error, ErrorKind, IfaceKind, Result,
    Segment,
    iface::{
        AllocRequest, Allocator, Device, DmaBufExporter, Facet, Iface, Ipc, MonitorSource,
        SegmentMap,
    },
    racing_copy,
};

use super::{System, memory::HostAllocation};
use crate::sys;

// SAFETY: `query` answers from the records of live allocations, whose identities count up. Each
// record owns its memory, which is freed with the record. `copy` returns after the bytes were
// copied, and `check_side` checks the bounds of its two ranges. Exports keep the memory file of the
// allocation alive.
unsafe impl Iface for System {
    fn kind(&self) -> IfaceKind {
        IfaceKind::SYSTEM
    }

    fn name(&self) -> &str {
        "system"
    }

    fn devices(&self) -> Result<Vec<Device>> {
        Ok(Vec::new())
    }

    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        Ok(self.record_at(address).map(|record| record.allocation))
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        // These references keep the memory allocated until the copy has ended, even if another
        // thread frees the allocation.
        let _to_stays = self.check_side(to, len)?;
        let _from_stays = self.check_side(from, len)?;
        // SAFETY: the caller promises that both ranges are valid for `len` bytes. `check_side`
        // verified the ranges in allocations of this iface.
        unsafe { racing_copy(sys::host_ptr(from), sys::host_ptr(to), len as usize) };
        Ok(())
    }

    fn allocator(&self) -> Option<&dyn Allocator> {
        Some(self)
    }

    fn dma_buf(&self) -> Option<&dyn DmaBufExporter> {
        Some(self)
    }

    fn ipc(&self) -> Option<&dyn Ipc> {
        Some(self)
    }

    fn segments(&self) -> Option<&dyn SegmentMap> {
        Some(self)
    }

    fn monitor(&self) -> Option<&dyn MonitorSource> {
        Some(self)
    }

    fn unavailable(&self, facet: Facet) -> Error {
        let lacks = |operation, remedy: &'static str| {
            Error::new(ErrorKind::Unsupported, operation).iface(IfaceKind::SYSTEM).remedy(remedy)
        };
        match facet {
            Facet::CopyEngine => {
                lacks("copy async", "host memory has no copy engine: use the blocking `copy`")
            }
            Facet::PeerMemory => lacks(
                "export peer memory",
                "host memory needs no peer-memory client: register it as host pages",
            ),
            Facet::HostRegistrar => lacks(
                "host register",
                "this iface has no device for which memory could be page-locked",
            ),
            _ => facet.unavailable(IfaceKind::SYSTEM),
        }
    }
}

impl System {
    /// Returns the allocation of this iface that contains `address`, or `None` if the address is
    /// other host memory.
    ///
    /// # Errors
    /// - OutOfBounds: the `len` bytes extend past the end of the allocation.
    /// - AddressWraps: the `len` bytes extend past the end of the address space.
    fn check_side(&self, address: Address, len: u64) -> Result<Option<Arc<HostAllocation>>> {
        let range = AddressRange::new(address, len)?;
        let found = self.record_at(address);
        match &found {
            Some(inside) if !inside.allocation.range.contains_range(range) => {
                Err(Error::new(ErrorKind::OutOfBounds, "copy")
                    .iface(IfaceKind::SYSTEM)
                    .context("range", range)
                    .context("allocation", inside.allocation.range)
                    .remedy("the copy must end within the allocation that it begins in"))
            }
            _ => Ok(found),
        }
    }
}

impl Allocator for System {
    fn allocate(&self, request: &AllocRequest) -> Result<Allocation> {
        match request.kind {
            AllocationKind::System => self.mmap(request.len),
            kind => Err(Error::new(ErrorKind::Unsupported, "allocate")
                .iface(IfaceKind::SYSTEM)
                .context("kind", kind.name())
                .remedy("device ifaces allocate this kind")),
        }
    }

    unsafe fn free(&self, allocation: &Allocation) -> Result<()> {
        self.end(allocation, false, "free")
    }
}

impl SegmentMap for System {
    /// Returns the whole range as one segment. Its pages may not be physically contiguous, but no
    /// user of host memory needs contiguous pages.
    fn segments(&self, range: AddressRange, _: &Allocation) -> Result<Vec<Segment>> {
        let record = self.record_at(range.start());
        let exportable = record.is_some_and(|record| {
            record.memfd().is_some() && record.allocation.range.contains_range(range)
        });
        Ok(vec![Segment { range, exportable }])
    }
}

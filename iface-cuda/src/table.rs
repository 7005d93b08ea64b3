//! Table of memory that the iface obtained from the driver and must release.

use std::{
    collections::{BTreeMap, HashMap},
    sync::atomic::{AtomicUsize, Ordering},
};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationId, DeviceId, Error, ErrorKind, IfaceKind, Result,
};
use parking_lot::Mutex;

use crate::sys::CuMemHandle;

/// Allocations and page-locked ranges that are not released yet.
#[derive(Debug, Default)]
pub(crate) struct AllocationTable {
    entries: Mutex<Entries>,
    /// Number of allocations that were imported from other processes. The number changes only while
    /// the table is locked. While the number is 0, lookups need no lock.
    imported: AtomicUsize,
}

#[derive(Debug, Default)]
struct Entries {
    /// Allocations by first address.
    owned: BTreeMap<u64, OwnedAllocation>,
    /// Page-locked host ranges by first address.
    page_locked: HashMap<u64, PageLockedRange>,
}

/// A range of host memory that the iface page-locked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageLockedRange {
    pub(crate) range: AddressRange,
    /// Device, if the range was page-locked in the primary context of that device. `None` for a
    /// context of the application.
    pub(crate) device: Option<DeviceId>,
}

/// An allocation that the iface must release.
#[derive(Clone, Debug)]
pub(crate) struct OwnedAllocation {
    pub(crate) id: AllocationId,
    pub(crate) range: AddressRange,
    pub(crate) device: DeviceId,
    pub(crate) origin: Origin,
}

/// Origin of an allocation, which determines the call that releases it.
#[derive(Clone, Debug)]
pub(crate) enum Origin {
    /// The iface called `cuMemAlloc` or `cuMemAllocManaged`.
    Memory,
    /// The iface called `cuMemHostAlloc`.
    Host,
    /// The iface called `cuMemAllocAsync`.
    Pool,
    /// The iface reserved `size` bytes (`cuMemAddressReserve`), created `handle` (`cuMemCreate`)
    /// and mapped it (`cuMemMap`). `left` lists the objects that are not released yet.
    Virtual { size: usize, handle: CuMemHandle, left: Left },
    /// The iface called `cuIpcOpenMemHandle`. `opened` counts opens that can still be closed.
    /// `closing` counts closes that are in flight.
    Imported { opened: u64, closing: u64 },
}

/// Objects of VMM memory that are not released yet. The driver may refuse each release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// The mapping, the reservation and the handle are not released yet.
    Mapping,
    /// The reservation and the handle are not released yet.
    Reservation,
    /// Only the handle is not released yet.
    Handle,
}

impl AllocationTable {
    /// Returns the number of allocations and page-locked ranges.
    pub(crate) fn len(&self) -> usize {
        let entries = self.entries.lock();
        entries.owned.len() + entries.page_locked.len()
    }

    /// Returns true if an allocation of the device is in the table.
    pub(crate) fn has_memory_of(&self, device: DeviceId) -> bool {
        self.entries.lock().owned.values().any(|owned| owned.device == device)
    }

    /// Returns the range of the iface's allocation that contains an address, or `None` if there is
    /// no such allocation.
    pub(crate) fn range_around(&self, address: Address) -> Option<AddressRange> {
        let entries = self.entries.lock();
        // Allocations do not overlap: only the last one that begins at or before the address can
        // contain it.
        let (_, owned) = entries.owned.range(..=address.0).next_back()?;
        Some(owned.range).filter(|range| range.contains(address))
    }

    /// Returns true if a page-locked range of the iface begins at `base`, and false if an
    /// allocation of the iface begins there. Returns `None` if neither does.
    pub(crate) fn is_page_locked(&self, base: Address) -> Option<bool> {
        let entries = self.entries.lock();
        let locked = entries.page_locked.contains_key(&base.0);
        (locked || entries.owned.contains_key(&base.0)).then_some(locked)
    }

    /// Returns true if the memory at `base` is imported from another process.
    pub(crate) fn is_imported(&self, base: Address) -> bool {
        self.imported.load(Ordering::Acquire) > 0
            && matches!(
                self.entries.lock().owned.get(&base.0),
                Some(OwnedAllocation { origin: Origin::Imported { .. }, .. })
            )
    }

    pub(crate) fn insert(&self, owned: OwnedAllocation) {
        self.entries.lock().owned.insert(owned.range.start().0, owned);
    }

    /// Removes an allocation, so that only one of two threads that free it calls the driver. A
    /// newer allocation at the same address stays.
    ///
    /// # Errors
    /// InvalidArgument if the allocation is not in the table, or is imported from another process.
    pub(crate) fn take(&self, allocation: &Allocation) -> Result<OwnedAllocation> {
        let mut entries = self.entries.lock();
        let refused = || not_live("free", allocation);
        let owned = live(&mut entries, allocation).ok_or_else(refused)?;
        if matches!(owned.origin, Origin::Imported { .. }) {
            return Err(refused().remedy("the iface opened the memory: close it with ipc_close"));
        }
        entries.owned.remove(&allocation.base().0).ok_or_else(refused)
    }

    pub(crate) fn insert_page_locked(&self, locked: PageLockedRange) {
        self.entries.lock().page_locked.insert(locked.range.start().0, locked);
    }

    /// Removes a page-locked range. Returns `None` if the table does not have exactly this range.
    pub(crate) fn take_page_locked(&self, range: AddressRange) -> Option<PageLockedRange> {
        let mut entries = self.entries.lock();
        entries.page_locked.get(&range.start().0).filter(|locked| locked.range == range)?;
        entries.page_locked.remove(&range.start().0)
    }

    /// Records that the iface has opened memory of another process. The first open adds an entry,
    /// and later ones are counted in it.
    pub(crate) fn insert_open(&self, allocation: &Allocation, device: DeviceId) {
        let origin = Origin::Imported { opened: 0, closing: 0 };
        let fresh = OwnedAllocation { id: allocation.id, range: allocation.range, device, origin };
        let mut entries = self.entries.lock();
        if !entries.owned.contains_key(&allocation.base().0) {
            self.imported.fetch_add(1, Ordering::AcqRel);
        }
        let owned = entries.owned.entry(allocation.base().0).or_insert_with(|| fresh.clone());
        if owned.id != allocation.id {
            // The entry belongs to an allocation that the driver has closed, but `end_close` has
            // not removed it yet.
            *owned = fresh;
        }
        // `cuda.h`: opening a handle that is open already returns the same address and counts the
        // opens.
        if let Origin::Imported { opened, .. } = &mut owned.origin {
            *opened += 1;
        }
    }

    /// Begins a close: moves one open from `opened` to `closing`, so that two threads never close
    /// the same open. The entry stays until the driver has closed the last open. Returns the
    /// device, and true for the last open.
    ///
    /// # Errors
    /// InvalidArgument if the allocation is not in the table, is not imported, or has no open that
    /// is left to close.
    pub(crate) fn begin_close(&self, allocation: &Allocation) -> Result<(DeviceId, bool)> {
        let refused = || not_live("ipc_close", allocation);
        let mut entries = self.entries.lock();
        let owned = live(&mut entries, allocation).ok_or_else(refused)?;
        let Origin::Imported { opened, closing } = &mut owned.origin else {
            return Err(refused().remedy("the iface allocated the memory: free it with free"));
        };
        *opened = opened.checked_sub(1).ok_or_else(refused)?;
        *closing += 1;
        Ok((owned.device, *opened == 0))
    }

    /// Ends a close that [`Self::begin_close`] began. `closed` is false if the driver refused the
    /// close, which can then be repeated.
    pub(crate) fn end_close(&self, allocation: &Allocation, closed: bool) {
        let mut entries = self.entries.lock();
        let owned = live(&mut entries, allocation);
        let Some(OwnedAllocation { origin: Origin::Imported { opened, closing }, .. }) = owned
        else {
            return;
        };
        *closing -= 1;
        if !closed {
            *opened += 1;
        }
        if *opened == 0 && *closing == 0 {
            entries.owned.remove(&allocation.base().0);
            self.imported.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Drop for AllocationTable {
    fn drop(&mut self) {
        let left = self.len();
        if left > 0 {
            tracing::warn!(left, "CUDA memory was not freed before its iface was dropped");
        }
    }
}

/// Returns the entry of an allocation, or `None` if a newer allocation is at its address.
fn live<'a>(entries: &'a mut Entries, allocation: &Allocation) -> Option<&'a mut OwnedAllocation> {
    entries.owned.get_mut(&allocation.base().0).filter(|owned| owned.id == allocation.id)
}

/// Returns the error for an allocation that is not in the table.
pub(crate) fn not_live(operation: &'static str, allocation: &Allocation) -> Error {
    Error::new(ErrorKind::InvalidArgument, operation)
        .iface(IfaceKind::CUDA)
        .context("allocation", allocation.range)
        .context("identity", allocation.id.0)
        .remedy(
            "not a live allocation of this iface: it was freed, or the application allocated it \
             and frees it itself",
        )
}

#[cfg(test)]
mod tests {
    use hmem_core::AllocationKind;

    use super::*;

    /// If two threads free the same memory, the second free does not remove a newer allocation at
    /// that address.
    #[test]
    fn take_ignores_a_newer_allocation_at_the_same_address() {
        let range = AddressRange::new(Address(0x1000), 64).expect("a range");
        let allocation = |id| Allocation {
            iface: IfaceKind::CUDA,
            range,
            device: None,
            kind: AllocationKind::Device,
            id: AllocationId(id),
            token: 0,
        };
        let table = AllocationTable::default();
        let enter = |id| {
            let (id, device) = (AllocationId(id), DeviceId(0));
            table.insert(OwnedAllocation { id, range, device, origin: Origin::Memory });
        };
        enter(1);
        table.take(&allocation(1)).expect("it is in the table");
        enter(2);
        table.take(&allocation(1)).expect_err("another allocation is there");
        table.take(&allocation(2)).expect("it is still in the table");
    }
}

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

/// Allocations and page-locked ranges that were not released yet.
#[derive(Debug, Default)]
pub(crate) struct AllocationTable {
    entries: Mutex<Entries>,
    /// Number of imports. It changes under the lock; while it is 0, lookups need no lock.
    imported: AtomicUsize,
}

#[derive(Debug, Default)]
struct Entries {
    /// Allocations by first address.
    owned: BTreeMap<u64, OwnedAllocation>,
    /// Page-locked host ranges by first address.
    page_locked: HashMap<u64, PageLockedRange>,
}

/// One page-locked host range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageLockedRange {
    pub(crate) range: AddressRange,
    /// Device whose primary context page-locked the range. `None` for a context of the application.
    pub(crate) device: Option<DeviceId>,
}

/// An allocation to release.
#[derive(Clone, Debug)]
pub(crate) struct OwnedAllocation {
    pub(crate) id: AllocationId,
    pub(crate) range: AddressRange,
    pub(crate) device: DeviceId,
    pub(crate) origin: Origin,
}

/// Call that made an allocation, which determines the call that releases it.
#[derive(Clone, Debug)]
pub(crate) enum Origin {
    /// `cuMemAlloc`, `cuMemAllocManaged`.
    Memory,
    /// `cuMemHostAlloc`.
    Host,
    /// `cuMemAllocAsync`.
    Pool,
    /// `cuMemAddressReserve` of `size` bytes, `cuMemCreate` and `cuMemMap`. `left` is the part that
    /// is still to be undone.
    Virtual { size: usize, handle: CuMemHandle, left: Left },
    /// `cuIpcOpenMemHandle`. `opened` counts opens that can still be closed, `closing` counts
    /// closes that are in flight.
    Imported { opened: u64, closing: u64 },
}

/// Steps that are left to free VMM memory. The driver may refuse each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// Mapping, reservation and handle.
    Mapping,
    /// Reservation and handle.
    Reservation,
    /// Handle alone.
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

    /// Returns the allocation around an address.
    pub(crate) fn range_around(&self, address: Address) -> Option<AddressRange> {
        let entries = self.entries.lock();
        // Allocations do not overlap: only the last one that begins at or before the address can
        // contain it.
        let (_, owned) = entries.owned.range(..=address.0).next_back()?;
        Some(owned.range).filter(|range| range.contains(address))
    }

    /// Returns true if the iface page-locked a range that begins at `base`, false if it allocated
    /// memory there, and `None` if it did neither.
    pub(crate) fn is_page_locked(&self, base: Address) -> Option<bool> {
        let entries = self.entries.lock();
        let locked = entries.page_locked.contains_key(&base.0);
        (locked || entries.owned.contains_key(&base.0)).then_some(locked)
    }

    /// Returns true if the memory at `base` is of another process.
    pub(crate) fn is_imported(&self, base: Address) -> bool {
        self.imported.load(Ordering::Acquire) > 0
            && matches!(
                self.entries.lock().owned.get(&base.0),
                Some(OwnedAllocation { origin: Origin::Imported { .. }, .. })
            )
    }

    /// Enters an allocation.
    pub(crate) fn insert(&self, owned: OwnedAllocation) {
        self.entries.lock().owned.insert(owned.range.start().0, owned);
    }

    /// Removes an allocation, so that only one of two threads that free it calls the driver. A
    /// newer allocation at the same address stays.
    ///
    /// # Errors
    /// InvalidArgument if it is not in the table, or of another process.
    pub(crate) fn take(&self, allocation: &Allocation) -> Result<OwnedAllocation> {
        let mut entries = self.entries.lock();
        let refused = || not_live("free", allocation);
        let owned = live(&mut entries, allocation).ok_or_else(refused)?;
        if matches!(owned.origin, Origin::Imported { .. }) {
            return Err(refused().context("opened", "close it with ipc_close"));
        }
        entries.owned.remove(&allocation.base().0).ok_or_else(refused)
    }

    /// Enters a page-locked range.
    pub(crate) fn insert_page_locked(&self, locked: PageLockedRange) {
        self.entries.lock().page_locked.insert(locked.range.start().0, locked);
    }

    /// Removes a page-locked range. Returns `None` if exactly this range is not in the table.
    pub(crate) fn take_page_locked(&self, range: AddressRange) -> Option<PageLockedRange> {
        let mut entries = self.entries.lock();
        entries.page_locked.get(&range.start().0).filter(|locked| locked.range == range)?;
        entries.page_locked.remove(&range.start().0)
    }

    /// Counts one open of memory of another process.
    pub(crate) fn insert_open(&self, allocation: &Allocation, device: DeviceId) {
        let origin = Origin::Imported { opened: 0, closing: 0 };
        let fresh = OwnedAllocation { id: allocation.id, range: allocation.range, device, origin };
        let mut entries = self.entries.lock();
        if !entries.owned.contains_key(&allocation.base().0) {
            self.imported.fetch_add(1, Ordering::AcqRel);
        }
        let owned = entries.owned.entry(allocation.base().0).or_insert_with(|| fresh.clone());
        if owned.id != allocation.id {
            // The driver closed the previous allocation here, and `end_close` has not run yet.
            *owned = fresh;
        }
        // `cuda.h`: opening a handle that is open already returns the same address and counts the
        // opens.
        if let Origin::Imported { opened, .. } = &mut owned.origin {
            *opened += 1;
        }
    }

    /// Takes one open for a close, so that two threads that close at once each have their own. The
    /// entry stays until the driver has closed the last open: until then the memory is an import.
    /// Returns the device, and true for the last open.
    pub(crate) fn begin_close(&self, allocation: &Allocation) -> Result<(DeviceId, bool)> {
        let refused = || not_live("ipc_close", allocation);
        let mut entries = self.entries.lock();
        let owned = live(&mut entries, allocation).ok_or_else(refused)?;
        let Origin::Imported { opened, closing } = &mut owned.origin else {
            return Err(refused().context("allocated", "free it with free"));
        };
        *opened = opened.checked_sub(1).ok_or_else(refused)?;
        *closing += 1;
        Ok((owned.device, *opened == 0))
    }

    /// Ends a close. A close that the driver refused can be repeated.
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

    /// Two threads free the same memory, and a third one allocates at its address in between.
    #[test]
    fn take_ignores_a_newer_allocation_at_the_same_address() {
        let range = AddressRange::new(Address(0x1000), 64).expect("a range");
        let allocation = |id| Allocation {
            iface: IfaceKind::CUDA,
            range,
            device: None,
            kind: AllocationKind::Device,
            id: AllocationId(id),
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

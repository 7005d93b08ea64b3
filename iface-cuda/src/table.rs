//! Table of memory that the iface obtained from the driver and must release.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicUsize, Ordering},
};

use hmem_core::{Address, AddressRange, Allocation, DeviceId, IfaceKind, Result};
use hmem_iface_kit::table::{Owned, OwnedMemory, VmmObjects, not_live, other_call};
use parking_lot::Mutex;

use crate::sys::CuMemHandle;

/// Allocations and page-locked ranges that are not released yet.
#[derive(Debug)]
pub(crate) struct AllocationTable {
    pub(crate) owned: Owned<OwnedAllocation>,
    /// Page-locked host ranges by first address.
    page_locked: Mutex<HashMap<u64, PageLockedRange>>,
    /// Number of allocations that were imported from other processes. The number changes only while
    /// `owned` is locked. While the number is 0, `is_imported` takes no lock.
    imported: AtomicUsize,
}

/// A range of host memory that the iface page-locked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageLockedRange {
    pub(crate) range: AddressRange,
    /// Device in whose primary context the range was page-locked. `None` for a context of the
    /// application.
    pub(crate) device: Option<DeviceId>,
}

/// An allocation that the iface must release.
#[derive(Clone, Debug)]
pub(crate) struct OwnedAllocation {
    /// Device in whose primary context the iface allocated or opened the memory.
    pub(crate) device: DeviceId,
    pub(crate) origin: CudaOrigin,
}

/// Origin of an allocation, which determines the call that releases it.
#[derive(Clone, Debug)]
pub(crate) enum CudaOrigin {
    /// The iface allocated the memory with `cuMemAlloc` or `cuMemAllocManaged`.
    Memory,
    /// The iface allocated the memory with `cuMemHostAlloc`.
    Host,
    /// The iface allocated the memory with `cuMemAllocAsync`.
    Pool,
    /// The iface reserved `size` bytes (`cuMemAddressReserve`), created `handle` (`cuMemCreate`)
    /// and mapped it (`cuMemMap`). `left` lists the objects that are not released yet.
    Virtual { size: usize, handle: CuMemHandle, left: VmmObjects },
    /// The iface opened the memory with `cuIpcOpenMemHandle`. `opened` is the number of opens that
    /// no thread has begun to close. `closing` is the number of opens that a thread is closing.
    Imported { opened: u64, closing: u64 },
}

impl Default for AllocationTable {
    fn default() -> Self {
        let owned = Owned::new(IfaceKind::CUDA);
        Self { owned, page_locked: Mutex::default(), imported: AtomicUsize::new(0) }
    }
}

impl AllocationTable {
    /// Returns the number of allocations and page-locked ranges.
    pub(crate) fn len(&self) -> usize {
        self.owned.len() + self.page_locked.lock().len()
    }

    /// Returns true if an allocation of the device is in the table.
    pub(crate) fn has_memory_of(&self, device: DeviceId) -> bool {
        self.owned.entries().values().any(|owned| owned.memory.device == device)
    }

    /// Returns true if a range that the iface page-locked begins at `base`, and false if an
    /// allocation of the iface begins there. Returns `None` if neither of the two begins there.
    pub(crate) fn is_page_locked(&self, base: Address) -> Option<bool> {
        let locked = self.page_locked.lock().contains_key(&base.0);
        (locked || self.owned.entries().contains_key(&base.0)).then_some(locked)
    }

    /// Returns true if the memory at `base` is imported from another process.
    pub(crate) fn is_imported(&self, base: Address) -> bool {
        self.imported.load(Ordering::Acquire) > 0
            && self.owned.entries().get(&base.0).is_some_and(|owned| owned.imported)
    }

    pub(crate) fn insert_page_locked(&self, locked: PageLockedRange) {
        self.page_locked.lock().insert(locked.range.start().0, locked);
    }

    /// Removes a page-locked range. Returns `None` if the table does not have exactly this range.
    pub(crate) fn take_page_locked(&self, range: AddressRange) -> Option<PageLockedRange> {
        let mut page_locked = self.page_locked.lock();
        page_locked.get(&range.start().0).filter(|locked| locked.range == range)?;
        page_locked.remove(&range.start().0)
    }

    /// Records that the iface has opened memory of another process. The first open adds an entry.
    /// Later opens of the memory are counted in that entry.
    pub(crate) fn insert_open(&self, allocation: &Allocation, device: DeviceId) {
        let Allocation { id, range, .. } = *allocation;
        let fresh = || OwnedMemory {
            id,
            range,
            imported: true,
            memory: OwnedAllocation {
                device,
                origin: CudaOrigin::Imported { opened: 0, closing: 0 },
            },
        };
        let mut owned = self.owned.entries();
        let entry = owned.entry(range.start().0).or_insert_with(|| {
            self.imported.fetch_add(1, Ordering::AcqRel);
            fresh()
        });
        if entry.id != id {
            // The driver has closed the allocation of this entry, and `end_close` has not removed
            // the entry yet.
            *entry = fresh();
        }
        // `cuda.h`: opening a handle that is open already returns the same address and counts the
        // opens.
        if let CudaOrigin::Imported { opened, .. } = &mut entry.memory.origin {
            *opened += 1;
        }
    }

    /// Begins a close: moves one open from `opened` to `closing`, so that two threads never close
    /// the same open. The entry stays until the driver has closed the last open. Returns the
    /// device, and true if `opened` is now 0.
    ///
    /// # Errors
    /// InvalidArgument if the allocation is not in the table or is not imported, or if `opened` is
    /// 0.
    pub(crate) fn begin_close(&self, allocation: &Allocation) -> Result<(DeviceId, bool)> {
        const OPERATION: &str = "ipc_close";
        let refused = || not_live(IfaceKind::CUDA, OPERATION, allocation);
        self.owned.live(OPERATION, allocation, |owned| {
            let CudaOrigin::Imported { opened, closing } = &mut owned.origin else {
                return Err(refused().remedy(other_call(true)));
            };
            *opened = opened.checked_sub(1).ok_or_else(refused)?;
            *closing += 1;
            Ok((owned.device, *opened == 0))
        })?
    }

    /// Ends a close that [`Self::begin_close`] began. `closed` is false if the driver refused the
    /// close, which can then be repeated.
    pub(crate) fn end_close(&self, allocation: &Allocation, closed: bool) {
        let mut owned = self.owned.entries();
        let entry = owned.get_mut(&allocation.base().0).filter(|entry| entry.id == allocation.id);
        let Some(OwnedAllocation { origin: CudaOrigin::Imported { opened, closing }, .. }) =
            entry.map(|entry| &mut entry.memory)
        else {
            return;
        };
        *closing -= 1;
        if !closed {
            *opened += 1;
        }
        if *opened == 0 && *closing == 0 {
            owned.remove(&allocation.base().0);
            self.imported.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Drop for AllocationTable {
    fn drop(&mut self) {
        let left = self.page_locked.get_mut().len();
        if left > 0 {
            tracing::warn!(left, "page-locked ranges were not unlocked before CUDA was dropped");
        }
    }
}

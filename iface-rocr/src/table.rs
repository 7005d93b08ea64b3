//! Table of known allocations with their identities, and of the memory that the iface must release.
//!
//! The runtime calls back when it frees memory, and has no identities. So the table assigns an
//! identity at the first lookup of an allocation and removes the allocation in the callback. A new
//! allocation at the same address gets a new identity.
//!
//! No thread holds the lock of the table during a call of the runtime, because the runtime may hold
//! a lock of its own while it calls back.

#![allow(unsafe_code, reason = "the runtime's callback on a free, with its notice")]

use std::{
    collections::{BTreeMap, btree_map::Entry},
    ffi::c_void,
    sync::{Arc, Weak},
};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationId, IfaceKind, ProcessMark, Result,
    monitor::{FreeSubscriptions, Invalidator, Subscription},
};
use hmem_iface_kit::table::{VmmObjects, not_live, other_call};
use parking_lot::Mutex;

use crate::sys::VmemHandle;

/// Live allocations and page-locked ranges, with the subscriptions to frees.
#[derive(Debug)]
pub(crate) struct AllocationTable {
    /// The process that started the runtime. In a forked child, frees notify no subscriber.
    process: ProcessMark,
    entries: Mutex<Entries>,
    pub(crate) subscriptions: FreeSubscriptions,
    /// Lock that a thread holds while it registers a callback, so that each allocation gets one
    /// callback only.
    pub(crate) registering: Mutex<()>,
}

#[derive(Debug, Default)]
struct Entries {
    last_id: u64,
    /// Allocations by first address.
    live: BTreeMap<u64, KnownMemory>,
    /// Page-locked ranges by first address, with their addresses for devices. An address is `None`
    /// while a thread calls the runtime to lock the range.
    page_locked: BTreeMap<u64, (AddressRange, Option<usize>)>,
}

#[derive(Debug)]
struct KnownMemory {
    id: AllocationId,
    /// The allocation, or `None` until the callback is registered.
    allocation: Option<Allocation>,
    origin: RocrOrigin,
    /// True if the runtime calls [`on_free`] when the memory is freed.
    callback: bool,
}

/// Origin of an allocation, which determines the call that releases it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RocrOrigin {
    /// The application allocated the memory and frees it.
    Foreign,
    /// The iface allocated the memory with `hsa_amd_memory_pool_allocate`.
    Pool,
    /// The iface reserved `size` bytes (`hsa_amd_vmem_address_reserve`), created `handle`
    /// (`hsa_amd_vmem_handle_create`) and mapped it (`hsa_amd_vmem_map`). `left` lists the objects
    /// that are not released yet.
    Virtual { size: usize, handle: VmemHandle, left: VmmObjects },
    /// The iface opened the memory with `hsa_amd_ipc_memory_attach`.
    Imported,
}

/// Data of a deallocation callback. The runtime owns the data until it calls the callback.
struct Notice {
    table: Weak<AllocationTable>,
    /// First address of the allocation.
    base: u64,
    id: AllocationId,
}

impl AllocationTable {
    pub(crate) fn new(process: ProcessMark) -> Self {
        Self {
            process,
            entries: Mutex::default(),
            subscriptions: FreeSubscriptions::default(),
            registering: Mutex::default(),
        }
    }

    /// Returns a new identity, which no other call returns.
    pub(crate) fn next_id(&self) -> AllocationId {
        self.entries.lock().next_id()
    }

    /// Returns the identity of the allocation in the table that equals `seen` in all but the
    /// identity. Returns `None` if there is none.
    pub(crate) fn id_of(&self, seen: &Allocation) -> Option<AllocationId> {
        let entries = self.entries.lock();
        let entry = entries.live.get(&seen.base().0)?;
        let same = |known: Allocation| Allocation { id: entry.id, ..*seen } == known;
        entry.allocation.filter(|known| same(*known)).map(|_| entry.id)
    }

    /// Adds an entry for the allocation at `base`. Removes an older entry at that address and
    /// notifies its subscribers. Returns the new identity and the data for the callback.
    pub(crate) fn begin(self: &Arc<Self>, base: Address) -> (AllocationId, *mut c_void) {
        let mut entries = self.entries.lock();
        let id = entries.next_id();
        let entry =
            KnownMemory { id, allocation: None, origin: RocrOrigin::Foreign, callback: true };
        let replaced = entries.live.insert(base.0, entry);
        drop(entries);
        self.notify(replaced);
        let notice = Notice { table: Arc::downgrade(self), base: base.0, id };
        (id, Box::into_raw(Box::new(notice)).cast())
    }

    /// Completes the entry that [`begin`](Self::begin) added for the identity of `allocation`.
    /// Returns false if the memory was freed meanwhile.
    pub(crate) fn describe(&self, allocation: Allocation) -> bool {
        let mut entries = self.entries.lock();
        let entry = entries.live.get_mut(&allocation.base().0);
        let entry = entry.filter(|entry| entry.id == allocation.id);
        entry.map(|entry| entry.allocation = Some(allocation)).is_some()
    }

    /// Removes an allocation whose callback could not be registered.
    ///
    /// # Safety
    /// `notice` must come from [`begin`](Self::begin), and the runtime must not own it.
    pub(crate) unsafe fn cancel(&self, base: Address, id: AllocationId, notice: *mut c_void) {
        // SAFETY: the caller promises that `begin` made `notice` and that the runtime does not own
        // it, so nothing else frees it.
        drop(unsafe { Box::from_raw(notice.cast::<Notice>()) });
        self.remove(base.0, id);
    }

    /// Removes an allocation and notifies its subscribers. Does nothing if the allocation at `base`
    /// has another identity.
    fn remove(&self, base: u64, id: AllocationId) {
        let mut entries = self.entries.lock();
        let removed = match entries.live.entry(base) {
            Entry::Occupied(entry) if entry.get().id == id => Some(entry.remove()),
            _ => None,
        };
        drop(entries);
        self.notify(removed);
    }

    /// Notifies the subscribers of an allocation that was removed from the table.
    fn notify(&self, removed: Option<KnownMemory>) {
        if let Some(allocation) = removed.and_then(|entry| entry.allocation) {
            self.subscriptions.while_freeing(allocation.range, || ());
        }
    }

    /// Records the origin of an allocation that this iface made. Adds an entry if the table has
    /// none, because no deallocation callback is registered for the allocation.
    pub(crate) fn own(&self, allocation: Allocation, origin: RocrOrigin) {
        let mut entries = self.entries.lock();
        let fresh = || KnownMemory {
            id: allocation.id,
            allocation: Some(allocation),
            origin,
            callback: false,
        };
        let entry = entries.live.entry(allocation.base().0).or_insert_with(fresh);
        entry.origin = origin;
        entry.allocation = Some(allocation);
    }

    /// Returns the allocation that contains an address, with its origin, if this iface made the
    /// allocation.
    pub(crate) fn own_around(&self, address: Address) -> Option<(Allocation, RocrOrigin)> {
        let entries = self.entries.lock();
        // Allocations do not overlap: only the last one that begins at or before the address can
        // contain it.
        let (_, entry) = entries.live.range(..=address.0).next_back()?;
        let allocation = entry.allocation.filter(|known| known.range.contains(address))?;
        (entry.origin != RocrOrigin::Foreign).then_some((allocation, entry.origin))
    }

    /// Ends the iface's ownership of an allocation and returns its origin. If two threads free the
    /// same allocation, this method succeeds for one of them, so that only this thread calls the
    /// runtime. If the allocation has no callback, also removes its entry and notifies its
    /// subscribers.
    ///
    /// # Errors
    /// InvalidArgument if the allocation does not belong to this iface, or was passed to the wrong
    /// call: to `ipc_close` (`imported` is true) or to `free`.
    pub(crate) fn take(
        &self,
        operation: &'static str,
        allocation: &Allocation,
        imported: bool,
    ) -> Result<RocrOrigin> {
        let mut entries = self.entries.lock();
        let entry = entries.live.get_mut(&allocation.base().0);
        let own =
            entry.filter(|entry| entry.id == allocation.id && entry.origin != RocrOrigin::Foreign);
        let refused = || not_live(IfaceKind::ROCR, operation, allocation);
        let entry = own.ok_or_else(refused)?;
        if (entry.origin == RocrOrigin::Imported) != imported {
            return Err(refused().remedy(other_call(imported)));
        }
        let origin = std::mem::replace(&mut entry.origin, RocrOrigin::Foreign);
        let callback = entry.callback;
        drop(entries);
        if !callback {
            self.remove(allocation.base().0, allocation.id);
        }
        Ok(origin)
    }

    /// Returns the number of allocations and page-locked ranges that the iface must release.
    pub(crate) fn owned(&self) -> usize {
        let entries = self.entries.lock();
        let own = entries.live.values().filter(|entry| entry.origin != RocrOrigin::Foreign).count();
        own + entries.page_locked.len()
    }

    /// Subscribes to the free of the live allocation that contains a range. Returns `None` if no
    /// live allocation contains the range.
    pub(crate) fn watch(
        &self,
        range: AddressRange,
        invalidator: Arc<dyn Invalidator>,
    ) -> Option<Subscription> {
        // The table is searched after the subscription. The search detects an earlier free, and a
        // later free notifies the subscriber.
        let subscription = self.subscriptions.add(range, invalidator);
        let entries = self.entries.lock();
        let nearest = entries.live.range(..=range.start().0).next_back();
        let known = nearest.and_then(|(_, entry)| entry.allocation);
        drop(entries);
        if known.is_some_and(|known| known.range.contains_range(range)) {
            return Some(subscription);
        }
        self.subscriptions.remove(subscription);
        None
    }

    /// Adds an entry without a device address for a range that is about to be page-locked. Returns
    /// false if the table has a range at the same first address.
    pub(crate) fn begin_lock(&self, range: AddressRange) -> bool {
        let mut entries = self.entries.lock();
        let free = !entries.page_locked.contains_key(&range.start().0);
        if free {
            entries.page_locked.insert(range.start().0, (range, None));
        }
        free
    }

    /// Records the device address of a page-locked range. With `None`, removes the entry of a range
    /// that could not be locked.
    pub(crate) fn end_lock(&self, range: AddressRange, agent_address: Option<usize>) {
        let mut entries = self.entries.lock();
        match agent_address {
            Some(_) => entries.page_locked.insert(range.start().0, (range, agent_address)),
            None => entries.page_locked.remove(&range.start().0),
        };
    }

    /// Removes a page-locked range, and returns its device address. Returns `None` if the table
    /// does not have exactly this range.
    pub(crate) fn take_page_locked(&self, range: AddressRange) -> Option<usize> {
        let mut entries = self.entries.lock();
        let (locked, agent_address) = *entries.page_locked.get(&range.start().0)?;
        let agent_address = agent_address.filter(|_| locked == range)?;
        entries.page_locked.remove(&range.start().0);
        Some(agent_address)
    }

    /// Returns the device address of a range that lies in a page-locked range, or `None` if the
    /// range lies in none.
    pub(crate) fn page_locked(&self, range: AddressRange) -> Option<usize> {
        let entries = self.entries.lock();
        let (base, (locked, agent_address)) =
            entries.page_locked.range(..=range.start().0).next_back()?;
        let address = agent_address.filter(|_| locked.contains_range(range))?;
        Some(address + (range.start().0 - base) as usize)
    }
}

impl Drop for AllocationTable {
    fn drop(&mut self) {
        if !self.process.is_current() {
            return;
        }
        let left = self.owned();
        if left > 0 {
            tracing::warn!(left, "ROCr memory was not freed before its iface was dropped");
        }
    }
}

impl Entries {
    fn next_id(&mut self) -> AllocationId {
        self.last_id += 1;
        AllocationId(self.last_id)
    }
}

/// Notifies the subscribers of freed memory, but not in a forked child. The runtime calls this
/// function on the thread that frees.
///
/// # Safety
/// `notice` must come from [`AllocationTable::begin`]. The runtime must pass it to one call of this
/// function only.
pub(crate) unsafe extern "C" fn on_free(_pointer: *mut c_void, notice: *mut c_void) {
    // SAFETY: `begin` made `notice`, and only this call frees it: "callbacks are automatically
    // deregistered when they are invoked".
    let notice = unsafe { Box::from_raw(notice.cast::<Notice>()) };
    if let Some(table) = notice.table.upgrade()
        && table.process.is_current()
    {
        table.remove(notice.base, notice.id);
    }
}

//! The memory that an iface obtained from its driver and must release.

use std::collections::BTreeMap;

use hmem_core::{
    Address, AddressRange, Allocation, AllocationId, Error, ErrorKind, IfaceKind, Result,
};
use parking_lot::{Mutex, MutexGuard};

/// Memory that an iface must release, by first address. Ranges in the table do not overlap. `M` is
/// the type of the data with which the iface calls the driver to release an allocation.
#[derive(Debug)]
pub struct Owned<M> {
    iface: IfaceKind,
    entries: Mutex<BTreeMap<u64, OwnedMemory<M>>>,
}

/// One allocation in the table.
#[derive(Debug)]
pub struct OwnedMemory<M> {
    /// Identity of the allocation.
    pub id: AllocationId,
    /// Range of the allocation, with the length that was requested.
    pub range: AddressRange,
    /// True if the iface opened memory of another process, which `ipc_close` releases. False if the
    /// iface allocated the memory, which `free` releases.
    pub imported: bool,
    /// Data with which the iface calls the driver to release the memory.
    pub memory: M,
}

/// Objects of VMM memory that an iface has not released yet. The iface releases them one by one,
/// and the driver may refuse each release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmmObjects {
    /// The mapping, the reservation of addresses and the handle of the physical memory.
    Mapping,
    /// The reservation and the handle.
    Reservation,
    /// The handle.
    Handle,
}

impl<M> Owned<M> {
    /// Returns an empty table.
    #[must_use]
    pub fn new(iface: IfaceKind) -> Self {
        Self { iface, entries: Mutex::default() }
    }

    /// Returns the number of allocations.
    pub fn len(&self) -> usize {
        self.entries().len()
    }

    /// Returns true if nothing is left to release.
    pub fn is_empty(&self) -> bool {
        self.entries().is_empty()
    }

    /// Locks the table, and returns its entries by first address.
    pub fn entries(&self) -> MutexGuard<'_, BTreeMap<u64, OwnedMemory<M>>> {
        self.entries.lock()
    }

    /// Adds an allocation, or puts back an allocation that the driver refused to release.
    pub fn insert(&self, allocation: &Allocation, imported: bool, memory: M) {
        let Allocation { id, range, .. } = *allocation;
        self.entries().insert(range.start().0, OwnedMemory { id, range, imported, memory });
    }

    /// Returns the range of the allocation that contains an address, or `None` if none does.
    pub fn range_around(&self, address: Address) -> Option<AddressRange> {
        // Allocations do not overlap: only the last one that begins at or before the address can
        // contain it.
        let entries = self.entries();
        let (_, entry) = entries.range(..=address.0).next_back()?;
        Some(entry.range).filter(|range| range.contains(address))
    }

    /// Calls a function with the [`memory`](OwnedMemory::memory) of an allocation, while the table
    /// is locked.
    ///
    /// # Errors
    /// InvalidArgument if the allocation is not in the table, or a newer one is at its address.
    pub fn live<T>(
        &self,
        operation: &'static str,
        allocation: &Allocation,
        with: impl FnOnce(&mut M) -> T,
    ) -> Result<T> {
        let mut entries = self.entries();
        let entry = entries.get_mut(&allocation.base().0);
        let live = entry.filter(|entry| entry.id == allocation.id);
        let live = live.ok_or_else(|| not_live(self.iface, operation, allocation))?;
        Ok(with(&mut live.memory))
    }

    /// Removes an allocation. If two threads release the same allocation, this method succeeds for
    /// one of them, so that only this thread calls the driver. A newer allocation at the same
    /// address stays in the table. `imported` is true for `ipc_close`, and false for `free`.
    ///
    /// # Errors
    /// InvalidArgument if the allocation is not in the table, or if `imported` differs from its
    /// [`OwnedMemory::imported`].
    pub fn take(
        &self,
        operation: &'static str,
        allocation: &Allocation,
        imported: bool,
    ) -> Result<M> {
        let refused = || not_live(self.iface, operation, allocation);
        let mut entries = self.entries();
        let base = allocation.base().0;
        let live = entries.get(&base).filter(|entry| entry.id == allocation.id);
        if live.ok_or_else(refused)?.imported != imported {
            return Err(refused().remedy(other_call(imported)));
        }
        entries.remove(&base).map(|entry| entry.memory).ok_or_else(refused)
    }
}

impl<O> Drop for Owned<O> {
    fn drop(&mut self) {
        let left = self.entries.get_mut().len();
        if left > 0 {
            let iface = self.iface;
            tracing::warn!(%iface, left, "memory was not freed before its iface was dropped");
        }
    }
}

/// Returns the error for a call with an allocation that is not in the iface's table: the allocation
/// was released before, or the application allocated it.
#[must_use]
pub fn not_live(iface: IfaceKind, operation: &'static str, allocation: &Allocation) -> Error {
    Error::new(ErrorKind::InvalidArgument, operation)
        .iface(iface)
        .context("allocation", allocation.range)
        .context("identity", allocation.id.0)
        .remedy(
            "not a live allocation of this iface: it was freed, or the application allocated it \
             and frees it itself",
        )
}

/// Returns the remedy for memory that was passed to the wrong call: to `ipc_close` if `imported` is
/// true, and to `free` if it is false.
#[must_use]
pub fn other_call(imported: bool) -> &'static str {
    if imported {
        "the iface allocated the memory: free it with free"
    } else {
        "the iface opened the memory: close it with ipc_close"
    }
}

#[cfg(test)]
mod tests {
    use hmem_core::AllocationKind;

    use super::*;

    fn allocation(id: u64) -> Allocation {
        Allocation {
            iface: IfaceKind::CUDA,
            range: AddressRange::new(Address(0x1000), 64).expect("a range"),
            device: None,
            kind: AllocationKind::Device,
            id: AllocationId(id),
            token: 0,
        }
    }

    /// If two threads free the same memory, the second free does not remove a newer allocation at
    /// that address.
    #[test]
    fn take_ignores_a_newer_allocation_at_the_same_address() {
        let table = Owned::new(IfaceKind::CUDA);
        table.insert(&allocation(1), false, ());
        table.take("free", &allocation(1), false).expect("it is in the table");
        table.insert(&allocation(2), false, ());
        table.take("free", &allocation(1), false).expect_err("another allocation is there");
        table.live("export", &allocation(1), |_| ()).expect_err("another allocation is there");
        table.take("free", &allocation(2), false).expect("it is still in the table");
    }

    #[test]
    fn imported_memory_is_closed_and_other_memory_is_freed() {
        let table = Owned::new(IfaceKind::CUDA);
        for imported in [false, true] {
            table.insert(&allocation(1), imported, ());
            let refused = table.take("release", &allocation(1), !imported).expect_err("other call");
            assert_eq!(refused.remedy_text(), Some(other_call(!imported)));
            table.take("release", &allocation(1), imported).expect("the call that matches");
        }
    }

    #[test]
    fn address_behind_an_allocation_is_in_no_allocation() {
        let table = Owned::new(IfaceKind::CUDA);
        table.insert(&allocation(1), false, ());
        let found = |address| table.range_around(Address(address)).is_some();
        assert_eq!([0xfff, 0x1000, 0x103f, 0x1040].map(found), [false, true, true, false]);
        table.take("free", &allocation(1), false).expect("it is in the table");
    }
}

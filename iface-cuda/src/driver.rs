//! The driver as one opened iface sees it: functions, devices, and what was taken from it.

use std::{
    collections::{BTreeMap, HashMap},
    sync::atomic::{AtomicU32, AtomicUsize},
};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationId, DeviceId, Error, ErrorKind, IfaceKind, Result,
};
use parking_lot::Mutex;

use crate::{
    device::{self, Abilities, DeviceEntry},
    memory::HostKinds,
    monitor::Subscriptions,
    sys::{CuMemHandle, Functions},
};

/// Shared by the iface, its copies under way and its monitors.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) functions: Functions,
    pub(crate) devices: Vec<DeviceEntry>,
    /// How many of the pointer attributes the driver knows; 0 until it has shown it.
    pub(crate) attributes: AtomicU32,
    pub(crate) host_kinds: HostKinds,
    pub(crate) book: Mutex<Book>,
    /// How many allocations of other processes are in the book: spares most queries its lock.
    /// Changed under that lock.
    pub(crate) imported: AtomicUsize,
    pub(crate) subscriptions: Subscriptions,
}

/// What was taken from the driver and has to be given back.
#[derive(Debug, Default)]
pub(crate) struct Book {
    /// By first address.
    pub(crate) owned: BTreeMap<u64, Owned>,
    /// Host ranges that were page-locked, by first address.
    pub(crate) registered: HashMap<u64, Registered>,
}

impl Book {
    /// Takes the entry of one allocation out; of another at its address it takes nothing.
    pub(crate) fn take(&mut self, base: u64, id: AllocationId) -> Option<Owned> {
        self.owned.get(&base).filter(|owned| owned.id == id)?;
        self.owned.remove(&base)
    }
}

/// One page-locked host range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registered {
    pub(crate) len: u64,
    /// The device in whose primary context it was; `None` for a context of the application's.
    pub(crate) device: Option<DeviceId>,
}

/// One allocation to give back.
#[derive(Clone, Debug)]
pub(crate) struct Owned {
    pub(crate) id: AllocationId,
    pub(crate) range: AddressRange,
    pub(crate) device: DeviceId,
    pub(crate) origin: Origin,
}

/// How it came, and so how it goes.
#[derive(Clone, Debug)]
pub(crate) enum Origin {
    /// `cuMemAlloc`, `cuMemAllocManaged`.
    Memory,
    /// `cuMemHostAlloc`.
    Host,
    /// `cuMemAllocAsync`.
    Pool,
    /// `cuMemAddressReserve` of so many bytes, `cuMemCreate`, `cuMemMap`; and what of it is left to
    /// undo before the handle is released.
    Virtual { size: usize, handle: CuMemHandle, left: Left },
    /// `cuIpcOpenMemHandle`: how many opens can still be closed, and how many closes are on their
    /// way to the driver.
    Imported { opened: u64, closing: u64 },
}

/// How much of VMM memory is there: giving it back takes steps, each of which the driver may
/// refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// Addresses, and the handle mapped at them.
    Mapping,
    /// Addresses alone.
    Reservation,
    /// Neither.
    Handle,
}

impl Driver {
    pub(crate) fn new(functions: Functions, devices: Vec<DeviceEntry>) -> Self {
        Self {
            functions,
            devices,
            attributes: AtomicU32::new(0),
            host_kinds: HostKinds::default(),
            book: Mutex::default(),
            imported: AtomicUsize::new(0),
            subscriptions: Subscriptions::default(),
        }
    }

    pub(crate) fn abilities(&self, operation: &'static str, device: DeviceId) -> Result<Abilities> {
        Ok(device::get(&self.devices, operation, device)?.abilities)
    }

    /// What the iface took from the driver and still has.
    pub(crate) fn in_use(&self) -> usize {
        let book = self.book.lock();
        book.owned.len() + book.registered.len()
    }

    /// The allocation of the book around an address.
    pub(crate) fn range_around(&self, address: Address) -> Option<AddressRange> {
        let book = self.book.lock();
        // No two share an address, so that the last to begin at or before it is the only one to
        // ask.
        let (_, owned) = book.owned.range(..=address.0).next_back()?;
        Some(owned.range).filter(|range| range.contains(address))
    }

    /// The book's entry of a live allocation.
    pub(crate) fn owned(&self, operation: &'static str, allocation: &Allocation) -> Result<Owned> {
        let owned = self.book.lock().owned.get(&allocation.base().0).cloned();
        owned
            .filter(|owned| owned.id == allocation.id)
            .ok_or_else(|| not_live(operation, allocation))
    }
}

pub(crate) fn not_live(operation: &'static str, allocation: &Allocation) -> Error {
    Error::new(ErrorKind::InvalidArgument, operation)
        .iface(IfaceKind::CUDA)
        .context("allocation", allocation.range)
        .context("identity", allocation.id.0)
        .remedy(
            "not a live allocation of this iface: freed already, or allocated by somebody else, who frees it",
        )
}

impl Drop for Driver {
    fn drop(&mut self) {
        let left = self.in_use();
        if left > 0 {
            tracing::warn!(left, "CUDA memory was not freed before its iface was dropped");
        }
        self.abandon_contexts();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two threads free the same memory, and a third gets its address in between.
    #[test]
    fn what_ends_of_one_allocation_leaves_the_next_at_its_address_in_the_book() {
        let (device, origin) = (DeviceId(0), Origin::Memory);
        let range = AddressRange::new(Address(0x1000), 64).expect("a range");
        let owned = |id| Owned { id: AllocationId(id), range, device, origin: origin.clone() };
        let mut book = Book::default();
        book.owned.insert(0x1000, owned(1));
        assert!(book.take(0x1000, AllocationId(1)).is_some());
        book.owned.insert(0x1000, owned(2));
        assert!(book.take(0x1000, AllocationId(1)).is_none());
        assert!(book.take(0x1000, AllocationId(2)).is_some(), "it is still there");
    }
}

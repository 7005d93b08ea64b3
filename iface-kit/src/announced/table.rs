//! The table of live allocations, searched by address.

use std::{
    collections::BTreeMap,
    os::fd::{BorrowedFd, OwnedFd},
    sync::atomic::{AtomicU64, Ordering},
};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationId, AllocationKind, Error, ErrorKind, IfaceKind,
    ProcessMark, Result, monitor::FreeSubscriptions,
};
use parking_lot::RwLock;

use super::{
    driver::{Block, BlockRange},
    exports::Exports,
};

/// Origin of an allocation, which determines the party that frees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AnnouncedOrigin {
    /// The iface allocated the memory and frees it.
    Allocated,
    /// The application allocated the memory, announced it, and frees it after the withdrawal.
    Announced,
}

/// The table's entry of one allocation.
#[derive(Debug)]
pub(crate) struct AnnouncedMemory<H> {
    pub(crate) block: Block<H>,
    pub(crate) exports: Exports,
    id: AllocationId,
    origin: AnnouncedOrigin,
}

/// A range of bytes in a live allocation, with the identity of the allocation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocatedRange<H> {
    pub(crate) id: AllocationId,
    pub(crate) within: BlockRange<H>,
}

/// The allocations of one iface, and the subscriptions to their frees.
#[derive(Debug)]
pub(crate) struct Table<H> {
    iface: IfaceKind,
    /// The process that opened the iface. A forked child takes no lock of the table: a thread of
    /// the parent may have held the lock during the fork, and no thread of the child releases it.
    pub(crate) process: ProcessMark,
    /// Live allocations by first address.
    entries: RwLock<BTreeMap<u64, AnnouncedMemory<H>>>,
    /// Lowest address that was ever in the table. A lookup of a lower address takes no lock.
    lowest: AtomicU64,
    /// Highest address that was ever in the table. A lookup of a higher address takes no lock.
    highest: AtomicU64,
    next_id: AtomicU64,
    pub(crate) subscriptions: FreeSubscriptions,
}

impl<H: Copy> Table<H> {
    pub(crate) fn new(iface: IfaceKind) -> Result<Self> {
        Ok(Self {
            iface,
            process: ProcessMark::current()?,
            entries: RwLock::default(),
            lowest: AtomicU64::new(u64::MAX),
            highest: AtomicU64::new(0),
            next_id: AtomicU64::new(1),
            subscriptions: FreeSubscriptions::default(),
        })
    }

    /// Returns the number of allocations.
    pub(crate) fn len(&self) -> usize {
        self.entries.read().len()
    }

    /// Returns the allocation that contains an address, or `None` if no allocation does.
    ///
    /// # Errors
    /// BadState in a forked child, for an address that may be in the table.
    pub(crate) fn query(&self, address: Address) -> Result<Option<Allocation>> {
        self.with("query", address, |entry| self.describe(entry))
    }

    /// Finds the allocation that contains `len` bytes from `address` on. Returns `None` if no
    /// allocation contains `address`.
    ///
    /// # Errors
    /// - OutOfBounds if the last of these bytes lies after the end of the allocation.
    /// - AddressWraps if `address + len` exceeds the largest address.
    /// - BadState in a forked child, for an address that may be in the table.
    pub(crate) fn locate(
        &self,
        operation: &'static str,
        address: Address,
        len: u64,
    ) -> Result<Option<LocatedRange<H>>> {
        let found = self.with(operation, address, |entry| (entry.id, entry.block))?;
        let Some((id, block)) = found else {
            return Ok(None);
        };
        if !block.range.contains_range(AddressRange::new(address, len)?) {
            return Err(Error::new(ErrorKind::OutOfBounds, operation)
                .iface(self.iface)
                .context("address", address)
                .context("length", len)
                .context("allocation", block.range)
                .remedy("the range must lie in one allocation"));
        }
        let within = BlockRange { block, offset: address.0 - block.range.start().0, len };
        Ok(Some(LocatedRange { id, within }))
    }

    /// Adds an allocation with a new identity. The range of `block` must not be empty.
    ///
    /// # Errors
    /// InvalidArgument if the allocation overlaps a live one.
    pub(crate) fn insert(
        &self,
        operation: &'static str,
        block: Block<H>,
        origin: AnnouncedOrigin,
    ) -> Result<Allocation> {
        let range = block.range;
        let last = range.start().0 + (range.len() - 1);
        let mut entries = self.entries.write();
        if let Some((_, other)) = entries.range(..=last).next_back()
            && other.block.range.overlaps(range)
        {
            return Err(Error::new(ErrorKind::InvalidArgument, operation)
                .iface(self.iface)
                .context("range", range)
                .context("allocation", other.block.range)
                .remedy(concat!(
                    "the addresses belong to another allocation: ",
                    "withdraw announced memory before it is freed",
                )));
        }
        self.lowest.fetch_min(range.start().0, Ordering::Relaxed);
        self.highest.fetch_max(last, Ordering::Relaxed);
        let id = AllocationId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let entry = AnnouncedMemory { block, exports: Exports::default(), id, origin };
        let allocation = self.describe(&entry);
        entries.insert(range.start().0, entry);
        Ok(allocation)
    }

    /// Removes an allocation. A newer allocation at the same address stays in the table.
    ///
    /// # Errors
    /// InvalidArgument if the allocation is not in the table, or has another origin.
    pub(crate) fn remove(
        &self,
        operation: &'static str,
        allocation: &Allocation,
        origin: AnnouncedOrigin,
    ) -> Result<AnnouncedMemory<H>> {
        let refused = |remedy| {
            Error::new(ErrorKind::InvalidArgument, operation)
                .iface(self.iface)
                .context("allocation", allocation.range)
                .context("identity", allocation.id.0)
                .remedy(remedy)
        };
        let base = allocation.base().0;
        let mut entries = self.entries.write();
        let live = entries.get(&base).filter(|entry| entry.id == allocation.id);
        match live.map(|entry| entry.origin) {
            Some(found) if found == origin => {}
            Some(AnnouncedOrigin::Allocated) => {
                return Err(refused("the iface allocated it: free it"));
            }
            Some(AnnouncedOrigin::Announced) => {
                return Err(refused("the application announced it, and frees it: withdraw it"));
            }
            None => {
                return Err(refused(
                    "not a live allocation of this iface: it was freed or withdrawn already",
                ));
            }
        }
        entries.remove(&base).ok_or_else(|| refused("not a live allocation of this iface"))
    }

    /// Puts an entry back after its memory could not be freed.
    pub(crate) fn restore(&self, entry: AnnouncedMemory<H>) {
        self.entries.write().insert(entry.block.range.start().0, entry);
    }

    /// Keeps a descriptor of a dma-buf in the entry of its allocation. Drops `fd` instead if the
    /// application allocated the memory, because the application also frees that memory.
    ///
    /// Returns false if the allocation was freed or withdrawn since [`Self::locate`] returned `of`.
    #[must_use]
    pub(crate) fn keep_export(
        &self,
        of: &LocatedRange<H>,
        fd: OwnedFd,
        others_use: impl Fn(BorrowedFd<'_>) -> bool,
    ) -> bool {
        let mut entries = self.entries.write();
        let base = of.within.block.range.start().0;
        match entries.get_mut(&base).filter(|entry| entry.id == of.id) {
            Some(entry) => {
                if entry.origin == AnnouncedOrigin::Allocated {
                    entry.exports.keep(fd, others_use);
                }
                true
            }
            None => false,
        }
    }

    /// Calls a function with the entry of the allocation that contains an address, while the table
    /// is locked. Returns `None` if no allocation contains the address.
    fn with<T>(
        &self,
        operation: &'static str,
        address: Address,
        look: impl FnOnce(&AnnouncedMemory<H>) -> T,
    ) -> Result<Option<T>> {
        let outside = address.0 < self.lowest.load(Ordering::Relaxed)
            || address.0 > self.highest.load(Ordering::Relaxed);
        if outside {
            return Ok(None);
        }
        self.process.check(operation).map_err(|error| error.iface(self.iface))?;
        let entries = self.entries.read();
        let nearest = entries.range(..=address.0).next_back();
        let found = nearest.filter(|(_, entry)| entry.block.range.contains(address));
        Ok(found.map(|(_, entry)| look(entry)))
    }

    fn describe(&self, entry: &AnnouncedMemory<H>) -> Allocation {
        Allocation {
            iface: self.iface,
            range: entry.block.range,
            device: Some(entry.block.device),
            kind: AllocationKind::Device,
            id: entry.id,
            token: 0,
        }
    }
}

//! Lease blocks: groups of lease slots, in which threads publish their leases.
//!
//! Each block in use has one owner: a thread or a lookup handle. Only the owner writes the block's
//! cache lines, except that the thread that drops a lease clears the lease's slot.

#![allow(unsafe_code, reason = "zeroed lease blocks, and slots by an index that is in range")]

use std::collections::HashMap;

use super::super::{
    arena::{Arena, Zeroed},
    sync::{AtomicU32, AtomicU64, Mutex, Ordering},
};
use crate::Result;

/// The number of lease slots in a block. With 31 slots, a block fills 512 bytes.
#[cfg(not(loom))]
const SLOTS: usize = 31;
#[cfg(loom)]
const SLOTS: usize = 2;

/// The largest number of lease blocks of a cache. A thread or lookup handle owns one block, or more
/// if it has many leases.
#[cfg(not(loom))]
const MAX_BLOCKS: usize = 1 << 16;
#[cfg(loom)]
const MAX_BLOCKS: usize = 4;

/// The number of lease slots that a scan tests for being free in one step.
const SLOTS_PER_TEST: usize = 10;

/// The largest number of further blocks in which a lookup searches for a free slot, after the first
/// block of its thread or handle. If no searched block has a free slot, the cache assigns another
/// block.
const BLOCKS_TO_SEARCH: usize = 8;

/// A slot for one lease. `entry` publishes the lease. Only the owner of the slot's block, a thread
/// or a lookup handle, uses the other fields and calls the methods.
#[repr(C)]
#[derive(Debug)]
#[cfg_attr(loom, derive(Default))]
pub(in crate::cache) struct LeaseSlot {
    /// The index of the leased entry, or 0 if the slot is free. The thread that owns the block sets
    /// the index, and the thread that drops the lease sets 0.
    pub(in crate::cache) entry: AtomicU32,
    /// The index of the entry that the last lookup with this slot found, or 0. The entry may have
    /// been reused since. Only the thread that owns the block uses this field.
    pub(in crate::cache) last_found: AtomicU32,
    /// The number of hits with this slot. Only the thread that owns the block writes this field.
    hits: AtomicU64,
}

impl LeaseSlot {
    /// Returns whether the slot is free.
    #[inline(always)]
    pub(in crate::cache) fn is_free(&self) -> bool {
        // This Acquire and the Release in `publish` order the leases of a slot: a thread that sees
        // the next lease also sees all uses of the previous one, which may have ended on another
        // thread.
        self.entry.load(Ordering::Acquire) == 0
    }

    /// Publishes a lease of an entry. The slot must be free, or hold a lease that the calling
    /// lookup published.
    #[inline(always)]
    pub(in crate::cache) fn publish(&self, entry: u32) {
        self.entry.store(entry, Ordering::Release);
    }

    /// Adds one to the number of hits that took their lease from this slot.
    #[inline(always)]
    pub(in crate::cache) fn count_hit(&self) {
        self.hits.store(self.hits.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }
}

/// A group of lease slots, owned by a thread or a lookup handle. Only the owner uses `next_block`,
/// `current_block` and `next_slot`, and calls the methods.
#[repr(C, align(128))]
#[derive(Debug)]
#[cfg_attr(loom, derive(Default))]
pub(in crate::cache) struct LeaseBlock {
    /// 1 while the block has an owner, otherwise 0.
    owned: AtomicU32,
    /// The index of the next block of the same owner, or 0. Each owner has a list of blocks, and
    /// gets another block when all slots of the searched blocks are in use.
    next_block: AtomicU32,
    /// The index of the block in which the owner last found a free slot. 0 means the owner's first
    /// block. Used only in the first block of an owner.
    current_block: AtomicU32,
    /// The position of the slot that the next lookup with this block tries first. The slot is
    /// probably free.
    next_slot: AtomicU32,
    slots: [LeaseSlot; SLOTS],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<LeaseBlock>() == 512);

// SAFETY: atomics of zero bytes are 0 and need no drop.
unsafe impl Zeroed for LeaseBlock {}

impl LeaseBlock {
    /// Returns the slot that the next lookup with this block tries first.
    #[inline(always)]
    pub(in crate::cache) fn next_slot(&self) -> &LeaseSlot {
        let next_slot = self.next_slot.load(Ordering::Relaxed) as usize;
        // SAFETY: `next_slot` is 0 or an index below SLOTS that `free_slot` stored.
        unsafe { self.slots.get_unchecked(next_slot) }
    }

    /// Returns a free slot of the block, or `None`.
    #[inline]
    fn free_slot(&self) -> Option<&LeaseSlot> {
        let next_slot = self.next_slot.load(Ordering::Relaxed) as usize;
        let free =
            (next_slot..SLOTS).chain(0..next_slot).find(|slot| self.slots[*slot].is_free())?;
        // The caller is about to use this slot, so the next search starts after it.
        let next = if free + 1 == SLOTS { 0 } else { free + 1 };
        self.next_slot.store(next as u32, Ordering::Relaxed);
        Some(&self.slots[free])
    }
}

/// All lease blocks of a cache.
#[derive(Debug)]
pub(in crate::cache) struct LeaseBlocks {
    arena: Arena<LeaseBlock>,
    /// The number of blocks that had an owner at least once. Their indices are 1 to this number.
    created: AtomicU32,
    /// The number of threads and lookup handles that own blocks. A thread must own a block, or use
    /// a handle that owns one, to look up. Increases only under the cache's lock.
    owners: AtomicU32,
    /// The lock under which a block gets an owner. The cache's lock does not suffice, because an
    /// owner gets its further blocks without the cache's lock.
    assigning: Mutex<()>,
}

impl LeaseBlocks {
    pub(in crate::cache) fn new() -> Result<Self> {
        Ok(Self {
            arena: Arena::reserve(MAX_BLOCKS)?,
            created: AtomicU32::new(0),
            owners: AtomicU32::new(0),
            assigning: Mutex::new(()),
        })
    }

    /// Returns the number of threads and lookup handles that own blocks. Only these may look up.
    ///
    /// The caller must hold the cache's lock, so that no owner is added. Former owners may have
    /// left leases behind. A scan of the slots after this call sees each of those leases that has
    /// not ended.
    pub(in crate::cache) fn owners(&self) -> u32 {
        self.owners.load(Ordering::Acquire)
    }

    fn each(&self) -> impl Iterator<Item = &LeaseBlock> {
        (1..=self.created.load(Ordering::Acquire)).map(|index| self.arena.at(index))
    }

    /// Calls `visit` for each lease of the cache, with the index of the leased entry.
    pub(in crate::cache) fn for_each_lease(&self, mut visit: impl FnMut(u32)) {
        // Acquire: if the slot is free, this thread sees all uses of the lease that ended in it.
        let entry = |slot: &LeaseSlot| slot.entry.load(Ordering::Acquire);
        let mut visit_each = |slots: &[LeaseSlot]| {
            slots.iter().map(entry).filter(|entry| *entry != 0).for_each(&mut visit);
        };
        for block in self.each() {
            // Most slots are free, so several are tested in one step. This call need not see a
            // lease that is published after the test.
            let (groups, rest) = block.slots.as_chunks::<SLOTS_PER_TEST>();
            for slots in groups {
                if slots.iter().fold(0, |any, slot| any | entry(slot)) != 0 {
                    visit_each(slots);
                }
            }
            visit_each(rest);
        }
    }

    /// Returns the number of leases of each leased entry.
    pub(in crate::cache) fn users_by_entry(&self) -> HashMap<u32, usize> {
        let mut users = HashMap::new();
        self.for_each_lease(|index| *users.entry(index).or_default() += 1);
        users
    }

    /// Returns the number of hits of all threads so far.
    pub(in crate::cache) fn hits(&self) -> u64 {
        self.each()
            .flat_map(|block| &block.slots)
            .map(|slot| slot.hits.load(Ordering::Relaxed))
            .sum()
    }

    /// Assigns a block to a new owner, which is a thread or a lookup handle. The owner keeps the
    /// block until [`LeaseBlocks::release`]. Returns `None` if all blocks are in use or the system
    /// is out of memory. The caller must hold the cache's lock.
    pub(in crate::cache) fn take_first(&self) -> Option<&LeaseBlock> {
        let block = self.take()?;
        self.owners.fetch_add(1, Ordering::Relaxed);
        Some(block)
    }

    /// Takes a released block, or else the first block that never had an owner. Marks it as owned.
    fn take(&self) -> Option<&LeaseBlock> {
        let _one_at_a_time = self.assigning.lock();
        let created = self.created.load(Ordering::Relaxed);
        let free = self.each().find(|block| block.owned.load(Ordering::Acquire) == 0);
        let block = match free {
            Some(block) => block,
            None => {
                if created as usize == MAX_BLOCKS || !self.arena.ensure(created + 1) {
                    return None;
                }
                self.created.store(created + 1, Ordering::Release);
                self.arena.at(created + 1)
            }
        };
        block.owned.store(1, Ordering::Relaxed);
        Some(block)
    }

    /// Releases all blocks of a thread or lookup handle. `block` is its first block. Leases in the
    /// blocks stay valid.
    pub(in crate::cache) fn release(&self, block: &LeaseBlock) {
        block.current_block.store(0, Ordering::Relaxed);
        let mut next = block.next_block.swap(0, Ordering::Relaxed);
        block.owned.store(0, Ordering::Release);
        while next != 0 {
            let block = self.arena.at(next);
            next = block.next_block.swap(0, Ordering::Relaxed);
            block.owned.store(0, Ordering::Release);
        }
        self.owners.fetch_sub(1, Ordering::Release);
    }

    /// Returns the slot that the next lookup of a thread or handle tries first. `first` is the
    /// first block of the thread or handle.
    pub(in crate::cache) fn next_slot<'a>(&'a self, first: &'a LeaseBlock) -> &'a LeaseSlot {
        let block = match first.current_block.load(Ordering::Relaxed) {
            0 => first,
            index => self.arena.at(index),
        };
        block.next_slot()
    }

    /// Returns a free slot of a thread or lookup handle, whose first block is `first`. Searches the
    /// first block, then up to [`BLOCKS_TO_SEARCH`] blocks from `current_block` on. If all are
    /// full, assigns another block to the owner. Returns `None` if no other block can be assigned.
    #[inline]
    pub(in crate::cache) fn free_slot<'a>(
        &'a self,
        first: &'a LeaseBlock,
    ) -> Option<&'a LeaseSlot> {
        first.free_slot().or_else(|| self.free_slot_elsewhere(first))
    }

    #[cold]
    #[inline(never)]
    fn free_slot_elsewhere<'a>(&'a self, first: &'a LeaseBlock) -> Option<&'a LeaseSlot> {
        let mut index = first.current_block.load(Ordering::Relaxed);
        for _ in 0..BLOCKS_TO_SEARCH {
            let block = if index == 0 { first } else { self.arena.at(index) };
            if let Some(slot) = block.free_slot() {
                first.current_block.store(index, Ordering::Relaxed);
                return Some(slot);
            }
            index = block.next_block.load(Ordering::Relaxed);
        }
        let more = self.take()?;
        let index = self.arena.index_of(more);
        more.next_block.store(first.next_block.load(Ordering::Relaxed), Ordering::Relaxed);
        first.next_block.store(index, Ordering::Relaxed);
        first.current_block.store(index, Ordering::Relaxed);
        more.free_slot()
    }
}

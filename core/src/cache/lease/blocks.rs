//! Lease blocks: the slots in which a thread publishes its leases.
//!
//! Only the block's owner writes its cache lines during a lookup.

use super::super::{
    arena::{Arena, Zeroed},
    sync::{AtomicU32, AtomicU64, Mutex, Ordering},
};
use crate::Result;

/// The number of slots in a block. The slots and the block's header fill four pairs of cache lines.
#[cfg(not(loom))]
const SLOTS: usize = 31;
#[cfg(loom)]
const SLOTS: usize = 2;

/// The largest number of blocks of a cache. Each thread that looks up has one, and a thread with
/// many leases has more.
#[cfg(not(loom))]
const MAX_BLOCKS: usize = 1 << 16;
#[cfg(loom)]
const MAX_BLOCKS: usize = 4;

/// The number of slots that a scan tests at once for being free.
const AT_ONCE: usize = 10;

/// The number of a thread's blocks that a lookup searches for a free slot. If none is free, the
/// thread gets another block.
const NEAR: usize = 8;

/// The word in which a thread publishes a lease, and data that only the slot's owner uses.
#[repr(C)]
#[derive(Debug)]
pub(in crate::cache) struct LeaseSlot {
    /// The index of the leased entry, or 0. The block's owner sets it, and the thread that drops
    /// the lease clears it.
    pub(in crate::cache) entry: AtomicU32,
    /// The index of the entry that the last lookup with this slot found. The entry may have been
    /// reused since. Only for the owner.
    pub(in crate::cache) last: AtomicU32,
    /// The number of hits with this slot. Only for the owner.
    hits: AtomicU64,
}

impl LeaseSlot {
    /// Returns whether the slot is free for [`LeaseSlot::publish`]. Only for the owner.
    #[inline(always)]
    pub(in crate::cache) fn is_free(&self) -> bool {
        // Acquire here and Release in `publish`: a thread that sees the next lease also sees all
        // uses of the one before, which may have ended on another thread.
        self.entry.load(Ordering::Acquire) == 0
    }

    /// Publishes a lease. Only for the owner, of a free slot or of one with a lease that the owner
    /// has not handed out yet.
    #[inline(always)]
    pub(in crate::cache) fn publish(&self, entry: u32) {
        self.entry.store(entry, Ordering::Release);
    }

    /// Counts a hit. Only for the owner, the only thread that writes this line during a lookup.
    #[inline(always)]
    pub(in crate::cache) fn count_hit(&self) {
        self.hits.store(self.hits.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }
}

/// A thread's lease slots of one cache. `next`, `cursor` and `hint` are only for the owner.
#[repr(C, align(128))]
#[derive(Debug)]
pub(in crate::cache) struct LeaseBlock {
    owned: AtomicU32,
    /// The index of the owner's next block, which was added when this block was full.
    next: AtomicU32,
    /// The index of the owner's block that last had a free slot, or 0 for the first block. Used
    /// only in the owner's first block.
    cursor: AtomicU32,
    /// The position of a slot that is probably free.
    hint: AtomicU32,
    slots: [LeaseSlot; SLOTS],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<LeaseBlock>() == 512);

// SAFETY: atomics of zero bytes are 0 and need no drop.
unsafe impl Zeroed for LeaseBlock {
    #[cfg(loom)]
    fn zeroed() -> Self {
        Self {
            owned: AtomicU32::new(0),
            next: AtomicU32::new(0),
            cursor: AtomicU32::new(0),
            hint: AtomicU32::new(0),
            slots: std::array::from_fn(|_| LeaseSlot {
                entry: AtomicU32::new(0),
                last: AtomicU32::new(0),
                hits: AtomicU64::new(0),
            }),
        }
    }
}

impl LeaseBlock {
    /// Returns the slot that is probably free. Only for the owner.
    #[inline(always)]
    pub(in crate::cache) fn hinted_slot(&self) -> &LeaseSlot {
        let hint = self.hint.load(Ordering::Relaxed) as usize;
        // SAFETY: the hint is 0 or an index below SLOTS that `free_slot` stored.
        unsafe { self.slots.get_unchecked(hint) }
    }

    /// Returns a free slot of the block. Only the thread that owns the block calls this.
    #[inline]
    fn free_slot(&self) -> Option<&LeaseSlot> {
        let hint = self.hint.load(Ordering::Relaxed) as usize;
        let free = (hint..SLOTS).chain(0..hint).find(|slot| self.slots[*slot].is_free())?;
        // The caller is about to use this slot, so the next lookup begins behind it.
        let next = if free + 1 == SLOTS { 0 } else { free + 1 };
        self.hint.store(next as u32, Ordering::Relaxed);
        Some(&self.slots[free])
    }
}

/// All lease blocks of a cache.
#[derive(Debug)]
pub(in crate::cache) struct LeaseBlocks {
    arena: Arena<LeaseBlock>,
    /// The number of blocks that were ever made. New threads reuse the blocks of threads that
    /// ended.
    made: AtomicU32,
    /// The number of threads and lookup handles that own a first block, and so may look up.
    owners: AtomicU32,
    allocating: Mutex<()>,
}

impl LeaseBlocks {
    pub(in crate::cache) fn new() -> Result<Self> {
        Ok(Self {
            arena: Arena::reserve(MAX_BLOCKS)?,
            made: AtomicU32::new(0),
            owners: AtomicU32::new(0),
            allocating: Mutex::new(()),
        })
    }

    /// Returns the number of threads and handles that may look up. The caller holds the cache's
    /// lock, so that no owner is added. A scan after this call sees everything that former owners
    /// did.
    pub(in crate::cache) fn owners(&self) -> u32 {
        self.owners.load(Ordering::Acquire)
    }

    fn each(&self) -> impl Iterator<Item = &LeaseBlock> {
        (1..=self.made.load(Ordering::Acquire)).map(|index| self.arena.at(index))
    }

    /// Calls `visit` with the entry of each lease.
    pub(in crate::cache) fn for_each_lease(&self, mut visit: impl FnMut(u32)) {
        // Acquire: all uses of leases that have ended happened before.
        let entry = |slot: &LeaseSlot| slot.entry.load(Ordering::Acquire);
        let mut visit_each = |slots: &[LeaseSlot]| {
            slots.iter().map(entry).filter(|entry| *entry != 0).for_each(&mut visit);
        };
        for block in self.each() {
            // Most slots are free, which one test shows for several slots. A lease that is
            // published after the test is one that this call need not see.
            let (groups, rest) = block.slots.as_chunks::<AT_ONCE>();
            for slots in groups {
                if slots.iter().fold(0, |any, slot| any | entry(slot)) != 0 {
                    visit_each(slots);
                }
            }
            visit_each(rest);
        }
    }

    /// Returns the number of hits of all threads so far.
    pub(in crate::cache) fn hits(&self) -> u64 {
        self.each()
            .flat_map(|block| &block.slots)
            .map(|slot| slot.hits.load(Ordering::Relaxed))
            .sum()
    }

    /// Assigns a first block to a new owner, until [`LeaseBlocks::release`]. Returns `None` if the
    /// cache can have no more blocks. The caller holds the cache's lock.
    pub(in crate::cache) fn take_first(&self) -> Option<&LeaseBlock> {
        let block = self.take()?;
        self.owners.fetch_add(1, Ordering::Relaxed);
        Some(block)
    }

    fn take(&self) -> Option<&LeaseBlock> {
        let _one_at_a_time = self.allocating.lock();
        let made = self.made.load(Ordering::Relaxed);
        let free = self.each().find(|block| block.owned.load(Ordering::Acquire) == 0);
        let block = match free {
            Some(block) => block,
            None => {
                if made as usize == MAX_BLOCKS || !self.arena.ensure(made + 1) {
                    return None;
                }
                self.made.store(made + 1, Ordering::Release);
                self.arena.at(made + 1)
            }
        };
        block.owned.store(1, Ordering::Relaxed);
        Some(block)
    }

    /// Ends the ownership of a first block and of the blocks added to it. Their leases continue.
    pub(in crate::cache) fn release(&self, block: &LeaseBlock) {
        block.cursor.store(0, Ordering::Relaxed);
        let mut next = block.next.swap(0, Ordering::Relaxed);
        block.owned.store(0, Ordering::Release);
        while next != 0 {
            let block = self.arena.at(next);
            next = block.next.swap(0, Ordering::Relaxed);
            block.owned.store(0, Ordering::Release);
        }
        self.owners.fetch_sub(1, Ordering::Release);
    }

    /// Returns the slot that the owner's next lookup should try: it is probably free.
    pub(in crate::cache) fn hinted_slot<'a>(&'a self, first: &'a LeaseBlock) -> &'a LeaseSlot {
        let block = match first.cursor.load(Ordering::Relaxed) {
            0 => first,
            index => self.arena.at(index),
        };
        block.hinted_slot()
    }

    /// Returns a free slot of the owner, in another block if the first is full. Returns `None` if
    /// the cache can have no more blocks.
    ///
    /// Searches a few blocks, beginning with the one that last had a free slot. If all are full,
    /// adds another block.
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
        let mut index = first.cursor.load(Ordering::Relaxed);
        for _ in 0..NEAR {
            let block = if index == 0 { first } else { self.arena.at(index) };
            if let Some(slot) = block.free_slot() {
                first.cursor.store(index, Ordering::Relaxed);
                return Some(slot);
            }
            index = block.next.load(Ordering::Relaxed);
        }
        let more = self.take()?;
        let index = self.arena.index_of(more);
        more.next.store(first.next.load(Ordering::Relaxed), Ordering::Relaxed);
        first.next.store(index, Ordering::Relaxed);
        first.cursor.store(index, Ordering::Relaxed);
        more.free_slot()
    }
}

//! Lease blocks: where a thread says which entries it uses, on cache lines that only it writes while it looks up.

use super::{
    arena::{Arena, Zeroed},
    sync::{AtomicU32, AtomicU64, Mutex, Ordering},
};
use crate::Result;

/// With what stands before them they fill four pairs of cache lines.
#[cfg(not(loom))]
const SLOTS: usize = 31;
#[cfg(loom)]
const SLOTS: usize = 2;

/// Blocks that a cache can have: one for each thread that looks up at a time, more for those with many leases.
#[cfg(not(loom))]
const MAX_BLOCKS: usize = 1 << 16;
#[cfg(loom)]
const MAX_BLOCKS: usize = 4;

/// Full blocks that are looked at before another is taken.
const NEAR: usize = 8;

/// A place for one lease.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Slot {
    /// The index of an entry, or 0. Set by the block's owner and cleared by whoever drops the lease.
    pub(super) entry: AtomicU32,
    /// Leases of this slot that were hits. The owner's.
    hits: AtomicU64,
}

impl Slot {
    /// Counts a hit. Only for the owner: nobody else writes the line while the owner looks up.
    #[inline(always)]
    pub(super) fn count_hit(&self) {
        self.hits.store(self.hits.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }
}

/// A thread's leases of one cache. `next`, `cursor` and `hint` are the owner's.
#[repr(C, align(128))]
#[derive(Debug)]
pub(super) struct Block {
    owned: AtomicU32,
    /// The owner's next block, once this one was full.
    next: AtomicU32,
    /// In the owner's first block: the block in which a slot was found last, 0 for the first.
    cursor: AtomicU32,
    hint: AtomicU32,
    slots: [Slot; SLOTS],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Block>() == 512);

// SAFETY: atomics of zero bytes are 0 and need no drop.
unsafe impl Zeroed for Block {
    #[cfg(loom)]
    fn zeroed() -> Self {
        Self {
            owned: AtomicU32::new(0),
            next: AtomicU32::new(0),
            cursor: AtomicU32::new(0),
            hint: AtomicU32::new(0),
            slots: std::array::from_fn(|_| Slot { entry: AtomicU32::new(0), hits: AtomicU64::new(0) }),
        }
    }
}

impl Block {
    /// The slot that is likely free. Only for the owner.
    #[inline(always)]
    pub(super) fn first_slot(&self) -> &Slot {
        let hint = self.hint.load(Ordering::Relaxed) as usize;
        // SAFETY: the hint is 0 or what `free_slot` found, both places of slots.
        unsafe { self.slots.get_unchecked(hint) }
    }

    /// A free slot of the block. Only for the owner.
    fn free_slot(&self) -> Option<&Slot> {
        let hint = self.hint.load(Ordering::Relaxed) as usize;
        let is_free = |slot: &usize| self.slots[slot % SLOTS].entry.load(Ordering::Relaxed) == 0;
        let free = (hint..hint + SLOTS).find(is_free)?;
        // The next lookup begins behind this slot, which is about to be taken.
        self.hint.store(((free + 1) % SLOTS) as u32, Ordering::Relaxed);
        Some(&self.slots[free % SLOTS])
    }
}

/// All blocks of a cache.
#[derive(Debug)]
pub(super) struct Blocks {
    arena: Arena<Block>,
    /// How many there are; they never become fewer. Blocks of threads that ended are taken over.
    made: AtomicU32,
    giving_out: Mutex<()>,
}

impl Blocks {
    pub(super) fn new() -> Result<Self> {
        Ok(Self { arena: Arena::reserve(MAX_BLOCKS)?, made: AtomicU32::new(0), giving_out: Mutex::new(()) })
    }

    fn each(&self) -> impl Iterator<Item = &Block> {
        (1..=self.made.load(Ordering::Acquire)).map(|index| self.arena.at(index))
    }

    /// Calls `visit` with each entry that a slot holds.
    pub(super) fn leased(&self, mut visit: impl FnMut(u32)) {
        for block in self.each() {
            for slot in &block.slots {
                let entry = slot.entry.load(Ordering::Acquire);
                if entry != 0 {
                    visit(entry);
                }
            }
        }
    }

    /// Hits of all threads, ever.
    pub(super) fn hits(&self) -> u64 {
        self.each().flat_map(|block| &block.slots).map(|slot| slot.hits.load(Ordering::Relaxed)).sum()
    }

    /// A block that is the caller's alone until it gives it back; `None` if there can be no more.
    pub(super) fn take(&self) -> Option<&Block> {
        let _one_at_a_time = self.giving_out.lock();
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

    /// Ends the ownership of a block and those added to it. Leases in them go on.
    pub(super) fn give_back(&self, block: &Block) {
        block.cursor.store(0, Ordering::Relaxed);
        let mut next = block.next.swap(0, Ordering::Relaxed);
        block.owned.store(0, Ordering::Release);
        while next != 0 {
            let block = self.arena.at(next);
            next = block.next.swap(0, Ordering::Relaxed);
            block.owned.store(0, Ordering::Release);
        }
    }

    /// The slot that the owner's next lookup should try: likely free.
    pub(super) fn likely<'a>(&'a self, first: &'a Block) -> &'a Slot {
        let block = match first.cursor.load(Ordering::Relaxed) {
            0 => first,
            index => self.arena.at(index),
        };
        block.first_slot()
    }

    /// A free slot of the owner's, in another block if it must be; `None` if there can be no more blocks.
    ///
    /// It looks where it found one last, and a few blocks on, before it takes another block.
    pub(super) fn slot<'a>(&'a self, first: &'a Block) -> Option<&'a Slot> {
        if let Some(slot) = first.free_slot() {
            return Some(slot);
        }
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

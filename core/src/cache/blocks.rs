//! Lease blocks: where a thread says which entries it uses, on cache lines that only it writes
//! while it looks up.

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

/// Blocks that a cache can have: one for each thread that looks up at a time, more for those with
/// many leases.
#[cfg(not(loom))]
const MAX_BLOCKS: usize = 1 << 16;
#[cfg(loom)]
const MAX_BLOCKS: usize = 4;

/// Slots that are read together.
const AT_ONCE: usize = 10;

/// Full blocks that are looked at before another is taken.
const NEAR: usize = 8;

/// A place for one lease.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Slot {
    /// The index of an entry, or 0. Set by the block's owner and cleared by whoever drops the
    /// lease.
    pub(super) entry: AtomicU32,
    /// The entry that the last lookup with this slot found, which may be another's by now. The
    /// owner's.
    pub(super) last: AtomicU32,
    /// Leases of this slot that were hits. The owner's.
    hits: AtomicU64,
}

impl Slot {
    /// Whether it can be [leased](Slot::lease) in. Only for the owner.
    #[inline(always)]
    pub(super) fn is_free(&self) -> bool {
        // Acquire, and Release when it is taken: whoever sees the next lease sees what was done
        // with the one before, which may have ended on another thread.
        self.entry.load(Ordering::Acquire) == 0
    }

    /// Publishes a lease. Only for the owner, of a free slot or one that a lease of its own, not
    /// given out yet, is in.
    #[inline(always)]
    pub(super) fn lease(&self, entry: u32) {
        self.entry.store(entry, Ordering::Release);
    }

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
            slots: std::array::from_fn(|_| Slot {
                entry: AtomicU32::new(0),
                last: AtomicU32::new(0),
                hits: AtomicU64::new(0),
            }),
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
    #[inline]
    fn free_slot(&self) -> Option<&Slot> {
        let hint = self.hint.load(Ordering::Relaxed) as usize;
        let free = (hint..SLOTS).chain(0..hint).find(|slot| self.slots[*slot].is_free())?;
        // The next lookup begins behind this slot, which is about to be taken.
        let next = if free + 1 == SLOTS { 0 } else { free + 1 };
        self.hint.store(next as u32, Ordering::Relaxed);
        Some(&self.slots[free])
    }
}

/// All blocks of a cache.
#[derive(Debug)]
pub(super) struct Blocks {
    arena: Arena<Block>,
    /// How many there are; they never become fewer. Blocks of threads that ended are taken over.
    made: AtomicU32,
    /// Who may look up: threads and bursts with a block.
    lookers: AtomicU32,
    giving_out: Mutex<()>,
}

impl Blocks {
    pub(super) fn new() -> Result<Self> {
        Ok(Self {
            arena: Arena::reserve(MAX_BLOCKS)?,
            made: AtomicU32::new(0),
            lookers: AtomicU32::new(0),
            giving_out: Mutex::new(()),
        })
    }

    /// How many may look up. Under the cache's lock, where none is added; of those that left,
    /// whoever reads the slots after this sees what they did with theirs.
    pub(super) fn lookers(&self) -> u32 {
        self.lookers.load(Ordering::Acquire)
    }

    fn each(&self) -> impl Iterator<Item = &Block> {
        (1..=self.made.load(Ordering::Acquire)).map(|index| self.arena.at(index))
    }

    /// Calls `visit` with each entry that a slot holds.
    pub(super) fn leased(&self, mut visit: impl FnMut(u32)) {
        // Acquire: what was done with leases that are there no more came before.
        let entry = |slot: &Slot| slot.entry.load(Ordering::Acquire);
        let mut visit_each = |slots: &[Slot]| {
            slots.iter().map(entry).filter(|entry| *entry != 0).for_each(&mut visit);
        };
        for block in self.each() {
            // Most are free, which is seen for several at once. One that is taken meanwhile is what
            // this cannot see anyhow.
            let (groups, rest) = block.slots.as_chunks::<AT_ONCE>();
            for slots in groups {
                if slots.iter().fold(0, |any, slot| any | entry(slot)) != 0 {
                    visit_each(slots);
                }
            }
            visit_each(rest);
        }
    }

    /// Hits of all threads, ever.
    pub(super) fn hits(&self) -> u64 {
        self.each()
            .flat_map(|block| &block.slots)
            .map(|slot| slot.hits.load(Ordering::Relaxed))
            .sum()
    }

    /// The first block of one more who looks up: the caller's alone until it [gives it
    /// back](Blocks::give_back). `None` if there can be no more. Only under the cache's lock.
    pub(super) fn take_first(&self) -> Option<&Block> {
        let block = self.take()?;
        self.lookers.fetch_add(1, Ordering::Relaxed);
        Some(block)
    }

    fn take(&self) -> Option<&Block> {
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

    /// Ends the ownership of a first block and of those added to it. Leases in them go on.
    pub(super) fn give_back(&self, block: &Block) {
        block.cursor.store(0, Ordering::Relaxed);
        let mut next = block.next.swap(0, Ordering::Relaxed);
        block.owned.store(0, Ordering::Release);
        while next != 0 {
            let block = self.arena.at(next);
            next = block.next.swap(0, Ordering::Relaxed);
            block.owned.store(0, Ordering::Release);
        }
        self.lookers.fetch_sub(1, Ordering::Release);
    }

    /// The slot that the owner's next lookup should try: likely free.
    pub(super) fn likely<'a>(&'a self, first: &'a Block) -> &'a Slot {
        let block = match first.cursor.load(Ordering::Relaxed) {
            0 => first,
            index => self.arena.at(index),
        };
        block.first_slot()
    }

    /// A free slot of the owner's, in another block if it must be; `None` if there can be no more
    /// blocks.
    ///
    /// It looks where it found one last, and a few blocks on, before it takes another block.
    #[inline]
    pub(super) fn slot<'a>(&'a self, first: &'a Block) -> Option<&'a Slot> {
        first.free_slot().or_else(|| self.slot_elsewhere(first))
    }

    #[cold]
    #[inline(never)]
    fn slot_elsewhere<'a>(&'a self, first: &'a Block) -> Option<&'a Slot> {
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

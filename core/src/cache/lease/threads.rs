//! The calling thread's lease block, for lookups without a handle.
//!
//! Models take their blocks explicitly, because loom's threads share one thread's thread-locals.

use std::{
    cell::{Cell, RefCell},
    ptr::NonNull,
    sync::{Arc, Weak},
};

use super::{
    super::gate::fast_open,
    Leases, WAYS,
    blocks::{LeaseBlock, LeaseBlocks, LeaseSlot},
};

/// A word that matches no cache, because no gate ever has this value.
const NO_CACHE: u64 = u64::MAX;

/// The blocks that a thread recorded, one for each of [`WAYS`] caches, and the slot to try first in
/// each. `words` identifies each cache by the value that the word of its gate has while the gate is
/// open.
struct Ways {
    words: [Cell<u64>; WAYS],
    slots: [Cell<NonNull<LeaseSlot>>; WAYS],
    blocks: [Cell<NonNull<LeaseBlock>>; WAYS],
}

thread_local! {
    /// The calling thread's [`Ways`]. The type has no destructor, so that an access has no extra
    /// cost. The destructor of [`OWNED`] resets the value when the thread ends.
    static WAYS_OF_THREAD: Ways = const {
        Ways {
            words: [const { Cell::new(NO_CACHE) }; WAYS],
            slots: [const { Cell::new(NonNull::dangling()) }; WAYS],
            blocks: [const { Cell::new(NonNull::dangling()) }; WAYS],
        }
    };

    static OWNED: RefCell<Owned> = const { RefCell::new(Owned(Vec::new())) };
}

/// The blocks of a thread, with their caches' numbers. The thread's end releases them.
struct Owned(Vec<(u64, Weak<LeaseBlocks>, NonNull<LeaseBlock>)>);

impl Drop for Owned {
    fn drop(&mut self) {
        WAYS_OF_THREAD.with(|ways| ways.words.iter().for_each(|word| word.set(NO_CACHE)));
        for (_, blocks, block) in self.0.drain(..) {
            if let Some(blocks) = blocks.upgrade() {
                // SAFETY: the block lies in the arena of `blocks`, which the upgrade keeps alive.
                blocks.release(unsafe { block.as_ref() });
            }
        }
    }
}

/// Returns the slot that the calling thread's next fast lookup tries first. It is in a block of
/// that thread. Returns `None` if the thread recorded no block of this cache, and if fast lookups
/// are disabled (the cache's gate is closed, or each lookup needs a fence).
#[inline(always)]
pub(in crate::cache) fn noted_slot(leases: &Leases) -> Option<&LeaseSlot> {
    WAYS_OF_THREAD.with(|ways| {
        debug_assert!(leases.way < WAYS);
        // Both are read before the gate's word, so that their address is computed once.
        // SAFETY: `Leases::new` computed `way` modulo WAYS.
        let (word, slot) = unsafe {
            (ways.words.get_unchecked(leases.way).get(), ways.slots.get_unchecked(leases.way).get())
        };
        if word != leases.gate.load() {
            return None;
        }
        // SAFETY: the word has this cache's number, which no other cache has, so the slot lies in
        // one of its blocks, whose memory the caller's reference keeps. The calling thread owns the
        // block until its end, which resets the word.
        Some(unsafe { slot.as_ref() })
    })
}

/// Records the slot that the calling thread's next lookup tries first: the slot of its own `block`
/// that is probably free.
pub(in crate::cache) fn note_slot(leases: &Leases, block: &LeaseBlock) {
    WAYS_OF_THREAD.with(|ways| {
        if ways.words[leases.way].get() == fast_open(leases.number) {
            ways.slots[leases.way].set(NonNull::from(leases.blocks.hinted_slot(block)));
        }
    });
}

/// Returns the calling thread's block of a cache. If the thread has none, calls `take` for a new
/// one.
///
/// Returns `None` for a thread that is ending, in a forked child, or if the cache can have no more
/// blocks.
pub(in crate::cache) fn own_block<'c>(
    leases: &'c Leases,
    take: impl FnOnce() -> Option<&'c LeaseBlock>,
) -> Option<&'c LeaseBlock> {
    if leases.gate.is_forked() {
        // A thread of the parent may have held the lock that a new block takes.
        return None;
    }
    let noted = WAYS_OF_THREAD.with(|ways| {
        let own = ways.words[leases.way].get() == fast_open(leases.number);
        // SAFETY: the word has this cache's number, so the block is one of its blocks, whose memory
        // the caller's reference keeps.
        own.then(|| unsafe { ways.blocks[leases.way].get().as_ref() })
    });
    noted.or_else(|| find_or_take(leases, take))
}

fn find_or_take<'c>(
    leases: &'c Leases,
    take: impl FnOnce() -> Option<&'c LeaseBlock>,
) -> Option<&'c LeaseBlock> {
    let block = OWNED
        .try_with(|owned| {
            let mut owned = owned.borrow_mut();
            let known = owned.0.iter().find(|(number, ..)| *number == leases.number);
            if let Some((.., block)) = known {
                return Some(*block);
            }
            owned.0.retain(|(_, blocks, _)| blocks.strong_count() > 0);
            let block = NonNull::from(take()?);
            owned.0.push((leases.number, Arc::downgrade(&leases.blocks), block));
            Some(block)
        })
        .ok()??;
    // SAFETY: the block belongs to the cache with this number, whose memory the caller's reference
    // keeps.
    let found = unsafe { block.as_ref() };
    WAYS_OF_THREAD.with(|ways| {
        ways.words[leases.way].set(fast_open(leases.number));
        ways.slots[leases.way].set(NonNull::from(leases.blocks.hinted_slot(found)));
        ways.blocks[leases.way].set(block);
    });
    Some(found)
}

//! The lease blocks of the calling thread, for lookups without a lookup handle.
//!
//! Loom's models do not use this module, because all threads of a model share one thread's
//! thread-locals. They pass the lease block to each lookup instead.

#![allow(unsafe_code, reason = "references to the lease blocks of the calling thread")]

use std::{
    cell::{Cell, RefCell},
    ptr::NonNull,
    sync::{Arc, Weak},
};

use super::{
    super::gate::fast_open,
    Leases, RECORDED_CACHES,
    blocks::{LeaseBlock, LeaseBlocks, LeaseSlot},
};

/// Marks an element of `RecordedBlocks::words` as unused. No gate's word ever has this value.
const NO_CACHE: u64 = u64::MAX;

/// A thread's lease blocks of up to [`RECORDED_CACHES`] caches. Elements at one position of the
/// arrays belong to one cache.
struct RecordedBlocks {
    /// For each cache, the value that the gate's word has while fast lookups are enabled
    /// ([`fast_open`]). [`NO_CACHE`] marks an unused position of the three arrays.
    words: [Cell<u64>; RECORDED_CACHES],
    /// For each cache, the lease slot that the thread's next lookup tries first. At an unused
    /// position, the pointer dangles and must not be used.
    slots: [Cell<NonNull<LeaseSlot>>; RECORDED_CACHES],
    /// For each cache, the first lease block that the thread owns. At an unused position, the
    /// pointer dangles and must not be used.
    blocks: [Cell<NonNull<LeaseBlock>>; RECORDED_CACHES],
}

thread_local! {
    /// The calling thread's [`RecordedBlocks`]. The type has no destructor, so that an access has
    /// no extra cost. The destructor of [`OWNED_BLOCKS`] resets the value when the thread ends.
    static RECORDED_BLOCKS: RecordedBlocks = const {
        RecordedBlocks {
            words: [const { Cell::new(NO_CACHE) }; RECORDED_CACHES],
            slots: [const { Cell::new(NonNull::dangling()) }; RECORDED_CACHES],
            blocks: [const { Cell::new(NonNull::dangling()) }; RECORDED_CACHES],
        }
    };

    static OWNED_BLOCKS: RefCell<OwnedBlocks> = const { RefCell::new(OwnedBlocks(Vec::new())) };
}

/// The first lease block that a thread owns in each cache, with the cache's number. The end of the
/// thread drops the value, which releases all blocks of the thread.
struct OwnedBlocks(Vec<(u64, Weak<LeaseBlocks>, NonNull<LeaseBlock>)>);

impl Drop for OwnedBlocks {
    fn drop(&mut self) {
        RECORDED_BLOCKS.with(|recorded| recorded.words.iter().for_each(|word| word.set(NO_CACHE)));
        for (_, blocks, block) in self.0.drain(..) {
            if let Some(blocks) = blocks.upgrade() {
                // SAFETY: the block lies in the arena of `blocks`, which the upgrade keeps alive.
                blocks.release(unsafe { block.as_ref() });
            }
        }
    }
}

/// Returns the lease slot that the calling thread's next fast lookup tries first. Returns `None` in
/// these cases:
///
/// - The thread has recorded no block of this cache, or has recorded a block of another cache in
///   its place.
/// - Fast lookups are disabled: the gate is closed, each lookup needs a fence, or the process is a
///   forked child.
#[inline(always)]
pub(in crate::cache) fn next_slot(leases: &Leases) -> Option<&LeaseSlot> {
    RECORDED_BLOCKS.with(|recorded| {
        debug_assert!(leases.position < RECORDED_CACHES);
        // The word and the slot are read before the gate's word, so that their address is computed
        // once. SAFETY: `Leases::new` computed `position` modulo RECORDED_CACHES.
        let (word, slot) = unsafe {
            (
                recorded.words.get_unchecked(leases.position).get(),
                recorded.slots.get_unchecked(leases.position).get(),
            )
        };
        if word != leases.gate.load() {
            return None;
        }
        // SAFETY: the word has this cache's number, which no other cache has, so the slot lies in
        // one of its blocks, whose memory the caller's reference keeps alive. The calling thread
        // owns the block until its end, which resets the word.
        Some(unsafe { slot.as_ref() })
    })
}

/// Records the slot that the calling thread's next lookup tries first. `block` is the thread's
/// first lease block. Does nothing if the thread has not recorded its block of this cache.
pub(in crate::cache) fn record_next_slot(leases: &Leases, block: &LeaseBlock) {
    RECORDED_BLOCKS.with(|recorded| {
        if recorded.words[leases.position].get() == fast_open(leases.number) {
            recorded.slots[leases.position].set(NonNull::from(leases.blocks.next_slot(block)));
        }
    });
}

/// Returns the calling thread's lease block of a cache. If the thread has none, calls `take` for a
/// new one.
///
/// Returns `None` if the thread is exiting, if the process is a forked child, or if `take` returns
/// `None`.
pub(in crate::cache) fn own_block<'c>(
    leases: &'c Leases,
    take: impl FnOnce() -> Option<&'c LeaseBlock>,
) -> Option<&'c LeaseBlock> {
    if leases.gate.is_forked() {
        // In a forked child no new block is taken: a thread of the parent may have held the lock.
        return None;
    }
    let recorded = RECORDED_BLOCKS.with(|recorded| {
        let own = recorded.words[leases.position].get() == fast_open(leases.number);
        // SAFETY: the word has this cache's number, so the block is one of its blocks, whose memory
        // the caller's reference keeps alive.
        own.then(|| unsafe { recorded.blocks[leases.position].get().as_ref() })
    });
    recorded.or_else(|| find_or_take(leases, take))
}

/// Finds the calling thread's lease block of a cache in [`OWNED_BLOCKS`], or takes a new one, and
/// records the block.
fn find_or_take<'c>(
    leases: &'c Leases,
    take: impl FnOnce() -> Option<&'c LeaseBlock>,
) -> Option<&'c LeaseBlock> {
    let block = OWNED_BLOCKS
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
    // keeps alive.
    let found = unsafe { block.as_ref() };
    RECORDED_BLOCKS.with(|recorded| {
        recorded.words[leases.position].set(fast_open(leases.number));
        recorded.slots[leases.position].set(NonNull::from(leases.blocks.next_slot(found)));
        recorded.blocks[leases.position].set(block);
    });
    Some(found)
}

//! Which lease block a thread uses where nobody says. (Loom's threads share what the operating
//! system's thread has: models say it.)

use std::{
    cell::{Cell, RefCell},
    ptr::NonNull,
    sync::{Arc, Weak},
};

use super::{
    Source,
    blocks::{Block, Blocks, Slot},
    gate::plainly_open,
    shared::{Shared, WAYS},
};

/// No gate's word.
const NOBODY: u64 = u64::MAX;

/// A thread's blocks, and the slots to try: of the cache whose open gate's word is in the same
/// place.
struct Ways {
    words: [Cell<u64>; WAYS],
    slots: [Cell<NonNull<Slot>>; WAYS],
    blocks: [Cell<NonNull<Block>>; WAYS],
}

thread_local! {
    /// Without a destructor, so that looking here costs nothing; [`OWNED`] empties it at the thread's end.
    static WAYS_OF_THREAD: Ways = const {
        Ways {
            words: [const { Cell::new(NOBODY) }; WAYS],
            slots: [const { Cell::new(NonNull::dangling()) }; WAYS],
            blocks: [const { Cell::new(NonNull::dangling()) }; WAYS],
        }
    };

    static OWNED: RefCell<Owned> = const { RefCell::new(Owned(Vec::new())) };
}

/// The blocks of a thread; its end gives them back.
struct Owned(Vec<(u64, Weak<Blocks>, NonNull<Block>)>);

impl Drop for Owned {
    fn drop(&mut self) {
        WAYS_OF_THREAD.with(|ways| ways.words.iter().for_each(|word| word.set(NOBODY)));
        for (_, blocks, block) in self.0.drain(..) {
            if let Some(blocks) = blocks.upgrade() {
                // SAFETY: the block lies in the memory of `blocks`, which is there.
                blocks.give_back(unsafe { block.as_ref() });
            }
        }
    }
}

/// The slot that the calling thread tries first, if it noted one and the gate is plainly open. The
/// thread owns its block.
#[inline(always)]
pub(super) fn noted<S: Source>(shared: &Shared<S>) -> Option<&Slot> {
    WAYS_OF_THREAD.with(|ways| {
        debug_assert!(shared.way < WAYS);
        // Both are read before the gate's word, so that their place is found once.
        // SAFETY: a cache's way is its number modulo WAYS.
        let (word, slot) = unsafe {
            (ways.words.get_unchecked(shared.way).get(), ways.slots.get_unchecked(shared.way).get())
        };
        if word != shared.gate.read() {
            return None;
        }
        // SAFETY: the word has the cache's number, which no other had, so the slot lies in one of
        // its blocks, whose memory the caller's reference keeps; this thread owns it until
        // its end, which resets the word.
        Some(unsafe { slot.as_ref() })
    })
}

/// Has the calling thread's next lookup try the slot that `block`, its own, has likely free.
pub(super) fn note<S: Source>(shared: &Shared<S>, block: &Block) {
    WAYS_OF_THREAD.with(|ways| {
        if ways.words[shared.way].get() == plainly_open(shared.number) {
            ways.slots[shared.way].set(NonNull::from(shared.blocks.likely(block)));
        }
    });
}

/// The calling thread's block of a cache; `None` for a thread that is ending, in a forked child, or
/// if there can be no more.
pub(super) fn block<S: Source>(shared: &Shared<S>) -> Option<&Block> {
    if shared.gate.is_forked() {
        // A thread of the parent may have held the lock that a new block takes.
        return None;
    }
    let noted = WAYS_OF_THREAD.with(|ways| {
        let ours = ways.words[shared.way].get() == plainly_open(shared.number);
        // SAFETY: as in `noted`.
        ours.then(|| unsafe { ways.blocks[shared.way].get().as_ref() })
    });
    noted.or_else(|| find_or_take(shared))
}

fn find_or_take<S: Source>(shared: &Shared<S>) -> Option<&Block> {
    let block = OWNED
        .try_with(|owned| {
            let mut owned = owned.borrow_mut();
            if let Some((.., block)) = owned.0.iter().find(|(number, ..)| *number == shared.number)
            {
                return Some(*block);
            }
            owned.0.retain(|(_, blocks, _)| blocks.strong_count() > 0);
            let block = NonNull::from(shared.take_block()?);
            owned.0.push((shared.number, Arc::downgrade(&shared.blocks), block));
            Some(block)
        })
        .ok()??;
    WAYS_OF_THREAD.with(|ways| {
        ways.words[shared.way].set(plainly_open(shared.number));
        // SAFETY: as in `noted`.
        ways.slots[shared.way].set(NonNull::from(shared.blocks.likely(unsafe { block.as_ref() })));
        ways.blocks[shared.way].set(block);
    });
    // SAFETY: as in `noted`.
    Some(unsafe { block.as_ref() })
}

//! Which indices are to be had, and in which shard.

use std::sync::atomic::Ordering;

use hmem_core::{Error, ErrorKind, Result};
use parking_lot::MutexGuard;

use super::{
    super::keys::Token,
    Table,
    entry::{
        CHUNK, CHUNKS, Entry, GENERATION_SHIFT, NO_INDEX, SHARD_BITS, SHARDS, ShardState, Slots,
    },
};

impl Table {
    /// Takes a free index, or the next one that was never used.
    #[inline]
    pub(super) fn take_index(&self, at: usize, slots: &mut Slots) -> Option<(u32, &Entry)> {
        // A free entry is preferred to a fresh one unless it has to rest.
        if slots.free <= self.resting && (slots.fresh as usize) < CHUNKS * CHUNK {
            return Some(self.fresh_index(at, slots));
        }
        let index = slots.first_free;
        if index == NO_INDEX {
            return None;
        }
        let entry = self.known(index);
        slots.first_free = entry.link.load(Ordering::Relaxed);
        slots.free -= 1;
        Some((index, entry))
    }

    #[cold]
    fn fresh_index(&self, at: usize, slots: &mut Slots) -> (u32, &Entry) {
        let within = slots.fresh;
        self.shards[at].make_entry(within as usize);
        slots.fresh += 1;
        let index = within << SHARD_BITS | at as u32;
        (index, self.known(index))
    }

    /// Gives an index back with the generation after that of its last life; one that has no more is
    /// retired.
    #[inline]
    pub(super) fn give_index(&self, last: Token, entry: &Entry, slots: &mut Slots) {
        let Token { index, generation } = last;
        let Some(next) = generation.checked_add(1) else { return };
        entry.life.store(u64::from(next) << GENERATION_SHIFT, Ordering::Relaxed);
        if self.resting > 0 && slots.first_free != NO_INDEX {
            entry.link.store(NO_INDEX, Ordering::Relaxed);
            self.known(slots.last_free).link.store(index, Ordering::Relaxed);
        } else {
            entry.link.store(slots.first_free, Ordering::Relaxed);
            slots.first_free = index;
        }
        slots.last_free = index;
        slots.free += 1;
    }

    /// A shard with room, beginning at the calling thread's own.
    #[inline]
    pub(super) fn shard_with_room(&self) -> Option<(MutexGuard<'_, ShardState>, u32, &Entry)> {
        let home = home_shard();
        (0..SHARDS).map(|step| (home + step) % SHARDS).find_map(|at| {
            let mut state = self.shards[at].state.lock();
            let (index, entry) = self.take_index(at, &mut state.slots)?;
            Some((state, index, entry))
        })
    }

    /// Reserves an index for something that is no region, such as a window.
    pub(in super::super) fn reserve(&self) -> Result<u32> {
        self.shard_with_room().map(|(_, index, _)| index).ok_or_else(full)
    }

    /// Gives a reserved index back.
    pub(in super::super) fn unreserve(&self, index: u32) {
        let mut state = self.shard(index).state.lock();
        let entry = self.known(index);
        self.give_index(Token { index, generation: entry.generation() }, entry, &mut state.slots);
    }
}

/// A shard of the calling thread's own, so that threads rarely meet at a lock: by the address of a
/// thread-local, which no other living thread shares.
#[inline]
fn home_shard() -> usize {
    thread_local!(static HERE: u8 = const { 0 });
    HERE.with(|here| {
        let address = std::ptr::from_ref(here).addr() as u64;
        (address.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - SHARD_BITS)) as usize
    })
}

#[cold]
pub(super) fn full() -> Error {
    Error::new(ErrorKind::OutOfResources, "register")
        .provider("loopback")
        .context("limit", "2^24 table entries")
        .remedy("close regions before registering more")
}

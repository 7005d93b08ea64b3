//! The memory of the table: entries, in chunks, in shards.

#![allow(unsafe_code)]

use std::{
    cell::UnsafeCell,
    ptr,
    sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering},
};

use hashbrown::HashTable;
use parking_lot::Mutex;

use super::{super::region::Body, Counts};

pub(super) const SHARD_BITS: u32 = 4;
pub(super) const SHARDS: usize = 1 << SHARD_BITS;
pub(super) const CHUNK_BITS: u32 = 10;
pub(super) const CHUNK: usize = 1 << CHUNK_BITS;
pub(super) const CHUNKS: usize = 1 << (24 - SHARD_BITS - CHUNK_BITS);
/// Where keys are narrow, freed indices rest until this many of their shard are free.
pub(super) const RESTING: u32 = 256;
pub(super) const NO_INDEX: u32 = u32::MAX;

pub(super) const GENERATION_SHIFT: u32 = 32;
pub(super) const LIVE: u64 = 1 << 31;
pub(super) const ENABLED: u64 = 1 << 30;
pub(super) const REFRESHING: u64 = 1 << 29;
pub(super) const SINGLE_USE: u64 = 1 << 28;
pub(super) const SPENT: u64 = 1 << 27;
pub(super) const USERS: u64 = SPENT - 1;

/// One region, or room for one.
#[repr(C, align(64))]
pub(super) struct Entry {
    pub(super) life: AtomicU64,
    /// The domain that the body belongs to; a hint unless the entry is held.
    pub(super) domain: AtomicU32,
    /// Of a free entry the next free one, of a live one how many windows and sub-regions depend on
    /// it. Changed under the shard's lock only.
    pub(super) link: AtomicU32,
    pub(super) body: UnsafeCell<Body>,
}

const _: () = assert!(size_of::<Entry>() == 64, "an entry is one cache line");

// SAFETY: `life`, `domain` and `link` are atomics. `body` is written only in the states filling and
// emptying, by the one thread that owns the entry then (the table of states in `table.rs`), and
// read only by users, who come after the Release of LIVE and leave with a Release before emptying
// begins. `Body` itself is Send and Sync.
unsafe impl Sync for Entry {}

impl Entry {
    #[inline]
    pub(super) fn generation(&self) -> u32 {
        (self.life.load(Ordering::Relaxed) >> GENERATION_SHIFT) as u32
    }
}

impl Default for Entry {
    fn default() -> Self {
        Self {
            life: AtomicU64::new(1 << GENERATION_SHIFT),
            domain: AtomicU32::new(0),
            link: AtomicU32::new(0),
            body: UnsafeCell::new(Body::empty()),
        }
    }
}

/// A run of entries. Allocated once, and freed with the table.
pub(super) type Chunk = [Entry; CHUNK];

#[repr(align(128))]
pub(super) struct Shard {
    pub(super) state: Mutex<ShardState>,
    chunks: Box<[AtomicPtr<Chunk>; CHUNKS]>,
}

impl Shard {
    pub(super) fn new() -> Self {
        let chunks: Vec<_> = (0..CHUNKS).map(|_| AtomicPtr::default()).collect();
        Self {
            state: Mutex::new(ShardState {
                requested: HashTable::new(),
                slots: Slots { first_free: NO_INDEX, last_free: NO_INDEX, free: 0, fresh: 0 },
                counts: Vec::new(),
            }),
            chunks: chunks.try_into().unwrap_or_else(|_| unreachable!("as many were made")),
        }
    }

    #[inline]
    pub(super) fn entry(&self, within: usize) -> Option<&Entry> {
        let chunk = self.chunks.get(within >> CHUNK_BITS)?.load(Ordering::Acquire);
        // SAFETY: a chunk pointer is null or, since the Release that stored it, points to a chunk
        // that lives as long as the shard.
        let chunk = unsafe { chunk.as_ref() }?;
        Some(&chunk[within & (CHUNK - 1)])
    }

    /// Makes sure that there is an entry; the shard's lock is held.
    pub(super) fn make_entry(&self, within: usize) {
        let chunk = &self.chunks[within >> CHUNK_BITS];
        if chunk.load(Ordering::Relaxed).is_null() {
            let entries: Box<[Entry]> = (0..CHUNK).map(|_| Entry::default()).collect();
            let entries: Box<Chunk> =
                entries.try_into().unwrap_or_else(|_| unreachable!("as many were made"));
            chunk.store(Box::into_raw(entries), Ordering::Release);
        }
    }
}

impl Drop for Shard {
    fn drop(&mut self) {
        for chunk in &mut *self.chunks {
            let chunk = std::mem::replace(chunk.get_mut(), ptr::null_mut());
            if !chunk.is_null() {
                // SAFETY: the pointer came from `Box::into_raw` in `make_entry`, and nobody refers
                // to entries of a table that is dropped.
                drop(unsafe { Box::from_raw(chunk) });
            }
        }
    }
}

pub(super) struct ShardState {
    pub(super) requested: HashTable<u32>,
    pub(super) slots: Slots,
    /// By the slot of the domain.
    pub(super) counts: Vec<Counts>,
}

/// The indices of a shard that are to be had.
pub(super) struct Slots {
    pub(super) first_free: u32,
    pub(super) last_free: u32,
    pub(super) free: u32,
    /// Entries that were ever used.
    pub(super) fresh: u32,
}

//! The NIC's table of regions.
//!
//! # How it works
//!
//! An entry is one cache line and is never given back to the allocator while the NIC lives, so that a reader may look
//! at any index at any time. Its *life word* says whether what it finds there means anything:
//!
//! ```text
//! 63            32  31    30       29          28     27     26      0
//! |  generation   | LIVE | ENABLED | REFRESHING | SINGLE | SPENT | users |
//! ```
//!
//! | state | LIVE | users | who may touch the body |
//! |---|---|---|---|
//! | free | 0 | 0 | nobody; the index is in its shard's free list |
//! | filling | 0 | 0 | the thread that took the index from the free list |
//! | live | 1 | any | users read |
//! | dying | 0 | > 0 | users read; the thread that cleared LIVE waits |
//! | emptying | 0 | 0 | the thread that cleared LIVE |
//!
//! A transfer *holds* an entry: it compares the generation and adds a user in one compare-and-swap, so that it cannot
//! get hold of an entry that died or was reused meanwhile. Deregistration clears LIVE, waits until the users are gone,
//! and only then lets the entry go with the next generation. Hence nothing touches memory after deregistration, and
//! a key or descriptor, which carries the generation, is good for one life. An index whose generations are used up
//! is retired.
//!
//! # Orderings
//!
//! - Filling is published by the store of LIVE (Release) and seen by the hold (Acquire).
//! - What a user did is published when it lets go (Release) and seen by the dying side's reads of the word (Acquire):
//!   bytes moved by a transfer happen before the return of the deregistration.
//! - The last user of an entry that is dying or refreshing wakes whoever waits: both are on the one word, so that
//!   either the waiter saw no users or the last user saw the flag.
//!
//! # Shards
//!
//! The table is split into shards by the low bits of the index. A shard's lock guards its free list, its map from
//! requested keys to indices, its counts, and every change from live to not live; the data path takes it only to
//! look up a requested key. The map holds indices and compares keys in the entries.

#![allow(unsafe_code)]

use std::{
    cell::UnsafeCell,
    fmt,
    ops::Deref,
    ptr,
    sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering},
};

use hashbrown::{HashTable, hash_table};
use hmem_core::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::{
    keys::{DomainKeys, KnownGeneration, Token, fold},
    region::{Body, Extended, NewBody},
};

const SHARD_BITS: u32 = 4;
const SHARDS: usize = 1 << SHARD_BITS;
const CHUNK_BITS: u32 = 10;
const CHUNK: usize = 1 << CHUNK_BITS;
const CHUNKS: usize = 1 << (24 - SHARD_BITS - CHUNK_BITS);
/// Where keys are narrow, freed indices rest until this many of their shard are free.
const RESTING: u32 = 256;
const NO_INDEX: u32 = u32::MAX;

const GENERATION_SHIFT: u32 = 32;
const LIVE: u64 = 1 << 31;
const ENABLED: u64 = 1 << 30;
const REFRESHING: u64 = 1 << 29;
const SINGLE_USE: u64 = 1 << 28;
const SPENT: u64 = 1 << 27;
const USERS: u64 = SPENT - 1;

/// One region, or room for one.
#[repr(C, align(64))]
struct Entry {
    life: AtomicU64,
    /// The domain that the body belongs to; a hint unless the entry is held.
    domain: AtomicU32,
    /// Of a free entry the next free one, of a live one how many windows and sub-regions depend on it. Changed under
    /// the shard's lock only.
    link: AtomicU32,
    body: UnsafeCell<Body>,
}

const _: () = assert!(size_of::<Entry>() == 64, "an entry is one cache line");

// SAFETY: `life`, `domain` and `link` are atomics. `body` is written only in the states filling and emptying, by
// the one thread that owns the entry then (the table of states above), and read only by users, who come after the
// Release of LIVE and leave with a Release before emptying begins. `Body` itself is Send and Sync.
unsafe impl Sync for Entry {}

impl Entry {
    #[inline]
    fn generation(&self) -> u32 {
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
type Chunk = [Entry; CHUNK];

#[repr(align(128))]
struct Shard {
    state: Mutex<ShardState>,
    chunks: Box<[AtomicPtr<Chunk>; CHUNKS]>,
}

impl Shard {
    fn new() -> Self {
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
    fn entry(&self, within: usize) -> Option<&Entry> {
        let chunk = self.chunks.get(within >> CHUNK_BITS)?.load(Ordering::Acquire);
        // SAFETY: a chunk pointer is null or, since the Release that stored it, points to a chunk that lives as long
        // as the shard.
        let chunk = unsafe { chunk.as_ref() }?;
        Some(&chunk[within & (CHUNK - 1)])
    }

    /// Makes sure that there is an entry; the shard's lock is held.
    fn make_entry(&self, within: usize) {
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
                // SAFETY: the pointer came from `Box::into_raw` in `make_entry`, and nobody refers to entries of a
                // table that is dropped.
                drop(unsafe { Box::from_raw(chunk) });
            }
        }
    }
}

struct ShardState {
    requested: HashTable<u32>,
    slots: Slots,
    /// By the slot of the domain.
    counts: Vec<Counts>,
}

/// The indices of a shard that are to be had.
struct Slots {
    first_free: u32,
    last_free: u32,
    free: u32,
    /// Entries that were ever used.
    fresh: u32,
}

/// What a domain has registered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) regions: u64,
    pub(super) page_registrations: u64,
    pub(super) bytes: u64,
}

/// The domain on whose behalf the table acts: its number, never reused, and its place in the counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct DomainSlot {
    pub(super) id: u32,
    pub(super) slot: u32,
}

/// Why an entry cannot be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    Dead,
    Disabled,
    Refreshing,
}

/// Which properties a new region's life begins with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Birth {
    pub(super) enabled: bool,
    pub(super) single_use: bool,
    /// Whether it counts as a registration of pages.
    pub(super) pages: bool,
}

pub(super) struct Table {
    shards: [Shard; SHARDS],
    /// Secret, so that keys cannot be chosen to collide.
    seed: u64,
    /// How many freed indices of a shard rest. If any do, they are reused oldest first, otherwise newest first.
    resting: u32,
    idle: Mutex<()>,
    became_idle: Condvar,
}

impl Table {
    pub(super) fn new(seed: u64, narrow: bool) -> Self {
        Self {
            shards: std::array::from_fn(|_| Shard::new()),
            seed,
            resting: if narrow { RESTING } else { 0 },
            idle: Mutex::new(()),
            became_idle: Condvar::new(),
        }
    }

    /// Makes room in the counts for a domain.
    pub(super) fn admit(&self, domain: DomainSlot) {
        for shard in &self.shards {
            let counts = &mut shard.state.lock().counts;
            if counts.len() <= domain.slot as usize {
                counts.resize(domain.slot as usize + 1, Counts::default());
            }
        }
    }

    pub(super) fn counts(&self, domain: DomainSlot) -> Counts {
        self.shards.iter().fold(Counts::default(), |sum, shard| {
            let one = shard.state.lock().counts[domain.slot as usize];
            Counts {
                regions: sum.regions + one.regions,
                page_registrations: sum.page_registrations + one.page_registrations,
                bytes: sum.bytes + one.bytes,
            }
        })
    }

    #[inline]
    fn shard(&self, index: u32) -> &Shard {
        &self.shards[index as usize & (SHARDS - 1)]
    }

    #[inline]
    fn entry(&self, index: u32) -> Option<&Entry> {
        self.shard(index).entry((index >> SHARD_BITS) as usize)
    }

    /// The entry of an index that came from the free list or the map: those have one.
    #[inline]
    fn known(&self, index: u32) -> &Entry {
        self.entry(index).expect("an index that was given out has an entry")
    }

    #[inline]
    fn hash(&self, domain: u32, key: u64) -> u64 {
        fold(key ^ self.seed, u64::from(domain).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    #[inline]
    fn shard_of_hash(hash: u64) -> usize {
        (hash >> 40) as usize & (SHARDS - 1)
    }

    /// The requested key of an entry that is in a map.
    #[inline]
    fn requested_key(&self, index: u32) -> (u32, u64) {
        let entry = self.known(index);
        // SAFETY: the caller holds the lock of the shard whose map holds `index`. Entries are filled before that lock
        // is let go, and leave the map under it before they are emptied, so the body is not being written.
        let key = unsafe { (*entry.body.get()).key };
        (entry.domain.load(Ordering::Relaxed), key)
    }

    /// Takes a free index, or the next one that was never used.
    #[inline]
    fn take_index(&self, at: usize, slots: &mut Slots) -> Option<(u32, &Entry)> {
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

    /// Gives an index back with its next generation; one that has no more is retired.
    #[inline]
    fn give_index(&self, index: u32, entry: &Entry, slots: &mut Slots) {
        let Some(next) = entry.generation().checked_add(1) else { return };
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
    fn shard_with_room(&self) -> Option<(MutexGuard<'_, ShardState>, u32, &Entry)> {
        let home = home_shard();
        (0..SHARDS).map(|step| (home + step) % SHARDS).find_map(|at| {
            let mut state = self.shards[at].state.lock();
            let (index, entry) = self.take_index(at, &mut state.slots)?;
            Some((state, index, entry))
        })
    }

    /// Adds a live region under a requested key.
    #[inline(always)]
    pub(super) fn insert_requested(
        &self,
        domain: DomainSlot,
        key: u64,
        body: NewBody,
        birth: Birth,
    ) -> Result<Token> {
        let hash = self.hash(domain.id, key);
        let at = Self::shard_of_hash(hash);
        let mut state = self.shards[at].state.lock();
        let ShardState { requested, slots, counts } = &mut *state;
        let found = requested.entry(
            hash,
            |&i| self.requested_key(i) == (domain.id, key),
            |&i| {
                let (domain, key) = self.requested_key(i);
                self.hash(domain, key)
            },
        );
        let hash_table::Entry::Vacant(vacant) = found else { return Err(key_in_use(key)) };
        let (index, entry) = self.take_index(at, slots).ok_or_else(full)?;
        vacant.insert(index);
        let token = Token { index, generation: entry.generation() };
        Self::fill(entry, token, key, counts, domain, body, birth);
        Ok(token)
    }

    /// Adds a live region under a key of the NIC's own; the key is the second of the pair.
    #[inline]
    pub(super) fn insert_sealed(
        &self,
        domain: DomainSlot,
        keys: &DomainKeys,
        body: NewBody,
        birth: Birth,
    ) -> Result<(Token, u64)> {
        let (mut state, index, entry) = self.shard_with_room().ok_or_else(full)?;
        let token = Token { index, generation: entry.generation() };
        let key = keys.seal(token);
        Self::fill(entry, token, key, &mut state.counts, domain, body, birth);
        Ok((token, key))
    }

    /// Fills the entry of an index that was just taken, under the lock under which it was, and brings it to life.
    #[inline(always)]
    fn fill(
        entry: &Entry,
        token: Token,
        key: u64,
        counts: &mut [Counts],
        domain: DomainSlot,
        new: NewBody,
        birth: Birth,
    ) {
        let counts = &mut counts[domain.slot as usize];
        counts.regions += 1;
        counts.page_registrations += u64::from(birth.pages);
        counts.bytes += if birth.pages { new.len } else { 0 };
        entry.domain.store(domain.id, Ordering::Relaxed);
        entry.link.store(0, Ordering::Relaxed);
        // SAFETY: the index was just taken from the free ones under the shard's lock, so the entry is in the state
        // filling and this thread owns its body. Nothing is overwritten that would have to be dropped.
        unsafe { new.write(&mut *entry.body.get(), key) };
        let word = u64::from(token.generation) << GENERATION_SHIFT
            | LIVE
            | if birth.enabled { ENABLED } else { 0 }
            | if birth.single_use { SINGLE_USE } else { 0 };
        entry.life.store(word, Ordering::Release);
    }

    /// Removes a region: its key is dead at once, and when this returns nobody uses it. What it owned comes back, to be
    /// dropped outside every lock.
    #[inline]
    pub(super) fn remove(&self, domain: DomainSlot, token: Token, requested: bool) -> Result<Removed> {
        let entry = self.entry(token.index).ok_or_else(stale)?;
        let shard = self.shard(token.index);
        let mut state = shard.state.lock();
        let word = entry.life.load(Ordering::Relaxed);
        if word >> GENERATION_SHIFT != u64::from(token.generation)
            || word & LIVE == 0
            || entry.domain.load(Ordering::Relaxed) != domain.id
        {
            return Err(stale());
        }
        let dependents = entry.link.load(Ordering::Relaxed);
        if dependents > 0 {
            return Err(depended_on(dependents));
        }
        // SAFETY: LIVE is cleared only under the lock held here, so the entry stays live and its body is only read.
        let (key, len, pages) = unsafe {
            let body = &*entry.body.get();
            (body.key, body.len, !body.is_sub())
        };
        if requested {
            match state.requested.find_entry(self.hash(domain.id, key), |&i| i == token.index) {
                Ok(found) => found.remove(),
                Err(_) => unreachable!("a live requested key is in the map of its shard"),
            };
        }
        let bytes = if pages { len } else { 0 };
        let counts = &mut state.counts[domain.slot as usize];
        counts.regions -= 1;
        counts.page_registrations -= u64::from(pages);
        counts.bytes -= bytes;
        let before = entry.life.fetch_and(!LIVE, Ordering::AcqRel);
        if before & USERS > 0 {
            drop(state);
            self.wait_unused(&entry.life);
            state = shard.state.lock();
        }
        // SAFETY: LIVE is clear and there are no users (the Acquire read that showed it came after their Releases), so
        // this thread, which cleared LIVE, owns the body.
        let extended = unsafe { (*entry.body.get()).extended.take() };
        self.give_index(token.index, entry, &mut state.slots);
        Ok(Removed { bytes, extended })
    }

    /// Waits until an entry that admits no new users has none.
    fn wait_unused(&self, life: &AtomicU64) {
        for _ in 0..200 {
            if life.load(Ordering::Acquire) & USERS == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        let mut idle = self.idle.lock();
        while life.load(Ordering::Acquire) & USERS != 0 {
            self.became_idle.wait(&mut idle);
        }
    }

    #[cold]
    fn wake_waiters(&self) {
        let _idle = self.idle.lock();
        self.became_idle.notify_all();
    }

    /// Holds an entry for use.
    #[inline]
    pub(super) fn hold(&self, index: u32, known: KnownGeneration, remote: bool) -> Result<Held<'_>, Refusal> {
        let entry = self.entry(index).ok_or(Refusal::Dead)?;
        self.hold_entry(entry, index, known, remote)
    }

    #[inline]
    fn hold_entry<'t>(
        &'t self,
        entry: &'t Entry,
        index: u32,
        known: KnownGeneration,
        remote: bool,
    ) -> Result<Held<'t>, Refusal> {
        let mut word = entry.life.load(Ordering::Relaxed);
        loop {
            let generation = (word >> GENERATION_SHIFT) as u32;
            if !known.matches(generation) || word & LIVE == 0 || (remote && word & SPENT != 0) {
                return Err(Refusal::Dead);
            }
            if word & ENABLED == 0 {
                return Err(Refusal::Disabled);
            }
            if word & REFRESHING != 0 {
                return Err(Refusal::Refreshing);
            }
            match entry.life.compare_exchange_weak(word, word + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Ok(Held { table: self, entry, token: Token { index, generation } }),
                Err(now) => word = now,
            }
        }
    }

    /// Holds the region of a requested key.
    pub(super) fn hold_requested(&self, domain: u32, key: u64, remote: bool) -> Result<Held<'_>, Refusal> {
        let hash = self.hash(domain, key);
        let state = self.shards[Self::shard_of_hash(hash)].state.lock();
        let index =
            *state.requested.find(hash, |&i| self.requested_key(i) == (domain, key)).ok_or(Refusal::Dead)?;
        let entry = self.known(index);
        self.hold_entry(entry, index, KnownGeneration::Whole(entry.generation()), remote)
    }

    /// Whether a requested key is in use.
    pub(super) fn is_requested(&self, domain: u32, key: u64) -> bool {
        let hash = self.hash(domain, key);
        let state = self.shards[Self::shard_of_hash(hash)].state.lock();
        state.requested.find(hash, |&i| self.requested_key(i) == (domain, key)).is_some()
    }

    /// Whether a descriptor names a live region of the domain right now; what counts is the hold at its use.
    #[inline]
    pub(super) fn is_live(&self, domain: u32, token: Token) -> bool {
        self.entry(token.index).is_some_and(|entry| {
            let word = entry.life.load(Ordering::Acquire);
            word >> GENERATION_SHIFT == u64::from(token.generation)
                && word & LIVE != 0
                && entry.domain.load(Ordering::Relaxed) == domain
        })
    }

    /// Changes the life word of a live entry of the domain under the shard's lock.
    fn with_live<T>(
        &self,
        domain: u32,
        token: Token,
        operation: &'static str,
        change: impl FnOnce(&Entry) -> T,
    ) -> Result<T> {
        let stale = || {
            Error::new(ErrorKind::NoRegion, operation)
                .provider("loopback")
                .remedy("the handle is stale or of another domain")
        };
        let entry = self.entry(token.index).ok_or_else(stale)?;
        let _state = self.shard(token.index).state.lock();
        if self.is_live(domain, token) { Ok(change(entry)) } else { Err(stale()) }
    }

    pub(super) fn enable(&self, domain: u32, token: Token) -> Result<()> {
        self.with_live(domain, token, "enable", |entry| {
            entry.life.fetch_or(ENABLED, Ordering::Release);
        })
    }

    /// Adds a window or sub-region that keeps the region from being removed.
    pub(super) fn add_dependent(&self, domain: u32, token: Token, operation: &'static str) -> Result<()> {
        self.with_live(domain, token, operation, |entry| {
            entry.link.fetch_add(1, Ordering::Relaxed);
        })
    }

    /// Takes away what [`Table::add_dependent`] added.
    pub(super) fn remove_dependent(&self, token: Token) {
        let _state = self.shard(token.index).state.lock();
        self.known(token.index).link.fetch_sub(1, Ordering::Relaxed);
    }

    /// The body of a live region, enabled or not, for calls that core does not overlap with its deregistration.
    pub(super) fn inspect<T>(
        &self,
        domain: u32,
        token: Token,
        operation: &'static str,
        look: impl FnOnce(&Body) -> T,
    ) -> Result<T> {
        self.with_live(domain, token, operation, |entry| {
            // SAFETY: LIVE is cleared only under the shard's lock, which `with_live` holds while `look` runs, so the
            // body is only read.
            look(unsafe { &*entry.body.get() })
        })
    }

    /// Turns new users away and waits for the present ones, until the returned guard is dropped. The guard is a user
    /// itself, so that the region stays.
    pub(super) fn refresh(&self, domain: u32, token: Token) -> Result<Refreshing<'_>> {
        let entry = self.with_live(domain, token, "refresh", |_| ()).map(|()| self.known(token.index))?;
        let mut word = entry.life.load(Ordering::Relaxed);
        loop {
            if word >> GENERATION_SHIFT != u64::from(token.generation) || word & LIVE == 0 {
                return Err(Error::new(ErrorKind::NoRegion, "refresh").provider("loopback"));
            }
            if word & REFRESHING != 0 {
                return Err(Error::new(ErrorKind::Busy, "refresh")
                    .provider("loopback")
                    .remedy("another refresh of the region is under way"));
            }
            match entry.life.compare_exchange_weak(
                word,
                (word | REFRESHING) + 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => break,
                Err(now) => word = now,
            }
        }
        let held = Held { table: self, entry, token };
        if entry.life.load(Ordering::Acquire) & USERS > 1 {
            let mut idle = self.idle.lock();
            while entry.life.load(Ordering::Acquire) & USERS > 1 {
                self.became_idle.wait(&mut idle);
            }
        }
        Ok(Refreshing { held })
    }

    /// Reserves an index for something that is no region, such as a window.
    pub(super) fn reserve(&self) -> Result<u32> {
        self.shard_with_room().map(|(_, index, _)| index).ok_or_else(full)
    }

    /// Gives a reserved index back.
    pub(super) fn unreserve(&self, index: u32) {
        let mut state = self.shard(index).state.lock();
        self.give_index(index, self.known(index), &mut state.slots);
    }

    /// The regions that a domain still has.
    pub(super) fn tokens_of(&self, domain: DomainSlot) -> Vec<Token> {
        let mut tokens = Vec::new();
        for (at, shard) in self.shards.iter().enumerate() {
            let state = shard.state.lock();
            if state.counts[domain.slot as usize].regions == 0 {
                continue;
            }
            for within in 0..state.slots.fresh {
                let index = within << SHARD_BITS | at as u32;
                let entry = self.known(index);
                let word = entry.life.load(Ordering::Relaxed);
                if word & LIVE != 0 && entry.domain.load(Ordering::Relaxed) == domain.id {
                    tokens.push(Token { index, generation: (word >> GENERATION_SHIFT) as u32 });
                }
            }
        }
        tokens
    }
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table").field("shards", &SHARDS).finish_non_exhaustive()
    }
}

/// What a removed region leaves behind.
pub(super) struct Removed {
    /// Bytes that it had registered.
    pub(super) bytes: u64,
    /// Files, copies of keys, counters: dropped by the caller outside every lock.
    pub(super) extended: Option<Box<Extended>>,
}

/// A region that cannot be emptied while this is held.
pub(super) struct Held<'t> {
    table: &'t Table,
    entry: &'t Entry,
    pub(super) token: Token,
}

impl Held<'_> {
    #[inline]
    pub(super) fn domain(&self) -> u32 {
        self.entry.domain.load(Ordering::Relaxed)
    }

    /// Uses up the key, if it is good for one use only; false if somebody else was first.
    #[inline]
    pub(super) fn spend(&self) -> bool {
        self.entry.life.load(Ordering::Relaxed) & SINGLE_USE == 0
            || self.entry.life.fetch_or(SPENT, Ordering::AcqRel) & SPENT == 0
    }
}

impl Deref for Held<'_> {
    type Target = Body;

    #[inline]
    fn deref(&self) -> &Body {
        // SAFETY: this is a user of the entry (`hold_entry` or `refresh` added it, `drop` takes it away), and bodies
        // are written only where there are no users.
        unsafe { &*self.entry.body.get() }
    }
}

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        let before = self.entry.life.fetch_sub(1, Ordering::Release);
        if before & (LIVE | REFRESHING) != LIVE {
            self.table.wake_waiters();
        }
    }
}

impl fmt::Debug for Held<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Held").field(&self.token).finish()
    }
}

/// A region whose users are gone and that takes no new ones until this is dropped.
pub(super) struct Refreshing<'t> {
    held: Held<'t>,
}

impl Deref for Refreshing<'_> {
    type Target = Body;

    fn deref(&self) -> &Body {
        &self.held
    }
}

impl Drop for Refreshing<'_> {
    fn drop(&mut self) {
        self.held.entry.life.fetch_and(!REFRESHING, Ordering::Release);
    }
}

/// A shard of the calling thread's own, so that threads rarely meet at a lock: by the address of a thread-local, which
/// no other living thread shares.
#[inline]
fn home_shard() -> usize {
    thread_local!(static HERE: u8 = const { 0 });
    HERE.with(|here| {
        let address = std::ptr::from_ref(here).addr() as u64;
        (address.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - SHARD_BITS)) as usize
    })
}

#[cold]
fn depended_on(dependents: u32) -> Error {
    Error::new(ErrorKind::Busy, "deregister")
        .provider("loopback")
        .context("dependents", dependents)
        .remedy("close its sub-regions and unbind its windows first")
}

#[cold]
fn stale() -> Error {
    Error::new(ErrorKind::NoRegion, "deregister")
        .provider("loopback")
        .remedy("the handle is stale or of another domain")
}

#[cold]
fn key_in_use(key: u64) -> Error {
    Error::new(ErrorKind::NoKey, "register")
        .provider("loopback")
        .context("key", format_args!("{key:#x}"))
        .remedy("close the region that has this key, or request another")
}

#[cold]
fn full() -> Error {
    Error::new(ErrorKind::OutOfResources, "register")
        .provider("loopback")
        .context("limit", "2^24 table entries")
        .remedy("close regions before registering more")
}

#[cfg(test)]
mod tests {
    use hmem_core::{Access, Addressing};

    use super::*;
    use crate::loopback::region::Kind;

    const DOMAIN: DomainSlot = DomainSlot { id: 7, slot: 0 };
    const BIRTH: Birth = Birth { enabled: true, single_use: false, pages: true };

    fn table(narrow: bool) -> Table {
        let table = Table::new(1, narrow);
        table.admit(DOMAIN);
        table
    }

    fn body() -> NewBody {
        NewBody {
            base: 4096,
            len: 64,
            extended: None,
            access: Access::REMOTE_READ,
            kind: Kind::Borrowed,
            addressing: Addressing::ZeroBased,
        }
    }

    #[test]
    fn a_token_is_good_for_one_life() {
        let table = table(false);
        let first = table.insert_requested(DOMAIN, 1, body(), BIRTH).unwrap();
        table.remove(DOMAIN, first, true).unwrap();
        let second = table.insert_requested(DOMAIN, 1, body(), BIRTH).unwrap();
        assert_eq!(first.index, second.index);
        let hold = |token: Token| {
            let known = KnownGeneration::Whole(token.generation);
            table.hold(token.index, known, true).map(|held| held.token)
        };
        assert_eq!(hold(first).unwrap_err(), Refusal::Dead);
        assert_eq!(hold(second).unwrap(), second);
        assert!(!table.is_live(DOMAIN.id, first) && table.is_live(DOMAIN.id, second));
        assert!(table.remove(DOMAIN, first, true).is_err());
        assert!(table.remove(DomainSlot { id: 8, slot: 0 }, second, true).is_err());
    }

    #[test]
    fn of_two_that_hold_a_single_use_region_one_may_use_it() {
        let table = table(false);
        let birth = Birth { single_use: true, ..BIRTH };
        table.insert_requested(DOMAIN, 1, body(), birth).unwrap();
        let hold = || table.hold_requested(DOMAIN.id, 1, true);
        let (one, two) = (hold().unwrap(), hold().unwrap());
        assert!(one.spend() && !two.spend());
        assert_eq!(hold().unwrap_err(), Refusal::Dead);
        table.hold(one.token.index, KnownGeneration::Whole(one.token.generation), false).unwrap();
    }

    #[test]
    fn narrow_tables_reuse_the_oldest_index_and_only_after_a_rest() {
        let table = table(true);
        let keys = DomainKeys::new(4).unwrap();
        let mut last_seen = std::collections::HashMap::new();
        for round in 0..10 * RESTING {
            let (token, key) = table.insert_sealed(DOMAIN, &keys, body(), BIRTH).unwrap();
            assert_eq!(key >> 8, u64::from(token.index));
            if let Some(before) = last_seen.insert(token.index, round) {
                assert!(
                    round - before >= RESTING,
                    "index {} came back after {}",
                    token.index,
                    round - before
                );
            }
            table.remove(DOMAIN, token, false).unwrap();
        }
        assert!(last_seen.len() <= RESTING as usize + 1);
    }

    #[test]
    fn an_index_whose_generations_are_used_up_is_retired() {
        let table = table(false);
        let token = table.insert_requested(DOMAIN, 1, body(), BIRTH).unwrap();
        table.remove(DOMAIN, token, true).unwrap();
        let last = u64::from(u32::MAX) << GENERATION_SHIFT;
        table.known(token.index).life.store(last, Ordering::Relaxed);
        let old = table.insert_requested(DOMAIN, 1, body(), BIRTH).unwrap();
        assert_eq!((old.index, old.generation), (token.index, u32::MAX));
        table.remove(DOMAIN, old, true).unwrap();
        let next = table.insert_requested(DOMAIN, 1, body(), BIRTH).unwrap();
        assert_ne!(next.index, token.index);
    }
}

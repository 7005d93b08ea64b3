//! The NIC's table of regions.
//!
//! # How it works
//!
//! An entry is one cache line and is never given back to the allocator while the NIC lives, so that
//! a reader may look at any index at any time. Its *life word* says whether what it finds there
//! means anything:
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
//! A transfer *holds* an entry: it compares the generation and adds a user in one compare-and-swap,
//! so that it cannot get hold of an entry that died or was reused meanwhile. Deregistration clears
//! LIVE, waits until the users are gone, and only then lets the entry go with the next generation.
//! Hence nothing touches memory after deregistration, and a key or descriptor, which carries the
//! generation, is good for one life. An index whose generations are used up is retired.
//!
//! # Orderings
//!
//! - Filling is published by the store of LIVE (Release) and seen by the hold (Acquire).
//! - What a user did is published when it lets go (Release) and seen by the dying side's reads of
//!   the word (Acquire): bytes moved by a transfer happen before the return of the deregistration.
//! - The last user of an entry that is dying or refreshing wakes whoever waits: both are on the one
//!   word, so that either the waiter saw no users or the last user saw the flag.
//!
//! # Shards
//!
//! The table is split into shards by the low bits of the index. A shard's lock guards its free
//! list, its map from requested keys to indices, its counts, and every change from live to not
//! live; the data path takes it only to look up a requested key. The map holds indices and compares
//! keys in the entries.

#![allow(unsafe_code)]

mod entry;
mod held;
mod slots;
#[cfg(test)]
mod tests;

use std::{fmt, sync::atomic::Ordering};

use hashbrown::hash_table;
use hmem_core::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};

pub(super) use self::held::Held;
use self::{
    entry::{
        ENABLED, Entry, GENERATION_SHIFT, LIVE, RESTING, SHARD_BITS, SHARDS, SINGLE_USE, Shard,
        ShardState, USERS,
    },
    slots::full,
};
use super::{
    keys::{DomainKeys, Token, fold},
    region::{Body, Extended, NewBody},
};

/// What a domain has registered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) regions: u64,
    pub(super) page_registrations: u64,
    pub(super) bytes: u64,
}

/// The domain on whose behalf the table acts: its number, never reused, and its place in the
/// counts.
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
    /// How many freed indices of a shard rest. If any do, they are reused oldest first, otherwise
    /// newest first.
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
        // SAFETY: the caller holds the lock of the shard whose map holds `index`. Entries are
        // filled before that lock is let go, and leave the map under it before they are
        // emptied, so the body is not being written.
        let key = unsafe { (*entry.body.get()).key };
        (entry.domain.load(Ordering::Relaxed), key)
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

    /// Fills the entry of an index that was just taken, under the lock under which it was, and
    /// brings it to life.
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
        // SAFETY: the index was just taken from the free ones under the shard's lock, so the entry
        // is in the state filling and this thread owns its body. Nothing is overwritten
        // that would have to be dropped.
        unsafe { new.write(&mut *entry.body.get(), key) };
        let word = u64::from(token.generation) << GENERATION_SHIFT
            | LIVE
            | if birth.enabled { ENABLED } else { 0 }
            | if birth.single_use { SINGLE_USE } else { 0 };
        entry.life.store(word, Ordering::Release);
    }

    /// Removes a region: its key is dead at once, and when this returns nobody uses it. What it
    /// owned comes back, to be dropped outside every lock.
    #[inline]
    pub(super) fn remove(
        &self,
        domain: DomainSlot,
        token: Token,
        requested: bool,
    ) -> Result<Removed> {
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
        // SAFETY: LIVE is cleared only under the lock held here, so the entry stays live and its
        // body is only read.
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
        // SAFETY: LIVE is clear and there are no users (the Acquire read that showed it came after
        // their Releases), so this thread, which cleared LIVE, owns the body.
        let extended = unsafe { (*entry.body.get()).extended.take() };
        self.give_index(token, entry, &mut state.slots);
        Ok(Removed { bytes, extended })
    }

    /// Whether a requested key is in use.
    pub(super) fn is_requested(&self, domain: u32, key: u64) -> bool {
        let hash = self.hash(domain, key);
        let state = self.shards[Self::shard_of_hash(hash)].state.lock();
        state.requested.find(hash, |&i| self.requested_key(i) == (domain, key)).is_some()
    }

    /// Whether a descriptor names a live region of the domain right now; what counts is the hold at
    /// its use.
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
    pub(super) fn add_dependent(
        &self,
        domain: u32,
        token: Token,
        operation: &'static str,
    ) -> Result<()> {
        self.with_live(domain, token, operation, |entry| {
            entry.link.fetch_add(1, Ordering::Relaxed);
        })
    }

    /// Takes away what [`Table::add_dependent`] added.
    pub(super) fn remove_dependent(&self, token: Token) {
        let _state = self.shard(token.index).state.lock();
        self.known(token.index).link.fetch_sub(1, Ordering::Relaxed);
    }

    /// The body of a live region, enabled or not, for calls that core does not overlap with its
    /// deregistration.
    pub(super) fn inspect<T>(
        &self,
        domain: u32,
        token: Token,
        operation: &'static str,
        look: impl FnOnce(&Body) -> T,
    ) -> Result<T> {
        self.with_live(domain, token, operation, |entry| {
            // SAFETY: LIVE is cleared only under the shard's lock, which `with_live` holds while
            // `look` runs, so the body is only read.
            look(unsafe { &*entry.body.get() })
        })
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

//! Lookups of cached entries, and the end of a lease: no lock, and no write to a shared line.

use super::{
    backend::CacheBackend,
    cache_core::CacheCore,
    index::entry::{Entry, state},
    key::Key,
    lease::blocks::{LeaseBlock, LeaseSlot},
    sync::{self, Ordering, cold_path},
};
use crate::monitor::InvalidationCause;

/// An entry with a published lease.
pub(super) struct LeasedEntry<'c, S: CacheBackend> {
    pub(super) entry: &'c Entry<S>,
    pub(super) slot: &'c LeaseSlot,
}

/// The result of a fast lookup.
pub(super) enum FastLookup<'c, S: CacheBackend> {
    Hit(LeasedEntry<'c, S>),
    /// The table has no entry for the key. The slot is free.
    Miss,
    /// A fast lookup cannot decide. `found` is the result of the table's search, or `None` if the
    /// table was not searched.
    SlowPath {
        found: Option<u32>,
    },
}

impl<S: CacheBackend> CacheCore<S> {
    /// Looks up `key` with no lock or fence. Returns `SlowPath` if that cannot decide. Searches the
    /// table at most once.
    ///
    /// The caller owns the slot's block. It has seen that the gate is open and that lookups need no
    /// fence.
    #[inline(always)]
    pub(super) fn lookup_fast<'c>(&'c self, slot: &'c LeaseSlot, key: &Key) -> FastLookup<'c, S> {
        // Many applications use one buffer again and again.
        let last = slot.last.load(Ordering::Relaxed);
        let entry = self.index.entries.at(last);
        if entry.starts_in_same_page(key) {
            return self.lookup_last(slot, last, entry, key);
        }
        let index = self.index.find(key);
        let entry = self.index.entries.at(index);
        slot.last.store(index, Ordering::Relaxed);
        if slot.is_free() {
            match self.lease_fast(slot, index, entry, key) {
                Some(leased) => return FastLookup::Hit(leased),
                None if index == 0 => return FastLookup::Miss,
                None => {}
            }
        }
        cold_path();
        FastLookup::SlowPath { found: Some(index) }
    }

    /// Looks up `key` in the entry that the slot's last lookup found. The entry starts in the same
    /// page as the key.
    #[inline(always)]
    fn lookup_last<'c>(
        &'c self,
        slot: &'c LeaseSlot,
        last: u32,
        entry: &'c Entry<S>,
        key: &Key,
    ) -> FastLookup<'c, S> {
        if !slot.is_free() {
            cold_path();
            return FastLookup::SlowPath { found: None };
        }
        if let Some(leased) = self.lease_fast(slot, last, entry, key) {
            return FastLookup::Hit(leased);
        }
        // A copy, so that a hit need not keep the key in memory.
        let key = *key;
        if entry.covers(&key) {
            FastLookup::SlowPath { found: None }
        } else {
            self.lookup_in_table(slot, &key)
        }
    }

    /// Continues a fast lookup whose slot's last entry does not cover the key. Another entry may
    /// start in the same page.
    #[cold]
    #[inline(never)]
    fn lookup_in_table<'c>(&'c self, slot: &'c LeaseSlot, key: &Key) -> FastLookup<'c, S> {
        let index = self.index.find(key);
        let entry = self.index.entries.at(index);
        slot.last.store(index, Ordering::Relaxed);
        match self.lease_fast(slot, index, entry, key) {
            Some(leased) => FastLookup::Hit(leased),
            None if index == 0 => FastLookup::Miss,
            None => FastLookup::SlowPath { found: Some(index) },
        }
    }

    /// Publishes a lease of an entry. Ends the lease again unless the entry is live and covers the
    /// key.
    #[inline(always)]
    fn lease_fast<'c>(
        &'c self,
        slot: &'c LeaseSlot,
        index: u32,
        entry: &'c Entry<S>,
        key: &Key,
    ) -> Option<LeasedEntry<'c, S>> {
        slot.publish(index);
        sync::light_unfenced();
        // Entry 0 means "none" and is free, which allows no hit.
        let live = state::allows_fast_hit(entry.state.load(Ordering::Acquire));
        // SAFETY: the lease was published above, and the entry was seen live after that.
        if live && unsafe { entry.leased_covers(key) } {
            slot.count_hit();
            return Some(LeasedEntry { entry, slot });
        }
        cold_path();
        self.release_fast(entry, slot);
        None
    }

    /// Looks up `key` with fences if the cache needs them, and with validation by the backend if
    /// the entry needs it. Searches the table unless `found` has a fast lookup's result.
    #[inline]
    pub(super) fn lookup_checked<'c>(
        &'c self,
        block: &'c LeaseBlock,
        key: &Key,
        found: Option<u32>,
    ) -> Option<LeasedEntry<'c, S>> {
        if !self.leases.gate.is_open() {
            return None;
        }
        let index = found.unwrap_or_else(|| self.index.find(key));
        if index == 0 {
            return None;
        }
        let slot = self.leases.blocks.free_slot(block)?;
        let entry = self.index.entries.at(index);
        slot.publish(index);
        self.leases.barrier.light();
        if self.may_hit(entry, key) {
            slot.count_hit();
            return Some(LeasedEntry { entry, slot });
        }
        self.release_checked(entry, slot);
        None
    }

    /// Returns whether a lookup may use an entry of which the caller published a lease.
    pub(super) fn may_hit(&self, entry: &Entry<S>, key: &Key) -> bool {
        let word = entry.state.load(Ordering::Acquire);
        if !state::is_live(word) || !entry.covers(key) {
            return false;
        }
        if word & state::NEEDS_VALIDATION != 0 && !self.validate(entry) {
            return false;
        }
        entry.mark_referenced(word);
        true
    }

    /// Asks the backend whether a live entry is current. Invalidates the entry if it is not. The
    /// caller published a lease before it saw the entry live.
    #[inline(never)]
    fn validate(&self, entry: &Entry<S>) -> bool {
        // SAFETY: `may_hit` saw the entry live after its caller published a lease, which the caller
        // keeps until this returns.
        match self.backend.is_current(unsafe { entry.watch() }) {
            Ok(true) => return true,
            Ok(false) => {}
            Err(error) => tracing::debug!(%error, "cannot validate a cached region"),
        }
        self.mark_invalidated(self.index.entries.index_of(entry), InvalidationCause::Identity);
        false
    }

    /// Ends a lease with no fence, in a cache whose lookups need none.
    #[inline(always)]
    pub(super) fn release_fast(&self, entry: &Entry<S>, slot: &LeaseSlot) {
        slot.entry.store(0, Ordering::Release);
        sync::light_unfenced();
        self.wake_if_invalidated(entry);
    }

    /// Ends a lease, with a fence if the cache's lookups need one.
    pub(super) fn release_checked(&self, entry: &Entry<S>, slot: &LeaseSlot) {
        slot.entry.store(0, Ordering::Release);
        self.leases.barrier.light();
        self.wake_if_invalidated(entry);
    }

    /// Wakes the worker if the entry is invalidated. The entry may have been reused by now. Then
    /// the worker may be woken without need, which is harmless.
    #[inline(always)]
    fn wake_if_invalidated(&self, entry: &Entry<S>) {
        if entry.state.load(Ordering::Relaxed) & state::INVALIDATED != 0 {
            self.wake_worker();
        }
    }

    #[cold]
    #[inline(never)]
    fn wake_worker(&self) {
        if !self.leases.gate.is_forked() {
            self.waker.wake();
        }
    }
}

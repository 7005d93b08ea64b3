//! Lookups of cached entries, and the end of leases. A fast lookup takes no lock and writes only
//! its owner's lease block. A slow lookup may also write the entry's state word, call the backend,
//! and take a lock to assign another lease block.

#![allow(unsafe_code, reason = "reads an entry that a lease keeps registered")]

use super::{
    backend::CacheBackend,
    cache_core::CacheCore,
    index::entry::{Entry, state},
    key::Key,
    lease::blocks::{LeaseBlock, LeaseSlot},
    sync::{self, Ordering, cold_path},
};
use crate::monitor::InvalidationCause;

/// An entry, and the slot in which a lease of it is published.
pub(super) struct LeasedEntry<'c, S: CacheBackend> {
    pub(super) entry: &'c Entry<S>,
    pub(super) slot: &'c LeaseSlot,
}

/// A guard that ends a lease if the backend panics while it validates the entry.
struct ValidationGuard<'c, S: CacheBackend> {
    core: &'c CacheCore<S>,
    leased: LeasedEntry<'c, S>,
}

impl<S: CacheBackend> Drop for ValidationGuard<'_, S> {
    fn drop(&mut self) {
        self.core.release_slow(self.leased.entry, self.leased.slot);
    }
}

/// The result of a fast lookup.
pub(super) enum FastLookup<'c, S: CacheBackend> {
    Hit(LeasedEntry<'c, S>),
    /// The search of the table returned no entry. The lookup's lease slot is free again.
    Miss,
    /// The fast path cannot decide whether the lookup hits. `found` is the result of the lookup's
    /// search of the table: the index of an entry, or 0 for none. `found` is `None` if the lookup
    /// did not search.
    SlowPath {
        found: Option<u32>,
    },
}

impl<S: CacheBackend> CacheCore<S> {
    /// Looks up `key` with no lock or fence. Returns `SlowPath` if the slot is in use, or if the
    /// entry that was found allows no fast hit. Searches the table at most once.
    ///
    /// The caller must own the slot's block, and must have read from the gate's word that fast
    /// lookups are enabled.
    #[inline(always)]
    pub(super) fn lookup_fast<'c>(&'c self, slot: &'c LeaseSlot, key: &Key) -> FastLookup<'c, S> {
        // Many applications use one buffer again and again, so the last entry is tried first.
        let last = slot.last_found.load(Ordering::Relaxed);
        let entry = self.index.entries.at(last);
        if entry.starts_in_same_granule(key) {
            return self.lookup_last_found(slot, last, entry, key);
        }
        let index = self.index.find(key);
        let entry = self.index.entries.at(index);
        slot.last_found.store(index, Ordering::Relaxed);
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

    /// Looks up `key`, and tries `entry` first. `entry` is the entry that the previous lookup with
    /// this slot found; the caller has checked that it starts in the same page as the key. If
    /// `entry` does not cover the key, searches the table.
    #[inline(always)]
    fn lookup_last_found<'c>(
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
        // Copying the key lets the compiler keep the key of a hit in registers.
        let key = *key;
        if entry.covers(&key) {
            FastLookup::SlowPath { found: None }
        } else {
            self.lookup_in_table(slot, &key)
        }
    }

    /// Continues a fast lookup with a search of the table. Called after the entry that the slot's
    /// last lookup found turned out not to cover the key. The table may hold another entry that
    /// does.
    #[cold]
    #[inline(never)]
    fn lookup_in_table<'c>(&'c self, slot: &'c LeaseSlot, key: &Key) -> FastLookup<'c, S> {
        let index = self.index.find(key);
        let entry = self.index.entries.at(index);
        slot.last_found.store(index, Ordering::Relaxed);
        match self.lease_fast(slot, index, entry, key) {
            Some(leased) => FastLookup::Hit(leased),
            None if index == 0 => FastLookup::Miss,
            None => FastLookup::SlowPath { found: Some(index) },
        }
    }

    /// Publishes a lease of an entry. If the entry does not allow a fast hit or does not cover the
    /// key, ends the lease and returns `None`.
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

    /// Looks up `key` on the slow path: with a fence if the cache's lookups need one, and with
    /// validation by the backend if the entry needs it. Uses the entry `found` from a fast lookup's
    /// search, or searches the table if `found` is `None`. Returns `None` if the gate is closed, no
    /// usable entry covers the key, or no lease slot is available.
    #[inline]
    pub(super) fn lookup_slow<'c>(
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
        if self.may_hit(entry, slot, key) {
            slot.count_hit();
            return Some(LeasedEntry { entry, slot });
        }
        self.release_slow(entry, slot);
        None
    }

    /// Returns whether the entry is live, covers the key and passes the backend's validation. The
    /// caller must have published a lease of the entry in `slot`.
    pub(super) fn may_hit(&self, entry: &Entry<S>, slot: &LeaseSlot, key: &Key) -> bool {
        let word = entry.state.load(Ordering::Acquire);
        if !state::is_live(word) || !entry.covers(key) {
            return false;
        }
        if word & state::NEEDS_VALIDATION != 0 && !self.validate(entry, slot) {
            return false;
        }
        entry.mark_referenced(word);
        true
    }

    /// Asks the backend whether a live entry's registration is still current. If it is not, or if
    /// the backend cannot tell, invalidates the entry. If the backend panics, ends the lease. The
    /// caller must have published the lease in `slot` before it saw the entry live.
    #[inline(never)]
    fn validate(&self, entry: &Entry<S>, slot: &LeaseSlot) -> bool {
        let guard = ValidationGuard { core: self, leased: LeasedEntry { entry, slot } };
        // SAFETY: `may_hit` saw the entry live after its caller published a lease, which the caller
        // keeps until this returns.
        let is_current = self.backend.is_current(unsafe { entry.watch() });
        std::mem::forget(guard);
        match is_current {
            Ok(true) => return true,
            Ok(false) => {}
            Err(error) => tracing::debug!(%error, "cannot validate a cached region"),
        }
        self.mark_invalidated(self.index.entries.index_of(entry), InvalidationCause::Identity);
        false
    }

    /// Ends a lease without a fence. Lookups of the cache must need no fence.
    #[inline(always)]
    pub(super) fn release_fast(&self, entry: &Entry<S>, slot: &LeaseSlot) {
        slot.entry.store(0, Ordering::Release);
        sync::light_unfenced();
        self.wake_if_invalidated(entry);
    }

    /// Ends a lease, with a fence if lookups of the cache need one.
    pub(super) fn release_slow(&self, entry: &Entry<S>, slot: &LeaseSlot) {
        slot.entry.store(0, Ordering::Release);
        self.leases.barrier.light();
        self.wake_if_invalidated(entry);
    }

    /// Wakes the worker if the entry is invalidated. The entry may have been reused since the lease
    /// ended. Then the worker is woken without need, which is harmless.
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

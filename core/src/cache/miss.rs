//! Misses: a lookup that found no entry searches again under the lock. The lookup then hits, waits
//! for another thread's registration, or registers.

#![allow(unsafe_code, reason = "fills an entry that no lookup can see yet")]

use std::{ops::ControlFlow, sync::Arc};

use super::{
    backend::CacheBackend,
    cache_core::{CacheCore, LockedState, count},
    index::{
        entry::{self, state},
        radix,
    },
    key::Key,
    lease::{
        blocks::LeaseSlot,
        guard::{Lease, UncachedReason},
    },
    lookup::LeasedEntry,
    reclaim::state::{DetachedRegions, PendingCallbacks},
    sync::{MutexGuard, Ordering, fence_after_exchange},
};
use crate::{Error, ErrorKind, Result, monitor::Invalidator};

/// The number of times that a miss yields the processor while the gate is closed. After that, the
/// miss registers an uncached region.
const GATE_TRIES: u32 = 64;

/// A guard for the time in which the backend registers an entry's memory. If the backend panics,
/// the guard marks the registration as failed.
struct RegistrationGuard<'c, S: CacheBackend> {
    core: &'c CacheCore<S>,
    index: u32,
    /// The slot in which the registering thread published its lease of the entry.
    slot: &'c LeaseSlot,
    /// The watch of the entry's memory, which the drop of the guard ends. `None` before the watch
    /// starts, and when the registration has returned.
    watch: Option<S::Watch>,
}

impl<S: CacheBackend> Drop for RegistrationGuard<'_, S> {
    fn drop(&mut self) {
        if let Some(watch) = self.watch.take() {
            self.core.backend.unwatch(watch);
        }
        let panicked = Error::new(ErrorKind::BadState, "cached registration")
            .context("why", "another thread's registration of this memory panicked")
            .remedy("fix the iface or the provider that panicked, and register again");
        self.core.fail_registration(self.index, self.slot, Some(panicked));
    }
}

impl<S: CacheBackend> CacheCore<S> {
    /// Returns a lease of a region for a key that a lookup did not find. Tries these in turn:
    ///
    /// 1. If there is a [reason](CacheCore::bypass_reason) to bypass the cache, registers an
    ///    uncached region.
    /// 2. Searches the table once more. Leases an entry that another thread has registered
    ///    meanwhile, or waits for one that another thread is registering. Repeats the search if
    ///    that entry does not become usable.
    /// 3. Registers the key's memory.
    ///
    /// The lease slot `slot` must be free, and the caller must own the slot's block.
    #[cold]
    #[inline(never)]
    pub(super) fn register_missing<'c>(
        &'c self,
        invalidator: &Arc<dyn Invalidator>,
        slot: &'c LeaseSlot,
        key: &Key,
        owner: &S::Owner,
    ) -> Result<Lease<'c, S>> {
        key.check_owner()?;
        if let Some(reason) = self.bypass_reason() {
            return self.register_uncached(key, owner, reason);
        }
        let mut locked = self.state.lock();
        let index = self.index.find_locked(key);
        if index != 0 {
            locked = match self.wait_or_hit(locked, index, slot, (key, owner)) {
                ControlFlow::Continue(locked) => locked,
                ControlFlow::Break(lease) => return lease,
            };
        }
        self.register(locked, invalidator, slot, (key, owner), self.limits.merge)
    }

    /// Leases the entry `index`, which the caller found under the lock, and waits until the entry
    /// is registered. If that entry turns out to be unusable, continues with another entry that
    /// covers the key. Returns one of these:
    ///
    /// - `Break` with the lease of an entry, or with the error of the entry's registration.
    /// - `Break` with the result of an uncached registration, if the thread must not wait
    ///   ([`UncachedReason::InsideDeregistration`]), or an entry was unusable and there is now a
    ///   [reason](CacheCore::bypass_reason) to bypass the cache.
    /// - `Continue` with the lock, if no entry covers the key any more.
    #[cold]
    #[inline(never)]
    fn wait_or_hit<'c>(
        &'c self,
        mut locked: MutexGuard<'c, LockedState<S>>,
        mut index: u32,
        slot: &'c LeaseSlot,
        (key, owner): (&Key, &S::Owner),
    ) -> ControlFlow<Result<Lease<'c, S>>, MutexGuard<'c, LockedState<S>>> {
        while index != 0 {
            slot.publish(index);
            let leased = LeasedEntry { entry: self.index.entries.at(index), slot };
            let registering = leased.entry.state.load(Ordering::Acquire) & state::REGISTERING != 0;
            if registering && Self::is_deregistering() {
                drop(locked);
                self.release_slow(leased.entry, slot);
                let reason = UncachedReason::InsideDeregistration;
                return ControlFlow::Break(self.register_uncached(key, owner, reason));
            }
            if let Some(error) = self.wait_for_registration(locked, index, key) {
                count(&self.counters.failures);
                self.release_slow(leased.entry, slot);
                return ControlFlow::Break(Err(error));
            }
            self.leases.barrier.light();
            if self.may_hit(leased.entry, slot, key) {
                count(&self.counters.late_hits);
                return ControlFlow::Break(Ok(Lease::cached_slow(self, leased)));
            }
            self.release_slow(leased.entry, slot);
            if let Some(reason) = self.bypass_reason() {
                return ControlFlow::Break(self.register_uncached(key, owner, reason));
            }
            locked = self.state.lock();
            index = self.index.find_locked(key);
        }
        ControlFlow::Continue(locked)
    }

    /// Returns the reason why a miss cannot use the cache now, or `None` if the miss can. While the
    /// gate is closed, first yields the processor up to [`GATE_TRIES`] times, because an
    /// invalidation closes the gate only for a short time.
    #[inline]
    fn bypass_reason(&self) -> Option<UncachedReason> {
        let off = self.limits.max_count == 0 || self.limits.max_bytes == 0;
        if self.leases.gate.is_open() && !off { None } else { self.find_bypass_reason() }
    }

    #[cold]
    #[inline(never)]
    fn find_bypass_reason(&self) -> Option<UncachedReason> {
        let gate = &self.leases.gate;
        for _ in 0..GATE_TRIES {
            if gate.is_forked() {
                return Some(UncachedReason::Forked);
            }
            if self.limits.max_count == 0 || self.limits.max_bytes == 0 {
                return Some(UncachedReason::CachingOff);
            }
            if gate.is_open() {
                return None;
            }
            if gate.is_closed_permanently() {
                return Some(UncachedReason::MembarrierRefused);
            }
            std::thread::yield_now();
        }
        Some(UncachedReason::InvalidationInProgress)
    }

    /// Waits until the registration of an entry ends, and releases the lock. The caller must have
    /// leased the entry under the lock.
    ///
    /// Returns the registration's error if the registration failed and was for exactly the caller's
    /// range and rights. Returns `None` in these cases:
    ///
    /// - The registration succeeded, or failed without a recorded error.
    /// - The failed registration was for a larger range or for more rights. The caller's own
    ///   registration may then succeed.
    fn wait_for_registration<'a>(
        &'a self,
        mut locked: MutexGuard<'a, LockedState<S>>,
        index: u32,
        key: &Key,
    ) -> Option<Error> {
        let entry = self.index.entries.at(index);
        if entry.state.load(Ordering::Acquire) & state::REGISTERING == 0 {
            return None;
        }
        // The lease keeps the entry from being reused, so its state belongs to this registration.
        let mut word = entry.state.fetch_or(state::HAS_WAITERS, Ordering::AcqRel);
        while word & state::REGISTERING != 0 {
            locked = self.ended.wait(locked);
            word = entry.state.load(Ordering::Acquire);
        }
        let failed = word & state::FAILED != 0;
        let exact = entry.bounds() == (key.start, key.last) && entry.key().access == key.access;
        if failed && exact { locked.misses.failures.get(&index).cloned() } else { None }
    }

    /// Registers the memory of the key `own` in a new entry, and returns a lease of the entry. If
    /// `merge` is true, merges the key with entries that it overlaps or touches. If no entry can be
    /// created or the memory cannot be watched, registers an uncached region.
    fn register<'c>(
        &'c self,
        mut locked: MutexGuard<'c, LockedState<S>>,
        invalidator: &Arc<dyn Invalidator>,
        slot: &'c LeaseSlot,
        (own, owner): (&Key, &S::Owner),
        merge: bool,
    ) -> Result<Lease<'c, S>> {
        // Declared before `guard`, so that the callbacks run after the guard is dropped, even in a
        // panic.
        let mut callbacks = PendingCallbacks::new();
        let mut detached = DetachedRegions::new();
        let made = self.make_entry(&mut locked, own, merge, &mut detached);
        if let Ok(index) = made {
            locked.misses.registrations += 1;
            slot.publish(index);
        }
        // From this unlock on, invalidations find the new entry in the table.
        drop(locked);
        fence_after_exchange();
        let index = match made {
            Ok(index) => index,
            Err(reason) => {
                self.deregister(&mut detached, &mut callbacks);
                return self.register_uncached(own, owner, reason);
            }
        };
        let mut guard = RegistrationGuard { core: self, index, slot, watch: None };
        let mut kept = Some(self.deregister_before_watch(&mut detached, &mut callbacks));
        let entry = self.index.entries.at(index);
        let key = &if merge { entry.key() } else { *own };
        let merged = merge && (key.start, key.last) != (own.start, own.last);
        // An invalidation that begins after this point finds the entry in the table. An earlier one
        // that has not ended is found here.
        if let Some(cause) = self.active_invalidations.overlapping(key.start, key.last) {
            self.mark_invalidated(index, cause);
        }
        let watch_memory = || self.backend.watch(key, invalidator);
        let watch = watch_memory().or_else(|error| {
            // The end of the kept watch may be all the room that the monitor needs.
            let has_room = kept.take().is_some_and(|kept| kept.is_some());
            self.retry_after_eviction(error, has_room, &mut callbacks, watch_memory)
        });
        drop(kept);
        let watch = match watch {
            Ok(watch) => guard.watch.insert(watch),
            Err(why) => {
                std::mem::forget(guard);
                if merged {
                    self.mark_failed(index);
                    drop(callbacks);
                    return self.register_unmerged(invalidator, slot, (own, owner), &why);
                }
                self.fail_registration(index, slot, None);
                let region = self.register_in_backend(key, owner, None, &mut callbacks);
                self.recount_registration(region.is_ok());
                let reason = UncachedReason::Unwatched(why);
                return region.map(|region| Lease::uncached(self, region, reason));
            }
        };
        let flags = if self.backend.needs_validation(watch) { state::NEEDS_VALIDATION } else { 0 };
        let region = self.register_in_backend(key, owner, Some(watch), &mut callbacks);
        let watch = guard.watch.take().expect("the guard keeps the watch");
        let region = match region {
            Ok(region) => region,
            Err(error) => {
                self.backend.unwatch(watch);
                std::mem::forget(guard);
                if merged {
                    self.mark_failed(index);
                    drop(callbacks);
                    return self.register_unmerged(invalidator, slot, (own, owner), &error);
                }
                self.fail_registration(index, slot, Some(error.clone()));
                return Err(error);
            }
        };
        entry.registered_at_ms.store(entry::now_ms(), Ordering::Relaxed);
        // SAFETY: this thread made the entry, stores its registration once, and ends the
        // registration below.
        unsafe { entry.set_registration(region, watch) };
        std::mem::forget(guard);
        self.end_registration(index, flags);
        Ok(Lease::cached_slow(self, LeasedEntry { entry, slot }))
    }

    /// Registers only the range `own` after a merged registration failed. The failure may be due to
    /// adjacent memory, which the caller did not ask for.
    ///
    /// `slot` must still hold the lease of the failed entry. Code that this thread runs for the
    /// application meanwhile (a callback, or the drop of a memory's owner) may look up. The lease
    /// keeps such a lookup from taking the slot.
    #[cold]
    #[inline(never)]
    fn register_unmerged<'c>(
        &'c self,
        invalidator: &Arc<dyn Invalidator>,
        slot: &'c LeaseSlot,
        (own, owner): (&Key, &S::Owner),
        why: &Error,
    ) -> Result<Lease<'c, S>> {
        tracing::debug!(%why, range = %own.range(), "a merged registration failed: not merging");
        let mut locked = self.state.lock();
        // From here until the next lease is published, this thread runs no code of the application.
        slot.entry.store(0, Ordering::Release);
        self.waker.wake();
        // This undoes the count of the failed registration: the lookup is counted by its final
        // outcome.
        locked.misses.registrations -= 1;
        let index = self.index.find_locked(own);
        if index != 0 {
            locked = match self.wait_or_hit(locked, index, slot, (own, owner)) {
                ControlFlow::Continue(locked) => locked,
                ControlFlow::Break(lease) => return lease,
            };
        }
        self.register(locked, invalidator, slot, (own, owner), false)
    }

    /// Ends the registration of an entry: clears REGISTERING and sets `flags` in its state word,
    /// and wakes the threads that wait for it.
    fn end_registration(&self, index: u32, flags: u32) {
        let end = |word| Some(word & !(state::REGISTERING | state::HAS_WAITERS) | flags);
        let entry = self.index.entries.at(index);
        let (Ok(before) | Err(before)) =
            entry.state.fetch_update(Ordering::AcqRel, Ordering::Relaxed, end);
        if before & state::HAS_WAITERS != 0 {
            let _between_their_test_and_their_wait = self.state.lock();
            self.ended.notify_all();
        }
    }

    /// Ends a registration that produced no region. The waiting threads search the table again. A
    /// thread that then finds no entry registers its own range.
    ///
    /// If `error` is `Some`, the statistics count the miss as a failure. The waiting threads that
    /// asked for exactly the entry's range and rights then return the error instead of searching
    /// again.
    ///
    /// If `error` is `None`, the statistics still count the miss as a registration, and the caller
    /// must correct them.
    #[cold]
    #[inline(never)]
    fn fail_registration(&self, index: u32, slot: &LeaseSlot, error: Option<Error>) {
        if let Some(error) = error {
            self.state.lock().misses.failures.insert(index, error);
            self.recount_registration(false);
        }
        self.mark_failed(index);
        slot.entry.store(0, Ordering::Release);
        let mut detached = DetachedRegions::new();
        let mut locked = self.state.lock();
        self.detach_invalidated(&mut locked, &mut detached);
        drop(locked);
        self.deregister(&mut detached, &mut PendingCallbacks::new());
    }

    /// Ends a registration that produced no region, but keeps the lease of the entry.
    fn mark_failed(&self, index: u32) {
        if self.index.entries.at(index).mark_invalidated(|_| true) {
            self.push_invalidated(index);
        }
        self.end_registration(index, state::FAILED);
    }

    /// Corrects the statistics of a miss that was counted as a registration. Counts the miss as an
    /// uncached one if `registered` is true, otherwise as a failed one. Changes both counts under
    /// the lock, so that the sum stays right.
    fn recount_registration(&self, registered: bool) {
        let mut locked = self.state.lock();
        locked.misses.registrations -= 1;
        count(if registered { &self.counters.uncached } else { &self.counters.failures });
    }

    /// Registers an uncached region for a thread that gets no lease slot, because the thread is
    /// exiting, all lease blocks are in use, or the process is a forked child.
    pub(super) fn register_without_slot(
        &self,
        key: &Key,
        owner: &S::Owner,
    ) -> Result<Lease<'_, S>> {
        key.check_owner()?;
        self.register_uncached(key, owner, self.bypass_reason().unwrap_or(UncachedReason::Full))
    }

    /// Registers an uncached region, which is deregistered when its lease ends.
    #[cold]
    #[inline(never)]
    fn register_uncached(
        &self,
        key: &Key,
        owner: &S::Owner,
        reason: UncachedReason,
    ) -> Result<Lease<'_, S>> {
        let region = match reason {
            UncachedReason::Forked => self.backend.register(key, owner, None),
            _ => self.register_in_backend(key, owner, None, &mut PendingCallbacks::new()),
        };
        count(if region.is_ok() { &self.counters.uncached } else { &self.counters.failures });
        region.map(|region| Lease::uncached(self, region, reason))
    }

    /// Calls the backend to register the memory. On `OutOfResources`, evicts idle entries, reclaims
    /// invalidated ones and waits for deregistrations in flight. If this ended any registration,
    /// calls the backend once more.
    #[inline]
    fn register_in_backend(
        &self,
        key: &Key,
        owner: &S::Owner,
        watch: Option<&S::Watch>,
        callbacks: &mut PendingCallbacks,
    ) -> Result<S::Region> {
        let register = || self.backend.register(key, owner, watch);
        register().or_else(|error| self.retry_after_eviction(error, false, callbacks, register))
    }

    /// Repeats a call of the backend that failed with `error`, as
    /// [`CacheCore::register_in_backend`] describes, or if `has_room` is true. Otherwise returns
    /// the error.
    #[cold]
    #[inline(never)]
    fn retry_after_eviction<T>(
        &self,
        error: Error,
        has_room: bool,
        callbacks: &mut PendingCallbacks,
        call: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if error.kind() != ErrorKind::OutOfResources
            || !(self.evict_all_idle(callbacks) || has_room)
        {
            return Err(error);
        }
        tracing::debug!(%error, "evicted idle cached regions; trying once more");
        call()
    }

    /// Creates an entry for the key and inserts it into the table. If `merge` is true, the entry
    /// also replaces the entries that [`CacheCore::merge`] merges with the key. Appends the regions
    /// of evicted entries, and of some invalidated ones, to `detached`. Returns the reason if no
    /// entry can be created.
    fn make_entry(
        &self,
        locked: &mut LockedState<S>,
        key: &Key,
        merge: bool,
        detached: &mut DetachedRegions<S>,
    ) -> Result<u32, UncachedReason> {
        if key.len() > self.limits.max_bytes {
            return Err(UncachedReason::TooLong);
        }
        let mut pages = radix::pages(key.start, key.last).ok_or(UncachedReason::CrossesIndexEnd)?;
        self.drain_invalidated(locked);
        self.detach_for_miss(locked, detached);
        let mut key = *key;
        if merge {
            key = self.merge(locked, &key, detached);
            pages = radix::pages(key.start, key.last).ok_or(UncachedReason::CrossesIndexEnd)?;
        }
        let (first, last) = pages;
        if !self.make_room(locked, key.len(), detached) {
            return Err(UncachedReason::Full);
        }
        let entries = &self.index.entries;
        let index = match locked.index.free.pop() {
            Some(index) => index,
            None if entries.ensure(locked.index.created + 1) => {
                locked.index.created += 1;
                locked.index.created
            }
            None => {
                // The worker may not have freed the invalidated entries yet, so this thread frees
                // them.
                self.detach_invalidated(locked, detached);
                locked.index.free.pop().ok_or(UncachedReason::Full)?
            }
        };
        let entry = entries.at(index);
        entry.fill(&key);
        let locked = &mut locked.index;
        if !self.index.radix.insert(&mut locked.radix, first, last, index) {
            if entry.mark_invalidated(|_| true) {
                entry.free();
                locked.free.push(index);
            } else {
                // An invalidation found the entry and pushed it on the stack. The entry counts for
                // the limits until the stack is drained.
                locked.count += 1;
                locked.bytes += key.len();
                entry.state.fetch_xor(state::REGISTERING | state::FAILED, Ordering::AcqRel);
            }
            return Err(UncachedReason::Full);
        }
        locked.count += 1;
        locked.bytes += key.len();
        Ok(index)
    }

    /// Returns the key, extended over the live entries that overlap or touch it and have the same
    /// rights, iface, device and allocation. Repeats this until the extended key reaches no further
    /// entry. Skips an entry if the key would exceed the limit of bytes or the backend's largest
    /// length. Invalidates the merged entries, and appends the regions of those without a lease to
    /// `detached`.
    #[cold]
    #[inline(never)]
    fn merge(
        &self,
        locked: &mut LockedState<S>,
        key: &Key,
        detached: &mut DetachedRegions<S>,
    ) -> Key {
        let mut merged = *key;
        let mut replaced = Vec::new();
        loop {
            let before = merged;
            let start = merged.start.saturating_sub(1);
            let Some((first, last)) = radix::pages(start, merged.last.saturating_add(1)) else {
                break;
            };
            let mut near = Vec::new();
            self.index.radix.walk(first, last, &mut |index| near.push(index));
            for index in near {
                let entry = self.index.entries.at(index);
                let other = entry.key();
                let live = state::is_live(entry.state.load(Ordering::Acquire));
                if !live || replaced.contains(&index) || !other.is_mergeable_with(&merged) {
                    continue;
                }
                let start = merged.start.min(other.start);
                let union = Key { start, last: merged.last.max(other.last), ..merged };
                if union.len() > self.limits.max_bytes.min(self.backend.max_len()) {
                    continue;
                }
                merged = union;
                replaced.push(index);
            }
            if merged == before {
                break;
            }
        }
        if replaced.is_empty() {
            return merged;
        }
        for index in replaced {
            if self.index.entries.at(index).mark_invalidated(|_| true) {
                count(&self.counters.merged);
                self.push_invalidated(index);
            }
        }
        // The entries are replaced even if the key contained all of them.
        self.detach_invalidated(locked, detached);
        merged
    }
}

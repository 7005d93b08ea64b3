//! Eviction: ends idle entries to make room.

use super::{
    super::{
        backend::CacheBackend,
        cache_core::{CacheCore, LockedState},
        index::entry::{Entry, state},
        sync::Ordering,
    },
    state::{DetachedRegions, PendingCallbacks},
};

/// The divisor of a batch: an eviction evicts one in this many of all entries, even if fewer are
/// needed, so that they share one barrier.
const BATCH_PART: usize = 16;
/// The largest number of entries in a batch.
pub(super) const MAX_BATCH: usize = 64;

/// The goal of an eviction.
struct EvictionGoal {
    /// The smallest number of entries to evict.
    count: usize,
    /// The smallest number of bytes that the evicted entries must have together.
    bytes: u64,
    /// Set if referenced entries are evicted too: entries that were hit since the clock hand last
    /// passed.
    referenced: bool,
    /// Set if other threads may look up during the eviction.
    other_lookups: bool,
}

impl<S: CacheBackend> CacheCore<S> {
    /// Evicts until one more entry of `len` bytes fits. Returns `false` if the rest is in use.
    #[inline]
    pub(in crate::cache) fn make_room(
        &self,
        locked: &mut LockedState<S>,
        len: u64,
        detached: &mut DetachedRegions<S>,
    ) -> bool {
        self.fits(locked, len) || self.evict_for(locked, len, detached)
    }

    #[inline]
    fn fits(&self, locked: &LockedState<S>, len: u64) -> bool {
        locked.index.count < self.limits.max_count
            && locked.index.bytes.saturating_add(len) <= self.limits.max_bytes
    }

    #[inline(never)]
    fn evict_for(
        &self,
        locked: &mut LockedState<S>,
        len: u64,
        detached: &mut DetachedRegions<S>,
    ) -> bool {
        // The caller is one of the owners. Their number is read before the slots, so that the scan
        // sees what former owners did.
        let other_lookups = self.leases.blocks.owners() > 1;
        if !self.has_idle(locked) {
            return false;
        }
        // The clock hand makes up to two rounds, because the first round may only clear reference
        // bits.
        let mut steps = 2 * locked.index.made as usize + 1;
        while !self.fits(locked, len) && steps > 0 {
            let bytes =
                locked.index.bytes.saturating_add(len).saturating_sub(self.limits.max_bytes);
            let count = (locked.index.count / BATCH_PART).clamp(1, MAX_BATCH);
            let goal = EvictionGoal { count, bytes, referenced: false, other_lookups };
            self.evict(locked, &goal, &mut steps, detached);
        }
        self.fits(locked, len)
    }

    /// Evicts entries that [`CacheCore::has_idle`] did not mark as leased, until the goal is met or
    /// `steps` is 0.
    fn evict(
        &self,
        locked: &mut LockedState<S>,
        goal: &EvictionGoal,
        steps: &mut usize,
        detached: &mut DetachedRegions<S>,
    ) {
        detached.reserve(goal.count.min(locked.index.count).min(MAX_BATCH));
        if goal.other_lookups {
            self.evict_beside_lookups(locked, goal, steps, detached);
            return;
        }
        // No other thread can have taken a lease since `has_idle`.
        let (mut count, mut bytes) = (0, 0);
        while (count < goal.count || bytes < goal.bytes)
            && let Some((index, word)) = self.next_idle(locked, goal.referenced, steps)
        {
            let entry = self.index.entries.at(index);
            // An entry that is invalidated at this moment is collected later.
            if self.end_entry(locked, entry, word) {
                bytes += entry.len();
                self.detach_region(locked, index, detached);
                count += 1;
            }
        }
    }

    fn evict_beside_lookups(
        &self,
        locked: &mut LockedState<S>,
        goal: &EvictionGoal,
        steps: &mut usize,
        detached: &mut DetachedRegions<S>,
    ) {
        let mut candidates = std::mem::take(&mut locked.reclaim.eviction.candidates);
        let mut bytes = 0;
        while (candidates.len() < goal.count || bytes < goal.bytes)
            && let Some((index, word)) = self.next_idle(locked, goal.referenced, steps)
        {
            let entry = self.index.entries.at(index);
            let marked = word | state::EVICTING;
            if entry
                .state
                .compare_exchange(word, marked, Ordering::SeqCst, Ordering::Relaxed)
                .is_ok()
            {
                candidates.push(index);
                bytes += entry.len();
            }
        }
        let scanned = !candidates.is_empty() && self.heavy_barrier();
        if scanned {
            self.scan(locked);
        }
        let scan = locked.reclaim.eviction.scan;
        for index in candidates.drain(..) {
            let entry = self.index.entries.at(index);
            let word = entry.state.load(Ordering::Acquire);
            let idle = scanned && entry.leased_at_scan.load(Ordering::Relaxed) != scan;
            // An entry that was invalidated meanwhile is collected later.
            if idle && word & state::INVALIDATED == 0 && self.end_entry(locked, entry, word) {
                self.detach_region(locked, index, detached);
            } else {
                entry.state.fetch_and(!state::EVICTING, Ordering::Release);
            }
        }
        locked.reclaim.eviction.candidates = candidates;
    }

    /// Moves the clock hand to the next live entry that had no lease at the last scan. Returns the
    /// entry and its state. Spares referenced entries once, unless `referenced` is true.
    fn next_idle(
        &self,
        locked: &mut LockedState<S>,
        referenced: bool,
        steps: &mut usize,
    ) -> Option<(u32, u32)> {
        let (eviction, made) = (&mut locked.reclaim.eviction, locked.index.made);
        while *steps > 0 {
            *steps -= 1;
            eviction.hand = if eviction.hand >= made { 1 } else { eviction.hand + 1 };
            let entry = self.index.entries.at(eviction.hand);
            let word = entry.state.load(Ordering::Acquire);
            let leased = entry.leased_at_scan.load(Ordering::Relaxed) == eviction.scan;
            if !state::is_live(word) || leased {
                continue;
            }
            if referenced || word & state::UNREFERENCED != 0 {
                return Some((eviction.hand, word));
            }
            entry.state.fetch_or(state::UNREFERENCED, Ordering::Relaxed);
        }
        None
    }

    /// Ends the use of an idle entry if its state is still `word`. The entry then counts no more,
    /// and the caller passes it to [`CacheCore::detach_region`].
    fn end_entry(&self, locked: &mut LockedState<S>, entry: &Entry<S>, word: u32) -> bool {
        let (ok, seen) = (Ordering::AcqRel, Ordering::Relaxed);
        let ended = entry.state.compare_exchange(word, state::ended(word), ok, seen).is_ok();
        if ended {
            locked.index.count -= 1;
            locked.index.bytes -= entry.len();
            locked.reclaim.eviction.evictions += 1;
        }
        ended
    }

    /// Marks the entries that have a lease, as far as a scan without a barrier shows. Returns
    /// whether there are other entries.
    fn has_idle(&self, locked: &mut LockedState<S>) -> bool {
        let eviction = &mut locked.reclaim.eviction;
        eviction.scan = eviction.scan.wrapping_add(1);
        let scan = eviction.scan;
        let mut busy = 0;
        self.leases.blocks.for_each_lease(|index| {
            let entry = self.index.entries.at(index);
            let word = entry.state.load(Ordering::Relaxed);
            let counts = word & (state::FREE | state::INVALIDATED) == 0;
            if counts && entry.leased_at_scan.load(Ordering::Relaxed) != scan {
                entry.leased_at_scan.store(scan, Ordering::Relaxed);
                busy += 1;
            }
        });
        busy < locked.index.count
    }

    /// Issues the heavy barrier. After the barrier, no lookup leases an entry that was made
    /// unusable before it. Returns `false` if the kernel refuses the barrier.
    pub(super) fn heavy_barrier(&self) -> bool {
        let issued = self.leases.barrier.heavy();
        // Without the barrier the cache cannot rule out leases: all regions stay registered, and
        // lookups find none. The gate is closed once, however often the kernel refuses, because the
        // count of closes must not overflow.
        if !issued && self.leases.gate.close_permanently() {
            tracing::error!(
                "membarrier is refused after it worked: the registration cache is closed for good, \
                 and its regions stay registered until it is dropped; let the process call \
                 membarrier(2), or open the domain after the filter is installed"
            );
        }
        issued
    }

    /// Marks every entry that has a lease with the scan's number. The caller issued a [heavy
    /// barrier](CacheCore::heavy_barrier) before.
    pub(super) fn scan(&self, locked: &mut LockedState<S>) {
        let eviction = &mut locked.reclaim.eviction;
        eviction.scan = eviction.scan.wrapping_add(1);
        let scan = eviction.scan;
        self.leases.blocks.for_each_lease(|index| {
            self.index.entries.at(index).leased_at_scan.store(scan, Ordering::Relaxed);
        });
    }

    /// Evicts all idle entries and waits for deregistrations in flight. Returns `false` if there
    /// was neither.
    pub(in crate::cache) fn evict_all_idle(&self, callbacks: &mut PendingCallbacks) -> bool {
        if self.leases.gate.is_forked() {
            return false;
        }
        let mut detached = DetachedRegions::new();
        let mut locked = self.state.lock();
        let others = self.in_flight.any(locked.reclaim.detached);
        self.collect(&mut locked, &mut detached);
        // The number of owners is read before the slots, so that the scan sees what former owners
        // did.
        let other_lookups = self.leases.blocks.owners() > 0;
        let mut steps = if self.has_idle(&mut locked) { locked.index.made as usize } else { 0 };
        let goal =
            EvictionGoal { count: usize::MAX, bytes: u64::MAX, referenced: true, other_lookups };
        while steps > 0 {
            self.evict(&mut locked, &goal, &mut steps, &mut detached);
        }
        drop(locked);
        let any = !detached.is_empty();
        self.deregister(&mut detached, callbacks);
        self.wait_for_deregistrations();
        any || others
    }

    /// Deregisters all regions, including those of forgotten leases. Only for the cache's drop.
    pub(in crate::cache) fn deregister_all(&self) {
        self.evict_all_idle(&mut PendingCallbacks::new());
        let mut detached = DetachedRegions::new();
        let mut locked = self.state.lock();
        for index in 1..=locked.index.made {
            let word = self.index.entries.at(index).state.load(Ordering::Acquire);
            if state::is_registered(word) {
                self.detach_region(&mut locked, index, &mut detached);
            }
        }
        drop(locked);
        self.deregister(&mut detached, &mut PendingCallbacks::new());
        let refused = std::mem::take(&mut self.state.lock().reclaim.refused);
        for mut region in refused {
            if let Some(watch) = region.watch.take() {
                self.backend.unwatch(watch);
            }
        }
    }
}

//! Eviction: frees idle entries to make room.

use super::{
    super::{
        backend::CacheBackend,
        cache_core::{CacheCore, LockedState},
        index::entry::{Entry, state},
        sync::Ordering,
    },
    state::{DetachedRegions, PendingCallbacks},
};

/// The divisor that gives the batch size of an eviction: the number of all entries divided by this,
/// but at least 1 and at most [`MAX_BATCH`]. An eviction evicts a whole batch even if fewer entries
/// are needed, because all entries of a batch share one expensive heavy barrier.
const BATCH_PART: usize = 16;
/// The largest batch size of an eviction by a miss. The miss evicts more entries only if it needs
/// more bytes.
///
/// This number also limits the detached regions that wait for the worker. A miss that reaches the
/// limit deregisters these regions itself.
pub(super) const MAX_BATCH: usize = 64;

/// The parameters of one eviction: how much to evict, from which entries, and whether a heavy
/// barrier is needed.
struct EvictionGoal {
    /// The smallest number of entries to evict.
    count: usize,
    /// The smallest total size of the evicted entries in bytes.
    bytes: u64,
    /// True to evict referenced entries too: those with a hit since the clock hand last passed.
    referenced: bool,
    /// True if other threads may look up during the eviction. The eviction then needs a heavy
    /// barrier.
    other_lookups: bool,
}

impl<S: CacheBackend> CacheCore<S> {
    /// Evicts entries until one more entry of `len` bytes fits the limits. Returns `false` if the
    /// entry does not fit, because the remaining entries have leases or are being registered, or
    /// because the heavy barrier failed. The calling thread must own a lease block.
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
        // This thread owns a lease block itself.
        let other_lookups = self.leases.blocks.owners() > 1;
        if !self.has_idle(locked) {
            return false;
        }
        // The clock hand makes up to two rounds, because it may only mark entries as unreferenced
        // in the first.
        let mut steps = 2 * locked.index.created as usize + 1;
        while !self.fits(locked, len) && steps > 0 {
            let bytes =
                locked.index.bytes.saturating_add(len).saturating_sub(self.limits.max_bytes);
            let count = (locked.index.count / BATCH_PART).clamp(1, MAX_BATCH);
            let goal = EvictionGoal { count, bytes, referenced: false, other_lookups };
            self.evict(locked, &goal, &mut steps, detached);
        }
        self.fits(locked, len)
    }

    /// Evicts idle entries until the goal is met or `steps` is 0. `steps` is the number of entries
    /// that the clock hand may still pass. Idle entries are those that [`CacheCore::has_idle`] did
    /// not mark as leased. The eviction may miss the goal if other threads lease or invalidate some
    /// of them meanwhile.
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
        // No other thread may look up, so none has taken a lease since `has_idle`.
        let (mut count, mut bytes) = (0, 0);
        while (count < goal.count || bytes < goal.bytes)
            && let Some((index, word)) = self.next_idle(locked, goal.referenced, steps)
        {
            let entry = self.index.entries.at(index);
            // If the entry was invalidated meanwhile, it is reclaimed later as an invalidated
            // entry.
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
        let scan = locked.reclaim.eviction.last_scan;
        for index in candidates.drain(..) {
            let entry = self.index.entries.at(index);
            let word = entry.state.load(Ordering::Acquire);
            let idle = scanned && entry.leased_at_scan.load(Ordering::Relaxed) != scan;
            // If the entry was invalidated meanwhile, it is reclaimed later as an invalidated
            // entry.
            if idle && word & state::INVALIDATED == 0 && self.end_entry(locked, entry, word) {
                self.detach_region(locked, index, detached);
            } else {
                entry.state.fetch_and(!state::EVICTING, Ordering::Release);
            }
        }
        locked.reclaim.eviction.candidates = candidates;
    }

    /// Moves the clock hand to the next live entry that had no lease at the last scan. Returns the
    /// entry's index and state word. Unless `referenced` is true, passes over referenced entries
    /// and marks them unreferenced. Returns `None` when no steps are left.
    fn next_idle(
        &self,
        locked: &mut LockedState<S>,
        referenced: bool,
        steps: &mut usize,
    ) -> Option<(u32, u32)> {
        let (eviction, created) = (&mut locked.reclaim.eviction, locked.index.created);
        while *steps > 0 {
            *steps -= 1;
            eviction.hand = if eviction.hand >= created { 1 } else { eviction.hand + 1 };
            let entry = self.index.entries.at(eviction.hand);
            let word = entry.state.load(Ordering::Acquire);
            let leased = entry.leased_at_scan.load(Ordering::Relaxed) == eviction.last_scan;
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

    /// Makes an idle entry unusable if its state word is still `word`. Returns whether this call
    /// did that. The entry then no longer counts for the limits, and the caller must pass it to
    /// [`CacheCore::detach_region`].
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

    /// Marks the leased entries by a scan without a heavy barrier, which may miss new leases.
    /// Returns whether any entry that counts for the limits has no lease.
    fn has_idle(&self, locked: &mut LockedState<S>) -> bool {
        let scan = locked.reclaim.eviction.begin_scan();
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

    /// Issues the heavy barrier. For entries that were made unusable before the barrier, no lookup
    /// gets a lease after the barrier, and a scan sees all leases that exist. If the kernel refuses
    /// the barrier, permanently closes the gate, which disables all hits, and returns `false`.
    pub(super) fn heavy_barrier(&self) -> bool {
        let issued = self.leases.barrier.heavy();
        // Without the heavy barrier the cache cannot rule out leases: all regions stay registered,
        // and lookups find none. The gate has a separate bit for this, because the kernel may
        // refuse so often that a count of closes would overflow.
        if !issued && self.leases.gate.close_permanently() {
            tracing::error!(
                "the kernel refuses membarrier(2), which it allowed before: the registration cache \
                 is closed permanently, and its regions stay registered until it is dropped; let \
                 the process call membarrier(2), or open the domain after the seccomp filter is \
                 installed"
            );
        }
        issued
    }

    /// Scans all lease slots and marks each leased entry with the scan's number. The caller must
    /// have issued a [heavy barrier](CacheCore::heavy_barrier) before, unless no other thread may
    /// look up.
    pub(super) fn scan(&self, locked: &mut LockedState<S>) {
        let scan = locked.reclaim.eviction.begin_scan();
        self.leases.blocks.for_each_lease(|index| {
            self.index.entries.at(index).leased_at_scan.store(scan, Ordering::Relaxed);
        });
    }

    /// Evicts all idle entries, reclaims invalidated ones, and waits for the deregistrations that
    /// other threads have begun. Returns `false` if there was nothing to deregister or to wait for,
    /// or in a forked child. Moves the callbacks whose wait has ended to `callbacks`.
    pub(in crate::cache) fn evict_all_idle(&self, callbacks: &mut PendingCallbacks) -> bool {
        let any = self.deregister_idle(callbacks);
        if any {
            self.wait_for_deregistrations();
        }
        any
    }

    /// Evicts and waits like [`CacheCore::evict_all_idle`], but runs the callbacks before it waits.
    pub(in crate::cache) fn evict_idle(&self) {
        if self.deregister_idle(&mut PendingCallbacks::new()) {
            self.wait_for_deregistrations();
        }
    }

    /// Evicts all idle entries and reclaims invalidated ones. Returns `false` if there was nothing
    /// to deregister and no deregistration in flight, or in a forked child.
    fn deregister_idle(&self, callbacks: &mut PendingCallbacks) -> bool {
        if self.leases.gate.is_forked() {
            return false;
        }
        let mut detached = DetachedRegions::new();
        let mut locked = self.state.lock();
        let others = self.in_flight.any(&locked.reclaim.begun);
        self.detach_invalidated(&mut locked, &mut detached);
        let other_lookups = self.leases.blocks.owners() > 0;
        let mut steps = if self.has_idle(&mut locked) { locked.index.created as usize } else { 0 };
        let goal =
            EvictionGoal { count: usize::MAX, bytes: u64::MAX, referenced: true, other_lookups };
        while steps > 0 {
            self.evict(&mut locked, &goal, &mut steps, &mut detached);
        }
        drop(locked);
        let any = !detached.is_empty();
        self.deregister(&mut detached, callbacks);
        any || others
    }

    /// Deregisters all cached regions, even those of leaked leases. Regions that the backend
    /// refuses to deregister stay registered. Only the drop of the cache may call this.
    pub(in crate::cache) fn deregister_all(&self) {
        self.evict_idle();
        let mut detached = DetachedRegions::new();
        let mut locked = self.state.lock();
        for index in 1..=locked.index.created {
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

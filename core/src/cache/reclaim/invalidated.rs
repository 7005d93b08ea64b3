//! Reclamation of invalidated entries: detaches and deregisters the regions of those without a
//! lease.

use std::sync::Arc;

use super::{
    super::{
        backend::CacheBackend,
        cache_core::{CacheCore, LockedState},
        index::{entry::state, radix},
        sync::Ordering,
    },
    evict::MAX_BATCH,
    state::{
        BegunCounter, CompletionCallback, DetachedRegion, DetachedRegions, PendingCallbacks,
        ReclaimState,
    },
};
use crate::AddressRange;

/// The number of new pending entries at which a miss issues a heavy barrier to detach their
/// regions. New entries are those beyond the ones that the last attempt left pending
/// (`leased_pending`).
#[cfg(not(loom))]
const DETACH_THRESHOLD: usize = 8;
#[cfg(loom)]
const DETACH_THRESHOLD: usize = 1;

/// Moves detached regions that waited for a deregistration to `detached`, and counts their
/// deregistrations as begun.
fn begin_again<S: CacheBackend>(
    waiting: &mut Vec<DetachedRegion<S>>,
    begun: &mut BegunCounter,
    detached: &mut DetachedRegions<S>,
) {
    let epoch = begun.begin(waiting.len());
    detached.extend(waiting.drain(..).map(|region| DetachedRegion { epoch, ..region }));
}

impl<S: CacheBackend> CacheCore<S> {
    /// Moves all entries from the stack of invalidated entries to `pending_entries`, the list of
    /// invalidated entries whose regions are not detached yet. Entries in the list do not count for
    /// the limits.
    pub(in crate::cache) fn drain_invalidated(&self, locked: &mut LockedState<S>) {
        let mut index = self.invalidated.take_all();
        if index == 0 {
            return;
        }
        let LockedState { index: counts, reclaim, .. } = locked;
        reclaim.drain_count += 1;
        while index != 0 {
            let entry = self.index.entries.at(index);
            counts.count -= 1;
            counts.bytes -= entry.len();
            reclaim.pending_entries.push((index, reclaim.drain_count));
            index = entry.next_invalidated.load(Ordering::Relaxed);
        }
    }

    /// Prepares a reclamation. Drains the stack of invalidated entries into the list of pending
    /// entries. Moves the regions that are already detached to `detached`: those that the backend
    /// refused to deregister, and those that a miss left to the worker. Returns `false` if no entry
    /// is pending.
    fn begin_reclaim(
        &self,
        locked: &mut LockedState<S>,
        detached: &mut DetachedRegions<S>,
    ) -> bool {
        self.drain_invalidated(locked);
        let ReclaimState { refused, left_to_worker, begun, busy, .. } = &mut locked.reclaim;
        *busy = false;
        begin_again(refused, begun, detached);
        begin_again(left_to_worker, begun, detached);
        !locked.reclaim.pending_entries.is_empty()
    }

    /// Detaches the regions of pending entries during a miss.
    ///
    /// Needs [`DETACH_THRESHOLD`] entries that became pending since the last attempt. One is enough
    /// if no other thread may look up, because no heavy barrier is then needed. Leaves the detached
    /// regions to the worker. If [`MAX_BATCH`] regions or more then wait for the worker, moves all
    /// of them to `detached`, for the caller. The calling thread must own a lease block.
    ///
    /// This keeps the chains of the table short. New memory is often mapped where old memory was
    /// unmapped, so the invalidated entries of the old memory would otherwise pile up in one chain.
    #[inline]
    pub(in crate::cache) fn detach_for_miss(
        &self,
        locked: &mut LockedState<S>,
        detached: &mut DetachedRegions<S>,
    ) {
        if locked.reclaim.pending_entries.len() > locked.reclaim.leased_pending {
            self.detach_pending_for_miss(locked, detached);
        }
    }

    #[cold]
    #[inline(never)]
    fn detach_pending_for_miss(
        &self,
        locked: &mut LockedState<S>,
        detached: &mut DetachedRegions<S>,
    ) {
        // This thread owns a lease block itself.
        let only_owner = self.leases.blocks.owners() == 1;
        let reclaim = &locked.reclaim;
        let crowd = reclaim.pending_entries.len() >= reclaim.leased_pending + DETACH_THRESHOLD;
        if !(only_owner || crowd && self.heavy_barrier()) {
            return;
        }
        let mut left = DetachedRegions::new();
        self.detach_pending(locked, locked.reclaim.drain_count, &mut left);
        if left.is_empty() {
            return;
        }
        let ReclaimState { left_to_worker, begun, .. } = &mut locked.reclaim;
        begun.undo(left.len());
        left_to_worker.extend(left);
        if left_to_worker.len() < MAX_BATCH {
            // The worker may have gone to sleep since the invalidations.
            self.waker.wake();
        } else {
            begin_again(left_to_worker, begun, detached);
        }
    }

    /// Detaches the regions of invalidated entries without a lease. Appends these regions, and the
    /// regions that wait for deregistration, to `detached`. Detaches nothing if the heavy barrier
    /// fails.
    pub(in crate::cache) fn detach_invalidated(
        &self,
        locked: &mut LockedState<S>,
        detached: &mut DetachedRegions<S>,
    ) {
        if self.begin_reclaim(locked, detached) && self.heavy_barrier() {
            self.detach_pending(locked, locked.reclaim.drain_count, detached);
        }
    }

    /// Detaches the regions of pending entries without a lease. Skips entries that are being
    /// registered, and entries that a drain after the drain number `drain_count` added.
    ///
    /// Unless no other thread may look up, the caller must have issued a heavy barrier after the
    /// drain number `drain_count`.
    fn detach_pending(
        &self,
        locked: &mut LockedState<S>,
        drain_count: u64,
        detached: &mut DetachedRegions<S>,
    ) {
        self.scan(locked);
        let scan = locked.reclaim.eviction.last_scan;
        let mut pending_entries = std::mem::take(&mut locked.reclaim.pending_entries);
        pending_entries.retain(|&(index, drain)| {
            let entry = self.index.entries.at(index);
            let word = entry.state.load(Ordering::Acquire);
            let leased = entry.leased_at_scan.load(Ordering::Relaxed) == scan;
            if drain > drain_count || word & state::REGISTERING != 0 || leased {
                return true;
            }
            if word & state::FAILED == 0 {
                self.detach_region(locked, index, detached);
            } else {
                self.detach_failed(locked, index, detached);
            }
            false
        });
        locked.reclaim.leased_pending = pending_entries.len();
        locked.reclaim.pending_entries = pending_entries;
    }

    /// Deregisters the regions of invalidated entries without a lease, and retries those that the
    /// backend refused. Waits for the deregistrations that other threads have begun.
    pub(in crate::cache) fn reclaim(&self) {
        if self.leases.gate.is_forked() {
            return;
        }
        // Another thread may be retrying a refused region that was in use until just now. If the
        // backend refuses again, this call retries the region after that thread.
        self.wait_for_deregistrations();
        let mut detached = DetachedRegions::new();
        let mut locked = self.state.lock();
        self.detach_invalidated(&mut locked, &mut detached);
        drop(locked);
        self.deregister(&mut detached, &mut PendingCallbacks::new());
        self.wait_for_deregistrations();
    }

    /// Reclaims invalidated entries once, for the worker. Issues the heavy barrier without the
    /// lock, so that no miss waits for this barrier, a system call that interrupts every processor.
    pub(in crate::cache) fn reclaim_once(&self) {
        let mut detached = DetachedRegions::new();
        let mut locked = self.state.lock();
        if self.begin_reclaim(&mut locked, &mut detached) {
            let drain_count = locked.reclaim.drain_count;
            drop(locked);
            let issued = self.heavy_barrier();
            locked = self.state.lock();
            if issued {
                self.detach_pending(&mut locked, drain_count, &mut detached);
            }
        }
        drop(locked);
        self.deregister(&mut detached, &mut PendingCallbacks::new());
    }

    /// Invalidates the entries that contain a byte of the range. Runs `callback` when all of them
    /// are deregistered, and the deregistrations that began before this call have ended. Runs
    /// `callback` immediately if the range is empty, or in a forked child.
    pub(in crate::cache) fn invalidate_with_callback(
        &self,
        range: AddressRange,
        callback: CompletionCallback,
    ) {
        let callback = Arc::new(callback);
        let Some(last) = range.len().checked_sub(1) else { return };
        let (start, last) = (range.start().0, range.start().0 + last);
        let (first_page, last_page) = radix::pages_or_all(start, last);
        if self.leases.gate.is_forked() {
            return;
        }
        // While this thread holds the lock, no region is detached. So the walk finds the entry of
        // each region, except of regions that were left to the worker or are being deregistered.
        let mut locked = self.state.lock();
        self.invalidate_bytes(range);
        let reclaim = &mut locked.reclaim;
        self.index.radix.walk(first_page, last_page, &mut |index| {
            let entry = self.index.entries.at(index);
            let invalidated = entry.state.load(Ordering::Acquire) & state::INVALIDATED != 0;
            if invalidated && entry.overlaps(start, last) {
                let waiting = reclaim.callbacks.entry(index).or_default();
                if !waiting.iter().any(|other| Arc::ptr_eq(other, &callback)) {
                    waiting.push(Arc::clone(&callback));
                }
            }
        });
        for left in &mut reclaim.left_to_worker {
            let waiting = left.callbacks.take().map(Vec::from).into_iter().flatten();
            left.callbacks = Some(waiting.chain([Arc::clone(&callback)]).collect());
        }
        if reclaim.callbacks_after_flight.is_empty() {
            self.in_flight.add_waiter();
        }
        reclaim.callbacks_after_flight.push((reclaim.begun.epoch(), Arc::clone(&callback)));
        let ready = self.take_callbacks_after_flight(&mut locked);
        drop(locked);
        drop(ready);
        self.waker.wake();
    }
}

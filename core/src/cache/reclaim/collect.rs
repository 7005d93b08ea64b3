//! Collection: retires invalidated entries and deregisters those without a lease.

use std::sync::Arc;

use super::{
    super::{
        backend::CacheBackend,
        cache_core::{CacheCore, LockedState},
        index::{entry::state, radix},
        sync::Ordering,
    },
    evict::MAX_BATCH,
    state::{CompletionCallback, DetachedRegions, PendingCallbacks},
};
use crate::AddressRange;

/// If at least this many retired entries wait, a miss issues a barrier and detaches them. Entries
/// that had a lease at the last scan do not count.
#[cfg(not(loom))]
const CROWD: usize = 8;
#[cfg(loom)]
const CROWD: usize = 1;

impl<S: CacheBackend> CacheCore<S> {
    /// Moves the invalidated entries to the retire list. Moved entries no longer count for the
    /// limits.
    pub(in crate::cache) fn retire_invalidated(&self, locked: &mut LockedState<S>) {
        let mut index = self.invalidated.take_all();
        if index == 0 {
            return;
        }
        let LockedState { index: counts, reclaim, .. } = locked;
        reclaim.drains += 1;
        while index != 0 {
            let entry = self.index.entries.at(index);
            counts.count -= 1;
            counts.bytes -= entry.len();
            reclaim.retire_list.push((index, reclaim.drains));
            index = entry.next_invalidated.load(Ordering::Relaxed);
        }
    }

    /// Retires invalidated entries and moves the regions that wait for deregistration to the
    /// caller's list. Returns `false` if the retire list is empty.
    fn begin_collection(
        &self,
        locked: &mut LockedState<S>,
        detached: &mut DetachedRegions<S>,
    ) -> bool {
        self.retire_invalidated(locked);
        let reclaim = &mut locked.reclaim;
        reclaim.detached += (reclaim.refused.len() + reclaim.left_to_worker.len()) as u64;
        detached.extend(reclaim.refused.drain(..));
        detached.extend(reclaim.left_to_worker.drain(..));
        !reclaim.retire_list.is_empty()
    }

    /// Detaches retired entries during a miss, and leaves their deregistration to the worker unless
    /// the worker has much to do already.
    ///
    /// New memory is often mapped where old memory was unmapped. There the retired entries would
    /// make the chains of the table longer and longer.
    #[inline]
    pub(in crate::cache) fn collect_for_miss(
        &self,
        locked: &mut LockedState<S>,
        detached: &mut DetachedRegions<S>,
    ) {
        if locked.reclaim.retire_list.len() > locked.reclaim.leased_retired {
            self.collect_retired_for_miss(locked, detached);
        }
    }

    #[cold]
    #[inline(never)]
    fn collect_retired_for_miss(
        &self,
        locked: &mut LockedState<S>,
        detached: &mut DetachedRegions<S>,
    ) {
        // The caller is one of the owners. Their number is read before the slots, so that the scan
        // sees what former owners did.
        let only_owner = self.leases.blocks.owners() == 1;
        let reclaim = &locked.reclaim;
        let crowd = reclaim.retire_list.len() >= reclaim.leased_retired + CROWD;
        if !(only_owner || crowd && self.heavy_barrier()) {
            return;
        }
        let mut left = DetachedRegions::new();
        self.detach_retired(locked, locked.reclaim.drains, &mut left);
        if left.is_empty() {
            return;
        }
        let reclaim = &mut locked.reclaim;
        reclaim.detached -= left.len() as u64;
        reclaim.left_to_worker.extend(left);
        if reclaim.left_to_worker.len() < MAX_BATCH {
            // The worker may have detached the other entries already.
            self.waker.wake();
        } else {
            reclaim.detached += reclaim.left_to_worker.len() as u64;
            detached.extend(reclaim.left_to_worker.drain(..));
        }
    }

    /// Detaches invalidated entries without a lease, and moves the regions that wait for
    /// deregistration to the caller's list.
    pub(in crate::cache) fn collect(
        &self,
        locked: &mut LockedState<S>,
        detached: &mut DetachedRegions<S>,
    ) {
        if self.begin_collection(locked, detached) && self.heavy_barrier() {
            self.detach_retired(locked, locked.reclaim.drains, detached);
        }
    }

    /// Detaches retired entries without a lease that were retired up to `drains`. The caller issued
    /// a heavy barrier after that, or no other thread may look up.
    fn detach_retired(
        &self,
        locked: &mut LockedState<S>,
        drains: u64,
        detached: &mut DetachedRegions<S>,
    ) {
        self.scan(locked);
        let scan = locked.reclaim.eviction.scan;
        let mut retire_list = std::mem::take(&mut locked.reclaim.retire_list);
        retire_list.retain(|&(index, drain)| {
            let entry = self.index.entries.at(index);
            let word = entry.state.load(Ordering::Acquire);
            let leased = entry.leased_at_scan.load(Ordering::Relaxed) == scan;
            if drain > drains || word & state::REGISTERING != 0 || leased {
                return true;
            }
            if word & state::FAILED == 0 {
                self.detach_region(locked, index, detached);
            } else {
                self.detach_failed(locked, index, detached);
            }
            false
        });
        locked.reclaim.leased_retired = retire_list.len();
        locked.reclaim.retire_list = retire_list;
    }

    /// Deregisters invalidated regions without a lease, and waits until no deregistration is in
    /// flight.
    pub(in crate::cache) fn reclaim(&self) {
        if self.leases.gate.is_forked() {
            return;
        }
        let mut detached = DetachedRegions::new();
        let mut locked = self.state.lock();
        self.collect(&mut locked, &mut detached);
        drop(locked);
        self.deregister(&mut detached, &mut PendingCallbacks::new());
        self.wait_for_deregistrations();
    }

    /// Collects once, for the worker. The heavy barrier, a system call that interrupts every
    /// processor, is issued without the lock, so that no miss waits for it.
    pub(in crate::cache) fn collect_once(&self) {
        let mut detached = DetachedRegions::new();
        let mut locked = self.state.lock();
        if self.begin_collection(&mut locked, &mut detached) {
            let drains = locked.reclaim.drains;
            drop(locked);
            let issued = self.heavy_barrier();
            locked = self.state.lock();
            if issued {
                self.detach_retired(&mut locked, drains, &mut detached);
            }
        }
        drop(locked);
        self.deregister(&mut detached, &mut PendingCallbacks::new());
    }

    /// Invalidates the entries that have a byte of the range. Runs `callback` once all of them are
    /// deregistered.
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
        // No region is detached while the lock is held. So each entry is found here, unless its
        // region was left to the worker or is in flight already.
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
        reclaim.callbacks_after_flight.push(Arc::clone(&callback));
        let ready = self.take_callbacks_after_flight(&mut locked);
        drop(locked);
        drop(ready);
        self.waker.wake();
    }
}

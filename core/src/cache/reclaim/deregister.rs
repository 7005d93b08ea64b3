//! Detaching regions from their entries, and deregistering them without the cache's lock.

#![allow(unsafe_code, reason = "takes the region out of an entry that has no lease")]

use std::{cell::Cell, sync::Arc};

use smallvec::smallvec;

use super::{
    super::{
        backend::CacheBackend,
        cache_core::{CacheCore, LockedState},
        index::{entry::Entry, radix},
    },
    state::{
        CompletionCallback, DetachedRegion, DetachedRegions, PendingCallbacks, ReclaimState, parity,
    },
};
use crate::{ErrorKind, ProcessMark, Rejected};

#[cfg(not(loom))]
thread_local! {
    /// The number of [`DeregistrationGuard`]s of the calling thread, of any cache.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

// A model needs loom's type, because all threads of a model share one thread's thread-locals.
#[cfg(loom)]
loom::thread_local! {
    static DEPTH: Cell<u32> = Cell::new(0);
}

/// A guard for deregistrations in flight. The drop of the guard counts them as ended.
///
/// The drop also keeps regions for a retry: those that the backend refused and, after a panic of
/// the backend, those that it was not yet asked for. The region whose deregistration panicked is
/// lost.
struct DeregistrationGuard<'a, S: CacheBackend> {
    core: &'a CacheCore<S>,
    /// The numbers of deregistrations that the drop counts as ended: those that began in even
    /// epochs, and in odd epochs.
    counts: [u64; 2],
    /// The regions that are not deregistered yet.
    detached: &'a mut DetachedRegions<S>,
    /// The regions that the backend refused to deregister.
    refused: Vec<DetachedRegion<S>>,
    /// True if the backend refused one of them with `Busy`.
    busy: bool,
    /// The list to which the drop moves the callbacks whose wait has ended.
    callbacks: &'a mut PendingCallbacks,
}

impl<'a, S: CacheBackend> DeregistrationGuard<'a, S> {
    fn new(
        core: &'a CacheCore<S>,
        detached: &'a mut DetachedRegions<S>,
        callbacks: &'a mut PendingCallbacks,
    ) -> Self {
        let mut counts = [0; 2];
        detached.iter().for_each(|region| counts[parity(region.epoch)] += 1);
        DEPTH.with(|depth| depth.set(depth.get() + 1));
        Self { core, counts, detached, refused: Vec::new(), busy: false, callbacks }
    }
}

impl<S: CacheBackend> Drop for DeregistrationGuard<'_, S> {
    fn drop(&mut self) {
        self.refused.extend(self.detached.drain(..));
        if !self.refused.is_empty() {
            // The regions are listed before they count as ended, so that each region is always in
            // flight or on the list.
            let reclaim = &mut self.core.state.lock().reclaim;
            reclaim.refused.append(&mut self.refused);
            reclaim.busy |= self.busy;
        }
        if self.busy {
            self.core.waker.announce_busy();
        }
        DEPTH.with(|depth| depth.set(depth.get() - 1));
        if self.core.in_flight.end(self.counts) {
            self.core.notify_deregistered(self.callbacks);
        }
    }
}

/// A guard that keeps the watch of a deregistered region until a miss watches its own region.
///
/// Some monitors start work at a cache's first watch and stop after the last, and both are
/// expensive. If a miss evicts the only watched region, the kept watch avoids that stop and start.
pub(in crate::cache) struct KeptWatch<'a, S: CacheBackend> {
    core: &'a CacheCore<S>,
    watch: Option<S::Watch>,
}

impl<S: CacheBackend> KeptWatch<'_, S> {
    /// Returns true if the guard keeps a watch.
    pub(in crate::cache) fn is_some(&self) -> bool {
        self.watch.is_some()
    }
}

impl<S: CacheBackend> Drop for KeptWatch<'_, S> {
    #[inline]
    fn drop(&mut self) {
        if let Some(watch) = self.watch.take() {
            self.core.backend.unwatch(watch);
        }
    }
}

#[cold]
fn take_callbacks<S: CacheBackend>(
    reclaim: &mut ReclaimState<S>,
    index: u32,
) -> Option<Box<[Arc<CompletionCallback>]>> {
    reclaim.callbacks.remove(&index).map(Vec::into_boxed_slice)
}

impl<S: CacheBackend> CacheCore<S> {
    /// Detaches an entry's region: removes the entry from the table, moves its region to `detached`
    /// and frees the entry. The entry must have no lease, and no lookup may be able to lease it.
    #[inline(always)]
    pub(super) fn detach_region(
        &self,
        locked: &mut LockedState<S>,
        index: u32,
        detached: &mut DetachedRegions<S>,
    ) {
        let entry = self.remove_from_table(locked, index);
        // SAFETY: the entry was registered, and no lookup can lease it any more. It has no lease,
        // for one of these reasons: a scan found none after the state changed and a heavy barrier
        // followed; a scan found none while no other thread could publish one; or the cache is
        // being dropped, which no lease outlives.
        let (region, watch) = unsafe { entry.take() };
        self.free_entry(locked, index, (Some(region), Some(watch)), detached);
    }

    /// Removes the entry of a failed registration from the table and frees it. Adds an element
    /// without a region to `detached`, for the entry's callbacks.
    pub(super) fn detach_failed(
        &self,
        locked: &mut LockedState<S>,
        index: u32,
        detached: &mut DetachedRegions<S>,
    ) {
        self.remove_from_table(locked, index);
        locked.misses.failures.remove(&index);
        self.free_entry(locked, index, (None, None), detached);
    }

    /// Frees an entry that is no longer in the table, and adds its region, its watch and its
    /// callbacks to `detached`.
    #[inline(always)]
    fn free_entry(
        &self,
        locked: &mut LockedState<S>,
        index: u32,
        (region, watch): (Option<S::Region>, Option<S::Watch>),
        detached: &mut DetachedRegions<S>,
    ) {
        let reclaim = &mut locked.reclaim;
        let callbacks =
            if reclaim.callbacks.is_empty() { None } else { take_callbacks(reclaim, index) };
        self.index.entries.at(index).free();
        locked.index.free.push(index);
        let epoch = reclaim.begun.begin(1);
        detached.push(DetachedRegion { region, watch, callbacks, epoch, refused: false });
    }

    #[inline(always)]
    fn remove_from_table(&self, locked: &mut LockedState<S>, index: u32) -> &Entry<S> {
        let entry = self.index.entries.at(index);
        let (start, last) = entry.bounds();
        if let Some((first, last)) = radix::pages(start, last) {
            self.index.radix.remove(&mut locked.index.radix, first, last, index);
        }
        entry
    }

    /// Deregisters detached regions. If the backend refuses a region, keeps it for a retry. Moves
    /// the callbacks whose wait has ended to `callbacks`. The caller must hold no lock.
    #[inline]
    pub(in crate::cache) fn deregister(
        &self,
        detached: &mut DetachedRegions<S>,
        callbacks: &mut PendingCallbacks,
    ) {
        if !detached.is_empty() {
            self.deregister_each(detached, callbacks, None);
        }
    }

    /// Deregisters detached regions before the caller watches another region. Returns a guard with
    /// one of their watches, if there is one. The caller must drop the guard only after it watches
    /// the new region.
    #[inline]
    pub(in crate::cache) fn deregister_before_watch(
        &self,
        detached: &mut DetachedRegions<S>,
        callbacks: &mut PendingCallbacks,
    ) -> KeptWatch<'_, S> {
        let mut kept = KeptWatch { core: self, watch: None };
        if !detached.is_empty() {
            self.deregister_each(detached, callbacks, Some(&mut kept));
        }
        kept
    }

    #[inline(never)]
    fn deregister_each(
        &self,
        detached: &mut DetachedRegions<S>,
        callbacks: &mut PendingCallbacks,
        mut kept: Option<&mut KeptWatch<'_, S>>,
    ) {
        let mut guard = DeregistrationGuard::new(self, detached, callbacks);
        while let Some(next) = guard.detached.last_mut() {
            // The element with the watch stays in the list, so that the watch is not lost if the
            // backend panics.
            let result = next.region.take().map(|region| self.backend.deregister(region));
            let Some(mut done) = guard.detached.pop() else { break };
            match result {
                Some(Err(Rejected { value, error })) => {
                    let is_busy = error.kind() == ErrorKind::Busy;
                    if is_busy || done.refused {
                        tracing::debug!(%error, "cannot deregister a cached region yet");
                    } else {
                        tracing::error!(
                            error = %error.full(),
                            "cannot deregister a cached region: retrying later"
                        );
                    }
                    guard.busy |= is_busy;
                    done.refused = true;
                    done.region = Some(value);
                    guard.refused.push(done);
                }
                Some(Ok(())) | None => {
                    let mut watch = done.watch.take();
                    if watch.is_some()
                        && let Some(kept) = &mut kept
                    {
                        std::mem::swap(&mut watch, &mut kept.watch);
                    }
                    if let Some(watch) = watch {
                        self.backend.unwatch(watch);
                    }
                    if let Some(waiting) = done.callbacks.take() {
                        guard.callbacks.extend(waiting);
                    }
                }
            }
        }
    }

    /// Wakes the threads that wait for deregistrations. Moves the callbacks whose wait for
    /// deregistrations in flight has ended to `callbacks`.
    #[cold]
    #[inline(never)]
    fn notify_deregistered(&self, callbacks: &mut PendingCallbacks) {
        let mut locked = self.state.lock();
        callbacks.extend(self.take_callbacks_after_flight(&mut locked));
        self.ended.notify_all();
    }

    /// Removes and returns the callbacks whose wait for deregistrations in flight has ended.
    pub(super) fn take_callbacks_after_flight(
        &self,
        locked: &mut LockedState<S>,
    ) -> PendingCallbacks {
        let ReclaimState { callbacks_after_flight: waiting, begun, .. } = &mut locked.reclaim;
        let ready = waiting
            .iter()
            .take_while(|(epoch, _)| !self.in_flight.any_until(begun, *epoch))
            .count();
        let callbacks = waiting.drain(..ready).map(|(_, callback)| callback).collect();
        if ready > 0 && waiting.is_empty() {
            self.in_flight.remove_waiter();
        }
        callbacks
    }

    /// Returns true if the calling thread is inside a deregistration of any cache.
    pub(in crate::cache) fn is_deregistering() -> bool {
        DEPTH.with(Cell::get) > 0
    }

    /// Waits for the deregistrations that began before this call, and for those that begin before
    /// the next epoch ([`BegunCounter`](super::state::BegunCounter)). Does not wait if the calling
    /// thread is inside a deregistration, as in the drop of a region's memory: this deregistration
    /// cannot end before the call returns.
    pub(super) fn wait_for_deregistrations(&self) {
        if Self::is_deregistering() {
            return;
        }
        let mut locked = self.state.lock();
        self.in_flight.add_waiter();
        let epoch = locked.reclaim.begun.epoch();
        while self.in_flight.any_until(&mut locked.reclaim.begun, epoch) {
            locked = self.ended.wait(locked);
        }
        self.in_flight.remove_waiter();
    }

    /// Deregisters an uncached region that `process` registered. If the calling process is another
    /// one, forgets the region and leaves it registered.
    pub(in crate::cache) fn drop_uncached(&self, region: S::Region, process: ProcessMark) {
        if !process.is_current() {
            // A fork made this copy of a region. The registration belongs to another process.
            std::mem::forget(region);
            return;
        }
        if self.leases.gate.is_forked() {
            // The lock is not taken, because a thread of the parent may have held it at the fork.
            // So a failed deregistration is not retried.
            if let Err(Rejected { error, .. }) = self.backend.deregister(region) {
                tracing::error!(
                    error = %error.full(),
                    "a forked child could not deregister a region"
                );
            }
            return;
        }
        let epoch = self.state.lock().reclaim.begun.begin(1);
        let (region, refused) = (Some(region), false);
        let region = DetachedRegion { region, watch: None, callbacks: None, epoch, refused };
        self.deregister(&mut smallvec![region], &mut PendingCallbacks::new());
    }
}

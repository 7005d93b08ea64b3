//! The state of reclamation: invalidated entries, detached regions, and pending callbacks.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, OnceLock},
};

use smallvec::SmallVec;

use super::super::{
    arena::Arena,
    backend::CacheBackend,
    index::entry::Entry,
    sync::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence_after_exchange},
};

/// The part of the cache's locked state that reclamation uses.
pub(in crate::cache) struct ReclaimState<S: CacheBackend> {
    /// The indices of pending entries: invalidated entries that were drained from the stack and
    /// still have their regions. Each is stored with the value of `drain_count` after the drain
    /// that added it.
    pub(in crate::cache) pending_entries: Vec<(u32, u64)>,
    /// The number of entries that were still pending after the last attempt to detach their
    /// regions, mostly because they had a lease.
    pub(in crate::cache) leased_pending: usize,
    /// The number of drains so far that took an entry from the stack of invalidated entries.
    pub(in crate::cache) drain_count: u64,
    /// Callbacks that wait for the deregistration of an entry's region, by the entry's index.
    pub(in crate::cache) callbacks: HashMap<u32, Vec<Arc<CompletionCallback>>>,
    /// Callbacks that wait for deregistrations in flight, in the order of their epochs. Each waits
    /// for the deregistrations that began in its epoch or before. All callbacks of this list
    /// together count as one waiter of [`InFlightCounter`].
    pub(in crate::cache) callbacks_after_flight: Vec<(u64, Arc<CompletionCallback>)>,
    pub(in crate::cache) begun: BegunCounter,
    /// Regions that the backend refused to deregister, or had not deregistered when it panicked.
    pub(in crate::cache) refused: Vec<DetachedRegion<S>>,
    /// True if the backend refused one of them with `Busy`: something still uses the region. The
    /// end of the use does not wake the worker, so the worker retries periodically.
    pub(in crate::cache) busy: bool,
    /// Regions that a miss detached and left to the worker. `begun` does not count them yet.
    pub(in crate::cache) left_to_worker: Vec<DetachedRegion<S>>,
    pub(in crate::cache) eviction: EvictionState,
}

/// The state of eviction: the clock hand, and the number of the last scan for leases.
#[derive(Default)]
pub(in crate::cache) struct EvictionState {
    /// The clock hand: the index of the entry that eviction looked at last.
    pub(in crate::cache) hand: u32,
    /// A list for the candidates of an eviction, empty between evictions. Kept to reuse its memory.
    pub(in crate::cache) candidates: Vec<u32>,
    /// The sequence number of the last scan for leases. It wraps around.
    pub(in crate::cache) last_scan: u32,
    /// The number of entries evicted so far.
    pub(in crate::cache) evictions: u64,
}

impl EvictionState {
    /// Returns the sequence number of a new scan.
    pub(in crate::cache) fn begin_scan(&mut self) -> u32 {
        self.last_scan = self.last_scan.wrapping_add(1);
        self.last_scan
    }
}

impl<S: CacheBackend> ReclaimState<S> {
    pub(in crate::cache) fn new() -> Self {
        Self {
            pending_entries: Vec::new(),
            leased_pending: 0,
            drain_count: 0,
            callbacks: HashMap::new(),
            callbacks_after_flight: Vec::new(),
            begun: BegunCounter::default(),
            refused: Vec::new(),
            busy: false,
            left_to_worker: Vec::new(),
            eviction: EvictionState::default(),
        }
    }
}

/// A region that was moved out of its entry, with its watch and the callbacks that wait for its
/// deregistration. A failed registration has no region. An uncached region has no watch.
pub(in crate::cache) struct DetachedRegion<S: CacheBackend> {
    pub(in crate::cache) region: Option<S::Region>,
    pub(in crate::cache) watch: Option<S::Watch>,
    pub(in crate::cache) callbacks: Option<Box<[Arc<CompletionCallback>]>>,
    /// The epoch in which the deregistration began, as [`BegunCounter::begin`] returned it.
    pub(in crate::cache) epoch: u64,
    /// True once the backend refused to deregister the region.
    pub(in crate::cache) refused: bool,
}

/// A list of detached regions, often with one element.
pub(in crate::cache) type DetachedRegions<S> = SmallVec<[DetachedRegion<S>; 1]>;

/// References to callbacks whose wait has ended. A [`CompletionCallback`] runs when its last
/// reference is dropped, so dropping this list usually runs the callbacks.
///
/// A callback may use the cache. So the thread that drops the list must hold no lock, and must have
/// no registration of its own in progress.
pub(in crate::cache) type PendingCallbacks = Vec<Arc<CompletionCallback>>;

/// A callback that runs once, when the last reference to it is dropped.
pub(in crate::cache) struct CompletionCallback(std::sync::Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl CompletionCallback {
    pub(in crate::cache) fn new(callback: impl FnOnce() + Send + 'static) -> Self {
        Self(std::sync::Mutex::new(Some(Box::new(callback))))
    }
}

impl Drop for CompletionCallback {
    fn drop(&mut self) {
        if let Ok(Some(callback)) = self.0.get_mut().map(Option::take)
            // A panic of the callback is caught, because any thread may run it, often the worker,
            // and other callbacks may follow.
            && catch_unwind(AssertUnwindSafe(callback)).is_err()
        {
            tracing::error!("an invalidation callback of a registration cache panicked");
        }
    }
}

/// The stack of invalidated entries that are not pending yet. It is linked through the entries, so
/// that pushing allocates nothing.
#[derive(Debug, Default)]
pub(in crate::cache) struct InvalidatedStack {
    /// The index of the entry that was pushed last, or 0.
    head: AtomicU32,
}

impl InvalidatedStack {
    /// Pushes an entry. Only the thread that marked the entry invalidated may call this, once.
    /// Takes no lock and allocates nothing, so that a monitor's hook may call it.
    pub(in crate::cache) fn push<S: CacheBackend>(&self, entries: &Arena<Entry<S>>, index: u32) {
        let entry = entries.at(index);
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            entry.next_invalidated.store(head, Ordering::Relaxed);
            let (ok, seen) = (Ordering::Release, Ordering::Relaxed);
            match self.head.compare_exchange_weak(head, index, ok, seen) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Empties the stack. Returns the index of the entry that was pushed last, or 0 if the stack
    /// was empty. `next_invalidated` of each entry links to the entry that was pushed before it.
    pub(in crate::cache) fn take_all(&self) -> u32 {
        if self.head.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        self.head.swap(0, Ordering::Acquire)
    }
}

/// Counters of the deregistrations that began, which the cache's lock protects. They include
/// retries and the deregistrations of uncached regions. [`InFlightCounter`] counts the
/// deregistrations that ended.
///
/// Time is divided into epochs, so that a waiter waits for deregistrations that began before, and
/// ends even if other threads keep beginning more. A waiter waits for the current epoch and all
/// epochs before it, and begins the next epoch as soon as it may. The epoch after `n` may begin
/// once all deregistrations of epoch `n - 1` have ended. So at most two epochs have deregistrations
/// in flight, and one counter for the even epochs and one for the odd epochs are enough.
#[derive(Debug, Default)]
pub(in crate::cache) struct BegunCounter {
    /// The number of the current epoch.
    epoch: u64,
    /// The number of deregistrations that began so far in even epochs, and in odd epochs.
    begun: [u64; 2],
}

impl BegunCounter {
    /// Returns the number of the current epoch.
    pub(in crate::cache) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Counts `count` deregistrations as begun, and returns their epoch.
    pub(in crate::cache) fn begin(&mut self, count: usize) -> u64 {
        self.begun[parity(self.epoch)] += count as u64;
        self.epoch
    }

    /// Undoes the count of deregistrations that the calling thread counted since it took the
    /// cache's lock.
    pub(in crate::cache) fn undo(&mut self, count: usize) {
        self.begun[parity(self.epoch)] -= count as u64;
    }
}

/// Returns the index of the counter that counts the deregistrations of an epoch.
pub(in crate::cache) fn parity(epoch: u64) -> usize {
    (epoch & 1) as usize
}

/// Counters of ended deregistrations, and a counter of waiters. Each thread that waits for
/// deregistrations is a waiter, and all waiting callbacks together are one.
///
/// Deregistrations begin under the cache's lock and end without it. A thread that ended
/// deregistrations increases `ended` and then reads `waiters`. A thread that waits increases
/// `waiters` and then reads `ended`. Each issues a fence in between, so that at least one sees the
/// increase by the other.
#[derive(Debug, Default)]
pub(in crate::cache) struct InFlightCounter {
    /// The number of ended deregistrations that began in even epochs, and in odd epochs.
    ended: [AtomicU64; 2],
    waiters: AtomicU32,
}

impl InFlightCounter {
    /// Returns whether a deregistration is in flight.
    pub(in crate::cache) fn any(&self, begun: &BegunCounter) -> bool {
        (0..=1).any(|epoch| self.any_like(begun, epoch))
    }

    /// Returns whether a deregistration is in flight that began in an epoch with the parity of
    /// `epoch`. If the result is `false`, the caller sees all effects of these deregistrations.
    fn any_like(&self, begun: &BegunCounter, epoch: u64) -> bool {
        let parity = parity(epoch);
        self.ended[parity].load(Ordering::Acquire) != begun.begun[parity]
    }

    /// Returns whether a deregistration is in flight that began in `epoch` or before. Begins the
    /// next epoch if `epoch` is the current one and the next one may begin. If the result is
    /// `false`, the caller sees all effects of the deregistrations.
    ///
    /// A waiter calls this again after each end of a deregistration, until the result is `false`.
    pub(in crate::cache) fn any_until(&self, begun: &mut BegunCounter, epoch: u64) -> bool {
        if begun.epoch == epoch && !self.any_like(begun, epoch + 1) {
            begun.epoch += 1;
        }
        match begun.epoch - epoch {
            0 => true,
            1 => self.any_like(begun, epoch),
            // The epoch after the next one began, so those of `epoch` have ended.
            _ => false,
        }
    }

    /// Counts deregistrations as ended: `counts` has the number of those that began in even epochs,
    /// and in odd epochs. Returns `true` if there is a waiter. The caller must then wake the
    /// waiting threads under the cache's lock.
    pub(in crate::cache) fn end(&self, counts: [u64; 2]) -> bool {
        for (ended, count) in self.ended.iter().zip(counts) {
            if count > 0 {
                ended.fetch_add(count, Ordering::SeqCst);
            }
        }
        fence_after_exchange();
        self.waiters.load(Ordering::Relaxed) != 0
    }

    /// Counts a waiter. The caller must hold the cache's lock, and must then call
    /// [`InFlightCounter::any_until`].
    pub(in crate::cache) fn add_waiter(&self) {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        fence_after_exchange();
    }

    /// Undoes the count of a waiter that stopped waiting. The caller must hold the cache's lock.
    pub(in crate::cache) fn remove_waiter(&self) {
        self.waiters.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Wakes the cache's worker, by two flags and a futex. Takes no lock and allocates nothing, so that
/// a monitor's hook may use it.
#[derive(Debug, Default)]
pub(in crate::cache) struct Waker {
    /// True from a call of [`Waker::wake`] until the worker begins to reclaim.
    pub(in crate::cache) called: AtomicBool,
    /// True while the worker sleeps until it is woken or a retry is due. The worker sets it before
    /// it checks `called`.
    pub(in crate::cache) asleep: AtomicBool,
    /// The worker's thread, once it is started.
    pub(in crate::cache) worker: OnceLock<std::thread::Thread>,
}

impl Waker {
    pub(in crate::cache) fn wake(&self) {
        if !self.called.swap(true, Ordering::SeqCst)
            && self.asleep.load(Ordering::SeqCst)
            && let Some(worker) = self.worker.get()
        {
            worker.unpark();
        }
    }

    /// Makes the worker check [`ReclaimState::busy`] before it sleeps again. The worker checks it
    /// anyway after a deregistration of its own, which must not end its next sleep.
    pub(in crate::cache) fn announce_busy(&self) {
        if let Some(worker) = self.worker.get()
            && worker.id() != std::thread::current().id()
        {
            worker.unpark();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// CACHE-07: a wait ends although a deregistration is always in flight, but not before the
    /// deregistration that was in flight when the wait began.
    #[test]
    fn wait_ends_while_deregistrations_keep_beginning() {
        let (ended, mut begun) = (InFlightCounter::default(), BegunCounter::default());
        let end = |epoch| ended.end(std::array::from_fn(|at| u64::from(at == parity(epoch))));
        let mut last = begun.begin(1);
        let mut earlier = None;
        for round in 0..8 {
            let wait = begun.epoch();
            assert!(ended.any_until(&mut begun, wait), "{round}: one is in flight");
            let next = begun.begin(1);
            assert!(ended.any_until(&mut begun, wait), "{round}: the one before is in flight");
            end(std::mem::replace(&mut last, next));
            let ends = |wait| !ended.any_until(&mut begun, wait);
            assert_ne!(earlier.replace(wait).map(ends), Some(false), "{round}: the wait goes on");
        }
        end(last);
        assert!(!ended.any(&begun));
    }
}

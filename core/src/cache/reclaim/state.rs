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
    /// Callbacks that wait until no deregistration is in flight. All callbacks of this list
    /// together count as one waiter of [`InFlightCounter`].
    pub(in crate::cache) callbacks_after_flight: Vec<Arc<CompletionCallback>>,
    /// The number of deregistrations that began so far. Includes retries and the deregistrations of
    /// uncached regions. [`InFlightCounter`] counts the deregistrations that ended.
    pub(in crate::cache) detached: u64,
    /// Regions that the backend refused to deregister, or had not deregistered when it panicked.
    pub(in crate::cache) refused: Vec<DetachedRegion<S>>,
    /// Regions that a miss detached and left to the worker. `detached` does not count them yet.
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
            detached: 0,
            refused: Vec::new(),
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

/// A counter of ended deregistrations, and a counter of waiters. Each thread that waits for
/// deregistrations is a waiter, and all waiting callbacks together are one.
///
/// Deregistrations begin under the cache's lock and end without it. A thread that ended
/// deregistrations increases `ended` and then reads `waiters`. A thread that waits increases
/// `waiters` and then reads `ended`. Each issues a fence in between, so that at least one sees the
/// increase by the other.
#[derive(Debug, Default)]
pub(in crate::cache) struct InFlightCounter {
    ended: AtomicU64,
    waiters: AtomicU32,
}

impl InFlightCounter {
    /// Returns whether a deregistration is in flight. `begun` is the number of deregistrations that
    /// began ([`ReclaimState::detached`]), which the cache's lock protects. If the result is
    /// `false`, the caller sees all effects of the deregistrations.
    pub(in crate::cache) fn any(&self, begun: u64) -> bool {
        self.ended.load(Ordering::Acquire) != begun
    }

    /// Counts `count` deregistrations as ended. Returns `true` if there is a waiter. The caller
    /// must then wake the waiting threads under the cache's lock.
    pub(in crate::cache) fn end(&self, count: usize) -> bool {
        self.ended.fetch_add(count as u64, Ordering::SeqCst);
        fence_after_exchange();
        self.waiters.load(Ordering::Relaxed) != 0
    }

    /// Counts a waiter. The caller must hold the cache's lock, and must then call
    /// [`InFlightCounter::any`].
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
    /// True while the worker sleeps without a time limit. The worker sets it before it checks
    /// `called`.
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
}

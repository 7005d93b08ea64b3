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

/// The part of reclamation that the cache's lock protects.
pub(in crate::cache) struct ReclaimState<S: CacheBackend> {
    /// Invalidated entries that wait for the end of their last lease, each with the value of
    /// `drains` when it was added.
    pub(in crate::cache) retire_list: Vec<(u32, u64)>,
    /// The number of entries on the retire list that had a lease at the last scan of the list.
    pub(in crate::cache) leased_retired: usize,
    /// Counts how often the stack of invalidated entries was moved to the retire list.
    pub(in crate::cache) drains: u64,
    /// Callbacks that wait for the deregistration of an entry.
    pub(in crate::cache) callbacks: HashMap<u32, Vec<Arc<CompletionCallback>>>,
    /// Callbacks to run when no deregistration is in flight. If there are any, they count together
    /// as one waiter of [`InFlightCounter`].
    pub(in crate::cache) callbacks_after_flight: Vec<Arc<CompletionCallback>>,
    /// The number of regions that were ever detached for deregistration. [`InFlightCounter`] counts
    /// the deregistrations that ended.
    pub(in crate::cache) detached: u64,
    /// Regions that the provider refused to deregister.
    pub(in crate::cache) refused: Vec<DetachedRegion<S>>,
    /// Regions of invalidated entries that a miss left to the worker. Not yet in `detached`.
    pub(in crate::cache) left_to_worker: Vec<DetachedRegion<S>>,
    pub(in crate::cache) eviction: EvictionState,
}

/// State of the clock hand and of scans for leases.
#[derive(Default)]
pub(in crate::cache) struct EvictionState {
    /// The clock hand: the index of the entry that eviction looked at last.
    pub(in crate::cache) hand: u32,
    /// The candidates of an eviction. Kept only to reuse the allocation.
    pub(in crate::cache) candidates: Vec<u32>,
    /// The number of the last scan for leases.
    pub(in crate::cache) scan: u32,
    /// The number of entries evicted so far.
    pub(in crate::cache) evictions: u64,
}

impl<S: CacheBackend> ReclaimState<S> {
    pub(in crate::cache) fn new() -> Self {
        Self {
            retire_list: Vec::new(),
            leased_retired: 0,
            drains: 0,
            callbacks: HashMap::new(),
            callbacks_after_flight: Vec::new(),
            detached: 0,
            refused: Vec::new(),
            left_to_worker: Vec::new(),
            eviction: EvictionState::default(),
        }
    }
}

/// A registration that was removed from its entry, so that no lookup can find it.
pub(in crate::cache) struct DetachedRegion<S: CacheBackend> {
    pub(in crate::cache) region: Option<S::Region>,
    pub(in crate::cache) watch: Option<S::Watch>,
    pub(in crate::cache) callbacks: Option<Box<[Arc<CompletionCallback>]>>,
}

/// A list of detached regions, often with one element.
pub(in crate::cache) type DetachedRegions<S> = SmallVec<[DetachedRegion<S>; 1]>;

/// Callbacks that run after the locks are released. Dropping the value runs them.
///
/// A callback may use the cache. So the thread that drops the value holds no lock and has no
/// registration of its own in progress.
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
            // Any thread may run the callback, often the worker, and other callbacks may follow.
            && catch_unwind(AssertUnwindSafe(callback)).is_err()
        {
            tracing::error!("an invalidation callback of a registration cache panicked");
        }
    }
}

/// The stack of entries that were invalidated and are not on the retire list yet. It is linked
/// through the entries, so that pushing allocates nothing.
#[derive(Debug)]
pub(in crate::cache) struct InvalidatedStack {
    head: AtomicU32,
}

impl InvalidatedStack {
    pub(in crate::cache) fn new() -> Self {
        Self { head: AtomicU32::new(0) }
    }

    /// Pushes an entry that the caller has just marked invalidated. A hook may call this, because
    /// it only links the entry.
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

    /// Empties the stack and returns its first entry, or 0.
    pub(in crate::cache) fn take_all(&self) -> u32 {
        if self.head.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        self.head.swap(0, Ordering::Acquire)
    }
}

/// A counter of the deregistrations that ended, and of the threads that wait for them.
///
/// Deregistrations begin under the cache's lock and end without it. A thread that ends some counts
/// them and then looks for waiters. A waiter counts itself and then looks at the count. Each fences
/// in between, so that one of them sees the other.
#[derive(Debug)]
pub(in crate::cache) struct InFlightCounter {
    ended: AtomicU64,
    waiters: AtomicU32,
}

impl InFlightCounter {
    pub(in crate::cache) fn new() -> Self {
        Self { ended: AtomicU64::new(0), waiters: AtomicU32::new(0) }
    }

    /// Returns whether any of the `begun` deregistrations is in flight. The cache's lock protects
    /// `begun`. After `false`, the caller sees everything that was done before they ended.
    pub(in crate::cache) fn any(&self, begun: u64) -> bool {
        self.ended.load(Ordering::Acquire) != begun
    }

    /// Ends `count` deregistrations. Returns `true` if a thread waits, which the caller wakes under
    /// the lock.
    pub(in crate::cache) fn end(&self, count: usize) -> bool {
        self.ended.fetch_add(count as u64, Ordering::SeqCst);
        fence_after_exchange();
        self.waiters.load(Ordering::Relaxed) != 0
    }

    /// Adds a waiter. Under the lock, before the caller looks whether [any](Self::any) is in
    /// flight.
    pub(in crate::cache) fn add_waiter(&self) {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        fence_after_exchange();
    }

    /// Removes a waiter, under the lock.
    pub(in crate::cache) fn remove_waiter(&self) {
        self.waiters.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The means to wake the worker: two flags and a futex. A hook may use it.
#[derive(Debug, Default)]
pub(in crate::cache) struct Waker {
    pub(in crate::cache) called: AtomicBool,
    /// The worker sleeps until it is woken. It sets this before it checks `called`.
    pub(in crate::cache) asleep: AtomicBool,
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

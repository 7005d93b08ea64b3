//! The state that the cache's handle, worker, leases and monitors share.

use std::{collections::HashMap, fmt};

use super::{
    backend::{CacheBackend, Limits},
    index::{Index, IndexState, radix},
    invalidations::ActiveInvalidations,
    lease::{Leases, blocks::LeaseBlock},
    reclaim::state::{InFlightCounter, InvalidatedStack, ReclaimState, Waker},
    sync::{AtomicU64, Barrier, CachePadded, Condvar, Mutex, Ordering, fence_after_exchange},
};
use crate::{
    AddressRange, Error, ProcessMark, Result,
    monitor::{InvalidationCause, InvalidationToken, Invalidator},
};

/// The number of entries that the index has room for beyond the limit. They are needed for
/// invalidated entries that still have leases, and for new entries during an eviction.
#[cfg(not(loom))]
const SPARE_ENTRIES: usize = 4096;
#[cfg(loom)]
const SPARE_ENTRIES: usize = 2;
/// The maximum of [`Limits::max_count`](super::Limits::max_count). A higher limit is reduced to
/// this.
const MAX_ENTRIES: usize = 1 << 22;

/// The state of a cache, one part for each group of modules. Lookups read the first two parts.
#[repr(C)]
pub(super) struct CacheCore<S: CacheBackend> {
    pub(super) leases: Leases,
    pub(super) index: Index<S>,
    pub(super) limits: Limits,
    pub(super) backend: S,
    /// The process that created the cache.
    pub(super) process: ProcessMark,
    pub(super) invalidated: CachePadded<InvalidatedStack>,
    pub(super) active_invalidations: CachePadded<ActiveInvalidations>,
    pub(super) state: CachePadded<Mutex<LockedState<S>>>,
    pub(super) in_flight: CachePadded<InFlightCounter>,
    /// Notified when a registration ends that a thread waits for, and when the last deregistration
    /// in flight ends.
    pub(super) ended: Condvar,
    pub(super) counters: CachePadded<Counters>,
    pub(super) waker: Waker,
}

/// The state that the cache's lock protects.
pub(super) struct LockedState<S: CacheBackend> {
    pub(super) index: IndexState,
    pub(super) reclaim: ReclaimState<S>,
    pub(super) misses: MissState,
}

/// The state of misses that the cache's lock protects.
#[derive(Default)]
pub(super) struct MissState {
    /// The number of misses that made an entry, including misses in progress.
    pub(super) registrations: u64,
    /// Errors of failed registrations, for the threads that waited for them.
    pub(super) failures: HashMap<u32, Error>,
}

/// Counts that change without the lock. Hits are counted in the lease slots instead.
#[derive(Debug)]
pub(super) struct Counters {
    /// The number of hits by lookups that missed first, and then waited or searched again.
    pub(super) late_hits: AtomicU64,
    pub(super) uncached: AtomicU64,
    pub(super) failures: AtomicU64,
    pub(super) merged: AtomicU64,
    pub(super) invalidations: [AtomicU64; InvalidationCause::ALL.len()],
}

impl Counters {
    fn new() -> Self {
        Self {
            late_hits: AtomicU64::new(0),
            uncached: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            merged: AtomicU64::new(0),
            invalidations: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    pub(super) fn count_invalidation(&self, cause: InvalidationCause) {
        count(&self.invalidations[cause as usize]);
    }
}

pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl<S: CacheBackend> CacheCore<S> {
    pub(super) fn new(backend: S, limits: Limits, barrier: Barrier) -> Result<Self> {
        let max_count = limits.max_count.min(MAX_ENTRIES);
        let limits = Limits { max_count, ..limits };
        let (index, index_state) = Index::new(max_count + SPARE_ENTRIES)?;
        Ok(Self {
            leases: Leases::new(barrier)?,
            index,
            limits,
            backend,
            process: ProcessMark::current()?,
            invalidated: CachePadded(InvalidatedStack::new()),
            active_invalidations: CachePadded(ActiveInvalidations::new()),
            state: CachePadded(Mutex::new(LockedState {
                index: index_state,
                reclaim: ReclaimState::new(),
                misses: MissState::default(),
            })),
            in_flight: CachePadded(InFlightCounter::new()),
            ended: Condvar::default(),
            counters: CachePadded(Counters::new()),
            waker: Waker::default(),
        })
    }

    /// Assigns a free block to a new owner. Returns `None` if all blocks are in use. Locks the
    /// cache, so that a thread that ends entries under the lock knows all owners.
    pub(super) fn take_block(&self) -> Option<&LeaseBlock> {
        let _ends_no_entries = self.state.lock();
        self.leases.blocks.take_first()
    }

    /// Marks an entry invalidated without a check of its range.
    pub(super) fn mark_invalidated(&self, index: u32, cause: InvalidationCause) {
        if self.index.entries.at(index).mark_invalidated(|_| true) {
            self.counters.count_invalidation(cause);
            self.push_invalidated(index);
        }
    }

    /// Pushes an entry that the caller has just marked invalidated.
    pub(super) fn push_invalidated(&self, index: u32) {
        self.invalidated.push(&self.index.entries, index);
    }

    /// Invalidates the entries that have a byte of the range, but not those that only share a page
    /// with it. The application calls this, because it knows the exact bytes. Monitors report whole
    /// pages.
    pub(super) fn invalidate_bytes(&self, range: AddressRange) {
        let Some(last) = range.len().checked_sub(1) else { return };
        let start = range.start().0;
        let change = self.publish(start, start + last, InvalidationCause::Application);
        self.invalidate_between(start, start + last, InvalidationCause::Application);
        self.invalidate_end(change);
    }

    /// Publishes an invalidation of the addresses from `start` to `last`. The caller then searches
    /// for entries.
    fn publish(&self, start: u64, last: u64, cause: InvalidationCause) -> InvalidationToken {
        let change = self.active_invalidations.begin(start, last, cause);
        fence_after_exchange();
        change
    }

    /// Invalidates the entries that have an address from `start` to `last`.
    fn invalidate_between(&self, start: u64, last: u64, cause: InvalidationCause) {
        let (first_page, last_page) = radix::pages_or_all(start, last);
        if self.leases.gate.is_forked() {
            return;
        }
        let mut any = false;
        self.index.radix.walk(first_page, last_page, &mut |index| {
            let entry = self.index.entries.at(index);
            if entry.mark_invalidated(|entry| entry.overlaps(start, last)) {
                self.counters.count_invalidation(cause);
                self.push_invalidated(index);
                any = true;
            }
        });
        if any {
            self.waker.wake();
        }
    }
}

/// Returns the first and last address of the pages that a range touches.
fn whole_pages(range: AddressRange) -> (u64, u64) {
    let last = range.start().0.saturating_add(range.len().saturating_sub(1));
    (range.start().0 & !0xfff, last | 0xfff)
}

impl<S: CacheBackend> Invalidator for CacheCore<S> {
    fn invalidate(&self, range: AddressRange, cause: InvalidationCause) {
        let change = self.invalidate_start(range, cause);
        self.invalidate_end(change);
    }

    fn invalidate_start(&self, range: AddressRange, cause: InvalidationCause) -> InvalidationToken {
        let (start, last) = whole_pages(range);
        let change = self.publish(start, last, cause);
        if !range.is_empty() {
            self.invalidate_between(start, last, cause);
        }
        change
    }

    fn invalidate_end(&self, change: InvalidationToken) {
        self.active_invalidations.end(&change);
    }

    fn close_gate(&self) {
        self.leases.gate.close();
    }

    fn open_gate(&self) {
        self.leases.gate.open();
    }
}

impl<S: CacheBackend> fmt::Debug for CacheCore<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache")
            .field("limits", &self.limits)
            .field("gate", &self.leases.gate)
            .finish_non_exhaustive()
    }
}

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
    monitor::{GateToken, InvalidationCause, InvalidationToken, Invalidator, TokenIssuer},
};

/// The number of spare entries: a cache has memory for this many entries more than its limit
/// allows. The limit does not count invalidated entries, which use memory until they are freed.
#[cfg(not(loom))]
const SPARE_ENTRIES: usize = 4096;
#[cfg(loom)]
const SPARE_ENTRIES: usize = 2;
/// The maximum of [`Limits::max_count`](super::Limits::max_count). A higher limit is reduced to
/// this.
const MAX_ENTRIES: usize = 1 << 22;

/// The state of a cache. Fast lookups read only the first two fields. Fields in [`CachePadded`] are
/// written often.
#[repr(C)]
pub(super) struct CacheCore<S: CacheBackend> {
    pub(super) leases: Leases,
    pub(super) index: Index<S>,
    pub(super) limits: Limits,
    pub(super) backend: S,
    /// The issuer of the tokens that monitors get from this cache.
    issuer: TokenIssuer,
    /// The process that created the cache.
    pub(super) process: ProcessMark,
    pub(super) invalidated: CachePadded<InvalidatedStack>,
    pub(super) active_invalidations: CachePadded<ActiveInvalidations>,
    pub(super) state: CachePadded<Mutex<LockedState<S>>>,
    pub(super) in_flight: CachePadded<InFlightCounter>,
    /// A condition variable, used with the lock of `state`. Threads wait on it for the end of
    /// another thread's registration, and for the end of deregistrations.
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

/// The part of the cache's state that misses use under the lock.
#[derive(Default)]
pub(super) struct MissState {
    /// The number of misses that created an entry, including misses in progress. A miss that then
    /// fails or returns an uncached region is subtracted again.
    pub(super) registrations: u64,
    /// The errors of failed registrations, by entry index. Threads that waited for a registration
    /// read its error here.
    pub(super) failures: HashMap<u32, Error>,
}

/// Statistics that threads update without the lock. A field without a comment counts for the field
/// of the same name in [`CacheStatistics`](super::CacheStatistics).
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// The number of lookups that missed at first and hit later: after a wait for another thread's
    /// registration, or in the search under the lock. The lease slots count all other hits.
    pub(super) late_hits: AtomicU64,
    pub(super) uncached: AtomicU64,
    pub(super) failures: AtomicU64,
    pub(super) merged: AtomicU64,
    /// The number of entries that each cause invalidated, by the position of the cause in
    /// [`InvalidationCause::ALL`].
    pub(super) invalidations: [AtomicU64; InvalidationCause::ALL.len()],
}

impl Counters {
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
            issuer: TokenIssuer::new(),
            process: ProcessMark::current()?,
            invalidated: CachePadded(InvalidatedStack::default()),
            active_invalidations: CachePadded(ActiveInvalidations::new()),
            state: CachePadded(Mutex::new(LockedState {
                index: index_state,
                reclaim: ReclaimState::new(),
                misses: MissState::default(),
            })),
            in_flight: CachePadded(InFlightCounter::default()),
            ended: Condvar::default(),
            counters: CachePadded(Counters::default()),
            waker: Waker::default(),
        })
    }

    /// Assigns a free lease block to a thread or a lookup handle. Returns `None` if all blocks are
    /// in use or the system is out of memory.
    ///
    /// Takes the cache's lock, so that no new owner can look up while another thread evicts or
    /// detaches regions under the lock.
    pub(super) fn take_block(&self) -> Option<&LeaseBlock> {
        let _ends_no_entries = self.state.lock();
        self.leases.blocks.take_first()
    }

    /// Marks an entry as invalidated, counts `cause`, and pushes the entry on the stack of
    /// invalidated entries. Does nothing if the entry is free, failed or already invalidated.
    pub(super) fn mark_invalidated(&self, index: u32, cause: InvalidationCause) {
        if self.index.entries.at(index).mark_invalidated(|_| true) {
            self.counters.count_invalidation(cause);
            self.push_invalidated(index);
        }
    }

    /// Pushes an entry on the stack of invalidated entries. Only the thread that marked the entry
    /// invalidated may call this, once.
    pub(super) fn push_invalidated(&self, index: u32) {
        self.invalidated.push(&self.index.entries, index);
    }

    /// Invalidates the entries that contain a byte of the range, for the application. Entries that
    /// only share a page with the range stay. A monitor's invalidations apply to whole pages
    /// instead.
    pub(super) fn invalidate_bytes(&self, range: AddressRange) {
        let Some(last) = range.len().checked_sub(1) else { return };
        let start = range.start().0;
        let slot = self.publish(start, start + last, InvalidationCause::Application);
        self.invalidate_between(start, start + last, InvalidationCause::Application);
        self.active_invalidations.end(slot);
    }

    /// Publishes an invalidation of the addresses from `start` to `last`, so that new entries at
    /// these addresses are invalidated too. Issues a fence, and returns the invalidation's slot.
    /// The caller must then invalidate the entries that overlap the addresses, and end the
    /// invalidation in that slot.
    fn publish(&self, start: u64, last: u64, cause: InvalidationCause) -> u32 {
        let slot = self.active_invalidations.begin(start, last, cause);
        fence_after_exchange();
        slot
    }

    /// Begins an invalidation of the pages that contain a byte of the range, and returns its slot.
    /// Invalidates the entries that overlap these pages. Until the invalidation ends, new entries
    /// that overlap these pages are invalidated too.
    ///
    /// For an empty range, no existing entry is invalidated. The only page is then the one in which
    /// the range starts.
    fn start_invalidation(&self, range: AddressRange, cause: InvalidationCause) -> u32 {
        let (start, last) = whole_pages(range);
        let slot = self.publish(start, last, cause);
        if !range.is_empty() {
            self.invalidate_between(start, last, cause);
        }
        slot
    }

    /// Invalidates the entries that overlap the addresses from `start` to `last`. Wakes the worker
    /// if this invalidated an entry. Does nothing in a forked child.
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

/// Returns the first and last address of the pages that contain a byte of a range. For an empty
/// range, these are the bounds of the page in which the range starts. The page size is that of this
/// machine, because the kernel frees memory by whole pages.
fn whole_pages(range: AddressRange) -> (u64, u64) {
    let within = rustix::param::page_size() as u64 - 1;
    let last = range.start().0.saturating_add(range.len().saturating_sub(1));
    (range.start().0 & !within, last | within)
}

impl<S: CacheBackend> Invalidator for CacheCore<S> {
    fn invalidate(&self, range: AddressRange, cause: InvalidationCause) {
        let slot = self.start_invalidation(range, cause);
        self.active_invalidations.end(slot);
    }

    fn invalidate_start(&self, range: AddressRange, cause: InvalidationCause) -> InvalidationToken {
        let slot = self.start_invalidation(range, cause);
        InvalidationToken::new(&self.issuer, slot.into())
    }

    fn invalidate_end(&self, change: InvalidationToken) {
        if let Some(slot) = change.redeem(&self.issuer) {
            self.active_invalidations.end(slot as u32);
        }
    }

    fn close_gate(&self) -> GateToken {
        self.leases.gate.close();
        GateToken::new(&self.issuer)
    }

    fn open_gate(&self, closed: GateToken) {
        if closed.redeem(&self.issuer) {
            self.leases.gate.open();
        }
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

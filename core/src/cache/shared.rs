//! What the handle, the worker, the leases and the monitors of a cache share.

use std::{
    collections::HashMap,
    fmt,
    ops::Deref,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, OnceLock},
};

use smallvec::SmallVec;

use super::{
    Key, Limits, Source,
    arena::Arena,
    blocks::{Block, Blocks},
    changes::Changes,
    entry::{Entry, state},
    flight::Flights,
    gate::Gate,
    radix::{self, MAX_INDEX, Radix, Shape},
    statistics::Counters,
    sync::{AtomicBool, AtomicU32, Barrier, Condvar, Mutex, Ordering, announce_by_exchange},
};
use crate::{
    AddressRange, Error, ProcessMark, Result,
    monitor::{Cause, Change, Invalidator},
};

/// Entries beyond the limit: in use and dead, or being registered while others are given back.
#[cfg(not(loom))]
const SPARE_ENTRIES: usize = 4096;
#[cfg(loom)]
const SPARE_ENTRIES: usize = 2;
/// More than that no cache holds.
const MOST_ENTRIES: usize = 1 << 22;

/// Caches that a thread finds its block of at once.
pub(super) const WAYS: usize = 4;

const fn way_of(number: u64) -> usize {
    number as usize % WAYS
}

/// Keeps what is written apart from what every lookup reads.
#[repr(align(128))]
#[derive(Debug)]
pub(super) struct Apart<T>(pub(super) T);

impl<T> Deref for Apart<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

#[repr(C)]
pub(super) struct Shared<S: Source> {
    pub(super) gate: Gate,
    /// Where threads note their block of this cache.
    pub(super) way: usize,
    pub(super) number: u64,
    pub(super) barrier: Barrier,
    pub(super) entries: Arena<Entry<S>>,
    pub(super) radix: Radix,
    pub(super) blocks: Arc<Blocks>,
    pub(super) limits: Limits,
    pub(super) source: S,
    /// The process that made the cache.
    pub(super) process: ProcessMark,
    /// The dead stack: entries that were marked dead and are not collected yet, linked through
    /// themselves.
    dead: Apart<AtomicU32>,
    pub(super) changes: Apart<Changes>,
    pub(super) structure: Apart<Mutex<Structure<S>>>,
    pub(super) flights: Apart<Flights>,
    /// A registration ended, or deregistrations did that somebody waits for.
    pub(super) settled: Condvar,
    pub(super) counters: Apart<Counters>,
    pub(super) waker: Waker,
}

/// What the lock protects.
pub(super) struct Structure<S: Source> {
    pub(super) shape: Shape,
    /// Entries ever used; the rest of the arena is untouched.
    pub(super) made: u32,
    pub(super) free: Vec<u32>,
    /// Entries that are not dead, and their bytes.
    pub(super) count: usize,
    pub(super) bytes: u64,
    /// Misses that made an entry, those under way among them.
    pub(super) registrations: u64,
    /// Entries given up for others.
    pub(super) evictions: u64,
    /// Dead entries that wait for their last lease, each with the number of the draining that
    /// brought it.
    pub(super) dying: Vec<(u32, u64)>,
    /// How many of them were leased when they were looked at last.
    pub(super) leased_dead: usize,
    /// How often the dead stack was drained.
    pub(super) drained: u64,
    /// Why a registration failed, for those who waited for it.
    pub(super) failures: HashMap<u32, Error>,
    /// Who wants to be told when an entry is gone.
    pub(super) told: HashMap<u32, Vec<Arc<Told>>>,
    /// Regions ever retired, each of which is or was deregistered.
    pub(super) retired: u64,
    /// Who wants to be told when no deregistration is under way; an await of [`Flights`] if there
    /// is anybody.
    pub(super) told_after: Vec<Arc<Told>>,
    /// Regions that the provider refused to deregister.
    pub(super) stuck: Vec<Retired<S>>,
    /// Regions that died and that a miss has left to the worker: not among those that are counted
    /// as retired.
    pub(super) left: Vec<Retired<S>>,
    /// Where eviction looks next.
    pub(super) hand: u32,
    pub(super) candidates: Vec<u32>,
    /// The number of the last scan for leases.
    pub(super) scan: u32,
}

/// A registration that nobody can find any more.
pub(super) struct Retired<S: Source> {
    pub(super) region: Option<S::Region>,
    pub(super) watch: Option<S::Watch>,
    pub(super) told: Option<Box<[Arc<Told>]>>,
}

/// Who is told when this is dropped, and may use the cache then: whoever holds it holds no lock by
/// that time, and registers nothing.
pub(super) type Telling = Vec<Arc<Told>>;

/// What is retired at once: often one.
pub(super) type Retirees<S> = SmallVec<[Retired<S>; 1]>;

/// Calls back when the last holder lets go: once, whatever becomes of the entries.
pub(super) struct Told(std::sync::Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Told {
    pub(super) fn new(told: impl FnOnce() + Send + 'static) -> Self {
        Self(std::sync::Mutex::new(Some(Box::new(told))))
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        if let Ok(Some(told)) = self.0.get_mut().map(Option::take)
            // Any thread may run the callback, often the worker, and further callbacks may follow.
            && catch_unwind(AssertUnwindSafe(told)).is_err()
        {
            tracing::error!("an invalidation callback of a registration cache panicked");
        }
    }
}

/// Wakes the worker; may be called by a hook: two flags and a futex.
#[derive(Debug, Default)]
pub(super) struct Waker {
    pub(super) called: AtomicBool,
    /// The worker sleeps until it is woken: it says so before it looks whether it was called.
    pub(super) asleep: AtomicBool,
    pub(super) worker: OnceLock<std::thread::Thread>,
}

impl Waker {
    pub(super) fn wake(&self) {
        if !self.called.swap(true, Ordering::SeqCst)
            && self.asleep.load(Ordering::SeqCst)
            && let Some(worker) = self.worker.get()
        {
            worker.unpark();
        }
    }
}

impl<S: Source> Shared<S> {
    pub(super) fn new(source: S, limits: Limits, barrier: Barrier) -> Result<Self> {
        use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
        /// Numbers of caches, so that a thread can tell them apart after one is gone.
        static NEXT: AtomicU64 = AtomicU64::new(1);

        let max_count = limits.max_count.min(MOST_ENTRIES);
        let limits = Limits { max_count, ..limits };
        let capacity = (max_count + SPARE_ENTRIES).min(MAX_INDEX as usize);
        let (radix, shape) = Radix::new(capacity)?;
        let entries = Arena::reserve(capacity)?;
        if !entries.ensure(1) {
            return Err(Error::new(crate::ErrorKind::OutOfResources, "mprotect"));
        }
        // What a lookup takes for an entry where there is none is free, so that it need not ask,
        // and far from all memory.
        Entry::<S>::free(entries.at(0));
        entries.at(0).start.store(u64::MAX, Ordering::Relaxed);
        let number = NEXT.fetch_add(1, Relaxed);
        Ok(Self {
            number,
            way: way_of(number),
            gate: Gate::new(number, barrier.lookups_fence())?,
            barrier,
            entries,
            radix,
            blocks: Arc::new(Blocks::new()?),
            limits,
            source,
            process: ProcessMark::current()?,
            dead: Apart(AtomicU32::new(0)),
            changes: Apart(Changes::new()),
            structure: Apart(Mutex::new(Structure {
                shape,
                made: 0,
                free: Vec::new(),
                count: 0,
                bytes: 0,
                registrations: 0,
                evictions: 0,
                dying: Vec::new(),
                leased_dead: 0,
                drained: 0,
                left: Vec::new(),
                failures: HashMap::new(),
                told: HashMap::new(),
                retired: 0,
                told_after: Vec::new(),
                stuck: Vec::new(),
                hand: 0,
                candidates: Vec::new(),
                scan: 0,
            })),
            flights: Apart(Flights::new()),
            settled: Condvar::default(),
            counters: Apart(Counters::default()),
            waker: Waker::default(),
        })
    }

    /// A block for one more who looks up; `None` if there can be no more. Under the lock, so that
    /// whoever ends entries knows who may look them up meanwhile.
    pub(super) fn take_block(&self) -> Option<&Block> {
        let _nobody_ends_entries = self.structure.lock();
        self.blocks.take_first()
    }

    /// Puts an entry that was just marked dead where the worker finds it. For hooks: links, and no
    /// more.
    pub(super) fn push_dead(&self, index: u32) {
        let entry = self.entries.at(index);
        let mut head = self.dead.load(Ordering::Relaxed);
        loop {
            entry.next_dead.store(head, Ordering::Relaxed);
            let (ok, seen) = (Ordering::Release, Ordering::Relaxed);
            match self.dead.compare_exchange_weak(head, index, ok, seen) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Moves the dead stack to the dying, which do not count any more.
    pub(super) fn drain_dead(&self, structure: &mut Structure<S>) {
        if self.dead.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut index = self.dead.swap(0, Ordering::Acquire);
        structure.drained += 1;
        while index != 0 {
            let entry = self.entries.at(index);
            structure.count -= 1;
            structure.bytes -= entry.len();
            structure.dying.push((index, structure.drained));
            index = entry.next_dead.load(Ordering::Relaxed);
        }
    }

    /// Marks one entry dead, whatever its range.
    pub(super) fn kill(&self, index: u32, cause: Cause) {
        if self.entries.at(index).kill(|_| true) {
            self.counters.invalidated(cause);
            self.push_dead(index);
        }
    }

    /// Marks the entries dead that have a byte of the range, but not those that only share a page
    /// with it. Serves the application, which knows its bytes; monitors report pages.
    pub(super) fn invalidate_bytes(&self, range: AddressRange) {
        let Some(last) = range.len().checked_sub(1) else { return };
        let start = range.start().0;
        let change = self.publish(start, start + last, Cause::Application);
        self.kill_between(start, start + last, Cause::Application);
        self.end(change);
    }

    /// Publishes a change of the addresses from `start` to `last`; the caller then looks for
    /// entries.
    fn publish(&self, start: u64, last: u64, cause: Cause) -> Change {
        let change = self.changes.begin(start, last, cause);
        announce_by_exchange();
        change
    }

    /// Marks entries dead that have an address from `start` to `last`.
    fn kill_between(&self, start: u64, last: u64, cause: Cause) {
        let Some((first_page, last_page)) = radix::touched(start, last) else { return };
        if self.gate.is_forked() {
            return;
        }
        let mut any = false;
        self.radix.walk(first_page, last_page, &mut |index| {
            if self.entries.at(index).kill(|entry| entry.overlaps(start, last)) {
                self.counters.invalidated(cause);
                self.push_dead(index);
                any = true;
            }
        });
        if any {
            self.waker.wake();
        }
    }

    /// An entry that is live or being registered and covers the key. Under the lock.
    #[inline]
    pub(super) fn find_locked(&self, key: &Key) -> u32 {
        match self.radix.find_at_page(key.start) {
            Ok(0) => 0,
            _ => self.find_among(key),
        }
    }

    #[cold]
    #[inline(never)]
    fn find_among(&self, key: &Key) -> u32 {
        let fits = |index: u32| {
            let entry = self.entries.at(index);
            let word = entry.state.load(Ordering::Acquire);
            (state::is_live(word) || state::is_registering(word)) && entry.covers(key)
        };
        let found = self.radix.find(key.start, fits);
        if found != 0 && fits(found) { found } else { 0 }
    }
}

/// First and last address of the pages that a range touches.
fn whole_pages(range: AddressRange) -> (u64, u64) {
    let last = range.start().0.saturating_add(range.len().saturating_sub(1));
    (range.start().0 & !0xfff, last | 0xfff)
}

impl<S: Source> Invalidator for Shared<S> {
    fn invalidate(&self, range: AddressRange, cause: Cause) {
        let change = self.begin(range, cause);
        self.end(change);
    }

    fn begin(&self, range: AddressRange, cause: Cause) -> Change {
        let (start, last) = whole_pages(range);
        let change = self.publish(start, last, cause);
        if !range.is_empty() {
            self.kill_between(start, last, cause);
        }
        change
    }

    fn end(&self, change: Change) {
        self.changes.end(&change);
    }

    fn close_gate(&self) {
        self.gate.close();
    }

    fn open_gate(&self) {
        self.gate.open();
    }
}

impl<S: Source> fmt::Debug for Shared<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache")
            .field("limits", &self.limits)
            .field("gate", &self.gate)
            .finish_non_exhaustive()
    }
}

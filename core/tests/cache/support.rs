//! A backend that records registrations, watches and calls.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use hmem_core::{
    Access, Address, AddressRange, Error, ErrorKind, Rejected, Result,
    cache::{Cache, CacheBackend, Key, Limits},
    monitor::Invalidator,
};
use parking_lot::{Condvar, Mutex};

/// A region of the backend: a recorded registration.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) id: u64,
    pub(crate) key: Key,
}

#[derive(Default)]
pub(crate) struct CallRecords {
    pub(crate) registered: Mutex<BTreeMap<u64, Key>>,
    next: AtomicU64,
    pub(crate) registrations: AtomicUsize,
    pub(crate) deregistrations: AtomicUsize,
    pub(crate) watches: AtomicUsize,
    pub(crate) unwatches: AtomicUsize,
    /// The number of calls of `unwatch` after which the cache watched nothing.
    pub(crate) unwatched: AtomicUsize,
    /// The kinds of errors with which the next registrations fail, the last one first.
    failing: Mutex<Vec<ErrorKind>>,
    /// The number of deregistrations that the backend refuses, beginning with the next one.
    pub(crate) refusing: AtomicUsize,
    /// True if the backend refuses deregistrations with `Busy`, and false for `Driver`.
    pub(crate) busy: AtomicBool,
    /// The largest number of live registrations. 0 means no limit.
    pub(crate) room: AtomicUsize,
    /// The largest number of watches at once. 0 means no limit.
    pub(crate) watch_room: AtomicUsize,
    pub(crate) unwatchable: AtomicBool,
    /// The backend refuses to register any range that overlaps this memory. `None` means that it
    /// refuses none.
    pub(crate) bad: Mutex<Option<Key>>,
    /// The backend refuses to watch any range that overlaps this memory. `None` means that it
    /// refuses none.
    pub(crate) blind: Mutex<Option<Key>>,
    /// True if the cache must validate each hit.
    pub(crate) checked: AtomicBool,
    pub(crate) invalid: AtomicBool,
    /// True if the next validation fails with an error.
    pub(crate) unsure: AtomicBool,
    pub(crate) asked: AtomicUsize,
    pub(crate) validating: CallGate,
    pub(crate) registering: CallGate,
    pub(crate) deregistering: CallGate,
}

/// A gate that holds calls of one kind until they are released.
#[derive(Default)]
pub(crate) struct CallGate {
    held: Mutex<bool>,
    released: Condvar,
    waiting: AtomicUsize,
    /// A closure that runs once, in the next call that passes the gate.
    pub(crate) meanwhile: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl CallGate {
    /// Makes calls wait at the gate until [`CallGate::release`].
    pub(crate) fn hold(&self) {
        *self.held.lock() = true;
    }

    pub(crate) fn release(&self) {
        *self.held.lock() = false;
        self.released.notify_all();
    }

    /// Yields until `count` calls wait at the gate.
    pub(crate) fn until_held(&self, count: usize) {
        while self.waiting.load(Ordering::SeqCst) < count {
            std::thread::yield_now();
        }
    }

    fn pass(&self) {
        let mut held = self.held.lock();
        self.waiting.fetch_add(1, Ordering::SeqCst);
        while *held {
            self.released.wait(&mut held);
        }
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        drop(held);
        let meanwhile = self.meanwhile.lock().take();
        if let Some(meanwhile) = meanwhile {
            meanwhile();
        }
    }
}

impl CallRecords {
    pub(crate) fn fail_next(&self, kind: ErrorKind) {
        self.failing.lock().push(kind);
    }

    pub(crate) fn live(&self) -> usize {
        self.registered.lock().len()
    }
}

/// The backend of the tests, which records its calls in [`CallRecords`].
#[derive(Clone, Default)]
pub(crate) struct RecordingBackend(pub(crate) Arc<CallRecords>);

impl CacheBackend for RecordingBackend {
    type Region = Region;
    type Watch = Key;
    type Owner = ();

    fn watch(&self, key: &Key, _: &Arc<dyn Invalidator>) -> Result<Key> {
        if self.0.unwatchable.load(Ordering::SeqCst) || touches(&self.0.blind, key) {
            return Err(
                Error::new(ErrorKind::Unsupported, "subscribe").remedy("no monitor watches this")
            );
        }
        let watched =
            self.0.watches.load(Ordering::SeqCst) - self.0.unwatches.load(Ordering::SeqCst);
        let room = self.0.watch_room.load(Ordering::SeqCst);
        if room > 0 && watched >= room {
            return Err(Error::new(ErrorKind::OutOfResources, "subscribe"));
        }
        self.0.watches.fetch_add(1, Ordering::SeqCst);
        Ok(*key)
    }

    fn unwatch(&self, _: Key) {
        if self.0.unwatches.fetch_add(1, Ordering::SeqCst) + 1
            == self.0.watches.load(Ordering::SeqCst)
        {
            self.0.unwatched.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn needs_validation(&self, _: &Key) -> bool {
        self.0.checked.load(Ordering::SeqCst)
    }

    fn is_current(&self, _: &Key) -> Result<bool> {
        self.0.asked.fetch_add(1, Ordering::SeqCst);
        self.0.validating.pass();
        if self.0.unsure.swap(false, Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Driver, "valid"));
        }
        Ok(!self.0.invalid.swap(false, Ordering::SeqCst))
    }

    fn max_len(&self) -> u64 {
        1 << 30
    }

    fn register(&self, key: &Key, (): &(), _: Option<&Self::Watch>) -> Result<Region> {
        self.0.registrations.fetch_add(1, Ordering::SeqCst);
        self.0.registering.pass();
        if let Some(kind) = self.0.failing.lock().pop() {
            return Err(Error::new(kind, "register").context("range", key.range()));
        }
        if touches(&self.0.bad, key) {
            return Err(Error::new(ErrorKind::BadAddress, "register").context("range", key.range()));
        }
        let mut registered = self.0.registered.lock();
        let room = self.0.room.load(Ordering::SeqCst);
        if room > 0 && registered.len() >= room {
            return Err(Error::new(ErrorKind::OutOfResources, "register"));
        }
        let id = self.0.next.fetch_add(1, Ordering::SeqCst);
        registered.insert(id, *key);
        Ok(Region { id, key: *key })
    }

    fn deregister(&self, region: Region) -> Result<(), Rejected<Region>> {
        self.0.deregistering.pass();
        let refuse = |left: usize| left.checked_sub(1);
        if self.0.refusing.fetch_update(Ordering::SeqCst, Ordering::SeqCst, refuse).is_ok() {
            let busy = self.0.busy.load(Ordering::SeqCst);
            let kind = if busy { ErrorKind::Busy } else { ErrorKind::Driver };
            return Err(Rejected::new(region, Error::new(kind, "deregister")));
        }
        self.0.deregistrations.fetch_add(1, Ordering::SeqCst);
        let gone = self.0.registered.lock().remove(&region.id);
        assert!(gone.is_some(), "{region:?} is deregistered twice");
        Ok(())
    }
}

fn touches(memory: &Mutex<Option<Key>>, key: &Key) -> bool {
    memory.lock().is_some_and(|memory| memory.range().overlaps(key.range()))
}

/// The length of most ranges. Tests that depend on the pages of the machine use [`page`].
pub(crate) const PAGE: u64 = 4096;

/// Returns the page size of the machine. The ranges of monitors affect whole pages of this size.
pub(crate) fn page() -> u64 {
    rustix::param::page_size() as u64
}

pub(crate) fn range(start: u64, len: u64) -> AddressRange {
    AddressRange::new(Address(start), len).expect("no wrap")
}

pub(crate) fn key(start: u64, len: u64) -> Key {
    Key::new(range(start, len), Access::SEND).expect("a key")
}

/// Creates a cache over a [`RecordingBackend`]. Also returns the backend's records.
pub(crate) fn cache(limits: Limits) -> (Cache<RecordingBackend>, Arc<CallRecords>) {
    let ledger = RecordingBackend::default();
    let records = Arc::clone(&ledger.0);
    (Cache::new(ledger, limits).expect("a cache"), records)
}

pub(crate) fn limits(max_count: usize) -> Limits {
    Limits { max_count, ..Limits::default() }
}

/// Waits until `is_so` returns true. Panics after a minute.
pub(crate) fn until(is_so: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "waited in vain");
        std::thread::yield_now();
    }
}

/// Asserts that no region is registered and none is watched.
pub(crate) fn assert_empty(records: &CallRecords) {
    assert_eq!(records.live(), 0);
    assert_eq!(records.watches.load(Ordering::SeqCst), records.unwatches.load(Ordering::SeqCst));
}

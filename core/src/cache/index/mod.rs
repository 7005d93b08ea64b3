//! The index: entries, and the table that finds them by address.

pub(super) mod entry;
pub(super) mod radix;

use self::{
    entry::{Entry, state},
    radix::{MAX_INDEX, PartialSearch, Radix, Shape},
};
use super::{arena::Arena, backend::CacheBackend, key::Key, sync::Ordering};
use crate::{Error, ErrorKind, Result};

/// The entries and the table, which any thread may read without a lock.
#[repr(C)]
pub(super) struct Index<S: CacheBackend> {
    pub(super) entries: Arena<Entry<S>>,
    pub(super) radix: Radix,
}

/// The part of the index that the cache's lock protects.
#[derive(Debug)]
pub(super) struct IndexState {
    pub(super) shape: Shape,
    /// The number of entries that were ever used. The memory of the other entries was never
    /// touched.
    pub(super) made: u32,
    pub(super) free: Vec<u32>,
    /// The number of entries that are not invalidated.
    pub(super) count: usize,
    /// The number of bytes of these entries.
    pub(super) bytes: u64,
}

impl<S: CacheBackend> Index<S> {
    /// Creates an index for up to `capacity` entries.
    pub(super) fn new(capacity: usize) -> Result<(Self, IndexState)> {
        let capacity = capacity.min(MAX_INDEX as usize);
        let (radix, shape) = Radix::new(capacity)?;
        let entries = Arena::reserve(capacity)?;
        if !entries.ensure(1) {
            return Err(Error::new(ErrorKind::OutOfResources, "mprotect"));
        }
        // A lookup that finds nothing reads entry 0, which is free and far from all memory. So the
        // lookup need not test for it.
        Entry::<S>::free(entries.at(0));
        entries.at(0).start.store(u64::MAX, Ordering::Relaxed);
        let state = IndexState { shape, made: 0, free: Vec::new(), count: 0, bytes: 0 };
        Ok((Self { entries, radix }, state))
    }

    /// Searches the table without the lock. Returns an entry that may be live and cover the key, or
    /// 0.
    #[inline(always)]
    pub(super) fn find(&self, key: &Key) -> u32 {
        #[cfg(all(test, not(loom)))]
        searches::count();
        match self.radix.find_at_page(key.start) {
            Ok(index) => index,
            Err(partial) => {
                // A copy, so that a hit need not keep the key in memory.
                let key = *key;
                self.find_from(partial, &key)
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn find_from(&self, partial: PartialSearch, key: &Key) -> u32 {
        self.radix.find_from(key.start, partial, |index| {
            let entry = self.entries.at(index);
            state::is_live(entry.state.load(Ordering::Relaxed)) && entry.covers(key)
        })
    }

    /// Searches the table under the lock. Returns an entry that is live or being registered and
    /// covers the key, or 0.
    #[inline]
    pub(super) fn find_locked(&self, key: &Key) -> u32 {
        #[cfg(all(test, not(loom)))]
        searches::count();
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

/// A counter of the searches of the table by the calling thread, for tests.
#[cfg(all(test, not(loom)))]
pub(super) mod searches {
    use std::cell::Cell;

    thread_local! {
        static SEARCHES: Cell<u32> = const { Cell::new(0) };
    }

    pub(super) fn count() {
        SEARCHES.set(SEARCHES.get() + 1);
    }

    /// Returns the number of searches since the last call.
    pub(in crate::cache) fn take() -> u32 {
        SEARCHES.take()
    }
}

//! The index of a cache: its entries, and the table that finds an entry by address.

pub(super) mod entry;
pub(super) mod radix;

use self::{
    entry::{Entry, state},
    radix::{MAX_INDEX, PartialSearch, Radix, RadixState},
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
    pub(super) radix: RadixState,
    /// The number of entries that were used at least once. These are the entries with the indices
    /// from 1 to this number.
    pub(super) created: u32,
    /// The indices of the free entries. Entries that were never used (see `created`) are not in
    /// this list.
    pub(super) free: Vec<u32>,
    /// The number of entries that count for [`Limits::max_count`](super::Limits::max_count): those
    /// registered or being registered. An invalidated entry counts until a thread takes it from the
    /// stack of invalidated entries.
    pub(super) count: usize,
    /// The total size in bytes of the entries that `count` counts.
    pub(super) bytes: u64,
}

impl<S: CacheBackend> Index<S> {
    /// Creates an index for up to `capacity` entries.
    pub(super) fn new(capacity: usize) -> Result<(Self, IndexState)> {
        let capacity = capacity.min(MAX_INDEX as usize);
        let (radix, radix_state) = Radix::new(capacity)?;
        let entries = Arena::reserve(capacity)?;
        if !entries.ensure(1) {
            return Err(Error::new(ErrorKind::OutOfResources, "mprotect"));
        }
        // Entry 0 stands for "no entry". It is always free and starts at the last address, so that
        // lookups need no separate test for it.
        Entry::<S>::free(entries.at(0));
        entries.at(0).start.store(u64::MAX, Ordering::Relaxed);
        let state =
            IndexState { radix: radix_state, created: 0, free: Vec::new(), count: 0, bytes: 0 };
        Ok((Self { entries, radix }, state))
    }

    /// Searches the table without the lock. Returns the index of an entry, or 0. The caller must
    /// check whether the entry is live and covers the key.
    #[inline(always)]
    pub(super) fn find(&self, key: &Key) -> u32 {
        #[cfg(all(test, not(loom)))]
        searches::count();
        match self.radix.find_at_page(key.start) {
            Ok(index) => index,
            Err(partial) => {
                // Copying the key lets the compiler keep the key of a hit in registers.
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

    /// Searches the table under the lock. Returns the index of an entry that covers the key and is
    /// live or being registered, or 0.
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

/// A counter, for tests, of the calling thread's searches of the table.
#[cfg(all(test, not(loom)))]
pub(super) mod searches {
    use std::cell::Cell;

    thread_local! {
        static SEARCHES: Cell<u32> = const { Cell::new(0) };
    }

    pub(super) fn count() {
        SEARCHES.set(SEARCHES.get() + 1);
    }

    /// Returns the number of searches by the calling thread since its last call of this function.
    pub(in crate::cache) fn take() -> u32 {
        SEARCHES.take()
    }
}

//! Statistics of a cache, and a list of its entries.

#![allow(unsafe_code, reason = "reads the region of an entry under the cache's lock")]

use std::{fmt, time::Duration};

use super::{
    backend::CacheBackend,
    handle::Cache,
    index::entry::{self, state},
    key::Key,
    sync::{AtomicU64, Ordering},
};
use crate::monitor::InvalidationCause;

/// The counts of a cache's lookups, and its current content.
///
/// `lookups` is `hits` + `misses`, and `misses` is `registrations` + `uncached` + `failures`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheStatistics {
    /// The number of hits and misses together.
    pub lookups: u64,
    /// The number of lookups that returned a cached region, including those that waited for another
    /// thread's registration.
    pub hits: u64,
    /// The number of lookups that found no cached region and then registered, or waited for a
    /// registration that failed. A [`Cache::find`] that returns `None` does not count.
    pub misses: u64,
    /// The number of misses that created a cache entry, including misses in progress.
    pub registrations: u64,
    /// The number of misses that returned an uncached region.
    pub uncached: u64,
    /// The number of misses that returned an error, including the error of another thread's
    /// registration. The error for a key [of any owner](Key::of_any_owner) does not count.
    pub failures: u64,
    /// The number of entries that were evicted, to make room or by [`Cache::evict_idle`].
    pub evictions: u64,
    /// The number of entries that a larger, merged entry replaced.
    pub merged: u64,
    invalidations: ByCause,
    /// The number of entries that are registered or being registered. Invalidated entries do not
    /// count.
    pub entries: usize,
    /// The total size in bytes of the entries that `entries` counts.
    pub bytes: u64,
    /// The number of leases of cached regions, including those of threads that wait for a
    /// registration.
    pub leases: usize,
    /// The number of entries with at least one lease, including invalidated entries.
    pub in_use: usize,
    /// The number of invalidated entries that wait for the end of their last lease or for
    /// deregistration.
    pub pending_reclaim: usize,
    /// The number of regions that are still registered because the backend refused to deregister
    /// them. The cache retries when it next reclaims entries.
    pub deregister_failed: usize,
}

/// The number of entries invalidated by each cause. `Debug` names the causes that occurred.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct ByCause([u64; InvalidationCause::ALL.len()]);

impl fmt::Debug for ByCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = InvalidationCause::ALL.iter().map(|cause| (cause, self.0[*cause as usize]));
        f.debug_map().entries(counts.filter(|&(_, count)| count > 0)).finish()
    }
}

impl CacheStatistics {
    /// Returns the number of entries invalidated by `cause`, including those that were not cached
    /// afterwards, because their registration failed or no monitor could watch them.
    #[must_use]
    pub fn invalidations(&self, cause: InvalidationCause) -> u64 {
        self.invalidations.0[cause as usize]
    }

    /// Returns the number of entries invalidated by any cause. Merged entries do not count.
    #[must_use]
    pub fn all_invalidations(&self) -> u64 {
        self.invalidations.0.iter().sum()
    }
}

/// A registered entry, as [`Cache::entries`] lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CachedEntryInfo<T> {
    /// The key of the registration: range, rights, iface, device and allocation.
    pub key: Key,
    /// The time since the registration, with the resolution of the kernel's coarse clock (a few
    /// milliseconds).
    pub age: Duration,
    /// The number of leases of the entry.
    pub users: usize,
    /// The value that the closure given to [`Cache::entries`] returned for the entry's region.
    pub region: T,
}

impl<S: CacheBackend> Cache<S> {
    /// Returns the counts of lookups, and the current content of the cache. All numbers are 0 in a
    /// forked child.
    #[must_use]
    pub fn statistics(&self) -> CacheStatistics {
        let core = &self.core;
        if core.leases.gate.is_forked() {
            return CacheStatistics::default();
        }
        let mut locked = core.state.lock();
        core.drain_invalidated(&mut locked);
        let users = core.leases.blocks.users_by_entry();
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &*core.counters;
        let hits = core.leases.blocks.hits() + read(&counters.late_hits);
        let registrations = locked.misses.registrations;
        let (uncached, failures) = (read(&counters.uncached), read(&counters.failures));
        let misses = registrations + uncached + failures;
        let reclaim = &locked.reclaim;
        CacheStatistics {
            lookups: hits + misses,
            hits,
            misses,
            registrations,
            uncached,
            failures,
            evictions: reclaim.eviction.evictions,
            merged: read(&counters.merged),
            invalidations: ByCause(std::array::from_fn(|at| read(&counters.invalidations[at]))),
            entries: locked.index.count,
            bytes: locked.index.bytes,
            leases: users.values().sum(),
            in_use: users.len(),
            pending_reclaim: reclaim.pending_entries.len() + reclaim.left_to_worker.len(),
            deregister_failed: reclaim.refused.len(),
        }
    }

    /// Lists the registered entries that are not invalidated, with the result of `read` for each
    /// region. `read` runs under the cache's lock and must not use the cache. The list is empty in
    /// a forked child.
    pub fn entries<T>(&self, read: impl Fn(&S::Region) -> T) -> Vec<CachedEntryInfo<T>> {
        let core = &self.core;
        if core.leases.gate.is_forked() {
            return Vec::new();
        }
        let locked = core.state.lock();
        let users = core.leases.blocks.users_by_entry();
        let now = entry::now_ms();
        let is_valid = |index: &u32| {
            let word = core.index.entries.at(*index).state.load(Ordering::Acquire);
            state::is_registered(word) && word & state::INVALIDATED == 0
        };
        (1..=locked.index.created)
            .filter(is_valid)
            .map(|index| {
                let entry = core.index.entries.at(index);
                let age = now.saturating_sub(entry.registered_at_ms.load(Ordering::Relaxed));
                CachedEntryInfo {
                    key: entry.key(),
                    age: Duration::from_millis(age),
                    users: users.get(&index).copied().unwrap_or(0),
                    // SAFETY: the entry was seen registered under the cache's lock, which is held.
                    region: read(unsafe { entry.region() }),
                }
            })
            .collect()
    }
}

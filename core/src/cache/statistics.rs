//! Counting what a cache does, and listing what it holds.

use std::{collections::HashMap, time::Duration};

use super::{
    Key, Source,
    entry::state,
    shared::Shared,
    sync::{AtomicU64, Ordering},
};
use crate::monitor::Cause;

/// What a cache did and holds. `lookups` is `hits` and `misses`; `misses` is `registrations`,
/// `uncached` and `failures`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Statistics {
    /// Calls that asked for a region.
    pub lookups: u64,
    /// Those that got a cached one, also if they waited for another thread's registration.
    pub hits: u64,
    /// Those that did not.
    pub misses: u64,
    /// Misses that made an entry, those under way among them.
    pub registrations: u64,
    /// Misses that got a region of their own.
    pub uncached: u64,
    /// Misses that got an error.
    pub failures: u64,
    /// Entries given up for others.
    pub evictions: u64,
    /// Entries that a larger one replaced.
    pub merged: u64,
    invalidations: [u64; Cause::ALL.len()],
    /// Entries that are live or being registered.
    pub entries: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Leases of cached regions.
    pub leases: usize,
    /// Entries with at least one lease, dead ones included.
    pub in_use: usize,
    /// Dead entries that wait for their last put, or to be deregistered by the worker.
    pub dying: usize,
    /// Regions that the provider refused to deregister; tried again at each wake of the worker.
    pub stuck: usize,
}

impl Statistics {
    /// Entries that died by `cause`; those whose registration failed after that are among them.
    #[must_use]
    pub fn invalidations(&self, cause: Cause) -> u64 {
        self.invalidations[cause as usize]
    }

    /// Entries that died, by any cause.
    #[must_use]
    pub fn all_invalidations(&self) -> u64 {
        self.invalidations.iter().sum()
    }
}

/// An entry as a listing shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Listed<T> {
    /// Range, rights and identity.
    pub key: Key,
    /// Since when it is registered, to the resolution of the kernel's coarse clock (some
    /// milliseconds).
    pub age: Duration,
    /// Leases.
    pub users: usize,
    /// What was read off the region.
    pub region: T,
}

/// What is counted outside the lock, hits excepted: these are counted in the threads' own blocks.
#[derive(Debug)]
pub(super) struct Counters {
    /// Hits of those who waited or looked twice.
    pub(super) late_hits: AtomicU64,
    pub(super) uncached: AtomicU64,
    pub(super) failures: AtomicU64,
    pub(super) merged: AtomicU64,
    invalidations: [AtomicU64; Cause::ALL.len()],
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            late_hits: AtomicU64::new(0),
            uncached: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            merged: AtomicU64::new(0),
            invalidations: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Counters {
    pub(super) fn invalidated(&self, cause: Cause) {
        count(&self.invalidations[cause as usize]);
    }
}

impl<S: Source> Shared<S> {
    pub(super) fn statistics(&self) -> Statistics {
        if self.gate.is_forked() {
            return Statistics::default();
        }
        let mut structure = self.structure.lock();
        self.drain_dead(&mut structure);
        let mut users = HashMap::<u32, usize>::new();
        self.blocks.leased(|index| *users.entry(index).or_default() += 1);
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &*self.counters;
        let hits = self.blocks.hits() + read(&counters.late_hits);
        let registrations = structure.registrations;
        let (uncached, failures) = (read(&counters.uncached), read(&counters.failures));
        let misses = registrations + uncached + failures;
        Statistics {
            lookups: hits + misses,
            hits,
            misses,
            registrations,
            uncached,
            failures,
            evictions: structure.evictions,
            merged: read(&counters.merged),
            invalidations: std::array::from_fn(|cause| read(&counters.invalidations[cause])),
            entries: structure.count,
            bytes: structure.bytes,
            leases: users.values().sum(),
            in_use: users.len(),
            dying: structure.dying.len() + structure.left.len(),
            stuck: structure.stuck.len(),
        }
    }

    pub(super) fn list<T>(&self, read: impl Fn(&S::Region) -> T) -> Vec<Listed<T>> {
        if self.gate.is_forked() {
            return Vec::new();
        }
        let structure = self.structure.lock();
        let mut users = HashMap::<u32, usize>::new();
        self.blocks.leased(|index| *users.entry(index).or_default() += 1);
        let now = super::now();
        let registered = |index: &u32| {
            let word = self.entries.at(*index).state.load(Ordering::Acquire);
            state::is_registered(word) && word & state::DEAD == 0
        };
        (1..=structure.made)
            .filter(registered)
            .map(|index| {
                let entry = self.entries.at(index);
                let age = now.saturating_sub(entry.born.load(Ordering::Relaxed));
                Listed {
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

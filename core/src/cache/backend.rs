//! The backend trait of a cache, and the cache's limits.

use std::sync::Arc;

use super::key::Key;
use crate::{Rejected, Result, monitor::Invalidator};

/// Registers, deregisters and watches memory for a [`Cache`](super::Cache).
///
/// Threads may call the methods concurrently. The cache holds its lock while it calls
/// [`CacheBackend::max_len`], so that method must not use the cache. The cache holds no lock while
/// it calls any other method.
///
/// The cache stays usable if a method other than [`CacheBackend::max_len`] panics. A registration
/// that panics counts as failed. A region whose deregistration panics is lost: the cache does not
/// retry it.
pub trait CacheBackend: Send + Sync + 'static {
    /// A registered region of the backend.
    type Region: Send + Sync + 'static;

    /// A subscription to changes of one registration's memory.
    type Watch: Send + Sync + 'static;

    /// A value that the caller of [`Cache::register`](super::Cache::register) passes to
    /// [`CacheBackend::register`], such as the iface and the allocation of the memory. `()` for a
    /// backend that needs only the key.
    type Owner;

    /// Starts to watch the key's memory.
    ///
    /// From this call on, the backend reports changes of the memory to `invalidator`, or
    /// [`CacheBackend::is_current`] detects them. The cache calls this before it registers the
    /// memory of a new entry. An invalidation during the call already applies to the new entry.
    ///
    /// # Errors
    /// The reason why no monitor can watch the memory. On `OutOfResources` the cache evicts and
    /// calls this method once more, as for [`CacheBackend::register`]. If the memory can still not
    /// be watched, the cache registers it uncached. If the key is a merged one, the cache first
    /// tries to watch and cache the caller's own range.
    fn watch(&self, key: &Key, invalidator: &Arc<dyn Invalidator>) -> Result<Self::Watch>;

    /// Stops watching a registration's memory. The cache calls this once for each watch: after it
    /// deregistered the region, or after the registration failed. The drop of the cache calls this
    /// also for regions that stay registered because the backend refuses to deregister them.
    fn unwatch(&self, watch: Self::Watch);

    /// Returns true if each hit must call [`CacheBackend::is_current`]. The cache calls
    /// `needs_validation` once for each watch, before it registers the memory. The default is
    /// false, for a backend that reports every change to the invalidator. A backend that overrides
    /// this method must also override [`CacheBackend::is_current`], and the reverse.
    fn needs_validation(&self, _watch: &Self::Watch) -> bool {
        false
    }

    /// Returns true if the memory at the addresses is still the memory that was registered. If it
    /// is not, the cache invalidates the entry. The cache calls this method only if
    /// [`CacheBackend::needs_validation`] returned true for the watch.
    ///
    /// # Errors
    /// A failed driver call. The cache then invalidates the entry.
    fn is_current(&self, _watch: &Self::Watch) -> Result<bool> {
        Ok(true)
    }

    /// Returns the largest length in bytes of a merged registration. The cache does not compare the
    /// ranges of callers with this limit. The default is no limit.
    fn max_len(&self) -> u64 {
        u64::MAX
    }

    /// Registers the key's memory. `owner` is the value that the caller passed to
    /// [`Cache::register`](super::Cache::register). If the key is a merged one, this value may
    /// describe only a part of the key's memory. `watch` is the result of [`CacheBackend::watch`]
    /// for the same key, or `None` if the region stays uncached.
    ///
    /// # Errors
    /// On `OutOfResources` the cache deregisters all regions without leases and waits for
    /// deregistrations in flight. If that ended any registration, the cache calls this method once
    /// more, except in a forked child. If the registration of a merged key still fails, the cache
    /// registers the caller's own range. Otherwise the caller of
    /// [`Cache::register`](super::Cache::register) gets the error.
    fn register(
        &self,
        key: &Key,
        owner: &Self::Owner,
        watch: Option<&Self::Watch>,
    ) -> Result<Self::Region>;

    /// Deregisters a region.
    ///
    /// # Errors
    /// The driver's error, with the region, which is still registered: `Busy` if something outside
    /// the cache uses the region. The cache retries when it next reclaims entries, and after `Busy`
    /// also every 50 ms. It does not retry in a forked child or at the end of its drop.
    fn deregister(&self, region: Self::Region) -> Result<(), Rejected<Self::Region>>;
}

/// The limits of a cache, and the switch for merging.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The largest number of entries, with or without leases. Invalidated entries do not count. 0
    /// disables caching. A limit above 4,194,304 acts like 4,194,304.
    pub max_count: usize,
    /// The largest total size in bytes of all entries, without the invalidated ones. 0 disables
    /// caching.
    pub max_bytes: u64,
    /// True to merge a new registration with the entries that it overlaps or touches. The cache
    /// merges only entries with the same rights, iface, device and allocation, and no further than
    /// [`Limits::max_bytes`] and [`CacheBackend::max_len`] allow.
    pub merge: bool,
}

impl Default for Limits {
    /// Returns limits of 65,536 entries and any number of bytes, without merging.
    fn default() -> Self {
        Self { max_count: 65_536, max_bytes: u64::MAX, merge: false }
    }
}

//! The backend of a cache, which registers the memory, and the cache's limits.

use std::sync::Arc;

use super::key::Key;
use crate::{Rejected, Result, monitor::Invalidator};

/// Registers, deregisters and watches memory for a [`Cache`](super::Cache).
///
/// Any threads may call the methods at once. The cache holds none of its locks during a call.
pub trait CacheBackend: Send + Sync + 'static {
    /// A registered region of the backend.
    type Region: Send + Sync + 'static;

    /// A subscription to changes of one registration's memory.
    type Watch: Send + Sync + 'static;

    /// Starts to watch the key's memory.
    ///
    /// From now on, changes are reported to `invalidator`, or [`CacheBackend::is_current`] detects
    /// them. The cache's entry exists already, so that invalidations find it. The memory is not
    /// registered yet.
    ///
    /// # Errors
    /// The reason why no monitor can watch the memory. The cache then registers it uncached.
    fn watch(&self, key: &Key, invalidator: &Arc<dyn Invalidator>) -> Result<Self::Watch>;

    /// Stops watching. Called once for each watch, after the region is deregistered.
    fn unwatch(&self, watch: Self::Watch);

    /// Returns whether each hit must call [`CacheBackend::is_current`].
    fn needs_validation(&self, watch: &Self::Watch) -> bool;

    /// Returns whether the memory at the addresses is still the memory that was registered.
    ///
    /// # Errors
    /// A failed driver call. The cache then invalidates the entry.
    fn is_current(&self, watch: &Self::Watch) -> Result<bool>;

    /// Returns the largest length of a registration in bytes. Merging does not exceed it.
    fn max_len(&self) -> u64;

    /// Registers the key's memory. `watch` is the result of [`CacheBackend::watch`] for the same
    /// key; `None` if the region stays uncached.
    ///
    /// # Errors
    /// The caller of [`Cache::get_or_register`](super::Cache::get_or_register) gets the error. On
    /// `OutOfResources` the cache evicts idle entries and, if there were any, retries once.
    fn register(&self, key: &Key, watch: Option<&Self::Watch>) -> Result<Self::Region>;

    /// Deregisters a region.
    ///
    /// # Errors
    /// The region, still registered. The cache retries later.
    fn deregister(&self, region: Self::Region) -> Result<(), Rejected<Self::Region>>;
}

/// The limits of a cache, and the switch for merging.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The largest number of entries, in use or idle. Invalidated entries do not count. 0 disables
    /// caching. A cache never holds more than 4,194,304 entries.
    pub max_count: usize,
    /// The largest number of bytes of these entries together. 0 disables caching.
    pub max_bytes: u64,
    /// Set if a new registration is merged with the entries of the same rights that it overlaps or
    /// touches.
    pub merge: bool,
}

impl Default for Limits {
    /// Returns 65,536 entries, any number of bytes, no merging.
    fn default() -> Self {
        Self { max_count: 65_536, max_bytes: u64::MAX, merge: false }
    }
}

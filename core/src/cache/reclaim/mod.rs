//! Reclamation: the end of entries, and the deregistration of their regions.
//!
//! An entry ends by eviction (`evict`) or because it was invalidated (`collect`). Either way its
//! region is detached from the entry under the cache's lock, and deregistered without the lock
//! (`deregister`). The cache's thread (`worker`) collects invalidated entries.

mod collect;
mod deregister;
mod evict;
pub(super) mod state;
#[cfg(not(loom))]
pub(super) mod worker;

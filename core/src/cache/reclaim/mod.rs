//! Reclamation: frees entries that were evicted or invalidated, and deregisters their regions.
//!
//! - Eviction frees idle entries to make room (`evict`).
//! - Invalidated entries are pushed on a lock-free stack. A thread with the cache's lock drains the
//!   stack to a list of pending entries. It frees each pending entry that has no lease
//!   (`invalidated`).
//! - To free an entry, a thread detaches its region under the lock. Then it deregisters the region
//!   without the lock (`deregister`).
//! - The cache's own thread reclaims invalidated entries in the background (`worker`).

mod deregister;
mod evict;
mod invalidated;
pub(super) mod state;
#[cfg(not(loom))]
pub(super) mod worker;

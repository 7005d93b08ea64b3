//! The registration cache: keeps memory registered between uses, until the memory changes.
//!
//! A hit takes no lock. A hit on the fast path writes only cache lines that no other lookup writes.
//! A miss registers without a lock held, and other threads whose keys the new entry covers wait for
//! the registration. Monitors report changes through [`Invalidator`](crate::monitor::Invalidator),
//! which a hook inside `munmap` may call. The [guide](mod@guide) defines the terms of the
//! implementation, and explains its states and orderings.
//!
//! [`Cache`] is independent of providers: a [`CacheBackend`] registers, deregisters and watches the
//! memory.
//!
//! ```
//! use std::sync::Arc;
//!
//! use hmem_core::{
//!     Access, Address, AddressRange, Rejected, Result,
//!     cache::{Cache, CacheBackend, Key, Limits},
//!     monitor::Invalidator,
//! };
//!
//! struct Numbers;
//!
//! impl CacheBackend for Numbers {
//!     type Region = u64;
//!     type Watch = ();
//!     type Owner = ();
//!
//!     fn watch(&self, _: &Key, _: &Arc<dyn Invalidator>) -> Result<()> {
//!         Ok(())
//!     }
//!     fn unwatch(&self, _: ()) {}
//!     fn register(&self, key: &Key, (): &(), _: Option<&Self::Watch>) -> Result<u64> {
//!         Ok(key.range().start().0)
//!     }
//!     fn deregister(&self, _: u64) -> Result<(), Rejected<u64>> {
//!         Ok(())
//!     }
//! }
//!
//! let cache = Cache::new(Numbers, Limits::default())?;
//! let key = Key::new(AddressRange::new(Address(0x1000), 64)?, Access::SEND)?;
//! assert_eq!(*cache.get_or_register(&key)?, 0x1000);
//! assert_eq!(*cache.get_or_register(&key)?, 0x1000);
//! assert_eq!((cache.statistics().hits, cache.statistics().registrations), (1, 1));
//! # Ok::<(), hmem_core::Error>(())
//! ```

// The layers, lower ones first. A file imports only from layers above it in this list.
//
// - `sync`: atomics, locks, the asymmetric barrier; `arena`: memory that keeps its type;
// - `key`: the identity of a registration; `backend`: the trait that registers, and the limits;
// - `gate`: disables all hits; `invalidations`: the invalidations in progress;
// - `index/radix`, `index/entry`, then `index`: the table, the entries, and `IndexState`;
// - `lease/blocks`, `lease`, `lease/threads`: the slots, `Leases`, and the calling thread's block;
// - `reclaim/state`: `ReclaimState`, detached regions, callbacks;
// - `cache_core`: `CacheCore`, which owns the parts above, and `LockedState`;
// - `lookup`: fast and slow lookups;
// - `reclaim/deregister`, `reclaim/evict`, `reclaim/invalidated`, `reclaim/worker`: the end of
//   entries;
// - `lease/guard`: `Lease`, which ends a lease;
// - `miss`: waits or registers;
// - `handle`: `Cache`, `LookupHandle`, `OwnedLease`; then `statistics`.

mod arena;
mod backend;
mod cache_core;
mod gate;
mod handle;
mod index;
mod invalidations;
mod key;
mod lease;
mod lookup;
mod miss;
#[cfg(all(test, loom))]
mod models;
mod reclaim;
#[cfg(all(test, not(loom)))]
mod searches;
mod statistics;
#[cfg(all(test, not(loom)))]
mod stress;
mod sync;

#[doc = include_str!("guide.md")]
pub mod guide {}

#[cfg(not(loom))]
pub use self::sync::use_membarrier;
pub use self::{
    backend::{CacheBackend, Limits},
    handle::{Cache, LookupHandle, OwnedLease},
    key::Key,
    lease::guard::{Lease, UncachedReason},
    statistics::{CacheStatistics, CachedEntryInfo},
};

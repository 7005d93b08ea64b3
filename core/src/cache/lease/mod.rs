//! Leases: guards that keep cache entries registered.
//!
//! A lease is a hazard pointer. To publish a lease of an entry, a lookup writes the entry's index
//! into a lease slot. Before a thread frees an evicted or invalidated entry, that thread scans all
//! lease slots.

pub(super) mod blocks;
pub(super) mod guard;
pub(super) mod threads;

use std::sync::Arc;

use self::blocks::LeaseBlocks;
use super::{gate::Gate, sync::Barrier};
use crate::Result;

/// The largest number of caches for which a thread records its lease block. A lookup finds a
/// recorded block without a search.
pub(super) const RECORDED_CACHES: usize = 4;

/// The part of a cache's state with which lookups publish leases.
#[repr(C)]
pub(super) struct Leases {
    pub(super) gate: Gate,
    /// The position of this cache in each thread's `RecordedBlocks`: `number` modulo
    /// [`RECORDED_CACHES`].
    position: usize,
    /// The cache's number, which no other cache of the process has.
    pub(super) number: u64,
    pub(super) barrier: Barrier,
    /// The lease blocks. Each thread that owns blocks has a `Weak` reference, by which it releases
    /// them when it ends.
    pub(super) blocks: Arc<LeaseBlocks>,
}

impl Leases {
    pub(super) fn new(barrier: Barrier) -> Result<Self> {
        use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
        static NEXT: AtomicU64 = AtomicU64::new(1);

        let number = NEXT.fetch_add(1, Relaxed);
        Ok(Self {
            gate: Gate::new(number, barrier.lookups_fence())?,
            position: number as usize % RECORDED_CACHES,
            number,
            barrier,
            blocks: Arc::new(LeaseBlocks::new()?),
        })
    }
}

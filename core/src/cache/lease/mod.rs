//! Leases: how lookups publish the entries that they use, and the guards that end leases.
//!
//! A lease is a hazard pointer. A lookup writes an entry's index into a lease slot before it relies
//! on the entry. A thread that ends an entry scans all slots.

pub(super) mod blocks;
pub(super) mod guard;
pub(super) mod threads;

use std::sync::Arc;

use self::blocks::LeaseBlocks;
use super::{gate::Gate, sync::Barrier};
use crate::Result;

/// The number of caches for which a thread records its block, so that a lookup finds the block
/// without a search.
pub(super) const WAYS: usize = 4;

/// State that lookups need to publish leases.
#[repr(C)]
pub(super) struct Leases {
    pub(super) gate: Gate,
    /// The position at which threads record their block of this cache: `number` modulo [`WAYS`].
    way: usize,
    /// The cache's number, which no other cache of the process has.
    pub(super) number: u64,
    pub(super) barrier: Barrier,
    pub(super) blocks: Arc<LeaseBlocks>,
}

impl Leases {
    pub(super) fn new(barrier: Barrier) -> Result<Self> {
        use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
        static NEXT: AtomicU64 = AtomicU64::new(1);

        let number = NEXT.fetch_add(1, Relaxed);
        Ok(Self {
            gate: Gate::new(number, barrier.lookups_fence())?,
            way: number as usize % WAYS,
            number,
            barrier,
            blocks: Arc::new(LeaseBlocks::new()?),
        })
    }
}

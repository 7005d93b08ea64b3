//! Deregistrations under way: begun under the cache's lock, and ended without it.

use super::sync::{AtomicU32, AtomicU64, Ordering, announce_by_exchange};

/// How many regions that were retired are deregistered, and whether anybody waits for that.
///
/// Whoever ends some counts and then looks for waiters; whoever waits says so, and then looks at
/// the count, each with a fence between the two. One of them sees the other.
#[derive(Debug)]
pub(super) struct Flights {
    ended: AtomicU64,
    awaited: AtomicU32,
}

impl Flights {
    pub(super) fn new() -> Self {
        Self { ended: AtomicU64::new(0), awaited: AtomicU32::new(0) }
    }

    /// Whether some of the `begun`, which the lock protects, are under way. If not, all that was
    /// done before their ends is seen.
    pub(super) fn any(&self, begun: u64) -> bool {
        self.ended.load(Ordering::Acquire) != begun
    }

    /// Ends some; `true` if somebody waits, who is to be woken under the lock.
    pub(super) fn end(&self, many: usize) -> bool {
        self.ended.fetch_add(many as u64, Ordering::SeqCst);
        announce_by_exchange();
        self.awaited.load(Ordering::Relaxed) != 0
    }

    /// Says that somebody waits. Under the lock, before the look at whether [any](Flights::any) are
    /// under way.
    pub(super) fn await_end(&self) {
        self.awaited.fetch_add(1, Ordering::SeqCst);
        announce_by_exchange();
    }

    /// Takes that back, under the lock.
    pub(super) fn awaited(&self) {
        self.awaited.fetch_sub(1, Ordering::Relaxed);
    }
}

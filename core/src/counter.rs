//! Completion counters (`fi_cntr`).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Counts successes and failures; shared by whoever was bound to it.
#[derive(Debug, Default)]
pub struct Counter {
    value: AtomicU64,
    errors: AtomicU64,
    closed: AtomicBool,
}

impl Counter {
    /// A counter at 0.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Successful operations so far.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.value.load(Ordering::Acquire)
    }

    /// Failed operations so far.
    #[must_use]
    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Acquire)
    }

    /// Adds to the successes; the bytes written before are visible to whoever sees the new value.
    pub fn add(&self, count: u64) {
        if !self.is_closed() {
            self.value.fetch_add(count, Ordering::AcqRel);
        }
    }

    /// Adds to the failures.
    pub fn add_error(&self, count: u64) {
        if !self.is_closed() {
            self.errors.fetch_add(count, Ordering::AcqRel);
        }
    }

    /// Closes it: it counts no more, and regions that it is bound to can be closed.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Returns true if the counter was closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

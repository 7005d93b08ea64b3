//! Completion counters (`fi_cntr`).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A counter of successful and failed operations. Several regions and endpoints may share a
/// counter.
#[derive(Debug, Default)]
pub struct Counter {
    value: AtomicU64,
    errors: AtomicU64,
    closed: AtomicBool,
}

impl Counter {
    /// Creates a counter with the value 0.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of successful operations so far.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.value.load(Ordering::Acquire)
    }

    /// Returns the number of failed operations so far.
    #[must_use]
    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Acquire)
    }

    /// Adds `count` to the number of successful operations, unless the counter is closed. A thread
    /// that sees the new value also sees all bytes that the calling thread wrote before this call.
    pub fn add(&self, count: u64) {
        if !self.is_closed() {
            self.value.fetch_add(count, Ordering::AcqRel);
        }
    }

    /// Adds `count` to the number of failed operations, unless the counter is closed.
    pub fn add_error(&self, count: u64) {
        if !self.is_closed() {
            self.errors.fetch_add(count, Ordering::AcqRel);
        }
    }

    /// Closes the counter: the counter stops counting and keeps its values. An open counter
    /// prevents the regions that it is bound to from being closed. A closed counter can still be
    /// bound, and then counts nothing.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Returns true if the counter was closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

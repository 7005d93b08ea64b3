//! A subscriber that records its notifications.
#![allow(dead_code, reason = "each suite uses a part of it")]

use std::sync::{
    OnceLock,
    atomic::{AtomicUsize, Ordering},
};

use hmem_core::{
    AddressRange,
    monitor::{GateToken, InvalidationCause, InvalidationToken, Invalidator, Subscription},
};

/// A subscription that watches nothing. A monitor that compares the identity of an allocation
/// ignores the subscription.
pub(crate) const NO_SUBSCRIPTION: Subscription = Subscription::unnumbered();

/// A subscriber that records the changes that begin, and counts those that have not ended. As for
/// every invalidator, its methods do not allocate or lock: an allocator can unmap memory, which
/// notifies the recorder again.
#[derive(Debug)]
pub(crate) struct Recorder {
    begun: Box<[OnceLock<(AddressRange, InvalidationCause)>]>,
    count: AtomicUsize,
    open: AtomicUsize,
}

impl Default for Recorder {
    fn default() -> Self {
        Self::with_capacity(64)
    }
}

impl Recorder {
    /// Creates a recorder of at most `changes` changes.
    pub(crate) fn with_capacity(changes: usize) -> Self {
        Self {
            begun: (0..changes).map(|_| OnceLock::new()).collect(),
            count: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
        }
    }

    /// Returns the number of changes that have begun and not ended.
    pub(crate) fn open(&self) -> usize {
        self.open.load(Ordering::Acquire)
    }

    /// Returns the recorded changes, which have all ended.
    #[track_caller]
    pub(crate) fn changes(&self) -> Vec<(AddressRange, InvalidationCause)> {
        // In this order, all counted changes have ended.
        let count = self.count.load(Ordering::Acquire);
        assert_eq!(self.open(), 0, "a change has not ended");
        assert!(count <= self.begun.len(), "{count} changes: too many to record");
        self.begun[..count].iter().map(|change| *change.get().expect("it has ended")).collect()
    }

    /// Returns the ranges of the recorded changes, which have all ended.
    #[track_caller]
    pub(crate) fn ranges(&self) -> Vec<AddressRange> {
        self.changes().into_iter().map(|(range, _)| range).collect()
    }
}

impl Invalidator for Recorder {
    fn invalidate(&self, range: AddressRange, cause: InvalidationCause) {
        let change = self.invalidate_start(range, cause);
        self.invalidate_end(change);
    }

    fn invalidate_start(&self, range: AddressRange, cause: InvalidationCause) -> InvalidationToken {
        self.open.fetch_add(1, Ordering::AcqRel);
        if let Some(change) = self.begun.get(self.count.fetch_add(1, Ordering::AcqRel)) {
            change.set((range, cause)).expect("each change has a place of its own");
        }
        InvalidationToken::unnumbered()
    }

    fn invalidate_end(&self, _: InvalidationToken) {
        self.open.fetch_sub(1, Ordering::AcqRel);
    }

    fn close_gate(&self) -> GateToken {
        GateToken::unnumbered()
    }

    fn open_gate(&self, _: GateToken) {}
}

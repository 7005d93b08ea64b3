//! A subscriber that records its notifications.
#![allow(dead_code, reason = "each suite uses a part of it")]

use std::sync::{
    Mutex,
    atomic::{AtomicUsize, Ordering},
};

use hmem_core::{
    AddressRange,
    monitor::{GateToken, InvalidationCause, InvalidationToken, Invalidator, Subscription},
};

/// A subscription that watches nothing. A monitor that compares the identity of an allocation
/// ignores the subscription.
pub(crate) const NO_SUBSCRIPTION: Subscription = Subscription::unnumbered();

/// A subscriber that records the changes that begin, and counts those that have not ended.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    begun: Mutex<Vec<(AddressRange, InvalidationCause)>>,
    open: AtomicUsize,
}

impl Recorder {
    /// Returns the number of changes that have begun and not ended.
    pub(crate) fn open(&self) -> usize {
        self.open.load(Ordering::Acquire)
    }

    /// Returns the recorded changes, which have all ended.
    #[track_caller]
    pub(crate) fn changes(&self) -> Vec<(AddressRange, InvalidationCause)> {
        assert_eq!(self.open(), 0, "a change has not ended");
        self.begun.lock().expect("no panic").clone()
    }

    /// Returns the ranges of the recorded changes, which have all ended.
    #[track_caller]
    pub(crate) fn ranges(&self) -> Vec<AddressRange> {
        self.changes().into_iter().map(|(range, _)| range).collect()
    }
}

impl Invalidator for Recorder {
    fn invalidate(&self, range: AddressRange, cause: InvalidationCause) {
        self.begun.lock().expect("no panic").push((range, cause));
    }

    fn invalidate_start(&self, range: AddressRange, cause: InvalidationCause) -> InvalidationToken {
        self.open.fetch_add(1, Ordering::AcqRel);
        self.invalidate(range, cause);
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

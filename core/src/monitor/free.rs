//! Subscriptions to frees, for ifaces that see every free of their memory themselves.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{InvalidationCause, InvalidationToken, Invalidator, Subscription, SubscriptionMap};
use crate::AddressRange;

/// A watched range and its invalidator.
#[derive(Clone, Debug)]
struct WatchedRange {
    range: AddressRange,
    invalidator: Arc<dyn Invalidator>,
    /// True until the subscription is removed. Locked while a free calls `invalidate_start`, so
    /// that unsubscribing waits for the end of that call.
    active: Arc<Mutex<bool>>,
}

#[derive(Debug, Default)]
struct WatchedRanges {
    subscriptions: SubscriptionMap<WatchedRange>,
    /// The ranges with a free in progress.
    freeing: Vec<AddressRange>,
}

/// A free in progress. Dropping the value ends the invalidations that the free started.
struct FreeInProgress<'a> {
    subscriptions: &'a FreeSubscriptions,
    range: AddressRange,
    changes: Vec<(WatchedRange, InvalidationToken)>,
}

impl Drop for FreeInProgress<'_> {
    fn drop(&mut self) {
        for (watch, change) in self.changes.drain(..) {
            watch.invalidator.invalidate_end(change);
        }
        let mut watched = self.subscriptions.0.lock();
        if let Some(at) = watched.freeing.iter().position(|freeing| *freeing == self.range) {
            watched.freeing.swap_remove(at);
        }
    }
}

/// The subscriptions to frees of memory, for an iface that makes each free itself or is notified of
/// each free.
///
/// The `subscribe` of a [`Monitor`](super::Monitor) calls [`add`](Self::add), and its `unsubscribe`
/// calls [`remove`](Self::remove). An iface announces frees in one of two ways:
///
/// - An iface that frees memory itself runs each free inside
///   [`while_freeing`](Self::while_freeing).
/// - An iface that a driver's callback notifies calls `while_freeing` with an empty closure in that
///   callback. When the callback runs, the driver must no longer report the memory as allocated.
///   The driver must not reuse the addresses until the call returns.
#[derive(Debug, Default)]
pub struct FreeSubscriptions(Mutex<WatchedRanges>);

impl FreeSubscriptions {
    /// Invalidates the cached entries of `range`, then runs `free`. New entries of `range` are
    /// invalidated too until `free` returns or panics.
    ///
    /// Calls for one range may overlap in time. The driver may reuse a freed address at once for
    /// another thread, which may free it again before the first call has returned.
    pub fn while_freeing<T>(&self, range: AddressRange, free: impl FnOnce() -> T) -> T {
        let mut watched = self.0.lock();
        watched.freeing.push(range);
        let touched = watched.subscriptions.values().filter(|watch| watch.range.overlaps(range));
        let touched: Vec<_> = touched.cloned().collect();
        drop(watched);
        let mut in_progress = FreeInProgress { subscriptions: self, range, changes: Vec::new() };
        for watch in touched {
            let active = watch.active.lock();
            if *active {
                let change = watch.invalidator.invalidate_start(range, InvalidationCause::Free);
                drop(active);
                in_progress.changes.push((watch, change));
            }
        }
        free()
    }

    /// Adds a subscription. If a free of overlapping memory is in progress, invalidates the freed
    /// range at once.
    ///
    /// The subscription does not detect a free that ended before this call. A domain's cache
    /// queries the memory after `subscribe` to detect such a free. If the iface has no allocation
    /// identities, `subscribe` of the monitor must query the memory after this call, and return an
    /// error if the memory is gone.
    pub fn add(&self, range: AddressRange, invalidator: Arc<dyn Invalidator>) -> Subscription {
        let watch = WatchedRange { range, invalidator, active: Arc::new(Mutex::new(true)) };
        let mut watched = self.0.lock();
        let subscription = watched.subscriptions.insert(watch.clone());
        // A free that is already in progress will not notify the new subscription.
        let missed = watched.freeing.iter().copied().find(|freeing| freeing.overlaps(range));
        drop(watched);
        if let Some(freeing) = missed {
            watch.invalidator.invalidate(freeing, InvalidationCause::Free);
        }
        subscription
    }

    /// Returns the number of subscriptions.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.lock().subscriptions.len()
    }

    /// Removes a subscription. If a free is calling `invalidate_start` for the subscription, waits
    /// for the end of that call. The `invalidate_end` of that free may still follow. Does nothing
    /// if the subscription belongs to another `FreeSubscriptions`.
    pub fn remove(&self, subscription: Subscription) {
        let watch = self.0.lock().subscriptions.remove(subscription);
        if let Some(watch) = watch {
            *watch.active.lock() = false;
        }
    }
}

//! Subscriptions to frees, for ifaces that see every free of their memory themselves.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;

use super::{InvalidationCause, InvalidationToken, Invalidator, Subscription};
use crate::AddressRange;

/// A watched range and its invalidator.
#[derive(Clone, Debug)]
struct WatchedRange {
    range: AddressRange,
    invalidator: Arc<dyn Invalidator>,
    /// True until the subscription is removed. Locked during a call of the invalidator, so that
    /// unsubscribing waits for the end of the call.
    active: Arc<Mutex<bool>>,
}

#[derive(Debug, Default)]
struct WatchedRanges {
    next: u64,
    by_id: BTreeMap<u64, WatchedRange>,
    /// The ranges that are being freed now.
    freeing: Vec<AddressRange>,
}

/// The subscriptions to frees that an iface makes itself or that the application announces.
///
/// A [`Monitor`](super::Monitor) uses this if the driver has no callbacks. Its `subscribe` calls
/// [`add`](Self::add), its `unsubscribe` calls [`remove`](Self::remove), and the iface wraps each
/// free in [`while_freeing`](Self::while_freeing).
#[derive(Debug, Default)]
pub struct FreeSubscriptions(Mutex<WatchedRanges>);

impl FreeSubscriptions {
    /// Runs `free`. All entries of `range` are invalidated before, and stay invalid during the
    /// call.
    ///
    /// Frees of one range may overlap. The driver may reuse a freed address at once for another
    /// thread, which may free it again before the first call has returned.
    pub fn while_freeing<T>(&self, range: AddressRange, free: impl FnOnce() -> T) -> T {
        let mut watched = self.0.lock();
        watched.freeing.push(range);
        let touched = watched.by_id.values().filter(|watch| watch.range.overlaps(range));
        let touched: Vec<_> = touched.cloned().collect();
        drop(watched);
        let changes: Vec<(WatchedRange, InvalidationToken)> = touched
            .into_iter()
            .filter_map(|watch| {
                let active = watch.active.lock();
                let change = active
                    .then(|| watch.invalidator.invalidate_start(range, InvalidationCause::Free));
                drop(active);
                change.map(|change| (watch, change))
            })
            .collect();
        let result = free();
        for (watch, change) in changes {
            watch.invalidator.invalidate_end(change);
        }
        let mut watched = self.0.lock();
        if let Some(at) = watched.freeing.iter().position(|freeing| *freeing == range) {
            watched.freeing.swap_remove(at);
        }
        result
    }

    /// Adds a subscription. If a free of overlapping memory is in progress, invalidates at once.
    ///
    /// The monitor must query the memory after this call: the query detects an earlier free, and
    /// the subscription a later one.
    pub fn add(&self, range: AddressRange, invalidator: Arc<dyn Invalidator>) -> Subscription {
        let watch = WatchedRange { range, invalidator, active: Arc::new(Mutex::new(true)) };
        let mut watched = self.0.lock();
        watched.next += 1;
        let id = watched.next;
        watched.by_id.insert(id, watch.clone());
        // A free that is already in progress will not notify the new subscription.
        let missed = watched.freeing.iter().copied().find(|freeing| freeing.overlaps(range));
        drop(watched);
        if let Some(freeing) = missed {
            watch.invalidator.invalidate(freeing, InvalidationCause::Free);
        }
        Subscription(id)
    }

    /// Removes a subscription. If the subscription's invalidator is being called, waits for the end
    /// of that call.
    pub fn remove(&self, subscription: Subscription) {
        let watch = self.0.lock().by_id.remove(&subscription.0);
        if let Some(watch) = watch {
            *watch.active.lock() = false;
        }
    }
}

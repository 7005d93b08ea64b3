//! Subscriptions to the frees that an iface makes or is told of.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;

use super::{InvalidationCause, InvalidationToken, Invalidator, Subscription};
use crate::AddressRange;

/// A range that an invalidator is notified of.
#[derive(Clone, Debug)]
struct WatchedRange {
    range: AddressRange,
    invalidator: Arc<dyn Invalidator>,
    /// Locked while the invalidator is called, so that unsubscribing waits for its end.
    active: Arc<Mutex<bool>>,
}

#[derive(Debug, Default)]
struct WatchedRanges {
    next: u64,
    by_id: BTreeMap<u64, WatchedRange>,
    /// Ranges that are being freed, each once for each free in progress.
    going: Vec<AddressRange>,
}

/// Subscriptions to frees that an iface makes itself or that the application announces.
///
/// A [`Monitor`](super::Monitor) holds one where no driver calls back: its `subscribe` and
/// `unsubscribe` call [`add`](Self::add) and [`remove`](Self::remove), and the iface wraps each
/// free in [`while_freeing`](Self::while_freeing).
#[derive(Debug, Default)]
pub struct FreeSubscriptions(Mutex<WatchedRanges>);

impl FreeSubscriptions {
    /// Runs `free` while everything cached over `range` is invalidated and stays so.
    ///
    /// Frees of one range may overlap: as soon as the driver has an address back it may give it to
    /// another thread, which may free it before the first free has ended here.
    pub fn while_freeing<T>(&self, range: AddressRange, free: impl FnOnce() -> T) -> T {
        let mut watched = self.0.lock();
        watched.going.push(range);
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
        if let Some(at) = watched.going.iter().position(|going| *going == range) {
            watched.going.swap_remove(at);
        }
        result
    }

    /// Adds a subscription. A free in progress that overlaps `range` invalidates at once.
    ///
    /// A monitor looks the memory up after this call: a free from here on notifies, and the lookup
    /// detects an earlier one.
    pub fn add(&self, range: AddressRange, invalidator: Arc<dyn Invalidator>) -> Subscription {
        let watch = WatchedRange { range, invalidator, active: Arc::new(Mutex::new(true)) };
        let mut watched = self.0.lock();
        watched.next += 1;
        let id = watched.next;
        watched.by_id.insert(id, watch.clone());
        // A free in progress does not notify this subscription.
        let missed = watched.going.iter().copied().find(|going| going.overlaps(range));
        drop(watched);
        if let Some(going) = missed {
            watch.invalidator.invalidate(going, InvalidationCause::Free);
        }
        Subscription(id)
    }

    /// Removes a subscription. Waits for a call of its invalidator that is in progress.
    pub fn remove(&self, subscription: Subscription) {
        let watch = self.0.lock().by_id.remove(&subscription.0);
        if let Some(watch) = watch {
            *watch.active.lock() = false;
        }
    }
}

//! The monitor of simulated memory. It detects frees by callbacks or by allocation identities.

use std::{
    cell::Cell,
    collections::{BTreeMap, HashMap},
    fmt,
    sync::Arc,
};

use hmem_core::{
    AddressRange, Allocation, Error, ErrorKind, Result,
    iface::MonitorSource,
    monitor::{
        DetectionMethod, InvalidationCause, InvalidationToken, Invalidator, Monitor, Subscription,
        TokenIssuer,
    },
};
use parking_lot::{Mutex, ReentrantMutex};

use super::{Inner, Simulated, faults::DeviceCall};

/// The method by which a monitor detects frees of simulated memory. Real drivers offer one of these
/// two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FreeDetection {
    /// The driver has no callback. A changed allocation identity shows a free, as with CUDA's
    /// buffer ids.
    #[default]
    Identity,
    /// Subscribers are notified before memory is freed, as with ROCr's deallocation callback.
    Callback,
}

impl FreeDetection {
    fn detection(self) -> DetectionMethod {
        match self {
            Self::Identity => DetectionMethod::Identity,
            Self::Callback => DetectionMethod::Callback,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Watch {
    range: AddressRange,
    invalidator: Arc<dyn Invalidator>,
    /// True until the invalidator is unsubscribed. A thread holds the lock while it notifies the
    /// invalidator, so that unsubscribing waits for the end of the notification. The lock is
    /// reentrant, so that an invalidator may unsubscribe itself.
    active: ReentrantMutex<Cell<bool>>,
}

impl Watch {
    fn notify(&self, range: AddressRange) {
        let active = self.active.lock();
        if active.get() {
            self.invalidator.invalidate(range, InvalidationCause::Free);
        }
    }

    /// Starts the invalidation of `range`. Returns `None` after the invalidator was unsubscribed.
    fn start(&self, range: AddressRange) -> Option<InvalidationToken> {
        let active = self.active.lock();
        active.get().then(|| self.invalidator.invalidate_start(range, InvalidationCause::Free))
    }
}

/// The invalidations that a free started. [`Subscriptions::end_notify`] ends them.
pub(crate) type Started = Vec<(Arc<Watch>, InvalidationToken)>;

#[derive(Debug)]
struct Watches {
    next: u64,
    by_id: HashMap<u64, Arc<Watch>>,
    /// Subscriptions to ranges of 2^n up to 2^(n+1) bytes, for each n, ordered by start address.
    /// The bound on the length limits the search for overlaps.
    by_length: [BTreeMap<(u64, u64), Arc<Watch>>; 64],
    /// Ranges that a thread is freeing. The subscribers have been or are being notified, and the
    /// memory still exists.
    being_freed: Vec<AddressRange>,
}

/// The subscriptions to frees of one simulated iface.
#[derive(Debug)]
pub(crate) struct Subscriptions {
    issuer: TokenIssuer,
    watches: Mutex<Watches>,
}

fn length_class(len: u64) -> usize {
    len.max(1).ilog2() as usize
}

impl Subscriptions {
    pub(crate) fn new() -> Self {
        Self {
            issuer: TokenIssuer::new(),
            watches: Mutex::new(Watches {
                next: 1,
                by_id: HashMap::new(),
                by_length: [const { BTreeMap::new() }; 64],
                being_freed: Vec::new(),
            }),
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.watches.lock().by_id.len()
    }

    fn add(&self, range: AddressRange, invalidator: Arc<dyn Invalidator>) -> Subscription {
        let watch =
            Arc::new(Watch { range, invalidator, active: ReentrantMutex::new(Cell::new(true)) });
        let mut watches = self.watches.lock();
        let id = watches.next;
        watches.next += 1;
        watches.by_id.insert(id, Arc::clone(&watch));
        let class = &mut watches.by_length[length_class(range.len())];
        class.insert((range.start().0, id), Arc::clone(&watch));
        // A free that is in progress has notified its subscribers before this subscription existed.
        // So this function itself notifies the new invalidator.
        let missed =
            watches.being_freed.iter().copied().find(|being_freed| being_freed.overlaps(range));
        drop(watches);
        if let Some(being_freed) = missed {
            watch.notify(being_freed);
        }
        Subscription::new(&self.issuer, id)
    }

    fn remove(&self, subscription: Subscription) {
        let Some(id) = subscription.redeem(&self.issuer) else { return };
        let mut watches = self.watches.lock();
        let Some(watch) = watches.by_id.remove(&id) else { return };
        let class = &mut watches.by_length[length_class(watch.range.len())];
        class.remove(&(watch.range.start().0, id));
        drop(watches);
        watch.active.lock().set(false);
    }

    /// Notifies all subscribers of ranges that overlap `range`. The list of subscriptions is not
    /// locked during the notifications. A thread that unsubscribes an invalidator waits until a
    /// notification in progress has ended.
    pub(crate) fn notify(&self, range: AddressRange) -> Started {
        let mut notified = Vec::new();
        let mut watches = self.watches.lock();
        watches.being_freed.push(range);
        let end = range.start().0.saturating_add(range.len());
        for (class, by_start) in
            watches.by_length.iter().enumerate().filter(|(_, class)| !class.is_empty())
        {
            let longest = 1_u64.checked_shl(class as u32 + 1).unwrap_or(u64::MAX);
            let from = range.start().0.saturating_sub(longest);
            let near = by_start.range((from, 0)..(end, 0));
            notified.extend(
                near.map(|(_, watch)| Arc::clone(watch))
                    .filter(|watch| watch.range.overlaps(range)),
            );
        }
        drop(watches);
        let started = |watch: Arc<Watch>| watch.start(range).map(|change| (watch, change));
        notified.into_iter().filter_map(started).collect()
    }

    /// Records that the free of `range`, which [`Subscriptions::notify`] has announced, has ended:
    /// the memory was freed, or the free has failed. Ends the invalidations that `notify` started.
    pub(crate) fn end_notify(&self, range: AddressRange, started: Started) {
        for (watch, change) in started {
            watch.invalidator.invalidate_end(change);
        }
        let mut watches = self.watches.lock();
        if let Some(found) =
            watches.being_freed.iter().position(|being_freed| *being_freed == range)
        {
            watches.being_freed.swap_remove(found);
        }
    }
}

impl MonitorSource for Simulated {
    fn detection(&self) -> DetectionMethod {
        self.inner.config.free_detection.detection()
    }

    fn start(&self) -> Result<Arc<dyn Monitor>> {
        Ok(Arc::new(SimulatedMonitor(Arc::clone(&self.inner))))
    }
}

/// The monitor that detects frees of one simulated iface.
struct SimulatedMonitor(Arc<Inner>);

impl fmt::Debug for SimulatedMonitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedMonitor")
            .field("name", &self.name())
            .field("detection", &self.detection())
            .finish_non_exhaustive()
    }
}

impl Monitor for SimulatedMonitor {
    fn name(&self) -> &str {
        match self.0.config.free_detection {
            FreeDetection::Identity => "identity",
            FreeDetection::Callback => "callback",
        }
    }

    fn detects(&self, cause: InvalidationCause) -> bool {
        match self.0.config.free_detection {
            FreeDetection::Identity => cause == InvalidationCause::Identity,
            FreeDetection::Callback => cause == InvalidationCause::Free,
        }
    }

    fn rationale(&self) -> String {
        match self.0.config.free_detection {
            FreeDetection::Identity => {
                "identity compared at each hit: the simulated device has no callback for frees"
                    .into()
            }
            FreeDetection::Callback => {
                "notified by the simulated device before memory is freed".into()
            }
        }
    }

    fn detection(&self) -> DetectionMethod {
        self.0.config.free_detection.detection()
    }

    fn subscribe(
        &self,
        range: AddressRange,
        invalidator: Arc<dyn Invalidator>,
    ) -> Result<Subscription> {
        self.0.call(DeviceCall::Subscribe)?;
        let subscription = self.0.subscriptions.add(range, invalidator);
        // The lookup follows the subscription: later frees notify the subscriber, and the lookup
        // finds the result of earlier ones.
        if self.0.table.lookup(range.start()).is_none() {
            self.0.subscriptions.remove(subscription);
            return Err(Error::new(ErrorKind::Unsupported, "subscribe")
                .iface(self.0.config.kind)
                .context("range", range)
                .remedy("only live allocations of this iface can be watched"));
        }
        Ok(subscription)
    }

    fn unsubscribe(&self, subscription: Subscription) {
        self.0.subscriptions.remove(subscription);
    }

    fn valid(&self, _: &Subscription, allocation: &Allocation) -> Result<bool> {
        Ok(self.0.query(allocation.base())?.as_ref() == Some(allocation))
    }
}

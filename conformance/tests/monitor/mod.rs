//! Monitors with a deliberate fault, for tests that expect the suite to detect it.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use hmem_core::{
    AddressRange, Allocation, Error, ErrorKind, Result,
    monitor::{
        DetectionMethod, GateToken, InvalidationCause, InvalidationToken, Invalidator, Monitor,
        Subscription,
    },
};

/// A deliberate fault of a monitor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "each test binary with this module uses one variant")]
pub(crate) enum MonitorFault {
    /// Fault: the monitor notifies no subscriber.
    NoNotification,
    /// Fault: the monitor reports every allocation as valid, even one that was freed.
    AlwaysValid,
    /// Fault: the monitor refuses every subscription with Unsupported.
    RefusedSubscription,
    /// Fault: the monitor notifies of frees of exactly the watched range only.
    PartNotWatched,
    /// Fault: the monitor notifies only the latest subscription.
    OneSubscription,
    /// Fault: the monitor still notifies a subscription that has ended.
    EndlessSubscription,
}

/// A monitor that forwards to `monitor`, with one fault.
#[derive(Debug)]
pub(crate) struct FaultyMonitor {
    monitor: Arc<dyn Monitor>,
    fault: MonitorFault,
    /// Number of the latest subscription.
    latest: Arc<AtomicU64>,
}

impl FaultyMonitor {
    pub(crate) fn new(monitor: Arc<dyn Monitor>, fault: MonitorFault) -> Self {
        Self { monitor, fault, latest: Arc::default() }
    }
}

/// A filter of notifications.
#[derive(Debug)]
enum Filter {
    /// Passes notifications of this range.
    Exact(AddressRange),
    /// Passes notifications while `latest` has this number.
    Latest { number: u64, latest: Arc<AtomicU64> },
}

/// An invalidator that forwards some of its notifications.
#[derive(Debug)]
struct Filtered {
    invalidator: Arc<dyn Invalidator>,
    filter: Filter,
}

impl Filtered {
    fn passes(&self, range: AddressRange) -> bool {
        match &self.filter {
            Filter::Exact(exact) => range == *exact,
            Filter::Latest { number, latest } => latest.load(Ordering::Relaxed) == *number,
        }
    }
}

impl Invalidator for Filtered {
    fn invalidate(&self, range: AddressRange, cause: InvalidationCause) {
        if self.passes(range) {
            self.invalidator.invalidate(range, cause);
        }
    }

    fn invalidate_start(&self, range: AddressRange, cause: InvalidationCause) -> InvalidationToken {
        if self.passes(range) {
            self.invalidator.invalidate_start(range, cause)
        } else {
            InvalidationToken::unnumbered()
        }
    }

    fn invalidate_end(&self, change: InvalidationToken) {
        self.invalidator.invalidate_end(change);
    }

    fn close_gate(&self) -> GateToken {
        self.invalidator.close_gate()
    }

    fn open_gate(&self, closed: GateToken) {
        self.invalidator.open_gate(closed);
    }
}

impl Monitor for FaultyMonitor {
    fn name(&self) -> &str {
        self.monitor.name()
    }

    fn rationale(&self) -> String {
        self.monitor.rationale()
    }

    fn detection(&self) -> DetectionMethod {
        self.monitor.detection()
    }

    fn detects(&self, cause: InvalidationCause) -> bool {
        self.monitor.detects(cause)
    }

    fn subscribe(
        &self,
        range: AddressRange,
        invalidator: Arc<dyn Invalidator>,
    ) -> Result<Subscription> {
        match self.fault {
            MonitorFault::NoNotification => Ok(Subscription::unnumbered()),
            MonitorFault::AlwaysValid | MonitorFault::EndlessSubscription => {
                self.monitor.subscribe(range, invalidator)
            }
            MonitorFault::RefusedSubscription => {
                Err(Error::new(ErrorKind::Unsupported, "subscribe"))
            }
            MonitorFault::PartNotWatched => {
                let filter = Filter::Exact(range);
                self.monitor.subscribe(range, Arc::new(Filtered { invalidator, filter }))
            }
            MonitorFault::OneSubscription => {
                let number = self.latest.fetch_add(1, Ordering::Relaxed) + 1;
                let filter = Filter::Latest { number, latest: Arc::clone(&self.latest) };
                self.monitor.subscribe(range, Arc::new(Filtered { invalidator, filter }))
            }
        }
    }

    fn unsubscribe(&self, subscription: Subscription) {
        match self.fault {
            MonitorFault::NoNotification | MonitorFault::EndlessSubscription => {}
            _ => self.monitor.unsubscribe(subscription),
        }
    }

    fn valid(&self, subscription: &Subscription, allocation: &Allocation) -> Result<bool> {
        match self.fault {
            MonitorFault::AlwaysValid => Ok(true),
            _ => self.monitor.valid(subscription, allocation),
        }
    }
}

//! Monitors with a deliberate fault, for tests that expect the suite to detect it.

use std::sync::Arc;

use hmem_core::{
    AddressRange, Allocation, Error, ErrorKind, Result,
    monitor::{DetectionMethod, InvalidationCause, Invalidator, Monitor, Subscription},
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
}

/// A monitor that forwards to `monitor`, with one fault.
#[derive(Debug)]
pub(crate) struct FaultyMonitor {
    pub(crate) monitor: Arc<dyn Monitor>,
    pub(crate) fault: MonitorFault,
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
            MonitorFault::AlwaysValid => self.monitor.subscribe(range, invalidator),
            MonitorFault::RefusedSubscription => {
                Err(Error::new(ErrorKind::Unsupported, "subscribe"))
            }
        }
    }

    fn unsubscribe(&self, subscription: Subscription) {
        match self.fault {
            MonitorFault::NoNotification => {}
            MonitorFault::AlwaysValid | MonitorFault::RefusedSubscription => {
                self.monitor.unsubscribe(subscription);
            }
        }
    }

    fn valid(&self, subscription: &Subscription, allocation: &Allocation) -> Result<bool> {
        match self.fault {
            MonitorFault::NoNotification | MonitorFault::RefusedSubscription => {
                self.monitor.valid(subscription, allocation)
            }
            MonitorFault::AlwaysValid => Ok(true),
        }
    }
}

//! The monitor of simulated memory. It detects frees by callbacks or by allocation identities.

use std::{fmt, sync::Arc};

use hmem_core::{
    AddressRange, Allocation, Error, ErrorKind, Result,
    iface::MonitorSource,
    monitor::{DetectionMethod, InvalidationCause, Invalidator, Monitor, Subscription},
};

use super::{Simulated, SimulatedInner, faults::DeviceCall};

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

impl MonitorSource for Simulated {
    fn detection(&self) -> DetectionMethod {
        self.inner.config.free_detection.detection()
    }

    fn start(&self) -> Result<Arc<dyn Monitor>> {
        Ok(Arc::new(SimulatedMonitor(Arc::clone(&self.inner))))
    }
}

/// The monitor that detects frees of one simulated iface.
struct SimulatedMonitor(Arc<SimulatedInner>);

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
        // finds the result of earlier frees.
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

//! The monitor of host memory. It starts at its first use, since it may patch the C library.

use std::sync::Arc;

use hmem_core::{
    Result,
    iface::MonitorSource,
    monitor::{DetectionMethod, Monitor},
};

use super::System;
use crate::monitor::SystemMonitor;

impl System {
    /// Sets the monitor. The default is the choice of
    /// [`HostMonitorKind::Auto`](crate::monitor::HostMonitorKind::Auto).
    #[must_use]
    pub fn with_monitor(mut self, monitor: SystemMonitor) -> Self {
        self.monitor = monitor.into();
        self
    }

    /// Returns the monitor of host memory, with the reasons for it. Starts it at the first call.
    pub fn cache_monitor(&self) -> &SystemMonitor {
        self.monitor.get_or_init(SystemMonitor::auto)
    }
}

impl MonitorSource for System {
    /// The kernel has no callback for unmapped memory. A monitor that is notified before arranges
    /// that itself.
    fn detection(&self) -> DetectionMethod {
        DetectionMethod::Identity
    }

    fn start(&self) -> Result<Arc<dyn Monitor>> {
        self.cache_monitor().monitor()
    }
}

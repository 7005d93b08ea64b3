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
    /// Sets the monitor of host memory. The default is the choice of
    /// [`HostMonitorKind::Auto`](crate::monitor::HostMonitorKind::Auto).
    #[must_use]
    pub fn with_monitor(mut self, monitor: SystemMonitor) -> Self {
        self.monitor = monitor.into();
        self
    }

    /// Returns the monitor of host memory, and the reason for its choice. Starts the monitor at the
    /// first call.
    pub fn cache_monitor(&self) -> &SystemMonitor {
        self.monitor.get_or_init(SystemMonitor::auto)
    }
}

impl MonitorSource for System {
    /// Returns identities as the method: the kernel has no callback before it unmaps memory. A
    /// monitor that notifies before an unmap detects it by its own means.
    fn detection(&self) -> DetectionMethod {
        DetectionMethod::Identity
    }

    fn start(&self) -> Result<Arc<dyn Monitor>> {
        self.cache_monitor().monitor()
    }
}

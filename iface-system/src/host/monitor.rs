//! What notices that host memory went: started when it is first asked for, since it may patch the C
//! library.

use std::sync::Arc;

use hmem_core::{
    Result,
    iface::MonitorSource,
    monitor::{DetectionMethod, Monitor},
};

use super::System;
use crate::monitor::SystemMonitor;

impl System {
    /// Uses this monitor instead of the one that
    /// [`HostMonitorKind::Auto`](crate::monitor::HostMonitorKind::Auto) picks.
    #[must_use]
    pub fn with_monitor(mut self, monitor: SystemMonitor) -> Self {
        self.monitor = monitor.into();
        self
    }

    /// The monitor of host memory, with the reasons for it. Starts it if it was not started.
    pub fn cache_monitor(&self) -> &SystemMonitor {
        self.monitor.get_or_init(SystemMonitor::auto)
    }
}

impl MonitorSource for System {
    /// The kernel calls nobody back when memory goes. That the monitor is called before is its own
    /// doing.
    fn detection(&self) -> DetectionMethod {
        DetectionMethod::Identity
    }

    fn start(&self) -> Result<Arc<dyn Monitor>> {
        self.cache_monitor().monitor()
    }
}

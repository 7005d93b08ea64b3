//! The monitor of host memory. It starts at its first use, since it may patch the C library.

use std::sync::Arc;

use hmem_core::{
    Result,
    iface::MonitorSource,
    monitor::{DetectionMethod, Monitor},
};
use parking_lot::Mutex;

use super::System;
use crate::monitor::SystemMonitor;

impl System {
    /// Sets the monitor that detects changes of host memory. The default is the monitor that
    /// [`HostMonitorKind::Auto`](crate::monitor::HostMonitorKind::Auto) chooses.
    #[must_use]
    pub fn with_monitor(mut self, monitor: SystemMonitor) -> Self {
        self.monitor = monitor.into();
        self
    }

    /// Sets the function that starts the monitor when it is first needed. If the function fails, it
    /// is called again when the monitor is next needed.
    #[must_use]
    pub fn with_monitor_from(
        mut self,
        start: impl Fn() -> Result<SystemMonitor> + Send + 'static,
    ) -> Self {
        self.start_monitor = Mutex::new(Box::new(start));
        self
    }

    /// Returns the monitor of host memory, and the reason for its choice. Starts the monitor at the
    /// first call.
    ///
    /// # Errors
    /// The error of the function that [`System::with_monitor_from`] set.
    pub fn cache_monitor(&self) -> Result<&SystemMonitor> {
        if let Some(monitor) = self.monitor.get() {
            return Ok(monitor);
        }
        let start = self.start_monitor.lock();
        match self.monitor.get() {
            Some(monitor) => Ok(monitor),
            None => {
                let monitor = start()?;
                Ok(self.monitor.get_or_init(|| monitor))
            }
        }
    }
}

impl MonitorSource for System {
    /// Returns [`DetectionMethod::Identity`]: the kernel itself offers no callback before it unmaps
    /// memory. The monitor that [`MonitorSource::start`] starts may still notify before an unmap,
    /// for example by hooks in the C library.
    fn detection(&self) -> DetectionMethod {
        DetectionMethod::Identity
    }

    fn start(&self) -> Result<Arc<dyn Monitor>> {
        self.cache_monitor()?.monitor()
    }
}

//! Monitor: detects frees of memory by the runtime's deallocation callbacks.

use std::sync::{Arc, Weak};

use hmem_core::{
    AddressRange, Allocation, AllocationKind, ErrorKind, Result,
    iface::MonitorSource,
    monitor::{DetectionMethod, InvalidationCause, Invalidator, Monitor, Subscription},
};

use crate::{error::ROCR, lookup::Lookup};

/// Creates monitors of ROCr memory.
#[derive(Debug)]
pub(crate) struct CallbackMonitors {
    pub(crate) lookup: Arc<Lookup>,
}

impl MonitorSource for CallbackMonitors {
    fn detection(&self) -> DetectionMethod {
        DetectionMethod::Callback
    }

    fn start(&self) -> Result<Arc<dyn Monitor>> {
        tracing::debug!("monitor of ROCr memory started");
        Ok(Arc::new(CallbackMonitor { lookup: Arc::downgrade(&self.lookup) }))
    }
}

/// A monitor of ROCr memory. The monitor does not keep the iface open.
#[derive(Debug)]
struct CallbackMonitor {
    lookup: Weak<Lookup>,
}

impl Monitor for CallbackMonitor {
    fn name(&self) -> &str {
        "rocr-callback"
    }

    fn rationale(&self) -> String {
        "the runtime calls back when an allocation of a pool is freed, so that a hit queries \
         nothing; reserved addresses, graphics memory and memory of other processes that this \
         iface did not open have no callback and are registered uncached"
            .to_owned()
    }

    fn detection(&self) -> DetectionMethod {
        DetectionMethod::Callback
    }

    fn detects(&self, cause: InvalidationCause) -> bool {
        cause == InvalidationCause::Free
    }

    fn subscribe(
        &self,
        range: AddressRange,
        invalidator: Arc<dyn Invalidator>,
    ) -> Result<Subscription> {
        let refuse = |kind, remedy| {
            Err(ROCR.error(kind, "subscribe").context("range", range).remedy(remedy))
        };
        let Some(lookup) = self.lookup.upgrade() else {
            return refuse(
                ErrorKind::Unavailable,
                "the iface was closed: its memory is no longer watched",
            );
        };
        lookup.runtime.check_process("subscribe")?;
        let unsupported = |remedy| refuse(ErrorKind::Unsupported, remedy);
        match lookup.find(range.start())?.map(|found| found.kind) {
            Some(AllocationKind::HostRegistered) => {
                unsupported("the monitor of system memory watches the application's own pages")
            }
            Some(AllocationKind::Virtual) => {
                unsupported("the runtime does not call back when a reserved address is unmapped")
            }
            // From now on a free notifies the subscriber. If the memory was freed before, nothing
            // is left to watch.
            _ => lookup.table.watch(range, invalidator).map_or_else(
                || unsupported("only live allocations whose free calls back can be watched"),
                Ok,
            ),
        }
    }

    fn unsubscribe(&self, subscription: Subscription) {
        if let Some(lookup) = self.lookup.upgrade()
            && lookup.runtime.process.is_current()
        {
            lookup.table.subscriptions.remove(subscription);
        }
    }

    fn valid(&self, _: &Subscription, allocation: &Allocation) -> Result<bool> {
        let lookup = self.lookup.upgrade();
        Ok(lookup.is_some_and(|lookup| lookup.table.id_of(allocation) == Some(allocation.id)))
    }
}

//! Monitor: detects frees of Level Zero memory.
//!
//! The driver has no callback for frees. It numbers allocations, and no two allocations of a driver
//! have the same number. So one query at each cache hit shows whether the registered memory is
//! still at its address. Memory that the driver took from a pool has the number of the pool. If the
//! application allocated that memory, it is registered uncached.

use std::sync::{Arc, Weak};

use hmem_core::{
    AddressRange, Allocation, ErrorKind, Result,
    iface::MonitorSource,
    monitor::{DetectionMethod, InvalidationCause, Invalidator, Monitor, Subscription},
};

use crate::{error::ZE, lookup::Lookup};

/// Creates monitors of Level Zero memory.
#[derive(Debug)]
pub(crate) struct Monitors {
    pub(crate) lookup: Arc<Lookup>,
}

impl MonitorSource for Monitors {
    fn detection(&self) -> DetectionMethod {
        DetectionMethod::Identity
    }

    fn start(&self) -> Result<Arc<dyn Monitor>> {
        Ok(Arc::new(IdentityMonitor { lookup: Arc::downgrade(&self.lookup) }))
    }
}

/// A monitor of Level Zero memory. The monitor does not keep the iface open.
#[derive(Debug)]
struct IdentityMonitor {
    lookup: Weak<Lookup>,
}

impl IdentityMonitor {
    fn lookup(&self) -> Result<Arc<Lookup>> {
        self.lookup.upgrade().ok_or_else(|| ZE.not_watched())
    }
}

impl Monitor for IdentityMonitor {
    fn name(&self) -> &str {
        "ze-identity"
    }

    fn rationale(&self) -> String {
        "Level Zero has no callback for frees: each hit queries the identity from the driver".into()
    }

    fn detection(&self) -> DetectionMethod {
        DetectionMethod::Identity
    }

    fn detects(&self, cause: InvalidationCause) -> bool {
        cause == InvalidationCause::Identity
    }

    fn subscribe(&self, range: AddressRange, _: Arc<dyn Invalidator>) -> Result<Subscription> {
        let lookup = self.lookup()?;
        lookup.driver.check_process("subscribe")?;
        let refuse = |remedy| {
            Err(ZE
                .error(ErrorKind::Unsupported, "subscribe")
                .context("range", range)
                .remedy(remedy))
        };
        match lookup.find(range.start())? {
            None => refuse("only live allocations of Level Zero can be watched"),
            Some(found) if found.pooled && !found.owned => refuse(
                "allocations of a pool have one identity: the memory is registered uncached, \
                 unless it is allocated with ze_external_memory_export_desc_t",
            ),
            Some(_) => Ok(Subscription::unnumbered()),
        }
    }

    fn unsubscribe(&self, _: Subscription) {}

    fn valid(&self, _: &Subscription, allocation: &Allocation) -> Result<bool> {
        let lookup = self.lookup()?;
        let found = lookup.find(allocation.base())?;
        Ok(found.is_some_and(|found| {
            found.allocation.id == allocation.id && (found.owned || !found.pooled)
        }))
    }
}

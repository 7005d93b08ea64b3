//! Monitors of registered memory, and the subscriptions of registrations to them.

use std::sync::Arc;

use parking_lot::Mutex;

use super::DomainInner;
use crate::{
    AddressRange, Allocation, AllocationId, Error, ErrorKind, IfaceExt, IfaceKind, Result,
    monitor::{DetectionMethod, Monitor, Subscription},
    registry::AddressOwner,
};

/// An iface, with its monitor or the reason why it has none.
type IfaceMonitor = (IfaceKind, Result<Arc<dyn Monitor>>);

/// The monitors that a registration cache or a [`SparseRegion`](super::SparseRegion) has started so
/// far. If two threads need a monitor for the first time at once, both may start it and add it to
/// the list. All later calls use the first of the two.
#[derive(Debug, Default)]
pub(super) struct Monitors(Mutex<Vec<IfaceMonitor>>);

impl Monitors {
    /// Returns the monitor of an iface's memory, and starts it if this is the first call.
    pub(super) fn get(&self, domain: &DomainInner, iface: IfaceKind) -> Result<Arc<dyn Monitor>> {
        if let Some((_, known)) = self.0.lock().iter().find(|(known, _)| *known == iface) {
            return known.clone();
        }
        let started = start(domain, iface);
        self.0.lock().push((iface, started.clone()));
        started
    }
}

fn start(domain: &DomainInner, iface: IfaceKind) -> Result<Arc<dyn Monitor>> {
    let attr = &domain.provider_attr;
    if let Some(cache) = &attr.driver_cache {
        return Err(Error::new(ErrorKind::Unsupported, "cache monitor")
            .provider(attr.nic.to_string())
            .context("why", format_args!("{cache} is in force"))
            .remedy(
                "rely on that cache, or disable it (libfabric: FI_MR_CACHE_MONITOR=disabled when \
                 the process starts, and name a monitor by Builder::cache_monitor)",
            ));
    }
    let without = domain.attr.cache.as_ref().and_then(|cache| cache.without_monitors.as_deref());
    if without.is_some_and(|without| without.contains(&iface)) {
        return Err(Error::new(ErrorKind::Unsupported, "cache monitor")
            .iface(domain.registry.name_of(iface))
            .context("why", "disabled by the builder or the environment")
            .remedy(
                "enable the iface's cache monitor (FI_MR_CUDA_CACHE_MONITOR_ENABLED=1 for CUDA), \
                 or leave the iface out of CacheAttr::without_monitors",
            ));
    }
    let iface = domain.registry.get(iface)?;
    let (started, iface) = (iface.start_monitor(), iface.name());
    match &started {
        Ok(monitor) => tracing::debug!(iface, monitor = monitor.name(), "cache monitor"),
        Err(why) => tracing::warn!(iface, %why, "memory of the iface is not watched"),
    }
    started
}

/// A registration's subscription to a monitor.
#[derive(Debug)]
pub struct Watch {
    monitor: Arc<dyn Monitor>,
    subscription: Subscription,
    /// The allocation that contains the registered range. `None` if the iface reported no
    /// allocation.
    allocation: Option<Box<Allocation>>,
}

impl Watch {
    /// Completes a subscription to changes of `range`, whose allocation had the identity `id`
    /// before the subscription began.
    ///
    /// # Errors
    /// [`ErrorKind::BadAddress`] if `range` is no longer in this allocation. The method then ends
    /// the subscription.
    pub(super) fn confirm(
        domain: &DomainInner,
        (monitor, subscription): (Arc<dyn Monitor>, Subscription),
        (iface, range): (IfaceKind, AddressRange),
        id: Option<AllocationId>,
    ) -> Result<Self> {
        let Some(id) = id else { return Ok(Self { monitor, subscription, allocation: None }) };
        // The monitor detects that the allocation is freed from now on. This query detects that it
        // was freed before.
        match domain.registry.owner_of(range.start()) {
            Ok(owner) if is_allocation(&owner, id, range) => {
                Ok(Self { monitor, subscription, allocation: owner.allocation.map(Box::new) })
            }
            other => {
                monitor.unsubscribe(subscription);
                Err(other.err().unwrap_or_else(|| {
                    Error::new(ErrorKind::BadAddress, "cached registration")
                        .iface(domain.registry.name_of(iface))
                        .context("range", range)
                        .remedy("keep the memory allocated while it is being registered")
                }))
            }
        }
    }

    /// Returns the allocation that the monitor watches.
    pub(super) fn allocation(&self) -> Option<&Allocation> {
        self.allocation.as_deref()
    }

    /// Returns true if the monitor sends no notifications for this memory, so that only
    /// [`Watch::is_current`] detects a change.
    pub(super) fn needs_validation(&self) -> bool {
        self.allocation.is_some() && self.monitor.detection() == DetectionMethod::Identity
    }

    /// Returns true if the memory is still the memory that was there when the subscription began.
    pub(super) fn is_current(&self) -> Result<bool> {
        match &self.allocation {
            Some(allocation) => self.monitor.valid(&self.subscription, allocation),
            None => Ok(true),
        }
    }

    /// Ends the subscription.
    pub(super) fn end(self) {
        self.monitor.unsubscribe(self.subscription);
    }
}

/// Returns true if the allocation of `owner` has the identity `id` and contains `range`.
fn is_allocation(owner: &AddressOwner, id: AllocationId, range: AddressRange) -> bool {
    let same =
        |allocation: Allocation| allocation.id == id && allocation.range.contains_range(range);
    owner.allocation.is_some_and(same)
}

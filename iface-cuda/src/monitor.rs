//! Noticing that memory of the devices was freed.
//!
//! The driver has no callback for frees. It has identities: no two allocations of a process get the same buffer id, so
//! that one call tells whether an address still holds what was registered. Frees through this iface are told to
//! subscribers besides, before the memory goes, and so are those that an application announces
//! ([`Cuda::while_freeing`](crate::Cuda::while_freeing)). Other frees are not: their callers reach the driver directly,
//! and its entry points are not patched.
//!
//! VMM memory is not watched. The identity belongs to the reservation, and an application can map other memory there
//! (PyTorch's expandable segments do) without its changing.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
};

use hmem_core::{
    AddressRange, Allocation, AllocationKind, Error, ErrorKind, IfaceKind, Result,
    monitor::{Cause, Change, Invalidator, Monitor, MonitorStyle, Subscription},
};
use parking_lot::Mutex;

use crate::driver::Driver;

#[derive(Clone, Debug)]
struct Watch {
    range: AddressRange,
    invalidator: Arc<dyn Invalidator>,
    /// Held while the invalidator is called, so that unsubscribing waits for its end.
    active: Arc<Mutex<bool>>,
}

#[derive(Debug, Default)]
struct Watches {
    next: u64,
    by_id: BTreeMap<u64, Watch>,
    /// Ranges that are being freed, each as often as it is.
    going: Vec<AddressRange>,
}

/// Who wants to know of frees.
#[derive(Debug, Default)]
pub(crate) struct Subscriptions(Mutex<Watches>);

impl Subscriptions {
    /// Runs `free` while everything cached over `range` is dead and stays so.
    ///
    /// Frees of one range may overlap: as soon as the driver has an address back it may give it to another thread,
    /// which may free it before the first free has told of its end here.
    pub(crate) fn while_it_goes<T>(&self, range: AddressRange, free: impl FnOnce() -> T) -> T {
        let mut watches = self.0.lock();
        watches.going.push(range);
        let touched = watches.by_id.values().filter(|watch| watch.range.overlaps(range));
        let told: Vec<_> = touched.cloned().collect();
        drop(watches);
        let changes: Vec<(Watch, Change)> = told
            .into_iter()
            .filter_map(|watch| {
                let active = watch.active.lock();
                let change = active.then(|| watch.invalidator.begin(range, Cause::Free));
                drop(active);
                change.map(|change| (watch, change))
            })
            .collect();
        let result = free();
        for (watch, change) in changes {
            watch.invalidator.end(change);
        }
        let mut watches = self.0.lock();
        if let Some(at) = watches.going.iter().position(|going| *going == range) {
            watches.going.swap_remove(at);
        }
        result
    }

    fn add(&self, range: AddressRange, invalidator: Arc<dyn Invalidator>) -> Subscription {
        let watch = Watch { range, invalidator, active: Arc::new(Mutex::new(true)) };
        let mut watches = self.0.lock();
        watches.next += 1;
        let id = watches.next;
        watches.by_id.insert(id, watch.clone());
        // Who comes while the memory goes would never be told.
        let missed = watches.going.iter().copied().find(|going| going.overlaps(range));
        drop(watches);
        if let Some(going) = missed {
            watch.invalidator.invalidate(going, Cause::Free);
        }
        Subscription(id)
    }

    fn remove(&self, subscription: Subscription) {
        let watch = self.0.lock().by_id.remove(&subscription.0);
        if let Some(watch) = watch {
            *watch.active.lock() = false;
        }
    }
}

/// The monitor of CUDA memory: by identity, and by our own frees.
#[derive(Debug)]
pub(crate) struct CudaMonitor {
    driver: Weak<Driver>,
}

impl CudaMonitor {
    pub(crate) fn new(driver: &Arc<Driver>) -> Self {
        Self { driver: Arc::downgrade(driver) }
    }

    fn driver(&self) -> Result<Arc<Driver>> {
        self.driver.upgrade().ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, "monitor")
                .iface(IfaceKind::CUDA)
                .remedy("the iface was closed: its memory is not watched any longer")
        })
    }
}

impl Monitor for CudaMonitor {
    fn name(&self) -> &str {
        "cuda-identity"
    }

    fn style(&self) -> MonitorStyle {
        MonitorStyle::Identity
    }

    fn watches(&self, cause: Cause) -> bool {
        cause == Cause::Identity
    }

    fn subscribe(&self, range: AddressRange, invalidator: Arc<dyn Invalidator>) -> Result<Subscription> {
        let driver = self.driver()?;
        let refuse = |remedy| {
            Err(Error::new(ErrorKind::Unsupported, "subscribe")
                .iface(IfaceKind::CUDA)
                .context("range", range)
                .remedy(remedy))
        };
        // Only after it was added: a free from here on is told, and one before is seen here.
        let subscription = driver.subscriptions.add(range, invalidator);
        let found = driver.find(range.start());
        let watched = match &found {
            Ok(Some(found)) => {
                found.allocation.kind != AllocationKind::Virtual
                    && found.allocation.kind != AllocationKind::HostRegistered
            }
            _ => false,
        };
        if watched {
            return Ok(subscription);
        }
        driver.subscriptions.remove(subscription);
        match found?.map(|found| found.allocation.kind) {
            None => refuse("only live allocations of CUDA can be watched"),
            Some(AllocationKind::HostRegistered) => {
                refuse("the application's own pages are watched by the monitors of system memory")
            }
            Some(_) => refuse(
                "other memory can be mapped into a reservation without its identity changing: VMM memory is \
                 registered uncached",
            ),
        }
    }

    fn unsubscribe(&self, subscription: Subscription) {
        if let Some(driver) = self.driver.upgrade() {
            driver.subscriptions.remove(subscription);
        }
    }

    fn valid(&self, allocation: &Allocation) -> Result<bool> {
        if matches!(allocation.kind, AllocationKind::Virtual | AllocationKind::HostRegistered) {
            return Ok(false);
        }
        Ok(self.driver()?.identity(allocation.base())? == Some(allocation.id))
    }
}

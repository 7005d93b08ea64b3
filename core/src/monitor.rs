//! Noticing that memory changed under a registration.
//!
//! A monitor watches ranges for a cache and calls an [`Invalidator`] when one of them is freed, unmapped or
//! replaced. Ifaces without callbacks answer [`Monitor::valid`] by allocation identity instead.

use std::{fmt, sync::Arc};

use crate::{AddressRange, Allocation, Result};

/// How a monitor learns of changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MonitorStyle {
    /// It is called back before the memory goes.
    Callback,
    /// It compares identities when asked.
    Identity,
}

/// Told of ranges whose memory is about to go.
///
/// Called on whatever thread frees, possibly inside a driver's callback or a patched `munmap`: an implementation
/// takes no lock, allocates nothing and logs nothing.
pub trait Invalidator: fmt::Debug + Send + Sync {
    /// The memory behind `range` goes.
    fn invalidate(&self, range: AddressRange);
}

/// One subscription of a monitor; [`Monitor::unsubscribe`] takes it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Subscription(pub u64);

/// Watches memory of one iface.
pub trait Monitor: fmt::Debug + Send + Sync {
    /// How it learns of changes.
    fn style(&self) -> MonitorStyle;

    /// Watches `range` and reports to `invalidator` until unsubscribed.
    ///
    /// # Errors
    /// Unsupported if this monitor cannot watch that range.
    fn subscribe(&self, range: AddressRange, invalidator: Arc<dyn Invalidator>) -> Result<Subscription>;

    /// Stops watching. After it returns the invalidator of that subscription is not called.
    fn unsubscribe(&self, subscription: Subscription);

    /// Whether `allocation` still is what is at its address.
    ///
    /// # Errors
    /// A failed driver call.
    fn valid(&self, allocation: &Allocation) -> Result<bool>;
}

//! Function hooks with the kernel's events beneath: before the memory goes for calls of the C library, and after it
//! went for raw system calls.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use hmem_core::{
    AddressRange, Allocation, Error, Result,
    monitor::{Cause, Invalidator, Monitor, MonitorStyle, Subscription},
};
use parking_lot::Mutex;

use super::{MemHooks, UserFaultFd};

/// [`MemHooks`] with [`UserFaultFd`] as its net.
///
/// A range that the kernel does not watch (System V segments, too many mappings) is watched by the hooks alone;
/// [`Layered::without_net`] counts those.
#[derive(Debug)]
pub struct Layered {
    hooks: Arc<MemHooks>,
    net: Arc<UserFaultFd>,
    /// The subscriptions of the hooks and, where it holds the range, the net.
    subscriptions: Mutex<HashMap<u64, (Subscription, Option<Subscription>)>>,
    next: AtomicU64,
    without_net: AtomicU64,
    why_without: Mutex<Option<Error>>,
}

impl Layered {
    /// Puts one under the other.
    #[must_use]
    pub fn new(hooks: Arc<MemHooks>, net: Arc<UserFaultFd>) -> Arc<Self> {
        Arc::new(Self {
            hooks,
            net,
            subscriptions: Mutex::default(),
            next: AtomicU64::new(0),
            without_net: AtomicU64::new(0),
            why_without: Mutex::default(),
        })
    }

    /// How many subscriptions the net refused, ever.
    #[must_use]
    pub fn without_net(&self) -> u64 {
        self.without_net.load(Ordering::Relaxed)
    }

    /// Why the net refused the last one that it refused.
    #[must_use]
    pub fn why_without_net(&self) -> Option<String> {
        self.why_without.lock().as_ref().map(ToString::to_string)
    }

    /// As [`MemHooks::check`].
    ///
    /// # Errors
    /// As [`MemHooks::check`].
    pub fn check(&self) -> Result<()> {
        self.hooks.check()
    }
}

impl Monitor for Layered {
    fn name(&self) -> &str {
        "memhooks+userfaultfd"
    }

    fn why(&self) -> String {
        format!("{}; of raw system calls {}", self.hooks.why(), self.net.why())
    }

    fn style(&self) -> MonitorStyle {
        MonitorStyle::Callback
    }

    fn watches(&self, cause: Cause) -> bool {
        self.hooks.watches(cause) || self.net.watches(cause)
    }

    fn subscribe(
        &self,
        range: AddressRange,
        invalidator: Arc<dyn Invalidator>,
    ) -> Result<Subscription> {
        let hooked = self.hooks.subscribe(range, Arc::clone(&invalidator))?;
        let caught = match self.net.watch(range, invalidator, None) {
            Ok(caught) => Some(caught),
            Err(error) => {
                if self.without_net.fetch_add(1, Ordering::Relaxed) == 0 {
                    tracing::warn!(%error, "the net under memhooks does not hold a range: raw system calls on it are not seen");
                }
                *self.why_without.lock() = Some(error);
                None
            }
        };
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.subscriptions.lock().insert(number, (hooked, caught));
        Ok(Subscription(number))
    }

    fn unsubscribe(&self, subscription: Subscription) {
        if !self.hooks.is_ours() {
            return;
        }
        let Some((hooked, caught)) = self.subscriptions.lock().remove(&subscription.0) else {
            return;
        };
        if let Some(caught) = caught {
            self.net.unsubscribe(caught);
        }
        self.hooks.unsubscribe(hooked);
    }

    fn valid(&self, allocation: &Allocation) -> Result<bool> {
        self.hooks.valid(allocation)
    }
}

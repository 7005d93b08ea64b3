//! Replacements of the memhooks module on targets without support: no glibc, or another
//! architecture.

use std::sync::Arc;

use hmem_core::{
    AddressRange, Allocation, Error, ErrorKind, IfaceKind, Result,
    monitor::{DetectionMethod, InvalidationCause, Invalidator, Monitor, Subscription},
};

/// Returns false, since no call is hooked on this target.
pub(super) fn is_hooked_discard(_: u64, _: u64) -> bool {
    false
}

/// Returns `None`. On targets with hooks, the guard in its place lets hooked calls wait while
/// userfaultfd events are read.
pub(super) fn reading_discards() -> Option<()> {
    None
}

/// The memhooks monitor, which patches the C library. This target does not support it, so no value
/// of the type exists.
#[derive(Debug)]
pub enum MemHooks {}

impl MemHooks {
    /// Returns an error, since this target does not support the monitor.
    ///
    /// # Errors
    /// Unsupported, always.
    pub fn start() -> Result<Arc<Self>> {
        Err(Error::new(ErrorKind::Unsupported, "memhooks")
            .iface(IfaceKind::SYSTEM)
            .context("architecture", std::env::consts::ARCH)
            .remedy("memhooks patch glibc on x86-64 and aarch64: use the userfaultfd monitor"))
    }

    /// Tests that the hooks are in place. The method cannot be called, since no value of the type
    /// exists.
    ///
    /// # Errors
    /// None.
    pub fn check(&self) -> Result<()> {
        match *self {}
    }

    /// Returns the names of the patched functions. The method cannot be called, since no value of
    /// the type exists.
    #[must_use]
    pub fn functions(&self) -> Vec<&'static str> {
        match *self {}
    }

    pub(super) fn is_own_process(&self) -> bool {
        match *self {}
    }

    pub(super) fn watch(&self, _: &Arc<dyn Invalidator>) -> Result<Subscription> {
        match *self {}
    }
}

impl Monitor for MemHooks {
    fn name(&self) -> &str {
        match *self {}
    }

    fn rationale(&self) -> String {
        match *self {}
    }

    fn detection(&self) -> DetectionMethod {
        match *self {}
    }

    fn detects(&self, _: InvalidationCause) -> bool {
        match *self {}
    }

    fn subscribe(&self, _: AddressRange, _: Arc<dyn Invalidator>) -> Result<Subscription> {
        match *self {}
    }

    fn unsubscribe(&self, _: Subscription) {
        match *self {}
    }

    fn valid(&self, _: &Subscription, _: &Allocation) -> Result<bool> {
        match *self {}
    }
}

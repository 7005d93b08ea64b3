//! Where the C library's functions cannot be patched: another library than glibc, or another
//! architecture.

use std::sync::Arc;

use hmem_core::{
    AddressRange, Allocation, Error, ErrorKind, IfaceKind, Result,
    monitor::{DetectionMethod, InvalidationCause, Invalidator, Monitor, Subscription},
};

/// No call is hooked.
pub(super) fn tells_of_discard(_: u64, _: u64) -> bool {
    false
}

/// No call waits.
pub(super) fn reading_discards() -> Option<()> {
    None
}

/// The monitor that patches the C library: there is none for this target.
#[derive(Debug)]
pub enum MemHooks {}

impl MemHooks {
    /// Fails.
    ///
    /// # Errors
    /// Unsupported, always.
    pub fn start() -> Result<Arc<Self>> {
        Err(Error::new(ErrorKind::Unsupported, "memhooks")
            .iface(IfaceKind::SYSTEM)
            .context("architecture", std::env::consts::ARCH)
            .remedy("memhooks patch glibc on x86-64 and aarch64: use the userfaultfd monitor"))
    }

    /// There is nothing to check.
    ///
    /// # Errors
    /// None: there is no value.
    pub fn check(&self) -> Result<()> {
        match *self {}
    }

    /// The functions that are patched.
    #[must_use]
    pub fn functions(&self) -> Vec<&'static str> {
        match *self {}
    }

    pub(super) fn is_own_process(&self) -> bool {
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

    fn valid(&self, _: &Allocation) -> Result<bool> {
        match *self {}
    }
}

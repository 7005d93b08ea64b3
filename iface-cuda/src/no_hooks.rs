//! Where functions cannot be patched: another C library than glibc, or another architecture.

use std::sync::Arc;

use hmem_core::{
    Error, ErrorKind, IfaceKind, Result,
    monitor::{Invalidator, Subscription},
};

use crate::sys::Functions;

/// The hooks in the driver's frees: there are none for this target.
#[derive(Debug)]
pub enum FreeHooks {}

impl FreeHooks {
    /// Fails.
    ///
    /// # Errors
    /// Unsupported, always.
    pub fn start(_: &Functions) -> Result<Arc<Self>> {
        Err(Error::new(ErrorKind::Unsupported, "cuda-hooks")
            .iface(IfaceKind::CUDA)
            .context("architecture", std::env::consts::ARCH)
            .remedy("functions are patched with glibc on x86-64 and aarch64: watch CUDA memory by identity"))
    }

    /// There is nothing to check.
    ///
    /// # Errors
    /// None: there is no value.
    pub fn check(&self) -> Result<()> {
        match *self {}
    }

    /// There are none.
    #[must_use]
    pub fn functions(&self) -> Vec<&'static str> {
        match *self {}
    }

    /// There is nobody to tell.
    ///
    /// # Errors
    /// None: there is no value.
    pub fn subscribe(&self, _: Arc<dyn Invalidator>) -> Result<Subscription> {
        match *self {}
    }

    /// There is nothing to stop.
    pub fn unsubscribe(&self, _: Subscription) {
        match *self {}
    }
}

/// Runs a call. There are no hooks that could notify of it.
pub(crate) fn without_notifying<T>(call: impl FnOnce() -> T) -> T {
    call()
}

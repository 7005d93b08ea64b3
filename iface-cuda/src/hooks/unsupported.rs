//! Stub for targets on which functions cannot be patched: no glibc, or another architecture.

use std::sync::Arc;

use hmem_core::{
    Error, ErrorKind, IfaceKind, Result,
    monitor::{Invalidator, Subscription},
};

use crate::sys::Functions;

/// Hooks of the driver's frees. This target has none, so no value of this type exists.
#[derive(Debug)]
pub enum FreeHooks {}

impl FreeHooks {
    /// Fails, since functions cannot be patched on this target.
    ///
    /// # Errors
    /// Always Unsupported.
    pub fn start(_: &Functions) -> Result<Arc<Self>> {
        Err(Error::new(ErrorKind::Unsupported, "cuda-hooks")
            .iface(IfaceKind::CUDA)
            .context("architecture", std::env::consts::ARCH)
            .remedy(
                "functions are patched with glibc on x86-64 and aarch64: watch CUDA memory by \
                 identity",
            ))
    }
}

// No value of the type exists, so no caller reaches these methods.
#[allow(missing_docs, clippy::missing_errors_doc, reason = "documented for targets with hooks")]
impl FreeHooks {
    pub fn check(&self) -> Result<()> {
        match *self {}
    }

    #[must_use]
    pub fn functions(&self) -> Vec<&'static str> {
        match *self {}
    }

    pub fn subscribe(&self, _: Arc<dyn Invalidator>) -> Result<Subscription> {
        match *self {}
    }

    pub fn unsubscribe(&self, _: Subscription) {
        match *self {}
    }
}

/// Runs a driver call. This target has no hooks, so no subscriber is notified of the call.
pub(crate) fn without_notifying<T>(call: impl FnOnce() -> T) -> T {
    call()
}

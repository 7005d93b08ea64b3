//! Regions whose dma-buf was revoked.

use std::sync::Weak;

use parking_lot::Mutex;

use crate::{
    AddressRange, Error, ErrorKind, Result,
    handle::ProviderRegion,
    monitor::{InvalidationCause, Invalidator},
};

/// The facet of a domain that finds the regions whose dma-buf was revoked.
///
/// An exporter revokes a dma-buf when its memory goes away: a device was reset or given to a
/// virtual machine, for example. The NIC then refuses all accesses to the region, by its owner and
/// by peers. The region stays registered until it is closed, and the revocation is final for it.
///
/// Sub-regions and windows of a revoked region are revoked too.
pub trait Revocations {
    /// Returns true if the domain knows that memory of the region was revoked. Returns false for a
    /// handle that names no region.
    fn is_revoked(&self, region: ProviderRegion) -> bool;

    /// Finds out if memory of the region was revoked. The default is for domains that are notified
    /// of revocations. Other domains let the NIC access a byte of each dma-buf of the region.
    ///
    /// # Errors
    /// The reason why the check could not run, such as a lost device.
    fn check_revoked(&self, region: ProviderRegion) -> Result<bool> {
        Ok(self.is_revoked(region))
    }

    /// Notifies `listener` of each region that the domain finds revoked from now on, with
    /// [`InvalidationCause::Revoke`], until the listener is dropped.
    fn listen(&self, listener: Weak<dyn Invalidator>);
}

/// The listeners of a domain's [`Revocations`], for providers.
#[derive(Debug, Default)]
pub struct RevocationListeners(Mutex<Vec<Weak<dyn Invalidator>>>);

impl RevocationListeners {
    /// Adds a listener ([`Revocations::listen`]).
    pub fn add(&self, listener: Weak<dyn Invalidator>) {
        let mut listeners = self.0.lock();
        listeners.retain(|listener| listener.strong_count() > 0);
        listeners.push(listener);
    }

    /// Notifies all listeners that the memory of a region was revoked. `ranges` are the
    /// revoked ranges, or all ranges of the region if the provider cannot tell which are revoked.
    pub fn notify(&self, ranges: &[AddressRange]) {
        let listeners: Vec<_> = self.0.lock().iter().filter_map(Weak::upgrade).collect();
        for listener in listeners {
            for range in ranges {
                listener.invalidate(*range, InvalidationCause::Revoke);
            }
        }
    }
}

/// Returns the error of a call or request that needs memory that was revoked. `kind` is the kind
/// for the side that named the memory.
#[cold]
#[must_use]
pub fn revoked(kind: ErrorKind, operation: &'static str) -> Error {
    Error::new(kind, operation)
        .context("cause", "the exporter revoked the dma-buf")
        .remedy("close the region, and register the memory again once its device is usable")
}

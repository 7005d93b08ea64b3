//! Flushes after inbound transfers, so that devices see the bytes that NICs wrote (HM-14).
//!
//! A completion shows that the NIC wrote the bytes. Some devices need a flush
//! ([`InboundFlush`](crate::iface::InboundFlush)) before device work that starts later sees these
//! bytes. So a completion queue flushes before it returns the completion of a request that may have
//! changed device memory: a receive, a remote write with immediate data, a read or an atomic. A
//! receive into host memory counts too, because the sender may have written device memory before it
//! sent the message.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use parking_lot::RwLock;
use smallvec::SmallVec;

use crate::{
    Access, DeviceId, IfaceExt, IfaceKind, Registry, Result,
    transfer::{Completion, CompletionKind},
};

/// The devices with memory that the NIC of a domain may write.
#[derive(Debug)]
pub(super) struct Inbound {
    registry: Arc<Registry>,
    /// The length of `devices`, as a copy that is read without the lock. The length never
    /// decreases.
    count: AtomicUsize,
    devices: RwLock<SmallVec<[(IfaceKind, DeviceId); 16]>>,
    /// True once a failed flush was logged. Later failures are not logged.
    warned: AtomicBool,
}

impl Inbound {
    pub(super) fn new(registry: Arc<Registry>) -> Self {
        Self {
            registry,
            count: AtomicUsize::new(0),
            devices: RwLock::default(),
            warned: AtomicBool::new(false),
        }
    }

    /// Returns true if the registry has a device iface.
    pub(super) fn may_have_any(&self) -> bool {
        self.registry.iter().any(|iface| iface.kind() != IfaceKind::SYSTEM)
    }

    /// Adds the device that owns the memory of a new registration, if `access` lets the NIC write
    /// to the memory.
    pub(super) fn note(&self, iface: IfaceKind, device: Option<DeviceId>, access: Access) {
        let Some(device) = device.filter(|_| access.nic_writes()) else { return };
        let device = (iface, device);
        if self.devices.read().contains(&device) {
            return;
        }
        let mut devices = self.devices.write();
        if !devices.contains(&device) {
            devices.push(device);
            self.count.store(devices.len(), Ordering::Release);
        }
    }

    /// Flushes all devices, even if one fails. Returns the first error.
    pub(super) fn flush(&self) -> Result<()> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        // The lock is released first, because a flush calls a driver.
        let devices = self.devices.read().clone();
        let flush = |&(iface, device): &(IfaceKind, DeviceId)| {
            self.registry.get(iface)?.flush_inbound(device)
        };
        devices.iter().map(flush).fold(Ok(()), Result::and)
    }

    /// Flushes all devices if a completed request may have changed device memory. Of all errors in
    /// the life of the domain, logs only the first.
    pub(super) fn flush_for(&self, completions: &[Completion]) {
        if self.count.load(Ordering::Acquire) == 0 || !completions.iter().any(may_have_written) {
            return;
        }
        if let Err(error) = self.flush()
            && !self.warned.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                error = %error.full(),
                "cannot flush a device: it may not see bytes that a NIC wrote"
            );
        }
    }
}

fn may_have_written(completion: &Completion) -> bool {
    use CompletionKind::{Atomic, Read, Receive, RemoteWrite};
    let kinds = [Receive, RemoteWrite, Read, Atomic];
    completion.result.is_ok() && kinds.contains(&completion.kind)
}

#[cfg(test)]
#[allow(unsafe_code, reason = "tests implement the trait `Iface`")]
mod tests {
    use std::sync::{OnceLock, Weak};

    use super::*;
    use crate::{
        Address, Allocation, Error, ErrorKind, Iface,
        iface::{Device, InboundFlush},
    };

    const KIND: IfaceKind = IfaceKind::FIRST_PLUG_IN;

    /// An iface whose flush calls `Inbound::note` to add a device, as a concurrent registration can
    /// do.
    #[derive(Debug, Default)]
    struct NotingIface {
        inbound: OnceLock<Weak<Inbound>>,
        flushed: AtomicUsize,
    }

    // SAFETY: the iface claims no address, and allocates, copies and exports nothing.
    unsafe impl Iface for NotingIface {
        fn kind(&self) -> IfaceKind {
            KIND
        }

        fn name(&self) -> &str {
            "noting"
        }

        fn devices(&self) -> Result<Vec<Device>> {
            Ok(Vec::new())
        }

        fn query(&self, _: Address) -> Result<Option<Allocation>> {
            Ok(None)
        }

        unsafe fn copy(&self, _: Address, _: Address, _: u64) -> Result<()> {
            Err(Error::new(ErrorKind::Unsupported, "copy"))
        }

        fn inbound_flush(&self) -> Option<&dyn InboundFlush> {
            Some(self)
        }
    }

    impl InboundFlush for NotingIface {
        fn flush(&self, device: DeviceId) -> Result<()> {
            let inbound = self.inbound.get().and_then(Weak::upgrade).expect("set by the test");
            assert!(!inbound.devices.is_locked(), "a lock is held during a flush");
            inbound.note(KIND, Some(DeviceId(device.0 + 1)), Access::RECV);
            self.flushed.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    }

    /// HM-14: a flush holds no lock while it calls the iface, so that a registration can add a
    /// device meanwhile.
    #[test]
    fn flush_holds_no_lock_while_it_calls_the_iface() {
        let iface = Arc::<NotingIface>::default();
        let mut registry = Registry::new();
        registry.add(Arc::clone(&iface) as _).expect("the first");
        let inbound = Arc::new(Inbound::new(Arc::new(registry)));
        iface.inbound.set(Arc::downgrade(&inbound)).expect("unset");
        inbound.note(KIND, Some(DeviceId(0)), Access::RECV);
        inbound.flush().expect("flushed");
        inbound.flush().expect("flushed");
        assert_eq!(iface.flushed.load(Ordering::Relaxed), 1 + 2);
    }
}

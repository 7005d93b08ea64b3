//! A device that works, but for one thing.

use std::{mem, sync::Arc};

use hmem::{
    Address, AddressRange, Allocation, DeviceId, Iface, IfaceKind, Result, Segment,
    iface::{
        AllocRequest, Capability, CopyEvent, Device, DmaBufExport, DmaBufMapping, IpcHandle,
        PeerMemoryExport,
    },
    monitor::{Cause, Invalidator, Monitor, MonitorStyle, Subscription},
    provider::Nic,
    system::Simulated,
};

/// What is wrong with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The last byte of each copy has a bit flipped.
    FlipsABit,
    /// Each export leaves an fd open.
    LeaksAnFd,
    /// It says that memory is free and keeps it.
    KeepsMemory,
    /// Its monitor takes new memory at an address for what was there before.
    ConfusesAllocations,
}

/// A simulated device with a fault.
#[derive(Debug)]
pub(crate) struct Faulty {
    pub(crate) simulated: Arc<Simulated>,
    pub(crate) fault: Fault,
}

// SAFETY: each answer is the simulated device's, which is an iface. No planted fault reaches other
// memory: a bit of the copied bytes is flipped, an fd or an allocation leaks, or memory counts as
// unchanged that is not.
#[allow(unsafe_code, reason = "the trait and its unsafe methods")]
unsafe impl Iface for Faulty {
    unsafe fn free(&self, allocation: &Allocation) -> Result<()> {
        if self.fault == Fault::KeepsMemory {
            return Ok(());
        }
        // SAFETY: the caller's promise is the same.
        unsafe { self.simulated.free(allocation) }
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.simulated.copy(to, from, len)? };
        let last = Address(to.0 + len - 1);
        if self.fault == Fault::FlipsABit && self.simulated.query(last)?.is_some() {
            let mut byte = 0u8;
            let here = Address::of_ptr(&raw mut byte);
            // SAFETY: `byte` is valid for its one byte, and `last` lies in the range that was just
            // copied to.
            unsafe { self.simulated.copy(here, last, 1)? };
            byte ^= 0x10;
            // SAFETY: as above.
            unsafe { self.simulated.copy(last, Address::of_ptr(&raw const byte), 1)? };
        }
        Ok(())
    }

    unsafe fn copy_async(
        &self,
        to: Address,
        from: Address,
        len: u64,
    ) -> Result<Box<dyn CopyEvent>> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.simulated.copy_async(to, from, len) }
    }

    fn export_dma_buf(
        &self,
        range: AddressRange,
        nic: &Nic,
        mapping: DmaBufMapping,
    ) -> Result<DmaBufExport> {
        let export = self.simulated.export_dma_buf(range, nic, mapping)?;
        if self.fault == Fault::LeaksAnFd {
            mem::forget(export.fd.try_clone().expect("an fd to leak"));
        }
        Ok(export)
    }

    unsafe fn host_register(&self, range: AddressRange) -> Result<()> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.simulated.host_register(range) }
    }

    unsafe fn ipc_close(&self, allocation: &Allocation) -> Result<()> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.simulated.ipc_close(allocation) }
    }

    fn kind(&self) -> IfaceKind {
        self.simulated.kind()
    }

    fn name(&self) -> &str {
        self.simulated.name()
    }

    fn capability(&self) -> Capability {
        self.simulated.capability()
    }

    fn devices(&self) -> Result<Vec<Device>> {
        self.simulated.devices()
    }

    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        self.simulated.query(address)
    }

    fn segments(&self, range: AddressRange) -> Result<Vec<Segment>> {
        self.simulated.segments(range)
    }

    fn allocate(&self, request: &AllocRequest) -> Result<Allocation> {
        self.simulated.allocate(request)
    }

    fn release_dma_buf(&self, export: DmaBufExport) -> Result<()> {
        self.simulated.release_dma_buf(export)
    }

    fn export_peer_memory(&self, range: AddressRange, nic: &Nic) -> Result<PeerMemoryExport> {
        self.simulated.export_peer_memory(range, nic)
    }

    fn host_unregister(&self, range: AddressRange) -> Result<()> {
        self.simulated.host_unregister(range)
    }

    fn ipc_export(&self, allocation: &Allocation) -> Result<IpcHandle> {
        self.simulated.ipc_export(allocation)
    }

    fn ipc_open(&self, handle: &IpcHandle) -> Result<Allocation> {
        self.simulated.ipc_open(handle)
    }

    fn flush_inbound(&self, device: DeviceId) -> Result<()> {
        self.simulated.flush_inbound(device)
    }

    fn is_started(&self, device: DeviceId) -> Result<bool> {
        self.simulated.is_started(device)
    }

    fn monitor(&self) -> Result<Arc<dyn Monitor>> {
        let monitor = self.simulated.monitor()?;
        Ok(if self.fault == Fault::ConfusesAllocations {
            Arc::new(Confused(monitor))
        } else {
            monitor
        })
    }
}

/// A monitor to which all memory at an address is the same.
#[derive(Debug)]
struct Confused(Arc<dyn Monitor>);

impl Monitor for Confused {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn why(&self) -> String {
        self.0.why()
    }

    fn style(&self) -> MonitorStyle {
        self.0.style()
    }

    fn watches(&self, cause: Cause) -> bool {
        self.0.watches(cause)
    }

    fn subscribe(
        &self,
        range: AddressRange,
        invalidator: Arc<dyn Invalidator>,
    ) -> Result<Subscription> {
        self.0.subscribe(range, invalidator)
    }

    fn unsubscribe(&self, subscription: Subscription) {
        self.0.unsubscribe(subscription);
    }

    fn valid(&self, _: &Allocation) -> Result<bool> {
        Ok(true)
    }
}

//! A simulated device with an injected fault.

use std::{mem, sync::Arc};

use hmem::{
    Address, AddressRange, Allocation, Iface, IfaceExt, IfaceKind, Result,
    iface::{
        AllocRequest, Allocator, CopyEngine, Device, DmaBufExport, DmaBufExporter, DmaBufMapping,
        HostRegistrar, InboundFlush, Ipc, MonitorSource, PeerMemoryExporter, SegmentMap,
    },
    monitor::{DetectionMethod, Monitor},
    provider::Nic,
    system::Simulated,
};

use crate::monitor::{FaultyMonitor, MonitorFault};

/// The injected fault of a simulated device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Flips a bit in the last byte of each copy.
    FlipsABit,
    /// Leaves an fd open after each export.
    LeaksAnFd,
    /// Exports from the start of the allocation instead of the requested address.
    ExportsFromTheStart,
    /// Reports memory as freed without freeing it.
    KeepsMemory,
    /// Has a monitor that does not distinguish allocations at the same address.
    ConfusesAllocations,
}

/// A simulated device with an injected fault.
#[derive(Debug)]
pub(crate) struct Faulty {
    pub(crate) simulated: Arc<Simulated>,
    pub(crate) fault: Fault,
}

// SAFETY: the simulated device, which is an iface, gives every answer. No fault reaches other
// memory: it flips a bit of the copied bytes, exports other bytes of the allocation, leaks an fd or
// an allocation, or reports changed memory as unchanged.
#[allow(unsafe_code, reason = "the trait and its unsafe methods")]
unsafe impl Iface for Faulty {
    fn kind(&self) -> IfaceKind {
        self.simulated.kind()
    }

    fn name(&self) -> &str {
        self.simulated.name()
    }

    fn devices(&self) -> Result<Vec<Device>> {
        self.simulated.devices()
    }

    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        self.simulated.query(address)
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        // SAFETY: the caller upholds the contract of this method, and the forwarded call has the
        // same contract.
        unsafe { self.simulated.copy(to, from, len)? };
        let last = Address(to.0 + len - 1);
        if self.fault == Fault::FlipsABit && self.simulated.query(last)?.is_some() {
            let mut byte = 0u8;
            let here = Address::of_ptr(&raw mut byte);
            // SAFETY: `byte` is valid for its one byte, and `last` lies in the range that was just
            // copied to.
            unsafe { self.simulated.copy(here, last, 1)? };
            byte ^= 0x10;
            // SAFETY: `byte` is valid for its one byte, and `last` lies in the range that was just
            // copied to.
            unsafe { self.simulated.copy(last, Address::of_ptr(&raw const byte), 1)? };
        }
        Ok(())
    }

    fn address_span(&self) -> Option<AddressRange> {
        self.simulated.address_span()
    }

    fn allocator(&self) -> Option<&dyn Allocator> {
        Some(self)
    }

    fn copy_engine(&self) -> Option<&dyn CopyEngine> {
        self.simulated.copy_engine()
    }

    fn dma_buf(&self) -> Option<&dyn DmaBufExporter> {
        Some(self)
    }

    fn peer_memory(&self) -> Option<&dyn PeerMemoryExporter> {
        self.simulated.peer_memory()
    }

    fn host_registrar(&self) -> Option<&dyn HostRegistrar> {
        self.simulated.host_registrar()
    }

    fn ipc(&self) -> Option<&dyn Ipc> {
        self.simulated.ipc()
    }

    fn segments(&self) -> Option<&dyn SegmentMap> {
        self.simulated.segments()
    }

    fn inbound_flush(&self) -> Option<&dyn InboundFlush> {
        self.simulated.inbound_flush()
    }

    fn monitor(&self) -> Option<&dyn MonitorSource> {
        Some(self)
    }
}

impl Allocator for Faulty {
    fn allocate(&self, request: &AllocRequest) -> Result<Allocation> {
        IfaceExt::allocate(&*self.simulated, request)
    }

    #[allow(unsafe_code, reason = "the trait and its unsafe methods")]
    unsafe fn free(&self, allocation: &Allocation) -> Result<()> {
        if self.fault == Fault::KeepsMemory {
            return Ok(());
        }
        // SAFETY: the caller upholds the contract of this method, and the forwarded call has the
        // same contract.
        unsafe { IfaceExt::free(&*self.simulated, allocation) }
    }
}

impl DmaBufExporter for Faulty {
    fn mappings(&self) -> &'static [DmaBufMapping] {
        self.simulated.dma_buf().expect("a simulated device exports").mappings()
    }

    fn export(
        &self,
        range: AddressRange,
        _: &Allocation,
        nic: &Nic,
        mapping: DmaBufMapping,
    ) -> Result<DmaBufExport> {
        let allocation = self.simulated.query(range.start())?.expect("an allocation is exported");
        let exported = if self.fault == Fault::ExportsFromTheStart {
            allocation.range.slice(0, range.len()).expect("no longer than the allocation")
        } else {
            range
        };
        let export = self.simulated.export_dma_buf(exported, nic, mapping)?;
        if self.fault == Fault::LeaksAnFd {
            mem::forget(export.fd.try_clone().expect("an fd to leak"));
        }
        Ok(export)
    }

    fn release(&self, export: DmaBufExport) -> Result<()> {
        self.simulated.release_dma_buf(export)
    }
}

impl MonitorSource for Faulty {
    fn detection(&self) -> DetectionMethod {
        self.simulated.monitor().expect("a simulated device has a monitor").detection()
    }

    fn start(&self) -> Result<Arc<dyn Monitor>> {
        let monitor = self.simulated.start_monitor()?;
        Ok(if self.fault == Fault::ConfusesAllocations {
            Arc::new(FaultyMonitor::new(monitor, MonitorFault::AlwaysValid))
        } else {
            monitor
        })
    }
}

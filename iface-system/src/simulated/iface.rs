//! The implementation of the `Iface` trait and of its facets for the simulated device.

#![allow(unsafe_code, reason = "implements the trait, with copies by address")]

use std::{
    fmt,
    sync::atomic::{Ordering, fence},
};

use hmem_core::{
    Address, AddressRange, Allocation, DeviceId, Error, ErrorKind, IfaceKind, Result,
    iface::{
        Allocator, CopyEngine, Device, DmaBufExporter, Facet, HostRegistrar, Iface, InboundFlush,
        Ipc, MonitorSource, PeerMemoryExporter, SegmentMap,
    },
};

use super::{DeviceCall, Simulated, SimulatedInner};

// SAFETY: `query` answers from the table of live allocations, whose identities count up. Their
// addresses lie in one window, which is reserved for the life of the iface. A copy keeps the memory
// of its device sides alive and `SimulatedInner::extents` checks their bounds. The event of an
// asynchronous copy is done once the copy has run, or will never run. Exports keep the memory file
// of the allocation alive.
unsafe impl Iface for Simulated {
    fn kind(&self) -> IfaceKind {
        self.inner.config.kind
    }

    fn name(&self) -> &str {
        &self.inner.config.name
    }

    fn devices(&self) -> Result<Vec<Device>> {
        self.inner.call(DeviceCall::Devices)?;
        let device = |number| Device {
            id: DeviceId(number),
            name: format!("simulated device {number}"),
            pci_bus_id: self.inner.config.pci_bus_ids.get(number as usize).cloned(),
            memory: self.inner.config.memory_per_device,
        };
        Ok((0..self.inner.config.devices).map(device).collect())
    }

    #[inline]
    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        self.inner.query(address)
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        // SAFETY: the caller promises that the host range of the copy is valid, which
        // `SimulatedInner::copy` requires.
        unsafe { self.inner.copy(to, from, len) }
    }

    fn address_span(&self) -> Option<AddressRange> {
        Some(self.window())
    }

    fn allocator(&self) -> Option<&dyn Allocator> {
        Some(&*self.inner)
    }

    fn copy_engine(&self) -> Option<&dyn CopyEngine> {
        Some(self)
    }

    fn dma_buf(&self) -> Option<&dyn DmaBufExporter> {
        Some(&*self.inner)
    }

    fn peer_memory(&self) -> Option<&dyn PeerMemoryExporter> {
        self.inner.config.peer_memory.then_some(&*self.inner)
    }

    fn host_registrar(&self) -> Option<&dyn HostRegistrar> {
        Some(&*self.inner)
    }

    fn ipc(&self) -> Option<&dyn Ipc> {
        Some(&*self.inner)
    }

    fn segments(&self) -> Option<&dyn SegmentMap> {
        Some(&*self.inner)
    }

    fn inbound_flush(&self) -> Option<&dyn InboundFlush> {
        Some(&*self.inner)
    }

    fn monitor(&self) -> Option<&dyn MonitorSource> {
        Some(self)
    }

    fn unavailable(&self, facet: Facet) -> Error {
        match facet {
            Facet::PeerMemory => {
                Error::new(ErrorKind::Unsupported, "export peer memory").iface(self).remedy(
                    "no peer-memory client knows this device: export a dma-buf, or build the \
                     device with peer_memory(true)",
                )
            }
            _ => facet.unavailable(self),
        }
    }
}

impl HostRegistrar for SimulatedInner {
    unsafe fn register(&self, range: AddressRange) -> Result<()> {
        self.call(DeviceCall::HostRegister)?;
        let refused =
            |kind| Error::new(kind, "host register").iface(&self.config).context("range", range);
        if range.is_empty() {
            return Err(refused(ErrorKind::ZeroLength));
        }
        if range.overlaps(self.table.window()) {
            return Err(refused(ErrorKind::InvalidArgument)
                .remedy("register host memory, not the device's own"));
        }
        let mut state = self.state.lock();
        let before =
            state.host_registered.range(..range.start().0.saturating_add(range.len())).next_back();
        if let Some((start, len)) = before
            && start.saturating_add(*len) > range.start().0
        {
            return Err(
                refused(ErrorKind::InvalidArgument).remedy("the range overlaps a registered range")
            );
        }
        state.host_registered.insert(range.start().0, range.len());
        Ok(())
    }

    fn unregister(&self, range: AddressRange) -> Result<()> {
        self.call(DeviceCall::HostUnregister)?;
        let mut state = self.state.lock();
        if state.host_registered.get(&range.start().0) != Some(&range.len()) {
            return Err(Error::new(ErrorKind::InvalidArgument, "host unregister")
                .iface(&self.config)
                .context("range", range)
                .remedy("unregister exactly the range that was registered, once"));
        }
        state.host_registered.remove(&range.start().0);
        Ok(())
    }
}

impl InboundFlush for SimulatedInner {
    fn flush(&self, device: DeviceId) -> Result<()> {
        self.device(device)?;
        self.call(DeviceCall::FlushInbound)?;
        // Memory files are coherent. The fence orders writes that other threads made through their
        // mappings before this call.
        fence(Ordering::SeqCst);
        Ok(())
    }
}

impl fmt::Debug for Simulated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Simulated")
            .field("kind", &self.inner.config.kind)
            .field("name", &self.inner.config.name)
            .field("window", &self.window())
            .finish_non_exhaustive()
    }
}

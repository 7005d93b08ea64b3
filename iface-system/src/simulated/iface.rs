//! The iface's operations, each in a line or in its own file.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{Ordering, fence},
    },
};

use hmem_core::{
    Address, AddressRange, Allocation, DeviceId, Error, ErrorKind, IfaceKind, Result, Segment,
    iface::{
        AllocRequest, Capability, CopyEvent, Device, DmaBufExport, DmaBufMapping, Iface, IpcHandle,
        PeerMemoryExport,
    },
    monitor::Monitor,
    provider::Nic,
};

use super::{Call, DmaBufKind, Inner, Simulated, Style, memory::Origin, monitor::SimulatedMonitor};

// SAFETY: `query` answers from the table of live allocations, whose identities count up and whose
// addresses lie in one window, reserved for the life of the iface. A copy keeps the memory of its
// own sides and bounds them in `Inner::pieces`; its event is done when its job has run or will not
// run. Exports hold the memory file of the allocation.
unsafe impl Iface for Simulated {
    fn kind(&self) -> IfaceKind {
        self.inner.config.kind
    }

    fn name(&self) -> &str {
        &self.inner.config.name
    }

    fn capability(&self) -> Capability {
        let config = &self.inner.config;
        Capability {
            allocate: true,
            dma_buf: config.dma_buf != DmaBufKind::None,
            pcie_mapping: config.pcie_mapping,
            peer_memory: config.peer_memory,
            async_copy: true,
            host_register: true,
            ipc: true,
            identity: true,
            free_callback: config.style == Style::Callback,
            window: Some(self.window()),
        }
    }

    fn devices(&self) -> Result<Vec<Device>> {
        self.inner.call(Call::Devices)?;
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

    fn segments(&self, range: AddressRange) -> Result<Vec<Segment>> {
        self.inner.segments(range)
    }

    fn allocate(&self, request: &AllocRequest) -> Result<Allocation> {
        self.inner.allocate(request)
    }

    unsafe fn free(&self, allocation: &Allocation) -> Result<()> {
        self.inner.call(Call::Free)?;
        self.inner.end(allocation, Origin::Allocated, "free")
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.inner.copy(to, from, len) }
    }

    unsafe fn copy_async(
        &self,
        to: Address,
        from: Address,
        len: u64,
    ) -> Result<Box<dyn CopyEvent>> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.inner.copy_async(to, from, len) }
    }

    fn export_dma_buf(
        &self,
        range: AddressRange,
        nic: &Nic,
        mapping: DmaBufMapping,
    ) -> Result<DmaBufExport> {
        self.inner.export_dma_buf(range, nic, mapping)
    }

    fn release_dma_buf(&self, export: DmaBufExport) -> Result<()> {
        self.inner.release_dma_buf(export)
    }

    fn export_peer_memory(&self, range: AddressRange, nic: &Nic) -> Result<PeerMemoryExport> {
        self.inner.export_peer_memory(range, nic)
    }

    unsafe fn host_register(&self, range: AddressRange) -> Result<()> {
        self.inner.host_register(range)
    }

    fn host_unregister(&self, range: AddressRange) -> Result<()> {
        self.inner.host_unregister(range)
    }

    fn ipc_export(&self, allocation: &Allocation) -> Result<IpcHandle> {
        self.inner.ipc_export(allocation)
    }

    fn ipc_open(&self, handle: &IpcHandle) -> Result<Allocation> {
        self.inner.ipc_open(handle)
    }

    unsafe fn ipc_close(&self, allocation: &Allocation) -> Result<()> {
        self.inner.call(Call::IpcClose)?;
        self.inner.end(allocation, Origin::Opened, "ipc close")
    }

    fn flush_inbound(&self, device: DeviceId) -> Result<()> {
        self.inner.device(device)?;
        self.inner.call(Call::FlushInbound)?;
        // Memory files are coherent; what another thread wrote through its mapping before it called
        // us is ordered before what we do after.
        fence(Ordering::SeqCst);
        Ok(())
    }

    fn is_started(&self, device: DeviceId) -> Result<bool> {
        self.inner.device(device).map(|_| true)
    }

    fn monitor(&self) -> Result<Arc<dyn Monitor>> {
        Ok(Arc::new(SimulatedMonitor(Arc::clone(&self.inner))))
    }
}

impl Inner {
    pub(super) fn set_exportable(&self, range: AddressRange, exportable: bool) -> Result<()> {
        let mut book = self.book.lock();
        self.record_of(&mut book, range)?.set_exportable(range, exportable);
        Ok(())
    }

    fn host_register(&self, range: AddressRange) -> Result<()> {
        self.call(Call::HostRegister)?;
        let refused = |kind| {
            Error::new(kind, "host register").iface(self.config.kind).context("range", range)
        };
        if range.is_empty() {
            return Err(refused(ErrorKind::ZeroLength));
        }
        if range.overlaps(self.table.window()) {
            return Err(refused(ErrorKind::InvalidArgument)
                .remedy("register host memory, not the device's own"));
        }
        let mut book = self.book.lock();
        let before =
            book.host_registered.range(..range.start().0.saturating_add(range.len())).next_back();
        if let Some((start, len)) = before
            && start.saturating_add(*len) > range.start().0
        {
            return Err(refused(ErrorKind::InvalidArgument)
                .remedy("the range overlaps one that is registered"));
        }
        book.host_registered.insert(range.start().0, range.len());
        Ok(())
    }

    fn host_unregister(&self, range: AddressRange) -> Result<()> {
        self.call(Call::HostUnregister)?;
        let mut book = self.book.lock();
        if book.host_registered.get(&range.start().0) != Some(&range.len()) {
            return Err(Error::new(ErrorKind::InvalidArgument, "host unregister")
                .iface(self.config.kind)
                .context("range", range)
                .remedy("unregister exactly the range that was registered, once"));
        }
        book.host_registered.remove(&range.start().0);
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

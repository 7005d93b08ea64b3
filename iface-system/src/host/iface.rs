//! The iface's operations, each in a line or in its own file.

use std::sync::Arc;

use hmem_core::{
    Address, AddressRange, Allocation, AllocationKind, DeviceId, Error, ErrorKind, IfaceKind,
    Result, Segment,
    iface::{
        AllocRequest, Capability, CopyEvent, Device, DmaBufExport, DmaBufMapping, Iface, IpcHandle,
        PeerMemoryExport,
    },
    monitor::Monitor,
    provider::Nic,
};

use super::System;

fn unsupported(operation: &'static str, remedy: &'static str) -> Error {
    Error::new(ErrorKind::Unsupported, operation).iface(IfaceKind::SYSTEM).remedy(remedy)
}

// SAFETY: `query` answers from the records of live allocations, whose identities count up. Each
// record owns its memory, which is freed with the record. `check_side` bounds both sides of a copy,
// which has ended when it returns. Exports hold the memory file of the allocation itself.
unsafe impl Iface for System {
    fn kind(&self) -> IfaceKind {
        IfaceKind::SYSTEM
    }

    fn name(&self) -> &str {
        "system"
    }

    fn capability(&self) -> Capability {
        Capability {
            allocate: true,
            dma_buf: true,
            pcie_mapping: false,
            peer_memory: false,
            async_copy: false,
            host_register: false,
            ipc: true,
            identity: true,
            free_callback: false,
            window: None,
        }
    }

    fn devices(&self) -> Result<Vec<Device>> {
        Ok(Vec::new())
    }

    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        Ok(self.record_at(address).map(|record| record.allocation))
    }

    /// One segment, whatever the pages behind it: nothing that takes host memory needs them
    /// contiguous.
    fn segments(&self, range: AddressRange) -> Result<Vec<Segment>> {
        let record = self.record_at(range.start());
        let exportable = record.is_some_and(|record| {
            record.memfd().is_some() && record.allocation.range.contains_range(range)
        });
        Ok(vec![Segment { range, exportable }])
    }

    fn allocate(&self, request: &AllocRequest) -> Result<Allocation> {
        match request.kind {
            AllocationKind::System => self.mmap(request.len),
            kind => Err(unsupported("allocate", "device ifaces allocate this kind")
                .context("kind", kind.name())),
        }
    }

    unsafe fn free(&self, allocation: &Allocation) -> Result<()> {
        self.end(allocation, false, "free")
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.copy_bytes(to, from, len) }
    }

    unsafe fn copy_async(&self, _: Address, _: Address, _: u64) -> Result<Box<dyn CopyEvent>> {
        Err(unsupported("copy async", "host memory has no copy engine: copy and wait"))
    }

    fn export_dma_buf(
        &self,
        range: AddressRange,
        _: &Nic,
        mapping: DmaBufMapping,
    ) -> Result<DmaBufExport> {
        self.export(range, mapping)
    }

    fn release_dma_buf(&self, export: DmaBufExport) -> Result<()> {
        drop(export);
        Ok(())
    }

    fn export_peer_memory(&self, _: AddressRange, _: &Nic) -> Result<PeerMemoryExport> {
        Err(unsupported("export peer memory", "host memory needs none: register it as host pages"))
    }

    unsafe fn host_register(&self, _: AddressRange) -> Result<()> {
        Err(unsupported("host register", "this iface has no devices to page-lock memory for"))
    }

    fn host_unregister(&self, _: AddressRange) -> Result<()> {
        Err(unsupported("host unregister", "this iface has no devices to page-lock memory for"))
    }

    fn ipc_export(&self, allocation: &Allocation) -> Result<IpcHandle> {
        self.handle_of(allocation)
    }

    fn ipc_open(&self, handle: &IpcHandle) -> Result<Allocation> {
        self.open(handle)
    }

    unsafe fn ipc_close(&self, allocation: &Allocation) -> Result<()> {
        self.end(allocation, true, "ipc close")
    }

    /// Host memory is coherent: what has arrived is visible.
    fn flush_inbound(&self, _: DeviceId) -> Result<()> {
        Ok(())
    }

    fn is_started(&self, _: DeviceId) -> Result<bool> {
        Ok(true)
    }

    fn monitor(&self) -> Result<Arc<dyn Monitor>> {
        self.watched_by()
    }
}

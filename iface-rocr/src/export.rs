//! Exports: dma-bufs, peer memory, handles for other processes, and what inbound writes need.

use hmem_core::{
    AddressRange, Allocation, DeviceId, Result,
    iface::{DmaBufExport, DmaBufMapping, IpcHandle, PeerMemoryExport},
    provider::Nic,
};

use crate::iface::{Rocr, lacks};

pub(crate) fn export_dma_buf(
    _rocr: &Rocr,
    range: AddressRange,
    _nic: &Nic,
    _mapping: DmaBufMapping,
) -> Result<DmaBufExport> {
    Err(lacks("export_dma_buf", "hmem-iface-rocr does not export dma-bufs yet")
        .context("range", range))
}

/// Nothing that this iface exported comes here yet; the fd is closed all the same.
pub(crate) fn release_dma_buf(_rocr: &Rocr, export: DmaBufExport) -> Result<()> {
    drop(export);
    Err(lacks("release_dma_buf", "hmem-iface-rocr does not export dma-bufs yet"))
}

pub(crate) fn export_peer_memory(
    _rocr: &Rocr,
    range: AddressRange,
    _nic: &Nic,
) -> Result<PeerMemoryExport> {
    Err(lacks("export_peer_memory", "hmem-iface-rocr does not export peer memory yet")
        .context("range", range))
}

pub(crate) fn ipc_export(_rocr: &Rocr, allocation: &Allocation) -> Result<IpcHandle> {
    Err(lacks("ipc_export", "hmem-iface-rocr does not hand allocations to other processes yet")
        .context("range", allocation.range))
}

pub(crate) fn ipc_open(_rocr: &Rocr, _handle: &IpcHandle) -> Result<Allocation> {
    Err(lacks("ipc_open", "hmem-iface-rocr does not open other processes' allocations yet"))
}

pub(crate) fn ipc_close(_rocr: &Rocr, allocation: &Allocation) -> Result<()> {
    Err(lacks("ipc_close", "hmem-iface-rocr does not open other processes' allocations yet")
        .context("range", allocation.range))
}

pub(crate) fn flush_inbound(rocr: &Rocr, device: DeviceId) -> Result<()> {
    rocr.device("flush_inbound", device)?;
    Err(lacks("flush_inbound", "hmem-iface-rocr does not flush inbound writes yet").device(device))
}

//! Exports: dma-bufs, peer memory, handles for other processes, and what inbound writes need.

use hmem_core::{
    AddressRange, Allocation, DeviceId, Result,
    iface::{DmaBufExport, DmaBufMapping, IpcHandle, PeerMemoryExport},
    provider::Nic,
};

use crate::iface::{LevelZero, lacks};

pub(crate) fn export_dma_buf(
    _level_zero: &LevelZero,
    range: AddressRange,
    _nic: &Nic,
    _mapping: DmaBufMapping,
) -> Result<DmaBufExport> {
    Err(lacks("export_dma_buf", "hmem-iface-ze does not export dma-bufs yet")
        .context("range", range))
}

/// Nothing that this iface exported comes here yet; the fd is closed all the same.
pub(crate) fn release_dma_buf(_level_zero: &LevelZero, export: DmaBufExport) -> Result<()> {
    drop(export);
    Err(lacks("release_dma_buf", "hmem-iface-ze does not export dma-bufs yet"))
}

pub(crate) fn export_peer_memory(
    _level_zero: &LevelZero,
    range: AddressRange,
    _nic: &Nic,
) -> Result<PeerMemoryExport> {
    Err(lacks("export_peer_memory", "hmem-iface-ze does not export peer memory yet")
        .context("range", range))
}

pub(crate) fn ipc_export(_level_zero: &LevelZero, allocation: &Allocation) -> Result<IpcHandle> {
    Err(lacks("ipc_export", "hmem-iface-ze does not hand allocations to other processes yet")
        .context("range", allocation.range))
}

pub(crate) fn ipc_open(_level_zero: &LevelZero, _handle: &IpcHandle) -> Result<Allocation> {
    Err(lacks("ipc_open", "hmem-iface-ze does not open other processes' allocations yet"))
}

pub(crate) fn ipc_close(_level_zero: &LevelZero, allocation: &Allocation) -> Result<()> {
    Err(lacks("ipc_close", "hmem-iface-ze does not open other processes' allocations yet")
        .context("range", allocation.range))
}

pub(crate) fn flush_inbound(level_zero: &LevelZero, device: DeviceId) -> Result<()> {
    level_zero.device("flush_inbound", device)?;
    Err(lacks("flush_inbound", "hmem-iface-ze does not flush inbound writes yet").device(device))
}

//! Exports of host memory to NICs and other processes, for allocations in memory files.

#![allow(unsafe_code, reason = "implements the trait, with an unsafe close")]

use std::os::fd::{AsFd, AsRawFd};

use hmem_core::{
    AddressRange, AllocOffset, Allocation, DmaBufOffset, Errno, Error, ErrorKind, IfaceKind,
    Result,
    iface::{DmaBufExport, DmaBufExporter, DmaBufMapping, Ipc, IpcHandle},
    provider::Nic,
};

use super::{
    MemFd, System,
    memory::{HostBacking, not_live},
};
use crate::{
    ipc_handle::{HandleBody, NO_STAMP},
    sys,
};

impl DmaBufExporter for System {
    fn mappings(&self) -> &'static [DmaBufMapping] {
        &[DmaBufMapping::Default]
    }

    fn export(
        &self,
        range: AddressRange,
        of: &Allocation,
        _: &Nic,
        mapping: DmaBufMapping,
    ) -> Result<DmaBufExport> {
        let refused = |kind| {
            Error::new(kind, "export dma-buf").iface(IfaceKind::SYSTEM).context("range", range)
        };
        if range.is_empty() {
            return Err(refused(ErrorKind::ZeroLength).remedy("export at least one byte"));
        }
        if mapping == DmaBufMapping::Pcie {
            return Err(refused(ErrorKind::Unsupported)
                .errno(Errno(libc::EOPNOTSUPP))
                .remedy("host memory has no PCIe mapping: export with the default mapping"));
        }
        let record = self.record_at(range.start());
        let Some((record, file)) =
            record.as_ref().and_then(|record| Some((record, record.memfd()?)))
        else {
            return Err(refused(ErrorKind::Unsupported).errno(Errno(libc::EOPNOTSUPP)).remedy(
                "no memory file backs the range: register it as host pages, or allocate it with \
                 `memfd`",
            ));
        };
        if record.allocation.id != of.id || !record.allocation.range.contains_range(range) {
            return Err(refused(ErrorKind::OutOfBounds)
                .context("allocation", record.allocation.range)
                .remedy("the range must lie in one allocation"));
        }
        let in_file = range.start().0 - record.allocation.base().0;
        if let Err(why) = &self.udmabuf {
            tracing::debug!(%why, "the export is a memory file, not a dma-buf");
        }
        let udmabuf = self.udmabuf.as_ref().ok();
        let (fd, offset) = sys::export(udmabuf, file.as_fd(), in_file, range.len())?;
        Ok(DmaBufExport {
            fd,
            offset: DmaBufOffset(offset),
            alloc_offset: AllocOffset(in_file),
            len: range.len(),
            mapping,
            revocation: None,
        })
    }
}

impl Ipc for System {
    fn export(&self, allocation: &Allocation) -> Result<IpcHandle> {
        let record =
            self.record_at(allocation.base()).filter(|record| record.allocation == *allocation);
        let record = record.ok_or_else(|| not_live(allocation, "ipc_export"))?;
        let HostBacking::MemFd(file) = &record.backing else {
            return Err(Error::new(ErrorKind::Unsupported, "ipc_export")
                .iface(IfaceKind::SYSTEM)
                .context("allocation", allocation.range)
                .remedy(
                    "other processes can open only memory files of this process: allocate with \
                     `System::memfd`",
                ));
        };
        let body = HandleBody {
            pid: std::process::id(),
            fd: file.as_fd().as_raw_fd() as u32,
            device: None,
            kind: 0,
            file: sys::file_identity(file.as_fd())?,
            offset: 0,
            len: allocation.range.len(),
            id: allocation.id.0,
            stamp: NO_STAMP,
        };
        Ok(IpcHandle::encode(IfaceKind::SYSTEM, &body))
    }

    fn open(&self, handle: &IpcHandle) -> Result<Allocation> {
        let body = HandleBody::decode(handle, IfaceKind::SYSTEM)?;
        let (fd, file_len) = body.open_file()?;
        if body.len > file_len || body.offset != 0 {
            return Err(body.gone("the owner's file is shorter than the handle says"));
        }
        self.add(HostBacking::Opened(MemFd::of(fd, body.len)?), body.len)
    }

    unsafe fn close(&self, allocation: &Allocation) -> Result<()> {
        self.end(allocation, true, "ipc close")
    }
}

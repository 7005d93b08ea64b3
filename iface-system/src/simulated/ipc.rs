//! Opens allocations of other processes.
//!
//! A handle names the owner's memory file, and a word in the header of that file. The word holds
//! the allocation's identity until the allocation is freed. The opening process verifies the file
//! and the identity, so that neither a reused fd number nor a reused range of the file is mistaken
//! for the allocation.

#![allow(unsafe_code, reason = "implements the trait, with an unsafe close")]

use std::{os::fd::AsRawFd, sync::Arc};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationKind, DeviceId, Error, ErrorKind, Result,
    iface::{Ipc, IpcHandle},
};

use super::{
    SimulatedInner,
    arena::{ArenaFile, FileExtent},
    faults::DeviceCall,
    memory::{PhysicalSegment, SimulatedState},
    table::kind_of,
};
use crate::{ipc_handle::HandleBody, sys};

/// Returns true if other processes can open allocations of this kind by an IPC handle.
fn is_shareable(kind: AllocationKind) -> bool {
    matches!(kind, AllocationKind::Device | AllocationKind::StreamOrdered)
}

impl Ipc for SimulatedInner {
    fn export(&self, allocation: &Allocation) -> Result<IpcHandle> {
        self.call(DeviceCall::IpcExport)?;
        let mut state = self.state.lock();
        let number = self.live_number(&state, allocation, false, "ipc_export")?;
        if !is_shareable(allocation.kind) {
            return Err(Error::new(ErrorKind::Unsupported, "ipc_export")
                .iface(&self.config)
                .context("kind", allocation.kind.name())
                .remedy(
                    "only device and stream-ordered allocations can be opened by other processes",
                ));
        }
        let SimulatedState { records, arenas, .. } = &mut *state;
        let gone = || Error::new(ErrorKind::BadState, "ipc_export").iface(&self.config);
        let record = records[number as usize].as_mut().ok_or_else(gone)?;
        let extent = record.segments.first().ok_or_else(gone)?.extent.clone();
        let slot = match record.stamp {
            Some(slot) => slot,
            None => arenas.take_stamp(&extent)?,
        };
        extent.file.set_stamp(slot, allocation.id.0);
        arenas.mark_exported(&extent);
        record.stamp = Some(slot);
        record.exported = true;
        let body = HandleBody {
            pid: std::process::id(),
            fd: extent.file.fd().as_raw_fd() as u32,
            device: allocation.device.map(|device| device.0),
            kind: allocation.kind as u8,
            file: sys::file_identity(extent.file.fd())?,
            offset: extent.offset,
            len: allocation.range.len(),
            id: allocation.id.0,
            stamp: u64::from(slot),
        };
        Ok(IpcHandle::encode(self.config.kind, &body))
    }

    fn open(&self, handle: &IpcHandle) -> Result<Allocation> {
        self.call(DeviceCall::IpcOpen)?;
        let body = HandleBody::decode(handle, &self.config)?;
        let kind = kind_of(body.kind);
        if !is_shareable(kind) || body.offset % self.page != 0 {
            return Err(handle.malformed(&self.config, "kind or offset"));
        }
        // An unused word of a file's header is 0, which is no allocation's identity.
        if body.id == 0 {
            return Err(handle.malformed(&self.config, "identity"));
        }
        let device = body.device.map(|device| self.device(DeviceId(device))).transpose()?;
        let (fd, file_len) = body.open_file()?;
        let len = body.len.next_multiple_of(self.page);
        if body.offset + len > file_len {
            return Err(body.gone("the owner's file is shorter than the handle says"));
        }
        let file = Arc::new(ArenaFile::new(fd, file_len)?);
        let slot =
            u16::try_from(body.stamp).map_err(|_| body.gone("the handle has no identity"))?;
        // The identity is checked after the file was opened, because from then on the owner does
        // not reuse the memory.
        if file.stamp(slot) != body.id {
            return Err(body.gone("the owner has freed the allocation"));
        }
        let mut state = self.state.lock();
        let at = state.addresses.take(len).ok_or_else(|| {
            Error::new(ErrorKind::OutOfResources, "ipc_open")
                .iface(&self.config)
                .context("length", len)
        })?;
        let range = AddressRange::new(Address(self.window_start() + at), body.len)?;
        let extent = FileExtent::foreign(file, body.offset, len);
        let segments = vec![PhysicalSegment { extent, exportable: true }];
        let shape = (range, AllocationKind::Imported, device);
        self.enter(&mut state, shape, segments).map_err(|(error, _)| {
            state.addresses.give(at, len);
            error
        })
    }

    unsafe fn close(&self, allocation: &Allocation) -> Result<()> {
        self.call(DeviceCall::IpcClose)?;
        self.end(allocation, true, "ipc close")
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use hmem_core::{Iface, IfaceExt};
    use rustix::fs::{MemfdFlags, SealFlags};

    use super::*;
    use crate::{Simulated, System, ipc_handle::NO_STAMP};

    #[test]
    fn handle_of_a_shrinkable_file_is_malformed() {
        let (system, simulated) = (System::new(), Simulated::builder().build().unwrap());
        let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .unwrap();
        rustix::fs::ftruncate(&fd, 1 << 20).unwrap();
        let file = sys::file_identity(fd.as_fd()).unwrap();
        // The first word of the file's header is the allocation's identity. The others are 0.
        rustix::io::pwrite(&fd, &7_u64.to_ne_bytes(), 0).unwrap();
        let body = |kind, stamp, offset| HandleBody {
            pid: std::process::id(),
            fd: fd.as_raw_fd() as u32,
            device: None,
            kind,
            file,
            offset,
            len: 4096,
            id: 7,
            stamp,
        };
        let cases: [(&dyn Iface, HandleBody); 2] = [
            (&system, body(0, NO_STAMP, 0)),
            (&simulated, body(AllocationKind::Device as u8, 0, 1 << 19)),
        ];
        for (iface, body) in cases {
            let handle = IpcHandle::encode(iface.kind(), &body);
            let error = iface.ipc_open(&handle).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Malformed, "{error}");
        }
        // With the seal the file is accepted, so the missing seal was its only defect.
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
        for (iface, body) in cases {
            let handle = IpcHandle::encode(iface.kind(), &body);
            iface.ipc_open(&handle).unwrap();
        }
        let unused = HandleBody { id: 0, ..body(AllocationKind::Device as u8, 1, 1 << 19) };
        let error = simulated.ipc_open(&IpcHandle::encode(simulated.kind(), &unused)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed, "{error}");
        let beyond = body(AllocationKind::Device as u8, 0, 1 << 20);
        let handle = IpcHandle::encode(simulated.kind(), &beyond);
        let error = simulated.ipc_open(&handle).unwrap_err();
        assert!(error.is_unavailable() && error.to_string().contains("shorter"), "{error}");
    }
}

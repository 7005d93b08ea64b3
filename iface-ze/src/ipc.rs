//! Exchange of allocations with other processes. The importing process duplicates the fd of a
//! dma-buf from the exporting process, and imports the dma-buf.
//!
//! Handles of Level Zero itself are not used. In drivers before 2025 such a handle contains the
//! number of an fd, which belongs to another file in another process.

#![allow(unsafe_code, reason = "closes an allocation that the caller no longer uses")]

use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    ptr,
    sync::Arc,
};

use hmem_core::{
    Address, Allocation, AllocationKind, Error, ErrorKind, IfaceKind, Result,
    iface::{Ipc, IpcHandle},
};
use hmem_iface_kit::log_failure;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};
use serde::{Deserialize, Serialize};

use crate::{
    driver::DeviceEntry,
    error::{ZE, check},
    export::Exporter,
    lookup::{FileId, ImportedBuffer, Lookup},
    sys::{self, DeviceMemoryDescription, ImportFd},
};

/// Exports allocations to other processes, and opens allocations of other processes.
#[derive(Debug)]
pub(crate) struct IpcExchange {
    pub(crate) lookup: Arc<Lookup>,
    pub(crate) exporter: Exporter,
}

/// Contents of a handle that another process opens.
#[derive(Debug, Serialize, Deserialize)]
struct Body {
    /// Process id of the process that exported the memory.
    pid: u32,
    /// Number of the dma-buf's fd in the exporting process.
    fd: u32,
    /// File system and inode of the dma-buf. They show whether the fd number now belongs to another
    /// file.
    file: FileId,
    len: u64,
    /// UUID of the device, which is the same in every process.
    uuid: [u8; 16],
}

impl Body {
    /// Duplicates the dma-buf's fd from the process that exported the memory.
    fn dma_buf(&self) -> Result<OwnedFd> {
        let gone = |why: &'static str| {
            ZE.error(ErrorKind::Unavailable, "ipc_open")
                .context("why", why)
                .context("pid", self.pid)
                .remedy("keep the allocation in its process until it is open everywhere")
        };
        let refused = |errno: rustix::io::Errno, call: &'static str| match errno {
            rustix::io::Errno::SRCH => gone("the process of the memory has ended"),
            rustix::io::Errno::BADF => gone("the memory was freed"),
            rustix::io::Errno::PERM | rustix::io::Errno::ACCESS => {
                Error::os(errno, call).iface(IfaceKind::ZE).context("pid", self.pid).remedy(
                    "duplicating a dma-buf needs the right to trace its process: run both \
                     processes as one user, and see prctl PR_SET_PTRACER and \
                     /proc/sys/kernel/yama/ptrace_scope",
                )
            }
            rustix::io::Errno::NOSYS => ZE
                .error(ErrorKind::Unsupported, "ipc_open")
                .caused_by(Error::os(errno, call))
                .context("pid", self.pid)
                .remedy(format!("use Linux 5.6 or later, and no seccomp filter that hides {call}")),
            _ => Error::os(errno, call).iface(IfaceKind::ZE).context("pid", self.pid),
        };
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| gone("no such process"))?;
        let owner = rustix::process::pidfd_open(pid, PidfdFlags::empty())
            .map_err(|errno| refused(errno, "pidfd_open"))?;
        let fd = rustix::process::pidfd_getfd(&owner, self.fd as i32, PidfdGetfdFlags::empty())
            .map_err(|errno| refused(errno, "pidfd_getfd"))?;
        if identity(fd.as_fd())? != self.file {
            return Err(gone("the memory was freed: the fd number belongs to another file by now"));
        }
        Ok(fd)
    }
}

impl Ipc for IpcExchange {
    fn export(&self, allocation: &Allocation) -> Result<IpcHandle> {
        const OPERATION: &str = "ipc_export";
        let described = |error: Error| error.context("range", allocation.range);
        let found = self.lookup.find(allocation.base())?;
        let live = found.filter(|found| found.allocation.id == allocation.id);
        let live = live.ok_or_else(|| {
            described(
                ZE.error(ErrorKind::InvalidArgument, OPERATION)
                    .remedy("the allocation is not live: export it before it is freed"),
            )
        })?;
        let device = match live.device {
            Some(device) if live.owned && live.allocation.kind == AllocationKind::Device => device,
            _ => {
                let reason = "only device memory that this iface allocated is shared";
                return Err(described(ZE.lacks(OPERATION, reason))
                    .context("kind", live.allocation.kind.name()));
            }
        };
        let fd = self
            .lookup
            .share(&live.allocation, || self.exporter.export_whole(&live))
            .map_err(described)?;
        let body = Body {
            pid: std::process::id(),
            fd: fd.as_raw_fd() as u32,
            file: identity(fd.as_fd())?,
            len: live.allocation.range.len(),
            uuid: device.uuid,
        };
        Ok(IpcHandle::encode(IfaceKind::ZE, &body))
    }

    fn open(&self, handle: &IpcHandle) -> Result<Allocation> {
        const OPERATION: &str = "ipc_open";
        let body: Body = handle.decode(IfaceKind::ZE)?;
        let mut devices = self.lookup.driver.devices.iter();
        let entry = devices.find(|entry| entry.uuid == body.uuid).ok_or_else(|| {
            ZE.error(ErrorKind::Unavailable, OPERATION)
                .remedy("the device of the memory is not visible here: see ZE_AFFINITY_MASK")
        })?;
        let fd = body.dma_buf()?;
        let described = |error: Error| error.device(entry.description.id);
        if body.pid == std::process::id() {
            return Err(described(
                ZE.error(ErrorKind::Unavailable, OPERATION)
                    .remedy("the memory belongs to this process: use its address"),
            ));
        }
        let imported = ImportedBuffer::new(entry.handle, body.file).map_err(described)?;
        let mut imported = Some(imported);
        let base = self.import(entry, fd.as_fd(), body.len).map_err(described)?;
        let entered = self.lookup.enter(entry.driver, base, &mut imported);
        if entered.is_err() {
            let closed = self.lookup.free(entry.driver, Address::of_ptr(base));
            log_failure!(error, closed, "cannot close an allocation after a failed ipc_open");
        }
        entered.map_err(described)
    }

    unsafe fn close(&self, allocation: &Allocation) -> Result<()> {
        self.lookup.driver.check_process("ipc_close")?;
        let owned = self.lookup.owned.take("ipc_close", allocation, true)?;
        self.lookup.free(owned.driver, allocation.base()).map_err(|error| {
            self.lookup.owned.insert(allocation, true, owned);
            error.context("allocation", allocation.range)
        })
    }
}

impl IpcExchange {
    /// Imports the memory of a dma-buf. The caller still owns the fd afterwards.
    fn import(
        &self,
        entry: &DeviceEntry,
        fd: BorrowedFd<'_>,
        len: u64,
    ) -> Result<*mut std::ffi::c_void> {
        let import = ImportFd {
            flags: sys::ZE_EXTERNAL_MEMORY_TYPE_FLAG_DMA_BUF,
            fd: fd.as_raw_fd(),
            ..ImportFd::default()
        };
        let next = (&raw const import).cast();
        let description = DeviceMemoryDescription { next, ..DeviceMemoryDescription::default() };
        let mut base = ptr::null_mut();
        let driver = &self.lookup.driver;
        driver.with_context(entry.driver, |context| {
            let allocate = driver.functions.mem_alloc_device;
            // SAFETY: `with_context` keeps the context alive, and it belongs to the device's
            // driver. The descriptions have their types in `stype`, and the second one ends the
            // chain. `base` is writable.
            let code = unsafe {
                allocate(context, &description, len as usize, 0, entry.handle, &mut base)
            };
            check(code, "zeMemAllocDevice")
        })?;
        Ok(base)
    }
}

/// Returns the file system and the inode of a file, which together identify it.
fn identity(fd: BorrowedFd<'_>) -> Result<FileId> {
    let stat =
        rustix::fs::fstat(fd).map_err(|errno| Error::os(errno, "fstat").iface(IfaceKind::ZE))?;
    Ok((stat.st_dev, stat.st_ino))
}

#[cfg(test)]
#[path = "../../tests/corpus/reader.rs"]
mod corpus;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_of_all_versions_are_read() {
        corpus::check("ipc-handle-ze", 2..=u32::from(IpcHandle::VERSION), |bytes| {
            let handle = IpcHandle { iface: IfaceKind::ZE, bytes: bytes.to_vec() };
            let Body { pid, fd, file: (volume, inode), len, uuid } =
                handle.decode(IfaceKind::ZE).expect("a handle");
            format!("pid {pid} fd {fd} file {volume}:{inode} len {len} uuid {uuid:x?}")
        });
    }
}

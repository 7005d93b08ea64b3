//! Exports of device memory to NICs, as dma-bufs.
//!
//! A dma-buf is one buffer of the kernel driver. It begins where the allocation begins, with two
//! exceptions: small allocations that the driver took from a pool, and physical memory that the
//! application mapped in part. Exports of these two kinds are refused, because no call returns
//! their offset in the buffer. Memory that spans several tiles of a GPU has several buffers. The
//! driver exports only the first of them. This export is refused too, because the dma-buf is
//! smaller than the allocation.

#![allow(unsafe_code, reason = "calls the driver to export memory, and owns the descriptors")]

use std::{
    ffi::c_int,
    os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd},
    sync::Arc,
};

use hmem_core::{
    Address, AddressRange, AllocOffset, Allocation, AllocationKind, DmaBufOffset, Error, ErrorKind,
    IfaceKind, Result,
    iface::{DmaBufExport, DmaBufExporter, DmaBufMapping, Facet},
    provider::Nic,
};
use hmem_iface_kit::log_failure;
use parking_lot::Mutex;
use rustix::fs::{FileType, SeekFrom};

use crate::{
    driver::{DeviceEntry, Driver},
    error::{ZE, check},
    lookup::{FoundAllocation, Lookup, pointer},
    sys::{
        self, ContextHandle, DeviceHandle, ExportFd, IpcMemoryHandle, MemoryAllocationProperties,
        ZeResult,
    },
};

/// Exports device memory to NICs as dma-bufs.
#[derive(Debug)]
pub(crate) struct Exporter {
    pub(crate) lookup: Arc<Lookup>,
}

const OPERATION: &str = Facet::DmaBuf.operation();

/// Lock that a thread holds from an export until the fd is returned to the driver. Some drivers
/// have one fd for each allocation, which all ifaces of the process share. Two threads must not
/// pass the handle of one fd to `zeMemPutIpcHandle` at the same time.
static EXPORTING: Mutex<()> = Mutex::new(());

impl DmaBufExporter for Exporter {
    fn mappings(&self) -> &'static [DmaBufMapping] {
        let exports = self.lookup.driver.devices.iter().any(DeviceEntry::exports_dma_bufs);
        if exports { &[DmaBufMapping::Default] } else { &[] }
    }

    fn export(
        &self,
        range: AddressRange,
        of: &Allocation,
        nic: &Nic,
        mapping: DmaBufMapping,
    ) -> Result<DmaBufExport> {
        let described = |error: Error| error.context("range", range).context("nic", nic);
        if mapping != DmaBufMapping::Default {
            return Err(described(
                ZE.lacks(OPERATION, "Level Zero has no mapping but the default"),
            ));
        }
        let found = self.exportable(range, of).map_err(described)?;
        let fd = self.export_whole(&found).map_err(described)?;
        let alloc_offset = found.allocation.offset_of(range.start()).unwrap_or(AllocOffset(0));
        let offset = DmaBufOffset(alloc_offset.0);
        let (len, revocation) = (range.len(), None);
        Ok(DmaBufExport { fd, offset, alloc_offset, len, mapping, revocation })
    }
}

impl Exporter {
    /// Returns the allocation that contains a range, if it has the identity of `of`.
    ///
    /// # Errors
    /// - OutOfBounds for a range that is not in one allocation, or is now in another one than `of`.
    /// - Unsupported for shared and host memory, which cannot be exported as device memory.
    /// - Otherwise the error of the lookup.
    fn exportable(&self, range: AddressRange, of: &Allocation) -> Result<FoundAllocation<'_>> {
        let outside = || ZE.outside(OPERATION);
        let found = self.lookup.find(range.start())?;
        let found = found.filter(|now| now.allocation.id == of.id).ok_or_else(outside)?;
        if !found.allocation.range.contains_range(range) {
            return Err(outside().context("allocation", found.allocation.range));
        }
        match found.allocation.kind {
            AllocationKind::Managed => Err(ZE
                .lacks(OPERATION, "shared memory migrates between host and device")
                .remedy("register its host pages, stage it, or use zeMemAllocDevice")),
            AllocationKind::Host => Err(ZE
                .lacks(OPERATION, "memory of zeMemAllocHost is not device memory")
                .remedy("register its host pages")),
            _ => Ok(found),
        }
    }

    /// Exports a whole allocation as a dma-buf. The caller owns the fd of the result.
    pub(crate) fn export_whole(&self, found: &FoundAllocation<'_>) -> Result<OwnedFd> {
        let driver = &self.lookup.driver;
        let entry = found.device.ok_or_else(|| {
            ZE.lacks(OPERATION, "the memory belongs to a device that the driver does not list")
        })?;
        let id = entry.description.id;
        // For a device that exports no dma-bufs, Intel's driver would report success and return fd
        // 0.
        if !entry.exports_dma_bufs() {
            return Err(ZE
                .lacks(OPERATION, "the device exports no dma-bufs")
                .device(id)
                .context("memoryAllocationExportTypes", entry.exports)
                .remedy(
                    "dma-bufs need the kernel driver (i915 or xe), and a user who may open \
                     /dev/dri/renderD*",
                ));
        }
        if found.pooled {
            return Err(ZE
                .lacks(OPERATION, "the driver took the memory from a pool")
                .device(id)
                .context("allocation", found.allocation.range)
                .remedy(
                    "allocate it with ze_external_memory_export_desc_t, or more than 2 MiB of it",
                ));
        }
        let (base, len) = (found.allocation.base(), found.allocation.range.len());
        let fd = driver.with_context(found.driver, |context| {
            let _exporting = EXPORTING.lock();
            let exported = Exported::ask(driver, context, base)?;
            let own = exported.duplicate(len);
            exported.return_fd(driver, context, base);
            own
        });
        let fd = fd.map_err(|error| error.device(id))?;
        // If the memory was freed meanwhile, another file may have the number of the fd.
        let still = self.lookup.find(base)?.map(|now| now.allocation);
        if still != Some(found.allocation) {
            return Err(ZE
                .error(ErrorKind::OutOfBounds, OPERATION)
                .remedy("the memory was freed while it was exported"));
        }
        // The buffer of the application's memory may begin before the memory. The buffer is then
        // larger than the memory.
        let size = size_of_file(fd.as_fd()).unwrap_or(u64::MAX);
        if !found.owned && size - len >= found.page_size.max(1) {
            return Err(ZE
                .lacks(OPERATION, "no call returns the offset of the memory in its dma-buf")
                .device(id)
                .context("dma-buf", size)
                .context("allocation", found.allocation.range)
                .remedy("allocate it with zeMemAllocDevice"));
        }
        Ok(fd)
    }
}

/// An fd that the driver returned for an export, and that was found to be a dma-buf. A driver that
/// keeps one fd for each allocation owns the fd. If the driver opens a new fd for each export, this
/// process owns the fd.
struct Exported {
    fd: c_int,
    /// Identity of the exported allocation, which the driver assigns.
    allocation: u64,
    /// Size of the dma-buf in bytes.
    size: u64,
}

impl Exported {
    /// Calls the driver to export the allocation at an address.
    ///
    /// # Errors
    /// - Unsupported if the fd is not a dma-buf. Such an fd must not be returned to the driver.
    /// - Otherwise the error of the driver.
    fn ask(driver: &Driver, context: ContextHandle, base: Address) -> Result<Self> {
        let mut export = ExportFd {
            flags: sys::ZE_EXTERNAL_MEMORY_TYPE_FLAG_DMA_BUF,
            fd: -1,
            ..ExportFd::default()
        };
        let mut properties = MemoryAllocationProperties {
            next: (&raw mut export).cast(),
            ..MemoryAllocationProperties::default()
        };
        let mut device = DeviceHandle::NULL;
        let get = driver.functions.mem_get_alloc_properties;
        // SAFETY: the caller keeps the context alive. The structures have their types in `stype`,
        // and the second one ends the chain. `device` is writable, and the address is only looked
        // up.
        let code = unsafe { get(context, pointer(base), &mut properties, &mut device) };
        check(code, "zeMemGetAllocProperties")?;
        let fd = export.fd;
        // SAFETY: the number is not negative. If no file has this number, the calls on it return an
        // error.
        let file = (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) });
        match file.and_then(size_of_file) {
            Some(size) => Ok(Self { fd, allocation: properties.id, size }),
            None => Err(ZE
                .lacks(OPERATION, "the driver reported success, but its fd is no dma-buf")
                .context("fd", fd)),
        }
    }

    /// Returns a duplicate of the fd. The caller owns the duplicate.
    ///
    /// # Errors
    /// Unsupported if the dma-buf is smaller than `len` bytes. Otherwise the error of `fcntl`.
    fn duplicate(&self, len: u64) -> Result<OwnedFd> {
        if self.size < len {
            return Err(ZE
                .lacks(OPERATION, "the dma-buf is smaller than the memory")
                .context("dma-buf", self.size)
                .context("length", len)
                .remedy(
                    "memory that spans tiles has several buffers: allocate it on one sub-device",
                ));
        }
        // SAFETY: the driver opened the fd for this export, and it was not returned yet.
        let file = unsafe { BorrowedFd::borrow_raw(self.fd) };
        rustix::io::fcntl_dupfd_cloexec(file, 3).map_err(|errno| {
            Error::os(errno, "fcntl(F_DUPFD_CLOEXEC)")
                .iface(IfaceKind::ZE)
                .remedy("the process may be out of file descriptors (`ulimit -n`)")
        })
    }

    /// Returns the fd to the driver. The driver counts the exports of an allocation, and closes the
    /// fd when the last one is returned.
    fn return_fd(self, driver: &Driver, context: ContextHandle, base: Address) {
        let (put, from_fd) = (driver.functions.put_ipc_handle, driver.functions.ipc_handle_from_fd);
        let given = put.zip(from_fd).is_some_and(|(put, from_fd)| {
            let mut handle = IpcMemoryHandle::default();
            // SAFETY: the caller keeps the context alive, the fd is from an export, and `handle` is
            // writable. The second call gets the handle that the first one wrote.
            let code = unsafe {
                match from_fd(context, self.fd as u64, &mut handle) {
                    ZeResult::ZE_RESULT_SUCCESS => put(context, handle),
                    code => code,
                }
            };
            code == ZeResult::ZE_RESULT_SUCCESS
        });
        // A new loader has the calls that return an fd to the driver, but an old driver behind it
        // refuses them.
        if !given {
            log_failure!(
                warn,
                self.close_if_own(driver, context, base),
                "cannot return the fd of an export; the driver keeps it until the memory is freed"
            );
        }
    }

    /// Closes the fd if the driver opened it for this export alone.
    ///
    /// A driver before Level Zero 1.6 has no call to return an fd. Some of these drivers open an fd
    /// for each export, which the exporting process must close. Others keep one fd for each
    /// allocation. A second export shows the difference: it returns another fd or the same fd. No
    /// fd is closed if the memory at `base` was replaced by other memory before the second export.
    fn close_if_own(self, driver: &Driver, context: ContextHandle, base: Address) -> Result<()> {
        let again = Self::ask(driver, context, base)?;
        if again.fd != self.fd && again.allocation == self.allocation {
            for made in [self.fd, again.fd] {
                // SAFETY: two exports of one allocation returned two fds, so the driver opened an
                // fd for each export and this process owns both.
                drop(unsafe { OwnedFd::from_raw_fd(made) });
            }
        }
        Ok(())
    }
}

/// Returns the size of a dma-buf, or of a memory file (memfd), which the fake driver of the tests
/// exports instead. Returns `None` for any other file, such as standard input.
fn size_of_file(fd: BorrowedFd<'_>) -> Option<u64> {
    let stat = rustix::fs::fstat(fd).ok()?;
    let file_type = FileType::from_raw_mode(stat.st_mode);
    // A dma-buf has no file type in older kernels, and is a regular file in newer ones.
    let nameless = match file_type {
        FileType::RegularFile => stat.st_nlink == 0 || is_dma_buf(fd),
        FileType::Unknown => is_dma_buf(fd),
        _ => false,
    };
    let end = nameless.then(|| rustix::fs::seek(fd, SeekFrom::End(0)).ok()).flatten();
    end.filter(|size| *size > 0)
}

fn is_dma_buf(fd: BorrowedFd<'_>) -> bool {
    /// `DMA_BUF_MAGIC` of linux/magic.h.
    const DMA_BUF_MAGIC: u64 = 0x444d_4142;
    rustix::fs::fstatfs(fd).is_ok_and(|file_system| file_system.f_type as u64 == DMA_BUF_MAGIC)
}

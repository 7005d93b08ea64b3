//! Exports of device memory to NICs: dma-bufs and peer memory.

#![allow(unsafe_code, reason = "calls the runtime to export memory, and owns the descriptors")]

use std::{
    ffi::{c_int, c_void},
    os::fd::{IntoRawFd, OwnedFd},
    ptr,
    sync::Arc,
};

use hmem_core::{
    AddressRange, AllocOffset, Allocation, AllocationKind, DmaBufOffset, Error, ErrorKind, Result,
    iface::{
        DmaBufExport, DmaBufExporter, DmaBufMapping, Facet, PeerMemoryExport, PeerMemoryExporter,
    },
    provider::Nic,
};

use crate::{
    error::{ROCR, check, coded, lacks_symbol, refused, symbol},
    lookup::Lookup,
    sys::{self, HsaStatus},
    table::RocrOrigin,
};

/// Exports device memory to NICs, as dma-bufs or by address to peer-memory clients.
#[derive(Debug)]
pub(crate) struct Exporter {
    pub(crate) lookup: Arc<Lookup>,
}

impl DmaBufExporter for Exporter {
    fn mappings(&self) -> &'static [DmaBufMapping] {
        let runtime = &self.lookup.runtime;
        match (runtime.dma_buf, runtime.functions.export_dmabuf_v2) {
            (false, _) => &[],
            (true, Some(_)) => &[DmaBufMapping::Default, DmaBufMapping::Pcie],
            (true, None) => &[DmaBufMapping::Default],
        }
    }

    fn serves_every_nic(&self) -> bool {
        true
    }

    fn export(
        &self,
        range: AddressRange,
        _: &Allocation,
        nic: &Nic,
        mapping: DmaBufMapping,
    ) -> Result<DmaBufExport> {
        const OPERATION: &str = Facet::DmaBuf.operation();
        let (allocation, mapping) = (self.exportable(OPERATION, range)?, mapping.of_export());
        let described = |error: Error| {
            let error = error.context("range", range).context("nic", nic);
            allocation.device.into_iter().fold(error, Error::device)
        };
        if !self.lookup.runtime.dma_buf {
            return Err(described(no_dma_buf()));
        }
        let (fd, offset) = match self.lookup.table.own_around(range.start()) {
            Some((own, RocrOrigin::Virtual { handle, .. })) => {
                self.export_handle(handle, mapping).map(|fd| (fd, range.start().0 - own.base().0))
            }
            _ => self.export_range(range, mapping),
        }
        .map_err(described)?;
        Ok(DmaBufExport {
            fd,
            offset: DmaBufOffset(offset),
            alloc_offset: allocation.offset_of(range.start()).unwrap_or(AllocOffset(0)),
            len: range.len(),
            mapping,
            revocation: None,
        })
    }

    /// Closes the fd of an export by `hsa_amd_portable_close_dmabuf`. If the library lacks that
    /// function, drops the fd.
    fn release(&self, export: DmaBufExport) -> Result<()> {
        let Some(close) = self.lookup.runtime.functions.close_dmabuf else { return Ok(()) };
        // SAFETY: `export` owns the fd and passes the ownership to the call, which closes the fd
        // even if it fails.
        check(unsafe { close(export.fd.into_raw_fd()) }, "hsa_amd_portable_close_dmabuf")
    }
}

impl PeerMemoryExporter for Exporter {
    /// Returns the device address, which the kernel's peer-memory client for AMD GPUs resolves. If
    /// that client is not loaded, the export succeeds and the later registration fails.
    fn export(&self, range: AddressRange, _: &Allocation, _: &Nic) -> Result<PeerMemoryExport> {
        self.exportable(Facet::PeerMemory.operation(), range)?;
        Ok(PeerMemoryExport { address: range.start(), len: range.len() })
    }
}

impl Exporter {
    /// Exports a range of memory that the runtime allocated in this process.
    ///
    /// # Errors
    /// - Unsupported for memory that the runtime imported, and if the runtime has no such export.
    /// - Otherwise the runtime's error.
    fn export_range(&self, range: AddressRange, mapping: DmaBufMapping) -> Result<(OwnedFd, u64)> {
        // The runtime's call dereferences a null pointer for memory that it imported, by IPC or
        // from a graphics API.
        if self.lookup.pointer_info(range.start())?.kind != sys::HSA_EXT_POINTER_TYPE_HSA {
            return Err(ROCR
                .lacks(
                    Facet::DmaBuf.operation(),
                    "the runtime exports only memory that it allocated in this process",
                )
                .remedy("register the memory in the process that allocated it"));
        }
        let functions = &self.lookup.runtime.functions;
        let pointer = ptr::without_provenance::<c_void>(range.start().0 as usize);
        let (len, mut fd, mut offset): (_, c_int, _) = (range.len() as usize, -1, 0);
        let (code, call) = match (mapping, functions.export_dmabuf_v2, functions.export_dmabuf) {
            (_, Some(export), _) => {
                let flags = if mapping == DmaBufMapping::Default {
                    sys::HSA_AMD_DMABUF_MAPPING_TYPE_NONE
                } else {
                    sys::HSA_AMD_DMABUF_MAPPING_TYPE_PCIE
                };
                // SAFETY: `fd` and `offset` are writable; the range lies in one live allocation.
                let code = unsafe { export(pointer, len, &mut fd, &mut offset, flags) };
                (code, "hsa_amd_portable_export_dmabuf_v2")
            }
            (DmaBufMapping::Default, None, Some(export)) => {
                // SAFETY: `fd` and `offset` are writable; the range lies in one live allocation.
                let code = unsafe { export(pointer, len, &mut fd, &mut offset) };
                (code, "hsa_amd_portable_export_dmabuf")
            }
            (_, None, Some(_)) => {
                return Err(ROCR
                    .no_pcie_mapping("hsa_amd_portable_export_dmabuf")
                    .context("symbol", "hsa_amd_portable_export_dmabuf_v2"));
            }
            (_, None, None) => return Err(no_export_call()),
        };
        if code == HsaStatus::HSA_STATUS_ERROR_NOT_SUPPORTED && mapping == DmaBufMapping::Pcie {
            return Err(coded(ROCR.no_pcie_mapping(call), code));
        }
        refused(code, call)?;
        // SAFETY: the runtime opened the fd for this call, and nothing else owns it.
        unsafe { ROCR.take_fd(fd, call) }.map(|fd| (fd, offset))
    }

    /// Exports the whole physical memory of a VMM handle as a dma-buf.
    fn export_handle(&self, handle: sys::VmemHandle, mapping: DmaBufMapping) -> Result<OwnedFd> {
        const CALL: &str = "hsa_amd_vmem_export_shareable_handle";
        if mapping == DmaBufMapping::Pcie {
            return Err(ROCR.no_pcie_mapping(CALL));
        }
        let export = symbol(self.lookup.runtime.functions.vmem_export, CALL)?;
        let mut fd: c_int = -1;
        // SAFETY: `fd` is writable, and the handle is that of a live allocation of this iface.
        refused(unsafe { export(&mut fd, handle, 0) }, CALL)?;
        // SAFETY: the runtime opened the fd for this call, and nothing else owns it.
        unsafe { ROCR.take_fd(fd, CALL) }
    }

    /// Returns the allocation that contains a range.
    ///
    /// # Errors
    /// - ZeroLength for an empty range.
    /// - OutOfBounds for a range that is not in one allocation.
    /// - Unsupported for host memory, which cannot be exported as device memory.
    /// - Otherwise the error of the lookup.
    fn exportable(&self, operation: &'static str, range: AddressRange) -> Result<Allocation> {
        let refuse = |error: Error| Err(error.context("range", range));
        let outside = |why: &'static str| ROCR.outside(operation).context("why", why);
        if range.is_empty() {
            return refuse(ROCR.error(ErrorKind::ZeroLength, operation));
        }
        let Some(allocation) = self.lookup.find(range.start())? else {
            return refuse(outside(
                "the runtime does not know the address: it was freed, or does not belong to ROCr",
            ));
        };
        if !allocation.range.contains_range(range) {
            let error = outside("the range ends after its allocation");
            return refuse(error.context("allocation", allocation.range));
        }
        match allocation.kind {
            AllocationKind::Host | AllocationKind::HostRegistered => refuse(
                ROCR.lacks(operation, "page-locked host memory is not device memory")
                    .remedy("register its host pages"),
            ),
            _ => Ok(allocation),
        }
    }
}

/// Returns the error for a runtime without an export function. Its errno (ENOSYS) distinguishes
/// this error from that of [`no_dma_buf`], which has another cause.
pub(crate) fn no_export_call() -> Error {
    let error = lacks_symbol(Facet::DmaBuf.operation(), "hsa_amd_portable_export_dmabuf");
    error.errno(rustix::io::Errno::NOSYS).remedy(
        "the runtime must be of ROCm 5.6 or newer to export dma-bufs; else stage the copies",
    )
}

/// Returns the error for a kernel driver that cannot export dma-bufs.
fn no_dma_buf() -> Error {
    ROCR.lacks(Facet::DmaBuf.operation(), "the driver exports no dma-bufs")
        .context("attribute", "HSA_AMD_SYSTEM_INFO_DMABUF_SUPPORTED")
        .remedy(
            "dma-bufs need amdgpu of Linux 6.2 or newer, or of ROCm 5.6 or newer; else load its \
             peer-memory client",
        )
}

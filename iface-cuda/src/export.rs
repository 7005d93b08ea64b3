//! Exports of device memory to NICs: dma-bufs and peer memory.

#![allow(unsafe_code, reason = "calls the driver to export memory, and owns the descriptors")]

use std::{ffi::c_int, sync::Arc};

use hmem_core::{
    AddressRange, AllocOffset, Allocation, AllocationKind, DmaBufOffset, Error, ErrorKind, Result,
    iface::{
        DmaBufExport, DmaBufExporter, DmaBufMapping, Facet, PeerMemoryExport, PeerMemoryExporter,
        SegmentMap,
    },
    monitor::FreeSubscriptions,
    provider::Nic,
};
use hmem_iface_kit::log_failure;
use parking_lot::Mutex;

use crate::{
    context::with_context,
    error::{CUDA, check, coded, lacks_symbol, refused},
    flush::InboundFlusher,
    lookup::{FoundAllocation, PointerLookup},
    segments::Segments,
    streams::synchronize,
    sys::{self, CuResult, CuStream},
};

/// Held while an export sets SYNC_MEMOPS on contexts and waits. An export of another thread that
/// finds the flag set then knows that the wait succeeded. All ifaces of a process share its
/// contexts.
static CONTEXT_FLAGS: Mutex<()> = Mutex::new(());

/// Path of the file in which the loaded NVIDIA kernel module states its version.
const KERNEL_MODULE: &str = "/proc/driver/nvidia/version";

/// Exports device memory to NICs, as dma-bufs or by address to peer-memory clients.
#[derive(Debug)]
pub(crate) struct Exporter {
    pub(crate) segments: Segments,
    /// Records the contexts of exported memory, for later flushes of the NICs' writes.
    pub(crate) flusher: Arc<InboundFlusher>,
    /// Subscribers to notify of each export of VMM memory to a peer-memory client. The notification
    /// prevents the cache from keeping the registration. A kept registration would be unsafe,
    /// because a cache hit only compares mappings, and equal mappings do not show that the driver
    /// still pins the memory. `None` if hooks, and not mappings, detect changes of cached memory.
    pub(crate) by_mappings: Option<Arc<FreeSubscriptions>>,
}

impl DmaBufExporter for Exporter {
    /// Returns the default mapping and the PCIe mapping if at least one device exports dma-bufs.
    /// The list contains the PCIe mapping even if no device supports it, because no attribute
    /// states which devices do. A device without support for a mapping refuses the export.
    fn mappings(&self) -> &'static [DmaBufMapping] {
        if self.lookup().driver().devices.iter().any(|entry| entry.abilities.dma_buf) {
            &[DmaBufMapping::Default, DmaBufMapping::Pcie]
        } else {
            &[]
        }
    }

    fn serves_every_nic(&self) -> bool {
        true
    }

    fn export(
        &self,
        range: AddressRange,
        of: &Allocation,
        nic: &Nic,
        mapping: DmaBufMapping,
    ) -> Result<DmaBufExport> {
        const OPERATION: &str = Facet::DmaBuf.operation();
        let described = |error: Error| error.context("range", range).context("nic", nic);
        let found = self.exportable(OPERATION, range, of)?;
        let device = found.device();
        let get = self
            .lookup()
            .driver()
            .functions
            .mem_get_handle_for_address_range
            .ok_or_else(|| described(no_export_call()))?;
        if !self.lookup().driver().device(OPERATION, device)?.abilities.dma_buf {
            return Err(described(no_dma_buf().device(device)));
        }
        let mapping = mapping.of_export();
        // `cuda.h`: "Users must ensure the dptr and size are aligned to the host page size."
        let whole = range.page_aligned(rustix::param::page_size() as u64);
        let flags = if mapping == DmaBufMapping::Default {
            0
        } else {
            sys::CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE
        };
        let work_context = self.lookup().contexts.work_context(found.context, device)?;
        let (fd, of_contexts) = work_context.run(|| {
            let mut fd: c_int = -1;
            // SAFETY: for this type of handle the driver writes one int. The range is only looked
            // up.
            let code = unsafe {
                get(
                    (&raw mut fd).cast(),
                    whole.start().0,
                    whole.len() as usize,
                    sys::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
                    flags,
                )
            };
            if !code.is_success() {
                return Err(described(dma_buf_refused(code, mapping).device(device)));
            }
            // SAFETY: the driver opened the fd for this call, and nothing else owns it.
            let fd = unsafe { CUDA.take_fd(fd, "cuMemGetHandleForAddressRange") };
            let fd = fd.map_err(described)?;
            // SYNC_MEMOPS is set after the driver has exported the memory, so that a refused export
            // changes nothing.
            let of_contexts = self.synchronise_memory(&found, range).map_err(described)?;
            Ok((fd, of_contexts))
        })?;
        if of_contexts {
            self.synchronise_contexts(&found, range).map_err(described)?;
        }
        self.flusher.note_exported(&found, range)?;
        Ok(DmaBufExport {
            fd,
            offset: DmaBufOffset(range.start().0 - whole.start().0),
            alloc_offset: found.allocation.offset_of(range.start()).unwrap_or(AllocOffset(0)),
            len: range.len(),
            mapping,
            revocation: None,
        })
    }
}

impl PeerMemoryExporter for Exporter {
    fn export(&self, range: AddressRange, of: &Allocation, nic: &Nic) -> Result<PeerMemoryExport> {
        const OPERATION: &str = Facet::PeerMemory.operation();
        let found = self.exportable(OPERATION, range, of)?;
        let device = found.device();
        let described = |error: Error| error.device(device).context("nic", nic);
        if !self.lookup().driver().device(OPERATION, device)?.abilities.peer_memory {
            return Err(described(no_peer_memory().context("range", range)));
        }
        self.prepare_pinning(OPERATION, range, &found).map_err(described)?;
        self.flusher.note_exported(&found, range)?;
        // A peer-memory client pins memory by its address, and the driver ends the pinning when the
        // address is unmapped. If the application then maps the same handle again, the mappings
        // look unchanged, but the registration does not work again. So it must not be cached.
        if let Some(subscriptions) = &self.by_mappings
            && found.allocation.kind == AllocationKind::Virtual
        {
            subscriptions.while_freeing(range, || ());
        }
        // The iface cannot know whether a peer-memory client handles the address. If none does, the
        // later registration fails.
        Ok(PeerMemoryExport { address: range.start(), len: range.len() })
    }
}

impl Exporter {
    fn lookup(&self) -> &PointerLookup {
        &self.segments.lookup
    }

    /// Prepares a range for a kernel client other than a NIC's driver, such as GDRCopy. Queries the
    /// driver for the allocation that contains the range.
    pub(crate) fn prepare(&self, operation: &'static str, range: AddressRange) -> Result<()> {
        let described = |error: Error| error.context("range", range);
        let found = self.lookup().find(range.start()).map_err(described)?;
        let found = found.ok_or_else(|| described(CUDA.outside(operation)))?;
        self.exportable(operation, range, &found.allocation)?;
        self.prepare_pinning(operation, range, &found)
    }

    /// Prepares a range for a peer-memory client, which pins memory by its address. Checks that
    /// GPUDirect RDMA can reach every part of the range, and sets SYNC_MEMOPS. Errors name the
    /// range.
    fn prepare_pinning(
        &self,
        operation: &'static str,
        range: AddressRange,
        found: &FoundAllocation,
    ) -> Result<()> {
        let described = |error: Error| error.context("range", range);
        let of = &found.allocation;
        for segment in self.segments.segments(range, of).map_err(described)? {
            // The segments of VMM memory state the ability already.
            let capable = segment.exportable
                && (of.kind == AllocationKind::Virtual
                    || self.segments.is_rdma_capable(range.start()).map_err(described)?);
            if !capable {
                return Err(described(
                    CUDA.lacks(operation, "GPUDirect RDMA does not reach this memory")
                        .context("segment", segment.range)
                        .context("attribute", "IS_GPU_DIRECT_RDMA_CAPABLE")
                        .remedy(
                            "create it with gpuDirectRDMACapable set in CUmemAllocationProp, or \
                             use cuMemAlloc",
                        ),
                ));
            }
        }
        let work_context = self
            .lookup()
            .contexts
            .work_context(found.context, found.device())
            .map_err(described)?;
        let prepared = work_context.run(|| self.synchronise_memory(found, range));
        if prepared.map_err(described)? {
            self.synchronise_contexts(found, range).map_err(described)?;
        }
        Ok(())
    }

    /// Returns the allocation `of` with its context, if a range of `of` can be exported.
    ///
    /// # Errors
    /// - ZeroLength for an empty range.
    /// - OutOfBounds for a range that is not in the allocation, and for an allocation whose context
    ///   may have been destroyed.
    /// - Unsupported for managed and host memory, which cannot be exported as device memory.
    /// - Otherwise the error of the lookup.
    fn exportable(
        &self,
        operation: &'static str,
        range: AddressRange,
        of: &Allocation,
    ) -> Result<FoundAllocation> {
        let refuse = |error: Error| error.context("range", range);
        let outside = || refuse(CUDA.outside(operation));
        if range.is_empty() {
            return Err(refuse(CUDA.error(ErrorKind::ZeroLength, operation)));
        }
        if !of.range.contains_range(range) {
            return Err(outside().context("allocation", of.range));
        }
        match of.kind {
            AllocationKind::Managed => Err(refuse(
                CUDA.lacks(operation, "managed memory migrates between host and device")
                    .remedy("register its host pages, stage it, or use cuMemAlloc"),
            )),
            AllocationKind::Host | AllocationKind::HostRegistered => Err(refuse(
                CUDA.lacks(operation, "page-locked host memory is not device memory")
                    .remedy("register its host pages"),
            )),
            _ => self.lookup().if_live(of, range.start()).map_err(refuse)?.ok_or_else(|| {
                outside().context("why", "the memory was freed, or its context was destroyed")
            }),
        }
    }

    /// Sets SYNC_MEMOPS on an allocation. Without this attribute, a synchronous operation on the
    /// memory may return before its end, and a NIC would read old bytes. The caller must make the
    /// memory's context current.
    ///
    /// Returns true if the memory cannot have the attribute. The caller must then set SYNC_MEMOPS
    /// on contexts. The driver reports such memory by one of these codes:
    ///
    /// - NOT_SUPPORTED, for VMM memory, and for memory of `cuMemAlloc` that a layer above the
    ///   driver makes from VMM memory;
    /// - INVALID_VALUE, for VMM, stream-ordered and imported memory. For other memory, this code
    ///   means that the memory was freed, and is an error.
    fn synchronise_memory(&self, found: &FoundAllocation, range: AddressRange) -> Result<bool> {
        let on: std::ffi::c_uint = 1;
        // SAFETY: the value is an unsigned int, which is the type of this attribute.
        let code = unsafe {
            (self.lookup().driver().functions.pointer_set_attribute)(
                (&raw const on).cast(),
                sys::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
                range.start().0,
            )
        };
        let has_none = match code {
            CuResult::CUDA_ERROR_NOT_SUPPORTED => true,
            CuResult::CUDA_ERROR_INVALID_VALUE => matches!(
                found.allocation.kind,
                AllocationKind::Virtual | AllocationKind::StreamOrdered | AllocationKind::Imported
            ),
            _ => false,
        };
        if has_none {
            return Ok(true);
        }
        check(code, "cuPointerSetAttribute")
            .map(|()| false)
            .map_err(|error| error.context("attribute", "SYNC_MEMOPS"))
    }

    /// Sets SYNC_MEMOPS on contexts, for memory that cannot have the attribute. Since CUDA 12.1,
    /// SYNC_MEMOPS is also a flag of contexts, for operations "initiated on this context"
    /// (`cuda.h`).
    ///
    /// The flag is set on the memory's own context. For memory without a context, it is set on the
    /// calling thread's context and on the device's primary context, if they exist. No context is
    /// created, since no work would run there.
    fn synchronise_contexts(&self, found: &FoundAllocation, range: AddressRange) -> Result<()> {
        let functions = &self.lookup().driver().functions;
        let (Some(get), Some(set)) = (functions.ctx_get_flags, functions.ctx_set_flags) else {
            tracing::warn!(%range, "this driver has no SYNC_MEMOPS for such memory: wait for its \
                                    copies before a transfer");
            return Ok(());
        };
        let synchronise = || {
            let mut flags = 0;
            // SAFETY: `flags` is writable.
            check(unsafe { get(&mut flags) }, "cuCtxGetFlags")?;
            if flags & sys::CU_CTX_SYNC_MEMOPS != 0 {
                return Ok(());
            }
            // SAFETY: the value consists of the context's own flags and one flag of the header.
            check(unsafe { set(flags | sys::CU_CTX_SYNC_MEMOPS) }, "cuCtxSetFlags")?;
            // Setting the attribute of an allocation waits for work in flight (`cuda.h`). No
            // document says this for the flag of a context, so the iface waits here.
            synchronize(functions, CuStream::NULL).inspect_err(|_| {
                // The flag is cleared, so that the next export waits again.
                // SAFETY: the value consists of the context's own flags.
                let cleared = check(unsafe { set(flags) }, "cuCtxSetFlags");
                log_failure!(error, cleared, "cannot clear SYNC_MEMOPS of a context");
            })
        };
        let _settings = CONTEXT_FLAGS.lock();
        if !found.context.is_null() {
            return with_context(functions, found.context, synchronise);
        }
        let of_thread = self.lookup().contexts.current_of(found.device())?;
        if let Some(context) = of_thread {
            with_context(functions, context, synchronise)?;
        }
        let Some(primary) = self.lookup().contexts.retain_if_active(found.device())? else {
            if of_thread.is_none() {
                tracing::warn!(
                    %range,
                    "the thread has no context that could have SYNC_MEMOPS: wait for the memory's \
                     copies before a transfer"
                );
            }
            return Ok(());
        };
        primary.run_and_keep(synchronise)
    }
}

/// Returns the error for a driver without the export function.
pub(crate) fn no_export_call() -> Error {
    lacks_symbol(Facet::DmaBuf.operation(), "cuMemGetHandleForAddressRange")
}

/// Returns the error for a device whose memory peer-memory clients cannot pin.
pub(crate) fn no_peer_memory() -> Error {
    CUDA.lacks(
        Facet::PeerMemory.operation(),
        "the device's memory cannot be pinned for other devices",
    )
    .context("attribute", "GPU_DIRECT_RDMA_SUPPORTED")
    .remedy("GPUDirect RDMA needs a data centre or workstation GPU: stage the copies")
}

/// Returns the error for a device without dma-bufs, with the version of the kernel module if known.
fn no_dma_buf() -> Error {
    let error = CUDA
        .lacks(Facet::DmaBuf.operation(), "the device exports no dma-bufs")
        .context("attribute", "DMA_BUF_SUPPORTED")
        .remedy(
            "dma-bufs need NVIDIA's open kernel modules and Linux 5.12 or newer; else load \
             nvidia_peermem",
        );
    match std::fs::read_to_string(KERNEL_MODULE) {
        Ok(version) => {
            error.context("kernel module", version.lines().next().unwrap_or_default().trim())
        }
        Err(_) => error,
    }
}

/// Returns the error for a refused export.
///
/// For the PCIe mapping, INVALID_VALUE means that the driver does not know the mapping, and
/// NOT_SUPPORTED that the driver or the device lacks it. The driver returns the same codes for
/// memory that it cannot export by any mapping.
fn dma_buf_refused(code: CuResult, mapping: DmaBufMapping) -> Error {
    const CALL: &str = "cuMemGetHandleForAddressRange";
    let lacking =
        matches!(code, CuResult::CUDA_ERROR_NOT_SUPPORTED | CuResult::CUDA_ERROR_INVALID_VALUE);
    if mapping == DmaBufMapping::Pcie && lacking {
        return coded(CUDA.no_pcie_mapping(CALL), code);
    }
    let error = refused(code, CALL);
    match code {
        CuResult::CUDA_ERROR_NOT_SUPPORTED => error.remedy(
            "the driver exports no dma-buf of this memory: allocate it with cuMemAlloc, or with \
             cuMemCreate and gpuDirectRDMACapable",
        ),
        CuResult::CUDA_ERROR_INVALID_VALUE => {
            error.remedy("map the whole range, by memory of one device with the same properties")
        }
        CuResult::CUDA_ERROR_OUT_OF_MEMORY => error.remedy(
            "the device's BAR1 window may be full (`nvidia-smi -q -d MEMORY`): register less, or \
             close registrations",
        ),
        CuResult::CUDA_ERROR_OPERATING_SYSTEM => {
            error.remedy("the process may be out of file descriptors (`ulimit -n`)")
        }
        _ => error,
    }
}

//! Allocation and free of device, host and shared memory.

#![allow(unsafe_code, reason = "calls the driver to allocate and free")]

use std::{ffi::c_void, ptr, sync::Arc};

use hmem_core::{
    Address, Allocation, AllocationKind, Result,
    iface::{AllocRequest, Allocator},
};
use hmem_iface_kit::log_failure;

use crate::{
    driver::DeviceEntry,
    error::{ZE, check},
    lookup::Lookup,
    sys::{self, ContextHandle, DeviceMemoryDescription, ExportDescription, HostMemoryDescription},
};

/// Allocates and frees memory by calls of the driver.
#[derive(Debug)]
pub(crate) struct DeviceAllocator {
    pub(crate) lookup: Arc<Lookup>,
}

impl Allocator for DeviceAllocator {
    fn allocate(&self, request: &AllocRequest) -> Result<Allocation> {
        let entry = self.lookup.driver.device("allocate", request.device)?;
        let unsupported = match request.kind {
            AllocationKind::Device | AllocationKind::Host | AllocationKind::Managed => None,
            _ => Some("Level Zero has no such kind of memory"),
        };
        ZE.allocate(request, unsupported, || {
            let base = self.call(entry, request)?;
            let entered = self.lookup.enter(entry.driver, base, &mut None);
            if entered.is_err() {
                let freed = self.lookup.free(entry.driver, Address::of_ptr(base));
                log_failure!(error, freed, "cannot free the memory of a failed allocation");
            }
            entered
        })
    }

    unsafe fn free(&self, allocation: &Allocation) -> Result<()> {
        self.lookup.driver.check_process("free")?;
        let owned = self.lookup.owned.take("free", allocation, false)?;
        self.lookup.free(owned.driver, allocation.base()).map_err(|error| {
            self.lookup.owned.insert(allocation, false, owned);
            error.context("allocation", allocation.range)
        })
    }
}

impl DeviceAllocator {
    /// Allocates memory. Device memory can be exported as a dma-buf, unless the device or the
    /// driver does not support that.
    fn call(&self, entry: &DeviceEntry, request: &AllocRequest) -> Result<*mut c_void> {
        let export = ExportDescription {
            flags: sys::ZE_EXTERNAL_MEMORY_TYPE_FLAG_DMA_BUF,
            ..ExportDescription::default()
        };
        let exportable = (&raw const export).cast();
        self.lookup.driver.with_context(entry.driver, |context| {
            let allocate = |next| self.call_with(context, entry, request, next);
            if !entry.exports_dma_bufs() || request.kind != AllocationKind::Device {
                return allocate(ptr::null());
            }
            match allocate(exportable) {
                Err(error) if error.is_unsupported() => {
                    tracing::debug!(%error, "the memory cannot be exported");
                    allocate(ptr::null())
                }
                allocated => allocated,
            }
        })
    }

    /// Allocates memory. `next` points to an [`ExportDescription`] that extends the request, or is
    /// null.
    fn call_with(
        &self,
        context: ContextHandle,
        entry: &DeviceEntry,
        request: &AllocRequest,
        next: *const c_void,
    ) -> Result<*mut c_void> {
        let functions = &self.lookup.driver.functions;
        let (size, handle) = (request.len as usize, entry.handle);
        let on_device = DeviceMemoryDescription { next, ..DeviceMemoryDescription::default() };
        let on_host = HostMemoryDescription { next, ..HostMemoryDescription::default() };
        let mut base = ptr::null_mut();
        // SAFETY: the caller keeps the context alive, and it belongs to the device's driver. Each
        // description has its type in `stype`, and its chain ends with `next`. `base` is writable.
        // With an alignment of 0 the driver chooses one.
        let (code, call) = unsafe {
            match request.kind {
                AllocationKind::Host => (
                    (functions.mem_alloc_host)(context, &on_host, size, 0, &mut base),
                    "zeMemAllocHost",
                ),
                AllocationKind::Managed => {
                    let allocate = functions.mem_alloc_shared;
                    let code = allocate(context, &on_device, &on_host, size, 0, handle, &mut base);
                    (code, "zeMemAllocShared")
                }
                _ => (
                    (functions.mem_alloc_device)(context, &on_device, size, 0, handle, &mut base),
                    "zeMemAllocDevice",
                ),
            }
        };
        check(code, call).map(|()| base)
    }
}

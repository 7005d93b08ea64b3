//! Allocation and free of memory, and page-locking of the application's memory.

#![allow(unsafe_code, reason = "calls the driver to allocate, free and page-lock")]

use std::{ffi::c_void, ptr, sync::Arc};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationKind, DeviceId, ErrorKind, Result,
    iface::{AllocRequest, Allocator, HostRegistrar},
    monitor::FreeSubscriptions,
};
use hmem_iface_kit::{log_failure, table::VmmObjects};

use crate::{
    context::{WorkContext, with_context},
    error::{CUDA, check, lacks_symbol},
    handles::granularity,
    lookup::PointerLookup,
    streams::synchronize,
    sys::{self, CuDevicePtr, CuMemHandle, CuResult},
    table::{CudaOrigin, OwnedAllocation, PageLockedRange},
};

/// Allocates and frees memory, and page-locks the application's own memory.
#[derive(Debug)]
pub(crate) struct DeviceAllocator {
    pub(crate) lookup: Arc<PointerLookup>,
    pub(crate) subscriptions: Arc<FreeSubscriptions>,
}

impl Allocator for DeviceAllocator {
    fn allocate(&self, request: &AllocRequest) -> Result<Allocation> {
        let abilities = self.lookup.driver().device("allocate", request.device)?.abilities;
        let unsupported = match request.kind {
            AllocationKind::Device | AllocationKind::Host => None,
            AllocationKind::Managed if abilities.managed => None,
            AllocationKind::StreamOrdered if abilities.pools => None,
            AllocationKind::Virtual if abilities.vmm => None,
            AllocationKind::Managed | AllocationKind::StreamOrdered | AllocationKind::Virtual => {
                Some("the device does not have this kind of memory")
            }
            _ => Some("the system iface allocates this kind"),
        };
        CUDA.allocate(request, unsupported, || self.allocate_supported(request))
    }

    /// Frees memory. First notifies the monitor's subscribers, so that they invalidate cached
    /// registrations of the memory.
    unsafe fn free(&self, allocation: &Allocation) -> Result<()> {
        self.lookup.contexts.check_process("free")?;
        let mut owned = self.lookup.contexts.allocations.owned.take("free", allocation, false)?;
        let mut freed = false;
        let result = self.lookup.contexts.retain_until_close(owned.device).and_then(|context| {
            let free = || {
                let (base, device) = (allocation.base().0, owned.device);
                self.release(base, device, &mut owned.origin).inspect(|()| freed = true)
            };
            self.subscriptions.while_freeing(allocation.range, || {
                with_context(&self.lookup.driver().functions, context, free)
            })
        });
        if !freed {
            self.lookup.contexts.allocations.owned.insert(allocation, false, owned);
        }
        result.map_err(|error| error.context("allocation", allocation.range))
    }

    fn is_device_active(&self, device: DeviceId) -> Result<bool> {
        self.lookup.contexts.is_active(device)
    }
}

impl DeviceAllocator {
    /// Allocates memory and records it in the allocation table. On an error frees the memory again.
    /// If the driver refuses that free, logs the refusal.
    fn allocate_supported(&self, request: &AllocRequest) -> Result<Allocation> {
        let device = request.device;
        let len = usize::try_from(request.len).map_err(|_| {
            CUDA.error(ErrorKind::OutOfResources, "allocate")
                .remedy("ask for less: the length exceeds the address space")
        })?;
        let primary = self.lookup.contexts.retain(device)?;
        let (base, mut origin) = primary.with_context_or_undo(
            || match request.kind {
                AllocationKind::Host => Ok((self.host_alloc(len)?, CudaOrigin::Host)),
                AllocationKind::Managed => Ok((self.managed_alloc(len)?, CudaOrigin::Memory)),
                AllocationKind::StreamOrdered => {
                    Ok((self.pool_alloc(device, len)?, CudaOrigin::Pool))
                }
                AllocationKind::Virtual => self.virtual_alloc(device, len),
                _ => Ok((self.device_alloc(len)?, CudaOrigin::Memory)),
            },
            |(base, mut origin)| self.release(base, device, &mut origin),
        )?;
        let entered = self.enter(base, request, &origin);
        if entered.is_ok() {
            primary.keep();
        } else if let Err(error) = primary.with_context(|| self.release(base, device, &mut origin))
        {
            primary.keep();
            tracing::error!(error = %error.full(), "cannot free the memory of a failed allocation");
        }
        entered
    }

    fn enter(&self, base: u64, request: &AllocRequest, origin: &CudaOrigin) -> Result<Allocation> {
        let found = self.lookup.find(Address(base))?.ok_or_else(|| {
            CUDA.error(ErrorKind::Driver, "allocate")
                .context("address", Address(base))
                .context("why", "the driver does not recognise memory that it has allocated")
        })?;
        // The allocation gets the requested length, although the driver may have rounded it up.
        let range = AddressRange::new(Address(base), request.len)?;
        let allocation = Allocation { range, ..found.allocation };
        let owned = OwnedAllocation { device: request.device, origin: origin.clone() };
        self.lookup.contexts.allocations.owned.insert(&allocation, false, owned);
        Ok(allocation)
    }

    fn device_alloc(&self, len: usize) -> Result<u64> {
        let mut base: CuDevicePtr = 0;
        let allocate = self.lookup.driver().functions.mem_alloc;
        // SAFETY: `base` is writable.
        check(unsafe { allocate(&mut base, len) }, "cuMemAlloc_v2").map(|()| base)
    }

    fn managed_alloc(&self, len: usize) -> Result<u64> {
        let mut base: CuDevicePtr = 0;
        let allocate = self.lookup.driver().functions.mem_alloc_managed;
        // SAFETY: `base` is writable.
        let code = unsafe { allocate(&mut base, len, sys::CU_MEM_ATTACH_GLOBAL) };
        check(code, "cuMemAllocManaged").map(|()| base)
    }

    fn host_alloc(&self, len: usize) -> Result<u64> {
        let mut base: *mut c_void = ptr::null_mut();
        let allocate = self.lookup.driver().functions.mem_host_alloc;
        // SAFETY: `base` is writable.
        let code = unsafe { allocate(&mut base, len, sys::CU_MEMHOSTALLOC_PORTABLE) };
        check(code, "cuMemHostAlloc")?;
        Ok(base.expose_provenance() as u64)
    }

    /// Allocates stream-ordered memory from the device's default pool, and waits until the memory
    /// is usable. Fails before the allocation if the driver cannot free stream-ordered memory.
    fn pool_alloc(&self, device: DeviceId, len: usize) -> Result<u64> {
        let functions = &self.lookup.driver().functions;
        functions.mem_free_async.ok_or_else(|| lacks_symbol("allocate", "cuMemFreeAsync"))?;
        let allocate =
            functions.mem_alloc_async.ok_or_else(|| lacks_symbol("allocate", "cuMemAllocAsync"))?;
        self.lookup.contexts.with_own_stream(device, |stream| {
            let mut base: CuDevicePtr = 0;
            // SAFETY: `base` is writable, and this iface created the stream.
            check(unsafe { allocate(&mut base, len, stream) }, "cuMemAllocAsync")?;
            if let Err(error) = synchronize(functions, stream) {
                // SAFETY: the call above allocated the memory, and no caller has seen it.
                check(unsafe { (functions.mem_free)(base) }, "cuMemFree_v2")?;
                return Err(error);
            }
            Ok(base)
        })
    }

    /// Allocates VMM memory: maps one handle into a new reservation, and lets the device access the
    /// mapping. Sets the GPUDirect RDMA flag of the memory if the device supports the flag.
    fn virtual_alloc(&self, device: DeviceId, len: usize) -> Result<(u64, CudaOrigin)> {
        let entry = self.lookup.driver().device("allocate", device)?;
        let f = &self.lookup.driver().functions;
        let reserve = vmm(f.mem_address_reserve, "cuMemAddressReserve")?;
        let create = vmm(f.mem_create, "cuMemCreate")?;
        let map = vmm(f.mem_map, "cuMemMap")?;
        let set_access = vmm(f.mem_set_access, "cuMemSetAccess")?;
        // `release` calls these functions, so a driver without them is refused before the
        // allocation.
        vmm(f.mem_unmap, "cuMemUnmap")?;
        vmm(f.mem_address_free, "cuMemAddressFree")?;
        vmm(f.mem_release, "cuMemRelease")?;
        let location =
            sys::CuMemLocation { kind: sys::CU_MEM_LOCATION_TYPE_DEVICE, id: entry.handle };
        let properties = sys::CuMemAllocationProp {
            kind: sys::CU_MEM_ALLOCATION_TYPE_PINNED,
            location,
            gpu_direct_rdma_capable: entry.abilities.rdma_with_vmm.into(),
            ..sys::CuMemAllocationProp::default()
        };
        let step = granularity(f, &properties)?;
        let size = len.checked_next_multiple_of(step).ok_or_else(|| {
            CUDA.error(ErrorKind::OutOfResources, "cuMemGetAllocationGranularity")
                .context("granularity", step)
                .remedy("ask for less: the rounded length exceeds the address space")
        })?;
        let (mut handle, mut base, mut left): (CuMemHandle, CuDevicePtr, _) =
            (0, 0, VmmObjects::Handle);
        // SAFETY: `handle` is writable and `properties` is complete.
        check(unsafe { create(&mut handle, size, &properties, 0) }, "cuMemCreate")?;
        let mut map_at_new_addresses = || {
            // SAFETY: `base` is writable.
            check(unsafe { reserve(&mut base, size, 0, 0, 0) }, "cuMemAddressReserve")?;
            left = VmmObjects::Reservation;
            // SAFETY: the calls above made the reservation and the handle, both of this size.
            check(unsafe { map(base, size, 0, handle, 0) }, "cuMemMap")?;
            left = VmmObjects::Mapping;
            let flags = sys::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            let access = sys::CuMemAccessDesc { location, flags };
            // SAFETY: the call above mapped the whole range; `access` is one description.
            check(unsafe { set_access(base, size, &access, 1) }, "cuMemSetAccess")
        };
        let mapped = map_at_new_addresses();
        let mut origin = CudaOrigin::Virtual { size, handle, left };
        if mapped.is_err() {
            self.release(base, device, &mut origin)?;
        }
        mapped.map(|()| (base, origin))
    }

    /// Frees memory by the driver call that its origin requires. The caller must make the device's
    /// primary context current.
    ///
    /// VMM memory is released in several steps. If the driver refuses a step, `origin` records the
    /// objects that remain, and a repeated call releases these.
    fn release(&self, base: u64, device: DeviceId, origin: &mut CudaOrigin) -> Result<()> {
        let functions = &self.lookup.driver().functions;
        match origin {
            // SAFETY: this driver allocated the memory. The caller removed it from the table, or
            // has not entered it, so that it is freed once.
            CudaOrigin::Memory => check(unsafe { (functions.mem_free)(base) }, "cuMemFree_v2"),
            CudaOrigin::Host => {
                let pointer = std::ptr::with_exposed_provenance_mut(base as usize);
                // SAFETY: this driver allocated the memory. The caller removed it from the table,
                // or has not entered it, so that it is freed once.
                check(unsafe { (functions.mem_free_host)(pointer) }, "cuMemFreeHost")
            }
            CudaOrigin::Pool => self.pool_free(base, device),
            CudaOrigin::Virtual { size, handle, left } => {
                let unmap = vmm(functions.mem_unmap, "cuMemUnmap")?;
                let unreserve = vmm(functions.mem_address_free, "cuMemAddressFree")?;
                let release = vmm(functions.mem_release, "cuMemRelease")?;
                if *left == VmmObjects::Mapping {
                    // SAFETY: `virtual_alloc` mapped `size` bytes at `base`.
                    check(unsafe { unmap(base, *size) }, "cuMemUnmap")?;
                    *left = VmmObjects::Reservation;
                }
                if *left == VmmObjects::Reservation {
                    // SAFETY: `virtual_alloc` reserved the range, and nothing is mapped in it any
                    // longer.
                    check(unsafe { unreserve(base, *size) }, "cuMemAddressFree")?;
                    *left = VmmObjects::Handle;
                }
                // SAFETY: `virtual_alloc` created the handle, and it is released once.
                check(unsafe { release(*handle) }, "cuMemRelease")
            }
            CudaOrigin::Imported { .. } => Err(CUDA
                .error(ErrorKind::BadState, "free")
                .remedy("close memory of another process with ipc_close")),
        }
    }

    fn pool_free(&self, base: u64, device: DeviceId) -> Result<()> {
        let functions = &self.lookup.driver().functions;
        let free =
            functions.mem_free_async.ok_or_else(|| lacks_symbol("free", "cuMemFreeAsync"))?;
        self.lookup.contexts.with_own_stream(device, |stream| {
            // SAFETY: this driver allocated the memory. The caller removed it from the table, or
            // has not entered it, so that it is freed once. The caller of `free` promises that
            // nothing uses it any longer.
            check(unsafe { free(base, stream) }, "cuMemFreeAsync")?;
            // The driver has accepted the free. If the wait fails, the device has an error, and the
            // free has none.
            let waited = synchronize(functions, stream);
            log_failure!(warn, waited, "cannot wait for a free that the driver accepted");
            Ok(())
        })
    }
}

/// Returns `function`, a function for VMM memory. If the driver lacks the function, as older
/// drivers do, returns an error that names it.
fn vmm<F>(function: Option<F>, symbol: &'static str) -> Result<F> {
    function.ok_or_else(|| lacks_symbol("virtual memory", symbol))
}

impl HostRegistrar for DeviceAllocator {
    unsafe fn register(&self, range: AddressRange) -> Result<()> {
        if range.is_empty() {
            return Err(CUDA.error(ErrorKind::ZeroLength, "host_register"));
        }
        let functions = &self.lookup.driver().functions;
        let work_context = self.lookup.contexts.work_context_for_host()?;
        let pointer = ptr::with_exposed_provenance_mut::<c_void>(range.start().0 as usize);
        let register = || {
            let flags = sys::CU_MEMHOSTREGISTER_PORTABLE;
            let len = range.len() as usize;
            // SAFETY: the caller of `HostRegistrar::register` keeps the range mapped.
            let code = unsafe { (functions.mem_host_register)(pointer, len, flags) };
            check(code, "cuMemHostRegister_v2")
        };
        let undo = |()| {
            // SAFETY: `cuMemHostRegister_v2` above registered the range.
            check(unsafe { (functions.mem_host_unregister)(pointer) }, "cuMemHostUnregister")
        };
        let locked = work_context
            .with_context_or_undo(register, undo)
            .map_err(|error| error.context("range", range));
        if locked.is_ok() {
            work_context.keep();
            let device = work_context.primary_of();
            self.lookup.contexts.allocations.insert_page_locked(PageLockedRange { range, device });
        }
        work_context.end(locked)
    }

    fn unregister(&self, range: AddressRange) -> Result<()> {
        self.lookup.contexts.check_process("host_unregister")?;
        let Some(locked) = self.lookup.contexts.allocations.take_page_locked(range) else {
            return Err(CUDA
                .error(ErrorKind::InvalidArgument, "host_unregister")
                .context("range", range)
                .remedy("unregister exactly the range that was registered, once"));
        };
        let pointer = ptr::with_exposed_provenance_mut::<c_void>(range.start().0 as usize);
        let mut unlocked = false;
        let result = self.context_of(locked).and_then(|work_context| {
            work_context.run(|| {
                // SAFETY: this driver registered the range. Only the thread that removed the
                // table's entry unregisters the range.
                let code = unsafe { (self.lookup.driver().functions.mem_host_unregister)(pointer) };
                let ended = if code == CuResult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED {
                    tracing::debug!(%range, "the driver ended the page-locking with its context");
                    Ok(())
                } else {
                    check(code, "cuMemHostUnregister")
                };
                ended.inspect(|()| unlocked = true)
            })
        });
        if !unlocked {
            self.lookup.contexts.allocations.insert_page_locked(locked);
        }
        result.map_err(|error| error.context("range", range))
    }
}

impl DeviceAllocator {
    /// Returns the context in which a range was page-locked. If the application has destroyed that
    /// context, returns the one that
    /// [`work_context_for_host`](crate::context::PrimaryContexts::work_context_for_host) chooses.
    fn context_of(&self, locked: PageLockedRange) -> Result<WorkContext<'_>> {
        if let Some(device) = locked.device {
            return self.lookup.contexts.retain(device);
        }
        let context = self.lookup.context_of(locked.range.start())?;
        if context.is_null() {
            self.lookup.contexts.work_context_for_host()
        } else {
            Ok(WorkContext::borrowed(&self.lookup.driver().functions, context))
        }
    }
}

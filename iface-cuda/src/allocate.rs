//! Memory by request: allocating every kind, freeing it, and page-locking the application's own.

use std::ffi::c_void;

use hmem_core::{
    Address, AddressRange, Allocation, AllocationKind, DeviceId, Error, ErrorKind, IfaceKind,
    Result,
    iface::{AllocRequest, Allocator, HostRegistrar},
};

use crate::{
    context::{Workplace, within},
    device,
    driver::{Driver, Left, Origin, Owned, Registered, not_live},
    error::{check, lacks, lacks_symbol},
    sys::{self, CuDevicePtr, CuMemHandle, CuResult},
};

impl Allocator for Driver {
    fn allocate(&self, request: &AllocRequest) -> Result<Allocation> {
        let abilities = self.abilities("allocate", request.device)?;
        let described = |error: Error| {
            error
                .device(request.device)
                .context("kind", request.kind.name())
                .context("length", request.len)
        };
        if request.len == 0 {
            return Err(described(
                Error::new(ErrorKind::ZeroLength, "allocate").iface(IfaceKind::CUDA),
            ));
        }
        let refuse = |reason| Err(described(lacks("allocate", reason)));
        match request.kind {
            AllocationKind::Device | AllocationKind::Host => {}
            AllocationKind::Managed if abilities.managed => {}
            AllocationKind::StreamOrdered if abilities.pools => {}
            AllocationKind::Virtual if abilities.vmm => {}
            AllocationKind::Managed | AllocationKind::StreamOrdered | AllocationKind::Virtual => {
                return refuse("the device does not have this kind of memory");
            }
            AllocationKind::Imported => {
                return refuse("another process's memory is opened, not allocated");
            }
            _ => return refuse("the system iface allocates this kind"),
        }
        self.take(request).map_err(described)
    }

    /// Frees what was allocated: subscribers of the monitor are told before, so that a cached
    /// registration is dead when the memory goes.
    unsafe fn free(&self, allocation: &Allocation) -> Result<()> {
        let owned = self.owned("free", allocation)?;
        if matches!(owned.origin, Origin::Imported { .. }) {
            return Err(not_live("free", allocation).context("opened", "close it with ipc_close"));
        }
        self.end(allocation, &owned)
    }

    fn is_device_active(&self, device: DeviceId) -> Result<bool> {
        self.is_active(device)
    }
}

impl HostRegistrar for Driver {
    unsafe fn register(&self, range: AddressRange) -> Result<()> {
        if range.is_empty() {
            return Err(Error::new(ErrorKind::ZeroLength, "host_register").iface(IfaceKind::CUDA));
        }
        let workplace = self.workplace_for_host()?;
        let pointer = std::ptr::with_exposed_provenance_mut::<c_void>(range.start().0 as usize);
        let locked = workplace
            .within_or_undo(
                || {
                    let flags = sys::CU_MEMHOSTREGISTER_PORTABLE;
                    // SAFETY: the caller of `HostRegistrar::register` keeps the range mapped.
                    let code = unsafe {
                        (self.functions.mem_host_register)(pointer, range.len() as usize, flags)
                    };
                    check(code, "cuMemHostRegister_v2")
                },
                |()| {
                    // SAFETY: registered just now.
                    let code = unsafe { (self.functions.mem_host_unregister)(pointer) };
                    check(code, "cuMemHostUnregister")
                },
            )
            .map_err(|error| error.context("range", range));
        if locked.is_ok() {
            workplace.keep();
            let device = match &workplace {
                Workplace::Theirs(..) => None,
                Workplace::Held(hold) => Some(hold.device()),
            };
            self.book
                .lock()
                .registered
                .insert(range.start().0, Registered { len: range.len(), device });
        }
        workplace.end(locked)
    }

    fn unregister(&self, range: AddressRange) -> Result<()> {
        let start = range.start().0;
        let mut book = self.book.lock();
        let known = book.registered.get(&start).copied().filter(|known| known.len == range.len());
        let Some(known) = known else {
            return Err(Error::new(ErrorKind::InvalidArgument, "host_unregister")
                .iface(IfaceKind::CUDA)
                .context("range", range)
                .remedy("unregister exactly the range that was registered, once"));
        };
        book.registered.remove(&start);
        drop(book);
        let pointer = std::ptr::with_exposed_provenance_mut::<c_void>(start as usize);
        let mut gone = false;
        let result = self.workplace_of_registered(range.start(), known).and_then(|workplace| {
            let ended = workplace.within(|| {
                // SAFETY: registered by this driver and unregistered once: the book's entry is
                // gone.
                let code = unsafe { (self.functions.mem_host_unregister)(pointer) };
                let ended = if code == CuResult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED {
                    tracing::debug!(%range, "the page-locking went with its context");
                    Ok(())
                } else {
                    check(code, "cuMemHostUnregister")
                };
                ended.inspect(|()| gone = true)
            });
            workplace.end(ended)
        });
        if !gone {
            self.book.lock().registered.insert(start, known);
        }
        result.map_err(|error| error.context("range", range))
    }
}

impl Driver {
    /// Takes memory from the driver and enters it into the book; on an error nothing stays taken.
    fn take(&self, request: &AllocRequest) -> Result<Allocation> {
        let device = request.device;
        let len = usize::try_from(request.len).map_err(|_| {
            Error::new(ErrorKind::OutOfResources, "allocate")
                .remedy("no machine has that much memory")
        })?;
        let hold = self.hold(device)?;
        let (base, mut origin) = hold.within_or_undo(
            || match request.kind {
                AllocationKind::Host => Ok((self.host_alloc(len)?, Origin::Host)),
                AllocationKind::Managed => Ok((self.managed_alloc(len)?, Origin::Memory)),
                AllocationKind::StreamOrdered => Ok((self.pool_alloc(device, len)?, Origin::Pool)),
                AllocationKind::Virtual => self.virtual_alloc(device, len),
                _ => Ok((self.device_alloc(len)?, Origin::Memory)),
            },
            |(base, mut origin)| self.give_back(base, device, &mut origin),
        )?;
        let entered = self.enter(base, request, device, &origin);
        if entered.is_ok() {
            hold.keep();
        } else if let Err(error) = hold.within(|| self.give_back(base, device, &mut origin)) {
            hold.keep();
            tracing::error!(%error, "an allocation that failed stays taken");
        }
        entered
    }

    fn enter(
        &self,
        base: u64,
        request: &AllocRequest,
        device: DeviceId,
        origin: &Origin,
    ) -> Result<Allocation> {
        let found = self.find(Address(base))?.ok_or_else(|| {
            Error::new(ErrorKind::Driver, "allocate")
                .iface(IfaceKind::CUDA)
                .context("address", Address(base))
                .context("reason", "the driver does not know memory that it allocated just now")
        })?;
        // What was asked for; the driver may have rounded up.
        let range = AddressRange::new(Address(base), request.len)?;
        let allocation = Allocation { range, ..found.allocation };
        let owned = Owned { id: allocation.id, range, device, origin: origin.clone() };
        self.book.lock().owned.insert(base, owned);
        Ok(allocation)
    }

    fn device_alloc(&self, len: usize) -> Result<u64> {
        let mut base: CuDevicePtr = 0;
        // SAFETY: `base` is writable.
        check(unsafe { (self.functions.mem_alloc)(&mut base, len) }, "cuMemAlloc_v2")?;
        Ok(base)
    }

    fn managed_alloc(&self, len: usize) -> Result<u64> {
        let mut base: CuDevicePtr = 0;
        // SAFETY: `base` is writable.
        let code = unsafe {
            (self.functions.mem_alloc_managed)(&mut base, len, sys::CU_MEM_ATTACH_GLOBAL)
        };
        check(code, "cuMemAllocManaged")?;
        Ok(base)
    }

    fn host_alloc(&self, len: usize) -> Result<u64> {
        let mut base: *mut c_void = std::ptr::null_mut();
        // SAFETY: `base` is writable.
        let code = unsafe {
            (self.functions.mem_host_alloc)(&mut base, len, sys::CU_MEMHOSTALLOC_PORTABLE)
        };
        check(code, "cuMemHostAlloc")?;
        Ok(base.expose_provenance() as u64)
    }

    /// From the device's default pool, usable when this returns. Nothing is taken from a driver
    /// that cannot free it.
    fn pool_alloc(&self, device: DeviceId, len: usize) -> Result<u64> {
        self.functions.mem_free_async.ok_or_else(|| lacks_symbol("allocate", "cuMemFreeAsync"))?;
        let allocate = self
            .functions
            .mem_alloc_async
            .ok_or_else(|| lacks_symbol("allocate", "cuMemAllocAsync"))?;
        self.with_own_stream(device, |stream| {
            let mut base: CuDevicePtr = 0;
            // SAFETY: `base` is writable, and the stream is this driver's own.
            check(unsafe { allocate(&mut base, len, stream) }, "cuMemAllocAsync")?;
            // SAFETY: the stream is this driver's own.
            let ready = check(
                unsafe { (self.functions.stream_synchronize)(stream) },
                "cuStreamSynchronize",
            );
            if let Err(error) = ready {
                // SAFETY: allocated just now, and seen by nobody.
                check(unsafe { (self.functions.mem_free)(base) }, "cuMemFree_v2")?;
                return Err(error);
            }
            Ok(base)
        })
    }

    /// One handle, mapped into a reservation of its own, open to its device, and reachable by RDMA
    /// where the device has that.
    fn virtual_alloc(&self, device: DeviceId, len: usize) -> Result<(u64, Origin)> {
        let entry = device::get(&self.devices, "allocate", device)?;
        let vmm = Vmm::of(self)?;
        let properties = sys::CuMemAllocationProp {
            kind: sys::CU_MEM_ALLOCATION_TYPE_PINNED,
            location: sys::CuMemLocation {
                kind: sys::CU_MEM_LOCATION_TYPE_DEVICE,
                id: entry.handle,
            },
            gpu_direct_rdma_capable: entry.abilities.rdma_with_vmm.into(),
            ..sys::CuMemAllocationProp::default()
        };
        let mut step = 0;
        let option = sys::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        check(
            // SAFETY: `step` is writable and `properties` is whole.
            unsafe { (vmm.granularity)(&mut step, &properties, option) },
            "cuMemGetAllocationGranularity",
        )?;
        let size = len.checked_next_multiple_of(step.max(1)).ok_or_else(|| {
            Error::new(ErrorKind::OutOfResources, "cuMemGetAllocationGranularity")
                .context("granularity", step)
        })?;
        let mut handle: CuMemHandle = 0;
        // SAFETY: `handle` is writable and `properties` is whole.
        check(unsafe { (vmm.create)(&mut handle, size, &properties, 0) }, "cuMemCreate")?;
        let mapped = self.map(&vmm, handle, size, properties.location);
        if mapped.is_err() {
            // SAFETY: created above and mapped nowhere.
            check(unsafe { (vmm.release)(handle) }, "cuMemRelease")?;
        }
        Ok((mapped?, Origin::Virtual { size, handle, left: Left::Mapping }))
    }

    /// Reserves addresses and maps `handle` there; on an error neither stays.
    fn map(
        &self,
        vmm: &Vmm,
        handle: CuMemHandle,
        size: usize,
        location: sys::CuMemLocation,
    ) -> Result<CuDevicePtr> {
        let mut base: CuDevicePtr = 0;
        // SAFETY: `base` is writable.
        check(unsafe { (vmm.reserve)(&mut base, size, 0, 0, 0) }, "cuMemAddressReserve")?;
        // SAFETY: the reservation is new and of this size, and so is the handle.
        let mapped = check(unsafe { (vmm.map)(base, size, 0, handle, 0) }, "cuMemMap");
        let opened = mapped.and_then(|()| {
            let who =
                sys::CuMemAccessDesc { location, flags: sys::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
            // SAFETY: the range was mapped whole just now; `who` is one description.
            let opened = check(unsafe { (vmm.set_access)(base, size, &who, 1) }, "cuMemSetAccess");
            if opened.is_err() {
                // SAFETY: mapped just now, and seen by nobody.
                check(unsafe { (vmm.unmap)(base, size) }, "cuMemUnmap")?;
            }
            opened
        });
        if opened.is_err() {
            // SAFETY: reserved above, with nothing mapped in it.
            check(unsafe { (vmm.unreserve)(base, size) }, "cuMemAddressFree")?;
        }
        opened.map(|()| base)
    }

    /// Gives memory back as it came. The device's primary context is current. After a refusal
    /// `origin` says what is left, and the next call goes on from there.
    pub(crate) fn give_back(&self, base: u64, device: DeviceId, origin: &mut Origin) -> Result<()> {
        match origin {
            // SAFETY: allocated by this driver and freed once: the book's entry goes with it.
            Origin::Memory => check(unsafe { (self.functions.mem_free)(base) }, "cuMemFree_v2"),
            Origin::Host => {
                let pointer = std::ptr::with_exposed_provenance_mut(base as usize);
                // SAFETY: as above.
                check(unsafe { (self.functions.mem_free_host)(pointer) }, "cuMemFreeHost")
            }
            Origin::Pool => self.pool_free(base, device),
            Origin::Virtual { size, handle, left } => {
                let vmm = Vmm::of(self)?;
                if *left == Left::Mapping {
                    // SAFETY: mapped by this driver at `base` in this size.
                    check(unsafe { (vmm.unmap)(base, *size) }, "cuMemUnmap")?;
                    *left = Left::Reservation;
                }
                if *left == Left::Reservation {
                    // SAFETY: the reservation of `map`, with nothing mapped in it any longer.
                    check(unsafe { (vmm.unreserve)(base, *size) }, "cuMemAddressFree")?;
                    *left = Left::Handle;
                }
                // SAFETY: created by this driver and released once.
                check(unsafe { (vmm.release)(*handle) }, "cuMemRelease")
            }
            Origin::Imported { .. } => {
                // SAFETY: opened by this driver, and closed as often as it was opened.
                check(unsafe { (self.functions.ipc_close_mem_handle)(base) }, "cuIpcCloseMemHandle")
            }
        }
    }

    fn pool_free(&self, base: u64, device: DeviceId) -> Result<()> {
        let free =
            self.functions.mem_free_async.ok_or_else(|| lacks_symbol("free", "cuMemFreeAsync"))?;
        self.with_own_stream(device, |stream| {
            // SAFETY: allocated by this driver and freed once; the caller promises that nothing
            // uses it any longer.
            check(unsafe { free(base, stream) }, "cuMemFreeAsync")?;
            // The free has taken effect; a failure to wait for it is an error of the device and not
            // of the free. SAFETY: the stream is this driver's own.
            let waited = check(
                unsafe { (self.functions.stream_synchronize)(stream) },
                "cuStreamSynchronize",
            );
            if let Err(error) = waited {
                tracing::warn!(%error, "waiting for a free that was accepted");
            }
            Ok(())
        })
    }

    /// Gives an allocation back and strikes it from the book, unless the driver refuses.
    fn end(&self, allocation: &Allocation, owned: &Owned) -> Result<()> {
        let base = allocation.base().0;
        // Taken out first, so that of two threads that free the same memory only one reaches the
        // driver.
        let taken = self.book.lock().take(base, owned.id);
        let Some(mut taken) = taken else { return Err(not_live("free", allocation)) };
        let result = self.primary(taken.device).map(|context| {
            self.subscriptions.while_it_goes(allocation.range, || {
                let mut gone = false;
                let ended = within(&self.functions, context, || {
                    self.give_back(base, taken.device, &mut taken.origin).inspect(|()| gone = true)
                });
                (ended, gone)
            })
        });
        match result {
            Ok((ended, true)) => ended,
            Ok((ended, false)) => {
                self.book.lock().owned.insert(base, taken);
                ended.map_err(|error| error.context("allocation", allocation.range))
            }
            Err(error) => {
                self.book.lock().owned.insert(base, taken);
                Err(error)
            }
        }
    }

    /// The context in which host memory is page-locked; another where the application has destroyed
    /// it.
    fn workplace_of_registered(
        &self,
        address: Address,
        known: Registered,
    ) -> Result<Workplace<'_>> {
        if let Some(device) = known.device {
            return self.hold(device).map(Workplace::Held);
        }
        let context = self.context_of(address)?;
        if context.is_null() {
            self.workplace_for_host()
        } else {
            Ok(Workplace::Theirs(self, context))
        }
    }
}

/// The calls of virtual memory management, which older drivers lack.
struct Vmm {
    granularity: unsafe extern "C" fn(*mut usize, *const sys::CuMemAllocationProp, u32) -> CuResult,
    reserve: unsafe extern "C" fn(*mut CuDevicePtr, usize, usize, CuDevicePtr, u64) -> CuResult,
    unreserve: unsafe extern "C" fn(CuDevicePtr, usize) -> CuResult,
    create: unsafe extern "C" fn(
        *mut CuMemHandle,
        usize,
        *const sys::CuMemAllocationProp,
        u64,
    ) -> CuResult,
    release: unsafe extern "C" fn(CuMemHandle) -> CuResult,
    map: unsafe extern "C" fn(CuDevicePtr, usize, usize, CuMemHandle, u64) -> CuResult,
    unmap: unsafe extern "C" fn(CuDevicePtr, usize) -> CuResult,
    set_access:
        unsafe extern "C" fn(CuDevicePtr, usize, *const sys::CuMemAccessDesc, usize) -> CuResult,
}

impl Vmm {
    fn of(driver: &Driver) -> Result<Self> {
        let f = &driver.functions;
        let missing = |symbol| move || lacks_symbol("virtual memory", symbol);
        Ok(Self {
            granularity: f
                .mem_get_allocation_granularity
                .ok_or_else(missing("cuMemGetAllocationGranularity"))?,
            reserve: f.mem_address_reserve.ok_or_else(missing("cuMemAddressReserve"))?,
            unreserve: f.mem_address_free.ok_or_else(missing("cuMemAddressFree"))?,
            create: f.mem_create.ok_or_else(missing("cuMemCreate"))?,
            release: f.mem_release.ok_or_else(missing("cuMemRelease"))?,
            map: f.mem_map.ok_or_else(missing("cuMemMap"))?,
            unmap: f.mem_unmap.ok_or_else(missing("cuMemUnmap"))?,
            set_access: f.mem_set_access.ok_or_else(missing("cuMemSetAccess"))?,
        })
    }
}

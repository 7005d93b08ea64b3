//! Allocation and free of memory, and page-locking of the application's memory.

#![allow(unsafe_code, reason = "calls the runtime to allocate, free and page-lock")]

use std::{ffi::c_void, ptr, sync::Arc};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationId, AllocationKind, Error, ErrorKind, IfaceKind,
    Result,
    iface::{AllocRequest, Allocator, HostRegistrar},
};
use hmem_iface_kit::{log_failure, table::VmmObjects};

use crate::{
    driver::DeviceEntry,
    error::{ROCR, check, symbol},
    lookup::Lookup,
    sys::{self, VmemHandle},
    table::RocrOrigin,
};

/// Allocates and frees memory of the runtime, and page-locks host memory.
#[derive(Debug)]
pub(crate) struct PoolAllocator {
    pub(crate) lookup: Arc<Lookup>,
}

impl Allocator for PoolAllocator {
    fn allocate(&self, request: &AllocRequest) -> Result<Allocation> {
        let device = self.lookup.runtime.device("allocate", request.device)?;
        let unsupported = match request.kind {
            AllocationKind::Device | AllocationKind::Host => None,
            AllocationKind::Virtual if self.lookup.runtime.vmm => None,
            AllocationKind::Virtual => Some("the driver has no virtual memory calls"),
            AllocationKind::Managed => Some(
                "the runtime has no managed memory: HIP makes it of host pages with attributes",
            ),
            AllocationKind::StreamOrdered => {
                Some("the runtime has no stream-ordered pools: HIP makes them")
            }
            _ => Some("the system iface allocates this kind"),
        };
        ROCR.allocate(request, unsupported, || self.allocate_supported(request, device))
    }

    unsafe fn free(&self, allocation: &Allocation) -> Result<()> {
        self.lookup.runtime.check_process("free")?;
        let mut origin = self.lookup.table.take("free", allocation, false)?;
        // SAFETY: `take` ended the iface's ownership of the live allocation, so that only one
        // thread frees it. The caller promises that nothing uses the memory.
        let freed = unsafe { self.release(allocation.base(), &mut origin) };
        freed.map_err(|error| {
            self.lookup.table.own(*allocation, origin);
            error.context("allocation", allocation.range)
        })
    }
}

impl PoolAllocator {
    /// Allocates memory and records it in the table. On an error frees the memory again. If the
    /// runtime refuses that free, logs the refusal.
    fn allocate_supported(
        &self,
        request: &AllocRequest,
        device: &DeviceEntry,
    ) -> Result<Allocation> {
        let runtime = &self.lookup.runtime;
        let len = usize::try_from(request.len).map_err(|_| too_large())?;
        let (base, mut origin) = match request.kind {
            AllocationKind::Host => (runtime.allocate_host(len)?, RocrOrigin::Pool),
            AllocationKind::Virtual => self.allocate_virtual(device, len)?,
            _ => {
                let (pool, _) = device.pool.ok_or_else(no_pool)?;
                (runtime.allocate(pool, len)?, RocrOrigin::Pool)
            }
        };
        let base = Address(base.expose_provenance() as u64);
        let entered = self.enter(base, request, origin);
        if entered.is_err() {
            // SAFETY: this call allocated the memory, and did not return it to a caller.
            let freed = unsafe { self.release(base, &mut origin) };
            log_failure!(error, freed, "cannot free the memory of a failed allocation");
        }
        entered
    }

    fn enter(
        &self,
        base: Address,
        request: &AllocRequest,
        origin: RocrOrigin,
    ) -> Result<Allocation> {
        // The allocation gets the requested length, although the runtime may have rounded it up.
        let range = AddressRange::new(base, request.len)?;
        let device = (request.kind != AllocationKind::Host).then_some(request.device);
        let kind = request.kind;
        let id = match origin {
            RocrOrigin::Pool => {
                let found = self.lookup.find(base)?.filter(|found| found.base() == base);
                let unknown = || {
                    ROCR.error(ErrorKind::Driver, "allocate").context("address", base).context(
                        "why",
                        "the runtime does not recognise memory that it has allocated",
                    )
                };
                found.ok_or_else(unknown)?.id
            }
            _ if self.lookup.has_identities() => self.lookup.table.next_id(),
            _ => AllocationId(0),
        };
        let allocation = Allocation { iface: IfaceKind::ROCR, range, device, kind, id, token: 0 };
        self.lookup.table.own(allocation, origin);
        Ok(allocation)
    }

    /// Allocates VMM memory: maps one handle into a new reservation, and lets the device access the
    /// mapping.
    fn allocate_virtual(
        &self,
        device: &DeviceEntry,
        len: usize,
    ) -> Result<(*mut c_void, RocrOrigin)> {
        let f = &self.lookup.runtime.functions;
        let reserve = symbol(f.vmem_reserve, "hsa_amd_vmem_address_reserve")?;
        let create = symbol(f.vmem_create, "hsa_amd_vmem_handle_create")?;
        let map = symbol(f.vmem_map, "hsa_amd_vmem_map")?;
        let set_access = symbol(f.vmem_set_access, "hsa_amd_vmem_set_access")?;
        // `release` calls these functions, so a runtime without them is refused before the
        // allocation.
        symbol(f.vmem_unmap, "hsa_amd_vmem_unmap")?;
        symbol(f.vmem_unreserve, "hsa_amd_vmem_address_free")?;
        symbol(f.vmem_release, "hsa_amd_vmem_handle_release")?;
        let (pool, granule) = device.pool.ok_or_else(no_pool)?;
        let size = len.checked_next_multiple_of(granule.max(1)).ok_or_else(too_large)?;
        let mut handle = VmemHandle::default();
        // SAFETY: the pool belongs to the device, the size is a multiple of the pool's granularity,
        // and `handle` is writable.
        let code = unsafe { create(pool, size, sys::MEMORY_TYPE_PINNED, 0, &mut handle) };
        check(code, "hsa_amd_vmem_handle_create")?;
        let (mut base, mut left) = (ptr::null_mut(), VmmObjects::Handle);
        let mut map_at_new_addresses = || {
            // SAFETY: `base` is writable, and the size is a multiple of the page size.
            let code = unsafe { reserve(&mut base, size, 0, 0) };
            check(code, "hsa_amd_vmem_address_reserve")?;
            left = VmmObjects::Reservation;
            // SAFETY: the calls above made the reservation and the handle, both of this size.
            check(unsafe { map(base, size, 0, handle, 0) }, "hsa_amd_vmem_map")?;
            left = VmmObjects::Mapping;
            let access =
                sys::AccessDesc { permissions: sys::HSA_ACCESS_PERMISSION_RW, agent: device.agent };
            // SAFETY: the call above mapped the whole range; `access` is one description.
            let code = unsafe { set_access(base, size, &access, 1) };
            check(code, "hsa_amd_vmem_set_access")
        };
        let mapped = map_at_new_addresses();
        let mut origin = RocrOrigin::Virtual { size, handle, left };
        mapped.map(|()| (base, origin)).inspect_err(|_| {
            // SAFETY: this call made the reservation, handle and mapping, and did not return them
            // to a caller.
            let released = unsafe { self.release(Address(base.addr() as u64), &mut origin) };
            log_failure!(
                error,
                released,
                "cannot release the parts of a failed virtual allocation"
            );
        })
    }

    /// Frees memory by the runtime call that its origin requires.
    ///
    /// VMM memory is released in several steps. If the runtime refuses a step, `origin` records the
    /// objects that remain, and a repeated call releases these.
    ///
    /// # Safety
    /// The memory must belong to this iface. The caller must free it only once, and nothing may use
    /// it any longer.
    unsafe fn release(&self, base: Address, origin: &mut RocrOrigin) -> Result<()> {
        let runtime = &self.lookup.runtime;
        let pointer = ptr::with_exposed_provenance_mut::<c_void>(base.0 as usize);
        let RocrOrigin::Virtual { size, handle, left } = origin else {
            // SAFETY: the caller promises that the memory is freed once and unused.
            return unsafe { runtime.free(pointer) };
        };
        let f = &runtime.functions;
        let unmap = symbol(f.vmem_unmap, "hsa_amd_vmem_unmap")?;
        let unreserve = symbol(f.vmem_unreserve, "hsa_amd_vmem_address_free")?;
        let release = symbol(f.vmem_release, "hsa_amd_vmem_handle_release")?;
        if *left == VmmObjects::Mapping {
            // SAFETY: `allocate_virtual` mapped `size` bytes at `base`.
            check(unsafe { unmap(pointer, *size) }, "hsa_amd_vmem_unmap")?;
            *left = VmmObjects::Reservation;
        }
        if *left == VmmObjects::Reservation {
            // SAFETY: `allocate_virtual` reserved the range, and nothing is mapped in it any
            // longer.
            check(unsafe { unreserve(pointer, *size) }, "hsa_amd_vmem_address_free")?;
            *left = VmmObjects::Handle;
        }
        // SAFETY: `allocate_virtual` created the handle, and it is released once.
        check(unsafe { release(*handle) }, "hsa_amd_vmem_handle_release")
    }
}

impl HostRegistrar for PoolAllocator {
    unsafe fn register(&self, range: AddressRange) -> Result<()> {
        const OPERATION: &str = "host_register";
        if range.is_empty() {
            return Err(ROCR.error(ErrorKind::ZeroLength, OPERATION));
        }
        let f = &self.lookup.runtime.functions;
        let lock = symbol(f.memory_lock, "hsa_amd_memory_lock")?;
        symbol(f.memory_unlock, "hsa_amd_memory_unlock")?;
        // A second lock at an address is refused: the runtime unlocks by address and could not
        // distinguish the two locks.
        if !self.lookup.table.begin_lock(range) {
            return Err(ROCR.error(ErrorKind::Busy, OPERATION).context("range", range).remedy(
                "a range that begins here is registered already: unregister that one first",
            ));
        }
        let pointer = ptr::with_exposed_provenance_mut::<c_void>(range.start().0 as usize);
        let mut agent_address = ptr::null_mut();
        // SAFETY: the caller keeps the range mapped. A null list means all agents.
        let code =
            unsafe { lock(pointer, range.len() as usize, ptr::null_mut(), 0, &mut agent_address) };
        let locked = check(code, "hsa_amd_memory_lock");
        let address = locked.is_ok().then(|| agent_address.expose_provenance());
        self.lookup.table.end_lock(range, address);
        locked.map_err(|error| error.context("range", range))
    }

    fn unregister(&self, range: AddressRange) -> Result<()> {
        self.lookup.runtime.check_process("host_unregister")?;
        let Some(agent_address) = self.lookup.table.take_page_locked(range) else {
            return Err(ROCR
                .error(ErrorKind::InvalidArgument, "host_unregister")
                .context("range", range)
                .remedy("unregister exactly the range that was registered, once"));
        };
        let f = &self.lookup.runtime.functions;
        let pointer = ptr::with_exposed_provenance_mut::<c_void>(range.start().0 as usize);
        symbol(f.memory_unlock, "hsa_amd_memory_unlock")
            // SAFETY: this runtime locked the range at this address. Only the thread that removed
            // the table's entry unlocks the range. The caller of `register` keeps the range mapped
            // until now.
            .and_then(|unlock| check(unsafe { unlock(pointer) }, "hsa_amd_memory_unlock"))
            .map_err(|error| {
                self.lookup.table.end_lock(range, Some(agent_address));
                error.context("range", range)
            })
    }
}

fn no_pool() -> Error {
    ROCR.lacks("allocate", "the runtime names no pool of this device's memory")
}

fn too_large() -> Error {
    ROCR.error(ErrorKind::OutOfResources, "allocate")
        .remedy("ask for less: the length exceeds the address space")
}

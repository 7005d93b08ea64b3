//! Lookup of addresses: the allocation that an address lies in.

use std::{ffi::c_void, ptr};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationId, AllocationKind, DeviceId, Error, ErrorKind,
    IfaceKind, Result,
};

use crate::{
    error::check,
    sys::{self, ContextHandle, DeviceHandle, Functions, MemoryAllocationProperties},
};

/// Returns the allocation around an address, or `None` if no driver knows the address. `handles`
/// has the device of each handle.
pub(crate) fn query(
    functions: &Functions,
    contexts: &[ContextHandle],
    handles: &[(DeviceHandle, DeviceId)],
    address: Address,
) -> Result<Option<Allocation>> {
    // Layers of the loader call the null pointer an invalid argument.
    if address.0 == 0 {
        return Ok(None);
    }
    for (driver, context) in contexts.iter().enumerate() {
        if let Some(mut allocation) = query_in(functions, *context, handles, address)? {
            // Each driver counts from 1: the driver's number above that keeps two drivers'
            // allocations apart.
            allocation.id.0 |= (driver as u64) << 56;
            return Ok(Some(allocation));
        }
    }
    Ok(None)
}

fn query_in(
    functions: &Functions,
    context: ContextHandle,
    handles: &[(DeviceHandle, DeviceId)],
    address: Address,
) -> Result<Option<Allocation>> {
    let pointer = ptr::without_provenance::<c_void>(address.0 as usize);
    let mut properties = MemoryAllocationProperties {
        stype: sys::ZE_STRUCTURE_TYPE_MEMORY_ALLOCATION_PROPERTIES,
        next: ptr::null_mut(),
        kind: sys::ZE_MEMORY_TYPE_UNKNOWN,
        id: 0,
        page_size: 0,
    };
    let mut owner = DeviceHandle::NULL;
    // SAFETY: the iface keeps the context until it closes; the structure says its type and ends the
    // chain; `owner` is writable. The address is only looked up, never dereferenced.
    let code = unsafe {
        (functions.mem_get_alloc_properties)(context, pointer, &mut properties, &mut owner)
    };
    check(code, "zeMemGetAllocProperties").map_err(|error| error.context("address", address))?;
    let kind = match properties.kind {
        sys::ZE_MEMORY_TYPE_UNKNOWN => return Ok(None),
        sys::ZE_MEMORY_TYPE_HOST => AllocationKind::Host,
        sys::ZE_MEMORY_TYPE_DEVICE => AllocationKind::Device,
        sys::ZE_MEMORY_TYPE_SHARED => AllocationKind::Managed,
        other => return Err(inconsistent(address).context("type", other)),
    };
    let (mut base, mut len) = (ptr::null_mut(), 0usize);
    // SAFETY: the iface keeps the context until it closes; `base` and `len` are writable. The
    // address is only looked up.
    let code = unsafe { (functions.mem_get_address_range)(context, pointer, &mut base, &mut len) };
    check(code, "zeMemGetAddressRange").map_err(|error| error.context("address", address))?;
    let range = AddressRange::new(Address::of_ptr(base), len as u64)?;
    if !range.contains(address) {
        return Err(inconsistent(address).context("range", range));
    }
    // Host memory belongs to no device, shared memory to several.
    let device = match kind {
        AllocationKind::Device => {
            handles.iter().find(|(handle, _)| *handle == owner).map(|(_, device)| *device)
        }
        _ => None,
    };
    Ok(Some(Allocation {
        iface: IfaceKind::ZE,
        range,
        device,
        kind,
        id: AllocationId(properties.id),
    }))
}

fn inconsistent(address: Address) -> Error {
    Error::new(ErrorKind::Driver, "query")
        .iface(IfaceKind::ZE)
        .context(
            "reason",
            "the driver's answer does not describe an allocation that holds the address",
        )
        .context("address", address)
}

//! Memory by address and by request: which allocation an address lies in, and allocating.

use std::ffi::c_void;

use hmem_core::{
    Address, AddressRange, Allocation, AllocationId, AllocationKind, DeviceId, Error, ErrorKind, IfaceKind,
    Result, Segment, iface::AllocRequest,
};

use crate::{
    iface::{Cuda, check, lacks},
    sys::{self, CuPointerAttribute, CuResult},
};

/// What [`query`] asks for, all in one call; the last only of drivers that know it.
const ATTRIBUTES: [CuPointerAttribute; 8] = [
    sys::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    sys::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
    sys::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
    sys::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    sys::CU_POINTER_ATTRIBUTE_BUFFER_ID,
    sys::CU_POINTER_ATTRIBUTE_IS_MANAGED,
    sys::CU_POINTER_ATTRIBUTE_CONTEXT,
    sys::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
];

pub(crate) fn query(cuda: &Cuda, address: Address) -> Result<Option<Allocation>> {
    const CALL: &str = "cuPointerGetAttributes";
    let mut attributes = ATTRIBUTES;
    // An unknown attribute would fail the whole call with the code that also means "foreign address".
    let asked = if cuda.pool_handles { ATTRIBUTES.len() } else { ATTRIBUTES.len() - 1 };
    // Zeroed and as wide as the widest attribute: what the driver writes narrower reads back the same
    // (little-endian), and what it does not write reads as the null that it documents.
    const { assert!(cfg!(target_endian = "little")) };
    let mut values = [0u64; ATTRIBUTES.len()];
    let mut places = values.each_mut().map(|value| std::ptr::from_mut(value).cast::<c_void>());
    // SAFETY: the first `asked` entries of both arrays exist, and each place has the 8 bytes that the widest
    // attribute takes. The address is only looked up, never dereferenced.
    let code = unsafe {
        (cuda.functions.pointer_get_attributes)(
            asked as u32,
            attributes.as_mut_ptr(),
            places.as_mut_ptr(),
            address.0,
        )
    };
    // `cuda.h` on foreign addresses: this call succeeds with null attributes, or answers INVALID_CONTEXT where no
    // context with unified addressing knows them; the call for one attribute answers INVALID_VALUE.
    if matches!(code, CuResult::CUDA_ERROR_INVALID_CONTEXT | CuResult::CUDA_ERROR_INVALID_VALUE) {
        return Ok(None);
    }
    check(code, CALL).map_err(|error| error.context("address", address))?;

    let [memory_type, start, len, ordinal, buffer, managed, context, pool] = values;
    let kind = match memory_type as u32 {
        0 => return Ok(None),
        _ if managed != 0 => AllocationKind::Managed,
        sys::CU_MEMORYTYPE_HOST => AllocationKind::Host,
        sys::CU_MEMORYTYPE_DEVICE if pool != 0 => AllocationKind::StreamOrdered,
        sys::CU_MEMORYTYPE_DEVICE if context == 0 => AllocationKind::Virtual,
        sys::CU_MEMORYTYPE_DEVICE => AllocationKind::Device,
        other => return Err(inconsistent(address).context("memory_type", other)),
    };
    let range = AddressRange::new(Address(start), len)?;
    if !range.contains(address) {
        // Application memory that was page-locked may be known under the device's alias only. The CPU reaches it
        // as any memory of the system, and so does a NIC.
        if kind == AllocationKind::Host {
            tracing::debug!(%address, %range, "page-locked memory without a range of its own: left to the system");
            return Ok(None);
        }
        return Err(inconsistent(address).context("range", range));
    }
    // Host memory belongs to no device, managed memory to several. A negative ordinal is none.
    let device = match kind {
        AllocationKind::Host | AllocationKind::Managed => None,
        _ => u32::try_from(ordinal as i32).ok().map(DeviceId),
    };
    Ok(Some(Allocation { iface: IfaceKind::CUDA, range, device, kind, id: AllocationId(buffer) }))
}

fn inconsistent(address: Address) -> Error {
    Error::new(ErrorKind::Driver, "query")
        .iface(IfaceKind::CUDA)
        .context("reason", "the driver's attributes do not describe an allocation that holds the address")
        .context("address", address)
}

pub(crate) fn segments(_cuda: &Cuda, range: AddressRange) -> Result<Vec<Segment>> {
    Err(lacks("segments", "hmem-iface-cuda does not list physical segments yet").context("range", range))
}

pub(crate) fn allocate(cuda: &Cuda, request: &AllocRequest) -> Result<Allocation> {
    cuda.device("allocate", request.device)?;
    Err(lacks("allocate", "hmem-iface-cuda does not allocate yet")
        .device(request.device)
        .context("kind", request.kind.name())
        .context("length", request.len))
}

pub(crate) fn free(_cuda: &Cuda, allocation: &Allocation) -> Result<()> {
    Err(lacks("free", "hmem-iface-cuda does not allocate yet").context("range", allocation.range))
}

pub(crate) fn host_register(_cuda: &Cuda, range: AddressRange) -> Result<()> {
    Err(lacks("host_register", "hmem-iface-cuda does not page-lock host memory yet").context("range", range))
}

pub(crate) fn host_unregister(_cuda: &Cuda, range: AddressRange) -> Result<()> {
    Err(lacks("host_unregister", "hmem-iface-cuda does not page-lock host memory yet")
        .context("range", range))
}

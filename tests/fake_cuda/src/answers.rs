//! Values of device attributes and of pointer attributes.

use std::ffi::{c_int, c_void};

use hmem_iface_cuda::sys::{self, CuDeviceAttribute, CuPointerAttribute, CuResult};

use crate::{
    profile::Profile,
    state::{Kind, State},
};

/// Writes a result to the caller's out parameter. Fails with INVALID_VALUE for a null pointer.
pub(crate) fn put<T>(place: *mut T, value: T) -> Result<(), CuResult> {
    if place.is_null() {
        return Err(CuResult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller of the driver passes a writable place, as `cuda.h` demands.
    unsafe { place.write_unaligned(value) };
    Ok(())
}

/// Returns the value of a device attribute. Fails with INVALID_VALUE if the driver release does not
/// know it, as `cuDeviceGetAttribute` documents.
pub(crate) fn attribute_of_device(
    profile: &Profile,
    attribute: CuDeviceAttribute,
) -> Result<c_int, CuResult> {
    if attribute == 0 || attribute > profile.last_device_attribute {
        return Err(CuResult::CUDA_ERROR_INVALID_VALUE);
    }
    Ok(match attribute {
        sys::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
        | sys::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY
        | sys::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        | sys::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED => 1,
        sys::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED => {
            profile.rdma_with_vmm.into()
        }
        sys::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED => profile.rdma.into(),
        sys::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS => profile.flush_options,
        sys::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING => profile.writes_ordering,
        sys::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
        | sys::CU_DEVICE_ATTRIBUTE_DMA_BUF_MMAP_SUPPORTED => profile.dma_buf.into(),
        _ => 0,
    })
}

/// Writes the value of one pointer attribute. As in `cuPointerGetAttributes`, an invalid pointer is
/// no error: "the attributes are assigned default NULL values".
pub(crate) fn pointer_attribute(
    state: &State,
    attribute: CuPointerAttribute,
    place: *mut c_void,
    pointer: u64,
) -> Result<(), CuResult> {
    if attribute == 0 || attribute > state.profile.last_pointer_attribute {
        return Err(CuResult::CUDA_ERROR_INVALID_VALUE);
    }
    let mapping = state.mapping_around(pointer);
    // A test made the driver forget this allocation.
    let state_forgets = |start: u64| state.forgotten == Some((start, 0));
    // Unspecified, so the fake decides: a reservation without memory is not a valid pointer.
    let known = state.around(pointer).filter(|(start, one)| {
        (one.kind != Kind::Reservation || mapping.is_some()) && !state_forgets(*start)
    });
    let (start, one) = known.map_or((0, None), |(start, one)| (start, Some(one)));
    let is = |of: fn(&Kind) -> bool| one.is_some_and(|one| of(&one.kind));
    let physical = mapping.and_then(|(_, mapping)| state.physical.get(&mapping.handle));
    match attribute {
        sys::CU_POINTER_ATTRIBUTE_CONTEXT => {
            // No header says whether VMM memory has a context, so the profile of the fake decides.
            let named = state.profile.vmm_names_context && is(|kind| *kind == Kind::Reservation);
            let primary = state.contexts.iter().find(|(_, one)| named && one.primary);
            put(place.cast(), primary.map_or(one.map_or(0, |one| one.context), |(id, _)| *id))
        }
        sys::CU_POINTER_ATTRIBUTE_MEMORY_TYPE => {
            let host = is(|kind| matches!(kind, Kind::Host | Kind::Registered));
            put(
                place.cast::<u32>(),
                match (one, host) {
                    (None, _) => 0,
                    (_, true) => sys::CU_MEMORYTYPE_HOST,
                    _ => sys::CU_MEMORYTYPE_DEVICE,
                },
            )
        }
        sys::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS => {
            put(place.cast::<u32>(), one.is_some_and(|one| one.sync_memops).into())
        }
        sys::CU_POINTER_ATTRIBUTE_BUFFER_ID => put(place.cast(), one.map_or(0, |one| one.id)),
        // A bool of C: one byte.
        sys::CU_POINTER_ATTRIBUTE_IS_MANAGED => {
            put(place.cast(), u8::from(is(|kind| *kind == Kind::Managed)))
        }
        sys::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => {
            let ordinal = match (physical, one) {
                (Some(physical), _) => physical.properties.location.id,
                (None, Some(one)) => one.device as c_int,
                (None, None) => 0,
            };
            put(place.cast(), ordinal)
        }
        sys::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE => {
            // `cuIpcGetMemHandle` takes memory "created with cuMemAlloc". Unspecified, so the fake
            // decides: this excludes a layer's VMM memory.
            let capable = is(|kind| *kind == Kind::Memory) && !state.profile.allocates_by_vmm;
            put(place.cast(), u8::from(capable))
        }
        sys::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => put(place.cast(), start),
        sys::CU_POINTER_ATTRIBUTE_RANGE_SIZE => put(place.cast(), one.map_or(0, |one| one.len)),
        sys::CU_POINTER_ATTRIBUTE_MAPPED => put(place.cast(), u8::from(one.is_some())),
        sys::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE => {
            // VMM memory has the value that it was created with. Unspecified, so the fake decides:
            // stream-ordered memory is not capable, as `cuMemGetHandleForAddressRange` does not
            // list it.
            let capable = state.profile.rdma
                && match physical {
                    Some(physical) => physical.properties.gpu_direct_rdma_capable != 0,
                    None => is(|kind| *kind == Kind::Memory),
                };
            put(place.cast(), u8::from(capable))
        }
        sys::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE => {
            let pool = if is(|kind| *kind == Kind::Pool) { 0x900 } else { 0 };
            put(place.cast::<usize>(), pool)
        }
        _ => put(place.cast::<u64>(), 0),
    }
}

//! Functions for virtual memory management (VMM).

use std::ffi::{c_uint, c_void};

use hmem_iface_cuda::sys::{
    self, CuDevicePtr, CuMemAccessDesc, CuMemAllocationProp, CuMemHandle, CuResult,
};

use super::{Answer, INVALID_VALUE, NOT_SUPPORTED, device, put};
use crate::state::{Allocation, GRANULARITY, Kind, Mapping, Physical, State};

driver! {
    fn cuMemGetAllocationGranularity(
        _state,
        granularity: *mut usize,
        _properties: *const CuMemAllocationProp,
        _option: c_uint
    ) { put(granularity, GRANULARITY as usize) }

    fn cuMemAddressReserve(
        state,
        pointer: *mut CuDevicePtr,
        size: usize,
        _alignment: usize,
        _wanted: CuDevicePtr,
        flags: u64
    ) {
        let len = size as u64;
        if flags != 0 || len == 0 || !len.is_multiple_of(GRANULARITY) {
            return Err(INVALID_VALUE);
        }
        let address = state.take_addresses(len)?;
        // Unspecified, so the fake decides: a reservation has one identity, independent of its
        // mappings.
        let id = state.identity();
        let kind = Kind::Reservation;
        let reservation =
            Allocation { len, kind, device: 0, context: 0, id, sync_memops: false };
        state.allocations.insert(address, reservation);
        put(pointer, address)
    }

    fn cuMemAddressFree(state, pointer: CuDevicePtr, size: usize) {
        let known = state.allocations.get(&pointer).ok_or(INVALID_VALUE)?;
        let mapped = state.mappings.range(pointer..pointer + size as u64).next().is_some();
        if known.kind != Kind::Reservation || known.len != size as u64 || mapped {
            return Err(INVALID_VALUE);
        }
        state.allocations.remove(&pointer);
        state.give_addresses(pointer, size as u64);
        Ok(())
    }

    fn cuMemCreate(
        state,
        handle: *mut CuMemHandle,
        size: usize,
        properties: *const CuMemAllocationProp,
        flags: u64
    ) {
        let len = size as u64;
        if flags != 0 || len == 0 || !len.is_multiple_of(GRANULARITY) || properties.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, and the caller passes a whole structure.
        let properties = unsafe { *properties };
        let number = device(state, properties.location.id)?;
        if properties.location.kind != sys::CU_MEM_LOCATION_TYPE_DEVICE {
            return Err(INVALID_VALUE);
        }
        if properties.gpu_direct_rdma_capable != 0 && !state.profile.rdma_with_vmm {
            return Err(NOT_SUPPORTED);
        }
        let used = state.used[number as usize] + len;
        if used > state.profile.memory {
            return Err(CuResult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let file = hmem_fake_common::memory_file(len);
        let file = file.map_err(|_| CuResult::CUDA_ERROR_OUT_OF_MEMORY)?;
        state.used[number as usize] = used;
        let id = state.take_physical_handle();
        let made = Physical { file, len, properties, references: 1, mappings: 0 };
        state.physical.insert(id, made);
        put(handle, id)
    }

    fn cuMemRelease(state, handle: CuMemHandle) {
        match state.physical.get_mut(&handle).filter(|known| known.references > 0) {
            Some(known) => known.references -= 1,
            None => {
                // `cuda.h`: "If handle is not a valid handle the behavior is undefined."
                state.undefined_calls += 1;
                return Err(INVALID_VALUE);
            }
        }
        forget_physical(state, handle);
        Ok(())
    }

    fn cuMemMap(
        state,
        pointer: CuDevicePtr,
        size: usize,
        offset: usize,
        handle: CuMemHandle,
        flags: u64
    ) {
        let len = size as u64;
        let physical = state.physical.get(&handle).filter(|known| known.references > 0);
        let physical = physical.ok_or(INVALID_VALUE)?;
        // `cuda.h`: "Note: currently must be zero", about the offset, and: ptr and size "must be a
        // multiple" of the granularity. A mapping may hold the first part of a handle.
        let is_aligned = pointer.is_multiple_of(GRANULARITY) && len.is_multiple_of(GRANULARITY);
        let is_inside = offset == 0 && len != 0 && len <= physical.len;
        if flags != 0 || !is_inside || !is_aligned {
            return Err(INVALID_VALUE);
        }
        let (start, reservation) = state.around(pointer).ok_or(INVALID_VALUE)?;
        let taken = state.mappings.range(..pointer + len).next_back();
        if reservation.kind != Kind::Reservation
            || pointer + len > start + reservation.len
            || taken.is_some_and(|(at, mapping)| at + mapping.len > pointer)
        {
            return Err(INVALID_VALUE);
        }
        let placed = physical.file.try_clone().map_err(drop);
        let placed = placed.and_then(|file| state.pages.place(pointer, len, file).map_err(drop));
        placed.map_err(|()| CuResult::CUDA_ERROR_OUT_OF_MEMORY)?;
        state.mappings.insert(pointer, Mapping { len, handle, accessible: false });
        if let Some(physical) = state.physical.get_mut(&handle) {
            physical.mappings += 1;
        }
        Ok(())
    }

    fn cuMemUnmap(state, pointer: CuDevicePtr, size: usize) {
        let end = pointer + size as u64;
        let inside = state.mappings.range(pointer..end);
        let inside: Vec<_> = inside.map(|(at, one)| (*at, *one)).collect();
        let covered: u64 = inside.iter().map(|(_, mapping)| mapping.len).sum();
        // `cuda.h`: "The range must be the entire contiguous address range that was mapped to."
        // Unspecified, so the fake decides: the range may hold several mappings.
        if covered != size as u64 {
            return Err(INVALID_VALUE);
        }
        for (at, mapping) in inside {
            state.mappings.remove(&at);
            state.pages.clear(at, mapping.len);
            if let Some(physical) = state.physical.get_mut(&mapping.handle) {
                physical.mappings -= 1;
            }
            forget_physical(state, mapping.handle);
        }
        Ok(())
    }

    fn cuMemSetAccess(
        state,
        pointer: CuDevicePtr,
        size: usize,
        who: *const CuMemAccessDesc,
        count: usize
    ) {
        let end = pointer + size as u64;
        let covered: u64 = state.mappings.range(pointer..end).map(|(_, one)| one.len).sum();
        // `cuda.h`: "The range must be a fully mapped address range".
        if covered != size as u64 || count != 1 || who.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, and the caller passes `count` descriptions.
        let who = unsafe { *who };
        for (_, mapping) in state.mappings.range_mut(pointer..end) {
            mapping.accessible = who.flags == sys::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        }
        Ok(())
    }

    fn cuMemRetainAllocationHandle(state, handle: *mut CuMemHandle, address: *mut c_void) {
        let mapped = state.mapping_around(address.expose_provenance() as u64);
        let (_, mapping) = mapped.ok_or(INVALID_VALUE)?;
        let physical = state.physical.get_mut(&mapping.handle).ok_or(INVALID_VALUE)?;
        physical.references += 1;
        put(handle, mapping.handle)
    }

    fn cuMemGetAllocationPropertiesFromHandle(
        state,
        properties: *mut CuMemAllocationProp,
        handle: CuMemHandle
    ) {
        let known = state.physical.get(&handle).filter(|known| known.references > 0);
        put(properties, known.ok_or(INVALID_VALUE)?.properties)
    }
}

/// Frees a handle's physical memory if no reference and no mapping is left. `cuda.h` does not say
/// when a handle's number is used again. The fake gives it to the next physical memory.
fn forget_physical(state: &mut State, handle: CuMemHandle) {
    let Some(known) = state.physical.get(&handle) else { return };
    if known.references == 0 && known.mappings == 0 {
        state.used[known.properties.location.id as usize] -= known.len;
        state.physical.remove(&handle);
        state.free_physical_handles.push(handle);
    }
}

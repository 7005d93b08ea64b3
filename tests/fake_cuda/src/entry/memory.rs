//! Functions that allocate, free and page-lock memory.

use std::ffi::{c_uint, c_void};

use hmem_iface_cuda::sys::{CuDevicePtr, CuResult, CuStream};

use super::{Answer, INVALID_HANDLE, INVALID_VALUE, put};
use crate::state::{Allocation, Kind, State};

driver! {
    fn cuMemAlloc_v2(state, pointer: *mut CuDevicePtr, size: usize) {
        let address = state.take_memory(size as u64, Kind::Memory)?;
        put(pointer, address)
    }

    fn cuMemAllocManaged(state, pointer: *mut CuDevicePtr, size: usize, flags: c_uint) {
        if !matches!(flags, 1 | 2) {
            return Err(INVALID_VALUE);
        }
        let address = state.take_memory(size as u64, Kind::Managed)?;
        put(pointer, address)
    }

    fn cuMemAllocAsync(state, pointer: *mut CuDevicePtr, size: usize, stream: CuStream) {
        if !state.streams.contains_key(&stream.0) {
            return Err(INVALID_HANDLE);
        }
        let address = state.take_memory(size as u64, Kind::Pool)?;
        put(pointer, address)
    }

    fn cuMemFree_v2(state, pointer: CuDevicePtr) {
        state.current()?;
        let known = state.allocations.get(&pointer).ok_or(INVALID_VALUE)?;
        if !matches!(known.kind, Kind::Memory | Kind::Managed | Kind::Pool) {
            return Err(INVALID_VALUE);
        }
        state.free_memory(pointer)
    }

    fn cuMemFreeAsync(state, pointer: CuDevicePtr, stream: CuStream) {
        if !state.streams.contains_key(&stream.0) {
            return Err(INVALID_HANDLE);
        }
        let known = state.allocations.get(&pointer).ok_or(INVALID_VALUE)?;
        if known.kind != Kind::Pool {
            return Err(INVALID_VALUE);
        }
        state.finish(stream.0);
        state.free_memory(pointer)
    }

    fn cuMemHostAlloc(state, pointer: *mut *mut c_void, size: usize, _flags: c_uint) {
        let address = state.take_memory(size as u64, Kind::Host)?;
        put(pointer, std::ptr::with_exposed_provenance_mut(address as usize))
    }

    fn cuMemFreeHost(state, pointer: *mut c_void) {
        state.current()?;
        let address = pointer.expose_provenance() as u64;
        match state.allocations.get(&address) {
            Some(known) if known.kind == Kind::Host => state.free_memory(address),
            _ => Err(INVALID_VALUE),
        }
    }

    fn cuMemHostGetFlags(state, flags: *mut c_uint, pointer: *mut c_void) {
        state.current()?;
        // `cuda.h`: "will fail if the pointer does not reside in an allocation performed by
        // cuMemAllocHost() or cuMemHostAlloc()"
        match state.around(pointer.expose_provenance() as u64) {
            Some((_, known)) if known.kind == Kind::Host => put(flags, 1),
            _ => Err(INVALID_VALUE),
        }
    }

    fn cuMemHostRegister_v2(state, pointer: *mut c_void, size: usize, _flags: c_uint) {
        let context = state.current()?;
        let (start, len) = (pointer.expose_provenance() as u64, size as u64);
        if len == 0 || start.checked_add(len).is_none() {
            return Err(INVALID_VALUE);
        }
        let before = state.allocations.range(..start + len).next_back();
        if before.is_some_and(|(at, known)| at + known.len > start) {
            return Err(CuResult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        }
        let id = if state.profile.registered_without_identity { 0 } else { state.identity() };
        let device = state.device_of(context);
        let kind = Kind::Registered;
        let locked = Allocation { len, kind, device, context, id, sync_memops: false };
        state.allocations.insert(start, locked);
        Ok(())
    }

    fn cuMemHostUnregister(state, pointer: *mut c_void) {
        state.current()?;
        let start = pointer.expose_provenance() as u64;
        match state.allocations.get(&start) {
            Some(known) if known.kind == Kind::Registered => {
                state.allocations.remove(&start);
                Ok(())
            }
            _ => Err(CuResult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED),
        }
    }
}

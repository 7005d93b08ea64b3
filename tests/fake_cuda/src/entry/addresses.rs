//! Functions that query and set attributes of addresses.

use std::ffi::{c_uint, c_void};

use hmem_iface_cuda::sys::{self, CuDevicePtr, CuPointerAttribute, CuResult};

use super::{Answer, INVALID_VALUE, NOT_SUPPORTED, put};
use crate::{
    answers::pointer_attribute,
    state::{Kind, State},
};

driver! {
    fn cuPointerGetAttributes(
        state,
        count: c_uint,
        attributes: *mut CuPointerAttribute,
        data: *mut *mut c_void,
        pointer: CuDevicePtr
    ) {
        state.lookups += u64::from(count > 2);
        if state.profile.queries_need_context {
            state.current()?;
        }
        for at in 0..count as usize {
            // SAFETY: the caller passes `count` attributes and as many places.
            let (attribute, place) = unsafe { (*attributes.add(at), *data.add(at)) };
            pointer_attribute(state, attribute, place, pointer)?;
        }
        if let Some((_, queries)) = &mut state.forgotten {
            *queries = queries.saturating_sub(1);
        }
        Ok(())
    }

    fn cuPointerSetAttribute(
        state,
        value: *const c_void,
        attribute: CuPointerAttribute,
        pointer: CuDevicePtr
    ) {
        // `cuda.h`: "The supported attributes are": SYNC_MEMOPS.
        if attribute != sys::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS || value.is_null() {
            return Err(INVALID_VALUE);
        }
        let (start, allocation) = state.around(pointer).ok_or(INVALID_VALUE)?;
        // VMM memory is refused with 801, as users of UCX report for driver 535.129: its context
        // has the flag `CU_CTX_SYNC_MEMOPS` instead. Unspecified, so the fake decides:
        // stream-ordered memory and memory of other processes are refused too.
        let has_it = match allocation.kind {
            Kind::Memory => !state.profile.allocates_by_vmm,
            Kind::Managed | Kind::Host | Kind::Registered => true,
            _ => false,
        };
        if !has_it {
            return Err(NOT_SUPPORTED);
        }
        // SAFETY: the header: "a pointer to an unsigned integer".
        let on = unsafe { value.cast::<c_uint>().read_unaligned() } != 0;
        if let Some(allocation) = state.allocations.get_mut(&start) {
            allocation.sync_memops = on;
        }
        Ok(())
    }

    fn cuMemGetAddressRange_v2(
        state,
        base: *mut CuDevicePtr,
        size: *mut usize,
        pointer: CuDevicePtr
    ) {
        // `cuda.h` lists INVALID_CONTEXT among the codes of this call.
        if state.profile.queries_need_context {
            state.current()?;
        }
        // A recorded run of the real library shows: a failed call zeroes its outputs.
        let known = match state.around(pointer) {
            Some((_, allocation)) if allocation.kind == Kind::Reservation => {
                state.mapping_around(pointer).map(|(start, mapping)| (start, mapping.len))
            }
            known => known.map(|(start, allocation)| (start, allocation.len)),
        };
        let (start, len) = known.unwrap_or((0, 0));
        if !base.is_null() {
            put(base, start)?;
        }
        if !size.is_null() {
            put(size, len as usize)?;
        }
        known.map(drop).ok_or(CuResult::CUDA_ERROR_NOT_FOUND)
    }
}

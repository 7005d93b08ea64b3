//! Functions that export dma-bufs, share memory with other processes and flush inbound writes.

use std::ffi::{c_int, c_uint, c_void};

use hmem_fake_common::page;
use hmem_iface_cuda::sys::{self, CuDevicePtr, CuIpcMemHandle, CuMemAllocationProp, CuResult};

use super::{Answer, INVALID_VALUE, NOT_SUPPORTED, put};
use crate::{
    ipc,
    state::{Allocation, Kind, State},
};

driver! {
    fn cuIpcGetMemHandle(state, handle: *mut CuIpcMemHandle, pointer: CuDevicePtr) {
        state.current()?;
        put(handle, ipc::export(state, pointer)?)
    }

    fn cuIpcOpenMemHandle_v2(
        state,
        pointer: *mut CuDevicePtr,
        handle: CuIpcMemHandle,
        flags: c_uint
    ) {
        // `cuda.h`: "Must be specified as CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS".
        if flags != sys::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS {
            return Err(INVALID_VALUE);
        }
        let address = ipc::open(state, &handle)?;
        put(pointer, address)
    }

    fn cuIpcCloseMemHandle(state, pointer: CuDevicePtr) {
        state.current()?;
        ipc::close(state, pointer)
    }

    fn cuMemGetHandleForAddressRange(
        state,
        handle: *mut c_void,
        pointer: CuDevicePtr,
        size: usize,
        kind: c_uint,
        flags: u64
    ) {
        // A recorded run of the real library shows: before `cuInit` has succeeded this call returns
        // 801, where other calls return 3.
        if !state.started || !state.profile.dma_buf {
            return Err(NOT_SUPPORTED);
        }
        let len = size as u64;
        // `cuda.h`: "Users must ensure the dptr and size are aligned to the host page size."
        if kind != sys::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
            || !pointer.is_multiple_of(page())
            || !len.is_multiple_of(page())
            || len == 0
        {
            return Err(INVALID_VALUE);
        }
        match flags {
            0 => {}
            sys::CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE if !state.profile.pcie_flag => {
                return Err(INVALID_VALUE);
            }
            // `cuda.h`: "will give a DMA_BUF handle mapped via PCIE BAR1 or will return an error
            // otherwise"
            sys::CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE if !state.profile.pcie_mapping => {
                return Err(NOT_SUPPORTED);
            }
            sys::CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE => {}
            _ => return Err(INVALID_VALUE),
        }
        can_be_exported(state, pointer, len)?;
        let exported = state.pages.export(pointer, len);
        let exported = exported.map_err(|_| CuResult::CUDA_ERROR_OPERATING_SYSTEM)?;
        let fd = exported.ok_or(NOT_SUPPORTED)?;
        put(handle.cast::<c_int>(), std::os::fd::IntoRawFd::into_raw_fd(fd))
    }

    fn cuFlushGPUDirectRDMAWrites(state, target: c_uint, scope: c_uint) {
        let current = state.current()?;
        if target != 0 || !matches!(scope, 100 | 200) {
            return Err(INVALID_VALUE);
        }
        state.flushed.push(current);
        Ok(())
    }
}

/// Checks that a range can be exported as a dma-buf. `cuda.h` allows ranges of `cuMemAlloc`, and
/// ranges of `cuMemAddressReserve` that are "fully mapped via ::cuMemMap" to physical allocations
/// "resident on the same device" with "identical allocation properties".
fn can_be_exported(state: &State, start: u64, len: u64) -> Answer {
    let end = start + len;
    // The range is rounded to pages, and so may begin before and end after its allocation.
    let first = state.allocations.range(..end).rev().find(|(at, one)| **at + one.len > start);
    let (_, around) = first.ok_or(INVALID_VALUE)?;
    match around.kind {
        Kind::Memory => {
            let whole = |(at, one): (&u64, &Allocation)| {
                one.kind == Kind::Memory
                    && at - at % page() <= start
                    && (at + one.len).next_multiple_of(page()) >= end
            };
            if state.allocations.range(..end).rev().take(4096).any(whole) {
                Ok(())
            } else {
                Err(INVALID_VALUE)
            }
        }
        Kind::Reservation => {
            let mut at = start;
            let mut of_first: Option<CuMemAllocationProp> = None;
            while at < end {
                let (base, mapping) = state.mapping_around(at).ok_or(INVALID_VALUE)?;
                let properties = state.physical[&mapping.handle].properties;
                if *of_first.get_or_insert(properties) != properties {
                    return Err(INVALID_VALUE);
                }
                if properties.gpu_direct_rdma_capable == 0 {
                    return Err(NOT_SUPPORTED);
                }
                at = base + mapping.len;
                // Unspecified, so the fake decides: the error code of a driver without exports over
                // several mappings.
                if at < end && !state.profile.spanning_exports {
                    return Err(NOT_SUPPORTED);
                }
            }
            Ok(())
        }
        _ => Err(NOT_SUPPORTED),
    }
}

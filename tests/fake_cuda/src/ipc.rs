//! IPC handles of device memory. A handle names the exporting process, the file behind the memory,
//! and the position of the allocation in that file.

use std::{ffi::c_char, os::fd::AsRawFd};

use hmem_fake_common::{page, reopen};
use hmem_iface_cuda::sys::{CU_IPC_HANDLE_SIZE, CuIpcMemHandle, CuResult};

use crate::state::{Allocation, Kind, State};

/// Numbers in a handle: process ID, fd, inode and length of the file, offset, length and identity
/// of the allocation.
type Body = [u64; 7];

pub(crate) fn export(state: &mut State, pointer: u64) -> Result<CuIpcMemHandle, CuResult> {
    let known = state.allocations.get(&pointer).ok_or(CuResult::CUDA_ERROR_INVALID_VALUE)?;
    // VMM and stream-ordered memory is shared by `cuMemExportToShareableHandle` instead.
    if known.kind != Kind::Memory {
        return Err(CuResult::CUDA_ERROR_INVALID_VALUE);
    }
    let (len, id) = (known.len, known.id);
    let start = pointer - pointer % page();
    let whole = (pointer + len).next_multiple_of(page()) - start;
    let file =
        state.pages.file_of(start, whole).map_err(|_| CuResult::CUDA_ERROR_OPERATING_SYSTEM)?;
    let file = file.ok_or(CuResult::CUDA_ERROR_INVALID_HANDLE)?;
    let inode = rustix::fs::fstat(file).map_err(|_| CuResult::CUDA_ERROR_OPERATING_SYSTEM)?.st_ino;
    let body: Body = [
        u64::from(std::process::id()),
        file.as_raw_fd() as u64,
        inode,
        whole,
        pointer - start,
        len,
        id,
    ];
    let mut reserved = [0 as c_char; CU_IPC_HANDLE_SIZE];
    let numbers = body.into_iter().chain([checksum(&body)]);
    for (place, byte) in reserved.iter_mut().zip(numbers.flat_map(u64::to_le_bytes)) {
        *place = byte as c_char;
    }
    Ok(CuIpcMemHandle { reserved })
}

/// Returns the contents of a handle, or `None` if the handle was altered: the driver knows the
/// handles that it made.
fn body(handle: &CuIpcMemHandle) -> Option<Body> {
    let bytes = handle.reserved.map(|byte| byte as u8);
    let number = |at: usize| u64::from_le_bytes(bytes[8 * at..8 * at + 8].try_into().expect("8"));
    let body: Body = std::array::from_fn(number);
    (number(body.len()) == checksum(&body)).then_some(body)
}

fn checksum(body: &Body) -> u64 {
    body.iter().fold(0, |sum: u64, number| (sum ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

pub(crate) fn open(state: &mut State, handle: &CuIpcMemHandle) -> Result<u64, CuResult> {
    let context = state.current()?;
    let [process, fd, inode, whole, offset, len, _] =
        body(handle).ok_or(CuResult::CUDA_ERROR_INVALID_HANDLE)?;
    if process == u64::from(std::process::id()) {
        // Unspecified, so the fake decides: a handle is only for other processes. The code is one
        // that `cuda.h` lists.
        return Err(CuResult::CUDA_ERROR_INVALID_CONTEXT);
    }
    let file = reopen(process as u32, fd as i32);
    let file = file.map_err(|_| CuResult::CUDA_ERROR_INVALID_HANDLE)?;
    let stat = rustix::fs::fstat(&file).map_err(|_| CuResult::CUDA_ERROR_INVALID_HANDLE)?;
    if stat.st_ino != inode || stat.st_size as u64 != whole {
        return Err(CuResult::CUDA_ERROR_INVALID_HANDLE);
    }
    // `cuda.h`: "If the memory handle has already been opened by the current context, the reference
    // count on the handle is incremented by 1 and the existing device pointer is returned."
    for (at, one) in &mut state.allocations {
        if let Kind::Imported { opened, inode: of } = &mut one.kind
            && *of == inode
        {
            *opened += 1;
            return Ok(*at);
        }
    }
    let start = state.take_addresses(whole)?;
    state.pages.place(start, whole, file).map_err(|_| CuResult::CUDA_ERROR_MAP_FAILED)?;
    let (device, id) = (state.device_of(context), state.identity());
    let kind = Kind::Imported { opened: 1, inode };
    state
        .allocations
        .insert(start + offset, Allocation { len, kind, device, context, id, sync_memops: false });
    Ok(start + offset)
}

pub(crate) fn close(state: &mut State, pointer: u64) -> Result<(), CuResult> {
    let Some(Allocation { kind: Kind::Imported { opened, .. }, .. }) =
        state.allocations.get_mut(&pointer)
    else {
        return Err(CuResult::CUDA_ERROR_INVALID_VALUE);
    };
    *opened -= 1;
    if *opened == 0 {
        state.forget_imported(pointer);
    }
    Ok(())
}

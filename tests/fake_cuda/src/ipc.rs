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
    for (place, byte) in
        reserved.iter_mut().zip(body.iter().flat_map(|number| number.to_le_bytes()))
    {
        *place = byte as c_char;
    }
    Ok(CuIpcMemHandle { reserved })
}

fn body(handle: &CuIpcMemHandle) -> Body {
    let bytes = handle.reserved.map(|byte| byte as u8);
    let mut numbers = Body::default();
    for (number, bytes) in numbers.iter_mut().zip(bytes.chunks_exact(8)) {
        *number = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    }
    numbers
}

pub(crate) fn open(state: &mut State, handle: &CuIpcMemHandle) -> Result<u64, CuResult> {
    let context = state.current()?;
    let [process, fd, inode, whole, offset, len, _] = body(handle);
    if process == u64::from(std::process::id()) {
        // Unspecified, so the fake decides: a handle is only for other processes. The code is one
        // that `cuda.h` lists.
        return Err(CuResult::CUDA_ERROR_INVALID_CONTEXT);
    }
    let file = reopen(process as u32, fd as i32);
    let file = file.map_err(|_| CuResult::CUDA_ERROR_INVALID_HANDLE)?;
    let stat = rustix::fs::fstat(&file).map_err(|_| CuResult::CUDA_ERROR_INVALID_HANDLE)?;
    let inside = offset.checked_add(len).is_some_and(|end| end <= whole);
    if stat.st_ino != inode || stat.st_size as u64 != whole || !inside {
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

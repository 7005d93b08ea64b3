//! The functions of `libnrt.so.1`, the Neuron runtime.

use std::{
    ffi::{c_char, c_int, c_void},
    os::fd::IntoRawFd,
    ptr,
};

use crate::state::{self, Block, MEMORY, State};
use hmem_fake_common::page;

const SUCCESS: c_int = 0;
const FAILURE: c_int = 1;
const INVALID: c_int = 2;
const INVALID_HANDLE: c_int = 3;
const RESOURCE: c_int = 4;
const UNINITIALIZED: c_int = 13;

/// Counts a call of the function `name`. Returns the injected fault if there is one, and runs `act`
/// otherwise.
fn call(name: &'static str, act: impl FnOnce(&mut State) -> c_int) -> c_int {
    state::with(|state| match state.calls.enter(name) {
        Some(code) => code,
        None => act(state),
    })
}

fn block_of(state: &State, tensor: *const c_void) -> Option<Block> {
    let base = state.tensors.get(&tensor.addr())?;
    state.holder(*base, 1)
}

/// # Safety
/// The caller must follow the rules that `nrt.h` states for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nrt_get_visible_nc_count(count: *mut u32) -> c_int {
    call("nrt_get_visible_nc_count", |state| {
        // SAFETY: the caller passes a writable out parameter.
        unsafe { *count = state.profile.devices };
        SUCCESS
    })
}

/// # Safety
/// The caller must follow the rules that `nrt.h` states for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nrt_init(framework: c_int, _: *const c_char, _: *const c_char) -> c_int {
    call("nrt_init", |state| {
        if framework != 1 {
            return INVALID;
        }
        if std::mem::replace(&mut state.running, true) { FAILURE } else { SUCCESS }
    })
}

/// # Safety
/// The caller must follow the rules that `nrt.h` states for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nrt_tensor_allocate(
    placement: c_int,
    core: c_int,
    size: usize,
    _: *const c_char,
    tensor: *mut *mut c_void,
) -> c_int {
    call("nrt_tensor_allocate", |state| {
        if !state.running {
            return UNINITIALIZED;
        }
        if placement != 0 || size == 0 || core < 0 || core.unsigned_abs() >= state.profile.devices {
            return INVALID;
        }
        let Some(block) = state.allocate(size as u64) else { return RESOURCE };
        let handle = state.handle();
        state.tensors.insert(handle, block.base);
        // SAFETY: the caller passes a writable out parameter.
        unsafe { *tensor = ptr::without_provenance_mut(handle) };
        SUCCESS
    })
}

/// # Safety
/// The caller must follow the rules that `nrt.h` states for this function.
///
/// # Panics
/// Panics for a tensor that is not live, for which the real library's behaviour is undefined.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nrt_tensor_free(tensor: *mut *mut c_void) {
    state::with(|state| {
        state.calls.enter("nrt_tensor_free");
        // SAFETY: the caller passes a pointer to its tensor.
        let handle = unsafe { std::mem::replace(&mut *tensor, ptr::null_mut()) };
        let base = state.tensors.remove(&handle.addr()).expect("a live tensor");
        assert!(state.free(base), "a live allocation");
    });
}

/// # Safety
/// The caller must follow the rules that `nrt.h` states for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nrt_tensor_get_va(tensor: *const c_void) -> *mut c_void {
    state::with(|state| {
        // As in the kernel driver, only whole pages are mapped.
        let block = block_of(state, tensor).filter(|block| block.len.is_multiple_of(page()));
        let failed = state.calls.enter("nrt_tensor_get_va").is_some();
        match block {
            Some(block) if !failed => ptr::with_exposed_provenance_mut(block.base as usize),
            _ => ptr::null_mut(),
        }
    })
}

/// # Safety
/// The caller must follow the rules that `nrt.h` states for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nrt_tensor_get_size(tensor: *const c_void) -> usize {
    state::with(|state| {
        state.calls.enter("nrt_tensor_get_size");
        block_of(state, tensor).map_or(0, |block| block.len as usize)
    })
}

/// Returns the address at which the runtime accesses `size` bytes of a tensor, if they are inside
/// it.
fn bytes(
    state: &State,
    tensor: *const c_void,
    offset: usize,
    size: usize,
) -> Result<*mut u8, c_int> {
    let block = block_of(state, tensor).ok_or(INVALID_HANDLE)?;
    let end = offset.checked_add(size).ok_or(INVALID)?;
    if end as u64 > block.len {
        Err(INVALID)
    } else {
        Ok(state.pages.at(block.base + offset as u64))
    }
}

/// # Safety
/// The caller must follow the rules that `nrt.h` states for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nrt_tensor_read(
    tensor: *const c_void,
    buffer: *mut c_void,
    offset: usize,
    size: usize,
) -> c_int {
    call("nrt_tensor_read", |state| match bytes(state, tensor, offset, size) {
        Ok(from) => {
            // SAFETY: `bytes` checked the range of the tensor, and the caller's buffer has `size`
            // bytes.
            unsafe { ptr::copy_nonoverlapping(from, buffer.cast(), size) };
            SUCCESS
        }
        Err(code) => code,
    })
}

/// # Safety
/// The caller must follow the rules that `nrt.h` states for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nrt_tensor_write(
    tensor: *mut c_void,
    buffer: *const c_void,
    offset: usize,
    size: usize,
) -> c_int {
    call("nrt_tensor_write", |state| match bytes(state, tensor, offset, size) {
        Ok(to) => {
            // SAFETY: `bytes` checked the range of the tensor, and the caller's buffer has `size`
            // bytes.
            unsafe { ptr::copy_nonoverlapping(buffer.cast(), to, size) };
            SUCCESS
        }
        Err(code) => code,
    })
}

/// Exports the pages of a range. As in the kernel driver, the dma-buf begins with the first page.
fn export(state: &mut State, va: u64, size: u64, fd: *mut c_int) -> c_int {
    let start = va & !(page() - 1);
    let Some(len) =
        (va - start).checked_add(size).and_then(|len| len.checked_next_multiple_of(page()))
    else {
        return INVALID;
    };
    if !state.running || state.holder(start, len).is_none() {
        return INVALID;
    }
    match state.pages.export(start, len) {
        Ok(Some(file)) => {
            // SAFETY: the caller passes a writable out parameter.
            unsafe { *fd = file.into_raw_fd() };
            SUCCESS
        }
        Ok(None) | Err(_) => RESOURCE,
    }
}

/// # Safety
/// The caller must follow the rules that `nrt.h` states for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nrt_get_dmabuf_fd(va: u64, size: u64, fd: *mut c_int) -> c_int {
    call("nrt_get_dmabuf_fd", |state| {
        // This function cannot return an offset in the page.
        if va.is_multiple_of(page()) { export(state, va, size, fd) } else { INVALID }
    })
}

/// # Safety
/// The arguments must be those that libfabric's `hmem_neuron.c` passes: `fd` and `offset`
/// must be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nrt_get_dmabuf_fd_v2(
    va: u64,
    size: u64,
    fd: *mut c_int,
    offset: *mut u64,
) -> c_int {
    call("nrt_get_dmabuf_fd_v2", |state| {
        // SAFETY: the caller passes a writable out parameter.
        unsafe { *offset = va % page() };
        export(state, va, size, fd)
    })
}

/// # Safety
/// The caller must follow the rules that `nrt.h` states for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nrt_get_vnc_memory_stats(
    core: u32,
    stats: *mut [usize; 2],
    size: usize,
    written: *mut usize,
) -> c_int {
    call("nrt_get_vnc_memory_stats", |state| {
        if !state.running {
            return UNINITIALIZED;
        }
        if core >= state.profile.devices || size < size_of::<[usize; 2]>() {
            return INVALID;
        }
        // SAFETY: the caller passes writable out parameters. The first has `size` bytes.
        unsafe {
            *stats = [0, MEMORY as usize];
            *written = size_of::<[usize; 2]>();
        }
        SUCCESS
    })
}

pub(crate) fn symbol(name: &str) -> Option<*const ()> {
    Some(match name {
        "nrt_get_visible_nc_count" => nrt_get_visible_nc_count as *const (),
        "nrt_init" => nrt_init as *const (),
        "nrt_tensor_allocate" => nrt_tensor_allocate as *const (),
        "nrt_tensor_free" => nrt_tensor_free as *const (),
        "nrt_tensor_get_va" => nrt_tensor_get_va as *const (),
        "nrt_tensor_get_size" => nrt_tensor_get_size as *const (),
        "nrt_tensor_read" => nrt_tensor_read as *const (),
        "nrt_tensor_write" => nrt_tensor_write as *const (),
        "nrt_get_dmabuf_fd" => nrt_get_dmabuf_fd as *const (),
        "nrt_get_dmabuf_fd_v2" => nrt_get_dmabuf_fd_v2 as *const (),
        "nrt_get_vnc_memory_stats" => nrt_get_vnc_memory_stats as *const (),
        _ => return None,
    })
}

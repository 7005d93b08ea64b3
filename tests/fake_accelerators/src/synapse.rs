//! The functions of `libSynapse.so` and `libhl-thunk.so`.

use std::{
    ffi::{c_char, c_int, c_void},
    os::fd::IntoRawFd,
    ptr,
};

use crate::state::{self, Copy, MEMORY, State};
use hmem_fake_common::page;

const SUCCESS: c_int = 0;
const INVALID_ARGUMENT: c_int = 1;
const OUT_OF_DEVICE_MEMORY: c_int = 4;
const DEVICE_ALREADY_ACQUIRED: c_int = 20;
const MAPPING_NOT_FOUND: c_int = 34;

/// The kernel driver's fd that `synDeviceGetInfoV2` reports. No file is open under this number.
const DEVICE_FD: u32 = 1 << 20;

/// `synDeviceInfoV2` of `synapse_api.h`.
#[repr(C)]
#[derive(Debug)]
pub struct DeviceInfo {
    sram_base: u64,
    dram_base: u64,
    sram_size: u32,
    dram_size: u64,
    tpc_enabled_mask: u64,
    dram_enabled: u8,
    device_id: u32,
    fd: u32,
    device_type: c_int,
    device_index: u8,
    global_hbm_base: u64,
}

fn call(name: &'static str, act: impl FnOnce(&mut State) -> c_int) -> c_int {
    state::with(|state| match state.calls.enter(name) {
        Some(code) => code,
        None => act(state),
    })
}

/// Counts a call of the function `name`. Returns the injected fault if there is one. Runs `act`
/// otherwise, if the application has acquired `device`.
fn call_on(name: &'static str, device: u32, act: impl FnOnce(&mut State) -> c_int) -> c_int {
    call(name, |state| if state.running && device == 0 { act(state) } else { INVALID_ARGUMENT })
}

/// # Safety
/// The caller must follow the rules that `synapse_api.h` states for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn synInitialize() -> c_int {
    call("synInitialize", |_| SUCCESS)
}

/// # Safety
/// The caller must follow the rules that `synapse_api.h` states for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn synDeviceGetCount(count: *mut u32) -> c_int {
    call("synDeviceGetCount", |state| {
        // SAFETY: the caller passes a writable out parameter.
        unsafe { *count = state.profile.devices };
        SUCCESS
    })
}

/// # Safety
/// The caller must follow the rules that `synapse_api.h` states for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn synDeviceAcquire(device: *mut u32, _: *const c_char) -> c_int {
    call("synDeviceAcquire", |state| {
        if std::mem::replace(&mut state.running, true) {
            return DEVICE_ALREADY_ACQUIRED;
        }
        // SAFETY: the caller passes a writable out parameter.
        unsafe { *device = 0 };
        SUCCESS
    })
}

/// # Safety
/// The caller must follow the rules that `synapse_api.h` states for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn synDeviceGetInfoV2(device: u32, info: *mut DeviceInfo) -> c_int {
    call_on("synDeviceGetInfoV2", device, |state| {
        let described = DeviceInfo {
            sram_base: 0,
            dram_base: state.pages.first(),
            sram_size: 0,
            dram_size: MEMORY,
            tpc_enabled_mask: 0,
            dram_enabled: 1,
            device_id: 0,
            fd: DEVICE_FD,
            device_type: state.profile.device_type,
            device_index: 0,
            global_hbm_base: state.pages.first(),
        };
        // SAFETY: the caller passes a writable out parameter.
        unsafe { ptr::write(info, described) };
        SUCCESS
    })
}

/// # Safety
/// The caller must follow the rules that `synapse_api.h` states for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn synDeviceMalloc(
    device: u32,
    size: u64,
    _: u64,
    flags: u32,
    buffer: *mut u64,
) -> c_int {
    call_on("synDeviceMalloc", device, |state| {
        if size == 0 || flags != 0 {
            return INVALID_ARGUMENT;
        }
        let Some(block) = state.allocate(size) else { return OUT_OF_DEVICE_MEMORY };
        // SAFETY: the caller passes a writable out parameter.
        unsafe { *buffer = block.base };
        SUCCESS
    })
}

/// # Safety
/// The caller must follow the rules that `synapse_api.h` states for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn synDeviceFree(device: u32, buffer: u64, _: u32) -> c_int {
    call_on(
        "synDeviceFree",
        device,
        |state| {
            if state.free(buffer) { SUCCESS } else { INVALID_ARGUMENT }
        },
    )
}

/// # Safety
/// The caller must follow the rules that `synapse_api.h` states for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn synHostMalloc(
    device: u32,
    size: u64,
    _: u32,
    buffer: *mut *mut c_void,
) -> c_int {
    call_on("synHostMalloc", device, |state| {
        let bytes = vec![0u8; size as usize].into_boxed_slice();
        let bytes = Box::into_raw(bytes).cast::<c_void>();
        state.host.insert(bytes.expose_provenance(), size as usize);
        // SAFETY: the caller passes a writable out parameter.
        unsafe { *buffer = bytes };
        SUCCESS
    })
}

/// # Safety
/// The caller must follow the rules that `synapse_api.h` states for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn synHostFree(device: u32, buffer: *const c_void, _: u32) -> c_int {
    call_on("synHostFree", device, |state| {
        let Some(len) = state.host.remove(&buffer.addr()) else { return INVALID_ARGUMENT };
        let bytes = ptr::with_exposed_provenance_mut::<u8>(buffer.addr());
        // SAFETY: `synHostMalloc` made a box of this length, which was still in the table.
        drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(bytes, len)) });
        SUCCESS
    })
}

/// # Safety
/// The caller must follow the rules that `synapse_api.h` states for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn synStreamCreateGeneric(
    stream: *mut *mut c_void,
    device: u32,
    _: u32,
) -> c_int {
    call_on("synStreamCreateGeneric", device, |state| {
        let handle = state.handle();
        state.streams.insert(handle, Vec::new());
        // SAFETY: the caller passes a writable out parameter.
        unsafe { *stream = ptr::without_provenance_mut(handle) };
        SUCCESS
    })
}

/// # Safety
/// The caller must follow the rules that `synapse_api.h` states for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn synStreamDestroy(stream: *mut c_void) -> c_int {
    call("synStreamDestroy", |state| match state.streams.remove(&stream.addr()) {
        Some(_) => SUCCESS,
        None => INVALID_ARGUMENT,
    })
}

/// # Safety
/// The caller must follow the rules that `synapse_api.h` states for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn synStreamSynchronize(stream: *mut c_void) -> c_int {
    call("synStreamSynchronize", |state| {
        let Some(copies) = state.streams.get_mut(&stream.addr()) else { return INVALID_ARGUMENT };
        for copy in std::mem::take(copies) {
            // SAFETY: both sides were checked when the copy was enqueued.
            unsafe { ptr::copy_nonoverlapping(copy.from, copy.to, copy.len) };
        }
        SUCCESS
    })
}

/// Returns a pointer to bytes of a live buffer of `synHostMalloc`; `None` for other host memory.
fn host_bytes(state: &State, address: u64, len: u64) -> Option<*mut u8> {
    let (start, size) = state.host.range(..=address as usize).next_back()?;
    let end = (*start + *size) as u64;
    (address + len <= end).then(|| ptr::with_exposed_provenance_mut(address as usize))
}

/// # Safety
/// The caller must follow the rules that `synapse_api.h` states for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn synMemCopyAsync(
    stream: *mut c_void,
    from: u64,
    len: u64,
    to: u64,
    direction: c_int,
) -> c_int {
    call("synMemCopyAsync", |state| {
        let device_bytes = |address| state.holder(address, len).map(|_| state.pages.at(address));
        let (from, to) = match direction {
            0 => (host_bytes(state, from, len), device_bytes(to)),
            1 => (device_bytes(from), host_bytes(state, to, len)),
            _ => return INVALID_ARGUMENT,
        };
        let (Some(from), Some(to)) = (from, to) else { return MAPPING_NOT_FOUND };
        let Some(copies) = state.streams.get_mut(&stream.addr()) else { return INVALID_ARGUMENT };
        copies.push(Copy { from, to, len: len as usize });
        SUCCESS
    })
}

/// # Safety
/// The caller must follow the rules that `hlthunk.h` states for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_device_mapped_memory_export_dmabuf_fd(
    fd: c_int,
    address: u64,
    size: u64,
    offset: u64,
    flags: u32,
) -> c_int {
    call("hlthunk_device_mapped_memory_export_dmabuf_fd", |state| {
        let known = fd == DEVICE_FD.cast_signed() && address == state.pages.first();
        let wanted = libc::O_RDWR | libc::O_CLOEXEC;
        let whole = size.is_multiple_of(page()) && offset.is_multiple_of(page());
        let start = address.wrapping_add(offset);
        if !known || !whole || flags.cast_signed() != wanted || state.holder(start, size).is_none()
        {
            return -libc::EINVAL;
        }
        match state.pages.export(start, size) {
            Ok(Some(file)) => file.into_raw_fd(),
            Ok(None) => -libc::EBUSY,
            Err(error) => -error.raw_os_error(),
        }
    })
}

/// # Safety
/// The caller must follow the rules that `hlthunk.h` states for this function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_get_pci_bus_id_from_fd(
    fd: c_int,
    text: *mut c_char,
    len: c_int,
) -> c_int {
    const BUS_ID: &[u8] = b"0000:19:00.0\n\0";
    call("hlthunk_get_pci_bus_id_from_fd", |_| {
        if fd != DEVICE_FD.cast_signed() || (len as usize) < BUS_ID.len() {
            return -libc::EINVAL;
        }
        // SAFETY: the caller's buffer has `len` bytes.
        unsafe { ptr::copy_nonoverlapping(BUS_ID.as_ptr(), text.cast(), BUS_ID.len()) };
        0
    })
}

pub(crate) fn symbol(name: &str) -> Option<*const ()> {
    Some(match name {
        "synInitialize" => synInitialize as *const (),
        "synDeviceGetCount" => synDeviceGetCount as *const (),
        "synDeviceAcquire" => synDeviceAcquire as *const (),
        "synDeviceGetInfoV2" => synDeviceGetInfoV2 as *const (),
        "synDeviceMalloc" => synDeviceMalloc as *const (),
        "synDeviceFree" => synDeviceFree as *const (),
        "synHostMalloc" => synHostMalloc as *const (),
        "synHostFree" => synHostFree as *const (),
        "synStreamCreateGeneric" => synStreamCreateGeneric as *const (),
        "synStreamDestroy" => synStreamDestroy as *const (),
        "synStreamSynchronize" => synStreamSynchronize as *const (),
        "synMemCopyAsync" => synMemCopyAsync as *const (),
        "hlthunk_device_mapped_memory_export_dmabuf_fd" => {
            hlthunk_device_mapped_memory_export_dmabuf_fd as *const ()
        }
        "hlthunk_get_pci_bus_id_from_fd" => hlthunk_get_pci_bus_id_from_fd as *const (),
        _ => return None,
    })
}

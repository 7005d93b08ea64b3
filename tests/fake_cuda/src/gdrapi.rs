//! The functions of `libgdrapi.so.2` that hmem needs to load it, so that this library can replace
//! it. In the fake, pinning fails with ENODEV.

use std::ffi::{c_int, c_ulong, c_void};

use hmem_iface_cuda::gdrcopy::GdrHandle;

const ENODEV: c_int = 19;

#[unsafe(no_mangle)]
extern "C" fn gdr_open() -> usize {
    1
}

#[unsafe(no_mangle)]
extern "C" fn gdr_close(_: usize) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn gdr_pin_buffer(
    _: usize,
    _: c_ulong,
    _: usize,
    _: u64,
    _: u32,
    _: *mut GdrHandle,
) -> c_int {
    ENODEV
}

#[unsafe(no_mangle)]
extern "C" fn gdr_unpin_buffer(_: usize, _: GdrHandle) -> c_int {
    ENODEV
}

#[unsafe(no_mangle)]
extern "C" fn gdr_map(_: usize, _: GdrHandle, _: *mut *mut c_void, _: usize) -> c_int {
    ENODEV
}

#[unsafe(no_mangle)]
extern "C" fn gdr_unmap(_: usize, _: GdrHandle, _: *mut c_void, _: usize) -> c_int {
    ENODEV
}

#[unsafe(no_mangle)]
extern "C" fn gdr_copy_to_mapping(
    _: GdrHandle,
    _: *mut c_void,
    _: *const c_void,
    _: usize,
) -> c_int {
    ENODEV
}

#[unsafe(no_mangle)]
extern "C" fn gdr_copy_from_mapping(
    _: GdrHandle,
    _: *mut c_void,
    _: *const c_void,
    _: usize,
) -> c_int {
    ENODEV
}

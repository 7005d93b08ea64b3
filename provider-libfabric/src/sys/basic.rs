//! Layouts that all objects and requests share, under the rules of [`layout`](super::layout).

#![allow(missing_docs, reason = "the names are those of libfabric's headers and man pages")]
#![allow(missing_debug_implementations, reason = "the structs are C data with pointers")]
#![allow(non_camel_case_types, reason = "the names are those of libfabric's headers and man pages")]

use std::ffi::{c_int, c_void};

/// Index of an endpoint in an address vector.
pub type fi_addr_t = u64;

/// A function pointer that this crate declares only for its place in a table.
pub type UnusedOperation = *const c_void;

/// `struct iovec` of `<sys/uio.h>`.
#[repr(C)]
#[derive(Debug)]
pub struct iovec {
    pub iov_base: *const c_void,
    pub iov_len: usize,
}

/// First field of every libfabric object.
#[repr(C)]
pub struct fid {
    pub fclass: usize,
    pub context: *mut c_void,
    pub ops: *const fi_ops,
}

/// Table of the functions that every libfabric object has.
#[repr(C)]
pub struct fi_ops {
    pub size: usize,
    pub close: Option<unsafe extern "C" fn(*mut fid) -> c_int>,
    pub bind: Option<unsafe extern "C" fn(*mut fid, *mut fid, u64) -> c_int>,
    pub control: Option<unsafe extern "C" fn(*mut fid, c_int, *mut c_void) -> c_int>,
}

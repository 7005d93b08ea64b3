//! Layouts of endpoints and their requests, under the rules of [`layout`](super::layout).

#![allow(missing_docs, reason = "the names are those of libfabric's headers and man pages")]
#![allow(missing_debug_implementations, reason = "the structs are C data with pointers")]
#![allow(non_camel_case_types, reason = "the names are those of libfabric's headers and man pages")]

use std::ffi::{c_int, c_void};

use super::basic::{UnusedOperation, fi_addr_t, fid, iovec};

/// libfabric's endpoint object, declared up to `atomic`.
#[repr(C)]
pub struct fid_ep {
    pub fid: fid,
    pub ops: *const fi_ops_ep,
    pub cm: *const fi_ops_cm,
    pub msg: *const fi_ops_msg,
    pub rma: *const fi_ops_rma,
    pub tagged: *const fi_ops_tagged,
    pub atomic: *const fi_ops_atomic,
}

/// Table of an endpoint's own functions, declared up to `cancel`.
#[repr(C)]
pub struct fi_ops_ep {
    pub size: usize,
    pub cancel: Option<unsafe extern "C" fn(*mut fid, *mut c_void) -> isize>,
}

/// Table of an endpoint's connection and naming functions, declared up to `getname`.
#[repr(C)]
pub struct fi_ops_cm {
    pub size: usize,
    pub setname: UnusedOperation,
    pub getname: Option<unsafe extern "C" fn(*mut fid, *mut c_void, *mut usize) -> c_int>,
}

/// Signature of a function that posts the request in a struct, with flags.
pub type PostFunction<M> = unsafe extern "C" fn(*mut fid_ep, *const M, u64) -> isize;

/// Table of an endpoint's functions for messages, declared up to `sendmsg`.
#[repr(C)]
pub struct fi_ops_msg {
    pub size: usize,
    pub recv: UnusedOperation,
    pub recvv: UnusedOperation,
    pub recvmsg: Option<PostFunction<fi_msg>>,
    pub send: UnusedOperation,
    pub sendv: UnusedOperation,
    pub sendmsg: Option<PostFunction<fi_msg>>,
}

/// Table of an endpoint's functions for tagged messages, declared up to `sendmsg`.
#[repr(C)]
pub struct fi_ops_tagged {
    pub size: usize,
    pub recv: UnusedOperation,
    pub recvv: UnusedOperation,
    pub recvmsg: Option<PostFunction<fi_msg_tagged>>,
    pub send: UnusedOperation,
    pub sendv: UnusedOperation,
    pub sendmsg: Option<PostFunction<fi_msg_tagged>>,
}

/// A message to send or a buffer to receive into.
#[repr(C)]
pub struct fi_msg {
    pub msg_iov: *const iovec,
    pub desc: *mut *mut c_void,
    pub iov_count: usize,
    pub addr: fi_addr_t,
    pub context: *mut c_void,
    pub data: u64,
}

/// A tagged message to send or a buffer to receive into.
#[repr(C)]
pub struct fi_msg_tagged {
    pub msg_iov: *const iovec,
    pub desc: *mut *mut c_void,
    pub iov_count: usize,
    pub addr: fi_addr_t,
    pub tag: u64,
    pub ignore: u64,
    pub context: *mut c_void,
    pub data: u64,
}

/// Signature of `fi_read` and `fi_write`: endpoint, buffer, length, descriptor, peer, remote
/// address, key, context.
pub type RmaFunction<B> = unsafe extern "C" fn(
    *mut fid_ep,
    B,
    usize,
    *mut c_void,
    fi_addr_t,
    u64,
    u64,
    *mut c_void,
) -> isize;

/// Table of an endpoint's RMA functions, declared up to `writemsg`.
#[repr(C)]
pub struct fi_ops_rma {
    pub size: usize,
    pub read: Option<RmaFunction<*mut c_void>>,
    pub readv: UnusedOperation,
    pub readmsg: Option<PostFunction<fi_msg_rma>>,
    pub write: Option<RmaFunction<*const c_void>>,
    pub writev: UnusedOperation,
    pub writemsg: Option<PostFunction<fi_msg_rma>>,
}

/// A range of a peer's memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct fi_rma_iov {
    pub addr: u64,
    pub len: usize,
    pub key: u64,
}

/// An RMA read or write.
#[repr(C)]
pub struct fi_msg_rma {
    pub msg_iov: *const iovec,
    pub desc: *mut *mut c_void,
    pub iov_count: usize,
    pub addr: fi_addr_t,
    pub rma_iov: *const fi_rma_iov,
    pub rma_iov_count: usize,
    pub context: *mut c_void,
    pub data: u64,
}

/// Signature of a function that asks if an endpoint has an atomic: datatype, operation, and a place
/// for the largest number of elements.
pub type ValidFunction = unsafe extern "C" fn(*mut fid_ep, c_int, c_int, *mut usize) -> c_int;

/// Table of an endpoint's functions for atomics.
#[repr(C)]
pub struct fi_ops_atomic {
    pub size: usize,
    pub write: UnusedOperation,
    pub writev: UnusedOperation,
    pub writemsg: Option<PostFunction<fi_msg_atomic>>,
    pub inject: UnusedOperation,
    pub readwrite: UnusedOperation,
    pub readwritev: UnusedOperation,
    pub readwritemsg: Option<
        unsafe extern "C" fn(
            *mut fid_ep,
            *const fi_msg_atomic,
            *mut fi_ioc,
            *mut *mut c_void,
            usize,
            u64,
        ) -> isize,
    >,
    pub compwrite: UnusedOperation,
    pub compwritev: UnusedOperation,
    pub compwritemsg: Option<
        unsafe extern "C" fn(
            *mut fid_ep,
            *const fi_msg_atomic,
            *const fi_ioc,
            *mut *mut c_void,
            usize,
            *mut fi_ioc,
            *mut *mut c_void,
            usize,
            u64,
        ) -> isize,
    >,
    pub writevalid: Option<ValidFunction>,
    pub readwritevalid: Option<ValidFunction>,
    pub compwritevalid: Option<ValidFunction>,
}

/// Elements of local memory, for atomics.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fi_ioc {
    pub addr: *mut c_void,
    pub count: usize,
}

/// Elements of a peer's memory, for atomics.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fi_rma_ioc {
    pub addr: u64,
    pub count: usize,
    pub key: u64,
}

/// An atomic.
#[repr(C)]
pub struct fi_msg_atomic {
    pub msg_iov: *const fi_ioc,
    pub desc: *mut *mut c_void,
    pub iov_count: usize,
    pub addr: fi_addr_t,
    pub rma_iov: *const fi_rma_ioc,
    pub rma_iov_count: usize,
    pub datatype: c_int,
    pub op: c_int,
    pub context: *mut c_void,
    pub data: u64,
}

//! The functions of `libnrt.so.1` that this crate calls.
//!
//! The symbols have the version `NRT_2.0.0`. `nrt_get_dmabuf_fd_v2`, which libfabric uses from 2.5
//! on, and `nrt_get_vnc_memory_stats` are in newer libraries only.

use std::ffi::{c_char, c_int, c_void};

use hmem_core::IfaceKind;

/// `NRT_STATUS`
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NrtStatus(pub c_int);

macro_rules! statuses {
    ($($name:ident = $value:literal,)+) => {
        impl NrtStatus {
            $(#[doc = concat!("`", stringify!($name), "`")] pub const $name: Self = Self($value);)+

            /// Returns the name of the code in `nrt_status.h`, or `None` for an unknown code.
            #[must_use]
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some(stringify!($name)),)+
                    _ => None,
                }
            }
        }
    };
}

statuses! {
    NRT_SUCCESS = 0,
    NRT_FAILURE = 1,
    NRT_INVALID = 2,
    NRT_INVALID_HANDLE = 3,
    NRT_RESOURCE = 4,
    NRT_TIMEOUT = 5,
    NRT_HW_ERROR = 6,
    NRT_QUEUE_FULL = 7,
    NRT_LOAD_NOT_ENOUGH_NC = 9,
    NRT_UNSUPPORTED_NEFF_VERSION = 10,
    NRT_FAIL_HOST_MEM_ALLOC = 11,
    NRT_UNINITIALIZED = 13,
    NRT_CLOSED = 14,
    NRT_QUEUE_EMPTY = 15,
    NRT_EXEC_NC_BUSY = 1005,
}

/// `NRT_TENSOR_PLACEMENT_DEVICE`
pub const NRT_TENSOR_PLACEMENT_DEVICE: c_int = 0;
/// `NRT_FRAMEWORK_TYPE_NO_FW`
pub const NRT_FRAMEWORK_TYPE_NO_FW: c_int = 1;

/// `nrt_vnc_memory_stats_t`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MemoryStats {
    /// Device memory in use, in bytes.
    pub bytes_used: usize,
    /// Total device memory in bytes.
    pub bytes_limit: usize,
}

const _: () = assert!(size_of::<NrtStatus>() == 4);
const _: () = assert!(size_of::<MemoryStats>() == 16);

hmem_iface_announced::function_table! {
    /// Table of the functions of `libnrt.so.1` that this crate calls.
    library "libnrt.so.1" of IfaceKind::NEURON,
        "install aws-neuronx-runtime-lib, or name its library in HMEM_NEURON_LIBRARY (in Rust: \
         Neuron::builder().library(path))";
    required {
        /// `nrt_get_visible_nc_count(count)`
        get_visible_nc_count: nrt_get_visible_nc_count = fn(*mut u32) -> NrtStatus;
        /// `nrt_tensor_allocate(placement, core, size, name, tensor)`
        tensor_allocate: nrt_tensor_allocate =
            fn(c_int, c_int, usize, *const c_char, *mut *mut c_void) -> NrtStatus;
        /// `nrt_tensor_free(tensor)`
        tensor_free: nrt_tensor_free = fn(*mut *mut c_void) -> ();
        /// `nrt_tensor_get_va(tensor)`
        tensor_get_va: nrt_tensor_get_va = fn(*const c_void) -> *mut c_void;
        /// `nrt_tensor_get_size(tensor)`
        tensor_get_size: nrt_tensor_get_size = fn(*const c_void) -> usize;
        /// `nrt_tensor_read(tensor, buffer, offset, size)`
        tensor_read: nrt_tensor_read = fn(*const c_void, *mut c_void, usize, usize) -> NrtStatus;
        /// `nrt_tensor_write(tensor, buffer, offset, size)`
        tensor_write: nrt_tensor_write = fn(*mut c_void, *const c_void, usize, usize) -> NrtStatus;
        /// `nrt_init(framework, framework_version, abstraction_version)`
        init: nrt_init = fn(c_int, *const c_char, *const c_char) -> NrtStatus;
    }
    optional {
        /// `nrt_get_dmabuf_fd(address, size, fd)`
        get_dmabuf_fd: nrt_get_dmabuf_fd = fn(u64, u64, *mut c_int) -> NrtStatus;
        /// `nrt_get_dmabuf_fd_v2(address, size, fd, offset)`
        get_dmabuf_fd_v2: nrt_get_dmabuf_fd_v2 = fn(u64, u64, *mut c_int, *mut u64) -> NrtStatus;
        /// `nrt_get_vnc_memory_stats(core, stats, size_in, size_out)`
        get_vnc_memory_stats: nrt_get_vnc_memory_stats =
            fn(u32, *mut MemoryStats, usize, *mut usize) -> NrtStatus;
    }
}

//! The functions of `libnrt.so.1` that this crate calls.
//!
//! The symbols have the version `NRT_2.0.0`. `nrt_get_dmabuf_fd_v2`, which libfabric uses from 2.5
//! on, and `nrt_get_vnc_memory_stats` are in newer libraries only.

use std::ffi::{c_char, c_int, c_void};

use hmem_core::IfaceKind;

hmem_core::c_enum! {
    /// Status code of the runtime (`NRT_STATUS`).
    NrtStatus(c_int) {
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
}

/// Argument of `nrt_tensor_allocate`: the tensor is in device memory.
pub const NRT_TENSOR_PLACEMENT_DEVICE: c_int = 0;
/// Argument of `nrt_init`: the application uses no machine-learning framework.
pub const NRT_FRAMEWORK_TYPE_NO_FW: c_int = 1;

/// Memory statistics of a NeuronCore (`nrt_vnc_memory_stats_t`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MemoryStats {
    /// Device memory in use, in bytes.
    pub bytes_used: usize,
    /// Total device memory in bytes.
    pub bytes_limit: usize,
}

const _: () = assert!(size_of::<MemoryStats>() == 16);

hmem_core::function_table! {
    /// Table of the functions of `libnrt.so.1` that this crate calls.
    // SAFETY: the vendor supports loading its library in any process. The signatures are those of
    // the vendor's headers.
    unsafe Functions {
        library: "libnrt.so.1",
        variable: "HMEM_NEURON_LIBRARY",
        iface: IfaceKind::NEURON,
        not_loaded: "install aws-neuronx-runtime-lib, or name its library in HMEM_NEURON_LIBRARY \
             (in Rust: Neuron::builder().library(path))",
        lacks_symbol: "the library has no such symbol: it is not libnrt.so.1, or too old",
    }
    required {
        get_visible_nc_count: nrt_get_visible_nc_count(*mut u32) -> NrtStatus;
        /// Allocates a tensor: `nrt_tensor_allocate(placement, core, size, name, tensor)`.
        tensor_allocate: nrt_tensor_allocate(
            c_int, c_int, usize, *const c_char, *mut *mut c_void
        ) -> NrtStatus;
        tensor_free: nrt_tensor_free(*mut *mut c_void) -> ();
        /// Returns the address of a tensor, or null if the tensor has none:
        /// `nrt_tensor_get_va(tensor)`.
        tensor_get_va: nrt_tensor_get_va(*const c_void) -> *mut c_void;
        tensor_get_size: nrt_tensor_get_size(*const c_void) -> usize;
        /// Copies from a tensor to host memory: `nrt_tensor_read(tensor, buffer, offset, size)`.
        tensor_read: nrt_tensor_read(*const c_void, *mut c_void, usize, usize) -> NrtStatus;
        /// Copies from host memory to a tensor: `nrt_tensor_write(tensor, buffer, offset, size)`.
        tensor_write: nrt_tensor_write(*mut c_void, *const c_void, usize, usize) -> NrtStatus;
        /// Starts the runtime: `nrt_init(framework, framework_version, abstraction_version)`.
        init: nrt_init(c_int, *const c_char, *const c_char) -> NrtStatus;
    }
    optional {
        /// Exports a range as a dma-buf: `nrt_get_dmabuf_fd(address, size, fd)`.
        get_dmabuf_fd: nrt_get_dmabuf_fd(u64, u64, *mut c_int) -> NrtStatus;
        /// Exports a range as a dma-buf and returns the offset of the range in it:
        /// `nrt_get_dmabuf_fd_v2(address, size, fd, offset)`.
        get_dmabuf_fd_v2: nrt_get_dmabuf_fd_v2(u64, u64, *mut c_int, *mut u64) -> NrtStatus;
        /// Reads the memory statistics of a NeuronCore:
        /// `nrt_get_vnc_memory_stats(core, stats, size_in, size_out)`.
        get_vnc_memory_stats: nrt_get_vnc_memory_stats(
            u32, *mut MemoryStats, usize, *mut usize
        ) -> NrtStatus;
    }
}

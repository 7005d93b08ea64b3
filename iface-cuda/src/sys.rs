//! Function table of libcuda.so.1, and layouts and constants of `cuda.h`, written by hand.
//!
//! The module is public, so that an application or test can pass other functions with
//! [`Functions::from_lookup`].
//!
//! ```
//! use hmem_iface_cuda::sys::{CuResult, Functions};
//!
//! // SAFETY: the lookup returns no function, so no signature can be wrong.
//! let error = unsafe { Functions::from_lookup(|_| None) }.unwrap_err();
//! assert_eq!(error.context_value("symbol"), Some(Functions::SYMBOLS[0]));
//! assert_eq!(CuResult::CUDA_ERROR_NO_DEVICE.name(), Some("CUDA_ERROR_NO_DEVICE"));
//! ```
//!
//! Safe code cannot replace a function of a table. With a `cuStreamSynchronize` that does not wait,
//! a copy would return before the driver has written its last byte.
//!
//! ```compile_fail,E0616
//! use hmem_iface_cuda::sys::{CuResult, CuStream, Functions};
//!
//! unsafe extern "C" fn no_wait(_: CuStream) -> CuResult {
//!     CuResult::CUDA_SUCCESS
//! }
//!
//! let mut functions = Functions::find().unwrap();
//! functions.stream_synchronize = no_wait;
//! ```

mod codes;
pub(crate) mod frees;
mod layout;

use std::ffi::{c_char, c_int, c_uint, c_void};

use hmem_core::IfaceKind;

pub use self::{codes::CuResult, layout::*};

hmem_core::function_table! {
    /// Table of the functions of `libcuda.so.1` that this crate calls.
    // SAFETY: the vendor supports loading its library in any process. The signatures are those of
    // the header, against which a test checks them.
    unsafe Functions {
        library: "libcuda.so.1",
        variable: "HMEM_CUDA_LIBRARY",
        iface: IfaceKind::CUDA,
        not_loaded: "install NVIDIA's driver, or name its library in HMEM_CUDA_LIBRARY (in Rust: \
                     Cuda::builder().library(path))",
        lacks_symbol: "the library has no such symbol: it is not NVIDIA's driver library, or \
                       older than CUDA 11.0",
    }
    required {
        init: cuInit(c_uint) -> CuResult;
        driver_get_version: cuDriverGetVersion(*mut c_int) -> CuResult;
        device_get_count: cuDeviceGetCount(*mut c_int) -> CuResult;
        device_get: cuDeviceGet(*mut CuDevice, c_int) -> CuResult;
        device_get_name: cuDeviceGetName(*mut c_char, c_int, CuDevice) -> CuResult;
        device_total_mem: cuDeviceTotalMem_v2(*mut usize, CuDevice) -> CuResult;
        device_get_pci_bus_id: cuDeviceGetPCIBusId(*mut c_char, c_int, CuDevice) -> CuResult;
        device_get_attribute: cuDeviceGetAttribute(
            *mut c_int, CuDeviceAttribute, CuDevice
        ) -> CuResult;
        primary_ctx_retain: cuDevicePrimaryCtxRetain(*mut CuContext, CuDevice) -> CuResult;
        primary_ctx_release: cuDevicePrimaryCtxRelease_v2(CuDevice) -> CuResult;
        primary_ctx_get_state: cuDevicePrimaryCtxGetState(
            CuDevice, *mut c_uint, *mut c_int
        ) -> CuResult;
        ctx_get_current: cuCtxGetCurrent(*mut CuContext) -> CuResult;
        ctx_get_device: cuCtxGetDevice(*mut CuDevice) -> CuResult;
        ctx_push_current: cuCtxPushCurrent_v2(CuContext) -> CuResult;
        ctx_pop_current: cuCtxPopCurrent_v2(*mut CuContext) -> CuResult;
        pointer_get_attributes: cuPointerGetAttributes(
            c_uint, *mut CuPointerAttribute, *mut *mut c_void, CuDevicePtr
        ) -> CuResult;
        pointer_set_attribute: cuPointerSetAttribute(
            *const c_void, CuPointerAttribute, CuDevicePtr
        ) -> CuResult;
        mem_get_address_range: cuMemGetAddressRange_v2(
            *mut CuDevicePtr, *mut usize, CuDevicePtr
        ) -> CuResult;
        mem_alloc: cuMemAlloc_v2(*mut CuDevicePtr, usize) -> CuResult;
        mem_free: cuMemFree_v2(CuDevicePtr) -> CuResult;
        mem_host_alloc: cuMemHostAlloc(*mut *mut c_void, usize, c_uint) -> CuResult;
        mem_free_host: cuMemFreeHost(*mut c_void) -> CuResult;
        mem_host_get_flags: cuMemHostGetFlags(*mut c_uint, *mut c_void) -> CuResult;
        mem_host_register: cuMemHostRegister_v2(*mut c_void, usize, c_uint) -> CuResult;
        mem_host_unregister: cuMemHostUnregister(*mut c_void) -> CuResult;
        mem_alloc_managed: cuMemAllocManaged(*mut CuDevicePtr, usize, c_uint) -> CuResult;
        memcpy_async: cuMemcpyAsync(CuDevicePtr, CuDevicePtr, usize, CuStream) -> CuResult;
        stream_create: cuStreamCreate(*mut CuStream, c_uint) -> CuResult;
        stream_synchronize: cuStreamSynchronize(CuStream) -> CuResult;
        stream_destroy: cuStreamDestroy_v2(CuStream) -> CuResult;
        event_create: cuEventCreate(*mut CuEvent, c_uint) -> CuResult;
        event_record: cuEventRecord(CuEvent, CuStream) -> CuResult;
        event_query: cuEventQuery(CuEvent) -> CuResult;
        event_synchronize: cuEventSynchronize(CuEvent) -> CuResult;
        event_destroy: cuEventDestroy_v2(CuEvent) -> CuResult;
        ipc_get_mem_handle: cuIpcGetMemHandle(*mut CuIpcMemHandle, CuDevicePtr) -> CuResult;
        ipc_open_mem_handle: cuIpcOpenMemHandle_v2(
            *mut CuDevicePtr, CuIpcMemHandle, c_uint
        ) -> CuResult;
        ipc_close_mem_handle: cuIpcCloseMemHandle(CuDevicePtr) -> CuResult;
    }
    optional {
        mem_get_handle_for_address_range: cuMemGetHandleForAddressRange(
            *mut c_void, CuDevicePtr, usize, c_uint, u64
        ) -> CuResult;
        flush_gpu_direct_rdma_writes: cuFlushGPUDirectRDMAWrites(c_uint, c_uint) -> CuResult;
        ctx_get_flags: cuCtxGetFlags(*mut c_uint) -> CuResult;
        ctx_set_flags: cuCtxSetFlags(c_uint) -> CuResult;
        thread_exchange_stream_capture_mode: cuThreadExchangeStreamCaptureMode(
            *mut CuStreamCaptureMode
        ) -> CuResult;
        mem_alloc_async: cuMemAllocAsync(*mut CuDevicePtr, usize, CuStream) -> CuResult;
        mem_free_async: cuMemFreeAsync(CuDevicePtr, CuStream) -> CuResult;
        mem_get_allocation_granularity: cuMemGetAllocationGranularity(
            *mut usize, *const CuMemAllocationProp, c_uint
        ) -> CuResult;
        mem_address_reserve: cuMemAddressReserve(
            *mut CuDevicePtr, usize, usize, CuDevicePtr, u64
        ) -> CuResult;
        mem_address_free: cuMemAddressFree(CuDevicePtr, usize) -> CuResult;
        mem_create: cuMemCreate(
            *mut CuMemHandle, usize, *const CuMemAllocationProp, u64
        ) -> CuResult;
        mem_release: cuMemRelease(CuMemHandle) -> CuResult;
        mem_map: cuMemMap(CuDevicePtr, usize, usize, CuMemHandle, u64) -> CuResult;
        mem_unmap: cuMemUnmap(CuDevicePtr, usize) -> CuResult;
        mem_set_access: cuMemSetAccess(
            CuDevicePtr, usize, *const CuMemAccessDesc, usize
        ) -> CuResult;
        mem_retain_allocation_handle: cuMemRetainAllocationHandle(
            *mut CuMemHandle, *mut c_void
        ) -> CuResult;
        mem_get_allocation_properties: cuMemGetAllocationPropertiesFromHandle(
            *mut CuMemAllocationProp, CuMemHandle
        ) -> CuResult;
    }
    addresses frees of Functions::FREES
}

impl Functions {
    /// Returns the [`Functions::FREES`] that the library has, each with its symbol and address.
    #[must_use]
    pub fn frees(&self) -> &[(&'static str, usize)] {
        &self.frees
    }
}

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
mod layout;

use std::ffi::{c_char, c_int, c_uint, c_void};

use hmem_core::IfaceKind;

pub use self::{codes::CuResult, layout::*};

hmem_core::function_table! {
    /// Table of the functions of `libcuda.so.1` that this crate calls. Each returns a [`CuResult`].
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
        /// `cuInit(flags)`: starts the driver.
        init: cuInit(c_uint) -> CuResult;
        /// `cuDriverGetVersion(version)`: writes the CUDA version of the driver.
        driver_get_version: cuDriverGetVersion(*mut c_int) -> CuResult;
        /// `cuDeviceGetCount(count)`: writes the number of devices.
        device_get_count: cuDeviceGetCount(*mut c_int) -> CuResult;
        /// `cuDeviceGet(device, ordinal)`: writes the handle of the device with an ordinal.
        device_get: cuDeviceGet(*mut CuDevice, c_int) -> CuResult;
        /// `cuDeviceGetName(name, len, device)`: writes the name of a device.
        device_get_name: cuDeviceGetName(*mut c_char, c_int, CuDevice) -> CuResult;
        /// `cuDeviceTotalMem_v2(bytes, device)`: writes the memory size of a device.
        device_total_mem: cuDeviceTotalMem_v2(*mut usize, CuDevice) -> CuResult;
        /// `cuDeviceGetPCIBusId(id, len, device)`: writes the PCI address of a device as text.
        device_get_pci_bus_id: cuDeviceGetPCIBusId(*mut c_char, c_int, CuDevice) -> CuResult;
        /// `cuDeviceGetAttribute(value, attribute, device)`: writes an attribute of a device.
        device_get_attribute: cuDeviceGetAttribute(
            *mut c_int, CuDeviceAttribute, CuDevice
        ) -> CuResult;
        /// `cuDevicePrimaryCtxRetain(context, device)`: retains the primary context of a device.
        primary_ctx_retain: cuDevicePrimaryCtxRetain(*mut CuContext, CuDevice) -> CuResult;
        /// `cuDevicePrimaryCtxRelease_v2(device)`: releases the primary context of a device.
        primary_ctx_release: cuDevicePrimaryCtxRelease_v2(CuDevice) -> CuResult;
        /// `cuDevicePrimaryCtxGetState(device, flags, active)`: queries whether a primary context
        /// exists.
        primary_ctx_get_state: cuDevicePrimaryCtxGetState(
            CuDevice, *mut c_uint, *mut c_int
        ) -> CuResult;
        /// `cuCtxGetCurrent(context)`: writes the thread's current context, or null.
        ctx_get_current: cuCtxGetCurrent(*mut CuContext) -> CuResult;
        /// `cuCtxGetDevice(device)`: writes the device of the current context.
        ctx_get_device: cuCtxGetDevice(*mut CuDevice) -> CuResult;
        /// `cuCtxPushCurrent_v2(context)`: makes a context current on the thread.
        ctx_push_current: cuCtxPushCurrent_v2(CuContext) -> CuResult;
        /// `cuCtxPopCurrent_v2(context)`: makes the previous context current again.
        ctx_pop_current: cuCtxPopCurrent_v2(*mut CuContext) -> CuResult;
        /// `cuPointerGetAttributes(count, attributes, data, pointer)`: writes attributes of the
        /// memory at an address.
        pointer_get_attributes: cuPointerGetAttributes(
            c_uint, *mut CuPointerAttribute, *mut *mut c_void, CuDevicePtr
        ) -> CuResult;
        /// `cuPointerSetAttribute(value, attribute, pointer)`: sets an attribute of the memory at
        /// an address.
        pointer_set_attribute: cuPointerSetAttribute(
            *const c_void, CuPointerAttribute, CuDevicePtr
        ) -> CuResult;
        /// `cuMemGetAddressRange_v2(base, size, pointer)`: writes the range of the allocation at an
        /// address.
        mem_get_address_range: cuMemGetAddressRange_v2(
            *mut CuDevicePtr, *mut usize, CuDevicePtr
        ) -> CuResult;
        /// `cuMemAlloc_v2(pointer, size)`: allocates device memory.
        mem_alloc: cuMemAlloc_v2(*mut CuDevicePtr, usize) -> CuResult;
        /// `cuMemFree_v2(pointer)`: frees device or managed memory.
        mem_free: cuMemFree_v2(CuDevicePtr) -> CuResult;
        /// `cuMemHostAlloc(pointer, size, flags)`: allocates page-locked host memory.
        mem_host_alloc: cuMemHostAlloc(*mut *mut c_void, usize, c_uint) -> CuResult;
        /// `cuMemFreeHost(pointer)`: frees memory of `cuMemHostAlloc`.
        mem_free_host: cuMemFreeHost(*mut c_void) -> CuResult;
        /// `cuMemHostGetFlags(flags, pointer)`: writes the flags of memory of `cuMemHostAlloc`.
        mem_host_get_flags: cuMemHostGetFlags(*mut c_uint, *mut c_void) -> CuResult;
        /// `cuMemHostRegister_v2(pointer, size, flags)`: page-locks host memory of the application.
        mem_host_register: cuMemHostRegister_v2(*mut c_void, usize, c_uint) -> CuResult;
        /// `cuMemHostUnregister(pointer)`: ends the page-locking of host memory.
        mem_host_unregister: cuMemHostUnregister(*mut c_void) -> CuResult;
        /// `cuMemAllocManaged(pointer, size, flags)`: allocates managed memory.
        mem_alloc_managed: cuMemAllocManaged(*mut CuDevicePtr, usize, c_uint) -> CuResult;
        /// `cuMemcpyAsync(to, from, size, stream)`: starts a copy on a stream.
        memcpy_async: cuMemcpyAsync(CuDevicePtr, CuDevicePtr, usize, CuStream) -> CuResult;
        /// `cuStreamCreate(stream, flags)`: creates a stream.
        stream_create: cuStreamCreate(*mut CuStream, c_uint) -> CuResult;
        /// `cuStreamSynchronize(stream)`: waits for the work of a stream.
        stream_synchronize: cuStreamSynchronize(CuStream) -> CuResult;
        /// `cuStreamDestroy_v2(stream)`: destroys a stream.
        stream_destroy: cuStreamDestroy_v2(CuStream) -> CuResult;
        /// `cuEventCreate(event, flags)`: creates an event.
        event_create: cuEventCreate(*mut CuEvent, c_uint) -> CuResult;
        /// `cuEventRecord(event, stream)`: records an event behind the work of a stream.
        event_record: cuEventRecord(CuEvent, CuStream) -> CuResult;
        /// `cuEventQuery(event)`: queries whether an event has completed.
        event_query: cuEventQuery(CuEvent) -> CuResult;
        /// `cuEventSynchronize(event)`: waits for an event.
        event_synchronize: cuEventSynchronize(CuEvent) -> CuResult;
        /// `cuEventDestroy_v2(event)`: destroys an event.
        event_destroy: cuEventDestroy_v2(CuEvent) -> CuResult;
        /// `cuIpcGetMemHandle(handle, pointer)`: writes a handle by which another process opens
        /// memory.
        ipc_get_mem_handle: cuIpcGetMemHandle(*mut CuIpcMemHandle, CuDevicePtr) -> CuResult;
        /// `cuIpcOpenMemHandle_v2(pointer, handle, flags)`: opens memory of another process.
        ipc_open_mem_handle: cuIpcOpenMemHandle_v2(
            *mut CuDevicePtr, CuIpcMemHandle, c_uint
        ) -> CuResult;
        /// `cuIpcCloseMemHandle(pointer)`: closes memory of another process.
        ipc_close_mem_handle: cuIpcCloseMemHandle(CuDevicePtr) -> CuResult;
    }
    optional {
        /// `cuMemGetHandleForAddressRange(handle, pointer, size, type, flags)`: exports a range as
        /// a dma-buf.
        mem_get_handle_for_address_range: cuMemGetHandleForAddressRange(
            *mut c_void, CuDevicePtr, usize, c_uint, u64
        ) -> CuResult;
        /// `cuFlushGPUDirectRDMAWrites(target, scope)`: flushes inbound writes of NICs.
        flush_gpu_direct_rdma_writes: cuFlushGPUDirectRDMAWrites(c_uint, c_uint) -> CuResult;
        /// `cuCtxGetFlags(flags)`: writes the flags of the current context.
        ctx_get_flags: cuCtxGetFlags(*mut c_uint) -> CuResult;
        /// `cuCtxSetFlags(flags)`: sets the flags of the current context.
        ctx_set_flags: cuCtxSetFlags(c_uint) -> CuResult;
        /// `cuMemAllocAsync(pointer, size, stream)`: allocates stream-ordered memory.
        mem_alloc_async: cuMemAllocAsync(*mut CuDevicePtr, usize, CuStream) -> CuResult;
        /// `cuMemFreeAsync(pointer, stream)`: frees stream-ordered memory.
        mem_free_async: cuMemFreeAsync(CuDevicePtr, CuStream) -> CuResult;
        /// `cuMemGetAllocationGranularity(granularity, properties, option)`: writes the granularity
        /// for `cuMemCreate`.
        mem_get_allocation_granularity: cuMemGetAllocationGranularity(
            *mut usize, *const CuMemAllocationProp, c_uint
        ) -> CuResult;
        /// `cuMemAddressReserve(pointer, size, alignment, wanted, flags)`: reserves a range of
        /// addresses.
        mem_address_reserve: cuMemAddressReserve(
            *mut CuDevicePtr, usize, usize, CuDevicePtr, u64
        ) -> CuResult;
        /// `cuMemAddressFree(pointer, size)`: frees a reserved range of addresses.
        mem_address_free: cuMemAddressFree(CuDevicePtr, usize) -> CuResult;
        /// `cuMemCreate(handle, size, properties, flags)`: creates physical memory.
        mem_create: cuMemCreate(
            *mut CuMemHandle, usize, *const CuMemAllocationProp, u64
        ) -> CuResult;
        /// `cuMemRelease(handle)`: releases a handle of physical memory.
        mem_release: cuMemRelease(CuMemHandle) -> CuResult;
        /// `cuMemMap(pointer, size, offset, handle, flags)`: maps physical memory into a reserved
        /// range.
        mem_map: cuMemMap(CuDevicePtr, usize, usize, CuMemHandle, u64) -> CuResult;
        /// `cuMemUnmap(pointer, size)`: unmaps a mapped range.
        mem_unmap: cuMemUnmap(CuDevicePtr, usize) -> CuResult;
        /// `cuMemSetAccess(pointer, size, descriptions, count)`: sets the rights of devices on a
        /// mapping.
        mem_set_access: cuMemSetAccess(
            CuDevicePtr, usize, *const CuMemAccessDesc, usize
        ) -> CuResult;
        /// `cuMemRetainAllocationHandle(handle, address)`: writes the handle of the memory at an
        /// address.
        mem_retain_allocation_handle: cuMemRetainAllocationHandle(
            *mut CuMemHandle, *mut c_void
        ) -> CuResult;
        /// `cuMemGetAllocationPropertiesFromHandle(properties, handle)`: writes the properties of
        /// physical memory.
        mem_get_allocation_properties: cuMemGetAllocationPropertiesFromHandle(
            *mut CuMemAllocationProp, CuMemHandle
        ) -> CuResult;
    }
    addresses frees of Functions::FREES
}

impl Functions {
    /// Symbols of functions that free memory. A monitor can hook all of them that the library has.
    /// This crate itself calls only a few.
    pub const FREES: &[&str] = &[
        "cuMemFree",
        "cuMemFree_v2",
        "cuMemFreeHost",
        "cuMemFreeAsync",
        "cuMemFreeAsync_ptsz",
        "cuIpcCloseMemHandle",
        "cuMemUnmap",
        "cuMemAddressFree",
        "cuCtxDestroy",
        "cuCtxDestroy_v2",
        "cuCtxDetach",
        "cuDevicePrimaryCtxRelease",
        "cuDevicePrimaryCtxRelease_v2",
        "cuDevicePrimaryCtxReset",
        "cuDevicePrimaryCtxReset_v2",
        "cuGreenCtxDestroy",
        "cuModuleUnload",
        "cuLibraryUnload",
        "cuGraphicsUnmapResources",
        "cuGraphicsUnmapResources_ptsz",
        "cuGraphicsUnregisterResource",
        "cuGLUnmapBufferObject",
        "cuGLUnmapBufferObjectAsync",
        "cuGLUnregisterBufferObject",
    ];

    /// Returns the [`Functions::FREES`] that the library has, each with its symbol and address.
    #[must_use]
    pub fn frees(&self) -> &[(&'static str, usize)] {
        &self.frees
    }
}

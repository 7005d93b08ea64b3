//! Types, layouts and constants of `cuda.h`, written by hand. `tests/layout.rs` compares them with
//! the header.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ushort};

/// `CUdevice`: handle that the driver returns for the ordinal of a device.
pub type CuDevice = c_int;
/// `CUdeviceptr`: an address in the unified address space.
pub type CuDevicePtr = u64;
/// `CUpointer_attribute`: attribute of a pointer to query.
pub type CuPointerAttribute = c_uint;
/// `CUdevice_attribute`: attribute of a device to query.
pub type CuDeviceAttribute = c_uint;
/// `CUstreamCaptureMode`: the calls that a stream capture forbids to a thread.
pub type CuStreamCaptureMode = c_uint;
/// `CUmemGenericAllocationHandle`: handle of physical memory that `cuMemCreate` created.
pub type CuMemHandle = u64;

hmem_iface_kit::handles! {
    /// `CUcontext`: an opaque pointer.
    CuContext,
    /// `CUstream`: an opaque pointer.
    CuStream,
    /// `CUevent`: an opaque pointer.
    CuEvent,
}

/// `CUmemLocation`: location of physical memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CuMemLocation {
    /// Type of the location: a `CU_MEM_LOCATION_TYPE_*`.
    pub kind: c_uint,
    /// Ordinal of the device.
    pub id: c_int,
}

/// `CUmemAllocationProp`: properties of physical memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CuMemAllocationProp {
    /// Type of the memory: a `CU_MEM_ALLOCATION_TYPE_*`.
    pub kind: c_uint,
    /// Types of handles that can be exported: `CU_MEM_HANDLE_TYPE_*` bits.
    pub requested_handle_types: c_uint,
    /// Device on which the memory is created.
    pub location: CuMemLocation,
    /// Attributes of a Windows handle. Null on Linux.
    pub win32_handle_meta_data: usize,
    /// Compression of the memory: a `CU_MEM_ALLOCATION_COMP_*`.
    pub compression_type: c_uchar,
    /// 1 if GPUDirect RDMA must be able to reach the memory, else 0.
    pub gpu_direct_rdma_capable: c_uchar,
    /// Use of the memory: `CU_MEM_CREATE_USAGE_*` bits.
    pub usage: c_ushort,
    /// Reserved bytes, which must be zero.
    pub reserved: [c_uchar; 4],
}

/// `CUmemAccessDesc`: rights of a device on a mapping.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CuMemAccessDesc {
    /// Device that may access the mapping.
    pub location: CuMemLocation,
    /// Permitted access: a `CU_MEM_ACCESS_FLAGS_*`.
    pub flags: c_uint,
}

/// `CU_IPC_HANDLE_SIZE`: length of a [`CuIpcMemHandle`] in bytes.
pub const CU_IPC_HANDLE_SIZE: usize = 64;

/// `CUipcMemHandle`: handle by which another process opens an allocation.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CuIpcMemHandle {
    /// Opaque value of the driver.
    pub reserved: [c_char; CU_IPC_HANDLE_SIZE],
}

macro_rules! constants {
    ($($(#[doc = $doc:literal])+ $name:ident: $type:ty = $value:literal;)+) => {
        $($(#[doc = $doc])+ pub const $name: $type = $value;)+

        /// All constants of this module, each with its name in `cuda.h` and its value.
        pub const CONSTANTS: &[(&str, u64)] = &[$((stringify!($name), $name as u64)),+];
    };
}

constants! {
    /// Context in which the memory was allocated or registered. Null for memory without a context.
    CU_POINTER_ATTRIBUTE_CONTEXT: CuPointerAttribute = 1;
    /// Type of the memory: a `CU_MEMORYTYPE_*` as `unsigned int`. 0 for addresses that are not CUDA
    /// memory.
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE: CuPointerAttribute = 2;
    /// 1 if synchronous operations on the memory return only after their end (`unsigned int`).
    CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: CuPointerAttribute = 6;
    /// Number of the allocation (`unsigned long long`), unique in the process.
    CU_POINTER_ATTRIBUTE_BUFFER_ID: CuPointerAttribute = 7;
    /// Boolean: the memory was allocated by `cuMemAllocManaged`.
    CU_POINTER_ATTRIBUTE_IS_MANAGED: CuPointerAttribute = 8;
    /// Ordinal of the memory's device, as `int`. Negative if the memory belongs to no device.
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: CuPointerAttribute = 9;
    /// Boolean: `cuIpcGetMemHandle` accepts the memory.
    CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: CuPointerAttribute = 10;
    /// First address of the allocation. For VMM memory, the first address of the reservation.
    CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: CuPointerAttribute = 11;
    /// Length of the allocation in bytes, as `size_t`. For VMM memory, the length of the
    /// reservation.
    CU_POINTER_ATTRIBUTE_RANGE_SIZE: CuPointerAttribute = 12;
    /// Boolean: memory is mapped at the address.
    CU_POINTER_ATTRIBUTE_MAPPED: CuPointerAttribute = 13;
    /// Boolean: GPUDirect RDMA can reach the memory.
    CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: CuPointerAttribute = 15;
    /// Pool of stream-ordered memory. Null for other memory.
    CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: CuPointerAttribute = 17;

    /// The device shares one address space with the host.
    CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: CuDeviceAttribute = 41;
    /// The device allocates managed memory.
    CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY: CuDeviceAttribute = 83;
    /// The device supports `cuMemAddressReserve`, `cuMemCreate` and `cuMemMap`.
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: CuDeviceAttribute = 102;
    /// `cuMemCreate` accepts the GPUDirect RDMA flag.
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: CuDeviceAttribute = 110;
    /// The device supports `cuMemAllocAsync`.
    CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: CuDeviceAttribute = 115;
    /// Kernel clients can pin the device's memory (`nvidia_p2p_get_pages`).
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED: CuDeviceAttribute = 116;
    /// Supported flushes of inbound writes: `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_*` bits.
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: CuDeviceAttribute = 117;
    /// Order of inbound writes: a `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_*`.
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING: CuDeviceAttribute = 118;
    /// The device exports dma-bufs.
    CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED: CuDeviceAttribute = 124;
    /// The device exports page-locked host memory as dma-bufs. Since CUDA 13.
    CU_DEVICE_ATTRIBUTE_HOST_ALLOC_DMA_BUF_SUPPORTED: CuDeviceAttribute = 146;
    /// The CPU can map dma-bufs of the device's memory. The header of CUDA 12.9 lacks the constant,
    /// and the header of CUDA 13.5 has it.
    CU_DEVICE_ATTRIBUTE_DMA_BUF_MMAP_SUPPORTED: CuDeviceAttribute = 152;

    /// Host memory.
    CU_MEMORYTYPE_HOST: u32 = 1;
    /// Device memory.
    CU_MEMORYTYPE_DEVICE: u32 = 2;

    /// The memory counts as page-locked in every context.
    CU_MEMHOSTALLOC_PORTABLE: u32 = 1;
    /// The memory counts as page-locked in every context.
    CU_MEMHOSTREGISTER_PORTABLE: u32 = 1;
    /// Any stream of any device may use the managed memory.
    CU_MEM_ATTACH_GLOBAL: u32 = 1;
    /// The stream does not wait for the default stream.
    CU_STREAM_NON_BLOCKING: u32 = 1;
    /// No stream capture forbids a call to the thread, unless the call itself conflicts with the
    /// capture.
    CU_STREAM_CAPTURE_MODE_RELAXED: CuStreamCaptureMode = 2;
    /// The event records no time.
    CU_EVENT_DISABLE_TIMING: u32 = 2;
    /// Synchronous operations in the context return only after their end. Since CUDA 12.1.
    CU_CTX_SYNC_MEMOPS: u32 = 128;
    /// Opening the memory enables peer access between devices if that is needed.
    CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: u32 = 1;

    /// The location is a device.
    CU_MEM_LOCATION_TYPE_DEVICE: u32 = 1;
    /// The memory is pinned on its device.
    CU_MEM_ALLOCATION_TYPE_PINNED: u32 = 1;
    /// Option of `cuMemGetAllocationGranularity`: returns the minimum granularity.
    CU_MEM_ALLOC_GRANULARITY_MINIMUM: u32 = 0;
    /// Reads and writes are allowed.
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE: u32 = 3;
    /// The handle is the fd of a dma-buf.
    CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD: u32 = 1;
    /// The dma-buf is mapped through the PCIe BAR.
    CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE: u64 = 1;

    /// `cuFlushGPUDirectRDMAWrites` works on the device.
    CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST: u32 = 1;
    /// The device that owns the memory sees inbound writes in order.
    CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER: u32 = 100;
    /// Makes the writes visible to the current context.
    CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX: u32 = 0;
    /// The flush ends when the device that owns the memory sees the writes.
    CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER: u32 = 100;
}

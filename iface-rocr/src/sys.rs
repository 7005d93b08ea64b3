//! Function table of libhsa-runtime64.so.1, and layouts and constants of `hsa.h` and
//! `hsa_ext_amd.h`, written by hand.
//!
//! The module is public, so that an application or test can pass other functions with
//! [`Functions::from_lookup`].
//!
//! ```
//! use hmem_iface_rocr::sys::{HsaStatus, Functions};
//!
//! // SAFETY: the lookup returns no function, so no signature can be wrong.
//! let error = unsafe { Functions::from_lookup(|_| None) }.unwrap_err();
//! assert_eq!(error.context_value("symbol"), Some(Functions::SYMBOLS[0]));
//! let code = HsaStatus::HSA_STATUS_ERROR_FATAL;
//! assert_eq!(code.name(), Some("HSA_STATUS_ERROR_FATAL"));
//! ```

use std::ffi::c_void;

use hmem_core::IfaceKind;

hmem_core::c_enum! {
    /// `hsa_status_t`: result code of the runtime's functions.
    HsaStatus(u32) {
        HSA_STATUS_SUCCESS = 0x0,
        HSA_STATUS_INFO_BREAK = 0x1,
        HSA_STATUS_ERROR_INVALID_MEMORY_POOL = 0x28,
        HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION = 0x29,
        HSA_STATUS_ERROR_ILLEGAL_INSTRUCTION = 0x2a,
        HSA_STATUS_ERROR_MEMORY_FAULT = 0x2b,
        HSA_STATUS_CU_MASK_REDUCED = 0x2c,
        HSA_STATUS_ERROR_OUT_OF_REGISTERS = 0x2d,
        HSA_STATUS_ERROR_RESOURCE_BUSY = 0x2e,
        HSA_STATUS_ERROR_NOT_SUPPORTED = 0x2f,
        HSA_STATUS_ERROR = 0x1000,
        HSA_STATUS_ERROR_INVALID_ARGUMENT = 0x1001,
        HSA_STATUS_ERROR_INVALID_QUEUE_CREATION = 0x1002,
        HSA_STATUS_ERROR_INVALID_ALLOCATION = 0x1003,
        HSA_STATUS_ERROR_INVALID_AGENT = 0x1004,
        HSA_STATUS_ERROR_INVALID_REGION = 0x1005,
        HSA_STATUS_ERROR_INVALID_SIGNAL = 0x1006,
        HSA_STATUS_ERROR_INVALID_QUEUE = 0x1007,
        HSA_STATUS_ERROR_OUT_OF_RESOURCES = 0x1008,
        HSA_STATUS_ERROR_INVALID_PACKET_FORMAT = 0x1009,
        HSA_STATUS_ERROR_RESOURCE_FREE = 0x100a,
        HSA_STATUS_ERROR_NOT_INITIALIZED = 0x100b,
        HSA_STATUS_ERROR_REFCOUNT_OVERFLOW = 0x100c,
        HSA_STATUS_ERROR_INCOMPATIBLE_ARGUMENTS = 0x100d,
        HSA_STATUS_ERROR_INVALID_INDEX = 0x100e,
        HSA_STATUS_ERROR_INVALID_ISA = 0x100f,
        HSA_STATUS_ERROR_INVALID_CODE_OBJECT = 0x1010,
        HSA_STATUS_ERROR_INVALID_EXECUTABLE = 0x1011,
        HSA_STATUS_ERROR_FROZEN_EXECUTABLE = 0x1012,
        HSA_STATUS_ERROR_INVALID_SYMBOL_NAME = 0x1013,
        HSA_STATUS_ERROR_VARIABLE_ALREADY_DEFINED = 0x1014,
        HSA_STATUS_ERROR_VARIABLE_UNDEFINED = 0x1015,
        HSA_STATUS_ERROR_EXCEPTION = 0x1016,
        HSA_STATUS_ERROR_INVALID_ISA_NAME = 0x1017,
        HSA_STATUS_ERROR_INVALID_CODE_SYMBOL = 0x1018,
        HSA_STATUS_ERROR_INVALID_EXECUTABLE_SYMBOL = 0x1019,
        HSA_STATUS_ERROR_INVALID_FILE = 0x1020,
        HSA_STATUS_ERROR_INVALID_CODE_OBJECT_READER = 0x1021,
        HSA_STATUS_ERROR_INVALID_CACHE = 0x1022,
        HSA_STATUS_ERROR_INVALID_WAVEFRONT = 0x1023,
        HSA_STATUS_ERROR_INVALID_SIGNAL_GROUP = 0x1024,
        HSA_STATUS_ERROR_INVALID_RUNTIME_STATE = 0x1025,
        HSA_STATUS_ERROR_FATAL = 0x1026,
    }
}

/// `hsa_agent_t`: handle of a CPU or GPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Agent {
    /// Opaque value of the runtime. 0 means no agent.
    pub handle: u64,
}

/// `hsa_amd_memory_pool_t`: handle of a memory pool of an agent.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryPool {
    /// Opaque value of the runtime.
    pub handle: u64,
}

/// `hsa_amd_pointer_info_t`: the runtime's answer about an address. Newer runtimes know more
/// members, and write no more than [`Self::size`] bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PointerInfo {
    /// Size of this structure in bytes. A runtime that knows fewer members lowers the value.
    pub size: u32,
    /// Type of the address: an `HSA_EXT_POINTER_TYPE_*`. For `HSA_EXT_POINTER_TYPE_UNKNOWN` the
    /// runtime does not write the other members.
    pub kind: u32,
    /// First address of the allocation for agents.
    pub agent_base: *mut c_void,
    /// First address of the allocation for the CPU. Null if the CPU has no access.
    pub host_base: *mut c_void,
    /// Length of the allocation in bytes.
    pub len: usize,
    /// Data that the application associated with the allocation.
    pub user_data: *mut c_void,
    /// Agent that owns the memory. Handle 0 if this process does not see that agent.
    pub owner: Agent,
    /// Flags of the memory's pool: `hsa_amd_memory_pool_global_flag_t` bits.
    pub global_flags: u32,
}

/// `hsa_signal_t`: handle of a value that the runtime lowers when a copy ends.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Signal {
    /// Opaque value of the runtime. 0 means no signal.
    pub handle: u64,
}

/// `hsa_amd_vmem_alloc_handle_t`: handle of physical memory that can be mapped.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmemHandle {
    /// Opaque value of the runtime.
    pub handle: u64,
}

/// `hsa_amd_memory_access_desc_t`: rights of an agent on mapped memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AccessDesc {
    /// Permitted access: an `HSA_ACCESS_PERMISSION_*`.
    pub permissions: u32,
    /// Agent that may access the memory.
    pub agent: Agent,
}

/// `hsa_amd_ipc_memory_t`: handle by which another process attaches an allocation.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IpcMemory {
    /// Opaque value of the runtime.
    pub handle: [u32; 8],
}

/// `hsa_amd_hdp_flush_t`: registers that flush inbound PCIe writes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct HdpFlush {
    /// Register for writes to the device's memory: writing 1 makes earlier writes visible to the
    /// device. Null if the device has no such register.
    pub memory: *mut u32,
    /// Register for inbound writes to other registers of the device: writing 1 makes earlier writes
    /// visible to the device. Null if the device has no such register.
    pub registers: *mut u32,
}

/// An attribute of an agent, a pool or the system. `T` is the type of its value in the header.
#[derive(Clone, Copy, Debug)]
pub struct Attribute<T> {
    /// Number of the attribute in AMD's header.
    pub number: u32,
    /// Initial value for a query, which the runtime overwrites with the attribute's value.
    pub(crate) empty: T,
}

macro_rules! attributes {
    ($($(#[doc = $doc:literal])+ $name:ident: $type:ty = $number:literal, $empty:expr;)+) => {
        $(
            #[doc = concat!("`", stringify!($name), "`: ")]
            $(#[doc = $doc])+
            pub const $name: Attribute<$type> = Attribute { number: $number, empty: $empty };
        )+

        const ATTRIBUTES: &[(&str, u64)] = &[$((stringify!($name), $number)),+];
    };
}

attributes! {
    /// Name of the agent, as `char[64]`.
    HSA_AGENT_INFO_NAME: [u8; 64] = 0, [0; 64];
    /// Type of the agent: an `HSA_DEVICE_TYPE_*`, as `hsa_device_type_t`.
    HSA_AGENT_INFO_DEVICE: u32 = 17, 0;
    /// Place on the PCI bus, as `uint32_t`: bus in bits 8 to 15, device in 3 to 7, function in 0 to
    /// 2.
    HSA_AMD_AGENT_INFO_BDFID: u32 = 0xa006, 0;
    /// Marketing name of the product, as `char[64]`.
    HSA_AMD_AGENT_INFO_PRODUCT_NAME: [u8; 64] = 0xa009, [0; 64];
    /// Registers that flush inbound PCIe writes, as `hsa_amd_hdp_flush_t`. The addresses are null
    /// if the device has no such registers.
    HSA_AMD_AGENT_INFO_HDP_FLUSH: HdpFlush =
        0xa00e, HdpFlush { memory: std::ptr::null_mut(), registers: std::ptr::null_mut() };
    /// PCI domain of the agent, as `uint32_t`.
    HSA_AMD_AGENT_INFO_DOMAIN: u32 = 0xa00f, 0;
    /// Segment of the pool: an `HSA_AMD_SEGMENT_*`, as `hsa_amd_segment_t`.
    HSA_AMD_MEMORY_POOL_INFO_SEGMENT: u32 = 0, 0;
    /// Flags of a global pool: `HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_*` bits, as `uint32_t`.
    HSA_AMD_MEMORY_POOL_INFO_GLOBAL_FLAGS: u32 = 1, 0;
    /// Size of the pool in bytes, as `size_t`.
    HSA_AMD_MEMORY_POOL_INFO_SIZE: usize = 2, 0;
    /// True if memory can be allocated from the pool, as `bool`.
    HSA_AMD_MEMORY_POOL_INFO_RUNTIME_ALLOC_ALLOWED: u8 = 5, 0;
    /// Granularity of allocations in bytes, as `size_t`. The runtime rounds lengths up to it.
    HSA_AMD_MEMORY_POOL_INFO_RUNTIME_ALLOC_GRANULE: usize = 6, 0;
    /// True if the runtime exports dma-bufs, as `bool`. Since ROCm 5.6.
    HSA_AMD_SYSTEM_INFO_DMABUF_SUPPORTED: u8 = 0x204, 0;
    /// True if the runtime has the `hsa_amd_vmem_*` functions, as `bool`. Since ROCm 6.0.
    HSA_AMD_SYSTEM_INFO_VIRTUAL_MEM_API_SUPPORTED: u8 = 0x205, 0;
}

macro_rules! constants {
    ($($(#[doc = $doc:literal])* $name:ident: $type:ty = $value:expr;)+) => {
        $(
            #[doc = concat!("`", stringify!($name), "`")]
            #[doc = ""]
            $(#[doc = $doc])*
            pub const $name: $type = $value;
        )+

        const PLAIN: &[(&str, u64)] = &[$((stringify!($name), $name as u64)),+];
    };
}

constants! {
    HSA_DEVICE_TYPE_CPU: u32 = 0;
    HSA_DEVICE_TYPE_GPU: u32 = 1;
    HSA_AMD_SEGMENT_GLOBAL: u32 = 0;
    HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_FINE_GRAINED: u32 = 2;
    HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_COARSE_GRAINED: u32 = 4;
    /// The runtime does not know the address.
    HSA_EXT_POINTER_TYPE_UNKNOWN: u32 = 0;
    /// Memory from one of the runtime's allocators.
    HSA_EXT_POINTER_TYPE_HSA: u32 = 1;
    /// Host memory that was page-locked for agents.
    HSA_EXT_POINTER_TYPE_LOCKED: u32 = 2;
    /// Memory that a graphics component shares.
    HSA_EXT_POINTER_TYPE_GRAPHICS: u32 = 3;
    /// Memory that another process shares.
    HSA_EXT_POINTER_TYPE_IPC: u32 = 4;
    /// An address in a reserved range, at which no memory is mapped. Since version 1.12 of the AMD
    /// extension.
    HSA_EXT_POINTER_TYPE_RESERVED_ADDR: u32 = 5;
    /// Memory that is mapped into a reserved address range. Since version 1.12 of the AMD
    /// extension.
    HSA_EXT_POINTER_TYPE_HSA_VMEM: u32 = 6;
    HSA_SIGNAL_CONDITION_LT: u32 = 2;
    HSA_WAIT_STATE_BLOCKED: u32 = 0;
    HSA_ACCESS_PERMISSION_RW: u32 = 3;
    MEMORY_TYPE_PINNED: u32 = 1;
    HSA_AMD_DMABUF_MAPPING_TYPE_NONE: u64 = 0;
    /// Dma-buf mapping by which other devices reach the memory over PCIe. Since ROCm 7.
    HSA_AMD_DMABUF_MAPPING_TYPE_PCIE: u64 = 1;
}

/// All constants of this module with their names in the headers. The first list has the numbers of
/// attributes, and the second list has all other constants.
pub const CONSTANTS: [&[(&str, u64)]; 2] = [ATTRIBUTES, PLAIN];

/// Callback of `hsa_iterate_agents`, called for each agent.
pub type AgentCallback = unsafe extern "C" fn(Agent, *mut c_void) -> HsaStatus;
/// Callback of `hsa_amd_agent_iterate_memory_pools`, called for each pool.
pub type PoolCallback = unsafe extern "C" fn(MemoryPool, *mut c_void) -> HsaStatus;
/// Callback of `hsa_amd_register_deallocation_callback`, called with the freed address and the data
/// given at registration.
pub type DeallocationCallback = unsafe extern "C" fn(*mut c_void, *mut c_void);
/// Allocator that `hsa_amd_pointer_info` calls for a list of agents. This crate passes `None`.
pub type ListAllocator = Option<unsafe extern "C" fn(usize) -> *mut c_void>;

const _: () = assert!(size_of::<PointerInfo>() == 56);

hmem_core::function_table! {
    /// Table of the functions of `libhsa-runtime64.so.1` that this crate calls.
    // SAFETY: the vendor supports loading its library in any process. The signatures are those of
    // the header, against which a test checks them.
    unsafe Functions {
        library: "libhsa-runtime64.so.1",
        variable: "HMEM_ROCR_LIBRARY",
        iface: IfaceKind::ROCR,
        not_loaded: "install AMD's HSA runtime, or name its library in HMEM_ROCR_LIBRARY (in Rust: \
                     Rocr::builder().library(path))",
        lacks_symbol: "the library has no such symbol: it is not AMD's HSA runtime library, or \
                       older than ROCm 5",
    }
    required {
        init: hsa_init() -> HsaStatus;
        shut_down: hsa_shut_down() -> HsaStatus;
        system_get_info: hsa_system_get_info(u32, *mut c_void) -> HsaStatus;
        iterate_agents: hsa_iterate_agents(AgentCallback, *mut c_void) -> HsaStatus;
        agent_get_info: hsa_agent_get_info(Agent, u32, *mut c_void) -> HsaStatus;
        agent_iterate_memory_pools: hsa_amd_agent_iterate_memory_pools(
            Agent, PoolCallback, *mut c_void
        ) -> HsaStatus;
        memory_pool_get_info: hsa_amd_memory_pool_get_info(
            MemoryPool, u32, *mut c_void
        ) -> HsaStatus;
        memory_pool_allocate: hsa_amd_memory_pool_allocate(
            MemoryPool, usize, u32, *mut *mut c_void
        ) -> HsaStatus;
        memory_pool_free: hsa_amd_memory_pool_free(*mut c_void) -> HsaStatus;
        agents_allow_access: hsa_amd_agents_allow_access(
            u32, *const Agent, *const u32, *const c_void
        ) -> HsaStatus;
        pointer_info: hsa_amd_pointer_info(
            *const c_void, *mut PointerInfo, ListAllocator, *mut u32, *mut *mut Agent
        ) -> HsaStatus;
        signal_create: hsa_signal_create(i64, u32, *const Agent, *mut Signal) -> HsaStatus;
        signal_destroy: hsa_signal_destroy(Signal) -> HsaStatus;
        signal_load: hsa_signal_load_scacquire(Signal) -> i64;
        signal_wait: hsa_signal_wait_scacquire(Signal, u32, i64, u64, u32) -> i64;
    }
    optional {
        async_copy: hsa_amd_memory_async_copy(
            *mut c_void, Agent, *const c_void, Agent, usize, u32, *const Signal, Signal
        ) -> HsaStatus;
        register_deallocation: hsa_amd_register_deallocation_callback(
            *mut c_void, DeallocationCallback, *mut c_void
        ) -> HsaStatus;
        memory_lock: hsa_amd_memory_lock(
            *mut c_void, usize, *mut Agent, i32, *mut *mut c_void
        ) -> HsaStatus;
        memory_unlock: hsa_amd_memory_unlock(*mut c_void) -> HsaStatus;
        export_dmabuf: hsa_amd_portable_export_dmabuf(
            *const c_void, usize, *mut i32, *mut u64
        ) -> HsaStatus;
        export_dmabuf_v2: hsa_amd_portable_export_dmabuf_v2(
            *const c_void, usize, *mut i32, *mut u64, u64
        ) -> HsaStatus;
        close_dmabuf: hsa_amd_portable_close_dmabuf(i32) -> HsaStatus;
        ipc_create: hsa_amd_ipc_memory_create(*mut c_void, usize, *mut IpcMemory) -> HsaStatus;
        ipc_attach: hsa_amd_ipc_memory_attach(
            *const IpcMemory, usize, u32, *const Agent, *mut *mut c_void
        ) -> HsaStatus;
        ipc_detach: hsa_amd_ipc_memory_detach(*mut c_void) -> HsaStatus;
        vmem_reserve: hsa_amd_vmem_address_reserve(*mut *mut c_void, usize, u64, u64) -> HsaStatus;
        vmem_unreserve: hsa_amd_vmem_address_free(*mut c_void, usize) -> HsaStatus;
        vmem_create: hsa_amd_vmem_handle_create(
            MemoryPool, usize, u32, u64, *mut VmemHandle
        ) -> HsaStatus;
        vmem_release: hsa_amd_vmem_handle_release(VmemHandle) -> HsaStatus;
        vmem_map: hsa_amd_vmem_map(*mut c_void, usize, usize, VmemHandle, u64) -> HsaStatus;
        vmem_unmap: hsa_amd_vmem_unmap(*mut c_void, usize) -> HsaStatus;
        vmem_set_access: hsa_amd_vmem_set_access(
            *mut c_void, usize, *const AccessDesc, usize
        ) -> HsaStatus;
        vmem_export: hsa_amd_vmem_export_shareable_handle(*mut i32, VmemHandle, u64) -> HsaStatus;
    }
}

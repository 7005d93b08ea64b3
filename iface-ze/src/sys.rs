//! Function table of libze_loader.so.1, and layouts and constants of `ze_api.h`, written by hand.
//!
//! The module is public, so that an application or test can pass other functions with
//! [`Functions::from_lookup`].
//!
//! ```
//! use hmem_iface_ze::sys::{Functions, ZeResult};
//!
//! // SAFETY: the lookup returns no function, so no signature can be wrong.
//! let error = unsafe { Functions::from_lookup(|_| None) }.unwrap_err();
//! assert_eq!(error.context_value("symbol"), Some(Functions::SYMBOLS[0]));
//! let code = ZeResult::ZE_RESULT_ERROR_UNINITIALIZED;
//! assert_eq!(code.name(), Some("ZE_RESULT_ERROR_UNINITIALIZED"));
//! ```

#![allow(unsafe_code, reason = "zeroed C structures")]

use std::{
    ffi::{c_char, c_int, c_void},
    mem,
};

use hmem_core::IfaceKind;

hmem_core::c_enum! {
    /// `ze_result_t`: result code of the functions of Level Zero.
    ZeResult(u32) {
        ZE_RESULT_SUCCESS = 0x0,
        ZE_RESULT_NOT_READY = 0x1,
        ZE_RESULT_ERROR_DEVICE_LOST = 0x7000_0001,
        ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY = 0x7000_0002,
        ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY = 0x7000_0003,
        ZE_RESULT_ERROR_MODULE_BUILD_FAILURE = 0x7000_0004,
        ZE_RESULT_ERROR_MODULE_LINK_FAILURE = 0x7000_0005,
        ZE_RESULT_ERROR_DEVICE_REQUIRES_RESET = 0x7000_0006,
        ZE_RESULT_ERROR_DEVICE_IN_LOW_POWER_STATE = 0x7000_0007,
        ZE_RESULT_ERROR_INSUFFICIENT_PERMISSIONS = 0x7001_0000,
        ZE_RESULT_ERROR_NOT_AVAILABLE = 0x7001_0001,
        ZE_RESULT_ERROR_DEPENDENCY_UNAVAILABLE = 0x7002_0000,
        ZE_RESULT_WARNING_DROPPED_DATA = 0x7002_0001,
        ZE_RESULT_ERROR_UNINITIALIZED = 0x7800_0001,
        ZE_RESULT_ERROR_UNSUPPORTED_VERSION = 0x7800_0002,
        ZE_RESULT_ERROR_UNSUPPORTED_FEATURE = 0x7800_0003,
        ZE_RESULT_ERROR_INVALID_ARGUMENT = 0x7800_0004,
        ZE_RESULT_ERROR_INVALID_NULL_HANDLE = 0x7800_0005,
        ZE_RESULT_ERROR_HANDLE_OBJECT_IN_USE = 0x7800_0006,
        ZE_RESULT_ERROR_INVALID_NULL_POINTER = 0x7800_0007,
        ZE_RESULT_ERROR_INVALID_SIZE = 0x7800_0008,
        ZE_RESULT_ERROR_UNSUPPORTED_SIZE = 0x7800_0009,
        ZE_RESULT_ERROR_UNSUPPORTED_ALIGNMENT = 0x7800_000a,
        ZE_RESULT_ERROR_INVALID_SYNCHRONIZATION_OBJECT = 0x7800_000b,
        ZE_RESULT_ERROR_INVALID_ENUMERATION = 0x7800_000c,
        ZE_RESULT_ERROR_UNSUPPORTED_ENUMERATION = 0x7800_000d,
        ZE_RESULT_ERROR_UNSUPPORTED_IMAGE_FORMAT = 0x7800_000e,
        ZE_RESULT_ERROR_INVALID_NATIVE_BINARY = 0x7800_000f,
        ZE_RESULT_ERROR_INVALID_GLOBAL_NAME = 0x7800_0010,
        ZE_RESULT_ERROR_INVALID_KERNEL_NAME = 0x7800_0011,
        ZE_RESULT_ERROR_INVALID_FUNCTION_NAME = 0x7800_0012,
        ZE_RESULT_ERROR_INVALID_GROUP_SIZE_DIMENSION = 0x7800_0013,
        ZE_RESULT_ERROR_INVALID_GLOBAL_WIDTH_DIMENSION = 0x7800_0014,
        ZE_RESULT_ERROR_INVALID_KERNEL_ARGUMENT_INDEX = 0x7800_0015,
        ZE_RESULT_ERROR_INVALID_KERNEL_ARGUMENT_SIZE = 0x7800_0016,
        ZE_RESULT_ERROR_INVALID_KERNEL_ATTRIBUTE_VALUE = 0x7800_0017,
        ZE_RESULT_ERROR_INVALID_MODULE_UNLINKED = 0x7800_0018,
        ZE_RESULT_ERROR_INVALID_COMMAND_LIST_TYPE = 0x7800_0019,
        ZE_RESULT_ERROR_OVERLAPPING_REGIONS = 0x7800_001a,
        ZE_RESULT_WARNING_ACTION_REQUIRED = 0x7800_001b,
        ZE_RESULT_ERROR_INVALID_KERNEL_HANDLE = 0x7800_001c,
        ZE_RESULT_ERROR_SURVIVABILITY_MODE_DETECTED = 0x7800_0020,
        ZE_RESULT_ERROR_ADDRESS_NOT_FOUND = 0x7800_0021,
        ZE_RESULT_EXP_ERROR_DEVICE_IS_NOT_VERTEX = 0x7ff0_0001,
        ZE_RESULT_EXP_ERROR_VERTEX_IS_NOT_DEVICE = 0x7ff0_0002,
        ZE_RESULT_EXP_ERROR_REMOTE_DEVICE = 0x7ff0_0003,
        ZE_RESULT_ERROR_UNKNOWN = 0x7fff_fffe,
    }
}

hmem_iface_kit::handles! {
    /// `ze_driver_handle_t`: a driver behind the loader.
    DriverHandle,
    /// `ze_device_handle_t`: a device or sub-device.
    DeviceHandle,
    /// `ze_context_handle_t`: a context of one driver, which owns allocations.
    ContextHandle,
    /// `ze_command_list_handle_t`: a list of commands for a device. Only one thread at a time may
    /// use the list.
    CommandListHandle,
    /// `ze_event_pool_handle_t`: a pool that events are created from.
    EventPoolHandle,
    /// `ze_event_handle_t`: an event, which a command list signals.
    EventHandle,
}

/// Layout of a structure: names in `ze_api.h`, size and offsets of its fields.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Name of the structure in `ze_api.h`.
    pub name: &'static str,
    /// Size of the structure in bytes.
    pub size: usize,
    /// Names of the fields in `ze_api.h`, with their offsets.
    pub fields: &'static [(&'static str, usize)],
}

/// Declares structures of `ze_api.h`. Each begins with the fields `stype`, its type, and `pNext`,
/// the next structure of a chain. The default value has the right type, no next structure, and
/// zeros in the other fields.
macro_rules! structures {
    ($(
        $name:ident = $c:literal: $(#[doc = $doc:literal])* $stype:ident {
            $($field:ident = $c_field:literal: $type:ty,)+
        }
    )+) => {
        $(
            #[doc = concat!("`", $c, "`")]
            $(#[doc = ""] #[doc = $doc])*
            #[repr(C)]
            #[derive(Clone, Copy, Debug)]
            pub struct $name {
                #[doc = concat!("`stype`: [`", stringify!($stype), "`]")]
                pub stype: u32,
                /// `pNext`: the next structure of the chain, or null.
                pub next: *const c_void,
                $(
                    #[doc = concat!("`", $c_field, "`")]
                    pub $field: $type,
                )+
            }

            impl Default for $name {
                fn default() -> Self {
                    // SAFETY: every field is an integer, an array of integers or a pointer that
                    // may be null.
                    let zeroed: Self = unsafe { mem::zeroed() };
                    Self { stype: $stype, ..zeroed }
                }
            }
        )+

        /// Layouts of all structures of this module.
        pub const LAYOUTS: &[Layout] = &[$(Layout {
            name: $c,
            size: size_of::<$name>(),
            fields: &[
                ("stype", mem::offset_of!($name, stype)),
                ("pNext", mem::offset_of!($name, next)),
                $(($c_field, mem::offset_of!($name, $field))),+
            ],
        }),+];
    };
}

structures! {
    DeviceProperties = "ze_device_properties_t": ZE_STRUCTURE_TYPE_DEVICE_PROPERTIES {
        kind = "type": u32,
        vendor_id = "vendorId": u32,
        device_id = "deviceId": u32,
        flags = "flags": u32,
        subdevice_id = "subdeviceId": u32,
        core_clock_rate = "coreClockRate": u32,
        max_mem_alloc_size = "maxMemAllocSize": u64,
        max_hardware_contexts = "maxHardwareContexts": u32,
        max_command_queue_priority = "maxCommandQueuePriority": u32,
        num_threads_per_eu = "numThreadsPerEU": u32,
        physical_eu_simd_width = "physicalEUSimdWidth": u32,
        num_eus_per_subslice = "numEUsPerSubslice": u32,
        num_subslices_per_slice = "numSubslicesPerSlice": u32,
        num_slices = "numSlices": u32,
        timer_resolution = "timerResolution": u64,
        timestamp_valid_bits = "timestampValidBits": u32,
        kernel_timestamp_valid_bits = "kernelTimestampValidBits": u32,
        uuid = "uuid": [u8; 16],
        name = "name": [c_char; ZE_MAX_DEVICE_NAME],
    }

    DeviceMemoryProperties = "ze_device_memory_properties_t":
        ZE_STRUCTURE_TYPE_DEVICE_MEMORY_PROPERTIES {
        flags = "flags": u32,
        max_clock_rate = "maxClockRate": u32,
        max_bus_width = "maxBusWidth": u32,
        total_size = "totalSize": u64,
        name = "name": [c_char; ZE_MAX_DEVICE_NAME],
    }

    DeviceExternalMemoryProperties = "ze_device_external_memory_properties_t":
        ZE_STRUCTURE_TYPE_DEVICE_EXTERNAL_MEMORY_PROPERTIES {
        memory_import_types = "memoryAllocationImportTypes": u32,
        memory_export_types = "memoryAllocationExportTypes": u32,
        image_import_types = "imageImportTypes": u32,
        image_export_types = "imageExportTypes": u32,
    }

    QueueGroupProperties = "ze_command_queue_group_properties_t":
        ZE_STRUCTURE_TYPE_COMMAND_QUEUE_GROUP_PROPERTIES {
        flags = "flags": u32,
        max_memory_fill_pattern_size = "maxMemoryFillPatternSize": usize,
        num_queues = "numQueues": u32,
    }

    PciProperties = "ze_pci_ext_properties_t":
        /// Address of a device on the PCI bus, and the speed of its link.
        ZE_STRUCTURE_TYPE_PCI_EXT_PROPERTIES {
        domain = "address.domain": u32,
        bus = "address.bus": u32,
        device = "address.device": u32,
        function = "address.function": u32,
        speed_generation = "maxSpeed.genVersion": i32,
        speed_width = "maxSpeed.width": i32,
        speed_bandwidth = "maxSpeed.maxBandwidth": i64,
    }

    ContextDescription = "ze_context_desc_t": ZE_STRUCTURE_TYPE_CONTEXT_DESC {
        flags = "flags": u32,
    }

    DeviceMemoryDescription = "ze_device_mem_alloc_desc_t":
        ZE_STRUCTURE_TYPE_DEVICE_MEM_ALLOC_DESC {
        flags = "flags": u32,
        ordinal = "ordinal": u32,
    }

    HostMemoryDescription = "ze_host_mem_alloc_desc_t": ZE_STRUCTURE_TYPE_HOST_MEM_ALLOC_DESC {
        flags = "flags": u32,
    }

    ExportDescription = "ze_external_memory_export_desc_t":
        /// Extension of an allocation request: the types of export that the memory must support.
        ZE_STRUCTURE_TYPE_EXTERNAL_MEMORY_EXPORT_DESC {
        flags = "flags": u32,
    }

    ExportFd = "ze_external_memory_export_fd_t":
        /// Extension of an address query: requests a dma-buf of the allocation. The driver writes
        /// its fd to the field `fd`.
        ZE_STRUCTURE_TYPE_EXTERNAL_MEMORY_EXPORT_FD {
        flags = "flags": u32,
        fd = "fd": c_int,
    }

    ImportFd = "ze_external_memory_import_fd_t":
        /// Extension of an allocation request: the driver maps the memory of an fd instead of new
        /// memory.
        ZE_STRUCTURE_TYPE_EXTERNAL_MEMORY_IMPORT_FD {
        flags = "flags": u32,
        fd = "fd": c_int,
    }

    MemoryAllocationProperties = "ze_memory_allocation_properties_t":
        ZE_STRUCTURE_TYPE_MEMORY_ALLOCATION_PROPERTIES {
        kind = "type": u32,
        id = "id": u64,
        page_size = "pageSize": u64,
    }

    QueueDescription = "ze_command_queue_desc_t": ZE_STRUCTURE_TYPE_COMMAND_QUEUE_DESC {
        ordinal = "ordinal": u32,
        index = "index": u32,
        flags = "flags": u32,
        mode = "mode": u32,
        priority = "priority": u32,
    }

    EventPoolDescription = "ze_event_pool_desc_t": ZE_STRUCTURE_TYPE_EVENT_POOL_DESC {
        flags = "flags": u32,
        count = "count": u32,
    }

    EventDescription = "ze_event_desc_t": ZE_STRUCTURE_TYPE_EVENT_DESC {
        index = "index": u32,
        signal = "signal": u32,
        wait = "wait": u32,
    }
}

/// `ze_ipc_mem_handle_t`: handle by which another process opens an allocation.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct IpcMemoryHandle {
    /// `data`: opaque bytes of the driver.
    pub data: [c_char; ZE_MAX_IPC_HANDLE_SIZE],
}

impl Default for IpcMemoryHandle {
    fn default() -> Self {
        Self { data: [0; ZE_MAX_IPC_HANDLE_SIZE] }
    }
}

/// `ZE_MAX_DEVICE_NAME`: length in bytes of a device's name, with its NUL.
pub const ZE_MAX_DEVICE_NAME: usize = 256;
/// `ZE_MAX_IPC_HANDLE_SIZE`: length in bytes of an [`IpcMemoryHandle`].
pub const ZE_MAX_IPC_HANDLE_SIZE: usize = 64;

macro_rules! constants {
    ($($name:ident = $value:literal,)+) => {
        $(
            #[doc = concat!("`", stringify!($name), "`")]
            pub const $name: u32 = $value;
        )+

        /// All constants of this module, each with its name in `ze_api.h` and its value.
        pub const CONSTANTS: &[(&str, u32)] = &[$((stringify!($name), $value)),+];
    };
}

constants! {
    ZE_INIT_FLAG_GPU_ONLY = 1,
    ZE_DEVICE_TYPE_GPU = 1,
    ZE_MEMORY_TYPE_UNKNOWN = 0,
    ZE_MEMORY_TYPE_HOST = 1,
    ZE_MEMORY_TYPE_DEVICE = 2,
    ZE_MEMORY_TYPE_SHARED = 3,
    ZE_EXTERNAL_MEMORY_TYPE_FLAG_DMA_BUF = 2,
    ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COMPUTE = 1,
    ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COPY = 2,
    ZE_COMMAND_QUEUE_MODE_ASYNCHRONOUS = 2,
    ZE_EVENT_POOL_FLAG_HOST_VISIBLE = 1,
    ZE_EVENT_SCOPE_FLAG_HOST = 4,
    ZE_STRUCTURE_TYPE_DEVICE_PROPERTIES = 0x3,
    ZE_STRUCTURE_TYPE_COMMAND_QUEUE_GROUP_PROPERTIES = 0x6,
    ZE_STRUCTURE_TYPE_DEVICE_MEMORY_PROPERTIES = 0x7,
    ZE_STRUCTURE_TYPE_DEVICE_EXTERNAL_MEMORY_PROPERTIES = 0xc,
    ZE_STRUCTURE_TYPE_CONTEXT_DESC = 0xd,
    ZE_STRUCTURE_TYPE_COMMAND_QUEUE_DESC = 0xe,
    ZE_STRUCTURE_TYPE_EVENT_POOL_DESC = 0x10,
    ZE_STRUCTURE_TYPE_EVENT_DESC = 0x11,
    ZE_STRUCTURE_TYPE_DEVICE_MEM_ALLOC_DESC = 0x15,
    ZE_STRUCTURE_TYPE_HOST_MEM_ALLOC_DESC = 0x16,
    ZE_STRUCTURE_TYPE_MEMORY_ALLOCATION_PROPERTIES = 0x17,
    ZE_STRUCTURE_TYPE_EXTERNAL_MEMORY_EXPORT_DESC = 0x18,
    ZE_STRUCTURE_TYPE_EXTERNAL_MEMORY_IMPORT_FD = 0x19,
    ZE_STRUCTURE_TYPE_EXTERNAL_MEMORY_EXPORT_FD = 0x1a,
    ZE_STRUCTURE_TYPE_PCI_EXT_PROPERTIES = 0x1_0008,
}

hmem_core::function_table! {
    /// Table of the functions of `libze_loader.so.1` that this crate calls.
    // SAFETY: the vendor supports loading its library in any process. The signatures are those of
    // the header, against which a test checks them.
    unsafe Functions {
        library: "libze_loader.so.1",
        variable: "HMEM_ZE_LIBRARY",
        iface: IfaceKind::ZE,
        not_loaded: "install the Level Zero loader, or name its library in HMEM_ZE_LIBRARY (in \
                     Rust: LevelZero::builder().library(path))",
        lacks_symbol: "the library has no such symbol: it is not the Level Zero loader, or older \
                       than Level Zero 1.3",
    }
    required {
        init: zeInit(u32) -> ZeResult;
        driver_get: zeDriverGet(*mut u32, *mut DriverHandle) -> ZeResult;
        device_get: zeDeviceGet(DriverHandle, *mut u32, *mut DeviceHandle) -> ZeResult;
        device_get_sub_devices: zeDeviceGetSubDevices(
            DeviceHandle, *mut u32, *mut DeviceHandle
        ) -> ZeResult;
        device_get_properties: zeDeviceGetProperties(
            DeviceHandle, *mut DeviceProperties
        ) -> ZeResult;
        device_get_memory_properties: zeDeviceGetMemoryProperties(
            DeviceHandle, *mut u32, *mut DeviceMemoryProperties
        ) -> ZeResult;
        device_get_external_memory_properties: zeDeviceGetExternalMemoryProperties(
            DeviceHandle, *mut DeviceExternalMemoryProperties
        ) -> ZeResult;
        device_get_queue_groups: zeDeviceGetCommandQueueGroupProperties(
            DeviceHandle, *mut u32, *mut QueueGroupProperties
        ) -> ZeResult;
        device_pci_get_properties: zeDevicePciGetPropertiesExt(
            DeviceHandle, *mut PciProperties
        ) -> ZeResult;
        context_create: zeContextCreate(
            DriverHandle, *const ContextDescription, *mut ContextHandle
        ) -> ZeResult;
        context_destroy: zeContextDestroy(ContextHandle) -> ZeResult;
        mem_alloc_device: zeMemAllocDevice(
            ContextHandle, *const DeviceMemoryDescription, usize, usize, DeviceHandle,
            *mut *mut c_void
        ) -> ZeResult;
        mem_alloc_host: zeMemAllocHost(
            ContextHandle, *const HostMemoryDescription, usize, usize, *mut *mut c_void
        ) -> ZeResult;
        mem_alloc_shared: zeMemAllocShared(
            ContextHandle, *const DeviceMemoryDescription, *const HostMemoryDescription, usize,
            usize, DeviceHandle, *mut *mut c_void
        ) -> ZeResult;
        mem_free: zeMemFree(ContextHandle, *mut c_void) -> ZeResult;
        mem_get_alloc_properties: zeMemGetAllocProperties(
            ContextHandle, *const c_void, *mut MemoryAllocationProperties, *mut DeviceHandle
        ) -> ZeResult;
        mem_get_address_range: zeMemGetAddressRange(
            ContextHandle, *const c_void, *mut *mut c_void, *mut usize
        ) -> ZeResult;
        command_list_create_immediate: zeCommandListCreateImmediate(
            ContextHandle, DeviceHandle, *const QueueDescription, *mut CommandListHandle
        ) -> ZeResult;
        command_list_destroy: zeCommandListDestroy(CommandListHandle) -> ZeResult;
        append_memory_copy: zeCommandListAppendMemoryCopy(
            CommandListHandle, *mut c_void, *const c_void, usize, EventHandle, u32, *mut EventHandle
        ) -> ZeResult;
        event_pool_create: zeEventPoolCreate(
            ContextHandle, *const EventPoolDescription, u32, *mut DeviceHandle, *mut EventPoolHandle
        ) -> ZeResult;
        event_pool_destroy: zeEventPoolDestroy(EventPoolHandle) -> ZeResult;
        event_create: zeEventCreate(
            EventPoolHandle, *const EventDescription, *mut EventHandle
        ) -> ZeResult;
        event_destroy: zeEventDestroy(EventHandle) -> ZeResult;
        event_host_synchronize: zeEventHostSynchronize(EventHandle, u64) -> ZeResult;
        event_query_status: zeEventQueryStatus(EventHandle) -> ZeResult;
        event_host_reset: zeEventHostReset(EventHandle) -> ZeResult;
    }
    optional {
        ipc_handle_from_fd: zeMemGetIpcHandleFromFileDescriptorExp(
            ContextHandle, u64, *mut IpcMemoryHandle
        ) -> ZeResult;
        put_ipc_handle: zeMemPutIpcHandle(ContextHandle, IpcMemoryHandle) -> ZeResult;
    }
}

impl Functions {
    /// Returns true if the library has the calls that return the fd of an export to the driver.
    #[must_use]
    pub fn gives_fds_back(&self) -> bool {
        self.put_ipc_handle.is_some() && self.ipc_handle_from_fd.is_some()
    }
}

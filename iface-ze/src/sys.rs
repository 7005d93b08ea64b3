//! libze_loader.so.1: its function table, and the layouts and constants of `ze_api.h`, laid out by
//! hand.
//!
//! Public, so that a test can inject a driver of its own with [`Functions::from_lookup`].
//!
//! ```
//! use hmem_iface_ze::sys::{Functions, ZeResult};
//!
//! // SAFETY: the lookup returns nothing, so there is nothing that it must vouch for.
//! let error = unsafe { Functions::from_lookup(|_| None) }.unwrap_err();
//! assert_eq!(error.context_value("symbol"), Some(Functions::SYMBOLS[0]));
//! let code = ZeResult::ZE_RESULT_ERROR_UNINITIALIZED;
//! assert_eq!(code.name(), Some("ZE_RESULT_ERROR_UNINITIALIZED"));
//! ```

use std::{
    ffi::{c_char, c_int, c_void},
    mem,
    path::Path,
    ptr,
    sync::Arc,
};

use hmem_core::{Error, ErrorKind, IfaceKind, Result};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// `ze_result_t`: the result of every call of Level Zero.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZeResult(pub u32);

macro_rules! codes {
    ($($name:ident = $code:literal,)+) => {
        impl ZeResult {
            /// Every code that has a name here.
            pub const ALL: &[Self] = &[$(Self($code)),+];

            $(
                #[doc = concat!("`", stringify!($name), "`")]
                pub const $name: Self = Self($code);
            )+

            /// The name in `ze_api.h`, where it has one.
            #[must_use]
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($code => Some(stringify!($name)),)+
                    _ => None,
                }
            }
        }
    };
}

codes! {
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

macro_rules! handles {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {$(
        $(#[doc = $doc])+
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name(pub *mut c_void);

        impl $name {
            /// No object.
            pub const NULL: Self = Self(ptr::null_mut());
        }

        // SAFETY: a handle is an opaque name that this crate never dereferences; the specification
        // lets an application use its object from any thread.
        unsafe impl Send for $name {}
        // SAFETY: the handle has no state on this side of a call; where the specification allows an
        // object in one thread at a time only, its owner in this crate sees to it.
        unsafe impl Sync for $name {}
    )+};
}

handles! {
    /// `ze_driver_handle_t`
    DriverHandle,
    /// `ze_device_handle_t`
    DeviceHandle,
    /// `ze_context_handle_t`
    ContextHandle,
    /// `ze_command_list_handle_t`: used by one thread at a time.
    CommandListHandle,
    /// `ze_event_pool_handle_t`
    EventPoolHandle,
    /// `ze_event_handle_t`
    EventHandle,
}

/// Size of a structure and offsets of its fields, by their names in `ze_api.h`.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Name of the structure.
    pub name: &'static str,
    /// Its bytes.
    pub size: usize,
    /// Its fields with their offsets.
    pub fields: &'static [(&'static str, usize)],
}

/// Structures as `ze_api.h` has them. Those with a type begin with it and the next structure of
/// their chain; the default has the type, no next one, and zeros.
macro_rules! structures {
    ($(
        $(#[doc = $doc:literal])+
        $name:ident = $c:literal $(($stype:ident))? {
            $($field:ident = $c_field:literal: $type:ty,)+
        }
    )+) => {
        $(
            $(#[doc = $doc])+
            #[repr(C)]
            #[derive(Clone, Copy, Debug)]
            pub struct $name {
                $(
                    #[doc = concat!("`", $c_field, "`")]
                    pub $field: $type,
                )+
            }

            impl Default for $name {
                fn default() -> Self {
                    // SAFETY: every field is an integer, an array of them or a pointer that may be
                    // null.
                    #[allow(unused_mut)]
                    let mut zeroed: Self = unsafe { mem::zeroed() };
                    $(zeroed.stype = $stype;)?
                    zeroed
                }
            }
        )+

        /// The layout of each structure.
        pub const LAYOUTS: &[Layout] = &[$(Layout {
            name: $c,
            size: size_of::<$name>(),
            fields: &[$(($c_field, mem::offset_of!($name, $field))),+],
        }),+];
    };
}

structures! {
    /// `ze_device_properties_t`
    DeviceProperties = "ze_device_properties_t" (ZE_STRUCTURE_TYPE_DEVICE_PROPERTIES) {
        stype = "stype": u32,
        next = "pNext": *mut c_void,
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

    /// `ze_device_memory_properties_t`
    DeviceMemoryProperties = "ze_device_memory_properties_t"
        (ZE_STRUCTURE_TYPE_DEVICE_MEMORY_PROPERTIES) {
        stype = "stype": u32,
        next = "pNext": *mut c_void,
        flags = "flags": u32,
        max_clock_rate = "maxClockRate": u32,
        max_bus_width = "maxBusWidth": u32,
        total_size = "totalSize": u64,
        name = "name": [c_char; ZE_MAX_DEVICE_NAME],
    }

    /// `ze_device_external_memory_properties_t`
    DeviceExternalMemoryProperties = "ze_device_external_memory_properties_t"
        (ZE_STRUCTURE_TYPE_DEVICE_EXTERNAL_MEMORY_PROPERTIES) {
        stype = "stype": u32,
        next = "pNext": *mut c_void,
        memory_import_types = "memoryAllocationImportTypes": u32,
        memory_export_types = "memoryAllocationExportTypes": u32,
        image_import_types = "imageImportTypes": u32,
        image_export_types = "imageExportTypes": u32,
    }

    /// `ze_command_queue_group_properties_t`
    QueueGroupProperties = "ze_command_queue_group_properties_t"
        (ZE_STRUCTURE_TYPE_COMMAND_QUEUE_GROUP_PROPERTIES) {
        stype = "stype": u32,
        next = "pNext": *mut c_void,
        flags = "flags": u32,
        max_memory_fill_pattern_size = "maxMemoryFillPatternSize": usize,
        num_queues = "numQueues": u32,
    }

    /// `ze_pci_ext_properties_t` with its address and speed
    PciProperties = "ze_pci_ext_properties_t" (ZE_STRUCTURE_TYPE_PCI_EXT_PROPERTIES) {
        stype = "stype": u32,
        next = "pNext": *mut c_void,
        domain = "address.domain": u32,
        bus = "address.bus": u32,
        device = "address.device": u32,
        function = "address.function": u32,
        speed_generation = "maxSpeed.genVersion": i32,
        speed_width = "maxSpeed.width": i32,
        speed_bandwidth = "maxSpeed.maxBandwidth": i64,
    }

    /// `ze_context_desc_t`
    ContextDescription = "ze_context_desc_t" (ZE_STRUCTURE_TYPE_CONTEXT_DESC) {
        stype = "stype": u32,
        next = "pNext": *const c_void,
        flags = "flags": u32,
    }

    /// `ze_device_mem_alloc_desc_t`
    DeviceMemoryDescription = "ze_device_mem_alloc_desc_t"
        (ZE_STRUCTURE_TYPE_DEVICE_MEM_ALLOC_DESC) {
        stype = "stype": u32,
        next = "pNext": *const c_void,
        flags = "flags": u32,
        ordinal = "ordinal": u32,
    }

    /// `ze_host_mem_alloc_desc_t`
    HostMemoryDescription = "ze_host_mem_alloc_desc_t" (ZE_STRUCTURE_TYPE_HOST_MEM_ALLOC_DESC) {
        stype = "stype": u32,
        next = "pNext": *const c_void,
        flags = "flags": u32,
    }

    /// `ze_external_memory_export_desc_t`: says at allocation how the memory will be exported.
    ExportDescription = "ze_external_memory_export_desc_t"
        (ZE_STRUCTURE_TYPE_EXTERNAL_MEMORY_EXPORT_DESC) {
        stype = "stype": u32,
        next = "pNext": *const c_void,
        flags = "flags": u32,
    }

    /// `ze_external_memory_export_fd_t`: asks for an fd of an allocation.
    ExportFd = "ze_external_memory_export_fd_t" (ZE_STRUCTURE_TYPE_EXTERNAL_MEMORY_EXPORT_FD) {
        stype = "stype": u32,
        next = "pNext": *const c_void,
        flags = "flags": u32,
        fd = "fd": c_int,
    }

    /// `ze_external_memory_import_fd_t`: allocates the memory of an fd.
    ImportFd = "ze_external_memory_import_fd_t" (ZE_STRUCTURE_TYPE_EXTERNAL_MEMORY_IMPORT_FD) {
        stype = "stype": u32,
        next = "pNext": *const c_void,
        flags = "flags": u32,
        fd = "fd": c_int,
    }

    /// `ze_memory_allocation_properties_t`
    MemoryAllocationProperties = "ze_memory_allocation_properties_t"
        (ZE_STRUCTURE_TYPE_MEMORY_ALLOCATION_PROPERTIES) {
        stype = "stype": u32,
        next = "pNext": *mut c_void,
        kind = "type": u32,
        id = "id": u64,
        page_size = "pageSize": u64,
    }

    /// `ze_command_queue_desc_t`
    QueueDescription = "ze_command_queue_desc_t" (ZE_STRUCTURE_TYPE_COMMAND_QUEUE_DESC) {
        stype = "stype": u32,
        next = "pNext": *const c_void,
        ordinal = "ordinal": u32,
        index = "index": u32,
        flags = "flags": u32,
        mode = "mode": u32,
        priority = "priority": u32,
    }

    /// `ze_event_pool_desc_t`
    EventPoolDescription = "ze_event_pool_desc_t" (ZE_STRUCTURE_TYPE_EVENT_POOL_DESC) {
        stype = "stype": u32,
        next = "pNext": *const c_void,
        flags = "flags": u32,
        count = "count": u32,
    }

    /// `ze_event_desc_t`
    EventDescription = "ze_event_desc_t" (ZE_STRUCTURE_TYPE_EVENT_DESC) {
        stype = "stype": u32,
        next = "pNext": *const c_void,
        index = "index": u32,
        signal = "signal": u32,
        wait = "wait": u32,
    }

    /// `ze_ipc_mem_handle_t`
    IpcMemoryHandle = "ze_ipc_mem_handle_t" {
        data = "data": [c_char; ZE_MAX_IPC_HANDLE_SIZE],
    }
}

/// `ZE_MAX_DEVICE_NAME`
pub const ZE_MAX_DEVICE_NAME: usize = 256;
/// `ZE_MAX_IPC_HANDLE_SIZE`
pub const ZE_MAX_IPC_HANDLE_SIZE: usize = 64;

macro_rules! constants {
    ($($name:ident = $value:literal,)+) => {
        $(
            #[doc = concat!("`", stringify!($name), "`")]
            pub const $name: u32 = $value;
        )+

        /// Each constant with its name.
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

/// A required function as the table has it.
macro_rules! required {
    ($library:expr, $lookup:expr, $symbol:ident, $type:ty) => {{
        let address = $lookup(stringify!($symbol))
            .filter(|address: &*const ()| !address.is_null())
            .ok_or_else(|| lacks_symbol($library, stringify!($symbol)))?;
        // SAFETY: the caller of `fill` promises that the address is a function with the signature
        // that the header declares for this name, which is the one in this table.
        unsafe { mem::transmute::<*const (), $type>(address) }
    }};
}

macro_rules! functions {
    (
        $($(#[doc = $doc:literal])+ $field:ident: $symbol:ident = fn($($argument:ty),*);)+
        optional:
        $($(#[doc = $optional_doc:literal])+ $optional:ident: $optional_symbol:ident = fn($($optional_argument:ty),*);)+
    ) => {
        /// The functions of libze_loader.so.1 that this crate calls.
        #[derive(Clone, Debug)]
        pub struct Functions {
            library: Arc<str>,
            $($(#[doc = $doc])+ pub(crate) $field: unsafe extern "C" fn($($argument),*) -> ZeResult,)+
            $(
                $(#[doc = $optional_doc])+
                pub(crate) $optional: Option<unsafe extern "C" fn($($optional_argument),*) -> ZeResult>,
            )+
        }

        impl Functions {
            /// Every symbol that the library must have.
            pub const SYMBOLS: &[&str] = &[$(stringify!($symbol)),+];

            /// Symbols that older releases of the library lack.
            pub const OPTIONAL_SYMBOLS: &[&str] = &[$(stringify!($optional_symbol)),+];

            /// Each symbol with the types of its arguments, as Rust spells them.
            pub const SIGNATURES: &[(&str, &[&str])] = &[
                $((stringify!($symbol), &[$(stringify!($argument)),*]),)+
                $((stringify!($optional_symbol), &[$(stringify!($optional_argument)),*]),)+
            ];

            /// # Safety
            /// As [`Functions::from_lookup`].
            unsafe fn fill(
                library: &str,
                mut lookup: impl FnMut(&'static str) -> Option<*const ()>,
            ) -> Result<Self> {
                Ok(Self {
                    library: library.into(),
                    $($field: required!(
                        library, lookup, $symbol, unsafe extern "C" fn($($argument),*) -> ZeResult
                    ),)+
                    $($optional: lookup(stringify!($optional_symbol))
                        .filter(|address| !address.is_null())
                        // SAFETY: the caller promises that the address is a function with the
                        // signature that the header declares for this name, which is the one in
                        // this table.
                        .map(|address| unsafe {
                            mem::transmute::<*const (), unsafe extern "C" fn($($optional_argument),*) -> ZeResult>(
                                address,
                            )
                        }),)+
                })
            }
        }
    };
}

functions! {
    /// `zeInit(flags)`
    init: zeInit = fn(u32);
    /// `zeDriverGet(count, drivers)`
    driver_get: zeDriverGet = fn(*mut u32, *mut DriverHandle);
    /// `zeDeviceGet(driver, count, devices)`
    device_get: zeDeviceGet = fn(DriverHandle, *mut u32, *mut DeviceHandle);
    /// `zeDeviceGetSubDevices(device, count, sub-devices)`
    device_get_sub_devices: zeDeviceGetSubDevices = fn(DeviceHandle, *mut u32, *mut DeviceHandle);
    /// `zeDeviceGetProperties(device, properties)`
    device_get_properties: zeDeviceGetProperties = fn(DeviceHandle, *mut DeviceProperties);
    /// `zeDeviceGetMemoryProperties(device, count, properties)`
    device_get_memory_properties: zeDeviceGetMemoryProperties =
        fn(DeviceHandle, *mut u32, *mut DeviceMemoryProperties);
    /// `zeDeviceGetExternalMemoryProperties(device, properties)`
    device_get_external_memory_properties: zeDeviceGetExternalMemoryProperties =
        fn(DeviceHandle, *mut DeviceExternalMemoryProperties);
    /// `zeDeviceGetCommandQueueGroupProperties(device, count, properties)`
    device_get_queue_groups: zeDeviceGetCommandQueueGroupProperties =
        fn(DeviceHandle, *mut u32, *mut QueueGroupProperties);
    /// `zeDevicePciGetPropertiesExt(device, properties)`
    device_pci_get_properties: zeDevicePciGetPropertiesExt = fn(DeviceHandle, *mut PciProperties);
    /// `zeContextCreate(driver, description, context)`
    context_create: zeContextCreate = fn(DriverHandle, *const ContextDescription, *mut ContextHandle);
    /// `zeContextDestroy(context)`
    context_destroy: zeContextDestroy = fn(ContextHandle);
    /// `zeMemAllocDevice(context, description, size, alignment, device, pointer)`
    mem_alloc_device: zeMemAllocDevice =
        fn(ContextHandle, *const DeviceMemoryDescription, usize, usize, DeviceHandle, *mut *mut c_void);
    /// `zeMemAllocHost(context, description, size, alignment, pointer)`
    mem_alloc_host: zeMemAllocHost =
        fn(ContextHandle, *const HostMemoryDescription, usize, usize, *mut *mut c_void);
    /// `zeMemAllocShared(context, device's description, host's, size, alignment, device, pointer)`
    mem_alloc_shared: zeMemAllocShared = fn(
        ContextHandle,
        *const DeviceMemoryDescription,
        *const HostMemoryDescription,
        usize,
        usize,
        DeviceHandle,
        *mut *mut c_void
    );
    /// `zeMemFree(context, pointer)`
    mem_free: zeMemFree = fn(ContextHandle, *mut c_void);
    /// `zeMemGetAllocProperties(context, pointer, properties, device)`
    mem_get_alloc_properties: zeMemGetAllocProperties =
        fn(ContextHandle, *const c_void, *mut MemoryAllocationProperties, *mut DeviceHandle);
    /// `zeMemGetAddressRange(context, pointer, base, size)`
    mem_get_address_range: zeMemGetAddressRange =
        fn(ContextHandle, *const c_void, *mut *mut c_void, *mut usize);
    /// `zeCommandListCreateImmediate(context, device, description, list)`
    command_list_create_immediate: zeCommandListCreateImmediate =
        fn(ContextHandle, DeviceHandle, *const QueueDescription, *mut CommandListHandle);
    /// `zeCommandListDestroy(list)`
    command_list_destroy: zeCommandListDestroy = fn(CommandListHandle);
    /// `zeCommandListAppendMemoryCopy(list, to, from, size, signal, count, wait for)`
    append_memory_copy: zeCommandListAppendMemoryCopy =
        fn(CommandListHandle, *mut c_void, *const c_void, usize, EventHandle, u32, *mut EventHandle);
    /// `zeEventPoolCreate(context, description, count, devices, pool)`
    event_pool_create: zeEventPoolCreate =
        fn(ContextHandle, *const EventPoolDescription, u32, *mut DeviceHandle, *mut EventPoolHandle);
    /// `zeEventPoolDestroy(pool)`
    event_pool_destroy: zeEventPoolDestroy = fn(EventPoolHandle);
    /// `zeEventCreate(pool, description, event)`
    event_create: zeEventCreate = fn(EventPoolHandle, *const EventDescription, *mut EventHandle);
    /// `zeEventDestroy(event)`
    event_destroy: zeEventDestroy = fn(EventHandle);
    /// `zeEventHostSynchronize(event, nanoseconds)`
    event_host_synchronize: zeEventHostSynchronize = fn(EventHandle, u64);
    /// `zeEventQueryStatus(event)`
    event_query_status: zeEventQueryStatus = fn(EventHandle);
    /// `zeEventHostReset(event)`
    event_host_reset: zeEventHostReset = fn(EventHandle);

    optional:
    /// `zeMemGetIpcHandleFromFileDescriptorExp(context, fd, handle)`
    ipc_handle_from_fd: zeMemGetIpcHandleFromFileDescriptorExp =
        fn(ContextHandle, u64, *mut IpcMemoryHandle);
    /// `zeMemPutIpcHandle(context, handle)`
    put_ipc_handle: zeMemPutIpcHandle = fn(ContextHandle, IpcMemoryHandle);
}

impl Functions {
    /// The name by which the dynamic loader finds the library.
    pub const LIBRARY: &str = "libze_loader.so.1";

    /// Loads the library at `path` and fills the table from it.
    ///
    /// The library stays loaded for the rest of the process.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] naming the library, with the loader's reason, or with the first
    /// symbol that it lacks.
    pub fn load(path: &Path) -> Result<Self> {
        let library = path.display().to_string();
        // SAFETY: loading runs the library's initialisers; the caller names the Level Zero loader,
        // whose initialisers have no precondition.
        let loaded = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|reason| not_loaded(&library, reason))?;
        // SAFETY: the addresses come from the library itself under the names of its own header, and
        // the library is never unloaded once the table is filled.
        let functions = unsafe {
            Self::fill(&library, |symbol| {
                loaded
                    .get::<*const ()>(symbol)
                    .ok()
                    .map(|address| address.as_raw_ptr().cast_const().cast())
            })
        }?;
        // Dropping the handle would unload the driver under the threads, callbacks and exit
        // handlers that it leaves behind, and crash the process.
        std::mem::forget(loaded);
        Ok(functions)
    }

    /// Fills the table from a lookup closure: a driver of the caller's own, such as a test's.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] naming the first of [`Functions::SYMBOLS`] for which `lookup` has
    /// nothing.
    ///
    /// # Safety
    /// Each address that `lookup` returns is a function with the signature that `ze_api.h` declares
    /// for that name, and stays callable from any thread for as long as a copy of the table
    /// exists.
    pub unsafe fn from_lookup(
        lookup: impl FnMut(&'static str) -> Option<*const ()>,
    ) -> Result<Self> {
        // SAFETY: the same promise, made by the caller.
        unsafe { Self::fill("(injected)", lookup) }
    }

    /// Returns true if the library has the calls that give an fd of an export back.
    #[must_use]
    pub fn gives_fds_back(&self) -> bool {
        self.put_ipc_handle.is_some() && self.ipc_handle_from_fd.is_some()
    }

    /// The library that the functions came from, as it was named.
    #[must_use]
    pub fn library(&self) -> &str {
        &self.library
    }
}

fn not_loaded(library: &str, reason: libloading::Error) -> Error {
    let error = Error::new(ErrorKind::Unavailable, "load library")
        .iface(IfaceKind::ZE)
        .context("library", library)
        .remedy(
            "install the Level Zero loader, or name its library in HMEM_ZE_LIBRARY (in Rust: \
             LevelZero::builder().library(path))",
        );
    match reason {
        libloading::Error::DlOpen { source } => error.caused_by(source),
        other => error.caused_by(other),
    }
}

fn lacks_symbol(library: &str, symbol: &'static str) -> Error {
    Error::new(ErrorKind::Unavailable, "load library")
        .iface(IfaceKind::ZE)
        .context("library", library)
        .context("symbol", symbol)
        .remedy(
            "the library has no such symbol: it is not the Level Zero loader, or older than Level Zero 1.3",
        )
}

//! Function table of libze_loader.so.1, and layouts and constants of `ze_api.h`, written by hand.
//!
//! The module is public, so that an application or test can pass other functions with
//! [`Functions::from_lookup`].
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

/// `ze_result_t`: result code of the functions of Level Zero.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZeResult(pub u32);

macro_rules! codes {
    ($($name:ident = $code:literal,)+) => {
        impl ZeResult {
            /// All codes that have a name.
            pub const ALL: &[Self] = &[$(Self($code)),+];

            $(
                #[doc = concat!("`", stringify!($name), "`")]
                pub const $name: Self = Self($code);
            )+

            /// Returns the name in `ze_api.h`, or `None` for an unknown code.
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
            /// The null handle.
            pub const NULL: Self = Self(ptr::null_mut());
        }

        // SAFETY: a handle is opaque, and this crate never dereferences it. The specification
        // allows any thread to use the object of the handle.
        unsafe impl Send for $name {}
        // SAFETY: the handle has no state in this process. If the specification allows an object in
        // only one thread at a time, its owner in this crate ensures that.
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
    /// `ze_command_list_handle_t`: only one thread at a time may use the list.
    CommandListHandle,
    /// `ze_event_pool_handle_t`
    EventPoolHandle,
    /// `ze_event_handle_t`
    EventHandle,
}

/// Layout of a structure: names in `ze_api.h`, size and offsets of its fields.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Name of the structure in `ze_api.h`.
    pub name: &'static str,
    /// Size in bytes.
    pub size: usize,
    /// Names of the fields in `ze_api.h`, with their offsets.
    pub fields: &'static [(&'static str, usize)],
}

/// Declares structures of `ze_api.h`. Each begins with the fields `stype`, its type, and `pNext`,
/// the next structure of a chain. The default value has the right type, no next structure, and
/// zeros.
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
                /// `pNext`
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

        /// The layout of each structure.
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
        /// Passed at an allocation: the types of export that the memory must support.
        ZE_STRUCTURE_TYPE_EXTERNAL_MEMORY_EXPORT_DESC {
        flags = "flags": u32,
    }

    ExportFd = "ze_external_memory_export_fd_t":
        /// Passed at a query: requests an fd of the allocation, and receives it.
        ZE_STRUCTURE_TYPE_EXTERNAL_MEMORY_EXPORT_FD {
        flags = "flags": u32,
        fd = "fd": c_int,
    }

    ImportFd = "ze_external_memory_import_fd_t":
        /// Passed at an allocation: maps the memory of an fd instead of new memory.
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

/// `ze_ipc_mem_handle_t`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct IpcMemoryHandle {
    /// `data`
    pub data: [c_char; ZE_MAX_IPC_HANDLE_SIZE],
}

impl Default for IpcMemoryHandle {
    fn default() -> Self {
        Self { data: [0; ZE_MAX_IPC_HANDLE_SIZE] }
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

        /// All constants with their names.
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

/// Looks up a required function, or returns an error that names it.
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
        required { $($field:ident: $symbol:ident($($argument:ty),*);)+ }
        optional { $($optional:ident: $optional_symbol:ident($($optional_argument:ty),*);)+ }
    ) => {
        /// Table of the functions of `libze_loader.so.1` that this crate calls.
        #[derive(Clone, Debug)]
        pub struct Functions {
            library: Arc<str>,
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> ZeResult,)+
            $(
                pub(crate) $optional:
                    Option<unsafe extern "C" fn($($optional_argument),*) -> ZeResult>,
            )+
        }

        impl Functions {
            /// Symbols that the library must have.
            pub const SYMBOLS: &[&str] = &[$(stringify!($symbol)),+];

            /// Symbols that older releases of the library lack.
            pub const OPTIONAL_SYMBOLS: &[&str] = &[$(stringify!($optional_symbol)),+];

            /// All symbols with the types of their arguments, as Rust spells them.
            pub const SIGNATURES: &[(&str, &[&str])] = &[
                $((stringify!($symbol), &[$(stringify!($argument)),*]),)+
                $((stringify!($optional_symbol), &[$(stringify!($optional_argument)),*]),)+
            ];

            /// Fills the table with the functions that `lookup` returns.
            ///
            /// # Safety
            /// The caller upholds the safety contract of [`Functions::from_lookup`].
            unsafe fn fill(
                library: &str,
                mut lookup: impl FnMut(&'static str) -> Option<*const ()>,
            ) -> Result<Self> {
                Ok(Self {
                    library: library.into(),
                    $($field: required!(
                        library, lookup, $symbol, unsafe extern "C" fn($($argument),*) -> ZeResult
                    ),)+
                    $($optional: {
                        type Function = unsafe extern "C" fn($($optional_argument),*) -> ZeResult;
                        let address = lookup(stringify!($optional_symbol));
                        // SAFETY: the caller promises that the address is a function with the
                        // signature that the header declares for this name, which is the one in
                        // this table.
                        address.filter(|address| !address.is_null()).map(|address| unsafe {
                            mem::transmute::<*const (), Function>(address)
                        })
                    },)+
                })
            }
        }
    };
}

functions! {
    required {
        init: zeInit(u32);
        driver_get: zeDriverGet(*mut u32, *mut DriverHandle);
        device_get: zeDeviceGet(DriverHandle, *mut u32, *mut DeviceHandle);
        device_get_sub_devices: zeDeviceGetSubDevices(DeviceHandle, *mut u32, *mut DeviceHandle);
        device_get_properties: zeDeviceGetProperties(DeviceHandle, *mut DeviceProperties);
        device_get_memory_properties: zeDeviceGetMemoryProperties(
            DeviceHandle, *mut u32, *mut DeviceMemoryProperties
        );
        device_get_external_memory_properties: zeDeviceGetExternalMemoryProperties(
            DeviceHandle, *mut DeviceExternalMemoryProperties
        );
        device_get_queue_groups: zeDeviceGetCommandQueueGroupProperties(
            DeviceHandle, *mut u32, *mut QueueGroupProperties
        );
        device_pci_get_properties: zeDevicePciGetPropertiesExt(DeviceHandle, *mut PciProperties);
        context_create: zeContextCreate(
            DriverHandle, *const ContextDescription, *mut ContextHandle
        );
        context_destroy: zeContextDestroy(ContextHandle);
        mem_alloc_device: zeMemAllocDevice(
            ContextHandle, *const DeviceMemoryDescription, usize, usize, DeviceHandle,
            *mut *mut c_void
        );
        mem_alloc_host: zeMemAllocHost(
            ContextHandle, *const HostMemoryDescription, usize, usize, *mut *mut c_void
        );
        mem_alloc_shared: zeMemAllocShared(
            ContextHandle, *const DeviceMemoryDescription, *const HostMemoryDescription, usize,
            usize, DeviceHandle, *mut *mut c_void
        );
        mem_free: zeMemFree(ContextHandle, *mut c_void);
        mem_get_alloc_properties: zeMemGetAllocProperties(
            ContextHandle, *const c_void, *mut MemoryAllocationProperties, *mut DeviceHandle
        );
        mem_get_address_range: zeMemGetAddressRange(
            ContextHandle, *const c_void, *mut *mut c_void, *mut usize
        );
        command_list_create_immediate: zeCommandListCreateImmediate(
            ContextHandle, DeviceHandle, *const QueueDescription, *mut CommandListHandle
        );
        command_list_destroy: zeCommandListDestroy(CommandListHandle);
        append_memory_copy: zeCommandListAppendMemoryCopy(
            CommandListHandle, *mut c_void, *const c_void, usize, EventHandle, u32, *mut EventHandle
        );
        event_pool_create: zeEventPoolCreate(
            ContextHandle, *const EventPoolDescription, u32, *mut DeviceHandle, *mut EventPoolHandle
        );
        event_pool_destroy: zeEventPoolDestroy(EventPoolHandle);
        event_create: zeEventCreate(EventPoolHandle, *const EventDescription, *mut EventHandle);
        event_destroy: zeEventDestroy(EventHandle);
        event_host_synchronize: zeEventHostSynchronize(EventHandle, u64);
        event_query_status: zeEventQueryStatus(EventHandle);
        event_host_reset: zeEventHostReset(EventHandle);
    }
    optional {
        ipc_handle_from_fd: zeMemGetIpcHandleFromFileDescriptorExp(
            ContextHandle, u64, *mut IpcMemoryHandle
        );
        put_ipc_handle: zeMemPutIpcHandle(ContextHandle, IpcMemoryHandle);
    }
}

impl Functions {
    /// Name by which the dynamic loader finds the library.
    pub const LIBRARY: &str = "libze_loader.so.1";

    /// Loads the library at `path` and fills the table from it.
    ///
    /// The library stays loaded for the rest of the process.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if the dynamic loader refuses the library, or if the library
    /// lacks a required symbol. The error names the library, and the loader's reason or the first
    /// missing symbol.
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
        // Dropping the handle would unload the library. Its threads, callbacks and exit handlers
        // would then crash the process.
        std::mem::forget(loaded);
        Ok(functions)
    }

    /// Fills the table with the functions that a closure returns, such as those of a fake driver.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] naming the first of [`Functions::SYMBOLS`] for which `lookup`
    /// returns `None`.
    ///
    /// # Safety
    /// Each address that `lookup` returns is a function with the signature that `ze_api.h` declares
    /// for that name, and stays callable from any thread for as long as a copy of the table
    /// exists.
    pub unsafe fn from_lookup(
        lookup: impl FnMut(&'static str) -> Option<*const ()>,
    ) -> Result<Self> {
        // SAFETY: the caller of this function makes the promise that `fill` asks for.
        unsafe { Self::fill("(injected)", lookup) }
    }

    /// Returns true if the library has the calls that return the fd of an export to the driver.
    #[must_use]
    pub fn gives_fds_back(&self) -> bool {
        self.put_ipc_handle.is_some() && self.ipc_handle_from_fd.is_some()
    }

    /// Returns the name of the library that the functions came from.
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
            "the library has no such symbol: it is not the Level Zero loader, or older than Level \
             Zero 1.3",
        )
}

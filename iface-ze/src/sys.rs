//! libze_loader.so.1: its function table, and the layouts and constants of `ze_api.h`, laid out by
//! hand.
//!
//! Public so that a driver of one's own can be injected with [`Functions::from_lookup`].
//!
//! ```
//! use hmem_iface_ze::sys::{ZeResult, Functions};
//!
//! // SAFETY: the lookup returns nothing, so there is nothing that it must vouch for.
//! let error = unsafe { Functions::from_lookup(|_| None) }.unwrap_err();
//! assert_eq!(error.context_value("symbol"), Some(Functions::SYMBOLS[0]));
//! assert_eq!(ZeResult::ZE_RESULT_ERROR_UNINITIALIZED.name(), Some("ZE_RESULT_ERROR_UNINITIALIZED"));
//! ```

use std::{
    ffi::{c_char, c_void},
    mem,
    path::Path,
    ptr,
    sync::Arc,
};

use hmem_core::{Error, ErrorKind, IfaceKind, Result};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// `ze_result_t`: what every call of Level Zero returns.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZeResult(pub u32);

macro_rules! codes {
    ($($name:ident = $code:literal,)+) => {
        impl ZeResult {
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

        // SAFETY: a handle is an opaque name that this crate never dereferences; the specification lets an
        // application use it from any thread ("free-threaded" objects, and these three are among them).
        unsafe impl Send for $name {}
        // SAFETY: as above; it has no state on this side of the call.
        unsafe impl Sync for $name {}

        const _: () = assert!(size_of::<$name>() == size_of::<*mut c_void>());
    )+};
}

handles! {
    /// `ze_driver_handle_t`
    DriverHandle,
    /// `ze_device_handle_t`
    DeviceHandle,
    /// `ze_context_handle_t`
    ContextHandle,
}

/// `ze_device_properties_t`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceProperties {
    /// [`ZE_STRUCTURE_TYPE_DEVICE_PROPERTIES`]
    pub stype: u32,
    /// The next structure of the chain, or null.
    pub next: *mut c_void,
    /// A `ZE_DEVICE_TYPE_*`.
    pub kind: u32,
    /// PCI vendor.
    pub vendor_id: u32,
    /// PCI device.
    pub device_id: u32,
    /// `ze_device_property_flag_t` bits.
    pub flags: u32,
    /// Number of a sub-device.
    pub subdevice_id: u32,
    /// In MHz.
    pub core_clock_rate: u32,
    /// Largest allocation in bytes.
    pub max_mem_alloc_size: u64,
    /// Logical hardware contexts.
    pub max_hardware_contexts: u32,
    /// Highest queue priority.
    pub max_command_queue_priority: u32,
    /// Threads of an execution unit.
    pub num_threads_per_eu: u32,
    /// Lanes of an execution unit.
    pub physical_eu_simd_width: u32,
    /// Execution units of a sub-slice.
    pub num_eus_per_subslice: u32,
    /// Sub-slices of a slice.
    pub num_subslices_per_slice: u32,
    /// Slices.
    pub num_slices: u32,
    /// In nanoseconds.
    pub timer_resolution: u64,
    /// Valid bits of a timestamp.
    pub timestamp_valid_bits: u32,
    /// Valid bits of a kernel's timestamp.
    pub kernel_timestamp_valid_bits: u32,
    /// `ze_device_uuid_t`
    pub uuid: [u8; 16],
    /// NUL-terminated.
    pub name: [c_char; ZE_MAX_DEVICE_NAME],
}

/// `ze_device_memory_properties_t`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceMemoryProperties {
    /// [`ZE_STRUCTURE_TYPE_DEVICE_MEMORY_PROPERTIES`]
    pub stype: u32,
    /// The next structure of the chain, or null.
    pub next: *mut c_void,
    /// Reserved bits.
    pub flags: u32,
    /// In MHz.
    pub max_clock_rate: u32,
    /// In bits.
    pub max_bus_width: u32,
    /// Bytes of the memory.
    pub total_size: u64,
    /// NUL-terminated.
    pub name: [c_char; ZE_MAX_DEVICE_NAME],
}

/// `ze_pci_ext_properties_t` with its `ze_pci_address_ext_t` and `ze_pci_speed_ext_t`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PciProperties {
    /// [`ZE_STRUCTURE_TYPE_PCI_EXT_PROPERTIES`]
    pub stype: u32,
    /// The next structure of the chain, or null.
    pub next: *mut c_void,
    /// PCI domain.
    pub domain: u32,
    /// PCI bus.
    pub bus: u32,
    /// PCI device.
    pub device: u32,
    /// PCI function.
    pub function: u32,
    /// Generation of the link, or -1.
    pub speed_generation: i32,
    /// Lanes, or -1.
    pub speed_width: i32,
    /// Bytes per second, or -1.
    pub speed_bandwidth: i64,
}

/// `ze_context_desc_t`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ContextDescription {
    /// [`ZE_STRUCTURE_TYPE_CONTEXT_DESC`]
    pub stype: u32,
    /// The next structure of the chain, or null.
    pub next: *const c_void,
    /// `ze_context_flag_t` bits.
    pub flags: u32,
}

/// `ze_memory_allocation_properties_t`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MemoryAllocationProperties {
    /// [`ZE_STRUCTURE_TYPE_MEMORY_ALLOCATION_PROPERTIES`]
    pub stype: u32,
    /// The next structure of the chain, or null.
    pub next: *mut c_void,
    /// A `ZE_MEMORY_TYPE_*`.
    pub kind: u32,
    /// Which allocation of its driver it is.
    pub id: u64,
    /// Bytes of a page of it.
    pub page_size: u64,
}

/// `ZE_MAX_DEVICE_NAME`
pub const ZE_MAX_DEVICE_NAME: usize = 256;

/// `ZE_INIT_FLAG_GPU_ONLY`
pub const ZE_INIT_FLAG_GPU_ONLY: u32 = 1;

/// `ZE_STRUCTURE_TYPE_DEVICE_PROPERTIES`
pub const ZE_STRUCTURE_TYPE_DEVICE_PROPERTIES: u32 = 0x3;
/// `ZE_STRUCTURE_TYPE_DEVICE_MEMORY_PROPERTIES`
pub const ZE_STRUCTURE_TYPE_DEVICE_MEMORY_PROPERTIES: u32 = 0x7;
/// `ZE_STRUCTURE_TYPE_CONTEXT_DESC`
pub const ZE_STRUCTURE_TYPE_CONTEXT_DESC: u32 = 0xd;
/// `ZE_STRUCTURE_TYPE_MEMORY_ALLOCATION_PROPERTIES`
pub const ZE_STRUCTURE_TYPE_MEMORY_ALLOCATION_PROPERTIES: u32 = 0x17;
/// `ZE_STRUCTURE_TYPE_PCI_EXT_PROPERTIES`
pub const ZE_STRUCTURE_TYPE_PCI_EXT_PROPERTIES: u32 = 0x1_0008;

/// `ZE_DEVICE_TYPE_GPU`
pub const ZE_DEVICE_TYPE_GPU: u32 = 1;

/// Not memory of this driver.
pub const ZE_MEMORY_TYPE_UNKNOWN: u32 = 0;
/// `ZE_MEMORY_TYPE_HOST`
pub const ZE_MEMORY_TYPE_HOST: u32 = 1;
/// `ZE_MEMORY_TYPE_DEVICE`
pub const ZE_MEMORY_TYPE_DEVICE: u32 = 2;
/// `ZE_MEMORY_TYPE_SHARED`
pub const ZE_MEMORY_TYPE_SHARED: u32 = 3;

const _: () = assert!(size_of::<ZeResult>() == 4);
const _: () = assert!(size_of::<DeviceProperties>() == 368);
const _: () = assert!(mem::offset_of!(DeviceProperties, kind) == 16);
const _: () = assert!(mem::offset_of!(DeviceProperties, flags) == 28);
const _: () = assert!(mem::offset_of!(DeviceProperties, max_mem_alloc_size) == 40);
const _: () = assert!(mem::offset_of!(DeviceProperties, timer_resolution) == 80);
const _: () = assert!(mem::offset_of!(DeviceProperties, uuid) == 96);
const _: () = assert!(mem::offset_of!(DeviceProperties, name) == 112);
const _: () = assert!(size_of::<DeviceMemoryProperties>() == 296);
const _: () = assert!(mem::offset_of!(DeviceMemoryProperties, total_size) == 32);
const _: () = assert!(mem::offset_of!(DeviceMemoryProperties, name) == 40);
const _: () = assert!(size_of::<PciProperties>() == 48);
const _: () = assert!(mem::offset_of!(PciProperties, domain) == 16);
const _: () = assert!(mem::offset_of!(PciProperties, speed_generation) == 32);
const _: () = assert!(mem::offset_of!(PciProperties, speed_bandwidth) == 40);
const _: () = assert!(size_of::<ContextDescription>() == 24);
const _: () = assert!(mem::offset_of!(ContextDescription, flags) == 16);
const _: () = assert!(size_of::<MemoryAllocationProperties>() == 40);
const _: () = assert!(mem::offset_of!(MemoryAllocationProperties, kind) == 16);
const _: () = assert!(mem::offset_of!(MemoryAllocationProperties, id) == 24);
const _: () = assert!(mem::offset_of!(MemoryAllocationProperties, page_size) == 32);

macro_rules! functions {
    ($($(#[doc = $doc:literal])+ $field:ident: $symbol:ident = fn($($argument:ty),*);)+) => {
        /// The functions of libze_loader.so.1 that this crate calls.
        #[derive(Clone, Debug)]
        pub struct Functions {
            library: Arc<str>,
            $($(#[doc = $doc])+ pub(crate) $field: unsafe extern "C" fn($($argument),*) -> ZeResult,)+
        }

        impl Functions {
            /// Every symbol that the library must have.
            pub const SYMBOLS: &[&str] = &[$(stringify!($symbol)),+];

            /// # Safety
            /// As [`Functions::from_lookup`].
            unsafe fn fill(
                library: &str,
                mut lookup: impl FnMut(&'static str) -> Option<*const ()>,
            ) -> Result<Self> {
                Ok(Self {
                    library: library.into(),
                    $($field: {
                        let address = lookup(stringify!($symbol))
                            .filter(|address| !address.is_null())
                            .ok_or_else(|| lacks_symbol(library, stringify!($symbol)))?;
                        // SAFETY: the caller promises that what it returns under this name is a function with the
                        // signature that the header declares for it, which is the one in this table.
                        unsafe {
                            mem::transmute::<*const (), unsafe extern "C" fn($($argument),*) -> ZeResult>(address)
                        }
                    },)+
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
    /// `zeDevicePciGetPropertiesExt(device, properties)`
    device_pci_get_properties: zeDevicePciGetPropertiesExt = fn(DeviceHandle, *mut PciProperties);
    /// `zeContextCreate(driver, description, context)`
    context_create: zeContextCreate = fn(DriverHandle, *const ContextDescription, *mut ContextHandle);
    /// `zeContextDestroy(context)`
    context_destroy: zeContextDestroy = fn(ContextHandle);
    /// `zeMemGetAllocProperties(context, pointer, properties, device)`
    mem_get_alloc_properties: zeMemGetAllocProperties =
        fn(ContextHandle, *const c_void, *mut MemoryAllocationProperties, *mut DeviceHandle);
    /// `zeMemGetAddressRange(context, pointer, base, size)`
    mem_get_address_range: zeMemGetAddressRange =
        fn(ContextHandle, *const c_void, *mut *mut c_void, *mut usize);
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
        .remedy("install the Level Zero loader, or name its library with LevelZero::builder().library(path)");
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

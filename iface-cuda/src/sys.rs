//! libcuda.so.1: its function table, and the layouts and constants of `cuda.h`, laid out by hand.
//!
//! Public so that a driver of one's own can be injected with [`Functions::from_lookup`].
//!
//! ```
//! use hmem_iface_cuda::sys::{CuResult, Functions};
//!
//! // SAFETY: the lookup returns nothing, so there is nothing that it must vouch for.
//! let error = unsafe { Functions::from_lookup(|_| None) }.unwrap_err();
//! assert_eq!(error.context_value("symbol"), Some(Functions::SYMBOLS[0]));
//! assert_eq!(CuResult::CUDA_ERROR_NO_DEVICE.name(), Some("CUDA_ERROR_NO_DEVICE"));
//! ```

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    mem,
    path::Path,
    sync::Arc,
};

use hmem_core::{Error, ErrorKind, IfaceKind, Result};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// `CUresult`: what every call of the driver API returns.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CuResult(pub u32);

macro_rules! codes {
    ($($name:ident = $code:literal,)+) => {
        impl CuResult {
            $(
                #[doc = concat!("`", stringify!($name), "`")]
                pub const $name: Self = Self($code);
            )+

            /// The name in `cuda.h`, where it has one.
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
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEINITIALIZED = 4,
    CUDA_ERROR_PROFILER_DISABLED = 5,
    CUDA_ERROR_PROFILER_NOT_INITIALIZED = 6,
    CUDA_ERROR_PROFILER_ALREADY_STARTED = 7,
    CUDA_ERROR_PROFILER_ALREADY_STOPPED = 8,
    CUDA_ERROR_STUB_LIBRARY = 34,
    CUDA_ERROR_DEVICE_UNAVAILABLE = 46,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_DEVICE_NOT_LICENSED = 102,
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_CONTEXT_ALREADY_CURRENT = 202,
    CUDA_ERROR_MAP_FAILED = 205,
    CUDA_ERROR_UNMAP_FAILED = 206,
    CUDA_ERROR_ARRAY_IS_MAPPED = 207,
    CUDA_ERROR_ALREADY_MAPPED = 208,
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
    CUDA_ERROR_ALREADY_ACQUIRED = 210,
    CUDA_ERROR_NOT_MAPPED = 211,
    CUDA_ERROR_NOT_MAPPED_AS_ARRAY = 212,
    CUDA_ERROR_NOT_MAPPED_AS_POINTER = 213,
    CUDA_ERROR_ECC_UNCORRECTABLE = 214,
    CUDA_ERROR_UNSUPPORTED_LIMIT = 215,
    CUDA_ERROR_CONTEXT_ALREADY_IN_USE = 216,
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
    CUDA_ERROR_INVALID_PTX = 218,
    CUDA_ERROR_INVALID_GRAPHICS_CONTEXT = 219,
    CUDA_ERROR_NVLINK_UNCORRECTABLE = 220,
    CUDA_ERROR_JIT_COMPILER_NOT_FOUND = 221,
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222,
    CUDA_ERROR_JIT_COMPILATION_DISABLED = 223,
    CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY = 224,
    CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC = 225,
    CUDA_ERROR_CONTAINED = 226,
    CUDA_ERROR_INVALID_SOURCE = 300,
    CUDA_ERROR_FILE_NOT_FOUND = 301,
    CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND = 302,
    CUDA_ERROR_SHARED_OBJECT_INIT_FAILED = 303,
    CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_ILLEGAL_STATE = 401,
    CUDA_ERROR_LOSSY_QUERY = 402,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701,
    CUDA_ERROR_LAUNCH_TIMEOUT = 702,
    CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING = 703,
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
    CUDA_ERROR_PEER_ACCESS_NOT_ENABLED = 705,
    CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE = 708,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_ASSERT = 710,
    CUDA_ERROR_TOO_MANY_PEERS = 711,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    CUDA_ERROR_HARDWARE_STACK_ERROR = 714,
    CUDA_ERROR_ILLEGAL_INSTRUCTION = 715,
    CUDA_ERROR_MISALIGNED_ADDRESS = 716,
    CUDA_ERROR_INVALID_ADDRESS_SPACE = 717,
    CUDA_ERROR_INVALID_PC = 718,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE = 720,
    CUDA_ERROR_TENSOR_MEMORY_LEAK = 721,
    CUDA_ERROR_NOT_PERMITTED = 800,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_SYSTEM_NOT_READY = 802,
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803,
    CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE = 804,
    CUDA_ERROR_MPS_CONNECTION_FAILED = 805,
    CUDA_ERROR_MPS_RPC_FAILURE = 806,
    CUDA_ERROR_MPS_SERVER_NOT_READY = 807,
    CUDA_ERROR_MPS_MAX_CLIENTS_REACHED = 808,
    CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED = 809,
    CUDA_ERROR_MPS_CLIENT_TERMINATED = 810,
    CUDA_ERROR_CDP_NOT_SUPPORTED = 811,
    CUDA_ERROR_CDP_VERSION_MISMATCH = 812,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_STREAM_CAPTURE_MERGE = 902,
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904,
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
    CUDA_ERROR_CAPTURED_EVENT = 907,
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
    CUDA_ERROR_TIMEOUT = 909,
    CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE = 910,
    CUDA_ERROR_EXTERNAL_DEVICE = 911,
    CUDA_ERROR_INVALID_CLUSTER_SIZE = 912,
    CUDA_ERROR_FUNCTION_NOT_LOADED = 913,
    CUDA_ERROR_INVALID_RESOURCE_TYPE = 914,
    CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION = 915,
    CUDA_ERROR_KEY_ROTATION = 916,
    CUDA_ERROR_UNKNOWN = 999,
}

/// `CUdevice`: a device's ordinal as the driver numbers it.
pub type CuDevice = c_int;

/// `CUpointer_attribute`: what to ask about a pointer.
pub type CuPointerAttribute = c_uint;

/// `CU_POINTER_ATTRIBUTE_CONTEXT`: the context of the allocation, null for VMM and stream-ordered memory.
pub const CU_POINTER_ATTRIBUTE_CONTEXT: CuPointerAttribute = 1;
/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`: a `CU_MEMORYTYPE_*` as `unsigned int`, 0 for foreign addresses.
pub const CU_POINTER_ATTRIBUTE_MEMORY_TYPE: CuPointerAttribute = 2;
/// `CU_POINTER_ATTRIBUTE_BUFFER_ID`: never given twice in a process, as `unsigned long long`.
pub const CU_POINTER_ATTRIBUTE_BUFFER_ID: CuPointerAttribute = 7;
/// `CU_POINTER_ATTRIBUTE_IS_MANAGED`: a boolean.
pub const CU_POINTER_ATTRIBUTE_IS_MANAGED: CuPointerAttribute = 8;
/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`: as `int`; negative for memory of no device.
pub const CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: CuPointerAttribute = 9;
/// `CU_POINTER_ATTRIBUTE_RANGE_START_ADDR`: the allocation's (for VMM, the reservation's) first address.
pub const CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: CuPointerAttribute = 11;
/// `CU_POINTER_ATTRIBUTE_RANGE_SIZE`: the allocation's (for VMM, the reservation's) bytes, as `size_t`.
pub const CU_POINTER_ATTRIBUTE_RANGE_SIZE: CuPointerAttribute = 12;
/// `CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE`: the pool of stream-ordered memory, null for other memory. From CUDA
/// 11.3 on.
pub const CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: CuPointerAttribute = 17;

/// `CU_MEMORYTYPE_HOST`
pub const CU_MEMORYTYPE_HOST: c_uint = 1;
/// `CU_MEMORYTYPE_DEVICE`
pub const CU_MEMORYTYPE_DEVICE: c_uint = 2;

/// The first driver version (`1000 * major + 10 * minor`) with range attributes: CUDA 10.2.
pub const VERSION_WITH_RANGES: c_int = 10020;
/// The first driver version with [`CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE`]: CUDA 11.3.
pub const VERSION_WITH_POOL_HANDLE: c_int = 11030;

const _: () = assert!(size_of::<CuResult>() == 4);
const _: () = assert!(size_of::<CuDevice>() == 4);
const _: () = assert!(size_of::<CuPointerAttribute>() == 4);

macro_rules! functions {
    ($($(#[doc = $doc:literal])+ $field:ident: $symbol:ident = fn($($argument:ty),*);)+) => {
        /// The functions of libcuda.so.1 that this crate calls.
        #[derive(Clone, Debug)]
        pub struct Functions {
            library: Arc<str>,
            $($(#[doc = $doc])+ pub(crate) $field: unsafe extern "C" fn($($argument),*) -> CuResult,)+
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
                            mem::transmute::<*const (), unsafe extern "C" fn($($argument),*) -> CuResult>(address)
                        }
                    },)+
                })
            }
        }
    };
}

functions! {
    /// `cuInit(flags)`
    init: cuInit = fn(c_uint);
    /// `cuDriverGetVersion(version)`
    driver_get_version: cuDriverGetVersion = fn(*mut c_int);
    /// `cuDeviceGetCount(count)`
    device_get_count: cuDeviceGetCount = fn(*mut c_int);
    /// `cuDeviceGet(device, ordinal)`
    device_get: cuDeviceGet = fn(*mut CuDevice, c_int);
    /// `cuDeviceGetName(name, len, device)`
    device_get_name: cuDeviceGetName = fn(*mut c_char, c_int, CuDevice);
    /// `cuDeviceTotalMem_v2(bytes, device)`
    device_total_mem: cuDeviceTotalMem_v2 = fn(*mut usize, CuDevice);
    /// `cuDeviceGetPCIBusId(id, len, device)`
    device_get_pci_bus_id: cuDeviceGetPCIBusId = fn(*mut c_char, c_int, CuDevice);
    /// `cuPointerGetAttributes(count, attributes, data, pointer)`
    pointer_get_attributes: cuPointerGetAttributes = fn(c_uint, *mut CuPointerAttribute, *mut *mut c_void, u64);
}

impl Functions {
    /// The name by which the dynamic loader finds the library.
    pub const LIBRARY: &str = "libcuda.so.1";

    /// Loads the library at `path` and fills the table from it.
    ///
    /// The library stays loaded for the rest of the process.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] naming the library, with the loader's reason, or with the first symbol that it
    /// lacks.
    pub fn load(path: &Path) -> Result<Self> {
        let library = path.display().to_string();
        // SAFETY: loading runs the library's initialisers; the caller names NVIDIA's driver library, whose initialisers
        // have no precondition.
        let loaded = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|reason| not_loaded(&library, reason))?;
        // SAFETY: the addresses come from the library itself under the names of its own header, and the library is
        // never unloaded once the table is filled.
        let functions = unsafe {
            Self::fill(&library, |symbol| {
                loaded.get::<*const ()>(symbol).ok().map(|address| address.as_raw_ptr().cast_const().cast())
            })
        }?;
        // Dropping the handle would unload the driver under the threads, callbacks and exit handlers that it leaves
        // behind, and crash the process.
        std::mem::forget(loaded);
        Ok(functions)
    }

    /// Fills the table from a lookup closure: a driver of the caller's own, such as a test's.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] naming the first of [`Functions::SYMBOLS`] for which `lookup` has nothing.
    ///
    /// # Safety
    /// Each address that `lookup` returns is a function with the signature that `cuda.h` declares for that name, and
    /// stays callable from any thread for as long as a copy of the table exists.
    pub unsafe fn from_lookup(lookup: impl FnMut(&'static str) -> Option<*const ()>) -> Result<Self> {
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
        .iface(IfaceKind::CUDA)
        .context("library", library)
        .remedy("install NVIDIA's driver, or name its library with Cuda::builder().library(path)");
    match reason {
        libloading::Error::DlOpen { source } => error.caused_by(source),
        other => error.caused_by(other),
    }
}

fn lacks_symbol(library: &str, symbol: &'static str) -> Error {
    Error::new(ErrorKind::Unavailable, "load library")
        .iface(IfaceKind::CUDA)
        .context("library", library)
        .context("symbol", symbol)
        .remedy("the library has no such symbol: it is not NVIDIA's driver library, or older than CUDA 10.2")
}

//! libhsa-runtime64.so.1: its function table, and the layouts and constants of `hsa.h` and
//! `hsa_ext_amd.h`, laid out by hand.
//!
//! Public so that a driver of one's own can be injected with [`Functions::from_lookup`].
//!
//! ```
//! use hmem_iface_rocr::sys::{HsaStatus, Functions};
//!
//! // SAFETY: the lookup returns nothing, so there is nothing that it must vouch for.
//! let error = unsafe { Functions::from_lookup(|_| None) }.unwrap_err();
//! assert_eq!(error.context_value("symbol"), Some(Functions::SYMBOLS[0]));
//! assert_eq!(HsaStatus::HSA_STATUS_ERROR_OUT_OF_RESOURCES.name(), Some("HSA_STATUS_ERROR_OUT_OF_RESOURCES"));
//! ```

use std::{ffi::c_void, mem, path::Path, sync::Arc};

use hmem_core::{Error, ErrorKind, IfaceKind, Result};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// `hsa_status_t`: what every call of the runtime returns.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HsaStatus(pub u32);

macro_rules! codes {
    ($($name:ident = $code:literal,)+) => {
        impl HsaStatus {
            $(
                #[doc = concat!("`", stringify!($name), "`")]
                pub const $name: Self = Self($code);
            )+

            /// The name in `hsa.h` and `hsa_ext_amd.h`, where it has one.
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

/// `hsa_agent_t`: a CPU or GPU as the runtime names it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Agent {
    /// Opaque; 0 is no agent.
    pub handle: u64,
}

/// `hsa_amd_memory_pool_t`: memory of an agent to allocate from.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryPool {
    /// Opaque.
    pub handle: u64,
}

/// `hsa_amd_pointer_info_t`. Newer runtimes have more after these members and write no more than
/// [`Self::size`] says.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PointerInfo {
    /// Bytes of this structure; the runtime lowers it if it knows fewer.
    pub size: u32,
    /// An `HSA_EXT_POINTER_TYPE_*`. For `HSA_EXT_POINTER_TYPE_UNKNOWN` the rest is stale.
    pub kind: u32,
    /// The first address for agents.
    pub agent_base: *mut c_void,
    /// The first address for the CPU; null if it has no access.
    pub host_base: *mut c_void,
    /// Bytes of the allocation.
    pub len: usize,
    /// The application's own.
    pub user_data: *mut c_void,
    /// The agent whose memory it is; handle 0 if that agent is not in this process.
    pub owner: Agent,
    /// `hsa_amd_memory_pool_global_flag_t` bits.
    pub global_flags: u32,
}

/// An attribute of an agent (`hsa_agent_info_t`, `hsa_amd_agent_info_t`), with the type that the
/// header gives it.
#[derive(Clone, Copy, Debug)]
pub struct AgentAttribute<T> {
    /// The number in the header.
    pub number: u32,
    /// A value of its type, to be written over.
    pub(crate) empty: T,
}

/// `HSA_AGENT_INFO_NAME`: `char[64]`.
pub const HSA_AGENT_INFO_NAME: AgentAttribute<[u8; 64]> =
    AgentAttribute { number: 0, empty: [0; 64] };
/// `HSA_AGENT_INFO_DEVICE`: an `HSA_DEVICE_TYPE_*`.
pub const HSA_AGENT_INFO_DEVICE: AgentAttribute<u32> = AgentAttribute { number: 17, empty: 0 };
/// `HSA_AMD_AGENT_INFO_BDFID`: `uint32_t`, bus in bits 8 to 15, device in 3 to 7, function in 0 to
/// 2.
pub const HSA_AMD_AGENT_INFO_BDFID: AgentAttribute<u32> =
    AgentAttribute { number: 0xa006, empty: 0 };
/// `HSA_AMD_AGENT_INFO_PRODUCT_NAME`: `char[64]`.
pub const HSA_AMD_AGENT_INFO_PRODUCT_NAME: AgentAttribute<[u8; 64]> =
    AgentAttribute { number: 0xa009, empty: [0; 64] };
/// `HSA_AMD_AGENT_INFO_DOMAIN`: `uint32_t`, the PCI domain.
pub const HSA_AMD_AGENT_INFO_DOMAIN: AgentAttribute<u32> =
    AgentAttribute { number: 0xa00f, empty: 0 };

/// `HSA_DEVICE_TYPE_CPU`
pub const HSA_DEVICE_TYPE_CPU: u32 = 0;
/// `HSA_DEVICE_TYPE_GPU`
pub const HSA_DEVICE_TYPE_GPU: u32 = 1;

/// An attribute of a memory pool (`hsa_amd_memory_pool_info_t`), with the type that the header
/// gives it.
#[derive(Clone, Copy, Debug)]
pub struct PoolAttribute<T> {
    /// The number in the header.
    pub number: u32,
    /// A value of its type, to be written over.
    pub(crate) empty: T,
}

/// `HSA_AMD_MEMORY_POOL_INFO_SEGMENT`: an `HSA_AMD_SEGMENT_*`.
pub const HSA_AMD_MEMORY_POOL_INFO_SEGMENT: PoolAttribute<u32> =
    PoolAttribute { number: 0, empty: 0 };
/// `HSA_AMD_MEMORY_POOL_INFO_SIZE`: `size_t`, bytes.
pub const HSA_AMD_MEMORY_POOL_INFO_SIZE: PoolAttribute<usize> =
    PoolAttribute { number: 2, empty: 0 };
/// `HSA_AMD_SEGMENT_GLOBAL`
pub const HSA_AMD_SEGMENT_GLOBAL: u32 = 0;

/// Not memory of the runtime.
pub const HSA_EXT_POINTER_TYPE_UNKNOWN: u32 = 0;
/// From one of the runtime's allocators.
pub const HSA_EXT_POINTER_TYPE_HSA: u32 = 1;
/// Host memory that was page-locked for agents.
pub const HSA_EXT_POINTER_TYPE_LOCKED: u32 = 2;
/// Shared by a graphics component.
pub const HSA_EXT_POINTER_TYPE_GRAPHICS: u32 = 3;
/// Shared by another process.
pub const HSA_EXT_POINTER_TYPE_IPC: u32 = 4;
/// A reserved address range with nothing mapped here. From version 1.12 of the AMD extension on.
pub const HSA_EXT_POINTER_TYPE_RESERVED_ADDR: u32 = 5;
/// Mapped into a reserved address range. From version 1.12 of the AMD extension on.
pub const HSA_EXT_POINTER_TYPE_HSA_VMEM: u32 = 6;

/// What [`Functions`]' `iterate_agents` calls for each agent.
pub type AgentCallback = unsafe extern "C" fn(Agent, *mut c_void) -> HsaStatus;
/// What [`Functions`]' `agent_iterate_memory_pools` calls for each pool.
pub type PoolCallback = unsafe extern "C" fn(MemoryPool, *mut c_void) -> HsaStatus;
/// What `hsa_amd_pointer_info` would allocate its list of agents with; this crate asks for none.
pub type ListAllocator = Option<unsafe extern "C" fn(usize) -> *mut c_void>;

const _: () = assert!(size_of::<HsaStatus>() == 4);
const _: () = assert!(size_of::<Agent>() == 8);
const _: () = assert!(size_of::<MemoryPool>() == 8);
const _: () = assert!(size_of::<PointerInfo>() == 56);
const _: () = assert!(mem::offset_of!(PointerInfo, kind) == 4);
const _: () = assert!(mem::offset_of!(PointerInfo, agent_base) == 8);
const _: () = assert!(mem::offset_of!(PointerInfo, host_base) == 16);
const _: () = assert!(mem::offset_of!(PointerInfo, len) == 24);
const _: () = assert!(mem::offset_of!(PointerInfo, user_data) == 32);
const _: () = assert!(mem::offset_of!(PointerInfo, owner) == 40);
const _: () = assert!(mem::offset_of!(PointerInfo, global_flags) == 48);

macro_rules! functions {
    ($($(#[doc = $doc:literal])+ $field:ident: $symbol:ident = fn($($argument:ty),*);)+) => {
        /// The functions of libhsa-runtime64.so.1 that this crate calls.
        #[derive(Clone, Debug)]
        pub struct Functions {
            library: Arc<str>,
            $($(#[doc = $doc])+ pub(crate) $field: unsafe extern "C" fn($($argument),*) -> HsaStatus,)+
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
                            mem::transmute::<*const (), unsafe extern "C" fn($($argument),*) -> HsaStatus>(address)
                        }
                    },)+
                })
            }
        }
    };
}

functions! {
    /// `hsa_init()`
    init: hsa_init = fn();
    /// `hsa_shut_down()`
    shut_down: hsa_shut_down = fn();
    /// `hsa_iterate_agents(callback, data)`
    iterate_agents: hsa_iterate_agents = fn(AgentCallback, *mut c_void);
    /// `hsa_agent_get_info(agent, attribute, value)`
    agent_get_info: hsa_agent_get_info = fn(Agent, u32, *mut c_void);
    /// `hsa_amd_agent_iterate_memory_pools(agent, callback, data)`
    agent_iterate_memory_pools: hsa_amd_agent_iterate_memory_pools = fn(Agent, PoolCallback, *mut c_void);
    /// `hsa_amd_memory_pool_get_info(pool, attribute, value)`
    memory_pool_get_info: hsa_amd_memory_pool_get_info = fn(MemoryPool, u32, *mut c_void);
    /// `hsa_amd_pointer_info(pointer, info, alloc, count, agents)`
    pointer_info: hsa_amd_pointer_info =
        fn(*const c_void, *mut PointerInfo, ListAllocator, *mut u32, *mut *mut Agent);
}

impl Functions {
    /// The name by which the dynamic loader finds the library.
    pub const LIBRARY: &str = "libhsa-runtime64.so.1";

    /// Loads the library at `path` and fills the table from it.
    ///
    /// The library stays loaded for the rest of the process.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] naming the library, with the loader's reason, or with the first
    /// symbol that it lacks.
    pub fn load(path: &Path) -> Result<Self> {
        let library = path.display().to_string();
        // SAFETY: loading runs the library's initialisers; the caller names AMD's HSA runtime
        // library, whose initialisers have no precondition.
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
    /// Each address that `lookup` returns is a function with the signature that `hsa.h` and
    /// `hsa_ext_amd.h` declares for that name, and stays callable from any thread for as long
    /// as a copy of the table exists.
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
        .iface(IfaceKind::ROCR)
        .context("library", library)
        .remedy(
            "install AMD's HSA runtime, or name its library with Rocr::builder().library(path)",
        );
    match reason {
        libloading::Error::DlOpen { source } => error.caused_by(source),
        other => error.caused_by(other),
    }
}

fn lacks_symbol(library: &str, symbol: &'static str) -> Error {
    Error::new(ErrorKind::Unavailable, "load library")
        .iface(IfaceKind::ROCR)
        .context("library", library)
        .context("symbol", symbol)
        .remedy("the library has no such symbol: it is not AMD's HSA runtime library, or older than ROCm 5")
}

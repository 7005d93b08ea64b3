//! UCX's binary interface, as much of it as the peer uses: layouts and the table of exported functions.
//!
//! The names and layouts are those of `ucs/memory/rcache.h` and `ucs/memory/memtype_cache.h` of UCX 1.13, whose
//! library exports these functions without promising their form: [`Functions::load`] refuses every other release.

#![allow(non_camel_case_types, reason = "the names are those of UCX's headers")]
#![allow(dead_code, reason = "a layout needs every field, read or not")]

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};

use libloading::Library;

/// The libraries, by the sonames of UCX 1.x. `libucp` is asked for the release only.
pub(super) const UCS: &str = "libucs.so.0";
pub(super) const UCP: &str = "libucp.so.0";

/// The release whose headers this file mirrors.
pub(super) const RELEASE: (u32, u32) = (1, 13);

/// How UCX hooks the C library, which it does as soon as it is loaded, whatever its caches ask for. Our monitor hooks the
/// same functions.
const HOOKS: &str = "UCX_MEM_MMAP_HOOK_MODE";

pub(super) type ucs_status_t = i8;
pub(super) const UCS_OK: ucs_status_t = 0;

pub(super) const PROT_READ: c_int = 1;
pub(super) const PROT_WRITE: c_int = 2;

/// `UCS_PGT_ADDR_ALIGN`.
pub(super) const MIN_ALIGNMENT: usize = 16;
/// `UCS_MEMORY_TYPE_CUDA`.
pub(super) const UCS_MEMORY_TYPE_CUDA: c_int = 1;
/// `UCS_SYS_DEVICE_ID_UNKNOWN`.
pub(super) const UCS_SYS_DEVICE_ID_UNKNOWN: u8 = u8::MAX;

/// A `ucs_rcache_t`, known by its address only.
#[repr(C)]
pub(super) struct ucs_rcache_t {
    opaque: [u8; 0],
}

#[repr(C)]
pub(super) struct ucs_rcache_region_t {
    pub(super) start: c_ulong,
    pub(super) end: c_ulong,
    pub(super) lists: [*mut c_void; 6],
    pub(super) refcount: u32,
    pub(super) status: ucs_status_t,
    pub(super) prot: u8,
    pub(super) flags: u8,
    pub(super) lru_flags: u8,
    pub(super) pfn: u64,
}

#[repr(C)]
pub(super) struct ucs_rcache_ops_t {
    pub(super) mem_reg: extern "C" fn(
        *mut c_void,
        *mut ucs_rcache_t,
        *mut c_void,
        *mut ucs_rcache_region_t,
        u16,
    ) -> ucs_status_t,
    pub(super) mem_dereg: extern "C" fn(*mut c_void, *mut ucs_rcache_t, *mut ucs_rcache_region_t),
    pub(super) dump_region:
        extern "C" fn(*mut c_void, *mut ucs_rcache_t, *mut ucs_rcache_region_t, *mut c_char, usize),
}

#[repr(C)]
pub(super) struct ucs_rcache_params_t {
    pub(super) region_struct_size: usize,
    pub(super) alignment: usize,
    pub(super) max_alignment: usize,
    pub(super) ucm_events: c_int,
    pub(super) ucm_event_priority: c_int,
    pub(super) ops: *const ucs_rcache_ops_t,
    pub(super) context: *mut c_void,
    pub(super) flags: c_int,
    pub(super) max_regions: c_ulong,
    pub(super) max_size: usize,
    pub(super) max_unreleased: usize,
}

#[repr(C)]
pub(super) struct ucs_memory_info_t {
    pub(super) memory_type: c_int,
    pub(super) sys_dev: u8,
    pub(super) base_address: *mut c_void,
    pub(super) alloc_length: usize,
}

// What a C compiler says of the same structures on x86-64 and aarch64.
const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(
        size_of::<ucs_rcache_region_t>() == 80 && offset_of!(ucs_rcache_region_t, refcount) == 64
    );
    assert!(
        offset_of!(ucs_rcache_region_t, status) == 68 && offset_of!(ucs_rcache_region_t, pfn) == 72
    );
    assert!(size_of::<ucs_rcache_params_t>() == 80 && offset_of!(ucs_rcache_params_t, ops) == 32);
    assert!(offset_of!(ucs_rcache_params_t, max_regions) == 56);
    assert!(
        size_of::<ucs_memory_info_t>() == 24 && offset_of!(ucs_memory_info_t, base_address) == 8
    );
};

macro_rules! functions {
    ($($name:ident: $library:literal, fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions that the peer calls.
        #[derive(Debug)]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Functions {
            /// Looks the functions up, each in the library of its number.
            ///
            /// # Errors
            /// The library or function that is missing, in one line.
            ///
            /// # Safety
            /// The libraries are UCX's and are never unloaded.
            unsafe fn look_up(libraries: [&Library; 2]) -> Result<Self, String> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is that of the header of the release, which `load` checks before any of them
                        // is called, except `ucp_get_version`, whose form is public.
                        let symbol = unsafe { libraries[$library].get(concat!(stringify!($name), "\0").as_bytes()) };
                        *symbol.map_err(|error| error.to_string())?
                    },)*
                })
            }
        }
    };
}

functions! {
    ucp_get_version: 1, fn(*mut u32, *mut u32, *mut u32);
    ucs_status_string: 0, fn(ucs_status_t) -> *const c_char;
    ucs_rcache_create: 0, fn(*const ucs_rcache_params_t, *const c_char, *mut c_void, *mut *mut ucs_rcache_t) -> ucs_status_t;
    ucs_rcache_destroy: 0, fn(*mut ucs_rcache_t);
    ucs_rcache_get: 0, fn(*mut ucs_rcache_t, *mut c_void, usize, c_int, *mut c_void, *mut *mut ucs_rcache_region_t) -> ucs_status_t;
    ucs_rcache_region_put: 0, fn(*mut ucs_rcache_t, *mut ucs_rcache_region_t);
    ucs_memtype_cache_global_init: 0, fn();
    ucs_memtype_cache_update: 0, fn(*const c_void, usize, c_int, u8);
    ucs_memtype_cache_remove: 0, fn(*const c_void, usize);
    ucs_memtype_cache_lookup: 0, fn(*const c_void, usize, *mut ucs_memory_info_t) -> ucs_status_t;
}

impl Functions {
    /// Loads UCX for the rest of the process: its threads and handlers outlive any unloading.
    ///
    /// # Errors
    /// Why it cannot be used, in one line.
    pub(super) fn load() -> Result<&'static Self, String> {
        let threads = std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count);
        if std::env::var_os(HOOKS).is_none() && threads == 1 {
            // SAFETY: no other thread reads the environment, since there is none.
            unsafe { std::env::set_var(HOOKS, "none") };
        }
        let open = |name: &str| {
            // SAFETY: the initialisers of UCX's libraries read their configuration and ask nothing of the process.
            unsafe { Library::new(name) }.map_err(|error| format!("{name}: {error}"))
        };
        let (ucs, ucp) = (open(UCS)?, open(UCP)?);
        // SAFETY: both are leaked below, and before that nothing is called.
        let functions = unsafe { Self::look_up([&ucs, &ucp]) }?;
        std::mem::forget((ucs, ucp));
        let (mut major, mut minor, mut release) = (0, 0, 0);
        // SAFETY: the three are exclusive borrows of `unsigned`.
        unsafe { (functions.ucp_get_version)(&mut major, &mut minor, &mut release) };
        if (major, minor) != RELEASE {
            return Err(format!(
                "UCX {major}.{minor}.{release}: its cache is no public interface and is known for {}.{} only",
                RELEASE.0, RELEASE.1
            ));
        }
        Ok(Box::leak(Box::new(functions)))
    }

    pub(super) fn status(&self, status: ucs_status_t) -> String {
        // SAFETY: UCX returns static text for every status.
        unsafe { CStr::from_ptr((self.ucs_status_string)(status)) }.to_string_lossy().into_owned()
    }
}

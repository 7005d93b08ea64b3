//! C declarations of UCX's registration cache and memory-type table, for UCX 1.13 and 1.22.
//!
//! These functions are internal to UCX and may change between releases. The names and layouts are
//! those of `ucs/memory/rcache.h` and `ucs/memory/memtype_cache.h`. [`Functions::load`] refuses
//! every release other than 1.13 and 1.22.

#![allow(non_camel_case_types, reason = "the names are those of UCX's headers")]
#![allow(dead_code, reason = "UCX reads fields that Rust only writes")]

use std::{
    error::Error,
    ffi::{CStr, c_char, c_int, c_ulong, c_void},
    path::Path,
};

use libloading::Library;

/// Sonames of UCX's libraries. A library comes after its dependencies. `libucp` reports the
/// release.
const LIBRARIES: [&str; 4] = ["libucm.so.0", "libucs.so.0", "libuct.so.0", "libucp.so.0"];

pub(super) type ucs_status_t = i8;
pub(super) const UCS_OK: ucs_status_t = 0;

pub(super) const PROT_READ: c_int = 1;
pub(super) const PROT_WRITE: c_int = 2;

/// Smallest alignment of a region in bytes (`UCS_PGT_ADDR_ALIGN` in C).
pub(super) const MIN_ALIGNMENT: usize = 16;
/// Number that means that a limit is not set (`UCS_MEMUNITS_INF` in C).
pub(super) const NO_LIMIT: usize = usize::MAX;
/// Number of the memory type for CUDA device memory.
pub(super) const UCS_MEMORY_TYPE_CUDA: c_int = 1;
/// Device number for memory of an unknown device.
pub(super) const UCS_SYS_DEVICE_ID_UNKNOWN: u8 = u8::MAX;
/// Memory flag, since UCX 1.22: the memory can be registered.
pub(super) const UCS_MEM_FLAG_REGISTRABLE: u8 = 1;

/// UCX's registration cache, an opaque type.
#[repr(C)]
pub(super) struct ucs_rcache_t {
    opaque: [u8; 0],
}

/// The fields of a UCX region that callbacks read. UCX allocates the whole region,
/// `region_struct_size` bytes.
#[repr(C)]
pub(super) struct ucs_rcache_region_t {
    pub(super) start: c_ulong,
    pub(super) end: c_ulong,
}

pub(super) type Register = extern "C" fn(
    *mut c_void,
    *mut ucs_rcache_t,
    *mut c_void,
    *mut ucs_rcache_region_t,
    u16,
) -> ucs_status_t;
pub(super) type Deregister =
    extern "C" fn(*mut c_void, *mut ucs_rcache_t, *mut ucs_rcache_region_t);
pub(super) type Merge =
    extern "C" fn(*mut c_void, *mut ucs_rcache_t, *mut c_void, *mut ucs_rcache_region_t);
pub(super) type Describe =
    extern "C" fn(*mut c_void, *mut ucs_rcache_t, *mut ucs_rcache_region_t, *mut c_char, usize);

/// `ucs_memory_info_t`: one range of the memory-type table. UCX 1.13 has no `mem_flags`.
#[repr(C)]
pub(super) struct ucs_memory_info_t {
    pub(super) memory_type: c_int,
    pub(super) sys_dev: u8,
    pub(super) base_address: *mut c_void,
    pub(super) alloc_length: usize,
    pub(super) mem_flags: u8,
}

/// Struct layouts of UCX 1.13.
pub(super) mod v1_13 {
    use super::*;

    /// Size of UCX's `ucs_rcache_region_t` in bytes.
    pub(crate) const REGION_SIZE: usize = 80;

    #[repr(C)]
    pub(crate) struct ucs_rcache_ops_t {
        pub(crate) mem_reg: Register,
        pub(crate) mem_dereg: Deregister,
        pub(crate) dump_region: Describe,
    }

    #[repr(C)]
    pub(crate) struct ucs_rcache_params_t {
        pub(crate) region_struct_size: usize,
        pub(crate) alignment: usize,
        pub(crate) max_alignment: usize,
        pub(crate) ucm_events: c_int,
        pub(crate) ucm_event_priority: c_int,
        pub(crate) ops: *const ucs_rcache_ops_t,
        pub(crate) context: *mut c_void,
        pub(crate) flags: c_int,
        pub(crate) max_regions: c_ulong,
        pub(crate) max_size: usize,
        pub(crate) max_unreleased: usize,
    }
}

/// Struct layouts of UCX 1.22.
pub(super) mod v1_22 {
    use super::*;

    /// Size of UCX's `ucs_rcache_region_t` in bytes.
    pub(crate) const REGION_SIZE: usize = 88;

    #[repr(C)]
    pub(crate) struct ucs_rcache_ops_t {
        pub(crate) mem_reg: Register,
        pub(crate) mem_dereg: Deregister,
        pub(crate) merge: Merge,
        pub(crate) dump_region: Describe,
    }

    #[repr(C)]
    pub(crate) struct ucs_rcache_params_t {
        pub(crate) region_struct_size: usize,
        pub(crate) ucm_events: c_int,
        pub(crate) ucm_event_priority: c_int,
        pub(crate) ops: *const ucs_rcache_ops_t,
        pub(crate) context: *mut c_void,
        pub(crate) flags: c_int,
        pub(crate) max_regions: c_ulong,
        pub(crate) max_size: usize,
        pub(crate) max_unreleased: usize,
    }
}

// The sizes and offsets that a C compiler computes from the headers of 1.13.1 and 1.22.0 on x86-64.
const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<v1_13::ucs_rcache_ops_t>() == 24);
    assert!(size_of::<v1_13::ucs_rcache_params_t>() == 80);
    assert!(offset_of!(v1_13::ucs_rcache_params_t, ops) == 32);
    assert!(offset_of!(v1_13::ucs_rcache_params_t, max_regions) == 56);
    assert!(size_of::<v1_22::ucs_rcache_ops_t>() == 32);
    assert!(size_of::<v1_22::ucs_rcache_params_t>() == 64);
    assert!(offset_of!(v1_22::ucs_rcache_params_t, ops) == 16);
    assert!(offset_of!(v1_22::ucs_rcache_params_t, max_regions) == 40);
    // UCX 1.13 has no `mem_flags`, and its struct has 24 bytes.
    assert!(size_of::<ucs_memory_info_t>() == 32);
    assert!(offset_of!(ucs_memory_info_t, base_address) == 8);
    assert!(offset_of!(ucs_memory_info_t, mem_flags) == 24);
};

/// UCX functions whose signatures differ between UCX 1.13 and 1.22.
#[derive(Clone, Copy, Debug)]
pub(super) enum Release {
    /// UCX 1.13: the alignment of regions is a parameter of the cache.
    V1_13 {
        ucs_rcache_get: unsafe extern "C" fn(
            *mut ucs_rcache_t,
            *mut c_void,
            usize,
            c_int,
            *mut c_void,
            *mut *mut ucs_rcache_region_t,
        ) -> ucs_status_t,
        ucs_memtype_cache_update: unsafe extern "C" fn(*const c_void, usize, c_int, u8),
    },
    /// UCX 1.22: the alignment is an argument of each lookup, and memory has flags.
    V1_22 {
        ucs_rcache_get: unsafe extern "C" fn(
            *mut ucs_rcache_t,
            *mut c_void,
            usize,
            usize,
            c_int,
            *mut c_void,
            *mut *mut ucs_rcache_region_t,
        ) -> ucs_status_t,
        ucs_memtype_cache_update: unsafe extern "C" fn(*const c_void, usize, c_int, u8, u8),
    },
}

/// UCX functions that the benchmark calls, with the name of the release.
#[derive(Debug)]
pub(super) struct Functions {
    pub(super) ucs_status_string: unsafe extern "C" fn(ucs_status_t) -> *const c_char,
    /// `ucs_rcache_create`. The first argument points to the `ucs_rcache_params_t` of the loaded
    /// release.
    pub(super) ucs_rcache_create: unsafe extern "C" fn(
        *const c_void,
        *const c_char,
        *mut c_void,
        *mut *mut ucs_rcache_t,
    ) -> ucs_status_t,
    pub(super) ucs_rcache_destroy: unsafe extern "C" fn(*mut ucs_rcache_t),
    pub(super) ucs_rcache_region_put:
        unsafe extern "C" fn(*mut ucs_rcache_t, *mut ucs_rcache_region_t),
    pub(super) ucs_memtype_cache_global_init: unsafe extern "C" fn(),
    pub(super) ucs_memtype_cache_remove: unsafe extern "C" fn(*const c_void, usize),
    pub(super) ucs_memtype_cache_lookup:
        unsafe extern "C" fn(*const c_void, usize, *mut ucs_memory_info_t) -> ucs_status_t,
    pub(super) release: Release,
    /// Name with the release, for example `UCX 1.22`.
    pub(super) name: String,
}

impl Functions {
    /// Loads UCX from a folder or, for `None`, through the system's loader.
    ///
    /// The libraries are never unloaded, because UCX's threads and signal handlers would still use
    /// their code.
    ///
    /// # Errors
    /// Returns one line of text that says why this UCX cannot be used.
    pub(super) fn load(folder: Option<&Path>) -> Result<&'static Self, String> {
        let mut opened = Vec::new();
        for soname in LIBRARIES {
            let file = folder.map_or_else(|| soname.into(), |folder| folder.join(soname));
            // SAFETY: the initialisers of UCX's libraries only read their configuration, and have
            // no precondition.
            let library = unsafe { Library::new(&file) };
            opened.push(library.map_err(|error| {
                // The loader's own message is the source of the error.
                let why = error.source().map_or_else(|| error.to_string(), ToString::to_string);
                format!("{}: {why}", file.display())
            })?);
        }
        // The libraries stay loaded even if the release is unknown, because their initialisers have
        // run.
        let [.., ucs, _, ucp] = Vec::leak(opened) else { unreachable!("four were opened") };
        // SAFETY: `ucp_get_version` is public, and has had this type since the first release.
        let ucp_get_version: unsafe extern "C" fn(*mut u32, *mut u32, *mut u32) =
            unsafe { symbol(ucp, "ucp_get_version") }?;
        let (mut major, mut minor, mut micro) = (0, 0, 0);
        // SAFETY: the arguments are exclusive borrows of unsigned integers during the call.
        unsafe { ucp_get_version(&mut major, &mut minor, &mut micro) };
        // SAFETY: each type is the one in the headers of the release that the library reports.
        let release = unsafe {
            match (major, minor) {
                (1, 13) => Release::V1_13 {
                    ucs_rcache_get: symbol(ucs, "ucs_rcache_get")?,
                    ucs_memtype_cache_update: symbol(ucs, "ucs_memtype_cache_update")?,
                },
                (1, 22) => Release::V1_22 {
                    ucs_rcache_get: symbol(ucs, "ucs_rcache_get")?,
                    ucs_memtype_cache_update: symbol(ucs, "ucs_memtype_cache_update")?,
                },
                _ => {
                    return Err(format!(
                        "UCX {major}.{minor}.{micro} is not supported, because its cache is not a \
                         public interface; use 1.13 or 1.22"
                    ));
                }
            }
        };
        // SAFETY: these functions have the same types in 1.13 and 1.22. The match above refuses
        // every other release.
        let functions = unsafe {
            Self {
                ucs_status_string: symbol(ucs, "ucs_status_string")?,
                ucs_rcache_create: symbol(ucs, "ucs_rcache_create")?,
                ucs_rcache_destroy: symbol(ucs, "ucs_rcache_destroy")?,
                ucs_rcache_region_put: symbol(ucs, "ucs_rcache_region_put")?,
                ucs_memtype_cache_global_init: symbol(ucs, "ucs_memtype_cache_global_init")?,
                ucs_memtype_cache_remove: symbol(ucs, "ucs_memtype_cache_remove")?,
                ucs_memtype_cache_lookup: symbol(ucs, "ucs_memtype_cache_lookup")?,
                release,
                name: format!("UCX {major}.{minor}"),
            }
        };
        Ok(Box::leak(Box::new(functions)))
    }

    pub(super) fn status(&self, status: ucs_status_t) -> String {
        // SAFETY: UCX returns a static string for every status.
        unsafe { CStr::from_ptr((self.ucs_status_string)(status)) }.to_string_lossy().into_owned()
    }
}

/// Returns the address of a function as a function pointer.
///
/// # Errors
/// Returns one line of text that names the missing function.
///
/// # Safety
/// `F` must be the function pointer type of the named function.
unsafe fn symbol<F: Copy>(library: &'static Library, name: &str) -> Result<F, String> {
    // SAFETY: the caller guarantees that `F` is the function's type. The library is never unloaded.
    unsafe { library.get::<F>(name.as_bytes()) }
        .map(|symbol| *symbol)
        .map_err(|error| format!("{name}: {error}"))
}

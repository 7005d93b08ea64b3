//! Binary interface of UCX's registration cache and memory-type table, for the releases whose form
//! is known.
//!
//! UCX exports these functions for its own libraries and promises no form. The names and layouts
//! here are those of `ucs/memory/rcache.h` and `ucs/memory/memtype_cache.h` of 1.13 and 1.22.
//! [`Functions::load`] refuses every other release.

#![allow(non_camel_case_types, reason = "the names are those of UCX's headers")]
#![allow(dead_code, reason = "UCX reads fields that Rust only writes")]

use std::{
    error::Error,
    ffi::{CStr, c_char, c_int, c_ulong, c_void},
    path::Path,
};

use libloading::Library;

/// Sonames of the libraries, dependencies first. `libucp` knows the release.
const LIBRARIES: [&str; 4] = ["libucm.so.0", "libucs.so.0", "libuct.so.0", "libucp.so.0"];

pub(super) type ucs_status_t = i8;
pub(super) const UCS_OK: ucs_status_t = 0;

pub(super) const PROT_READ: c_int = 1;
pub(super) const PROT_WRITE: c_int = 2;

/// `UCS_PGT_ADDR_ALIGN`.
pub(super) const MIN_ALIGNMENT: usize = 16;
/// `UCS_MEMUNITS_INF`.
pub(super) const NO_LIMIT: usize = usize::MAX;
/// `UCS_MEMORY_TYPE_CUDA`.
pub(super) const UCS_MEMORY_TYPE_CUDA: c_int = 1;
/// `UCS_SYS_DEVICE_ID_UNKNOWN`.
pub(super) const UCS_SYS_DEVICE_ID_UNKNOWN: u8 = u8::MAX;
/// `UCS_MEM_FLAG_REGISTRABLE`, since 1.22.
pub(super) const UCS_MEM_FLAG_REGISTRABLE: u8 = 1;

/// A `ucs_rcache_t`, known by its address only.
#[repr(C)]
pub(super) struct ucs_rcache_t {
    opaque: [u8; 0],
}

/// First fields of a region. UCX allocates `region_struct_size` bytes for it.
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

/// Memory information. 1.13 knows all fields but the last.
#[repr(C)]
pub(super) struct ucs_memory_info_t {
    pub(super) memory_type: c_int,
    pub(super) sys_dev: u8,
    pub(super) base_address: *mut c_void,
    pub(super) alloc_length: usize,
    pub(super) mem_flags: u8,
}

/// Layouts of 1.13.
pub(super) mod v1_13 {
    use super::*;

    /// Size of `ucs_rcache_region_t`.
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

/// Layouts of 1.22.
pub(super) mod v1_22 {
    use super::*;

    /// Size of `ucs_rcache_region_t`.
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

// A C compiler says this of the headers of 1.13.1 and 1.22.0 on x86-64.
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
    // 24 bytes in 1.13.
    assert!(size_of::<ucs_memory_info_t>() == 32);
    assert!(offset_of!(ucs_memory_info_t, base_address) == 8);
    assert!(offset_of!(ucs_memory_info_t, mem_flags) == 24);
};

/// UCX functions that have different signatures in different releases.
#[derive(Clone, Copy, Debug)]
pub(super) enum Release {
    /// UCX from 1.13 to before 1.22: the alignment of regions is a parameter of the cache.
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
    /// UCX 1.22 and later: the alignment is an argument of each lookup, and memory has flags.
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

/// Functions that the bench calls.
#[derive(Debug)]
pub(super) struct Functions {
    pub(super) ucs_status_string: unsafe extern "C" fn(ucs_status_t) -> *const c_char,
    /// `ucs_rcache_create`. The first argument is the `ucs_rcache_params_t` of the loaded release.
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
    /// `UCX 1.22`.
    pub(super) name: String,
}

impl Functions {
    /// Loads UCX from a folder, or from where the system's loader finds it.
    ///
    /// The libraries stay loaded, because their threads and handlers outlive unloading.
    ///
    /// # Errors
    /// One line that says why this UCX cannot be used.
    pub(super) fn load(folder: Option<&Path>) -> Result<&'static Self, String> {
        let mut opened = Vec::new();
        for soname in LIBRARIES {
            let file = folder.map_or_else(|| soname.into(), |folder| folder.join(soname));
            // SAFETY: the initialisers of UCX's libraries read their configuration and ask nothing
            // of the process.
            let library = unsafe { Library::new(&file) };
            opened.push(library.map_err(|error| {
                // The loader's own words lie behind the error's short form.
                let why = error.source().map_or_else(|| error.to_string(), ToString::to_string);
                format!("{}: {why}", file.display())
            })?);
        }
        // Leaked even where the release is unknown, because the initialisers started already.
        let [.., ucs, _, ucp] = Vec::leak(opened) else { unreachable!("four were opened") };
        // SAFETY: `ucp_get_version` is public, and has had this type since the first release.
        let ucp_get_version: unsafe extern "C" fn(*mut u32, *mut u32, *mut u32) =
            unsafe { symbol(ucp, "ucp_get_version") }?;
        let (mut major, mut minor, mut micro) = (0, 0, 0);
        // SAFETY: the arguments are exclusive borrows of `unsigned` for the call.
        unsafe { ucp_get_version(&mut major, &mut minor, &mut micro) };
        // SAFETY: each type is that of the headers of the release that the library says it is.
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
                        "this is UCX {major}.{minor}.{micro}, whose cache is no public interface; \
                         the bench knows 1.13 and 1.22"
                    ));
                }
            }
        };
        // SAFETY: 1.13 and 1.22, which the match above lets pass, share these types.
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
        // SAFETY: UCX returns static text for every status.
        unsafe { CStr::from_ptr((self.ucs_status_string)(status)) }.to_string_lossy().into_owned()
    }
}

/// Looks a function up.
///
/// # Errors
/// One line that names the missing function.
///
/// # Safety
/// `F` is the function's type.
unsafe fn symbol<F: Copy>(library: &'static Library, name: &str) -> Result<F, String> {
    // SAFETY: the caller vouches for the type, and the library is never unloaded.
    unsafe { library.get::<F>(name.as_bytes()) }
        .map(|symbol| *symbol)
        .map_err(|error| format!("{name}: {error}"))
}

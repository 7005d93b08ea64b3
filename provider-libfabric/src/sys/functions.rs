//! The functions that libfabric exports. All other functions are called through tables in
//! libfabric's objects.

use std::ffi::{c_char, c_int, c_void};

use super::layout::{fi_fabric_attr, fi_info, fid_fabric};

hmem_core::function_table! {
    /// Functions of libfabric.
    ///
    /// The dynamic loader returns the newest version of each symbol. The newest versions of
    /// `fi_getinfo`, `fi_dupinfo` and `fi_freeinfo` all use one layout of [`fi_info`].
    // SAFETY: the initialisers of libfabric only register its providers. The signatures are those
    // of `fabric.h`.
    unsafe Functions {
        library: "libfabric.so.1",
        variable: "HMEM_LIBFABRIC_LIBRARY",
        provider: "libfabric",
        not_loaded: "install libfabric (package libfabric1 or libfabric), or name the library in \
                     HMEM_LIBFABRIC_LIBRARY",
        lacks_symbol: "name a libfabric in HMEM_LIBFABRIC_LIBRARY: this library is another one",
    }
    required {
        /// Returns the newest API version that the library supports.
        fi_version: fi_version() -> u32;
        /// Returns a list of providers.
        fi_getinfo: fi_getinfo(
            u32, *const c_char, *const c_char, u64, *const fi_info, *mut *mut fi_info
        ) -> c_int;
        /// Copies an `fi_info`, or allocates an empty one if the argument is null.
        fi_dupinfo: fi_dupinfo(*const fi_info) -> *mut fi_info;
        /// Frees a list of `fi_info`.
        fi_freeinfo: fi_freeinfo(*mut fi_info) -> ();
        /// Opens a fabric.
        fi_fabric: fi_fabric(*mut fi_fabric_attr, *mut *mut fid_fabric, *mut c_void) -> c_int;
        /// Returns a static description of an error number.
        fi_strerror: fi_strerror(c_int) -> *const c_char;
    }
    optional {}
}

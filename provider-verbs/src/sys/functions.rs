//! The function table, filled from the library or from a caller's lookup function.

#![allow(unsafe_code, reason = "gives the library's symbols their types")]

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    mem,
    path::Path,
    sync::Arc,
};

use hmem_core::{Error, ErrorKind, Result, library::SharedLibrary};

use super::{
    codes::ForkStatus,
    layout::{
        CompChannel, Context, Cq, Device, DeviceAttr, Gid, Mr, Pd, PortAttr, Qp, QpAttr, QpInitAttr,
    },
};

/// `ibv_rereg_mr(mr, flags, pd, address, length, access)`: changes a registered region in place.
pub type ReregMr =
    unsafe extern "C" fn(*mut Mr, c_int, *mut Pd, *mut c_void, usize, c_int) -> c_int;

macro_rules! functions {
    (
        required { $(
            $(#[doc = $doc:literal])+ $field:ident: $symbol:ident@$version:literal = $type:ty;
        )+ }
        optional { $(
            $(#[doc = $odoc:literal])+ $ofield:ident: $osymbol:ident@$oversion:literal = $otype:ty;
        )+ }
    ) => {
        /// Table of the functions of libibverbs.so.1 that this crate calls.
        #[derive(Clone, Debug)]
        pub struct Functions {
            library: Arc<str>,
            $($(#[doc = $doc])+ pub(crate) $field: $type,)+
            $($(#[doc = $odoc])+ pub(crate) $ofield: Option<$otype>,)+
        }

        impl Functions {
            /// Required symbols, each with its version.
            pub const SYMBOLS: &[(&str, &str)] = &[$((stringify!($symbol), $version)),+];
            /// Symbols that only newer libraries have. Their functions are optional.
            pub const OPTIONAL: &[(&str, &str)] = &[$((stringify!($osymbol), $oversion)),+];

            /// Fills the table with the addresses that `lookup` returns for symbols and their
            /// versions.
            ///
            /// # Safety
            /// `lookup` follows the safety rules of [`Functions::from_lookup`].
            unsafe fn fill(
                library: &str,
                mut lookup: impl FnMut(&'static str, &'static str) -> Option<*const ()>,
            ) -> Result<Self> {
                Ok(Self {
                    library: library.into(),
                    $($field: {
                        let address = lookup(stringify!($symbol), $version)
                            .filter(|address| !address.is_null())
                            .ok_or_else(|| {
                                lacks_symbol(library, concat!(stringify!($symbol), "@", $version))
                            })?;
                        // SAFETY: the caller promises that the lookup returns functions with the
                        // header's signatures, which are declared here.
                        unsafe { mem::transmute::<*const (), $type>(address) }
                    },)+
                    $($ofield: lookup(stringify!($osymbol), $oversion)
                        .filter(|address| !address.is_null())
                        // SAFETY: the caller promises that the lookup returns functions with the
                        // header's signatures, which are declared here.
                        .map(|address| unsafe { mem::transmute::<*const (), $otype>(address) }),)+
                })
            }
        }
    };
}

functions! {
    required {
        /// `ibv_get_device_list(count)`: returns the list of RDMA devices.
        get_device_list: ibv_get_device_list@"IBVERBS_1.1" =
            unsafe extern "C" fn(*mut c_int) -> *mut *mut Device;
        /// `ibv_free_device_list(list)`: frees a list of devices.
        free_device_list: ibv_free_device_list@"IBVERBS_1.1" =
            unsafe extern "C" fn(*mut *mut Device);
        /// `ibv_get_device_name(device)`: returns the name of a device.
        get_device_name: ibv_get_device_name@"IBVERBS_1.1" =
            unsafe extern "C" fn(*mut Device) -> *const c_char;
        /// `ibv_open_device(device)`: opens a device and returns its context.
        open_device: ibv_open_device@"IBVERBS_1.1" =
            unsafe extern "C" fn(*mut Device) -> *mut Context;
        /// `ibv_close_device(context)`: closes an open device.
        close_device: ibv_close_device@"IBVERBS_1.1" = unsafe extern "C" fn(*mut Context) -> c_int;
        /// `ibv_query_device(context, attr)`: returns properties and limits of a device.
        query_device: ibv_query_device@"IBVERBS_1.1" =
            unsafe extern "C" fn(*mut Context, *mut DeviceAttr) -> c_int;
        /// `ibv_query_port(context, port, attr)`: returns properties of a port. This symbol version
        /// fills in only the attributes that all library versions have.
        query_port: ibv_query_port@"IBVERBS_1.1" =
            unsafe extern "C" fn(*mut Context, u8, *mut PortAttr) -> c_int;
        /// `ibv_query_gid(context, port, index, gid)`: returns an entry of a port's GID table.
        query_gid: ibv_query_gid@"IBVERBS_1.1" =
            unsafe extern "C" fn(*mut Context, u8, c_int, *mut Gid) -> c_int;
        /// `ibv_alloc_pd(context)`: allocates a protection domain.
        alloc_pd: ibv_alloc_pd@"IBVERBS_1.1" = unsafe extern "C" fn(*mut Context) -> *mut Pd;
        /// `ibv_dealloc_pd(pd)`: deallocates a protection domain.
        dealloc_pd: ibv_dealloc_pd@"IBVERBS_1.1" = unsafe extern "C" fn(*mut Pd) -> c_int;
        /// `ibv_reg_mr(pd, address, length, access)`: registers memory.
        reg_mr: ibv_reg_mr@"IBVERBS_1.1" =
            unsafe extern "C" fn(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
        /// `ibv_dereg_mr(mr)`: deregisters memory.
        dereg_mr: ibv_dereg_mr@"IBVERBS_1.1" = unsafe extern "C" fn(*mut Mr) -> c_int;
        /// `ibv_create_comp_channel(context)`: creates a channel for completion events.
        create_comp_channel: ibv_create_comp_channel@"IBVERBS_1.0" =
            unsafe extern "C" fn(*mut Context) -> *mut CompChannel;
        /// `ibv_destroy_comp_channel(channel)`: destroys a channel for completion events.
        destroy_comp_channel: ibv_destroy_comp_channel@"IBVERBS_1.0" =
            unsafe extern "C" fn(*mut CompChannel) -> c_int;
        /// `ibv_get_cq_event(channel, cq, context)`: reads the next completion event of a channel.
        get_cq_event: ibv_get_cq_event@"IBVERBS_1.1" =
            unsafe extern "C" fn(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int;
        /// `ibv_ack_cq_events(cq, count)`: acknowledges completion events.
        ack_cq_events: ibv_ack_cq_events@"IBVERBS_1.1" = unsafe extern "C" fn(*mut Cq, c_uint);
        /// `ibv_create_cq(context, entries, cq_context, channel, vector)`: creates a completion
        /// queue.
        create_cq: ibv_create_cq@"IBVERBS_1.1" =
            unsafe extern "C" fn(
                *mut Context, c_int, *mut c_void, *mut CompChannel, c_int,
            ) -> *mut Cq;
        /// `ibv_destroy_cq(cq)`: destroys a completion queue.
        destroy_cq: ibv_destroy_cq@"IBVERBS_1.1" = unsafe extern "C" fn(*mut Cq) -> c_int;
        /// `ibv_create_qp(pd, attr)`: creates a queue pair.
        create_qp: ibv_create_qp@"IBVERBS_1.1" =
            unsafe extern "C" fn(*mut Pd, *mut QpInitAttr) -> *mut Qp;
        /// `ibv_destroy_qp(qp)`: destroys a queue pair.
        destroy_qp: ibv_destroy_qp@"IBVERBS_1.1" = unsafe extern "C" fn(*mut Qp) -> c_int;
        /// `ibv_modify_qp(qp, attr, mask)`: sets the attributes of a queue pair that `mask`
        /// selects.
        modify_qp: ibv_modify_qp@"IBVERBS_1.1" =
            unsafe extern "C" fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
        /// `ibv_query_qp(qp, attr, mask, init)`: returns attributes of a queue pair.
        query_qp: ibv_query_qp@"IBVERBS_1.1" =
            unsafe extern "C" fn(*mut Qp, *mut QpAttr, c_int, *mut QpInitAttr) -> c_int;
        /// `ibv_fork_init()`: protects registered pages when the process forks.
        fork_init: ibv_fork_init@"IBVERBS_1.1" = unsafe extern "C" fn() -> c_int;
    }
    optional {
        /// `ibv_reg_mr_iova2(pd, address, length, iova, access)`: registers memory with optional
        /// access flags, under an address that the caller chooses.
        reg_mr_iova2: ibv_reg_mr_iova2@"IBVERBS_1.8" =
            unsafe extern "C" fn(*mut Pd, *mut c_void, usize, u64, c_uint) -> *mut Mr;
        /// `ibv_reg_dmabuf_mr(pd, offset, length, iova, fd, access)`: registers a range of a
        /// dma-buf.
        reg_dmabuf_mr: ibv_reg_dmabuf_mr@"IBVERBS_1.12" =
            unsafe extern "C" fn(*mut Pd, u64, usize, u64, c_int, c_int) -> *mut Mr;
        /// `ibv_rereg_mr(mr, flags, pd, address, length, access)`: changes a registered region in
        /// place.
        rereg_mr: ibv_rereg_mr@"IBVERBS_1.1" = ReregMr;
        /// `ibv_is_fork_initialized()`: returns the protection of registered pages when the process
        /// forks.
        is_fork_initialized: ibv_is_fork_initialized@"IBVERBS_1.13" =
            unsafe extern "C" fn() -> ForkStatus;
    }
}

impl Functions {
    /// File name by which the dynamic loader finds the library.
    pub const LIBRARY: &str = "libibverbs.so.1";

    /// Loads the library at `path` and fills the table from it.
    ///
    /// The library stays loaded for the rest of the process.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`]: the library or one of its symbols cannot be loaded. The error
    /// names the library, with the loader's reason or the symbol.
    ///
    /// # Safety
    /// The file is libibverbs or a replacement of it, such as a fake for tests. It is sound to load
    /// in this process, and its functions fulfil the safety rules of [`Functions::from_lookup`].
    ///
    /// # Examples
    /// Safe code cannot load another library:
    /// ```compile_fail,E0133
    /// use hmem_provider_verbs::sys::Functions;
    ///
    /// let functions = Functions::load("/tmp/any.so".as_ref());
    /// ```
    pub unsafe fn load(path: &Path) -> Result<Self> {
        let refused = unavailable(
            "install libibverbs of rdma-core (in Rust: name its library with \
             Verbs::builder().library(path))",
        );
        // SAFETY: the caller promises that the library is sound to load.
        let handle = unsafe { SharedLibrary::open(path, refused) }?.keep_loaded();
        let library = path.display().to_string();
        // SAFETY: the caller promises that the functions follow the header. `keep_loaded` keeps
        // the library loaded for the rest of the process.
        unsafe { Self::fill(&library, |symbol, version| versioned(handle, symbol, version)) }
    }

    /// Loads the library that the dynamic loader finds by its usual name.
    ///
    /// # Errors
    /// The errors of [`Functions::load`].
    pub fn find() -> Result<Self> {
        // SAFETY: the library of this name is that of rdma-core, which is sound to load in any
        // process. The owner of the process sets the loader's search path, and so promises the same
        // for the file that the loader finds.
        unsafe { Self::load(Path::new(Self::LIBRARY)) }
    }

    /// Creates a table from a lookup function for symbols and versions. The symbols may come from
    /// any library, such as a test's fake driver.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`]: `lookup` returned `None` for one of [`Functions::SYMBOLS`]. The
    /// error names the symbol.
    ///
    /// # Safety
    /// Each address that `lookup` returns is a function that:
    ///
    /// - has the signature that `infiniband/verbs.h` declares for the name,
    /// - follows that header's rules about the objects that it returns,
    /// - stays callable from any thread as long as a copy of the table exists.
    ///
    /// # Examples
    /// Safe code cannot replace a function of a table:
    /// ```compile_fail,E0616
    /// use hmem_provider_verbs::sys::Functions;
    ///
    /// unsafe extern "C" fn nothing() -> std::ffi::c_int {
    ///     0
    /// }
    ///
    /// let mut functions = Functions::find().unwrap();
    /// functions.fork_init = nothing;
    /// ```
    pub unsafe fn from_lookup(
        lookup: impl FnMut(&'static str, &'static str) -> Option<*const ()>,
    ) -> Result<Self> {
        // SAFETY: `fill` has the same safety rules as this function.
        unsafe { Self::fill("(injected)", lookup) }
    }

    /// Returns the name or path of the library, as the caller gave it.
    #[must_use]
    pub fn library(&self) -> &str {
        &self.library
    }
}

/// Returns the address of a symbol in exactly this version (`dlvsym`).
#[cfg(target_env = "gnu")]
fn versioned(handle: *mut c_void, symbol: &str, version: &str) -> Option<*const ()> {
    let symbol = std::ffi::CString::new(symbol).ok()?;
    let version = std::ffi::CString::new(version).ok()?;
    // SAFETY: the handle came from dlopen and is never closed; both names are NUL-terminated.
    let address = unsafe { libc::dlvsym(handle, symbol.as_ptr(), version.as_ptr()) };
    (!address.is_null()).then_some(address.cast_const().cast())
}

/// Returns the address of a symbol in its default version (`dlsym`). Only glibc has symbol
/// versions.
#[cfg(not(target_env = "gnu"))]
fn versioned(handle: *mut c_void, symbol: &str, _version: &str) -> Option<*const ()> {
    let symbol = std::ffi::CString::new(symbol).ok()?;
    // SAFETY: the handle came from dlopen and is never closed; the name is NUL-terminated.
    let address = unsafe { libc::dlsym(handle, symbol.as_ptr()) };
    (!address.is_null()).then_some(address.cast_const().cast())
}

fn unavailable(remedy: &'static str) -> Error {
    Error::new(ErrorKind::Unavailable, "load library").provider("verbs").remedy(remedy)
}

fn lacks_symbol(library: &str, symbol: &'static str) -> Error {
    unavailable("install a libibverbs of rdma-core, version 17 or newer")
        .context("library", library)
        .context("symbol", symbol)
}

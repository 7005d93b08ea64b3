//! The function table, filled from the library or from a caller's lookup function.

#![allow(unsafe_code, reason = "gives the library's symbols their types")]

use std::{
    ffi::{CString, c_char, c_int, c_uint, c_void},
    mem,
    path::Path,
    sync::Arc,
};

use hmem_core::{Error, ErrorKind, Result, library::SharedLibrary};

use super::{
    codes::ForkStatus,
    layout::{
        AsyncEvent, CompChannel, Context, Cq, Device, DeviceAttr, Gid, Mr, Pd, PortAttr, Qp,
        QpAttr, QpInitAttr,
    },
};

macro_rules! functions {
    (
        required { $(
            $(#[doc = $doc:literal])* $field:ident: $symbol:ident@$version:literal
                ($($name:ident: $type:ty),*) $(-> $result:ty)?;
        )+ }
        optional { $(
            $(#[doc = $odoc:literal])* $ofield:ident: $osymbol:ident@$oversion:literal
                ($($oname:ident: $otype:ty),*) $(-> $oresult:ty)?;
        )+ }
    ) => {
        /// Table of the functions of libibverbs.so.1 that this crate calls, and of two functions
        /// of libmlx5.so.1 for Data Direct.
        #[derive(Clone, Debug)]
        pub struct Functions {
            library: Arc<str>,
            $($(#[doc = $doc])*
            pub(crate) $field: unsafe extern "C" fn($($name: $type),*) $(-> $result)?,)+
            $($(#[doc = $odoc])*
            pub(crate) $ofield: Option<unsafe extern "C" fn($($oname: $otype),*) $(-> $oresult)?>,)+
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
                let mut lookup =
                    |symbol, version| lookup(symbol, version).filter(|address| !address.is_null());
                Ok(Self {
                    library: library.into(),
                    $($field: {
                        type Function = unsafe extern "C" fn($($type),*) $(-> $result)?;
                        let address = lookup(stringify!($symbol), $version).ok_or_else(|| {
                            lacks_symbol(library, concat!(stringify!($symbol), "@", $version))
                        })?;
                        // SAFETY: the caller promises that the lookup returns functions with the
                        // header's signatures, which are declared here.
                        unsafe { mem::transmute::<*const (), Function>(address) }
                    },)+
                    $($ofield: {
                        type Function = unsafe extern "C" fn($($otype),*) $(-> $oresult)?;
                        let address = lookup(stringify!($osymbol), $oversion);
                        // SAFETY: the caller promises that the lookup returns functions with the
                        // header's signatures, which are declared here.
                        address.map(|it| unsafe { mem::transmute::<*const (), Function>(it) })
                    },)+
                })
            }
        }
    };
}

functions! {
    required {
        get_device_list: ibv_get_device_list@"IBVERBS_1.1"(count: *mut c_int) -> *mut *mut Device;
        free_device_list: ibv_free_device_list@"IBVERBS_1.1"(list: *mut *mut Device);
        get_device_name: ibv_get_device_name@"IBVERBS_1.1"(device: *mut Device) -> *const c_char;
        open_device: ibv_open_device@"IBVERBS_1.1"(device: *mut Device) -> *mut Context;
        close_device: ibv_close_device@"IBVERBS_1.1"(context: *mut Context) -> c_int;
        query_device: ibv_query_device@"IBVERBS_1.1"
            (context: *mut Context, attr: *mut DeviceAttr) -> c_int;
        /// Queries the properties of a port. This version of the symbol fills in only the
        /// attributes that all versions of the library have.
        query_port: ibv_query_port@"IBVERBS_1.1"
            (context: *mut Context, port: u8, attr: *mut PortAttr) -> c_int;
        query_gid: ibv_query_gid@"IBVERBS_1.1"
            (context: *mut Context, port: u8, index: c_int, gid: *mut Gid) -> c_int;
        alloc_pd: ibv_alloc_pd@"IBVERBS_1.1"(context: *mut Context) -> *mut Pd;
        dealloc_pd: ibv_dealloc_pd@"IBVERBS_1.1"(pd: *mut Pd) -> c_int;
        reg_mr: ibv_reg_mr@"IBVERBS_1.1"
            (pd: *mut Pd, address: *mut c_void, length: usize, access: c_int) -> *mut Mr;
        dereg_mr: ibv_dereg_mr@"IBVERBS_1.1"(mr: *mut Mr) -> c_int;
        create_comp_channel: ibv_create_comp_channel@"IBVERBS_1.0"
            (context: *mut Context) -> *mut CompChannel;
        destroy_comp_channel: ibv_destroy_comp_channel@"IBVERBS_1.0"
            (channel: *mut CompChannel) -> c_int;
        get_cq_event: ibv_get_cq_event@"IBVERBS_1.1"
            (channel: *mut CompChannel, cq: *mut *mut Cq, cq_context: *mut *mut c_void) -> c_int;
        ack_cq_events: ibv_ack_cq_events@"IBVERBS_1.1"(cq: *mut Cq, count: c_uint);
        /// Reads an asynchronous event from the context's fd.
        get_async_event: ibv_get_async_event@"IBVERBS_1.1"
            (context: *mut Context, event: *mut AsyncEvent) -> c_int;
        /// Acknowledges an event. Destroying the object of an event waits for the acknowledgement.
        ack_async_event: ibv_ack_async_event@"IBVERBS_1.1"(event: *mut AsyncEvent);
        create_cq: ibv_create_cq@"IBVERBS_1.1"
            (context: *mut Context, entries: c_int, cq_context: *mut c_void,
             channel: *mut CompChannel, vector: c_int) -> *mut Cq;
        destroy_cq: ibv_destroy_cq@"IBVERBS_1.1"(cq: *mut Cq) -> c_int;
        create_qp: ibv_create_qp@"IBVERBS_1.1"(pd: *mut Pd, attr: *mut QpInitAttr) -> *mut Qp;
        destroy_qp: ibv_destroy_qp@"IBVERBS_1.1"(qp: *mut Qp) -> c_int;
        modify_qp: ibv_modify_qp@"IBVERBS_1.1"
            (qp: *mut Qp, attr: *mut QpAttr, mask: c_int) -> c_int;
        query_qp: ibv_query_qp@"IBVERBS_1.1"
            (qp: *mut Qp, attr: *mut QpAttr, mask: c_int, init: *mut QpInitAttr) -> c_int;
        /// Protects registered pages when the process forks.
        fork_init: ibv_fork_init@"IBVERBS_1.1"() -> c_int;
    }
    optional {
        /// Registers memory under an address that the caller chooses. Drops optional access flags
        /// that the kernel does not know.
        reg_mr_iova2: ibv_reg_mr_iova2@"IBVERBS_1.8"
            (pd: *mut Pd, address: *mut c_void, length: usize, iova: u64, access: c_uint)
            -> *mut Mr;
        /// Registers a range of a dma-buf.
        reg_dmabuf_mr: ibv_reg_dmabuf_mr@"IBVERBS_1.12"
            (pd: *mut Pd, offset: u64, length: usize, iova: u64, fd: c_int, access: c_int)
            -> *mut Mr;
        /// Changes a registered region in place. `flags` says which of its properties change.
        rereg_mr: ibv_rereg_mr@"IBVERBS_1.1"
            (mr: *mut Mr, flags: c_int, pd: *mut Pd, address: *mut c_void, length: usize,
             access: c_int) -> c_int;
        /// Registers a range of a dma-buf, with access flags of mlx5 only.
        mlx5_reg_dmabuf_mr: mlx5dv_reg_dmabuf_mr@"MLX5_1.25"
            (pd: *mut Pd, offset: u64, length: usize, iova: u64, fd: c_int, access: c_int,
             mlx5_access: c_int) -> *mut Mr;
        /// Writes the path in sysfs of the NIC's Data Direct function to a buffer, without the
        /// leading `/sys`. Returns 0 or an errno.
        mlx5_data_direct_path: mlx5dv_get_data_direct_sysfs_path@"MLX5_1.25"
            (context: *mut Context, buffer: *mut c_char, length: usize) -> c_int;
        /// Returns the protection of registered pages when the process forks.
        is_fork_initialized: ibv_is_fork_initialized@"IBVERBS_1.13"() -> ForkStatus;
    }
}

impl Functions {
    /// File name by which the dynamic loader finds the library.
    pub const LIBRARY: &str = "libibverbs.so.1";

    /// File name by which the dynamic loader finds the library of mlx5 NICs.
    const MLX5_LIBRARY: &str = "libmlx5.so.1";

    /// Loads the library at `path` and fills the table from it.
    ///
    /// The library stays loaded for the rest of the process. If `path` is [`Functions::LIBRARY`],
    /// the functions of mlx5 come from `libmlx5.so.1`, and are missing without that file. Any other
    /// library must have the functions of mlx5 itself, because the installed `libmlx5.so.1` belongs
    /// to the installed libibverbs.
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
        let mlx5 = if path == Path::new(Self::LIBRARY) { Self::load_mlx5() } else { Some(handle) };
        let library = path.display().to_string();
        let lookup = |symbol, version: &'static str| {
            let of_mlx5 = version.starts_with("MLX5_");
            versioned(if of_mlx5 { mlx5? } else { handle }, symbol, version)
        };
        // SAFETY: the caller promises that the functions follow the header. `keep_loaded` keeps
        // the libraries loaded for the rest of the process.
        unsafe { Self::fill(&library, lookup) }
    }

    /// Loads the library of mlx5 NICs. Returns `None` if there is none, or if it does not belong to
    /// the loaded libibverbs. The library stays loaded for the rest of the process.
    fn load_mlx5() -> Option<*mut c_void> {
        let path = Path::new(Self::MLX5_LIBRARY);
        let refused = unavailable("install the mlx5 provider of rdma-core (ibverbs-providers)");
        // SAFETY: the library of this name is that of rdma-core, which is sound to load in any
        // process. The owner of the process sets the loader's search path, and so promises the same
        // for the file that the loader finds.
        let opened = unsafe { SharedLibrary::open(path, refused) };
        let log = |error: &Error| tracing::debug!(%error, "no Data Direct");
        opened.inspect_err(log).ok().map(SharedLibrary::keep_loaded)
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
    /// - has the signature that `infiniband/verbs.h` or `infiniband/mlx5dv.h` declares for the
    ///   name,
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

/// Returns the address of a symbol in exactly this version (`dlvsym`). The address is null if the
/// library lacks the symbol. Returns `None` if a name contains a NUL byte.
#[cfg(target_env = "gnu")]
fn versioned(handle: *mut c_void, symbol: &str, version: &str) -> Option<*const ()> {
    let symbol = CString::new(symbol).ok()?;
    let version = CString::new(version).ok()?;
    // SAFETY: the handle came from dlopen and is never closed; both names are NUL-terminated.
    let address = unsafe { libc::dlvsym(handle, symbol.as_ptr(), version.as_ptr()) };
    Some(address.cast_const().cast())
}

/// Returns the address of a symbol (`dlsym`), without its version: only glibc has symbol versions.
/// The address is null if the library lacks the symbol. Returns `None` if a name has a NUL byte.
#[cfg(not(target_env = "gnu"))]
fn versioned(handle: *mut c_void, symbol: &str, _version: &str) -> Option<*const ()> {
    let symbol = CString::new(symbol).ok()?;
    // SAFETY: the handle came from dlopen and is never closed; the name is NUL-terminated.
    let address = unsafe { libc::dlsym(handle, symbol.as_ptr()) };
    Some(address.cast_const().cast())
}

fn unavailable(remedy: &'static str) -> Error {
    Error::new(ErrorKind::Unavailable, "load library").provider("verbs").remedy(remedy)
}

fn lacks_symbol(library: &str, symbol: &'static str) -> Error {
    unavailable("install a libibverbs of rdma-core, version 17 or newer")
        .context("library", library)
        .context("symbol", symbol)
}

//! Function table of libcuda.so.1, and layouts and constants of `cuda.h`, written by hand.
//!
//! The module is public, so that an application or test can pass other functions with
//! [`Functions::from_lookup`].
//!
//! ```
//! use hmem_iface_cuda::sys::{CuResult, Functions};
//!
//! // SAFETY: the lookup returns nothing, so there is nothing that it must vouch for.
//! let error = unsafe { Functions::from_lookup(|_| None) }.unwrap_err();
//! assert_eq!(error.context_value("symbol"), Some(Functions::SYMBOLS[0]));
//! assert_eq!(CuResult::CUDA_ERROR_NO_DEVICE.name(), Some("CUDA_ERROR_NO_DEVICE"));
//! ```

mod codes;
mod layout;

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    mem,
    path::Path,
    sync::Arc,
};

use hmem_core::{Error, ErrorKind, IfaceKind, Result};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

pub use self::{codes::CuResult, layout::*};

/// Declaration of a driver function: its symbol, and the types of its arguments in the spelling of
/// this module.
pub type Signature = (&'static str, &'static [&'static str]);

macro_rules! functions {
    (
        required { $($(#[doc = $doc:literal])+ $field:ident: $symbol:ident($($argument:ty),*);)+ }
        optional {
            $($(#[doc = $odoc:literal])+ $ofield:ident: $osymbol:ident($($oargument:ty),*);)+
        }
    ) => {
        /// Table of the functions of `libcuda.so.1` that this crate calls. Each returns a
        /// [`CuResult`].
        #[derive(Clone, Debug)]
        pub struct Functions {
            library: Arc<str>,
            loaded: bool,
            frees: Arc<[(&'static str, usize)]>,
            $($(#[doc = $doc])+ pub $field: unsafe extern "C" fn($($argument),*) -> CuResult,)+
            $(
                $(#[doc = $odoc])+
                pub $ofield: Option<unsafe extern "C" fn($($oargument),*) -> CuResult>,
            )+
        }

        impl Functions {
            /// Symbols that the library must have.
            pub const SYMBOLS: &[&str] = &[$(stringify!($symbol)),+];
            /// Symbols that older drivers lack. An operation that needs an absent symbol fails with
            /// [`ErrorKind::Unsupported`], and the error names the symbol.
            pub const OPTIONAL_SYMBOLS: &[&str] = &[$(stringify!($osymbol)),+];
            /// All functions with the types of their arguments.
            pub const SIGNATURES: &[Signature] = &[
                $((stringify!($symbol), &[$(stringify!($argument)),*]),)+
                $((stringify!($osymbol), &[$(stringify!($oargument)),*]),)+
            ];

            /// Fills the table with the functions that `lookup` returns.
            ///
            /// # Safety
            /// The caller upholds the safety contract of [`Functions::from_lookup`].
            unsafe fn fill(
                library: &str,
                mut lookup: impl FnMut(&'static str) -> Option<*const ()>,
            ) -> Result<Self> {
                let mut lookup = |symbol| lookup(symbol).filter(|address| !address.is_null());
                Ok(Self {
                    library: library.into(),
                    loaded: false,
                    frees: Self::FREES
                        .iter()
                        .filter_map(|symbol| Some((*symbol, lookup(symbol)?.expose_provenance())))
                        .collect(),
                    $($field: {
                        let address = lookup(stringify!($symbol))
                            .ok_or_else(|| lacks_symbol(library, stringify!($symbol)))?;
                        type Function = unsafe extern "C" fn($($argument),*) -> CuResult;
                        // SAFETY: the caller promises that the address is a function with the
                        // signature that the header declares for this name, which is the one in
                        // this table.
                        unsafe { mem::transmute::<*const (), Function>(address) }
                    },)+
                    $($ofield: lookup(stringify!($osymbol)).map(|address| {
                        type Function = unsafe extern "C" fn($($oargument),*) -> CuResult;
                        // SAFETY: the caller promises that the address is a function with the
                        // signature that the header declares for this name, which is the one in
                        // this table.
                        unsafe { mem::transmute::<*const (), Function>(address) }
                    }),)+
                })
            }
        }
    };
}

functions! {
    required {
        /// `cuInit(flags)`
        init: cuInit(c_uint);
        /// `cuDriverGetVersion(version)`
        driver_get_version: cuDriverGetVersion(*mut c_int);
        /// `cuDeviceGetCount(count)`
        device_get_count: cuDeviceGetCount(*mut c_int);
        /// `cuDeviceGet(device, ordinal)`
        device_get: cuDeviceGet(*mut CuDevice, c_int);
        /// `cuDeviceGetName(name, len, device)`
        device_get_name: cuDeviceGetName(*mut c_char, c_int, CuDevice);
        /// `cuDeviceTotalMem_v2(bytes, device)`
        device_total_mem: cuDeviceTotalMem_v2(*mut usize, CuDevice);
        /// `cuDeviceGetPCIBusId(id, len, device)`
        device_get_pci_bus_id: cuDeviceGetPCIBusId(*mut c_char, c_int, CuDevice);
        /// `cuDeviceGetAttribute(value, attribute, device)`
        device_get_attribute: cuDeviceGetAttribute(*mut c_int, CuDeviceAttribute, CuDevice);
        /// `cuDevicePrimaryCtxRetain(context, device)`
        primary_ctx_retain: cuDevicePrimaryCtxRetain(*mut CuContext, CuDevice);
        /// `cuDevicePrimaryCtxRelease_v2(device)`
        primary_ctx_release: cuDevicePrimaryCtxRelease_v2(CuDevice);
        /// `cuDevicePrimaryCtxGetState(device, flags, active)`
        primary_ctx_get_state: cuDevicePrimaryCtxGetState(CuDevice, *mut c_uint, *mut c_int);
        /// `cuCtxGetCurrent(context)`
        ctx_get_current: cuCtxGetCurrent(*mut CuContext);
        /// `cuCtxGetDevice(device)`
        ctx_get_device: cuCtxGetDevice(*mut CuDevice);
        /// `cuCtxPushCurrent_v2(context)`
        ctx_push_current: cuCtxPushCurrent_v2(CuContext);
        /// `cuCtxPopCurrent_v2(context)`
        ctx_pop_current: cuCtxPopCurrent_v2(*mut CuContext);
        /// `cuPointerGetAttributes(count, attributes, data, pointer)`
        pointer_get_attributes: cuPointerGetAttributes(
            c_uint, *mut CuPointerAttribute, *mut *mut c_void, CuDevicePtr
        );
        /// `cuPointerSetAttribute(value, attribute, pointer)`
        pointer_set_attribute: cuPointerSetAttribute(
            *const c_void, CuPointerAttribute, CuDevicePtr
        );
        /// `cuMemGetAddressRange_v2(base, size, pointer)`
        mem_get_address_range: cuMemGetAddressRange_v2(*mut CuDevicePtr, *mut usize, CuDevicePtr);
        /// `cuMemAlloc_v2(pointer, size)`
        mem_alloc: cuMemAlloc_v2(*mut CuDevicePtr, usize);
        /// `cuMemFree_v2(pointer)`
        mem_free: cuMemFree_v2(CuDevicePtr);
        /// `cuMemHostAlloc(pointer, size, flags)`
        mem_host_alloc: cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        /// `cuMemFreeHost(pointer)`
        mem_free_host: cuMemFreeHost(*mut c_void);
        /// `cuMemHostGetFlags(flags, pointer)`
        mem_host_get_flags: cuMemHostGetFlags(*mut c_uint, *mut c_void);
        /// `cuMemHostRegister_v2(pointer, size, flags)`
        mem_host_register: cuMemHostRegister_v2(*mut c_void, usize, c_uint);
        /// `cuMemHostUnregister(pointer)`
        mem_host_unregister: cuMemHostUnregister(*mut c_void);
        /// `cuMemAllocManaged(pointer, size, flags)`
        mem_alloc_managed: cuMemAllocManaged(*mut CuDevicePtr, usize, c_uint);
        /// `cuMemcpyAsync(to, from, size, stream)`
        memcpy_async: cuMemcpyAsync(CuDevicePtr, CuDevicePtr, usize, CuStream);
        /// `cuStreamCreate(stream, flags)`
        stream_create: cuStreamCreate(*mut CuStream, c_uint);
        /// `cuStreamSynchronize(stream)`
        stream_synchronize: cuStreamSynchronize(CuStream);
        /// `cuStreamDestroy_v2(stream)`
        stream_destroy: cuStreamDestroy_v2(CuStream);
        /// `cuEventCreate(event, flags)`
        event_create: cuEventCreate(*mut CuEvent, c_uint);
        /// `cuEventRecord(event, stream)`
        event_record: cuEventRecord(CuEvent, CuStream);
        /// `cuEventQuery(event)`
        event_query: cuEventQuery(CuEvent);
        /// `cuEventSynchronize(event)`
        event_synchronize: cuEventSynchronize(CuEvent);
        /// `cuEventDestroy_v2(event)`
        event_destroy: cuEventDestroy_v2(CuEvent);
        /// `cuIpcGetMemHandle(handle, pointer)`
        ipc_get_mem_handle: cuIpcGetMemHandle(*mut CuIpcMemHandle, CuDevicePtr);
        /// `cuIpcOpenMemHandle_v2(pointer, handle, flags)`
        ipc_open_mem_handle: cuIpcOpenMemHandle_v2(*mut CuDevicePtr, CuIpcMemHandle, c_uint);
        /// `cuIpcCloseMemHandle(pointer)`
        ipc_close_mem_handle: cuIpcCloseMemHandle(CuDevicePtr);
    }
    optional {
        /// `cuMemGetHandleForAddressRange(handle, pointer, size, type, flags)`
        mem_get_handle_for_address_range: cuMemGetHandleForAddressRange(
            *mut c_void, CuDevicePtr, usize, c_uint, u64
        );
        /// `cuFlushGPUDirectRDMAWrites(target, scope)`
        flush_gpu_direct_rdma_writes: cuFlushGPUDirectRDMAWrites(c_uint, c_uint);
        /// `cuCtxGetFlags(flags)`
        ctx_get_flags: cuCtxGetFlags(*mut c_uint);
        /// `cuCtxSetFlags(flags)`
        ctx_set_flags: cuCtxSetFlags(c_uint);
        /// `cuMemAllocAsync(pointer, size, stream)`
        mem_alloc_async: cuMemAllocAsync(*mut CuDevicePtr, usize, CuStream);
        /// `cuMemFreeAsync(pointer, stream)`
        mem_free_async: cuMemFreeAsync(CuDevicePtr, CuStream);
        /// `cuMemGetAllocationGranularity(granularity, properties, option)`
        mem_get_allocation_granularity: cuMemGetAllocationGranularity(
            *mut usize, *const CuMemAllocationProp, c_uint
        );
        /// `cuMemAddressReserve(pointer, size, alignment, wanted, flags)`
        mem_address_reserve: cuMemAddressReserve(*mut CuDevicePtr, usize, usize, CuDevicePtr, u64);
        /// `cuMemAddressFree(pointer, size)`
        mem_address_free: cuMemAddressFree(CuDevicePtr, usize);
        /// `cuMemCreate(handle, size, properties, flags)`
        mem_create: cuMemCreate(*mut CuMemHandle, usize, *const CuMemAllocationProp, u64);
        /// `cuMemRelease(handle)`
        mem_release: cuMemRelease(CuMemHandle);
        /// `cuMemMap(pointer, size, offset, handle, flags)`
        mem_map: cuMemMap(CuDevicePtr, usize, usize, CuMemHandle, u64);
        /// `cuMemUnmap(pointer, size)`
        mem_unmap: cuMemUnmap(CuDevicePtr, usize);
        /// `cuMemSetAccess(pointer, size, descriptions, count)`
        mem_set_access: cuMemSetAccess(CuDevicePtr, usize, *const CuMemAccessDesc, usize);
        /// `cuMemRetainAllocationHandle(handle, address)`
        mem_retain_allocation_handle: cuMemRetainAllocationHandle(*mut CuMemHandle, *mut c_void);
        /// `cuMemGetAllocationPropertiesFromHandle(properties, handle)`
        mem_get_allocation_properties: cuMemGetAllocationPropertiesFromHandle(
            *mut CuMemAllocationProp, CuMemHandle
        );
    }
}

impl Functions {
    /// Name by which the dynamic loader finds the library.
    pub const LIBRARY: &str = "libcuda.so.1";

    /// Symbols of functions that free memory. A monitor can hook all of them that the library has.
    /// This crate itself calls only a few.
    pub const FREES: &[&str] = &[
        "cuMemFree",
        "cuMemFree_v2",
        "cuMemFreeHost",
        "cuMemFreeAsync",
        "cuMemFreeAsync_ptsz",
        "cuIpcCloseMemHandle",
        "cuCtxDestroy",
        "cuCtxDestroy_v2",
        "cuCtxDetach",
        "cuDevicePrimaryCtxRelease",
        "cuDevicePrimaryCtxRelease_v2",
        "cuDevicePrimaryCtxReset",
        "cuDevicePrimaryCtxReset_v2",
        "cuGreenCtxDestroy",
        "cuModuleUnload",
        "cuLibraryUnload",
        "cuGraphicsUnmapResources",
        "cuGraphicsUnmapResources_ptsz",
        "cuGraphicsUnregisterResource",
        "cuGLUnmapBufferObject",
        "cuGLUnmapBufferObjectAsync",
        "cuGLUnregisterBufferObject",
    ];

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
        // SAFETY: loading runs the library's initialisers; the caller names NVIDIA's driver
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
        // Dropping the handle would unload the library. Its threads, callbacks and exit handlers
        // would then crash the process.
        std::mem::forget(loaded);
        Ok(Self { loaded: true, ..functions })
    }

    /// Fills the table with the functions that a closure returns, such as those of a fake driver.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] naming the first of [`Functions::SYMBOLS`] for which `lookup`
    /// returns `None`.
    ///
    /// # Safety
    /// Each address that `lookup` returns is a function with the signature that `cuda.h` declares
    /// for that name, and stays callable from any thread for as long as a copy of the table
    /// exists.
    pub unsafe fn from_lookup(
        lookup: impl FnMut(&'static str) -> Option<*const ()>,
    ) -> Result<Self> {
        // SAFETY: the caller of this function makes the promise that `fill` asks for.
        unsafe { Self::fill("(injected)", lookup) }
    }

    /// Returns true if the functions were loaded from a library, and false if the caller passed
    /// them.
    #[must_use]
    pub fn is_loaded(&self) -> bool {
        self.loaded
    }

    /// Returns the [`Functions::FREES`] that the library has, each with its symbol and address.
    #[must_use]
    pub fn frees(&self) -> &[(&'static str, usize)] {
        &self.frees
    }

    /// Returns the name of the library that the functions came from.
    #[must_use]
    pub fn library(&self) -> &str {
        &self.library
    }
}

fn not_loaded(library: &str, reason: libloading::Error) -> Error {
    let error = Error::new(ErrorKind::Unavailable, "load library")
        .iface(IfaceKind::CUDA)
        .context("library", library)
        .remedy(
            "install NVIDIA's driver, or name its library in HMEM_CUDA_LIBRARY (in Rust: \
             Cuda::builder().library(path))",
        );
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
        .remedy(
            "the library has no such symbol: it is not NVIDIA's driver library, or older than \
                 CUDA 11.0",
        )
}

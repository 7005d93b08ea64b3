//! Access of the CPU to device memory through GDRCopy (`libgdrapi.so.2`).
//!
//! A few bytes reach the device sooner through a mapping of its PCIe BAR than through a copy
//! engine. The library is loaded at run time. If the library is absent, the error names the
//! library. The kernel module can pin two kinds of memory: memory of `cuMemAlloc`, and VMM memory
//! that was created GPUDirect RDMA capable.
//!
//! ```
//! use hmem_core::ErrorKind;
//! use hmem_iface_cuda::gdrcopy::Gdrcopy;
//!
//! // SAFETY: there is no such file.
//! let absent = unsafe { Gdrcopy::load("/nowhere/libgdrapi.so.2") }.unwrap_err();
//! assert_eq!(absent.kind(), ErrorKind::Unavailable);
//! assert_eq!(absent.context_value("library"), Some("/nowhere/libgdrapi.so.2"));
//! ```

#![allow(unsafe_code, reason = "calls GDRCopy to map device memory")]

use std::{
    ffi::{c_int, c_ulong, c_void},
    fmt,
    path::Path,
    sync::Arc,
};

use hmem_core::{AddressRange, Errno, Error, ErrorKind, IfaceKind, ProcessMark, Result};
use hmem_iface_kit::log_failure;
use parking_lot::Mutex;

use crate::{Cuda, error::CUDA};

/// `GPU_PAGE_SIZE` of `gdrapi.h`: the granularity of pinning in bytes.
pub const GPU_PAGE: u64 = 64 << 10;

/// `gdr_mh_t`: handle of a pinned buffer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GdrHandle {
    /// Opaque value of the library.
    pub h: c_ulong,
}

const REMEDY: &str =
    "install GDRCopy: its library and its kernel module gdrdrv; copies work without it";

// The declarations are those of `include/gdrapi.h` of GDRCopy 2.5 (github.com/NVIDIA/gdrcopy).
// `gdr_t` is an opaque pointer of the library. This table declares it as a number.
hmem_core::function_table! {
    /// Table of the functions of `gdrapi.h` that this crate calls.
    // SAFETY: the vendor supports loading its library in any process. The signatures are those of
    // `gdrapi.h`.
    unsafe GdrFunctions {
        library: "libgdrapi.so.2",
        iface: IfaceKind::CUDA,
        not_loaded: REMEDY,
        lacks_symbol: REMEDY,
    }
    required {
        /// Returns a pointer for the other calls, or null (0) if the kernel module is absent.
        open: gdr_open() -> usize;
        close: gdr_close(usize) -> c_int;
        pin_buffer: gdr_pin_buffer(usize, c_ulong, usize, u64, u32, *mut GdrHandle) -> c_int;
        unpin_buffer: gdr_unpin_buffer(usize, GdrHandle) -> c_int;
        map: gdr_map(usize, GdrHandle, *mut *mut c_void, usize) -> c_int;
        unmap: gdr_unmap(usize, GdrHandle, *mut c_void, usize) -> c_int;
        copy_to_mapping: gdr_copy_to_mapping(GdrHandle, *mut c_void, *const c_void, usize) -> c_int;
        copy_from_mapping: gdr_copy_from_mapping(
            GdrHandle, *mut c_void, *const c_void, usize
        ) -> c_int;
    }
    optional {}
}

/// Makes a call of the library while no other thread makes one. The library keeps its buffers in a
/// list without a lock, and initialises global variables: "GDRCopy, especially libgdrapi.so, is not
/// thread safe" (github.com/NVIDIA/gdrcopy, issue 296).
///
/// The two functions that copy bytes access neither, and any number of threads may call them at
/// once.
fn exclusive<T>(call: impl FnOnce() -> T) -> T {
    static LIBRARY: Mutex<()> = Mutex::new(());
    let _lock = LIBRARY.lock();
    call()
}

/// Converts the code of a call, which is 0 or an errno, to a result. Every function except
/// `gdr_open` returns such a code.
fn check(code: c_int, operation: &'static str) -> Result<()> {
    if code == 0 {
        Ok(())
    } else {
        Err(Error::os(Errno(code.abs()), operation).iface(IfaceKind::CUDA))
    }
}

struct Inner {
    functions: GdrFunctions,
    /// Pointer that `gdr_open` returned.
    library: usize,
    /// The process that opened the library. A forked child has no mappings of the parent's windows,
    /// and must not wait for the lock of [`exclusive`].
    process: ProcessMark,
}

impl Drop for Inner {
    /// Closes the library. Does nothing in a forked child.
    fn drop(&mut self) {
        if !self.process.is_current() {
            return;
        }
        // SAFETY: `Gdrcopy` opened the library once. Each window holds a reference to this value,
        // so every window is already closed.
        let code = exclusive(|| unsafe { (self.functions.close)(self.library) });
        let closed = check(code, "gdr_close");
        log_failure!(error, closed, "cannot close GDRCopy");
    }
}

/// The opened GDRCopy library.
#[derive(Clone)]
pub struct Gdrcopy {
    inner: Arc<Inner>,
}

impl fmt::Debug for Gdrcopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gdrcopy").finish_non_exhaustive()
    }
}

impl Gdrcopy {
    /// Name by which the dynamic loader finds the GDRCopy library.
    pub const LIBRARY: &str = GdrFunctions::LIBRARY;

    /// Loads the GDRCopy library that the dynamic loader finds, and opens the kernel module of
    /// GDRCopy.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if the library, a symbol or the kernel module is absent. The
    /// error names the absent one.
    pub fn open() -> Result<Self> {
        Self::with(GdrFunctions::find()?).map_err(|error| error.context("library", Self::LIBRARY))
    }

    /// Like [`Gdrcopy::open`], with the library at `path`.
    ///
    /// # Errors
    /// The errors of [`Gdrcopy::open`].
    ///
    /// # Safety
    /// The file must be the library of GDRCopy or a replacement of it, such as a fake for tests.
    /// The file must be sound to load in this process, and its functions must have the signatures
    /// and the behaviour that `gdrapi.h` declares.
    ///
    /// # Examples
    /// Safe code cannot load another library:
    /// ```compile_fail,E0133
    /// let gdrcopy = hmem_iface_cuda::gdrcopy::Gdrcopy::load("/tmp/any.so");
    /// ```
    pub unsafe fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        // SAFETY: the caller promises that the file is the library or a replacement of it.
        Self::with(unsafe { GdrFunctions::load(path) }?)
            .map_err(|error| error.context("library", path.display()))
    }

    /// Opens GDRCopy over functions that the caller passes, instead of a library.
    ///
    /// # Errors
    /// - [`ErrorKind::Unavailable`] if `gdr_open` returns null.
    /// - The errors of [`ProcessMark::current`].
    pub fn with(functions: GdrFunctions) -> Result<Self> {
        let process = ProcessMark::current()?;
        // SAFETY: the call has no argument, and reports a failure by null.
        let library = exclusive(|| unsafe { (functions.open)() });
        if library == 0 {
            return Err(CUDA
                .error(ErrorKind::Unavailable, "gdr_open")
                .context("module", "/dev/gdrdrv cannot be opened")
                .remedy(REMEDY));
        }
        Ok(Self { inner: Arc::new(Inner { functions, library, process }) })
    }

    /// Maps a range of device memory for the CPU.
    ///
    /// Sets SYNC_MEMOPS on the memory, as an export does for a NIC, since the CPU too reads the
    /// memory without the driver.
    ///
    /// # Safety
    /// The caller must not free the memory before the window is dropped. Freeing the memory would
    /// unmap the window under the CPU.
    ///
    /// # Errors
    /// - [`ErrorKind::ZeroLength`] for an empty range.
    /// - [`ErrorKind::OutOfBounds`] for a range that is not in one allocation.
    /// - [`ErrorKind::Unsupported`] for memory that kernel clients cannot pin. The error names the
    ///   memory.
    /// - Otherwise the error of the driver or the library.
    pub unsafe fn map(&self, cuda: &Cuda, range: AddressRange) -> Result<CpuWindow> {
        let described = |error: Error| error.context("range", range);
        cuda.exporter.prepare("gdr_pin_buffer", range)?;
        let whole = range.page_aligned(GPU_PAGE);
        let Inner { functions, library, .. } = &*self.inner;
        let (start, len) = (whole.start().0, whole.len() as usize);
        let mut handle = GdrHandle::default();
        // SAFETY: the range was found to be device memory, and `handle` is writable. Since CUDA 6
        // no token is needed.
        let code = exclusive(|| unsafe {
            (functions.pin_buffer)(*library, start, len, 0, 0, &mut handle)
        });
        check(code, "gdr_pin_buffer").map_err(described)?;
        let mut mapping: *mut c_void = std::ptr::null_mut();
        // SAFETY: `gdr_pin_buffer` above pinned the handle; `mapping` is writable.
        let code = exclusive(|| unsafe { (functions.map)(*library, handle, &mut mapping, len) });
        if let Err(error) = check(code, "gdr_map") {
            // SAFETY: `gdr_pin_buffer` above pinned the buffer, and `gdr_map` refused to map it.
            let code = exclusive(|| unsafe { (functions.unpin_buffer)(*library, handle) });
            let unpinned = check(code, "gdr_unpin_buffer");
            log_failure!(error, unpinned, %range, "cannot unpin device memory that was not mapped");
            return Err(described(error));
        }
        let inner = Arc::clone(&self.inner);
        Ok(CpuWindow { inner, handle, mapping: mapping.expose_provenance(), whole, range })
    }
}

/// A range of device memory that is mapped for the CPU. Dropping the window closes it.
pub struct CpuWindow {
    inner: Arc<Inner>,
    handle: GdrHandle,
    /// CPU address of the first byte of `whole`.
    mapping: usize,
    /// Range of device memory that is pinned and mapped: `range`, extended to whole GPU pages.
    whole: AddressRange,
    range: AddressRange,
}

impl CpuWindow {
    /// Returns the range of device memory that the window maps.
    #[must_use]
    pub fn range(&self) -> AddressRange {
        self.range
    }

    fn at(&self, offset: u64, len: usize) -> Result<usize> {
        self.inner.process.check("copy").map_err(|error| error.iface(IfaceKind::CUDA))?;
        let part = self.range.slice(offset, len as u64).ok_or_else(|| {
            CUDA.error(ErrorKind::OutOfBounds, "copy")
                .context("offset", offset)
                .context("length", len)
                .context("window", self.range)
        })?;
        Ok(self.mapping + (part.start().0 - self.whole.start().0) as usize)
    }

    /// Copies bytes from the window, beginning at `offset`, into a buffer.
    ///
    /// # Errors
    /// - [`ErrorKind::OutOfBounds`] if the bytes exceed the window.
    /// - [`ErrorKind::BadState`] in a forked child.
    /// - Otherwise the error of the library.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let from = std::ptr::with_exposed_provenance(self.at(offset, into.len())?);
        // SAFETY: `into` is writable for its length. The source lies in the mapping, as checked
        // above.
        let code = unsafe {
            (self.inner.functions.copy_from_mapping)(
                self.handle,
                into.as_mut_ptr().cast(),
                from,
                into.len(),
            )
        };
        check(code, "gdr_copy_from_mapping")
    }

    /// Copies bytes from a buffer into the window, beginning at `offset`.
    ///
    /// # Errors
    /// The errors of [`CpuWindow::read`].
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let to = std::ptr::with_exposed_provenance_mut(self.at(offset, from.len())?);
        // SAFETY: `from` is readable for its length. The destination lies in the mapping, as
        // checked above.
        let code = unsafe {
            (self.inner.functions.copy_to_mapping)(
                self.handle,
                to,
                from.as_ptr().cast(),
                from.len(),
            )
        };
        check(code, "gdr_copy_to_mapping")
    }
}

impl fmt::Debug for CpuWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuWindow").field("range", &self.range).finish_non_exhaustive()
    }
}

impl Drop for CpuWindow {
    /// Unmaps and unpins the range. Does nothing in a forked child.
    fn drop(&mut self) {
        let Inner { functions, library, process } = &*self.inner;
        if !process.is_current() {
            return;
        }
        let mapping = std::ptr::with_exposed_provenance_mut(self.mapping);
        // SAFETY: `Gdrcopy::map` pinned and mapped the range, and only this drop unmaps and unpins
        // it.
        let codes = exclusive(|| unsafe {
            [
                (
                    (functions.unmap)(*library, self.handle, mapping, self.whole.len() as usize),
                    "gdr_unmap",
                ),
                ((functions.unpin_buffer)(*library, self.handle), "gdr_unpin_buffer"),
            ]
        });
        for (code, operation) in codes {
            let (ended, range) = (check(code, operation), self.range);
            log_failure!(error, ended, %range, "cannot unmap a window of device memory");
        }
    }
}

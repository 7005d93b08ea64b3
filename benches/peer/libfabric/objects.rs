//! Owned libfabric objects. Each object is called through its table of function pointers, and is
//! closed once.
//!
//! An [`Object`] holds a pointer that libfabric returned from a successful open. Nothing else
//! closes the pointer. libfabric refuses to close an object that is in use, so a struct declares
//! its objects in the order in which they must be closed.

use std::ffi::{CStr, c_int, c_void};
use std::fmt;
use std::ptr::{self, NonNull};

use super::Libfabric;
use super::error::{FabricErrno, FabricError};
use super::info::Info;
use super::sys;

impl Libfabric {
    /// Returns libfabric's description of an error number.
    pub(crate) fn text(self, code: FabricErrno) -> String {
        // SAFETY: `fi_strerror` accepts any number.
        let text = unsafe { self.functions.fi_strerror()(code.0) };
        if text.is_null() {
            return String::new();
        }
        // SAFETY: the pointer is not null. The library returns nul-terminated strings that it never
        // frees.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// Returns `Ok` if `returned` is zero. Otherwise `returned` is a negated error number, and the
    /// result is the error of the call `operation`.
    #[inline]
    pub(crate) fn check(self, operation: &'static str, returned: c_int) -> Result<(), FabricError> {
        if returned == 0 {
            return Ok(());
        }
        Err(self.call_error(operation, FabricErrno(-returned)))
    }

    #[cold]
    fn call_error(self, operation: &'static str, code: FabricErrno) -> FabricError {
        FabricError::Call { operation, code, text: self.text(code) }
    }

    /// Returns `returned` as a count. If `returned` is negative, it is a negated error number, and
    /// the result is the error of the call `operation`.
    pub(crate) fn check_size(
        self,
        operation: &'static str,
        returned: isize,
    ) -> Result<usize, FabricError> {
        usize::try_from(returned)
            .map_err(|_| self.call_error(operation, FabricErrno::from_negated(returned)))
    }
}

impl FabricErrno {
    /// Returns the error number for a negative return value of a data transfer call.
    pub(crate) fn from_negated(returned: isize) -> Self {
        Self(i32::try_from(-returned).unwrap_or(i32::MAX))
    }
}

// The errors are created in cold functions, not as arguments of `ok_or`. A `FabricError` owns
// memory, so creating it on success too would add nanoseconds to libfabric's time.
#[cold]
fn missing(operation: &'static str) -> FabricError {
    FabricError::OperationMissing { operation }
}

#[cold]
pub(crate) fn nothing_returned(operation: &'static str) -> FabricError {
    FabricError::NothingReturned { operation }
}

/// Returns a function pointer of an object's table. Fails if the pointer is null, because then the
/// provider does not implement the call `operation`.
#[inline]
fn required<T>(operation: &'static str, function: Option<T>) -> Result<T, FabricError> {
    match function {
        Some(function) => Ok(function),
        None => Err(missing(operation)),
    }
}

/// A libfabric struct that begins with a `fid`.
///
/// # Safety
///
/// The type must be `repr(C)`, and its first field must be a [`sys::fid`].
pub(crate) unsafe trait Fid {
    /// Name of the closing call, for error messages.
    const CLOSE: &'static str;
}

macro_rules! fid {
    ($($object:ident => $close:literal),+ $(,)?) => {$(
        // SAFETY: `sys` declares the struct `repr(C)` with `fid: fid` as its first field.
        unsafe impl Fid for sys::$object {
            const CLOSE: &'static str = $close;
        }
    )+};
}

fid! {
    fid_fabric => "fi_close of a fabric",
    fid_domain => "fi_close of a domain",
    fid_mr => "fi_close of a memory region",
    fid_av => "fi_close of an address vector",
    fid_cq => "fi_close of a completion queue",
    fid_ep => "fi_close of an endpoint",
}

/// An open libfabric object. Dropping an `Object` closes the libfabric object, and prints the error
/// if that fails.
///
/// Invariant: `raw` came from a successful open and has not been closed.
pub(crate) struct Object<T: Fid> {
    libfabric: Libfabric,
    raw: NonNull<T>,
}

impl<T: Fid> Object<T> {
    /// Calls `open`, and returns the object that it opened.
    ///
    /// If `open` returns zero, it has stored the object's address through its argument. Otherwise
    /// it returns a negated error number. `operation` is the call's name in errors.
    #[inline]
    pub(crate) fn open(
        libfabric: Libfabric,
        operation: &'static str,
        open: impl FnOnce(*mut *mut T) -> c_int,
    ) -> Result<Self, FabricError> {
        let mut raw = ptr::null_mut();
        libfabric.check(operation, open(&raw mut raw))?;
        let raw = NonNull::new(raw).ok_or_else(|| nothing_returned(operation))?;
        Ok(Self { libfabric, raw })
    }

    #[inline]
    fn fid(&self) -> *mut sys::fid {
        self.raw.as_ptr().cast()
    }

    #[inline]
    fn close_raw(&self) -> Result<(), FabricError> {
        // SAFETY: `Fid` guarantees that the object begins with a `fid`, which is valid while the
        // object is open.
        let close = required(T::CLOSE, unsafe { (*(*self.fid()).ops).close })?;
        // SAFETY: the object is open. Neither caller uses the object after this call.
        let returned = unsafe { close(self.fid()) };
        self.libfabric.check(T::CLOSE, returned)
    }

    /// Closes the object. If libfabric refuses because the object is still in use, the object stays
    /// open until the process ends.
    #[inline]
    pub(crate) fn close(self) -> Result<(), FabricError> {
        let closed = self.close_raw();
        std::mem::forget(self);
        closed
    }
}

impl<T: Fid> fmt::Debug for Object<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Object").field(&self.raw).finish()
    }
}

impl<T: Fid> Drop for Object<T> {
    fn drop(&mut self) {
        if let Err(error) = self.close_raw() {
            eprintln!("libfabric peer: {error}");
        }
    }
}

impl Object<sys::fid_fabric> {
    /// Opens the domain that `info` describes.
    pub(crate) fn domain(&self, info: &Info) -> Result<Object<sys::fid_domain>, FabricError> {
        // SAFETY: the fabric is open, so its table is valid.
        let domain = required("fi_domain", unsafe { (*(*self.raw.as_ptr()).ops).domain })?;
        // SAFETY: the fabric is open, and `info` is the entry that the fabric was opened from.
        Object::open(self.libfabric, "fi_domain", |out| unsafe {
            domain(self.raw.as_ptr(), info.as_ptr(), out, ptr::null_mut())
        })
    }
}

impl Object<sys::fid_domain> {
    /// Registers one range of host memory with `fi_mr_regattr`.
    ///
    /// The software providers only record the range. They access its bytes during a transfer.
    #[inline]
    pub(crate) fn register(
        &self,
        buf: *const u8,
        len: usize,
        access: u64,
        requested_key: u64,
        flags: u64,
    ) -> Result<Object<sys::fid_mr>, FabricError> {
        let range = sys::iovec { iov_base: buf.cast(), iov_len: len };
        let attr = sys::fi_mr_attr {
            mr_iov: &raw const range,
            iov_count: 1,
            access,
            requested_key,
            ..sys::fi_mr_attr::EMPTY
        };
        // SAFETY: the domain is open, so its table is valid.
        let regattr = required("fi_mr_regattr", unsafe { (*(*self.raw.as_ptr()).mr).regattr })?;
        // SAFETY: the domain is open. `attr` and `range` outlive the call, which copies them.
        Object::open(self.libfabric, "fi_mr_regattr", |out| unsafe {
            regattr(self.fid(), &raw const attr, flags, out)
        })
    }

    /// Opens a completion queue of `size` entries, in the shortest completion format and without a
    /// wait object.
    pub(crate) fn completion_queue(&self, size: usize) -> Result<Object<sys::fid_cq>, FabricError> {
        let mut attr = sys::fi_cq_attr {
            size,
            flags: 0,
            format: sys::FI_CQ_FORMAT_CONTEXT,
            wait_obj: sys::FI_WAIT_NONE,
            signaling_vector: 0,
            wait_cond: 0,
            wait_set: ptr::null_mut(),
        };
        // SAFETY: the domain is open, so its table is valid.
        let cq_open = required("fi_cq_open", unsafe { (*(*self.raw.as_ptr()).ops).cq_open })?;
        // SAFETY: the domain is open, and `attr` outlives the call.
        Object::open(self.libfabric, "fi_cq_open", |out| unsafe {
            cq_open(self.raw.as_ptr(), &raw mut attr, out, ptr::null_mut())
        })
    }

    /// Opens an address vector with room for `count` addresses.
    pub(crate) fn address_vector(&self, count: usize) -> Result<Object<sys::fid_av>, FabricError> {
        let mut attr = sys::fi_av_attr {
            r#type: sys::FI_AV_TABLE,
            rx_ctx_bits: 0,
            count,
            ep_per_node: 0,
            name: ptr::null(),
            map_addr: ptr::null_mut(),
            flags: 0,
        };
        // SAFETY: the domain is open, so its table is valid.
        let av_open = required("fi_av_open", unsafe { (*(*self.raw.as_ptr()).ops).av_open })?;
        // SAFETY: the domain is open, and `attr` outlives the call.
        Object::open(self.libfabric, "fi_av_open", |out| unsafe {
            av_open(self.raw.as_ptr(), &raw mut attr, out, ptr::null_mut())
        })
    }

    /// Opens the endpoint that `info` describes.
    pub(crate) fn endpoint(&self, info: &Info) -> Result<Object<sys::fid_ep>, FabricError> {
        // SAFETY: the domain is open, so its table is valid.
        let endpoint = required("fi_endpoint", unsafe { (*(*self.raw.as_ptr()).ops).endpoint })?;
        // SAFETY: the domain is open, and `info` is the entry that the domain was opened from.
        Object::open(self.libfabric, "fi_endpoint", |out| unsafe {
            endpoint(self.raw.as_ptr(), info.as_ptr(), out, ptr::null_mut())
        })
    }
}

impl Object<sys::fid_mr> {
    /// Returns the key with which a remote endpoint accesses the region.
    pub(crate) fn key(&self) -> u64 {
        // SAFETY: the region is open. libfabric sets its key before the open returns.
        unsafe { (*self.raw.as_ptr()).key }
    }
}

impl Object<sys::fid_av> {
    /// Adds one endpoint address, in the provider's format, and returns its index.
    pub(crate) fn insert(&self, address: &[u8]) -> Result<sys::fi_addr_t, FabricError> {
        // SAFETY: the address vector is open, so its table is valid.
        let insert = required("fi_av_insert", unsafe { (*(*self.raw.as_ptr()).ops).insert })?;
        let mut index = u64::MAX;
        // SAFETY: the address vector is open. `address` is one complete address that the provider
        // wrote, and `index` has room for the one result.
        let inserted = unsafe {
            insert(
                self.raw.as_ptr(),
                address.as_ptr().cast(),
                1,
                &raw mut index,
                0,
                ptr::null_mut(),
            )
        };
        if inserted == 1 {
            return Ok(index);
        }
        self.libfabric.check("fi_av_insert", inserted)?;
        Err(nothing_returned("fi_av_insert"))
    }
}

impl Object<sys::fid_cq> {
    /// Makes progress and reads at most one completion. Returns true if there was one.
    ///
    /// # Errors
    ///
    /// - [`FabricError::Completion`] if the completion reports a failed operation. The error names
    ///   the operation `operation`.
    /// - [`FabricError::Call`] if `fi_cq_read` or `fi_cq_readerr` fails.
    #[inline]
    pub(crate) fn poll(&self, operation: &'static str) -> Result<bool, FabricError> {
        let mut entry = sys::fi_cq_entry { op_context: ptr::null_mut() };
        // SAFETY: the queue is open, so its table is valid.
        let read = required("fi_cq_read", unsafe { (*(*self.raw.as_ptr()).ops).read })?;
        // SAFETY: the queue is open, its format is that of `entry`, and the call writes at most one
        // entry.
        let returned = unsafe { read(self.raw.as_ptr(), (&raw mut entry).cast::<c_void>(), 1) };
        if returned > 0 {
            return Ok(true);
        }
        match FabricErrno::from_negated(returned) {
            FabricErrno::AGAIN | FabricErrno(0) => Ok(false),
            FabricErrno::AVAIL => Err(self.failure(operation)),
            code => Err(self.libfabric.call_error("fi_cq_read", code)),
        }
    }

    /// Reads the error entry at the head of the queue. Returns the failure of `operation` that the
    /// entry describes, or the error of the read.
    #[cold]
    fn failure(&self, operation: &'static str) -> FabricError {
        let mut entry = sys::fi_cq_err_entry {
            op_context: ptr::null_mut(),
            flags: 0,
            len: 0,
            buf: ptr::null_mut(),
            data: 0,
            tag: 0,
            olen: 0,
            err: 0,
            prov_errno: 0,
            err_data: ptr::null_mut(),
            err_data_size: 0,
        };
        // SAFETY: the queue is open, so its table is valid.
        let readerr = required("fi_cq_readerr", unsafe { (*(*self.raw.as_ptr()).ops).readerr });
        // SAFETY: the queue is open, and `entry` has the size of the requested API version.
        let taken = readerr.and_then(|readerr| unsafe {
            let returned = readerr(self.raw.as_ptr(), &raw mut entry, 0);
            self.libfabric.check_size("fi_cq_readerr", returned)
        });
        if let Err(error) = taken {
            return error;
        }
        let code = FabricErrno(entry.err);
        FabricError::Completion {
            operation,
            code,
            provider_code: entry.prov_errno,
            text: self.libfabric.text(code),
        }
    }
}

impl Object<sys::fid_ep> {
    /// Binds a completion queue or an address vector to the endpoint.
    pub(crate) fn bind<T: Fid>(&self, other: &Object<T>, flags: u64) -> Result<(), FabricError> {
        // SAFETY: the endpoint is open, so its table is valid.
        let bind = required("fi_ep_bind", unsafe { (*(*self.fid()).ops).bind })?;
        // SAFETY: both objects are open and belong to one domain.
        let returned = unsafe { bind(self.fid(), other.fid(), flags) };
        self.libfabric.check("fi_ep_bind", returned)
    }

    /// Enables the endpoint with `fi_enable`.
    pub(crate) fn enable(&self) -> Result<(), FabricError> {
        // SAFETY: the endpoint is open, so its table is valid.
        let control = required("fi_enable", unsafe { (*(*self.fid()).ops).control })?;
        // SAFETY: the endpoint is open, and this command has no argument.
        let returned = unsafe { control(self.fid(), sys::FI_ENABLE, ptr::null_mut()) };
        self.libfabric.check("fi_enable", returned)
    }

    /// Returns the endpoint's own address in the provider's format.
    pub(crate) fn name(&self) -> Result<Vec<u8>, FabricError> {
        // SAFETY: the endpoint is open, so its table is valid.
        let getname = required("fi_getname", unsafe { (*(*self.raw.as_ptr()).cm).getname })?;
        let mut address = vec![0; 512];
        let mut len = address.len();
        // SAFETY: the endpoint is open, and `len` is the size of `address`.
        let returned = unsafe { getname(self.fid(), address.as_mut_ptr().cast(), &raw mut len) };
        self.libfabric.check("fi_getname", returned)?;
        address.truncate(len);
        Ok(address)
    }

    /// Posts a write of `len` bytes from `source` with `fi_write`. The target is the address
    /// `remote` at the endpoint `destination`. Returns false if the provider has no room; then make
    /// progress and retry.
    ///
    /// # Safety
    ///
    /// The caller must ensure that, until the operation has completed and the bytes have arrived:
    /// - `source` is readable for `len` bytes.
    /// - At the destination, the region of `key` is writable at `remote` for `len` bytes.
    /// - No Rust reference to either range is used.
    #[inline]
    pub(crate) unsafe fn write(
        &self,
        source: *const u8,
        len: usize,
        destination: sys::fi_addr_t,
        remote: u64,
        key: u64,
    ) -> Result<bool, FabricError> {
        // SAFETY: the endpoint is open, so its table is valid.
        let write = required("fi_write", unsafe { (*(*self.raw.as_ptr()).rma).write })?;
        // SAFETY: the endpoint is enabled, and `destination` came from its address vector. The
        // caller guarantees that both ranges are valid.
        let returned = unsafe {
            write(
                self.raw.as_ptr(),
                source.cast(),
                len,
                ptr::null_mut(),
                destination,
                remote,
                key,
                ptr::null_mut(),
            )
        };
        if returned == 0 {
            return Ok(true);
        }
        match FabricErrno::from_negated(returned) {
            FabricErrno::AGAIN => Ok(false),
            code => Err(self.libfabric.call_error("fi_write", code)),
        }
    }
}

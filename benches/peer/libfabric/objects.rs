//! Owned libfabric objects: opened, used through their tables, closed once.
//!
//! Each wrapper holds a pointer that the library returned from a successful open and that nothing
//! else closes. libfabric refuses to close what is still in use, so an owner of several declares
//! them in the order in which they must be closed.

use std::ffi::{CStr, c_int, c_void};
use std::fmt;
use std::ptr::{self, NonNull};

use super::Libfabric;
use super::error::{FabricErrno, FabricError};
use super::info::Info;
use super::sys;

impl Libfabric {
    /// The library's text for an error number.
    pub(crate) fn text(self, code: FabricErrno) -> String {
        // SAFETY: `fi_strerror` accepts any number.
        let text = unsafe { (self.functions.fi_strerror)(code.0) };
        if text.is_null() {
            return String::new();
        }
        // SAFETY: not null, and the library returns nul-terminated strings that it never frees.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// Turns a return value, zero or a negated error number, into a result.
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

    /// Like [`Self::check`], for calls that return a count or a negated error number.
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
    /// The error number behind a negative return value of the data transfer calls.
    pub(crate) fn from_negated(returned: isize) -> Self {
        Self(i32::try_from(-returned).unwrap_or(i32::MAX))
    }
}

// Errors are made out of line: a `FabricError` owns memory, and one that is made in advance and
// then dropped costs nanoseconds that would be put down to libfabric.
#[cold]
fn missing(operation: &'static str) -> FabricError {
    FabricError::OperationMissing { operation }
}

#[cold]
pub(crate) fn nothing_returned(operation: &'static str) -> FabricError {
    FabricError::NothingReturned { operation }
}

/// The operation in a table's slot, or an error that names the call it stands for.
#[inline]
fn slot<T>(operation: &'static str, slot: Option<T>) -> Result<T, FabricError> {
    match slot {
        Some(function) => Ok(function),
        None => Err(missing(operation)),
    }
}

/// A structure of libfabric's that begins with a `fid`.
///
/// # Safety
///
/// The type is `repr(C)` and its first field is a [`sys::fid`].
pub(crate) unsafe trait Fid {
    /// Name of the closing call, for error messages.
    const CLOSE: &'static str;
}

macro_rules! fid {
    ($($object:ident => $close:literal),+ $(,)?) => {$(
        // SAFETY: `sys` declares it `repr(C)` with a first field `fid: fid`.
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

/// An open object. Invariant: `raw` came from a successful open and has not been closed.
pub(crate) struct Object<T: Fid> {
    libfabric: Libfabric,
    raw: NonNull<T>,
}

impl<T: Fid> Object<T> {
    /// Runs `open`, which stores the object's address through its argument and returns zero, or
    /// returns a negated error number.
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
        // SAFETY: by `Fid` the object begins with a `fid`, which is valid while it is open.
        let close = slot(T::CLOSE, unsafe { (*(*self.fid()).ops).close })?;
        // SAFETY: the object is open; both callers give it up right afterwards.
        let returned = unsafe { close(self.fid()) };
        self.libfabric.check(T::CLOSE, returned)
    }

    /// Closes the object. When the library refuses, the object is left to the process: it is in
    /// use by something this module does not know of.
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
        // SAFETY: the fabric is open and owns its table.
        let domain = slot("fi_domain", unsafe { (*(*self.raw.as_ptr()).ops).domain })?;
        // SAFETY: the fabric is open and `info` is the entry it was opened from.
        Object::open(self.libfabric, "fi_domain", |out| unsafe {
            domain(self.raw.as_ptr(), info.as_ptr(), out, ptr::null_mut())
        })
    }
}

impl Object<sys::fid_domain> {
    /// `fi_mr_regattr` of one range of host memory.
    ///
    /// The software providers only note the range; they touch its bytes when a transfer does.
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
            offset: 0,
            requested_key,
            context: ptr::null_mut(),
            auth_key_size: 0,
            auth_key: ptr::null_mut(),
            iface: sys::FI_HMEM_SYSTEM,
            device: 0,
        };
        // SAFETY: the domain is open and owns its table.
        let regattr = slot("fi_mr_regattr", unsafe { (*(*self.raw.as_ptr()).mr).regattr })?;
        // SAFETY: the domain is open; `attr` and `range` outlive the call, which copies them.
        Object::open(self.libfabric, "fi_mr_regattr", |out| unsafe {
            regattr(self.fid(), &raw const attr, flags, out)
        })
    }

    /// A completion queue of `size` entries in the shortest format, without a wait object.
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
        // SAFETY: the domain is open and owns its table.
        let cq_open = slot("fi_cq_open", unsafe { (*(*self.raw.as_ptr()).ops).cq_open })?;
        // SAFETY: the domain is open and `attr` outlives the call.
        Object::open(self.libfabric, "fi_cq_open", |out| unsafe {
            cq_open(self.raw.as_ptr(), &raw mut attr, out, ptr::null_mut())
        })
    }

    /// An address vector for `count` addresses.
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
        // SAFETY: the domain is open and owns its table.
        let av_open = slot("fi_av_open", unsafe { (*(*self.raw.as_ptr()).ops).av_open })?;
        // SAFETY: the domain is open and `attr` outlives the call.
        Object::open(self.libfabric, "fi_av_open", |out| unsafe {
            av_open(self.raw.as_ptr(), &raw mut attr, out, ptr::null_mut())
        })
    }

    /// Opens the endpoint that `info` describes.
    pub(crate) fn endpoint(&self, info: &Info) -> Result<Object<sys::fid_ep>, FabricError> {
        // SAFETY: the domain is open and owns its table.
        let endpoint = slot("fi_endpoint", unsafe { (*(*self.raw.as_ptr()).ops).endpoint })?;
        // SAFETY: the domain is open and `info` is the entry it was opened from.
        Object::open(self.libfabric, "fi_endpoint", |out| unsafe {
            endpoint(self.raw.as_ptr(), info.as_ptr(), out, ptr::null_mut())
        })
    }
}

impl Object<sys::fid_mr> {
    /// The key that a peer must present.
    pub(crate) fn key(&self) -> u64 {
        // SAFETY: the region is open, and its key is written before it is handed out.
        unsafe { (*self.raw.as_ptr()).key }
    }
}

impl Object<sys::fid_av> {
    /// Adds one address in the provider's format.
    pub(crate) fn insert(&self, address: &[u8]) -> Result<sys::fi_addr_t, FabricError> {
        // SAFETY: the address vector is open and owns its table.
        let insert = slot("fi_av_insert", unsafe { (*(*self.raw.as_ptr()).ops).insert })?;
        let mut index = u64::MAX;
        // SAFETY: the address vector is open, `address` is one complete address as the provider
        // wrote it, and there is room for the one index.
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
    /// Makes progress, and takes at most one completion.
    ///
    /// # Errors
    ///
    /// [`FabricError::Completion`] when the completion is that of a failed operation, which is then
    /// reported as `operation`.
    #[inline]
    pub(crate) fn poll(&self, operation: &'static str) -> Result<bool, FabricError> {
        let mut entry = sys::fi_cq_entry { op_context: ptr::null_mut() };
        // SAFETY: the queue is open and owns its table.
        let read = slot("fi_cq_read", unsafe { (*(*self.raw.as_ptr()).ops).read })?;
        // SAFETY: the queue is open with the format of `entry`, of which there is one.
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

    /// The failed operation at the head of the queue.
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
        // SAFETY: the queue is open and owns its table.
        let readerr = slot("fi_cq_readerr", unsafe { (*(*self.raw.as_ptr()).ops).readerr });
        // SAFETY: the queue is open and `entry` has the length of the version that was asked for.
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
    /// Binds a completion queue or an address vector.
    pub(crate) fn bind<T: Fid>(&self, other: &Object<T>, flags: u64) -> Result<(), FabricError> {
        // SAFETY: the endpoint is open and owns its table.
        let bind = slot("fi_ep_bind", unsafe { (*(*self.fid()).ops).bind })?;
        // SAFETY: both objects are open and of one domain.
        let returned = unsafe { bind(self.fid(), other.fid(), flags) };
        self.libfabric.check("fi_ep_bind", returned)
    }

    /// Enables the endpoint with `fi_enable`.
    pub(crate) fn enable(&self) -> Result<(), FabricError> {
        // SAFETY: the endpoint is open and owns its table.
        let control = slot("fi_enable", unsafe { (*(*self.fid()).ops).control })?;
        // SAFETY: the endpoint is open, and this command takes no argument.
        let returned = unsafe { control(self.fid(), sys::FI_ENABLE, ptr::null_mut()) };
        self.libfabric.check("fi_enable", returned)
    }

    /// The endpoint's own address in the provider's format.
    pub(crate) fn name(&self) -> Result<Vec<u8>, FabricError> {
        // SAFETY: the endpoint is open and owns its table.
        let getname = slot("fi_getname", unsafe { (*(*self.raw.as_ptr()).cm).getname })?;
        let mut address = vec![0; 512];
        let mut len = address.len();
        // SAFETY: the endpoint is open, and `len` is the room in `address`.
        let returned = unsafe { getname(self.fid(), address.as_mut_ptr().cast(), &raw mut len) };
        self.libfabric.check("fi_getname", returned)?;
        address.truncate(len);
        Ok(address)
    }

    /// `fi_write`: posts `len` bytes at `source` to `remote` of the endpoint at `destination`.
    /// `false` when the provider wants progress first.
    ///
    /// # Safety
    ///
    /// `source` is readable for `len` bytes and, at its destination, the region of `key` is
    /// writable at `remote` for `len` bytes, until the operation has completed and arrived. No Rust
    /// reference to either range is used meanwhile.
    #[inline]
    pub(crate) unsafe fn write(
        &self,
        source: *const u8,
        len: usize,
        destination: sys::fi_addr_t,
        remote: u64,
        key: u64,
    ) -> Result<bool, FabricError> {
        // SAFETY: the endpoint is open and owns its table.
        let write = slot("fi_write", unsafe { (*(*self.raw.as_ptr()).rma).write })?;
        // SAFETY: the endpoint is enabled, `destination` came from its address vector, and the
        // caller vouches for both ranges.
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

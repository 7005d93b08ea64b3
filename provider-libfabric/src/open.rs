//! [`OpenDomain`]: an open `fid_domain` with its lock, and the calls that need an open domain.

#![allow(unsafe_code, reason = "calls the tables of libfabric's objects")]

use std::{
    any::Any,
    ffi::{c_int, c_void},
    mem, ptr,
};

use hmem_core::{Error, ErrorKind, ProcessMark, Result, random::random_u64};
use parking_lot::{ReentrantMutex, ReentrantMutexGuard};

use super::{
    attr::DomainAttr,
    errors,
    region::{Part, Parts},
    settings::EndpointPointer,
    sys::{self, fid, fid_domain},
};

const CLOSE: &str = "fi_close(mr)";

/// A value that keeps a `fid_domain` open: the one that the application passes to
/// [`Builder::with_domain`](super::Builder::with_domain), or the fabric of this provider.
pub(super) type Owner = Box<dyn Any + Send + Sync>;

/// An open `fid_domain`, of the application or of this provider, with its attributes.
pub(super) struct OpenDomain {
    pub(super) domain: *mut fid_domain,
    pub(super) attr: DomainAttr,
    /// True if this provider opened the domain, false if the program did.
    pub(super) own: bool,
    /// Endpoint of regions whose request names none.
    pub(super) endpoint: Option<EndpointPointer>,
    /// Serialises calls of the domain and its objects; used if [`DomainAttr::serial`] is true. A
    /// thread that needs this lock and that of the table of regions takes this lock first.
    pub(super) lock: ReentrantMutex<()>,
    /// The value that keeps the domain open. `None` only during the drop.
    pub(super) owner: Option<Owner>,
    pub(super) process: ProcessMark,
}

// SAFETY: libfabric's objects belong to no thread. Calls are serialised by `lock` unless the
// program opened the domain with FI_THREAD_SAFE. The owner is Send.
unsafe impl Send for OpenDomain {}
// SAFETY: calls are serialised by `lock` unless the program opened the domain with FI_THREAD_SAFE.
// The owner is Sync and never accessed.
unsafe impl Sync for OpenDomain {}

/// Drops the value that keeps the domain open, which may close the domain. A forked child leaks
/// that value instead: the domain belongs to its parent.
impl Drop for OpenDomain {
    fn drop(&mut self) {
        if !self.process.is_current() {
            mem::forget(self.owner.take());
        }
    }
}

/// Guard that keeps this provider from calling a libfabric domain or an object of the domain.
///
/// The thread that holds the guard may register and close regions.
#[derive(Debug)]
#[must_use = "the provider waits only while the guard exists"]
pub struct DomainGuard<'d> {
    _guard: Option<ReentrantMutexGuard<'d, ()>>,
}

impl OpenDomain {
    /// Takes the lock, unless the domain was opened with FI_THREAD_SAFE.
    pub(super) fn lock(&self) -> DomainGuard<'_> {
        DomainGuard { _guard: self.attr.serial.then(|| self.lock.lock()) }
    }

    /// Takes the lock like [`Self::lock`], for calls of the program. Takes no lock in a domain that
    /// this provider opened. There the program makes no calls, and the lock of the endpoints must
    /// be taken first.
    pub(super) fn lock_for_program(&self) -> DomainGuard<'_> {
        if self.own { DomainGuard { _guard: None } } else { self.lock() }
    }

    /// Returns a random number of the length of the domain's keys.
    pub(super) fn random_key(&self) -> Result<u64> {
        Ok(random_u64("libfabric")? & self.attr.key_mask())
    }

    pub(super) fn name(&self) -> String {
        self.attr.provider_attr.nic.to_string()
    }

    pub(super) fn refuse(
        &self,
        kind: ErrorKind,
        operation: &'static str,
        why: &'static str,
    ) -> Error {
        Error::new(kind, operation).provider(self.name()).remedy(why)
    }

    /// Converts the return value of a libfabric call to a result.
    #[inline]
    pub(super) fn check(&self, operation: &'static str, returned: c_int) -> Result<()> {
        match returned {
            0 => Ok(()),
            returned => Err(self.failed(operation, returned)),
        }
    }

    #[cold]
    fn failed(&self, operation: &'static str, returned: c_int) -> Error {
        errors::call(self.name(), operation, returned)
    }

    /// Calls `fi_control` of an object.
    ///
    /// # Safety
    /// `object` is an open object of the domain, and `argument` is that of `command`.
    pub(super) unsafe fn control(
        &self,
        operation: &'static str,
        object: *mut fid,
        (command, argument): (c_int, *mut c_void),
    ) -> Result<()> {
        let _guard = self.lock();
        // SAFETY: the caller promises an open object, so its table is valid.
        let control = unsafe { (*(*object).ops).control }.ok_or_else(|| self.lacks(operation))?;
        // SAFETY: the caller promises an open object and the argument of the command.
        self.check(operation, unsafe { control(object, command, argument) })
    }

    #[cold]
    pub(super) fn lacks(&self, operation: &'static str) -> Error {
        self.refuse(ErrorKind::Unsupported, operation, "use a provider that has this call")
    }

    /// Closes a registration.
    ///
    /// # Safety
    /// The registration is open. After success nothing uses it.
    #[inline]
    pub(super) unsafe fn close(&self, part: &Part) -> Result<()> {
        let object: *mut fid = part.mr.cast();
        let _guard = self.lock();
        // SAFETY: the caller promises an open registration, so its table is valid.
        let close = unsafe { (*(*object).ops).close }.ok_or_else(|| self.lacks(CLOSE))?;
        // SAFETY: the caller promises an open registration that nothing uses after success.
        let closed = self.check(CLOSE, unsafe { close(object) });
        closed.map_err(|error| error.context("range", part.range))
    }

    /// Makes a registration usable: binds it to its endpoint in ENDPOINT mode, and enables it.
    ///
    /// # Safety
    /// The registration is open, and the endpoint is an open endpoint of the domain.
    #[inline]
    pub(super) unsafe fn start(
        &self,
        part: &Part,
        endpoint: Option<EndpointPointer>,
        enabled: bool,
    ) -> Result<()> {
        if let Some(endpoint) = endpoint {
            const BIND: &str = "fi_mr_bind";
            let object: *mut fid = part.mr.cast();
            let _guard = self.lock();
            // SAFETY: the registration is open, so its table is valid.
            let bind = unsafe { (*(*object).ops).bind }.ok_or_else(|| self.lacks(BIND))?;
            // SAFETY: the caller promises that both objects are open in this domain.
            self.check(BIND, unsafe { bind(object, endpoint.0, 0) })?;
        }
        if !enabled { Ok(()) } else { self.enable(part) }
    }

    pub(super) fn enable(&self, part: &Part) -> Result<()> {
        // SAFETY: the registration is open, and this command has no argument.
        unsafe { self.control("fi_mr_enable", part.mr.cast(), (sys::FI_ENABLE, ptr::null_mut())) }
    }
}

/// Registrations that a call has made so far. Dropping the value closes them.
pub(super) struct Unfinished<'a> {
    pub(super) open: &'a OpenDomain,
    pub(super) parts: Parts,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        close_all(self.open, &mut self.parts, "a part of a refused region stays registered");
    }
}

/// Closes registrations that are in no table of regions. Logs an error with the message `trouble`
/// for each one that stays open.
pub(super) fn close_all(open: &OpenDomain, parts: &mut Parts, trouble: &str) {
    while let Some(part) = parts.pop() {
        // SAFETY: the registration is open, and only `parts` had it.
        if let Err(error) = unsafe { open.close(&part) } {
            tracing::error!(error = %error.full(), "{trouble}");
        }
    }
}

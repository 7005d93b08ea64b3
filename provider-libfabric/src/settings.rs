//! Settings of one request that only libfabric has.

#![allow(unsafe_code, reason = "shares a pointer to an endpoint between threads")]

use std::{any::Any, ffi::c_void};

use super::sys::fid;

/// A pointer to a `fid_ep` that threads may share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EndpointPointer(pub(super) *mut fid);

// SAFETY: libfabric's objects belong to no thread, and the domain's lock serialises the calls.
unsafe impl Send for EndpointPointer {}
// SAFETY: the pointer is only passed to libfabric, in calls that the domain's lock serialises.
unsafe impl Sync for EndpointPointer {}

/// libfabric's settings of one request
/// ([`Request::extension`](hmem_core::Request::extension)).
///
/// ```no_run
/// use std::ffi::c_void;
///
/// use hmem_core::{Access, Domain, Region, Request, Result};
/// use hmem_provider_libfabric::Settings;
///
/// /// Registers a buffer that peers reach through `endpoint`.
/// ///
/// /// # Safety
/// /// `endpoint` is an open `fid_ep` of the domain, and outlives the region.
/// unsafe fn expose(domain: &Domain, endpoint: *mut c_void) -> Result<Region<Vec<u8>>> {
///     // SAFETY: the caller promises an endpoint that outlives the region.
///     let settings = unsafe { Settings::endpoint(endpoint) };
///     let request = Request::new(vec![0_u8; 4096], Access::REMOTE_READ);
///     Ok(domain.submit(request.extension(settings))?)
/// }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    pub(super) endpoint: Option<EndpointPointer>,
}

impl Settings {
    /// Names the endpoint to which the region is bound. This endpoint replaces that of
    /// [`Builder::endpoint`](super::Builder::endpoint), and has an effect only in a domain with the
    /// mode bit `FI_MR_ENDPOINT`.
    ///
    /// # Safety
    /// `endpoint` is null, or an open `fid_ep` of the domain in which the region is registered. It
    /// stays open until the region is closed.
    #[must_use]
    pub unsafe fn endpoint(endpoint: *mut c_void) -> Self {
        let endpoint = (!endpoint.is_null()).then(|| EndpointPointer(endpoint.cast()));
        Self { endpoint }
    }

    /// Returns the settings of a request, or the defaults.
    pub(super) fn of(extension: Option<&(dyn Any + Send + Sync)>) -> Self {
        extension.and_then(|settings| settings.downcast_ref()).copied().unwrap_or_default()
    }
}

//! Finding a provider: `fi_getinfo` and what is asked of it.

use std::ffi::{CStr, CString, c_int};
use std::ptr::{self, NonNull};

use super::Libfabric;
use super::error::{FabricErrno, FabricError};
use super::objects::{Object, nothing_returned};
use super::sys;

/// Requested properties of a provider. The provider chooses those that are zero.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hints {
    /// The provider's name, layered ones with a semicolon.
    pub(crate) provider: &'static str,
    /// `FI_EP_*`.
    pub(crate) endpoint_type: c_int,
    /// Capabilities of the endpoints.
    pub(crate) caps: u64,
    /// Registration modes that this program can live with.
    pub(crate) mr_mode: c_int,
    /// Orders that the initiator insists on.
    pub(crate) message_order: u64,
    /// The local address to be used, where the provider has more than one.
    pub(crate) source: Option<&'static CStr>,
}

/// A list found by `fi_getinfo`. The peers use its first entry, which is libfabric's preference.
#[derive(Debug)]
pub(crate) struct Info {
    libfabric: Libfabric,
    head: NonNull<sys::fi_info>,
}

impl Info {
    /// Queries `fi_getinfo` for providers that satisfy `hints`.
    ///
    /// # Errors
    ///
    /// [`FabricError::ProviderMissing`] if no provider satisfies them, [`FabricError::Call`]
    /// otherwise.
    pub(crate) fn find(libfabric: Libfabric, hints: Hints) -> Result<Self, FabricError> {
        let wanted = Self::hints(libfabric, hints)?;
        let (node, flags) = match hints.source {
            Some(address) => (address.as_ptr(), sys::FI_SOURCE),
            None => (ptr::null(), 0),
        };
        let mut found = ptr::null_mut();
        // SAFETY: `node` is null or nul-terminated, the service is absent, `wanted` is a complete
        // `fi_info` of the library's own making, and `found` is where the list's head is put.
        let returned = unsafe {
            (libfabric.functions.fi_getinfo)(
                sys::API_VERSION,
                node,
                ptr::null(),
                flags,
                wanted.head.as_ptr(),
                &raw mut found,
            )
        };
        let code = FabricErrno(-returned);
        if code == FabricErrno::NODATA {
            return Err(FabricError::ProviderMissing {
                provider: hints.provider,
                code,
                text: libfabric.text(code),
            });
        }
        libfabric.check("fi_getinfo", returned)?;
        Self::owned(libfabric, "fi_getinfo", found)
    }

    /// Writes `hints` into a new `fi_info`, which libfabric allocates. The loaded version's struct
    /// may be longer than [`sys::fi_info`].
    fn hints(libfabric: Libfabric, hints: Hints) -> Result<Self, FabricError> {
        // SAFETY: null asks for an empty `fi_info` with all its attributes allocated.
        let empty = unsafe { (libfabric.functions.fi_dupinfo)(ptr::null()) };
        let wanted = Self::owned(libfabric, "fi_allocinfo", empty)?;
        let name = CString::new(hints.provider).map_err(|_| FabricError::ProviderMissing {
            provider: hints.provider,
            code: FabricErrno::NODATA,
            text: "the name contains a nul byte".to_owned(),
        })?;
        // SAFETY: `head` and the four attributes were allocated together by `fi_dupinfo`, and
        // nothing else refers to them. `prov_name` must be memory that `fi_freeinfo` may free, so
        // the copy below is made by the library.
        unsafe {
            let head = wanted.head.as_ptr();
            (*head).caps = hints.caps;
            (*(*head).ep_attr).r#type = hints.endpoint_type;
            (*(*head).tx_attr).msg_order = hints.message_order;
            (*(*head).domain_attr).mr_mode = hints.mr_mode;
            (*(*head).domain_attr).threading = sys::FI_THREAD_SAFE;
            (*(*head).fabric_attr).prov_name = name.as_ptr().cast_mut();
        }
        // SAFETY: `wanted` is complete, and `name` outlives the call.
        let copy = unsafe { (libfabric.functions.fi_dupinfo)(wanted.head.as_ptr()) };
        // SAFETY: as above. The borrowed name must not be freed with `wanted`.
        unsafe { (*(*wanted.head.as_ptr()).fabric_attr).prov_name = ptr::null_mut() };
        Self::owned(libfabric, "fi_dupinfo", copy)
    }

    fn owned(
        libfabric: Libfabric,
        operation: &'static str,
        head: *mut sys::fi_info,
    ) -> Result<Self, FabricError> {
        NonNull::new(head)
            .map(|head| Self { libfabric, head })
            .ok_or_else(|| nothing_returned(operation))
    }

    /// Returns the entry for the calls that open objects. The pointer is valid as long as `self`.
    pub(crate) fn as_ptr(&self) -> *mut sys::fi_info {
        self.head.as_ptr()
    }

    /// The provider's full name.
    pub(crate) fn provider(&self) -> String {
        // SAFETY: entries that `fi_getinfo` returns have a `fabric_attr`.
        let name = unsafe { (*self.head.as_ref().fabric_attr).prov_name };
        if name.is_null() {
            return String::new();
        }
        // SAFETY: not null, nul-terminated by the library, and alive as long as `self`.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    /// The mr_mode bits that the provider requires.
    pub(crate) fn mr_mode(&self) -> c_int {
        // SAFETY: entries that `fi_getinfo` returns have a `domain_attr`.
        unsafe { (*self.head.as_ref().domain_attr).mr_mode }
    }

    /// Opens the fabric of this entry.
    pub(crate) fn fabric(&self) -> Result<Object<sys::fid_fabric>, FabricError> {
        // SAFETY: `fabric_attr` belongs to this entry, and the call writes the object on success.
        Object::open(self.libfabric, "fi_fabric", |out| unsafe {
            (self.libfabric.functions.fi_fabric)(
                self.head.as_ref().fabric_attr,
                out,
                ptr::null_mut(),
            )
        })
    }
}

impl Drop for Info {
    fn drop(&mut self) {
        // SAFETY: the list was allocated by the library and is freed once, here.
        unsafe { (self.libfabric.functions.fi_freeinfo)(self.head.as_ptr()) };
    }
}

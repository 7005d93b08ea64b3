//! Search for a provider with `fi_getinfo`.

use std::ffi::{CStr, CString, c_int};
use std::ptr::{self, NonNull};

use super::Libfabric;
use super::error::{FabricErrno, FabricError};
use super::objects::{Object, nothing_returned};
use super::sys;

/// Requested properties of a provider. The provider chooses a value for each numeric property that
/// is 0.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hints {
    /// Name of the provider. The name of a layered provider follows that of its core provider after
    /// a semicolon, as in `tcp;ofi_rxm`.
    pub(crate) provider: &'static str,
    /// Type of the endpoints: a libfabric constant `FI_EP_...`.
    pub(crate) endpoint_type: c_int,
    /// Capabilities of the endpoints: a bit set of libfabric constants such as `FI_RMA`.
    pub(crate) caps: u64,
    /// Registration modes that the caller supports: a bit set of `FI_MR_...` constants.
    pub(crate) mr_mode: c_int,
    /// Message orders that the initiator requires: a bit set of `FI_ORDER_...` constants.
    pub(crate) message_order: u64,
    /// Local network address for the provider to use, or `None` for any address.
    pub(crate) source: Option<&'static CStr>,
}

/// A list of providers that `fi_getinfo` returned. Only its first entry is used, which is the one
/// that libfabric prefers.
#[derive(Debug)]
pub(crate) struct Info {
    libfabric: Libfabric,
    head: NonNull<sys::fi_info>,
}

impl Info {
    /// Searches for providers that satisfy `hints`.
    ///
    /// # Errors
    ///
    /// - [`FabricError::ProviderMissing`] if no provider satisfies them.
    /// - [`FabricError::Call`] if `fi_getinfo` fails in another way.
    /// - [`FabricError::NothingReturned`] if libfabric cannot allocate an `fi_info`.
    pub(crate) fn find(libfabric: Libfabric, hints: Hints) -> Result<Self, FabricError> {
        let wanted = Self::hints(libfabric, hints)?;
        let (node, flags) = match hints.source {
            Some(address) => (address.as_ptr(), sys::FI_SOURCE),
            None => (ptr::null(), 0),
        };
        let mut found = ptr::null_mut();
        // SAFETY: `node` is null or nul-terminated, and the service is null. The library allocated
        // `wanted` with all its attributes. `found` is writable for the head of the list.
        let returned = unsafe {
            libfabric.functions.fi_getinfo()(
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

    /// Copies `hints` into a new `fi_info` that libfabric allocates. The library allocates it
    /// because its version of the struct may be longer than [`sys::fi_info`].
    fn hints(libfabric: Libfabric, hints: Hints) -> Result<Self, FabricError> {
        // SAFETY: a null argument makes `fi_dupinfo` allocate an empty `fi_info` with all its
        // attributes.
        let empty = unsafe { libfabric.functions.fi_dupinfo()(ptr::null()) };
        let wanted = Self::owned(libfabric, "fi_allocinfo", empty)?;
        let name = CString::new(hints.provider).map_err(|_| FabricError::ProviderMissing {
            provider: hints.provider,
            code: FabricErrno::NODATA,
            text: "the name contains a nul byte".to_owned(),
        })?;
        // SAFETY: `fi_dupinfo` allocated `head` and the attributes, and nothing else refers to
        // them. `prov_name` borrows `name` until it is reset below.
        unsafe {
            let head = wanted.head.as_ptr();
            (*head).caps = hints.caps;
            (*(*head).ep_attr).r#type = hints.endpoint_type;
            (*(*head).tx_attr).msg_order = hints.message_order;
            (*(*head).domain_attr).mr_mode = hints.mr_mode;
            (*(*head).domain_attr).threading = sys::FI_THREAD_SAFE;
            (*(*head).fabric_attr).prov_name = name.as_ptr().cast_mut();
        }
        // SAFETY: `wanted` is complete, and `name` outlives the call. The library copies the name,
        // so that `fi_freeinfo` may free the copy.
        let copy = unsafe { libfabric.functions.fi_dupinfo()(wanted.head.as_ptr()) };
        // SAFETY: `fi_dupinfo` allocated `head` and `fabric_attr`. The pointer is reset because
        // `fi_freeinfo` must not free the borrowed name.
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

    /// Returns a pointer to the first `fi_info` of the list. The pointer is valid as long as
    /// `self`.
    pub(crate) fn as_ptr(&self) -> *mut sys::fi_info {
        self.head.as_ptr()
    }

    /// Returns the provider's full name, with the providers that are layered over it.
    pub(crate) fn provider(&self) -> String {
        // SAFETY: entries that `fi_getinfo` returns have a `fabric_attr`.
        let name = unsafe { (*self.head.as_ref().fabric_attr).prov_name };
        if name.is_null() {
            return String::new();
        }
        // SAFETY: the name is not null, is nul-terminated by the library, and lives as long as
        // `self`.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    /// Returns the registration modes that the provider requires: a bit set of `FI_MR_...`
    /// constants.
    pub(crate) fn mr_mode(&self) -> c_int {
        // SAFETY: entries that `fi_getinfo` returns have a `domain_attr`.
        unsafe { (*self.head.as_ref().domain_attr).mr_mode }
    }

    /// Opens the fabric of the first entry.
    pub(crate) fn fabric(&self) -> Result<Object<sys::fid_fabric>, FabricError> {
        // SAFETY: `fabric_attr` belongs to the entry, and the call writes `out` if it succeeds.
        Object::open(self.libfabric, "fi_fabric", |out| unsafe {
            self.libfabric.functions.fi_fabric()(
                self.head.as_ref().fabric_attr,
                out,
                ptr::null_mut(),
            )
        })
    }
}

impl Drop for Info {
    fn drop(&mut self) {
        // SAFETY: the library allocated the list, which is freed only here.
        unsafe { self.libfabric.functions.fi_freeinfo()(self.head.as_ptr()) };
    }
}

//! The loaded library, and the names in its structs.

#![allow(unsafe_code, reason = "calls the library, and reads its strings")]

use std::{
    ffi::{CStr, c_char},
    path::Path,
};

use hmem_core::{Error, ErrorKind, Result};

use super::sys::{API_VERSION, Functions, fi_info};

/// Prints an API version as `major.minor`.
pub(super) fn version_text(version: u32) -> String {
    format!("{}.{}", version >> 16, version & 0xffff)
}

/// Provider and domain that an `fi_info` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Names {
    /// The provider, with those that it is layered over, such as `tcp;ofi_rxm`.
    pub(super) provider: String,
    /// The domain, such as `eth0`.
    pub(super) domain: String,
}

/// Returns the names in an `fi_info`, or `None` if it lacks one.
///
/// # Safety
/// `info` is an `fi_info` with the structs and strings that it points to.
pub(super) unsafe fn names(info: &fi_info) -> Option<Names> {
    // SAFETY: the caller promises complete structs.
    let (fabric, domain) = unsafe { (info.fabric_attr.as_ref()?, info.domain_attr.as_ref()?) };
    let text = |name: *const c_char| {
        // SAFETY: the name is not null, and the caller promises a string.
        (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
    };
    Some(Names { provider: text(fabric.prov_name)?, domain: text(domain.name)? })
}

/// Loads the library at `path`, or the one that [`Functions::find`] finds.
///
/// # Errors
/// Unavailable: the library cannot be loaded, lacks a symbol, or is older than 1.17.
///
/// # Safety
/// The file at `path` follows the safety rules of [`Functions::load`].
pub(super) unsafe fn load(path: Option<&Path>) -> Result<Functions> {
    match path {
        // SAFETY: the caller promises that the file is libfabric or a replacement of it.
        Some(path) => unsafe { Functions::load(path) },
        None => Functions::find(),
    }
}

/// Returns the newest API version of the library.
///
/// # Errors
/// Unavailable: the library is older than 1.17.
pub(super) fn check_version(functions: &Functions) -> Result<u32> {
    // SAFETY: the call has no argument and no precondition.
    let version = unsafe { (functions.fi_version)() };
    if version >= API_VERSION {
        return Ok(version);
    }
    let needed = version_text(API_VERSION);
    Err(Error::new(ErrorKind::Unavailable, "load library")
        .provider("libfabric")
        .context("library", functions.library())
        .context("version", version_text(version))
        .context("why", format_args!("it is older than {needed}"))
        .remedy("install libfabric 1.17 or newer, or name one in HMEM_LIBFABRIC_LIBRARY"))
}

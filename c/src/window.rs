//! Memory windows of type 1, which a function call binds. Type 2 windows need posted requests.

#![allow(unsafe_code, reason = "reads and writes through pointers that C code passes")]

use std::ptr;

use hmem::{Access, Error, ErrorKind, Rejected, RemoteKey, Result, Type1Window};

use crate::{
    call::{Call, Handle},
    domain::hmem_domain,
    error::hmem_error,
    region::{hmem_region, set_remote_key},
};

/// A memory window: a second key for a part of a region, with rights of its own. The part and the
/// rights can change without a new registration. Any number of threads may use a window at once.
#[derive(Debug)]
pub struct hmem_window {
    _opaque: (),
}

impl Handle for hmem_window {
    type State = Type1Window;
    const NAME: &'static str = "hmem_window";
}

/// Returns the key of a bound window.
fn key(window: &Type1Window) -> Result<RemoteKey> {
    window.key().ok_or_else(|| {
        Error::new(ErrorKind::KeyNotAvailable, "window key").remedy("call hmem_window_bind first")
    })
}

/// Allocates a memory window, which is not bound yet.
///
/// # Safety
/// `domain` is null, or a domain that is not closed during the call. `window` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_window_alloc(
    domain: *const hmem_domain,
    window: *mut *mut hmem_window,
) -> *mut hmem_error {
    Call::run("hmem_window_alloc", |call| {
        // SAFETY: the caller promises null or a place for the result, and a handle.
        let (window, domain) =
            unsafe { (call.out("window", window, ptr::null_mut())?, call.state(domain)?) };
        Call::set_handle(window, domain.domain.alloc_type_1_window()?);
        Ok(())
    })
}

/// Binds a window to `length` bytes from `offset` of a region that has the right HMEM_MW_BIND. The
/// window gets a new key. Its old key becomes invalid.
///
/// # Safety
/// `window` and `region` are null, or a window and a region that are not closed during the call.
/// The memory stays allocated until the window is unbound or closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_window_bind(
    window: *const hmem_window,
    region: *const hmem_region,
    offset: u64,
    length: u64,
    access: u64,
) -> *mut hmem_error {
    Call::run("hmem_window_bind", |call| {
        // SAFETY: the caller promises null or handles.
        let (window, region) = unsafe { (call.state(window)?, call.state(region)?) };
        // A cached region may have more bytes than the program asked for.
        if region.range().slice(offset, length).is_none() {
            return Err(Error::new(ErrorKind::OutOfBounds, "bind window")
                .context("offset", offset)
                .context("length", length)
                .context("region", region.range())
                .remedy("pass an offset and a length inside the region"));
        }
        let offset = offset + region.offset();
        window.bind(region.region(), offset, length, Access::from_bits_retain(access))?;
        Ok(())
    })
}

/// Unbinds a window. Its key becomes invalid, and the window can be bound again.
///
/// # Safety
/// `window` is null, or a window that is not closed during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_window_unbind(window: *const hmem_window) -> *mut hmem_error {
    Call::run("hmem_window_unbind", |call| {
        // SAFETY: the caller promises null or a handle.
        unsafe { call.state(window) }?.unbind()
    })
}

/// Stores the number of the key of a bound window in `*key`. Stores the address that peers use for
/// the first byte in `*base`. `base` may be null.
///
/// # Safety
/// `window` is null, or a window that is not closed during the call. `key` and `base` are null or
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_window_remote_key(
    window: *const hmem_window,
    number: *mut u64,
    base: *mut u64,
) -> *mut hmem_error {
    Call::run("hmem_window_remote_key", |call| {
        // SAFETY: the caller promises null or a place for the result, and a handle.
        let (number, window) = unsafe { (call.out("key", number, 0)?, call.state(window)?) };
        // SAFETY: the caller promises null or a place for the result.
        unsafe { set_remote_key(&key(window)?, number, base) }
    })
}

/// Copies the key of a bound window to `buffer`. `buffer` and `length` have the rules of
/// `hmem_region_key_bytes`.
///
/// # Safety
/// `window` is null, or a window that is not closed during the call. `length` is null or writable.
/// `buffer` is null, or has `*length` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_window_key_bytes(
    window: *const hmem_window,
    buffer: *mut u8,
    length: *mut usize,
) -> *mut hmem_error {
    Call::run("hmem_window_key_bytes", |call| {
        // SAFETY: the caller promises null or a handle, a number, and a buffer.
        unsafe { call.copy(&key(call.state(window)?)?.to_bytes(), buffer, length) }
    })
}

/// Unbinds and frees a window. Does nothing for null. After an error the window stays open.
///
/// # Safety
/// `window` is null, or a window that no other call uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_window_close(window: *mut hmem_window) -> *mut hmem_error {
    Call::run("hmem_window_close", |call| {
        // SAFETY: the caller promises null or a handle that no other call uses.
        unsafe {
            call.close(window, |window| {
                window.close().map_err(|Rejected { value, error }| (value, error))
            })
        }
    })
}

//! Error objects.

#![allow(unsafe_code, reason = "reads objects that C code passes")]

use std::{
    ffi::{CString, c_char, c_int},
    ptr,
};

use hmem::{Error, ErrorKind};
use serde_json::json;

/// The reason why a call failed. Free it with `hmem_error_free`.
#[derive(Debug)]
pub struct hmem_error {
    kind: hmem_kind,
    errno: c_int,
    message: CString,
    remedy: Option<CString>,
    json: CString,
}

/// The kind of an error. The numbers never change. Later versions may add kinds.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum hmem_kind {
    /// No error.
    None = 0,
    /// A Rust panic inside the library, which is a defect of the library. The objects of the call
    /// may be unusable.
    Panic = 1,
    /// A kind that this version of the header does not know.
    Other = 2,
    /// An argument is wrong, and no other kind describes the mistake.
    InvalidArgument = 3,
    /// A range has no bytes.
    ZeroLength = 4,
    /// Start plus length passes the end of the address space.
    AddressWraps = 5,
    /// The reserved attribute `offset` is set.
    ReservedOffset = 6,
    /// The reserved attribute `hmem_data` is set.
    ReservedHmemData = 7,
    /// An unknown or disallowed access right.
    BadAccess = 8,
    /// An unknown or unsupported flag.
    BadFlags = 9,
    /// More ranges than the NIC can register as one region.
    TooManyRanges = 10,
    /// More bytes than the NIC can register as one region.
    TooLong = 11,
    /// A page size that the operating system does not have.
    BadPageSize = 12,
    /// A range that reaches outside its region or allocation.
    OutOfBounds = 13,
    /// mr_mode bits that the NIC needs and this interface does not offer.
    ModeMismatch = 14,
    /// Addresses that cannot be reached: unmapped or protected.
    BadAddress = 15,
    /// A right that the key or region does not grant.
    AccessDenied = 16,
    /// The requested key is in use.
    NoKey = 17,
    /// The NIC cannot use the requested key.
    KeyRejected = 18,
    /// The region has no key of the requested sort.
    KeyNotAvailable = 19,
    /// A key that belongs to no region.
    InvalidKey = 20,
    /// A local segment without a valid descriptor.
    NoRegion = 21,
    /// Bytes that are truncated, altered or of an unknown version.
    Malformed = 22,
    /// A buffer is too small.
    TooSmall = 23,
    /// The object is still in use.
    Busy = 24,
    /// The object is in a state that does not allow the call.
    BadState = 25,
    /// The operation was cancelled.
    Canceled = 26,
    /// The operation cannot run now, but may succeed later.
    Again = 27,
    /// A received message was longer than the buffer.
    Truncated = 28,
    /// A message is longer than the NIC's limit.
    MessageTooLong = 29,
    /// Memory, lockable memory or another limited resource is used up.
    OutOfResources = 30,
    /// The driver, the device or this build does not support the operation.
    Unsupported = 31,
    /// The provider does not implement the operation.
    NoSys = 32,
    /// A library, driver or device is missing.
    Unavailable = 33,
    /// The process lacks a privilege.
    PermissionDenied = 34,
    /// The peer does not answer, or the NIC cannot reach the device.
    Unreachable = 35,
    /// A call of a driver or of the operating system failed.
    Driver = 36,
}

impl From<ErrorKind> for hmem_kind {
    fn from(kind: ErrorKind) -> Self {
        macro_rules! same_names {
            ($($name:ident)+) => {
                match kind {
                    $(ErrorKind::$name => Self::$name,)+
                    _ => Self::Other,
                }
            };
        }
        same_names! {
            InvalidArgument ZeroLength AddressWraps ReservedOffset ReservedHmemData BadAccess
            BadFlags TooManyRanges TooLong BadPageSize OutOfBounds ModeMismatch BadAddress
            AccessDenied NoKey KeyRejected KeyNotAvailable InvalidKey NoRegion Malformed TooSmall
            Busy BadState Canceled Again Truncated MessageTooLong OutOfResources Unsupported NoSys
            Unavailable PermissionDenied Unreachable Driver
        }
    }
}

/// Returns a string for C. Bytes that are 0, which would end the string, are left out.
pub(crate) fn c_string(text: impl Into<String>) -> CString {
    let mut text = text.into();
    text.retain(|letter| letter != '\0');
    CString::new(text).expect("the zeros were removed")
}

impl From<Error> for hmem_error {
    fn from(error: Error) -> Self {
        let json = serde_json::to_string(&error.summary()).expect("plain values serialise");
        Self {
            kind: error.kind().into(),
            errno: error.fi_errno(),
            message: c_string(error.reason().to_string()),
            remedy: error.remedy_text().map(c_string),
            json: c_string(json),
        }
    }
}

impl hmem_error {
    /// Returns the error for a panic of the function `call`.
    pub(crate) fn panicked(call: &str, message: &str) -> Self {
        let text = format!("{call}: the library panicked: {message}");
        let remedy = "report this defect of hmem with the message";
        let json = json!({ "kind": "panic", "operation": call, "message": text, "remedy": remedy });
        Self {
            kind: hmem_kind::Panic,
            errno: ErrorKind::Driver.fi_errno(),
            message: c_string(text),
            remedy: Some(c_string(remedy)),
            json: c_string(json.to_string()),
        }
    }
}

/// Returns the kind of an error, or HMEM_KIND_NONE for null.
///
/// # Safety
/// `error` is null or an error of this library that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_error_kind(error: *const hmem_error) -> hmem_kind {
    // SAFETY: the caller promises null or a live error.
    unsafe { error.as_ref() }.map_or(hmem_kind::None, |error| error.kind)
}

/// Returns libfabric's errno for the kind as a positive number (EINVAL for an invalid argument,
/// say), or 0 for null.
///
/// # Safety
/// `error` is null or an error of this library that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_error_errno(error: *const hmem_error) -> c_int {
    // SAFETY: the caller promises null or a live error.
    unsafe { error.as_ref() }.map_or(0, |error| error.errno)
}

/// Returns the failed operation and the reason on one line, or null for null. The text lives as
/// long as the error.
///
/// # Safety
/// `error` is null or an error of this library that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_error_message(error: *const hmem_error) -> *const c_char {
    // SAFETY: the caller promises null or a live error.
    unsafe { error.as_ref() }.map_or(ptr::null(), |error| error.message.as_ptr())
}

/// Returns the step that solves the problem, or null if none is known. The text lives as long as
/// the error.
///
/// # Safety
/// `error` is null or an error of this library that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_error_remedy(error: *const hmem_error) -> *const c_char {
    // SAFETY: the caller promises null or a live error.
    let remedy = unsafe { error.as_ref() }.and_then(|error| error.remedy.as_ref());
    remedy.map_or(ptr::null(), |remedy| remedy.as_ptr())
}

/// Returns all facts of an error as a JSON object, or null for null. If a registration failed, the
/// member `attempts` is the decision: each path that was tried, its error, cause and remedy. The
/// text lives as long as the error.
///
/// # Safety
/// `error` is null or an error of this library that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_error_json(error: *const hmem_error) -> *const c_char {
    // SAFETY: the caller promises null or a live error.
    unsafe { error.as_ref() }.map_or(ptr::null(), |error| error.json.as_ptr())
}

/// Frees an error. Does nothing for null.
///
/// # Safety
/// `error` is null or an error of this library that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_error_free(error: *mut hmem_error) {
    if !error.is_null() {
        // SAFETY: the caller promises a live error, which `Call::run` allocated.
        drop(unsafe { Box::from_raw(error) });
    }
}

/// Frees a string that a function of this library returned through a `char **`. Does nothing for
/// null.
///
/// # Safety
/// `text` is null or such a string, and was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_string_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: the caller promises a string that `Call::set_text` allocated.
        drop(unsafe { CString::from_raw(text) });
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Requirement DOOR-03: no kind of the Rust library is reported as an unknown kind.
    #[test]
    fn each_kind_has_a_number_of_its_own() {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../core/src/error.rs");
        let source = fs::read_to_string(source).expect("core's error.rs");
        let kinds = source.split_once("kinds! {").expect("the list of kinds").1;
        let kinds = kinds.split_once("\n}").expect("the end of the list").0;
        let names = kinds.lines().filter_map(|line| line.trim().split_once(" = ("));
        let mut numbers = Vec::new();
        for (name, _) in names {
            let kebab: String = name.chars().fold(String::new(), |kebab, letter| {
                let dash = if letter.is_uppercase() && !kebab.is_empty() { "-" } else { "" };
                kebab + dash + &letter.to_lowercase().to_string()
            });
            let kind: ErrorKind = serde_json::from_value(json!(kebab)).expect(name);
            assert_ne!(hmem_kind::from(kind), hmem_kind::Other, "{name} has no number");
            numbers.push(hmem_kind::from(kind) as u32);
        }
        let count = numbers.len();
        numbers.sort_unstable();
        numbers.dedup();
        assert!(count >= 34 && numbers.len() == count, "{numbers:?}");
    }
}

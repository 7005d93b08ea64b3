//! The boundary to C: arguments are checked, errors become objects, and panics end here.

#![allow(unsafe_code, reason = "reads and writes through pointers that C code passes")]

use std::{
    any::Any,
    ffi::{CStr, c_char},
    mem::MaybeUninit,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr, slice,
    sync::atomic::{AtomicU64, Ordering},
};

use hmem::{Error, ErrorKind, Result};

use crate::error::{c_string, hmem_error};

/// A running call of C code, with the name of the called function for error messages.
#[derive(Clone, Copy)]
pub(crate) struct Call(&'static str);

/// An opaque C type. A pointer of this type, which C code holds, is the address of an [`Object`].
pub(crate) trait Handle {
    /// The Rust value in the [`Object`]. Any thread may use and close the handle.
    type State: Send + Sync;
    /// The name of the C type.
    const NAME: &'static str;
}

/// The allocation that a handle points to.
#[repr(C)]
struct Object<T> {
    /// The number of the handle's type ([`tag_of`]), or [`CLOSED`]. Every call compares this number
    /// with its own type first, so that it refuses a wrong pointer.
    tag: AtomicU64,
    state: T,
}

/// The tag of an object whose handle is being closed.
const CLOSED: u64 = 0xdead_c105_ed00_0000;

/// Returns the number that identifies a handle's type: the FNV-1a hash of the type's name.
const fn tag_of<H: Handle>() -> u64 {
    let (name, mut hash, mut at) = (H::NAME.as_bytes(), 0xcbf2_9ce4_8422_2325_u64, 0);
    while at < name.len() {
        hash = (hash ^ name[at] as u64).wrapping_mul(0x0000_0100_0000_01b3);
        at += 1;
    }
    hash
}

/// A C structure that may grow in later versions. The first field is the size of the structure in
/// bytes. In every other field, zero means the default.
///
/// # Safety
/// The type is `repr(C)` and has no padding. Its first field is a `usize`. All bit patterns of the
/// other fields are valid.
pub(crate) unsafe trait Growing: Copy {}

/// The largest size that a caller may state for a [`Growing`] structure. A larger size shows that
/// the structure was not initialised.
const LARGEST: usize = 4096;

impl Call {
    /// Runs `body` for the C function `name`. Returns null, or the error of `body`. A panic becomes
    /// an error, including a panic while the error is converted.
    pub(crate) fn run(
        name: &'static str,
        body: impl FnOnce(Self) -> Result<()>,
    ) -> *mut hmem_error {
        let work = || body(Self(name)).map_err(hmem_error::from);
        let error = match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(())) => return ptr::null_mut(),
            Ok(Err(error)) => error,
            Err(panic) => hmem_error::panicked(name, &message_of(panic)),
        };
        Box::into_raw(Box::new(error))
    }

    /// Returns the error for a wrong argument.
    pub(crate) fn invalid(self, argument: &'static str, remedy: impl Into<String>) -> Error {
        Error::new(ErrorKind::InvalidArgument, self.0)
            .context("argument", argument)
            .remedy(remedy.into())
    }

    /// Returns the state of a handle.
    ///
    /// # Errors
    /// InvalidArgument for null, for a handle of another type, and for a closed handle whose memory
    /// was not reused yet.
    ///
    /// # Safety
    /// `handle` is null or a handle of this library that no thread closes during `'a`.
    pub(crate) unsafe fn state<'a, H: Handle>(self, handle: *const H) -> Result<&'a H::State> {
        // SAFETY: the caller promises null or a handle.
        let object = unsafe { self.object(handle.cast_mut()) }?;
        // SAFETY: the tag says that the object has this type, and nobody closes it during `'a`.
        Ok(unsafe { &(*object).state })
    }

    /// Returns the object of a handle after a check of its tag.
    ///
    /// # Errors
    /// InvalidArgument for null, and for a handle whose tag is not that of `H`.
    ///
    /// # Safety
    /// `handle` is null or a handle of this library that is not closed during the call.
    unsafe fn object<H: Handle>(self, handle: *mut H) -> Result<*mut Object<H::State>> {
        let object = handle.cast::<Object<H::State>>();
        if object.is_null() {
            return Err(self.invalid(H::NAME, format!("pass a {}: the pointer is null", H::NAME)));
        }
        let tag = object.cast::<AtomicU64>();
        // SAFETY: each object begins with a tag. The alignment is checked first.
        if !tag.is_aligned() || unsafe { (*tag).load(Ordering::Acquire) } != tag_of::<H>() {
            let remedy = format!("pass an open {}: this is another object, or closed", H::NAME);
            return Err(self.invalid(H::NAME, remedy));
        }
        Ok(object)
    }

    /// Closes a handle, and frees it if `close` succeeds. Does nothing for null.
    ///
    /// # Errors
    /// The errors of [`Call::state`], and the error of `close`. After an error the handle stays
    /// open.
    ///
    /// # Safety
    /// `handle` is null or a handle of this library that no other call uses.
    pub(crate) unsafe fn close<H: Handle>(
        self,
        handle: *mut H,
        close: impl FnOnce(H::State) -> Result<(), (H::State, Error)>,
    ) -> Result<()> {
        if handle.is_null() {
            return Ok(());
        }
        // SAFETY: the caller promises a handle.
        let object = unsafe { self.object(handle) }?;
        // SAFETY: the object is live, and no other call uses it. The mark `CLOSED` stays if `close`
        // panics, so nobody uses the state that was moved out.
        unsafe {
            (*object).tag.store(CLOSED, Ordering::Release);
            match close(ptr::read(&raw const (*object).state)) {
                Ok(()) => drop(Box::from_raw(object.cast::<MaybeUninit<Object<H::State>>>())),
                Err((state, error)) => {
                    ptr::write(&raw mut (*object).state, state);
                    (*object).tag.store(tag_of::<H>(), Ordering::Release);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Creates a handle and stores it in `out`.
    pub(crate) fn set_handle<H: Handle>(out: &mut *mut H, state: H::State) {
        let object = Object { tag: AtomicU64::new(tag_of::<H>()), state };
        *out = Box::into_raw(Box::new(object)).cast();
    }

    /// Stores a string in `out`. C code frees the string with `hmem_string_free`.
    pub(crate) fn set_text(out: &mut *mut c_char, text: impl Into<String>) {
        *out = c_string(text).into_raw();
    }

    /// Checks the address for a result, and stores `nothing` there.
    ///
    /// # Errors
    /// InvalidArgument for null.
    ///
    /// # Safety
    /// `out` is null, or valid for a write of `T` by this call alone during `'a`.
    pub(crate) unsafe fn out<'a, T>(
        self,
        name: &'static str,
        out: *mut T,
        nothing: T,
    ) -> Result<&'a mut T> {
        if out.is_null() {
            return Err(self.invalid(name, "pass the address of a variable for the result"));
        }
        // SAFETY: the caller promises a place for a `T`.
        unsafe {
            out.write(nothing);
            Ok(&mut *out)
        }
    }

    /// Returns the text of an argument, or `None` for null.
    ///
    /// # Errors
    /// InvalidArgument for a text that is not UTF-8.
    ///
    /// # Safety
    /// `text` is null, or a string that ends with a zero and does not change during `'a`.
    pub(crate) unsafe fn text<'a>(
        self,
        name: &'static str,
        text: *const c_char,
    ) -> Result<Option<&'a str>> {
        if text.is_null() {
            return Ok(None);
        }
        // SAFETY: the caller promises a string.
        let text = unsafe { CStr::from_ptr(text) }.to_str();
        text.map(Some).map_err(|error| self.invalid(name, "pass UTF-8").caused_by(error))
    }

    /// Returns a copy of a structure that C code passes. Fields that the header of the C code lacks
    /// are zero. For null, all fields are zero.
    ///
    /// # Errors
    /// - InvalidArgument if the field `size` is less than `sizeof(size_t)` or more than 4096.
    /// - Unsupported if C code has set a field that this version does not know.
    ///
    /// # Safety
    /// `given` is null, or a structure of as many readable bytes as its field `size` says.
    pub(crate) unsafe fn attr<T: Growing>(self, name: &'static str, given: *const T) -> Result<T> {
        let mut attr = MaybeUninit::<T>::zeroed();
        if !given.is_null() {
            // SAFETY: the caller promises a structure, which begins with its size.
            let size = unsafe { self.size_of(name, given) }?;
            // SAFETY: the caller promises `size` readable bytes.
            let bytes = unsafe { slice::from_raw_parts(given.cast::<u8>(), size) };
            let known = size.min(size_of::<T>());
            if bytes[known..].iter().any(|byte| *byte != 0) {
                return Err(Error::new(ErrorKind::Unsupported, self.0)
                    .context("argument", name)
                    .context("size", size)
                    .context("known", size_of::<T>())
                    .remedy(
                        "install the version of hmem whose header the program was built with",
                    ));
            }
            // SAFETY: both hold at least `known` bytes, and do not overlap.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), attr.as_mut_ptr().cast(), known) };
        }
        // SAFETY: all bytes are set, and all bit patterns of the fields are valid.
        Ok(unsafe { attr.assume_init() })
    }

    /// Copies the fields of `value` that the caller's header has to `out`. Its other bytes become
    /// zero.
    ///
    /// # Errors
    /// InvalidArgument for null, and for a field `size` that is less than `sizeof(size_t)` or more
    /// than 4096.
    ///
    /// # Safety
    /// `out` is null, or a structure of as many writable bytes as its field `size` says.
    pub(crate) unsafe fn fill<T: Growing>(
        self,
        name: &'static str,
        out: *mut T,
        value: T,
    ) -> Result<()> {
        if out.is_null() {
            return Err(self.invalid(name, "pass the address of a structure for the result"));
        }
        // SAFETY: the caller promises a structure, which begins with its size.
        let size = unsafe { self.size_of(name, out) }?;
        let (header, known) = (size_of::<usize>(), size.min(size_of::<T>()));
        // SAFETY: the caller promises `size` writable bytes. The field `size` stays.
        unsafe {
            let (from, to) = ((&raw const value).cast::<u8>(), out.cast::<u8>());
            ptr::copy_nonoverlapping(from.add(header), to.add(header), known - header);
            ptr::write_bytes(to.add(known), 0, size - known);
        }
        Ok(())
    }

    /// Returns the field `size` of a structure.
    ///
    /// # Safety
    /// `given` is a structure with a readable field `size`.
    unsafe fn size_of<T: Growing>(self, name: &'static str, given: *const T) -> Result<usize> {
        // SAFETY: the caller promises the field, which is the first.
        let size = unsafe { given.cast::<usize>().read_unaligned() };
        if (size_of::<usize>()..=LARGEST).contains(&size) {
            return Ok(size);
        }
        let remedy = "clear the structure and set its field `size` to the structure's sizeof";
        Err(self.invalid(name, remedy).context("size", size))
    }

    /// Copies bytes to a buffer of `*len` bytes. Stores the number of bytes in `*len`.
    ///
    /// # Errors
    /// - InvalidArgument if `len` is null.
    /// - TooSmall if the buffer is null or too small. `*len` is then the necessary size.
    ///
    /// # Safety
    /// `len` is null, or the address of a number. `buffer` is null, or has `*len` writable bytes.
    pub(crate) unsafe fn copy(self, bytes: &[u8], buffer: *mut u8, len: *mut usize) -> Result<()> {
        if len.is_null() {
            return Err(self.invalid("length", "pass the address of the buffer's size"));
        }
        // SAFETY: the caller promises a number.
        let given = unsafe { ptr::replace(len, bytes.len()) };
        if buffer.is_null() || given < bytes.len() {
            let given = if buffer.is_null() { 0 } else { given };
            return Err(Error::new(ErrorKind::TooSmall, self.0)
                .context("given", given)
                .context("needed", bytes.len())
                .remedy("pass a buffer of the needed size"));
        }
        // SAFETY: the caller promises a buffer of `given` bytes, which are enough.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), buffer, bytes.len()) };
        Ok(())
    }
}

/// Returns the message of a panic. A payload of another type than text is leaked, because its drop
/// could panic again.
fn message_of(panic: Box<dyn Any + Send>) -> String {
    let panic = match panic.downcast::<String>() {
        Ok(text) => return *text,
        Err(panic) => panic,
    };
    match panic.downcast::<&'static str>() {
        Ok(text) => (*text).to_owned(),
        Err(panic) => {
            std::mem::forget(panic);
            "(no message)".to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{hmem_error_free, hmem_error_json, hmem_error_kind, hmem_kind};

    /// Requirement DOOR-03: a panic does not leave the function.
    #[test]
    fn a_panic_becomes_an_error() {
        let error = Call::run("hmem_test", |_| panic!("no such {}", "thing"));
        // SAFETY: the error is live until it is freed.
        unsafe {
            assert_eq!(hmem_error_kind(error), hmem_kind::Panic);
            let json = CStr::from_ptr(hmem_error_json(error)).to_str().expect("UTF-8");
            assert!(json.contains("hmem_test: the library panicked: no such thing"), "{json}");
            hmem_error_free(error);
        }
    }

    /// A payload whose drop panics must not bring a second panic.
    #[test]
    fn a_panic_whose_payload_panics_becomes_an_error() {
        struct Payload;
        impl Drop for Payload {
            fn drop(&mut self) {
                panic!("again");
            }
        }
        let error = Call::run("hmem_test", |_| std::panic::panic_any(Payload));
        // SAFETY: the error is live until it is freed.
        unsafe {
            assert_eq!(hmem_error_kind(error), hmem_kind::Panic);
            hmem_error_free(error);
        }
    }
}

//! The function with which a program learns that the library no longer uses an object of the
//! program.

#![allow(unsafe_code, reason = "calls a function of the program")]

use std::{
    ffi::c_void,
    sync::atomic::{AtomicBool, Ordering},
};

/// A function of the program that the library calls once, when the library no longer uses an object
/// of the program. The argument is the `context` that the program gave. Any thread may call the
/// function. The function must not throw, and must not call this library. Null means no function.
pub type hmem_release = Option<unsafe extern "C" fn(context: *mut c_void)>;

/// Calls the program's [`hmem_release`] on drop, if [`Owner::accept`] was called.
#[derive(Debug)]
pub(crate) struct Owner {
    release: hmem_release,
    context: *mut c_void,
    accepted: AtomicBool,
}

// SAFETY: the program promises that any thread may call its function with the context.
unsafe impl Send for Owner {}
// SAFETY: the program promises that any thread may call its function with the context.
unsafe impl Sync for Owner {}

impl Owner {
    /// Creates an owner that does not call the function before [`Owner::accept`].
    ///
    /// # Safety
    /// Any thread may call `release` with `context` once.
    pub(crate) unsafe fn new(release: hmem_release, context: *mut c_void) -> Self {
        Self { release, context, accepted: AtomicBool::new(false) }
    }

    /// Returns true if the program gave a release function.
    pub(crate) fn has_release(&self) -> bool {
        self.release.is_some()
    }

    /// Records that the C call that passed the function succeeded, so that the drop calls the
    /// function.
    pub(crate) fn accept(&self) {
        self.accepted.store(true, Ordering::Relaxed);
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Some(release) = self.release
            && self.accepted.load(Ordering::Relaxed)
        {
            // SAFETY: the creator of the owner promised that the call is allowed once.
            unsafe { release(self.context) };
        }
    }
}

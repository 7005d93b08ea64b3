//! Protection of the hooks against thread cancellation.
//!
//! The hooked functions are no cancellation points (`pthreads(7)`). If a hook called one while a
//! request to cancel its thread is pending, the thread would end inside the hook. The process would
//! abort, or the change would have no end.

#![allow(unsafe_code, reason = "changes the cancelability of the calling thread")]

use std::{ffi::c_int, ptr};

/// The constant of glibc's `pthread.h`.
const PTHREAD_CANCEL_DISABLE: c_int = 1;

// SAFETY: the type is that of glibc's function.
unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// Runs `call`, in which functions such as `close` and `nanosleep` are no cancellation points.
pub(super) fn without_cancellation<T>(call: impl FnOnce() -> T) -> T {
    let mut before = 0;
    // SAFETY: the call changes the state of this thread only, and writes one `c_int`.
    unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut before) };
    let result = call();
    // SAFETY: the state is the earlier one. glibc's function may get a null pointer.
    unsafe { pthread_setcancelstate(before, ptr::null_mut()) };
    result
}

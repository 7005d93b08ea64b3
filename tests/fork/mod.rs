//! Forks the test process.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `child` in a forked child. Panics if the closure returns false, panics there, or does not
/// return within a minute.
pub(crate) fn in_a_child(child: impl FnOnce() -> bool) {
    // SAFETY: the child only runs the closure, and leaves by `_exit`.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork");
    if pid == 0 {
        // SAFETY: the call has no precondition. The signal ends a child that hangs.
        unsafe { libc::alarm(60) };
        let passed = catch_unwind(AssertUnwindSafe(child)).unwrap_or(false);
        // SAFETY: `_exit` has no precondition. It ends the child.
        unsafe { libc::_exit(i32::from(!passed)) };
    }
    let mut status = 0;
    // SAFETY: this test forked the child, and `status` is writable.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert_eq!(status, 0, "the child failed");
}

/// Drops a copy of the parent's object in a child, which exits without using the object again.
pub(crate) fn drop_in_the_child<T>(object: &T) {
    // SAFETY: the original is the parent's. The child neither uses nor drops it.
    drop(unsafe { std::ptr::read(object) });
}

//! A program with jemalloc under memhooks: MON-03.
#![allow(missing_docs)]

#[path = "../../iface-system/tests/monitors/mod.rs"]
mod monitors;
mod programs;

use std::{
    ffi::{c_char, c_int, c_void},
    ptr,
};

use programs::{large_frees_are_reported, under_memhooks, under_memhooks_and_userfaultfd};

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

unsafe extern "C" {
    /// jemalloc's `mallctl`: reads or sets an option, or runs a command. See jemalloc(3).
    fn _rjem_mallctl(
        name: *const c_char,
        old: *mut c_void,
        old_len: *mut usize,
        new: *mut c_void,
        new_len: usize,
    ) -> c_int;
}

fn collect() {
    // 4096 is MALLCTL_ARENAS_ALL, which stands for all arenas.
    let (name, none) = (c"arena.4096.purge", ptr::null_mut());
    // SAFETY: this command only returns unused memory of the arenas, and is allowed at any time.
    assert_eq!(unsafe { _rjem_mallctl(name.as_ptr(), none, ptr::null_mut(), none, 0) }, 0);
}

fn jemalloc_does_not_deadlock() {
    under_memhooks(collect);
}

fn jemalloc_does_not_deadlock_with_userfaultfd() {
    under_memhooks_and_userfaultfd(collect);
}

fn large_frees_by_jemalloc_are_reported() {
    large_frees_are_reported(collect);
}

cases! {
    /// MON-03
    jemalloc_does_not_deadlock,
    /// MON-03
    jemalloc_does_not_deadlock_with_userfaultfd,
    /// MON-03
    large_frees_by_jemalloc_are_reported;
    slow:
}

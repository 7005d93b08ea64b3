//! A program with mimalloc under memhooks: MON-03.
#![allow(missing_docs)]

#[path = "../../iface-system/tests/monitors/mod.rs"]
mod monitors;
mod programs;

use programs::{large_frees_are_reported, under_memhooks, under_memhooks_and_userfaultfd};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

unsafe extern "C" {
    /// mimalloc's function that returns unused memory to the system. See `mimalloc.h`.
    fn mi_collect(force: bool);
}

fn collect() {
    // SAFETY: the function only returns unused memory, and is allowed at any time.
    unsafe { mi_collect(true) };
}

fn mimalloc_does_not_deadlock() {
    under_memhooks(collect);
}

fn mimalloc_does_not_deadlock_with_userfaultfd() {
    under_memhooks_and_userfaultfd(collect);
}

fn large_frees_by_mimalloc_are_reported() {
    large_frees_are_reported(collect);
}

cases! {
    /// MON-03
    mimalloc_does_not_deadlock,
    /// MON-03
    mimalloc_does_not_deadlock_with_userfaultfd,
    /// MON-03
    large_frees_by_mimalloc_are_reported;
    slow:
}

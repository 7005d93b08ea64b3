//! A program with mimalloc under memhooks: MON-03.
#![allow(missing_docs)]

#[path = "../../iface-system/tests/monitors/mod.rs"]
mod monitors;
mod programs;

use programs::{large_blocks_are_told, under_memhooks, under_memhooks_and_userfaultfd};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

unsafe extern "C" {
    /// mimalloc.h
    fn mi_collect(force: bool);
}

fn collect() {
    // SAFETY: gives unused memory back, at any time.
    unsafe { mi_collect(true) };
}

fn mimalloc_does_not_deadlock() {
    under_memhooks(collect);
}

fn mimalloc_does_not_deadlock_with_a_net() {
    under_memhooks_and_userfaultfd(collect);
}

fn mimallocs_own_calls_are_seen() {
    large_blocks_are_told(collect);
}

cases! {
    /// MON-03
    mimalloc_does_not_deadlock,
    /// MON-03
    mimalloc_does_not_deadlock_with_a_net,
    /// MON-03
    mimallocs_own_calls_are_seen;
    slow:
}

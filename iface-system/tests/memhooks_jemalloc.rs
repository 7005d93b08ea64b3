//! A program with jemalloc under memhooks: MON-03.
#![allow(missing_docs)]

mod allocators;
#[path = "monitors/mod.rs"]
mod monitors;

use allocators::{large_blocks_are_told, under_memhooks, under_memhooks_and_userfaultfd};

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// jemalloc gives large blocks back by itself.
fn collect() {}

fn mon_03_jemalloc_does_not_deadlock() {
    under_memhooks(collect);
}

fn mon_03_jemalloc_does_not_deadlock_with_a_net() {
    under_memhooks_and_userfaultfd(collect);
}

fn mon_03_jemallocs_own_calls_are_seen() {
    large_blocks_are_told(collect);
}

cases! {
    mon_03_jemalloc_does_not_deadlock,
    mon_03_jemalloc_does_not_deadlock_with_a_net,
    mon_03_jemallocs_own_calls_are_seen;
    slow:
}

//! A global allocator that counts the allocations and frees of each thread.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

struct Counting;

thread_local! {
    static CALLS: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

/// Returns the number of allocations and of frees of the calling thread so far.
pub(crate) fn calls() -> (u64, u64) {
    CALLS.with(Cell::get)
}

// SAFETY: each call is forwarded to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.with(|calls| calls.update(|(allocated, freed)| (allocated + 1, freed)));
        // SAFETY: the caller upholds the contract of this method, which is that of the forwarded
        // call.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        CALLS.with(|calls| calls.update(|(allocated, freed)| (allocated, freed + 1)));
        // SAFETY: the caller upholds the contract of this method, which is that of the forwarded
        // call.
        unsafe { System.dealloc(at, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

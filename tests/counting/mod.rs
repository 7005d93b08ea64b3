//! An allocator that counts the calls of each thread.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

struct Counting;

thread_local! {
    static CALLS: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

/// Allocations and frees of the calling thread so far.
pub(crate) fn calls() -> (u64, u64) {
    CALLS.with(Cell::get)
}

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.with(|calls| calls.update(|(allocated, freed)| (allocated + 1, freed)));
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        CALLS.with(|calls| calls.update(|(allocated, freed)| (allocated, freed + 1)));
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { System.dealloc(at, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

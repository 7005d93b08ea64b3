//! A lock-free queue of ranges, from the monitor's thread to threads that may take locks.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A queue of at most `N` ranges (start and length) with one writer, which never waits.
///
/// All zeroes mean an empty queue. Readers must hold a common lock.
#[repr(C)]
pub(super) struct Ring<const N: usize> {
    ranges: [[AtomicU64; 2]; N],
    pushed: AtomicU32,
    taken: AtomicU32,
}

impl<const N: usize> Ring<N> {
    /// Appends a range. Returns false, and appends nothing, if the queue is full.
    pub(super) fn push(&self, start: u64, len: u64) -> bool {
        let pushed = self.pushed.load(Ordering::Relaxed);
        if pushed.wrapping_sub(self.taken.load(Ordering::Acquire)) >= N as u32 {
            return false;
        }
        let [at, bytes] = &self.ranges[pushed as usize % N];
        at.store(start, Ordering::Relaxed);
        bytes.store(len, Ordering::Relaxed);
        self.pushed.store(pushed.wrapping_add(1), Ordering::Release);
        true
    }

    /// Removes the oldest range. Callers hold a lock.
    pub(super) fn take(&self) -> Option<(u64, u64)> {
        let taken = self.taken.load(Ordering::Relaxed);
        if self.is_empty() {
            return None;
        }
        let [at, bytes] = &self.ranges[taken as usize % N];
        let range = (at.load(Ordering::Relaxed), bytes.load(Ordering::Relaxed));
        self.taken.store(taken.wrapping_add(1), Ordering::Release);
        Some(range)
    }

    /// Returns true if the queue is empty. The caller then sees everything that a reader wrote
    /// before it removed the last range.
    pub(super) fn is_empty(&self) -> bool {
        self.taken.load(Ordering::Acquire) == self.pushed.load(Ordering::Acquire)
    }
}

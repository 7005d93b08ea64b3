//! A lock-free queue of ranges. The monitor's thread that reads events appends ranges, and the
//! threads that subscribe or unsubscribe remove them.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A ring buffer of at most `N` ranges (start and length), with one writer that never waits.
///
/// All zeroes are an empty queue. Threads that remove ranges must hold a common lock.
#[repr(C)]
pub(super) struct RangeQueue<const N: usize> {
    ranges: [[AtomicU64; 2]; N],
    /// Number of ranges that were appended so far, modulo 2^32.
    pushed: AtomicU32,
    /// Number of ranges that were removed so far, modulo 2^32.
    taken: AtomicU32,
}

impl<const N: usize> RangeQueue<N> {
    /// Appends a range. Returns false without appending if the queue is full. Only one thread may
    /// call this.
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

    /// Removes the oldest range and returns its start and length in bytes. Returns `None` if the
    /// queue is empty. All callers must hold the same lock.
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

    /// Returns true if the queue is empty. The caller then also sees all memory writes that a
    /// thread made before it removed the last range.
    pub(super) fn is_empty(&self) -> bool {
        self.taken.load(Ordering::Acquire) == self.pushed.load(Ordering::Acquire)
    }
}

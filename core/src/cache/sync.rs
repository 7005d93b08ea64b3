//! Atomics, locks and the asymmetric barrier between lookups and threads that end entries.
//!
//! Under `cfg(loom)` the types are loom's.

use std::ops::Deref;
#[cfg(not(loom))]
pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

#[cfg(loom)]
pub(super) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

#[cfg(not(loom))]
pub(super) use parking_lot::{Mutex, MutexGuard};

#[cfg(loom)]
pub(super) use self::modelled::{Mutex, MutexGuard};

/// Marks the branch that calls it as unlikely. A stand-in for `std::hint::cold_path` of Rust 1.95.
#[cold]
#[inline(always)]
pub(super) const fn cold_path() {}

/// Aligns `T` to 128 bytes, so that writes do not invalidate lines that lookups read.
#[repr(align(128))]
#[derive(Debug)]
pub(super) struct CachePadded<T>(pub(super) T);

impl<T> Deref for CachePadded<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

/// A condition variable whose `wait` takes the guard and returns it.
#[derive(Debug, Default)]
pub(super) struct Condvar(#[cfg(not(loom))] parking_lot::Condvar, #[cfg(loom)] loom::sync::Condvar);

impl Condvar {
    #[cfg(not(loom))]
    pub(super) fn wait<'a, T>(&self, mut guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.0.wait(&mut guard);
        guard
    }

    #[cfg(loom)]
    pub(super) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.0.wait(guard).expect("no panic under the lock")
    }

    pub(super) fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// The asymmetric barrier between a lookup and a thread that ends an entry.
///
/// Each side stores, then loads what the other side stores. A lookup stores its lease and loads the
/// entry's state. The ending thread stores the state and loads the leases. The barrier makes at
/// least one of them see the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Barrier {
    /// `membarrier(2)`: a lookup only keeps the compiler from reordering, and the ending thread
    /// makes every other processor pass a barrier.
    #[cfg_attr(loom, expect(dead_code, reason = "loom has no membarrier"))]
    Expedited,
    /// A full fence on both sides.
    Fences,
    /// Like `Expedited`, but without the ending thread's half. A test uses it to show that it
    /// detects a missing barrier.
    #[cfg(all(test, not(loom)))]
    Missing,
}

impl Barrier {
    /// Returns whether each lookup needs a fence of its own.
    pub(super) fn lookups_fence(self) -> bool {
        self == Self::Fences
    }

    /// Returns the kind of barrier to use: the expedited `membarrier` if the kernel has it,
    /// otherwise ordinary fences.
    #[cfg(not(loom))]
    pub(super) fn choose() -> Self {
        use rustix::thread::{MembarrierCommand, membarrier};
        match membarrier(MembarrierCommand::RegisterPrivateExpedited) {
            Ok(()) => Self::Expedited,
            Err(errno) => {
                tracing::debug!(%errno, "membarrier refused: cache lookups use fences");
                Self::Fences
            }
        }
    }

    /// Issues the light barrier: a lookup's half, between its store and its load.
    #[cfg(not(loom))]
    pub(super) fn light(self) {
        if self == Self::Fences {
            fence(Ordering::SeqCst);
        } else {
            std::sync::atomic::compiler_fence(Ordering::SeqCst);
        }
    }

    /// Issues the heavy barrier: the ending thread's half. Returns `false` if the kernel refuses it
    /// now. Then no lease can be ruled out.
    #[cfg(not(loom))]
    #[must_use]
    pub(super) fn heavy(self) -> bool {
        use rustix::thread::{MembarrierCommand, membarrier};
        match self {
            Self::Expedited => membarrier(MembarrierCommand::PrivateExpedited).is_ok(),
            Self::Fences => {
                fence(Ordering::SeqCst);
                true
            }
            #[cfg(test)]
            Self::Missing => true,
        }
    }

    #[cfg(loom)]
    pub(super) fn choose() -> Self {
        Self::Fences
    }

    #[cfg(loom)]
    pub(super) fn light(self) {
        modelled::fence_unless(modelled::LIGHT);
    }

    #[cfg(loom)]
    #[must_use]
    pub(super) fn heavy(self) -> bool {
        modelled::fence_unless(modelled::HEAVY);
        true
    }
}

/// Issues [`Barrier::light`] in a cache whose lookups need no fence.
#[inline(always)]
pub(super) fn light_unfenced() {
    #[cfg(not(loom))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(loom)]
    modelled::fence_unless(modelled::LIGHT);
}

/// Reads an atomic without an atomic instruction, so that the compiler can compare it in memory.
///
/// # Safety
/// The last write of `value` happened before this call, and no thread writes it during the call.
#[inline(always)]
pub(super) unsafe fn read_settled_u64(value: &AtomicU64) -> u64 {
    #[cfg(not(loom))]
    // SAFETY: the caller guarantees that no thread writes `value` during this read.
    return unsafe { *value.as_ptr() };
    #[cfg(loom)]
    // SAFETY: the caller guarantees that no thread writes `value` during this read; loom checks it.
    return unsafe { value.unsync_load() };
}

/// Reads an atomic like [`read_settled_u64`].
///
/// # Safety
/// The last write of `value` happened before this call, and no thread writes it during the call.
#[inline(always)]
pub(super) unsafe fn read_settled_u32(value: &AtomicU32) -> u32 {
    #[cfg(not(loom))]
    // SAFETY: the caller guarantees that no thread writes `value` during this read.
    return unsafe { *value.as_ptr() };
    #[cfg(loom)]
    // SAFETY: the caller guarantees that no thread writes `value` during this read; loom checks it.
    return unsafe { value.unsync_load() };
}

/// Fences after a read-modify-write: between the publication of a value, and the search for entries
/// or threads that the value affects.
///
/// On x86-64 the read-modify-write is itself a full fence. A second one would stall every `munmap`.
/// The callers' read-modify-writes are:
///
/// - the exchange that claims an invalidation's slot;
/// - the unlock after an entry was made (an exchange, since other threads may wait);
/// - a count of the deregistrations in flight.
#[inline(always)]
pub(super) fn fence_after_exchange() {
    #[cfg(all(not(loom), target_arch = "x86_64"))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(all(not(loom), not(target_arch = "x86_64")))]
    fence(Ordering::SeqCst);
    #[cfg(loom)]
    modelled::fence_unless(modelled::ANNOUNCE);
}

/// Increments the generation of a chain that was taken apart, before any part of it is used again.
/// A walk compares generations to see that the chain changed under it.
#[inline(always)]
pub(super) fn advance_generation(generation: &AtomicU32) {
    #[cfg(loom)]
    if modelled::is_left_out(modelled::GENERATION) {
        return;
    }
    // Release: a thread that sees the new generation sees that the slot holds the chain no more.
    generation.store(generation.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
    // A thread that sees the chain's next use sees the new generation.
    fence(Ordering::Release);
}

/// Loom has no `membarrier`: both halves are fences. A model can leave one kind of fence out to
/// show that it is needed.
#[cfg(loom)]
pub(super) mod modelled {
    use std::sync::atomic::{AtomicU32 as Plain, Ordering::Relaxed};

    use super::{Ordering, fence};

    pub(in crate::cache) const LIGHT: u32 = 1;
    pub(in crate::cache) const HEAVY: u32 = 2;
    pub(in crate::cache) const ANNOUNCE: u32 = 4;

    /// The increment of the generation of a chain that is taken apart. This is not a fence.
    pub(in crate::cache) const GENERATION: u32 = 8;

    /// The kinds of fences that are left out. Loom does not track it.
    pub(in crate::cache) static LEFT_OUT: Plain = Plain::new(0);

    pub(super) fn is_left_out(kind: u32) -> bool {
        LEFT_OUT.load(Relaxed) & kind != 0
    }

    pub(super) fn fence_unless(kind: u32) {
        if !is_left_out(kind) {
            fence(Ordering::SeqCst);
        }
    }

    pub(in crate::cache) type MutexGuard<'a, T> = loom::sync::MutexGuard<'a, T>;

    #[derive(Debug)]
    pub(in crate::cache) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(in crate::cache) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(in crate::cache) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().expect("no panic under the lock")
        }
    }
}

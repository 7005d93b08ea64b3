//! Atomics, locks, and the asymmetric barrier between lookups and threads that evict or invalidate
//! entries.
//!
//! Under `cfg(loom)` the types are loom's.

#![allow(unsafe_code, reason = "reads an atomic that no thread writes, without an atomic load")]

use std::ops::Deref;
#[cfg(not(loom))]
pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

#[cfg(loom)]
pub(super) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

#[cfg(not(loom))]
pub(super) use parking_lot::{Mutex, MutexGuard};

#[cfg(loom)]
pub(super) use self::modelled::{Mutex, MutexGuard};
#[cfg(not(loom))]
use crate::{Error, Result};

/// Marks the calling branch as unlikely, like `std::hint::cold_path` of Rust 1.95.
#[cold]
#[inline(always)]
pub(super) const fn cold_path() {}

/// Aligns `T` to 128 bytes, so that writes to it do not invalidate cache lines that lookups read.
#[repr(align(128))]
#[derive(Debug)]
pub(super) struct CachePadded<T>(pub(super) T);

impl<T> Deref for CachePadded<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

/// A condition variable whose `wait` takes a mutex guard and returns it.
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

/// Registers the process for `membarrier(2)`, with which cache lookups need no fence.
///
/// # Errors
/// The kernel refuses the call. Lookups of this process's caches then use fences, which is slower
/// but as correct.
#[cfg(not(loom))]
pub fn use_membarrier() -> Result<()> {
    use rustix::thread::{MembarrierCommand, membarrier};
    membarrier(MembarrierCommand::RegisterPrivateExpedited).map_err(|errno| {
        Error::os(errno, "membarrier").remedy(
            "use a kernel with CONFIG_MEMBARRIER, or allow membarrier in the container's seccomp \
             profile",
        )
    })
}

/// The asymmetric barrier between a lookup and a thread that ends an entry by evicting or
/// invalidating it.
///
/// Each thread stores a value, then loads the value that the other thread stores. The lookup stores
/// its lease and loads the entry's state. The other thread stores the state and loads the leases.
/// With the barrier, at least one of the two threads sees the other's store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Barrier {
    /// The thread that ends an entry calls `membarrier(2)`, which makes all running threads of the
    /// process pass a barrier. A lookup only needs a compiler fence.
    #[cfg_attr(loom, expect(dead_code, reason = "loom has no membarrier"))]
    Expedited,
    /// Both threads issue a full fence.
    Fences,
    /// Like `Expedited`, but without `membarrier(2)`. A test uses this kind to show that the test
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
        match use_membarrier() {
            Ok(()) => Self::Expedited,
            Err(error) => {
                tracing::debug!(%error, "cache lookups use fences");
                Self::Fences
            }
        }
    }

    /// Issues the light barrier. A lookup calls this after it stores its lease and before it loads
    /// the entry's state. The end of a lease calls this between clearing the slot and loading the
    /// state.
    #[cfg(not(loom))]
    pub(super) fn light(self) {
        if self == Self::Fences {
            fence(Ordering::SeqCst);
        } else {
            std::sync::atomic::compiler_fence(Ordering::SeqCst);
        }
    }

    /// Issues the heavy barrier. A thread that ends an entry calls this after it stores the entry's
    /// state and before it scans the leases. Returns `false` if the kernel refuses the barrier. The
    /// scan may then miss a lease.
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

/// Issues the light barrier of lookups that need no CPU fence: only the compiler must not reorder
/// memory accesses across this call.
#[inline(always)]
pub(super) fn light_unfenced() {
    #[cfg(not(loom))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(loom)]
    modelled::fence_unless(modelled::LIGHT);
}

/// Reads an atomic with a plain load, which the compiler can combine with a comparison.
///
/// # Safety
/// The last write of `value` must have happened before this call, and no thread may write it during
/// the call.
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
/// The conditions of [`read_settled_u64`].
#[inline(always)]
pub(super) unsafe fn read_settled_u32(value: &AtomicU32) -> u32 {
    #[cfg(not(loom))]
    // SAFETY: the caller guarantees that no thread writes `value` during this read.
    return unsafe { *value.as_ptr() };
    #[cfg(loom)]
    // SAFETY: the caller guarantees that no thread writes `value` during this read; loom checks it.
    return unsafe { value.unsync_load() };
}

/// Issues a full fence. The caller has published a value by a read-modify-write, and then searches
/// for the entries or threads that the value affects. The fence keeps the search after the
/// publication.
///
/// On x86-64 the read-modify-write is itself a full fence, so only the compiler is restrained. A
/// second fence would stall every `munmap`. The callers' read-modify-writes are:
///
/// - the exchange that claims an invalidation's slot, or the increment that counts an invalidation
///   without a slot;
/// - the compare-exchange that unlocks the cache's mutex after a miss inserted an entry;
/// - the increments of [`InFlightCounter`](super::reclaim::state::InFlightCounter).
#[inline(always)]
pub(super) fn fence_after_exchange() {
    #[cfg(all(not(loom), target_arch = "x86_64"))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(all(not(loom), not(target_arch = "x86_64")))]
    fence(Ordering::SeqCst);
    #[cfg(loom)]
    modelled::fence_unless(modelled::ANNOUNCE);
}

/// Increments the generation of a chain that was removed from its slot. The caller must do this
/// before it reuses a bucket of the chain. A walk compares generations to detect that the chain
/// changed.
#[inline(always)]
pub(super) fn advance_generation(generation: &AtomicU32) {
    #[cfg(loom)]
    if modelled::is_left_out(modelled::GENERATION) {
        return;
    }
    // Release: a thread that sees the new generation also sees that the slot no longer holds the
    // chain.
    generation.store(generation.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
    // After this fence, a thread that sees the chain's next use also sees the new generation.
    fence(Ordering::Release);
}

/// The fences of loom's models. Loom has no `membarrier(2)`, so the light barrier and the heavy
/// barrier are fences. A model can leave out one kind of fence, and shows by its failure that this
/// kind is needed.
#[cfg(loom)]
pub(super) mod modelled {
    use std::sync::atomic::{AtomicU32 as Plain, Ordering::Relaxed};

    use super::{Ordering, fence};

    pub(in crate::cache) const LIGHT: u32 = 1;
    pub(in crate::cache) const HEAVY: u32 = 2;
    pub(in crate::cache) const ANNOUNCE: u32 = 4;

    /// A bit of [`LEFT_OUT`] for the increment of a chain's generation, which a model can leave out
    /// like a fence.
    pub(in crate::cache) const GENERATION: u32 = 8;

    /// A bit mask of the kinds of fences that the running model leaves out. Loom does not track
    /// this variable.
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

//! Atomics, locks and the two halves of the barrier between lookups and whoever ends an entry;
//! loom's under `cfg(loom)`.

#[cfg(not(loom))]
pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

#[cfg(loom)]
pub(super) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

#[cfg(not(loom))]
pub(super) use parking_lot::{Mutex, MutexGuard};

#[cfg(loom)]
pub(super) use self::modelled::{Mutex, MutexGuard};

/// A condition variable that takes the guard and gives it back.
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

/// How lookups and whoever ends an entry agree on who came first.
///
/// Both sides store, then load what the other stores: a lookup its lease and then the entry's
/// state, the other side the state and then the leases. One of them must see the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Barrier {
    /// `membarrier(2)`: lookups keep the compiler from reordering, and the ending side makes every
    /// other processor pass a barrier.
    #[cfg_attr(loom, expect(dead_code, reason = "loom has no membarrier"))]
    Expedited,
    /// Both sides fence.
    Fences,
    /// As Expedited without its other half: shows that a test notices.
    #[cfg(all(test, not(loom)))]
    Missing,
}

impl Barrier {
    /// Whether lookups have a fence of their own.
    pub(super) fn lookups_fence(self) -> bool {
        self == Self::Fences
    }

    /// The cheaper one where the kernel has it.
    #[cfg(not(loom))]
    pub(super) fn choose() -> Self {
        use rustix::thread::{MembarrierCommand, membarrier};
        match membarrier(MembarrierCommand::RegisterPrivateExpedited) {
            Ok(()) => Self::Expedited,
            Err(errno) => {
                tracing::debug!(%errno, "membarrier refused: lookups of the registration cache fence");
                Self::Fences
            }
        }
    }

    /// The lookup's half: between its store and its load.
    #[cfg(not(loom))]
    pub(super) fn light(self) {
        if self == Self::Fences {
            fence(Ordering::SeqCst);
        } else {
            std::sync::atomic::compiler_fence(Ordering::SeqCst);
        }
    }

    /// The other half. `false` if the kernel refuses it now: then no lease can be ruled out.
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

/// [`Barrier::light`] where lookups need not fence.
#[inline(always)]
pub(super) fn light_unfenced() {
    #[cfg(not(loom))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(loom)]
    modelled::fence_unless(modelled::LIGHT);
}

/// The value of an atomic, read plainly, so that it may be an operand of what it is compared with.
///
/// # Safety
/// Its last write happened before, and none can happen beside this.
#[inline(always)]
pub(super) unsafe fn settled_u64(value: &AtomicU64) -> u64 {
    #[cfg(not(loom))]
    // SAFETY: nobody writes, says the caller.
    return unsafe { *value.as_ptr() };
    #[cfg(loom)]
    // SAFETY: as above; loom looks.
    return unsafe { value.unsync_load() };
}

/// As [`settled_u64`].
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn settled_u32(value: &AtomicU32) -> u32 {
    #[cfg(not(loom))]
    // SAFETY: nobody writes, says the caller.
    return unsafe { *value.as_ptr() };
    #[cfg(loom)]
    // SAFETY: as above; loom looks.
    return unsafe { value.unsync_load() };
}

/// The fence between what somebody announces and what they then look for, where a read-modify-write
/// stands between the two: the exchange that claims a change's place, the end of the lock under
/// which an entry was made (one where others may wait), a count of
/// [`Flights`](super::flight::Flights). On x86-64 such an instruction is a fence, and one of its
/// own would wait a second time, in every `munmap`.
#[inline(always)]
pub(super) fn announce_by_exchange() {
    #[cfg(all(not(loom), target_arch = "x86_64"))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(all(not(loom), not(target_arch = "x86_64")))]
    fence(Ordering::SeqCst);
    #[cfg(loom)]
    modelled::fence_unless(modelled::ANNOUNCE);
}

/// Counts up what tells a walk that a chain was taken apart under it, before the chain is used
/// again.
#[inline(always)]
pub(super) fn end_generation(generation: &AtomicU32) {
    #[cfg(loom)]
    if modelled::is_left_out(modelled::GENERATION) {
        return;
    }
    // Release: whoever sees the new generation sees that the slot holds the chain no more.
    generation.store(generation.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
    // Whoever sees the chain's next use sees that its generation is over.
    fence(Ordering::Release);
}

/// Loom has no `membarrier`: both halves are fences, and a model can leave one kind out to show
/// that it is needed.
#[cfg(loom)]
pub(super) mod modelled {
    use std::sync::atomic::{AtomicU32 as Plain, Ordering::Relaxed};

    use super::{Ordering, fence};

    pub(in crate::cache) const LIGHT: u32 = 1;
    pub(in crate::cache) const HEAVY: u32 = 2;
    pub(in crate::cache) const ANNOUNCE: u32 = 4;

    /// No fence: chains that are taken apart are not counted.
    pub(in crate::cache) const GENERATION: u32 = 8;

    /// What is left out; no part of the model.
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

//! The guard of a lease: cached, or of an uncached region.

use std::{fmt, ops::Deref, ptr::NonNull};

use super::{
    super::{
        backend::CacheBackend,
        cache_core::CacheCore,
        index::entry::{Entry, state},
        key::Key,
        lookup::LeasedEntry,
        sync::Ordering,
    },
    blocks::LeaseSlot,
};
use crate::{Error, ProcessMark};

/// The reason why a region is not cached. Such a region is registered for one lease.
#[derive(Debug)]
#[non_exhaustive]
pub enum UncachedReason {
    /// The cache is disabled: its limit of entries or of bytes is 0.
    CachingOff,
    /// The range is longer than [`Limits::max_bytes`](super::super::Limits::max_bytes).
    TooLong,
    /// The cache is full, and all its regions are in use.
    Full,
    /// A monitor is handling a change of memory, and has disabled all hits until it knows the
    /// affected range.
    InvalidationInProgress,
    /// The kernel began to refuse `membarrier(2)` after it had allowed it, for example because of a
    /// seccomp filter. The cache is closed permanently.
    MembarrierRefused,
    /// This process is a forked child of the process that created the cache.
    Forked,
    /// The range crosses a multiple of 2^48, where the index ends.
    CrossesIndexEnd,
    /// No monitor can watch the memory. The error is the reason.
    Unwatched(Error),
}

impl fmt::Display for UncachedReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CachingOff => "caching is off",
            Self::TooLong => "longer than the cache's limit by bytes",
            Self::Full => "the cache is full of regions in use",
            Self::InvalidationInProgress => "a monitor is finding out what changed",
            Self::MembarrierRefused => "the kernel refuses membarrier(2), which it allowed before",
            Self::Forked => "the process is a forked child",
            Self::CrossesIndexEnd => "the range crosses a multiple of 2^48, where the index ends",
            Self::Unwatched(why) => return write!(f, "no monitor watches the memory: {why}"),
        })
    }
}

/// A guard that keeps a region registered and usable. Any thread may drop it.
///
/// A cached region stays registered afterwards, until it is evicted or invalidated. A region that
/// was invalidated in use is deregistered when its last lease ends.
pub struct Lease<'c, S: CacheBackend> {
    core: &'c CacheCore<S>,
    /// An entry of the cache, or of a leaked [`UncachedRegion`] that the lease owns.
    entry: NonNull<Entry<S>>,
    /// The slot with the lease. If the lowest bit is set, the end of the lease takes the slow path:
    /// it fences, or the lease has no slot.
    slot: *const LeaseSlot,
}

const SLOW_RELEASE: usize = 1;

/// An uncached region, which belongs to one lease. Its entry is outside the table.
#[repr(C)]
struct UncachedRegion<S: CacheBackend> {
    entry: Entry<S>,
    reason: UncachedReason,
    /// The process that registered the region. Only this process deregisters it.
    process: ProcessMark,
}

// SAFETY: a lease refers to a cache, which is `Sync`, and to a slot that any thread may clear. Only
// the creation of a lease needs the owner of the slot's block. An uncached region is `Send`.
unsafe impl<S: CacheBackend> Send for Lease<'_, S> {}
// SAFETY: a shared lease gives access to the region, which is `Sync`, and to atomics.
unsafe impl<S: CacheBackend> Sync for Lease<'_, S> {}

impl<'c, S: CacheBackend> Lease<'c, S> {
    /// Creates the guard of a fast lookup's hit.
    #[inline(always)]
    pub(in crate::cache) fn cached(core: &'c CacheCore<S>, leased: LeasedEntry<'c, S>) -> Self {
        let slot: *const LeaseSlot = leased.slot;
        // SAFETY: slots are aligned to 8 bytes. The compiler does not know this of an address that
        // it loaded, and the end of the lease tests the bit.
        unsafe { std::hint::assert_unchecked(slot.addr() & SLOW_RELEASE == 0) };
        Self { core, entry: NonNull::from(leased.entry), slot }
    }

    /// Creates the guard of a hit by a slow lookup. When the guard is dropped, it fences if the
    /// cache's lookups fence.
    pub(in crate::cache) fn cached_checked(
        core: &'c CacheCore<S>,
        leased: LeasedEntry<'c, S>,
    ) -> Self {
        let mut lease = Self::cached(core, leased);
        if core.leases.barrier.lookups_fence() {
            lease.slot = lease.slot.map_addr(|address| address | SLOW_RELEASE);
        }
        lease
    }

    pub(in crate::cache) fn uncached(
        core: &'c CacheCore<S>,
        region: S::Region,
        reason: UncachedReason,
    ) -> Self {
        let (entry, process) = (Entry::<S>::of_region(region), core.process.of_caller());
        let uncached = Box::leak(Box::new(UncachedRegion { entry, reason, process }));
        let entry = NonNull::from(uncached).cast();
        Self { core, entry, slot: std::ptr::without_provenance(SLOW_RELEASE) }
    }

    /// Moves the lease field by field, so that a hit need not keep the fields in memory.
    #[inline(always)]
    pub(in crate::cache) fn by_fields(self) -> Self {
        let Self { core, entry, slot } = *std::mem::ManuallyDrop::new(self);
        Self { core, entry, slot }
    }

    /// Returns the entry and the lease slot of a cached region, or `None` for an uncached region.
    fn leased(&self) -> Option<LeasedEntry<'c, S>> {
        let slot = self.slot.map_addr(|address| address & !SLOW_RELEASE);
        // SAFETY: a lease with a slot has a slot and an entry of the cache, whose memory lives as
        // long as the borrow of the cache.
        (!slot.is_null())
            .then(|| unsafe { LeasedEntry { entry: self.entry.as_ref(), slot: &*slot } })
    }

    fn uncached_region(&self) -> Option<&UncachedRegion<S>> {
        // SAFETY: without a slot, the entry is the first field of an `UncachedRegion` that the
        // lease owns.
        (self.slot.addr() == SLOW_RELEASE).then(|| unsafe { self.entry.cast().as_ref() })
    }

    /// Returns the reason why the region is not cached, or `None` if it is.
    #[must_use]
    pub fn uncached_reason(&self) -> Option<&UncachedReason> {
        self.uncached_region().map(|uncached| &uncached.reason)
    }

    /// Returns the key that the cached region was registered with. It may cover more than the
    /// lookup's key.
    #[must_use]
    pub fn key(&self) -> Option<Key> {
        self.leased().map(|leased| leased.entry.key())
    }

    /// Returns whether the memory changed since the lookup. The region is then deregistered when
    /// its last lease ends.
    #[must_use]
    pub fn is_invalidated(&self) -> bool {
        self.leased().is_some_and(|leased| {
            leased.entry.state.load(Ordering::Acquire) & state::INVALIDATED != 0
        })
    }
}

impl<S: CacheBackend> Deref for Lease<'_, S> {
    type Target = S::Region;

    #[inline(always)]
    fn deref(&self) -> &S::Region {
        // SAFETY: a cached entry was seen registered after the lease was published, and the lease
        // lasts as long as the borrow. An uncached region's entry is owned by the lease.
        unsafe { self.entry.as_ref().region() }
    }
}

impl<S: CacheBackend> Drop for Lease<'_, S> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.slot.addr() & SLOW_RELEASE == 0 {
            // SAFETY: without the bit, the lease has a slot and an entry of the cache.
            let (entry, slot) = unsafe { (self.entry.as_ref(), &*self.slot) };
            self.core.release_fast(entry, slot);
        } else {
            // Field by field, so that a hit need not keep the lease in memory.
            drop_slow(self.core, self.entry, self.slot);
        }
    }
}

#[cold]
#[inline(never)]
fn drop_slow<S: CacheBackend>(
    core: &CacheCore<S>,
    entry: NonNull<Entry<S>>,
    slot: *const LeaseSlot,
) {
    let lease = std::mem::ManuallyDrop::new(Lease { core, entry, slot });
    if let Some(leased) = lease.leased() {
        core.release_checked(leased.entry, leased.slot);
        return;
    }
    // SAFETY: without a slot, the entry is the first field of an `UncachedRegion` that was leaked
    // for this lease. The lease is being dropped, so that this is the only owner.
    let uncached = unsafe { Box::from_raw(entry.cast::<UncachedRegion<S>>().as_ptr()) };
    // SAFETY: the entry was created with a region, and only this call takes it out.
    core.drop_uncached(unsafe { uncached.entry.take_region() }, uncached.process);
}

impl<S: CacheBackend> fmt::Debug for Lease<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("key", &self.key())
            .field("invalidated", &self.is_invalidated())
            .field("uncached", &self.uncached_reason())
            .finish()
    }
}

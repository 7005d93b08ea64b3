//! The guard that keeps a cached or an uncached region registered.

#![allow(unsafe_code, reason = "references to the entry and the slot that a lease holds")]

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

/// The reason why a region is not cached. An uncached region is registered for one lease only.
#[derive(Debug)]
#[non_exhaustive]
pub enum UncachedReason {
    /// The cache is disabled: its limit of entries or of bytes is 0.
    CachingOff,
    /// The range is longer than [`Limits::max_bytes`](super::super::Limits::max_bytes).
    TooLong,
    /// The cache has no room for the region, for one of these reasons:
    ///
    /// - The cache cannot evict or free enough entries, mostly because they have leases.
    /// - The system has no memory for the cache's table.
    /// - The calling thread gets no lease slot. The thread may be exiting, or all slots are in use.
    Full,
    /// A monitor is handling a change of memory, and has disabled all hits until it knows the
    /// affected range.
    InvalidationInProgress,
    /// The lookup is part of a deregistration, as in the drop of a memory's owner, and another
    /// thread is registering the memory. That thread may be waiting for the deregistration.
    InsideDeregistration,
    /// The kernel began to refuse `membarrier(2)` after it had allowed it, for example because of a
    /// seccomp filter. The cache is closed permanently.
    MembarrierRefused,
    /// This process is a forked child of the process that created the cache.
    Forked,
    /// The range crosses a multiple of 2^48, where the cache's address table ends.
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
            Self::InsideDeregistration => "a deregistration cannot wait for another thread",
            Self::MembarrierRefused => "the kernel refuses membarrier(2), which it allowed before",
            Self::Forked => "the process is a forked child",
            Self::CrossesIndexEnd => "the range crosses a multiple of 2^48, where the index ends",
            Self::Unwatched(why) => return write!(f, "no monitor watches the memory: {why}"),
        })
    }
}

/// A guard that keeps a region registered and usable. Any thread may drop it.
///
/// A cached region stays registered after the lease, until the region is evicted or invalidated. A
/// region that is invalidated during the lease is deregistered after its last lease ends. An
/// uncached region is deregistered when the lease is dropped by the process that registered the
/// region.
pub struct Lease<'c, S: CacheBackend> {
    core: &'c CacheCore<S>,
    /// An entry of the cache. For an uncached region, the entry in an [`UncachedRegion`] on the
    /// heap, which the lease owns and frees.
    entry: NonNull<Entry<S>>,
    /// The address of the lease slot, or null for an uncached region. The address's bit
    /// [`SLOW_RELEASE`] selects the slow path for the drop. The bit is set for an uncached region,
    /// and for every lease of a cache whose lookups need fences.
    slot: *const LeaseSlot,
}

/// The bit of [`Lease`]'s `slot` that is set if the drop of the lease takes the slow path.
const SLOW_RELEASE: usize = 1;

/// An uncached region, which one lease owns. Its entry is not in the table.
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
    /// Creates the lease guard for a hit on the fast path.
    #[inline(always)]
    pub(in crate::cache) fn cached(core: &'c CacheCore<S>, leased: LeasedEntry<'c, S>) -> Self {
        let slot: *const LeaseSlot = leased.slot;
        // SAFETY: slots are aligned to 8 bytes. The compiler does not know this of an address that
        // it loaded, and the end of the lease tests the bit.
        unsafe { std::hint::assert_unchecked(slot.addr() & SLOW_RELEASE == 0) };
        Self { core, entry: NonNull::from(leased.entry), slot }
    }

    /// Creates the lease guard for a hit on the slow path, or for a new registration. If lookups of
    /// the cache need fences, the end of the lease issues a fence too.
    pub(in crate::cache) fn cached_slow(
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

    /// Returns `self` unchanged, moved field by field. Moving it so is an optimization: the
    /// compiler can then keep the fields in registers after a hit.
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

    /// Returns the reason why the region is not cached, or `None` if the region is cached.
    #[must_use]
    pub fn uncached_reason(&self) -> Option<&UncachedReason> {
        self.uncached_region().map(|uncached| &uncached.reason)
    }

    /// Returns the key of the cached region, or `None` if the region is uncached. The key may cover
    /// more than the lookup's key.
    #[must_use]
    pub fn key(&self) -> Option<Key> {
        self.leased().map(|leased| leased.entry.key())
    }

    /// Returns whether the cached region is invalidated, because its memory changed or a merged
    /// region replaced it. The region is then deregistered after its last lease ends. Returns
    /// `false` for an uncached region.
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
            // SAFETY: without the bit SLOW_RELEASE, the lease has a slot and an entry of the cache.
            let (entry, slot) = unsafe { (self.entry.as_ref(), &*self.slot) };
            self.core.release_fast(entry, slot);
        } else {
            // Passed field by field, so that the compiler keeps the fields of a hit in registers.
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
        core.release_slow(leased.entry, leased.slot);
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

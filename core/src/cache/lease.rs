//! Leases: what a lookup returns.

use std::{fmt, ops::Deref, ptr::NonNull, sync::Arc};

use super::{
    Cache, Key, Source,
    blocks::Slot,
    entry::{Entry, state},
    shared::Shared,
    sync::Ordering,
};
use crate::{Error, ProcessMark};

/// The reason why a region is not cached. Such a region is registered for one lease.
#[derive(Debug)]
#[non_exhaustive]
pub enum Uncached {
    /// Caching is off: the limits are 0.
    Off,
    /// Longer than the limit by bytes.
    TooLong,
    /// The cache is full of regions in use.
    Full,
    /// A monitor is finding out what changed.
    ChangeUnderWay,
    /// The kernel began to refuse `membarrier(2)` after it had allowed it (a seccomp filter, say):
    /// the cache is closed for good.
    Shut,
    /// The process is a forked child.
    Forked,
    /// The address is above those that the table has room for (2^48 bytes).
    NoPlace,
    /// No monitor watches the memory, and this is why.
    Unwatched(Error),
}

impl fmt::Display for Uncached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "caching is off",
            Self::TooLong => "longer than the cache's limit by bytes",
            Self::Full => "the cache is full of regions in use",
            Self::ChangeUnderWay => "a monitor is finding out what changed",
            Self::Shut => "the kernel refuses membarrier(2), which it allowed before",
            Self::Forked => "the process is a forked child",
            Self::NoPlace => "the address is above 2^48",
            Self::Unwatched(why) => return write!(f, "no monitor watches the memory: {why}"),
        })
    }
}

/// An entry in use: the slot says so to everybody.
pub(super) struct Held<'c, S: Source> {
    pub(super) entry: &'c Entry<S>,
    pub(super) slot: &'c Slot,
}

/// A region in use. Dropping it puts the region back, on whatever thread.
///
/// A cached region stays registered afterwards, until it is evicted or its memory goes. What was
/// invalidated in use is deregistered at the last put.
pub struct Lease<'c, S: Source> {
    shared: &'c Shared<S>,
    /// One of the cache's, or that of a leaked [`Alone`] that the lease owns.
    entry: NonNull<Entry<S>>,
    /// Where the entry is leased. With the lowest bit set, putting back is not plain: it fences,
    /// or there is no slot.
    slot: *const Slot,
}

const NOT_PLAIN: usize = 1;

/// A region of one lease, in an entry that nobody finds.
#[repr(C)]
struct Alone<S: Source> {
    entry: Entry<S>,
    why: Uncached,
    /// The process that registered the region. Only this process deregisters it.
    process: ProcessMark,
}

// SAFETY: a lease refers to a cache, which is `Sync`, and to a slot that any thread may clear; what
// only the owner of the slot's block may do was done when the lease was made. A region of its own
// is `Send`.
unsafe impl<S: Source> Send for Lease<'_, S> {}
// SAFETY: through a shared lease only the shared region and the key are reached.
unsafe impl<S: Source> Sync for Lease<'_, S> {}

impl<'c, S: Source> Lease<'c, S> {
    #[inline(always)]
    pub(super) fn cached(shared: &'c Shared<S>, held: Held<'c, S>) -> Self {
        let slot: *const Slot = held.slot;
        // SAFETY: slots are aligned. Said again because the place comes from memory, and the end of
        // the lease asks for the bit.
        unsafe { std::hint::assert_unchecked(slot.addr() & NOT_PLAIN == 0) };
        Self { shared, entry: NonNull::from(held.entry), slot }
    }

    /// The same of a lookup that did not take the plain way.
    pub(super) fn cached_anyhow(shared: &'c Shared<S>, held: Held<'c, S>) -> Self {
        let mut lease = Self::cached(shared, held);
        if shared.barrier.lookups_fence() {
            lease.slot = lease.slot.map_addr(|place| place | NOT_PLAIN);
        }
        lease
    }

    pub(super) fn alone(shared: &'c Shared<S>, region: S::Region, why: Uncached) -> Self {
        let (entry, process) = (Entry::<S>::of_region(region), shared.process.of_caller());
        let alone = Box::leak(Box::new(Alone { entry, why, process }));
        let entry = NonNull::from(alone).cast();
        Self { shared, entry, slot: std::ptr::without_provenance(NOT_PLAIN) }
    }

    /// The same lease, moved piece by piece: a hit then need not keep its pieces in memory for the
    /// sake of a miss.
    #[inline(always)]
    pub(super) fn in_pieces(self) -> Self {
        let Self { shared, entry, slot } = *std::mem::ManuallyDrop::new(self);
        Self { shared, entry, slot }
    }

    /// The entry and the slot, unless the lease has a region of its own.
    fn held(&self) -> Option<Held<'c, S>> {
        let slot = self.slot.map_addr(|place| place & !NOT_PLAIN);
        // SAFETY: where there is a slot, it and the entry are the cache's, whose memory lives as
        // long as the borrow of the cache.
        (!slot.is_null()).then(|| unsafe { Held { entry: self.entry.as_ref(), slot: &*slot } })
    }

    fn own(&self) -> Option<&Alone<S>> {
        // SAFETY: without a slot, the entry is the first field of the lease's own box.
        (self.slot.addr() == NOT_PLAIN).then(|| unsafe { self.entry.cast().as_ref() })
    }

    /// Why the region is not cached; `None` if it is.
    #[must_use]
    pub fn uncached(&self) -> Option<&Uncached> {
        self.own().map(|alone| &alone.why)
    }

    /// What the cached region was registered for, which may be more than was asked for.
    #[must_use]
    pub fn key(&self) -> Option<Key> {
        self.held().map(|held| held.entry.key())
    }

    /// Whether the memory changed since the lease was taken: the region is then deregistered when
    /// the lease is dropped.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.held().is_some_and(|held| held.entry.state.load(Ordering::Acquire) & state::DEAD != 0)
    }
}

impl<S: Source> Deref for Lease<'_, S> {
    type Target = S::Region;

    #[inline(always)]
    fn deref(&self) -> &S::Region {
        // SAFETY: the region of an entry stays while there is a lease, which was published before
        // the entry was seen registered; that of a box as long as the box.
        unsafe { self.entry.as_ref().region() }
    }
}

impl<S: Source> Drop for Lease<'_, S> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.slot.addr() & NOT_PLAIN == 0 {
            // SAFETY: a plain lease has a slot and an entry of the cache.
            let (entry, slot) = unsafe { (self.entry.as_ref(), &*self.slot) };
            self.shared.release_plainly(entry, slot);
        } else {
            // Piece by piece, as for `in_pieces`.
            drop_anyhow(self.shared, self.entry, self.slot);
        }
    }
}

#[cold]
#[inline(never)]
fn drop_anyhow<S: Source>(shared: &Shared<S>, entry: NonNull<Entry<S>>, slot: *const Slot) {
    let lease = std::mem::ManuallyDrop::new(Lease { shared, entry, slot });
    if let Some(held) = lease.held() {
        shared.release(&held);
        return;
    }
    // SAFETY: without a slot, the entry is that of a box that was leaked for the lease, which is
    // being dropped.
    let alone = unsafe { Box::from_raw(entry.cast::<Alone<S>>().as_ptr()) };
    // SAFETY: it was made with a region, which nobody else takes.
    shared.drop_alone(unsafe { alone.entry.take_region() }, alone.process);
}

impl<S: Source> fmt::Debug for Lease<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("key", &self.key())
            .field("dead", &self.is_dead())
            .field("uncached", &self.uncached())
            .finish()
    }
}

/// A lease that keeps its cache alive: for what outlives the borrow, at the price of a shared
/// reference count.
pub struct OwnedLease<S: Source> {
    /// Dropped first: it refers to the cache.
    lease: Lease<'static, S>,
    _cache: Arc<Cache<S>>,
}

impl<S: Source> OwnedLease<S> {
    pub(super) fn new(cache: &Arc<Cache<S>>, lease: Lease<'_, S>) -> Self {
        // SAFETY: the lease refers to what the cache holds, at addresses that do not move; the
        // cache lives as long as the reference beside it, which is dropped after the lease.
        let lease = unsafe { std::mem::transmute::<Lease<'_, S>, Lease<'static, S>>(lease) };
        Self { lease, _cache: Arc::clone(cache) }
    }

    /// The lease.
    #[must_use]
    pub fn lease(&self) -> &Lease<'_, S> {
        &self.lease
    }
}

impl<S: Source> Deref for OwnedLease<S> {
    type Target = S::Region;

    fn deref(&self) -> &S::Region {
        &self.lease
    }
}

impl<S: Source> fmt::Debug for OwnedLease<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lease.fmt(f)
    }
}

//! The entries of a cache, each with one cached registration. Their memory is never used for values
//! of another type.

#![allow(unsafe_code, reason = "the region of an entry, which its state word protects")]

use std::{cell::UnsafeCell, mem::MaybeUninit};

use super::super::{
    arena::Zeroed,
    backend::CacheBackend,
    key::Key,
    sync::{self, AtomicU32, AtomicU64, Ordering},
};

/// The number of bytes that a slot of a leaf node covers, on machines of every page size.
const GRANULE: u64 = 4096;

/// The flags of an entry's state word, in its low 8 bits. The bits from [`state::GENERATION`] up
/// hold a counter, the generation, which increments when the entry is freed.
///
/// An entry is live, so that a lookup may hit it, if no flag is set except NEEDS_VALIDATION,
/// HAS_WAITERS and UNREFERENCED. A lookup tests this with one comparison. The cache's guide lists
/// the transitions.
pub(in crate::cache) mod state {
    /// The entry is free, or a thread is about to free it.
    pub(in crate::cache) const FREE: u32 = 1;
    /// A miss is watching and registering the entry's memory.
    pub(in crate::cache) const REGISTERING: u32 = 2;
    /// No lookup may hit the entry again: its memory changed, its registration failed, or a merged
    /// entry replaces it. Set at most once in a generation. The thread that sets the flag then
    /// pushes the entry on the stack of invalidated entries. The exception is a new entry for which
    /// the table has no room: that thread frees the entry at once.
    pub(in crate::cache) const INVALIDATED: u32 = 4;
    /// A thread is about to evict the entry. The thread clears the flag instead if the entry has a
    /// lease or was invalidated, or if the heavy barrier failed.
    pub(in crate::cache) const EVICTING: u32 = 8;
    /// Each hit must ask the backend if the registration is current
    /// ([`CacheBackend::is_current`](super::CacheBackend::is_current)).
    pub(in crate::cache) const NEEDS_VALIDATION: u32 = 16;
    /// The registration failed: the entry has no region.
    pub(in crate::cache) const FAILED: u32 = 32;
    /// A thread waits for the end of the registration.
    pub(in crate::cache) const HAS_WAITERS: u32 = 64;
    /// The entry had no hit since its registration, or since the clock hand of eviction last
    /// passed.
    pub(in crate::cache) const UNREFERENCED: u32 = 128;
    /// The lowest bit of the generation, which is also the amount of one increment.
    pub(in crate::cache) const GENERATION: u32 = 256;

    /// Returns whether an entry with this state word is live: a lookup may hit it.
    #[inline(always)]
    pub(in crate::cache) const fn is_live(word: u32) -> bool {
        word & (FREE | REGISTERING | INVALIDATED | EVICTING | FAILED) == 0
    }

    /// Returns whether a fast lookup may hit the entry: it is live, needs no validation, and is
    /// marked as referenced.
    #[inline(always)]
    pub(in crate::cache) const fn allows_fast_hit(word: u32) -> bool {
        const SLOW: u32 = NEEDS_VALIDATION | UNREFERENCED;
        word & (FREE | REGISTERING | INVALIDATED | EVICTING | FAILED | SLOW) == 0
    }

    /// Returns whether the entry has a region, invalidated or not.
    pub(in crate::cache) const fn is_registered(word: u32) -> bool {
        word & (FREE | REGISTERING | FAILED) == 0
    }

    /// Returns whether the entry is being registered and was not invalidated meanwhile. A miss may
    /// wait for its registration.
    pub(in crate::cache) const fn is_registering(word: u32) -> bool {
        word & (REGISTERING | INVALIDATED) == REGISTERING
    }

    /// Returns the state word of an entry that is about to be freed: FREE, in the generation of
    /// `word`. No lookup can hit an entry in this state.
    pub(in crate::cache) const fn ended(word: u32) -> u32 {
        word & !(GENERATION - 1) | FREE
    }

    /// Returns the state word of a free entry in the next generation.
    pub(in crate::cache) const fn freed(word: u32) -> u32 {
        (word & !(GENERATION - 1)).wrapping_add(GENERATION) | FREE
    }
}

/// A cached registration. All fields that a fast lookup compares are in the first cache line.
/// The fields from `start` to `allocation` have the values of the [`Key`].
#[repr(C, align(64))]
pub(in crate::cache) struct Entry<S: CacheBackend> {
    /// The state word: the flags of [`state`], and the generation.
    pub(in crate::cache) state: AtomicU32,
    /// The complement of the access rights: a bit is set for each right that the registration does
    /// not have.
    missing_access: AtomicU32,
    pub(in crate::cache) start: AtomicU64,
    pub(in crate::cache) last: AtomicU64,
    pub(in crate::cache) owner: AtomicU64,
    pub(in crate::cache) allocation: AtomicU64,
    /// The index of the next entry on the stack of invalidated entries, or 0.
    pub(in crate::cache) next_invalidated: AtomicU32,
    /// The number of the last scan of the lease slots that found a lease of this entry. Protected
    /// by the cache's lock. Scan numbers wrap around. If a number repeats, an eviction may skip an
    /// idle entry, which is harmless.
    pub(in crate::cache) leased_at_scan: AtomicU32,
    /// The region. [`Entry::set_registration`] or [`Entry::of_region`] initialises this cell, and
    /// [`Entry::take_region`] moves the region out. Before and after that, the cell is
    /// uninitialised.
    region: UnsafeCell<MaybeUninit<S::Region>>,
    /// The watch of the memory. [`Entry::set_registration`] initialises this cell, and
    /// [`Entry::take`] moves the watch out. Before and after that, the cell is uninitialised.
    watch: UnsafeCell<MaybeUninit<S::Watch>>,
    /// The time of the registration in milliseconds ([`now_ms`]).
    pub(in crate::cache) registered_at_ms: AtomicU64,
}

// SAFETY: the cells `region` and `watch` are written only by the registering thread, before it
// stores the live state with Release. They are read only by a thread that saw that state with
// Acquire while it held a lease or the cache's lock, and by the thread that detaches the region,
// when no lease can exist.
unsafe impl<S: CacheBackend> Sync for Entry<S> {}

// SAFETY: atomics of zero bytes are 0, and the cells may be uninitialised. The cache takes their
// values out before it is dropped, so that an entry needs no drop.
unsafe impl<S: CacheBackend> Zeroed for Entry<S> {}

#[cfg(loom)]
impl<S: CacheBackend> Default for Entry<S> {
    fn default() -> Self {
        Self::holding(MaybeUninit::uninit())
    }
}

impl<S: CacheBackend> Entry<S> {
    fn holding(region: MaybeUninit<S::Region>) -> Self {
        Self {
            state: AtomicU32::new(0),
            missing_access: AtomicU32::new(0),
            start: AtomicU64::new(0),
            last: AtomicU64::new(0),
            owner: AtomicU64::new(0),
            allocation: AtomicU64::new(0),
            next_invalidated: AtomicU32::new(0),
            leased_at_scan: AtomicU32::new(0),
            region: UnsafeCell::new(region),
            watch: UnsafeCell::new(MaybeUninit::uninit()),
            registered_at_ms: AtomicU64::new(0),
        }
    }

    /// Creates an entry that is not in the table, for an uncached region.
    pub(in crate::cache) fn of_region(region: S::Region) -> Self {
        Self::holding(MaybeUninit::new(region))
    }

    /// Returns whether the entry and the key start in the same granule. The result is only a hint,
    /// because another thread may reuse the entry at any time.
    ///
    /// This test needs one branch. A comparison of whole ranges needs two, which the processor
    /// mispredicts if lookups are random.
    #[inline(always)]
    pub(in crate::cache) fn starts_in_same_granule(&self, key: &Key) -> bool {
        self.start.load(Ordering::Relaxed) ^ key.start < GRANULE
    }

    /// Compares like [`Entry::covers`], with plain loads instead of atomic ones.
    ///
    /// # Safety
    /// The caller must have published a lease of the entry, then seen the entry live, and not have
    /// ended the lease.
    #[inline(always)]
    pub(in crate::cache) unsafe fn leased_covers(&self, key: &Key) -> bool {
        // SAFETY: the caller published a lease and then saw the entry live, so no thread writes the
        // entry until the lease ends.
        unsafe {
            self.covers_with(key, |at| sync::read_settled_u64(at), |at| sync::read_settled_u32(at))
        }
    }

    /// Returns whether a lookup of the key may use the entry: it covers the key's range with at
    /// least the key's rights, and belongs to the same iface, device and allocation. A [key of any
    /// owner](Key::of_any_owner) matches every iface, device and allocation.
    #[inline(always)]
    pub(in crate::cache) fn covers(&self, key: &Key) -> bool {
        self.covers_with(key, |at| at.load(Ordering::Relaxed), |at| at.load(Ordering::Relaxed))
    }

    #[inline(always)]
    fn covers_with(
        &self,
        key: &Key,
        read: impl Fn(&AtomicU64) -> u64,
        read_access: impl Fn(&AtomicU32) -> u32,
    ) -> bool {
        read_access(&self.missing_access) & key.access == 0
            && read(&self.start) <= key.start
            && key.last <= read(&self.last)
            && (key.exact == 0
                || read(&self.owner) == key.owner && read(&self.allocation) == key.allocation)
    }

    /// Clears UNREFERENCED after a hit, so that the next eviction spares the entry. `word` is the
    /// state word that the lookup read.
    pub(in crate::cache) fn mark_referenced(&self, word: u32) {
        if word & state::UNREFERENCED != 0 {
            self.state.fetch_and(!state::UNREFERENCED, Ordering::Relaxed);
        }
    }

    pub(in crate::cache) fn overlaps(&self, start: u64, last: u64) -> bool {
        self.start.load(Ordering::Relaxed) <= last && start <= self.last.load(Ordering::Relaxed)
    }

    /// Returns the first and last address of the entry's range.
    #[inline]
    pub(in crate::cache) fn bounds(&self) -> (u64, u64) {
        (self.start.load(Ordering::Relaxed), self.last.load(Ordering::Relaxed))
    }

    pub(in crate::cache) fn len(&self) -> u64 {
        let (start, last) = self.bounds();
        last - start + 1
    }

    /// Returns the key that the entry was registered with.
    pub(in crate::cache) fn key(&self) -> Key {
        Key {
            start: self.start.load(Ordering::Relaxed),
            last: self.last.load(Ordering::Relaxed),
            access: !self.missing_access.load(Ordering::Relaxed),
            owner: self.owner.load(Ordering::Relaxed),
            allocation: self.allocation.load(Ordering::Relaxed),
            exact: u64::MAX,
        }
    }

    /// Stores a key in a free entry, and marks the entry as being registered.
    pub(in crate::cache) fn fill(&self, key: &Key) {
        self.start.store(key.start, Ordering::Relaxed);
        self.last.store(key.last, Ordering::Relaxed);
        self.owner.store(key.owner, Ordering::Relaxed);
        self.allocation.store(key.allocation, Ordering::Relaxed);
        self.missing_access.store(!key.access, Ordering::Relaxed);
        self.leased_at_scan.store(0, Ordering::Relaxed);
        let word = self.state.load(Ordering::Relaxed);
        let word = word & !state::FREE | state::REGISTERING | state::UNREFERENCED;
        self.state.store(word, Ordering::Release);
    }

    /// Marks the entry free, and increments its generation.
    pub(in crate::cache) fn free(&self) {
        let word = self.state.load(Ordering::Relaxed);
        self.state.store(state::freed(word), Ordering::Release);
    }

    /// Marks the entry invalidated if `applies` returns true for it. Does nothing if the entry is
    /// free, failed or already invalidated. Returns `true` if this call marked the entry.
    pub(in crate::cache) fn mark_invalidated(&self, applies: impl Fn(&Self) -> bool) -> bool {
        let invalidate = |word| {
            let valid = word & (state::FREE | state::INVALIDATED | state::FAILED) == 0;
            (valid && applies(self)).then_some(word | state::INVALIDATED)
        };
        // The word contains the generation. So if the exchange succeeds, the entry was not reused
        // since `applies` read it.
        self.state.fetch_update(Ordering::SeqCst, Ordering::Acquire, invalidate).is_ok()
    }

    /// Stores the region and its watch.
    ///
    /// # Safety
    /// The caller must be the thread that registers this entry. It must call this once, before it
    /// ends the registration.
    pub(in crate::cache) unsafe fn set_registration(&self, region: S::Region, watch: S::Watch) {
        // SAFETY: the caller is the registering thread, the only one that writes the cells. No
        // thread reads them before the entry is live.
        unsafe {
            (*self.region.get()).write(region);
            (*self.watch.get()).write(watch);
        }
    }

    /// Returns the region of the registration.
    ///
    /// # Safety
    /// One of these conditions must hold while the reference is used:
    ///
    /// - The caller published a lease, then saw the entry registered, and keeps the lease.
    /// - The caller saw the entry registered under the cache's lock, and still holds the lock.
    /// - The caller owns an entry outside the table.
    #[inline(always)]
    pub(in crate::cache) unsafe fn region(&self) -> &S::Region {
        // SAFETY: the region was written before the state that the caller saw. It is not taken out
        // while the entry has a lease, the lock is held or the caller owns the entry. The caller
        // ensures one of the three.
        unsafe { (*self.region.get()).assume_init_ref() }
    }

    /// Returns the backend's watch of the registered memory.
    ///
    /// # Safety
    /// The entry must be in the table, and one of the first two conditions of [`Entry::region`]
    /// must hold.
    pub(in crate::cache) unsafe fn watch(&self) -> &S::Watch {
        // SAFETY: the watch was written and is taken out together with the region, which the caller
        // keeps in place.
        unsafe { (*self.watch.get()).assume_init_ref() }
    }

    /// Moves the region and the watch out of the entry.
    ///
    /// # Safety
    /// The entry must be registered, and its region must not have been moved out since. The entry
    /// must have no lease, and no thread may be able to publish one any more.
    pub(in crate::cache) unsafe fn take(&self) -> (S::Region, S::Watch) {
        // SAFETY: `set_registration` wrote both cells, since the entry was registered. The caller
        // guarantees that they are read out once and that no lease refers to them.
        unsafe { (self.take_region(), (*self.watch.get()).assume_init_read()) }
    }

    /// Moves the region out of the entry.
    ///
    /// # Safety
    /// For an entry in the table, the conditions of [`Entry::take`] must hold. For an entry outside
    /// the table, the caller must own the entry and call this once.
    pub(in crate::cache) unsafe fn take_region(&self) -> S::Region {
        // SAFETY: the region was written when the entry was registered or created. The caller
        // guarantees that it is read out once.
        unsafe { (*self.region.get()).assume_init_read() }
    }
}

/// Returns the time of the coarse monotonic clock in milliseconds.
pub(in crate::cache) fn now_ms() -> u64 {
    #[cfg(not(loom))]
    {
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the call writes to `now`. It cannot fail for a clock that Linux always has.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &mut now) };
        now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
    }
    #[cfg(loom)]
    0
}

//! Entries: one cached registration each, in memory that stays an entry for ever.

use std::{cell::UnsafeCell, mem::MaybeUninit};

use super::{
    Key, Source,
    arena::Zeroed,
    sync::{self, AtomicU32, AtomicU64, Ordering},
};

const PAGE: u64 = 4096;

/// Bits of the state word; above them counts the generation, one for each use of the entry.
///
/// No bit but CHECKED, WAITED and UNUSED: live, so that a lookup asks one question.
/// `IMPLEMENTATION.md` has the picture.
pub(super) mod state {
    /// Nobody's, or about to be.
    pub(in crate::cache) const FREE: u32 = 1;
    /// The provider is asked.
    pub(in crate::cache) const REGISTERING: u32 = 2;
    /// The memory changed: never a hit again. Set once in a generation, by whoever then pushes it
    /// on the dead stack.
    pub(in crate::cache) const DEAD: u32 = 4;
    /// About to be evicted, unless somebody holds a lease.
    pub(in crate::cache) const EVICTING: u32 = 8;
    /// A hit asks the source whether it still is valid.
    pub(in crate::cache) const CHECKED: u32 = 16;
    /// The registration failed: there is no region.
    pub(in crate::cache) const FAILED: u32 = 32;
    /// Somebody waits for the end of the registration.
    pub(in crate::cache) const WAITED: u32 = 64;
    /// Not hit since the hand of eviction last passed.
    pub(in crate::cache) const UNUSED: u32 = 128;
    /// The first generation.
    pub(in crate::cache) const GENERATION: u32 = 256;

    /// Whether a lookup may hit.
    #[inline(always)]
    pub(in crate::cache) const fn is_live(word: u32) -> bool {
        word & (FREE | REGISTERING | DEAD | EVICTING | FAILED) == 0
    }

    /// Whether a lookup may hit, and has nothing to do for it.
    #[inline(always)]
    pub(in crate::cache) const fn is_plain(word: u32) -> bool {
        word & (FREE | REGISTERING | DEAD | EVICTING | FAILED | CHECKED | UNUSED) == 0
    }

    /// Whether there is a region, dead or alive.
    pub(in crate::cache) const fn is_registered(word: u32) -> bool {
        word & (FREE | REGISTERING | FAILED) == 0
    }

    /// Whether a getter may wait for it.
    pub(in crate::cache) const fn is_registering(word: u32) -> bool {
        word & (REGISTERING | DEAD) == REGISTERING
    }

    /// The same use of the entry, which nobody may find any more.
    pub(in crate::cache) const fn unfindable(word: u32) -> u32 {
        word & !(GENERATION - 1) | FREE
    }

    /// The first free word of the next generation.
    pub(in crate::cache) const fn freed(word: u32) -> u32 {
        (word & !(GENERATION - 1)).wrapping_add(GENERATION) | FREE
    }
}

/// A cached registration. Everything a lookup reads lies in the first cache line.
#[repr(C, align(64))]
pub(super) struct Entry<S: Source> {
    pub(super) state: AtomicU32,
    /// The rights that it has not.
    lacks: AtomicU32,
    pub(super) start: AtomicU64,
    /// The last address.
    pub(super) last: AtomicU64,
    pub(super) owner: AtomicU64,
    pub(super) allocation: AtomicU64,
    /// The next one on the dead stack.
    pub(super) next_dead: AtomicU32,
    /// The number of the last scan that found a lease of it; numbers come round, and one that is
    /// met again keeps an entry from one eviction. Under the cache's lock.
    pub(super) leased_at: AtomicU32,
    region: UnsafeCell<MaybeUninit<S::Region>>,
    watch: UnsafeCell<MaybeUninit<S::Watch>>,
    /// When it was registered, in milliseconds of the cache's clock.
    pub(super) born: AtomicU64,
}

// SAFETY: the cells are written only by the thread that registers, before the entry is live, which
// is stored with Release, and read only by those who hold a lease and saw that with Acquire, or
// hold the cache's lock since they did, or by the one who retires the entry and whom no lease can
// be there for.
unsafe impl<S: Source> Sync for Entry<S> {}

// SAFETY: atomics of zero bytes are 0, the cells may be uninitialised, and what they hold is taken
// out before the cache goes.
unsafe impl<S: Source> Zeroed for Entry<S> {
    #[cfg(loom)]
    fn zeroed() -> Self {
        Self::holding(MaybeUninit::uninit())
    }
}

impl<S: Source> Entry<S> {
    fn holding(region: MaybeUninit<S::Region>) -> Self {
        Self {
            state: AtomicU32::new(0),
            lacks: AtomicU32::new(0),
            start: AtomicU64::new(0),
            last: AtomicU64::new(0),
            owner: AtomicU64::new(0),
            allocation: AtomicU64::new(0),
            next_dead: AtomicU32::new(0),
            leased_at: AtomicU32::new(0),
            region: UnsafeCell::new(region),
            watch: UnsafeCell::new(MaybeUninit::uninit()),
            born: AtomicU64::new(0),
        }
    }

    /// One outside the table, for a region of one lease.
    pub(super) fn of_region(region: S::Region) -> Self {
        Self::holding(MaybeUninit::new(region))
    }

    /// Whether it starts in the page in which the key does, if it is what it seems. One comparison:
    /// those of both ends would each be what no processor guesses where lookups go at random.
    #[inline(always)]
    pub(super) fn starts_near(&self, key: &Key) -> bool {
        self.start.load(Ordering::Relaxed) ^ key.start < PAGE
    }

    /// [`Entry::covers`], read plainly.
    ///
    /// # Safety
    /// The caller published a lease, and saw the entry live after that: nobody writes the fields
    /// until it is cleared.
    #[inline(always)]
    pub(super) unsafe fn leased_covers(&self, key: &Key) -> bool {
        // SAFETY: nobody writes, says the caller.
        self.covers_as_read(
            key,
            |value| unsafe { sync::settled_u64(value) },
            |value| unsafe { sync::settled_u32(value) },
        )
    }

    /// Whether it is of the key's memory, with at least its rights and its identity.
    #[inline(always)]
    pub(super) fn covers(&self, key: &Key) -> bool {
        self.covers_as_read(
            key,
            |value| value.load(Ordering::Relaxed),
            |value| value.load(Ordering::Relaxed),
        )
    }

    #[inline(always)]
    fn covers_as_read(
        &self,
        key: &Key,
        read: impl Fn(&AtomicU64) -> u64,
        read_rights: impl Fn(&AtomicU32) -> u32,
    ) -> bool {
        read_rights(&self.lacks) & key.access == 0
            && read(&self.start) <= key.start
            && key.last <= read(&self.last)
            && (key.exact == 0
                || read(&self.owner) == key.owner && read(&self.allocation) == key.allocation)
    }

    /// Notes a use for eviction: written once between two passes of its hand.
    pub(super) fn mark_used(&self, word: u32) {
        if word & state::UNUSED != 0 {
            self.state.fetch_and(!state::UNUSED, Ordering::Relaxed);
        }
    }

    pub(super) fn overlaps(&self, start: u64, last: u64) -> bool {
        self.start.load(Ordering::Relaxed) <= last && start <= self.last.load(Ordering::Relaxed)
    }

    /// First and last address.
    #[inline]
    pub(super) fn bounds(&self) -> (u64, u64) {
        (self.start.load(Ordering::Relaxed), self.last.load(Ordering::Relaxed))
    }

    pub(super) fn len(&self) -> u64 {
        let (start, last) = self.bounds();
        last - start + 1
    }

    /// What it was registered for.
    pub(super) fn key(&self) -> Key {
        Key {
            start: self.start.load(Ordering::Relaxed),
            last: self.last.load(Ordering::Relaxed),
            access: !self.lacks.load(Ordering::Relaxed),
            owner: self.owner.load(Ordering::Relaxed),
            allocation: self.allocation.load(Ordering::Relaxed),
            exact: u64::MAX,
        }
    }

    /// Starts a use of a free entry.
    pub(super) fn fill(&self, key: &Key) {
        self.start.store(key.start, Ordering::Relaxed);
        self.last.store(key.last, Ordering::Relaxed);
        self.owner.store(key.owner, Ordering::Relaxed);
        self.allocation.store(key.allocation, Ordering::Relaxed);
        self.lacks.store(!key.access, Ordering::Relaxed);
        self.leased_at.store(0, Ordering::Relaxed);
        let word = self.state.load(Ordering::Relaxed);
        let word = word & !state::FREE | state::REGISTERING | state::UNUSED;
        self.state.store(word, Ordering::Release);
    }

    /// Ends a use.
    pub(super) fn free(&self) {
        let word = self.state.load(Ordering::Relaxed);
        self.state.store(state::freed(word), Ordering::Release);
    }

    /// Marks it dead if it is in use, was not dead, and overlaps; `true` if this call did it.
    pub(super) fn kill(&self, overlaps: impl Fn(&Self) -> bool) -> bool {
        let mut word = self.state.load(Ordering::Acquire);
        loop {
            if word & (state::FREE | state::DEAD | state::FAILED) != 0 || !overlaps(self) {
                return false;
            }
            // A success says that nothing that was looked at changed hands meanwhile: the
            // generation is in the word.
            let (ok, seen) = (Ordering::SeqCst, Ordering::Acquire);
            match self.state.compare_exchange_weak(word, word | state::DEAD, ok, seen) {
                Ok(_) => return true,
                Err(now) => word = now,
            }
        }
    }

    /// Keeps the region and what watches it.
    ///
    /// # Safety
    /// Only by the thread that registers this entry, once, before it ends the registration.
    pub(super) unsafe fn put(&self, region: S::Region, watch: S::Watch) {
        // SAFETY: nobody reads the cells before the entry is live, and nobody else writes them,
        // says the caller.
        unsafe {
            (*self.region.get()).write(region);
            (*self.watch.get()).write(watch);
        }
    }

    /// The region.
    ///
    /// # Safety
    /// The caller holds a lease published before it saw the entry registered, or the cache's lock
    /// since it did, or it is the owner of an entry outside the table.
    #[inline(always)]
    pub(super) unsafe fn region(&self) -> &S::Region {
        // SAFETY: it was written before the state that the caller saw, and is not taken while there
        // is a lease or the lock is held.
        unsafe { (*self.region.get()).assume_init_ref() }
    }

    /// What watches it.
    ///
    /// # Safety
    /// As [`Entry::region`].
    pub(super) unsafe fn watch(&self) -> &S::Watch {
        // SAFETY: as for the region.
        unsafe { (*self.watch.get()).assume_init_ref() }
    }

    /// Takes both out.
    ///
    /// # Safety
    /// The entry was registered and not taken from in this use, and no lease of it is left or can
    /// be published any more.
    pub(super) unsafe fn take(&self) -> (S::Region, S::Watch) {
        // SAFETY: both were written by `put`, says the caller, and are read out once.
        unsafe { (self.take_region(), (*self.watch.get()).assume_init_read()) }
    }

    /// Takes the region out.
    ///
    /// # Safety
    /// As [`Entry::take`], or by the owner of an entry outside the table; once.
    pub(super) unsafe fn take_region(&self) -> S::Region {
        // SAFETY: it was written, and is read out once, says the caller.
        unsafe { (*self.region.get()).assume_init_read() }
    }
}

//! The invalidations in progress. A registration that overlaps one of them is invalidated at once.

use super::sync::{AtomicU32, AtomicU64, Ordering};
use crate::monitor::{InvalidationCause, InvalidationToken};

/// The number of own slots, which an invalidation claims with one exchange.
#[cfg(not(loom))]
const OWN: usize = 4;
#[cfg(loom)]
const OWN: usize = 1;

/// The number of shared slots, for invalidations that found their own slot claimed.
#[cfg(not(loom))]
const SHARED: usize = 64;
#[cfg(loom)]
const SHARED: usize = 2;

/// The token of an invalidation that found no free slot.
const NO_SLOT: u32 = u32::MAX;

/// A range that is being invalidated. A claimed slot covers all addresses until its range is
/// written.
#[repr(align(64))]
#[derive(Debug)]
struct InvalidationSlot {
    start: AtomicU64,
    last: AtomicU64,
    cause: AtomicU32,
    /// 1 while the slot is claimed, if it is an own slot. For a shared slot, a bit of `taken` says
    /// this instead.
    claimed: AtomicU32,
}

impl InvalidationSlot {
    fn new() -> Self {
        Self {
            start: AtomicU64::new(0),
            last: AtomicU64::new(u64::MAX),
            cause: AtomicU32::new(0),
            claimed: AtomicU32::new(0),
        }
    }

    /// Claims the slot for the caller. Returns `false` if it is claimed already.
    #[inline(always)]
    fn claim(&self) -> bool {
        self.claimed.load(Ordering::Relaxed) == 0
            && self.claimed.compare_exchange(0, 1, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    #[inline(always)]
    fn set_range(&self, start: u64, last: u64, cause: InvalidationCause) {
        self.cause.store(cause as u32, Ordering::Relaxed);
        self.start.store(start, Ordering::Relaxed);
        self.last.store(last, Ordering::Release);
    }

    #[inline(always)]
    fn reset_range(&self) {
        self.start.store(0, Ordering::Relaxed);
        self.last.store(u64::MAX, Ordering::Relaxed);
    }

    /// Returns the cause if the slot's range overlaps this one.
    fn overlapping(&self, start: u64, last: u64) -> Option<InvalidationCause> {
        // Until its range is written, a slot covers all addresses.
        let other_last = self.last.load(Ordering::Acquire);
        let other_start = self.start.load(Ordering::Relaxed);
        (other_last == u64::MAX || (start <= other_last && other_start <= last)).then(|| {
            let cause = self.cause.load(Ordering::Relaxed);
            InvalidationCause::ALL[cause as usize % InvalidationCause::ALL.len()]
        })
    }
}

/// The ranges that are being invalidated, in a fixed number of slots.
///
/// A thread that invalidates a range claims its preferred slot. If another invalidation has claimed
/// that slot, the thread takes a shared slot by setting its bit. Without either the invalidation
/// counts as one of all memory.
///
/// A plain store releases a preferred slot. A shared slot needs an atomic exchange, which stalls
/// after a system call.
#[derive(Debug)]
pub(super) struct ActiveInvalidations {
    own: [InvalidationSlot; OWN],
    taken: AtomicU64,
    without_slot: AtomicU32,
    shared: [InvalidationSlot; SHARED],
}

impl ActiveInvalidations {
    pub(super) fn new() -> Self {
        Self {
            own: std::array::from_fn(|_| InvalidationSlot::new()),
            taken: AtomicU64::new(0),
            without_slot: AtomicU32::new(0),
            shared: std::array::from_fn(|_| InvalidationSlot::new()),
        }
    }

    /// Publishes a range. The exchange that takes the slot publishes all addresses, then stores
    /// narrow them to the range. The caller then fences and looks for entries.
    #[inline]
    pub(super) fn begin(
        &self,
        start: u64,
        last: u64,
        cause: InvalidationCause,
    ) -> InvalidationToken {
        let here = 0_u8;
        // The stack's address spreads threads over the slots. A model must take the same slot each
        // time.
        let stack = if cfg!(loom) { 0 } else { std::ptr::from_ref(&here).addr() >> 12 };
        let own = stack % OWN;
        if self.own[own].claim() {
            self.own[own].set_range(start, last, cause);
            return InvalidationToken((SHARED + own) as u32);
        }
        self.begin_shared(stack % SHARED, start, last, cause)
    }

    #[cold]
    #[inline(never)]
    fn begin_shared(
        &self,
        from: usize,
        start: u64,
        last: u64,
        cause: InvalidationCause,
    ) -> InvalidationToken {
        let mut taken = self.taken.load(Ordering::Relaxed);
        loop {
            let free = !taken & (u64::MAX >> (64 - SHARED));
            if free == 0 {
                self.without_slot.fetch_add(1, Ordering::SeqCst);
                return InvalidationToken(NO_SLOT);
            }
            let later = free & (u64::MAX << from);
            let slot = (if later != 0 { later } else { free }).trailing_zeros();
            let (ok, seen) = (Ordering::SeqCst, Ordering::Relaxed);
            match self.taken.compare_exchange_weak(taken, taken | 1 << slot, ok, seen) {
                Ok(_) => {
                    self.shared[slot as usize].set_range(start, last, cause);
                    return InvalidationToken(slot);
                }
                Err(now) => taken = now,
            }
        }
    }

    /// Ends an invalidation: withdraws its range and releases its slot.
    #[inline]
    pub(super) fn end(&self, change: &InvalidationToken) {
        match self.own.get((change.0 as usize).wrapping_sub(SHARED)) {
            Some(own) => {
                own.reset_range();
                own.claimed.store(0, Ordering::Release);
            }
            None => self.end_shared(change),
        }
    }

    #[cold]
    #[inline(never)]
    fn end_shared(&self, change: &InvalidationToken) {
        if change.0 == NO_SLOT {
            self.without_slot.fetch_sub(1, Ordering::Release);
        } else if let Some(slot) = self.shared.get(change.0 as usize) {
            slot.reset_range();
            self.taken.fetch_and(!(1 << change.0), Ordering::Release);
        }
    }

    /// Returns the cause of an invalidation in progress that overlaps this range. The caller has
    /// put its entry into the table, where invalidations look, and fenced.
    #[inline]
    pub(super) fn overlapping(&self, start: u64, last: u64) -> Option<InvalidationCause> {
        let claimed = self.own.iter().fold(0, |any, own| any | own.claimed.load(Ordering::Acquire));
        let shared = self.taken.load(Ordering::Acquire);
        let without_slot = self.without_slot.load(Ordering::Acquire);
        if claimed == 0 && shared == 0 && without_slot == 0 {
            return None;
        }
        self.find_overlapping(start, last)
    }

    #[cold]
    #[inline(never)]
    fn find_overlapping(&self, start: u64, last: u64) -> Option<InvalidationCause> {
        if self.without_slot.load(Ordering::Acquire) != 0 {
            return Some(InvalidationCause::Unmap);
        }
        let own = self.own.iter().filter(|own| own.claimed.load(Ordering::Acquire) != 0);
        let taken = self.taken.load(Ordering::Acquire);
        let shared = self.shared.iter().enumerate().filter(|(at, _)| taken & 1 << at != 0);
        own.chain(shared.map(|(_, slot)| slot)).find_map(|slot| slot.overlapping(start, last))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// CACHE-09
    ///
    /// A processor may show the exchange that claims a slot before the stores of its range. In
    /// between, the slot must not stand for the range of the invalidation before.
    #[test]
    fn reclaimed_slot_covers_all_addresses_until_its_range_is_written() {
        let active = ActiveInvalidations::new();
        let (start, last) = (0x1000, 0x1fff);
        let mut begun = Vec::new();
        for own in &active.own {
            assert!(own.claim());
            own.set_range(start, last, InvalidationCause::Replace);
        }
        begun.extend((0..OWN).map(|own| InvalidationToken((SHARED + own) as u32)));
        // All own slots are claimed, so that these take shared ones.
        begun.extend((0..SHARED).map(|_| active.begin(start, last, InvalidationCause::Replace)));
        assert_eq!(active.overlapping(start, start), Some(InvalidationCause::Replace));
        assert_eq!(active.overlapping(last + 1, u64::MAX - 1), None);
        begun.iter().for_each(|change| active.end(change));
        assert_eq!(active.overlapping(0, u64::MAX), None);

        for (number, own) in active.own.iter().enumerate() {
            assert!(own.claim());
            assert!(active.overlapping(last + 1, last + 1).is_some(), "own slot {number}");
            active.end(&InvalidationToken((SHARED + number) as u32));
        }
        for number in 0..SHARED {
            active.taken.store(1 << number, Ordering::SeqCst);
            assert!(active.overlapping(last + 1, last + 1).is_some(), "shared slot {number}");
            active.end(&InvalidationToken(number as u32));
        }
        assert_eq!(active.overlapping(0, u64::MAX), None);
    }
}

//! The invalidations in progress. A new entry that overlaps one of them is invalidated at once.

use super::sync::{AtomicU32, AtomicU64, Ordering};
use crate::monitor::InvalidationCause;

/// The number of preferred slots. An invalidation claims such a slot with one atomic exchange.
#[cfg(not(loom))]
const PREFERRED: usize = 4;
#[cfg(loom)]
const PREFERRED: usize = 1;

/// The number of overflow slots, for invalidations that found their preferred slot claimed.
#[cfg(not(loom))]
const OVERFLOW: usize = 64;
#[cfg(loom)]
const OVERFLOW: usize = 2;

/// The slot number of an invalidation that found no free slot.
const NO_SLOT: u32 = u32::MAX;

/// A slot for the range of an invalidation in progress. Until the range is written, a claimed slot
/// stands for all addresses.
#[repr(align(64))]
#[derive(Debug)]
struct InvalidationSlot {
    /// The first address of the range, or 0 if no range is written.
    start: AtomicU64,
    /// The last address of the range, or `u64::MAX` if no range is written.
    last: AtomicU64,
    /// The position of the cause in [`InvalidationCause::ALL`].
    cause: AtomicU32,
    /// 1 while the slot is claimed. Used only in a preferred slot: the bits of `overflow_claimed`
    /// show which overflow slots are claimed.
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

    /// Claims the slot for the caller. Returns `false` if another invalidation has claimed it.
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

    /// Returns the cause of the slot's invalidation if the slot's range overlaps the addresses from
    /// `start` to `last`. Treats a slot whose last address is `u64::MAX` as one for all addresses.
    fn overlapping(&self, start: u64, last: u64) -> Option<InvalidationCause> {
        let other_last = self.last.load(Ordering::Acquire);
        let other_start = self.start.load(Ordering::Relaxed);
        (other_last == u64::MAX || (start <= other_last && other_start <= last)).then(|| {
            let cause = self.cause.load(Ordering::Relaxed);
            InvalidationCause::ALL[cause as usize % InvalidationCause::ALL.len()]
        })
    }
}

/// The ranges of the invalidations in progress, in a fixed number of slots.
///
/// An invalidation claims the preferred slot of its thread, which the address of the thread's stack
/// selects. If that slot is claimed already, the invalidation claims an overflow slot. If no slot
/// is free, the invalidation counts as one of all memory.
///
/// A preferred slot is released by a plain store. An overflow slot needs an atomic exchange, which
/// is slow just after a system call such as `munmap`.
#[derive(Debug)]
pub(super) struct ActiveInvalidations {
    preferred: [InvalidationSlot; PREFERRED],
    /// A bit for each slot of `overflow`, set while an invalidation has claimed the slot.
    overflow_claimed: AtomicU64,
    /// The number of invalidations in progress that found no free slot.
    without_slot: AtomicU32,
    overflow: [InvalidationSlot; OVERFLOW],
}

impl ActiveInvalidations {
    pub(super) fn new() -> Self {
        Self {
            preferred: std::array::from_fn(|_| InvalidationSlot::new()),
            overflow_claimed: AtomicU64::new(0),
            without_slot: AtomicU32::new(0),
            overflow: std::array::from_fn(|_| InvalidationSlot::new()),
        }
    }

    /// Begins an invalidation of the addresses from `start` to `last`, and returns the number of
    /// its slot. The caller must then issue a fence, invalidate the entries that overlap these
    /// addresses, and call [`ActiveInvalidations::end`] once.
    ///
    /// A slot stands for all addresses from the moment in which it is claimed. The stores after
    /// that narrow it to the range.
    #[inline]
    pub(super) fn begin(&self, start: u64, last: u64, cause: InvalidationCause) -> u32 {
        let here = 0_u8;
        // Each thread has its own stack, so the address distributes threads over the slots. Loom's
        // models need the same slot in each execution.
        let stack = if cfg!(loom) { 0 } else { std::ptr::from_ref(&here).addr() >> 12 };
        let preferred = stack % PREFERRED;
        if self.preferred[preferred].claim() {
            self.preferred[preferred].set_range(start, last, cause);
            return (OVERFLOW + preferred) as u32;
        }
        self.begin_in_overflow(stack % OVERFLOW, start, last, cause)
    }

    /// Begins an invalidation in the first free overflow slot from slot `from` on.
    #[cold]
    #[inline(never)]
    fn begin_in_overflow(
        &self,
        from: usize,
        start: u64,
        last: u64,
        cause: InvalidationCause,
    ) -> u32 {
        let mut slot = 0;
        let claim = |claimed: u64| {
            let free = !claimed & (u64::MAX >> (64 - OVERFLOW));
            let later = free & (u64::MAX << from);
            slot = (if later != 0 { later } else { free }).trailing_zeros();
            (free != 0).then(|| claimed | 1 << slot)
        };
        let (ok, seen) = (Ordering::SeqCst, Ordering::Relaxed);
        if self.overflow_claimed.fetch_update(ok, seen, claim).is_err() {
            self.without_slot.fetch_add(1, Ordering::SeqCst);
            return NO_SLOT;
        }
        self.overflow[slot as usize].set_range(start, last, cause);
        slot
    }

    /// Ends the invalidation in `slot`: clears its range and releases the slot.
    #[inline]
    pub(super) fn end(&self, slot: u32) {
        match self.preferred.get((slot as usize).wrapping_sub(OVERFLOW)) {
            Some(preferred) => {
                preferred.reset_range();
                preferred.claimed.store(0, Ordering::Release);
            }
            None => self.end_in_overflow(slot),
        }
    }

    #[cold]
    #[inline(never)]
    fn end_in_overflow(&self, number: u32) {
        if number == NO_SLOT {
            self.without_slot.fetch_sub(1, Ordering::Release);
        } else if let Some(slot) = self.overflow.get(number as usize) {
            slot.reset_range();
            self.overflow_claimed.fetch_and(!(1 << number), Ordering::Release);
        }
    }

    /// Returns the cause of an invalidation in progress that overlaps the addresses from `start` to
    /// `last`, or `None`. Returns `Unmap` while an invalidation without a slot is in progress.
    ///
    /// The registering thread calls this for its new entry. Before the call, the thread must insert
    /// the entry into the table, where later invalidations find it, and issue a fence.
    #[inline]
    pub(super) fn overlapping(&self, start: u64, last: u64) -> Option<InvalidationCause> {
        let claimed = self
            .preferred
            .iter()
            .fold(0, |any, preferred| any | preferred.claimed.load(Ordering::Acquire));
        let overflow = self.overflow_claimed.load(Ordering::Acquire);
        let without_slot = self.without_slot.load(Ordering::Acquire);
        if claimed == 0 && overflow == 0 && without_slot == 0 {
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
        let preferred = self
            .preferred
            .iter()
            .filter(|preferred| preferred.claimed.load(Ordering::Acquire) != 0);
        let overflow_claimed = self.overflow_claimed.load(Ordering::Acquire);
        let overflow =
            self.overflow.iter().enumerate().filter(|(at, _)| overflow_claimed & 1 << at != 0);
        preferred
            .chain(overflow.map(|(_, slot)| slot))
            .find_map(|slot| slot.overlapping(start, last))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// CACHE-09: a slot that is claimed again covers all addresses until its new range is written.
    /// Another processor may see that the slot is claimed before it sees the range. Until then the
    /// slot must not show the range of an earlier invalidation.
    #[test]
    fn reclaimed_slot_covers_all_addresses_until_its_range_is_written() {
        let active = ActiveInvalidations::new();
        let (start, last) = (0x1000, 0x1fff);
        let mut begun = Vec::new();
        for preferred in &active.preferred {
            assert!(preferred.claim());
            preferred.set_range(start, last, InvalidationCause::Replace);
        }
        begun.extend((0..PREFERRED).map(|preferred| (OVERFLOW + preferred) as u32));
        // All preferred slots are claimed, so these invalidations claim overflow slots.
        begun.extend((0..OVERFLOW).map(|_| active.begin(start, last, InvalidationCause::Replace)));
        assert_eq!(active.overlapping(start, start), Some(InvalidationCause::Replace));
        assert_eq!(active.overlapping(last, last), Some(InvalidationCause::Replace));
        assert_eq!(active.overlapping(last + 1, u64::MAX - 1), None);
        begun.into_iter().for_each(|slot| active.end(slot));
        assert_eq!(active.overlapping(0, u64::MAX), None);

        for (number, preferred) in active.preferred.iter().enumerate() {
            assert!(preferred.claim());
            assert!(active.overlapping(last + 1, last + 1).is_some(), "preferred slot {number}");
            active.end((OVERFLOW + number) as u32);
        }
        for number in 0..OVERFLOW {
            active.overflow_claimed.store(1 << number, Ordering::SeqCst);
            assert!(active.overlapping(last + 1, last + 1).is_some(), "overflow slot {number}");
            active.end(number as u32);
        }
        assert_eq!(active.overlapping(0, u64::MAX), None);
    }
}

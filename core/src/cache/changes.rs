//! Changes of memory that are under way, for whoever would register in the middle of one.

use super::sync::{AtomicU32, AtomicU64, Ordering};
use crate::monitor::{Cause, Change};

/// Places that a change claims for itself.
#[cfg(not(loom))]
const OWN: usize = 4;
#[cfg(loom)]
const OWN: usize = 1;

/// Places for those that found theirs claimed.
#[cfg(not(loom))]
const SHARED: usize = 64;
#[cfg(loom)]
const SHARED: usize = 2;

/// What [`Change`] says of a change that found no place.
const NO_PLACE: u32 = u32::MAX;

/// A range that changes, or all addresses until it is said which.
#[repr(align(64))]
#[derive(Debug)]
struct Place {
    start: AtomicU64,
    last: AtomicU64,
    cause: AtomicU32,
    /// Of a place that is claimed: 0 or 1.
    claimed: AtomicU32,
}

impl Place {
    fn new() -> Self {
        Self {
            start: AtomicU64::new(0),
            last: AtomicU64::new(u64::MAX),
            cause: AtomicU32::new(0),
            claimed: AtomicU32::new(0),
        }
    }

    /// Makes it the caller's, if it is nobody's.
    #[inline(always)]
    fn claim(&self) -> bool {
        self.claimed.load(Ordering::Relaxed) == 0
            && self.claimed.compare_exchange(0, 1, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    #[inline(always)]
    fn say(&self, start: u64, last: u64, cause: Cause) {
        self.cause.store(cause as u32, Ordering::Relaxed);
        self.start.store(start, Ordering::Relaxed);
        self.last.store(last, Ordering::Release);
    }

    #[inline(always)]
    fn unsay(&self) {
        self.start.store(0, Ordering::Relaxed);
        self.last.store(u64::MAX, Ordering::Relaxed);
    }

    /// Why memory of this range changes, if the place's touches it.
    fn touching(&self, start: u64, last: u64) -> Option<Cause> {
        // Until its range is said, a place stands for all addresses.
        let other_last = self.last.load(Ordering::Acquire);
        let other_start = self.start.load(Ordering::Relaxed);
        (other_last == u64::MAX || (start <= other_last && other_start <= last)).then(|| {
            let cause = self.cause.load(Ordering::Relaxed);
            Cause::ALL[cause as usize % Cause::ALL.len()]
        })
    }
}

/// A fixed number of ranges, published by claiming a place or by taking a bit; what finds neither
/// counts as a change of everything.
///
/// A place that is claimed is let go by a store. To let go of a bit takes an exchange, which waits
/// long where it comes after a system call: changes have bits only where others were before them.
#[derive(Debug)]
pub(super) struct Changes {
    own: [Place; OWN],
    taken: AtomicU64,
    unplaced: AtomicU32,
    shared: [Place; SHARED],
}

impl Changes {
    pub(super) fn new() -> Self {
        Self {
            own: std::array::from_fn(|_| Place::new()),
            taken: AtomicU64::new(0),
            unplaced: AtomicU32::new(0),
            shared: std::array::from_fn(|_| Place::new()),
        }
    }

    /// Publishes a range: with the exchange that takes the place, at first for all addresses. The
    /// caller then fences and looks for entries.
    #[inline]
    pub(super) fn begin(&self, start: u64, last: u64, cause: Cause) -> Change {
        let here = 0_u8;
        // Threads look from different places on, by where their stacks are; a model must take the
        // same place each time.
        let stack = if cfg!(loom) { 0 } else { std::ptr::from_ref(&here).addr() >> 12 };
        let own = stack % OWN;
        if self.own[own].claim() {
            self.own[own].say(start, last, cause);
            return Change((SHARED + own) as u32);
        }
        self.begin_shared(stack % SHARED, start, last, cause)
    }

    #[cold]
    #[inline(never)]
    fn begin_shared(&self, from: usize, start: u64, last: u64, cause: Cause) -> Change {
        let mut taken = self.taken.load(Ordering::Relaxed);
        loop {
            let free = !taken & (u64::MAX >> (64 - SHARED));
            if free == 0 {
                self.unplaced.fetch_add(1, Ordering::SeqCst);
                return Change(NO_PLACE);
            }
            let later = free & (u64::MAX << from);
            let place = (if later != 0 { later } else { free }).trailing_zeros();
            let (ok, seen) = (Ordering::SeqCst, Ordering::Relaxed);
            match self.taken.compare_exchange_weak(taken, taken | 1 << place, ok, seen) {
                Ok(_) => {
                    self.shared[place as usize].say(start, last, cause);
                    return Change(place);
                }
                Err(now) => taken = now,
            }
        }
    }

    /// Takes a range back.
    #[inline]
    pub(super) fn end(&self, change: &Change) {
        match self.own.get((change.0 as usize).wrapping_sub(SHARED)) {
            Some(own) => {
                own.unsay();
                own.claimed.store(0, Ordering::Release);
            }
            None => self.end_shared(change),
        }
    }

    #[cold]
    #[inline(never)]
    fn end_shared(&self, change: &Change) {
        if change.0 == NO_PLACE {
            self.unplaced.fetch_sub(1, Ordering::Release);
        } else if let Some(place) = self.shared.get(change.0 as usize) {
            place.unsay();
            self.taken.fetch_and(!(1 << change.0), Ordering::Release);
        }
    }

    /// Why memory of this range changes, if a published range touches it. The caller has put its
    /// entry where changes look, and fenced.
    #[inline]
    pub(super) fn touching(&self, start: u64, last: u64) -> Option<Cause> {
        let claimed = self.own.iter().fold(0, |any, own| any | own.claimed.load(Ordering::Acquire));
        let shared = self.taken.load(Ordering::Acquire);
        let unplaced = self.unplaced.load(Ordering::Acquire);
        if claimed == 0 && shared == 0 && unplaced == 0 {
            return None;
        }
        self.touching_one(start, last)
    }

    #[cold]
    #[inline(never)]
    fn touching_one(&self, start: u64, last: u64) -> Option<Cause> {
        if self.unplaced.load(Ordering::Acquire) != 0 {
            return Some(Cause::Unmap);
        }
        let own = self.own.iter().filter(|own| own.claimed.load(Ordering::Acquire) != 0);
        let taken = self.taken.load(Ordering::Acquire);
        let shared = self.shared.iter().enumerate().filter(|(at, _)| taken & 1 << at != 0);
        own.chain(shared.map(|(_, place)| place)).find_map(|place| place.touching(start, last))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// CACHE-09
    ///
    /// A processor may show the exchange that claims a place before the stores of its range: in
    /// between, the place must not stand for the range of the change before.
    #[test]
    fn a_place_that_is_claimed_again_stands_for_all_addresses_until_its_range_is_there() {
        let changes = Changes::new();
        let (start, last) = (0x1000, 0x1fff);
        let mut begun = Vec::new();
        for own in &changes.own {
            assert!(own.claim());
            own.say(start, last, Cause::Replace);
        }
        begun.extend((0..OWN).map(|own| Change((SHARED + own) as u32)));
        // None of its own is left, so that these share.
        begun.extend((0..SHARED).map(|_| changes.begin(start, last, Cause::Replace)));
        assert_eq!(changes.touching(start, start), Some(Cause::Replace));
        assert_eq!(changes.touching(last + 1, u64::MAX - 1), None);
        begun.iter().for_each(|change| changes.end(change));
        assert_eq!(changes.touching(0, u64::MAX), None);

        for (number, own) in changes.own.iter().enumerate() {
            assert!(own.claim());
            assert!(changes.touching(last + 1, last + 1).is_some(), "own place {number}");
            changes.end(&Change((SHARED + number) as u32));
        }
        for number in 0..SHARED {
            changes.taken.store(1 << number, Ordering::SeqCst);
            assert!(changes.touching(last + 1, last + 1).is_some(), "shared place {number}");
            changes.end(&Change(number as u32));
        }
        assert_eq!(changes.touching(0, u64::MAX), None);
    }
}

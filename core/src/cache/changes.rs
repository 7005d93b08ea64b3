//! Changes of memory that are under way, for whoever would register in the middle of one.

use super::sync::{AtomicU32, AtomicU64, Ordering};
use crate::monitor::{Cause, Change};

#[cfg(not(loom))]
const PLACES: usize = 64;
#[cfg(loom)]
const PLACES: usize = 2;

/// What [`Change`] says of a change that found no place.
const NO_PLACE: u32 = u32::MAX;

#[repr(align(64))]
#[derive(Debug)]
struct Place {
    start: AtomicU64,
    last: AtomicU64,
    cause: AtomicU32,
}

/// A fixed number of ranges, published by taking a bit; what finds no bit counts as a change of everything.
#[derive(Debug)]
pub(super) struct Changes {
    taken: AtomicU64,
    unplaced: AtomicU32,
    places: [Place; PLACES],
}

impl Changes {
    pub(super) fn new() -> Self {
        Self {
            taken: AtomicU64::new(0),
            unplaced: AtomicU32::new(0),
            places: std::array::from_fn(|_| Place {
                start: AtomicU64::new(0),
                last: AtomicU64::new(u64::MAX),
                cause: AtomicU32::new(0),
            }),
        }
    }

    /// Publishes a range: with the exchange that takes the place, at first for all addresses. The caller then fences and looks
    /// for entries.
    pub(super) fn begin(&self, start: u64, last: u64, cause: Cause) -> Change {
        let mut taken = self.taken.load(Ordering::Relaxed);
        loop {
            // Threads look from different places on, by where their stacks are.
            #[cfg(not(loom))]
            let from = (std::ptr::from_ref(&taken).addr() >> 12) as u32 % PLACES as u32;
            // A model must take the same place each time.
            #[cfg(loom)]
            let from = 0;
            let free = !taken & (u64::MAX >> (64 - PLACES));
            if free == 0 {
                self.unplaced.fetch_add(1, Ordering::SeqCst);
                return Change(NO_PLACE);
            }
            let later = free & (u64::MAX << from);
            let place = (if later != 0 { later } else { free }).trailing_zeros();
            let (ok, seen) = (Ordering::SeqCst, Ordering::Relaxed);
            match self.taken.compare_exchange_weak(taken, taken | 1 << place, ok, seen) {
                Ok(_) => {
                    let taken = &self.places[place as usize];
                    taken.cause.store(cause as u32, Ordering::Relaxed);
                    taken.start.store(start, Ordering::Relaxed);
                    taken.last.store(last, Ordering::Release);
                    return Change(place);
                }
                Err(now) => taken = now,
            }
        }
    }

    /// Takes a range back.
    pub(super) fn end(&self, change: &Change) {
        if change.0 == NO_PLACE {
            self.unplaced.fetch_sub(1, Ordering::Release);
        } else if let Some(place) = self.places.get(change.0 as usize) {
            place.start.store(0, Ordering::Relaxed);
            place.last.store(u64::MAX, Ordering::Relaxed);
            self.taken.fetch_and(!(1 << change.0), Ordering::Release);
        }
    }

    /// Why memory of this range changes, if a published range touches it. The caller has put its entry where changes
    /// look, and fenced.
    pub(super) fn touching(&self, start: u64, last: u64) -> Option<Cause> {
        if self.unplaced.load(Ordering::Acquire) != 0 {
            return Some(Cause::Unmap);
        }
        let mut taken = self.taken.load(Ordering::Acquire);
        while taken != 0 {
            let place = &self.places[taken.trailing_zeros() as usize];
            // Until its range is said, a place stands for all addresses.
            let other_last = place.last.load(Ordering::Acquire);
            let other_start = place.start.load(Ordering::Relaxed);
            if other_last == u64::MAX || (start <= other_last && other_start <= last) {
                let cause = place.cause.load(Ordering::Relaxed);
                return Some(Cause::ALL[cause as usize % Cause::ALL.len()]);
            }
            taken &= taken - 1;
        }
        None
    }
}

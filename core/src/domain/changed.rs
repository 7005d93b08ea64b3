//! The addresses whose memory changed, as monitors report them.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    thread::Thread,
};

use crate::{
    AddressRange,
    monitor::{GateToken, InvalidationCause, InvalidationToken, Invalidator},
};

/// The largest number of units, and so of bits, of a [`ChangedAddresses`].
const MAX_UNITS: u64 = 1 << 16;

/// The addresses of a range whose memory changed since the last call of
/// [`ChangedAddresses::take`].
///
/// The range is divided into units with one bit each, so that a notification needs no lock and no
/// memory. A change marks all units that it touches: memory in the same unit counts as changed too.
#[derive(Debug)]
pub(super) struct ChangedAddresses {
    range: AddressRange,
    /// The base-2 logarithm of the length of a unit. A unit is at least a page.
    unit_shift: u32,
    bits: Box<[AtomicU64]>,
    /// The thread that is woken after a change. [`ChangedAddresses::set_worker`] sets it.
    worker: OnceLock<Thread>,
}

impl ChangedAddresses {
    /// Creates a `ChangedAddresses` for `range`, which has at least one byte. No unit is marked.
    pub(super) fn new(range: AddressRange) -> Self {
        let page = rustix::param::page_size().trailing_zeros();
        let units = |shift: u32| ((range.len() - 1) >> shift) + 1;
        let unit_shift = (page..u64::BITS).find(|shift| units(*shift) <= MAX_UNITS).unwrap_or(63);
        let words = units(unit_shift).div_ceil(64);
        let bits = (0..words).map(|_| AtomicU64::new(0)).collect();
        Self { range, unit_shift, bits, worker: OnceLock::new() }
    }

    /// Sets the thread to wake. Later calls have no effect.
    pub(super) fn set_worker(&self, worker: Thread) {
        self.worker.get_or_init(|| worker);
    }

    /// Returns the first and the last unit that `range` touches.
    fn units(&self, range: AddressRange) -> Option<(u64, u64)> {
        let part = self.range.intersection(range)?;
        let first = part.start().0 - self.range.start().0;
        Some((first >> self.unit_shift, (first + part.len() - 1) >> self.unit_shift))
    }

    fn mark(&self, range: AddressRange) {
        let Some((first, last)) = self.units(range) else { return };
        let mut is_news = false;
        for word in first / 64..=last / 64 {
            let bits = word_mask(word, first, last);
            let before = self.bits[word as usize].fetch_or(bits, Ordering::AcqRel);
            is_news |= before & bits != bits;
        }
        if is_news && let Some(worker) = self.worker.get() {
            worker.unpark();
        }
    }

    /// Returns the marked units, and removes all marks.
    pub(super) fn take(&self) -> TakenChanges<'_> {
        let take = |word: &AtomicU64| match word.load(Ordering::Acquire) {
            0 => 0,
            _ => word.swap(0, Ordering::AcqRel),
        };
        TakenChanges { of: self, bits: self.bits.iter().map(take).collect() }
    }
}

/// Returns the bits of a word that stand for the units `first` to `last`.
const fn word_mask(word: u64, first: u64, last: u64) -> u64 {
    let from = if word == first / 64 { first % 64 } else { 0 };
    let to = if word == last / 64 { last % 64 } else { 63 };
    (u64::MAX << from) & (u64::MAX >> (63 - to))
}

impl Invalidator for ChangedAddresses {
    fn invalidate(&self, range: AddressRange, _: InvalidationCause) {
        self.mark(range);
    }

    fn invalidate_start(&self, range: AddressRange, _: InvalidationCause) -> InvalidationToken {
        self.mark(range);
        InvalidationToken::unnumbered()
    }

    /// Does nothing, because a new registration cannot miss a change in progress: its subscription
    /// begins before the memory is registered, and the monitor notifies the subscription of the
    /// change.
    fn invalidate_end(&self, _: InvalidationToken) {}

    /// Does nothing. The monitor calls `invalidate` or `invalidate_start` once the addresses of the
    /// change are known, and these methods mark the change.
    fn close_gate(&self) -> GateToken {
        GateToken::unnumbered()
    }

    fn open_gate(&self, _: GateToken) {}
}

/// The changes that [`ChangedAddresses::take`] removed.
pub(super) struct TakenChanges<'a> {
    of: &'a ChangedAddresses,
    bits: Box<[u64]>,
}

impl TakenChanges<'_> {
    /// Returns true if a change touches a unit of `range`.
    pub(super) fn touches(&self, range: AddressRange) -> bool {
        let Some((first, last)) = self.of.units(range) else { return false };
        (first / 64..=last / 64)
            .any(|word| self.bits[word as usize] & word_mask(word, first, last) != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Address;

    fn range(start: u64, len: u64) -> AddressRange {
        AddressRange::new(Address(start), len).expect("a range")
    }

    fn is_empty(taken: &TakenChanges<'_>) -> bool {
        taken.bits.iter().all(|word| *word == 0)
    }

    /// LIFE-02: a change marks the units that it touches, and no others.
    #[test]
    fn change_touches_its_units_and_no_others() {
        let page = rustix::param::page_size() as u64;
        let base = page << 20;
        let changed = ChangedAddresses::new(range(base, 300 * page));
        for (first, count) in [(0, 1), (63, 1), (63, 2), (64, 64), (10, 200), (299, 1), (0, 300)] {
            changed.mark(range(base + first * page, count * page));
            let taken = changed.take();
            for unit in 0..300 {
                let expected = (first..first + count).contains(&unit);
                let at = range(base + unit * page + 7, 1);
                assert_eq!(taken.touches(at), expected, "{first}+{count}: {unit}");
            }
            assert!(is_empty(&changed.take()), "taken once");
        }
        changed.mark(range(base - page, page));
        changed.mark(range(base + 300 * page, page));
        assert!(is_empty(&changed.take()), "changes outside the range");
        changed.mark(range(0, u64::MAX));
        let taken = changed.take();
        assert!((0..300).all(|unit| taken.touches(range(base + unit * page, 1))));
    }

    /// LIFE-02: a range that has too many pages for one bit per page gets longer units.
    #[test]
    fn units_of_a_large_range_are_longer_than_a_page_and_cover_it() {
        let changed = ChangedAddresses::new(range(1 << 40, (1 << 40) + 1));
        assert!(changed.bits.len() as u64 * 64 <= MAX_UNITS);
        changed.mark(range(2 << 40, 1));
        let taken = changed.take();
        assert!(taken.touches(range(2 << 40, 1)) && !taken.touches(range(1 << 40, 1 << 30)));
    }
}

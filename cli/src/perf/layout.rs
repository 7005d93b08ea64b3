//! Where transfers lie in the memory of either side, and which bytes belong there.

use hmem::{Error, ErrorKind, Result};

use crate::{args::PerfOp, check::pattern};

/// Bytes that the slots of small transfers take together: they should stay in caches, as an
/// application's would.
const BUDGET: u64 = 4 << 20;
const PAGE: u64 = 4096;
const LINE: u64 = 64;
/// What the server adds to with each fetch-add.
pub(super) const ADDEND: u64 = 0x0101_0101_0101_0101;
/// Bytes of an atomic's target.
pub(super) const WORD: u64 = 8;

/// Slots of equal length, used in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// Bytes of a transfer.
    pub(super) size: u64,
    pub(super) slots: u64,
    stride: u64,
}

impl Layout {
    /// For transfers of `size` bytes, none of which is longer than `largest`.
    pub(super) fn new(op: PerfOp, size: u64, largest: u64, depth: u32) -> Self {
        // Receives are posted before it is known how long the message will be: their slots fit
        // every message.
        let room = if op == PerfOp::Send { largest } else { size };
        let stride = room.next_multiple_of(if room < PAGE { LINE } else { PAGE });
        Self { size, slots: (BUDGET / stride).clamp(1, u64::from(depth)), stride }
    }

    /// Bytes of the slots, and of a line behind them that must stay as it is.
    pub(super) fn room(self) -> u64 {
        self.slots * self.stride + LINE
    }

    /// Where slot `slot` starts.
    pub(super) fn offset(self, slot: u64) -> u64 {
        slot % self.slots * self.stride
    }

    /// How many of `transfers` went to `slot`.
    fn share(self, transfers: u64, slot: u64) -> u64 {
        transfers / self.slots + u64::from(slot < transfers % self.slots)
    }

    /// Fills the slots that `transfers` reach with the pattern of `seed`, the first of them going
    /// to slot `first`, and everything else with a background.
    pub(super) fn fill(self, into: &mut [u8], seed: u64, transfers: u64, first: u64) {
        pattern::fill(into, !seed);
        for number in 0..transfers.min(self.slots) {
            let start = self.offset(first + number) as usize;
            pattern::fill(&mut into[start..start + self.size as usize], slot_seed(seed, number));
        }
    }

    /// Fills the slots with the words that `transfers` fetch-adds brought back, and everything else
    /// with a background.
    pub(super) fn fill_fetched(self, into: &mut [u8], seed: u64, transfers: u64) {
        pattern::fill(into, !seed);
        for slot in 0..transfers.min(self.slots) {
            let start = self.offset(slot) as usize;
            let word = sum(seed, slot, self.share(transfers, slot) - 1);
            into[start..start + WORD as usize].copy_from_slice(&word.to_ne_bytes());
        }
    }

    /// Fills the slots with the words that fetch-adds find there, after `transfers` of them.
    pub(super) fn fill_words(self, into: &mut [u8], seed: u64, transfers: u64) {
        pattern::fill(into, !seed);
        for slot in 0..self.slots {
            let start = self.offset(slot) as usize;
            let word = sum(seed, slot, self.share(transfers, slot));
            into[start..start + WORD as usize].copy_from_slice(&word.to_ne_bytes());
        }
    }
}

/// The word of a slot after so many fetch-adds.
fn sum(seed: u64, slot: u64, added: u64) -> u64 {
    slot_seed(seed, slot).wrapping_add(ADDEND.wrapping_mul(added))
}

fn slot_seed(seed: u64, slot: u64) -> u64 {
    seed.wrapping_add(slot << 40)
}

/// Holds what was found against what should be there.
pub(super) fn same(expected: &[u8], found: &[u8], whose: &'static str) -> Result<()> {
    match pattern::difference(expected, found) {
        None => Ok(()),
        Some((first, count)) => Err(Error::new(ErrorKind::Driver, "verify")
            .context("memory", whose)
            .context("wrong_bytes", count)
            .context("first", first)
            .context("of", expected.len())
            .remedy(
                "the transfers completed and the content is wrong: suspect the path or the NIC's driver",
            )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_do_not_overlap_and_fit_their_room() {
        for op in [PerfOp::Write, PerfOp::Send] {
            for (size, largest) in
                [(1, 1), (8, 1 << 20), (100, 5000), (4097, 4097), (1 << 30, 1 << 30)]
            {
                for depth in [1, 3, 64, 4096] {
                    let layout = Layout::new(op, size, largest, depth);
                    assert!(layout.slots >= 1 && layout.slots <= u64::from(depth), "{layout:?}");
                    assert!(layout.stride >= size, "{layout:?}");
                    let end = layout.offset(layout.slots - 1) + size;
                    assert!(end < layout.room(), "{layout:?}");
                    assert_eq!(layout.offset(layout.slots), 0);
                }
            }
        }
    }

    #[test]
    fn shares_add_up() {
        let layout = Layout { size: 8, slots: 7, stride: 64 };
        for transfers in [0, 1, 6, 7, 8, 1000] {
            assert_eq!((0..7).map(|slot| layout.share(transfers, slot)).sum::<u64>(), transfers);
        }
    }

    #[test]
    fn one_lost_transfer_is_seen() {
        let layout = Layout::new(PerfOp::Write, 100, 100, 4);
        let len = layout.room() as usize;
        let (mut all, mut fewer) = (vec![0; len], vec![0; len]);
        layout.fill(&mut all, 7, 4, 0);
        layout.fill(&mut fewer, 7, 3, 0);
        assert!(same(&all, &fewer, "here").is_err());
        layout.fill_words(&mut all, 7, 1000);
        layout.fill_words(&mut fewer, 7, 999);
        assert!(same(&all, &fewer, "here").is_err());
    }
}

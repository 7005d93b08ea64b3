//! The offsets of transfers in the memory of each side, and the bytes expected there.

use hmem::{Error, ErrorKind, Result};

use crate::{args::PerfOp, check::pattern};

/// Maximum total length of the slots, in bytes, if there are several. Slots of this total length
/// fit into the caches of a processor, as the buffers of a typical application do.
const BUDGET: u64 = 4 << 20;
/// Alignment of slots for transfers of this many bytes or more. Both sides use this number,
/// whatever their page sizes, and so compute the same offsets. Smaller slots are aligned to
/// [`LINE`].
const BLOCK: u64 = 4096;
/// Length of a cache line.
const LINE: u64 = 64;
/// The addend of each fetch-add.
pub(super) const ADDEND: u64 = 0x0101_0101_0101_0101;
/// Size of the word that a fetch-add changes, in bytes.
pub(super) const WORD: u64 = 8;

/// The division of a side's memory into slots of equal length, which transfers use in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// Size of a transfer, in bytes.
    pub(super) size: u64,
    /// Number of slots.
    pub(super) slots: u64,
    /// Length of a slot, in bytes.
    stride: u64,
}

impl Layout {
    /// Returns the layout for transfers of `size` bytes. For messages, each slot has room for the
    /// largest message of all measurements, of `largest` bytes.
    pub(super) fn new(op: PerfOp, size: u64, largest: u64, depth: u32) -> Self {
        // A receive is posted before the length of its message is known, so each slot fits the
        // largest message.
        let room = if op == PerfOp::Send { largest } else { size };
        let stride = room.next_multiple_of(if room < BLOCK { LINE } else { BLOCK });
        Self { size, slots: (BUDGET / stride).clamp(1, u64::from(depth)), stride }
    }

    /// Returns the length of the memory: all slots, and a cache line after them that no transfer
    /// may change.
    pub(super) fn room(self) -> u64 {
        self.slots * self.stride + LINE
    }

    /// Returns the offset of a slot from the start of the memory. Numbers beyond the last slot wrap
    /// around.
    pub(super) fn offset(self, slot: u64) -> u64 {
        slot % self.slots * self.stride
    }

    /// Returns how many of the first `transfers` transfers use `slot`.
    fn share(self, transfers: u64, slot: u64) -> u64 {
        transfers / self.slots + u64::from(slot < transfers % self.slots)
    }

    /// Fills the slots that `transfers` transfers use with patterns made from `seed`, and all other
    /// bytes with another pattern. The first transfer uses slot `first`.
    pub(super) fn fill(self, into: &mut [u8], seed: u64, transfers: u64, first: u64) {
        pattern::fill(into, !seed);
        for number in 0..transfers.min(self.slots) {
            let start = self.offset(first + number) as usize;
            pattern::fill(&mut into[start..start + self.size as usize], slot_seed(seed, number));
        }
    }

    /// Fills `into` with the content that the client's memory must have after `transfers`
    /// fetch-adds. A slot that was used has the value that its last fetch-add returned. All other
    /// bytes have another pattern.
    pub(super) fn fill_fetched(self, into: &mut [u8], seed: u64, transfers: u64) {
        pattern::fill(into, !seed);
        for slot in 0..transfers.min(self.slots) {
            self.put_word(into, seed, slot, self.share(transfers, slot) - 1);
        }
    }

    /// Fills `into` with the content that the server's memory must have after `transfers`
    /// fetch-adds. Each slot has its initial word plus one addend for each fetch-add on the slot,
    /// even if there was none. All other bytes have another pattern.
    pub(super) fn fill_words(self, into: &mut [u8], seed: u64, transfers: u64) {
        pattern::fill(into, !seed);
        for slot in 0..self.slots {
            self.put_word(into, seed, slot, self.share(transfers, slot));
        }
    }

    /// Writes the word that a slot has after `added` fetch-adds.
    fn put_word(self, into: &mut [u8], seed: u64, slot: u64, added: u64) {
        let start = self.offset(slot) as usize;
        let word = slot_seed(seed, slot).wrapping_add(ADDEND.wrapping_mul(added));
        into[start..start + WORD as usize].copy_from_slice(&word.to_ne_bytes());
    }
}

/// Returns the seed of a slot's pattern. It is also the initial word of a slot for fetch-adds.
fn slot_seed(seed: u64, slot: u64) -> u64 {
    seed.wrapping_add(slot << 40)
}

/// Returns an error if the memory of a side differs from the expected bytes. `whose` names the side
/// in the error.
pub(super) fn same(expected: &[u8], found: &[u8], whose: &'static str) -> Result<()> {
    match pattern::difference(expected, found) {
        None => Ok(()),
        Some((first, count)) => Err(Error::new(ErrorKind::Driver, "verify")
            .context("memory", whose)
            .context("wrong_bytes", count)
            .context("first", first)
            .context("of", expected.len())
            .remedy(
                "run `hmem check` to find the path that corrupts data: the transfers completed \
                 with wrong content",
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
    fn shares_of_all_slots_add_up() {
        let layout = Layout { size: 8, slots: 7, stride: 64 };
        for transfers in [0, 1, 6, 7, 8, 1000] {
            assert_eq!((0..7).map(|slot| layout.share(transfers, slot)).sum::<u64>(), transfers);
        }
    }

    #[test]
    fn one_lost_transfer_is_detected() {
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

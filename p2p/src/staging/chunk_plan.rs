//! Division of a message into chunks.

/// Divisor that gives the length of the longest chunk of a long message: the length of the message
/// divided by this number, or the length of a buffer if that is smaller. If the copy engine and the
/// NIC are equally fast, each of them is idle for about as long as that chunk takes.
const CHUNKS: u64 = 16;
/// Minimum length of a chunk in bytes, unless the buffers or the message are shorter. The last two
/// chunks may be shorter too. Starting the copies of a shorter chunk takes more time than the
/// overlap of copy engine and NIC saves.
const SHORTEST: u64 = 128 << 10;
/// Maximum length in bytes of a remainder that gets no chunk of its own.
const WORTHLESS: u64 = SHORTEST / 2;
/// Chunk lengths are multiples of this number of bytes, the largest MTU of InfiniBand, so that only
/// the last packet of a message is short. The last chunk and chunks limited by the length of a
/// buffer are exceptions.
const MTU: u64 = 4096;

/// Lengths of the chunks into which a message is divided.
///
/// A chunk moves twice: by the copy engine and by the NIC. Both work at once, except during
/// the first and the last chunk. These two chunks are therefore short. The chunks between them are
/// long, since each copy has a fixed cost. Except for rounding, a chunk between them is no longer
/// than all chunks before it together, and no longer than all chunks after it together. So while
/// the copy engine moves a chunk, other chunks keep the NIC busy, and the reverse.
#[derive(Clone, Copy, Debug)]
pub struct ChunkPlan {
    pub(super) len: u64,
    shortest: u64,
    longest: u64,
}

impl ChunkPlan {
    /// Divides a message of `len` bytes into chunks of at most `slot_len` bytes, the length of a
    /// staging buffer.
    pub fn chunks(len: u64, slot_len: u64) -> Self {
        let even = len.div_ceil(CHUNKS).next_multiple_of(MTU);
        let longest = even.max(SHORTEST + WORTHLESS);
        Self { len, shortest: SHORTEST.min(slot_len), longest: longest.min(slot_len) }
    }

    /// Returns a plan with one chunk of `len` bytes.
    pub const fn whole(len: u64) -> Self {
        Self { len, shortest: len, longest: len }
    }

    /// Returns the length of the chunk at offset `at` of the message.
    pub(super) fn next(self, at: u64) -> u64 {
        let left = self.len - at;
        let even = if left <= self.shortest + WORTHLESS {
            // If the rest does not fit one buffer, it becomes two chunks of about equal length, so
            // that no tiny chunk remains.
            if left <= self.longest { left } else { left.div_ceil(2).next_multiple_of(MTU) }
        } else {
            at.min(left / 2).max(self.shortest).next_multiple_of(MTU)
        };
        even.min(self.longest).min(left)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lengths(cut: ChunkPlan) -> Vec<u64> {
        let mut at = 0;
        let mut lengths = Vec::new();
        while at < cut.len {
            lengths.push(cut.next(at));
            at += lengths[lengths.len() - 1];
        }
        lengths
    }

    #[test]
    fn first_and_last_chunks_are_short() {
        const KIB: u64 = 1 << 10;
        let in_kib = |len| {
            lengths(ChunkPlan::chunks(len, 512 * KIB))
                .iter()
                .map(|len| len / KIB)
                .collect::<Vec<_>>()
        };
        assert_eq!(in_kib(64 * KIB), [64]);
        assert_eq!(in_kib(192 * KIB), [192]);
        assert_eq!(in_kib(256 * KIB), [128, 128]);
        assert_eq!(lengths(ChunkPlan::chunks(132 * KIB, 128 * KIB)), [68 * KIB, 64 * KIB]);
        let mut four = vec![128, 128];
        four.extend([256; 14]);
        four.extend([128, 128]);
        assert_eq!(in_kib(4096 * KIB), four);
        let long = in_kib(64 << 20);
        assert_eq!(long[..5], [128, 128, 256, 512, 512]);
        assert_eq!(long[long.len() - 5..], [512, 512, 256, 128, 128]);
    }

    proptest! {
        #[test]
        fn chunks_of_any_message_fit_buffers(
            len in 1u64..(200 << 20), slot in 1u64..(1 << 20),
        ) {
            // A minimum buffer length limits the number of chunks, so that the test can check each
            // chunk.
            let slot = slot.max(len >> 12);
            let lengths = lengths(ChunkPlan::chunks(len, slot));
            prop_assert_eq!(lengths.iter().sum::<u64>(), len);
            prop_assert!(lengths.iter().all(|part| (1..=slot).contains(part)));
            let ends = slot.min(SHORTEST + WORTHLESS);
            prop_assert!(lengths[0] <= ends && lengths[lengths.len() - 1] <= ends);
            let mut at = 0;
            for part in &lengths {
                // Except for rounding, the chunks before `part` are together at least as long as
                // `part`. The chunks after `part` are also together at least as long.
                prop_assert!(*part <= ends.max(at + MTU));
                prop_assert!(*part <= ends.max(len - at - part + 2 * MTU));
                at += part;
            }
        }
    }
}

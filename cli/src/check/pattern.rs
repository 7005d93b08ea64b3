//! Pseudorandom byte patterns without repetition, which reveal misplaced bytes.
//!
//! Each seed gives a different pattern. The pattern of seed `s + n` is that of seed `s` without its
//! first `n` words of 8 bytes. So the patterns of two seeds share no word if the seeds differ by at
//! least the number of words.

/// Fills `into` with the pattern of `seed`.
pub(crate) fn fill(into: &mut [u8], seed: u64) {
    let (words, rest) = into.as_chunks_mut::<8>();
    let mut at = seed;
    for word in words {
        *word = mix(at).to_le_bytes();
        at = at.wrapping_add(1);
    }
    rest.copy_from_slice(&mix(at).to_le_bytes()[..rest.len()]);
}

/// Mixes the bits of a word (the finaliser of SplitMix64).
fn mix(word: u64) -> u64 {
    let z = word.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Returns the index of the first differing byte and the number of differing bytes, or `None` if
/// both slices are equal. The slices must have the same length.
pub(crate) fn difference(expected: &[u8], found: &[u8]) -> Option<(usize, usize)> {
    // Comparing whole slices is fast, and equal slices are the usual case.
    if expected == found {
        return None;
    }
    let mut wrong =
        expected.iter().zip(found).enumerate().filter(|(_, (expected, found))| expected != found);
    let (first, _) = wrong.next()?;
    Some((first, 1 + wrong.count()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pattern_continues_with_the_words_of_the_next_seed() {
        let (mut one, mut two) = ([0; 4099], [0; 4099 - 16]);
        fill(&mut one, u64::MAX - 1);
        fill(&mut two, 0);
        assert_eq!(difference(&one[16..], &two), None);
        assert_ne!(one[..8], one[8..16]);
    }

    #[test]
    fn two_seeds_give_different_bytes_at_any_length() {
        for len in [1usize, 7, 8, 9, 4099] {
            let (mut one, mut two) = (vec![0; len], vec![0; len]);
            fill(&mut one, 1);
            fill(&mut two, 1 << 32);
            assert!(difference(&one, &two).is_some());
            assert_eq!(difference(&one, &one), None);
        }
    }
}

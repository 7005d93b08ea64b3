//! Keys of a domain: numbers that name a region or a window.
//!
//! Keys that the NIC chooses contain the region's index in the table and its generation.
//!
//! - Keys of 8 bytes are scrambled by a secret permutation, a different one in each domain. A guess
//!   hits one of n live keys with probability n / 2^64. So does a key of another domain.
//! - Keys of 4 bytes are those of hardware, a 24-bit index and an 8-bit tag. A random number hits
//!   with probability n / 2^32. A peer can guess better: the first region has index 0 and tag 1.

use hmem_core::{Error, ErrorKind, RawKey, Result};

/// A reference to one region: its index in the table, and the generation of that index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Token {
    pub(super) index: u32,
    pub(super) generation: u32,
}

impl Token {
    pub(super) const fn to_u64(self) -> u64 {
        (self.index as u64) << 32 | self.generation as u64
    }

    pub(super) const fn from_u64(bits: u64) -> Self {
        Self { index: (bits >> 32) as u32, generation: bits as u32 }
    }
}

/// A secret permutation of 64-bit numbers: a Feistel network of four rounds over a keyed
/// multiplication.
#[derive(Clone)]
pub(super) struct Permutation {
    rounds: [(u64, u64); 4],
}

impl Permutation {
    pub(super) fn random() -> Result<Self> {
        let mut rounds = [(0, 0); 4];
        for round in &mut rounds {
            *round = (random()?, random()? | 1);
        }
        Ok(Self { rounds })
    }

    pub(super) fn seal(&self, plain: u64) -> u64 {
        let (mut left, mut right) = ((plain >> 32) as u32, plain as u32);
        for secret in &self.rounds {
            (left, right) = (right, left ^ round(right, *secret));
        }
        u64::from(left) << 32 | u64::from(right)
    }

    pub(super) fn open(&self, sealed: u64) -> u64 {
        let (mut left, mut right) = ((sealed >> 32) as u32, sealed as u32);
        for secret in self.rounds.iter().rev() {
            (left, right) = (right ^ round(left, *secret), left);
        }
        u64::from(left) << 32 | u64::from(right)
    }
}

fn round(half: u32, (whiten, factor): (u64, u64)) -> u32 {
    let folded = fold(u64::from(half) ^ whiten, factor);
    (folded >> 32) as u32 ^ folded as u32
}

/// Mixes the two halves of a product, so that each bit of the result depends on all bits of both
/// factors.
pub(super) const fn fold(a: u64, b: u64) -> u64 {
    let product = a as u128 * b as u128;
    (product >> 64) as u64 ^ product as u64
}

/// Returns a random number from the operating system.
pub(super) fn random() -> Result<u64> {
    hmem_core::random::random_u64("loopback")
}

/// The secrets of a domain, with which it creates and decodes its keys.
#[derive(Clone)]
pub(super) struct DomainKeys {
    narrow: bool,
    sealing: Permutation,
    cookies: Permutation,
}

impl DomainKeys {
    pub(super) fn new(key_size: usize) -> Result<Self> {
        Ok(Self {
            narrow: key_size == 4,
            sealing: Permutation::random()?,
            cookies: Permutation::random()?,
        })
    }

    /// Returns true if keys have 4 bytes.
    pub(super) const fn narrow(&self) -> bool {
        self.narrow
    }

    /// Returns the key of the region that a token names.
    pub(super) fn seal(&self, token: Token) -> u64 {
        if self.narrow {
            u64::from(token.index << 8 | token.generation & 0xff)
        } else {
            self.sealing.seal(token.to_u64())
        }
    }

    /// Returns the `nth` prefix for keys of windows: a key without its 8-bit tag.
    ///
    /// The caller checks that no requested key has the prefix. A key of 8 bytes that the NIC chose
    /// for a region has the prefix only by a negligible chance.
    pub(super) fn window_prefix(&self, nth: u64) -> u64 {
        let prefix = self.sealing.seal(!nth) >> 8;
        if self.narrow { prefix & 0xff_ffff } else { prefix }
    }

    /// Decodes a key. Returns its index, and the part of the generation that the key contains.
    ///
    /// Returns `None` if the key is longer than the domain's keys.
    pub(super) fn open(&self, key: u64) -> Option<(u32, KnownGeneration)> {
        if self.narrow {
            let key = u32::try_from(key).ok()?;
            Some((key >> 8, KnownGeneration::Tag(key as u8)))
        } else {
            let token = Token::from_u64(self.sealing.open(key));
            Some((token.index, KnownGeneration::Whole(token.generation)))
        }
    }

    /// Returns the cookie of a raw key: a secret beside the key, so that knowledge of the key is
    /// not enough to forge the raw key.
    pub(super) fn cookie(&self, key: u64, token: Token) -> u64 {
        self.cookies.seal(self.cookies.seal(key) ^ token.to_u64())
    }
}

/// The part of a token's generation that a key contains: the low 8 bits or all bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KnownGeneration {
    Tag(u8),
    Whole(u32),
}

impl KnownGeneration {
    pub(super) const fn matches(self, generation: u32) -> bool {
        match self {
            Self::Tag(tag) => generation as u8 == tag,
            Self::Whole(whole) => generation == whole,
        }
    }
}

const RAW_FILL: &[u8; 16] = b"hmem/loopback/1.";

/// Returns a raw key of `size` bytes. `size` must be at least 8.
///
/// The layout is key (8 bytes), cookie (8), checksum (4) and a fixed pattern, truncated to `size`.
pub(super) fn write_raw(key: u64, cookie: u64, size: usize) -> RawKey {
    let mut bytes = Vec::with_capacity(size.max(20));
    bytes.extend_from_slice(&key.to_le_bytes());
    bytes.extend_from_slice(&cookie.to_le_bytes());
    bytes.extend_from_slice(&checksum(&bytes).to_le_bytes());
    while bytes.len() < size {
        bytes.push(RAW_FILL[(bytes.len() - 20) % RAW_FILL.len()]);
    }
    bytes.truncate(size);
    RawKey(bytes)
}

/// Reads a raw key of `size` bytes in the layout of [`write_raw`]. `size` must be at least 8.
///
/// A raw key of fewer than 16 bytes has only a part of the cookie, or none. A raw key of at most 16
/// bytes has no checksum, so changes to its bytes are not found here.
///
/// # Errors
/// Malformed: the length is not `size`, or the checksum or the fixed pattern is wrong.
pub(super) fn read_raw(raw: &RawKey, size: usize) -> Result<RawParts> {
    let refuse = |wrong: &'static str| {
        Error::new(ErrorKind::Malformed, "map raw key")
            .provider("loopback")
            .context("why", wrong)
            .context("bytes", raw.0.len())
            .context("expected", size)
            .remedy("pass the raw key exactly as the peer's provider gave it")
    };
    if raw.0.len() != size {
        return Err(refuse("length"));
    }
    let word = |bytes: &[u8]| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    };
    let cookie_bytes = &raw.0[8..size.min(16)];
    let parts = RawParts {
        key: word(&raw.0[..8]),
        cookie: word(cookie_bytes),
        mask: word(&[0xff; 8][..cookie_bytes.len()]),
    };
    if size > 16 && write_raw(parts.key, parts.cookie, size) != *raw {
        return Err(refuse("contents"));
    }
    Ok(parts)
}

/// The contents of a raw key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RawParts {
    pub(super) key: u64,
    pub(super) cookie: u64,
    /// The mask of those cookie bits that the raw key contains.
    pub(super) mask: u64,
}

/// Returns the FNV-1a hash of the bytes. The hash detects accidental changes. The cookie detects
/// forgery.
fn checksum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |sum, byte| (sum ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
#[path = "../../tests/corpus/reader.rs"]
mod corpus;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// KEY-06
    #[test]
    fn raw_keys_of_all_versions_are_read() {
        let version = u32::from(RAW_FILL[14] - b'0');
        corpus::check("raw-key-loopback", version, |bytes| {
            let parts = read_raw(&RawKey(bytes.to_vec()), bytes.len()).expect("a raw key");
            assert_eq!(parts.mask, u64::MAX);
            format!("key {:#x} cookie {:#x}", parts.key, parts.cookie)
        });
    }

    proptest! {
        #[test]
        fn permutation_is_invertible(plain: u64) {
            let permutation = Permutation::random().unwrap();
            prop_assert_eq!(permutation.open(permutation.seal(plain)), plain);
            prop_assert_eq!(permutation.seal(permutation.open(plain)), plain);
        }

        #[test]
        fn eight_byte_key_contains_its_token(index: u32, generation: u32) {
            let keys = DomainKeys::new(8).unwrap();
            let key = keys.seal(Token { index, generation });
            prop_assert_eq!(keys.open(key), Some((index, KnownGeneration::Whole(generation))));
        }

        #[test]
        fn four_byte_key_contains_index_and_tag(index in 0u32..1 << 24, generation: u32) {
            let keys = DomainKeys::new(4).unwrap();
            let key = keys.seal(Token { index, generation });
            prop_assert_eq!(key, u64::from(index) << 8 | u64::from(generation & 0xff));
            let (found, known) = keys.open(key).unwrap();
            prop_assert_eq!(found, index);
            prop_assert!(known.matches(generation) && !known.matches(generation.wrapping_add(1)));
        }

        #[test]
        fn raw_keys_round_trip_in_every_size(key: u64, cookie: u64, size in 8usize..70) {
            let parts = read_raw(&write_raw(key, cookie, size), size).unwrap();
            prop_assert_eq!(parts.key, key);
            prop_assert_eq!(parts.cookie, cookie & parts.mask);
            prop_assert_eq!(parts.mask == u64::MAX, size >= 16);
        }

        #[test]
        fn an_altered_raw_key_is_refused(key: u64, cookie: u64, at in 0usize..40, flip in 1u8..) {
            let mut raw = write_raw(key, cookie, 40);
            raw.0[at] ^= flip;
            prop_assert_eq!(read_raw(&raw, 40).unwrap_err().kind(), ErrorKind::Malformed);
        }
    }

    #[test]
    fn keys_of_adjacent_tokens_differ_in_many_bits() {
        let keys = DomainKeys::new(8).unwrap();
        let one = keys.seal(Token { index: 7, generation: 1 });
        let two = keys.seal(Token { index: 7, generation: 2 });
        let three = keys.seal(Token { index: 8, generation: 1 });
        assert!((one ^ two).count_ones() > 8 && (one ^ three).count_ones() > 8 && one != two);
    }

    #[test]
    fn key_of_another_domain_names_another_token() {
        let (a, b) = (DomainKeys::new(8).unwrap(), DomainKeys::new(8).unwrap());
        let token = Token { index: 3, generation: 9 };
        assert_ne!(b.open(a.seal(token)), a.open(a.seal(token)));
    }
}

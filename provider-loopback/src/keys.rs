//! Keys of a domain: numbers that name a region or a window.
//!
//! - A key of 8 bytes that the NIC chooses is a random number. With n live keys, a guess hits one
//!   of them with probability n / 2^64. A key of another domain is no better than a guess.
//! - A key of 4 bytes that the NIC chooses is built as on hardware: 24 bits are the region's index
//!   in the table, and 8 bits are a tag. The tag has the low 8 bits of the generation, which counts
//!   the uses of the index. A random guess hits with probability n / 2^32. But a peer can guess
//!   better: the first region has index 0 and tag 1.

use std::{
    hash::{BuildHasher, RandomState},
    sync::atomic::{AtomicU64, Ordering},
};

use hmem_core::{Error, ErrorKind, RawKey, Result, random::random_u64};

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

    /// Returns the key of 4 bytes that the NIC chooses for the region.
    pub(super) const fn to_narrow_key(self) -> u64 {
        (self.index << 8 | self.generation & 0xff) as u64
    }
}

/// Returns a random number from the operating system.
pub(super) fn random() -> Result<u64> {
    random_u64("loopback")
}

/// The generator of a domain's random numbers, which become keys and cookies.
///
/// Each number is a hash of a counter and of the domain's random salt, by the keyed hash function
/// of the standard library. That function's key comes from the operating system when the domain is
/// opened. So a number needs no system call, and binding a window makes none.
pub(super) struct DomainKeys {
    narrow: bool,
    hasher: RandomState,
    salt: u64,
    /// The number of random numbers drawn so far.
    drawn: AtomicU64,
}

impl DomainKeys {
    pub(super) fn new(key_size: usize) -> Result<Self> {
        let (hasher, salt) = (RandomState::new(), random()?);
        Ok(Self { narrow: key_size == 4, hasher, salt, drawn: AtomicU64::new(0) })
    }

    /// Returns true if keys have 4 bytes.
    pub(super) const fn narrow(&self) -> bool {
        self.narrow
    }

    /// Returns a random number of the size of a key. The caller checks that no live key has the
    /// number.
    pub(super) fn draw(&self) -> u64 {
        let number = self.hasher.hash_one((self.salt, self.drawn.fetch_add(1, Ordering::Relaxed)));
        if self.narrow { number & u64::from(u32::MAX) } else { number }
    }

    /// Returns the cookie of a raw key: a secret beside the key, so that knowledge of the key is
    /// not enough to forge the raw key.
    pub(super) fn cookie(&self, key: u64, token: Token) -> u64 {
        self.hasher.hash_one((self.salt, key, token))
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
/// Short raw keys have less protection. With fewer than 16 bytes, a raw key has only a part of the
/// cookie, or none. With 16 bytes or fewer, it has no checksum, and this function detects no
/// changed bytes.
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
    /// A bit mask: the bits of `cookie` that the raw key contains. The others were cut off.
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
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    /// KEY-06: raw keys that any released version wrote can be read.
    #[test]
    fn raw_keys_of_all_versions_are_read() {
        let version = u32::from(RAW_FILL[14] - b'0');
        corpus::check("raw-key-loopback", 1..=version, |bytes| {
            let parts = read_raw(&RawKey(bytes.to_vec()), bytes.len()).expect("a raw key");
            assert_eq!(parts.mask, u64::MAX);
            format!("key {:#x} cookie {:#x}", parts.key, parts.cookie)
        });
    }

    proptest! {
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
    fn numbers_differ_within_a_domain_and_between_domains() {
        let domains = [DomainKeys::new(8).unwrap(), DomainKeys::new(8).unwrap()];
        let numbers: HashSet<_> =
            domains.iter().flat_map(|keys| (0..1000).map(|_| keys.draw())).collect();
        assert_eq!(numbers.len(), 2000);
        assert!(numbers.iter().any(|number| *number > u64::from(u32::MAX)));
        let narrow = DomainKeys::new(4).unwrap();
        assert!((0..1000).all(|_| narrow.draw() <= u64::from(u32::MAX)));
    }

    /// KEY-03: the cookie in a raw key differs if the domain, the key or the region differs.
    #[test]
    fn cookie_depends_on_domain_key_and_region() {
        let (a, b) = (DomainKeys::new(8).unwrap(), DomainKeys::new(8).unwrap());
        let (one, two) = (Token { index: 3, generation: 9 }, Token { index: 3, generation: 10 });
        let cookies = [a.cookie(1, one), a.cookie(2, one), a.cookie(1, two), b.cookie(1, one)];
        assert_eq!(a.cookie(1, one), cookies[0]);
        assert_eq!(HashSet::from(cookies).len(), 4);
    }
}

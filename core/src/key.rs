//! Keys: a local descriptor is not a remote key, and neither is a number.
//!
//! A [`RemoteKey`] travels to the peer in a versioned, checksummed form that is refused when
//! altered:
//!
//! ```
//! use hmem_core::{Addressing, ErrorKind, Iova, RemoteKey};
//!
//! let key = RemoteKey::new(Addressing::ZeroBased, Iova(0), 4096, 0x1234);
//! let mut bytes = key.to_bytes();
//! assert_eq!(RemoteKey::from_bytes(&bytes).unwrap(), key);
//! bytes[6] ^= 1;
//! assert_eq!(RemoteKey::from_bytes(&bytes).unwrap_err().kind(), ErrorKind::Malformed);
//! ```

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Error, ErrorKind, Iova, Result};

/// The local descriptor of a region (`fi_mr_desc`, verbs `lkey`): goes into local segments of
/// transfers.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct LocalKey(u64);

impl LocalKey {
    /// For providers: the descriptor in their own numbering.
    #[must_use]
    pub const fn from_provider(raw: u64) -> Self {
        Self(raw)
    }

    /// For providers: their own number back.
    #[must_use]
    pub const fn to_provider(self) -> u64 {
        self.0
    }
}

impl fmt::Debug for LocalKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LocalKey({:#x})", self.0)
    }
}

/// The addresses by which peers reach a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Addressing {
    /// By an offset that starts at 0 (default), over all ranges as one run of bytes.
    ZeroBased,
    /// By the target's virtual address (VIRT_ADDR).
    Virtual,
}

/// One piece of a remote key: `len` bytes from `base`, reached with `key`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RemotePiece {
    /// The first address that the key covers.
    pub base: Iova,
    /// Bytes.
    pub len: u64,
    /// The provider's key for this piece.
    pub key: u64,
}

/// The data by which a peer reaches a region: its keys and its addressing.
///
/// One piece in almost every case; a region that the provider had to split lists one piece per part
/// (VRB-07).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RemoteKey {
    addressing: Addressing,
    mapped: bool,
    first: RemotePiece,
    rest: Vec<RemotePiece>,
}

const MAGIC: [u8; 4] = *b"hmRK";
const VERSION: u8 = 1;

impl RemoteKey {
    /// A key of one piece.
    #[must_use]
    pub const fn new(addressing: Addressing, base: Iova, len: u64, key: u64) -> Self {
        Self { addressing, mapped: false, first: RemotePiece { base, len, key }, rest: Vec::new() }
    }

    /// A key of several pieces, in address order.
    #[must_use]
    pub const fn split(addressing: Addressing, first: RemotePiece, rest: Vec<RemotePiece>) -> Self {
        Self { addressing, mapped: false, first, rest }
    }

    /// For providers: a key that `map_raw` made, valid only in the domain that mapped it.
    #[must_use]
    pub const fn mapped(addressing: Addressing, base: Iova, len: u64, key: u64) -> Self {
        Self { addressing, mapped: true, first: RemotePiece { base, len, key }, rest: Vec::new() }
    }

    /// Returns true if `map_raw` made this key.
    #[must_use]
    pub const fn is_mapped(&self) -> bool {
        self.mapped
    }

    /// Returns the addressing of the region.
    #[must_use]
    pub const fn addressing(&self) -> Addressing {
        self.addressing
    }

    /// The first address to use.
    #[must_use]
    pub const fn base(&self) -> Iova {
        self.first.base
    }

    /// The length of the first piece, in bytes; of the whole region if there is one piece.
    #[must_use]
    pub const fn first_len(&self) -> u64 {
        self.first.len
    }

    /// All pieces in address order.
    pub fn pieces(&self) -> impl Iterator<Item = &RemotePiece> + Clone {
        std::iter::once(&self.first).chain(&self.rest)
    }

    /// The single number that libfabric and verbs call the key.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a split region, which has several.
    #[inline]
    pub fn as_u64(&self) -> Result<u64> {
        if self.rest.is_empty() {
            Ok(self.first.key)
        } else {
            Err(Error::new(ErrorKind::Unsupported, "single remote key")
                .context("pieces", self.rest.len() + 1)
                .remedy("the region is split: use every piece of the remote key"))
        }
    }

    /// The bytes to send to a peer: magic `hmRK`, version, payload, CRC-32 of all before it (little
    /// endian).
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(48);
        bytes.extend_from_slice(&MAGIC);
        bytes.push(VERSION);
        let mut bytes = postcard::to_extend(self, bytes)
            .expect("a key of integers always serialises into a Vec");
        let sum = crc32fast::hash(&bytes);
        bytes.extend_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads what [`RemoteKey::to_bytes`] wrote.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] that says what is wrong: magic, version, checksum, payload, or
    /// bytes left over.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let refuse = |why: &'static str| {
            Error::new(ErrorKind::Malformed, "remote key")
                .context("wrong", why)
                .context("bytes", bytes.len())
                .remedy("send the bytes of RemoteKey::to_bytes unchanged and whole")
        };
        let (body, sum) = bytes.split_last_chunk::<4>().ok_or_else(|| refuse("too short"))?;
        let rest = body.strip_prefix(&MAGIC).ok_or_else(|| refuse("magic"))?;
        let (version, payload) = rest.split_first().ok_or_else(|| refuse("too short"))?;
        if *version != VERSION {
            return Err(refuse("version").context("version", version));
        }
        if crc32fast::hash(body) != u32::from_le_bytes(*sum) {
            return Err(refuse("checksum"));
        }
        match postcard::take_from_bytes::<Self>(payload) {
            Ok((key, [])) if key.mapped => {
                Err(refuse("a mapped key is valid only in the domain that mapped it"))
            }
            Ok((key, [])) => Ok(key),
            Ok(_) => Err(refuse("bytes left over")),
            Err(error) => Err(refuse("payload").caused_by(error)),
        }
    }
}

/// A raw key as `fi_mr_raw_attr` gives it: provider bytes that a peer maps before use.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct RawKey(pub Vec<u8>);

impl fmt::Debug for RawKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RawKey({} bytes)", self.0.len())
    }
}

/// An authorization key: peers reach a region only if their endpoint carries the same one.
///
/// Empty means "no key". Its bytes are not printed.
#[derive(Clone, Default, Eq)]
pub struct AuthKey(pub Vec<u8>);

impl PartialEq for AuthKey {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        // Empty keys, which most domains have, must not reach memcmp: comparing no bytes at a
        // dangling pointer costs a microcode assist on some processors, several times what
        // a registration costs.
        self.0.len() == other.0.len() && (self.0.is_empty() || self.0 == other.0)
    }
}

impl std::hash::Hash for AuthKey {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl fmt::Debug for AuthKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AuthKey({} bytes)", self.0.len())
    }
}

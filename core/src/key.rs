//! Local descriptors, remote keys and authorization keys, each a type of its own.
//!
//! A [`RemoteKey`] is sent to a peer in a versioned form with a checksum. Altered bytes are
//! refused:
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

use crate::{Error, ErrorKind, Iova, Result, frame::Frame};

/// The local descriptor of a region (`fi_mr_desc`, verbs `lkey`).
///
/// Each local segment of a transfer names its region by this descriptor
/// ([`LocalSegment::desc`](crate::transfer::LocalSegment::desc)).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct LocalKey(u64);

impl LocalKey {
    /// Creates a descriptor from the provider's number for the region (verbs: `lkey`). Only
    /// providers need this function.
    #[must_use]
    pub const fn from_provider(raw: u64) -> Self {
        Self(raw)
    }

    /// Returns the provider's number for the region (verbs: `lkey`). Only providers need this
    /// function.
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

/// The kind of addresses by which peers reach a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Addressing {
    /// Offsets from the start of the region. The offsets count through all ranges of the region as
    /// one sequence of bytes.
    ZeroBased,
    /// Virtual addresses of the process that registered the region (VIRT_ADDR mode).
    Virtual,
}

/// A piece of a remote key: `key` gives access to `len` bytes from `base`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RemotePiece {
    /// The first address of the piece.
    pub base: Iova,
    /// The length of the piece in bytes.
    pub len: u64,
    /// The provider's key for this piece.
    pub key: u64,
}

/// The key by which a peer reaches a region, with the region's addresses.
///
/// A key has one piece in almost every case. If the provider split the registration, the key has
/// one piece for each part of the region.
///
/// `Deserialize` refuses the keys that [`RemoteKey::from_bytes`] refuses.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "UncheckedKey")]
pub struct RemoteKey {
    addressing: Addressing,
    /// True if [`RemoteKey::mapped`] created this key, or if the key is narrowed from such a key.
    mapped: bool,
    first: RemotePiece,
    /// The pieces after the first. Empty unless the region is split.
    rest: Vec<RemotePiece>,
}

/// The reason why a key of [`RemoteKey::mapped`] is neither sent to peers nor accepted from them.
pub(crate) const MAPPED: &str = "a mapped key, which is valid only in the domain that mapped it";

/// The fields of a received [`RemoteKey`], not yet validated. The conversion to a [`RemoteKey`]
/// validates them.
#[derive(Deserialize)]
pub(crate) struct UncheckedKey {
    addressing: Addressing,
    mapped: bool,
    first: RemotePiece,
    rest: Vec<RemotePiece>,
}

impl TryFrom<UncheckedKey> for RemoteKey {
    /// The reason why the key is refused.
    type Error = &'static str;

    fn try_from(unchecked: UncheckedKey) -> Result<Self, &'static str> {
        let UncheckedKey { addressing, mapped, first, rest } = unchecked;
        let key = Self { addressing, mapped, first, rest };
        let add = |sum: u64, piece: &RemotePiece| sum.checked_add(piece.len);
        if key.mapped {
            return Err(MAPPED);
        }
        if key.pieces().try_fold(0, add).is_none() {
            return Err("pieces with more bytes than an address space");
        }
        Ok(key)
    }
}

const FRAME: Frame = Frame {
    magic: *b"hmRK",
    version: 1,
    operation: "remote key",
    remedy: "send the bytes of RemoteKey::to_bytes unchanged and whole",
};

impl RemoteKey {
    /// Creates a key of one piece.
    #[must_use]
    pub const fn new(addressing: Addressing, base: Iova, len: u64, key: u64) -> Self {
        Self { addressing, mapped: false, first: RemotePiece { base, len, key }, rest: Vec::new() }
    }

    /// Creates a key of several pieces, which must be in address order.
    ///
    /// [`RemoteKey::from_bytes`] refuses the key if the pieces together have 2^64 bytes or more.
    #[must_use]
    pub const fn split(addressing: Addressing, first: RemotePiece, rest: Vec<RemotePiece>) -> Self {
        Self { addressing, mapped: false, first, rest }
    }

    /// Creates the key that [`Domain::map_raw`](crate::Domain::map_raw) returns for a mapped raw
    /// key. Only providers need this function.
    ///
    /// Such a key is valid only in the domain that mapped it.
    #[must_use]
    pub const fn mapped(addressing: Addressing, base: Iova, len: u64, key: u64) -> Self {
        Self { addressing, mapped: true, first: RemotePiece { base, len, key }, rest: Vec::new() }
    }

    /// Returns true if [`RemoteKey::mapped`] created this key, or if the key is narrowed from such
    /// a key. [`Domain::map_raw`](crate::Domain::map_raw) returns such keys.
    #[must_use]
    pub const fn is_mapped(&self) -> bool {
        self.mapped
    }

    /// Returns the kind of addresses by which peers reach the region.
    #[must_use]
    pub const fn addressing(&self) -> Addressing {
        self.addressing
    }

    /// Returns the address of the region's first byte.
    #[must_use]
    pub const fn base(&self) -> Iova {
        self.first.base
    }

    /// Returns the length of the first piece in bytes. That is the length of the region, unless the
    /// region is split.
    #[must_use]
    pub const fn first_len(&self) -> u64 {
        self.first.len
    }

    /// Returns all pieces in address order.
    pub fn pieces(&self) -> impl Iterator<Item = &RemotePiece> + Clone {
        std::iter::once(&self.first).chain(&self.rest)
    }

    /// Returns the number of the key (`fi_mr_key`, verbs `rkey`).
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a split region. Its key consists of several numbers.
    #[inline]
    pub fn as_u64(&self) -> Result<u64> {
        if self.rest.is_empty() {
            Ok(self.first.key)
        } else {
            Err(Error::new(ErrorKind::Unsupported, "single remote key")
                .context("pieces", self.rest.len() + 1)
                .remedy("use every piece of the remote key: the region is split"))
        }
    }

    /// Returns a key that describes `len` bytes from `offset` of the region.
    ///
    /// **The NIC does not enforce the new bounds.** The result has the same key numbers, so a peer
    /// that ignores the bounds can reach the rest of the region.
    /// [`MemoryRegion::sub`](crate::MemoryRegion::sub) makes keys with bounds that the NIC
    /// enforces.
    ///
    /// ```
    /// use hmem_core::{Addressing, Iova, RemoteKey};
    ///
    /// let key = RemoteKey::new(Addressing::ZeroBased, Iova(0), 4096, 0x1234);
    /// let part = key.narrow(1024, 16)?;
    /// assert_eq!((part.base(), part.first_len()), (Iova(1024), 16));
    /// # Ok::<(), hmem_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// - [`ErrorKind::OutOfBounds`] if the bytes are not all in the region.
    /// - [`ErrorKind::ZeroLength`] if `len` is 0.
    /// - [`ErrorKind::Unsupported`] for part of a split region with zero-based addresses. The
    ///   target's NIC counts offsets from the start of each piece, so a key cannot describe a part.
    pub fn narrow(&self, offset: u64, len: u64) -> Result<Self> {
        let total = self.check_part("narrow", offset, len)?;
        if len == 0 {
            return Err(Error::new(ErrorKind::ZeroLength, "narrow")
                .context("why", format_args!("{len} bytes at {offset} of {}", total))
                .context("offset", offset)
                .remedy("use a length of at least 1"));
        }
        if len == total {
            return Ok(self.clone());
        }
        if !self.rest.is_empty() && self.addressing == Addressing::ZeroBased {
            return Err(Error::new(ErrorKind::Unsupported, "narrow")
                .context("pieces", self.rest.len() + 1)
                .remedy("send the whole key together with the offset"));
        }
        let mut before = 0_u64;
        let mut parts = self.pieces().filter_map(|piece| {
            let (start, end) =
                (before.max(offset), before.saturating_add(piece.len).min(offset + len));
            let skip = start.saturating_sub(before);
            before = before.saturating_add(piece.len);
            let base = Iova(piece.base.0.wrapping_add(skip));
            (start < end).then(|| RemotePiece { base, len: end - start, key: piece.key })
        });
        let first = parts.next().expect("a part of at least one byte has a piece");
        let rest = parts.collect();
        Ok(Self { addressing: self.addressing, mapped: self.mapped, first, rest })
    }

    /// Checks that `len` bytes from `offset` lie in the region. Returns the length of the whole
    /// region, or `u64::MAX` if the length is 2^64 or more.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`] if the bytes are not all in the region.
    pub(crate) fn check_part(&self, operation: &'static str, offset: u64, len: u64) -> Result<u64> {
        let total = self.pieces().fold(0_u64, |sum, piece| sum.saturating_add(piece.len));
        if offset <= total && len <= total - offset {
            return Ok(total);
        }
        Err(Error::new(ErrorKind::OutOfBounds, operation)
            .context("offset", offset)
            .context("length", len)
            .context("region", total)
            .remedy("pass an offset and a length inside the region"))
    }

    /// Returns the bytes to send to a peer.
    ///
    /// The bytes are the magic number `hmRK`, a version, the payload, and the CRC-32 of all these
    /// bytes in little-endian order. Later versions of this crate read them too. If
    /// [`Domain::map_raw`](crate::Domain::map_raw) returned the key, [`RemoteKey::from_bytes`]
    /// refuses its bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        FRAME.write(self)
    }

    /// Reads a key from the bytes that [`RemoteKey::to_bytes`] returned.
    ///
    /// ```
    /// use hmem_core::{Addressing, Iova, RemoteKey};
    ///
    /// let key = RemoteKey::new(Addressing::Virtual, Iova(0x7f00_0000_1000), 4096, 0x1234);
    /// assert_eq!(RemoteKey::from_bytes(&key.to_bytes())?, key);
    /// # Ok::<(), hmem_core::Error>(())
    /// ```
    ///
    /// A piece with addresses that wrap around the address space is accepted unchanged, because
    /// earlier versions wrote such keys. The NIC that gave out the key enforces its own bounds.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] with the reason as the context value `why`:
    ///
    /// - the magic number, version, checksum or payload is wrong;
    /// - bytes are missing or left over;
    /// - the pieces together have 2^64 bytes or more;
    /// - the key was mapped by [`Domain::map_raw`](crate::Domain::map_raw), which makes it useless
    ///   to other domains.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let unchecked: UncheckedKey = FRAME.read(bytes)?;
        unchecked.try_into().map_err(|why| FRAME.refuse(bytes, why))
    }
}

/// A key in the provider's binary form (`fi_mr_raw_attr`). A peer must map it before use.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct RawKey(pub Vec<u8>);

impl fmt::Debug for RawKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RawKey({} bytes)", self.0.len())
    }
}

/// An authorization key. A peer reaches a region only if the peer's endpoint has the same
/// authorization key as the region.
///
/// An empty key means "no key". `Debug` does not print the bytes.
#[derive(Clone, Default, Eq)]
pub struct AuthKey(pub Vec<u8>);

impl PartialEq for AuthKey {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        // Empty keys, which most domains have, must not reach memcmp. On some processors, comparing
        // zero bytes at a dangling pointer costs several times as much as a registration.
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

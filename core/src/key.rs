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

use crate::{Error, ErrorKind, Iova, Result, frame::Frame};

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

const FRAME: Frame = Frame {
    magic: *b"hmRK",
    version: 1,
    operation: "remote key",
    remedy: "send the bytes of RemoteKey::to_bytes unchanged and whole",
};

/// The reason for refusing a key from a peer whose length cannot be counted.
pub(crate) const TOO_LONG: &str = "pieces with more bytes than an address space";

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

    /// Returns the key of `len` bytes from `offset` of the region, to send to a peer that needs no
    /// more.
    ///
    /// The result describes a part and grants the whole: it has this key's numbers, and the NIC
    /// lets a peer that ignores the bounds reach the rest of the region.
    /// [`MemoryRegion::sub`](crate::MemoryRegion::sub) makes keys whose bounds the NIC enforces.
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
    /// - [`ErrorKind::ZeroLength`] if there are none.
    /// - [`ErrorKind::Unsupported`] for part of a split region with zero-based addresses, whose
    ///   pieces are reached from their own starts.
    pub fn narrow(&self, offset: u64, len: u64) -> Result<Self> {
        let total = self.check_part("narrow", offset, len)?;
        if len == 0 {
            return Err(Error::new(ErrorKind::ZeroLength, "narrow")
                .context("offset", offset)
                .remedy("a key is of at least one byte"));
        }
        if len == total {
            return Ok(self.clone());
        }
        if !self.rest.is_empty() && self.addressing == Addressing::ZeroBased {
            return Err(Error::new(ErrorKind::Unsupported, "narrow")
                .context("pieces", self.rest.len() + 1)
                .remedy("send the whole key, and the offset beside it"));
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

    /// Returns the bytes of the whole region, or an error if a part lies outside.
    pub(crate) fn check_part(&self, operation: &'static str, offset: u64, len: u64) -> Result<u64> {
        let total = self.pieces().fold(0_u64, |sum, piece| sum.saturating_add(piece.len));
        if offset <= total && len <= total - offset {
            return Ok(total);
        }
        Err(Error::new(ErrorKind::OutOfBounds, operation)
            .context("offset", offset)
            .context("length", len)
            .context("key", total)
            .remedy("offset + length must lie in the bytes of the key"))
    }

    /// The bytes to send to a peer: magic `hmRK`, version, payload, CRC-32 of all before it (little
    /// endian).
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        FRAME.write(self)
    }

    /// Reads what [`RemoteKey::to_bytes`] wrote.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] that says what is wrong: magic, version, checksum, payload, bytes
    /// left over, or pieces with more bytes than an address space.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let key: Self = FRAME.read(bytes)?;
        if key.mapped {
            let why = "a mapped key is valid only in the domain that mapped it";
            return Err(FRAME.refuse(bytes, why));
        }
        if !key.has_countable_len() {
            return Err(FRAME.refuse(bytes, TOO_LONG));
        }
        Ok(key)
    }

    /// Returns true if the bytes of all pieces can be counted.
    pub(crate) fn has_countable_len(&self) -> bool {
        let add = |sum: u64, piece: &RemotePiece| sum.checked_add(piece.len);
        self.pieces().try_fold(0, add).is_some()
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

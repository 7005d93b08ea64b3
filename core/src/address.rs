//! Addresses, ranges and offsets, each a type of its own.
//!
//! Separate types prevent mix-ups, a common cause of registration bugs. None of the types is a
//! pointer: a device address must not be dereferenced, and a host address is valid only while the
//! owner of the memory keeps it allocated.
//!
//! ```
//! use hmem_core::{Address, AddressRange};
//!
//! let bytes = [0u8; 64];
//! let range = AddressRange::of(&bytes);
//! assert!(range.contains(range.start()));
//! assert!(AddressRange::new(Address(u64::MAX), 2).is_err());
//! ```

use std::fmt;

use crate::{Error, ErrorKind, Result};

macro_rules! offset {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {$(
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[derive(serde::Serialize, serde::Deserialize)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    )+};
}

offset! {
    /// A virtual address of host or device memory in this process. It is not a pointer.
    Address,
    /// An offset in bytes from the start of an allocation.
    AllocOffset,
    /// An offset in bytes from the start of an exported dma-buf.
    DmaBufOffset,
    /// The address by which peers name a byte of a region. In VIRT_ADDR mode it is a virtual
    /// address of the process that registered the region, otherwise an offset into the region.
    Iova,
}

impl Address {
    /// Returns the address of a host pointer. Exposes the pointer's provenance, because the library
    /// turns addresses back into pointers when it copies memory.
    #[must_use]
    pub fn of_ptr<T: ?Sized>(pointer: *const T) -> Self {
        Self(pointer.cast::<()>().expose_provenance() as u64)
    }

    /// Returns `self + bytes`, or `None` if the sum is 2^64 or more.
    #[must_use]
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(sum) => Some(Self(sum)),
            None => None,
        }
    }
}

/// A range of addresses: a start and a length in bytes, which may be 0. The last byte of a range
/// never lies past the end of the 64-bit address space.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AddressRange {
    start: Address,
    len: u64,
}

impl AddressRange {
    /// Creates the range of `len` bytes from `start`.
    ///
    /// # Errors
    /// [`ErrorKind::AddressWraps`] if the last byte would lie past the end of the 64-bit address
    /// space.
    #[inline]
    pub fn new(start: Address, len: u64) -> Result<Self> {
        Self::checked(start, len).ok_or_else(|| wraps(start, len))
    }

    /// Creates a range like [`AddressRange::new`], but returns `None` instead of an error.
    #[inline]
    #[must_use]
    pub const fn checked(start: Address, len: u64) -> Option<Self> {
        match start.0.checked_add(len.saturating_sub(1)) {
            Some(_) => Some(Self { start, len }),
            None => None,
        }
    }

    /// Returns the range of a slice's elements.
    #[must_use]
    pub fn of<T>(slice: &[T]) -> Self {
        Self { start: Address::of_ptr(slice.as_ptr()), len: size_of_val(slice) as u64 }
    }

    /// Returns the first address of the range.
    #[must_use]
    pub const fn start(self) -> Address {
        self.start
    }

    /// Returns the length in bytes.
    #[must_use]
    pub const fn len(self) -> u64 {
        self.len
    }

    /// Returns true if the length is 0.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Returns the address after the last byte, or `None` if the range ends with the address space.
    #[must_use]
    pub const fn end(self) -> Option<Address> {
        self.start.checked_add(self.len)
    }

    /// Returns true if `address` lies in the range.
    #[must_use]
    pub const fn contains(self, address: Address) -> bool {
        address.0.wrapping_sub(self.start.0) < self.len
    }

    /// Returns true if this range contains all bytes of `other`. An empty `other` is contained if
    /// its start lies in this range or directly after it.
    #[must_use]
    pub const fn contains_range(self, other: Self) -> bool {
        let offset = other.start.0.wrapping_sub(self.start.0);
        offset <= self.len && other.len <= self.len - offset
    }

    /// Returns true if the two ranges share a byte.
    #[must_use]
    pub const fn overlaps(self, other: Self) -> bool {
        self.len > 0 && other.len > 0 && (self.contains(other.start) || other.contains(self.start))
    }

    /// Returns the part of `len` bytes from `offset`, or `None` if the part leaves the range.
    #[must_use]
    pub const fn slice(self, offset: u64, len: u64) -> Option<Self> {
        if offset <= self.len && len <= self.len - offset {
            Some(Self { start: Address(self.start.0.wrapping_add(offset)), len })
        } else {
            None
        }
    }

    /// Returns the bytes that are in both ranges, or `None` if there are none.
    #[must_use]
    pub fn intersection(self, other: Self) -> Option<Self> {
        let start = self.start.max(other.start);
        let last = |range: Self| Some(range.start.0 + range.len.checked_sub(1)?);
        let last = last(self)?.min(last(other)?);
        Some(Self { start, len: last.checked_sub(start.0)? + 1 })
    }

    /// Returns the smallest range that contains both ranges. The length of the result must be less
    /// than 2^64.
    #[must_use]
    pub(crate) fn hull(self, other: Self) -> Self {
        let start = self.start.min(other.start);
        let len = |range: Self| range.start.0 - start.0 + range.len;
        Self { start, len: len(self).max(len(other)) }
    }

    /// Returns the smallest page-aligned range that contains this one. `page` is the page size in
    /// bytes, a power of two.
    ///
    /// If that range is the whole address space, the result lacks the last page, because a length
    /// is less than 2^64.
    #[must_use]
    pub const fn page_aligned(self, page: u64) -> Self {
        let start = self.start.0 & !(page - 1);
        let len =
            (self.start.0 - start).saturating_add(self.len).saturating_add(page - 1) & !(page - 1);
        Self { start: Address(start), len }
    }
}

#[cold]
fn wraps(start: Address, len: u64) -> Error {
    Error::new(ErrorKind::AddressWraps, "range")
        .context("start", start)
        .context("length", len)
        .remedy("pass a range whose last byte is below 2^64")
}

impl fmt::Debug for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}+{}", self.start.0, self.len)
    }
}

//! Memory files: host memory that has an fd.

#![allow(unsafe_code, reason = "reads and writes a memory file into buffers of the caller")]

use std::{
    fmt,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use hmem_core::{Address, AddressRange, Error, ErrorKind, Mapping, Result};

use crate::sys;

/// A mapped memory file of a fixed size.
///
/// The file is sealed against shrinking. So its mappings cannot lose pages, and `/dev/udmabuf` can
/// create dma-bufs of it. Another process that receives the fd accesses the same bytes.
///
/// ```
/// use hmem_iface_system::MemFd;
///
/// let memory = MemFd::new(4096)?;
/// memory.write(100, b"through the mapping or the fd, it is the same")?;
/// let mut bytes = [0; 7];
/// memory.read(104, &mut bytes)?;
/// assert_eq!(&bytes, b"ugh the");
/// # Ok::<(), hmem_core::Error>(())
/// ```
pub struct MemFd {
    fd: OwnedFd,
    /// The mapping of the file, with the length that was requested.
    mapping: Mapping,
}

impl MemFd {
    /// Creates and maps a zeroed file of `len` bytes, rounded up to pages.
    ///
    /// # Errors
    /// - [`ErrorKind::ZeroLength`]: `len` is 0.
    /// - The error of a system call: no fd or no memory is left, for example.
    pub fn new(len: u64) -> Result<Self> {
        if len == 0 {
            return Err(Error::new(ErrorKind::ZeroLength, "memfd")
                .remedy("create a file of at least one byte"));
        }
        let too_long = || Error::new(ErrorKind::OutOfResources, "memfd").context("length", len);
        let whole_pages = len.checked_next_multiple_of(sys::page_size()).ok_or_else(too_long)?;
        Self::of(sys::sealed_memfd("hmem", whole_pages)?, len)
    }

    /// Maps the first `len` bytes of a memory file. The file must be at least that long.
    pub(crate) fn of(fd: OwnedFd, len: u64) -> Result<Self> {
        let mapping = sys::map_file(fd.as_fd(), len)?;
        Ok(Self { fd, mapping })
    }

    /// Returns the address range of the mapping, with the length that was requested.
    #[must_use]
    pub fn range(&self) -> AddressRange {
        self.mapping.range()
    }

    /// Returns the requested length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.mapping.len() as u64
    }

    /// Returns false: a memory file has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Copies bytes of the file, from `offset` on, to `into`. A NIC may write to the file at the
    /// same time, because this method creates no Rust reference to its bytes.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`]: the range reaches past the end of the file.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.check(offset, into.len() as u64)?;
        let to = Address::of_ptr(into.as_mut_ptr());
        // SAFETY: `into` is borrowed exclusively.
        unsafe { sys::read_at(self.fd.as_fd(), offset, to, into.len() as u64) }
    }

    /// Copies the bytes of `from` into the file, starting at `offset`.
    ///
    /// # Errors
    /// The errors of [`MemFd::read`].
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.check(offset, from.len() as u64)?;
        sys::write_at(self.fd.as_fd(), offset, Address::of_ptr(from.as_ptr()), from.len() as u64)
    }

    fn check(&self, offset: u64, len: u64) -> Result<()> {
        if self.range().slice(offset, len).is_some() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::OutOfBounds, "memfd")
            .context("offset", offset)
            .context("length", len)
            .context("size", self.len()))
    }
}

impl AsFd for MemFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl fmt::Debug for MemFd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemFd").field("range", &self.range()).finish()
    }
}

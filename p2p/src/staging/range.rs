//! Staged access to a range of device memory, through the copy engine of its iface.

#![allow(unsafe_code, reason = "copies device memory by address")]

use std::sync::Arc;

use hmem_core::{
    Address, AddressRange, Error, ErrorKind, Iface, Result,
    iface::{CopyEvent, FinishedCopy},
};

/// A range of device memory that is accessed through the copy engine of its iface.
///
/// Offsets count from the start of the range. Several threads may call the methods at once. The
/// methods copy device memory without `unsafe`, so the constructor is `unsafe`:
///
/// ```compile_fail,E0133
/// # use std::sync::Arc;
/// # use hmem_core::{AddressRange, Iface};
/// # use hmem_p2p::staging::StagedRange;
/// fn stage(iface: Arc<dyn Iface>, range: AddressRange) -> StagedRange {
///     StagedRange::new(iface, range)
/// }
/// ```
#[derive(Debug)]
pub struct StagedRange {
    iface: Arc<dyn Iface>,
    range: AddressRange,
}

impl StagedRange {
    /// Creates a staged range from `range`, whose memory belongs to `iface`.
    ///
    /// # Safety
    /// The memory must not be freed before the last use of the value. Until then, no Rust reference
    /// to the memory may exist.
    #[must_use]
    pub unsafe fn new(iface: Arc<dyn Iface>, range: AddressRange) -> Self {
        Self { iface, range }
    }

    /// Returns the range.
    #[must_use]
    pub fn range(&self) -> AddressRange {
        self.range
    }

    /// Copies bytes of the memory, from `offset`, to fill `into`.
    ///
    /// # Errors
    /// - OutOfBounds: the bytes are not all in the range.
    /// - Otherwise the error that the iface reported.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let from = self.at(offset, into.len() as u64)?;
        // SAFETY: `into` is exclusively borrowed for its whole length; `from` lies in the range,
        // which the caller of `new` keeps allocated.
        unsafe { self.iface.copy(Address::of_ptr(into.as_mut_ptr()), from, into.len() as u64) }
    }

    /// Copies `from` into the memory at `offset`.
    ///
    /// # Errors
    /// The errors of [`read`](Self::read).
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let to = self.at(offset, from.len() as u64)?;
        // SAFETY: `from` is readable for its whole length; `to` lies in the range, which the caller
        // of `new` keeps allocated.
        unsafe { self.iface.copy(to, Address::of_ptr(from.as_ptr()), from.len() as u64) }
    }

    /// Starts a copy of `len` bytes of the memory, from `offset`, to the host address `into`. If
    /// the iface has no copy engine, the copy is complete when the call returns.
    ///
    /// # Safety
    /// Until the event is done, `into` must be valid for writes of `len` bytes and not referenced
    /// elsewhere.
    ///
    /// # Errors
    /// The errors of [`read`](Self::read).
    pub unsafe fn start_read(
        &self,
        offset: u64,
        into: Address,
        len: u64,
    ) -> Result<Box<dyn CopyEvent>> {
        let from = self.at(offset, len)?;
        // SAFETY: the caller keeps `into` valid for writes until the copy ends; `from` lies in the
        // range, which the caller of `new` keeps allocated.
        unsafe { self.start(into, from, len) }
    }

    /// Starts a copy of `len` bytes at the host address `from` into the memory at `offset`. If the
    /// iface has no copy engine, the copy is complete when the call returns.
    ///
    /// # Safety
    /// Until the event is done, `from` must be valid for reads of `len` bytes, and its bytes must
    /// not change.
    ///
    /// # Errors
    /// The errors of [`read`](Self::read).
    pub unsafe fn start_write(
        &self,
        offset: u64,
        from: Address,
        len: u64,
    ) -> Result<Box<dyn CopyEvent>> {
        let to = self.at(offset, len)?;
        // SAFETY: the caller keeps `from` valid for reads until the copy ends; `to` lies in the
        // range, which the caller of `new` keeps allocated.
        unsafe { self.start(to, from, len) }
    }

    fn at(&self, offset: u64, len: u64) -> Result<Address> {
        let part = self.range.slice(offset, len).ok_or_else(|| {
            Error::new(ErrorKind::OutOfBounds, "staged copy")
                .iface(&self.iface)
                .context("offset", offset)
                .context("length", len)
                .context("range", self.range)
        })?;
        Ok(part.start())
    }

    /// Starts a copy of `len` bytes. If the iface has no copy engine, the function copies the bytes
    /// before it returns.
    ///
    /// # Safety
    /// The caller must uphold the safety contract of
    /// [`CopyEngine::start_copy`](hmem_core::iface::CopyEngine::start_copy).
    unsafe fn start(&self, to: Address, from: Address, len: u64) -> Result<Box<dyn CopyEvent>> {
        if let Some(engine) = self.iface.copy_engine() {
            // SAFETY: the caller upholds the contract of `start_copy` for both ranges.
            return unsafe { engine.start_copy(to, from, len) };
        }
        // SAFETY: the caller upholds the contract of `start_copy` for both ranges.
        unsafe { self.iface.copy(to, from, len) }?;
        Ok(Box::new(FinishedCopy(Ok(()))))
    }
}

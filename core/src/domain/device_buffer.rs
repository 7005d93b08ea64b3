//! Memory that an iface allocates, for regions that own their memory.

#![allow(unsafe_code, reason = "device memory by its addresses")]

use std::{fmt, sync::Arc};

use super::memory::{Memory, Place, own_parts};
use crate::{
    AddressRange, Allocation, Error, ErrorKind, Iface, IfaceExt, ProcessMark, Result,
    iface::AllocRequest,
};

/// Memory allocated from an iface. Dropping the value frees the memory, except in a forked child.
pub struct DeviceBuffer {
    iface: Arc<dyn Iface>,
    allocation: Allocation,
    /// The process that allocated the memory. A forked child must not free the memory.
    process: ProcessMark,
}

impl DeviceBuffer {
    /// Allocates memory from an iface.
    ///
    /// # Errors
    /// - [`ErrorKind::ZeroLength`] for a request of no bytes.
    /// - The errors of [`IfaceExt::allocate`] and of [`ProcessMark::current`].
    pub fn allocate(iface: &Arc<dyn Iface>, request: &AllocRequest) -> Result<Self> {
        if request.len == 0 {
            return Err(Error::new(ErrorKind::ZeroLength, "allocate").iface(iface));
        }
        let process = ProcessMark::current()?;
        let allocation = iface.allocate(request)?;
        Ok(Self { iface: Arc::clone(iface), allocation, process })
    }

    /// Returns the iface's description of the allocation.
    #[must_use]
    pub fn allocation(&self) -> &Allocation {
        &self.allocation
    }

    /// Returns the range of the memory. It may be longer than the request.
    #[must_use]
    pub fn range(&self) -> AddressRange {
        self.allocation.range
    }

    /// Returns the iface that allocated the memory.
    #[must_use]
    pub fn iface(&self) -> &Arc<dyn Iface> {
        &self.iface
    }

    fn slice(&self, offset: u64, len: u64) -> Result<AddressRange> {
        self.allocation.range.slice(offset, len).ok_or_else(|| {
            Error::new(ErrorKind::OutOfBounds, "copy")
                .iface(&self.iface)
                .context("offset", offset)
                .context("length", len)
                .context("allocation", self.allocation.range)
        })
    }

    /// Fills `into` with the bytes of the memory from `offset` on.
    ///
    /// # Errors
    /// - [`ErrorKind::OutOfBounds`] if the bytes are not all in the allocation.
    /// - The error that the device reported.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let from = self.slice(offset, into.len() as u64)?.start();
        // SAFETY: the allocation is freed when `self` is dropped, which the borrow excludes.
        unsafe { self.iface.read(from, into) }
    }

    /// Copies `from` to the bytes of the memory from `offset` on.
    ///
    /// # Errors
    /// The errors of [`DeviceBuffer::read`].
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let to = self.slice(offset, from.len() as u64)?.start();
        // SAFETY: the allocation is freed when `self` is dropped, which the borrow excludes.
        // `Allocator::allocate` guarantees that no reference to the memory exists, and `self`
        // creates none.
        unsafe { self.iface.write(to, from) }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // The driver's state and the iface's locks belong to the parent.
            return;
        }
        // SAFETY: the buffer owns the allocation and has handed out no references into it.
        if let Err(error) = unsafe { self.iface.free(&self.allocation) } {
            tracing::error!(error = %error.full(), "cannot free device memory");
        }
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("iface", &self.iface.name())
            .field("allocation", &self.allocation)
            .finish()
    }
}

macro_rules! device_memory {
    ($($buffer:ty)+) => {$(
        // SAFETY: the allocation stays where it is until the last owner is dropped. No references
        // into it exist, since addresses of an iface are not pointers. All access goes through the
        // iface, which copies.
        unsafe impl Memory for $buffer {
            own_parts!();

            fn place(parts: &Self) -> Place<'_> {
                Place::Device { iface: &parts.iface, range: parts.allocation.range }
            }
        }
    )+};
}

device_memory! { DeviceBuffer Arc<DeviceBuffer> }

//! Staged copies: device memory that a NIC cannot reach is moved through host memory by the iface's copy engine.

use std::sync::Arc;

use hmem_core::{Address, AddressRange, Error, ErrorKind, Iface, Result, provider::StagedMemory};

/// A range of an iface that is reached through its copy engine.
#[derive(Debug)]
pub struct StagedRange {
    iface: Arc<dyn Iface>,
    range: AddressRange,
}

impl StagedRange {
    /// Stages `range`, which belongs to `iface`.
    #[must_use]
    pub fn new(iface: Arc<dyn Iface>, range: AddressRange) -> Self {
        Self { iface, range }
    }

    fn at(&self, offset: u64, len: usize) -> Result<Address> {
        let part = self.range.slice(offset, len as u64).ok_or_else(|| {
            Error::new(ErrorKind::OutOfBounds, "staged copy")
                .iface(self.iface.kind())
                .context("offset", offset)
                .context("length", len)
                .context("range", self.range)
        })?;
        Ok(part.start())
    }
}

impl StagedMemory for StagedRange {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let from = self.at(offset, into.len())?;
        // SAFETY: `into` is exclusively borrowed for its whole length; `from` lies in memory of the iface, which
        // checks it.
        unsafe { self.iface.copy(Address::of_ptr(into.as_mut_ptr()), from, into.len() as u64) }
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let to = self.at(offset, from.len())?;
        // SAFETY: `from` is readable for its whole length; `to` lies in memory of the iface, which checks it.
        unsafe { self.iface.copy(to, Address::of_ptr(from.as_ptr()), from.len() as u64) }
    }
}

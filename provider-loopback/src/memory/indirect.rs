//! Memory that the NIC reads and writes through calls.
//!
//! - Device memory through its iface: local buffers without a descriptor, and peer-memory imports.
//! - Staged memory through the copy engine of its owner.

#![allow(unsafe_code)]

use std::{fmt, sync::Arc};

use hmem_core::{Address, Error, ErrorKind, Iface, Result, provider::StagedMemory};

/// Memory that the NIC reads and writes through calls, on any thread.
///
/// The implementation defines what positions count from.
pub(in super::super) trait IndirectMemory: fmt::Debug + Send + Sync {
    fn load(&self, at: u64, into: &mut [u8]) -> Result<()>;
    fn store(&self, at: u64, from: &[u8]) -> Result<()>;
    /// Returns an address with the alignment and the page offset of position `at`.
    ///
    /// # Errors
    /// Unsupported for memory without atomics.
    fn atomic_address(&self, at: u64) -> Result<u64>;
    /// Makes written bytes persistent, if the memory can be.
    fn persist(&self, at: u64, len: u64) -> Result<()>;
    /// Returns the memory for a copy engine, if it is staged, with the same positions.
    fn staged(&self) -> Option<&dyn StagedMemory>;
}

/// Device memory. Positions are device addresses.
#[derive(Debug)]
pub(in super::super) struct DeviceMemory {
    iface: Arc<dyn Iface>,
}

impl DeviceMemory {
    pub(in super::super) fn new(iface: Arc<dyn Iface>) -> Self {
        Self { iface }
    }
}

impl IndirectMemory for DeviceMemory {
    fn load(&self, at: u64, into: &mut [u8]) -> Result<()> {
        // SAFETY: `into` is an exclusive borrow of its bytes, so that the iface may write them. The
        // iface checks the device address.
        unsafe {
            self.iface.copy(Address::of_ptr(into.as_mut_ptr()), Address(at), into.len() as u64)
        }
    }

    fn store(&self, at: u64, from: &[u8]) -> Result<()> {
        // SAFETY: `from` is a borrow of its bytes, so that the iface may read them. The iface
        // checks the device address.
        unsafe { self.iface.copy(Address(at), Address::of_ptr(from.as_ptr()), from.len() as u64) }
    }

    fn atomic_address(&self, _at: u64) -> Result<u64> {
        Err(Error::new(ErrorKind::Unsupported, "atomic")
            .provider("loopback")
            .iface(self.iface.kind())
            .context("why", "the NIC copies this memory through its iface")
            .remedy("register the device memory by dma-buf for atomics"))
    }

    /// Does nothing: the copy into the device's memory has ended, and the region then flushes the
    /// device.
    fn persist(&self, _at: u64, _len: u64) -> Result<()> {
        Ok(())
    }

    fn staged(&self) -> Option<&dyn StagedMemory> {
        None
    }
}

/// Staged memory. Positions count from the start of the piece.
#[derive(Debug)]
pub(in super::super) struct Staged {
    memory: Arc<dyn StagedMemory>,
}

impl Staged {
    pub(in super::super) fn new(memory: Arc<dyn StagedMemory>) -> Self {
        Self { memory }
    }
}

impl IndirectMemory for Staged {
    fn load(&self, at: u64, into: &mut [u8]) -> Result<()> {
        self.memory.read(at, into)
    }

    fn store(&self, at: u64, from: &[u8]) -> Result<()> {
        self.memory.write(at, from)
    }

    fn atomic_address(&self, _at: u64) -> Result<u64> {
        Err(Error::new(ErrorKind::Unsupported, "atomic")
            .provider("loopback")
            .context("why", "the region is staged, and copies cannot be atomic")
            .remedy("register the device memory by dma-buf or peer memory for atomics"))
    }

    /// Does nothing: the copy into the device's memory has ended, and the region then flushes the
    /// device.
    fn persist(&self, _at: u64, _len: u64) -> Result<()> {
        Ok(())
    }

    fn staged(&self) -> Option<&dyn StagedMemory> {
        Some(&*self.memory)
    }
}

//! Memory behind calls: device memory that is reached through its iface (local buffers without a
//! descriptor, and peer-memory imports), and memory that is reached through staged copies.

#![allow(unsafe_code)]

use std::{fmt, sync::Arc};

use hmem_core::{Address, Error, ErrorKind, Iface, Result, provider::StagedMemory};

/// Memory behind calls.
///
/// Positions count from the start of what the implementation stands for. Calls may come from any
/// thread.
pub(in super::super) trait IndirectMemory: fmt::Debug + Send + Sync {
    fn load(&self, at: u64, into: &mut [u8]) -> Result<()>;
    fn store(&self, at: u64, from: &[u8]) -> Result<()>;
    /// The address whose low bits say how `at` is aligned and where in its page it lies; or why
    /// there are no atomics.
    fn atomic_address(&self, at: u64) -> Result<u64>;
    /// Makes bytes that were written persistent, as far as the memory can be.
    fn persist(&self, at: u64, len: u64) -> Result<()>;
    /// The memory, if it is reached through copies: the same positions.
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
        // SAFETY: `into` is an exclusive borrow of its bytes; the iface checks its own side.
        unsafe {
            self.iface.copy(Address::of_ptr(into.as_mut_ptr()), Address(at), into.len() as u64)
        }
    }

    fn store(&self, at: u64, from: &[u8]) -> Result<()> {
        // SAFETY: `from` is a borrow of its bytes; the iface checks its own side.
        unsafe { self.iface.copy(Address(at), Address::of_ptr(from.as_ptr()), from.len() as u64) }
    }

    fn atomic_address(&self, _at: u64) -> Result<u64> {
        Err(Error::new(ErrorKind::Unsupported, "atomic")
            .provider("loopback")
            .iface(self.iface.kind())
            .context("why", "the memory is reached through copies")
            .remedy("atomics on device memory need a dma-buf registration"))
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
            .context("why", "the region is reached through staged copies, which cannot be atomic")
            .remedy("atomics on device memory need a path without copies: dma-buf or peer memory"))
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

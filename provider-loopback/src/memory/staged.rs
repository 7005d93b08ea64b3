//! Memory that is reached through staged copies.

use std::sync::Arc;

use hmem_core::{Error, ErrorKind, Result, provider::StagedMemory};

use super::IndirectMemory;

/// Positions count from the start of the piece.
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

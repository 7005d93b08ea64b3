//! Device memory that is reached through its iface: local buffers without a descriptor, and
//! peer-memory imports.

#![allow(unsafe_code)]

use std::sync::Arc;

use hmem_core::{Address, Error, ErrorKind, Iface, Result, provider::StagedMemory};

use super::IndirectMemory;

/// Positions are device addresses.
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

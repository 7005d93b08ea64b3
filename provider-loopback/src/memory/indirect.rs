//! Indirect memory: the NIC reads and writes it through function calls. This module has two kinds:
//!
//! - device memory, accessed through its iface: local buffers without a descriptor, and peer-memory
//!   imports
//! - staged memory, accessed through the copy engine of its owner
//!
//! The modules `file` and `pinned` implement [`IndirectMemory`] for two more kinds of memory.

#![allow(unsafe_code, reason = "copies through an iface by address")]

use std::{fmt, sync::Arc};

use hmem_core::{Address, AddressRange, Error, ErrorKind, Iface, Result};
use hmem_p2p::staging::StagedRange;

/// Memory that the NIC reads and writes through the methods of this trait, on any thread.
///
/// The argument `at` is the place of the first byte. It is an address or an offset, as each
/// implementation defines.
pub(in super::super) trait IndirectMemory: fmt::Debug + Send + Sync {
    /// Fills `into` with the bytes at `at`.
    fn load(&self, at: u64, into: &mut [u8]) -> Result<()>;
    /// Writes `from` to `at`.
    fn store(&self, at: u64, from: &[u8]) -> Result<()>;
    /// Returns an address that stands for the byte at `at` in atomics: with the alignment and the
    /// page offset of that byte. The alignment is checked, and the page offset selects a lock.
    ///
    /// # Errors
    /// Unsupported: the memory has no atomics.
    fn atomic_address(&self, at: u64) -> Result<u64>;
    /// Makes written bytes persistent if the memory itself is persistent. The default, for device
    /// memory, does nothing: the region flushes the device after this call, which makes the bytes
    /// persistent.
    fn persist(&self, _at: u64, _len: u64) -> Result<()> {
        Ok(())
    }
    /// Returns this memory as a [`StagedRange`], or `None` if it is not staged. The argument `at`
    /// of the other methods is then an offset in that range.
    fn staged(&self) -> Option<&StagedRange> {
        None
    }
}

/// Device memory. The argument `at` of its methods is a device address.
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
            .iface(&self.iface)
            .context("why", "the NIC copies this memory through its iface")
            .remedy("register the device memory by dma-buf for atomics"))
    }
}

/// Describes memory that the NIC reaches only through staging buffers: the addresses of `range`,
/// and the iface that copies from and to them. Allocates nothing.
pub(in super::super) fn staged(
    iface: &Arc<dyn Iface>,
    range: AddressRange,
) -> Arc<dyn IndirectMemory> {
    // SAFETY: the caller of `ProviderDomain::register` keeps the memory until it has deregistered
    // the region. Deregistration ends the transfers that use the region (`regions`).
    Arc::new(unsafe { StagedRange::new(Arc::clone(iface), range) })
}

/// Staged memory: device memory that a copy engine copies to and from staging buffers. The argument
/// `at` of its methods is an offset in the region's piece.
impl IndirectMemory for StagedRange {
    fn load(&self, at: u64, into: &mut [u8]) -> Result<()> {
        self.read(at, into)
    }

    fn store(&self, at: u64, from: &[u8]) -> Result<()> {
        self.write(at, from)
    }

    fn atomic_address(&self, _at: u64) -> Result<u64> {
        Err(Error::new(ErrorKind::Unsupported, "atomic")
            .provider("loopback")
            .context("why", "the region is staged, and copies cannot be atomic")
            .remedy("register the device memory by dma-buf or peer memory for atomics"))
    }

    fn staged(&self) -> Option<&StagedRange> {
        Some(self)
    }
}

//! Memory under test.

use hmem::{Address, Iface, IfaceExt, Result};
pub(crate) use hmem_conformance::link::{Bytes, HostPages};

/// Returns `len` nonzero bytes, which depend on their position and on the seed.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    hmem_conformance::link::pattern(seed, len as u64)
}

/// Safe wrappers of the unsafe copies by address. No test frees memory during a copy of it.
pub(crate) trait HeldCopies: Iface {
    fn read_bytes(&self, from: Address, into: &mut [u8]) -> Result<()> {
        // SAFETY: the test keeps the memory for the length of the call.
        unsafe { IfaceExt::read(self, from, into) }
    }

    fn write_bytes(&self, to: Address, from: &[u8]) -> Result<()> {
        // SAFETY: the test keeps the memory for the length of the call, and no reference to it
        // exists.
        unsafe { IfaceExt::write(self, to, from) }
    }
}

impl<I: Iface + ?Sized> HeldCopies for I {}

//! Copies between host addresses.

#![allow(unsafe_code, reason = "copies host memory by address")]

use hmem_core::{Address, AddressRange, Error, ErrorKind, IfaceKind, Result, racing_copy};

use super::System;
use crate::sys;

impl System {
    /// Copies `len` bytes between host addresses.
    ///
    /// # Errors
    /// - OutOfBounds: a range starts in an allocation of this iface and extends past its end.
    /// - AddressWraps: a range extends past the end of the address space.
    ///
    /// # Safety
    /// The caller must uphold the safety contract of [`hmem_core::Iface::copy`].
    pub(super) unsafe fn copy_bytes(&self, to: Address, from: Address, len: u64) -> Result<()> {
        // These references keep the memory allocated until the copy has ended, even if another
        // thread frees the allocation.
        let _to_stays = self.check_side(to, len)?;
        let _from_stays = self.check_side(from, len)?;
        // SAFETY: the caller promises that both ranges are valid for `len` bytes. `check_side`
        // verified the ranges in allocations of this iface.
        unsafe { racing_copy(sys::host_ptr(from), sys::host_ptr(to), len as usize) };
        Ok(())
    }

    fn check_side(
        &self,
        address: Address,
        len: u64,
    ) -> Result<Option<std::sync::Arc<super::Record>>> {
        let range = AddressRange::new(address, len)?;
        let record = self.record_at(address);
        match &record {
            Some(inside) if !inside.allocation.range.contains_range(range) => {
                Err(Error::new(ErrorKind::OutOfBounds, "copy")
                    .iface(IfaceKind::SYSTEM)
                    .context("range", range)
                    .context("allocation", inside.allocation.range)
                    .remedy("the copy must end within the allocation that it begins in"))
            }
            _ => Ok(record),
        }
    }
}

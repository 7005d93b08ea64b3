//! Copies between host memory and the files that hold device memory.

#![allow(unsafe_code, reason = "copies of the simulated device by address")]

use std::sync::{Arc, atomic::Ordering};

use hmem_core::{
    Address, AddressRange, Allocation, Error, ErrorKind, Result,
    iface::{CopyEngine, CopyEvent},
    racing_copy,
};

use super::{Simulated, SimulatedInner, arena::FileExtent, faults::DeviceCall};
use crate::sys;

/// A source or destination of a copy in memory of this iface. The value keeps the memory files
/// alive, but not the allocation.
#[derive(Debug)]
struct DeviceSide {
    allocation: Allocation,
    start: Address,
    extents: Vec<FileExtent>,
}

/// A copy with checked bounds: into device memory, out of it, or within it. Fields of type
/// [`Address`] are in host memory.
#[derive(Debug)]
enum CopySides {
    In { to: DeviceSide, from: Address },
    Out { to: Address, from: DeviceSide },
    Within { to: DeviceSide, from: DeviceSide },
}

impl SimulatedInner {
    /// Runs a blocking copy: waits for the simulated duration of the copy, and then moves the
    /// bytes.
    ///
    /// # Safety
    /// The caller must uphold the safety contract of [`hmem_core::Iface::copy`].
    pub(crate) unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        self.call(DeviceCall::Copy)?;
        let transfer = self.transfer(to, from, len)?;
        self.engine.pass_time(len);
        // SAFETY: the caller promises that the host memory is valid.
        unsafe { self.finish(&transfer) }
    }

    /// Moves the bytes of a copy. The caller has waited until the copy's simulated end.
    ///
    /// # Safety
    /// For the host memory of the copy, the caller must uphold the safety contract of
    /// [`hmem_core::Iface::copy`].
    unsafe fn finish(&self, transfer: &CopySides) -> Result<()> {
        self.check_still_there(transfer)?;
        // SAFETY: the caller promises that the host memory is valid, and `transfer` keeps the files
        // with the device memory alive.
        unsafe { transfer.run() }.map_err(|error| error.iface(&self.config))?;
        self.copies.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    fn transfer(&self, to: Address, from: Address, len: u64) -> Result<CopySides> {
        match (self.side(to, len)?, self.side(from, len)?) {
            (Some(to), None) => Ok(CopySides::In { to, from }),
            (None, Some(from)) => Ok(CopySides::Out { to, from }),
            (Some(to), Some(from)) => Ok(CopySides::Within { to, from }),
            (None, None) => Err(Error::new(ErrorKind::OutOfBounds, "copy")
                .iface(&self.config)
                .context("to", to)
                .context("from", from)
                .context("why", "neither side is memory of this iface")
                .remedy("copy host memory without a device's iface")),
        }
    }

    /// Returns the device memory at `address`, or `None` if the address is not in the range that
    /// this iface has reserved.
    ///
    /// # Errors
    /// - AddressWraps: the `len` bytes extend past the end of the address space.
    /// - OutOfBounds: the `len` bytes do not lie in one live allocation.
    fn side(&self, address: Address, len: u64) -> Result<Option<DeviceSide>> {
        let range = AddressRange::new(address, len)?;
        if !self.table.is_mine(address) {
            return Ok(None);
        }
        let (allocation, extents) = self.extents(range)?;
        Ok(Some(DeviceSide { allocation, start: address, extents }))
    }

    /// Checks that the device memory of a queued copy still belongs to the same allocations as when
    /// the copy was queued.
    ///
    /// # Errors
    /// BadState: an allocation was freed meanwhile. Another allocation may have its addresses by
    /// now.
    fn check_still_there(&self, transfer: &CopySides) -> Result<()> {
        let sides = match transfer {
            CopySides::In { to, .. } => [Some(to), None],
            CopySides::Out { from, .. } => [None, Some(from)],
            CopySides::Within { to, from } => [Some(to), Some(from)],
        };
        for DeviceSide { allocation, start, .. } in sides.into_iter().flatten() {
            if self.table.lookup(*start).map(|now| now.id) != Some(allocation.id) {
                return Err(Error::new(ErrorKind::BadState, "copy")
                    .iface(&self.config)
                    .context("allocation", allocation.range)
                    .context("identity", allocation.id.0)
                    .remedy("wait for a copy before its memory is freed"));
            }
        }
        Ok(())
    }
}

/// Queues asynchronous copies for the copy engine.
impl CopyEngine for Simulated {
    unsafe fn start_copy(
        &self,
        to: Address,
        from: Address,
        len: u64,
    ) -> Result<Box<dyn CopyEvent>> {
        self.inner.call(DeviceCall::CopyAsync)?;
        let transfer = self.inner.transfer(to, from, len)?;
        // The reference is weak, since dropping the iface must cancel queued copies. With a strong
        // one, a queued copy would keep the iface alive.
        let inner = Arc::downgrade(&self.inner);
        self.inner.engine.submit(
            len,
            Box::new(move || {
                let inner =
                    inner.upgrade().ok_or_else(|| Error::new(ErrorKind::Canceled, "copy"))?;
                inner.call(DeviceCall::EngineCopy)?;
                // SAFETY: the caller of `start_copy` keeps the host memory valid until the event is
                // done. The event is done only after this closure has returned.
                unsafe { inner.finish(&transfer) }
            }),
        )
    }
}

impl CopySides {
    /// Moves the bytes of the copy.
    ///
    /// # Safety
    /// Host memory of the copy must be valid for its length. No reference to the destination may
    /// exist.
    unsafe fn run(&self) -> Result<()> {
        match self {
            Self::In { to, from } => {
                let mut from = *from;
                for extent in &to.extents {
                    sys::write_at(extent.file.fd(), extent.offset, from, extent.len)?;
                    from = Address(from.0 + extent.len);
                }
                Ok(())
            }
            Self::Out { to, from } => {
                let mut to = *to;
                for extent in &from.extents {
                    // SAFETY: the caller allows overwriting the destination.
                    unsafe { sys::read_at(extent.file.fd(), extent.offset, to, extent.len)? };
                    to = Address(to.0 + extent.len);
                }
                Ok(())
            }
            Self::Within { to, from } => {
                let mut runs = common_runs(&to.extents, &from.extents);
                if to.start > from.start {
                    // If source and destination overlap, later bytes must be copied before they are
                    // overwritten.
                    runs.reverse();
                }
                for (to, from, len) in runs {
                    // SAFETY: both pointers lie in mappings that the extents keep alive, with `len`
                    // bytes after them. Each byte has only one mapping, so pointers to different
                    // mappings never overlap. The program accesses the mappings by `racing_copy`.
                    unsafe { racing_copy(from.cast_const(), to, len as usize) };
                }
                Ok(())
            }
        }
    }
}

/// Splits a copy into parts (destination, source, length) that each lie in one extent of `to`
/// and one extent of `from`. Both lists have the same total length.
fn common_runs(to: &[FileExtent], from: &[FileExtent]) -> Vec<(*mut u8, *mut u8, u64)> {
    let mut runs = Vec::with_capacity(to.len().max(from.len()));
    let (mut to, mut from) = (to.iter(), from.iter());
    let (mut to_now, mut from_now) = (to.next(), from.next());
    let (mut to_done, mut from_done) = (0, 0);
    while let (Some(a), Some(b)) = (to_now, from_now) {
        let len = (a.len - to_done).min(b.len - from_done);
        runs.push((a.file.at(a.offset + to_done), b.file.at(b.offset + from_done), len));
        to_done += len;
        from_done += len;
        if to_done == a.len {
            (to_now, to_done) = (to.next(), 0);
        }
        if from_done == b.len {
            (from_now, from_done) = (from.next(), 0);
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use hmem_core::{AllocationKind, DeviceId, IfaceExt, iface::AllocRequest};

    use super::*;
    use crate::AddressReuse;

    #[test]
    fn pending_copy_does_not_reach_freed_memory() {
        let simulated =
            Simulated::builder().address_reuse(AddressReuse::JustFreed).build().unwrap();
        let request = AllocRequest { len: 64, device: DeviceId(0), kind: AllocationKind::Device };
        let stale = simulated.allocate(&request).unwrap();
        let bytes = [9; 64];
        let transfer =
            simulated.inner.transfer(stale.base(), Address::of_ptr(bytes.as_ptr()), 64).unwrap();
        // SAFETY: no reference to the device memory exists, and no other thread uses it.
        unsafe { simulated.free(&stale) }.unwrap();
        let fresh = simulated.allocate(&request).unwrap();
        assert_eq!(fresh.base(), stale.base());
        // SAFETY: `bytes` is alive, and is the only host memory of the copy.
        let error = unsafe { simulated.inner.finish(&transfer) }.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadState);
        let mut back = [1; 64];
        // SAFETY: the allocation is alive.
        unsafe { simulated.read(fresh.base(), &mut back) }.unwrap();
        assert_eq!(back, [0; 64]);
    }
}

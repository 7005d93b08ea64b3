//! Copies between host memory and the files that hold device memory.

use std::sync::{Arc, atomic::Ordering};

use hmem_core::{
    Address, AddressRange, Allocation, Error, ErrorKind, Result,
    iface::{CopyEngine, CopyEvent},
};

use super::{Inner, Simulated, arena::ArenaFile, faults::Call};
use crate::sys;

/// A range of a memory file.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) file: Arc<ArenaFile>,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// The side of a copy that is memory of this iface. It keeps the memory files alive, but not the
/// allocation.
#[derive(Debug)]
struct Own {
    allocation: Allocation,
    start: Address,
    pieces: Vec<Piece>,
}

/// A copy that passed its checks. Addresses in it are host addresses.
#[derive(Debug)]
enum Transfer {
    In { to: Own, from: Address },
    Out { to: Address, from: Own },
    Within { to: Own, from: Own },
}

impl Inner {
    /// Runs a blocking copy: waits for the simulated duration, and then moves the bytes.
    ///
    /// # Safety
    /// The contract of [`hmem_core::Iface::copy`].
    pub(crate) unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        self.call(Call::Copy)?;
        let transfer = self.transfer(to, from, len)?;
        self.engine.pass_time(len);
        // SAFETY: the caller promises validity of the host memory.
        unsafe { self.finish(&transfer) }
    }

    /// Moves the bytes of a copy, once its deadline has come.
    ///
    /// # Safety
    /// The contract of [`hmem_core::Iface::copy`] for the host side. The transfer keeps the device
    /// side alive.
    unsafe fn finish(&self, transfer: &Transfer) -> Result<()> {
        self.check_still_there(transfer)?;
        // SAFETY: the caller promises validity of the host memory; the transfer keeps the files of
        // the device side alive.
        unsafe { transfer.run() }.map_err(|error| error.iface(self.config.kind))?;
        self.copies.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    fn transfer(&self, to: Address, from: Address, len: u64) -> Result<Transfer> {
        match (self.side(to, len)?, self.side(from, len)?) {
            (Some(to), None) => Ok(Transfer::In { to, from }),
            (None, Some(from)) => Ok(Transfer::Out { to, from }),
            (Some(to), Some(from)) => Ok(Transfer::Within { to, from }),
            (None, None) => Err(Error::new(ErrorKind::OutOfBounds, "copy")
                .iface(self.config.kind)
                .context("to", to)
                .context("from", from)
                .context("why", "neither side is memory of this iface")
                .remedy("copy host memory without a device's iface")),
        }
    }

    /// Returns the side at `address`, or `None` for host memory.
    fn side(&self, address: Address, len: u64) -> Result<Option<Own>> {
        let range = AddressRange::new(address, len)?;
        if !self.table.is_mine(address) {
            return Ok(None);
        }
        let (allocation, pieces) = self.pieces(range)?;
        Ok(Some(Own { allocation, start: address, pieces }))
    }

    /// Fails if device memory of a queued copy was freed. Its addresses may belong to another
    /// allocation now.
    fn check_still_there(&self, transfer: &Transfer) -> Result<()> {
        let sides = match transfer {
            Transfer::In { to, .. } => [Some(to), None],
            Transfer::Out { from, .. } => [None, Some(from)],
            Transfer::Within { to, from } => [Some(to), Some(from)],
        };
        for Own { allocation, start, .. } in sides.into_iter().flatten() {
            if self.table.lookup(*start).map(|now| now.id) != Some(allocation.id) {
                return Err(Error::new(ErrorKind::BadState, "copy")
                    .iface(self.config.kind)
                    .context("allocation", allocation.range)
                    .context("identity", allocation.id.0)
                    .remedy("wait for a copy before its memory is freed"));
            }
        }
        Ok(())
    }
}

/// Queues copies for the engine.
impl CopyEngine for Simulated {
    unsafe fn start_copy(
        &self,
        to: Address,
        from: Address,
        len: u64,
    ) -> Result<Box<dyn CopyEvent>> {
        self.inner.call(Call::CopyAsync)?;
        let transfer = self.inner.transfer(to, from, len)?;
        // Weak: otherwise a copy that is never stepped would keep the iface alive, whose drop
        // cancels it.
        let inner = Arc::downgrade(&self.inner);
        self.inner.engine.submit(
            len,
            Box::new(move || {
                let inner =
                    inner.upgrade().ok_or_else(|| Error::new(ErrorKind::Canceled, "copy"))?;
                inner.call(Call::EngineCopy)?;
                // SAFETY: the caller keeps the host memory valid until the event is done, which is
                // after this returns.
                unsafe { inner.finish(&transfer) }
            }),
        )
    }
}

impl Transfer {
    /// Moves the bytes of the copy.
    ///
    /// # Safety
    /// Host sides are valid for `len` bytes, and a host destination is not referenced elsewhere.
    unsafe fn run(&self) -> Result<()> {
        match self {
            Self::In { to, from } => {
                let mut from = *from;
                for piece in &to.pieces {
                    sys::write_at(piece.file.fd(), piece.offset, from, piece.len)?;
                    from = Address(from.0 + piece.len);
                }
                Ok(())
            }
            Self::Out { to, from } => {
                let mut to = *to;
                for piece in &from.pieces {
                    // SAFETY: the caller allows overwriting the destination.
                    unsafe { sys::read_at(piece.file.fd(), piece.offset, to, piece.len)? };
                    to = Address(to.0 + piece.len);
                }
                Ok(())
            }
            Self::Within { to, from } => {
                let mut runs = common_runs(&to.pieces, &from.pieces);
                if to.start > from.start {
                    // If the two overlap, later bytes must be copied before they are overwritten.
                    runs.reverse();
                }
                for (to, from, len) in runs {
                    // SAFETY: both pointers lie in mappings that the pieces keep alive, with `len`
                    // bytes after them. They may overlap within one mapping, which memmove allows;
                    // one byte is in one mapping only.
                    unsafe { sys::copy_bytes(from.cast_const(), to, len as usize) };
                }
                Ok(())
            }
        }
    }
}

/// Splits two lists of pieces of equal total length into runs (destination, source, length) that
/// cross no boundary of either.
fn common_runs(to: &[Piece], from: &[Piece]) -> Vec<(*mut u8, *mut u8, u64)> {
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
        // SAFETY: nothing refers to the device memory.
        unsafe { simulated.free(&stale) }.unwrap();
        let fresh = simulated.allocate(&request).unwrap();
        assert_eq!(fresh.base(), stale.base());
        // SAFETY: `bytes` is alive, and the only host memory of the copy.
        let error = unsafe { simulated.inner.finish(&transfer) }.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadState);
        let mut back = [1; 64];
        // SAFETY: the allocation is alive.
        unsafe { simulated.read(fresh.base(), &mut back) }.unwrap();
        assert_eq!(back, [0; 64]);
    }
}

//! A test device whose memory is reached by copies only.

use hmem_core::{
    Address, AddressRange, Allocation, Error, ErrorKind, Iface, IfaceKind, Result, iface::Device,
};

/// The effect of the copies of a [`CopiedDevice`]. Offsets count from the start of its memory.
pub(crate) trait Copies: std::fmt::Debug + Send + Sync + 'static {
    /// Fills `into` with the bytes of the memory from `offset`.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()>;
    /// Writes `from` into the memory at `offset`.
    fn write(&self, offset: u64, from: &[u8]) -> Result<()>;
}

/// A device without a copy engine that has memory at the addresses of `range`.
#[derive(Debug)]
pub(crate) struct CopiedDevice<C> {
    pub(crate) range: AddressRange,
    pub(crate) copies: C,
}

// SAFETY: the iface accesses only the host memory of its callers, which they keep valid.
unsafe impl<C: Copies> Iface for CopiedDevice<C> {
    fn kind(&self) -> IfaceKind {
        IfaceKind::FIRST_PLUG_IN
    }

    fn name(&self) -> &str {
        "copied"
    }

    fn devices(&self) -> Result<Vec<Device>> {
        Ok(Vec::new())
    }

    fn query(&self, _: Address) -> Result<Option<Allocation>> {
        Ok(None)
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        let offset = |at: Address| at.0 - self.range.start().0;
        if self.range.contains(from) {
            let mut bytes = vec![0; len as usize];
            self.copies.read(offset(from), &mut bytes)?;
            let to = std::ptr::with_exposed_provenance_mut(to.0 as usize);
            // SAFETY: the caller vouches for `len` writable bytes.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
            Ok(())
        } else if self.range.contains(to) {
            let from = std::ptr::with_exposed_provenance::<u8>(from.0 as usize);
            // SAFETY: the caller vouches for `len` readable bytes that no thread writes meanwhile.
            let bytes = unsafe { std::slice::from_raw_parts(from, len as usize) };
            self.copies.write(offset(to), bytes)
        } else {
            Err(Error::new(ErrorKind::OutOfBounds, "copy"))
        }
    }
}

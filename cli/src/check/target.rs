//! Registered memory that a check writes to.

#![allow(unsafe_code, reason = "registers memory by address")]

use hmem::{
    DeviceBuffer, Domain, Error, ErrorKind, Memory, MemoryRegion, Promise, Raw, Region, Request,
    Result,
};

/// A registered region with access to its bytes through the iface.
pub(super) trait CheckedRegion {
    /// Returns the region that transfers read and write.
    fn region(&self) -> &MemoryRegion;

    /// Copies the start of the region to `into`, through the iface.
    fn read(&self, into: &mut [u8]) -> Result<()>;

    /// Copies `from` to the start of the region, through the iface.
    fn write(&self, from: &[u8]) -> Result<()>;

    /// Closes the region, then frees the memory.
    fn close(self) -> Result<()>;
}

impl<M: Memory> CheckedRegion for Region<M> {
    fn region(&self) -> &MemoryRegion {
        self
    }

    fn read(&self, into: &mut [u8]) -> Result<()> {
        self.read(0, into)
    }

    fn write(&self, from: &[u8]) -> Result<()> {
        self.write(0, from)
    }

    fn close(self) -> Result<()> {
        Region::close(self)?;
        Ok(())
    }
}

/// Memory registered by its address, as `fi_mr_reg` and `ibv_reg_mr` do. The region does not own
/// the memory.
#[derive(Debug)]
pub(super) struct BorrowedRegion {
    /// Declared before the buffer, and therefore dropped first.
    region: Region<Raw>,
    buffer: DeviceBuffer,
    /// Offset of the region in the buffer, in bytes.
    start: u64,
}

impl BorrowedRegion {
    /// Registers `len` bytes of a buffer from offset `start`.
    pub(super) fn register(
        domain: &Domain,
        buffer: DeviceBuffer,
        (start, len): (u64, u64),
        request: impl FnOnce(Raw) -> Request<'static, Raw>,
    ) -> Result<Self> {
        let range = buffer.allocation().range.slice(start, len).ok_or_else(|| {
            Error::new(ErrorKind::OutOfBounds, "register")
                .context("allocation", buffer.allocation().range)
        })?;
        // SAFETY: no reference into the buffer exists. `close` and the order of the fields free the
        // buffer after the region is closed or dropped.
        let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
        let region = domain.submit(request(memory))?;
        Ok(Self { region, buffer, start })
    }
}

impl CheckedRegion for BorrowedRegion {
    fn region(&self) -> &MemoryRegion {
        &self.region
    }

    fn read(&self, into: &mut [u8]) -> Result<()> {
        self.buffer.read(self.start, into)
    }

    fn write(&self, from: &[u8]) -> Result<()> {
        self.buffer.write(self.start, from)
    }

    fn close(self) -> Result<()> {
        self.region.close()?;
        drop(self.buffer);
        Ok(())
    }
}

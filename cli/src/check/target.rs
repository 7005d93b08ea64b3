//! Registered memory that a check writes to.

#![allow(unsafe_code, reason = "registers memory by address")]

use hmem::{
    DeviceBuffer, Domain, Error, ErrorKind, Memory, MemoryRegion, Promise, Raw, Region, Request,
    Result,
};

/// A registered region with access to the bytes of its memory through the iface.
#[derive(Debug)]
pub(super) struct Target<M: Memory> {
    /// The registered region. Declared before `buffer`, so that the region is dropped first.
    region: Region<M>,
    /// The buffer that owns the memory, with the offset of the region in bytes; `None` if the
    /// region owns its memory.
    buffer: Option<(DeviceBuffer, u64)>,
}

impl Target<Raw> {
    /// Registers `len` bytes of a buffer from offset `start`, by their address, as `fi_mr_reg` and
    /// `ibv_reg_mr` do. The region does not own the memory.
    pub(super) fn borrow(
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
        Ok(Self { region: domain.submit(request(memory))?, buffer: Some((buffer, start)) })
    }
}

impl<M: Memory> Target<M> {
    /// Wraps a region that owns its memory.
    pub(super) fn own(region: Region<M>) -> Self {
        Self { region, buffer: None }
    }

    /// Returns the region that transfers read and write.
    pub(super) fn region(&self) -> &MemoryRegion {
        &self.region
    }

    /// Copies the start of the region to `into`, through the iface.
    pub(super) fn read(&self, into: &mut [u8]) -> Result<()> {
        match &self.buffer {
            Some((buffer, start)) => buffer.read(*start, into),
            None => self.region.read(0, into),
        }
    }

    /// Copies `from` to the start of the region, through the iface.
    pub(super) fn write(&self, from: &[u8]) -> Result<()> {
        match &self.buffer {
            Some((buffer, start)) => buffer.write(*start, from),
            None => self.region.write(0, from),
        }
    }

    /// Closes the region, then frees the memory.
    pub(super) fn close(self) -> Result<()> {
        self.region.close()?;
        Ok(())
    }
}

//! Registered memory that a check writes to, owned by its region or not.

use hmem::{
    DeviceBuffer, Domain, Error, ErrorKind, MemoryRegion, MrAttr, MrFlags, OwnedBuffer,
    OwnedRegion, Rejected, Result,
};

/// A region, and the iface's way to its bytes.
pub(super) trait Registration {
    /// The region.
    fn region(&self) -> &MemoryRegion;

    /// Copies bytes out through the iface.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()>;

    /// Copies bytes in through the iface.
    fn write(&self, offset: u64, from: &[u8]) -> Result<()>;

    /// Closes the region, then frees the memory.
    fn close(self) -> Result<()>;
}

impl<B: OwnedBuffer> Registration for OwnedRegion<B> {
    fn region(&self) -> &MemoryRegion {
        self
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.read(offset, into)
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.write(offset, from)
    }

    fn close(self) -> Result<()> {
        OwnedRegion::close(self)?;
        Ok(())
    }
}

/// Memory registered by its address alone, as `fi_mr_reg` and `ibv_reg_mr` do: the NIC must cope
/// with pages that nobody keeps for it.
#[derive(Debug)]
pub(super) struct Borrowed {
    /// Before the buffer, so that it is dropped first.
    region: MemoryRegion,
    buffer: DeviceBuffer,
    /// First byte of the region, from the start of the buffer.
    start: u64,
}

impl Borrowed {
    /// Registers `len` bytes from `start` of a buffer.
    pub(super) fn register(
        domain: &Domain,
        buffer: DeviceBuffer,
        (start, len): (u64, u64),
        attr: &MrAttr<'_>,
    ) -> Result<Self, Rejected<DeviceBuffer>> {
        let Some(range) = buffer.allocation().range.slice(start, len) else {
            let error = Error::new(ErrorKind::OutOfBounds, "register")
                .context("allocation", buffer.allocation().range);
            return Err(Rejected::new(buffer, error));
        };
        let ranges = [range];
        let attr = MrAttr { ranges: &ranges, ..*attr };
        // SAFETY: the buffer is plain addresses to which no reference exists, and it is freed after
        // the region is closed or dropped: `close` and the order of the fields see to that.
        #[allow(unsafe_code, reason = "the region borrows what this value owns")]
        match unsafe { domain.regattr(&attr, MrFlags::empty()) } {
            Ok(region) => Ok(Self { region, buffer, start }),
            Err(error) => Err(Rejected::new(buffer, error)),
        }
    }
}

impl Registration for Borrowed {
    fn region(&self) -> &MemoryRegion {
        &self.region
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.buffer.read(self.start.saturating_add(offset), into)
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.buffer.write(self.start.saturating_add(offset), from)
    }

    fn close(self) -> Result<()> {
        self.region.close()?;
        drop(self.buffer);
        Ok(())
    }
}

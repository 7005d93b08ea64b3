//! The iface: combines a driver with a table of allocations.

#![allow(unsafe_code, reason = "implements the trait over a driver")]

use std::{fmt, mem::ManuallyDrop, sync::Arc};

use hmem_core::{
    Address, AddressRange, AllocOffset, Allocation, AllocationKind, DeviceId, DmaBufOffset, Error,
    ErrorKind, Iface, IfaceKind, Rejected, Result,
    cause::RefusalCause,
    iface::{
        AllocRequest, Allocator, Device, DmaBufExport, DmaBufExporter, DmaBufMapping, Facet,
        InboundFlush, MonitorSource,
    },
    monitor::{DetectionMethod, Monitor},
    provider::Nic,
};
use parking_lot::Mutex;

use super::{
    driver::{Block, BlockRange, Driver, Open},
    monitor::TableMonitor,
    table::{AnnouncedMemory, AnnouncedOrigin, Table},
};
use crate::{errors::IfaceErrors, log_failure};

/// Length in bytes of the host buffer for copies between two allocations.
const BOUNCE: u64 = 1 << 20;

/// An iface over a driver that cannot tell which allocation an address belongs to. The iface finds
/// the allocation in a table instead.
///
/// A forked child cannot use its parent's iface: operations return
/// [`BadState`](ErrorKind::BadState), and dropping the iface makes no driver call.
pub struct Announced<D: Driver> {
    /// The driver. A forked child does not drop the driver, since the parent still uses the
    /// driver's handles.
    driver: ManuallyDrop<D>,
    table: Arc<Table<D::Handle>>,
    /// Memory that the application freed while a NIC or a process still used one of its dma-bufs.
    /// The iface frees the memory after the last use ([module `exports`](super::exports)).
    lingering: Mutex<Vec<AnnouncedMemory<D::Handle>>>,
}

impl<D: Driver> fmt::Debug for Announced<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Announced")
            .field("name", &D::NAME)
            .field("allocations", &self.table.len())
            .finish_non_exhaustive()
    }
}

impl<D: Driver> Announced<D> {
    const ERRORS: IfaceErrors = IfaceErrors(D::KIND);

    /// Creates an iface over a driver.
    ///
    /// # Errors
    /// The errors of [`ProcessMark::current`](hmem_core::ProcessMark::current).
    pub fn new(driver: D) -> Result<Self> {
        let table = Table::new(D::KIND).map_err(|error| error.iface(D::KIND))?;
        let (driver, table) = (ManuallyDrop::new(driver), Arc::new(table));
        Ok(Self { driver, table, lingering: Mutex::default() })
    }

    /// Returns the driver that the iface was created with.
    pub fn driver(&self) -> &D {
        &self.driver
    }

    /// Announces memory that the application allocated through the vendor's library. After the
    /// call, [`query`](Iface::query) returns the allocation.
    ///
    /// # Safety
    /// - `range` must be memory of `device`, and `handle` must be the driver's handle of the
    ///   allocation that begins at the start of `range`.
    /// - The memory must stay allocated until it was withdrawn ([`withdraw`](Self::withdraw)) and
    ///   every region, dma-buf and copy of it has ended. The drivers of Neuron and Gaudi free
    ///   memory even while the memory is registered with a NIC: a region that outlives its memory
    ///   reaches the next allocation at the address.
    ///
    /// # Errors
    /// - ZeroLength for an empty range.
    /// - InvalidArgument for an unknown device, and for a range that overlaps a live allocation.
    /// - BadState in a forked child.
    pub unsafe fn announce(
        &self,
        range: AddressRange,
        device: DeviceId,
        handle: D::Handle,
    ) -> Result<Allocation> {
        const OPERATION: &str = "announce";
        let described = |error: Error| error.context("range", range);
        self.check_device(OPERATION, device).map_err(described)?;
        if range.is_empty() {
            let refused = Self::ERRORS.error(ErrorKind::ZeroLength, OPERATION);
            return Err(described(refused.device(device)));
        }
        self.table.insert(OPERATION, Block { range, device, handle }, AnnouncedOrigin::Announced)
    }

    /// Withdraws announced memory, which the application is about to free. Invalidates every cached
    /// registration of the memory. After the call, [`query`](Iface::query) does not return the
    /// memory.
    ///
    /// # Errors
    /// - InvalidArgument if the memory is not announced. The registrations are invalidated
    ///   nevertheless.
    /// - BadState in a forked child.
    pub fn withdraw(&self, allocation: &Allocation) -> Result<()> {
        self.check_process("withdraw")?;
        let remove = || self.table.remove("withdraw", allocation, AnnouncedOrigin::Announced);
        self.table.subscriptions.while_freeing(allocation.range, remove).map(drop)
    }

    /// Closes the iface, and releases the resources that its driver keeps for copies.
    ///
    /// # Errors
    /// - [`ErrorKind::Busy`] while memory is allocated or announced.
    /// - [`ErrorKind::Busy`] while a dma-buf of freed memory is in use, or if the driver refused to
    ///   free the memory after that use.
    /// - [`ErrorKind::BadState`] in a forked child.
    /// - Otherwise the error that the driver reported.
    ///
    /// The error holds the iface, which still works and can be closed again.
    pub fn close(self) -> Result<(), Rejected<Self>> {
        if let Err(error) = self.check_process("close") {
            return Err(Rejected::new(self, error));
        }
        self.free_lingering();
        let busy = |what, count, remedy| {
            let busy = Self::ERRORS.error(ErrorKind::Busy, "close");
            Err(busy.context(what, count).remedy(remedy))
        };
        let closed = match (self.table.len(), self.lingering.lock().len()) {
            (0, 0) => self.driver.close(),
            (0, lingering) => busy("exported", lingering, "deregister the freed memory first"),
            (live, _) => busy("allocations", live, "free or withdraw the memory first"),
        };
        closed.map_err(|error| Rejected::new(self, error))
    }

    /// Checks that the calling process opened the iface.
    ///
    /// # Errors
    /// BadState in a forked child.
    fn check_process(&self, operation: &'static str) -> Result<()> {
        self.table.process.check(operation).map_err(|error| error.iface(D::KIND))
    }

    fn check_device(&self, operation: &'static str, device: DeviceId) -> Result<()> {
        self.check_process(operation)?;
        let count = self.driver.device_count();
        if device.0 < count {
            return Ok(());
        }
        Err(Self::ERRORS.unknown_device(operation, device, count as usize))
    }

    /// Frees the memory of an entry that was removed from the table. If a dma-buf of the memory is
    /// in use, moves the entry to `lingering` instead.
    ///
    /// # Errors
    /// The error that the driver reported, with the entry. The memory is still allocated.
    fn release(
        &self,
        mut entry: AnnouncedMemory<D::Handle>,
    ) -> Result<(), (AnnouncedMemory<D::Handle>, Error)> {
        entry.exports.close_unused(|fd| self.driver.others_use(fd));
        if !entry.exports.is_empty() {
            let range = entry.block.range;
            tracing::debug!(iface = D::NAME, %range, "freed memory is kept for its dma-bufs");
            self.lingering.lock().push(entry);
            return Ok(());
        }
        let Block { range, device, handle } = entry.block;
        // SAFETY: `Driver::allocate` returned the memory, and its entry is no longer in the table.
        // The caller of `Allocator::free` promised that nothing uses it.
        let freed = unsafe { self.driver.free(device, range.start(), handle) };
        freed.map_err(|error| (entry, error))
    }

    /// Frees the memory in `lingering` that no dma-buf uses any longer. If the driver refuses, logs
    /// the error and keeps the memory in `lingering`.
    fn free_lingering(&self) {
        let kept = std::mem::take(&mut *self.lingering.lock());
        for entry in kept {
            if let Err((entry, error)) = self.release(entry) {
                let range = entry.block.range;
                let error = error.full();
                tracing::warn!(iface = D::NAME, %range, %error, "cannot free memory");
                self.lingering.lock().push(entry);
            }
        }
    }

    /// Copies between two allocations through host memory, since some drivers cannot copy between
    /// devices.
    ///
    /// # Safety
    /// The caller must uphold the safety contract of [`Iface::copy`].
    unsafe fn copy_between(
        &self,
        to: BlockRange<D::Handle>,
        from: BlockRange<D::Handle>,
    ) -> Result<()> {
        let mut buffer = vec![0u8; to.len.min(BOUNCE) as usize];
        let host = Address::of_ptr(buffer.as_mut_ptr());
        // Copies the last bytes first if the destination may overlap later bytes of the source.
        let backwards = to.address() > from.address();
        let mut done = 0;
        while done < to.len {
            let len = (to.len - done).min(BOUNCE);
            let at = if backwards { to.len - done - len } else { done };
            let piece = |of: BlockRange<_>| BlockRange { offset: of.offset + at, len, ..of };
            // SAFETY: the buffer has `len` writable bytes. The piece lies in memory that the caller
            // keeps allocated.
            unsafe { self.driver.read(&piece(from), host) }?;
            // SAFETY: the buffer has `len` initialised bytes. The piece lies in memory that the
            // caller keeps allocated.
            unsafe { self.driver.write(&piece(to), host) }?;
            done += len;
        }
        Ok(())
    }
}

impl<D: Open> Announced<D> {
    /// Environment variable that names the library to load, unless the builder names one.
    pub const LIBRARY_VARIABLE: &str = D::LIBRARY_VARIABLE;

    /// Environment variable that permits the iface to start the vendor's runtime, if its value is
    /// 1, yes, true or on. A decision of the builder overrides the variable.
    pub const START_VARIABLE: &str = D::START_VARIABLE;

    /// Opens the library that the environment names, or the one that the dynamic loader finds.
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidArgument`] if [`Self::START_VARIABLE`] is not a boolean.
    /// - [`ErrorKind::Unavailable`] if the library, a required symbol or a device is absent, or the
    ///   library refuses a call.
    /// - Otherwise the errors of [`Self::new`].
    pub fn open() -> Result<Self> {
        D::open(Self::builder()).and_then(Self::new)
    }

    /// Returns a builder, which can load another library or use functions that the caller provides.
    #[must_use]
    pub fn builder() -> D::Builder {
        D::Builder::default()
    }
}

impl<D: Driver> Drop for Announced<D> {
    fn drop(&mut self) {
        if !self.table.process.is_current() {
            return;
        }
        self.free_lingering();
        let (live, kept) = (self.table.len(), self.lingering.lock().len());
        if live + kept > 0 {
            tracing::warn!(iface = D::NAME, live, kept, "memory is left when its iface is dropped");
        }
        // SAFETY: nothing uses the driver after this call, since the value is being dropped.
        unsafe { ManuallyDrop::drop(&mut self.driver) };
    }
}

// SAFETY:
// - The table has only live memory: memory that the driver allocated, until it is freed, and
//   announced memory, which the caller of `announce` promised to keep allocated until it is
//   withdrawn.
// - `Table::insert` refuses overlaps and gives each allocation an identity of its own.
// - `Table::locate` checks the bounds of copies and exports.
// - `release` frees no memory while one of its dma-bufs is in use. A caller of `announce` promised
//   the same for announced memory.
unsafe impl<D: Driver> Iface for Announced<D> {
    fn kind(&self) -> IfaceKind {
        D::KIND
    }

    fn name(&self) -> &str {
        D::NAME
    }

    fn devices(&self) -> Result<Vec<Device>> {
        self.driver.devices()
    }

    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        self.table.query(address)
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        const OPERATION: &str = "copy";
        if len == 0 {
            return Ok(());
        }
        let side = |address| self.table.locate(OPERATION, address, len);
        let sides = (side(to)?.map(|found| found.within), side(from)?.map(|found| found.within));
        // SAFETY: the caller promises that host memory is valid and that all memory stays
        // allocated. `Table::locate` checked the bounds of device memory.
        let copied = unsafe {
            match sides {
                (Some(to), None) => self.driver.write(&to, from),
                (None, Some(from)) => self.driver.read(&from, to),
                (Some(to), Some(from)) => self.copy_between(to, from),
                (None, None) => Err(Self::ERRORS
                    .error(ErrorKind::OutOfBounds, OPERATION)
                    .remedy("one side must be allocated or announced memory of this iface")),
            }
        };
        copied.map_err(|error| error.context("to", to).context("from", from).context("length", len))
    }

    fn allocator(&self) -> Option<&dyn Allocator> {
        Some(self)
    }

    fn dma_buf(&self) -> Option<&dyn DmaBufExporter> {
        self.driver.no_dma_buf().is_none().then_some(self)
    }

    /// Always returns the facet, because an absent facet would mean that no flush is needed. The
    /// flush fails if the driver has no call for it. An application can then flush by a read
    /// through the NIC, as NCCL's plug-in for Neuron does.
    fn inbound_flush(&self) -> Option<&dyn InboundFlush> {
        Some(self)
    }

    fn monitor(&self) -> Option<&dyn MonitorSource> {
        Some(self)
    }

    fn causes(&self) -> &'static [RefusalCause] {
        self.driver.causes()
    }

    fn unavailable(&self, facet: Facet) -> Error {
        let dma_buf = (facet == Facet::DmaBuf).then(|| self.driver.no_dma_buf()).flatten();
        dma_buf.unwrap_or_else(|| self.driver.lacks(facet))
    }
}

impl<D: Driver> Allocator for Announced<D> {
    fn allocate(&self, request: &AllocRequest) -> Result<Allocation> {
        const OPERATION: &str = "allocate";
        let &AllocRequest { len, device, kind } = request;
        self.check_device(OPERATION, device)?;
        let unsupported =
            (kind != AllocationKind::Device).then_some("the iface allocates device memory only");
        Self::ERRORS.allocate(request, unsupported, || {
            self.free_lingering();
            // The drivers map and export whole pages of the host only.
            let whole = len
                .checked_next_multiple_of(rustix::param::page_size() as u64)
                .ok_or_else(|| Self::ERRORS.error(ErrorKind::OutOfResources, OPERATION))?;
            let (address, handle) = self.driver.allocate(device, whole)?;
            let entered = AddressRange::new(address, len).and_then(|range| {
                let block = Block { range, device, handle };
                self.table.insert(OPERATION, block, AnnouncedOrigin::Allocated)
            });
            if entered.is_err() {
                // SAFETY: `Driver::allocate` returned the memory, and no caller has seen it.
                let freed = unsafe { self.driver.free(device, address, handle) };
                log_failure!(warn, freed, iface = D::NAME, "cannot free unlisted memory");
            }
            entered
        })
    }

    unsafe fn free(&self, allocation: &Allocation) -> Result<()> {
        self.check_process("free")?;
        self.free_lingering();
        self.table.subscriptions.while_freeing(allocation.range, || {
            let entry = self.table.remove("free", allocation, AnnouncedOrigin::Allocated)?;
            self.release(entry).map_err(|(entry, error)| {
                self.table.restore(entry);
                error.context("allocation", allocation.range)
            })
        })
    }

    fn is_device_active(&self, device: DeviceId) -> Result<bool> {
        self.check_device("is_device_active", device)?;
        self.driver.is_active(device)
    }
}

impl<D: Driver> DmaBufExporter for Announced<D> {
    fn mappings(&self) -> &'static [DmaBufMapping] {
        &[DmaBufMapping::Default]
    }

    fn export(
        &self,
        range: AddressRange,
        of: &Allocation,
        nic: &Nic,
        mapping: DmaBufMapping,
    ) -> Result<DmaBufExport> {
        const OPERATION: &str = Facet::DmaBuf.operation();
        let described = |error: Error| error.context("range", range).context("nic", nic);
        let refused = |kind| described(Self::ERRORS.error(kind, OPERATION));
        if range.is_empty() {
            return Err(refused(ErrorKind::ZeroLength));
        }
        if mapping != DmaBufMapping::Default {
            return Err(refused(ErrorKind::Unsupported)
                .context("why", "the driver has the default mapping only"));
        }
        let outside = || {
            refused(ErrorKind::OutOfBounds)
                .remedy("the range must lie in allocated or announced memory")
        };
        let located =
            self.table.locate(OPERATION, range.start(), range.len()).map_err(described)?;
        let located = located.filter(|located| located.id == of.id).ok_or_else(outside)?;
        let within = located.within;
        let described = |error: Error| described(error.device(within.block.device));
        let pages = range.page_aligned(rustix::param::page_size() as u64);
        let dma_buf = self.driver.export(&within.block, pages).map_err(described)?;
        let kept = rustix::io::fcntl_dupfd_cloexec(&dma_buf.fd, 0)
            .map_err(|errno| Error::os(errno, "fcntl(F_DUPFD_CLOEXEC)").iface(D::KIND))
            .map_err(described)?;
        if !self.table.keep_export(&located, kept, |fd| self.driver.others_use(fd)) {
            return Err(outside().device(within.block.device));
        }
        Ok(DmaBufExport {
            fd: dma_buf.fd,
            offset: DmaBufOffset(dma_buf.offset + (range.start().0 - pages.start().0)),
            alloc_offset: AllocOffset(within.offset),
            len: range.len(),
            mapping,
            revocation: None,
        })
    }
}

impl<D: Driver> InboundFlush for Announced<D> {
    fn flush(&self, device: DeviceId) -> Result<()> {
        self.check_device("flush_inbound", device)?;
        self.driver.flush(device)
    }
}

impl<D: Driver> MonitorSource for Announced<D> {
    fn detection(&self) -> DetectionMethod {
        DetectionMethod::Callback
    }

    fn start(&self) -> Result<Arc<dyn Monitor>> {
        Ok(Arc::new(TableMonitor { iface: D::KIND, table: Arc::downgrade(&self.table) }))
    }
}

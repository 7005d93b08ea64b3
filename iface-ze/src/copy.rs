//! Copies of device memory: to and from host memory, and between allocations.
//!
//! Each copy by a device runs on a [`Lane`] of its own. The device accesses its own memory and host
//! memory of its driver only. Other host memory is copied through the lane's buffer, since a device
//! may not be able to access that memory. An asynchronous copy has ended when the call that starts
//! it returns, if the two sides are on different devices or the bytes do not fit into the buffer.
//!
//! No lane is ordered after the queues of the application: the application waits for its own work
//! that writes the source.

#![allow(unsafe_code, reason = "copies by address")]

use std::sync::Arc;

use hmem_core::{
    Address, AddressRange, AllocationKind, ErrorKind, Result,
    iface::{CopyEngine, CopyEvent, CopyRange, FinishedCopy},
};
use hmem_iface_kit::{DeviceCopy, InFlight};

use crate::{
    driver::DeviceEntry,
    error::ZE,
    lanes::{BUFFER, Lane, Lanes},
    lookup::Lookup,
    sys::ZeResult,
};

/// Copies memory. Each copy in flight holds a reference to the [lanes](Lane).
#[derive(Debug)]
pub(crate) struct Copier(Arc<Lanes>);

/// Kind of the source or destination memory of a copy.
#[derive(Clone, Copy, Debug)]
enum CopySide<'a> {
    Device(&'a DeviceEntry),
    /// Host memory that a driver allocated, with the index of the driver.
    DriverHost(usize),
    /// Shared memory (`zeMemAllocShared`), which the CPU copies.
    Shared,
    /// Host memory that no driver knows.
    Unknown,
}

/// The way in which a copy runs.
enum Route<'a> {
    /// The CPU has already copied the bytes.
    Done,
    /// This device copies, since it can access both sides.
    Direct(&'a DeviceEntry),
    /// The copy runs through the buffer of a [`Lane`] of the source device, of the destination
    /// device, or of both. `None` stands for host memory.
    Buffered(Option<&'a DeviceEntry>, Option<&'a DeviceEntry>),
}

impl Copier {
    pub(crate) fn new(lookup: Arc<Lookup>) -> Self {
        Self(Arc::new(Lanes::new(lookup)))
    }

    /// Returns the number of asynchronous copies that are not finished yet.
    pub(crate) fn in_flight(&self) -> usize {
        Arc::strong_count(&self.0) - 1
    }

    /// Destroys the idle [lanes](Lane). The next copy creates new ones.
    pub(crate) fn release(&self) -> Result<()> {
        self.0.release()
    }

    /// Copies `len` bytes, and waits for the end of the copy.
    ///
    /// # Safety
    /// The caller must uphold the safety contract of [`hmem_core::Iface::copy`].
    pub(crate) unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        let copy = CopyRange { to, from, len };
        // SAFETY: the caller upholds the contract of `Iface::copy`.
        let started = unsafe { self.start(copy) }?;
        let finished = started.map_or(Ok(()), LaneCopy::finish);
        finished.map_err(|error| copy.described(error))
    }

    /// Starts a copy. Returns `None` if the copy has ended.
    ///
    /// # Safety
    /// The caller must uphold the safety contract of [`hmem_core::Iface::copy`] until the copy has
    /// ended.
    unsafe fn start(&self, copy: CopyRange) -> Result<Option<LaneCopy>> {
        self.0.lookup.driver.check_process("copy")?;
        // SAFETY: the caller upholds the contract of `Iface::copy`.
        let started = match unsafe { self.route(copy) }? {
            Route::Done => return Ok(None),
            Route::Direct(entry) => self.begin(entry, |_| (copy, None)),
            Route::Buffered(None, Some(entry)) if copy.len <= BUFFER => {
                self.begin(entry, |buffer| {
                    // SAFETY: the source is host memory, and this copy owns the lane to which the
                    // buffer belongs.
                    unsafe { CopyRange { to: buffer, ..copy }.copy_by_cpu() };
                    (CopyRange { from: buffer, ..copy }, None)
                })
            }
            Route::Buffered(Some(entry), None) if copy.len <= BUFFER => {
                self.begin(entry, |buffer| {
                    let rest = CopyRange { from: buffer, ..copy };
                    (CopyRange { to: buffer, ..copy }, Some(rest))
                })
            }
            Route::Buffered(from, to) => {
                // SAFETY: the caller upholds the contract of `Iface::copy`, and sides without a
                // device are host memory.
                let copied = unsafe { self.0.run_buffered(copy, from, to) };
                return copied.map(|()| None).map_err(|error| copy.described(error));
            }
        };
        started.map(Some).map_err(|error| copy.described(error))
    }

    /// Starts a copy by a device, on a [`Lane`]. `plan` gets the address of the lane's buffer, and
    /// returns up to two copies. The first is for the device. The second, from the buffer to host
    /// memory, is made by the CPU afterwards.
    fn begin(
        &self,
        entry: &DeviceEntry,
        plan: impl FnOnce(Address) -> (CopyRange, Option<CopyRange>),
    ) -> Result<LaneCopy> {
        let mut lane = self.0.take(entry)?;
        let (copy, rest) = plan(Address(lane.buffer));
        match self.0.start(&mut lane, copy) {
            Ok(()) => Ok(LaneCopy { lanes: Arc::clone(&self.0), lane, rest }),
            Err(error) => {
                self.0.leave(lane, Some(&error));
                Err(error)
            }
        }
    }

    /// Returns the route of a copy. If neither side is memory of a device, copies by the CPU.
    ///
    /// # Errors
    /// - OutOfBounds if no driver knows either side and the length is not 0.
    /// - OutOfBounds if a side begins in an allocation and reaches beyond its end.
    /// - InvalidArgument if both sides are memory of one device and overlap.
    /// - AddressWraps if a side passes the end of the address space.
    /// - Otherwise the error of the driver.
    ///
    /// # Safety
    /// The caller must uphold the safety contract of [`hmem_core::Iface::copy`].
    unsafe fn route(&self, copy: CopyRange) -> Result<Route<'_>> {
        let CopyRange { to, from, len } = copy;
        let (target, source) = (self.side(to, len)?, self.side(from, len)?);
        if len == 0 {
            return Ok(Route::Done);
        }
        Ok(match (target, source) {
            (CopySide::Unknown, CopySide::Unknown) => {
                // If the caller means freed device memory, host memory may be at its address by
                // now. A copy by the CPU would overwrite that host memory.
                return Err(copy.described(
                    ZE.error(ErrorKind::OutOfBounds, "copy")
                        .context("why", "the driver knows neither side")
                        .remedy("copy memory of this iface before it is freed"),
                ));
            }
            (CopySide::Device(to), CopySide::Device(from)) if to.handle == from.handle => {
                let ranges = (AddressRange::new(copy.to, len)?, AddressRange::new(copy.from, len)?);
                if ranges.0.overlaps(ranges.1) {
                    return Err(copy.described(
                        ZE.error(ErrorKind::InvalidArgument, "copy")
                            .context("why", "the sides overlap, which Level Zero does not allow")
                            .remedy("copy through other memory"),
                    ));
                }
                Route::Direct(to)
            }
            (CopySide::Device(to), CopySide::Device(from)) => Route::Buffered(Some(from), Some(to)),
            (CopySide::Device(to), CopySide::DriverHost(driver)) if to.driver == driver => {
                Route::Direct(to)
            }
            (CopySide::DriverHost(driver), CopySide::Device(from)) if from.driver == driver => {
                Route::Direct(from)
            }
            (CopySide::Device(to), _) => Route::Buffered(None, Some(to)),
            (_, CopySide::Device(from)) => Route::Buffered(Some(from), None),
            _ => {
                // SAFETY: both sides are host or shared memory, which the caller promises to be
                // valid.
                unsafe { copy.copy_by_cpu() };
                Route::Done
            }
        })
    }

    /// Returns the kind of memory that a range of the copy lies in.
    ///
    /// # Errors
    /// - OutOfBounds if the range begins in an allocation and reaches beyond its end.
    /// - AddressWraps if the range passes the end of the address space.
    /// - Driver for memory of a device that the driver does not list.
    /// - Otherwise the error of the driver.
    fn side(&self, address: Address, len: u64) -> Result<CopySide<'_>> {
        let range = AddressRange::new(address, len)?;
        let Some(found) = self.0.lookup.find(address)? else { return Ok(CopySide::Unknown) };
        let allocation = found.allocation;
        if !allocation.range.contains_range(range) {
            return Err(ZE.copy_outside(range, allocation.range));
        }
        match (allocation.kind, found.device) {
            (AllocationKind::Host, _) => Ok(CopySide::DriverHost(found.driver)),
            (AllocationKind::Managed, _) => Ok(CopySide::Shared),
            (_, Some(entry)) => Ok(CopySide::Device(entry)),
            (_, None) => Err(ZE
                .error(ErrorKind::Driver, "copy")
                .context("why", "the memory belongs to a device that the driver does not list")
                .context("allocation", allocation.range)),
        }
    }
}

impl CopyEngine for Copier {
    unsafe fn start_copy(
        &self,
        to: Address,
        from: Address,
        len: u64,
    ) -> Result<Box<dyn CopyEvent>> {
        // SAFETY: the caller upholds the contract of `Iface::copy`.
        Ok(match unsafe { self.start(CopyRange { to, from, len }) }? {
            Some(copy) => Box::new(InFlight::new(copy)),
            None => Box::new(FinishedCopy(Ok(()))),
        })
    }
}

/// A copy that runs on a [`Lane`].
#[derive(Debug)]
struct LaneCopy {
    lanes: Arc<Lanes>,
    lane: Lane,
    /// Copy from the lane's buffer to host memory, which the CPU makes after the device's copy.
    rest: Option<CopyRange>,
}

impl DeviceCopy for LaneCopy {
    fn has_ended(&self) -> bool {
        let driver = &self.lanes.lookup.driver;
        let query = driver.functions.event_query_status;
        !driver.process.is_current()
            // SAFETY: the event is this copy's own.
            || unsafe { query(self.lane.event) } != ZeResult::ZE_RESULT_NOT_READY
    }

    fn finish(self) -> Result<()> {
        let Self { lanes, mut lane, rest } = self;
        // The copy of a parent accesses no memory of its forked child.
        lanes.lookup.driver.check_process("copy")?;
        let result = lanes.finish(&mut lane);
        if let (Ok(()), Some(rest)) = (&result, rest) {
            // SAFETY: this copy owns the lane to which the buffer belongs. The caller of
            // `start_copy` keeps the host memory valid until the event is done.
            unsafe { rest.copy_by_cpu() };
        }
        lanes.leave(lane, result.as_ref().err());
        result
    }
}

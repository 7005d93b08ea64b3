//! Copies between host memory and memory of the devices.
//!
//! They run on streams of this crate's own in the device's primary context: asynchronous ones on
//! one, in order; each blocking one on another, so that it waits for no copy but itself. These
//! streams are kept for the next copy.
//!
//! A copy runs in another context in two cases: its memory is of a context that the application
//! made; or the memory is of no context, nobody has the primary one, and the thread is in another
//! of the device. Then its stream is made for it and destroyed with it.
//!
//! No stream is ordered behind those of the application: work that writes the source is waited for
//! by whoever started it.

use std::{fmt, sync::Arc};

use hmem_core::{
    Address, AddressRange, DeviceId, Error, ErrorKind, IfaceKind, Result, iface::CopyEvent,
};

use crate::{
    context::{Workplace, new_event, new_stream, within},
    driver::Driver,
    error::check,
    memory::Found,
    sys::{CuContext, CuEvent, CuResult, CuStream},
};

/// Where a copy runs.
#[derive(Clone, Copy, Debug)]
struct Place {
    context: CuContext,
    device: DeviceId,
    /// Whether the context is the device's primary one, which has a stream and events for copies.
    primary: bool,
    /// Whether it is the calling thread's, and the memory not of it: the application may destroy
    /// it and keep the memory.
    lent: bool,
}

/// The owner of the memory on one side of a copy.
enum Side {
    Ours(Found),
    /// The application's own pages, of which a part is page-locked.
    PageLocked,
    /// Host memory, as far as the driver knows.
    Unknown,
}

impl Driver {
    /// # Safety
    /// As [`hmem_core::Iface::copy`].
    pub(crate) unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        let Some((place, workplace)) = self.place(to, from, len)? else {
            // SAFETY: both sides are host memory, which the caller promises to be valid.
            unsafe { copy_host(to, from, len) };
            return Ok(());
        };
        let copied = self.copy_at(&workplace, place, to, from, len);
        if copied.is_ok() {
            workplace.keep();
        }
        workplace.end(copied)
    }

    fn copy_at(
        &self,
        workplace: &Workplace<'_>,
        place: Place,
        to: Address,
        from: Address,
        len: u64,
    ) -> Result<()> {
        workplace
            .within(|| {
                let copy = |stream| {
                    self.start(stream, to, from, len)?;
                    // SAFETY: the stream is this driver's own.
                    check(
                        unsafe { (self.functions.stream_synchronize)(stream) },
                        "cuStreamSynchronize",
                    )
                };
                if place.primary {
                    return self.with_own_stream(place.device, copy);
                }
                let stream = new_stream(&self.functions)?;
                let copied = copy(stream);
                work_first(copied, self.leave_stream(place, stream))
            })
            .map_err(|error| error.context("to", to).context("from", from).context("length", len))
    }

    /// # Safety
    /// As [`hmem_core::iface::CopyEngine::start_copy`].
    pub(crate) unsafe fn start_copy(
        self: &Arc<Self>,
        to: Address,
        from: Address,
        len: u64,
    ) -> Result<Box<dyn CopyEvent>> {
        let Some((place, workplace)) = self.place(to, from, len)? else {
            // SAFETY: as in `copy`.
            unsafe { copy_host(to, from, len) };
            return Ok(Box::new(Done));
        };
        if place.lent {
            // The context need not be there any longer when the event is asked.
            self.copy_at(&workplace, place, to, from, len)?;
            return Ok(Box::new(Done));
        }
        let started = workplace
            .within_or_undo(
                || {
                    let stream = self.stream_at(place)?;
                    let event = match self.event_at(place) {
                        Ok(event) => event,
                        Err(error) => {
                            return work_first(Err(error), self.leave_stream(place, stream));
                        }
                    };
                    let recorded = self.start(stream, to, from, len).and_then(|()| {
                        // SAFETY: event and stream are this driver's own and of the current
                        // context.
                        check(
                            unsafe { (self.functions.event_record)(event, stream) },
                            "cuEventRecord",
                        )
                    });
                    match recorded {
                        Ok(()) => Ok((stream, event)),
                        // The copy may have begun.
                        Err(error) => work_first(Err(error), self.end_copy(place, stream, event)),
                    }
                },
                |(stream, event)| self.end_copy(place, stream, event),
            )
            .map_err(|error| error.context("to", to).context("from", from).context("length", len));
        if started.is_ok() {
            workplace.keep();
        }
        let (stream, event) = workplace.end(started)?;
        Ok(Box::new(Event { driver: Arc::clone(self), place, stream, event }))
    }

    /// Returns the place where the copy runs.
    ///
    /// Returns `None` if neither side is CUDA memory and either the length is 0 or a side is host
    /// memory that the application page-locked.
    fn place(
        &self,
        to: Address,
        from: Address,
        len: u64,
    ) -> Result<Option<(Place, Workplace<'_>)>> {
        let sides = [self.side(to, len)?, self.side(from, len)?];
        for (side, found) in [to, from].into_iter().zip(&sides) {
            // Neither the CPU nor a driver that takes the address for the host's reaches what the
            // driver has forgotten.
            if matches!(found, Side::Unknown)
                && let Some(allocation) = self.range_around(side)
            {
                return Err(Error::new(ErrorKind::Driver, "copy")
                    .iface(IfaceKind::CUDA)
                    .context("reason", "the driver does not know memory that it allocated")
                    .context("allocation", allocation));
            }
        }
        // Device memory decides: host memory is within reach of every context.
        let known = sides.iter().filter_map(|side| match side {
            Side::Ours(found) => Some(found),
            Side::PageLocked | Side::Unknown => None,
        });
        let Some(found) =
            known.clone().find(|found| found.allocation.device.is_some()).or(known.clone().next())
        else {
            if len == 0 || sides.iter().any(|side| matches!(side, Side::PageLocked)) {
                return Ok(None);
            }
            // The address of freed CUDA memory may belong to host memory by now.
            return Err(Error::new(ErrorKind::OutOfBounds, "copy")
                .iface(IfaceKind::CUDA)
                .context("to", to)
                .context("from", from)
                .context("why", "neither side is memory that the driver knows")
                .remedy("copy memory of this iface before it is freed"));
        };
        let device = found.device();
        let own = found.context;
        let workplace = match self.hold_if_active(device)? {
            // Its stream and events are there for copies.
            Some(hold) if own.is_null() || own == hold.context() => Workplace::Held(hold),
            Some(hold) => hold.end(self.workplace(own, device))?,
            None => self.workplace(own, device)?,
        };
        let primary = matches!(workplace, Workplace::Held(_));
        let place = Place {
            context: workplace.context(),
            device,
            primary,
            lent: !primary && own.is_null(),
        };
        Ok(Some((place, workplace)))
    }

    /// Returns one side of a copy. Fails if the side begins in a CUDA allocation and does not lie
    /// within it.
    fn side(&self, address: Address, len: u64) -> Result<Side> {
        let range = AddressRange::new(address, len)?;
        let Some(found) = self.find(address)? else { return Ok(Side::Unknown) };
        let allocation = &found.allocation;
        if allocation.kind == hmem_core::AllocationKind::HostRegistered {
            return Ok(Side::PageLocked);
        }
        if allocation.range.contains_range(range) {
            return Ok(Side::Ours(found));
        }
        Err(Error::new(ErrorKind::OutOfBounds, "copy")
            .iface(IfaceKind::CUDA)
            .context("range", range)
            .context("allocation", allocation.range)
            .remedy("the range must lie in one allocation of this iface"))
    }

    fn start(&self, stream: CuStream, to: Address, from: Address, len: u64) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: sides of this iface were checked in `side`; the caller of `Iface::copy` promises
        // host memory to be valid until the copy has ended.
        check(
            unsafe { (self.functions.memcpy_async)(to.0, from.0, len as usize, stream) },
            "cuMemcpyAsync",
        )
    }

    /// For a copy that the caller hears nothing of but an error: it gets its memory back when the
    /// copy has ended. Stream and event are given back whatever waiting says.
    fn end_copy(&self, place: Place, stream: CuStream, event: CuEvent) -> Result<()> {
        // SAFETY: the stream is this driver's own.
        let ended =
            check(unsafe { (self.functions.stream_synchronize)(stream) }, "cuStreamSynchronize");
        let ended = work_first(ended, self.leave_event(place, event));
        work_first(ended, self.leave_stream(place, stream))
    }

    fn stream_at(&self, place: Place) -> Result<CuStream> {
        if place.primary { self.stream(place.device) } else { new_stream(&self.functions) }
    }

    fn leave_stream(&self, place: Place, stream: CuStream) -> Result<()> {
        if place.primary {
            return Ok(());
        }
        // SAFETY: made for this copy by `stream_at`.
        check(unsafe { (self.functions.stream_destroy)(stream) }, "cuStreamDestroy_v2")
    }

    fn event_at(&self, place: Place) -> Result<CuEvent> {
        if place.primary { self.take_event(place.device) } else { new_event(&self.functions) }
    }

    fn leave_event(&self, place: Place, event: CuEvent) -> Result<()> {
        if place.primary {
            return self.give_event(place.device, event);
        }
        // SAFETY: made for this copy by `event_at`.
        check(unsafe { (self.functions.event_destroy)(event) }, "cuEventDestroy_v2")
    }
}

/// An error of the work comes before one of giving back what it was done with, which is then only
/// told.
fn work_first<T>(work: Result<T>, left: Result<()>) -> Result<T> {
    match (work, left) {
        (Ok(value), left) => left.map(|()| value),
        (Err(refused), left) => {
            if let Err(error) = left {
                tracing::error!(%error, "what a copy that failed was done with");
            }
            Err(refused)
        }
    }
}

/// # Safety
/// Both sides are valid for `len` bytes, and the destination is not referenced elsewhere. They may
/// overlap.
unsafe fn copy_host(to: Address, from: Address, len: u64) {
    let (to, from) = (to.0 as usize, from.0 as usize);
    // SAFETY: as the caller promises.
    unsafe {
        std::ptr::copy(
            std::ptr::with_exposed_provenance::<u8>(from),
            std::ptr::with_exposed_provenance_mut::<u8>(to),
            len as usize,
        );
    }
}

/// A copy between two host buffers, done when it began.
#[derive(Debug)]
struct Done;

impl CopyEvent for Done {
    fn is_done(&self) -> bool {
        true
    }

    fn wait(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

/// A copy on a stream. Dropped unread it waits for the copy's end, so that nobody frees memory
/// under it.
struct Event {
    driver: Arc<Driver>,
    place: Place,
    stream: CuStream,
    event: CuEvent,
}

impl Event {
    fn finish(&mut self) -> Result<()> {
        if self.event.is_null() {
            return Ok(());
        }
        let (driver, place) = (&self.driver, self.place);
        let event = std::mem::take(&mut self.event);
        within(&driver.functions, place.context, || {
            // SAFETY: the event is this copy's own, recorded when the copy began.
            let copied =
                check(unsafe { (driver.functions.event_synchronize)(event) }, "cuEventSynchronize");
            let copied = work_first(copied, driver.leave_event(place, event));
            work_first(copied, driver.leave_stream(place, self.stream))
        })
    }
}

impl CopyEvent for Event {
    fn is_done(&self) -> bool {
        // An error ends the copy too; `wait` then returns it.
        let asked = within(&self.driver.functions, self.place.context, || {
            // SAFETY: the event is this copy's own.
            Ok(unsafe { (self.driver.functions.event_query)(self.event) })
        });
        !matches!(asked, Ok(CuResult::CUDA_ERROR_NOT_READY))
    }

    fn wait(mut self: Box<Self>) -> Result<()> {
        self.finish()
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Err(error) = self.finish() {
            tracing::warn!(%error, "a copy that nobody waited for");
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event").field("place", &self.place).finish_non_exhaustive()
    }
}

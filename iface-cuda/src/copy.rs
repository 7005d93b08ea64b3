//! Copies of device memory: to and from host memory, and between allocations.
//!
//! Copies run on streams of this crate in the device's primary context: asynchronous copies on one
//! stream, in order; each blocking copy on a stream of its own, so that it waits for no other copy.
//! The iface keeps these streams for the next copy.
//!
//! A copy runs in another context than the primary one in two cases:
//!
//! - its memory belongs to a context that the application created;
//! - its memory has no context, the process does not have the primary context, and another context
//!   of the device is current on the thread.
//!
//! In both cases the iface creates a stream for the copy and destroys the stream afterwards. In the
//! second case, an asynchronous copy has ended when the call that starts it returns, since the
//! application may destroy the context at any time.
//!
//! A copy that failed, or whose wait failed, may still run. The iface then repeats the wait until
//! the copy has ended, since the caller may free the memory afterwards.
//!
//! The iface does not order its streams after those of the application: the application waits for
//! its own work that writes the source.

#![allow(unsafe_code, reason = "calls the driver to copy by address")]

use std::sync::Arc;

use hmem_core::{
    Address, AddressRange, AllocationKind, DeviceId, ErrorKind, Result,
    iface::{CopyEngine, CopyEvent, CopyRange, FinishedCopy},
};
use hmem_iface_kit::{DeviceCopy, InFlight, log_failure};

use crate::{
    context::{WorkContext, with_context},
    error::{CUDA, check},
    lookup::{FoundAllocation, PointerLookup},
    streams::{
        destroy_event, destroy_stream, ends_work, new_event, new_stream, shows_end, synchronize,
        until_ended,
    },
    sys::{CuContext, CuEvent, CuStream, Functions},
};

/// Copies memory. Each copy in flight holds a reference to the streams.
#[derive(Debug)]
pub(crate) struct Copier(Arc<CopyStreams>);

/// Streams and events for copies. In a primary context they are kept for later copies. In another
/// context they are created for one copy.
#[derive(Debug)]
struct CopyStreams {
    lookup: Arc<PointerLookup>,
}

/// The context in which a copy runs.
#[derive(Clone, Copy, Debug)]
struct CopyContext {
    context: CuContext,
    device: DeviceId,
    /// True if this is the device's primary context, in which streams and events are kept.
    primary: bool,
    /// True for a copy of memory without a context, if the copy runs in the thread's current
    /// context. The application may destroy that context and keep the memory, so the copy must end
    /// before the call returns.
    borrowed: bool,
}

/// Owner of the source or destination memory of a copy.
enum CopySide {
    /// Memory that CUDA allocated.
    Ours(FoundAllocation),
    /// The application's own pages, some of which are page-locked.
    PageLocked,
    /// Host memory that the driver does not know.
    Unknown,
}

impl CopyStreams {
    fn functions(&self) -> &Functions {
        &self.lookup.driver().functions
    }

    fn stream(&self, at: CopyContext) -> Result<CuStream> {
        if !at.primary {
            return new_stream(self.functions());
        }
        self.lookup.contexts.streams(at.device, |streams| {
            if streams.ordered.is_null() {
                streams.ordered = new_stream(self.functions())?;
            }
            Ok(streams.ordered)
        })?
    }

    fn leave_stream(&self, at: CopyContext, stream: CuStream) -> Result<()> {
        if at.primary { Ok(()) } else { destroy_stream(self.functions(), stream) }
    }

    fn event(&self, at: CopyContext) -> Result<CuEvent> {
        let spare = if at.primary {
            self.lookup.contexts.streams(at.device, |streams| streams.events.pop())?
        } else {
            None
        };
        spare.map_or_else(|| new_event(self.functions()), Ok)
    }

    fn leave_event(&self, at: CopyContext, event: CuEvent) -> Result<()> {
        if at.primary {
            self.lookup.contexts.streams(at.device, |streams| streams.events.push(event))
        } else {
            destroy_event(self.functions(), event)
        }
    }

    /// Starts a copy on a stream of the current context, and records an event that completes after
    /// the copy.
    fn start(&self, at: CopyContext, copy: CopyRange) -> Result<(CuStream, CuEvent)> {
        let stream = self.stream(at)?;
        let event = match self.event(at) {
            Ok(event) => event,
            Err(error) => return work_first(Err(error), self.leave_stream(at, stream)),
        };
        let recorded = self.enqueue(stream, copy).and_then(|()| {
            // SAFETY: this iface created the event and the stream, in the current context.
            check(unsafe { (self.functions().event_record)(event, stream) }, "cuEventRecord")
        });
        match recorded {
            Ok(()) => Ok((stream, event)),
            // The driver may have begun the copy before the error, so `abandon` waits for it.
            Err(error) => work_first(Err(error), self.abandon(at, stream, event)),
        }
    }

    fn enqueue(&self, stream: CuStream, copy: CopyRange) -> Result<()> {
        if copy.len == 0 {
            return Ok(());
        }
        let (to, from, len) = (copy.to.0, copy.from.0, copy.len as usize);
        // SAFETY: `side` checked the bounds of CUDA memory. The caller of `Iface::copy` promises
        // that host memory is valid until the copy has ended.
        check(unsafe { (self.functions().memcpy_async)(to, from, len, stream) }, "cuMemcpyAsync")
    }

    /// Copies and waits for the end, on a stream that no other copy uses.
    fn run(&self, at: CopyContext, copy: CopyRange) -> Result<()> {
        let run = |stream| {
            // The driver may have begun the copy even if it returned an error.
            work_first(self.enqueue(stream, copy), self.synchronize(at, stream))
        };
        if at.primary {
            return self.lookup.contexts.with_own_stream(at.device, run);
        }
        let stream = new_stream(self.functions())?;
        work_first(run(stream), destroy_stream(self.functions(), stream))
    }

    /// Waits until the copies on a stream have ended. The caller must make the context current.
    fn synchronize(&self, at: CopyContext, stream: CuStream) -> Result<()> {
        let functions = self.functions();
        let waited = synchronize(functions, stream);
        if shows_end(&waited) {
            return waited;
        }
        until_ended(|| {
            let waited = with_context(functions, at.context, || synchronize(functions, stream));
            (shows_end(&waited), waited)
        })
    }

    /// Waits for a copy that may have begun although its start failed, since the caller may free
    /// the memory afterwards. Releases the stream and the event even if the copy failed.
    fn abandon(&self, at: CopyContext, stream: CuStream, event: CuEvent) -> Result<()> {
        let ended = self.synchronize(at, stream);
        let ended = work_first(ended, self.leave_event(at, event));
        work_first(ended, self.leave_stream(at, stream))
    }
}

impl CopyEngine for Copier {
    unsafe fn start_copy(
        &self,
        to: Address,
        from: Address,
        len: u64,
    ) -> Result<Box<dyn CopyEvent>> {
        let copy = CopyRange { to, from, len };
        // SAFETY: the caller upholds the contract of `Iface::copy`.
        let Some((at, work_context)) = (unsafe { self.begin(copy) })? else {
            return Ok(Box::new(FinishedCopy(Ok(()))));
        };
        if at.borrowed {
            // The copy ends before this call returns: the application may destroy the context
            // afterwards.
            let copied = work_context.run(|| self.0.run(at, copy));
            copied.map_err(|error| copy.described(error))?;
            return Ok(Box::new(FinishedCopy(Ok(()))));
        }
        let started = work_context
            .with_context_or_undo(
                || self.0.start(at, copy),
                |(stream, event)| self.0.abandon(at, stream, event),
            )
            .map_err(|error| copy.described(error));
        if started.is_ok() {
            work_context.keep();
        }
        let (stream, event) = work_context.end(started)?;
        let streams = Arc::clone(&self.0);
        Ok(Box::new(InFlight::new(StreamCopy { streams, at, stream, event })))
    }
}

impl Copier {
    pub(crate) fn new(lookup: Arc<PointerLookup>) -> Self {
        Self(Arc::new(CopyStreams { lookup }))
    }

    /// Returns the number of asynchronous copies that are not finished yet.
    pub(crate) fn in_flight(&self) -> usize {
        Arc::strong_count(&self.0) - 1
    }

    /// Copies `len` bytes, and waits for the end of the copy.
    ///
    /// # Safety
    /// The caller must uphold the safety contract of [`hmem_core::Iface::copy`].
    pub(crate) unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        let copy = CopyRange { to, from, len };
        // SAFETY: the caller upholds the contract of `Iface::copy`.
        match unsafe { self.begin(copy) }? {
            Some((at, work_context)) => work_context
                .run_and_keep(|| self.0.run(at, copy))
                .map_err(|error| copy.described(error)),
            None => Ok(()),
        }
    }

    /// Chooses the context in which the driver is to make a copy. Returns `None` if no driver call
    /// is needed, because the CPU has already copied the bytes.
    ///
    /// The CPU copies if neither side is memory that CUDA allocated, and either the length is 0 or
    /// a side is host memory that the application page-locked.
    ///
    /// # Errors
    /// - OutOfBounds if the driver knows neither side and the length is not 0.
    /// - OutOfBounds if a side begins in a CUDA allocation and reaches beyond its end.
    /// - Driver if the driver does not recognise memory that the iface allocated.
    /// - AddressWraps if a side passes the end of the address space.
    /// - Otherwise the error of the driver.
    ///
    /// # Safety
    /// The caller must uphold the safety contract of [`hmem_core::Iface::copy`].
    unsafe fn begin(&self, copy: CopyRange) -> Result<Option<(CopyContext, WorkContext<'_>)>> {
        let CopyRange { to, from, len } = copy;
        let sides = [self.side(to, len)?, self.side(from, len)?];
        for (side, found) in [to, from].into_iter().zip(&sides) {
            // The iface allocated this memory, but the driver no longer knows it. The CPU cannot
            // access the memory, and the driver would take the address for host memory.
            if matches!(found, CopySide::Unknown)
                && let Some(allocation) =
                    self.0.lookup.contexts.allocations.owned.range_around(side)
            {
                return Err(CUDA
                    .error(ErrorKind::Driver, "copy")
                    .context("why", "the driver does not recognise memory that it allocated")
                    .context("allocation", allocation));
            }
        }
        // The side in device memory determines the context: every context can access host memory.
        let known = sides.iter().filter_map(|side| match side {
            CopySide::Ours(found) => Some(found),
            CopySide::PageLocked | CopySide::Unknown => None,
        });
        let Some(found) =
            known.clone().find(|found| found.allocation.device.is_some()).or(known.clone().next())
        else {
            if len == 0 || sides.iter().any(|side| matches!(side, CopySide::PageLocked)) {
                // SAFETY: both sides are host memory, which the caller promises to be valid.
                unsafe { copy.copy_by_cpu() };
                return Ok(None);
            }
            // If the caller means freed CUDA memory, host memory may be at its address by now. A
            // copy by the CPU would overwrite that host memory.
            return Err(CUDA
                .error(ErrorKind::OutOfBounds, "copy")
                .context("to", to)
                .context("from", from)
                .context("why", "the driver knows neither side")
                .remedy("copy memory of this iface before it is freed"));
        };
        let (device, own) = (found.device(), found.context);
        let contexts = &self.0.lookup.contexts;
        let work_context = match contexts.retain_if_active(device)? {
            // The primary context is preferred, since it keeps a stream and events for copies.
            Some(primary) if own.is_null() || own == primary.context => primary,
            Some(primary) => primary.end(contexts.work_context(own, device))?,
            None => contexts.work_context(own, device)?,
        };
        let (context, primary) = (work_context.context, work_context.primary_of().is_some());
        let at = CopyContext { context, device, primary, borrowed: !primary && own.is_null() };
        Ok(Some((at, work_context)))
    }

    /// Returns the owner of the source or destination of a copy. Fails if the range begins in a
    /// CUDA allocation and reaches beyond its end.
    fn side(&self, address: Address, len: u64) -> Result<CopySide> {
        let range = AddressRange::new(address, len)?;
        let Some(found) = self.0.lookup.find(address)? else { return Ok(CopySide::Unknown) };
        let allocation = &found.allocation;
        if allocation.kind == AllocationKind::HostRegistered {
            return Ok(CopySide::PageLocked);
        }
        if allocation.range.contains_range(range) {
            return Ok(CopySide::Ours(found));
        }
        Err(CUDA.copy_outside(range, allocation.range))
    }
}

/// Combines the results of a copy and of the wait for its end or the release of its stream or
/// event. If both failed, returns the error of the copy and logs the other error.
fn work_first<T>(work: Result<T>, released: Result<()>) -> Result<T> {
    match work {
        Ok(value) => released.map(|()| value),
        Err(refused) => {
            log_failure!(
                error,
                released,
                "cannot wait for a failed copy, or release its stream or event"
            );
            Err(refused)
        }
    }
}

/// A copy that runs on a stream.
#[derive(Debug)]
struct StreamCopy {
    streams: Arc<CopyStreams>,
    at: CopyContext,
    stream: CuStream,
    /// Event that completes after the copy.
    event: CuEvent,
}

impl DeviceCopy for StreamCopy {
    fn has_ended(&self) -> bool {
        if !self.streams.lookup.contexts.is_own_process() {
            return true;
        }
        let functions = self.streams.functions();
        let asked = with_context(functions, self.at.context, || {
            // SAFETY: the event belongs to this copy.
            Ok(unsafe { (functions.event_query)(self.event) })
        });
        asked.map_or_else(|refused| shows_end(&Err::<(), _>(refused)), ends_work)
    }

    fn finish(self) -> Result<()> {
        let Self { streams, at, stream, event } = self;
        // The copy of a parent accesses no memory of its forked child.
        streams.lookup.contexts.check_process("copy")?;
        let functions = streams.functions();
        until_ended(|| {
            let mut ended = false;
            let finished = with_context(functions, at.context, || {
                // SAFETY: the event belongs to this copy, and `CopyStreams::start` recorded it. No
                // earlier attempt released it.
                let code = unsafe { (functions.event_synchronize)(event) };
                let copied = check(code, "cuEventSynchronize");
                ended = ends_work(code);
                if !ended {
                    return copied;
                }
                let copied = work_first(copied, streams.leave_event(at, event));
                work_first(copied, streams.leave_stream(at, stream))
            });
            (ended || shows_end(&finished), finished)
        })
    }
}

//! Contexts: which one a call works in, current only while it runs.
//!
//! A device's primary context is the one that the CUDA runtime and every well-behaved library use.
//! It exists once in a process, made by whoever retains it first, which is why this is the crate's
//! one piece of process-wide state. A call holds it while it works in it ([`Hold`]). Where
//! something lives on in it (an allocation, the stream of copies), it stays retained until the
//! iface closes; else it is given back as the last call that works in it ends, so that a call that
//! is refused, and one that only asks, leave no context behind. Contexts that the application made
//! itself are worked in and never kept.

use hmem_core::{DeviceId, Error, Result};
use parking_lot::MutexGuard;

use crate::{
    device::{self, DeviceEntry},
    driver::Driver,
    error::check,
    hooks::untold,
    sys::{self, CuContext, CuDevice, CuEvent, CuResult, CuStream, Functions},
};

/// A retained primary context, with what was made in it.
#[derive(Debug)]
pub(crate) struct Primary {
    pub(crate) context: CuContext,
    /// For asynchronous copies, which end in the order in which they began; null until the first.
    stream: CuStream,
    /// Streams of what waits for its end: one for each thread that did so at once. Those that are
    /// not in use.
    spare_streams: Vec<CuStream>,
    /// Events that are not in use.
    events: Vec<CuEvent>,
    /// Calls that work in it now.
    users: usize,
    /// Whether something lives on in it.
    kept: bool,
}

/// A device's primary context, there for as long as this lives. Ended or dropped, it is given back
/// unless another call works in it or something lives on in it.
#[derive(Debug)]
#[must_use = "dropped, the context may go"]
pub(crate) struct Hold<'a> {
    driver: &'a Driver,
    entry: &'a DeviceEntry,
    context: CuContext,
    ended: bool,
}

impl Hold<'_> {
    pub(crate) fn context(&self) -> CuContext {
        self.context
    }

    pub(crate) fn device(&self) -> DeviceId {
        self.entry.description.id
    }

    /// Something lives on in it: it stays retained until the iface closes.
    pub(crate) fn keep(&self) {
        if let Some(primary) = &mut *self.entry.primary.lock() {
            primary.kept = true;
        }
    }

    /// [`within`]; a context that the thread cannot be rid of is kept, so that it has none that is
    /// destroyed.
    pub(crate) fn within<T>(&self, run: impl FnOnce() -> Result<T>) -> Result<T> {
        self.within_or_undo(run, |_| Ok(()))
    }

    /// [`within_or_undo`], as above.
    pub(crate) fn within_or_undo<T>(
        &self,
        run: impl FnOnce() -> Result<T>,
        undo: impl FnOnce(T) -> Result<()>,
    ) -> Result<T> {
        current_while(&self.driver.functions, self.context, run, undo, || self.keep())
    }

    /// Gives back what `result` was got in. An error of the work comes before one of giving back,
    /// which is told as dropping tells it.
    ///
    /// # Errors
    /// That of `result`, or the driver does not take it back. It stays retained, and goes with its
    /// next user or as the iface closes.
    pub(crate) fn end<T>(mut self, result: Result<T>) -> Result<T> {
        let value = result?;
        self.leave().map(|()| value)
    }

    fn leave(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.ended, true) {
            return Ok(());
        }
        let mut slot = self.entry.primary.lock();
        let Some(primary) = &mut *slot else { return Ok(()) };
        primary.users -= 1;
        if primary.users > 0 || primary.kept {
            return Ok(());
        }
        self.driver.release(self.entry, &mut slot)
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.leave() {
            tracing::error!(%error, "a CUDA context is kept until its iface closes");
        }
    }
}

/// A context that a call works in.
#[derive(Debug)]
#[must_use = "dropped, the context may go"]
pub(crate) enum Workplace<'a> {
    /// Somebody else's: the memory's own, or the calling thread's.
    Theirs(&'a Driver, CuContext),
    /// A device's primary one.
    Held(Hold<'a>),
}

impl Workplace<'_> {
    pub(crate) fn context(&self) -> CuContext {
        match self {
            Self::Theirs(_, context) => *context,
            Self::Held(hold) => hold.context(),
        }
    }

    /// As [`Hold::within`].
    pub(crate) fn within<T>(&self, run: impl FnOnce() -> Result<T>) -> Result<T> {
        self.within_or_undo(run, |_| Ok(()))
    }

    /// As [`Hold::within_or_undo`].
    pub(crate) fn within_or_undo<T>(
        &self,
        run: impl FnOnce() -> Result<T>,
        undo: impl FnOnce(T) -> Result<()>,
    ) -> Result<T> {
        match self {
            Self::Theirs(driver, context) => within_or_undo(&driver.functions, *context, run, undo),
            Self::Held(hold) => hold.within_or_undo(run, undo),
        }
    }

    /// [`Hold::keep`]; somebody else's lives as long as its owner wants.
    pub(crate) fn keep(&self) {
        if let Self::Held(hold) = self {
            hold.keep();
        }
    }

    /// As [`Hold::end`].
    pub(crate) fn end<T>(self, result: Result<T>) -> Result<T> {
        match self {
            Self::Theirs(..) => result,
            Self::Held(hold) => hold.end(result),
        }
    }
}

/// Runs `run` with `context` current on this thread, and puts the thread's own context back.
///
/// # Errors
/// What `run` or the driver refused.
pub(crate) fn within<T>(
    functions: &Functions,
    context: CuContext,
    run: impl FnOnce() -> Result<T>,
) -> Result<T> {
    within_or_undo(functions, context, run, |_| Ok(()))
}

/// [`within`] for what leaves something behind: `undo` takes it back where the thread's own context
/// cannot be put back and the caller gets an error.
pub(crate) fn within_or_undo<T>(
    functions: &Functions,
    context: CuContext,
    run: impl FnOnce() -> Result<T>,
    undo: impl FnOnce(T) -> Result<()>,
) -> Result<T> {
    current_while(functions, context, run, undo, || ())
}

/// [`within_or_undo`], which tells `stuck` of a context that stays current.
fn current_while<T>(
    functions: &Functions,
    context: CuContext,
    run: impl FnOnce() -> Result<T>,
    undo: impl FnOnce(T) -> Result<()>,
    stuck: impl FnOnce(),
) -> Result<T> {
    // SAFETY: the context is a retained primary one, one that the driver named as the calling
    // thread's just now, or the context of memory that the driver knew just now, with which it
    // would have gone.
    check(unsafe { (functions.ctx_push_current)(context) }, "cuCtxPushCurrent_v2")?;
    let result = run();
    let Err(refused) = pop(functions) else { return result };
    let result = result.and_then(|value| undo(value).and(Err(refused)));
    // Nobody wants to go on with a foreign context current: once more.
    if let Err(error) = pop(functions) {
        tracing::error!(%error, "the calling thread keeps a CUDA context that is not its own");
        stuck();
    }
    result
}

fn pop(functions: &Functions) -> Result<()> {
    let mut popped = CuContext::NULL;
    // SAFETY: `popped` is writable.
    check(unsafe { (functions.ctx_pop_current)(&mut popped) }, "cuCtxPopCurrent_v2")
}

impl Driver {
    /// Holds the primary context of a device, which is made where nobody has it.
    pub(crate) fn hold(&self, device: DeviceId) -> Result<Hold<'_>> {
        let entry = device::get(&self.devices, "cuDevicePrimaryCtxRetain", device)?;
        self.join(entry, &mut entry.primary.lock())
    }

    /// The lock is that of the entry: who retains and who gives back do so one after the other.
    fn join<'a>(
        &'a self,
        entry: &'a DeviceEntry,
        slot: &mut MutexGuard<'_, Option<Primary>>,
    ) -> Result<Hold<'a>> {
        let primary = match &mut **slot {
            Some(primary) => primary,
            empty => {
                let mut context = CuContext::NULL;
                // SAFETY: `context` is writable, and the device is one that the driver listed.
                let code =
                    unsafe { (self.functions.primary_ctx_retain)(&mut context, entry.handle) };
                check(code, "cuDevicePrimaryCtxRetain")
                    .map_err(|error| error.device(entry.description.id))?;
                empty.insert(Primary {
                    context,
                    stream: CuStream::NULL,
                    spare_streams: Vec::new(),
                    events: Vec::new(),
                    users: 0,
                    kept: false,
                })
            }
        };
        primary.users += 1;
        Ok(Hold { driver: self, entry, context: primary.context, ended: false })
    }

    /// The primary context of a device, retained until the iface closes.
    pub(crate) fn primary(&self, device: DeviceId) -> Result<CuContext> {
        let hold = self.hold(device)?;
        hold.keep();
        Ok(hold.context())
    }

    /// Holds the primary context of a device if somebody in this process has it already.
    pub(crate) fn hold_if_active(&self, device: DeviceId) -> Result<Option<Hold<'_>>> {
        let entry = device::get(&self.devices, "cuDevicePrimaryCtxGetState", device)?;
        let mut slot = entry.primary.lock();
        if slot.is_none() && !self.somebody_has(entry)? {
            return Ok(None);
        }
        self.join(entry, &mut slot).map(Some)
    }

    /// Whether somebody in this process has the primary context of a device.
    pub(crate) fn is_active(&self, device: DeviceId) -> Result<bool> {
        self.somebody_has(device::get(&self.devices, "cuDevicePrimaryCtxGetState", device)?)
    }

    fn somebody_has(&self, entry: &DeviceEntry) -> Result<bool> {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: both are writable.
        let code = unsafe {
            (self.functions.primary_ctx_get_state)(entry.handle, &mut flags, &mut active)
        };
        check(code, "cuDevicePrimaryCtxGetState").map(|()| active != 0)
    }

    /// The calling thread's current context and its device, if it has one that lives.
    pub(crate) fn current(&self) -> Result<Option<(CuContext, CuDevice)>> {
        let (mut context, mut device) = (CuContext::NULL, 0);
        // SAFETY: `context` is writable.
        check(unsafe { (self.functions.ctx_get_current)(&mut context) }, "cuCtxGetCurrent")?;
        if context.is_null() {
            return Ok(None);
        }
        // SAFETY: `device` is writable.
        match unsafe { (self.functions.ctx_get_device)(&mut device) } {
            // One that was destroyed may still be current.
            CuResult::CUDA_ERROR_INVALID_CONTEXT | CuResult::CUDA_ERROR_CONTEXT_IS_DESTROYED => {
                Ok(None)
            }
            code => check(code, "cuCtxGetDevice").map(|()| Some((context, device))),
        }
    }

    /// The context to work on memory in: its own, or for memory of none the calling thread's where
    /// that is of the same device, else the device's primary one, which is made only if nobody
    /// has it.
    ///
    /// That the driver needs one for such memory is written nowhere; nor is that it does not.
    pub(crate) fn workplace(&self, own: CuContext, device: DeviceId) -> Result<Workplace<'_>> {
        if !own.is_null() {
            return Ok(Workplace::Theirs(self, own));
        }
        let entry = device::get(&self.devices, "cuCtxGetDevice", device)?;
        match self.current()? {
            Some((context, of)) if of == entry.handle => Ok(Workplace::Theirs(self, context)),
            _ => self.hold(device).map(Workplace::Held),
        }
    }

    /// The context to page-lock host memory in, of which every context knows afterwards. The
    /// page-locking goes with its context, so that a primary one that somebody has comes first,
    /// as it can be kept: of the device that the thread works on, else of any. Then the
    /// thread's own; and only for a process without either the first device's is made.
    pub(crate) fn workplace_for_host(&self) -> Result<Workplace<'_>> {
        let current = self.current()?;
        let of_thread =
            |entry: &&DeviceEntry| current.is_some_and(|(_, device)| device == entry.handle);
        let (first, rest): (Vec<_>, Vec<_>) = self.devices.iter().partition(of_thread);
        for entry in first.into_iter().chain(rest) {
            if let Some(hold) = self.hold_if_active(entry.description.id)? {
                return Ok(Workplace::Held(hold));
            }
        }
        match current {
            Some((context, _)) => Ok(Workplace::Theirs(self, context)),
            None => self.hold(DeviceId(0)).map(Workplace::Held),
        }
    }

    /// The stream of a device's asynchronous copies, which exists from the first call on. The
    /// primary context is current.
    pub(crate) fn stream(&self, device: DeviceId) -> Result<CuStream> {
        let entry = device::get(&self.devices, "cuStreamCreate", device)?;
        let mut slot = entry.primary.lock();
        let Some(primary) = &mut *slot else { return Err(not_retained()) };
        if primary.stream.is_null() {
            primary.stream = new_stream(&self.functions)?;
        }
        Ok(primary.stream)
    }

    /// Runs `run` with a stream of a device that nobody else uses meanwhile, so that waiting for
    /// its end is waiting for nothing else. `run` leaves nothing under way on it. The primary
    /// context is current.
    pub(crate) fn with_own_stream<T>(
        &self,
        device: DeviceId,
        run: impl FnOnce(CuStream) -> Result<T>,
    ) -> Result<T> {
        let entry = device::get(&self.devices, "cuStreamCreate", device)?;
        let spare = entry.primary.lock().as_mut().ok_or_else(not_retained)?.spare_streams.pop();
        let stream = match spare {
            Some(stream) => stream,
            None => new_stream(&self.functions)?,
        };
        let result = run(stream);
        entry.primary.lock().as_mut().ok_or_else(not_retained)?.spare_streams.push(stream);
        result
    }

    /// An event of a device's primary context, which is current.
    pub(crate) fn take_event(&self, device: DeviceId) -> Result<CuEvent> {
        let entry = device::get(&self.devices, "cuEventCreate", device)?;
        let spare = entry.primary.lock().as_mut().ok_or_else(not_retained)?.events.pop();
        match spare {
            Some(event) => Ok(event),
            None => new_event(&self.functions),
        }
    }

    /// Keeps an event for the next copy.
    pub(crate) fn give_event(&self, device: DeviceId, event: CuEvent) -> Result<()> {
        let entry = device::get(&self.devices, "cuEventDestroy_v2", device)?;
        let mut slot = entry.primary.lock();
        match &mut *slot {
            Some(primary) => {
                primary.events.push(event);
                Ok(())
            }
            None => Err(not_retained()),
        }
    }

    /// Gives every retained context back, with what was made in it.
    ///
    /// # Errors
    /// The first refusal; what was not given back is kept, and can be tried again.
    pub(crate) fn release_contexts(&self) -> Result<()> {
        for entry in &self.devices {
            self.release(entry, &mut entry.primary.lock())?;
        }
        Ok(())
    }

    /// Gives one back, with what was made in it. What was not given back on an error is kept.
    fn release(
        &self,
        entry: &DeviceEntry,
        slot: &mut MutexGuard<'_, Option<Primary>>,
    ) -> Result<()> {
        let Some(primary) = &mut **slot else { return Ok(()) };
        self.clear(primary)
            .and_then(|()| self.release_primary(entry))
            .map_err(|error| error.device(entry.description.id))?;
        **slot = None;
        Ok(())
    }

    fn clear(&self, primary: &mut Primary) -> Result<()> {
        if primary.events.is_empty() && primary.spare_streams.is_empty() && primary.stream.is_null()
        {
            return Ok(());
        }
        within(&self.functions, primary.context, || {
            while let Some(event) = primary.events.last() {
                // SAFETY: the event is ours, and no copy waits for it: it was given back.
                check(unsafe { (self.functions.event_destroy)(*event) }, "cuEventDestroy_v2")?;
                primary.events.pop();
            }
            while let Some(stream) = primary.spare_streams.last() {
                // SAFETY: the stream is ours, and nobody has it: it was given back.
                check(unsafe { (self.functions.stream_destroy)(*stream) }, "cuStreamDestroy_v2")?;
                primary.spare_streams.pop();
            }
            if !primary.stream.is_null() {
                check(
                    // SAFETY: the stream is ours; copies that still run on it end before it goes.
                    unsafe { (self.functions.stream_destroy)(primary.stream) },
                    "cuStreamDestroy_v2",
                )?;
                primary.stream = CuStream::NULL;
            }
            Ok(())
        })
    }

    /// Drops the reference that [`Driver::hold`] took; the caller forgets it.
    ///
    /// With no memory of this iface in it that takes nothing of what is registered: who has memory
    /// there holds the context too, and letting go of it is told by the hooks.
    fn release_primary(&self, entry: &DeviceEntry) -> Result<()> {
        // SAFETY: retained once by `join`; the caller empties the slot.
        let release = || unsafe { (self.functions.primary_ctx_release)(entry.handle) };
        let device = entry.description.id;
        let empty = !self.book.lock().owned.values().any(|owned| owned.device == device);
        let code = if empty { untold(release) } else { release() };
        check(code, "cuDevicePrimaryCtxRelease_v2")
    }

    /// The same at the end, when nobody can try again: a stream of a context that was reset, for
    /// one, cannot be destroyed, and the reference to the context is dropped all the same.
    pub(crate) fn abandon_contexts(&self) {
        let Err(error) = self.release_contexts() else { return };
        tracing::error!(%error, "a CUDA object could not be given back");
        for entry in &self.devices {
            if entry.primary.lock().take().is_some()
                && let Err(error) = self.release_primary(entry)
            {
                tracing::error!(%error, "a CUDA context could not be given back");
            }
        }
    }
}

/// A stream of the current context that waits for no other.
pub(crate) fn new_stream(functions: &Functions) -> Result<CuStream> {
    let mut stream = CuStream::NULL;
    check(
        // SAFETY: `stream` is writable.
        unsafe { (functions.stream_create)(&mut stream, sys::CU_STREAM_NON_BLOCKING) },
        "cuStreamCreate",
    )?;
    Ok(stream)
}

/// An event of the current context.
pub(crate) fn new_event(functions: &Functions) -> Result<CuEvent> {
    let mut event = CuEvent::NULL;
    let flags = sys::CU_EVENT_DISABLE_TIMING;
    // SAFETY: `event` is writable.
    check(unsafe { (functions.event_create)(&mut event, flags) }, "cuEventCreate")?;
    Ok(event)
}

fn not_retained() -> Error {
    Error::new(hmem_core::ErrorKind::BadState, "context")
        .iface(hmem_core::IfaceKind::CUDA)
        .remedy("the iface gave its contexts back already")
}

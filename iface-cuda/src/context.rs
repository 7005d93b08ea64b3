//! CUDA contexts that calls of the iface use: retain, make current, and release.
//!
//! The CUDA runtime and most libraries use a device's primary context. A process has at most one
//! primary context for a device. The first retain creates the context. A call of this crate retains
//! the context for as long as the call needs it ([`WorkContext`]). If an allocation or a stream
//! remains in the context, the context stays retained until the iface closes. Otherwise the last
//! call that uses the context releases it. So a failed call or a query leaves no context behind.
//! Contexts of the application are used for the duration of a call and never retained.

#![allow(unsafe_code, reason = "calls the driver on contexts")]

use hmem_core::{DeviceId, ErrorKind, IfaceKind, ProcessMark, Result};
use hmem_iface_kit::log_failure;
use parking_lot::{Mutex, MutexGuard};

use crate::{
    driver::{DeviceEntry, Driver},
    error::{CUDA, check},
    hooks::without_notifying,
    streams::{ContextStreams, new_stream},
    sys::{self, CuContext, CuDevice, CuResult, CuStream, CuStreamCaptureMode, Functions},
    table::AllocationTable,
};

/// The driver, the primary contexts that the iface retains, and the memory in them.
#[derive(Debug)]
pub(crate) struct PrimaryContexts {
    pub(crate) driver: Driver,
    /// The process that opened the iface. A forked child neither calls the driver nor takes a lock
    /// of the iface: a thread of the parent may have held the lock during the fork, and no thread
    /// of the child releases it.
    pub(crate) process: ProcessMark,
    /// Allocations and page-locked ranges that the iface must release.
    pub(crate) allocations: AllocationTable,
    /// The primary context of each device, in the order of the driver's devices. `None` while the
    /// iface does not retain the context.
    retained: Vec<Mutex<Option<PrimaryContext>>>,
}

/// A primary context that the iface has retained once, for all calls that use it.
#[derive(Debug)]
struct PrimaryContext {
    context: CuContext,
    streams: ContextStreams,
    /// Number of guards ([`PrimaryContextGuard`]) of the context.
    users: usize,
    /// True if an allocation or a stream remains in the context. The context then stays retained
    /// when its last guard is dropped.
    kept: bool,
}

/// Keeps a device's primary context retained. Dropping the guard releases the context, with two
/// exceptions: another call uses the context, or memory or a stream remains in the context.
#[derive(Debug)]
struct PrimaryContextGuard<'a> {
    contexts: &'a PrimaryContexts,
    device: DeviceId,
    /// True once [`Self::release`] was called. The drop then does nothing.
    released: bool,
}

impl PrimaryContextGuard<'_> {
    fn release(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.released, true) {
            return Ok(());
        }
        let mut primary = self.contexts.lock(self.device);
        let Some(retained) = &mut *primary else { return Ok(()) };
        retained.users -= 1;
        if retained.users > 0 || retained.kept {
            return Ok(());
        }
        self.contexts.release(self.device, &mut primary)
    }
}

impl Drop for PrimaryContextGuard<'_> {
    fn drop(&mut self) {
        log_failure!(
            error,
            self.release(),
            "cannot release a CUDA context; it stays retained until its next use ends or the iface \
             closes"
        );
    }
}

/// Context for driver calls: a retained primary context, or a context of the application.
#[derive(Debug)]
#[must_use = "dropping it may let the driver destroy the context"]
pub(crate) struct WorkContext<'a> {
    functions: &'a Functions,
    pub(crate) context: CuContext,
    /// Guard of a primary context. `None` for a context of the application, which the iface does
    /// not retain.
    guard: Option<PrimaryContextGuard<'a>>,
}

impl<'a> WorkContext<'a> {
    /// Wraps a context of the application. The context is not retained.
    pub(crate) fn borrowed(functions: &'a Functions, context: CuContext) -> Self {
        Self { functions, context, guard: None }
    }

    /// Returns the device of a retained primary context, or `None` for any other context.
    pub(crate) fn primary_of(&self) -> Option<DeviceId> {
        self.guard.as_ref().map(|guard| guard.device)
    }

    /// Keeps a primary context retained until the iface closes, because memory or a stream remains
    /// in the context. Does nothing for a context of the application.
    pub(crate) fn keep(&self) {
        if let Some(guard) = &self.guard
            && let Some(primary) = &mut *guard.contexts.lock(guard.device)
        {
            primary.kept = true;
        }
    }

    /// Runs `run` with the context current on this thread and with the capture mode RELAXED, and
    /// restores the thread's previous context and mode.
    ///
    /// # Errors
    /// The error of `run`, or of the driver.
    pub(crate) fn with_context<T>(&self, run: impl FnOnce() -> Result<T>) -> Result<T> {
        self.with_context_or_undo(run, |_| Ok(()))
    }

    /// Like [`Self::with_context`], for a `run` that creates an object. If the thread's previous
    /// context cannot be restored, `undo` destroys the object, and this method returns an error.
    pub(crate) fn with_context_or_undo<T>(
        &self,
        run: impl FnOnce() -> Result<T>,
        undo: impl FnOnce(T) -> Result<()>,
    ) -> Result<T> {
        relaxed(self.functions, || self.with_current(run, undo))
    }

    fn with_current<T>(
        &self,
        run: impl FnOnce() -> Result<T>,
        undo: impl FnOnce(T) -> Result<()>,
    ) -> Result<T> {
        // SAFETY: the context is live. It is one of these:
        // - a retained primary context;
        // - the context that the driver has just returned as current on this thread;
        // - the context of memory that the driver has just found, or that `PointerLookup::if_live`
        //   has just checked. Destroying that context would have freed the memory.
        let code = unsafe { (self.functions.ctx_push_current)(self.context) };
        check(code, "cuCtxPushCurrent_v2")?;
        let result = run();
        let Err(refused) = pop(self.functions) else { return result };
        let result = result.and_then(|value| undo(value).and(Err(refused)));
        // The pop failed. It is repeated, so that the application does not continue with the pushed
        // context current.
        if let Err(error) = pop(self.functions) {
            tracing::error!(
                error = %error.full(),
                "cannot restore the CUDA context of the calling thread"
            );
            // The context is still current on the thread, so it must stay alive.
            self.keep();
        }
        result
    }

    /// Runs `run` with the context current, and releases the context.
    ///
    /// # Errors
    /// The errors of [`Self::with_context`] and [`Self::end`].
    pub(crate) fn run<T>(self, run: impl FnOnce() -> Result<T>) -> Result<T> {
        let result = self.with_context(run);
        self.end(result)
    }

    /// Like [`Self::run`]. After success, a primary context stays retained until the iface closes.
    pub(crate) fn run_and_keep<T>(self, run: impl FnOnce() -> Result<T>) -> Result<T> {
        let result = self.with_context(run);
        if result.is_ok() {
            self.keep();
        }
        self.end(result)
    }

    /// Releases the context, and returns `result`. If `result` is an error, a failed release is
    /// only logged.
    ///
    /// # Errors
    /// The error of `result`, or of a refused release. A context whose release was refused stays
    /// retained until its next use ends or the iface closes.
    pub(crate) fn end<T>(mut self, result: Result<T>) -> Result<T> {
        let value = result?;
        self.guard.as_mut().map_or(Ok(()), PrimaryContextGuard::release).map(|()| value)
    }
}

/// Like [`WorkContext::with_context`], for a context that the caller keeps alive.
pub(crate) fn with_context<T>(
    functions: &Functions,
    context: CuContext,
    run: impl FnOnce() -> Result<T>,
) -> Result<T> {
    WorkContext::borrowed(functions, context).with_context(run)
}

/// Makes driver calls in the capture mode RELAXED, and restores the thread's previous mode.
///
/// In the default mode, while another thread captures a stream in the mode GLOBAL, the driver
/// refuses calls that it cannot capture, and invalidates that capture. Queries of events and
/// allocations are such calls. The calls of this crate are no part of any capture.
fn relaxed<T>(functions: &Functions, calls: impl FnOnce() -> T) -> T {
    let previous = exchange_capture_mode(functions, sys::CU_STREAM_CAPTURE_MODE_RELAXED);
    let result = calls();
    if let Some(mode) = previous {
        // A failed exchange is repeated, so that the application's mode is restored.
        let restored = exchange_capture_mode(functions, mode)
            .or_else(|| exchange_capture_mode(functions, mode));
        if restored.is_none() {
            tracing::error!(mode, "cannot restore the CUDA capture mode of the calling thread");
        }
    }
    result
}

/// Sets the capture mode of the calling thread, and returns the previous mode. Returns `None` if
/// the driver refuses the call or lacks the function, and the mode is unchanged. In a callback of a
/// stream, the driver refuses every call.
fn exchange_capture_mode(
    functions: &Functions,
    mut mode: CuStreamCaptureMode,
) -> Option<CuStreamCaptureMode> {
    let exchange = functions.thread_exchange_stream_capture_mode?;
    // SAFETY: `mode` is writable.
    let exchanged = check(unsafe { exchange(&mut mode) }, "cuThreadExchangeStreamCaptureMode");
    log_failure!(debug, &exchanged, "cannot exchange the CUDA capture mode of the calling thread");
    exchanged.ok().map(|()| mode)
}

fn pop(functions: &Functions) -> Result<()> {
    let mut popped = CuContext::NULL;
    // SAFETY: `popped` is writable.
    check(unsafe { (functions.ctx_pop_current)(&mut popped) }, "cuCtxPopCurrent_v2")
}

impl PrimaryContexts {
    /// # Errors
    /// The errors of [`ProcessMark::current`].
    pub(crate) fn new(driver: Driver) -> Result<Self> {
        let process = ProcessMark::current()?;
        let retained = driver.devices.iter().map(|_| Mutex::new(None)).collect();
        Ok(Self { driver, process, allocations: AllocationTable::default(), retained })
    }

    /// Returns true if the calling process opened the iface, and false in a forked child.
    pub(crate) fn is_own_process(&self) -> bool {
        self.process.is_current()
    }

    /// Checks that the calling process opened the iface.
    ///
    /// # Errors
    /// BadState in a forked child.
    pub(crate) fn check_process(&self, operation: &'static str) -> Result<()> {
        self.process.check(operation).map_err(|error| error.iface(IfaceKind::CUDA))
    }

    /// Locks the element of [`Self::retained`] for a device, which must be one of the driver's
    /// devices. The element is `None` if the iface does not retain the device's primary context.
    fn lock(&self, device: DeviceId) -> MutexGuard<'_, Option<PrimaryContext>> {
        self.retained[device.0 as usize].lock()
    }

    fn device_ids(&self) -> impl Iterator<Item = DeviceId> {
        self.driver.devices.iter().map(|entry| entry.description.id)
    }

    /// Retains the primary context of a device. The driver creates the context if it does not exist
    /// in the process.
    pub(crate) fn retain(&self, device: DeviceId) -> Result<WorkContext<'_>> {
        self.check_process("cuDevicePrimaryCtxRetain")?;
        let entry = self.driver.device("cuDevicePrimaryCtxRetain", device)?;
        self.join(entry, &mut self.lock(device))
    }

    /// Adds a user to the primary context of a device. For the first user, retains the context.
    ///
    /// The caller holds the lock of `primary`, which is the device's element of [`Self::retained`].
    /// So no other thread retains or releases the context during this call.
    fn join(
        &self,
        entry: &DeviceEntry,
        primary: &mut Option<PrimaryContext>,
    ) -> Result<WorkContext<'_>> {
        let (functions, device) = (&self.driver.functions, entry.description.id);
        let primary = match primary {
            Some(primary) => primary,
            empty => {
                let mut context = CuContext::NULL;
                let code = relaxed(functions, || {
                    // SAFETY: `context` is writable, and the device is one that the driver listed.
                    unsafe { (functions.primary_ctx_retain)(&mut context, entry.handle) }
                });
                check(code, "cuDevicePrimaryCtxRetain").map_err(|error| error.device(device))?;
                let streams = ContextStreams::default();
                empty.insert(PrimaryContext { context, streams, users: 0, kept: false })
            }
        };
        primary.users += 1;
        let guard = PrimaryContextGuard { contexts: self, device, released: false };
        Ok(WorkContext { functions, context: primary.context, guard: Some(guard) })
    }

    /// Retains the primary context of a device until the iface closes.
    pub(crate) fn retain_until_close(&self, device: DeviceId) -> Result<CuContext> {
        let guard = self.retain(device)?;
        guard.keep();
        Ok(guard.context)
    }

    /// Returns true if `context` is the primary context of `device`, and stays retained until the
    /// iface closes.
    pub(crate) fn keeps(&self, context: CuContext, device: DeviceId) -> bool {
        let retained = self.retained.get(device.0 as usize);
        let is_kept = |primary: &PrimaryContext| primary.kept && primary.context == context;
        retained.is_some_and(|primary| primary.lock().as_ref().is_some_and(is_kept))
    }

    /// Retains the primary context of a device if the context already exists in this process.
    pub(crate) fn retain_if_active(&self, device: DeviceId) -> Result<Option<WorkContext<'_>>> {
        self.check_process("cuDevicePrimaryCtxGetState")?;
        let entry = self.driver.device("cuDevicePrimaryCtxGetState", device)?;
        let mut primary = self.lock(device);
        if primary.is_none() && !self.is_active(device)? {
            return Ok(None);
        }
        self.join(entry, &mut primary).map(Some)
    }

    /// Returns true if the primary context of a device exists in this process.
    pub(crate) fn is_active(&self, device: DeviceId) -> Result<bool> {
        let entry = self.driver.device("cuDevicePrimaryCtxGetState", device)?;
        let (mut flags, mut active) = (0, 0);
        let get_state = self.driver.functions.primary_ctx_get_state;
        // SAFETY: `flags` and `active` are writable.
        let code = unsafe { get_state(entry.handle, &mut flags, &mut active) };
        check(code, "cuDevicePrimaryCtxGetState").map(|()| active != 0)
    }

    /// Returns the calling thread's current context and its device. Returns `None` if the thread
    /// has no current context, or a destroyed one.
    pub(crate) fn current(&self) -> Result<Option<(CuContext, CuDevice)>> {
        let functions = &self.driver.functions;
        let (mut context, mut device) = (CuContext::NULL, 0);
        // SAFETY: `context` is writable.
        check(unsafe { (functions.ctx_get_current)(&mut context) }, "cuCtxGetCurrent")?;
        if context.is_null() {
            return Ok(None);
        }
        // SAFETY: `device` is writable.
        match unsafe { (functions.ctx_get_device)(&mut device) } {
            // The thread's current context may have been destroyed by another thread.
            CuResult::CUDA_ERROR_INVALID_CONTEXT | CuResult::CUDA_ERROR_CONTEXT_IS_DESTROYED => {
                Ok(None)
            }
            code => check(code, "cuCtxGetDevice").map(|()| Some((context, device))),
        }
    }

    /// Returns the calling thread's current context if it belongs to the device.
    pub(crate) fn current_of(&self, device: DeviceId) -> Result<Option<CuContext>> {
        let entry = self.driver.device("cuCtxGetDevice", device)?;
        let current = self.current()?.filter(|(_, of)| *of == entry.handle);
        Ok(current.map(|(context, _)| context))
    }

    /// Returns the context in which a call works on memory. It is the first of these:
    ///
    /// - the memory's own context, unless null;
    /// - the calling thread's context, if it belongs to the same device;
    /// - the device's primary context, which is created if this process does not have it.
    ///
    /// The driver's documentation does not say whether calls on memory without a context need a
    /// current context. So this method never returns without one.
    pub(crate) fn work_context(&self, own: CuContext, device: DeviceId) -> Result<WorkContext<'_>> {
        let borrowed = if own.is_null() { self.current_of(device)? } else { Some(own) };
        match borrowed {
            Some(context) => Ok(WorkContext::borrowed(&self.driver.functions, context)),
            None => self.retain(device),
        }
    }

    /// Returns the context in which to page-lock host memory. The memory then counts as page-locked
    /// in every context, until the returned context is destroyed.
    ///
    /// The iface can keep only a primary context alive, by retaining it. So this method returns the
    /// first of these that exists:
    ///
    /// - the active primary context of the thread's device;
    /// - the active primary context of any device;
    /// - the thread's own context;
    /// - the primary context of the first device, which is created.
    pub(crate) fn work_context_for_host(&self) -> Result<WorkContext<'_>> {
        let current = self.current()?;
        let of_thread =
            |entry: &&DeviceEntry| current.is_some_and(|(_, device)| device == entry.handle);
        let (first, rest): (Vec<_>, Vec<_>) = self.driver.devices.iter().partition(of_thread);
        for entry in first.into_iter().chain(rest) {
            if let Some(guard) = self.retain_if_active(entry.description.id)? {
                return Ok(guard);
            }
        }
        match current {
            Some((context, _)) => Ok(WorkContext::borrowed(&self.driver.functions, context)),
            None => self.retain(DeviceId(0)),
        }
    }

    /// Calls `with` with the streams and events of a device's retained primary context. The lock of
    /// the device's element of [`Self::retained`] is held meanwhile.
    ///
    /// # Errors
    /// BadState if the iface was closed. A closed iface retains no context.
    pub(crate) fn streams<T>(
        &self,
        device: DeviceId,
        with: impl FnOnce(&mut ContextStreams) -> T,
    ) -> Result<T> {
        let mut primary = self.lock(device);
        let not_retained = || {
            CUDA.error(ErrorKind::BadState, "context").remedy("the iface was closed: open it again")
        };
        primary.as_mut().map(|primary| with(&mut primary.streams)).ok_or_else(not_retained)
    }

    /// Calls `run` with a stream that no other thread uses, so that `run` waits for its own work
    /// only. `run` must leave no work in flight on the stream. The caller must make the device's
    /// primary context current.
    pub(crate) fn with_own_stream<T>(
        &self,
        device: DeviceId,
        run: impl FnOnce(CuStream) -> Result<T>,
    ) -> Result<T> {
        let stream = match self.streams(device, |streams| streams.spare.pop())? {
            Some(stream) => stream,
            None => new_stream(&self.driver.functions)?,
        };
        let result = run(stream);
        self.streams(device, |streams| streams.spare.push(stream))?;
        result
    }

    /// Releases every retained context, with its streams and events.
    ///
    /// # Errors
    /// The first error of the driver. That context and the contexts after it stay retained, and the
    /// call can be repeated.
    pub(crate) fn release_all(&self) -> Result<()> {
        self.device_ids().try_for_each(|device| self.release(device, &mut self.lock(device)))
    }

    /// Releases the context of one device, with its streams and events. After an error, the context
    /// stays retained, with the streams and events that were not destroyed.
    fn release(&self, device: DeviceId, retained: &mut Option<PrimaryContext>) -> Result<()> {
        let Some(primary) = retained else { return Ok(()) };
        let (functions, streams) = (&self.driver.functions, &mut primary.streams);
        let destroyed = if streams.is_empty() {
            Ok(())
        } else {
            with_context(functions, primary.context, || streams.destroy(functions))
        };
        destroyed
            .and_then(|()| self.drop_reference(device))
            .map_err(|error| error.device(device))?;
        *retained = None;
        Ok(())
    }

    /// Releases the primary context that [`Self::join`] retained for a device. The caller must
    /// remove the context from [`PrimaryContexts::retained`].
    ///
    /// If the iface has no memory on the device, the hooks notify no subscriber of this release,
    /// since the release frees no registered memory. Other code with memory in the context has
    /// retained the context too, and the hooks notify the subscribers when that code releases it.
    fn drop_reference(&self, device: DeviceId) -> Result<()> {
        const CALL: &str = "cuDevicePrimaryCtxRelease_v2";
        let handle = self.driver.device(CALL, device)?.handle;
        let functions = &self.driver.functions;
        let release = || {
            relaxed(functions, || {
                // SAFETY: `join` retained the context once. The caller removes the context from
                // `retained`, so it is released once.
                unsafe { (functions.primary_ctx_release)(handle) }
            })
        };
        let has_memory = self.allocations.has_memory_of(device);
        check(if has_memory { release() } else { without_notifying(release) }, CALL)
    }
}

impl Drop for PrimaryContexts {
    /// Releases every retained context. Logs the error if the driver refuses to destroy a stream,
    /// for example after a reset of the context, and releases the context nevertheless.
    ///
    /// In a forked child, leaks the table of the parent's memory, whose drop would report the
    /// memory as not freed.
    fn drop(&mut self) {
        if !self.is_own_process() {
            std::mem::forget(std::mem::take(&mut self.allocations));
            return;
        }
        for device in self.device_ids() {
            let mut primary = self.lock(device);
            let Err(error) = self.release(device, &mut primary) else { continue };
            tracing::error!(
                error = %error.full(),
                "cannot release a CUDA context with its streams and events"
            );
            if primary.take().is_some() {
                let released = self.drop_reference(device);
                log_failure!(error, released, "cannot release a CUDA context");
            }
        }
    }
}

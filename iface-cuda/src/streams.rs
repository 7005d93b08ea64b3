//! Streams and events of copies: creation, waiting, destruction, and reuse.

#![allow(unsafe_code, reason = "calls the driver on streams and events")]

use std::{thread, time::Duration};

use hmem_core::Result;
use hmem_iface_kit::log_failure;

use crate::{
    error::check,
    sys::{self, CuEvent, CuResult, CuStream, Functions},
};

/// Streams and events of one primary context.
#[derive(Debug, Default)]
pub(crate) struct ContextStreams {
    /// Stream for all asynchronous copies. The copies end in the order in which they began. Null
    /// until the first asynchronous copy.
    pub(crate) ordered: CuStream,
    /// Streams that no thread uses. A thread that waits for its own work takes one of them.
    pub(crate) spare: Vec<CuStream>,
    /// Events that no copy uses. Later copies reuse them.
    pub(crate) events: Vec<CuEvent>,
}

impl ContextStreams {
    pub(crate) fn is_empty(&self) -> bool {
        self.events.is_empty() && self.spare.is_empty() && self.ordered.is_null()
    }

    /// Destroys all streams and events. The caller must make their context current. After an error,
    /// the objects that were not destroyed remain.
    pub(crate) fn destroy(&mut self, functions: &Functions) -> Result<()> {
        while let Some(event) = self.events.last() {
            destroy_event(functions, *event)?;
            self.events.pop();
        }
        while let Some(stream) = self.spare.last() {
            destroy_stream(functions, *stream)?;
            self.spare.pop();
        }
        if !self.ordered.is_null() {
            // The driver destroys the stream after the copies that still run on it.
            destroy_stream(functions, self.ordered)?;
            self.ordered = CuStream::NULL;
        }
        Ok(())
    }
}

/// Creates a stream of the current context that waits for no other stream.
pub(crate) fn new_stream(functions: &Functions) -> Result<CuStream> {
    let mut stream = CuStream::NULL;
    // SAFETY: `stream` is writable.
    let code = unsafe { (functions.stream_create)(&mut stream, sys::CU_STREAM_NON_BLOCKING) };
    check(code, "cuStreamCreate").map(|()| stream)
}

/// Creates an event of the current context.
pub(crate) fn new_event(functions: &Functions) -> Result<CuEvent> {
    let mut event = CuEvent::NULL;
    let flags = sys::CU_EVENT_DISABLE_TIMING;
    // SAFETY: `event` is writable.
    check(unsafe { (functions.event_create)(&mut event, flags) }, "cuEventCreate").map(|()| event)
}

/// Waits for all work on a stream that [`new_stream`] created, or on the current context's default
/// stream (null).
pub(crate) fn synchronize(functions: &Functions, stream: CuStream) -> Result<()> {
    // SAFETY: `new_stream` created the stream and it is not destroyed, or the stream is null.
    check(unsafe { (functions.stream_synchronize)(stream) }, "cuStreamSynchronize")
}

/// Pause between two attempts to wait for work that may still run.
const PAUSE: Duration = Duration::from_millis(1);

/// Returns true if this code of a query or a wait means that the device no longer runs the work on
/// a stream or before an event of this crate. The work runs no longer in these cases:
///
/// - It has ended.
/// - The process has lost the device.
/// - The process ends.
/// - The context was destroyed or reset. Then the driver has also destroyed the stream and the
///   event, since this crate destroys neither of them while it waits for work.
///
/// Any other code means that the driver refused to answer. For example, it refuses the query of an
/// event while a stream is captured (900), and every call in a callback of a stream (800).
pub(crate) fn ends_work(code: CuResult) -> bool {
    code.is_success()
        || code.is_sticky()
        || matches!(
            code,
            CuResult::CUDA_ERROR_DEINITIALIZED
                | CuResult::CUDA_ERROR_CONTEXT_IS_DESTROYED
                | CuResult::CUDA_ERROR_INVALID_CONTEXT
                | CuResult::CUDA_ERROR_INVALID_HANDLE
        )
}

/// Returns true if a wait with this result shows that the work has ended, as [`ends_work`] does for
/// a code.
pub(crate) fn shows_end<T>(waited: &Result<T>) -> bool {
    let ends = |code| u32::try_from(code).is_ok_and(|code| ends_work(CuResult(code)));
    match waited {
        Ok(_) => true,
        Err(error) => error.driver().is_some_and(|driver| ends(driver.code)),
    }
}

/// Repeats `attempt`, which waits for work on a device, until the work has ended. `attempt` returns
/// true if the work has ended, and the result of the wait.
///
/// The repeated attempts are made on other threads. The calling thread may be in a callback of a
/// stream, where the driver refuses every call.
pub(crate) fn until_ended(attempt: impl Fn() -> (bool, Result<()>) + Sync) -> Result<()> {
    let (ended, result) = attempt();
    if ended {
        return result;
    }
    log_failure!(warn, result, "cannot wait for a copy that may still run; the wait is repeated");
    loop {
        thread::sleep(PAUSE);
        let repeated = thread::scope(|scope| {
            let started = thread::Builder::new().spawn_scoped(scope, &attempt);
            started.ok().and_then(|attempt| attempt.join().ok())
        });
        if let Some((true, result)) = repeated {
            return result;
        }
    }
}

/// Destroys a stream that [`new_stream`] created. No thread may use the stream any longer.
pub(crate) fn destroy_stream(functions: &Functions, stream: CuStream) -> Result<()> {
    // SAFETY: `new_stream` created the stream, and its owner destroys it once.
    check(unsafe { (functions.stream_destroy)(stream) }, "cuStreamDestroy_v2")
}

/// Destroys an event that [`new_event`] created. No thread may wait for the event any longer.
pub(crate) fn destroy_event(functions: &Functions, event: CuEvent) -> Result<()> {
    // SAFETY: `new_event` created the event, and its owner destroys it once.
    check(unsafe { (functions.event_destroy)(event) }, "cuEventDestroy_v2")
}

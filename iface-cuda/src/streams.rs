//! Streams and events of copies: creation, waiting, destruction, and reuse.

#![allow(unsafe_code, reason = "calls the driver on streams and events")]

use hmem_core::Result;

use crate::{
    error::check,
    sys::{self, CuEvent, CuStream, Functions},
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

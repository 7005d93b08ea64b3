//! Functions for copies, streams and events.

use std::ffi::{c_uint, c_void};

use hmem_iface_cuda::sys::{CuDevicePtr, CuEvent, CuResult, CuStream, CuStreamCaptureMode};

use super::{Answer, INVALID_HANDLE, INVALID_VALUE, put};
use crate::state::{CAPTURE_MODE, Copy, Event, State, Stream};

driver! {
    fn cuMemcpyAsync(state, to: CuDevicePtr, from: CuDevicePtr, len: usize, stream: CuStream) {
        copy(state, to, from, len, stream)
    }

    fn cuMemcpyHtoDAsync_v2(
        state,
        to: CuDevicePtr,
        from: *const c_void,
        len: usize,
        stream: CuStream
    ) {
        copy(state, to, from.expose_provenance() as u64, len, stream)
    }

    fn cuMemcpyDtoHAsync_v2(
        state,
        to: *mut c_void,
        from: CuDevicePtr,
        len: usize,
        stream: CuStream
    ) {
        copy(state, to.expose_provenance() as u64, from, len, stream)
    }

    fn cuStreamWaitEvent(state, stream: CuStream, event: CuEvent, _flags: c_uint) {
        if !state.streams.contains_key(&stream.0) {
            return Err(INVALID_HANDLE);
        }
        // Later work on the stream must wait for the event, so this call runs the copies before the
        // event.
        let event = state.events.get(&event.0).ok_or(INVALID_HANDLE)?;
        if let Some((before, _)) = event.recorded {
            state.finish(before);
        }
        Ok(())
    }

    fn cuMemcpy(state, to: CuDevicePtr, from: CuDevicePtr, len: usize) {
        state.current()?;
        state.side(to, len)?;
        state.side(from, len)?;
        state.move_bytes(Copy { to, from, len });
        Ok(())
    }

    fn cuStreamCreate(state, stream: *mut CuStream, _flags: c_uint) {
        let context = state.current()?;
        let id = state.handle();
        let made = Stream { context, waiting: Default::default(), submitted: 0, done: 0 };
        state.streams.insert(id, made);
        put(stream, CuStream(id))
    }

    fn cuStreamSynchronize(state, stream: CuStream) {
        if stream.is_null() {
            let stream = state.current()?;
            state.finish(stream);
            state.streams.remove(&stream);
            return Ok(());
        }
        if !state.streams.contains_key(&stream.0) {
            return Err(INVALID_HANDLE);
        }
        state.finish(stream.0);
        Ok(())
    }

    fn cuStreamDestroy_v2(state, stream: CuStream) {
        state.finish(stream.0);
        state.streams.remove(&stream.0).map(drop).ok_or(INVALID_HANDLE)
    }

    fn cuEventCreate(state, event: *mut CuEvent, _flags: c_uint) {
        let context = state.current()?;
        let id = state.handle();
        state.events.insert(id, Event { context, recorded: None });
        put(event, CuEvent(id))
    }

    fn cuEventRecord(state, event: CuEvent, stream: CuStream) {
        let known = state.streams.get(&stream.0).ok_or(INVALID_HANDLE)?;
        let (context, before) = (known.context, known.submitted);
        let event = state.events.get_mut(&event.0).ok_or(INVALID_HANDLE)?;
        // `cuda.h`: "hEvent and hStream must be from the same context".
        if event.context != context {
            return Err(INVALID_HANDLE);
        }
        event.recorded = Some((stream.0, before));
        Ok(())
    }

    fn cuEventQuery(state, event: CuEvent) {
        let event = state.events.get(&event.0).ok_or(INVALID_HANDLE)?;
        let Some((stream, before)) = event.recorded else { return Ok(()) };
        if state.streams.get(&stream).is_none_or(|stream| stream.done >= before) {
            return Ok(());
        }
        // The copy runs after this query, so that one query sees it in flight.
        state.step(stream);
        Err(CuResult::CUDA_ERROR_NOT_READY)
    }

    fn cuEventSynchronize(state, event: CuEvent) {
        let event = state.events.get(&event.0).ok_or(INVALID_HANDLE)?;
        let Some((stream, before)) = event.recorded else { return Ok(()) };
        while state.streams.get(&stream).is_some_and(|stream| stream.done < before)
            && state.step(stream)
        {}
        Ok(())
    }

    fn cuThreadExchangeStreamCaptureMode(_state, mode: *mut CuStreamCaptureMode) {
        // SAFETY: the caller passes a readable place, as `cuda.h` demands.
        let new = unsafe { mode.as_ref() }.filter(|new| **new <= 2).ok_or(INVALID_VALUE)?;
        put(mode, CAPTURE_MODE.replace(*new))
    }

    fn cuEventDestroy_v2(state, event: CuEvent) {
        state.events.remove(&event.0).map(drop).ok_or(INVALID_HANDLE)
    }
}

fn copy(state: &mut State, to: u64, from: u64, len: usize, stream: CuStream) -> Answer {
    let context = state.current()?;
    state.side(to, len)?;
    state.side(from, len)?;
    let slow = state.profile.slow_copies;
    // A context's default stream has the context's number, and exists while copies are in flight on
    // it.
    let stream = if stream.is_null() { context } else { stream.0 };
    if stream == context {
        let made = Stream { context, waiting: Default::default(), submitted: 0, done: 0 };
        state.streams.entry(stream).or_insert(made);
    }
    let known = state.streams.get_mut(&stream).ok_or(INVALID_HANDLE)?;
    known.waiting.push_back(Copy { to, from, len });
    known.submitted += 1;
    if !slow {
        state.finish(stream);
    }
    if !slow && stream == context {
        state.streams.remove(&stream);
    }
    Ok(())
}

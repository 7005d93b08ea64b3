//! Copies between host and device memory.
//!
//! The device reaches only host memory that is mapped for it, so copies go through a buffer that
//! `synHostMalloc` returned. There is one buffer and one stream. Only one copy runs at a time.

#![allow(unsafe_code, reason = "calls the runtime to copy by address")]

use std::{ffi::c_void, ptr, sync::Arc};

use hmem_core::{Address, ErrorKind, Result, racing_copy};
use hmem_iface_kit::log_failure;
use parking_lot::Mutex;

use super::{
    error::{SYNAPSEAI, check},
    sys::{DRAM_TO_HOST, DeviceInfo, HOST_TO_DRAM, SynStatus, synapse::Functions},
};

/// Length in bytes of the page-locked buffer for copies.
const BUFFER: u64 = 4 << 20;

/// Copier between host memory and one device, through a page-locked buffer.
#[derive(Debug)]
pub(crate) struct Staging {
    functions: Arc<Functions>,
    lane: Mutex<Lane>,
}

/// The page-locked buffer and the stream for copies. A copy creates each of them that is `None`.
#[derive(Debug, Default)]
struct Lane {
    buffer: Option<*mut c_void>,
    stream: Option<*mut c_void>,
}

// SAFETY: the buffer and the stream are handles of the runtime, which any thread may use.
unsafe impl Send for Lane {}

/// Address in host memory, with the direction of the copy.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HostSide {
    /// The copy reads from this address.
    Source(Address),
    /// The copy writes to this address.
    Destination(Address),
}

impl Staging {
    pub(crate) fn new(functions: Arc<Functions>) -> Self {
        Self { functions, lane: Mutex::default() }
    }

    /// Copies `len` bytes between host memory and device memory at `device`. Waits for earlier
    /// copies, and for the end of this copy.
    ///
    /// # Safety
    /// The host memory must be valid for `len` bytes. The device memory must not be freed during
    /// the call.
    pub(crate) unsafe fn copy(&self, device: Address, host: HostSide, len: u64) -> Result<()> {
        let mut lane = self.lane.lock();
        let (buffer, stream) = self.prepare(&mut lane)?;
        let mut done = 0;
        while done < len {
            let piece = (len - done).min(BUFFER);
            let at = Address(device.0 + done);
            // SAFETY: the piece lies in the caller's host memory and device memory.
            let copied = unsafe { self.piece((buffer, stream), at, host, done, piece) };
            if let Err(error) = copied {
                // The device may still use the buffer and the stream, so no later copy uses them.
                *lane = Lane::default();
                tracing::warn!(
                    error = %error.full(),
                    "the staging buffer of a failed copy is abandoned"
                );
                return Err(error);
            }
            done += piece;
        }
        Ok(())
    }

    /// Copies `len` bytes to or from `device` through the buffer, into which they must fit.
    ///
    /// # Safety
    /// The caller must uphold the safety contract of [`Staging::copy`] for the `len` bytes that
    /// begin `done` bytes after the start of the host memory.
    unsafe fn piece(
        &self,
        (buffer, stream): (*mut c_void, *mut c_void),
        device: Address,
        host: HostSide,
        done: u64,
        len: u64,
    ) -> Result<()> {
        let staged = buffer.expose_provenance() as u64;
        let buffer: *mut u8 = buffer.cast();
        match host {
            HostSide::Source(from) => {
                let from = ptr::with_exposed_provenance::<u8>((from.0 + done) as usize);
                // SAFETY: `len` bytes fit the buffer, and the lane's lock excludes other copies.
                // The caller promised readable memory.
                unsafe { racing_copy(from, buffer, len as usize) };
                self.transfer(stream, staged, len, device.0, HOST_TO_DRAM)
            }
            HostSide::Destination(to) => {
                self.transfer(stream, device.0, len, staged, DRAM_TO_HOST)?;
                let to = ptr::with_exposed_provenance_mut::<u8>((to.0 + done) as usize);
                // SAFETY: `len` bytes fit the buffer, and the lane's lock excludes other copies.
                // The caller promised writable memory.
                unsafe { racing_copy(buffer, to, len as usize) };
                Ok(())
            }
        }
    }

    fn transfer(
        &self,
        stream: *mut c_void,
        from: u64,
        len: u64,
        to: u64,
        direction: i32,
    ) -> Result<()> {
        // SAFETY: one of the two addresses is in the lane's buffer. The other is in device memory
        // that the caller keeps allocated.
        let code = unsafe { (self.functions.mem_copy_async)(stream, from, len, to, direction) };
        check(code, "synMemCopyAsync")?;
        // SAFETY: the stream belongs to the lane, and nothing destroys it while the lane is locked.
        check(unsafe { (self.functions.stream_synchronize)(stream) }, "synStreamSynchronize")
    }

    /// Returns the buffer and the stream. Creates each of them that does not exist.
    fn prepare(&self, lane: &mut Lane) -> Result<(*mut c_void, *mut c_void)> {
        let buffer = match lane.buffer {
            Some(buffer) => buffer,
            None => *lane.buffer.insert(self.new_buffer()?),
        };
        let stream = match lane.stream {
            Some(stream) => stream,
            None => *lane.stream.insert(self.new_stream()?),
        };
        Ok((buffer, stream))
    }

    fn new_buffer(&self) -> Result<*mut c_void> {
        let mut buffer = ptr::null_mut();
        // SAFETY: `buffer` is writable.
        let code = unsafe { (self.functions.host_malloc)(0, BUFFER, 0, &mut buffer) };
        check(code, "synHostMalloc")?;
        if buffer.is_null() {
            return Err(SYNAPSEAI
                .error(ErrorKind::Driver, "synHostMalloc")
                .context("why", "the call succeeded and returned no buffer"));
        }
        Ok(buffer)
    }

    fn new_stream(&self) -> Result<*mut c_void> {
        let mut stream = ptr::null_mut();
        // SAFETY: `stream` is writable.
        let code = unsafe { (self.functions.stream_create)(&mut stream, 0, 0) };
        check(code, "synStreamCreateGeneric").map(|()| stream)
    }

    /// Destroys the stream and frees the buffer. A later copy creates them again. If the device was
    /// released before, the runtime has freed both, and this method only forgets their handles.
    ///
    /// # Errors
    /// The error that the runtime reported. A second call releases the remaining objects.
    pub(crate) fn release(&self) -> Result<()> {
        let mut lane = self.lane.lock();
        if lane.buffer.is_none() && lane.stream.is_none() {
            return Ok(());
        }
        let mut info = DeviceInfo::default();
        // SAFETY: `info` is writable, with room for more members.
        let code = unsafe { (self.functions.device_get_info)(0, &mut info) };
        if code != SynStatus::synSuccess {
            // The runtime freed the buffer and the stream with the device, and may have reused
            // their handles for other objects.
            tracing::warn!("the device was released before the iface");
            *lane = Lane::default();
            return Ok(());
        }
        if let Some(stream) = lane.stream {
            // SAFETY: the stream belongs to the lane, and no copy is in flight on it.
            let code = unsafe { (self.functions.stream_destroy)(stream) };
            check(code, "synStreamDestroy")?;
            lane.stream = None;
        }
        if let Some(buffer) = lane.buffer {
            // SAFETY: `synHostMalloc` returned the buffer, and no copy uses it.
            check(unsafe { (self.functions.host_free)(0, buffer, 0) }, "synHostFree")?;
            lane.buffer = None;
        }
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        log_failure!(warn, self.release(), "cannot release the stream and the buffer of copies");
    }
}

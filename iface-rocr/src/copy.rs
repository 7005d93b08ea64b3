//! Copies of device memory: to and from host memory, and between allocations.
//!
//! A device's copy engine accesses memory of that device, and host memory that this iface allocated
//! or page-locked. Other host memory, and memory of another device, is copied through a buffer of
//! this crate. Page-locking the application's memory for a copy would interfere with page-locking
//! by the application.
//!
//! Copies are not ordered after work of the application: the application waits for its own work
//! that writes the source.

#![allow(unsafe_code, reason = "calls the runtime to copy by address")]

use std::{ffi::c_void, ptr, sync::Arc};

use hmem_core::{
    Address, AddressRange, AllocationKind, ErrorKind, Result,
    iface::{CopyEngine, CopyEvent, CopyRange, FinishedCopy},
};
use hmem_iface_kit::{DeviceCopy, InFlight, log_failure};
use parking_lot::Mutex;

use crate::{
    error::{ROCR, check, symbol},
    lookup::Lookup,
    sys::{self, Agent, Signal},
    table::RocrOrigin,
};

/// Length in bytes of a buffer for copies between a device and memory that the device cannot
/// access.
const CHUNK: u64 = 1 << 20;

/// Copies memory. Each copy in flight holds a reference to the buffers.
#[derive(Debug)]
pub(crate) struct Copier(Arc<CopyBuffers>);

/// Buffers that later copies use again, and signals that are still to be destroyed.
#[derive(Debug)]
struct CopyBuffers {
    lookup: Arc<Lookup>,
    /// Idle buffers, which no copy uses.
    spare: Mutex<Vec<Buffer>>,
    /// Signals that the runtime refused to destroy. Closing the iface destroys them.
    undestroyed: Mutex<Vec<Signal>>,
}

/// Address of [`CHUNK`] bytes of host memory that every device can access.
#[derive(Clone, Copy, Debug)]
struct Buffer(usize);

/// Kind of the source or destination memory of a copy.
#[derive(Clone, Copy, Debug)]
enum CopySide {
    /// Memory of a device.
    Device(Agent),
    /// Host memory that every device can access at this address.
    Shared(usize),
    /// Host memory that the runtime knows, but that some devices cannot access.
    Known,
    /// Host memory that the runtime does not know.
    Unknown,
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
        let started = unsafe { self.start(copy) }.map_err(|error| copy.described(error))?;
        Ok(match started {
            Some(copy) => Box::new(InFlight::new(copy)),
            None => Box::new(FinishedCopy(Ok(()))),
        })
    }
}

impl Copier {
    pub(crate) fn new(lookup: Arc<Lookup>) -> Self {
        Self(Arc::new(CopyBuffers {
            lookup,
            spare: Mutex::default(),
            undestroyed: Mutex::default(),
        }))
    }

    /// Returns the number of copies that are not finished yet.
    pub(crate) fn in_flight(&self) -> usize {
        Arc::strong_count(&self.0) - 1
    }

    /// Frees the idle buffers, and destroys the signals whose destruction the runtime refused.
    /// After an error, the buffers and signals that were not released remain.
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
        unsafe { self.start(copy) }
            .and_then(|started| started.map_or(Ok(()), SignalCopy::finish))
            .map_err(|error| copy.described(error))
    }

    /// Starts a copy. Returns `None` if the copy has ended. A copy through buffers consists of
    /// parts of [`CHUNK`] bytes: this method waits for all parts except the last.
    ///
    /// # Safety
    /// The caller must uphold the safety contract of [`hmem_core::Iface::copy`] until the copy has
    /// ended.
    unsafe fn start(&self, copy: CopyRange) -> Result<Option<SignalCopy>> {
        self.0.lookup.runtime.check_process("copy")?;
        let (to, from) = (self.side(copy.to, copy.len)?, self.side(copy.from, copy.len)?);
        let agent = match (to, from) {
            (CopySide::Device(agent), _) | (_, CopySide::Device(agent)) => agent,
            (CopySide::Unknown, CopySide::Unknown) => {
                // If the caller means freed device memory, host memory may be at its address by
                // now. A copy by the CPU would overwrite that host memory.
                return Err(ROCR
                    .error(ErrorKind::OutOfBounds, "copy")
                    .context("why", "the runtime knows neither side")
                    .remedy(
                        "copy memory of this iface before it is freed, and host memory with \
                             the system iface",
                    ));
            }
            _ => {
                // SAFETY: both sides are host memory, which the caller promises to be valid.
                unsafe { copy.copy_by_cpu() };
                return Ok(None);
            }
        };
        if copy.len == 0 {
            return Ok(None);
        }
        let overlap = copy.to.0.abs_diff(copy.from.0) < copy.len;
        if overlap {
            return Err(ROCR
                .error(ErrorKind::InvalidArgument, "copy")
                .context("why", "the sides overlap, and a copy engine copies in no order")
                .remedy("copy through other memory"));
        }
        let direct = |side| match side {
            CopySide::Device(of) => of == agent,
            CopySide::Shared(_) => true,
            _ => false,
        };
        let step = if direct(to) && direct(from) { copy.len } else { CHUNK };
        let mut offset = 0;
        loop {
            let part = CopyRange {
                to: Address(copy.to.0 + offset),
                from: Address(copy.from.0 + offset),
                len: step.min(copy.len - offset),
            };
            let at = |side| match side {
                CopySide::Shared(address) => CopySide::Shared(address + offset as usize),
                side => side,
            };
            let started = self.0.begin(part, at(to), at(from))?;
            offset += part.len;
            if offset == copy.len {
                return Ok(Some(started));
            }
            started.finish()?;
        }
    }

    /// Returns the kind of memory that a range of the copy begins in.
    ///
    /// # Errors
    /// - OutOfBounds if the range begins in an allocation and reaches beyond its end. A range that
    ///   the application page-locked does not count as an allocation.
    /// - Driver if the runtime does not recognise memory that the iface allocated.
    /// - Unavailable if the memory's device is not visible in this process.
    /// - AddressWraps if the range passes the end of the address space.
    /// - Otherwise the error of the lookup.
    fn side(&self, address: Address, len: u64) -> Result<CopySide> {
        let lookup = &self.0.lookup;
        let range = AddressRange::new(address, len)?;
        if let Some(agent_address) = lookup.table.page_locked(range) {
            return Ok(CopySide::Shared(agent_address));
        }
        let own = lookup.table.own_around(address);
        let Some(found) = lookup.find(address)? else {
            // The iface allocated this memory, but the runtime no longer knows it. Neither the CPU
            // nor the runtime can access the memory.
            return match own {
                None => Ok(CopySide::Unknown),
                Some((allocation, _)) => Err(ROCR
                    .error(ErrorKind::Driver, "copy")
                    .context("why", "the runtime does not recognise memory that it allocated")
                    .context("allocation", allocation.range)),
            };
        };
        // The application may have page-locked only some of the pages, so the CPU copies the range.
        if found.kind == AllocationKind::HostRegistered {
            return Ok(CopySide::Known);
        }
        if !found.range.contains_range(range) {
            return Err(ROCR.copy_outside(range, found.range));
        }
        if found.kind == AllocationKind::Host {
            let ours = own.is_some_and(|(_, origin)| origin == RocrOrigin::Pool);
            return Ok(if ours { CopySide::Shared(address.0 as usize) } else { CopySide::Known });
        }
        let device = found.device.ok_or_else(|| {
            ROCR.error(ErrorKind::Unavailable, "copy")
                .context("allocation", found.range)
                .remedy("the memory's device is not visible here: see ROCR_VISIBLE_DEVICES")
        })?;
        Ok(CopySide::Device(lookup.runtime.device("copy", device)?.agent))
    }
}

impl CopyBuffers {
    /// Starts a copy with at least one side on a device. If a device cannot access the other side,
    /// the copy runs through one buffer, and must fit into it.
    ///
    /// A copy between two devices has two steps, into the buffer and out of it. This method waits
    /// for the end of the first step and starts the second.
    fn begin(
        self: &Arc<Self>,
        copy: CopyRange,
        to: CopySide,
        from: CopySide,
    ) -> Result<SignalCopy> {
        let buffers = Arc::clone(self);
        let mut started =
            SignalCopy { buffers, signal: Signal::default(), buffer: None, out: None };
        match started.submit_part(copy, to, from) {
            Ok(()) => Ok(started),
            // No copy runs: this returns the buffer.
            Err(error) => started.finish().and(Err(error)),
        }
    }

    fn host(&self) -> Result<Agent> {
        let host = self.lookup.runtime.host.map(|(agent, _)| agent);
        host.ok_or_else(|| {
            ROCR.error(ErrorKind::Unsupported, "copy")
                .context("why", "the runtime has no pool of host memory")
        })
    }

    fn release(&self) -> Result<()> {
        let mut spare = self.spare.lock();
        while let Some(Buffer(buffer)) = spare.last().copied() {
            // SAFETY: `take_buffer` allocated the buffer, and no copy uses it. The list loses the
            // buffer once it is freed.
            unsafe { self.lookup.runtime.free(ptr::with_exposed_provenance_mut(buffer)) }?;
            spare.pop();
        }
        let mut signals = self.undestroyed.lock();
        while let Some(signal) = signals.last().copied() {
            self.destroy(signal)?;
            signals.pop();
        }
        Ok(())
    }

    fn destroy(&self, signal: Signal) -> Result<()> {
        // SAFETY: `submit` created the signal, its owner destroys it once, and no copy uses it any
        // longer.
        let code = unsafe { (self.lookup.runtime.functions.signal_destroy)(signal) };
        check(code, "hsa_signal_destroy")
    }
}

impl Drop for CopyBuffers {
    fn drop(&mut self) {
        if self.lookup.runtime.process.is_current() {
            log_failure!(warn, self.release(), "cannot free the buffers for copies");
        }
    }
}

/// A copy that a copy engine runs.
#[derive(Debug)]
struct SignalCopy {
    buffers: Arc<CopyBuffers>,
    /// Signal with a value that falls below 1 when the copy ends. The handle is 0 if no copy runs.
    signal: Signal,
    /// The buffer through which the bytes are copied, or `None` for a direct copy.
    buffer: Option<Buffer>,
    /// Copy from the buffer to host memory, which the CPU makes after the device's copy.
    out: Option<CopyRange>,
}

impl SignalCopy {
    /// Starts a copy for [`CopyBuffers::begin`]. After an error no copy runs.
    fn submit_part(&mut self, copy: CopyRange, to: CopySide, from: CopySide) -> Result<()> {
        let (device_to, device_from) = (copy.to.0 as usize, copy.from.0 as usize);
        match (to, from) {
            (CopySide::Device(agent), CopySide::Device(of)) if agent == of => {
                self.submit((device_to, agent), (device_from, agent), copy.len)
            }
            (CopySide::Device(agent), CopySide::Shared(from)) => {
                self.submit((device_to, agent), (from, self.buffers.host()?), copy.len)
            }
            (CopySide::Shared(to), CopySide::Device(agent)) => {
                self.submit((to, self.buffers.host()?), (device_from, agent), copy.len)
            }
            (_, CopySide::Device(agent)) => {
                let (buffer, host) = (self.take_buffer()?, self.buffers.host()?);
                self.submit((buffer, host), (device_from, agent), copy.len)?;
                if let CopySide::Device(other) = to {
                    self.wait()?;
                    return self.submit((device_to, other), (buffer, host), copy.len);
                }
                self.out = Some(CopyRange { from: Address(buffer as u64), ..copy });
                Ok(())
            }
            (CopySide::Device(agent), _) => {
                let (buffer, host) = (self.take_buffer()?, self.buffers.host()?);
                // SAFETY: the buffer is this copy's own and of `CHUNK` bytes; the source is host
                // memory, which the caller of the copy promises to be valid.
                unsafe { CopyRange { to: Address(buffer as u64), ..copy }.copy_by_cpu() };
                self.submit((device_to, agent), (buffer, host), copy.len)
            }
            // `start` has already copied from host memory to host memory.
            _ => Ok(()),
        }
    }

    fn take_buffer(&mut self) -> Result<usize> {
        let spare = self.buffers.spare.lock().pop();
        let buffer = match spare {
            Some(buffer) => buffer,
            None => {
                let base = self.buffers.lookup.runtime.allocate_host(CHUNK as usize)?;
                Buffer(base.expose_provenance())
            }
        };
        self.buffer = Some(buffer);
        Ok(buffer.0)
    }

    /// Submits a copy to a copy engine, which must be able to access both sides.
    fn submit(&mut self, to: (usize, Agent), from: (usize, Agent), len: u64) -> Result<()> {
        let f = &self.buffers.lookup.runtime.functions;
        let start = symbol(f.async_copy, "hsa_amd_memory_async_copy")?;
        let mut signal = Signal::default();
        // SAFETY: `signal` is writable. With an empty list of consumers, any agent may wait for the
        // signal.
        check(unsafe { (f.signal_create)(1, 0, ptr::null(), &mut signal) }, "hsa_signal_create")?;
        // SAFETY: both sides hold `len` bytes, do not overlap, and stay allocated until the copy
        // has ended. `side` checked the bounds of memory that the runtime knows, and the caller of
        // `Iface::copy` keeps both sides valid. The signal is this copy's own.
        let code = unsafe {
            start(
                ptr::with_exposed_provenance_mut::<c_void>(to.0),
                to.1,
                ptr::with_exposed_provenance::<c_void>(from.0),
                from.1,
                len as usize,
                0,
                ptr::null(),
                signal,
            )
        };
        self.signal = signal;
        check(code, "hsa_amd_memory_async_copy").inspect_err(|_| self.destroy_signal())
    }

    /// Waits until the copy engine has ended the copy.
    fn wait(&mut self) -> Result<()> {
        let f = &self.buffers.lookup.runtime.functions;
        let (below, blocked) = (sys::HSA_SIGNAL_CONDITION_LT, sys::HSA_WAIT_STATE_BLOCKED);
        // The wait may return early. The copy has ended only if the value is below 1.
        let value = loop {
            // SAFETY: the signal is this copy's own.
            let value = unsafe { (f.signal_wait)(self.signal, below, 1, u64::MAX, blocked) };
            if value < 1 {
                break value;
            }
        };
        self.destroy_signal();
        if value < 0 {
            return Err(ROCR
                .error(ErrorKind::Driver, "hsa_amd_memory_async_copy")
                .context("signal", value)
                .context("why", "the copy engine reported an error")
                .remedy("look at the kernel log (dmesg) for a fault of the device"));
        }
        Ok(())
    }

    /// Destroys the signal, which no copy uses any longer. If the runtime refuses, closing the
    /// iface destroys the signal.
    fn destroy_signal(&mut self) {
        let signal = std::mem::take(&mut self.signal);
        if let Err(error) = self.buffers.destroy(signal) {
            tracing::warn!(
                error = %error.full(),
                "cannot destroy the signal of a copy; closing the iface retries"
            );
            self.buffers.undestroyed.lock().push(signal);
        }
    }
}

impl DeviceCopy for SignalCopy {
    fn has_ended(&self) -> bool {
        let runtime = &self.buffers.lookup.runtime;
        // SAFETY: the signal is this copy's own.
        !runtime.process.is_current() || unsafe { (runtime.functions.signal_load)(self.signal) } < 1
    }

    fn finish(mut self) -> Result<()> {
        // The copy of a parent accesses no memory of its forked child.
        self.buffers.lookup.runtime.check_process("copy")?;
        let waited = if self.signal == Signal::default() { Ok(()) } else { self.wait() };
        if let (Ok(()), Some(out)) = (&waited, self.out) {
            // SAFETY: the buffer is this copy's own, and the caller of the copy keeps the
            // destination valid until it has ended.
            unsafe { out.copy_by_cpu() };
        }
        self.buffers.spare.lock().extend(self.buffer);
        waited
    }
}

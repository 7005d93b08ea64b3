//! Lanes: the driver objects that a device needs for one copy.
//!
//! A [`Lane`] is an immediate command list, an event and a buffer of the driver's host memory. Only
//! one copy at a time uses a lane. After the copy the lane is kept for the next one.

#![allow(unsafe_code, reason = "calls the driver on command lists and events")]

use std::{ffi::c_void, ptr, sync::Arc};

use hmem_core::{Address, Error, ErrorKind, Result, iface::CopyRange};
use hmem_iface_kit::log_failure;
use parking_lot::Mutex;

use crate::{
    driver::DeviceEntry,
    error::check,
    lookup::Lookup,
    sys::{
        self, CommandListHandle, DeviceHandle, EventDescription, EventHandle, EventPoolDescription,
        EventPoolHandle, HostMemoryDescription, QueueDescription,
    },
};

/// Length in bytes of the host buffer of a [`Lane`].
pub(crate) const BUFFER: u64 = 1 << 20;

/// Idle [lanes](Lane), which the next copies use.
#[derive(Debug)]
pub(crate) struct Lanes {
    pub(crate) lookup: Arc<Lookup>,
    spare: Mutex<Vec<Lane>>,
}

/// Driver objects and a host buffer for one copy at a time.
#[derive(Debug)]
pub(crate) struct Lane {
    device: DeviceHandle,
    /// Index of the device's driver in `Driver::contexts`.
    driver: usize,
    list: CommandListHandle,
    pool: EventPoolHandle,
    pub(crate) event: EventHandle,
    /// First address of the buffer, or 0 while the buffer is not allocated.
    pub(crate) buffer: u64,
    /// True from the start of a copy until [`Lanes::finish`] has waited for its end.
    busy: bool,
}

impl Lanes {
    pub(crate) fn new(lookup: Arc<Lookup>) -> Self {
        Self { lookup, spare: Mutex::default() }
    }

    /// Takes an idle [`Lane`] of a device, or creates a lane.
    pub(crate) fn take(&self, entry: &DeviceEntry) -> Result<Lane> {
        let mut spare = self.spare.lock();
        if let Some(at) = spare.iter().position(|lane| lane.device == entry.handle) {
            return Ok(spare.swap_remove(at));
        }
        drop(spare);
        let mut lane = Lane {
            device: entry.handle,
            driver: entry.driver,
            list: CommandListHandle::NULL,
            pool: EventPoolHandle::NULL,
            event: EventHandle::NULL,
            buffer: 0,
            busy: false,
        };
        let made = self.make(&mut lane, entry.copy_group);
        if made.is_err() {
            log_failure!(
                error,
                self.destroy(&mut lane),
                "cannot destroy the parts of a failed lane"
            );
        }
        made.map(|()| lane)
    }

    fn make(&self, lane: &mut Lane, ordinal: u32) -> Result<()> {
        let functions = &self.lookup.driver.functions;
        let queue = QueueDescription {
            ordinal,
            mode: sys::ZE_COMMAND_QUEUE_MODE_ASYNCHRONOUS,
            ..QueueDescription::default()
        };
        let pool = EventPoolDescription {
            flags: sys::ZE_EVENT_POOL_FLAG_HOST_VISIBLE,
            count: 1,
            ..EventPoolDescription::default()
        };
        let event = EventDescription {
            signal: sys::ZE_EVENT_SCOPE_FLAG_HOST,
            wait: sys::ZE_EVENT_SCOPE_FLAG_HOST,
            ..EventDescription::default()
        };
        let (mut device, mut buffer) = (lane.device, ptr::null_mut());
        self.lookup.driver.with_context(lane.driver, |context| {
            // SAFETY: `with_context` keeps the context alive, and it belongs to the device's
            // driver. The descriptions have their types in `stype` and end their chains. Each
            // output is writable, and one device is passed.
            unsafe {
                let create = functions.command_list_create_immediate;
                check(
                    create(context, device, &queue, &mut lane.list),
                    "zeCommandListCreateImmediate",
                )?;
                let create = functions.event_pool_create;
                check(create(context, &pool, 1, &mut device, &mut lane.pool), "zeEventPoolCreate")?;
                check(
                    (functions.event_create)(lane.pool, &event, &mut lane.event),
                    "zeEventCreate",
                )?;
                let host = HostMemoryDescription::default();
                let allocate = functions.mem_alloc_host;
                check(allocate(context, &host, BUFFER as usize, 0, &mut buffer), "zeMemAllocHost")
            }
        })?;
        lane.buffer = Address::of_ptr(buffer).0;
        Ok(())
    }

    /// Destroys the driver objects of a [`Lane`] on which no copy runs. After an error, the objects
    /// that were not destroyed stay in the lane.
    fn destroy(&self, lane: &mut Lane) -> Result<()> {
        let functions = &self.lookup.driver.functions;
        // SAFETY: each object belongs to this lane only, no copy uses it any longer, and the lane
        // forgets it once it is destroyed.
        unsafe {
            if lane.event != EventHandle::NULL {
                check((functions.event_destroy)(lane.event), "zeEventDestroy")?;
                lane.event = EventHandle::NULL;
            }
            if lane.pool != EventPoolHandle::NULL {
                check((functions.event_pool_destroy)(lane.pool), "zeEventPoolDestroy")?;
                lane.pool = EventPoolHandle::NULL;
            }
            if lane.list != CommandListHandle::NULL {
                check((functions.command_list_destroy)(lane.list), "zeCommandListDestroy")?;
                lane.list = CommandListHandle::NULL;
            }
        }
        if lane.buffer != 0 {
            self.lookup.free(lane.driver, Address(lane.buffer))?;
            lane.buffer = 0;
        }
        Ok(())
    }

    /// Destroys the idle [lanes](Lane).
    pub(crate) fn release(&self) -> Result<()> {
        let mut spare = self.spare.lock();
        while let Some(lane) = spare.last_mut() {
            self.destroy(lane)?;
            spare.pop();
        }
        Ok(())
    }

    /// Starts a copy by the device, which must be able to access both sides.
    pub(crate) fn start(&self, lane: &mut Lane, copy: CopyRange) -> Result<()> {
        let to = ptr::with_exposed_provenance_mut::<c_void>(copy.to.0 as usize);
        let from = ptr::with_exposed_provenance::<c_void>(copy.from.0 as usize);
        let (append, len) = (self.lookup.driver.functions.append_memory_copy, copy.len as usize);
        // SAFETY: the lane has one user at a time. Both sides are memory of the device or host
        // memory of its driver, and the caller of `Iface::copy` keeps them allocated. The sides do
        // not overlap. The copy waits for no event. Memory of the application belongs to another
        // context than the list: the specification requires one context, and Intel's driver accepts
        // memory of all contexts.
        let code = unsafe { append(lane.list, to, from, len, lane.event, 0, ptr::null_mut()) };
        check(code, "zeCommandListAppendMemoryCopy")?;
        lane.busy = true;
        Ok(())
    }

    /// Waits for the copy on a [`Lane`], and resets the lane's event for the next copy. After a
    /// failed wait, the lane still counts as busy.
    pub(crate) fn finish(&self, lane: &mut Lane) -> Result<()> {
        let functions = &self.lookup.driver.functions;
        // SAFETY: the event is the lane's own, and its copy was started.
        let code = unsafe { (functions.event_host_synchronize)(lane.event, u64::MAX) };
        check(code, "zeEventHostSynchronize")?;
        lane.busy = false;
        // SAFETY: the event is signalled, and nothing else waits for it.
        check(unsafe { (functions.event_host_reset)(lane.event) }, "zeEventHostReset")
    }

    /// Puts a [`Lane`] back into the list of idle lanes. If `failed` is the error of the lane's
    /// last copy, destroys the lane instead.
    ///
    /// The device may still run the failed copy, so this method waits for the end of the copy
    /// before it destroys the lane. It does not wait after an error of the kind Unavailable,
    /// because a lost device runs no copy. Errors of the wait and of the destruction are only
    /// logged.
    pub(crate) fn leave(&self, mut lane: Lane, failed: Option<&Error>) {
        let Some(refused) = failed else {
            self.spare.lock().push(lane);
            return;
        };
        let may_run = lane.busy && refused.kind() != ErrorKind::Unavailable;
        let ended = if may_run { self.finish(&mut lane) } else { Ok(()) };
        let destroyed = ended.and_then(|()| self.destroy(&mut lane));
        log_failure!(error, destroyed, "cannot destroy the lane of a failed copy");
    }

    /// Copies on a [`Lane`], and waits for the end of the copy.
    pub(crate) fn run(&self, lane: &mut Lane, copy: CopyRange) -> Result<()> {
        self.start(lane, copy)?;
        self.finish(lane)
    }

    /// Calls a function with an idle [`Lane`] of a device.
    pub(crate) fn with_lane(
        &self,
        entry: &DeviceEntry,
        work: impl FnOnce(&mut Lane) -> Result<()>,
    ) -> Result<()> {
        let mut lane = self.take(entry)?;
        let result = work(&mut lane);
        self.leave(lane, result.as_ref().err());
        result
    }

    /// Copies through the host buffers of [lanes](Lane), and waits for the end of the copy.
    ///
    /// # Safety
    /// The caller must uphold the safety contract of [`hmem_core::Iface::copy`]. A side without a
    /// device must be host memory.
    pub(crate) unsafe fn run_buffered(
        &self,
        copy: CopyRange,
        from: Option<&DeviceEntry>,
        to: Option<&DeviceEntry>,
    ) -> Result<()> {
        let mut done = 0;
        while done < copy.len {
            let len = BUFFER.min(copy.len - done);
            let (source, target) = (Address(copy.from.0 + done), Address(copy.to.0 + done));
            let store = |source: Address| match to {
                None => {
                    // SAFETY: both sides are host memory: that of the caller, or the buffer of a
                    // lane that this copy owns.
                    unsafe { CopyRange { to: target, from: source, len }.copy_by_cpu() };
                    Ok(())
                }
                Some(entry) => self.with_lane(entry, |lane| {
                    let buffer = Address(lane.buffer);
                    // SAFETY: the source is host memory, and this copy owns the lane to which the
                    // buffer belongs.
                    unsafe { CopyRange { to: buffer, from: source, len }.copy_by_cpu() };
                    self.run(lane, CopyRange { to: target, from: buffer, len })
                }),
            };
            match from {
                None => store(source)?,
                Some(entry) => self.with_lane(entry, |lane| {
                    let buffer = Address(lane.buffer);
                    self.run(lane, CopyRange { to: buffer, from: source, len })?;
                    store(buffer)
                })?,
            }
            done += len;
        }
        Ok(())
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        if self.lookup.driver.process.is_current() {
            log_failure!(warn, self.release(), "cannot destroy a Level Zero command list");
        }
    }
}

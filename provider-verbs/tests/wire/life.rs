//! Asynchronous events of the fake devices, and the removal of devices.

use std::{
    collections::VecDeque,
    ffi::c_int,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    ptr,
};

use hmem_provider_verbs::sys::{AsyncEvent, Context, EventElement, EventType};
use rustix::event::{EventfdFlags, eventfd};

use super::{Wire, with};
use crate::fake;

/// Events of one context. As in the kernel, the fd is readable while events are unread, and after
/// the removal of the device.
pub(super) struct ContextLife {
    fd: OwnedFd,
    events: VecDeque<AsyncEvent>,
    /// True once the kernel has removed the device, and so destroyed all objects.
    is_removed: bool,
    /// Number of events that the caller has read but not acknowledged.
    unacknowledged: u32,
}

// SAFETY: the pointers in the events are only returned to the caller.
unsafe impl Send for ContextLife {}

impl ContextLife {
    fn new() -> Self {
        let fd = eventfd(0, EventfdFlags::NONBLOCK).expect("an event fd");
        Self { fd, events: VecDeque::new(), is_removed: false, unacknowledged: 0 }
    }

    fn ring(&self) {
        rustix::io::write(&self.fd, &1u64.to_ne_bytes()).expect("ring");
    }
}

/// Adds a context, and sets its fd.
///
/// # Safety
/// `context` is a live context.
pub(super) unsafe fn add(context: *mut Context) {
    let life = ContextLife::new();
    // SAFETY: the caller passes a live context.
    unsafe { (*context).async_fd = life.fd.as_fd().as_raw_fd() };
    with(|wire| wire.lives.insert(context.addr(), life));
}

pub(super) extern "C" fn close_device(context: *mut Context) -> c_int {
    let life = with(|wire| wire.lives.remove(&context.addr())).expect("an open context");
    assert_eq!(life.unacknowledged, 0, "an event was not acknowledged");
    let close: extern "C" fn(*mut Context) -> c_int = {
        let close = fake::symbol("ibv_close_device").expect("the fake closes devices");
        // SAFETY: the fake's function has this signature.
        unsafe { std::mem::transmute(close) }
    };
    close(context)
}

pub(super) extern "C" fn get_async_event(context: *mut Context, event: *mut AsyncEvent) -> c_int {
    let read = with(|wire| {
        let life = wire.lives.get_mut(&context.addr()).expect("an open context");
        let Some(next) = life.events.pop_front() else {
            return Err(if life.is_removed { libc::EIO } else { libc::EAGAIN });
        };
        life.unacknowledged += 1;
        if life.events.is_empty() && !life.is_removed {
            rustix::io::read(&life.fd, &mut [0; 8]).expect("it was rung");
        }
        Ok(next)
    });
    match read {
        Ok(next) => {
            // SAFETY: the caller passes a writable event.
            unsafe { *event = next };
            0
        }
        Err(errno) => {
            fake::set_errno(errno);
            -1
        }
    }
}

pub(super) extern "C" fn ack_async_event(_event: *mut AsyncEvent) {
    with(|wire| {
        let life = wire.lives.values_mut().find(|life| life.unacknowledged > 0);
        life.expect("an event that was read").unacknowledged -= 1;
    });
}

impl Wire {
    /// Reports an event to all open contexts.
    fn report(&mut self, event_type: EventType, element: EventElement) {
        for life in self.lives.values_mut() {
            life.events.push_back(AsyncEvent { element, event_type });
            life.ring();
        }
    }

    /// Returns true if the kernel has removed the device of a context.
    pub(super) fn is_removed(&self, context: *mut Context) -> bool {
        self.lives.get(&context.addr()).is_some_and(|life| life.is_removed)
    }
}

/// Reports an event of a port to all open contexts.
pub(crate) fn report_port(event_type: EventType, port_num: c_int) {
    with(|wire| wire.report(event_type, EventElement { port_num }));
}

/// Reports an event of the device to all open contexts.
pub(crate) fn report_device(event_type: EventType) {
    with(|wire| wire.report(event_type, EventElement { srq: ptr::null_mut() }));
}

/// Reports an event of a completion queue, the one that was created last, to all open contexts.
pub(crate) fn report_queue(event_type: EventType) {
    with(|wire| {
        let cq = wire.capacities.keys().copied().max().expect("a queue");
        wire.report(event_type, EventElement { cq: ptr::with_exposed_provenance_mut(cq) });
    });
}

/// Reports an event of a queue pair, the one that was created last, to all open contexts. Returns
/// its number.
pub(crate) fn report_pair(event_type: EventType) -> u32 {
    with(|wire| {
        let (_, pair) = wire.pairs.iter().max_by_key(|(id, _)| **id).expect("a queue pair");
        let (qp, number) = (pair.qp, pair.place.1);
        wire.report(event_type, EventElement { qp: ptr::with_exposed_provenance_mut(qp) });
        number
    })
}

/// Removes the devices of all open contexts, as the kernel does: destroys all their objects, and
/// reports a fatal event. From then on all calls fail with EIO, also those that destroy an object.
pub(crate) fn remove_devices() {
    with(|wire| {
        wire.regions.clear();
        wire.pairs.values_mut().for_each(|pair| {
            pair.sends.clear();
            pair.receives.clear();
        });
        wire.late_binds.clear();
        wire.report(EventType::IBV_EVENT_DEVICE_FATAL, EventElement { srq: ptr::null_mut() });
        for life in wire.lives.values_mut() {
            life.is_removed = true;
            life.ring();
        }
    });
}

/// Removes the devices ([`remove_devices`]) in the `nth` call of the library from now on that
/// creates, changes or destroys an object, before the call.
pub(crate) fn remove_devices_at(nth: u32) {
    with(|wire| wire.removal = Some(nth));
}

/// Returns true if the removal of [`remove_devices_at`] has happened.
pub(crate) fn has_removed_devices() -> bool {
    with(|wire| wire.removal.is_none())
}

/// Returns true if the call that is starting finds its device removed. Counts the call.
pub(super) fn is_removed(context: *mut Context) -> bool {
    let now = with(|wire| {
        let left = wire.removal.as_mut()?;
        *left -= 1;
        wire.removal.take_if(|left| *left == 0)
    });
    if now.is_some() {
        remove_devices();
    }
    let removed = with(|wire| wire.is_removed(context));
    if removed {
        fake::set_errno(libc::EIO);
    }
    removed
}

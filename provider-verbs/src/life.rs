//! The life of a device: its asynchronous events, and its loss.
//!
//! No thread waits for events. They are read when a thread asks for the state of the NIC, waits for
//! completions or arms a completion channel; after a call of the driver fails or a request ends in
//! error; and at every 256th read of a completion queue that finds the queue empty.

#![allow(unsafe_code, reason = "reads and acknowledges events of the library")]

use std::{
    mem,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use hmem_core::{
    Errno,
    provider::{NicEvent, NicRecord},
};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll::EventFlags, eventfd, poll},
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
};

use super::{
    library::Library,
    sys::{AsyncEvent, Context, EventType},
};

const INTERRUPTED: Errno = Errno(4);
const IO: Errno = Errno(5);
const WOULD_BLOCK: Errno = Errno(11);
const NO_DEVICE: Errno = Errno(19);

/// The state of an open context's device, and the events that the driver reported.
#[derive(Debug)]
pub(super) struct DeviceLife {
    pub(super) record: NicRecord,
    context: *mut Context,
    /// True if the provider opened the context. In a context that the application opened, the
    /// application reads the events. The provider then sees only that the kernel has removed the
    /// device.
    reads_events: bool,
    /// True once the kernel has destroyed every object of the context. Calls that destroy an object
    /// then fail with [`is_gone`](Self::is_gone)'s errno values, although the object is gone.
    released: AtomicBool,
    /// An event fd that is readable from the loss of the device on. The first thread that sleeps
    /// for completions creates it.
    alarm: OnceLock<OwnedFd>,
}

impl DeviceLife {
    /// Creates the state of a context.
    ///
    /// # Safety
    /// `context` is an open context, and stays open as long as the result is used.
    pub(super) unsafe fn new(context: *mut Context, reads_events: bool) -> Self {
        Self {
            record: NicRecord::default(),
            context,
            reads_events,
            released: AtomicBool::new(false),
            alarm: OnceLock::new(),
        }
    }

    /// Makes reads of events return at once if there are none. Does nothing if the application
    /// reads the events.
    pub(super) fn set_nonblocking(&self) -> rustix::io::Result<()> {
        match self.events() {
            Some(fd) if self.reads_events => fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK),
            _ => Ok(()),
        }
    }

    /// Returns the fd on which the kernel reports events, or `None` if the context has none.
    fn events(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the context is open, and with it the fd.
        unsafe {
            let fd = (*self.context).async_fd;
            (fd >= 0).then(|| BorrowedFd::borrow_raw(fd))
        }
    }

    /// Returns the fds that a thread watches while it sleeps for completions, each with the epoll
    /// events that wake the thread. Errors of an fd also wake the thread, because epoll always
    /// reports them.
    pub(super) fn watched(&self) -> rustix::io::Result<[Option<(BorrowedFd<'_>, EventFlags)>; 2]> {
        if self.alarm.get().is_none() {
            let made = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            // If another thread has set the fd first, that fd is used.
            self.alarm.get_or_init(|| made);
            if self.record.is_lost() {
                self.ring();
            }
        }
        let wake = if self.reads_events { EventFlags::IN } else { EventFlags::empty() };
        let alarm = self.alarm.get().map(|alarm| (alarm.as_fd(), EventFlags::IN));
        Ok([alarm, self.events().map(|fd| (fd, wake))])
    }

    /// Makes the alarm readable, for good, which wakes all threads that sleep for completions of
    /// the device. Threads that go to sleep later wake at once.
    fn ring(&self) {
        if let Some(alarm) = self.alarm.get()
            && let Err(errno) = rustix::io::write(alarm, &1u64.to_ne_bytes())
        {
            tracing::error!(%errno, "cannot wake a sleeping thread");
        }
    }

    /// Records that the device is lost.
    pub(super) fn lose(&self, cause: &'static str) {
        if self.record.lose(cause) {
            tracing::error!(cause, "the device of a NIC is lost");
            self.ring();
        }
    }

    /// Reads the events that the kernel has reported, and acknowledges them. Does not wait.
    pub(super) fn read_events(&self, library: &Library) {
        let Some(fd) = self.events() else { return };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        loop {
            let mut polled = [PollFd::new(&fd, PollFlags::IN)];
            match poll(&mut polled, Some(&now)) {
                Ok(0) | Err(_) => return,
                Ok(_) if self.reads_events => {
                    if !self.read_event(library) {
                        return;
                    }
                }
                // An event that the application has not read hides the error behind it.
                Ok(_) if polled[0].revents().contains(PollFlags::ERR) => return self.release(),
                Ok(_) => return,
            }
        }
    }

    /// Reads one event. Returns false if there is none.
    fn read_event(&self, library: &Library) -> bool {
        // SAFETY: all zeros is a valid value of this plain structure.
        let mut event: AsyncEvent = unsafe { mem::zeroed() };
        let functions = &library.functions;
        // SAFETY: the context is open, and the event is writable for the call.
        if unsafe { (functions.get_async_event)(self.context, &mut event) } != 0 {
            match super::errors::last() {
                IO | NO_DEVICE => self.release(),
                WOULD_BLOCK | INTERRUPTED => {}
                errno => tracing::error!(%errno, "ibv_get_async_event"),
            }
            return false;
        }
        // SAFETY: the event was read just now. The library keeps its object alive until the
        // acknowledgement.
        unsafe {
            self.note(&event);
            (functions.ack_async_event)(&mut event);
        }
        true
    }

    /// Records an event.
    ///
    /// # Safety
    /// The library returned the event, and the caller has not acknowledged it.
    unsafe fn note(&self, event: &AsyncEvent) {
        // SAFETY: the element of an event of a queue pair is that queue pair, which is alive.
        let pair = || unsafe { (*event.element.qp).qp_num };
        // SAFETY: the element of an event of a port is the port's number.
        let port = || unsafe { event.element.port_num as u8 };
        let note = match event.event_type {
            EventType::IBV_EVENT_DEVICE_FATAL => {
                return self.lose("the driver reported a fatal event of the device");
            }
            EventType::IBV_EVENT_PORT_ACTIVE => NicEvent::PortUp(port()),
            EventType::IBV_EVENT_PORT_ERR => NicEvent::PortDown(port()),
            EventType::IBV_EVENT_QP_FATAL
            | EventType::IBV_EVENT_QP_REQ_ERR
            | EventType::IBV_EVENT_QP_ACCESS_ERR => NicEvent::EndpointFailed(pair()),
            EventType::IBV_EVENT_QP_LAST_WQE_REACHED => NicEvent::LastRequestReached(pair()),
            EventType::IBV_EVENT_CQ_ERR => {
                // The provider never overruns a queue, so the NIC or its driver is broken. The
                // requests of the queue would never complete.
                self.record.note(NicEvent::QueueFailed);
                return self.lose("the driver reported that a completion queue failed");
            }
            other => NicEvent::Other(match other.name() {
                Some(name) => name.into(),
                None => format!("event {}", other.0).into(),
            }),
        };
        tracing::warn!(event = ?note, "event of a NIC");
        self.record.note(note);
    }

    /// Records that the kernel has destroyed every object of the context.
    fn release(&self) {
        self.released.store(true, Ordering::Release);
        self.lose("the kernel has removed the device");
    }

    /// Returns true if a call that destroys an object failed because the kernel had destroyed the
    /// object before, with all others of the context.
    pub(super) fn is_gone(&self, errno: Errno) -> bool {
        matches!(errno, IO | NO_DEVICE) && self.released.load(Ordering::Acquire)
    }
}

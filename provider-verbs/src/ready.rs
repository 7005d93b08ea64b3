//! Completions that the application has not read yet, and the fds on which threads sleep for more.
//!
//! The queue's completion channel reports completions of the NIC. Other completions (of staged
//! transfers, and of requests that a closing endpoint cancels) make an event fd readable. Threads
//! sleep on an epoll fd, which is readable if the channel or the event fd is, or if the device has
//! an event or is lost.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::OnceLock,
    time::Duration,
};

use hmem_core::{Errno, Error, Result, transfer::Completion};
use parking_lot::{Mutex, MutexGuard};
use rustix::event::{
    EventfdFlags, PollFd, PollFlags, Timespec,
    epoll::{self, CreateFlags, EventData, EventFlags},
    eventfd, poll,
};

use super::cq::VerbsCq;

/// The completions of a queue that the application has not read yet, and the fds that wake threads.
#[derive(Debug, Default)]
pub(super) struct Ready {
    state: Mutex<ReadyState>,
    /// The epoll fd on which threads sleep, and the event fd that wakes them. The first call that
    /// needs one of the two creates both.
    alarm: OnceLock<Alarm>,
}

#[derive(Debug, Default)]
pub(super) struct ReadyState {
    pub(super) completions: VecDeque<Completion>,
    /// True once the domain that opened the queue is closed.
    pub(super) closed: bool,
}

#[derive(Debug)]
struct Alarm {
    /// The epoll fd on which threads sleep. It watches `event`, and the fds of the queue and its
    /// device ([`VerbsCq::watched`]).
    epoll: OwnedFd,
    /// The event fd that [`Ready::ring`] makes readable.
    event: OwnedFd,
}

impl Alarm {
    fn new(cq: &VerbsCq) -> rustix::io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let own = (event.as_fd(), EventFlags::IN);
        for (fd, wake) in [own].into_iter().chain(cq.watched()?) {
            epoll::add(&epoll, fd, EventData::new_u64(0), wake)?;
        }
        Ok(Self { epoll, event })
    }
}

impl Ready {
    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, ReadyState> {
        self.state.lock()
    }

    /// Stores the completion of a staged transfer or a canceled request, and wakes the sleeping
    /// threads.
    pub(super) fn push(&self, completion: Completion) {
        self.lock().completions.push_back(completion);
        self.ring();
    }

    /// Records that the domain of the queue is closed. Wakes the sleeping threads.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.ring();
    }

    /// Wakes the sleeping threads. The caller has already changed the state that they wait for. If
    /// no call has created the fds yet, no thread sleeps. A thread that creates the fds later sees
    /// the new state before it sleeps.
    pub(super) fn ring(&self) {
        if let Some(alarm) = self.alarm.get()
            && let Err(errno) = rustix::io::write(&alarm.event, &1u64.to_ne_bytes())
        {
            tracing::error!(%errno, "cannot wake a sleeping thread");
        }
    }

    fn alarm(&self, cq: &VerbsCq) -> Result<&Alarm> {
        if let Some(alarm) = self.alarm.get() {
            return Ok(alarm);
        }
        let made = Alarm::new(cq).map_err(|errno| {
            Error::os(Errno(errno.raw_os_error()), "wait for completions").provider("verbs")
        })?;
        Ok(self.alarm.get_or_init(|| made))
    }

    /// Returns the epoll fd. It is readable after an event of the NIC or a call of [`Self::ring`].
    pub(super) fn fd(&self, cq: &VerbsCq) -> Result<BorrowedFd<'_>> {
        Ok(self.alarm(cq)?.epoll.as_fd())
    }

    /// Cancels the effect of earlier calls of [`Self::ring`]. Only an event of the NIC keeps the
    /// epoll fd readable then.
    pub(super) fn hush(&self, cq: &VerbsCq) -> Result<()> {
        // If `ring` was not called, the read fails with EAGAIN, which is no error here.
        let _ = rustix::io::read(&self.alarm(cq)?.event, &mut [0; 8]);
        Ok(())
    }

    /// Sleeps until the epoll fd is readable, at most for `time`. `None` stands for no limit.
    pub(super) fn sleep(&self, cq: &VerbsCq, time: Option<Duration>) -> Result<()> {
        let epoll = self.fd(cq)?;
        // A time that the kernel cannot represent counts as no limit.
        let time = time.and_then(|time| Timespec::try_from(time).ok());
        match poll(&mut [PollFd::new(&epoll, PollFlags::IN)], time.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(Error::os(Errno(errno.raw_os_error()), "poll").provider("verbs")),
        }
    }
}

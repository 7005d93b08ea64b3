//! Completions that the application has not read yet, and the file descriptor on which threads
//! sleep for more.
//!
//! The queue's completion channel reports completions of the NIC. Other completions (of staged
//! transfers, and of requests that a closing endpoint cancels) make an event fd readable. An epoll
//! fd combines both.

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

/// Completions that the application has not read yet, and the fds that wake threads that wait for
/// completions.
#[derive(Debug, Default)]
pub(super) struct Ready {
    state: Mutex<ReadyState>,
    /// The fds on which threads sleep. They are created when a thread first sleeps or asks for the
    /// fd.
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
    epoll: OwnedFd,
    event: OwnedFd,
}

impl Alarm {
    fn new(channel: Option<BorrowedFd<'_>>) -> rustix::io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        for fd in [Some(event.as_fd()), channel].into_iter().flatten() {
            epoll::add(&epoll, fd, EventData::new_u64(0), EventFlags::IN)?;
        }
        Ok(Self { epoll, event })
    }
}

impl Ready {
    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, ReadyState> {
        self.state.lock()
    }

    /// Stores a completion that does not come from the NIC, and wakes the sleeping threads.
    pub(super) fn push(&self, completion: Completion) {
        self.lock().completions.push_back(completion);
        self.ring();
    }

    /// Records that the domain of the queue is closed. Wakes the sleeping threads.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.ring();
    }

    /// Wakes the sleeping threads after a change of the state. A thread that is creating the fds
    /// needs no wake-up: it reads the state afterwards and sees the change.
    pub(super) fn ring(&self) {
        if let Some(alarm) = self.alarm.get()
            && let Err(errno) = rustix::io::write(&alarm.event, &1u64.to_ne_bytes())
        {
            tracing::error!(%errno, "cannot wake a sleeping thread");
        }
    }

    fn alarm(&self, channel: Option<BorrowedFd<'_>>) -> Result<&Alarm> {
        if let Some(alarm) = self.alarm.get() {
            return Ok(alarm);
        }
        let made = Alarm::new(channel).map_err(|errno| {
            Error::os(Errno(errno.raw_os_error()), "wait for completions").provider("verbs")
        })?;
        Ok(self.alarm.get_or_init(|| made))
    }

    /// Returns the fd that is readable after a NIC event or a call of [`Self::ring`].
    pub(super) fn fd(&self, channel: Option<BorrowedFd<'_>>) -> Result<BorrowedFd<'_>> {
        Ok(self.alarm(channel)?.epoll.as_fd())
    }

    /// Makes the fd unreadable again after calls of [`Self::ring`]. Events of the NIC keep the fd
    /// readable.
    pub(super) fn hush(&self, channel: Option<BorrowedFd<'_>>) -> Result<()> {
        // If `ring` was not called, the read fails with EAGAIN, which is no error here.
        let _ = rustix::io::read(&self.alarm(channel)?.event, &mut [0; 8]);
        Ok(())
    }

    /// Sleeps until the fd is readable, at most for `time`. `None` stands for no limit.
    pub(super) fn sleep(
        &self,
        channel: Option<BorrowedFd<'_>>,
        time: Option<Duration>,
    ) -> Result<()> {
        let epoll = self.fd(channel)?;
        // A time that the kernel cannot represent counts as no limit.
        let time = time.and_then(|time| Timespec::try_from(time).ok());
        match poll(&mut [PollFd::new(&epoll, PollFlags::IN)], time.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(Error::os(Errno(errno.raw_os_error()), "poll").provider("verbs")),
        }
    }
}

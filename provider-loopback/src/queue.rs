//! Completion queues, and the threads that wait for completions.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::OnceLock,
    time::Instant,
};

use hmem_core::{Errno, Error, ErrorKind, Result, transfer::Completion};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{EventfdFlags, eventfd};

/// A completion queue: completions that the application has not read.
#[derive(Debug)]
pub(super) struct Queue {
    depth: usize,
    state: Mutex<State>,
    arrived: Condvar,
    /// The event fd, created at first use. Written only while armed, under the lock of `state`.
    event: OnceLock<OwnedFd>,
}

#[derive(Debug)]
struct State {
    entries: VecDeque<Completion>,
    /// Set once a completion was lost.
    overrun: bool,
    /// Set once the domain is closed. No request completes afterwards.
    closed: bool,
    /// The number of waiting threads.
    sleeping: usize,
    /// Set if the next completion makes the event fd readable.
    armed: bool,
}

impl Queue {
    pub(super) fn new(depth: usize) -> Self {
        let entries = VecDeque::with_capacity(depth.min(1024));
        let state = State { entries, overrun: false, closed: false, sleeping: 0, armed: false };
        let (arrived, event) = (Condvar::new(), OnceLock::new());
        Self { depth, state: Mutex::new(state), arrived, event }
    }

    /// Adds a completion. If the queue is full, the completion is lost and the queue is overrun.
    #[inline]
    pub(super) fn push(&self, completion: Completion) {
        let mut state = self.state.lock();
        let fits = state.entries.len() < self.depth;
        if fits {
            state.entries.push_back(completion);
        } else {
            state.overrun = true;
        }
        if state.sleeping > 0 || state.armed {
            self.wake(state);
        } else {
            drop(state);
        }
        if !fits {
            tracing::error!(depth = self.depth, "completion queue overrun: a completion is lost");
        }
    }

    /// Marks the queue as closed when its domain closes, and wakes the waiting threads.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        self.wake(state);
    }

    #[cold]
    fn wake(&self, mut state: MutexGuard<'_, State>) {
        if std::mem::take(&mut state.armed)
            && let Some(event) = self.event.get()
            && let Err(errno) = rustix::io::write(event, &1u64.to_ne_bytes())
        {
            tracing::error!(%errno, "cannot signal a completion channel");
        }
        drop(state);
        self.arrived.notify_all();
    }

    /// Moves at most `max` completions to `out` and returns their number.
    #[inline]
    pub(super) fn pop(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize> {
        self.state.lock().pop(out, max, self.depth)
    }

    /// Like [`Queue::pop`], but waits until `deadline` while there is no completion.
    ///
    /// `None` stands for no deadline.
    pub(super) fn wait(
        &self,
        out: &mut Vec<Completion>,
        max: usize,
        deadline: Option<Instant>,
    ) -> Result<usize> {
        let mut state = self.state.lock();
        loop {
            let count = state.pop(out, max, self.depth)?;
            if count > 0 || max == 0 {
                return Ok(count);
            }
            state.check_open()?;
            state.sleeping += 1;
            let late = match deadline {
                None => {
                    self.arrived.wait(&mut state);
                    false
                }
                Some(deadline) => self.arrived.wait_until(&mut state, deadline).timed_out(),
            };
            state.sleeping -= 1;
            if late {
                return state.pop(out, max, self.depth);
            }
        }
    }

    /// Returns the event fd. Creates it at the first call.
    pub(super) fn event(&self) -> Result<BorrowedFd<'_>> {
        if let Some(event) = self.event.get() {
            return Ok(event.as_fd());
        }
        let made = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| {
            Error::os(Errno(errno.raw_os_error()), "eventfd").provider("loopback")
        })?;
        Ok(self.event.get_or_init(|| made).as_fd())
    }

    /// Arms the event fd. Returns false if there are completions, so that the caller must not
    /// sleep.
    pub(super) fn arm(&self) -> Result<bool> {
        let event = self.event()?;
        let mut state = self.state.lock();
        // Resets the fd. The read fails if the fd was not readable, which is the usual case.
        let _was_unreadable = rustix::io::read(event, &mut [0; 8]).is_err();
        state.armed = false;
        if !state.entries.is_empty() {
            return Ok(false);
        }
        // Reports an overrun.
        state.pop(&mut Vec::new(), 0, self.depth)?;
        state.check_open()?;
        state.armed = true;
        Ok(true)
    }
}

impl State {
    #[inline]
    fn pop(&mut self, out: &mut Vec<Completion>, max: usize, depth: usize) -> Result<usize> {
        let count = max.min(self.entries.len());
        if count == 0 && self.overrun && self.entries.is_empty() {
            return Err(Error::new(ErrorKind::OutOfResources, "read completions")
                .provider("loopback")
                .context("depth", depth)
                .remedy(
                    "the queue was full and lost completions: open a deeper one, or read it more \
                     often",
                ));
        }
        out.extend(self.entries.drain(..count));
        Ok(count)
    }

    fn check_open(&self) -> Result<()> {
        if !self.closed {
            return Ok(());
        }
        Err(Error::new(ErrorKind::BadState, "wait for completions")
            .provider("loopback")
            .context("why", "the domain of the queue is closed")
            .remedy("drop the queue: no request completes to it any more"))
    }
}

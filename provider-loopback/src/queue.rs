//! Completion queues, and the threads that wait for completions.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use hmem_core::{Errno, Error, ErrorKind, Result, transfer::Completion};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{EventfdFlags, eventfd};

/// A completion queue. It contains the completions that the application has not read.
///
/// The post of a request reserves the entry of its completion, so that the queue never overruns.
#[derive(Debug)]
pub(super) struct Queue {
    depth: usize,
    /// The number of entries in use: unread completions, and reservations of requests in flight.
    used: AtomicUsize,
    state: Mutex<State>,
    arrived: Condvar,
    /// The event fd, created at first use. A thread that writes to the fd holds the lock of `state`
    /// and has seen [`State::armed`] true.
    event: OnceLock<OwnedFd>,
}

#[derive(Debug)]
struct State {
    entries: VecDeque<Completion>,
    /// The error of waits for the empty queue, set when the domain is closed or its device is lost.
    /// No request completes after that.
    ended: Option<Error>,
    /// The number of threads that wait for a completion.
    sleeping: usize,
    /// True if the next completion must make the event fd readable. [`Queue::arm`] sets the flag.
    /// The next completion, or the close of the domain, clears the flag.
    armed: bool,
}

impl Queue {
    pub(super) fn new(depth: usize) -> Self {
        let entries = VecDeque::with_capacity(depth.min(1024));
        let state = State { entries, ended: None, sleeping: 0, armed: false };
        let (arrived, event) = (Condvar::new(), OnceLock::new());
        Self { depth, used: AtomicUsize::new(0), state: Mutex::new(state), arrived, event }
    }

    /// Reserves an entry for the completion of a request that is about to be posted.
    ///
    /// # Errors
    /// Again: unread completions and requests in flight use every entry.
    #[inline]
    pub(super) fn reserve(&self) -> Result<()> {
        // Relaxed is enough: the counter guards no data, and the entries are under the lock.
        let next = |used| (used < self.depth).then_some(used + 1);
        match self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next) {
            Ok(_) => Ok(()),
            Err(_) => Err(self.full()),
        }
    }

    #[cold]
    fn full(&self) -> Error {
        Error::new(ErrorKind::Again, "post")
            .provider("loopback")
            .context("queue_depth", self.depth)
            .context(
                "why",
                "the completion queue is full of unread completions and requests in flight",
            )
            .remedy("read completions first, then post again, or open a deeper completion queue")
    }

    /// Frees the entries of completions that the application has read, or of a request that was not
    /// posted after all.
    #[inline]
    pub(super) fn release(&self, count: usize) {
        self.used.fetch_sub(count, Ordering::Relaxed);
    }

    /// Adds the completion of a request, in the entry that its post reserved.
    #[inline]
    pub(super) fn push(&self, completion: Completion) {
        let mut state = self.state.lock();
        debug_assert!(state.entries.len() < self.depth, "a completion without a reserved entry");
        state.entries.push_back(completion);
        if state.sleeping > 0 || state.armed {
            self.wake(state);
        }
    }

    /// Ends the queue because its domain closes or has lost its device. Wakes the waiting threads,
    /// and makes the event fd readable if [`Queue::arm`] was called for it.
    pub(super) fn end(&self, error: Error) {
        let mut state = self.state.lock();
        state.ended.get_or_insert(error);
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
    pub(super) fn pop(&self, out: &mut Vec<Completion>, max: usize) -> usize {
        let mut state = self.state.lock();
        self.pop_locked(&mut state, out, max)
    }

    #[inline]
    fn pop_locked(&self, state: &mut State, out: &mut Vec<Completion>, max: usize) -> usize {
        let count = max.min(state.entries.len());
        if count > 0 {
            out.extend(state.entries.drain(..count));
            self.release(count);
        }
        count
    }

    /// Like [`Queue::pop`], but waits until `deadline` while there is no completion. `None` stands
    /// for no deadline. Does not wait if `max` is 0.
    ///
    /// # Errors
    /// The error of [`Queue::end`], if the queue is empty and has ended.
    pub(super) fn wait(
        &self,
        out: &mut Vec<Completion>,
        max: usize,
        deadline: Option<Instant>,
    ) -> Result<usize> {
        let mut state = self.state.lock();
        loop {
            let count = self.pop_locked(&mut state, out, max);
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
                return Ok(self.pop_locked(&mut state, out, max));
            }
        }
    }

    /// Returns the event fd. The first call creates it.
    pub(super) fn event(&self) -> Result<BorrowedFd<'_>> {
        if let Some(event) = self.event.get() {
            return Ok(event.as_fd());
        }
        let made = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| {
            Error::os(Errno(errno.raw_os_error()), "eventfd").provider("loopback")
        })?;
        Ok(self.event.get_or_init(|| made).as_fd())
    }

    /// Makes the event fd unreadable until the next completion, which makes the fd readable.
    /// Returns false if the queue already has unread completions. The fd then announces nothing,
    /// and the caller must read the completions instead of sleeping.
    ///
    /// # Errors
    /// - The error of [`Queue::end`], if the queue is empty and has ended.
    /// - The errors of [`Queue::event`].
    pub(super) fn arm(&self) -> Result<bool> {
        let event = self.event()?;
        let mut state = self.state.lock();
        // Resets the fd. The read fails if the fd was not readable, which is the usual case.
        let _was_unreadable = rustix::io::read(event, &mut [0; 8]).is_err();
        state.armed = false;
        if !state.entries.is_empty() {
            return Ok(false);
        }
        state.check_open()?;
        state.armed = true;
        Ok(true)
    }
}

impl State {
    fn check_open(&self) -> Result<()> {
        self.ended.clone().map_or(Ok(()), Err)
    }
}

/// Returns the error of waits for a queue whose domain is closed.
pub(super) fn domain_closed() -> Error {
    Error::new(ErrorKind::BadState, "wait for completions")
        .provider("loopback")
        .context("why", "the domain of the queue is closed")
        .remedy("drop the queue: no request completes to it any more")
}

#[cfg(test)]
mod tests {
    use hmem_core::transfer::CompletionKind;

    use super::*;

    /// EVT-05: after its domain has closed, a queue reports its unread completions first, and then
    /// BadState.
    #[test]
    fn unread_completions_of_a_closed_domain_are_reported_before_its_close() {
        let queue = Queue::new(2);
        for context in 0..2 {
            queue.reserve().expect("an entry");
            queue.push(Completion::new(context, CompletionKind::Receive, Ok(8)));
        }
        queue.end(domain_closed());
        let mut done = Vec::new();
        assert!(!queue.arm().expect("two completions can be read"));
        assert_eq!(queue.wait(&mut done, 1, None).expect("a completion"), 1);
        assert!(!queue.arm().expect("one completion can be read"));
        assert_eq!(queue.pop(&mut done, 8), 1);
        assert_eq!([done[0].context, done[1].context], [0, 1]);
        assert_eq!(queue.arm().expect_err("closed").kind(), ErrorKind::BadState);
        let waited = queue.wait(&mut done, 1, None);
        assert_eq!(waited.expect_err("closed").kind(), ErrorKind::BadState);
    }
}

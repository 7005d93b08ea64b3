//! Completion queues.

use std::{collections::VecDeque, fmt, sync::Arc};

use hmem_core::{Error, ErrorKind, Result, provider::CompletionQueue, transfer::Completion};
use parking_lot::Mutex;

use super::{Call, domain::Domain};

/// Completions on their way to the application.
#[derive(Debug)]
pub(super) struct Queue {
    depth: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    entries: VecDeque<Completion>,
    overrun: bool,
}

impl Queue {
    pub(super) fn new(depth: usize) -> Self {
        let entries = VecDeque::with_capacity(depth.min(1024));
        Self { depth, state: Mutex::new(State { entries, overrun: false }) }
    }

    /// Adds a completion; one that finds no room is lost, and the queue is overrun.
    #[inline]
    pub(super) fn push(&self, completion: Completion) {
        let mut state = self.state.lock();
        if state.entries.len() < self.depth {
            state.entries.push_back(completion);
        } else {
            state.overrun = true;
            drop(state);
            tracing::error!(depth = self.depth, "a completion queue was overrun");
        }
    }

    #[inline]
    fn pop(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize> {
        let mut state = self.state.lock();
        let count = max.min(state.entries.len());
        if count == 0 && state.overrun {
            return Err(Error::new(ErrorKind::OutOfResources, "read completions")
                .provider("loopback")
                .context("depth", self.depth)
                .remedy(
                    "the queue was overrun and lost completions: open it deeper, or read it more often",
                ));
        }
        out.reserve(count);
        for _ in 0..count {
            out.extend(state.entries.pop_front());
        }
        Ok(count)
    }
}

/// The application's handle of a queue.
pub(super) struct Cq {
    pub(super) queue: Arc<Queue>,
    pub(super) domain: Arc<Domain>,
}

impl Cq {
    pub(super) fn new(depth: usize, domain: Arc<Domain>) -> Self {
        Self { queue: Arc::new(Queue::new(depth.max(1))), domain }
    }
}

impl CompletionQueue for Cq {
    fn read(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize> {
        let state = self.domain.state();
        state.nic.config.faults.enter(Call::ReadCq)?;
        if self.domain.by_hand() {
            state.step();
        }
        self.queue.pop(out, max)
    }
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cq").field("queue", &self.queue).finish_non_exhaustive()
    }
}

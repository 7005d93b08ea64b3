//! Completion queues. A queue has completions of several endpoints, each of which has a `fid_cq` of
//! its own.

use std::{
    collections::VecDeque,
    iter,
    sync::atomic::{AtomicUsize, Ordering},
};

use hmem_core::{Error, ErrorKind, Result, transfer::Completion};
use parking_lot::Mutex;

/// The completions that the application has not read.
///
/// The post of a request reserves the entry of its completion, so that the queue never overruns.
#[derive(Debug)]
pub(super) struct Queue {
    depth: usize,
    /// The number of entries in use: unread completions, and reservations of requests in flight.
    used: AtomicUsize,
    ready: Mutex<VecDeque<Completion>>,
}

impl Queue {
    pub(super) fn new(depth: usize) -> Self {
        Self { depth, used: AtomicUsize::new(0), ready: Mutex::default() }
    }

    /// Reserves an entry for the completion of a request that is about to be posted.
    ///
    /// # Errors
    /// Again: unread completions and requests in flight use every entry.
    pub(super) fn reserve(&self) -> Result<()> {
        // Relaxed is enough: the counter guards no data, and the entries are under the lock.
        let next = |used| (used < self.depth).then_some(used + 1);
        match self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next) {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::new(ErrorKind::Again, "post")
                .provider("libfabric")
                .context("queue_depth", self.depth)
                .remedy("read completions, then post again, or open a deeper completion queue")),
        }
    }

    /// Adds the completion of a request, in the entry that its post reserved.
    pub(super) fn push(&self, completion: Completion) {
        self.ready.lock().push_back(completion);
    }

    /// Moves at most `max` completions to `out` and returns their number.
    pub(super) fn pop(&self, out: &mut Vec<Completion>, max: usize) -> usize {
        let mut ready = self.ready.lock();
        let count = max.min(ready.len());
        // Cheaper than `drain` for the one or two completions of most reads.
        for completion in iter::from_fn(|| ready.pop_front()).take(count) {
            out.push(completion);
        }
        self.used.fetch_sub(count, Ordering::Relaxed);
        count
    }
}

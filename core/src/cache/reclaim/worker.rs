//! The worker: the cache's thread, which reclaims invalidated entries.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::super::{backend::CacheBackend, cache_core::CacheCore};
use crate::{Error, ErrorKind, Result};

/// The time between two polls. After the worker was woken, it polls for more work before it sleeps
/// again. So a thread that unmaps repeatedly need not wake it each time, and the entries that the
/// thread invalidates share one heavy barrier.
const POLL_PERIOD: Duration = Duration::from_millis(1);
/// The number of polls without work after which the worker sleeps.
const IDLE_POLLS: u32 = 16;
/// The time between two attempts to deregister regions that something outside the cache still uses,
/// such as a sub-region or a window.
const BUSY_RETRY_PERIOD: Duration = Duration::from_millis(50);

/// The handle of a cache's worker. Dropping the handle ends the worker.
pub(in crate::cache) struct Worker {
    /// Set by the drop, to end the worker.
    stop: Arc<AtomicBool>,
    /// The worker's thread. `None` only during the drop.
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub(in crate::cache) fn start<S: CacheBackend>(core: &Arc<CacheCore<S>>) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let worker = (Arc::clone(core), Arc::clone(&stop));
        let thread = thread::Builder::new()
            .name("hmem-cache".to_owned())
            .spawn(move || run(&worker.0, &worker.1))
            .map_err(|error| {
                Error::new(ErrorKind::OutOfResources, "registration cache")
                    .context("thread", "hmem-cache")
                    .caused_by(error)
            })?;
        let known = core.waker.worker.set(thread.thread().clone());
        debug_assert!(known.is_ok(), "a cache has one worker");
        Ok(Self { stop, thread: Some(thread) })
    }
}

fn run<S: CacheBackend>(core: &CacheCore<S>, stop: &AtomicBool) {
    let waker = &core.waker;
    let mut idle_polls = IDLE_POLLS;
    // The time of the next attempt to deregister busy regions. `None` unless the worker knows that
    // there are such regions.
    let mut retry: Option<Instant> = None;
    while !stop.load(Ordering::Acquire) {
        let called = waker.called.swap(false, Ordering::SeqCst);
        if called {
            idle_polls = 0;
        }
        if called || retry.is_some_and(|due| Instant::now() >= due) {
            // The cache's state stays consistent if the backend panics: `DeregistrationGuard` keeps
            // the remaining regions for a retry.
            if catch_unwind(AssertUnwindSafe(|| core.reclaim_once())).is_err() {
                tracing::error!(
                    "the backend of a registration cache panicked while it deregistered: its \
                     region may stay registered, and the worker retries the others"
                );
                // The worker retries at once. Each panic loses one region, so the retries end.
                waker.called.store(true, Ordering::SeqCst);
            }
            retry = None;
        }
        if idle_polls < IDLE_POLLS {
            idle_polls += 1;
            thread::park_timeout(POLL_PERIOD);
            continue;
        }
        waker.asleep.store(true, Ordering::SeqCst);
        if !waker.called.load(Ordering::SeqCst) {
            if core.state.lock().reclaim.busy {
                let now = Instant::now();
                let due = *retry.get_or_insert(now + BUSY_RETRY_PERIOD);
                thread::park_timeout(due.saturating_duration_since(now));
            } else {
                thread::park();
            }
        }
        waker.asleep.store(false, Ordering::SeqCst);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let Some(thread) = self.thread.take() else { return };
        thread.thread().unpark();
        // If a callback drops the cache, this runs on the worker, which cannot join itself.
        if thread.thread().id() != thread::current().id() && thread.join().is_err() {
            tracing::error!("the thread of a registration cache panicked");
        }
    }
}

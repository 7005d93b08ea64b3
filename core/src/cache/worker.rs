//! The thread that deregisters what died.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use super::{Source, shared::Shared};
use crate::{Error, ErrorKind, Result};

/// As long as it was called lately, the worker looks again after this time instead of being woken:
/// whoever changes memory again and again wakes nobody, and what died meanwhile shares one barrier.
const AGAIN: Duration = Duration::from_millis(1);
/// So often it looks for nothing before it sleeps.
const LOOKS: u32 = 16;

pub(super) struct Worker {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub(super) fn start<S: Source>(shared: &Arc<Shared<S>>) -> Result<Self> {
        let ends = Arc::new(AtomicBool::new(false));
        let worker = (Arc::clone(shared), Arc::clone(&ends));
        let thread = thread::Builder::new()
            .name("hmem-cache".to_owned())
            .spawn(move || run(&worker.0, &worker.1))
            .map_err(|error| {
                Error::new(ErrorKind::OutOfResources, "registration cache")
                    .context("thread", "hmem-cache")
                    .caused_by(error)
            })?;
        let known = shared.waker.worker.set(thread.thread().clone());
        debug_assert!(known.is_ok(), "a cache has one worker");
        Ok(Self { ends, thread: Some(thread) })
    }
}

fn run<S: Source>(shared: &Shared<S>, ends: &AtomicBool) {
    let waker = &shared.waker;
    let mut looks = LOOKS;
    while !ends.load(Ordering::Acquire) {
        if waker.called.swap(false, Ordering::SeqCst) {
            looks = 0;
            // The cache's state is whole after a panic of the source: `EndsFlights` puts its region
            // and those behind it on the list of those to try again.
            if catch_unwind(AssertUnwindSafe(|| shared.collect_once())).is_err() {
                tracing::error!(
                    "a source of a registration cache panicked as it deregistered: its region may \
                     stay registered, and the others are tried again"
                );
                // Each region is lost to at most one panic, so that this loop ends.
                waker.called.store(true, Ordering::SeqCst);
            }
        }
        if looks < LOOKS {
            looks += 1;
            thread::park_timeout(AGAIN);
            continue;
        }
        waker.asleep.store(true, Ordering::SeqCst);
        if !waker.called.load(Ordering::SeqCst) {
            thread::park();
        }
        waker.asleep.store(false, Ordering::SeqCst);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Release);
        let Some(thread) = self.thread.take() else { return };
        thread.thread().unpark();
        // Whoever is told of a deregistration on this very thread may drop the cache there.
        if thread.thread().id() != thread::current().id() && thread.join().is_err() {
            tracing::error!("the thread of a registration cache panicked");
        }
    }
}

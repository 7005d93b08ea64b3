//! Executing what was posted: by whoever asks, or by a thread of the domain.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle, Thread},
};

use hmem_core::{Errno, Error, Result};

use super::domain::DomainState;

/// Wakes a domain's progress thread; does nothing where there is none.
#[derive(Debug, Default)]
pub(super) struct Wake {
    thread: OnceLock<Thread>,
    pending: AtomicBool,
    stop: AtomicBool,
}

impl Wake {
    /// Says that there may be something to execute.
    #[inline]
    pub(super) fn wake(&self) {
        if let Some(thread) = self.thread.get()
            && !self.pending.swap(true, Ordering::AcqRel)
        {
            thread.unpark();
        }
    }
}

/// A domain's progress thread.
#[derive(Debug)]
pub(super) struct ProgressThread {
    handle: Option<JoinHandle<()>>,
    domain: Arc<DomainState>,
}

impl ProgressThread {
    pub(super) fn start(domain: &Arc<DomainState>) -> Result<Self> {
        let state = Arc::clone(domain);
        let handle = thread::Builder::new()
            .name(format!("hmem-{}", domain.nic.attr.nic.name))
            .spawn(move || run(&state))
            .map_err(|error| {
                Error::os(Errno::of(&error), "spawn progress thread").provider("loopback")
            })?;
        domain.wake.thread.get_or_init(|| handle.thread().clone());
        domain.wake.wake();
        Ok(Self { handle: Some(handle), domain: Arc::clone(domain) })
    }
}

impl Drop for ProgressThread {
    fn drop(&mut self) {
        self.domain.wake.stop.store(true, Ordering::Release);
        let Some(handle) = self.handle.take() else { return };
        handle.thread().unpark();
        // The domain may be dropped by the thread itself, from within a copy engine that it called;
        // it then cleans up when it comes back from there.
        if handle.thread().id() != thread::current().id() && handle.join().is_err() {
            tracing::error!("the progress thread of a loopback domain panicked");
        }
    }
}

fn run(domain: &DomainState) {
    let wake = &domain.wake;
    while !wake.stop.load(Ordering::Acquire) {
        wake.pending.swap(false, Ordering::AcqRel);
        if domain.step() == 0
            && !wake.pending.load(Ordering::Acquire)
            && !wake.stop.load(Ordering::Acquire)
        {
            thread::park();
        }
    }
    domain.close();
}

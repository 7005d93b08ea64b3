//! A domain's progress thread, and how it is woken.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle, Thread},
};

use hmem_core::{Errno, Error, Result};

/// Wakes a domain's progress thread. Does nothing if the domain has none.
#[derive(Debug, Default)]
pub(super) struct Wake {
    thread: OnceLock<Thread>,
    pending: AtomicBool,
    stop: AtomicBool,
}

impl Wake {
    /// Tells the thread that there may be something to execute.
    pub(super) fn wake(&self) {
        if let Some(thread) = self.thread.get()
            && !self.pending.swap(true, Ordering::AcqRel)
        {
            thread.unpark();
        }
    }
}

/// A domain's progress thread. Dropping it stops the thread.
#[derive(Debug)]
pub(super) struct ProgressThread {
    handle: Option<JoinHandle<()>>,
    wake: Arc<Wake>,
}

impl ProgressThread {
    /// Starts a thread that calls `step`, which returns how many requests ended, until nothing is
    /// left to do, and again after each wake. Before the thread ends it calls `close`.
    pub(super) fn start(
        name: String,
        wake: &Arc<Wake>,
        step: impl Fn() -> usize + Send + 'static,
        close: impl FnOnce() + Send + 'static,
    ) -> Result<Self> {
        let own = Arc::clone(wake);
        let run = move || {
            while !own.stop.load(Ordering::Acquire) {
                own.pending.swap(false, Ordering::AcqRel);
                if step() == 0
                    && !own.pending.load(Ordering::Acquire)
                    && !own.stop.load(Ordering::Acquire)
                {
                    thread::park();
                }
            }
            close();
        };
        let handle = thread::Builder::new().name(name).spawn(run).map_err(|error| {
            Error::os(Errno::of(&error), "spawn progress thread").provider("loopback")
        })?;
        wake.thread.get_or_init(|| handle.thread().clone());
        wake.wake();
        Ok(Self { handle: Some(handle), wake: Arc::clone(wake) })
    }
}

impl Drop for ProgressThread {
    fn drop(&mut self) {
        self.wake.stop.store(true, Ordering::Release);
        let Some(handle) = self.handle.take() else { return };
        handle.thread().unpark();
        // The domain may be dropped by the thread itself, from within a copy engine that it called;
        // the thread then closes the domain when it comes back from there.
        if handle.thread().id() != thread::current().id() && handle.join().is_err() {
            tracing::error!("the progress thread of a loopback domain panicked");
        }
    }
}

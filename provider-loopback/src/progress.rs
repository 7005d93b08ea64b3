//! The progress thread of a domain, and the signal that wakes it.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle, Thread},
};

use hmem_core::{Errno, Error, Result};

/// A handle that wakes a domain's progress thread. It does nothing if the domain has no such
/// thread.
#[derive(Debug, Default)]
pub(super) struct Wake {
    /// The progress thread; empty if the domain has none.
    thread: OnceLock<Thread>,
    /// True from a wake until the thread begins its next step. While it is true, further wakes need
    /// not wake the thread.
    pending: AtomicBool,
    /// True once the thread must end.
    stop: AtomicBool,
}

impl Wake {
    /// Wakes the progress thread. Callers use it when there may be a request to execute.
    pub(super) fn wake(&self) {
        if let Some(thread) = self.thread.get()
            && !self.pending.swap(true, Ordering::AcqRel)
        {
            thread.unpark();
        }
    }
}

/// The progress thread of a domain. Dropping the value stops the thread, and waits for its end
/// unless the drop happens on that thread.
#[derive(Debug)]
pub(super) struct ProgressThread {
    handle: Option<JoinHandle<()>>,
    wake: Arc<Wake>,
}

impl ProgressThread {
    /// Starts a thread that calls `step` in a loop. `step` returns the number of requests that
    /// ended. If that is 0, the thread sleeps until the next wake. The thread calls `close` before
    /// it stops.
    ///
    /// # Errors
    /// The error of the operating system, if it cannot start a thread.
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
        // A copy engine that the progress thread called may drop the domain on that thread. The
        // progress thread then closes the domain after the copy engine returns.
        if handle.thread().id() != thread::current().id() && handle.join().is_err() {
            tracing::error!("the progress thread of a loopback domain panicked");
        }
    }
}

//! The endpoints of this process over shared memory.

#![allow(unsafe_code, reason = "frees slots that libfabric has used")]

use std::{mem, sync::Arc};

use hmem_core::{ProcessMark, Result, random::random_u64};
use hmem_p2p::staging::Transfer;
use parking_lot::Mutex;
use rustc_hash::FxHashSet;

use super::{objects::Objects, open::OpenDomain, part::Slot};

/// The open endpoints of this process over shared memory, and the closed ones whose objects are
/// still open.
///
/// Endpoints of the provider `shm` in one process use each other's memory directly. Progress of one
/// endpoint crashes after another one was closed. So the objects of such endpoints are closed
/// together, when the last endpoint closes.
pub(super) struct Fellows {
    /// A random number in the names of this process's endpoints. Names with equal numbers come from
    /// one process.
    pub(super) family: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The numbers of the open endpoints.
    open: FxHashSet<u64>,
    closed: Vec<Closed>,
}

/// The objects of a closed endpoint, with the memory that they use, and their domain.
pub(super) struct Closed {
    pub(super) objects: Objects,
    pub(super) slots: Vec<*mut Slot>,
    /// Transfers with staging buffers that peers may still access.
    pub(super) transfers: Vec<Transfer>,
    pub(super) open: Arc<OpenDomain>,
}

// SAFETY: the slots belong to no thread, and are only freed.
unsafe impl Send for Closed {}

impl Fellows {
    /// Returns the endpoints of this process, in a value that all domains share.
    pub(super) fn of_process(process: ProcessMark) -> Result<Arc<Self>> {
        // libfabric has one list of these endpoints in a process.
        static FELLOWS: Mutex<Option<(ProcessMark, Arc<Fellows>)>> = Mutex::new(None);
        let mut shared = FELLOWS.lock();
        if let Some((of, fellows)) = &*shared
            && *of == process
        {
            return Ok(Arc::clone(fellows));
        }
        let fellows = Arc::new(Self { family: random_u64("libfabric")?, state: Mutex::default() });
        // A forked child leaves the value of its parent alone.
        mem::forget(shared.replace((process, Arc::clone(&fellows))));
        Ok(fellows)
    }

    pub(super) fn add(&self, number: u64) {
        self.state.lock().open.insert(number);
    }

    pub(super) fn is_open(&self, number: u64) -> bool {
        self.state.lock().open.contains(&number)
    }

    /// Removes a closed endpoint, and keeps its objects. Closes all kept objects if no endpoint is
    /// open any more.
    pub(super) fn bury(&self, number: u64, closed: Closed) {
        let closed = {
            let mut state = self.state.lock();
            state.open.remove(&number);
            state.closed.push(closed);
            if !state.open.is_empty() {
                return;
            }
            mem::take(&mut state.closed)
        };
        for Closed { mut objects, slots, transfers, open } in closed {
            if let Err(error) = objects.close(&open) {
                tracing::error!(error = %error.full(), "an endpoint stays open");
                mem::forget(transfers);
                continue;
            }
            for slot in slots {
                // SAFETY: `Box::into_raw` returned the pointer, its table gave it away, and
                // libfabric closed the endpoint that used it.
                drop(unsafe { Box::from_raw(slot) });
            }
        }
    }
}

//! What is alive on a simulated device, so that a test can say that nothing is left.

use std::sync::atomic::Ordering;

use super::{Call, Inner};

/// A moment's counts; see [`Simulated::stats`](crate::Simulated::stats).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SimulatedStats {
    /// Allocations that were not freed.
    pub live_allocations: u64,
    /// Their bytes, as they were asked for.
    pub live_bytes: u64,
    /// Allocations of other processes that are open here.
    pub opened_allocations: u64,
    /// Exported fds that live on. Exact while fds end through `release_dma_buf`; of fds that were
    /// just closed it is only seen that all of them are gone, and of genuine dma-bufs not even
    /// that.
    pub live_exports: u64,
    /// Subscriptions of the monitor.
    pub subscriptions: u64,
    /// Host ranges registered.
    pub host_registrations: u64,
    /// Memory files that hold content.
    pub memory_files: u64,
    /// Copies that ended well, blocking and asynchronous.
    pub copies_done: u64,
    /// Asynchronous copies that have not begun.
    pub copies_pending: u64,
    /// Calls into the driver by kind, in the order of [`Call::ALL`].
    calls: Vec<u64>,
}

impl SimulatedStats {
    pub(super) fn of(inner: &Inner) -> Self {
        let mut book = inner.book.lock();
        if inner.udmabuf.is_none() && book.exports > 0 && !book.arenas.any_open_elsewhere() {
            book.exports = 0;
        }
        Self {
            live_allocations: book.live,
            live_bytes: book.live_bytes,
            opened_allocations: book.opened,
            live_exports: book.exports,
            subscriptions: inner.subscriptions.count() as u64,
            host_registrations: book.host_registered.len() as u64,
            memory_files: book.arenas.count() as u64,
            copies_done: inner.copies.load(Ordering::Acquire),
            copies_pending: inner.engine.pending() as u64,
            calls: Call::ALL.iter().map(|call| inner.faults.count(*call)).collect(),
        }
    }

    /// How often a call was made, failed ones included.
    #[must_use]
    pub fn calls(&self, call: Call) -> u64 {
        self.calls.get(call as usize).copied().unwrap_or(0)
    }
}

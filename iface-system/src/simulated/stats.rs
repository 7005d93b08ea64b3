//! Counts of the live objects, copies and driver calls of a simulated device. A test can verify
//! that no object is left.

use std::sync::atomic::Ordering;

use super::{DeviceCall, SimulatedInner};

/// Counts of a simulated device at one moment, as [`Simulated::stats`](crate::Simulated::stats)
/// returns them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SimulatedStats {
    /// Number of allocations that are not freed.
    pub live_allocations: u64,
    /// Total length of the live allocations in bytes, as requested.
    pub live_bytes: u64,
    /// Number of allocations of other processes that this iface has open.
    pub opened_allocations: u64,
    /// Number of dma-buf exports that are not released. The number is exact if every export is
    /// released by `release_dma_buf`.
    ///
    /// Users may only close the fds instead. If the exports are memory files, the number then drops
    /// to 0 once all of them are closed. If the exports are genuine dma-bufs, the number does not
    /// drop.
    pub live_exports: u64,
    /// Number of current subscriptions to frees.
    pub subscriptions: u64,
    /// Number of host ranges that are page-locked.
    pub host_registrations: u64,
    /// Number of memory files that hold the content of allocations.
    pub memory_files: u64,
    /// Number of copies that have succeeded, both blocking and asynchronous.
    pub copies_done: u64,
    /// Number of asynchronous copies that have not begun.
    pub copies_pending: u64,
    /// Number of driver calls of each kind, in the order of [`DeviceCall::ALL`].
    calls: Vec<u64>,
}

impl SimulatedStats {
    pub(super) fn of(inner: &SimulatedInner) -> Self {
        let mut state = inner.state.lock();
        if inner.udmabuf.is_none() && state.exports > 0 && !state.arenas.any_open_elsewhere() {
            state.exports = 0;
        }
        Self {
            live_allocations: state.live,
            live_bytes: state.live_bytes,
            opened_allocations: state.opened,
            live_exports: state.exports,
            subscriptions: inner.subscriptions.count() as u64,
            host_registrations: state.host_registered.len() as u64,
            memory_files: state.arenas.count() as u64,
            copies_done: inner.copies.load(Ordering::Acquire),
            copies_pending: inner.engine.pending() as u64,
            calls: DeviceCall::ALL.iter().map(|call| inner.faults.calls(*call)).collect(),
        }
    }

    /// Returns the number of driver calls of kind `call`, as
    /// [`Faults::calls`](crate::Faults::calls) does.
    #[must_use]
    pub fn calls(&self, call: DeviceCall) -> u64 {
        self.calls.get(call as usize).copied().unwrap_or(0)
    }
}

//! The buffers that the regions of a cache keep allocated.

use std::{
    any::Any,
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;

use super::region_state::KeepAlive;
use crate::{AddressRange, IfaceKind};

/// The memory of a buffer, whatever its type.
type Memory = Arc<dyn Any + Send + Sync>;

struct Held {
    range: AddressRange,
    iface: IfaceKind,
    memory: Memory,
}

/// Buffers that a cache registers by parts.
///
/// Every region of the cache keeps the buffers alive of which it has a byte, whoever registered it.
/// Merging joins the memory of several buffers in one region.
#[derive(Default)]
pub(super) struct HeldBuffers {
    next: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By the first address and a number.
    buffers: BTreeMap<(u64, u64), Held>,
    /// The length of the longest buffer so far, which bounds a search.
    longest: u64,
}

impl HeldBuffers {
    /// Adds a buffer. Returns its place.
    pub(super) fn add(&self, range: AddressRange, iface: IfaceKind, memory: Memory) -> (u64, u64) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let place = (range.start().0, number);
        self.put(place, range, iface, memory);
        place
    }

    /// Adds a buffer at a place that it had before.
    pub(super) fn put(
        &self,
        place: (u64, u64),
        range: AddressRange,
        iface: IfaceKind,
        memory: Memory,
    ) {
        let mut state = self.state.lock();
        state.longest = state.longest.max(range.len());
        state.buffers.insert(place, Held { range, iface, memory });
    }

    /// Removes a buffer that no region of the cache has a byte of.
    pub(super) fn remove(&self, place: (u64, u64)) {
        let removed = self.state.lock().buffers.remove(&place);
        // May free the memory, so not under the lock.
        drop(removed);
    }

    /// Returns what keeps the memory of a new region allocated.
    pub(super) fn keep(&self, range: AddressRange) -> KeepAlive {
        let state = self.state.lock();
        let Some(last) = range.len().checked_sub(1) else { return KeepAlive::Caller };
        let last = range.start().0 + last;
        let below = state.buffers.range(..=(last, u64::MAX)).rev();
        let near = below
            .take_while(|((start, _), _)| range.start().0.saturating_sub(*start) < state.longest);
        let found: Vec<&Held> =
            near.map(|(_, held)| held).filter(|held| held.range.overlaps(range)).collect();
        match found.iter().find(|held| held.range.contains_range(range)) {
            Some(Held { iface, memory, .. }) => {
                KeepAlive::Region { iface: Some(*iface), memory: Arc::clone(memory) }
            }
            None if found.is_empty() => KeepAlive::Caller,
            None => {
                let all: Vec<Memory> = found.iter().map(|held| Arc::clone(&held.memory)).collect();
                KeepAlive::Region { iface: None, memory: Arc::new(all) }
            }
        }
    }
}

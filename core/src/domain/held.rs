//! The list of buffers that the regions of a cache keep allocated.

use std::{
    any::Any,
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;

use super::region_state::KeepAlive;
use crate::{AddressRange, IfaceKind};

/// A reference that keeps the memory of a buffer of any type allocated.
type AnyMemory = Arc<dyn Any + Send + Sync>;

/// The first address of a buffer, and a number that no other buffer of the cache has.
pub(super) type BufferId = (u64, u64);

/// A buffer that a [`CachedBuffer`](super::CachedBuffer) owns.
struct HeldBuffer {
    range: AddressRange,
    /// The iface of the memory. `None` if the buffer only names memory by addresses.
    iface: Option<IfaceKind>,
    memory: AnyMemory,
}

/// The list of buffers that the [`CachedBuffer`](super::CachedBuffer)s of a cache own.
///
/// A new region of the cache keeps every listed buffer allocated that it overlaps. One region may
/// overlap several buffers, because the cache merges registrations of adjacent memory.
#[derive(Default)]
pub(super) struct HeldBuffers {
    /// The number for the [`BufferId`] of the next buffer.
    next_number: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    buffers: BTreeMap<BufferId, HeldBuffer>,
    /// The length and the identifier of each buffer, so that the longest buffer is found at once.
    lengths: BTreeSet<(u64, BufferId)>,
}

impl State {
    /// Returns the buffers that may overlap the addresses from `start` to `last`, in descending
    /// order of their first address. The search ends at the first buffer that begins too far below
    /// `start`: even the longest buffer would not reach `start` from there.
    fn near(&self, start: u64, last: u64) -> impl Iterator<Item = &HeldBuffer> {
        let longest = self.lengths.last().map_or(0, |(len, _)| *len);
        let below = self.buffers.range(..=(last, u64::MAX)).rev();
        below
            .take_while(move |((first, _), _)| start.saturating_sub(*first) < longest)
            .map(|(_, buffer)| buffer)
    }
}

impl HeldBuffers {
    /// Adds a buffer to the list, and returns its identifier.
    pub(super) fn add(
        &self,
        range: AddressRange,
        iface: Option<IfaceKind>,
        memory: AnyMemory,
    ) -> BufferId {
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let id = (range.start().0, number);
        self.add_with_id(id, range, iface, memory);
        id
    }

    /// Adds a buffer to the list again, under the identifier that it had before
    /// [`HeldBuffers::remove`].
    pub(super) fn add_with_id(
        &self,
        id: BufferId,
        range: AddressRange,
        iface: Option<IfaceKind>,
        memory: AnyMemory,
    ) {
        let mut state = self.state.lock();
        state.lengths.insert((range.len(), id));
        state.buffers.insert(id, HeldBuffer { range, iface, memory });
    }

    /// Removes a buffer from the list. The caller ensures that no region of the cache has a byte of
    /// the buffer.
    pub(super) fn remove(&self, id: BufferId) {
        let mut state = self.state.lock();
        let removed = state.buffers.remove(&id);
        if let Some(buffer) = &removed {
            state.lengths.remove(&(buffer.range.len(), id));
        }
        drop(state);
        // This may free the memory, so the lock is released first.
        drop(removed);
    }

    /// Returns the guarantee for a new region of `range`: references to all listed buffers that
    /// overlap `range`, or [`KeepAlive::Caller`] if there are none.
    pub(super) fn keep(&self, range: AddressRange) -> KeepAlive {
        let state = self.state.lock();
        let Some(last) = range.len().checked_sub(1) else { return KeepAlive::Caller };
        let start = range.start().0;
        let overlapping: Vec<&HeldBuffer> =
            state.near(start, start + last).filter(|buffer| buffer.range.overlaps(range)).collect();
        match overlapping.iter().find(|buffer| buffer.range.contains_range(range)) {
            Some(HeldBuffer { iface, memory, .. }) => {
                KeepAlive::Region { iface: *iface, memory: Arc::clone(memory) }
            }
            None if overlapping.is_empty() => KeepAlive::Caller,
            None => {
                let all: Vec<AnyMemory> =
                    overlapping.iter().map(|buffer| Arc::clone(&buffer.memory)).collect();
                KeepAlive::Region { iface: None, memory: Arc::new(all) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Address;

    const PAGE: u64 = 4096;

    fn add(held: &HeldBuffers, page: u64, pages: u64) -> BufferId {
        let range = AddressRange::new(Address(page * PAGE), pages * PAGE).expect("no wrap");
        held.add(range, Some(IfaceKind::SYSTEM), Arc::new(()))
    }

    /// Returns the number of buffers that a search for one page visits.
    fn visits(held: &HeldBuffers, page: u64) -> usize {
        held.state.lock().near(page * PAGE, page * PAGE + PAGE - 1).count()
    }

    #[test]
    fn search_visits_fewer_buffers_after_the_longest_is_removed() {
        let held = HeldBuffers::default();
        for page in 0..64 {
            add(&held, page, 1);
        }
        assert_eq!(visits(&held, 63), 1);
        let longest = [add(&held, 100, 1000), add(&held, 100, 1000)];
        assert_eq!(visits(&held, 63), 64);
        held.remove(longest[0]);
        assert_eq!(visits(&held, 63), 64, "a buffer of the same length is still listed");
        held.remove(longest[1]);
        assert_eq!(visits(&held, 63), 1);
    }
}

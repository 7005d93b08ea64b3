//! Table of the requests in flight: posted and not completed.

use std::{ops::Range, sync::Arc};

use hmem_core::{Result, transfer::CompletionKind};
use parking_lot::Mutex;

use super::window::WindowRequest;

/// Identifier of a request that a lane (a queue of staged transfers) posted to the NIC. Such a
/// request is a chunk of a staged request in the lane, or a whole request of the application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Token {
    /// Number that the application's request has in the lane.
    pub(super) entry: u64,
    /// Number of the chunk within the application's request.
    pub(super) chunk: u64,
}

/// Data about a received message, for the completion of its receive.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Arrival {
    /// The immediate data.
    pub(super) data: Option<u64>,
    /// The key that the message has invalidated.
    pub(super) invalidated: Option<u64>,
    /// Number of bytes that a peer's write with immediate data has written, if such a write
    /// consumed the receive. The bytes are in the region that the write named.
    pub(super) written: Option<u64>,
}

/// The result of a request that a thread waits for; `None` until the request ends.
pub(super) type Awaited = Arc<Mutex<Option<Result<u64>>>>;

/// Origin of a request. The result of the request goes to its origin.
#[derive(Clone, Debug)]
pub(super) enum RequestOwner {
    /// The application. It reads the result from a completion queue.
    Application,
    /// A lane (a queue of staged transfers). It gets the result in [`LaneUpdates::ended`], with
    /// this token.
    Lane(Token),
    /// A call of this crate that waits until the request has ended. The result is stored in this
    /// value.
    Call(Awaited),
}

/// A request that was posted and has not completed.
pub(super) struct InFlight {
    pub(super) context: u64,
    pub(super) kind: CompletionKind,
    /// True if the request consumes a receive of the peer. Such a request completes only after the
    /// peer has posted a receive.
    pub(super) takes_receive: bool,
    /// Number of bytes in the completion if the request succeeds. A receive has 0 here: its work
    /// completion has the length of the message.
    pub(super) bytes: u64,
    /// Number of work requests that the request consists of.
    pub(super) requests: u32,
    /// The window that the request binds or invalidates; `None` for other requests.
    pub(super) window: Option<WindowRequest>,
    pub(super) owner: RequestOwner,
}

/// A slot of the request table.
///
/// A work request's `wr_id`, which the NIC returns in the completion, holds the index of a slot and
/// the generation of the request: a number that each request of an endpoint takes from a counter. A
/// completion matches the request in the slot only if the generations are equal.
///
/// The first generation of a new endpoint follows those of all endpoints of the device that were
/// closed before. So late completions match no request, even if the NIC gives the new queue pair
/// the number of a destroyed queue pair.
#[derive(Default)]
struct Slot {
    /// Generation of the slot's last request.
    generation: u32,
    state: SlotState,
}

#[derive(Default)]
enum SlotState {
    #[default]
    Free,
    /// The request has not ended.
    InFlight(InFlight),
    /// The request has ended in error, but the completion of its last work request has not been
    /// read. The value holds the kind of the request and the number of its work requests.
    Failed(CompletionKind, u32),
}

/// The bit of a `wr_id` that marks the last work request of a request.
const LAST: u64 = 1 << 31;

fn wr_id(generation: u32, index: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(index)
}

/// Returns the `wr_id` of a request's last work request.
pub(super) const fn last(wr_id: u64) -> u64 {
    wr_id | LAST
}

/// Numbers of work requests for the send queue and for the receive queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct WorkRequests {
    pub(super) sends: u32,
    pub(super) receives: u32,
}

impl WorkRequests {
    fn of(kind: CompletionKind, requests: u32) -> Self {
        let mut count = Self::default();
        *count.get_mut(kind) = requests;
        count
    }

    #[inline]
    fn get_mut(&mut self, kind: CompletionKind) -> &mut u32 {
        if kind == CompletionKind::Receive { &mut self.receives } else { &mut self.sends }
    }

    fn add(&mut self, more: Self) {
        self.sends += more.sends;
        self.receives += more.receives;
    }
}

/// The effect of a work completion.
#[derive(Default)]
pub(super) struct Effect {
    /// The request that the completion ends, if it ends one.
    pub(super) ended: Option<InFlight>,
    /// The work requests for which no further completion can arrive. The caller releases the
    /// completion queue entries that were reserved for them.
    pub(super) settled: WorkRequests,
}

/// The requests in flight of one queue pair, by `wr_id`.
pub(super) struct RequestTable {
    slots: Vec<Slot>,
    /// Indexes of the free slots.
    free: Vec<u32>,
    /// The generations (see [`Slot`]) that requests of this table have had. The next request gets
    /// `generations.end`.
    generations: Range<u32>,
    /// Numbers of used entries of the send queue and of the receive queue.
    in_use: WorkRequests,
    /// The work requests that [`Self::drop_all`] dropped since the last [`Self::take_stale`].
    stale: WorkRequests,
    /// Number of requests in flight that consume a receive of the peer.
    messages: u32,
}

impl RequestTable {
    /// Creates an empty table. Its first request gets the generation `generation`, and each later
    /// request gets the next one.
    pub(super) fn new(generation: u32) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            generations: generation..generation,
            in_use: WorkRequests::default(),
            stale: WorkRequests::default(),
            messages: 0,
        }
    }

    /// Adds a request. Returns the `wr_id` for all of its work requests except the last, which gets
    /// [`last`] of this `wr_id`.
    #[inline]
    pub(super) fn admit(&mut self, entry: InFlight) -> u64 {
        *self.in_use.get_mut(entry.kind) += entry.requests;
        self.messages += u32::from(entry.takes_receive);
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() as u32 - 1
        });
        let generation = self.generations.end;
        self.generations.end = generation.wrapping_add(1);
        self.slots[index as usize] = Slot { generation, state: SlotState::InFlight(entry) };
        wr_id(generation, index)
    }

    /// Applies a work completion. Does nothing for a request that [`Self::drop_all`] has dropped.
    ///
    /// The first completion of a request ends the request. A successful request has only one
    /// completion: that of its last work request. If an earlier work request fails, all later work
    /// requests complete too. The slot and the queue entries of the request stay in use until the
    /// completion of its last work request.
    #[inline]
    pub(super) fn complete(&mut self, wr_id: u64) -> Effect {
        let index = (wr_id & !LAST) as u32;
        let Some(slot) = self.slots.get_mut(index as usize) else { return Effect::default() };
        if slot.generation != (wr_id >> 32) as u32 {
            return Effect::default();
        }
        let (ended, kind, requests) = match std::mem::take(&mut slot.state) {
            SlotState::Free => return Effect::default(),
            SlotState::InFlight(entry) => {
                let (kind, requests) = (entry.kind, entry.requests);
                (Some(entry), kind, requests)
            }
            SlotState::Failed(kind, requests) => (None, kind, requests),
        };
        self.messages -= u32::from(ended.as_ref().is_some_and(|entry| entry.takes_receive));
        if wr_id & LAST == 0 {
            slot.state = SlotState::Failed(kind, requests);
            return Effect { ended, settled: WorkRequests::default() };
        }
        self.free.push(index);
        *self.in_use.get_mut(kind) -= requests;
        Effect { ended, settled: WorkRequests::of(kind, requests) }
    }

    /// Ends a request that the driver refused. `posted` is true if the driver posted some of the
    /// request's work requests. Their completions may still arrive, but the last work request never
    /// completes. So the request keeps its slot and its queue entries until [`Self::drop_all`].
    pub(super) fn withdraw(&mut self, wr_id: u64, posted: bool) {
        self.complete(if posted { wr_id } else { last(wr_id) });
    }

    /// Removes all requests, because the queue pair was reset or is being destroyed. Returns the
    /// requests that had not ended.
    ///
    /// Completions of the dropped work requests may still be in the NIC's completion queues. The
    /// work requests count as stale until [`Self::take_stale`].
    pub(super) fn drop_all(&mut self) -> Vec<InFlight> {
        let mut dropped = Vec::new();
        for (slot, index) in self.slots.iter_mut().zip(0..) {
            match std::mem::take(&mut slot.state) {
                SlotState::Free => continue,
                SlotState::InFlight(entry) => dropped.push(entry),
                SlotState::Failed(..) => {}
            }
            self.free.push(index);
        }
        self.stale.add(std::mem::take(&mut self.in_use));
        self.messages = 0;
        dropped
    }

    /// Returns the number of stale work requests ([`Self::drop_all`]), and sets it to 0. The caller
    /// reads all completions from the NIC, and then releases the completion queue entries that were
    /// reserved for the stale work requests.
    pub(super) fn take_stale(&mut self) -> WorkRequests {
        std::mem::take(&mut self.stale)
    }

    /// Reverts a call of [`Self::take_stale`], because the completions could not be read.
    pub(super) fn put_back_stale(&mut self, stale: WorkRequests) {
        self.stale.add(stale);
    }

    /// Returns the tokens (handles) of the windows that the requests in flight bind.
    pub(super) fn bound_windows(&self) -> impl Iterator<Item = u64> {
        self.slots.iter().filter_map(|slot| match &slot.state {
            SlotState::InFlight(entry) if entry.kind == CompletionKind::BindWindow => {
                entry.window.as_ref().map(|window| window.token)
            }
            _ => None,
        })
    }

    /// Returns the number of work queue entries in use, of the send or the receive queue that
    /// `kind` selects.
    #[inline]
    pub(super) fn in_use(&self, kind: CompletionKind) -> u32 {
        if kind == CompletionKind::Receive { self.in_use.receives } else { self.in_use.sends }
    }

    /// Returns true if a request in flight consumes a receive of the peer.
    pub(super) fn has_messages(&self) -> bool {
        self.messages > 0
    }

    /// Returns the number of generations (see [`Slot`]) that the table has used.
    pub(super) fn generations_used(&self) -> u32 {
        self.generations.end.wrapping_sub(self.generations.start)
    }
}

/// Changes that a lane (a queue of staged transfers) has to make to its requests. The lane makes
/// the changes when it advances next, and then clears this value.
#[derive(Debug, Default)]
pub(super) struct LaneUpdates {
    /// Results of requests that the lane posted. The endpoint's `Poster` adds them.
    pub(super) ended: Vec<(Token, Result<u64>, Arrival)>,
    /// The lane cancels its requests with numbers below this one, because the application posted
    /// them on an earlier connection. A reset of the queue pair sets this field. 0 cancels nothing.
    pub(super) canceled_before: u64,
}

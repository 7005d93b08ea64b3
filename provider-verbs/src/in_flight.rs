//! Table of the requests in flight: posted and not completed.

use std::{ops::Range, sync::Arc};

use hmem_core::{Result, transfer::CompletionKind};
use parking_lot::Mutex;

use super::window::WindowRequest;

/// Identifier of a request that a lane (a queue of staged transfers) posted. It holds the number of
/// the transfer and the number of the chunk (part) in that transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) entry: u64,
    pub(super) chunk: u64,
}

/// Data about a received message, for the completion of its receive.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Arrival {
    pub(super) data: Option<u64>,
    pub(super) invalidated: Option<u64>,
    /// Number of bytes that a write with immediate data has written. The bytes are in the region
    /// that the write named, not in the buffers of the receive.
    pub(super) written: Option<u64>,
}

/// The result of a request that a thread waits for; `None` until the request ends.
pub(super) type Awaited = Arc<Mutex<Option<Result<u64>>>>;

/// Recipient of the result of a request.
#[derive(Clone, Debug)]
pub(super) enum RequestOwner {
    /// The application, which reads a completion.
    Application,
    /// A lane (a queue of staged transfers), which posted the request.
    Lane(Token),
    /// A call that waits until the request has ended.
    Call(Awaited),
}

/// A request that was posted and has not completed.
pub(super) struct InFlight {
    pub(super) context: u64,
    pub(super) kind: CompletionKind,
    /// True if the request consumes a receive of the peer. Such a request completes only after the
    /// peer has posted a receive.
    pub(super) takes_receive: bool,
    pub(super) bytes: u64,
    /// Number of work queue entries that the request uses.
    pub(super) requests: u32,
    /// The window that the request binds or invalidates; `None` for other requests.
    pub(super) window: Option<WindowRequest>,
    pub(super) owner: RequestOwner,
}

/// A slot of the request table.
///
/// A `wr_id` holds the index of a slot and the generation of a request. The NIC returns the
/// `wr_id` in the completion. No two requests of an endpoint have the same generation. An endpoint
/// reuses no generation of an endpoint that was closed before it was opened. A NIC may reuse the
/// number of a destroyed queue pair for a new queue pair. Late completions of the old queue pair
/// then have an old generation and match no request.
#[derive(Default)]
struct Slot {
    generation: u32,
    entry: Option<InFlight>,
}

fn wr_id(generation: u32, index: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(index)
}

/// The requests in flight of one queue pair, by `wr_id`.
pub(super) struct RequestTable {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Generations (numbers of requests) that the table has used. The next request gets the range's
    /// end as its generation.
    generations: Range<u32>,
    sends: u32,
    /// Number of sends in flight that consume a receive of the peer.
    messages: u32,
    receives: u32,
}

impl RequestTable {
    /// Creates an empty table. Its first request gets the number `generation`, and each later
    /// request gets the next number.
    pub(super) fn new(generation: u32) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            generations: generation..generation,
            sends: 0,
            messages: 0,
            receives: 0,
        }
    }

    /// Adds a request and returns its `wr_id`.
    #[inline]
    pub(super) fn admit(&mut self, entry: InFlight) -> u64 {
        *self.in_use(entry.kind) += entry.requests;
        self.messages += u32::from(entry.takes_receive);
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() as u32 - 1
        });
        let generation = self.generations.end;
        self.generations.end = generation.wrapping_add(1);
        self.slots[index as usize] = Slot { generation, entry: Some(entry) };
        wr_id(generation, index)
    }

    /// Removes and returns a request. Returns `None` if the request was already removed. Two kinds
    /// of completions follow the removal of their request:
    ///
    /// - completions of the other work requests of a failed request
    /// - completions of a request that a reset of the queue pair has ended
    #[inline]
    pub(super) fn take(&mut self, wr_id: u64) -> Option<InFlight> {
        let index = wr_id as u32;
        let slot = self.slots.get_mut(index as usize)?;
        if slot.generation != (wr_id >> 32) as u32 {
            return None;
        }
        let entry = slot.entry.take()?;
        self.free.push(index);
        *self.in_use(entry.kind) -= entry.requests;
        self.messages -= u32::from(entry.takes_receive);
        Some(entry)
    }

    /// Removes all requests.
    pub(super) fn take_all(&mut self) -> Vec<InFlight> {
        let wr_id = |(slot, index): (&Slot, u32)| wr_id(slot.generation, index);
        let ids: Vec<_> = self.slots.iter().zip(0..).map(wr_id).collect();
        ids.into_iter().filter_map(|id| self.take(id)).collect()
    }

    /// Returns the counter of used work queue entries, of the send or the receive queue that `kind`
    /// selects.
    #[inline]
    pub(super) fn in_use(&mut self, kind: CompletionKind) -> &mut u32 {
        if kind == CompletionKind::Receive { &mut self.receives } else { &mut self.sends }
    }

    pub(super) fn has_messages(&self) -> bool {
        self.messages > 0
    }

    /// Returns the number of generations (numbers of requests) that the table has used.
    pub(super) fn generations_used(&self) -> u32 {
        self.generations.end.wrapping_sub(self.generations.start)
    }
}

/// Changes that a lane (a queue of staged transfers) applies to its requests when it advances next.
#[derive(Debug, Default)]
pub(super) struct LaneUpdates {
    /// Results of work requests that the lane posted. The poster adds the results, and the lane
    /// removes them.
    pub(super) ended: Vec<(Token, Result<u64>, Arrival)>,
    /// The lane cancels its requests with a number below this value: the application posted them on
    /// an earlier connection.
    pub(super) canceled_before: u64,
}

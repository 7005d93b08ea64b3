//! Table of the requests in flight: posted and not completed.

use std::{ops::Range, sync::Arc};

use hmem_core::{Result, transfer::CompletionKind};
use parking_lot::Mutex;

/// Number of a request that a lane (a queue of staged transfers) posted.
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
    /// A lane, which posted the request for a staged transfer.
    Lane(Token),
    /// A call that waits until the request has ended.
    Call(Awaited),
}

/// A request that was posted and has not completed.
pub(super) struct InFlight {
    pub(super) context: u64,
    pub(super) kind: CompletionKind,
    /// Set if the request consumes a receive of the peer. The request completes only after the peer
    /// has posted a receive.
    pub(super) takes_receive: bool,
    pub(super) bytes: u64,
    /// Number of work queue entries that the request uses.
    pub(super) requests: u32,
    /// Token and new key of the window; `None` unless the request binds or invalidates one.
    pub(super) window: Option<(u64, u32)>,
    pub(super) owner: RequestOwner,
}

/// A slot of the request table.
///
/// A `wr_id` holds the index of a slot and the generation of a request. The NIC returns it with the
/// completion. No two requests of an endpoint have the same generation, nor do requests of a later
/// endpoint. A NIC may give a new queue pair the number of an old one. Late completions of the old
/// queue pair then have an old generation and match no request.
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
    /// Generations that the table has used. The next request gets the end of this range.
    generations: Range<u32>,
    sends: u32,
    /// Number of sends in flight that consume a receive of the peer.
    messages: u32,
    receives: u32,
}

impl RequestTable {
    /// Creates an empty table. `generation` is the generation of its first request.
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

    /// Removes and returns a request. Returns `None` if it has ended before: after one failed part
    /// of a request, completions of its other parts may follow.
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

    /// Returns the number of used entries of the work queue for requests of this kind.
    #[inline]
    pub(super) fn in_use(&mut self, kind: CompletionKind) -> &mut u32 {
        if kind == CompletionKind::Receive { &mut self.receives } else { &mut self.sends }
    }

    pub(super) fn has_messages(&self) -> bool {
        self.messages > 0
    }

    /// Returns the number of generations that the table has used.
    pub(super) fn generations_used(&self) -> u32 {
        self.generations.end.wrapping_sub(self.generations.start)
    }
}

/// Results of requests that a lane posted. The lane removes them later.
#[derive(Debug, Default)]
pub(super) struct Mail {
    pub(super) ended: Vec<(Token, Result<u64>, Arrival)>,
    /// Requests with a lower entry number than this are canceled: they were posted on an earlier
    /// connection.
    pub(super) canceled_before: u64,
}

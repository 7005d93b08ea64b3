//! Requests in flight: posted, not completed.

use std::{ops::Range, sync::Arc};

use hmem_core::{Result, transfer::CompletionKind};
use parking_lot::Mutex;

/// Number of a request that a lane posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) entry: u64,
    pub(super) chunk: u64,
}

/// Data about a message in the completion of its receive.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Arrival {
    pub(super) data: Option<u64>,
    pub(super) invalidated: Option<u64>,
    /// Length of a write with immediate data. Its bytes are in the region of its key, not in the
    /// receive's buffers.
    pub(super) written: Option<u64>,
}

/// The result of a request for which a call waits.
pub(super) type Awaited = Arc<Mutex<Option<Result<u64>>>>;

/// Recipient of a request's result.
#[derive(Clone, Debug)]
pub(super) enum RequestOwner {
    /// The application, which gets a completion.
    Application,
    /// A lane.
    Lane(Token),
    /// A call that waits for the result.
    Call(Awaited),
}

/// A request that was posted.
pub(super) struct InFlight {
    pub(super) context: u64,
    pub(super) kind: CompletionKind,
    /// Set if the request consumes a receive of the peer. It completes when the peer has one.
    pub(super) takes_receive: bool,
    pub(super) bytes: u64,
    /// Number of entries of the queue that the request uses.
    pub(super) requests: u32,
    /// Token of the window and its key, for binds and invalidations.
    pub(super) window: Option<(u64, u32)>,
    pub(super) owner: RequestOwner,
}

/// A slot of the request table.
///
/// The NIC returns a request's `wr_id`: the index of the slot and the request's generation.
/// Generations never repeat between requests of an endpoint, nor in endpoints that are opened after
/// it closed. A NIC may give a new queue pair the number of an old one. Late completions of the old
/// queue pair then match no request.
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
    /// Generations that the table has used. The next request gets the end of the range.
    generations: Range<u32>,
    sends: u32,
    /// Number of sends that consume a receive of the peer.
    messages: u32,
    receives: u32,
}

impl RequestTable {
    /// Creates an empty table whose first request gets this generation.
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

    /// Removes a request. Returns `None` if the request ended before, such as the parts after a
    /// failed part.
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

    /// Returns the number of entries in use of the queue for this kind of request.
    #[inline]
    pub(super) fn in_use(&mut self, kind: CompletionKind) -> &mut u32 {
        if kind == CompletionKind::Receive { &mut self.receives } else { &mut self.sends }
    }

    pub(super) fn has_messages(&self) -> bool {
        self.messages > 0
    }

    /// Returns how many generations the table has used.
    pub(super) fn generations_used(&self) -> u32 {
        self.generations.end.wrapping_sub(self.generations.start)
    }
}

/// Results of a lane's requests, until the lane takes them.
#[derive(Debug, Default)]
pub(super) struct Mail {
    pub(super) ended: Vec<(Token, Result<u64>, Arrival)>,
    /// Entries with smaller numbers are canceled: they were posted to an earlier connection.
    pub(super) canceled_before: u64,
}

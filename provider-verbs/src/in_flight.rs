//! Requests in flight: posted, not completed.

use std::{ops::Range, sync::Arc};

use hmem_core::{Result, transfer::CompletionKind};
use parking_lot::Mutex;

/// The number of a request that a lane posted, by which the lane knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) entry: u64,
    pub(super) chunk: u64,
}

/// The facts about a message that the completion of its receive carries.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Arrival {
    pub(super) data: Option<u64>,
    pub(super) invalidated: Option<u64>,
    /// The bytes of a write with immediate data, which lie where its key led.
    pub(super) written: Option<u64>,
}

/// The result of a request for which a call waits.
pub(super) type Awaited = Arc<Mutex<Option<Result<u64>>>>;

/// The poster of a request, which gets its result.
#[derive(Clone, Debug)]
pub(super) enum RequestOwner {
    /// The application, by a completion.
    Application,
    /// A lane.
    Lane(Token),
    /// A call that waits.
    Call(Awaited),
}

/// A request that was posted.
pub(super) struct InFlight {
    pub(super) context: u64,
    pub(super) kind: CompletionKind,
    /// The request takes a receive of the peer, and completes when the peer has one.
    pub(super) takes_receive: bool,
    pub(super) bytes: u64,
    /// Entries of the queue that the request takes.
    pub(super) requests: u32,
    /// For binds and invalidations: the window, and the key to bind or to invalidate.
    pub(super) window: Option<(u64, u32)>,
    pub(super) owner: RequestOwner,
}

/// A place in the table of requests.
///
/// The NIC returns a request's `wr_id`: the place, and the request's generation. Each request of an
/// endpoint has another generation, and so has each request of an endpoint that was opened after
/// this one closed. A NIC may give a new queue pair the number of an old one. Late completions of
/// the old one then match no request.
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
    /// Those among the sends that take a receive of the peer.
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

    /// Removes a request. Returns `None` for one that ended before, such as the parts after the one
    /// that failed.
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
    /// Entries of the lane before this one end with the connection that they were posted to.
    pub(super) canceled_before: u64,
}

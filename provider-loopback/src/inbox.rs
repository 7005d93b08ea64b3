//! The receiving side of an endpoint: posted receives and messages that came before theirs.
//!
//! A message that comes before its receive is kept, up to a bound; beyond it the message waits at
//! its sender, and so does what was posted behind it. Messages and receives match in the order in
//! which they came.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use hmem_core::Result;
use parking_lot::{Mutex, ReentrantMutex, ReentrantMutexGuard};

use super::{
    Few,
    progress::Wake,
    request::{LocalPart, full},
};

/// A posted receive.
#[derive(Debug)]
pub(super) struct Receive {
    pub(super) local: Few<LocalPart>,
    /// Bytes that it has room for.
    pub(super) capacity: u64,
    /// Tag and ignore mask.
    pub(super) tag: Option<(u64, u64)>,
    /// The only endpoint from which it takes messages.
    pub(super) from: Option<u64>,
    pub(super) context: u64,
    /// The number of receives that were posted to the inbox before it. [`Inbox::post`] sets it.
    pub(super) number: u64,
}

impl Receive {
    fn takes(&self, from: u64, tag: Option<u64>) -> bool {
        let right_tag = match (self.tag, tag) {
            (None, None) => true,
            (Some((wanted, ignore)), Some(tag)) => (wanted ^ tag) & !ignore == 0,
            _ => false,
        };
        right_tag && self.from.is_none_or(|wanted| wanted == from)
    }
}

/// The facts about a message that the completion of its receive carries.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Header {
    pub(super) tag: Option<u64>,
    pub(super) data: Option<u64>,
    /// The key of a window that the message invalidated.
    pub(super) invalidated: Option<u64>,
}

/// The bytes of a message that came before its receive.
#[derive(Debug)]
pub(super) enum Body {
    /// For the buffer of the receive.
    Message(Vec<u8>),
    /// So many lie in their memory already: a write with immediate data.
    Written(u64),
}

impl Body {
    /// Bytes that the inbox keeps.
    fn kept(&self) -> u64 {
        match self {
            Self::Message(bytes) => bytes.len() as u64,
            Self::Written(_) => 0,
        }
    }
}

/// A message that came before its receive.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) from: u64,
    pub(super) header: Header,
    pub(super) body: Body,
}

/// Room for a message that is about to be sent.
#[derive(Debug)]
pub(super) enum Room {
    /// The receive that takes it.
    Receive(Receive),
    /// The inbox keeps it.
    Kept,
    /// There is none: the sender's domain is woken when that may have changed.
    None,
}

#[derive(Debug)]
pub(super) struct Inbox {
    /// Receives, and messages, at once.
    depth: usize,
    /// Bytes of messages at once.
    limit: u64,
    /// Held from a match until its bytes are there, so that receives complete in the order of
    /// their matches. A copy engine may post to, or close, the same endpoint.
    delivery: ReentrantMutex<()>,
    state: Mutex<State>,
    /// Set if a kept message and a receive may match.
    unsettled: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// In the order of their numbers.
    receives: VecDeque<Receive>,
    /// The number of receives that were ever posted.
    posted: u64,
    messages: VecDeque<Message>,
    /// Bytes of the kept messages.
    bytes: u64,
    /// Domains of senders whose messages found no room.
    waiting: Vec<Arc<Wake>>,
}

impl State {
    fn wake_senders(&mut self) {
        self.waiting.drain(..).for_each(|domain| domain.wake());
    }
}

impl Inbox {
    pub(super) fn new(depth: usize, limit: u64) -> Self {
        Self {
            depth,
            limit,
            delivery: ReentrantMutex::new(()),
            state: Mutex::default(),
            unsettled: AtomicBool::new(false),
        }
    }

    /// Waits for a delivery under way, and keeps others away until the guard is dropped.
    pub(super) fn lock_delivery(&self) -> ReentrantMutexGuard<'_, ()> {
        self.delivery.lock()
    }

    pub(super) fn try_lock_delivery(&self) -> Option<ReentrantMutexGuard<'_, ()>> {
        self.delivery.try_lock()
    }

    /// Returns whether a kept message and a receive may match.
    pub(super) fn is_unsettled(&self) -> bool {
        self.unsettled.load(Ordering::Acquire)
    }

    pub(super) fn post(&self, mut receive: Receive) -> Result<()> {
        let mut state = self.state.lock();
        if state.receives.len() >= self.depth {
            return Err(full());
        }
        receive.number = state.posted;
        state.posted += 1;
        state.receives.push_back(receive);
        self.match_again(&state);
        state.wake_senders();
        Ok(())
    }

    /// Puts a receive that a failed message had taken back to where it was.
    pub(super) fn put_back(&self, receive: Receive) {
        let mut state = self.state.lock();
        let at = state.receives.partition_point(|other| other.number < receive.number);
        state.receives.insert(at, receive);
        // It may have missed a message that came in the meantime.
        self.match_again(&state);
    }

    fn match_again(&self, state: &State) {
        if !state.messages.is_empty() && !state.receives.is_empty() {
            self.unsettled.store(true, Ordering::Release);
        }
    }

    /// Takes the next kept message out, with the receive that takes it. The caller holds the lock
    /// of deliveries.
    pub(super) fn take_match(&self) -> Option<(Receive, Message)> {
        let mut state = self.state.lock();
        let found = state.receives.iter().enumerate().find_map(|(r, receive)| {
            let takes = |message: &Message| receive.takes(message.from, message.header.tag);
            Some((r, state.messages.iter().position(takes)?))
        });
        let Some((r, m)) = found else {
            self.unsettled.store(false, Ordering::Release);
            return None;
        };
        let receive = state.receives.remove(r)?;
        let message = state.messages.remove(m)?;
        state.bytes -= message.body.kept();
        state.wake_senders();
        Some((receive, message))
    }

    /// Finds room for a message of `len` bytes. The caller holds the lock of deliveries.
    pub(super) fn find_room(
        &self,
        from: u64,
        tag: Option<u64>,
        len: u64,
        sender: &Arc<Wake>,
    ) -> Room {
        let mut state = self.state.lock();
        let found = state.receives.iter().position(|receive| receive.takes(from, tag));
        if let Some(receive) = found.and_then(|at| state.receives.remove(at)) {
            return Room::Receive(receive);
        }
        if state.messages.len() < self.depth && state.bytes + len <= self.limit {
            return Room::Kept;
        }
        if !state.waiting.iter().any(|domain| Arc::ptr_eq(domain, sender)) {
            state.waiting.push(Arc::clone(sender));
        }
        Room::None
    }

    /// Keeps a message for which there is room.
    pub(super) fn keep(&self, message: Message) {
        let mut state = self.state.lock();
        state.bytes += message.body.kept();
        state.messages.push_back(message);
        // A receive may have been posted since the match was tried.
        self.match_again(&state);
    }

    /// Drops every message and returns the receives. Waiting senders find out. The caller holds the
    /// lock of deliveries: nothing writes to the buffers of the receives afterwards.
    pub(super) fn clear(&self) -> VecDeque<Receive> {
        let mut state = self.state.lock();
        state.messages.clear();
        state.bytes = 0;
        state.wake_senders();
        std::mem::take(&mut state.receives)
    }
}

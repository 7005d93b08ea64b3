//! The inbox of an endpoint: its posted receives, and messages that arrived before their receives.
//!
//! The inbox keeps messages that arrive before their receives, up to a bound. Beyond the bound a
//! message waits at its sender, and the sender's later requests wait behind it. Messages and
//! receives match in the order of their arrival.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use hmem_core::Result;
use parking_lot::{Mutex, ReentrantMutex};

use super::{
    Few,
    progress::Wake,
    request::{LocalPart, full},
};

/// A posted receive.
#[derive(Debug)]
pub(super) struct Receive {
    pub(super) local: Few<LocalPart>,
    /// The size of the buffer in bytes.
    pub(super) capacity: u64,
    /// The tag and the mask of ignored tag bits. `None` accepts untagged messages only.
    pub(super) tag: Option<(u64, u64)>,
    /// The number of the endpoint from which the receive accepts messages. `None` accepts messages
    /// from every endpoint.
    pub(super) from: Option<u64>,
    pub(super) context: u64,
    /// The position of the receive in the order of posting, counted from 0 and set by
    /// [`Inbox::post`]. A receive that is put back returns to this position.
    pub(super) number: u64,
}

impl Receive {
    /// Returns true if the receive matches a message of the endpoint `from` with this tag.
    fn matches(&self, from: u64, tag: Option<u64>) -> bool {
        let right_tag = match (self.tag, tag) {
            (None, None) => true,
            (Some((wanted, ignore)), Some(tag)) => (wanted ^ tag) & !ignore == 0,
            _ => false,
        };
        right_tag && self.from.is_none_or(|wanted| wanted == from)
    }
}

/// Properties of a message, which the completion of the message's receive reports.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Header {
    pub(super) tag: Option<u64>,
    pub(super) data: Option<u64>,
    /// The key of the window that the sender asked to invalidate with this message (a send with
    /// invalidate), or `None`.
    pub(super) invalidated: Option<u64>,
}

/// The contents of a message that arrived before its receive.
#[derive(Debug)]
pub(super) enum Body {
    /// The bytes of a send, to be copied into the buffer of the receive.
    Message(Vec<u8>),
    /// The length of a write with immediate data. The written bytes are in the target region
    /// already.
    Written(u64),
}

impl Body {
    /// Returns the number of bytes that the message occupies in the inbox.
    fn kept(&self) -> u64 {
        match self {
            Self::Message(bytes) => bytes.len() as u64,
            Self::Written(_) => 0,
        }
    }
}

/// A message that arrived before its receive.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) from: u64,
    pub(super) header: Header,
    pub(super) body: Body,
}

/// The destination of a message that is about to be sent.
#[derive(Debug)]
pub(super) enum Destination {
    /// The buffer of a posted receive.
    Receive(Receive),
    /// The inbox: no posted receive matches, and the inbox has room for the message.
    Inbox,
    /// No destination: no posted receive matches, and the inbox has no room. The message waits at
    /// its sender. The inbox wakes the sender's domain when a retry may succeed.
    Full,
}

/// The posted receives of an endpoint, and the messages that arrived before their receives.
#[derive(Debug)]
pub(super) struct Inbox {
    /// The maximum number of posted receives. Also the maximum number of messages that wait for a
    /// receive.
    depth: usize,
    /// The maximum number of bytes in messages that wait for a receive.
    limit: u64,
    /// The delivery lock. A sender holds it from the match of a receive until the bytes are copied,
    /// so that receives complete in the order of their matches. Re-entrant, because a copy engine
    /// that runs during a delivery may deliver messages to this endpoint, or close the endpoint.
    pub(super) delivery: ReentrantMutex<()>,
    state: Mutex<State>,
    /// False if it is certain that no waiting message matches a posted receive.
    /// [`Inbox::take_match`] sets the flag to false if it finds no match. A new message or receive
    /// sets it to true.
    possible_match: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// The posted receives, in the order of posting.
    receives: VecDeque<Receive>,
    /// The number of receives that were ever posted.
    posted: u64,
    messages: VecDeque<Message>,
    /// The number of bytes in messages that wait for a receive.
    bytes: u64,
    /// The handles that wake the domains of senders that wait for room in this inbox.
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
            possible_match: AtomicBool::new(false),
        }
    }

    /// Returns true if a message that waits in the inbox may match a posted receive.
    pub(super) fn has_possible_match(&self) -> bool {
        self.possible_match.load(Ordering::Acquire)
    }

    /// Adds a receive, and wakes senders that wait for room.
    ///
    /// # Errors
    /// Again: the inbox has as many posted receives as it can hold.
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

    /// Puts the receive of a failed message back at its place in the order of posting, and wakes
    /// senders that wait for room.
    pub(super) fn put_back(&self, receive: Receive) {
        let mut state = self.state.lock();
        let at = state.receives.partition_point(|other| other.number < receive.number);
        state.receives.insert(at, receive);
        // A message that matches the receive may have arrived while the receive was not posted, or
        // may have begun to wait at its sender.
        self.match_again(&state);
        state.wake_senders();
    }

    fn match_again(&self, state: &State) {
        if !state.messages.is_empty() && !state.receives.is_empty() {
            self.possible_match.store(true, Ordering::Release);
        }
    }

    /// Removes the oldest posted receive that matches a message in the inbox, and the oldest
    /// message that this receive matches. Returns both, or `None` if no message matches a receive.
    /// Wakes senders that wait for room.
    ///
    /// The caller holds the delivery lock.
    pub(super) fn take_match(&self) -> Option<(Receive, Message)> {
        let mut state = self.state.lock();
        let found = state.receives.iter().enumerate().find_map(|(r, receive)| {
            let matches = |message: &Message| receive.matches(message.from, message.header.tag);
            Some((r, state.messages.iter().position(matches)?))
        });
        let Some((r, m)) = found else {
            self.possible_match.store(false, Ordering::Release);
            return None;
        };
        let receive = state.receives.remove(r)?;
        let message = state.messages.remove(m)?;
        state.bytes -= message.body.kept();
        state.wake_senders();
        Some((receive, message))
    }

    /// Chooses the destination of a message of `len` bytes. Removes a chosen receive from the
    /// inbox. The caller holds the delivery lock.
    ///
    /// Skips a receive that matches a message in the inbox: that message arrived earlier, and gets
    /// the receive. If the result is [`Destination::Full`], the inbox wakes the domain of `sender`
    /// when a retry may succeed.
    pub(super) fn find_destination(
        &self,
        from: u64,
        tag: Option<u64>,
        len: u64,
        sender: &Arc<Wake>,
    ) -> Destination {
        let mut state = self.state.lock();
        // The receive may have been posted after the caller has delivered the waiting messages.
        let taken = |receive: &Receive| {
            let mut messages = state.messages.iter();
            messages.any(|message| receive.matches(message.from, message.header.tag))
        };
        let free = |receive: &Receive| receive.matches(from, tag) && !taken(receive);
        let found = state.receives.iter().position(free);
        if let Some(receive) = found.and_then(|at| state.receives.remove(at)) {
            return Destination::Receive(receive);
        }
        if state.messages.len() < self.depth && state.bytes + len <= self.limit {
            return Destination::Inbox;
        }
        if !state.waiting.iter().any(|domain| Arc::ptr_eq(domain, sender)) {
            state.waiting.push(Arc::clone(sender));
        }
        Destination::Full
    }

    /// Stores a message for which [`Inbox::find_destination`] has returned [`Destination::Inbox`].
    pub(super) fn keep(&self, message: Message) {
        let mut state = self.state.lock();
        state.bytes += message.body.kept();
        state.messages.push_back(message);
        // A receive may have been posted since `find_destination` looked for one.
        self.match_again(&state);
    }

    /// Drops every message in the inbox, removes and returns the posted receives, and wakes waiting
    /// senders.
    ///
    /// The caller holds the delivery lock, so that no delivery writes to the buffers afterwards.
    pub(super) fn clear(&self) -> VecDeque<Receive> {
        let mut state = self.state.lock();
        state.messages.clear();
        state.bytes = 0;
        state.wake_senders();
        std::mem::take(&mut state.receives)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn receive(context: u64) -> Receive {
        Receive { local: Few::new(), capacity: 8, tag: None, from: None, context, number: 0 }
    }

    #[test]
    fn receive_posted_during_a_delivery_goes_to_the_message_that_arrived_first() {
        let inbox = Inbox::new(2, 0);
        let wake = Arc::new(Wake::default());
        let written = || Message { from: 1, header: Header::default(), body: Body::Written(8) };
        inbox.keep(written());
        // The sender of the second message found no match before the receive was posted.
        assert!(inbox.take_match().is_none());
        inbox.post(receive(0)).unwrap();
        let destination = inbox.find_destination(1, None, 0, &wake);
        assert!(matches!(destination, Destination::Inbox), "{destination:?}");
        inbox.keep(written());
        assert_eq!(inbox.take_match().expect("the first message").0.context, 0);
        assert!(inbox.take_match().is_none());
    }

    #[test]
    fn receive_that_is_put_back_wakes_a_waiting_sender() {
        let inbox = Inbox::new(1, 0);
        let wake = Arc::new(Wake::default());
        inbox.post(receive(0)).unwrap();
        let find = || inbox.find_destination(1, None, 8, &wake);
        let Destination::Receive(receive) = find() else { panic!("no receive") };
        assert!(matches!(find(), Destination::Full));
        assert_eq!(inbox.state.lock().waiting.len(), 1);
        inbox.put_back(receive);
        assert!(inbox.state.lock().waiting.is_empty(), "the sender still waits");
    }
}

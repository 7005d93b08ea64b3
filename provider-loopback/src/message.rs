//! Messages: matching sends with receives.
//!
//! A message that comes before its receive is kept at the receiver, up to a bound; beyond it the
//! message waits at its sender, and so does what was posted behind it. Messages and receives match
//! in the order in which they came.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use hmem_core::{Access, Error, ErrorKind, Result};
use hmem_p2p::staging::Part;
use parking_lot::{Mutex, ReentrantMutex};

use super::{
    Call, Few,
    domain::DomainState,
    endpoint::{EndpointState, canceled_request, full},
    execute::{LocalSide, Outcome, unreachable_peer},
    memory::{self, Failed, Span},
    post::{KeyUse, LocalPart, Work},
};

/// A posted receive.
#[derive(Debug)]
pub(super) struct Receive {
    pub(super) local: Few<LocalPart>,
    /// Bytes that it has room for.
    pub(super) capacity: u64,
    /// Tag and ignore mask.
    pub(super) tag: Option<(u64, u64)>,
    /// The endpoint from which alone it takes messages.
    pub(super) from: Option<u64>,
    pub(super) context: u64,
    /// How many receives were posted to the inbox before it; the inbox says.
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

/// A message that came before its receive.
#[derive(Debug)]
struct Message {
    from: u64,
    tag: Option<u64>,
    bytes: Vec<u8>,
}

/// The receiving side of an endpoint.
#[derive(Debug)]
pub(super) struct Inbox {
    depth: usize,
    limit: u64,
    /// Held from a match until its bytes are there, so that receives complete in the order of
    /// their matches.
    delivery: ReentrantMutex<()>,
    state: Mutex<State>,
    /// A receive was posted while messages were kept.
    unsettled: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// In the order of their numbers.
    receives: VecDeque<Receive>,
    /// How many receives were ever posted.
    posted: u64,
    messages: VecDeque<Message>,
    /// Of the kept messages.
    bytes: u64,
    /// Domains of senders whose messages found no room.
    waiting: Vec<Weak<DomainState>>,
}

impl State {
    fn wait(&mut self, sender: &Arc<DomainState>) {
        if !self.waiting.iter().any(|domain| std::ptr::eq(domain.as_ptr(), Arc::as_ptr(sender))) {
            self.waiting.push(Arc::downgrade(sender));
        }
    }

    fn wake_senders(&mut self) {
        for domain in self.waiting.drain(..).filter_map(|domain| domain.upgrade()) {
            domain.wake.wake();
        }
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

    pub(super) fn post(&self, mut receive: Receive, depth: usize) -> Result<()> {
        let mut state = self.state.lock();
        if state.receives.len() >= depth {
            return Err(full());
        }
        receive.number = state.posted;
        state.posted += 1;
        state.receives.push_back(receive);
        if !state.messages.is_empty() {
            self.unsettled.store(true, Ordering::Release);
        }
        state.wake_senders();
        Ok(())
    }

    /// Gives kept messages to receives that were posted since; returns how many receives ended.
    #[inline]
    pub(super) fn settle(&self, owner: &Arc<EndpointState>) -> usize {
        if !self.unsettled.load(Ordering::Acquire) {
            return 0;
        }
        // Whoever delivers now settles first, or wakes this domain afterwards.
        match self.delivery.try_lock() {
            Some(_delivery) => self.settle_locked(owner),
            None => 0,
        }
    }

    /// [`Inbox::settle`] for who holds `delivery`.
    fn settle_locked(&self, owner: &Arc<EndpointState>) -> usize {
        let mut ended = 0;
        while self.unsettled.load(Ordering::Acquire) {
            let matched = {
                let mut state = self.state.lock();
                let found = state.receives.iter().enumerate().find_map(|(r, receive)| {
                    let m = state
                        .messages
                        .iter()
                        .position(|message| receive.takes(message.from, message.tag))?;
                    Some((r, m))
                });
                match found {
                    Some((r, m)) => {
                        let message =
                            state.messages.remove(m).expect("the position was just found");
                        state.bytes -= message.bytes.len() as u64;
                        state.wake_senders();
                        Some((
                            state.receives.remove(r).expect("the position was just found"),
                            message,
                        ))
                    }
                    None => {
                        self.unsettled.store(false, Ordering::Release);
                        None
                    }
                }
            };
            let Some((receive, message)) = matched else { break };
            let result = fill(owner, &receive, &Content::Kept(&message.bytes)).unwrap_or_else(Err);
            owner.complete_receive(receive.context, message.tag, result);
            ended += 1;
        }
        ended
    }

    /// Puts a receive that a failed message had taken back to where it was.
    fn put_back(&self, receive: Receive) {
        let mut state = self.state.lock();
        let at = state.receives.partition_point(|other| other.number < receive.number);
        state.receives.insert(at, receive);
        // It may have missed a message that came in the meantime.
        if !state.messages.is_empty() {
            self.unsettled.store(true, Ordering::Release);
        }
    }

    /// Ends every receive as canceled, and lets waiting senders find out.
    pub(super) fn cancel(&self, owner: &EndpointState) {
        // A message on its way arrives first: nothing writes to the buffers of receives afterwards.
        let _delivery = self.delivery.lock();
        let receives = {
            let mut state = self.state.lock();
            state.messages.clear();
            state.bytes = 0;
            state.wake_senders();
            std::mem::take(&mut state.receives)
        };
        for receive in receives {
            owner.complete_receive(receive.context, None, Err(canceled_request()));
        }
    }
}

/// What a message says, where it is now.
enum Content<'a> {
    Kept(&'a [u8]),
    /// Memory of the sender, which is copied from there.
    Sent(&'a EndpointState, &'a [Span<'a>], u64),
}

impl Content<'_> {
    fn len(&self) -> u64 {
        match self {
            Self::Kept(bytes) => bytes.len() as u64,
            Self::Sent(_, _, len) => *len,
        }
    }
}

/// Fills the buffer of a receive. Inside, what became of the receive; outside, a failure of the
/// sender's.
fn fill(owner: &EndpointState, receive: &Receive, content: &Content<'_>) -> Result<Result<u64>> {
    let filled = fill_from(owner, receive, content);
    match filled {
        Err(Failed { part: Part::Target, error }) => Ok(Err(error)),
        Err(Failed { error, .. }) if matches!(content, Content::Sent(..)) => Err(error),
        Err(Failed { error, .. }) => Ok(Err(error)),
        Ok(len) => Ok(Ok(len)),
    }
}

fn fill_from(
    owner: &EndpointState,
    receive: &Receive,
    content: &Content<'_>,
) -> Result<u64, Failed> {
    let receivers = |error| Failed { part: Part::Target, error };
    let len = content.len();
    if len > receive.capacity {
        return Err(receivers(
            Error::new(ErrorKind::Truncated, "receive")
                .provider("loopback")
                .context("message", len)
                .context("buffer", receive.capacity)
                .remedy("post a buffer that holds the longest message"),
        ));
    }
    let side = LocalSide::hold(owner, &receive.local, Access::RECV).map_err(receivers)?;
    let mut spans = Few::new();
    side.spans(&receive.local, &mut spans).map_err(receivers)?;
    match content {
        Content::Sent(sender, from, len) => {
            let to = memory::head(spans.as_slice(), *len);
            sender.carry(owner, (from, to.as_slice()), from)?;
        }
        Content::Kept(bytes) => {
            let mut bytes = *bytes;
            for span in memory::head(spans.as_slice(), len).iter() {
                let (part, rest) = bytes.split_at(span.len() as usize);
                span.store(part).map_err(receivers)?;
                bytes = rest;
            }
        }
    }
    Ok(len)
}

impl EndpointState {
    pub(super) fn send(
        self: &Arc<Self>,
        work: &Work,
        tag: Option<u64>,
        invalidate: Option<KeyUse>,
    ) -> Outcome {
        match self.deliver(work, tag, invalidate) {
            Ok(Some(len)) => Outcome::Done(Ok(len)),
            Ok(None) => Outcome::NotReady,
            Err(error) => Outcome::Done(Err(error)),
        }
    }

    /// Hands a message to the peer; `None` if it has no room.
    fn deliver(
        self: &Arc<Self>,
        work: &Work,
        tag: Option<u64>,
        invalidate: Option<KeyUse>,
    ) -> Result<Option<u64>> {
        let target = &self.target(work)?;
        let delivered = {
            let _delivery = target.inbox.delivery.lock();
            target.inbox.settle_locked(target);
            self.deliver_to(target, work, tag, invalidate)
        };
        if target.inbox.unsettled.load(Ordering::Acquire) {
            target.domain.wake.wake();
        }
        delivered
    }

    fn deliver_to(
        self: &Arc<Self>,
        target: &Arc<Self>,
        work: &Work,
        tag: Option<u64>,
        invalidate: Option<KeyUse>,
    ) -> Result<Option<u64>> {
        let side = LocalSide::hold(self, &work.local, Access::SEND)?;
        let mut spans = Few::new();
        side.spans(&work.local, &mut spans)?;
        let len: u64 = spans.iter().map(Span::len).sum();
        let doomed = match invalidate {
            Some(key) => Some(target.window_to_invalidate(key)?),
            None => None,
        };
        let receive = {
            let mut state = target.inbox.state.lock();
            let found = state.receives.iter().position(|receive| receive.takes(self.id, tag));
            if found.is_none()
                && (state.messages.len() >= target.inbox.depth
                    || state.bytes + len > target.inbox.limit)
            {
                state.wait(&self.domain);
                return Ok(None);
            }
            found.and_then(|at| state.receives.remove(at))
        };
        // Mapped and staged memory goes straight to the receive, and says whose a failure is; what
        // else may fail is read first, so that the failure is the sender's.
        let direct = spans.iter().all(|span| {
            matches!(span, Span::Direct { mapping: None, .. }) || span.staged().is_some()
        });
        let read = self.domain.nic.config.faults.enter(Call::Transfer).and_then(|()| {
            if direct && receive.is_some() {
                Ok(Vec::new())
            } else {
                memory::gather(spans.as_slice(), len)
            }
        });
        // A copy engine that was called may have closed the receiver on this very thread, which
        // waits for nothing.
        let read = read.and_then(|bytes| {
            if target.is_closed() { Err(unreachable_peer(work.peer)) } else { Ok(bytes) }
        });
        let put_back = |receive| {
            target.inbox.put_back(receive);
            if target.is_closed() {
                // What canceled the others did not find it.
                target.inbox.cancel(target);
            }
        };
        let bytes = match read {
            Ok(bytes) => bytes,
            Err(error) => {
                receive.into_iter().for_each(put_back);
                return Err(error);
            }
        };
        match receive {
            Some(receive) => {
                let content = if direct {
                    Content::Sent(self, spans.as_slice(), len)
                } else {
                    Content::Kept(&bytes)
                };
                let filled = match fill(target, &receive, &content) {
                    Ok(filled) => filled,
                    Err(error) => {
                        put_back(receive);
                        return Err(error);
                    }
                };
                if let Some(window) = doomed {
                    window.invalidate();
                }
                target.complete_receive(receive.context, tag, filled);
            }
            None => {
                if let Some(window) = doomed {
                    window.invalidate();
                }
                let mut state = target.inbox.state.lock();
                state.bytes += len;
                state.messages.push_back(Message { from: self.id, tag, bytes });
                // A receive may have been posted since the match was tried.
                if !state.receives.is_empty() {
                    target.inbox.unsettled.store(true, Ordering::Release);
                }
            }
        }
        Ok(Some(len))
    }
}

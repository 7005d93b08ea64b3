//! The delivery of messages from sends to receives.

use std::sync::Arc;

use hmem_core::{Access, Error, ErrorKind, Result, transfer::CompletionKind};
use hmem_p2p::staging::FailedStep;

use super::{
    Few, NicCall,
    access::{self, LocalSide},
    endpoint::{EndpointState, unreachable_peer},
    inbox::{Body, Destination, Header, Message, Receive},
    memory::{self, CopyError, Span},
    region::Refusal,
    request::{KeyUse, Work},
};

/// The source of a message's bytes.
enum Content<'a> {
    /// A copy of the message in a buffer of the NIC. The NIC makes a copy if the message arrives
    /// before its receive, or if it cannot copy the sender's memory directly to the receive.
    Kept(&'a [u8]),
    /// The sender's memory: endpoint, spans and length.
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

/// Copies a message to the buffer of a receive. The inner result is the outcome of the receive,
/// which then completes.
///
/// # Errors
/// The copy from the sender's memory failed, and the receive is not the reason. The caller puts the
/// receive back, and the send fails.
fn fill(owner: &EndpointState, receive: &Receive, content: &Content<'_>) -> Result<Result<u64>> {
    let filled = fill_from(owner, receive, content);
    match filled {
        Err(CopyError { step: FailedStep::TargetCopy, error }) => Ok(Err(error)),
        Err(CopyError { error, .. }) if matches!(content, Content::Sent(..)) => Err(error),
        Err(CopyError { error, .. }) => Ok(Err(error)),
        Ok(len) => Ok(Ok(len)),
    }
}

/// Copies `content` to the buffer of a receive of `owner`. If the receive is the reason for a
/// failure, the error has the step `TargetCopy`.
fn fill_from(
    owner: &EndpointState,
    receive: &Receive,
    content: &Content<'_>,
) -> Result<u64, CopyError> {
    let at_receiver = |error| CopyError { step: FailedStep::TargetCopy, error };
    let len = content.len();
    if len > receive.capacity {
        return Err(at_receiver(
            Error::new(ErrorKind::Truncated, "receive")
                .provider("loopback")
                .context("message", len)
                .context("buffer", receive.capacity)
                .remedy("post a buffer with room for the longest message"),
        ));
    }
    let mut side = LocalSide::default();
    let regions = &owner.domain.nic.regions;
    side.hold(&regions.lock(), owner, &receive.local, Access::RECV).map_err(at_receiver)?;
    let mut spans = Few::new();
    side.spans(&receive.local, &mut spans).map_err(at_receiver)?;
    match content {
        Content::Sent(sender, from, len) => {
            let to = memory::head(spans.as_slice(), *len);
            access::copy(sender, owner, (from, to.as_slice()), from)?;
        }
        Content::Kept(bytes) => {
            memory::scatter(bytes, spans.as_slice()).map_err(at_receiver)?;
        }
    }
    Ok(len)
}

/// Delivers messages that wait in the inbox to receives that were posted later. Returns the number
/// of receives that ended.
pub(super) fn deliver_kept(owner: &EndpointState) -> usize {
    if !owner.inbox.has_possible_match() {
        return 0;
    }
    // A thread that has the delivery lock now delivers the waiting messages itself, or wakes this
    // domain afterwards.
    match owner.inbox.delivery.try_lock() {
        Some(_delivery) => deliver_kept_locked(owner),
        None => 0,
    }
}

/// Like [`deliver_kept`], for a caller that holds the delivery lock.
fn deliver_kept_locked(owner: &EndpointState) -> usize {
    let mut ended = 0;
    while owner.inbox.has_possible_match()
        && let Some((receive, message)) = owner.inbox.take_match()
    {
        let (kind, result) = match &message.body {
            Body::Message(bytes) => {
                let filled = fill(owner, &receive, &Content::Kept(bytes)).unwrap_or_else(Err);
                (CompletionKind::Receive, filled)
            }
            Body::Written(len) => (CompletionKind::RemoteWrite, Ok(*len)),
        };
        owner.complete_receive(receive.context, kind, message.header, result);
        ended += 1;
    }
    ended
}

/// Sends the message of a request. Returns the length of the message. Returns `None` if the peer
/// has neither a matching receive nor room in its inbox.
pub(super) fn send(
    sender: &EndpointState,
    work: &Work,
    header: Header,
    invalidate: Option<KeyUse>,
) -> Result<Option<u64>> {
    let target = &sender.peer(work.peer)?;
    in_order(target, || deliver(sender, target, work, header, invalidate))
}

/// Executes a write with immediate data. `write` moves the bytes. Returns the length of the write.
///
/// Returns `None` if the peer has neither a matching receive nor room in its inbox. The caller then
/// tries again later. In that case `write` was not called, so the bytes are moved only once.
///
/// # Errors
/// The error of `write`. The receive is then put back.
pub(super) fn write(
    sender: &EndpointState,
    work: &Work,
    data: u64,
    write: impl FnOnce() -> Result<u64>,
) -> Result<Option<u64>> {
    let target = &sender.peer(work.peer)?;
    in_order(target, || {
        let header = Header { data: Some(data), ..Header::default() };
        let receive = match target.inbox.find_destination(sender.id(), None, 0, &sender.domain.wake)
        {
            Destination::Receive(receive) => Some(receive),
            Destination::Inbox => None,
            Destination::Full => return Ok(None),
        };
        // A copy engine that `write` called may have closed the receiving endpoint.
        let open = |len| {
            if target.is_closed() { Err(unreachable_peer(work.peer)) } else { Ok(len) }
        };
        match (write().and_then(open), receive) {
            (Ok(len), Some(receive)) => {
                let kind = CompletionKind::RemoteWrite;
                target.complete_receive(receive.context, kind, header, Ok(len));
                Ok(Some(len))
            }
            (Ok(len), None) => {
                let body = Body::Written(len);
                target.inbox.keep(Message { from: sender.id(), header, body });
                Ok(Some(len))
            }
            (Err(error), receive) => {
                receive.into_iter().for_each(|receive| put_back(target, receive));
                Err(error)
            }
        }
    })
}

/// Takes the target's delivery lock, delivers the messages that already wait in the target's inbox,
/// and then calls `deliver`. Returns the result of `deliver`.
fn in_order<T>(target: &EndpointState, deliver: impl FnOnce() -> T) -> T {
    let delivered = {
        let _delivery = target.inbox.delivery.lock();
        deliver_kept_locked(target);
        deliver()
    };
    if target.inbox.has_possible_match() {
        target.domain.wake.wake();
    }
    delivered
}

/// Puts the receive of a failed request back into the target's inbox.
fn put_back(target: &EndpointState, receive: Receive) {
    target.inbox.put_back(receive);
    if target.is_closed() {
        // The close canceled the receives that were in the inbox, which this receive was not.
        target.cancel_receives();
    }
}

fn deliver(
    sender: &EndpointState,
    target: &Arc<EndpointState>,
    work: &Work,
    header: Header,
    invalidate: Option<KeyUse>,
) -> Result<Option<u64>> {
    let regions = &sender.domain.nic.regions;
    let mut side = LocalSide::default();
    side.hold(&regions.lock(), sender, &work.local, Access::SEND)?;
    let mut spans = Few::new();
    side.spans(&work.local, &mut spans)?;
    let len: u64 = spans.iter().map(Span::len).sum();
    let doomed = match invalidate {
        // A mapped key is a number in the sender's domain, which no window has.
        Some(key) if key.mapped => return Err(Refusal::NoRegion.of_key()),
        Some(key) => {
            let window = target.domain.windows.find_to_invalidate(key.number, target.id())?;
            Some((window, key.number))
        }
        None => None,
    };
    let header = Header { invalidated: invalidate.map(|key| key.number), ..header };
    let room = target.inbox.find_destination(sender.id(), header.tag, len, &sender.domain.wake);
    let receive = match room {
        Destination::Receive(receive) => Some(receive),
        Destination::Inbox => None,
        Destination::Full => return Ok(None),
    };
    // Memory that can be read without an error, and staged memory, is copied directly to the
    // receive. The copy then reports the side that failed. Other memory is read first, so that a
    // failed read is an error of the sender.
    let direct = spans.iter().all(|span| span.reads_never_fail() || span.staged().is_some());
    let read = sender.domain.nic.config.faults.enter(NicCall::Transfer).and_then(|()| {
        if direct && receive.is_some() {
            Ok(Vec::new())
        } else {
            memory::gather(spans.as_slice(), len)
        }
    });
    // A copy engine that the read called may have closed the receiving endpoint without waiting for
    // the delivery.
    let read = read.and_then(|bytes| {
        if target.is_closed() { Err(unreachable_peer(work.peer)) } else { Ok(bytes) }
    });
    let bytes = match read {
        Ok(bytes) => bytes,
        Err(error) => {
            receive.into_iter().for_each(|receive| put_back(target, receive));
            return Err(error);
        }
    };
    let invalidate = || {
        if let Some((window, key)) = doomed {
            window.invalidate_key(key);
        }
    };
    match receive {
        Some(receive) => {
            let content = if direct {
                Content::Sent(sender, spans.as_slice(), len)
            } else {
                Content::Kept(&bytes)
            };
            match fill(target, &receive, &content) {
                Ok(filled) => {
                    invalidate();
                    let kind = CompletionKind::Receive;
                    target.complete_receive(receive.context, kind, header, filled);
                }
                Err(error) => {
                    put_back(target, receive);
                    return Err(error);
                }
            }
        }
        None => {
            invalidate();
            let body = Body::Message(bytes);
            target.inbox.keep(Message { from: sender.id(), header, body });
        }
    }
    Ok(Some(len))
}

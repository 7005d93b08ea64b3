//! The requests of a domain's endpoints: posted, in flight and ended.
//!
//! A request has one or several parts. A part that libfabric cannot take yet waits here. Progress
//! posts waiting parts, reads the queues of libfabric, and ends requests.

mod calls;
mod peers;

use std::{
    ffi::c_int,
    mem, thread,
    time::{Duration, Instant},
};

use hmem_core::{
    Error, ErrorKind, Result,
    transfer::{Completion, CompletionKind, Operation, PeerId, WorkRequest},
};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::{
    endpoint_state::{EndpointState, Peer},
    errors,
    hub::Hub,
    objects::Objects,
    part::{Part, PartOp, Slot},
    plan::refuse,
    request_plan::{plan, received},
    sys::{self, fi_cq_tagged_entry},
};

use self::peers::unreachable_peer;

/// Limit for the transfers that use a region when the region is closed.
const CLOSE: Duration = Duration::from_secs(1);

/// A request that was posted and has not ended.
struct Request {
    endpoint: u64,
    context: u64,
    kind: CompletionKind,
    /// The number of bytes that the completion reports.
    bytes: u64,
    /// The parts that have not ended.
    left: usize,
    /// The first error of a part.
    error: Option<Error>,
    /// The tokens of the regions that the local segments use.
    tokens: SmallVec<[u64; 2]>,
    /// The index of the peer; `None` for receives.
    peer: Option<usize>,
    tag: Option<u64>,
    data: Option<u64>,
    /// The immediate data and length of a peer's write that consumes this receive.
    written: Option<(u64, u64)>,
    /// True for a receive that libfabric no longer cancels, because a message is arriving.
    arriving: bool,
    /// True if the connection ended with an RMA part: by a refusal, or by the peer's end.
    suspicious: bool,
    /// The number of the question, for a request of the engine that asks if the peer lives.
    question: Option<(usize, Instant)>,
}

impl Request {
    fn receives(&self) -> bool {
        self.kind == CompletionKind::Receive
    }
}

/// Requests and endpoints of a domain.
#[derive(Default)]
pub(super) struct Engine {
    pub(super) endpoints: FxHashMap<u64, EndpointState>,
    /// The number of the next endpoint or request.
    next: u64,
    /// Storage for parts, which libfabric points to while they are in flight.
    slots: Vec<*mut Slot>,
    /// The part in each slot.
    parts: Vec<Option<Part>>,
    /// The unused slots.
    free: Vec<usize>,
    requests: FxHashMap<u64, Request>,
    /// The number of requests that use a region, by its token.
    uses: FxHashMap<u64, usize>,
    questions: usize,
    /// The number of requests of the application that have ended.
    ended: usize,
    /// The time of the last look for lost peers.
    looked: Option<Instant>,
    pub(super) closed: bool,
}

impl Engine {
    pub(super) fn add(&mut self, endpoint: EndpointState) -> u64 {
        self.next += 1;
        self.endpoints.insert(self.next, endpoint);
        self.next
    }

    fn endpoint(&mut self, id: u64) -> Result<&mut EndpointState> {
        let closed = || refuse(ErrorKind::BadState, "open another endpoint: this one is closed");
        self.endpoints.get_mut(&id).ok_or_else(closed)
    }

    /// Adds a peer and returns its id. A peer that was added before keeps its id.
    pub(super) fn resolve(&mut self, hub: &Hub, id: u64, peer: Peer) -> Result<PeerId> {
        self.endpoint(id)?.add_peer(hub, peer)
    }

    /// Posts a request.
    ///
    /// # Errors
    /// The errors of [`ProviderEndpoint::post`](hmem_core::provider::ProviderEndpoint::post).
    pub(super) fn post(&mut self, hub: &Hub, id: u64, request: &WorkRequest<'_>) -> Result<()> {
        let endpoint = self.endpoint(id)?;
        let peer = match request.operation {
            Operation::Receive { from: None, .. } => None,
            Operation::Receive { from: Some(peer), .. } => {
                endpoint.peer_index(peer)?;
                let why = "receive from every peer: libfabric's endpoints here have no filter";
                return Err(refuse(ErrorKind::Unsupported, why));
            }
            Operation::BindWindow { .. } | Operation::InvalidateWindow { .. } => {
                let why = "grant by sub-views: libfabric has no memory windows";
                return Err(refuse(ErrorKind::Unsupported, why));
            }
            _ => Some(endpoint.peer_index(request.peer)?),
        };
        if let Some(peer) = peer
            && hub.local_only
        {
            endpoint.peers[peer].check_open(hub)?;
        }
        let object = endpoint.objects.endpoint;
        let address = peer.map_or(sys::FI_ADDR_UNSPEC, |peer| endpoint.peers[peer].address);
        let planned = plan(hub, request, object)?;
        let side = endpoint.side(planned.kind);
        let (count, depth) = (planned.parts.len(), side.depth);
        if count > depth {
            let why = "post fewer or longer ranges, or open a deeper endpoint";
            return Err(refuse(ErrorKind::MessageTooLong, why)
                .context("parts", count)
                .context("depth", depth));
        }
        if side.in_flight + count > depth {
            let why = "read completions, then post again, or open a deeper endpoint";
            return Err(refuse(ErrorKind::Again, why).context("depth", depth));
        }
        side.queue.reserve()?;
        side.in_flight += count;
        let inject = planned.copies
            && planned.local.host
            && planned.bytes <= hub.limits.inject
            && count == 1;
        let tokens = planned.local.tokens;
        for token in &tokens {
            *self.uses.entry(*token).or_default() += 1;
        }
        let untagged = matches!(request.operation, Operation::Receive { tag: None, .. });
        let number = self.insert(Request {
            endpoint: id,
            context: request.context,
            kind: planned.kind,
            bytes: planned.bytes,
            left: count,
            error: None,
            tokens,
            peer,
            tag: None,
            data: None,
            written: None,
            arriving: false,
            suspicious: false,
            question: None,
        });
        for (op, local) in planned.parts {
            self.wait(
                id,
                Part {
                    request: number,
                    peer: address,
                    op,
                    local,
                    inject,
                    posted: false,
                    endpoint: id,
                },
            );
        }
        if untagged {
            self.endpoint(id)?.receives.push_back(number);
        }
        self.flush(hub, id);
        if untagged {
            self.consume_receives(hub, id);
        }
        Ok(())
    }

    fn insert(&mut self, request: Request) -> u64 {
        self.next += 1;
        self.requests.insert(self.next, request);
        self.next
    }

    /// Puts a part into a slot, and at the end of the parts that wait for their post.
    fn wait(&mut self, id: u64, part: Part) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Box::into_raw(Slot::new(self.slots.len())));
            self.parts.push(None);
            self.parts.len() - 1
        });
        self.parts[index] = Some(part);
        if let Some(endpoint) = self.endpoints.get_mut(&id) {
            endpoint.waiting.push_back(index);
        }
    }

    /// Makes progress on all endpoints. Returns the number of requests that ended since the last
    /// call.
    pub(super) fn progress(&mut self, hub: &Hub) -> usize {
        let ids: SmallVec<[u64; 4]> = self.endpoints.keys().copied().collect();
        for id in ids {
            self.flush(hub, id);
            self.poll(hub, id);
            self.flush(hub, id);
        }
        self.end_old_questions(hub);
        if hub.local_only {
            self.end_lost_peers(hub);
        }
        mem::take(&mut self.ended)
    }

    /// Handles a completion without an error.
    fn completed(&mut self, hub: &Hub, id: u64, entry: &fi_cq_tagged_entry) {
        let data = (entry.flags & sys::FI_REMOTE_CQ_DATA != 0).then_some(entry.data);
        if entry.flags & sys::FI_REMOTE_WRITE != 0 {
            if let (Some(carried), Some(endpoint)) = (data, self.endpoints.get_mut(&id)) {
                endpoint.written.push_back(received(carried, entry.len as u64));
                self.consume_receives(hub, id);
            }
            return;
        }
        let Some(index) = self.slot_of(entry.op_context) else { return };
        let Some(number) = self.parts[index].as_ref().map(|part| part.request) else { return };
        if let Some(request) = self.requests.get_mut(&number)
            && request.receives()
        {
            (request.bytes, request.data) = (entry.len as u64, data);
            request.tag = (entry.flags & sys::FI_TAGGED != 0).then_some(entry.tag);
        }
        self.part_ended(hub, index, None);
    }

    /// Ends a part with libfabric's negated error number.
    fn part_failed(&mut self, hub: &Hub, index: usize, returned: c_int, prov_errno: c_int) {
        let Some(part) = &self.parts[index] else { return };
        let Some(request) = self.requests.get_mut(&part.request) else { return };
        let error = errors::call(&hub.attr().nic, "transfer", returned);
        let error = error.context("prov_errno", prov_errno);
        let lost = matches!(error.kind(), ErrorKind::Canceled | ErrorKind::Unreachable);
        let rma =
            matches!(part.op, PartOp::Write { .. } | PartOp::Read { .. } | PartOp::Atomic { .. });
        request.suspicious |= lost && rma && part.posted;
        let error = match (&part.op, error.kind()) {
            (PartOp::Send { .. }, ErrorKind::Canceled) => unreachable_peer(hub, error),
            (_, ErrorKind::Unreachable) => unreachable_peer(hub, error),
            _ => error,
        };
        self.part_ended(hub, index, Some(error));
    }

    fn part_ended(&mut self, hub: &Hub, index: usize, error: Option<Error>) {
        let Some(part) = self.parts[index].take() else { return };
        self.free.push(index);
        let Some(request) = self.requests.get_mut(&part.request) else { return };
        if part.posted
            && let Some(peer) = request.peer
            && let Some(endpoint) = self.endpoints.get_mut(&request.endpoint)
        {
            let posted = &mut endpoint.peers[peer].posted;
            *posted = posted.saturating_sub(1);
        }
        request.left -= 1;
        if let Some(error) = error {
            request.error.get_or_insert(error);
        }
        let (kind, left, own) = (request.kind, request.left, request.question.is_none());
        if own && let Some(endpoint) = self.endpoints.get_mut(&request.endpoint) {
            endpoint.side(kind).in_flight -= 1;
        }
        if left == 0 {
            self.request_ended(hub, part.request);
        }
    }

    /// Ends a request whose parts have ended. If the connection ended with an RMA transfer, the
    /// request waits for the answer if the peer lives.
    fn request_ended(&mut self, hub: &Hub, number: u64) {
        let Some(request) = self.requests.get(&number) else { return };
        if request.question.is_some() {
            return self.answered(hub, number);
        }
        let (id, written) = (request.endpoint, request.written);
        let canceled =
            request.error.as_ref().is_some_and(|error| error.kind() == ErrorKind::Canceled);
        if let Some(peer) = request.peer.filter(|_| request.suspicious)
            && self.ask(hub, id, peer)
        {
            if let Some(endpoint) = self.endpoints.get_mut(&id) {
                endpoint.peers[peer].held.push(number);
            }
            return;
        }
        if let Some((data, bytes)) = written
            && canceled
        {
            return self.finish(number, Ok((CompletionKind::RemoteWrite, bytes, Some(data))));
        }
        self.finish_as_is(number);
        if let Some(written) = written {
            // A message took the receive first. The write takes the next one.
            if let Some(endpoint) = self.endpoints.get_mut(&id) {
                endpoint.written.push_front(written);
            }
            self.consume_receives(hub, id);
        }
    }

    /// Ends a request with its own error, or with its bytes.
    fn finish_as_is(&mut self, number: u64) {
        let Some(request) = self.requests.get_mut(&number) else { return };
        let result = match request.error.take() {
            Some(error) => Err(error),
            None => Ok((request.kind, request.bytes, request.data)),
        };
        self.finish(number, result);
    }

    /// Removes a request and reports its completion.
    fn finish(&mut self, number: u64, result: Result<(CompletionKind, u64, Option<u64>)>) {
        let Some(request) = self.requests.remove(&number) else { return };
        for token in &request.tokens {
            if let Some(uses) = self.uses.get_mut(token) {
                *uses -= 1;
                if *uses == 0 {
                    self.uses.remove(token);
                }
            }
        }
        let Some(endpoint) = self.endpoints.get_mut(&request.endpoint) else { return };
        if request.receives() {
            endpoint.receives.retain(|receive| *receive != number);
        }
        self.ended += 1;
        let side = endpoint.side(request.kind);
        let (kind, result, data) = match result {
            Ok((kind, bytes, data)) => (kind, Ok(bytes), data),
            Err(error) => (request.kind, Err(error), None),
        };
        side.count(result.is_ok());
        let mut completion = Completion::new(request.context, kind, result);
        (completion.tag, completion.data) = (request.tag, data);
        side.queue.push(completion);
    }

    /// Gives receives to the writes with immediate data that have arrived: cancels them, so that no
    /// message uses them.
    fn consume_receives(&mut self, hub: &Hub, id: u64) {
        loop {
            let Some(endpoint) = self.endpoints.get_mut(&id) else { return };
            let requests = &mut self.requests;
            let usable = |number: &&u64| {
                let request = requests.get(*number);
                request.is_some_and(|request| request.written.is_none() && !request.arriving)
            };
            let Some(number) = endpoint.receives.iter().find(usable).copied() else { return };
            let Some(written) = endpoint.written.pop_front() else { return };
            let Some(request) = requests.get_mut(&number) else { return };
            request.written = Some(written);
            let of_request =
                |part: &Option<Part>| part.as_ref().is_some_and(|part| part.request == number);
            let Some(index) = self.parts.iter().position(of_request) else { return };
            if endpoint.waiting.contains(&index) {
                endpoint.waiting.retain(|waiting| *waiting != index);
                self.part_failed(hub, index, -sys::FI_ECANCELED, 0);
                continue;
            }
            if !self.cancel(hub, id, index) {
                let Some(endpoint) = self.endpoints.get_mut(&id) else { return };
                endpoint.written.push_front(written);
                if let Some(request) = self.requests.get_mut(&number) {
                    (request.written, request.arriving) = (None, true);
                }
            }
        }
    }

    /// Closes an endpoint. Its requests end as canceled.
    ///
    /// # Errors
    /// The error of libfabric. The endpoint is then still open.
    pub(super) fn close(&mut self, hub: &Hub, id: u64) -> Result<()> {
        if !self.endpoints.contains_key(&id) {
            return Ok(());
        }
        // Requests that have ended are not reported as canceled.
        self.poll(hub, id);
        let Some(endpoint) = self.endpoints.get_mut(&id) else { return Ok(()) };
        let objects = mem::replace(&mut endpoint.objects, Objects::none());
        let number = endpoint.number;
        if hub.local_only {
            let slots = self.bury_slots(id);
            hub.fellows.bury(number, objects, slots, &hub.open);
        } else {
            let mut objects = objects;
            if let Err(error) = objects.close(&hub.open) {
                if let Some(endpoint) = self.endpoints.get_mut(&id) {
                    endpoint.objects = objects;
                }
                return Err(error);
            }
            hub.fellows.remove(number);
        }
        let of_endpoint = |(number, request): (&u64, &Request)| {
            (request.endpoint == id).then_some((*number, request.question.is_some()))
        };
        let mut numbers: Vec<_> = self.requests.iter().filter_map(of_endpoint).collect();
        // In the order of their posts.
        numbers.sort_unstable();
        for (number, own) in numbers {
            if own {
                self.requests.remove(&number);
                continue;
            }
            let canceled = Error::new(ErrorKind::Canceled, "transfer")
                .provider(hub.attr().nic.to_string())
                .context("why", "its endpoint was closed");
            self.finish(number, Err(canceled));
        }
        for (index, part) in self.parts.iter_mut().enumerate() {
            let gone = part.as_ref().is_some_and(|part| part.endpoint == id);
            if gone {
                *part = None;
                self.free.push(index);
            }
        }
        self.endpoints.remove(&id);
        Ok(())
    }

    /// Waits until no request uses a region: cancels its receives, and makes progress.
    ///
    /// # Errors
    /// Busy: transfers of the region have not ended in time.
    pub(super) fn release(&mut self, hub: &Hub, token: u64) -> Result<()> {
        let deadline = Instant::now() + CLOSE;
        while self.uses.contains_key(&token) {
            let of_region = |part: &Option<Part>| {
                let part = part.as_ref()?;
                let request = self.requests.get(&part.request)?;
                let of_region = request.receives() && request.tokens.contains(&token);
                of_region.then_some(request.endpoint)
            };
            let receives: Vec<_> = (0..)
                .zip(&self.parts)
                .filter_map(|(index, part)| Some((index, of_region(part)?)))
                .collect();
            for (index, id) in receives {
                let Some(endpoint) = self.endpoints.get_mut(&id) else { continue };
                if endpoint.waiting.contains(&index) {
                    endpoint.waiting.retain(|waiting| *waiting != index);
                    self.part_failed(hub, index, -sys::FI_ECANCELED, 0);
                } else {
                    self.cancel(hub, id, index);
                }
            }
            self.ended += self.progress(hub);
            if self.uses.contains_key(&token) {
                if Instant::now() > deadline {
                    let why = "wait for the completions of transfers that use the region, or close \
                               their endpoint, and close the region then";
                    return Err(Error::new(ErrorKind::Busy, "deregister")
                        .provider(hub.attr().nic.to_string())
                        .context("transfers", self.uses.get(&token).copied().unwrap_or(0))
                        .remedy(why));
                }
                thread::yield_now();
            }
        }
        Ok(())
    }
}

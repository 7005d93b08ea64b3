//! The requests of a domain's endpoints: posted, in flight and ended.
//!
//! A request has one or several parts. A part that libfabric cannot take yet waits here. Progress
//! posts waiting parts, reads the queues of libfabric, and ends requests.

mod calls;
mod peers;
mod receives;
mod staged;

use std::{ffi::c_int, mem, sync::Arc, time::Instant};

use hmem_core::{
    Error, ErrorKind, Result,
    transfer::{Completion, CompletionKind, Operation, PeerId, WorkRequest},
};
use hmem_p2p::staging::Transfer;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::{
    endpoint_state::{EndpointState, Peer, Waiting},
    errors,
    fellows::Closed,
    hub::Hub,
    objects::Objects,
    part::{Part, PartOp, Slot},
    plan::refuse,
    request_plan::{Planned, plan, received, stage},
    sys::{self, fi_cq_tagged_entry},
};

use self::{calls::Entries, peers::unreachable_peer};

/// The outcome of a request: the kind, the length and the immediate data of its completion.
type Ended = Result<(CompletionKind, u64, Option<u64>)>;

/// A request that was posted and has not ended.
struct Request {
    endpoint: u64,
    context: u64,
    kind: CompletionKind,
    /// The number of bytes that the completion reports.
    bytes: u64,
    /// The number of parts that have not ended. A staged request counts as one part.
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
    /// True if an RMA part failed because the connection ended. A liveness check of the peer then
    /// finds the reason: a refused access, or the end of the peer.
    suspicious: bool,
    /// The number of a liveness check and the time of its start. `None` unless this request is the
    /// read of a liveness check.
    question: Option<(usize, Instant)>,
    /// The transfer of a request that names staged memory. Each chunk of the transfer is a request
    /// of its own.
    staged: Option<Box<Transfer>>,
    /// The number of chunks in flight of a staged request.
    chunks: usize,
    /// True once a pass over the waiting requests has found that this staged request has failed or
    /// has no more chunks to post. After a failure, that pass cancels the later requests to the
    /// peer.
    settled: bool,
    /// The staged request and the chunk that this request moves; `None` for other requests.
    chunk_of: Option<(u64, u64)>,
}

impl Request {
    /// Creates a request to `peer`, which is `None` for receives. The request counts one part until
    /// [`InFlight::admit`] sets the number.
    fn new(endpoint: u64, kind: CompletionKind, bytes: u64, peer: Option<usize>) -> Self {
        Self {
            endpoint,
            context: 0,
            kind,
            bytes,
            left: 1,
            error: None,
            tokens: SmallVec::new(),
            peer,
            tag: None,
            data: None,
            written: None,
            arriving: false,
            suspicious: false,
            question: None,
            staged: None,
            chunks: 0,
            settled: false,
            chunk_of: None,
        }
    }

    /// Returns true for a request of the application, and false for one of the engine.
    fn of_application(&self) -> bool {
        self.question.is_none() && self.chunk_of.is_none()
    }

    fn receives(&self) -> bool {
        self.kind == CompletionKind::Receive
    }
}

/// Requests and endpoints of a domain.
#[derive(Default)]
pub(super) struct Engine {
    /// The open endpoints. The key is [`EndpointState::number`].
    pub(super) endpoints: FxHashMap<u64, EndpointState>,
    in_flight: InFlight,
    /// The time of the last search for lost peers (`end_lost_peers`).
    looked: Option<Instant>,
    pub(super) closed: bool,
}

/// The requests of all endpoints that have not ended, with their parts.
///
/// The methods that get an endpoint expect the endpoint of the request or the part.
#[derive(Default)]
struct InFlight {
    /// The number of the newest request. Each new request gets the next greater number.
    last: u64,
    /// The slots: storage that libfabric points to while a part is in flight. A part has the index
    /// of its slot.
    slots: Vec<*mut Slot>,
    /// The part in each slot; `None` for a free slot.
    parts: Vec<Option<Part>>,
    /// The indices of the free slots.
    free: Vec<usize>,
    requests: FxHashMap<u64, Request>,
    /// The requests that are liveness checks. Those that have ended are removed later
    /// (`end_old_questions`).
    questions: Vec<u64>,
    /// The number of the last liveness check.
    last_question: usize,
    entries: Entries,
    /// The number of requests of the application that have ended since the last call of `progress`.
    ended: usize,
    /// The first error of a completion queue that [`Engine::take_failure`] has not returned.
    failed: Option<Error>,
}

impl Engine {
    pub(super) fn add(&mut self, endpoint: EndpointState) {
        self.endpoints.insert(endpoint.number, endpoint);
    }

    /// Adds a peer and returns its id. A peer that was added before keeps its id.
    pub(super) fn resolve(&mut self, hub: &Hub, id: u64, peer: Peer) -> Result<PeerId> {
        endpoint_of(&mut self.endpoints, id)?.add_peer(hub, peer)
    }

    /// Posts a request.
    ///
    /// # Errors
    /// The errors of [`ProviderEndpoint::post`](hmem_core::provider::ProviderEndpoint::post).
    pub(super) fn post(&mut self, hub: &Hub, id: u64, request: &WorkRequest<'_>) -> Result<()> {
        let endpoint = endpoint_of(&mut self.endpoints, id)?;
        self.in_flight.post(hub, endpoint, request)
    }

    /// Makes progress on all endpoints. Returns the number of requests of the application that have
    /// ended since the previous call of `progress` returned.
    pub(super) fn progress(&mut self, hub: &Hub) -> usize {
        for endpoint in self.endpoints.values_mut() {
            self.in_flight.flush(hub, endpoint);
            self.in_flight.poll_all(hub, endpoint);
            self.in_flight.flush(hub, endpoint);
        }
        if !self.in_flight.questions.is_empty() {
            self.end_old_questions(hub);
        }
        if hub.local_only {
            self.end_lost_peers(hub);
        }
        mem::take(&mut self.in_flight.ended)
    }

    /// Returns the error of a completion queue that could not be read. Each endpoint reports one.
    pub(super) fn take_failure(&mut self) -> Option<Error> {
        self.in_flight.failed.take()
    }

    /// Closes an endpoint. Its requests end as canceled.
    ///
    /// # Errors
    /// The error of libfabric. The endpoint is then still open.
    pub(super) fn close(&mut self, hub: &Hub, id: u64) -> Result<()> {
        let Some(endpoint) = self.endpoints.get_mut(&id) else { return Ok(()) };
        let in_flight = &mut self.in_flight;
        // The completion queues are read first. Otherwise requests that libfabric has completed
        // would be reported as canceled.
        in_flight.poll_all(hub, endpoint);
        if hub.local_only {
            let objects = mem::replace(&mut endpoint.objects, Objects::none());
            let (slots, transfers) = (in_flight.bury_slots(id), in_flight.bury_transfers(hub, id));
            let open = Arc::clone(&hub.open);
            hub.fellows.bury(id, Closed { objects, slots, transfers, open });
        } else {
            endpoint.objects.close(&hub.open)?;
        }
        // The objects are closed, or belong to `Fellows` now.
        if let Some(mut endpoint) = self.endpoints.remove(&id) {
            in_flight.end_all(hub, &mut endpoint);
        }
        Ok(())
    }
}

/// Returns an open endpoint.
///
/// # Errors
/// BadState: the endpoint is closed.
fn endpoint_of(
    endpoints: &mut FxHashMap<u64, EndpointState>,
    id: u64,
) -> Result<&mut EndpointState> {
    let closed = || refuse(ErrorKind::BadState, "open another endpoint: this one is closed");
    endpoints.get_mut(&id).ok_or_else(closed)
}

impl InFlight {
    /// Posts a request. The errors are those of [`Engine::post`].
    fn post(
        &mut self,
        hub: &Hub,
        endpoint: &mut EndpointState,
        request: &WorkRequest<'_>,
    ) -> Result<()> {
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
        let staged = stage(hub, request)?;
        let mut planned = match &staged {
            Some((transfer, _)) => Planned::none(transfer.operation().kind(), transfer.bytes()),
            None => plan(hub, request, endpoint.objects.endpoint)?,
        };
        let side = endpoint.side(planned.kind);
        let (count, depth) = (planned.parts.len().max(1), side.depth);
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
        let untagged = matches!(request.operation, Operation::Receive { tag: None, .. });
        let mut entry = Request::new(endpoint.number, planned.kind, planned.bytes, peer);
        entry.context = request.context;
        let number = match staged {
            Some((transfer, tokens)) => {
                (entry.staged, entry.tokens) = (Some(transfer), tokens);
                let number = self.insert(entry);
                endpoint.waiting.push_back(Waiting::Staged(number));
                number
            }
            None => {
                let (number, parts) = self.admit(hub, endpoint, entry, &mut planned);
                for index in parts {
                    endpoint.waiting.push_back(Waiting::Part(index));
                }
                number
            }
        };
        if untagged {
            endpoint.receives.push_back(number);
        }
        self.flush(hub, endpoint);
        if untagged {
            self.consume_receives(hub, endpoint);
        }
        Ok(())
    }

    #[inline]
    fn insert(&mut self, request: Request) -> u64 {
        self.last += 1;
        self.requests.insert(self.last, request);
        self.last
    }

    /// Adds a request with its parts. Returns its number, and the slots of the parts.
    fn admit(
        &mut self,
        hub: &Hub,
        endpoint: &EndpointState,
        mut request: Request,
        planned: &mut Planned,
    ) -> (u64, SmallVec<[usize; 1]>) {
        let count = planned.parts.len();
        let inject = planned.copies && planned.bytes <= hub.limits.inject && count == 1;
        (request.left, request.tokens) = (count, mem::take(&mut planned.tokens));
        let (id, peer) = (request.endpoint, request.peer);
        let peer = peer.map_or(sys::FI_ADDR_UNSPEC, |peer| endpoint.peers[peer].address);
        let number = self.insert(request);
        let mut parts = SmallVec::new();
        for (op, local) in planned.parts.drain(..) {
            let part =
                Part { request: number, peer, op, local, inject, posted: false, endpoint: id };
            parts.push(self.store(part));
        }
        (number, parts)
    }

    /// Puts a part into a slot.
    fn store(&mut self, part: Part) -> usize {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Box::into_raw(Slot::new(self.slots.len())));
            self.parts.push(None);
            self.parts.len() - 1
        });
        self.parts[index] = Some(part);
        index
    }

    /// Handles a completion without an error.
    fn completed(&mut self, hub: &Hub, endpoint: &mut EndpointState, entry: &fi_cq_tagged_entry) {
        let data = (entry.flags & sys::FI_REMOTE_CQ_DATA != 0).then_some(entry.data);
        if entry.flags & sys::FI_REMOTE_WRITE != 0 {
            if let Some(carried) = data {
                let carries_lengths = hub.limits.carries_lengths;
                let written = received(carried, entry.len as u64, carries_lengths);
                endpoint.written.push_back(written);
                self.consume_receives(hub, endpoint);
            }
            return;
        }
        let Some(index) = self.slot_of(entry.op_context) else { return };
        if let Some(Part { op: PartOp::Receive { .. }, request, .. }) = &self.parts[index]
            && let Some(request) = self.requests.get_mut(request)
        {
            (request.bytes, request.data) = (entry.len as u64, data);
            request.tag = (entry.flags & sys::FI_TAGGED != 0).then_some(entry.tag);
        }
        self.part_ended(hub, endpoint, index, None);
    }

    /// Ends a part that failed. `returned` is libfabric's negated error number. `prov_errno` is the
    /// provider's own error number, or 0.
    fn part_failed(
        &mut self,
        hub: &Hub,
        endpoint: &mut EndpointState,
        index: usize,
        returned: c_int,
        prov_errno: c_int,
    ) {
        let Some(part) = &self.parts[index] else { return };
        let Some(request) = self.requests.get_mut(&part.request) else { return };
        let error = errors::transfer(&hub.attr().nic, returned, prov_errno, hub.verbs);
        let failed = hub.verbs && returned == -errors::EIO;
        let lost = failed || matches!(error.kind(), ErrorKind::Canceled | ErrorKind::Unreachable);
        let rma =
            matches!(part.op, PartOp::Write { .. } | PartOp::Read { .. } | PartOp::Atomic { .. });
        request.suspicious |= lost && rma && part.posted;
        let error = match (&part.op, error.kind()) {
            _ if failed => error,
            (PartOp::Send { .. }, ErrorKind::Canceled) => unreachable_peer(hub, error),
            (_, ErrorKind::Unreachable) => unreachable_peer(hub, error),
            _ => error,
        };
        self.part_ended(hub, endpoint, index, Some(error));
    }

    fn part_ended(
        &mut self,
        hub: &Hub,
        endpoint: &mut EndpointState,
        index: usize,
        error: Option<Error>,
    ) {
        let Some(part) = &self.parts[index] else { return };
        let (number, posted) = (part.request, part.posted);
        self.parts[index] = None;
        self.free.push(index);
        let Some(request) = self.requests.get_mut(&number) else { return };
        if posted && let Some(peer) = request.peer {
            let posted = &mut endpoint.peers[peer].posted;
            *posted = posted.saturating_sub(1);
        }
        request.left -= 1;
        if let Some(error) = error {
            request.error.get_or_insert(error);
        }
        let (kind, left, own) = (request.kind, request.left, request.of_application());
        if own {
            endpoint.side(kind).in_flight -= 1;
        }
        if left == 0 {
            self.request_ended(hub, endpoint, number);
        }
    }

    /// Ends a request whose parts have ended. If the end of a connection made an RMA part fail, the
    /// request first waits for a liveness check of the peer.
    fn request_ended(&mut self, hub: &Hub, endpoint: &mut EndpointState, number: u64) {
        let Some(request) = self.requests.get(&number) else { return };
        if request.question.is_some() {
            return self.answered(hub, endpoint, number);
        }
        let written = request.written;
        let canceled =
            request.error.as_ref().is_some_and(|error| error.kind() == ErrorKind::Canceled);
        if let Some(peer) = request.peer.filter(|_| request.suspicious)
            && self.ask(hub, endpoint, peer)
        {
            endpoint.peers[peer].held.push(number);
            return;
        }
        if let Some((data, bytes)) = written
            && canceled
        {
            let write = (CompletionKind::RemoteWrite, bytes, Some(data));
            self.finish(endpoint, number, Some(Ok(write)));
            return self.consume_receives(hub, endpoint);
        }
        self.finish(endpoint, number, None);
        if let Some(written) = written {
            // A message took the receive first. The write takes the next one.
            endpoint.written.push_front(written);
            self.consume_receives(hub, endpoint);
        }
    }

    /// Removes a request and reports its completion: with `instead`, or else with the request's own
    /// error or bytes.
    fn finish(&mut self, endpoint: &mut EndpointState, number: u64, instead: Option<Ended>) {
        let Some(mut request) = self.requests.remove(&number) else { return };
        let result = instead.unwrap_or_else(|| match request.error.take() {
            Some(error) => Err(error),
            None => Ok((request.kind, request.bytes, request.data)),
        });
        if let Some((owner, chunk)) = request.chunk_of {
            return self.chunk_ended(owner, chunk, &request, result.map(|(_, bytes, _)| bytes));
        }
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

    /// Ends the requests of a closed endpoint as canceled, and drops its parts.
    fn end_all(&mut self, hub: &Hub, endpoint: &mut EndpointState) {
        let id = endpoint.number;
        let of_endpoint = |(number, request): (&u64, &Request)| {
            let is_question = request.question.is_some();
            (request.endpoint == id).then_some((*number, is_question))
        };
        let mut numbers: Vec<_> = self.requests.iter().filter_map(of_endpoint).collect();
        // In the order of their posts.
        numbers.sort_unstable();
        for (number, is_question) in numbers {
            if is_question {
                self.requests.remove(&number);
                continue;
            }
            let error = canceled(hub, "its endpoint was closed");
            self.finish(endpoint, number, Some(Err(error)));
        }
        for (index, part) in self.parts.iter_mut().enumerate() {
            if part.as_ref().is_some_and(|part| part.endpoint == id) {
                *part = None;
                self.free.push(index);
            }
        }
    }
}

/// Returns the error of a request that this side canceled.
fn canceled(hub: &Hub, why: &'static str) -> Error {
    Error::new(ErrorKind::Canceled, "transfer")
        .provider(hub.attr().nic.to_string())
        .context("why", why)
}

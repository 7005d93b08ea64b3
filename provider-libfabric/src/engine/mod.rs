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

use self::peers::unreachable_peer;

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
    /// [`Engine::admit`] sets the number.
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
    pub(super) endpoints: FxHashMap<u64, EndpointState>,
    /// The number of the next endpoint or request.
    next: u64,
    /// The slots: storage that libfabric points to while a part is in flight. A part has the index
    /// of its slot.
    slots: Vec<*mut Slot>,
    /// The part in each slot; `None` for a free slot.
    parts: Vec<Option<Part>>,
    /// The indices of the free slots.
    free: Vec<usize>,
    requests: FxHashMap<u64, Request>,
    /// The number of requests that use each region. The key of the map is the region's token.
    uses: FxHashMap<u64, usize>,
    questions: usize,
    /// The number of requests of the application that have ended since the last call of `progress`.
    ended: usize,
    /// The time of the last search for lost peers (`end_lost_peers`).
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
        let staged = stage(hub, request)?;
        let planned = match &staged {
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
        let mut entry = Request::new(id, planned.kind, planned.bytes, peer);
        entry.context = request.context;
        let number = match staged {
            Some((transfer, tokens)) => {
                (entry.staged, entry.tokens) = (Some(Box::new(transfer)), tokens);
                let number = self.insert(entry);
                self.endpoint(id)?.waiting.push_back(Waiting::Staged(number));
                number
            }
            None => {
                let (number, parts) = self.admit(hub, entry, planned);
                self.endpoint(id)?.waiting.extend(parts.into_iter().map(Waiting::Part));
                number
            }
        };
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
        for token in &request.tokens {
            *self.uses.entry(*token).or_default() += 1;
        }
        self.next += 1;
        self.requests.insert(self.next, request);
        self.next
    }

    /// Adds a request with its parts. Returns its number, and the slots of the parts.
    fn admit(
        &mut self,
        hub: &Hub,
        mut request: Request,
        planned: Planned,
    ) -> (u64, SmallVec<[usize; 1]>) {
        let (count, local) = (planned.parts.len(), planned.local);
        let inject =
            planned.copies && local.host && planned.bytes <= hub.limits.inject && count == 1;
        (request.left, request.tokens) = (count, local.tokens);
        let (endpoint, peer) = (request.endpoint, request.peer);
        let peer = peer.and_then(|peer| Some(self.endpoints.get(&endpoint)?.peers[peer].address));
        let peer = peer.unwrap_or(sys::FI_ADDR_UNSPEC);
        let number = self.insert(request);
        let part = |(op, local)| Part {
            request: number,
            peer,
            op,
            local,
            inject,
            posted: false,
            endpoint,
        };
        let parts = planned.parts.into_iter().map(|planned| self.store(part(planned))).collect();
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
                let carries_lengths = hub.limits.carries_lengths;
                let written = received(carried, entry.len as u64, carries_lengths);
                endpoint.written.push_back(written);
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

    /// Ends a part that failed. `returned` is libfabric's negated error number.
    fn part_failed(&mut self, hub: &Hub, index: usize, returned: c_int, prov_errno: c_int) {
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
        let (kind, left, own) = (request.kind, request.left, request.of_application());
        if own && let Some(endpoint) = self.endpoints.get_mut(&request.endpoint) {
            endpoint.side(kind).in_flight -= 1;
        }
        if left == 0 {
            self.request_ended(hub, part.request);
        }
    }

    /// Ends a request whose parts have ended. If the end of a connection made an RMA part fail, the
    /// request first waits for a liveness check of the peer.
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

    /// Ends a request with its first error, or with success if it has none.
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
        if let Some((number, chunk)) = request.chunk_of {
            return self.chunk_ended(number, chunk, request, result.map(|(_, bytes, _)| bytes));
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
            let (slots, transfers) = (self.bury_slots(id), self.bury_transfers(hub, id));
            hub.fellows
                .bury(number, Closed { objects, slots, transfers, open: Arc::clone(&hub.open) });
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
            self.finish(number, Err(canceled(hub, "its endpoint was closed")));
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
}

/// Returns the error of a request that this side canceled.
fn canceled(hub: &Hub, why: &'static str) -> Error {
    Error::new(ErrorKind::Canceled, "transfer")
        .provider(hub.attr().nic.to_string())
        .context("why", why)
}

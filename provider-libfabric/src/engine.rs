//! The requests of a domain's endpoints: posted, in flight and ended.
//!
//! A request has one or several parts. A part that libfabric cannot take yet waits here. Progress
//! posts waiting parts, reads the queues of libfabric, and ends requests.

#![allow(unsafe_code, reason = "calls libfabric's queues and endpoints, and reads their slots")]

use std::{
    ffi::{c_int, c_void},
    mem, ptr,
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use hmem_core::{
    Access, Error, ErrorKind, Result,
    provider::MsgOrder,
    transfer::{Completion, CompletionKind, LocalSegment, Operation, PeerId, WorkRequest},
};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::{
    endpoint_state::{EndpointState, Peer},
    errors,
    hub::Hub,
    objects::Objects,
    part::{AtomicPart, Part, PartOp, Slot},
    plan::{Local, LocalList, Vectors, refuse, remote_ranges},
    sys::{self, fi_cq_err_entry, fi_cq_tagged_entry},
};

/// Number of completions that one call reads.
const BATCH: usize = 16;

/// Limit for the answer of a peer that is asked if it lives.
const ANSWER: Duration = Duration::from_secs(5);

/// Limit for a connection to a peer.
const CONNECT: Duration = Duration::from_secs(10);

/// Time for a provider to end a connection after a refusal, before the peer counts as lost.
const AGAIN: Duration = Duration::from_secs(1);

/// Time between two looks for lost peers.
const LOOK: Duration = Duration::from_millis(10);

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
    /// True if libfabric still uses slots of closed endpoints.
    buried: bool,
    /// The time of the last look for lost peers.
    looked: Option<Instant>,
    pub(super) closed: bool,
}

// SAFETY: libfabric's objects belong to no thread, and the owner of the value serialises the calls.
unsafe impl Send for Engine {}

impl Drop for Engine {
    fn drop(&mut self) {
        // libfabric may still use the slots of an endpoint that it did not close.
        if self.endpoints.is_empty() && !self.buried {
            for slot in self.slots.drain(..) {
                // SAFETY: `Box::into_raw` returned the pointer. All endpoints are closed, so
                // libfabric uses no slot.
                drop(unsafe { Box::from_raw(slot) });
            }
        }
    }
}

/// The parts of a request, before it is posted.
struct Planned {
    kind: CompletionKind,
    bytes: u64,
    parts: SmallVec<[(PartOp, Vectors); 1]>,
    local: LocalList,
    /// True if the parts may copy their bytes at the post.
    copies: bool,
}

/// Immediate data of a write as libfabric carries it. The length goes along in the upper half,
/// because some providers do not report it.
fn carried(data: u64, bytes: u64) -> u64 {
    data | (bytes << 32)
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
                Part { request: number, peer: address, op, local, inject, posted: false },
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

    /// Posts the waiting parts of an endpoint that libfabric takes now. A part that libfabric does
    /// not take holds up the later parts to the same peer, so that their order is kept.
    fn flush(&mut self, hub: &Hub, id: u64) {
        let Some(endpoint) = self.endpoints.get_mut(&id) else { return };
        let EndpointState { objects, peers, waiting, .. } = endpoint;
        let mut blocked: SmallVec<[Option<usize>; 4]> = SmallVec::new();
        let mut failed: SmallVec<[(usize, c_int); 1]> = SmallVec::new();
        let (parts, slots, requests) = (&mut self.parts, &self.slots, &self.requests);
        waiting.retain(|index| {
            let Some(part) = &mut parts[*index] else { return false };
            let Some(request) = requests.get(&part.request) else { return false };
            if blocked.contains(&request.peer) {
                return true;
            }
            let returned = {
                let _guard = hub.open.lock();
                // SAFETY: the endpoint is open while it is in the table. Slots live as long as the
                // engine. The caller of `post` promised local memory that is valid, or it is that
                // of a region, which the count of uses keeps open.
                unsafe { part.post(objects.endpoint, slots[*index]) }
            };
            let mut peer = request.peer.map(|peer| &mut peers[peer]);
            match returned as c_int {
                0 => {
                    part.posted = true;
                    if let Some(peer) = &mut peer {
                        (peer.posted, peer.blocked) = (peer.posted + 1, None);
                    }
                    false
                }
                again if again == -sys::FI_EAGAIN => {
                    let silent = peer.is_some_and(|peer| {
                        let since = *peer.blocked.get_or_insert_with(Instant::now);
                        let silent = peer.posted == 0 && since.elapsed() > CONNECT;
                        if silent {
                            peer.blocked = None;
                        }
                        silent
                    });
                    if silent {
                        failed.push((*index, -sys::FI_ETIMEDOUT));
                        return false;
                    }
                    blocked.push(request.peer);
                    true
                }
                error => {
                    failed.push((*index, error));
                    false
                }
            }
        });
        for (index, error) in failed {
            self.part_failed(hub, index, error, 0);
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

    /// Reads libfabric's completion queue of an endpoint until it is empty.
    fn poll(&mut self, hub: &Hub, id: u64) {
        const EMPTY: fi_cq_tagged_entry = fi_cq_tagged_entry {
            op_context: ptr::null_mut(),
            flags: 0,
            len: 0,
            buf: ptr::null_mut(),
            data: 0,
            tag: 0,
        };
        let Some(endpoint) = self.endpoints.get(&id) else { return };
        let queue = endpoint.objects.queue;
        // A full batch may be followed by more. The limit keeps a fast peer from holding the lock.
        for _ in 0..BATCH {
            let mut entries = [EMPTY; BATCH];
            let count = {
                let _guard = hub.open.lock();
                // SAFETY: the queue is open while its endpoint is in the table, and has entries of
                // this format.
                unsafe {
                    let read = (*(*queue).ops).read;
                    read.map_or(0, |read| read(queue, entries.as_mut_ptr().cast(), BATCH))
                }
            };
            match count {
                1.. => {
                    for entry in entries.iter().take(count as usize) {
                        self.completed(hub, id, entry);
                    }
                }
                failed if failed == -(sys::FI_EAVAIL as isize) => self.read_error(hub, id),
                _ => break,
            }
        }
    }

    /// Reads an error entry of the completion queue.
    fn read_error(&mut self, hub: &Hub, id: u64) {
        /// An error entry with room for the fields of later API versions.
        #[repr(C)]
        struct ErrorEntry {
            entry: fi_cq_err_entry,
            later: [u64; 16],
        }
        let Some(endpoint) = self.endpoints.get(&id) else { return };
        let queue = endpoint.objects.queue;
        // SAFETY: integers and pointers may be zero.
        let mut read: ErrorEntry = unsafe { mem::zeroed() };
        let count = {
            let _guard = hub.open.lock();
            // SAFETY: the queue is open, and the buffer has room for an entry of any version.
            unsafe {
                let readerr = (*(*queue).ops).readerr;
                readerr.map_or(0, |readerr| readerr(queue, (&raw mut read).cast(), 0))
            }
        };
        let fi_cq_err_entry { op_context, err, prov_errno, .. } = read.entry;
        if count == 1
            && let Some(index) = self.slot_of(op_context)
        {
            // Some providers negate the number.
            self.part_failed(hub, index, -err.saturating_abs(), prov_errno);
        }
    }

    /// Returns the index of the slot at an address that libfabric returned. Some entries have none.
    fn slot_of(&self, context: *mut c_void) -> Option<usize> {
        let slot: *const Slot = context.cast_const().cast();
        // SAFETY: libfabric returns the address of a slot that this engine posted, or null. Slots
        // live as long as the engine.
        let index = unsafe { slot.as_ref() }?.index;
        self.parts.get(index)?.is_some().then_some(index)
    }

    /// Handles a completion without an error.
    fn completed(&mut self, hub: &Hub, id: u64, entry: &fi_cq_tagged_entry) {
        let data = (entry.flags & sys::FI_REMOTE_CQ_DATA != 0).then_some(entry.data);
        if entry.flags & sys::FI_REMOTE_WRITE != 0 {
            if let (Some(carried), Some(endpoint)) = (data, self.endpoints.get_mut(&id)) {
                let (data, bytes) = (carried & u64::from(u32::MAX), carried >> 32);
                let bytes = if entry.len > 0 { entry.len as u64 } else { bytes };
                endpoint.written.push_back((data, bytes));
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

    /// Cancels a posted part. Returns false if libfabric has no such part any more.
    fn cancel(&mut self, hub: &Hub, id: u64, index: usize) -> bool {
        let Some(endpoint) = self.endpoints.get(&id) else { return false };
        let object = endpoint.objects.endpoint;
        let slot = self.slots[index];
        let _guard = hub.open.lock();
        // SAFETY: the endpoint is open while it is in the table. The call only compares the address
        // of the slot.
        unsafe {
            let cancel = (*(*object).ops).cancel;
            cancel.is_some_and(|cancel| cancel(object.cast(), slot.cast()) == 0)
        }
    }

    /// Asks if a peer lives, by a read of the region in its name. Returns false if the name has
    /// none.
    fn ask(&mut self, hub: &Hub, id: u64, peer: usize) -> bool {
        self.ask_since(hub, id, peer, Instant::now())
    }

    /// Like [`Self::ask`], for a question that was first asked at `since`.
    fn ask_since(&mut self, hub: &Hub, id: u64, peer: usize, since: Instant) -> bool {
        let Some((memory, own)) = &hub.alive else { return false };
        let Some(endpoint) = self.endpoints.get_mut(&id) else { return false };
        let target = &mut endpoint.peers[peer];
        let Some(alive) = target.alive else { return false };
        if mem::replace(&mut target.asked, true) {
            return true;
        }
        self.questions += 1;
        let (word, address) = memory.answer(self.questions);
        word.store(!alive.number, Ordering::Relaxed);
        let desc = if hub.needs_desc() { own.desc } else { ptr::null_mut() };
        let local = Local { address, len: 8, desc };
        let remote = sys::fi_rma_iov { addr: alive.address, len: 8, key: alive.key };
        let address = target.address;
        let number = self.insert(Request {
            endpoint: id,
            context: 0,
            kind: CompletionKind::Read,
            bytes: 8,
            left: 1,
            error: None,
            tokens: SmallVec::new(),
            peer: Some(peer),
            tag: None,
            data: None,
            written: None,
            arriving: false,
            suspicious: false,
            question: Some((self.questions, since)),
        });
        let (op, local) = (PartOp::Read { remote }, Vectors::one(local));
        self.wait(
            id,
            Part { request: number, peer: address, op, local, inject: false, posted: false },
        );
        true
    }

    /// Ends the requests that waited for a peer's answer.
    fn answered(&mut self, hub: &Hub, number: u64) {
        let Some(request) = self.requests.remove(&number) else { return };
        let (Some(peer), Some((question, asked))) = (request.peer, request.question) else {
            return;
        };
        let Some(endpoint) = self.endpoints.get_mut(&request.endpoint) else { return };
        let peer = &mut endpoint.peers[peer];
        let expected = peer.alive.map(|alive| alive.number);
        let lives = request.error.is_none()
            && hub.alive.as_ref().is_some_and(|(memory, _)| {
                Some(memory.answer(question).0.load(Ordering::Relaxed)) == expected
            });
        peer.asked = false;
        let (index, held) = (request.peer, mem::take(&mut peer.held));
        if !lives && asked.elapsed() < AGAIN {
            // The provider may still be ending the old connection.
            if let Some(index) = index
                && self.ask_since(hub, request.endpoint, index, asked)
                && let Some(endpoint) = self.endpoints.get_mut(&request.endpoint)
            {
                endpoint.peers[index].held = held;
                return;
            }
        }
        self.end_held(hub, held, lives);
    }

    fn end_held(&mut self, hub: &Hub, held: Vec<u64>, lives: bool) {
        for number in held {
            let Some(request) = self.requests.get_mut(&number) else { continue };
            if let Some(error) = request.error.take() {
                request.error = Some(if lives {
                    let why = "use a valid key, a range inside the region and a right that it \
                               grants: the peer lives and refused this access, or another one that \
                               was in flight with it";
                    Error::new(ErrorKind::AccessDenied, "transfer")
                        .provider(hub.attr().nic.to_string())
                        .caused_by(error)
                        .remedy(why)
                } else {
                    unreachable_peer(hub, error)
                });
            }
            self.finish_as_is(number);
        }
    }

    /// Ends the requests whose peer has not answered in time.
    fn end_old_questions(&mut self, hub: &Hub) {
        let mut silent: SmallVec<[(u64, usize); 1]> = SmallVec::new();
        for request in self.requests.values() {
            if let (Some((_, asked)), Some(peer)) = (request.question, request.peer)
                && asked.elapsed() > ANSWER
            {
                silent.push((request.endpoint, peer));
            }
        }
        for (id, peer) in silent {
            let Some(endpoint) = self.endpoints.get_mut(&id) else { continue };
            let held = mem::take(&mut endpoint.peers[peer].held);
            self.end_held(hub, held, false);
        }
    }

    /// Ends the requests to peers of this machine that are closed or dead.
    fn end_lost_peers(&mut self, hub: &Hub) {
        if self.requests.is_empty() || self.looked.is_some_and(|at| at.elapsed() < LOOK) {
            return;
        }
        self.looked = Some(Instant::now());
        let gone = |request: &Request| {
            let endpoint = self.endpoints.get(&request.endpoint)?;
            endpoint.peers[request.peer?].is_gone(hub).then_some(())
        };
        let lost = self.requests.iter().filter(|(_, request)| gone(request).is_some());
        let mut lost: Vec<_> = lost.map(|(number, _)| *number).collect();
        lost.sort_unstable();
        for number in lost {
            let Some(request) = self.requests.get(&number) else { continue };
            let (id, kind, left) = (request.endpoint, request.kind, request.left);
            let own = request.question.is_none();
            let peer = request.peer;
            let Some(endpoint) = self.endpoints.get_mut(&id) else { continue };
            if let Some(peer) = peer {
                endpoint.peers[peer].remove_files();
            }
            // The slots of parts in flight stay in use until the endpoint closes.
            let parts = &self.parts;
            endpoint
                .waiting
                .retain(|index| parts[*index].as_ref().is_some_and(|part| part.request != number));
            if own {
                endpoint.side(kind).in_flight -= left;
                let cause = errors::call(&hub.attr().nic, "transfer", -sys::FI_ECONNRESET);
                self.finish(number, Err(unreachable_peer(hub, cause)));
            } else {
                self.requests.remove(&number);
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
        if hub.local_only {
            let objects = mem::replace(&mut endpoint.objects, Objects::none());
            hub.fellows.bury(endpoint.number, objects, &hub.open);
            self.buried = true;
        } else {
            endpoint.objects.close(&hub.open)?;
            hub.fellows.remove(endpoint.number);
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
            let gone = part.as_ref().is_some_and(|part| !self.requests.contains_key(&part.request));
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

fn unreachable_peer(hub: &Hub, cause: Error) -> Error {
    Error::new(ErrorKind::Unreachable, "transfer")
        .provider(hub.attr().nic.to_string())
        .caused_by(cause)
        .remedy("check that the peer's process runs: the connection to its endpoint was lost")
}

/// Checks a request, and cuts it into parts.
fn plan(hub: &Hub, request: &WorkRequest<'_>, endpoint: *mut sys::fid_ep) -> Result<Planned> {
    let local = |right| local_list(hub, request.local, right);
    let limits = hub.limits;
    let whole = |kind, op, local: LocalList| {
        let vectors = local.whole(limits.vectors, limits.longest)?;
        let (bytes, copies) = (local.bytes, kind == CompletionKind::Send);
        let parts = SmallVec::from_iter([(op, vectors)]);
        Ok(Planned { kind, bytes, parts, local, copies })
    };
    match request.operation {
        Operation::Write { remote } => rma(hub, local(Access::WRITE)?, remote, None, true),
        Operation::WriteImmediate { remote, data } => {
            hub.attr().check_data(data)?;
            rma(hub, local(Access::WRITE)?, remote, Some(data), true)
        }
        Operation::Read { remote } => rma(hub, local(Access::READ)?, remote, None, false),
        Operation::Send { invalidate: Some(_), .. } => {
            let why = "send without a window's key: libfabric has no memory windows";
            Err(refuse(ErrorKind::Unsupported, why))
        }
        Operation::Send { tag, invalidate: None } => {
            let op = PartOp::Send { tag, data: None };
            whole(CompletionKind::Send, op, local(Access::SEND)?)
        }
        Operation::SendImmediate { tag, data } => {
            hub.attr().check_data(data)?;
            let op = PartOp::Send { tag, data: Some(data) };
            whole(CompletionKind::Send, op, local(Access::SEND)?)
        }
        Operation::Receive { tag, .. } => {
            let op = PartOp::Receive { tag };
            whole(CompletionKind::Receive, op, local(Access::RECV)?)
        }
        Operation::Atomic { op, datatype, remote, result, compare } => {
            if !hub.has(sys::FI_ATOMIC) {
                let why = "use another provider: this one has no atomics (FI_ATOMIC)";
                return Err(refuse(ErrorKind::Unsupported, why));
            }
            let mut list = local(Access::WRITE)?;
            let mut one = |segment: Option<LocalSegment>, right| -> Result<Option<Local>> {
                let Some(segment) = segment else { return Ok(None) };
                let mut more = local_list(hub, &[segment], right)?;
                list.tokens.append(&mut more.tokens);
                Ok(more.list.pop())
            };
            let (result, compare) = (one(result, Access::READ)?, one(compare, Access::WRITE)?);
            let (ranges, bytes) = remote_ranges(&[remote])?;
            let wrong = |why| Err(refuse(ErrorKind::InvalidArgument, why));
            let [remote] = ranges[..] else {
                return wrong("use elements in one piece of the remote key");
            };
            let reads = op == hmem_core::transfer::AtomicOp::AtomicRead;
            let has_operands = list.bytes == bytes || (reads && list.bytes == 0);
            let as_long = |local: &Option<Local>| local.is_none_or(|local| local.len == bytes);
            if !has_operands || !as_long(&result) || !as_long(&compare) {
                return wrong("pass as many bytes of operands and results as of elements");
            }
            if bytes == 0 || bytes % datatype.size() != 0 {
                return wrong("pass whole elements, at least one");
            }
            if op.compares() != compare.is_some() {
                return wrong(
                    "pass values to compare with for comparing operations, and only then",
                );
            }
            if (op.compares() || reads) && result.is_none() {
                return wrong("pass a place for the result of this operation");
            }
            let vectors = list.whole(limits.vectors, limits.longest)?;
            let atomic = AtomicPart { op, datatype, remote, result, compare };
            // SAFETY: the endpoint is in the table of open endpoints, and has atomics.
            let most = unsafe { atomic.limit(endpoint) } as u64;
            if most == 0 {
                let why = "use another operation or type: the provider does not have this atomic";
                return Err(refuse(ErrorKind::Unsupported, why).context("operation", op));
            }
            if bytes / datatype.size() > most {
                let why = "use fewer elements in one atomic";
                return Err(refuse(ErrorKind::MessageTooLong, why).context("limit", most));
            }
            let parts = SmallVec::from_iter([(PartOp::Atomic(Box::new(atomic)), vectors)]);
            let kind = CompletionKind::Atomic;
            Ok(Planned { kind, bytes, parts, local: list, copies: false })
        }
        _ => Err(refuse(ErrorKind::Unsupported, "use an operation of fi_rma(3) or fi_msg(3)")),
    }
}

fn local_list(hub: &Hub, segments: &[LocalSegment], right: Access) -> Result<LocalList> {
    // Host memory is the only memory of most registries.
    let devices = hub.registry.iter().count() > 1;
    LocalList::new(&hub.regions, segments, right, hub.needs_desc(), |segment| {
        let range = hmem_core::AddressRange::new(segment.address, segment.len.max(1))?;
        Ok(devices && hub.registry.owner_of_range(range)?.iface != hmem_core::IfaceKind::SYSTEM)
    })
}

/// Plans a write (`writes`) or a read.
fn rma(
    hub: &Hub,
    local: LocalList,
    remote: &[hmem_core::transfer::RemoteSegment<'_>],
    data: Option<u64>,
    writes: bool,
) -> Result<Planned> {
    let (ranges, bytes) = remote_ranges(remote)?;
    if bytes != local.bytes {
        let why = "pass as many remote bytes as local bytes";
        return Err(refuse(ErrorKind::InvalidArgument, why)
            .context("local", local.bytes)
            .context("remote", bytes));
    }
    let cut = local.cut(&ranges, hub.limits.vectors, hub.limits.longest);
    let last = cut.len() - 1;
    if data.is_some() && last > 0 && !hub.attr().order.intersects(MsgOrder::WAW | MsgOrder::RMA_WAW)
    {
        let why = "write with immediate data to one range: the provider does not order writes";
        return Err(refuse(ErrorKind::Unsupported, why).context("parts", cut.len()));
    }
    let parts = cut.into_iter().enumerate().map(|(at, (vectors, remote))| {
        let data = data.filter(|_| at == last).map(|data| carried(data, bytes));
        let op = if writes { PartOp::Write { remote, data } } else { PartOp::Read { remote } };
        (op, vectors)
    });
    let parts = parts.collect();
    let kind = if writes { CompletionKind::Write } else { CompletionKind::Read };
    Ok(Planned { kind, bytes, parts, local, copies: writes })
}

//! Posting of requests to a queue pair, and translation of their completions.

#![allow(unsafe_code, reason = "calls the library to post work requests")]

use std::{
    ptr, slice,
    sync::{Arc, atomic::Ordering},
};

use hmem_core::{
    Errno, Error, ErrorKind, Result,
    counter::Counter,
    provider::EndpointAttr,
    transfer::{Completion, CompletionKind, Operation, WorkRequest},
};
use parking_lot::{Mutex, MutexGuard};

use super::{
    chain::{Chain, READ, WRITE, carry, single},
    completion::{BIND_REFUSED, status_error},
    connection::{Connection, QueuePair},
    cq::{CqRoom, Room},
    device::OpenDevice,
    domain_state::DomainState,
    errors,
    in_flight::{
        Arrival, Awaited, Effect, InFlight, LaneUpdates, RequestOwner, RequestTable, WorkRequests,
        last,
    },
    split::Span,
    sys::{RecvWr, SendFlags, SendWr, Sge, Wc, WcFlags, WcOpcode, WcStatus, WrOpcode},
    window::WindowRequest,
};

/// Posts requests to a queue pair, and translates the queue pair's work completions to completions
/// of requests.
pub(super) struct Poster {
    pub(super) domain: Arc<DomainState>,
    /// Number of the queue pair.
    pub(super) number: u32,
    state: Mutex<PostState>,
    send: Direction,
    receive: Direction,
}

/// Destinations for the results of one direction of an endpoint. The receives of the endpoint are
/// one direction, and all its other requests are the other direction.
struct Direction {
    /// The completion counter that the application bound to this direction.
    counter: Option<Arc<Counter>>,
    /// Updates for the lane (queue of staged transfers) of this direction.
    updates: Arc<Mutex<LaneUpdates>>,
    /// The used room of the completion queue of this direction.
    room: Arc<CqRoom>,
}

/// State of a [`Poster`] that its lock protects.
pub(super) struct PostState {
    pub(super) connection: Connection,
    pub(super) requests: RequestTable,
    chain: Chain,
}

impl Poster {
    /// Creates a poster for a queue pair. `tx` and `rx` count the used room of the completion
    /// queues to which the sends and the receives of the poster complete.
    pub(super) fn new(
        domain: &Arc<DomainState>,
        pair: QueuePair,
        attr: &EndpointAttr,
        (tx, rx): (&Arc<CqRoom>, &Arc<CqRoom>),
    ) -> Self {
        let direction = |counter: &Option<Arc<Counter>>, room: &Arc<CqRoom>| Direction {
            counter: counter.clone(),
            updates: Arc::default(),
            room: Arc::clone(room),
        };
        Self {
            domain: Arc::clone(domain),
            number: pair.number(),
            state: Mutex::new(PostState {
                connection: Connection::new(pair),
                requests: RequestTable::new(domain.pd.device.generations.load(Ordering::Relaxed)),
                chain: Chain::default(),
            }),
            send: direction(&attr.tx_counter, tx),
            receive: direction(&attr.rx_counter, rx),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, PostState> {
        self.state.lock()
    }

    #[inline]
    fn direction(&self, kind: CompletionKind) -> &Direction {
        if kind == CompletionKind::Receive { &self.receive } else { &self.send }
    }

    /// Returns the updates for the lane (queue of staged transfers) with requests of this kind.
    pub(super) fn updates(&self, kind: CompletionKind) -> &Arc<Mutex<LaneUpdates>> {
        &self.direction(kind).updates
    }

    /// Posts a request to the NIC. `owner` receives the request's result.
    ///
    /// # Safety
    /// The caller follows the safety rules of [`hmem_core::provider::ProviderEndpoint::post`].
    pub(super) unsafe fn post(&self, request: &WorkRequest<'_>, owner: RequestOwner) -> Result<()> {
        let mut state = self.state.lock();
        let PostState { connection, requests, chain } = &mut *state;
        let domain = &*self.domain;
        let pair = connection.open()?;
        // A queue pair takes receives before it is connected.
        if connection.peer().is_none() && !matches!(request.operation, Operation::Receive { .. }) {
            let why = "resolve the peer first: the endpoint was never connected";
            return Err(domain.refuse_post(ErrorKind::BadState, why));
        }
        let held = domain.regions.hold();
        let local = request.local;
        let data = immediate(domain, &request.operation)?;
        let takes_receive = takes_receive(&request.operation);
        let entry = |kind, bytes| InFlight {
            context: request.context,
            kind,
            takes_receive,
            bytes,
            requests: 0,
            window: None,
            owner,
        };
        let entry = match request.operation {
            Operation::Write { remote }
            | Operation::WriteImmediate { remote, .. }
            | Operation::Read { remote } => {
                let is_read = matches!(request.operation, Operation::Read { .. });
                let (rma, lists) = (if is_read { READ } else { WRITE }, (local, remote));
                let (mut wr, mut segment) = (SendWr::new(rma.opcode, 0), Sge::default());
                if let Some(bytes) = single(&held, pair, lists, rma, &mut wr, &mut segment) {
                    carry(&mut wr, data);
                    let entry = entry(rma.kind, bytes);
                    return self.submit(connection, requests, slice::from_mut(&mut wr), entry);
                }
                entry(rma.kind, chain.rma(domain, &held, pair, lists, rma)?)
            }
            Operation::Send { tag: Some(_), .. }
            | Operation::SendImmediate { tag: Some(_), .. }
            | Operation::Receive { tag: Some(_), .. } => {
                return Err(domain.refuse_post(
                    ErrorKind::Unsupported,
                    "verbs has no tagged messages: send without a tag",
                ));
            }
            Operation::Send { tag: None, invalidate } => {
                let bytes = chain.send(domain, &held, pair, (local, invalidate))?;
                entry(CompletionKind::Send, bytes)
            }
            Operation::SendImmediate { tag: None, .. } => {
                let bytes = chain.send(domain, &held, pair, (local, None))?;
                entry(CompletionKind::Send, bytes)
            }
            Operation::Receive { tag: None, .. } => {
                chain.receive(domain, &held, pair, local)?;
                let entry = entry(CompletionKind::Receive, 0);
                return self.submit_receive(connection, requests, &mut chain.segments, entry);
            }
            Operation::Atomic { op, datatype, remote, result, compare } => {
                let lists = (local, result, compare);
                let bytes = chain.atomic(domain, &held, (op, datatype, &remote), lists)?;
                entry(CompletionKind::Atomic, bytes)
            }
            Operation::BindWindow { window, bind, tag } => {
                let mut entry = entry(CompletionKind::BindWindow, 0);
                domain.regions.with(bind.region, "bind window", |region| {
                    let (pd, number) = (&domain.pd, self.number);
                    let window = (window, tag);
                    domain.windows.bind_type_2(pd, region, window, &bind, number, |mut wr, key| {
                        let (token, region) = (window.0.token, Some(region.windows.guard()));
                        entry.window = Some(WindowRequest { token, key, region });
                        self.submit(connection, requests, slice::from_mut(&mut wr), entry)
                    })
                })?;
                return Ok(());
            }
            Operation::InvalidateWindow { window } => {
                let mut entry = entry(CompletionKind::InvalidateWindow, 0);
                let (pd, number) = (&domain.pd, self.number);
                return domain.windows.invalidate(pd, window, number, |mut wr, key| {
                    entry.window = Some(WindowRequest { token: window.token, key, region: None });
                    self.submit(connection, requests, slice::from_mut(&mut wr), entry)
                });
            }
            _ => {
                return Err(domain.refuse_post(
                    ErrorKind::Unsupported,
                    "use another operation: verbs does not have this one",
                ));
            }
        };
        // The chain's last work request carries the data, so the data arrives after all bytes.
        if let Some(last) = chain.requests.last_mut() {
            carry(last, data);
        }
        self.submit(connection, requests, &mut chain.requests, entry)
    }

    /// Posts a message of one byte, or a receive into one byte, whose address and lkey are those of
    /// `byte`. `awaited` gets the result.
    pub(super) fn post_byte(
        &self,
        kind: CompletionKind,
        byte: Span,
        awaited: &Awaited,
    ) -> Result<()> {
        let mut state = self.state.lock();
        let PostState { connection, requests, .. } = &mut *state;
        let mut segment = Sge { addr: byte.address, length: 1, lkey: byte.lkey };
        let entry = InFlight {
            context: 0,
            kind,
            takes_receive: kind == CompletionKind::Send,
            bytes: 1,
            requests: 0,
            window: None,
            owner: RequestOwner::Call(Arc::clone(awaited)),
        };
        if kind == CompletionKind::Receive {
            return self.submit_receive(connection, requests, slice::from_mut(&mut segment), entry);
        }
        let mut wr = SendWr::new(WrOpcode::IBV_WR_SEND, 0);
        wr.num_sge = 1;
        wr.sg_list = &mut segment;
        self.submit(connection, requests, slice::from_mut(&mut wr), entry)
    }

    /// Posts a receive into the memory that `segments` name.
    fn submit_receive(
        &self,
        connection: &Connection,
        requests: &mut RequestTable,
        segments: &mut [Sge],
        mut entry: InFlight,
    ) -> Result<()> {
        let (domain, pair) = (&self.domain, connection.open()?);
        if requests.in_use(entry.kind) >= pair.depth {
            let why = "the receive queue is full: read completions";
            return Err(domain.refuse_post(ErrorKind::Again, why));
        }
        let post = domain.pd.device.ops().post_recv.ok_or_else(|| {
            let why = "use another driver: this one has no receives";
            domain.refuse_post(ErrorKind::Unsupported, why)
        })?;
        entry.requests = 1;
        let needed = room_of(&entry);
        let room = self.reserve(entry.kind, needed)?;
        let wr_id = requests.admit(entry);
        let mut wr = RecvWr {
            wr_id: last(wr_id),
            next: ptr::null_mut(),
            sg_list: segments.as_mut_ptr(),
            num_sge: segments.len() as i32,
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the lock keeps the queue pair open. The request and its segments live for the
        // call. The memory that they name lies in regions that are registered, or that were: the
        // NIC then refuses their keys.
        errors::status(unsafe { post(pair.qp, &mut wr, &mut bad) }).map_err(|errno| {
            requests.withdraw(wr_id, false);
            room.release(needed);
            self.post_failed("ibv_post_recv", errno)
        })
    }

    /// Reserves room for a request of this kind in the completion queue of its direction. Returns
    /// the counters, so that the caller can release the room again.
    ///
    /// # Errors
    /// - Again: the queue has no room.
    /// - MessageTooLong: even the empty queue has too little room.
    #[inline]
    pub(super) fn reserve(&self, kind: CompletionKind, needed: Room) -> Result<&CqRoom> {
        let room = &*self.direction(kind).room;
        if room.reserve(needed) {
            return Ok(room);
        }
        if room.exceeds(needed) {
            let why = "open the completion queue with a greater depth, or transfer less at once: \
                       each work request of the request needs an entry";
            return Err(self.domain.refuse_post(ErrorKind::MessageTooLong, why));
        }
        Err(self.domain.refuse_post(
            ErrorKind::Again,
            "the completion queue is full of unread completions and requests in flight: read \
             completions first, then post again, or open a deeper completion queue",
        ))
    }

    /// Posts the chain of work requests that make up one request. If all succeed, only the last
    /// work request produces a work completion.
    fn submit(
        &self,
        connection: &mut Connection,
        requests: &mut RequestTable,
        chain: &mut [SendWr],
        mut entry: InFlight,
    ) -> Result<()> {
        let (domain, pair) = (&self.domain, connection.open()?);
        let most = pair.depth;
        let count = u32::try_from(chain.len()).unwrap_or(u32::MAX);
        if requests.in_use(entry.kind).saturating_add(count) > most {
            let refused = if count > most {
                let why = "open the endpoint with a greater depth, or transfer less at once";
                domain.refuse_post(ErrorKind::MessageTooLong, why)
            } else {
                domain.refuse_post(ErrorKind::Again, "the send queue is full: read completions")
            };
            return Err(refused.context("requests", count).context("depth", most));
        }
        let post = domain.pd.device.ops().post_send.ok_or_else(|| {
            let why = "use another driver: this one has no sends";
            domain.refuse_post(ErrorKind::Unsupported, why)
        })?;
        entry.requests = count;
        let needed = room_of(&entry);
        let completion = completion_room(&entry.owner);
        let room = self.reserve(entry.kind, needed)?;
        let wr_id = requests.admit(entry);
        let first = chain.as_mut_ptr();
        let end = chain.len() - 1;
        for (index, wr) in chain.iter_mut().enumerate() {
            wr.wr_id = wr_id;
            if index == end {
                wr.wr_id = last(wr_id);
                wr.send_flags |= SendFlags::SIGNALED.bits();
            } else {
                wr.next = first.wrapping_add(index + 1);
            }
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the lock keeps the queue pair open. Requests and segments live for the call. The
        // memory that they name lies in regions that `post` keeps registered until this function
        // returns. Inline bytes are in memory that the region owns.
        let posted = errors::status(unsafe { post(pair.qp, first, &mut bad) });
        posted.map_err(|errno| {
            let posted = !bad.is_null() && bad != first;
            requests.withdraw(wr_id, posted);
            if posted {
                // The driver posted part of the chain, which would run without the rest. So the
                // connection ends.
                connection.fail("cannot stop a partly posted request");
                // The posted part still uses entries of the queue.
                room.release(completion);
            } else {
                room.release(needed);
            }
            self.post_failed("ibv_post_send", errno)
        })
    }

    /// Returns the error of a failed call that posts, with a remedy for the usual causes.
    fn post_failed(&self, symbol: &'static str, errno: Errno) -> Error {
        let nic = &self.domain.pd.device.nic;
        let error = errors::call(nic, symbol, errno);
        match errno.0 {
            12 => Error::new(ErrorKind::Again, symbol)
                .errno(errno)
                .provider(nic.to_string())
                .remedy("read completions: the queue is full"),
            22 => error.remedy(
                "resolve the peer if it is not connected, or check the request against the \
                 endpoint's limits",
            ),
            _ => self.domain.pd.device.failed(error),
        }
    }

    /// Translates a work completion to the application's completion. Returns `None` if the request
    /// belongs to a lane or a waiting call, or has already ended.
    pub(super) fn complete(&self, wc: &Wc) -> Option<Completion> {
        let worked = wc.status == WcStatus::IBV_WC_SUCCESS;
        let (mut entry, failed_before);
        {
            let mut state = self.state.lock();
            // A request that a reset has ended may leave a failed completion in the NIC's queue.
            // That completion says nothing about the new connection.
            let Effect { ended, settled } = state.requests.complete(wc.wr_id);
            self.release(settled);
            entry = ended?;
            failed_before = state.connection.has_failed();
            if !worked {
                state.connection.note_failure();
            }
            // The lock is still held, so no other thread replaces the window.
            if let Some(window) = entry.window.take() {
                self.domain.windows.completed(window, entry.kind, worked, self.number);
            }
            if worked
                && entry.kind == CompletionKind::Receive
                && has_invalidated(&self.domain.pd.device, wc)
            {
                self.domain.windows.invalidated_by_peer(wc.invalidated_rkey);
            }
        }
        let mut arrival = Arrival::default();
        let result = if worked && entry.kind == CompletionKind::Receive {
            arrival = arrived(&self.domain.pd.device, wc);
            Ok(u64::from(wc.byte_len))
        } else if worked {
            Ok(entry.bytes)
        } else {
            let mut error = status_error(wc.status, wc.vendor_err, entry.kind);
            let flushed_first = wc.status == WcStatus::IBV_WC_WR_FLUSH_ERR && !failed_before;
            if flushed_first && entry.kind == CompletionKind::BindWindow {
                // rxe reports a refused bind with the status "flushed".
                error = Error::new(ErrorKind::AccessDenied, "bind window")
                    .provider("verbs")
                    .caused_by(error)
                    .remedy(BIND_REFUSED);
            }
            Err(error)
        };
        self.end(&entry, result, arrival)
    }

    /// Releases the entries of work requests in the NIC's completion queues. The caller has made
    /// sure that no further completion of these work requests can arrive.
    pub(super) fn release(&self, settled: WorkRequests) {
        self.send.room.release(Room::entries(settled.sends));
        self.receive.room.release(Room::entries(settled.receives));
    }

    /// Ends a request that the NIC has completed or dropped. Returns the completion if the
    /// application owns the request. Otherwise passes the result to the lane or waiting call that
    /// owns the request. If the device is lost, an error becomes the error of the loss.
    pub(super) fn end(
        &self,
        entry: &InFlight,
        result: Result<u64>,
        arrival: Arrival,
    ) -> Option<Completion> {
        let result = result.map_err(|error| self.domain.pd.device.failed(error));
        match &entry.owner {
            RequestOwner::Lane(token) => {
                self.updates(entry.kind).lock().ended.push((*token, result, arrival));
                None
            }
            RequestOwner::Call(awaited) => {
                *awaited.lock() = Some(result);
                None
            }
            RequestOwner::Application => {
                Some(self.finish(entry.kind, entry.context, result, arrival))
            }
        }
    }

    /// Returns the completion of a request, and counts it in the completion counter of its
    /// direction.
    pub(super) fn finish(
        &self,
        kind: CompletionKind,
        context: u64,
        result: Result<u64>,
        arrival: Arrival,
    ) -> Completion {
        let result = result.map_err(|error| self.domain.pd.device.failed(error));
        if let Some(counter) = &self.direction(kind).counter {
            match &result {
                Ok(_) => counter.add(1),
                Err(_) => counter.add_error(1),
            }
        }
        let mut completion = match (arrival.written, result) {
            (Some(bytes), Ok(_)) => {
                Completion::new(context, CompletionKind::RemoteWrite, Ok(bytes))
            }
            (_, result) => Completion::new(context, kind, result),
        };
        (completion.data, completion.invalidated) = (arrival.data, arrival.invalidated);
        completion
    }
}

/// Returns the room in the completion queue that a request uses.
const fn room_of(entry: &InFlight) -> Room {
    Room::entries(entry.requests).and(completion_room(&entry.owner))
}

/// Returns the room for the completion of a request of this owner: none for a waiting call, which
/// reads no completion, and none for a lane (queue of staged transfers), which has already reserved
/// the room for the completion of the whole transfer.
const fn completion_room(owner: &RequestOwner) -> Room {
    match owner {
        RequestOwner::Application => Room::COMPLETION,
        RequestOwner::Lane(_) | RequestOwner::Call(_) => Room::NONE,
    }
}

/// Returns true if the request consumes a receive of the peer.
pub(super) fn takes_receive(operation: &Operation<'_>) -> bool {
    matches!(
        operation,
        Operation::Send { .. } | Operation::SendImmediate { .. } | Operation::WriteImmediate { .. }
    )
}

/// Returns the immediate data of an operation, or `None` if it has none.
///
/// # Errors
/// InvalidArgument: the data has more bits than the NIC carries.
pub(super) fn immediate(domain: &DomainState, operation: &Operation<'_>) -> Result<Option<u32>> {
    let (Operation::WriteImmediate { data, .. } | Operation::SendImmediate { data, .. }) =
        operation
    else {
        return Ok(None);
    };
    domain.pd.device.provider_attr.check_data(*data)?;
    Ok(Some(*data as u32))
}

/// Returns true if the message of a completed receive has invalidated a key.
fn has_invalidated(device: &OpenDevice, wc: &Wc) -> bool {
    let flags = WcFlags::from_bits_truncate(wc.wc_flags);
    // rdma_rxe passes the kernel's bit for an invalidated key, which libibverbs defines as a
    // checksum flag. RC has no checksums.
    flags.contains(WcFlags::WITH_INV) || (device.is_rxe() && flags.contains(WcFlags::IP_CSUM_OK))
}

/// Returns the data about a received message from the receive's work completion.
fn arrived(device: &OpenDevice, wc: &Wc) -> Arrival {
    let with_data = WcFlags::from_bits_truncate(wc.wc_flags).contains(WcFlags::WITH_IMM);
    let written = wc.opcode == WcOpcode::IBV_WC_RECV_RDMA_WITH_IMM;
    let number = wc.invalidated_rkey;
    Arrival {
        data: with_data.then(|| u64::from(u32::from_be(number))),
        invalidated: has_invalidated(device, wc).then(|| u64::from(number)),
        written: written.then(|| u64::from(wc.byte_len)),
    }
}

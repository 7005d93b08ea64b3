//! Endpoints: their posted requests, completions and peers, and the fabric that finds endpoints by
//! name.

use std::{
    cell::RefCell,
    collections::{HashMap, VecDeque},
    fmt,
    sync::{Arc, Weak},
};

use hmem_core::{
    AuthKey, Error, ErrorKind, ProcessMark, Result,
    counter::Counter,
    provider::EndpointAttr,
    transfer::{Completion, CompletionKind, EndpointName, Operation, PeerId, WorkRequest},
};
use parking_lot::{Mutex, ReentrantMutex, RwLock};

use super::{
    NicCall,
    domain::DomainState,
    inbox::{Header, Inbox, Receive},
    keys,
    queue::Queue,
    request::{self, Work, full, invalid},
    window::EndpointLife,
};

/// The state of an endpoint, shared by the fabric, the domain's progress and the application's
/// handle.
pub(super) struct EndpointState {
    pub(super) life: Arc<EndpointLife>,
    pub(super) domain: Arc<DomainState>,
    fabric: Arc<Fabric>,
    endpoints: Arc<DomainEndpoints>,
    pub(super) auth_key: AuthKey,
    /// True if the endpoint has the RMA_EVENT capability. Peers may access regions with counters
    /// only through such an endpoint.
    pub(super) rma_event: bool,
    /// The maximum number of requests in `posted`.
    depth: usize,
    tx: Arc<Queue>,
    rx: Arc<Queue>,
    tx_counter: Option<Arc<Counter>>,
    rx_counter: Option<Arc<Counter>>,
    /// The posted requests other than receives that have not started, in the order of their posts.
    posted: Mutex<VecDeque<Work>>,
    /// The execution lock. A thread holds it while it executes requests of this endpoint, so that
    /// the requests execute in order.
    ///
    /// The lock is re-entrant: a request may call a copy engine, which may close this endpoint on
    /// the same thread. The cell keeps requests from executing inside another request. The
    /// executing thread borrows the cell, and [`step`](super::execute::step) skips an endpoint
    /// whose cell is borrowed.
    pub(super) running: ReentrantMutex<RefCell<()>>,
    pub(super) inbox: Inbox,
    peers: RwLock<Peers>,
}

/// The peers of an endpoint: the endpoints that it has resolved.
#[derive(Debug)]
struct Peers {
    /// The [`PeerId`] of the first peer, a random number. Each later peer gets the next number. So
    /// peer ids of two endpoints almost certainly differ, and an endpoint refuses the ids that
    /// another endpoint gave out.
    first: u64,
    /// The peers in the order of their [`PeerId`]s. Each entry has the number of the peer's
    /// endpoint on the fabric, and the endpoint itself.
    known: Vec<(u64, Weak<EndpointState>)>,
    /// Indices in `known` by the number of the peer's endpoint on the fabric.
    by_endpoint: HashMap<u64, usize>,
}

impl Peers {
    fn new() -> Result<Self> {
        Ok(Self { first: keys::random()?, known: Vec::new(), by_endpoint: HashMap::new() })
    }

    #[inline]
    fn get(&self, peer: PeerId) -> Option<&(u64, Weak<EndpointState>)> {
        self.known.get(usize::try_from(peer.0.wrapping_sub(self.first)).ok()?)
    }
}

impl EndpointState {
    /// Opens an endpoint and adds it to its fabric and its domain.
    pub(super) fn open(
        fabric: &Arc<Fabric>,
        endpoints: &Arc<DomainEndpoints>,
        domain: &Arc<DomainState>,
        attr: &EndpointAttr,
        tx: Arc<Queue>,
        rx: Arc<Queue>,
    ) -> Result<Arc<Self>> {
        let depth = attr.depth.max(1);
        let endpoint = Arc::new(Self {
            life: Arc::new(EndpointLife::new(keys::random()?)),
            domain: Arc::clone(domain),
            fabric: Arc::clone(fabric),
            endpoints: Arc::clone(endpoints),
            auth_key: attr.auth_key.clone().unwrap_or_else(|| domain.auth_key.clone()),
            rma_event: attr.rma_event,
            depth,
            tx,
            rx,
            tx_counter: attr.tx_counter.clone(),
            rx_counter: attr.rx_counter.clone(),
            posted: Mutex::default(),
            running: ReentrantMutex::default(),
            inbox: Inbox::new(depth, domain.nic.config.unexpected_bytes),
            peers: RwLock::new(Peers::new()?),
        });
        fabric.endpoints.write().insert(endpoint.life.id, Arc::downgrade(&endpoint));
        endpoints.add(&endpoint);
        Ok(endpoint)
    }

    pub(super) fn id(&self) -> u64 {
        self.life.id
    }

    pub(super) fn is_closed(&self) -> bool {
        self.life.is_closed()
    }

    /// Adds a peer and returns the peer's id. If the endpoint is a peer already, returns the
    /// existing id.
    pub(super) fn add_peer(&self, peer: &Arc<Self>) -> PeerId {
        let mut peers = self.peers.write();
        let next = peers.known.len();
        let at = *peers.by_endpoint.entry(peer.id()).or_insert(next);
        if at == next {
            peers.known.push((peer.id(), Arc::downgrade(peer)));
        }
        PeerId(peers.first.wrapping_add(at as u64))
    }

    /// Returns the open endpoint of a peer.
    ///
    /// # Errors
    /// Unreachable: the peer is closed, this endpoint did not resolve the peer, or the port of one
    /// of the two NICs is down.
    #[inline]
    pub(super) fn peer(&self, peer: PeerId) -> Result<Arc<Self>> {
        let known = |peers: &Peers| peers.get(peer)?.1.upgrade();
        let open = known(&self.peers.read()).filter(|peer| !peer.is_closed());
        let open = open.ok_or_else(|| unreachable_peer(peer))?;
        if self.domain.nic.port_is_down() || open.domain.nic.port_is_down() {
            return Err(unreachable_peer(peer).remedy("wait until the port is up again"));
        }
        Ok(open)
    }

    /// Returns the number of a peer's endpoint, which is unique on the fabric.
    ///
    /// # Errors
    /// InvalidArgument: this endpoint did not resolve the peer.
    #[inline]
    fn peer_endpoint(&self, peer: PeerId) -> Result<u64> {
        let found = self.peers.read().get(peer).map(|(endpoint, _)| *endpoint);
        found.ok_or_else(|| {
            invalid("name a peer that this endpoint has resolved").context("peer", peer.0)
        })
    }

    /// Adds a request to the posted requests, or a receive to the inbox. Reserves an entry of the
    /// completion queue first, because every request ends with a completion.
    ///
    /// # Errors
    /// - BadState: the endpoint is closed.
    /// - Again: the endpoint has as many requests as its depth, or the completion queue is full.
    /// - The errors of [`request::work`] and [`request::local_parts`].
    /// - InvalidArgument: the request names a peer that this endpoint did not resolve.
    pub(super) fn submit(&self, request: &WorkRequest<'_>) -> Result<()> {
        if self.is_closed() {
            return Err(self.closed());
        }
        self.domain.nic.config.faults.enter(NicCall::Post)?;
        if let Operation::Receive { tag, from } = &request.operation {
            let (local, capacity) = request::local_parts(&self.domain, request.local)?;
            let from = from.map(|peer| self.peer_endpoint(peer)).transpose()?;
            let receive =
                Receive { local, capacity, tag: *tag, from, context: request.context, number: 0 };
            self.rx.reserve()?;
            self.inbox.post(receive).inspect_err(|_| self.rx.release(1))?;
            if self.is_closed() {
                // The receive may have come into the inbox after the closing thread canceled the
                // other receives. So this thread cancels all that are left.
                self.cancel_receives();
            }
        } else {
            let work = request::work(&self.domain, request)?;
            if request::window_event(&work.operation).is_none() {
                self.peer_endpoint(request.peer)?;
            }
            let mut posted = self.posted.lock();
            if self.is_closed() {
                return Err(self.closed());
            }
            if posted.len() >= self.depth {
                return Err(full());
            }
            self.tx.reserve()?;
            if let Some((window, event)) = request::window_event(&work.operation) {
                let noted = self.domain.windows.note_posted(window, event);
                noted.inspect_err(|_| self.tx.release(1))?;
            }
            posted.push_back(work);
        }
        self.domain.wake.wake();
        Ok(())
    }

    /// Removes the next posted request. Returns the request, and whether more requests are posted.
    /// The caller holds the execution lock `running`.
    pub(super) fn next_posted(&self) -> Option<(Work, bool)> {
        let mut posted = self.posted.lock();
        let work = posted.pop_front()?;
        Some((work, !posted.is_empty()))
    }

    /// Puts a request that cannot be executed yet back at the front of the posted requests.
    pub(super) fn put_back(&self, work: Work) {
        self.posted.lock().push_front(work);
    }

    #[inline]
    pub(super) fn complete_transmit(&self, work: &Work, result: Result<u64>) {
        count(self.tx_counter.as_deref(), &result);
        if let Some((window, _)) = request::window_event(&work.operation) {
            self.domain.windows.note_ended(window);
        }
        let kind = work.operation.kind();
        self.tx.push(Completion::new(work.context, kind, result));
    }

    pub(super) fn complete_receive(
        &self,
        context: u64,
        kind: CompletionKind,
        header: Header,
        result: Result<u64>,
    ) {
        count(self.rx_counter.as_deref(), &result);
        let mut completion = Completion::new(context, kind, result);
        let Header { tag, data, invalidated } = header;
        (completion.tag, completion.data, completion.invalidated) = (tag, data, invalidated);
        self.rx.push(completion);
    }

    /// Closes the endpoint. Waits for the request that executes on another thread, if any, and
    /// cancels the requests that have not started. Does nothing if the endpoint is closed already.
    ///
    /// A copy engine may call this while it works for a request of the endpoint. The call then does
    /// not wait for that request, which executes on the same thread.
    ///
    /// # Errors
    /// Busy: a type 2A window is bound through the endpoint, and `force` is not set.
    pub(super) fn close(&self, force: bool) -> Result<()> {
        if !self.life.close(force)? {
            return Ok(());
        }
        self.fabric.endpoints.write().remove(&self.id());
        self.endpoints.remove(self.id());
        // Waits for a request that executes on another thread.
        let _running = self.running.lock();
        let canceled = std::mem::take(&mut *self.posted.lock());
        for work in canceled {
            self.complete_transmit(&work, Err(self.canceled()));
        }
        self.domain.windows.end_of_endpoint(self.id());
        self.cancel_receives();
        Ok(())
    }

    /// Returns the error of a request that ends because the endpoint is closed, by the application
    /// or by the loss of the device.
    pub(super) fn canceled(&self) -> Error {
        self.domain.check_nic("transfer").err().unwrap_or_else(|| {
            Error::new(ErrorKind::Canceled, "transfer")
                .provider("loopback")
                .context("why", "its endpoint was closed")
        })
    }

    /// Returns the error of a post to the closed endpoint.
    fn closed(&self) -> Error {
        self.domain.check_nic("post").err().unwrap_or_else(|| {
            Error::new(ErrorKind::BadState, "post")
                .provider("loopback")
                .context("why", "the endpoint is closed")
        })
    }

    /// Completes every posted receive as canceled, and drops the messages in the inbox. Wakes
    /// senders that wait for room in the inbox. Their sends then fail.
    pub(super) fn cancel_receives(&self) {
        // Waits for a message that is being delivered.
        let _delivery = self.inbox.delivery.lock();
        for receive in self.inbox.clear() {
            let (kind, header) = (CompletionKind::Receive, Header::default());
            self.complete_receive(receive.context, kind, header, Err(self.canceled()));
        }
    }
}

impl fmt::Debug for EndpointState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndpointState")
            .field("life", &self.life)
            .field("domain", &self.domain.id)
            .field("posted", &self.posted.lock().len())
            .finish_non_exhaustive()
    }
}

/// The open endpoints of a domain. Progress on the domain executes the requests of all these
/// endpoints.
#[derive(Debug, Default)]
pub(super) struct DomainEndpoints {
    /// The current list of endpoints. A change replaces the whole list, so that progress can
    /// execute requests on a snapshot without a lock.
    endpoints: RwLock<Arc<[Arc<EndpointState>]>>,
}

impl DomainEndpoints {
    pub(super) fn snapshot(&self) -> Arc<[Arc<EndpointState>]> {
        Arc::clone(&self.endpoints.read())
    }

    pub(super) fn len(&self) -> u64 {
        self.endpoints.read().len() as u64
    }

    fn add(&self, endpoint: &Arc<EndpointState>) {
        let mut endpoints = self.endpoints.write();
        *endpoints = endpoints.iter().chain([endpoint]).map(Arc::clone).collect();
    }

    fn remove(&self, id: u64) {
        let mut endpoints = self.endpoints.write();
        *endpoints =
            endpoints.iter().filter(|endpoint| endpoint.id() != id).map(Arc::clone).collect();
    }
}

/// The simulated network of a provider's NICs: the open endpoints by their numbers.
pub(super) struct Fabric {
    /// A random number in the names of this fabric's endpoints. Names with another number belong to
    /// another fabric.
    id: u64,
    endpoints: RwLock<HashMap<u64, Weak<EndpointState>>>,
    /// The process that created the fabric. A forked child must not open domains: a thread of the
    /// parent, which the child does not have, may hold any lock of the fabric.
    pub(super) process: ProcessMark,
}

const NAME_MAGIC: &[u8; 4] = b"hmLE";
const NAME_VERSION: u8 = 1;

impl Fabric {
    pub(super) fn new() -> Result<Self> {
        let process = ProcessMark::current()?;
        Ok(Self { id: keys::random()?, endpoints: RwLock::default(), process })
    }

    /// Returns the name by which peers resolve an endpoint.
    ///
    /// Its 21 bytes are a magic number, the version, the fabric's number and the endpoint's number.
    pub(super) fn name_of(&self, endpoint: u64) -> EndpointName {
        let mut bytes = NAME_MAGIC.to_vec();
        bytes.push(NAME_VERSION);
        bytes.extend_from_slice(&self.id.to_le_bytes());
        bytes.extend_from_slice(&endpoint.to_le_bytes());
        EndpointName(bytes)
    }

    /// Finds an endpoint by its name.
    ///
    /// # Errors
    /// - Malformed: the bytes are not a name of the current version.
    /// - Unreachable: no open endpoint of this fabric has the name.
    pub(super) fn find(&self, name: &EndpointName) -> Result<Arc<EndpointState>> {
        let (fabric, endpoint) = parse_name(name)?;
        let found = || self.endpoints.read().get(&endpoint).and_then(Weak::upgrade);
        (fabric == self.id).then(found).flatten().ok_or_else(|| {
            Error::new(ErrorKind::Unreachable, "resolve").provider("loopback").remedy(
                "resolve the name of an open endpoint of the same `Loopback` value, or use an RDMA \
                 device to reach another process",
            )
        })
    }
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fabric").field("id", &self.id).finish_non_exhaustive()
    }
}

fn parse_name(name: &EndpointName) -> Result<(u64, u64)> {
    let refuse = |wrong: &'static str| {
        Error::new(ErrorKind::Malformed, "resolve")
            .provider("loopback")
            .context("why", wrong)
            .context("bytes", name.0.len())
            .remedy("pass all bytes of the endpoint's name unchanged")
    };
    let rest = name.0.strip_prefix(NAME_MAGIC).ok_or_else(|| refuse("magic"))?;
    let (version, rest) = rest.split_first().ok_or_else(|| refuse("length"))?;
    if *version != NAME_VERSION {
        return Err(refuse("version"));
    }
    let (fabric, rest) = rest.split_first_chunk().ok_or_else(|| refuse("length"))?;
    let endpoint: &[u8; 8] = rest.try_into().map_err(|_| refuse("length"))?;
    Ok((u64::from_le_bytes(*fabric), u64::from_le_bytes(*endpoint)))
}

fn count(counter: Option<&Counter>, result: &Result<u64>) {
    if let Some(counter) = counter {
        match result {
            Ok(_) => counter.add(1),
            Err(_) => counter.add_error(1),
        }
    }
}

pub(super) fn unreachable_peer(peer: PeerId) -> Error {
    Error::new(ErrorKind::Unreachable, "transfer")
        .provider("loopback")
        .context("peer", peer.0)
        .remedy("resolve the name of an open endpoint first: the peer is closed")
}

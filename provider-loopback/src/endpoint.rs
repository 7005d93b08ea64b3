//! Endpoints: their names, their peers, and their queues of posted requests.

#![allow(unsafe_code)]

use std::{
    any::Any,
    cell::RefCell,
    collections::{HashMap, VecDeque},
    fmt,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use hmem_core::{
    AuthKey, Error, ErrorKind, Result,
    counter::Counter,
    provider::{EndpointAttr, ProviderEndpoint},
    transfer::{Completion, CompletionKind, EndpointName, Operation, PeerId, WorkRequest},
};
use parking_lot::{Mutex, ReentrantMutex, RwLock};

use super::{
    Call,
    domain::{Domain, DomainState},
    execute::Outcome,
    keys,
    message::{Inbox, Receive},
    post::{Work, invalid},
    queue::{Cq, Queue},
};

/// What the NIC knows of an endpoint.
pub(super) struct EndpointState {
    pub(super) id: u64,
    pub(super) domain: Arc<DomainState>,
    pub(super) auth_key: AuthKey,
    pub(super) rma_event: bool,
    depth: usize,
    tx: Arc<Queue>,
    rx: Arc<Queue>,
    tx_counter: Option<Arc<Counter>>,
    rx_counter: Option<Arc<Counter>>,
    posted: Mutex<VecDeque<Work>>,
    /// How many are posted: lets progress pass by without the lock. Written under the lock of
    /// `posted`.
    waiting: AtomicUsize,
    /// Held while requests of this endpoint execute, which keeps their order.
    ///
    /// A copy engine that a request calls may close this endpoint on the same thread, so that the
    /// lock is re-entrant. The cell is borrowed while requests execute: they do not nest.
    running: ReentrantMutex<RefCell<()>>,
    pub(super) inbox: Inbox,
    peers: RwLock<Peers>,
    standing: Mutex<Standing>,
    closed: AtomicBool,
}

/// The endpoints that an endpoint resolved; a [`PeerId`] is a place in the list.
#[derive(Debug, Default)]
struct Peers {
    known: Vec<(u64, Weak<EndpointState>)>,
    by_endpoint: HashMap<u64, usize>,
}

#[derive(Debug, Default)]
struct Standing {
    closed: bool,
    /// The number of type 2A windows that are bound to the endpoint.
    bound: usize,
}

impl EndpointState {
    /// Executes what is posted; returns how many requests ended.
    #[inline]
    pub(super) fn step(self: &Arc<Self>) -> usize {
        let mut ended = 0;
        if self.waiting.load(Ordering::Acquire) > 0
            && let Some(running) = self.running.try_lock()
            && let Ok(_executing) = running.try_borrow_mut()
        {
            ended += self.run();
        }
        ended + self.inbox.settle(self)
    }

    fn run(self: &Arc<Self>) -> usize {
        let mut ended = 0;
        while self.waiting.load(Ordering::Acquire) > 0 {
            let next = {
                let mut posted = self.posted.lock();
                let next = posted.pop_front();
                self.waiting.store(posted.len(), Ordering::Release);
                next
            };
            let Some(work) = next else { break };
            match self.execute(&work) {
                Outcome::Done(result) => {
                    self.complete_transmit(&work, result);
                    ended += 1;
                }
                Outcome::NotReady => {
                    let mut posted = self.posted.lock();
                    posted.push_front(work);
                    self.waiting.store(posted.len(), Ordering::Release);
                    break;
                }
            }
        }
        ended
    }

    #[inline]
    fn complete_transmit(&self, work: &Work, result: Result<u64>) {
        count(self.tx_counter.as_deref(), &result);
        self.tx.push(Completion {
            context: work.context,
            kind: work.task.kind(),
            result,
            tag: None,
        });
    }

    pub(super) fn complete_receive(&self, context: u64, tag: Option<u64>, result: Result<u64>) {
        count(self.rx_counter.as_deref(), &result);
        self.rx.push(Completion { context, kind: CompletionKind::Receive, result, tag });
    }

    /// The endpoint of a peer, while it is open.
    pub(super) fn peer(&self, peer: PeerId) -> Option<Arc<Self>> {
        let found = self.peers.read().known.get(peer.0 as usize)?.1.upgrade()?;
        (!found.is_closed()).then_some(found)
    }

    #[inline]
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// The number of a resolved peer's endpoint.
    pub(super) fn peer_endpoint(&self, peer: PeerId) -> Option<u64> {
        Some(self.peers.read().known.get(peer.0 as usize)?.0)
    }

    /// Binds a type 2A window, which keeps the endpoint from being closed.
    pub(super) fn bind(&self) -> Result<()> {
        let mut standing = self.standing.lock();
        if standing.closed {
            return Err(closed("bind endpoint"));
        }
        standing.bound += 1;
        Ok(())
    }

    pub(super) fn unbind(&self) {
        self.standing.lock().bound -= 1;
    }

    fn shut(self: &Arc<Self>, force: bool) -> Result<()> {
        {
            let mut standing = self.standing.lock();
            if standing.closed {
                return Ok(());
            }
            if standing.bound > 0 && !force {
                return Err(Error::new(ErrorKind::Busy, "close endpoint")
                    .provider("loopback")
                    .context("bound", standing.bound)
                    .remedy("invalidate the type 2A windows that are bound to it first"));
            }
            standing.closed = true;
            self.closed.store(true, Ordering::Release);
        }
        self.domain.fabric.detach(self.id);
        self.domain.remove_endpoint(self.id);
        // Waits for a request that another thread executes.
        let _running = self.running.lock();
        let canceled = {
            let mut posted = self.posted.lock();
            self.waiting.store(0, Ordering::Release);
            std::mem::take(&mut *posted)
        };
        for work in canceled {
            self.complete_transmit(&work, Err(canceled_request()));
        }
        self.inbox.cancel(self);
        Ok(())
    }

    fn submit(&self, request: &WorkRequest<'_>) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(closed("post"));
        }
        self.domain.nic.config.faults.enter(Call::Post)?;
        if let Operation::Receive { tag, from } = &request.operation {
            let (local, capacity) = self.local_parts(request.local)?;
            let from = match from {
                Some(peer) => Some(self.peer_endpoint(*peer).ok_or_else(|| {
                    invalid("the peer of a receive was resolved by this endpoint")
                })?),
                None => None,
            };
            let receive =
                Receive { local, capacity, tag: *tag, from, context: request.context, number: 0 };
            self.inbox.post(receive, self.depth)?;
            if self.closed.load(Ordering::Acquire) {
                // Closed meanwhile: whoever takes the receive out of the inbox completes it.
                self.inbox.cancel(self);
            }
        } else {
            let work = self.work(request)?;
            let mut posted = self.posted.lock();
            if self.closed.load(Ordering::Acquire) {
                return Err(closed("post"));
            }
            if posted.len() >= self.depth {
                return Err(full());
            }
            posted.push_back(work);
            self.waiting.store(posted.len(), Ordering::Release);
        }
        self.domain.wake.wake();
        Ok(())
    }
}

impl fmt::Debug for EndpointState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndpointState")
            .field("id", &format_args!("{:#x}", self.id))
            .field("domain", &self.domain.id)
            .field("waiting", &self.waiting)
            .field("standing", &*self.standing.lock())
            .finish_non_exhaustive()
    }
}

fn count(counter: Option<&Counter>, result: &Result<u64>) {
    if let Some(counter) = counter {
        match result {
            Ok(_) => counter.add(1),
            Err(_) => counter.add_error(1),
        }
    }
}

/// The application's handle of an endpoint.
pub(super) struct Endpoint {
    state: Arc<EndpointState>,
    /// Keeps the domain, and its progress thread, alive.
    domain: Arc<Domain>,
}

impl Endpoint {
    pub(super) fn open(domain: Arc<Domain>, attr: &EndpointAttr) -> Result<Self> {
        let queue = |cq: &dyn hmem_core::provider::CompletionQueue| {
            (cq as &dyn Any)
                .downcast_ref::<Cq>()
                .filter(|cq| Arc::ptr_eq(&cq.domain, &domain))
                .map(|cq| Arc::clone(&cq.queue))
                .ok_or_else(|| {
                    Error::new(ErrorKind::InvalidArgument, "open endpoint")
                        .provider("loopback")
                        .remedy("use completion queues of the same domain")
                })
        };
        let state = domain.state();
        let config = &state.nic.config;
        let endpoint = Arc::new(EndpointState {
            id: keys::random()?,
            domain: Arc::clone(state),
            auth_key: attr.auth_key.clone().unwrap_or_else(|| state.auth_key.clone()),
            rma_event: attr.rma_event,
            depth: attr.depth.max(1),
            tx: queue(&*attr.tx_cq)?,
            rx: queue(&*attr.rx_cq)?,
            tx_counter: attr.tx_counter.clone(),
            rx_counter: attr.rx_counter.clone(),
            posted: Mutex::new(VecDeque::with_capacity(attr.depth.clamp(1, 64))),
            waiting: AtomicUsize::new(0),
            running: ReentrantMutex::default(),
            inbox: Inbox::new(attr.depth.max(1), config.unexpected_bytes),
            peers: RwLock::default(),
            standing: Mutex::default(),
            closed: AtomicBool::new(false),
        });
        state.fabric.attach(&endpoint);
        state.add_endpoint(&endpoint);
        Ok(Self { state: endpoint, domain })
    }

    pub(super) fn state(&self) -> &Arc<EndpointState> {
        &self.state
    }
}

const NAME_MAGIC: &[u8; 4] = b"hmLE";
const NAME_VERSION: u8 = 1;

impl ProviderEndpoint for Endpoint {
    /// Magic, version, fabric and endpoint: 21 bytes.
    fn name(&self) -> EndpointName {
        let mut bytes = NAME_MAGIC.to_vec();
        bytes.push(NAME_VERSION);
        bytes.extend_from_slice(&self.state.domain.fabric.id.to_le_bytes());
        bytes.extend_from_slice(&self.state.id.to_le_bytes());
        EndpointName(bytes)
    }

    fn resolve(&self, name: &EndpointName) -> Result<PeerId> {
        let fabric = &self.state.domain.fabric;
        self.state.domain.nic.config.faults.enter(Call::Resolve)?;
        let (fabric_id, endpoint_id) = parse_name(name)?;
        let peer = (fabric_id == fabric.id)
            .then(|| fabric.find(endpoint_id))
            .flatten()
            .ok_or_else(|| {
                Error::new(ErrorKind::Unreachable, "resolve")
                    .provider("loopback")
                    .remedy("a loopback endpoint is found on its own fabric, while it is open")
            })?;
        let mut peers = self.state.peers.write();
        let next = peers.known.len();
        let at = *peers.by_endpoint.entry(endpoint_id).or_insert(next);
        if at == next {
            peers.known.push((endpoint_id, Arc::downgrade(&peer)));
        }
        Ok(PeerId(at as u64))
    }

    unsafe fn post(&self, request: &WorkRequest<'_>) -> Result<()> {
        self.state.submit(request)
    }

    fn close(&self) -> Result<()> {
        self.state.domain.nic.config.faults.enter(Call::CloseEndpoint)?;
        self.state.shut(false)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if let Err(error) = self.state.shut(true) {
            tracing::error!(%error, "a dropped loopback endpoint did not close");
        }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("state", &self.state)
            .field("domain", &self.domain)
            .finish()
    }
}

fn parse_name(name: &EndpointName) -> Result<(u64, u64)> {
    let refuse = |wrong: &'static str| {
        Error::new(ErrorKind::Malformed, "resolve")
            .provider("loopback")
            .context("wrong", wrong)
            .context("bytes", name.0.len())
            .remedy("pass the bytes of an endpoint's name whole and unchanged")
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

#[cold]
pub(super) fn canceled_request() -> Error {
    Error::new(ErrorKind::Canceled, "transfer")
        .provider("loopback")
        .context("why", "its endpoint was closed")
}

#[cold]
fn closed(operation: &'static str) -> Error {
    Error::new(ErrorKind::BadState, operation)
        .provider("loopback")
        .context("why", "the endpoint is closed")
}

#[cold]
pub(super) fn full() -> Error {
    Error::new(ErrorKind::Again, "post")
        .provider("loopback")
        .remedy("as many requests are outstanding as the endpoint was opened for: read completions")
}

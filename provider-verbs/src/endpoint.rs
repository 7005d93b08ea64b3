//! Endpoints: one reliable connection each, and what is outstanding on it.

use std::{
    any::Any,
    fmt,
    ops::Range,
    sync::{Arc, atomic::Ordering},
};

use hmem_core::{
    Error, ErrorKind, Result,
    counter::Counter,
    provider::{CompletionQueue, EndpointAttr, ProviderEndpoint},
    transfer::{Completion, CompletionKind, EndpointName, PeerId, WorkRequest},
};
use parking_lot::{Mutex, MutexGuard};

use super::{
    completion::{canceled, status_error},
    connect::{PeerName, QueuePair},
    domain::DomainState,
    post::Scratch,
    queue::{CqState, Queue},
    staged::{Lanes, Token},
    sys::{QpState, Wc, WcStatus},
};

/// The one peer of an endpoint.
const PEER: PeerId = PeerId(0);

/// What outlives the application's handle while completions are on their way.
pub(super) struct EndpointState {
    pub(super) domain: Arc<DomainState>,
    pub(super) tx: Arc<CqState>,
    pub(super) rx: Arc<CqState>,
    tx_counter: Option<Arc<Counter>>,
    rx_counter: Option<Arc<Counter>>,
    number: u32,
    pub(super) lanes: Lanes,
    inner: Mutex<Inner>,
}

pub(super) struct Inner {
    /// `None` once closed.
    pub(super) pair: Option<QueuePair>,
    peer: Option<PeerName>,
    /// A request failed since the connection was made.
    failed: bool,
    epoch: u16,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Generations from the first one on are those of this endpoint's requests, up to the next one.
    generations: Range<u32>,
    pub(super) sends: u32,
    /// Of those, messages: they end when the peer has a receive for them.
    messages: u32,
    pub(super) receives: u32,
    /// Type 2 windows that were bound through it, to be freed before it.
    windows: Vec<u64>,
    pub(super) scratch: Scratch,
}

// SAFETY: the raw pointers in `scratch` point into its own vectors and are only followed under the
// lock, during a post.
unsafe impl Send for Inner {}

/// A place in the list of requests that are outstanding.
///
/// The NIC returns a request's `wr_id`: the place, and the request's generation. Each request of an
/// endpoint has another generation, and so has each request of an endpoint that was opened after
/// this one closed. A NIC may give a new queue pair the number of an old one. Late completions of
/// the old one then match no request.
#[derive(Default)]
struct Slot {
    generation: u32,
    entry: Option<InFlight>,
}

/// A request that was posted.
pub(super) struct InFlight {
    pub(super) context: u64,
    pub(super) kind: CompletionKind,
    pub(super) bytes: u64,
    /// Entries of the queue that it takes.
    pub(super) requests: u32,
    /// For binds: the window, and its key before.
    pub(super) window: Option<(u64, u32)>,
    /// Whose it is, for requests of a lane.
    pub(super) owner: Option<Token>,
}

impl Inner {
    /// Notes a request and gives the number by which its completion finds it.
    pub(super) fn admit(&mut self, entry: InFlight) -> u64 {
        if entry.kind == CompletionKind::Receive {
            self.receives += entry.requests;
        } else {
            self.sends += entry.requests;
            self.messages += u32::from(entry.kind == CompletionKind::Send);
        }
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() as u32 - 1
        });
        let generation = self.generations.end;
        self.generations.end = generation.wrapping_add(1);
        self.slots[index as usize] = Slot { generation, entry: Some(entry) };
        u64::from(generation) << 32 | u64::from(index)
    }

    /// Takes a request back; `None` for one that ended before, such as the parts after the one that
    /// failed.
    pub(super) fn take(&mut self, wr_id: u64) -> Option<InFlight> {
        let index = wr_id as u32;
        let slot = self.slots.get_mut(index as usize)?;
        if slot.generation != (wr_id >> 32) as u32 {
            return None;
        }
        let entry = slot.entry.take()?;
        self.free.push(index);
        if entry.kind == CompletionKind::Receive {
            self.receives -= entry.requests;
        } else {
            self.sends -= entry.requests;
            self.messages -= u32::from(entry.kind == CompletionKind::Send);
        }
        Some(entry)
    }

    fn take_all(&mut self) -> Vec<InFlight> {
        let ids: Vec<_> = self
            .slots
            .iter()
            .enumerate()
            .filter(|(_, slot)| slot.entry.is_some())
            .map(|(index, slot)| u64::from(slot.generation) << 32 | index as u64)
            .collect();
        ids.into_iter().filter_map(|id| self.take(id)).collect()
    }

    pub(super) fn has_messages(&self) -> bool {
        self.messages > 0
    }

    pub(super) fn is_failed(&self) -> bool {
        self.failed
    }

    pub(super) fn note_failure(&mut self) {
        if !self.failed {
            self.failed = true;
            self.epoch = self.epoch.wrapping_add(1);
        }
    }

    pub(super) fn note_window(&mut self, token: u64) {
        if !self.windows.contains(&token) {
            self.windows.push(token);
        }
    }

    pub(super) fn open(&self) -> Result<&QueuePair> {
        self.pair.as_ref().ok_or_else(|| {
            Error::new(ErrorKind::BadState, "endpoint")
                .provider("verbs")
                .remedy("the endpoint is closed")
        })
    }

    /// Asks the NIC, which ends connections without a completion where this side had posted
    /// nothing.
    fn look(&mut self) -> Result<()> {
        if self.peer.is_some() && !self.failed && self.open()?.state()? != QpState::IBV_QPS_RTS {
            self.note_failure();
        }
        Ok(())
    }

    /// Connects a queue pair that is new or that [`EndpointState::flush`] has reset.
    fn connect(&mut self, peer: PeerName) -> Result<()> {
        let pair = self.open()?;
        pair.connect(&peer)?;
        tracing::debug!(
            qp = pair.number(),
            peer = peer.qpn,
            epoch = peer.epoch,
            "endpoint connected"
        );
        self.peer = Some(peer);
        self.failed = false;
        Ok(())
    }
}

impl EndpointState {
    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Turns a work completion of this endpoint into the request that it ends.
    pub(super) fn complete(&self, wc: &Wc) -> Option<Completion> {
        let (entry, failed_before) = {
            let mut inner = self.inner.lock();
            let failed_before = inner.failed;
            if wc.status != WcStatus::IBV_WC_SUCCESS {
                inner.note_failure();
            }
            let entry = inner.take(wc.wr_id)?;
            // A window that is no more bound need not be freed with the endpoint.
            let unbound = (wc.status == WcStatus::IBV_WC_SUCCESS)
                == (entry.kind == CompletionKind::InvalidateWindow);
            if let Some((token, _)) = entry.window.filter(|_| unbound) {
                inner.windows.retain(|bound| *bound != token);
            }
            (entry, failed_before)
        };
        let result = if wc.status == WcStatus::IBV_WC_SUCCESS {
            let received = entry.kind == CompletionKind::Receive;
            Ok(if received { u64::from(wc.byte_len) } else { entry.bytes })
        } else {
            if let Some((token, old_key)) =
                entry.window.filter(|_| entry.kind == CompletionKind::BindWindow)
            {
                self.domain.windows.bind_failed(token, old_key);
            }
            let mut error = status_error(wc.status, wc.vendor_err, entry.kind);
            let flushed_first = wc.status == WcStatus::IBV_WC_WR_FLUSH_ERR && !failed_before;
            if flushed_first && entry.kind == CompletionKind::BindWindow {
                // rxe flushes the bind that it refuses.
                error = Error::new(ErrorKind::AccessDenied, "bind window").provider("verbs").caused_by(error).remedy(
                    "the NIC refused the bind: range, rights, MW_BIND of the region, or a key that is still valid",
                );
            }
            Err(error)
        };
        self.end(&entry, result)
    }

    /// The completion of a request, or news for its lane.
    fn end(&self, entry: &InFlight, result: Result<u64>) -> Option<Completion> {
        match entry.owner {
            Some(token) => {
                self.lanes.tell(entry.kind, token, result);
                None
            }
            None => Some(self.finish(entry.kind, entry.context, result)),
        }
    }

    /// Ends requests that the NIC has forgotten.
    fn end_all(&self, entries: Vec<InFlight>) {
        for entry in entries {
            if let Some(completion) = self.end(&entry, Err(canceled(entry.kind))) {
                self.queue(entry.kind).push(completion);
            }
        }
    }

    /// Returns the number of the endpoint's queue pair.
    pub(super) fn number(&self) -> u32 {
        self.number
    }

    pub(super) fn queue(&self, kind: CompletionKind) -> &CqState {
        if kind == CompletionKind::Receive { &self.rx } else { &self.tx }
    }

    /// Takes everything that the NIC has completed into memory.
    pub(super) fn drain_queues(&self) -> Result<()> {
        self.tx.drain()?;
        if Arc::ptr_eq(&self.tx, &self.rx) { Ok(()) } else { self.rx.drain() }
    }

    pub(super) fn finish(
        &self,
        kind: CompletionKind,
        context: u64,
        result: Result<u64>,
    ) -> Completion {
        let receive = kind == CompletionKind::Receive;
        if let Some(counter) = if receive { &self.rx_counter } else { &self.tx_counter } {
            match &result {
                Ok(_) => counter.add(1),
                Err(_) => counter.add_error(1),
            }
        }
        Completion { context, kind, result, tag: None }
    }

    /// Connects again where both sides are here and a request failed.
    pub(super) fn recover(self: &Arc<Self>) -> Result<()> {
        if !self.domain.options.connect_in_process {
            return Ok(());
        }
        let (peer, mut failed) = {
            let mut inner = self.inner.lock();
            inner.look()?;
            (inner.peer, inner.failed)
        };
        let Some(peer) = peer else { return Ok(()) };
        if let Some(other) = self.find(&peer).filter(|_| !failed) {
            let mut other = other.inner.lock();
            failed = other.pair.is_some() && other.look().map(|()| other.failed)?;
        }
        if failed { self.connect_both(&peer).map(|_| ()) } else { Ok(()) }
    }

    /// The endpoint of a name, if it is one of this process.
    fn find(&self, peer: &PeerName) -> Option<Arc<Self>> {
        self.domain.fabric.find(|endpoint| {
            endpoint.number == peer.qpn
                && endpoint.lock().pair.as_ref().is_some_and(|pair| pair.name(0).same_peer(peer))
        })
    }

    /// Connects this side and, where it is an endpoint of this process, the other; `false` if it is
    /// not.
    fn connect_both(&self, peer: &PeerName) -> Result<bool> {
        let Some(other) = self.find(peer) else { return Ok(false) };
        if std::ptr::eq(&*other, self) {
            let mut inner = self.inner.lock();
            let own = inner.open()?.name(inner.epoch);
            self.flush(&mut inner)?;
            inner.connect(own)?;
            return Ok(true);
        }
        // In the order of their numbers, so that two threads that connect the same two do not wait
        // for each other.
        let (mut mine, mut theirs);
        if self.number < other.number {
            mine = self.inner.lock();
            theirs = other.inner.lock();
        } else {
            theirs = other.inner.lock();
            mine = self.inner.lock();
        }
        let own = mine.open()?.name(mine.epoch);
        let name = theirs.open()?.name(theirs.epoch);
        self.flush(&mut mine)?;
        other.flush(&mut theirs)?;
        mine.connect(name)?;
        theirs.connect(own)?;
        Ok(true)
    }

    /// Resets the queue pair and ends what was outstanding.
    ///
    /// The NIC may use the memory of a request until the reset. So no request ends before the
    /// reset, and no staging buffer is released before it.
    fn flush(&self, inner: &mut Inner) -> Result<()> {
        if inner.peer.is_none() {
            // Receives posted in INIT stay where they are.
            return Ok(());
        }
        let pair = inner.open()?;
        pair.to_error()?;
        pair.reset()?;
        self.end_all(inner.take_all());
        self.lanes.cancel();
        Ok(())
    }

    fn close(&self) -> Result<()> {
        if self.inner.lock().pair.is_none() {
            return Ok(());
        }
        self.drain_queues()?;
        let inner = self.inner.lock();
        if inner.windows.iter().any(|token| self.domain.windows.holds_pair(*token)) {
            return Err(Error::new(ErrorKind::Busy, "close endpoint")
                .provider(self.domain.pd.device.nic().to_string())
                .remedy("invalidate or free the type 2A windows bound through it first"));
        }
        self.tear_down(inner);
        Ok(())
    }

    /// Destroys the queue pair, with the windows that were bound through it, and then ends what was
    /// outstanding.
    fn tear_down(&self, mut inner: MutexGuard<'_, Inner>) {
        let Some(pair) = inner.pair.take() else { return };
        let (windows, left) = (std::mem::take(&mut inner.windows), inner.take_all());
        let used = inner.generations.end.wrapping_sub(inner.generations.start);
        drop(inner);
        self.domain.pd.device.generations().fetch_add(used, Ordering::Relaxed);
        self.tx.detach(self.number);
        self.rx.detach(self.number);
        // Soft-RoCE waits for a window that is bound through the queue pair until a timeout of its
        // own.
        for token in windows {
            self.domain.windows.release_bound(&self.domain, token);
        }
        drop(pair);
        self.end_all(left);
        self.shut_lanes();
        self.domain.endpoints.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for EndpointState {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::error!(%error, "an endpoint is dropped that could not be closed");
            // Its queue pair must go before its queues and its domain, which the fields hold.
            self.tear_down(self.inner.lock());
        }
    }
}

impl fmt::Debug for EndpointState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndpointState").field("qp", &self.number).finish_non_exhaustive()
    }
}

/// The application's handle of an endpoint.
#[derive(Debug)]
pub(super) struct Endpoint {
    state: Arc<EndpointState>,
}

impl Endpoint {
    pub(super) fn open(domain: &Arc<DomainState>, attr: &EndpointAttr) -> Result<Self> {
        let nic = domain.pd.device.nic();
        let refuse = |kind, why: &'static str| {
            Error::new(kind, "open endpoint").provider(nic.to_string()).remedy(why)
        };
        let queue = |queue: &dyn CompletionQueue| {
            let queue =
                (queue as &dyn Any).downcast_ref::<Queue>().map(|queue| Arc::clone(&queue.state));
            queue.filter(|queue| Arc::ptr_eq(queue.device(), &domain.pd.device)).ok_or_else(|| {
                refuse(
                    ErrorKind::InvalidArgument,
                    "use completion queues of the same provider and device",
                )
            })
        };
        if attr.auth_key.as_ref().is_some_and(|key| !key.0.is_empty()) {
            return Err(refuse(
                ErrorKind::Unsupported,
                "verbs has no authorization keys: use another domain",
            ));
        }
        let (tx, rx) = (queue(&*attr.tx_cq)?, queue(&*attr.rx_cq)?);
        let pair = QueuePair::create(&domain.pd, (&tx, &rx), domain.port()?, attr.depth)?;
        let number = pair.number();
        let generation = domain.pd.device.generations().load(Ordering::Relaxed);
        let inner = Inner {
            pair: Some(pair),
            peer: None,
            failed: false,
            epoch: 0,
            slots: Vec::new(),
            free: Vec::new(),
            generations: generation..generation,
            sends: 0,
            messages: 0,
            receives: 0,
            windows: Vec::new(),
            scratch: Scratch::default(),
        };
        let state = Arc::new(EndpointState {
            domain: Arc::clone(domain),
            tx,
            rx,
            tx_counter: attr.tx_counter.clone(),
            rx_counter: attr.rx_counter.clone(),
            number,
            lanes: Lanes::default(),
            inner: Mutex::new(inner),
        });
        state.tx.attach(number, &state);
        state.rx.attach(number, &state);
        domain.endpoints.fetch_add(1, Ordering::Relaxed);
        domain.fabric.add(&state);
        Ok(Self { state })
    }
}

impl ProviderEndpoint for Endpoint {
    /// Its bytes change after a failed completion, so that the peer's `resolve` knows to connect
    /// anew.
    fn name(&self) -> EndpointName {
        let mut inner = self.state.lock();
        if let Err(error) = inner.look() {
            tracing::debug!(%error, "the state of an endpoint is not known");
        }
        match inner.open() {
            Ok(pair) => pair.name(inner.epoch).encode(),
            Err(_) => EndpointName(Vec::new()),
        }
    }

    fn resolve(&self, name: &EndpointName) -> Result<PeerId> {
        let peer = PeerName::decode(name)?;
        {
            let mut inner = self.state.lock();
            inner.look()?;
            if let Some(old) = inner.peer {
                if !old.same_peer(&peer) {
                    return Err(Error::new(ErrorKind::Busy, "resolve")
                        .provider(self.state.domain.pd.device.nic().to_string())
                        .remedy("a verbs endpoint is one connection (RC): open another for another peer"));
                }
                if old.epoch == peer.epoch && !inner.failed {
                    return Ok(PEER);
                }
            }
        }
        if self.state.domain.options.connect_in_process && self.state.connect_both(&peer)? {
            return Ok(PEER);
        }
        let mut inner = self.state.lock();
        self.state.flush(&mut inner)?;
        inner.connect(peer)?;
        Ok(PEER)
    }

    unsafe fn post(&self, request: &WorkRequest<'_>) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.state.post(request) }
    }

    fn close(&self) -> Result<()> {
        self.state.close()
    }
}

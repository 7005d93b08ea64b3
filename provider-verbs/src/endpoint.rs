//! Endpoint handles, with one reliable connection each, and completion queue handles.

#![allow(unsafe_code, reason = "implements the trait, which posts by address")]

use std::{
    any::Any,
    collections::HashSet,
    fmt, mem,
    os::fd::BorrowedFd,
    ptr,
    sync::{Arc, Weak, atomic::Ordering},
    time::{Duration, Instant},
};

use hmem_core::{
    ErrorKind, Result,
    provider::{
        CompletionChannel, CompletionQueue, EndpointAttr, MANUAL_WAIT, ProviderEndpoint,
        WindowEvent,
    },
    random::random_u64,
    transfer::{Completion, CompletionKind, EndpointName, Operation, PeerId, WorkRequest},
};
use parking_lot::{Mutex, MutexGuard};

use super::{
    completion::canceled,
    connection::QueuePair,
    device::OpenDevice,
    domain_state::DomainState,
    in_flight::{Arrival, Awaited, InFlight, RequestOwner, WorkRequests},
    peer_name::PeerName,
    port::Port,
    post::{PostState, Poster},
    queue::{CqState, Queues},
    split::Span,
    staged::{ActiveLanes, Lanes},
    window::BIND_TIMEOUT,
};

/// A completion queue that the application opened.
pub(super) struct Queue {
    /// The domain that opened the queue. The reference identifies the domain, and does not keep it
    /// open.
    domain: Weak<DomainState>,
    state: Arc<CqState>,
    active: Arc<ActiveLanes>,
    fabric: Arc<Fabric>,
}

impl Queue {
    pub(super) fn open(
        domain: &Arc<DomainState>,
        (active, fabric): (&Arc<ActiveLanes>, &Arc<Fabric>),
        depth: usize,
    ) -> Result<Self> {
        let state = Arc::new(CqState::create(&domain.pd.device, depth)?);
        domain.add_queue(&state.ready);
        active.add_queue(&state.ready);
        let (active, fabric) = (Arc::clone(active), Arc::clone(fabric));
        Ok(Self { domain: Arc::downgrade(domain), state, active, fabric })
    }
}

impl CompletionQueue for Queue {
    fn read(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize> {
        self.state.cq.device.check_process("read completions")?;
        self.active.progress();
        if self.state.cq.device.life.record.is_lost() {
            self.fabric.abandon(&self.state.cq.device);
            return self.state.read_rest(out, max);
        }
        self.state.read(out, max)
    }

    fn wait(&self, out: &mut Vec<Completion>, max: usize, timeout: Duration) -> Result<usize> {
        let deadline = Instant::now().checked_add(timeout);
        let mut turn = None;
        loop {
            let count = self.read(out, max)?;
            if count > 0 || max == 0 {
                return Ok(count);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                self.state.check_open()?;
                return Ok(0);
            }
            if turn.is_none() {
                turn = self.state.turn(deadline);
                // Another thread may have stored completions meanwhile.
                continue;
            }
            if self.state.arm()? {
                let by_call = !self.state.has_channel() || self.active.need_calls(&self.state);
                let slice = left.map_or(MANUAL_WAIT, |left| left.min(MANUAL_WAIT));
                self.state.sleep(if by_call { Some(slice) } else { left })?;
            }
        }
    }

    fn channel(&self) -> Option<&dyn CompletionChannel> {
        self.state.has_channel().then_some(self as _)
    }
}

impl CompletionChannel for Queue {
    fn fd(&self) -> Result<BorrowedFd<'_>> {
        self.state.fd()
    }

    fn arm(&self) -> Result<bool> {
        self.state.cq.device.check_process("arm a completion channel")?;
        self.active.progress();
        // A staged transfer that needs calls after this check makes the fd readable.
        Ok(self.state.arm()? && !self.active.need_calls(&self.state))
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("cq", &self.state.cq).finish_non_exhaustive()
    }
}

/// The endpoints of one provider in this process. If
/// [`Builder::connect_in_process`](super::Builder::connect_in_process) is set, an endpoint searches
/// for its peer among them.
#[derive(Debug, Default)]
pub(super) struct Fabric {
    endpoints: Mutex<Vec<Weak<Endpoint>>>,
}

impl Fabric {
    fn add(&self, endpoint: &Arc<Endpoint>) {
        let mut endpoints = self.endpoints.lock();
        endpoints.retain(|endpoint| endpoint.strong_count() > 0);
        endpoints.push(Arc::downgrade(endpoint));
    }

    /// Closes all endpoints of a lost device and ends their requests, as [`Endpoint::abandon`] does
    /// for one endpoint.
    #[cold]
    pub(super) fn abandon(&self, device: &Arc<OpenDevice>) {
        let alive: Vec<_> = self.endpoints.lock().iter().filter_map(Weak::upgrade).collect();
        let own = |endpoint: &&Arc<Endpoint>| Arc::ptr_eq(&endpoint.domain.pd.device, device);
        for endpoint in alive.iter().filter(own) {
            if let Err(error) = endpoint.abandon() {
                tracing::error!(error = %error.full(), "cannot end the requests of a lost device");
            }
        }
    }

    /// Returns the endpoint that `peer` names. Returns `None` if no open endpoint of this provider
    /// in this process has the name.
    fn find(&self, peer: &PeerName) -> Option<Arc<Endpoint>> {
        let alive: Vec<_> = self.endpoints.lock().iter().filter_map(Weak::upgrade).collect();
        alive.into_iter().find(|endpoint| {
            let is_named = |name: PeerName| name.same_peer(peer);
            endpoint.poster.number == peer.qpn
                && endpoint.poster.lock().connection.name().is_ok_and(is_named)
        })
    }
}

/// An endpoint that the application opened.
pub(super) struct Endpoint {
    /// The id of the endpoint's only peer: a random number, so that the endpoint refuses the ids of
    /// other endpoints' peers.
    peer: PeerId,
    pub(super) domain: Arc<DomainState>,
    fabric: Arc<Fabric>,
    poster: Arc<Poster>,
    lanes: Arc<Lanes>,
    queues: Queues,
    /// Lock that a thread holds while it closes the endpoint, until the endpoint's requests have
    /// ended. A thread that needs several locks of the endpoint takes this lock first.
    closing: Mutex<()>,
}

impl Endpoint {
    pub(super) fn open(
        domain: &Arc<DomainState>,
        (active, fabric): (&Arc<ActiveLanes>, &Arc<Fabric>),
        attr: &EndpointAttr,
    ) -> Result<Arc<Self>> {
        let device = &domain.pd.device;
        let refuse = |kind, why: &'static str| device.refuse(kind, "open endpoint", why);
        let queue = |queue: &dyn CompletionQueue| {
            let queue = (queue as &dyn Any).downcast_ref::<Queue>();
            let own = queue.filter(|queue| Weak::as_ptr(&queue.domain) == Arc::as_ptr(domain));
            own.map(|queue| Arc::clone(&queue.state)).ok_or_else(|| {
                let why = "use completion queues that the endpoint's domain opened";
                refuse(ErrorKind::InvalidArgument, why)
            })
        };
        if attr.auth_key.as_ref().is_some_and(|key| !key.0.is_empty()) {
            let why = "use another domain: verbs has no authorization keys";
            return Err(refuse(ErrorKind::Unsupported, why));
        }
        let peer = PeerId(random_u64("verbs")?);
        let queues = Queues { tx: queue(&*attr.tx_cq)?, rx: queue(&*attr.rx_cq)? };
        let port = Port::find(device, domain.options.port)?;
        let pair = QueuePair::create(&domain.pd, (&queues.tx.cq, &queues.rx.cq), port, attr.depth)?;
        let rooms = (&queues.tx.cq.room, &queues.rx.cq.room);
        let poster = Arc::new(Poster::new(domain, pair, attr, rooms));
        queues.attach(&poster);
        domain.endpoints.fetch_add(1, Ordering::Relaxed);
        let lanes = Arc::new(Lanes::new(&poster, &queues, active));
        let (domain, fabric) = (Arc::clone(domain), Arc::clone(fabric));
        let closing = Mutex::default();
        let endpoint = Arc::new(Self { peer, domain, fabric, poster, lanes, queues, closing });
        endpoint.fabric.add(&endpoint);
        Ok(endpoint)
    }

    /// Reconnects this endpoint and its peer after a failure of their connection. Does nothing
    /// unless the option `connect_in_process` is set and [`Fabric::find`] finds the peer.
    fn recover(&self) -> Result<()> {
        if !self.domain.options.connect_in_process {
            return Ok(());
        }
        let (peer, mut failed) = {
            let connection = &mut self.poster.lock().connection;
            connection.refresh()?;
            (connection.peer(), connection.has_failed())
        };
        let Some(peer) = peer else { return Ok(()) };
        if let Some(other) = self.fabric.find(&peer).filter(|_| !failed) {
            let other = &mut other.poster.lock().connection;
            failed = other.is_open() && other.refresh().map(|()| other.has_failed())?;
        }
        if failed { self.connect_both(&peer).map(drop) } else { Ok(()) }
    }

    /// Connects this endpoint and `peer` to each other. Returns false if [`Fabric::find`] does not
    /// find `peer`.
    fn connect_both(&self, peer: &PeerName) -> Result<bool> {
        let Some(other) = self.fabric.find(peer) else { return Ok(false) };
        self.store_completions()?;
        if ptr::eq(&*other, self) {
            let own = self.poster.lock().connection.name()?;
            self.connect(own)?;
            return Ok(true);
        }
        other.store_completions()?;
        let connected = {
            let (mut mine, mut theirs) = lock_both(&self.poster, &other.poster);
            self.connect_locked(&mut mine, (&other, &mut theirs))
        };
        connected.and(self.settle_reset()).and(other.settle_reset()).map(|()| true)
    }

    /// Resets the queue pairs of this endpoint and of `other`, and connects them to each other.
    fn connect_locked(
        &self,
        mine: &mut PostState,
        (other, theirs): (&Self, &mut PostState),
    ) -> Result<()> {
        let own = mine.connection.name()?;
        let name = theirs.connection.name()?;
        // Both sides may refuse the reset, so both are asked before one of them is reset.
        self.check_reset(mine)?;
        other.check_reset(theirs)?;
        self.flush(mine)?;
        other.flush(theirs)?;
        mine.connection.connect(name)?;
        theirs.connection.connect(own)
    }

    /// Resets the queue pair and connects it to `peer`. The caller has called
    /// [`Endpoint::store_completions`].
    fn connect(&self, peer: PeerName) -> Result<()> {
        let connected = {
            let mut state = self.poster.lock();
            self.flush(&mut state).and_then(|()| state.connection.connect(peer))
        };
        connected.and(self.settle_reset())
    }

    /// Reads the completions of both queues from the NIC and stores them for the application.
    /// Callers of [`Endpoint::flush`] first call this method, because `flush` ends all requests
    /// that have no stored completion as cancelled. So a request that the NIC has executed keeps
    /// its result, and no received message is lost.
    ///
    /// Does nothing if the endpoint was never connected. The caller must not hold the lock of the
    /// poster.
    fn store_completions(&self) -> Result<()> {
        if self.poster.lock().connection.peer().is_none() {
            return Ok(());
        }
        let drained = self.queues.drain();
        self.queues.ring();
        drained
    }

    /// Resets the queue pair, after which the NIC no longer uses the memory of the requests in
    /// flight, and then completes them as canceled. Does nothing if the endpoint was never
    /// connected.
    ///
    /// A work completion of a canceled request may still be in the NIC's queue.
    /// [`Poster::complete`] ignores that completion. Afterwards the caller must unlock `state`, and
    /// then call [`Endpoint::settle_reset`].
    ///
    /// # Errors
    /// - Busy: a type 2A window is bound through the queue pair.
    /// - BadState: the endpoint is closed.
    /// - The driver's error.
    fn flush(&self, state: &mut PostState) -> Result<()> {
        self.check_reset(state)?;
        if state.connection.reset()? {
            self.end_all(state.requests.drop_all());
            self.lanes.cancel();
        }
        Ok(())
    }

    /// Checks that no type 2A window is bound through the queue pair, because such a window forbids
    /// the reset that [`Endpoint::flush`] makes. Does nothing if the endpoint was never connected.
    fn check_reset(&self, state: &PostState) -> Result<()> {
        match state.connection.peer() {
            Some(_) => self.check_windows(state, WindowEvent::ResetQueuePair, "connect"),
            None => Ok(()),
        }
    }

    /// Completes the canceled requests in the lanes (queues of staged transfers), and calls
    /// [`Endpoint::release_stale`].
    fn settle_reset(&self) -> Result<()> {
        self.lanes.step_all();
        self.release_stale()
    }

    /// Releases the completion queue entries of the requests that a reset or the destruction of the
    /// queue pair has dropped. First reads the completions that the NIC may have written for these
    /// requests. The caller must not hold the lock of a poster.
    ///
    /// After an error the requests keep their entries until the next call.
    fn release_stale(&self) -> Result<()> {
        let stale = self.poster.lock().requests.take_stale();
        if stale == WorkRequests::default() {
            return Ok(());
        }
        let drained = self.queues.drain();
        // The drain may have stored completions of other endpoints.
        self.queues.ring();
        match drained {
            Ok(()) => self.poster.release(stale),
            Err(_) => self.poster.lock().requests.put_back_stale(stale),
        }
        drained
    }

    /// Checks that the windows of the queue pair permit `event`, which is the reset or the
    /// destruction of the queue pair.
    ///
    /// # Errors
    /// Busy: a type 2A window is bound through the queue pair, or a bind in flight may bind one.
    fn check_windows(
        &self,
        state: &PostState,
        event: WindowEvent,
        operation: &'static str,
    ) -> Result<()> {
        let windows = &self.domain.windows;
        let checked =
            self.windows(state).into_iter().try_for_each(|token| windows.check_bound(token, event));
        checked.map_err(|rule| {
            rule.refuse(operation)
                .provider(self.domain.pd.device.nic.to_string())
                .context("endpoint", self.poster.number)
        })
    }

    /// Returns the tokens (handles) of the windows that are bound through the queue pair, or that a
    /// bind in flight may bind.
    fn windows(&self, state: &PostState) -> HashSet<u64> {
        let mut tokens = self.domain.windows.bound_through(self.poster.number);
        tokens.extend(state.requests.bound_windows());
        tokens
    }

    /// Posts a bind or invalidation of a window and waits for its completion, at most for the bind
    /// timeout. Stores the completions of other requests for the application.
    ///
    /// # Errors
    /// - The errors of [`Poster::post`], and the error of the completion.
    /// - Driver: the request did not complete before the timeout. It may still complete later.
    pub(super) fn run_window(&self, operation: Operation<'_>) -> Result<()> {
        self.domain.pd.device.check_usable("window")?;
        self.recover()?;
        let awaited = Awaited::default();
        let request = WorkRequest { operation, local: &[], peer: self.peer, context: 0 };
        // SAFETY: window operations name no local memory.
        unsafe { self.poster.post(&request, RequestOwner::Call(Arc::clone(&awaited))) }?;
        let why = "check that the peer has posted a receive for each message before the window \
                   request: the request never completed, or the device hangs";
        self.wait_for(&awaited, "window", why)?.map(drop)
    }

    /// Sends the byte `from` to the endpoint `to`, which receives it into the byte `into`. Returns
    /// the result of the send.
    ///
    /// # Errors
    /// The reason why the send did not run, or did not end before the bind timeout.
    pub(super) fn send_byte(&self, from: Span, to: &Self, into: Span) -> Result<Result<u64>> {
        let (sent, received) = (Awaited::default(), Awaited::default());
        to.poster.post_byte(CompletionKind::Receive, into, &received)?;
        self.poster.post_byte(CompletionKind::Send, from, &sent)?;
        self.wait_for(&sent, "send", "check the device: a message to itself never completed")
    }

    /// Waits for the result of a request of the send queue, at most for the bind timeout. Stores
    /// the completions of other requests for the application.
    ///
    /// # Errors
    /// - Driver: the request did not complete before the timeout. It may still complete later.
    ///   `why` is the remedy.
    /// - The errors of [`Endpoint::abandon`], if the device is lost.
    fn wait_for(
        &self,
        awaited: &Awaited,
        operation: &'static str,
        why: &'static str,
    ) -> Result<Result<u64>> {
        let until = Instant::now() + self.domain.options.bind_timeout.unwrap_or(BIND_TIMEOUT);
        loop {
            self.queues.tx.drain()?;
            if let Some(result) = awaited.lock().take() {
                // The drain may have stored completions of other requests.
                self.queues.ring();
                return Ok(result);
            }
            let device = &self.domain.pd.device;
            device.read_events();
            if device.life.record.is_lost() {
                self.abandon()?;
            }
            if Instant::now() >= until {
                return Err(device.refuse(ErrorKind::Driver, operation, why));
            }
            std::thread::yield_now();
        }
    }

    /// On an rdma_rxe device, reads the completions of receives from the NIC and stores them for
    /// the application.
    ///
    /// A receive may report that a peer's message has invalidated a window. The driver crashes if
    /// this side invalidates that window again. After this call the provider has seen the reports,
    /// and refuses such an invalidation.
    fn note_peer_invalidations(&self) -> Result<()> {
        if self.domain.pd.device.is_rxe() {
            self.queues.rx.drain()?;
            self.queues.ring();
        }
        Ok(())
    }

    /// Returns an error if a request names a peer that [`Endpoint::resolve`] did not return.
    fn check_peer(&self, request: &WorkRequest<'_>) -> Result<()> {
        let named = match request.operation {
            Operation::Receive { from, .. } => from,
            Operation::BindWindow { .. } | Operation::InvalidateWindow { .. } => None,
            _ => Some(request.peer),
        };
        match named.filter(|named| *named != self.peer) {
            None => Ok(()),
            Some(other) => {
                let why = "name the peer that `resolve` of this endpoint returned";
                let refused = self.domain.refuse_post(ErrorKind::InvalidArgument, why);
                Err(refused.context("peer", other.0))
            }
        }
    }

    /// Completes requests as canceled, after the NIC has dropped them.
    fn end_all(&self, entries: Vec<InFlight>) {
        for entry in entries {
            if let Some(window) = &entry.window {
                self.domain.windows.forgotten(&self.domain.pd, window);
            }
            let ended = self.poster.end(&entry, Err(canceled(entry.kind)), Arrival::default());
            if let Some(completion) = ended {
                self.queues.of(entry.kind).ready.push(completion);
            }
        }
    }

    /// Closes the endpoint of a lost device, and completes its requests with the error of the loss.
    /// If another thread is closing the endpoint, waits until the requests have ended.
    ///
    /// # Errors
    /// The errors of [`Endpoint::tear_down`].
    fn abandon(&self) -> Result<()> {
        let _closing = self.closing.lock();
        if !self.poster.lock().connection.is_open() {
            return Ok(());
        }
        // Requests that had completed before the loss keep their results.
        if let Err(error) = self.queues.drain() {
            tracing::debug!(error = %error.full(), "cannot read the completions of a lost device");
        }
        self.tear_down(self.poster.lock())
    }

    /// Frees the windows bound through the queue pair and allocates new ones, destroys the queue
    /// pair, and completes the requests in flight as canceled. Does nothing on a closed endpoint.
    ///
    /// # Errors
    /// The driver's error of destroying the queue pair. The endpoint stays open, and the requests
    /// stay in flight, because the NIC may still use their memory. The windows are free, though.
    /// The next call retries.
    fn tear_down(&self, mut state: MutexGuard<'_, PostState>) -> Result<()> {
        if !state.connection.is_open() {
            return Ok(());
        }
        for token in self.windows(&state) {
            self.domain.windows.replace(&self.domain.pd, token);
        }
        // Precedes the destruction, after which a new queue pair may get the same number.
        let used = state.requests.generations_used();
        self.domain.pd.device.generations.fetch_add(used, Ordering::Relaxed);
        state.connection.destroy()?;
        let left = state.requests.drop_all();
        drop(state);
        self.queues.detach(&self.poster);
        if let Err(error) = self.release_stale() {
            tracing::error!(
                error = %error.full(),
                "cannot read the completion queues of a closed endpoint"
            );
        }
        self.end_all(left);
        self.lanes.shut();
        self.domain.endpoints.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Locks two posters, the one with the lower address first, so that two threads that lock the same
/// posters do not deadlock.
fn lock_both<'a>(
    mine: &'a Poster,
    theirs: &'a Poster,
) -> (MutexGuard<'a, PostState>, MutexGuard<'a, PostState>) {
    if ptr::from_ref(mine) < ptr::from_ref(theirs) {
        let mine = mine.lock();
        (mine, theirs.lock())
    } else {
        let theirs = theirs.lock();
        (mine.lock(), theirs)
    }
}

impl ProviderEndpoint for Endpoint {
    /// Returns the endpoint's name, which changes after a failure of the connection: a peer that
    /// resolves the new name connects again. The name is empty if the endpoint is closed, and in a
    /// forked child.
    fn name(&self) -> EndpointName {
        if self.domain.pd.device.is_inherited() {
            return EndpointName(Vec::new());
        }
        let connection = &mut self.poster.lock().connection;
        if let Err(error) = connection.refresh() {
            tracing::debug!(%error, "cannot query the state of an endpoint");
        }
        connection.name().map_or(EndpointName(Vec::new()), |name| name.encode())
    }

    fn resolve(&self, name: &EndpointName) -> Result<PeerId> {
        self.domain.pd.device.check_usable("resolve")?;
        let peer = PeerName::decode(name)?;
        {
            let connection = &mut self.poster.lock().connection;
            connection.refresh()?;
            if let Some(old) = connection.peer() {
                if !old.same_peer(&peer) {
                    let why =
                        "a verbs endpoint is one connection (RC): open another for another peer";
                    return Err(self.domain.pd.device.refuse(ErrorKind::Busy, "resolve", why));
                }
                if old.epoch == peer.epoch && !connection.has_failed() {
                    return Ok(self.peer);
                }
            }
        }
        if self.domain.options.connect_in_process && self.connect_both(&peer)? {
            return Ok(self.peer);
        }
        self.store_completions()?;
        self.connect(peer)?;
        Ok(self.peer)
    }

    /// Resets the queue pair and connects it to its peer again. The last known name of the peer is
    /// enough: the peer's new name differs only in the number of failures, and no attribute of the
    /// queue pair depends on that number.
    fn reconnect(&self) -> Result<()> {
        self.domain.pd.device.check_usable("reconnect")?;
        let peer = {
            let connection = &self.poster.lock().connection;
            connection.open()?;
            connection.peer()
        };
        let peer = peer.ok_or_else(|| {
            let why = "resolve the peer first: the endpoint was never connected";
            self.domain.pd.device.refuse(ErrorKind::BadState, "reconnect", why)
        })?;
        if self.domain.options.connect_in_process && self.connect_both(&peer)? {
            return Ok(());
        }
        self.store_completions()?;
        self.connect(peer)
    }

    unsafe fn post(&self, request: &WorkRequest<'_>) -> Result<()> {
        self.domain.pd.device.check_usable("post")?;
        self.check_peer(request)?;
        self.recover()?;
        if self.lanes.takes(request) {
            return self.lanes.post(request);
        }
        if matches!(request.operation, Operation::InvalidateWindow { .. }) {
            self.note_peer_invalidations()?;
        }
        // SAFETY: this function has the contract of `Poster::post`.
        unsafe { self.poster.post(request, RequestOwner::Application) }
    }

    /// Closes the endpoint. Does nothing if the endpoint is closed, and in a forked child.
    ///
    /// # Errors
    /// - Busy: a type 2A window is bound through the queue pair.
    /// - The driver's error of reading the completion queues.
    /// - The errors of [`Endpoint::tear_down`].
    fn close(&self) -> Result<()> {
        let device = &self.domain.pd.device;
        if device.is_inherited() || !self.poster.lock().connection.is_open() {
            return Ok(());
        }
        let drained = self.queues.drain();
        if device.life.record.is_lost() {
            return self.abandon();
        }
        drained?;
        let _closing = self.closing.lock();
        let state = self.poster.lock();
        self.check_windows(&state, WindowEvent::DestroyQueuePair, "close endpoint")?;
        self.tear_down(state)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let Err(error) = self.close() else { return };
        tracing::error!(error = %error.full(), "cannot close a dropped endpoint");
        // The queue pair must be destroyed before the fields drop the queues and the domain.
        if let Err(error) = self.tear_down(self.poster.lock()) {
            tracing::error!(error = %error.full(), "a queue pair is leaked with its domain");
            // The NIC may still write to the completion queues and to the staging buffers. The
            // lanes own both through their queues and their poster.
            mem::forget(Arc::clone(&self.lanes));
        }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("qp", &self.poster.number).finish_non_exhaustive()
    }
}

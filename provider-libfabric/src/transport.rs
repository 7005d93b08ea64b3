//! Handles of completion queues and endpoints, and the thread that makes progress.

#![allow(unsafe_code, reason = "implements the post of the trait, which names memory by address")]

use std::{
    any::Any,
    fmt,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use hmem_core::{
    Errno, Error, ErrorKind, Result,
    provider::{CompletionQueue, EndpointAttr, MANUAL_WAIT, ProviderEndpoint},
    transfer::{Completion, EndpointName, PeerId, WorkRequest},
};
use parking_lot::Mutex;

use super::{
    endpoint_state::{EndpointState, Peer},
    engine::Engine,
    hub::Hub,
    peer_name::PeerName,
    plan::refuse,
    queue::Queue,
    settings::EndpointPointer,
};

/// The pause of the progress thread after a pass in which no request ended.
const IDLE: Duration = Duration::from_micros(200);

/// The endpoints of a domain, with the state that they share.
pub(super) struct Transport {
    /// The endpoints and their requests. Declared first, so that it is dropped before `hub`.
    engine: Mutex<Engine>,
    pub(super) hub: Hub,
    /// The name of libfabric's provider.
    provider: String,
    /// Tells the progress thread to end. `None` without such a thread.
    stop: Option<Arc<AtomicBool>>,
    /// The progress thread, until [`Self::close`] waits for its end.
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Transport {
    /// Creates a value without endpoints. Starts a thread that makes progress if `thread` is true.
    pub(super) fn start(hub: Hub, provider: String, thread: bool) -> Result<Arc<Self>> {
        let stop = thread.then(Arc::<AtomicBool>::default);
        let (engine, handle) = (Mutex::default(), Mutex::default());
        let this = Arc::new(Self { engine, hub, provider, stop: stop.clone(), thread: handle });
        if let Some(stop) = stop {
            let weak = Arc::downgrade(&this);
            let run = move || {
                while !stop.load(Ordering::Acquire) {
                    let Some(this) = weak.upgrade() else { return };
                    let ended = this.engine.lock().progress(&this.hub);
                    drop(this);
                    if ended == 0 {
                        thread::sleep(IDLE);
                    }
                }
            };
            let name = "hmem-libfabric".to_owned();
            let spawned = thread::Builder::new().name(name).spawn(run).map_err(|error| {
                Error::os(Errno::of(&error), "spawn progress thread").provider("libfabric")
            })?;
            *this.thread.lock() = Some(spawned);
        }
        Ok(this)
    }

    pub(super) fn has_thread(&self) -> bool {
        self.stop.is_some()
    }

    fn check(&self, operation: &'static str) -> Result<()> {
        self.hub.open.process.check(operation)
    }

    pub(super) fn progress(&self) -> Result<usize> {
        self.check("progress")?;
        let mut engine = self.engine.lock();
        let ended = engine.progress(&self.hub);
        engine.take_failure().map_or(Ok(ended), Err)
    }

    /// Waits until no request uses the region with this token, and calls `close` before another
    /// request can be posted.
    pub(super) fn release<T>(&self, token: u64, close: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut engine = self.engine.lock();
        engine.release(&self.hub, token)?;
        close()
    }

    pub(super) fn endpoints(&self) -> u64 {
        self.engine.lock().endpoints.len() as u64
    }

    /// Closes all endpoints, for the end of the domain. Waits for the end of the progress thread,
    /// which uses the domain, unless this is that thread.
    pub(super) fn close(&self) {
        if let Some(stop) = &self.stop {
            stop.store(true, Ordering::Release);
        }
        let thread = self.thread.lock().take();
        if let Some(thread) = thread.filter(|own| own.thread().id() != thread::current().id())
            && thread.join().is_err()
        {
            tracing::error!("the progress thread has panicked");
        }
        let mut engine = self.engine.lock();
        engine.closed = true;
        let ids: Vec<_> = engine.endpoints.keys().copied().collect();
        for id in ids {
            if let Err(error) = engine.close(&self.hub, id) {
                tracing::error!(error = %error.full(), "an endpoint stays open");
            }
        }
    }

    pub(super) fn open_cq(self: &Arc<Self>, depth: usize) -> Result<Arc<dyn CompletionQueue>> {
        self.check("open completion queue")?;
        let queue = Arc::new(Queue::new(depth.max(1)));
        let (transport, process) = (Arc::downgrade(self), self.hub.open.process);
        Ok(Arc::new(Cq { queue, transport, process }))
    }

    pub(super) fn open_endpoint(
        self: &Arc<Self>,
        attr: &EndpointAttr,
    ) -> Result<Arc<dyn ProviderEndpoint>> {
        const OPEN: &str = "open endpoint";
        self.check(OPEN)?;
        let refuse = |kind, why: &'static str| {
            Error::new(kind, OPEN).provider(self.hub.attr().nic.to_string()).remedy(why)
        };
        if attr.auth_key.as_ref().is_some_and(|key| !key.0.is_empty()) {
            let why = "open the endpoint without an authorization key: libfabric's endpoints have \
                       that of their domain";
            return Err(refuse(ErrorKind::Unsupported, why));
        }
        let queue = |cq: &dyn CompletionQueue| {
            let cq = (cq as &dyn Any).downcast_ref::<Cq>();
            let own = cq.filter(|cq| Weak::ptr_eq(&cq.transport, &Arc::downgrade(self)));
            own.map(|cq| Arc::clone(&cq.queue)).ok_or_else(|| {
                refuse(ErrorKind::InvalidArgument, "use completion queues of the same domain")
            })
        };
        let queues = [queue(&*attr.tx_cq)?, queue(&*attr.rx_cq)?];
        let state = EndpointState::open(&self.hub, attr, queues, &self.provider)?;
        let (id, name) = (state.number, state.name.encode());
        let object = state.objects.endpoint.cast();
        self.engine.lock().add(state);
        Ok(Arc::new(Endpoint {
            transport: Arc::clone(self),
            id,
            name,
            object: EndpointPointer(object),
        }))
    }
}

impl Drop for Transport {
    fn drop(&mut self) {
        if self.hub.open.process.is_current() {
            self.close();
        }
    }
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transport").field("nic", &self.hub.attr().nic).finish_non_exhaustive()
    }
}

/// A handle of a completion queue. It does not keep the domain open.
#[derive(Debug)]
struct Cq {
    queue: Arc<Queue>,
    transport: Weak<Transport>,
    process: hmem_core::ProcessMark,
}

impl CompletionQueue for Cq {
    fn read(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize> {
        self.process.check("read completions")?;
        let count = self.queue.pop(out, max);
        if count > 0 || max == 0 {
            return Ok(count);
        }
        if let Some(transport) = self.transport.upgrade() {
            transport.progress()?;
        }
        Ok(self.queue.pop(out, max))
    }

    fn wait(&self, out: &mut Vec<Completion>, max: usize, timeout: Duration) -> Result<usize> {
        let deadline = Instant::now().checked_add(timeout);
        let mut pause = Duration::from_micros(1);
        loop {
            let count = self.read(out, max)?;
            let now = Instant::now();
            let left = deadline.map_or(Duration::MAX, |end| end.saturating_duration_since(now));
            if count > 0 || max == 0 || left.is_zero() {
                return Ok(count);
            }
            let open = self.transport.upgrade().is_some_and(|open| !open.engine.lock().closed);
            if !open {
                return Err(Error::new(ErrorKind::BadState, "wait for completions")
                    .provider("libfabric")
                    .context("why", "the domain of the queue is closed")
                    .remedy("drop the queue: no request completes to it any more"));
            }
            thread::sleep(pause.min(left));
            pause = (pause * 2).min(MANUAL_WAIT);
        }
    }
}

/// A handle of an endpoint.
#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) transport: Arc<Transport>,
    id: u64,
    name: EndpointName,
    /// The `fid_ep`, open while the engine has the endpoint.
    object: EndpointPointer,
}

impl Endpoint {
    /// Calls `with` with the `fid_ep`, which stays open meanwhile.
    ///
    /// # Errors
    /// - BadState: the endpoint is closed.
    /// - The error of `with`.
    pub(super) fn with_object(
        &self,
        with: impl FnOnce(EndpointPointer) -> Result<()>,
    ) -> Result<()> {
        let engine = self.transport.engine.lock();
        if !engine.endpoints.contains_key(&self.id) {
            return Err(refuse(ErrorKind::BadState, "bind an open endpoint: this one is closed"));
        }
        with(self.object)
    }
}

impl ProviderEndpoint for Endpoint {
    fn name(&self) -> EndpointName {
        self.name.clone()
    }

    fn resolve(&self, name: &EndpointName) -> Result<PeerId> {
        self.transport.check("resolve")?;
        let peer = Peer::new(PeerName::decode(name)?);
        self.transport.engine.lock().resolve(&self.transport.hub, self.id, peer)
    }

    unsafe fn post(&self, request: &WorkRequest<'_>) -> Result<()> {
        self.transport.check("post")?;
        self.transport.engine.lock().post(&self.transport.hub, self.id, request)
    }

    fn close(&self) -> Result<()> {
        if !self.transport.hub.open.process.is_current() {
            // This is a forked child. The endpoint belongs to its parent.
            return Ok(());
        }
        self.transport.engine.lock().close(&self.transport.hub, self.id)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::error!(error = %error.full(), "cannot close a dropped endpoint");
        }
    }
}

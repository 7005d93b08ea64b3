//! The application's handles of domains, completion queues and endpoints, which implement the
//! provider traits.

#![allow(unsafe_code, reason = "implements the traits, which register and post by address")]

use std::{
    any::Any,
    os::fd::BorrowedFd,
    sync::{Arc, Weak, atomic::AtomicU64},
    time::{Duration, Instant},
};

use hmem_core::{
    AddressRange, Addressing, Error, ErrorKind, Iova, RawKey, RemoteKey, Result,
    counter::Counter,
    monitor::Invalidator,
    provider::{
        self, CompletionChannel, CompletionQueue, DomainRequest, Enabling, EndpointAttr,
        EndpointBinding, LiveObjects, MANUAL_WAIT, ManualProgress, NicEvent, NicLife, NicState,
        Piece, ProgressModel, ProviderAttr, ProviderDomain, ProviderEndpoint, ProviderRegion,
        ProviderWindow, RawKeys, Refresh, RegionCounters, Registration, Revocations, StagingAccess,
        SubRegions, Transport, WindowBind, WindowStatus, WindowType,
    },
    transfer::{Completion, EndpointName, PeerId, WorkRequest},
};
use parking_lot::Mutex;

use super::{
    NicCall,
    domain::DomainState,
    endpoint::{DomainEndpoints, EndpointState, Fabric},
    execute,
    nic::Nic,
    progress::ProgressThread,
    queue::{Queue, domain_closed},
    region::Region,
    window::token_of,
};

/// A handle of a domain. The application and the domain's endpoints share it.
#[derive(Debug)]
pub(super) struct Domain {
    /// A weak reference to this value, from which [`Self::this`] makes a strong reference for each
    /// endpoint.
    me: Weak<Self>,
    /// The progress thread; `None` if the application makes progress.
    thread: Option<ProgressThread>,
    fabric: Arc<Fabric>,
    endpoints: Arc<DomainEndpoints>,
    state: Arc<DomainState>,
    /// The completion queues of the domain. Dropping the [`Domain`] closes the queues.
    queues: Mutex<Vec<Weak<Queue>>>,
    /// The number of events of the NIC that the application has read with `nic_events`.
    events_read: AtomicU64,
}

impl Domain {
    pub(super) fn open(
        fabric: &Arc<Fabric>,
        nic: &Arc<Nic>,
        request: &DomainRequest,
    ) -> Result<Arc<Self>> {
        let state = Arc::new(DomainState::open(nic, request)?);
        let endpoints = Arc::new(DomainEndpoints::default());
        let thread = match nic.attr.progress {
            ProgressModel::Thread => {
                let (endpoints, domain) = (Arc::clone(&endpoints), Arc::clone(&state));
                Some(ProgressThread::start(
                    format!("hmem-{}", nic.attr.nic.name),
                    &state.wake,
                    move || execute::step(&endpoints),
                    move || domain.close(),
                )?)
            }
            ProgressModel::Nic | ProgressModel::Manual => None,
        };
        tracing::debug!(nic = %nic.attr.nic, mode = %request.mode, "loopback domain opened");
        let fabric = Arc::clone(fabric);
        let (queues, events_read) = (Mutex::default(), AtomicU64::new(0));
        if nic.port_is_down() {
            state.record.note(NicEvent::PortDown(1));
        }
        Ok(Arc::new_cyclic(|me| Self {
            me: me.clone(),
            thread,
            fabric,
            endpoints,
            state,
            queues,
            events_read,
        }))
    }

    /// Returns true if requests execute only in calls by the application, because the domain has no
    /// progress thread.
    fn by_hand(&self) -> bool {
        self.thread.is_none()
    }

    fn this(&self) -> Arc<Self> {
        self.me.upgrade().expect("`&self` keeps the domain alive")
    }

    /// Returns the loopback endpoint behind a handle.
    ///
    /// # Errors
    /// InvalidArgument: the endpoint belongs to another domain.
    fn own<'a>(
        &self,
        endpoint: &'a dyn ProviderEndpoint,
        operation: &'static str,
    ) -> Result<&'a Endpoint> {
        let own = (endpoint as &dyn Any).downcast_ref::<Endpoint>();
        own.filter(|own| Arc::ptr_eq(&own.domain.state, &self.state)).ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, operation)
                .provider("loopback")
                .remedy("pass an endpoint of the same domain")
        })
    }

    fn enter(&self, call: NicCall) -> Result<()> {
        self.state.process.check(call.name())?;
        self.state.nic.config.faults.enter(call)
    }

    /// Like [`Domain::enter`], for a call that needs the device.
    fn enter_usable(&self, call: NicCall) -> Result<()> {
        self.state.check_nic(call.name())?;
        self.enter(call)
    }

    /// Sets the state of the NIC for this domain. The loss of the device ends all requests and all
    /// waits for completions. A lost domain stays lost.
    pub(super) fn set_nic_state(&self, state: NicState) {
        match state {
            NicState::PortDown => self.state.record.note(NicEvent::PortDown(1)),
            NicState::Lost => self.lose(),
            _ if self.nic_state() == NicState::PortDown => {
                self.state.record.note(NicEvent::PortUp(1));
            }
            _ => {}
        }
    }

    fn lose(&self) {
        if !self.state.record.lose("a test removed the device") {
            return;
        }
        for endpoint in self.endpoints.snapshot().iter() {
            if let Err(error) = endpoint.close(true) {
                tracing::error!(error = %error.full(), "cannot end the requests of a lost device");
            }
        }
        let nic = &self.state.nic.attr.nic;
        for queue in self.queues.lock().iter().filter_map(Weak::upgrade) {
            queue.end(self.state.record.loss(nic, "wait for completions"));
        }
    }

    /// Returns true if the domain is open on this NIC.
    pub(super) fn is_on(&self, nic: &Arc<Nic>) -> bool {
        Arc::ptr_eq(&self.state.nic, nic)
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        if !self.state.process.is_current() {
            // This is a forked child. The thread, the locks and the regions belong to its parent.
            std::mem::forget(self.thread.take());
            return;
        }
        match self.thread.take() {
            Some(thread) => drop(thread),
            None => self.state.close(),
        }
        self.queues
            .get_mut()
            .iter()
            .filter_map(Weak::upgrade)
            .for_each(|queue| queue.end(domain_closed()));
    }
}

// SAFETY: `deregister` returns only when no transfer uses the region (`Regions::remove`), and is
// refused while a sub-region or a window depends on it. In a forked child it does nothing, and no
// request of the domain executes there (`Cq`, `progress`). Each call looks its handle up in the
// NIC's table, whose tokens have a generation, so that a stale handle names no region. A transfer
// checks descriptor or key, rights and bounds against the table's entry, and holds the entry until
// its last byte has moved. Its completion comes after that.
unsafe impl ProviderDomain for Domain {
    fn attr(&self) -> &ProviderAttr {
        &self.state.nic.attr
    }

    unsafe fn register(
        &self,
        request: &Registration<'_>,
        pieces: &[Piece<'_>],
    ) -> Result<ProviderRegion> {
        self.state.process.check("register")?;
        self.state.register(request, pieces)
    }

    fn deregister(&self, region: ProviderRegion) -> Result<()> {
        if !self.state.process.is_current() {
            // This is a forked child. The registration belongs to its parent.
            return Ok(());
        }
        self.state.nic.config.faults.enter(NicCall::Deregister)?;
        self.state.deregister(token_of(region))
    }

    fn live(&self) -> LiveObjects {
        let mut live = LiveObjects::default();
        self.state.nic.regions.count(self.state.id, &mut live);
        live.windows = self.state.windows.len();
        live.mapped_keys = self.state.mapped.read().len() as u64;
        live.endpoints = self.endpoints.len();
        live.staging_buffers = self.state.pool().map_or(0, |pool| pool.held());
        live
    }

    fn transport(&self) -> Option<&dyn Transport> {
        Some(self)
    }

    fn sub_regions(&self) -> Option<&dyn SubRegions> {
        Some(self)
    }

    fn enabling(&self) -> Option<&dyn Enabling> {
        Some(self)
    }

    fn raw_keys(&self) -> Option<&dyn RawKeys> {
        Some(self)
    }

    fn refresh(&self) -> Option<&dyn Refresh> {
        Some(self)
    }

    fn windows(&self) -> Option<&dyn provider::Windows> {
        (!self.state.nic.config.windows.is_empty()).then_some(self as _)
    }

    fn region_counters(&self) -> Option<&dyn RegionCounters> {
        self.state.nic.config.region_counters.then_some(self as _)
    }

    fn endpoint_binding(&self) -> Option<&dyn EndpointBinding> {
        Some(self)
    }

    fn staging(&self) -> Option<&dyn StagingAccess> {
        self.attr().imports.staged.then_some(self as _)
    }

    fn nic_life(&self) -> Option<&dyn NicLife> {
        Some(self)
    }

    fn revocations(&self) -> Option<&dyn Revocations> {
        Some(self)
    }

    fn manual_progress(&self) -> Option<&dyn ManualProgress> {
        self.by_hand().then_some(self as _)
    }
}

impl Revocations for Domain {
    fn is_revoked(&self, region: ProviderRegion) -> bool {
        let state = &self.state;
        state.process.is_current() && state.nic.regions.is_revoked(state.id, token_of(region))
    }

    fn listen(&self, listener: Weak<dyn Invalidator>) {
        self.state.listeners.add(listener);
    }
}

impl Transport for Domain {
    fn open_cq(&self, depth: usize) -> Result<Arc<dyn CompletionQueue>> {
        self.enter_usable(NicCall::OpenCq)?;
        let queue = Arc::new(Queue::new(depth.max(1)));
        let mut queues = self.queues.lock();
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(&queue));
        drop(queues);
        let (domain, endpoints) = (Arc::clone(&self.state), Arc::clone(&self.endpoints));
        // A loss since the check above has not ended the queue.
        domain.check_nic("open completion queue")?;
        Ok(Arc::new(Cq { queue, domain, endpoints, by_hand: self.by_hand() }))
    }

    fn open_endpoint(&self, attr: &EndpointAttr) -> Result<Arc<dyn ProviderEndpoint>> {
        self.enter_usable(NicCall::OpenEndpoint)?;
        let endpoint = Arc::new(Endpoint::open(self.this(), attr)?);
        // A loss since the check above has not closed the endpoint, which dropping it does.
        self.state.check_nic("open endpoint")?;
        Ok(endpoint)
    }
}

impl SubRegions for Domain {
    fn register_sub(
        &self,
        base: ProviderRegion,
        request: &Registration<'_>,
        offset: u64,
        len: u64,
    ) -> Result<ProviderRegion> {
        self.state.process.check("register sub-region")?;
        self.state.register_sub(token_of(base), request, offset, len)
    }
}

impl Enabling for Domain {
    fn enable(&self, region: ProviderRegion) -> Result<()> {
        self.enter_usable(NicCall::Enable)?;
        let enable = |region: &Region| {
            region.enable();
            Ok(())
        };
        self.state.nic.regions.inspect(self.state.id, token_of(region), "enable", enable)
    }
}

impl RawKeys for Domain {
    fn raw_key(&self, region: ProviderRegion) -> Result<RawKey> {
        self.enter(NicCall::RawKey)?;
        self.state.raw_key(token_of(region))
    }

    fn map_raw(
        &self,
        base: Iova,
        len: u64,
        addressing: Addressing,
        raw: &RawKey,
    ) -> Result<RemoteKey> {
        self.enter_usable(NicCall::MapRaw)?;
        let number = self.state.map_raw(raw)?;
        Ok(RemoteKey::mapped(addressing, base, len, number))
    }

    fn unmap_key(&self, key: &RemoteKey) -> Result<()> {
        self.enter(NicCall::UnmapKey)?;
        if key.is_mapped() && self.state.mapped.write().remove(&key.as_u64()?).is_some() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::InvalidKey, "unmap key")
            .provider("loopback")
            .remedy("unmap each key once, in the domain that mapped it"))
    }
}

impl Refresh for Domain {
    fn refresh_pages(&self, region: ProviderRegion, ranges: &[AddressRange]) -> Result<()> {
        self.state.process.check("refresh")?;
        self.state.check_nic("refresh")?;
        self.state.refresh(token_of(region), ranges)
    }
}

impl provider::Windows for Domain {
    fn window_types(&self) -> &[WindowType] {
        &self.state.nic.config.windows
    }

    fn enforces_bounds(&self) -> bool {
        true
    }

    fn alloc_window(&self, window: WindowType) -> Result<ProviderWindow> {
        self.enter_usable(NicCall::AllocWindow)?;
        self.state.windows.alloc(window)
    }

    fn bind_window(&self, window: ProviderWindow, bind: &WindowBind) -> Result<ProviderWindow> {
        self.enter_usable(NicCall::BindWindow)?;
        self.state.windows.bind(window, bind)
    }

    fn free_window(&self, window: ProviderWindow) -> Result<()> {
        self.enter(NicCall::FreeWindow)?;
        self.state.windows.free(window)
    }

    fn window_status(&self, window: ProviderWindow) -> Result<WindowStatus> {
        self.state.process.check("window status")?;
        self.state.windows.status(window)
    }

    fn bind_window_now(
        &self,
        endpoint: &dyn ProviderEndpoint,
        window: ProviderWindow,
        bind: &WindowBind,
        tag: u8,
    ) -> Result<()> {
        self.enter_usable(NicCall::BindWindow)?;
        let endpoint = self.own(endpoint, "bind window")?;
        self.state.windows.bind_posted(window, bind, tag, &endpoint.state.life)
    }

    fn invalidate_window_now(
        &self,
        endpoint: &dyn ProviderEndpoint,
        window: ProviderWindow,
    ) -> Result<()> {
        self.enter_usable(NicCall::BindWindow)?;
        let endpoint = self.own(endpoint, "invalidate window")?;
        self.state.windows.invalidate(window, endpoint.state.id())
    }
}

impl RegionCounters for Domain {
    fn bind_counter(&self, region: ProviderRegion, counter: &Arc<Counter>) -> Result<()> {
        self.enter_usable(NicCall::BindCounter)?;
        let bind = |region: &Region| {
            region.bind_counter(counter);
            Ok(())
        };
        self.state.nic.regions.inspect(self.state.id, token_of(region), "bind counter", bind)
    }
}

impl EndpointBinding for Domain {
    fn bind_endpoint(&self, region: ProviderRegion, endpoint: &dyn ProviderEndpoint) -> Result<()> {
        self.enter_usable(NicCall::BindEndpoint)?;
        let endpoint = self.own(endpoint, "bind endpoint")?;
        self.state.bind_endpoint(token_of(region), &endpoint.state.life)
    }
}

impl NicLife for Domain {
    fn nic_state(&self) -> NicState {
        self.state.record.state()
    }

    fn nic_events(&self) -> Vec<NicEvent> {
        self.state.record.events_after(&self.events_read)
    }
}

impl StagingAccess for Domain {
    fn staging_bytes(&self) -> u64 {
        self.state.pool().map_or(0, |pool| pool.range().len())
    }
}

impl ManualProgress for Domain {
    fn progress(&self) -> Result<usize> {
        self.enter(NicCall::Progress)?;
        Ok(execute::step(&self.endpoints))
    }
}

/// A handle of a completion queue. It does not keep the domain open.
#[derive(Debug)]
struct Cq {
    queue: Arc<Queue>,
    domain: Arc<DomainState>,
    endpoints: Arc<DomainEndpoints>,
    /// True if the application makes progress, false if the domain has a progress thread.
    by_hand: bool,
}

impl CompletionQueue for Cq {
    fn read(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize> {
        self.domain.process.check(NicCall::ReadCq.name())?;
        self.domain.nic.config.faults.enter(NicCall::ReadCq)?;
        if self.by_hand {
            execute::step(&self.endpoints);
        }
        let count = self.queue.pop(out, max);
        if count == 0 && max > 0 {
            self.domain.check_nic(NicCall::ReadCq.name())?;
        }
        Ok(count)
    }

    fn wait(&self, out: &mut Vec<Completion>, max: usize, timeout: Duration) -> Result<usize> {
        self.domain.process.check("wait for completions")?;
        self.domain.nic.config.faults.enter(NicCall::ReadCq)?;
        let deadline = Instant::now().checked_add(timeout);
        if !self.by_hand {
            return self.queue.wait(out, max, deadline);
        }
        loop {
            execute::step(&self.endpoints);
            // Another thread may post a request meanwhile. This thread then executes that request
            // too.
            let soon = Instant::now() + MANUAL_WAIT;
            let until = deadline.map_or(soon, |deadline| deadline.min(soon));
            let count = self.queue.wait(out, max, Some(until))?;
            if count > 0 || max == 0 || deadline.is_some_and(|deadline| deadline <= until) {
                return Ok(count);
            }
        }
    }

    /// Returns `None` if the application makes progress. An application that sleeps on a channel
    /// would then sleep forever, because no request completes meanwhile.
    fn channel(&self) -> Option<&dyn CompletionChannel> {
        (!self.by_hand).then_some(self as _)
    }
}

impl CompletionChannel for Cq {
    fn fd(&self) -> Result<BorrowedFd<'_>> {
        self.queue.event()
    }

    fn arm(&self) -> Result<bool> {
        self.domain.process.check("arm a completion channel")?;
        self.queue.arm()
    }
}

/// A handle of an endpoint.
#[derive(Debug)]
struct Endpoint {
    state: Arc<EndpointState>,
    /// Keeps the domain, and its progress thread, alive.
    domain: Arc<Domain>,
}

impl Endpoint {
    fn open(domain: Arc<Domain>, attr: &EndpointAttr) -> Result<Self> {
        let queue = |cq: &dyn CompletionQueue| {
            (cq as &dyn Any)
                .downcast_ref::<Cq>()
                .filter(|cq| Arc::ptr_eq(&cq.domain, &domain.state))
                .map(|cq| Arc::clone(&cq.queue))
                .ok_or_else(|| {
                    Error::new(ErrorKind::InvalidArgument, "open endpoint")
                        .provider("loopback")
                        .remedy("use completion queues of the same domain")
                })
        };
        let (tx, rx) = (queue(&*attr.tx_cq)?, queue(&*attr.rx_cq)?);
        let state =
            EndpointState::open(&domain.fabric, &domain.endpoints, &domain.state, attr, tx, rx)?;
        Ok(Self { state, domain })
    }
}

impl ProviderEndpoint for Endpoint {
    fn name(&self) -> EndpointName {
        self.domain.fabric.name_of(self.state.life.id)
    }

    fn resolve(&self, name: &EndpointName) -> Result<PeerId> {
        self.domain.enter_usable(NicCall::Resolve)?;
        Ok(self.state.add_peer(&self.domain.fabric.find(name)?))
    }

    unsafe fn post(&self, request: &WorkRequest<'_>) -> Result<()> {
        self.domain.state.process.check(NicCall::Post.name())?;
        self.state.submit(request)
    }

    fn close(&self) -> Result<()> {
        if !self.domain.state.process.is_current() {
            // This is a forked child. The endpoint belongs to its parent.
            return Ok(());
        }
        self.domain.enter(NicCall::CloseEndpoint)?;
        self.state.close(false)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if !self.domain.state.process.is_current() {
            // This is a forked child. The endpoint and its locks belong to the parent.
            return;
        }
        if let Err(error) = self.state.close(true) {
            tracing::error!(error = %error.full(), "cannot close a dropped loopback endpoint");
        }
    }
}

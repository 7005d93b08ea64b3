//! The application's handles of domains, completion queues and endpoints: the calls of the provider
//! contract.

#![allow(unsafe_code)]

use std::{
    any::Any,
    fmt,
    sync::{Arc, Weak},
};

use hmem_core::{
    AddressRange, Addressing, Error, ErrorKind, Iova, RawKey, RemoteKey, Result,
    counter::Counter,
    provider::{
        self, CompletionQueue, DomainRequest, Enabling, EndpointAttr, EndpointBinding, LiveObjects,
        ManualProgress, Piece, ProgressModel, ProviderAttr, ProviderDomain, ProviderEndpoint,
        ProviderRegion, ProviderWindow, RawKeys, Refresh, RegionCounters, Registration,
        StagingAccess, SubRegions, WindowBind, WindowType,
    },
    transfer::{Completion, EndpointName, PeerId, WorkRequest},
};

use super::{
    Call,
    domain::DomainState,
    endpoint::{EndpointState, Fabric, Queue, Siblings},
    execute,
    nic::Nic,
    progress::ProgressThread,
    region::Region,
    window::token_of,
};

/// An open domain. The application, its endpoints and its queues hold it.
pub(super) struct Domain {
    me: Weak<Self>,
    thread: Option<ProgressThread>,
    fabric: Arc<Fabric>,
    siblings: Arc<Siblings>,
    state: Arc<DomainState>,
}

impl Domain {
    pub(super) fn open(
        fabric: &Arc<Fabric>,
        nic: &Arc<Nic>,
        request: &DomainRequest,
    ) -> Result<Arc<Self>> {
        let state = Arc::new(DomainState::open(nic, request)?);
        let siblings = Arc::new(Siblings::default());
        let thread = match nic.attr.progress {
            ProgressModel::Nic | ProgressModel::Manual => None,
            ProgressModel::Thread => {
                let (endpoints, domain) = (Arc::clone(&siblings), Arc::clone(&state));
                Some(ProgressThread::start(
                    format!("hmem-{}", nic.attr.nic.name),
                    &state.wake,
                    move || execute::step(&endpoints),
                    move || domain.close(),
                )?)
            }
        };
        tracing::debug!(nic = %nic.attr.nic, mode = %request.mode, "loopback domain opened");
        let fabric = Arc::clone(fabric);
        Ok(Arc::new_cyclic(|me| Self { me: me.clone(), thread, fabric, siblings, state }))
    }

    /// Returns whether the application makes progress, and not a thread.
    fn by_hand(&self) -> bool {
        self.thread.is_none()
    }

    fn this(&self) -> Arc<Self> {
        self.me.upgrade().expect("a domain in use is alive")
    }

    fn enter(&self, call: Call) -> Result<()> {
        self.state.process.check(call.operation())?;
        self.state.nic.config.faults.enter(call)
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        if !self.state.process.is_current() {
            // The thread, the locks and the regions belong to the parent.
            std::mem::forget(self.thread.take());
            return;
        }
        match self.thread.take() {
            Some(thread) => drop(thread),
            None => self.state.close(),
        }
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Domain").field("state", &self.state).finish_non_exhaustive()
    }
}

// SAFETY: every handle is looked up in the NIC's table, whose tokens carry a generation. Removing a
// region waits for the transfers that use it, and is refused while a sub-region or a window depends
// on it. A transfer checks descriptor or key, rights and bounds against the table's entry, which it
// holds until it has ended; its completion comes after.
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
            // The registration belongs to the parent, and stays.
            return Ok(());
        }
        self.enter(Call::Deregister)?;
        self.state.deregister(token_of(region))
    }

    fn open_cq(&self, depth: usize) -> Result<Arc<dyn CompletionQueue>> {
        self.enter(Call::OpenCq)?;
        Ok(Arc::new(Cq { queue: Arc::new(Queue::new(depth.max(1))), domain: self.this() }))
    }

    fn open_endpoint(&self, attr: &EndpointAttr) -> Result<Arc<dyn ProviderEndpoint>> {
        self.enter(Call::OpenEndpoint)?;
        Ok(Arc::new(Endpoint::open(self.this(), attr)?))
    }

    fn live(&self) -> LiveObjects {
        let counts = self.state.nic.regions.counts(self.state.id);
        LiveObjects {
            regions: counts.regions,
            page_registrations: counts.page_registrations,
            bytes: counts.bytes,
            windows: self.state.windows.len(),
            mapped_keys: self.state.mapped.len(),
            endpoints: self.siblings.len(),
            staging_buffers: self.state.pool().map_or(0, |pool| pool.held()),
        }
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

    fn manual_progress(&self) -> Option<&dyn ManualProgress> {
        self.by_hand().then_some(self as _)
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
        self.enter(Call::Enable)?;
        let enable = |region: &Region| {
            region.enable();
            Ok(())
        };
        self.state.nic.regions.inspect(self.state.id, token_of(region), "enable", enable)
    }
}

impl RawKeys for Domain {
    fn raw_key(&self, region: ProviderRegion) -> Result<RawKey> {
        self.enter(Call::RawKey)?;
        self.state.raw_key(token_of(region))
    }

    fn map_raw(
        &self,
        base: Iova,
        len: u64,
        addressing: Addressing,
        raw: &RawKey,
    ) -> Result<RemoteKey> {
        self.enter(Call::MapRaw)?;
        let number = self.state.mapped.map(raw, self.state.nic.attr.raw_key_size)?;
        Ok(RemoteKey::mapped(addressing, base, len, number))
    }

    fn unmap_key(&self, key: &RemoteKey) -> Result<()> {
        self.enter(Call::UnmapKey)?;
        let known = key.is_mapped() && self.state.mapped.unmap(key.as_u64()?);
        if known {
            return Ok(());
        }
        Err(Error::new(ErrorKind::InvalidKey, "unmap key")
            .provider("loopback")
            .remedy("unmap a key once, in the domain that mapped it"))
    }
}

impl Refresh for Domain {
    fn refresh_pages(&self, region: ProviderRegion, ranges: &[AddressRange]) -> Result<()> {
        self.state.process.check("refresh")?;
        self.state.refresh(token_of(region), ranges)
    }
}

impl provider::Windows for Domain {
    fn window_types(&self) -> &[WindowType] {
        &self.state.nic.config.windows
    }

    fn alloc_window(&self, window: WindowType) -> Result<ProviderWindow> {
        self.enter(Call::AllocWindow)?;
        self.state.windows.alloc(window)
    }

    fn bind_window(&self, window: ProviderWindow, bind: &WindowBind) -> Result<ProviderWindow> {
        self.enter(Call::BindWindow)?;
        self.state.windows.bind(window, bind)
    }

    fn free_window(&self, window: ProviderWindow) -> Result<()> {
        self.enter(Call::FreeWindow)?;
        self.state.windows.free(window)
    }
}

impl RegionCounters for Domain {
    fn bind_counter(&self, region: ProviderRegion, counter: &Arc<Counter>) -> Result<()> {
        self.enter(Call::BindCounter)?;
        self.state.bind_counter(token_of(region), counter)
    }
}

impl EndpointBinding for Domain {
    fn bind_endpoint(&self, region: ProviderRegion, endpoint: &dyn ProviderEndpoint) -> Result<()> {
        self.enter(Call::BindEndpoint)?;
        let endpoint = (endpoint as &dyn Any)
            .downcast_ref::<Endpoint>()
            .filter(|endpoint| Arc::ptr_eq(&endpoint.domain.state, &self.state))
            .ok_or_else(|| {
                Error::new(ErrorKind::InvalidArgument, "bind endpoint")
                    .provider("loopback")
                    .remedy("bind a region to an endpoint of its own domain")
            })?;
        self.state.bind_endpoint(token_of(region), &endpoint.state.life)
    }
}

impl StagingAccess for Domain {
    fn staging_bytes(&self) -> u64 {
        self.state.pool().map_or(0, |pool| pool.range().len())
    }
}

impl ManualProgress for Domain {
    fn progress(&self) -> Result<usize> {
        self.enter(Call::Progress)?;
        Ok(execute::step(&self.siblings))
    }
}

/// An open completion queue.
struct Cq {
    queue: Arc<Queue>,
    domain: Arc<Domain>,
}

impl CompletionQueue for Cq {
    fn read(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize> {
        self.domain.state.nic.config.faults.enter(Call::ReadCq)?;
        if self.domain.by_hand() {
            execute::step(&self.domain.siblings);
        }
        self.queue.pop(out, max)
    }
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cq").field("queue", &self.queue).finish_non_exhaustive()
    }
}

/// An open endpoint.
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
                .filter(|cq| Arc::ptr_eq(&cq.domain, &domain))
                .map(|cq| Arc::clone(&cq.queue))
                .ok_or_else(|| {
                    Error::new(ErrorKind::InvalidArgument, "open endpoint")
                        .provider("loopback")
                        .remedy("use completion queues of the same domain")
                })
        };
        let (tx, rx) = (queue(&*attr.tx_cq)?, queue(&*attr.rx_cq)?);
        let state =
            EndpointState::open(&domain.fabric, &domain.siblings, &domain.state, attr, tx, rx)?;
        Ok(Self { state, domain })
    }
}

impl ProviderEndpoint for Endpoint {
    fn name(&self) -> EndpointName {
        self.domain.fabric.name_of(self.state.life.id)
    }

    fn resolve(&self, name: &EndpointName) -> Result<PeerId> {
        self.domain.state.nic.config.faults.enter(Call::Resolve)?;
        Ok(self.state.add_peer(&self.domain.fabric.find(name)?))
    }

    unsafe fn post(&self, request: &WorkRequest<'_>) -> Result<()> {
        self.state.submit(request)
    }

    fn close(&self) -> Result<()> {
        self.domain.state.nic.config.faults.enter(Call::CloseEndpoint)?;
        self.state.close(false)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if let Err(error) = self.state.close(true) {
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

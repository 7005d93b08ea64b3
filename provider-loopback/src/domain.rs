//! A domain: its keys, its endpoints, and the calls of the provider contract.

#![allow(unsafe_code)]

use std::{
    any::Any,
    collections::HashMap,
    fmt,
    sync::{Arc, Weak},
};

use hmem_core::{
    AddressRange, Addressing, AuthKey, Error, ErrorKind, IfaceKind, Iova, MrMode, ProcessMark,
    RawKey, Registry, RemoteKey, Result,
    counter::Counter,
    provider::{
        self, CompletionQueue, DomainRequest, Enabling, EndpointAttr, EndpointBinding, LiveObjects,
        ManualProgress, Piece, ProgressModel, ProviderAttr, ProviderDomain, ProviderEndpoint,
        ProviderRegion, ProviderWindow, RawKeys, Refresh, RegionCounters, Registration,
        StagingAccess, StagingAttr, SubRegions, WindowBind, WindowType,
    },
};
use hmem_p2p::staging::Pool;
use parking_lot::{Mutex, RwLock};

use super::{
    Call, Memory,
    endpoint::{Endpoint, EndpointState},
    keys::{self, DomainKeys, RawParts, Token},
    memory::Pinner,
    nic::{Fabric, Nic},
    progress::{ProgressThread, Wake},
    queue::Cq,
    region::Region,
    window::Windows,
};

type Endpoints = Arc<[Arc<EndpointState>]>;

/// What endpoints, the progress thread and the application's handle share.
pub(super) struct DomainState {
    pub(super) fabric: Arc<Fabric>,
    pub(super) nic: Arc<Nic>,
    /// The number of the domain on its NIC.
    pub(super) id: u32,
    pub(super) mode: MrMode,
    pub(super) auth_key: AuthKey,
    pub(super) registry: Arc<Registry>,
    /// Whether any iface but the system's is there, so that local addresses have to be looked up.
    pub(super) has_devices: bool,
    pub(super) keys: DomainKeys,
    pub(super) wake: Wake,
    /// Replaced as a whole, so that progress holds no lock while it executes.
    endpoints: RwLock<Endpoints>,
    mapped: RwLock<HashMap<u64, RawParts>>,
    pub(super) windows: Windows,
    /// Where host memory is pinned.
    pub(super) pinner: Option<Pinner>,
    /// The process that opened the domain. A forked child uses nothing of the domain, since it may
    /// find any lock held by a thread that it does not have.
    process: ProcessMark,
    /// How its staging buffers are to be, and they themselves since the first staged region.
    staging: StagingAttr,
    pool: Mutex<Option<Arc<Pool>>>,
}

impl DomainState {
    /// Whether keys are the application's.
    #[inline]
    pub(super) fn requested_keys(&self) -> bool {
        !self.mode.contains(MrMode::PROV_KEY)
    }

    /// Executes what was posted to any endpoint; returns how many requests ended.
    pub(super) fn step(&self) -> usize {
        let endpoints = Arc::clone(&self.endpoints.read());
        endpoints.iter().map(|endpoint| endpoint.step()).sum()
    }

    pub(super) fn add_endpoint(&self, endpoint: &Arc<EndpointState>) {
        let mut endpoints = self.endpoints.write();
        *endpoints = endpoints.iter().chain([endpoint]).map(Arc::clone).collect();
    }

    pub(super) fn remove_endpoint(&self, id: u64) {
        let mut endpoints = self.endpoints.write();
        *endpoints =
            endpoints.iter().filter(|endpoint| endpoint.id != id).map(Arc::clone).collect();
    }

    /// Gives back what the application left behind.
    pub(super) fn close(&self) {
        self.free_all_windows();
        let tokens = self.nic.regions.tokens_of(self.id);
        if !tokens.is_empty() {
            tracing::warn!(
                regions = tokens.len(),
                "a loopback domain was dropped with regions open"
            );
            self.remove_all(tokens);
        }
        self.nic.regions.dismiss(self.id);
    }

    /// The staging buffers, allocated now if they are not yet.
    pub(super) fn staging_pool(&self) -> Result<Arc<Pool>> {
        let mut pool = self.pool.lock();
        if let Some(pool) = &*pool {
            return Ok(Arc::clone(pool));
        }
        Ok(Arc::clone(pool.insert(Pool::new(self.staging, None)?)))
    }

    fn pool(&self) -> Option<Arc<Pool>> {
        self.pool.lock().clone()
    }

    /// What a mapped key stands for.
    pub(super) fn mapped_key(&self, number: u64) -> Option<RawParts> {
        self.mapped.read().get(&number).copied()
    }
}

impl fmt::Debug for DomainState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DomainState")
            .field("nic", &self.nic.attr.nic.name)
            .field("mode", &self.mode)
            .field("auth_key", &self.auth_key)
            .finish_non_exhaustive()
    }
}

/// An open domain, as the application (and each endpoint and queue) holds it.
pub(super) struct Domain {
    me: Weak<Self>,
    thread: Option<ProgressThread>,
    state: Arc<DomainState>,
}

impl Domain {
    pub(super) fn open(
        fabric: &Arc<Fabric>,
        nic: &Arc<Nic>,
        request: &DomainRequest,
    ) -> Result<Arc<Self>> {
        let keys = DomainKeys::new(nic.attr.key_size)?;
        let pinner = match nic.config.memory {
            Memory::Follow => None,
            Memory::Pinned => Some(Pinner::new()?),
        };
        let state = Arc::new(DomainState {
            fabric: Arc::clone(fabric),
            nic: Arc::clone(nic),
            id: nic.number_domain(),
            mode: request.mode,
            auth_key: request.auth_key.clone(),
            registry: Arc::clone(&request.registry),
            has_devices: request.registry.iter().any(|iface| iface.kind() != IfaceKind::SYSTEM),
            keys,
            wake: Wake::default(),
            endpoints: RwLock::default(),
            mapped: RwLock::default(),
            windows: Windows::default(),
            pinner,
            process: ProcessMark::current()?,
            staging: request.staging,
            pool: Mutex::default(),
        });
        let thread = match nic.attr.progress {
            ProgressModel::Nic | ProgressModel::Manual => None,
            ProgressModel::Thread => Some(ProgressThread::start(&state)?),
        };
        tracing::debug!(nic = %nic.attr.nic, mode = %request.mode, "loopback domain opened");
        Ok(Arc::new_cyclic(|me| Self { me: me.clone(), thread, state }))
    }

    #[inline]
    pub(super) fn state(&self) -> &Arc<DomainState> {
        &self.state
    }

    #[inline]
    pub(super) fn by_hand(&self) -> bool {
        self.thread.is_none()
    }

    fn this(&self) -> Arc<Self> {
        self.me.upgrade().expect("a domain in use is alive")
    }

    #[inline]
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

/// The token of a region's handle.
pub(super) fn token_of(region: ProviderRegion) -> Token {
    Token::from_u64(region.token)
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
        Ok(Arc::new(Cq::new(depth, self.this())))
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
            mapped_keys: self.state.mapped.read().len() as u64,
            endpoints: self.state.endpoints.read().len() as u64,
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
        Some(self)
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
        let token = token_of(region);
        let regions = &self.state.nic.regions;
        let key = regions.inspect(self.state.id, token, "raw key", |region| Ok(region.key))?;
        Ok(keys::write_raw(
            key,
            self.state.keys.cookie(key, token),
            self.state.nic.attr.raw_key_size,
        ))
    }

    fn map_raw(
        &self,
        base: Iova,
        len: u64,
        addressing: Addressing,
        raw: &RawKey,
    ) -> Result<RemoteKey> {
        self.enter(Call::MapRaw)?;
        let parts = keys::read_raw(raw, self.state.nic.attr.raw_key_size)?;
        let mut mapped = self.state.mapped.write();
        let number = loop {
            let number = keys::random()?;
            if !mapped.contains_key(&number) {
                break number;
            }
        };
        mapped.insert(number, parts);
        Ok(RemoteKey::mapped(addressing, base, len, number))
    }

    fn unmap_key(&self, key: &RemoteKey) -> Result<()> {
        self.enter(Call::UnmapKey)?;
        let known = key.is_mapped() && self.state.mapped.write().remove(&key.as_u64()?).is_some();
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
        self.state.alloc_window(window)
    }

    fn bind_window(&self, window: ProviderWindow, bind: &WindowBind) -> Result<ProviderWindow> {
        self.enter(Call::BindWindow)?;
        self.state.bind_window(window, bind)
    }

    fn free_window(&self, window: ProviderWindow) -> Result<()> {
        self.enter(Call::FreeWindow)?;
        self.state.free_window(window)
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
            .filter(|endpoint| Arc::ptr_eq(&endpoint.state().domain, &self.state))
            .ok_or_else(|| {
                Error::new(ErrorKind::InvalidArgument, "bind endpoint")
                    .provider("loopback")
                    .remedy("bind a region to an endpoint of its own domain")
            })?;
        self.state.bind_endpoint(token_of(region), endpoint.state())
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
        Ok(self.state.step())
    }
}

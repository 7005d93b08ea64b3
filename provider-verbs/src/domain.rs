//! [`VerbsDomain`], which implements core's traits for a provider's domain.

#![allow(unsafe_code, reason = "implements the trait, which registers by address")]

use std::{
    any::Any,
    collections::hash_map::Entry,
    ffi::c_void,
    fmt,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use hmem_core::{
    Access, Addressing, Domain, ErrorKind, Iova, RawKey, RemoteKey, Result, WriteOrdering,
    monitor::Invalidator,
    provider::{
        self, Backing, CompletionQueue, CompositeKeys, DomainRequest, EndpointAttr, Features,
        LiveObjects, ManualProgress, NicEvent, NicLife, NicState, Piece, ProviderAttr,
        ProviderDomain, ProviderEndpoint, ProviderRegion, ProviderWindow, RawKeys, Registration,
        Revocations, StagingAccess, Transport, WindowBind, WindowRule, WindowStatus, WindowType,
    },
    random::random_u64,
    transfer::Operation,
};

use super::{
    access::{OptionResult, Settings, VerbsOptions},
    device::ProtectionDomain,
    domain_state::{DomainOptions, DomainState},
    endpoint::{Endpoint, Fabric, Queue},
    raw_key,
    region::{CpuAccess, Kind, PartKey, Region},
    split::Span,
    staged::ActiveLanes,
    sys::AccessFlags,
    window::BIND_TIMEOUT,
};

/// An open verbs domain, with calls that [`Domain`] does not have.
///
/// ```no_run
/// use hmem_core::Domain;
/// use hmem_provider_verbs::VerbsDomain;
///
/// # fn f(domain: &Domain) -> hmem_core::Result<()> {
/// let verbs = VerbsDomain::of(domain).expect("a domain of the verbs provider");
/// // Another crate can use the domain's keys in work requests on this protection domain.
/// println!("pd {:p}", verbs.pd());
/// # Ok(()) }
/// ```
pub struct VerbsDomain {
    pub(super) state: Arc<DomainState>,
    active: Arc<ActiveLanes>,
    fabric: Arc<Fabric>,
    /// The number of events that the device had at the last call of `nic_events`. The next call
    /// returns only later events.
    events_read: AtomicU64,
}

impl VerbsDomain {
    pub(super) fn open(
        pd: ProtectionDomain,
        options: DomainOptions,
        (active, fabric): (Arc<ActiveLanes>, Arc<Fabric>),
        request: &DomainRequest,
    ) -> Result<Self> {
        if !request.auth_key.0.is_empty() {
            let why = "open domains without authorization keys: verbs separates them by \
                       protection domains";
            return Err(pd.device.refuse(ErrorKind::Unsupported, "open domain", why));
        }
        let nic = &pd.device.nic;
        tracing::debug!(%nic, mode = %request.mode, ?options, "verbs domain opened");
        let state = Arc::new(DomainState::new(pd, options, request.staging));
        Ok(Self { state, active, fabric, events_read: AtomicU64::new(0) })
    }

    /// Returns the verbs domain behind `domain`, or `None` if another provider opened it.
    #[must_use]
    pub fn of(domain: &Domain) -> Option<&Self> {
        (domain.provider_domain() as &dyn Any).downcast_ref()
    }

    /// Returns an error in a forked child, which must not use the domain: the driver's objects
    /// belong to the parent, and a thread of the parent may have held a lock at the fork.
    fn check_process(&self, operation: &'static str) -> Result<()> {
        self.state.pd.device.check_process(operation)
    }

    /// Returns the verbs endpoint behind `endpoint`, or the error of [`WindowRule::SameDomain`] for
    /// an endpoint of another domain.
    fn own<'a>(&self, endpoint: &'a dyn ProviderEndpoint) -> Result<&'a Endpoint> {
        let own = (endpoint as &dyn Any).downcast_ref::<Endpoint>();
        own.filter(|own| Arc::ptr_eq(&own.domain, &self.state)).ok_or_else(|| {
            WindowRule::SameDomain.refuse("window").provider(self.attr().nic.to_string())
        })
    }

    /// Returns the domain's `ibv_pd`, for verbs calls of another crate. The pointer is valid as
    /// long as the domain is open.
    #[must_use]
    pub fn pd(&self) -> *mut c_void {
        self.state.pd.pd.cast()
    }

    /// Returns the domain's `ibv_context`. The pointer is valid as long as the domain is open.
    #[must_use]
    pub fn context(&self) -> *mut c_void {
        self.state.pd.device.context.cast()
    }

    /// Returns the options that a region was registered with, and for each option whether the
    /// driver may have ignored it.
    ///
    /// # Errors
    /// - InvalidArgument: the region is not open in this domain.
    /// - Busy: another thread is changing the region's rights ([`VerbsDomain::rereg`]).
    pub fn options(&self, region: ProviderRegion) -> Result<Vec<(VerbsOptions, OptionResult)>> {
        self.state.regions.with(region, "options", |region| Ok(region.options.results().collect()))
    }

    /// Returns the current access flags of a region: those of its registration, or of the last
    /// successful [`VerbsDomain::rereg`]. A staged region has none.
    ///
    /// # Errors
    /// - InvalidArgument: the region is not open in this domain.
    /// - Busy: another thread is changing the region's rights ([`VerbsDomain::rereg`]).
    pub fn flags(&self, region: ProviderRegion) -> Result<AccessFlags> {
        self.state.regions.with(region, "flags", |region| Ok(region.flags))
    }

    /// Returns the settings of a request. Adds the builder's options, and MW_BIND for the right of
    /// that name. Adds RELAXED_ORDERING for [`WriteOrdering::Relaxed`], unless the memory is
    /// staged.
    fn settings_of(&self, request: &Registration<'_>, pieces: &[Piece<'_>]) -> Settings {
        let Settings { mut options, iova } = Settings::of(request.extension);
        options |= self.state.options.options;
        if request.access.contains(Access::MW_BIND) {
            options |= VerbsOptions::MW_BIND;
        }
        // Staged memory is not registered with the NIC, so no option applies to it.
        if request.ordering == WriteOrdering::Relaxed && !staged(pieces) {
            options |= self.state.pd.device.relaxed_ordering();
        }
        Settings { options, iova }
    }

    /// Changes a region's rights in place (`ibv_rereg_mr(3)`).
    ///
    /// During the driver's call, requests that name the region fail with Busy, and a thread that
    /// closes the region or changes its rights waits. The call may change the keys of the region.
    /// So read [`VerbsMr`](super::VerbsMr) and the region's remote key again.
    ///
    /// The new rights may go beyond the promise that the caller made at registration, so the call
    /// is unsafe:
    ///
    /// ```compile_fail,E0133
    /// use hmem_core::{Access, Result, provider::ProviderRegion};
    /// use hmem_provider_verbs::VerbsDomain;
    ///
    /// fn widen(verbs: &VerbsDomain, region: ProviderRegion) -> Result<()> {
    ///     verbs.rereg(region, Access::all())
    /// }
    /// ```
    ///
    /// # Safety
    /// The caller makes the promise of [`Raw::new`](hmem_core::Raw::new) for the new rights: from
    /// now on, until the region is closed, the NIC may use the memory as `access` says.
    ///
    /// # Errors
    /// - Unsupported: libibverbs or the driver lacks the call, the device lacks atomics, or the
    ///   region is staged. The region is unchanged.
    /// - InvalidArgument: the region is not open in this domain.
    /// - BadState: this process is a forked child.
    /// - The driver's error. The remedy in the error says whether the region is still usable.
    pub unsafe fn rereg(&self, region: ProviderRegion, access: Access) -> Result<()> {
        self.state.pd.device.check_usable("ibv_rereg_mr")?;
        self.state.registrar().rereg(region, access)
    }
}

// SAFETY: the tables of the domain resolve every handle before a driver call. After `ibv_dereg_mr`
// the NIC refuses the keys of the region. A staged region is closed once its transfers have ended.
// The NIC checks key, rights and bounds of each access, and completes a request after the last
// access to the memory of the request.
unsafe impl ProviderDomain for VerbsDomain {
    fn attr(&self) -> &ProviderAttr {
        &self.state.pd.device.provider_attr
    }

    unsafe fn register(
        &self,
        request: &Registration<'_>,
        pieces: &[Piece<'_>],
    ) -> Result<ProviderRegion> {
        self.state.pd.device.check_usable("register")?;
        if !request.auth_key.0.is_empty() {
            let why = "separate peers by domains (protection domains): verbs has no authorization \
                       keys";
            return Err(self.state.pd.device.refuse(ErrorKind::Unsupported, "register", why));
        }
        let (registrar, settings) = (self.state.registrar(), self.settings_of(request, pieces));
        if staged(pieces) {
            // SAFETY: the caller follows the rules of `ProviderDomain::register`.
            return unsafe { self.state.staging.register(&registrar, request, pieces, settings) };
        }
        registrar.register(request, pieces, settings)
    }

    fn deregister(&self, region: ProviderRegion) -> Result<()> {
        self.check_process("deregister")?;
        let taken = self.state.regions.take(region)?;
        if let Kind::Staged(staged) = &taken.kind {
            self.state.staging.close(staged);
            self.active.abandon_closed();
            return Ok(());
        }
        self.state.regions.deregister(&self.state.pd, region, taken)
    }

    fn live(&self) -> LiveObjects {
        let mut live = self.state.regions.live();
        live.windows = self.state.windows.count();
        live.mapped_keys = self.state.mapped.read().len() as u64;
        live.endpoints = self.state.endpoints.load(Ordering::Relaxed);
        live.staging_buffers = self.state.staging.pool().map_or(0, |pool| pool.held());
        live
    }

    fn accepts(&self, extension: &(dyn Any + Send + Sync)) -> bool {
        extension.is::<Settings>()
    }

    fn transport(&self) -> Option<&dyn Transport> {
        Some(self)
    }

    fn composite_keys(&self) -> Option<&dyn CompositeKeys> {
        Some(self)
    }

    fn raw_keys(&self) -> Option<&dyn RawKeys> {
        Some(self)
    }

    fn windows(&self) -> Option<&dyn provider::Windows> {
        (!self.state.pd.device.window_types.is_empty()).then_some(self as _)
    }

    fn staging(&self) -> Option<&dyn StagingAccess> {
        Some(self)
    }

    fn manual_progress(&self) -> Option<&dyn ManualProgress> {
        Some(self)
    }

    fn nic_life(&self) -> Option<&dyn NicLife> {
        Some(self)
    }

    fn revocations(&self) -> Option<&dyn Revocations> {
        Some(self)
    }

    fn remedy_without(&self, missing: Features) -> Option<&'static str> {
        match missing {
            Features::SUB_REGIONS => Some(
                "verbs has no key for part of a registration: register the part by itself, or bind \
                 a memory window",
            ),
            Features::REFRESH => Some(
                "a verbs region keeps its pages: close it and register again, or use the ON_DEMAND \
                 option",
            ),
            _ => None,
        }
    }
}

impl Transport for VerbsDomain {
    fn open_cq(&self, depth: usize) -> Result<Arc<dyn CompletionQueue>> {
        self.state.pd.device.check_usable("open completion queue")?;
        Ok(Arc::new(Queue::open(&self.state, (&self.active, &self.fabric), depth)?))
    }

    fn open_endpoint(&self, attr: &EndpointAttr) -> Result<Arc<dyn ProviderEndpoint>> {
        self.state.pd.device.check_usable("open endpoint")?;
        Ok(Endpoint::open(&self.state, (&self.active, &self.fabric), attr)?)
    }
}

fn staged(pieces: &[Piece<'_>]) -> bool {
    pieces.iter().any(|piece| matches!(piece.backing, Backing::Staged { .. }))
}

impl CompositeKeys for VerbsDomain {
    fn remote_key(&self, region: ProviderRegion) -> Result<Option<RemoteKey>> {
        self.state.regions.remote_key(region)
    }
}

impl RawKeys for VerbsDomain {
    fn raw_key(&self, region: ProviderRegion) -> Result<RawKey> {
        self.state.regions.raw_key(region)
    }

    fn map_raw(
        &self,
        base: Iova,
        len: u64,
        addressing: Addressing,
        raw: &RawKey,
    ) -> Result<RemoteKey> {
        self.state.pd.device.check_usable("map raw key")?;
        let pieces: Arc<[_]> = raw_key::decode(raw)?.into();
        // Mapped keys get random numbers, so that a key of another domain matches no key of this
        // domain.
        let number = loop {
            let number = random_u64("verbs")?;
            if let Entry::Vacant(entry) = self.state.mapped.write().entry(number) {
                entry.insert(pieces);
                break number;
            }
        };
        Ok(RemoteKey::mapped(addressing, base, len, number))
    }

    fn unmap_key(&self, key: &RemoteKey) -> Result<()> {
        self.check_process("unmap key")?;
        if key.is_mapped() && self.state.mapped.write().remove(&key.as_u64()?).is_some() {
            return Ok(());
        }
        let why = "unmap each key once, in the domain that mapped it";
        Err(self.state.pd.device.refuse(ErrorKind::InvalidKey, "unmap key", why))
    }
}

impl provider::Windows for VerbsDomain {
    fn window_types(&self) -> &[WindowType] {
        &self.state.pd.device.window_types
    }

    /// Returns false for rdma_rxe, which checks an access against the bounds of the region, but not
    /// against the bounds of the window. The provider assumes that all other drivers check both, as
    /// the InfiniBand specification requires (C10-75). No verbs call reports this.
    fn enforces_bounds(&self) -> bool {
        !self.state.pd.device.is_rxe()
    }

    fn alloc_window(&self, window: WindowType) -> Result<ProviderWindow> {
        self.state.pd.device.check_usable("allocate window")?;
        self.state.windows.alloc(&self.state.pd, window)
    }

    fn bind_window(&self, window: ProviderWindow, bind: &WindowBind) -> Result<ProviderWindow> {
        self.state.pd.device.check_usable("bind window")?;
        let DomainState { pd, regions, windows, options, .. } = &*self.state;
        let timeout = options.bind_timeout.unwrap_or(BIND_TIMEOUT);
        windows.bind_type_1((pd, regions), (options.port, timeout), window, bind)
    }

    fn free_window(&self, window: ProviderWindow) -> Result<()> {
        self.check_process("free window")?;
        self.state.windows.free(&self.state.pd, window)
    }

    fn window_status(&self, window: ProviderWindow) -> Result<WindowStatus> {
        self.check_process("window status")?;
        self.state.windows.status(window)
    }

    fn bind_window_now(
        &self,
        endpoint: &dyn ProviderEndpoint,
        window: ProviderWindow,
        bind: &WindowBind,
        tag: u8,
    ) -> Result<()> {
        self.own(endpoint)?.run_window(Operation::BindWindow { window, bind: *bind, tag })
    }

    fn invalidate_window_now(
        &self,
        endpoint: &dyn ProviderEndpoint,
        window: ProviderWindow,
    ) -> Result<()> {
        if self.state.pd.device.is_rxe() {
            // The driver crashes at a second invalidation, and a peer's message may have made the
            // first one.
            return Err(WindowRule::DriverInvalidatesOnce.refuse("invalidate window"));
        }
        self.own(endpoint)?.run_window(Operation::InvalidateWindow { window })
    }
}

impl NicLife for VerbsDomain {
    fn nic_state(&self) -> NicState {
        let device = &self.state.pd.device;
        device.examine();
        if device.life.record.is_lost() {
            self.fabric.abandon(device);
        }
        device.life.record.state()
    }

    fn nic_events(&self) -> Vec<NicEvent> {
        self.state.pd.device.examine();
        self.state.pd.device.life.record.events_after(&self.events_read)
    }
}

/// No verbs call reports a revocation: a driver only makes the keys of the memory fail. So a check
/// sends a byte of each registration from one queue pair to another of this domain.
impl Revocations for VerbsDomain {
    fn is_revoked(&self, region: ProviderRegion) -> bool {
        self.state.regions.is_revoked(region)
    }

    fn check_revoked(&self, handle: ProviderRegion) -> Result<bool> {
        const OPERATION: &str = "check region";
        self.state.pd.device.check_usable(OPERATION)?;
        let regions = &self.state.regions;
        // Host pages are pinned, or follow the mapping: nobody revokes them.
        let revocable = |region: &Region| {
            let revoked = region.revoked.load(Ordering::Acquire);
            let parts = region.parts.iter().filter(|_| region.cpu == CpuAccess::None && !revoked);
            Ok((revoked, parts.map(|part| part.key).collect::<Vec<_>>()))
        };
        let (revoked, keys) = regions.with(handle, OPERATION, revocable)?;
        if keys.is_empty() || !self.refuses_any(&keys)? {
            return Ok(revoked);
        }
        regions.with(handle, OPERATION, |region| region.set_revoked(&keys, OPERATION))?;
        let ranges: Vec<_> = keys.iter().map(|key| key.range).collect();
        tracing::warn!(nic = %self.attr().nic, ?ranges, "registered memory was revoked");
        self.state.listeners.notify(&ranges);
        Ok(true)
    }

    fn listen(&self, listener: Weak<dyn Invalidator>) {
        self.state.listeners.add(listener);
    }
}

impl VerbsDomain {
    /// Sends the first byte of each registration between two endpoints. Returns true if the NIC
    /// refuses the local key of one.
    ///
    /// # Errors
    /// The reason why a byte was not sent, if it is not the local key: the link, for example.
    fn refuses_any(&self, keys: &[PartKey]) -> Result<bool> {
        let queue = self.open_cq(8)?;
        let attr = EndpointAttr { depth: 2, ..EndpointAttr::new(&queue) };
        let open = || Endpoint::open(&self.state, (&self.active, &self.fabric), &attr);
        let (from, to) = (open()?, open()?);
        from.resolve(&to.name())?;
        to.resolve(&from.name())?;
        let buffer = self.state.discard_buffer()?;
        // Shows that the two endpoints work.
        from.send_byte(buffer, &to, buffer)??;
        for key in keys {
            let byte = Span { address: key.base, len: 1, lkey: key.lkey };
            match from.send_byte(byte, &to, buffer)? {
                Ok(_) => {}
                Err(error) => {
                    let refused = match error.kind() {
                        ErrorKind::AccessDenied => true,
                        // rxe reports a refused local key as "flushed". No earlier request of this
                        // endpoint has failed, so there is no other cause.
                        ErrorKind::Canceled => self.state.pd.device.is_rxe(),
                        _ => false,
                    };
                    tracing::debug!(error = %error.full(), range = %key.range, "a check failed");
                    return if refused { Ok(true) } else { Err(error) };
                }
            }
        }
        Ok(false)
    }
}

impl StagingAccess for VerbsDomain {
    fn staging_bytes(&self) -> u64 {
        self.state.staging.pool().map_or(0, |pool| pool.range().len())
    }
}

/// Only requests that name staged memory need calls of the application to make progress. The NIC
/// executes all other requests without the CPU.
impl ManualProgress for VerbsDomain {
    fn progress(&self) -> Result<usize> {
        self.check_process("progress")?;
        Ok(self.active.progress())
    }
}

impl fmt::Debug for VerbsDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerbsDomain")
            .field("nic", &self.attr().nic)
            .field("options", &self.state.options)
            .field("live", &self.live())
            .finish()
    }
}

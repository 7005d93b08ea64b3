//! A domain: a protection domain, its regions and windows, and the calls of the provider contract.

use std::{
    any::Any,
    collections::{HashMap, hash_map::Entry},
    ffi::c_void,
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use hmem_core::random::random_u64;
use hmem_core::{
    Access, AddressRange, Addressing, Domain, Error, ErrorKind, Iova, LocalKey, RawKey, RemoteKey,
    RemotePiece, Result,
    provider::{
        self, Backing, CompletionQueue, CompositeKeys, DomainRequest, EndpointAttr, Features,
        LiveObjects, ManualProgress, Piece, ProviderAttr, ProviderDomain, ProviderEndpoint,
        ProviderRegion, ProviderWindow, RawKeys, Registration, StagingAccess, WindowBind,
        WindowType,
    },
};
use parking_lot::RwLock;

use super::{
    Grant, VerbsKey, VerbsOptions,
    device::{Port, ProtectionDomain},
    endpoint::Endpoint,
    errors, post,
    provider::Fabric,
    queue::{CqState, Queue},
    region::{Kind, Regions, read_raw},
    register::Registrar,
    split::Span,
    staged::Staging,
    sys::{AccessFlags, Mr},
    window::Windows,
};

/// What the builder says about domains.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DomainOptions {
    pub(super) options: VerbsOptions,
    pub(super) port: Option<u8>,
    pub(super) gid_index: Option<u8>,
    /// 0 for the device's.
    pub(super) max_registration: u64,
    pub(super) connect_in_process: bool,
    /// `None` for [`PATIENCE`](super::window::PATIENCE).
    pub(super) bind_timeout: Option<Duration>,
}

/// What endpoints, queues and the application's handle share.
pub(super) struct DomainState {
    pub(super) options: DomainOptions,
    pub(super) fabric: Arc<Fabric>,
    pub(super) regions: Regions,
    pub(super) windows: Windows,
    pub(super) staging: Staging,
    pub(super) endpoints: AtomicU64,
    mapped: RwLock<HashMap<u64, Arc<[RemotePiece]>>>,
    nowhere: OnceLock<Nowhere>,
    /// Last, so that everything in it is gone before.
    pub(super) pd: ProtectionDomain,
}

/// Where the old values of atomics go that fetch nothing.
struct Nowhere {
    mr: *mut Mr,
    lkey: u32,
    /// Written by the NIC only.
    memory: *mut u64,
}

// SAFETY: libibverbs objects may be used from any thread; the memory is never looked at.
unsafe impl Send for Nowhere {}
// SAFETY: no thread looks at the memory, and the region is only named by its key.
unsafe impl Sync for Nowhere {}

impl DomainState {
    pub(super) fn registrar(&self) -> Registrar<'_> {
        let device = self.pd.device.max_registration();
        let max = match self.options.max_registration {
            0 => device,
            asked => asked.min(device),
        };
        Registrar { pd: &self.pd, regions: &self.regions, max }
    }

    pub(super) fn port(&self) -> Result<Port> {
        self.pd.device.port(self.options.port, self.options.gid_index)
    }

    pub(super) fn mapped_key(&self, key: &RemoteKey) -> Result<Arc<[RemotePiece]>> {
        let number = key.as_u64()?;
        self.mapped.read().get(&number).cloned().ok_or_else(|| {
            Error::new(ErrorKind::InvalidKey, "post")
                .provider(self.pd.device.nic().to_string())
                .remedy("map the raw key in this domain, and use it before it is unmapped")
        })
    }

    /// Eight bytes that the NIC may write and nobody reads.
    pub(super) fn nowhere(&self) -> Result<Span> {
        let nowhere = match self.nowhere.get() {
            Some(nowhere) => nowhere,
            None => {
                // No lock is held over the driver's call: of two threads that come here at once,
                // one gives its back.
                let made = Nowhere::register(&self.pd)?;
                if let Err(late) = self.nowhere.set(made) {
                    late.release(&self.pd);
                }
                self.nowhere.wait()
            }
        };
        let address = nowhere.memory.expose_provenance() as u64;
        Ok(post::span_of(address, LocalKey::from_provider(u64::from(nowhere.lkey))))
    }
}

impl Nowhere {
    fn register(pd: &ProtectionDomain) -> Result<Self> {
        let memory: *mut u64 = Box::into_raw(Box::new(0));
        let access = AccessFlags::LOCAL_WRITE.bits() as i32;
        let register = pd.device.library().functions.reg_mr;
        // SAFETY: the memory is freed only after the region is deregistered.
        let mr = unsafe { register(pd.pd, memory.cast(), size_of::<u64>(), access) };
        if mr.is_null() {
            let error = errors::call(pd.device.nic(), "ibv_reg_mr", errors::last());
            // SAFETY: it was boxed above and is registered nowhere.
            drop(unsafe { Box::from_raw(memory) });
            return Err(error);
        }
        // SAFETY: the driver made the region just now.
        let lkey = unsafe { (*mr).lkey };
        Ok(Self { mr, lkey, memory })
    }

    fn release(self, pd: &ProtectionDomain) {
        let deregister = pd.device.library().functions.dereg_mr;
        // SAFETY: nobody transfers there: the value was never handed out, or every endpoint is
        // gone.
        match errors::status(unsafe { deregister(self.mr) }) {
            // SAFETY: it was boxed when it was registered, and is registered no more.
            Ok(()) => drop(unsafe { Box::from_raw(self.memory) }),
            Err(errno) => tracing::error!(%errno, "ibv_dereg_mr: eight bytes are leaked"),
        }
    }
}

impl Drop for DomainState {
    fn drop(&mut self) {
        self.windows.clear(self);
        self.regions.clear(&self.pd);
        if let Some(nowhere) = self.nowhere.take() {
            nowhere.release(&self.pd);
        }
    }
}

/// An open domain, and what verbs has that core has no words for.
///
/// ```no_run
/// use hmem_core::Domain;
/// use hmem_provider_verbs::VerbsDomain;
///
/// # fn f(domain: &Domain) -> hmem_core::Result<()> {
/// let verbs = VerbsDomain::of(domain).expect("a domain of the verbs provider");
/// // Another crate's work requests may use our keys: they are of this protection domain.
/// println!("pd {:p}", verbs.pd());
/// # Ok(()) }
/// ```
pub struct VerbsDomain {
    state: Arc<DomainState>,
}

impl VerbsDomain {
    pub(super) fn open(
        pd: ProtectionDomain,
        options: DomainOptions,
        fabric: Arc<Fabric>,
        request: &DomainRequest,
    ) -> Result<Self> {
        if !request.auth_key.0.is_empty() {
            return Err(Error::new(ErrorKind::Unsupported, "open domain")
                .provider(pd.device.nic().to_string())
                .remedy(
                    "verbs has no authorization keys: domains are separated by their protection domains",
                ));
        }
        tracing::debug!(nic = %pd.device.nic(), mode = %request.mode, ?options, "verbs domain opened");
        let state = DomainState {
            options,
            fabric,
            regions: Regions::default(),
            windows: Windows::default(),
            staging: Staging::new(request.staging),
            endpoints: AtomicU64::new(0),
            mapped: RwLock::default(),
            nowhere: OnceLock::new(),
            pd,
        };
        Ok(Self { state: Arc::new(state) })
    }

    /// The verbs side of a domain; `None` if its provider is another.
    #[must_use]
    pub fn of(domain: &Domain) -> Option<&Self> {
        (domain.provider_domain() as &dyn Any).downcast_ref()
    }

    /// Its `ibv_pd`, for another crate's calls. It lives as long as the domain.
    #[must_use]
    pub fn pd(&self) -> *mut c_void {
        self.state.pd.pd.cast()
    }

    /// Its `ibv_context`. It lives as long as the domain.
    #[must_use]
    pub fn context(&self) -> *mut c_void {
        self.state.pd.device.context().cast()
    }

    /// The keys of a region, one for each registration that it took.
    ///
    /// # Errors
    /// InvalidArgument for a region that is not open here.
    pub fn keys(&self, region: ProviderRegion) -> Result<Vec<VerbsKey>> {
        self.state.regions.keys(region)
    }

    /// The options that a region was registered with, and what is known about each.
    ///
    /// # Errors
    /// InvalidArgument for a region that is not open here.
    pub fn options(&self, region: ProviderRegion) -> Result<Vec<(VerbsOptions, Grant)>> {
        self.state.regions.with(region, "options", |region| Ok(region.options.grants().collect()))
    }

    /// The access flags that a region's registration was asked for with.
    ///
    /// # Errors
    /// InvalidArgument for a region that is not open here.
    pub fn flags(&self, region: ProviderRegion) -> Result<AccessFlags> {
        self.state.regions.with(region, "flags", |region| Ok(region.flags))
    }

    /// Registers as [`ProviderDomain::register`] does, with options of this registration only.
    ///
    /// The call hands raw addresses to hardware, so it is unsafe:
    ///
    /// ```compile_fail,E0133
    /// use hmem_core::{Result, provider::{Piece, ProviderRegion, Registration}};
    /// use hmem_provider_verbs::{VerbsDomain, VerbsOptions};
    ///
    /// fn register(
    ///     verbs: &VerbsDomain,
    ///     request: &Registration<'_>,
    ///     pieces: &[Piece<'_>],
    /// ) -> Result<ProviderRegion> {
    ///     verbs.register_with(request, pieces, VerbsOptions::MW_BIND)
    /// }
    /// ```
    ///
    /// # Safety
    /// As [`ProviderDomain::register`].
    ///
    /// # Errors
    /// As there; Unsupported naming the device for an option that it lacks.
    pub unsafe fn register_with(
        &self,
        request: &Registration<'_>,
        pieces: &[Piece<'_>],
        options: VerbsOptions,
    ) -> Result<ProviderRegion> {
        let registrar = self.state.registrar();
        if pieces.iter().any(|piece| matches!(piece.backing, Backing::Staged(_))) {
            registrar.check(request)?;
            return self.state.register_staged(request, pieces, options);
        }
        registrar.register(request, pieces, options)
    }

    /// Registers host pages in verbs' own words, as `ibv_reg_mr(3)`.
    ///
    /// # Safety
    /// As [`Domain::regattr`].
    ///
    /// # Errors
    /// BadAccess for REMOTE_WRITE or REMOTE_ATOMIC without LOCAL_WRITE, before the driver is asked;
    /// ZeroLength; BadAddress; OutOfResources; Unsupported naming the device for a flag that it
    /// lacks.
    pub unsafe fn reg_mr(&self, range: AddressRange, flags: AccessFlags) -> Result<ProviderRegion> {
        self.state.registrar().register_flags(range, flags)
    }

    /// Changes a region's rights in place (`ibv_rereg_mr(3)`).
    ///
    /// During the driver's call, requests that name the region are refused, and a thread that
    /// closes the region waits. The keys may change: read [`VerbsDomain::keys`], or the region's
    /// remote key, again.
    ///
    /// The new rights may go beyond the promise that was made at registration, so the call is
    /// unsafe:
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
    /// The caller makes the promise of [`Domain::regattr`] for the new rights: from now on, until
    /// the region is closed, the NIC may use the memory as `access` says. The promise for rights
    /// that the region already had was made at registration.
    ///
    /// # Errors
    /// - Unsupported if the driver lacks the call, with the region as it was.
    /// - InvalidArgument for a region that is not open here.
    /// - The driver's own error otherwise, with a remedy that says whether the region is as it was.
    pub unsafe fn rereg(&self, region: ProviderRegion, access: Access) -> Result<()> {
        self.state.registrar().rereg(region, access)
    }
}

// SAFETY: every handle is looked up in the domain's own tables before the driver is called. A region
// is deregistered by `ibv_dereg_mr`, after which the NIC refuses its keys, and a staged one once its
// transfers have ended. The NIC itself checks key, rights and bounds of each access, and completes a
// request when it is done with its memory.
unsafe impl ProviderDomain for VerbsDomain {
    fn attr(&self) -> &ProviderAttr {
        self.state.pd.device.provider_attr()
    }

    unsafe fn register(
        &self,
        request: &Registration<'_>,
        pieces: &[Piece<'_>],
    ) -> Result<ProviderRegion> {
        // SAFETY: the caller makes the same promise.
        unsafe { self.register_with(request, pieces, self.state.options.options) }
    }

    fn deregister(&self, region: ProviderRegion) -> Result<()> {
        let taken = self.state.regions.take(region)?;
        if let Kind::Staged(staged) = &taken.kind {
            self.state.close_staged(staged);
            return Ok(());
        }
        self.state.regions.deregister(&self.state.pd, region, taken)
    }

    fn open_cq(&self, depth: usize) -> Result<Arc<dyn CompletionQueue>> {
        Ok(Arc::new(Queue { state: Arc::new(CqState::create(&self.state.pd.device, depth)?) }))
    }

    fn open_endpoint(&self, attr: &EndpointAttr) -> Result<Arc<dyn ProviderEndpoint>> {
        Ok(Arc::new(Endpoint::open(&self.state, attr)?))
    }

    fn live(&self) -> LiveObjects {
        let (regions, page_registrations, bytes) = self.state.regions.counts();
        LiveObjects {
            regions,
            page_registrations,
            bytes,
            windows: self.state.windows.count(),
            mapped_keys: self.state.mapped.read().len() as u64,
            endpoints: self.state.endpoints.load(Ordering::Relaxed),
            staging_buffers: self.state.staging.pool().map_or(0, |pool| pool.held()),
        }
    }

    fn composite_keys(&self) -> Option<&dyn CompositeKeys> {
        Some(self)
    }

    fn raw_keys(&self) -> Option<&dyn RawKeys> {
        Some(self)
    }

    fn windows(&self) -> Option<&dyn provider::Windows> {
        (!self.state.pd.device.window_types().is_empty()).then_some(self as _)
    }

    fn staging(&self) -> Option<&dyn StagingAccess> {
        Some(self)
    }

    fn manual_progress(&self) -> Option<&dyn ManualProgress> {
        Some(self)
    }

    fn remedy_without(&self, missing: Features) -> Option<&'static str> {
        match missing {
            Features::SUB_REGIONS => Some(
                "verbs has no key for part of a registration: register the part by itself, or bind a memory window",
            ),
            Features::REFRESH => Some(
                "a verbs region keeps its pages: close it and register again, or use the ON_DEMAND option",
            ),
            _ => None,
        }
    }
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
        let pieces: Arc<[_]> = read_raw(raw)?.into();
        // Not counted: another domain's key must not name one of this.
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
        if key.is_mapped() && self.state.mapped.write().remove(&key.as_u64()?).is_some() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::InvalidKey, "unmap key")
            .provider(self.attr().nic.to_string())
            .remedy("unmap a key once, in the domain that mapped it"))
    }
}

impl provider::Windows for VerbsDomain {
    fn window_types(&self) -> &[WindowType] {
        self.state.pd.device.window_types()
    }

    fn alloc_window(&self, window: WindowType) -> Result<ProviderWindow> {
        self.state.windows.alloc(&self.state, window)
    }

    fn bind_window(&self, window: ProviderWindow, bind: &WindowBind) -> Result<ProviderWindow> {
        self.state.windows.bind_type_1(&self.state, window, bind)
    }

    fn free_window(&self, window: ProviderWindow) -> Result<()> {
        self.state.windows.free(&self.state, window)
    }
}

impl StagingAccess for VerbsDomain {
    fn staging_bytes(&self) -> u64 {
        self.state.staging.pool().map_or(0, |pool| pool.range().len())
    }
}

/// The NIC executes requests by itself, but those that name staged memory.
impl ManualProgress for VerbsDomain {
    fn progress(&self) -> Result<usize> {
        Ok(self.state.pd.device.active().progress())
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

//! Domains: `fi_mr(3)` semantics over any provider.
//!
//! Everything a caller can get wrong is caught here; an iface is asked who owns the memory, a
//! [`PathDecider`] how the NIC gets at it, and a provider to register it.

mod asynchronous;
mod attr;
mod buffer;
mod collective;
mod endpoint;
mod inner;
mod owner;
mod prefault;
mod region;
mod scope;
mod validate;
mod window;

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

pub use self::{
    attr::{DmaBufAttr, DomainAttr, MrAttr, Prefault, Progress},
    buffer::{DeviceBuffer, OwnedBuffer, RegionSlice, Registered, VecParts},
    endpoint::{Atomic, Endpoint},
    prefault::prefault,
    region::{MemoryRegion, RegionState},
    scope::Scoped,
    validate::os_page_sizes,
    window::MemoryWindow,
};

use self::{
    asynchronous::Worker,
    inner::{MemoryOwner, RegionInner},
};
use crate::{
    Access, AddressRange, Addressing, AuthKey, Decision, DomainBindFlags, Error, ErrorKind, IfaceKind, Iova,
    MrFlags, MrMode, RawKey, Registry, Rejected, RemoteKey, Result,
    event_queue::{EventQueue, RegionId},
    path::{PathDecider, PathOutcome, PathRequest},
    provider::{
        CompletionQueue, DomainRequest, EndpointAttr, KeyRequest, Live, Provider, ProviderAttr,
        ProviderDomain, RegistrationRequest, WindowType,
    },
};

/// An open domain: registers memory with one NIC.
///
/// Cheap to share by reference; every method may be called from any thread at once. Regions, endpoints and windows
/// keep what they need alive, so that dropping a domain early is harmless; [`Domain::close`] says what is left.
pub struct Domain {
    inner: Arc<DomainInner>,
}

pub(crate) struct DomainInner {
    provider: Arc<dyn ProviderDomain>,
    registry: Arc<Registry>,
    decider: Arc<dyn PathDecider>,
    attr: DomainAttr,
    mode: MrMode,
    plain_host: Arc<Decision>,
    worker: OnceLock<Worker>,
}

impl Domain {
    /// Opens a domain of `provider` over the ifaces of `registry`.
    ///
    /// # Errors
    /// [`ErrorKind::ModeMismatch`] that names the bits which the provider needs and `attr.mr_mode` does not offer, or
    /// a BASIC that the provider cannot run; [`ErrorKind::InvalidArgument`] for a NIC that it does not have; what
    /// the driver reported otherwise.
    pub fn open(
        provider: &dyn Provider,
        registry: Arc<Registry>,
        decider: Arc<dyn PathDecider>,
        attr: DomainAttr,
    ) -> Result<Self> {
        let nics = provider.nics()?;
        let nic = match &attr.nic {
            None => nics.first(),
            Some(name) => nics.iter().find(|nic| nic.nic.name == *name),
        };
        let nic = nic.ok_or_else(|| {
            let names: Vec<_> = nics.iter().map(|nic| nic.nic.name.as_str()).collect();
            Error::new(ErrorKind::InvalidArgument, "open domain")
                .provider(provider.name().to_owned())
                .context("nic", attr.nic.as_deref().unwrap_or("(any)"))
                .context("nics", names.join(","))
                .remedy("name one of the provider's NICs")
        })?;
        let mode = attr.mr_mode.negotiate(nic.needs)?;
        if mode.contains(MrMode::BASIC) && !nic.can.union(nic.needs).contains(MrMode::BASIC_MEANS) {
            return Err(Error::new(ErrorKind::ModeMismatch, "open domain")
                .provider(nic.nic.to_string())
                .context("bits", MrMode::BASIC)
                .remedy("this provider cannot run BASIC registration: offer the single bits instead"));
        }
        let request = DomainRequest {
            nic: Some(nic.nic.name.clone()),
            mode: mode.effective(),
            auth_key: attr.auth_key.clone(),
            hmem: attr.hmem,
            registry: Arc::clone(&registry),
        };
        let plain_host = Arc::new(decider.plain_host(&nic.nic));
        let provider = provider.open_domain(&request)?;
        let worker = OnceLock::new();
        Ok(Self {
            inner: Arc::new(DomainInner { provider, registry, decider, attr, mode, plain_host, worker }),
        })
    }

    /// The mode in force, as negotiated: BASIC and SCALABLE are kept as they were asked for.
    #[must_use]
    pub fn mr_mode(&self) -> MrMode {
        self.inner.mode
    }

    /// What the NIC offers and needs.
    #[must_use]
    pub fn provider_attr(&self) -> &ProviderAttr {
        self.inner.provider.attr()
    }

    /// The provider's own domain, for what only that provider has ([`ProviderDomain::as_any`]).
    ///
    /// Regions that are registered or deregistered through it are none of this domain's.
    #[must_use]
    pub fn provider_domain(&self) -> &dyn ProviderDomain {
        &*self.inner.provider
    }

    /// The ifaces that this domain knows.
    #[must_use]
    pub fn registry(&self) -> &Arc<Registry> {
        &self.inner.registry
    }

    /// What the provider holds for this domain now.
    #[must_use]
    pub fn live(&self) -> Live {
        self.inner.provider.live()
    }

    /// Executes posted work where progress is by hand.
    ///
    /// # Errors
    /// A dead device.
    pub fn progress(&self) -> Result<usize> {
        self.inner.provider.progress()
    }

    /// Reports registrations of this domain through `queue` from now on (`fi_domain_bind` with `FI_REG_MR`):
    /// they complete asynchronously, on a thread that ends with the domain.
    ///
    /// # Errors
    /// [`ErrorKind::BadFlags`] unless `flags` is REG_MR; [`ErrorKind::BadState`] if a queue is bound already;
    /// [`ErrorKind::OutOfResources`] if the thread cannot be started.
    pub fn bind(&self, queue: &Arc<EventQueue>, flags: DomainBindFlags) -> Result<()> {
        if flags != DomainBindFlags::REG_MR {
            return Err(Error::new(ErrorKind::BadFlags, "domain bind")
                .context("flags", format_args!("{:#x}", flags.bits()))
                .remedy("bind an event queue with REG_MR and nothing else"));
        }
        self.inner.worker.set(Worker::start(Arc::clone(queue))?).map_err(|_| {
            Error::new(ErrorKind::BadState, "domain bind")
                .remedy("an event queue is bound already: open another domain for another queue")
        })
    }

    /// Registers one range of raw addresses (`fi_mr_reg`).
    ///
    /// # Safety
    /// As [`Domain::regattr`].
    ///
    /// # Errors
    /// As [`Domain::regattr`].
    pub unsafe fn reg(
        &self,
        range: AddressRange,
        access: Access,
        requested_key: u64,
        flags: MrFlags,
    ) -> Result<MemoryRegion> {
        // SAFETY: passed on to the caller.
        unsafe { self.regattr(&MrAttr::new(&[range], access).key(requested_key), flags) }
    }

    /// Registers several ranges as one region (`fi_mr_regv`).
    ///
    /// # Safety
    /// As [`Domain::regattr`].
    ///
    /// # Errors
    /// As [`Domain::regattr`].
    pub unsafe fn regv(
        &self,
        ranges: &[AddressRange],
        access: Access,
        requested_key: u64,
        flags: MrFlags,
    ) -> Result<MemoryRegion> {
        // SAFETY: passed on to the caller.
        unsafe { self.regattr(&MrAttr::new(ranges, access).key(requested_key), flags) }
    }

    /// Registers memory by its raw addresses or its dma-buf (`fi_mr_regattr`).
    ///
    /// With an event queue bound ([`Domain::bind`]) the region comes back pending: what is wrong with the request is
    /// still an error of this call and gives no event; what fails later is an error event.
    ///
    /// # Safety
    /// Until the region is closed, the NIC and peers that hold the key read and (as far as `attr.access` lets the NIC
    /// write) write this memory behind the compiler's back: no Rust reference may be live that forbids it, and the
    /// memory must not be given to another use while the key works.
    ///
    /// # Errors
    /// Each its own kind, with nothing registered: ZeroLength, TooManyRanges, TooLong, BadFlags, BadAccess,
    /// ReservedOffset, ReservedHmemData, BadPageSize, InvalidArgument (attributes that exclude each other, a wrong
    /// iface or device), OutOfBounds (outside the base or the allocation), NoKey, KeyRejected, BadAddress (no
    /// pages in ALLOCATED mode), OutOfResources, and what kept device memory from the NIC.
    #[inline]
    pub unsafe fn regattr(&self, attr: &MrAttr<'_>, flags: MrFlags) -> Result<MemoryRegion> {
        let region = self.inner.prepare(attr, flags, None)?;
        self.inner.submit(region, attr)
    }

    /// [`Domain::regattr`] that writes the region to `out` before its event can be read.
    ///
    /// # Safety
    /// As [`Domain::regattr`].
    ///
    /// # Errors
    /// As [`Domain::regattr`], and BadState if `out` is taken; nothing is registered then.
    pub unsafe fn regattr_into(
        &self,
        attr: &MrAttr<'_>,
        flags: MrFlags,
        out: &OnceLock<MemoryRegion>,
    ) -> Result<()> {
        let region = self.inner.prepare(attr, flags, None)?;
        let taken = || {
            Error::new(ErrorKind::BadState, "regattr")
                .context("out", "taken")
                .remedy("give an empty place for the region")
        };
        if out.get().is_some() {
            return Err(taken());
        }
        match self.inner.worker.get() {
            None => {
                self.inner.register_now(&region, attr).and_then(|()| out.set(region).map_err(|_| taken()))
            }
            Some(worker) => {
                let job = worker.job(&region, attr)?;
                out.set(region).map_err(|_| taken())?;
                worker.submit(job);
                Ok(())
            }
        }
    }

    /// Registers a buffer that the region then owns: the safe door.
    ///
    /// # Errors
    /// As [`Domain::regattr`]; the buffer comes back with the error.
    pub fn register<B: OwnedBuffer>(&self, buffer: B, access: Access) -> Result<Registered<B>, Rejected<B>> {
        self.register_with(buffer, &MrAttr::new(&[], access), MrFlags::empty())
    }

    /// [`Domain::register`] with every attribute; `attr.ranges` is taken from the buffer, a base and a dma-buf are
    /// refused.
    ///
    /// # Errors
    /// As [`Domain::regattr`]; the buffer comes back with the error.
    pub fn register_with<B: OwnedBuffer>(
        &self,
        buffer: B,
        attr: &MrAttr<'_>,
        flags: MrFlags,
    ) -> Result<Registered<B>, Rejected<B>> {
        Registered::register(&self.inner, buffer, attr, flags)
    }

    /// Registers borrowed memory for as long as `body` runs; the region is closed before this returns.
    ///
    /// # Errors
    /// As [`Domain::regattr`]; `body` does not run then.
    pub fn scope<R>(
        &self,
        bytes: &mut [u8],
        access: Access,
        body: impl FnOnce(&Scoped<'_>) -> R,
    ) -> Result<R> {
        scope::run(&self.inner, bytes, access, body)
    }

    /// Makes a peer's raw key usable in transfers of this domain (`fi_mr_map_raw`).
    ///
    /// `base` and `len` are what the peer sent along with it; they only describe the key, the peer's NIC enforces.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] for bytes that are no raw key; [`ErrorKind::OutOfResources`].
    pub fn map_raw(&self, base: Iova, len: u64, raw: &RawKey) -> Result<RemoteKey> {
        self.inner.provider.map_raw(base, len, self.inner.addressing(), raw)
    }

    /// Frees a mapped key (`fi_mr_unmap_key`).
    ///
    /// # Errors
    /// [`ErrorKind::InvalidKey`] for a key that this domain did not map.
    pub fn unmap_key(&self, key: &RemoteKey) -> Result<()> {
        self.inner.provider.unmap_key(key)
    }

    /// Opens a completion queue.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfResources`].
    pub fn open_cq(&self, depth: usize) -> Result<Arc<dyn CompletionQueue>> {
        self.inner.provider.open_cq(depth)
    }

    /// Opens an endpoint.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfResources`]; [`ErrorKind::InvalidArgument`] for queues of another provider.
    pub fn open_endpoint(&self, attr: &EndpointAttr) -> Result<Endpoint> {
        Endpoint::open(&self.inner, attr)
    }

    /// Allocates a memory window, bound to nothing.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a type that the NIC lacks; [`ErrorKind::OutOfResources`].
    pub fn alloc_window(&self, window: WindowType) -> Result<MemoryWindow> {
        MemoryWindow::alloc(&self.inner, window)
    }

    /// Closes the domain.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] with the domain back, as long as regions, endpoints, windows or mapped keys are left.
    pub fn close(self) -> Result<(), Rejected<Self>> {
        let live = self.live();
        let held = Arc::strong_count(&self.inner) - 1;
        if held > 0 || live.mapped_keys > 0 {
            let error = Error::new(ErrorKind::Busy, "close domain")
                .provider(self.provider_attr().nic.to_string())
                .context("regions", live.regions)
                .context("endpoints", live.endpoints)
                .context("windows", live.windows)
                .context("mapped_keys", live.mapped_keys)
                .remedy("close regions, endpoints and windows and unmap raw keys first");
            return Err(Rejected::new(self, error));
        }
        Ok(())
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Domain")
            .field("nic", &self.provider_attr().nic)
            .field("mr_mode", &self.inner.mode)
            .field("live", &self.live())
            .finish_non_exhaustive()
    }
}

impl DomainInner {
    pub(crate) fn provider(&self) -> &Arc<dyn ProviderDomain> {
        &self.provider
    }

    pub(crate) fn effective(&self) -> MrMode {
        self.mode.effective()
    }

    pub(crate) fn addressing(&self) -> Addressing {
        if self.effective().contains(MrMode::VIRT_ADDR) { Addressing::Virtual } else { Addressing::ZeroBased }
    }

    fn auth_key<'a>(&'a self, given: Option<&'a AuthKey>) -> &'a AuthKey {
        given.filter(|key| !key.0.is_empty()).unwrap_or(&self.attr.auth_key)
    }

    /// Checks the request and makes the region that it will fill; nothing is registered yet.
    #[inline]
    fn prepare(
        self: &Arc<Self>,
        attr: &MrAttr<'_>,
        flags: MrFlags,
        owner: Option<MemoryOwner>,
    ) -> Result<MemoryRegion> {
        let id = self.worker.get().map(|_| RegionId::next());
        self.prepare_as(id, attr, flags, owner)
    }

    fn prepare_as(
        self: &Arc<Self>,
        id: Option<RegionId>,
        attr: &MrAttr<'_>,
        flags: MrFlags,
        owner: Option<MemoryOwner>,
    ) -> Result<MemoryRegion> {
        let checked = validate::check(attr, flags, self.effective(), self.provider.attr())?;
        if let Some(base) = attr.base {
            self.check_base(base, attr)?;
        }
        Ok(MemoryRegion::pending(self, attr, flags, &checked, owner, id))
    }

    /// Registers at once, or hands the region to the worker where an event queue is bound.
    #[inline]
    fn submit(&self, region: MemoryRegion, attr: &MrAttr<'_>) -> Result<MemoryRegion> {
        match self.worker.get().filter(|_| region.id().is_some()) {
            None => self.register_now(&region, attr)?,
            Some(worker) => worker.submit(worker.job(&region, attr)?),
        }
        Ok(region)
    }

    #[inline]
    fn register_now(&self, region: &MemoryRegion, attr: &MrAttr<'_>) -> Result<()> {
        let outcome = self.register_pages(region.inner(), attr)?;
        region.inner().complete(outcome);
        Ok(())
    }

    fn check_base(&self, base: &MemoryRegion, attr: &MrAttr<'_>) -> Result<()> {
        let refuse = |kind, remedy: &'static str| {
            Err(Error::new(kind, "regattr").context("base", base.range()).remedy(remedy))
        };
        if !std::ptr::eq(Arc::as_ptr(base.inner().domain()), self) {
            return refuse(ErrorKind::InvalidArgument, "the base must be a region of the same domain");
        }
        if base.inner().registered().is_none() {
            return refuse(ErrorKind::BadState, "wait until the base is registered");
        }
        let [range] = attr.ranges else {
            return refuse(ErrorKind::TooManyRanges, "a sub-region is one range of its base");
        };
        if base.inner().offset_of(*range).is_none() {
            return Err(Error::new(ErrorKind::OutOfBounds, "regattr")
                .context("range", range)
                .context("base", base.range())
                .remedy("a sub-region lies inside one range of its base"));
        }
        if attr.access.nic_writes() && !base.access().nic_writes() {
            return Err(Error::new(ErrorKind::AccessDenied, "regattr")
                .context("access", attr.access)
                .context("base_access", base.access())
                .remedy(
                    "the base's pages are registered for reading: register it with a right that writes",
                ));
        }
        if attr.page_size != 0 {
            return refuse(ErrorKind::BadPageSize, "a sub-region inherits its base's page size: use 0");
        }
        Ok(())
    }

    #[inline]
    fn register_pages(&self, inner: &RegionInner, attr: &MrAttr<'_>) -> Result<PathOutcome> {
        let span = tracing::debug_span!(
            "register",
            nic = %self.provider.attr().nic,
            range = %inner.range(),
            ranges = inner.ranges().len(),
            access = %attr.access,
        );
        let _entered = span.enter();
        let outcome = self.register_decided(inner, attr);
        match &outcome {
            Ok(outcome) => {
                let path = outcome.decision.as_ref().unwrap_or(&self.plain_host).path;
                tracing::debug!(%path, "registered");
            }
            Err(error) => tracing::debug!(%error, "registration refused"),
        }
        outcome
    }

    #[inline]
    fn register_decided(&self, inner: &RegionInner, attr: &MrAttr<'_>) -> Result<PathOutcome> {
        let mode = self.effective();
        let registration = RegistrationRequest {
            access: attr.access,
            flags: inner.flags(),
            key: if mode.contains(MrMode::PROV_KEY) {
                KeyRequest::Provider
            } else {
                KeyRequest::Application(attr.requested_key)
            },
            auth_key: self.auth_key(attr.auth_key),
            addressing: self.addressing(),
            page_size: attr.page_size,
            enabled: inner.starts_enabled(),
        };
        if let Some(parent) = inner.parent() {
            let (Some(parent_region), Some(offset)) = (parent.registered(), parent.offset_of(inner.range()))
            else {
                return Err(Error::new(ErrorKind::BadState, "regattr").context("base", parent.range()));
            };
            let len = inner.range().len();
            let region = self.provider.register_sub(parent_region, &registration, offset, len)?;
            return Ok(PathOutcome { region, decision: parent.recorded_decision() });
        }
        let ranges = inner.ranges();
        let owner = if attr.dma_buf.is_some() {
            self.claimed_owner(attr)
        } else {
            self.owner(ranges, attr, inner.flags())?
        };
        if let Some(prefault) = &attr.prefault
            && owner.iface == IfaceKind::SYSTEM
            && attr.dma_buf.is_none()
        {
            for range in ranges {
                prefault::prefault(*range, attr.access.nic_writes(), prefault)?;
            }
        }
        let request = PathRequest {
            registration,
            ranges,
            dma_buf: attr.dma_buf.map(|buffer| (buffer.fd, buffer.offset)),
            owner,
            owned: inner.owns_memory(),
            policy: self.attr.p2p,
        };
        self.decider.register(&request, &self.registry, &*self.provider)
    }
}

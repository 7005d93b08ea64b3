//! Domains: `fi_mr(3)` semantics over any provider.
//!
//! A domain checks everything that a caller can get wrong, asks the registry for the owner of the
//! memory, asks a [`PathSelector`] for the path of device memory, and registers with a provider.
//!
//! Layers, lower ones first. A file imports only from those before it, and `DomainInner` from this
//! one:
//!
//! - `region_state`: the state behind a region; `region`: the handle
//! - `growth`: how far registrations may grow
//! - `attr`: requests; `validate`: their checks; `owner`: the claims about memory; `prefault`
//! - `register`: one registration; `asynchronous`: the worker that runs it
//! - `buffer`, `scope`, `multi`: registrations of owned and borrowed memory, and on several NICs
//! - `many`: many views by one call
//! - `held`: the buffers that cached regions keep alive
//! - `cached`: the registration cache of a domain; `cached_buffer`: its buffers; `inbound`, `local`: completion queues
//! - `endpoint`; `window`; `grant`

mod asynchronous;
mod attr;
mod buffer;
mod cached;
mod cached_buffer;
mod endpoint;
mod grant;
mod growth;
mod held;
mod inbound;
mod local;
mod many;
mod multi;
mod owner;
mod prefault;
mod region;
mod region_state;
mod register;
mod scope;
mod validate;
mod window;

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

pub use self::{
    attr::{CacheAttr, DmaBufAttr, DomainAttr, MrAttr, Prefault},
    buffer::{DeviceBuffer, OwnedBuffer, OwnedRegion, RegionSlice, VecParts},
    cached::{CachedRegion, RegionCache, RegionLookupHandle, Registrations, Watch},
    cached_buffer::CachedBuffer,
    endpoint::{Atomic, Endpoint},
    grant::{Grant, GrantKind},
    growth::Growth,
    many::{BufferView, RegionView, RegionViews, RegisteredViews, View},
    multi::{MultiRegion, OwnedMultiRegion, regattr_on, register_on},
    prefault::prefault,
    region::MemoryRegion,
    region_state::RegionState,
    scope::Scoped,
    validate::os_page_sizes,
    window::{Type1Window, Type2Bind, Type2Kind, Type2Window},
};

use self::{
    asynchronous::Worker,
    grant::SpareWindows,
    inbound::{FlushingQueue, Inbound},
    local::{Leasing, LeasingQueue},
    region_state::KeepAlive,
};
use crate::{
    Access, AddressRange, Addressing, AuthKey, Decision, DomainBindFlags, Error, ErrorKind, Iova,
    MrFlags, MrMode, ProcessMark, RawKey, Registry, Rejected, RemoteKey, Result,
    event_queue::EventQueue,
    path::PathSelector,
    provider::{
        CompletionQueue, DomainRequest, EndpointAttr, Features, LiveObjects, Provider,
        ProviderAttr, ProviderDomain, RawKeys,
    },
};

/// An open domain: registers memory with one NIC.
///
/// Cheap to share by reference; every method may be called from any thread at once. Regions,
/// endpoints and windows keep what they need alive, so that dropping a domain early is harmless;
/// [`Domain::close`] says what is left.
///
/// A domain belongs to the process that opened it. In a forked child it registers nothing
/// ([`ErrorKind::BadState`]), and closing or dropping the copy of a region leaves the parent's
/// registration as it is.
pub struct Domain {
    /// Before the rest: its regions go first.
    cache: OnceLock<RegionCache>,
    inner: Arc<DomainInner>,
}

pub(crate) struct DomainInner {
    provider: Arc<dyn ProviderDomain>,
    registry: Arc<Registry>,
    selector: Arc<dyn PathSelector>,
    attr: DomainAttr,
    mode: MrMode,
    effective: MrMode,
    provider_attr: ProviderAttr,
    plain_host: Arc<Decision>,
    /// The process that opened the domain. A forked child uses nothing of the domain.
    process: ProcessMark,
    worker: OnceLock<Worker>,
    inbound: Arc<Inbound>,
    spare_windows: SpareWindows,
}

impl Domain {
    /// Opens a domain of `provider` over the ifaces of `registry`.
    ///
    /// # Errors
    /// [`ErrorKind::ModeMismatch`] that names the bits which the provider needs and `attr.mr_mode`
    /// does not offer, or a BASIC that the provider cannot run; [`ErrorKind::InvalidArgument`]
    /// for a NIC that it does not have, or no staging buffers; what the driver reported
    /// otherwise.
    pub fn open(
        provider: &dyn Provider,
        registry: Arc<Registry>,
        selector: Arc<dyn PathSelector>,
        attr: DomainAttr,
    ) -> Result<Self> {
        attr.staging.check()?;
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
        let mode = attr.mr_mode.negotiate(nic.required_mr_mode)?;
        let basic = nic.basic_mr_mode.union(nic.required_mr_mode);
        if mode.contains(MrMode::BASIC) && !basic.contains(MrMode::BASIC_MEANS) {
            return Err(Error::new(ErrorKind::ModeMismatch, "open domain")
                .provider(nic.nic.to_string())
                .context("bits", MrMode::BASIC)
                .remedy(
                    "this provider cannot run BASIC registration: offer the single bits instead",
                ));
        }
        let request = DomainRequest {
            nic: Some(nic.nic.name.clone()),
            mode: mode.effective(),
            auth_key: attr.auth_key.clone(),
            hmem: attr.hmem,
            registry: Arc::clone(&registry),
            staging: attr.staging,
        };
        let process = ProcessMark::current()?;
        let plain_host = Arc::new(selector.plain_host(&nic.nic));
        let provider = provider.open_domain(&request)?;
        let worker = OnceLock::new();
        let inbound = Arc::new(Inbound::new(Arc::clone(&registry)));
        Ok(Self {
            cache: OnceLock::new(),
            inner: Arc::new(DomainInner {
                provider_attr: provider.attr().clone(),
                provider,
                registry,
                selector,
                attr,
                mode,
                effective: mode.effective(),
                plain_host,
                process,
                worker,
                inbound,
                spare_windows: SpareWindows::default(),
            }),
        })
    }

    /// The mode in force, as negotiated: BASIC and SCALABLE are kept as they were asked for.
    #[must_use]
    pub fn mr_mode(&self) -> MrMode {
        self.inner.mode
    }

    /// Returns the attributes of the NIC.
    #[must_use]
    pub fn provider_attr(&self) -> &ProviderAttr {
        &self.inner.provider_attr
    }

    /// Returns the facets of the provider's domain.
    #[must_use]
    pub fn features(&self) -> Features {
        Features::of(self.provider_domain())
    }

    /// Returns the provider's own domain. As a `&dyn Any` it can be cast down to the provider's
    /// type, for abilities that only that provider has.
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

    /// Returns what the provider holds for this domain now: nothing in a forked child.
    #[must_use]
    pub fn live(&self) -> LiveObjects {
        if !self.inner.process.is_current() {
            return LiveObjects::default();
        }
        self.inner.provider.live()
    }

    /// Bytes of the domain's staging buffers, registered with the NIC where it needs that: 0 before
    /// the first staged region, the same ever after. How many are in use is in
    /// [`LiveObjects::staging_buffers`].
    #[must_use]
    pub fn staging_bytes(&self) -> u64 {
        self.inner.provider.staging().map_or(0, |staging| staging.staging_bytes())
    }

    /// Executes posted work that only calls execute ([`ProviderAttr::progress`] says for which
    /// transfers that is), and returns how many requests it ended.
    ///
    /// # Errors
    /// A dead device.
    pub fn progress(&self) -> Result<usize> {
        match self.inner.provider.manual_progress() {
            Some(work) => work.progress(),
            None => self.inner.process.check("progress").map(|()| 0),
        }
    }

    /// Reports registrations of this domain through `queue` from now on (`fi_domain_bind` with
    /// `FI_REG_MR`): they complete asynchronously, on a thread that ends with the domain.
    ///
    /// # Errors
    /// [`ErrorKind::BadFlags`] unless `flags` is REG_MR; [`ErrorKind::BadState`] if a queue is
    /// bound already; [`ErrorKind::OutOfResources`] if the thread cannot be started.
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
            .map_err(|error| error.of_call("reg"))
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
            .map_err(|error| error.of_call("regv"))
    }

    /// Registers memory by its raw addresses or its dma-buf (`fi_mr_regattr`).
    ///
    /// With an event queue bound ([`Domain::bind`]) the region comes back pending: what is wrong
    /// with the request is still an error of this call and gives no event; what fails later is
    /// an error event.
    ///
    /// # Safety
    /// Until the region is closed, the NIC and peers that hold the key read and (as far as
    /// `attr.access` lets the NIC write) write this memory behind the compiler's back: no Rust
    /// reference may be live that forbids it, and the memory must not be given to another use
    /// while the key works. A dropped region is closed once its sub-regions and windows are gone,
    /// which safe code can make ([`MemoryRegion::sub`], [`Type1Window::bind`],
    /// [`Type2Window::post_bind`], [`MemoryRegion::grant`]).
    ///
    /// # Errors
    /// Each its own kind, with nothing registered: ZeroLength, TooManyRanges, TooLong, BadFlags,
    /// BadAccess, ReservedOffset, ReservedHmemData, BadPageSize, InvalidArgument (attributes
    /// that exclude each other, a wrong iface or device), OutOfBounds (outside the base or the
    /// allocation), NoKey, KeyRejected, BadAddress (no pages in ALLOCATED mode),
    /// OutOfResources, and what kept device memory from the NIC.
    #[inline]
    pub unsafe fn regattr(&self, attr: &MrAttr<'_>, flags: MrFlags) -> Result<MemoryRegion> {
        self.inner.register(attr, flags, KeepAlive::Caller)
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
        let taken = || {
            Error::new(ErrorKind::BadState, "regattr")
                .context("out", "taken")
                .remedy("give an empty place for the region")
        };
        if out.get().is_some() {
            return Err(taken());
        }
        let (inner, keep) = (&self.inner, KeepAlive::Caller);
        match inner.worker.get() {
            None => out.set(inner.register_now(attr, flags, keep, None)?).map_err(|_| taken()),
            Some(worker) => {
                let (region, job) = worker.job(inner, attr, flags, keep)?;
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
    pub fn register<B: OwnedBuffer>(
        &self,
        buffer: B,
        access: Access,
    ) -> Result<OwnedRegion<B>, Rejected<B>> {
        let attr = MrAttr::new(&[], access);
        OwnedRegion::register(&self.inner, buffer, &attr, MrFlags::empty(), "register")
    }

    /// [`Domain::register`] with every attribute; `attr.ranges` is taken from the buffer, a base
    /// and a dma-buf are refused.
    ///
    /// # Errors
    /// As [`Domain::regattr`]; the buffer comes back with the error.
    pub fn register_with<B: OwnedBuffer>(
        &self,
        buffer: B,
        attr: &MrAttr<'_>,
        flags: MrFlags,
    ) -> Result<OwnedRegion<B>, Rejected<B>> {
        OwnedRegion::register(&self.inner, buffer, attr, flags, "register_with")
    }

    /// Registers borrowed memory for as long as `body` runs; the region is closed before this
    /// returns, also by a panic.
    ///
    /// If the provider refuses to close it, or panics while it registers, the process is aborted:
    /// the borrow would end while peers can still write to the memory.
    ///
    /// # Errors
    /// As [`Domain::regattr`], and [`ErrorKind::BadState`] in ENDPOINT mode; `body` does not run
    /// then.
    pub fn scope<R>(
        &self,
        bytes: &mut [u8],
        access: Access,
        body: impl FnOnce(&Scoped<'_>) -> R,
    ) -> Result<R> {
        scope::run(&self.inner, bytes, access, body).map_err(|error| error.of_call("scope"))
    }

    /// [`Domain::scope`] for memory of any iface, by its addresses.
    ///
    /// # Safety
    /// While `body` runs:
    ///
    /// - the range stays allocated and is given to no other use;
    /// - no Rust reference to the range is live, whatever `access` says: safe code in `body` may
    ///   post transfers of this domain that write to the range.
    ///
    /// # Errors
    /// As [`Domain::scope`].
    pub unsafe fn scope_range<R>(
        &self,
        range: AddressRange,
        access: Access,
        body: impl FnOnce(&Scoped<'_>) -> R,
    ) -> Result<R> {
        scope::run_over(&self.inner, range, false, access, body)
            .map_err(|error| error.of_call("scope_range"))
    }

    /// Makes a peer's raw key usable in transfers of this domain (`fi_mr_map_raw`).
    ///
    /// `base` and `len` are what the peer sent along with it; they only describe the key, the
    /// peer's NIC enforces.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] for bytes that are no raw key; [`ErrorKind::OutOfResources`];
    /// [`ErrorKind::Unsupported`] where the provider has no raw keys.
    pub fn map_raw(&self, base: Iova, len: u64, raw: &RawKey) -> Result<RemoteKey> {
        self.inner.raw_keys("map raw key")?.map_raw(base, len, self.inner.addressing(), raw)
    }

    /// Frees a mapped key (`fi_mr_unmap_key`).
    ///
    /// # Errors
    /// [`ErrorKind::InvalidKey`] for a key that this domain did not map;
    /// [`ErrorKind::Unsupported`] where the provider has no raw keys.
    pub fn unmap_key(&self, key: &RemoteKey) -> Result<()> {
        self.inner.raw_keys("unmap key")?.unmap_key(key)
    }

    /// Opens a completion queue.
    ///
    /// A program polls the queue ([`CompletionQueue::read`]), waits for it with a timeout
    /// ([`CompletionQueue::wait`]), or gives its file descriptor to an event loop
    /// ([`CompletionQueue::channel`]). The queue does not keep the domain open: once the domain is
    /// closed, a wait for the empty queue is [`ErrorKind::BadState`].
    ///
    /// If device memory of the domain is registered for the NIC to write, reading a receive, a read
    /// or an atomic first flushes the devices that need it. Work that a device starts afterwards
    /// finds the bytes, and those that the sender of a received message wrote before it. A flush
    /// that fails is logged once.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfResources`].
    pub fn open_cq(&self, depth: usize) -> Result<Arc<dyn CompletionQueue>> {
        self.inner.process.check("open completion queue")?;
        let mut queue = self.inner.provider.open_cq(depth)?;
        if self.inner.inbound.may_have_any() {
            queue = Arc::new(FlushingQueue::new(queue, Arc::clone(&self.inner.inbound)));
        }
        Ok(if self.leases_local_memory() { Arc::new(LeasingQueue::new(queue)) } else { queue })
    }

    /// Makes what the NIC has written into memory of devices visible to work that they start after
    /// this call, for who learns of a remote write by other means than a completion of this
    /// domain: a counter, a flag in memory, a message elsewhere.
    ///
    /// # Errors
    /// The error of the first device that failed. The others are flushed all the same.
    pub fn flush_inbound(&self) -> Result<()> {
        self.inner.inbound.flush()
    }

    /// Opens an endpoint.
    ///
    /// If the domain has a cache, and its mode requires a descriptor for local memory (LOCAL, or
    /// HMEM for that of devices), transfers may leave it out. Such memory is registered through the
    /// cache, as with [`RegionCache::get_or_register`], and its region is held until the completion
    /// is read or the endpoint closed. Both queues are then to be of [`Domain::open_cq`]. In
    /// ENDPOINT mode, where a region serves an endpoint only once it is bound to it, descriptors
    /// stay the application's to name.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfResources`], also where the domain's cache starts here and cannot;
    /// [`ErrorKind::InvalidArgument`] for queues of another provider.
    pub fn open_endpoint(&self, attr: &EndpointAttr) -> Result<Endpoint> {
        self.inner.process.check("open endpoint")?;
        let leasing = match self.leases_local_memory() {
            true => Some(Leasing::new(
                self.cache()?,
                self.inner.effective.contains(MrMode::LOCAL),
                attr,
            )),
            false => None,
        };
        Endpoint::open(&self.inner, attr, leasing)
    }

    /// Returns true if local memory of transfers that name no region is registered through the
    /// cache.
    fn leases_local_memory(&self) -> bool {
        let mode = self.inner.effective;
        let wanted = mode.intersects(MrMode::LOCAL | MrMode::HMEM);
        wanted && self.inner.attr.cache.is_some() && !mode.contains(MrMode::ENDPOINT)
    }

    /// Allocates a type 1 window, bound to nothing.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where the NIC has none, and in RAW mode, since windows have no
    /// raw keys; [`ErrorKind::OutOfResources`].
    pub fn alloc_type_1_window(&self) -> Result<Type1Window> {
        Type1Window::alloc(&self.inner)
    }

    /// Allocates a type 2 window, bound to nothing.
    ///
    /// # Errors
    /// As [`Domain::alloc_type_1_window`].
    pub fn alloc_type_2_window(&self, kind: Type2Kind) -> Result<Type2Window> {
        Type2Window::alloc(&self.inner, kind)
    }

    /// Closes the domain.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] with the domain back, as long as regions, endpoints, windows, mapped
    /// keys or buffers of the cache are left, or something cached cannot be given back.
    pub fn close(mut self) -> Result<(), Rejected<Self>> {
        if let Some(Err(error)) = self.cache.get().map(RegionCache::try_clear) {
            return Err(Rejected::new(self, error));
        }
        let live = self.live();
        // The cache is one that holds it, and each buffer of the cache is one more.
        let held = Arc::strong_count(&self.inner) - 1 - usize::from(self.cache.get().is_some());
        if held > 0 || live.mapped_keys > 0 {
            let error = Error::new(ErrorKind::Busy, "close domain")
                .provider(self.provider_attr().nic.to_string())
                .context("held", held)
                .context("regions", live.regions)
                .context("endpoints", live.endpoints)
                .context("windows", live.windows)
                .context("mapped_keys", live.mapped_keys)
                .remedy("close regions, endpoints, windows and the cache's buffers and unmap raw keys first");
            return Err(Rejected::new(self, error));
        }
        drop(self.cache.take());
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

impl Drop for DomainInner {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // In a forked child, closing the domain would close objects that the parent uses.
            std::mem::forget(Arc::clone(&self.provider));
        }
    }
}

impl DomainInner {
    pub(crate) fn provider(&self) -> &Arc<dyn ProviderDomain> {
        &self.provider
    }

    /// The mode without BASIC and SCALABLE.
    #[inline]
    pub(crate) fn effective(&self) -> MrMode {
        self.effective
    }

    pub(crate) fn addressing(&self) -> Addressing {
        if self.effective().contains(MrMode::VIRT_ADDR) {
            Addressing::Virtual
        } else {
            Addressing::ZeroBased
        }
    }

    pub(crate) fn raw_keys(&self, operation: &'static str) -> Result<&dyn RawKeys> {
        self.provider.raw_keys().ok_or_else(|| {
            self.missing(
                Features::RAW_KEYS,
                operation,
                ErrorKind::Unsupported,
                "this provider has no raw keys: exchange the key of the region",
            )
        })
    }

    /// Returns the error of a call that needs a facet which the provider's domain lacks, with the
    /// provider's advice or else `remedy`.
    #[cold]
    pub(crate) fn missing(
        &self,
        feature: Features,
        operation: &'static str,
        kind: ErrorKind,
        remedy: &'static str,
    ) -> Error {
        Error::new(kind, operation)
            .provider(self.provider_attr.nic.to_string())
            .remedy(self.provider.remedy_without(feature).unwrap_or(remedy))
    }

    /// Returns true if a region with these flags can be used as soon as it is registered.
    #[inline]
    fn starts_enabled(&self, flags: MrFlags) -> bool {
        let waits_for_counter =
            self.effective.contains(MrMode::RMA_EVENT) && flags.contains(MrFlags::RMA_EVENT);
        !self.effective.contains(MrMode::ENDPOINT) && !waits_for_counter
    }

    fn first_state(&self, flags: MrFlags) -> RegionState {
        if self.starts_enabled(flags) { RegionState::Enabled } else { RegionState::Disabled }
    }

    fn auth_key<'a>(&'a self, given: Option<&'a AuthKey>) -> &'a AuthKey {
        given.filter(|key| !key.0.is_empty()).unwrap_or(&self.attr.auth_key)
    }
}

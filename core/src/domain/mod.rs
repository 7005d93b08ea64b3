//! Domains, which implement the semantics of `fi_mr(3)` over any provider.
//!
//! A domain checks each request, asks the registry for the owner of the memory, asks a
//! [`PathSelector`] for the path of device memory, and registers with a provider.
//!
//! The files form layers, lower ones first. A file imports only from files before it, and
//! `DomainInner` from this file:
//!
//! - `prefault`: populates pages before a registration; `terms`: the settings of a request, and the
//!   promise about its memory
//! - `region_state`: the state of a region; `region`: its public handle; `region_slice`,
//!   `region_view`: parts of regions
//! - `metrics`: counts of registrations, refusals and lookups
//! - `growth`: the permission to register more than requested; `attr`: attributes of domains
//! - `memory`: memory that regions hold; `host_memory`, `device_buffer`: the library's own kinds
//! - `request`: requests and their checks; `owner`: the owner of the memory
//! - `register`: one registration; `asynchronous`: the worker that runs it
//! - `typed_region`, `roaming_region`, `scope`, `batch`, `fabric`: the public registrations
//! - `held`: the buffers that cached regions keep allocated; `monitors`: monitors of memory
//! - `cached`: the registration cache of a domain; `cached_buffer`: its buffers; `inbound`:
//!   flushes of devices; `local`: leases of local memory; `queue`: completion queues
//! - `endpoint`: endpoints; `rail_endpoint`: endpoints of several NICs that share transfers;
//!   `window`: memory windows; `grant`: grants
//! - `changed`, `sparse`: regions over memory that comes and goes

mod asynchronous;
mod attr;
mod batch;
mod cached;
mod cached_buffer;
mod changed;
mod device_buffer;
mod endpoint;
pub mod fabric;
mod grant;
mod growth;
mod held;
mod host_memory;
mod inbound;
mod local;
mod memory;
mod metrics;
mod monitors;
mod owner;
mod prefault;
mod queue;
mod rail_endpoint;
mod region;
mod region_slice;
mod region_state;
mod region_view;
mod register;
mod request;
mod roaming_region;
mod scope;
mod sparse;
mod terms;
mod typed_region;
mod window;

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

pub use self::{
    attr::{CacheAttr, DomainAttr},
    batch::{Batch, Regions},
    cached::{CachedRegion, OwnedCachedRegion, RegionCache, RegionLookupHandle, Registrations},
    cached_buffer::CachedBuffer,
    device_buffer::DeviceBuffer,
    endpoint::{Atomic, Endpoint},
    grant::{Grant, GrantKind},
    growth::Growth,
    host_memory::{AnyBits, Items},
    memory::{BorrowedDmaBuf, DmaBuf, KeptRaw, Memory, Place, Raw},
    metrics::{DomainMetrics, LatencyHistogram, PathMetrics, RefusalCount},
    monitors::Watch,
    prefault::{Prefault, prefault},
    rail_endpoint::{RailEndpoint, RailState, RailStatus, RailTransfer, Stripe},
    region::MemoryRegion,
    region_slice::RegionSlice,
    region_state::RegionState,
    region_view::RegionView,
    request::{Request, os_page_sizes},
    roaming_region::RoamingRegion,
    scope::{Borrowed, Scoped},
    sparse::{SparsePart, SparseRegion},
    terms::Promise,
    typed_region::Region,
    window::{Type1Window, Type2Bind, Type2Kind, Type2Window},
};

use self::{asynchronous::Worker, grant::SpareWindows, inbound::Inbound, queue::DomainQueue};
use crate::{
    Addressing, AuthKey, Decision, DomainBindFlags, Error, ErrorKind, Iova, MrFlags, MrMode,
    ProcessMark, RawKey, Registry, Rejected, RemoteKey, Result,
    event_queue::EventQueue,
    path::{DirectPath, PathSelector},
    provider::{
        CompletionQueue, DomainRequest, EndpointAttr, Features, LiveObjects, NicEvent, NicState,
        Provider, ProviderAttr, ProviderDomain, RawKeys, Transport,
    },
};

/// An open domain, which registers memory with one NIC (`fid_domain`).
///
/// Any number of threads may call its methods at once. Regions, endpoints and windows keep the NIC
/// open, so a domain may be dropped before them. [`Domain::close`] fails while any of them exists.
///
/// A domain belongs to the process that opened it. In a forked child, calls that register memory,
/// look up memory in the cache or open an object fail with [`ErrorKind::BadState`]. The child must
/// not make other calls, which may not detect the fork. Closing or dropping the child's copies of
/// objects does not affect the parent.
///
/// ```no_run
/// use hmem_core::{Access, Domain, Result};
///
/// /// Registers a buffer and returns the bytes of its key, to send to a peer.
/// fn share(domain: &Domain, send: impl FnOnce(Vec<u8>)) -> Result<Vec<u8>> {
///     let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
///     let region = domain.register(vec![0_u8; 4096], access)?;
///     send(region.key()?.to_bytes());
///     // After the peer is done: the region returns the buffer.
///     Ok(region.close()?)
/// }
/// ```
pub struct Domain {
    /// The registration cache. Declared first, so that it is dropped before `inner`, which its
    /// regions use.
    cache: OnceLock<RegionCache>,
    inner: Arc<DomainInner>,
}

/// The state that a domain shares with its regions, endpoints and windows. The NIC stays open until
/// the last owner of this state is dropped.
pub(crate) struct DomainInner {
    provider: Arc<dyn ProviderDomain>,
    registry: Arc<Registry>,
    selector: Arc<dyn PathSelector>,
    attr: DomainAttr,
    /// The negotiated mr_mode bits. In a domain of an old mode, BASIC or SCALABLE, the value has
    /// the bit of that mode, and `effective` has the bits that the mode stands for.
    mode: MrMode,
    /// The mr_mode bits that apply: `mode`, with BASIC or SCALABLE replaced by the bits that the
    /// old mode stands for.
    effective: MrMode,
    /// A copy of the provider's attributes of the NIC.
    provider_attr: ProviderAttr,
    /// The decision that all regions of host memory share.
    plain_host: Arc<Decision>,
    /// The process that opened the domain. A forked child must not use the domain.
    process: ProcessMark,
    /// The thread for asynchronous registrations. [`Domain::bind`] sets it.
    worker: OnceLock<Worker>,
    inbound: Arc<Inbound>,
    spare_windows: SpareWindows,
    metrics: metrics::Counters,
}

impl Domain {
    /// Opens a domain on a NIC of `provider`, for memory of the ifaces of `registry`.
    ///
    /// Applications usually open domains through `hmem::Hmem`, which supplies the registry and the
    /// selector.
    ///
    /// # Errors
    /// - [`ErrorKind::ModeMismatch`], which names the wrong or missing bits:
    ///   - The provider needs bits that `attr.mr_mode` does not offer, or does not support BASIC.
    ///   - `attr.mr_mode` has an undefined bit.
    ///   - `attr.mr_mode` combines BASIC or SCALABLE with other bits. Only LOCAL may accompany
    ///     BASIC, if the domain needs LOCAL.
    ///   - `attr.mr_mode` lacks LOCAL, and [`DomainAttr::driver_calls_in_transfers`] is false.
    /// - [`ErrorKind::InvalidArgument`] for a NIC that the provider does not have, for staging
    ///   attributes that are 0 or too large, and for a direct path that is listed twice.
    /// - The errors of [`Provider::nics`], [`ProcessMark::current`] and [`Provider::open_domain`].
    pub fn open(
        provider: &dyn Provider,
        registry: Arc<Registry>,
        selector: Arc<dyn PathSelector>,
        attr: DomainAttr,
    ) -> Result<Self> {
        attr.staging.check()?;
        attr.direct_paths.as_deref().map_or(Ok(()), DirectPath::check)?;
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
        let mode = negotiate(&attr, nic)?;
        let basic = nic.basic_mr_mode.union(nic.required_mr_mode);
        if mode.contains(MrMode::BASIC) && !basic.contains(MrMode::BASIC_MEANS) {
            return Err(Error::new(ErrorKind::ModeMismatch, "open domain")
                .provider(nic.nic.to_string())
                .context("bits", MrMode::BASIC)
                .remedy(
                    "offer the single bits instead: this provider cannot run BASIC registration",
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
        let mut plain_host = selector.plain_host(&nic.nic);
        if let Some(cache) = &nic.driver_cache {
            plain_host.reason.push_str(&format!("; {cache} is in force"));
        }
        let provider = provider.open_domain(&request)?;
        Ok(Self {
            cache: OnceLock::new(),
            inner: Arc::new(DomainInner {
                provider_attr: provider.attr().clone(),
                provider,
                inbound: Arc::new(Inbound::new(Arc::clone(&registry))),
                registry,
                selector,
                metrics: metrics::Counters::new(attr.registration_latency),
                attr,
                mode,
                effective: mode.effective(),
                plain_host: Arc::new(plain_host),
                process,
                worker: OnceLock::new(),
                spare_windows: SpareWindows::default(),
            }),
        })
    }

    /// Returns the negotiated mr_mode bits. If the application asked for BASIC or SCALABLE, the
    /// result has that bit.
    #[must_use]
    pub fn mr_mode(&self) -> MrMode {
        self.inner.mode
    }

    /// Returns the attributes that the provider reports for this domain's NIC.
    #[must_use]
    pub fn provider_attr(&self) -> &ProviderAttr {
        &self.inner.provider_attr
    }

    /// Returns the optional features of the provider's domain.
    #[must_use]
    pub fn features(&self) -> Features {
        Features::of(self.provider_domain())
    }

    /// Returns the provider's own domain.
    ///
    /// As a `&dyn Any` it can be downcast to the provider's type, for functions that only this
    /// provider has. A region that is registered or deregistered through the provider's domain is
    /// unknown to this [`Domain`].
    #[must_use]
    pub fn provider_domain(&self) -> &dyn ProviderDomain {
        &*self.inner.provider
    }

    /// Returns the ifaces whose memory this domain can register.
    #[must_use]
    pub fn registry(&self) -> &Arc<Registry> {
        &self.inner.registry
    }

    /// Returns the number of objects that the provider holds for this domain now. All numbers are 0
    /// in a forked child.
    #[must_use]
    pub fn live(&self) -> LiveObjects {
        if !self.inner.process.is_current() {
            return LiveObjects::default();
        }
        self.inner.provider.live()
    }

    /// Reads the events that the NIC's driver has reported, and returns the state of the NIC.
    ///
    /// The state is [`NicState::Working`] if the domain lacks the feature `NIC_LIFE`
    /// ([`Domain::features`]), and in a forked child. [`NicLife`](crate::provider::NicLife) says
    /// how a domain behaves after the loss of its device.
    #[must_use]
    pub fn nic_state(&self) -> NicState {
        let life = self.inner.provider.nic_life().filter(|_| self.inner.process.is_current());
        life.map_or(NicState::Working, |life| life.nic_state())
    }

    /// Reads the events that the NIC's driver has reported. Returns those that earlier calls on
    /// this domain have not returned, oldest first: at most the latest 64.
    ///
    /// Returns none if the domain lacks the feature `NIC_LIFE`, and in a forked child.
    #[must_use]
    pub fn nic_events(&self) -> Vec<NicEvent> {
        let life = self.inner.provider.nic_life().filter(|_| self.inner.process.is_current());
        life.map_or_else(Vec::new, |life| life.nic_events())
    }

    /// Returns the total size of the domain's staging buffers in bytes.
    ///
    /// The size is 0 before the first staged region, and does not change after that.
    /// [`LiveObjects::staging_buffers`] is the number of buffers in use.
    #[must_use]
    pub fn staging_bytes(&self) -> u64 {
        self.inner.provider.staging().map_or(0, |staging| staging.staging_bytes())
    }

    /// Executes posted requests that proceed only during calls of the application, and returns the
    /// number of requests that ended. Reading a completion queue does the same.
    ///
    /// Only domains with the feature `MANUAL_PROGRESS` ([`Domain::features`]) have such requests.
    /// If [`ProviderAttr::progress`] is `Manual`, all requests of the domain proceed only in this
    /// way. Otherwise only requests with staged memory do.
    ///
    /// # Errors
    /// - The errors of [`ManualProgress::progress`](crate::provider::ManualProgress::progress).
    /// - [`ErrorKind::BadState`] in a forked child, if the domain lacks the feature.
    pub fn progress(&self) -> Result<usize> {
        match self.inner.provider.manual_progress() {
            Some(work) => work.progress(),
            None => self.inner.process.check("progress").map(|()| 0),
        }
    }

    /// Makes registrations of this domain asynchronous (`fi_domain_bind` with `FI_REG_MR`).
    ///
    /// From now on a thread of the domain registers, and `queue` reports the result of each
    /// registration. The thread ends when the domain and all its regions are dropped.
    ///
    /// These registrations stay synchronous and cause no event: those of [`Domain::scope`],
    /// [`Batch::register`], [`MemoryRegion::grant`] and the cache.
    ///
    /// # Errors
    /// - [`ErrorKind::BadFlags`] unless `flags` is REG_MR.
    /// - [`ErrorKind::BadState`] if a queue is bound already.
    /// - [`ErrorKind::OutOfResources`] if the thread cannot be started.
    pub fn bind(&self, queue: &Arc<EventQueue>, flags: DomainBindFlags) -> Result<()> {
        if flags != DomainBindFlags::REG_MR {
            return Err(Error::new(ErrorKind::BadFlags, "domain bind")
                .context("flags", format_args!("{:#x}", flags.bits()))
                .remedy("bind an event queue with REG_MR and nothing else"));
        }
        self.inner.worker.set(Worker::start(Arc::clone(queue))?).map_err(|_| {
            Error::new(ErrorKind::BadState, "domain bind")
                .remedy("open another domain for the second queue: this domain has one")
        })
    }

    /// Maps a peer's raw key, so that transfers of this domain can use it (`fi_mr_map_raw`).
    ///
    /// The peer sent `base` and `len` together with the key. The two numbers only describe the key:
    /// the peer's NIC enforces its own bounds.
    ///
    /// # Errors
    /// - [`ErrorKind::Malformed`] for bytes that are not a raw key.
    /// - [`ErrorKind::OutOfResources`] if the provider can map no more keys.
    /// - [`ErrorKind::Unsupported`] if the provider has no raw keys.
    pub fn map_raw(&self, base: Iova, len: u64, raw: &RawKey) -> Result<RemoteKey> {
        self.inner.raw_keys("map raw key")?.map_raw(base, len, self.inner.addressing(), raw)
    }

    /// Unmaps a key that [`Domain::map_raw`] returned (`fi_mr_unmap_key`).
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidKey`] for a key that this domain did not map.
    /// - [`ErrorKind::Unsupported`] if the provider has no raw keys.
    pub fn unmap_key(&self, key: &RemoteKey) -> Result<()> {
        self.inner.raw_keys("unmap key")?.unmap_key(key)
    }

    /// Opens a completion queue for the endpoints of this domain, with room for `depth` requests. 0
    /// counts as 1. [`Endpoint`] has an example.
    ///
    /// To get completions, poll ([`CompletionQueue::read`]), wait with a timeout
    /// ([`CompletionQueue::wait`]), or add the queue's file descriptor to an event loop
    /// ([`CompletionQueue::channel`]). The queue does not keep the domain open.
    ///
    /// The queue loses no completion (`FI_RM_ENABLED`). Each request occupies room from its post
    /// until its completion is read. A request that the provider divides occupies room for each
    /// part. A post without enough room fails with [`ErrorKind::Again`].
    ///
    /// Let `depth` be at least the sum of [`EndpointAttr::depth`] over the queue's endpoints. An
    /// endpoint that uses the queue for transmits and for receives counts twice. In a shallower
    /// queue, requests that wait for a peer (receives without a message, sends without a receive)
    /// can occupy all the room. Posts then fail until the peer acts.
    ///
    /// Before the queue returns a successful completion of a receive, of a peer's write with
    /// immediate data, of a read or of an atomic, it flushes the devices whose memory the NIC may
    /// write. Device work that starts afterwards sees the bytes, including those that the sender of
    /// a message wrote before the message. The first failed flush is logged. The queue does not
    /// flush if [`DomainAttr::driver_calls_in_transfers`] is false.
    ///
    /// # Errors
    /// - [`ErrorKind::Unsupported`] if the provider only registers memory
    ///   ([`Features::TRANSPORT`]).
    /// - [`ErrorKind::OutOfResources`] if the NIC or the process can have no more queues.
    /// - [`ErrorKind::BadState`] in a forked child.
    /// - The driver's own error.
    pub fn open_cq(&self, depth: usize) -> Result<Arc<dyn CompletionQueue>> {
        self.inner.process.check("open completion queue")?;
        let queue = self.inner.transport("open completion queue")?.open_cq(depth)?;
        Ok(Arc::new(DomainQueue::new(&self.inner, queue, self.leases_local_memory())))
    }

    /// Makes the bytes that the NIC wrote into device memory visible to device work that starts
    /// after this call.
    ///
    /// A queue from [`Domain::open_cq`] does this before it returns completions. Call this function
    /// if the application learns of a remote write in another way: from a counter, a flag in
    /// memory, or a message on another channel. If [`DomainAttr::driver_calls_in_transfers`] is
    /// false, call it after every transfer into device memory.
    ///
    /// # Errors
    /// The error of the first device that failed. All other devices are flushed too.
    pub fn flush_inbound(&self) -> Result<()> {
        self.inner.inbound.flush()
    }

    /// Opens an endpoint. Both completion queues must come from [`Domain::open_cq`] of this domain.
    /// [`Endpoint`] has an example.
    ///
    /// In LOCAL mode a transfer needs a descriptor for all its local memory, and in HMEM mode for
    /// its local device memory. If the domain has a cache, descriptors may be left out: the
    /// endpoint registers the memory through the cache, like [`RegionCache::get`], and holds the
    /// lease until the completion is read or the endpoint is closed. Descriptors are required even
    /// with a cache in ENDPOINT mode, where a region must be bound to an endpoint before use, and
    /// if [`DomainAttr::driver_calls_in_transfers`] is false.
    ///
    /// # Errors
    /// - [`ErrorKind::OutOfResources`] if the endpoint, or the domain's cache, cannot be created.
    /// - [`ErrorKind::InvalidArgument`] for a queue that another domain opened, or that the
    ///   provider's domain opened directly.
    /// - [`ErrorKind::Unsupported`] for an authorization key, if the provider does not support
    ///   these keys, and if the provider only registers memory ([`Features::TRANSPORT`]).
    /// - [`ErrorKind::BadState`] in a forked child.
    /// - The driver's own error.
    pub fn open_endpoint(&self, attr: &EndpointAttr) -> Result<Endpoint> {
        self.inner.process.check("open endpoint")?;
        let transport = self.inner.transport("open endpoint")?;
        let cache = if self.leases_local_memory() { Some(self.cache()?) } else { None };
        Endpoint::open(&self.inner, transport, attr, cache)
    }

    /// Returns true if endpoints register local memory without a descriptor through the cache.
    fn leases_local_memory(&self) -> bool {
        let (mode, attr) = (self.inner.effective, &self.inner.attr);
        mode.intersects(MrMode::LOCAL | MrMode::HMEM)
            && !mode.contains(MrMode::ENDPOINT)
            && attr.driver_calls_in_transfers
            && attr.cache.is_some()
    }

    /// Closes the domain.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if regions, endpoints, windows, grants, mapped keys or a
    /// [`CachedBuffer`] are left, if a cached region has a lease, or if the cache cannot deregister
    /// a region. The error returns the domain.
    pub fn close(mut self) -> Result<(), Rejected<Self>> {
        if let Some(Err(error)) = self.cache.get().map(RegionCache::try_clear) {
            return Err(Rejected::new(self, error));
        }
        let live = self.live();
        // The handle and the cache hold one reference each. Each buffer of the cache holds one
        // more.
        let held = Arc::strong_count(&self.inner) - 1 - usize::from(self.cache.get().is_some());
        if held > 0 || live.mapped_keys > 0 {
            let error = Error::new(ErrorKind::Busy, "close domain")
                .provider(self.provider_attr().nic.to_string())
                .context("held", held)
                .context("regions", live.regions)
                .context("endpoints", live.endpoints)
                .context("windows", live.windows)
                .context("mapped_keys", live.mapped_keys)
                .remedy(
                    "close the regions, endpoints, windows and the cache's buffers, and unmap raw \
                     keys, first",
                );
            return Err(Rejected::new(self, error));
        }
        drop(self.cache.take());
        Ok(())
    }
}

/// Returns the mr_mode bits that a domain with these attributes uses on `nic`.
fn negotiate(attr: &DomainAttr, nic: &ProviderAttr) -> Result<MrMode> {
    if attr.driver_calls_in_transfers {
        return attr.mr_mode.negotiate(nic.required_mr_mode);
    }
    if !attr.mr_mode.contains(MrMode::LOCAL) {
        return Err(Error::new(ErrorKind::ModeMismatch, "open domain")
            .provider(nic.nic.to_string())
            .context("bits", MrMode::LOCAL)
            .context("offered", attr.mr_mode)
            .context(
                "why",
                "transfers may not call drivers, and only a driver knows the owner of a buffer \
                 without a descriptor",
            )
            .remedy(
                "offer LOCAL and give every local buffer a descriptor, or set \
                 DomainAttr::driver_calls_in_transfers",
            ));
    }
    attr.mr_mode.negotiate(nic.required_mr_mode | MrMode::LOCAL)
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
            // In a forked child, closing the provider's domain would close objects of the parent.
            std::mem::forget(Arc::clone(&self.provider));
        }
    }
}

impl DomainInner {
    fn addressing(&self) -> Addressing {
        if self.effective.contains(MrMode::VIRT_ADDR) {
            Addressing::Virtual
        } else {
            Addressing::ZeroBased
        }
    }

    fn raw_keys(&self, operation: &'static str) -> Result<&dyn RawKeys> {
        self.provider.raw_keys().ok_or_else(|| {
            self.missing(
                Features::RAW_KEYS,
                operation,
                ErrorKind::Unsupported,
                "this provider has no raw keys: use MemoryRegion::key",
            )
        })
    }

    fn transport(&self, operation: &'static str) -> Result<&dyn Transport> {
        self.provider.transport().ok_or_else(|| {
            self.missing(
                Features::TRANSPORT,
                operation,
                ErrorKind::Unsupported,
                "this provider only registers memory: post requests by the program that owns the \
                 queue pairs, or open a domain of another provider",
            )
        })
    }

    /// Returns the error for a facet that the provider's domain lacks. If the provider has no
    /// remedy of its own for that, the error has `remedy`.
    #[cold]
    fn missing(
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

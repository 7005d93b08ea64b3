//! [`FabricDomain`], which implements core's traits for a domain of libfabric.

#![allow(unsafe_code, reason = "calls libfabric's objects, and registers by address")]

use std::{
    any::Any,
    ffi::{c_int, c_void},
    fmt, mem,
    os::fd::AsRawFd,
    ptr,
    sync::Arc,
};

use hmem_core::{
    Access, AddressRange, Addressing, AuthKey, Domain, ErrorKind, IfaceKind, Iova, MrFlags, RawKey,
    Registry, RemoteKey, Result,
    provider::{
        self, Backing, CompletionQueue, CompositeKeys, Enabling, EndpointAttr, EndpointBinding,
        KeyRequest, LiveObjects, ManualProgress, Piece, ProviderAttr, ProviderDomain,
        ProviderEndpoint, ProviderRegion, RawKeys, Registration, StagingAccess, StagingAttr,
    },
    registration::RegisteredMemory,
};
use hmem_p2p::staging::{Pool, StagedRegion};
use parking_lot::Mutex;

use super::{
    attr::DomainAttr,
    errors,
    hub::{AliveMemory, Hub},
    listing::{Entry, Listing},
    open::{DomainGuard, OpenDomain, Unfinished, close_all},
    region::{Kind, LOCAL_RIGHTS, Part, Parts, Region, Regions},
    settings::{EndpointPointer, Settings},
    staging::Staging,
    sys::{self, fi_mr_attr, fi_mr_dmabuf, fi_mr_map_raw, fi_mr_raw_attr, iovec},
    transport::{Endpoint, Transport},
};

const REGATTR: &str = "fi_mr_regattr";

/// Number of keys that a registration tries if the application leaves the choice to the provider.
/// The numbers are random, so that a second attempt is already rare.
const KEY_ATTEMPTS: usize = 16;

/// A domain in a `fid_domain`, with calls that [`Domain`] does not have.
///
/// ```no_run
/// use hmem_core::Domain;
/// use hmem_provider_libfabric::FabricDomain;
///
/// # fn f(domain: &Domain) -> hmem_core::Result<()> {
/// let fabric = FabricDomain::of(domain).expect("a domain of the libfabric provider");
/// println!("fid_domain {:p}", fabric.as_ptr());
/// # Ok(()) }
/// ```
pub struct FabricDomain {
    pub(super) open: Arc<OpenDomain>,
    pub(super) regions: Arc<Regions>,
    /// The endpoints; `None` for a domain of the program.
    pub(super) transport: Option<Arc<Transport>>,
    /// The keys that the application mapped with `map_raw`. libfabric may return a key twice.
    pub(super) mapped: Mutex<Vec<u64>>,
}

impl FabricDomain {
    /// Creates a domain without endpoints.
    pub(super) fn open(open: Arc<OpenDomain>) -> Result<Self> {
        let nic = &open.attr.provider_attr.nic;
        tracing::debug!(%nic, "libfabric domain opened");
        let regions = Arc::new(Regions::new()?);
        Ok(Self { open, regions, transport: None, mapped: Mutex::default() })
    }

    /// Adds endpoints to a domain that the provider opened with `entry`.
    pub(super) fn with_endpoints(
        mut self,
        listing: &Listing,
        entry: Entry,
        registry: Arc<Registry>,
        staging: StagingAttr,
    ) -> Result<Self> {
        // In ENDPOINT mode each region has one endpoint, and this one would need them all.
        // Providers that reach this machine only watch the processes of peers.
        let layers = listing.provider_of(&entry);
        let local_only = layers.split(';').any(|layer| matches!(layer, "shm" | "sm2"));
        let alive = match self.open.attr.mr_mode & (sys::FI_MR_ENDPOINT | sys::FI_MR_RAW) {
            0 if !local_only => Some(self.expose_alive()?),
            _ => None,
        };
        let has_devices = registry.iter().any(|iface| iface.kind() != IfaceKind::SYSTEM);
        let hub = Hub {
            open: Arc::clone(&self.open),
            regions: Arc::clone(&self.regions),
            has_devices,
            registry,
            limits: entry.limits(),
            entry,
            fellows: Arc::clone(&listing.fellows),
            verbs: layers.split(';').any(|layer| layer == "verbs"),
            local_only,
            alive,
            staging: Staging::new(staging),
        };
        self.transport = Some(Transport::start(hub, layers, listing.progress_thread)?);
        Ok(self)
    }

    /// Registers the memory that peers read to learn if this process still runs.
    fn expose_alive(&self) -> Result<(AliveMemory, Part)> {
        let memory = AliveMemory::new()?;
        let part = self.register_own(memory.range()?, Access::REMOTE_READ | Access::READ)?;
        Ok((memory, part))
    }

    /// Registers memory of the provider itself.
    fn register_own(&self, range: AddressRange, access: Access) -> Result<Part> {
        let (ranges, auth_key) = ([range], AuthKey::default());
        let mut request = Registration::new(&ranges, access, &auth_key);
        if self.open.attr.mr_mode & sys::FI_MR_VIRT_ADDR == 0 {
            request.addressing = Addressing::ZeroBased;
        }
        let piece = Piece { range, backing: Backing::Host { owned: true } };
        self.register_piece(&request, &piece)
    }

    /// Adds a staged region. Registers the staging buffers if this is the domain's first staged
    /// region.
    ///
    /// # Safety
    /// The safety rules of [`ProviderDomain::register`].
    unsafe fn stage(
        &self,
        request: &Registration<'_>,
        pieces: &[Piece<'_>],
    ) -> Result<ProviderRegion> {
        let transport = self.own("register")?;
        // SAFETY: the caller follows the rules of `ProviderDomain::register`. The close of a region
        // waits for its requests.
        let memory = unsafe { StagedRegion::new(request, pieces, self.attr().staged_access) }
            .map_err(|error| error.provider(self.open.name()))?;
        transport.hub.staging.prepare(|pool| {
            let part = self.register_own(pool.range(), LOCAL_RIGHTS)?;
            let (parts, kind) = ([part].into(), Kind::Buffers);
            let addressing = Addressing::Virtual;
            let region = Region { parts, addressing, access: LOCAL_RIGHTS, kind };
            Ok(self.regions.insert(region).local)
        })?;
        let Registration { access, addressing, .. } = *request;
        let kind = Kind::Staged(Arc::new(memory));
        Ok(self.regions.insert(Region { parts: Parts::new(), addressing, access, kind }))
    }

    /// Returns the libfabric domain behind `domain`, or `None` if another provider opened it.
    #[must_use]
    pub fn of(domain: &Domain) -> Option<&Self> {
        (domain.provider_domain() as &dyn Any).downcast_ref()
    }

    /// Returns the `fid_domain`.
    #[must_use]
    pub fn as_ptr(&self) -> *mut c_void {
        self.open.domain.cast()
    }

    /// Keeps this provider from calling the libfabric domain and its objects, until the guard is
    /// dropped.
    ///
    /// The guard is for programs that opened the domain with another threading model than
    /// `FI_THREAD_SAFE`. Such a program holds the guard around each of its own calls of the domain
    /// and its objects. The guard is needless only while no other thread registers or closes
    /// regions. The cache of a domain has a thread that closes regions.
    ///
    /// The guard does nothing if the domain has `FI_THREAD_SAFE`, or if this provider opened the
    /// domain.
    pub fn lock(&self) -> DomainGuard<'_> {
        self.open.lock_for_program()
    }

    /// Returns the raw key of a registration.
    pub(super) fn raw_key_of(&self, part: &Part) -> Result<RawKey> {
        const RAW: &str = "fi_mr_raw_attr";
        if self.open.attr.mr_mode & sys::FI_MR_RAW == 0 {
            let why = "send the key itself: the domain has no raw keys (RAW mode)";
            return Err(self.open.refuse(ErrorKind::Unsupported, RAW, why));
        }
        let (mut base, mut len) = (0, self.open.attr.key_size);
        let mut raw = vec![0; len];
        let (base_addr, raw_key, key_size) = (&raw mut base, raw.as_mut_ptr(), &raw mut len);
        let mut attr = fi_mr_raw_attr { flags: 0, base_addr, raw_key, key_size };
        let argument = (&raw mut attr).cast();
        // SAFETY: the table of regions has the registration, so it is open. The buffers outlive the
        // call, which writes at most `len` bytes of key.
        unsafe {
            self.open.control(RAW, part.mr.cast(), (sys::FI_GET_RAW_MR, argument))?;
        }
        raw.truncate(len);
        Ok(RawKey(raw))
    }

    /// Closes the registrations of a region, and removes the region from the table.
    fn close_region(&self, region: ProviderRegion) -> Result<()> {
        let mut taken = self.regions.take(region, "deregister")?;
        while let Some(part) = taken.parts.last() {
            // SAFETY: only this call has the region since it left the table.
            if let Err(error) = unsafe { self.open.close(part) } {
                self.regions.put_back(region, taken);
                return Err(error);
            }
            taken.parts.pop();
        }
        Ok(())
    }

    /// Registers one piece of a request's memory. The registration is not yet bound and enabled.
    fn register_piece(&self, request: &Registration<'_>, piece: &Piece<'_>) -> Result<Part> {
        let open = &*self.open;
        let range = piece.range;
        let (iov, dma_buf);
        let mut attr = fi_mr_attr::EMPTY;
        let mut flags = request.flags.difference(MrFlags::MR_DMABUF).bits();
        attr.iov_count = 1;
        attr.access = access_bits(request.access);
        let address = match &piece.backing {
            Backing::DmaBuf { fd, offset, .. } => {
                // The library adds the offset to the base.
                let base = range.start().0.wrapping_sub(offset.0);
                dma_buf = fi_mr_dmabuf {
                    fd: fd.as_raw_fd(),
                    offset: offset.0,
                    len: range.len() as usize,
                    base_addr: ptr::with_exposed_provenance_mut(base as usize),
                };
                attr.mr_iov = (&raw const dma_buf).cast();
                flags |= sys::FI_MR_DMABUF;
                range.start().0
            }
            Backing::Host { .. } => range.start().0,
            Backing::PeerMemory { address, .. } => address.0,
            Backing::Staged { .. } => {
                let why = "stage a region as a whole or not at all";
                return Err(open.refuse(ErrorKind::Unsupported, REGATTR, why));
            }
        };
        if flags & sys::FI_MR_DMABUF == 0 {
            let iov_base = ptr::with_exposed_provenance(address as usize);
            iov = iovec { iov_base, iov_len: range.len() as usize };
            attr.mr_iov = &raw const iov;
        }
        let (iface, device) = self.owner_of(request, piece)?;
        (attr.iface, attr.device) = (iface, device);
        // Requests name no descriptor of this region. `ofi_rxm` lets peers read a region with the
        // right to send, and write one with the right to receive.
        let undescribed =
            open.own && open.attr.mr_mode & sys::FI_MR_LOCAL == 0 && iface == sys::FI_HMEM_SYSTEM;
        let local = access_bits(LOCAL_RIGHTS);
        // Peers get a number that is no key, since `ofi_rxm` turns local rights to remote ones. It
        // cannot keep two regions without remote rights, so peers may read an undescribed one. They
        // cannot guess its key.
        let hidden = open.own && attr.access & !local == 0;
        if undescribed && hidden {
            let layered = open.attr.provider_attr.nic.name.contains("ofi_rxm");
            attr.access = if layered { sys::FI_REMOTE_READ } else { sys::FI_SEND };
        } else if undescribed {
            attr.access &= !local;
        }
        if !request.auth_key.0.is_empty() {
            attr.auth_key_size = request.auth_key.0.len();
            attr.auth_key = request.auth_key.0.as_ptr().cast_mut();
        }
        let asked = if hidden { KeyRequest::Provider } else { request.key };
        let mr = self.regattr(asked, &mut attr, flags).map_err(|error| {
            errors::registration(error, iface != 0)
                .context("range", range)
                .context("access", request.access)
        })?;
        // SAFETY: the library returned the registration just now, with its key and descriptor.
        let (key, desc) = unsafe { ((*mr).key, (*mr).mem_desc) };
        let key = match request.key {
            _ if !hidden => key,
            KeyRequest::Application(key) => key,
            KeyRequest::Provider => open.random_key()?,
        };
        let base = match request.addressing {
            Addressing::Virtual => range.start().0,
            Addressing::ZeroBased => 0,
        };
        Ok(Part { mr, range, base, key, desc, owner: (iface, device) })
    }

    /// Calls `fi_mr_regattr` with the key of the request, or with keys of the provider's choice
    /// until one is free.
    fn regattr(
        &self,
        key: KeyRequest,
        attr: &mut fi_mr_attr,
        flags: u64,
    ) -> Result<*mut sys::fid_mr> {
        let open = &*self.open;
        // SAFETY: the owner keeps the domain open, so its table is valid.
        let regattr = unsafe { (*(*open.domain).mr).regattr };
        let regattr = regattr.ok_or_else(|| open.lacks(REGATTR))?;
        let mut mr = ptr::null_mut();
        let chooses = key == KeyRequest::Provider && open.attr.mr_mode & sys::FI_MR_PROV_KEY == 0;
        let mut left = if chooses { KEY_ATTEMPTS } else { 1 };
        loop {
            attr.requested_key = match key {
                KeyRequest::Application(key) => key,
                KeyRequest::Provider if chooses => open.random_key()?,
                KeyRequest::Provider => 0,
            };
            let _guard = open.lock();
            // SAFETY: the owner keeps the domain open. The attributes, with the range that they
            // point to, outlive the call. The caller of `ProviderDomain::register` promised that
            // the NIC may access the range.
            let returned =
                unsafe { regattr(open.domain.cast(), &raw const *attr, flags, &raw mut mr) };
            left -= 1;
            match open.check(REGATTR, returned) {
                Ok(()) => break,
                Err(error) if error.kind() == ErrorKind::NoKey && left > 0 => {}
                Err(error) => {
                    return Err(match key {
                        KeyRequest::Application(key) => {
                            error.context("key", format_args!("{key:#x}"))
                        }
                        KeyRequest::Provider => error,
                    });
                }
            }
        }
        if mr.is_null() {
            let why = "report this to the authors of the provider: it returned no region";
            return Err(open.refuse(ErrorKind::Driver, REGATTR, why));
        }
        Ok(mr)
    }

    /// Returns libfabric's numbers for the iface and device of a piece.
    ///
    /// # Errors
    /// Unsupported: libfabric has no number for the iface, and the piece is no dma-buf. libfabric
    /// uses the number as an index without a check, so it must not get an unknown number.
    fn owner_of(&self, request: &Registration<'_>, piece: &Piece<'_>) -> Result<(c_int, u64)> {
        let (iface, device) = match request.memory {
            RegisteredMemory::Device { iface, allocations, .. } => {
                (iface.kind(), allocations.first().and_then(|allocation| allocation.device))
            }
            RegisteredMemory::DmaBuf { iface: Some(iface), device, .. } => (iface.kind(), device),
            RegisteredMemory::Host { .. }
            | RegisteredMemory::DmaBuf { iface: None, .. }
            | RegisteredMemory::Part { .. } => return Ok((sys::FI_HMEM_SYSTEM, 0)),
        };
        match c_int::try_from(iface.0) {
            Ok(number) if iface <= IfaceKind::SYNAPSEAI => {
                Ok((number, device.map_or(0, |device| u64::from(device.0))))
            }
            // The provider imports the dma-buf, and does not call the iface.
            _ if matches!(piece.backing, Backing::DmaBuf { .. }) => Ok((sys::FI_HMEM_SYSTEM, 0)),
            _ => {
                let why = "use a dma-buf: libfabric has no number for the iface";
                let error = self.open.refuse(ErrorKind::Unsupported, REGATTR, why);
                Err(error.context("iface", iface))
            }
        }
    }

    /// Returns the kind of a region that is not staged.
    ///
    /// # Errors
    /// - Unsupported: libfabric has no iface for a dma-buf, and the region has local rights alone.
    /// - The errors of [`Self::owner_of`].
    fn kind(&self, request: &Registration<'_>, pieces: &[Piece<'_>]) -> Result<Kind> {
        if matches!(request.memory, RegisteredMemory::Host { .. }) {
            return Ok(Kind::Host);
        }
        for piece in pieces.iter().filter(|_| self.open.own) {
            let is_dma_buf = matches!(piece.backing, Backing::DmaBuf { .. });
            if is_dma_buf && self.owner_of(request, piece)?.0 == sys::FI_HMEM_SYSTEM {
                if LOCAL_RIGHTS.contains(request.access) {
                    let why = "stage the memory: libfabric would access this dma-buf as host \
                               memory in requests of this side";
                    return Err(self.open.refuse(ErrorKind::Unsupported, REGATTR, why));
                }
                return Ok(Kind::RemoteOnly);
            }
        }
        Ok(Kind::Direct)
    }

    /// Checks the parts of a request that libfabric ignores silently.
    fn check(&self, request: &Registration<'_>, pieces: &[Piece<'_>]) -> Result<()> {
        let DomainAttr { caps, auth_key_size, .. } = self.open.attr;
        let refuse = |why| Err(self.open.refuse(ErrorKind::Unsupported, REGATTR, why));
        let narrow = Access::REMOTE_RMA_WRITE | Access::REMOTE_ATOMIC;
        let grants_both =
            request.access.contains(Access::REMOTE_WRITE) || request.access.contains(narrow);
        if request.access.intersects(narrow) && !grants_both && caps & sys::FI_ATOMIC != 0 {
            return refuse(
                "register with REMOTE_WRITE: libfabric has one right for RMA writes and atomics",
            );
        }
        if request.access.contains(Access::REMOTE_ATOMIC) && caps & sys::FI_ATOMIC == 0 {
            return refuse("register without REMOTE_ATOMIC: the domain has no atomics (FI_ATOMIC)");
        }
        if request.access.contains(Access::MW_BIND) {
            return refuse("register without MW_BIND: libfabric has no memory windows");
        }
        if !request.auth_key.0.is_empty() && auth_key_size.is_none() {
            return refuse("register without an authorization key: the domain has none");
        }
        if pieces.len() > 1 && matches!(request.key, KeyRequest::Application(_)) {
            return refuse("let the provider choose the keys: each range has one of its own");
        }
        Ok(())
    }

    /// Returns the endpoint to which the provider binds a new region. Returns `None` if the mode of
    /// the domain lacks ENDPOINT, or if the application binds the region to an endpoint of this
    /// domain.
    ///
    /// # Errors
    /// InvalidArgument: the program opened the domain in ENDPOINT mode, and neither `settings` nor
    /// the builder names an endpoint.
    fn endpoint(&self, settings: Settings) -> Result<Option<EndpointPointer>> {
        if self.open.attr.mr_mode & sys::FI_MR_ENDPOINT == 0 {
            return Ok(None);
        }
        let endpoint = settings.endpoint.or(self.open.endpoint);
        if endpoint.is_none() && self.transport.is_some() {
            // The application binds the region to an endpoint of this domain, and enables it.
            return Ok(None);
        }
        endpoint.map(Some).ok_or_else(|| {
            let why = "name the endpoint by Builder::endpoint or Settings::endpoint: the domain \
                       binds each region to one (FI_MR_ENDPOINT)";
            self.open.refuse(ErrorKind::InvalidArgument, "register", why)
        })
    }
}

/// Returns libfabric's access bits for `access`. `FabricDomain::check` has refused the rights that
/// libfabric cannot express.
fn access_bits(access: Access) -> u64 {
    let mut bits = access.difference(Access::REMOTE_RMA_WRITE | Access::REMOTE_ATOMIC);
    bits.set(Access::REMOTE_WRITE, access.peers_write());
    bits.bits()
}

// SAFETY: the table of regions resolves every handle before a call of libfabric, and tokens are
// never used again. The caller of `with_domain` promised that nothing uses a region after
// `fi_close` has succeeded. The provider posts nothing.
unsafe impl ProviderDomain for FabricDomain {
    fn attr(&self) -> &ProviderAttr {
        &self.open.attr.provider_attr
    }

    unsafe fn register(
        &self,
        request: &Registration<'_>,
        pieces: &[Piece<'_>],
    ) -> Result<ProviderRegion> {
        self.open.process.check("register")?;
        self.check(request, pieces)?;
        if pieces.iter().any(|piece| matches!(piece.backing, Backing::Staged { .. })) {
            // SAFETY: the caller follows the rules of this function.
            return unsafe { self.stage(request, pieces) };
        }
        let endpoint = self.endpoint(Settings::of(request.extension))?;
        let kind = self.kind(request, pieces)?;
        // Outside of ENDPOINT mode, only a region that waits for a counter is disabled at first.
        let enable = request.enabled && endpoint.is_some();
        let mut made = Unfinished { open: &self.open, parts: Parts::new() };
        for piece in pieces {
            let part = self.register_piece(request, piece)?;
            made.parts.push(part);
            // SAFETY: the registration was made just now. The caller of `Settings::endpoint` or
            // `Builder::endpoint` promised an open endpoint of the domain.
            unsafe { self.open.start(&part, endpoint, enable) }?;
        }
        let parts = mem::take(&mut made.parts);
        let Registration { access, addressing, .. } = *request;
        Ok(self.regions.insert(Region { parts, addressing, access, kind }))
    }

    fn deregister(&self, region: ProviderRegion) -> Result<()> {
        self.open.process.check("deregister")?;
        if self.regions.has_staged() {
            self.regions.with(region, "deregister", |region| {
                if let Kind::Staged(staged) = &region.kind {
                    staged.close();
                }
                Ok(())
            })?;
        }
        match &self.transport {
            Some(transport) => transport.release(region.token, || self.close_region(region)),
            None => self.close_region(region),
        }
    }

    fn live(&self) -> LiveObjects {
        let mut live = self.regions.live();
        live.mapped_keys = self.mapped.lock().len() as u64;
        live.endpoints = self.transport.as_ref().map_or(0, |transport| transport.endpoints());
        live.staging_buffers = self.staging_pool().map_or(0, |pool| pool.held());
        live
    }

    fn accepts(&self, extension: &(dyn Any + Send + Sync)) -> bool {
        extension.is::<Settings>()
    }

    fn transport(&self) -> Option<&dyn provider::Transport> {
        self.transport.is_some().then_some(self as _)
    }

    fn manual_progress(&self) -> Option<&dyn ManualProgress> {
        self.transport.as_ref().is_some_and(|own| !own.has_thread()).then_some(self as _)
    }

    fn endpoint_binding(&self) -> Option<&dyn EndpointBinding> {
        let binds = self.open.attr.mr_mode & sys::FI_MR_ENDPOINT != 0;
        (binds && self.transport.is_some()).then_some(self as _)
    }

    fn enabling(&self) -> Option<&dyn Enabling> {
        Some(self)
    }

    fn staging(&self) -> Option<&dyn StagingAccess> {
        self.attr().imports.staged.then_some(self as _)
    }

    fn composite_keys(&self) -> Option<&dyn CompositeKeys> {
        Some(self)
    }

    fn raw_keys(&self) -> Option<&dyn RawKeys> {
        (self.open.attr.mr_mode & sys::FI_MR_RAW != 0).then_some(self as _)
    }
}

impl FabricDomain {
    /// Returns the endpoints of the domain.
    ///
    /// # Errors
    /// Unsupported: the program opened the domain, so this provider has no endpoints in it.
    fn own(&self, operation: &'static str) -> Result<&Arc<Transport>> {
        self.transport.as_ref().ok_or_else(|| {
            let why = "use the endpoints of the program that opened the domain";
            self.open.refuse(ErrorKind::Unsupported, operation, why)
        })
    }

    /// Returns the staging buffers, if the domain has a staged region or had one.
    fn staging_pool(&self) -> Option<Arc<Pool>> {
        Some(self.transport.as_ref()?.hub.staging.buffers()?.0)
    }
}

impl StagingAccess for FabricDomain {
    fn staging_bytes(&self) -> u64 {
        self.staging_pool().map_or(0, |pool| pool.range().len())
    }
}

impl provider::Transport for FabricDomain {
    fn open_cq(&self, depth: usize) -> Result<Arc<dyn CompletionQueue>> {
        self.own("open completion queue")?.open_cq(depth)
    }

    fn open_endpoint(&self, attr: &EndpointAttr) -> Result<Arc<dyn ProviderEndpoint>> {
        self.own("open endpoint")?.open_endpoint(attr)
    }
}

impl ManualProgress for FabricDomain {
    fn progress(&self) -> Result<usize> {
        self.own("progress")?.progress()
    }
}

impl EndpointBinding for FabricDomain {
    fn bind_endpoint(&self, region: ProviderRegion, endpoint: &dyn ProviderEndpoint) -> Result<()> {
        const BIND: &str = "bind endpoint";
        self.open.process.check(BIND)?;
        let transport = self.own(BIND)?;
        let own = (endpoint as &dyn Any).downcast_ref::<Endpoint>();
        let own = own.filter(|own| Arc::ptr_eq(&own.transport, transport)).ok_or_else(|| {
            let why = "pass an endpoint of the same domain";
            self.open.refuse(ErrorKind::InvalidArgument, BIND, why)
        })?;
        own.with_object(|object| {
            let _guard = self.open.lock();
            self.regions.with(region, BIND, |region| {
                region.parts.iter().try_for_each(|part| {
                    // SAFETY: the table has the registration, and the endpoint stays open during
                    // the call.
                    unsafe { self.open.start(part, Some(object), false) }
                })
            })
        })
    }
}

impl Enabling for FabricDomain {
    fn enable(&self, region: ProviderRegion) -> Result<()> {
        self.open.process.check("enable")?;
        let _guard = self.open.lock();
        self.regions.with(region, "enable", |region| {
            region.parts.iter().try_for_each(|part| self.open.enable(part))
        })
    }
}

impl CompositeKeys for FabricDomain {
    fn remote_key(&self, region: ProviderRegion) -> Result<Option<RemoteKey>> {
        self.regions.with(region, "remote key", |region| {
            region.check_has_key()?;
            Ok(region.composite_key())
        })
    }
}

impl RawKeys for FabricDomain {
    fn raw_key(&self, region: ProviderRegion) -> Result<RawKey> {
        self.open.process.check("raw key")?;
        let _guard = self.open.lock();
        self.regions.with(region, "raw key", |region| {
            region.check_has_key()?;
            let [part] = region.parts[..] else {
                let why = "register each range by itself, or send FabricMr::raw_key of each";
                return Err(self.open.refuse(ErrorKind::Unsupported, "raw key", why));
            };
            self.raw_key_of(&part)
        })
    }

    fn map_raw(
        &self,
        base: Iova,
        len: u64,
        addressing: Addressing,
        raw: &RawKey,
    ) -> Result<RemoteKey> {
        self.open.process.check("map raw key")?;
        let mut bytes = raw.0.clone();
        let mut key = 0;
        let mut map = fi_mr_map_raw {
            flags: 0,
            base_addr: base.0,
            raw_key: bytes.as_mut_ptr(),
            key_size: bytes.len(),
            key: &raw mut key,
        };
        let command = (sys::FI_MAP_RAW_MR, (&raw mut map).cast());
        // SAFETY: the owner keeps the domain open. The buffers outlive the call.
        unsafe { self.open.control("fi_mr_map_raw", self.open.domain.cast(), command) }?;
        self.mapped.lock().push(key);
        Ok(RemoteKey::mapped(addressing, base, len, key))
    }

    fn unmap_key(&self, key: &RemoteKey) -> Result<()> {
        self.open.process.check("unmap key")?;
        let number = key.as_u64()?;
        let mapped = {
            let mut mapped = self.mapped.lock();
            let found = mapped.iter().position(|own| key.is_mapped() && *own == number);
            found.map(|index| mapped.swap_remove(index))
        };
        if mapped.is_none() {
            let why = "unmap each key once, in the domain that mapped it";
            return Err(self.open.refuse(ErrorKind::InvalidKey, "unmap key", why));
        }
        let mut argument = number;
        let command = (sys::FI_UNMAP_KEY, (&raw mut argument).cast());
        // SAFETY: the owner keeps the domain open. The number outlives the call.
        let unmapped =
            unsafe { self.open.control("fi_mr_unmap_key", self.open.domain.cast(), command) };
        if unmapped.is_err() {
            self.mapped.lock().push(number);
        }
        unmapped
    }
}

impl Drop for FabricDomain {
    fn drop(&mut self) {
        if !self.open.process.is_current() {
            return;
        }
        if let Some(transport) = &self.transport {
            transport.close();
        }
        for mut region in self.regions.take_all() {
            close_all(&self.open, &mut region.parts, "a region stays registered");
        }
    }
}

impl fmt::Debug for FabricDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("FabricDomain");
        debug.field("nic", &self.attr().nic);
        // In a forked child, a lock may be held for ever by a thread of the parent.
        if self.open.process.is_current() {
            debug.field("live", &self.live());
        }
        debug.finish()
    }
}

//! The registration cache of a domain.

use std::{
    fmt,
    ops::Deref,
    sync::{Arc, OnceLock, Weak},
};

use parking_lot::Mutex;

use super::{Domain, DomainInner, MemoryRegion, MrAttr, attr::CacheAttr, region_state::KeepAlive};
use crate::{
    Access, AddressRange, Allocation, AllocationId, DeviceId, Error, ErrorKind, IfaceExt,
    IfaceKind, MrFlags, MrMode, Rejected, Result,
    cache::{
        Cache, CacheBackend, CacheStatistics, CachedEntryInfo, Key, Lease, LookupHandle, OwnedLease,
    },
    monitor::{DetectionMethod, Invalidator, Monitor, Subscription},
    path::Path,
    registry::Owner,
};

/// The cached registrations of a domain.
///
/// The monitor of the system iface watches host memory, and each device iface's monitor its own
/// memory. Each starts and fails independently. Memory that no monitor watches is registered
/// uncached, and the lease has the reason.
#[derive(Debug)]
pub struct RegionCache {
    cache: Arc<Cache<Registrations>>,
}

/// A lease of a [`MemoryRegion`] of the domain, which stays registered when the lease is dropped.
#[derive(Debug)]
pub struct CachedRegion<'c>(Lease<'c, Registrations>);

impl<'c> CachedRegion<'c> {
    /// Returns the lease. It tells whether the region is cached, and whether it was invalidated.
    #[must_use]
    pub fn lease(&self) -> &Lease<'c, Registrations> {
        &self.0
    }
}

impl Deref for CachedRegion<'_> {
    type Target = MemoryRegion;

    fn deref(&self) -> &MemoryRegion {
        &self.0
    }
}

impl RegionCache {
    pub(super) fn new(domain: &Arc<DomainInner>, attr: &CacheAttr) -> Result<Self> {
        let registrations = Registrations {
            domain: Arc::clone(domain),
            without: attr.without_monitors.clone().unwrap_or_default(),
            monitors: Mutex::new(Vec::new()),
            cache: OnceLock::new(),
        };
        let cache = Arc::new(Cache::new(registrations, attr.limits())?);
        cache.backend().cache.get_or_init(|| Arc::downgrade(&cache));
        Ok(Self { cache })
    }

    /// Returns a region that covers `range` with at least the rights `access`: a cached one, or a
    /// new one.
    ///
    /// The owner of the memory is resolved only on a miss.
    ///
    /// # Safety
    /// As for [`Domain::regattr`], for as long as the region stays registered, which is longer than
    /// the lease. The region stays registered until both of these have happened:
    ///
    /// - it was evicted or invalidated, or the domain was dropped;
    /// - every lease, sub-region and window of the region is gone.
    ///
    /// Memory that is freed to an allocator without being unmapped stays reachable for peers that
    /// hold its key.
    ///
    /// # Errors
    /// - The errors of [`Domain::regattr`].
    /// - [`ErrorKind::BadState`] in a forked child.
    #[inline]
    pub unsafe fn get_or_register(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<CachedRegion<'_>> {
        match self.cache.get_cached(&Key::new(range, access)?.of_any_owner()) {
            Some(lease) => Ok(CachedRegion(lease)),
            None => self.register(range, access),
        }
    }

    /// Returns a region like [`RegionCache::get_or_register`], of memory of this iface and, if one
    /// is named, of this device.
    ///
    /// # Safety
    /// As for [`RegionCache::get_or_register`].
    ///
    /// # Errors
    /// - The errors of [`RegionCache::get_or_register`].
    /// - [`ErrorKind::InvalidArgument`] if the memory has another owner.
    pub unsafe fn get_or_register_on(
        &self,
        range: AddressRange,
        access: Access,
        iface: IfaceKind,
        device: Option<DeviceId>,
    ) -> Result<CachedRegion<'_>> {
        let registry = &self.cache.backend().domain.registry;
        let owner = self.owner_of(range)?;
        if owner.iface != iface {
            return Err(registry.refuse_claim("cached registration", range, &owner, iface));
        }
        if let Some(device) = device.filter(|device| owner.device != Some(*device)) {
            return Err(Error::new(ErrorKind::InvalidArgument, "cached registration")
                .iface(iface)
                .device(device)
                .context(
                    "owner",
                    owner.device.map_or_else(|| "no device".to_owned(), |owner| owner.to_string()),
                )
                .remedy("the memory is on another device: name that one, or none"));
        }
        Ok(CachedRegion(self.cache.get_or_register(&key_of(range, access, &owner)?)?))
    }

    #[cold]
    fn register(&self, range: AddressRange, access: Access) -> Result<CachedRegion<'_>> {
        let owner = self.owner_of(range)?;
        Ok(CachedRegion(self.cache.register_missing(&key_of(range, access, &owner)?)?))
    }

    /// Returns the owner of memory that is about to be registered. In a forked child it fails
    /// before it takes any lock, which a thread of the parent may have held at the fork.
    fn owner_of(&self, range: AddressRange) -> Result<Owner> {
        let domain = &self.cache.backend().domain;
        domain.process.check("cached registration")?;
        domain.registry.owner_of_range(range)
    }

    /// Creates a handle for many lookups from one place. It finds the thread's part of the cache
    /// once.
    #[must_use]
    pub fn lookup_handle(&self) -> RegionLookupHandle<'_> {
        RegionLookupHandle { handle: self.cache.lookup_handle(), cache: self }
    }

    /// Returns a lease that outlives the borrow. Returns `None` for host memory unless `host` is
    /// true.
    pub(super) fn lease(
        &self,
        range: AddressRange,
        access: Access,
        host: bool,
    ) -> Result<Option<OwnedLease<Registrations>>> {
        if let Some(lease) = self.cache.get_cached_owned(&Key::new(range, access)?.of_any_owner()) {
            return Ok(Some(lease));
        }
        let owner = self.owner_of(range)?;
        if owner.iface == IfaceKind::SYSTEM && !host {
            return Ok(None);
        }
        self.cache.register_missing_owned(&key_of(range, access, &owner)?).map(Some)
    }

    /// Returns another handle of this cache.
    pub(super) fn share(&self) -> Self {
        Self { cache: Arc::clone(&self.cache) }
    }

    /// Invalidates the cached regions that have a byte of `range`. Call it for memory that changes
    /// without a monitor's notice.
    ///
    /// Regions that only share a page with `range` stay. If pages are replaced, pass whole pages.
    pub fn invalidate(&self, range: AddressRange) {
        self.cache.invalidate(range);
    }

    /// Invalidates like [`RegionCache::invalidate`], and calls `callback` once these regions are
    /// deregistered.
    pub fn invalidate_with_callback(
        &self,
        range: AddressRange,
        callback: impl FnOnce() + Send + 'static,
    ) {
        self.cache.invalidate_with_callback(range, callback);
    }

    /// Returns the statistics.
    #[must_use]
    pub fn statistics(&self) -> CacheStatistics {
        self.cache.statistics()
    }

    /// Lists the registered entries, each with the path by which the NIC reaches it.
    #[must_use]
    pub fn entries(&self) -> Vec<CachedEntryInfo<Option<Path>>> {
        self.cache.entries(|region| region.decision().ok().map(|decision| decision.path))
    }

    /// Deregisters the regions of invalidated entries without leases, and waits for deregistrations
    /// in flight.
    pub fn reclaim(&self) {
        self.cache.reclaim();
    }

    /// Evicts all idle entries.
    pub fn evict_idle(&self) {
        self.cache.evict_idle();
    }

    pub(super) fn try_clear(&self) -> Result<()> {
        self.cache.try_clear()
    }

    /// Returns the monitor that this cache uses for the memory of an iface.
    ///
    /// # Errors
    /// The iface's own reason for having none, or that monitors are switched off.
    /// [`ErrorKind::BadState`] in a forked child.
    pub fn monitor(&self, iface: IfaceKind) -> Result<Arc<dyn Monitor>> {
        let source = self.cache.backend();
        source.domain.process.check("cache monitor")?;
        source.monitor(iface)
    }
}

/// Looks up in a [`RegionCache`] for one thread.
#[derive(Debug)]
pub struct RegionLookupHandle<'c> {
    handle: LookupHandle<'c, Registrations>,
    cache: &'c RegionCache,
}

impl<'c> RegionLookupHandle<'c> {
    /// Returns a region like [`RegionCache::get_or_register`].
    ///
    /// # Safety
    /// As for [`RegionCache::get_or_register`].
    ///
    /// # Errors
    /// As for [`RegionCache::get_or_register`].
    #[inline]
    pub unsafe fn get_or_register(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<CachedRegion<'c>> {
        match self.handle.get_cached(&Key::new(range, access)?.of_any_owner()) {
            Some(lease) => Ok(CachedRegion(lease)),
            None => self.register(range, access),
        }
    }

    #[cold]
    fn register(&self, range: AddressRange, access: Access) -> Result<CachedRegion<'c>> {
        let owner = self.cache.owner_of(range)?;
        Ok(CachedRegion(self.handle.register_missing(&key_of(range, access, &owner)?)?))
    }
}

/// Returns true if the owner is the allocation `id`, and the allocation contains the range.
fn is_allocation(owner: &Owner, id: AllocationId, range: AddressRange) -> bool {
    let same =
        |allocation: Allocation| allocation.id == id && allocation.range.contains_range(range);
    owner.allocation.is_some_and(same)
}

/// Returns the key of memory with this owner.
fn key_of(range: AddressRange, access: Access, owner: &Owner) -> Result<Key> {
    let key = Key::new(range, access)?.owned_by(owner.iface, owner.device);
    Ok(match owner.allocation {
        Some(allocation) => key.in_allocation(allocation.id),
        None => key,
    })
}

/// The monitor of an iface, or the reason why it has none.
type OfIface = (IfaceKind, Result<Arc<dyn Monitor>>);

/// The registrations of a domain, as the cache's backend.
pub struct Registrations {
    domain: Arc<DomainInner>,
    without: Vec<IfaceKind>,
    /// Monitors that were started, or the reasons why they were not.
    monitors: Mutex<Vec<OfIface>>,
    /// The cache whose backend this is.
    cache: OnceLock<Weak<Cache<Self>>>,
}

/// A cached region's subscription to a monitor.
#[derive(Debug)]
pub struct Watch {
    monitor: Arc<dyn Monitor>,
    subscription: Subscription,
    /// The allocation, for monitors that detect a free by its identity.
    allocation: Option<Box<Allocation>>,
}

impl Registrations {
    fn monitor(&self, iface: IfaceKind) -> Result<Arc<dyn Monitor>> {
        let known = self
            .monitors
            .lock()
            .iter()
            .find(|(known, _)| *known == iface)
            .map(|(_, one)| one.clone());
        if let Some(known) = known {
            return known;
        }
        let started = self.start_monitor(iface);
        self.monitors.lock().push((iface, started.clone()));
        started
    }

    fn start_monitor(&self, iface: IfaceKind) -> Result<Arc<dyn Monitor>> {
        if self.without.contains(&iface) {
            return Err(Error::new(ErrorKind::Unsupported, "cache monitor")
                .iface(iface)
                .context("why", "disabled by the builder or the environment")
                .remedy("enable the iface's cache monitor"));
        }
        let started = self.domain.registry.get(iface)?.start_monitor();
        match &started {
            Ok(monitor) => tracing::debug!(%iface, monitor = monitor.name(), "cache monitor"),
            Err(why) => tracing::warn!(%iface, %why, "memory of the iface is registered uncached"),
        }
        started
    }
}

impl Registrations {
    /// Subscribes. If the monitor returns OutOfResources, evicts the idle entries and retries once.
    fn subscribe(
        &self,
        monitor: &Arc<dyn Monitor>,
        range: AddressRange,
        invalidator: &Arc<dyn Invalidator>,
    ) -> Result<Subscription> {
        let subscribe = || monitor.subscribe(range, Arc::clone(invalidator));
        subscribe().or_else(|error| {
            let cache = self.cache.get().and_then(Weak::upgrade);
            let out_of_room = error.kind() == ErrorKind::OutOfResources;
            let Some(cache) = cache.filter(|_| out_of_room) else { return Err(error) };
            tracing::debug!(%error, "the cache evicts its idle regions and subscribes once more");
            cache.evict_idle();
            subscribe()
        })
    }
}

impl CacheBackend for Registrations {
    type Region = MemoryRegion;
    type Watch = Watch;

    fn watch(&self, key: &Key, invalidator: &Arc<dyn Invalidator>) -> Result<Watch> {
        let monitor = self.monitor(key.iface())?;
        let subscription = self.subscribe(&monitor, key.range(), invalidator)?;
        let Some(id) = key.allocation() else {
            return Ok(Watch { monitor, subscription, allocation: None });
        };
        // From here on a free is notified, or detected by the identity. One before is detected
        // here.
        let now = self.domain.registry.owner_of(key.range().start());
        match now {
            Ok(owner) if is_allocation(&owner, id, key.range()) => {
                Ok(Watch { monitor, subscription, allocation: owner.allocation.map(Box::new) })
            }
            other => {
                monitor.unsubscribe(subscription);
                Err(other.err().unwrap_or_else(|| {
                    Error::new(ErrorKind::BadAddress, "cached registration")
                        .iface(key.iface())
                        .context("range", key.range())
                        .remedy("the memory was freed while it was being registered")
                }))
            }
        }
    }

    fn unwatch(&self, watch: Watch) {
        watch.monitor.unsubscribe(watch.subscription);
    }

    fn needs_validation(&self, watch: &Watch) -> bool {
        watch.allocation.is_some() && watch.monitor.detection() == DetectionMethod::Identity
    }

    fn is_current(&self, watch: &Watch) -> Result<bool> {
        match &watch.allocation {
            Some(allocation) => watch.monitor.valid(allocation),
            None => Ok(true),
        }
    }

    fn max_len(&self) -> u64 {
        self.domain.provider_attr.max_mr_size
    }

    fn register(&self, key: &Key, watch: Option<&Watch>) -> Result<MemoryRegion> {
        let ranges = [key.range()];
        let attr = MrAttr::new(&ranges, key.access());
        // Cached registrations post no event: the caller waits for them.
        // The key is of the owner that the caller resolved, and `watch` of an owner that was still
        // the same after the subscription.
        let owner = match watch.and_then(|watch| watch.allocation.as_deref()) {
            Some(allocation) => Some(Owner::of(allocation)),
            None => (key.iface() == IfaceKind::SYSTEM).then_some(Owner::SYSTEM),
        };
        self.domain.register_now(&attr, MrFlags::empty(), KeepAlive::Caller, owner)
    }

    fn deregister(&self, region: MemoryRegion) -> Result<(), Rejected<MemoryRegion>> {
        region.close()
    }
}

impl fmt::Debug for Registrations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registrations")
            .field("nic", &self.domain.provider_attr.nic)
            .finish_non_exhaustive()
    }
}

impl Domain {
    /// Returns the registration cache, if [`DomainAttr::cache`](super::DomainAttr::cache) enabled
    /// it. The first call starts the cache's thread.
    ///
    /// # Errors
    /// - [`ErrorKind::BadState`] if the domain was opened without a cache.
    /// - [`ErrorKind::Unsupported`] in ENDPOINT mode, where a region works with one endpoint only.
    /// - [`ErrorKind::OutOfResources`] if the cache cannot start.
    pub fn cache(&self) -> Result<&RegionCache> {
        if let Some(cache) = self.cache.get() {
            return Ok(cache);
        }
        let Some(attr) = &self.inner.attr.cache else {
            return Err(Error::new(ErrorKind::BadState, "domain cache")
                .remedy("open the domain with DomainAttr::cache"));
        };
        if self.inner.effective.contains(MrMode::ENDPOINT) {
            return Err(Error::new(ErrorKind::Unsupported, "domain cache")
                .context("mr_mode", MrMode::ENDPOINT)
                .remedy(
                    "in ENDPOINT mode a region works with the endpoint that it is bound to: register it",
                ));
        }
        self.inner.process.check("domain cache")?;
        let cache = RegionCache::new(&self.inner, attr)?;
        Ok(self.cache.get_or_init(|| cache))
    }
}

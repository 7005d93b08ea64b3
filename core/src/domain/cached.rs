//! Regions that stay registered: the registration cache of a domain.

use std::{
    fmt,
    ops::Deref,
    sync::{Arc, OnceLock, Weak},
};

use parking_lot::Mutex;

use super::{Domain, DomainInner, MemoryRegion, MrAttr, attr::CacheAttr, region_state::KeepAlive};
use crate::{
    Access, AddressRange, Allocation, DeviceId, Error, ErrorKind, IfaceExt, IfaceKind, MrFlags,
    MrMode, Rejected, Result,
    cache::{Burst, Cache, Key, Lease, Listed, OwnedLease, Source, Statistics},
    monitor::{Invalidator, Monitor, MonitorStyle, Subscription},
    path::Path,
    registry::Owner,
};

/// The cached registrations of a domain.
///
/// Host memory is watched by the monitor of the system iface, device memory by its own iface's;
/// each is started and fails apart. What none watches is registered uncached, and the lease says
/// why.
#[derive(Debug)]
pub struct RegionCache {
    cache: Arc<Cache<Registrations>>,
}

/// A cached region in use: a [`MemoryRegion`] of the domain that stays registered when this is
/// dropped.
#[derive(Debug)]
pub struct CachedRegion<'c>(Lease<'c, Registrations>);

impl<'c> CachedRegion<'c> {
    /// The lease: whether it is cached, why not, and whether its memory changed.
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
        cache.source().cache.get_or_init(|| Arc::downgrade(&cache));
        Ok(Self { cache })
    }

    /// A region that covers `range` with at least the rights `access`: a cached one, or a new one.
    ///
    /// Its iface and device are found out where it is not cached.
    ///
    /// # Safety
    /// As [`Domain::regattr`], for as long as the region stays registered, which is longer than the
    /// lease. The region stays registered until both of these have happened:
    ///
    /// - it was evicted or invalidated, or the domain was dropped;
    /// - every lease, sub-region and window of the region is gone.
    ///
    /// Memory that is given back to an allocator without being unmapped stays reachable for peers
    /// that hold its key.
    ///
    /// # Errors
    /// As [`Domain::regattr`]; [`ErrorKind::BadState`] in a forked child.
    #[inline]
    pub unsafe fn get(&self, range: AddressRange, access: Access) -> Result<CachedRegion<'_>> {
        match self.cache.find(&Key::new(range, access)?.of_any_owner()) {
            Some(lease) => Ok(CachedRegion(lease)),
            None => self.register(range, access),
        }
    }

    /// [`RegionCache::get`] of memory that is to be of this iface and, where one is named, of this
    /// device.
    ///
    /// # Safety
    /// As [`RegionCache::get`].
    ///
    /// # Errors
    /// As [`RegionCache::get`]; [`ErrorKind::InvalidArgument`] if the memory is not theirs.
    pub unsafe fn get_on(
        &self,
        range: AddressRange,
        access: Access,
        iface: IfaceKind,
        device: Option<DeviceId>,
    ) -> Result<CachedRegion<'_>> {
        let registry = &self.cache.source().domain.registry;
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
        self.register(range, access)
    }

    #[cold]
    fn register(&self, range: AddressRange, access: Access) -> Result<CachedRegion<'_>> {
        let owner = self.owner_of(range)?;
        Ok(CachedRegion(self.cache.get(&key_of(range, access, &owner)?)?))
    }

    /// Returns the owner of memory that is about to be registered. In a forked child it fails
    /// before it takes any lock, which a thread of the parent may have held at the fork.
    fn owner_of(&self, range: AddressRange) -> Result<Owner> {
        let domain = &self.cache.source().domain;
        domain.process.check("cached registration")?;
        domain.registry.owner_of_range(range)
    }

    /// For many lookups from one place: finds the thread's part of the cache once.
    #[must_use]
    pub fn burst(&self) -> RegionBurst<'_> {
        RegionBurst { burst: self.cache.burst(), cache: self }
    }

    /// A lease that outlives the borrow, of device memory or, with `host`, of any; `None` for other
    /// memory.
    pub(super) fn lease(
        &self,
        range: AddressRange,
        access: Access,
        host: bool,
    ) -> Result<Option<OwnedLease<Registrations>>> {
        if let Some(lease) = self.cache.find_owned(&Key::new(range, access)?.of_any_owner()) {
            return Ok(Some(lease));
        }
        let owner = self.owner_of(range)?;
        if owner.iface == IfaceKind::SYSTEM && !host {
            return Ok(None);
        }
        self.cache.get_owned(&key_of(range, access, &owner)?).map(Some)
    }

    /// The same cache.
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

    /// Invalidates like [`RegionCache::invalidate`], and calls `told` once these regions are
    /// deregistered.
    pub fn invalidate_then(&self, range: AddressRange, told: impl FnOnce() + Send + 'static) {
        self.cache.invalidate_then(range, told);
    }

    /// What the cache did and holds.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        self.cache.statistics()
    }

    /// The entries, with the way by which the NIC reaches each.
    #[must_use]
    pub fn entries(&self) -> Vec<Listed<Option<Path>>> {
        self.cache.entries(|region| region.decision().ok().map(|decision| decision.path))
    }

    /// Deregisters what is dead and idle, and waits for what is being deregistered.
    pub fn flush(&self) {
        self.cache.flush();
    }

    /// Gives back everything idle.
    pub fn clear(&self) {
        self.cache.clear();
    }

    pub(super) fn try_empty(&self) -> Result<()> {
        self.cache.try_empty()
    }

    /// Returns the monitor that this cache uses for the memory of an iface.
    ///
    /// # Errors
    /// The iface's own reason for having none, or that monitors are switched off.
    /// [`ErrorKind::BadState`] in a forked child.
    pub fn monitor(&self, iface: IfaceKind) -> Result<Arc<dyn Monitor>> {
        let source = self.cache.source();
        source.domain.process.check("cache monitor")?;
        source.monitor(iface)
    }
}

/// A burst of lookups in a [`RegionCache`], on one thread.
#[derive(Debug)]
pub struct RegionBurst<'c> {
    burst: Burst<'c, Registrations>,
    cache: &'c RegionCache,
}

impl<'c> RegionBurst<'c> {
    /// [`RegionCache::get`].
    ///
    /// # Safety
    /// As [`RegionCache::get`].
    ///
    /// # Errors
    /// As [`RegionCache::get`].
    #[inline]
    pub unsafe fn get(&self, range: AddressRange, access: Access) -> Result<CachedRegion<'c>> {
        match self.burst.find(&Key::new(range, access)?.of_any_owner()) {
            Some(lease) => Ok(CachedRegion(lease)),
            None => self.register(range, access),
        }
    }

    #[cold]
    fn register(&self, range: AddressRange, access: Access) -> Result<CachedRegion<'c>> {
        let owner = self.cache.owner_of(range)?;
        Ok(CachedRegion(self.burst.get(&key_of(range, access, &owner)?)?))
    }
}

/// The key of memory whose owner was found out.
fn key_of(range: AddressRange, access: Access, owner: &Owner) -> Result<Key> {
    let key = Key::new(range, access)?.owned_by(owner.iface, owner.device);
    Ok(match owner.allocation {
        Some(allocation) => key.in_allocation(allocation.id),
        None => key,
    })
}

/// The monitor of an iface, or why it has none.
type OfIface = (IfaceKind, Result<Arc<dyn Monitor>>);

/// Registrations of a domain as the cache's source.
pub struct Registrations {
    domain: Arc<DomainInner>,
    without: Vec<IfaceKind>,
    /// Monitors that were started, or why they were not.
    monitors: Mutex<Vec<OfIface>>,
    /// The cache whose source this is.
    cache: OnceLock<Weak<Cache<Self>>>,
}

/// What watches a cached region.
#[derive(Debug)]
pub struct Watch {
    monitor: Arc<dyn Monitor>,
    subscription: Subscription,
    /// For monitors that must be asked.
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
                .context("why", "it was asked to be left out")
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
            cache.clear();
            subscribe()
        })
    }
}

impl Source for Registrations {
    type Region = MemoryRegion;
    type Watch = Watch;

    fn watch(&self, key: &Key, invalidator: &Arc<dyn Invalidator>) -> Result<Watch> {
        let monitor = self.monitor(key.iface())?;
        let subscription = self.subscribe(&monitor, key.range(), invalidator)?;
        let Some(id) = key.allocation() else {
            return Ok(Watch { monitor, subscription, allocation: None });
        };
        // From here on a free is told, or seen by the identity; one before is seen here.
        let now = self.domain.registry.owner_of(key.range().start());
        match now {
            Ok(owner) if owner.allocation.is_some_and(|allocation| allocation.id == id) => {
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

    fn checked(&self, watch: &Watch) -> bool {
        watch.allocation.is_some() && watch.monitor.style() == MonitorStyle::Identity
    }

    fn valid(&self, watch: &Watch) -> Result<bool> {
        match &watch.allocation {
            Some(allocation) => watch.monitor.valid(allocation),
            None => Ok(true),
        }
    }

    fn longest(&self) -> u64 {
        self.domain.provider_attr.max_mr_size
    }

    fn register(&self, key: &Key) -> Result<MemoryRegion> {
        let ranges = [key.range()];
        let attr = MrAttr::new(&ranges, key.access());
        // An event queue is not told of cached registrations: the caller waits for them.
        self.domain.register_now(&attr, MrFlags::empty(), KeepAlive::Caller, None)
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
    /// The registration cache, where [`DomainAttr::cache`](super::DomainAttr::cache) asked for one;
    /// its thread starts with the first call.
    ///
    /// # Errors
    /// [`ErrorKind::BadState`] if the domain was opened without; [`ErrorKind::Unsupported`] in
    /// ENDPOINT mode, where a region works with one endpoint only;
    /// [`ErrorKind::OutOfResources`] if it cannot start.
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

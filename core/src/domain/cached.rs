//! The registration cache of a domain.

use std::{collections::HashMap, fmt, ops::Deref, sync::Arc};

use parking_lot::Mutex;

use super::{
    Domain, DomainInner,
    attr::CacheAttr,
    growth::Growth,
    held::HeldBuffers,
    memory::Raw,
    monitors::{Monitors, Watch},
    owner::Claim,
    region::MemoryRegion,
    region_slice::RegionSlice,
    region_view::RegionView,
    request::{RegionRequest, Source, check_promise},
    terms::{Promise, Terms},
};
use crate::{
    Access, AddressRange, AllocationId, DeviceId, Error, ErrorKind, IfaceKind, MrMode, Rejected,
    Result,
    cache::{
        Cache, CacheBackend, CacheStatistics, CachedEntryInfo, Key, Lease, LookupHandle,
        OwnedLease, UncachedReason,
    },
    monitor::{Invalidator, Monitor, MonitorDescription},
    path::Path,
    registry::AddressOwner,
};

/// The registration cache of a domain, which [`Domain::cache`] returns.
///
/// The monitor of the system iface watches host memory, and the monitor of each device iface
/// watches the memory of that iface. The monitors start and fail independently of each other.
/// Memory that no monitor can watch is registered uncached, and the region's [`Lease`] has the
/// reason.
///
/// In a forked child every lookup fails with [`ErrorKind::BadState`]. The child's copy of the cache
/// seems empty, and its calls do not affect the parent's regions.
///
/// ```no_run
/// use hmem_core::{Access, Domain, Result};
///
/// fn lookups(domain: &Domain) -> Result<()> {
///     let buffer = domain.cache()?.own(vec![0_u8; 1 << 20])?;
///     for _request in 0..1000 {
///         // Registers once; the other lookups are hits.
///         let region = buffer.get(4096, 4096, Access::REMOTE_WRITE)?;
///         let _key = region.view().key()?;
///         // The lease must live until the peer is done with the key.
///     }
///     buffer.close()?;
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct RegionCache {
    cache: Arc<Cache<Registrations>>,
}

/// A lease of a [`MemoryRegion`] from a cache. Derefs to the region, which may cover more memory
/// than the lookup asked for.
///
/// Hold the lease until the transfer that uses the region has completed, or for as long as peers
/// use the key. Without a lease the cache may deregister the region at any time. An uncached region
/// is deregistered when its lease is dropped. A sub-region, window or grant of the region needs the
/// lease too: after its end, the cache deregisters the region as soon as the provider allows.
#[derive(Debug)]
pub struct CachedRegion<'c> {
    lease: Lease<'c, Registrations>,
    range: AddressRange,
}

impl<'c> CachedRegion<'c> {
    /// Returns the lease, which knows if the region is cached and if it was invalidated.
    #[must_use]
    pub fn lease(&self) -> &Lease<'c, Registrations> {
        &self.lease
    }

    /// Returns the part of the region that the lookup asked for.
    #[must_use]
    pub fn view(&self) -> RegionView<'_> {
        RegionView::new(&self.lease, self.range)
    }

    /// Returns a part of [`CachedRegion::view`] for the safe transfers of an endpoint. A slice does
    /// not keep the region registered.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`] if the part reaches outside the view.
    pub fn slice(&self, offset: u64, len: u64) -> Result<RegionSlice> {
        self.view().slice(offset, len)
    }
}

impl Deref for CachedRegion<'_> {
    type Target = MemoryRegion;

    fn deref(&self) -> &MemoryRegion {
        &self.lease
    }
}

/// A [`CachedRegion`] that shares the ownership of its cache instead of borrowing the cache.
///
/// [`RegionCache::get_owned`] returns this type. The domain stays open until the value is dropped.
#[derive(Debug)]
pub struct OwnedCachedRegion {
    lease: OwnedLease<Registrations>,
    range: AddressRange,
}

impl OwnedCachedRegion {
    /// Returns the lease, which knows if the region is cached and if it was invalidated.
    #[must_use]
    pub fn lease(&self) -> &Lease<'_, Registrations> {
        self.lease.lease()
    }

    /// Returns the part of the region that the lookup asked for.
    #[must_use]
    pub fn view(&self) -> RegionView<'_> {
        RegionView::new(&self.lease, self.range)
    }
}

impl Deref for OwnedCachedRegion {
    type Target = MemoryRegion;

    fn deref(&self) -> &MemoryRegion {
        &self.lease
    }
}

impl RegionCache {
    pub(super) fn new(domain: &Arc<DomainInner>, attr: &CacheAttr) -> Result<Self> {
        let limits = attr.limits();
        let growth = attr.growth.unwrap_or_default();
        let grow_to = if limits.max_count == 0 { 0 } else { domain.entry_growth_limit(growth) };
        let registrations = Registrations {
            domain: Arc::clone(domain),
            growth,
            grow_to: grow_to.min(limits.max_bytes),
            ungrowable: Mutex::default(),
            held: Arc::default(),
            monitors: Monitors::default(),
        };
        let cache = Arc::new(Cache::new(registrations, limits)?);
        if let Some(revocations) = domain.provider.revocations() {
            revocations.listen(Arc::downgrade(cache.invalidator()));
        }
        Ok(Self { cache })
    }

    /// Returns a region that covers `memory` with at least the rights `access`.
    ///
    /// A miss registers `memory`. With [`CacheAttr::growth`], a miss may register more than
    /// `memory` if the promise is [`Promise::Allocation`].
    ///
    /// The promise of [`Raw::new`] must hold longer than the lease, because the region stays
    /// registered until the cache evicts or invalidates it. If the memory is freed to an allocator
    /// that does not unmap the memory, peers with the key can still access the bytes.
    /// [`RegionCache::own`] needs no promise.
    ///
    /// ```no_run
    /// use hmem_core::{Access, AddressRange, Domain, Promise, Raw, Result};
    ///
    /// fn send(domain: &Domain, message: AddressRange) -> Result<()> {
    ///     // SAFETY: the program unmaps no message buffer, and only the NIC uses one in flight.
    ///     let memory = unsafe { Raw::new(message, Promise::ReadWrite) };
    ///     let region = domain.cache()?.get(memory, Access::SEND)?;
    ///     let _slice = region.slice(0, message.len())?;
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    /// - The errors of [`Domain::register`].
    /// - [`ErrorKind::BadState`] in a forked child.
    #[inline(always)]
    pub fn get(&self, memory: Raw, access: Access) -> Result<CachedRegion<'_>> {
        self.get_around(*memory.at(), access, Around::of(memory.promise()))
    }

    /// Returns a region that covers `range`, like [`RegionCache::get`]. A new region may grow as
    /// far as `around` permits.
    #[inline(always)]
    pub(super) fn get_around(
        &self,
        range: AddressRange,
        access: Access,
        around: Around,
    ) -> Result<CachedRegion<'_>> {
        match self.cache.find(&lookup_key(range, access)?) {
            Some(lease) => Ok(CachedRegion { lease, range }),
            None => self.register(range, access, around),
        }
    }

    /// Returns a region like [`RegionCache::get`], after a check that the memory belongs to `iface`
    /// and, if given, to `device`, under the rules of [`Request::owner`](super::Request::owner).
    ///
    /// # Errors
    /// - The errors of [`RegionCache::get`].
    /// - [`ErrorKind::InvalidArgument`] if the memory is not of this iface or device, or if the
    ///   iface does not have the device.
    /// - The errors of [`Registry::get`](crate::Registry::get) if the domain does not have `iface`.
    pub fn get_of(
        &self,
        memory: Raw,
        access: Access,
        iface: IfaceKind,
        device: Option<DeviceId>,
    ) -> Result<CachedRegion<'_>> {
        let find = |key: &Key| self.cache.find(key);
        let register = |key: &Key, owner: &AddressOwner| self.cache.register(key, owner);
        let claim = Claim::named(iface, device);
        let lease = self.claimed_lease((memory, access), claim, find, register, |lease| lease)?;
        Ok(CachedRegion { lease, range: *memory.at() })
    }

    /// Checks that the memory has the owner that `claim` names, and returns a lease of a region of
    /// that owner. `find` looks up a key. The other parameters and the `L` are those of
    /// [`RegionCache::register_grown`].
    fn claimed_lease<L>(
        &self,
        (memory, access): (Raw, Access),
        claim: Claim,
        find: impl Fn(&Key) -> Option<L>,
        register: impl Fn(&Key, &AddressOwner) -> Result<L>,
        lease_of: impl for<'l> Fn(&'l L) -> &'l Lease<'l, Registrations>,
    ) -> Result<L> {
        let range = *memory.at();
        let registry = &self.cache.backend().domain.registry;
        let lease = || {
            let owner = self.owner_of(range)?;
            claim.check(registry, "get_of", range, &owner)?;
            // A key of any owner could find a stale region of other memory at this address.
            if let Some(lease) = find(&key_of(range, access, &owner)?) {
                return Ok(lease);
            }
            let around = Around::of(memory.promise());
            self.register_grown((range, access), &owner, around, register, lease_of)
        };
        lease().map_err(|error: Error| error.of_call("get_of"))
    }

    #[cold]
    fn register(
        &self,
        range: AddressRange,
        access: Access,
        around: Around,
    ) -> Result<CachedRegion<'_>> {
        self.miss(range, access, around, |key, owner| self.cache.register(key, owner))
    }

    /// Registers the range of a lookup that found no region.
    fn miss<'l>(
        &self,
        range: AddressRange,
        access: Access,
        around: Around,
        register: impl Fn(&Key, &AddressOwner) -> Result<Lease<'l, Registrations>>,
    ) -> Result<CachedRegion<'l>> {
        let lease = self
            .owner_of(range)
            .and_then(|owner| {
                self.register_grown((range, access), &owner, around, register, |lease| lease)
            })
            .map_err(|error| error.of_call("get"))?;
        Ok(CachedRegion { lease, range })
    }

    /// Registers a range that is not cached, with as much memory around it as [`CacheAttr::growth`]
    /// and `around` permit. `register` registers the range of a key, and returns an `L` that
    /// contains a lease. `lease_of` returns the lease in an `L`.
    ///
    /// If the larger registration fails, is not cached or is staged, the method registers only the
    /// range. So growth never makes a lookup fail. It exposes more memory to peers only if later
    /// lookups can be hits.
    fn register_grown<L>(
        &self,
        (range, access): (AddressRange, Access),
        owner: &AddressOwner,
        around: Around,
        register: impl Fn(&Key, &AddressOwner) -> Result<L>,
        lease_of: impl for<'l> Fn(&'l L) -> &'l Lease<'l, Registrations>,
    ) -> Result<L> {
        check_promise(around.promise, access)?;
        let backend = self.cache.backend();
        if let Some((grown, bound)) = backend.grown(range, owner, around) {
            let may_pass = match register(&key_of(grown, access, owner)?, owner) {
                Ok(lease) => {
                    let region = lease_of(&lease);
                    let cached = region.uncached_reason().is_none();
                    let may_pass = matches!(
                        region.uncached_reason(),
                        Some(
                            UncachedReason::Full
                                | UncachedReason::InsideDeregistration
                                | UncachedReason::InvalidationInProgress
                        )
                    );
                    if cached && !backend.domain.is_staged_by_growth(region) {
                        return Ok(lease);
                    }
                    drop(lease);
                    if cached {
                        self.invalidate(grown);
                    }
                    tracing::debug!(%range, %grown, "the grown region is staged or uncached");
                    may_pass
                }
                Err(error) => {
                    tracing::debug!(%error, %range, %grown, "cannot register the grown range");
                    error.kind() == ErrorKind::OutOfResources
                }
            };
            backend.refuse_growth(bound, may_pass);
        }
        register(&key_of(range, access, owner)?, owner)
    }

    /// Returns the owner of memory that is about to be registered. In a forked child, fails before
    /// taking a lock, because a thread of the parent may have held the lock at the fork.
    fn owner_of(&self, range: AddressRange) -> Result<AddressOwner> {
        let domain = &self.cache.backend().domain;
        domain.process.check("cached registration")?;
        domain.registry.owner_of_range(range)
    }

    pub(super) fn domain(&self) -> &Arc<DomainInner> {
        &self.cache.backend().domain
    }

    pub(super) fn held(&self) -> &Arc<HeldBuffers> {
        &self.cache.backend().held
    }

    /// Creates a handle for many lookups on one thread. Lookups through the handle are faster,
    /// because it has a reference to the data that the cache keeps for each thread.
    #[must_use]
    pub fn lookup_handle(&self) -> RegionLookupHandle<'_> {
        RegionLookupHandle { handle: self.cache.lookup_handle(), cache: self }
    }

    /// Returns a lease of a region that covers `range`, from the cache or newly registered. The
    /// lease may outlive the borrow of the cache. A new region may grow as far as `around` permits.
    /// If `host` is false, registers no host memory, and returns `None` for host memory that is not
    /// cached.
    pub(super) fn lease(
        &self,
        range: AddressRange,
        access: Access,
        around: Around,
        host: bool,
    ) -> Result<Option<OwnedLease<Registrations>>> {
        if let Some(lease) = self.cache.find_owned(&lookup_key(range, access)?) {
            return Ok(Some(lease));
        }
        let owner = self.owner_of(range)?;
        if owner.iface == IfaceKind::SYSTEM && !host {
            return Ok(None);
        }
        let register = |key: &Key, owner: &AddressOwner| self.cache.register_owned(key, owner);
        self.register_grown((range, access), &owner, around, register, OwnedLease::lease).map(Some)
    }

    /// Returns a region like [`RegionCache::get`], with a lease that shares the ownership of the
    /// cache. The lease may outlive the borrow of the cache, for example in a binding for another
    /// language. A hit is slower than that of [`RegionCache::get`].
    ///
    /// # Errors
    /// The errors of [`RegionCache::get`].
    pub fn get_owned(&self, memory: Raw, access: Access) -> Result<OwnedCachedRegion> {
        let (range, around) = (*memory.at(), Around::of(memory.promise()));
        let lease =
            self.lease(range, access, around, true).map_err(|error| error.of_call("get"))?;
        let lease = lease.expect("`lease` returns `None` only if it may not register host memory");
        Ok(OwnedCachedRegion { lease, range })
    }

    /// Returns a region like [`RegionCache::get_of`], with a lease like that of
    /// [`RegionCache::get_owned`].
    ///
    /// # Errors
    /// The errors of [`RegionCache::get_of`].
    pub fn get_owned_of(
        &self,
        memory: Raw,
        access: Access,
        iface: IfaceKind,
        device: Option<DeviceId>,
    ) -> Result<OwnedCachedRegion> {
        let find = |key: &Key| self.cache.find_owned(key);
        let register = |key: &Key, owner: &AddressOwner| self.cache.register_owned(key, owner);
        let claim = Claim::named(iface, device);
        let lease =
            self.claimed_lease((memory, access), claim, find, register, OwnedLease::lease)?;
        Ok(OwnedCachedRegion { lease, range: *memory.at() })
    }

    /// Returns a cached region like [`RegionCache::get_owned`], but registers nothing and never
    /// waits. Returns `None` if no cached region is found in this way.
    ///
    /// # Errors
    /// [`ErrorKind::ZeroLength`] for an empty range.
    #[inline]
    pub fn find_owned(
        &self,
        range: AddressRange,
        access: Access,
    ) -> Result<Option<OwnedCachedRegion>> {
        let lease = self.cache.find_owned(&lookup_key(range, access)?);
        Ok(lease.map(|lease| OwnedCachedRegion { lease, range }))
    }

    /// Returns another handle of the same cache.
    pub(super) fn share(&self) -> Self {
        Self { cache: Arc::clone(&self.cache) }
    }

    /// Invalidates the cached regions that have a byte of `range`.
    ///
    /// Call this for memory that changes in a way that no monitor detects. Regions that only share
    /// a page with `range` stay valid. If pages are replaced, pass whole pages.
    pub fn invalidate(&self, range: AddressRange) {
        self.cache.invalidate(range);
    }

    /// Invalidates like [`RegionCache::invalidate`], and calls `callback` when these regions are
    /// deregistered, and the deregistrations of other regions that began before this call have
    /// ended. This call or any thread may run the callback. A panic of the callback is caught and
    /// logged.
    pub fn invalidate_with_callback(
        &self,
        range: AddressRange,
        callback: impl FnOnce() + Send + 'static,
    ) {
        self.cache.invalidate_with_callback(range, callback);
    }

    /// Returns the counts of lookups, and the current content of the cache.
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
    /// that other threads have begun.
    pub fn reclaim(&self) {
        self.cache.reclaim();
    }

    /// Evicts all entries that have no lease.
    pub fn evict_idle(&self) {
        self.cache.evict_idle();
    }

    pub(super) fn try_clear(&self) -> Result<()> {
        self.cache.try_clear()
    }

    /// Describes the monitor that this cache uses for the memory of an iface. Starts the monitor if
    /// the cache has not started it yet.
    ///
    /// # Errors
    /// - The iface's own error if the iface has no monitor or cannot start its monitor. Later calls
    ///   return the same error.
    /// - The errors of [`Registry::get`](crate::Registry::get) if the domain does not have `iface`.
    /// - [`ErrorKind::Unsupported`] if the monitor is disabled by the settings, and if the driver's
    ///   library has a cache of its own ([`ProviderAttr::driver_cache`]). In the second case the
    ///   error names that cache.
    /// - [`ErrorKind::BadState`] in a forked child.
    ///
    /// [`ProviderAttr::driver_cache`]: crate::provider::ProviderAttr::driver_cache
    pub fn monitor(&self, iface: IfaceKind) -> Result<MonitorDescription> {
        let source = self.cache.backend();
        source.domain.process.check("cache monitor")?;
        Ok(MonitorDescription::of(&*source.monitor(iface)?))
    }
}

/// A handle for lookups of one thread in a [`RegionCache`].
#[derive(Debug)]
pub struct RegionLookupHandle<'c> {
    handle: LookupHandle<'c, Registrations>,
    cache: &'c RegionCache,
}

impl<'c> RegionLookupHandle<'c> {
    /// Returns a region like [`RegionCache::get`].
    ///
    /// # Errors
    /// The errors of [`RegionCache::get`].
    #[inline(always)]
    pub fn get(&self, memory: Raw, access: Access) -> Result<CachedRegion<'c>> {
        let range = *memory.at();
        match self.handle.find(&lookup_key(range, access)?) {
            Some(lease) => Ok(CachedRegion { lease, range }),
            None => self.register(memory, access),
        }
    }

    #[cold]
    fn register(&self, memory: Raw, access: Access) -> Result<CachedRegion<'c>> {
        let around = Around::of(memory.promise());
        let register = |key: &Key, owner: &AddressOwner| self.handle.register(key, owner);
        self.cache.miss(*memory.at(), access, around, register)
    }
}

/// The promise for the memory of a lookup, and the range that a new registration must not leave
/// when it grows.
#[derive(Clone, Copy)]
pub(super) struct Around {
    pub(super) promise: Promise,
    /// The range of the buffer, for a lookup by [`CachedBuffer::get`](super::CachedBuffer::get).
    /// `None` for other lookups, whose registrations must not leave the allocation.
    pub(super) within: Option<AddressRange>,
}

impl Around {
    pub(super) fn of(promise: Promise) -> Self {
        Self { promise, within: None }
    }
}

/// Returns a key that matches a cached region that covers `range` with the rights `access`,
/// whichever iface, device and allocation the memory belongs to.
#[inline(always)]
fn lookup_key(range: AddressRange, access: Access) -> Result<Key> {
    match Key::new(range, access) {
        Ok(key) => Ok(key.of_any_owner()),
        Err(error) => Err(error.of_call("get")),
    }
}

/// Returns the cache key of a range of memory that belongs to `owner`.
fn key_of(range: AddressRange, access: Access, owner: &AddressOwner) -> Result<Key> {
    let key = Key::new(range, access)?.owned_by(owner.iface, owner.device);
    Ok(match owner.allocation {
        Some(allocation) => key.in_allocation(allocation.id),
        None => key,
    })
}

/// The largest number of elements in [`Registrations::ungrowable`].
const MOST_UNGROWABLE: usize = 4096;

/// The number of misses after which growth is tried again in a [`GrowthBound`], if it failed there
/// for a temporary reason.
const MISSES_UNTIL_RETRY: u32 = 64;

/// The identifier of a range to which registrations may grow: its iface, its allocation and its
/// first address.
type GrowthBound = (IfaceKind, Option<AllocationId>, u64);

/// The backend of a domain's cache, which registers through the domain.
pub struct Registrations {
    domain: Arc<DomainInner>,
    growth: Growth,
    /// The largest length of a grown region in bytes, or 0 if growth is disabled.
    grow_to: u64,
    /// The bounds in which a registration failed to grow. The number of a bound is the count of
    /// further misses that do not try to grow. `None` means that no miss tries again.
    ungrowable: Mutex<HashMap<GrowthBound, Option<u32>>>,
    /// The buffers that the cache's regions keep allocated. The list is shared with callbacks,
    /// which remove a dropped buffer after its regions are deregistered.
    held: Arc<HeldBuffers>,
    monitors: Monitors,
}

impl Registrations {
    fn monitor(&self, iface: IfaceKind) -> Result<Arc<dyn Monitor>> {
        self.monitors.get(&self.domain, iface)
    }

    /// Returns the larger range that a miss registers instead of `range`, and the bound in which it
    /// grows. Returns `None` if the miss must register only `range`.
    ///
    /// A bound longer than `grow_to` is divided into blocks of this length, so that all misses in a
    /// block register the same range.
    fn grown(
        &self,
        range: AddressRange,
        owner: &AddressOwner,
        around: Around,
    ) -> Option<(AddressRange, GrowthBound)> {
        let may_grow = around.within.is_some() || around.promise == Promise::Allocation;
        if self.grow_to == 0 || !may_grow {
            return None;
        }
        let bound = self.domain.growth_bound(owner, around.within)?;
        let bound = self.growth.narrow(range, bound)?;
        let offset = range.start().0.checked_sub(bound.start().0)?;
        let start = offset - offset % self.grow_to;
        let grown = bound.slice(start, self.grow_to.min(bound.len().checked_sub(start)?))?;
        let grows = grown.contains_range(range) && grown != range;
        if !grows {
            return None;
        }
        let bound =
            (owner.iface, owner.allocation.map(|allocation| allocation.id), bound.start().0);
        // A registration that is not cached gains nothing from a larger range.
        (self.may_grow(&bound) && self.monitor(owner.iface).is_ok()).then_some((grown, bound))
    }

    /// Counts a miss in `bound`, and returns true if the miss may register more than its range.
    fn may_grow(&self, bound: &GrowthBound) -> bool {
        let mut ungrowable = self.ungrowable.lock();
        match ungrowable.get_mut(bound) {
            None => true,
            Some(None) => false,
            Some(Some(0)) => {
                ungrowable.remove(bound);
                true
            }
            Some(Some(misses)) => {
                *misses -= 1;
                false
            }
        }
    }

    /// Disables growth in `bound` after a failure. `may_pass` is true if the reason of the failure
    /// is temporary: a lack of resources or of room in the cache, or an invalidation in progress.
    /// In this case, or if the bound has no allocation, growth is disabled for
    /// [`MISSES_UNTIL_RETRY`] misses, otherwise permanently.
    fn refuse_growth(&self, bound: GrowthBound, may_pass: bool) {
        let mut ungrowable = self.ungrowable.lock();
        if ungrowable.len() >= MOST_UNGROWABLE {
            ungrowable.clear();
        }
        // A bound without an allocation may name other memory later.
        let passes = may_pass || bound.1.is_none();
        ungrowable.insert(bound, passes.then_some(MISSES_UNTIL_RETRY));
    }
}

impl CacheBackend for Registrations {
    type Region = MemoryRegion;
    type Watch = Watch;
    type Owner = AddressOwner;

    fn watch(&self, key: &Key, invalidator: &Arc<dyn Invalidator>) -> Result<Watch> {
        // The cache evicts on OutOfResources, which does not help a monitor that did not start.
        let monitor = self.monitor(key.iface()).map_err(|error| match error.kind() {
            ErrorKind::OutOfResources => Error::new(ErrorKind::Unavailable, "cache monitor")
                .iface(self.domain.registry.name_of(key.iface()))
                .caused_by(error),
            _ => error,
        })?;
        let subscription = monitor.subscribe(key.range(), Arc::clone(invalidator))?;
        let memory = (key.iface(), key.range());
        Watch::confirm(&self.domain, (monitor, subscription), memory, key.allocation())
    }

    fn unwatch(&self, watch: Watch) {
        watch.end();
    }

    fn needs_validation(&self, watch: &Watch) -> bool {
        watch.needs_validation()
    }

    fn is_current(&self, watch: &Watch) -> Result<bool> {
        watch.is_current()
    }

    fn max_len(&self) -> u64 {
        self.domain.provider_attr.max_mr_size
    }

    fn register(
        &self,
        key: &Key,
        owner: &AddressOwner,
        watch: Option<&Watch>,
    ) -> Result<MemoryRegion> {
        let ranges = [key.range()];
        let terms = Terms::new(key.access());
        // After the subscription, `watch` queried the allocation again.
        let owner = match watch.and_then(Watch::allocation) {
            Some(allocation) => AddressOwner::of(allocation),
            None => *owner,
        };
        // The lookup checked the rights of the key against the promise for the memory. So rights to
        // write show that the memory may be written.
        let promise = match key.access().nic_writes() {
            true => Promise::ReadWrite,
            false => Promise::ReadOnly,
        };
        let (source, keep) = (Source::Ranges(&ranges), self.held.keep(key.range()));
        let request = RegionRequest { source, promise, keep, terms: &terms };
        self.domain.register_now(&request, Some(&owner))
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
    /// Returns the domain's registration cache. The first call starts the cache's thread.
    ///
    /// [`DomainAttr::cache`](super::DomainAttr::cache) enables the cache. [`RegionCache`] has an
    /// example.
    ///
    /// # Errors
    /// - [`ErrorKind::BadState`] if the domain was opened without a cache, and in a forked child if
    ///   the parent has not created the cache.
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
                    "register without the cache: in ENDPOINT mode a region serves one endpoint",
                ));
        }
        self.inner.process.check("domain cache")?;
        let cache = RegionCache::new(&self.inner, attr)?;
        Ok(self.cache.get_or_init(|| cache))
    }
}

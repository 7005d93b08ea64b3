//! The public handles of a cache: the cache itself, lookup handles for one thread, and leases that
//! keep the cache alive.

#![allow(unsafe_code, reason = "extends the lifetime of a lease that holds its cache")]

use std::{cell::Cell, fmt, marker::PhantomData, ops::Deref, sync::Arc};

#[cfg(not(loom))]
use super::reclaim::worker::Worker;
use super::{
    backend::{CacheBackend, Limits},
    cache_core::CacheCore,
    gate::fast_open,
    key::Key,
    lease::{
        blocks::{LeaseBlock, LeaseSlot},
        guard::Lease,
        threads,
    },
    lookup::FastLookup,
    reclaim::state::CompletionCallback,
    sync::{Barrier, cold_path},
};
use crate::{AddressRange, Error, ErrorKind, Result, monitor::Invalidator};

/// A cache of memory registrations.
///
/// The cache starts one thread, the worker, which deregisters the regions of invalidated entries.
///
/// In a forked child no lookup hits, and [`Cache::get_or_register`] registers an uncached region.
/// The child never touches the parent's registrations.
///
/// A miss that needs room evicts by a clock with second chances: entries that have no lease and had
/// no hit since the clock hand last passed them. To save time, the miss may evict a whole batch of
/// entries: a sixteenth of all entries, but no more than 64.
pub struct Cache<S: CacheBackend> {
    pub(super) core: Arc<CacheCore<S>>,
    /// The cache's core, as the [`Invalidator`] that monitors and the backend get.
    invalidator: Arc<dyn Invalidator>,
    /// The worker. `None` only during the drop.
    #[cfg(not(loom))]
    worker: Option<Worker>,
}

impl<S: CacheBackend> Cache<S> {
    /// Creates a cache over `backend`.
    ///
    /// # Errors
    /// - [`ErrorKind::OutOfResources`] if address space, memory or the thread cannot be allocated.
    /// - The errors of [`ProcessMark::current`](crate::ProcessMark::current).
    pub fn new(backend: S, limits: Limits) -> Result<Self> {
        Self::with_barrier(backend, limits, Barrier::choose())
    }

    pub(super) fn with_barrier(backend: S, limits: Limits, barrier: Barrier) -> Result<Self> {
        let core = Arc::new(CacheCore::new(backend, limits, barrier)?);
        let invalidator: Arc<dyn Invalidator> = Arc::clone(&core) as _;
        Ok(Self {
            #[cfg(not(loom))]
            worker: Some(Worker::start(&core)?),
            core,
            invalidator,
        })
    }

    /// Returns a region of the key's memory, for a key that [`Cache::find`] did not find. The
    /// region is a new one, or one that another thread registers meanwhile. `owner` is passed to
    /// [`CacheBackend::register`].
    ///
    /// # Errors
    /// The errors of [`Cache::get_or_register`].
    pub fn register(&self, key: &Key, owner: &S::Owner) -> Result<Lease<'_, S>> {
        self.register_slow(key, owner, Some(NOT_FOUND))
    }

    #[cold]
    #[inline(never)]
    fn register_slow(
        &self,
        key: &Key,
        owner: &S::Owner,
        found: Option<u32>,
    ) -> Result<Lease<'_, S>> {
        let Some(block) = self.own_block() else {
            return self.core.register_without_slot(key, owner);
        };
        let lease = self.lookup_in_block(block, (key, owner), found);
        threads::record_next_slot(&self.core.leases, block);
        lease
    }

    fn own_block(&self) -> Option<&LeaseBlock> {
        threads::own_block(&self.core.leases, || self.core.take_block())
    }

    /// Looks up `key` with a lease slot of `block`, and registers on a miss. `found` is the index
    /// of the entry that a fast lookup's search returned (0 for none), or `None` if there was no
    /// search.
    #[inline(never)]
    pub(super) fn lookup_in_block<'c>(
        &'c self,
        block: &'c LeaseBlock,
        (key, owner): (&Key, &S::Owner),
        found: Option<u32>,
    ) -> Result<Lease<'c, S>> {
        if let Some(leased) = self.core.lookup_slow(block, key, found) {
            return Ok(Lease::cached_slow(&self.core, leased));
        }
        match self.core.leases.blocks.free_slot(block) {
            Some(slot) => self.core.register_missing(&self.invalidator, slot, key, owner),
            None => self.core.register_without_slot(key, owner),
        }
    }

    /// Returns a cached region, without registering memory or waiting for a registration. Returns
    /// `None` in these cases:
    ///
    /// - No registered entry covers the key.
    /// - Another thread is trying to evict the entry, or is altering the table near the key.
    /// - Hits are disabled: a monitor is handling a change of memory, the kernel began to refuse
    ///   `membarrier(2)`, or the process is a forked child.
    /// - No lease slot is available, or the thread is exiting.
    ///
    /// A call that returns `None` does not count as a miss in the statistics.
    ///
    /// The key may match memory [of any owner](Key::of_any_owner).
    #[inline(always)]
    #[must_use]
    pub fn find(&self, key: &Key) -> Option<Lease<'_, S>> {
        let mut found = None;
        if let Some(slot) = threads::next_slot(&self.core.leases) {
            match self.core.lookup_fast(slot, key) {
                FastLookup::Hit(leased) => return Some(Lease::cached(&self.core, leased)),
                FastLookup::Miss => return None,
                FastLookup::SlowPath { found: index } => found = index,
            }
        }
        cold_path();
        // Copying the key lets the compiler keep the key of a hit in registers.
        let key = *key;
        Some(self.find_slow(&key, found)?.by_fields())
    }

    #[cold]
    #[inline(never)]
    fn find_slow(&self, key: &Key, found: Option<u32>) -> Option<Lease<'_, S>> {
        let block = self.own_block()?;
        let leased = self.core.lookup_slow(block, key, found)?;
        threads::record_next_slot(&self.core.leases, block);
        Some(Lease::cached_slow(&self.core, leased))
    }

    /// Calls [`Cache::find`] and returns a lease that keeps the cache alive.
    #[must_use]
    pub fn find_owned(self: &Arc<Self>, key: &Key) -> Option<OwnedLease<S>> {
        Some(OwnedLease::new(self, self.find(key)?))
    }

    /// Calls [`Cache::register`] and returns a lease that keeps the cache alive.
    pub fn register_owned(self: &Arc<Self>, key: &Key, owner: &S::Owner) -> Result<OwnedLease<S>> {
        Ok(OwnedLease::new(self, self.register(key, owner)?))
    }

    /// Creates a handle for many lookups on one thread. The handle's lookups are faster, because
    /// they access no thread-local data. In a forked child, or if the cache has no free lease
    /// block, the handle never hits: its lookups find nothing and its registrations are uncached.
    #[must_use]
    pub fn lookup_handle(&self) -> LookupHandle<'_, S> {
        let usable = !self.core.leases.gate.is_forked();
        let block = usable.then(|| self.core.take_block()).flatten();
        let own = block.map(|block| HandleBlock {
            block,
            slot: Cell::new(self.core.leases.blocks.next_slot(block)),
        });
        LookupHandle { cache: self, own, not_send: PhantomData }
    }

    /// Returns the invalidator, which monitors call when memory changes.
    #[must_use]
    pub fn invalidator(&self) -> &Arc<dyn Invalidator> {
        &self.invalidator
    }

    /// Invalidates the entries that contain a byte of the range. No lookup that begins after this
    /// call finds them. The cache deregisters each entry when the entry has no lease any more.
    ///
    /// Entries that only share a page with the range stay. [`Cache::invalidator`] invalidates those
    /// too, since monitors report whole pages.
    pub fn invalidate(&self, range: AddressRange) {
        self.core.invalidate_bytes(range);
    }

    /// Invalidates like [`Cache::invalidate`], and calls `callback` when all entries of the range
    /// are deregistered, and the deregistrations that began before this call have ended, in any
    /// range.
    ///
    /// The callback waits also for entries of the range that were invalidated earlier or are being
    /// deregistered. It does not wait for entries that the backend already refused to deregister.
    ///
    /// The thread that ends the last awaited deregistration calls `callback`. The calling thread
    /// calls it at once in these cases:
    ///
    /// - No deregistration is awaited.
    /// - The range is empty.
    /// - The process is a forked child.
    ///
    /// The drop of the cache calls `callback` even if the backend refuses to deregister an entry. A
    /// panic of `callback` is caught and logged.
    pub fn invalidate_with_callback(
        &self,
        range: AddressRange,
        callback: impl FnOnce() + Send + 'static,
    ) {
        self.core.invalidate_with_callback(range, CompletionCallback::new(callback));
    }

    /// Deregisters the regions of invalidated entries without leases, retries deregistrations that
    /// the backend refused, and waits for deregistrations that other threads have begun. Does
    /// nothing in a forked child.
    ///
    /// The wait ends even if other threads keep beginning more deregistrations. The call does not
    /// wait if the calling thread is inside [`CacheBackend::deregister`] of any cache.
    pub fn reclaim(&self) {
        self.core.reclaim();
    }

    /// Evicts all entries that have no lease, and reclaims like [`Cache::reclaim`]. May evict
    /// nothing if the kernel began to refuse `membarrier(2)`. Does nothing in a forked child.
    pub fn evict_idle(&self) {
        self.core.evict_idle();
    }

    /// Evicts all entries that have no lease, and reclaims invalidated entries. Fails with `Busy`
    /// if any entry remains. Does nothing in a forked child.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if an entry has a lease or is being registered, if the backend refused
    /// to deregister a region. Also if the kernel refuses `membarrier(2)`, without which the cache
    /// cannot tell whether an entry has a lease.
    pub fn try_clear(&self) -> Result<()> {
        self.evict_idle();
        // Waits for the worker, which may be deregistering entries that were invalidated meanwhile.
        self.reclaim();
        let left = self.statistics();
        if left.entries + left.pending_reclaim + left.deregister_failed == 0 {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Busy, "empty cache")
            .context("entries", left.entries)
            .context("leases", left.leases)
            .context("pending_reclaim", left.pending_reclaim)
            .context("deregister_failed", left.deregister_failed)
            .remedy("drop the leases first"))
    }

    /// Returns the backend with which the cache registers memory.
    #[must_use]
    pub fn backend(&self) -> &S {
        &self.core.backend
    }
}

impl<S: CacheBackend<Owner = ()>> Cache<S> {
    /// Returns a region that covers the key's range with at least the key's rights, and has the
    /// key's iface, device and allocation. The region is a cached one, or a new one on a miss. If
    /// another thread is registering a region that covers the key, this call waits for that region.
    /// If the cache cannot store a new region, the region is uncached; see
    /// [`Lease::uncached_reason`].
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidArgument`] on a miss of a key [of any owner](Key::of_any_owner).
    /// - The backend's error.
    /// - The error of another thread's registration of exactly this range with these rights, if
    ///   this call waited for it. If that registration panicked, the kind is
    ///   [`ErrorKind::BadState`]. If a registration of more memory failed, this call registers its
    ///   own range instead.
    #[inline(always)]
    pub fn get_or_register(&self, key: &Key) -> Result<Lease<'_, S>> {
        let (mut free, mut found) = (None, None);
        if let Some(slot) = threads::next_slot(&self.core.leases) {
            match self.core.lookup_fast(slot, key) {
                FastLookup::Hit(leased) => return Ok(Lease::cached(&self.core, leased)),
                FastLookup::Miss => free = Some(slot),
                FastLookup::SlowPath { found: index } => found = index,
            }
        }
        cold_path();
        // Copying the key lets the compiler keep the key of a hit in registers.
        let key = *key;
        let lease = match free {
            Some(slot) => self.core.register_missing(&self.invalidator, slot, &key, &()),
            None => self.register_slow(&key, &(), found),
        };
        Ok(lease?.by_fields())
    }

    /// Calls [`Cache::get_or_register`] and returns a lease that keeps the cache alive.
    pub fn get_or_register_owned(self: &Arc<Self>, key: &Key) -> Result<OwnedLease<S>> {
        Ok(OwnedLease::new(self, self.get_or_register(key)?))
    }
}

/// The index that stands for "no entry": a search of the table found nothing.
const NOT_FOUND: u32 = 0;

impl<S: CacheBackend> Drop for Cache<S> {
    fn drop(&mut self) {
        if self.core.leases.gate.is_forked() {
            // In a forked child, the worker thread, the locks and the regions belong to the parent.
            #[cfg(not(loom))]
            std::mem::forget(self.worker.take());
            return;
        }
        #[cfg(not(loom))]
        drop(self.worker.take());
        self.core.deregister_all();
    }
}

impl<S: CacheBackend> fmt::Debug for Cache<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.core.fmt(f)
    }
}

/// A handle for lookups of one thread, created by [`Cache::lookup_handle`]. Leases may outlive the
/// handle.
pub struct LookupHandle<'c, S: CacheBackend> {
    cache: &'c Cache<S>,
    /// The handle's lease block. `None` if the cache had no free block, or in a forked child.
    own: Option<HandleBlock<'c>>,
    /// Makes the handle `!Send`, because only one thread may use its lease block.
    not_send: PhantomData<*const ()>,
}

/// A lookup handle's first lease block, and the lease slot that the handle's next lookup tries
/// first.
struct HandleBlock<'c> {
    block: &'c LeaseBlock,
    slot: Cell<&'c LeaseSlot>,
}

impl<'c, S: CacheBackend> LookupHandle<'c, S> {
    /// Returns a region like [`Cache::register`].
    pub fn register(&self, key: &Key, owner: &S::Owner) -> Result<Lease<'c, S>> {
        self.register_slow(key, owner, Some(NOT_FOUND))
    }

    /// Returns a cached region like [`Cache::find`].
    #[inline(always)]
    #[must_use]
    pub fn find(&self, key: &Key) -> Option<Lease<'c, S>> {
        let found = match self.lookup_fast(key) {
            FastLookup::Hit(leased) => return Some(Lease::cached(&self.cache.core, leased)),
            FastLookup::Miss => return None,
            FastLookup::SlowPath { found } => found,
        };
        let key = *key;
        Some(self.find_slow(&key, found)?.by_fields())
    }

    #[cold]
    #[inline(never)]
    fn find_slow(&self, key: &Key, found: Option<u32>) -> Option<Lease<'c, S>> {
        let core = &self.cache.core;
        let own = self.own.as_ref()?;
        let leased = core.lookup_slow(own.block, key, found)?;
        own.slot.set(core.leases.blocks.next_slot(own.block));
        Some(Lease::cached_slow(core, leased))
    }

    #[inline(always)]
    fn lookup_fast(&self, key: &Key) -> FastLookup<'c, S> {
        let core = &self.cache.core;
        match &self.own {
            Some(own) if core.leases.gate.load() == fast_open(core.leases.number) => {
                core.lookup_fast(own.slot.get(), key)
            }
            _ => FastLookup::SlowPath { found: None },
        }
    }

    #[cold]
    #[inline(never)]
    fn register_slow(
        &self,
        key: &Key,
        owner: &S::Owner,
        found: Option<u32>,
    ) -> Result<Lease<'c, S>> {
        let core = &self.cache.core;
        // In a forked child, a new lease block would need a lock that a thread of the parent may
        // have held.
        let own = self.own.as_ref().filter(|_| !core.leases.gate.is_forked());
        let Some(own) = own else { return core.register_without_slot(key, owner) };
        let lease = self.cache.lookup_in_block(own.block, (key, owner), found);
        own.slot.set(core.leases.blocks.next_slot(own.block));
        lease
    }
}

impl<'c, S: CacheBackend<Owner = ()>> LookupHandle<'c, S> {
    /// Returns a region like [`Cache::get_or_register`].
    #[inline(always)]
    pub fn get_or_register(&self, key: &Key) -> Result<Lease<'c, S>> {
        let found = match self.lookup_fast(key) {
            FastLookup::Hit(leased) => return Ok(Lease::cached(&self.cache.core, leased)),
            FastLookup::Miss => Some(NOT_FOUND),
            FastLookup::SlowPath { found } => found,
        };
        let key = *key;
        Ok(self.register_slow(&key, &(), found)?.by_fields())
    }
}

impl<S: CacheBackend> Drop for LookupHandle<'_, S> {
    fn drop(&mut self) {
        if let Some(own) = &self.own {
            self.cache.core.leases.blocks.release(own.block);
        }
    }
}

impl<S: CacheBackend> fmt::Debug for LookupHandle<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LookupHandle").field("cache", self.cache).finish_non_exhaustive()
    }
}

/// A [`Lease`] that shares the ownership of its cache instead of borrowing the cache.
pub struct OwnedLease<S: CacheBackend> {
    /// The lease. It refers to the cache, so this field is declared first and dropped first.
    lease: Lease<'static, S>,
    _cache: Arc<Cache<S>>,
}

impl<S: CacheBackend> OwnedLease<S> {
    pub(super) fn new(cache: &Arc<Cache<S>>, lease: Lease<'_, S>) -> Self {
        // SAFETY: the lease refers to the cache's core, whose address does not change. The core
        // lives as long as the cache, which the reference beside the lease keeps alive. The lease
        // is dropped before that reference.
        let lease = unsafe { std::mem::transmute::<Lease<'_, S>, Lease<'static, S>>(lease) };
        Self { lease, _cache: Arc::clone(cache) }
    }

    /// Returns the lease that `self` owns.
    #[must_use]
    pub fn lease(&self) -> &Lease<'_, S> {
        &self.lease
    }
}

impl<S: CacheBackend> Deref for OwnedLease<S> {
    type Target = S::Region;

    fn deref(&self) -> &S::Region {
        &self.lease
    }
}

impl<S: CacheBackend> fmt::Debug for OwnedLease<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lease.fmt(f)
    }
}

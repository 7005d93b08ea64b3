//! The registration cache: leases of regions that stay registered until their memory goes.
//!
//! A hit takes no lock and writes no line that another thread writes. A miss registers outside
//! every lock, and others that want the same wait for it. Monitors report changes through
//! [`Invalidator`], which a hook inside `munmap` may call. `IMPLEMENTATION.md`, beside this file,
//! has the states, the orderings, and who frees what and when.
//!
//! [`Cache`] knows nothing of providers: what it caches is its [`Source`]'s.
//!
//! ```
//! use std::sync::Arc;
//!
//! use hmem_core::{
//!     Access, Address, AddressRange, Rejected, Result,
//!     cache::{Cache, Key, Limits, Source},
//!     monitor::Invalidator,
//! };
//!
//! struct Numbers;
//!
//! impl Source for Numbers {
//!     type Region = u64;
//!     type Watch = ();
//!
//!     fn watch(&self, _: &Key, _: &Arc<dyn Invalidator>) -> Result<()> {
//!         Ok(())
//!     }
//!     fn unwatch(&self, _: ()) {}
//!     fn checked(&self, _: &()) -> bool {
//!         false
//!     }
//!     fn valid(&self, _: &()) -> Result<bool> {
//!         Ok(true)
//!     }
//!     fn longest(&self) -> u64 {
//!         u64::MAX
//!     }
//!     fn register(&self, key: &Key) -> Result<u64> {
//!         Ok(key.range().start().0)
//!     }
//!     fn deregister(&self, _: u64) -> Result<(), Rejected<u64>> {
//!         Ok(())
//!     }
//! }
//!
//! let cache = Cache::new(Numbers, Limits::default())?;
//! let key = Key::new(AddressRange::new(Address(0x1000), 64)?, Access::SEND)?;
//! assert_eq!(*cache.get(&key)?, 0x1000);
//! assert_eq!(*cache.get(&key)?, 0x1000);
//! assert_eq!((cache.statistics().hits, cache.statistics().registrations), (1, 1));
//! # Ok::<(), hmem_core::Error>(())
//! ```

mod arena;
mod blocks;
mod changes;
mod collect;
mod entry;
mod flight;
mod gate;
mod key;
mod lease;
mod lookup;
#[cfg(all(test, loom))]
mod models;
mod radix;
mod register;
mod retire;
mod shared;
mod statistics;
#[cfg(all(test, not(loom)))]
mod stress;
mod sync;
mod threads;
#[cfg(not(loom))]
mod worker;

use std::{cell::Cell, fmt, marker::PhantomData, sync::Arc};

use self::{
    blocks::{Block, Slot},
    lookup::Look,
    shared::{Shared, Telling, Told},
    sync::Barrier,
};
pub use self::{
    key::Key,
    lease::{Lease, OwnedLease, Uncached},
    statistics::{Listed, Statistics},
};
use crate::{AddressRange, Error, ErrorKind, Rejected, Result, monitor::Invalidator};

/// What a cache caches. Calls may come from any thread, several at once, with no lock of the cache
/// held.
pub trait Source: Send + Sync + 'static {
    /// A registration.
    type Region: Send + Sync + 'static;

    /// What watches the memory of one, to be taken back.
    type Watch: Send + Sync + 'static;

    /// Starts watching the key's memory; from here on changes are told to `invalidator`, or
    /// [`Source::valid`] knows of them. The entry can be found by changes already, and is not
    /// registered yet.
    ///
    /// # Errors
    /// Why nobody can watch it: it is registered uncached then.
    fn watch(&self, key: &Key, invalidator: &Arc<dyn Invalidator>) -> Result<Self::Watch>;

    /// Stops watching, after the region is deregistered; once for each watch.
    fn unwatch(&self, watch: Self::Watch);

    /// Whether each hit must ask [`Source::valid`].
    fn checked(&self, watch: &Self::Watch) -> bool;

    /// Whether the memory still is what was registered.
    ///
    /// # Errors
    /// A failed driver call: the entry then counts as changed.
    fn valid(&self, watch: &Self::Watch) -> Result<bool>;

    /// Bytes that one registration may have; merging goes no further.
    fn longest(&self) -> u64;

    /// Registers.
    ///
    /// # Errors
    /// The caller of [`Cache::get`] gets them; OutOfResources has idle entries given back and one
    /// more try.
    fn register(&self, key: &Key) -> Result<Self::Region>;

    /// Deregisters.
    ///
    /// # Errors
    /// The region, still registered: it is tried again later.
    fn deregister(&self, region: Self::Region) -> Result<(), Rejected<Self::Region>>;
}

/// How much a cache may hold, and whether it merges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Entries, in use or idle, that are not dead; 0 turns caching off. No more than 4,194,304 are
    /// held.
    pub max_count: usize,
    /// Their bytes; 0 turns caching off.
    pub max_bytes: u64,
    /// Whether a registration is joined with those of the same rights that it overlaps or touches.
    pub merge: bool,
}

impl Default for Limits {
    /// 65,536 entries, any number of bytes, no merging.
    fn default() -> Self {
        Self { max_count: 65_536, max_bytes: u64::MAX, merge: false }
    }
}

/// A cache of registrations.
///
/// The cache starts one thread, which deregisters the regions of dead entries. In a forked child
/// the cache registers a region for each get and deregisters it with the lease. It never touches
/// the parent's registrations.
///
/// Eviction takes entries that were not hit since its hand last passed them (second chance), and
/// gives up at most a sixteenth of the entries, and no more than 64, beyond what is needed.
pub struct Cache<S: Source> {
    shared: Arc<Shared<S>>,
    invalidator: Arc<dyn Invalidator>,
    #[cfg(not(loom))]
    worker: Option<worker::Worker>,
}

impl<S: Source> Cache<S> {
    /// A cache of `source` within `limits`.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfResources`] if addresses, memory or the thread cannot be had; what the
    /// operating system reported if forks cannot be noticed (before Linux 4.14).
    pub fn new(source: S, limits: Limits) -> Result<Self> {
        Self::with_barrier(source, limits, Barrier::choose())
    }

    fn with_barrier(source: S, limits: Limits, barrier: Barrier) -> Result<Self> {
        let shared = Arc::new(Shared::new(source, limits, barrier)?);
        let invalidator: Arc<dyn Invalidator> = Arc::clone(&shared) as _;
        Ok(Self {
            #[cfg(not(loom))]
            worker: Some(worker::Worker::start(&shared)?),
            shared,
            invalidator,
        })
    }

    /// A region that covers the key's range with at least its rights: a cached one, or a new one.
    ///
    /// # Errors
    /// What the source reported.
    #[inline(always)]
    pub fn get(&self, key: &Key) -> Result<Lease<'_, S>> {
        let mut free = None;
        if let Some(slot) = threads::noted(&self.shared) {
            match self.shared.plain_hit(slot, key) {
                Look::Hit(held) => return Ok(Lease::cached(&self.shared, held)),
                Look::Nothing => free = Some(slot),
                Look::Again => {}
            }
        }
        std::hint::cold_path();
        // A copy: a hit then need not put the key where a miss could find it.
        let key = *key;
        let lease = match free {
            Some(slot) => self.shared.miss(&self.invalidator, slot, &key),
            None => self.get_anyhow(&key),
        };
        Ok(lease?.in_pieces())
    }

    #[cold]
    #[inline(never)]
    fn get_anyhow(&self, key: &Key) -> Result<Lease<'_, S>> {
        let Some(block) = threads::block(&self.shared) else {
            return self.shared.alone_without_slot(key);
        };
        let lease = self.get_in(block, key);
        threads::note(&self.shared, block);
        lease
    }

    /// A cached region, if there is one; a miss counts for nothing. The key may be [of any
    /// owner](Key::of_any_owner).
    #[must_use]
    pub fn find(&self, key: &Key) -> Option<Lease<'_, S>> {
        if let Some(slot) = threads::noted(&self.shared)
            && let Some(held) = self.shared.plain_hit(slot, key).hit()
        {
            return Some(Lease::cached(&self.shared, held));
        }
        let block = threads::block(&self.shared)?;
        let held = self.shared.hit(block, key)?;
        threads::note(&self.shared, block);
        Some(Lease::cached_anyhow(&self.shared, held))
    }

    /// [`Cache::find`] whose lease keeps the cache alive.
    #[must_use]
    pub fn find_owned(self: &Arc<Self>, key: &Key) -> Option<OwnedLease<S>> {
        Some(OwnedLease::new(self, self.find(key)?))
    }

    /// [`Cache::get`] whose lease keeps the cache alive.
    ///
    /// # Errors
    /// As [`Cache::get`].
    pub fn get_owned(self: &Arc<Self>, key: &Key) -> Result<OwnedLease<S>> {
        Ok(OwnedLease::new(self, self.get(key)?))
    }

    #[inline(never)]
    fn get_in<'c>(&'c self, block: &'c Block, key: &Key) -> Result<Lease<'c, S>> {
        if let Some(held) = self.shared.hit(block, key) {
            return Ok(Lease::cached_anyhow(&self.shared, held));
        }
        match self.shared.blocks.slot(block) {
            Some(slot) => self.shared.miss(&self.invalidator, slot, key),
            None => self.shared.alone_without_slot(key),
        }
    }

    /// For many lookups from one place: finds the thread's lease block once.
    #[must_use]
    pub fn burst(&self) -> Burst<'_, S> {
        let usable = !self.shared.gate.is_forked();
        let block = usable.then(|| self.shared.take_block()).flatten();
        let own =
            block.map(|block| Own { block, slot: Cell::new(self.shared.blocks.likely(block)) });
        Burst { cache: self, own, not_send: PhantomData }
    }

    /// What is told of changes of memory.
    #[must_use]
    pub fn invalidator(&self) -> &Arc<dyn Invalidator> {
        &self.invalidator
    }

    /// Invalidates the entries that have a byte of the range. No lookup finds them from now on, and
    /// each is deregistered once it is idle.
    ///
    /// Entries that only share a page with the range stay. [`Cache::invalidator`] invalidates those
    /// too, since monitors report whole pages.
    pub fn invalidate(&self, range: AddressRange) {
        self.shared.invalidate_bytes(range);
    }

    /// Invalidates like [`Cache::invalidate`], and calls `told` once all of these entries are
    /// deregistered. Entries of the range whose deregistration had begun before count too.
    ///
    /// The thread that deregisters the last of these entries calls `told`. If there are none, the
    /// calling thread does.
    pub fn invalidate_then(&self, range: AddressRange, told: impl FnOnce() + Send + 'static) {
        self.shared.invalidate_then(range, Told::new(told));
    }

    /// What the cache did and holds.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        self.shared.statistics()
    }

    /// The registered entries, with what `read` makes of their regions; it runs under the cache's
    /// lock and must not use the cache.
    pub fn entries<T>(&self, read: impl Fn(&S::Region) -> T) -> Vec<Listed<T>> {
        self.shared.list(read)
    }

    /// Deregisters what is dead and idle, instead of the worker, and waits for what the worker has
    /// begun.
    pub fn flush(&self) {
        self.shared.flush();
    }

    /// Gives back everything idle.
    pub fn clear(&self) {
        self.shared.give_back(&mut Telling::new());
    }

    /// Gives back everything idle, and says whether that was all.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if there are leases, or if the provider refused to deregister something.
    pub fn try_empty(&self) -> Result<()> {
        self.clear();
        // What died meanwhile may be in the worker's hands.
        self.flush();
        let left = self.statistics();
        if left.entries + left.dying + left.stuck == 0 {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Busy, "empty cache")
            .context("entries", left.entries)
            .context("leases", left.leases)
            .context("dying", left.dying)
            .context("stuck", left.stuck)
            .remedy("drop the leases first"))
    }

    /// What it caches.
    #[must_use]
    pub fn source(&self) -> &S {
        &self.shared.source
    }
}

impl<S: Source> Drop for Cache<S> {
    fn drop(&mut self) {
        if self.shared.gate.is_forked() {
            // Thread, locks and regions are the parent's.
            #[cfg(not(loom))]
            std::mem::forget(self.worker.take());
            return;
        }
        #[cfg(not(loom))]
        drop(self.worker.take());
        self.shared.clear();
    }
}

impl<S: Source> fmt::Debug for Cache<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(f)
    }
}

/// Lookups of one thread; see [`Cache::burst`]. Its leases may outlive it.
pub struct Burst<'c, S: Source> {
    cache: &'c Cache<S>,
    own: Option<Own<'c>>,
    /// The block is used by one thread.
    not_send: PhantomData<*const ()>,
}

/// A burst's block, and the slot of it that is tried first.
struct Own<'c> {
    block: &'c Block,
    slot: Cell<&'c Slot>,
}

impl<'c, S: Source> Burst<'c, S> {
    /// As [`Cache::get`].
    ///
    /// # Errors
    /// As [`Cache::get`].
    #[inline(always)]
    pub fn get(&self, key: &Key) -> Result<Lease<'c, S>> {
        let shared = &self.cache.shared;
        if let Some(own) = &self.own
            && shared.gate.read() == gate::plainly_open(shared.number)
            && let Some(held) = shared.plain_hit(own.slot.get(), key).hit()
        {
            return Ok(Lease::cached(shared, held));
        }
        let key = *key;
        Ok(self.get_anyhow(&key)?.in_pieces())
    }

    /// [`Cache::find`].
    #[must_use]
    pub fn find(&self, key: &Key) -> Option<Lease<'c, S>> {
        let shared = &self.cache.shared;
        let own = self.own.as_ref()?;
        if shared.gate.read() == gate::plainly_open(shared.number)
            && let Some(held) = shared.plain_hit(own.slot.get(), key).hit()
        {
            return Some(Lease::cached(shared, held));
        }
        let held = shared.hit(own.block, key)?;
        own.slot.set(shared.blocks.likely(own.block));
        Some(Lease::cached_anyhow(shared, held))
    }

    #[cold]
    #[inline(never)]
    fn get_anyhow(&self, key: &Key) -> Result<Lease<'c, S>> {
        let shared = &self.cache.shared;
        // Another block takes a lock, which a thread of the parent may have held at the fork.
        let own = self.own.as_ref().filter(|_| !shared.gate.is_forked());
        let Some(own) = own else { return shared.alone_without_slot(key) };
        let lease = self.cache.get_in(own.block, key);
        own.slot.set(shared.blocks.likely(own.block));
        lease
    }
}

impl<S: Source> Drop for Burst<'_, S> {
    fn drop(&mut self) {
        if let Some(own) = &self.own {
            self.cache.shared.blocks.give_back(own.block);
        }
    }
}

impl<S: Source> fmt::Debug for Burst<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Burst").field("cache", self.cache).finish_non_exhaustive()
    }
}

/// Milliseconds of the coarse monotonic clock.
fn now() -> u64 {
    #[cfg(not(loom))]
    {
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the call writes to the place that it is given. It cannot fail for a clock that
        // Linux always has.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &mut now) };
        now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
    }
    #[cfg(loom)]
    0
}

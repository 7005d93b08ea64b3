//! A cache back end that registers nothing, so that a benchmark measures only the cache and the
//! memory hooks.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use hmem::{
    Access, Address, AddressRange, Error, ErrorKind, Rejected, Result,
    cache::{Cache, CacheBackend, Key, Limits},
    monitor::{Invalidator, Monitor, Subscription},
    system::monitor::MemHooks,
};

/// Length of each test region in bytes.
pub(super) const LEN: u64 = 4096;
/// Time that the registration of the slow region takes.
pub(super) const SLOW: Duration = Duration::from_secs(1);

/// Adjacent test regions, and the memory hooks that watch them. The memory is mapped but never
/// accessed.
pub(super) struct TestMemory {
    _memory: Vec<u8>,
    base: u64,
    regions: u64,
    /// The memory hooks, or the reason why they could not start.
    pub(super) monitor: Result<Arc<MemHooks>>,
}

impl TestMemory {
    /// Maps memory for `regions` test regions and the slow region, and starts the memory hooks.
    ///
    /// # Errors
    /// `OutOfResources` if the memory cannot be mapped.
    pub(super) fn new(regions: u64) -> Result<Self> {
        let mut memory = Vec::<u8>::new();
        let len = (regions + 2) * LEN;
        memory.try_reserve_exact(len as usize).map_err(|why| {
            Error::new(ErrorKind::OutOfResources, "bench cache")
                .context("bytes", len)
                .context("why", why)
        })?;
        let base = (memory.as_ptr().addr() as u64).next_multiple_of(LEN);
        Ok(Self { _memory: memory, base, regions, monitor: MemHooks::start() })
    }

    /// Returns the address of test region `number`, counted from 0.
    #[inline]
    pub(super) fn address(&self, number: u64) -> u64 {
        self.base + number * LEN
    }

    /// Returns the cache key of test region `number`, counted from 0.
    #[inline]
    pub(super) fn key(&self, number: u64) -> Key {
        let range =
            AddressRange::new(Address(self.address(number)), LEN).expect("the range does not wrap");
        Key::new(range, Access::SEND | Access::RECV)
            .expect("the range is not empty, and the rights are valid")
    }

    /// Returns the cache key of the slow region, which takes [`SLOW`] to register.
    pub(super) fn slow_key(&self) -> Key {
        self.key(self.regions)
    }

    /// Creates a cache for at most `max_count` regions. Fills the cache with the first `filled`
    /// test regions. The memory hooks watch the cached regions, if they could start.
    ///
    /// # Errors
    /// The errors of [`Cache::new`] and [`Cache::get_or_register`].
    pub(super) fn cache(&self, max_count: u64, filled: u64) -> Result<Cache<NoopBackend>> {
        let monitor =
            self.monitor.as_ref().ok().map(|monitor| Arc::clone(monitor) as Arc<dyn Monitor>);
        self.cache_watched_by(monitor, max_count, filled)
    }

    /// Creates and fills a cache like [`TestMemory::cache`], but `monitor` watches the cached
    /// regions instead of the memory hooks.
    ///
    /// # Errors
    /// The errors of [`Cache::new`] and [`Cache::get_or_register`].
    pub(super) fn cache_watched_by(
        &self,
        monitor: Option<Arc<dyn Monitor>>,
        max_count: u64,
        filled: u64,
    ) -> Result<Cache<NoopBackend>> {
        let limits = Limits { max_count: max_count as usize, ..Limits::default() };
        let slow_at = self.address(self.regions);
        let cache = Cache::new(NoopBackend { monitor, slow_at, ..NoopBackend::default() }, limits)?;
        for number in 0..filled {
            cache.get_or_register(&self.key(number))?;
        }
        Ok(cache)
    }
}

/// A cache back end that registers nothing. Its monitor, if any, watches the cached regions.
#[derive(Debug, Default)]
pub(super) struct NoopBackend {
    monitor: Option<Arc<dyn Monitor>>,
    /// Address of the region whose registration takes [`SLOW`].
    slow_at: u64,
    /// True while the slow region is being registered.
    pub(super) slow: Arc<AtomicBool>,
}

impl CacheBackend for NoopBackend {
    type Region = u64;
    type Watch = Option<Subscription>;
    type Owner = ();

    fn watch(&self, key: &Key, invalidator: &Arc<dyn Invalidator>) -> Result<Self::Watch> {
        let Some(monitor) = &self.monitor else { return Ok(None) };
        monitor.subscribe(key.range(), Arc::clone(invalidator)).map(Some)
    }

    fn unwatch(&self, watch: Self::Watch) {
        if let (Some(monitor), Some(subscription)) = (&self.monitor, watch) {
            monitor.unsubscribe(subscription);
        }
    }

    fn register(&self, key: &Key, (): &(), _: Option<&Self::Watch>) -> Result<u64> {
        let start = key.range().start().0;
        if start == self.slow_at {
            self.slow.store(true, Ordering::Release);
            thread::sleep(SLOW);
            self.slow.store(false, Ordering::Release);
        }
        Ok(start)
    }

    fn deregister(&self, _: u64) -> Result<(), Rejected<u64>> {
        Ok(())
    }
}

//! A registration that does nothing, so that only the cache and its memory hooks are measured.

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

/// Bytes of each region.
pub(super) const LEN: u64 = 4096;
/// Duration of the registration that is slow on purpose.
pub(super) const SLOW: Duration = Duration::from_secs(1);

/// Memory of the regions, one after the other. It is mapped, and nobody touches it.
pub(super) struct Ground {
    _memory: Vec<u8>,
    base: u64,
    regions: u64,
    /// The monitor, or the reason why there is none.
    pub(super) monitor: Result<Arc<MemHooks>>,
}

impl Ground {
    /// Maps memory for `regions` and a slow one, and starts a monitor.
    ///
    /// # Errors
    /// OutOfResources without memory.
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

    /// Returns the address of region `number`.
    #[inline]
    pub(super) fn address(&self, number: u64) -> u64 {
        self.base + number * LEN
    }

    /// Returns the key of region `number`.
    #[inline]
    pub(super) fn key(&self, number: u64) -> Key {
        let range = AddressRange::new(Address(self.address(number)), LEN).expect("mapped memory");
        Key::new(range, Access::SEND | Access::RECV).expect("not empty, and defined rights")
    }

    /// Returns the key whose registration is slow.
    pub(super) fn slow_key(&self) -> Key {
        self.key(self.regions)
    }

    /// Creates a cache for `max_count` regions and fills it with the first `filled` regions.
    ///
    /// # Errors
    /// The errors of [`Cache::new`].
    pub(super) fn cache(&self, max_count: u64, filled: u64) -> Result<Cache<Noop>> {
        let monitor =
            self.monitor.as_ref().ok().map(|monitor| Arc::clone(monitor) as Arc<dyn Monitor>);
        self.cache_watched_by(monitor, max_count, filled)
    }

    /// Like [`Ground::cache`], with another monitor.
    ///
    /// # Errors
    /// The errors of [`Cache::new`].
    pub(super) fn cache_watched_by(
        &self,
        monitor: Option<Arc<dyn Monitor>>,
        max_count: u64,
        filled: u64,
    ) -> Result<Cache<Noop>> {
        let limits = Limits { max_count: max_count as usize, ..Limits::default() };
        let slow_at = self.address(self.regions);
        let cache = Cache::new(Noop { monitor, slow_at, ..Noop::default() }, limits)?;
        for number in 0..filled {
            cache.get_or_register(&self.key(number))?;
        }
        Ok(cache)
    }
}

/// A source that registers nothing, and whose regions the monitor watches.
#[derive(Debug, Default)]
pub(super) struct Noop {
    monitor: Option<Arc<dyn Monitor>>,
    /// Address of the region whose registration takes [`SLOW`].
    slow_at: u64,
    /// True while a slow registration runs.
    pub(super) slow: Arc<AtomicBool>,
}

impl CacheBackend for Noop {
    type Region = u64;
    type Watch = Option<Subscription>;

    fn watch(&self, key: &Key, invalidator: &Arc<dyn Invalidator>) -> Result<Self::Watch> {
        let Some(monitor) = &self.monitor else { return Ok(None) };
        monitor.subscribe(key.range(), Arc::clone(invalidator)).map(Some)
    }

    fn unwatch(&self, watch: Self::Watch) {
        if let (Some(monitor), Some(subscription)) = (&self.monitor, watch) {
            monitor.unsubscribe(subscription);
        }
    }

    fn needs_validation(&self, _: &Self::Watch) -> bool {
        false
    }

    fn is_current(&self, _: &Self::Watch) -> Result<bool> {
        Ok(true)
    }

    fn max_len(&self) -> u64 {
        u64::MAX
    }

    fn register(&self, key: &Key, _: Option<&Self::Watch>) -> Result<u64> {
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

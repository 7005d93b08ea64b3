//! A registration that does nothing, so that what is measured is the cache.
//!
//! No monitor watches it: a hit looks at the same state word and the same gate with one or without.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use hmem::{
    Access, Address, AddressRange, Rejected, Result,
    cache::{Cache, Key, Limits, Source},
    monitor::Invalidator,
};

/// Where the regions lie: no memory is there, and none is touched.
pub(super) const BASE: u64 = 0x2000_0000_0000;
/// Bytes of each.
pub(super) const LEN: u64 = 4096;
/// The registration of the region here takes [`SLOW`].
pub(super) const SLOW_BASE: u64 = 0x2100_0000_0000;
/// How long that is.
pub(super) const SLOW: Duration = Duration::from_secs(1);

/// Registers nothing.
#[derive(Debug, Default)]
pub(super) struct Noop {
    /// A slow registration is running.
    pub(super) slow: Arc<AtomicBool>,
}

impl Source for Noop {
    type Region = u64;
    type Watch = ();

    fn watch(&self, _: &Key, _: &Arc<dyn Invalidator>) -> Result<()> {
        Ok(())
    }

    fn unwatch(&self, (): ()) {}

    fn checked(&self, (): &()) -> bool {
        false
    }

    fn valid(&self, (): &()) -> Result<bool> {
        Ok(true)
    }

    fn longest(&self) -> u64 {
        u64::MAX
    }

    fn register(&self, key: &Key) -> Result<u64> {
        let start = key.range().start().0;
        if start == SLOW_BASE {
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

/// The key of region `number`.
#[inline]
pub(super) fn key(number: u64) -> Key {
    key_at(BASE + number * LEN)
}

#[inline]
fn key_at(address: u64) -> Key {
    let range = AddressRange::new(Address(address), LEN).expect("far from the end of the address space");
    Key::new(range, Access::SEND | Access::RECV).expect("not empty, and defined rights")
}

/// The key whose registration is slow.
pub(super) fn slow_key() -> Key {
    key_at(SLOW_BASE)
}

/// A cache for `max_count` regions that holds the first `filled`.
///
/// # Errors
/// As [`Cache::new`].
pub(super) fn cache(max_count: u64, filled: u64) -> Result<Cache<Noop>> {
    let limits = Limits { max_count: max_count as usize, ..Limits::default() };
    let cache = Cache::new(Noop::default(), limits)?;
    for number in 0..filled {
        cache.get(&key(number))?;
    }
    Ok(cache)
}

//! Tests the memory use of a cache. The test has a process of its own, because it reads the
//! resident size.

use std::sync::Arc;

use hmem_core::{
    Access, Address, AddressRange, Rejected, Result,
    cache::{Cache, CacheBackend, Key, Limits},
    monitor::{InvalidationCause, Invalidator},
};

const PAGE: u64 = 4096;

/// A backend that does nothing, with zero-sized regions and watches.
struct Nothing;

impl CacheBackend for Nothing {
    type Region = ();
    type Watch = ();
    type Owner = ();

    fn watch(&self, _: &Key, _: &Arc<dyn Invalidator>) -> Result<()> {
        Ok(())
    }

    fn unwatch(&self, (): ()) {}

    fn register(&self, _: &Key, (): &(), _: Option<&Self::Watch>) -> Result<()> {
        Ok(())
    }

    fn deregister(&self, (): ()) -> Result<(), Rejected<()>> {
        Ok(())
    }
}

fn range(start: u64, len: u64) -> AddressRange {
    AddressRange::new(Address(start), len).expect("no wrap")
}

/// Returns the resident size of this process in bytes.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("the kernel's account");
    let pages = statm.split(' ').nth(1).expect("resident pages");
    pages.parse::<u64>().expect("a number") * rustix::param::page_size() as u64
}

fn fill(cache: &Cache<Nothing>, count: u64, len: u64, apart: u64) -> u64 {
    let before = resident();
    for i in 0..count {
        let key = Key::new(range((1 << 40) + i * apart, len), Access::SEND).expect("a key");
        assert!(cache.get_or_register(&key).expect("registered").uncached_reason().is_none());
    }
    resident().saturating_sub(before)
}

/// MON-05
#[test]
fn unmaps_of_uncached_ranges_cost_no_memory() {
    const COUNT: u64 = 20_000;
    for (len, apart, limit) in [
        (PAGE, PAGE, Some(256)),
        (16 * PAGE, 16 * PAGE, Some(256)),
        (PAGE, 16 << 20, None),
        (1 << 20, (1 << 20) + PAGE, None),
    ] {
        let cache = Cache::new(Nothing, Limits::default()).expect("a cache");
        let grown = fill(&cache, COUNT, len, apart);
        println!("{len} bytes each {apart}: {} bytes a region", grown / COUNT);
        assert!(
            limit.is_none_or(|limit| grown <= limit * COUNT),
            "{grown} bytes for {COUNT} regions"
        );
        // The table frees the memory of nodes that became empty.
        cache.invalidator().invalidate(range(0, u64::MAX), InvalidationCause::Unmap);
        let full = resident();
        cache.reclaim();
        assert!(
            apart < 16 << 20 || full - resident() > COUNT * 3 * PAGE / 4,
            "memory of empty nodes is kept"
        );
    }

    let cache = Cache::new(Nothing, Limits::default()).expect("a cache");
    fill(&cache, 1000, PAGE, PAGE);
    let unmap = |i: u64| {
        cache.invalidator().invalidate(range(i * 16 * PAGE, 16 * PAGE), InvalidationCause::Unmap)
    };
    unmap(0);
    let before = resident();
    (0..40_000).for_each(unmap);
    let grown = resident().saturating_sub(before);
    assert!(grown < 512 << 10, "{grown} bytes");
}

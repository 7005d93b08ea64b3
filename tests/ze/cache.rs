//! Tests of cached registrations of Level Zero memory that is freed and reallocated at its address.

use hmem::{
    AllocationKind, CacheAttr, DeviceId, DomainAttr, IfaceKind,
    monitor::{DetectionMethod, InvalidationCause},
};
use hmem_fake_ze::Profile;

use crate::{
    link::{Link, REMOTE, pattern, profiles, real},
    wire::raw,
};

const LEN: u64 = 70_000;

fn cached(cache: CacheAttr) -> DomainAttr {
    DomainAttr { cache: Some(cache), ..DomainAttr::default() }
}

/// MON-07, CACHE-02
///
/// Reuses an address in thousands of rounds. A registration keeps the pages of its dma-buf. In
/// each round the first lookup is a miss, and the second one a hit.
#[test]
fn freed_and_reallocated_memory_is_never_a_hit() {
    let rounds = if real() { 10_000 } else { 2_000 };
    for profile in profiles() {
        let link = Link::open(profile, cached(CacheAttr::default()));
        let cache = link.domain.cache().expect("a cache");
        let monitor = cache.monitor(IfaceKind::ZE).expect("a monitor");
        assert_eq!((&*monitor.name, monitor.detection), ("ze-identity", DetectionMethod::Identity));
        let (mut last, mut reused) = (None, 0);
        for round in 0..rounds {
            let buffer = link.buffer(LEN, AllocationKind::Device, DeviceId(0));
            let range = buffer.allocation().range;
            reused += u64::from(last.replace(range.start()) == Some(range.start()));
            let before = cache.statistics();
            // SAFETY: the buffer outlives both regions.
            let region = cache.get(unsafe { raw(range) }, REMOTE).expect("registered");
            assert!(region.lease().uncached_reason().is_none(), "{:?}", region.lease());
            assert_eq!(cache.statistics().hits, before.hits, "round {round}: a stale hit");
            let (key, bytes) = (region.key().expect("a key"), pattern(round, 64));
            link.put(&key, 100, &bytes).expect("write");
            let mut found = [0; 64];
            buffer.read(100, &mut found).expect("read");
            assert!(found == bytes[..], "round {round}: the NIC wrote to other memory");
            drop(region);
            // SAFETY: the buffer outlives the region.
            drop(cache.get(unsafe { raw(range) }, REMOTE).expect("registered"));
            assert_eq!(cache.statistics().hits, before.hits + 1, "round {round}: no hit");
        }
        assert!(reused > rounds * 9 / 10, "the address was reused {reused} times");
        let now = cache.statistics();
        assert!(now.invalidations(InvalidationCause::Identity) >= reused, "{now:?}");
    }
}

/// CACHE-12, MON-09
///
/// With `FI_MR_ZE_CACHE_MONITOR_ENABLED=0` Level Zero memory is registered uncached, and the reason
/// names the variable. Host memory is still cached. The test runs itself in a process with that
/// environment.
#[test]
fn variable_disables_the_level_zero_monitor_only() {
    const VARIABLE: &str = "FI_MR_ZE_CACHE_MONITOR_ENABLED";
    const NAME: &str = "cache::variable_disables_the_level_zero_monitor_only";
    let Ok(value) = std::env::var(VARIABLE) else {
        for value in ["0", "1"] {
            crate::child::passes(crate::child::command(NAME).env(VARIABLE, value));
        }
        return;
    };
    let link = Link::open(Profile::default(), cached(CacheAttr::default()));
    let off = link.hmem.cache_defaults().expect("good values").monitor_left_out_by(IfaceKind::ZE);
    assert_eq!(off, (value == "0").then_some(VARIABLE));
    let cache = link.domain.cache().expect("a cache");
    let buffer = link.buffer(LEN, AllocationKind::Device, DeviceId(0));
    let host = vec![0u8; 8192];
    let host =
        hmem::AddressRange::new(hmem::Address::of_ptr(host.as_ptr()), 8192).expect("a range");
    for (range, uncached) in [(buffer.allocation().range, value == "0"), (host, false)] {
        for _ in 0..2 {
            // SAFETY: the memory outlives the region.
            let region = cache.get(unsafe { raw(range) }, REMOTE).expect("registered");
            let reason = region.lease().uncached_reason();
            assert_eq!(reason.is_some(), uncached, "{reason:?}");
        }
    }
    assert_eq!(cache.statistics().hits, if value == "0" { 1 } else { 2 });
}

/// MON-07
///
/// Memory that the application allocated from a driver's pool has no identity of its own, and is
/// never cached.
#[test]
fn pooled_memory_of_the_application_is_registered_uncached() {
    let link = Link::open(Profile::default(), cached(CacheAttr::default()));
    let driver = link.driver.as_ref().expect("the fake driver");
    let cache = link.domain.cache().expect("a cache");
    let mut last = None;
    for round in 0..10 {
        let base = driver.allocate_elsewhere(1000);
        assert!(
            last.replace(base).is_none_or(|last| last == base),
            "the address did not come back"
        );
        let range = hmem::AddressRange::new(hmem::Address(base), 1000).expect("a range");
        // SAFETY: the memory is freed after the region is dropped.
        let region = cache.get(unsafe { raw(range) }, REMOTE).expect("registered");
        assert!(region.lease().uncached_reason().is_some(), "round {round}");
        drop(region);
        driver.free_elsewhere(base);
    }
    assert_eq!(cache.statistics().hits, 0);
}

//! Tests of statistics and of the list of entries.

use std::sync::atomic::Ordering;

use hmem_core::{
    ErrorKind,
    cache::{CacheStatistics, Limits},
};

use crate::support::*;

fn assert_adds_up(now: &CacheStatistics, lookups: u64, records: &CallRecords) {
    assert_eq!(now.lookups, lookups);
    assert_eq!(now.lookups, now.hits + now.misses);
    assert_eq!(now.misses, now.registrations + now.uncached + now.failures);
    let gone = now.evictions + now.merged + now.all_invalidations();
    // An entry may be invalidated and then fail to register. The statistics count it as an
    // invalidation and as a failure.
    let failed_after_invalidation = gone + now.entries as u64 - now.registrations;
    assert!(failed_after_invalidation <= now.failures, "{now:?}");
    let registered = records.registered.lock();
    assert_eq!(registered.len(), now.entries + now.pending_reclaim + now.deregister_failed);
    assert_eq!(registered.values().map(|key| key.range().len()).sum::<u64>(), now.bytes);
}

/// CACHE-10
#[test]
fn statistics_add_up_under_load() {
    const ROUNDS: u64 = 20_000;
    const THREADS: u64 = 3;
    let (cache, records) = cache(limits(50));
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (cache, records) = (&cache, &records);
            scope.spawn(move || {
                let mut random = thread + 1;
                for round in 0..ROUNDS {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let page = (random >> 33) % 80;
                    let lease = cache.get_or_register(&key(page * PAGE, PAGE));
                    if round % 64 == 0 {
                        cache.invalidate(range(page * PAGE, PAGE));
                    }
                    if round % 97 == 0 {
                        records.fail_next(ErrorKind::BadAddress);
                    }
                    drop(lease);
                }
            });
        }
    });
    cache.reclaim();
    let now = cache.statistics();
    assert_adds_up(&now, ROUNDS * THREADS, &records);
    assert_eq!((now.leases, now.in_use, now.pending_reclaim), (0, 0, 0));
    assert!(now.hits > 0 && now.evictions > 0 && now.failures > 0 && now.all_invalidations() > 0);
    drop(cache);
    assert_empty(&records);
}

/// CACHE-10
#[test]
fn entries_are_listed_with_rights_age_users_and_region_data() {
    let (cache, _records) = cache(Limits::default());
    let first = cache.get_or_register(&key(0, PAGE)).unwrap();
    let _again = cache.get_or_register(&key(0, PAGE)).unwrap();
    cache.get_or_register(&key(PAGE, 3 * PAGE)).unwrap();
    let invalidated = cache.get_or_register(&key(1 << 30, PAGE)).unwrap();
    cache.invalidate(range(1 << 30, PAGE));
    let mut listed = cache.entries(|region| region.id);
    listed.sort_by_key(|one| one.region);
    let short: Vec<_> = listed.iter().map(|one| (one.key, one.users, one.region)).collect();
    assert_eq!(short, [(key(0, PAGE), 2, first.id), (key(PAGE, 3 * PAGE), 0, 1)]);
    assert!(listed.iter().all(|one| one.age.as_secs() < 3600));
    let now = cache.statistics();
    assert_eq!((now.entries, now.bytes, now.leases, now.in_use), (2, 4 * PAGE, 3, 2));
    drop(invalidated);
}

#[test]
fn try_clear_reports_the_entries_that_remain() {
    let (cache, records) = cache(Limits::default());
    let lease = cache.get_or_register(&key(0, PAGE)).unwrap();
    cache.get_or_register(&key(PAGE, PAGE)).unwrap();
    let error = cache.try_clear().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert_eq!(error.context_value("leases"), Some("1"));
    assert_eq!(records.live(), 1);
    drop(lease);
    cache.try_clear().unwrap();
    assert_eq!(records.live(), 0);
    assert_eq!(records.deregistrations.load(Ordering::SeqCst), 2);
}

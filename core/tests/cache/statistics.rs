//! Numbers and listings.

use std::sync::atomic::Ordering;

use hmem_core::{
    ErrorKind,
    cache::{Limits, Statistics},
};

use crate::support::*;

fn assert_adds_up(now: &Statistics, lookups: u64, books: &Books) {
    assert_eq!(now.lookups, lookups);
    assert_eq!(now.lookups, now.hits + now.misses);
    assert_eq!(now.misses, now.registrations + now.uncached + now.failures);
    let gone = now.evictions + now.merged + now.all_invalidations();
    // What died while its registration failed is both.
    let failed_and_dead = gone + now.entries as u64 - now.registrations;
    assert!(failed_and_dead <= now.failures, "{now:?}");
    let registered = books.registered.lock();
    assert_eq!(registered.len(), now.entries + now.dying + now.stuck);
    assert_eq!(registered.values().map(|key| key.range().len()).sum::<u64>(), now.bytes);
}

/// CACHE-10
#[test]
fn statistics_add_up_under_load() {
    const ROUNDS: u64 = 20_000;
    const THREADS: u64 = 3;
    let (cache, books) = cache(limits(50));
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (cache, books) = (&cache, &books);
            scope.spawn(move || {
                let mut random = thread + 1;
                for round in 0..ROUNDS {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let page = (random >> 33) % 80;
                    let lease = cache.get(&key(page * PAGE, PAGE));
                    if round % 64 == 0 {
                        cache.invalidate(range(page * PAGE, PAGE));
                    }
                    if round % 97 == 0 {
                        books.fail_next(ErrorKind::BadAddress);
                    }
                    drop(lease);
                }
            });
        }
    });
    cache.flush();
    let now = cache.statistics();
    assert_adds_up(&now, ROUNDS * THREADS, &books);
    assert_eq!((now.leases, now.in_use, now.dying), (0, 0, 0));
    assert!(now.hits > 0 && now.evictions > 0 && now.failures > 0 && now.all_invalidations() > 0);
    drop(cache);
    assert_empty(&books);
}

/// CACHE-10
#[test]
fn entries_are_listed_with_rights_age_users_and_what_the_region_says() {
    let (cache, _books) = cache(Limits::default());
    let first = cache.get(&key(0, PAGE)).unwrap();
    let _again = cache.get(&key(0, PAGE)).unwrap();
    cache.get(&key(PAGE, 3 * PAGE)).unwrap();
    let dead = cache.get(&key(1 << 30, PAGE)).unwrap();
    cache.invalidate(range(1 << 30, PAGE));
    let mut listed = cache.entries(|region| region.id);
    listed.sort_by_key(|one| one.region);
    let short: Vec<_> = listed.iter().map(|one| (one.key, one.users, one.region)).collect();
    assert_eq!(short, [(key(0, PAGE), 2, first.id), (key(PAGE, 3 * PAGE), 0, 1)]);
    assert!(listed.iter().all(|one| one.age.as_secs() < 3600));
    let now = cache.statistics();
    assert_eq!((now.entries, now.bytes, now.leases, now.in_use), (2, 4 * PAGE, 3, 2));
    drop(dead);
}

#[test]
fn an_emptied_cache_says_what_is_left() {
    let (cache, books) = cache(Limits::default());
    let lease = cache.get(&key(0, PAGE)).unwrap();
    cache.get(&key(PAGE, PAGE)).unwrap();
    let error = cache.try_empty().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert_eq!(error.context_value("leases"), Some("1"));
    assert_eq!(books.live(), 1);
    drop(lease);
    cache.try_empty().unwrap();
    assert_eq!(books.live(), 0);
    assert_eq!(books.deregistrations.load(Ordering::SeqCst), 2);
}

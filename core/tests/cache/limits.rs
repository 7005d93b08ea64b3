//! Tests of a cache's limits, and of eviction.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use hmem_core::{
    ErrorKind,
    cache::{Limits, UncachedReason},
};
use parking_lot::Mutex;
use proptest::prelude::*;

use crate::support::*;

/// CACHE-03
#[test]
fn idle_entries_never_exceed_the_limits() {
    for max_count in [1, 2, 7, 100] {
        let (cache, records) = cache(limits(max_count));
        for i in 0..5 * max_count as u64 {
            cache.get_or_register(&key(i * PAGE, PAGE)).unwrap();
            assert!(records.live() <= max_count);
            assert!(cache.statistics().entries <= max_count);
        }
    }
    let (cache, records) = cache(Limits { max_bytes: 10 * PAGE, ..Limits::default() });
    for i in 0..50 {
        cache.get_or_register(&key(i << 24, (i % 7 + 1) * PAGE)).unwrap();
        assert!(
            records.registered.lock().values().map(|key| key.range().len()).sum::<u64>()
                <= 10 * PAGE
        );
    }
    let long = cache.get_or_register(&key(0, 11 * PAGE)).unwrap();
    assert!(matches!(long.uncached_reason(), Some(UncachedReason::TooLong)));
    assert!(cache.statistics().bytes <= 10 * PAGE);
}

/// CACHE-03
#[test]
fn eviction_spares_entries_hit_since_the_last_pass() {
    const COUNT: u64 = 320;
    let (cache, _records) = cache(limits(COUNT as usize));
    for i in 0..COUNT {
        cache.get_or_register(&key(i * PAGE, PAGE)).unwrap();
    }
    for i in (0..COUNT).step_by(2) {
        cache.get_or_register(&key(i * PAGE, PAGE)).unwrap();
    }
    // These new entries let the clock hand pass once: they are as many as the entries without a
    // hit.
    for i in COUNT..COUNT + COUNT / 2 {
        cache.get_or_register(&key(i * PAGE, PAGE)).unwrap();
    }
    let kept =
        (0..COUNT).filter(|i| cache.find(&key(i * PAGE, PAGE)).is_some()).collect::<Vec<_>>();
    let hit_and_lost = (0..COUNT).step_by(2).filter(|i| !kept.contains(i)).count() as u64;
    let slack = COUNT / 16;
    assert!(hit_and_lost <= slack, "{hit_and_lost} of those that were hit are gone");
    assert!(kept.iter().all(|i| i % 2 == 0), "some that were not hit stayed");
    assert!(cache.statistics().evictions <= COUNT / 2 + slack);
}

/// CACHE-03
#[test]
fn full_cache_evicts_no_leased_entry_and_registers_uncached() {
    let (cache, records) = cache(limits(8));
    let leases: Vec<_> =
        (0..8).map(|i| cache.get_or_register(&key(i * PAGE, PAGE)).unwrap()).collect();
    for i in 8..40 {
        let lease = cache.get_or_register(&key(i * PAGE, PAGE)).unwrap();
        assert!(matches!(lease.uncached_reason(), Some(UncachedReason::Full)));
        assert_eq!(records.live(), 9);
    }
    assert_eq!(records.live(), 8);
    for (i, lease) in leases.iter().enumerate() {
        assert_eq!(cache.get_or_register(&key(i as u64 * PAGE, PAGE)).unwrap().id, lease.id);
    }
    drop(leases);
    assert!(cache.get_or_register(&key(8 * PAGE, PAGE)).unwrap().uncached_reason().is_none());
    assert_eq!(records.live(), 8);
}

/// CACHE-03
///
/// If one entry replaces the only other entry, the cache watches the new memory before it ends the
/// old watch. For some monitors the first watch and the end of the last watch are expensive.
#[test]
fn evicting_the_last_entry_unwatches_after_the_next_watch() {
    let (cache, records) = cache(limits(1));
    records.room.store(1, Ordering::SeqCst);
    for number in 0..100 {
        let lease = cache.get_or_register(&key(number << 12, 4096)).unwrap();
        assert!(lease.uncached_reason().is_none());
        drop(lease);
        let counted = |count: &AtomicUsize| count.load(Ordering::SeqCst) as u64;
        assert_eq!((counted(&records.watches), counted(&records.unwatches)), (number + 1, number));
    }
    assert_eq!(records.unwatched.load(Ordering::SeqCst), 0);
    // If the next range cannot be watched or cannot be registered, the last watch ends.
    records.unwatchable.store(true, Ordering::SeqCst);
    drop(cache.get_or_register(&key(1 << 30, 4096)).unwrap());
    assert_eq!(records.unwatched.load(Ordering::SeqCst), 1);
    records.unwatchable.store(false, Ordering::SeqCst);
    drop(cache.get_or_register(&key(0, 4096)).unwrap());
    records.fail_next(ErrorKind::BadAddress);
    cache.get_or_register(&key(4096, 4096)).unwrap_err();
    assert_eq!(records.unwatched.load(Ordering::SeqCst), 2);
    assert_empty(&records);
}

/// CACHE-03
///
/// The callback looks up the very range that is being registered when the eviction ends. It must
/// run after that registration, because it would wait for it otherwise.
#[test]
fn refused_watch_evicts_idle_entries_and_runs_callbacks_after_the_registration() {
    let (cache, records) = cache(Limits::default());
    let cache = Arc::new(cache);
    records.watch_room.store(1, Ordering::SeqCst);
    drop(cache.get_or_register(&key(0, PAGE)).unwrap());
    let found = Arc::new(Mutex::new(None));
    let callback = {
        let (cache, found) = (Arc::downgrade(&cache), Arc::clone(&found));
        move || {
            *found.lock() =
                Some(cache.upgrade().unwrap().get_or_register(&key(PAGE, PAGE)).unwrap().id)
        }
    };
    let weak = Arc::downgrade(&cache);
    *records.deregistering.meanwhile.lock() = Some(Box::new(move || {
        weak.upgrade().unwrap().invalidate_with_callback(range(100 * PAGE, PAGE), callback);
    }));
    let lease = cache.get_or_register(&key(PAGE, PAGE)).unwrap();
    assert!(lease.uncached_reason().is_none(), "{lease:?}");
    assert_eq!(*found.lock(), Some(lease.id));
    assert_eq!((records.live(), cache.statistics().evictions), (1, 1));
    // While the only watched entry has a lease, there is nothing to evict.
    let other = cache.get_or_register(&key(0, PAGE)).unwrap();
    assert!(matches!(other.uncached_reason(), Some(UncachedReason::Unwatched(_))), "{other:?}");
    drop((lease, other));
    cache.try_clear().unwrap();
    assert_empty(&records);
}

/// CACHE-03: the watch of the evicted region ends before the cache gives up the new one.
#[test]
fn refused_watch_is_retried_without_the_watch_of_the_evicted_region() {
    let (cache, records) = cache(limits(2));
    records.watch_room.store(2, Ordering::SeqCst);
    let used = cache.get_or_register(&key(0, PAGE)).unwrap();
    drop(cache.get_or_register(&key(PAGE, PAGE)).unwrap());
    let lease = cache.get_or_register(&key(2 * PAGE, PAGE)).unwrap();
    assert!(lease.uncached_reason().is_none(), "{lease:?}");
    drop((used, lease));
    cache.try_clear().unwrap();
    assert_empty(&records);
}

/// CACHE-03
#[test]
fn unwatchable_memory_is_uncached_with_the_reason() {
    let (cache, records) = cache(Limits::default());
    records.unwatchable.store(true, Ordering::SeqCst);
    let lease = cache.get_or_register(&key(0, PAGE)).unwrap();
    let Some(UncachedReason::Unwatched(why)) = lease.uncached_reason() else { panic!("{lease:?}") };
    assert!(why.to_string().contains("no monitor watches this"));
    drop(lease);
    assert_empty(&records);
    records.unwatchable.store(false, Ordering::SeqCst);
    assert!(cache.get_or_register(&key(0, PAGE)).unwrap().uncached_reason().is_none());
}

/// CACHE-04
#[test]
fn limit_of_0_registers_each_lookup_and_deregisters_each_release() {
    for limits in [limits(0), Limits { max_bytes: 0, ..Limits::default() }] {
        let (cache, records) = cache(limits);
        for round in 1..=5 {
            let lease = cache.get_or_register(&key(0, PAGE)).unwrap();
            assert!(matches!(lease.uncached_reason(), Some(UncachedReason::CachingOff)));
            assert_eq!((records.live(), records.registrations.load(Ordering::SeqCst)), (1, round));
            drop(lease);
            assert_eq!(records.live(), 0);
        }
        assert_eq!(cache.statistics().hits, 0);
    }
}

proptest! {
    /// CACHE-03
    ///
    /// A random mix of lookups and releases never exceeds the limits. The backend's records must
    /// agree with the statistics, and each lease must refer to a live region.
    #[test]
    fn limits_hold_under_any_mix_of_leases(
        max_count in 1..12_usize,
        max_pages in 1..40_u64,
        steps in proptest::collection::vec((0..30_u64, 1..6_u64, any::<bool>()), 1..200),
    ) {
        let limits = Limits { max_count, max_bytes: max_pages * PAGE, merge: false };
        let (cache, records) = cache(limits);
        let mut leases = Vec::new();
        for (page, pages, put) in steps {
            leases.push(cache.get_or_register(&key(page * PAGE, pages * PAGE)).unwrap());
            if put {
                leases.swap_remove(page as usize % leases.len());
            }
            let registered = records.registered.lock();
            prop_assert!(leases.iter().all(|lease| registered.contains_key(&lease.id)));
            drop(registered);
            let now = cache.statistics();
            prop_assert!(now.entries <= max_count && now.bytes <= max_pages * PAGE);
            let uncached = leases.iter().filter(|lease| lease.uncached_reason().is_some()).count();
            prop_assert_eq!(records.live(), now.entries + uncached);
        }
        drop(leases);
        drop(cache);
        assert_empty(&records);
    }
}

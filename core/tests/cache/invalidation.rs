//! Tests of invalidation: the affected entries, their deregistration, and callbacks.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    time::Duration,
};

use hmem_core::{
    cache::{Limits, UncachedReason},
    monitor::{GateToken, InvalidationCause, InvalidationToken},
};

use crate::support::*;

/// CACHE-08
#[test]
fn invalidated_entry_is_kept_until_its_last_lease_ends() {
    let (cache, records) = cache(Limits::default());
    let first = cache.get_or_register(&key(0, 2 * PAGE)).unwrap();
    let second = cache.get_or_register(&key(PAGE, PAGE)).unwrap();
    let calls = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&calls);
    cache.invalidate_with_callback(range(PAGE, 1), move || {
        count.fetch_add(1, Ordering::SeqCst);
    });
    assert!(first.is_invalidated() && second.is_invalidated());
    let fresh = cache.get_or_register(&key(0, 2 * PAGE)).unwrap();
    assert_ne!(fresh.id, first.id);
    let id = first.id;
    drop(first);
    cache.reclaim();
    assert!(records.registered.lock().contains_key(&id));
    assert_eq!(calls.load(Ordering::SeqCst), 0);
    drop(second);
    cache.reclaim();
    assert!(!records.registered.lock().contains_key(&id));
    while calls.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    cache.invalidate(range(PAGE, 1));
    drop(fresh);
    cache.reclaim();
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    assert_eq!(records.live(), 0);
    // There is no entry, so the callback runs at once.
    let count = Arc::clone(&calls);
    cache.invalidate_with_callback(range(0, PAGE), move || {
        count.fetch_add(1, Ordering::SeqCst);
    });
    assert_eq!(calls.load(Ordering::SeqCst), 2);
}

/// CACHE-08
#[test]
fn worker_deregisters_when_the_last_lease_ends() {
    let (cache, records) = cache(Limits::default());
    for _ in 0..1000 {
        let lease = cache.get_or_register(&key(0, PAGE)).unwrap();
        cache.invalidate(range(0, PAGE));
        assert_eq!(records.live(), 1);
        drop(lease);
        while records.live() > 0 {
            std::thread::yield_now();
        }
    }
}

#[test]
fn application_invalidates_bytes_and_monitors_invalidate_pages() {
    let page = page();
    let (cache, _records) = cache(Limits::default());
    let base = 1 << 30;
    let keys: Vec<_> = (0..8).map(|i| key(base + i * page + 100, 200)).collect();
    let huge = key(base - (1 << 24), 1 << 23);
    for key in keys.iter().chain([&huge]) {
        cache.get_or_register(key).unwrap();
    }
    let left = || (0..8).filter(|i| cache.find(&keys[*i as usize]).is_some()).collect::<Vec<u64>>();
    // Ranges that miss all entries: between entries, up to the first byte of an entry, after the
    // last byte of another, and empty.
    cache.invalidate(range(base, 100));
    cache.invalidate(range(base + 300, page - 200));
    assert_eq!(left(), [0, 1, 2, 3, 4, 5, 6, 7]);
    cache.invalidate(range(base + 2 * page + page - 96, page + 196));
    cache.invalidate(range(base + 5 * page + 299, 10));
    cache.invalidate(range(base, 0));
    assert_eq!(left(), [0, 1, 2, 4, 6, 7]);
    cache.invalidate_with_callback(range(base + 6 * page + 300, 10), || {});
    assert_eq!(left(), [0, 1, 2, 4, 6, 7]);
    cache
        .invalidator()
        .invalidate(range(base + 3 * page + page - 96, 200), InvalidationCause::Unmap);
    assert_eq!(left(), [0, 1, 2, 6, 7]);
    assert!(cache.find(&huge).is_some());
    cache.invalidate(range(0, u64::MAX));
    assert!(keys.iter().chain([&huge]).all(|key| cache.find(key).is_none()));
    let now = cache.statistics();
    assert_eq!(
        now.invalidations(InvalidationCause::Application)
            + now.invalidations(InvalidationCause::Unmap),
        9
    );
}

#[test]
fn callback_does_not_wait_for_entries_that_only_share_a_page() {
    let (cache, _records) = cache(Limits::default());
    let beside = cache.get_or_register(&key(2048, 1024)).unwrap();
    cache.invalidate(range(2048, 1));
    assert!(beside.is_invalidated());
    cache.get_or_register(&key(0, 1024)).unwrap();
    let (sender, receiver) = mpsc::channel();
    cache
        .invalidate_with_callback(range(0, 1024), move || sender.send(()).expect("the test waits"));
    cache.reclaim();
    // The worker may be the thread that runs the callback.
    receiver.recv_timeout(Duration::from_secs(60)).expect("called while the other is in use");
    drop(beside);
}

/// CACHE-09
#[test]
fn invalidation_during_registration_gives_an_invalidated_lease() {
    let (cache, records) = cache(Limits::default());
    let invalidator = Arc::clone(cache.invalidator());
    *records.registering.meanwhile.lock() =
        Some(Box::new(move || invalidator.invalidate(range(0, 1), InvalidationCause::Unmap)));
    let invalidated = cache.get_or_register(&key(0, PAGE)).unwrap();
    assert!(invalidated.is_invalidated());
    assert!(cache.find(&key(0, PAGE)).is_none());
    let live = cache.get_or_register(&key(0, PAGE)).unwrap();
    assert_ne!(live.id, invalidated.id);
    drop((invalidated, live));
    cache.reclaim();
    assert_eq!(records.live(), 1);
    assert_eq!(cache.statistics().invalidations(InvalidationCause::Unmap), 1);
}

/// CACHE-09
#[test]
fn registration_during_an_invalidation_is_invalidated() {
    let page = page();
    let (cache, records) = cache(Limits::default());
    let invalidator = Arc::clone(cache.invalidator());
    let change = invalidator.invalidate_start(range(0, 4 * page), InvalidationCause::Remap);
    let beside = invalidator.invalidate_start(range(1 << 30, page), InvalidationCause::Unmap);
    for _ in 0..3 {
        assert!(cache.get_or_register(&key(3 * page, page)).unwrap().is_invalidated());
    }
    assert!(!cache.get_or_register(&key(4 * page, page)).unwrap().is_invalidated());
    invalidator.invalidate_end(change);
    invalidator.invalidate_end(beside);
    assert!(!cache.get_or_register(&key(3 * page, page)).unwrap().is_invalidated());
    cache.reclaim();
    assert_eq!(records.live(), 2);
    assert_eq!(cache.statistics().invalidations(InvalidationCause::Remap), 3);
}

/// CACHE-09
#[test]
fn invalidations_beyond_the_slots_cover_all_memory() {
    let (cache, _records) = cache(Limits::default());
    let invalidator = cache.invalidator();
    let changes: Vec<InvalidationToken> = (0..100)
        .map(|i| {
            invalidator
                .invalidate_start(range((1 << 40) + i * PAGE, PAGE), InvalidationCause::Unmap)
        })
        .collect();
    assert!(cache.get_or_register(&key(0, PAGE)).unwrap().is_invalidated());
    changes.into_iter().for_each(|change| invalidator.invalidate_end(change));
    assert!(!cache.get_or_register(&key(0, PAGE)).unwrap().is_invalidated());
    assert!(!cache.get_or_register(&key(1 << 40, PAGE)).unwrap().is_invalidated());
}

#[test]
fn closed_gate_allows_no_hit() {
    let (cache, _records) = cache(Limits::default());
    let id = cache.get_or_register(&key(0, PAGE)).unwrap().id;
    let invalidator = cache.invalidator();
    let (first, second) = (invalidator.close_gate(), invalidator.close_gate());
    for _ in 0..2 {
        assert!(cache.find(&key(0, PAGE)).is_none());
        let lease = cache.get_or_register(&key(0, PAGE)).unwrap();
        assert!(matches!(lease.uncached_reason(), Some(UncachedReason::InvalidationInProgress)));
    }
    invalidator.open_gate(first);
    assert!(cache.find(&key(0, PAGE)).is_none());
    invalidator.open_gate(second);
    assert_eq!(cache.get_or_register(&key(0, PAGE)).unwrap().id, id);
}

/// CACHE-08
///
/// The pages of a changed range go as a whole, so a monitor's range stands for all bytes of its
/// first and last page.
#[test]
fn monitors_range_covers_its_first_and_last_page() {
    let page = page();
    let (cache, _records) = cache(Limits::default());
    let invalidator = cache.invalidator();
    // The entries on pages 1 and 2 share no byte with the range, which lies between them.
    let (before, after) = (key(page, 100), key(3 * page - 100, 100));
    let beside = [key(0, page), key(3 * page, page)];
    let changed = range(page + 200, page);
    let lookup = |key| cache.get_or_register(&key).unwrap();
    let leases = [before, after].map(lookup);
    let untouched = beside.map(lookup);
    invalidator.invalidate(changed, InvalidationCause::Unmap);
    assert!(leases.iter().all(|lease| lease.is_invalidated()));
    // A change in progress also invalidates new entries on its pages.
    let change = invalidator.invalidate_start(changed, InvalidationCause::Unmap);
    assert!([before, after].map(lookup).iter().all(|lease| lease.is_invalidated()));
    assert!(untouched.iter().all(|lease| !lease.is_invalidated()));
    invalidator.invalidate_end(change);
    assert!([before, after].map(lookup).iter().all(|lease| !lease.is_invalidated()));
}

/// MON-09
///
/// The tokens of one cache neither open another cache's gate nor end its changes.
#[test]
fn tokens_of_another_cache_change_nothing() {
    let [(ours, _records), (other, _others)] = [(); 2].map(|()| cache(Limits::default()));
    let id = ours.get_or_register(&key(0, PAGE)).unwrap().id;
    let (invalidator, stranger) = (ours.invalidator(), other.invalidator());

    let closed = invalidator.close_gate();
    invalidator.open_gate(stranger.close_gate());
    invalidator.open_gate(GateToken::unnumbered());
    assert!(ours.find(&key(0, PAGE)).is_none());
    invalidator.open_gate(closed);
    assert_eq!(ours.get_or_register(&key(0, PAGE)).unwrap().id, id);

    let change = invalidator.invalidate_start(range(PAGE, PAGE), InvalidationCause::Unmap);
    let same_slot = stranger.invalidate_start(range(PAGE, PAGE), InvalidationCause::Unmap);
    invalidator.invalidate_end(same_slot);
    invalidator.invalidate_end(InvalidationToken::unnumbered());
    assert!(ours.get_or_register(&key(PAGE, PAGE)).unwrap().is_invalidated());
    invalidator.invalidate_end(change);
    assert!(!ours.get_or_register(&key(PAGE, PAGE)).unwrap().is_invalidated());
}

/// MON-05
#[test]
fn no_invalidation_is_lost_however_many_there_are() {
    const COUNT: u64 = 40_000;
    let page = page();
    let (cache, records) = cache(Limits::default());
    let leases: Vec<_> =
        (0..COUNT).map(|i| cache.get_or_register(&key(i * page, page)).unwrap()).collect();
    let invalidator = cache.invalidator();
    for i in 0..COUNT {
        invalidator.invalidate(range(i * page, page), InvalidationCause::Unmap);
    }
    assert!(leases.iter().all(|lease| lease.is_invalidated()));
    drop(leases);
    cache.reclaim();
    assert_eq!(records.live(), 0);
    assert_eq!(cache.statistics().invalidations(InvalidationCause::Unmap), COUNT);
    assert_empty(&records);
}

//! Changes of memory: what dies, when it is deregistered, who is told.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    time::Duration,
};

use hmem_core::{
    cache::{Limits, Uncached},
    monitor::{Cause, Change},
};

use crate::support::*;

/// CACHE-08
#[test]
fn an_invalidated_entry_in_use_is_no_hit_and_goes_at_the_last_put_told_once() {
    let (cache, books) = cache(Limits::default());
    let first = cache.get(&key(0, 2 * PAGE)).unwrap();
    let second = cache.get(&key(PAGE, PAGE)).unwrap();
    let told = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&told);
    cache.invalidate_then(range(PAGE, 1), move || {
        count.fetch_add(1, Ordering::SeqCst);
    });
    assert!(first.is_dead() && second.is_dead());
    let fresh = cache.get(&key(0, 2 * PAGE)).unwrap();
    assert_ne!(fresh.id, first.id);
    let id = first.id;
    drop(first);
    cache.flush();
    assert!(books.registered.lock().contains_key(&id));
    assert_eq!(told.load(Ordering::SeqCst), 0);
    drop(second);
    cache.flush();
    assert!(!books.registered.lock().contains_key(&id));
    while told.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    cache.invalidate(range(PAGE, 1));
    drop(fresh);
    cache.flush();
    assert_eq!(told.load(Ordering::SeqCst), 1);
    assert_eq!(books.live(), 0);
    // Nothing there: told at once.
    let count = Arc::clone(&told);
    cache.invalidate_then(range(0, PAGE), move || {
        count.fetch_add(1, Ordering::SeqCst);
    });
    assert_eq!(told.load(Ordering::SeqCst), 2);
}

/// CACHE-08
#[test]
fn the_worker_deregisters_by_itself_at_the_last_put() {
    let (cache, books) = cache(Limits::default());
    for _ in 0..1000 {
        let lease = cache.get(&key(0, PAGE)).unwrap();
        cache.invalidate(range(0, PAGE));
        assert_eq!(books.live(), 1);
        drop(lease);
        while books.live() > 0 {
            std::thread::yield_now();
        }
    }
}

#[test]
fn an_explicit_invalidation_ends_entries_that_share_a_byte_and_a_monitors_those_that_share_a_page()
{
    let (cache, _books) = cache(Limits::default());
    let base = 1 << 30;
    let keys: Vec<_> = (0..8).map(|i| key(base + i * PAGE + 100, 200)).collect();
    let huge = key(base - (1 << 24), 1 << 23);
    for key in keys.iter().chain([&huge]) {
        cache.get(key).unwrap();
    }
    let left = || (0..8).filter(|i| cache.find(&keys[*i as usize]).is_some()).collect::<Vec<u64>>();
    // Between them, then up to the first byte of one, from the last byte of another, and nothing.
    cache.invalidate(range(base, 100));
    cache.invalidate(range(base + 300, PAGE - 200));
    assert_eq!(left(), [0, 1, 2, 3, 4, 5, 6, 7]);
    cache.invalidate(range(base + 2 * PAGE + 4000, PAGE + 196));
    cache.invalidate(range(base + 5 * PAGE + 299, 10));
    cache.invalidate(range(base, 0));
    assert_eq!(left(), [0, 1, 2, 4, 6, 7]);
    cache.invalidate_then(range(base + 6 * PAGE + 300, 10), || {});
    assert_eq!(left(), [0, 1, 2, 4, 6, 7]);
    cache.invalidator().invalidate(range(base + 3 * PAGE + 4000, 200), Cause::Unmap);
    assert_eq!(left(), [0, 1, 2, 6, 7]);
    assert!(cache.find(&huge).is_some());
    cache.invalidate(range(0, u64::MAX));
    assert!(keys.iter().chain([&huge]).all(|key| cache.find(key).is_none()));
    let now = cache.statistics();
    assert_eq!(now.invalidations(Cause::Application) + now.invalidations(Cause::Unmap), 9);
}

#[test]
fn the_callback_of_an_invalidation_does_not_wait_for_entries_that_only_share_a_page() {
    let (cache, _books) = cache(Limits::default());
    let beside = cache.get(&key(2048, 1024)).unwrap();
    cache.invalidate(range(2048, 1));
    assert!(beside.is_dead());
    cache.get(&key(0, 1024)).unwrap();
    let (tell, told) = mpsc::channel();
    cache.invalidate_then(range(0, 1024), move || tell.send(()).expect("the test waits"));
    cache.flush();
    // The worker may be the thread that tells.
    told.recv_timeout(Duration::from_secs(60)).expect("told while the other is in use");
    drop(beside);
}

/// CACHE-09
#[test]
fn memory_that_goes_while_it_is_registered_gives_a_dead_entry() {
    let (cache, books) = cache(Limits::default());
    let invalidator = Arc::clone(cache.invalidator());
    *books.registering.meanwhile.lock() =
        Some(Box::new(move || invalidator.invalidate(range(0, 1), Cause::Unmap)));
    let dead = cache.get(&key(0, PAGE)).unwrap();
    assert!(dead.is_dead());
    assert!(cache.find(&key(0, PAGE)).is_none());
    let live = cache.get(&key(0, PAGE)).unwrap();
    assert_ne!(live.id, dead.id);
    drop((dead, live));
    cache.flush();
    assert_eq!(books.live(), 1);
    assert_eq!(cache.statistics().invalidations(Cause::Unmap), 1);
}

/// CACHE-09
#[test]
fn nothing_becomes_live_over_a_change_under_way() {
    let (cache, books) = cache(Limits::default());
    let invalidator = Arc::clone(cache.invalidator());
    let change = invalidator.begin(range(0, 4 * PAGE), Cause::Remap);
    let beside = invalidator.begin(range(1 << 30, PAGE), Cause::Unmap);
    for _ in 0..3 {
        assert!(cache.get(&key(3 * PAGE, PAGE)).unwrap().is_dead());
    }
    assert!(!cache.get(&key(4 * PAGE, PAGE)).unwrap().is_dead());
    invalidator.end(change);
    invalidator.end(beside);
    assert!(!cache.get(&key(3 * PAGE, PAGE)).unwrap().is_dead());
    cache.flush();
    assert_eq!(books.live(), 2);
    assert_eq!(cache.statistics().invalidations(Cause::Remap), 3);
}

/// CACHE-09
#[test]
fn more_changes_than_there_are_places_for_count_as_changes_of_everything() {
    let (cache, _books) = cache(Limits::default());
    let invalidator = cache.invalidator();
    let changes: Vec<Change> = (0..100)
        .map(|i| invalidator.begin(range((1 << 40) + i * PAGE, PAGE), Cause::Unmap))
        .collect();
    assert!(cache.get(&key(0, PAGE)).unwrap().is_dead());
    changes.into_iter().for_each(|change| invalidator.end(change));
    assert!(!cache.get(&key(0, PAGE)).unwrap().is_dead());
    assert!(!cache.get(&key(1 << 40, PAGE)).unwrap().is_dead());
}

#[test]
fn while_the_gate_is_closed_nothing_hits() {
    let (cache, _books) = cache(Limits::default());
    let id = cache.get(&key(0, PAGE)).unwrap().id;
    let invalidator = cache.invalidator();
    invalidator.close_gate();
    invalidator.close_gate();
    for _ in 0..2 {
        assert!(cache.find(&key(0, PAGE)).is_none());
        let lease = cache.get(&key(0, PAGE)).unwrap();
        assert!(matches!(lease.uncached(), Some(Uncached::ChangeUnderWay)));
    }
    invalidator.open_gate();
    assert!(cache.find(&key(0, PAGE)).is_none());
    invalidator.open_gate();
    assert_eq!(cache.get(&key(0, PAGE)).unwrap().id, id);
}

/// MON-05
#[test]
fn any_number_of_invalidations_is_remembered() {
    const COUNT: u64 = 40_000;
    let (cache, books) = cache(Limits::default());
    let leases: Vec<_> = (0..COUNT).map(|i| cache.get(&key(i * PAGE, PAGE)).unwrap()).collect();
    let invalidator = cache.invalidator();
    for i in 0..COUNT {
        invalidator.invalidate(range(i * PAGE, PAGE), Cause::Unmap);
    }
    assert!(leases.iter().all(|lease| lease.is_dead()));
    drop(leases);
    cache.flush();
    assert_eq!(books.live(), 0);
    assert_eq!(cache.statistics().invalidations(Cause::Unmap), COUNT);
    assert_empty(&books);
}

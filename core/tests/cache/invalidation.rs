//! Changes of memory: what dies, when it is deregistered, who is told.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use hmem_core::{
    cache::{Limits, Uncached},
    monitor::{Cause, Change},
};

use crate::support::*;

#[test]
fn cache_08_an_invalidated_entry_in_use_is_no_hit_and_goes_at_the_last_put_told_once() {
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

#[test]
fn cache_08_the_worker_deregisters_by_itself_at_the_last_put() {
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
fn an_invalidation_touches_what_shares_a_page_and_nothing_else() {
    let (cache, _books) = cache(Limits::default());
    let base = 1 << 30;
    let keys: Vec<_> = (0..8).map(|i| key(base + i * PAGE + 100, 200)).collect();
    let huge = key(base - (1 << 24), 1 << 23);
    for key in keys.iter().chain([&huge]) {
        cache.get(key).unwrap();
    }
    cache.invalidate(range(base + 2 * PAGE + 4000, 2 * PAGE));
    let left: Vec<_> = (0..8).filter(|i| cache.find(&keys[*i]).is_some()).collect();
    assert_eq!(left, [0, 1, 5, 6, 7]);
    assert!(cache.find(&huge).is_some());
    cache.invalidate(range(0, u64::MAX));
    assert!(keys.iter().chain([&huge]).all(|key| cache.find(key).is_none()));
    assert_eq!(cache.statistics().invalidations(Cause::Application), 9);
}

#[test]
fn cache_09_memory_that_goes_while_it_is_registered_gives_a_dead_entry() {
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

#[test]
fn cache_09_nothing_becomes_live_over_a_change_under_way() {
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

#[test]
fn cache_09_more_changes_than_there_are_places_for_count_as_changes_of_everything() {
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

#[test]
fn mon_05_any_number_of_invalidations_is_remembered() {
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

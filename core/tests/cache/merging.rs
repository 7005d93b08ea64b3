//! Joining registrations.

use std::sync::atomic::Ordering;

use hmem_core::{
    Access, AllocationId, DeviceId, ErrorKind, IfaceKind,
    cache::{Key, Limits, Source, Uncached},
};

use crate::support::*;

const MERGING: Limits = Limits { max_count: 100, max_bytes: u64::MAX, merge: true };

/// CACHE-05
#[test]
fn adjacent_and_overlapping_ranges_are_joined_in_cascade() {
    let (cache, books) = cache(MERGING);
    cache.get(&key(0, PAGE)).unwrap();
    cache.get(&key(2 * PAGE, PAGE)).unwrap();
    cache.get(&key(4 * PAGE, 2 * PAGE)).unwrap();
    cache.get(&key(100 * PAGE, PAGE)).unwrap();
    assert_eq!(books.live(), 4);
    // Touches the first two; the second touches nothing more, the new one overlaps the third.
    let joined = cache.get(&key(PAGE, 4 * PAGE)).unwrap();
    assert_eq!(joined.key.range(), range(0, 6 * PAGE));
    assert_eq!(books.live(), 2);
    for i in 0..6 {
        assert_eq!(cache.get(&key(i * PAGE, PAGE)).unwrap().id, joined.id);
    }
    assert_eq!(cache.statistics().merged, 3);
    assert_eq!(cache.statistics().entries, 2);
    drop(joined);
    drop(cache);
    assert_empty(&books);
}

/// CACHE-05
#[test]
fn rights_are_not_widened() {
    let (cache, _books) = cache(MERGING);
    let with = |page: u64, access| Key::new(range(page * PAGE, PAGE), access).unwrap();
    cache.get(&with(0, Access::SEND)).unwrap();
    cache.get(&with(1, Access::SEND | Access::REMOTE_WRITE)).unwrap();
    let middle = cache.get(&with(2, Access::REMOTE_WRITE)).unwrap();
    assert_eq!(middle.key, with(2, Access::REMOTE_WRITE));
    assert_eq!(cache.statistics().merged, 0);
}

/// CACHE-05 CACHE-02
#[test]
fn neighbours_of_another_owner_or_allocation_are_not_joined() {
    let on = |page: u64, iface, device, allocation| {
        key(page * PAGE, PAGE).owned_by(iface, Some(DeviceId(device))).in_allocation(allocation)
    };
    let first = on(0, IfaceKind::CUDA, 0, AllocationId(1));
    for second in [
        on(1, IfaceKind::ZE, 0, AllocationId(1)),
        on(1, IfaceKind::CUDA, 1, AllocationId(1)),
        on(1, IfaceKind::CUDA, 0, AllocationId(2)),
    ] {
        let (cache, books) = cache(MERGING);
        let left = cache.get(&first).unwrap();
        let right = cache.get(&second).unwrap();
        assert_eq!((left.key, right.key), (first, second));
        assert_eq!((left.is_dead(), cache.statistics().merged, books.live()), (false, 0, 2));
    }
    let (cache, _books) = cache(MERGING);
    cache.get(&first).unwrap();
    let joined = cache.get(&on(1, IfaceKind::CUDA, 0, AllocationId(1))).unwrap();
    assert_eq!(joined.key.range(), range(0, 2 * PAGE));
}

/// CACHE-05
#[test]
fn an_entry_in_use_lives_on_beside_what_replaced_it() {
    let (cache, books) = cache(MERGING);
    let old = cache.get(&key(0, PAGE)).unwrap();
    let joined = cache.get(&key(PAGE, PAGE)).unwrap();
    assert_eq!(joined.key.range(), range(0, 2 * PAGE));
    assert!(books.registered.lock().contains_key(&old.id));
    assert_eq!(cache.get(&key(0, PAGE)).unwrap().id, joined.id);
    drop(old);
    cache.flush();
    assert_eq!(books.live(), 1);
}

/// CACHE-05
#[test]
fn a_merge_that_fails_midway_leaves_no_registration() {
    let (cache, books) = cache(MERGING);
    cache.get(&key(0, PAGE)).unwrap();
    cache.get(&key(2 * PAGE, PAGE)).unwrap();
    // The merged range, then the caller's own.
    books.fail_next(ErrorKind::BadAddress);
    books.fail_next(ErrorKind::BadAddress);
    let error = cache.get(&key(PAGE, PAGE)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BadAddress);
    cache.flush();
    assert_eq!(books.live(), 0);
    let now = cache.statistics();
    assert_eq!((now.entries, now.bytes, now.dying), (0, 0, 0));
    assert_eq!((now.lookups, now.registrations, now.failures), (3, 2, 1));
    assert_empty(&books);
}

/// CACHE-14
#[test]
fn a_get_whose_neighbour_cannot_be_registered_any_more_gets_its_own_range() {
    let (cache, books) = cache(MERGING);
    cache.get(&key(0, PAGE)).unwrap();
    *books.bad.lock() = Some(key(0, PAGE));
    let lease = cache.get(&key(PAGE, PAGE)).unwrap();
    assert_eq!((lease.key, lease.is_dead()), (key(PAGE, PAGE), false));
    assert!(lease.uncached().is_none(), "{lease:?}");
    assert_eq!(cache.get(&key(PAGE, PAGE)).unwrap().id, lease.id);
    let now = cache.statistics();
    assert_eq!((now.lookups, now.hits, now.registrations, now.failures), (3, 1, 2, 0));
    assert_eq!((now.entries, now.dying, books.live()), (1, 0, 1));
    drop(lease);
    // The neighbour's own get says what is wrong with it, and harms nobody else's.
    assert_eq!(cache.get(&key(0, PAGE)).unwrap_err().kind(), ErrorKind::BadAddress);
    assert_eq!(cache.get(&key(PAGE, PAGE)).unwrap().key, key(PAGE, PAGE));
    drop(cache);
    assert_empty(&books);
}

/// CACHE-14
#[test]
fn a_get_whose_neighbour_cannot_be_watched_any_more_is_cached_by_itself() {
    let (cache, books) = cache(MERGING);
    cache.get(&key(0, PAGE)).unwrap();
    *books.blind.lock() = Some(key(0, PAGE));
    let lease = cache.get(&key(PAGE, PAGE)).unwrap();
    assert_eq!(lease.key, key(PAGE, PAGE));
    assert!(lease.uncached().is_none(), "{lease:?}");
    let alone = cache.get(&key(0, PAGE)).unwrap();
    assert_eq!(alone.key, key(0, PAGE));
    assert!(matches!(alone.uncached(), Some(Uncached::Unwatched(_))), "{alone:?}");
    let now = cache.statistics();
    assert_eq!((now.lookups, now.registrations, now.uncached), (3, 2, 1));
    drop((lease, alone));
    drop(cache);
    assert_empty(&books);
}

/// CACHE-14
#[test]
fn a_waiter_for_a_merged_registration_that_fails_gets_its_own_range_too() {
    let (cache, books) = cache(MERGING);
    cache.get(&key(0, PAGE)).unwrap();
    *books.bad.lock() = Some(key(0, PAGE));
    books.registering.hold();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| cache.get(&key(PAGE, 2 * PAGE)).map(|lease| lease.key));
        books.registering.until_held(1);
        let second = scope.spawn(|| cache.get(&key(2 * PAGE, PAGE)).map(|lease| lease.key));
        // A waiter has its lease before it waits, so that it is seen here.
        while cache.statistics().leases < 2 {
            std::thread::yield_now();
        }
        books.registering.release();
        let covers = |key: Key, page: u64| key.range().contains_range(range(page * PAGE, PAGE));
        let (first, second) = (first.join().unwrap().unwrap(), second.join().unwrap().unwrap());
        assert!(covers(first, 1) && covers(first, 2) && !covers(first, 0), "{first:?}");
        assert!(covers(second, 2) && !covers(second, 0), "{second:?}");
    });
    assert_eq!(cache.statistics().failures, 0);
    drop(cache);
    assert_empty(&books);
}

#[test]
fn a_key_that_contains_its_neighbours_takes_their_place_at_once() {
    let (cache, books) = cache(Limits { max_count: 2, ..MERGING });
    cache.get(&key(PAGE, PAGE)).unwrap();
    cache.get(&key(3 * PAGE, PAGE)).unwrap();
    let whole = cache.get(&key(0, 5 * PAGE)).unwrap();
    assert!(whole.uncached().is_none(), "{whole:?}");
    // With no flush: the miss itself deregistered what it replaced.
    assert_eq!(books.live(), 1);
    let now = cache.statistics();
    assert_eq!((now.entries, now.bytes, now.dying, now.merged), (1, 5 * PAGE, 0, 2));
}

/// CACHE-05
#[test]
fn without_the_option_nothing_is_joined_and_with_it_no_further_than_allowed() {
    let (plain, books) = cache(Limits { merge: false, ..MERGING });
    plain.get(&key(0, PAGE)).unwrap();
    plain.get(&key(PAGE, PAGE)).unwrap();
    assert_eq!(books.live(), 2);

    let (joining, books) = cache(Limits { max_bytes: 3 * PAGE, ..MERGING });
    joining.get(&key(0, 2 * PAGE)).unwrap();
    assert_eq!(joining.get(&key(2 * PAGE, PAGE)).unwrap().key.range(), range(0, 3 * PAGE));
    assert_eq!(joining.get(&key(3 * PAGE, PAGE)).unwrap().key.range(), range(3 * PAGE, PAGE));
    assert_eq!(books.registrations.load(Ordering::SeqCst), 3);

    // Nor beyond what the source can register as one.
    let (joining, _books) = cache(MERGING);
    let longest = joining.source().longest();
    joining.get(&key(0, longest - PAGE)).unwrap();
    assert_eq!(joining.get(&key(longest - PAGE, PAGE)).unwrap().key.range(), range(0, longest));
    assert_eq!(joining.get(&key(longest, PAGE)).unwrap().key.range(), range(longest, PAGE));
}

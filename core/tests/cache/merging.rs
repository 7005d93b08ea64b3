//! Tests that the cache merges registrations of adjacent memory.

use std::sync::{Arc, atomic::Ordering};

use hmem_core::{
    Access, AllocationId, DeviceId, ErrorKind, IfaceKind,
    cache::{CacheBackend, Key, Limits, UncachedReason},
};

use parking_lot::Mutex;

use crate::support::*;

const MERGING: Limits = Limits { max_count: 100, max_bytes: u64::MAX, merge: true };

/// CACHE-05
#[test]
fn adjacent_and_overlapping_ranges_are_merged_in_cascade() {
    let (cache, records) = cache(MERGING);
    cache.get_or_register(&key(0, PAGE)).unwrap();
    cache.get_or_register(&key(2 * PAGE, PAGE)).unwrap();
    cache.get_or_register(&key(4 * PAGE, 2 * PAGE)).unwrap();
    cache.get_or_register(&key(100 * PAGE, PAGE)).unwrap();
    assert_eq!(records.live(), 4);
    // Touches the first two entries and overlaps the third.
    let joined = cache.get_or_register(&key(PAGE, 4 * PAGE)).unwrap();
    assert_eq!(joined.key.range(), range(0, 6 * PAGE));
    assert_eq!(records.live(), 2);
    for i in 0..6 {
        assert_eq!(cache.get_or_register(&key(i * PAGE, PAGE)).unwrap().id, joined.id);
    }
    assert_eq!(cache.statistics().merged, 3);
    assert_eq!(cache.statistics().entries, 2);
    drop(joined);
    drop(cache);
    assert_empty(&records);
}

/// CACHE-05
#[test]
fn merging_does_not_widen_rights() {
    let (cache, _records) = cache(MERGING);
    let with = |page: u64, access| Key::new(range(page * PAGE, PAGE), access).unwrap();
    cache.get_or_register(&with(0, Access::SEND)).unwrap();
    cache.get_or_register(&with(1, Access::SEND | Access::REMOTE_WRITE)).unwrap();
    let middle = cache.get_or_register(&with(2, Access::REMOTE_WRITE)).unwrap();
    assert_eq!(middle.key, with(2, Access::REMOTE_WRITE));
    assert_eq!(cache.statistics().merged, 0);
}

/// CACHE-05 CACHE-02
#[test]
fn neighbours_of_another_owner_or_allocation_are_not_merged() {
    let on = |page: u64, iface, device, allocation| {
        key(page * PAGE, PAGE).owned_by(iface, Some(DeviceId(device))).in_allocation(allocation)
    };
    let first = on(0, IfaceKind::CUDA, 0, AllocationId(1));
    for second in [
        on(1, IfaceKind::ZE, 0, AllocationId(1)),
        on(1, IfaceKind::CUDA, 1, AllocationId(1)),
        on(1, IfaceKind::CUDA, 0, AllocationId(2)),
    ] {
        let (cache, records) = cache(MERGING);
        let left = cache.get_or_register(&first).unwrap();
        let right = cache.get_or_register(&second).unwrap();
        assert_eq!((left.key, right.key), (first, second));
        assert_eq!(
            (left.is_invalidated(), cache.statistics().merged, records.live()),
            (false, 0, 2)
        );
    }
    let (cache, _records) = cache(MERGING);
    cache.get_or_register(&first).unwrap();
    let joined = cache.get_or_register(&on(1, IfaceKind::CUDA, 0, AllocationId(1))).unwrap();
    assert_eq!(joined.key.range(), range(0, 2 * PAGE));
}

/// CACHE-05
#[test]
fn leased_entry_stays_registered_beside_the_merged_one() {
    let (cache, records) = cache(MERGING);
    let old = cache.get_or_register(&key(0, PAGE)).unwrap();
    let joined = cache.get_or_register(&key(PAGE, PAGE)).unwrap();
    assert_eq!(joined.key.range(), range(0, 2 * PAGE));
    assert!(records.registered.lock().contains_key(&old.id));
    assert_eq!(cache.get_or_register(&key(0, PAGE)).unwrap().id, joined.id);
    drop(old);
    cache.reclaim();
    assert_eq!(records.live(), 1);
}

/// CACHE-05
#[test]
fn failed_merge_leaves_no_registration() {
    let (cache, records) = cache(MERGING);
    cache.get_or_register(&key(0, PAGE)).unwrap();
    cache.get_or_register(&key(2 * PAGE, PAGE)).unwrap();
    // The backend fails to register the merged range, and then the caller's own range.
    records.fail_next(ErrorKind::BadAddress);
    records.fail_next(ErrorKind::BadAddress);
    let error = cache.get_or_register(&key(PAGE, PAGE)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BadAddress);
    cache.reclaim();
    assert_eq!(records.live(), 0);
    let now = cache.statistics();
    assert_eq!((now.entries, now.bytes, now.pending_reclaim), (0, 0, 0));
    assert_eq!((now.lookups, now.registrations, now.failures), (3, 2, 1));
    assert_empty(&records);
}

/// CACHE-14
#[test]
fn merge_with_unregistrable_neighbour_registers_own_range() {
    let (cache, records) = cache(MERGING);
    cache.get_or_register(&key(0, PAGE)).unwrap();
    *records.bad.lock() = Some(key(0, PAGE));
    let lease = cache.get_or_register(&key(PAGE, PAGE)).unwrap();
    assert_eq!((lease.key, lease.is_invalidated()), (key(PAGE, PAGE), false));
    assert!(lease.uncached_reason().is_none(), "{lease:?}");
    assert_eq!(cache.get_or_register(&key(PAGE, PAGE)).unwrap().id, lease.id);
    // The worker may not have freed the entry of the failed merge yet.
    cache.reclaim();
    let now = cache.statistics();
    assert_eq!((now.lookups, now.hits, now.registrations, now.failures), (3, 1, 2, 0));
    assert_eq!((now.entries, now.pending_reclaim, records.live()), (1, 0, 1));
    drop(lease);
    // A lookup of the neighbour itself fails, and affects no other lookup.
    assert_eq!(cache.get_or_register(&key(0, PAGE)).unwrap_err().kind(), ErrorKind::BadAddress);
    assert_eq!(cache.get_or_register(&key(PAGE, PAGE)).unwrap().key, key(PAGE, PAGE));
    drop(cache);
    assert_empty(&records);
}

/// CACHE-14
#[test]
fn merge_with_unwatchable_neighbour_caches_own_range() {
    let (cache, records) = cache(MERGING);
    cache.get_or_register(&key(0, PAGE)).unwrap();
    *records.blind.lock() = Some(key(0, PAGE));
    let lease = cache.get_or_register(&key(PAGE, PAGE)).unwrap();
    assert_eq!(lease.key, key(PAGE, PAGE));
    assert!(lease.uncached_reason().is_none(), "{lease:?}");
    let uncached = cache.get_or_register(&key(0, PAGE)).unwrap();
    assert_eq!(uncached.key, key(0, PAGE));
    assert!(
        matches!(uncached.uncached_reason(), Some(UncachedReason::Unwatched(_))),
        "{uncached:?}"
    );
    let now = cache.statistics();
    assert_eq!((now.lookups, now.registrations, now.uncached), (3, 2, 1));
    drop((lease, uncached));
    drop(cache);
    assert_empty(&records);
}

/// CACHE-14
#[test]
fn waiter_for_a_failed_merge_registers_its_own_range() {
    let (cache, records) = cache(MERGING);
    cache.get_or_register(&key(0, PAGE)).unwrap();
    *records.bad.lock() = Some(key(0, PAGE));
    records.registering.hold();
    std::thread::scope(|scope| {
        let first =
            scope.spawn(|| cache.get_or_register(&key(PAGE, 2 * PAGE)).map(|lease| lease.key));
        records.registering.until_held(1);
        let second =
            scope.spawn(|| cache.get_or_register(&key(2 * PAGE, PAGE)).map(|lease| lease.key));
        // A waiter publishes its lease before it waits, so that the statistics show it.
        while cache.statistics().leases < 2 {
            std::thread::yield_now();
        }
        records.registering.release();
        let covers = |key: Key, page: u64| key.range().contains_range(range(page * PAGE, PAGE));
        let (first, second) = (first.join().unwrap().unwrap(), second.join().unwrap().unwrap());
        assert!(covers(first, 1) && covers(first, 2) && !covers(first, 0), "{first:?}");
        assert!(covers(second, 2) && !covers(second, 0), "{second:?}");
    });
    assert_eq!(cache.statistics().failures, 0);
    drop(cache);
    assert_empty(&records);
}

#[test]
fn key_that_contains_its_neighbours_replaces_them_at_once() {
    let (cache, records) = cache(Limits { max_count: 2, ..MERGING });
    cache.get_or_register(&key(PAGE, PAGE)).unwrap();
    cache.get_or_register(&key(3 * PAGE, PAGE)).unwrap();
    let whole = cache.get_or_register(&key(0, 5 * PAGE)).unwrap();
    assert!(whole.uncached_reason().is_none(), "{whole:?}");
    // The miss itself deregistered the entries that it replaced, without a call of `reclaim`.
    assert_eq!(records.live(), 1);
    let now = cache.statistics();
    assert_eq!((now.entries, now.bytes, now.pending_reclaim, now.merged), (1, 5 * PAGE, 0, 2));
}

/// CACHE-05
#[test]
fn merging_is_off_by_default_and_respects_the_limits() {
    let (plain, records) = cache(Limits { merge: false, ..MERGING });
    plain.get_or_register(&key(0, PAGE)).unwrap();
    plain.get_or_register(&key(PAGE, PAGE)).unwrap();
    assert_eq!(records.live(), 2);

    let (joining, records) = cache(Limits { max_bytes: 3 * PAGE, ..MERGING });
    joining.get_or_register(&key(0, 2 * PAGE)).unwrap();
    assert_eq!(
        joining.get_or_register(&key(2 * PAGE, PAGE)).unwrap().key.range(),
        range(0, 3 * PAGE)
    );
    assert_eq!(
        joining.get_or_register(&key(3 * PAGE, PAGE)).unwrap().key.range(),
        range(3 * PAGE, PAGE)
    );
    assert_eq!(records.registrations.load(Ordering::SeqCst), 3);

    // Merging does not exceed the backend's largest registration either.
    let (joining, _records) = cache(MERGING);
    let longest = joining.backend().max_len();
    joining.get_or_register(&key(0, longest - PAGE)).unwrap();
    assert_eq!(
        joining.get_or_register(&key(longest - PAGE, PAGE)).unwrap().key.range(),
        range(0, longest)
    );
    assert_eq!(
        joining.get_or_register(&key(longest, PAGE)).unwrap().key.range(),
        range(longest, PAGE)
    );
}

/// CACHE-14
///
/// The callback runs on the thread of the miss, between the failed merged registration and the
/// registration of the caller's own range.
#[test]
fn lookup_in_a_callback_of_a_failed_merge_keeps_its_lease() {
    for unwatchable in [false, true] {
        let (cache, records) = cache(MERGING);
        let cache = Arc::new(cache);
        let other = key(100 * PAGE, PAGE);
        cache.get_or_register(&other).unwrap();
        cache.get_or_register(&key(0, PAGE)).unwrap();
        *if unwatchable { &records.blind } else { &records.bad }.lock() = Some(key(0, PAGE));
        let taken = Arc::new(Mutex::new(None));
        let callback = {
            let (cache, taken) = (Arc::downgrade(&cache), Arc::clone(&taken));
            move || {
                let found = cache.upgrade().unwrap().find_owned(&other);
                *taken.lock() = found;
            }
        };
        // The callback waits for the failed entry, or for the deregistration of a merged one.
        let (gate, waits_for) = match unwatchable {
            false => (&records.registering, range(0, 4 * PAGE)),
            true => (&records.deregistering, range(200 * PAGE, PAGE)),
        };
        let weak = Arc::downgrade(&cache);
        *gate.meanwhile.lock() = Some(Box::new(move || {
            weak.upgrade().unwrap().invalidate_with_callback(waits_for, callback);
        }));
        let own = cache.get_or_register(&key(PAGE, PAGE)).unwrap();
        assert_eq!(own.key, key(PAGE, PAGE));
        until(|| taken.lock().is_some());
        cache.evict_idle();
        let taken = taken.lock().take().unwrap();
        assert!(records.registered.lock().contains_key(&taken.id), "evicted during a lease");
        assert_eq!(cache.statistics().leases, 2);
        drop((own, taken));
        cache.try_clear().unwrap();
        assert_empty(&records);
    }
}

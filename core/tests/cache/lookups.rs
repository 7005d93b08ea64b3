//! Tests of cache hits and misses.

use std::sync::{Arc, atomic::Ordering};

use hmem_core::{
    Access, Address, AddressRange, AllocationId, DeviceId, ErrorKind, IfaceKind,
    cache::{Key, Limits, UncachedReason},
};

use crate::support::*;

/// CACHE-01
#[test]
fn covered_lookup_is_a_hit_and_returns_the_same_region() {
    let (cache, records) = cache(Limits::default());
    let whole = cache.get_or_register(&key(0x10_0000, 4 * PAGE)).unwrap();
    for (start, len) in [(0x10_0000, 1), (0x10_0000 + 3 * PAGE, PAGE), (0x10_0001, 4 * PAGE - 1)] {
        assert_eq!(cache.get_or_register(&key(start, len)).unwrap().id, whole.id);
    }
    for (start, len) in [(0x10_0000 - 1, 1), (0x10_0000, 4 * PAGE + 1), (0x10_0000 + 4 * PAGE, 1)] {
        assert_ne!(cache.get_or_register(&key(start, len)).unwrap().id, whole.id);
    }
    // The last lookup is a hit, because the second key covers it.
    assert_eq!(records.registrations.load(Ordering::SeqCst), 3);
    drop(whole);
    drop(cache);
    assert_empty(&records);
}

/// CACHE-01
#[test]
fn lookup_with_more_rights_is_a_miss_and_with_fewer_a_hit() {
    let (cache, records) = cache(Limits::default());
    let at = range(0x20_0000, PAGE);
    let send = Key::new(at, Access::SEND).unwrap();
    let both = Key::new(at, Access::SEND | Access::REMOTE_WRITE).unwrap();
    let first = cache.get_or_register(&send).unwrap();
    let second = cache.get_or_register(&both).unwrap();
    assert_ne!(first.id, second.id);
    // Each region was registered with the rights of its own key and no more.
    assert_eq!((first.key.access(), second.key.access()), (send.access(), both.access()));
    let remote = Key::new(at, Access::REMOTE_WRITE).unwrap();
    assert_eq!(cache.get_or_register(&remote).unwrap().id, second.id);
    let receive = Key::new(at, Access::RECV).unwrap();
    assert_eq!(cache.get_or_register(&receive).unwrap().key.access(), Access::RECV);
    assert_eq!(records.registrations.load(Ordering::SeqCst), 3);
}

/// CACHE-01
#[test]
fn overlapping_ranges_in_one_page_are_distinguished() {
    let (cache, records) = cache(Limits::default());
    let base = 1 << 40;
    let keys: Vec<_> = (0..40)
        .map(|i| key(base + 64 * i, 64))
        .chain([key(base, 1 << 24), key(base - PAGE, 3 * PAGE), key(base, 1 << 37)])
        .collect();
    // Larger ranges come last, so that each is registered.
    let ids: Vec<_> = keys.iter().map(|key| cache.get_or_register(key).unwrap().id).collect();
    assert_eq!(records.registrations.load(Ordering::SeqCst), keys.len());
    for (key, id) in keys.iter().zip(&ids) {
        let lease = cache.get_or_register(key).unwrap();
        assert!(lease.id == *id || lease.key.range().contains_range(key.range()));
    }
    assert_eq!(records.registrations.load(Ordering::SeqCst), keys.len());
    cache.evict_idle();
    assert_empty(&records);
}

/// CACHE-02
#[test]
fn identity_includes_owner_and_allocation() {
    let (cache, records) = cache(Limits::default());
    let host = key(0x30_0000, PAGE);
    let on = |device| host.owned_by(IfaceKind::CUDA, Some(DeviceId(device)));
    let keys = [
        host,
        host.owned_by(IfaceKind::CUDA, None),
        on(0),
        on(1),
        on(1).in_allocation(AllocationId(1)),
        on(1).in_allocation(AllocationId(2)),
        host.owned_by(IfaceKind::ZE, Some(DeviceId(1))),
    ];
    let ids: Vec<_> = keys.iter().map(|key| cache.get_or_register(key).unwrap().id).collect();
    assert_eq!(records.registrations.load(Ordering::SeqCst), keys.len());
    for (key, id) in keys.iter().zip(ids) {
        let lease = cache.get_or_register(key).unwrap();
        assert_eq!((lease.id, lease.key), (id, *key));
    }
    assert_eq!(on(1).device(), Some(DeviceId(1)));
    assert!(cache.find(&key(0x30_0000, PAGE).of_any_owner()).is_some());
    assert!(cache.find(&key(0x40_0000, PAGE).of_any_owner()).is_none());
}

#[test]
fn key_of_any_owner_registers_nothing() {
    let (cache, records) = cache(Limits::default());
    let any = key(0x30_0000, PAGE).of_any_owner();
    let handle = cache.lookup_handle();
    let results = [
        cache.get_or_register(&any),
        cache.register(&any, &()),
        handle.get_or_register(&any),
        handle.register(&any, &()),
    ];
    for result in results {
        assert_eq!(result.expect_err("no owner").kind(), ErrorKind::InvalidArgument);
    }
    assert_eq!(records.registrations.load(Ordering::SeqCst), 0);
    let lease = cache.get_or_register(&key(0x30_0000, PAGE)).unwrap();
    assert_eq!(cache.get_or_register(&any).expect("a hit needs no owner").id, lease.id);
}

#[test]
fn key_with_no_bytes_or_an_undefined_right_is_refused() {
    let empty = Key::new(range(0x1000, 0), Access::SEND).unwrap_err();
    assert_eq!(empty.kind(), ErrorKind::ZeroLength);
    let unknown = Key::new(range(0x1000, 1), Access::from_bits_retain(1 << 40)).unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::BadAccess);
}

/// CACHE-03
#[test]
fn range_across_the_end_of_the_index_is_uncached_with_the_reason() {
    let (cache, records) = cache(Limits::default());
    for start in [(1 << 48) - 1, (0xffff << 48) - PAGE / 2] {
        let at = AddressRange::new(Address(start), PAGE).unwrap();
        let lease = cache.get_or_register(&Key::new(at, Access::SEND).unwrap()).unwrap();
        assert!(matches!(lease.uncached_reason(), Some(UncachedReason::CrossesIndexEnd)));
    }
    assert_eq!(records.live(), 0);
    assert_eq!(cache.statistics().uncached, 2);
}

/// CACHE-01 CACHE-02
///
/// Intel's device memory lies in the upper half of the address space. The cache distinguishes
/// addresses that differ only in the upper bits, also when it invalidates one of them.
#[test]
fn ranges_in_the_upper_half_are_cached_and_distinguished() {
    let (cache, records) = cache(Limits::default());
    let halves = [0, 1 << 48, 0xff00 << 48, 0xffff << 48];
    let starts = halves.map(|half: u64| half | 0xc001_ffc3_0000);
    let keys = starts.map(|start| {
        Key::new(AddressRange::new(Address(start), 3 * PAGE).unwrap(), Access::SEND).unwrap()
    });
    for round in 1..=2 {
        for key in &keys {
            let lease = cache.get_or_register(key).unwrap();
            assert!(lease.uncached_reason().is_none());
        }
        assert_eq!((records.live(), cache.statistics().hits), (4, 4 * (round - 1)));
    }
    cache.invalidate(AddressRange::new(Address(starts[2] + PAGE), 1).unwrap());
    cache.reclaim();
    assert_eq!(records.live(), 3, "the others stay");
    let hits = cache.statistics().hits;
    for (at, key) in keys.iter().enumerate() {
        drop(cache.get_or_register(key).unwrap());
        let expected = hits + if at < 2 { at as u64 + 1 } else { at as u64 };
        assert_eq!(cache.statistics().hits, expected, "range {at}");
    }
    cache.invalidate(AddressRange::new(Address(0), u64::MAX).unwrap());
    cache.reclaim();
    assert_eq!(records.live(), 0, "an invalidation of all addresses");
}

#[test]
fn hundreds_of_leases_move_between_threads() {
    let (cache, records) = cache(Limits::default());
    let leases: Vec<_> =
        (0..300).map(|i| cache.get_or_register(&key(i * PAGE, PAGE)).unwrap()).collect();
    let again: Vec<_> =
        (0..300).map(|i| cache.get_or_register(&key(i * PAGE, PAGE)).unwrap()).collect();
    assert_eq!(cache.statistics().leases, 600);
    assert_eq!(cache.statistics().in_use, 300);
    std::thread::scope(|scope| {
        scope.spawn(move || drop(leases));
        scope.spawn(move || drop(again));
    });
    assert_eq!(cache.statistics().leases, 0);
    assert_eq!(records.registrations.load(Ordering::SeqCst), 300);
    // Other threads reuse the lease blocks of threads that ended. Leases in these blocks stay
    // valid.
    std::thread::scope(|scope| {
        let lease = scope.spawn(|| cache.get_or_register(&key(0, 1)).unwrap()).join().unwrap();
        let id = lease.id;
        let cache = &cache;
        scope
            .spawn(move || assert_eq!(cache.get_or_register(&key(0, 1)).unwrap().id, id))
            .join()
            .unwrap();
        assert_eq!(cache.statistics().leases, 1);
    });
}

#[test]
fn lookup_handles_and_owned_leases_work_like_the_cache() {
    let (cache, records) = cache(Limits::default());
    let cache = Arc::new(cache);
    let handle = cache.lookup_handle();
    let first = handle.get_or_register(&key(0, PAGE)).unwrap();
    let second = handle.get_or_register(&key(0, PAGE)).unwrap();
    drop(handle);
    assert_eq!(first.id, second.id);
    drop((first, second));
    let owned = cache.get_or_register_owned(&key(0, PAGE)).unwrap();
    assert!(owned.lease().uncached_reason().is_none());
    drop(cache);
    assert_eq!(records.live(), 1);
    assert_eq!(owned.id, 0);
    drop(owned);
    assert_empty(&records);
}

#[test]
fn entry_that_needs_validation_is_validated_once_per_hit() {
    let (cache, records) = cache(Limits::default());
    records.checked.store(true, Ordering::SeqCst);
    let first = cache.get_or_register(&key(0, PAGE)).unwrap().id;
    assert_eq!(records.asked.load(Ordering::SeqCst), 0);
    for asked in 1..=3 {
        assert_eq!(cache.get_or_register(&key(0, PAGE)).unwrap().id, first);
        assert_eq!(records.asked.load(Ordering::SeqCst), asked);
    }
    records.invalid.store(true, Ordering::SeqCst);
    let second = cache.get_or_register(&key(0, PAGE)).unwrap().id;
    assert_ne!(second, first);
    cache.reclaim();
    assert_eq!(records.live(), 1);
    // A failed validation invalidates the entry.
    records.unsure.store(true, Ordering::SeqCst);
    assert_ne!(cache.get_or_register(&key(0, PAGE)).unwrap().id, second);
    cache.reclaim();
    assert_eq!(records.live(), 1);
}

//! Models of registrations, invalidations and deregistrations.

use std::sync::Arc;

use loom::sync::atomic::Ordering;

use super::{
    super::{Lease, sync::modelled::ANNOUNCE},
    alive, block, cache, cache_refused, fails_without, get, holds, in_thread, key, model, range,
    reach, used_twice, work,
};
use crate::{
    Address, AddressRange,
    monitor::{InvalidationCause, Invalidator},
};

const REPLACED: &str = "a hit on memory that was replaced";

fn registration_against_an_invalidation() {
    model(|| {
        let cache = cache(1);
        let invalidator = in_thread(&cache, |cache| {
            let change = cache.core.invalidate_start(range(0), InvalidationCause::Replace);
            cache.backend().version.fetch_add(1, Ordering::Relaxed);
            cache.core.invalidate_end(change);
        });
        let mine = block(&cache);
        drop(get(&cache, mine, 0));
        invalidator.join().unwrap();
        let leased = cache.core.lookup_slow(mine, &key(0), None);
        reach(leased.is_some());
        if let Some(leased) = leased {
            let lease = Lease::cached(&cache.core, leased);
            assert_eq!(lease.version, 1, "{REPLACED}");
        }
    });
}

#[test]
fn live_entry_has_the_memory_after_an_invalidation() {
    holds(registration_against_an_invalidation);
}

#[test]
fn waiter_gets_no_region_of_replaced_memory() {
    holds(|| {
        model(|| {
            let cache = cache(1);
            let other = in_thread(&cache, |cache| {
                let lease = get(cache, block(cache), 0);
                reach(lease.is_invalidated());
                lease.used.with(|_| ());
            });
            let invalidator = in_thread(&cache, |cache| {
                let change = cache.core.invalidate_start(range(0), InvalidationCause::Replace);
                cache.backend().version.fetch_add(1, Ordering::Relaxed);
                cache.core.invalidate_end(change);
                // A lookup after the invalidation gets the memory that is there now.
                assert_eq!(get(cache, block(cache), 0).version, 1, "{REPLACED}");
            });
            other.join().unwrap();
            invalidator.join().unwrap();
        });
    });
}

/// ARM-04: the model fails without the fence that follows the exchange of an invalidation. A test
/// on x86-64 would not show that the fence is missing, because the exchange itself is a full fence
/// there.
#[test]
fn invalidation_fails_without_the_fence_after_its_exchange() {
    fails_without(ANNOUNCE, registration_against_an_invalidation, &[REPLACED]);
}

#[test]
fn entry_invalidated_twice_is_reclaimed_once() {
    holds(|| {
        model(|| {
            let cache = cache(2);
            let mine = block(&cache);
            drop(get(&cache, mine, 0));
            drop(get(&cache, mine, 1));
            let other = in_thread(&cache, |cache| {
                cache.invalidate(range(0));
                work(cache);
            });
            cache.invalidate(AddressRange::new(Address(0), 2 << 12).expect("no wrap"));
            work(&cache);
            reach(alive(&cache) == 0);
            other.join().unwrap();
            work(&cache);
            assert_eq!(alive(&cache), 0, "an invalidated entry was not reclaimed");
            let left = cache.statistics();
            assert_eq!((left.entries, left.pending_reclaim, left.all_invalidations()), (0, 0, 2));
        });
    });
}

#[test]
fn concurrent_lookups_of_the_same_range_register_once() {
    holds(|| {
        model(|| {
            let cache = cache(1);
            let other = in_thread(&cache, |cache| {
                let lease = get(cache, block(cache), 0);
                lease.used.with(|_| ());
                assert_eq!(lease.number, 0);
            });
            assert_eq!(get(&cache, block(&cache), 0).number, 0);
            other.join().unwrap();
            assert_eq!(cache.backend().created.load(Ordering::SeqCst), 1);
            reach(cache.core.counters.late_hits.load(Ordering::Relaxed) != 0);
        });
    });
}

#[test]
fn failed_registration_wakes_its_waiters() {
    holds(|| {
        model(|| {
            let cache = cache_refused(1, 2);
            // The first miss registers twice, because its first registration fails with
            // `OutOfResources`.
            let other = in_thread(&cache, |cache| {
                reach(cache.lookup_in_block(block(cache), (&key(0), &()), None).is_err());
            });
            drop(cache.lookup_in_block(block(&cache), (&key(0), &()), None));
            other.join().unwrap();
            cache.evict_idle();
            let left = cache.statistics();
            assert_eq!(
                (left.entries, left.pending_reclaim, left.leases, alive(&cache)),
                (0, 0, 0, 0)
            );
        });
    });
}

const UNCALLED: &str = "the callback did not run";

/// Runs a model: one thread evicts a region, or leaves the region to the worker if `invalidated` is
/// true. Meanwhile another thread invalidates the region with a callback.
fn callback_against_a_miss(invalidated: bool) {
    model(move || {
        let cache = cache(1);
        used_twice(&cache, 0);
        if invalidated {
            cache.invalidate(range(0));
        }
        let other = in_thread(&cache, |cache| drop(get(cache, block(cache), 1)));
        let called = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let (calls, of) = (Arc::clone(&called), Arc::clone(&cache));
        let left = invalidated && !cache.core.state.lock().reclaim.left_to_worker.is_empty();
        cache.invalidate_with_callback(range(0), move || {
            assert_eq!(alive(&of) & 1, 0, "called before the deregistration");
            calls.store(true, std::sync::atomic::Ordering::SeqCst);
        });
        work(&cache);
        reach(if invalidated { left } else { called.load(std::sync::atomic::Ordering::SeqCst) });
        other.join().unwrap();
        work(&cache);
        assert!(called.load(std::sync::atomic::Ordering::SeqCst), "{UNCALLED}");
    });
}

fn callback_against_a_deregistration() {
    callback_against_a_miss(false);
}

#[test]
fn callback_waits_for_a_deregistration_in_flight() {
    holds(callback_against_a_deregistration);
}

#[test]
fn callback_waits_for_a_region_left_to_the_worker() {
    holds(|| callback_against_a_miss(true));
}

#[test]
fn callback_fails_without_the_fence_of_the_counter() {
    fails_without(ANNOUNCE, callback_against_a_deregistration, &[UNCALLED]);
}

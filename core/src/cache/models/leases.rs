//! Models of leases: lookups and releases while other threads evict or invalidate entries.

use loom::thread;

use super::{
    super::{
        Lease, OwnedLease,
        lease::blocks::LeaseBlock,
        sync::modelled::{HEAVY, LIGHT},
    },
    Modelled, OTHERS, OUTLIVED, alive, block, cache, fails_without, get, holds, in_thread, look_up,
    lookup_fast, model, range, reach, used_twice, work,
};

fn lookup_against_invalidation() {
    model(|| {
        let cache = cache(1);
        used_twice(&cache, 0);
        let reader = in_thread(&cache, |cache| look_up(cache, block(cache), 0));
        cache.invalidate(range(0));
        cache.core.reclaim_once();
        reader.join().unwrap();
        cache.core.reclaim_once();
        assert_eq!(alive(&cache), 0, "{LOST}");
    });
}

/// The message with which loom reports accesses that are not ordered.
const UNORDERED: &str = "Causality violation";

#[test]
fn lease_does_not_outlive_its_region_during_an_invalidation() {
    holds(lookup_against_invalidation);
}

#[test]
fn invalidation_fails_without_either_half_of_the_barrier() {
    fails_without(LIGHT, lookup_against_invalidation, &[OUTLIVED, UNORDERED]);
    fails_without(HEAVY, lookup_against_invalidation, &[OUTLIVED, UNORDERED]);
}

fn lookup_against_eviction() {
    model(|| {
        let cache = cache(1);
        let mine = used_twice(&cache, 0);
        let reader = in_thread(&cache, |cache| look_up(cache, block(cache), 0));
        drop(get(&cache, mine, 1));
        reader.join().unwrap();
    });
}

#[test]
fn lease_does_not_outlive_its_region_during_an_eviction() {
    holds(lookup_against_eviction);
}

#[test]
fn eviction_fails_without_either_half_of_the_barrier() {
    fails_without(LIGHT, lookup_against_eviction, &[OUTLIVED, OTHERS, UNORDERED]);
    fails_without(HEAVY, lookup_against_eviction, &[OUTLIVED, OTHERS, UNORDERED]);
}

/// Runs a model: one thread leases an entry and then releases its own lease block, while another
/// thread runs `ends`, which evicts or invalidates the entry.
fn leaving_against(ends: fn(&Modelled, &LeaseBlock)) {
    model(move || {
        let cache = cache(1);
        let mine = used_twice(&cache, 0);
        let reader = in_thread(&cache, |cache| {
            let block = block(cache);
            let leased = lookup_fast(cache, block, 0);
            reach(leased.is_some());
            cache.core.leases.blocks.release(block);
            if let Some(leased) = leased {
                let lease = Lease::cached(&cache.core, leased);
                thread::yield_now();
                lease.used.with(|_| ());
                assert!(alive(cache) & 1 << lease.number != 0, "{OUTLIVED}");
            }
        });
        ends(&cache, mine);
        reader.join().unwrap();
    });
}

#[test]
fn lease_of_a_former_owner_survives_an_eviction() {
    holds(|| leaving_against(|cache, mine| drop(get(cache, mine, 1))));
}

#[test]
fn lease_of_a_former_owner_survives_an_eviction_of_all_idle() {
    holds(|| {
        leaving_against(|cache, mine| {
            cache.core.leases.blocks.release(mine);
            cache.evict_idle();
        });
    });
}

#[test]
fn lease_of_a_former_owner_survives_detaching_by_a_miss() {
    holds(|| {
        leaving_against(|cache, mine| {
            cache.invalidate(range(0));
            drop(get(cache, mine, 1));
            work(cache);
        });
    });
}

fn lookup_against_detaching_by_a_miss() {
    model(|| {
        let cache = cache(2);
        let mine = used_twice(&cache, 0);
        let reader = in_thread(&cache, |cache| look_up(cache, block(cache), 0));
        cache.invalidate(range(0));
        drop(get(&cache, mine, 1));
        work(&cache);
        reader.join().unwrap();
        work(&cache);
        assert_eq!(alive(&cache), 1 << 1, "{LOST}");
    });
}

#[test]
fn lease_does_not_outlive_its_region_while_a_miss_detaches_it() {
    holds(lookup_against_detaching_by_a_miss);
}

#[test]
fn detaching_by_a_miss_fails_without_either_half_of_the_barrier() {
    fails_without(LIGHT, lookup_against_detaching_by_a_miss, &[OUTLIVED, LOST, UNORDERED]);
    fails_without(HEAVY, lookup_against_detaching_by_a_miss, &[OUTLIVED, LOST, UNORDERED]);
}

/// A region is deregistered once if the worker reclaims its invalidated entry while a miss finds
/// the same entry.
#[test]
fn region_left_to_the_worker_is_deregistered_once() {
    holds(|| {
        model(|| {
            let cache = cache(2);
            let mine = used_twice(&cache, 0);
            cache.invalidate(range(0));
            let worker = in_thread(&cache, |cache| work(cache));
            drop(get(&cache, mine, 1));
            reach(alive(&cache) & 1 == 0);
            worker.join().unwrap();
            work(&cache);
            assert_eq!(alive(&cache), 1 << 1, "{LOST}");
            assert_eq!(cache.statistics().pending_reclaim, 0);
        });
    });
}

/// An entry that becomes pending while the worker issues a heavy barrier is not freed after that
/// barrier. The entry waits for the next barrier.
#[test]
fn entry_drained_after_the_barrier_waits_for_the_next_one() {
    holds(|| {
        model(|| {
            let cache = cache(2);
            used_twice(&cache, 0);
            let mine = used_twice(&cache, 1);
            cache.core.leases.blocks.release(mine);
            cache.invalidate(range(0));
            let reader = in_thread(&cache, |cache| look_up(cache, block(cache), 1));
            let worker = in_thread(&cache, work);
            cache.invalidate(range(1));
            let _drains_the_stack = cache.statistics();
            reader.join().unwrap();
            worker.join().unwrap();
            work(&cache);
            assert_eq!(alive(&cache), 0, "{LOST}");
        });
    });
}

#[test]
fn stale_index_leads_to_no_other_region() {
    holds(|| {
        model(|| {
            let cache = cache(2);
            let mine = used_twice(&cache, 0);
            let reader = in_thread(&cache, |cache| look_up(cache, block(cache), 0));
            cache.invalidate(range(0));
            cache.core.reclaim_once();
            // These lookups reuse the entry unless the reader has a lease of it.
            drop(get(&cache, mine, 1));
            drop(get(&cache, mine, 1));
            reader.join().unwrap();
        });
    });
}

const LOST: &str = "an invalidated region was not deregistered";

fn last_release_against_reclaim() {
    model(|| {
        let cache = cache(1);
        // The region is leased on this thread and released on the other.
        let lease = OwnedLease::new(&cache, get(&cache, block(&cache), 0));
        let releaser = thread::spawn(move || {
            lease.used.with(|_| ());
            drop(lease);
        });
        cache.invalidate(range(0));
        work(&cache);
        reach(alive(&cache) == 0);
        releaser.join().unwrap();
        work(&cache);
        assert_eq!(alive(&cache), 0, "{LOST}");
    });
}

#[test]
fn last_release_leads_to_deregistration() {
    holds(last_release_against_reclaim);
}

#[test]
fn last_release_fails_without_either_half_of_the_barrier() {
    fails_without(LIGHT, last_release_against_reclaim, &[LOST]);
    fails_without(HEAVY, last_release_against_reclaim, &[LOST]);
}

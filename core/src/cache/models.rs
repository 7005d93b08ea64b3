//! Models of the cache's races, on a table of four pages.
//!
//! The guide has the command and lists the races. Loom has no `membarrier`: both halves of the
//! barrier are SeqCst fences here. Models that fail without a kind of fence show that it is needed.
//!
//! Each model must meet both outcomes of its race. A model that never races fails.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::Arc,
};

use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicU32, Ordering},
    thread,
};

use super::{
    Cache, CacheBackend, Key, Lease, Limits, OwnedLease,
    index::radix::{Radix, Shape},
    lease::blocks::LeaseBlock,
    lookup::{FastLookup, LeasedEntry},
    sync::{
        Barrier,
        modelled::{ANNOUNCE, GENERATION, HEAVY, LEFT_OUT, LIGHT},
    },
};
use crate::{
    Access, Address, AddressRange, Error, ErrorKind, Rejected, Result,
    monitor::{Cause, Invalidator},
};

/// The modelled memory and its registrations.
///
/// Each access is one read-modify-write, which sees the newest value. It is Relaxed, so that it
/// orders nothing else.
struct Memory {
    /// The version of the memory, incremented when the memory is replaced.
    version: AtomicU32,
    /// One bit for each live registration.
    alive: AtomicU32,
    made: AtomicU32,
    /// Number of registrations that the provider refuses, from the first on.
    refused: u32,
}

struct Registration {
    number: u32,
    version: u32,
    start: u64,
    /// Read by uses of the region and written by its end. Loom checks that the two are ordered.
    used: UnsafeCell<()>,
}

// SAFETY: loom panics if two accesses to the cell are not ordered and one of them is a write.
unsafe impl Sync for Registration {}

impl CacheBackend for Memory {
    type Region = Registration;
    type Watch = ();

    fn watch(&self, _: &Key, _: &Arc<dyn Invalidator>) -> Result<()> {
        Ok(())
    }

    fn unwatch(&self, (): ()) {}

    fn needs_validation(&self, (): &()) -> bool {
        false
    }

    fn is_current(&self, (): &()) -> Result<bool> {
        Ok(true)
    }

    fn max_len(&self) -> u64 {
        u64::MAX
    }

    fn register(&self, key: &Key) -> Result<Registration> {
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        if number < self.refused {
            return Err(Error::new(ErrorKind::OutOfResources, "modelled registration"));
        }
        self.alive.fetch_or(1 << number, Ordering::Relaxed);
        // The kernel registers the memory that is mapped now, never an older one.
        let version = self.version.fetch_add(0, Ordering::Relaxed);
        Ok(Registration { number, version, start: key.start, used: UnsafeCell::new(()) })
    }

    fn deregister(&self, region: Registration) -> Result<(), Rejected<Registration>> {
        let before = self.alive.fetch_and(!(1 << region.number), Ordering::Relaxed);
        assert!(before & 1 << region.number != 0, "deregistered twice");
        region.used.with_mut(|_| ());
        Ok(())
    }
}

type Modelled = Arc<Cache<Memory>>;

fn cache(max_count: usize) -> Modelled {
    cache_refused(max_count, 0)
}

fn cache_refused(max_count: usize, refused: u32) -> Modelled {
    let memory = Memory {
        version: AtomicU32::new(0),
        alive: AtomicU32::new(0),
        made: AtomicU32::new(0),
        refused,
    };
    let limits = Limits { max_count, ..Limits::default() };
    Arc::new(Cache::with_barrier(memory, limits, Barrier::choose()).expect("a cache"))
}

fn range(page: u64) -> AddressRange {
    AddressRange::new(Address(page << 12), 4096).expect("no wrap")
}

fn key(page: u64) -> Key {
    Key::new(range(page), Access::SEND).expect("a key")
}

fn block(cache: &Modelled) -> &LeaseBlock {
    cache.core.take_block().expect("blocks enough")
}

fn get<'c>(cache: &'c Modelled, block: &'c LeaseBlock, page: u64) -> Lease<'c, Memory> {
    cache.lookup_in_block(block, &key(page), None).expect("registered")
}

fn alive(cache: &Modelled) -> u32 {
    cache.backend().alive.fetch_or(0, Ordering::Relaxed)
}

/// The outcomes of a race that were met. Not part of the model.
static MET: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);

fn meet(outcome: bool) {
    MET.fetch_or(1 << u32::from(outcome), std::sync::atomic::Ordering::SeqCst);
}

const OUTLIVED: &str = "a lease of a region that was deregistered";
const OTHERS: &str = "a region of other memory";

fn lookup_fast<'c>(
    cache: &'c Modelled,
    block: &'c LeaseBlock,
    page: u64,
) -> Option<LeasedEntry<'c, Memory>> {
    match cache.core.lookup_fast(block.hinted_slot(), &key(page)) {
        FastLookup::Hit(leased) => Some(leased),
        FastLookup::Miss | FastLookup::SlowPath { .. } => None,
    }
}

/// Looks up on the fast path, and uses the region of a hit.
fn look_up(cache: &Modelled, block: &LeaseBlock, page: u64) {
    let leased = lookup_fast(cache, block, page);
    meet(leased.is_some());
    if let Some(leased) = leased {
        let lease = Lease::cached(&cache.core, leased);
        assert_eq!(lease.start, page << 12, "{OTHERS}");
        let bit = 1 << lease.number;
        assert!(alive(cache) & bit != 0, "{OUTLIVED}");
        lease.used.with(|_| ());
        thread::yield_now();
        assert!(alive(cache) & bit != 0, "{OUTLIVED}");
    }
}

/// Collects like the worker, as long as it is called.
fn work(cache: &Modelled) {
    while cache.core.waker.called.swap(false, Ordering::SeqCst) {
        cache.core.collect_once();
    }
}

fn model(body: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.max_branches = 50_000;
    model.check(body);
}

/// Runs models one at a time without a kind of fence, which is left out for all threads.
fn without(what: u32, models: impl FnOnce()) {
    static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    LEFT_OUT.store(what, std::sync::atomic::Ordering::SeqCst);
    MET.store(0, std::sync::atomic::Ordering::SeqCst);
    let result = catch_unwind(AssertUnwindSafe(models));
    LEFT_OUT.store(0, std::sync::atomic::Ordering::SeqCst);
    if let Err(panic) = result {
        resume_unwind(panic);
    }
    assert_eq!(MET.load(std::sync::atomic::Ordering::SeqCst), 3, "one outcome was never met");
}

fn holds(models: fn()) {
    without(0, models);
}

/// Asserts that the models fail, with one of these messages.
fn fails_without(what: u32, models: fn(), messages: &[&str]) {
    let panic = catch_unwind(|| without(what, models))
        .expect_err("the model does not notice what is missing");
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or_default();
    assert!(messages.iter().any(|message| text.contains(message)), "another failure: {text}");
}

fn used_twice(cache: &Modelled, page: u64) -> &LeaseBlock {
    let block = block(cache);
    drop(get(cache, block, page));
    // The second is a hit, which clears UNREFERENCED.
    drop(get(cache, block, page));
    block
}

fn in_thread(cache: &Modelled, body: impl FnOnce(&Modelled) + 'static) -> thread::JoinHandle<()> {
    let cache = Arc::clone(cache);
    thread::spawn(move || body(&cache))
}

fn lookup_against_invalidation() {
    model(|| {
        let cache = cache(1);
        used_twice(&cache, 0);
        let reader = in_thread(&cache, |cache| look_up(cache, block(cache), 0));
        cache.invalidate(range(0));
        cache.core.collect_once();
        reader.join().unwrap();
        cache.core.collect_once();
        assert_eq!(alive(&cache), 0, "{LOST}");
    });
}

/// Loom's message for accesses that are not ordered.
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

/// One thread takes a lease and releases its block, while another ends idle entries.
fn leaving_against(ends: fn(&Modelled, &LeaseBlock)) {
    model(move || {
        let cache = cache(1);
        let mine = used_twice(&cache, 0);
        let reader = in_thread(&cache, |cache| {
            let block = block(cache);
            let leased = lookup_fast(cache, block, 0);
            meet(leased.is_some());
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
fn lease_of_a_former_owner_survives_a_collection_by_a_miss() {
    holds(|| {
        leaving_against(|cache, mine| {
            cache.invalidate(range(0));
            drop(get(cache, mine, 1));
            work(cache);
        });
    });
}

fn lookup_against_a_collection_by_a_miss() {
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
fn lease_does_not_outlive_its_region_during_a_collection_by_a_miss() {
    holds(lookup_against_a_collection_by_a_miss);
}

#[test]
fn collection_by_a_miss_fails_without_either_half_of_the_barrier() {
    fails_without(LIGHT, lookup_against_a_collection_by_a_miss, &[OUTLIVED, LOST, UNORDERED]);
    fails_without(HEAVY, lookup_against_a_collection_by_a_miss, &[OUTLIVED, LOST, UNORDERED]);
}

/// The worker collects while a miss finds the same entry invalidated.
#[test]
fn region_left_to_the_worker_is_deregistered_once() {
    holds(|| {
        model(|| {
            let cache = cache(2);
            let mine = used_twice(&cache, 0);
            cache.invalidate(range(0));
            let worker = in_thread(&cache, |cache| work(cache));
            drop(get(&cache, mine, 1));
            meet(alive(&cache) & 1 == 0);
            worker.join().unwrap();
            work(&cache);
            assert_eq!(alive(&cache), 1 << 1, "{LOST}");
            assert_eq!(cache.statistics().pending_reclaim, 0);
        });
    });
}

/// The worker issues the barrier for the first entry. Meanwhile the second is invalidated and
/// retired, with no barrier after that.
#[test]
fn entry_retired_after_the_barrier_waits_for_the_next_one() {
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
            drop(cache.statistics());
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
            cache.core.collect_once();
            // Reuses the entry unless the reader has a lease of it.
            drop(get(&cache, mine, 1));
            drop(get(&cache, mine, 1));
            reader.join().unwrap();
        });
    });
}

const LOST: &str = "an invalidated region was not deregistered";

fn last_release_against_collection() {
    model(|| {
        let cache = cache(1);
        // Leased on this thread, released on the other.
        let lease = OwnedLease::new(&cache, get(&cache, block(&cache), 0));
        let releaser = thread::spawn(move || {
            lease.used.with(|_| ());
            drop(lease);
        });
        cache.invalidate(range(0));
        work(&cache);
        meet(alive(&cache) == 0);
        releaser.join().unwrap();
        work(&cache);
        assert_eq!(alive(&cache), 0, "{LOST}");
    });
}

#[test]
fn last_release_leads_to_deregistration() {
    holds(last_release_against_collection);
}

#[test]
fn last_release_fails_without_either_half_of_the_barrier() {
    fails_without(LIGHT, last_release_against_collection, &[LOST]);
    fails_without(HEAVY, last_release_against_collection, &[LOST]);
}

const REPLACED: &str = "a hit on memory that was replaced";

fn registration_against_an_invalidation() {
    model(|| {
        let cache = cache(1);
        let invalidator = in_thread(&cache, |cache| {
            let change = cache.core.begin(range(0), Cause::Replace);
            cache.backend().version.fetch_add(1, Ordering::Relaxed);
            cache.core.end(change);
        });
        let mine = block(&cache);
        drop(get(&cache, mine, 0));
        invalidator.join().unwrap();
        let leased = cache.core.lookup_checked(mine, &key(0), None);
        meet(leased.is_some());
        if let Some(leased) = leased {
            let lease = Lease::cached(&cache.core, leased);
            assert_eq!(lease.version, 1, "{REPLACED}");
        }
    });
}

#[test]
fn live_entry_is_of_the_memory_after_an_invalidation() {
    holds(registration_against_an_invalidation);
}

#[test]
fn waiter_gets_no_region_of_replaced_memory() {
    holds(|| {
        model(|| {
            let cache = cache(1);
            let other = in_thread(&cache, |cache| {
                let lease = get(cache, block(cache), 0);
                meet(lease.is_invalidated());
                lease.used.with(|_| ());
            });
            let invalidator = in_thread(&cache, |cache| {
                let change = cache.core.begin(range(0), Cause::Replace);
                cache.backend().version.fetch_add(1, Ordering::Relaxed);
                cache.core.end(change);
                // A lookup after the invalidation gets the memory that is there now.
                assert_eq!(get(cache, block(cache), 0).version, 1, "{REPLACED}");
            });
            other.join().unwrap();
            invalidator.join().unwrap();
        });
    });
}

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
            meet(alive(&cache) == 0);
            other.join().unwrap();
            work(&cache);
            assert_eq!(alive(&cache), 0, "an invalidated entry was not collected");
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
            assert_eq!(cache.backend().made.load(Ordering::SeqCst), 1);
            meet(cache.core.counters.late_hits.load(Ordering::Relaxed) != 0);
        });
    });
}

#[test]
fn failed_registration_wakes_its_waiters() {
    holds(|| {
        model(|| {
            let cache = cache_refused(1, 2);
            // The first of them registers twice, since the provider is out of resources.
            let other = in_thread(&cache, |cache| {
                meet(cache.lookup_in_block(block(cache), &key(0), None).is_err());
            });
            drop(cache.lookup_in_block(block(&cache), &key(0), None));
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

/// One thread evicts a region, or leaves it to the worker if it is `invalidated` before. Meanwhile
/// the other invalidates it with a callback.
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
        meet(if invalidated { left } else { called.load(std::sync::atomic::Ordering::SeqCst) });
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

const UNSEEN: &str = "a walk missed an entry";

/// Walks all pages up to `last` beside `alter`, which keeps entry 1 and removes entry 2.
fn walk_beside(put: &'static [(u64, u64, u32)], last: u64, alter: fn(&Radix, &mut Shape)) {
    model(move || {
        let (radix, mut shape) = Radix::new(4).expect("a table");
        for (first, last, entry) in put {
            assert!(radix.insert(&mut shape, *first, *last, *entry));
        }
        let radix = Arc::new(radix);
        let walker = {
            let radix = Arc::clone(&radix);
            thread::spawn(move || {
                let mut seen = (false, false);
                radix.walk(0, last, &mut |entry| {
                    seen = (seen.0 || entry == 1, seen.1 || entry == 2)
                });
                assert!(seen.0, "{UNSEEN}");
                meet(seen.1);
            })
        };
        alter(&radix, &mut shape);
        walker.join().unwrap();
    });
}

/// Takes the chain of the first page apart, and uses its bucket for the next page.
fn walk_against_an_alteration() {
    walk_beside(&[(0, 0, 1), (0, 0, 2)], 0, |radix, shape| {
        radix.remove(shape, 0, 0, 2);
        for entry in [3, 4] {
            assert!(radix.insert(shape, 1, 1, entry));
        }
    });
}

#[test]
fn walk_visits_entries_that_stay_while_a_chain_is_reused() {
    holds(walk_against_an_alteration);
}

#[test]
fn walk_visits_entries_that_stay_in_a_chain_of_two_buckets() {
    holds(|| {
        walk_beside(&[(0, 0, 1), (0, 0, 2), (0, 0, 3)], 0, |radix, shape| {
            radix.remove(shape, 0, 0, 2);
            radix.remove(shape, 0, 0, 3);
            for entry in [4, 5] {
                assert!(radix.insert(shape, 1, 1, entry));
            }
        });
    });
}

#[test]
fn walk_visits_entries_that_stay_while_a_node_is_reused() {
    holds(|| {
        walk_beside(&[(2, 3, 1), (0, 0, 2)], 3, |radix, shape| {
            radix.remove(shape, 0, 0, 2);
            radix.prune(shape, 0);
            // The node of the first two pages now hangs off a chain with the entry of the last two.
            assert!(radix.insert(shape, 2, 2, 3));
            radix.remove(shape, 2, 2, 3);
        });
    });
}

#[test]
fn walk_fails_without_generations() {
    fails_without(GENERATION, walk_against_an_alteration, &[UNSEEN]);
}

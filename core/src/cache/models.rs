//! Orders of events, on a table of four pages: lookups, puts, changes, collections, evictions and
//! registrations.
//!
//! `IMPLEMENTATION.md` has the command and lists which races there are. Loom has no `membarrier`:
//! both halves of the barrier are SeqCst fences here. That each kind of fence is needed is shown by
//! models that fail without it.
//!
//! Each model must meet both outcomes of its race, so that one that never races does not pass.

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
    Barrier, Cache, Key, Limits, Source,
    blocks::Block,
    lease::{Lease, OwnedLease},
    radix::{Radix, Shape},
    sync::modelled::{ANNOUNCE, GENERATION, HEAVY, LEFT_OUT, LIGHT},
};
use crate::{
    Access, Address, AddressRange, Error, ErrorKind, Rejected, Result,
    monitor::{Cause, Invalidator},
};

/// What is registered, and which memory was there when it was.
///
/// Always read and written in one step, which sees the newest value, and Relaxed, so that it orders
/// nothing else.
struct Memory {
    /// Which memory is there now.
    version: AtomicU32,
    /// A bit for each registration that is alive.
    alive: AtomicU32,
    made: AtomicU32,
    /// Registrations that the provider refuses, from the first on.
    refused: u32,
}

struct Registration {
    number: u32,
    version: u32,
    start: u64,
    /// Read by whoever uses the region and written by its end: loom sees whether the two are
    /// ordered.
    used: UnsafeCell<()>,
}

// SAFETY: loom panics where two accesses to the cell are not ordered, and one is a write.
unsafe impl Sync for Registration {}

impl Source for Memory {
    type Region = Registration;
    type Watch = ();

    fn watch(&self, _: &Key, _: &Arc<dyn Invalidator>) -> Result<()> {
        Ok(())
    }

    fn unwatch(&self, (): ()) {}

    fn checked(&self, (): &()) -> bool {
        false
    }

    fn valid(&self, (): &()) -> Result<bool> {
        Ok(true)
    }

    fn longest(&self) -> u64 {
        u64::MAX
    }

    fn register(&self, key: &Key) -> Result<Registration> {
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        if number < self.refused {
            return Err(Error::new(ErrorKind::OutOfResources, "modelled registration"));
        }
        self.alive.fetch_or(1 << number, Ordering::Relaxed);
        // The kernel says what is mapped now: never something older.
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

fn block(cache: &Modelled) -> &Block {
    cache.shared.take_block().expect("blocks enough")
}

fn get<'c>(cache: &'c Modelled, block: &'c Block, page: u64) -> Lease<'c, Memory> {
    cache.get_in(block, &key(page)).expect("registered")
}

fn alive(cache: &Modelled) -> u32 {
    cache.source().alive.fetch_or(0, Ordering::Relaxed)
}

/// Which outcomes of a race were met; no part of the model.
static MET: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);

fn meet(outcome: bool) {
    MET.fetch_or(1 << u32::from(outcome), std::sync::atomic::Ordering::SeqCst);
}

const OUTLIVED: &str = "a lease of what was deregistered";
const OTHERS: &str = "a region of other memory";

/// A lookup on the plain way, which uses the region if it hits.
fn look_up(cache: &Modelled, block: &Block, page: u64) {
    let held = cache.shared.plain_hit(block.first_slot(), &key(page)).hit();
    meet(held.is_some());
    if let Some(held) = held {
        let lease = Lease::cached(&cache.shared, held);
        assert_eq!(lease.start, page << 12, "{OTHERS}");
        let bit = 1 << lease.number;
        assert!(alive(cache) & bit != 0, "{OUTLIVED}");
        lease.used.with(|_| ());
        thread::yield_now();
        assert!(alive(cache) & bit != 0, "{OUTLIVED}");
    }
}

/// What the worker does: collects as long as it is woken.
fn work(cache: &Modelled) {
    while cache.shared.waker.called.swap(false, Ordering::SeqCst) {
        cache.shared.collect_once();
    }
}

fn model(body: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.max_branches = 50_000;
    model.check(body);
}

/// Runs models one at a time, since what is left out is left out for all.
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

/// Fails in one of these ways, and in no other.
fn fails_without(what: u32, models: fn(), ways: &[&str]) {
    let panic = catch_unwind(|| without(what, models))
        .expect_err("the model does not notice what is missing");
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or_default();
    assert!(ways.iter().any(|way| text.contains(way)), "another failure: {text}");
}

fn used_twice(cache: &Modelled, page: u64) -> &Block {
    let block = block(cache);
    drop(get(cache, block, page));
    // The second is a hit, which clears the mark of new entries.
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
        cache.shared.collect_once();
        reader.join().unwrap();
        cache.shared.collect_once();
        assert_eq!(alive(&cache), 0, "{LOST}");
    });
}

/// Loom's word for accesses that are not ordered.
const UNORDERED: &str = "Causality violation";

#[test]
fn no_lease_outlives_its_region_under_an_invalidation() {
    holds(lookup_against_invalidation);
}

#[test]
fn an_invalidation_fails_without_either_half_of_the_barrier() {
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
fn no_lease_outlives_its_region_under_an_eviction() {
    holds(lookup_against_eviction);
}

#[test]
fn an_eviction_fails_without_either_half_of_the_barrier() {
    fails_without(LIGHT, lookup_against_eviction, &[OUTLIVED, OTHERS, UNORDERED]);
    fails_without(HEAVY, lookup_against_eviction, &[OUTLIVED, OTHERS, UNORDERED]);
}

/// A thread takes a lease and gives up its block, while another ends what nobody uses.
fn leaving_against(ends: fn(&Modelled, &Block)) {
    model(move || {
        let cache = cache(1);
        let mine = used_twice(&cache, 0);
        let reader = in_thread(&cache, |cache| {
            let block = block(cache);
            let held = cache.shared.plain_hit(block.first_slot(), &key(0)).hit();
            meet(held.is_some());
            cache.shared.blocks.give_back(block);
            if let Some(held) = held {
                let lease = Lease::cached(&cache.shared, held);
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
fn no_lease_of_a_thread_that_left_outlives_its_region_under_an_eviction() {
    holds(|| leaving_against(|cache, mine| drop(get(cache, mine, 1))));
}

#[test]
fn no_lease_of_a_thread_that_left_outlives_its_region_under_a_clear() {
    holds(|| {
        leaving_against(|cache, mine| {
            cache.shared.blocks.give_back(mine);
            cache.clear();
        });
    });
}

#[test]
fn no_lease_of_a_thread_that_left_outlives_its_region_under_a_miss_that_finds_it_dead() {
    holds(|| {
        leaving_against(|cache, mine| {
            cache.invalidate(range(0));
            drop(get(cache, mine, 1));
            work(cache);
        });
    });
}

fn lookup_against_a_miss_that_finds_it_dead() {
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
fn no_lease_outlives_its_region_under_a_miss_that_finds_it_dead() {
    holds(lookup_against_a_miss_that_finds_it_dead);
}

#[test]
fn a_miss_that_finds_the_dead_fails_without_either_half_of_the_barrier() {
    fails_without(LIGHT, lookup_against_a_miss_that_finds_it_dead, &[OUTLIVED, LOST, UNORDERED]);
    fails_without(HEAVY, lookup_against_a_miss_that_finds_it_dead, &[OUTLIVED, LOST, UNORDERED]);
}

/// The worker collects while a miss finds the same entry dead.
#[test]
fn what_a_miss_leaves_to_the_worker_is_deregistered_once() {
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
            assert_eq!(cache.statistics().dying, 0);
        });
    });
}

/// The worker passes the barrier for the first entry, while the second dies and is drained with no
/// barrier after that.
#[test]
fn what_dies_after_the_workers_barrier_waits_for_the_next() {
    holds(|| {
        model(|| {
            let cache = cache(2);
            used_twice(&cache, 0);
            let mine = used_twice(&cache, 1);
            cache.shared.blocks.give_back(mine);
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
fn a_stale_index_leads_to_no_other_region() {
    holds(|| {
        model(|| {
            let cache = cache(2);
            let mine = used_twice(&cache, 0);
            let reader = in_thread(&cache, |cache| look_up(cache, block(cache), 0));
            cache.invalidate(range(0));
            cache.shared.collect_once();
            // Takes the same entry, unless the reader has it.
            drop(get(&cache, mine, 1));
            drop(get(&cache, mine, 1));
            reader.join().unwrap();
        });
    });
}

const LOST: &str = "a last put was lost";

fn last_put_against_collection() {
    model(|| {
        let cache = cache(1);
        // Taken on this thread, dropped on the other.
        let lease = OwnedLease::new(&cache, get(&cache, block(&cache), 0));
        let putter = thread::spawn(move || {
            lease.used.with(|_| ());
            drop(lease);
        });
        cache.invalidate(range(0));
        work(&cache);
        meet(alive(&cache) == 0);
        putter.join().unwrap();
        work(&cache);
        assert_eq!(alive(&cache), 0, "{LOST}");
    });
}

#[test]
fn no_last_put_is_lost() {
    holds(last_put_against_collection);
}

#[test]
fn puts_fail_without_either_half_of_the_barrier() {
    fails_without(LIGHT, last_put_against_collection, &[LOST]);
    fails_without(HEAVY, last_put_against_collection, &[LOST]);
}

const REPLACED: &str = "a hit on memory that was replaced";

fn registration_against_a_change() {
    model(|| {
        let cache = cache(1);
        let changer = in_thread(&cache, |cache| {
            let change = cache.shared.begin(range(0), Cause::Replace);
            cache.source().version.fetch_add(1, Ordering::Relaxed);
            cache.shared.end(change);
        });
        let mine = block(&cache);
        drop(get(&cache, mine, 0));
        changer.join().unwrap();
        let held = cache.shared.hit(mine, &key(0));
        meet(held.is_some());
        if let Some(held) = held {
            let lease = Lease::cached(&cache.shared, held);
            assert_eq!(lease.version, 1, "{REPLACED}");
        }
    });
}

#[test]
fn nothing_becomes_live_over_a_change() {
    holds(registration_against_a_change);
}

#[test]
fn nothing_becomes_live_over_a_change_for_those_who_wait() {
    holds(|| {
        model(|| {
            let cache = cache(1);
            let other = in_thread(&cache, |cache| {
                let lease = get(cache, block(cache), 0);
                meet(lease.is_dead());
                lease.used.with(|_| ());
            });
            let changer = in_thread(&cache, |cache| {
                let change = cache.shared.begin(range(0), Cause::Replace);
                cache.source().version.fetch_add(1, Ordering::Relaxed);
                cache.shared.end(change);
                // Whoever asks after the change gets what is there now.
                assert_eq!(get(cache, block(cache), 0).version, 1, "{REPLACED}");
            });
            other.join().unwrap();
            changer.join().unwrap();
        });
    });
}

#[test]
fn a_change_fails_without_its_fence() {
    fails_without(ANNOUNCE, registration_against_a_change, &[REPLACED]);
}

#[test]
fn what_two_changes_kill_is_collected_once() {
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
            assert_eq!(alive(&cache), 0, "a dead entry was not collected");
            let left = cache.statistics();
            assert_eq!((left.entries, left.dying, left.all_invalidations()), (0, 0, 2));
        });
    });
}

#[test]
fn threads_that_want_the_same_register_once() {
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
            assert_eq!(cache.source().made.load(Ordering::SeqCst), 1);
            meet(cache.shared.counters.late_hits.load(Ordering::Relaxed) != 0);
        });
    });
}

#[test]
fn whoever_waits_for_a_registration_that_fails_is_told() {
    holds(|| {
        model(|| {
            let cache = cache_refused(1, 2);
            // The first of them asks twice, since the provider says that it is out of resources.
            let other = in_thread(&cache, |cache| {
                meet(cache.get_in(block(cache), &key(0)).is_err());
            });
            drop(cache.get_in(block(&cache), &key(0)));
            other.join().unwrap();
            cache.clear();
            let left = cache.statistics();
            assert_eq!((left.entries, left.dying, left.leases, alive(&cache)), (0, 0, 0, 0));
        });
    });
}

const UNTOLD: &str = "nobody said that it was deregistered";

/// One thread evicts, or leaves what is dead to the worker, while the other wants to be told when
/// what it invalidates is deregistered.
fn telling_against_a_miss(dead: bool) {
    model(move || {
        let cache = cache(1);
        used_twice(&cache, 0);
        if dead {
            cache.invalidate(range(0));
        }
        let other = in_thread(&cache, |cache| drop(get(cache, block(cache), 1)));
        let told = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let (says, of) = (Arc::clone(&told), Arc::clone(&cache));
        let left = dead && !cache.shared.structure.lock().left.is_empty();
        cache.invalidate_then(range(0), move || {
            assert_eq!(alive(&of) & 1, 0, "told before the end");
            says.store(true, std::sync::atomic::Ordering::SeqCst);
        });
        work(&cache);
        meet(if dead { left } else { told.load(std::sync::atomic::Ordering::SeqCst) });
        other.join().unwrap();
        work(&cache);
        assert!(told.load(std::sync::atomic::Ordering::SeqCst), "{UNTOLD}");
    });
}

fn telling_against_a_deregistration() {
    telling_against_a_miss(false);
}

#[test]
fn whoever_asks_is_told_of_deregistrations_under_way() {
    holds(telling_against_a_deregistration);
}

#[test]
fn whoever_asks_is_told_of_deregistrations_that_are_left_to_the_worker() {
    holds(|| telling_against_a_miss(true));
}

#[test]
fn telling_fails_without_the_fence_of_ends() {
    fails_without(ANNOUNCE, telling_against_a_deregistration, &[UNTOLD]);
}

const UNSEEN: &str = "a change passed an entry over";

/// A walk of all pages up to `last` beside `alter`. Entry 1 stays, and entry 2 goes.
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

/// The chain of the first page is taken apart, and its bucket used for the next page.
fn walk_against_an_alteration() {
    walk_beside(&[(0, 0, 1), (0, 0, 2)], 0, |radix, shape| {
        radix.remove(shape, 0, 0, 2);
        for entry in [3, 4] {
            assert!(radix.insert(shape, 1, 1, entry));
        }
    });
}

#[test]
fn a_walk_sees_what_stays_while_the_table_is_altered() {
    holds(walk_against_an_alteration);
}

#[test]
fn a_walk_sees_what_stays_of_a_chain_of_two_buckets() {
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
fn a_walk_sees_what_stays_while_a_node_changes_hands() {
    holds(|| {
        walk_beside(&[(2, 3, 1), (0, 0, 2)], 3, |radix, shape| {
            radix.remove(shape, 0, 0, 2);
            radix.prune(shape, 0);
            // The node of the first two pages now hangs off a chain, with the entry of the last
            // two.
            assert!(radix.insert(shape, 2, 2, 3));
            radix.remove(shape, 2, 2, 3);
        });
    });
}

#[test]
fn a_walk_fails_without_generations() {
    fails_without(GENERATION, walk_against_an_alteration, &[UNSEEN]);
}

//! Registrations and deregistrations under way: who waits for them and who does not; and those that
//! fail.

use std::{
    sync::{
        Arc, Barrier,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use hmem_core::{
    Access, ErrorKind,
    cache::{Key, Limits},
};

use crate::support::*;

/// CACHE-06
#[test]
fn a_registration_in_progress_holds_up_no_other_lookup() {
    let (cache, books) = cache(Limits::default());
    let cached = cache.get(&key(0, PAGE)).unwrap().id;
    books.registering.hold();
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| cache.get(&key(PAGE, PAGE)).unwrap().id);
        books.registering.until_held(1);
        // Hits, misses that wait for nobody, statistics, invalidation: all while it is held.
        assert_eq!(cache.get(&key(0, PAGE)).unwrap().id, cached);
        let other = scope.spawn(|| cache.get(&key(2 * PAGE, PAGE)).unwrap().id);
        books.registering.until_held(2);
        assert_eq!(cache.statistics().entries, 3);
        cache.invalidate(range(0, PAGE));
        assert!(cache.find(&key(0, PAGE)).is_none());
        books.registering.release();
        assert_ne!(slow.join().unwrap(), other.join().unwrap());
    });
}

/// CACHE-06
#[test]
fn threads_that_want_the_same_range_register_once() {
    const THREADS: usize = 8;
    let (cache, books) = cache(Limits::default());
    books.registering.hold();
    let start = Barrier::new(THREADS + 1);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                let (cache, start) = (&cache, &start);
                scope.spawn(move || {
                    start.wait();
                    cache.get(&key(0, PAGE)).unwrap().id
                })
            })
            .collect();
        start.wait();
        books.registering.until_held(1);
        books.registering.release();
        let ids: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(ids.iter().all(|id| *id == ids[0]));
    });
    assert_eq!(books.registrations.load(Ordering::SeqCst), 1);
    let now = cache.statistics();
    assert_eq!((now.lookups, now.hits, now.registrations), (THREADS as u64, THREADS as u64 - 1, 1));
}

/// CACHE-07
#[test]
fn a_failed_registration_is_every_waiters_error_and_leaves_nothing() {
    const THREADS: usize = 4;
    let (cache, books) = cache(Limits::default());
    books.registering.hold();
    books.fail_next(ErrorKind::BadAddress);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| cache.get(&key(0, PAGE)).map(|lease| lease.id));
        books.registering.until_held(1);
        let others: Vec<_> = (1..THREADS)
            .map(|_| scope.spawn(|| cache.get(&key(0, PAGE)).map(|lease| lease.id)))
            .collect();
        // A waiter has its lease before it waits, so that it is seen here.
        while cache.statistics().leases < THREADS {
            std::thread::yield_now();
        }
        books.registering.release();
        let error = first.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadAddress);
        for other in others {
            let other = other.join().unwrap().unwrap_err();
            assert_eq!(other.to_string(), error.to_string());
        }
    });
    assert_eq!(books.registrations.load(Ordering::SeqCst), 1);
    cache.flush();
    let now = cache.statistics();
    assert_eq!((now.entries, now.bytes, now.dying, now.failures), (0, 0, 0, THREADS as u64));
    assert_empty(&books);
    assert!(cache.get(&key(0, PAGE)).is_ok());
}

/// CACHE-14
#[test]
fn a_waiter_for_a_part_of_a_range_that_cannot_be_registered_gets_its_part() {
    let with = |start, len, access| Key::new(range(start, len), access).unwrap();
    let whole = with(0, 4 * PAGE, Access::SEND | Access::RECV);
    // Fewer bytes, or fewer rights.
    for part in [with(0, PAGE, whole.access()), with(0, 4 * PAGE, Access::SEND)] {
        let (cache, books) = cache(Limits::default());
        books.registering.hold();
        books.fail_next(ErrorKind::BadAddress);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| cache.get(&whole).map(|lease| lease.id));
            books.registering.until_held(1);
            let second = scope.spawn(|| cache.get(&part).map(|lease| lease.key));
            while cache.statistics().leases < 2 {
                std::thread::yield_now();
            }
            books.registering.release();
            assert_eq!(first.join().unwrap().unwrap_err().kind(), ErrorKind::BadAddress);
            assert_eq!(second.join().unwrap().unwrap(), part);
        });
        let now = cache.statistics();
        assert_eq!((now.lookups, now.registrations, now.failures), (2, 1, 1));
        drop(cache);
        assert_empty(&books);
    }
}

/// CACHE-07
#[test]
fn a_source_that_panics_as_it_deregisters_leaves_the_rest_to_others() {
    let (cache, books) = cache(Limits::default());
    for number in 0..3 {
        drop(cache.get(&key(number * PAGE, PAGE)).unwrap());
    }
    *books.deregistering.meanwhile.lock() = Some(Box::new(|| panic!("by the test")));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| cache.clear()));
    assert!(panicked.is_err());
    // Nobody waits for what has ended, and those behind it are tried again.
    cache.flush();
    cache.try_empty().unwrap();
    assert_eq!(books.deregistrations.load(Ordering::SeqCst), 2);
    assert_eq!(
        (books.watches.load(Ordering::SeqCst), books.unwatches.load(Ordering::SeqCst)),
        (3, 3)
    );
}

/// CACHE-07
#[test]
fn a_source_that_panics_on_the_workers_thread_does_not_end_the_worker() {
    let (cache, books) = cache(Limits::default());
    let counted = |count: &AtomicUsize| count.load(Ordering::SeqCst);
    for number in 0..3 {
        drop(cache.get(&key(number * PAGE, PAGE)).unwrap());
    }
    *books.deregistering.meanwhile.lock() = Some(Box::new(|| panic!("by the test")));
    cache.invalidate(range(0, 3 * PAGE));
    // Nobody but the worker: the regions behind the one that panicked, and all watches.
    until(|| counted(&books.deregistrations) == 2 && counted(&books.unwatches) == 3);
    assert_eq!(books.live(), 1, "the region that panicked stays registered");
    drop(cache.get(&key(0, PAGE)).unwrap());
    cache.invalidate(range(0, PAGE));
    until(|| counted(&books.deregistrations) == 3 && counted(&books.unwatches) == 4);
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        cache.flush();
        tell.send(cache.try_empty().map_err(|error| error.to_string())).expect("the test waits");
    });
    told.recv_timeout(Duration::from_secs(60)).expect("a flush hangs").expect("nothing is left");
}

/// CACHE-08
#[test]
fn a_callback_that_panics_does_not_end_the_worker_nor_keep_others_from_being_told() {
    let (cache, books) = cache(Limits::default());
    let leased = cache.get(&key(0, PAGE)).unwrap();
    let (tell, told) = mpsc::channel();
    cache.invalidate_then(range(0, PAGE), || panic!("by the test"));
    cache.invalidate_then(range(0, PAGE), move || tell.send(()).expect("the test waits"));
    drop(leased);
    told.recv_timeout(Duration::from_secs(60)).expect("the second callback");
    drop(cache.get(&key(0, PAGE)).unwrap());
    cache.invalidate(range(0, PAGE));
    until(|| books.live() == 0);
    // On the calling thread too: there is nothing to wait for.
    cache.flush();
    cache.invalidate_then(range(0, PAGE), || panic!("by the test"));
}

/// CACHE-07
#[test]
fn a_callback_during_a_registration_may_look_up_the_same_range() {
    let (cache, books) = cache(Limits::default());
    let cache = Arc::new(cache);
    let leased = cache.get(&key(0, PAGE)).unwrap();
    drop(cache.get(&key(PAGE, PAGE)).unwrap());
    // The worker is busy with the second, so that the first is left to whoever is out of resources.
    books.deregistering.hold();
    cache.invalidate(range(PAGE, PAGE));
    books.deregistering.until_held(1);
    let (asks, asked) = (Arc::clone(&cache), mpsc::channel());
    cache.invalidate_then(range(0, PAGE), move || {
        asked.0.send(asks.get(&key(2 * PAGE, PAGE)).is_ok()).expect("the test waits");
    });
    drop(leased);
    books.room.store(books.live(), Ordering::SeqCst);
    thread::scope(|scope| {
        let third = scope.spawn(|| cache.get(&key(2 * PAGE, PAGE)).is_ok());
        books.deregistering.until_held(2);
        books.deregistering.release();
        assert!(third.join().unwrap());
    });
    assert!(asked.1.recv().unwrap());
    assert_eq!(books.registrations.load(Ordering::SeqCst), 2 + 2, "the last was refused once");
}

/// CACHE-07
#[test]
fn a_source_that_panics_leaves_nothing_and_nobody_waiting() {
    let (cache, books) = cache(Limits::default());
    *books.registering.meanwhile.lock() = Some(Box::new(|| panic!("by the test")));
    let panicked =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| cache.get(&key(0, PAGE)).is_ok()));
    assert!(panicked.is_err());
    cache.flush();
    assert_eq!(cache.statistics().entries, 0);
    assert_empty(&books);
    assert!(cache.get(&key(0, PAGE)).is_ok());
}

/// CACHE-07
#[test]
fn idle_entries_are_given_back_when_the_provider_is_out_of_resources() {
    let (cache, books) = cache(Limits::default());
    books.room.store(4, Ordering::SeqCst);
    let busy = cache.get(&key(0, PAGE)).unwrap();
    for i in 1..4 {
        cache.get(&key(i * PAGE, PAGE)).unwrap();
    }
    assert_eq!(books.live(), 4);
    let before = books.registrations.load(Ordering::SeqCst);
    let fifth = cache.get(&key(9 * PAGE, PAGE)).unwrap();
    assert!(fifth.uncached().is_none());
    // Refused once, then tried once more; what is in use stayed.
    assert_eq!(books.registrations.load(Ordering::SeqCst), before + 2);
    assert_eq!(books.live(), 2);
    assert_eq!(cache.get(&key(0, PAGE)).unwrap().id, busy.id);
    // With nothing to give back it is an error, after one try.
    let (_third, _fourth) =
        (cache.get(&key(1 << 20, PAGE)).unwrap(), cache.get(&key(2 << 20, PAGE)).unwrap());
    let error = cache.get(&key(3 << 20, PAGE)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfResources);
    assert_eq!(books.registrations.load(Ordering::SeqCst), before + 5);
}

#[test]
fn a_region_that_the_provider_will_not_deregister_is_tried_again_and_not_lost() {
    let (cache, books) = cache(Limits::default());
    cache.get(&key(0, PAGE)).unwrap();
    books.refusing.store(1, Ordering::SeqCst);
    cache.invalidate(range(0, PAGE));
    while books.refusing.load(Ordering::SeqCst) > 0 {
        cache.flush();
    }
    cache.flush();
    assert_eq!((books.live(), cache.statistics().stuck), (0, 0));
    assert_empty(&books);
}

/// Whether a thread of this process sleeps until somebody wakes it.
fn is_asleep(thread: rustix::thread::Pid) -> bool {
    let stat =
        std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('S'))
}

#[test]
fn emptying_waits_for_what_the_worker_is_deregistering() {
    let (cache, books) = cache(Limits::default());
    cache.get(&key(0, PAGE)).unwrap();
    books.deregistering.hold();
    cache.invalidate(range(0, PAGE));
    books.deregistering.until_held(1);
    thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        let cache = &cache;
        let emptying = scope.spawn(move || {
            tell.send(rustix::thread::gettid()).unwrap();
            cache.try_empty()
        });
        let its_thread = told.recv().unwrap();
        while !emptying.is_finished() && !is_asleep(its_thread) {
            thread::yield_now();
        }
        let waits = !emptying.is_finished();
        books.deregistering.release();
        emptying.join().unwrap().unwrap();
        assert!(waits, "a region is still registered");
        assert_eq!(books.live(), 0);
    });
}

#[test]
fn emptying_takes_what_dies_while_it_gives_back() {
    // The worker is called for it too, and either may be first.
    for _ in 0..200 {
        let (cache, books) = cache(Limits::default());
        let cache = Arc::new(cache);
        cache.get(&key(0, PAGE)).unwrap();
        let leased = cache.get_owned(&key(PAGE, PAGE)).unwrap();
        let its = Arc::clone(&cache);
        *books.deregistering.meanwhile.lock() = Some(Box::new(move || {
            drop(leased);
            its.invalidate(range(PAGE, PAGE));
        }));
        cache.try_empty().unwrap();
        assert_eq!(books.live(), 0);
    }
}

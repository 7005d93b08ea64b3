//! Tests of registrations and deregistrations in progress: waiting threads, and failures.

use std::{
    sync::{
        Arc, Barrier,
        atomic::{AtomicUsize, Ordering},
        mpsc::{self, TryRecvError},
    },
    thread,
    time::{Duration, Instant},
};

use hmem_core::{
    Access, ErrorKind,
    cache::{Cache, Key, Limits},
};

use crate::support::*;

/// CACHE-06
#[test]
fn registration_in_progress_blocks_no_other_lookup() {
    let (cache, records) = cache(Limits::default());
    let cached = cache.get_or_register(&key(0, PAGE)).unwrap().id;
    records.registering.hold();
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| cache.get_or_register(&key(PAGE, PAGE)).unwrap().id);
        records.registering.until_held(1);
        // These calls do not wait while the registration is held.
        assert_eq!(cache.get_or_register(&key(0, PAGE)).unwrap().id, cached);
        let other = scope.spawn(|| cache.get_or_register(&key(2 * PAGE, PAGE)).unwrap().id);
        records.registering.until_held(2);
        assert_eq!(cache.statistics().entries, 3);
        cache.invalidate(range(0, PAGE));
        assert!(cache.find(&key(0, PAGE)).is_none());
        records.registering.release();
        assert_ne!(slow.join().unwrap(), other.join().unwrap());
    });
}

/// CACHE-06
#[test]
fn concurrent_lookups_of_the_same_range_register_once() {
    const THREADS: usize = 8;
    let (cache, records) = cache(Limits::default());
    records.registering.hold();
    let start = Barrier::new(THREADS + 1);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                let (cache, start) = (&cache, &start);
                scope.spawn(move || {
                    start.wait();
                    cache.get_or_register(&key(0, PAGE)).unwrap().id
                })
            })
            .collect();
        start.wait();
        records.registering.until_held(1);
        records.registering.release();
        let ids: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(ids.iter().all(|id| *id == ids[0]));
    });
    assert_eq!(records.registrations.load(Ordering::SeqCst), 1);
    let now = cache.statistics();
    assert_eq!((now.lookups, now.hits, now.registrations), (THREADS as u64, THREADS as u64 - 1, 1));
}

/// CACHE-07
#[test]
fn failed_registration_fails_all_waiters_and_leaves_nothing() {
    const THREADS: usize = 4;
    let (cache, records) = cache(Limits::default());
    records.registering.hold();
    records.fail_next(ErrorKind::BadAddress);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| cache.get_or_register(&key(0, PAGE)).map(|lease| lease.id));
        records.registering.until_held(1);
        let others: Vec<_> = (2..=THREADS)
            .map(|leases| {
                spawn_asleep(
                    scope,
                    || cache.statistics().leases >= leases,
                    || cache.get_or_register(&key(0, PAGE)).map(|lease| lease.id),
                )
            })
            .collect();
        records.registering.release();
        let error = first.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadAddress);
        for other in others {
            let other = other.join().unwrap().unwrap_err();
            assert_eq!(other.to_string(), error.to_string());
        }
    });
    assert_eq!(records.registrations.load(Ordering::SeqCst), 1);
    cache.reclaim();
    let now = cache.statistics();
    assert_eq!(
        (now.entries, now.bytes, now.pending_reclaim, now.failures),
        (0, 0, 0, THREADS as u64)
    );
    assert_empty(&records);
    assert!(cache.get_or_register(&key(0, PAGE)).is_ok());
}

/// CACHE-14
#[test]
fn waiter_for_a_part_of_a_failed_range_registers_its_part() {
    let with = |start, len, access| Key::new(range(start, len), access).unwrap();
    let whole = with(0, 4 * PAGE, Access::SEND | Access::RECV);
    // One part has fewer bytes, the other fewer rights.
    for part in [with(0, PAGE, whole.access()), with(0, 4 * PAGE, Access::SEND)] {
        let (cache, records) = cache(Limits::default());
        records.registering.hold();
        records.fail_next(ErrorKind::BadAddress);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| cache.get_or_register(&whole).map(|lease| lease.id));
            records.registering.until_held(1);
            let second = scope.spawn(|| cache.get_or_register(&part).map(|lease| lease.key));
            while cache.statistics().leases < 2 {
                std::thread::yield_now();
            }
            records.registering.release();
            assert_eq!(first.join().unwrap().unwrap_err().kind(), ErrorKind::BadAddress);
            assert_eq!(second.join().unwrap().unwrap(), part);
        });
        let now = cache.statistics();
        assert_eq!((now.lookups, now.registrations, now.failures), (2, 1, 1));
        drop(cache);
        assert_empty(&records);
    }
}

/// CACHE-07
#[test]
fn panic_in_a_deregistration_leaves_the_others_to_be_retried() {
    let (cache, records) = cache(Limits::default());
    for number in 0..3 {
        drop(cache.get_or_register(&key(number * PAGE, PAGE)).unwrap());
    }
    *records.deregistering.meanwhile.lock() = Some(Box::new(|| panic!("by the test")));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| cache.evict_idle()));
    assert!(panicked.is_err());
    // No thread waits for the deregistration that panicked, and the remaining regions are
    // deregistered.
    cache.reclaim();
    cache.try_clear().unwrap();
    assert_eq!(records.deregistrations.load(Ordering::SeqCst), 2);
    assert_eq!(
        (records.watches.load(Ordering::SeqCst), records.unwatches.load(Ordering::SeqCst)),
        (3, 3)
    );
}

/// CACHE-07
#[test]
fn panic_of_the_backend_does_not_end_the_worker() {
    let (cache, records) = cache(Limits::default());
    let counted = |count: &AtomicUsize| count.load(Ordering::SeqCst);
    for number in 0..3 {
        drop(cache.get_or_register(&key(number * PAGE, PAGE)).unwrap());
    }
    *records.deregistering.meanwhile.lock() = Some(Box::new(|| panic!("by the test")));
    cache.invalidate(range(0, 3 * PAGE));
    // The worker alone deregisters the remaining regions after the panic, and ends all watches.
    until(|| counted(&records.deregistrations) == 2 && counted(&records.unwatches) == 3);
    assert_eq!(records.live(), 1, "the region that panicked stays registered");
    drop(cache.get_or_register(&key(0, PAGE)).unwrap());
    cache.invalidate(range(0, PAGE));
    until(|| counted(&records.deregistrations) == 3 && counted(&records.unwatches) == 4);
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        cache.reclaim();
        sender.send(cache.try_clear().map_err(|error| error.to_string())).expect("the test waits");
    });
    receiver
        .recv_timeout(Duration::from_secs(60))
        .expect("try_clear hangs")
        .expect("nothing is left");
}

/// CACHE-08
#[test]
fn panic_of_a_callback_does_not_stop_other_callbacks() {
    let (cache, records) = cache(Limits::default());
    let leased = cache.get_or_register(&key(0, PAGE)).unwrap();
    let (sender, receiver) = mpsc::channel();
    cache.invalidate_with_callback(range(0, PAGE), || panic!("by the test"));
    cache
        .invalidate_with_callback(range(0, PAGE), move || sender.send(()).expect("the test waits"));
    drop(leased);
    receiver.recv_timeout(Duration::from_secs(60)).expect("the second callback");
    drop(cache.get_or_register(&key(0, PAGE)).unwrap());
    cache.invalidate(range(0, PAGE));
    until(|| records.live() == 0);
    // The callback also runs on the calling thread if there is nothing to wait for.
    cache.reclaim();
    cache.invalidate_with_callback(range(0, PAGE), || panic!("by the test"));
}

/// CACHE-07
#[test]
fn callback_may_look_up_the_range_being_registered() {
    let (cache, records) = cache(Limits::default());
    let cache = Arc::new(cache);
    let leased = cache.get_or_register(&key(0, PAGE)).unwrap();
    drop(cache.get_or_register(&key(PAGE, PAGE)).unwrap());
    // The worker is busy with the second region. So the registration that fails with
    // `OutOfResources` must reclaim the first region itself.
    records.deregistering.hold();
    cache.invalidate(range(PAGE, PAGE));
    records.deregistering.until_held(1);
    let (shared, (sender, receiver)) = (Arc::clone(&cache), mpsc::channel());
    cache.invalidate_with_callback(range(0, PAGE), move || {
        let lookup = shared.get_or_register(&key(2 * PAGE, PAGE));
        sender.send(lookup.is_ok()).expect("the test waits");
    });
    drop(leased);
    records.room.store(records.live(), Ordering::SeqCst);
    thread::scope(|scope| {
        let third = scope.spawn(|| cache.get_or_register(&key(2 * PAGE, PAGE)).is_ok());
        records.deregistering.until_held(2);
        records.deregistering.release();
        assert!(third.join().unwrap());
    });
    assert!(receiver.recv().unwrap());
    assert_eq!(records.registrations.load(Ordering::SeqCst), 2 + 2, "the last was refused once");
}

/// CACHE-07
#[test]
fn panic_in_a_registration_leaves_no_entry_and_no_waiter() {
    let (cache, records) = cache(Limits::default());
    *records.registering.meanwhile.lock() = Some(Box::new(|| panic!("by the test")));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        cache.get_or_register(&key(0, PAGE)).is_ok()
    }));
    assert!(panicked.is_err());
    cache.reclaim();
    assert_eq!(cache.statistics().entries, 0);
    assert_empty(&records);
    assert!(cache.get_or_register(&key(0, PAGE)).is_ok());
}

/// CACHE-07
#[test]
fn panic_in_a_validation_ends_the_lease() {
    let (cache, records) = cache(Limits::default());
    records.checked.store(true, Ordering::SeqCst);
    let id = cache.get_or_register(&key(0, PAGE)).unwrap().id;
    let lookups: [&dyn Fn() -> bool; 2] =
        [&|| cache.find(&key(0, PAGE)).is_some(), &|| cache.get_or_register(&key(0, PAGE)).is_ok()];
    for lookup in lookups {
        *records.validating.meanwhile.lock() = Some(Box::new(|| panic!("by the test")));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(lookup)).is_err());
        assert_eq!(cache.statistics().leases, 0);
    }
    assert_eq!(cache.get_or_register(&key(0, PAGE)).unwrap().id, id);
    cache.try_clear().expect("no entry has a lease");
    assert_empty(&records);
}

/// CACHE-07
#[test]
fn waiter_for_a_registration_that_panics_gets_an_error() {
    let (cache, records) = cache(Limits::default());
    records.registering.hold();
    *records.registering.meanwhile.lock() = Some(Box::new(|| panic!("by the test")));
    thread::scope(|scope| {
        let look_up = || cache.get_or_register(&key(0, PAGE)).map(|lease| lease.id);
        let first = scope.spawn(look_up);
        records.registering.until_held(1);
        let second = spawn_asleep(scope, || cache.statistics().leases >= 2, look_up);
        records.registering.release();
        assert!(first.join().is_err(), "the panic reaches the caller");
        let error = second.join().expect("no panic").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadState);
        let why = error.context_value("why").expect("the reason");
        assert!(why.contains("panicked") && error.remedy_text().is_some(), "{error}");
    });
    assert_eq!(cache.statistics().failures, 2);
    drop(cache);
    assert_empty(&records);
}

/// CACHE-07
#[test]
fn out_of_resources_evicts_idle_entries_and_retries_once() {
    let (cache, records) = cache(Limits::default());
    records.room.store(4, Ordering::SeqCst);
    let busy = cache.get_or_register(&key(0, PAGE)).unwrap();
    for i in 1..4 {
        cache.get_or_register(&key(i * PAGE, PAGE)).unwrap();
    }
    assert_eq!(records.live(), 4);
    let before = records.registrations.load(Ordering::SeqCst);
    let fifth = cache.get_or_register(&key(9 * PAGE, PAGE)).unwrap();
    assert!(fifth.uncached_reason().is_none());
    // The backend refused once, and the cache retried once. The leased entry stayed.
    assert_eq!(records.registrations.load(Ordering::SeqCst), before + 2);
    assert_eq!(records.live(), 2);
    assert_eq!(cache.get_or_register(&key(0, PAGE)).unwrap().id, busy.id);
    // With no idle entry, the lookup fails after one attempt.
    let (_third, _fourth) = (
        cache.get_or_register(&key(1 << 20, PAGE)).unwrap(),
        cache.get_or_register(&key(2 << 20, PAGE)).unwrap(),
    );
    let error = cache.get_or_register(&key(3 << 20, PAGE)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfResources);
    assert_eq!(records.registrations.load(Ordering::SeqCst), before + 5);
}

#[test]
fn refused_deregistration_is_retried_and_loses_no_region() {
    let (cache, records) = cache(Limits::default());
    cache.get_or_register(&key(0, PAGE)).unwrap();
    records.refusing.store(1, Ordering::SeqCst);
    cache.invalidate(range(0, PAGE));
    while records.refusing.load(Ordering::SeqCst) > 0 {
        cache.reclaim();
    }
    cache.reclaim();
    assert_eq!((records.live(), cache.statistics().deregister_failed), (0, 0));
    assert_empty(&records);
}

/// CACHE-07
#[test]
fn reclaim_retries_a_region_that_was_refused_meanwhile() {
    let (cache, records) = cache(Limits::default());
    cache.get_or_register(&key(0, PAGE)).unwrap();
    records.refusing.store(1, Ordering::SeqCst);
    records.deregistering.hold();
    cache.invalidate(range(0, PAGE));
    records.deregistering.until_held(1);
    thread::scope(|scope| {
        let reclaiming = spawn_asleep(scope, || true, || cache.reclaim());
        records.deregistering.release();
        reclaiming.join().unwrap();
        assert_eq!(records.live(), 0, "the worker was refused, and reclaim did not retry");
    });
}

/// CACHE-07
#[test]
fn region_in_use_is_retried_with_pauses_until_it_is_free() {
    const MANY: usize = usize::MAX / 2;
    let (cache, records) = cache(Limits::default());
    cache.get_or_register(&key(0, PAGE)).unwrap();
    records.busy.store(true, Ordering::SeqCst);
    records.refusing.store(MANY, Ordering::SeqCst);
    let start = Instant::now();
    cache.invalidate(range(0, PAGE));
    let attempts = || MANY - records.refusing.load(Ordering::SeqCst);
    // A retry of another thread does not make the worker's come sooner.
    let others = std::cell::Cell::new(0);
    let reclaim = || {
        others.set(others.get() + 1);
        cache.reclaim();
    };
    until(|| {
        if others.get() < 100 {
            reclaim();
        }
        attempts() >= others.get() + 6
    });
    assert!(start.elapsed() >= 4 * Duration::from_millis(50), "the worker does not sleep");
    records.refusing.store(0, Ordering::SeqCst);
    until(|| records.live() == 0);
}

/// Runs `run` on a new thread. Returns once `ready` returns true and the thread sleeps after that,
/// or once the thread has ended. A lookup that waits for another thread's registration holds the
/// cache's lock from the publication of its lease until it sleeps.
fn spawn_asleep<'s, T: Send + 's>(
    scope: &'s thread::Scope<'s, '_>,
    ready: impl Fn() -> bool,
    run: impl FnOnce() -> T + Send + 's,
) -> thread::ScopedJoinHandle<'s, T> {
    let (sender, receiver) = mpsc::channel();
    let handle = scope.spawn(move || {
        sender.send(rustix::thread::gettid()).unwrap();
        run()
    });
    let id = receiver.recv().unwrap();
    while !(handle.is_finished() || ready() && is_asleep(id)) {
        thread::yield_now();
    }
    handle
}

/// Returns whether a thread of this process sleeps.
fn is_asleep(thread: rustix::thread::Pid) -> bool {
    let stat =
        std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('S'))
}

#[test]
fn try_clear_waits_for_deregistrations_of_the_worker() {
    let (cache, records) = cache(Limits::default());
    cache.get_or_register(&key(0, PAGE)).unwrap();
    records.deregistering.hold();
    cache.invalidate(range(0, PAGE));
    records.deregistering.until_held(1);
    thread::scope(|scope| {
        let emptying = spawn_asleep(scope, || true, || cache.try_clear());
        let waits = !emptying.is_finished();
        records.deregistering.release();
        emptying.join().unwrap().unwrap();
        assert!(waits, "a region is still registered");
        assert_eq!(records.live(), 0);
    });
}

/// Registers `key` and evicts it on a new thread, whose deregistration lasts until the returned
/// sender is dropped.
fn evict_until_dropped<'s>(
    scope: &'s thread::Scope<'s, '_>,
    (cache, records): (&'s Cache<RecordingBackend>, &CallRecords),
    key: &Key,
) -> mpsc::Sender<()> {
    let (sender, receiver) = mpsc::channel::<()>();
    drop(cache.get_or_register(key).unwrap());
    *records.deregistering.meanwhile.lock() =
        Some(Box::new(move || assert!(receiver.recv().is_err())));
    scope.spawn(|| cache.evict_idle());
    until(|| records.deregistering.meanwhile.lock().is_none());
    sender
}

/// CACHE-07
#[test]
fn reclaim_ends_while_other_threads_keep_evicting() {
    let (cache, records) = cache(Limits::default());
    thread::scope(|scope| {
        let mut last = evict_until_dropped(scope, (&cache, &records), &key(0, PAGE));
        let reclaiming = spawn_asleep(scope, || true, || cache.reclaim());
        assert!(!reclaiming.is_finished(), "a deregistration began before");
        for page in 1.. {
            let next = evict_until_dropped(scope, (&cache, &records), &key(page * PAGE, PAGE));
            drop(std::mem::replace(&mut last, next));
            if reclaiming.is_finished() {
                break;
            }
            assert!(page < 10_000, "reclaim waits for ever");
        }
    });
    assert_empty(&records);
}

/// CACHE-07
#[test]
fn callback_runs_while_other_threads_keep_evicting() {
    let (cache, records) = cache(Limits::default());
    thread::scope(|scope| {
        let first = evict_until_dropped(scope, (&cache, &records), &key(0, PAGE));
        let (sender, called) = mpsc::channel::<()>();
        cache.invalidate_with_callback(range(8 * PAGE, PAGE), move || drop(sender));
        let second = evict_until_dropped(scope, (&cache, &records), &key(PAGE, PAGE));
        assert_eq!(called.try_recv(), Err(TryRecvError::Empty));
        drop(first);
        until(|| called.try_recv() == Err(TryRecvError::Disconnected));
        assert_eq!(records.live(), 1, "the second deregistration has not ended");
        drop(second);
    });
    assert_empty(&records);
}

/// CACHE-07
#[test]
fn deregistration_that_uses_its_cache_does_not_wait_for_itself() {
    let (cache, records) = cache(Limits::default());
    let cache = Arc::new(cache);
    drop(cache.get_or_register(&key(0, PAGE)).unwrap());
    let shared = Arc::clone(&cache);
    *records.deregistering.meanwhile.lock() = Some(Box::new(move || {
        shared.reclaim();
        shared.evict_idle();
    }));
    let evicting = thread::spawn(move || cache.evict_idle());
    until(|| evicting.is_finished());
    evicting.join().unwrap();
    assert_empty(&records);
}

/// CACHE-07
#[test]
fn deregistration_does_not_wait_for_a_registration_that_waits_for_it() {
    let (cache, records) = cache(Limits::default());
    let cache = Arc::new(cache);
    drop(cache.get_or_register(&key(0, PAGE)).unwrap());
    let (begin, begun) = mpsc::channel::<()>();
    let shared = Arc::clone(&cache);
    let (sender, receiver) = mpsc::channel();
    *records.deregistering.meanwhile.lock() = Some(Box::new(move || {
        begun.recv().expect("the test sends");
        let lease = shared.get_or_register(&key(PAGE, PAGE)).expect("uncached");
        sender.send(lease.uncached_reason().expect("uncached").to_string()).expect("received");
    }));
    let evicting = Arc::clone(&cache);
    let evicting = thread::spawn(move || evicting.evict_idle());
    until(|| records.deregistering.meanwhile.lock().is_none());
    // The registration has no room and waits for the deregistration.
    records.fail_next(ErrorKind::OutOfResources);
    let registering = Arc::clone(&cache);
    let registering = thread::spawn(move || {
        registering.get_or_register(&key(PAGE, PAGE)).map(|lease| lease.uncached_reason().is_none())
    });
    until(|| records.registrations.load(Ordering::SeqCst) == 2);
    begin.send(()).expect("the deregistration receives");
    until(|| evicting.is_finished() && registering.is_finished());
    let reason = receiver.recv().expect("the deregistration looked up");
    assert_eq!(reason, "a deregistration cannot wait for another thread");
    assert!(registering.join().unwrap().expect("registered after the deregistration"));
    evicting.join().unwrap();
    drop(cache);
    assert_empty(&records);
}

#[test]
fn try_clear_includes_entries_invalidated_meanwhile() {
    // Either the worker or this thread may reclaim the entry first.
    for _ in 0..200 {
        let (cache, records) = cache(Limits::default());
        let cache = Arc::new(cache);
        cache.get_or_register(&key(0, PAGE)).unwrap();
        let leased = cache.get_or_register_owned(&key(PAGE, PAGE)).unwrap();
        let its = Arc::clone(&cache);
        *records.deregistering.meanwhile.lock() = Some(Box::new(move || {
            drop(leased);
            its.invalidate(range(PAGE, PAGE));
        }));
        cache.try_clear().unwrap();
        assert_eq!(records.live(), 0);
    }
}

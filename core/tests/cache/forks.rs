//! Tests that forked children neither use nor change entries of the parent.

use std::{
    cell::Cell,
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use hmem_core::cache::{Limits, UncachedReason};

use crate::support::*;

/// Runs `child` in a fork and returns its exit status. The child may allocate memory, because
/// glibc's allocator works after a fork.
fn in_fork(child: impl FnOnce() -> bool) -> i32 {
    // SAFETY: the child runs the closure and leaves by `_exit`.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let fine = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(false);
        // SAFETY: `_exit` runs no destructor of the parent's objects.
        unsafe { libc::_exit(i32::from(!fine)) };
    }
    assert!(pid > 0, "fork failed");
    let mut status = 0;
    let end = Instant::now() + Duration::from_secs(60);
    // SAFETY: waits for the child that was just forked, without blocking, since a hang is a
    // failure.
    while unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) } != pid {
        if Instant::now() > end {
            // SAFETY: the child was not waited for yet, so that its number is not reused.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            panic!("the child hangs");
        }
        std::thread::yield_now();
    }
    status
}

/// MON-06
#[test]
fn forked_child_neither_uses_nor_changes_entries_of_its_parent() {
    let (cache, records) = cache(Limits::default());
    let held = cache.get_or_register(&key(0, PAGE)).unwrap();
    let id = held.id;
    records.unwatchable.store(true, Ordering::SeqCst);
    let uncached = cache.get_or_register(&key(PAGE, PAGE)).unwrap();
    assert!(uncached.uncached_reason().is_some());
    records.unwatchable.store(false, Ordering::SeqCst);
    let before = cache.lookup_handle();
    let parent = process::id();
    let status = in_fork(|| {
        let mine = cache.get_or_register(&key(0, PAGE)).unwrap();
        let fresh = mine.id != id && matches!(mine.uncached_reason(), Some(UncachedReason::Forked));
        let unseen =
            cache.find(&key(0, PAGE)).is_none() && cache.entries(|region| region.id).is_empty();
        cache.invalidate(range(0, PAGE));
        cache.reclaim();
        cache.evict_idle();
        // The child registered nothing yet, and deregistered no region of the parent.
        let untouched = records.deregistrations.load(Ordering::SeqCst) == 0;
        let handle = cache.lookup_handle();
        let also = handle.get_or_register(&key(0, PAGE)).unwrap();
        let also_fresh = matches!(also.uncached_reason(), Some(UncachedReason::Forked));
        let copied = before.get_or_register(&key(0, PAGE)).unwrap();
        let also_fresh =
            also_fresh && matches!(copied.uncached_reason(), Some(UncachedReason::Forked));
        let copies = [mine.id, also.id, copied.id];
        drop((mine, also, copied, handle));
        let released = !copies.iter().any(|copy| records.registered.lock().contains_key(copy));
        // Drops copies of the parent's lease and cache.
        // SAFETY: the originals are in the parent. This process exits without using them again.
        unsafe {
            drop(std::ptr::read(&raw const held));
            drop(std::ptr::read(&raw const uncached));
            drop(std::ptr::read(&raw const before));
            drop(std::ptr::read(&raw const cache));
        }
        // The child deregistered its own regions and none of the parent.
        process::id() != parent
            && fresh
            && unseen
            && also_fresh
            && released
            && untouched
            && records.deregistrations.load(Ordering::SeqCst) == copies.len()
            && records.live() == 2
    });
    assert_eq!(status, 0);
    assert!(!held.is_invalidated());
    assert_eq!(cache.get_or_register(&key(0, PAGE)).unwrap().id, id);
    drop((held, uncached, before));
    cache.invalidate(range(0, PAGE));
    cache.reclaim();
    assert_eq!(records.live(), 0);
}

/// CACHE-13
#[test]
fn grandchild_deregisters_no_region_of_its_parent() {
    let (cache, records) = cache(Limits::default());
    let status = in_fork(|| {
        let mine = cache.get_or_register(&key(0, PAGE)).unwrap();
        let id = mine.id;
        let status = in_fork(|| {
            let its_own = cache.get_or_register(&key(0, PAGE)).unwrap();
            // SAFETY: the original is in the parent. This process exits without using it again.
            drop(unsafe { std::ptr::read(&raw const mine) });
            let kept = records.live() == 2 && records.deregistrations.load(Ordering::SeqCst) == 0;
            drop(its_own);
            kept && records.live() == 1 && records.registered.lock().contains_key(&id)
        });
        drop(mine);
        status == 0 && records.live() == 0
    });
    assert_eq!(status, 0);
    assert_eq!(
        records.registrations.load(Ordering::SeqCst),
        0,
        "children have records of their own"
    );
}

/// CACHE-13
#[test]
fn failed_deregistration_in_a_child_does_not_hang() {
    let (cache, records) = cache(Limits::default());
    let status = in_fork(|| {
        let mine = cache.get_or_register(&key(0, PAGE)).unwrap();
        records.refusing.store(1, Ordering::SeqCst);
        drop(mine);
        records.live() == 1 && records.refusing.load(Ordering::SeqCst) == 0
    });
    assert_eq!(status, 0);
}

/// MON-06
#[test]
fn fork_beside_working_threads_does_not_deadlock() {
    let (cache, _records) = cache(limits(16));
    let stop = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        for thread in 0..2_u64 {
            let (cache, stop) = (&cache, Arc::clone(&stop));
            scope.spawn(move || {
                let mut page = thread;
                while !stop.load(Ordering::Relaxed) {
                    page = (page * 7 + 3) % 64;
                    cache.get_or_register(&key(page * PAGE, PAGE)).unwrap();
                }
            });
        }
        for _ in 0..50 {
            let status = in_fork(|| {
                let lease = cache.find(&key(0, PAGE));
                cache.invalidate(range(0, 64 * PAGE));
                cache.reclaim();
                let empty = cache.statistics() == hmem_core::cache::CacheStatistics::default();
                lease.is_none() && empty && cache.try_clear().is_ok()
            });
            assert_eq!(status, 0);
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// CACHE-13
#[test]
fn child_forked_while_the_lock_is_held_does_not_hang() {
    let (cache, records) = cache(Limits::default());
    let listed = cache.get_or_register(&key(0, PAGE)).unwrap();
    let before = cache.lookup_handle();
    let (locked, is_locked) = mpsc::channel();
    let (unlock, may_unlock) = mpsc::channel();
    std::thread::scope(|scope| {
        let lists = &cache;
        scope.spawn(move || {
            // `entries` calls the closure under the lock.
            lists.entries(|_| {
                locked.send(()).expect("the test waits");
                // The wait also ends if the test fails before it sends.
                let _released = may_unlock.recv();
            });
        });
        is_locked.recv().expect("the lock is held");
        let unlock = unlock;
        let status = in_fork(|| {
            let leases =
                [cache.get_or_register(&key(0, PAGE)), before.get_or_register(&key(0, PAGE))];
            let registered = records.live() == 3;
            drop(leases);
            let handle = cache.lookup_handle();
            drop(handle.get_or_register(&key(PAGE, PAGE)));
            cache.invalidate(range(0, PAGE));
            cache.reclaim();
            cache.evict_idle();
            drop(handle);
            registered && records.live() == 1 && cache.try_clear().is_ok()
        });
        unlock.send(()).expect("the thread waits");
        assert_eq!(status, 0);
    });
    drop(listed);
}

/// MON-06
#[test]
fn child_that_opens_the_gate_its_parent_closed_stays_without_hits() {
    let (cache, _records) = cache(Limits::default());
    drop(cache.get_or_register(&key(0, PAGE)).unwrap());
    let invalidator = cache.invalidator();
    let closed = Cell::new(Some(invalidator.close_gate()));
    let status = in_fork(|| {
        // The child has a copy of the token.
        invalidator.open_gate(closed.take().unwrap());
        let fresh = cache.get_or_register(&key(0, PAGE)).unwrap();
        matches!(fresh.uncached_reason(), Some(UncachedReason::Forked))
            && cache.find(&key(0, PAGE)).is_none()
    });
    assert_eq!(status, 0);
    invalidator.open_gate(closed.take().unwrap());
    assert!(cache.find(&key(0, PAGE)).is_some());
}

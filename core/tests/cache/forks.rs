//! A forked child has nothing of the parent's, and takes nothing from it.

use std::{
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use hmem_core::cache::{Limits, Uncached};

use crate::support::*;

/// Runs `child` in a fork and returns its exit status; it must not allocate more than the allocator
/// survives in a fork (glibc's does survive one).
fn in_fork(child: impl FnOnce() -> bool) -> i32 {
    // SAFETY: the child runs the closure and leaves by `_exit`.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let fine = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(false);
        // SAFETY: leaves without running what belongs to the parent.
        unsafe { libc::_exit(i32::from(!fine)) };
    }
    assert!(pid > 0, "fork failed");
    let mut status = 0;
    let end = Instant::now() + Duration::from_secs(60);
    // SAFETY: waits for the child that was just made, without blocking: a hang is a failure.
    while unsafe { libc::waitpid(pid, &mut status, libc::WNOHANG) } != pid {
        if Instant::now() > end {
            // SAFETY: the child was not waited for yet, so that the number is still its own.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            panic!("the child hangs");
        }
        std::thread::yield_now();
    }
    status
}

/// MON-06
#[test]
fn a_forked_child_uses_no_entry_and_the_parent_is_undisturbed() {
    let (cache, books) = cache(Limits::default());
    let held = cache.get(&key(0, PAGE)).unwrap();
    let id = held.id;
    books.unwatchable.store(true, Ordering::SeqCst);
    let alone = cache.get(&key(PAGE, PAGE)).unwrap();
    assert!(alone.uncached().is_some());
    books.unwatchable.store(false, Ordering::SeqCst);
    let before = cache.burst();
    let parent = process::id();
    let status = in_fork(|| {
        let mine = cache.get(&key(0, PAGE)).unwrap();
        let fresh = mine.id != id && matches!(mine.uncached(), Some(Uncached::Forked));
        let unseen =
            cache.find(&key(0, PAGE)).is_none() && cache.entries(|region| region.id).is_empty();
        cache.invalidate(range(0, PAGE));
        cache.flush();
        cache.clear();
        // The child registered nothing yet, and deregistered nothing of the parent's.
        let untouched = books.deregistrations.load(Ordering::SeqCst) == 0;
        let burst = cache.burst();
        let also = burst.get(&key(0, PAGE)).unwrap();
        let also_fresh = matches!(also.uncached(), Some(Uncached::Forked));
        let copied = before.get(&key(0, PAGE)).unwrap();
        let also_fresh = also_fresh && matches!(copied.uncached(), Some(Uncached::Forked));
        let copies = [mine.id, also.id, copied.id];
        drop((mine, also, copied, burst));
        let released = !copies.iter().any(|copy| books.registered.lock().contains_key(copy));
        // A copy of the parent's lease and of its cache, dropped.
        // SAFETY: the originals are in the parent; this process leaves without using them again.
        unsafe {
            drop(std::ptr::read(&raw const held));
            drop(std::ptr::read(&raw const alone));
            drop(std::ptr::read(&raw const before));
            drop(std::ptr::read(&raw const cache));
        }
        // The child has deregistered its own registrations, and none of the parent's.
        process::id() != parent
            && fresh
            && unseen
            && also_fresh
            && released
            && untouched
            && books.deregistrations.load(Ordering::SeqCst) == copies.len()
            && books.live() == 2
    });
    assert_eq!(status, 0);
    assert!(!held.is_dead());
    assert_eq!(cache.get(&key(0, PAGE)).unwrap().id, id);
    drop((held, alone, before));
    cache.invalidate(range(0, PAGE));
    cache.flush();
    assert_eq!(books.live(), 0);
}

/// CACHE-13
#[test]
fn a_child_of_a_child_deregisters_nothing_that_its_parent_registered() {
    let (cache, books) = cache(Limits::default());
    let status = in_fork(|| {
        let mine = cache.get(&key(0, PAGE)).unwrap();
        let status = in_fork(|| {
            let its_own = cache.get(&key(0, PAGE)).unwrap();
            // SAFETY: the original is in the parent; this process leaves without using it again.
            drop(unsafe { std::ptr::read(&raw const mine) });
            let kept = books.live() == 2 && books.deregistrations.load(Ordering::SeqCst) == 0;
            drop(its_own);
            kept && books.live() == 1 && books.registered.lock().contains_key(&mine.id)
        });
        drop(mine);
        status == 0 && books.live() == 0
    });
    assert_eq!(status, 0);
    assert_eq!(books.registrations.load(Ordering::SeqCst), 0, "children have books of their own");
}

/// CACHE-13
#[test]
fn a_region_that_a_child_cannot_deregister_is_no_hang() {
    let (cache, books) = cache(Limits::default());
    let status = in_fork(|| {
        let mine = cache.get(&key(0, PAGE)).unwrap();
        books.refusing.store(1, Ordering::SeqCst);
        drop(mine);
        books.live() == 1 && books.refusing.load(Ordering::SeqCst) == 0
    });
    assert_eq!(status, 0);
}

/// MON-06
#[test]
fn a_fork_in_the_middle_of_other_threads_work_deadlocks_on_nothing() {
    let (cache, _books) = cache(limits(16));
    let stop = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        for thread in 0..2_u64 {
            let (cache, stop) = (&cache, Arc::clone(&stop));
            scope.spawn(move || {
                let mut page = thread;
                while !stop.load(Ordering::Relaxed) {
                    page = (page * 7 + 3) % 64;
                    cache.get(&key(page * PAGE, PAGE)).unwrap();
                }
            });
        }
        for _ in 0..50 {
            let status = in_fork(|| {
                let lease = cache.find(&key(0, PAGE));
                cache.invalidate(range(0, 64 * PAGE));
                cache.flush();
                let empty = cache.statistics() == hmem_core::cache::Statistics::default();
                lease.is_none() && empty && cache.try_empty().is_ok()
            });
            assert_eq!(status, 0);
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// CACHE-13
#[test]
fn a_child_of_a_parent_whose_thread_holds_the_caches_lock_does_not_hang() {
    let (cache, books) = cache(Limits::default());
    let listed = cache.get(&key(0, PAGE)).unwrap();
    let before = cache.burst();
    let (locked, is_locked) = mpsc::channel();
    let (unlock, may_unlock) = mpsc::channel();
    std::thread::scope(|scope| {
        let lists = &cache;
        scope.spawn(move || {
            // The listing reads the regions under the lock.
            lists.entries(|_| {
                locked.send(()).expect("the test waits");
                // Also where the test ends before it says so.
                let _released = may_unlock.recv();
            });
        });
        is_locked.recv().expect("the lock is held");
        let unlock = unlock;
        let status = in_fork(|| {
            let leases = [cache.get(&key(0, PAGE)), before.get(&key(0, PAGE))];
            let registered = books.live() == 3;
            drop(leases);
            let burst = cache.burst();
            drop(burst.get(&key(PAGE, PAGE)));
            cache.invalidate(range(0, PAGE));
            cache.flush();
            cache.clear();
            drop(burst);
            registered && books.live() == 1 && cache.try_empty().is_ok()
        });
        unlock.send(()).expect("the thread waits");
        assert_eq!(status, 0);
    });
    drop(listed);
}

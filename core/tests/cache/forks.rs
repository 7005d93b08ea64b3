//! A forked child has nothing of the parent's, and takes nothing from it.

use std::{
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use hmem_core::cache::{Limits, Uncached};

use crate::support::*;

/// Runs `child` in a fork and returns its exit status; it must not allocate more than the allocator survives in a fork
/// (glibc's does survive one).
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
    // SAFETY: waits for the child that was just made.
    let waited = unsafe { libc::waitpid(pid, &mut status, 0) };
    assert_eq!(waited, pid);
    status
}

#[test]
fn mon_06_a_forked_child_uses_no_entry_and_the_parent_is_undisturbed() {
    let (cache, books) = cache(Limits::default());
    let held = cache.get(&key(0, PAGE)).unwrap();
    let id = held.id;
    let parent = process::id();
    let status = in_fork(|| {
        let mine = cache.get(&key(0, PAGE)).unwrap();
        let fresh = mine.id != id && matches!(mine.uncached(), Some(Uncached::Forked));
        let unseen =
            cache.find(&key(0, PAGE)).is_none() && cache.entries(|region| region.id).is_empty();
        cache.invalidate(range(0, PAGE));
        cache.flush();
        cache.clear();
        let burst = cache.burst();
        let also = burst.get(&key(0, PAGE)).unwrap();
        let also_fresh = matches!(also.uncached(), Some(Uncached::Forked));
        drop((mine, also, burst));
        // A copy of the parent's lease and of its cache, dropped.
        // SAFETY: the originals are in the parent; this process leaves without using them again.
        unsafe {
            drop(std::ptr::read(&raw const held));
            drop(std::ptr::read(&raw const cache));
        }
        // Nothing was deregistered of what the parent registered.
        process::id() != parent
            && fresh
            && unseen
            && also_fresh
            && books.deregistrations.load(Ordering::SeqCst) == 0
    });
    assert_eq!(status, 0);
    assert!(!held.is_dead());
    assert_eq!(cache.get(&key(0, PAGE)).unwrap().id, id);
    drop(held);
    cache.invalidate(range(0, PAGE));
    cache.flush();
    assert_eq!(books.live(), 0);
}

#[test]
fn mon_06_a_fork_in_the_middle_of_other_threads_work_deadlocks_on_nothing() {
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

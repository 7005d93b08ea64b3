//! Tests for stale hits: cache lookups that return a registration of memory that was replaced
//! since. Without a monitor they occur, which shows that the tests can detect them. With a monitor,
//! no change that the monitor detects leads to a stale hit.
//!
//! A registration in these tests stores the first word of the memory, as a NIC stores page
//! addresses. New memory reads as zero until the test writes the number of the round to it. So a
//! registration with the number of an earlier round is stale.
#![allow(missing_docs)]

#[path = "monitors/mod.rs"]
mod monitors;

use std::{
    ptr,
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
};

use hmem_core::{
    Access, Error, ErrorKind, Rejected, Result,
    cache::{Cache, CacheBackend, Key, Limits, UncachedReason},
    monitor::{Invalidator, Monitor, Subscription},
};
use hmem_iface_system::monitor::{Layered, MemHooks};
use monitors::*;

cases! {
    without_a_monitor_every_cause_leaves_stale_hits,
    /// ARM-04
    memhooks_leave_no_stale_hits_for_any_thread,
    userfaultfd_leaves_no_stale_hits_for_the_unmapping_thread,
    discarded_page_is_no_stale_hit_under_userfaultfd,
    discarded_page_is_no_stale_hit_under_both,
    page_in_a_pending_discard_is_uncached_with_the_reason,
    memhooks_and_userfaultfd_leave_no_stale_hits;
    slow: discarded_page_is_no_stale_hit_in_many_rounds,
}

/// A cache back end for which registering memory means reading its first word. The region is that
/// word. Registering unmapped memory fails.
struct SnapshotBackend(Option<Arc<dyn Monitor>>);

impl CacheBackend for SnapshotBackend {
    type Region = u64;
    type Watch = Option<Subscription>;
    type Owner = ();

    fn watch(&self, key: &Key, invalidator: &Arc<dyn Invalidator>) -> Result<Self::Watch> {
        let subscribe =
            |monitor: &Arc<dyn Monitor>| monitor.subscribe(key.range(), Arc::clone(invalidator));
        self.0.as_ref().map(subscribe).transpose()
    }

    fn unwatch(&self, watch: Self::Watch) {
        if let (Some(monitor), Some(subscription)) = (&self.0, watch) {
            monitor.unsubscribe(subscription);
        }
    }

    fn register(&self, key: &Key, (): &(), _: Option<&Self::Watch>) -> Result<u64> {
        let mut word = 0_u64;
        let local = libc::iovec { iov_base: (&raw mut word).cast(), iov_len: 8 };
        let start = ptr::with_exposed_provenance_mut(key.range().start().0 as usize);
        let remote = libc::iovec { iov_base: start, iov_len: 8 };
        // SAFETY: the kernel checks the addresses, and writes only to `word`.
        let read = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
        if read == 8 { Ok(word) } else { Err(Error::new(ErrorKind::BadAddress, "register")) }
    }

    fn deregister(&self, _: u64) -> Result<(), Rejected<u64>> {
        Ok(())
    }
}

/// A function that replaces the page at an address by a new page, which reads as zero.
type Replace = fn(*mut libc::c_void);

const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
const FIXED: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;

fn map_at(at: *mut libc::c_void) {
    // SAFETY: the page belongs to the test, or the test has just unmapped it and no other thread of
    // this process maps memory there.
    assert_eq!(unsafe { libc::mmap(at, page(), RW, FIXED, -1, 0) }, at);
}

const HOOKED: [(&str, Replace); 4] = [
    ("MAP_FIXED", map_at),
    // SAFETY: the page belongs to the test, and no reference to it exists.
    ("madvise", |at| assert_eq!(unsafe { libc::madvise(at, page(), libc::MADV_DONTNEED) }, 0)),
    ("munmap", |at| {
        unmap(at, page());
        raw_map_at(at);
    }),
    ("mremap", |at| {
        let fixed = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let elsewhere = map(page());
        // SAFETY: the pages belong to the test, and no reference to them exists.
        assert_eq!(unsafe { libc::mremap(at, page(), page(), fixed, elsewhere) }, elsewhere);
        raw_map_at(at);
        unmap(elsewhere, page());
    }),
];

const RAW: [(&str, Replace); 2] = [
    ("raw munmap", |at| {
        raw_unmap(at, page());
        raw_map_at(at);
    }),
    ("raw madvise", |at| {
        // SAFETY: the page belongs to the test, and no reference to it exists.
        assert_eq!(unsafe { libc::syscall(libc::SYS_madvise, at, page(), libc::MADV_DONTNEED) }, 0);
    }),
];

/// Discards a page of this process by `process_madvise`. Returns false if the kernel (before Linux
/// 6.13) or the C library does not support the call.
fn discard_by_process_madvise(at: *mut libc::c_void) -> bool {
    type ProcessMadvise =
        unsafe extern "C" fn(i32, *const libc::iovec, usize, i32, u32) -> libc::ssize_t;
    // SAFETY: the name is a C string.
    let function = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"process_madvise".as_ptr()) };
    if function.is_null() {
        return false;
    }
    // SAFETY: the type has the signature of `process_madvise(2)`, of which this is the address.
    let function = unsafe { std::mem::transmute::<*mut libc::c_void, ProcessMadvise>(function) };
    let range = libc::iovec { iov_base: at, iov_len: page() };
    // SAFETY: the call creates an fd and touches no memory.
    let own = unsafe { libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0) } as i32;
    assert!(own >= 0);
    // SAFETY: the page belongs to the test, and no reference to it exists.
    let done = unsafe { function(own, &raw const range, 1, libc::MADV_DONTNEED, 0) };
    let why = std::io::Error::last_os_error();
    // SAFETY: this function has opened the fd, and nothing else uses it.
    unsafe { libc::close(own) };
    assert!(done == page() as isize || why.raw_os_error() == Some(libc::EINVAL), "{why}");
    done == page() as isize
}

/// Maps a page at an address without memory by a raw system call. Memhooks do not see this call, so
/// they only see the change under test.
fn raw_map_at(at: *mut libc::c_void) {
    // SAFETY: the page belongs to the test, or the test has just unmapped it and no other thread of
    // this process maps memory there.
    let mapped = unsafe { libc::syscall(libc::SYS_mmap, at, page(), RW, FIXED, -1, 0) };
    assert_eq!(mapped as usize, at.addr());
}

/// Replaces a page and looks it up in the cache, `rounds` times. If `adversary` is set, a second
/// thread looks the page up continuously. Returns the number of stale hits (lookups that returned a
/// registration of an earlier round), and the number of invalidated entries.
fn stale_hits(
    monitor: Option<Arc<dyn Monitor>>,
    replace: Replace,
    rounds: u64,
    adversary: bool,
) -> (u64, u64) {
    let cache = Cache::new(SnapshotBackend(monitor), Limits::default()).unwrap();
    let at = map(page());
    let key = Key::new(range(at, page()), Access::SEND).unwrap();
    let (running, looked) = (AtomicBool::new(true), AtomicU64::new(0));
    let mut stale = 0;
    thread::scope(|scope| {
        let _stop = Stop(&running);
        if adversary {
            scope.spawn(|| {
                while running.load(SeqCst) {
                    // This lookup may register the page during a change. It fails if the page is
                    // unmapped.
                    drop(cache.get_or_register(&key));
                    looked.fetch_add(1, SeqCst);
                }
            });
        }
        for round in 1..=rounds {
            // The loop waits until the second thread has run, even if there is only one CPU.
            let before = looked.load(SeqCst);
            while adversary && round % 16 == 1 && looked.load(SeqCst) == before {
                thread::yield_now();
            }
            replace(at);
            // SAFETY: the page belongs to the test, and other threads only read it through the
            // kernel.
            unsafe { at.cast::<u64>().write_volatile(round) };
            let lease = cache.get_or_register(&key).unwrap();
            stale += u64::from(![0, round].contains(&*lease));
        }
    });
    (stale, cache.statistics().all_invalidations())
}

/// A guard that clears a flag on drop. A helper thread runs while the flag is set, so it ends even
/// if the test panics.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(false, SeqCst);
    }
}

fn none(monitor: &Arc<dyn Monitor>, causes: &[(&str, Replace)], adversary: bool) {
    const ROUNDS: u64 = 2_000;
    for (cause, replace) in causes {
        let (stale, invalidated) =
            stale_hits(Some(Arc::clone(monitor)), *replace, ROUNDS, adversary);
        assert_eq!(stale, 0, "{cause} under {}", monitor.name());
        assert!(
            invalidated > ROUNDS / 10,
            "{cause}: {invalidated} of {ROUNDS}: the page was rarely cached"
        );
    }
}

fn without_a_monitor_every_cause_leaves_stale_hits() {
    for (cause, replace) in HOOKED.iter().chain(&RAW) {
        assert!(stale_hits(None, *replace, 100, false).0 > 0, "{cause}");
    }
    // Memhooks do not detect raw system calls.
    let hooks: Arc<dyn Monitor> = MemHooks::start().unwrap();
    for (cause, replace) in RAW {
        assert!(stale_hits(Some(Arc::clone(&hooks)), replace, 100, false).0 > 0, "{cause}");
    }
}

fn memhooks_leave_no_stale_hits_for_any_thread() {
    let hooks: Arc<dyn Monitor> = MemHooks::start().unwrap();
    none(&hooks, &HOOKED, false);
    none(&hooks, &HOOKED, true);
}

fn userfaultfd_leaves_no_stale_hits_for_the_unmapping_thread() {
    let events: Arc<dyn Monitor> = start_userfaultfd();
    none(&events, &HOOKED, false);
    none(&events, &RAW, false);
}

fn memhooks_and_userfaultfd_leave_no_stale_hits() {
    let both: Arc<dyn Monitor> = Layered::new(MemHooks::start().unwrap(), start_userfaultfd());
    none(&both, &HOOKED, true);
    none(&both, &RAW, false);
}

const DISCARDS: [(&str, Replace); 2] = [HOOKED[1], RAW[1]];

/// Counts stale hits: lookups after a discard that return the registration of the old page. In each
/// round this thread discards a cached page while a second thread looks the page up continuously.
fn stale_after_discards(monitor: &Arc<dyn Monitor>, discard: Replace, rounds: u64) -> u64 {
    let cache = Cache::new(SnapshotBackend(Some(Arc::clone(monitor))), Limits::default()).unwrap();
    let at = map(page());
    let key = Key::new(range(at, page()), Access::SEND).unwrap();
    let (begin, end, over) = (Barrier::new(2), Barrier::new(2), AtomicBool::new(false));
    let mut stale = 0;
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..rounds {
                begin.wait();
                while !over.load(SeqCst) {
                    drop(cache.get_or_register(&key).unwrap());
                }
                end.wait();
            }
        });
        for round in 1..=rounds {
            // SAFETY: the page belongs to the test, and other threads only read it through the
            // kernel.
            unsafe { at.cast::<u64>().write_volatile(round) };
            // The second thread sleeps, so the pending discard ends and the page is cached again.
            cache.invalidate(key.range());
            while cache.get_or_register(&key).unwrap().uncached_reason().is_some() {
                thread::yield_now();
            }
            over.store(false, SeqCst);
            begin.wait();
            discard(at);
            stale += u64::from(*cache.get_or_register(&key).unwrap() == round);
            over.store(true, SeqCst);
            end.wait();
        }
    });
    unmap(at, page());
    stale
}

fn discards(monitor: &Arc<dyn Monitor>, rounds: u64) {
    for (cause, discard) in DISCARDS {
        let stale = stale_after_discards(monitor, discard, rounds);
        assert_eq!(stale, 0, "{cause} under {}", monitor.name());
    }
}

/// MON-01
fn discarded_page_is_no_stale_hit_under_userfaultfd() {
    let events: Arc<dyn Monitor> = start_userfaultfd();
    discards(&events, 1_000);
}

/// MON-01
fn discarded_page_is_no_stale_hit_under_both() {
    let both: Arc<dyn Monitor> = Layered::new(MemHooks::start().unwrap(), start_userfaultfd());
    discards(&both, 1_000);
}

/// MON-01
fn discarded_page_is_no_stale_hit_in_many_rounds() {
    // SAFETY: the call only ends the timer of this process, because the case takes long.
    unsafe { libc::alarm(0) };
    let events: Arc<dyn Monitor> = start_userfaultfd();
    discards(&events, 50_000);
    let both: Arc<dyn Monitor> = Layered::new(MemHooks::start().unwrap(), start_userfaultfd());
    discards(&both, 50_000);
}

/// MON-01
fn page_in_a_pending_discard_is_uncached_with_the_reason() {
    let both: Arc<dyn Monitor> = Layered::new(MemHooks::start().unwrap(), start_userfaultfd());
    let cache = Cache::new(SnapshotBackend(Some(both)), Limits::default()).unwrap();
    let at = map(2 * page());
    let key = |index| {
        Key::new(range(at.wrapping_byte_add(index * page()), page()), Access::SEND).unwrap()
    };
    let cached = |index| cache.get_or_register(&key(index)).unwrap().uncached_reason().is_none();
    let (running, goes_on) = (AtomicBool::new(false), AtomicBool::new(true));
    thread::scope(|scope| {
        scope.spawn(|| {
            running.store(true, SeqCst);
            while goes_on.load(SeqCst) {
                std::hint::spin_loop();
            }
        });
        let _stop = Stop(&goes_on);
        while !running.load(SeqCst) {
            thread::yield_now();
        }
        assert!(cached(0) && cached(1));
        // The hooks notify after the C library's `madvise`, so the page is cached again at once.
        let ((_, hooked), (_, raw)) = (DISCARDS[0], DISCARDS[1]);
        hooked(at);
        assert!(cached(0), "after the C library's madvise");
        raw(at);
        let lease = cache.get_or_register(&key(0)).unwrap();
        let Some(UncachedReason::Unwatched(why)) = lease.uncached_reason() else {
            panic!("{lease:?}")
        };
        assert!(why.is_busy() && why.to_string().contains("madvise"), "{why}");
        assert!(cached(1), "the page beside it");
        // The hooks do not know which pages this call discards, so they invalidate all entries. The
        // lease keeps the page watched. Otherwise the cache could unsubscribe before the kernel
        // discards the page, and there would be no event.
        let _watched = cache.get_or_register(&key(1)).unwrap();
        if discard_by_process_madvise(at.wrapping_byte_add(page())) {
            assert!(!cached(1), "after the C library's process_madvise");
        }
    });
    while !cached(0) {
        thread::yield_now();
    }
}

//! Tests a cache after the kernel began to refuse `membarrier(2)`. The test has a process of its
//! own, because the seccomp filter is for the whole process and cannot be removed.

use std::{
    collections::BTreeSet,
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use hmem_core::{
    Access, Address, AddressRange, Rejected, Result,
    cache::{Cache, CacheBackend, Key, Limits, UncachedReason},
    monitor::Invalidator,
};
use parking_lot::{Condvar, Mutex};

const PAGE: u64 = 4096;

/// The records of the tests' backend, which uses numbers as regions.
#[derive(Default)]
struct BackendRecords {
    next: AtomicU64,
    live: Mutex<BTreeSet<u64>>,
    /// The number of deregistrations that a cache's worker began.
    by_worker: AtomicUsize,
    /// True to make deregistrations by the worker wait.
    held: Mutex<bool>,
    released: Condvar,
}

impl BackendRecords {
    fn live(&self) -> usize {
        self.live.lock().len()
    }

    fn by_worker(&self) -> usize {
        self.by_worker.load(Ordering::SeqCst)
    }
}

/// A guard that makes a worker wait in a deregistration. Dropping the guard releases the worker, so
/// that the drop of the cache does not wait forever if the test fails.
struct WorkerHold(Arc<BackendRecords>);

impl WorkerHold {
    fn hold(books: &Arc<BackendRecords>) -> Self {
        *books.held.lock() = true;
        Self(Arc::clone(books))
    }
}

impl Drop for WorkerHold {
    fn drop(&mut self) {
        *self.0.held.lock() = false;
        self.0.released.notify_all();
    }
}

struct Numbers(Arc<BackendRecords>);

impl CacheBackend for Numbers {
    type Region = u64;
    type Watch = ();
    type Owner = ();

    fn watch(&self, _: &Key, _: &Arc<dyn Invalidator>) -> Result<()> {
        Ok(())
    }

    fn unwatch(&self, (): ()) {}

    fn register(&self, _: &Key, (): &(), _: Option<&Self::Watch>) -> Result<u64> {
        let region = self.0.next.fetch_add(1, Ordering::SeqCst);
        self.0.live.lock().insert(region);
        Ok(region)
    }

    fn deregister(&self, region: u64) -> Result<(), Rejected<u64>> {
        if thread::current().name() == Some("hmem-cache") {
            self.0.by_worker.fetch_add(1, Ordering::SeqCst);
            let mut held = self.0.held.lock();
            while *held {
                self.0.released.wait(&mut held);
            }
        }
        assert!(self.0.live.lock().remove(&region), "deregistered twice");
        Ok(())
    }
}

fn range(page: u64, pages: u64) -> AddressRange {
    AddressRange::new(Address(page * PAGE), pages * PAGE).expect("no wrap")
}

fn key(page: u64) -> Key {
    Key::new(range(page, 1), Access::SEND).expect("a key")
}

/// Creates a cache with idle entries for the pages 0 to `pages` - 1.
fn cache(max_count: usize, pages: u64) -> (Cache<Numbers>, Arc<BackendRecords>) {
    let books = Arc::<BackendRecords>::default();
    let limits = Limits { max_count, ..Limits::default() };
    let cache = Cache::new(Numbers(Arc::clone(&books)), limits).expect("a cache");
    (0..pages).for_each(|page| drop(cache.get_or_register(&key(page)).expect("registered")));
    (cache, books)
}

fn is_closed(cache: &Cache<Numbers>) -> bool {
    matches!(
        cache.get_or_register(&key(1 << 20)).expect("registered").uncached_reason(),
        Some(UncachedReason::MembarrierRefused)
    )
}

fn until(is_so: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "waited in vain");
        thread::yield_now();
    }
}

/// Makes the kernel refuse `membarrier(2)` to every thread of the process.
fn refuse_membarrier() -> io::Result<()> {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let load_number = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let if_equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let answer = libc::BPF_RET | libc::BPF_K;
    let mut program = [
        // The system call's number is the first field of `struct seccomp_data`.
        statement(load_number, 0),
        libc::sock_filter { jf: 1, ..statement(if_equal, libc::SYS_membarrier as u32) },
        statement(answer, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        statement(answer, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the first call takes only numbers. The second reads the program, which outlives the
    // call.
    let refused = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
            || libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                libc::SECCOMP_FILTER_FLAG_TSYNC,
                &raw const program,
            ) != 0
    };
    if refused { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[test]
fn membarrier_refused_later_closes_the_cache_and_frees_nothing() {
    use rustix::thread::{MembarrierCommand, membarrier};

    let (collected, collected_books) = cache(100, 1);
    let (evicted, evicted_books) = cache(2, 2);
    let (cleared, cleared_books) = cache(100, 2);
    let (worked, worked_books) = cache(100, 2);
    let (tidied, tidied_books) = cache(100, 20);
    // The worker of this cache waits in a deregistration until `held` is dropped.
    let held = WorkerHold::hold(&tidied_books);
    tidied.invalidate(range(19, 1));
    until(|| tidied_books.by_worker() == 1);
    // From here on, lookup handles own lease blocks too, so that the caches need the heavy barrier.
    let others = (
        evicted.lookup_handle(),
        cleared.lookup_handle(),
        worked.lookup_handle(),
        tidied.lookup_handle(),
    );

    membarrier(MembarrierCommand::PrivateExpedited).expect("the caches use membarrier(2)");
    refuse_membarrier().expect("a filter");
    membarrier(MembarrierCommand::PrivateExpedited).expect_err("the filter refuses it");

    // A miss tries to evict an entry, and learns of the refusal. The new region is uncached, and
    // the idle entries stay.
    assert!(!is_closed(&evicted), "the cache does not know yet");
    assert_eq!(evicted_books.live(), 2);
    assert!(is_closed(&evicted));
    assert!(evicted.find(&key(0)).is_none());
    assert_eq!((evicted_books.live(), evicted.statistics().evictions), (2, 0));

    // `evict_idle` learns of the refusal and evicts nothing.
    cleared.evict_idle();
    assert!(is_closed(&cleared));
    assert_eq!((cleared_books.live(), cleared.statistics().evictions), (2, 0));

    // A miss learns of the refusal when it tries to detach many invalidated entries.
    tidied.invalidate(range(0, 19));
    let lease = tidied.get_or_register(&key(100)).expect("registered");
    assert!(lease.uncached_reason().is_none());
    drop(lease);
    assert!(is_closed(&tidied));
    assert_eq!((tidied_books.live(), tidied.statistics().pending_reclaim), (21, 19));
    drop(held);

    // The worker learns of the refusal when it reclaims an invalidated entry.
    worked.invalidate(range(0, 1));
    until(|| is_closed(&worked));

    // `reclaim` learns of the refusal. However often the kernel refuses, the gate stays closed.
    collected.invalidate(range(0, 1));
    for _ in 0..40_000 {
        collected.reclaim();
    }
    assert!(is_closed(&collected));
    assert!(collected.find(&key(0)).is_none());
    assert_eq!((collected_books.live(), collected.statistics().pending_reclaim), (1, 1));

    // Without the handles, no thread can look up, so the drop of the caches needs no barrier.
    drop(others);
    let all = [
        (collected, collected_books, 0),
        (cleared, cleared_books, 0),
        (evicted, evicted_books, 0),
        (worked, worked_books, 0),
        (tidied, tidied_books, 1),
    ];
    for (number, (cache, books, by_worker)) in all.into_iter().enumerate() {
        drop(cache);
        assert_eq!((books.live(), books.by_worker()), (0, by_worker), "cache {number}");
    }
}

//! A cache whose `membarrier(2)` is refused after it worked; alone in its process, since the filter
//! that refuses it is the process's and cannot be taken back.

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
    cache::{Cache, Key, Limits, Source, Uncached},
    monitor::Invalidator,
};
use parking_lot::{Condvar, Mutex};

const PAGE: u64 = 4096;

/// Regions as numbers.
#[derive(Default)]
struct Books {
    next: AtomicU64,
    live: Mutex<BTreeSet<u64>>,
    /// Deregistrations that a cache's worker began.
    by_worker: AtomicUsize,
    /// Holds the worker in a deregistration.
    held: Mutex<bool>,
    released: Condvar,
}

impl Books {
    fn live(&self) -> usize {
        self.live.lock().len()
    }

    fn by_worker(&self) -> usize {
        self.by_worker.load(Ordering::SeqCst)
    }
}

/// Holds a worker as long as it lives: a failure must not leave the cache's end waiting for it.
struct Held(Arc<Books>);

impl Held {
    fn hold(books: &Arc<Books>) -> Self {
        *books.held.lock() = true;
        Self(Arc::clone(books))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        *self.0.held.lock() = false;
        self.0.released.notify_all();
    }
}

struct Numbers(Arc<Books>);

impl Source for Numbers {
    type Region = u64;
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

    fn register(&self, _: &Key) -> Result<u64> {
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

/// A cache with entries for pages 0 to `pages` - 1, all idle.
fn cache(max_count: usize, pages: u64) -> (Cache<Numbers>, Arc<Books>) {
    let books = Arc::<Books>::default();
    let limits = Limits { max_count, ..Limits::default() };
    let cache = Cache::new(Numbers(Arc::clone(&books)), limits).expect("a cache");
    (0..pages).for_each(|page| drop(cache.get(&key(page)).expect("registered")));
    (cache, books)
}

fn is_shut(cache: &Cache<Numbers>) -> bool {
    matches!(cache.get(&key(1 << 20)).expect("registered").uncached(), Some(Uncached::Shut))
}

fn until(is_so: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "waited in vain");
        thread::yield_now();
    }
}

/// Has the kernel refuse `membarrier(2)` to every thread of the process from now on.
fn refuse_membarrier() -> io::Result<()> {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let load_number = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let if_equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let answer = libc::BPF_RET | libc::BPF_K;
    let mut program = [
        // The number of the call stands first in `struct seccomp_data`.
        statement(load_number, 0),
        libc::sock_filter { jf: 1, ..statement(if_equal, libc::SYS_membarrier as u32) },
        statement(answer, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        statement(answer, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the first call takes numbers only. The second reads the program, which lives until it
    // returns.
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
fn a_membarrier_that_is_refused_later_closes_the_cache_and_frees_nothing() {
    use rustix::thread::{MembarrierCommand, membarrier};

    let (collected, collected_books) = cache(100, 1);
    let (evicted, evicted_books) = cache(2, 2);
    let (cleared, cleared_books) = cache(100, 2);
    let (worked, worked_books) = cache(100, 2);
    let (tidied, tidied_books) = cache(100, 20);
    // The worker of this one has something to do until it is released.
    let held = Held::hold(&tidied_books);
    tidied.invalidate(range(19, 1));
    until(|| tidied_books.by_worker() == 1);
    // Others who may look up: without them nothing takes a barrier.
    let others = (evicted.burst(), cleared.burst(), worked.burst(), tidied.burst());

    membarrier(MembarrierCommand::PrivateExpedited).expect("the caches use membarrier(2)");
    refuse_membarrier().expect("a filter");
    membarrier(MembarrierCommand::PrivateExpedited).expect_err("the filter refuses it");

    // Evicting for another: the new region is uncached, and those that are idle stay.
    assert!(!is_shut(&evicted), "the cache does not know yet");
    assert_eq!(evicted_books.live(), 2);
    assert!(is_shut(&evicted));
    assert!(evicted.find(&key(0)).is_none());
    assert_eq!((evicted_books.live(), evicted.statistics().evictions), (2, 0));

    // Giving back what is idle.
    cleared.clear();
    assert!(is_shut(&cleared));
    assert_eq!((cleared_books.live(), cleared.statistics().evictions), (2, 0));

    // A miss that finds many dead.
    tidied.invalidate(range(0, 19));
    let lease = tidied.get(&key(100)).expect("registered");
    assert!(lease.uncached().is_none());
    drop(lease);
    assert!(is_shut(&tidied));
    assert_eq!((tidied_books.live(), tidied.statistics().dying), (21, 19));
    drop(held);

    // The worker, of what died.
    worked.invalidate(range(0, 1));
    until(|| is_shut(&worked));

    // Flushing what died; and however often it is refused, the gate stays shut.
    collected.invalidate(range(0, 1));
    for _ in 0..40_000 {
        collected.flush();
    }
    assert!(is_shut(&collected));
    assert!(collected.find(&key(0)).is_none());
    assert_eq!((collected_books.live(), collected.statistics().dying), (1, 1));

    // The caches' ends need no barrier.
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

//! Costs of host memory monitors: for programs that map and unmap memory, and for subscriptions.
//!
//! The reference is a map and an unmap by raw system calls, which the memory hooks do not see. The
//! two operations alternate in one process.

#![allow(missing_docs, reason = "a bench is a program")]

#[allow(dead_code, reason = "other benches use the rest of it")]
mod report;

use std::{
    fs, ptr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use hmem::{
    Access, Address, AddressRange, Rejected, Result,
    cache::{Cache, CacheBackend, Key, Limits},
    monitor::{
        GateToken, InvalidationCause, InvalidationToken, Invalidator, Monitor, Subscription,
    },
    system::monitor::{Layered, MemHooks, UserFaultFd},
};
use report::{Comparison, Target};

const LEN: usize = 64 << 10;
const UNMAPS: usize = 40_000;
const CACHED: usize = 100_000;
const PAGE: usize = 4096;

/// An invalidator that only counts notifications, so that it costs as little as a cache without a
/// region in the changed memory.
#[derive(Debug, Default)]
struct CountingInvalidator(AtomicU64);

impl Invalidator for CountingInvalidator {
    fn invalidate(&self, _: AddressRange, _: InvalidationCause) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn invalidate_start(&self, range: AddressRange, cause: InvalidationCause) -> InvalidationToken {
        self.invalidate(range, cause);
        InvalidationToken::unnumbered()
    }

    fn invalidate_end(&self, _: InvalidationToken) {}

    fn close_gate(&self) -> GateToken {
        GateToken::unnumbered()
    }

    fn open_gate(&self, _: GateToken) {}
}

const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
const ANONYMOUS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

fn map() -> *mut libc::c_void {
    // SAFETY: the kernel chooses the address, so the new mapping replaces nothing.
    let at = unsafe { libc::mmap(ptr::null_mut(), LEN, RW, ANONYMOUS, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    at
}

fn unmap(at: *mut libc::c_void) {
    // SAFETY: `at` is the start of a mapping of `LEN` bytes from `map`, and nothing refers to its
    // memory.
    assert_eq!(unsafe { libc::munmap(at, LEN) }, 0);
}

/// Maps and unmaps memory through the C library, which the memory hooks may have patched.
fn pair() {
    unmap(map());
}

/// Maps and unmaps memory with raw system calls.
fn raw_pair() {
    // SAFETY: the kernel chooses the address, so the mapping replaces nothing. Nothing refers to
    // its memory, and it is unmapped once.
    unsafe {
        let at = libc::syscall(libc::SYS_mmap, 0, LEN, RW, ANONYMOUS, -1, 0);
        assert_eq!(libc::syscall(libc::SYS_munmap, at, LEN), 0);
    }
}

fn range(at: *mut libc::c_void) -> AddressRange {
    AddressRange::new(Address::of_ptr(at), LEN as u64).expect("a mapping does not wrap")
}

/// Maps a range, subscribes to it, unmaps it and cancels the subscription.
fn cycle(monitor: &dyn Monitor, invalidator: &Arc<CountingInvalidator>) {
    let at = map();
    let subscription = monitor
        .subscribe(range(at), Arc::<CountingInvalidator>::clone(invalidator))
        .expect("memory can be watched");
    unmap(at);
    monitor.unsubscribe(subscription);
}

/// Subscribes to the `LEN` bytes at `at`, and cancels the subscription.
fn resubscribe(
    monitor: &dyn Monitor,
    invalidator: &Arc<CountingInvalidator>,
    at: *mut libc::c_void,
) {
    let subscription = monitor
        .subscribe(range(at), Arc::<CountingInvalidator>::clone(invalidator))
        .expect("memory can be watched");
    monitor.unsubscribe(subscription);
}

/// A cache back end that registers nothing. The memory hooks watch every cached range.
struct NoopBackend(Arc<MemHooks>);

impl CacheBackend for NoopBackend {
    type Region = ();
    type Watch = Subscription;
    type Owner = ();

    fn watch(&self, key: &Key, invalidator: &Arc<dyn Invalidator>) -> Result<Subscription> {
        self.0.subscribe(key.range(), Arc::clone(invalidator))
    }

    fn unwatch(&self, watch: Subscription) {
        self.0.unsubscribe(watch);
    }

    fn register(&self, _: &Key, (): &(), _: Option<&Self::Watch>) -> Result<()> {
        Ok(())
    }

    fn deregister(&self, (): ()) -> Result<(), Rejected<()>> {
        Ok(())
    }
}

/// Returns a cache of [`CACHED`] regions of one page each.
fn full_cache(hooks: &Arc<MemHooks>) -> Cache<NoopBackend> {
    let limits = Limits { max_count: 2 * CACHED, ..Limits::default() };
    let cache = Cache::new(NoopBackend(Arc::clone(hooks)), limits).expect("a cache starts");
    let flags = ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: the kernel chooses the address, so the new mapping replaces nothing. It is never
    // unmapped.
    let start = unsafe { libc::mmap(ptr::null_mut(), CACHED * PAGE, RW, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    for page in 0..CACHED {
        let start = Address::of_ptr(start.wrapping_byte_add(page * PAGE));
        let range = AddressRange::new(start, PAGE as u64).expect("a mapping does not wrap");
        drop(
            cache
                .get_or_register(
                    &Key::new(range, Access::SEND)
                        .expect("the range is not empty, and the rights are valid"),
                )
                .expect("a no-op registration succeeds"),
        );
    }
    let found = cache.statistics().registrations;
    assert_eq!(found, CACHED as u64);
    cache
}

fn resident() -> i64 {
    let statm = fs::read_to_string("/proc/self/statm").expect("/proc");
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<i64>().ok()).expect("statm") * 4096
}

fn growth(what: &str) {
    (0..UNMAPS).for_each(|_| pair());
    let before = resident();
    (0..UNMAPS).for_each(|_| pair());
    println!(
        "{what}: {UNMAPS} unmaps grew the process by {} KiB (goal: 512)",
        (resident() - before) >> 10
    );
}

fn main() {
    let invalidator = Arc::new(CountingInvalidator::default());
    let kept = map();
    let mut figures: Vec<Comparison> = Vec::new();
    let free = Target::Ratio(1.02);
    figures.push(report::compare(
        "mmap+munmap 64 KiB: the C library, unhooked",
        Target::Unlimited,
        pair,
        raw_pair,
    ));

    let hooks = MemHooks::start().expect("memhooks");
    figures.push(report::compare(
        "mmap+munmap 64 KiB: memhooks, nothing cached",
        free,
        pair,
        raw_pair,
    ));
    growth("memhooks, nothing cached");
    let subscription = hooks
        .subscribe(range(kept), Arc::<CountingInvalidator>::clone(&invalidator))
        .expect("subscribe");
    let some = "mmap+munmap 64 KiB: memhooks, one cache without the range";
    figures.push(report::compare(some, Target::Unlimited, pair, raw_pair));
    growth("memhooks, one cache without the range");
    let subscribe = "memhooks: subscribe+unsubscribe";
    figures.push(report::measure_alone(subscribe, Target::Unlimited, || {
        resubscribe(&*hooks, &invalidator, kept)
    }));
    let cycled = "map, subscribe, unmap, unsubscribe: memhooks";
    figures.push(report::compare(
        cycled,
        Target::Unlimited,
        || cycle(&*hooks, &invalidator),
        raw_pair,
    ));
    hooks.unsubscribe(subscription);

    let cache = full_cache(&hooks);
    let full = "mmap+munmap 64 KiB: memhooks, 100,000 ranges cached";
    figures.push(report::compare(full, Target::Ratio(1.05), pair, raw_pair));
    growth("memhooks, 100,000 ranges cached");
    drop(cache);

    match UserFaultFd::start() {
        Ok(userfaultfd) => {
            // This subscription keeps the table of subscriptions from becoming empty in each round.
            let subscription = userfaultfd
                .subscribe(range(kept), Arc::<CountingInvalidator>::clone(&invalidator))
                .expect("subscribe");
            let unwatched = "mmap+munmap 64 KiB: userfaultfd, range not watched";
            figures.push(report::compare(unwatched, Target::Unlimited, pair, raw_pair));
            let watched = "map, subscribe, unmap, unsubscribe: userfaultfd";
            figures.push(report::compare(
                watched,
                Target::Unlimited,
                || cycle(&*userfaultfd, &invalidator),
                raw_pair,
            ));
            userfaultfd.unsubscribe(subscription);
            let layered = Layered::new(hooks, userfaultfd);
            let both = "map, subscribe, unmap, unsubscribe: memhooks+userfaultfd";
            let subscription = layered
                .subscribe(range(kept), Arc::<CountingInvalidator>::clone(&invalidator))
                .expect("subscribe");
            let subscribe = "memhooks+userfaultfd: subscribe+unsubscribe";
            figures.push(report::measure_alone(subscribe, Target::Unlimited, || {
                resubscribe(&*layered, &invalidator, kept)
            }));
            figures.push(report::compare(
                both,
                Target::Unlimited,
                || cycle(&*layered, &invalidator),
                raw_pair,
            ));
            layered.unsubscribe(subscription);
        }
        Err(error) => println!("userfaultfd: {error}"),
    }
    report::print(figures);
}

//! Costs of monitors of host memory: for code that maps and unmaps, and for subscriptions.
//!
//! Each figure is compared with the same system calls made past the C library. The two
//! alternate in one process.

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
    monitor::{InvalidationCause, InvalidationToken, Invalidator, Monitor, Subscription},
    system::monitor::{Layered, MemHooks, UserFaultFd},
};
use report::{
    Target,
    turns::{self, Turns},
};

const LEN: usize = 64 << 10;
const UNMAPS: usize = 40_000;
const CACHED: usize = 100_000;
const PAGE: usize = 4096;

/// A subscriber without ranges, like a cache that has not cached the changed memory.
#[derive(Debug, Default)]
struct Ignorant(AtomicU64);

impl Invalidator for Ignorant {
    fn invalidate(&self, _: AddressRange, _: InvalidationCause) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn invalidate_start(&self, range: AddressRange, cause: InvalidationCause) -> InvalidationToken {
        self.invalidate(range, cause);
        InvalidationToken(0)
    }

    fn invalidate_end(&self, _: InvalidationToken) {}

    fn close_gate(&self) {}

    fn open_gate(&self) {}
}

const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
const ANONYMOUS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

fn map() -> *mut libc::c_void {
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { libc::mmap(ptr::null_mut(), LEN, RW, ANONYMOUS, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    at
}

fn unmap(at: *mut libc::c_void) {
    // SAFETY: a mapping of this bench's own, which nobody uses.
    assert_eq!(unsafe { libc::munmap(at, LEN) }, 0);
}

/// By the C library's functions, hooked or not.
fn pair() {
    unmap(map());
}

/// By the system calls themselves.
fn raw_pair() {
    // SAFETY: as `map` and `unmap`.
    unsafe {
        let at = libc::syscall(libc::SYS_mmap, 0, LEN, RW, ANONYMOUS, -1, 0);
        assert_eq!(libc::syscall(libc::SYS_munmap, at, LEN), 0);
    }
}

fn range(at: *mut libc::c_void) -> AddressRange {
    AddressRange::new(Address::of_ptr(at), LEN as u64).expect("a mapping does not wrap")
}

/// Maps a range, subscribes to it, unmaps it and cancels the subscription.
fn cycle(monitor: &dyn Monitor, invalidator: &Arc<Ignorant>) {
    let at = map();
    let subscription = monitor
        .subscribe(range(at), Arc::<Ignorant>::clone(invalidator))
        .expect("memory can be watched");
    unmap(at);
    monitor.unsubscribe(subscription);
}

/// Subscribes to a range and cancels the subscription.
fn renewal(monitor: &dyn Monitor, invalidator: &Arc<Ignorant>, at: *mut libc::c_void) {
    let subscription = monitor
        .subscribe(range(at), Arc::<Ignorant>::clone(invalidator))
        .expect("memory can be watched");
    monitor.unsubscribe(subscription);
}

/// A cache back end that registers nothing, with a monitor that watches every range.
struct Watched(Arc<MemHooks>);

impl CacheBackend for Watched {
    type Region = ();
    type Watch = Subscription;

    fn watch(&self, key: &Key, invalidator: &Arc<dyn Invalidator>) -> Result<Subscription> {
        self.0.subscribe(key.range(), Arc::clone(invalidator))
    }

    fn unwatch(&self, watch: Subscription) {
        self.0.unsubscribe(watch);
    }

    fn needs_validation(&self, _: &Subscription) -> bool {
        false
    }

    fn is_current(&self, _: &Subscription) -> Result<bool> {
        Ok(true)
    }

    fn max_len(&self) -> u64 {
        u64::MAX
    }

    fn register(&self, _: &Key, _: Option<&Self::Watch>) -> Result<()> {
        Ok(())
    }

    fn deregister(&self, (): ()) -> Result<(), Rejected<()>> {
        Ok(())
    }
}

/// A cache of this many ranges of a page each.
fn cached(hooks: &Arc<MemHooks>) -> Cache<Watched> {
    let limits = Limits { max_count: 2 * CACHED, ..Limits::default() };
    let cache = Cache::new(Watched(Arc::clone(hooks)), limits).expect("a cache starts");
    let flags = ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice, which stays.
    let start = unsafe { libc::mmap(ptr::null_mut(), CACHED * PAGE, RW, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    for page in 0..CACHED {
        let start = Address::of_ptr(start.wrapping_byte_add(page * PAGE));
        let range = AddressRange::new(start, PAGE as u64).expect("a mapping does not wrap");
        drop(
            cache
                .get_or_register(&Key::new(range, Access::SEND).expect("a key"))
                .expect("nothing refuses"),
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
    let invalidator = Arc::new(Ignorant::default());
    let kept = map();
    let mut figures: Vec<Turns> = Vec::new();
    let free = Target::Ratio(1.02);
    figures.push(turns::against(
        "mmap+munmap 64 KiB: the C library, unhooked",
        Target::Orientation,
        pair,
        raw_pair,
    ));

    let hooks = MemHooks::start().expect("memhooks");
    figures.push(turns::against(
        "mmap+munmap 64 KiB: memhooks, nothing cached",
        free,
        pair,
        raw_pair,
    ));
    growth("memhooks, nothing cached");
    let subscription =
        hooks.subscribe(range(kept), Arc::<Ignorant>::clone(&invalidator)).expect("subscribe");
    let some = "mmap+munmap 64 KiB: memhooks, one cache told that ignores it";
    figures.push(turns::against(some, Target::Orientation, pair, raw_pair));
    growth("memhooks, a cache told");
    let subscribe = "memhooks: subscribe+unsubscribe";
    figures.push(turns::alone(subscribe, Target::Orientation, || {
        renewal(&*hooks, &invalidator, kept)
    }));
    let cycled = "map, subscribe, unmap, unsubscribe: memhooks";
    figures.push(turns::against(
        cycled,
        Target::Orientation,
        || cycle(&*hooks, &invalidator),
        raw_pair,
    ));
    hooks.unsubscribe(subscription);

    let cache = cached(&hooks);
    let full = "mmap+munmap 64 KiB: memhooks, 100,000 ranges cached";
    figures.push(turns::against(full, Target::Ratio(1.05), pair, raw_pair));
    growth("memhooks, 100,000 ranges cached");
    drop(cache);

    match UserFaultFd::start() {
        Ok(net) => {
            // Kept watched, so that the table is not emptied and filled at each turn.
            let subscription = net
                .subscribe(range(kept), Arc::<Ignorant>::clone(&invalidator))
                .expect("subscribe");
            let unwatched = "mmap+munmap 64 KiB: userfaultfd, range not watched";
            figures.push(turns::against(unwatched, Target::Orientation, pair, raw_pair));
            let watched = "map, subscribe, unmap, unsubscribe: userfaultfd";
            figures.push(turns::against(
                watched,
                Target::Orientation,
                || cycle(&*net, &invalidator),
                raw_pair,
            ));
            net.unsubscribe(subscription);
            let layered = Layered::new(hooks, net);
            let both = "map, subscribe, unmap, unsubscribe: memhooks+userfaultfd";
            let subscription = layered
                .subscribe(range(kept), Arc::<Ignorant>::clone(&invalidator))
                .expect("subscribe");
            figures.push(turns::against(
                both,
                Target::Orientation,
                || cycle(&*layered, &invalidator),
                raw_pair,
            ));
            layered.unsubscribe(subscription);
        }
        Err(error) => println!("userfaultfd: {error}"),
    }
    turns::print(figures);
}

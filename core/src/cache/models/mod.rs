//! Models of the cache's races, on a table of four pages. `cargo xtask loom` runs them.
//!
//! Loom has no `membarrier`, so both halves of the asymmetric barrier are SeqCst fences here. Some
//! tests leave out one kind of fence. The failure of the model then shows that the fence is needed.
//!
//! Each model must reach both outcomes of its race. A model that reaches only one fails.

mod leases;
mod registrations;
mod walks;

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::Arc,
};

use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicU32, Ordering},
    thread,
};

use super::{
    Cache, CacheBackend, Key, Lease, Limits,
    lease::blocks::LeaseBlock,
    lookup::{FastLookup, LeasedEntry},
    sync::{Barrier, modelled::LEFT_OUT},
};
use crate::{
    Access, Address, AddressRange, Error, ErrorKind, Rejected, Result, monitor::Invalidator,
};

/// The modelled memory and its registrations.
///
/// Each access to its atomics is a read-modify-write, which sees the newest value. These accesses
/// are Relaxed, so they do not order the accesses of the cache.
struct ModelMemory {
    /// The version of the memory, incremented when the memory is replaced.
    version: AtomicU32,
    /// The live registrations, one bit each.
    alive: AtomicU32,
    created: AtomicU32,
    /// The number of registrations that fail, beginning with the first.
    refused: u32,
}

struct ModelRegistration {
    number: u32,
    version: u32,
    start: u64,
    /// A cell that each use of the region reads, and that the deregistration writes. Loom checks
    /// that uses and deregistration are ordered.
    used: UnsafeCell<()>,
}

// SAFETY: loom panics if two accesses to the cell are not ordered and one of them is a write.
#[allow(unsafe_code, reason = "a model of a region, which loom checks")]
unsafe impl Sync for ModelRegistration {}

impl CacheBackend for ModelMemory {
    type Region = ModelRegistration;
    type Watch = ();
    type Owner = ();

    fn watch(&self, _: &Key, _: &Arc<dyn Invalidator>) -> Result<()> {
        Ok(())
    }

    fn unwatch(&self, (): ()) {}

    fn register(&self, key: &Key, (): &(), _: Option<&Self::Watch>) -> Result<ModelRegistration> {
        let number = self.created.fetch_add(1, Ordering::Relaxed);
        if number < self.refused {
            return Err(Error::new(ErrorKind::OutOfResources, "modelled registration"));
        }
        self.alive.fetch_or(1 << number, Ordering::Relaxed);
        // The kernel registers the memory that is mapped now, never an older one.
        let version = self.version.fetch_add(0, Ordering::Relaxed);
        Ok(ModelRegistration { number, version, start: key.start, used: UnsafeCell::new(()) })
    }

    fn deregister(&self, region: ModelRegistration) -> Result<(), Rejected<ModelRegistration>> {
        let before = self.alive.fetch_and(!(1 << region.number), Ordering::Relaxed);
        assert!(before & 1 << region.number != 0, "deregistered twice");
        region.used.with_mut(|_| ());
        Ok(())
    }
}

type Modelled = Arc<Cache<ModelMemory>>;

fn cache(max_count: usize) -> Modelled {
    cache_refused(max_count, 0)
}

fn cache_refused(max_count: usize, refused: u32) -> Modelled {
    let memory = ModelMemory {
        version: AtomicU32::new(0),
        alive: AtomicU32::new(0),
        created: AtomicU32::new(0),
        refused,
    };
    let limits = Limits { max_count, ..Limits::default() };
    Arc::new(Cache::with_barrier(memory, limits, Barrier::choose()).expect("a cache"))
}

fn range(page: u64) -> AddressRange {
    AddressRange::new(Address(page << 12), 4096).expect("no wrap")
}

fn key(page: u64) -> Key {
    Key::new(range(page), Access::SEND).expect("a key")
}

fn block(cache: &Modelled) -> &LeaseBlock {
    cache.core.take_block().expect("blocks enough")
}

fn get<'c>(cache: &'c Modelled, block: &'c LeaseBlock, page: u64) -> Lease<'c, ModelMemory> {
    cache.lookup_in_block(block, (&key(page), &()), None).expect("registered")
}

fn alive(cache: &Modelled) -> u32 {
    cache.backend().alive.fetch_or(0, Ordering::Relaxed)
}

/// A bit for each of the two outcomes of a race, set once some execution of the model reached that
/// outcome. Loom does not track this variable.
static REACHED: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);

fn reach(outcome: bool) {
    REACHED.fetch_or(1 << u32::from(outcome), std::sync::atomic::Ordering::SeqCst);
}

const OUTLIVED: &str = "a lease of a region that was deregistered";
const OTHERS: &str = "a region of other memory";

fn lookup_fast<'c>(
    cache: &'c Modelled,
    block: &'c LeaseBlock,
    page: u64,
) -> Option<LeasedEntry<'c, ModelMemory>> {
    match cache.core.lookup_fast(block.next_slot(), &key(page)) {
        FastLookup::Hit(leased) => Some(leased),
        FastLookup::Miss | FastLookup::SlowPath { .. } => None,
    }
}

/// Looks up on the fast path, and uses the region of a hit.
fn look_up(cache: &Modelled, block: &LeaseBlock, page: u64) {
    let leased = lookup_fast(cache, block, page);
    reach(leased.is_some());
    if let Some(leased) = leased {
        let lease = Lease::cached(&cache.core, leased);
        assert_eq!(lease.start, page << 12, "{OTHERS}");
        let bit = 1 << lease.number;
        assert!(alive(cache) & bit != 0, "{OUTLIVED}");
        lease.used.with(|_| ());
        thread::yield_now();
        assert!(alive(cache) & bit != 0, "{OUTLIVED}");
    }
}

/// Does the worker's job on the calling thread: reclaims invalidated entries, again and again until
/// no thread has woken the worker since the last pass began.
fn work(cache: &Modelled) {
    while cache.core.waker.called.swap(false, Ordering::SeqCst) {
        cache.core.reclaim_once();
    }
}

fn model(body: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.max_branches = 50_000;
    model.check(body);
}

/// Runs `models` without fences of the kind `fence`. The kind is left out in the whole process, so
/// only one call runs at a time.
fn without(fence: u32, models: impl FnOnce()) {
    static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    LEFT_OUT.store(fence, std::sync::atomic::Ordering::SeqCst);
    REACHED.store(0, std::sync::atomic::Ordering::SeqCst);
    let result = catch_unwind(AssertUnwindSafe(models));
    LEFT_OUT.store(0, std::sync::atomic::Ordering::SeqCst);
    if let Err(panic) = result {
        resume_unwind(panic);
    }
    assert_eq!(
        REACHED.load(std::sync::atomic::Ordering::SeqCst),
        3,
        "no execution reached one outcome"
    );
}

fn holds(models: fn()) {
    without(0, models);
}

/// Asserts that the models fail without fences of the kind `fence`, with one of these messages.
fn fails_without(fence: u32, models: fn(), messages: &[&str]) {
    let panic =
        catch_unwind(|| without(fence, models)).expect_err("the model passes without the fence");
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or_default();
    assert!(messages.iter().any(|message| text.contains(message)), "another failure: {text}");
}

fn used_twice(cache: &Modelled, page: u64) -> &LeaseBlock {
    let block = block(cache);
    drop(get(cache, block, page));
    // The second lookup is a hit, which clears UNREFERENCED.
    drop(get(cache, block, page));
    block
}

fn in_thread(cache: &Modelled, body: impl FnOnce(&Modelled) + 'static) -> thread::JoinHandle<()> {
    let cache = Arc::clone(cache);
    thread::spawn(move || body(&cache))
}

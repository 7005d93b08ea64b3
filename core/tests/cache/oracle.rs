//! Random lookups and replacements of real mappings on many threads. The backend remembers the
//! memory that it registered.

use std::{
    collections::BTreeMap,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use hmem_core::{
    Access, Address, AddressRange, Error, ErrorKind, Rejected, Result,
    cache::{Cache, CacheBackend, Key, Limits},
    monitor::{InvalidationCause, Invalidator},
};
use parking_lot::Mutex;
use rustix::{
    mm::{MapFlags, ProtFlags, mmap, munmap},
    param::page_size,
};

const PAGES: usize = 16;

/// A range of addresses, mapped to pages of a file. Each page of the file holds its own number,
/// which identifies the page that is mapped. Threads replace the mapped pages all the time.
struct FileMapping {
    base: usize,
    file: std::os::fd::OwnedFd,
    /// The index of the first page of the file that was never mapped. The next replacement maps
    /// this page.
    next: AtomicU64,
    changing: Mutex<()>,
}

impl FileMapping {
    fn new(remaps: usize) -> Self {
        let file =
            rustix::fs::memfd_create("pages", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        let pages = PAGES + remaps;
        rustix::fs::ftruncate(&file, (pages * page_size()) as u64).expect("its length");
        for page in 0..pages as u64 {
            rustix::io::pwrite(&file, &page.to_ne_bytes(), page * page_size() as u64)
                .expect("its number");
        }
        // SAFETY: a new mapping replaces nothing.
        let base = unsafe {
            mmap(ptr::null_mut(), PAGES * page_size(), ProtFlags::READ, MapFlags::SHARED, &file, 0)
        };
        let base = base.expect("a mapping").addr();
        Self { base, file, next: AtomicU64::new(PAGES as u64), changing: Mutex::new(()) }
    }

    fn address(&self, page: usize) -> usize {
        self.base + page * page_size()
    }

    /// Returns the number in the page that is mapped now. Another thread may replace the page at
    /// any time.
    fn number_at(&self, page: usize) -> u64 {
        // SAFETY: the pages of this mapping stay mapped, since each is replaced in one step.
        unsafe { ptr::with_exposed_provenance::<AtomicU64>(self.address(page)).as_ref() }
            .expect("mapped")
            .load(Ordering::Relaxed)
    }

    /// Maps the next page of the file at `page`, and notifies the invalidator like a patched
    /// `mmap`.
    fn replace(&self, page: usize, invalidator: &dyn Invalidator) {
        let _one_at_a_time = self.changing.lock();
        let range = AddressRange::new(Address(self.address(page) as u64), page_size() as u64)
            .expect("no wrap");
        let change = invalidator.invalidate_start(range, InvalidationCause::Replace);
        let from = self.next.fetch_add(1, Ordering::Relaxed) * page_size() as u64;
        let at = ptr::with_exposed_provenance_mut(self.address(page));
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: replaces a page of this mapping, which is only read through atomics.
        unsafe { mmap(at, page_size(), ProtFlags::READ, flags, &self.file, from) }
            .expect("a mapping");
        invalidator.invalidate_end(change);
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this value, and no reference to it is left.
        unsafe { munmap(ptr::with_exposed_provenance_mut(self.base), PAGES * page_size()) }
            .expect("unmapped");
    }
}

/// A region that keeps the numbers of the pages that were mapped at its registration, like a NIC
/// that pins them.
struct Pinned {
    id: u64,
    first: usize,
    numbers: Vec<u64>,
}

#[derive(Clone)]
struct Pinning {
    mapping: Arc<FileMapping>,
    alive: Arc<Mutex<BTreeMap<u64, ()>>>,
    next: Arc<AtomicU64>,
    /// On average, one in this many registrations and deregistrations fails. With 0, no call fails.
    failing: u64,
    calls: Arc<AtomicU64>,
    watches: Arc<AtomicUsize>,
}

impl Pinning {
    fn fails(&self) -> bool {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        self.failing > 0
            && call.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 < (1 << 32) / self.failing
    }
}

impl CacheBackend for Pinning {
    type Region = Pinned;
    type Watch = ();
    type Owner = ();

    fn watch(&self, _: &Key, _: &Arc<dyn Invalidator>) -> Result<()> {
        self.watches.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn unwatch(&self, (): ()) {
        self.watches.fetch_sub(1, Ordering::SeqCst);
    }

    fn register(&self, key: &Key, (): &(), _: Option<&Self::Watch>) -> Result<Pinned> {
        if self.fails() {
            let kinds = [ErrorKind::OutOfResources, ErrorKind::BadAddress];
            let kind = kinds[self.calls.load(Ordering::Relaxed) as usize % 2];
            return Err(Error::new(kind, "register"));
        }
        let first = (key.range().start().0 as usize - self.mapping.base) / page_size();
        let pages = (key.range().len() as usize).div_ceil(page_size());
        let numbers = (first..first + pages).map(|page| self.mapping.number_at(page)).collect();
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.alive.lock().insert(id, ());
        Ok(Pinned { id, first, numbers })
    }

    fn deregister(&self, region: Pinned) -> Result<(), Rejected<Pinned>> {
        if self.fails() {
            return Err(Rejected::new(region, Error::new(ErrorKind::Driver, "deregister")));
        }
        assert!(self.alive.lock().remove(&region.id).is_some(), "deregistered twice");
        Ok(())
    }
}

/// Runs threads that look up ranges of all threads and replace pages of their own part. After each
/// lookup that succeeds, a thread checks that the region has the mapped pages of the thread's part.
fn run(threads: usize, rounds: usize, limits: Limits, failing: u64, seed: u64) {
    let mapping = Arc::new(FileMapping::new(threads * rounds));
    let pinning = Pinning {
        mapping: Arc::clone(&mapping),
        alive: Arc::default(),
        next: Arc::default(),
        failing,
        calls: Arc::default(),
        watches: Arc::default(),
    };
    let cache = Cache::new(pinning.clone(), limits).expect("a cache");
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (cache, mapping) = (&cache, &mapping);
            scope.spawn(move || {
                let mut random = seed ^ (thread as u64 + 1) << 40;
                let mut draw = |below: usize| {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(0x9e37);
                    (random >> 33) as usize % below
                };
                let own = |page: usize| page % threads == thread;
                let mut kept = Vec::new();
                for _ in 0..rounds {
                    let first = draw(PAGES);
                    let pages = 1 + draw(PAGES - first).min(3);
                    let start = Address(mapping.address(first) as u64);
                    let range =
                        AddressRange::new(start, (pages * page_size()) as u64).expect("no wrap");
                    let key = Key::new(range, Access::SEND).expect("a key");
                    // Only this thread replaces its own pages, so their numbers are stable here.
                    if let Ok(lease) = cache.get_or_register(&key) {
                        assert!(cache.backend().alive.lock().contains_key(&lease.id));
                        for page in (first..first + pages).filter(|page| own(*page)) {
                            assert_eq!(
                                lease.numbers[page - lease.first],
                                mapping.number_at(page),
                                "a stale hit"
                            );
                        }
                        if draw(4) == 0 {
                            kept.push(lease);
                        }
                    }
                    if draw(8) == 0 {
                        kept.clear();
                    }
                    let mine = draw(PAGES);
                    if own(mine) && draw(2) == 0 {
                        mapping.replace(mine, &**cache.invalidator());
                    }
                }
            });
        }
    });
    for _ in 0..1000 {
        cache.evict_idle();
        if cache.try_clear().is_ok() {
            break;
        }
    }
    cache.try_clear().expect("all given back");
    assert_eq!(pinning.alive.lock().len(), 0, "lost registrations");
    assert_eq!(pinning.watches.load(Ordering::SeqCst), 0, "lost watches");
}

/// CACHE-11
#[test]
fn random_threads_get_no_stale_hit_and_leak_no_registration() {
    for (seed, max_count, merge) in [(1, 6, false), (2, 1000, false), (3, 6, true), (4, 1000, true)]
    {
        run(3, 5_000, Limits { max_count, merge, ..Limits::default() }, 0, seed);
    }
}

/// CACHE-11
#[test]
fn lookup_returns_mapped_memory_while_the_provider_fails() {
    for (seed, max_count, merge) in [(5, 6, false), (6, 1000, false), (7, 6, true)] {
        run(3, 5_000, Limits { max_count, merge, ..Limits::default() }, 16, seed);
    }
}

/// CACHE-11
#[test]
#[ignore = "the slow tier"]
fn lookup_returns_mapped_memory_in_a_million_rounds() {
    for seed in 0..10 {
        let limits = Limits {
            max_count: 6 + seed as usize % 3 * 500,
            merge: seed % 2 == 1,
            ..Limits::default()
        };
        run(4, 25_000, limits, seed % 3 * 8, seed);
    }
}

mod properties {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Get { first: usize, pages: usize, keep: bool },
        Put,
        Replace { page: usize },
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..PAGES, 1..5_usize, any::<bool>()).prop_map(|(first, pages, keep)| {
                Step::Get { first, pages: pages.min(PAGES - first), keep }
            }),
            1 => Just(Step::Put),
            2 => (0..PAGES).prop_map(|page| Step::Replace { page }),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// CACHE-11
        ///
        /// A lookup on one thread always returns the page that is mapped, whatever the order of
        /// lookups, replacements and releases.
        #[test]
        fn lookup_returns_mapped_memory_in_any_order_of_steps(
            max_count in 0..6_usize,
            merge in any::<bool>(),
            failing in prop_oneof![Just(0_u64), Just(6)],
            steps in proptest::collection::vec(step(), 1..120),
        ) {
            let mapping = Arc::new(FileMapping::new(steps.len()));
            let pinning = Pinning {
                mapping: Arc::clone(&mapping),
                alive: Arc::default(),
                next: Arc::default(),
                failing,
                calls: Arc::default(),
                watches: Arc::default(),
            };
            let limits = Limits { max_count, merge, ..Limits::default() };
            let cache = Cache::new(pinning.clone(), limits).unwrap();
            let mut kept = Vec::new();
            for step in steps {
                match step {
                    Step::Get { first, pages, keep } => {
                        let start = Address(mapping.address(first) as u64);
                        let range = AddressRange::new(start, (pages * page_size()) as u64).unwrap();
                        let key = Key::new(range, Access::SEND).unwrap();
                        let Ok(lease) = cache.get_or_register(&key) else { continue };
                        for page in first..first + pages {
                            let registered = lease.numbers[page - lease.first];
                            prop_assert_eq!(registered, mapping.number_at(page));
                        }
                        if keep {
                            kept.push(lease);
                        }
                    }
                    Step::Put => kept.clear(),
                    Step::Replace { page } => mapping.replace(page, &**cache.invalidator()),
                }
            }
            drop(kept);
            while cache.try_clear().is_err() {}
            prop_assert_eq!(pinning.alive.lock().len(), 0);
            prop_assert_eq!(pinning.watches.load(Ordering::SeqCst), 0);
        }
    }
}

//! Measurements of hmem's registration cache. Each time is compared with UCX's time, or with hmem's
//! own time under other conditions, in the same run.

use std::{
    hint::black_box,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use hmem::{
    Address, AllocationKind, DeviceId, Error, ErrorKind, Iface, IfaceExt, Registry, Result,
    cache::Cache,
    iface::AllocRequest,
    system::{Simulated, System},
};

use super::{
    measure::{Effort, Workload, alternate, pseudo_random},
    memory,
    noop::{LEN, NoopBackend, TestMemory},
    report::{Report, Row},
    ucx::{Ucx, UcxCache},
};

pub(super) const ONE: &str = "hit, one buffer again and again";
pub(super) const RANDOM: &str = "hit, at random";
pub(super) const SAME: &str = "hit, the same region";
pub(super) const DIFFERENT: &str = "hit, different regions";
pub(super) const MISS: &str = "miss, insert and evict";
const ALONE: &str = "ours, one thread";
const APART: &str = "ours, a cache each";
const IDLE: &str = "ours, not registering";

/// Largest number of cached regions in any measurement.
pub(super) const MOST: u64 = 100_000;
/// Number of regions that the miss measurement looks up in turn if the cache holds [`MOST`]
/// regions.
const MOST_MISSED: u64 = 2 * MOST + 1;

/// The state of a benchmark run in one process: its settings, its test memory and its report.
pub(super) struct Bench {
    pub(super) effort: Effort,
    ucx: Option<Ucx>,
    pub(super) test_memory: TestMemory,
    pub(super) report: Report,
}

impl Bench {
    /// Maps the test memory, and starts a report.
    ///
    /// # Errors
    /// `OutOfResources` if the memory cannot be mapped.
    pub(super) fn new(effort: Effort, ucx: Option<Ucx>) -> Result<Self> {
        let test_memory = TestMemory::new(MOST_MISSED)?;
        let mut report = Report::default();
        report.peers.extend(ucx.map(|ucx| ucx.name().to_owned()));
        if let Err(why) = &test_memory.monitor {
            report.skip("hmem with memory hooks", why);
        }
        Ok(Self { effort, ucx, test_memory, report })
    }

    /// Measures hits, misses and owner lookups of hmem, alternating with UCX if UCX is loaded.
    ///
    /// # Errors
    /// - `OutOfResources` if memory or threads are short.
    /// - `Unavailable` if UCX fails to create a cache.
    pub(super) fn beside_ucx(&mut self) -> Result<()> {
        self.hits()?;
        self.two_threads_beside_ucx()?;
        self.misses()?;
        self.memory_types()
    }

    /// Measures the figures that need no UCX: hits of two threads, lookups during a registration,
    /// the memory of an entry and the cost of unmaps.
    ///
    /// # Errors
    /// - `OutOfResources` if memory or threads are short.
    /// - `Unavailable` if the process cannot read its own memory use from `/proc`.
    pub(super) fn of_our_own(&mut self) -> Result<()> {
        self.two_threads()?;
        self.registering()?;
        self.memory()?;
        self.unmaps()
    }

    fn peer(&self) -> &'static str {
        self.ucx.map_or("UCX", Ucx::name)
    }

    /// Creates a UCX cache that holds the first `filled` test regions. Returns `None` if no UCX is
    /// loaded.
    fn ucx_cache(&self, max: Option<u64>, filled: u64) -> Result<Option<UcxCache>> {
        let Some(ucx) = self.ucx else { return Ok(None) };
        let cache = ucx.cache(max).map_err(|why| {
            Error::new(ErrorKind::Unavailable, "bench cache")
                .context("peer", ucx.name())
                .context("why", why)
        })?;
        cache.get_put((0..filled).map(|number| self.test_memory.address(number)), LEN);
        Ok(Some(cache))
    }

    fn hits(&mut self) -> Result<()> {
        self.hits_beside_ucx(ONE, 1, 1, first, Some(0.25))?;
        self.hits_beside_ucx(RANDOM, 1_000, 1, at_random(1_000), Some(0.25))?;
        self.hits_beside_ucx(RANDOM, MOST, 1, at_random(MOST), Some(0.3))
    }

    fn two_threads_beside_ucx(&mut self) -> Result<()> {
        self.hits_beside_ucx(SAME, 1, 2, first, None)?;
        self.hits_beside_ucx(DIFFERENT, 1_000, 2, at_random(1_000), None)
    }

    /// Measures cache hits of hmem and UCX. UCX's cache has no limit, and hmem's cache stays below
    /// its limit, so neither evicts.
    fn hits_beside_ucx(
        &mut self,
        figure: &str,
        regions: u64,
        threads: usize,
        choose: impl RegionChoice,
        target: Option<f64>,
    ) -> Result<()> {
        let cache = self.test_memory.cache(2 * regions, regions)?;
        let ucx = self.ucx_cache(None, regions)?;
        let ours = our_hits(&self.test_memory, &cache, choose);
        let theirs = ucx.as_ref().map(|ucx| their_hits(&self.test_memory, ucx, choose));
        let mut workloads = vec![Workload { threads, run: &ours }];
        workloads.extend(theirs.as_ref().map(|theirs| Workload { threads, run: theirs }));
        let seen = alternate(self.effort, &workloads);
        assert_hits(&cache, regions);
        if let Some(ucx) = &ucx {
            assert_eq!(ucx.registrations(), regions, "UCX registered a cached region again");
        }
        self.report.rows.push(row(figure, regions, threads, &seen, self.peer(), target));
        Ok(())
    }

    fn two_threads(&mut self) -> Result<()> {
        self.two_threads_of(SAME, 1, first)?;
        self.two_threads_of(DIFFERENT, 1_000, at_random(1_000))
    }

    fn two_threads_of(
        &mut self,
        figure: &str,
        regions: u64,
        choose: impl RegionChoice,
    ) -> Result<()> {
        let cache = self.test_memory.cache(2 * regions, regions)?;
        let other = self.test_memory.cache(2 * regions, regions)?;
        let ours = our_hits(&self.test_memory, &cache, choose);
        let beside = our_hits(&self.test_memory, &other, choose);
        // [`alternate`] numbers the operations of the second thread from 2^32.
        let apart = |start: u64, count: u64| {
            if start >> 32 == 0 { ours(start, count) } else { beside(start, count) }
        };
        let workloads = [
            Workload { threads: 2, run: &ours },
            Workload { threads: 1, run: &ours },
            Workload { threads: 2, run: &apart },
        ];
        let seen = alternate(self.effort, &workloads);
        assert_hits(&cache, regions);
        assert_hits(&other, regions);
        self.report.rows.push(row(figure, regions, 2, &[seen[0], seen[1]], ALONE, Some(1.15)));
        self.report.rows.push(row(figure, regions, 2, &[seen[0], seen[2]], APART, None));
        Ok(())
    }

    /// Measures lookups that miss, register and evict. Each lookup is for a region that is not in
    /// the cache.
    fn misses(&mut self) -> Result<()> {
        for regions in [1, 1_000, MOST] {
            let cache = self.test_memory.cache(regions, 0)?;
            let ucx = self.ucx_cache(Some(regions), 0)?;
            let all = 2 * regions + 1;
            let (test_memory, got, got_theirs) =
                (&self.test_memory, AtomicU64::new(0), AtomicU64::new(0));
            let ours = |start: u64, count: u64| {
                for number in start..start + count {
                    black_box(
                        *cache
                            .get_or_register(&test_memory.key(number % all))
                            .expect("a no-op registration succeeds"),
                    );
                }
                got.fetch_add(count, Ordering::Relaxed);
            };
            let theirs = |start: u64, count: u64| {
                let ucx = ucx.as_ref().expect("UCX is measured only if it is loaded");
                ucx.get_put(
                    (start..start + count).map(|number| test_memory.address(number % all)),
                    LEN,
                );
                got_theirs.fetch_add(count, Ordering::Relaxed);
            };
            let workloads =
                [Workload { threads: 1, run: &ours }, Workload { threads: 1, run: &theirs }];
            let seen = alternate(self.effort, &workloads[..1 + usize::from(ucx.is_some())]);
            // Every measured lookup was a miss.
            let statistics = cache.statistics();
            assert_eq!(statistics.registrations, got.into_inner(), "{statistics:?}");
            if let Some(ucx) = &ucx {
                assert_eq!(
                    ucx.registrations(),
                    got_theirs.into_inner(),
                    "every lookup in UCX's cache was a miss"
                );
            }
            self.report.rows.push(row(MISS, regions, 1, &seen, self.peer(), Some(1.0)));
        }
        Ok(())
    }

    fn registering(&mut self) -> Result<()> {
        const REGIONS: u64 = 1_000;
        let test_memory = &self.test_memory;
        let cache = test_memory.cache(2 * REGIONS, REGIONS)?;
        let slow = Arc::clone(&cache.backend().slow);
        // Closure that repeats a lookup until `going` returns false, and returns the time of each
        // lookup.
        let lookups = |going: &dyn Fn() -> bool| {
            let mut seen = Histogram::<u64>::new(3).expect("three digits are a valid precision");
            let mut number = 0;
            while going() {
                for _ in 0..1_000 {
                    let began = Instant::now();
                    black_box(
                        *cache
                            .get_or_register(&test_memory.key(pseudo_random(number, REGIONS)))
                            .expect("the region is cached"),
                    );
                    seen.saturating_record(began.elapsed().as_nanos() as u64);
                    number += 1;
                }
            }
            seen
        };
        let began = Instant::now();
        let idle = lookups(&|| began.elapsed() < Duration::from_secs(1));
        let busy = thread::scope(|scope| {
            let registering =
                scope.spawn(|| cache.get_or_register(&test_memory.slow_key()).map(drop));
            while !slow.load(Ordering::Acquire) && !registering.is_finished() {
                thread::yield_now();
            }
            let busy = lookups(&|| slow.load(Ordering::Acquire));
            registering.join().expect("a registration does not panic").map(|()| busy)
        })?;
        for (figure, quantile) in [
            ("lookup, median, while a registration takes 1 s", 0.5),
            ("lookup, 99.9th percentile, while a registration takes 1 s", 0.999),
        ] {
            let seen = [&busy, &idle].map(|seen| seen.value_at_quantile(quantile) as f64);
            self.report.rows.push(row(figure, REGIONS, 1, &seen, IDLE, None));
        }
        Ok(())
    }

    fn memory_types(&mut self) -> Result<()> {
        for regions in [1_000, MOST] {
            let simulated = Arc::new(Simulated::builder().build()?);
            let request =
                AllocRequest { len: LEN, device: DeviceId(0), kind: AllocationKind::Device };
            let allocations: Vec<_> =
                (0..regions).map(|_| simulated.allocate(&request)).collect::<Result<_>>()?;
            let mut registry = Registry::new();
            registry.add(Arc::new(System::new()))?;
            registry.add(Arc::clone(&simulated) as Arc<dyn Iface>)?;
            let ucx = self.ucx.map(|ucx| {
                let mut types = ucx.memory_types();
                for allocation in &allocations {
                    types.add_device(allocation.base().0, LEN);
                }
                types
            });
            let device: Vec<u64> =
                allocations.iter().map(|allocation| allocation.base().0 + 123).collect();
            let host = vec![0_u8; 1 << 20];
            let host: Vec<u64> =
                (0..256).map(|page| host.as_ptr().addr() as u64 + page * 4096).collect();
            for (what, addresses, is_device) in [("host", &host, false), ("device", &device, true)]
            {
                let bound = addresses.len() as u64;
                let ours = |start: u64, count: u64| {
                    for number in start..start + count {
                        let address = Address(addresses[pseudo_random(number, bound) as usize]);
                        let owner = registry.owner_of(address).expect("a lookup succeeds");
                        assert_eq!(owner.device.is_some(), is_device);
                    }
                };
                let theirs = |start: u64, count: u64| {
                    let types = ucx.as_ref().expect("UCX is measured only if it is loaded");
                    for number in start..start + count {
                        assert_eq!(
                            types.is_device(addresses[pseudo_random(number, bound) as usize]),
                            is_device
                        );
                    }
                };
                let figure = format!("owner of a {what} address");
                for threads in [1, 2] {
                    let workloads =
                        [Workload { threads, run: &ours }, Workload { threads, run: &theirs }];
                    let seen = alternate(self.effort, &workloads[..1 + usize::from(ucx.is_some())]);
                    let peer = self.peer();
                    self.report.rows.push(row(&figure, regions, threads, &seen, peer, Some(0.5)));
                }
            }
        }
        Ok(())
    }

    fn memory(&mut self) -> Result<()> {
        self.report.memory.extend(memory::of_layouts()?);
        Ok(())
    }
}

/// Creates a row of the report. `seen` contains hmem's time and, if there is a reference, the time
/// of that reference, which `peer` names.
pub(super) fn row(
    figure: &str,
    regions: u64,
    threads: usize,
    seen: &[f64],
    peer: &str,
    target: Option<f64>,
) -> Row {
    let peer_ns = seen.get(1).copied();
    let ratio = peer_ns.map(|peer| seen[0] / peer);
    Row {
        figure: figure.into(),
        regions,
        threads,
        ours_ns: seen[0],
        peer: peer_ns.map(|_| peer.into()),
        peer_ns,
        ratio,
        target: ratio.and(target),
    }
}

/// A function that maps the number of an operation to the number of the region to look up. The
/// measured loops are generic over this function, so that the compiler inlines it.
trait RegionChoice: Fn(u64) -> u64 + Copy + Sync {}

impl<F: Fn(u64) -> u64 + Copy + Sync> RegionChoice for F {}

/// Returns 0 for every operation, so that all lookups are for the first region.
fn first(_number: u64) -> u64 {
    black_box(0)
}

/// Returns a function that maps the number of an operation to a pseudo-random region number below
/// `regions`.
fn at_random(regions: u64) -> impl RegionChoice {
    move |number| pseudo_random(number, regions)
}

fn our_hits(
    test_memory: &TestMemory,
    cache: &Cache<NoopBackend>,
    choose: impl RegionChoice,
) -> impl Fn(u64, u64) + Sync {
    move |start, count| {
        for number in start..start + count {
            let lease = cache
                .get_or_register(&test_memory.key(choose(number)))
                .expect("the region is cached");
            black_box(*lease);
        }
    }
}

fn their_hits(
    test_memory: &TestMemory,
    cache: &UcxCache,
    choose: impl RegionChoice,
) -> impl Fn(u64, u64) + Sync {
    move |start, count| {
        cache
            .get_put((start..start + count).map(|number| test_memory.address(choose(number))), LEN);
    }
}

/// Asserts that every measured lookup was a hit: the cache only registered the `regions` that it
/// was filled with.
fn assert_hits(cache: &Cache<NoopBackend>, regions: u64) {
    let statistics = cache.statistics();
    assert_eq!((statistics.registrations, statistics.misses), (regions, regions), "{statistics:?}");
}

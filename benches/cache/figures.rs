//! Figures of the registration cache, each beside its peer in the same run.

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
    measure::{Effort, Side, in_turns, place},
    memory,
    noop::{Ground, LEN, Noop},
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
const IDLE: &str = "ours, nobody registering";

/// Largest number of regions that a cache holds.
pub(super) const MOST: u64 = 100_000;
/// Regions that the misses of a cache of [`MOST`] go round.
const MOST_MISSED: u64 = 2 * MOST + 1;

/// The measurements of one process, and their report.
pub(super) struct Bench {
    pub(super) effort: Effort,
    ucx: Option<Ucx>,
    pub(super) ground: Ground,
    pub(super) report: Report,
}

impl Bench {
    /// # Errors
    /// OutOfResources without memory.
    pub(super) fn new(effort: Effort, ucx: Option<Ucx>) -> Result<Self> {
        let ground = Ground::new(MOST_MISSED)?;
        let mut report = Report::default();
        report.peers.extend(ucx.map(|ucx| ucx.name().to_owned()));
        if let Err(why) = &ground.monitor {
            report.skip("our side with a monitor on", why);
        }
        Ok(Self { effort, ucx, ground, report })
    }

    /// Measures the figures that have UCX as their peer.
    ///
    /// # Errors
    /// OutOfResources without memory or threads; Unavailable where UCX refuses a cache.
    pub(super) fn beside_ucx(&mut self) -> Result<()> {
        self.hits()?;
        self.two_threads_beside_ucx()?;
        self.misses()?;
        self.memory_types()
    }

    /// Measures the figures that are compared with hmem's own cache or the system calls, and those
    /// without a comparison.
    ///
    /// # Errors
    /// OutOfResources if memory or threads are short; Unavailable if the kernel hides the memory in
    /// use.
    pub(super) fn of_our_own(&mut self) -> Result<()> {
        self.two_threads()?;
        self.registering()?;
        self.memory()?;
        self.unmaps()
    }

    fn peer(&self) -> &'static str {
        self.ucx.map_or("UCX", Ucx::name)
    }

    /// Returns UCX's cache with the first `filled` regions in it, where there is a UCX.
    fn ucx_cache(&self, max: Option<u64>, filled: u64) -> Result<Option<UcxCache>> {
        let Some(ucx) = self.ucx else { return Ok(None) };
        let cache = ucx.cache(max).map_err(|why| {
            Error::new(ErrorKind::Unavailable, "bench cache")
                .context("peer", ucx.name())
                .context("why", why)
        })?;
        cache.get_put((0..filled).map(|number| self.ground.address(number)), LEN);
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

    /// Measures hits. UCX's cache has no limit, and hmem's cache does not reach its limit.
    fn hits_beside_ucx(
        &mut self,
        figure: &str,
        regions: u64,
        threads: usize,
        draw: impl Draw,
        target: Option<f64>,
    ) -> Result<()> {
        let cache = self.ground.cache(2 * regions, regions)?;
        let ucx = self.ucx_cache(None, regions)?;
        let ours = our_hits(&self.ground, &cache, draw);
        let theirs = ucx.as_ref().map(|ucx| their_hits(&self.ground, ucx, draw));
        let mut sides = vec![Side { threads, run: &ours }];
        sides.extend(theirs.as_ref().map(|theirs| Side { threads, run: theirs }));
        let seen = in_turns(self.effort, &sides);
        assert_hits(&cache, regions);
        if let Some(ucx) = &ucx {
            assert_eq!(ucx.registrations(), regions, "UCX registers again");
        }
        self.report.rows.push(row(figure, regions, threads, &seen, self.peer(), target));
        Ok(())
    }

    fn two_threads(&mut self) -> Result<()> {
        self.two_threads_of(SAME, 1, first)?;
        self.two_threads_of(DIFFERENT, 1_000, at_random(1_000))
    }

    fn two_threads_of(&mut self, figure: &str, regions: u64, draw: impl Draw) -> Result<()> {
        let cache = self.ground.cache(2 * regions, regions)?;
        let other = self.ground.cache(2 * regions, regions)?;
        let ours = our_hits(&self.ground, &cache, draw);
        let beside = our_hits(&self.ground, &other, draw);
        // The second thread's numbers begin at another place.
        let apart = |start: u64, count: u64| {
            if start >> 32 == 0 { ours(start, count) } else { beside(start, count) }
        };
        let sides = [
            Side { threads: 2, run: &ours },
            Side { threads: 1, run: &ours },
            Side { threads: 2, run: &apart },
        ];
        let seen = in_turns(self.effort, &sides);
        assert_hits(&cache, regions);
        assert_hits(&other, regions);
        self.report.rows.push(row(figure, regions, 2, &[seen[0], seen[1]], ALONE, Some(1.15)));
        self.report.rows.push(row(figure, regions, 2, &[seen[0], seen[2]], APART, None));
        Ok(())
    }

    /// Measures lookups of regions that were evicted since their last lookup.
    fn misses(&mut self) -> Result<()> {
        for regions in [1, 1_000, MOST] {
            let cache = self.ground.cache(regions, 0)?;
            let ucx = self.ucx_cache(Some(regions), 0)?;
            let all = 2 * regions + 1;
            let (ground, got, got_theirs) = (&self.ground, AtomicU64::new(0), AtomicU64::new(0));
            let ours = |start: u64, count: u64| {
                for number in start..start + count {
                    black_box(
                        *cache
                            .get_or_register(&ground.key(number % all))
                            .expect("registering nothing works"),
                    );
                }
                got.fetch_add(count, Ordering::Relaxed);
            };
            let theirs = |start: u64, count: u64| {
                let ucx = ucx.as_ref().expect("measured only where it is");
                ucx.get_put((start..start + count).map(|number| ground.address(number % all)), LEN);
                got_theirs.fetch_add(count, Ordering::Relaxed);
            };
            let sides = [Side { threads: 1, run: &ours }, Side { threads: 1, run: &theirs }];
            let seen = in_turns(self.effort, &sides[..1 + usize::from(ucx.is_some())]);
            // Every measured get was a miss.
            let statistics = cache.statistics();
            assert_eq!(statistics.registrations, got.into_inner(), "{statistics:?}");
            if let Some(ucx) = &ucx {
                assert_eq!(ucx.registrations(), got_theirs.into_inner(), "UCX does not miss");
            }
            self.report.rows.push(row(MISS, regions, 1, &seen, self.peer(), Some(1.0)));
        }
        Ok(())
    }

    fn registering(&mut self) -> Result<()> {
        const REGIONS: u64 = 1_000;
        let ground = &self.ground;
        let cache = ground.cache(2 * REGIONS, REGIONS)?;
        let slow = Arc::clone(&cache.backend().slow);
        // Latencies of single lookups for as long as `going` says.
        let lookups = |going: &dyn Fn() -> bool| {
            let mut seen = Histogram::<u64>::new(3).expect("three digits");
            let mut number = 0;
            while going() {
                for _ in 0..1_000 {
                    let began = Instant::now();
                    black_box(
                        *cache.get_or_register(&ground.key(place(number, REGIONS))).expect("a hit"),
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
            let registering = scope.spawn(|| cache.get_or_register(&ground.slow_key()).map(drop));
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
                        let address = Address(addresses[place(number, bound) as usize]);
                        let owner = registry.owner_of(address).expect("a lookup works");
                        assert_eq!(owner.device.is_some(), is_device);
                    }
                };
                let theirs = |start: u64, count: u64| {
                    let types = ucx.as_ref().expect("measured only where it is");
                    for number in start..start + count {
                        assert_eq!(
                            types.is_device(addresses[place(number, bound) as usize]),
                            is_device
                        );
                    }
                };
                let figure = format!("whose is this {what} address");
                for threads in [1, 2] {
                    let sides = [Side { threads, run: &ours }, Side { threads, run: &theirs }];
                    let seen = in_turns(self.effort, &sides[..1 + usize::from(ucx.is_some())]);
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

/// Makes a row of our time and, where there is a peer, the peer's.
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

/// A function from the number of an operation to the region that it looks up. Measured loops are
/// generic over this function.
trait Draw: Fn(u64) -> u64 + Copy + Sync {}

impl<F: Fn(u64) -> u64 + Copy + Sync> Draw for F {}

/// Always chooses the first region.
fn first(_number: u64) -> u64 {
    black_box(0)
}

/// Returns a generator that draws a random index below `regions`.
fn at_random(regions: u64) -> impl Draw {
    move |number| place(number, regions)
}

fn our_hits(ground: &Ground, cache: &Cache<Noop>, draw: impl Draw) -> impl Fn(u64, u64) + Sync {
    move |start, count| {
        for number in start..start + count {
            let lease = cache.get_or_register(&ground.key(draw(number))).expect("a hit");
            black_box(*lease);
        }
    }
}

fn their_hits(ground: &Ground, cache: &UcxCache, draw: impl Draw) -> impl Fn(u64, u64) + Sync {
    move |start, count| {
        cache.get_put((start..start + count).map(|number| ground.address(draw(number))), LEN);
    }
}

/// Asserts that every measured lookup was a hit.
fn assert_hits(cache: &Cache<Noop>, regions: u64) {
    let statistics = cache.statistics();
    assert_eq!((statistics.registrations, statistics.misses), (regions, regions), "{statistics:?}");
}

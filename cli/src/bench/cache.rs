//! The figures of the registration cache, each beside UCX's in the same run where UCX is installed.

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
    Address, AllocationKind, DeviceId, Error, ErrorKind, Iface, Registry, Result,
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
use crate::json::Skipped;

const UCX: &str = "UCX";
const ALONE: &str = "ours, one thread";
const APART: &str = "ours, a cache each";
const IDLE: &str = "ours, nobody registering";

/// The most regions that a figure is about, and what its misses go round.
pub(super) const MOST: u64 = 100_000;
const MOST_MISSED: u64 = 2 * MOST + 1;

/// What is measured with.
pub(super) struct Bench {
    pub(super) effort: Effort,
    pub(super) ucx: std::result::Result<Ucx, String>,
    pub(super) ground: Ground,
    pub(super) report: Report,
}

impl Bench {
    /// # Errors
    /// OutOfResources without memory.
    pub(super) fn new(effort: Effort) -> Result<Self> {
        let (ucx, ground) = (Ucx::load(), Ground::new(MOST_MISSED)?);
        let mut report = Report::default();
        let mut skip =
            |what: &str, why: String| report.skipped.push(Skipped { what: what.into(), why });
        if let Err(why) = &ucx {
            skip(UCX, why.clone());
        }
        if let Err(why) = &ground.monitor {
            skip("our side with a monitor on", why.to_string());
        }
        Ok(Self { effort, ucx, ground, report })
    }

    /// Measures everything; `next` is told what comes.
    pub(super) fn run(&mut self, mut next: impl FnMut(usize, usize, &str)) -> Result<()> {
        type Step = fn(&mut Bench) -> Result<()>;
        let steps: [(&str, Step); 7] = [
            ("hits", Self::hits),
            ("hits from two threads", Self::two_threads),
            ("misses", Self::misses),
            ("lookups while a registration takes a second", Self::registering),
            ("memory types", Self::memory_types),
            ("memory", Self::memory),
            ("unmaps", Self::unmaps),
        ];
        for (done, (what, step)) in steps.iter().enumerate() {
            next(done, steps.len(), what);
            step(self)?;
        }
        Ok(())
    }

    fn ucx_cache(&self, max: u64, filled: u64) -> Result<Option<UcxCache>> {
        let Ok(ucx) = self.ucx else { return Ok(None) };
        let cache = ucx.cache(max as usize).map_err(|why| {
            Error::new(ErrorKind::Unavailable, "bench cache")
                .context("peer", UCX)
                .context("why", why)
        })?;
        for number in 0..filled {
            cache.get_put(self.ground.address(number), LEN);
        }
        Ok(Some(cache))
    }

    fn hits(&mut self) -> Result<()> {
        self.hits_of("hit, one buffer again and again", 1, first, 0.25)?;
        self.hits_of("hit, at random", 1_000, at_random(1_000), 0.25)?;
        self.hits_of("hit, at random", 100_000, at_random(100_000), 0.3)
    }

    fn hits_of(&mut self, figure: &str, regions: u64, draw: impl Draw, target: f64) -> Result<()> {
        let cache = self.ground.cache(2 * regions, regions)?;
        let ucx = self.ucx_cache(2 * regions, regions)?;
        let ours = our_hits(&self.ground, &cache, draw);
        let theirs = ucx.as_ref().map(|ucx| their_hits(&self.ground, ucx, draw));
        let mut sides = vec![Side { threads: 1, run: &ours }];
        sides.extend(theirs.as_ref().map(|theirs| Side { threads: 1, run: theirs }));
        let seen = in_turns(self.effort, &sides);
        assert_hits(&cache, ucx.as_ref(), regions);
        self.report.rows.push(row(figure, regions, 1, &seen, UCX, Some(target)));
        Ok(())
    }

    fn two_threads(&mut self) -> Result<()> {
        self.two_threads_of("hit, the same region", 1, first)?;
        self.two_threads_of("hit, different regions", 1_000, at_random(1_000))
    }

    fn two_threads_of(&mut self, figure: &str, regions: u64, draw: impl Draw) -> Result<()> {
        let cache = self.ground.cache(2 * regions, regions)?;
        let other = self.ground.cache(2 * regions, regions)?;
        let ucx = self.ucx_cache(2 * regions, regions)?;
        let ours = our_hits(&self.ground, &cache, draw);
        let beside = our_hits(&self.ground, &other, draw);
        // The second thread's numbers begin at another place.
        let apart = |start: u64, count: u64| {
            if start >> 32 == 0 { ours(start, count) } else { beside(start, count) }
        };
        let theirs = ucx.as_ref().map(|ucx| their_hits(&self.ground, ucx, draw));
        let mut sides = vec![
            Side { threads: 2, run: &ours },
            Side { threads: 1, run: &ours },
            Side { threads: 2, run: &apart },
        ];
        sides.extend(theirs.as_ref().map(|theirs| Side { threads: 2, run: theirs }));
        let seen = in_turns(self.effort, &sides);
        assert_hits(&cache, ucx.as_ref(), regions);
        assert_hits(&other, None, regions);
        self.report.rows.push(row(figure, regions, 2, &[seen[0], seen[1]], ALONE, Some(1.15)));
        self.report.rows.push(row(figure, regions, 2, &[seen[0], seen[2]], APART, None));
        if let [ours, .., theirs] = seen[..]
            && seen.len() == 4
        {
            self.report.rows.push(row(figure, regions, 2, &[ours, theirs], UCX, None));
        }
        Ok(())
    }

    /// Each get is of a region that was evicted since it was last there.
    fn misses(&mut self) -> Result<()> {
        for regions in [1, 1_000, MOST] {
            let cache = self.ground.cache(regions, 0)?;
            let ucx = self.ucx_cache(regions, 0)?;
            let all = 2 * regions + 1;
            let (ground, got, got_theirs) = (&self.ground, AtomicU64::new(0), AtomicU64::new(0));
            let ours = |start: u64, count: u64| {
                for number in start..start + count {
                    black_box(
                        *cache.get(&ground.key(number % all)).expect("registering nothing works"),
                    );
                }
                got.fetch_add(count, Ordering::Relaxed);
            };
            let theirs = |start: u64, count: u64| {
                let ucx = ucx.as_ref().expect("measured only where it is");
                for number in start..start + count {
                    ucx.get_put(ground.address(number % all), LEN);
                }
                got_theirs.fetch_add(count, Ordering::Relaxed);
            };
            let sides = [Side { threads: 1, run: &ours }, Side { threads: 1, run: &theirs }];
            let seen = in_turns(self.effort, &sides[..1 + usize::from(ucx.is_some())]);
            // A figure of misses that were none would be no figure.
            let statistics = cache.statistics();
            assert_eq!(statistics.registrations, got.into_inner(), "{statistics:?}");
            if let Some(ucx) = &ucx {
                assert_eq!(ucx.registrations(), got_theirs.into_inner(), "UCX does not miss");
            }
            self.report.rows.push(row("miss, insert and evict", regions, 1, &seen, UCX, Some(1.0)));
        }
        Ok(())
    }

    fn registering(&mut self) -> Result<()> {
        const REGIONS: u64 = 1_000;
        let ground = &self.ground;
        let cache = ground.cache(2 * REGIONS, REGIONS)?;
        let slow = Arc::clone(&cache.source().slow);
        // Latencies of single lookups for as long as `going` says.
        let lookups = |going: &dyn Fn() -> bool| {
            let mut seen = Histogram::<u64>::new(3).expect("three digits");
            let mut number = 0;
            while going() {
                for _ in 0..1_000 {
                    let began = Instant::now();
                    black_box(*cache.get(&ground.key(place(number, REGIONS))).expect("a hit"));
                    seen.saturating_record(began.elapsed().as_nanos() as u64);
                    number += 1;
                }
            }
            seen
        };
        let began = Instant::now();
        let idle = lookups(&|| began.elapsed() < Duration::from_secs(1));
        let busy = thread::scope(|scope| {
            let registering = scope.spawn(|| cache.get(&ground.slow_key()).map(drop));
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
        for regions in [1_000, 100_000] {
            let simulated = Arc::new(Simulated::builder().build()?);
            let request =
                AllocRequest { len: LEN, device: DeviceId(0), kind: AllocationKind::Device };
            let allocations: Vec<_> =
                (0..regions).map(|_| simulated.allocate(&request)).collect::<Result<_>>()?;
            let mut registry = Registry::new();
            registry.add(Arc::new(System::new()))?;
            registry.add(Arc::clone(&simulated) as Arc<dyn Iface>)?;
            let ucx = self.ucx.as_ref().ok().map(|ucx| {
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
                    self.report.rows.push(row(&figure, regions, threads, &seen, UCX, Some(0.5)));
                }
            }
            // The device memory goes with the simulated device.
            drop(ucx);
        }
        Ok(())
    }

    fn memory(&mut self) -> Result<()> {
        self.report.memory.extend(memory::of_layouts()?);
        Ok(())
    }
}

/// What was seen of ours, and of the peer where it is.
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

/// Which region an operation hits, by its number. Each way of drawing has loops of its own.
trait Draw: Fn(u64) -> u64 + Copy + Sync {}

impl<F: Fn(u64) -> u64 + Copy + Sync> Draw for F {}

/// The only one.
fn first(_number: u64) -> u64 {
    black_box(0)
}

/// Any of `regions`.
fn at_random(regions: u64) -> impl Draw {
    move |number| place(number, regions)
}

fn our_hits(ground: &Ground, cache: &Cache<Noop>, draw: impl Draw) -> impl Fn(u64, u64) + Sync {
    move |start, count| {
        for number in start..start + count {
            let lease = cache.get(&ground.key(draw(number))).expect("a hit");
            black_box(*lease);
        }
    }
}

fn their_hits(ground: &Ground, cache: &UcxCache, draw: impl Draw) -> impl Fn(u64, u64) + Sync {
    move |start, count| {
        for number in start..start + count {
            cache.get_put(ground.address(draw(number)), LEN);
        }
    }
}

/// A figure of hits that were none would be no figure.
fn assert_hits(cache: &Cache<Noop>, ucx: Option<&UcxCache>, regions: u64) {
    let statistics = cache.statistics();
    assert_eq!((statistics.registrations, statistics.misses), (regions, regions), "{statistics:?}");
    if let Some(ucx) = ucx {
        assert_eq!(ucx.registrations(), regions, "UCX registers again");
    }
}

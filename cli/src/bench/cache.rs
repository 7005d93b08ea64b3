//! The figures of the registration cache, each beside UCX's in the same run where UCX is installed.

use std::{
    hint::black_box,
    sync::{Arc, atomic::Ordering},
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
    noop::{self, BASE, LEN, Noop},
    report::{Report, Row},
    ucx::{Ucx, UcxCache},
};
use crate::json::Skipped;

const UCX: &str = "UCX";
const ALONE: &str = "ours, one thread";
const IDLE: &str = "ours, nobody registering";

/// What is measured with.
pub(super) struct Bench {
    pub(super) effort: Effort,
    pub(super) ucx: std::result::Result<Ucx, String>,
    pub(super) report: Report,
}

impl Bench {
    /// Measures everything; `next` is told what comes.
    pub(super) fn run(&mut self, mut next: impl FnMut(usize, usize, &str)) -> Result<()> {
        type Step = fn(&mut Bench) -> Result<()>;
        let steps: [(&str, Step); 6] = [
            ("hits", Self::hits),
            ("hits from two threads", Self::two_threads),
            ("misses", Self::misses),
            ("lookups while a registration takes a second", Self::registering),
            ("memory types", Self::memory_types),
            ("memory", Self::memory),
        ];
        if let Err(why) = &self.ucx {
            self.report.skipped.push(Skipped { what: UCX.into(), why: why.clone() });
        }
        for (done, (what, step)) in steps.iter().enumerate() {
            next(done, steps.len(), what);
            step(self)?;
        }
        Ok(())
    }

    fn row(
        &mut self,
        figure: &str,
        regions: u64,
        threads: usize,
        seen: &[f64],
        peer: &str,
        target: Option<f64>,
    ) {
        let peer_ns = seen.get(1).copied();
        let ratio = peer_ns.map(|peer| seen[0] / peer);
        self.report.rows.push(Row {
            figure: figure.into(),
            regions,
            threads,
            ours_ns: seen[0],
            peer: peer_ns.map(|_| peer.into()),
            peer_ns,
            ratio,
            target: ratio.and(target),
        });
    }

    fn ucx_cache(&self, max: u64, filled: u64) -> Result<Option<UcxCache>> {
        let Ok(ucx) = self.ucx else { return Ok(None) };
        let cache = ucx.cache(max as usize).map_err(|why| {
            Error::new(ErrorKind::Unavailable, "bench cache").context("peer", UCX).context("why", why)
        })?;
        for number in 0..filled {
            cache.get_put(BASE + number * LEN, LEN);
        }
        Ok(Some(cache))
    }

    fn hits(&mut self) -> Result<()> {
        self.hits_of("hit, one buffer again and again", 1, first, 0.25)?;
        self.hits_of("hit, at random", 1_000, at_random(1_000), 0.25)?;
        self.hits_of("hit, at random", 100_000, at_random(100_000), 0.3)
    }

    fn hits_of(&mut self, figure: &str, regions: u64, draw: impl Draw, target: f64) -> Result<()> {
        let cache = noop::cache(2 * regions, regions)?;
        let ucx = self.ucx_cache(2 * regions, regions)?;
        let ours = our_hits(&cache, draw);
        let theirs = their_hits(ucx.as_ref(), draw);
        let sides: [Side<'_>; 2] = [&ours, &theirs];
        let seen = in_turns(self.effort, 1, &sides[..1 + usize::from(ucx.is_some())]);
        self.row(figure, regions, 1, &seen, UCX, Some(target));
        assert_hits(&cache);
        Ok(())
    }

    fn two_threads(&mut self) -> Result<()> {
        self.two_threads_of("hit, the same region", 1, first)?;
        self.two_threads_of("hit, different regions", 1_000, at_random(1_000))
    }

    fn two_threads_of(&mut self, figure: &str, regions: u64, draw: impl Draw) -> Result<()> {
        let cache = noop::cache(2 * regions, regions)?;
        let ucx = self.ucx_cache(2 * regions, regions)?;
        let ours = our_hits(&cache, draw);
        let theirs = their_hits(ucx.as_ref(), draw);
        let alone = in_turns(self.effort, 1, &[&ours]);
        let sides: [Side<'_>; 2] = [&ours, &theirs];
        let both = in_turns(self.effort, 2, &sides[..1 + usize::from(ucx.is_some())]);
        self.row(figure, regions, 2, &[both[0], alone[0]], ALONE, Some(1.15));
        if both.len() > 1 {
            self.row(figure, regions, 2, &both, UCX, None);
        }
        assert_hits(&cache);
        Ok(())
    }

    /// Each get is of a region that was evicted since it was last there.
    fn misses(&mut self) -> Result<()> {
        for regions in [1, 1_000, 100_000] {
            let cache = noop::cache(regions, 0)?;
            let ucx = self.ucx_cache(regions, 0)?;
            let all = 2 * regions + 1;
            let ours = |start: u64, count: u64| {
                for number in start..start + count {
                    black_box(*cache.get(&noop::key(number % all)).expect("registering nothing works"));
                }
            };
            let theirs = |start: u64, count: u64| {
                for number in start..start + count {
                    ucx.as_ref().expect("measured only where it is").get_put(BASE + number % all * LEN, LEN);
                }
            };
            let sides: [Side<'_>; 2] = [&ours, &theirs];
            let seen = in_turns(self.effort, 1, &sides[..1 + usize::from(ucx.is_some())]);
            self.row("miss, insert and evict", regions, 1, &seen, UCX, Some(1.0));
        }
        Ok(())
    }

    fn registering(&mut self) -> Result<()> {
        const REGIONS: u64 = 1_000;
        let cache = noop::cache(2 * REGIONS, REGIONS)?;
        let slow = Arc::clone(&cache.source().slow);
        // Latencies of single lookups for as long as `going` says.
        let lookups = |going: &dyn Fn() -> bool| {
            let mut seen = Histogram::<u64>::new(3).expect("three digits");
            let mut number = 0;
            while going() {
                for _ in 0..1_000 {
                    let began = Instant::now();
                    black_box(*cache.get(&noop::key(place(number, REGIONS))).expect("a hit"));
                    seen.saturating_record(began.elapsed().as_nanos() as u64);
                    number += 1;
                }
            }
            seen
        };
        let began = Instant::now();
        let idle = lookups(&|| began.elapsed() < Duration::from_secs(1));
        let busy = thread::scope(|scope| {
            let registering = scope.spawn(|| cache.get(&noop::slow_key()).map(drop));
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
            self.row(figure, REGIONS, 1, &seen, IDLE, None);
        }
        Ok(())
    }

    fn memory_types(&mut self) -> Result<()> {
        for regions in [1_000, 100_000] {
            let simulated = Arc::new(Simulated::builder().build()?);
            let request = AllocRequest { len: LEN, device: DeviceId(0), kind: AllocationKind::Device };
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
            let device: Vec<u64> = allocations.iter().map(|allocation| allocation.base().0 + 123).collect();
            let host = vec![0_u8; 1 << 20];
            let host: Vec<u64> = (0..256).map(|page| host.as_ptr().addr() as u64 + page * 4096).collect();
            for (what, addresses, is_device) in [("host", &host, false), ("device", &device, true)] {
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
                        assert_eq!(types.is_device(addresses[place(number, bound) as usize]), is_device);
                    }
                };
                let sides: [Side<'_>; 2] = [&ours, &theirs];
                let sides = &sides[..1 + usize::from(ucx.is_some())];
                let figure = format!("whose is this {what} address");
                for threads in [1, 2] {
                    let seen = in_turns(self.effort, threads, sides);
                    self.row(&figure, regions, threads, &seen, UCX, Some(0.5));
                }
            }
            // The device memory goes with the simulated device.
            drop(ucx);
        }
        Ok(())
    }

    fn memory(&mut self) -> Result<()> {
        self.report.memory = memory::of_layouts()?;
        Ok(())
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

fn our_hits(cache: &Cache<Noop>, draw: impl Draw) -> impl Fn(u64, u64) + Sync {
    move |start, count| {
        for number in start..start + count {
            let lease = cache.get(&noop::key(draw(number))).expect("a hit");
            black_box(*lease);
        }
    }
}

/// The same of UCX, where it is.
fn their_hits(ucx: Option<&UcxCache>, draw: impl Draw) -> impl Fn(u64, u64) + Sync {
    move |start, count| {
        let cache = ucx.expect("measured only where it is");
        for number in start..start + count {
            cache.get_put(BASE + draw(number) * LEN, LEN);
        }
    }
}

/// A figure of hits that were none would be no figure.
fn assert_hits(cache: &Cache<Noop>) {
    let statistics = cache.statistics();
    assert_eq!(statistics.misses, statistics.registrations, "{statistics:?}");
    assert_eq!(statistics.evictions, 0, "{statistics:?}");
}

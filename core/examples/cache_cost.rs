//! Measures the cost of a hit, a miss and an invalidation of the registration cache.
//!
//! `cargo run --release -p hmem-core --example cache_cost` prints nanoseconds.
//!
//! To count instructions, subtract the results of two runs under `valgrind --tool=callgrind
//! target/release/examples/cache_cost WORK REGIONS COUNT`:
//!
//! - a hit, from the start and length of a range to the end of the lease: WORK is `get` in the
//!   first run, and `nothing` in the second, which draws the addresses without a lookup;
//! - a miss in a full cache: WORK is `miss` in both runs, with different counts;
//! - an invalidation of the 64 KiB after the cached regions: WORK is `change`, and `nothing`.

use std::{env, hint::black_box, sync::Arc, time::Instant};

use hmem_core::{
    Access, Address, AddressRange, Rejected, Result,
    cache::{Cache, CacheBackend, Key, Limits},
    monitor::{InvalidationCause, Invalidator},
};

struct Nothing;

impl CacheBackend for Nothing {
    type Region = u64;
    type Watch = ();
    type Owner = ();

    fn watch(&self, _: &Key, _: &Arc<dyn Invalidator>) -> Result<()> {
        Ok(())
    }
    fn unwatch(&self, _: ()) {}
    fn register(&self, key: &Key, (): &(), _: Option<&Self::Watch>) -> Result<u64> {
        Ok(key.range().start().0)
    }
    fn deregister(&self, _: u64) -> Result<(), Rejected<u64>> {
        Ok(())
    }
}

const LEN: u64 = 4096;
const BASE: u64 = 0x7f00_0000_0000;

fn address(region: u64) -> u64 {
    BASE + region * LEN
}

#[inline(always)]
fn key(address: u64) -> Key {
    let range = AddressRange::new(Address(address), LEN).expect("no wrap");
    Key::new(range, Access::SEND).expect("a key")
}

fn filled(regions: u64) -> Cache<Nothing> {
    let limits = Limits { max_count: regions as usize + 1, ..Limits::default() };
    let cache = Cache::new(Nothing, limits).expect("a cache");
    for region in 0..regions {
        cache.get_or_register(&key(address(region))).expect("registered");
        // This first hit marks the entry as referenced, so that the measured hits need not mark it.
        cache.get_or_register(&key(address(region))).expect("a hit");
    }
    cache
}

/// Calls `each` with the addresses of `count` random regions.
#[inline(always)]
fn draw(regions: u64, count: u64, mut each: impl FnMut(u64)) {
    let mut random = 1_u64;
    for _ in 0..count {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        // `black_box` keeps the compiler from using its knowledge of how the address was computed.
        each(black_box(address(((random >> 32) * regions) >> 32)));
    }
}

fn hits(cache: &Cache<Nothing>, regions: u64, count: u64) {
    draw(regions, count, |address| {
        let lease = cache.get_or_register(&key(address)).expect("a hit");
        black_box(*lease);
    });
}

fn changes(cache: &Cache<Nothing>, regions: u64, count: u64) {
    const MAPPED: u64 = 64 << 10;
    let invalidator = cache.invalidator();
    draw(regions, count, |_| {
        let range = AddressRange::new(Address(address(regions)), MAPPED).expect("no wrap");
        let change = invalidator.invalidate_start(black_box(range), InvalidationCause::Unmap);
        invalidator.invalidate_end(change);
    });
}

/// Creates an empty cache with a limit of `regions` entries.
fn new_cache(regions: u64) -> Cache<Nothing> {
    let limits = Limits { max_count: regions as usize, ..Limits::default() };
    Cache::new(Nothing, limits).expect("a cache")
}

/// Looks up more regions in turn than the cache can hold, so that each lookup is a miss.
fn misses(cache: &Cache<Nothing>, regions: u64, count: u64) {
    for region in 0..count {
        black_box(
            *cache.get_or_register(&key(address(region % (2 * regions + 1)))).expect("registered"),
        );
    }
}

fn nothing(regions: u64, count: u64) {
    draw(regions, count, |address| {
        black_box(address);
    });
}

fn per(count: u64, run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    start.elapsed().as_nanos() as f64 / count as f64
}

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if let [what, regions, count] = &arguments[..] {
        let (regions, count) =
            (regions.parse().expect("a number"), count.parse().expect("a number"));
        let cache = filled(regions);
        match what.as_str() {
            "get" => hits(&cache, regions, count),
            "change" => changes(&cache, regions, count),
            "miss" => misses(&new_cache(regions), regions, count),
            _ => nothing(regions, count),
        }
        return;
    }
    const HITS: u64 = 20_000_000;
    const MISSES: u64 = 4_000_000;
    for regions in [1, 1_000, 100_000] {
        let cache = filled(regions);
        hits(&cache, regions, HITS / 10);
        let one = per(HITS, || hits(&cache, regions, HITS));
        let two = per(HITS, || {
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| hits(&cache, regions, HITS));
                }
            });
        });
        let full = new_cache(regions);
        let miss = per(MISSES, || misses(&full, regions, MISSES));
        let change = per(HITS, || changes(&cache, regions, HITS));
        println!(
            "{regions} regions: hit {one:.1} ns, two threads {two:.1} ns each, miss {miss:.0} ns, \
             change elsewhere {change:.1} ns"
        );
    }
}

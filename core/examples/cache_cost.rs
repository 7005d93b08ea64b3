//! Measures the cost of a hit, a miss and an invalidation of the registration cache.
//!
//! `cargo run --release -p hmem-core --example cache_cost` prints nanoseconds.
//!
//! To count the instructions of one operation, run it twice under `valgrind --tool=callgrind
//! target/release/examples/cache_cost WORK REGIONS COUNT`, and subtract the results. The argument
//! WORK selects the operation. The second run has WORK `nothing`, which only draws the addresses:
//!
//! - `get` is a hit, from the start and length of a range to the end of the lease.
//! - `handle` is a hit through a lookup handle.
//! - `domain` is a hit by `RegionCache::get`, and `domain-handle` a hit by
//!   `RegionLookupHandle::get`. Both start from a `Raw`. Their second run has WORK
//!   `domain-nothing`.
//! - `miss` is a miss in a full cache. Its second run is `miss` too, with another COUNT.
//! - `change` is an invalidation of the 64 KiB after the cached regions.

#![allow(unsafe_code, reason = "a provider that accesses no memory, and addresses of no memory")]

use std::{env, hint::black_box, sync::Arc, time::Instant};

use hmem_core::{
    Access, Address, AddressRange, Allocation, CacheAttr, Decision, Domain, DomainAttr, Error,
    ErrorKind, Iface, IfaceKind, LocalKey, MrFlags, MrMode, Path, Promise, Raw, RegionCache,
    Registry, Rejected, Result,
    cache::{Cache, CacheBackend, Key, Limits},
    iface::{Device, DmaBufMapping, MonitorSource},
    monitor::{DetectionMethod, InvalidationCause, Invalidator, Monitor, Subscription},
    path::{ExportUnit, P2pPolicy, PathRegistration, PathSelector, Target, Trace},
    provider::{
        DomainRequest, Imports, LiveObjects, MsgOrder, Nic, Piece, ProgressModel, Provider,
        ProviderAttr, ProviderDomain, ProviderRegion, Registration,
    },
};

/// A cache's back end, host memory with its monitor, and a provider with its NIC. All of them do
/// nothing.
#[derive(Clone, Copy, Debug)]
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

fn unsupported<T>(operation: &'static str) -> Result<T> {
    Err(Error::new(ErrorKind::Unsupported, operation))
}

impl Monitor for Nothing {
    fn name(&self) -> &str {
        "nothing"
    }
    fn rationale(&self) -> String {
        "the memory never changes".to_owned()
    }
    fn detection(&self) -> DetectionMethod {
        DetectionMethod::Callback
    }
    fn detects(&self, _: InvalidationCause) -> bool {
        true
    }
    fn subscribe(&self, _: AddressRange, _: Arc<dyn Invalidator>) -> Result<Subscription> {
        Ok(Subscription::unnumbered())
    }
    fn unsubscribe(&self, _: Subscription) {}
    fn valid(&self, _: &Subscription, _: &Allocation) -> Result<bool> {
        Ok(true)
    }
}

impl MonitorSource for Nothing {
    fn detection(&self) -> DetectionMethod {
        DetectionMethod::Callback
    }
    fn start(&self) -> Result<Arc<dyn Monitor>> {
        Ok(Arc::new(*self))
    }
}

// SAFETY: this iface claims no address, and copies and exports nothing.
unsafe impl Iface for Nothing {
    fn kind(&self) -> IfaceKind {
        IfaceKind::SYSTEM
    }
    fn name(&self) -> &str {
        "system"
    }
    fn devices(&self) -> Result<Vec<Device>> {
        Ok(Vec::new())
    }
    fn query(&self, _: Address) -> Result<Option<Allocation>> {
        Ok(None)
    }
    unsafe fn copy(&self, _: Address, _: Address, _: u64) -> Result<()> {
        unsupported("copy")
    }
    fn monitor(&self) -> Option<&dyn MonitorSource> {
        Some(self)
    }
}

// SAFETY: this selector registers nothing.
unsafe impl PathSelector for Nothing {
    fn plain_host(&self, nic: &Nic) -> Decision {
        Decision {
            path: Path::PlainHost,
            reason: "host memory".to_owned(),
            iface: IfaceKind::SYSTEM,
            iface_name: IfaceKind::SYSTEM.into(),
            device: None,
            nic: nic.to_string(),
            policy: P2pPolicy::Enabled,
            direct_paths: None,
            unit: ExportUnit::Range,
            mapping: DmaBufMapping::Default,
            from_cache: false,
            attempts: Trace::default(),
        }
    }
    unsafe fn register(&self, _: &[Target<'_>], _: &mut dyn FnMut(PathRegistration)) -> Result<()> {
        unsupported("register")
    }
}

impl Provider for Nothing {
    fn name(&self) -> &str {
        "nothing"
    }
    fn nics(&self) -> Result<Vec<ProviderAttr>> {
        Ok(vec![nic()])
    }
    fn open_domain(&self, _: &DomainRequest) -> Result<Arc<dyn ProviderDomain>> {
        Ok(Arc::new(NothingDomain(nic())))
    }
}

fn nic() -> ProviderAttr {
    ProviderAttr {
        nic: Nic { provider: "nothing".to_owned(), name: "nic0".to_owned(), pci_bus_id: None },
        required_mr_mode: MrMode::LOCAL | MrMode::VIRT_ADDR | MrMode::PROV_KEY,
        basic_mr_mode: MrMode::empty(),
        key_size: 8,
        raw_key_size: 0,
        mr_iov_limit: 1,
        max_mr_size: u64::MAX,
        max_mr_count: u64::MAX,
        page_sizes: vec![4096],
        imports: Imports::default(),
        staged_access: Access::empty(),
        flags: MrFlags::empty(),
        progress: ProgressModel::Nic,
        order: MsgOrder::empty(),
        cq_data_size: 0,
        driver_cache: None,
    }
}

#[derive(Debug)]
struct NothingDomain(ProviderAttr);

// SAFETY: no NIC exists, so nothing accesses memory.
unsafe impl ProviderDomain for NothingDomain {
    fn attr(&self) -> &ProviderAttr {
        &self.0
    }
    unsafe fn register(
        &self,
        registration: &Registration<'_>,
        _: &[Piece<'_>],
    ) -> Result<ProviderRegion> {
        let key = registration.ranges[0].start().0;
        Ok(ProviderRegion { token: key, local: LocalKey::from_provider(key), key })
    }
    fn deregister(&self, _: ProviderRegion) -> Result<()> {
        Ok(())
    }
    fn live(&self) -> LiveObjects {
        LiveObjects::default()
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

#[inline(always)]
fn memory(address: u64) -> Raw {
    let range = AddressRange::new(Address(address), LEN).expect("no wrap");
    // SAFETY: nothing accesses the memory.
    unsafe { Raw::new(range, Promise::ReadWrite) }
}

/// Opens a domain whose cache holds `regions` regions, each marked as referenced.
fn filled_domain(regions: u64) -> Domain {
    let mut registry = Registry::new();
    registry.add(Arc::new(Nothing)).expect("the first");
    let cache = Some(CacheAttr::default().max_count(regions as usize + 1));
    let attr = DomainAttr { cache, ..DomainAttr::default() };
    let domain = Domain::open(&Nothing, Arc::new(registry), Arc::new(Nothing), attr);
    let domain = domain.expect("a domain");
    let cache = domain.cache().expect("a cache");
    for memory in (0..regions).map(|region| memory(address(region))) {
        let region = cache.get(memory, Access::SEND).expect("registered");
        assert!(region.lease().uncached_reason().is_none(), "{region:?}");
        drop(region);
        cache.get(memory, Access::SEND).expect("a hit");
    }
    domain
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

fn handle_hits(cache: &Cache<Nothing>, regions: u64, count: u64) {
    let handle = cache.lookup_handle();
    draw(regions, count, |address| {
        let lease = handle.get_or_register(&key(address)).expect("a hit");
        black_box(*lease);
    });
}

fn domain_hits(cache: &RegionCache, regions: u64, count: u64) {
    draw(regions, count, |address| {
        let region = cache.get(memory(address), Access::SEND).expect("a hit");
        black_box(&*region);
    });
}

fn domain_handle_hits(cache: &RegionCache, regions: u64, count: u64) {
    let handle = cache.lookup_handle();
    draw(regions, count, |address| {
        let region = handle.get(memory(address), Access::SEND).expect("a hit");
        black_box(&*region);
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
        if let Some(what) = what.strip_prefix("domain") {
            let domain = filled_domain(regions);
            let cache = domain.cache().expect("a cache");
            match what {
                "" => domain_hits(cache, regions, count),
                "-handle" => domain_handle_hits(cache, regions, count),
                _ => nothing(regions, count),
            }
            return;
        }
        let cache = filled(regions);
        match what.as_str() {
            "get" => hits(&cache, regions, count),
            "handle" => handle_hits(&cache, regions, count),
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
        let by_handle = per(HITS, || handle_hits(&cache, regions, HITS));
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
             change elsewhere {change:.1} ns; by a handle: hit {by_handle:.1} ns"
        );
        let domain = filled_domain(regions);
        let cache = domain.cache().expect("a cache");
        domain_hits(cache, regions, HITS / 10);
        let one = per(HITS, || domain_hits(cache, regions, HITS));
        let by_handle = per(HITS, || domain_handle_hits(cache, regions, HITS));
        println!("{regions} regions of a domain: hit {one:.1} ns, by a handle {by_handle:.1} ns");
    }
}

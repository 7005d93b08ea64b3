//! The registration cache of a domain, over host memory and a simulated device, on the software
//! NIC.

mod child;
mod machine;
mod trials;
#[allow(dead_code, reason = "other test binaries use the rest")]
mod wire;

use std::{
    env, ptr,
    sync::{Arc, Mutex},
};

use hmem::{
    Access, Address, AddressRange, AllocationKind, CacheAttr, DeviceBuffer, DeviceId, Domain,
    DomainAttr, ErrorKind, Hmem, Iface, IfaceKind, MrMode, Path, Result,
    cache::UncachedReason,
    iface::AllocRequest,
    loopback::Loopback,
    monitor::InvalidationCause,
    system::{
        AddressReuse, FreeDetection, SIMULATED, Simulated,
        monitor::{HostMonitorKind, ImportCallbacks, ImportMonitor},
    },
};
use rustix::param::page_size;
use trials::trials;
use wire::{REMOTE, Wire, raw};

trials! {
    /// CACHE-02, MON-07
    each_allocation_and_device_has_its_own_cache_entry,
    /// CACHE-02
    lookup_that_names_an_iface_finds_no_region_of_another,
    /// CACHE-03
    refused_subscription_evicts_an_idle_region,
    /// CACHE-01
    lookup_handle_hits_cached_ranges_and_registers_others,
    /// MON-09
    monitors_of_different_ifaces_start_and_fail_independently,
    /// CACHE-04
    disabled_monitor_turns_every_cache_off,
    /// MON-08
    each_subscription_of_a_cached_region_is_undone,
    /// CACHE-10
    cache_entries_name_their_path_and_close_with_the_domain,
    domain_without_cache_and_endpoint_mode_refuse_the_cache,
    /// CACHE-12
    builder_overrides_variables_and_bad_variables_are_refused,
    /// CACHE-12
    kdreg2_counts_as_auto,
}

fn range(start: usize, len: usize) -> AddressRange {
    AddressRange::new(Address(start as u64), len as u64).expect("no wrap")
}

/// Opens a domain with a cache.
fn open(hmem: &Hmem, cache: CacheAttr) -> Domain {
    let attr = DomainAttr { cache: Some(cache), ..DomainAttr::default() };
    hmem.domain("loopback", attr).expect("a domain")
}

fn loopback() -> Loopback {
    Loopback::builder().remap_policy(machine::pages()).build().expect("a software NIC")
}

fn simulated(style: FreeDetection) -> Arc<Simulated> {
    let builder = Simulated::builder()
        .devices(2)
        .free_detection(style)
        .address_reuse(AddressReuse::JustFreed);
    Arc::new(builder.build().expect("a simulated device"))
}

/// Maps new pages by the C library's `mmap`, at the address `at` if given.
fn map(at: Option<usize>, len: usize) -> usize {
    let fixed = if at.is_some() { libc::MAP_FIXED } else { 0 };
    // SAFETY: a new mapping, or one in place of a mapping that the caller removed.
    let place = unsafe {
        libc::mmap(
            ptr::with_exposed_provenance_mut(at.unwrap_or(0)),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed,
            -1,
            0,
        )
    };
    assert_ne!(place, libc::MAP_FAILED);
    place.expose_provenance()
}

fn unmap(at: usize, len: usize) {
    // SAFETY: the test's own mapping, and nothing refers into it.
    assert_eq!(unsafe { libc::munmap(ptr::with_exposed_provenance_mut(at), len) }, 0);
}

/// Callbacks of an imported monitor whose application reports no changes. Keeps the subscribed
/// ranges.
#[derive(Debug, Default)]
struct Silent(Mutex<Vec<AddressRange>>);

impl ImportCallbacks for Silent {
    fn subscribe(&self, range: AddressRange) -> Result<()> {
        self.0.lock().unwrap().push(range);
        Ok(())
    }

    fn unsubscribe(&self, range: AddressRange) {
        let mut watched = self.0.lock().unwrap();
        let place = watched.iter().position(|other| *other == range).expect("it was subscribed");
        watched.swap_remove(place);
    }
}

/// Returns settings that cache device memory alone.
fn without_host() -> CacheAttr {
    CacheAttr::default().without_monitors([IfaceKind::SYSTEM])
}

fn each_allocation_and_device_has_its_own_cache_entry() {
    for (style, cause) in [
        (FreeDetection::Identity, InvalidationCause::Identity),
        (FreeDetection::Callback, InvalidationCause::Free),
    ] {
        each_allocation_has_its_own_entry(style, cause);
    }
}

/// Allocates memory of two devices at one address in turn, and looks it up. A free is the cause of
/// an invalidation.
fn each_allocation_has_its_own_entry(style: FreeDetection, cause: InvalidationCause) {
    let device = simulated(style);
    let iface: Arc<dyn Iface> = Arc::clone(&device) as _;
    let builder = Hmem::builder().without_vendor_ifaces().cache(without_host());
    let hmem = builder
        .shared_iface(Arc::clone(&device) as _)
        .provider(loopback())
        .build()
        .expect("started");
    let wire = Wire::open(open(&hmem, CacheAttr::default()));
    let cache = wire.domain.cache().expect("a cache");
    let allocate = |device: u32| {
        let request =
            AllocRequest { len: 8192, device: DeviceId(device), kind: AllocationKind::Device };
        DeviceBuffer::allocate(&iface, &request).expect("device memory")
    };
    // SAFETY: the memory is the test's own, and nothing refers into it.
    let get = |at| cache.get(unsafe { raw(at) }, REMOTE).expect("registered");
    let mut identities = Vec::new();
    for round in 0..20_u32 {
        let buffer = allocate(round % 2);
        let at = buffer.allocation().range;
        identities.push((at, buffer.allocation().id));
        buffer.write(0, &[round as u8 + 1; 16]).expect("inside");
        let region = get(at);
        assert_eq!(region.iface().expect("registered"), (SIMULATED, Some(DeviceId(round % 2))));
        let key = region.key().expect("a key");
        assert_eq!(wire.get(&key, 0, 16).expect("read"), [round as u8 + 1; 16]);
        let first = region.lease().key().expect("cached");
        drop(region);
        // Part of the same allocation is a hit too.
        let part = AddressRange::new(at.start(), 100).expect("no wrap");
        assert_eq!(get(part).lease().key(), Some(first));
        assert_eq!(cache.statistics().hits, u64::from(round) + 1);
        assert_eq!(cache.statistics().registrations, u64::from(round) + 1);
        // A lookup that names another device than the owner is refused.
        let other = Some(DeviceId(1 - round % 2));
        // SAFETY: the registrations must be refused.
        let memory = unsafe { raw(at) };
        let refused = cache.get_of(memory, REMOTE, SIMULATED, other).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
        let wrong = Access::from_bits_retain(1 << 40);
        let refused = cache.get_of(memory, wrong, SIMULATED, None).unwrap_err();
        assert_eq!(refused.operation(), "get_of", "{refused}");
    }
    assert!(
        identities.iter().all(|(at, _)| *at == identities[0].0),
        "the address did not come back"
    );
    identities.sort_by_key(|(_, id)| id.0);
    identities.dedup_by_key(|(_, id)| id.0);
    assert_eq!(identities.len(), 20, "every allocation has an identity of its own");
    let now = cache.statistics();
    assert!(now.invalidations(cause) >= 19, "{now:?}");
    cache.evict_idle();
    cache.reclaim();
    assert_eq!(wire.domain.live().regions, 0);
}

/// Device memory replaces host memory whose end no monitor reports.
fn lookup_that_names_an_iface_finds_no_region_of_another() {
    let monitor = ImportMonitor::new(Arc::new(Silent::default())).expect("a monitor");
    let device = simulated(FreeDetection::Callback);
    let iface: Arc<dyn Iface> = Arc::clone(&device) as _;
    let builder = Hmem::builder().without_vendor_ifaces().imported_cache_monitor(monitor);
    let hmem = builder
        .shared_iface(Arc::clone(&device) as _)
        .provider(loopback())
        .build()
        .expect("started");
    let domain = open(&hmem, CacheAttr::default());
    let cache = domain.cache().expect("a cache");
    let request =
        AllocRequest { len: page_size() as u64, device: DeviceId(1), kind: AllocationKind::Device };
    let allocate = || DeviceBuffer::allocate(&iface, &request).expect("device memory");
    let freed = allocate();
    let at = freed.allocation().range;
    drop(freed);
    // The device maps its next allocation over this host page.
    let place = at.start().0 as usize;
    assert_eq!(map(Some(place), page_size()), place);
    // SAFETY: the memory is the test's own, and nothing refers into it.
    let memory = unsafe { raw(at) };
    let host = cache.get(memory, REMOTE).expect("registered");
    assert!(host.lease().uncached_reason().is_none(), "{:?}", host.lease());
    assert_eq!(host.iface().expect("registered"), (IfaceKind::SYSTEM, None));
    drop(host);
    let buffer = allocate();
    assert_eq!(buffer.allocation().range, at, "the address did not come back");
    // A lookup that names no owner still finds the stale region.
    let stale = cache.find_owned(at, REMOTE).expect("a key").expect("a stale hit");
    assert_eq!(stale.iface().expect("registered"), (IfaceKind::SYSTEM, None));
    drop(stale);
    for hits in 1..3 {
        let owned = cache.get_owned_of(memory, REMOTE, SIMULATED, None).expect("registered");
        assert_eq!(owned.iface().expect("registered"), (SIMULATED, Some(DeviceId(1))));
        assert_eq!(cache.statistics().hits, hits);
    }
    let borrowed = cache.get_of(memory, REMOTE, SIMULATED, None).expect("registered");
    assert_eq!(borrowed.iface().expect("registered"), (SIMULATED, Some(DeviceId(1))));
    assert_eq!((cache.statistics().hits, cache.statistics().registrations), (3, 2));
}

/// Callbacks of an imported monitor that watches one range at a time.
#[derive(Debug, Default)]
struct OneRange(Silent);

impl ImportCallbacks for OneRange {
    fn subscribe(&self, range: AddressRange) -> Result<()> {
        if !self.0.0.lock().unwrap().is_empty() {
            return Err(hmem::Error::new(ErrorKind::OutOfResources, "subscribe"));
        }
        self.0.subscribe(range)
    }

    fn unsubscribe(&self, range: AddressRange) {
        self.0.unsubscribe(range);
    }
}

fn refused_subscription_evicts_an_idle_region() {
    let monitor = ImportMonitor::new(Arc::new(OneRange::default())).expect("a monitor");
    let builder = Hmem::builder().without_vendor_ifaces().imported_cache_monitor(monitor);
    let hmem = builder.provider(loopback()).build().expect("the ifaces start");
    let domain = open(&hmem, CacheAttr::default());
    let cache = domain.cache().expect("a cache");
    let pages = map(None, 2 * page_size());
    let get = |page| {
        // SAFETY: the memory is the test's own, and nothing refers into it.
        let memory = unsafe { raw(range(pages + page * page_size(), page_size())) };
        cache.get(memory, REMOTE).expect("registered")
    };
    drop(get(0));
    let second = get(1);
    assert!(second.lease().uncached_reason().is_none(), "{:?}", second.lease());
    assert_eq!((domain.live().regions, cache.statistics().evictions), (1, 1));
    // A region in use is not evicted.
    let first = get(0);
    let reason = first.lease().uncached_reason();
    assert!(matches!(reason, Some(UncachedReason::Unwatched(_))), "{reason:?}");
    drop((first, second));
    cache.evict_idle();
    unmap(pages, 2 * page_size());
}

fn lookup_handle_hits_cached_ranges_and_registers_others() {
    let device = simulated(FreeDetection::Callback);
    let iface: Arc<dyn Iface> = Arc::clone(&device) as _;
    let builder = Hmem::builder().without_vendor_ifaces().shared_iface(Arc::clone(&device) as _);
    let hmem = builder
        .cache_monitor(HostMonitorKind::MemHooks)
        .provider(loopback())
        .build()
        .expect("started");
    let domain = open(&hmem, CacheAttr::default());
    let cache = domain.cache().expect("a cache");
    let request = AllocRequest { len: 8192, device: DeviceId(1), kind: AllocationKind::Device };
    let buffer = DeviceBuffer::allocate(&iface, &request).expect("device memory");
    let at = map(None, page_size());
    let handle = cache.lookup_handle();
    for (memory, owner) in [
        (range(at, page_size()), (IfaceKind::SYSTEM, None)),
        (buffer.allocation().range, (SIMULATED, Some(DeviceId(1)))),
    ] {
        let before = cache.statistics();
        for part in [memory, memory, AddressRange::new(memory.start(), 100).expect("no wrap")] {
            // SAFETY: the memory is the test's own, and nothing refers into it.
            let region = handle.get(unsafe { raw(part) }, REMOTE).expect("registered");
            assert_eq!(region.iface().expect("registered"), owner);
            assert!(
                region.lease().uncached_reason().is_none(),
                "{:?}",
                region.lease().uncached_reason()
            );
        }
        let now = cache.statistics();
        assert_eq!((now.registrations - before.registrations, now.hits - before.hits), (1, 2));
    }
    // SAFETY: the registration is refused.
    handle.get(unsafe { raw(range(at, 0)) }, REMOTE).expect_err("there is nothing in it");
    drop(handle);
    unmap(at, page_size());
    cache.reclaim();
    assert_eq!(cache.statistics().entries, 1);
}

fn monitors_of_different_ifaces_start_and_fail_independently() {
    let device = simulated(FreeDetection::Callback);
    let request = AllocRequest { len: 8192, device: DeviceId(0), kind: AllocationKind::Device };
    let iface: Arc<dyn Iface> = Arc::clone(&device) as _;
    let buffer = DeviceBuffer::allocate(&iface, &request).expect("device memory");
    let host = map(None, page_size());
    // Each case: host monitor, ifaces without monitor, host memory cached, device memory cached.
    let cases = [
        (HostMonitorKind::Auto, Some(vec![IfaceKind::SYSTEM]), false, true),
        (HostMonitorKind::Import, Some(vec![SIMULATED]), true, false),
        (HostMonitorKind::Import, None, true, true),
    ];
    for (system, without_monitors, host_cached, device_cached) in cases {
        let builder = Hmem::builder().without_vendor_ifaces();
        let builder = match system {
            HostMonitorKind::Import => {
                let monitor = ImportMonitor::new(Arc::new(Silent::default())).expect("a monitor");
                builder.imported_cache_monitor(monitor)
            }
            other => builder.cache_monitor(other),
        };
        let hmem = builder
            .shared_iface(Arc::clone(&device) as _)
            .provider(loopback())
            .build()
            .expect("started");
        let mut cache = CacheAttr::default();
        cache.without_monitors = without_monitors;
        let domain = open(&hmem, cache);
        let cache = domain.cache().expect("a cache");
        for (at, cached, iface) in [
            (range(host, page_size()), host_cached, IfaceKind::SYSTEM),
            (buffer.allocation().range, device_cached, SIMULATED),
        ] {
            // SAFETY: the memory is the test's own.
            let region = cache.get(unsafe { raw(at) }, REMOTE).expect("registered");
            assert_eq!(region.lease().uncached_reason().is_none(), cached, "{:?}", region.lease());
            assert_eq!(cache.monitor(iface).is_ok(), cached);
            if let Err(error) = cache.monitor(iface) {
                assert!(error.context_value("why").is_some_and(|why| why.contains("disabled")));
            }
            if let Some(UncachedReason::Unwatched(why)) = region.lease().uncached_reason() {
                assert_eq!(why.iface_kind(), Some(iface), "{why}");
            }
        }
    }
    unmap(host, page_size());
}

/// The builder's monitor and the variable turn the caches of all domains off, also for device
/// memory and for a domain that sets its own limit.
fn disabled_monitor_turns_every_cache_off() {
    const VARIABLE: &str = "FI_MR_CACHE_MONITOR";
    let name = "disabled_monitor_turns_every_cache_off";
    if !child::alone(name, &[(VARIABLE, "disabled")]) {
        return;
    }
    let device = simulated(FreeDetection::Callback);
    let request = AllocRequest { len: 8192, device: DeviceId(0), kind: AllocationKind::Device };
    let iface: Arc<dyn Iface> = Arc::clone(&device) as _;
    let buffer = DeviceBuffer::allocate(&iface, &request).expect("device memory");
    let host = map(None, page_size());
    let builder = || Hmem::builder().without_vendor_ifaces();
    let by_builder = builder().cache_monitor(HostMonitorKind::Disabled);
    let cases = [
        (builder(), Some(VARIABLE)),
        (by_builder.without_environment(), Some("Builder::cache_monitor")),
        (builder().cache_monitor(HostMonitorKind::Auto), None),
        (builder().without_environment(), None),
    ];
    for (builder, off_by) in cases {
        let hmem = builder.iface_and_provider(&device);
        let defaults = hmem.cache_defaults().expect("good values");
        assert_eq!(defaults.off_by(), off_by);
        assert_eq!(defaults.limits().max_count == 0, off_by.is_some());
        let domain = open(&hmem, CacheAttr::default().max_count(100));
        let cache = domain.cache().expect("a cache");
        for at in [range(host, page_size()), buffer.allocation().range] {
            for _ in 0..2 {
                // SAFETY: the memory is the test's own.
                drop(cache.get(unsafe { raw(at) }, REMOTE).expect("registered"));
            }
        }
        let hits = if off_by.is_some() { 0 } else { 2 };
        assert_eq!(
            (cache.statistics().hits, cache.statistics().entries),
            (hits, hits as usize),
            "{off_by:?}"
        );
    }
    unmap(host, page_size());
}

fn each_subscription_of_a_cached_region_is_undone() {
    let watcher = Arc::new(Silent::default());
    let monitor = ImportMonitor::new(Arc::clone(&watcher) as _).expect("a monitor");
    let builder = Hmem::builder().without_vendor_ifaces().imported_cache_monitor(monitor);
    let hmem = builder.provider(loopback()).build().expect("started");
    let domain = open(&hmem, CacheAttr::default().max_count(4));
    let at = map(None, 16 * page_size());
    let cache = domain.cache().expect("a cache");
    for page in 0..16 {
        // SAFETY: the memory is the test's own.
        cache
            .get(unsafe { raw(range(at + page * page_size(), page_size())) }, REMOTE)
            .expect("registered");
    }
    assert!(!watcher.0.lock().unwrap().is_empty());
    cache.evict_idle();
    assert!(watcher.0.lock().unwrap().is_empty());
    assert_eq!(domain.live().regions, 0);
    unmap(at, 16 * page_size());
}

fn cache_entries_name_their_path_and_close_with_the_domain() {
    let monitor = ImportMonitor::new(Arc::new(Silent::default())).expect("a monitor");
    let device = simulated(FreeDetection::Callback);
    let iface: Arc<dyn Iface> = Arc::clone(&device) as _;
    let request = AllocRequest { len: 8192, device: DeviceId(0), kind: AllocationKind::Device };
    let buffer = DeviceBuffer::allocate(&iface, &request).expect("device memory");
    let builder = Hmem::builder().without_vendor_ifaces().imported_cache_monitor(monitor);
    let hmem = builder.iface_and_provider(&device);
    let domain = open(&hmem, CacheAttr::default());
    let at = map(None, page_size());
    {
        let cache = domain.cache().expect("a cache");
        // SAFETY: the memory is the test's own.
        let (host, there) = unsafe { (raw(range(at, page_size())), raw(buffer.range())) };
        let [host, there] = [host, there].map(|raw| cache.get(raw, REMOTE).expect("registered"));
        let mut paths: Vec<_> =
            cache.entries().into_iter().map(|one| (one.region, one.users)).collect();
        paths.sort_by_key(|(path, _)| path.map(Path::name));
        assert_eq!(paths, [(Some(Path::DmaBuf), 1), (Some(Path::PlainHost), 1)]);
        drop((host, there));
        assert_eq!(domain.live().regions, 2);
    }
    domain.close().expect("idle regions are deregistered");
    unmap(at, page_size());
}

/// Extension of the builder for an `Hmem` with a device's iface and a software NIC.
trait WithBoth {
    fn iface_and_provider(self, device: &Arc<Simulated>) -> Hmem;
}

impl WithBoth for hmem::Builder {
    fn iface_and_provider(self, device: &Arc<Simulated>) -> Hmem {
        self.shared_iface(Arc::clone(device) as _).provider(loopback()).build().expect("started")
    }
}

fn domain_without_cache_and_endpoint_mode_refuse_the_cache() {
    let loopback = Loopback::builder().needs(MrMode::ENDPOINT).build().expect("a software NIC");
    let hmem = Hmem::builder().without_vendor_ifaces().provider(loopback).build().expect("started");
    let attr = DomainAttr { mr_mode: MrMode::ENDPOINT, ..DomainAttr::default() };
    let without = hmem.domain("loopback", attr.clone()).expect("a domain");
    assert_eq!(without.cache().unwrap_err().kind(), ErrorKind::BadState);
    let with = hmem
        .domain("loopback", DomainAttr { cache: Some(CacheAttr::default()), ..attr })
        .expect("a domain");
    assert_eq!(with.cache().unwrap_err().kind(), ErrorKind::Unsupported);
}

fn builder_overrides_variables_and_bad_variables_are_refused() {
    let name = "builder_overrides_variables_and_bad_variables_are_refused";
    let variables = [
        ("FI_MR_CACHE_MAX_SIZE", "20480"),
        ("FI_MR_CACHE_MAX_COUNT", "3"),
        ("FI_MR_CACHE_MERGE_REGIONS", "yes"),
        ("FI_MR_CACHE_MONITOR", "disabled"),
        ("FI_MR_CUDA_CACHE_MONITOR_ENABLED", "0"),
        ("FI_MR_ROCR_CACHE_MONITOR_ENABLED", "no"),
        ("FI_MR_ZE_CACHE_MONITOR_ENABLED", "1"),
    ];
    let builder = || Hmem::builder().without_vendor_ifaces();
    match env::var("HMEM_TEST_BAD") {
        Ok(bad) => {
            // A program without a cache does not need the variable.
            let hmem = builder().provider(loopback()).build().expect("no cache is opened");
            hmem.domain("loopback", DomainAttr::default()).expect("a domain without a cache");
            let with_cache =
                DomainAttr { cache: Some(CacheAttr::default()), ..DomainAttr::default() };
            for error in [
                hmem.domain("loopback", with_cache.clone()).unwrap_err(),
                hmem.cache_defaults().unwrap_err(),
                hmem.cache_monitor().unwrap_err(),
            ] {
                assert_eq!(error.kind(), ErrorKind::InvalidArgument);
                assert!(error.to_string().contains(&bad), "{error}");
            }
            let hmem = builder().without_environment().provider(loopback()).build().expect("built");
            hmem.domain("loopback", with_cache).expect("the variable is not read");
            // Variables are not read for settings that the builder has set.
            let without_monitors = [IfaceKind::ROCR];
            let said = CacheAttr::default()
                .max_count(2)
                .max_bytes(4096)
                .merge(false)
                .without_monitors(without_monitors);
            let builder = builder().cache_monitor(HostMonitorKind::Disabled).cache(said.clone());
            let hmem = builder.build().expect("the builder wins over a bad value");
            assert_eq!(hmem.cache_defaults().expect("not read").attr(), &said);
            return;
        }
        Err(_) if !child::alone(name, &variables) => {
            for (bad, value) in [
                ("FI_MR_CACHE_MAX_SIZE", "much"),
                ("FI_MR_CACHE_MAX_COUNT", "-1"),
                ("FI_MR_CACHE_MERGE_REGIONS", "perhaps"),
                ("FI_MR_CACHE_MONITOR", "memhook"),
                ("FI_MR_CUDA_CACHE_MONITOR_ENABLED", "2"),
                ("FI_MR_ROCR_CACHE_MONITOR_ENABLED", "x"),
                ("FI_MR_ZE_CACHE_MONITOR_ENABLED", "?"),
            ] {
                child::alone(name, &[("HMEM_TEST_BAD", bad), (bad, value)]);
            }
            return;
        }
        Err(_) => {}
    }
    let hmem = builder().build().expect("good values");
    let read = hmem.cache_defaults().expect("good values").attr();
    assert_eq!((read.max_bytes, read.max_count, read.merge), (Some(20480), Some(3), Some(true)));
    assert_eq!(read.without_monitors, Some(vec![IfaceKind::CUDA, IfaceKind::ROCR]));
    let monitor = ImportMonitor::new(Arc::new(Silent::default())).expect("a monitor");
    let builder = builder()
        .imported_cache_monitor(monitor)
        .cache(CacheAttr::default().max_count(2).merge(false));
    let hmem = builder.provider(loopback()).build().expect("good values");
    let read = hmem.cache_defaults().expect("good values").attr();
    assert_eq!((read.max_bytes, read.max_count, read.merge), (Some(20480), Some(2), Some(false)));
    // The cache of a domain uses the builder's settings.
    let domain = open(&hmem, CacheAttr::default());
    const LEN: usize = 4096;
    let at = map(None, 16 * LEN);
    let cache = domain.cache().expect("a cache");
    for index in 0..4 {
        // SAFETY: the memory is the test's own.
        cache.get(unsafe { raw(range(at + 2 * index * LEN, LEN)) }, REMOTE).expect("registered");
    }
    assert_eq!(cache.statistics().entries, 2);
    // SAFETY: the memory is the test's own.
    let long = cache.get(unsafe { raw(range(at, 6 * LEN)) }, REMOTE).expect("registered");
    assert!(matches!(long.lease().uncached_reason(), Some(UncachedReason::TooLong)));
}

/// The value is one of libfabric 2.x, which names a kernel module.
fn kdreg2_counts_as_auto() {
    if !child::alone("kdreg2_counts_as_auto", &[("FI_MR_CACHE_MONITOR", "KDREG2")]) {
        return;
    }
    let builder = Hmem::builder().without_vendor_ifaces().provider(loopback());
    let hmem = builder.build().expect("built");
    let defaults = hmem.cache_defaults().expect("a known value");
    assert_eq!((defaults.monitor(), defaults.off_by()), (HostMonitorKind::Auto, None));
    open(&hmem, CacheAttr::default());
}

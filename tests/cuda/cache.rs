//! Cached registrations of CUDA memory. A freed and reallocated address is never a hit, whichever
//! code frees it. A hit costs at most one driver call, or three for memory that the iface mapped.

use std::sync::Arc;

use hmem::{
    Access, Address, AddressRange, AllocationKind, DeviceId, Domain, Endpoint, Iface, IfaceExt,
    Iova, MemoryRegion, RemoteKey,
    cuda::{
        CudaMonitorKind,
        sys::{CuContext, CuDevicePtr, Functions},
    },
    iface::AllocRequest,
    monitor::InvalidationCause,
    path::P2pPolicy,
    provider::{CompletionQueue, EndpointAttr},
    transfer::{PeerId, RemoteSegment},
};
use hmem_fake_cuda::Profile;

use crate::link::{
    HeldCopies, IMPORTS, Link, assert_reused, check, not_over_a_gpu, profiles, real,
};

/// Cache monitors to test. Hooks patch the first instructions of driver functions, and the fake
/// driver has those of the real library on x86-64 only.
pub(crate) const MONITORS: &[CudaMonitorKind] = if cfg!(target_arch = "x86_64") {
    &[CudaMonitorKind::Identity, CudaMonitorKind::Hooks]
} else {
    &[CudaMonitorKind::Identity]
};

/// An application that calls the driver directly, with the device's primary context current.
pub(crate) struct App<'a>(&'a Functions, CuContext);

impl<'a> App<'a> {
    pub(crate) fn new(driver: &'a Functions) -> Self {
        let mut context = CuContext::NULL;
        // SAFETY: the output is writable, and device 0 exists.
        check(unsafe { (driver.primary_ctx_retain())(&mut context, 0) });
        Self(driver, context)
    }

    pub(crate) fn current<T>(&self, run: impl FnOnce(&Functions) -> T) -> T {
        // SAFETY: `primary_ctx_retain` above retained the context.
        check(unsafe { (self.0.ctx_push_current())(self.1) });
        let result = run(self.0);
        let mut popped = CuContext::NULL;
        // SAFETY: the output is writable.
        check(unsafe { (self.0.ctx_pop_current())(&mut popped) });
        result
    }

    fn allocate(&self, len: u64) -> AddressRange {
        let mut pointer: CuDevicePtr = 0;
        // SAFETY: the output is writable.
        self.current(|driver| check(unsafe { (driver.mem_alloc())(&mut pointer, len as usize) }));
        AddressRange::new(Address(pointer), len).expect("a range")
    }

    fn free(&self, memory: AddressRange) {
        // SAFETY: `allocate` allocated the memory, and no code uses it.
        self.current(|driver| check(unsafe { (driver.mem_free())(memory.start().0) }));
    }
}

impl Drop for App<'_> {
    fn drop(&mut self) {
        // SAFETY: `new` retained it once.
        check(unsafe { (self.0.primary_ctx_release())(0) });
    }
}

/// A peer that reads regions of the link's domain.
pub(crate) struct Reader<'a> {
    domain: &'a Domain,
    queue: Arc<dyn CompletionQueue>,
    from: Endpoint,
    _to: Endpoint,
    peer: PeerId,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(link: &'a Link) -> Self {
        let domain = &link.domain;
        let queue = domain.open_cq(8).expect("a queue");
        let open = || domain.open_endpoint(&EndpointAttr::new(&queue)).expect("an endpoint");
        let (from, to) = (open(), open());
        let peer = from.resolve(&to.name()).expect("the peer");
        Self { domain, queue, from, _to: to, peer }
    }

    /// Returns the first bytes of a region, as the peer reads them.
    pub(crate) fn first(&self, region: &MemoryRegion) -> [u8; 16] {
        self.at(&region.key().expect("a key"), 0)
    }

    /// Returns the bytes at an offset in the memory of a key, as the peer reads them.
    pub(crate) fn at(&self, key: &RemoteKey, offset: u64) -> [u8; 16] {
        let into = self.domain.register(vec![0u8; 16], Access::READ).expect("a buffer");
        let address = Iova(key.base().0 + offset);
        let remote = [RemoteSegment { address, len: 16, key }];
        self.from.read(&[into.slice(0, 16).expect("all")], &remote, self.peer, 1).expect("posted");
        let mut done = Vec::new();
        while self.queue.read(&mut done, 1).expect("the queue") == 0 {}
        done.remove(0).result.expect("read");
        into.close().expect("closed").try_into().expect("16 bytes")
    }
}

pub(crate) fn bytes_of(round: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&round.to_le_bytes());
    bytes[4..8].copy_from_slice(&(!round).to_le_bytes());
    bytes
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Freed {
    ThroughTheIface,
    ByTheApplication,
}

/// Counts from repetitions in which memory is allocated, registered, read and freed.
#[derive(Debug, Default)]
struct RoundCounts {
    reused: u32,
    /// Number of driver calls of the most expensive cache hit.
    calls: u64,
}

fn rounds(link: &Link, kind: AllocationKind, freed: Freed, rounds: u32) -> RoundCounts {
    let (app, reader) = (App::new(&link.functions), Reader::new(link));
    let cache = link.domain.cache().expect("a cache");
    let before = cache.statistics();
    let mut shown = RoundCounts::default();
    let mut last = None;
    for round in 0..rounds {
        let request = AllocRequest { len: 3 << 20, device: DeviceId(0), kind };
        let (memory, ours) = match freed {
            Freed::ThroughTheIface => {
                let allocation = link.cuda.allocate(&request).expect("allocate");
                (allocation.range, Some(allocation))
            }
            Freed::ByTheApplication => (app.allocate(request.len), None),
        };
        shown.reused += u32::from(last.replace(memory) == Some(memory));
        link.cuda.write_bytes(memory.start(), &bytes_of(round)).expect("write");
        // SAFETY: the region is not used after its memory is freed.
        let first = unsafe { link.cache_get(memory) };
        assert!(first.lease().uncached_reason().is_none(), "{:?}", first.lease());
        assert_eq!(
            reader.first(&first),
            bytes_of(round),
            "round {round}: bytes of the freed allocation"
        );
        drop(first);
        // Deregisters the memory of the previous repetition now: its driver calls must not count
        // for the hit.
        cache.reclaim();
        let calls = link.calls();
        // SAFETY: the region is not used after its memory is freed.
        let again = unsafe { link.cache_get(memory) };
        shown.calls = shown.calls.max(link.calls() - calls);
        assert_eq!(reader.first(&again), bytes_of(round));
        drop(again);
        match ours {
            // SAFETY: the memory was allocated above, and no code uses it.
            Some(allocation) => unsafe { link.cuda.free(&allocation) }.expect("free"),
            None => app.free(memory),
        }
    }
    let after = cache.statistics();
    let count = u64::from(rounds);
    assert_eq!(
        after.registrations - before.registrations,
        count,
        "each allocation is registered once"
    );
    assert_eq!(after.hits - before.hits, count, "and hit once");
    cache.evict_idle();
    cache.reclaim();
    assert_eq!(cache.statistics().entries, 0);
    shown
}

pub(crate) fn with_each_monitor(rounds_each: u32, show: impl Fn(&Link, CudaMonitorKind, u32)) {
    for profile in profiles() {
        for monitor in MONITORS {
            let link = Link::cached(profile.clone(), IMPORTS, P2pPolicy::Enabled, *monitor);
            show(&link, *monitor, rounds_each);
        }
    }
}

/// MR-07, CACHE-02, MON-07
///
/// Covers every profile and monitor, with frees by the iface and by the application: 1,200
/// reallocations in total.
#[test]
fn reallocated_cuda_memory_is_never_a_stale_hit() {
    with_each_monitor(50, |link, monitor, count| {
        for freed in [Freed::ThroughTheIface, Freed::ByTheApplication] {
            let shown = rounds(link, AllocationKind::Device, freed, count);
            assert_reused(shown.reused == count - 1);
            if real() {
                continue;
            }
            let most = u64::from(monitor == CudaMonitorKind::Identity);
            assert_eq!(shown.calls, most, "{monitor}, {freed:?}: driver calls of a hit");
        }
        if real() {
            return;
        }
        let now = link.domain.cache().expect("a cache").statistics();
        let (told, asked) = (
            now.invalidations(InvalidationCause::Free),
            now.invalidations(InvalidationCause::Identity),
        );
        match monitor {
            CudaMonitorKind::Hooks => {
                assert_eq!((told, asked), (2 * u64::from(count), 0), "{now:?}")
            }
            // Without hooks, only a later lookup detects a free by the application. No lookup
            // follows the last free.
            _ => assert_eq!((told, asked), (count.into(), u64::from(count) - 1), "{now:?}"),
        }
    });
}

/// MR-07
///
/// The application allocates and frees ten thousand times at one address.
#[test]
fn ten_thousand_reallocations_are_never_a_stale_hit() {
    let link = Link::cached(Profile::default(), IMPORTS, P2pPolicy::Enabled, CudaMonitorKind::Auto);
    let shown = rounds(&link, AllocationKind::Device, Freed::ByTheApplication, 10_000);
    assert_reused(shown.reused == 9_999);
}

/// CACHE-02
///
/// Covers host, managed, stream-ordered and VMM memory.
#[test]
fn each_kind_of_cuda_memory_is_cached_by_its_own_rule() {
    with_each_monitor(8, |link, monitor, count| {
        let kinds = [
            AllocationKind::Host,
            AllocationKind::Managed,
            AllocationKind::StreamOrdered,
            AllocationKind::Virtual,
        ];
        for kind in kinds.into_iter().filter(|kind| !link.lacks(*kind)) {
            let shown = rounds(link, kind, Freed::ThroughTheIface, count);
            assert_reused(shown.reused > 0);
            // Stream-ordered memory is freed when its stream reaches the free, after any
            // notification.
            let asks =
                monitor == CudaMonitorKind::Identity || kind == AllocationKind::StreamOrdered;
            // A hit of VMM memory queries the mapping, and retains and releases its handle.
            let each = if kind == AllocationKind::Virtual { 3 } else { 1 };
            assert!(
                real() || shown.calls == each * u64::from(asks),
                "{monitor}, {kind:?}: {shown:?}"
            );
        }
    });
}

/// CACHE-02
///
/// Memory of two devices has two cache entries. A free on one device does not invalidate the entry
/// of the other.
#[test]
fn free_on_one_device_keeps_the_entry_of_the_other() {
    with_each_monitor(1, |link, monitor, _| {
        if link.cuda.devices().expect("devices").len() < 2 {
            assert!(not_over_a_gpu("the machine has one device"));
            return;
        }
        let cache = link.domain.cache().expect("a cache");
        let allocate = |device| {
            let request = AllocRequest { len: 2 << 20, device, kind: AllocationKind::Device };
            link.cuda.allocate(&request).expect("allocate")
        };
        let (one, other) = (allocate(DeviceId(0)), allocate(DeviceId(1)));
        for memory in [&one, &other] {
            // SAFETY: the region is not used after the memory is freed.
            let region = unsafe { link.cache_get(memory.range) };
            assert_eq!(region.iface().expect("registered").1, memory.device, "{monitor}");
        }
        // SAFETY: no code uses the memory.
        unsafe { link.cuda.free(&one) }.expect("free");
        let before = cache.statistics();
        // SAFETY: the memory lives until it is freed below.
        drop(unsafe { link.cache_get(other.range) });
        let after = cache.statistics();
        assert_eq!(
            (after.hits - before.hits, after.registrations),
            (1, before.registrations),
            "{monitor}"
        );
        // SAFETY: no code uses the memory.
        unsafe { link.cuda.free(&other) }.expect("free");
    });
}

/// MON-07
///
/// If driver functions are hooked, a registration is closed when its memory is freed, not only at
/// the next lookup.
#[test]
#[cfg_attr(not(target_arch = "x86_64"), ignore = "the fake driver cannot be hooked there")]
fn hooked_free_closes_the_registration_at_once() {
    for profile in profiles() {
        let link = Link::cached(profile, IMPORTS, P2pPolicy::Enabled, CudaMonitorKind::Hooks);
        let (app, cache) = (App::new(&link.functions), link.domain.cache().expect("a cache"));
        let memory: Vec<_> = (0..20).map(|_| app.allocate(64 << 10)).collect();
        for memory in &memory {
            // SAFETY: the region is not used after the memory is freed.
            drop(unsafe { link.cache_get(*memory) });
        }
        assert_eq!((cache.statistics().entries, link.domain.live().regions), (20, 20));
        for (freed, memory) in memory.iter().enumerate() {
            app.free(*memory);
            cache.reclaim();
            assert_eq!(link.domain.live().regions, 19 - freed as u64, "and only that one");
        }
        if real() {
            // Over a GPU, all tests share the primary context, so it cannot be reset.
            continue;
        }
        // A call that may free any of the memory invalidates every entry.
        let memory = app.allocate(64 << 10);
        // SAFETY: the region is not used after its memory is freed.
        drop(unsafe { link.cache_get(memory) });
        let (name, reset) = link
            .functions
            .frees()
            .iter()
            .find(|(name, _)| *name == "cuDevicePrimaryCtxReset_v2")
            .expect("there");
        // SAFETY: the fake's function of this name, which takes a device.
        let reset: unsafe extern "C" fn(i32) -> hmem::cuda::sys::CuResult =
            unsafe { std::mem::transmute(std::ptr::with_exposed_provenance::<()>(*reset)) };
        // SAFETY: no code uses the memory of the context.
        check(unsafe { reset(0) });
        cache.reclaim();
        assert_eq!(link.domain.live().regions, 0, "{name}");
    }
}

/// MR-07
///
/// Several threads allocate in turn, and the driver gives them the same addresses.
#[test]
fn concurrent_reuse_of_addresses_is_never_a_stale_hit() {
    for monitor in MONITORS {
        let link = Link::cached(Profile::default(), IMPORTS, P2pPolicy::Enabled, *monitor);
        std::thread::scope(|scope| {
            for thread in 0..3u32 {
                let link = &link;
                scope.spawn(move || {
                    let (app, reader) = (App::new(&link.functions), Reader::new(link));
                    for round in 0..300 {
                        let mark = bytes_of(round * 4 + thread);
                        let memory = app.allocate(1 << 20);
                        link.cuda.write_bytes(memory.start(), &mark).expect("write");
                        for _ in 0..2 {
                            // SAFETY: the region is not used after the memory is freed.
                            let region = unsafe { link.cache_get(memory) };
                            assert_eq!(
                                reader.first(&region),
                                mark,
                                "{monitor}, round {round} of {thread}"
                            );
                        }
                        app.free(memory);
                    }
                });
            }
        });
        let cache = link.domain.cache().expect("a cache");
        let now = cache.statistics();
        assert!(now.hits > 0 && now.registrations >= 900, "{monitor}: {now:?}");
        let path = cache.entries().first().and_then(|entry| entry.region);
        assert!(path.is_none_or(|path| link.is_direct(path, AllocationKind::Device)), "{path:?}");
    }
}

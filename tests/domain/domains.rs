//! Tests of domains: closing, bounds, owners of memory, and the setting that disables direct access
//! of NICs to devices.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use crate::counted::Counted;
use hmem::{
    Access, Address, AddressRange, Addressing, AllocationKind, DeviceBuffer, DeviceId, Domain,
    DomainAttr, DomainBindFlags, Endpoint, Errno, ErrorKind, Hmem, MrMode, Path, Promise, Raw,
    Region, Rejected, RemoteKey, RoamingRegion, Type2Bind, Type2Kind, Type2Window,
    event_queue::EventQueue,
    iface::AllocRequest,
    loopback::{Faults, Loopback, NicCall},
    path::P2pPolicy,
    provider::{CompletionQueue, EndpointAttr, WindowState},
    system::{SIMULATED, Simulated},
};

fn hmem(faults: &Faults) -> Hmem {
    let builder = Hmem::builder().without_vendor_ifaces();
    let loopback = Loopback::builder().faults(faults).build().expect("a software NIC");
    let simulated = Simulated::builder().build().expect("a simulated device");
    builder
        .iface(simulated)
        .provider(loopback)
        .build()
        .expect("nothing in the environment forbids it")
}

fn domain(hmem: &Hmem) -> Domain {
    let attr = DomainAttr { mr_mode: MrMode::empty(), ..DomainAttr::default() };
    hmem.domain("loopback", attr).expect("the loopback needs no mode")
}

fn device_buffer(hmem: &Hmem) -> DeviceBuffer {
    let iface = hmem.iface(SIMULATED).expect("it was added");
    let request = AllocRequest { len: 8192, device: DeviceId(0), kind: AllocationKind::Device };
    DeviceBuffer::allocate(iface, &request).expect("device memory")
}

/// SUB-02, MR-06, EVT-03
#[test]
fn region_closed_before_its_registration_keeps_nothing_busy() {
    let faults = Faults::new();
    let hmem = hmem(&faults);
    for _ in 0..200 {
        let domain = domain(&hmem);
        let base = domain.register(vec![0u8; 4096], Access::REMOTE_READ).expect("registers");
        let events = Arc::new(EventQueue::new());
        domain.bind(&events, DomainBindFlags::REG_MR).expect("the first queue");
        let part = base.range().slice(0, 64).expect("inside");
        let sub = base.sub(part, Access::REMOTE_READ, None).expect("a sound request");
        let other = domain.register(vec![0u8; 64], Access::REMOTE_READ).expect("a sound request");
        sub.close().expect("nothing depends on it");
        base.close().expect("the sub-region is closed");
        other.close().expect("nothing depends on it");
        domain.close().expect("every region is closed");
        for _ in 0..2 {
            assert!(
                events.wait(Duration::from_secs(60)).is_some(),
                "each registration has its event"
            );
        }
    }
}

#[test]
fn parts_of_a_buffer_are_copied_within_their_bounds_only() {
    let hmem = hmem(&Faults::new());
    let domain = domain(&hmem);
    let region = domain.register(vec![1; 8], Access::REMOTE_READ).expect("registers");
    let mut out = [0; 4];
    region.read(4, &mut out).expect("inside");
    assert_eq!(out, [1; 4]);
    for offset in [5, 1 << 20, u64::MAX] {
        for refused in [region.read(offset, &mut out), region.write(offset, &[0; 4])] {
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::OutOfBounds);
        }
    }
    assert_eq!((out, region.close().expect("closes")), ([1; 4], vec![1; 8]));
}

/// Domain, region and window of the tests of requests that fail after they were posted, and two
/// endpoints. An endpoint other than the one that bound the window cannot invalidate it.
struct Bound {
    faults: Faults,
    domain: Domain,
    region: Region<Vec<u8>>,
    window: Type2Window,
    endpoints: [(Endpoint, Arc<dyn CompletionQueue>); 2],
}

impl Bound {
    fn new() -> Self {
        let faults = Faults::new();
        let domain = domain(&hmem(&faults));
        let access = Access::WRITE | Access::REMOTE_WRITE | Access::MW_BIND;
        let region = domain.register(vec![0u8; 4096], access).expect("registers");
        let window = domain.alloc_type_2_window(Type2Kind::B).expect("the loopback has them");
        let endpoints = [(); 2].map(|()| {
            let cq = domain.open_cq(8).expect("a queue");
            (domain.open_endpoint(&EndpointAttr::new(&cq)).expect("an endpoint"), cq)
        });
        Self { faults, domain, region, window, endpoints }
    }

    fn bind(&self, offset: u64, tag: u8) -> RemoteKey {
        let (addressing, access) = (Addressing::Virtual, Access::REMOTE_WRITE);
        let bind = Type2Bind { region: &self.region, offset, len: 64, access, addressing, tag };
        self.window.post_bind(&self.endpoints[0].0, &bind, 0).expect("post")
    }

    /// Waits for the next completion of an endpoint, and returns its result.
    fn done(&self, endpoint: usize) -> hmem::Result<u64> {
        let mut done = Vec::new();
        while self.endpoints[endpoint].1.read(&mut done, 1).expect("the queue") == 0 {
            std::thread::yield_now();
        }
        done.remove(0).result
    }

    /// Checks that the window is bound with this key, and keeps its region open.
    fn assert_bound(self, key: &RemoteKey) {
        assert_eq!(
            (self.window.state(), self.window.key()),
            (WindowState::Valid, Some(key.clone()))
        );
        let refused = self.region.close().expect_err("a window is bound to it");
        assert_eq!(refused.error.kind(), ErrorKind::Busy);
        assert_eq!(self.domain.live().windows, 1);
    }
}

/// MW-06
#[test]
fn window_stays_bound_if_its_invalidation_fails_later() {
    let bound = Bound::new();
    let key = bound.bind(0, 1);
    bound.done(0).expect("bind");
    bound.window.post_invalidate(&bound.endpoints[1].0, 0).expect("the completion reports it");
    assert_eq!(bound.done(1).unwrap_err().kind(), ErrorKind::AccessDenied);
    bound.assert_bound(&key);
}

/// MW-06
///
/// The bind is posted while the invalidation before it waits. Both fail.
#[test]
fn window_keeps_the_binding_of_its_last_request_that_succeeded() {
    let bound = Bound::new();
    let key = bound.bind(0, 1);
    bound.done(0).expect("bind");
    let (other, _) = &bound.endpoints[1];
    std::thread::scope(|scope| {
        let gate = bound.faults.hold(NicCall::Transfer);
        let writing = scope.spawn(|| {
            let local = [bound.region.slice(64, 8).expect("inside")];
            let peer = other.resolve(&other.name()).expect("it reaches itself");
            let key = bound.region.key().expect("a key");
            let remote = key.slice(128, 8).expect("inside");
            other.write(&local, &[remote], peer, 0).expect("post");
            bound.done(1).expect("write");
        });
        gate.wait_held();
        bound.window.post_invalidate(other, 0).expect("post");
        bound.bind(1024, 2);
        assert_eq!(bound.done(0).unwrap_err().kind(), ErrorKind::BadState);
        gate.release();
        writing.join().expect("no panic");
    });
    assert_eq!(bound.done(1).unwrap_err().kind(), ErrorKind::AccessDenied);
    bound.assert_bound(&key);
}

#[test]
fn scope_is_refused_in_endpoint_mode() {
    let loopback = Loopback::builder().needs(MrMode::ENDPOINT).build().expect("a software NIC");
    let hmem = Hmem::builder().without_vendor_ifaces().provider(loopback).build().expect("builds");
    let attr = DomainAttr { mr_mode: MrMode::ENDPOINT, ..DomainAttr::default() };
    let domain = hmem.domain("loopback", attr).expect("the mode is offered");
    let error =
        domain.scope(&mut [0; 64], Access::WRITE, |_| panic!("it must not run")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BadState);
    assert_eq!(domain.live().regions, 0);
}

/// P2P-02
#[test]
fn disabled_direct_access_forces_staged_device_memory() {
    for (disable, policy, path) in [
        (false, P2pPolicy::Enabled, Some(Path::DmaBuf)),
        (false, P2pPolicy::Required, Some(Path::DmaBuf)),
        (false, P2pPolicy::Disabled, Some(Path::Staged)),
        (true, P2pPolicy::Enabled, Some(Path::Staged)),
        (true, P2pPolicy::Preferred, Some(Path::Staged)),
        (true, P2pPolicy::Required, None),
    ] {
        let builder = Hmem::builder().without_vendor_ifaces().disable_p2p(disable);
        let simulated = Simulated::builder().build().expect("a simulated device");
        let loopback = Loopback::builder().build().expect("a software NIC");
        let hmem = builder.iface(simulated).provider(loopback).build().expect("builds");
        let attr = DomainAttr { mr_mode: MrMode::empty(), p2p: policy, ..DomainAttr::default() };
        let domain = hmem.domain("loopback", attr).expect("opens");
        let region = match domain.register(device_buffer(&hmem), Access::REMOTE_READ) {
            Ok(region) => region,
            Err(rejected) => {
                assert_eq!(path, None, "{rejected}");
                assert_eq!(
                    (rejected.error.kind(), domain.live().regions),
                    (ErrorKind::Unsupported, 0)
                );
                continue;
            }
        };
        let decision = region.decision().expect("registered");
        assert_eq!(Some(decision.path), path, "disable {disable}, {policy:?}: {decision}");
        assert_eq!(decision.iface, SIMULATED);
    }
}

/// MR-18
#[test]
fn memory_is_kept_if_its_deregistration_fails() {
    for (fails, freed) in [(false, 1), (true, 0)] {
        let faults = Faults::new();
        let hmem = hmem(&faults);
        let domain = domain(&hmem);
        let ends = Arc::new(AtomicUsize::new(0));
        let buffer = Counted::new(64, &ends);
        let region =
            domain.register(buffer, Access::REMOTE_WRITE).map_err(|Rejected { error, .. }| error);
        let region = region.expect("registers");
        if fails {
            faults.fail_nth(NicCall::Deregister, 1, Errno(5));
        }
        drop(region);
        assert_eq!(ends.load(Ordering::SeqCst), freed, "deregistration fails: {fails}");
        assert_eq!(domain.live().regions, u64::from(fails));
    }
}

/// CACHE-01
///
/// Covers a range that ends outside its allocation, and one that begins in host memory and ends in
/// device memory.
#[test]
fn cache_miss_refuses_a_range_that_leaves_its_allocation() {
    let hmem = hmem(&Faults::new());
    let attr = DomainAttr {
        mr_mode: MrMode::empty(),
        cache: Some(hmem::CacheAttr::default()),
        ..DomainAttr::default()
    };
    let domain = hmem.domain("loopback", attr).expect("a domain");
    let cache = domain.cache().expect("a cache");
    let buffer = device_buffer(&hmem);
    let whole = buffer.allocation().range;
    // SAFETY: no transfer uses the regions.
    let raw = |range| unsafe { Raw::new(range, Promise::ReadOnly) };
    let outside = [
        AddressRange::new(whole.start(), whole.len() + 1),
        AddressRange::new(Address(whole.start().0 + 8), whole.len()),
        AddressRange::new(Address(whole.start().0 - 4096), 8192),
    ];
    for range in outside.map(|range| range.expect("no wrap")) {
        let error = cache.get(raw(range), Access::REMOTE_READ).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{range}: {error}");
        assert_eq!((domain.live().regions, cache.statistics().registrations), (0, 0), "{range}");
    }
    cache.get(raw(whole), Access::REMOTE_READ).expect("the allocation itself");
}

/// A binding for another language keeps the lease behind a handle.
#[test]
fn owned_lease_of_the_cache_keeps_the_domain_open() {
    let hmem = hmem(&Faults::new());
    let attr = DomainAttr { cache: Some(hmem::CacheAttr::default()), ..DomainAttr::default() };
    let domain = hmem.domain("loopback", attr).expect("a domain");
    let buffer = device_buffer(&hmem);
    let whole = buffer.allocation().range;
    let part = whole.slice(64, 128).expect("in the buffer");
    // SAFETY: no transfer uses the regions, and the buffer outlives them.
    let get = |range, access| unsafe {
        domain.cache().expect("a cache").get_owned(Raw::new(range, Promise::ReadOnly), access)
    };
    let miss = get(whole, Access::REMOTE_READ).expect("registered");
    let hit = get(part, Access::REMOTE_READ).expect("cached");
    assert_eq!((hit.view().range(), hit.range()), (part, whole));
    assert!(hit.lease().uncached_reason().is_none());
    let refused = get(part, Access::REMOTE_WRITE).expect_err("beyond the promise");
    assert_eq!(refused.kind(), ErrorKind::AccessDenied, "{refused}");
    drop(miss);
    let refused = domain.close().expect_err("a lease is left");
    assert_eq!(refused.error.kind(), ErrorKind::Busy);
    drop(hit);
    refused.value.close().expect("no lease is left");
}

/// LIFE-09
#[test]
fn old_region_that_a_driver_does_not_close_is_reported_and_closed_later() {
    let faults = Faults::new();
    let hmem = hmem(&faults);
    let domains = [domain(&hmem), domain(&hmem)];
    let live = || domains.each_ref().map(|domain| domain.live().regions);
    let region = domains[0].register(vec![7u8; 64], Access::REMOTE_READ).expect("registers");
    let mut region = RoamingRegion::new(region).map_err(|it| it.error).expect("publish");
    let sub_of = |region: &RoamingRegion<_>| {
        let region: &Region<Vec<u8>> = region.region().expect("registered");
        region.sub(region.range(), Access::REMOTE_READ, None).expect("a sub-region")
    };
    let sub = sub_of(&region);
    region.reopen(&domains[1]).expect("a region in use stays until its last sub-region ends");
    assert_eq!(live(), [2, 1]);
    drop(sub);
    assert_eq!(live(), [0, 1]);

    for change in [RoamingRegion::reopen, RoamingRegion::add] {
        faults.fail_next(NicCall::Deregister, Errno(5));
        let error = change(&mut region, &domains[0]).expect_err("the driver refuses");
        assert_eq!(error.kind(), ErrorKind::Driver, "{error}");
        assert_eq!(live().iter().sum::<u64>(), 2, "both regions are registered");
        assert_eq!(region.regions().len(), 1, "only the new key is published");
    }
    faults.fail_always(NicCall::Deregister, Errno(5));
    let rejected = region.close().expect_err("the driver refuses");
    assert_eq!(rejected.error.kind(), ErrorKind::Driver, "{}", rejected.error);
    faults.clear();
    let memory = rejected.value.close().map_err(|it| it.error).expect("the next attempt");
    assert_eq!((memory, live()), (vec![7; 64], [0, 0]));
}

//! Registrations of Neuron and Gaudi memory, cached and uncached, over the fake runtimes and the
//! software NIC.
#![cfg(all(feature = "neuron", feature = "synapseai"))]
#![allow(unsafe_code)]

#[allow(dead_code, reason = "other test binaries use the rest")]
mod wire;

use std::sync::Arc;

use hmem::{
    Access, Address, AddressRange, AllocationKind, CacheAttr, DeviceBuffer, DeviceId, DomainAttr,
    Hmem, Iface, IfaceExt, IfaceKind,
    iface::AllocRequest,
    loopback::Loopback,
    neuron::{self, Neuron},
    path::Path,
    synapseai::{self, SynapseAi},
};
use hmem_fake_accelerators::{Fake, Profile};
use wire::{REMOTE, Wire, pattern, raw};

const LEN: u64 = 64 << 10;

fn neuron(fake: &Fake) -> Neuron {
    // SAFETY: the fake's functions have the signatures of their names and live forever.
    let functions = unsafe { neuron::sys::Functions::from_lookup(|name| fake.symbol(name)) };
    Neuron::builder().functions(functions.expect("all functions")).open().expect("NeuronCores")
}

fn gaudi(fake: &Fake) -> SynapseAi {
    // SAFETY: the fake's functions have the signatures of their names and live forever.
    let (synapse, hlthunk) = unsafe {
        (
            synapseai::sys::synapse::Functions::from_lookup(|name| fake.symbol(name)),
            synapseai::sys::hlthunk::Functions::from_lookup(|name| fake.symbol(name)),
        )
    };
    let builder = SynapseAi::builder()
        .functions(synapse.expect("all"))
        .hlthunk_functions(hlthunk.expect("all"));
    builder.open().expect("a Gaudi device")
}

/// Runs `test` with the Neuron iface and then with the Gaudi iface, each on a domain with a
/// registration cache.
fn with_each(test: impl Fn(&Fake, &Wire, &Arc<dyn Iface>)) {
    for kind in [IfaceKind::NEURON, IfaceKind::SYNAPSEAI] {
        let fake = Fake::start(Profile::running());
        let iface: Arc<dyn Iface> = match kind {
            IfaceKind::NEURON => Arc::new(neuron(&fake)),
            _ => Arc::new(gaudi(&fake)),
        };
        let nic = Loopback::builder().build().expect("a NIC");
        let builder = Hmem::builder().without_vendor_ifaces();
        let hmem = builder.shared_iface(Arc::clone(&iface)).provider(nic).build().expect("start");
        let attr = DomainAttr { cache: Some(CacheAttr::default()), ..DomainAttr::default() };
        test(&fake, &Wire::open(hmem.domain("loopback", attr).expect("a domain")), &iface);
    }
}

fn request() -> AllocRequest {
    AllocRequest { len: LEN, device: DeviceId(0), kind: AllocationKind::Device }
}

/// CACHE-02, MON-07
///
/// The fake reuses the address of freed memory at once. A dma-buf keeps its pages.
/// A stale hit would read bytes of freed memory.
#[test]
fn reused_address_is_never_a_hit() {
    // The fakes reuse the address in every round, so that a stale hit would show at once.
    const ROUNDS: u64 = 1_000;
    with_each(|_, wire, iface| {
        let cache = wire.domain.cache().expect("a cache");
        let (mut last, mut reused) = (None, 0);
        for round in 0..ROUNDS {
            let own = iface.allocate(&request()).expect("allocate");
            reused += u64::from(last.replace(own.range) == Some(own.range));
            let bytes = pattern(round, 16);
            // SAFETY: live memory. Regions are not used once it is freed.
            unsafe {
                iface.write(own.base(), &bytes).expect("write");
                let region = cache.get(raw(own.range), REMOTE).expect("a region");
                assert!(region.lease().uncached_reason().is_none(), "{:?}", region.lease());
                let seen = wire.get(&region.key().expect("a key"), 0, 16).expect("read");
                assert!(seen == bytes, "round {round}: the NIC read other memory");
                drop((region, cache.get(raw(own.range), REMOTE).expect("a hit")));
                iface.free(&own).expect("free");
            }
            cache.reclaim();
        }
        assert!(reused > ROUNDS / 2, "only {reused} addresses were reused, so the test is void");
        let statistics = cache.statistics();
        assert_eq!((statistics.misses, statistics.hits), (ROUNDS, ROUNDS), "{statistics:?}");
    });
}

/// CACHE-02, MON-07
///
/// In each round the application allocates memory, announces it to the iface, registers it,
/// withdraws it and frees it.
#[test]
fn withdrawn_memory_loses_its_cached_registrations() {
    let fake = Fake::start(Profile::running());
    let gaudi = Arc::new(gaudi(&fake));
    let symbol = |name| fake.symbol(name).expect("in the library");
    // SAFETY: the fake's functions have the signatures of their names.
    let (malloc, free) = unsafe {
        type Malloc = unsafe extern "C" fn(u32, u64, u64, u32, *mut u64) -> i32;
        type Free = unsafe extern "C" fn(u32, u64, u32) -> i32;
        (
            std::mem::transmute::<*const (), Malloc>(symbol("synDeviceMalloc")),
            std::mem::transmute::<*const (), Free>(symbol("synDeviceFree")),
        )
    };
    let nic = Loopback::builder().build().expect("a NIC");
    let hmem = Hmem::builder().without_vendor_ifaces().shared_iface(Arc::clone(&gaudi) as _);
    let hmem = hmem.provider(nic).build().expect("start");
    let attr = DomainAttr { cache: Some(CacheAttr::default()), ..DomainAttr::default() };
    let domain = hmem.domain("loopback", attr).expect("a domain");
    let cache = domain.cache().expect("a cache");
    let mut bases = Vec::new();
    for _ in 0..3 {
        let mut base = 0;
        // SAFETY: `base` is writable.
        assert_eq!(unsafe { malloc(0, LEN, 0, 0, &mut base) }, 0);
        bases.push(base);
        let range = AddressRange::new(Address(base), LEN).expect("a range");
        // SAFETY: live memory, which is withdrawn and deregistered before it is freed.
        unsafe {
            let announced = gaudi.announce(range, DeviceId(0), ()).expect("announce");
            for _ in 0..2 {
                let region = cache.get(raw(range), Access::REMOTE_READ).expect("cached");
                assert_eq!(region.decision().expect("a decision").path, Path::DmaBuf);
            }
            gaudi.withdraw(&announced).expect("withdraw");
            cache.reclaim();
            assert_eq!(domain.live().regions, 0, "a region outlives its memory");
            assert_eq!(free(0, base, 0), 0);
        }
    }
    assert!(bases.windows(2).all(|pair| pair[0] == pair[1]), "the address did not come back");
    assert_eq!(cache.statistics().registrations, 3);
}

/// CACHE-12, MON-09
#[test]
fn disabled_monitor_leaves_the_other_ifaces_cached() {
    let fake = Fake::start(Profile::running());
    let ifaces: [Arc<dyn Iface>; 2] = [Arc::new(neuron(&fake)), Arc::new(gaudi(&fake))];
    let mut builder = Hmem::builder()
        .without_vendor_ifaces()
        .cache(CacheAttr::default().without_monitors([IfaceKind::NEURON]))
        .provider(Loopback::builder().build().expect("a NIC"));
    for iface in &ifaces {
        builder = builder.shared_iface(Arc::clone(iface));
    }
    let hmem = builder.build().expect("start");
    let attr = DomainAttr { cache: Some(CacheAttr::default()), ..DomainAttr::default() };
    let domain = hmem.domain("loopback", attr).expect("a domain");
    let cache = domain.cache().expect("a cache");
    let cached = |iface: &Arc<dyn Iface>| {
        let own = DeviceBuffer::allocate(iface, &request()).expect("allocate");
        // SAFETY: live memory; the region is not used once it is freed.
        let region = cache.get(unsafe { raw(own.range()) }, Access::REMOTE_READ);
        region.expect("a region").lease().uncached_reason().is_none()
    };
    assert!(!cached(&ifaces[0]) && cached(&ifaces[1]));
    assert_eq!(
        hmem.cache_defaults().expect("good values").monitor_left_out_by(IfaceKind::NEURON),
        Some("Builder::cache")
    );
    assert_eq!(
        hmem.cache_defaults().expect("good values").monitor_left_out_by(IfaceKind::SYNAPSEAI),
        None
    );
}

/// P2P-03, DIAG-03
#[test]
fn refused_export_is_staged_with_its_call_code_and_cause() {
    with_each(|fake, wire, iface| {
        let domain = &wire.domain;
        let (symbol, code, cause) = match iface.kind() {
            IfaceKind::NEURON => ("nrt_get_dmabuf_fd_v2", 2, "neuron-export-invalid"),
            _ => ("hlthunk_device_mapped_memory_export_dmabuf_fd", -22, "synapseai-export-invalid"),
        };
        let buffer = DeviceBuffer::allocate(iface, &request()).expect("allocate");
        fake.fail(symbol, code);
        let region = domain.register(buffer, Access::READ | Access::WRITE).expect("staged");
        let decision = region.decision().expect("a decision");
        assert_eq!(decision.path, Path::Staged);
        let refused = decision.attempts.iter().find(|attempt| attempt.path == Path::DmaBuf);
        let refused = refused.expect("the dma-buf was tried");
        let error = refused.error.as_ref().expect("it was refused");
        assert!(error.to_string().contains(symbol), "{error}");
        assert!(error.to_string().contains(&format!("({})", code.abs())), "{error}");
        assert_eq!(refused.cause_name, Some(cause));
        let buffer = region.close().expect("close");
        let region = domain.register(buffer, Access::READ | Access::WRITE).expect("direct");
        drop(region);
    });
}

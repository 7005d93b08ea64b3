//! Cached registrations of Gaudi memory that the application announces and withdraws, over the fake
//! runtime and the software NIC.
#![cfg(feature = "synapseai")]
#![allow(unsafe_code)]

#[allow(dead_code, reason = "other test binaries use the rest")]
mod wire;

use std::sync::Arc;

use hmem::{
    Access, Address, AddressRange, CacheAttr, DeviceId, DomainAttr, Hmem,
    loopback::Loopback,
    path::Path,
    synapseai::{self, SynapseAi},
};
use hmem_fake_accelerators::{Fake, Profile};
use wire::raw;

const LEN: u64 = 64 << 10;

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

//! Heap allocations of a registration.

#[path = "../../tests/counting/mod.rs"]
mod counting;
mod support;

use hmem_core::MrMode;
use hmem_provider_loopback::Loopback;
use support::*;

#[test]
fn region_of_one_range_takes_one_allocation() {
    for mode in [MrMode::empty(), MrMode::PROV_KEY] {
        let domain = domain(&Loopback::builder().build().unwrap(), mode);
        let buffer = Buffer::new(64);
        let pieces = [host(buffer.range(), true)];
        let attr = RegAttr::key(1);
        // The first registrations grow the table of the NIC.
        for _ in 0..10 {
            domain.deregister(attr.register(&*domain, &pieces).unwrap()).unwrap();
        }
        let (allocated, freed) = counting::calls();
        domain.deregister(attr.register(&*domain, &pieces).unwrap()).unwrap();
        assert_eq!(counting::calls(), (allocated + 1, freed + 1), "{mode}");
    }
}

//! Time to find the owner of an address: the device allocation that contains it, or host memory.
//!
//! The first lookup is among 100,000 device allocations. Its reference is one dependent load from a
//! random cache line of a table with 100,000 lines. Every lookup that reads the allocation's entry
//! needs at least that load. The second lookup is for a host address while devices are present.

#![allow(missing_docs, reason = "a bench is a program")]

#[allow(dead_code, reason = "other benches use the rest of it")]
mod report;

use std::{hint::black_box, sync::Arc};

use hmem::{
    Address, AllocationKind, DeviceId, Iface, IfaceExt, Registry,
    iface::AllocRequest,
    system::{Simulated, System},
};
use report::Target;

const ALLOCATIONS: usize = 100_000;

/// Shuffles items in a fixed pseudo-random order (xorshift64), which is the same in every run.
fn shuffled<T>(mut items: Vec<T>) -> Vec<T> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for last in (1..items.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        items.swap(last, (state % (last as u64 + 1)) as usize);
    }
    items
}

#[repr(align(64))]
#[derive(Clone)]
struct CacheLine(u64);

fn main() {
    let simulated = Arc::new(Simulated::builder().build().expect("the simulated device starts"));
    let request = AllocRequest { len: 4096, device: DeviceId(0), kind: AllocationKind::Device };
    let allocations: Vec<_> = (0..ALLOCATIONS)
        .map(|_| simulated.allocate(&request).expect("device memory is left"))
        .collect();
    let mut registry = Registry::new();
    registry.add(Arc::new(System::new())).expect("an empty registry accepts any iface");
    registry.add(Arc::clone(&simulated) as Arc<dyn Iface>).expect("no other iface has this kind");
    let addresses = shuffled(
        allocations
            .iter()
            .map(|allocation| Address(allocation.base().0 + 1234))
            .collect::<Vec<_>>(),
    );
    let lines = vec![CacheLine(1); ALLOCATIONS];
    let places = shuffled((0..ALLOCATIONS).collect::<Vec<_>>());
    let host = vec![0u8; 4096];
    let host = Address::of_ptr(host.as_ptr());

    let next = |at: &mut usize| {
        *at = if *at + 1 == ALLOCATIONS { 0 } else { *at + 1 };
        *at
    };
    let owner = |address| registry.owner_of(black_box(address)).expect("a lookup does not fail");
    let (mut of_lookup, mut of_load) = (0, 0);
    let window = simulated.window();
    report::print(vec![
        report::compare(
            "address among 100,000 device allocations / one random load",
            Target::Nanoseconds(30.0),
            || {
                black_box(owner(addresses[next(&mut of_lookup)]).device);
            },
            || {
                black_box(lines[black_box(places[next(&mut of_load)])].0);
            },
        ),
        report::compare(
            "host address with devices present / two compares",
            Target::Nanoseconds(5.0),
            || {
                black_box(owner(host).iface);
            },
            || {
                black_box(black_box(window).contains(black_box(host)));
            },
        ),
    ]);
    for allocation in &allocations {
        // SAFETY: nothing refers to the device memory, and each allocation is freed once.
        unsafe { simulated.free(allocation) }.expect("each allocation is freed once");
    }
}

//! Prints the cost of `Iface::query` for random addresses in 100,000 live allocations, for one
//! address, and for an address of another iface.

use std::{hint::black_box, time::Instant};

use hmem_core::{Address, AllocationKind, DeviceId, Iface, IfaceExt, Result, iface::AllocRequest};
use hmem_iface_system::Simulated;

const ALLOCATIONS: u64 = 100_000;
const BATCH: u64 = 100_000;

fn main() -> Result<()> {
    let simulated = Simulated::builder().build()?;
    let request = AllocRequest { len: 4096, device: DeviceId(0), kind: AllocationKind::Device };
    let addresses: Vec<Address> = (0..ALLOCATIONS)
        .map(|_| Ok(simulated.allocate(&request)?.base()))
        .collect::<Result<_>>()?;
    let iface: &dyn Iface = black_box(&simulated);
    let mut state = 1_u64;
    let mut random = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % ALLOCATIONS
    };
    print("at random", || Address(addresses[0].0 + random() * 4096 + 7), iface)?;
    print("one allocation", || Address(addresses[0].0 + 7), iface)?;
    let host = Address::of_ptr(&raw const addresses);
    print("foreign", || host, iface)
}

/// Times `Iface::query` in many batches of addresses, and prints the time per call of the fastest
/// batch. Slower batches may have been disturbed by other work of the machine.
fn print(what: &str, mut address: impl FnMut() -> Address, iface: &dyn Iface) -> Result<()> {
    let mut best = f64::INFINITY;
    for _ in 0..200 {
        let addresses: Vec<Address> = (0..BATCH).map(|_| address()).collect();
        let start = Instant::now();
        let mut sum = 0;
        for address in &addresses {
            sum += iface.query(*address)?.map_or(0, |allocation| allocation.id.0);
        }
        black_box(sum);
        best = best.min(start.elapsed().as_secs_f64() * 1e9 / BATCH as f64);
    }
    println!("{what}: {best:.1} ns");
    Ok(())
}

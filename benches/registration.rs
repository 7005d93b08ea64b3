//! Register and close of a 4 KiB host range, with few and with 100,000 regions live, against libfabric's
//! `fi_mr_regattr` + `fi_close` on its software provider `tcp` in the same run.
//!
//! Both sides: zero-based addressing, keys requested by the caller, remote read and write rights, pages not touched. With many
//! regions libfabric's cost depends on the keys (a red-black tree), so both sides register under keys scattered
//! over the live ones; libfabric's best case, one key over and over, is printed beside it.

#![allow(missing_docs, reason = "a bench is a program")]

#[path = "peer/libfabric/mod.rs"]
#[allow(dead_code, unused_imports, reason = "other benches use the rest of it")]
mod libfabric;
#[allow(dead_code, reason = "other benches use the rest of it")]
mod report;

use std::{hint::black_box, time::Duration};

use criterion::{BenchmarkGroup, Criterion, measurement::WallTime};
use hmem::{
    Access, Address, AddressRange, Domain, DomainAttr, Hmem, MemoryRegion, MrFlags, MrMode,
    p2p::loopback::{Loopback, Progress},
};
use libfabric::{KeyOrder, Libfabric, RegistrationPeer, RegistrationProvider};
use report::{Row, Target};

const GROUP: &str = "registration";
const LEN: u64 = 4096;
const FEW: usize = 16;
const MANY: usize = 100_000;
const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

fn domain(needs: MrMode) -> Domain {
    let loopback =
        Loopback::builder().needs(needs).progress(Progress::ByHand).build().expect("a software NIC starts");
    let hmem = Hmem::builder()
        .without_vendor_ifaces()
        .provider(loopback)
        .build()
        .expect("host memory is always there");
    let attr = DomainAttr { mr_mode: needs, ..DomainAttr::default() };
    hmem.domain("loopback", attr).expect("the mode is what it needs")
}

/// Regions kept alive under the even keys from 2 on, as the peer does.
struct Live {
    regions: Vec<MemoryRegion>,
    _backing: Vec<u8>,
}

fn register(domain: &Domain, start: u64, key: u64) -> MemoryRegion {
    let range = AddressRange::new(Address(start), LEN).expect("far from the end of the address space");
    // SAFETY: nobody transfers to these regions, and they are closed before their memory is freed.
    unsafe { domain.reg(range, REMOTE, key, MrFlags::empty()) }.expect("the key is vacant")
}

fn populate(domain: &Domain, count: usize) -> Live {
    let backing = Vec::with_capacity(count * LEN as usize);
    let base = Address::of_ptr(backing.as_ptr()).0;
    let regions =
        (0..count as u64).map(|index| register(domain, base + index * LEN, 2 * (index + 1))).collect();
    Live { regions, _backing: backing }
}

/// The same keys in the same order as on the peer's side.
fn vacant_key(pick: u64, live: usize) -> u64 {
    2 * (pick % (live as u64 + 1)) + 1
}

fn scattered(call: u64) -> u64 {
    call.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20
}

fn measure(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, mut operation: impl FnMut(u64)) {
    let mut call = 0;
    group.bench_function(name, |bencher| {
        bencher.iter(|| {
            call += 1;
            operation(black_box(call));
        });
    });
}

fn ours(group: &mut BenchmarkGroup<'_, WallTime>, needs: MrMode, names: [&str; 3]) {
    let domain = domain(needs);
    let buffer = vec![0u8; LEN as usize];
    let start = Address::of_ptr(buffer.as_ptr()).0;
    let close = |region: MemoryRegion| region.close().expect("nothing is bound to it");
    for (live, name, one_key) in [(FEW, names[0], false), (MANY, names[1], false), (MANY, names[2], true)] {
        let populated = populate(&domain, live);
        measure(group, name, |call| {
            let pick = if one_key { live as u64 / 2 } else { scattered(call) };
            close(register(&domain, start, vacant_key(pick, live)));
        });
        populated.regions.into_iter().for_each(close);
    }
    domain.close().expect("every region is closed");
}

fn theirs(
    group: &mut BenchmarkGroup<'_, WallTime>,
    libfabric: Libfabric,
) -> Result<(), libfabric::FabricError> {
    let mut peer = RegistrationPeer::open(libfabric, RegistrationProvider::Tcp)?;
    let buffer = vec![0u8; LEN as usize];
    for (live, name, one_key) in [
        (FEW, "libfabric_few", false),
        (MANY, "libfabric_100000", false),
        (MANY, "libfabric_100000_one_key", true),
    ] {
        peer.populate(live, KeyOrder::Shuffled)?;
        measure(group, name, |call| {
            let key = peer.vacant_key(if one_key { live as u64 / 2 } else { scattered(call) });
            peer.reg_close(buffer.as_ptr(), LEN as usize, RegistrationPeer::REMOTE_ACCESS, key)
                .expect("the key is vacant");
        });
    }
    peer.close()
}

fn main() {
    report::forget(GROUP);
    let mut criterion = Criterion::default().measurement_time(Duration::from_secs(3)).without_plots();
    let mut group = criterion.benchmark_group(GROUP);
    ours(&mut group, MrMode::empty(), ["hmem_few", "hmem_100000", "hmem_100000_one_key"]);
    ours(
        &mut group,
        MrMode::ALLOCATED,
        ["hmem_allocated_few", "hmem_allocated_100000", "hmem_allocated_100000_one_key"],
    );
    match Libfabric::load() {
        Ok(libfabric) => {
            let (major, minor) = libfabric.version();
            println!("peer: libfabric {major}.{minor}, provider tcp");
            if let Err(error) = theirs(&mut group, libfabric) {
                println!("peer: libfabric could not be measured: {error}");
            }
        }
        Err(error) => println!("peer: libfabric is not here: {error}"),
    }
    group.finish();
    report::print(&[
        Row {
            what: "register + close, 16 live / libfabric tcp",
            ours: "registration/hmem_few",
            other: "registration/libfabric_few",
            target: Target::Ratio(1.0),
        },
        Row {
            what: "register + close, 100,000 live, scattered keys / libfabric tcp",
            ours: "registration/hmem_100000",
            other: "registration/libfabric_100000",
            target: Target::Ratio(0.5),
        },
        Row {
            what: "register + close, 100,000 live, one key / libfabric's best case",
            ours: "registration/hmem_100000_one_key",
            other: "registration/libfabric_100000_one_key",
            target: Target::Ratio(1.0),
        },
        Row {
            what: "the same in ALLOCATED mode (looks at the pages), 16 live",
            ours: "registration/hmem_allocated_few",
            other: "registration/libfabric_few",
            target: Target::Orientation,
        },
    ]);
}

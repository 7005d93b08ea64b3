//! Time to register and close a 4 KiB host range, with 16 and with 100,000 live regions. The
//! reference is libfabric's `fi_mr_regattr` and `fi_close` with its software provider `tcp`, which
//! runs alternately with hmem.
//!
//! Both sides use zero-based addressing, requested keys, and remote read and write rights. Neither
//! accesses the memory. libfabric keeps the keys in a red-black tree, so its time depends on the
//! keys. For 100,000 regions, one measurement scatters the requested keys over the live ones.
//! Another repeats one key, which is libfabric's best case.

#![allow(missing_docs, reason = "a bench is a program")]

#[path = "peer/libfabric/mod.rs"]
#[allow(dead_code, unused_imports, reason = "other benches use the rest of it")]
mod libfabric;
#[allow(dead_code, reason = "other benches use the rest of it")]
mod report;

use std::hint::black_box;

use hmem::{
    Access, Address, AddressRange, Domain, DomainAttr, Hmem, MemoryRegion, MrFlags, MrMode,
    Promise, Raw, fabric,
    loopback::{Loopback, Progress},
};
use libfabric::{FabricError, KeyOrder, Libfabric, RegistrationPeer, RegistrationProvider};
use report::{Comparison, Target};

const LEN: u64 = 4096;
const FEW: usize = 16;
const MANY: usize = 100_000;
const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

fn domain(needs: MrMode) -> Domain {
    let loopback = Loopback::builder()
        .needs(needs)
        .progress(Progress::ByHand)
        .build()
        .expect("a software NIC starts");
    let hmem = Hmem::builder()
        .without_vendor_ifaces()
        .provider(loopback)
        .build()
        .expect("host memory is always available");
    let attr = DomainAttr { mr_mode: needs, ..DomainAttr::default() };
    hmem.domain("loopback", attr).expect("the NIC offers the mode that it needs")
}

/// Live regions with their memory. Their keys are the even numbers from 2 on, like those of the
/// live libfabric regions.
struct LiveRegions {
    _regions: Vec<MemoryRegion>,
    _backing: Vec<u8>,
}

fn register(domain: &Domain, start: u64, key: u64) -> MemoryRegion {
    let range = AddressRange::new(Address(start), LEN).expect("the range does not wrap");
    // SAFETY: nothing transfers to these regions, and they are closed before their memory is freed.
    let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
    fabric::reg(domain, memory, REMOTE, key, MrFlags::empty()).expect("the key is unused")
}

fn populate(domain: &Domain, count: usize) -> LiveRegions {
    let backing = Vec::with_capacity(count * LEN as usize);
    let base = Address::of_ptr(backing.as_ptr()).0;
    let regions = (0..count as u64)
        .map(|index| register(domain, base + index * LEN, 2 * (index + 1)))
        .collect();
    LiveRegions { _regions: regions, _backing: backing }
}

/// Returns an odd key, which no live region has. `pick` selects the key like the argument of
/// [`RegistrationPeer::vacant_key`], and `live` is the number of live regions.
fn vacant_key(pick: u64, live: usize) -> u64 {
    2 * (pick % (live as u64 + 1)) + 1
}

fn scattered(call: u64) -> u64 {
    call.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20
}

/// The keys that a measurement requests for its regions: one key again and again, or scattered
/// keys. No live region has a requested key.
#[derive(Clone, Copy)]
enum KeyChoice {
    Scattered,
    One,
}

impl KeyChoice {
    fn of(self, call: u64, live: usize) -> u64 {
        match self {
            Self::Scattered => scattered(call),
            Self::One => live as u64 / 2,
        }
    }
}

/// Measures hmem and, if libfabric is loaded, libfabric alternately. Both must already have `live`
/// live regions.
fn row(
    what: &'static str,
    target: Target,
    domain: &Domain,
    peer: Option<&RegistrationPeer>,
    live: usize,
    key_choice: KeyChoice,
) -> Comparison {
    let buffer = vec![0u8; LEN as usize];
    let (mut our_call, mut their_call) = (0, 0);
    let ours = || {
        our_call += 1;
        let key = vacant_key(key_choice.of(black_box(our_call), live), live);
        let region = register(domain, Address::of_ptr(buffer.as_ptr()).0, key);
        region.close().expect("the region is not in use");
    };
    let Some(peer) = peer else { return report::measure_alone(what, target, ours) };
    let theirs = || {
        their_call += 1;
        let key = peer.vacant_key(key_choice.of(black_box(their_call), live));
        peer.reg_close(buffer.as_ptr(), LEN as usize, RegistrationPeer::REMOTE_ACCESS, key)
            .expect("the key is unused");
    };
    report::compare(what, target, ours, theirs)
}

fn peer() -> Option<RegistrationPeer> {
    let opened = Libfabric::load().and_then(|libfabric| {
        let (major, minor) = libfabric.version();
        println!("reference: libfabric {major}.{minor}, provider tcp");
        RegistrationPeer::open(libfabric, RegistrationProvider::Tcp)
    });
    opened.inspect_err(|error| println!("reference: libfabric is not measured: {error}")).ok()
}

fn main() -> Result<(), FabricError> {
    let mut peer = peer();
    let plain = domain(MrMode::empty());
    let allocated = domain(MrMode::ALLOCATED);
    let mut lines = Vec::new();
    for live in [FEW, MANY] {
        if let Some(peer) = &mut peer {
            peer.populate(live, KeyOrder::Shuffled)?;
        }
        let populated = populate(&plain, live);
        let mut measure = |what, target, domain, key_choice| {
            lines.push(row(what, target, domain, peer.as_ref(), live, key_choice));
        };
        if live == FEW {
            let few = "register + close, 16 live / libfabric tcp";
            measure(few, Target::Ratio(2.0), &plain, KeyChoice::Scattered);
            let allocated_mode = "register + close, 16 live, ALLOCATED mode (checks the pages)";
            let also_populated = populate(&allocated, live);
            measure(allocated_mode, Target::Unlimited, &allocated, KeyChoice::Scattered);
            drop(also_populated);
        } else {
            let many = "register + close, 100,000 live, scattered keys / libfabric tcp";
            measure(many, Target::Ratio(2.0), &plain, KeyChoice::Scattered);
            let one_key = "register + close, 100,000 live, one key / libfabric's best case";
            measure(one_key, Target::Ratio(2.0), &plain, KeyChoice::One);
        }
        drop(populated);
    }
    report::print(lines);
    for domain in [plain, allocated] {
        domain.close().expect("every region is closed");
    }
    peer.map_or(Ok(()), RegistrationPeer::close)
}

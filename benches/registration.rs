//! Register and close of a 4 KiB host range, with few and with 100,000 regions live, against
//! libfabric's `fi_mr_regattr` + `fi_close` on its software provider `tcp`, by turns.
//!
//! Both sides: zero-based addressing, keys requested by the caller, remote read and write rights,
//! pages not touched. With many regions libfabric's cost depends on the keys (a red-black tree), so
//! both sides register under keys scattered over the live ones; libfabric's best case, one key over
//! and over, is printed beside it.

#![allow(missing_docs, reason = "a bench is a program")]

#[path = "peer/libfabric/mod.rs"]
#[allow(dead_code, unused_imports, reason = "other benches use the rest of it")]
mod libfabric;
#[allow(dead_code, reason = "other benches use the rest of it")]
mod report;

use std::hint::black_box;

use hmem::{
    Access, Address, AddressRange, Domain, DomainAttr, Hmem, MemoryRegion, MrFlags, MrMode,
    loopback::{Loopback, Progress},
};
use libfabric::{FabricError, KeyOrder, Libfabric, RegistrationPeer, RegistrationProvider};
use report::{
    Target,
    turns::{self, Turns},
};

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
        .expect("host memory is always there");
    let attr = DomainAttr { mr_mode: needs, ..DomainAttr::default() };
    hmem.domain("loopback", attr).expect("the mode is what it needs")
}

/// Regions kept alive under the even keys from 2 on, as the peer does.
struct Live {
    _regions: Vec<MemoryRegion>,
    _backing: Vec<u8>,
}

fn register(domain: &Domain, start: u64, key: u64) -> MemoryRegion {
    let range =
        AddressRange::new(Address(start), LEN).expect("far from the end of the address space");
    // SAFETY: nobody transfers to these regions, and they are closed before their memory is freed.
    unsafe { domain.reg(range, REMOTE, key, MrFlags::empty()) }.expect("the key is vacant")
}

fn populate(domain: &Domain, count: usize) -> Live {
    let backing = Vec::with_capacity(count * LEN as usize);
    let base = Address::of_ptr(backing.as_ptr()).0;
    let regions = (0..count as u64)
        .map(|index| register(domain, base + index * LEN, 2 * (index + 1)))
        .collect();
    Live { _regions: regions, _backing: backing }
}

/// The peer's keys, in the peer's order.
fn vacant_key(pick: u64, live: usize) -> u64 {
    2 * (pick % (live as u64 + 1)) + 1
}

fn scattered(call: u64) -> u64 {
    call.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20
}

/// Which of the vacant keys the calls of a row ask for.
#[derive(Clone, Copy)]
enum Picks {
    Scattered,
    One,
}

impl Picks {
    fn of(self, call: u64, live: usize) -> u64 {
        match self {
            Self::Scattered => scattered(call),
            Self::One => live as u64 / 2,
        }
    }
}

/// Measures one row. Before that, `populate` registers as many regions on the peer library's side.
fn row(
    what: &'static str,
    target: Target,
    domain: &Domain,
    peer: Option<&RegistrationPeer>,
    live: usize,
    picks: Picks,
) -> Turns {
    let buffer = vec![0u8; LEN as usize];
    let (mut our_call, mut their_call) = (0, 0);
    let ours = || {
        our_call += 1;
        let key = vacant_key(picks.of(black_box(our_call), live), live);
        let region = register(domain, Address::of_ptr(buffer.as_ptr()).0, key);
        region.close().expect("nothing is bound to it");
    };
    let Some(peer) = peer else { return turns::alone(what, target, ours) };
    let theirs = || {
        their_call += 1;
        let key = peer.vacant_key(picks.of(black_box(their_call), live));
        peer.reg_close(buffer.as_ptr(), LEN as usize, RegistrationPeer::REMOTE_ACCESS, key)
            .expect("the key is vacant");
    };
    turns::against(what, target, ours, theirs)
}

fn peer() -> Option<RegistrationPeer> {
    let opened = Libfabric::load().and_then(|libfabric| {
        let (major, minor) = libfabric.version();
        println!("peer: libfabric {major}.{minor}, provider tcp");
        RegistrationPeer::open(libfabric, RegistrationProvider::Tcp)
    });
    opened.inspect_err(|error| println!("peer: libfabric cannot be measured: {error}")).ok()
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
        let mut measure = |what, target, domain, picks| {
            lines.push(row(what, target, domain, peer.as_ref(), live, picks));
        };
        if live == FEW {
            let few = "register + close, 16 live / libfabric tcp";
            measure(few, Target::Ratio(2.0), &plain, Picks::Scattered);
            let looking = "the same in ALLOCATED mode (looks at the pages), 16 live";
            let also_populated = populate(&allocated, live);
            measure(looking, Target::Orientation, &allocated, Picks::Scattered);
            drop(also_populated);
        } else {
            let many = "register + close, 100,000 live, scattered keys / libfabric tcp";
            measure(many, Target::Ratio(2.0), &plain, Picks::Scattered);
            let one_key = "register + close, 100,000 live, one key / libfabric's best case";
            measure(one_key, Target::Ratio(2.0), &plain, Picks::One);
        }
        drop(populated);
    }
    turns::print(lines);
    for domain in [plain, allocated] {
        domain.close().expect("every region is closed");
    }
    peer.map_or(Ok(()), RegistrationPeer::close)
}

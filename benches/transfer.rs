//! RMA writes to completion over the software NIC: 8 bytes against libfabric's `shm` provider in
//! one process, 1 MiB against `memcpy`, by turns.
//!
//! Ours: progress by hand, both regions own their memory. libfabric: the inline command path of
//! `shm`, which is its fastest for short writes, until the completion is there and the bytes are at
//! the target.

#![allow(missing_docs, reason = "a bench is a program")]

#[path = "peer/libfabric/mod.rs"]
#[allow(dead_code, unused_imports, reason = "other benches use the rest of it")]
mod libfabric;
#[allow(dead_code, reason = "other benches use the rest of it")]
mod report;

use std::hint::black_box;

use hmem::{
    Access, DomainAttr, Hmem, MrMode, RegionSlice,
    loopback::{Loopback, Progress},
    provider::EndpointAttr,
    transfer::RemoteSegment,
};
use libfabric::{FabricError, Libfabric, ShmWritePath, ShmWritePeer};
use report::{
    Target,
    turns::{self, Turns},
};

const LARGE: usize = 1 << 20;

fn peer() -> Option<ShmWritePeer> {
    let opened = Libfabric::load().and_then(|libfabric| {
        let (major, minor) = libfabric.version();
        println!("peer: libfabric {major}.{minor}, provider shm");
        ShmWritePeer::open(libfabric, ShmWritePath::CommandQueue)
    });
    opened.inspect_err(|error| println!("peer: libfabric cannot be measured: {error}")).ok()
}

fn against_peer(
    what: &'static str,
    target: Target,
    ours: impl FnMut(),
    peer: Option<&mut ShmWritePeer>,
    len: usize,
) -> Turns {
    match peer {
        Some(peer) => turns::against(what, target, ours, || {
            peer.write(black_box(len)).expect("the write arrives")
        }),
        None => turns::alone(what, target, ours),
    }
}

fn main() -> Result<(), FabricError> {
    let mut peer = peer();
    let loopback =
        Loopback::builder().progress(Progress::ByHand).build().expect("a software NIC starts");
    let hmem = Hmem::builder()
        .without_vendor_ifaces()
        .provider(loopback)
        .build()
        .expect("host memory is always there");
    let attr = DomainAttr { mr_mode: MrMode::empty(), ..DomainAttr::default() };
    let domain = hmem.domain("loopback", attr).expect("the loopback needs no mode");
    let cq = domain.open_cq(64).expect("a queue");
    let endpoint = || {
        let attr = EndpointAttr::new(&cq);
        domain.open_endpoint(&attr).expect("an endpoint")
    };
    let (initiator, target) = (endpoint(), endpoint());
    let to = initiator.resolve(&target.name()).expect("it is there");
    let source = domain.register(vec![7u8; LARGE], Access::WRITE).expect("registers");
    let destination = domain.register(vec![0u8; LARGE], Access::REMOTE_WRITE).expect("registers");
    let key = destination.key().expect("registered");
    let mut completions = Vec::with_capacity(1);
    let segments = |len: usize| {
        let local = [source.slice(0, len as u64).expect("inside")];
        (local, [RemoteSegment { address: key.base(), len: len as u64, key: &key }])
    };
    let mut write = |(local, remote): &([RegionSlice; 1], [RemoteSegment<'_>; 1])| {
        initiator.write(black_box(local), black_box(remote), to, 1).expect("there is room");
        while completions.is_empty() {
            cq.read(&mut completions, 1).expect("the queue is not overrun");
        }
        let completion = completions.pop().expect("one was read");
        assert_eq!(completion.result.expect("the write arrives"), remote[0].len);
    };
    let mut lines = Vec::new();
    for (what, len) in [
        ("8 B RMA write to completion / libfabric shm", 8),
        ("4 KiB RMA write / libfabric shm", 4096),
        ("64 KiB RMA write / libfabric shm", 65536),
        ("1 MiB RMA write / libfabric shm", LARGE),
    ] {
        let segments = segments(len);
        lines.push(against_peer(what, Target::Ratio(2.0), || write(&segments), peer.as_mut(), len));
    }
    let (from, mut to) = (vec![7u8; LARGE], vec![0u8; LARGE]);
    let memcpy = || black_box(&mut to).copy_from_slice(black_box(&from));
    let segments = segments(LARGE);
    lines.push(turns::against(
        "1 MiB RMA write / memcpy",
        Target::Ratio(1.11),
        || write(&segments),
        memcpy,
    ));
    turns::print(lines);
    let mut arrived = [0u8; 8];
    destination.read(LARGE as u64 - 8, &mut arrived).expect("inside");
    assert_eq!(arrived, [7; 8], "the bytes did not arrive");
    peer.map_or(Ok(()), ShmWritePeer::close)
}

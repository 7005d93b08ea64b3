//! Time from posting an RMA write to its completion on the software NIC. The references are
//! libfabric's `shm` provider within one process and, for 1 MiB, also `memcpy`. They run
//! alternately with hmem.
//!
//! hmem's NIC makes progress only when the completion queue is read, and both regions own their
//! memory. libfabric writes through the command queue of `shm`, its fastest mechanism for short
//! writes. Its time ends when the bytes have arrived at the target.

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
use report::{Comparison, Target};

const LARGE: usize = 1 << 20;

fn peer() -> Option<ShmWritePeer> {
    let opened = Libfabric::load().and_then(|libfabric| {
        let (major, minor) = libfabric.version();
        println!("reference: libfabric {major}.{minor}, provider shm");
        ShmWritePeer::open(libfabric, ShmWritePath::CommandQueue)
    });
    opened.inspect_err(|error| println!("reference: libfabric is not measured: {error}")).ok()
}

fn against_peer(
    what: &'static str,
    target: Target,
    ours: impl FnMut(),
    peer: Option<&mut ShmWritePeer>,
    len: usize,
) -> Comparison {
    match peer {
        Some(peer) => report::compare(what, target, ours, || {
            peer.write(black_box(len)).expect("the write succeeds")
        }),
        None => report::measure_alone(what, target, ours),
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
        .expect("host memory is always available");
    let attr = DomainAttr { mr_mode: MrMode::empty(), ..DomainAttr::default() };
    let domain = hmem.domain("loopback", attr).expect("the software NIC needs no mode");
    let cq = domain.open_cq(64).expect("a queue");
    let endpoint = || {
        let attr = EndpointAttr::new(&cq);
        domain.open_endpoint(&attr).expect("an endpoint")
    };
    let (initiator, target) = (endpoint(), endpoint());
    let to = initiator.resolve(&target.name()).expect("the target endpoint exists");
    let source = domain.register(vec![7u8; LARGE], Access::WRITE).expect("register");
    let destination = domain.register(vec![0u8; LARGE], Access::REMOTE_WRITE).expect("register");
    let key = destination.key().expect("registered");
    let mut completions = Vec::with_capacity(1);
    let segments = |len: usize| {
        let local = [source.slice(0, len as u64).expect("the slice is inside the region")];
        (local, [RemoteSegment { address: key.base(), len: len as u64, key: &key }])
    };
    let mut write = |(local, remote): &([RegionSlice; 1], [RemoteSegment<'_>; 1])| {
        initiator.write(black_box(local), black_box(remote), to, 1).expect("the queue has room");
        while completions.is_empty() {
            cq.read(&mut completions, 1).expect("the queue can be read");
        }
        let completion = completions.pop().expect("the queue returned a completion");
        assert_eq!(completion.result.expect("the write succeeds"), remote[0].len);
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
    lines.push(report::compare(
        "1 MiB RMA write / memcpy",
        Target::Ratio(1.11),
        || write(&segments),
        memcpy,
    ));
    report::print(lines);
    let mut arrived = [0u8; 8];
    destination.read(LARGE as u64 - 8, &mut arrived).expect("the slice is inside the region");
    assert_eq!(arrived, [7; 8], "the bytes did not arrive");
    peer.map_or(Ok(()), ShmWritePeer::close)
}

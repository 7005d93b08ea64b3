//! RMA writes to completion over the software NIC: 8 bytes against libfabric's `shm` provider in one process, 1 MiB
//! against `memcpy`, in the same run.
//!
//! Ours: progress by hand, both regions own their memory. libfabric: the inline command path of `shm`, which is its
//! fastest for short writes, until the completion is there and the bytes are at the target.

#![allow(missing_docs, reason = "a bench is a program")]

#[path = "peer/libfabric/mod.rs"]
#[allow(dead_code, unused_imports, reason = "other benches use the rest of it")]
mod libfabric;
#[allow(dead_code, reason = "other benches use the rest of it")]
mod report;

use std::{hint::black_box, time::Duration};

use criterion::{BenchmarkGroup, Criterion, measurement::WallTime};
use hmem::{
    Access, DomainAttr, Hmem, MrMode,
    p2p::loopback::{Loopback, Progress},
    provider::EndpointAttr,
    transfer::RemoteSegment,
};
use libfabric::{Libfabric, ShmWritePath, ShmWritePeer};
use report::{Row, Target};

const GROUP: &str = "transfer";
const LARGE: usize = 1 << 20;

fn ours(group: &mut BenchmarkGroup<'_, WallTime>) {
    let loopback = Loopback::builder().progress(Progress::ByHand).build().expect("a software NIC starts");
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
    let peer = initiator.resolve(&target.name()).expect("it is there");
    let source = domain.register(vec![7u8; LARGE], Access::WRITE).expect("registers");
    let destination = domain.register(vec![0u8; LARGE], Access::REMOTE_WRITE).expect("registers");
    let key = destination.key().expect("registered");
    let mut completions = Vec::with_capacity(1);
    for (name, len) in
        [("hmem_8", 8), ("hmem_4096", 4096), ("hmem_65536", 65536), ("hmem_1048576", LARGE as u64)]
    {
        let local = [source.slice(0, len).expect("inside")];
        let remote = [RemoteSegment { address: key.base(), len, key: &key }];
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                initiator.write(black_box(&local), black_box(&remote), peer, 1).expect("there is room");
                while completions.is_empty() {
                    cq.read(&mut completions, 1).expect("the queue is not overrun");
                }
                let completion = completions.pop().expect("one was read");
                assert_eq!(completion.result.expect("the write arrives"), len);
            });
        });
    }
    let mut arrived = [0u8; 8];
    destination.read(LARGE as u64 - 8, &mut arrived).expect("inside");
    assert_eq!(arrived, [7; 8], "the bytes did not arrive");
}

fn limit(group: &mut BenchmarkGroup<'_, WallTime>) {
    let source = vec![7u8; LARGE];
    let mut destination = vec![0u8; LARGE];
    for (name, len) in [("memcpy_4096", 4096), ("memcpy_65536", 65536), ("memcpy_1048576", LARGE)] {
        group.bench_function(name, |bencher| {
            bencher.iter(|| black_box(&mut destination)[..len].copy_from_slice(&black_box(&source)[..len]));
        });
    }
}

fn theirs(
    group: &mut BenchmarkGroup<'_, WallTime>,
    libfabric: Libfabric,
) -> Result<(), libfabric::FabricError> {
    let mut peer = ShmWritePeer::open(libfabric, ShmWritePath::CommandQueue)?;
    for (name, len) in [
        ("libfabric_8", 8),
        ("libfabric_4096", 4096),
        ("libfabric_65536", 65536),
        ("libfabric_1048576", LARGE),
    ] {
        group.bench_function(name, |bencher| {
            bencher.iter(|| peer.write(black_box(len)).expect("the write arrives"))
        });
    }
    peer.close()
}

fn main() {
    report::forget(GROUP);
    let mut criterion = Criterion::default().measurement_time(Duration::from_secs(3)).without_plots();
    let mut group = criterion.benchmark_group(GROUP);
    ours(&mut group);
    limit(&mut group);
    match Libfabric::load() {
        Ok(libfabric) => {
            let (major, minor) = libfabric.version();
            println!("peer: libfabric {major}.{minor}, provider shm");
            if let Err(error) = theirs(&mut group, libfabric) {
                println!("peer: libfabric could not be measured: {error}");
            }
        }
        Err(error) => println!("peer: libfabric is not here: {error}"),
    }
    group.finish();
    report::print(&[
        Row {
            what: "8 B RMA write to completion / libfabric shm",
            ours: "transfer/hmem_8",
            other: "transfer/libfabric_8",
            target: Target::Ratio(1.0),
        },
        Row {
            what: "4 KiB RMA write / libfabric shm",
            ours: "transfer/hmem_4096",
            other: "transfer/libfabric_4096",
            target: Target::Ratio(1.0),
        },
        Row {
            what: "64 KiB RMA write / libfabric shm",
            ours: "transfer/hmem_65536",
            other: "transfer/libfabric_65536",
            target: Target::Ratio(1.0),
        },
        Row {
            what: "1 MiB RMA write / libfabric shm",
            ours: "transfer/hmem_1048576",
            other: "transfer/libfabric_1048576",
            target: Target::Ratio(1.0),
        },
        Row {
            what: "1 MiB RMA write / memcpy",
            ours: "transfer/hmem_1048576",
            other: "transfer/memcpy_1048576",
            target: Target::Ratio(1.11),
        },
    ]);
}

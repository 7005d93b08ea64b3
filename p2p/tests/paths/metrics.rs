//! The counts of a domain (LIFE-12): registrations and bytes by path, refusals by cause, and
//! lookups of the cache are those that the tests made, also from several threads.

use std::{sync::Arc, thread, time::Duration};

use crate::path_support::{ALL_IMPORTS, Bench, REMOTE, page_size};
use hmem_core::{
    Access, Batch, CacheAttr, Domain, DomainAttr, DomainBindFlags, Errno, ErrorKind, Path, Request,
    event_queue::EventQueue, path::P2pPolicy,
};
use hmem_iface_system::{DmaBufKind, Simulated};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_loopback::{Loopback, NicCall};

fn bench() -> Bench {
    Bench::new(Simulated::builder().dma_buf(DmaBufKind::MemFd), ALL_IMPORTS)
}

/// LIFE-12
#[test]
fn registrations_and_bytes_are_counted_by_path() {
    let bench = bench();
    let direct = bench.domain("loop0", P2pPolicy::Enabled);
    let staged = bench.domain("loop1", P2pPolicy::Disabled);
    assert_eq!((direct.metrics().registrations(), direct.metrics().all_refusals()), (0, 0));
    let host = [1000, 24].map(|len| direct.register(vec![0_u8; len], REMOTE).expect("host"));
    let device = direct.register(bench.buffer(8 * page_size()), REMOTE).expect("a dma-buf");
    let part = device.sub(device.range().slice(0, 512).expect("a part"), REMOTE, None);
    let copied = staged.register(bench.buffer(3 * page_size()), REMOTE).expect("staged");

    let metrics = direct.metrics();
    let counts = |path| (metrics.path(path).registrations, metrics.path(path).bytes);
    assert_eq!(counts(Path::PlainHost), (2, 1024));
    assert_eq!(counts(Path::DmaBuf), (2, 8 * page_size() + 512), "the region and its part");
    assert_eq!(counts(Path::Staged), (0, 0));
    assert_eq!((metrics.registrations(), metrics.bytes()), (4, 1536 + 8 * page_size()));
    assert_eq!((metrics.live.regions, &metrics.cache), (4, &None));
    let other = staged.metrics();
    assert_eq!(other.path(Path::Staged).bytes, 3 * page_size());
    assert_eq!(other.registrations(), 1, "each domain has counts of its own");

    drop((host, part, device, copied));
    let closed = direct.metrics();
    assert_eq!(closed.registrations(), 4, "closing a region does not change the counts");
    assert_eq!(closed.live.regions, 0);
}

/// LIFE-12
#[test]
fn refusals_are_counted_by_kind_and_cause() {
    let bench = bench();
    let domain = bench.domain("loop0", P2pPolicy::Required);
    for errno in [12, 14, 12] {
        bench.faults.fail_nth(NicCall::Register, 1, Errno(errno));
        domain.register(vec![0_u8; 64], REMOTE).expect_err("refused by the NIC");
    }
    domain.register(Vec::<u8>::new(), REMOTE).expect_err("no bytes");
    for _ in 0..2 {
        domain.register(bench.odd(page_size()), REMOTE).expect_err("not exportable");
    }
    let metrics = domain.metrics();
    let counts: Vec<_> =
        metrics.refusals.iter().map(|found| (found.kind, found.cause, found.count)).collect();
    let of_export = counts.last().expect("refusals").1;
    assert_eq!(
        counts,
        [
            (ErrorKind::OutOfResources, Some("nic-tables-full"), 2),
            (ErrorKind::BadAddress, Some("bad-host-pages"), 1),
            (ErrorKind::ZeroLength, None, 1),
            (ErrorKind::Unsupported, of_export, 2),
        ]
    );
    assert!(of_export.is_some());
    assert_eq!((metrics.registrations(), metrics.all_refusals()), (0, 6));
}

/// LIFE-12
#[test]
fn registration_with_several_nics_is_counted_for_each_nic_up_to_the_failed_one() {
    let bench = bench();
    let nics = ["loop0", "loop1"].map(|nic| bench.domain(nic, P2pPolicy::Enabled));
    let both = [&nics[0], &nics[1]];
    let counts = || {
        let metrics = nics.each_ref().map(Domain::metrics);
        metrics.map(|metrics| (metrics.registrations(), metrics.all_refusals()))
    };
    let all = Batch::on(&both).add(Request::new(vec![0_u8; 64], REMOTE)).register();
    assert_eq!((all.is_ok(), counts()), (true, [(1, 0), (1, 0)]));
    bench.faults.fail_nth(NicCall::Register, 2, Errno(12));
    let failed = Batch::on(&both).add(Request::new(vec![0_u8; 64], REMOTE)).register();
    assert_eq!((failed.is_err(), counts()), (true, [(2, 0), (1, 1)]));
}

/// LIFE-12
#[test]
fn latencies_are_as_many_as_registrations_if_they_are_measured() {
    let bench = bench();
    let attr = DomainAttr { registration_latency: true, ..DomainAttr::default() };
    let domain = bench.domain_with(attr).expect("a domain");
    for _ in 0..50 {
        drop(domain.register(vec![0_u8; 64], REMOTE).expect("registered"));
    }
    domain.register(Vec::<u8>::new(), REMOTE).expect_err("no bytes");
    let latency = domain.metrics().latency.expect("measured");
    assert_eq!((latency.count(), domain.metrics().registrations()), (50, 50));
    assert_eq!(latency.buckets().map(|(_, count)| count).sum::<u64>(), 50);
    let [median, slowest] = [0.5, 1.0].map(|quantile| latency.quantile(quantile));
    assert!(median.is_some() && median <= slowest, "{latency:?}");
    let unmeasured = bench.domain("loop0", P2pPolicy::Enabled);
    drop(unmeasured.register(vec![0_u8; 64], REMOTE).expect("registered"));
    assert_eq!(unmeasured.metrics().latency, None);
}

/// LIFE-12
#[test]
fn lookups_of_the_cache_are_counted_and_only_misses_register() {
    let bench = bench();
    let cache = Some(CacheAttr::default());
    let domain = bench.domain_with(DomainAttr { cache, ..DomainAttr::default() }).expect("open");
    let cache = domain.cache().expect("a cache");
    let buffer = cache.own(bench.buffer(16 * page_size())).expect("owned");
    for round in 0..10 {
        for page in 0..4 {
            let region = buffer.get(page * page_size(), 100, Access::REMOTE_READ);
            assert!(region.is_ok(), "round {round}");
        }
    }
    let metrics = domain.metrics();
    let counted = metrics.cache.as_ref().expect("the cache was used");
    assert_eq!((counted.hits, counted.misses, counted.evictions), (36, 4, 0));
    assert_eq!(counted, &cache.statistics());
    let path = metrics.path(Path::DmaBuf);
    assert_eq!((path.registrations, metrics.registrations()), (4, 4));
    buffer.close().expect("closed");
}

/// LIFE-12
#[test]
fn counts_of_several_threads_add_up() {
    const THREADS: u64 = 4;
    const ROUNDS: u64 = 300;
    let bench = Bench::with(
        Simulated::builder(),
        Loopback::builder().nic("loop0"),
        DefaultPathSelector::new(),
    );
    let attr = DomainAttr { registration_latency: true, ..DomainAttr::default() };
    let domain = bench.domain_with(attr).expect("open");
    thread::scope(|scope| {
        for id in 0..THREADS {
            let domain = &domain;
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let len = if round % 10 == 9 { 0 } else { id + 1 };
                    let registered = domain.register(vec![0_u8; len as usize], REMOTE);
                    assert_eq!(registered.is_err(), len == 0);
                }
            });
        }
    });
    let metrics = domain.metrics();
    assert_eq!(metrics.registrations(), THREADS * ROUNDS * 9 / 10);
    assert_eq!(metrics.bytes(), (1 + 2 + 3 + 4) * ROUNDS * 9 / 10);
    assert_eq!(metrics.all_refusals(), THREADS * ROUNDS / 10);
    let latency = metrics.latency.as_ref().expect("measured");
    assert_eq!(latency.count(), metrics.registrations());
    assert_eq!(metrics.live.regions, 0);
}

/// LIFE-12
#[test]
fn asynchronous_registrations_and_their_failures_are_counted() {
    let bench = bench();
    let domain = bench.domain("loop0", P2pPolicy::Enabled);
    let events = Arc::new(EventQueue::new());
    domain.bind(&events, DomainBindFlags::REG_MR).expect("bound");
    bench.faults.fail_nth(NicCall::Register, 2, Errno(14));
    let regions = [64, 32, 16].map(|len| domain.register(vec![0_u8; len], REMOTE).expect("sent"));
    let timeout = Duration::from_secs(30);
    let ended = [(); 3].map(|()| events.wait(timeout).expect("an event").result.is_ok());
    assert_eq!(ended, [true, false, true]);
    let metrics = domain.metrics();
    assert_eq!((metrics.registrations(), metrics.bytes(), metrics.all_refusals()), (2, 80, 1));
    drop(regions);
}

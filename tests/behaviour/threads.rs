//! MR-11 and MR-16: any order of drops, and many threads at once.

use std::{
    any::Any,
    collections::BTreeSet,
    fs,
    os::unix::fs::FileExt,
    sync::{Arc, Condvar, Mutex},
    thread,
    time::Duration,
};

use hmem::{
    Access, Domain, DomainAttr, Hmem, MrFlags, MrMode, Prefault, Result, Type2Kind,
    fabric::{self, MrAttr},
    loopback::{Loopback, Progress, RemapPolicy},
    prefault,
    provider::{DomainRequest, LiveObjects, Provider, ProviderAttr, ProviderDomain},
};
use hmem_conformance::link::LinkSide;
use rustix::param::page_size;

use crate::{
    child,
    config::{EVERY_BIT, Mode, Nic, TestConfig, needs, over_configs},
    memory::{Bytes, HostPages, pattern},
    net::{LOCAL, Net, REMOTE, eventually, mr_attr, nic_name, open_endpoint, open_side, remote},
};

over_configs! {
    /// MR-11
    any_order_of_drops_leaves_nothing: Single, needs::SYSTEM;
    /// MR-11
    closing_a_domain_lists_its_live_objects: Single;
    /// MR-16
    threads_register_transfer_and_close_concurrently: DefaultMode;
    /// MR-16
    registration_in_the_driver_blocks_no_other_call: Pairwise;
    /// MR-16
    registering_prefaults_on_request_and_reports_progress: Single, needs::SYSTEM;
}

/// A provider that keeps every domain that it opens alive, so that a test can count the objects
/// left after all drops.
#[derive(Debug)]
struct Watched {
    provider: Arc<dyn Provider>,
    opened: Mutex<Vec<Arc<dyn ProviderDomain>>>,
}

impl Provider for Watched {
    fn name(&self) -> &str {
        self.provider.name()
    }

    fn nics(&self) -> Result<Vec<ProviderAttr>> {
        self.provider.nics()
    }

    fn open_domain(&self, request: &DomainRequest) -> Result<Arc<dyn ProviderDomain>> {
        let domain = self.provider.open_domain(request)?;
        self.opened.lock().expect("not poisoned").push(Arc::clone(&domain));
        Ok(domain)
    }
}

/// Returns all permutations of `items` items, by Heap's algorithm.
fn orders(items: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<_> = (0..items).collect();
    let mut counts = vec![0; items];
    let mut all = vec![order.clone()];
    let mut at = 0;
    while at < items {
        if counts[at] < at {
            order.swap(if at % 2 == 0 { 0 } else { counts[at] }, at);
            all.push(order.clone());
            counts[at] += 1;
            at = 0;
        } else {
            counts[at] = 0;
            at += 1;
        }
    }
    all
}

/// Returns one object of each kind, with a transfer in flight; a sub-region only if `subs` is true.
/// A test drops the objects in any order.
fn objects(provider: &Arc<Watched>, config: &TestConfig, subs: bool) -> Vec<Option<Box<dyn Any>>> {
    let builder = Hmem::builder().without_vendor_ifaces();
    let hmem =
        builder.shared_provider(Arc::clone(provider) as Arc<dyn Provider>).build().expect("build");
    let attr = DomainAttr { mr_mode: EVERY_BIT, nic: nic_name(config), ..DomainAttr::default() };
    let LinkSide { endpoint, cq, domain, .. } = open_side(&hmem, config, attr, true, None);
    let memory = Bytes::Host(HostPages::new(4096));
    let ranges = [memory.range()];
    let attr = mr_attr(&ranges, REMOTE | LOCAL | Access::MW_BIND).key(1);
    let region = fabric::regattr(&domain, &attr, MrFlags::empty()).expect("register");
    let sub = subs.then(|| region.sub(memory.part(64, 64), REMOTE, 2).expect("sub-region"));
    let window = domain.alloc_type_1_window().expect("window");
    if config.has(MrMode::ENDPOINT) {
        for region in std::iter::once(&region).chain(&sub) {
            region.bind_endpoint(&endpoint).expect("bind");
            region.enable().expect("enable");
        }
    }
    window.bind(&region, 0, 32, REMOTE).expect("bind");
    let peer = endpoint.resolve(&endpoint.name()).expect("itself");
    let key = region.key().expect("key");
    let local = crate::net::segment(memory.part(1024, 64), Some(region.desc().expect("desc")));
    let remote = [remote(&key, 0, 64)];
    let operation = hmem::transfer::Operation::Write { remote: &remote };
    let request = hmem::transfer::WorkRequest { operation, local: &[local], peer, context: 1 };
    // SAFETY: the memory is leaked below.
    unsafe { endpoint.post(&request) }.expect("post");
    // The memory is leaked, so that it outlives the region in every order.
    std::mem::forget(memory);
    let mut objects: Vec<Option<Box<dyn Any>>> = vec![
        Some(Box::new(endpoint)),
        Some(Box::new(region)),
        Some(Box::new(window)),
        Some(Box::new((domain, cq))),
        Some(Box::new(hmem)),
    ];
    objects.extend(sub.map(|sub| Some(Box::new(sub) as Box<dyn Any>)));
    objects
}

fn threads_of_this_process() -> usize {
    fs::read_dir("/proc/self/task").expect("procfs").count()
}

fn every_order(config: &TestConfig, subs: bool, provider: impl Fn() -> Arc<dyn Provider>) {
    let (fds, threads) = (child::open_fds(), threads_of_this_process());
    for order in orders(if subs { 6 } else { 5 }) {
        let provider = Arc::new(Watched { provider: provider(), opened: Mutex::default() });
        let mut objects = objects(&provider, config, subs);
        for at in &order {
            drop(objects[*at].take());
        }
        let opened = std::mem::take(&mut *provider.opened.lock().expect("not poisoned"));
        drop(provider);
        let live: Vec<_> = opened.iter().map(|domain| domain.live()).collect();
        assert_eq!(live, [LiveObjects::default()], "left after dropping in the order {order:?}");
    }
    eventually("the end of every thread", || threads_of_this_process() == threads);
    assert_eq!(child::open_fds(), fds);
}

fn every_order_on_loopback(progress: Progress, mode: MrMode) {
    let config =
        TestConfig::PLAIN.with_mode(Mode { name: "of the test", offered: EVERY_BIT, needed: mode });
    every_order(&config, true, || {
        Arc::new(Loopback::builder().progress(progress).needs(mode).build().expect("build"))
    });
}

/// The dropped objects include no sub-regions, which not every NIC supports.
fn any_order_of_drops_leaves_nothing(config: &TestConfig) {
    child::alone_in(config, "threads::over_configs::any_order_of_drops_leaves_nothing", || {
        every_order(config, false, || match config.nic {
            Nic::Loopback => Arc::new(Loopback::builder().build().expect("build")),
            Nic::Verbs { .. } => crate::net::verbs(),
        });
    });
}

/// MR-11
#[test]
fn any_order_of_drops_leaves_nothing_with_manual_progress() {
    child::alone("threads::any_order_of_drops_leaves_nothing_with_manual_progress", || {
        every_order_on_loopback(Progress::ByHand, MrMode::empty());
    });
}

/// MR-11
#[test]
fn any_order_of_drops_leaves_nothing_with_a_progress_thread() {
    child::alone("threads::any_order_of_drops_leaves_nothing_with_a_progress_thread", || {
        every_order_on_loopback(Progress::Thread, MrMode::empty());
    });
}

/// MR-11
#[test]
fn any_order_of_drops_of_bound_regions_leaves_nothing() {
    child::alone("threads::any_order_of_drops_of_bound_regions_leaves_nothing", || {
        every_order_on_loopback(Progress::ByHand, MrMode::ENDPOINT);
        every_order_on_loopback(Progress::Thread, MrMode::ENDPOINT);
    });
}

fn closing_a_domain_lists_its_live_objects(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(64);
    let region = net.expose(memory.range(), REMOTE);
    let window = net.target.domain.alloc_type_2_window(Type2Kind::B).expect("window");
    let close = |domain: Domain, expected: [&str; 3]| -> Domain {
        let rejected = domain.close().expect_err("closed with something left");
        assert_eq!(rejected.error.kind(), hmem::ErrorKind::Busy);
        let said = ["regions", "windows", "endpoints"]
            .map(|what| rejected.error.context_value(what).unwrap());
        assert_eq!(said, expected);
        rejected.value
    };
    let [_initiator, target] = net.link.into_sides();
    let domain = close(target.domain, ["1", "1", "1"]);
    drop(region);
    let domain = close(domain, ["0", "1", "1"]);
    drop(window);
    let domain = close(domain, ["0", "0", "1"]);
    target.endpoint.close().expect("close the endpoint");
    domain.close().expect("nothing is left");
}

fn threads_register_transfer_and_close_concurrently(config: &TestConfig) {
    const THREADS: u64 = 3;
    const KEPT: u64 = 150;
    let net = Net::open(config);
    let before = net.live();
    let work = |thread: u64| {
        // A verbs endpoint has only one peer, so each thread opens an endpoint pair of its own.
        let (listening, _cq) =
            open_endpoint(&net.target.domain, true, None).expect("open an endpoint");
        let (endpoint, cq) =
            open_endpoint(&net.initiator.domain, true, None).expect("open an endpoint");
        let peer = endpoint.resolve(&listening.name()).expect("resolve");
        let (memory, local) = (net.bytes(KEPT as usize * 64), net.local(4096, LOCAL));
        let mut kept = Vec::new();
        let mut out = Vec::new();
        for round in 0..2 * KEPT {
            let slot = round % KEPT;
            let region = net.expose(memory.part(slot * 64, 64), REMOTE);
            let key = region.key().expect("key");
            let bytes = pattern(thread * 1000 + round, 64);
            local.bytes.put(0, &bytes);
            let (to, from) = ([remote(&key, 0, 64)], [local.segment(0, 64)]);
            let operation = hmem::transfer::Operation::Write { remote: &to };
            let request =
                hmem::transfer::WorkRequest { operation, local: &from, peer, context: round };
            // SAFETY: the local memory outlives the transfer.
            unsafe { endpoint.post(&request) }.expect("post");
            eventually("the completion", || {
                net.target.domain.progress().expect("progress");
                cq.read(&mut out, 1).expect("read") == 1
            });
            let completion = out.remove(0);
            assert_eq!((completion.context, completion.result.expect("write")), (round, 64));
            assert_eq!(memory.get(slot * 64, 64), bytes, "thread {thread}, round {round}");
            if round % 2 == 0 || round >= KEPT {
                region.close().expect("close");
            } else {
                kept.push((region, key));
            }
        }
        kept.len() as u64
    };
    let kept: u64 = thread::scope(|scope| {
        let workers: Vec<_> =
            (0..THREADS).map(|thread| scope.spawn(move || work(thread))).collect();
        workers.into_iter().map(|worker| worker.join().expect("a worker")).sum()
    });
    assert_eq!(kept, THREADS * KEPT / 2);
    assert_eq!(net.live().regions, before.regions, "regions that the threads kept outlived them");
}

fn registration_in_the_driver_blocks_no_other_call(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(8192);
    let warm = net.expose(memory.range(), REMOTE);
    net.assert_works(&net.key(&warm));
    thread::scope(|scope| {
        // `gate` is declared inside the scope. If an assertion fails, dropping it releases the
        // registration that it holds, so that the scope does not wait forever.
        let gate = net.hold_registration();
        let slow = scope.spawn(|| net.expose(memory.part(4096, 4096), REMOTE));
        gate.wait();
        // Runs on its own thread, so that a blocked registration fails the test instead of hanging
        // it.
        let other = scope.spawn(|| {
            let region = net.expose(memory.part(0, 4096), REMOTE);
            net.assert_works(&net.key(&region));
            region.close().expect("close");
        });
        eventually("the other registration", || other.is_finished());
        other.join().expect("the other registration");
        assert!(gate.is_holding() && !slow.is_finished());
        gate.release();
        net.assert_works(&net.key(&slow.join().expect("the slow registration")));
    });
}

/// Returns the number of pages of `pages` that are resident.
fn present(pages: &HostPages) -> usize {
    let (page, range) = (page_size(), pages.range());
    let (start, len) = (range.start().0 / page as u64, range.len() as usize / page);
    let mut entries = vec![0u8; len * 8];
    fs::File::open("/proc/self/pagemap")
        .and_then(|map| map.read_exact_at(&mut entries, start * 8))
        .expect("pagemap");
    entries.chunks(8).filter(|entry| entry[7] & 0x80 != 0).count()
}

/// MR-16
#[test]
fn huge_range_is_prefaulted_in_parallel_and_reports_progress() {
    const LEN: usize = 96 << 20;
    let pages = HostPages::new(LEN);
    assert_eq!(present(&pages), 0);
    let (seen, arrived) = (Mutex::new((BTreeSet::new(), Vec::new())), Condvar::new());
    // Each chunk waits until two threads have reported. A single thread would time out.
    let progress = |done: u64, all: u64| {
        let mut seen = seen.lock().expect("not poisoned");
        seen.0.insert(format!("{:?}", thread::current().id()));
        seen.1.push((done, all));
        arrived.notify_all();
        let waited =
            arrived.wait_timeout_while(seen, Duration::from_secs(60), |seen| seen.0.len() < 2);
        assert!(!waited.expect("not poisoned").1.timed_out(), "one thread touches all pages");
    };
    prefault(pages.range(), true, &Prefault { threads: 2, progress: Some(&progress) })
        .expect("prefault");
    let (_, mut reports) = seen.into_inner().expect("not poisoned");
    reports.sort_unstable();
    assert_eq!(reports.last(), Some(&(LEN as u64, LEN as u64)));
    assert!(reports.windows(2).all(|pair| pair[0].0 < pair[1].0), "progress goes up: {reports:?}");
    assert_eq!(present(&pages), LEN / page_size());
}

fn registering_prefaults_on_request_and_reports_progress(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(1 << 20);
    let ranges = [memory.range()];
    let reports = Mutex::new(Vec::new());
    let progress = |done: u64, all: u64| reports.lock().expect("not poisoned").push((done, all));
    let attr = mr_attr(&ranges, REMOTE);
    let untouched = net.try_expose(&attr, MrFlags::empty()).expect("register");
    if config.pages == RemapPolicy::Follow {
        assert_eq!(present(memory.pages()), 0, "nobody asked for pages");
    }
    let prefault = Some(Prefault { threads: 0, progress: Some(&progress) });
    let touched = net.try_expose(&MrAttr { prefault, ..attr }, MrFlags::empty()).expect("register");
    assert_eq!(present(memory.pages()), (1 << 20) / page_size());
    assert_eq!(reports.lock().expect("not poisoned").last(), Some(&(1 << 20, 1 << 20)));
    drop((untouched, touched));
    memory.pages().remove_pages(0, memory.range().len());
    let before = net.live();
    net.try_expose(&MrAttr { prefault, ..attr }, MrFlags::empty())
        .expect_err("pages that cannot be allocated");
    assert_eq!(net.live(), before);
}

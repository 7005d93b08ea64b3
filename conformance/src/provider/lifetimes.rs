//! Behaviours of objects that end in any order, and of several threads.

#![allow(unsafe_code, reason = "posts requests by address")]

use std::{
    any::Any,
    fs, mem,
    sync::{Arc, Mutex},
    thread,
};

use hmem_core::{
    Access, Domain, ErrorKind, MrFlags, MrMode, Result,
    provider::{
        DomainRequest, Features, LiveObjects, Provider, ProviderAttr, ProviderDomain, WindowType,
    },
    transfer::{Operation, WorkRequest},
};

use super::{case::Case, link::CaseLink};
use crate::{
    bytes::{assert_bytes, pattern},
    control::Call,
    link::{
        Bytes, HostPages, LOCAL, LinkSide, REMOTE, eventually, mr_attr, open_endpoint, remote,
        segment, wait_held,
    },
};

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

/// Returns one object of each kind that the provider has, with a transfer in flight. A test drops
/// the objects in any order.
fn objects(case: &Case) -> Vec<Option<Box<dyn Any>>> {
    let [_initiator, target] = CaseLink::open(case).into_sides();
    // An endpoint may have only one peer. The peer of the target's endpoint is the initiator.
    let target = LinkSide::open(target.domain, true, None).expect("an endpoint");
    let LinkSide { endpoint, domain, .. } = &target;
    let memory = Bytes::Host(HostPages::new(4096));
    memory.put(0, &[0; 4096]);
    let windows = case.window_types.contains(&WindowType::One);
    let mut access = REMOTE | LOCAL;
    access.set(Access::MW_BIND, windows);
    let ranges = [memory.range()];
    let attr = mr_attr(&ranges, access).key(target.fresh_key());
    let region = target.regattr(&attr, MrFlags::empty()).expect("register");
    let mut objects: Vec<Box<dyn Any>> = Vec::new();
    if case.features.contains(Features::SUB_REGIONS) {
        let sub = region.sub(memory.part(64, 64), REMOTE, target.fresh_key()).expect("sub-region");
        target.make_usable(&sub);
        objects.push(Box::new(sub));
    }
    if windows {
        let window = domain.alloc_type_1_window().expect("window");
        window.bind(&region, 0, 32, REMOTE).expect("bind");
        objects.push(Box::new(window));
    }
    let peer = endpoint.resolve(&endpoint.name()).expect("itself");
    let key = region.key().expect("key");
    let local = segment(memory.part(1024, 64), Some(region.desc().expect("descriptor")));
    let remote = [remote(&key, 0, 64)];
    let operation = Operation::Write { remote: &remote };
    let request = WorkRequest { operation, local: &[local], peer, context: 1 };
    // SAFETY: the memory is leaked below.
    unsafe { endpoint.post(&request) }.expect("post");
    // The memory outlives the region in every order.
    mem::forget(memory);
    let LinkSide { endpoint, cq, domain, .. } = target;
    objects.push(Box::new(endpoint));
    objects.push(Box::new(region));
    objects.push(Box::new((domain, cq)));
    objects.into_iter().map(Some).collect()
}

/// Returns the number of threads that the library started, which have names that begin with
/// `hmem-`.
fn threads() -> usize {
    let tasks = fs::read_dir("/proc/self/task").expect("list /proc/self/task").flatten();
    let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.starts_with("hmem-")).count()
}

pub(super) fn any_order_of_drops_leaves_nothing_live(case: &Case) {
    let threads_before = threads();
    let kinds = objects(case).len();
    for order in orders(kinds) {
        let provider = Arc::clone(&case.provider);
        let watched = Arc::new(Watched { provider, opened: Mutex::default() });
        let case = Case { provider: Arc::clone(&watched) as Arc<dyn Provider>, ..case.clone() };
        let mut objects = objects(&case);
        for at in &order {
            drop(objects[*at].take());
        }
        for domain in watched.opened.lock().expect("not poisoned").iter() {
            assert_eq!(domain.live(), LiveObjects::default(), "left after drops as in {order:?}");
        }
    }
    eventually("the end of every thread", || threads() <= threads_before);
}

pub(super) fn close_of_a_domain_counts_its_live_objects(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.bytes(64);
    let region = link.expose(memory.range(), REMOTE);
    let window = case
        .window_types
        .contains(&WindowType::One)
        .then(|| link.target.domain.alloc_type_1_window().expect("window"));
    let windows = if window.is_some() { "1" } else { "0" };
    let close = |domain: Domain, expected: [&str; 3]| -> Domain {
        let rejected = domain.close().expect_err("closed with something left");
        assert_eq!(rejected.error.kind(), ErrorKind::Busy);
        let counts = ["regions", "windows", "endpoints"]
            .map(|objects| rejected.error.context_value(objects).expect("a number"));
        assert_eq!(counts, expected);
        rejected.value
    };
    let [_initiator, target] = link.into_sides();
    let domain = close(target.domain, ["1", windows, "1"]);
    drop(region);
    let domain = close(domain, ["0", windows, "1"]);
    drop(window);
    let domain = close(domain, ["0", "0", "1"]);
    target.endpoint.close().expect("close the endpoint");
    drop(target.cq);
    domain.close().expect("nothing is left");
}

pub(super) fn threads_register_transfer_and_close_at_once(case: &Case) {
    const THREADS: u64 = 4;
    const KEPT: u64 = 32;
    let link = CaseLink::open(case);
    let idle = link.live();
    // A region that is bound to the link's endpoint refuses the endpoints of the threads.
    let moves = !case.has(MrMode::RAW) && !case.has(MrMode::ENDPOINT);
    let work = |thread: u64| {
        // An endpoint may have only one peer, so each thread opens a pair of its own.
        let (there, _cq) = open_endpoint(&link.target.domain, true, None).expect("an endpoint");
        let (here, cq) = open_endpoint(&link.initiator.domain, true, None).expect("an endpoint");
        let peer = here.resolve(&there.name()).expect("resolve");
        let (memory, local) = (link.bytes(KEPT as usize * 64), link.local(64, LOCAL));
        let (mut kept, mut done) = (Vec::new(), Vec::new());
        for round in 0..2 * KEPT {
            let at = round % KEPT * 64;
            let region = link.expose(memory.part(at, 64), REMOTE);
            if moves {
                let key = region.key().expect("key");
                let bytes = pattern(thread * 1000 + round, 64);
                local.bytes.put(0, &bytes);
                let (to, from) = ([remote(&key, 0, 64)], [local.segment(0, 64)]);
                let operation = Operation::Write { remote: &to };
                let request = WorkRequest { operation, local: &from, peer, context: round };
                // SAFETY: the local memory outlives the transfer.
                unsafe { here.post(&request) }.expect("post");
                eventually("the completion", || {
                    link.target.domain.progress().expect("progress");
                    cq.read(&mut done, 1).expect("read") == 1
                });
                let completion = done.remove(0);
                assert_eq!((completion.context, completion.result.expect("write")), (round, 64));
                let what = format!("bytes of thread {thread} in round {round}");
                assert_bytes(&memory.get(at, 64), &bytes, &what);
            }
            if round % 2 == 0 || round >= KEPT {
                region.close().expect("close");
            } else {
                kept.push(region);
            }
        }
        assert_eq!(kept.len() as u64, KEPT / 2);
    };
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let work = &work;
            scope.spawn(move || work(thread));
        }
    });
    assert_eq!(link.live(), idle, "something is left of the threads' objects");
    let region = link.target.register(pattern(1, 4096), REMOTE);
    link.assert_works(&link.key(&region));
}

pub(super) fn registration_in_the_driver_blocks_no_other_call(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.bytes(8192);
    let warm = link.expose(memory.range(), REMOTE);
    link.assert_works(&link.key(&warm));
    thread::scope(|scope| {
        // Dropped before the scope ends, so that a failure releases the held call.
        let gate = link.hold(Call::Register);
        let slow = scope.spawn(|| link.expose(memory.part(4096, 4096), REMOTE));
        wait_held(&gate);
        // Runs on its own thread, so that a blocked call fails the test instead of hanging it.
        let other = scope.spawn(|| {
            let region = link.expose(memory.part(0, 4096), REMOTE);
            link.assert_works(&link.key(&region));
            region.close().expect("close");
        });
        eventually("the other registration", || other.is_finished());
        other.join().expect("the other registration");
        assert!(gate.is_holding() && !slow.is_finished());
        gate.release();
        link.assert_works(&link.key(&slow.join().expect("the slow registration")));
    });
}

//! Lifetimes of objects that depend on each other, over a fake library that moves bytes: failed
//! closes, late completions, binds that never complete, windows and their queue pairs.

use std::{
    sync::{Arc, LazyLock, atomic::Ordering},
    time::Duration,
};

use crate::looped::Looped;
use crate::wire::{Gate, Misbehaviour, misbehave};
use crate::{fake, wire};
use hmem_core::{
    Access, Address, AddressRange, Addressing, AuthKey, Domain, Error, ErrorKind, GrantKind, Iova,
    Promise, Raw, RawKey, Region, RemoteKey, Result, Type2Bind, Type2Kind, Type2Window,
    provider::{
        CompletionQueue, EndpointAttr, ProviderDomain, Transport, WindowBind, WindowState,
        WindowType, Windows,
    },
    transfer::{Completion, Operation, RemoteSegment, WorkRequest},
};
use hmem_provider_verbs::{
    Verbs, VerbsDomain, VerbsMr, VerbsOptions,
    sys::{Functions, WcStatus},
};

const LOCAL: Access = Access::READ.union(Access::WRITE).union(Access::SEND).union(Access::RECV);
const FINE: Misbehaviour = Misbehaviour {
    refuses_destruction: 0,
    polls_fail: false,
    hangs: false,
    refuses_resets: 0,
    fails_during_reset: false,
    flushes_at_reset: false,
    completes_late: false,
    refuses_channels: 0,
    channels_fail: 0,
    has_no_channels: false,
    is_rxe: false,
    bind: Some(WcStatus::IBV_WC_SUCCESS),
    local_key: None,
    bind_gate: None,
    refuses_frees: 0,
    needs_route: false,
};

fn open() -> Domain {
    open_over(wire::functions())
}

fn open_rxe() -> Domain {
    let functions = wire::functions();
    misbehave(Misbehaviour { is_rxe: true, ..FINE });
    open_over(functions)
}

fn open_over(functions: Functions) -> Domain {
    open_with(functions, Duration::ZERO)
}

fn open_with(functions: Functions, bind_timeout: Duration) -> Domain {
    let builder = Verbs::builder().functions(functions);
    let builder = builder.options(VerbsOptions::MW_BIND).bind_timeout(bind_timeout);
    fake::open(&builder.build().expect("start"))
}

fn endpoint(domain: &Domain, cq: &Arc<dyn CompletionQueue>) -> Looped {
    Looped::open(domain, &EndpointAttr::new(cq))
}

/// Opens a completion queue with an endpoint.
fn side(domain: &Domain) -> (Arc<dyn CompletionQueue>, Looped) {
    let cq = domain.open_cq(8).expect("open a queue");
    let endpoint = endpoint(domain, &cq);
    (cq, endpoint)
}

fn buffer(domain: &Domain, byte: u8) -> Region<Vec<u8>> {
    let access = LOCAL | Access::REMOTE_READ | Access::REMOTE_WRITE;
    domain.register(vec![byte; 1024], access).map_err(|rejected| rejected.error).expect("register")
}

fn write(endpoint: &Looped, from: &Region<Vec<u8>>, to: &Region<Vec<u8>>, context: u64) {
    try_write(endpoint, from, to, context).expect("post");
}

fn try_write(
    endpoint: &Looped,
    from: &Region<Vec<u8>>,
    to: &Region<Vec<u8>>,
    context: u64,
) -> Result<()> {
    let key = to.key().expect("key");
    let remote = [RemoteSegment { address: key.base(), len: 1024, key: &key }];
    let from = [from.slice(0, 1024).expect("slice")];
    endpoint.write(&from, &remote, endpoint.peer, context)
}

fn read(cq: &Arc<dyn CompletionQueue>) -> Vec<Completion> {
    let mut out = Vec::new();
    cq.read(&mut out, 1).expect("read completions");
    out
}

/// Returns the context of a completion, with its number of bytes or the kind of its error.
fn outcome(ended: Completion) -> (u64, Result<u64, ErrorKind>) {
    (ended.context, ended.result.map_err(|error| error.kind()))
}

fn calls_about(words: &[&str]) -> Vec<String> {
    let calls = fake::calls().into_iter();
    calls.filter(|call| words.iter().any(|word| call.starts_with(word))).collect()
}

/// MR-11
#[test]
fn endpoint_with_a_failed_close_is_destroyed_before_its_queues() {
    let domain = open();
    let (cq, endpoint) = side(&domain);
    misbehave(Misbehaviour { polls_fail: true, ..FINE });
    let rejected = endpoint.close().expect_err("the completion queue cannot be read");
    assert_eq!(rejected.error.kind(), ErrorKind::Driver, "{}", rejected.error);
    assert_eq!(domain.live().endpoints, 1, "the endpoint is returned");
    drop((cq, domain));
    fake::calls();
    drop(rejected.value);
    let gone = calls_about(&["destroy", "dealloc"]);
    assert_eq!(gone, ["destroy_qp", "destroy_cq", "destroy_comp_channel", "dealloc_pd"]);
}

/// MR-05: the NIC may use the memory of requests as long as the driver has their queue pair.
#[test]
fn requests_of_a_closed_endpoint_end_only_once_its_queue_pair_is_destroyed() {
    let domain = open();
    let (cq, endpoint) = side(&domain);
    let region = buffer(&domain, 0);
    endpoint.receive(&[region.slice(0, 8).expect("slice")], None, 1).expect("receive");
    misbehave(Misbehaviour { refuses_destruction: libc::EBUSY, ..FINE });
    let rejected = endpoint.close().expect_err("the driver keeps the queue pair");
    let errno = rejected.error.os_errno().map(|errno| errno.0);
    assert_eq!(errno, Some(libc::EBUSY), "{}", rejected.error);
    assert_eq!(domain.live().endpoints, 1, "the endpoint is returned");
    assert!(read(&cq).is_empty(), "the NIC may still write to the memory");
    misbehave(FINE);
    rejected.value.close().map_err(|rejected| rejected.error).expect("close");
    assert_eq!(outcome(read(&cq).remove(0)), (1, Err(ErrorKind::Canceled)));
    assert_eq!(domain.live().endpoints, 0);
}

/// MR-05
#[test]
fn dropped_endpoint_leaks_a_queue_pair_that_cannot_be_destroyed_with_its_domain() {
    let domain = open();
    let (cq, endpoint) = side(&domain);
    let region = buffer(&domain, 0);
    endpoint.receive(&[region.slice(0, 8).expect("slice")], None, 1).expect("receive");
    misbehave(Misbehaviour { refuses_destruction: libc::EIO, ..FINE });
    drop(endpoint);
    assert!(read(&cq).is_empty(), "the NIC may still write to the memory");
    misbehave(FINE);
    fake::calls();
    drop((region, cq, domain));
    assert_eq!(calls_about(&["destroy", "dealloc", "close"]), <[&str; 0]>::default());
}

/// KEY-08
#[test]
fn endpoint_with_an_authorization_key_is_refused() {
    let domain = open();
    let cq = domain.open_cq(8).expect("open a queue");
    let with = |key| EndpointAttr { auth_key: Some(AuthKey(key)), ..EndpointAttr::new(&cq) };
    let error = domain.open_endpoint(&with(vec![1])).expect_err("verbs has no such keys");
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("authorization keys"), "{error}");
    assert_eq!(domain.live().endpoints, 0);
    domain.open_endpoint(&with(Vec::new())).expect("an empty key counts as no key");
}

/// MW-03
#[test]
fn dropped_endpoint_frees_its_bound_type_2a_window() {
    let domain = open();
    let (cq, endpoint) = side(&domain);
    let region = buffer(&domain, 1);
    let window = bound(Type2Kind::A, (&domain, &cq, &endpoint), &region);
    let rejected = endpoint.close().expect_err("a window of type 2A is bound through it");
    assert_eq!(rejected.error.kind(), ErrorKind::Busy, "{}", rejected.error);
    fake::calls();
    drop(rejected.value);
    assert_eq!(calls_about(&["destroy", "dealloc"]), ["dealloc_mw", "destroy_qp"]);
    assert_eq!(domain.live().endpoints, 0);
    assert_eq!(window.state(), WindowState::Free, "the window was allocated again");
    drop(window);
    assert_eq!(calls_about(&["dealloc"]), ["dealloc_mw"]);
}

/// Ends the connection of an endpoint by posting a write to an unknown key.
fn break_connection(endpoint: &Looped, cq: &Arc<dyn CompletionQueue>, from: &Region<Vec<u8>>) {
    let key = RemoteKey::new(Addressing::Virtual, Iova(0), 8, 1);
    let remote = [RemoteSegment { address: Iova(0), len: 8, key: &key }];
    endpoint.write(&[from.slice(0, 8).expect("slice")], &remote, endpoint.peer, 9).expect("post");
    let error = read(cq).remove(0).result.expect_err("no region has this key");
    assert_eq!(error.kind(), ErrorKind::AccessDenied, "{error}");
}

#[test]
fn endpoint_connects_again_after_its_pair_fails_during_the_reset() {
    let domain = open();
    misbehave(FINE);
    let (cq, endpoint) = side(&domain);
    let (from, to) = (buffer(&domain, 5), buffer(&domain, 0));
    break_connection(&endpoint, &cq, &from);
    misbehave(Misbehaviour { fails_during_reset: true, ..FINE });
    endpoint.resolve(&endpoint.name()).expect("connect again");
    write(&endpoint, &from, &to, 7);
    let done = read(&cq).remove(0);
    assert_eq!((done.context, done.result.expect("write")), (7, 1024));
}

#[test]
fn requests_that_ended_before_a_reset_keep_their_results() {
    let domain = open();
    let [cq, other] = [8, 8].map(|depth| domain.open_cq(depth).expect("open a queue"));
    let endpoint = endpoint(&domain, &cq);
    let (from, to) = (buffer(&domain, 5), buffer(&domain, 0));
    write(&endpoint, &from, &to, 1);
    endpoint.receive(&[to.slice(0, 8).expect("slice")], None, 2).expect("post a receive");
    endpoint
        .send(&[from.slice(0, 8).expect("slice")], None, endpoint.peer, 3)
        .expect("post a send");
    let key = RemoteKey::new(Addressing::Virtual, Iova(0), 8, 1);
    let remote = [RemoteSegment { address: Iova(0), len: 8, key: &key }];
    endpoint.write(&[from.slice(0, 8).expect("slice")], &remote, endpoint.peer, 4).expect("post");
    // Each read of the other queue lets the device run one request.
    for _ in 0..3 {
        assert!(read(&other).is_empty());
    }
    write(&endpoint, &from, &to, 5);
    endpoint.resolve(&endpoint.name()).expect("connect again");
    let mut ended = Vec::new();
    cq.read(&mut ended, 8).expect("read completions");
    let ended: Vec<_> = ended.into_iter().map(outcome).collect();
    let (denied, canceled) = (Err(ErrorKind::AccessDenied), Err(ErrorKind::Canceled));
    assert_eq!(ended, [(1, Ok(1024)), (2, Ok(8)), (3, Ok(8)), (4, denied), (5, canceled)]);
}

#[test]
fn late_completion_of_a_reset_connection_does_not_end_the_next_connection() {
    let domain = open();
    let (cq, endpoint) = side(&domain);
    let (from, to) = (buffer(&domain, 5), buffer(&domain, 0));
    misbehave(Misbehaviour { hangs: true, flushes_at_reset: true, ..FINE });
    write(&endpoint, &from, &to, 1);
    endpoint.receive(&[to.slice(0, 8).expect("slice")], None, 2).expect("post a receive");
    wire::fail_last_pair();
    endpoint.resolve(&endpoint.name()).expect("connect again");
    let name = endpoint.name();
    misbehave(FINE);
    // The new requests reuse the slots of the old requests.
    write(&endpoint, &from, &to, 3);
    write(&endpoint, &from, &to, 4);
    let mut ended = Vec::new();
    for _ in 0..8 {
        cq.read(&mut ended, 8).expect("read completions");
    }
    let ended: Vec<_> = ended.into_iter().map(outcome).collect();
    let canceled = Err(ErrorKind::Canceled);
    assert_eq!(ended, [(1, canceled), (2, canceled), (3, Ok(1024)), (4, Ok(1024))]);
    assert_eq!(endpoint.name(), name, "the new connection has not failed");
}

/// MW-03
#[test]
fn queue_pair_with_a_bound_type_2a_window_is_not_reset() {
    let domain = open();
    let (cq, endpoint) = side(&domain);
    let region = buffer(&domain, 1);
    let window = bound(Type2Kind::A, (&domain, &cq, &endpoint), &region);
    break_connection(&endpoint, &cq, &region);
    let error =
        endpoint.resolve(&endpoint.name()).expect_err("connecting again resets the queue pair");
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert_eq!(error.context_value("rule"), Some("type-2a-holds-queue-pair"), "{error}");
    drop(window);
    endpoint.resolve(&endpoint.name()).expect("nothing is bound");

    let window = bound(Type2Kind::B, (&domain, &cq, &endpoint), &region);
    break_connection(&endpoint, &cq, &region);
    endpoint.resolve(&endpoint.name()).expect("a type 2B window allows a reset");
    assert_eq!(window.state(), WindowState::Valid);
}

/// MW-04: the state of a window changes when the application reads the completion of a bind or
/// invalidation.
#[test]
fn window_state_changes_when_its_completions_are_read() {
    let domain = open();
    let (cq, endpoint) = side(&domain);
    let region = buffer(&domain, 1);
    let window = domain.alloc_type_2_window(Type2Kind::B).expect("allocate");
    assert_eq!(window.state(), WindowState::Free);
    bind(&window, &endpoint, &region).expect("post the bind");
    assert_eq!(window.state(), WindowState::Free, "the bind has not completed");
    let again = bind(&window, &endpoint, &region).expect_err("an earlier bind is in flight");
    assert_eq!(again.context_value("rule"), Some("binds-when-free"), "{again}");
    read(&cq).remove(0).result.expect("bind");
    assert_eq!(window.state(), WindowState::Valid);
    window.post_invalidate(&endpoint, 2).expect("post the invalidation");
    // The bind follows the invalidation in the same send queue.
    bind(&window, &endpoint, &region).expect("post the next bind");
    for _ in 0..2 {
        read(&cq).remove(0).result.expect("invalidate, then bind");
    }
    assert_eq!(window.state(), WindowState::Valid);
    // On a failed connection, the bind completes with the status "flushed", and the window stays
    // free.
    window.post_invalidate(&endpoint, 3).expect("post the invalidation");
    read(&cq).remove(0).result.expect("invalidate");
    break_connection(&endpoint, &cq, &region);
    bind(&window, &endpoint, &region).expect("post a bind that fails");
    read(&cq).remove(0).result.expect_err("the connection is down");
    assert_eq!((window.state(), window.key()), (WindowState::Free, None));
    region.close().map_err(|rejected| rejected.error).expect("nothing is bound to it");
}

/// MW-04
#[test]
fn window_stays_bound_after_a_failed_invalidation() {
    let domain = open_rxe();
    let (cq, endpoint) = side(&domain);
    let (first, other) = (buffer(&domain, 1), buffer(&domain, 2));
    let window = domain.alloc_type_2_window(Type2Kind::B).expect("allocate");
    let key = bind(&window, &endpoint, &first).expect("post the bind");
    read(&cq).remove(0).result.expect("bind");
    break_connection(&endpoint, &cq, &first);
    for binds_behind_it in [false, true] {
        // On rxe, the provider refuses to invalidate a window that is not bound.
        window.post_invalidate(&endpoint, 2).expect("the window is bound");
        if binds_behind_it {
            let (access, addressing) = (Access::REMOTE_READ, Addressing::Virtual);
            let region = &other;
            let bind = Type2Bind { region, offset: 0, len: 32, access, addressing, tag: 8 };
            window.post_bind(&endpoint, &bind, 3).expect("post a bind");
            read(&cq).remove(0).result.expect_err("the connection is down");
        }
        read(&cq).remove(0).result.expect_err("the connection is down");
        assert_eq!(window.state(), WindowState::Valid);
        let now = window.key().expect("it is bound");
        assert_eq!(now.base(), key.base(), "the region of the bind that is in force");
        assert_eq!(now.as_u64().expect("one key"), key.as_u64().expect("one key"));
    }
    endpoint.resolve(&endpoint.name()).expect("connect again");
    window.post_invalidate(&endpoint, 4).expect("the window is bound");
    read(&cq).remove(0).result.expect("invalidate");
    assert_eq!(window.state(), WindowState::Free);
    for region in [first, other] {
        region.close().map_err(|rejected| rejected.error).expect("nothing is bound to it");
    }
}

/// MW-03
#[test]
fn rebound_window_is_freed_before_its_queue_pair() {
    let domain = open();
    let (cq, endpoint) = side(&domain);
    let region = buffer(&domain, 1);
    let window = bound(Type2Kind::B, (&domain, &cq, &endpoint), &region);
    window.post_invalidate(&endpoint, 2).expect("post the invalidation");
    bind(&window, &endpoint, &region).expect("post the next bind");
    for _ in 0..2 {
        read(&cq).remove(0).result.expect("invalidate, then bind");
    }
    fake::calls();
    endpoint.close().map_err(|rejected| rejected.error).expect("close");
    assert_eq!(calls_about(&["destroy_qp", "dealloc"]), ["dealloc_mw", "destroy_qp"]);
}

/// MW-10: a window is free even if the peer's invalidation of a key is read before the completion
/// of the bind.
#[test]
fn peer_invalidation_read_before_the_bind_frees_the_window() {
    let domain = open();
    let (tx, rx) = (domain.open_cq(8).expect("queue"), domain.open_cq(8).expect("queue"));
    let endpoint =
        Looped::open(&domain, &EndpointAttr { rx_cq: Arc::clone(&rx), ..EndpointAttr::new(&tx) });
    let (region, inbox) = (buffer(&domain, 1), buffer(&domain, 2));
    let window = domain.alloc_type_2_window(Type2Kind::B).expect("allocate");
    let post = |operation, local: &[_]| {
        let request = WorkRequest { operation, local, peer: endpoint.peer, context: 4 };
        // SAFETY: the buffers live until the end of the test.
        unsafe { endpoint.post(&request) }.expect("post")
    };
    let inbox = inbox.slice(0, 64).expect("slice");
    endpoint.receive(&[inbox], None, 4).expect("receive");
    let key = bind(&window, &endpoint, &region).expect("post the bind");
    post(Operation::Send { tag: None, invalidate: Some(&key) }, &[]);
    let mut received = Vec::new();
    for _ in 0..4 {
        received.append(&mut read(&rx));
    }
    assert_eq!(received.remove(0).invalidated, Some(key.as_u64().expect("one key")));
    for _ in 0..2 {
        read(&tx).remove(0).result.expect("bind, then send");
    }
    assert_eq!((window.state(), window.key()), (WindowState::Free, None));
    region.close().map_err(|rejected| rejected.error).expect("nothing is bound to it");
}

/// MR-05
#[test]
fn late_completion_does_not_end_a_request_of_a_new_endpoint() {
    let domain = open();
    let cq = domain.open_cq(8).expect("open a queue");
    let (from, to) = (buffer(&domain, 1), buffer(&domain, 2));
    for used in [1, 3] {
        let old = endpoint(&domain, &cq);
        misbehave(FINE);
        for context in 1..used {
            write(&old, &from, &to, context);
            while read(&cq).is_empty() {}
        }
        misbehave(Misbehaviour { hangs: true, completes_late: true, ..FINE });
        write(&old, &from, &to, 10);
        old.close().map_err(|rejected| rejected.error).expect("close");
        let ended = read(&cq).remove(0);
        assert_eq!((ended.context, ended.result.unwrap_err().kind()), (10, ErrorKind::Canceled));
        // The new queue pair has the number of the old queue pair. The old queue pair's request
        // completes only now.
        let new = endpoint(&domain, &cq);
        // The driver refuses as many requests as the old queue pair had completed.
        for _ in 2..used {
            wire::refuse_post(1, 5);
            try_write(&new, &from, &to, 30).expect_err("the post is refused");
        }
        for context in 1..=used {
            write(&new, &from, &to, 20 + context);
        }
        let early: Vec<_> = (0..used + 1).flat_map(|_| read(&cq)).collect();
        assert!(early.is_empty(), "nothing of the new endpoint has run: {early:?}");
        misbehave(FINE);
        for context in 1..=used {
            let mut ended = read(&cq);
            while ended.is_empty() {
                ended = read(&cq);
            }
            let ended = ended.remove(0);
            assert_eq!((ended.context, ended.result.expect("write")), (20 + context, 1024));
        }
        new.close().map_err(|rejected| rejected.error).expect("close");
    }
}

/// MW-01
#[test]
fn late_bind_completion_does_not_complete_the_next_bind() {
    let domain = open();
    let region = buffer(&domain, 1);
    let window = domain.alloc_type_1_window().expect("allocate");
    let bind = || window.bind(&region, 0, 64, Access::REMOTE_READ);
    let first = bind().expect("bind");
    misbehave(Misbehaviour { bind: None, ..FINE });
    let error = bind().expect_err("it does not complete in time");
    assert_eq!(error.kind(), ErrorKind::Driver, "{error}");
    assert!(error.to_string().contains("did not complete within the time limit"), "{error}");
    misbehave(Misbehaviour { bind: Some(WcStatus::IBV_WC_MW_BIND_ERR), ..FINE });
    let error = bind().expect_err("this bind is refused, before the first bind completes");
    assert_eq!(error.kind(), ErrorKind::AccessDenied, "{error}");
    misbehave(FINE);
    let last = bind().expect("the next bind works");
    assert_ne!(first.as_u64().expect("key"), last.as_u64().expect("key"));
}

/// MR-16: while a bind waits for the NIC, other threads register, close and use windows of the
/// domain. The region and the window of that bind can be neither changed nor freed meanwhile.
#[test]
fn bind_in_flight_blocks_no_other_call() {
    static GATE: LazyLock<Gate> = LazyLock::new(Gate::default);
    let gate = &*GATE;
    // The other thread opens the gate after its calls. If one of them waited for the bind, the bind
    // would time out.
    let domain = open_with(wire::functions(), Duration::from_secs(10));
    let verbs = VerbsDomain::of(&domain).expect("verbs");
    let region = buffer(&domain, 1);
    let handle = region.provider_region().expect("handle");
    let [window, other] = [(); 2].map(|()| verbs.alloc_window(WindowType::One).expect("allocate"));
    let (access, addressing) = (Access::REMOTE_READ, Addressing::Virtual);
    let bind = WindowBind { region: handle, offset: 0, len: 64, access, addressing };
    misbehave(Misbehaviour { bind_gate: Some(gate), ..FINE });
    std::thread::scope(|scope| {
        let calls = scope.spawn(|| {
            while !gate.reached.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            let range = AddressRange::new(Address(0x10000), 4096).expect("range");
            // SAFETY: the fake library of this thread transfers nothing.
            let memory = unsafe { Raw::new(range, Promise::ReadOnly) };
            let second = domain.register(memory, Access::SEND).expect("register");
            VerbsMr::all_of(&region).expect("a reader");
            second.close().map_err(|rejected| rejected.error).expect("close");
            let status = verbs.window_status(window).expect("status");
            assert_eq!((status.state, status.pending), (WindowState::Free, true));
            assert_eq!(verbs.deregister(handle).unwrap_err().kind(), ErrorKind::Busy);
            // SAFETY: nothing is transferred.
            let changed = unsafe { verbs.rereg(handle, Access::READ) };
            assert_eq!(changed.unwrap_err().kind(), ErrorKind::Busy);
            assert_eq!(verbs.free_window(window).unwrap_err().kind(), ErrorKind::Busy);
            gate.open.store(true, Ordering::Release);
        });
        verbs.bind_window(window, &bind).expect("no call waited for the bind");
        calls.join().expect("the other calls");
    });
    misbehave(FINE);
    verbs.free_window(other).expect("free");
    verbs.free_window(window).expect("free");
    region.close().map_err(|rejected| rejected.error).expect("close");
}

/// MW-06: the provider refuses to deregister a region with bound windows, also those that the
/// domain does not know.
#[test]
fn region_with_a_bound_window_is_neither_deregistered_nor_changed() {
    let domain = open();
    let (cq, endpoint) = side(&domain);
    let verbs = VerbsDomain::of(&domain).expect("verbs");
    let (first, second) = (buffer(&domain, 1), buffer(&domain, 2));
    let [region, other] = [&first, &second].map(|region| region.provider_region().expect("handle"));
    let (offset, len, access, addressing) = (0, 64, Access::REMOTE_READ, Addressing::Virtual);
    let bind = WindowBind { region, offset, len, access, addressing };
    let refused = |region, windows: &str| {
        fake::calls();
        let error = verbs.deregister(region).expect_err("a window is bound to it");
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        assert_eq!(error.context_value("windows"), Some(windows), "{error}");
        assert!(error.remedy_text().is_some(), "{error}");
        // SAFETY: nothing is transferred.
        let error = unsafe { verbs.rereg(region, Access::READ) }.expect_err("a window is bound");
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        assert!(fake::calls().is_empty(), "the driver was called");
    };
    let free = |region| {
        // SAFETY: nothing is transferred.
        unsafe { verbs.rereg(region, LOCAL) }.expect("no window is bound to it");
    };
    let post = |operation| {
        let request = WorkRequest { operation, local: &[], peer: endpoint.peer, context: 1 };
        // SAFETY: window operations name no local memory.
        unsafe { endpoint.post(&request) }.expect("post");
    };

    // A type 1 window keeps its region busy until it is bound elsewhere, unbound or freed.
    let window = verbs.alloc_window(WindowType::One).expect("allocate");
    verbs.bind_window(window, &bind).expect("bind");
    refused(region, "1");
    verbs.bind_window(window, &WindowBind { region: other, ..bind }).expect("bind again");
    free(region);
    refused(other, "1");
    verbs.bind_window(window, &WindowBind { region: other, len: 0, ..bind }).expect("unbind");
    free(other);
    verbs.bind_window(window, &bind).expect("bind");
    verbs.free_window(window).expect("free");
    free(region);

    // A bind of a type 2 window keeps its region busy from the post on. The region is free after an
    // invalidation, a failed bind, a reset of the connection and the close of the endpoint.
    let window = verbs.alloc_window(WindowType::TwoB).expect("allocate");
    let bind_2 = Operation::BindWindow { window, bind, tag: 1 };
    post(bind_2);
    refused(region, "1");
    read(&cq).remove(0).result.expect("bind");
    refused(region, "1");
    post(Operation::InvalidateWindow { window });
    refused(region, "1");
    read(&cq).remove(0).result.expect("invalidate");
    free(region);
    break_connection(&endpoint, &cq, &second);
    post(bind_2);
    refused(region, "1");
    read(&cq).remove(0).result.expect_err("the connection is down");
    free(region);
    post(bind_2);
    endpoint.resolve(&endpoint.name()).expect("the reset drops the bind");
    free(region);
    endpoint.close().map_err(|rejected| rejected.error).expect("close");
    // An endpoint that the provider opens past the domain.
    let cq = verbs.open_cq(8).expect("open a queue");
    let past = verbs.open_endpoint(&EndpointAttr::new(&cq)).expect("open an endpoint");
    past.resolve(&past.name()).expect("connect it to itself");
    verbs.bind_window_now(&*past, window, &bind, 2).expect("bind");
    refused(region, "1");
    let many = verbs.alloc_window(WindowType::TwoB).expect("allocate");
    verbs.bind_window_now(&*past, many, &bind, 3).expect("bind");
    refused(region, "2");
    verbs.free_window(many).expect("free");
    refused(region, "1");
    past.close().expect("close");
    free(region);
    verbs.free_window(window).expect("free");
    for region in [first, second] {
        region.close().map_err(|rejected| rejected.error).expect("close");
    }
}

/// MW-06: a bind without a known result keeps both regions registered until the window is freed.
#[test]
fn bind_without_a_result_keeps_both_regions_registered() {
    let domain = open();
    let verbs = VerbsDomain::of(&domain).expect("verbs");
    let (first, second) = (buffer(&domain, 1), buffer(&domain, 2));
    let [region, other] = [&first, &second].map(|region| region.provider_region().expect("handle"));
    let window = verbs.alloc_window(WindowType::One).expect("allocate");
    let (access, addressing) = (Access::REMOTE_READ, Addressing::Virtual);
    let bind = WindowBind { region, offset: 0, len: 64, access, addressing };
    verbs.bind_window(window, &bind).expect("bind");
    misbehave(Misbehaviour { bind: None, ..FINE });
    let error = verbs.bind_window(window, &WindowBind { region: other, ..bind });
    assert_eq!(error.expect_err("no completion").kind(), ErrorKind::Driver);
    for region in [region, other] {
        assert_eq!(verbs.deregister(region).expect_err("bound").kind(), ErrorKind::Busy);
    }
    // A bind that the NIC refused leaves the binding as it was.
    misbehave(Misbehaviour { bind: Some(WcStatus::IBV_WC_MW_BIND_ERR), ..FINE });
    verbs.bind_window(window, &bind).expect_err("refused");
    assert_eq!(verbs.deregister(other).expect_err("bound").kind(), ErrorKind::Busy);
    misbehave(FINE);
    verbs.bind_window(window, &bind).expect("bind");
    second.close().map_err(|rejected| rejected.error).expect("bound to the first region alone");
    assert_eq!(verbs.deregister(region).expect_err("bound").kind(), ErrorKind::Busy);
    verbs.free_window(window).expect("free");
    first.close().map_err(|rejected| rejected.error).expect("close");
}

/// MW-06: a window that the driver did not free keeps its region registered.
#[test]
fn grant_whose_window_is_not_freed_keeps_its_region_registered() {
    let domain = open();
    let (_cq, endpoint) = side(&domain);
    let region = buffer(&domain, 1);
    let grant = region.grant(&endpoint, 0..64, Access::REMOTE_READ).expect("grant");
    misbehave(Misbehaviour { refuses_frees: libc::EIO, ..FINE });
    drop(grant);
    let rejected = region.close().expect_err("the window is still bound");
    assert_eq!(rejected.error.kind(), ErrorKind::Busy, "{}", rejected.error);
    assert_eq!((domain.live().windows, domain.live().regions), (1, 1));
    misbehave(FINE);
}

/// MW-06: the close of a window that the driver did not free returns the window.
#[test]
fn close_of_a_window_that_is_not_freed_returns_it() {
    let domain = open();
    let region = buffer(&domain, 1);
    let window = domain.alloc_type_1_window().expect("allocate");
    window.bind(&region, 0, 64, Access::REMOTE_READ).expect("bind");
    misbehave(Misbehaviour { refuses_frees: libc::EIO, ..FINE });
    let rejected = window.close().expect_err("the driver fails");
    assert_eq!(rejected.error.os_errno(), Some(hmem_core::Errno(libc::EIO)), "{}", rejected.error);
    misbehave(FINE);
    let window = rejected.value;
    assert_eq!((window.state(), domain.live().windows), (WindowState::Valid, 1));
    window.close().map_err(|rejected| rejected.error).expect("close");
    assert_eq!(domain.live().windows, 0);
    region.close().map_err(|rejected| rejected.error).expect("nothing is bound to it");
}

/// MW-09: a grant over rdma_rxe, which has neither bounds of windows nor sub-regions, says that its
/// peer reaches the whole region.
#[test]
fn grant_over_rxe_says_that_it_does_not_confine_its_peer() {
    for is_rxe in [true, false] {
        let domain = if is_rxe { open_rxe() } else { open() };
        let (_cq, endpoint) = side(&domain);
        let region = buffer(&domain, 1);
        let part = region.grant(&endpoint, 0..64, Access::REMOTE_READ).expect("grant");
        let whole = region.grant(&endpoint, 0..1024, Access::REMOTE_READ).expect("grant");
        assert_eq!((part.enforces_bounds(), whole.enforces_bounds()), (!is_rxe, true));
        let kind = GrantKind::Window(WindowType::TwoB);
        assert_eq!((part.kind(), whole.kind()), (kind, kind));
        let reasons = part.fallback_reasons();
        let rules = reasons.iter().map(|reason| reason.context_value("rule")).collect::<Vec<_>>();
        if is_rxe {
            assert_eq!(rules, [Some("nic-enforces-bounds"), None], "{part:?}");
            assert!(reasons.iter().all(|reason| reason.is_unsupported()), "{part:?}");
            let window = domain.provider_domain().windows().expect("windows");
            assert!(!window.enforces_bounds());
        } else {
            assert!(reasons.is_empty(), "{part:?}");
        }
        assert!(whole.fallback_reasons().is_empty(), "{whole:?}");
    }
}

/// Returns a new window of type 2 that is bound to a region.
fn bound(
    kind: Type2Kind,
    (domain, cq, endpoint): (&Domain, &Arc<dyn CompletionQueue>, &Looped),
    region: &Region<Vec<u8>>,
) -> Type2Window {
    let window = domain.alloc_type_2_window(kind).expect("allocate");
    bind(&window, endpoint, region).expect("post the bind");
    read(cq).remove(0).result.expect("bind");
    window
}

fn bind(window: &Type2Window, endpoint: &Looped, region: &Region<Vec<u8>>) -> Result<RemoteKey> {
    let (access, addressing) = (Access::REMOTE_READ, Addressing::Virtual);
    let bind = Type2Bind { region, offset: 0, len: 64, access, addressing, tag: 7 };
    window.post_bind(endpoint, &bind, 1)
}

/// MW-10
#[test]
fn bound_window_is_invalidated_only_through_its_queue_pair() {
    let domain = open();
    let cq = domain.open_cq(8).expect("open a queue");
    let (own, foreign) = (endpoint(&domain, &cq), endpoint(&domain, &cq));
    let region = buffer(&domain, 1);
    for kind in [Type2Kind::A, Type2Kind::B] {
        let window = bound(kind, (&domain, &cq, &own), &region);
        let error = window.post_invalidate(&foreign, 2).expect_err("a foreign queue pair");
        assert_eq!(error.kind(), ErrorKind::AccessDenied, "{error}");
        assert!(window.key().is_some(), "the window stays bound");
        window.post_invalidate(&own, 3).expect("its own queue pair");
        read(&cq).remove(0).result.expect("invalidate");
        // A free window may be invalidated and bound through any queue pair.
        window.post_invalidate(&foreign, 6).expect("a free window");
        read(&cq).remove(0).result.expect("invalidate");
        bind(&window, &foreign, &region).expect("post the bind");
        read(&cq).remove(0).result.expect("bind");
        let error = window
            .post_invalidate(&own, 4)
            .expect_err("the window is bound through the other queue pair");
        assert_eq!(error.kind(), ErrorKind::AccessDenied, "{error}");
        window.post_invalidate(&foreign, 5).expect("its own queue pair");
        read(&cq).remove(0).result.expect("invalidate");
    }
}

/// MW-01
#[test]
fn provider_refuses_requests_for_the_other_window_type() {
    let domain = open();
    let (_cq, endpoint) = side(&domain);
    let region = buffer(&domain, 1);
    let region = region.provider_region().expect("handle");
    let verbs = VerbsDomain::of(&domain).expect("verbs");
    let one = verbs.alloc_window(WindowType::One).expect("allocate");
    let two = verbs.alloc_window(WindowType::TwoB).expect("allocate");
    let (offset, len, access, addressing) = (0, 64, Access::REMOTE_READ, Addressing::Virtual);
    let post = |operation| {
        let request = WorkRequest { operation, local: &[], peer: endpoint.peer, context: 1 };
        // SAFETY: window operations name no local memory.
        unsafe { endpoint.post(&request) }.expect_err("another type")
    };
    let refused = |error: Error, rule| {
        assert_eq!(error.kind(), ErrorKind::BadState, "{error}");
        assert_eq!(error.context_value("rule"), Some(rule), "{error}");
    };
    refused(post(Operation::InvalidateWindow { window: one }), "type-1-is-not-invalidated");
    let bind = WindowBind { region, offset, len, access, addressing };
    refused(post(Operation::BindWindow { window: one, bind, tag: 1 }), "bound-by-its-verb");
    let error = verbs.bind_window(two, &bind).expect_err("type 2 is bound by a request");
    refused(error, "bound-by-its-verb");
    let zero_based = WindowBind { addressing: Addressing::ZeroBased, ..bind };
    let error = verbs.bind_window(one, &zero_based).expect_err("type 1 has virtual addresses");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    verbs.bind_window(one, &bind).expect("type 1 is bound by a call");
    for window in [one, two] {
        verbs.free_window(window).expect("free");
        let error = verbs.free_window(window).expect_err("it is freed once");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    }
}

fn raw_key(region: &Region<Vec<u8>>) -> RawKey {
    let mut raw = vec![0; 64];
    let attr = region.raw_attr(&mut raw).expect("a raw key");
    raw.truncate(attr.1);
    RawKey(raw)
}

/// CACHE-13
#[test]
#[allow(unsafe_code)]
fn forked_child_neither_uses_nor_destroys_its_parents_queues_and_windows() {
    let domain = open();
    let window = domain.alloc_type_1_window().expect("allocate");
    let (cq, lone_cq) = (domain.open_cq(4).expect("queue"), domain.open_cq(4).expect("queue"));
    let (dropped, closed) = (endpoint(&domain, &cq), endpoint(&domain, &cq));
    // Posts a request that stays in flight. Closing the endpoint would cancel the request.
    let (from, to) = (buffer(&domain, 1), buffer(&domain, 2));
    misbehave(Misbehaviour { completes_late: true, ..FINE });
    write(&dropped, &from, &to, 1);
    let (name, raw) = (closed.name(), raw_key(&to));
    let mapped = domain.map_raw(Iova(0), 1024, &raw).expect("map");
    fake::calls();
    // SAFETY: the child only makes the calls under test and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let untouched = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            // SAFETY: these are copies of the parent's objects. The child exits without using the
            // objects again.
            unsafe {
                let is_refused = |result: Result<()>| {
                    result.is_err_and(|error| error.kind() == ErrorKind::BadState)
                };
                let mut out = Vec::new();
                let short = Duration::from_millis(1);
                let channel = cq.channel().expect("a channel");
                let unused = is_refused(domain.progress().map(drop))
                    && is_refused(domain.map_raw(Iova(0), 1024, &raw).map(drop))
                    && is_refused(domain.unmap_key(&mapped))
                    && is_refused(try_write(&closed, &from, &to, 2))
                    && is_refused(closed.resolve(&name).map(drop))
                    && closed.name().0.is_empty()
                    && is_refused(cq.read(&mut out, 1).map(drop))
                    && is_refused(cq.wait(&mut out, 1, short).map(drop))
                    && is_refused(channel.arm().map(drop))
                    && out.is_empty();
                drop(std::ptr::read(&raw const window));
                drop(std::ptr::read(&raw const dropped));
                drop(std::ptr::read(&raw const lone_cq));
                let closes = std::ptr::read(&raw const closed).close().is_ok();
                let refused = domain.open_cq(4).is_err()
                    && domain.open_endpoint(&EndpointAttr::new(&cq)).is_err()
                    && domain.alloc_type_1_window().is_err();
                drop(std::ptr::read(&raw const cq));
                drop(std::ptr::read(&raw const domain));
                unused && closes && refused && fake::calls().is_empty()
            }
        }));
        // SAFETY: `_exit` has no precondition. It ends the child.
        unsafe { libc::_exit(i32::from(!untouched.unwrap_or(false))) };
    }
    let mut status = 0;
    // SAFETY: the child was just forked by this test.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    domain.unmap_key(&mapped).expect("the child has not unmapped it");
    misbehave(FINE);
    drop((dropped, closed, window, from, to, cq, lone_cq, domain));
    let destroyed = calls_about(&["destroy_qp", "destroy_cq", "dealloc_mw", "dealloc_pd"]);
    let count = |call: &str| destroyed.iter().filter(|name| name.starts_with(call)).count();
    assert_eq!((count("destroy_qp"), count("destroy_cq")), (2, 2), "{destroyed:?}");
    assert_eq!((count("dealloc_mw"), count("dealloc_pd")), (1, 1), "{destroyed:?}");
}

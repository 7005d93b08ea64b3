//! Requests that the provider refuses before the driver call, and the ranges of bound windows, over
//! a fake library.

use std::sync::Arc;

use crate::looped::Looped;
use crate::{fake, wire};
use hmem_core::{
    Access, Address, AddressRange, Addressing, Domain, Endpoint, ErrorKind, Iova, LocalKey,
    Promise, Raw, Region, RemoteKey, RemotePiece, Result, Type2Bind, Type2Kind,
    provider::{CompletionQueue, EndpointAttr, Transport, WindowBind, WindowType, Windows},
    transfer::{AtomicOp, AtomicType, LocalSegment, Operation, PeerId, RemoteSegment, WorkRequest},
};
use hmem_provider_verbs::{
    Verbs, VerbsDomain, VerbsOptions,
    sys::{AccessFlags, Functions},
};
use rustix::param::page_size;

const LEN: u64 = 1024;

fn open(options: VerbsOptions) -> Domain {
    open_on(wire::functions(), options)
}

fn open_on(functions: Functions, options: VerbsOptions) -> Domain {
    let builder = Verbs::builder().functions(functions).options(options);
    fake::open(&builder.build().expect("start"))
}

fn buffer(domain: &Domain, access: Access) -> Region<Vec<u8>> {
    let bytes = vec![1; LEN as usize];
    domain.register(bytes, access).map_err(|rejected| rejected.error).expect("register")
}

/// An endpoint that is connected to itself, with memory for its transfers.
struct Loop {
    endpoint: Looped,
    cq: Arc<dyn CompletionQueue>,
    target: Region<Vec<u8>>,
    domain: Domain,
}

/// Opens an endpoint that is connected to itself. It accepts 20 sends and 20 receives at once.
fn endpoint(domain: &Domain, cq: &Arc<dyn CompletionQueue>) -> Looped {
    deep(domain, cq, 20)
}

/// Opens an endpoint of this depth that is connected to itself.
fn deep(domain: &Domain, cq: &Arc<dyn CompletionQueue>, depth: usize) -> Looped {
    Looped::open(domain, &EndpointAttr { depth, ..EndpointAttr::new(cq) })
}

impl Loop {
    fn new() -> Self {
        Self::with(VerbsOptions::empty())
    }

    fn with(options: VerbsOptions) -> Self {
        let domain = open(options);
        let cq = domain.open_cq(64).expect("open a queue");
        let endpoint = endpoint(&domain, &cq);
        let target = buffer(&domain, Access::REMOTE_READ | Access::REMOTE_WRITE);
        Self { endpoint, cq, target, domain }
    }

    /// Posts a write from a list of local segments to `far` bytes of the target, and waits for its
    /// result.
    fn write(&self, local: &[LocalSegment], far: u64) -> Result<u64> {
        let key = self.target.key().expect("key");
        let remote = [RemoteSegment { address: key.base(), len: far, key: &key }];
        let operation = Operation::Write { remote: &remote };
        let request = WorkRequest { operation, local, peer: self.endpoint.peer, context: 1 };
        // SAFETY: the segments lie in regions that own their memory.
        unsafe { self.endpoint.post(&request) }?;
        let mut out = Vec::new();
        while out.is_empty() {
            self.cq.read(&mut out, 1).expect("read completions");
        }
        out.remove(0).result
    }
}

fn segment(desc: LocalKey, start: u64, len: u64) -> LocalSegment {
    LocalSegment { address: Address(start), len, desc: Some(desc) }
}

/// MR-09
#[test]
fn invalid_local_lists_are_refused_before_the_driver_call() {
    let net = Loop::new();
    let readable = buffer(&net.domain, Access::WRITE);
    let (desc, start) = (readable.desc().expect("desc"), readable.range().start().0);
    let other = buffer(&net.domain, Access::READ | Access::SEND);
    let (wrong, elsewhere) = (other.desc().expect("desc"), other.range().start().0);
    // Each invalid segment is tested alone and after a valid segment.
    for before in [&[][..], &[segment(desc, start, 8)]] {
        let kind = |last: LocalSegment| {
            let list = [before, &[last]].concat();
            let len = list.iter().map(|segment| segment.len).sum();
            net.write(&list, len).map_err(|error| error.kind())
        };
        assert_eq!(kind(segment(desc, start + LEN - 8, 9)), Err(ErrorKind::OutOfBounds));
        assert_eq!(kind(segment(desc, start - 1, 8)), Err(ErrorKind::OutOfBounds));
        assert_eq!(kind(segment(desc, start + LEN, 1)), Err(ErrorKind::OutOfBounds));
        assert_eq!(kind(segment(desc, start, u64::from(u32::MAX))), Err(ErrorKind::OutOfBounds));
        assert_eq!(kind(segment(wrong, elsewhere, 8)), Err(ErrorKind::AccessDenied));
        let all = 8 * (before.len() as u64 + 1);
        assert_eq!(kind(segment(desc, start + LEN - 8, 8)), Ok(all), "the last bytes");
    }
}

/// KEY-06: a peer's key of more than 32 bits is refused. Its low 32 bits may be the key of other
/// memory, as they are here.
#[test]
fn keys_of_more_than_32_bits_are_refused() {
    let net = Loop::new();
    let local = buffer(&net.domain, Access::WRITE | Access::READ | Access::SEND);
    let result = buffer(&net.domain, Access::READ);
    let (from, to) = (local.range().start().0, result.range().start().0);
    let local = [segment(local.desc().expect("desc"), from, 8)];
    let result = Some(segment(result.desc().expect("desc"), to, 8));
    let key = net.target.key().expect("key");
    let (base, number) = (key.base(), key.as_u64().expect("one key"));
    let piece = |base, key| RemotePiece { base, len: 4, key };
    let wide = number | 0xabcd << 32;
    let split = |first, second| {
        RemoteKey::split(
            Addressing::Virtual,
            piece(base, first),
            vec![piece(Iova(base.0 + 4), second)],
        )
    };
    for key in [
        RemoteKey::new(Addressing::Virtual, base, LEN, wide),
        RemoteKey::new(Addressing::Virtual, base, LEN, number | 1 << 63),
        split(wide, number),
        split(number, wide),
    ] {
        let at = RemoteSegment { address: base, len: 8, key: &key };
        let remote = &[at];
        let before = wire::posts();
        let (op, datatype) = (AtomicOp::Sum, AtomicType::U64);
        let mut operations = vec![
            Operation::Write { remote },
            Operation::WriteImmediate { remote, data: 1 },
            Operation::Read { remote },
            Operation::Atomic { op, datatype, remote: at, result, compare: None },
        ];
        if key.as_u64().is_ok() {
            operations.push(Operation::Send { tag: None, invalidate: Some(&key) });
        }
        for operation in operations {
            let request =
                WorkRequest { operation, local: &local, peer: net.endpoint.peer, context: 1 };
            // SAFETY: the segments lie in regions that own their memory.
            let error = unsafe { net.endpoint.post(&request) }.expect_err("a key of 64 bits");
            assert_eq!(error.kind(), ErrorKind::InvalidKey, "{operation:?}: {error}");
            assert!(error.remedy_text().is_some_and(|text| text.contains("32 bits")), "{error}");
        }
        assert_eq!(wire::posts(), before, "the driver was called");
    }
    assert_eq!(net.write(&local, 8).expect("the key itself"), 8);
}

/// KEY-06: a message cannot invalidate by a mapped raw key, whose number is chosen by this side.
#[test]
fn mapped_key_invalidates_no_window() {
    let net = Loop::new();
    let key = RemoteKey::mapped(Addressing::Virtual, Iova(0), 8, 0x101);
    let operation = Operation::Send { tag: None, invalidate: Some(&key) };
    let request = WorkRequest { operation, local: &[], peer: net.endpoint.peer, context: 1 };
    // SAFETY: the request has no local segments.
    let error = unsafe { net.endpoint.post(&request) }.expect_err("a mapped key");
    assert_eq!(error.kind(), ErrorKind::InvalidKey, "{error}");
}

#[test]
fn lists_of_different_lengths_are_refused() {
    let net = Loop::new();
    let source = buffer(&net.domain, Access::WRITE);
    let (desc, start) = (source.desc().expect("desc"), source.range().start().0);
    let (one, two) = (segment(desc, start, 8), segment(desc, start + 100, 8));
    for (local, far) in [(&[one][..], 7), (&[one], 9), (&[one, two], 8), (&[one, two], 17)] {
        let error = net.write(local, far).expect_err("different lengths");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert_eq!(error.context_value("remote"), Some(far.to_string().as_str()), "{error}");
    }
    assert_eq!(net.write(&[one, two], 16).expect("the same length"), 16);
}

/// Reads all completions. Returns their contexts in ascending order.
fn contexts(cq: &dyn CompletionQueue) -> Vec<u64> {
    let mut out = Vec::new();
    while cq.read(&mut out, 16).expect("read completions") > 0 {}
    let mut contexts: Vec<_> = out.iter().map(|completion| completion.context).collect();
    contexts.sort_unstable();
    contexts
}

#[test]
fn full_completion_queue_refuses_requests_of_all_its_endpoints() {
    const ROOM: u64 = 33;
    let net = Loop::new();
    let cq = net.domain.open_cq(ROOM as usize).expect("open a queue");
    let endpoints = [endpoint(&net.domain, &cq), endpoint(&net.domain, &cq)];
    let (source, sink) = (buffer(&net.domain, Access::WRITE), buffer(&net.domain, Access::RECV));
    let key = net.target.key().expect("key");
    let remote = [RemoteSegment { address: key.base(), len: 8, key: &key }];
    let write = |endpoint: &Looped, context| {
        let from = [source.slice(0, 8).expect("slice")];
        endpoint.write(&from, &remote, endpoint.peer, context)
    };
    let receive = |endpoint: &Looped, context| {
        endpoint.receive(&[sink.slice(0, 8).expect("slice")], None, context)
    };
    let refused = |posted: Result<()>| {
        let error = posted.expect_err("the queue is full");
        assert_eq!(error.kind(), ErrorKind::Again, "{error}");
        let remedy = error.remedy_text().unwrap_or_default();
        assert!(remedy.contains("the completion queue is full of unread completions"), "{error}");
    };
    // Receives stay in flight, and writes that have ended stay unread.
    (0..4).for_each(|context| receive(&endpoints[0], context).expect("there is room"));
    (4..20).for_each(|context| write(&endpoints[0], context).expect("there is room"));
    (20..ROOM).for_each(|context| write(&endpoints[1], context).expect("there is room"));
    for endpoint in &endpoints {
        refused(write(endpoint, ROOM));
    }
    refused(receive(&endpoints[1], ROOM));
    let mut out = Vec::new();
    assert_eq!(cq.read(&mut out, 1).expect("read a completion"), 1);
    write(&endpoints[1], ROOM).expect("there is room again");
    refused(write(&endpoints[1], ROOM + 1));
    // A refused post uses no entry of the queue, nor do requests of a closed endpoint.
    assert_eq!(contexts(&*cq).len() as u64, ROOM - 4);
    for _ in 0..ROOM {
        wire::refuse_post(1, 22);
        write(&endpoints[1], 0).expect_err("the driver refuses the post");
    }
    let [first, second] = endpoints;
    first.close().expect("close an endpoint");
    assert_eq!(contexts(&*cq), [0, 1, 2, 3]);
    (0..20).for_each(|context| write(&second, context).expect("there is room"));
    let third = endpoint(&net.domain, &cq);
    (20..ROOM).for_each(|context| write(&third, context).expect("there is room"));
    refused(write(&third, ROOM));
    assert!(contexts(&*cq).into_iter().eq(0..ROOM));
}

#[test]
fn stored_completions_take_the_room_of_the_queue_until_they_are_read() {
    const ROOM: u64 = 33;
    let net = Loop::new();
    let cq = net.domain.open_cq(ROOM as usize).expect("open a queue");
    let endpoint = endpoint(&net.domain, &cq);
    let source = buffer(&net.domain, Access::WRITE);
    let key = net.target.key().expect("key");
    let remote = [RemoteSegment { address: key.base(), len: 8, key: &key }];
    let from = [source.slice(0, 8).expect("slice")];
    let channel = cq.channel().expect("a channel");
    for first in [0, ROOM] {
        for context in first..first + ROOM {
            endpoint.write(&from, &remote, endpoint.peer, context).expect("there is room");
            // The call moves the completion from the NIC's queue to memory.
            assert!(!channel.arm().expect("arm"));
        }
        let error =
            endpoint.write(&from, &remote, endpoint.peer, 0).expect_err("the queue is full");
        assert_eq!(error.kind(), ErrorKind::Again, "{error}");
        let mut out = Vec::new();
        assert_eq!(cq.read(&mut out, 64).expect("read completions") as u64, ROOM);
        assert!(out.iter().map(|ended| ended.context).eq(first..first + ROOM));
    }
    // Canceled requests keep their room until their completions are read.
    for _ in 0..2 {
        endpoint.write(&from, &remote, endpoint.peer, 1).expect("there is room");
        wire::fail_last_pair();
        endpoint.resolve(&endpoint.name()).expect("connect again");
    }
    for _ in 2..ROOM {
        endpoint.write(&from, &remote, endpoint.peer, 2).expect("there is room");
        assert!(!channel.arm().expect("arm"));
    }
    let error = endpoint.write(&from, &remote, endpoint.peer, 0).expect_err("the queue is full");
    assert_eq!(error.kind(), ErrorKind::Again, "{error}");
    assert_eq!(contexts(&*cq).len() as u64, ROOM);
}

/// Waits for a successful completion, and returns its context. Each read of the queue lets the NIC
/// run one work request.
fn next(cq: &dyn CompletionQueue) -> u64 {
    let mut out = Vec::new();
    while cq.read(&mut out, 1).expect("read completions") == 0 {}
    let completion = out.remove(0);
    completion.result.expect("success");
    completion.context
}

/// Posts a write of `count` work requests, one for each remote segment of 8 bytes.
fn write_parts(
    endpoint: &Looped,
    source: &Region<Vec<u8>>,
    target: &Region<Vec<u8>>,
    (count, context): (u64, u64),
) -> Result<()> {
    let key = target.key().expect("key");
    let remote: Vec<_> = (0..count).map(|at| key.slice(at * 8, 8).expect("inside")).collect();
    let from = [source.slice(0, count * 8).expect("inside")];
    endpoint.write(&from, &remote, endpoint.peer, context)
}

/// Requests of several work requests reserve an entry for each, because each leaves a completion
/// if the connection fails.
#[test]
fn deep_endpoint_does_not_overrun_a_shallow_queue() {
    let net = Loop::new();
    let source = buffer(&net.domain, Access::WRITE);
    let cq = net.domain.open_cq(16).expect("open a queue");
    let endpoint = deep(&net.domain, &cq, 128);
    // The NIC executes nothing, so all work requests stay in flight until they are flushed.
    let still = wire::Misbehaviour { hangs: true, ..wire::Misbehaviour::default() };
    for round in 0..3 {
        wire::misbehave(still);
        let post = |context| write_parts(&endpoint, &source, &net.target, (4, context));
        let posted = (0..128).take_while(|context| post(*context).is_ok()).count();
        assert_eq!(posted, 4, "round {round}: 16 work requests");
        assert_eq!(post(9).expect_err("full").kind(), ErrorKind::Again);
        wire::fail_last_pair();
        wire::misbehave(wire::Misbehaviour::default());
        assert_eq!(contexts(&*cq), [0, 1, 2, 3]);
        endpoint.resolve(&endpoint.name()).expect("connect again");
    }
    let error = write_parts(&endpoint, &source, &net.target, (17, 1)).expect_err("17 entries");
    assert_eq!(error.kind(), ErrorKind::MessageTooLong, "{error}");
    assert!(error.to_string().contains("completion queue with a greater depth"), "{error}");
    write_parts(&endpoint, &source, &net.target, (16, 1)).expect("the whole queue");
    assert_eq!(next(&*cq), 1);
    assert_eq!(wire::overruns(), 0);
}

/// A queue of the recommended depth has room for everything that its endpoints accept.
#[test]
fn queue_of_the_recommended_depth_serves_many_endpoints() {
    let net = Loop::new();
    let (source, sink) = (buffer(&net.domain, Access::WRITE), buffer(&net.domain, Access::RECV));
    let cq = net.domain.open_cq(2 * 64).expect("open a queue");
    let endpoints: Vec<_> = (0..64).map(|_| deep(&net.domain, &cq, 1)).collect();
    wire::misbehave(wire::Misbehaviour { hangs: true, ..wire::Misbehaviour::default() });
    for (endpoint, context) in endpoints.iter().zip(0..) {
        let split = write_parts(endpoint, &source, &net.target, (17, 0)).expect_err("too deep");
        assert_eq!(split.kind(), ErrorKind::MessageTooLong, "{split}");
        assert!(split.to_string().contains("endpoint with a greater depth"), "{split}");
        write_parts(endpoint, &source, &net.target, (1, context)).expect("there is room");
        let into = [sink.slice(0, 8).expect("inside")];
        endpoint.receive(&into, None, 64 + context).expect("there is room");
        let error = write_parts(endpoint, &source, &net.target, (1, 0)).expect_err("depth 1");
        assert_eq!(error.kind(), ErrorKind::Again, "{error}");
    }
    wire::fail_all_pairs();
    wire::misbehave(wire::Misbehaviour::default());
    assert!(contexts(&*cq).into_iter().eq(0..128));
    assert_eq!(wire::overruns(), 0);
}

/// The later work requests of a failed request keep their entries until they have completed too.
#[test]
fn entries_of_a_failed_request_are_in_use_until_its_last_completion() {
    let net = Loop::new();
    let source = buffer(&net.domain, Access::WRITE);
    let cq = net.domain.open_cq(16).expect("open a queue");
    let [failing, other] = [deep(&net.domain, &cq, 16), deep(&net.domain, &cq, 16)];
    let still = wire::Misbehaviour { hangs: true, ..wire::Misbehaviour::default() };
    wire::misbehave(still);
    write_parts(&failing, &source, &net.target, (10, 1)).expect("there is room");
    wire::fail_pair(1);
    wire::misbehave(wire::Misbehaviour::default());
    let mut out = Vec::new();
    assert_eq!(cq.read(&mut out, 1).expect("read"), 1, "nine more completions are in the queue");
    wire::misbehave(still);
    let post = |count| write_parts(&other, &source, &net.target, (count, 2));
    assert_eq!(post(7).expect_err("six entries are free").kind(), ErrorKind::Again);
    post(6).expect("six entries are free");
    wire::fail_all_pairs();
    wire::misbehave(wire::Misbehaviour::default());
    assert_eq!(contexts(&*cq), [2]);
    assert_eq!(wire::overruns(), 0);
    other.resolve(&other.name()).expect("connect again");
    post(16).expect("the whole queue");
    assert_eq!(next(&*cq), 2);
}

/// A reset drops requests whose completions the NIC has written already. Their entries are free
/// once these completions were read.
#[test]
fn completions_of_dropped_requests_do_not_overrun_the_queue() {
    let net = Loop::new();
    let source = buffer(&net.domain, Access::WRITE);
    let cq = net.domain.open_cq(16).expect("open a queue");
    let endpoint = deep(&net.domain, &cq, 16);
    let still = wire::Misbehaviour { hangs: true, ..wire::Misbehaviour::default() };
    let fill = || {
        for context in 0..2 {
            write_parts(&endpoint, &source, &net.target, (8, context)).expect("there is room");
        }
        wire::fail_last_pair();
    };
    for round in 0..4 {
        wire::misbehave(wire::Misbehaviour { flushes_at_reset: true, ..still });
        fill();
        endpoint.resolve(&endpoint.name()).expect("connect again");
        fill();
        wire::misbehave(wire::Misbehaviour::default());
        assert_eq!(contexts(&*cq), [0, 0, 1, 1], "round {round}");
        endpoint.resolve(&endpoint.name()).expect("connect again");
    }
    assert_eq!(wire::overruns(), 0);
}

#[test]
fn atomic_of_more_bytes_than_memory_is_refused() {
    let net = Loop::new();
    let source = buffer(&net.domain, Access::WRITE);
    let (desc, start) = (source.desc().expect("desc"), source.range().start().0);
    let key = net.target.key().expect("key");
    for (len, count) in [(1 << 62, 1), (1 << 63, 2), (u64::MAX - 7, 1)] {
        let remote = RemoteSegment { address: key.base(), len, key: &key };
        let (op, datatype) = (AtomicOp::Sum, AtomicType::U64);
        let operation = Operation::Atomic { op, datatype, remote, result: None, compare: None };
        let local = vec![segment(desc, start, len); count];
        let request = WorkRequest { operation, local: &local, peer: net.endpoint.peer, context: 1 };
        // SAFETY: the request is refused.
        let error = unsafe { net.endpoint.post(&request) }.expect_err("too long");
        let kinds = [ErrorKind::OutOfBounds, ErrorKind::InvalidArgument];
        assert!(kinds.contains(&error.kind()), "{error}");
    }
}

#[test]
fn full_send_queue_refuses_requests_until_it_is_read() {
    let net = Loop::new();
    let source = buffer(&net.domain, Access::WRITE);
    let key = net.target.key().expect("key");
    let remote = [RemoteSegment { address: key.base(), len: 8, key: &key }];
    let post = || {
        let from = [source.slice(0, 8).expect("slice")];
        net.endpoint.write(&from, &remote, net.endpoint.peer, 1).map_err(|error| error.kind())
    };
    let posted = (0..100).take_while(|_| post().is_ok()).count();
    assert_eq!(posted, 20, "the depth of the endpoint");
    assert_eq!(post(), Err(ErrorKind::Again));
    let mut out = Vec::new();
    while out.is_empty() {
        net.cq.read(&mut out, 1).expect("read completions");
    }
    post().expect("there is room again");
}

#[test]
fn post_to_an_unresolved_peer_is_refused_before_the_driver_call() {
    let net = Loop::with(VerbsOptions::MW_BIND);
    let cq = net.domain.open_cq(16).expect("open a queue");
    let attr = EndpointAttr { depth: 4, ..EndpointAttr::new(&cq) };
    let lone = net.domain.open_endpoint(&attr).expect("an endpoint");
    let region = buffer(&net.domain, Access::all());
    let (desc, start) = (region.desc().expect("desc"), region.range().start().0);
    let key = net.target.key().expect("key");
    let remote = RemoteSegment { address: key.base(), len: 8, key: &key };
    let list = [remote];
    let (op, datatype) = (AtomicOp::Sum, AtomicType::U64);
    let operations = [
        Operation::Write { remote: &list },
        Operation::WriteImmediate { remote: &list, data: 1 },
        Operation::Read { remote: &list },
        Operation::Send { tag: None, invalidate: None },
        Operation::SendImmediate { tag: None, data: 1 },
        Operation::Atomic { op, datatype, remote, result: None, compare: None },
        Operation::Receive { tag: None, from: Some(net.endpoint.peer) },
    ];
    let before = wire::posts();
    let local = [segment(desc, start, 8)];
    let refused = |endpoint: &Endpoint, operation, peer, kind| {
        let request = WorkRequest { operation, local: &local, peer, context: 1 };
        // SAFETY: the request is refused.
        let error = unsafe { endpoint.post(&request) }.expect_err("not its peer");
        assert_eq!(error.kind(), kind, "{operation:?}: {error}");
        assert!(error.remedy_text().is_some(), "{error}");
    };
    let not_its_peer = ErrorKind::InvalidArgument;
    for operation in operations {
        for peer in [PeerId(0), net.endpoint.peer] {
            refused(&lone, operation, peer, not_its_peer);
        }
    }
    // A window operation names no peer, but needs a connected queue pair.
    let window = net.domain.alloc_type_2_window(Type2Kind::B).expect("allocate");
    let bind = Type2Bind {
        region: &region,
        offset: 0,
        len: 64,
        access: Access::REMOTE_READ,
        addressing: Addressing::Virtual,
        tag: 1,
    };
    let error = window.post_bind(&lone, &bind, 2).expect_err("never connected");
    assert_eq!(error.kind(), ErrorKind::BadState, "{error}");
    // A connected endpoint refuses the peers of others too.
    let other = endpoint(&net.domain, &cq);
    for operation in operations {
        refused(&other, operation, PeerId(0), not_its_peer);
        if !matches!(operation, Operation::Receive { .. }) {
            refused(&other, operation, net.endpoint.peer, not_its_peer);
        }
    }
    assert_eq!(wire::posts(), before, "the driver was asked");
    // Receives need no connection.
    let into = [region.slice(0, 8).expect("inside")];
    lone.receive(&into, None, 3).expect("receives may be posted before the connection");
    assert_eq!(wire::posts(), before + 1);
}

#[test]
fn provider_refuses_queues_of_another_domain() {
    let verbs = Verbs::builder().functions(wire::functions()).build().expect("start");
    let [own, same_device] = [fake::open(&verbs), fake::open(&verbs)];
    let other_device = open(VerbsOptions::empty());
    fn transport(domain: &Domain) -> &dyn Transport {
        domain.provider_domain().transport().expect("verbs transfers")
    }
    let provider = |domain: &Domain| transport(domain).open_cq(8).expect("open a queue");
    let cq = provider(&own);
    let domain = own.provider_domain();
    for foreign in [provider(&same_device), provider(&other_device)] {
        for (tx, rx) in [(&cq, &foreign), (&foreign, &cq)] {
            let attr = EndpointAttr { rx_cq: Arc::clone(rx), ..EndpointAttr::new(tx) };
            let error = transport(&own).open_endpoint(&attr).expect_err("another domain's queue");
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            assert!(error.remedy_text().is_some(), "{error}");
        }
    }
    assert_eq!(domain.live().endpoints, 0);
    transport(&own).open_endpoint(&EndpointAttr::new(&cq)).expect("the domain's own queue");
}

/// Binds a window through the provider, without the checks of [`Domain`]. Returns the recorded
/// driver call.
fn bind(domain: &Domain, region: &Region<Vec<u8>>, what: (u64, u64, Access)) -> Result<String> {
    let verbs = VerbsDomain::of(domain).expect("verbs");
    let window = verbs.alloc_window(WindowType::One)?;
    let (offset, len, access) = what;
    let (region, addressing) = (region.provider_region().expect("handle"), Addressing::Virtual);
    fake::calls();
    let bound = verbs.bind_window(window, &WindowBind { region, offset, len, access, addressing });
    let asked = fake::calls().into_iter().find(|call| call.starts_with("bind_mw"));
    verbs.free_window(window).expect("free");
    match bound {
        Ok(_) => Ok(asked.expect("the driver was called")),
        Err(error) => {
            assert_eq!(asked, None, "the driver was called: {error}");
            Err(error)
        }
    }
}

/// MW-05
#[test]
fn window_is_bound_with_exactly_the_requested_rights() {
    let domain = open(VerbsOptions::MW_BIND);
    let region = buffer(&domain, Access::READ | Access::WRITE);
    let start = region.range().start().0;
    let (read, write) = (Access::REMOTE_READ, Access::REMOTE_WRITE);
    let writes = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    for (access, flags) in [
        (read, AccessFlags::REMOTE_READ),
        (Access::REMOTE_RMA_WRITE, AccessFlags::REMOTE_WRITE),
        (Access::REMOTE_ATOMIC, AccessFlags::REMOTE_ATOMIC),
        (write, writes),
        (read | write, AccessFlags::REMOTE_READ | writes),
        // Only the core refuses a right of the local side. It must not reach the driver.
        (read | Access::RECV | Access::MW_BIND, AccessFlags::REMOTE_READ),
    ] {
        let asked = bind(&domain, &region, (16, 64, access)).expect("bind");
        assert_eq!(asked, format!("bind_mw {:#x}+0x40 {:#x}", start + 16, flags.bits()));
    }
}

/// MW-07
#[test]
fn bind_beyond_region_or_rights_is_refused_before_the_driver() {
    let domain = open(VerbsOptions::MW_BIND);
    let region = buffer(&domain, Access::READ);
    let kind = |domain: &Domain, region: &_, what| {
        bind(domain, region, what).map(drop).map_err(|error| error.kind())
    };
    let (read, write) = (Access::REMOTE_READ, Access::REMOTE_WRITE);
    for (offset, len) in [(LEN - 8, 9), (LEN, 1), (LEN + 1, 1), (u64::MAX, 2), (1, u64::MAX)] {
        let outside = kind(&domain, &region, (offset, len, read));
        assert_eq!(outside, Err(ErrorKind::OutOfBounds), "{len} bytes at {offset}");
    }
    assert_eq!(kind(&domain, &region, (LEN - 8, 8, write)), Ok(()), "the last bytes");
    let narrow = buffer(&domain, Access::SEND);
    assert_eq!(kind(&domain, &narrow, (0, 8, write)), Err(ErrorKind::AccessDenied));
    assert_eq!(kind(&domain, &narrow, (0, 8, read)), Ok(()));

    let plain = open(VerbsOptions::empty());
    let region = buffer(&plain, Access::READ);
    let error = bind(&plain, &region, (0, 8, read)).expect_err("no MW_BIND");
    assert_eq!(error.kind(), ErrorKind::AccessDenied);
    assert!(format!("{error:#}").contains("MW_BIND"), "{error}");
}

/// VRB-02
#[test]
fn atomic_right_of_a_window_is_refused_without_atomics() {
    let functions = wire::functions();
    fake::with(|script| script.no_atomics = true);
    let domain = open_on(functions, VerbsOptions::MW_BIND);
    let region = buffer(&domain, Access::READ | Access::WRITE);
    for access in [Access::REMOTE_ATOMIC, Access::REMOTE_ATOMIC | Access::REMOTE_READ] {
        let error = bind(&domain, &region, (16, 64, access)).expect_err("no atomics");
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert_eq!(error.context_value("access"), Some("REMOTE_ATOMIC"), "{error}");
        assert!(error.to_string().contains("fake0"), "{error}");
    }
    // On a device without atomics, REMOTE_WRITE grants RMA writes only.
    let asked = bind(&domain, &region, (16, 64, Access::REMOTE_WRITE)).expect("bind");
    let start = region.range().start().0;
    let flags = AccessFlags::REMOTE_WRITE.bits();
    assert_eq!(asked, format!("bind_mw {:#x}+0x40 {flags:#x}", start + 16));
}

/// VRB-02: work requests address a zero-based region from 0 on, on the local side too. The bytes
/// are those of the application's addresses.
#[test]
fn zero_based_region_is_addressed_from_0_on_both_sides() {
    let domain = open(VerbsOptions::ZERO_BASED);
    let cq = domain.open_cq(8).expect("open a queue");
    let endpoint = endpoint(&domain, &cq);
    let page = page_size();
    // Room for one aligned page.
    let mut bytes = vec![0; 2 * page].into_boxed_slice();
    let skip = bytes.as_ptr().align_offset(page);
    for (at, byte) in bytes[skip..][..page].iter_mut().enumerate() {
        *byte = (at % 251) as u8;
    }
    let bytes = Box::into_raw(bytes);
    let start = Address((bytes.cast::<u8>().expose_provenance() + skip) as u64);
    let range = AddressRange::new(start, page as u64).expect("range");
    let local = Access::WRITE | Access::READ | Access::SEND | Access::RECV;
    // SAFETY: the bytes are freed after the region is closed, and no reference to them exists
    // until then.
    let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
    let access = local | Access::REMOTE_READ | Access::REMOTE_WRITE;
    let region = domain.register(memory, access).expect("register");
    let key = region.key().expect("key");
    assert_eq!((key.addressing(), key.base()), (Addressing::ZeroBased, Iova(0)));
    let desc = region.desc().expect("desc");
    let run = |operation: Operation<'_>, at, done: usize| {
        let local = [segment(desc, start.0 + at, 300)];
        let request = WorkRequest { operation, local: &local, peer: endpoint.peer, context: 1 };
        // SAFETY: the region lives until the requests have completed.
        unsafe { endpoint.post(&request) }.expect("post");
        let mut out = Vec::new();
        while out.len() < done {
            cq.read(&mut out, done).expect("read completions");
        }
        assert!(out.iter().all(|done| done.result.is_ok()), "{out:?}");
    };
    let remote = |at| [key.slice(at, 300).expect("inside")];
    wire::addresses();
    run(Operation::Write { remote: &remote(1000) }, 0, 1);
    run(Operation::Read { remote: &remote(1) }, 2000, 1);
    run(Operation::Receive { tag: None, from: None }, 3000, 0);
    run(Operation::Send { tag: None, invalidate: None }, 2, 2);
    let expected = [(vec![0], 1000), (vec![2000], 1), (vec![3000], 0), (vec![2], 0)];
    assert_eq!(wire::addresses(), expected);
    region.close().map_err(|rejected| rejected.error).expect("close");
    // SAFETY: the pointer came from `Box::into_raw`, and nothing is registered any more.
    let bytes = unsafe { Box::from_raw(bytes) };
    let bytes = &bytes[skip..];
    for (from, to) in [(0, 1000), (1, 2000), (2, 3000)] {
        assert_eq!(bytes[to..to + 300], bytes[from..from + 300], "{from} to {to}");
    }
}

/// MW-01
#[test]
fn windows_bind_only_to_regions_with_virtual_addresses() {
    let domain = open(VerbsOptions::MW_BIND | VerbsOptions::ZERO_BASED);
    let page = page_size();
    // Room for one aligned page.
    let bytes = vec![0_u8; 2 * page];
    let start = bytes.as_ptr().expose_provenance().next_multiple_of(page);
    let range = AddressRange::new(Address(start as u64), page as u64).expect("range");
    let verbs = VerbsDomain::of(&domain).expect("verbs");
    // SAFETY: the bytes outlive the region, and nothing is transferred.
    let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
    let region = domain.register(memory, Access::RECV).expect("register");
    let handle = region.provider_region().expect("handle");
    let window = verbs.alloc_window(WindowType::One).expect("allocate");
    let (access, addressing) = (Access::REMOTE_READ, Addressing::Virtual);
    let bind = WindowBind { region: handle, offset: 0, len: 8, access, addressing };
    let error = verbs.bind_window(window, &bind).expect_err("addresses from 0");
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
}

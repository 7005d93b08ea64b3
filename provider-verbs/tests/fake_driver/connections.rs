//! Connections over a fake library that moves bytes: the locks of two endpoints that connect,
//! recovery after a refused access, and the bytes of immediate data in work requests.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use crate::looped::Looped;
use crate::staging_cases::*;
use crate::wire::{Call, Gate, Misbehaviour, hold};
use crate::{fake, wire};
use hmem_core::{
    Access, Addressing, Domain, DomainAttr, Endpoint, ErrorKind, Iova, Registry, RemoteKey,
    Type2Bind, Type2Kind,
    provider::{CompletionQueue, EndpointAttr, StagingAttr},
    transfer::{Completion, CompletionKind, RemoteSegment},
};
use hmem_iface_system::{Simulated, Stepping};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_verbs::Verbs;

const CHUNK: u64 = 4096;
const STAGING: StagingAttr = StagingAttr { buffer_len: CHUNK as usize, buffer_count: 8 };

fn net(stepping: Stepping) -> Net {
    let verbs = Verbs::builder().functions(wire::functions()).build().expect("start");
    let device = Simulated::builder().window(1 << 32).stepping(stepping).build();
    Net::new(Arc::new(verbs), None, STAGING, device.expect("build the device"))
}

fn remote(key: &RemoteKey, len: u64) -> RemoteSegment<'_> {
    RemoteSegment { address: key.base(), len, key }
}

/// Reads all completions of a side. Returns their contexts and the kinds of their errors.
fn ended(side: &Side) -> Vec<(u64, Result<u64, ErrorKind>)> {
    let mut out = Vec::new();
    while side.cq.read(&mut out, 16).expect("read completions") > 0 {}
    let facts = |end: Completion| (end.context, end.result.map_err(|error| error.kind()));
    let mut facts: Vec<_> = out.into_iter().map(facts).collect();
    facts.sort_by_key(|(context, _)| *context);
    facts
}

/// Two connected endpoints on two devices, whose queue pairs have the same number. The endpoints
/// have one queue each.
struct TwoDevices {
    ends: [(Endpoint, Arc<dyn CompletionQueue>); 2],
    wire: wire::Shared,
}

impl TwoDevices {
    fn new() -> Self {
        let functions = wire::functions();
        fake::with(|script| script.devices = Some(2));
        let verbs = Verbs::builder().functions(functions).connect_in_process(true).build();
        let verbs = verbs.expect("start");
        let ends = ["fake0", "fake1"].map(|nic| {
            let attr = DomainAttr { nic: Some(nic.to_owned()), ..DomainAttr::default() };
            let paths = Arc::new(DefaultPathSelector::new());
            let domain = Domain::open(&verbs, Arc::new(Registry::new()), paths, attr);
            let domain = domain.expect("open");
            let cq = domain.open_cq(256).expect("open a queue");
            (domain.open_endpoint(&EndpointAttr::new(&cq)).expect("open an endpoint"), cq)
        });
        let names = [0, 1].map(|end: usize| ends[end].0.name());
        assert_eq!(names[0].0[8..12], names[1].0[8..12], "the numbers of the queue pairs");
        ends[0].0.resolve(&names[1]).expect("connect");
        Self { ends, wire: wire::Shared::of_this_thread() }
    }

    /// Makes the endpoint `mine` connect to the other one, while another thread holds the lock of
    /// `mine`. Returns true if the connecting thread locks the other endpoint first.
    fn locks_the_other_first(&self, mine: usize) -> bool {
        let [(mine, _), (other, _)] = [&self.ends[mine], &self.ends[1 - mine]];
        // The other endpoint has lost its connection, and its name has changed.
        wire::fail_pair(if std::ptr::eq(other, &self.ends[0].0) { 0 } else { 1 });
        let name = other.name();
        let [polled, queried] = [(); 2].map(|()| Arc::<wire::Gate>::default());
        let reached = |gate: &wire::Gate| {
            while !gate.reached.load(Ordering::Acquire) {
                thread::yield_now();
            }
        };
        thread::scope(|scope| {
            let gate = Arc::clone(&polled);
            let connecting = Worker::spawn(scope, self, move || {
                // The second poll is that of the other endpoint's queue. It is the last call of the
                // driver before both endpoints are locked.
                wire::hold(wire::Call::PollQueue, 2, &gate);
                mine.resolve(&name).expect("connect");
            });
            reached(&polled);
            let gate = Arc::clone(&queried);
            Worker::spawn(scope, self, move || {
                // The query is made under the lock of the endpoint.
                wire::hold(wire::Call::QueryPair, 1, &gate);
                drop(mine.name());
            });
            reached(&queried);
            polled.open.store(true, Ordering::Release);
            let waits = connecting.sleeps();
            let is_locked = Worker::spawn(scope, self, || drop(other.name())).sleeps();
            queried.open.store(true, Ordering::Release);
            assert!(waits, "the endpoint was not locked");
            is_locked
        })
    }
}

/// A thread of a test.
struct Worker {
    /// The thread's folder in `/proc`. The value is empty until the thread runs.
    folder: Arc<OnceLock<PathBuf>>,
    ended: Arc<AtomicBool>,
}

impl Worker {
    fn spawn<'scope>(
        scope: &'scope thread::Scope<'scope, '_>,
        devices: &'scope TwoDevices,
        body: impl FnOnce() + Send + 'scope,
    ) -> Self {
        let worker = Self { folder: Arc::default(), ended: Arc::default() };
        let (folder, ended) = (Arc::clone(&worker.folder), Arc::clone(&worker.ended));
        scope.spawn(move || {
            devices.wire.enter();
            let own = fs::read_link("/proc/thread-self").expect("the link of this thread");
            folder.set(Path::new("/proc").join(own)).expect("set once");
            body();
            ended.store(true, Ordering::Release);
        });
        worker
    }

    /// Waits until the thread sleeps, and returns true, or until its body has ended, and returns
    /// false. A thread at a gate of the library does not sleep.
    fn sleeps(&self) -> bool {
        // A contended lock of the allocator may let the thread sleep for a moment.
        let mut seen = 0;
        while seen < 1000 {
            if self.ended.load(Ordering::Acquire) {
                return false;
            }
            let stat = self.folder.get().and_then(|folder| fs::read(folder.join("stat")).ok());
            let state = stat.and_then(|stat| {
                let after = stat.iter().rposition(|byte| *byte == b')')?;
                stat.get(after + 2).copied()
            });
            seen = if state == Some(b'S') { seen + 1 } else { 0 };
            thread::yield_now();
        }
        true
    }
}

/// Threads that connect the same endpoints lock them in the same order, whichever endpoint each
/// thread calls. Two devices number their queue pairs alike, so the numbers give no order.
#[test]
fn endpoints_of_two_devices_are_locked_in_one_order_from_either_side() {
    let devices = TwoDevices::new();
    let [first, second] = [0, 1].map(|mine| devices.locks_the_other_first(mine));
    assert_ne!(first, second, "two threads that connect crosswise deadlock");
}

/// MR-05: a refused access ends the connection. One call on each side recovers it, and reports
/// every outstanding request.
#[test]
fn reconnect_recovers_from_a_refused_access_and_reports_all_requests() {
    let net = net(Stepping::Thread);
    let (near, far) = (net.near.host(CHUNK, LOCAL), net.far.host(CHUNK, LOCAL | REMOTE));
    near.put(0, &[7; 64]);
    let key = far.region().key().expect("key");
    let unknown = RemoteKey::new(Addressing::Virtual, Iova(0), 8, 1);
    let write = |key: &RemoteKey, context| {
        net.near.endpoint.write(&[near.slice(0, 8)], &[remote(key, 8)], net.peer, context)
    };
    for round in 0..3 {
        net.far.endpoint.receive(&[far.slice(8, 8)], None, 1).expect("receive");
        net.near.endpoint.receive(&[near.slice(8, 8)], None, 2).expect("receive");
        write(&unknown, 3).expect("post");
        write(&key, 4).expect("post");
        // One poll: the first write has failed, and nothing is flushed yet.
        let mut done = Vec::new();
        assert_eq!(net.near.cq.read(&mut done, 1).expect("read"), 1);
        let error = done.remove(0).result.expect_err("no region has the key");
        assert_eq!(error.kind(), ErrorKind::AccessDenied, "{error}");
        // The device writes no further completion before the reset.
        wire::misbehave(Misbehaviour { hangs: true, ..Misbehaviour::default() });
        net.near.endpoint.reconnect().expect("connect again");
        net.far.endpoint.reconnect().expect("connect again");
        let canceled = Err(ErrorKind::Canceled);
        assert_eq!(ended(&net.near), [(2, canceled), (4, canceled)], "round {round}");
        assert_eq!(ended(&net.far), [(1, canceled)], "round {round}");
        wire::misbehave(Misbehaviour::default());
        write(&key, 5).expect("post");
        let (mut here, _) = net.complete(1, 0);
        assert_eq!(here.remove(0).result.expect("success"), 8);
        assert_eq!(far.get(0, 8), [7; 8]);
        net.near.endpoint.send(&[near.slice(0, 8)], None, net.peer, 6).expect("post a message");
        net.far.endpoint.receive(&[far.slice(8, 8)], None, 7).expect("receive");
        let (_, mut there) = net.complete(1, 1);
        assert_eq!(there.remove(0).result.expect("success"), 8);
    }
    net.assert_idle();
}

/// MR-05: a connection that works is ended too, and a refused reset keeps the requests.
#[test]
fn reconnect_cancels_the_requests_of_a_connection_that_works() {
    let net = net(Stepping::Thread);
    let (near, far) = (net.near.host(CHUNK, LOCAL), net.far.host(CHUNK, LOCAL | REMOTE));
    let key = far.region().key().expect("key");
    let still = Misbehaviour { hangs: true, ..Misbehaviour::default() };
    wire::misbehave(still);
    let there = [remote(&key, 8)];
    net.near.endpoint.write(&[near.slice(0, 8)], &there, net.peer, 1).expect("post");
    wire::misbehave(Misbehaviour { refuses_resets: 5, ..still });
    let error = net.near.endpoint.reconnect().expect_err("no reset");
    assert_eq!(error.os_errno().map(|errno| errno.0), Some(5), "{error}");
    assert_eq!(ended(&net.near), [], "the NIC may still use the memory");
    wire::misbehave(still);
    net.near.endpoint.reconnect().expect("connect again");
    assert_eq!(ended(&net.near), [(1, Err(ErrorKind::Canceled))]);
    wire::misbehave(Misbehaviour::default());
    let lone = net.near.domain.open_endpoint(&EndpointAttr::new(&net.near.cq)).expect("open");
    let error = lone.reconnect().expect_err("never connected");
    assert_eq!(error.kind(), ErrorKind::BadState, "{error}");
    assert!(error.remedy_text().is_some_and(|text| text.contains("resolve")), "{error}");
}

/// MR-05: a reset also cancels staged requests of which no part was posted to the NIC.
#[test]
fn reset_cancels_staged_requests_that_wait_for_a_copy() {
    let net = net(Stepping::ByHand);
    let staged = net.near.device(&net.device, CHUNK, LOCAL).expect("stage device memory");
    let (host, far) = (net.near.host(8, LOCAL), net.far.host(CHUNK, LOCAL | REMOTE));
    staged.put(0, &[7; CHUNK as usize]);
    let key = far.region().key().expect("key");
    let there = [remote(&key, CHUNK)];
    let posts = wire::posts();
    net.near.endpoint.write(&[staged.slice(0, CHUNK)], &there, net.peer, 1).expect("post");
    // This request waits in the lane (queue of staged transfers) behind the staged request.
    let there = [remote(&key, 8)];
    net.near.endpoint.write(&[host.slice(0, 8)], &there, net.peer, 2).expect("post");
    assert_eq!((net.device.pending_copies(), wire::posts()), (1, posts), "only a copy has begun");
    net.near.endpoint.reconnect().expect("connect again");
    net.far.endpoint.reconnect().expect("connect again");
    while net.device.step() {}
    let mut done = Vec::new();
    while done.len() < 2 {
        net.near.cq.read(&mut done, 2).expect("read completions");
    }
    for (completion, context) in done.into_iter().zip(1..) {
        assert_eq!(completion.context, context);
        assert_eq!(completion.result.unwrap_err().kind(), ErrorKind::Canceled);
    }
    assert_eq!(wire::posts(), posts, "a request of the old connection was posted to the new one");
    assert_eq!(far.get(0, CHUNK), [0; CHUNK as usize]);
    net.assert_idle();
}

/// MR-05: the close of a staged region fails a transfer that waits for staging buffers.
#[test]
fn closed_region_of_a_waiting_transfer_is_not_accessed() {
    let net = net(Stepping::ByHand);
    let device = |chunks| net.near.device(&net.device, chunks * CHUNK, LOCAL).expect("stage");
    let (first, second) = (device(8), device(1));
    let far = net.far.host(8 * CHUNK, LOCAL | REMOTE);
    let key = far.region().key().expect("key");
    let write = |memory: &Mem, len, context| {
        let there = [remote(&key, len)];
        let posted = net.near.endpoint.write(&[memory.slice(0, len)], &there, net.peer, context);
        posted.expect("post");
    };
    write(&first, 8 * CHUNK, 1);
    let copies = net.device.pending_copies();
    write(&second, CHUNK, 2);
    assert_eq!(net.device.pending_copies(), copies, "the second transfer has no buffers yet");
    let Mem::Device(second) = second else { unreachable!("device memory") };
    drop(second.close().map_err(|rejected| rejected.error).expect("close"));
    let mut done = Vec::new();
    while done.len() < 2 {
        while net.device.step() {}
        net.near.cq.read(&mut done, 2).expect("read completions");
    }
    let second = done.remove(1);
    assert_eq!(second.context, 2);
    assert_eq!(second.result.expect_err("its region is closed").kind(), ErrorKind::NoRegion);
}

/// MW-07: a bind that waits behind a staged request is checked when it is posted. If the check
/// came later, the failed bind would end the connection.
#[test]
fn bind_behind_a_staged_request_is_checked_at_the_post() {
    let net = net(Stepping::ByHand);
    let staged = net.near.device(&net.device, CHUNK, LOCAL).expect("stage device memory");
    let (host, far) = (net.near.host(8, LOCAL), net.far.host(CHUNK, LOCAL | REMOTE));
    let key = far.region().key().expect("key");
    let there = [remote(&key, CHUNK)];
    net.near.endpoint.write(&[staged.slice(0, CHUNK)], &there, net.peer, 1).expect("post");
    let window = net.near.domain.alloc_type_2_window(Type2Kind::B).expect("allocate");
    let (access, addressing) = (Access::REMOTE_READ, Addressing::Virtual);
    for len in [9, 0] {
        let bind = Type2Bind { region: host.region(), offset: 0, len, access, addressing, tag: 1 };
        let refused = window.post_bind(&net.near.endpoint, &bind, 2).expect_err("a wrong length");
        assert!(refused.context_value("rule").is_some(), "{refused}");
    }
    while net.device.step() {}
    let (mut here, _) = net.complete(1, 0);
    assert_eq!(here.remove(0).result.expect("success"), CHUNK);
}

/// MR-05: a queue pair gets the number of one that another thread has just destroyed.
#[test]
fn endpoint_opened_amid_the_close_of_one_with_its_number_gets_its_completions() {
    let verbs = Verbs::builder().functions(wire::functions()).build().expect("start");
    wire::misbehave(Misbehaviour { completes_late: true, ..Misbehaviour::default() });
    let domain = fake::open(&verbs);
    let cq = domain.open_cq(8).expect("open a queue");
    let open = || Looped::open(&domain, &EndpointAttr::new(&cq));
    let (old, library, gate) = (open(), wire::Shared::of_this_thread(), Arc::new(Gate::default()));
    let new = thread::scope(|scope| {
        let closing = scope.spawn(|| {
            library.enter();
            hold(Call::DestroyPair, 1, &gate);
            old.close().map_err(|rejected| rejected.error)
        });
        while !gate.reached.load(Ordering::Acquire) && !closing.is_finished() {
            thread::yield_now();
        }
        let new = open();
        gate.open.store(true, Ordering::Release);
        closing.join().expect("no panic").expect("close");
        new
    });
    let region = domain.register(vec![0; 64], Access::all()).expect("register");
    let key = region.key().expect("key");
    let from = [region.slice(8, 8).expect("inside")];
    new.write(&from, &[remote(&key, 8)], new.peer, 1).expect("post");
    let mut done = Vec::new();
    let reads = (0..8).find(|_| cq.read(&mut done, 1).expect("read completions") == 1);
    assert!(reads.is_some(), "the completion of the new endpoint is lost");
    assert_eq!(done.remove(0).result.expect("write"), 8);
}

#[test]
fn infiniband_port_that_needs_a_global_route_header_connects_with_its_first_gid() {
    let verbs = Verbs::builder().functions(wire::functions()).build().expect("start");
    wire::misbehave(Misbehaviour { needs_route: true, ..Misbehaviour::default() });
    let domain = fake::open(&verbs);
    let cq = domain.open_cq(8).expect("open a queue");
    Looped::open(&domain, &EndpointAttr::new(&cq));
}

/// EVT-04: the NIC sends immediate data in network byte order.
#[test]
fn immediate_data_is_in_network_byte_order() {
    let net = net(Stepping::Thread);
    let (near, far) = (net.near.host(64, LOCAL), net.far.host(64, LOCAL | REMOTE));
    let key = far.region().key().expect("key");
    let (from, there) = ([near.slice(0, 8)], [remote(&key, 8)]);
    for (is_write, kind) in [(true, CompletionKind::RemoteWrite), (false, CompletionKind::Receive)]
    {
        net.far.endpoint.receive(&[far.slice(0, 8)], None, 1).expect("receive");
        let (near, peer) = (&net.near.endpoint, net.peer);
        if is_write {
            near.write_immediate(&from, &there, 0x0102_0304, peer, 2).expect("post");
        } else {
            near.send_immediate(&from, None, 0x0102_0304, peer, 2).expect("post");
        }
        assert_eq!(wire::immediate_bytes(), [1, 2, 3, 4]);
        let (_, mut there) = net.complete(1, 1);
        let received = there.remove(0);
        assert_eq!((received.kind, received.data), (kind, Some(0x0102_0304)));
    }
}

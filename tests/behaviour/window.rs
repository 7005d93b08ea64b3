//! Memory windows (InfiniBand 10.6.7).

use std::{any::Any, sync::Arc};

use hmem::{
    Access, Addressing, AuthKey, BindFlags, Endpoint, ErrorKind, Iova, MemoryRegion, MrFlags,
    MrMode, RegionState, RemoteKey, Result, Type1Window, Type2Bind, Type2Kind, Type2Window,
    counter::Counter,
    fabric::{self, MrAttr},
    loopback::NicCall,
    provider::{CompletionQueue, WindowState},
    transfer::{Completion, CompletionKind, PeerId},
};

use crate::{
    config::{Need, TestConfig, need, needs, over_configs},
    memory::{Bytes, pattern},
    net::{LOCAL, Net, REMOTE, Setup, mr_attr, open_endpoint},
};

const NEEDS: Need = need("mode RAW", "windows are refused there: MODE-04 shows it", |config| {
    !config.has(MrMode::RAW)
});
const UNBOUND: Need =
    need("mode ENDPOINT", "the region itself is bound to the queue pair there", |config| {
        !config.has(MrMode::ENDPOINT)
    });

const LOOPBACK: Need = need(
    "verbs",
    "provider-verbs/tests/window.rs shows the types that the device at hand has",
    TestConfig::is_loopback,
);

over_configs! {
    /// MW-01
    type_1_window_changes_its_key_at_each_bind: Pairwise, NEEDS, LOOPBACK;
    /// MW-01
    type_1_window_refuses_an_empty_range: Pairwise, NEEDS, LOOPBACK;
    /// MW-02
    type_2_window_binds_by_a_request_with_a_tag: Pairwise, NEEDS, LOOPBACK;
    /// MW-03
    type_2a_window_is_reached_through_its_queue_pair_only: Pairwise, NEEDS, UNBOUND, LOOPBACK;
    /// MW-03
    type_2b_window_does_not_keep_its_queue_pair_open: Pairwise, NEEDS, UNBOUND, LOOPBACK;
    /// MW-04
    invalidation_ends_the_key_but_not_the_window: Pairwise, NEEDS, LOOPBACK;
    /// MW-04, MW-10
    a_peer_invalidates_a_window_by_a_message: Pairwise, NEEDS, LOOPBACK;
    /// MW-04, MW-10
    a_peer_does_not_invalidate_a_type_1_window: Pairwise, NEEDS, LOOPBACK;
    /// MW-04, MW-10
    a_peer_invalidates_through_the_queue_pair_of_the_window_only: Pairwise, NEEDS, LOOPBACK;
    /// MW-05
    windows_have_their_own_rights: Pairwise, NEEDS, LOOPBACK;
    /// MW-06
    windows_may_overlap_and_keep_their_region_open: Pairwise, NEEDS, LOOPBACK;
    /// MW-07
    window_outside_its_region_or_domain_is_refused: Pairwise, NEEDS, LOOPBACK;
    /// MW-07
    refused_bind_names_its_call_and_its_values: Pairwise, NEEDS, LOOPBACK;
    /// MW-08
    binding_registers_and_exports_nothing: Pairwise, NEEDS, LOOPBACK;
    /// KEY-08
    a_window_is_reached_with_the_auth_key_of_its_region_only: Pairwise, NEEDS, LOOPBACK;
    /// KEY-08
    a_window_is_reached_through_the_endpoint_of_its_region_only: Pairwise, NEEDS, LOOPBACK,
        need("modes without ENDPOINT", "binding to an endpoint is refused there",
            |config| config.has(MrMode::ENDPOINT));
    /// KEY-08
    a_window_on_a_counted_region_needs_rma_event: Pairwise, NEEDS, LOOPBACK;
    /// EVT-02
    writes_and_atomics_through_a_window_count_once: Pairwise, NEEDS, LOOPBACK;
    /// MODE-04
    windows_are_refused_in_raw_mode: Pairwise,
        need("modes without RAW", "there are windows there: MW-01 and MW-02 show it", |config| {
            config.has(MrMode::RAW)
        });
}

struct Fixture {
    net: Net,
    memory: Bytes,
    region: MemoryRegion,
}

fn fixture(config: &TestConfig) -> Fixture {
    let net = Net::open(config);
    let memory = net.filled(&pattern(1, 4096));
    let region = net.expose(memory.range(), LOCAL | Access::REMOTE_READ | Access::MW_BIND);
    Fixture { net, memory, region }
}

impl Fixture {
    fn type_1(&self) -> Type1Window {
        self.net.target.domain.alloc_type_1_window().expect("allocate a window")
    }

    fn type_2(&self, kind: Type2Kind) -> Type2Window {
        self.net.target.domain.alloc_type_2_window(kind).expect("allocate a window")
    }

    /// Posts the bind of a type 2 window on the target's endpoint and waits for its completion.
    fn bind_2(
        &self,
        window: &Type2Window,
        (offset, len): (u64, u64),
        access: Access,
        addressing: Addressing,
        tag: u8,
    ) -> Result<RemoteKey> {
        let bind = Type2Bind { region: &self.region, offset, len, access, addressing, tag };
        let key = window.post_bind(&self.net.target.endpoint, &bind, 77)?;
        let completion = self.target_completion();
        assert_eq!((completion.context, completion.kind), (77, CompletionKind::BindWindow));
        completion.result.map(|_| key)
    }

    fn invalidate(&self, window: &Type2Window) -> Result<()> {
        window.post_invalidate(&self.net.target.endpoint, 78)?;
        let completion = self.target_completion();
        assert_eq!((completion.context, completion.kind), (78, CompletionKind::InvalidateWindow));
        completion.result.map(|_| ())
    }

    fn target_completion(&self) -> Completion {
        self.net.target.wait(&[&self.net.initiator])
    }

    /// Asserts that peers can neither read nor write with a key.
    fn assert_dead(&self, key: &RemoteKey) {
        let before = self.memory.all();
        let dead = self.net.seen(ErrorKind::InvalidKey);
        let error = self.net.push(key, 0, &[0xFF]).expect_err("a revoked key wrote");
        assert_eq!(error.kind(), dead, "{error}");
        assert_eq!(self.net.pull(key, 0, 1).expect_err("a revoked key read").kind(), dead);
        assert_eq!(self.memory.all(), before);
    }

    fn other_endpoint(&self) -> (Endpoint, Arc<dyn CompletionQueue>, PeerId) {
        let (endpoint, cq) = open_endpoint(&self.net.target.domain, true, None);
        let peer = self.net.initiator.endpoint.resolve(&endpoint.name()).expect("resolve");
        (endpoint, cq, peer)
    }
}

fn windows_are_refused_in_raw_mode(config: &TestConfig) {
    let f = fixture(config);
    let domain = &f.net.target.domain;
    let refused = |error: hmem::Error| {
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert_eq!(error.context_value("rule"), Some("no-raw-keys"), "{error}");
    };
    refused(domain.alloc_type_1_window().expect_err("a window without a raw key"));
    for kind in [Type2Kind::A, Type2Kind::B] {
        refused(domain.alloc_type_2_window(kind).expect_err("a window without a raw key"));
    }
    assert_eq!(f.net.live().windows, 0);
}

fn type_1_window_changes_its_key_at_each_bind(config: &TestConfig) {
    let f = fixture(config);
    let window = f.type_1();
    assert!(window.key().is_none());
    let first = window.bind(&f.region, 1000, 100, REMOTE).expect("bind");
    let base = f.memory.part(1000, 100).start();
    assert_eq!(
        (first.addressing(), first.base(), first.first_len()),
        (Addressing::Virtual, Iova(base.0), 100)
    );
    assert_eq!(window.key(), Some(first.clone()));
    assert_eq!(f.net.pull(&first, 0, 100).expect("read"), pattern(1, 4096)[1000..1100]);
    f.net.push(&first, 0, b"windowed").expect("write");
    assert_eq!(f.memory.get(1000, 8), b"windowed");
    for (offset, len) in [(100, 1), (99, 2), (u64::MAX, 1)] {
        assert_eq!(f.net.pull(&first, offset, len).unwrap_err().kind(), ErrorKind::OutOfBounds);
    }
    let second = window.bind(&f.region, 2000, 10, REMOTE).expect("bind again");
    assert_ne!(first.as_u64().unwrap(), second.as_u64().unwrap(), "the key did not change");
    f.assert_dead(&first);
    assert_eq!(f.net.pull(&second, 0, 10).expect("read"), pattern(1, 4096)[2000..2010]);
    window.unbind().expect("unbind");
    assert!(window.key().is_none());
    f.assert_dead(&second);
    assert_eq!(window.unbind().unwrap_err().kind(), ErrorKind::BadState);
    let third = window.bind(&f.region, 0, 8, REMOTE).expect("an unbound window binds again");
    f.net.push(&third, 0, &[1]).expect("write");
    drop(window);
    f.assert_dead(&third);
    assert_eq!(f.net.live().windows, 0);
    f.region.close().expect("close");
}

fn type_1_window_refuses_an_empty_range(config: &TestConfig) {
    let f = fixture(config);
    let window = f.type_1();
    let key = window.bind(&f.region, 0, 64, REMOTE).expect("bind");
    assert_eq!(window.bind(&f.region, 0, 0, REMOTE).unwrap_err().kind(), ErrorKind::ZeroLength);
    assert_eq!(f.net.pull(&key, 0, 64).expect("the binding stands").len(), 64);
}

fn type_2_window_binds_by_a_request_with_a_tag(config: &TestConfig) {
    let f = fixture(config);
    for kind in [Type2Kind::A, Type2Kind::B] {
        let window = f.type_2(kind);
        for (tag, addressing) in [(0x5A, Addressing::ZeroBased), (0xC3, Addressing::Virtual)] {
            let key = f.bind_2(&window, (500, 40), REMOTE, addressing, tag).expect("bind");
            assert_eq!(
                key.as_u64().unwrap() & 0xff,
                u64::from(tag),
                "the low 8 bits are the caller's"
            );
            let base = if addressing == Addressing::ZeroBased {
                0
            } else {
                f.memory.part(500, 1).start().0
            };
            assert_eq!((key.addressing(), key.base()), (addressing, Iova(base)));
            assert_eq!(f.net.pull(&key, 0, 40).expect("read"), pattern(1, 4096)[500..540]);
            assert_eq!(f.net.pull(&key, 40, 1).unwrap_err().kind(), ErrorKind::OutOfBounds);
            let again = f
                .bind_2(&window, (600, 40), REMOTE, addressing, tag + 1)
                .expect_err("rebound without invalidate");
            assert_eq!(again.kind(), ErrorKind::BadState);
            assert_eq!(
                f.net.pull(&key, 0, 40).expect("the first binding stands"),
                pattern(1, 4096)[500..540]
            );
            f.invalidate(&window).expect("invalidate");
            f.assert_dead(&key);
        }
        let empty = f.bind_2(&window, (500, 0), REMOTE, Addressing::Virtual, 9).unwrap_err();
        assert_eq!(empty.kind(), ErrorKind::ZeroLength);
        assert!(window.key().is_none());
    }
}

fn type_2a_window_is_reached_through_its_queue_pair_only(config: &TestConfig) {
    let mut f = fixture(config);
    let window = f.type_2(Type2Kind::A);
    let key = f.bind_2(&window, (0, 64), REMOTE, Addressing::Virtual, 1).expect("bind");
    f.net.pull(&key, 0, 64).expect("through the queue pair that it was bound with");
    let (other, _cq, peer) = f.other_endpoint();
    let bound = std::mem::replace(&mut f.net.peer, peer);
    f.net.pull(&key, 0, 64).expect_err("through another queue pair");
    f.net.push(&key, 0, &[1]).expect_err("through another queue pair");
    f.net.peer = bound;
    let first = std::mem::replace(&mut f.net.target.endpoint, other);
    let rejected = first.close().expect_err("a queue pair with a 2A window bound was destroyed");
    assert_eq!(rejected.error.kind(), ErrorKind::Busy);
    f.net.pull(&key, 0, 64).expect("it still works");
    drop(window);
    rejected.value.close().expect("once the window is gone");
}

fn type_2b_window_does_not_keep_its_queue_pair_open(config: &TestConfig) {
    let mut f = fixture(config);
    let window = f.type_2(Type2Kind::B);
    let key = f.bind_2(&window, (0, 64), REMOTE, Addressing::Virtual, 1).expect("bind");
    f.net.pull(&key, 0, 64).expect("through the queue pair that it was bound with");
    let (other, cq, peer) = f.other_endpoint();
    let bound = std::mem::replace(&mut f.net.peer, peer);
    f.net.pull(&key, 0, 64).expect_err("through another queue pair");
    f.net.peer = bound;
    let first = std::mem::replace(&mut f.net.target.endpoint, other);
    first.close().expect("a queue pair with a 2B window bound is destroyed");
    f.net.pull(&key, 0, 64).expect_err("the queue pair is gone");
    f.net.peer = peer;
    f.net.target.cq = cq;
    assert_eq!(window.state(), WindowState::Free);
    f.bind_2(&window, (0, 64), REMOTE, Addressing::Virtual, 2).expect("another queue pair");
    f.invalidate(&window).expect("the window stays usable");
    f.region.close().expect("nothing is bound");
}

fn invalidation_ends_the_key_but_not_the_window(config: &TestConfig) {
    let f = fixture(config);
    let window = f.type_2(Type2Kind::B);
    f.invalidate(&window).expect("a free window may be invalidated, which changes nothing");
    let first =
        f.bind_2(&window, (0, 64), REMOTE, Addressing::ZeroBased, 7).expect("free to valid");
    f.invalidate(&window).expect("valid to free");
    f.assert_dead(&first);
    f.invalidate(&window).expect("free already");
    let second =
        f.bind_2(&window, (64, 64), REMOTE, Addressing::ZeroBased, 8).expect("free to valid again");
    assert_eq!(
        first.as_u64().unwrap() >> 8,
        second.as_u64().unwrap() >> 8,
        "another window answered"
    );
    assert_eq!(f.net.pull(&second, 0, 64).expect("read"), pattern(1, 4096)[64..128]);
    f.assert_dead(&first);
    drop(window);
    f.assert_dead(&second);
}

fn a_peer_invalidates_a_window_by_a_message(config: &TestConfig) {
    let f = fixture(config);
    let window = f.type_2(Type2Kind::B);
    let key = f.bind_2(&window, (0, 64), REMOTE, Addressing::ZeroBased, 7).expect("bind");
    let (inbox, message) = (f.net.bytes(64), f.net.local(64, LOCAL));
    let inbox_region = f.net.expose(inbox.range(), LOCAL);
    let into = crate::net::segment(inbox.range(), Some(inbox_region.desc().expect("desc")));
    let receive = hmem::transfer::WorkRequest {
        operation: hmem::transfer::Operation::Receive { tag: None, from: None },
        local: &[into],
        peer: PeerId(0),
        context: 5,
    };
    // SAFETY: the memory outlives the transfer.
    unsafe { f.net.target.endpoint.post(&receive) }.expect("post");
    let send = hmem::transfer::Operation::Send { tag: None, invalidate: Some(&key) };
    f.net.transfer(send, &[message.segment(0, 16)]).expect("send");
    let received = f.target_completion();
    assert_eq!(received.result.expect("receive"), 16);
    assert_eq!(received.invalidated, Some(key.as_u64().expect("one key")), "the key is named");
    assert_eq!(received.data, None);
    f.assert_dead(&key);
    assert_eq!(window.state(), WindowState::Free);
    assert!(window.key().is_none());
    let second =
        f.bind_2(&window, (0, 8), REMOTE, Addressing::ZeroBased, 9).expect("the window stays");
    f.net.pull(&second, 0, 8).expect("read");
}

/// Sends a message that invalidates `key` from the initiator to `f.net.peer`.
fn send_invalidating(f: &Fixture, key: &RemoteKey) -> Result<u64> {
    let send = hmem::transfer::Operation::Send { tag: None, invalidate: Some(key) };
    f.net.transfer(send, &[])
}

fn a_peer_does_not_invalidate_a_type_1_window(config: &TestConfig) {
    let f = fixture(config);
    let window = f.type_1();
    let key = window.bind(&f.region, 0, 64, REMOTE).expect("bind");
    let error = send_invalidating(&f, &key).expect_err("a peer invalidated a type 1 window");
    assert_eq!(error.kind(), ErrorKind::BadState, "{error}");
    f.net.push(&key, 0, b"alive").expect("the refused invalidation changed nothing");
    assert_eq!(f.net.pull(&key, 0, 5).expect("read"), b"alive");
    let rejected = f.region.close().expect_err("the window is still bound");
    assert_eq!(rejected.error.kind(), ErrorKind::Busy);
}

fn a_peer_invalidates_through_the_queue_pair_of_the_window_only(config: &TestConfig) {
    let mut f = fixture(config);
    let (_other, _cq, foreign) = f.other_endpoint();
    for kind in [Type2Kind::A, Type2Kind::B] {
        let window = f.type_2(kind);
        let key = f.bind_2(&window, (0, 64), REMOTE, Addressing::ZeroBased, 7).expect("bind");
        let own = std::mem::replace(&mut f.net.peer, foreign);
        let error = send_invalidating(&f, &key)
            .expect_err("a window was invalidated through a foreign queue pair");
        assert_eq!(error.kind(), ErrorKind::AccessDenied, "{error}");
        f.net.peer = own;
        assert_eq!(f.net.pull(&key, 0, 64).expect("it is still bound").len(), 64);
        send_invalidating(&f, &key).expect("through the queue pair that it was bound with");
        f.assert_dead(&key);
    }
}

fn windows_have_their_own_rights(config: &TestConfig) {
    let f = fixture(config);
    let base = f.region.key().expect("key");
    let [reads, writes] = [Access::REMOTE_READ, Access::REMOTE_WRITE].map(|access| {
        let window = f.type_1();
        let key = window.bind(&f.region, 0, 64, access).expect("bind");
        (window, key)
    });
    // The region lets the NIC write (READ and RECV) and has no REMOTE_WRITE. A window may still
    // grant REMOTE_WRITE.
    f.net.push(&writes.1, 0, b"granted").expect("write");
    assert_eq!(f.memory.get(0, 7), b"granted");
    assert_eq!(f.net.pull(&writes.1, 0, 1).unwrap_err().kind(), ErrorKind::AccessDenied);
    assert_eq!(f.net.push(&reads.1, 0, &[1]).unwrap_err().kind(), ErrorKind::AccessDenied);
    assert_eq!(
        f.net.push(&base, 0, &[1]).unwrap_err().kind(),
        ErrorKind::AccessDenied,
        "the window widened its region"
    );
    assert_eq!(f.net.pull(&reads.1, 0, 7).expect("read"), b"granted");
    // A window gives access to memory that its region's own key does not reach.
    let sealed = f.net.expose(f.memory.part(0, 64), LOCAL | Access::MW_BIND);
    let key = reads.0.bind(&sealed, 0, 64, Access::REMOTE_READ).expect("bind");
    assert_eq!(f.net.pull(&key, 0, 7).expect("read"), b"granted");
    f.net.pull(&sealed.key().expect("key"), 0, 1).expect_err("the region's own key grants nothing");
    // If the region has no right that lets the NIC write, a window cannot grant writes.
    let read_only = Access::REMOTE_READ | Access::SEND | Access::WRITE | Access::MW_BIND;
    let read_only = f.net.expose(f.memory.part(0, 64), read_only);
    let error = reads.0.bind(&read_only, 0, 64, Access::REMOTE_WRITE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AccessDenied);
    assert_eq!(
        reads.0.bind(&f.region, 0, 8, Access::SEND).unwrap_err().kind(),
        ErrorKind::BadAccess
    );
    f.net.pull(&key, 0, 7).expect("a refused bind leaves the binding as it was");
}

fn windows_may_overlap_and_keep_their_region_open(config: &TestConfig) {
    let f = fixture(config);
    let one = f.type_1();
    let two = f.type_2(Type2Kind::B);
    let first = one.bind(&f.region, 0, 100, Access::REMOTE_WRITE).expect("bind");
    let second =
        f.bind_2(&two, (50, 100), Access::REMOTE_READ, Addressing::ZeroBased, 3).expect("bind");
    f.net.push(&first, 50, b"seen by both").expect("write");
    assert_eq!(f.net.pull(&second, 0, 12).expect("read"), b"seen by both");
    let rejected = f.region.close().expect_err("closed under two windows");
    assert_eq!(rejected.error.kind(), ErrorKind::Busy);
    one.unbind().expect("unbind");
    let rejected = rejected.value.close().expect_err("closed under one window");
    assert_eq!(f.net.pull(&second, 0, 12).expect("it still works"), b"seen by both");
    two.post_invalidate(&f.net.target.endpoint, 78).expect("invalidate");
    f.net.target.wait(&[&f.net.initiator]).result.expect("invalidated");
    rejected.value.close().expect("nothing is bound");
    assert_eq!((f.net.live().regions, f.net.live().windows), (0, 2));
}

fn window_outside_its_region_or_domain_is_refused(config: &TestConfig) {
    let f = fixture(config);
    let (one, two) = (f.type_1(), f.type_2(Type2Kind::A));
    for (offset, len) in [(4096, 1), (4095, 2), (0, 4097), (u64::MAX, 1), (1, u64::MAX)] {
        let error = one.bind(&f.region, offset, len, REMOTE).expect_err("outside its region");
        assert_eq!(error.kind(), ErrorKind::OutOfBounds);
        let error = f
            .bind_2(&two, (offset, len), REMOTE, Addressing::Virtual, 1)
            .expect_err("outside its region");
        assert_eq!(error.kind(), ErrorKind::OutOfBounds);
    }
    let foreign = f.net.local(64, LOCAL);
    let error = one.bind(&foreign.region, 0, 8, REMOTE).expect_err("a region of another domain");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let plain = f.net.expose(f.memory.range(), LOCAL | REMOTE);
    let error = one.bind(&plain, 0, 8, REMOTE).expect_err("a region without MW_BIND");
    assert_eq!(error.kind(), ErrorKind::AccessDenied);
    assert_eq!(error.context_value("rule"), Some("region-allows-windows"), "{error}");
    let bind = Type2Bind {
        region: &plain,
        offset: 0,
        len: 8,
        access: REMOTE,
        addressing: Addressing::Virtual,
        tag: 1,
    };
    let posted = two.post_bind(&f.net.target.endpoint, &bind, 79);
    let error = posted.expect_err("a region without MW_BIND");
    assert_eq!(error.context_value("rule"), Some("region-allows-windows"), "{error}");
    assert!(one.key().is_none() && two.key().is_none());
    f.region.close().expect("nothing was bound");
}

/// The provider refuses the bind, and the error names the public call and the values of the bind.
fn refused_bind_names_its_call_and_its_values(config: &TestConfig) {
    let f = fixture(config);
    let (one, two) = (f.type_1(), f.type_2(Type2Kind::B));
    let range = f.region.range().to_string();
    let check = |error: hmem::Error, call, rule, [offset, len]: [&str; 2]| {
        assert_eq!(error.operation(), call, "{error}");
        let access = REMOTE.to_string();
        for (name, value) in [
            ("rule", rule),
            ("offset", offset),
            ("length", len),
            ("access", access.as_str()),
            ("region", range.as_str()),
        ] {
            assert_eq!(error.context_value(name), Some(value), "{error}");
        }
    };
    let refused = one.bind(&f.region, 4095, 2, REMOTE).expect_err("outside its region");
    check(refused, "bind window", "inside-region", ["4095", "2"]);
    let post = |part| f.bind_2(&two, part, REMOTE, Addressing::Virtual, 1);
    let refused = post((4095, 2)).expect_err("outside its region");
    check(refused, "post bind window", "inside-region", ["4095", "2"]);
    let refused = post((8, 0)).expect_err("no bytes");
    check(refused, "post bind window", "type-2-has-length", ["8", "0"]);
    post((0, 8)).expect("bind");
    let refused = post((0, 8)).expect_err("bound already");
    check(refused, "post bind window", "binds-when-free", ["0", "8"]);
    let refused = one.unbind().expect_err("not bound");
    assert_eq!(refused.operation(), "unbind window", "{refused}");
    let refused = f.region.grant(&f.net.target.endpoint, 4095..4097, REMOTE);
    assert_eq!(refused.expect_err("outside its region").operation(), "grant");
}

fn binding_registers_and_exports_nothing(config: &TestConfig) {
    let f = fixture(config);
    let calls = || f.net.device.as_ref().map(|device| device.stats());
    let registered =
        |net: &Net| (net.live().regions, net.live().page_registrations, net.live().bytes);
    let one = f.type_1();
    let two = f.type_2(Type2Kind::B);
    let (before, calls_before) = (registered(&f.net), calls());
    f.net.faults.start_counting();
    for round in 0..300 {
        let key = one.bind(&f.region, round, 64, REMOTE).expect("bind");
        assert_eq!(key.first_len(), 64);
        f.bind_2(&two, (round, 64), REMOTE, Addressing::Virtual, round as u8).expect("bind");
        f.invalidate(&two).expect("invalidate");
    }
    one.unbind().expect("unbind");
    for call in [NicCall::Register, NicCall::RegisterSub, NicCall::Deregister, NicCall::Refresh] {
        assert_eq!(f.net.faults.calls(call), 0, "binding made the provider do {call:?}");
    }
    assert_eq!(registered(&f.net), before);
    assert_eq!(calls(), calls_before, "binding called the device's iface");
}

/// Binds a 64-byte window of type 1 and one of type 2B to `region`. Returns each window with its
/// key.
fn windows_on(f: &Fixture, region: &MemoryRegion) -> [(Box<dyn Any>, RemoteKey); 2] {
    let one = f.type_1();
    let one_key = one.bind(region, 0, 64, REMOTE).expect("bind");
    let two = f.type_2(Type2Kind::B);
    let addressing = Addressing::ZeroBased;
    let bind = Type2Bind { region, offset: 0, len: 64, access: REMOTE, addressing, tag: 5 };
    let two_key = two.post_bind(&f.net.target.endpoint, &bind, 77).expect("post a bind");
    f.target_completion().result.expect("bind");
    [(Box::new(one), one_key), (Box::new(two), two_key)]
}

fn a_window_is_reached_with_the_auth_key_of_its_region_only(config: &TestConfig) {
    let (ours, theirs) = (AuthKey(b"ours".to_vec()), AuthKey(b"theirs".to_vec()));
    for initiators in [&ours, &theirs] {
        let mut setup = Setup::of(config);
        setup.target.auth_key = ours.clone();
        setup.initiator.auth_key = ours.clone();
        setup.initiator_key = Some(initiators.clone());
        let net = setup.open();
        let memory = net.filled(&pattern(1, 4096));
        let ranges = [memory.range()];
        let attr = mr_attr(&ranges, LOCAL | Access::REMOTE_READ | Access::MW_BIND);
        let region = net.try_expose(&attr, MrFlags::empty()).expect("register");
        let guarded = MrAttr { auth_key: Some(&theirs), ..attr };
        let guarded = net.try_expose(&guarded, MrFlags::empty()).expect("register");
        let f = Fixture { net, memory, region };
        for (region, reached) in
            [(&f.region, initiators == &ours), (&guarded, initiators == &theirs)]
        {
            for (_window, key) in windows_on(&f, region) {
                f.memory.put(0, &pattern(1, 4096));
                let written = f.net.push(&key, 0, &[1; 8]);
                let read = f.net.pull(&key, 0, 8);
                if reached {
                    written.expect("write with the region's authorization key");
                    assert_eq!(read.expect("read"), [1; 8]);
                } else {
                    for error in [written.map(|_| ()), read.map(|_| ())].map(Result::unwrap_err) {
                        assert_eq!(error.kind(), ErrorKind::AccessDenied, "{error}");
                    }
                    assert_eq!(f.memory.all(), pattern(1, 4096));
                }
            }
        }
    }
}

fn a_window_is_reached_through_the_endpoint_of_its_region_only(config: &TestConfig) {
    let mut f = fixture(config);
    let window = f.type_1();
    let key = window.bind(&f.region, 0, 64, REMOTE).expect("bind");
    let (_other, _cq, foreign) = f.other_endpoint();
    let own = std::mem::replace(&mut f.net.peer, foreign);
    for error in [f.net.push(&key, 0, &[1]).map(|_| ()), f.net.pull(&key, 0, 1).map(|_| ())] {
        let error = error.expect_err("reached through an endpoint that the region is not bound to");
        assert_eq!(error.kind(), ErrorKind::AccessDenied, "{error}");
    }
    assert_eq!(f.memory.all(), pattern(1, 4096));
    f.net.peer = own;
    f.net.push(&key, 0, &[1]).expect("through the region's endpoint");
}

/// Creates a fixture with a counter of remote writes bound to its region.
fn counted(config: &TestConfig, rma_event: bool) -> (Fixture, Arc<Counter>) {
    let mut setup = Setup::of(config);
    setup.rma_event = rma_event;
    let net = setup.open();
    let memory = net.filled(&pattern(1, 4096));
    let ranges = [memory.range()];
    let access = LOCAL | REMOTE | Access::MW_BIND;
    let attr = mr_attr(&ranges, access).key(net.fresh_key());
    let region = fabric::regattr(&net.target.domain, &attr, MrFlags::RMA_EVENT).expect("register");
    let counter = Arc::new(Counter::new());
    region.bind_counter(&counter, BindFlags::REMOTE_WRITE).expect("bind the counter");
    if config.has(MrMode::ENDPOINT) {
        region.bind_endpoint(&net.target.endpoint).expect("bind the endpoint");
    }
    if region.state() == RegionState::Disabled {
        region.enable().expect("enable");
    }
    (Fixture { net, memory, region }, counter)
}

fn a_window_on_a_counted_region_needs_rma_event(config: &TestConfig) {
    let (f, counter) = counted(config, false);
    for (_window, key) in windows_on(&f, &f.region) {
        let error = f.net.push(&key, 0, &[1]).expect_err("an access that cannot be counted");
        assert_eq!(error.kind(), ErrorKind::AccessDenied, "{error}");
    }
    assert_eq!((f.memory.all(), counter.value()), (pattern(1, 4096), 0));
}

fn writes_and_atomics_through_a_window_count_once(config: &TestConfig) {
    let (f, counter) = counted(config, true);
    let mut expected = 0;
    for (_window, key) in windows_on(&f, &f.region) {
        for _ in 0..3 {
            f.net.push(&key, 0, &[1; 32]).expect("write");
            expected += 1;
            assert_eq!(counter.value(), expected);
        }
        if (needs::ATOMICS.met)(config) {
            f.net.fetch_add(&key, 8, 1).expect("atomic");
            expected += 1;
        }
        f.net.pull(&key, 0, 8).expect("reads are not counted");
        f.net.push(&key, 64, &[1]).expect_err("outside the window");
        assert_eq!(counter.value(), expected);
    }
}

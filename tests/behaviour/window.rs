//! MW-01 to MW-07: memory windows (InfiniBand 10.6.7).

use std::sync::Arc;

use hmem::{
    Access, Addressing, Endpoint, ErrorKind, Iova, MemoryRegion, MemoryWindow, MrMode, RemoteKey,
    Result,
    provider::{CompletionQueue, WindowType},
    transfer::{Completion, CompletionKind, PeerId},
};

use crate::{
    memory::{Bytes, pattern},
    net::{LOCAL, Net, REMOTE, open_endpoint},
    world::{Need, World, need, needs, over_worlds},
};

const NEEDS: Need = needs::KEYS_AT_HAND;
const UNBOUND: Need =
    need("mode ENDPOINT", "the region itself is bound to the queue pair there", |world| {
        !world.has(MrMode::ENDPOINT)
    });

const LOOPBACK: Need = need(
    "verbs",
    "p2p/tests/verbs_window.rs shows the types that the device at hand has",
    World::is_loopback,
);

over_worlds! {
    mw_01_type_1_binds_by_a_call_and_turns_its_key: Pairs, NEEDS, LOOPBACK;
    mw_01_type_1_refuses_what_type_2_does: Pairs, NEEDS, LOOPBACK;
    mw_02_type_2_binds_by_a_request_with_the_callers_tag: Pairs, NEEDS, LOOPBACK;
    mw_03_2a_is_reached_through_its_queue_pair_only: Pairs, NEEDS, UNBOUND, LOOPBACK;
    mw_03_2b_lets_its_queue_pair_go: Pairs, NEEDS, UNBOUND, LOOPBACK;
    mw_04_invalidation_kills_the_key_and_keeps_the_window: Pairs, NEEDS, LOOPBACK;
    mw_04_a_peer_invalidates_by_sending: Pairs, NEEDS, LOOPBACK;
    mw_05_windows_carry_rights_of_their_own: Pairs, NEEDS, LOOPBACK;
    mw_06_windows_overlap_and_hold_their_region: Pairs, NEEDS, LOOPBACK;
    mw_07_outside_the_region_or_on_anothers_is_refused: Pairs, NEEDS, LOOPBACK;
}

struct Fixture {
    net: Net,
    memory: Bytes,
    region: MemoryRegion,
}

fn fixture(world: &World) -> Fixture {
    let net = Net::open(world);
    let memory = net.filled(&pattern(1, 4096));
    let region = net.expose(memory.range(), LOCAL | Access::REMOTE_READ);
    Fixture { net, memory, region }
}

impl Fixture {
    fn window(&self, kind: WindowType) -> MemoryWindow {
        self.net.target.domain.alloc_window(kind).expect("allocate a window")
    }

    /// Posts a bind to the target's endpoint and waits for it.
    fn bind_2(
        &self,
        window: &MemoryWindow,
        (offset, len): (u64, u64),
        access: Access,
        addressing: Addressing,
        tag: u8,
    ) -> Result<RemoteKey> {
        let endpoint = &self.net.target.endpoint;
        let key =
            window.post_bind(endpoint, &self.region, (offset, len), access, addressing, tag, 77)?;
        let completion = self.target_completion();
        assert_eq!((completion.context, completion.kind), (77, CompletionKind::BindWindow));
        completion.result.map(|_| key)
    }

    fn invalidate(&self, window: &MemoryWindow) -> Result<()> {
        window.post_invalidate(&self.net.target.endpoint, 78)?;
        let completion = self.target_completion();
        assert_eq!((completion.context, completion.kind), (78, CompletionKind::InvalidateWindow));
        completion.result.map(|_| ())
    }

    fn target_completion(&self) -> Completion {
        self.net.target.wait(&[&self.net.initiator])
    }

    fn dead(&self, key: &RemoteKey) {
        let before = self.memory.all();
        let dead = self.net.seen(ErrorKind::InvalidKey);
        let error = self.net.push(key, 0, &[0xFF]).expect_err("a dead key wrote");
        assert_eq!(error.kind(), dead, "{error}");
        assert_eq!(self.net.pull(key, 0, 1).expect_err("a dead key read").kind(), dead);
        assert_eq!(self.memory.all(), before);
    }

    fn other_endpoint(&self) -> (Endpoint, Arc<dyn CompletionQueue>, PeerId) {
        let (endpoint, cq) = open_endpoint(&self.net.target.domain, true, None);
        let peer = self.net.initiator.endpoint.resolve(&endpoint.name()).expect("resolve");
        (endpoint, cq, peer)
    }
}

fn mw_01_type_1_binds_by_a_call_and_turns_its_key(world: &World) {
    let f = fixture(world);
    let window = f.window(WindowType::One);
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
    assert_ne!(first.as_u64().unwrap(), second.as_u64().unwrap(), "the key did not turn");
    f.dead(&first);
    assert_eq!(f.net.pull(&second, 0, 10).expect("read"), pattern(1, 4096)[2000..2010]);
    window.unbind().expect("unbind");
    assert!(window.key().is_none());
    f.dead(&second);
    assert_eq!(window.unbind().unwrap_err().kind(), ErrorKind::BadState);
    let third = window.bind(&f.region, 0, 8, REMOTE).expect("an unbound window binds again");
    f.net.push(&third, 0, &[1]).expect("write");
    drop(window);
    f.dead(&third);
    assert_eq!(f.net.live().windows, 0);
    f.region.close().expect("close");
}

fn mw_01_type_1_refuses_what_type_2_does(world: &World) {
    let f = fixture(world);
    let window = f.window(WindowType::One);
    let key = window.bind(&f.region, 0, 64, REMOTE).expect("bind");
    let endpoint = &f.net.target.endpoint;
    assert_eq!(window.post_invalidate(endpoint, 1).unwrap_err().kind(), ErrorKind::BadState);
    let posted = window.post_bind(endpoint, &f.region, (0, 8), REMOTE, Addressing::ZeroBased, 1, 1);
    assert_eq!(posted.unwrap_err().kind(), ErrorKind::BadState);
    assert_eq!(window.bind(&f.region, 0, 0, REMOTE).unwrap_err().kind(), ErrorKind::ZeroLength);
    assert_eq!(f.net.pull(&key, 0, 64).expect("none of this touched the binding").len(), 64);
}

fn mw_02_type_2_binds_by_a_request_with_the_callers_tag(world: &World) {
    let f = fixture(world);
    for kind in [WindowType::TwoA, WindowType::TwoB] {
        let window = f.window(kind);
        assert_eq!(window.bind(&f.region, 0, 8, REMOTE).unwrap_err().kind(), ErrorKind::BadState);
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
            f.dead(&key);
        }
        let empty = f.bind_2(&window, (500, 0), REMOTE, Addressing::Virtual, 9).unwrap_err();
        assert_eq!(empty.kind(), ErrorKind::ZeroLength);
        assert!(window.key().is_none());
    }
}

fn mw_03_2a_is_reached_through_its_queue_pair_only(world: &World) {
    let mut f = fixture(world);
    let window = f.window(WindowType::TwoA);
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
    f.net.pull(&key, 0, 64).expect("it works on");
    drop(window);
    rejected.value.close().expect("once the window is gone");
}

fn mw_03_2b_lets_its_queue_pair_go(world: &World) {
    let mut f = fixture(world);
    let window = f.window(WindowType::TwoB);
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
    f.invalidate(&window)
        .expect("the window can be invalidated through another queue pair of its domain");
    f.region.close().expect("nothing is bound");
}

fn mw_04_invalidation_kills_the_key_and_keeps_the_window(world: &World) {
    let f = fixture(world);
    let window = f.window(WindowType::TwoB);
    f.invalidate(&window).expect("a free window may be invalidated, which changes nothing");
    let first =
        f.bind_2(&window, (0, 64), REMOTE, Addressing::ZeroBased, 7).expect("free to valid");
    f.invalidate(&window).expect("valid to free");
    f.dead(&first);
    f.invalidate(&window).expect("free already");
    let second =
        f.bind_2(&window, (64, 64), REMOTE, Addressing::ZeroBased, 8).expect("free to valid again");
    assert_eq!(
        first.as_u64().unwrap() >> 8,
        second.as_u64().unwrap() >> 8,
        "another window answered"
    );
    assert_eq!(f.net.pull(&second, 0, 64).expect("read"), pattern(1, 4096)[64..128]);
    f.dead(&first);
    drop(window);
    f.dead(&second);
}

fn mw_04_a_peer_invalidates_by_sending(world: &World) {
    let f = fixture(world);
    let window = f.window(WindowType::TwoB);
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
    assert_eq!(f.target_completion().result.expect("receive"), 16);
    f.dead(&key);
    window.invalidated_by_peer();
    let second =
        f.bind_2(&window, (0, 8), REMOTE, Addressing::ZeroBased, 9).expect("the window stays");
    f.net.pull(&second, 0, 8).expect("read");
}

fn mw_05_windows_carry_rights_of_their_own(world: &World) {
    let f = fixture(world);
    let base = f.region.key().expect("key");
    let [reads, writes] = [Access::REMOTE_READ, Access::REMOTE_WRITE].map(|access| {
        let window = f.window(WindowType::One);
        let key = window.bind(&f.region, 0, 64, access).expect("bind");
        (window, key)
    });
    // The region has local write and no remote write: a window may still grant it.
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
    // A window reaches what its region's own key does not.
    let sealed = f.net.expose(f.memory.part(0, 64), LOCAL);
    let key = reads.0.bind(&sealed, 0, 64, Access::REMOTE_READ).expect("bind");
    assert_eq!(f.net.pull(&key, 0, 7).expect("read"), b"granted");
    f.net.pull(&sealed.key().expect("key"), 0, 1).expect_err("the region's own key grants nothing");
    // Without local write there is nothing to grant.
    let read_only =
        f.net.expose(f.memory.part(0, 64), Access::REMOTE_READ | Access::SEND | Access::WRITE);
    let error = reads.0.bind(&read_only, 0, 64, Access::REMOTE_WRITE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AccessDenied);
    assert_eq!(
        reads.0.bind(&f.region, 0, 8, Access::SEND).unwrap_err().kind(),
        ErrorKind::BadAccess
    );
    f.net.pull(&key, 0, 7).expect("a refused bind leaves the binding as it was");
}

fn mw_06_windows_overlap_and_hold_their_region(world: &World) {
    let f = fixture(world);
    let one = f.window(WindowType::One);
    let two = f.window(WindowType::TwoB);
    let first = one.bind(&f.region, 0, 100, Access::REMOTE_WRITE).expect("bind");
    let second =
        f.bind_2(&two, (50, 100), Access::REMOTE_READ, Addressing::ZeroBased, 3).expect("bind");
    f.net.push(&first, 50, b"seen by both").expect("write");
    assert_eq!(f.net.pull(&second, 0, 12).expect("read"), b"seen by both");
    let rejected = f.region.close().expect_err("closed under two windows");
    assert_eq!(rejected.error.kind(), ErrorKind::Busy);
    one.unbind().expect("unbind");
    let rejected = rejected.value.close().expect_err("closed under one window");
    assert_eq!(f.net.pull(&second, 0, 12).expect("it works on"), b"seen by both");
    two.post_invalidate(&f.net.target.endpoint, 78).expect("invalidate");
    f.net.target.wait(&[&f.net.initiator]).result.expect("invalidated");
    rejected.value.close().expect("nothing is bound");
    assert_eq!((f.net.live().regions, f.net.live().windows), (0, 2));
}

fn mw_07_outside_the_region_or_on_anothers_is_refused(world: &World) {
    let f = fixture(world);
    let (one, two) = (f.window(WindowType::One), f.window(WindowType::TwoA));
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
    assert!(one.key().is_none() && two.key().is_none());
    f.region.close().expect("nothing was bound");
}

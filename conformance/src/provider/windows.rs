//! Memory windows (InfiniBand 10.6.7).

use std::{mem, ops::Deref, sync::Arc};

use hmem_core::{
    Access, Addressing, AuthKey, Endpoint, Error, ErrorKind, Iova, MemoryRegion, MrFlags,
    RemoteKey, Result, Type1Window, Type2Bind, Type2Kind, Type2Window,
    counter::Counter,
    fabric::MrAttr,
    provider::{CompletionQueue, EndpointAttr, WindowBind, WindowState, WindowType},
    transfer::{CompletionKind, Operation, PeerId},
};

use super::{
    case::Case,
    link::CaseLink,
    regions::{assert_busy, assert_busy_past_the_domain},
    revocations::revoke,
};
use crate::link::{Bytes, Exposed, LOCAL, REMOTE, mr_attr, open_endpoint, segment};
use crate::{
    bytes::{assert_bytes, pattern},
    control::Call,
    trial::{Outcome, assert_kind, skip},
};

/// Returns the window types of the NIC.
fn window_types(link: &CaseLink) -> Vec<WindowType> {
    let windows = link.target.domain.provider_domain().windows();
    windows.expect("the NIC has windows").window_types().to_vec()
}

/// A memory window of type 1 or type 2.
enum Window {
    One(Type1Window),
    Two(Type2Window),
}

impl Window {
    fn alloc(link: &CaseLink, kind: WindowType) -> Self {
        let domain = &link.target.domain;
        match kind {
            WindowType::One => domain.alloc_type_1_window().map(Self::One),
            WindowType::TwoA => domain.alloc_type_2_window(Type2Kind::A).map(Self::Two),
            WindowType::TwoB => domain.alloc_type_2_window(Type2Kind::B).map(Self::Two),
        }
        .expect("allocate a window")
    }

    fn bind(&self, link: &CaseLink, region: &MemoryRegion, (offset, len): (u64, u64)) -> RemoteKey {
        match self {
            Self::One(window) => window.bind(region, offset, len, REMOTE).expect("bind"),
            Self::Two(window) => {
                let addressing = Addressing::Virtual;
                let bind = Type2Bind { region, offset, len, access: REMOTE, addressing, tag: 7 };
                bind_2(link, window, &bind).expect("bind")
            }
        }
    }

    fn unbind(&self, link: &CaseLink) {
        match self {
            Self::One(window) => window.unbind().expect("unbind"),
            Self::Two(window) => invalidate(link, window).expect("invalidate"),
        }
    }
}

/// Posts the bind of a type 2 window on the target's endpoint and waits for its completion.
fn bind_2(link: &CaseLink, window: &Type2Window, bind: &Type2Bind<'_>) -> Result<RemoteKey> {
    let key = window.post_bind(&link.target.endpoint, bind, 77)?;
    let completion = link.received();
    assert_eq!((completion.context, completion.kind), (77, CompletionKind::BindWindow));
    completion.result.map(|_| key)
}

/// Posts the invalidation of a type 2 window and waits for its completion.
fn invalidate(link: &CaseLink, window: &Type2Window) -> Result<()> {
    window.post_invalidate(&link.target.endpoint, 78)?;
    let completion = link.received();
    assert_eq!((completion.context, completion.kind), (78, CompletionKind::InvalidateWindow));
    completion.result.map(drop)
}

pub(super) fn window_is_reached_until_it_is_invalidated(case: &Case) {
    let link = CaseLink::open(case);
    for kind in window_types(&link) {
        let mut expected = pattern(1, 4096);
        let memory = link.filled(&expected);
        let region = link.expose(memory.range(), LOCAL | Access::MW_BIND);
        let window = Window::alloc(&link, kind);
        let key = window.bind(&link, &region, (1000, 50));
        let written = link.push(&key, 0, &[0xAA; 50]);
        written.unwrap_or_else(|error| panic!("write through {kind:?}: {error}"));
        expected[1000..1050].fill(0xAA);
        assert_bytes(&memory.all(), &expected, &format!("written through {kind:?}"));
        window.unbind(&link);
        link.assert_dead(&key, 0, ErrorKind::InvalidKey, "an access through an unbound window");
        assert_bytes(&memory.all(), &expected, "the region after refused accesses");
    }
}

pub(super) fn window_over_revoked_memory_is_refused_and_unbinds(case: &Case) -> Outcome {
    let link = CaseLink::open(case);
    for kind in window_types(&link) {
        let memory = link.filled(&[7; 4096]);
        let region = link.expose(memory.range(), LOCAL | Access::MW_BIND);
        let window = Window::alloc(&link, kind);
        let key = window.bind(&link, &region, (1000, 50));
        link.push(&key, 0, &[7; 50]).expect("write through the window");
        revoke(&link, memory.range())?;
        let access = format!("an access through {kind:?} of revoked memory");
        link.assert_dead(&key, 0, ErrorKind::InvalidKey, &access);
        window.unbind(&link);
        region.close().expect("close the region");
        assert_bytes(&memory.all(), &[7; 4096], "revoked memory");
    }
    Ok(())
}

pub(super) fn nothing_is_reached_outside_a_window(case: &Case) -> Outcome {
    let link = CaseLink::open(case);
    let windows = link.target.domain.provider_domain().windows();
    if !windows.expect("the NIC has windows").enforces_bounds() {
        return skip("the NIC does not enforce the bounds of windows, and says so");
    }
    for kind in window_types(&link) {
        let memory = link.filled(&pattern(1, 4096));
        let region = link.expose(memory.range(), LOCAL | Access::MW_BIND);
        let window = Window::alloc(&link, kind);
        let key = window.bind(&link, &region, (1000, 50));
        for (offset, len) in [(50, 1), (49, 2), (u64::MAX, 1), (u64::MAX, 2)] {
            let written = link.push(&key, offset, &[0xFF; 2][..len]);
            case.assert_refused(written, ErrorKind::OutOfBounds, "a write outside the window");
            let read = link.pull(&key, offset, len as u64);
            case.assert_refused(read, ErrorKind::OutOfBounds, "a read outside the window");
        }
        assert_bytes(&memory.all(), &pattern(1, 4096), "the region after refused accesses");
        window.unbind(&link);
    }
    Ok(())
}

pub(super) fn region_with_a_bound_window_is_busy(case: &Case) {
    let link = CaseLink::open(case);
    for kind in window_types(&link) {
        let memory = link.filled(&pattern(1, 4096));
        let region = link.expose(memory.range(), LOCAL | REMOTE | Access::MW_BIND);
        let window = Window::alloc(&link, kind);
        let _key = window.bind(&link, &region, (0, 64));
        let region = assert_busy(&link, region);
        assert_busy_past_the_domain(&link, &region);
        window.unbind(&link);
        region.close().expect("close the region");
        assert_eq!(link.live().regions, 0);
    }
}

/// Tests that the provider itself refuses windows that exceed their region in range or rights. Safe
/// code can call the provider's facet directly, without the checks of a domain.
pub(super) fn window_bound_past_the_domain_gets_no_more_than_its_region(case: &Case) {
    let link = CaseLink::open(case);
    let (read, write) = (Access::REMOTE_READ, Access::REMOTE_WRITE);
    let types = window_types(&link);
    let nic = link.target.domain.provider_domain();
    let windows = nic.windows().expect("the NIC has windows");
    let transport = nic.transport().expect("the NIC transfers");
    let cq = transport.open_cq(8).expect("open a completion queue");
    let endpoint = transport.open_endpoint(&EndpointAttr::new(&cq)).expect("open an endpoint");
    endpoint.resolve(&endpoint.name()).expect("connect the endpoint to itself");
    let read_only = link.target.register(pattern(1, 4096), Access::WRITE | Access::MW_BIND);
    let without = link.target.register(pattern(1, 4096), LOCAL);
    for (region, offset, len, access, kind) in [
        (&read_only, 4096, 1, read, ErrorKind::OutOfBounds),
        (&read_only, 4095, 2, read, ErrorKind::OutOfBounds),
        (&read_only, 1, u64::MAX, read, ErrorKind::OutOfBounds),
        (&read_only, u64::MAX, 2, read, ErrorKind::OutOfBounds),
        (&read_only, 0, 8, write, ErrorKind::AccessDenied),
        (&without, 0, 8, read, ErrorKind::AccessDenied),
    ] {
        let region = region.provider_region().expect("handle");
        let what = format!("a window of {len} bytes at {offset} with {access}");
        for window_type in &types {
            let window = windows.alloc_window(*window_type).expect("allocate a window");
            let addressing = Addressing::Virtual;
            let bind = WindowBind { region, offset, len, access, addressing };
            let refused = match window_type {
                WindowType::One => windows.bind_window(window, &bind).map(drop),
                _ => windows.bind_window_now(&*endpoint, window, &bind, 3),
            };
            let error = refused.expect_err(&what);
            if !error.is_unsupported() {
                assert_kind(&error, kind, &what);
            }
            windows.free_window(window).expect("free");
        }
    }
    for region in [read_only, without] {
        region.close().expect("a refused window depends on no region");
    }
}

struct Fixture<R = Exposed> {
    link: CaseLink,
    memory: Bytes,
    region: R,
}

fn fixture(case: &Case) -> Fixture {
    let link = CaseLink::open(case);
    let memory = link.filled(&pattern(1, 4096));
    let region = link.expose(memory.range(), LOCAL | Access::REMOTE_READ | Access::MW_BIND);
    Fixture { link, memory, region }
}

impl<R: Deref<Target = MemoryRegion>> Fixture<R> {
    fn type_1(&self) -> Type1Window {
        self.link.target.domain.alloc_type_1_window().expect("allocate a window")
    }

    fn type_2(&self, kind: Type2Kind) -> Type2Window {
        self.link.target.domain.alloc_type_2_window(kind).expect("allocate a window")
    }

    fn bind_2(
        &self,
        window: &Type2Window,
        (offset, len): (u64, u64),
        access: Access,
        addressing: Addressing,
        tag: u8,
    ) -> Result<RemoteKey> {
        let bind = Type2Bind { region: &self.region, offset, len, access, addressing, tag };
        bind_2(&self.link, window, &bind)
    }

    fn invalidate(&self, window: &Type2Window) -> Result<()> {
        invalidate(&self.link, window)
    }

    #[track_caller]
    fn assert_dead(&self, key: &RemoteKey) {
        self.link.assert_revoked(key, &self.memory);
    }

    fn other_endpoint(&self) -> (Endpoint, Arc<dyn CompletionQueue>, PeerId) {
        let (endpoint, cq) =
            open_endpoint(&self.link.target.domain, true, None).expect("open an endpoint");
        let peer = self.link.initiator.endpoint.resolve(&endpoint.name()).expect("resolve");
        (endpoint, cq, peer)
    }
}

pub(super) fn windows_are_refused_in_raw_mode(case: &Case) {
    let f = fixture(case);
    let domain = &f.link.target.domain;
    let refused = |error: Error| {
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert_eq!(error.context_value("rule"), Some("no-raw-keys"), "{error}");
    };
    refused(domain.alloc_type_1_window().expect_err("a window without a raw key"));
    for kind in [Type2Kind::A, Type2Kind::B] {
        refused(domain.alloc_type_2_window(kind).expect_err("a window without a raw key"));
    }
    assert_eq!(f.link.live().windows, 0);
}

pub(super) fn type_1_window_changes_its_key_at_each_bind(case: &Case) {
    let f = fixture(case);
    let window = f.type_1();
    assert!(window.key().is_none());
    let first = window.bind(&f.region, 1000, 100, REMOTE).expect("bind");
    let base = f.memory.part(1000, 100).start();
    assert_eq!(
        (first.addressing(), first.base(), first.first_len()),
        (Addressing::Virtual, Iova(base.0), 100)
    );
    assert_eq!(window.key(), Some(first.clone()));
    assert_eq!(f.link.pull(&first, 0, 100).expect("read"), pattern(1, 4096)[1000..1100]);
    f.link.push(&first, 0, b"windowed").expect("write");
    assert_eq!(f.memory.get(1000, 8), b"windowed");
    for (offset, len) in [(100, 1), (99, 2), (u64::MAX, 1)] {
        let outside = f.link.pull(&first, offset, len);
        case.assert_refused(outside, ErrorKind::OutOfBounds, "a read outside the window");
    }
    let second = window.bind(&f.region, 2000, 10, REMOTE).expect("bind again");
    assert_ne!(first.as_u64().unwrap(), second.as_u64().unwrap(), "the key did not change");
    f.assert_dead(&first);
    assert_eq!(f.link.pull(&second, 0, 10).expect("read"), pattern(1, 4096)[2000..2010]);
    window.unbind().expect("unbind");
    assert!(window.key().is_none());
    f.assert_dead(&second);
    assert_eq!(window.unbind().unwrap_err().kind(), ErrorKind::BadState);
    let third = window.bind(&f.region, 0, 8, REMOTE).expect("an unbound window binds again");
    f.link.push(&third, 0, &[1]).expect("write");
    drop(window);
    f.assert_dead(&third);
    assert_eq!(f.link.live().windows, 0);
    f.region.close().expect("close");
}

pub(super) fn type_1_window_refuses_an_empty_range(case: &Case) {
    let f = fixture(case);
    let window = f.type_1();
    let key = window.bind(&f.region, 0, 64, REMOTE).expect("bind");
    assert_eq!(window.bind(&f.region, 0, 0, REMOTE).unwrap_err().kind(), ErrorKind::ZeroLength);
    assert_eq!(f.link.pull(&key, 0, 64).expect("the binding stands").len(), 64);
}

pub(super) fn type_2_window_binds_by_a_request_with_a_tag(case: &Case) {
    let f = fixture(case);
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
            assert_eq!(f.link.pull(&key, 0, 40).expect("read"), pattern(1, 4096)[500..540]);
            for (offset, len) in [(40, 1), (39, 2), (1, 40), (u64::MAX, 1)] {
                let outside = f.link.pull(&key, offset, len);
                case.assert_refused(outside, ErrorKind::OutOfBounds, "a read outside the window");
            }
            let again = f
                .bind_2(&window, (600, 40), REMOTE, addressing, tag + 1)
                .expect_err("rebound without invalidate");
            assert_eq!(again.kind(), ErrorKind::BadState);
            assert_eq!(
                f.link.pull(&key, 0, 40).expect("the first binding stands"),
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

pub(super) fn type_2a_window_is_reached_through_its_queue_pair_only(case: &Case) {
    let mut f = fixture(case);
    let window = f.type_2(Type2Kind::A);
    let key = f.bind_2(&window, (0, 64), REMOTE, Addressing::Virtual, 1).expect("bind");
    f.link.pull(&key, 0, 64).expect("through the queue pair that it was bound with");
    let (other, _cq, peer) = f.other_endpoint();
    let bound = mem::replace(&mut f.link.peer, peer);
    f.link.assert_dead(&key, 0, ErrorKind::AccessDenied, "an access through another queue pair");
    f.link.peer = bound;
    let first = mem::replace(&mut f.link.target.endpoint, other);
    let rejected = first.close().expect_err("a queue pair with a 2A window bound was destroyed");
    assert_eq!(rejected.error.kind(), ErrorKind::Busy);
    f.link.pull(&key, 0, 64).expect("it still works");
    drop(window);
    rejected.value.close().expect("once the window is gone");
}

pub(super) fn type_2b_window_does_not_keep_its_queue_pair_open(case: &Case) {
    let mut f = fixture(case);
    let window = f.type_2(Type2Kind::B);
    let key = f.bind_2(&window, (0, 64), REMOTE, Addressing::Virtual, 1).expect("bind");
    f.link.pull(&key, 0, 64).expect("through the queue pair that it was bound with");
    let (other, cq, peer) = f.other_endpoint();
    let bound = mem::replace(&mut f.link.peer, peer);
    f.link.assert_dead(&key, 0, ErrorKind::AccessDenied, "an access through another queue pair");
    f.link.peer = bound;
    let first = mem::replace(&mut f.link.target.endpoint, other);
    first.close().expect("a queue pair with a 2B window bound is destroyed");
    f.link.pull(&key, 0, 64).expect_err("the queue pair is gone");
    f.link.peer = peer;
    f.link.target.cq = cq;
    assert_eq!(window.state(), WindowState::Free);
    f.bind_2(&window, (0, 64), REMOTE, Addressing::Virtual, 2).expect("another queue pair");
    f.invalidate(&window).expect("the window stays usable");
    f.region.close().expect("nothing is bound");
}

pub(super) fn invalidation_ends_the_key_but_not_the_window(case: &Case) {
    let f = fixture(case);
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
    assert_eq!(f.link.pull(&second, 0, 64).expect("read"), pattern(1, 4096)[64..128]);
    f.assert_dead(&first);
    drop(window);
    f.assert_dead(&second);
}

pub(super) fn peer_invalidates_a_window_by_a_message(case: &Case) {
    let f = fixture(case);
    let window = f.type_2(Type2Kind::B);
    let key = f.bind_2(&window, (0, 64), REMOTE, Addressing::ZeroBased, 7).expect("bind");
    let number = key.as_u64().expect("one key");
    let wrong = RemoteKey::new(Addressing::ZeroBased, Iova(0), 64, number ^ 1);
    for (key, what) in [(wrong, "an altered key"), (f.region.key().expect("key"), "a region")] {
        let refused = send_invalidating(&f, &key);
        case.assert_refused(refused, ErrorKind::InvalidKey, what);
    }
    f.link.pull(&key, 0, 64).expect("the window is bound");
    let (inbox, message) = (f.link.bytes(64), f.link.local(64, LOCAL));
    let inbox_region = f.link.expose(inbox.range(), LOCAL);
    let into = segment(inbox.range(), Some(inbox_region.desc().expect("desc")));
    f.link.target.receive(into, 5).expect("post");
    let send = Operation::Send { tag: None, invalidate: Some(&key) };
    f.link.transfer(send, &[message.segment(0, 16)]).expect("send");
    let received = f.link.received();
    assert_eq!(received.result.expect("receive"), 16);
    assert_eq!((received.invalidated, received.data), (Some(number), None), "the key is named");
    f.assert_dead(&key);
    assert_eq!(window.state(), WindowState::Free);
    assert!(window.key().is_none());
    // The window is free, not invalid: a message may invalidate the key again. A receive that is
    // posted after the message reports the invalidated key too.
    send_invalidating(&f, &key).expect("invalidate a free window");
    f.link.target.receive(into, 6).expect("post");
    assert_eq!(f.link.received().invalidated, Some(number));
    let second =
        f.bind_2(&window, (0, 8), REMOTE, Addressing::ZeroBased, 9).expect("the window stays");
    f.link.pull(&second, 0, 8).expect("read");
}

/// Sends a message that invalidates `key` from the initiator to `f.link.peer`.
fn send_invalidating(f: &Fixture, key: &RemoteKey) -> Result<u64> {
    let send = Operation::Send { tag: None, invalidate: Some(key) };
    f.link.transfer(send, &[])
}

pub(super) fn peer_does_not_invalidate_a_type_1_window(case: &Case) {
    let f = fixture(case);
    let window = f.type_1();
    let key = window.bind(&f.region, 0, 64, REMOTE).expect("bind");
    let sent = send_invalidating(&f, &key);
    case.assert_refused(sent, ErrorKind::BadState, "an invalidation of a type 1 window by a peer");
    f.link.push(&key, 0, b"alive").expect("the refused invalidation changed nothing");
    assert_eq!(f.link.pull(&key, 0, 5).expect("read"), b"alive");
    let rejected = f.region.close().expect_err("the window is still bound");
    assert_eq!(rejected.error.kind(), ErrorKind::Busy);
}

pub(super) fn peer_invalidates_through_the_queue_pair_of_the_window_only(case: &Case) {
    let mut f = fixture(case);
    let (_other, _cq, foreign) = f.other_endpoint();
    for kind in [Type2Kind::A, Type2Kind::B] {
        let window = f.type_2(kind);
        let key = f.bind_2(&window, (0, 64), REMOTE, Addressing::ZeroBased, 7).expect("bind");
        let own = mem::replace(&mut f.link.peer, foreign);
        let sent = send_invalidating(&f, &key);
        let what = "an invalidation through a foreign queue pair";
        case.assert_refused(sent, ErrorKind::AccessDenied, what);
        f.link.peer = own;
        assert_eq!(f.link.pull(&key, 0, 64).expect("it is still bound").len(), 64);
        send_invalidating(&f, &key).expect("through the queue pair that it was bound with");
        f.assert_dead(&key);
    }
}

pub(super) fn windows_have_their_own_rights(case: &Case) {
    let f = fixture(case);
    let base = f.region.key().expect("key");
    let [reads, writes] = [Access::REMOTE_READ, Access::REMOTE_WRITE].map(|access| {
        let window = f.type_1();
        let key = window.bind(&f.region, 0, 64, access).expect("bind");
        (window, key)
    });
    // The region lets the NIC write (READ and RECV) and has no REMOTE_WRITE. A window may still
    // grant REMOTE_WRITE.
    f.link.push(&writes.1, 0, b"granted").expect("write");
    assert_eq!(f.memory.get(0, 7), b"granted");
    let denied = |result: Result<()>, what: &str| {
        case.assert_refused(result, ErrorKind::AccessDenied, what);
    };
    denied(f.link.pull(&writes.1, 0, 1).map(drop), "a read through a window for writes");
    denied(f.link.push(&reads.1, 0, &[1]).map(drop), "a write through a window for reads");
    denied(f.link.push(&base, 0, &[1]).map(drop), "a write past a window for writes");
    assert_eq!(f.link.pull(&reads.1, 0, 7).expect("read"), b"granted");
    // A window gives access to memory that its region's own key does not reach.
    let sealed = f.link.expose(f.memory.part(0, 64), LOCAL | Access::MW_BIND);
    let key = reads.0.bind(&sealed, 0, 64, Access::REMOTE_READ).expect("bind");
    assert_eq!(f.link.pull(&key, 0, 7).expect("read"), b"granted");
    f.link
        .pull(&sealed.key().expect("key"), 0, 1)
        .expect_err("the region's own key grants nothing");
    // If the region has no right that lets the NIC write, a window cannot grant writes.
    let read_only = Access::REMOTE_READ | Access::SEND | Access::WRITE | Access::MW_BIND;
    let read_only = f.link.expose(f.memory.part(0, 64), read_only);
    let error = reads.0.bind(&read_only, 0, 64, Access::REMOTE_WRITE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AccessDenied);
    let error = reads.0.bind(&f.region, 0, 8, Access::SEND).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BadAccess);
    assert_eq!(error.context_value("rule"), Some("remote-rights-only"), "{error}");
    f.link.pull(&key, 0, 7).expect("a refused bind leaves the binding as it was");
}

pub(super) fn windows_may_overlap_and_keep_their_region_open(case: &Case) {
    let f = fixture(case);
    let one = f.type_1();
    let two = f.type_2(Type2Kind::B);
    let first = one.bind(&f.region, 0, 100, Access::REMOTE_WRITE).expect("bind");
    let second =
        f.bind_2(&two, (50, 100), Access::REMOTE_READ, Addressing::ZeroBased, 3).expect("bind");
    f.link.push(&first, 50, b"seen by both").expect("write");
    assert_eq!(f.link.pull(&second, 0, 12).expect("read"), b"seen by both");
    let rejected = f.region.close().expect_err("closed under two windows");
    assert_eq!(rejected.error.kind(), ErrorKind::Busy);
    one.unbind().expect("unbind");
    let rejected = rejected.value.close().expect_err("closed under one window");
    assert_eq!(f.link.pull(&second, 0, 12).expect("it still works"), b"seen by both");
    invalidate(&f.link, &two).expect("invalidate");
    rejected.value.close().expect("nothing is bound");
    assert_eq!((f.link.live().regions, f.link.live().windows), (0, 2));
}

pub(super) fn window_outside_its_region_or_domain_is_refused(case: &Case) {
    let f = fixture(case);
    let (one, two) = (f.type_1(), f.type_2(Type2Kind::A));
    for (offset, len) in [(4096, 1), (4095, 2), (0, 4097), (u64::MAX, 1), (1, u64::MAX)] {
        let error = one.bind(&f.region, offset, len, REMOTE).expect_err("outside its region");
        assert_eq!(error.kind(), ErrorKind::OutOfBounds);
        let error = f
            .bind_2(&two, (offset, len), REMOTE, Addressing::Virtual, 1)
            .expect_err("outside its region");
        assert_eq!(error.kind(), ErrorKind::OutOfBounds);
    }
    let foreign = f.link.local(64, LOCAL);
    let error = one.bind(&foreign.region, 0, 8, REMOTE).expect_err("a region of another domain");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert_eq!(error.context_value("rule"), Some("same-domain"), "{error}");
    let plain = f.link.expose(f.memory.range(), LOCAL | REMOTE);
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
    let posted = two.post_bind(&f.link.target.endpoint, &bind, 79);
    let error = posted.expect_err("a region without MW_BIND");
    assert_eq!(error.context_value("rule"), Some("region-allows-windows"), "{error}");
    assert!(one.key().is_none() && two.key().is_none());
    f.region.close().expect("nothing was bound");
}

/// Tests that the error of a bind that the provider refuses names the public call, the rule and the
/// values of the bind.
pub(super) fn refused_bind_names_its_call_and_its_values(case: &Case) {
    let f = fixture(case);
    let (one, two) = (f.type_1(), f.type_2(Type2Kind::B));
    let range = f.region.range().to_string();
    let check = |error: Error, call, rule, [offset, len]: [&str; 2]| {
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
    let refused = f.region.grant(&f.link.target.endpoint, 4095..4097, REMOTE);
    assert_eq!(refused.expect_err("outside its region").operation(), "grant");
}

pub(super) fn binding_registers_and_exports_nothing(case: &Case) {
    let f = fixture(case);
    let calls = || f.link.device.stats();
    let registered =
        |link: &CaseLink| (link.live().regions, link.live().page_registrations, link.live().bytes);
    let one = f.type_1();
    let two = f.type_2(Type2Kind::B);
    let (before, calls_before) = (registered(&f.link), calls());
    let counted = [Call::Register, Call::RegisterSub, Call::Deregister, Call::Refresh];
    let control = case.control.as_ref().expect("the case has it");
    let provider_calls = || counted.map(|call| control.calls(call));
    let provider_calls_before = provider_calls();
    for round in 0..300 {
        let key = one.bind(&f.region, round, 64, REMOTE).expect("bind");
        assert_eq!(key.first_len(), 64);
        f.bind_2(&two, (round, 64), REMOTE, Addressing::Virtual, round as u8).expect("bind");
        f.invalidate(&two).expect("invalidate");
    }
    one.unbind().expect("unbind");
    assert_eq!(provider_calls(), provider_calls_before, "binding called the provider");
    assert_eq!(registered(&f.link), before);
    assert_eq!(calls(), calls_before, "binding called the device's iface");
}

/// Binds a 64-byte window of each type of the NIC to `region`. Returns each window with its key.
fn windows_on(link: &CaseLink, region: &MemoryRegion) -> Vec<(Window, RemoteKey)> {
    let bound = |kind| {
        let window = Window::alloc(link, kind);
        let key = window.bind(link, region, (0, 64));
        (window, key)
    };
    window_types(link).into_iter().map(bound).collect()
}

pub(super) fn window_is_reached_with_the_auth_key_of_its_region_only(case: &Case) {
    let (ours, theirs) = (AuthKey(b"ours".to_vec()), AuthKey(b"theirs".to_vec()));
    for initiators in [&ours, &theirs] {
        let link = CaseLink::with_auth_keys(case, &ours, initiators);
        let memory = link.filled(&pattern(1, 4096));
        let ranges = [memory.range()];
        let attr = mr_attr(&ranges, LOCAL | Access::REMOTE_READ | Access::MW_BIND);
        let region = link.try_expose(&attr, MrFlags::empty()).expect("register");
        let guarded = MrAttr { auth_key: Some(&theirs), ..attr };
        let guarded = link.try_expose(&guarded, MrFlags::empty()).expect("register");
        let f = Fixture { link, memory, region: Box::new(region) };
        for (region, reached) in
            [(&*f.region, initiators == &ours), (&guarded, initiators == &theirs)]
        {
            for (_window, key) in windows_on(&f.link, region) {
                f.memory.put(0, &pattern(1, 4096));
                let written = f.link.push(&key, 0, &[1; 8]);
                let read = f.link.pull(&key, 0, 8);
                if reached {
                    written.expect("write with the region's authorization key");
                    assert_eq!(read.expect("read"), [1; 8]);
                } else {
                    for refused in [written.map(drop), read.map(drop)] {
                        let what = "an access with another authorization key";
                        case.assert_refused(refused, ErrorKind::AccessDenied, what);
                    }
                    assert_eq!(f.memory.all(), pattern(1, 4096));
                }
            }
        }
    }
}

pub(super) fn window_is_reached_through_the_endpoint_of_its_region_only(case: &Case) {
    let mut f = fixture(case);
    let window = f.type_1();
    let key = window.bind(&f.region, 0, 64, REMOTE).expect("bind");
    let (_other, _cq, foreign) = f.other_endpoint();
    let own = mem::replace(&mut f.link.peer, foreign);
    let what = "an access through an endpoint that the region is not bound to";
    f.link.assert_dead(&key, 0, ErrorKind::AccessDenied, what);
    assert_eq!(f.memory.all(), pattern(1, 4096));
    f.link.peer = own;
    f.link.push(&key, 0, &[1]).expect("through the region's endpoint");
}

/// Creates a fixture with a counter of remote writes bound to its region.
fn counted(link: CaseLink) -> (Fixture<Box<MemoryRegion>>, Arc<Counter>) {
    let memory = link.filled(&pattern(1, 4096));
    let (region, counter) = link.counted(memory.range(), LOCAL | REMOTE | Access::MW_BIND);
    (Fixture { link, memory, region: Box::new(region) }, counter)
}

pub(super) fn window_on_a_counted_region_needs_rma_event(case: &Case) {
    let (f, counter) = counted(CaseLink::without_rma_event(case));
    for (_window, key) in windows_on(&f.link, &f.region) {
        f.link.assert_needs_rma_event(&key, &f.memory, &counter);
    }
}

pub(super) fn writes_and_atomics_through_a_window_count_once(case: &Case) {
    let (f, counter) = counted(CaseLink::open(case));
    let mut expected = 0;
    for (_window, key) in windows_on(&f.link, &f.region) {
        for _ in 0..3 {
            f.link.push(&key, 0, &[1; 32]).expect("write");
            expected += 1;
            assert_eq!(counter.value(), expected);
        }
        if !case.staged() {
            f.link.fetch_add(&key, 8, 1).expect("atomic");
            expected += 1;
        }
        f.link.pull(&key, 0, 8).expect("reads are not counted");
        f.link.push(&key, 64, &[1]).expect_err("outside the window");
        assert_eq!(counter.value(), expected);
    }
}

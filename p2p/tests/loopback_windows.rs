//! Memory windows of the loopback NIC (MW-01 to MW-08).

mod support;

use hmem_core::{
    Access, Addressing, ErrorKind, Iova, MrMode, RemoteKey, Result,
    provider::{ProviderRegion, ProviderWindow, WindowBind, WindowType},
    transfer::{Operation, PeerId},
};
use hmem_p2p::loopback::Loopback;
use support::*;

const READ: Access = Access::REMOTE_READ;
const WRITE: Access = Access::REMOTE_WRITE;

struct Scene {
    pair: Pair,
    target: Buffer,
    region: ProviderRegion,
}

/// A region of 256 bytes that the NIC may write but that grants peers nothing, in each width of keys.
fn scenes() -> impl Iterator<Item = Scene> {
    [(8, MrMode::empty()), (8, MrMode::PROV_KEY), (4, MrMode::PROV_KEY), (4, MrMode::empty())]
        .into_iter()
        .map(|(size, mode)| {
            let pair = Pair::new(Loopback::builder().key_size(size).build().unwrap(), mode);
            let target = Buffer::new(256);
            let region = How::key(1)
                .access(Access::RECV)
                .register(&*pair.there.domain, &[host(target.range(), true)])
                .unwrap();
            Scene { pair, target, region }
        })
}

impl Scene {
    fn bind(
        &self,
        window: ProviderWindow,
        offset: u64,
        len: u64,
        access: Access,
    ) -> Result<ProviderWindow> {
        let addressing = Addressing::Virtual;
        let bind = WindowBind { region: self.region, offset, len, access, addressing };
        self.pair.there.domain.bind_window(window, &bind)
    }

    fn post_bind(
        &self,
        through: &End,
        window: ProviderWindow,
        len: u64,
        addressing: Addressing,
        tag: u8,
    ) -> Result<u64> {
        let operation = Operation::BindWindow {
            window,
            region: self.region,
            offset: 64,
            len,
            access: READ | WRITE,
            addressing,
            tag,
        };
        through.run(operation, &[], PeerId(0)).map(|_| window.key & !0xff | u64::from(tag))
    }

    fn virtual_key(&self, key: u64, offset: u64, len: u64) -> RemoteKey {
        RemoteKey::new(Addressing::Virtual, Iova(self.target.address().0 + offset), len, key)
    }

    fn write(&self, key: &RemoteKey, at: u64, len: usize) -> Result<u64> {
        let source = Buffer::filled(len, 3);
        self.pair.here.write(self.pair.to, &[source.whole()], key, at)
    }

    fn read(&self, key: &RemoteKey, at: u64, len: usize) -> Result<u64> {
        let sink = Buffer::new(len);
        self.pair.here.read(self.pair.to, &[sink.whole()], key, at)
    }
}

#[test]
fn mw_01_binding_a_type_1_window_turns_the_tag_and_kills_the_old_key() {
    for scene in scenes() {
        let window = scene.pair.there.domain.alloc_window(WindowType::One).unwrap();
        let base = scene.target.address().0;
        let mut window = scene.bind(window, 64, 64, READ | WRITE).unwrap();
        for _ in 0..600 {
            let old = scene.virtual_key(window.key, 64, 64);
            scene.write(&old, base + 64, 8).unwrap();
            let turned = scene.bind(window, 64, 64, READ | WRITE).unwrap();
            assert_ne!(turned.key, window.key);
            refused(scene.write(&old, base + 64, 8), ErrorKind::InvalidKey);
            window = turned;
        }
        let unbound = scene.bind(window, 0, 0, Access::empty()).unwrap();
        for key in [window.key, unbound.key] {
            refused(
                scene.read(&scene.virtual_key(key, 64, 64), base + 64, 1),
                ErrorKind::InvalidKey,
            );
        }
        let zero = WindowBind {
            region: scene.region,
            offset: 0,
            len: 8,
            access: READ,
            addressing: Addressing::ZeroBased,
        };
        refused(scene.pair.there.domain.bind_window(unbound, &zero), ErrorKind::InvalidArgument);
        let there = &scene.pair.there;
        let invalidate = Operation::InvalidateWindow { window: unbound };
        refused(there.run(invalidate, &[], PeerId(0)), ErrorKind::BadState);
        refused(scene.post_bind(there, unbound, 8, Addressing::Virtual, 1), ErrorKind::BadState);
        there.domain.free_window(unbound).unwrap();
        refused(there.domain.free_window(unbound), ErrorKind::InvalidArgument);
        there.domain.deregister(scene.region).unwrap();
        assert_eq!(there.domain.live().windows, 0);
    }
}

#[test]
fn mw_02_type_2_windows_are_bound_by_posting_with_the_callers_tag() {
    for scene in scenes() {
        for kind in [WindowType::TwoA, WindowType::TwoB] {
            let there = &scene.pair.there;
            let window = there.domain.alloc_window(kind).unwrap();
            refused(scene.bind(window, 0, 8, READ), ErrorKind::BadState);
            refused(
                scene.post_bind(there, window, 0, Addressing::Virtual, 1),
                ErrorKind::ZeroLength,
            );
            let key = scene.post_bind(there, window, 64, Addressing::Virtual, 0x5a).unwrap();
            assert_eq!(key & 0xff, 0x5a);
            let virtual_key = scene.virtual_key(key, 64, 64);
            scene.write(&virtual_key, scene.target.address().0 + 120, 8).unwrap();
            refused(
                scene.post_bind(there, window, 64, Addressing::Virtual, 1),
                ErrorKind::BadState,
            );
            there.run(Operation::InvalidateWindow { window }, &[], PeerId(0)).unwrap();
            refused(
                scene.write(&virtual_key, scene.target.address().0 + 120, 8),
                ErrorKind::InvalidKey,
            );
            let key = scene.post_bind(there, window, 64, Addressing::ZeroBased, 7).unwrap();
            let zero_based = RemoteKey::new(Addressing::ZeroBased, Iova(0), 64, key);
            scene.write(&zero_based, 1, 63).unwrap();
            assert_eq!(scene.target.get(64 + 63), 3);
            for (at, len) in [(1, 64), (64, 1), (u64::MAX, 1)] {
                refused(scene.write(&zero_based, at, len), ErrorKind::OutOfBounds);
            }
            there.domain.free_window(window).unwrap();
            refused(scene.write(&zero_based, 0, 1), ErrorKind::InvalidKey);
        }
    }
}

#[test]
fn mw_03_type_2_windows_are_tied_to_their_endpoint() {
    for scene in scenes() {
        for (kind, holds) in [(WindowType::TwoA, true), (WindowType::TwoB, false)] {
            let other = End::open(&scene.pair.there.domain);
            let window = scene.pair.there.domain.alloc_window(kind).unwrap();
            let key = scene.post_bind(&other, window, 64, Addressing::ZeroBased, 1).unwrap();
            let key = RemoteKey::new(Addressing::ZeroBased, Iova(0), 64, key);
            refused(scene.write(&key, 0, 8), ErrorKind::AccessDenied);
            let to_other = scene.pair.here.peer(&other);
            let source = Buffer::filled(8, 1);
            scene.pair.here.write(to_other, &[source.whole()], &key, 0).unwrap();
            if holds {
                refused(other.endpoint.close(), ErrorKind::Busy);
                other.run(Operation::InvalidateWindow { window }, &[], PeerId(0)).unwrap();
            }
            other.endpoint.close().unwrap();
            scene.pair.there.domain.free_window(window).unwrap();
        }
    }
}

#[test]
fn mw_04_send_with_invalidate_kills_the_key_and_not_the_window() {
    for scene in scenes() {
        let there = &scene.pair.there;
        let window = there.domain.alloc_window(WindowType::TwoB).unwrap();
        let number = scene.post_bind(there, window, 64, Addressing::ZeroBased, 9).unwrap();
        let key = RemoteKey::new(Addressing::ZeroBased, Iova(0), 64, number);
        let wrong = RemoteKey::new(Addressing::ZeroBased, Iova(0), 64, number ^ 1);
        let region = remote(scene.region, 256);
        let send = |key| Operation::Send { tag: None, invalidate: Some(key) };
        refused(scene.pair.here.run(send(&wrong), &[], scene.pair.to), ErrorKind::InvalidKey);
        refused(scene.pair.here.run(send(&region), &[], scene.pair.to), ErrorKind::InvalidKey);
        scene.write(&key, 0, 8).unwrap();
        let sink = Buffer::new(8);
        let receive = Operation::Receive { tag: None, from: None };
        there.post(receive, &[sink.whole()], PeerId(0), 1).unwrap();
        scene.pair.here.run(send(&key), &[Buffer::filled(4, 1).whole()], scene.pair.to).unwrap();
        assert_eq!(there.next().result.unwrap(), 4);
        refused(scene.write(&key, 0, 8), ErrorKind::InvalidKey);
        // Free, not invalid: the key may be invalidated again, and the window bound again.
        scene.pair.here.run(send(&key), &[], scene.pair.to).unwrap();
        scene.post_bind(there, window, 64, Addressing::ZeroBased, 9).unwrap();
        scene.write(&key, 0, 8).unwrap();
    }
}

#[test]
fn mw_05_windows_follow_their_own_rights() {
    for scene in scenes() {
        let there = &scene.pair.there;
        let base = scene.target.address().0;
        // The region lets the NIC write but grants peers nothing; the window grants what the region does not.
        refused(scene.write(&remote(scene.region, 256), 0, 8), ErrorKind::AccessDenied);
        let window = there.domain.alloc_window(WindowType::One).unwrap();
        let window = scene.bind(window, 0, 64, WRITE).unwrap();
        let key = scene.virtual_key(window.key, 0, 64);
        scene.write(&key, base, 8).unwrap();
        refused(scene.read(&key, base, 8), ErrorKind::AccessDenied);
        let readable = How::key(2)
            .access(Access::SEND)
            .register(&*there.domain, &[host(scene.target.range(), true)])
            .unwrap();
        let bind = |access| {
            let bind = WindowBind {
                region: readable,
                offset: 0,
                len: 8,
                access,
                addressing: Addressing::Virtual,
            };
            there.domain.bind_window(window, &bind)
        };
        refused(bind(WRITE), ErrorKind::AccessDenied);
        refused(bind(Access::SEND), ErrorKind::BadAccess);
        scene.write(&key, base, 8).unwrap();
        bind(READ).unwrap();
        refused(scene.write(&key, base, 8), ErrorKind::InvalidKey);
    }
}

#[test]
fn mw_06_windows_overlap_and_keep_their_region() {
    for scene in scenes() {
        let there = &scene.pair.there;
        let one = there.domain.alloc_window(WindowType::One).unwrap();
        let one = scene.bind(one, 32, 64, READ).unwrap();
        let two = there.domain.alloc_window(WindowType::TwoB).unwrap();
        let two_key = scene.post_bind(there, two, 64, Addressing::ZeroBased, 1).unwrap();
        let base = scene.target.address().0;
        scene.write(&RemoteKey::new(Addressing::ZeroBased, Iova(0), 64, two_key), 0, 64).unwrap();
        let sink = Buffer::new(64);
        scene
            .pair
            .here
            .read(scene.pair.to, &[sink.whole()], &scene.virtual_key(one.key, 32, 64), base + 32)
            .unwrap();
        assert_eq!(sink.bytes(), [[0; 32], [3; 32]].concat());
        refused(there.domain.deregister(scene.region), ErrorKind::Busy);
        there.run(Operation::InvalidateWindow { window: two }, &[], PeerId(0)).unwrap();
        refused(there.domain.deregister(scene.region), ErrorKind::Busy);
        scene.bind(one, 0, 0, Access::empty()).unwrap();
        there.domain.deregister(scene.region).unwrap();
        assert_eq!(there.domain.live().regions, 0);
    }
}

#[test]
fn mw_07_windows_outside_their_region_or_of_another_domain_are_refused() {
    for scene in scenes() {
        let there = &scene.pair.there;
        let window = there.domain.alloc_window(WindowType::One).unwrap();
        refused(scene.bind(window, 200, 57, READ), ErrorKind::OutOfBounds);
        refused(scene.bind(window, u64::MAX, 1, READ), ErrorKind::OutOfBounds);
        let foreign = How::key(9)
            .register(&*scene.pair.here.domain, &[host(scene.target.range(), true)])
            .unwrap();
        let bind = WindowBind {
            region: foreign,
            offset: 0,
            len: 1,
            access: READ,
            addressing: Addressing::Virtual,
        };
        refused(there.domain.bind_window(window, &bind), ErrorKind::NoRegion);
        refused(scene.pair.here.domain.free_window(window), ErrorKind::InvalidArgument);
        there.domain.deregister(scene.region).unwrap();
        refused(scene.bind(window, 0, 1, READ), ErrorKind::NoRegion);
    }
    let provider = Loopback::builder().windows([WindowType::One]).build().unwrap();
    refused(
        domain(&provider, MrMode::empty()).alloc_window(WindowType::TwoA),
        ErrorKind::Unsupported,
    );
}

//! Tests of window states against an oracle, and of keys that name no window.
//!
//! The oracle knows only the operations that succeeded so far.

use std::collections::HashSet;

use crate::support::*;
use hmem_core::{
    Access, Addressing, ErrorKind, Iova, MrMode, RawKey, RemoteKey,
    provider::{
        ProviderRegion, ProviderWindow, WindowBind, WindowEvent, WindowState, WindowType, Windows,
    },
    transfer::{Operation, PeerId, RemoteSegment},
};
use hmem_provider_loopback::Loopback;

const RIGHTS: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// The operations from which the tests build sequences.
const STEPS: [WindowEvent; 8] = [
    WindowEvent::Bind,
    WindowEvent::BindNothing,
    WindowEvent::Invalidate,
    WindowEvent::InvalidateByPeer,
    WindowEvent::Access,
    WindowEvent::ResetQueuePair,
    WindowEvent::DestroyQueuePair,
    WindowEvent::Deallocate,
];

/// Returns whether the operation `next` succeeds after the successful operations `done`.
///
/// The oracle follows the text of the InfiniBand specification, not the NIC's table of rules. It
/// keeps no state and looks back through the operations.
fn oracle(kind: WindowType, done: &[WindowEvent], next: WindowEvent) -> bool {
    let two = kind != WindowType::One;
    let freed = done.contains(&WindowEvent::Deallocate);
    let decides = |event: &WindowEvent| match event {
        WindowEvent::Bind => true,
        WindowEvent::Invalidate | WindowEvent::InvalidateByPeer => two,
        WindowEvent::BindNothing => !two,
        WindowEvent::DestroyQueuePair => kind == WindowType::TwoB,
        _ => false,
    };
    let bound = done.iter().rev().find(|event| decides(event)) == Some(&WindowEvent::Bind);
    match next {
        WindowEvent::DestroyQueuePair => freed || !bound || kind != WindowType::TwoA,
        // Endpoints of the software NIC are not connected, so that resolving a peer again resets
        // nothing.
        WindowEvent::ResetQueuePair => true,
        _ if freed => false,
        WindowEvent::Bind => !two || !bound,
        WindowEvent::BindNothing => !two && bound,
        WindowEvent::Invalidate | WindowEvent::InvalidateByPeer => two,
        WindowEvent::Access => bound,
        _ => true,
    }
}

/// A pair of endpoints, and a region to which one of them binds windows.
struct Scene {
    pair: Pair,
    target: Buffer,
    source: Buffer,
    region: ProviderRegion,
    endpoint: End,
    peer: PeerId,
}

impl Scene {
    fn new() -> Self {
        let pair = Pair::new(Loopback::builder().build().unwrap(), MrMode::empty());
        let target = Buffer::new(64);
        let region = RegAttr::key(1)
            .access(Access::RECV | Access::MW_BIND)
            .register(&*pair.there.domain, &[host(target.range(), true)])
            .unwrap();
        let endpoint = End::open(&pair.there.domain);
        let peer = pair.here.peer(&endpoint);
        Self { pair, target, source: Buffer::filled(8, 3), region, endpoint, peer }
    }

    fn windows(&self) -> &dyn Windows {
        self.pair.there.domain.windows().unwrap()
    }

    fn open_endpoint(&mut self) {
        self.endpoint = End::open(&self.pair.there.domain);
        self.peer = self.pair.here.peer(&self.endpoint);
    }

    /// Applies a sequence of operations to a new window. After each operation, compares the
    /// operation's result and the window's state with the oracle and the table of rules. Returns
    /// the number of operations.
    fn run(&mut self, kind: WindowType, sequence: &[WindowEvent]) -> usize {
        let window = self.windows().alloc_window(kind).unwrap();
        let mut subject = Subject { kind, window, key: window.key, tag: 0 };
        let mut state = WindowState::Free;
        let mut done = Vec::with_capacity(sequence.len());
        for event in sequence.iter().copied() {
            let what = || format!("type {}: {event:?} in {sequence:?}", kind.name());
            let allowed = oracle(kind, &done, event);
            let table = match event {
                WindowEvent::ResetQueuePair => Ok(state),
                _ => kind.after(state, event),
            };
            assert_eq!(table.is_ok(), allowed, "the table of rules: {}", what());
            let before = self.target.get(8);
            match (subject.step(self, event), table) {
                (Ok(()), Ok(after)) => {
                    state = after;
                    done.push(event);
                }
                (Err(error), Err(rule)) => {
                    let dead = error.kind() == ErrorKind::InvalidKey;
                    let named = error.context_value("rule") == Some(rule.name());
                    // A peer learns only that the key is invalid.
                    let by_peer =
                        matches!(event, WindowEvent::Access | WindowEvent::InvalidateByPeer);
                    assert!(named || (by_peer && dead), "{}: {error}, not {rule}", what());
                    assert_eq!(self.target.get(8), before, "{}: moved bytes", what());
                }
                (done, table) => {
                    panic!("{}: {done:?}, but the table of rules has {table:?}", what())
                }
            }
            match self.windows().window_status(subject.window) {
                Ok(status) => assert_eq!((status.state, status.pending), (state, false)),
                Err(_) => assert_eq!(state, WindowState::Invalid, "{}", what()),
            }
        }
        if state != WindowState::Invalid {
            self.windows().free_window(subject.window).unwrap();
        }
        sequence.len()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.pair.there.domain.deregister(self.region).expect("no window is left");
        }
    }
}

/// A window under test.
struct Subject {
    kind: WindowType,
    window: ProviderWindow,
    /// The key that the peer uses: the key of the last bind, or of the allocation if there was
    /// none.
    key: u64,
    tag: u8,
}

impl Subject {
    fn step(&mut self, scene: &mut Scene, event: WindowEvent) -> Result<(), hmem_core::Error> {
        let address = scene.target.address().0 + 8;
        let remote = RemoteKey::new(Addressing::Virtual, Iova(address), 8, self.key);
        match event {
            WindowEvent::Bind | WindowEvent::BindNothing => {
                let len = if event == WindowEvent::Bind { 8 } else { 0 };
                let (window, region, offset) = (self.window, scene.region, 8);
                let (access, addressing) = (RIGHTS, Addressing::Virtual);
                let bind = WindowBind { region, offset, len, access, addressing };
                if self.kind == WindowType::One {
                    self.window = scene.windows().bind_window(window, &bind)?;
                    self.key = self.window.key;
                    return Ok(());
                }
                let tag = self.tag.wrapping_add(1);
                scene.endpoint.run(Operation::BindWindow { window, bind, tag }, &[], PeerId(0))?;
                self.tag = tag;
                self.key = self.window.key & !0xff | u64::from(tag);
            }
            WindowEvent::Invalidate => {
                let operation = Operation::InvalidateWindow { window: self.window };
                scene.endpoint.run(operation, &[], PeerId(0))?;
            }
            WindowEvent::InvalidateByPeer => {
                let send = Operation::Send { tag: None, invalidate: Some(&remote) };
                scene.pair.here.run(send, &[], scene.peer)?;
                let receive = Operation::Receive { tag: None, from: None };
                scene.endpoint.post(receive, &[], PeerId(0), 8).unwrap();
                assert_eq!(scene.endpoint.next().invalidated, Some(self.key));
            }
            WindowEvent::Access => {
                let source = [scene.source.whole()];
                assert_eq!(scene.pair.here.write(scene.peer, &source, &remote, address)?, 8);
            }
            WindowEvent::ResetQueuePair => {
                assert_eq!(scene.pair.here.peer(&scene.endpoint), scene.peer);
                scene.endpoint.peer(&scene.pair.here);
            }
            WindowEvent::DestroyQueuePair => {
                scene.endpoint.endpoint.close()?;
                scene.open_endpoint();
            }
            WindowEvent::Deallocate => scene.windows().free_window(self.window)?,
            WindowEvent::Allocate => unreachable!("`STEPS` does not contain Allocate"),
        }
        Ok(())
    }
}

/// Calls `visit` with each sequence of `len` operations. If an operation frees the window, the
/// sequence ends after one more operation.
fn each_sequence(len: usize, done: &mut Vec<WindowEvent>, visit: &mut dyn FnMut(&[WindowEvent])) {
    let before_last = &done[..done.len().saturating_sub(1)];
    if done.len() == len || before_last.contains(&WindowEvent::Deallocate) {
        return visit(done);
    }
    for next in STEPS {
        done.push(next);
        each_sequence(len, done, visit);
        done.pop();
    }
}

/// Runs every sequence of up to `len` operations for each window type, on one thread for each type.
///
/// The test checks each sequence of `len` operations after every operation, and so checks its
/// shorter prefixes too.
fn run_all_sequences(len: usize) {
    let run = |kind| {
        let (mut scene, mut sequences, mut steps) = (Scene::new(), 0, 0);
        each_sequence(len, &mut Vec::new(), &mut |sequence| {
            sequences += 1;
            steps += scene.run(kind, sequence);
        });
        println!("type {}: {sequences} sequences, {steps} operations", kind.name());
    };
    std::thread::scope(|scope| {
        for kind in WindowType::ALL {
            scope.spawn(move || run(kind));
        }
    });
}

/// MW-04
#[test]
fn every_sequence_of_four_operations_follows_the_oracle() {
    run_all_sequences(4);
}

/// MW-04
#[test]
#[ignore = "the slow tier: every sequence of up to eight operations"]
fn every_sequence_of_eight_operations_follows_the_oracle() {
    run_all_sequences(8);
}

/// MW-04
#[test]
fn random_sequences_of_eight_to_forty_operations_follow_the_oracle() {
    for kind in WindowType::ALL {
        let (mut scene, mut numbers) = (Scene::new(), noise(4));
        for round in 0..2000 {
            let mut next = || numbers.next().unwrap() as usize;
            let len = 8 + next() % 33;
            // Most sequences do not free the window, because all later operations would be refused.
            let steps = if round % 8 == 0 { &STEPS[..] } else { &STEPS[..7] };
            let sequence: Vec<_> = (0..len).map(|_| steps[next() % steps.len()]).collect();
            scene.run(kind, &sequence);
        }
    }
}

/// The number of forged 8-byte keys that the slow tier tries (KEY-07).
const MANY: usize = 1_000_000;

/// The number of forged keys that the other tests try. It exceeds the number of keys that
/// [`Keys::forged`] makes from live and stale keys: about 82 000.
const SOME: usize = 100_000;

/// A domain with windows of every type, and keys of these windows: live keys, stale keys, and a key
/// that the peer may not use.
struct Keys {
    pair: Pair,
    target: Buffer,
    live: Vec<u64>,
    stale: Vec<u64>,
    /// The key of a window that is bound through another endpoint of the domain.
    foreign: u64,
    _other: End,
    /// Keys that name memory: those of the bound windows and of the region.
    known: HashSet<u64>,
}

impl Keys {
    fn new(provider: Loopback, mode: MrMode) -> Self {
        let pair = Pair::new(provider, mode);
        let target = Buffer::new(8);
        let attr =
            if mode.contains(MrMode::PROV_KEY) { RegAttr::provider_key() } else { RegAttr::key(1) };
        let attr = attr.access(Access::RECV | Access::MW_BIND);
        let register = |end: &End| attr.register(&*end.domain, &[host(target.range(), true)]);
        let (region, abroad) = (register(&pair.there).unwrap(), register(&pair.here).unwrap());
        let alloc = |end: &End, kind| end.domain.windows().unwrap().alloc_window(kind).unwrap();
        let bind = |through: &End, window: ProviderWindow, region, tag| {
            let (offset, len, access, addressing) = (0, 8, RIGHTS, Addressing::ZeroBased);
            let bind = WindowBind { region, offset, len, access, addressing };
            let operation = Operation::BindWindow { window, bind, tag };
            through.run(operation, &[], PeerId(0)).unwrap();
            window.key & !0xff | u64::from(tag)
        };
        let (mut live, mut stale) = (Vec::new(), Vec::new());
        for tag in 0..=255 {
            let window = alloc(&pair.there, WindowType::TwoB);
            stale.push(bind(&pair.there, window, region, tag));
            pair.there.run(Operation::InvalidateWindow { window }, &[], PeerId(0)).unwrap();
            live.push(bind(&pair.there, window, region, tag.wrapping_add(1)));
            let freed = alloc(&pair.there, WindowType::TwoA);
            stale.push(bind(&pair.there, freed, region, tag));
            pair.there.domain.windows().unwrap().free_window(freed).unwrap();
        }
        let other = End::open(&pair.there.domain);
        let foreign = bind(&other, alloc(&pair.there, WindowType::TwoB), region, 9);
        stale.push(bind(&pair.here, alloc(&pair.here, WindowType::TwoB), abroad, 9));
        let known = live.iter().copied().chain([foreign, region.key]).collect();
        Self { pair, target, live, stale, foreign, _other: other, known }
    }

    /// Returns keys that name no memory: live keys with one of the low `bits` bits or the tag
    /// changed, stale keys, a key of another domain, and random numbers. No live key is among them.
    fn forged(&self, bits: u32) -> impl Iterator<Item = u64> {
        let near = self.live.iter().flat_map(move |key| (0..bits).map(move |bit| key ^ 1 << bit));
        let tags = self.live.iter().flat_map(|key| (0..=255u64).map(move |tag| key & !0xff | tag));
        let stale = self.stale.iter().copied();
        let width = u64::MAX >> (64 - bits);
        let forged = near.chain(tags).chain(stale).chain(noise(1).map(move |key| key & width));
        forged.filter(|key| !self.known.contains(key))
    }

    /// Writes with `count` of the keys, in batches, and checks that each write fails with the error
    /// for an invalid key.
    fn refuse_all(&self, count: usize, keys: impl Iterator<Item = RemoteKey>) {
        let source = Buffer::filled(8, 1);
        let (mut keys, mut ends, mut tried) = (keys.take(count).peekable(), Vec::new(), 0);
        while keys.peek().is_some() {
            let mut posted = 0;
            for key in keys.by_ref().take(64) {
                let remote = [RemoteSegment { address: Iova(0), len: 8, key: &key }];
                let write = Operation::Write { remote: &remote };
                self.pair.here.post(write, &[source.whole()], self.pair.to, 0).unwrap();
                posted += 1;
            }
            while ends.len() < posted {
                self.pair.here.cq.read(&mut ends, 64).unwrap();
            }
            tried += posted;
            ends.drain(..).for_each(|end| refused(end.result, ErrorKind::InvalidKey));
        }
        assert_eq!(tried, count);
        assert_eq!(self.target.bytes(), [0; 8]);
    }

    fn write(&self, key: u64) -> hmem_core::Result<u64> {
        let source = Buffer::filled(8, 1);
        let key = RemoteKey::new(Addressing::ZeroBased, Iova(0), 8, key);
        self.pair.here.write(self.pair.to, &[source.whole()], &key, 0)
    }

    /// Checks that `count` forged keys are refused, and that the live keys work.
    fn check(&self, bits: u32, count: usize) {
        let key = |number| RemoteKey::new(Addressing::ZeroBased, Iova(0), 8, number);
        self.refuse_all(count, self.forged(bits).map(key));
        refused(self.write(self.foreign), ErrorKind::AccessDenied);
        assert_eq!(self.target.bytes(), [0; 8]);
        for key in &self.live {
            assert_eq!(self.write(*key).unwrap(), 8);
        }
        assert_eq!(self.target.bytes(), [1; 8]);
    }
}

/// KEY-07
#[test]
fn forged_8_byte_keys_reach_no_window() {
    Keys::new(Loopback::builder().build().unwrap(), MrMode::PROV_KEY).check(64, SOME);
}

/// KEY-07
#[test]
#[ignore = "the slow tier: a million forged keys"]
fn a_million_forged_8_byte_keys_reach_no_window() {
    Keys::new(Loopback::builder().build().unwrap(), MrMode::PROV_KEY).check(64, MANY);
}

/// KEY-07
///
/// A guess hits one of n windows with probability n / 2^32. The test cannot fail by chance: its
/// numbers are fixed, and no live key is among them.
#[test]
fn forged_4_byte_keys_reach_no_window() {
    let provider = Loopback::builder().key_size(4).build().unwrap();
    Keys::new(provider, MrMode::PROV_KEY).check(32, SOME);
}

/// KEY-07
///
/// `hmem_core::Domain` refuses windows in RAW mode, but the provider allows them. No raw key may
/// reach such a window, not even a raw key with the window's number.
#[test]
fn forged_raw_keys_reach_no_window() {
    // A raw key of 8 bytes is only a number, without a secret cookie.
    let provider = Loopback::builder().raw_key_size(8).build().unwrap();
    let keys = Keys::new(provider, MrMode::RAW);
    let raw_keys = keys.pair.here.domain.raw_keys().unwrap();
    let numbers = keys.live.iter().copied().chain([keys.foreign]).chain(keys.forged(64));
    let map = |number: u64| {
        let raw = RawKey(number.to_le_bytes().to_vec());
        raw_keys.map_raw(Iova(0), 8, Addressing::ZeroBased, &raw).unwrap()
    };
    let forged = numbers.map(|number| {
        let key = map(number);
        assert!(key.is_mapped());
        key
    });
    keys.refuse_all(SOME, forged);
}

//! The states of windows: every sequence of operations, against an oracle that remembers no more
//! than which operations were done.

mod support;

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};

use hmem_core::{
    Access, Addressing, ErrorKind, Iova, MrMode, RemoteKey,
    provider::{
        ProviderRegion, ProviderWindow, WindowBind, WindowEvent, WindowState, WindowType, Windows,
    },
    transfer::{Operation, PeerId},
};
use hmem_provider_loopback::Loopback;
use support::*;

const RIGHTS: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);
const LONGEST: usize = 8;
/// Sequences of one length and state that are continued.
const PASTS: usize = 100;

/// The operations of which sequences are made.
const STEPS: [WindowEvent; 7] = [
    WindowEvent::Bind,
    WindowEvent::BindNothing,
    WindowEvent::Invalidate,
    WindowEvent::InvalidateByPeer,
    WindowEvent::Access,
    WindowEvent::DestroyQueuePair,
    WindowEvent::Deallocate,
];

/// A naive oracle, written from the article's text and not from the table: it looks back through
/// what was done.
fn oracle(kind: WindowType, done: &[WindowEvent], next: WindowEvent) -> bool {
    let two = kind != WindowType::One;
    let freed = done.contains(&WindowEvent::Deallocate);
    let ends = |event: &WindowEvent| match event {
        WindowEvent::Bind => true,
        WindowEvent::Invalidate | WindowEvent::InvalidateByPeer => two,
        WindowEvent::BindNothing => !two,
        WindowEvent::DestroyQueuePair => kind == WindowType::TwoB,
        _ => false,
    };
    let bound = done.iter().rev().find(|event| ends(event)) == Some(&WindowEvent::Bind);
    match next {
        WindowEvent::DestroyQueuePair => freed || !bound || kind != WindowType::TwoA,
        _ if freed => false,
        WindowEvent::Bind => !two || !bound,
        WindowEvent::BindNothing => !two && bound,
        WindowEvent::Invalidate | WindowEvent::InvalidateByPeer => two,
        WindowEvent::Access => bound,
        _ => true,
    }
}

/// One window of a domain, and the endpoint that binds it.
struct Subject<'a> {
    pair: &'a Pair,
    target: &'a Buffer,
    region: ProviderRegion,
    kind: WindowType,
    window: ProviderWindow,
    endpoint: End,
    peer: PeerId,
    /// The key that a peer knows: that of the last bind, or of the allocation.
    key: u64,
    tag: u8,
}

impl<'a> Subject<'a> {
    fn new(pair: &'a Pair, target: &'a Buffer, region: ProviderRegion, kind: WindowType) -> Self {
        let window = windows(pair).alloc_window(kind).unwrap();
        let endpoint = End::open(&pair.there.domain);
        let peer = pair.here.peer(&endpoint);
        let key = window.key;
        Self { pair, target, region, kind, window, endpoint, peer, key, tag: 0 }
    }

    fn step(&mut self, event: WindowEvent) -> Result<(), hmem_core::Error> {
        let range = |len| (self.region, 8u64, len);
        let bind = |(region, offset, len)| WindowBind {
            region,
            offset,
            len,
            access: RIGHTS,
            addressing: Addressing::Virtual,
        };
        let address = self.target.address().0 + 8;
        let remote = RemoteKey::new(Addressing::Virtual, Iova(address), 8, self.key);
        match event {
            WindowEvent::Bind | WindowEvent::BindNothing => {
                let len = if event == WindowEvent::Bind { 8 } else { 0 };
                if self.kind == WindowType::One {
                    self.window = windows(self.pair).bind_window(self.window, &bind(range(len)))?;
                    self.key = self.window.key;
                    return Ok(());
                }
                let tag = self.tag.wrapping_add(1);
                let WindowBind { region, offset, len, access, addressing } = bind(range(len));
                let window = self.window;
                self.endpoint.run(
                    Operation::BindWindow { window, region, offset, len, access, addressing, tag },
                    &[],
                    PeerId(0),
                )?;
                self.tag = tag;
                self.key = self.window.key & !0xff | u64::from(tag);
                Ok(())
            }
            WindowEvent::Invalidate => {
                let operation = Operation::InvalidateWindow { window: self.window };
                self.endpoint.run(operation, &[], PeerId(0)).map(|_| ())
            }
            WindowEvent::InvalidateByPeer => {
                let send = Operation::Send { tag: None, invalidate: Some(&remote) };
                self.pair.here.run(send, &[], self.peer).map(|_| ())
            }
            WindowEvent::Access => {
                let source = Buffer::filled(8, 3);
                let moved = self.pair.here.write(self.peer, &[source.whole()], &remote, address)?;
                assert_eq!(moved, 8);
                Ok(())
            }
            WindowEvent::DestroyQueuePair => {
                self.endpoint.endpoint.close()?;
                self.endpoint = End::open(&self.pair.there.domain);
                self.peer = self.pair.here.peer(&self.endpoint);
                Ok(())
            }
            WindowEvent::Deallocate => windows(self.pair).free_window(self.window),
            WindowEvent::Allocate | WindowEvent::ResetQueuePair => unreachable!("not a step"),
        }
    }
}

fn windows(pair: &Pair) -> &dyn Windows {
    pair.there.domain.windows().unwrap()
}

/// MW-04
///
/// Breadth first up to eight operations. Sequences that lead to the same state, and after which the
/// oracle allows the same, should go on alike: a hundred of each length are continued.
#[test]
fn every_sequence_of_operations_follows_the_oracle_and_the_table() {
    let provider = Loopback::builder().build().unwrap();
    let pair = Pair::new(provider, MrMode::empty());
    let target = Buffer::new(64);
    let region = How::key(1)
        .access(Access::RECV | Access::MW_BIND)
        .register(&*pair.there.domain, &[host(target.range(), true)])
        .unwrap();
    for kind in WindowType::ALL {
        let mut seen: HashMap<(usize, WindowState, Vec<bool>), usize> = HashMap::new();
        let mut open: VecDeque<Vec<WindowEvent>> = VecDeque::from([Vec::new()]);
        let mut tried = 0;
        while let Some(done) = open.pop_front() {
            for next in STEPS {
                let mut subject = Subject::new(&pair, &target, region, kind);
                let mut state = WindowState::Free;
                for event in &done {
                    subject
                        .step(*event)
                        .unwrap_or_else(|error| panic!("{kind:?} {done:?}: {error}"));
                    state = kind.after(state, *event).unwrap();
                }
                let table = kind.after(state, next);
                let what = format!("type {}: {next:?} after {done:?}", kind.name());
                assert_eq!(table.is_ok(), oracle(kind, &done, next), "the table, {what}");
                let before = target.bytes();
                match (subject.step(next), table) {
                    (Ok(()), Ok(after)) => state = after,
                    (Err(error), Err(rule)) => {
                        let dead = error.kind() == ErrorKind::InvalidKey;
                        let named = error.context_value("rule") == Some(rule.name());
                        // A peer is told no more than that the key is dead.
                        let by_peer =
                            matches!(next, WindowEvent::Access | WindowEvent::InvalidateByPeer);
                        assert!(named || (by_peer && dead), "{what}: {error}, not {rule}");
                        assert_eq!(target.bytes(), before, "{what}: moved bytes");
                    }
                    (done, table) => panic!("{what}: {done:?}, where the table has {table:?}"),
                }
                tried += 1;
                if state != WindowState::Invalid {
                    let status = windows(&pair).window_status(subject.window).unwrap();
                    assert_eq!((status.state, status.pending), (state, false), "{what}");
                    windows(&pair).free_window(subject.window).unwrap();
                }
                assert_eq!(pair.there.domain.live().windows, 0, "{what}");
                if table.is_ok() && done.len() + 1 < LONGEST {
                    let longer: Vec<_> = done.iter().copied().chain([next]).collect();
                    let allowed = STEPS.iter().map(|step| oracle(kind, &longer, *step)).collect();
                    // Several of each length, with pasts that should not matter.
                    let times = seen.entry((longer.len(), state, allowed)).or_default();
                    *times += 1;
                    if *times <= PASTS {
                        open.push_back(longer);
                    }
                }
            }
        }
        let lengths: BTreeSet<_> = seen.keys().map(|(length, ..)| *length).collect();
        assert_eq!(lengths, (1..LONGEST).collect(), "type {}: {tried} steps", kind.name());
    }
    pair.there.domain.deregister(region).unwrap();
}

/// A stream of numbers without a pattern that keys could have.
fn noise(seed: u64) -> impl Iterator<Item = u64> {
    let mut state = seed;
    std::iter::repeat_with(move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb)
    })
}

/// KEY-07
///
/// Near misses of live keys, keys that are stale, of another domain and of another queue pair, and
/// noise: a million in all.
#[test]
fn a_million_forged_keys_reach_no_window() {
    const TRIES: usize = 1_000_000;
    let pair = Pair::new(Loopback::builder().build().unwrap(), MrMode::PROV_KEY);
    let target = Buffer::new(8);
    let access = Access::RECV | Access::MW_BIND;
    let register = |end: &End| {
        How::provider_key().access(access).register(&*end.domain, &[host(target.range(), true)])
    };
    let (region, abroad) = (register(&pair.there).unwrap(), register(&pair.here).unwrap());
    let addressing = Addressing::ZeroBased;
    let bind = |through: &End, window: ProviderWindow, region, tag| {
        let (offset, len, access) = (0, 8, RIGHTS);
        let operation =
            Operation::BindWindow { window, region, offset, len, access, addressing, tag };
        through.run(operation, &[], PeerId(0)).unwrap();
        window.key & !0xff | u64::from(tag)
    };
    let alloc = |end: &End, kind| end.domain.windows().unwrap().alloc_window(kind).unwrap();
    let other = End::open(&pair.there.domain);
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
    let foreign = bind(&other, alloc(&pair.there, WindowType::TwoB), region, 9);
    stale.push(bind(&pair.here, alloc(&pair.here, WindowType::TwoB), abroad, 9));
    let known: HashSet<u64> = live.iter().copied().chain([foreign]).collect();
    let near = live.iter().flat_map(|key| (0..64).map(move |bit| key ^ 1 << bit));
    let tags = live.iter().flat_map(|key| (0..=255u64).map(move |tag| key & !0xff | tag));
    let forged = near.chain(tags).chain(stale.iter().copied()).chain(noise(1));
    let source = Buffer::filled(8, 1);
    let write = |key| {
        let key = RemoteKey::new(addressing, Iova(0), 8, key);
        pair.here.write(pair.to, &[source.whole()], &key, 0)
    };
    for key in forged.filter(|key| !known.contains(key)).take(TRIES) {
        refused(write(key), ErrorKind::InvalidKey);
    }
    refused(write(foreign), ErrorKind::AccessDenied);
    assert_eq!(target.bytes(), [0; 8]);
    for key in live {
        write(key).unwrap();
    }
    assert_eq!(target.bytes(), [1; 8]);
    println!("4-byte keys: a guess hits one of n windows with probability n / 2^32");
}

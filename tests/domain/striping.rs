//! Transfers that are striped over two software NICs on each side, with NICs that fail and return.

use std::{ops::Range, sync::Arc, thread, time::Duration};

use hmem::{
    Access, Domain, DomainAttr, Errno, Error, ErrorKind, Hmem, MrMode, RailEndpoint, RailState,
    RailStatus, RailTransfer, RoamingRegion, Stripe,
    key_feed::{KeySubscription, PeerKeys},
    loopback::{Faults, Loopback, NicCall, Progress},
    provider::NicState,
    transfer::Completion,
};

/// The length of a chunk.
const CHUNK: u64 = Stripe::MIN_CHUNK;
/// The number of chunks of a memory. The last chunk is short.
const CHUNKS: u64 = 64;
const LEN: usize = (CHUNKS * CHUNK) as usize - 100;
/// The number of chunks that a rail has in flight.
const DEPTH: usize = 4;
const RAILS: usize = 2;
/// Longer than any transfer takes.
const BOUND: Duration = Duration::from_secs(60);

const NEAR: [&str; RAILS] = ["near0", "near1"];
const FAR: [&str; RAILS] = ["far0", "far1"];

/// An initiator ("near") and a target ("far") with a memory each, on the NICs of the rails.
struct Pair {
    hmem: Hmem,
    fabric: Loopback,
    faults: Faults,
    rails: RailEndpoint,
    targets: RailEndpoint,
    local: RoamingRegion<Vec<u8>>,
    remote: RoamingRegion<Vec<u8>>,
    updates: KeySubscription,
    peer: PeerKeys,
    /// The open domains of each rail: near and far.
    domains: [Option<[Domain; 2]>; RAILS],
}

impl Pair {
    fn new(progress: Progress, stripe: &Stripe) -> Self {
        let faults = Faults::new();
        let mut nics = Loopback::builder().faults(&faults).progress(progress);
        for name in NEAR.into_iter().chain(FAR) {
            nics = nics.nic(name);
        }
        let fabric = nics.build().expect("software NICs");
        let shared = Arc::new(fabric.clone());
        let hmem = Hmem::builder().without_vendor_ifaces().shared_provider(shared);
        let hmem = hmem.build().expect("host memory is always available");
        let memory = |nic| {
            let domain = open(&hmem, nic);
            let region = domain.register(vec![0; LEN], Access::all()).expect("register");
            let mut region = RoamingRegion::new(region).map_err(|it| it.error).expect("publish");
            region.withdraw().expect("on no NIC");
            domain.close().expect("close");
            region
        };
        let (local, remote) = (memory(NEAR[0]), memory(FAR[0]));
        let updates = remote.feed().subscribe();
        let [rails, targets] = [(); 2].map(|()| RailEndpoint::new(stripe.clone()));
        let (peer, domains) = (PeerKeys::default(), [None, None]);
        let mut pair =
            Self { hmem, fabric, faults, rails, targets, local, remote, updates, peer, domains };
        (0..RAILS).for_each(|rail| pair.open_rail(rail));
        pair
    }

    fn plain() -> Self {
        Self::new(Progress::ByHand, &Stripe::chunks(CHUNK).depth(DEPTH))
    }

    /// Opens a rail on both sides, or opens it again after a loss.
    fn open_rail(&mut self, rail: usize) {
        let old = self.domains[rail].take();
        let (near, far) = (open(&self.hmem, NEAR[rail]), open(&self.hmem, FAR[rail]));
        self.local.add(&near).expect("register the local memory");
        self.remote.add(&far).expect("register the remote memory");
        self.update();
        let from = self.rails.open(&near).expect("open");
        let to = self.targets.open(&far).expect("open");
        self.rails.connect(NEAR[rail], FAR[rail], &to).expect("connect");
        self.targets.connect(FAR[rail], NEAR[rail], &from).expect("connect");
        for domain in old.into_iter().flatten() {
            domain.close().map_err(Error::from).expect("nothing is left in the old domain");
        }
        self.domains[rail] = Some([near, far]);
    }

    /// Takes over the keys that the target has published.
    fn update(&mut self) {
        self.peer.apply(&self.updates.next().expect("an update")).expect("apply");
    }

    /// Returns the number of bytes that each rail has moved since it was opened.
    fn bytes(&self) -> [u64; RAILS] {
        NEAR.map(|nic| self.status(nic).bytes)
    }

    fn start(&mut self, write: bool, offsets: Range<u64>, generation: u64) -> hmem::Result<()> {
        let transfer = RailTransfer {
            local: &self.local,
            local_offset: offsets.start,
            remote: &self.peer,
            remote_offsets: offsets,
            generation,
        };
        if write { self.rails.write(&transfer, 7) } else { self.rails.read(&transfer, 7) }
    }

    /// Starts a transfer of the whole memories.
    fn start_whole(&mut self, write: bool) -> hmem::Result<()> {
        self.start(write, 0..LEN as u64, self.peer.generation())
    }

    /// Returns the result of the only transfer in progress.
    fn end(&mut self) -> hmem::Result<u64> {
        let mut done: Vec<Completion> = Vec::new();
        assert_eq!(self.rails.wait(&mut done, BOUND), 1, "the transfer ends");
        assert_eq!(self.rails.wait(&mut done, Duration::MAX), 0, "it ends once");
        let Completion { context, result, .. } = done.remove(0);
        assert_eq!(context, 7);
        result
    }

    /// Fills the memory that the next transfer reads with other bytes, and returns them.
    fn fill(&self, write: bool, seed: usize) -> Vec<u8> {
        let (from, to) =
            if write { (&self.local, &self.remote) } else { (&self.remote, &self.local) };
        let bytes: Vec<_> = (0..LEN).map(|at| (at + at / 251 + seed * 13) as u8).collect();
        from.region().expect("a region").write(0, &bytes).expect("write");
        to.region().expect("a region").write(0, &vec![0; LEN]).expect("write");
        bytes
    }

    fn moved(&self, write: bool) -> Vec<u8> {
        let to = if write { &self.remote } else { &self.local };
        let mut bytes = vec![0; LEN];
        to.region().expect("a region").read(0, &mut bytes).expect("read");
        bytes
    }

    fn status(&self, nic: &str) -> RailStatus<'_> {
        self.rails.rails().find(|rail| rail.nic.name == nic).expect("a rail")
    }

    fn failed_nics(&self) -> Vec<&str> {
        let failed = self.rails.rails().filter(|rail| matches!(rail.state, RailState::Failed(_)));
        failed.map(|rail| rail.nic.name.as_str()).collect()
    }
}

fn open(hmem: &Hmem, nic: &str) -> Domain {
    let (nic, mr_mode) = (Some(nic.into()), MrMode::empty());
    hmem.domain("loopback", DomainAttr { nic, mr_mode, ..DomainAttr::default() }).expect("a domain")
}

/// LIFE-10
#[test]
fn striped_transfer_moves_each_byte_once() {
    let mut pair = Pair::plain();
    pair.faults.start_counting();
    for write in [true, false] {
        let (bytes, before) = (pair.fill(write, 1), pair.faults.calls(NicCall::Transfer));
        pair.start_whole(write).expect("start");
        assert_eq!(pair.end().expect("success"), LEN as u64);
        assert!(pair.moved(write) == bytes);
        assert_eq!(pair.faults.calls(NicCall::Transfer) - before, CHUNKS);
    }
    // The last chunk of each transfer is the short one.
    assert_eq!(pair.bytes(), [CHUNKS * CHUNK, CHUNKS * CHUNK - 200]);
    assert!(pair.failed_nics().is_empty());
}

/// LIFE-10
#[test]
fn rails_take_chunks_by_their_weights() {
    let stripe = Stripe::chunks(CHUNK).weight("near0", 3).weight("loopback/near1", 1);
    let mut pair = Pair::new(Progress::ByHand, &stripe);
    let bytes = pair.fill(true, 1);
    pair.start_whole(true).expect("start");
    pair.end().expect("success");
    assert!(pair.moved(true) == bytes);
    let before = pair.bytes();
    assert_eq!(before, [CHUNKS * 3 / 4 * CHUNK - 100, CHUNKS / 4 * CHUNK]);
    // Transfers of one chunk alternate too.
    for _ in 0..8 {
        pair.start(true, 10..20, pair.peer.generation()).expect("start");
        assert_eq!(pair.end().expect("success"), 10);
    }
    assert_eq!(pair.bytes(), [before[0] + 60, before[1] + 20]);
    pair.start(true, 20..20, pair.peer.generation()).expect("no bytes");
    assert_eq!(pair.end().expect("success"), 0);
}

/// LIFE-10
///
/// Each NIC of both sides is lost in the middle of a write and of a read. Then it returns, and
/// takes its part of the next transfer.
#[test]
fn nic_that_is_lost_in_the_middle_loses_no_byte_and_is_taken_back() {
    for (dead, rail) in [(NEAR[0], 0), (NEAR[1], 1), (FAR[0], 0), (FAR[1], 1)] {
        for write in [true, false] {
            let mut pair = Pair::plain();
            pair.faults.start_counting();
            let bytes = pair.fill(write, 2);
            pair.start_whole(write).expect("start");
            assert_eq!(pair.rails.poll(&mut Vec::new()), 0);
            let moved = pair.faults.calls(NicCall::Transfer);
            assert!((1..CHUNKS).contains(&moved), "{moved} chunks");
            pair.fabric.set_nic_state(dead, NicState::Lost).expect("a NIC");
            assert_eq!(pair.end().expect("the other rail goes on"), LEN as u64);
            assert!(pair.moved(write) == bytes, "{dead}");
            assert_eq!(pair.faults.calls(NicCall::Transfer), CHUNKS, "no chunk moved twice");
            assert_eq!(pair.failed_nics(), [NEAR[rail]]);
            let RailState::Failed(error) = pair.status(NEAR[rail]).state else { panic!("{dead}") };
            let local = dead == NEAR[rail];
            let kind = if local { ErrorKind::Unavailable } else { ErrorKind::Unreachable };
            assert_eq!(error.kind(), kind, "{error:#}");

            // The target withdraws the key of a NIC that it has lost.
            if !local {
                pair.remote.remove(dead).expect("remove");
                pair.update();
            }
            let bytes = pair.fill(write, 3);
            pair.start_whole(write).expect("start on one rail");
            pair.end().expect("success");
            assert!(pair.moved(write) == bytes, "{dead}");

            pair.fabric.set_nic_state(dead, NicState::Working).expect("a NIC");
            pair.open_rail(rail);
            assert!(pair.failed_nics().is_empty());
            let (bytes, before) = (pair.fill(write, 4), pair.bytes());
            pair.start_whole(write).expect("start");
            pair.end().expect("success");
            assert!(pair.moved(write) == bytes, "{dead}");
            let after = pair.bytes();
            let half = CHUNKS / 2 * CHUNK;
            assert!([0, 1].iter().all(|rail: &usize| after[*rail] - before[*rail] >= half - 100));
        }
    }
}

/// LIFE-10
#[test]
fn rails_under_load_lose_no_byte_while_nics_fail_and_return() {
    let mut pair = Pair::new(Progress::Thread, &Stripe::chunks(CHUNK).depth(DEPTH));
    for round in 0..40 {
        let (write, rail) = (round % 3 != 0, round % RAILS);
        let dead = if round % 4 < 2 { NEAR[rail] } else { FAR[rail] };
        let bytes = pair.fill(write, round);
        let fabric = pair.fabric.clone();
        let loss = thread::spawn(move || {
            thread::sleep(Duration::from_micros(20 * round as u64));
            fabric.set_nic_state(dead, NicState::Lost).expect("a NIC");
        });
        pair.start_whole(write).expect("start");
        let result = pair.end();
        loss.join().expect("no panic");
        assert_eq!(result.expect("one rail is left"), LEN as u64, "round {round}");
        assert!(pair.moved(write) == bytes, "round {round}");
        pair.fabric.set_nic_state(dead, NicState::Working).expect("a NIC");
        pair.open_rail(rail);
    }
}

/// LIFE-10
#[test]
fn failed_chunk_is_moved_again_on_another_rail() {
    let mut pair = Pair::plain();
    let bytes = pair.fill(true, 1);
    pair.faults.fail_nth(NicCall::Transfer, 10, Errno(5));
    pair.start_whole(true).expect("start");
    pair.end().expect("success");
    assert!(pair.moved(true) == bytes);
    assert_eq!(pair.failed_nics().len(), 1);
    assert_eq!(pair.faults.calls(NicCall::Transfer), CHUNKS + 1);
    // A post that fails on a NIC that works.
    let mut pair = Pair::plain();
    let bytes = pair.fill(true, 1);
    pair.faults.fail_nth(NicCall::Post, 3, Errno(5));
    pair.start_whole(true).expect("start");
    pair.end().expect("success");
    assert!(pair.moved(true) == bytes);
    // A queue that cannot be read.
    let mut pair = Pair::plain();
    let bytes = pair.fill(true, 1);
    pair.start_whole(true).expect("start");
    pair.faults.fail_nth(NicCall::ReadCq, 2, Errno(5));
    pair.end().expect("success");
    assert!(pair.moved(true) == bytes);
    assert_eq!(pair.failed_nics().len(), 1);
}

/// LIFE-10
#[test]
fn port_that_is_up_again_is_taken_back_by_a_connect() {
    let mut pair = Pair::plain();
    let name = pair.targets.open(&pair.domains[1].as_ref().expect("open")[1]).expect("a name");
    pair.rails.connect(NEAR[1], FAR[1], &name).expect("the peer's new endpoint");
    pair.fabric.set_nic_state(FAR[1], NicState::PortDown).expect("a NIC");
    let bytes = pair.fill(true, 1);
    pair.start_whole(true).expect("start");
    pair.end().expect("success");
    assert!(pair.moved(true) == bytes);
    assert_eq!(pair.failed_nics(), [NEAR[1]]);
    pair.fabric.set_nic_state(FAR[1], NicState::Working).expect("a NIC");
    pair.rails.connect(NEAR[1], FAR[1], &name).expect("connect");
    assert!(matches!(pair.status(NEAR[1]).state, RailState::Working));
    let before = pair.bytes();
    pair.start_whole(true).expect("start");
    pair.end().expect("success");
    assert!(pair.bytes()[1] - before[1] >= CHUNKS / 2 * CHUNK - 100);
}

/// LIFE-10
///
/// Requests of the old connection that fail after the new one is made are moved again, and do not
/// end the new connection.
#[test]
fn rail_can_be_connected_again_in_the_middle_of_a_transfer() {
    let mut pair = Pair::plain();
    let bytes = pair.fill(true, 1);
    pair.start_whole(true).expect("start");
    pair.rails.poll(&mut Vec::new());
    let name = pair.targets.open(&pair.domains[1].as_ref().expect("open")[1]).expect("a name");
    pair.rails.connect(NEAR[1], FAR[1], &name).expect("connect");
    pair.end().expect("success");
    assert!(pair.moved(true) == bytes);
    assert!(pair.failed_nics().is_empty());
    let before = pair.bytes();
    pair.start_whole(true).expect("start");
    pair.end().expect("success");
    assert!(pair.bytes()[1] - before[1] >= CHUNKS / 2 * CHUNK - 100);
}

/// LIFE-10
///
/// The application takes a rail out of use in the middle of a transfer, and closes the domain.
#[test]
fn rail_can_be_removed_in_the_middle_of_a_transfer() {
    let mut pair = Pair::plain();
    let bytes = pair.fill(true, 1);
    pair.start_whole(true).expect("start");
    pair.rails.poll(&mut Vec::new());
    pair.rails.remove(NEAR[0]).expect("remove");
    pair.local.remove(NEAR[0]).expect("remove");
    let [near, _far] = pair.domains[0].take().expect("open");
    near.close().map_err(Error::from).expect("nothing is left in the domain");
    pair.end().expect("success");
    assert!(pair.moved(true) == bytes);
    assert_eq!(pair.rails.rails().count(), 1);
}

/// LIFE-10
///
/// The application may use the memory again after the completion, so it comes after the last chunk.
#[test]
fn failed_transfer_ends_after_its_last_chunk() {
    let mut pair = Pair::new(Progress::Thread, &Stripe::chunks(CHUNK).depth(DEPTH));
    // The peer closes a key without a word, so the second rail's chunks are refused.
    pair.remote.remove(FAR[1]).expect("remove");
    let gate = pair.faults.hold(NicCall::Transfer);
    pair.start_whole(true).expect("start");
    gate.wait_held();
    let mut done = Vec::new();
    assert_eq!(pair.rails.wait(&mut done, Duration::from_millis(200)), 0, "a chunk is in flight");
    gate.release();
    assert_eq!(pair.end().expect_err("refused").kind(), ErrorKind::InvalidKey);
}

fn assert_refused(result: hmem::Result<()>, kind: ErrorKind) -> Error {
    let error = result.expect_err("refused");
    assert_eq!(error.kind(), kind, "{error:#}");
    assert!(error.remedy_text().is_some(), "{error:#}");
    error
}

/// LIFE-10
#[test]
fn transfer_without_a_rail_is_a_typed_error() {
    let mut pair = Pair::plain();
    let name = pair.targets.open(&pair.domains[0].as_ref().expect("open")[1]).expect("a name");
    for result in [pair.rails.connect("other", FAR[0], &name), pair.rails.remove("other")] {
        assert_refused(result, ErrorKind::InvalidArgument);
    }
    let malformed = hmem::transfer::EndpointName(vec![1]);
    let result = pair.rails.connect(NEAR[0], FAR[0], &malformed);
    assert_refused(result, ErrorKind::Malformed);
    assert!(matches!(pair.status(NEAR[0]).state, RailState::Working));

    for rail in NEAR {
        pair.rails.remove(rail).expect("remove");
    }
    assert_refused(pair.start_whole(true), ErrorKind::Unreachable);
    assert_eq!(pair.rails.wait(&mut Vec::new(), Duration::MAX), 0, "nothing is in progress");
    let near = &pair.domains[0].as_ref().expect("open")[0];
    pair.rails.open(near).expect("open");
    let error = assert_refused(pair.start_whole(true), ErrorKind::Unreachable);
    assert_eq!(error.context_value("rails"), Some("loopback/near0: not connected"));
}

/// LIFE-10
#[test]
fn loss_of_all_rails_ends_transfers_with_a_typed_error() {
    let mut pair = Pair::plain();
    pair.start_whole(true).expect("start");
    pair.rails.poll(&mut Vec::new());
    for nic in [NEAR[0], FAR[1]] {
        pair.fabric.set_nic_state(nic, NicState::Lost).expect("a NIC");
    }
    let error = pair.end().expect_err("no rail is left");
    let kinds = [ErrorKind::Unavailable, ErrorKind::Unreachable];
    assert!(kinds.contains(&error.kind()), "{error:#}");
    let error = assert_refused(pair.start_whole(true), ErrorKind::Unreachable);
    let reasons = error.context_value("rails").expect("the reasons");
    assert!(NEAR.iter().all(|nic| reasons.contains(nic)), "{reasons}");
}

/// LIFE-10
#[test]
fn peer_with_fewer_rails_is_reached_over_those_that_it_has() {
    let mut pair = Pair::plain();
    pair.remote.remove(FAR[0]).expect("remove");
    pair.update();
    let bytes = pair.fill(true, 1);
    pair.start_whole(true).expect("start");
    pair.end().expect("success");
    assert!(pair.moved(true) == bytes);
    assert_eq!(pair.bytes(), [0, LEN as u64]);
    pair.rails.remove(NEAR[1]).expect("remove");
    let error = assert_refused(pair.start_whole(true), ErrorKind::Unreachable);
    let reason = "loopback/near0: the peer has no key for far0";
    assert_eq!(error.context_value("rails"), Some(reason));
    pair.local.remove(NEAR[0]).expect("remove");
    let error = assert_refused(pair.start_whole(true), ErrorKind::Unreachable);
    let reason = "loopback/near0: the local memory is not on this NIC";
    assert_eq!(error.context_value("rails"), Some(reason));
    assert_refused(pair.local.remove(NEAR[0]).map(drop), ErrorKind::InvalidArgument);
}

/// LIFE-10, LIFE-03
#[test]
fn striped_transfer_of_another_generation_is_refused() {
    let mut pair = Pair::plain();
    let whole = 0..LEN as u64;
    let named = pair.peer.generation();
    assert_refused(pair.start(true, whole.clone(), named + 1), ErrorKind::Again);
    for wrong in [0..LEN as u64 + 1, Range { start: 8, end: 4 }] {
        assert_refused(pair.start(true, wrong, named), ErrorKind::OutOfBounds);
    }
    // The bytes are the same ones as long as one NIC keeps its key.
    pair.remote.remove(FAR[0]).expect("remove");
    pair.update();
    pair.start(true, whole.clone(), named).expect("start");
    pair.end().expect("success");
    let far = open(&pair.hmem, FAR[0]);
    pair.remote.reopen(&far).expect("other keys");
    pair.update();
    assert_refused(pair.start(true, whole, named), ErrorKind::InvalidKey);
    // A key that the peer has closed without a word ends the transfer. The rails go on.
    pair.start_whole(true).expect("start");
    pair.remote.withdraw().expect("withdraw");
    assert_eq!(pair.end().expect_err("no region").kind(), ErrorKind::InvalidKey);
    assert!(pair.failed_nics().is_empty());
}

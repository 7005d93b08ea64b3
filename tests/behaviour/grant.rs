//! Grants: parts of a region that a peer may access until the grant is revoked.

use std::{collections::HashSet, thread};

use hmem::{
    Access, Addressing, Errno, ErrorKind, Grant, GrantKind, Iova, MemoryRegion, MrMode, RemoteKey,
    Result,
    loopback::NicCall,
    provider::{WindowState, WindowType},
    transfer::{Operation, PeerId, WorkRequest},
};

use crate::{
    config::{Need, TestConfig, need, needs, over_configs},
    memory::{Bytes, pattern},
    net::{LOCAL, Net, REMOTE, Setup, provider_name, segment, wait_held},
};

const ENFORCED_BOUNDS: Need = need(
    "verbs",
    "rdma_rxe enforces the bounds of a window's region, not those of the window",
    TestConfig::is_loopback,
);
const LOOPBACK: Need =
    need("verbs", "the test decides which windows the NIC has", TestConfig::is_loopback);

over_configs! {
    /// MW-09
    a_grant_gives_access_to_its_part_with_its_rights: Pairwise, needs::WINDOWS;
    /// MW-09
    nothing_is_reached_outside_a_grant: Pairwise, ENFORCED_BOUNDS;
    /// MW-09
    grant_keeps_its_region_and_is_revoked_on_drop: Pairwise, needs::WINDOWS;
    /// MW-09
    a_peer_revokes_its_grant_by_a_message: Pairwise, needs::KEYS_AT_HAND, needs::WINDOWS;
    /// MW-09
    grant_uses_and_names_the_best_mechanism_of_the_nic: Pairwise, LOOPBACK;
    /// MW-09
    revoking_waits_for_an_access_in_flight: Pairwise, needs::HELD_TRANSFERS;
    /// MW-09, KEY-02
    keys_of_grants_are_not_reused_soon: Pairwise, LOOPBACK;
    /// MW-09
    grants_with_wrong_arguments_are_refused: Pairwise, needs::WINDOWS;
    /// MW-09
    a_grant_keeps_the_reasons_of_its_fallback: Pairwise, LOOPBACK;
    /// MW-09
    key_value_store_refuses_a_client_with_the_key_of_another: Single, needs::SYSTEM;
}

#[path = "../../examples/key_value_store.rs"]
mod key_value_store;

struct Fixture {
    net: Net,
    memory: Bytes,
    region: MemoryRegion,
}

impl Fixture {
    fn new(net: Net) -> Self {
        let memory = net.filled(&pattern(1, 4096));
        // Peers have no right to the region itself.
        let region = net.expose(memory.range(), LOCAL | Access::MW_BIND);
        Self { net, memory, region }
    }

    fn grant(&self, part: std::ops::Range<u64>, access: Access) -> Grant {
        self.region.grant(&self.net.target.endpoint, part, access).expect("grant")
    }

    /// Returns the key that the initiator uses: the grant's key, mapped by the initiator in RAW
    /// mode.
    fn key(&self, grant: &Grant, len: u64) -> RemoteKey {
        if !self.net.config.has(MrMode::RAW) {
            return grant.key().expect("key");
        }
        let raw = grant.raw_key().expect("raw key");
        self.net.initiator.domain.map_raw(Iova(0), len, &raw).expect("map the raw key")
    }

    fn unmap(&self, key: &RemoteKey) {
        if self.net.config.has(MrMode::RAW) {
            self.net.initiator.domain.unmap_key(key).expect("unmap");
        }
    }

    /// Asserts that peers can neither read nor write with a key.
    fn assert_dead(&self, key: &RemoteKey) {
        let before = self.memory.all();
        let dead = self.net.seen(ErrorKind::InvalidKey);
        assert_eq!(self.net.push(key, 0, &[0xFF]).expect_err("a revoked key wrote").kind(), dead);
        assert_eq!(self.net.pull(key, 0, 1).expect_err("a revoked key read").kind(), dead);
        assert_eq!(self.memory.all(), before);
    }
}

fn revoke(grant: Grant) {
    grant.revoke().map_err(|rejected| rejected.error).expect("revoke");
}

/// Returns the kind of grant to expect from a NIC that has every type of memory window.
fn best(config: &TestConfig) -> GrantKind {
    if config.has(MrMode::RAW) { GrantKind::SubRegion } else { GrantKind::Window(WindowType::TwoB) }
}

fn a_grant_gives_access_to_its_part_with_its_rights(config: &TestConfig) {
    let f = Fixture::new(Net::open(config));
    for (at, access) in [(1000, Access::REMOTE_READ), (2000, Access::REMOTE_WRITE), (0, REMOTE)] {
        f.memory.put(0, &pattern(1, 4096));
        let grant = f.grant(at..at + 100, access);
        assert_eq!((grant.kind(), grant.state()), (best(config), WindowState::Valid));
        let key = f.key(&grant, 100);
        let read = f.net.pull(&key, 0, 100);
        if access.contains(Access::REMOTE_READ) {
            assert_eq!(read.expect("read"), pattern(1, 4096)[at as usize..at as usize + 100]);
        } else {
            assert_eq!(read.expect_err("not granted").kind(), ErrorKind::AccessDenied);
        }
        let written = f.net.push(&key, 10, b"lent");
        if access.peers_write() {
            written.expect("write");
            assert_eq!(f.memory.get(at + 10, 4), b"lent");
        } else {
            assert_eq!(written.expect_err("not granted").kind(), ErrorKind::AccessDenied);
        }
        revoke(grant);
        f.assert_dead(&key);
        f.unmap(&key);
    }
    f.region.close().expect("no grant is left");
}

fn nothing_is_reached_outside_a_grant(config: &TestConfig) {
    let f = Fixture::new(Net::open(config));
    let grant = f.grant(1000..1100, REMOTE);
    let key = f.key(&grant, 100);
    for (at, len) in [(100, 1), (99, 2), (0, 101), (u64::MAX, 1)] {
        let error = f.net.pull(&key, at, len).expect_err("outside the grant");
        assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{error}");
        let error = f.net.push(&key, at, &vec![1; len]).expect_err("outside the grant");
        assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{error}");
    }
    assert_eq!(f.memory.all(), pattern(1, 4096));
}

fn grant_keeps_its_region_and_is_revoked_on_drop(config: &TestConfig) {
    let f = Fixture::new(Net::open(config));
    let first = f.grant(0..64, REMOTE);
    let second = f.grant(32..96, Access::REMOTE_READ);
    let keys = [f.key(&first, 64), f.key(&second, 64)];
    let rejected = f.region.close().expect_err("closed under two grants");
    assert_eq!(rejected.error.kind(), ErrorKind::Busy);
    let f = Fixture { region: rejected.value, ..f };
    drop(first);
    f.assert_dead(&keys[0]);
    assert_eq!(f.net.pull(&keys[1], 0, 64).expect("the other grant"), pattern(1, 4096)[32..96]);
    let rejected = f.region.close().expect_err("closed under a grant");
    drop(rejected.value);
    assert_eq!(f.net.pull(&keys[1], 0, 1).expect("the grant keeps the region").len(), 1);
    drop(second);
    let error = f.net.pull(&keys[1], 0, 1).expect_err("the region is gone");
    assert_eq!(error.kind(), f.net.seen(ErrorKind::InvalidKey));
    assert_eq!(f.net.live().windows, 0);
}

/// Sends a message from the initiator that invalidates `key`, and waits for its completions.
fn send_invalidating(f: &Fixture, key: &RemoteKey) -> Result<u64> {
    let inbox = f.net.bytes(64);
    let inbox_region = f.net.expose(inbox.range(), LOCAL);
    let into = segment(inbox.range(), Some(inbox_region.desc().expect("desc")));
    let operation = Operation::Receive { tag: None, from: None };
    let receive = WorkRequest { operation, local: &[into], peer: PeerId(0), context: 5 };
    // SAFETY: the memory outlives the transfer.
    unsafe { f.net.target.endpoint.post(&receive) }.expect("post");
    let message = f.net.local(64, LOCAL);
    let send = Operation::Send { tag: None, invalidate: Some(key) };
    let sent = f.net.transfer(send, &[message.segment(0, 16)]);
    f.net.received().result.expect("receive");
    sent
}

fn a_peer_revokes_its_grant_by_a_message(config: &TestConfig) {
    let f = Fixture::new(Net::open(config));
    let grant = f.grant(0..64, REMOTE);
    let key = grant.key().expect("key");
    f.net.pull(&key, 0, 64).expect("read");
    send_invalidating(&f, &key).expect("the peer revokes the grant");
    assert_eq!(grant.state(), WindowState::Free);
    f.assert_dead(&key);
    revoke(grant);
    let again = f.grant(0..64, REMOTE);
    f.net.pull(&again.key().expect("key"), 0, 64).expect("read");
    f.assert_dead(&key);
    drop(again);
    f.region.close().expect("no grant is left");
}

fn grant_uses_and_names_the_best_mechanism_of_the_nic(config: &TestConfig) {
    use WindowType::{One, TwoA, TwoB};
    for (windows, expected) in [
        (vec![One, TwoA, TwoB], GrantKind::Window(TwoB)),
        (vec![One, TwoA], GrantKind::Window(TwoA)),
        (vec![One], GrantKind::Window(One)),
        (vec![], GrantKind::SubRegion),
    ] {
        let expected = if config.has(MrMode::RAW) { GrantKind::SubRegion } else { expected };
        let mut setup = Setup::of(config);
        setup.provider = setup.provider.windows(windows);
        let f = Fixture::new(setup.open());
        let registered = f.net.live().page_registrations;
        for _ in 0..3 {
            let grant = f.grant(64..128, Access::REMOTE_READ);
            assert_eq!(grant.kind(), expected);
            assert_eq!(f.net.live().page_registrations, registered, "a grant registered pages");
            let key = f.key(&grant, 64);
            assert_eq!(f.net.pull(&key, 0, 64).expect("read"), pattern(1, 4096)[64..128]);
            assert_eq!(f.net.push(&key, 0, &[1]).unwrap_err().kind(), ErrorKind::AccessDenied);
            revoke(grant);
            f.assert_dead(&key);
            f.unmap(&key);
        }
        f.region.close().expect("no grant is left");
    }
}

fn revoking_waits_for_an_access_in_flight(config: &TestConfig) {
    type Ending = fn(Grant);
    for end in [revoke as Ending, drop] {
        let f = Fixture::new(Net::open(config));
        let grant = f.grant(0..64, REMOTE);
        let key = f.key(&grant, 64);
        let gate = f.net.faults.hold(NicCall::Transfer);
        thread::scope(|scope| {
            let accessing = scope.spawn(|| f.net.push(&key, 0, &[9; 64]));
            wait_held(&gate);
            let ending = scope.spawn(|| {
                end(grant);
                f.memory.get(0, 64)
            });
            // Leaves time in which a call that does not wait for the access would return.
            for _ in 0..1000 {
                thread::yield_now();
            }
            assert!(!ending.is_finished(), "revoked in the middle of an access");
            gate.release();
            accessing.join().expect("no panic").expect("the access ends");
            assert_eq!(
                ending.join().expect("no panic"),
                [9; 64],
                "revoked before the access ended"
            );
        });
        f.assert_dead(&key);
    }
}

fn keys_of_grants_are_not_reused_soon(config: &TestConfig) {
    let f = Fixture::new(Net::open(config));
    let mut seen = HashSet::new();
    for round in 0..600 {
        let grant = f.grant(0..64, Access::REMOTE_READ);
        let key = if config.has(MrMode::RAW) {
            grant.raw_key().expect("raw key").0
        } else {
            grant.key().expect("key").as_u64().expect("one key").to_le_bytes().to_vec()
        };
        assert!(seen.insert(key), "the key of an earlier grant came back in round {round}");
        revoke(grant);
        assert!(f.net.live().windows <= 1, "a revoked grant kept its window");
    }
}

fn grants_with_wrong_arguments_are_refused(config: &TestConfig) {
    let f = Fixture::new(Net::open(config));
    let endpoint = &f.net.target.endpoint;
    let kind = |part, access| f.region.grant(endpoint, part, access).unwrap_err().kind();
    assert_eq!(kind(10..10, REMOTE), ErrorKind::ZeroLength);
    assert_eq!(kind(4096..4097, REMOTE), ErrorKind::OutOfBounds);
    assert_eq!(kind(0..u64::MAX, REMOTE), ErrorKind::OutOfBounds);
    assert_eq!(kind(0..8, Access::RECV), ErrorKind::BadAccess);
    let abroad = f.region.grant(&f.net.initiator.endpoint, 0..8, REMOTE).unwrap_err();
    assert_eq!(abroad.context_value("rule"), Some("same-domain"), "{abroad}");
    let read_only = f.net.expose(f.memory.range(), Access::SEND | Access::MW_BIND);
    let error = read_only.grant(endpoint, 0..8, REMOTE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AccessDenied, "{error}");
    if !config.has(MrMode::RAW) {
        let plain = f.net.expose(f.memory.range(), LOCAL);
        let error = plain.grant(endpoint, 0..8, REMOTE).unwrap_err();
        assert_eq!(error.context_value("rule"), Some("region-allows-windows"), "{error}");
    }
    f.region.close().expect("no grant is left");
}

fn key_value_store_refuses_a_client_with_the_key_of_another(config: &TestConfig) {
    let served = key_value_store::run(provider_name(config)).expect("no failure");
    assert_eq!(served.grants, [5, 5]);
    // An RDMA device reports a revoked key like a missing right.
    let expected =
        if config.is_loopback() { ErrorKind::InvalidKey } else { ErrorKind::AccessDenied };
    assert_eq!(served.refusal.kind(), expected, "{}", served.refusal);
}

fn a_grant_keeps_the_reasons_of_its_fallback(config: &TestConfig) {
    let raw = config.has(MrMode::RAW);
    let f = Fixture::new(Net::open(config));
    let endpoint = &f.net.target.endpoint;
    let try_grant = || f.region.grant(endpoint, 0..64, REMOTE);
    let unsupported = Errno(95);
    if raw {
        let grant = try_grant().expect("a sub-region");
        let [reason] = grant.fallback_reasons() else { panic!("one reason: {grant:?}") };
        assert_eq!(reason.context_value("rule"), Some("no-raw-keys"), "{reason}");
    } else {
        assert!(try_grant().expect("grant").fallback_reasons().is_empty());
        f.net.faults.fail_nth(NicCall::AllocWindow, 1, unsupported);
        let grant = try_grant().expect("another type");
        assert_eq!(grant.kind(), GrantKind::Window(WindowType::TwoA));
        let key = grant.key().expect("a key");
        assert_eq!(key.addressing(), Addressing::ZeroBased, "it tells the peer no address");
        let [reason] = grant.fallback_reasons() else { panic!("one reason: {grant:?}") };
        assert_eq!(reason.context_value("window"), Some("2B"), "{reason}");
        assert_eq!(reason.os_errno(), Some(unsupported), "{reason}");
    }
    for nth in 1..=3 {
        f.net.faults.fail_nth(NicCall::AllocWindow, nth, unsupported);
    }
    f.net.faults.fail_nth(NicCall::RegisterSub, 1, Errno(12));
    let error = try_grant().expect_err("no mechanism works");
    assert_eq!(error.os_errno(), Some(Errno(12)), "{error}");
    let reasons = error.context_value("windows").expect("the reasons against windows");
    let named: &[&str] =
        if raw { &["rule=no-raw-keys"] } else { &["window=2B", "window=2A", "window=1"] };
    assert!(named.iter().all(|named| reasons.contains(named)), "{error}");
    assert!(raw || reasons.contains("EOPNOTSUPP"), "{error}");
    f.net.faults.clear();
    if !raw {
        // After an error the window may be bound, so it is freed and not used again.
        let windows = || f.net.target.domain.live().windows;
        f.net.faults.fail_nth(NicCall::BindWindow, 1, Errno(5));
        assert_eq!(try_grant().expect_err("no bind").os_errno(), Some(Errno(5)));
        assert_eq!(windows(), 0);
        let grant = try_grant().expect("grant");
        f.net.faults.fail_nth(NicCall::BindWindow, 1, Errno(5));
        revoke(grant);
        assert_eq!(windows(), 0);
    }
    let setup = Setup::of(config);
    let provider = setup.provider.clone().windows(vec![]);
    let f = Fixture::new(Setup { provider, ..setup }.open());
    let grant = f.grant(0..64, REMOTE);
    assert_eq!(grant.kind(), GrantKind::SubRegion);
    assert_eq!(grant.fallback_reasons().len(), 1);
}

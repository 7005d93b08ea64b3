//! Behaviours of grants: parts of a region that a peer may access until the grant is revoked.

use std::{collections::HashSet, ops::Range, thread};

use hmem_core::{
    Access, Addressing, Errno, ErrorKind, Grant, GrantKind, Iova, MrMode, RemoteKey, Result,
    provider::{Features, WindowState, WindowType},
    transfer::Operation,
};

use super::{case::Case, link::CaseLink};
use crate::{
    bytes::{assert_bytes, pattern},
    control::Call,
    link::{Bytes, Exposed, LOCAL, REMOTE, segment, wait_held},
    trial::{Outcome, assert_kind, skip},
};

/// The errno of an operation that a driver does not support.
const UNSUPPORTED: Errno = Errno(95);

/// A region to which peers have no right, for grants of its parts.
struct Fixture {
    link: CaseLink,
    memory: Bytes,
    region: Exposed,
}

impl Fixture {
    fn new(case: &Case) -> Self {
        let link = CaseLink::open(case);
        let memory = link.filled(&pattern(1, 4096));
        let mut access = LOCAL;
        access.set(Access::MW_BIND, case.features.contains(Features::WINDOWS));
        let region = link.expose(memory.range(), access);
        Self { link, memory, region }
    }

    fn try_grant(&self, part: Range<u64>, access: Access) -> Result<Grant> {
        self.region.grant(&self.link.target.endpoint, part, access)
    }

    fn grant(&self, part: Range<u64>, access: Access) -> Grant {
        self.try_grant(part, access).expect("grant")
    }

    /// Returns the key that the initiator uses: the grant's key, mapped by the initiator in RAW
    /// mode.
    fn key(&self, grant: &Grant, len: u64) -> RemoteKey {
        if !self.link.has(MrMode::RAW) {
            return grant.key().expect("key");
        }
        let raw = grant.raw_key().expect("raw key");
        self.link.initiator.domain.map_raw(Iova(0), len, &raw).expect("map the raw key")
    }

    /// Makes the next `count` calls of a kind fail with an errno.
    fn fail(&self, call: Call, count: u64, errno: Errno) {
        let control = self.link.case.control.as_ref().expect("the behaviour needs control");
        for nth in 1..=count {
            assert!(control.fail_nth(call, nth, errno), "the back end fails calls");
        }
    }

    #[track_caller]
    fn assert_dead(&self, key: &RemoteKey) {
        self.link.assert_revoked(key, &self.memory);
    }
}

fn revoke(grant: Grant) {
    grant.revoke().map_err(|rejected| rejected.error).expect("revoke");
}

pub(super) fn grant_gives_access_to_its_part_with_its_rights(case: &Case) {
    let f = Fixture::new(case);
    for (at, access) in [(1000, Access::REMOTE_READ), (2000, Access::REMOTE_WRITE), (0, REMOTE)] {
        f.memory.put(0, &pattern(1, 4096));
        let grant = f.grant(at..at + 100, access);
        assert_eq!(grant.state(), WindowState::Valid);
        let key = f.key(&grant, 100);
        let read = f.link.pull(&key, 0, 100);
        if access.contains(Access::REMOTE_READ) {
            let granted = &pattern(1, 4096)[at as usize..at as usize + 100];
            assert_bytes(&read.expect("read"), granted, "the granted bytes");
        } else {
            case.assert_refused(read, ErrorKind::AccessDenied, "a read without the right");
        }
        let written = f.link.push(&key, 10, b"lent");
        if access.peers_write() {
            written.expect("write");
            assert_eq!(f.memory.get(at + 10, 4), b"lent");
        } else {
            case.assert_refused(written, ErrorKind::AccessDenied, "a write without the right");
        }
        revoke(grant);
        f.assert_dead(&key);
        if f.link.has(MrMode::RAW) {
            f.link.initiator.domain.unmap_key(&key).expect("unmap");
        }
    }
    f.region.close().expect("no grant is left");
}

pub(super) fn nothing_is_reached_outside_a_grant(case: &Case) -> Outcome {
    let f = Fixture::new(case);
    let grant = f.grant(1000..1100, REMOTE);
    if !grant.enforces_bounds() {
        return skip("the NIC does not enforce the bounds of windows, and says so");
    }
    let key = f.key(&grant, 100);
    for (at, len) in [(100, 1), (99, 2), (0, 101), (u64::MAX, 1)] {
        let read = f.link.pull(&key, at, len);
        case.assert_refused(read, ErrorKind::OutOfBounds, "a read outside the grant");
        let write = f.link.push(&key, at, &vec![1; len as usize]);
        case.assert_refused(write, ErrorKind::OutOfBounds, "a write outside the grant");
    }
    assert_bytes(&f.memory.all(), &pattern(1, 4096), "the region after refused accesses");
    Ok(())
}

pub(super) fn grant_keeps_its_region_and_is_revoked_on_drop(case: &Case) {
    let f = Fixture::new(case);
    let first = f.grant(0..64, REMOTE);
    let second = f.grant(32..96, Access::REMOTE_READ);
    let keys = [f.key(&first, 64), f.key(&second, 64)];
    let rejected = f.region.close().expect_err("closed under two grants");
    assert_kind(&rejected.error, ErrorKind::Busy, "closing a region with grants");
    let f = Fixture { region: rejected.value, ..f };
    drop(first);
    f.assert_dead(&keys[0]);
    let found = f.link.pull(&keys[1], 0, 64).expect("the other grant");
    assert_bytes(&found, &pattern(1, 4096)[32..96], "bytes of the other grant");
    let rejected = f.region.close().expect_err("closed under a grant");
    drop(rejected.value);
    f.link.pull(&keys[1], 0, 1).expect("the grant keeps the region");
    drop(second);
    let read = f.link.pull(&keys[1], 0, 1);
    case.assert_refused(read, ErrorKind::InvalidKey, "a read of a region that is gone");
    assert_eq!(f.link.live().windows, 0);
}

pub(super) fn peer_revokes_its_grant_by_a_message(case: &Case) -> Outcome {
    let f = Fixture::new(case);
    let grant = f.grant(0..64, REMOTE);
    if !matches!(grant.kind(), GrantKind::Window(WindowType::TwoA | WindowType::TwoB)) {
        return skip("the grant has no window of type 2");
    }
    let key = f.key(&grant, 64);
    f.link.pull(&key, 0, 64).expect("read");
    let (inbox, message) = (f.link.bytes(64), f.link.local(64, LOCAL));
    let inbox_region = f.link.expose(inbox.range(), LOCAL);
    let into = segment(inbox.range(), Some(inbox_region.desc().expect("descriptor")));
    f.link.target.receive(into, 5).expect("post a receive");
    let send = Operation::Send { tag: None, invalidate: Some(&key) };
    let sent = f.link.transfer(send, &[message.segment(0, 16)]);
    f.link.received().result.expect("receive");
    sent.expect("the peer revokes the grant");
    assert_eq!(grant.state(), WindowState::Free);
    f.assert_dead(&key);
    revoke(grant);
    let again = f.grant(0..64, REMOTE);
    f.link.pull(&f.key(&again, 64), 0, 64).expect("read");
    f.assert_dead(&key);
    drop(again);
    f.region.close().expect("no grant is left");
    Ok(())
}

/// Without injected failures, the NIC has every type of window. In RAW mode it has sub-regions
/// only.
pub(super) fn grant_uses_the_best_mechanism_and_says_why(case: &Case) {
    use WindowType::{One, TwoA, TwoB};
    let f = Fixture::new(case);
    let raw = case.has(MrMode::RAW);
    let registered = f.link.live().page_registrations;
    // The window of an ended grant is used again, so better types come later.
    for (refused, best) in [
        (3, GrantKind::SubRegion),
        (2, GrantKind::Window(One)),
        (1, GrantKind::Window(TwoA)),
        (0, GrantKind::Window(TwoB)),
    ] {
        f.fail(Call::AllocWindow, if raw { 0 } else { refused }, UNSUPPORTED);
        let grant = f.grant(64..128, Access::REMOTE_READ);
        let reasons = grant.fallback_reasons();
        if raw {
            assert_eq!((grant.kind(), reasons.len()), (GrantKind::SubRegion, 1), "{grant:?}");
            assert_eq!(reasons[0].context_value("rule"), Some("no-raw-keys"), "{grant:?}");
        } else {
            assert_eq!((grant.kind(), reasons.len()), (best, refused as usize), "{grant:?}");
            for (reason, window) in reasons.iter().zip(["2B", "2A", "1"]) {
                assert_eq!(reason.context_value("window"), Some(window), "{reason}");
                assert_eq!(reason.os_errno(), Some(UNSUPPORTED), "{reason}");
            }
            if matches!(best, GrantKind::Window(TwoA | TwoB)) {
                let addressing = grant.key().expect("a key").addressing();
                assert_eq!(addressing, Addressing::ZeroBased, "it tells the peer no address");
            }
        }
        assert_eq!(f.link.live().page_registrations, registered, "a grant registered pages");
        let key = f.key(&grant, 64);
        let found = f.link.pull(&key, 0, 64).expect("read");
        assert_bytes(&found, &pattern(1, 4096)[64..128], "the granted bytes");
        let written = f.link.push(&key, 0, &[1]);
        case.assert_refused(written, ErrorKind::AccessDenied, "a write without the right");
        revoke(grant);
        f.assert_dead(&key);
        if raw {
            f.link.initiator.domain.unmap_key(&key).expect("unmap");
        }
    }
    f.region.close().expect("no grant is left");
}

pub(super) fn grant_that_no_mechanism_gives_has_every_reason(case: &Case) {
    let f = Fixture::new(case);
    let raw = case.has(MrMode::RAW);
    f.fail(Call::AllocWindow, if raw { 0 } else { 3 }, UNSUPPORTED);
    f.fail(Call::RegisterSub, 1, Errno(12));
    let error = f.try_grant(0..64, REMOTE).expect_err("no mechanism works");
    assert_eq!(error.os_errno(), Some(Errno(12)), "{error}");
    let reasons = error.context_value("windows").expect("the reasons against windows");
    let named: &[&str] =
        if raw { &["rule=no-raw-keys"] } else { &["window=2B", "window=2A", "window=1"] };
    assert!(named.iter().all(|named| reasons.contains(named)), "{error}");
    assert!(raw || reasons.contains("EOPNOTSUPP"), "{error}");
}

pub(super) fn failed_grant_leaves_no_window(case: &Case) {
    const FAILED: Errno = Errno(5);
    let f = Fixture::new(case);
    // After an error the window may be bound, so it is freed and not used again.
    f.fail(Call::BindWindow, 1, FAILED);
    let error = f.try_grant(0..64, REMOTE).expect_err("no bind");
    assert_eq!((error.os_errno(), f.link.live().windows), (Some(FAILED), 0), "{error}");
    let grant = f.grant(0..64, REMOTE);
    f.fail(Call::BindWindow, 1, FAILED);
    revoke(grant);
    assert_eq!(f.link.live().windows, 0);
}

pub(super) fn revoking_waits_for_an_access_in_flight(case: &Case) {
    for end in [revoke as fn(Grant), drop] {
        let f = Fixture::new(case);
        let grant = f.grant(0..64, REMOTE);
        let key = f.key(&grant, 64);
        f.link.push(&key, 0, &[1]).expect("the local buffer is registered before the gate");
        thread::scope(|scope| {
            // Dropped before the scope ends, so that a failure releases the held call.
            let gate = f.link.hold(Call::Transfer);
            let accessing = scope.spawn(|| f.link.push(&key, 0, &[9; 64]));
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
            let moved = accessing.join().expect("the access's thread").is_ok();
            let found = ending.join().expect("the revoking thread");
            assert!(moved, "the access had begun");
            assert_eq!(f.memory.get(0, 64), found, "memory was touched after the end of the grant");
            assert_eq!(found, [9; 64], "the grant ended before the access");
        });
        f.assert_dead(&key);
    }
}

pub(super) fn keys_of_grants_are_not_reused_soon(case: &Case) {
    let f = Fixture::new(case);
    let mut seen = HashSet::new();
    for round in 0..600 {
        let grant = f.grant(0..64, Access::REMOTE_READ);
        let key = if case.has(MrMode::RAW) {
            grant.raw_key().expect("raw key").0
        } else {
            grant.key().expect("key").as_u64().expect("one number").to_le_bytes().to_vec()
        };
        assert!(seen.insert(key), "the key of an earlier grant came back in round {round}");
        revoke(grant);
        assert!(f.link.live().windows <= 1, "a revoked grant kept its window");
    }
}

pub(super) fn grants_with_wrong_arguments_are_refused(case: &Case) {
    let f = Fixture::new(case);
    for (part, access, kind) in [
        (10..10, REMOTE, ErrorKind::ZeroLength),
        (4096..4097, REMOTE, ErrorKind::OutOfBounds),
        (0..u64::MAX, REMOTE, ErrorKind::OutOfBounds),
        (0..8, Access::RECV, ErrorKind::BadAccess),
    ] {
        let what = format!("a grant of {part:?} with {access}");
        assert_kind(&f.try_grant(part, access).expect_err(&what), kind, &what);
    }
    let abroad = f.region.grant(&f.link.initiator.endpoint, 0..8, REMOTE);
    let abroad = abroad.expect_err("an endpoint of another domain");
    assert_eq!(abroad.context_value("rule"), Some("same-domain"), "{abroad}");
    let endpoint = &f.link.target.endpoint;
    let mut access = Access::SEND;
    access.set(Access::MW_BIND, case.features.contains(Features::WINDOWS));
    let read_only = f.link.expose(f.memory.range(), access);
    let error = read_only.grant(endpoint, 0..8, REMOTE).expect_err("the NIC may only read");
    assert_kind(&error, ErrorKind::AccessDenied, "a grant of writes");
    if matches!(f.grant(0..8, REMOTE).kind(), GrantKind::Window(_)) {
        let plain = f.link.expose(f.memory.range(), LOCAL);
        let error = plain.grant(endpoint, 0..8, REMOTE).expect_err("no right MW_BIND");
        assert_eq!(error.context_value("rule"), Some("region-allows-windows"), "{error}");
    }
    f.region.close().expect("no grant is left");
}

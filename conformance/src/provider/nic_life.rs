//! Behaviours of a NIC that is lost, or whose port goes down.

use hmem_core::{
    ErrorKind, RoamingRegion,
    key_feed::PeerKeys,
    provider::{NicEvent, NicState},
};

use super::{case::Case, completions::wait_without_timeout, link::CaseLink};
use crate::{
    link::{LOCAL, REMOTE, open_endpoint, segment},
    trial::{Outcome, skip},
};

/// Sets the state of the NIC. Returns the outcome that skips the behaviour if the back end cannot
/// do so.
fn set(case: &Case, state: NicState) -> Outcome {
    let control = case.control.as_ref().expect("the behaviour needs control");
    if control.set_nic_state(state) { Ok(()) } else { skip("the back end cannot lose its NIC") }
}

pub(super) fn lost_nic_ends_requests_and_refuses_calls(case: &Case) -> Outcome {
    let link = CaseLink::open(case);
    let side = &link.target;
    let own = side.register(vec![0; 64], LOCAL);
    let memory = link.bytes(4096);
    let region = link.expose(memory.range(), REMOTE);
    let key = link.key(&region);
    link.push(&key, 0, &[1]).expect("write");
    for context in [1, 2] {
        side.receive(segment(own.range(), own.desc().ok()), context).expect("receive");
    }
    assert_eq!(side.domain.nic_state(), NicState::Working);
    set(case, NicState::Lost)?;
    assert_eq!(side.domain.nic_state(), NicState::Lost);
    assert_eq!(side.domain.nic_events(), [NicEvent::DeviceLost]);
    let refused = |result: hmem_core::Result<()>, what: &str| {
        let error = result.expect_err(what);
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{what}: {error:#}");
        assert!(error.remedy_text().is_some(), "{what}: {error:#}");
    };
    let mut done = Vec::new();
    while done.len() < 2 {
        let ended = wait_without_timeout(&side.cq, 8).expect("wait");
        assert!(!ended.is_empty(), "a wait without a timeout returned no completion");
        done.extend(ended);
    }
    let mut contexts: Vec<_> = done.iter().map(|completion| completion.context).collect();
    contexts.sort_unstable();
    assert_eq!(contexts, [1, 2], "each request ends once");
    done.into_iter().for_each(|it| refused(it.result.map(drop), "a pending receive"));
    refused(wait_without_timeout(&side.cq, 1).map(drop), "a wait");
    let registered = side.domain.register(vec![0; 8], LOCAL);
    refused(registered.map(drop).map_err(|it| it.error), "a registration");
    refused(side.domain.open_cq(1).map(drop), "a queue");
    refused(open_endpoint(&side.domain, false, None).map(drop), "an endpoint");
    refused(link.push(&key, 0, &[2]).map(drop), "a write");
    region.close().expect("close a region of the lost NIC");
    own.close().expect("close a region of the lost NIC");
    if key.is_mapped() {
        link.initiator.domain.unmap_key(&key).expect("unmap a key in a domain of the lost NIC");
    }
    let [initiator, target] = link.into_sides();
    for side in [initiator, target] {
        side.endpoint.close().expect("close an endpoint of the lost NIC");
        drop(side.cq);
        side.domain.close().expect("close a domain of the lost NIC");
    }
    set(case, NicState::Working)
}

pub(super) fn requests_fail_while_the_port_is_down(case: &Case) -> Outcome {
    let link = CaseLink::open(case);
    let memory = link.bytes(4096);
    let region = link.expose(memory.range(), REMOTE);
    let key = link.key(&region);
    link.push(&key, 0, &[1]).expect("write");
    set(case, NicState::PortDown)?;
    assert_eq!(link.target.domain.nic_state(), NicState::PortDown);
    let error = link.push(&key, 0, &[2]).expect_err("the port is down");
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:#}");
    set(case, NicState::Working)?;
    assert_eq!(link.target.domain.nic_state(), NicState::Working);
    let events = link.target.domain.nic_events();
    assert!(
        matches!(events[..], [NicEvent::PortDown(down), NicEvent::PortUp(up)] if down == up),
        "{events:?}"
    );
    link.assert_works(&key);
    Ok(())
}

pub(super) fn memory_of_a_lost_nic_is_registered_again_with_a_new_key(case: &Case) -> Outcome {
    let lost = CaseLink::open(case);
    let region = lost.target.register(vec![5; 4096], REMOTE);
    let mut region = RoamingRegion::new(region).map_err(|it| it.error).expect("publish");
    let mut subscription = region.feed().subscribe();
    let mut peer = PeerKeys::default();
    peer.apply(&subscription.next().expect("generation 1")).expect("apply");
    set(case, NicState::Lost)?;
    let error = region.reopen(&lost.target.domain).expect_err("the lost domain");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:#}");
    assert_eq!(region.feed().generation(), 1, "a failure publishes nothing");
    set(case, NicState::Working)?;
    let next = CaseLink::open(case);
    assert_eq!(region.reopen(&next.target.domain).expect("register again"), 2);
    next.target.make_usable(region.region().expect("registered"));
    assert_eq!(lost.target.domain.live().regions, 0, "the old region is closed");
    peer.apply(&subscription.next().expect("generation 2")).expect("apply");
    let nic = &case.attr.nic.name;
    let stale = peer.segments(nic, 0..4096, 1).expect_err("the old generation");
    assert_eq!(stale.kind(), ErrorKind::InvalidKey);
    let segments = peer.segments(nic, 0..4096, 2).expect("the new key");
    next.push(segments[0].key, 0, &[6; 64]).expect("write");
    assert_eq!(region.withdraw().expect("withdraw"), 3);
    assert!(region.region().is_none());
    assert_eq!(next.target.domain.live().regions, 0);
    assert_eq!(region.reopen(&next.initiator.domain).expect("another domain"), 4);
    let applied = peer.apply(&subscription.next().expect("generation 4")).expect("apply");
    assert_eq!((applied.generation, applied.missed), (4, 1));
    let memory = region.close().map_err(|it| it.error).expect("close");
    assert_eq!((&memory[..64], &memory[64..]), (&[6; 64][..], &[5; 4032][..]));
    assert!(peer.apply(&subscription.next().expect("the last generation")).is_ok());
    assert!(peer.segments(nic, 0..1, 5).is_err(), "a closed region has no key");
    Ok(())
}

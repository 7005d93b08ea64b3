//! Connections over a fake library that moves bytes: recovery after a refused access, and the bytes
//! of immediate data in work requests.

#[allow(dead_code, reason = "other tests use the rest of it")]
mod fake;
#[path = "../../p2p/tests/staging_cases/mod.rs"]
mod staging_cases;
#[allow(dead_code, reason = "other tests use the rest of it")]
mod wire;

use std::sync::Arc;

use hmem_core::{
    Addressing, ErrorKind, Iova, RemoteKey,
    provider::{EndpointAttr, StagingAttr},
    transfer::{Completion, CompletionKind, RemoteSegment},
};
use hmem_iface_system::{Simulated, Stepping};
use hmem_provider_verbs::Verbs;
use staging_cases::*;
use wire::Misbehaviour;

const CHUNK: u64 = 4096;
const STAGING: StagingAttr = StagingAttr { buffer_len: CHUNK as usize, buffer_count: 8 };

fn net(stepping: Stepping) -> Net {
    let verbs = Verbs::builder().functions(wire::functions()).build().expect("start");
    let device = Simulated::builder().window(1 << 32).stepping(stepping).build();
    Net::new(Arc::new(verbs), None, STAGING, device.expect("build the device"))
}

fn remote(key: &RemoteKey, len: u64) -> RemoteSegment<'_> {
    RemoteSegment { address: key.base(), len, key }
}

/// Reads all completions of a side. Returns their contexts and the kinds of their errors.
fn ended(side: &Side) -> Vec<(u64, Result<u64, ErrorKind>)> {
    let mut out = Vec::new();
    while side.cq.read(&mut out, 16).expect("read completions") > 0 {}
    let facts = |end: Completion| (end.context, end.result.map_err(|error| error.kind()));
    let mut facts: Vec<_> = out.into_iter().map(facts).collect();
    facts.sort_by_key(|(context, _)| *context);
    facts
}

/// MR-05: a refused access ends the connection. One call on each side recovers it, and reports every
/// outstanding request.
#[test]
fn reconnect_recovers_from_a_refused_access_and_reports_all_requests() {
    let net = net(Stepping::Thread);
    let (near, far) = (net.near.host(CHUNK, LOCAL), net.far.host(CHUNK, LOCAL | REMOTE));
    near.put(0, &[7; 64]);
    let key = far.region().key().expect("key");
    let unknown = RemoteKey::new(Addressing::Virtual, Iova(0), 8, 1);
    let write = |key: &RemoteKey, context| {
        net.near.endpoint.write(&[near.slice(0, 8)], &[remote(key, 8)], net.peer, context)
    };
    for round in 0..3 {
        net.far.endpoint.receive(&[far.slice(8, 8)], None, 1).expect("receive");
        net.near.endpoint.receive(&[near.slice(8, 8)], None, 2).expect("receive");
        write(&unknown, 3).expect("post");
        write(&key, 4).expect("post");
        // One poll: the first write has failed, and nothing is flushed yet.
        let mut done = Vec::new();
        assert_eq!(net.near.cq.read(&mut done, 1).expect("read"), 1);
        let error = done.remove(0).result.expect_err("no region has the key");
        assert_eq!(error.kind(), ErrorKind::AccessDenied, "{error}");
        // The device writes no further completion before the reset.
        wire::misbehave(Misbehaviour { hangs: true, ..Misbehaviour::default() });
        net.near.endpoint.reconnect().expect("connect again");
        net.far.endpoint.reconnect().expect("connect again");
        let canceled = Err(ErrorKind::Canceled);
        assert_eq!(ended(&net.near), [(2, canceled), (4, canceled)], "round {round}");
        assert_eq!(ended(&net.far), [(1, canceled)], "round {round}");
        wire::misbehave(Misbehaviour::default());
        write(&key, 5).expect("post");
        let (mut here, _) = net.complete(1, 0);
        assert_eq!(here.remove(0).result.expect("success"), 8);
        assert_eq!(far.get(0, 8), [7; 8]);
        net.near.endpoint.send(&[near.slice(0, 8)], None, net.peer, 6).expect("post a message");
        net.far.endpoint.receive(&[far.slice(8, 8)], None, 7).expect("receive");
        let (_, mut there) = net.complete(1, 1);
        assert_eq!(there.remove(0).result.expect("success"), 8);
    }
    net.assert_idle();
}

/// MR-05: a connection that works is ended too, and a refused reset keeps the requests.
#[test]
fn reconnect_cancels_the_requests_of_a_connection_that_works() {
    let net = net(Stepping::Thread);
    let (near, far) = (net.near.host(CHUNK, LOCAL), net.far.host(CHUNK, LOCAL | REMOTE));
    let key = far.region().key().expect("key");
    let still = Misbehaviour { hangs: true, ..Misbehaviour::default() };
    wire::misbehave(still);
    let there = [remote(&key, 8)];
    net.near.endpoint.write(&[near.slice(0, 8)], &there, net.peer, 1).expect("post");
    wire::misbehave(Misbehaviour { refuses_resets: 5, ..still });
    let error = net.near.endpoint.reconnect().expect_err("no reset");
    assert_eq!(error.os_errno().map(|errno| errno.0), Some(5), "{error}");
    assert_eq!(ended(&net.near), [], "the NIC may still use the memory");
    wire::misbehave(still);
    net.near.endpoint.reconnect().expect("connect again");
    assert_eq!(ended(&net.near), [(1, Err(ErrorKind::Canceled))]);
    wire::misbehave(Misbehaviour::default());
    let lone = net.near.domain.open_endpoint(&EndpointAttr::new(&net.near.cq)).expect("open");
    let error = lone.reconnect().expect_err("never connected");
    assert_eq!(error.kind(), ErrorKind::BadState, "{error}");
    assert!(error.remedy_text().is_some_and(|text| text.contains("resolve")), "{error}");
}

/// MR-05: a reset also cancels staged requests of which no part was posted to the NIC.
#[test]
fn reset_cancels_staged_requests_that_wait_for_a_copy() {
    let net = net(Stepping::ByHand);
    let staged = net.near.device(&net.device, CHUNK, LOCAL).expect("stage device memory");
    let (host, far) = (net.near.host(8, LOCAL), net.far.host(CHUNK, LOCAL | REMOTE));
    staged.put(0, &[7; CHUNK as usize]);
    let key = far.region().key().expect("key");
    let there = [remote(&key, CHUNK)];
    let posts = wire::posts();
    net.near.endpoint.write(&[staged.slice(0, CHUNK)], &there, net.peer, 1).expect("post");
    // This request waits in the lane behind the staged one.
    let there = [remote(&key, 8)];
    net.near.endpoint.write(&[host.slice(0, 8)], &there, net.peer, 2).expect("post");
    assert_eq!((net.device.pending_copies(), wire::posts()), (1, posts), "only a copy has begun");
    net.near.endpoint.reconnect().expect("connect again");
    net.far.endpoint.reconnect().expect("connect again");
    while net.device.step() {}
    let mut done = Vec::new();
    while done.len() < 2 {
        net.near.cq.read(&mut done, 2).expect("read completions");
    }
    for (completion, context) in done.into_iter().zip(1..) {
        assert_eq!(completion.context, context);
        assert_eq!(completion.result.unwrap_err().kind(), ErrorKind::Canceled);
    }
    assert_eq!(wire::posts(), posts, "a request of the old connection was posted to the new one");
    assert_eq!(far.get(0, CHUNK), [0; CHUNK as usize]);
    net.assert_idle();
}

/// EVT-04: the NIC sends immediate data in network byte order.
#[test]
fn immediate_data_is_in_network_byte_order() {
    let net = net(Stepping::Thread);
    let (near, far) = (net.near.host(64, LOCAL), net.far.host(64, LOCAL | REMOTE));
    let key = far.region().key().expect("key");
    let (from, there) = ([near.slice(0, 8)], [remote(&key, 8)]);
    for (is_write, kind) in [(true, CompletionKind::RemoteWrite), (false, CompletionKind::Receive)]
    {
        net.far.endpoint.receive(&[far.slice(0, 8)], None, 1).expect("receive");
        let (near, peer) = (&net.near.endpoint, net.peer);
        if is_write {
            near.write_immediate(&from, &there, 0x0102_0304, peer, 2).expect("post");
        } else {
            near.send_immediate(&from, None, 0x0102_0304, peer, 2).expect("post");
        }
        assert_eq!(wire::immediate_bytes(), [1, 2, 3, 4]);
        let (_, mut there) = net.complete(1, 1);
        let received = there.remove(0);
        assert_eq!((received.kind, received.data), (kind, Some(0x0102_0304)));
    }
}

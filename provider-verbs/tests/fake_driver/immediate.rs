//! Immediate data and invalidated keys over a fake library that moves bytes: chains, staged memory,
//! and the data of receives. The conformance suite tests them over a real driver.

use std::{sync::Arc, time::Duration};

use crate::staging_cases::*;
use crate::wire;
use hmem_core::{
    ErrorKind, Iova,
    provider::StagingAttr,
    transfer::{Completion, CompletionKind, RemoteSegment},
};
use hmem_iface_system::Simulated;
use hmem_provider_verbs::{Verbs, sys::WcStatus};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const CHUNK: u64 = 4096;
const STAGING: StagingAttr = StagingAttr { buffer_len: CHUNK as usize, buffer_count: 8 };

fn net() -> Net {
    net_on(false)
}

fn net_on(rxe: bool) -> Net {
    net_with(rxe, STAGING)
}

fn net_with(rxe: bool, staging: StagingAttr) -> Net {
    let verbs = Verbs::builder().functions(wire::functions()).build().expect("start");
    let bind = Some(WcStatus::IBV_WC_SUCCESS);
    wire::misbehave(wire::Misbehaviour { is_rxe: rxe, bind, ..Default::default() });
    let device = Simulated::builder().window(1 << 32).build().expect("build the device");
    Net::new(Arc::new(verbs), None, staging, device)
}

fn remote<'a>(key: &'a hmem_core::RemoteKey, offset: u64, len: u64) -> RemoteSegment<'a> {
    RemoteSegment { address: Iova(key.base().0 + offset), len, key }
}

/// Returns the kind, context, length and immediate data of a successful completion.
fn facts(ended: Completion) -> (CompletionKind, u64, u64, Option<u64>) {
    (ended.kind, ended.context, ended.result.expect("success"), ended.data)
}

/// EVT-04: the last work request of a write carries its immediate data.
#[test]
fn last_request_of_a_chain_carries_the_data() {
    let net = net();
    let (near, far) = (net.near.host(CHUNK * 4, LOCAL), net.far.host(CHUNK * 4, LOCAL | REMOTE));
    let bytes = pattern(CHUNK * 4, 3);
    near.put(0, &bytes);
    let key = far.region().key().expect("key");
    net.far.endpoint.receive(&[far.slice(0, 8)], None, 9).expect("receive");
    let pieces = [remote(&key, CHUNK, 100), remote(&key, 3 * CHUNK, 50)];
    let from = [near.slice(0, 60), near.slice(60, 90)];
    net.near.endpoint.write_immediate(&from, &pieces, 0xdead_beef, net.peer, 4).expect("post");
    let (mut here, mut there) = net.complete(1, 1);
    assert_eq!(facts(here.remove(0)), (CompletionKind::Write, 4, 150, None));
    // The completion's length is that of the second work request only, so it is not compared.
    let (kind, context, _, data) = facts(there.remove(0));
    assert_eq!((kind, context, data), (CompletionKind::RemoteWrite, 9, Some(0xdead_beef)));
    assert_eq!(far.get(CHUNK, 100), bytes[..100]);
    assert_eq!(far.get(3 * CHUNK, 50), bytes[100..150]);
    net.assert_idle();
}

/// EVT-04: the last chunk of a staged write carries its immediate data.
#[test]
fn staged_write_carries_the_data_with_its_last_chunk() {
    let net = net();
    for len in [1, CHUNK, CHUNK * 6 + 5] {
        let near = net.near.device(&net.device, len, LOCAL).expect("stage device memory");
        let far = net.far.host(len + 8, LOCAL | REMOTE);
        let bytes = pattern(len, len);
        near.put(0, &bytes);
        let key = far.region().key().expect("key");
        let there = [remote(&key, 0, len)];
        let post = |data, context| {
            let from = [near.slice(0, len)];
            net.near.endpoint.write_immediate(&from, &there, data, net.peer, context)
        };
        net.far.endpoint.receive(&[far.slice(len, 8)], None, 7).expect("receive");
        post(5, 1).expect("post");
        let (mut here, mut there) = net.complete(1, 1);
        assert_eq!(facts(here.remove(0)), (CompletionKind::Write, 1, len, None));
        let (kind, context, _, data) = facts(there.remove(0));
        assert_eq!((kind, context, data), (CompletionKind::RemoteWrite, 7, Some(5)));
        assert_eq!(far.get(0, len), bytes, "{len} bytes");
        let wide = post(1 << 32, 2).expect_err("33 bits");
        assert_eq!(wide.kind(), ErrorKind::InvalidArgument, "{wide}");
        net.assert_idle();
    }
}

/// EVT-04: sends have no share of one or two buffers, so such a write could never end.
#[test]
fn staged_write_with_data_needs_three_buffers() {
    for buffer_count in 1..=3 {
        let net = net_with(false, StagingAttr { buffer_count, ..STAGING });
        let len = CHUNK * 2;
        let near = net.near.device(&net.device, len, LOCAL).expect("stage device memory");
        let far = net.far.host(len + 8, LOCAL | REMOTE);
        let key = far.region().key().expect("key");
        net.far.endpoint.receive(&[far.slice(len, 8)], None, 7).expect("receive");
        let post = |len| {
            let (from, there) = ([near.slice(0, len)], [remote(&key, 0, len)]);
            net.near.endpoint.write_immediate(&from, &there, 5, net.peer, 1)
        };
        if buffer_count < 3 {
            let refused = post(len).expect_err("no buffer for it");
            assert_eq!(refused.kind(), ErrorKind::MessageTooLong, "{refused}");
            post(0).expect("no bytes need no buffer");
        } else {
            post(len).expect("post");
        }
        let (here, _) = net.complete(1, 1);
        assert!(here[0].result.is_ok(), "{here:?}");
        net.assert_idle();
    }
}

/// EVT-05
#[test]
fn staged_write_wakes_sleepers_on_every_queue() {
    let net = net();
    let len = CHUNK * 4;
    let near = net.near.device(&net.device, len, LOCAL).expect("stage device memory");
    let far = net.far.host(len + 8, LOCAL | REMOTE);
    let key = far.region().key().expect("key");
    let channel = net.far.cq.channel().expect("a channel");
    let is_readable = || {
        let fd = channel.fd().expect("fd");
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&now)).expect("poll") == 1
    };
    for turn in 0..3 {
        net.far.endpoint.receive(&[far.slice(len, 8)], None, 7).expect("receive");
        assert!(channel.arm().expect("arm"), "nothing is in flight");
        assert!(!is_readable(), "a thread would sleep here");
        let there = [remote(&key, 0, len)];
        let from = [near.slice(0, len)];
        net.near.endpoint.write_immediate(&from, &there, turn, net.peer, 1).expect("post");
        assert!(is_readable(), "the sleeper must step the write");
        // Only the thread that waits for the target's queue reads. The thread arms the queue before
        // it sleeps again.
        let mut done = Vec::new();
        while net.far.cq.wait(&mut done, 1, Duration::from_millis(100)).expect("wait") == 0 {}
        let (kind, context, _, data) = facts(done.remove(0));
        assert_eq!((kind, context, data), (CompletionKind::RemoteWrite, 7, Some(turn)));
        net.complete(1, 0);
    }
    net.assert_idle();
}

/// EVT-04: a write with immediate data does not change the buffer of the staged receive that it
/// consumes.
#[test]
fn staged_receive_consumed_by_a_write_keeps_its_bytes() {
    let net = net();
    let staged = net.far.device(&net.device, CHUNK, LOCAL).expect("stage device memory");
    let (near, far) = (net.near.host(CHUNK, LOCAL), net.far.host(CHUNK, LOCAL | REMOTE));
    staged.put(0, &[0x55; CHUNK as usize]);
    near.put(0, &[0x77; 64]);
    let key = far.region().key().expect("key");
    for context in [1, 2] {
        let into = [staged.slice(0, CHUNK)];
        net.far.endpoint.receive(&into, None, context).expect("receive");
    }
    let there = [remote(&key, 0, 64)];
    net.near.endpoint.write_immediate(&[near.slice(0, 64)], &there, 11, net.peer, 3).expect("post");
    let (_, mut there) = net.complete(1, 1);
    assert_eq!(facts(there.remove(0)), (CompletionKind::RemoteWrite, 1, 64, Some(11)));
    assert_eq!(staged.get(0, CHUNK), [0x55; CHUNK as usize], "the buffer of the receive");
    assert_eq!(far.get(0, 64), [0x77; 64]);
    // A message with data takes the next receive.
    let from = [near.slice(0, 64)];
    net.near.endpoint.send_immediate(&from, None, 12, net.peer, 4).expect("post");
    let (_, mut there) = net.complete(1, 1);
    assert_eq!(facts(there.remove(0)), (CompletionKind::Receive, 2, 64, Some(12)));
    assert_eq!(staged.get(0, 65), [&[0x77; 64][..], &[0x55]].concat());
    // A message from staged memory can carry data too.
    let source = net.near.device(&net.device, CHUNK, LOCAL).expect("stage device memory");
    net.far.endpoint.receive(&[far.slice(0, 64)], None, 5).expect("receive");
    net.near
        .endpoint
        .send_immediate(&[source.slice(0, 64)], None, u64::from(u32::MAX), net.peer, 6)
        .expect("post");
    let (_, mut there) = net.complete(1, 1);
    let data = Some(u64::from(u32::MAX));
    assert_eq!(facts(there.remove(0)), (CompletionKind::Receive, 5, 64, data));
    net.assert_idle();
}

/// EVT-04: a staged write that waits for a receive of the peer leaves staging buffers for other
/// connections.
#[test]
fn write_waiting_for_a_receive_leaves_buffers_for_others() {
    let net = net();
    let near = net.near.device(&net.device, CHUNK * 16, LOCAL).expect("stage device memory");
    let far = net.far.host(CHUNK * 16, LOCAL | REMOTE);
    let key = far.region().key().expect("key");
    let there = [remote(&key, 0, CHUNK * 16)];
    let from = [near.slice(0, CHUNK * 16)];
    net.near.endpoint.write_immediate(&from, &there, 1, net.peer, 1).expect("post");
    // Another connection of the domain still makes progress.
    let cq = net.near.domain.open_cq(8).expect("a queue");
    let attr = hmem_core::provider::EndpointAttr::new(&cq);
    let other = net.near.domain.open_endpoint(&attr).expect("an endpoint");
    let itself = other.resolve(&other.name()).expect("connect it to itself");
    let own = net.near.host(CHUNK, LOCAL | REMOTE);
    let own_key = own.region().key().expect("key");
    let there = [remote(&own_key, 0, CHUNK)];
    other.write(&[near.slice(0, CHUNK)], &there, itself, 2).expect("post");
    let mut done = Vec::new();
    while cq.read(&mut done, 1).expect("read") == 0 {
        std::thread::yield_now();
    }
    assert_eq!(facts(done.remove(0)), (CompletionKind::Write, 2, CHUNK, None));
    net.far.endpoint.receive(&[], None, 3).expect("receive");
    let (mut here, mut there) = net.complete(1, 1);
    assert_eq!(facts(here.remove(0)), (CompletionKind::Write, 1, CHUNK * 16, None));
    assert_eq!(facts(there.remove(0)).0, CompletionKind::RemoteWrite);
}

#[test]
fn invalidated_key_is_reported_with_each_driver() {
    for rxe in [false, true] {
        let net = net_on(rxe);
        let (near, far) = (net.near.host(64, LOCAL), net.far.host(64, LOCAL | REMOTE));
        let key = far.region().key().expect("key");
        net.far.endpoint.receive(&[far.slice(0, 64)], None, 1).expect("receive");
        net.near.endpoint.send_invalidate(&[near.slice(0, 8)], &key, net.peer, 2).expect("post");
        let (_, mut there) = net.complete(1, 1);
        let ended = there.remove(0);
        assert_eq!(ended.invalidated, Some(key.as_u64().expect("one key")), "rxe: {rxe}");
        assert_eq!(facts(ended), (CompletionKind::Receive, 1, 8, None));
        // The receive of a message that invalidates nothing names no key.
        net.far.endpoint.receive(&[far.slice(0, 64)], None, 3).expect("receive");
        net.near.endpoint.send(&[near.slice(0, 8)], None, net.peer, 4).expect("post");
        let (_, mut there) = net.complete(1, 1);
        assert_eq!(there.remove(0).invalidated, None, "rxe: {rxe}");
    }
}

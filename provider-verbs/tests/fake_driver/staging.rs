//! Staging buffers over verbs: the cases shared with other providers, and cases for a NIC that does
//! not know about staging. The tests run over the device that `HMEM_VERBS_DEVICE` names, or over a
//! fake library that moves bytes.

use std::{sync::Arc, time::Duration};

use crate::staging_cases::*;
use crate::wire;
use crate::wire::{Misbehaviour, misbehave};
use hmem_core::{
    Access, Address, Endpoint, Errno, ErrorKind, Iova, Path, RemoteKey,
    provider::{CompletionChannel, CompletionQueue, EndpointAttr, NicState, Provider, StagingAttr},
    transfer::{AtomicOp, AtomicType, Completion, CompletionKind, PeerId, RemoteSegment},
};
use hmem_iface_system::{DeviceCall, Simulated, Stepping};
use hmem_provider_verbs::Verbs;
use rustix::event::{PollFd, PollFlags};

const CHUNK: u64 = 4096;
const STAGING: StagingAttr = StagingAttr { buffer_len: CHUNK as usize, buffer_count: 8 };
/// Maximum length of a message in bytes: a quarter of the staging buffers.
const LONGEST: u64 = CHUNK * 2;

fn verbs() -> (Arc<dyn Provider>, Option<String>) {
    let name = std::env::var("HMEM_VERBS_DEVICE").ok().filter(|name| !name.is_empty());
    let builder = Verbs::builder();
    let builder = if name.is_some() { builder } else { builder.functions(wire::functions()) };
    (Arc::new(builder.build().expect("load libibverbs")), name)
}

fn device() -> Simulated {
    Simulated::builder().window(1 << 32).build().expect("build the device")
}

fn net_with(staging: StagingAttr, device: Simulated) -> Net {
    let (provider, nic) = verbs();
    Net::new(provider, nic, staging, device)
}

/// Creates both sides over the fake library even if a device is named, since tests can make only
/// the fake library's calls fail.
fn injected() -> Net {
    let verbs = Verbs::builder().functions(wire::functions()).build().expect("start");
    Net::new(Arc::new(verbs), None, STAGING, device())
}

fn net() -> Net {
    net_with(STAGING, device())
}

/// BNC-01
#[test]
fn every_size_arrives_whole_over_verbs() {
    let net = net();
    let sizes = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK * 2, CHUNK * 20 + 1];
    every_size_arrives(&net, &sizes, &STARTS, LONGEST);
}

/// BNC-01
#[test]
fn megabytes_arrive_whole_over_verbs() {
    let net = net_with(StagingAttr::default(), device());
    let chunk = StagingAttr::default().buffer_len as u64;
    every_size_arrives(&net, &[chunk * 2 + 1], &STARTS[2..], chunk * 2);
}

/// BNC-01
#[test]
#[ignore = "the slow tier: moves a gigabyte each way"]
fn a_gigabyte_arrives_whole_over_verbs() {
    let net = net_with(StagingAttr::default(), device());
    let len = std::env::var("HMEM_STAGED_BYTES")
        .ok()
        .and_then(|bytes| bytes.parse().ok())
        .unwrap_or(1 << 30);
    let near = net.near.device(&net.device, len, LOCAL).expect("stage device memory");
    let far = net.far.host(len + 1, LOCAL | REMOTE);
    for kind in [CompletionKind::Write, CompletionKind::Read] {
        moves(&net, kind, &[(&near, 0, len)], (&far, 0, len));
    }
}

/// BNC-01
#[test]
fn lists_of_staged_and_host_memory_arrive_whole_over_verbs() {
    let net = net();
    lists_arrive(&net, CHUNK, LONGEST);
}

/// BNC-01
#[test]
fn any_transfer_moves_the_bytes_of_a_plain_copy_over_verbs() {
    anything_arrives(12, usize::MAX, verbs);
}

/// BNC-01
#[test]
fn messages_arrive_between_staged_memory_over_verbs() {
    let net = net();
    let near = net.near.device(&net.device, CHUNK * 4, LOCAL).unwrap();
    let far = net.far.device(&net.device, CHUNK * 4, LOCAL).unwrap();
    for len in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, LONGEST] {
        moves(&net, CompletionKind::Send, &[(&near, 1, len)], (&far, 2, len));
    }
    // A receive may be longer than the message. The rest of its buffer is unchanged.
    far.put(0, &[0x55; 4096]);
    near.put(0, &[0x66; 4096]);
    net.far.endpoint.receive(&[far.slice(0, CHUNK * 3)], None, 6).unwrap();
    net.near.endpoint.send(&[near.slice(0, 100)], None, net.peer, 5).unwrap();
    let (_, mut there) = net.complete(1, 1);
    assert_eq!(there.remove(0).result.unwrap(), 100);
    assert_eq!(far.get(0, 101), [&[0x66; 100][..], &[0x55]].concat());
    net.assert_idle();
}

/// BNC-01
#[test]
fn copies_and_wire_overlap_over_verbs() {
    copies_and_wire_overlap(&net_with(STAGING, by_hand()));
}

/// BNC-01
#[test]
fn requests_posted_after_a_staged_write_arrive_after_it() {
    message_arrives_after_a_staged_write(&net(), CHUNK * 20, |order| assert_eq!(order, [1, 2]));
}

/// REL-01, BNC-02
#[test]
fn failed_copy_leaks_nothing_over_verbs() {
    let net = net();
    faults_drain_the_pipeline(&net, CHUNK * 3 + 1, &[CompletionKind::Write, CompletionKind::Read]);
    faults_drain_the_pipeline(&net, CHUNK * 2, &[CompletionKind::Send]);
}

/// REL-01, BNC-02
#[test]
fn refused_post_leaks_nothing() {
    let net = injected();
    let len = CHUNK * 5;
    let staged = net.near.device(&net.device, len, LOCAL).unwrap();
    let far = net.far.host(len + 1, LOCAL | REMOTE);
    for kind in [CompletionKind::Write, CompletionKind::Read] {
        for nth in 1.. {
            wire::refuse_post(nth, 5);
            let ended = net.transfer(kind, &[staged.slice(0, len)], (&far, 0, len));
            net.assert_idle();
            if wire::forget_refusal() {
                assert_eq!((ended.unwrap(), nth), (len, 6), "one post for each chunk");
                break;
            }
            assert_eq!(ended.unwrap_err().os_errno(), Some(Errno(5)));
            settle(&net);
        }
        // ENOMEM means a full queue: the chunk waits, and the transfer does not fail.
        for nth in 1..=5 {
            wire::refuse_post(nth, 12);
            moves(&net, kind, &[(&staged, 0, len)], (&far, 0, len));
            assert!(!wire::forget_refusal());
        }
    }
    let Net { near, far: other, .. } = net;
    assert_eq!(
        wire::regions(),
        2,
        "only the peer's region and the buffers are registered, not staged memory"
    );
    drop((staged, far, near, other));
    assert_eq!(wire::regions(), 0);
}

/// MR-05
#[test]
fn buffers_are_released_after_the_reset_of_the_queue_pair() {
    let net = injected();
    let staged = net.near.device(&net.device, CHUNK, LOCAL).unwrap();
    let (host, far) = (net.near.host(CHUNK, LOCAL), net.far.host(CHUNK, LOCAL | REMOTE));
    let key = far.region().key().unwrap();
    let remote = [RemoteSegment { address: key.base(), len: CHUNK, key: &key }];
    // The NIC has one request with host memory and one with a staging buffer, and completes
    // neither.
    let still = Misbehaviour { hangs: true, ..Misbehaviour::default() };
    misbehave(still);
    net.near.endpoint.read(&[host.slice(0, CHUNK)], &remote, net.peer, 1).unwrap();
    net.near.endpoint.read(&[staged.slice(0, CHUNK)], &remote, net.peer, 2).unwrap();
    assert_eq!(net.near.domain.live().staging_buffers, 1);
    // The far side lost its connection and connects again.
    wire::fail_last_pair();
    misbehave(Misbehaviour { refuses_resets: 5, ..still });
    let error = net.near.endpoint.resolve(&net.far.endpoint.name()).expect_err("no reset");
    assert_eq!(error.os_errno(), Some(Errno(5)), "{error}");
    let mut out = Vec::new();
    net.near.cq.read(&mut out, 8).unwrap();
    assert!(out.is_empty(), "the NIC may still use their memory: {out:?}");
    assert_eq!(net.near.domain.live().staging_buffers, 1, "the buffer is the NIC's");
    misbehave(still);
    net.near.endpoint.resolve(&net.far.endpoint.name()).expect("connect again");
    while out.len() < 2 {
        net.near.cq.read(&mut out, 8).unwrap();
    }
    let ended = out.into_iter().map(|end| (end.context, end.result.unwrap_err().kind()));
    let canceled = [(1, ErrorKind::Canceled), (2, ErrorKind::Canceled)];
    assert_eq!(ended.collect::<Vec<_>>(), canceled);
    assert_eq!(net.near.domain.live().staging_buffers, 0);
    misbehave(Misbehaviour::default());
}

/// EVT-05
#[test]
fn wait_advances_staged_transfers_and_arm_reports_needed_calls() {
    let write = |(net, staged, far): &(Net, Mem, Mem)| {
        let key = far.region().key().unwrap();
        let remote = [RemoteSegment { address: key.base(), len: CHUNK * 6, key: &key }];
        net.near.endpoint.write(&[staged.slice(0, CHUNK * 6)], &remote, net.peer, 1).unwrap();
    };
    let mut done = Vec::new();
    let copying = wide();
    write(&copying);
    assert_eq!(copying.0.near.cq.wait(&mut done, 8, Duration::MAX).unwrap(), 1);
    assert_eq!(done.pop().unwrap().result.unwrap(), CHUNK * 6);
    // This device copies only when the test calls `step`, so copies stay in flight until then.
    let stepped = stepped();
    let Net { near, device, .. } = &stepped.0;
    let channel = near.cq.channel().expect("a channel");
    assert!(channel.arm().unwrap(), "nothing is in flight");
    write(&stepped);
    assert!(is_readable(channel, Duration::ZERO), "the write needs calls");
    while near.cq.read(&mut done, 8).unwrap() == 0 {
        assert!(
            device.pending_copies() == 0 || !channel.arm().unwrap(),
            "arm allowed sleep during copies"
        );
        device.step();
    }
    assert_eq!(done.pop().unwrap().result.unwrap(), CHUNK * 6);
    assert!(channel.arm().unwrap());
}

/// Returns whether the fd of a channel becomes readable within `timeout`.
fn is_readable(channel: &dyn CompletionChannel, timeout: Duration) -> bool {
    let fd = channel.fd().unwrap();
    let timeout = timeout.try_into().unwrap();
    rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).unwrap() == 1
}

/// EVT-05: staged receives without messages do not keep an event loop awake.
#[test]
fn event_loop_sleeps_while_staged_receives_are_posted() {
    let (net, near, far) = wide();
    let channel = net.near.cq.channel().expect("a channel");
    // Four receives take all buffers of the receives' share. The other receives wait for buffers.
    for context in 0..6 {
        let into = [near.slice(context * CHUNK, CHUNK)];
        net.near.endpoint.receive(&into, None, context).unwrap();
    }
    assert_eq!(net.near.slots(), 4);
    let mut out = Vec::new();
    for context in 0..6 {
        assert!(channel.arm().unwrap(), "receive {context} moves only when the peer sends");
        assert!(!is_readable(channel, Duration::ZERO));
        net.far.endpoint.send(&[far.slice(0, CHUNK)], None, net.back, 9).unwrap();
        net.far.cq.wait(&mut out, 1, Duration::MAX).unwrap();
        assert!(
            is_readable(channel, Duration::from_secs(10)),
            "receive {context} does not wake the reader"
        );
        while net.near.cq.read(&mut out, 1).unwrap() == 0 {}
        let (received, sent) = (out.pop().unwrap(), out.pop().unwrap());
        assert_eq!((received.context, received.result.unwrap()), (context, CHUNK));
        sent.result.unwrap();
    }
    assert!(channel.arm().unwrap());
}

/// EVT-05: while copies are in flight, no reader of another queue of the device sleeps.
#[test]
fn reader_of_another_queue_stays_awake_during_copies() {
    let (net, staged, far) = stepped();
    let (beside, _peer) = another(&net);
    let channel = beside.1.channel().expect("a channel");
    assert!(channel.arm().unwrap());
    let bytes = pattern(CHUNK * 6, 3);
    staged.put(0, &bytes);
    let key = far.region().key().unwrap();
    let remote = [RemoteSegment { address: key.base(), len: CHUNK * 6, key: &key }];
    net.near.endpoint.write(&[staged.slice(0, CHUNK * 6)], &remote, net.peer, 2).unwrap();
    assert!(is_readable(channel, Duration::ZERO), "the write needs calls");
    let mut out = Vec::new();
    while far.get(0, CHUNK * 6) != bytes {
        net.device.step();
        assert!(!channel.arm().unwrap() || net.device.pending_copies() == 0);
        assert_eq!(beside.1.read(&mut out, 8).unwrap(), 0);
    }
    assert!(net.complete(1, 0).0.remove(0).result.is_ok());
    assert!(channel.arm().unwrap());
}

/// EVT-05: closing the region of a staged receive wakes the reader of its queue.
#[test]
fn staged_receive_of_a_closed_region_wakes_the_reader() {
    let (net, near, _far) = wide();
    let channel = net.near.cq.channel().expect("a channel");
    for context in 0..6 {
        net.near.endpoint.receive(&[near.slice(0, CHUNK)], None, context).unwrap();
    }
    assert!(channel.arm().unwrap());
    let Mem::Device(region) = near else { unreachable!("device memory") };
    region.close().map_err(|rejected| rejected.error).unwrap();
    assert!(is_readable(channel, Duration::ZERO), "the close needs calls, to cancel the receives");
    net.near.endpoint.close().map_err(|rejected| rejected.error).unwrap();
    let mut out = Vec::new();
    while net.near.cq.read(&mut out, 6).unwrap() > 0 {}
    assert_eq!(out.len(), 6);
    assert!(out.iter().all(|ended| ended.result.is_err()), "{out:?}");
}

/// REL-01, BNC-02
#[test]
fn refusal_of_the_peer_leaks_nothing_over_verbs() {
    let net = net();
    let len = CHUNK * 12;
    let staged = net.near.device(&net.device, len, LOCAL).unwrap();
    let far = net.far.host(len, LOCAL | REMOTE);
    let key = far.region().key().unwrap();
    // The first chunk outside the target is the transfer's first, a middle or the last chunk.
    for over in [len, len / 2, 1] {
        let remote = [RemoteSegment { address: Iova(key.base().0 + over), len, key: &key }];
        for read in [false, true] {
            let list = [staged.slice(0, len)];
            if read {
                net.near.endpoint.read(&list, &remote, net.peer, 5).unwrap();
            } else {
                net.near.endpoint.write(&list, &remote, net.peer, 5).unwrap();
            }
            // The failed request cancels the requests that follow it.
            net.near
                .endpoint
                .write(&[staged.slice(0, 1)], &[RemoteSegment { len: 1, ..remote[0] }], net.peer, 6)
                .unwrap();
            let (mut ended, _) = net.complete(2, 0);
            let refused = ended.remove(0);
            assert_eq!(
                (refused.context, refused.result.unwrap_err().kind()),
                (5, ErrorKind::AccessDenied)
            );
            let behind = ended.remove(0);
            assert_eq!(
                (behind.context, behind.result.unwrap_err().kind()),
                (6, ErrorKind::Canceled)
            );
            net.assert_idle();
            settle(&net);
        }
        moves(&net, CompletionKind::Write, &[(&staged, 0, len - 1)], (&far, 0, len - 1));
    }
}

/// BNC-02
#[test]
fn exhausted_pool_makes_transfers_wait_over_verbs() {
    for slots in [1, 2, 5] {
        let net = net_with(StagingAttr { buffer_count: slots, ..STAGING }, device());
        an_exhausted_pool_makes_transfers_wait(&net, 20);
    }
}

/// Creates staged and host memory of six chunks each, over a domain with three staging buffers. The
/// device copies only when the test calls [`step`].
fn stepped() -> (Net, Mem, Mem) {
    let device = Simulated::builder().stepping(Stepping::ByHand).build().unwrap();
    let net = net_with(StagingAttr { buffer_count: 3, ..STAGING }, device);
    let staged = net.near.device(&net.device, CHUNK * 6, LOCAL).unwrap();
    let far = net.far.host(CHUNK * 6, LOCAL | REMOTE);
    (net, staged, far)
}

/// Lets the device run `times` copies, one by one. Reads the completions after each copy, and
/// returns all of them.
fn step(net: &Net, times: usize) -> Vec<Completion> {
    let mut out = Vec::new();
    for _ in 0..times {
        net.device.step();
        net.near.cq.read(&mut out, 8).unwrap();
    }
    out
}

/// BNC-02
#[test]
fn endpoint_closed_amid_a_transfer_leaks_nothing() {
    for steps in 0..6 {
        let (net, staged, far) = stepped();
        let len = CHUNK * 6;
        let key = far.region().key().unwrap();
        let remote = [RemoteSegment { address: key.base(), len, key: &key }];
        net.near.endpoint.write(&[staged.slice(0, len)], &remote, net.peer, 1).unwrap();
        net.near.endpoint.read(&[staged.slice(0, len)], &remote, net.peer, 2).unwrap();
        net.near.endpoint.receive(&[staged.slice(0, CHUNK)], None, 3).unwrap();
        let mut out = step(&net, steps);
        let Net { near, device, .. } = net;
        near.endpoint.close().map_err(|rejected| rejected.error).unwrap();
        while out.len() < 3 {
            assert!(near.cq.read(&mut out, 8).unwrap() > 0, "a request has no completion");
        }
        let mut contexts: Vec<_> = out.iter().map(|completion| completion.context).collect();
        contexts.sort_unstable();
        assert_eq!(contexts, [1, 2, 3]);
        for completion in out {
            assert_eq!(completion.result.unwrap_err().kind(), ErrorKind::Canceled);
        }
        assert_eq!((near.domain.live().staging_buffers, device.pending_copies()), (0, 0));
    }
}

/// MR-05
#[test]
fn staged_region_closed_amid_a_transfer_is_not_accessed() {
    for steps in 0..4 {
        let (net, staged, far) = stepped();
        let len = CHUNK * 6;
        let key = far.region().key().unwrap();
        let remote = [RemoteSegment { address: key.base(), len, key: &key }];
        net.near.endpoint.write(&[staged.slice(0, len)], &remote, net.peer, 1).unwrap();
        let mut out = step(&net, steps);
        let (slice, begun) =
            (staged.slice(0, len), net.device.faults().calls(DeviceCall::CopyAsync));
        drop(staged);
        assert_eq!(
            net.device.pending_copies(),
            0,
            "a copy is in flight after the region was closed"
        );
        while out.is_empty() {
            net.near.cq.read(&mut out, 8).unwrap();
        }
        assert_eq!(out.remove(0).result.unwrap_err().kind(), ErrorKind::NoRegion);
        assert_eq!(
            net.device.faults().calls(DeviceCall::CopyAsync),
            begun,
            "a copy began after the region was closed"
        );
        let stale = net.near.endpoint.write(&[slice], &remote, net.peer, 1).unwrap_err();
        assert_eq!(stale.kind(), ErrorKind::NoRegion);
        net.assert_idle();
    }
}

/// MR-09
#[test]
fn local_rights_of_a_staged_region_are_enforced() {
    let net = net();
    let far = net.far.host(64, LOCAL | REMOTE);
    for (kind, right) in [
        (CompletionKind::Write, Access::WRITE),
        (CompletionKind::Read, Access::READ),
        (CompletionKind::Send, Access::SEND),
    ] {
        let without = net.near.device(&net.device, 64, LOCAL.difference(right)).unwrap();
        if kind != CompletionKind::Send {
            let refused = net.transfer(kind, &[without.slice(0, 8)], (&far, 0, 8)).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::AccessDenied);
        } else {
            let refused =
                net.near.endpoint.send(&[without.slice(0, 8)], None, net.peer, 1).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::AccessDenied);
        }
        let only = net.near.device(&net.device, 64, right).unwrap();
        moves_one_way(&net, kind, &only, &far);
    }
}

fn moves_one_way(net: &Net, kind: CompletionKind, near: &Mem, far: &Mem) {
    assert_eq!(net.transfer(kind, &[near.slice(1, 9)], (far, 3, 9)).unwrap(), 9);
}

/// BNC-03
#[test]
fn requests_unsupported_by_copies_are_refused() {
    let net = net();
    let refused = net.near.device(&net.device, 64, LOCAL | REMOTE).map(|_| ()).unwrap_err();
    assert!(format!("{refused:#}").contains("cannot reach memory through copies"), "{refused}");
    let staged = net.near.device(&net.device, CHUNK * 40, LOCAL).unwrap();
    for refused in [staged.region().key().map(|_| ()), staged.region().raw_key().map(|_| ())] {
        let refused = refused.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::KeyNotAvailable);
        assert!(
            refused.remedy_text().is_some_and(|text| text.contains("through copies")),
            "{refused}"
        );
    }
    let far = net.far.host(64, LOCAL | REMOTE);
    let key = far.region().key().unwrap();
    let host = net.near.host(64, LOCAL);
    for (operand, result) in [(&staged, &host), (&host, &staged)] {
        let refused = net
            .near
            .endpoint
            .atomic(
                &hmem_core::Atomic {
                    op: AtomicOp::Sum,
                    datatype: AtomicType::U64,
                    remote: RemoteSegment { address: key.base(), len: 8, key: &key },
                    operand: operand.slice(0, 8),
                    result: Some(result.slice(0, 8)),
                    compare: None,
                },
                net.peer,
                1,
            )
            .unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        assert!(refused.to_string().contains("copies"), "{refused}");
    }
    // A message needs all its buffers at once.
    let long =
        net.near.endpoint.send(&[staged.slice(0, LONGEST + 1)], None, net.peer, 1).unwrap_err();
    assert_eq!(long.kind(), ErrorKind::MessageTooLong);
    assert!(long.remedy_text().is_some_and(|text| text.contains("DomainAttr::staging")), "{long}");
    let outside = hmem_core::transfer::LocalSegment {
        address: Address(staged.region().range().start().0 + CHUNK * 40 - 1),
        len: 2,
        desc: Some(staged.region().desc().unwrap()),
    };
    let request = hmem_core::transfer::WorkRequest {
        operation: hmem_core::transfer::Operation::Send { tag: None, invalidate: None },
        local: &[outside],
        peer: net.peer,
        context: 1,
    };
    // SAFETY: the segment has a descriptor.
    let refused = unsafe { net.near.endpoint.post(&request) }.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::OutOfBounds);
    net.assert_idle();
    assert_eq!(staged.region().decision().unwrap().path, Path::Staged);
}

/// KEY-06: the post of a staged transfer refuses a key of more than 32 bits, as does the post of a
/// transfer that waits behind a staged one.
#[test]
fn keys_of_more_than_32_bits_are_refused_for_staged_memory() {
    let net = injected();
    let staged = net.near.device(&net.device, CHUNK * 20, LOCAL).unwrap();
    let (near, far) = (net.near.host(8, LOCAL), net.far.host(CHUNK * 20, LOCAL | REMOTE));
    let key = far.region().key().unwrap();
    let wide = key.as_u64().unwrap() | 0xabcd << 32;
    let wide = RemoteKey::new(key.addressing(), key.base(), key.first_len(), wide);
    let refused = |local: &Mem| {
        let (local, remote) = ([local.slice(0, 8)], [wide.slice(0, 8).unwrap()]);
        let before = wire::posts();
        for refused in [
            net.near.endpoint.write(&local, &remote, net.peer, 1),
            net.near.endpoint.read(&local, &remote, net.peer, 1),
            net.near.endpoint.send_invalidate(&local, &wide, net.peer, 1),
        ] {
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidKey);
        }
        assert_eq!(wire::posts(), before, "the driver was called");
    };
    refused(&staged);
    let whole = CHUNK * 20;
    let remote = [key.slice(0, whole).unwrap()];
    net.near.endpoint.write(&[staged.slice(0, whole)], &remote, net.peer, 2).unwrap();
    refused(&near);
    let (done, _) = net.complete(1, 0);
    assert_eq!(done[0].result.as_ref().unwrap(), &whole);
    net.assert_idle();
}

/// P2P-06
#[test]
fn staged_and_direct_transfers_give_equal_bytes() {
    let net = net_with(StagingAttr { buffer_len: 1000, buffer_count: 7 }, device());
    let staged = net.near.device(&net.device, 70_000, LOCAL).unwrap();
    let host = net.near.host(70_000, LOCAL);
    let (a, b) = (net.far.host(70_000, LOCAL | REMOTE), net.far.host(70_000, LOCAL | REMOTE));
    let bytes = pattern(70_000, 9);
    for kind in KINDS {
        for (offset, len) in [(0, 1), (3, 999), (1, 1000), (7, 1001), (2, 60_000)] {
            if kind == CompletionKind::Send && len > 2000 {
                continue;
            }
            for mem in [&staged, &host, &a, &b] {
                mem.put(0, &vec![0; 70_000]);
            }
            let read = kind == CompletionKind::Read;
            for mem in if read { [&a, &b] } else { [&staged, &host] } {
                mem.put(0, &bytes);
            }
            net.transfer(kind, &[staged.slice(offset, len)], (&a, 5, len)).unwrap();
            net.transfer(kind, &[host.slice(offset, len)], (&b, 5, len)).unwrap();
            assert!(a.get(0, 70_000) == b.get(0, 70_000), "{kind:?} of {len}");
            // HM-14: later work of the device sees the bytes of a completed transfer.
            assert!(staged.get(0, 70_000) == host.get(0, 70_000), "{kind:?} of {len}");
        }
    }
}

/// An endpoint with its queue and its peer.
type End = (Endpoint, Arc<dyn CompletionQueue>, PeerId);

/// Opens another pair of connected endpoints in the same domains.
fn another(net: &Net) -> (End, End) {
    let open = |side: &Side| {
        let cq = side.domain.open_cq(16).unwrap();
        (side.domain.open_endpoint(&EndpointAttr::new(&cq)).unwrap(), cq)
    };
    let (near, far) = (open(&net.near), open(&net.far));
    let peer = near.0.resolve(&far.0.name()).unwrap();
    let back = far.0.resolve(&near.0.name()).unwrap();
    ((near.0, near.1, peer), (far.0, far.1, back))
}

/// Creates staged memory at the near side and host memory at the far side, of 64 chunks each.
fn wide() -> (Net, Mem, Mem) {
    let net = net();
    let near = net.near.device(&net.device, CHUNK * 64, LOCAL).unwrap();
    let far = net.far.host(CHUNK * 64, LOCAL | REMOTE);
    (net, near, far)
}

/// Writes 20 chunks through an endpoint and compares the bytes. Reads only this endpoint's queue.
fn writes((endpoint, cq, peer): &End, near: &Mem, far: &Mem) {
    let bytes = pattern(CHUNK * 20, 4);
    near.put(CHUNK * 40, &bytes);
    let key = far.region().key().unwrap();
    let remote =
        [RemoteSegment { address: Iova(key.base().0 + CHUNK * 30), len: CHUNK * 20, key: &key }];
    endpoint.write(&[near.slice(CHUNK * 40, CHUNK * 20)], &remote, *peer, 9).unwrap();
    let mut out = Vec::new();
    while out.is_empty() {
        cq.read(&mut out, 1).unwrap();
        std::thread::yield_now();
    }
    assert_eq!(out.remove(0).result.unwrap(), CHUNK * 20);
    assert!(far.get(CHUNK * 30, CHUNK * 20) == bytes);
}

/// BNC-02: a transfer with a completion queue that the application never reads does not block
/// transfers of other queues.
#[test]
fn transfer_with_an_unread_queue_blocks_no_other() {
    let (net, near, far) = wide();
    let key = far.region().key().unwrap();
    let remote = [RemoteSegment { address: key.base(), len: CHUNK * 20, key: &key }];
    net.near.endpoint.write(&[near.slice(0, CHUNK * 20)], &remote, net.peer, 2).unwrap();
    let (beside, _peer) = another(&net);
    writes(&beside, &near, &far);
    net.complete(1, 0).0.remove(0).result.unwrap();
    net.assert_idle();
}

#[test]
fn unread_completions_of_staged_transfers_take_the_room_of_the_queue() {
    let net = net();
    let near = net.near.device(&net.device, CHUNK, LOCAL).unwrap();
    let far = net.far.host(CHUNK, LOCAL | REMOTE);
    let key = far.region().key().unwrap();
    let remote = [RemoteSegment { address: key.base(), len: 8, key: &key }];
    let post = |context| {
        net.near.endpoint.write(&[near.slice(0, 8)], &remote, net.peer, context)?;
        while net.near.domain.progress()? == 0 {
            std::thread::yield_now();
        }
        Ok(())
    };
    let mut posted = 0;
    let error = loop {
        assert!(posted < 1000, "the queue has no limit");
        match post(posted) {
            Ok(()) => posted += 1,
            Err(error) => break error,
        }
    };
    let error: hmem_core::Error = error;
    assert_eq!(error.kind(), ErrorKind::Again, "{error}");
    assert!(error.to_string().contains("the completion queue is full"), "{error}");
    let mut ended = Vec::new();
    net.near.cq.read(&mut ended, 1).unwrap();
    post(posted).expect("there is room again");
    while net.near.cq.read(&mut ended, 16).unwrap() > 0 {}
    assert!(ended.iter().map(|ended| ended.context).eq(0..=posted));
    net.assert_idle();
}

/// BNC-02: a staged message without a posted receive leaves staging buffers for other endpoints.
#[test]
fn blocked_message_leaves_buffers_for_other_endpoints() {
    let (net, near, far) = wide();
    let key = far.region().key().unwrap();
    let remote = [RemoteSegment { address: key.base(), len: CHUNK * 20, key: &key }];
    // No receive is posted for the message, so the message blocks the write that follows it.
    net.near.endpoint.send(&[near.slice(0, CHUNK)], None, net.peer, 1).unwrap();
    net.near.endpoint.write(&[near.slice(0, CHUNK * 20)], &remote, net.peer, 2).unwrap();
    let (beside, _peer) = another(&net);
    writes(&beside, &near, &far);
    net.far.endpoint.receive(&[far.slice(CHUNK * 60, CHUNK)], None, 3).unwrap();
    let (ended, received) = net.complete(2, 1);
    for completion in ended.into_iter().chain(received) {
        completion.result.unwrap();
    }
    net.assert_idle();
}

/// BNC-02: staged receives without messages leave staging buffers for sends and RMA.
#[test]
fn posted_receives_leave_buffers_for_other_uses() {
    let (net, near, far) = wide();
    // These are many more receives than half of the buffers. No message arrives for them until the
    // end of the test.
    for context in 0..12 {
        net.near
            .endpoint
            .receive(&[near.slice(context * CHUNK, CHUNK)], None, 100 + context)
            .unwrap();
    }
    assert_eq!(net.near.slots(), 4, "receives hold their share");
    let list = [near.slice(CHUNK * 20, CHUNK * 20)];
    net.transfer(CompletionKind::Write, &list, (&far, 0, CHUNK * 20)).unwrap();
    for context in 0..12_u64 {
        far.put(0, &pattern(CHUNK, context));
        net.far.endpoint.send(&[far.slice(0, CHUNK)], None, net.back, 1).unwrap();
        let (mut here, _) = net.complete(1, 1);
        let received = here.remove(0);
        assert_eq!((received.context, received.result.unwrap()), (100 + context, CHUNK));
        assert!(near.get(context * CHUNK, CHUNK) == pattern(CHUNK, context));
    }
    net.assert_idle();
}

/// BNC-02
#[test]
fn random_latency_and_faults_leak_nothing() {
    let (provider, nic) = verbs();
    for seed in 0..4_u64 {
        let device =
            Simulated::builder().copy_latency(Duration::from_micros(seed * 10)).build().unwrap();
        let staging =
            StagingAttr { buffer_len: 700 + 331 * seed as usize, buffer_count: 1 + seed as usize };
        let net = Net::new(Arc::clone(&provider), nic.clone(), staging, device);
        let staged = net.near.device(&net.device, 40_000, LOCAL).unwrap();
        let far = net.far.host(40_000, LOCAL | REMOTE);
        for round in 0..3_u64 {
            let len = (seed * 7919 + round * 104_729) % 30_000 + 1;
            let kind = KINDS[(round % 2) as usize];
            let call = [DeviceCall::CopyAsync, DeviceCall::EngineCopy][(seed % 2) as usize];
            net.device.faults().fail_nth(call, 1 + round * 3, Errno(5));
            let ended = net.transfer(kind, &[staged.slice(0, len)], (&far, 1, len));
            net.device.faults().clear();
            net.assert_idle();
            if let Err(error) = ended {
                assert_eq!(error.os_errno(), Some(Errno(5)));
                settle(&net);
            }
            moves(&net, kind, &[(&staged, 1, len)], (&far, 2, len));
        }
    }
}

/// LIFE-08: a device that is removed during a staged copy ends the transfer, at any chunk of it.
#[test]
fn removal_during_staged_copies_ends_the_transfer_and_frees_its_buffers() {
    const CHUNKS: u64 = 6;
    // The number of reads before the removal. `None`: the transfer completes before it.
    for reads in (0..3 * CHUNKS).map(Some).chain([None]) {
        let net = injected();
        let staged = net.near.device(&net.device, CHUNK * CHUNKS, LOCAL).unwrap();
        let bytes = pattern(CHUNK * CHUNKS, reads.unwrap_or(CHUNKS));
        staged.put(0, &bytes);
        let far = net.far.host(CHUNK * CHUNKS, LOCAL | REMOTE);
        let key = far.region().key().unwrap();
        let remote = [RemoteSegment { address: key.base(), len: CHUNK * CHUNKS, key: &key }];
        let local = [staged.slice(0, CHUNK * CHUNKS)];
        net.near.endpoint.write(&local, &remote, net.peer, 1).unwrap();
        let mut out = Vec::new();
        let completed = |out: &mut Vec<_>| {
            while out.is_empty() {
                net.near.cq.wait(out, 1, Duration::from_secs(60)).unwrap();
            }
        };
        match reads {
            Some(reads) => (0..reads).for_each(|_| {
                net.near.cq.read(&mut out, 1).unwrap();
            }),
            None => completed(&mut out),
        }
        wire::life::remove_devices();
        completed(&mut out);
        let ended = out.remove(0);
        assert_eq!(ended.context, 1);
        match ended.result {
            Ok(moved) => {
                assert_ne!(reads, Some(0), "no chunk was written before the removal");
                assert_eq!(moved, CHUNK * CHUNKS);
                assert!(far.get(0, moved) == bytes, "a chunk was reported and did not arrive");
            }
            Err(error) => {
                assert!(reads.is_some(), "the transfer had completed: {error:#}");
                assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:#}");
            }
        }
        net.assert_idle();
        assert_eq!(net.near.domain.nic_state(), NicState::Lost);
        let refused = net.near.device(&net.device, CHUNK, LOCAL).map(drop).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused:#}");
    }
}

//! Tests of staging buffers on the software NIC. Some cases apply to every provider, others only to
//! a NIC that copies staged memory for peers.

use std::{sync::Arc, time::Duration};

use crate::staging_cases::*;
use hmem_core::{
    Atomic, Errno, ErrorKind, Iova, RemoteKey,
    provider::{EndpointAttr, Provider, StagingAttr},
    transfer::{AtomicOp, AtomicType, CompletionKind, RemoteSegment},
};
use hmem_iface_system::{DeviceCall, Simulated, Stepping};
use hmem_provider_loopback::{Faults, Loopback, NicCall, Progress};
use proptest::prelude::*;

const CHUNK: u64 = 4096;
const STAGING: StagingAttr = StagingAttr { buffer_len: CHUNK as usize, buffer_count: 4 };
const SIZES: [u64; 8] =
    [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK * 4, CHUNK * 7 + 5, CHUNK * 40 + 1];

fn net_with(progress: Progress, faults: &Faults, staging: StagingAttr, device: Simulated) -> Net {
    let provider =
        Loopback::builder().progress(progress).faults(faults).build().expect("build the NIC");
    Net::new(Arc::new(provider), None, staging, device)
}

fn device() -> Simulated {
    Simulated::builder().build().expect("build the device")
}

fn net(progress: Progress) -> Net {
    net_with(progress, &Faults::new(), STAGING, device())
}

const PROGRESSES: [Progress; 2] = [Progress::ByHand, Progress::Thread];

/// BNC-01
#[test]
fn transfers_of_every_size_arrive_whole() {
    for progress in PROGRESSES {
        every_size_arrives(&net(progress), &SIZES, &STARTS, u64::MAX);
    }
}

/// BNC-01
#[test]
#[ignore = "the slow tier: moves a gigabyte each way"]
fn a_gigabyte_arrives_whole() {
    let net = net_with(Progress::ByHand, &Faults::new(), StagingAttr::default(), device());
    every_size_arrives(&net, &[1 << 30], &STARTS[2..], 1 << 30);
}

/// BNC-01
#[test]
fn lists_of_staged_and_host_memory_arrive_whole() {
    for progress in PROGRESSES {
        lists_arrive(&net(progress), CHUNK, u64::MAX);
    }
}

/// BNC-01
#[test]
fn messages_pass_between_staged_memory_of_both_sides() {
    for progress in PROGRESSES {
        let net = net(progress);
        let near = net.near.device(&net.device, CHUNK * 50, LOCAL | REMOTE).unwrap();
        let far = net.far.device(&net.device, CHUNK * 50, LOCAL | REMOTE).unwrap();
        for kind in KINDS {
            for len in SIZES {
                moves(&net, kind, &[(&near, 1, len)], (&far, 2, len));
            }
        }
    }
}

/// BNC-01
#[test]
fn any_transfer_moves_the_bytes_of_a_plain_copy() {
    anything_arrives(64, usize::MAX, || {
        let provider = Loopback::builder().build().expect("build the NIC");
        (Arc::new(provider) as Arc<dyn Provider>, None)
    });
}

/// BNC-01
#[test]
fn copy_engine_works_while_the_nic_copies_a_chunk() {
    let faults = Faults::new();
    let device = Simulated::builder().stepping(Stepping::ByHand).build().unwrap();
    let net = net_with(Progress::Thread, &faults, STAGING, device);
    let staged = net.near.device(&net.device, CHUNK * 8, LOCAL).unwrap();
    let far = net.far.host(CHUNK * 8, LOCAL | REMOTE);
    let (key, list) = (far.region().key().unwrap(), [staged.slice(0, CHUNK * 8)]);
    let remote = [RemoteSegment { address: key.base(), len: CHUNK * 8, key: &key }];
    let begun = || net.device.faults().calls(DeviceCall::CopyAsync);

    // Copies out of the device: while the NIC holds the first chunk, the copies of the next chunks
    // have begun, one for each staging buffer.
    let before = begun();
    let gate = faults.hold(NicCall::Chunk);
    net.near.endpoint.write(&list, &remote, net.peer, 5).unwrap();
    gate.wait_held();
    assert_eq!(begun() - before, 4);
    assert_eq!(net.near.slots(), 4);
    gate.release();
    assert_eq!(net.complete(1, 0).0.remove(0).result.unwrap(), CHUNK * 8);
    assert_eq!(begun() - before, 8);

    // Copies into the device: while the NIC holds a chunk, the copies of the earlier chunks into
    // the device are pending. The NIC has not waited for them.
    let before = begun();
    let mut gate = faults.hold(NicCall::Chunk);
    net.near.endpoint.read(&list, &remote, net.peer, 5).unwrap();
    for chunk in 0..4 {
        gate.wait_held();
        assert_eq!((begun() - before, net.device.pending_copies() as u64), (chunk, chunk));
        let next = faults.hold(NicCall::Chunk);
        gate.release();
        gate = next;
    }
    gate.wait_held();
    gate.release();
    assert_eq!(net.complete(1, 0).0.remove(0).result.unwrap(), CHUNK * 8);
    assert_eq!(begun() - before, 8);
    net.assert_idle();
}

/// REL-01, BNC-02
#[test]
fn failed_copy_drains_the_pipeline_and_leaks_nothing() {
    for progress in PROGRESSES {
        let net = net(progress);
        faults_drain_the_pipeline(
            &net,
            CHUNK * 9 + 1,
            &[CompletionKind::Write, CompletionKind::Read],
        );
        faults_drain_the_pipeline(&net, CHUNK - 1, &[CompletionKind::Write, CompletionKind::Read]);
    }
}

/// REL-01, BNC-02
#[test]
fn failed_chunk_drains_the_pipeline_and_leaks_nothing() {
    let faults = Faults::new();
    let net = net_with(Progress::ByHand, &faults, STAGING, device());
    let staged = net.near.device(&net.device, CHUNK * 10, LOCAL).unwrap();
    let far = net.far.host(CHUNK * 10, LOCAL | REMOTE);
    for kind in [CompletionKind::Write, CompletionKind::Read] {
        for nth in 1..=10 {
            faults.fail_nth(NicCall::Chunk, nth, Errno(5));
            let list = [staged.slice(0, CHUNK * 10)];
            let error = net.transfer(kind, &list, (&far, 0, CHUNK * 10)).unwrap_err();
            assert_eq!(error.os_errno(), Some(Errno(5)));
            net.assert_idle();
        }
        moves(&net, kind, &[(&staged, 0, CHUNK * 9)], (&far, 0, CHUNK * 9));
    }
}

/// REL-01
#[test]
fn failed_copy_of_a_message_fails_only_its_own_side() {
    let net = net(Progress::ByHand);
    let len = CHUNK * 5;
    let near = net.near.device(&net.device, len, LOCAL).unwrap();
    let far = net.far.device(&net.device, len, LOCAL).unwrap();
    let bytes = pattern(len, 1);
    near.put(0, &bytes);
    // Five copies read the sender's device memory and five write the receiver's. The copy that
    // fails decides which side fails. The first copy is the sender's and the last is the
    // receiver's. The order of the others depends on timing.
    let mut failures = [0, 0];
    for nth in 1..=10 {
        net.far.endpoint.receive(&[far.slice(0, len)], None, 6).unwrap();
        net.device.faults().fail_nth(DeviceCall::CopyAsync, nth, Errno(5));
        net.near.endpoint.send(&[near.slice(0, len)], None, net.peer, 5).unwrap();
        let (mut here, mut there) = net.complete(1, 0);
        net.device.faults().clear();
        net.assert_idle();
        if here.remove(0).result.is_ok() {
            failures[1] += 1;
            there.extend(net.complete(0, 1 - there.len()).1);
            assert_eq!(there.remove(0).result.unwrap_err().os_errno(), Some(Errno(5)));
            continue;
        }
        failures[0] += 1;
        assert!(there.is_empty(), "the sender's failure ended the receive");
        net.near.endpoint.send(&[near.slice(0, len)], None, net.peer, 5).unwrap();
        let (mut here, mut there) = net.complete(1, 1);
        here.remove(0).result.unwrap();
        let received = there.remove(0).result;
        assert_eq!(received.unwrap(), len);
        assert!(far.get(0, len) == bytes);
    }
    assert!(failures[0] > 0 && failures[1] > 0, "{failures:?}");
}

/// BNC-02
#[test]
fn transfers_wait_for_staging_buffers() {
    for slots in [1, 2, 3] {
        for progress in PROGRESSES {
            let staging = StagingAttr { buffer_count: slots, ..STAGING };
            an_exhausted_pool_makes_transfers_wait(
                &net_with(progress, &Faults::new(), staging, device()),
                20,
            );
        }
    }
}

/// BNC-02
#[test]
fn transfers_of_several_threads_share_the_pool() {
    for slots in [1, 2, 5] {
        let net = net_with(
            Progress::ByHand,
            &Faults::new(),
            StagingAttr { buffer_count: slots, ..STAGING },
            device(),
        );
        let far = net.far.host(CHUNK * 40, LOCAL | REMOTE);
        let key = far.region().key().unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (net, key) = (&net, &key);
                scope.spawn(move || {
                    let len = CHUNK * 5 + thread;
                    let staged = net.near.device(&net.device, len, LOCAL).unwrap();
                    let cq = net.near.domain.open_cq(8).unwrap();
                    let endpoint = net.near.domain.open_endpoint(&EndpointAttr::new(&cq)).unwrap();
                    let peer = endpoint.resolve(&net.far.endpoint.name()).unwrap();
                    for round in 0..20 {
                        staged.put(0, &pattern(len, round + thread));
                        let address = Iova(key.base().0 + thread * CHUNK * 8);
                        let remote = [RemoteSegment { address, len, key }];
                        endpoint.write(&[staged.slice(0, len)], &remote, peer, round).unwrap();
                        let mut out = Vec::new();
                        while out.is_empty() {
                            cq.read(&mut out, 1).unwrap();
                            assert!(net.near.slots() <= slots as u64);
                        }
                        assert_eq!(out.remove(0).result.unwrap(), len);
                    }
                });
            }
        });
        for thread in 0..4 {
            let len = CHUNK * 5 + thread;
            assert!(far.get(thread * CHUNK * 8, len) == pattern(len, 19 + thread));
        }
        net.assert_idle();
    }
}

/// BNC-03
#[test]
fn atomics_on_staged_memory_are_refused_and_change_nothing() {
    let net = net(Progress::ByHand);
    let staged = net.far.device(&net.device, 64, LOCAL | REMOTE).unwrap();
    let host = net.near.host(64, LOCAL);
    let bytes = pattern(64, 8);
    staged.put(0, &bytes);
    let key = staged.region().key().unwrap();
    for op in AtomicOp::ALL {
        for datatype in AtomicType::ALL {
            let len = datatype.size();
            let atomic = Atomic {
                op,
                datatype,
                remote: RemoteSegment { address: Iova(key.base().0 + 8), len, key: &key },
                operand: host.slice(0, len),
                result: Some(host.slice(8, len)),
                compare: op.compares().then(|| host.slice(16, len)),
            };
            net.near.endpoint.atomic(&atomic, net.peer, 1).unwrap();
            let refused = net.complete(1, 0).0.remove(0).result.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Unsupported);
            assert!(refused.to_string().contains("the region is staged"), "{refused}");
            assert!(staged.get(0, 64) == bytes, "{op:?} changed staged memory");
        }
    }
}

/// Calls `post`, and makes chunk `number` of the posted transfer wait. Chunks are counted from 0.
/// Returns the gate at which the chunk waits.
fn stop_at(faults: &Faults, number: usize, post: impl FnOnce()) -> hmem_provider_loopback::Gate {
    let mut gate = faults.hold(NicCall::Chunk);
    post();
    for _ in 0..number {
        gate.wait_held();
        let next = faults.hold(NicCall::Chunk);
        gate.release();
        gate = next;
    }
    gate.wait_held();
    gate
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(24)
    })]

    /// BNC-02
    #[test]
    fn a_transfer_can_be_canceled_at_any_chunk(
        (chunks, at) in (1usize..9).prop_flat_map(|chunks| (Just(chunks), 0..chunks)),
        slots in 1usize..6,
        latency in 0u64..3,
        read in any::<bool>(),
        near_closes in any::<bool>(),
    ) {
        let faults = Faults::new();
        let latency = Duration::from_micros(latency * 50);
        let device = Simulated::builder().copy_latency(latency).build().unwrap();
        let staging = StagingAttr { buffer_count: slots, ..STAGING };
        let net = net_with(Progress::Thread, &faults, staging, device);
        let len = chunks as u64 * CHUNK;
        let staged = net.near.device(&net.device, len, LOCAL).unwrap();
        let far = net.far.host(len, LOCAL | REMOTE);
        let key: RemoteKey = far.region().key().unwrap();
        let remote = [RemoteSegment { address: key.base(), len, key: &key }];
        let gate = stop_at(&faults, at, || {
            let list = [staged.slice(0, len)];
            if read {
                net.near.endpoint.read(&list, &remote, net.peer, 5).unwrap();
            } else {
                net.near.endpoint.write(&list, &remote, net.peer, 5).unwrap();
            }
        });
        let Net { near, far: other, device, .. } = net;
        let (closed, kept, closing) = if near_closes {
            (near.endpoint, other.endpoint, &near.domain)
        } else {
            (other.endpoint, near.endpoint, &other.domain)
        };
        std::thread::scope(|scope| {
            let close = scope.spawn(|| closed.close().map_err(|rejected| rejected.error));
            // A close removes its endpoint from the domain before it waits for executing requests.
            while closing.live().endpoints > 0 {
                std::thread::yield_now();
            }
            gate.release();
            close.join().unwrap().unwrap();
        });
        let mut out = Vec::new();
        while out.is_empty() {
            near.cq.read(&mut out, 1).unwrap();
        }
        let result = out.remove(0).result;
        // The NIC has copied the last chunk, so that the transfer may end before or after the
        // close.
        match result {
            Ok(moved) => prop_assert_eq!((moved, at + 1), (len, chunks)),
            Err(error) => {
                let canceled = [ErrorKind::Unreachable, ErrorKind::Canceled];
                prop_assert_eq!(error.kind(), canceled[usize::from(near_closes)]);
            }
        }
        prop_assert_eq!(near.domain.live().staging_buffers, 0);
        prop_assert_eq!(device.pending_copies(), 0);
        drop(kept);
    }
}

//! Tests of the loopback NIC's mr_mode bits, flags, limits and fault injection.

use std::sync::Arc;

use crate::copied_device::{CopiedDevice, Copies};
use crate::support;
use crate::support::*;
use hmem_core::{
    Access, Errno, ErrorKind, MrMode,
    provider::{Features, LiveObjects, ProgressModel, Provider, WindowType},
    transfer::{AtomicOp, LocalSegment, Operation, PeerId, RemoteSegment},
};
use hmem_provider_loopback::{Builder, Faults, Loopback, NicCall, Progress};

fn pair(mode: MrMode) -> Pair {
    Pair::new(Loopback::builder().build().unwrap(), mode)
}

#[test]
fn features_and_attributes_follow_the_builder() {
    let open = |builder: Builder| domain(&builder.build().unwrap(), MrMode::empty());
    let all = Features::all() - Features::COMPOSITE_KEYS;
    let stepped = open(Loopback::builder());
    assert_eq!(Features::of(&*stepped), all);
    assert_eq!(stepped.attr().progress, ProgressModel::Manual);
    let bare = open(Loopback::builder().windows([]).region_counters(false));
    let missing = Features::WINDOWS | Features::REGION_COUNTERS;
    assert_eq!(Features::of(&*bare), all - missing);
    let threaded = open(Loopback::builder().progress(Progress::Thread));
    assert_eq!(Features::of(&*threaded), all - Features::MANUAL_PROGRESS);
    assert_eq!(threaded.attr().progress, ProgressModel::Thread);
    let one = open(Loopback::builder().windows([WindowType::One]));
    let windows = one.windows().unwrap();
    assert_eq!(windows.window_types(), [WindowType::One]);
    refused(windows.alloc_window(WindowType::TwoA), ErrorKind::Unsupported);
    refused(Loopback::builder().cq_data_size(9).build(), ErrorKind::InvalidArgument);
}

/// MODE-10
#[test]
fn bound_region_is_accessed_through_its_endpoint_only() {
    let provider = Loopback::builder().build().unwrap();
    let there = domain(&provider, MrMode::ENDPOINT);
    let (bound, other) = (End::open(&there), End::open(&there));
    let here = End::open(&domain(&provider, MrMode::empty()));
    let target = Buffer::new(8);
    let register = |key| {
        RegAttr::key(key).disabled().register(&*there, &[host(target.range(), true)]).unwrap()
    };
    let region = register(1);
    there.endpoint_binding().unwrap().bind_endpoint(region, &*bound.endpoint).unwrap();
    refused(
        there.endpoint_binding().unwrap().bind_endpoint(region, &*other.endpoint),
        ErrorKind::BadState,
    );
    refused(
        there.endpoint_binding().unwrap().bind_endpoint(region, &*here.endpoint),
        ErrorKind::InvalidArgument,
    );
    there.enabling().unwrap().enable(region).unwrap();
    let unbound = register(2);
    there.enabling().unwrap().enable(unbound).unwrap();
    let source = Buffer::filled(8, 1);
    let write = |end, region| here.write(here.peer(end), &[source.whole()], &remote(region, 8), 0);
    write(&bound, region).unwrap();
    refused(write(&other, region), ErrorKind::AccessDenied);
    refused(write(&bound, unbound), ErrorKind::AccessDenied);
    // The application may close the region and the endpoint in either order.
    bound.endpoint.close().unwrap();
    refused(
        there.endpoint_binding().unwrap().bind_endpoint(unbound, &*bound.endpoint),
        ErrorKind::BadState,
    );
    there.deregister(region).unwrap();
    other.endpoint.close().unwrap();
    let mut left = LiveObjects::default();
    (left.regions, left.page_registrations, left.bytes) = (1, 1, 8);
    assert_eq!(there.live(), left);
}

/// MODE-10
#[test]
fn local_buffers_are_used_through_their_endpoint_only() {
    let provider = Loopback::builder().build().unwrap();
    let here = domain(&provider, MrMode::ENDPOINT);
    let (bound, other) = (End::open(&here), End::open(&here));
    let there = End::open(&domain(&provider, MrMode::empty()));
    let (target, local, sink) = (Buffer::new(8), Buffer::filled(8, 1), Buffer::new(8));
    let exposed = RegAttr::key(1).register(&*there.domain, &[host(target.range(), true)]).unwrap();
    let key = remote(exposed, 8);
    for owned in [true, false] {
        let register = |key, endpoint: Option<&End>| {
            let attr = RegAttr::key(key).disabled();
            let region = attr.register(&*here, &[host(local.range(), owned)]).unwrap();
            if let Some(end) = endpoint {
                here.endpoint_binding().unwrap().bind_endpoint(region, &*end.endpoint).unwrap();
            }
            here.enabling().unwrap().enable(region).unwrap();
            region
        };
        let (region, unbound) = (register(10, Some(&bound)), register(11, None));
        let segment =
            |region: hmem_core::provider::ProviderRegion| local.segment(0, 8, Some(region.local));
        for (end, region) in [(&other, region), (&bound, unbound)] {
            let to = end.peer(&there);
            refused(end.write(to, &[segment(region)], &key, 0), ErrorKind::AccessDenied);
            refused(end.read(to, &[segment(region)], &key, 0), ErrorKind::AccessDenied);
            // Tests the buffer in a list of segments, which has a code path of its own, and as the
            // buffer of a message.
            let half =
                [local.segment(0, 4, Some(region.local)), local.segment(4, 4, Some(region.local))];
            refused(end.write(to, &half, &key, 0), ErrorKind::AccessDenied);
            let send = Operation::Send { tag: None, invalidate: None };
            refused(end.run(send, &[segment(region)], to), ErrorKind::AccessDenied);
            end.post(
                Operation::Receive { tag: None, from: None },
                &[segment(region)],
                PeerId(0),
                3,
            )
            .unwrap();
            there
                .run(
                    Operation::Send { tag: None, invalidate: None },
                    &[sink.whole()],
                    there.peer(end),
                )
                .unwrap();
            let received = end.next();
            assert_eq!(received.context, 3);
            refused(received.result, ErrorKind::AccessDenied);
        }
        assert_eq!(
            (target.bytes(), local.bytes()),
            (vec![0; 8], vec![1; 8]),
            "a refused transfer moved bytes"
        );
        bound.write(bound.peer(&there), &[segment(region)], &key, 0).unwrap();
        assert_eq!(target.bytes(), [1; 8]);
        target.fill(0);
        here.deregister(region).unwrap();
        here.deregister(unbound).unwrap();
    }
}

#[test]
fn zero_length_accesses_need_a_key_and_a_right() {
    let pair = pair(MrMode::empty());
    let target = Buffer::new(8);
    let region = RegAttr::key(1)
        .access(Access::REMOTE_READ)
        .register(&*pair.there.domain, &[host(target.range(), true)])
        .unwrap();
    pair.here.read(pair.to, &[], &remote(region, 8), 8).unwrap();
    refused(pair.here.write(pair.to, &[], &remote(region, 8), 0), ErrorKind::AccessDenied);
    pair.there.domain.deregister(region).unwrap();
    refused(pair.here.read(pair.to, &[], &remote(region, 8), 0), ErrorKind::InvalidKey);
}

#[test]
fn every_atomic_form_is_checked_at_post() {
    use hmem_core::transfer::AtomicType;
    let pair = pair(MrMode::empty());
    let target = Buffer::counting(64);
    let region =
        RegAttr::key(1).register(&*pair.there.domain, &[host(target.range(), true)]).unwrap();
    let key = remote(region, 64);
    let (buffer, result) = (Buffer::new(64), Buffer::new(64));
    let run = |op, len, operands: usize, result_len: Option<usize>, compare: Option<usize>| {
        let operation = Operation::Atomic {
            op,
            datatype: AtomicType::I32,
            remote: RemoteSegment { address: hmem_core::Iova(0), len, key: &key },
            result: result_len.map(|len| result.segment(0, len, None)),
            compare: compare.map(|len| buffer.segment(0, len, None)),
        };
        pair.here.run(operation, &[buffer.segment(0, operands, None)], pair.to)
    };
    let bad = ErrorKind::InvalidArgument;
    refused(run(AtomicOp::Sum, 6, 6, None, None), bad);
    refused(run(AtomicOp::Sum, 0, 0, None, None), bad);
    refused(run(AtomicOp::Sum, 8, 4, None, None), bad);
    refused(run(AtomicOp::Sum, 8, 8, Some(4), None), bad);
    refused(run(AtomicOp::Sum, 8, 8, None, Some(8)), bad);
    refused(run(AtomicOp::Cswap, 8, 8, Some(8), None), bad);
    refused(run(AtomicOp::Cswap, 8, 8, None, Some(8)), bad);
    refused(run(AtomicOp::AtomicRead, 8, 0, None, None), bad);
    assert_eq!(run(AtomicOp::Sum, 8, 8, None, None).unwrap(), 8);
    assert_eq!(run(AtomicOp::AtomicRead, 64, 0, Some(64), None).unwrap(), 64);
    assert_eq!(result.bytes(), target.bytes());
    // A length that no memory has is refused before the NIC allocates buffers for the elements.
    let len = 1 << 60;
    let desc = Some(
        RegAttr::key(2).register(&*pair.here.domain, &[host(result.range(), true)]).unwrap().local,
    );
    let huge = Operation::Atomic {
        op: AtomicOp::AtomicRead,
        datatype: AtomicType::U64,
        remote: RemoteSegment { address: hmem_core::Iova(0), len, key: &key },
        result: Some(LocalSegment { address: result.address(), len, desc }),
        compare: None,
    };
    refused(pair.here.run(huge, &[], pair.to), ErrorKind::OutOfBounds);
    refused(pair.here.fetch(pair.to, AtomicOp::Sum, 1, None, &key, 4), bad);
    refused(pair.here.fetch(pair.to, AtomicOp::Sum, 1, None, &key, 64), ErrorKind::OutOfBounds);
}

#[test]
fn comparing_atomics_swap_only_if_compare_op_target_holds() {
    for owned in [true, false] {
        let pair = pair(MrMode::empty());
        let target = Buffer::new(8);
        let region =
            RegAttr::key(1).register(&*pair.there.domain, &[host(target.range(), owned)]).unwrap();
        let key = remote(region, 8);
        for (op, compare, swaps) in [
            (AtomicOp::Cswap, 5, true),
            (AtomicOp::Cswap, 6, false),
            (AtomicOp::CswapNe, 6, true),
            (AtomicOp::CswapLe, 4, true),
            (AtomicOp::CswapLt, 5, false),
            (AtomicOp::CswapGe, 4, false),
            (AtomicOp::CswapGt, 6, true),
        ] {
            target.write(0, &5u64.to_le_bytes());
            let old = pair.here.fetch(pair.to, op, 9, Some(compare), &key, 0).unwrap();
            assert_eq!((old, target.u64_at(0)), (5, if swaps { 9 } else { 5 }), "{op:?} {compare}");
        }
    }
}

#[test]
fn limits_are_enforced_and_released_at_close() {
    let provider =
        Loopback::builder().max_mr_count(2).max_pinned_bytes(100).mr_iov_limit(2).build().unwrap();
    let (domain, other) = (domain(&provider, MrMode::empty()), domain(&provider, MrMode::empty()));
    let buffer = Buffer::new(100);
    let register = |key, len: u64| {
        RegAttr::key(key).register(&*domain, &[host(buffer.range().slice(0, len).unwrap(), true)])
    };
    let piece = host(buffer.range().slice(0, 30).unwrap(), true);
    let three = [piece.clone(), piece.clone(), piece.clone()];
    refused(RegAttr::key(1).register(&*domain, &three), ErrorKind::InvalidArgument);
    let first = register(1, 60).unwrap();
    let refusal = register(2, 41).unwrap_err();
    assert_eq!(refusal.kind(), ErrorKind::OutOfResources);
    assert_eq!(refusal.context_value("limit"), Some("max_pinned_bytes"));
    // The limits apply to the whole NIC, not to each domain.
    let second = RegAttr::key(1).register(&*other, &[piece]).unwrap();
    refused(register(2, 1), ErrorKind::OutOfResources);
    domain.deregister(first).unwrap();
    refused(register(1, 71), ErrorKind::OutOfResources);
    domain.deregister(register(1, 70).unwrap()).unwrap();
    other.deregister(second).unwrap();
}

#[test]
fn failed_call_leaves_no_object_behind() {
    let faults = Faults::new();
    let provider = Loopback::builder().faults(&faults).build().unwrap();
    let pair = Pair::new(provider.clone(), MrMode::empty());
    let target = Buffer::new(8);
    let source = Buffer::filled(8, 1);
    let there = &*pair.there.domain;
    let scenario = || -> hmem_core::Result<()> {
        provider
            .open_domain(&support::request(MrMode::empty()))?
            .transport()
            .unwrap()
            .open_cq(4)?;
        let region = RegAttr::key(1).register(there, &[host(target.range(), true)])?;
        let used = (|| {
            let sub = there.sub_regions().unwrap().register_sub(
                region,
                &RegAttr::key(2).request(),
                0,
                4,
            )?;
            there.deregister(sub)?;
            let raw = there.raw_keys().unwrap().raw_key(region)?;
            let mapped = there.raw_keys().unwrap().map_raw(
                hmem_core::Iova(0),
                8,
                hmem_core::Addressing::ZeroBased,
                &raw,
            )?;
            there.raw_keys().unwrap().unmap_key(&mapped)?;
            pair.here.write(pair.to, &[source.whole()], &remote(region, 8), 0)
        })();
        there.deregister(region).and(used.map(|_| ()))
    };
    faults.start_counting();
    scenario().unwrap();
    let calls = [
        NicCall::OpenDomain,
        NicCall::OpenCq,
        NicCall::Register,
        NicCall::RegisterSub,
        NicCall::RawKey,
        NicCall::MapRaw,
        NicCall::Post,
        NicCall::Transfer,
    ];
    for call in calls {
        faults.fail_nth(call, 1, Errno(12));
        refused(scenario(), ErrorKind::OutOfResources);
        let mut left = LiveObjects::default();
        left.endpoints = 1;
        assert_eq!(there.live(), left, "{call:?}");
        scenario().unwrap();
    }
}

#[test]
fn failed_deregistration_leaves_the_region_usable() {
    let faults = Faults::new();
    let pair = Pair::new(Loopback::builder().faults(&faults).build().unwrap(), MrMode::empty());
    let target = Buffer::new(8);
    let region =
        RegAttr::key(1).register(&*pair.there.domain, &[host(target.range(), true)]).unwrap();
    faults.fail_nth(NicCall::Deregister, 1, Errno(5));
    refused(pair.there.domain.deregister(region), ErrorKind::Driver);
    let source = Buffer::filled(8, 1);
    pair.here.write(pair.to, &[source.whole()], &remote(region, 8), 0).unwrap();
    pair.there.domain.deregister(region).unwrap();
}

#[test]
fn domains_and_endpoints_can_be_dropped_in_any_order() {
    for thread in [false, true] {
        for order in 0..6 {
            let progress =
                if thread { Progress::Thread } else { hmem_provider_loopback::Progress::ByHand };
            let provider = Loopback::builder().progress(progress).build().unwrap();
            let Pair { provider, here, there, to } = Pair::new(provider, MrMode::empty());
            let target = Buffer::new(8);
            let region =
                RegAttr::key(1).register(&*there.domain, &[host(target.range(), true)]).unwrap();
            let source = Buffer::filled(8, 1);
            here.write(to, &[source.whole()], &remote(region, 8), 0).unwrap();
            match order {
                0 => drop((provider, here, there)),
                1 => drop((there, here, provider)),
                2 => {
                    let End { domain, cq, endpoint } = there;
                    drop(domain);
                    drop(endpoint);
                    refused(
                        here.write(to, &[source.whole()], &remote(region, 8), 0),
                        ErrorKind::Unreachable,
                    );
                    drop(cq);
                }
                3 => {
                    let End { domain, cq, endpoint } = there;
                    drop((cq, endpoint));
                    domain.deregister(region).unwrap();
                }
                4 => {
                    here.post(
                        Operation::Send { tag: None, invalidate: None },
                        &[source.whole()],
                        to,
                        1,
                    )
                    .unwrap();
                    drop(there);
                    drop(here);
                }
                _ => {
                    there
                        .post(
                            Operation::Receive { tag: None, from: None },
                            &[source.whole()],
                            PeerId(0),
                            1,
                        )
                        .unwrap();
                    drop(provider);
                    drop(there.domain);
                    drop(here);
                    drop(there.endpoint);
                }
            }
        }
    }
}

/// A copy engine. Its first write drops the last handles of the domain that calls it.
#[derive(Debug)]
struct Dropping(std::sync::Mutex<Option<End>>, std::sync::mpsc::Sender<std::thread::ThreadId>);

impl Copies for Dropping {
    fn read(&self, _offset: u64, _into: &mut [u8]) -> hmem_core::Result<()> {
        Ok(())
    }

    fn write(&self, _offset: u64, _from: &[u8]) -> hmem_core::Result<()> {
        drop(self.0.lock().unwrap().take());
        self.1.send(std::thread::current().id()).unwrap();
        Ok(())
    }
}

#[test]
fn progress_thread_can_drop_its_own_domain() {
    use hmem_core::{Address, AddressRange, provider::Backing, provider::Piece};
    let provider = Loopback::builder().progress(Progress::Thread).build().unwrap();
    let Pair { here, there, to, .. } = Pair::new(provider, MrMode::empty());
    let (sender, dropped) = std::sync::mpsc::channel();
    let range = AddressRange::new(Address(4096), 8).unwrap();
    let copies = Dropping(std::sync::Mutex::new(None), sender);
    let device = Arc::new(CopiedDevice { range, copies });
    let iface = Arc::clone(&device) as Arc<dyn hmem_core::Iface>;
    let piece = Piece { range, backing: Backing::Staged { iface: &iface } };
    let region = RegAttr::key(1).register(&*there.domain, &[piece]).unwrap();
    let source = Buffer::filled(8, 1);
    let key = remote(region, 8);
    let list = [RemoteSegment { address: hmem_core::Iova(0), len: 8, key: &key }];
    // The NIC calls the device only after `here` was moved into the device: the test holds the
    // device's lock until then.
    let mut slot = device.copies.0.lock().unwrap();
    here.post(Operation::Write { remote: &list }, &[source.whole()], to, 1).unwrap();
    *slot = Some(here);
    drop(slot);
    assert_ne!(dropped.recv().unwrap(), std::thread::current().id());
    there.domain.deregister(region).unwrap();
}

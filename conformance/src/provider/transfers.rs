//! Behaviours of transfers: every byte arrives, and no other byte changes.

#![allow(unsafe_code, reason = "registers memory by address")]

use std::sync::Arc;

use hmem_core::{
    Access, Address, AddressRange, AllocationKind, Atomic, DeviceBuffer, DeviceId, ErrorKind,
    Iface, MrMode, Path, Promise, Raw,
    iface::AllocRequest,
    path::P2pPolicy,
    provider::{MsgOrder, ProgressModel, Provider},
    transfer::{AtomicOp, AtomicType, CompletionKind},
};

use super::link::{LOCAL, Link, REMOTE, contents, eventually, remote};
use crate::{
    bytes::{assert_bytes, pattern},
    trial::{Outcome, skip},
};

/// Length of each region, in bytes.
const LEN: u64 = 200_000;

/// Parts of a region that the transfers use, as (offset, length): all of it, one byte at each end,
/// and an odd number of bytes in the middle.
const PARTS: [(u64, u64); 4] = [(0, LEN), (0, 1), (LEN - 1, 1), (4095, 70_001)];

pub(super) fn write_and_read_move_exactly_the_named_bytes(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    let mut expected = pattern(1, LEN);
    let region = link.target.register(expected.clone(), REMOTE);
    let key = link.key(&region);
    for (seed, (offset, len)) in PARTS.into_iter().enumerate() {
        let bytes = pattern(seed as u64 + 10, len);
        assert_eq!(link.push(&key, offset, &bytes).expect("write"), len, "bytes written");
        expected[offset as usize..(offset + len) as usize].copy_from_slice(&bytes);
        assert_bytes(&contents(&region), &expected, &format!("{len} bytes written to {offset}"));
        let found = link.pull(&key, offset, len).expect("read");
        assert_bytes(&found, &bytes, &format!("{len} bytes read from {offset}"));
    }
    Ok(())
}

pub(super) fn region_of_several_ranges_is_one_run_of_bytes(
    provider: &Arc<dyn Provider>,
) -> Outcome {
    let link = Link::open(provider);
    if link.target.domain.provider_attr().mr_iov_limit < 2 {
        return skip("a region of this NIC has one range");
    }
    if link.has(MrMode::VIRT_ADDR) {
        return skip("peers address each range by its own virtual address");
    }
    let memory = pattern(1, 12_288);
    let whole = AddressRange::of(&memory);
    let ranges =
        [(8192, 1000), (100, 3000)].map(|(offset, len)| whole.slice(offset, len).expect("inside"));
    // SAFETY: the vector outlives the region. Remote requests only read it, and so does this
    // function.
    let raw = unsafe { Raw::new(Box::from(ranges), Promise::ReadWrite) };
    let region = link.target.register(raw, REMOTE);
    let found = link.pull(&link.key(&region), 0, 4000).expect("read");
    let expected = [&memory[8192..9192], &memory[100..3100]].concat();
    assert_bytes(&found, &expected, "two ranges as one run");
    region.close().expect("close");
    Ok(())
}

pub(super) fn message_arrives_in_the_posted_buffer(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    let into = link.target.register(vec![0xEE; 5000], Access::RECV);
    let message = pattern(2, 3000);
    let from = link.initiator.register(message.clone(), Access::SEND);
    let slice = into.slice(1000, 3000).expect("inside");
    link.target.endpoint.receive(&[slice], None, 2).expect("post a receive");
    let slice = from.slice(0, 3000).expect("inside");
    link.initiator.endpoint.send(&[slice], None, link.peer, 1).expect("post a send");
    assert_eq!(link.ended().expect("send"), 3000, "bytes sent");
    let received = link.target.wait(&link.initiator);
    assert_eq!((received.context, received.result.expect("receive")), (2, 3000));
    let expected = [&[0xEE; 1000][..], &message, &[0xEE; 1000]].concat();
    assert_bytes(&contents(&into), &expected, "the receive buffer");
    Ok(())
}

pub(super) fn atomic_returns_the_old_value_and_adds(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    // The element of an atomic must be aligned, and a vector of bytes may start at any address.
    let bytes = pattern(3, 64);
    let before = bytes.clone();
    let region = link.target.register(bytes, REMOTE);
    let aligned =
        (region.range().start().0.next_multiple_of(8) - region.range().start().0) as usize;
    region.write(aligned as u64, &40u64.to_le_bytes()).expect("copy in");
    let key = link.key(&region);
    let operands = link.initiator.register([2u64.to_le_bytes(), [0; 8]].concat(), LOCAL);
    let atomic = Atomic {
        op: AtomicOp::Sum,
        datatype: AtomicType::U64,
        remote: remote(&key, aligned as u64, 8),
        operand: operands.slice(0, 8).expect("inside"),
        result: Some(operands.slice(8, 8).expect("inside")),
        compare: None,
    };
    let posted = link.initiator.endpoint.atomic(&atomic, link.peer, 1);
    match posted.and_then(|()| link.ended()) {
        Err(why) if why.kind() == ErrorKind::Unsupported => return skip(why.to_string()),
        result => assert_eq!(result.expect("atomic"), 8, "bytes of an atomic"),
    }
    assert_bytes(&contents(&operands)[8..], &40u64.to_le_bytes(), "the old value");
    let mut expected = before;
    expected[aligned..aligned + 8].copy_from_slice(&42u64.to_le_bytes());
    assert_bytes(&contents(&region), &expected, "the target of an atomic");
    Ok(())
}

pub(super) fn each_request_completes_once_with_its_context(
    provider: &Arc<dyn Provider>,
) -> Outcome {
    const REQUESTS: u64 = 32;
    let link = Link::open(provider);
    let region = link.target.register(vec![0; REQUESTS as usize * 8], REMOTE);
    let key = link.key(&region);
    let bytes = pattern(5, REQUESTS * 8);
    let source = link.initiator.register(bytes.clone(), LOCAL);
    for number in 0..REQUESTS {
        let (slice, to) = (source.slice(number * 8, 8), [remote(&key, number * 8, 8)]);
        let endpoint = &link.initiator.endpoint;
        endpoint.write(&[slice.expect("inside")], &to, link.peer, 1000 + number).expect("post");
    }
    let mut contexts = Vec::new();
    for _ in 0..REQUESTS {
        let completion = link.initiator.wait(&link.target);
        assert_eq!(completion.kind, CompletionKind::Write);
        assert_eq!(completion.result.expect("write"), 8, "bytes written");
        contexts.push(completion.context);
    }
    contexts.sort_unstable();
    assert_eq!(contexts, (1000..1000 + REQUESTS).collect::<Vec<_>>());
    let mut more = Vec::new();
    assert_eq!(link.initiator.cq.read(&mut more, 1).expect("read completions"), 0, "{more:?}");
    assert_bytes(&contents(&region), &bytes, "all requests together");
    Ok(())
}

pub(super) fn transfers_progress_by_the_declared_agent(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    let region = link.target.register(vec![1; 64], REMOTE);
    let key = link.key(&region);
    let source = link.initiator.register(vec![7; 64], LOCAL);
    let slice = source.slice(0, 64).expect("inside");
    link.initiator.endpoint.write(&[slice], &[remote(&key, 0, 64)], link.peer, 1).expect("post");
    let has_arrived = || contents(&region) == [7; 64];
    match link.initiator.domain.provider_attr().progress {
        ProgressModel::Manual => {
            assert!(!has_arrived(), "the bytes moved without a call");
            let domain = &link.initiator.domain;
            if domain.provider_domain().manual_progress().is_some() {
                assert_eq!(domain.progress().expect("progress"), 1, "requests ended by the call");
                assert!(has_arrived(), "the call moved nothing");
            }
        }
        ProgressModel::Nic | ProgressModel::Thread => {
            eventually("a transfer without calls", has_arrived);
        }
    }
    assert_eq!(link.ended().expect("write"), 64, "bytes written");
    assert!(has_arrived(), "the transfer completed and moved nothing");
    Ok(())
}

/// Tests the order of requests that the provider declares: posts two writes to the same bytes and
/// then a read of these bytes, all of which are in flight at once.
pub(super) fn requests_take_effect_in_the_declared_order(provider: &Arc<dyn Provider>) -> Outcome {
    const LEN: u64 = 16 << 10;
    let link = Link::open(provider);
    let order = link.initiator.domain.provider_attr().order;
    if !order.contains(MsgOrder::WAW) {
        return skip("the provider declares no order of writes");
    }
    let region = link.target.register(vec![1; LEN as usize], REMOTE);
    let key = link.key(&region);
    let there = [remote(&key, 0, LEN)];
    let reads = order.contains(MsgOrder::RAW);
    for round in 0..8 {
        let [first, second, sink] =
            [pattern(round, LEN), pattern(round + 50, LEN), vec![0; LEN as usize]]
                .map(|bytes| link.initiator.register(bytes, LOCAL));
        let endpoint = &link.initiator.endpoint;
        for source in [&first, &second] {
            let slice = source.slice(0, LEN).expect("inside");
            endpoint.write(&[slice], &there, link.peer, 1).expect("post a write");
        }
        if reads {
            let slice = sink.slice(0, LEN).expect("inside");
            endpoint.read(&[slice], &there, link.peer, 1).expect("post a read");
        }
        for _ in 0..2 + u64::from(reads) {
            link.ended().expect("transfer");
        }
        assert_bytes(&contents(&region), &contents(&second), "a write overtook another write");
        if reads {
            assert_bytes(&contents(&sink), &contents(&second), "the read overtook a write");
        }
    }
    Ok(())
}

pub(super) fn device_memory_is_reached_by_its_dma_buf(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::with(provider, P2pPolicy::Required);
    if !link.target.domain.provider_attr().imports.dma_buf {
        return skip("the NIC imports no dma-bufs");
    }
    device_memory(&link, Path::DmaBuf)
}

pub(super) fn device_memory_is_reached_by_staged_copies(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::with(provider, P2pPolicy::Disabled);
    let attr = link.target.domain.provider_attr();
    if !attr.imports.staged || !attr.staged_access.contains(REMOTE) {
        return skip("peers of this NIC do not reach staged memory");
    }
    device_memory(&link, Path::Staged)
}

/// Tests that the domain registers each of [`PARTS`] of device memory by the path `path`. A write
/// and a read of each part must move the right bytes.
fn device_memory(link: &Link, path: Path) -> Outcome {
    let device = Arc::<hmem_iface_system::Simulated>::clone(&link.device) as Arc<dyn Iface>;
    let request = AllocRequest { len: LEN, device: DeviceId(0), kind: AllocationKind::Device };
    let buffer = DeviceBuffer::allocate(&device, &request).expect("allocate");
    let mut expected = pattern(4, LEN);
    for (seed, (offset, len)) in PARTS.into_iter().enumerate() {
        buffer.write(0, &expected).expect("copy in");
        let start = Address(buffer.allocation().base().0 + offset);
        let range = AddressRange::new(start, len).expect("inside");
        // SAFETY: the buffer outlives the region, and nothing refers to its bytes.
        let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
        let region = link.target.register(memory, REMOTE);
        assert_eq!(region.decision().expect("decision").path, path);
        let key = link.key(&region);
        let bytes = pattern(seed as u64 + 20, len);
        assert_eq!(link.push(&key, 0, &bytes).expect("write"), len, "bytes written");
        expected[offset as usize..(offset + len) as usize].copy_from_slice(&bytes);
        let mut found = vec![0; LEN as usize];
        buffer.read(0, &mut found).expect("copy out");
        assert_bytes(&found, &expected, &format!("{len} bytes written to {offset}"));
        assert_bytes(&link.pull(&key, 0, len).expect("read"), &bytes, "bytes read");
        region.close().expect("close");
    }
    Ok(())
}

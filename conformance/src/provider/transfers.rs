//! Behaviours of transfers: every byte arrives, and no other byte changes.

use std::{sync::Arc, thread, time::Duration};

use hmem_core::{
    Access, ErrorKind, Iface, MemoryRegion, MrFlags, Path,
    path::P2pPolicy,
    provider::{MsgOrder, ProgressModel},
    transfer::{CompletionKind, Operation},
};

use super::{
    case::{Case, TestMemory},
    link::{CaseLink, Setup},
};
use crate::link::{LOCAL, LinkSide, REMOTE, eventually, mr_attr, remote, segment};
use crate::{
    bytes::{assert_bytes, pattern},
    memory::Bytes,
    trial::{Outcome, skip},
};

/// Length of each region, in bytes.
const LEN: u64 = 200_000;

/// Parts of a region that the transfers use, as (offset, length): all of it, one byte at each end,
/// and an odd number of bytes in the middle.
const PARTS: [(u64, u64); 4] = [(0, LEN), (0, 1), (LEN - 1, 1), (4095, 70_001)];

pub(super) fn write_and_read_move_exactly_the_named_bytes(case: &Case) {
    let link = CaseLink::open(case);
    let mut expected = pattern(1, LEN + 200);
    let memory = link.filled(&expected);
    let region = link.expose(memory.part(100, LEN), REMOTE);
    let path = match case.memory {
        TestMemory::OwnedHost | TestMemory::Host => Path::PlainHost,
        TestMemory::Device => Path::DmaBuf,
        TestMemory::StagedDevice => Path::Staged,
    };
    assert_eq!(region.decision().expect("decision").path, path);
    let key = link.key(&region);
    for (seed, (offset, len)) in PARTS.into_iter().enumerate() {
        let bytes = pattern(seed as u64 + 10, len);
        assert_eq!(link.push(&key, offset, &bytes).expect("write"), len, "bytes written");
        let start = 100 + offset as usize;
        expected[start..start + bytes.len()].copy_from_slice(&bytes);
        assert_bytes(&memory.all(), &expected, &format!("{len} bytes written to {offset}"));
        let found = link.pull(&key, offset, len).expect("read");
        assert_bytes(&found, &bytes, &format!("{len} bytes read from {offset}"));
    }
}

/// Tests staged copies at the initiator and at the target. Staged memory needs no right for peers,
/// because only its own side uses it in requests.
pub(super) fn device_memory_of_either_side_moves_by_staged_copies(case: &Case) -> Outcome {
    if !case.attr.imports.staged {
        return skip("the NIC has no staged copies");
    }
    let mut setup = Setup::of(case);
    setup.initiator.p2p = P2pPolicy::Disabled;
    setup.target.p2p = P2pPolicy::Disabled;
    let link = setup.open();
    let device = Arc::clone(&link.device) as Arc<dyn Iface>;
    let [near, far] = [(); 2].map(|()| Bytes::on_device(&device, 0, LEN as usize));
    let [staged, inbox] = [(&link.initiator, &near), (&link.target, &far)].map(|(side, bytes)| {
        let range = [bytes.range()];
        let attr = mr_attr(&range, LOCAL).key(side.fresh_key());
        let region = side.regattr(&attr, MrFlags::empty()).expect("register");
        side.make_usable(&region);
        assert_eq!(region.decision().expect("decision").path, Path::Staged);
        region
    });
    let desc = |region: &MemoryRegion| Some(region.desc().expect("a descriptor"));
    let memory = link.filled(&pattern(1, LEN));
    let region = link.expose(memory.range(), REMOTE);
    let key = link.key(&region);
    for (seed, (offset, len)) in PARTS.into_iter().enumerate() {
        let bytes = pattern(seed as u64 + 20, len);
        near.put(offset, &bytes);
        let local = [segment(near.part(offset, len), desc(&staged))];
        let peer = [remote(&key, offset, len)];
        assert_eq!(link.transfer(Operation::Write { remote: &peer }, &local).expect("write"), len);
        assert_bytes(&memory.get(offset, len as usize), &bytes, "written from staged memory");
        near.put(offset, &vec![0; len as usize]);
        assert_eq!(link.transfer(Operation::Read { remote: &peer }, &local).expect("read"), len);
        assert_bytes(&near.get(offset, len as usize), &bytes, "read into staged memory");
        let into = segment(far.part(0, len), desc(&inbox));
        let (sent, received) = link.send(local[0], into);
        assert_eq!((sent.expect("send"), received.expect("receive")), (len, len));
        assert_bytes(&far.get(0, len as usize), &bytes, "received into staged memory");
    }
    let buffers = |side: &LinkSide| side.domain.live().staging_buffers;
    assert_eq!((buffers(&link.initiator), buffers(&link.target)), (0, 0));
    Ok(())
}

pub(super) fn region_of_several_ranges_is_one_run_of_bytes(case: &Case) -> Outcome {
    let link = CaseLink::open(case);
    if case.attr.mr_iov_limit < 4 {
        return skip("a region of this NIC has less than four ranges");
    }
    let memory = link.filled(&pattern(1, 16 << 10));
    // Ranges with gaps between them, adjacent ones, and ones in descending order.
    let ranges = [(8192, 100), (8292, 50), (3, 1), (4096, 777)];
    let ranges = ranges.map(|(start, len)| memory.part(start, len));
    let region = link.try_expose(&mr_attr(&ranges, REMOTE), MrFlags::empty()).expect("register");
    assert_eq!((region.len(), region.ranges()), (928, &ranges[..]));
    let key = link.key(&region);
    let found = || [memory.get(8192, 150), memory.get(3, 1), memory.get(4096, 777)].concat();
    assert_bytes(&link.pull(&key, 0, 928).expect("read"), &found(), "four ranges as one run");
    let bytes = pattern(3, 928);
    link.push(&key, 0, &bytes).expect("write across every seam");
    assert_bytes(&found(), &bytes, "written across every seam");
    assert_bytes(&link.pull(&key, 99, 53).expect("read"), &bytes[99..152], "three ranges");
    for (offset, len) in [(928, 1), (927, 2)] {
        let write = link.push(&key, offset, &vec![1; len]);
        case.assert_refused(write, ErrorKind::OutOfBounds, "a write past the last range");
    }
    let last = [bytes[927], pattern(1, 16 << 10)[4096 + 777]];
    assert_bytes(&memory.get(4096 + 776, 2), &last, "the end after a refused write");
    Ok(())
}

pub(super) fn message_arrives_in_the_posted_buffer(case: &Case) {
    let link = CaseLink::open(case);
    let inbox = link.filled(&[0xEE; 5000]);
    let into = link.expose(inbox.range(), Access::RECV);
    let message = pattern(2, 3000);
    let from = link.local(3000, Access::SEND);
    from.bytes.put(0, &message);
    let into = segment(inbox.part(1000, 3000), Some(into.desc().expect("descriptor")));
    let (sent, received) = link.send(from.segment(0, 3000), into);
    assert_eq!((sent.expect("send"), received.expect("receive")), (3000, 3000));
    let expected = [&[0xEE; 1000][..], &message, &[0xEE; 1000]].concat();
    assert_bytes(&inbox.all(), &expected, "the receive buffer");
}

pub(super) fn atomic_returns_the_old_value_and_adds(case: &Case) -> Outcome {
    let link = CaseLink::open(case);
    let mut expected = pattern(3, 64);
    expected[8..16].copy_from_slice(&40u64.to_le_bytes());
    let memory = link.filled(&expected);
    let region = link.expose(memory.range(), REMOTE);
    match link.fetch_add(&link.key(&region), 8, 2) {
        Err(why) if why.kind() == ErrorKind::Unsupported => return skip(why.to_string()),
        old => assert_eq!(old.expect("atomic"), 40, "the old value"),
    }
    expected[8..16].copy_from_slice(&42u64.to_le_bytes());
    assert_bytes(&memory.all(), &expected, "the target of an atomic");
    Ok(())
}

pub(super) fn each_request_completes_once_with_its_context(case: &Case) {
    const REQUESTS: u64 = 32;
    let link = CaseLink::open(case);
    let target = link.bytes(REQUESTS as usize * 8);
    let region = link.expose(target.range(), REMOTE);
    let key = link.key(&region);
    let bytes = pattern(5, REQUESTS * 8);
    let source = link.local(bytes.len(), LOCAL);
    source.bytes.put(0, &bytes);
    for number in 0..REQUESTS {
        let write = [remote(&key, number * 8, 8)];
        let local = [source.segment(number * 8, 8)];
        link.post(Operation::Write { remote: &write }, &local, 1000 + number).expect("post");
    }
    let mut contexts = Vec::new();
    for _ in 0..REQUESTS {
        let completion = link.completion();
        assert_eq!(completion.kind, CompletionKind::Write);
        assert_eq!(completion.result.expect("write"), 8, "bytes written");
        contexts.push(completion.context);
    }
    contexts.sort_unstable();
    assert_eq!(contexts, (1000..1000 + REQUESTS).collect::<Vec<_>>());
    let mut more = Vec::new();
    assert_eq!(link.initiator.cq.read(&mut more, 1).expect("read completions"), 0, "{more:?}");
    assert_bytes(&target.all(), &bytes, "all requests together");
}

pub(super) fn transfers_progress_by_the_declared_agent(case: &Case) {
    let link = CaseLink::open(case);
    let target = link.filled(&[1; 64]);
    let region = link.expose(target.range(), REMOTE);
    let key = link.key(&region);
    let source = link.local(64, LOCAL);
    source.bytes.put(0, &[7; 64]);
    let there = [remote(&key, 0, 64)];
    link.post(Operation::Write { remote: &there }, &[source.segment(0, 64)], 1).expect("post");
    let has_arrived = || target.all() == [7; 64];
    match case.attr.progress {
        ProgressModel::Manual => {
            // Waits, so that a transfer that makes progress without a call would move its bytes.
            thread::sleep(Duration::from_millis(5));
            assert!(!has_arrived(), "the bytes moved without a call");
            let domain = &link.initiator.domain;
            if domain.provider_domain().manual_progress().is_some() {
                let mut ended = domain.progress().expect("progress");
                if case.control.is_none() {
                    // A NIC may need several calls, on both sides.
                    eventually("the end of a transfer by calls", || {
                        link.target.domain.progress().expect("progress");
                        ended += domain.progress().expect("progress");
                        ended > 0
                    });
                }
                assert_eq!(ended, 1, "requests ended by the calls");
                assert!(has_arrived(), "the calls moved nothing");
            }
        }
        ProgressModel::Nic | ProgressModel::Thread => {
            eventually("a transfer without calls", has_arrived);
        }
    }
    assert_eq!(link.ended().expect("write"), 64, "bytes written");
    assert!(has_arrived(), "the transfer completed and moved nothing");
}

/// Tests the order of requests that the provider declares: posts two writes to the same bytes, a
/// read of these bytes and another write, all of which are in flight at once.
pub(super) fn requests_take_effect_in_the_declared_order(case: &Case) -> Outcome {
    const LEN: u64 = 16 << 10;
    let link = CaseLink::open(case);
    let order = case.attr.order;
    if !order.contains(MsgOrder::WAW) {
        return skip("the provider declares no order of writes");
    }
    let target = link.bytes(LEN as usize);
    let region = link.expose(target.range(), REMOTE);
    let key = link.key(&region);
    let local = link.local(4 * LEN as usize, LOCAL);
    let there = [remote(&key, 0, LEN)];
    let (write, read) = (Operation::Write { remote: &there }, Operation::Read { remote: &there });
    let read_follows = order.contains(MsgOrder::RAW);
    let write_follows = read_follows && order.contains(MsgOrder::WAR);
    for round in 0..8 {
        let writes = [0, 50, 100].map(|seed| pattern(round + seed, LEN));
        for (number, bytes) in (0..).zip(&writes) {
            local.bytes.put(number * LEN, bytes);
        }
        let mut posts = vec![(write, 0), (write, 1)];
        posts.extend(read_follows.then_some((read, 3)));
        posts.extend(write_follows.then_some((write, 2)));
        for (operation, buffer) in &posts {
            link.post(*operation, &[local.segment(buffer * LEN, LEN)], 1).expect("post");
        }
        for _ in &posts {
            link.ended().expect("transfer");
        }
        let last = &writes[if write_follows { 2 } else { 1 }];
        assert_bytes(&target.all(), last, "a write overtook an earlier one");
        if read_follows {
            let seen = local.bytes.get(3 * LEN, LEN as usize);
            assert_bytes(&seen, &writes[1], "the read overtook a write, or a write the read");
        }
    }
    Ok(())
}

/// Tests the declared order of messages and writes. Each message follows a write to the bytes
/// behind the message's own receive buffer.
pub(super) fn messages_keep_the_declared_order(case: &Case) -> Outcome {
    const MESSAGES: u64 = 8;
    let link = CaseLink::open(case);
    let order = case.attr.order;
    if !order.intersects(MsgOrder::SAS | MsgOrder::SAW) {
        return skip("the provider declares no order of messages");
    }
    let target = link.bytes(16 * MESSAGES as usize);
    let region = link.expose(target.range(), REMOTE | LOCAL);
    let key = link.key(&region);
    let desc = region.desc().expect("descriptor");
    let local = link.local(16 * MESSAGES as usize, LOCAL);
    for number in 0..MESSAGES {
        local.bytes.put(16 * number, &[number as u8 + 1; 16]);
        let into = segment(target.part(16 * number, 8), Some(desc));
        link.target.receive(into, number).expect("post a receive");
    }
    for number in 0..MESSAGES {
        let (after, bytes) = ([remote(&key, 16 * number + 8, 8)], local.segment(16 * number, 8));
        link.post(Operation::Write { remote: &after }, &[bytes], number).expect("post a write");
        let message = Operation::Send { tag: None, invalidate: None };
        link.post(message, &[bytes], number).expect("post a message");
    }
    for number in 0..MESSAGES {
        let (received, _) = link.arrived();
        assert_eq!(received.kind, CompletionKind::Receive);
        received.result.expect("receive");
        let expected = [number as u8 + 1; 8];
        if order.contains(MsgOrder::SAS) {
            assert_eq!(received.context, number);
            assert_eq!(target.get(16 * number, 8), expected, "a message overtook another");
        }
        if order.contains(MsgOrder::SAW) {
            assert_eq!(target.get(16 * number + 8, 8), expected, "a message overtook a write");
        }
    }
    Ok(())
}

//! Properties of transfers that a provider declares: the agent that executes them, their order, and
//! the immediate data that they carry.

use std::{thread, time::Duration};

use hmem::{
    AddressRange, ErrorKind, LocalKey,
    provider::{MsgOrder, ProgressModel},
    transfer::{Completion, CompletionKind, Operation, PeerId, WorkRequest},
};

use crate::{
    config::{TestConfig, over_configs},
    net::{LOCAL, Net, REMOTE, Setup, eventually, remote, segment},
};

over_configs! {
    transfers_progress_by_the_declared_agent: Pairwise;
    requests_take_effect_in_the_declared_order: Pairwise;
    messages_keep_the_declared_order: Pairwise;
    /// EVT-04
    immediate_write_completes_a_receive_after_its_bytes: Pairwise;
    /// EVT-04
    immediate_write_waits_for_a_receive: Pairwise;
    /// EVT-04
    messages_carry_immediate_data: Pairwise;
    /// EVT-04
    immediate_data_that_is_too_wide_is_refused: Pairwise;
}

fn transfers_progress_by_the_declared_agent(config: &TestConfig) {
    let net = Net::open(config);
    let target = net.bytes(64);
    let region = net.expose(target.range(), REMOTE);
    let key = net.key(&region);
    let local = net.local(64, LOCAL);
    local.bytes.put(0, &[7; 64]);
    net.post(Operation::Write { remote: &[remote(&key, 0, 64)] }, &[local.segment(0, 64)], 1)
        .expect("post");
    let has_arrived = || target.get(0, 64) == [7; 64];
    match net.initiator.domain.provider_attr().progress {
        ProgressModel::Manual => {
            // Waits, so that a transfer that makes progress without a call would move its bytes.
            thread::sleep(Duration::from_millis(5));
            assert!(!has_arrived(), "the bytes moved without a progress call");
            assert_eq!(net.initiator.domain.progress().expect("progress"), 1);
            assert!(has_arrived(), "the progress call did not move the bytes");
        }
        ProgressModel::Nic | ProgressModel::Thread => {
            eventually("a transfer without a progress call", has_arrived);
        }
    }
    net.completion().result.expect("write");
}

fn requests_take_effect_in_the_declared_order(config: &TestConfig) {
    const LEN: u64 = 16 << 10;
    let net = Net::open(config);
    let order = net.initiator.domain.provider_attr().order;
    let target = net.bytes(LEN as usize);
    let region = net.expose(target.range(), REMOTE);
    let key = net.key(&region);
    let local = net.local(4 * LEN as usize, LOCAL);
    let buffer = |number: u64| local.segment(number * LEN, LEN);
    let there = [remote(&key, 0, LEN)];
    let write = Operation::Write { remote: &there };
    let read = Operation::Read { remote: &there };
    for round in 0..8 {
        let [first, second, third] = [1, 2, 3].map(|number| vec![3 * round + number; LEN as usize]);
        local.bytes.put(0, &first);
        local.bytes.put(LEN, &second);
        local.bytes.put(2 * LEN, &third);
        // All writes are in flight at once: no completion is read in between.
        net.post(write, &[buffer(0)], 1).expect("post");
        net.post(write, &[buffer(1)], 2).expect("post");
        let mut posted = 2;
        let read_follows = order.contains(MsgOrder::RAW);
        if read_follows {
            net.post(read, &[buffer(3)], 3).expect("post");
            posted += 1;
        }
        let write_follows = read_follows && order.contains(MsgOrder::WAR);
        if write_follows {
            net.post(write, &[buffer(2)], 4).expect("post");
            posted += 1;
        }
        for _ in 0..posted {
            net.completion().result.expect("transfer");
        }
        if order.contains(MsgOrder::WAW) {
            let last = if write_follows { &third } else { &second };
            assert_eq!(&target.get(0, LEN as usize), last, "a write overtook an earlier one");
            if read_follows {
                let seen = local.bytes.get(3 * LEN, LEN as usize);
                assert_eq!(seen, second, "the read overtook a write, or a write the read");
            }
        }
    }
}

fn messages_keep_the_declared_order(config: &TestConfig) {
    const MESSAGES: u64 = 8;
    let net = Net::open(config);
    let order = net.initiator.domain.provider_attr().order;
    let target = net.bytes(16 * MESSAGES as usize);
    let region = net.expose(target.range(), REMOTE | LOCAL);
    let key = net.key(&region);
    let desc: LocalKey = region.desc().expect("a descriptor");
    let local = net.local(16 * MESSAGES as usize, LOCAL);
    for number in 0..MESSAGES {
        local.bytes.put(16 * number, &[number as u8 + 1; 16]);
        let request = WorkRequest {
            operation: Operation::Receive { tag: None, from: None },
            local: &[segment(target.part(16 * number, 8), Some(desc))],
            peer: PeerId(0),
            context: number,
        };
        // SAFETY: the memory belongs to the test and outlives the transfer.
        unsafe { net.target.endpoint.post(&request) }.expect("post a receive");
    }
    // Each message follows a write to the bytes behind the message's own receive buffer.
    for number in 0..MESSAGES {
        let after = [remote(&key, 16 * number + 8, 8)];
        net.post(Operation::Write { remote: &after }, &[local.segment(16 * number, 8)], number)
            .expect("post a write");
        let message = Operation::Send { tag: None, invalidate: None };
        net.post(message, &[local.segment(16 * number, 8)], number).expect("post a message");
    }
    for number in 0..MESSAGES {
        let received = net.target.wait(&[&net.initiator]);
        assert_eq!(received.kind, CompletionKind::Receive);
        received.result.expect("receive");
        if order.contains(MsgOrder::SAS) {
            assert_eq!(received.context, number);
            assert_eq!(target.get(16 * number, 8), [number as u8 + 1; 8], "a message overtook");
        }
        if order.contains(MsgOrder::SAW) {
            assert_eq!(target.get(16 * number + 8, 8), [number as u8 + 1; 8], "ahead of a write");
        }
    }
}

fn post_receive(net: &Net, range: AddressRange, desc: LocalKey, context: u64) {
    let operation = Operation::Receive { tag: None, from: None };
    let local = &[segment(range, Some(desc))];
    let request = WorkRequest { operation, local, peer: PeerId(0), context };
    // SAFETY: the memory belongs to the test and outlives the transfer.
    unsafe { net.target.endpoint.post(&request) }.expect("post a receive");
}

fn received(net: &Net) -> Completion {
    net.target.wait(&[&net.initiator])
}

/// Returns the largest value of immediate data that the NIC carries.
fn widest(net: &Net) -> u64 {
    let bytes = net.initiator.domain.provider_attr().cq_data_size;
    assert!((1..=8).contains(&bytes), "{bytes} bytes of immediate data");
    u64::MAX >> (64 - 8 * bytes)
}

fn immediate_write_completes_a_receive_after_its_bytes(config: &TestConfig) {
    const LEN: u64 = 48 << 10;
    let net = Net::open(config);
    let target = net.bytes(LEN as usize);
    let region = net.expose(target.range(), REMOTE);
    let key = net.key(&region);
    let inbox = net.bytes(64);
    let inbox_region = net.expose(inbox.range(), LOCAL);
    let desc = inbox_region.desc().expect("a descriptor");
    let local = net.local(LEN as usize, LOCAL);
    for (round, data) in [0, 1, widest(&net) / 3, widest(&net)].into_iter().enumerate() {
        let (seed, context) = (round as u8 + 1, 10 + round as u64);
        inbox.put(0, &[0x11; 64]);
        local.bytes.put(0, &vec![seed; LEN as usize]);
        post_receive(&net, inbox.range(), desc, context);
        let there = [remote(&key, 0, LEN)];
        let write = Operation::WriteImmediate { remote: &there, data };
        net.post(write, &[local.segment(0, LEN)], 1).expect("post");
        let ended = received(&net);
        // Checked first, since the bytes must be there as soon as the receive has completed.
        assert_eq!(
            target.get(0, LEN as usize),
            vec![seed; LEN as usize],
            "the receive completed before its bytes arrived"
        );
        assert_eq!((ended.kind, ended.context), (CompletionKind::RemoteWrite, context));
        assert_eq!(ended.result.expect("written"), LEN);
        assert_eq!((ended.data, ended.invalidated, ended.tag), (Some(data), None, None));
        assert_eq!(inbox.get(0, 64), [0x11; 64], "the buffer of the receive");
        let sent = net.completion();
        assert_eq!((sent.kind, sent.context, sent.data), (CompletionKind::Write, 1, None));
        assert_eq!(sent.result.expect("write"), LEN);
    }
    assert_eq!(net.target.cq.read(&mut Vec::new(), 1).expect("read"), 0, "a completion too many");
}

fn immediate_write_waits_for_a_receive(config: &TestConfig) {
    let net = Net::open(config);
    let target = net.bytes(64);
    let region = net.expose(target.range(), REMOTE);
    let key = net.key(&region);
    let inbox = net.bytes(64);
    let inbox_region = net.expose(inbox.range(), LOCAL);
    let desc = inbox_region.desc().expect("a descriptor");
    let local = net.local(64, LOCAL);
    local.bytes.put(0, &[9; 64]);
    for data in 0..4_u64 {
        let there = [remote(&key, 8 * data, 8)];
        let write = Operation::WriteImmediate { remote: &there, data };
        net.post(write, &[local.segment(0, 8)], data).expect("post");
    }
    for context in 0..4 {
        post_receive(&net, inbox.range(), desc, context);
    }
    for data in 0..4 {
        let ended = received(&net);
        assert_eq!((ended.context, ended.data), (data, Some(data)), "in the order of the writes");
        ended.result.expect("written");
        net.completion().result.expect("write");
    }
    assert_eq!(target.get(0, 40), [&[9; 32][..], &[0; 8]].concat());
}

fn messages_carry_immediate_data(config: &TestConfig) {
    let net = Net::open(config);
    let inbox = net.bytes(64);
    let inbox_region = net.expose(inbox.range(), LOCAL);
    let desc = inbox_region.desc().expect("a descriptor");
    let local = net.local(64, LOCAL);
    local.bytes.put(0, &[5; 16]);
    for data in [0, 7, widest(&net)] {
        post_receive(&net, inbox.range(), desc, 3);
        let message = Operation::SendImmediate { tag: None, data };
        net.post(message, &[local.segment(0, 16)], 1).expect("post");
        assert_eq!(net.completion().result.expect("send"), 16);
        let ended = received(&net);
        assert_eq!((ended.kind, ended.context), (CompletionKind::Receive, 3));
        assert_eq!((ended.result.expect("receive"), ended.data), (16, Some(data)));
        assert_eq!(inbox.get(0, 16), [5; 16]);
    }
    post_receive(&net, inbox.range(), desc, 4);
    let message = Operation::Send { tag: None, invalidate: None };
    net.post(message, &[local.segment(0, 16)], 1).expect("post");
    net.completion().result.expect("send");
    assert_eq!(received(&net).data, None, "a message without immediate data");
}

fn immediate_data_that_is_too_wide_is_refused(config: &TestConfig) {
    let mut setup = Setup::of(config);
    setup.provider = setup.provider.cq_data_size(4);
    let net = setup.open();
    let target = net.bytes(64);
    let region = net.expose(target.range(), REMOTE);
    let key = net.key(&region);
    let local = net.local(64, LOCAL);
    assert_eq!(widest(&net), u64::from(u32::MAX));
    let there = [remote(&key, 0, 8)];
    for data in [1 << 32, u64::MAX] {
        let write = Operation::WriteImmediate { remote: &there, data };
        for operation in [write, Operation::SendImmediate { tag: None, data }] {
            let error = net.post(operation, &[local.segment(0, 8)], 1).expect_err("too wide");
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            assert_eq!(error.context_value("cq_data_size"), Some("4"), "{error}");
        }
    }
    net.push(&key, 0, &[1; 8]).expect("the endpoint still works");
    assert_eq!(net.target.cq.read(&mut Vec::new(), 1).expect("read"), 0);
}

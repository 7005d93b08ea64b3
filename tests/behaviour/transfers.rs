//! Properties of transfers that a provider declares: who executes them, and in which order.

use std::{thread, time::Duration};

use hmem::{
    LocalKey,
    provider::{MsgOrder, ProgressModel},
    transfer::{CompletionKind, Operation, PeerId, WorkRequest},
};

use crate::{
    net::{LOCAL, Net, REMOTE, eventually, remote, segment},
    world::{World, over_worlds},
};

over_worlds! {
    transfers_progress_by_the_declared_agent: Pairs;
    requests_take_effect_in_the_declared_order: Pairs;
    messages_keep_the_declared_order: Pairs;
}

fn transfers_progress_by_the_declared_agent(world: &World) {
    let net = Net::open(world);
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
            // Time for an agent that the provider kept to itself.
            thread::sleep(Duration::from_millis(5));
            assert!(!has_arrived(), "it moved without a call");
            assert_eq!(net.initiator.domain.progress().expect("progress"), 1);
            assert!(has_arrived(), "the call did not move it");
        }
        ProgressModel::Nic | ProgressModel::Thread => {
            eventually("a transfer that nobody calls for", has_arrived);
        }
    }
    net.completion().result.expect("write");
}

fn requests_take_effect_in_the_declared_order(world: &World) {
    const LEN: u64 = 16 << 10;
    let net = Net::open(world);
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
        // All in flight at once: no completion is read in between.
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
            assert_eq!(&target.get(0, LEN as usize), last, "a write overtook one");
            if read_follows {
                let seen = local.bytes.get(3 * LEN, LEN as usize);
                assert_eq!(seen, second, "the read overtook a write, or a write the read");
            }
        }
    }
}

fn messages_keep_the_declared_order(world: &World) {
    const MESSAGES: u64 = 8;
    let net = Net::open(world);
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
    // Each message says that the bytes after its own place are written.
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

//! MR-05 to MR-07, MR-14: registration, close, and accesses after the close.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use hmem::{
    Access, Endpoint, ErrorKind, MemoryRegion, MrFlags, MrMode, RegionState,
    counter::Counter,
    fabric,
    loopback::{NicCall, Progress},
    system::{AddressReuse, FreeDetection},
    transfer::{Operation, PeerId, WorkRequest},
};

use crate::{
    config::{Memory, Need, TestConfig, need, needs, over_configs},
    memory::{Bytes, HostPages, pattern},
    net::{LOCAL, Net, REMOTE, eventually, mr_attr, open_endpoint, remote, wait_held},
};

over_configs! {
    /// MR-05
    close_ends_transfers_in_flight_before_it_returns: Pairwise, needs::HELD_TRANSFERS;
    /// MR-05
    close_of_a_local_buffer_ends_transfers_in_flight_too: Pairwise, needs::HELD_TRANSFERS;
    /// MR-05
    close_amid_a_stream_of_writes_leaves_the_memory_alone: Pairwise, needs::KEYS_AT_HAND;
    /// MR-05
    posted_transfers_that_have_not_begun_fail_after_close: Pairwise, needs::BY_HAND;
    /// MR-05
    peer_fails_after_close_and_the_local_endpoint_still_works: Every;
    /// MR-05
    reconnect_recovers_both_sides_of_a_refused_access: Pairwise;
    /// MR-06
    region_with_a_counter_is_busy_and_still_works: Pairwise, needs::COUNTERS;
    /// MR-06
    region_with_a_window_is_busy_and_still_works: Pairwise, needs::KEYS_AT_HAND, needs::WINDOWS;
    /// MR-06
    a_region_closes_after_the_last_of_its_counters: Pairwise, needs::COUNTERS;
    /// MR-06
    a_region_closes_before_its_endpoint: Pairwise, ENDPOINT;
    /// MR-06
    region_of_a_closed_endpoint_is_unreachable_and_closes: Pairwise, ENDPOINT;
    /// MR-07
    memory_at_a_reused_address_is_reached_five_times: Pairwise;
    /// MR-07
    memory_at_a_reused_address_is_reached_ten_thousand_times: DefaultMode,
        need("progress by thread", "the test steps transfers itself", |config| {
            config.progress == Progress::ByHand || !config.is_loopback()
        }),
        need("callback-style device", "the identity-style device takes the same path", |config| {
            config.memory != Memory::Device(FreeDetection::Callback)
        }),
        need("device memory on verbs", "five times there, where each export takes its time",
            |config| {
            config.is_loopback() || config.is_system()
        });
    /// MR-07
    ///
    /// In MMU_NOTIFY mode the region is refreshed, and reaches the new pages.
    pinned_registration_reaches_the_replaced_pages: Pairwise, needs::SYSTEM, needs::PINNED;
    /// MR-07
    following_registration_reaches_the_new_pages: Pairwise, needs::SYSTEM, needs::FOLLOW;
    /// MR-14
    a_single_use_key_works_once: Pairwise,
        need("verbs", "keys of verbs regions work until they are closed", TestConfig::is_loopback);
}

const ENDPOINT: Need =
    need("other modes", "regions are bound to endpoints in ENDPOINT mode only", |config| {
        config.has(MrMode::ENDPOINT)
    });

fn close_ends_transfers_in_flight_before_it_returns(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.filled(&[0x11; 4096]);
    let region = net.expose(memory.range(), REMOTE);
    let key = net.key(&region);
    net.push(&key, 0, &[0x11]).expect("the local buffer is registered before the gate");
    net.faults.start_counting();
    let closes = net.faults.calls(NicCall::Deregister);
    let gate = net.faults.hold(NicCall::Transfer);
    thread::scope(|scope| {
        let transfer = scope.spawn(|| net.push(&key, 0, &[0x22; 4096]));
        wait_held(&gate);
        let closing = scope.spawn(|| {
            region.close().expect("close");
            memory.all()
        });
        net.faults.wait_for_calls(NicCall::Deregister, closes + 1);
        // Leaves time in which a close that does not wait for the transfer would return.
        for _ in 0..200 {
            thread::yield_now();
        }
        gate.release();
        let moved = transfer.join().expect("the transfer's thread").is_ok();
        let at_close = closing.join().expect("the closing thread");
        assert_eq!(memory.all(), at_close, "memory was touched after close returned");
        let expected = if moved { 0x22 } else { 0x11 };
        assert_eq!(at_close, [expected; 4096], "the transfer says moved: {moved}");
    });
}

fn close_of_a_local_buffer_ends_transfers_in_flight_too(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.filled(&[0x22; 4096]);
    let region = net.expose(memory.range(), REMOTE);
    let key = net.key(&region);
    let local = net.local(4096, LOCAL);
    local.bytes.put(0, &[0x11; 4096]);
    let (from, into) = ([remote(&key, 0, 4096)], [local.segment(0, 4096)]);
    let (closing_region, bytes) = (local.region, &local.bytes);
    net.faults.start_counting();
    let closes = net.faults.calls(NicCall::Deregister);
    let gate = net.faults.hold(NicCall::Transfer);
    thread::scope(|scope| {
        let transfer = scope.spawn(|| net.transfer(Operation::Read { remote: &from }, &into));
        wait_held(&gate);
        let closing = scope.spawn(|| {
            closing_region.close().expect("close");
            bytes.all()
        });
        net.faults.wait_for_calls(NicCall::Deregister, closes + 1);
        for _ in 0..200 {
            thread::yield_now();
        }
        gate.release();
        let moved = transfer.join().expect("the transfer's thread").is_ok();
        let at_close = closing.join().expect("the closing thread");
        assert_eq!(bytes.all(), at_close, "memory was touched after close returned");
        assert_eq!(
            at_close,
            [if moved { 0x22 } else { 0x11 }; 4096],
            "the transfer says moved: {moved}"
        );
    });
}

fn close_amid_a_stream_of_writes_leaves_the_memory_alone(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.filled(&[0x11; 4096]);
    for round in 1..=10 {
        let region = net.expose(memory.range(), REMOTE);
        let key = net.key(&region);
        let written = AtomicU64::new(0);
        thread::scope(|scope| {
            let stream = scope.spawn(|| {
                let failed = (0u8..=255).cycle().take(1_000_000).find_map(|n| {
                    let moved = net.push(&key, 0, &[n; 4096]);
                    written.fetch_add(1, Ordering::Relaxed);
                    moved.err()
                });
                failed.expect("writes do not go on for ever").kind()
            });
            eventually("the stream", || written.load(Ordering::Relaxed) >= round);
            region.close().expect("close");
            let at_close = memory.all();
            assert_eq!(stream.join().expect("the stream"), net.seen(ErrorKind::InvalidKey));
            assert_eq!(memory.all(), at_close, "memory was touched after close returned");
        });
    }
}

fn posted_transfers_that_have_not_begun_fail_after_close(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.filled(&[0x11; 64]);
    let region = net.expose(memory.range(), REMOTE);
    let key = net.key(&region);
    let (gone, stays) = (net.local(64, LOCAL), net.local(64, LOCAL));
    let to = [remote(&key, 0, 64)];
    let inbox = net.filled(&[0x11; 64]);
    let inbox_region = net.expose(inbox.range(), LOCAL);
    let into = crate::net::segment(inbox.range(), Some(inbox_region.desc().expect("desc")));
    let receive = Operation::Receive { tag: None, from: None };
    let request = WorkRequest { operation: receive, local: &[into], peer: PeerId(0), context: 4 };
    // SAFETY: the memory belongs to the test and outlives the transfer.
    unsafe { net.target.endpoint.post(&request) }.expect("post");
    net.post(Operation::Write { remote: &to }, &[gone.segment(0, 64)], 1).expect("post");
    net.post(Operation::Write { remote: &to }, &[stays.segment(0, 64)], 2).expect("post");
    net.post(Operation::Send { tag: None, invalidate: None }, &[stays.segment(0, 64)], 3)
        .expect("post");
    gone.region.close().expect("nothing has begun");
    region.close().expect("nothing has begun");
    inbox_region.close().expect("nothing has begun");
    let ends: Vec<_> = (0..2).map(|_| net.completion()).collect();
    let kinds: Vec<_> =
        ends.into_iter().map(|end| (end.context, end.result.unwrap_err().kind())).collect();
    assert_eq!(kinds, [(1, ErrorKind::NoRegion), (2, ErrorKind::InvalidKey)]);
    let received = net.target.wait(&[&net.initiator]);
    assert_eq!((received.context, received.result.unwrap_err().kind()), (4, ErrorKind::NoRegion));
    assert_eq!(
        (memory.all(), inbox.all()),
        (vec![0x11; 64], vec![0x11; 64]),
        "a closed region was written"
    );
}

fn peer_fails_after_close_and_the_local_endpoint_still_works(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.filled(&[0x11; 64]);
    let before = net.live();
    let region = net.expose(memory.range(), REMOTE);
    let key = net.key(&region);
    net.assert_works(&key);
    memory.put(0, &[0x11; 64]);
    region.close().expect("close");
    assert_eq!(net.live(), before);
    let dead = net.seen(ErrorKind::InvalidKey);
    assert_eq!(net.push(&key, 0, &[0x22; 8]).unwrap_err().kind(), dead);
    assert_eq!(net.pull(&key, 0, 8).unwrap_err().kind(), dead);
    assert_eq!(net.fetch_add(&key, 0, 1).unwrap_err().kind(), dead);
    assert_eq!(memory.all(), [0x11; 64], "an invalid key moved bytes");

    let second = net.expose(memory.range(), REMOTE);
    net.assert_works(&net.key(&second));
    let (message, inbox) = (net.local(16, LOCAL), net.bytes(16));
    let inbox_region = net.expose(inbox.range(), LOCAL);
    message.bytes.put(0, b"still listening!");
    let into = crate::net::segment(inbox.range(), Some(inbox_region.desc().expect("desc")));
    let (sent, received) = net.send(message.segment(0, 16), into);
    assert_eq!((sent.expect("send"), received.expect("receive")), (16, 16));
    assert_eq!(inbox.all(), b"still listening!");
}

fn reconnect_recovers_both_sides_of_a_refused_access(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.filled(&[0x11; 64]);
    for _ in 0..2 {
        let region = net.expose(memory.range(), REMOTE);
        let key = net.key(&region);
        region.close().expect("close");
        net.push(&key, 0, &[0x22; 8]).expect_err("the region is closed");
        net.initiator.endpoint.reconnect().expect("connect the initiator");
        net.target.endpoint.reconnect().expect("connect the target");
        let region = net.expose(memory.range(), REMOTE);
        net.assert_works(&net.key(&region));
        region.close().expect("close");
    }
}

/// Registers memory, binds counters to the region and enables the region.
fn counted(net: &Net, memory: &Bytes, counters: &[&Arc<Counter>]) -> MemoryRegion {
    let ranges = [memory.range()];
    let attr = mr_attr(&ranges, REMOTE).key(net.fresh_key());
    let region = fabric::regattr(&net.target.domain, &attr, MrFlags::RMA_EVENT).expect("register");
    for counter in counters {
        region.bind_counter(counter, hmem::BindFlags::REMOTE_WRITE).expect("bind the counter");
    }
    if net.config.has(MrMode::ENDPOINT) {
        region.bind_endpoint(&net.target.endpoint).expect("bind the endpoint");
    }
    if region.state() == RegionState::Disabled {
        region.enable().expect("enable");
    }
    region
}

fn region_with_a_counter_is_busy_and_still_works(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(64);
    let counter = Arc::new(Counter::new());
    let region = counted(&net, &memory, &[&counter]);
    let key = net.key(&region);
    let rejected = region.close().expect_err("closed under its counter");
    assert_eq!((rejected.error.kind(), rejected.error.fi_errno()), (ErrorKind::Busy, 16));
    assert_eq!(rejected.error.context_value("bound"), Some("counter"));
    net.assert_works(&key);
    assert_eq!(counter.value(), 1, "the region counts nothing after a failed close");
    counter.close();
    rejected.value.close().expect("close after its counter");
    assert_eq!(net.live().regions, 0);
}

fn a_region_closes_after_the_last_of_its_counters(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(64);
    let counters = [(); 3].map(|()| Arc::new(Counter::new()));
    let mut region = counted(&net, &memory, &counters.each_ref());
    let key = net.key(&region);
    // The counters close in an order other than that of their binding.
    for (closed, at) in [1, 0, 2].into_iter().enumerate() {
        let rejected = region.close().expect_err("closed under an open counter");
        assert_eq!(rejected.error.kind(), ErrorKind::Busy);
        let open = (counters.len() - closed).to_string();
        assert_eq!(rejected.error.context_value("open_counters"), Some(&*open));
        net.assert_works(&key);
        counters[at].close();
        region = rejected.value;
    }
    region.close().expect("close after every counter");
    assert_eq!(net.live().regions, 0);
    for counter in &counters {
        assert_eq!(Arc::strong_count(counter), 1, "a closed region keeps its counter");
    }
}

fn region_with_a_window_is_busy_and_still_works(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.bytes(64);
    let region = net.expose(memory.range(), REMOTE | LOCAL | Access::MW_BIND);
    let key = net.key(&region);
    let window = net.target.domain.alloc_type_1_window().expect("window");
    window.bind(&region, 0, 32, REMOTE).expect("bind");
    let rejected = region.close().expect_err("closed under its window");
    assert_eq!(rejected.error.kind(), ErrorKind::Busy);
    net.assert_works(&key);
    window.unbind().expect("unbind");
    rejected.value.close().expect("close after the window was unbound");
    assert_eq!(net.live().regions, 0);
}

/// Registers a region, binds it to the target's endpoint, and replaces `net.target.endpoint` by a
/// new endpoint. Returns the region and the endpoint that it is bound to.
fn bound_to_an_endpoint(net: &mut Net, memory: &Bytes) -> (MemoryRegion, Endpoint) {
    let (second, cq) = open_endpoint(&net.target.domain, true, None);
    // The region must not depend on the endpoint's queue staying alive.
    drop(cq);
    let first = std::mem::replace(&mut net.target.endpoint, second);
    net.peer = net.initiator.endpoint.resolve(&first.name()).expect("resolve");
    let ranges = [memory.range()];
    let attr = mr_attr(&ranges, REMOTE | LOCAL).key(net.fresh_key());
    let region = fabric::regattr(&net.target.domain, &attr, MrFlags::empty()).expect("register");
    region.bind_endpoint(&first).expect("bind");
    region.enable().expect("enable");
    net.assert_works(&net.key(&region));
    (region, first)
}

fn a_region_closes_before_its_endpoint(config: &TestConfig) {
    let mut net = Net::open(config);
    let memory = net.bytes(64);
    let (region, first) = bound_to_an_endpoint(&mut net, &memory);
    let key = net.key(&region);
    region.close().expect("the region closes first");
    assert_eq!(net.push(&key, 0, &[1]).unwrap_err().kind(), net.seen(ErrorKind::InvalidKey));
    // The endpoint still serves other regions.
    let ranges = [memory.range()];
    let attr = mr_attr(&ranges, REMOTE).key(net.fresh_key());
    let other = fabric::regattr(&net.target.domain, &attr, MrFlags::empty()).expect("register");
    other.bind_endpoint(&first).expect("bind");
    other.enable().expect("enable");
    net.assert_works(&net.key(&other));
    other.close().expect("close");
    first.close().expect("then the endpoint");
    assert_eq!((net.live().endpoints, net.live().regions), (1, 0));
}

fn region_of_a_closed_endpoint_is_unreachable_and_closes(config: &TestConfig) {
    let mut net = Net::open(config);
    let memory = net.bytes(64);
    let (region, first) = bound_to_an_endpoint(&mut net, &memory);
    let key = net.key(&region);
    memory.put(0, &[6; 64]);
    first.close().expect("the endpoint closes first");
    assert_eq!(net.live().endpoints, 1);
    let gone = net.push(&key, 0, &[1]).expect_err("reached through a closed endpoint");
    assert_eq!(gone.kind(), ErrorKind::Unreachable, "{gone}");
    // No other endpoint reaches the region, not even one that is opened later.
    let (later, _cq) = open_endpoint(&net.target.domain, true, None);
    for endpoint in [&net.target.endpoint, &later] {
        net.peer = net.initiator.endpoint.resolve(&endpoint.name()).expect("resolve");
        for refused in [net.push(&key, 0, &[1]).map(|_| ()), net.pull(&key, 0, 1).map(|_| ())] {
            let error = refused.expect_err("reached through another endpoint");
            assert_eq!(error.kind(), ErrorKind::AccessDenied, "{error}");
        }
    }
    let again = region.bind_endpoint(&later).unwrap_err();
    assert_eq!(again.kind(), ErrorKind::BadState, "bound again");
    assert_eq!(memory.all(), [6; 64]);
    region.close().expect("the region closes after its endpoint");
    assert_eq!(net.live().regions, 0);
}

/// Frees the memory and allocates new memory at the same address.
fn reallocate(net: &Net, memory: Bytes, was: u64) -> Bytes {
    let memory = match memory {
        Bytes::Host(pages) => {
            pages.replace_pages();
            Bytes::Host(pages)
        }
        Bytes::Device(buffer) => {
            let len = buffer.allocation().range.len() as usize;
            drop(buffer);
            net.bytes(len)
        }
    };
    assert_eq!(memory.range().start().0, was, "the address did not come back");
    memory
}

fn rounds(config: &TestConfig, rounds: u64) {
    let net = Net::open(config);
    if let Some(device) = &net.device {
        device.set_address_reuse(AddressReuse::JustFreed);
    }
    // Allocates the initiator's buffer before the address that is reused.
    let warm = net.bytes(64);
    let region = net.expose(warm.range(), REMOTE);
    net.push(&net.key(&region), 0, &[1]).expect("write");
    let mut memory = net.bytes(8192);
    let start = memory.range().start().0;
    for round in 0..rounds {
        let (old, new) = (pattern(round, 100), pattern(round + 7, 100));
        memory.put(4090, &old);
        let region = net.expose(memory.part(1000, 6000), REMOTE);
        let key = net.key(&region);
        assert_eq!(net.pull(&key, 3090, 100).expect("read"), old, "round {round} read stale bytes");
        net.push(&key, 3090, &new).expect("write");
        assert_eq!(memory.get(4090, 100), new, "round {round} wrote elsewhere");
        if config.has(MrMode::RAW) {
            net.initiator.domain.unmap_key(&key).expect("unmap");
        }
        region.close().expect("close");
        memory = reallocate(&net, memory, start);
    }
    assert_eq!(net.live().regions, 1);
}

fn memory_at_a_reused_address_is_reached_five_times(config: &TestConfig) {
    rounds(config, 5);
}

fn memory_at_a_reused_address_is_reached_ten_thousand_times(config: &TestConfig) {
    rounds(config, 10_000);
}

/// Replaces the pages of a registered region, and refreshes the region in MMU_NOTIFY mode. Returns
/// the bytes that a peer then reads, and the bytes in memory after the peer's write.
fn read_stale(config: &TestConfig) -> (Vec<u8>, Vec<u8>) {
    let net = Net::open(config);
    let memory = Bytes::Host(HostPages::new(4096));
    memory.put(0, b"old pages");
    let region = net.expose(memory.range(), REMOTE);
    let key = net.key(&region);
    memory.pages().replace_pages();
    memory.put(0, b"new pages");
    if config.has(MrMode::MMU_NOTIFY) {
        // In this mode, access to replaced pages works only after a refresh.
        region.refresh(&[]).expect("refresh");
    }
    let read = net.pull(&key, 0, 9).expect("read");
    net.push(&key, 0, b"written!!").expect("write");
    (read, memory.get(0, 9))
}

fn pinned_registration_reaches_the_replaced_pages(config: &TestConfig) {
    let expected = if config.has(MrMode::MMU_NOTIFY) {
        (b"new pages", b"written!!")
    } else {
        (b"old pages", b"new pages")
    };
    let (read, memory) = read_stale(config);
    assert_eq!(
        (&read[..], &memory[..]),
        (&expected.0[..], &expected.1[..]),
        "this mode would hide a stale registration"
    );
}

fn following_registration_reaches_the_new_pages(config: &TestConfig) {
    let (read, memory) = read_stale(config);
    assert_eq!((&read[..], &memory[..]), (&b"new pages"[..], &b"written!!"[..]));
}

fn a_single_use_key_works_once(config: &TestConfig) {
    let net = Net::open(config);
    let memory = net.filled(&[7; 64]);
    let ranges = [memory.range()];
    let attr = mr_attr(&ranges, REMOTE);
    let single = || {
        let region = net.try_expose(&attr, MrFlags::MR_SINGLE_USE).expect("register");
        let key = net.key(&region);
        (region, key)
    };

    let (region, key) = single();
    assert_eq!(net.pull(&key, 0, 64).expect("the first use"), [7; 64]);
    assert_eq!(net.pull(&key, 0, 1).unwrap_err().kind(), ErrorKind::InvalidKey);
    assert_eq!(net.push(&key, 0, &[1]).unwrap_err().kind(), ErrorKind::InvalidKey);
    region.close().expect("a region whose key is used up closes");

    let (region, key) = single();
    assert_eq!(net.push(&key, 64, &[1]).unwrap_err().kind(), ErrorKind::OutOfBounds);
    assert_eq!(net.push(&key, 3, &[9]).expect("a refused access did not use it up"), 1);
    assert_eq!(net.push(&key, 3, &[1]).unwrap_err().kind(), ErrorKind::InvalidKey);
    assert_eq!(memory.get(3, 1), [9]);
    region.close().expect("close");

    // One of many transfers posted together succeeds.
    let (_region, key) = single();
    let local = net.local(8, LOCAL);
    let remote = [remote(&key, 0, 8)];
    for context in 0..8 {
        net.post(Operation::Write { remote: &remote }, &[local.segment(0, 8)], context)
            .expect("post");
    }
    let results: Vec<_> =
        (0..8).map(|_| net.completion().result.map_err(|error| error.kind())).collect();
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1, "{results:?}");
    assert!(
        results
            .iter()
            .filter_map(|result| result.as_ref().err())
            .all(|kind| *kind == ErrorKind::InvalidKey)
    );
}

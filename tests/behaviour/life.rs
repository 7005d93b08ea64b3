//! MR-05 to MR-07, MR-14: registration, close, and accesses after the close.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use hmem::{
    Access, Endpoint, ErrorKind, MemoryRegion, MrAttr, MrFlags, MrMode, RegionState,
    counter::Counter,
    loopback::{Call, Progress},
    system::{AddressReuse, FreeDetection},
    transfer::{Operation, PeerId, WorkRequest},
};

use crate::{
    memory::{Bytes, HostPages, pattern},
    net::{LOCAL, Net, REMOTE, eventually, open_endpoint, remote, wait_held},
    world::{Memory, Need, World, need, needs, over_worlds},
};

over_worlds! {
    /// MR-05
    close_ends_transfers_in_flight_before_it_returns: Pairs, needs::HELD_TRANSFERS;
    /// MR-05
    close_of_a_local_buffer_ends_transfers_in_flight_too: Pairs, needs::HELD_TRANSFERS;
    /// MR-05
    close_amid_a_stream_of_writes_leaves_the_memory_alone: Pairs, needs::KEYS_AT_HAND;
    /// MR-05
    posted_transfers_that_have_not_begun_fail_after_close: Pairs, needs::BY_HAND;
    /// MR-05
    peer_fails_after_close_and_the_local_endpoint_still_works: Every;
    /// MR-06
    region_with_a_counter_is_busy_and_still_works: Pairs, needs::COUNTERS;
    /// MR-06
    region_with_a_window_is_busy_and_still_works: Pairs, needs::KEYS_AT_HAND, needs::WINDOWS;
    /// MR-06
    a_region_closes_after_the_last_of_its_counters: Pairs, needs::COUNTERS;
    /// MR-06
    a_region_closes_before_its_endpoint: Pairs, ENDPOINT;
    /// MR-06
    a_region_closes_after_its_endpoint_and_is_unreachable_until_then: Pairs, ENDPOINT;
    /// MR-07
    memory_at_a_reused_address_is_reached_five_times: Pairs;
    /// MR-07
    memory_at_a_reused_address_is_reached_ten_thousand_times: Places,
        need("progress by thread", "the test steps transfers itself", |world| {
            world.progress == Progress::ByHand || !world.is_loopback()
        }),
        need("callback-style device", "the identity-style device shows the same path", |world| {
            world.memory != Memory::Device(FreeDetection::Callback)
        }),
        need("device memory on verbs", "five times there, where each export takes its time",
            |world| {
            world.is_loopback() || world.is_system()
        });
    /// MR-07
    pinned_pages_stay_the_old_ones_without_registering_again: Pairs, needs::SYSTEM, needs::PINNED;
    /// MR-07
    followed_pages_are_new_without_registering_again: Pairs, needs::SYSTEM, needs::FOLLOW;
    /// MR-14
    a_single_use_key_works_once: Pairs,
        need("verbs", "keys of verbs regions work until they are closed", World::is_loopback);
}

const ENDPOINT: Need =
    need("other modes", "regions are bound to endpoints in ENDPOINT mode only", |world| {
        world.has(MrMode::ENDPOINT)
    });

fn close_ends_transfers_in_flight_before_it_returns(world: &World) {
    let net = Net::open(world);
    let memory = net.filled(&[0x11; 4096]);
    let region = net.expose(memory.range(), REMOTE);
    let key = net.key(&region);
    net.push(&key, 0, &[0x11]).expect("the local buffer is registered before the gate");
    net.faults.count();
    let closes = net.faults.calls(Call::Deregister);
    let gate = net.faults.hold(Call::Transfer);
    thread::scope(|scope| {
        let transfer = scope.spawn(|| net.push(&key, 0, &[0x22; 4096]));
        wait_held(&gate);
        let closing = scope.spawn(|| {
            region.close().expect("close");
            memory.all()
        });
        net.faults.wait_for_calls(Call::Deregister, closes + 1);
        // Gives a close that does not wait the time to return before the transfer continues.
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

fn close_of_a_local_buffer_ends_transfers_in_flight_too(world: &World) {
    let net = Net::open(world);
    let memory = net.filled(&[0x22; 4096]);
    let region = net.expose(memory.range(), REMOTE);
    let key = net.key(&region);
    let local = net.local(4096, LOCAL);
    local.bytes.put(0, &[0x11; 4096]);
    let (from, into) = ([remote(&key, 0, 4096)], [local.segment(0, 4096)]);
    let (closing_region, bytes) = (local.region, &local.bytes);
    net.faults.count();
    let closes = net.faults.calls(Call::Deregister);
    let gate = net.faults.hold(Call::Transfer);
    thread::scope(|scope| {
        let transfer = scope.spawn(|| net.transfer(Operation::Read { remote: &from }, &into));
        wait_held(&gate);
        let closing = scope.spawn(|| {
            closing_region.close().expect("close");
            bytes.all()
        });
        net.faults.wait_for_calls(Call::Deregister, closes + 1);
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

fn close_amid_a_stream_of_writes_leaves_the_memory_alone(world: &World) {
    let net = Net::open(world);
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

fn posted_transfers_that_have_not_begun_fail_after_close(world: &World) {
    let net = Net::open(world);
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

fn peer_fails_after_close_and_the_local_endpoint_still_works(world: &World) {
    let net = Net::open(world);
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
    assert_eq!(memory.all(), [0x11; 64], "a dead key moved bytes");

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

/// A region with counters, ready for use.
fn counted(net: &Net, memory: &Bytes, counters: &[&Arc<Counter>]) -> MemoryRegion {
    let ranges = [memory.range()];
    let attr = MrAttr::new(&ranges, REMOTE).key(net.fresh_key());
    // SAFETY: the test's memory outlives the region and is referenced by nobody.
    let region = unsafe { net.target.domain.regattr(&attr, MrFlags::RMA_EVENT) }.expect("register");
    for counter in counters {
        region.bind_counter(counter, hmem::BindFlags::REMOTE_WRITE).expect("bind the counter");
    }
    if net.world.has(MrMode::ENDPOINT) {
        region.bind_endpoint(&net.target.endpoint).expect("bind the endpoint");
    }
    if region.state() == RegionState::Disabled {
        region.enable().expect("enable");
    }
    region
}

fn region_with_a_counter_is_busy_and_still_works(world: &World) {
    let net = Net::open(world);
    let memory = net.bytes(64);
    let counter = Arc::new(Counter::new());
    let region = counted(&net, &memory, &[&counter]);
    let key = net.key(&region);
    let rejected = region.close().expect_err("closed under its counter");
    assert_eq!((rejected.error.kind(), rejected.error.fi_errno()), (ErrorKind::Busy, 16));
    assert_eq!(rejected.error.context_value("bound"), Some("counter"));
    net.assert_works(&key);
    assert_eq!(counter.value(), 1, "the region that came back counts no more");
    counter.close();
    rejected.value.close().expect("close after its counter");
    assert_eq!(net.live().regions, 0);
}

/// MR-06
fn a_region_closes_after_the_last_of_its_counters(world: &World) {
    let net = Net::open(world);
    let memory = net.bytes(64);
    let counters = [(); 3].map(|()| Arc::new(Counter::new()));
    let mut region = counted(&net, &memory, &counters.each_ref());
    let key = net.key(&region);
    // Counters close in another order than they were bound.
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

fn region_with_a_window_is_busy_and_still_works(world: &World) {
    let net = Net::open(world);
    let memory = net.bytes(64);
    let region = net.expose(memory.range(), REMOTE | LOCAL | Access::MW_BIND);
    let key = net.key(&region);
    let window = net.target.domain.alloc_type_1_window().expect("window");
    window.bind(&region, 0, 32, REMOTE).expect("bind");
    let rejected = region.close().expect_err("closed under its window");
    assert_eq!(rejected.error.kind(), ErrorKind::Busy);
    net.assert_works(&key);
    window.unbind().expect("unbind");
    rejected.value.close().expect("close after the window let go");
    assert_eq!(net.live().regions, 0);
}

/// A region that is bound to the first of two endpoints of the target, and the second.
fn bound_to_an_endpoint(net: &mut Net, memory: &Bytes) -> (MemoryRegion, Endpoint) {
    let (second, cq) = open_endpoint(&net.target.domain, true, None);
    // The region must not depend on the endpoint's queue staying alive.
    drop(cq);
    let first = std::mem::replace(&mut net.target.endpoint, second);
    net.peer = net.initiator.endpoint.resolve(&first.name()).expect("resolve");
    let ranges = [memory.range()];
    let attr = MrAttr::new(&ranges, REMOTE | LOCAL).key(net.fresh_key());
    // SAFETY: the test's memory outlives the region and is referenced by nobody.
    let region = unsafe { net.target.domain.regattr(&attr, MrFlags::empty()) }.expect("register");
    region.bind_endpoint(&first).expect("bind");
    region.enable().expect("enable");
    net.assert_works(&net.key(&region));
    (region, first)
}

/// MR-06
fn a_region_closes_before_its_endpoint(world: &World) {
    let mut net = Net::open(world);
    let memory = net.bytes(64);
    let (region, first) = bound_to_an_endpoint(&mut net, &memory);
    let key = net.key(&region);
    region.close().expect("the region closes first");
    assert_eq!(net.push(&key, 0, &[1]).unwrap_err().kind(), net.seen(ErrorKind::InvalidKey));
    // The endpoint still serves other regions.
    let ranges = [memory.range()];
    let attr = MrAttr::new(&ranges, REMOTE).key(net.fresh_key());
    // SAFETY: the test's memory outlives the region and is referenced by nobody.
    let other = unsafe { net.target.domain.regattr(&attr, MrFlags::empty()) }.expect("register");
    other.bind_endpoint(&first).expect("bind");
    other.enable().expect("enable");
    net.assert_works(&net.key(&other));
    other.close().expect("close");
    first.close().expect("then the endpoint");
    assert_eq!((net.live().endpoints, net.live().regions), (1, 0));
}

/// MR-06
fn a_region_closes_after_its_endpoint_and_is_unreachable_until_then(world: &World) {
    let mut net = Net::open(world);
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
fn come_back(net: &Net, memory: Bytes, was: u64) -> Bytes {
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

fn rounds(world: &World, rounds: u64) {
    let net = Net::open(world);
    if let Some(device) = &net.device {
        device.set_address_reuse(AddressReuse::JustFreed);
    }
    // The initiator's buffer takes its address before the reused one is allocated.
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
        if world.has(MrMode::RAW) {
            net.initiator.domain.unmap_key(&key).expect("unmap");
        }
        region.close().expect("close");
        memory = come_back(&net, memory, start);
    }
    assert_eq!(net.live().regions, 1);
}

fn memory_at_a_reused_address_is_reached_five_times(world: &World) {
    rounds(world, 5);
}

fn memory_at_a_reused_address_is_reached_ten_thousand_times(world: &World) {
    rounds(world, 10_000);
}

/// Bytes that a peer reads through a registration made before the pages were replaced.
fn read_stale(world: &World) -> (Vec<u8>, Vec<u8>) {
    let net = Net::open(world);
    let memory = Bytes::Host(HostPages::new(4096));
    memory.put(0, b"old pages");
    let region = net.expose(memory.range(), REMOTE);
    let key = net.key(&region);
    memory.pages().replace_pages();
    memory.put(0, b"new pages");
    if world.has(MrMode::MMU_NOTIFY) {
        // Without the refresh the mode promises nothing.
        region.refresh(&[]).expect("refresh");
    }
    let read = net.pull(&key, 0, 9).expect("read");
    net.push(&key, 0, b"written!!").expect("write");
    (read, memory.get(0, 9))
}

fn pinned_pages_stay_the_old_ones_without_registering_again(world: &World) {
    let expected = if world.has(MrMode::MMU_NOTIFY) {
        (b"new pages", b"written!!")
    } else {
        (b"old pages", b"new pages")
    };
    let (read, memory) = read_stale(world);
    assert_eq!(
        (&read[..], &memory[..]),
        (&expected.0[..], &expected.1[..]),
        "this mode would hide a stale registration"
    );
}

fn followed_pages_are_new_without_registering_again(world: &World) {
    let (read, memory) = read_stale(world);
    assert_eq!((&read[..], &memory[..]), (&b"new pages"[..], &b"written!!"[..]));
}

fn a_single_use_key_works_once(world: &World) {
    let net = Net::open(world);
    let memory = net.filled(&[7; 64]);
    let ranges = [memory.range()];
    let attr = MrAttr::new(&ranges, REMOTE);
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

    // Of many transfers posted together, one works.
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

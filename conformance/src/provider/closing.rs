//! Behaviours of closes: transfers in flight, dependent objects, and reused addresses.

#![allow(unsafe_code, reason = "posts requests by address")]

use std::{
    mem,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use hmem_core::{
    Access, BindFlags, Endpoint, ErrorKind, MemoryRegion, MrFlags, MrMode,
    counter::Counter,
    fabric,
    provider::Features,
    transfer::{Operation, WorkRequest},
};
use hmem_iface_system::AddressReuse;

use super::{case::Case, link::CaseLink};
use crate::link::{
    Bytes, HostPages, LOCAL, REMOTE, eventually, mr_attr, open_endpoint, remote, segment, wait_held,
};
use crate::{bytes::pattern, control::Call};

pub(super) fn close_ends_transfers_in_flight_before_it_returns(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.filled(&[0x11; 4096]);
    let region = link.expose(memory.range(), REMOTE);
    let key = link.key(&region);
    link.push(&key, 0, &[0x11]).expect("the local buffer is registered before the gate");
    let closes = link.calls(Call::Deregister);
    thread::scope(|scope| {
        // Dropped before the scope ends, so that a failure releases the held call.
        let gate = link.hold(Call::Transfer);
        let transfer = scope.spawn(|| link.push(&key, 0, &[0x22; 4096]));
        wait_held(&gate);
        let closing = scope.spawn(|| {
            region.close().expect("close");
            memory.all()
        });
        eventually("the deregistration", || link.calls(Call::Deregister) > closes);
        // The region's key is invalid before the close returns.
        eventually("the end of the key", || link.live().regions == 0);
        let own = &link.target;
        let peer = own.endpoint.resolve(&own.endpoint.name()).expect("resolve");
        let operation = Operation::Write { remote: &[remote(&key, 0, 0)] };
        let request = WorkRequest { operation, local: &[], peer, context: 9 };
        // SAFETY: the request names no memory.
        unsafe { own.endpoint.post(&request) }.expect("post");
        let mut done = Vec::new();
        eventually("the late write", || own.cq.read(&mut done, 1).expect("read completions") == 1);
        case.assert_refused(done.remove(0).result, ErrorKind::InvalidKey, "a late write");
        // Leaves time in which a close that does not wait for the transfer would return.
        for _ in 0..200 {
            thread::yield_now();
        }
        assert!(!closing.is_finished(), "closed in the middle of a transfer");
        gate.release();
        let moved = transfer.join().expect("the transfer's thread").is_ok();
        assert!(moved || case.staged(), "the transfer had begun");
        let at_close = closing.join().expect("the closing thread");
        assert_eq!(memory.all(), at_close, "memory was touched after close returned");
        let expected = if moved { 0x22 } else { 0x11 };
        assert_eq!(at_close, [expected; 4096], "the transfer says moved: {moved}");
    });
}

pub(super) fn close_of_a_local_buffer_ends_transfers_in_flight_too(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.filled(&[0x22; 4096]);
    let region = link.expose(memory.range(), REMOTE);
    let key = link.key(&region);
    let local = link.local(4096, LOCAL);
    local.bytes.put(0, &[0x11; 4096]);
    let (from, into) = ([remote(&key, 0, 4096)], [local.segment(0, 4096)]);
    let (closing_region, bytes) = (local.region, &local.bytes);
    let closes = link.calls(Call::Deregister);
    thread::scope(|scope| {
        // Dropped before the scope ends, so that a failure releases the held call.
        let gate = link.hold(Call::Transfer);
        let transfer = scope.spawn(|| link.transfer(Operation::Read { remote: &from }, &into));
        wait_held(&gate);
        let closing = scope.spawn(|| {
            closing_region.close().expect("close");
            bytes.all()
        });
        eventually("the deregistration", || link.calls(Call::Deregister) > closes);
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

pub(super) fn close_amid_a_stream_of_writes_leaves_the_memory_alone(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.filled(&[0x11; 4096]);
    for round in 1..=10 {
        let region = link.expose(memory.range(), REMOTE);
        let key = link.key(&region);
        let written = AtomicU64::new(0);
        thread::scope(|scope| {
            let stream = scope.spawn(|| {
                let failed = (0u8..=255).cycle().take(1_000_000).find_map(|n| {
                    let moved = link.push(&key, 0, &[n; 4096]);
                    written.fetch_add(1, Ordering::Relaxed);
                    moved.err()
                });
                Err::<(), _>(failed.expect("writes do not go on for ever"))
            });
            eventually("the stream", || written.load(Ordering::Relaxed) >= round);
            region.close().expect("close");
            let at_close = memory.all();
            case.assert_refused(
                stream.join().expect("the stream"),
                ErrorKind::InvalidKey,
                "a write",
            );
            assert_eq!(memory.all(), at_close, "memory was touched after close returned");
        });
    }
}

pub(super) fn posted_transfers_that_have_not_begun_fail_after_close(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.filled(&[0x11; 64]);
    let region = link.expose(memory.range(), REMOTE);
    let key = link.key(&region);
    let (gone, stays) = (link.local(64, LOCAL), link.local(64, LOCAL));
    let to = [remote(&key, 0, 64)];
    let inbox = link.filled(&[0x11; 64]);
    let inbox_region = link.expose(inbox.range(), LOCAL);
    let into = segment(inbox.range(), Some(inbox_region.desc().expect("desc")));
    link.target.receive(into, 4).expect("post");
    link.post(Operation::Write { remote: &to }, &[gone.segment(0, 64)], 1).expect("post");
    link.post(Operation::Write { remote: &to }, &[stays.segment(0, 64)], 2).expect("post");
    link.post(Operation::Send { tag: None, invalidate: None }, &[stays.segment(0, 64)], 3)
        .expect("post");
    gone.region.close().expect("nothing has begun");
    region.close().expect("nothing has begun");
    inbox_region.close().expect("nothing has begun");
    let ends: Vec<_> = (0..2).map(|_| link.completion()).collect();
    let kinds: Vec<_> =
        ends.into_iter().map(|end| (end.context, end.result.unwrap_err().kind())).collect();
    assert_eq!(kinds, [(1, ErrorKind::NoRegion), (2, ErrorKind::InvalidKey)]);
    let received = link.received();
    assert_eq!((received.context, received.result.unwrap_err().kind()), (4, ErrorKind::NoRegion));
    assert_eq!(
        (memory.all(), inbox.all()),
        (vec![0x11; 64], vec![0x11; 64]),
        "a closed region was written"
    );
}

pub(super) fn reconnect_recovers_both_sides_of_a_refused_access(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.filled(&[0x11; 64]);
    for _ in 0..2 {
        let region = link.expose(memory.range(), REMOTE);
        let key = link.key(&region);
        region.close().expect("close");
        link.push(&key, 0, &[0x22; 8]).expect_err("the region is closed");
        link.initiator.endpoint.reconnect().expect("connect the initiator");
        link.target.endpoint.reconnect().expect("connect the target");
        let region = link.expose(memory.range(), REMOTE);
        link.assert_works(&link.key(&region));
        region.close().expect("close");
    }
}

pub(super) fn region_closes_after_the_last_of_its_counters(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.bytes(64);
    let ranges = [memory.range()];
    let attr = mr_attr(&ranges, REMOTE).key(link.fresh_key());
    let region = fabric::regattr(&link.target.domain, &attr, MrFlags::RMA_EVENT);
    let mut region = region.expect("register");
    let counters = [(); 3].map(|()| Arc::new(Counter::new()));
    for counter in &counters {
        region.bind_counter(counter, BindFlags::REMOTE_WRITE).expect("bind the counter");
    }
    link.target.make_usable(&region);
    let key = link.key(&region);
    // The counters close in an order other than that of their binding.
    for (closed, at) in [1, 0, 2].into_iter().enumerate() {
        let rejected = region.close().expect_err("closed under an open counter");
        assert_eq!((rejected.error.kind(), rejected.error.fi_errno()), (ErrorKind::Busy, 16));
        assert_eq!(rejected.error.context_value("bound"), Some("counter"));
        let open = (counters.len() - closed).to_string();
        assert_eq!(rejected.error.context_value("open_counters"), Some(&*open));
        link.assert_works(&key);
        let counted = closed as u64 + 1;
        assert_eq!(counters[at].value(), counted, "it counts nothing after a failed close");
        counters[at].close();
        region = rejected.value;
    }
    region.close().expect("close after every counter");
    assert_eq!(link.live().regions, 0);
    for counter in &counters {
        assert_eq!(Arc::strong_count(counter), 1, "a closed region keeps its counter");
    }
}

/// Registers a region, binds it to the target's endpoint, and replaces `link.target.endpoint` by a
/// new endpoint. Returns the region and the endpoint that it is bound to.
fn bound_to_an_endpoint(link: &mut CaseLink, memory: &Bytes) -> (MemoryRegion, Endpoint) {
    let (second, cq) = open_endpoint(&link.target.domain, true, None).expect("open an endpoint");
    // The region must not depend on the endpoint's queue staying alive.
    drop(cq);
    let first = mem::replace(&mut link.target.endpoint, second);
    link.peer = link.initiator.endpoint.resolve(&first.name()).expect("resolve");
    let ranges = [memory.range()];
    let attr = mr_attr(&ranges, REMOTE | LOCAL).key(link.fresh_key());
    let region = fabric::regattr(&link.target.domain, &attr, MrFlags::empty()).expect("register");
    region.bind_endpoint(&first).expect("bind");
    region.enable().expect("enable");
    link.assert_works(&link.key(&region));
    (region, first)
}

pub(super) fn region_closes_before_its_endpoint(case: &Case) {
    let mut link = CaseLink::open(case);
    let memory = link.bytes(64);
    let (region, first) = bound_to_an_endpoint(&mut link, &memory);
    let key = link.key(&region);
    region.close().expect("the region closes first");
    case.assert_refused(link.push(&key, 0, &[1]), ErrorKind::InvalidKey, "an access");
    // The endpoint still serves other regions.
    let ranges = [memory.range()];
    let attr = mr_attr(&ranges, REMOTE).key(link.fresh_key());
    let other = fabric::regattr(&link.target.domain, &attr, MrFlags::empty()).expect("register");
    other.bind_endpoint(&first).expect("bind");
    other.enable().expect("enable");
    link.assert_works(&link.key(&other));
    other.close().expect("close");
    first.close().expect("then the endpoint");
    assert_eq!((link.live().endpoints, link.live().regions), (1, 0));
}

pub(super) fn region_of_a_closed_endpoint_is_unreachable_and_closes(case: &Case) {
    let mut link = CaseLink::open(case);
    let memory = link.bytes(64);
    let (region, first) = bound_to_an_endpoint(&mut link, &memory);
    let key = link.key(&region);
    memory.put(0, &[6; 64]);
    first.close().expect("the endpoint closes first");
    assert_eq!(link.live().endpoints, 1);
    let gone = link.push(&key, 0, &[1]).expect_err("reached through a closed endpoint");
    assert_eq!(gone.kind(), ErrorKind::Unreachable, "{gone}");
    // No other endpoint reaches the region, not even one that is opened later.
    let (later, _cq) = open_endpoint(&link.target.domain, true, None).expect("open an endpoint");
    for name in [link.target.endpoint.name(), later.name()] {
        link.peer = link.initiator.endpoint.resolve(&name).expect("resolve");
        link.assert_dead(&key, 0, ErrorKind::AccessDenied, "an access through another endpoint");
    }
    let again = region.bind_endpoint(&later).unwrap_err();
    assert_eq!(again.kind(), ErrorKind::BadState, "bound again");
    assert_eq!(memory.all(), [6; 64]);
    region.close().expect("the region closes after its endpoint");
    assert_eq!(link.live().regions, 0);
}

/// Frees the memory and allocates new memory at the same address.
fn reallocate(link: &CaseLink, memory: Bytes, was: u64) -> Bytes {
    let memory = match memory {
        Bytes::Host(pages) => {
            pages.replace_pages();
            Bytes::Host(pages)
        }
        Bytes::Device(buffer) => {
            let len = buffer.allocation().range.len() as usize;
            drop(buffer);
            link.bytes(len)
        }
    };
    assert_eq!(memory.range().start().0, was, "the address did not come back");
    memory
}

fn rounds(case: &Case, rounds: u64) {
    let link = CaseLink::open(case);
    link.device.set_address_reuse(AddressReuse::JustFreed);
    // Allocates the initiator's buffer before the address that is reused.
    let warm = link.bytes(64);
    let region = link.expose(warm.range(), REMOTE);
    link.push(&link.key(&region), 0, &[1]).expect("write");
    let mut memory = link.bytes(8192);
    let start = memory.range().start().0;
    for round in 0..rounds {
        let (old, new) = (pattern(round, 100), pattern(round + 7, 100));
        memory.put(4090, &old);
        let region = link.expose(memory.part(1000, 6000), REMOTE);
        let key = link.key(&region);
        assert_eq!(
            link.pull(&key, 3090, 100).expect("read"),
            old,
            "round {round} read stale bytes"
        );
        link.push(&key, 3090, &new).expect("write");
        assert_eq!(memory.get(4090, 100), new, "round {round} wrote elsewhere");
        if case.has(MrMode::RAW) {
            link.initiator.domain.unmap_key(&key).expect("unmap");
        }
        region.close().expect("close");
        memory = reallocate(&link, memory, start);
    }
    assert_eq!(link.live().regions, 1);
}

pub(super) fn memory_at_a_reused_address_is_reached_five_times(case: &Case) {
    rounds(case, 5);
}

pub(super) fn memory_at_a_reused_address_is_reached_ten_thousand_times(case: &Case) {
    rounds(case, 10_000);
}

/// Replaces the pages of a registered region. The NIC moves bytes of the old pages or of the new
/// ones, in reads and writes alike. After a refresh it moves bytes of the new pages.
pub(super) fn registration_keeps_its_pages_or_follows_the_mapping(case: &Case) {
    let link = CaseLink::open(case);
    let memory = Bytes::Host(HostPages::new(4096));
    memory.put(0, b"old pages");
    let region = link.expose(memory.range(), REMOTE);
    let key = link.key(&region);
    memory.pages().replace_pages();
    memory.put(0, b"new pages");
    if !case.has(MrMode::MMU_NOTIFY) {
        let read = link.pull(&key, 0, 9).expect("read");
        link.push(&key, 0, b"written!!").expect("write");
        let expected: &[u8] = if read == b"old pages" { b"new pages" } else { b"written!!" };
        assert!(read == b"old pages" || read == b"new pages", "{read:?}");
        assert_eq!(memory.get(0, 9), expected, "read {read:?}");
        memory.put(0, b"new pages");
    }
    if case.features.contains(Features::REFRESH) {
        region.refresh(&[]).expect("refresh");
        assert_eq!(link.pull(&key, 0, 9).expect("read"), b"new pages");
        link.push(&key, 0, b"written!!").expect("write");
        assert_eq!(memory.get(0, 9), b"written!!");
    }
}

pub(super) fn single_use_key_works_once(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.filled(&[7; 64]);
    let ranges = [memory.range()];
    let attr = mr_attr(&ranges, REMOTE);
    let single = || {
        let region = link.try_expose(&attr, MrFlags::MR_SINGLE_USE).expect("register");
        let key = link.key(&region);
        (region, key)
    };

    let (region, key) = single();
    assert_eq!(link.pull(&key, 0, 64).expect("the first use"), [7; 64]);
    case.assert_refused(link.pull(&key, 0, 1), ErrorKind::InvalidKey, "an access");
    case.assert_refused(link.push(&key, 0, &[1]), ErrorKind::InvalidKey, "an access");
    region.close().expect("a region whose key is used up closes");

    let (region, key) = single();
    case.assert_refused(link.push(&key, 64, &[1]), ErrorKind::OutOfBounds, "an access");
    assert_eq!(link.push(&key, 3, &[9]).expect("a refused access did not use it up"), 1);
    case.assert_refused(link.push(&key, 3, &[1]), ErrorKind::InvalidKey, "an access");
    assert_eq!(memory.get(3, 1), [9]);
    region.close().expect("close");

    // A request that names the key twice counts as one use.
    let (_region, key) = single();
    let local = link.local(64, LOCAL);
    let twice = [remote(&key, 0, 32), remote(&key, 32, 32)];
    let write = link.transfer(Operation::Write { remote: &twice }, &[local.segment(0, 64)]);
    assert_eq!(write.expect("the first use"), 64);
    let added = link.fetch_add(&key, 0, 1);
    case.assert_refused(added, ErrorKind::InvalidKey, "an atomic after the first use");
    if !case.staged() && link.need_atomics().is_ok() {
        let (_region, key) = single();
        link.fetch_add(&key, 0, 1).expect("the first use");
        case.assert_refused(link.pull(&key, 0, 1), ErrorKind::InvalidKey, "an access");
    }

    // An access without its right is no use. The region's own side may use its memory.
    let attr = mr_attr(&ranges, Access::REMOTE_WRITE | Access::SEND);
    let region = link.try_expose(&attr, MrFlags::MR_SINGLE_USE).expect("register");
    let key = link.key(&region);
    let read = link.pull(&key, 0, 1);
    case.assert_refused(read, ErrorKind::AccessDenied, "a read by a key for writes");
    link.push(&key, 0, &[1]).expect("the first use");
    let back = link.target.endpoint.resolve(&link.initiator.endpoint.name()).expect("resolve");
    let message = [segment(memory.range(), Some(region.desc().expect("descriptor")))];
    let operation = Operation::Send { tag: None, invalidate: None };
    link.initiator.receive(local.segment(0, 64), 3).expect("post");
    let request = WorkRequest { operation, local: &message, peer: back, context: 4 };
    // SAFETY: the memory belongs to the test and outlives the transfer.
    unsafe { link.target.endpoint.post(&request) }.expect("post");
    assert_eq!(link.received().result.expect("send"), 64);
    assert_eq!(link.completion().result.expect("receive"), 64);

    // One of many transfers posted together succeeds.
    let (_region, key) = single();
    let local = link.local(8, LOCAL);
    let there = [remote(&key, 0, 8)];
    for context in 0..8 {
        link.post(Operation::Write { remote: &there }, &[local.segment(0, 8)], context)
            .expect("post");
    }
    let results: Vec<_> =
        (0..8).map(|_| link.completion().result.map_err(|error| error.kind())).collect();
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1, "{results:?}");
    assert!(
        results
            .iter()
            .filter_map(|result| result.as_ref().err())
            .all(|kind| *kind == ErrorKind::InvalidKey)
    );
}

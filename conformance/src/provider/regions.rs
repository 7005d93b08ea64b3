//! Behaviours of regions: closing and registering again.

#![allow(unsafe_code, reason = "posts requests by address")]

use hmem_core::{
    AddressRange, ErrorKind, LocalKey, MemoryRegion, MrFlags, MrMode,
    provider::{EndpointAttr, LiveObjects},
    transfer::{AtomicOp, AtomicType, Operation, PeerId, WorkRequest},
};

use super::{case::Case, link::CaseLink};
use crate::link::{Exposed, LOCAL, Local, REMOTE, mr_attr, remote, segment};
use crate::{
    bytes::{assert_bytes, assert_no_fd_leaks, pattern},
    trial::assert_kind,
};

pub(super) fn closed_region_is_unreachable(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.filled(&[0x11; 64]);
    let before = link.live();
    let region = link.expose(memory.range(), REMOTE);
    let key = link.key(&region);
    link.assert_works(&key);
    memory.put(0, &[0x11; 64]);
    region.close().expect("close");
    assert_eq!(link.live(), before);
    link.assert_dead(&key, 0, ErrorKind::InvalidKey, "an access to a closed region");
    let added = link.fetch_add(&key, 0, 1);
    if !added.as_ref().is_err_and(|why| why.kind() == ErrorKind::Unsupported) {
        case.assert_refused(added, ErrorKind::InvalidKey, "an atomic on a closed region");
    }
    assert_bytes(&memory.all(), &[0x11; 64], "memory of a closed region");

    // The endpoints still work.
    let second = link.expose(memory.range(), REMOTE);
    link.assert_works(&link.key(&second));
    let (message, inbox) = (link.local(16, LOCAL), link.bytes(16));
    let inbox_region = link.expose(inbox.range(), LOCAL);
    message.bytes.put(0, b"still listening!");
    let into = segment(inbox.range(), Some(inbox_region.desc().expect("descriptor")));
    let (sent, received) = link.send(message.segment(0, 16), into);
    assert_eq!((sent.expect("send"), received.expect("receive")), (16, 16));
    assert_eq!(inbox.all(), b"still listening!");
}

/// Tests that a write in flight does not change the memory of a region after the close of the
/// region has returned. A write may complete before that.
pub(super) fn transfers_in_flight_leave_a_closed_region_alone(case: &Case) {
    const LEN: u64 = 64 << 10;
    let link = CaseLink::open(case);
    let source = link.initiator.register(vec![0xFF; LEN as usize], LOCAL);
    for _ in 0..8 {
        let region = link.target.register(pattern(4, LEN), REMOTE);
        let key = link.key(&region);
        let mut posted = 0;
        for _ in 0..16 {
            let slice = source.slice(0, LEN).expect("inside");
            let to = [remote(&key, 0, LEN)];
            let result = link.initiator.endpoint.write(&[slice], &to, link.peer, 1);
            posted += u64::from(result.is_ok());
        }
        assert!(posted > 0, "no write was posted");
        let mut bytes = region.close().expect("close");
        bytes.fill(0x11);
        for _ in 0..posted {
            // If the region closed before the write completed, the NIC must have refused the write.
            if let Ok(moved) = link.ended() {
                assert_eq!(moved, LEN, "a completed write moves all of its bytes");
            }
        }
        assert!(bytes.iter().all(|byte| *byte == 0x11), "written to after the close");
    }
}

/// Tests descriptors of local buffers. In LOCAL mode each buffer needs a descriptor. In HMEM mode
/// without LOCAL, only device memory needs one. An invalid descriptor is refused in every mode.
pub(super) fn local_buffers_need_a_descriptor_of_a_live_region(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.bytes(128);
    let region = link.expose(memory.range(), REMOTE | LOCAL);
    let key = link.key(&region);
    let to = [remote(&key, 0, 64)];
    let local = link.local(64, LOCAL);
    local.bytes.put(0, &pattern(3, 64));
    let write_from = |range, desc: Option<LocalKey>| {
        let moved = link.transfer(Operation::Write { remote: &to }, &[segment(range, desc)]);
        moved.map_err(|error| error.kind())
    };
    // The software NIC checks the descriptor of a receive when it is posted.
    let receive_into = |range, desc| {
        if case.control.is_some() {
            let posted = link.initiator.receive(segment(range, desc), 9);
            assert_kind(&posted.expect_err("posted"), ErrorKind::NoRegion, "a bad descriptor");
        }
    };
    let desc = local.region.desc().expect("descriptor");
    let write = |desc| write_from(local.bytes.range(), desc);
    assert_eq!(write(Some(desc)), Ok(64), "a valid descriptor");
    let needed = case.has(MrMode::LOCAL) || (case.has(MrMode::HMEM) && !case.is_host());
    let absent = if needed { Err(ErrorKind::NoRegion) } else { Ok(64) };
    assert_eq!(write(None), absent, "no descriptor");
    let before = memory.all();
    local.bytes.put(0, &[0xEE; 64]);
    let refused = Err(ErrorKind::NoRegion);
    let foreign = region.desc().expect("descriptor");
    assert_eq!(write(Some(foreign)), refused, "the other domain's descriptor");
    receive_into(local.bytes.range(), Some(foreign));
    let forged = LocalKey::from_provider(0x1234_5678_9ABC);
    assert_eq!(write(Some(forged)), refused, "a forged descriptor");
    let wide = AddressRange::new(local.bytes.range().start(), 65).expect("range");
    for outside in [wide, memory.range()] {
        let there = [remote(&key, 0, outside.len())];
        let buffer = [segment(outside, Some(desc))];
        let error = link.transfer(Operation::Write { remote: &there }, &buffer);
        let error = error.expect_err("a buffer outside the region of its descriptor");
        assert_kind(&error, ErrorKind::OutOfBounds, "a buffer outside its region");
    }
    let Local { region: stale, bytes } = link.local(64, LOCAL);
    let desc = Some(stale.desc().expect("descriptor"));
    stale.close().expect("close");
    assert_eq!(write_from(bytes.range(), desc), refused, "the descriptor of a closed region");
    receive_into(bytes.range(), desc);
    // Later regions reuse the provider's lkey. The closed region's descriptor is still refused,
    // although its memory is registered again.
    let _registered: Vec<_> =
        (0..100).map(|_| link.initiator.expose(bytes.range(), LOCAL)).collect();
    assert_eq!(write_from(bytes.range(), desc), refused, "the descriptor of a closed region");
    assert_bytes(&memory.all(), &before, "the target of refused transfers");
}

pub(super) fn peer_of_another_endpoint_is_refused(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.filled(&pattern(8, 64));
    let region = link.expose(memory.range(), REMOTE);
    let key = link.key(&region);
    let source = link.local(64, LOCAL);
    let attr = EndpointAttr::new(&link.initiator.cq);
    let lone = link.initiator.domain.open_endpoint(&attr).expect("open an endpoint");
    let there = [remote(&key, 0, 64)];
    let (op, datatype) = (AtomicOp::Sum, AtomicType::U64);
    for peer in [link.peer, PeerId(0), PeerId(u64::MAX), PeerId(link.peer.0.wrapping_add(1))] {
        let mut operations = vec![
            Operation::Write { remote: &there },
            Operation::Read { remote: &there },
            Operation::Send { tag: None, invalidate: None },
        ];
        if case.control.is_some() {
            operations.extend([
                Operation::Atomic { op, datatype, remote: there[0], result: None, compare: None },
                Operation::Receive { tag: None, from: Some(peer) },
            ]);
        }
        if case.attr.cq_data_size > 0 {
            operations.push(Operation::WriteImmediate { remote: &there, data: 1 });
            operations.push(Operation::SendImmediate { tag: None, data: 1 });
        }
        for operation in operations {
            let local = &[source.segment(0, 64)];
            let request = WorkRequest { operation, local, peer, context: 1 };
            // SAFETY: the memory belongs to the test and outlives the transfer.
            let posted = unsafe { lone.post(&request) };
            let error = posted.expect_err("a post to a peer that was not resolved");
            assert_kind(&error, ErrorKind::InvalidArgument, "a post to an unresolved peer");
        }
    }
    assert_bytes(&memory.all(), &pattern(8, 64), "the memory of a peer that was not resolved");
    link.assert_works(&key);
    if case.has(MrMode::ENDPOINT) {
        return;
    }
    let known = lone.resolve(&link.target.endpoint.name()).expect("resolve");
    let request = WorkRequest {
        operation: Operation::Write { remote: &there },
        local: &[source.segment(0, 64)],
        peer: known,
        context: 1,
    };
    // SAFETY: the memory belongs to the test and outlives the transfer.
    unsafe { lone.post(&request) }.expect("post to a peer that was resolved");
    assert_eq!(link.ended().expect("write"), 64);
}

pub(super) fn memory_is_registered_again_after_close(case: &Case) {
    let link = CaseLink::open(case);
    let mut bytes = pattern(7, 8192);
    for round in 0..8u64 {
        bytes[..8].copy_from_slice(&round.to_le_bytes());
        let region = link.target.register(bytes, REMOTE);
        let found = link.pull(&link.key(&region), 0, 8).expect("read");
        assert_bytes(&found, &round.to_le_bytes(), "bytes of this registration");
        bytes = region.close().expect("close");
    }
}

pub(super) fn closing_everything_leaves_nothing_live(case: &Case) {
    let link = CaseLink::open(case);
    let regions: Vec<_> =
        (0..4).map(|seed| link.target.register(pattern(seed, 4096), REMOTE)).collect();
    let live = link.target.domain.live();
    assert_eq!((live.regions, live.endpoints), (4, 1), "{live:?}");
    assert!(live.bytes >= 4 * 4096 && live.page_registrations >= 1, "{live:?}");
    let key = link.key(&regions[0]);
    link.assert_works(&key);
    if link.has(MrMode::RAW) {
        link.initiator.domain.unmap_key(&key).expect("unmap the raw key");
    }
    for region in regions {
        region.close().expect("close");
    }
    for side in link.into_sides() {
        side.endpoint.close().expect("close the endpoint");
        assert_eq!(side.domain.live(), LiveObjects::default());
        drop(side.cq);
        side.domain.close().expect("close the domain");
    }
}

pub(super) fn opening_and_closing_leaks_no_fd(case: &Case) {
    assert_no_fd_leaks("open, transfer and close", || {
        let link = CaseLink::open(case);
        let region = link.target.register(pattern(8, 4096), REMOTE);
        link.assert_works(&link.key(&region));
    });
}

pub(super) fn registering_leaks_no_fd(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.bytes(65_536);
    let ranges = [memory.range()];
    assert_no_fd_leaks("register, transfer and close", || {
        for at in 0..4 {
            let region = link.expose(memory.part(at * 131, 1 + at * 17_000), REMOTE);
            link.push(&link.key(&region), 0, &[1]).expect("write");
        }
        if !case.has(MrMode::PROV_KEY) {
            // The provider refuses the second registration after the memory was exported.
            let attr = mr_attr(&ranges, REMOTE).key(link.fresh_key());
            let _first = link.target.regattr(&attr, MrFlags::empty()).expect("register");
            let taken = link.target.regattr(&attr, MrFlags::empty()).expect_err("a key in use");
            assert_kind(&taken, ErrorKind::NoKey, "a key in use");
        }
    });
    assert_eq!(link.device.stats().live_exports, 0, "an export was not released");
}

/// Asserts that the close of a region fails with Busy because another object depends on the region,
/// and that the region still works. Returns the region.
pub(super) fn assert_busy(link: &CaseLink, region: Exposed) -> Exposed {
    let key = link.key(&region);
    let rejected = region.close().expect_err("something depends on the region");
    assert_kind(&rejected.error, ErrorKind::Busy, "closing a region that is in use");
    assert_eq!(rejected.error.fi_errno(), 16, "{}", rejected.error);
    link.assert_works(&key);
    rejected.value
}

/// Asserts that the provider itself, without the checks of a domain, refuses to deregister a region
/// that another object depends on.
pub(super) fn assert_busy_past_the_domain(link: &CaseLink, region: &MemoryRegion) {
    let handle = region.provider_region().expect("handle");
    let refused = link.target.domain.provider_domain().deregister(handle);
    let error = refused.expect_err("something depends on the region");
    assert_kind(&error, ErrorKind::Busy, "deregistering a region that is in use");
}

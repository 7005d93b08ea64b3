//! Requirements of each mr_mode bit, and the behaviour without it.

use std::{collections::BTreeSet, sync::Arc, thread};

use hmem_core::{
    Access, Address, AddressRange, Addressing, AllocationKind, BindFlags, DeviceBuffer, DeviceId,
    ErrorKind, Iface, Iova, Memory, MemoryRegion, MrFlags, MrMode, RegionState, RemoteKey,
    counter::Counter, fabric, iface::AllocRequest, transfer::Operation,
};
use rustix::param::page_size;

use super::{case::Case, link::CaseLink};
use crate::link::{
    Bytes, HostPages, LOCAL, REMOTE, mr_attr, open_endpoint, remote, segment, wait_held,
};
use crate::{
    bytes::pattern,
    control::Call,
    trial::{Outcome, skip},
};

pub(super) fn absent_pages_register_and_fail_only_the_transfer(case: &Case) -> Outcome {
    let page = page_size() as u64;
    let link = CaseLink::open(case);
    let pages = HostPages::reserved(4 * page_size());
    let ranges = [pages.range()];
    let region = match link.try_expose(&mr_attr(&ranges, REMOTE), MrFlags::empty()) {
        Err(why) if why.kind() == ErrorKind::BadAddress => {
            return skip("the NIC pins the pages when it registers them");
        }
        region => region.expect("register"),
    };
    let key = link.key(&region);
    let absent = |offset, what| link.assert_dead(&key, offset, ErrorKind::BadAddress, what);
    for offset in [0, page - 1, 4 * page - 1] {
        absent(offset, "an access to an absent page");
    }
    let added = link.fetch_add(&key, page, 1);
    case.assert_refused(added, ErrorKind::BadAddress, "an atomic on an absent page");
    // After the addresses get pages, the region reaches them.
    pages.replace_pages();
    link.push(&key, 4000, &pattern(1, 500)).expect("write");
    let memory = Bytes::Host(pages);
    assert_eq!(memory.get(4000, 500), pattern(1, 500));
    memory.pages().remove_pages(page, page);
    absent(page, "an access to a removed page");
    let local = link.local(8, LOCAL);
    let across = [remote(&key, page - 4, 8)];
    let read = link.transfer(Operation::Read { remote: &across }, &[local.segment(0, 8)]);
    case.assert_refused(read, ErrorKind::BadAddress, "a read across a removed page");
    link.push(&key, 0, &pattern(2, page)).expect("write the page before");
    let local = link.initiator.expose(memory.range(), LOCAL);
    let hole = segment(memory.part(page, 8), Some(local.desc().expect("descriptor")));
    let there = [remote(&key, 0, 8)];
    let write = link.transfer(Operation::Write { remote: &there }, &[hole]);
    case.assert_refused(write, ErrorKind::BadAddress, "a write from an absent page");
    memory.pages().replace_pages();
    memory.put(0, &pattern(3, 500));
    memory.pages().make_read_only();
    let write = link.push(&key, 0, &[1]);
    case.assert_refused(write, ErrorKind::BadAddress, "a write to a read-only page");
    assert_eq!(link.pull(&key, 0, 500).expect("read"), pattern(3, 500));
    memory.pages().remove_pages(0, 4 * page);
    absent(4000, "an access to a removed page");
    // Addresses without pages can be registered too, even those that never have pages: the upper
    // half of the address space.
    let wild = AddressRange::new(Address(u64::MAX - 4095), 4096).expect("range");
    let region = link.expose(wild, REMOTE);
    let read = link.pull(&link.key(&region), 0, 16);
    case.assert_refused(read, ErrorKind::BadAddress, "a read of no memory");
    Ok(())
}

pub(super) fn peers_address_from_0_with_the_requested_key(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.bytes(4096);
    for requested in [1, 0, 0xFFFF_FFFE, 42] {
        let ranges = [memory.part(100, 50)];
        let attr = mr_attr(&ranges, REMOTE).key(requested);
        let region = link.target.regattr(&attr, MrFlags::empty()).expect("register");
        let key = region.key().expect("key");
        assert_eq!(
            (key.as_u64().unwrap(), key.base(), key.addressing()),
            (requested, Iova(0), Addressing::ZeroBased)
        );
        // A peer needs only a key number that both sides agreed on.
        let agreed = RemoteKey::new(Addressing::ZeroBased, Iova(0), 50, requested);
        link.push(&agreed, 7, b"well known").expect("write");
        assert_eq!(memory.get(107, 10), b"well known");
        region.close().expect("close");
    }
}

pub(super) fn peers_use_the_targets_addresses_for_every_range(case: &Case) -> Outcome {
    let link = CaseLink::open(case);
    if case.attr.mr_iov_limit < 3 {
        return skip("a region of this NIC has less than three ranges");
    }
    let memory = link.bytes(16 << 10);
    let ranges = [memory.part(8192, 100), memory.part(3, 77), memory.part(4096, 500)];
    let region = link.try_expose(&mr_attr(&ranges, REMOTE), MrFlags::empty()).expect("register");
    let key = link.key(&region);
    assert_eq!((key.addressing(), key.base()), (Addressing::Virtual, Iova(ranges[0].start().0)));
    for (seed, range) in ranges.iter().enumerate() {
        let offset = range.start().0.wrapping_sub(key.base().0);
        let bytes = pattern(seed as u64, range.len());
        link.push(&key, offset, &bytes).expect("write to the range's own address");
        assert_eq!(memory.get(range.start().0 - memory.range().start().0, bytes.len()), bytes);
        assert_eq!(link.pull(&key, offset, range.len()).expect("read"), bytes);
        // The gaps between the ranges are not part of the region.
        let past = link.push(&key, offset, &vec![0; bytes.len() + 1]);
        case.assert_refused(past, ErrorKind::OutOfBounds, "a write past a range");
    }
    let number = key.pieces().next().expect("a piece").key;
    let zero_based = RemoteKey::new(Addressing::ZeroBased, Iova(0), 677, number);
    case.assert_refused(
        link.pull(&zero_based, 0, 1),
        ErrorKind::OutOfBounds,
        "offsets are no addresses",
    );
    Ok(())
}

pub(super) fn range_without_pages_is_refused(case: &Case) {
    let link = CaseLink::open(case);
    let before = link.live();
    let (pages, hole) = (HostPages::new(8192), HostPages::reserved(4096));
    let refused = |range: AddressRange, access: Access| {
        let ranges = [range];
        let error = link
            .try_expose(&mr_attr(&ranges, access), MrFlags::empty())
            .expect_err("no pages there");
        assert_eq!((error.kind(), error.fi_errno()), (ErrorKind::BadAddress, 14), "{error}");
        assert_eq!(link.live(), before);
    };
    refused(hole.range(), REMOTE);
    refused(hole.range(), Access::REMOTE_READ);
    if case.attr.mr_iov_limit > 1 {
        let mixed = [pages.range(), hole.range()];
        let mixed = link.try_expose(&mr_attr(&mixed, REMOTE), MrFlags::empty());
        assert_eq!(mixed.expect_err("a hole").kind(), ErrorKind::BadAddress);
    }
    pages.make_read_only();
    refused(pages.range(), REMOTE);
    assert_eq!(link.live(), before);
}

pub(super) fn requested_key_is_ignored(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.bytes(64);
    let ranges = [memory.range()];
    let register = |requested| {
        link.target
            .regattr(&mr_attr(&ranges, REMOTE).key(requested), MrFlags::empty())
            .expect("register")
    };
    // Requests one number twice, a number wider than the key, and the number that requests no key.
    let regions = [5, 5, u64::MAX - 1, u64::MAX].map(register);
    let keys: BTreeSet<_> =
        regions.iter().map(|region| region.key().unwrap().as_u64().unwrap()).collect();
    assert_eq!(keys.len(), 4, "the provider gave a key twice");
    for region in &regions {
        link.assert_works(&link.key(region));
    }
}

pub(super) fn peers_reach_only_refreshed_pages(case: &Case) {
    let len = page_size() as u64;
    let link = CaseLink::open(case);
    let memory = Bytes::Host(HostPages::new(4 * page_size()));
    let page = |at: u64| memory.part(at * len, len);
    memory.put(0, &pattern(8, len));
    let region = link.expose(memory.range(), REMOTE);
    let key = link.key(&region);
    memory.put(0, &pattern(8, 4 * len));
    let assert_reached = |expected: [bool; 4]| {
        for (at, expected) in (0..).zip(expected) {
            if expected {
                link.pull(&key, at * len, 64).expect("read a page that the NIC knows");
                let bytes = memory.get(at * len, 8);
                link.push(&key, at * len, &bytes).expect("write a page that the NIC knows");
            } else {
                link.assert_dead(&key, at * len, ErrorKind::BadAddress, "an access to a new page");
            }
        }
    };
    // Page 0 was present at the registration. The others were written after it.
    assert_reached([true, false, false, false]);
    region.refresh(&[page(1), page(3)]).expect("refresh two pages");
    assert_reached([true, true, false, true]);
    let crossing = link.pull(&key, 2 * len - 1, 2);
    case.assert_refused(crossing, ErrorKind::BadAddress, "a read of a known page and a new one");
    let outside = AddressRange::new(page(3).start(), len + 1).expect("range");
    assert_eq!(region.refresh(&[outside]).unwrap_err().kind(), ErrorKind::OutOfBounds);
    memory.pages().remove_pages(3 * len, len);
    for pages in [&[page(2), page(3)][..], &[]] {
        let error = region.refresh(pages).expect_err("refreshed without pages");
        assert_eq!(error.kind(), ErrorKind::BadAddress, "{error}");
        let read = link.pull(&key, 2 * len, 1);
        case.assert_refused(read, ErrorKind::BadAddress, "a page of a refused refresh");
        link.pull(&key, len, 64).expect("a refused refresh changes nothing");
    }
    memory.pages().replace_pages();
    memory.put(0, &pattern(8, 4 * len));
    region.refresh(&[]).expect("refresh the whole region");
    assert_eq!(link.pull(&key, 0, 4 * len).expect("read"), pattern(8, 4 * len));
}

pub(super) fn peers_fail_during_a_refresh(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.filled(&[4; 4096]);
    let region = link.expose(memory.range(), REMOTE);
    let key = link.key(&region);
    link.assert_works(&key);
    memory.put(0, &[4; 4096]);
    thread::scope(|scope| {
        // `gate` is declared inside the scope. If an assertion fails, dropping it releases the call
        // that it holds, so that the scope does not wait forever.
        let gate = link.hold(Call::Refresh);
        let refreshing = scope.spawn(|| region.refresh(&[]));
        wait_held(&gate);
        link.assert_dead(&key, 0, ErrorKind::BadState, "an access during a refresh");
        let busy = region.refresh(&[]).expect_err("a refresh during a refresh");
        assert_eq!(busy.kind(), ErrorKind::Busy, "{busy}");
        assert_eq!(memory.all(), [4; 4096]);
        gate.release();
        refreshing.join().expect("the refreshing thread").expect("refresh");
    });
    region.refresh(&[]).expect("the previous refresh has ended");
    link.assert_works(&key);
}

pub(super) fn counters_are_bound_before_the_region_is_enabled(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.filled(&[6; 64]);
    let counter = Arc::new(Counter::new());
    let bind = |region: &MemoryRegion| region.bind_counter(&counter, BindFlags::REMOTE_WRITE);
    let ranges = [memory.range()];
    let attr = mr_attr(&ranges, REMOTE | LOCAL);
    let disabled = || {
        let attr = attr.key(link.fresh_key());
        fabric::regattr(&link.target.domain, &attr, MrFlags::RMA_EVENT).expect("register")
    };
    let region = disabled();
    assert_eq!(region.state(), RegionState::Disabled);
    let key = link.key(&region);
    link.assert_dead(&key, 0, ErrorKind::BadState, "an access to a disabled region");
    assert_eq!((memory.all(), counter.value()), (vec![6; 64], 0));
    bind(&region).expect("bind");
    region.enable().expect("enable");
    link.assert_works(&key);
    assert_eq!(counter.value(), 1);
    assert_eq!(region.enable().unwrap_err().kind(), ErrorKind::BadState, "enabled twice");
    let late = disabled();
    late.enable().expect("a counter is not compulsory");
    assert_eq!(bind(&late).unwrap_err().kind(), ErrorKind::BadState, "bound after enable");
    let plain = link.try_expose(&attr, MrFlags::empty()).expect("register");
    assert_eq!(plain.state(), RegionState::Enabled);
    assert_eq!(
        bind(&plain).unwrap_err().kind(),
        ErrorKind::BadState,
        "registered without RMA_EVENT"
    );
    link.assert_works(&link.key(&plain));
}

pub(super) fn regions_are_reached_through_their_endpoint_only(case: &Case) {
    let mut link = CaseLink::open(case);
    let memory = link.filled(&[6; 64]);
    let ranges = [memory.range()];
    let attr = mr_attr(&ranges, REMOTE | LOCAL).key(3);
    let region = fabric::regattr(&link.target.domain, &attr, MrFlags::empty()).expect("register");
    assert_eq!(region.state(), RegionState::Disabled);
    let key = link.key(&region);
    assert_eq!(
        region.enable().unwrap_err().kind(),
        ErrorKind::BadState,
        "enabled without an endpoint"
    );
    link.push(&key, 0, &[1]).expect_err("used before it was bound");
    let foreign = region.bind_endpoint(&link.initiator.endpoint).unwrap_err();
    assert_eq!(foreign.kind(), ErrorKind::InvalidArgument, "an endpoint of another domain");
    region.bind_endpoint(&link.target.endpoint).expect("bind");
    link.push(&key, 0, &[1]).expect_err("used before it was enabled");
    region.enable().expect("enable");
    link.assert_works(&key);
    memory.put(0, &[6; 64]);
    assert_eq!(
        region.bind_endpoint(&link.target.endpoint).unwrap_err().kind(),
        ErrorKind::BadState
    );
    let (other, _cq) = open_endpoint(&link.target.domain, true, None).expect("open an endpoint");
    let bound = link.peer;
    link.peer = link.initiator.endpoint.resolve(&other.name()).expect("resolve");
    link.assert_dead(&key, 0, ErrorKind::AccessDenied, "an access through another endpoint");
    assert_eq!(memory.all(), [6; 64]);
    link.peer = bound;
    link.assert_works(&key);
}

pub(super) fn other_modes_do_not_bind_to_endpoints(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.bytes(64);
    let region = link.expose(memory.range(), REMOTE);
    assert_eq!(
        region.bind_endpoint(&link.target.endpoint).unwrap_err().kind(),
        ErrorKind::BadState
    );
    assert_eq!(region.enable().unwrap_err().kind(), ErrorKind::BadState);
    link.assert_works(&link.key(&region));
}

pub(super) fn device_buffers_need_a_descriptor_or_are_detected(case: &Case) {
    let link = CaseLink::open(case);
    let memory = link.bytes(128);
    let region = link.expose(memory.range(), REMOTE | LOCAL);
    let kind = Iface::kind(&*link.device);
    assert_eq!(region.iface().unwrap(), (kind, Some(DeviceId(0))));
    let key = link.key(&region);
    let (read, write) = ([remote(&key, 0, 64)], [remote(&key, 64, 64)]);
    let device = link.filled(&pattern(5, 64));
    let host = HostPages::new(64);
    let without = |range: AddressRange, operation: Operation<'_>| {
        link.transfer(operation, &[segment(range, None)]).map_err(|error| error.kind())
    };
    let on_device = if case.has(MrMode::LOCAL) || case.has(MrMode::HMEM) {
        Err(ErrorKind::NoRegion)
    } else {
        Ok(64)
    };
    assert_eq!(without(device.range(), Operation::Write { remote: &write }), on_device);
    assert_eq!(
        memory.get(64, 64) == pattern(5, 64),
        on_device.is_ok(),
        "the owning iface was not detected"
    );
    memory.put(0, &pattern(6, 64));
    assert_eq!(without(device.range(), Operation::Read { remote: &read }), on_device);
    assert_eq!(
        device.all() == pattern(6, 64),
        on_device.is_ok(),
        "the owning iface was not detected"
    );
    let on_host = if case.has(MrMode::LOCAL) { Err(ErrorKind::NoRegion) } else { Ok(64) };
    assert_eq!(
        without(host.range(), Operation::Read { remote: &read }),
        on_host,
        "host memory in HMEM mode"
    );
}

pub(super) fn buffers_of_a_broadcast_need_the_collective_right(case: &Case) {
    let needed = case.has(MrMode::COLLECTIVE);
    let link = CaseLink::open(case);
    assert_eq!(link.target.domain.mr_mode().contains(MrMode::COLLECTIVE), needed);
    if case.is_host() {
        return broadcast(&link, needed, || vec![0; 100]);
    }
    broadcast(&link, needed, || {
        let device = Arc::clone(&link.device) as Arc<dyn Iface>;
        let request = AllocRequest { len: 100, device: DeviceId(0), kind: AllocationKind::Device };
        DeviceBuffer::allocate(&device, &request).expect("allocate")
    });
}

/// Broadcasts from the initiator to the target, with the COLLECTIVE right and without it. With the
/// right, the broadcast must succeed. Without the right, both sides must refuse it if `needed` is
/// true, and it must succeed otherwise.
fn broadcast<B: Memory>(link: &CaseLink, needed: bool, buffer: impl Fn() -> B) {
    let root_seen_by_target =
        link.target.endpoint.resolve(&link.initiator.endpoint.name()).expect("resolve");
    for (right, taken) in [(Access::COLLECTIVE, true), (Access::empty(), !needed)] {
        let from = link.initiator.register(buffer(), Access::SEND | right);
        let into = link.target.register(buffer(), Access::RECV | right);
        from.write(0, &pattern(12, 100)).expect("write");
        let (from_slice, into_slice) =
            (from.slice(0, 100).expect("slice"), into.slice(0, 100).expect("slice"));
        let members = [root_seen_by_target];
        let received = link.target.endpoint.broadcast(into_slice, &members, Some(members[0]), 9, 1);
        let sent = link.initiator.endpoint.broadcast(from_slice, &[link.peer], None, 9, 2);
        if taken {
            received.and(sent).expect("broadcast");
            assert_eq!(link.completion().result.expect("the root's part"), 100);
            assert_eq!(link.received().result.expect("the member's part"), 100);
        } else {
            let refused = (received.unwrap_err().kind(), sent.unwrap_err().kind());
            assert_eq!(refused, (ErrorKind::AccessDenied, ErrorKind::AccessDenied));
        }
        let mut bytes = vec![0; 100];
        into.read(0, &mut bytes).expect("read");
        assert_eq!(bytes == pattern(12, 100), taken, "broadcast with {right}");
    }
}

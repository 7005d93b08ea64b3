//! Behaviours of regions: rights, bounds and closing.

#![allow(unsafe_code, reason = "registers memory by address")]

use std::{sync::Arc, thread};

use hmem_core::{
    Access, AddressRange, ErrorKind, MrMode, Promise, Raw, Region, Request,
    provider::{EndpointAttr, LiveObjects, Provider},
    transfer::PeerId,
};

use super::link::{LOCAL, Link, REMOTE, assert_refused, contents, remote};
use crate::{
    bytes::{assert_bytes, assert_no_fd_leaks, pattern},
    trial::{Outcome, assert_kind, skip},
};

pub(super) fn peers_get_the_rights_of_the_key_and_no_others(
    provider: &Arc<dyn Provider>,
) -> Outcome {
    let link = Link::open(provider);
    let before = pattern(1, 256);
    for access in [Access::REMOTE_READ, Access::REMOTE_WRITE, REMOTE, LOCAL, LOCAL | REMOTE] {
        let region = link.target.register(before.clone(), access);
        let key = link.key(&region);
        let (reads, writes) =
            (access.contains(Access::REMOTE_READ), access.contains(Access::REMOTE_WRITE));
        let mut expected = before.clone();
        match link.pull(&key, 10, 20) {
            Ok(found) if reads => assert_bytes(&found, &before[10..30], "bytes read"),
            result if reads => panic!("read with {access}: {result:?}"),
            result => assert_refused(result, &format!("a read with {access}")),
        }
        let written = link.push(&key, 10, &[0xAA; 20]);
        if writes {
            written.unwrap_or_else(|error| panic!("write with {access}: {error}"));
            expected[10..30].fill(0xAA);
        } else {
            assert_refused(written, &format!("a write with {access}"));
        }
        assert_bytes(&contents(&region), &expected, &format!("memory with {access}"));
    }
    Ok(())
}

pub(super) fn overlapping_regions_grant_each_their_own_rights(
    provider: &Arc<dyn Provider>,
) -> Outcome {
    let link = Link::open(provider);
    let memory = pattern(2, 4096);
    let register = |offset: u64, len: u64, access: Access| {
        let range = AddressRange::of(&memory).slice(offset, len).expect("inside");
        // SAFETY: the vector outlives the regions. The only remote write is refused.
        let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
        link.target.register(memory, access)
    };
    let reads = register(0, 3000, Access::REMOTE_READ);
    let neither = register(1000, 3000, Access::SEND);
    let (reader, locked) = (link.key(&reads), link.key(&neither));
    assert_refused(link.push(&reader, 1500, &[0]), "a write through the key for reads");
    link.assert_dead(&locked, 0, "an access without a right");
    neither.close().expect("close");
    let found = link.pull(&reader, 0, 3000).expect("read after the other region closed");
    assert_bytes(&found, &memory[..3000], "bytes read");
    reads.close().expect("close");
    Ok(())
}

pub(super) fn one_byte_past_either_end_is_refused(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    let memory = pattern(3, 3000);
    let region = link.target.register(memory.clone(), REMOTE);
    let key = link.key(&region);
    for (offset, len) in [(2999, 2), (3000, 1), (u64::MAX, 1), (u64::MAX, 2), (0, 3001)] {
        let what = format!("an access of {len} bytes at {offset}");
        assert_refused(link.push(&key, offset, &vec![0; len as usize]), &what);
        assert_refused(link.pull(&key, offset, len), &what);
    }
    assert_bytes(&contents(&region), &memory, "the region after refused accesses");
    link.assert_works(&key);
    Ok(())
}

pub(super) fn closed_region_is_unreachable(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    let region = link.target.register(pattern(4, 4096), REMOTE);
    let key = link.key(&region);
    link.assert_works(&key);
    let bytes = region.close().expect("close");
    let before = bytes.clone();
    link.assert_dead(&key, 0, "an access to a closed region");
    assert_bytes(&bytes, &before, "memory of a closed region");
    Ok(())
}

/// Tests that a write in flight does not change the memory of a region after the close of the
/// region has returned. A write may complete before that.
pub(super) fn transfers_in_flight_leave_a_closed_region_alone(
    provider: &Arc<dyn Provider>,
) -> Outcome {
    const LEN: u64 = 64 << 10;
    let link = Link::open(provider);
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
    Ok(())
}

pub(super) fn descriptor_of_a_closed_region_is_refused(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    let before = pattern(5, 64);
    let region = link.target.register(before.clone(), REMOTE);
    let key = link.key(&region);
    let source = link.initiator.register(vec![0xFF; 64], LOCAL);
    let slice = source.slice(0, 64).expect("inside");
    // The vector keeps the bytes of the closed region allocated.
    let _bytes = source.close().expect("close");
    let posted = link.initiator.endpoint.write(&[slice], &[remote(&key, 0, 64)], link.peer, 1);
    posted.and_then(|()| link.ended()).expect_err("the region of the source is closed");
    assert_bytes(&contents(&region), &before, "the target");
    Ok(())
}

pub(super) fn local_memory_without_the_right_is_refused(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    if !link.has(MrMode::LOCAL) {
        return skip("local memory needs no registration in this mode");
    }
    let before = pattern(6, 64);
    let region = link.target.register(before.clone(), REMOTE);
    let key = link.key(&region);
    let wrong = link.initiator.register(vec![0xEE; 64], Access::REMOTE_READ);
    let slice = wrong.slice(0, 64).expect("inside");
    let remote = [remote(&key, 0, 64)];
    let endpoint = &link.initiator.endpoint;
    let read = endpoint.read(&[slice], &remote, link.peer, 1).and_then(|()| link.ended());
    read.expect_err("a read into memory without the right");
    assert_bytes(&contents(&wrong), &[0xEE; 64], "memory without the right to be written");
    Ok(())
}

pub(super) fn peer_of_another_endpoint_is_refused(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    let before = pattern(8, 64);
    let region = link.target.register(before.clone(), REMOTE);
    let key = link.key(&region);
    let source = link.initiator.register(vec![0xEE; 64], LOCAL);
    let slice = source.slice(0, 64).expect("inside");
    let attr = EndpointAttr::new(&link.initiator.cq);
    let lone = link.initiator.domain.open_endpoint(&attr).expect("open an endpoint");
    for peer in [link.peer, PeerId(0), PeerId(u64::MAX)] {
        let there = [remote(&key, 0, 64)];
        let posted = [
            lone.write(&[slice], &there, peer, 1),
            lone.read(&[slice], &there, peer, 1),
            lone.send(&[slice], None, peer, 1),
        ];
        for posted in posted {
            let error = posted.expect_err("a post to a peer that was not resolved");
            assert_kind(&error, ErrorKind::InvalidArgument, "a post to an unresolved peer");
        }
    }
    assert_bytes(&contents(&region), &before, "the memory of a peer that was not resolved");
    link.assert_works(&key);
    Ok(())
}

pub(super) fn memory_is_registered_again_after_close(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    let mut bytes = pattern(7, 8192);
    for round in 0..8u64 {
        bytes[..8].copy_from_slice(&round.to_le_bytes());
        let region = link.target.register(bytes, REMOTE);
        let found = link.pull(&link.key(&region), 0, 8).expect("read");
        assert_bytes(&found, &round.to_le_bytes(), "bytes of this registration");
        bytes = region.close().expect("close");
    }
    Ok(())
}

pub(super) fn threads_register_and_close_at_once(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
    let domain = &link.target.domain;
    let idle = domain.live();
    thread::scope(|scope| {
        for thread in 0..4u64 {
            scope.spawn(move || {
                for round in 0..32 {
                    let bytes = pattern(round, 5000);
                    let request = Request::new(bytes.clone(), REMOTE);
                    let region = domain.submit(request.key(1000 + thread * 32 + round));
                    let region = region.expect("register");
                    let found = region.close().expect("close");
                    assert_bytes(&found, &bytes, "memory that one of several threads registered");
                }
            });
        }
    });
    assert_eq!(domain.live(), idle, "something is left of the threads' regions");
    let region = link.target.register(pattern(1, 4096), REMOTE);
    link.assert_works(&link.key(&region));
    Ok(())
}

pub(super) fn closing_everything_leaves_nothing_live(provider: &Arc<dyn Provider>) -> Outcome {
    let link = Link::open(provider);
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
    let Link { initiator, target, .. } = link;
    for side in [initiator, target] {
        side.endpoint.close().expect("close the endpoint");
        assert_eq!(side.domain.live(), LiveObjects::default());
        drop(side.cq);
        side.domain.close().expect("close the domain");
    }
    Ok(())
}

pub(super) fn opening_and_closing_leaks_no_fd(provider: &Arc<dyn Provider>) -> Outcome {
    assert_no_fd_leaks("open, transfer and close", || {
        let link = Link::open(provider);
        let region = link.target.register(pattern(8, 4096), REMOTE);
        link.assert_works(&link.key(&region));
    });
    Ok(())
}

/// Asserts that a region which a sub-region or window uses cannot be closed, and still works.
/// Returns the region.
pub(super) fn assert_busy(link: &Link, region: Region<Vec<u8>>) -> Region<Vec<u8>> {
    let key = link.key(&region);
    let rejected = region.close().expect_err("something depends on the region");
    assert_kind(&rejected.error, ErrorKind::Busy, "closing a region that is in use");
    link.assert_works(&key);
    rejected.value
}

//! Regions over reserved addresses whose memory comes and goes.

#![allow(unsafe_code, reason = "maps and unmaps memory of the simulated device")]

mod stress;
mod world;

use std::{thread, time::Duration};

use hmem::{
    Access, Address, AddressRange, Errno, ErrorKind, Path, Promise, Raw, SparseRegion,
    loopback::NicCall,
    system::{DeviceCall, FreeDetection},
};

use crate::world::{LONG, NICS, Peer, STEP, World, pattern};

/// Both methods by which a monitor detects that memory was unmapped.
const DETECTIONS: [FreeDetection; 2] = [FreeDetection::Identity, FreeDetection::Callback];

/// LIFE-02
#[test]
fn memory_that_is_added_is_reachable_with_the_next_keys() {
    for detection in DETECTIONS {
        let world = World::new(detection, 8);
        let region = world.region(&NICS);
        let mut peers = NICS.map(|nic| Peer::of(&world, &region, nic));
        assert_eq!(region.refresh().expect("refresh"), 1, "the first generation is empty");
        for step in 0..4 {
            world.map(step, step);
            let generation = region.refresh().expect("refresh");
            assert_eq!(generation, step + 2);
            for peer in &mut peers {
                peer.update();
                for known in 0..=step {
                    let read = peer.read(known, generation).expect("memory that is there");
                    assert_eq!(read, pattern(known, STEP));
                }
                let next = peer.read(step + 1, generation).expect_err("no memory");
                assert_eq!(next.kind(), ErrorKind::OutOfBounds, "{next}");
            }
        }
        let parts = region.parts();
        assert_eq!(parts.len(), 4);
        for (step, part) in parts.iter().enumerate() {
            assert!(part.watched && part.range == world.range(step as u64, 1));
            assert!(part.decisions.iter().all(|decision| decision.path == Path::DmaBuf));
            assert_eq!(part.decisions.len(), NICS.len());
        }
        region.close().map_err(hmem::Error::from).expect("close");
        world.unmap_all();
    }
}

/// LIFE-02
#[test]
fn parts_that_do_not_change_keep_their_keys() {
    let world = World::new(FreeDetection::Identity, 4);
    let region = world.region(&NICS);
    (0..3).for_each(|step| world.map(step, step));
    let first = region.refresh().expect("refresh");
    assert_eq!(region.refresh().expect("refresh"), first, "nothing changed");
    let mut peer = Peer::of(&world, &region, NICS[0]);
    peer.update();
    let keys: Vec<_> = [0, 1, 2].map(|step| peer.key(step)).into();
    let registered = world.registrations();

    world.withdraw_and_unmap(&region, 1);
    world.map(1, 7);
    region.refresh().expect("refresh");
    peer.update();
    assert_eq!([peer.key(0), peer.key(2)], [keys[0].clone(), keys[2].clone()]);
    assert_ne!(peer.key(1), keys[1]);
    assert_eq!(world.registrations() - registered, NICS.len() as u64, "one part, on each NIC");
    // Bytes that were named before the change are refused only where memory changed.
    assert_eq!(peer.read(0, first).expect("unchanged"), pattern(0, STEP));
    assert_eq!(peer.read(1, first).expect_err("changed").kind(), ErrorKind::InvalidKey);
    drop(region);
    world.unmap_all();
}

/// LIFE-03
#[test]
fn withdrawn_keys_are_refused_by_the_nic_before_the_memory_is_unmapped() {
    for detection in DETECTIONS {
        let world = World::new(detection, 2);
        let region = world.region(&NICS);
        world.map(0, 1);
        region.refresh().expect("refresh");
        let mut peer = Peer::of(&world, &region, NICS[0]);
        peer.update();
        let old = peer.key(0);
        assert_eq!(peer.read_by(&old, 16).expect("a live key"), pattern(1, 16));
        region.withdraw(world.range(0, 1)).expect("withdraw");
        assert_eq!(world.live_regions(), 0);
        // The peer has not read the update, and uses the old key while other memory takes the
        // place.
        assert_eq!(peer.read_by(&old, 16).expect_err("withdrawn").kind(), ErrorKind::InvalidKey);
        world.unmap(0);
        world.map(0, 2);
        let generation = region.refresh().expect("refresh");
        for refused in [peer.read_by(&old, 16).map(drop), peer.write_by(&old, b"stale")] {
            assert_eq!(refused.expect_err("withdrawn").kind(), ErrorKind::InvalidKey);
        }
        let early = peer.read(0, generation).expect_err("a generation that the peer lacks");
        assert_eq!(early.kind(), ErrorKind::Again);
        let missed = peer.update().map(|applied| applied.missed);
        assert_eq!(missed, Some(1), "the peer learns that a generation is missing");
        assert_eq!(peer.read(0, generation).expect("new keys"), pattern(2, STEP));
        drop(region);
        world.unmap_all();
    }
}

/// LIFE-03: no peer reaches the memory once the call has returned.
#[test]
fn withdrawal_waits_for_a_transfer_in_flight() {
    let world = World::new(FreeDetection::Identity, 1);
    let region = world.region(&NICS);
    world.map(0, 1);
    let generation = region.refresh().expect("refresh");
    let mut peer = Peer::of(&world, &region, NICS[0]);
    peer.update();
    let gate = world.faults.hold(NicCall::Transfer);
    let calls = world.faults.calls(NicCall::Deregister);
    thread::scope(|scope| {
        let reading = scope.spawn(|| peer.read(0, generation));
        gate.wait_held();
        let withdrawing = scope.spawn(|| region.withdraw(world.range(0, 1)));
        world.faults.wait_for_calls(NicCall::Deregister, calls + 1);
        assert!(!withdrawing.is_finished(), "the memory is in use");
        gate.release();
        let read = reading.join().expect("no panic").expect("the memory was still there");
        assert_eq!(read, pattern(1, STEP));
        withdrawing.join().expect("no panic").expect("withdraw");
    });
    drop(region);
    world.unmap_all();
}

/// LIFE-03
#[test]
fn change_that_the_application_did_not_announce_is_found() {
    for detection in DETECTIONS {
        let world = World::new(detection, 3);
        let region = world.region(&NICS);
        (0..3).for_each(|step| world.map(step, step));
        let first = region.refresh().expect("refresh");
        let mut updates = region.subscribe();
        let mut peer = Peer::of(&world, &region, NICS[0]);
        peer.update();
        updates.next().expect("the first generation");
        let old = peer.key(1);
        world.unmap(1);
        if detection == FreeDetection::Callback {
            // The region's thread withdraws the part, without a call of the application.
            updates.wait(LONG).expect("a generation without the part");
            assert_eq!(region.parts().len(), 2);
        } else {
            // The registration keeps the old memory: the key never reaches other memory.
            world.map(1, 8);
            assert_eq!(peer.read_by(&old, 64).expect("the old memory"), pattern(1, 64));
            world.unmap(1);
        }
        world.map(1, 9);
        let now = region.refresh().expect("refresh");
        assert!(now > first);
        assert_eq!(peer.read_by(&old, 16).expect_err("closed").kind(), ErrorKind::InvalidKey);
        peer.update();
        assert_eq!(peer.read(1, first).expect_err("changed").kind(), ErrorKind::InvalidKey);
        assert_eq!(peer.read(1, now).expect("the new memory"), pattern(9, STEP));
        assert_eq!(peer.read(2, first).expect("unchanged"), pattern(2, STEP));
        drop(region);
        world.unmap_all();
    }
}

/// LIFE-02
#[test]
fn announced_ranges_become_the_parts() {
    let world = World::new(FreeDetection::Identity, 8);
    let region = world.region(&NICS);
    for step in [1, 2, 5] {
        world.map(step, step);
    }
    let ranges = [5, 1].map(|step| world.range(step, 1));
    let generation = region.set_parts(&ranges).expect("announce");
    let mut peer = Peer::of(&world, &region, NICS[1]);
    peer.update();
    assert_eq!(peer.read(5, generation).expect("announced"), pattern(5, STEP));
    assert_eq!(peer.read(2, generation).expect_err("left out").kind(), ErrorKind::OutOfBounds);
    let key = peer.key(1);

    // A shorter part is another registration.
    let half = AddressRange::new(world.range(5, 1).start(), STEP as u64 / 2).expect("a range");
    region.set_parts(&[world.range(1, 1), half]).expect("announce");
    peer.update();
    assert_eq!(peer.key(1), key);
    assert_eq!(peer.read(5, region.generation()).expect_err("half").kind(), ErrorKind::OutOfBounds);

    let outside = AddressRange::new(Address(world.addresses().start().0 - 4096), 8192);
    let (one, two) = (world.range(1, 1), world.range(1, 2));
    for (wrong, kind) in [
        (vec![outside.expect("a range")], ErrorKind::OutOfBounds),
        (vec![one, two], ErrorKind::InvalidArgument),
        (vec![one, one], ErrorKind::InvalidArgument),
        (vec![AddressRange::new(one.start(), 0).expect("empty")], ErrorKind::OutOfBounds),
    ] {
        let before = region.generation();
        let error = region.set_parts(&wrong).expect_err("refused");
        assert_eq!((error.kind(), region.generation()), (kind, before), "{error}");
        assert_eq!(peer.read(1, before).expect("unchanged"), pattern(1, STEP));
    }
    region.set_parts(&[]).expect("nothing is left");
    assert_eq!((region.parts().len(), world.live_regions()), (0, 0));
    drop(region);
    world.unmap_all();
}

/// LIFE-02
///
/// The second of two new parts is refused on the second NIC. The first part is published, the
/// second has no registration, and the next call continues.
#[test]
fn refused_registration_leaves_the_parts_before_it() {
    let world = World::new(FreeDetection::Identity, 3);
    let region = world.region_with_a_refused_part();
    let error = region.refresh().expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::OutOfResources, "{error}");
    assert_eq!(world.live_regions(), 2 * NICS.len() as u64, "two parts, on each NIC");
    let mut peer = Peer::of(&world, &region, NICS[1]);
    peer.update();
    let keys = [0, 1].map(|step| peer.key(step));
    let generation = region.refresh().expect("the next call");
    peer.update();
    assert_eq!([0, 1].map(|step| peer.key(step)), keys);
    for step in 0..3 {
        assert_eq!(peer.read(step, generation).expect("read"), pattern(step, STEP));
    }
    drop(region);
    assert_eq!(world.live_regions(), 0);
    world.unmap_all();
}

/// LIFE-02
#[test]
fn refused_registration_whose_rest_stays_open_is_the_error_of_the_call() {
    let world = World::new(FreeDetection::Identity, 3);
    let region = world.region_with_a_refused_part();
    world.faults.fail_always(NicCall::Deregister, Errno(16));
    let error = region.refresh().expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::OutOfResources, "{error}");
    assert!(error.context_value("why left").is_some(), "{error}");
    world.faults.clear();
    let mut peer = Peer::of(&world, &region, NICS[0]);
    peer.update();
    let read = peer.read(1, region.generation()).expect("the part before it is published");
    assert_eq!(read, pattern(1, STEP));
    region.refresh().expect("the next call");
    assert_eq!(world.live_regions(), 3 * NICS.len() as u64);
    drop(region);
    world.unmap_all();
}

/// LIFE-03
#[test]
fn registration_that_a_driver_does_not_close_is_retried_and_never_published() {
    let world = World::new(FreeDetection::Identity, 2);
    let region = world.region(&NICS);
    (0..2).for_each(|step| world.map(step, step));
    region.refresh().expect("refresh");
    world.faults.fail_next(NicCall::Deregister, Errno(16));
    let error = region.withdraw(world.range(0, 1)).expect_err("the driver refuses");
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert_eq!(world.live_regions(), 1 + NICS.len() as u64);
    let mut peer = Peer::of(&world, &region, NICS[0]);
    peer.update();
    let refused = peer.read(0, region.generation()).expect_err("not published");
    assert_eq!(refused.kind(), ErrorKind::OutOfBounds);
    region.withdraw(world.range(0, 1)).expect("the second attempt");
    assert_eq!(world.live_regions(), NICS.len() as u64);

    world.faults.fail_next(NicCall::Deregister, Errno(16));
    let rejected = region.close().expect_err("the driver refuses");
    rejected.value.close().map_err(hmem::Error::from).expect("the second attempt");
    assert_eq!(world.live_regions(), 0);
    world.unmap_all();
}

/// LIFE-03
#[test]
fn region_dropped_while_a_driver_refuses_to_close_its_parts_leaves_no_subscription() {
    let world = World::new(FreeDetection::Callback, 1);
    let region = world.region(&NICS);
    world.map(0, 0);
    region.refresh().expect("refresh");
    assert_eq!(world.device.stats().subscriptions, 1);
    world.faults.fail_always(NicCall::Deregister, Errno(16));
    drop(region);
    assert_eq!(world.device.stats().subscriptions, 0);
    world.faults.clear();
}

/// LIFE-03
#[test]
fn device_that_is_lost_has_no_parts() {
    let world = World::new(FreeDetection::Identity, 2);
    let region = world.region(&NICS);
    (0..2).for_each(|step| world.map(step, step));
    region.refresh().expect("refresh");
    for call in [DeviceCall::Segments, DeviceCall::Query, DeviceCall::ExportDmaBuf] {
        world.device.faults().fail_always(call, Errno(19));
    }
    let error = region.refresh().expect_err("the device is lost");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert_eq!((region.parts().len(), world.live_regions()), (0, 0));
    assert!(region.set_parts(&[world.range(0, 1)]).is_err());
    world.device.faults().clear();
    region.refresh().expect("the device is back");
    assert_eq!(region.parts().len(), 2);
    drop(region);
    world.unmap_all();
}

/// LIFE-04
///
/// Ten thousand generations are published, and the peer never reads one. The update that it reads
/// in the end is as long as the first.
#[test]
fn peer_that_never_reads_costs_no_memory() {
    let world = World::new(FreeDetection::Identity, 1);
    let region = world.region(&NICS);
    let (mut reads, mut idle) = (region.subscribe(), Peer::of(&world, &region, NICS[0]));
    world.map(0, 3);
    let mut len = None;
    for _round in 0..5_000 {
        region.refresh().expect("refresh");
        let update = reads.next().expect("a generation").len();
        assert!(len.is_none_or(|len: usize| update.abs_diff(len) < 16), "{update} bytes");
        len = Some(update);
        region.withdraw(world.addresses()).expect("withdraw");
    }
    let last = region.refresh().expect("refresh");
    let applied = idle.update().expect("the newest generation");
    assert_eq!((applied.generation, applied.missed), (10_001, 10_000));
    assert_eq!(idle.read(0, last).expect("read"), pattern(3, STEP));
    drop(region);
    let applied = idle.update().expect("the end");
    assert_eq!((applied.generation, applied.missed), (10_002, 0));
    assert!(idle.is_ended());
    world.unmap_all();
}

/// LIFE-02
#[test]
fn wrong_domains_addresses_and_rights_are_refused() {
    let world = World::new(FreeDetection::Identity, 1);
    let domain = &world.domains[0];
    // SAFETY: no part is ever registered.
    let memory = |promise| unsafe { Raw::new(world.addresses(), promise) };
    let remote = Access::REMOTE_WRITE;
    let refused = |region: hmem::Result<SparseRegion>| region.expect_err("refused").kind();
    let none = SparseRegion::new(&[], memory(Promise::ReadWrite), remote);
    assert_eq!(refused(none), ErrorKind::InvalidArgument);
    let read_only = SparseRegion::new(&[domain], memory(Promise::ReadOnly), remote);
    assert_eq!(refused(read_only), ErrorKind::AccessDenied);
    let empty = AddressRange::new(world.addresses().start(), 0).expect("an empty range");
    // SAFETY: the range is empty.
    let empty = unsafe { Raw::new(empty, Promise::ReadWrite) };
    assert_eq!(refused(SparseRegion::new(&[domain], empty, remote)), ErrorKind::ZeroLength);

    let twice = SparseRegion::new(&[domain, domain], memory(Promise::ReadWrite), remote);
    let twice = twice.expect("the list is refused with its first keys");
    world.map(0, 0);
    assert_eq!(twice.refresh().expect_err("a NIC twice").kind(), ErrorKind::InvalidArgument);
    assert_eq!(world.live_regions(), 0);
    drop(twice);
    world.unmap_all();
}

/// LIFE-02
#[test]
fn staged_parts_are_refused_if_the_policy_forbids_them() {
    let world = World::new(FreeDetection::Identity, 1);
    world.map(0, 1);
    let start = world.addresses().start();
    world.device.set_exportable(start, false).expect("the mapping");
    let region = world.region(&NICS);
    let error = region.refresh().expect_err("no path");
    assert!(!error.trace().is_empty(), "{error}");
    assert_eq!((region.generation(), world.live_regions()), (1, 0));
    world.device.set_exportable(start, true).expect("the mapping");
    region.refresh().expect("a path");
    drop(region);
    world.unmap_all();
}

/// LIFE-02
#[test]
fn slices_serve_local_transfers_while_their_part_lives() {
    let world = World::new(FreeDetection::Identity, 2);
    let region = world.region(&NICS);
    (0..2).for_each(|step| world.map(step, 10 + step));
    region.refresh().expect("refresh");
    let peer = Peer::of(&world, &region, NICS[1]);
    let slice = region.slice(1, STEP as u64 + 100, 28).expect("bytes of the second part");
    assert_eq!(peer.receive_from(slice).expect("a write to the peer"), pattern(11, STEP)[100..128]);
    for (nic, offset, len) in [(2, 0, 1), (0, STEP as u64 - 1, 2), (0, 2 * STEP as u64, 1)] {
        let error = region.slice(nic, offset, len).expect_err("outside");
        assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{nic}, {offset}, {len}");
    }
    region.withdraw(world.range(1, 1)).expect("withdraw");
    assert!(peer.receive_from(slice).is_err(), "the registration is closed");
    assert!(region.slice(1, STEP as u64, 1).is_err());
    drop(region);
    world.unmap_all();
}

/// LIFE-02
#[test]
fn host_memory_is_announced_and_watched() {
    let world = World::new(FreeDetection::Identity, 1);
    let memory = vec![7_u8; 3 * 4096];
    // SAFETY: the region is dropped before the memory, and only peers use the memory meanwhile.
    let raw = unsafe { Raw::new(AddressRange::of(&memory), Promise::ReadWrite) };
    let region = SparseRegion::new(&[&world.domains[0]], raw, Access::REMOTE_READ).expect("new");
    let error = region.refresh().map(|_| region.parts());
    assert!(error.is_ok_and(|parts| parts.is_empty()), "no device lists host memory");
    let half = AddressRange::new(raw.at().start(), 6000).expect("a range");
    region.set_parts(&[half]).expect("announce");
    let mut peer = Peer::of(&world, &region, NICS[0]);
    peer.update();
    assert_eq!(peer.read_by(&peer.key(0), 6000).expect("read"), vec![7; 6000]);
    drop(region);
    assert_eq!(world.live_regions(), 0);
}

/// LIFE-02
#[test]
fn region_that_is_closed_under_load_leaves_nothing() {
    for detection in DETECTIONS {
        let world = World::new(detection, 4);
        let region = world.region(&NICS);
        (0..4).for_each(|step| world.map(step, step));
        let generation = region.refresh().expect("refresh");
        let mut peers = NICS.map(|nic| Peer::of(&world, &region, nic));
        thread::scope(|scope| {
            for peer in &mut peers {
                peer.update();
                scope.spawn(move || {
                    let ended = (0..u64::MAX).find_map(|round| {
                        let step = round % 4;
                        let read = peer.read(step, generation);
                        read.map(|bytes| assert_eq!(bytes, pattern(step, STEP))).err()
                    });
                    assert_eq!(ended.map(|error| error.kind()), Some(ErrorKind::InvalidKey));
                });
            }
            thread::sleep(Duration::from_millis(20));
            region.close().map_err(hmem::Error::from).expect("close");
            assert_eq!(world.live_regions(), 0);
            world.unmap_all();
        });
    }
}

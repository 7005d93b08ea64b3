//! Tests of the copy engine: HM-03, HM-14.

mod support;

use std::{
    panic::AssertUnwindSafe,
    time::{Duration, Instant},
};

use hmem_core::{
    Address, AllocationKind, DeviceId, ErrorKind, Iface, IfaceExt, iface::DmaBufMapping,
};
use hmem_iface_system::{Simulated, Stepping};
use support::*;

/// HM-03
///
/// A copy of 2^n or 2^n - 1 bytes, up to 64 MiB, between odd addresses moves every byte.
#[test]
fn copies_of_every_size_class_round_trip() {
    let simulated = simulated();
    let sizes =
        (0..=26).flat_map(|power| [(1_usize << power) - 1, 1 << power]).filter(|size| *size > 0);
    for size in sizes {
        let allocation = device(&simulated, size as u64 + 13);
        let bytes = pattern(size + 1, size as u64);
        simulated.write_bytes(at(&allocation, 7), &bytes[1..]).unwrap();
        let mut back = vec![0; size + 3];
        simulated.read_bytes(at(&allocation, 7), &mut back[3..]).unwrap();
        assert!(back[3..] == bytes[1..], "{size} bytes");
        free(&simulated, &allocation).unwrap();
    }
}

/// HM-03
#[test]
fn every_kind_copies_to_every_kind() {
    let page = page();
    let simulated = Simulated::builder().segment_len(2 * page).build().unwrap();
    let len = 11 * page - 56;
    for from_kind in DEVICE_KINDS {
        for to_kind in DEVICE_KINDS {
            let [from, to] =
                [from_kind, to_kind].map(|kind| allocate(&simulated, 12 * page + 848, kind));
            let bytes = pattern(len as usize, 9);
            simulated.write_bytes(at(&from, 3), &bytes).unwrap();
            // SAFETY: both ranges lie in allocations of the iface that are not freed during the
            // copy.
            unsafe { simulated.copy(at(&to, page + 15), at(&from, 3), len).unwrap() };
            let mut back = vec![0; len as usize];
            simulated.read_bytes(at(&to, page + 15), &mut back).unwrap();
            assert!(back == bytes, "{from_kind:?} to {to_kind:?}");
            free(&simulated, &from).unwrap();
            free(&simulated, &to).unwrap();
        }
    }
}

/// HM-03
///
/// A copy whose source and destination overlap in one allocation moves the bytes as `memmove` does,
/// in either direction and across segments.
#[test]
fn overlapping_copies_move_as_memmove_does() {
    let page = page() as usize;
    let simulated = Simulated::builder().segment_len(page as u64).build().unwrap();
    let (whole, len, next) = (10 * page - 960, 7 * page + 1328, page + 904);
    for kind in [AllocationKind::Device, AllocationKind::Virtual] {
        for (to, from) in [(0, 1), (1, 0), (next, 100), (100, next), (page, 0), (0, page)] {
            let allocation = allocate(&simulated, whole as u64, kind);
            let mut bytes = pattern(whole, 8);
            simulated.write_bytes(allocation.base(), &bytes).unwrap();
            // SAFETY: both ranges lie in allocations of the iface that are not freed during the
            // copy.
            unsafe {
                simulated
                    .copy(at(&allocation, to as u64), at(&allocation, from as u64), len as u64)
                    .unwrap()
            };
            bytes.copy_within(from..from + len, to);
            let mut back = vec![0; whole];
            simulated.read_bytes(allocation.base(), &mut back).unwrap();
            assert!(back == bytes, "{kind:?} {from} to {to}");
            free(&simulated, &allocation).unwrap();
        }
    }
}

/// HM-03
#[test]
fn a_copy_past_the_allocation_is_refused_and_moves_nothing() {
    let simulated = simulated();
    let (allocation, neighbour) = (device(&simulated, 100), device(&simulated, 4096));
    simulated.write_bytes(allocation.base(), &[7; 100]).unwrap();
    let mut host = [1_u8; 101];
    let host_address = Address::of_ptr(host.as_mut_ptr());
    for (offset, len) in [(0, 101), (1, 100), (99, 2), (100, 1), (50, u64::MAX - 50)] {
        // SAFETY: the iface refuses the copy before it accesses memory.
        let out = unsafe { simulated.copy(host_address, at(&allocation, offset), len) };
        // SAFETY: the iface refuses the copy before it accesses memory.
        let into = unsafe { simulated.copy(at(&allocation, offset), host_address, len) };
        // SAFETY: the iface refuses the copy before it accesses memory.
        let queued = unsafe { simulated.start_copy(at(&allocation, offset), host_address, len) };
        let kinds = [ErrorKind::OutOfBounds, ErrorKind::AddressWraps];
        for error in [out.unwrap_err(), into.unwrap_err(), queued.map(drop).unwrap_err()] {
            assert!(kinds.contains(&error.kind()), "{error}");
        }
    }
    assert_eq!(host, [1; 101]);
    free(&simulated, &neighbour).unwrap();
    assert_eq!(
        simulated.read_bytes(neighbour.base(), &mut host).unwrap_err().kind(),
        ErrorKind::OutOfBounds
    );
    assert_eq!(simulated.stats().copies_done, 1);
}

/// HM-03
///
/// A copy with a bad host address fails with an error, and does not end the process.
#[test]
fn unmapped_host_address_fails_only_the_copy() {
    let simulated = simulated();
    let other = Simulated::builder().kind(hmem_core::IfaceKind(0x101)).build().unwrap();
    let allocation = device(&simulated, 4096);
    let not_readable = device(&other, 4096);
    for address in [Address(0x10), not_readable.base()] {
        // SAFETY: the kernel refuses the address before it accesses memory.
        let into = unsafe { simulated.copy(allocation.base(), address, 8) };
        // SAFETY: the kernel refuses the address before it accesses memory.
        let out = unsafe { simulated.copy(address, allocation.base(), 8) };
        assert_eq!(into.unwrap_err().kind(), ErrorKind::BadAddress);
        assert_eq!(out.unwrap_err().kind(), ErrorKind::BadAddress);
    }
}

/// HM-03
#[test]
fn asynchronous_copy_moves_bytes_at_its_engine_step() {
    let simulated = Simulated::builder().stepping(Stepping::ByHand).build().unwrap();
    let allocation = device(&simulated, 64);
    let bytes = pattern(64, 2);
    // SAFETY: `bytes` outlives both copies.
    let first =
        unsafe { simulated.start_copy(allocation.base(), Address::of_ptr(bytes.as_ptr()), 32) }
            .unwrap();
    // SAFETY: `bytes` outlives both copies.
    let second = unsafe {
        simulated.start_copy(at(&allocation, 32), Address::of_ptr(bytes[32..].as_ptr()), 32)
    }
    .unwrap();
    assert_eq!(simulated.pending_copies(), 2);
    let content = || {
        let mut back = [0; 64];
        simulated.read_bytes(allocation.base(), &mut back).unwrap();
        back
    };
    assert!(!first.is_done());
    assert_eq!(content(), [0; 64]);

    assert!(simulated.step());
    assert!(first.is_done() && !second.is_done());
    assert_eq!(content()[..32], bytes[..32]);
    assert_eq!(content()[32..], [0; 32]);

    second.wait().unwrap();
    first.wait().unwrap();
    assert_eq!(content()[..], bytes[..]);
    assert!(!simulated.step());
}

/// HM-03
#[test]
fn the_engine_thread_ends_copies_in_order() {
    let simulated = simulated();
    let allocation = device(&simulated, 8);
    let values: Vec<[u8; 8]> = (0..500_u64).map(u64::to_le_bytes).collect();
    let events: Vec<_> = values
        .iter()
        // SAFETY: `values` outlives the copies, which end in the loop below.
        .map(|value| unsafe {
            simulated.start_copy(allocation.base(), Address::of_ptr(value.as_ptr()), 8).unwrap()
        })
        .collect();
    for event in events {
        event.wait().unwrap();
    }
    let mut last = [0; 8];
    simulated.read_bytes(allocation.base(), &mut last).unwrap();
    assert_eq!(last, values[499]);
    assert_eq!(simulated.stats().copies_done, 501);
}

/// HM-03
///
/// A copy ends no earlier than the simulated latency and bandwidth permit. It may end later.
#[test]
fn a_copy_takes_at_least_latency_and_length_over_bandwidth() {
    let latency = Duration::from_millis(2);
    let simulated =
        Simulated::builder().copy_latency(latency).copy_bandwidth(1 << 20).build().unwrap();
    let allocation = device(&simulated, 4096);
    let bytes = pattern(4096, 5);
    let least = latency + Duration::from_secs(1) * 4096 / (1 << 20);
    let start = Instant::now();
    simulated.write_bytes(allocation.base(), &bytes).unwrap();
    assert!(start.elapsed() >= least);
    let start = Instant::now();
    // SAFETY: `bytes` outlives the copy.
    let event =
        unsafe { simulated.start_copy(allocation.base(), Address::of_ptr(bytes.as_ptr()), 4096) }
            .unwrap();
    event.wait().unwrap();
    assert!(start.elapsed() >= least);
}

#[test]
fn queued_copy_does_not_reach_freed_and_reused_memory() {
    let simulated = Simulated::builder()
        .stepping(Stepping::ByHand)
        .address_reuse(hmem_iface_system::AddressReuse::JustFreed)
        .build()
        .unwrap();
    let stale = device(&simulated, 64);
    let bytes = [9; 64];
    // SAFETY: `bytes` outlives the copy.
    let event =
        unsafe { simulated.start_copy(stale.base(), Address::of_ptr(bytes.as_ptr()), 64) }.unwrap();
    free(&simulated, &stale).unwrap();
    let fresh = device(&simulated, 64);
    assert_eq!(fresh.base(), stale.base());
    let error = event.wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BadState);
    assert_eq!(error.context_value("identity"), Some(stale.id.0.to_string().as_str()));
    let mut back = [1; 64];
    simulated.read_bytes(fresh.base(), &mut back).unwrap();
    assert_eq!(back, [0; 64]);
}

#[test]
fn dropping_the_iface_cancels_queued_copies() {
    for stepping in [Stepping::ByHand, Stepping::Thread] {
        let simulated = Simulated::builder()
            .stepping(stepping)
            .copy_latency(Duration::from_secs(3600))
            .build()
            .unwrap();
        let allocation = device(&simulated, 64);
        let bytes = [9; 64];
        // SAFETY: `bytes` outlives the copy.
        let event =
            unsafe { simulated.start_copy(allocation.base(), Address::of_ptr(bytes.as_ptr()), 64) }
                .unwrap();
        drop(simulated);
        assert_eq!(event.wait().unwrap_err().kind(), ErrorKind::Canceled);
    }
}

/// HM-14
#[test]
fn the_device_sees_inbound_writes_after_a_flush() {
    let simulated = simulated();
    let (target, copy) = (device(&simulated, 10_000), device(&simulated, 10_000));
    let range = target.range.slice(123, 5000).unwrap();
    let export = simulated.export_dma_buf(range, &nic("loop0"), DmaBufMapping::Default).unwrap();
    for round in 0..10 {
        let bytes = pattern(5000, round);
        write_through_fd(&export, &bytes);
        simulated.flush_inbound(DeviceId(0)).unwrap();
        // A copy within device memory stands for the device's own access.
        // SAFETY: both ranges lie in allocations of the iface that are not freed during the copy.
        unsafe { simulated.start_copy(copy.base(), range.start(), 5000) }.unwrap().wait().unwrap();
        let mut back = vec![0; 5000];
        simulated.read_bytes(copy.base(), &mut back).unwrap();
        assert!(back == bytes);
    }
}

/// MR-18
#[test]
fn copy_without_a_device_side_is_refused() {
    let simulated = simulated();
    let (from, mut to) = ([7_u8; 64], [0_u8; 64]);
    let (here, there) = (Address::of_ptr(to.as_mut_ptr()), Address::of_ptr(from.as_ptr()));
    // SAFETY: both arrays outlive the copy, which is refused before it starts.
    let refused = unsafe {
        [simulated.copy(here, there, 64), simulated.start_copy(here, there, 64).map(drop)]
    };
    for error in refused.map(Result::unwrap_err) {
        assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{error}");
    }
    assert_eq!(to, [0; 64]);
}

#[test]
fn forked_child_drops_the_iface_without_waiting_for_the_engine_thread() {
    let simulated = simulated();
    let allocation = device(&simulated, 64);
    // SAFETY: the memory is freed after the copy.
    let copy = unsafe { simulated.start_copy(at(&allocation, 32), at(&allocation, 0), 32) };
    copy.expect("the thread starts").wait().expect("copied");
    // SAFETY: the child only drops its copy of the iface, and exits.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork");
    if pid == 0 {
        // SAFETY: the calls end the child, after a minute in case of a deadlock, without running
        // the parent's destructors.
        unsafe {
            libc::alarm(60);
            let dropped = std::panic::catch_unwind(AssertUnwindSafe(|| drop(simulated)));
            libc::_exit(i32::from(dropped.is_err()));
        }
    }
    let mut status = -1;
    // SAFETY: the call waits for the new child, and writes only `status`.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0);
    free(&simulated, &allocation).unwrap();
}

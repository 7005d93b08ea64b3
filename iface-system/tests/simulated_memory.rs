//! Tests of allocation kinds, the CPU's access to each, and the absence of leaks: HM-13.

mod support;

use std::os::unix::process::ExitStatusExt;

use hmem_core::{
    AddressRange, AllocationKind, DeviceId, ErrorKind, Iface, IfaceExt, iface::AllocRequest,
};
use hmem_iface_system::{AddressReuse, Simulated};
use support::*;

fn pointer(allocation: &hmem_core::Allocation) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(allocation.base().0 as usize)
}

const CPU_BLIND: [AllocationKind; 3] =
    [AllocationKind::Device, AllocationKind::StreamOrdered, AllocationKind::Virtual];

/// Runs as a child process of another test, and dereferences a device address: HM-13.
#[test]
fn child_that_dereferences_a_device_address() {
    let Some(kind) = child_input() else { return };
    let simulated = simulated();
    let allocation = allocate(&simulated, 4096, CPU_BLIND[kind.parse::<usize>().unwrap()]);
    simulated.write_bytes(allocation.base(), &[1; 4096]).unwrap();
    println!("alive");
    // SAFETY: the access is deliberately invalid. The address has no access rights, so the kernel
    // ends the process.
    let byte = unsafe { pointer(&allocation).read_volatile() };
    println!("read {byte}");
}

/// HM-13
#[test]
fn a_stray_dereference_of_device_memory_ends_the_process() {
    let _turn = turn();
    for (number, kind) in CPU_BLIND.into_iter().enumerate() {
        let child = spawn_child("child_that_dereferences_a_device_address", &number.to_string());
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains("alive") && !said.contains("read"), "{said}");
        assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{kind:?}");
    }
}

#[test]
fn cpu_and_engine_see_the_same_managed_and_host_bytes() {
    let _turn = turn();
    let simulated = simulated();
    for kind in [AllocationKind::Managed, AllocationKind::Host] {
        let allocation = allocate(&simulated, 10_000, kind);
        let bytes = pattern(10_000, 1);
        simulated.write_bytes(allocation.base(), &bytes).unwrap();
        // SAFETY: memory of this kind is mapped for the CPU, and nothing writes to it while the
        // slice is used.
        let by_cpu =
            unsafe { std::slice::from_raw_parts(pointer(&allocation).cast_const(), 10_000) };
        assert!(by_cpu == bytes);
        // SAFETY: memory of this kind is mapped for the CPU, and the slice is no longer used.
        unsafe { pointer(&allocation).wrapping_add(9_999).write_volatile(!bytes[9_999]) };
        let mut last = [0];
        simulated.read_bytes(at(&allocation, 9_999), &mut last).unwrap();
        assert_eq!(last, [!bytes[9_999]]);
        free(&simulated, &allocation).unwrap();
    }
}

#[test]
fn fresh_memory_is_zeroed() {
    let _turn = turn();
    let simulated = Simulated::builder().address_reuse(AddressReuse::JustFreed).build().unwrap();
    for kind in DEVICE_KINDS {
        let first = allocate(&simulated, 5000, kind);
        simulated.write_bytes(first.base(), &[0xaa; 5000]).unwrap();
        free(&simulated, &first).unwrap();
        let second = allocate(&simulated, 5000, kind);
        assert_eq!(second.base(), first.base());
        let mut bytes = [1; 5000];
        simulated.read_bytes(second.base(), &mut bytes).unwrap();
        assert_eq!(bytes, [0; 5000]);
    }
}

#[test]
fn freed_address_is_reused_as_the_policy_says() {
    let _turn = turn();
    let simulated = simulated();
    let first = device(&simulated, 2 * page());
    free(&simulated, &first).unwrap();
    let other = device(&simulated, 2 * page());
    assert_ne!(other.base(), first.base());

    simulated.set_address_reuse(AddressReuse::JustFreed);
    free(&simulated, &other).unwrap();
    let again = device(&simulated, page() + 904);
    assert_eq!(again.base(), other.base());
    assert_ne!(again.id, other.id);
}

#[test]
fn double_free_is_refused_with_the_identity() {
    let _turn = turn();
    let simulated = Simulated::builder().address_reuse(AddressReuse::JustFreed).build().unwrap();
    let stale = device(&simulated, 64);
    free(&simulated, &stale).unwrap();
    let next = device(&simulated, 64);
    assert_eq!(next.base(), stale.base());
    let error = free(&simulated, &stale).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert_eq!(error.context_value("identity"), Some(stale.id.0.to_string().as_str()));
    assert_eq!(simulated.query(next.base()).unwrap(), Some(next));
}

#[test]
fn empty_foreign_and_oversized_requests_are_refused() {
    let _turn = turn();
    let simulated = Simulated::builder().memory_per_device(1 << 20).build().unwrap();
    let refused = |len, kind| try_allocate(&simulated, len, kind).unwrap_err().kind();
    assert_eq!(refused(0, AllocationKind::Device), ErrorKind::ZeroLength);
    assert_eq!(refused(64, AllocationKind::System), ErrorKind::Unsupported);
    assert_eq!(refused((1 << 20) + 1, AllocationKind::Device), ErrorKind::OutOfResources);
    assert_eq!(refused(u64::MAX, AllocationKind::Device), ErrorKind::OutOfResources);
    assert_eq!(refused(u64::MAX, AllocationKind::Host), ErrorKind::OutOfResources);
    assert_eq!(refused(1 << 62, AllocationKind::Host), ErrorKind::OutOfResources);
    let all = device(&simulated, 1 << 20);
    assert_eq!(refused(1, AllocationKind::Device), ErrorKind::OutOfResources);
    free(&simulated, &all).unwrap();
    // The search for free addresses now begins after the freed ones.
    assert_eq!(refused(u64::MAX, AllocationKind::Host), ErrorKind::OutOfResources);
    assert_eq!(simulated.reserve(u64::MAX).unwrap_err().kind(), ErrorKind::OutOfResources);
    device(&simulated, 1 << 20);
}

#[test]
fn longest_window_shrinks_and_longest_arena_is_refused() {
    let _turn = turn();
    let simulated = Simulated::builder().window(u64::MAX).build().unwrap();
    device(&simulated, 1 << 20);
    let error = Simulated::builder().arena(u64::MAX).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn each_device_has_memory_of_its_own() {
    let _turn = turn();
    let simulated = Simulated::builder().devices(2).memory_per_device(1 << 20).build().unwrap();
    let all_of = |device| AllocRequest {
        len: 1 << 20,
        device: DeviceId(device),
        kind: AllocationKind::Device,
    };
    simulated.allocate(&all_of(0)).unwrap();
    simulated.allocate(&all_of(1)).unwrap();
    assert!(simulated.allocate(&all_of(0)).is_err());
    let devices = simulated.devices().unwrap();
    assert_eq!(devices.iter().map(|device| device.memory).collect::<Vec<_>>(), [1 << 20; 2]);
}

#[test]
fn exhausted_window_reuses_addresses_then_fails() {
    let _turn = turn();
    let simulated = Simulated::builder().window(64 << 20).build().unwrap();
    let all: Vec<_> = (0..4).map(|_| device(&simulated, 16 << 20)).collect();
    let error = try_allocate(&simulated, 1, AllocationKind::Device).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfResources);
    free(&simulated, &all[2]).unwrap();
    assert_eq!(device(&simulated, 4096).base(), all[2].base());
}

#[test]
fn small_allocations_share_fds_and_mappings() {
    let _turn = turn();
    let simulated = Simulated::builder().arena(16_384 * page()).build().unwrap();
    let (fds, maps) = (open_fds(), mappings());
    let all: Vec<_> = (0..100_000).map(|_| device(&simulated, 4096)).collect();
    assert!(open_fds() - fds < 16, "{} fds", open_fds() - fds);
    assert!(mappings() - maps < 32, "{} mappings", mappings() - maps);
    all.iter().for_each(|allocation| free(&simulated, allocation).unwrap());
    assert!(open_fds() <= fds + 1, "one empty memory file may stay");
}

#[test]
fn allocations_leak_no_fd_and_no_memory() {
    let _turn = turn();
    let simulated = simulated();
    let cycles = |from: u64, to: u64| {
        let mut kept = std::collections::VecDeque::new();
        for i in from..to {
            let allocation = device(&simulated, 1 + i % 3 * page());
            if i % 16 == 0 {
                simulated.write_bytes(allocation.base(), &[1]).unwrap();
            }
            kept.push_back(allocation);
            if kept.len() > 32 {
                free(&simulated, &kept.pop_front().unwrap()).unwrap();
            }
        }
        kept.iter().for_each(|allocation| free(&simulated, allocation).unwrap());
    };
    // Enough allocations for the bound on the growth: 33 bytes for each, less than the device's
    // record of an allocation.
    cycles(0, 50_000);
    let (fds, memory) = (open_fds(), resident_bytes());
    cycles(50_000, 300_000);
    assert_eq!(open_fds(), fds);
    let grown = resident_bytes().saturating_sub(memory);
    assert!(grown < 8 << 20, "{grown} bytes for 250,000 allocations");
    assert_eq!(simulated.stats().live_bytes, 0);
}

#[test]
fn a_dropped_device_leaves_no_fd_and_no_mapping() {
    let _turn = turn();
    drop(simulated());
    let (fds, maps) = (open_fds(), mappings());
    for _ in 0..20 {
        let simulated = simulated();
        for kind in DEVICE_KINDS {
            allocate(&simulated, 10 << 20, kind);
            allocate(&simulated, 100, kind);
        }
    }
    assert_eq!(open_fds(), fds);
    // Threads of the test harness may add a few mappings. A leak would add at least one for each
    // device.
    assert!(mappings() < maps + 20, "{} mappings more", mappings() - maps);
}

#[test]
fn host_ranges_are_registered_once_and_unregistered_exactly() {
    let _turn = turn();
    let simulated = simulated();
    let host = vec![0_u8; 10_000];
    let range = AddressRange::of(&host);
    let register = |range| {
        // SAFETY: `host` outlives its registration.
        unsafe { simulated.host_register(range) }
    };
    register(range).unwrap();
    for overlapping in [range, range.slice(100, 1).unwrap(), range.slice(9_999, 1).unwrap()] {
        assert_eq!(register(overlapping).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    let part = range.slice(0, 100).unwrap();
    assert_eq!(simulated.host_unregister(part).unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(simulated.stats().host_registrations, 1);
    simulated.host_unregister(range).unwrap();
    assert!(simulated.host_unregister(range).is_err());
    let own = device(&simulated, 64);
    assert!(register(own.range).is_err());
    assert_eq!(simulated.stats().host_registrations, 0);
}

/// LIFE-02
#[test]
fn memory_is_mapped_unmapped_and_replaced_inside_reserved_addresses() {
    let _turn = turn();
    let simulated = Simulated::builder().address_reuse(AddressReuse::JustFreed).build().unwrap();
    let page = rustix::param::page_size() as u64;
    let reserved = simulated.reserve(8 * page - 1).unwrap();
    assert_eq!(reserved.len(), 8 * page);
    let steps = |first, count| reserved.slice(first * page, count * page).unwrap();
    let map = |range| simulated.map(range, DeviceId(0));
    let segments = simulated.segments().unwrap();
    assert!(segments.mapped(reserved).unwrap().is_empty());
    assert_eq!(simulated.query(reserved.start()).unwrap(), None);

    let (first, third) = (map(steps(0, 1)).unwrap(), map(steps(2, 3)).unwrap());
    assert_eq!((third.range, third.kind), (steps(2, 3), AllocationKind::Virtual));
    simulated.write_bytes(third.base(), &pattern(page as usize, 1)).unwrap();
    assert_eq!(segments.mapped(reserved).unwrap(), [steps(0, 1), steps(2, 3)]);
    assert_eq!(segments.mapped(steps(3, 4)).unwrap(), [steps(3, 2)]);

    let unaligned = AddressRange::new(at(&first, 8), page).unwrap();
    let past_the_end = AddressRange::new(steps(7, 1).start(), 2 * page).unwrap();
    let elsewhere = device(&simulated, page).range;
    for refused in [steps(0, 1), steps(1, 2), past_the_end, unaligned, elsewhere] {
        assert_eq!(map(refused).unwrap_err().kind(), ErrorKind::InvalidArgument, "{refused}");
    }
    assert_eq!(simulated.unreserve(reserved).unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(simulated.unreserve(steps(0, 1)).unwrap_err().kind(), ErrorKind::InvalidArgument);

    free(&simulated, &third).unwrap();
    let elsewhere = device(&simulated, 3 * page);
    assert!(!elsewhere.range.overlaps(reserved), "unmapped addresses stay reserved");
    let again = map(steps(2, 3)).unwrap();
    assert_ne!(again.id, third.id);
    let mut bytes = vec![1; page as usize];
    simulated.read_bytes(again.base(), &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0), "new memory is zeroed");
    [first, again].iter().for_each(|allocation| free(&simulated, allocation).unwrap());
    simulated.unreserve(reserved).unwrap();
    assert!(simulated.unreserve(reserved).is_err());
    assert!(map(steps(0, 1)).is_err());
    assert!(simulated.reserve(0).is_err());
}

//! Tests of the iface of host memory: allocation, copies, exports and unsupported operations.

mod support;

use std::os::fd::AsFd;

use hmem_core::{
    Address, AllocationKind, DeviceId, ErrorKind, Iface, IfaceExt, IfaceKind, iface::DmaBufMapping,
    os_page_sizes,
};
use hmem_iface_system::{
    MemFd, System,
    monitor::{HostMonitorKind, SystemMonitor},
};
use support::*;

/// Returns the number of free huge pages of `size` bytes.
fn free_huge_pages(size: usize) -> u64 {
    let kib = size >> 10;
    let path = format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB/free_hugepages");
    let text = std::fs::read_to_string(path);
    text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// HM-01
#[test]
fn allocations_of_every_sort_are_found_by_address_and_freed_once() {
    let system = System::new();
    let heap = system.heap(10_000, 64).unwrap();
    assert_eq!(heap.base().0 % 64, 0);
    let all = [
        heap,
        system.mmap(10_000).unwrap(),
        system.memfd(10_000).unwrap(),
        allocate(&system, 10_000, AllocationKind::System),
    ];
    for allocation in &all {
        assert_eq!(
            (allocation.iface, allocation.kind),
            (IfaceKind::SYSTEM, AllocationKind::System)
        );
        assert_eq!((allocation.range.len(), allocation.device), (10_000, None));
        assert_eq!(system.query(at(allocation, 9_999)).unwrap(), Some(*allocation));
        assert_ne!(system.query(at(allocation, 10_000)).unwrap(), Some(*allocation));
        let bytes = pattern(9_000, allocation.id.0);
        system.write_bytes(at(allocation, 999), &bytes).unwrap();
        let mut back = vec![0; 9_000];
        system.read_bytes(at(allocation, 999), &mut back).unwrap();
        assert!(back == bytes);
        let past = system.write_bytes(at(allocation, 9_999), &[0; 2]).unwrap_err();
        assert_eq!(past.kind(), ErrorKind::OutOfBounds);
    }
    let mut ids: Vec<_> = all.iter().map(|allocation| allocation.id).collect();
    ids.dedup();
    assert_eq!(ids.len(), 4);
    for allocation in &all {
        free(&system, allocation).unwrap();
        let error = free(&system, allocation).unwrap_err();
        assert_eq!(error.context_value("identity"), Some(allocation.id.0.to_string().as_str()));
    }
    assert!(system.live().is_empty());
}

/// HM-03
#[test]
fn host_copies_may_overlap_and_are_bounded() {
    let system = System::new();
    let allocation = system.mmap(10_000).unwrap();
    let mut bytes = pattern(10_000, 1);
    system.write_bytes(allocation.base(), &bytes).unwrap();
    // SAFETY: both ranges lie in the allocation.
    unsafe { system.copy(at(&allocation, 10), allocation.base(), 9_000).unwrap() };
    bytes.copy_within(0..9_000, 10);
    let mut back = vec![0; 10_000];
    system.read_bytes(allocation.base(), &mut back).unwrap();
    assert!(back == bytes);
    // SAFETY: the iface refuses a copy past the end of an allocation before it accesses memory.
    let past = unsafe { system.copy(at(&allocation, 1), allocation.base(), 10_000) };
    assert_eq!(past.unwrap_err().kind(), ErrorKind::OutOfBounds);
}

/// ARM-02
#[test]
fn huge_pages_of_each_size_work_or_the_error_has_a_remedy() {
    let system = System::new();
    for &size in &os_page_sizes()[1..] {
        // A page and a half.
        let len = size as u64 * 3 / 2;
        match system.huge_pages(len, size) {
            Ok(allocation) => {
                assert_eq!(allocation.base().0 % size as u64, 0);
                assert_eq!(allocation.range.len(), len);
                system.write_bytes(at(&allocation, len - 100), &pattern(100, 1)).unwrap();
                free(&system, &allocation).unwrap();
            }
            Err(error) => {
                println!("skipped huge pages of {size} bytes: {error}");
                assert!(free_huge_pages(size) < 2);
                assert!(error.is_unavailable());
                assert!(error.context_value("nr_hugepages").is_some());
                assert!(error.remedy_text().unwrap().contains("nr_hugepages"));
            }
        }
    }
}

/// ARM-02
#[test]
fn huge_pages_of_a_size_that_the_kernel_lacks_are_refused() {
    let base = os_page_sizes()[0];
    for size in [0, 1, base, base + 1, 3 << 20, usize::MAX] {
        let error = System::new().huge_pages(1, size).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadPageSize);
        assert_eq!(error.context_value("page_size"), Some(size.to_string().as_str()));
        assert!(error.remedy_text().is_some());
    }
}

/// HM-06
#[test]
fn memory_file_export_outlives_its_allocation() {
    let system = System::new();
    let page = page() as usize;
    let whole = 12 * page + 848;
    let allocation = system.memfd(whole as u64).unwrap();
    let bytes = pattern(whole, 1);
    system.write_bytes(allocation.base(), &bytes).unwrap();
    let (start, len) = (page + 1, 2 * page + 1809);
    let end = start + len;
    let range = allocation.range.slice(start as u64, len as u64).unwrap();
    let export = system.export_dma_buf(range, &nic("loop0"), DmaBufMapping::Default).unwrap();
    assert_eq!((export.alloc_offset.0, export.len), (start as u64, len as u64));
    assert!(read_through_fd(&export) == bytes[start..end]);
    write_through_fd(&export, &vec![7; len]);
    let mut back = vec![0; whole];
    system.read_bytes(allocation.base(), &mut back).unwrap();
    assert!(back[..start] == bytes[..start] && back[end..] == bytes[end..]);
    assert!(back[start..end].iter().all(|byte| *byte == 7));
    free(&system, &allocation).unwrap();
    assert!(read_through_fd(&export).iter().all(|byte| *byte == 7));
    system.release_dma_buf(export).unwrap();
}

#[test]
fn memory_without_a_memory_file_is_not_exported() {
    let system = System::new();
    for allocation in [system.mmap(64).unwrap(), system.heap(64, 8).unwrap()] {
        let error = system
            .export_dma_buf(allocation.range, &nic("loop0"), DmaBufMapping::Default)
            .unwrap_err();
        assert!(error.is_unsupported() && error.remedy_text().is_some());
        assert!(!system.physical_segments(allocation.range).unwrap()[0].exportable);
    }
    let file = system.memfd(64).unwrap();
    let pcie = system.export_dma_buf(file.range, &nic("loop0"), DmaBufMapping::Pcie).unwrap_err();
    assert!(pcie.is_unsupported());
    assert!(system.physical_segments(file.range).unwrap()[0].exportable);
}

#[test]
fn a_memory_file_cannot_shrink_under_its_users() {
    let memory = MemFd::new(10_000).unwrap();
    assert_eq!((memory.len(), memory.range().len(), memory.is_empty()), (10_000, 10_000, false));
    assert!(rustix::fs::ftruncate(memory.as_fd(), 0).is_err());
    assert_eq!(memory.write(9_999, &[1, 2]).unwrap_err().kind(), ErrorKind::OutOfBounds);
    memory.write(9_998, &[1, 2]).unwrap();
    let mut last = [0; 2];
    memory.read(9_998, &mut last).unwrap();
    assert_eq!(last, [1, 2]);
}

#[test]
fn missing_facets_are_unsupported_with_a_reason() {
    let system =
        System::new().with_monitor(SystemMonitor::start(HostMonitorKind::Disabled).unwrap());
    let bytes = [0_u8; 8];
    let range = hmem_core::AddressRange::of(&bytes);
    let address = Address::of_ptr(bytes.as_ptr());
    let errors = [
        system.start_monitor().map(drop).unwrap_err(),
        system.export_peer_memory(range, &nic("loop0")).unwrap_err(),
        system.host_unregister(range).unwrap_err(),
        // SAFETY: the iface refuses the call before it accesses memory.
        unsafe { system.host_register(range) }.unwrap_err(),
        // SAFETY: the iface refuses the call before it accesses memory.
        unsafe { system.start_copy(address, address, 8) }.map(drop).unwrap_err(),
        try_allocate(&system, 64, AllocationKind::Device).unwrap_err(),
    ];
    for error in errors {
        assert!(error.is_unsupported() && error.remedy_text().is_some(), "{error}");
    }
    assert!(system.devices().unwrap().is_empty());
    system.flush_inbound(DeviceId(0)).unwrap();
    assert_eq!(system.mmap(0).unwrap_err().kind(), ErrorKind::ZeroLength);
    assert_eq!(system.heap(64, 3).unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(system.mmap(u64::MAX).unwrap_err().kind(), ErrorKind::OutOfResources);
}

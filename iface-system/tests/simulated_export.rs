//! Tests of exports to NICs: HM-06, HM-07, HM-08, HM-09, and the P2P matrix.

mod support;

use hmem_core::{
    Allocation, AllocationKind, DeviceId, Errno, ErrorKind, IfaceExt,
    iface::{AllocRequest, DmaBufExport, DmaBufMapping},
};
use hmem_iface_system::{AddressReuse, DmaBufKind, P2pMatrix, Simulated};
use support::*;

/// HM-06
///
/// The exported fd of an allocation's start has an offset above 0. So code that confuses offsets in
/// the allocation with offsets in the fd fails.
#[test]
fn in_a_memory_file_no_allocation_begins_at_offset_0() {
    let _turn = turn();
    let simulated = Simulated::builder().dma_buf(DmaBufKind::MemFd).build().unwrap();
    for len in [64, page(), 1 << 20, 200 << 20] {
        let allocation = device(&simulated, len);
        let export = simulated
            .export_dma_buf(allocation.range, &nic("loop0"), DmaBufMapping::Default)
            .unwrap();
        assert_eq!(export.alloc_offset.0, 0);
        assert!(export.offset.0 > 0 && export.offset.0.is_multiple_of(page()));
    }
}

/// HM-06
#[test]
fn many_exports_leak_no_fd() {
    let _turn = turn();
    // The iface does not notice that a genuine dma-buf is closed without a release.
    let simulated = Simulated::builder().dma_buf(DmaBufKind::MemFd).build().unwrap();
    let allocation = device(&simulated, 1 << 20);
    let before = open_fds();
    for i in 0..100_000_u64 {
        let range = allocation.range.slice(i * 7 % 1_000_000, 1 + i % 1000).unwrap();
        let export =
            simulated.export_dma_buf(range, &nic("loop0"), DmaBufMapping::Default).unwrap();
        if i % 2 == 0 {
            simulated.release_dma_buf(export).unwrap();
        }
    }
    assert_eq!(open_fds(), before);
    assert_eq!(simulated.stats().live_exports, 0);
}

/// HM-06
///
/// An exported fd keeps its bytes after the allocation is freed, as a dma-buf does. No later
/// allocation reuses that memory.
#[test]
fn export_outlives_its_allocation_and_keeps_its_bytes() {
    let _turn = turn();
    let simulated = Simulated::builder().address_reuse(AddressReuse::JustFreed).build().unwrap();
    let neighbour = device(&simulated, 4096);
    let allocation = device(&simulated, 4096);
    let bytes = pattern(4096, 6);
    simulated.write_bytes(allocation.base(), &bytes).unwrap();
    let export =
        simulated.export_dma_buf(allocation.range, &nic("loop0"), DmaBufMapping::Default).unwrap();
    free(&simulated, &allocation).unwrap();
    for _ in 0..5000 {
        let next = device(&simulated, 4096);
        assert_eq!(next.base(), allocation.base());
        simulated.write_bytes(next.base(), &[0x55; 4096]).unwrap();
        free(&simulated, &next).unwrap();
    }
    assert!(read_through_fd(&export) == bytes, "a stale registration moves stale bytes");
    simulated.release_dma_buf(export).unwrap();
    free(&simulated, &neighbour).unwrap();
    assert_eq!(simulated.stats().live_exports, 0);
}

/// HM-06
///
/// An open export keeps its bytes while thousands of other exports are created and closed.
#[test]
fn live_export_keeps_its_bytes_among_thousands_of_others() {
    let _turn = turn();
    let simulated = simulated();
    let neighbour = device(&simulated, 4096);
    let export_and_free = |fill: u8| {
        let allocation = device(&simulated, 4096);
        simulated.write_bytes(allocation.base(), &[fill; 4096]).unwrap();
        let export = simulated
            .export_dma_buf(allocation.range, &nic("loop0"), DmaBufMapping::Default)
            .unwrap();
        free(&simulated, &allocation).unwrap();
        export
    };
    let stays = export_and_free(1);
    for _ in 0..3000 {
        drop(export_and_free(2));
    }
    assert_eq!(read_through_fd(&stays), [1; 4096]);
    free(&simulated, &neighbour).unwrap();
}

/// HM-06
///
/// Exported memory is reused once its fds are closed.
#[test]
fn exported_memory_is_reused_after_its_last_user() {
    let _turn = turn();
    let simulated = Simulated::builder().arena(256 * page()).build().unwrap();
    let mut stay = Vec::new();
    for i in 0..20_000 {
        if i % 100 == 0 {
            // These allocations keep each memory file in use. An empty file would be dropped
            // instead of reused.
            stay.push(device(&simulated, 4096));
        }
        let allocation = device(&simulated, 4096);
        drop(
            simulated
                .export_dma_buf(allocation.range, &nic("loop0"), DmaBufMapping::Default)
                .unwrap(),
        );
        free(&simulated, &allocation).unwrap();
    }
    let files = simulated.stats().memory_files;
    assert!(files <= 4, "{files} memory files for 200 live pages");
}

/// HM-07
#[test]
fn a_virtual_allocation_lists_its_segments_and_exports_each() {
    let _turn = turn();
    let page = page();
    let simulated = Simulated::builder().segment_len(2 * page).build().unwrap();
    let allocation = allocate(&simulated, 8 * page - 2768, AllocationKind::Virtual);
    let bytes = pattern(allocation.range.len() as usize, 3);
    simulated.write_bytes(allocation.base(), &bytes).unwrap();

    let range = allocation.range.slice(1000, 6 * page + 424).unwrap();
    let segments = simulated.physical_segments(range).unwrap();
    let offsets: Vec<_> =
        segments.iter().map(|s| (s.range.start().0 - allocation.base().0, s.range.len())).collect();
    let expected =
        [(1000, 2 * page - 1000), (2 * page, 2 * page), (4 * page, 2 * page), (6 * page, 1424)];
    assert_eq!(offsets, expected);
    assert!(segments.iter().all(|segment| segment.exportable));
    let mut read = Vec::new();
    for segment in &segments {
        let export =
            simulated.export_dma_buf(segment.range, &nic("loop0"), DmaBufMapping::Default).unwrap();
        assert_eq!(export.alloc_offset.0, segment.range.start().0 - allocation.base().0);
        read.extend(read_through_fd(&export));
    }
    assert!(read == bytes[1000..6 * page as usize + 1424]);
}

/// HM-07
#[test]
fn an_export_across_segments_is_refused_naming_the_first() {
    let _turn = turn();
    let page = page();
    let simulated = Simulated::builder().segment_len(2 * page).build().unwrap();
    let allocation = allocate(&simulated, 8 * page - 2768, AllocationKind::Virtual);
    let range = allocation.range.slice(2 * page - 192, 2 * page).unwrap();
    let error = simulated.export_dma_buf(range, &nic("loop0"), DmaBufMapping::Default).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let first = allocation.range.slice(2 * page - 192, 192).unwrap();
    assert_eq!(error.context_value("segment"), Some(first.to_string().as_str()));
}

/// HM-07
#[test]
fn unexportable_segment_is_refused_and_others_export() {
    let _turn = turn();
    let page = page();
    let simulated = Simulated::builder().segment_len(page).build().unwrap();
    let allocation = allocate(&simulated, 3 * page, AllocationKind::Virtual);
    simulated.set_exportable(at(&allocation, page + 904), false).unwrap();
    let segments = simulated.physical_segments(allocation.range).unwrap();
    assert_eq!(segments.iter().map(|s| s.exportable).collect::<Vec<_>>(), [true, false, true]);
    for segment in segments {
        let export = simulated.export_dma_buf(segment.range, &nic("loop0"), DmaBufMapping::Default);
        match export {
            Ok(_) => assert!(segment.exportable),
            Err(error) => {
                assert!(!segment.exportable && error.is_unsupported());
                assert_eq!(
                    error.context_value("segment"),
                    Some(segment.range.to_string().as_str())
                );
            }
        }
    }
    free(&simulated, &allocation).unwrap();
    assert_eq!(
        simulated.set_exportable(allocation.base(), true).unwrap_err().kind(),
        ErrorKind::OutOfBounds
    );
}

#[test]
fn segments_of_more_than_one_allocation_are_refused() {
    let _turn = turn();
    let simulated = simulated();
    let (one, two) = (device(&simulated, 4096), device(&simulated, 100));
    let both = hmem_core::AddressRange::new(one.base(), 4196).unwrap();
    assert_eq!(simulated.physical_segments(one.range).unwrap()[0].range, one.range);
    assert_eq!(simulated.physical_segments(two.range).unwrap()[0].range, two.range);
    assert_eq!(simulated.physical_segments(both).unwrap_err().kind(), ErrorKind::OutOfBounds);
    let export = simulated.export_dma_buf(both, &nic("loop0"), DmaBufMapping::Default);
    assert_eq!(export.unwrap_err().kind(), ErrorKind::OutOfBounds);
}

/// HM-08
#[test]
fn managed_and_host_memory_refuse_dma_buf_with_remedy() {
    let _turn = turn();
    let simulated = simulated();
    for kind in [AllocationKind::Managed, AllocationKind::Host] {
        let allocation = allocate(&simulated, 4096, kind);
        let error = simulated
            .export_dma_buf(allocation.range, &nic("loop0"), DmaBufMapping::Default)
            .unwrap_err();
        assert!(error.is_unsupported());
        assert!(error.remedy_text().unwrap().contains("host pages"), "{error}");
    }
}

/// HM-09
#[test]
fn the_pcie_mapping_is_honoured_or_refused_as_configured() {
    let _turn = turn();
    for honoured in [true, false] {
        let simulated = Simulated::builder().pcie_mapping(honoured).build().unwrap();
        assert_eq!(simulated.capability().pcie_mapping, honoured);
        let allocation = device(&simulated, 4096);
        let export = simulated.export_dma_buf(allocation.range, &nic("loop0"), DmaBufMapping::Pcie);
        match export {
            Ok(export) => assert!(honoured && export.mapping == DmaBufMapping::Pcie),
            Err(error) => {
                assert!(!honoured && error.is_unsupported());
                assert_eq!(error.os_errno(), Some(Errno(95)));
            }
        }
        let plain = simulated
            .export_dma_buf(allocation.range, &nic("loop0"), DmaBufMapping::Default)
            .unwrap();
        assert_eq!(plain.mapping, DmaBufMapping::Default);
    }
}

#[test]
fn export_for_an_unreachable_nic_is_refused() {
    let _turn = turn();
    let matrix = P2pMatrix::all_reachable().block(DeviceId(1), "loop1");
    let simulated = Simulated::builder().devices(2).p2p(matrix).peer_memory(true).build().unwrap();
    for (number, name) in [(0, "loop0"), (0, "loop1"), (1, "loop0"), (1, "loop1")] {
        let request =
            AllocRequest { len: 64, device: DeviceId(number), kind: AllocationKind::Device };
        let allocation = simulated.allocate(&request).unwrap();
        let by_fd = simulated
            .export_dma_buf(allocation.range, &nic(name), DmaBufMapping::Default)
            .map(drop);
        let by_address = simulated.export_peer_memory(allocation.range, &nic(name)).map(drop);
        for result in [by_fd, by_address] {
            let Err(error) = result else {
                assert!((number, name) != (1, "loop1"));
                continue;
            };
            assert_eq!((number, name), (1, "loop1"));
            assert_eq!(error.kind(), ErrorKind::Unreachable);
            assert_eq!(error.os_errno(), Some(Errno(524)));
            assert_eq!(error.context_value("nic"), Some("test/loop1"));
            assert!(error.remedy_text().is_some());
        }
    }
}

#[test]
fn peer_memory_and_dma_bufs_can_each_be_missing() {
    let _turn = turn();
    let simulated = Simulated::builder().dma_buf(DmaBufKind::None).build().unwrap();
    let allocation = device(&simulated, 64);
    assert!(!simulated.capability().dma_buf && !simulated.capability().peer_memory);
    let by_fd = simulated.export_dma_buf(allocation.range, &nic("loop0"), DmaBufMapping::Default);
    assert!(by_fd.unwrap_err().is_unsupported());
    assert!(
        simulated.export_peer_memory(allocation.range, &nic("loop0")).unwrap_err().is_unsupported()
    );
}

#[test]
fn genuine_dma_bufs_need_udmabuf() {
    let _turn = turn();
    match Simulated::builder().dma_buf(DmaBufKind::Udmabuf).build() {
        Ok(simulated) => {
            let page = page();
            let allocation = device(&simulated, page + 5904);
            let bytes = pattern(page as usize + 5904, 1);
            simulated.write_bytes(allocation.base(), &bytes).unwrap();
            let range = allocation.range.slice(page + 4, 5000).unwrap();
            let export =
                simulated.export_dma_buf(range, &nic("loop0"), DmaBufMapping::Default).unwrap();
            assert_eq!(export.offset.0, 4);
            assert!(read_through_fd(&export) == bytes[page as usize + 4..][..5000]);
        }
        Err(error) => {
            println!("skipped the content of dma-bufs: {error}");
            assert!(error.remedy_text().unwrap().contains("udmabuf"));
        }
    }
}

/// LIFE-07: a revocation reaches the dma-bufs that were exported before it, and no others.
#[test]
fn revocation_ends_earlier_exports_of_the_allocation_only() {
    let _turn = turn();
    let simulated = simulated();
    let (allocation, other) = (device(&simulated, page()), device(&simulated, page()));
    let nic = nic("nic0");
    let export =
        |of: &Allocation| simulated.export_dma_buf(of.range, &nic, DmaBufMapping::Default).unwrap();
    let is_revoked = |export: &DmaBufExport| export.revocation.as_ref().unwrap().is_revoked();
    assert!(!simulated.revoke_exports(allocation.base()).unwrap(), "nothing was exported");
    let (first, second, kept) = (export(&allocation), export(&allocation), export(&other));
    assert!(simulated.revoke_exports(allocation.base()).unwrap());
    let later = export(&allocation);
    assert_eq!([&first, &second, &kept, &later].map(is_revoked), [true, true, false, false]);
    for export in [first, second, kept, later] {
        simulated.release_dma_buf(export).unwrap();
    }
}

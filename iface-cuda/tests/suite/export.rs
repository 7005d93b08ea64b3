//! Tests of exports of memory to NICs.

use std::os::fd::AsFd;

use hmem_core::{
    AddressRange, AllocOffset, AllocationKind, ErrorKind, IfaceExt, Mapping, iface::DmaBufMapping,
};
use hmem_fake_cuda::Profile;
use hmem_iface_cuda::sys::{self, CuResult};
use rustix::mm::ProtFlags;

use crate::world::{
    Expandable, HeldCopies, World, check, each, nic, not_over_a_gpu, once, open_fds, over, page,
    pattern,
};

/// Returns the bytes of an exported dma-buf, read through a CPU mapping. Returns `None` if the
/// dma-buf cannot be mapped.
fn read_through_mapping(fd: &impl AsFd, offset: u64, len: usize) -> Option<Vec<u8>> {
    let inside = (offset % page()) as usize;
    let mapping =
        Mapping::shared(fd, offset - inside as u64, inside + len, ProtFlags::READ).ok()?;
    // SAFETY: the bytes lie in the mapping, and nothing writes them while the slice lives.
    let bytes = unsafe { std::slice::from_raw_parts(mapping.as_ptr().add(inside), len) };
    Some(bytes.to_vec())
}

/// HM-06
#[test]
fn exports_reach_exactly_their_bytes_at_any_offset() {
    each(|world| {
        if !world.exports_dma_bufs() {
            not_over_a_gpu("the device has no dma-bufs");
            return;
        }
        // Allocations before and after share pages with the exported memory, so that its offset in
        // the dma-buf is not 0.
        let around = [1000, 3000].map(|len| world.allocate(len, AllocationKind::Device));
        for kind in [AllocationKind::Device, AllocationKind::Virtual] {
            if kind == AllocationKind::Virtual && world.no_rdma_to_vmm() {
                continue;
            }
            let memory = world.allocate(100_000, kind);
            let bytes = pattern(6, 100_000);
            world.cuda.write_bytes(memory.base(), &bytes).expect("write");
            for (offset, len) in
                [(0, 1), (1, 4096), (4095, 2), (12_345, 777), (99_999, 1), (0, 100_000)]
            {
                let range = memory.range.slice(offset, len).expect("a part");
                let export = world
                    .cuda
                    .export_dma_buf(range, &nic(), DmaBufMapping::Default)
                    .expect("export");
                assert_eq!((export.alloc_offset, export.len), (AllocOffset(offset), len));
                assert_eq!(
                    export.offset.0,
                    range.start().0 % page(),
                    "page-rounded: {}",
                    world.name
                );
                let flags = rustix::io::fcntl_getfd(&export.fd).expect("an open fd");
                assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
                match read_through_mapping(&export.fd, export.offset.0, len as usize) {
                    Some(found) => assert!(
                        found == bytes[offset as usize..(offset + len) as usize],
                        "{}: {len} bytes at {offset} of {kind:?}",
                        world.name
                    ),
                    None => assert!(
                        !world.maps_dma_bufs()
                            && not_over_a_gpu(
                                "the dma-buf cannot be mapped: its bytes are not checked"
                            ),
                        "the device reports that they can be mapped"
                    ),
                }
                world.cuda.release_dma_buf(export).expect("release");
            }
            world.free(&memory);
        }
        for one in &around {
            world.free(one);
        }
    });
}

/// HM-06
#[test]
fn empty_or_too_long_range_is_not_exported() {
    each(|world| {
        let memory = world.allocate(4096, AllocationKind::Device);
        let past =
            AddressRange::new(memory.base(), memory.range.len() + (64 << 20)).expect("a range");
        let empty = memory.range.slice(0, 0).expect("empty");
        for (range, kind) in [(past, ErrorKind::OutOfBounds), (empty, ErrorKind::ZeroLength)] {
            let dma_buf = world
                .cuda
                .export_dma_buf(range, &nic(), DmaBufMapping::Default)
                .expect_err("refused");
            let peer = world.cuda.export_peer_memory(range, &nic()).expect_err("refused");
            assert_eq!((dma_buf.kind(), peer.kind()), (kind, kind), "{}: {dma_buf}", world.name);
        }
        world.free(&memory);
        let error = world
            .cuda
            .export_dma_buf(memory.range, &nic(), DmaBufMapping::Default)
            .expect_err("freed");
        assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{}: {error}", world.name);
    });
}

/// HM-06
///
/// Many exports leave no fd open. The test runs in a process of its own, since other tests open fds
/// too.
#[test]
fn many_exports_leave_no_fd_open() {
    leave_no_fd("export::many_exports_leave_no_fd_open", 20_000);
}

/// HM-06
///
/// A million exports of an allocation leave no fd open. The test belongs to the slow tier.
#[test]
#[ignore = "slow: a million exports"]
fn a_million_exports_leave_no_fd() {
    leave_no_fd("export::a_million_exports_leave_no_fd", 1_000_000);
}

fn leave_no_fd(name: &str, rounds: u64) {
    if crate::child::passed().is_none() {
        return crate::child::run(name, "");
    }
    once(|world| {
        if !world.exports_dma_bufs() {
            not_over_a_gpu("the device has no dma-bufs");
            return;
        }
        let memory = world.allocate(65_536, AllocationKind::Device);
        let export = |n: u64| {
            let range = memory.range.slice(n % 7 * 4096, 1 + n % 5000).expect("a part");
            let export =
                world.cuda.export_dma_buf(range, &nic(), DmaBufMapping::Default).expect("export");
            world.cuda.release_dma_buf(export).expect("release");
        };
        export(0);
        // The fake keeps one file for each of the few parts of the memory.
        let before = open_fds();
        (0..rounds).for_each(export);
        assert!(
            open_fds() <= before + 16,
            "{} fds after {rounds} exports, {before} before",
            open_fds()
        );
        world.free(&memory);
    });
}

/// HM-08, HM-07
///
/// The export of host or managed memory as device memory is refused with a remedy.
#[test]
fn host_and_managed_memory_is_not_exported_and_has_a_remedy() {
    each(|world| {
        for (kind, word) in
            [(AllocationKind::Managed, "migrates"), (AllocationKind::Host, "host memory")]
        {
            if world.kinds(&[kind]).is_empty() {
                continue;
            }
            let memory = world.allocate(10_000, kind);
            for error in [
                world
                    .cuda
                    .export_dma_buf(memory.range, &nic(), DmaBufMapping::Default)
                    .expect_err("refused"),
                world.cuda.export_peer_memory(memory.range, &nic()).expect_err("refused"),
            ] {
                assert!(
                    error.is_unsupported() && error.to_string().contains(word),
                    "{}: {error}",
                    world.name
                );
                assert!(error.remedy_text().is_some(), "{error}");
            }
            let segments = world.cuda.physical_segments(memory.range).expect("segments");
            assert!(segments.len() == 1 && !segments[0].exportable);
            world.free(&memory);
        }
    });
}

/// HM-07
#[test]
fn first_unexportable_segment_is_named() {
    each(|world| {
        if world.no_rdma_to_vmm() {
            return;
        }
        let parts = [Some(true), Some(false), Some(false)];
        let memory = Expandable::new(&mut world.app, &parts);
        if world.reaches_anything(memory.base + memory.step) {
            return memory.end(&mut world.app, &parts);
        }
        let whole = memory.range(0, 3 * memory.step);
        let error = world.cuda.export_peer_memory(whole, &nic()).expect_err("refused");
        let first = memory.range(memory.step, memory.step).to_string();
        assert_eq!(error.context_value("segment"), Some(first.as_str()), "{}: {error}", world.name);
        assert!(
            error.remedy_text().is_some_and(|remedy| remedy.contains("gpuDirectRDMACapable")),
            "{error}"
        );
        if world.exports_dma_bufs() {
            let second = memory.range(memory.step, memory.step);
            let error = world
                .cuda
                .export_dma_buf(second, &nic(), DmaBufMapping::Default)
                .expect_err("refused");
            assert!(error.is_unsupported(), "{error}");
        }
        memory.end(&mut world.app, &parts);
    });
}

/// HM-09
///
/// Only the result of an export shows whether the driver has the PCIe mapping.
#[test]
fn pcie_mapping_is_used_or_unsupported() {
    for (profile, code) in [
        (Profile::named("535-open").expect("a profile"), Some(CuResult::CUDA_ERROR_INVALID_VALUE)),
        (
            Profile { pcie_mapping: false, ..Profile::default() },
            Some(CuResult::CUDA_ERROR_NOT_SUPPORTED),
        ),
        (Profile::default(), None),
    ] {
        over(profile, |world| {
            let memory = world.allocate(4096, AllocationKind::Device);
            let export = world.cuda.export_dma_buf(memory.range, &nic(), DmaBufMapping::Pcie);
            match (export, code) {
                (Ok(export), None) => {
                    assert_eq!(export.mapping, DmaBufMapping::Pcie);
                    world.cuda.release_dma_buf(export).expect("release");
                }
                (Err(error), Some(code)) => {
                    assert!(error.is_unsupported(), "{error}");
                    assert_eq!(error.driver().expect("code").code, i64::from(code.0));
                    assert_eq!(error.context_value("mapping"), Some("pcie"));
                }
                (other, _) => panic!("{}: {other:?}", world.name),
            }
            world
                .cuda
                .export_dma_buf(memory.range, &nic(), DmaBufMapping::Default)
                .expect("without it");
            world.free(&memory);
        });
    }
}

/// HM-06
#[test]
fn export_sets_sync_memops() {
    over(Profile::default(), |world| {
        let memory = world.allocate(4096, AllocationKind::Device);
        assert!(!world.driver().sync_memops(memory.base().0));
        world.cuda.export_peer_memory(memory.range, &nic()).expect("export");
        assert!(world.driver().sync_memops(memory.base().0));
        assert_eq!(world.driver().context_flags(0), 0, "the flag of the allocation is enough");
        world.free(&memory);
        let memory = world.allocate(4096, AllocationKind::Virtual);
        let export = world
            .cuda
            .export_dma_buf(memory.range, &nic(), DmaBufMapping::Default)
            .expect("export");
        world.cuda.release_dma_buf(export).expect("release");
        assert_eq!(
            world.driver().context_flags(0),
            sys::CU_CTX_SYNC_MEMOPS,
            "VMM memory has no flag of its own"
        );
        world.free(&memory);
    });
}

/// HM-06
///
/// For memory that cannot have the attribute SYNC_MEMOPS, an export sets the flag SYNC_MEMOPS of
/// the memory's context instead.
#[test]
fn memory_without_sync_memops_sets_the_flag_of_its_context() {
    for peer_memory in [false, true] {
        over(Profile { allocates_by_vmm: true, ..Profile::default() }, |world| {
            let memory = world.allocate(4096, AllocationKind::Device);
            if peer_memory {
                world.cuda.export_peer_memory(memory.range, &nic()).expect("export");
            } else {
                let export =
                    world.cuda.export_dma_buf(memory.range, &nic(), DmaBufMapping::Default);
                world.cuda.release_dma_buf(export.expect("export")).expect("release");
            }
            assert!(!world.driver().sync_memops(memory.base().0));
            assert_eq!(world.driver().context_flags(0), sys::CU_CTX_SYNC_MEMOPS);
            world.free(&memory);
        });
    }
    // For memory of `cuMemAlloc`, INVALID_VALUE means that the memory was freed.
    over(Profile::default(), |world| {
        let memory = world.allocate(4096, AllocationKind::Device);
        world.driver().fail("cuPointerSetAttribute", CuResult::CUDA_ERROR_INVALID_VALUE);
        let error =
            world.cuda.export_peer_memory(memory.range, &nic()).expect_err("the memory was freed");
        assert_eq!(error.context_value("attribute"), Some("SYNC_MEMOPS"), "{error}");
        assert_eq!(world.driver().context_flags(0), 0);
        world.free(&memory);
    });
}

/// HM-06
///
/// A refused export does not set the SYNC_MEMOPS flag of the context.
#[test]
fn refused_export_of_stream_ordered_memory_sets_no_flag() {
    over(Profile::default(), |world| {
        let memory = world.allocate(100_000, AllocationKind::StreamOrdered);
        assert!(
            world.cuda.physical_segments(memory.range).expect("segments")[0].exportable,
            "the driver is asked"
        );
        let error = world
            .cuda
            .export_dma_buf(memory.range, &nic(), DmaBufMapping::Default)
            .expect_err("refused");
        assert_eq!(error.driver().expect("the driver's own code").code, 801, "{error}");
        assert_eq!(world.driver().context_flags(0), 0);
        let error = world.cuda.export_peer_memory(memory.range, &nic()).expect_err("refused");
        assert_eq!(error.context_value("attribute"), Some("IS_GPU_DIRECT_RDMA_CAPABLE"), "{error}");
        world.free(&memory);
    });
}

/// HM-06
///
/// An export of memory without a context sets the SYNC_MEMOPS flags of all contexts that may work
/// on the memory.
#[test]
fn memory_without_a_context_sets_the_flags_of_its_contexts() {
    for peer_memory in [false, true] {
        over(Profile::default(), |world| {
            let parts = [Some(true)];
            let first = world.app.create_context();
            let memory = Expandable::here(&world.app.functions, &parts);
            let range = memory.range(0, 4096);
            let export = |world: &World| {
                if peer_memory {
                    world.cuda.export_peer_memory(range, &nic()).expect("peer memory");
                } else {
                    world
                        .cuda
                        .export_dma_buf(range, &nic(), DmaBufMapping::Default)
                        .expect("export");
                }
            };
            export(world);
            assert_eq!(world.driver().flags_of(first), sys::CU_CTX_SYNC_MEMOPS);
            assert!(world.active().is_empty());
            // The next export sets the flags of the thread's new context and of the active primary
            // context.
            world.app.current(|_| ());
            let second = world.app.create_context();
            export(world);
            assert_eq!(world.driver().flags_of(second), sys::CU_CTX_SYNC_MEMOPS);
            assert_eq!(world.driver().context_flags(0), sys::CU_CTX_SYNC_MEMOPS);
            world.app.release_primary_context();
            assert_eq!(world.active(), [0], "it stays retained with its flag");
            world.app.destroy_context(second);
            memory.end_here(&world.app.functions, &parts);
            world.app.destroy_context(first);
        });
    }
}

/// HM-06
///
/// The export waits for operations that began before the SYNC_MEMOPS flag of the context was set.
#[test]
fn export_waits_for_copies_on_the_default_stream() {
    over(Profile { slow_copies: true, ..Profile::default() }, |world| {
        let parts = [Some(true)];
        let context = world.app.create_context();
        let memory = Expandable::here(&world.app.functions, &parts);
        let bytes = pattern(3, 1000);
        let from = bytes.as_ptr().expose_provenance() as u64;
        // SAFETY: source and destination stay valid until the copy has ended below.
        let code = unsafe {
            (world.app.functions.memcpy_async())(memory.base, from, 1000, sys::CuStream::NULL)
        };
        check(code);
        // SAFETY: the memory is live, and no other copy accesses it.
        let found = || unsafe {
            std::slice::from_raw_parts(hmem_fake_cuda::reach(memory.base), 1000).to_vec()
        };
        assert_eq!(found(), [0; 1000], "in flight");
        let export =
            world.cuda.export_dma_buf(memory.range(0, 4096), &nic(), DmaBufMapping::Default);
        world.cuda.release_dma_buf(export.expect("export")).expect("release");
        assert!(found() == bytes, "the copy has ended");
        memory.end_here(&world.app.functions, &parts);
        world.app.destroy_context(context);
    });
}

/// HM-06
///
/// If the wait for earlier operations is refused, as during a stream capture, the export fails and
/// clears the flag. So the next export waits again.
#[test]
fn refused_wait_leaves_the_context_without_sync_memops() {
    over(Profile { slow_copies: true, ..Profile::default() }, |world| {
        let memory = world.allocate(4096, AllocationKind::Virtual);
        let waits = || world.driver().calls("cuStreamSynchronize");
        let before = waits();
        world.driver().fail("cuStreamSynchronize", CuResult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        let error = world.cuda.export_peer_memory(memory.range, &nic()).expect_err("refused");
        assert_eq!(error.operation(), "cuStreamSynchronize");
        assert_eq!(world.driver().context_flags(0), 0, "the flag is cleared");
        world.cuda.export_peer_memory(memory.range, &nic()).expect("export");
        assert_eq!(world.driver().context_flags(0), sys::CU_CTX_SYNC_MEMOPS);
        world.cuda.export_peer_memory(memory.range, &nic()).expect("export");
        assert_eq!(waits() - before, 2, "each export waits until a wait has succeeded");
        world.free(&memory);
    });
}

/// HM-06
///
/// An export that finds the flag set by another thread returns after the wait of that thread.
#[test]
fn export_waits_for_another_exports_wait() {
    over(Profile::default(), |world| {
        let memory = world.allocate(4096, AllocationKind::Virtual);
        let (driver, cuda) = (world.driver(), &world.cuda);
        let export = || cuda.export_peer_memory(memory.range, &nic()).expect("export");
        std::thread::scope(|scope| {
            let held = driver.hold("cuStreamSynchronize");
            let first = scope.spawn(export);
            held.wait_for(1);
            let calls = driver.calls("cuPointerSetAttribute");
            let second = scope.spawn(export);
            while driver.calls("cuPointerSetAttribute") == calls {
                std::thread::yield_now();
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
            assert!(!second.is_finished(), "it did not wait");
            drop(held);
            first.join().expect("no panic");
            second.join().expect("no panic");
        });
        world.free(&memory);
    });
}

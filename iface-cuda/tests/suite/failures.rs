//! Tests of the driver's refusals: the iface returns an error and leaks nothing.

use hmem_core::{
    Address, AllocationKind, DeviceId, ErrorKind, Iface, IfaceExt,
    iface::{AllocRequest, DmaBufMapping},
};
use hmem_fake_cuda::Profile;
use hmem_iface_cuda::sys::CuResult;

use crate::world::{HeldCopies, World, nic, over};

/// DIAG-03
#[test]
fn lost_device_is_unavailable_at_every_operation() {
    let world = World::fake(Profile::default());
    let memory = world.allocate(4096, AllocationKind::Device);
    for code in [
        CuResult::CUDA_ERROR_ILLEGAL_ADDRESS,
        CuResult::CUDA_ERROR_ECC_UNCORRECTABLE,
        CuResult::CUDA_ERROR_LAUNCH_FAILED,
    ] {
        world.driver().lose_device(code);
        for error in [
            world.cuda.query(memory.base()).expect_err("lost"),
            world.cuda.write_bytes(memory.base(), &[1]).expect_err("lost"),
            world
                .cuda
                .export_dma_buf(memory.range, &nic(), DmaBufMapping::Default)
                .expect_err("lost"),
            // SAFETY: no code uses the memory; the call is refused.
            unsafe { world.cuda.free(&memory) }.expect_err("lost"),
        ] {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            assert_eq!(error.driver().expect("code").code, i64::from(code.0));
            assert!(
                error.remedy_text().is_some_and(|remedy| remedy.contains("end the process")),
                "{error}"
            );
        }
        world.driver().heal();
    }
    world.free(&memory);
    world.cuda.query(Address(0)).expect("the device works again");
    world.end();
}

/// DIAG-03
#[test]
fn out_of_memory_names_device_length_and_remedy() {
    over(Profile { memory: 64 << 20, ..Profile::default() }, |world| {
        for kind in [
            AllocationKind::Device,
            AllocationKind::Managed,
            AllocationKind::StreamOrdered,
            AllocationKind::Virtual,
        ] {
            let request = AllocRequest { len: 65 << 20, device: DeviceId(1), kind };
            let error = world.cuda.allocate(&request).expect_err("more memory than the device has");
            assert_eq!(error.kind(), ErrorKind::OutOfResources, "{kind:?}: {error}");
            assert_eq!(error.driver().expect("code").name, "CUDA_ERROR_OUT_OF_MEMORY");
            assert!(format!("{error:#}").contains("device=1"), "{error:#}");
            assert_eq!(error.context_value("length"), Some("68157440"));
            assert!(error.remedy_text().is_some());
        }
    });
}

/// DIAG-03
///
/// Each cause of a refused export gives the error its own remedy.
#[test]
fn each_cause_of_a_refused_export_has_its_remedy() {
    let closed = Profile::named("550-closed").expect("a profile");
    over(closed, |world| {
        let memory = world.allocate(4096, AllocationKind::Device);
        let error = world
            .cuda
            .export_dma_buf(memory.range, &nic(), DmaBufMapping::Default)
            .expect_err("closed module");
        assert!(error.is_unsupported(), "{error}");
        assert!(
            error.remedy_text().is_some_and(|remedy| remedy.contains("open kernel modules")),
            "{error}"
        );
        assert!(!world.cuda.capability().dma_buf);
        world.free(&memory);
    });
    over(Profile { rdma: false, ..Profile::default() }, |world| {
        let memory = world.allocate(4096, AllocationKind::Device);
        let error =
            world.cuda.export_peer_memory(memory.range, &nic()).expect_err("no GPUDirect RDMA");
        assert!(error.is_unsupported() && error.remedy_text().is_some(), "{error}");
        world.free(&memory);
    });
    over(
        Profile { absent: vec!["cuMemGetHandleForAddressRange"], ..Profile::default() },
        |world| {
            let memory = world.allocate(4096, AllocationKind::Device);
            let error = world
                .cuda
                .export_dma_buf(memory.range, &nic(), DmaBufMapping::Default)
                .expect_err("older");
            assert!(error.is_unsupported(), "{error}");
            assert_eq!(error.context_value("symbol"), Some("cuMemGetHandleForAddressRange"));
            assert!(error.remedy_text().is_some_and(|remedy| remedy.contains("driver")), "{error}");
            world.free(&memory);
        },
    );
    for (code, kind, word) in [
        (CuResult::CUDA_ERROR_OUT_OF_MEMORY, ErrorKind::OutOfResources, "BAR1"),
        (CuResult::CUDA_ERROR_NOT_SUPPORTED, ErrorKind::Unsupported, "cuMemAlloc"),
        (CuResult::CUDA_ERROR_INVALID_VALUE, ErrorKind::InvalidArgument, "map the whole range"),
        (CuResult::CUDA_ERROR_OPERATING_SYSTEM, ErrorKind::Driver, "ulimit -n"),
        (CuResult::CUDA_ERROR_INVALID_CONTEXT, ErrorKind::BadState, "context"),
    ] {
        over(Profile::default(), |world| {
            let memory = world.allocate(4096, AllocationKind::Device);
            world.driver().fail("cuMemGetHandleForAddressRange", code);
            let error = world
                .cuda
                .export_dma_buf(memory.range, &nic(), DmaBufMapping::Default)
                .expect_err("refused");
            assert_eq!(error.kind(), kind, "{error}");
            assert!(
                error.remedy_text().is_some_and(|remedy| remedy.contains(word)),
                "{code:?}: {error}"
            );
            assert!(error.context_value("range").is_some() && error.context_value("nic").is_some());
            world.free(&memory);
        });
    }
}

/// REL-01
///
/// If the driver refuses a step of freeing VMM memory, the iface returns an error for any code. The
/// next call does not repeat the steps that succeeded.
#[test]
fn refused_free_of_vmm_memory_continues_at_the_refused_step() {
    for code in [CuResult::CUDA_ERROR_INVALID_VALUE, CuResult::CUDA_ERROR_UNKNOWN] {
        over(Profile::default(), |world| {
            let memory = world.allocate(4096, AllocationKind::Virtual);
            let steps = ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"];
            for symbol in steps {
                world.driver().fail(symbol, code);
                // SAFETY: no code uses the memory any longer.
                let error = unsafe { world.cuda.free(&memory) }.expect_err("the driver refused");
                assert_eq!(
                    (error.operation(), error.driver().expect("code").code),
                    (symbol, code.0.into())
                );
                assert_eq!(world.driver().live().handles, 1, "{symbol}");
            }
            world.free(&memory);
            assert_eq!(steps.map(|symbol| world.driver().calls(symbol)), [2, 2, 2]);
        });
    }
}

/// HM-01
///
/// Stream-ordered memory is not allocated if the library lacks the function that allocates or frees
/// it.
#[test]
fn library_without_a_stream_ordered_free_allocates_none() {
    for symbol in ["cuMemAllocAsync", "cuMemFreeAsync"] {
        over(Profile { absent: vec![symbol], ..Profile::default() }, |world| {
            let kind = AllocationKind::StreamOrdered;
            let request = AllocRequest { len: 4096, device: DeviceId(0), kind };
            let error = world.cuda.allocate(&request).expect_err("a symbol is missing");
            assert!(error.is_unsupported(), "{error}");
            assert_eq!(error.context_value("symbol"), Some(symbol));
            assert_eq!(world.driver().calls("cuMemAllocAsync"), 0);
        });
    }
}

/// HM-01
#[test]
fn double_free_is_refused_and_names_the_identity() {
    crate::world::each(|world| {
        let memory = world.allocate(2 << 20, AllocationKind::Device);
        world.free(&memory);
        // SAFETY: no code uses the memory; the call is refused.
        let error = unsafe { world.cuda.free(&memory) }.expect_err("freed already");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(error.context_value("identity"), Some(memory.id.0.to_string().as_str()));
        // A new allocation at the address does not make a second free of the old allocation valid.
        let again = world.allocate(2 << 20, AllocationKind::Device);
        // SAFETY: no code uses the memory; the call is refused.
        unsafe { world.cuda.free(&memory) }.expect_err("freed already");
        world.free(&again);
    });
}

//! What comes back when the driver refuses, and that nothing stays behind.

use std::collections::BTreeSet;

use hmem_core::{
    Address, AllocationKind, DeviceId, Error, ErrorKind, Iface, IfaceExt, Result,
    iface::{AllocRequest, DmaBufMapping},
};
use hmem_fake_cuda::Profile;
use hmem_iface_cuda::{
    Cuda,
    sys::{CuResult, Functions},
};

use crate::world::{World, nic, open_fds, over, pattern};

/// Something of every operation that reaches the driver, in an order that ends with nothing taken. What was taken is
/// given back on an error too, so that what is left is the iface's own doing.
fn everything(cuda: &Cuda) -> Result<()> {
    let mut first: Result<()> = Ok(());
    let mut note = |result: Result<()>| {
        if first.is_ok() {
            first = result;
        }
    };
    note(cuda.query(Address(0)).map(drop));
    for kind in [
        AllocationKind::Device,
        AllocationKind::Host,
        AllocationKind::Managed,
        AllocationKind::StreamOrdered,
        AllocationKind::Virtual,
    ] {
        let request = AllocRequest { len: 10_000, device: DeviceId(1), kind };
        let memory = match cuda.allocate(&request) {
            Ok(memory) => memory,
            Err(error) => {
                note(Err(error));
                continue;
            }
        };
        let bytes = pattern(1, 10_000);
        let mut back = vec![0u8; 10_000];
        note(cuda.write(memory.base(), &bytes));
        note(cuda.read(memory.base(), &mut back));
        // SAFETY: the host side outlives the event, which is waited for.
        note(unsafe { cuda.copy_async(memory.base(), Address::of_ptr(bytes.as_ptr()), 10_000) }.and_then(
            |event| {
                let _ = event.is_done();
                event.wait()
            },
        ));
        note(cuda.segments(memory.range).map(drop));
        if matches!(kind, AllocationKind::Device | AllocationKind::Virtual) {
            for mapping in [DmaBufMapping::Pcie, DmaBufMapping::Default] {
                let export = cuda.export_dma_buf(memory.range, &nic(), mapping);
                note(export.and_then(|export| cuda.release_dma_buf(export)));
            }
            note(cuda.export_peer_memory(memory.range, &nic()).map(drop));
        }
        if kind == AllocationKind::Device {
            note(cuda.ipc_export(&memory).map(drop));
        }
        // SAFETY: nobody uses it any longer.
        let freed = unsafe { cuda.free(&memory) };
        if freed.is_err() {
            // SAFETY: as above. A free that was refused can be tried again; one that was done is not live.
            let again = unsafe { cuda.free(&memory) };
            assert!(again.is_ok() || again.is_err_and(|error| error.kind() == ErrorKind::InvalidArgument));
        }
        note(freed);
    }
    let host = vec![0u8; 3 << 12];
    let start = Address(Address::of_ptr(host.as_ptr()).0.next_multiple_of(4096));
    let range = hmem_core::AddressRange::new(start, 8192)?;
    // SAFETY: `host` outlives the registration.
    match unsafe { cuda.host_register(range) } {
        Ok(()) => {
            let ended = cuda.host_unregister(range);
            if ended.is_err() {
                let _ = cuda.host_unregister(range);
            }
            note(ended);
        }
        Err(error) => note(Err(error)),
    }
    note(cuda.flush_inbound(DeviceId(0)));
    first
}

fn functions(world: &World) -> Functions {
    world.app.functions.clone()
}

/// REL-01: each driver call in turn fails, at its first, second and every later use; an error comes back, nothing is
/// left, and the next round works.
#[test]
fn rel_01_a_fault_at_every_driver_call_is_an_error_and_leaves_nothing() {
    let absent_from_the_round = BTreeSet::from([
        // Asked by nobody: names and texts of codes are known, other processes and retained handles have their own tests.
        "cuGetErrorName",
        "cuGetErrorString",
        "cuDriverGetVersion",
        "cuIpcOpenMemHandle_v2",
        "cuIpcCloseMemHandle",
        "cuMemRetainAllocationHandle",
        "cuMemGetAllocationPropertiesFromHandle",
        // Only with a context of the application's current: `contexts.rs` has that.
        "cuCtxGetDevice",
    ]);
    let symbols: Vec<_> = Functions::SYMBOLS.iter().chain(Functions::OPTIONAL_SYMBOLS).copied().collect();
    let profile = Profile { writes_ordering: 0, ..Profile::default() };
    for symbol in symbols {
        over(profile.clone(), |world| {
            let fds = open_fds();
            // How often a round makes the call.
            let before = world.driver().calls(symbol);
            let cuda = Cuda::builder().functions(functions(world)).open().expect("open");
            everything(&cuda).unwrap_or_else(|error| panic!("without faults: {error}"));
            cuda.close().unwrap_or_else(|refused| panic!("{}", refused.error));
            let uses = world.driver().calls(symbol) - before;
            if absent_from_the_round.contains(symbol) {
                return;
            }
            assert!(uses > 0, "{symbol} is not part of the round");
            let mut silent = Vec::new();
            for nth in 1..=uses {
                world.driver().fail_nth(symbol, nth, CuResult::CUDA_ERROR_UNKNOWN);
                let opened = Cuda::builder().functions(functions(world)).open();
                let seen = match opened {
                    Err(error) => Err(error),
                    Ok(cuda) => {
                        let seen = everything(&cuda);
                        // A fault may have come in the way of closing: the second time works.
                        let closed = cuda.close();
                        let seen =
                            seen.and(closed.as_ref().map(drop).map_err(|refused| refused.error_again()));
                        if let Err(refused) = closed {
                            refused
                                .value
                                .close()
                                .unwrap_or_else(|refused| panic!("{symbol} {nth}: {}", refused.error));
                        }
                        seen
                    }
                };
                match &seen {
                    Err(error) => assert!(error.to_string().contains("(999)"), "{symbol} {nth}: {error}"),
                    Ok(()) => silent.push(nth),
                }
                world.driver().heal();
                assert_eq!(world.driver().contexts_of_this_thread(), Vec::<usize>::new(), "{symbol} {nth}");
                assert_eq!(
                    world.driver().live(),
                    hmem_fake_cuda::Live::default(),
                    "{symbol} {nth}: {seen:?}"
                );
            }
            assert!(
                silent.len() as u64 <= allowed_silence(symbol),
                "{symbol}: calls {silent:?} failed unnoticed"
            );
            let cuda = Cuda::builder().functions(functions(world)).open().expect("open");
            everything(&cuda).unwrap_or_else(|error| panic!("{symbol}: after its faults: {error}"));
            cuda.close().unwrap_or_else(|refused| panic!("{symbol}: {}", refused.error));
            // The fake keeps a few files of its own until its memory goes.
            assert!(open_fds() <= fds + 64, "{symbol}: fds");
        });
    }
}

/// How many failures of a call in one round are not an error of the round.
fn allowed_silence(symbol: &str) -> u64 {
    match symbol {
        // Asking an event whether it is done: what it cannot say, waiting does. Once for each kind of memory.
        "cuEventQuery" | "cuCtxPushCurrent_v2" | "cuCtxPopCurrent_v2" => 5,
        // Waiting for a free that the driver has accepted.
        "cuStreamSynchronize" => 1,
        _ => 0,
    }
}

trait ErrorAgain {
    fn error_again(&self) -> Error;
}

impl<T> ErrorAgain for hmem_core::Rejected<T> {
    /// The error in a copy: errors are not cloned.
    fn error_again(&self) -> Error {
        Error::new(self.error.kind(), "close").context("was", &self.error)
    }
}

#[test]
fn diag_03_a_lost_device_is_unavailable_at_every_operation_and_says_what_helps() {
    let mut world = World::fake(Profile::default());
    let memory = world.allocate(4096, AllocationKind::Device);
    for code in [
        CuResult::CUDA_ERROR_ILLEGAL_ADDRESS,
        CuResult::CUDA_ERROR_ECC_UNCORRECTABLE,
        CuResult::CUDA_ERROR_LAUNCH_FAILED,
    ] {
        world.driver().lose_device(code);
        for error in [
            world.cuda.query(memory.base()).expect_err("lost"),
            world.cuda.write(memory.base(), &[1]).expect_err("lost"),
            world.cuda.export_dma_buf(memory.range, &nic(), DmaBufMapping::Default).expect_err("lost"),
            // SAFETY: nobody uses it any longer; the call is refused.
            unsafe { world.cuda.free(&memory) }.expect_err("lost"),
        ] {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            assert_eq!(error.driver().expect("code").code, i64::from(code.0));
            assert!(error.remedy_text().is_some_and(|remedy| remedy.contains("end the process")), "{error}");
        }
        world.driver().heal();
    }
    world.free(&memory);
    world.cuda.query(Address(0)).expect("healed");
    let _ = &mut world;
    world.end();
}

#[test]
fn diag_03_out_of_memory_is_named_with_device_length_and_remedy() {
    over(Profile { memory: 64 << 20, ..Profile::default() }, |world| {
        for kind in [
            AllocationKind::Device,
            AllocationKind::Managed,
            AllocationKind::StreamOrdered,
            AllocationKind::Virtual,
        ] {
            let request = AllocRequest { len: 65 << 20, device: DeviceId(1), kind };
            let error = world.cuda.allocate(&request).expect_err("more than there is");
            assert_eq!(error.kind(), ErrorKind::OutOfResources, "{kind:?}: {error}");
            assert_eq!(error.driver().expect("code").name, "CUDA_ERROR_OUT_OF_MEMORY");
            assert!(error.to_string().contains("device=1"), "{error}");
            assert_eq!(error.context_value("length"), Some("68157440"));
            assert!(error.remedy_text().is_some());
        }
    });
}

/// DIAG-03: each cause with the words that lead on.
#[test]
fn diag_03_each_cause_of_a_refused_export_has_its_remedy() {
    let closed = Profile::named("550-closed").expect("a profile");
    over(closed, |world| {
        let memory = world.allocate(4096, AllocationKind::Device);
        let error = world
            .cuda
            .export_dma_buf(memory.range, &nic(), DmaBufMapping::Default)
            .expect_err("closed module");
        assert!(error.is_unsupported(), "{error}");
        assert!(error.remedy_text().is_some_and(|remedy| remedy.contains("open kernel modules")), "{error}");
        assert!(!world.cuda.capability().dma_buf);
        world.free(&memory);
    });
    over(Profile { rdma: false, ..Profile::default() }, |world| {
        let memory = world.allocate(4096, AllocationKind::Device);
        let error = world.cuda.export_peer_memory(memory.range, &nic()).expect_err("no GPUDirect RDMA");
        assert!(error.is_unsupported() && error.remedy_text().is_some(), "{error}");
        world.free(&memory);
    });
    over(Profile { absent: vec!["cuMemGetHandleForAddressRange"], ..Profile::default() }, |world| {
        let memory = world.allocate(4096, AllocationKind::Device);
        let error =
            world.cuda.export_dma_buf(memory.range, &nic(), DmaBufMapping::Default).expect_err("older");
        assert!(error.is_unsupported(), "{error}");
        assert_eq!(error.context_value("symbol"), Some("cuMemGetHandleForAddressRange"));
        assert!(error.remedy_text().is_some_and(|remedy| remedy.contains("driver")), "{error}");
        world.free(&memory);
    });
    for (code, kind, word) in [
        (CuResult::CUDA_ERROR_OUT_OF_MEMORY, ErrorKind::OutOfResources, "BAR1"),
        (CuResult::CUDA_ERROR_NOT_SUPPORTED, ErrorKind::Unsupported, "cuMemAlloc"),
        (CuResult::CUDA_ERROR_INVALID_VALUE, ErrorKind::InvalidArgument, "mapped whole"),
        (CuResult::CUDA_ERROR_OPERATING_SYSTEM, ErrorKind::Driver, "ulimit -n"),
        (CuResult::CUDA_ERROR_INVALID_CONTEXT, ErrorKind::BadState, "context"),
    ] {
        over(Profile::default(), |world| {
            let memory = world.allocate(4096, AllocationKind::Device);
            world.driver().fail("cuMemGetHandleForAddressRange", code);
            let error =
                world.cuda.export_dma_buf(memory.range, &nic(), DmaBufMapping::Default).expect_err("refused");
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.remedy_text().is_some_and(|remedy| remedy.contains(word)), "{code:?}: {error}");
            assert!(error.context_value("range").is_some() && error.context_value("nic").is_some());
            world.free(&memory);
        });
    }
}

/// REL-01: a step of freeing VMM memory that the driver refuses is an error whatever its code, and what was done before it is
/// not done again.
#[test]
fn rel_01_vmm_memory_whose_free_is_refused_stays_until_the_driver_takes_each_step_back_once() {
    for code in [CuResult::CUDA_ERROR_INVALID_VALUE, CuResult::CUDA_ERROR_UNKNOWN] {
        over(Profile::default(), |world| {
            let memory = world.allocate(4096, AllocationKind::Virtual);
            let steps = ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"];
            for symbol in steps {
                world.driver().fail(symbol, code);
                // SAFETY: nobody uses it any longer.
                let error = unsafe { world.cuda.free(&memory) }.expect_err("the driver refused");
                assert_eq!((error.operation(), error.driver().expect("code").code), (symbol, code.0.into()));
                assert_eq!(world.driver().live().handles, 1, "{symbol}");
            }
            world.free(&memory);
            assert_eq!(steps.map(|symbol| world.driver().calls(symbol)), [2, 2, 2]);
        });
    }
}

/// HM-01: stream-ordered memory that could not be freed as it came is not taken.
#[test]
fn hm_01_a_library_without_a_stream_ordered_free_allocates_no_such_memory() {
    for symbol in ["cuMemAllocAsync", "cuMemFreeAsync"] {
        over(Profile { absent: vec![symbol], ..Profile::default() }, |world| {
            let kind = AllocationKind::StreamOrdered;
            let request = AllocRequest { len: 4096, device: DeviceId(0), kind };
            let error = world.cuda.allocate(&request).expect_err("one half is missing");
            assert!(error.is_unsupported(), "{error}");
            assert_eq!(error.context_value("symbol"), Some(symbol));
            assert_eq!(world.driver().calls("cuMemAllocAsync"), 0);
        });
    }
}

#[test]
fn hm_01_a_double_free_is_refused_and_names_the_identity() {
    crate::world::each(|world| {
        let memory = world.allocate(2 << 20, AllocationKind::Device);
        world.free(&memory);
        // SAFETY: nobody uses it; the call is refused.
        let error = unsafe { world.cuda.free(&memory) }.expect_err("freed already");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(error.context_value("identity"), Some(memory.id.0.to_string().as_str()));
        // Another allocation at the address does not make it live again.
        let again = world.allocate(2 << 20, AllocationKind::Device);
        // SAFETY: as above.
        unsafe { world.cuda.free(&memory) }.expect_err("freed already");
        world.free(&again);
    });
}

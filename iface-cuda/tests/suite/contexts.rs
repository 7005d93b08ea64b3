//! Tests of contexts: a call of the iface leaves the thread's context unchanged, and creates no
//! context without need.

use hmem_core::{
    Address, AddressRange, Allocation, AllocationKind, DeviceId, Error, ErrorKind, Iface, IfaceExt,
    iface::AllocRequest,
};
use hmem_fake_cuda::{Live, Profile};
use hmem_iface_cuda::{
    Cuda,
    sys::{CU_CTX_SYNC_MEMOPS, CuContext, CuDevicePtr, CuResult},
};

use crate::world::{
    Expandable, HeldCopies, KINDS, World, check, each, nic, not_over_a_gpu, over, pages, pattern,
};

fn current(world: &World) -> CuContext {
    let mut current = CuContext::NULL;
    // SAFETY: the output is writable.
    check(unsafe { (world.app.functions.ctx_get_current())(&mut current) });
    current
}

/// Allocates, copies, flushes, exports and frees memory, and checks the copied bytes.
fn use_everything(world: &World) {
    let memory = world.allocate(100_000, AllocationKind::Device);
    let bytes = pattern(1, 100_000);
    world.cuda.write_bytes(memory.base(), &bytes).expect("write");
    let mut back = vec![0; bytes.len()];
    world.cuda.read_bytes(memory.base(), &mut back).expect("read");
    assert!(back == bytes);
    world.cuda.flush_inbound(DeviceId(0)).expect("flush");
    if world.exports_dma_bufs() {
        let range = memory.range.slice(5, 50_000).expect("a part");
        let export = world.cuda.export_dma_buf(range, &nic(), Default::default()).expect("export");
        world.cuda.release_dma_buf(export).expect("release");
    }
    world.free(&memory);
}

/// HM-05
#[test]
fn thread_without_context_has_none_afterwards() {
    each(|world| {
        assert!(current(world).is_null(), "{}", world.name);
        use_everything(world);
        assert!(current(world).is_null(), "{}", world.name);
    });
}

/// HM-05
#[test]
fn current_context_of_the_application_stays_current() {
    each(|world| {
        let foreign = world.app.create_context();
        use_everything(world);
        assert_eq!(current(world), foreign, "{}", world.name);
        world.app.destroy_context(foreign);
    });
}

/// HM-05
#[test]
fn calls_on_memory_use_the_context_of_the_memory() {
    each(|world| {
        let foreign = world.app.create_context();
        let mut pointer: CuDevicePtr = 0;
        // SAFETY: the output is writable.
        check(unsafe { (world.app.functions.mem_alloc())(&mut pointer, 50_000) });
        let mut popped = CuContext::NULL;
        // SAFETY: the output is writable.
        check(unsafe { (world.app.functions.ctx_pop_current())(&mut popped) });
        let bytes = pattern(2, 50_000);
        world.cuda.write_bytes(Address(pointer), &bytes).expect("write");
        let mut back = vec![0; bytes.len()];
        // SAFETY: the host memory stays valid until the test has waited for the event.
        let event = unsafe {
            world
                .cuda
                .start_copy(Address::of_ptr(back.as_mut_ptr()), Address(pointer), 50_000)
                .expect("start")
        };
        event.wait().expect("wait");
        assert!(back == bytes, "{}", world.name);
        if let Some((driver, _)) = &world.fake {
            let live = driver.live();
            let expected = Live { allocations: 1, ..Live::default() };
            assert_eq!(live, expected, "it left no primary context, stream or event");
        }
        // SAFETY: the host memory stays valid until the copy has ended. The test allocated the
        // device memory above.
        unsafe {
            check((world.app.functions.ctx_push_current())(foreign));
            check((world.app.functions.mem_free())(pointer));
        }
        world.app.destroy_context(foreign);
    });
}

/// HM-05
#[test]
fn opening_and_queries_create_no_context() {
    over(Profile::default(), |world| {
        let on_the_stack = 0u8;
        for address in [Address(0), Address::of_ptr(&on_the_stack)] {
            assert_eq!(world.cuda.query(address).expect("query"), None);
        }
        world.cuda.devices().expect("devices");
        world.cuda.start_monitor().expect("monitor");
        world.cuda.flush_inbound(DeviceId(0)).expect(
            "the device orders writes itself: nothing to \
                                                      do",
        );
        // SAFETY: the copy has no bytes, so it accesses no memory.
        unsafe { world.cuda.copy(Address(0), Address(0), 0) }.expect("nothing to copy");
        assert_eq!(world.driver().live(), Live::default());
        assert_eq!(world.driver().calls("cuDevicePrimaryCtxRetain"), 0);
    });
}

/// HM-05
#[test]
fn each_device_context_is_retained_once_and_released() {
    over(Profile::default(), |world| {
        for _ in 0..3 {
            for device in [0, 1] {
                let request = AllocRequest {
                    len: 64,
                    device: DeviceId(device),
                    kind: AllocationKind::Device,
                };
                let memory = world.cuda.allocate(&request).expect("allocate");
                assert_eq!(memory.device, Some(DeviceId(device)));
                world.free(&memory);
            }
        }
        assert_eq!(world.driver().live().primary_references, 2);
    });
}

/// Returns a request for more memory than any device has.
fn too_much(kind: AllocationKind) -> AllocRequest {
    AllocRequest { len: 1 << 50, device: DeviceId(0), kind }
}

/// HM-05
#[test]
fn refused_allocation_leaves_no_context() {
    each(|world| {
        for kind in world.kinds(&KINDS) {
            assert!(world.active().is_empty(), "{}: {kind:?}", world.name);
            world.cuda.allocate(&too_much(kind)).expect_err("too much");
            assert!(world.active().is_empty(), "{}: {kind:?}", world.name);
        }
        // If an allocation exists in the context, the context stays retained after a refused
        // allocation.
        let memory = world.allocate(4096, AllocationKind::Device);
        for kind in world.kinds(&KINDS) {
            world.cuda.allocate(&too_much(kind)).expect_err("too much");
        }
        assert_eq!(world.active(), [0], "{}", world.name);
        world.free(&memory);
        assert_eq!(world.active(), [0], "{}", world.name);
    });
}

/// HM-05
#[test]
fn allocation_unknown_to_the_driver_leaves_no_context() {
    over(Profile::default(), |world| {
        for kind in world.kinds(&KINDS) {
            world.driver().fail("cuPointerGetAttributes", CuResult::CUDA_ERROR_UNKNOWN);
            let request = AllocRequest { len: 4096, device: DeviceId(1), kind };
            world.cuda.allocate(&request).expect_err("not found");
            assert_eq!(world.driver().live(), Live::default(), "{kind:?}");
        }
    });
}

/// HM-05
///
/// If the driver refuses the call of one thread while another thread uses the primary context, the
/// context stays retained until the other call has ended.
#[test]
fn refused_call_does_not_release_the_context_of_another_thread() {
    over(Profile::default(), |world| {
        let cuda = &world.cuda;
        let memory = std::thread::scope(|scope| {
            let held = world.driver().hold("cuMemAlloc_v2");
            let request =
                AllocRequest { len: 4096, device: DeviceId(0), kind: AllocationKind::Device };
            let other = scope.spawn(move || cuda.allocate(&request));
            held.wait_for(1);
            cuda.allocate(&too_much(AllocationKind::StreamOrdered)).expect_err("too much");
            assert_eq!(world.active(), [0], "the other thread allocates in it");
            drop(held);
            other.join().expect("no panic").expect("allocate")
        });
        assert_eq!(world.driver().calls("cuDevicePrimaryCtxRetain"), 1);
        world.free(&memory);
    });
}

/// HM-05
///
/// If the driver refuses to release a context, the next call that uses the context releases it. If
/// no such call follows, closing the iface does.
#[test]
fn refused_release_is_repeated_by_the_next_call() {
    over(Profile::default(), |world| {
        let release = "cuDevicePrimaryCtxRelease_v2";
        for _ in 0..2 {
            world.driver().fail(release, CuResult::CUDA_ERROR_UNKNOWN);
            let error =
                world.cuda.allocate(&too_much(AllocationKind::Device)).expect_err("too much");
            assert_eq!(error.kind(), hmem_core::ErrorKind::OutOfResources, "{error}");
            assert_eq!(world.active(), [0]);
        }
        world.cuda.allocate(&too_much(AllocationKind::Device)).expect_err("too much");
        assert!(world.active().is_empty());
        world.driver().fail(release, CuResult::CUDA_ERROR_UNKNOWN);
        world.cuda.allocate(&too_much(AllocationKind::Device)).expect_err("too much");
        // `over` closes the iface and checks that nothing is left.
    });
}

/// Page-locks and unlocks a range.
fn page_lock(world: &World) {
    let (_memory, range) = pages();
    // SAFETY: the memory outlives the page-locking.
    unsafe { world.cuda.host_register(range) }.expect("page-locked");
    let found = world.cuda.query(range.start()).expect("query");
    assert!(
        found.is_none_or(|found| found.kind == AllocationKind::HostRegistered),
        "{}",
        world.name
    );
    world.cuda.host_unregister(range).expect("unlock");
    world.cuda.host_unregister(range).expect_err("unlocked already");
}

/// HM-05
#[test]
fn page_locking_uses_an_active_context_of_another_device() {
    each(|world| {
        if world.cuda.devices().expect("devices").len() < 2 {
            assert!(not_over_a_gpu("the machine has one device"), "{} has one device", world.name);
            return;
        }
        let mut context = CuContext::NULL;
        // SAFETY: the output is writable, and device 1 exists.
        check(unsafe { (world.app.functions.primary_ctx_retain())(&mut context, 1) });
        page_lock(world);
        assert_eq!(world.active(), [1], "{}", world.name);
        // SAFETY: `primary_ctx_retain` above retained the context.
        check(unsafe { (world.app.functions.primary_ctx_release())(1) });
    });
}

/// HM-05
///
/// If two primary contexts are active, page-locking uses the context of the device whose context is
/// current on the thread.
#[test]
fn page_locking_prefers_the_device_of_the_thread() {
    over(Profile::default(), |world| {
        let mut contexts = [CuContext::NULL; 2];
        for (device, context) in contexts.iter_mut().enumerate() {
            // SAFETY: the output is writable, and the device exists.
            check(unsafe { (world.app.functions.primary_ctx_retain())(context, device as i32) });
        }
        // SAFETY: `primary_ctx_retain` above retained the context.
        check(unsafe { (world.app.functions.ctx_push_current())(contexts[1]) });
        page_lock(world);
        world.app.pop();
        // After the application's releases, only the context that the iface retained for
        // page-locking is active.
        for device in [0, 1] {
            // SAFETY: `primary_ctx_retain` above retained the context.
            check(unsafe { (world.app.functions.primary_ctx_release())(device) });
        }
        assert_eq!(world.active(), [1]);
    });
}

/// HM-05
#[test]
fn page_locking_uses_the_threads_context_if_none_is_active() {
    each(|world| {
        let foreign = world.app.create_context();
        page_lock(world);
        assert!(world.active().is_empty(), "{}", world.name);
        // The iface unlocks the range in the context that page-locked it, even on a thread without
        // a context.
        let (_memory, range) = pages();
        // SAFETY: the memory outlives the page-locking.
        unsafe { world.cuda.host_register(range) }.expect("page-locked");
        world.app.pop();
        world.cuda.host_unregister(range).expect("unlock");
        assert!(world.active().is_empty(), "{}", world.name);
        if let Some((driver, _)) = &world.fake {
            assert_eq!(driver.calls("cuDevicePrimaryCtxRetain"), 0);
        }
        // Destroying the context ends the page-locking, so that nothing is left to unlock.
        // SAFETY: `create_context` above made the context.
        check(unsafe { (world.app.functions.ctx_push_current())(foreign) });
        // SAFETY: the memory outlives the page-locking.
        unsafe { world.cuda.host_register(range) }.expect("page-locked again");
        world.app.destroy_context(foreign);
        world.cuda.host_unregister(range).expect("nothing is left to unlock");
        assert!(world.active().is_empty(), "{}", world.name);
    });
}

/// HM-05
#[test]
fn refused_page_locking_leaves_no_context() {
    each(|world| {
        let (_memory, range) = pages();
        let foreign = world.app.create_context();
        let start = std::ptr::with_exposed_provenance_mut(range.start().0 as usize);
        // SAFETY: the memory outlives the page-locking.
        check(unsafe { (world.app.functions.mem_host_register())(start, range.len() as usize, 1) });
        world.app.pop();
        // SAFETY: the memory lives until the end of the test.
        unsafe { world.cuda.host_register(range) }.expect_err("page-locked by the application");
        assert!(world.active().is_empty(), "{}", world.name);
        // SAFETY: `create_context` above made the context, in which the memory was registered.
        unsafe {
            check((world.app.functions.ctx_push_current())(foreign));
            check((world.app.functions.mem_host_unregister())(start));
        }
        world.app.destroy_context(foreign);
    });
}

/// Returns the errors of both exports of an allocation that the caller queried before.
fn refused_exports(world: &World, of: &Allocation) -> [Error; 2] {
    let dma_buf = world.cuda.dma_buf().expect("the facet");
    let peer_memory = world.cuda.peer_memory().expect("the facet");
    [
        dma_buf.export(of.range, of, &nic(), Default::default()).expect_err("refused"),
        peer_memory.export(of.range, of, &nic()).expect_err("refused"),
    ]
}

/// MR-18
///
/// The driver is never given the destroyed context, which `World::end` checks.
#[test]
fn export_is_refused_if_the_context_of_the_allocation_was_destroyed() {
    over(Profile::default(), |world| {
        let foreign = world.app.create_context();
        let mut pointer: CuDevicePtr = 0;
        // SAFETY: the output is writable.
        check(unsafe { (world.app.functions.mem_alloc())(&mut pointer, 50_000) });
        let of = world.cuda.query(Address(pointer)).expect("query").expect("an allocation");
        world.app.destroy_context(foreign);
        for error in refused_exports(world, &of) {
            assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{error}");
            let why = error.context_value("why").expect("a reason");
            assert!(why.contains("context was destroyed"), "{error}");
        }
    });
}

/// MR-18
///
/// Any caller can set the token of an allocation, which is a context for the driver.
#[test]
fn export_is_refused_for_a_token_that_is_no_context_of_the_memory() {
    over(Profile::default(), |world| {
        let memory = world.allocate(50_000, AllocationKind::Device);
        for token in [1, 0xdead_0000, u64::MAX] {
            for error in refused_exports(world, &Allocation { token, ..memory }) {
                assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{error}");
            }
        }
        world.free(&memory);
    });
}

/// MR-18
///
/// The context is still usable, so the driver refuses the addresses.
#[test]
fn export_of_an_allocation_that_was_freed_is_refused() {
    over(Profile::default(), |world| {
        for kind in [AllocationKind::Device, AllocationKind::Virtual] {
            let memory = world.allocate(2 << 20, kind);
            let of = world.cuda.query(memory.base()).expect("query").expect("an allocation");
            world.free(&memory);
            let errors = refused_exports(world, &of);
            assert!(errors.iter().all(|error| error.kind() != ErrorKind::BadState), "{errors:?}");
        }
    });
}

/// Queries the segments of VMM memory, exports it to a NIC, and copies its bytes.
fn use_mapped(world: &World, range: AddressRange) {
    world.cuda.physical_segments(range).expect("segments");
    world.cuda.export_peer_memory(range, &nic()).expect("peer memory");
    if world.exports_dma_bufs() {
        let export = world.cuda.export_dma_buf(range, &nic(), Default::default()).expect("export");
        world.cuda.release_dma_buf(export).expect("release");
    }
    let bytes = pattern(5, range.len() as usize);
    world.cuda.write_bytes(range.start(), &bytes).expect("write");
    let mut back = vec![0; bytes.len()];
    world.cuda.read_bytes(range.start(), &mut back).expect("read");
    assert!(back == bytes, "{}", world.name);
}

/// HM-05
#[test]
fn memory_without_a_context_uses_the_threads_context() {
    each(|world| {
        if world.no_rdma_to_vmm() {
            return;
        }
        let foreign = world.app.create_context();
        let parts = [Some(true), Some(true)];
        let memory = Expandable::here(&world.app.functions, &parts);
        use_mapped(world, memory.range(memory.step - 5000, 10_000));
        assert!(world.active().is_empty(), "{}", world.name);
        if let Some((driver, _)) = &world.fake {
            assert_eq!(
                (driver.live().streams, driver.live().events),
                (0, 0),
                "nothing is left there"
            );
        }
        memory.end_here(&world.app.functions, &parts);
        world.app.destroy_context(foreign);
    });
}

/// HM-05
///
/// An asynchronous copy of memory without a context ends before the call returns, since the
/// application may then destroy the context.
#[test]
fn copy_in_the_threads_context_ends_before_its_destruction() {
    each(|world| {
        if let Some((driver, _)) = &world.fake {
            driver.change(|profile| profile.slow_copies = true);
        }
        if world.no_rdma_to_vmm() {
            return;
        }
        let foreign = world.app.create_context();
        let memory = Expandable::here(&world.app.functions, &[Some(true)]);
        let (bytes, mut back) = (pattern(6, 5000), vec![0; 5000]);
        world.cuda.write_bytes(Address(memory.base), &bytes).expect("write");
        let to = Address::of_ptr(back.as_mut_ptr());
        // SAFETY: the host memory stays valid until the test has waited for the event.
        let event =
            unsafe { world.cuda.start_copy(to, Address(memory.base), 5000) }.expect("start");
        world.app.destroy_context(foreign);
        event.wait().expect("wait");
        assert!(back == bytes, "{}", world.name);
        assert!(world.active().is_empty(), "{}", world.name);
        let foreign = world.app.create_context();
        memory.end_here(&world.app.functions, &[Some(true)]);
        world.app.destroy_context(foreign);
    });
}

/// HM-05
#[test]
fn query_of_memory_without_a_context_leaves_no_context() {
    each(|world| {
        if world.no_rdma_to_vmm() {
            return;
        }
        let foreign = world.app.create_context();
        let parts = [Some(true), Some(false)];
        let memory = Expandable::here(&world.app.functions, &parts);
        world.app.pop();
        let (whole, capable) = (memory.range(0, 2 * memory.step), memory.range(0, memory.step));
        world.cuda.physical_segments(whole).expect("segments");
        assert!(world.active().is_empty(), "{}", world.name);
        if !world.reaches_anything(memory.base + memory.step) {
            world.cuda.export_peer_memory(whole, &nic()).expect_err("not all of it can be reached");
            assert!(world.active().is_empty(), "{}", world.name);
            world
                .cuda
                .export_dma_buf(whole, &nic(), Default::default())
                .expect_err("properties differ");
            assert!(world.active().is_empty(), "{}", world.name);
        }
        if let Some((driver, _)) = &world.fake {
            driver.fail("cuMemcpyAsync", CuResult::CUDA_ERROR_UNKNOWN);
            world.cuda.write_bytes(capable.start(), &[1]).expect_err("refused");
            assert!(world.active().is_empty(), "{}", world.name);
            // The export sets SYNC_MEMOPS on existing contexts only. It creates no context to set
            // the flag.
            world.cuda.export_peer_memory(capable, &nic()).expect("peer memory");
            assert!(
                world.active().is_empty(),
                "{}: no context is created to hold the \
                                                flag",
                world.name
            );
        }
        // SAFETY: `create_context` above made the context.
        check(unsafe { (world.app.functions.ctx_push_current())(foreign) });
        memory.end_here(&world.app.functions, &parts);
        world.app.destroy_context(foreign);
    });
}

/// HM-05
#[test]
fn current_context_of_another_device_is_not_used() {
    over(Profile::default(), |world| {
        let foreign = world.app.create_context();
        let parts = [Some(true)];
        let memory = Expandable::here(&world.app.functions, &parts);
        let request =
            AllocRequest { len: 4096, device: DeviceId(1), kind: AllocationKind::Virtual };
        let other = world.cuda.allocate(&request).expect("allocate");
        use_mapped(world, other.range);
        assert_eq!(world.active(), [1]);
        assert_eq!(
            world.driver().context_flags(1),
            CU_CTX_SYNC_MEMOPS,
            "uses the context of its device"
        );
        world.free(&other);
        // REL-01: a failed query of the current context is an error, and retains nothing.
        world.driver().fail("cuCtxGetDevice", CuResult::CUDA_ERROR_UNKNOWN);
        let error = world.cuda.physical_segments(memory.range(0, 4096)).expect_err("refused");
        assert!(error.to_string().contains("cuCtxGetDevice"), "{error}");
        // A destroyed context counts as no context.
        for code in
            [CuResult::CUDA_ERROR_CONTEXT_IS_DESTROYED, CuResult::CUDA_ERROR_INVALID_CONTEXT]
        {
            world.driver().fail("cuCtxGetDevice", code);
            world.cuda.physical_segments(memory.range(0, 4096)).expect("segments");
        }
        assert_eq!(world.active(), [1]);
        memory.end_here(&world.app.functions, &parts);
        world.app.destroy_context(foreign);
    });
}

/// HM-05
#[test]
fn flush_creates_no_context() {
    over(Profile { writes_ordering: 0, ..Profile::default() }, |world| {
        let flush =
            |world: &World, device| world.cuda.flush_inbound(DeviceId(device)).expect("flush");
        let retained = |world: &World| world.driver().calls("cuDevicePrimaryCtxRetain");
        flush(world, 0);
        assert_eq!(world.driver().flushed(), [], "no context exists, and no memory of a context");
        let foreign = world.app.create_context();
        flush(world, 0);
        flush(world, 1);
        assert_eq!(world.driver().flushed(), [foreign], "the thread's context belongs to device 0");
        assert_eq!(retained(world), 0);
        let mut primary = CuContext::NULL;
        // SAFETY: the output is writable.
        world.app.current(|driver| check(unsafe { (driver.ctx_get_current())(&mut primary) }));
        for _ in 0..3 {
            flush(world, 0);
            assert_eq!(world.driver().flushed(), [primary], "the primary context exists");
        }
        assert_eq!(retained(world), 2, "once by the application, once for all flushes");
        world.app.release_primary_context();
        world.app.destroy_context(foreign);
    });
}

/// HM-05
///
/// If the driver refuses the flush in a context, the iface does not retain the context.
#[test]
fn refused_flush_retains_no_context() {
    over(Profile { writes_ordering: 0, ..Profile::default() }, |world| {
        world.app.current(|_| ());
        world.driver().fail("cuFlushGPUDirectRDMAWrites", CuResult::CUDA_ERROR_UNKNOWN);
        let error = world.cuda.flush_inbound(DeviceId(0)).expect_err("refused");
        assert_eq!(error.operation(), "cuFlushGPUDirectRDMAWrites", "{error}");
        world.app.release_primary_context();
        assert!(world.active().is_empty());
    });
}

/// HM-05
///
/// Queries use an existing context, and do not retain it afterwards.
#[test]
fn query_retains_no_context_of_the_application() {
    over(Profile { queries_need_context: true, ..Profile::default() }, |world| {
        let mut pointer: CuDevicePtr = 0;
        // SAFETY: the output is writable; the memory is freed below.
        world.app.current(|driver| check(unsafe { (driver.mem_alloc())(&mut pointer, 4096) }));
        let before = world.driver().all_calls();
        let found = world.cuda.query(Address(pointer)).expect("query").expect("known");
        assert_eq!(found.kind, AllocationKind::Device);
        // The iface makes 14 calls: the query, the query of the thread's context, and twelve calls
        // for the primary context. Six of these exchange the thread's capture mode.
        assert_eq!(world.driver().all_calls() - before, 14);
        // SAFETY: the test allocated the memory above, and frees it once.
        world.app.current(|driver| check(unsafe { (driver.mem_free())(pointer) }));
        world.app.release_primary_context();
        assert!(world.active().is_empty());
    });
}

/// HM-05, REL-01
///
/// Dropping an iface destroys the streams of each context, even if the driver refuses to destroy a
/// stream of another context.
#[test]
fn refused_destruction_of_a_stream_affects_only_its_context() {
    over(Profile::default(), |world| {
        let mut context = CuContext::NULL;
        // SAFETY: the output is writable, and device 1 exists.
        check(unsafe { (world.app.functions.primary_ctx_retain())(&mut context, 1) });
        let other = Cuda::builder().functions(world.app.functions.clone()).open().expect("open");
        for device in [0, 1].map(DeviceId) {
            let request = AllocRequest { len: 64, device, kind: AllocationKind::Device };
            let memory = other.allocate(&request).expect("allocate");
            other.write_bytes(memory.base(), &[1; 64]).expect("write");
            // SAFETY: no code uses the memory any longer.
            unsafe { other.free(&memory) }.expect("free");
        }
        assert_eq!(world.driver().live().streams, 2);
        world.driver().fail("cuStreamDestroy_v2", CuResult::CUDA_ERROR_UNKNOWN);
        drop(other);
        assert_eq!(world.driver().live().streams, 0, "the application still has the context");
        // SAFETY: `primary_ctx_retain` above retained the context.
        check(unsafe { (world.app.functions.primary_ctx_release())(1) });
    });
}

/// HM-05
///
/// If the driver refuses to pop a context from the thread, the context must stay alive.
#[test]
fn context_that_stays_current_is_not_destroyed() {
    over(Profile::default(), |world| {
        world.driver().fail_always("cuCtxPopCurrent_v2", CuResult::CUDA_ERROR_UNKNOWN);
        world.cuda.allocate(&too_much(AllocationKind::Device)).expect_err("too much");
        world.driver().heal();
        assert_eq!(world.active(), [0]);
        assert!(!world.app.pop().is_null(), "the context was current");
    });
}

/// HM-05
#[test]
fn threads_allocate_copy_and_free_concurrently() {
    each(|world| {
        let world = &*world;
        let cuda = &world.cuda;
        std::thread::scope(|scope| {
            for seed in 0..4u64 {
                scope.spawn(move || {
                    let request = AllocRequest {
                        len: 70_000,
                        device: DeviceId(0),
                        kind: AllocationKind::Device,
                    };
                    for round in 0..20 {
                        let memory = cuda.allocate(&request).expect("allocate");
                        let bytes = pattern(seed * 100 + round, 70_000);
                        cuda.write_bytes(memory.base(), &bytes).expect("write");
                        let mut back = vec![0; bytes.len()];
                        cuda.read_bytes(memory.base(), &mut back).expect("read");
                        assert!(back == bytes);
                        // SAFETY: no code uses the memory any longer.
                        unsafe { cuda.free(&memory) }.expect("free");
                    }
                });
            }
        });
    });
}

//! The calling thread's context is its own.

use hmem_core::{Address, AllocationKind, DeviceId, Iface, IfaceExt, iface::AllocRequest};
use hmem_fake_cuda::{Live, Profile};
use hmem_iface_cuda::sys::{CuContext, CuDevicePtr, CuResult};

use crate::world::{World, check, each, nic, over, pattern};

fn current(world: &World) -> CuContext {
    let mut current = CuContext::NULL;
    // SAFETY: the place is writable.
    check(unsafe { (world.app.functions.ctx_get_current)(&mut current) });
    current
}

/// Something of every sort, with its bytes checked.
fn use_everything(world: &World) {
    let memory = world.allocate(100_000, AllocationKind::Device);
    let bytes = pattern(1, 100_000);
    world.cuda.write(memory.base(), &bytes).expect("write");
    let mut back = vec![0; bytes.len()];
    world.cuda.read(memory.base(), &mut back).expect("read");
    assert!(back == bytes);
    world.cuda.flush_inbound(DeviceId(0)).expect("flush");
    if world.exports_dma_bufs() {
        let range = memory.range.slice(5, 50_000).expect("a part");
        let export = world.cuda.export_dma_buf(range, &nic(), Default::default()).expect("export");
        world.cuda.release_dma_buf(export).expect("release");
    }
    world.free(&memory);
}

#[test]
fn hm_05_a_thread_without_context_has_none_afterwards() {
    each(|world| {
        assert!(current(world).is_null(), "{}", world.name);
        use_everything(world);
        assert!(current(world).is_null(), "{}", world.name);
    });
}

#[test]
fn hm_05_a_wrong_current_context_is_neither_used_nor_changed() {
    each(|world| {
        let foreign = world.app.create_context();
        use_everything(world);
        assert_eq!(current(world), foreign, "{}", world.name);
        world.app.destroy_context(foreign);
    });
}

#[test]
fn hm_05_memory_of_another_context_is_worked_on_in_that_context() {
    each(|world| {
        let foreign = world.app.create_context();
        let mut pointer: CuDevicePtr = 0;
        // SAFETY: the place is writable.
        check(unsafe { (world.app.functions.mem_alloc)(&mut pointer, 50_000) });
        let mut popped = CuContext::NULL;
        // SAFETY: the place is writable.
        check(unsafe { (world.app.functions.ctx_pop_current)(&mut popped) });
        let bytes = pattern(2, 50_000);
        world.cuda.write(Address(pointer), &bytes).expect("write");
        let mut back = vec![0; bytes.len()];
        // SAFETY: the host side lives until the event is waited for.
        let event = unsafe {
            world
                .cuda
                .copy_async(Address::of_ptr(back.as_mut_ptr()), Address(pointer), 50_000)
                .expect("start")
        };
        event.wait().expect("wait");
        assert!(back == bytes, "{}", world.name);
        if let Some((driver, _)) = &world.fake {
            let live = driver.live();
            let expected = Live { allocations: 1, ..Live::default() };
            assert_eq!(live, expected, "no primary context, stream or event was left for it");
        }
        // SAFETY: as above; the memory was allocated above.
        unsafe {
            check((world.app.functions.ctx_push_current)(foreign));
            check((world.app.functions.mem_free)(pointer));
        }
        world.app.destroy_context(foreign);
    });
}

#[test]
fn hm_05_opening_and_asking_make_no_context() {
    over(Profile::default(), |world| {
        let on_the_stack = 0u8;
        for address in [Address(0), Address::of_ptr(&on_the_stack)] {
            assert_eq!(world.cuda.query(address).expect("query"), None);
        }
        world.cuda.devices().expect("devices");
        world.cuda.monitor().expect("monitor");
        world.cuda.flush_inbound(DeviceId(0)).expect("ordered natively: nothing to do");
        // SAFETY: refused before anything is touched.
        unsafe { world.cuda.copy(Address(0), Address(0), 0) }.expect("nothing to copy");
        assert_eq!(world.driver().live(), Live::default());
        assert_eq!(world.driver().calls("cuDevicePrimaryCtxRetain"), 0);
    });
}

#[test]
fn hm_05_each_device_has_its_own_context_retained_once_and_given_back() {
    over(Profile::default(), |world| {
        for _ in 0..3 {
            for device in [0, 1] {
                let request =
                    AllocRequest { len: 64, device: DeviceId(device), kind: AllocationKind::Device };
                let memory = world.cuda.allocate(&request).expect("allocate");
                assert_eq!(memory.device, Some(DeviceId(device)));
                world.free(&memory);
            }
        }
        assert_eq!(world.driver().live().primary_references, 2);
    });
}

const KINDS: [AllocationKind; 5] = [
    AllocationKind::Device,
    AllocationKind::Host,
    AllocationKind::Managed,
    AllocationKind::StreamOrdered,
    AllocationKind::Virtual,
];

/// An allocation that no device has room for.
fn too_much(kind: AllocationKind) -> AllocRequest {
    AllocRequest { len: 1 << 50, device: DeviceId(0), kind }
}

#[test]
fn hm_05_a_refused_allocation_leaves_no_context() {
    each(|world| {
        for kind in KINDS {
            assert!(world.active().is_empty(), "{}: {kind:?}", world.name);
            world.cuda.allocate(&too_much(kind)).expect_err("too much");
            assert!(world.active().is_empty(), "{}: {kind:?}", world.name);
        }
        // One that something lives in stays, with the stream that pools have.
        let memory = world.allocate(4096, AllocationKind::Device);
        for kind in KINDS {
            world.cuda.allocate(&too_much(kind)).expect_err("too much");
        }
        assert_eq!(world.active(), [0], "{}", world.name);
        world.free(&memory);
        assert_eq!(world.active(), [0], "{}", world.name);
    });
}

#[test]
fn hm_05_an_allocation_that_the_driver_does_not_know_afterwards_leaves_no_context() {
    over(Profile::default(), |world| {
        for kind in KINDS {
            world.driver().fail("cuPointerGetAttributes", CuResult::CUDA_ERROR_UNKNOWN);
            let request = AllocRequest { len: 4096, device: DeviceId(1), kind };
            world.cuda.allocate(&request).expect_err("not found");
            assert_eq!(world.driver().live(), Live::default(), "{kind:?}");
        }
    });
}

/// While one thread's attempt is refused, another works in the context: it stays until that has ended.
#[test]
fn hm_05_a_refused_attempt_takes_no_context_from_under_another_thread() {
    over(Profile::default(), |world| {
        let cuda = &world.cuda;
        let memory = std::thread::scope(|scope| {
            let held = world.driver().hold("cuMemAlloc_v2");
            let request = AllocRequest { len: 4096, device: DeviceId(0), kind: AllocationKind::Device };
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

/// A context that the driver does not take back is given back by the next call, or as the iface closes.
#[test]
fn hm_05_a_context_that_was_not_given_back_is_with_the_next_call() {
    over(Profile::default(), |world| {
        let release = "cuDevicePrimaryCtxRelease_v2";
        for _ in 0..2 {
            world.driver().fail(release, CuResult::CUDA_ERROR_UNKNOWN);
            let error = world.cuda.allocate(&too_much(AllocationKind::Device)).expect_err("too much");
            assert_eq!(error.kind(), hmem_core::ErrorKind::OutOfResources, "{error}");
            assert_eq!(world.active(), [0]);
        }
        world.cuda.allocate(&too_much(AllocationKind::Device)).expect_err("too much");
        assert!(world.active().is_empty());
        world.driver().fail(release, CuResult::CUDA_ERROR_UNKNOWN);
        world.cuda.allocate(&too_much(AllocationKind::Device)).expect_err("too much");
        // `over` closes the iface and finds nothing left.
    });
}

#[test]
fn hm_05_threads_work_at_once() {
    each(|world| {
        let world = &*world;
        let cuda = &world.cuda;
        std::thread::scope(|scope| {
            for seed in 0..4u64 {
                scope.spawn(move || {
                    let request =
                        AllocRequest { len: 70_000, device: DeviceId(0), kind: AllocationKind::Device };
                    for round in 0..20 {
                        let memory = cuda.allocate(&request).expect("allocate");
                        let bytes = pattern(seed * 100 + round, 70_000);
                        cuda.write(memory.base(), &bytes).expect("write");
                        let mut back = vec![0; bytes.len()];
                        cuda.read(memory.base(), &mut back).expect("read");
                        assert!(back == bytes);
                        // SAFETY: nobody uses it any longer.
                        unsafe { cuda.free(&memory) }.expect("free");
                    }
                });
            }
        });
    });
}

//! The calling thread's context is its own.

use hmem_core::{Address, AllocationKind, DeviceId, Iface, IfaceExt, iface::AllocRequest};
use hmem_fake_cuda::{Live, Profile};
use hmem_iface_cuda::sys::{CuContext, CuDevicePtr};

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

//! Tests of copies between host and device memory.

use hmem_core::{
    Address, AllocationKind, DeviceId, ErrorKind, Iface, IfaceExt, iface::AllocRequest,
};
use hmem_fake_cuda::Profile;
use hmem_iface_cuda::{Cuda, sys::CuResult};

use crate::world::{Expandable, HeldCopies, World, check, each, over, pattern};

/// HM-03
#[test]
fn bytes_move_between_devices_and_within_a_device() {
    each(|world| {
        let last = world.cuda.devices().expect("devices").len() as u32 - 1;
        let request =
            AllocRequest { len: 9000, device: DeviceId(last), kind: AllocationKind::Device };
        let (near, far) = (
            world.allocate(9000, AllocationKind::Device),
            world.cuda.allocate(&request).expect("allocate"),
        );
        let bytes = pattern(3, 9000);
        world.cuda.write_bytes(near.base(), &bytes).expect("write");
        // SAFETY: both sides belong to the iface, which checks them.
        unsafe { world.cuda.copy(Address(far.base().0 + 11), Address(near.base().0 + 5), 8000) }
            .expect("copy");
        let mut back = vec![0; 8000];
        world.cuda.read_bytes(Address(far.base().0 + 11), &mut back).expect("read");
        assert!(back == bytes[5..8005], "{}", world.name);
        world.free(&near);
        world.free(&far);
    });
}

/// MR-18
#[test]
fn copy_of_freed_memory_never_accesses_host_memory() {
    each(|world| {
        let memory = world.allocate(8 << 20, AllocationKind::Device);
        world.free(&memory);
        let mut bytes = [9_u8; 64];
        let here = Address::of_ptr(bytes.as_mut_ptr());
        // SAFETY: the array is valid for the copies, which are refused before they start: the
        // driver no longer knows the memory at the other address.
        let refused = unsafe {
            [
                world.cuda.copy(here, memory.base(), 64),
                world.cuda.copy(memory.base(), here, 64),
                world.cuda.start_copy(here, memory.base(), 64).map(drop),
            ]
        };
        for error in refused.map(|copied| copied.expect_err("freed")) {
            assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{}: {error}", world.name);
        }
        assert_eq!(bytes, [9; 64]);
    });
}

/// HM-03
#[test]
fn copies_span_the_mappings_of_a_reservation() {
    each(|world| {
        if world.no_rdma_to_vmm() {
            return;
        }
        let parts = [Some(true), Some(false), Some(true)];
        let memory = Expandable::new(&mut world.app, &parts);
        let bytes = pattern(8, 2 * memory.step as usize);
        world.cuda.write_bytes(Address(memory.base + 77), &bytes).expect("write");
        let mut back = vec![0; bytes.len()];
        world.cuda.read_bytes(Address(memory.base + 77), &mut back).expect("read");
        assert!(back == bytes, "{}", world.name);
        memory.end(&mut world.app, &parts);
    });
}

fn start(
    world: &World,
    to: Address,
    from: Address,
    len: u64,
) -> Box<dyn hmem_core::iface::CopyEvent> {
    // SAFETY: callers keep the host memory valid and unused until the event is done.
    unsafe { world.cuda.start_copy(to, from, len) }.expect("start")
}

/// HM-03
#[test]
fn asynchronous_copies_end_with_their_events() {
    each(|world| {
        let memory = world.allocate(1 << 20, AllocationKind::Device);
        let bytes = pattern(4, 1 << 20);
        let mut back = vec![0; 1 << 20];
        start(world, memory.base(), Address::of_ptr(bytes.as_ptr()), 1 << 20).wait().expect("wait");
        // Copies of different lengths start together, and the test waits for them in another order.
        let cuts = [0, 1, 4096, 4099, 300_000, 1 << 20];
        let into = Address::of_ptr(back.as_mut_ptr()).0;
        let mut events: Vec<_> = cuts
            .windows(2)
            .map(|cut| {
                start(
                    world,
                    Address(into + cut[0]),
                    Address(memory.base().0 + cut[0]),
                    cut[1] - cut[0],
                )
            })
            .collect();
        while let Some(event) = events.pop() {
            event.wait().expect("wait");
        }
        assert!(back == bytes, "{}", world.name);
        world.free(&memory);
    });
}

/// HM-03
#[test]
fn event_is_not_done_while_its_copy_is_in_flight() {
    over(Profile { slow_copies: true, ..Profile::default() }, |world| {
        let memory = world.allocate(4096, AllocationKind::Device);
        let bytes = pattern(5, 4096);
        let event = start(world, memory.base(), Address::of_ptr(bytes.as_ptr()), 4096);
        assert!(!event.is_done(), "no caller waited for it yet");
        assert!(event.is_done());
        event.wait().expect("wait");
        let event = start(world, memory.base(), Address::of_ptr(bytes.as_ptr()), 4096);
        drop(event);
        let live = world.driver().live();
        assert_eq!((live.events, live.streams), (1, 1), "events are used again");
        world.free(&memory);
    });
}

/// HM-03
///
/// A blocking copy waits for itself only: an asynchronous copy stays in flight.
#[test]
fn blocking_copy_does_not_wait_for_asynchronous_copies() {
    over(Profile { slow_copies: true, ..Profile::default() }, |world| {
        let memory = [(); 2].map(|()| world.allocate(4096, AllocationKind::Device));
        let bytes = [1, 2].map(|seed| pattern(seed, 4096));
        let event = start(world, memory[0].base(), Address::of_ptr(bytes[0].as_ptr()), 4096);
        world.cuda.write_bytes(memory[1].base(), &bytes[1]).expect("write");
        let mut back = vec![0; 4096];
        world.cuda.read_bytes(memory[1].base(), &mut back).expect("read");
        assert!(back == bytes[1]);
        let pool = world.allocate(4096, AllocationKind::StreamOrdered);
        world.free(&pool);
        // The fake runs a copy only when a caller waits for its stream, or has queried its event
        // before.
        assert!(!event.is_done(), "another call waited for it");
        event.wait().expect("wait");
        world.cuda.read_bytes(memory[0].base(), &mut back).expect("read");
        assert!(back == bytes[0]);
        for one in &memory {
            world.free(one);
        }
    });
}

/// HM-03
///
/// Blocking copies of several threads run concurrently, on streams that are reused and destroyed at
/// the end.
#[test]
fn blocking_copies_of_two_threads_use_two_streams() {
    over(Profile::default(), |world| {
        let memory = [(); 2].map(|()| world.allocate(4096, AllocationKind::Device));
        let (driver, cuda) = (world.driver(), &world.cuda);
        std::thread::scope(|scope| {
            let held = driver.hold("cuStreamSynchronize");
            let writers = memory.each_ref().map(|one| {
                scope.spawn(move || {
                    cuda.write_bytes(one.base(), &pattern(one.id.0, 4096)).expect("write")
                })
            });
            held.wait_for(2);
            assert_eq!(driver.live().streams, 2, "one of each");
            drop(held);
            for writer in writers {
                writer.join().expect("no panic");
            }
        });
        for one in &memory {
            let mut back = vec![0; 4096];
            cuda.read_bytes(one.base(), &mut back).expect("read");
            assert!(back == pattern(one.id.0, 4096));
            world.free(one);
        }
        assert_eq!(driver.live().streams, 2, "used again");
    });
}

/// HM-05, HM-03
///
/// An event of a copy in flight prevents closing the iface, and so does an allocation.
#[test]
fn close_with_a_copy_or_allocation_left_is_refused() {
    let mut world = World::fake(Profile { slow_copies: true, ..Profile::default() });
    let memory = world.allocate(4096, AllocationKind::Device);
    let bytes = pattern(5, 4096);
    let event = start(&world, memory.base(), Address::of_ptr(bytes.as_ptr()), 4096);
    let other =
        Cuda::builder().functions(world.app.functions.clone()).open().expect("a second iface");
    let refused = std::mem::replace(&mut world.cuda, other)
        .close()
        .expect_err("an allocation and a copy are left");
    assert!(refused.error.is_busy(), "{}", refused.error);
    world.cuda = refused.value;
    event.wait().expect("wait");
    world.free(&memory);
    world.end();
}

/// HM-03
///
/// If the driver no longer knows memory of the iface, neither the CPU nor the driver copies the
/// memory: the driver would use the address as host memory.
#[test]
fn memory_unknown_to_the_driver_is_not_copied() {
    over(Profile::default(), |world| {
        let memory = world.allocate(10_000, AllocationKind::Device);
        let others =
            [AllocationKind::Host, AllocationKind::Device].map(|kind| world.allocate(4096, kind));
        let inside = memory.base().checked_add(5000).expect("inside");
        let bytes = pattern(3, 100);
        let known =
            others.iter().map(|other| other.base()).chain([Address::of_ptr(bytes.as_ptr())]);
        world.driver().forget(memory.base().0);
        for other in known {
            for (to, from) in [(inside, other), (other, inside)] {
                // SAFETY: both sides have 100 bytes; the copy is refused.
                let error = unsafe { world.cuda.copy(to, from, 100) }.expect_err("refused");
                assert_eq!(error.kind(), ErrorKind::Driver, "{error}");
                assert_eq!(
                    error.context_value("allocation"),
                    Some(memory.range.to_string().as_str())
                );
                // SAFETY: both sides have 100 bytes; the copy is refused.
                unsafe { world.cuda.start_copy(to, from, 100) }.expect_err("refused");
            }
        }
        world.driver().heal();
        world.cuda.write_bytes(inside, &bytes).expect("the driver knows the memory again");
        for one in [&memory, &others[0], &others[1]] {
            world.free(one);
        }
    });
}

/// Allocates device memory as the application, in the current context.
fn of_the_application(world: &World) -> Address {
    let mut pointer = 0;
    // SAFETY: the output is writable.
    check(unsafe { (world.app.functions.mem_alloc())(&mut pointer, 4096) });
    Address(pointer)
}

/// Starts a copy that fails after the driver began it. Checks that the copy has ended and left
/// nothing, since the caller may then reuse the memory. Returns the error.
fn start_refused_copy(world: &World, to: Address) -> hmem_core::Error {
    let bytes = pattern(9, 4096);
    let from = Address::of_ptr(bytes.as_ptr());
    // SAFETY: the host memory stays valid until the copy, which is refused, has ended.
    let error = unsafe { world.cuda.start_copy(to, from, 4096) }.expect_err("refused");
    assert_eq!(world.driver().live().copies, 0, "it runs on: {error}");
    error
}

const REFUSED: CuResult = CuResult::CUDA_ERROR_UNKNOWN;

/// HM-03, HM-05
///
/// If the driver begins a copy and then fails, the iface waits for the copy and keeps the primary
/// context's stream and event for later copies.
#[test]
fn failed_start_of_a_copy_waits_and_keeps_its_stream() {
    over(Profile { slow_copies: true, ..Profile::default() }, |world| {
        let memory = world.allocate(4096, AllocationKind::Device);
        world.app.current(|_| ());
        let bytes = pattern(5, 4096);
        let copies = |world: &World| {
            start(world, memory.base(), Address::of_ptr(bytes.as_ptr()), 4096)
                .wait()
                .expect("wait");
            world.driver().live()
        };
        let before = copies(world);
        world.driver().fail("cuCtxPopCurrent_v2", REFUSED);
        assert_eq!(start_refused_copy(world, memory.base()).operation(), "cuCtxPopCurrent_v2");
        assert_eq!(copies(world), before, "stream and event are reused");
        world.driver().fail("cuEventRecord", REFUSED);
        assert_eq!(start_refused_copy(world, memory.base()).operation(), "cuEventRecord");
        assert_eq!(copies(world), before, "stream and event are reused");
        // A wait that fails is repeated.
        world.driver().fail("cuEventRecord", REFUSED);
        world.driver().fail("cuStreamSynchronize", REFUSED);
        assert_eq!(start_refused_copy(world, memory.base()).operation(), "cuEventRecord");
        assert_eq!(copies(world), before, "stream and event are reused");
        world.free(&memory);
    });
}

/// HM-03
///
/// After a failed copy in a context of the application, the iface destroys the stream and the event
/// that it created for the copy.
#[test]
fn failed_copy_leaves_nothing_in_the_applications_context() {
    over(Profile { slow_copies: true, ..Profile::default() }, |world| {
        let foreign = world.app.create_context();
        let to = of_the_application(world);
        let before = world.driver().live();
        for symbols in [
            &["cuCtxPopCurrent_v2"][..],
            &["cuEventCreate"],
            &["cuMemcpyAsync"],
            &["cuEventRecord"],
            &["cuEventRecord", "cuStreamSynchronize"],
        ] {
            for symbol in symbols {
                world.driver().fail(symbol, REFUSED);
            }
            assert_eq!(
                start_refused_copy(world, to).operation(),
                symbols[0],
                "the first error of {symbols:?}"
            );
            assert_eq!(world.driver().live(), before, "{symbols:?}");
        }
        // If the driver also refuses to destroy the stream or event, the caller gets the error of
        // the copy.
        for (symbol, blocking) in
            [("cuEventRecord", false), ("cuEventCreate", false), ("cuMemcpyAsync", true)]
        {
            world.driver().fail(symbol, REFUSED);
            world.driver().fail("cuStreamDestroy_v2", REFUSED);
            let error = match blocking {
                true => world.cuda.write_bytes(to, &[7; 100]).expect_err("refused"),
                false => start_refused_copy(world, to),
            };
            assert_eq!(error.operation(), symbol, "the error of the work comes first");
        }
        // SAFETY: the test allocated the memory above, and frees it once.
        check(unsafe { (world.app.functions.mem_free())(to.0) });
        world.app.destroy_context(foreign);
    });
}

/// HM-03, HM-05
///
/// The driver refuses to query or to wait for an event, while the copy before it still runs.
#[test]
fn refused_query_or_wait_does_not_end_a_copy() {
    over(Profile { slow_copies: true, ..Profile::default() }, |world| {
        let memory = world.allocate(4096, AllocationKind::Device);
        let bytes = pattern(5, 4096);
        let copy = || start(world, memory.base(), Address::of_ptr(bytes.as_ptr()), 4096);
        let in_flight = || world.driver().live().copies;
        for code in [CuResult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, REFUSED] {
            for symbol in ["cuEventSynchronize", "cuCtxPushCurrent_v2"] {
                let event = copy();
                world.driver().fail("cuEventQuery", code);
                assert!(!event.is_done() && in_flight() == 1, "{code:?}");
                world.driver().fail(symbol, code);
                event.wait().expect("the copy succeeded");
                assert_eq!(in_flight(), 0, "{code:?} of {symbol}");
            }
        }
        // In a callback of a stream, every call of the thread is refused.
        let event = copy();
        world.driver().in_callback(|| assert!(!event.is_done() && in_flight() == 1));
        world.driver().in_callback(|| event.wait()).expect("the copy succeeded");
        assert_eq!(in_flight(), 0, "after a wait in a callback");
        let live = world.driver().live();
        assert_eq!((live.events, live.streams), (1, 1), "each event is reused");
        world.free(&memory);
    });
}

/// HM-03
#[test]
fn blocking_copy_with_a_refused_wait_or_start_has_ended() {
    over(Profile { slow_copies: true, ..Profile::default() }, |world| {
        let memory = world.allocate(4096, AllocationKind::Device);
        let bytes = pattern(5, 4096);
        world.driver().fail("cuStreamSynchronize", REFUSED);
        world.cuda.write_bytes(memory.base(), &bytes).expect("the copy succeeded");
        assert_eq!(world.driver().live().copies, 0);
        // The driver may begin a copy and return an error.
        let before = world.driver().calls("cuStreamSynchronize");
        world.driver().fail("cuMemcpyAsync", REFUSED);
        world.cuda.write_bytes(memory.base(), &bytes).expect_err("refused");
        assert_eq!(world.driver().calls("cuStreamSynchronize"), before + 1, "no wait");
        world.free(&memory);
    });
}

/// HM-03
///
/// A reset of the primary context ends the copies in it, and destroys their events.
#[test]
fn copy_in_a_reset_context_ends_with_an_error() {
    let world = World::fake(Profile { slow_copies: true, ..Profile::default() });
    let memory = world.allocate(4096, AllocationKind::Device);
    let bytes = pattern(5, 4096);
    let event = start(&world, memory.base(), Address::of_ptr(bytes.as_ptr()), 4096);
    // SAFETY: the device exists.
    check(unsafe { hmem_fake_cuda::cuDevicePrimaryCtxReset_v2(0) });
    assert!(event.is_done());
    event.wait().expect_err("the copy was lost");
}

/// HM-03
///
/// While another thread captures a stream in the mode GLOBAL, the driver refuses many calls of
/// threads in the same mode, and such a call invalidates the capture.
#[test]
fn calls_during_a_capture_succeed_and_do_not_invalidate_it() {
    let world = World::fake(Profile { slow_copies: true, ..Profile::default() });
    let (driver, cuda) = (world.driver(), &world.cuda);
    driver.begin_capture();
    let memory = world.allocate(4096, AllocationKind::Device);
    let bytes = pattern(5, 4096);
    cuda.write_bytes(memory.base(), &bytes).expect("write");
    let event = start(&world, memory.base(), Address::of_ptr(bytes.as_ptr()), 4096);
    assert!(!event.is_done() && event.is_done());
    event.wait().expect("wait");
    world.free(&memory);
    let World { cuda, fake, .. } = world;
    cuda.close().map_err(hmem_core::Error::from).expect("close");
    let (driver, _) = fake.expect("a fake");
    assert!(driver.end_capture(), "the capture is invalid");
    assert_eq!(driver.capture_mode_of_this_thread(), 0, "the mode is not restored");
}

//! Tests of the monitor, which detects freed memory.

use std::sync::Arc;

use hmem_core::{
    Address, AddressRange, AllocationKind, Iface, IfaceExt,
    monitor::{DetectionMethod, InvalidationCause},
};
use hmem_fake_cuda::Profile;
use hmem_iface_cuda::sys::CuDevicePtr;

use crate::subscriber::{NO_SUBSCRIPTION, Recorder};
use crate::world::{Expandable, World, check, each, not_over_a_gpu, over};

/// MON-07
#[test]
fn freed_and_reused_address_is_never_valid_again() {
    each(|world| {
        let monitor = world.cuda.start_monitor().expect("monitor");
        assert_eq!(monitor.detection(), DetectionMethod::Identity);
        assert!(
            monitor.detects(InvalidationCause::Identity)
                && !monitor.detects(InvalidationCause::Free)
        );
        for kind in world.kinds(&[
            AllocationKind::Device,
            AllocationKind::Host,
            AllocationKind::Managed,
            AllocationKind::StreamOrdered,
        ]) {
            let mut reused = 0;
            let mut last = world.allocate(4 << 20, kind);
            for _ in 0..200 {
                assert!(
                    monitor.valid(&NO_SUBSCRIPTION, &last).expect("ask"),
                    "{}: live",
                    world.name
                );
                world.free(&last);
                assert!(
                    !monitor.valid(&NO_SUBSCRIPTION, &last).expect("ask"),
                    "{}: freed {kind:?}",
                    world.name
                );
                let next = world.allocate(4 << 20, kind);
                assert!(
                    !monitor.valid(&NO_SUBSCRIPTION, &last).expect("ask"),
                    "{}: replaced {kind:?}",
                    world.name
                );
                assert_ne!(next.id, last.id);
                reused += usize::from(next.base() == last.base());
                last = next;
            }
            assert!(
                reused > 0
                    || not_over_a_gpu(&format!("no address of {} memory was reused", kind.name())),
                "{}: no address of {kind:?} was reused, so that nothing was shown",
                world.name
            );
            world.free(&last);
        }
    });
}

/// MON-07
#[test]
fn validation_costs_one_driver_call() {
    over(Profile::default(), |world| {
        let (monitor, memory) = (
            world.cuda.start_monitor().expect("monitor"),
            world.allocate(4096, AllocationKind::Device),
        );
        let before = world.driver().all_calls();
        assert!(monitor.valid(&NO_SUBSCRIPTION, &memory).expect("ask"));
        assert_eq!(world.driver().all_calls(), before + 1);
        world.free(&memory);
    });
}

/// MON-07
#[test]
fn free_by_the_application_is_detected_by_identity() {
    each(|world| {
        let monitor = world.cuda.start_monitor().expect("monitor");
        let mut pointer: CuDevicePtr = 0;
        // SAFETY: the output is writable.
        world.app.current(|driver| check(unsafe { (driver.mem_alloc())(&mut pointer, 4 << 20) }));
        let found = world.cuda.query(Address(pointer)).expect("query").expect("known");
        assert!(monitor.valid(&NO_SUBSCRIPTION, &found).expect("ask"));
        world.app.current(|driver| {
            // SAFETY: the test allocated the memory above, and the output is writable.
            unsafe {
                check((driver.mem_free())(pointer));
                check((driver.mem_alloc())(&mut pointer, 4 << 20));
            }
        });
        assert!(!monitor.valid(&NO_SUBSCRIPTION, &found).expect("ask"), "{}", world.name);
        // SAFETY: the test allocated the memory above, and frees it once.
        world.app.current(|driver| check(unsafe { (driver.mem_free())(pointer) }));
    });
}

/// MON-07
#[test]
fn frees_through_the_iface_notify_before_the_memory_is_freed() {
    each(|world| {
        let monitor = world.cuda.start_monitor().expect("monitor");
        let (memory, other) = (
            world.allocate(10_000, AllocationKind::Device),
            world.allocate(10_000, AllocationKind::Device),
        );
        let told = Arc::new(Recorder::default());
        let part = memory.range.slice(100, 50).expect("a part");
        let subscription = monitor.subscribe(part, Arc::clone(&told) as _).expect("subscribe");
        world.free(&other);
        assert!(told.changes().is_empty(), "{}: another allocation was freed", world.name);
        world.free(&memory);
        assert_eq!(told.changes(), [(memory.range, InvalidationCause::Free)]);
        monitor.unsubscribe(subscription);
        let again = world.allocate(10_000, AllocationKind::Device);
        let subscription =
            monitor.subscribe(again.range, Arc::clone(&told) as _).expect("subscribe");
        monitor.unsubscribe(subscription);
        world.free(&again);
        assert_eq!(told.changes().len(), 1, "unsubscribed");
    });
}

/// MON-07
///
/// If an application frees its memory in `Cuda::while_freeing`, subscribers are notified before the
/// free.
#[test]
fn frees_in_while_freeing_notify_before_the_free() {
    each(|world| {
        let monitor = world.cuda.start_monitor().expect("monitor");
        let mut pointer: CuDevicePtr = 0;
        // SAFETY: the output is writable.
        world.app.current(|driver| check(unsafe { (driver.mem_alloc())(&mut pointer, 10_000) }));
        let range = AddressRange::new(Address(pointer), 10_000).expect("a range");
        let told = Arc::new(Recorder::default());
        let subscription = monitor.subscribe(range, Arc::clone(&told) as _).expect("subscribe");
        world.cuda.while_freeing(range, || {
            assert_eq!(told.open(), 1, "notified before the free");
            // SAFETY: the test allocated the memory above, and frees it once.
            world.app.current(|driver| check(unsafe { (driver.mem_free())(pointer) }));
        });
        assert_eq!(told.changes().len(), 1);
        monitor.unsubscribe(subscription);
    });
}

/// MON-07
///
/// Subscribers are notified correctly if two frees at one address overlap. That happens if another
/// thread gets the address of freed memory, and frees its own memory there before the first free
/// has returned.
#[test]
fn address_may_be_reused_and_freed_before_its_free_has_ended() {
    each(|world| {
        let monitor = world.cuda.start_monitor().expect("monitor");
        let memory = world.allocate(10_000, AllocationKind::Device);
        let told = Arc::new(Recorder::default());
        let subscription =
            monitor.subscribe(memory.range, Arc::clone(&told) as _).expect("subscribe");
        world.cuda.while_freeing(memory.range, || {
            world.free(&memory);
            assert_eq!(told.open(), 1, "the outer change goes on");
        });
        assert_eq!(told.changes(), [(memory.range, InvalidationCause::Free); 2]);
        monitor.unsubscribe(subscription);
    });
}

/// MON-07, CACHE-02, LIFE-01
///
/// A subscription to memory that cannot be watched fails with the reason, so that the memory is
/// registered uncached.
#[test]
fn memory_that_cannot_be_watched_is_refused_with_the_reason() {
    each(|world| {
        let monitor = world.cuda.start_monitor().expect("monitor");
        let told = Arc::new(Recorder::default());
        let on_the_stack = [0u8; 8];
        let error = monitor
            .subscribe(AddressRange::of(&on_the_stack), Arc::clone(&told) as _)
            .expect_err("not CUDA's");
        assert!(error.is_unsupported(), "{error}");
        let parts = [Some(false), None, Some(false)];
        let memory = Expandable::new(&mut world.app, &parts);
        let error = monitor
            .subscribe(memory.range(4096, 2 * memory.step), Arc::clone(&told) as _)
            .expect_err("a part is not mapped");
        let reason = error.remedy_text().unwrap_or_default();
        assert!(error.is_unsupported() && reason.contains("not mapped"), "{error}");
        memory.end(&mut world.app, &parts);
        assert!(told.changes().is_empty(), "nothing is subscribed after an error");
    });
}

/// MON-07, LIFE-01
///
/// A subscription to memory that the application mapped by hand is valid until a mapping of its
/// range changes. Other mappings of the reservation may change.
#[test]
fn mapped_memory_is_valid_until_its_own_mapping_changes() {
    each(|world| {
        let monitor = world.cuda.start_monitor().expect("monitor");
        let parts = [Some(false), Some(false), Some(false)];
        let memory = Expandable::new(&mut world.app, &parts);
        let found = world.cuda.query(Address(memory.base)).expect("query").expect("known");
        let told = Arc::new(Recorder::default());
        let subscribe = |range| monitor.subscribe(range, Arc::clone(&told) as _).expect("mapped");
        let (first, both) =
            (subscribe(memory.range(100, 50)), subscribe(memory.range(memory.step - 1, 2)));
        let handles = |world: &World| world.fake.as_ref().map(|(fake, _)| fake.live().handles);
        let before = handles(world);
        assert!(monitor.valid(&first, &found).expect("ask"));
        assert!(monitor.valid(&both, &found).expect("ask"));
        assert_eq!(handles(world), before, "a query releases the handles that it retains");
        memory.remap(&mut world.app, 2);
        assert!(monitor.valid(&first, &found).expect("ask"), "{}: not its own", world.name);
        assert!(monitor.valid(&both, &found).expect("ask"), "{}: not its own", world.name);
        memory.remap(&mut world.app, 1);
        assert!(monitor.valid(&first, &found).expect("ask"), "{}: not its own", world.name);
        assert!(!monitor.valid(&both, &found).expect("ask"), "{}: its second part", world.name);
        monitor.unsubscribe(first);
        monitor.unsubscribe(both);
        memory.end(&mut world.app, &parts);
    });
}

/// MON-07
#[test]
fn monitor_outlives_its_iface_and_reports_it() {
    let world = crate::world::World::fake(Profile::default());
    let monitor = world.cuda.start_monitor().expect("monitor");
    let memory = world.allocate(4096, AllocationKind::Device);
    world.free(&memory);
    world.end();
    assert!(monitor.valid(&NO_SUBSCRIPTION, &memory).expect_err("closed").is_unavailable());
}

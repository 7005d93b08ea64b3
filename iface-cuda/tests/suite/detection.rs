//! Tests of queries: the allocation that contains an address, its kind and its identity.

use hmem_core::{
    Address, AddressRange, AllocationKind, DeviceId, Iface, IfaceExt, iface::AllocRequest,
};
use hmem_fake_cuda::Profile;
use hmem_iface_cuda::sys::{CuDevicePtr, CuResult};

use crate::world::{Expandable, KINDS, World, check, each, over, page, pages};

/// HM-01
#[test]
fn memory_that_the_cpu_accesses_lies_on_no_device() {
    each(|world| {
        for kind in world.kinds(&KINDS) {
            let memory = world.allocate(100_000, kind);
            let found = world.cuda.query(memory.base()).expect("query").expect("known");
            let on_a_device = !kind.cpu_accessible();
            let device = on_a_device.then_some(DeviceId(0));
            assert_eq!(found.device, device, "{}: {kind:?}", world.name);
            world.free(&memory);
        }
    });
}

/// HM-01
#[test]
fn memory_of_the_application_is_recognised() {
    each(|world| {
        let mut pointer: CuDevicePtr = 0;
        // SAFETY: the output is writable.
        world.app.current(|driver| check(unsafe { (driver.mem_alloc())(&mut pointer, 70_000) }));
        let found = world.cuda.query(Address(pointer + 69_999)).expect("query").expect("known");
        assert_eq!((found.kind, found.base()), (AllocationKind::Device, Address(pointer)));
        // `cuda.h` does not say whether a driver may round a length up.
        let len = found.range.len();
        assert!(len == 70_000 || world.is_real() && len > 70_000, "{}: {len}", world.name);
        // SAFETY: the test allocated the memory above, and frees it once.
        world.app.current(|driver| check(unsafe { (driver.mem_free())(pointer) }));
        assert_eq!(
            world.cuda.query(Address(pointer)).expect("query"),
            None,
            "a freed pointer is unknown"
        );
    });
}

/// HM-01
#[test]
fn page_locked_pages_of_the_application_are_host_registered() {
    each(|world| {
        let memory = vec![0u8; 5 * page() as usize];
        let start = Address::of_ptr(memory.as_ptr()).0.next_multiple_of(page());
        let range = AddressRange::new(Address(start), 4 * page()).expect("a range");
        assert_eq!(world.cuda.query(range.start()).expect("query"), None);
        // SAFETY: `memory` outlives the registration.
        unsafe { world.cuda.host_register(range) }.expect("page-lock");
        let found = world.cuda.query(Address(start + 5000)).expect("query").expect("known");
        assert_eq!(
            (found.kind, found.device),
            (AllocationKind::HostRegistered, None),
            "{}",
            world.name
        );
        assert!(found.kind.cpu_accessible());
        // SAFETY: `memory` outlives the registration; the call is refused.
        let twice = unsafe { world.cuda.host_register(range) }.expect_err("page-locked already");
        assert!(twice.is_busy(), "{twice}");
        let part = range.slice(0, page()).expect("a part");
        assert_eq!(
            world.cuda.host_unregister(part).expect_err("a part").kind(),
            hmem_core::ErrorKind::InvalidArgument
        );
        world.cuda.host_unregister(range).expect("unregister");
        assert_eq!(world.cuda.query(range.start()).expect("query"), None);
        world.cuda.host_unregister(range).expect_err("unlocked already");
    });
}

/// HM-01
#[test]
fn pages_locked_without_the_iface_are_host_registered() {
    each(|world| {
        let (_memory, range) = pages();
        let start = range.start().0 as *mut std::ffi::c_void;
        let len = range.len() as usize;
        // SAFETY: `_memory` outlives the registration.
        world.app.current(|driver| check(unsafe { (driver.mem_host_register())(start, len, 1) }));
        let found = world.cuda.query(Address(start as u64 + 100)).expect("query").expect("known");
        assert_eq!(found.kind, AllocationKind::HostRegistered, "{}", world.name);
        // SAFETY: the test registered the memory above.
        world.app.current(|driver| check(unsafe { (driver.mem_host_unregister())(start) }));
    });
}

/// HM-02
#[test]
fn addresses_are_found_among_ten_thousand_allocations() {
    over(Profile::default(), |world| {
        let memory: Vec<_> = (0..10_000)
            .map(|n| world.allocate(1 + n * 13 % 5000, AllocationKind::Device))
            .collect();
        for one in memory.iter().step_by(37) {
            for address in [one.base().0, one.base().0 + one.range.len() - 1] {
                let found = world.cuda.query(Address(address)).expect("query").expect("known");
                assert_eq!((found.id, found.base()), (one.id, one.base()));
            }
        }
        for one in &memory {
            world.free(one);
        }
    });
}

/// HM-02
#[test]
fn foreign_address_is_unknown_and_costs_one_driver_call() {
    each(|world| {
        let on_the_stack = 0u8;
        for address in [Address(0), Address::of_ptr(&on_the_stack), Address(u64::MAX)] {
            let before = world.fake.as_ref().map(|(driver, _)| driver.all_calls());
            assert_eq!(world.cuda.query(address).expect("query"), None, "{}", world.name);
            if let Some(before) = before {
                assert_eq!(world.driver().all_calls(), before + 1);
            }
        }
    });
}

/// HM-02
#[test]
fn query_makes_one_driver_call_and_no_context() {
    over(Profile::default(), |world| {
        let memory = world.allocate(4096, AllocationKind::Device);
        let (before, references) =
            (world.driver().all_calls(), world.driver().live().primary_references);
        world.cuda.query(memory.base()).expect("query").expect("known");
        assert_eq!(world.driver().all_calls(), before + 1);
        assert_eq!(world.driver().live().primary_references, references);
        world.free(&memory);
    });
}

/// Page-locks two pages without the iface, and passes the first address to `show`.
fn with_page_locked(world: &mut World, show: impl FnOnce(&World, Address)) {
    let (_memory, range) = pages();
    let (start, len) = (range.start().0 as *mut std::ffi::c_void, range.len() as usize);
    // SAFETY: `_memory` outlives the registration.
    world.app.current(|driver| check(unsafe { (driver.mem_host_register())(start, len, 1) }));
    show(world, range.start());
    // SAFETY: the test registered the memory above.
    world.app.current(|driver| check(unsafe { (driver.mem_host_unregister())(start) }));
}

/// HM-02
///
/// The kind of page-locked memory is queried once. Later lookups make as many driver calls as for
/// other memory.
#[test]
fn second_query_of_page_locked_memory_costs_one_driver_call() {
    over(Profile::default(), |world| {
        let calls = |world: &World, address: Address, kind: AllocationKind| {
            let before = world.driver().all_calls();
            assert_eq!(world.cuda.query(address).expect("query").expect("known").kind, kind);
            world.driver().all_calls() - before
        };
        with_page_locked(world, |world, start| {
            assert!(
                calls(world, start, AllocationKind::HostRegistered) > 1,
                "the first time tells"
            );
            for offset in [0, 1, 8191] {
                assert_eq!(
                    calls(world, Address(start.0 + offset), AllocationKind::HostRegistered),
                    1
                );
            }
        });
        // The application allocates and frees page-locked memory twice. The second allocation may
        // have the address of the first, but has a new identity.
        for _ in 0..2 {
            let mut pointer = std::ptr::null_mut();
            world.app.current(|driver| {
                // SAFETY: the output is writable.
                check(unsafe { (driver.mem_host_alloc())(&mut pointer, 4096, 0) })
            });
            let start = Address::of_ptr(pointer.cast_const());
            assert!(
                calls(world, start, AllocationKind::Host) > 1,
                "a new identity is queried again"
            );
            assert_eq!(calls(world, start, AllocationKind::Host), 1);
            // SAFETY: the test allocated the memory above, and frees it once.
            world.app.current(|driver| check(unsafe { (driver.mem_free_host())(pointer) }));
        }
    });
}

/// HM-01
///
/// Memory without an identity is queried each time, and never confused with other memory without
/// one.
#[test]
fn page_locked_memory_without_an_identity_is_not_confused() {
    over(Profile { registered_without_identity: true, ..Profile::default() }, |world| {
        for _ in 0..2 {
            with_page_locked(world, |world, start| {
                for _ in 0..2 {
                    let before = world.driver().calls("cuMemHostGetFlags");
                    let found = world.cuda.query(start).expect("query").expect("known");
                    assert_eq!((found.kind, found.id.0), (AllocationKind::HostRegistered, 0));
                    assert_eq!(
                        world.driver().calls("cuMemHostGetFlags"),
                        before + 1,
                        "asked for again"
                    );
                }
            });
        }
    });
}

/// HM-01
///
/// The iface remembers the kinds of a bounded number of page-locked allocations. For all other
/// page-locked allocations, the iface queries the driver again.
#[test]
fn a_thousand_page_locked_allocations_have_the_right_kind() {
    over(Profile::default(), |world| {
        with_page_locked(world, |world, start| {
            let memory: Vec<_> =
                (0..1000).map(|_| world.allocate(64, AllocationKind::Host)).collect();
            for _ in 0..2 {
                for one in &memory {
                    let found = world.cuda.query(one.base()).expect("query").expect("known");
                    assert_eq!((found.kind, found.id), (AllocationKind::Host, one.id));
                }
                let found = world.cuda.query(start).expect("query").expect("known");
                assert_eq!(found.kind, AllocationKind::HostRegistered);
            }
            for one in &memory {
                world.free(one);
            }
        });
    });
}

/// HM-01, MON-07
///
/// Attributes that the driver does not know are not queried.
#[test]
fn driver_without_pools_is_queried_for_the_other_attributes() {
    over(Profile { last_pointer_attribute: 16, ..Profile::default() }, |world| {
        let memory = world.allocate(4096, AllocationKind::Device);
        let found = world.cuda.query(memory.base()).expect("query").expect("known");
        assert_eq!((found.kind, found.id), (AllocationKind::Device, memory.id));
        world.free(&memory);
    });
}

/// HM-05
///
/// The driver returns INVALID_CONTEXT on a thread without a context. The iface still recognises the
/// memory as device memory.
#[test]
fn device_memory_is_recognised_on_a_thread_without_context() {
    let profile = Profile { queries_need_context: true, ..Profile::default() };
    over(profile, |world| {
        let mut pointer: CuDevicePtr = 0;
        // SAFETY: the output is writable.
        world.app.current(|driver| check(unsafe { (driver.mem_alloc())(&mut pointer, 4096) }));
        let cuda = &world.cuda;
        std::thread::scope(|scope| {
            let asked =
                scope.spawn(move || cuda.query(Address(pointer)).expect("query").expect("known"));
            assert_eq!(asked.join().expect("no panic").kind, AllocationKind::Device);
        });
        let on_the_stack = 0u8;
        assert_eq!(world.cuda.query(Address::of_ptr(&on_the_stack)).expect("query"), None);
        // SAFETY: the test allocated the memory above, and frees it once.
        world.app.current(|driver| check(unsafe { (driver.mem_free())(pointer) }));
    });
}

/// HM-05
///
/// A query also returns the right result on a thread whose current context was destroyed by another
/// thread.
#[test]
fn device_memory_is_recognised_after_the_threads_context_ended() {
    let profile = Profile { queries_need_context: true, ..Profile::default() };
    over(profile, |world| {
        let mut pointer: CuDevicePtr = 0;
        // SAFETY: the output is writable.
        world.app.current(|driver| check(unsafe { (driver.mem_alloc())(&mut pointer, 4096) }));
        let gone = world.app.create_context();
        world.elsewhere_destroy_context(gone);
        let retained = world.driver().calls("cuDevicePrimaryCtxRetain");
        for code in [None, Some(CuResult::CUDA_ERROR_INVALID_CONTEXT)] {
            if let Some(code) = code {
                world.driver().fail("cuPointerGetAttributes", code);
            }
            let found = world.cuda.query(Address(pointer)).expect("query").expect("known");
            assert_eq!(found.kind, AllocationKind::Device);
        }
        assert_eq!(
            world.driver().calls("cuDevicePrimaryCtxRetain") - retained,
            2,
            "asked in the primary one"
        );
        assert_eq!(world.app.pop(), gone, "it is still the thread's");
        // SAFETY: the test allocated the memory above, and frees it once.
        world.app.current(|driver| check(unsafe { (driver.mem_free())(pointer) }));
    });
}

/// HM-07
#[test]
fn segments_are_the_mappings_of_a_reservation() {
    each(|world| {
        if world.no_rdma_to_vmm() {
            return;
        }
        let parts = [Some(true), Some(true), Some(true)];
        let memory = Expandable::new(&mut world.app, &parts);
        let range = memory.range(1000, 2 * memory.step);
        let found = world.cuda.query(range.start()).expect("query").expect("known");
        assert_eq!(
            (found.kind, found.base()),
            (AllocationKind::Virtual, Address(memory.base)),
            "{}",
            world.name
        );
        assert!(
            found.range.contains_range(range),
            "the reservation contains ranges over several handles"
        );
        let segments = world.cuda.physical_segments(range).expect("segments");
        let lens: Vec<_> = segments.iter().map(|segment| segment.range.len()).collect();
        assert_eq!(lens, [memory.step - 1000, memory.step, 1000], "{}", world.name);
        assert!(segments.iter().all(|segment| segment.exportable));
        memory.end(&mut world.app, &parts);
    });
}

/// HM-07
#[test]
fn hole_in_a_reservation_is_named() {
    each(|world| {
        if world.no_rdma_to_vmm() {
            return;
        }
        let parts = [Some(true), None, Some(true)];
        let memory = Expandable::new(&mut world.app, &parts);
        let error = world
            .cuda
            .physical_segments(memory.range(0, 3 * memory.step))
            .expect_err("not mapped whole");
        assert_eq!(error.kind(), hmem_core::ErrorKind::OutOfBounds, "{error}");
        let hole = Address(memory.base + memory.step).to_string();
        assert_eq!(error.context_value("address"), Some(hole.as_str()), "{error}");
        memory.end(&mut world.app, &parts);
    });
}

/// HM-07
#[test]
fn memory_not_created_for_rdma_is_not_exportable() {
    each(|world| {
        if world.no_rdma_to_vmm() {
            return;
        }
        let parts = [Some(true), Some(false)];
        let memory = Expandable::new(&mut world.app, &parts);
        let segments =
            world.cuda.physical_segments(memory.range(0, 2 * memory.step)).expect("segments");
        let exportable: Vec<_> = segments.iter().map(|segment| segment.exportable).collect();
        let anything = world.reaches_anything(memory.base + memory.step);
        assert_eq!(exportable, [true, anything], "{}", world.name);
        memory.end(&mut world.app, &parts);
    });
}

/// HM-05
#[test]
fn device_out_of_range_is_an_invalid_argument() {
    each(|world| {
        let request =
            AllocRequest { len: 4096, device: DeviceId(99), kind: AllocationKind::Device };
        for error in [
            world.cuda.allocate(&request).expect_err("no such device"),
            world.cuda.flush_inbound(DeviceId(u32::MAX)).expect_err("no such device"),
        ] {
            assert_eq!(error.kind(), hmem_core::ErrorKind::InvalidArgument);
            assert!(error.context_value("devices").is_some());
        }
    });
}

/// HM-01
#[test]
fn failed_query_is_an_error_with_the_drivers_code_and_the_address() {
    over(Profile::default(), |world| {
        world.driver().fail("cuPointerGetAttributes", CuResult::CUDA_ERROR_DEINITIALIZED);
        let error = world.cuda.query(Address(0x7000_0000)).expect_err("the driver refused");
        assert_eq!(error.operation(), "cuPointerGetAttributes");
        assert_eq!(error.driver().expect("code").name, "CUDA_ERROR_DEINITIALIZED");
        assert_eq!(error.context_value("address"), Some("0x70000000"));
        world.driver().fail("cuPointerGetAttributes", CuResult(2_345));
        let error = world.cuda.query(Address(0x7000_0000)).expect_err("the driver refused");
        assert!(error.to_string().contains("code 2345"), "{error}");
    });
}

/// HM-07
///
/// For an older driver, which has no pointer attribute for GPUDirect RDMA, the iface reads the
/// ability from the properties of the physical memory.
#[test]
fn rdma_ability_is_read_from_the_handle_on_older_drivers() {
    over(Profile { last_pointer_attribute: 14, ..Profile::default() }, |world| {
        let parts = [Some(true), Some(false)];
        let memory = Expandable::new(&mut world.app, &parts);
        let segments =
            world.cuda.physical_segments(memory.range(0, 2 * memory.step)).expect("segments");
        let exportable: Vec<_> = segments.iter().map(|segment| segment.exportable).collect();
        assert_eq!(exportable, [true, false]);
        for symbol in [
            "cuMemRetainAllocationHandle",
            "cuMemGetAllocationPropertiesFromHandle",
            "cuMemRelease",
        ] {
            world.driver().fail(symbol, CuResult::CUDA_ERROR_UNKNOWN);
            let error =
                world.cuda.physical_segments(memory.range(0, 100)).expect_err("the driver refused");
            assert_eq!(error.operation(), symbol);
            if symbol == "cuMemRelease" {
                // The driver refused to release the iface's reference to the handle, so the test
                // releases it.
                let mut handle = 0;
                let retain = world.app.functions.mem_retain_allocation_handle().expect("VMM");
                // SAFETY: the output is writable; the address is only looked up.
                check(unsafe { retain(&mut handle, memory.base as *mut std::ffi::c_void) });
                for _ in 0..2 {
                    // SAFETY: the iface retained the handle once, and the test once.
                    check(unsafe { world.app.functions.mem_release().expect("VMM")(handle) });
                }
            }
        }
        memory.end(&mut world.app, &parts);
        // Memory without a handle counts as exportable: only an export shows whether it is.
        let plain = world.allocate(4096, hmem_core::AllocationKind::Device);
        assert!(world.cuda.physical_segments(plain.range).expect("segments")[0].exportable);
        world.free(&plain);
    });
}

/// HM-01
///
/// The driver knows all queried attributes, so INVALID_VALUE does not mean that the memory is host
/// memory.
#[test]
fn refused_query_does_not_make_device_memory_host_memory() {
    over(Profile::default(), |world| {
        let memory = world.allocate(4096, AllocationKind::Device);
        world.driver().fail("cuPointerGetAttributes", CuResult::CUDA_ERROR_INVALID_VALUE);
        let error = world.cuda.query(memory.base()).expect_err("the driver refused");
        assert_eq!(error.kind(), hmem_core::ErrorKind::Driver, "{error}");
        assert_eq!(error.driver().expect("code").name, "CUDA_ERROR_INVALID_VALUE");
        assert_eq!(error.context_value("address"), Some(memory.base().to_string().as_str()));
        world.free(&memory);
    });
}

/// HM-01
///
/// Some drivers answer queries only if the thread has a context. The first answer of such a driver
/// shows which attributes it knows.
#[test]
fn attributes_of_the_driver_are_found_at_its_first_answer() {
    for last_pointer_attribute in [16, 17] {
        let profile =
            Profile { queries_need_context: true, last_pointer_attribute, ..Profile::default() };
        over(profile, |world| {
            let mut pointer: CuDevicePtr = 0;
            // SAFETY: the output is writable.
            world.app.current(|driver| check(unsafe { (driver.mem_alloc())(&mut pointer, 4096) }));
            let kind = world.cuda.query(Address(pointer)).expect("query").map(|found| found.kind);
            assert_eq!(kind, Some(AllocationKind::Device), "{last_pointer_attribute}");
            // After the first answer, a refused query is an error.
            world.driver().fail("cuPointerGetAttributes", CuResult::CUDA_ERROR_INVALID_VALUE);
            world.cuda.query(Address(pointer)).expect_err("refused");
            // SAFETY: the test allocated the memory above, and frees it once.
            world.app.current(|driver| check(unsafe { (driver.mem_free())(pointer) }));
        });
    }
}

/// HM-01, CACHE-02
///
/// VMM memory is recognised as VMM memory even if the driver returns a context for it. Its mapping
/// can change without a change of identity.
#[test]
fn vmm_memory_is_recognised_if_the_driver_names_a_context() {
    let driver = Profile { vmm_names_context: true, ..Profile::default() };
    let old = Profile { absent: vec!["cuMemRetainAllocationHandle"], ..driver.clone() };
    for profile in [driver, old] {
        over(profile, |world| {
            let parts = [Some(true), Some(true)];
            let memory = Expandable::new(&mut world.app, &parts);
            let address = Address(memory.base + memory.step + 5);
            let handles = world.driver().live().handles;
            let found = world.cuda.query(address).expect("query").expect("known");
            assert_eq!(found.kind, AllocationKind::Virtual);
            assert_eq!(world.driver().live().handles, handles);
            assert_eq!(
                world
                    .cuda
                    .physical_segments(memory.range(0, 2 * memory.step))
                    .expect("segments")
                    .len(),
                2
            );
            for symbol in ["cuMemRetainAllocationHandle", "cuMemRelease"] {
                if world.driver().symbol("cuMemRetainAllocationHandle").is_none() {
                    continue;
                }
                let before = world.driver().calls(symbol);
                world.cuda.query(address).expect("query");
                assert_eq!(world.driver().calls(symbol), before + 1, "retained and released once");
            }
            memory.end(&mut world.app, &parts);
        });
    }
}

/// HM-01
///
/// Device memory without a legacy IPC handle is not taken for VMM memory if it has no VMM handle.
#[test]
fn device_memory_without_a_legacy_handle_is_not_vmm_memory() {
    over(Profile { allocates_by_vmm: true, ..Profile::default() }, |world| {
        let memory = world.allocate(4096, AllocationKind::Device);
        let found = world.cuda.query(memory.base()).expect("query").expect("known");
        assert_eq!(found.kind, AllocationKind::Device);
        // A failed query is an error, not a guess.
        world.driver().fail("cuMemRetainAllocationHandle", CuResult::CUDA_ERROR_UNKNOWN);
        let error = world.cuda.query(memory.base()).expect_err("refused");
        assert_eq!(error.operation(), "cuMemRetainAllocationHandle");
        world.free(&memory);
    });
}

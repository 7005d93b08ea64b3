//! Tests of flushes of inbound writes, in the contexts of the written memory.

use hmem_core::{Address, AddressRange, AllocationKind, DeviceId, ErrorKind, IfaceExt};
use hmem_fake_cuda::Profile;
use hmem_iface_cuda::sys::{CuContext, CuDevicePtr, CuResult};

use crate::world::{Expandable, World, check, nic, over, page};

/// Returns the profile of a device that does not order inbound writes.
fn unordered() -> Profile {
    Profile { writes_ordering: 0, ..Profile::default() }
}

fn allocate(world: &World, len: u64) -> AddressRange {
    let mut pointer: CuDevicePtr = 0;
    // SAFETY: the output is writable.
    check(unsafe { (world.app.functions.mem_alloc())(&mut pointer, len as usize) });
    AddressRange::new(Address(pointer), len).expect("a range")
}

/// Creates a context of the application with memory, and exports the memory to a NIC. Afterwards
/// the context is not current.
fn written_context(world: &World, peer_memory: bool) -> (CuContext, AddressRange) {
    let context = world.app.create_context();
    let range = allocate(world, 8192);
    let part = range.slice(4096, 100).expect("a part");
    if peer_memory {
        world.cuda.export_peer_memory(part, &nic()).expect("peer memory");
    } else {
        world.cuda.export_dma_buf(part, &nic(), Default::default()).expect("export");
    }
    assert_eq!(world.app.pop(), context);
    (context, range)
}

/// Flushes device 0, and returns the contexts in which the driver flushed.
fn flush_contexts(world: &World) -> Vec<CuContext> {
    world.cuda.flush_inbound(DeviceId(0)).expect("flush");
    world.driver().flushed()
}

fn primary(world: &mut World) -> CuContext {
    let mut primary = CuContext::NULL;
    // SAFETY: the output is writable.
    world.app.current(|driver| check(unsafe { (driver.ctx_get_current())(&mut primary) }));
    primary
}

/// Destroys a context that is not current.
fn destroy(world: &World, context: CuContext) {
    // SAFETY: `written_context` made the context.
    check(unsafe { (world.app.functions.ctx_push_current())(context) });
    world.app.destroy_context(context);
}

/// HM-14
#[test]
fn inbound_writes_are_flushed_if_the_device_does_not_order_them() {
    for (ordering, flushes) in [(0, 1), (100, 0), (200, 0)] {
        over(Profile { writes_ordering: ordering, ..Profile::default() }, |world| {
            let memory = world.allocate(4096, AllocationKind::Device);
            world.cuda.export_peer_memory(memory.range, &nic()).expect("peer memory");
            world.cuda.flush_inbound(DeviceId(0)).expect("flush");
            assert_eq!(
                world.driver().calls("cuFlushGPUDirectRDMAWrites"),
                flushes,
                "ordering {ordering}"
            );
            world.free(&memory);
        });
    }
    over(Profile { writes_ordering: 0, flush_options: 0, ..Profile::default() }, |world| {
        let error = world
            .cuda
            .flush_inbound(DeviceId(0))
            .expect_err("the device neither orders nor flushes writes");
        assert!(error.is_unsupported() && error.remedy_text().is_some(), "{error}");
    });
    let absent = vec!["cuFlushGPUDirectRDMAWrites"];
    over(Profile { writes_ordering: 0, absent, ..Profile::default() }, |world| {
        let error = world.cuda.flush_inbound(DeviceId(0)).expect_err("an older driver");
        assert_eq!(error.context_value("symbol"), Some("cuFlushGPUDirectRDMAWrites"));
    });
}

/// HM-14
#[test]
fn memory_of_the_applications_context_is_flushed_there() {
    for peer_memory in [false, true] {
        over(unordered(), |world| {
            let (context, _) = written_context(world, peer_memory);
            assert_eq!(flush_contexts(world), [context], "the thread has no context");
            let (second, _) = written_context(world, peer_memory);
            assert_eq!(flush_contexts(world), [context, second]);
            let other = world.app.create_context();
            assert_eq!(
                flush_contexts(world),
                [context, second],
                "the thread's context has no exported \
                                                           memory"
            );
            assert_eq!(world.driver().calls("cuDevicePrimaryCtxRetain"), 0);
            let primary = primary(world);
            assert_eq!(
                flush_contexts(world),
                [primary, context, second],
                "the primary context is active"
            );
            // If the driver refuses the flush in one context, the iface flushes the other contexts
            // nevertheless.
            world.driver().fail("cuFlushGPUDirectRDMAWrites", CuResult::CUDA_ERROR_UNKNOWN);
            world.cuda.flush_inbound(DeviceId(0)).expect_err("refused in the first");
            assert_eq!(world.driver().flushed(), [context, second]);
            for context in [other, second] {
                world.app.destroy_context(context);
            }
            assert_eq!(flush_contexts(world), [primary, context]);
            destroy(world, context);
            assert_eq!(flush_contexts(world), [primary]);
        });
    }
}

/// HM-14
#[test]
fn destroyed_context_is_not_passed_to_the_driver() {
    over(unordered(), |world| {
        let (context, range) = written_context(world, false);
        destroy(world, context);
        assert_eq!(flush_contexts(world), []);
        // The memory of a new context reuses the addresses of the freed memory.
        let (context, again) = written_context(world, false);
        assert_eq!(range, again, "a reused address");
        destroy(world, context);
        let other = world.app.create_context();
        assert_eq!(allocate(world, 8192), range, "a reused address");
        world.app.pop();
        assert_eq!(flush_contexts(world), []);
        assert_eq!(world.driver().undefined_calls(), 0);
        destroy(world, other);
    });
}

/// HM-14
#[test]
fn flush_of_the_primary_context_makes_five_calls() {
    over(unordered(), |world| {
        let memory = world.allocate(4096, AllocationKind::Device);
        world.cuda.export_dma_buf(memory.range, &nic(), Default::default()).expect("export");
        let before = world.driver().all_calls();
        assert_eq!(flush_contexts(world).len(), 1);
        assert_eq!(world.driver().all_calls() - before, 5, "mode, push, flush, pop, mode");
        world.free(&memory);
    });
}

/// HM-14
#[test]
fn memory_without_a_context_is_flushed_in_both_contexts() {
    // Some drivers return a context for VMM memory. The iface handles it as memory without a
    // context.
    for vmm_names_context in [false, true] {
        over(Profile { vmm_names_context, ..unordered() }, |world| {
            let context = world.app.create_context();
            let parts = [None, Some(true)];
            let memory = Expandable::here(&world.app.functions, &parts);
            let range = memory.range(memory.step + 100, 5000);
            world.cuda.export_dma_buf(range, &nic(), Default::default()).expect("export");
            assert_eq!(flush_contexts(world), [context]);
            assert!(world.active().is_empty());
            world.app.pop();
            // The thread has no current context now, so the first flush creates the primary context
            // and keeps it.
            let primary = flush_contexts(world);
            assert_eq!((primary.len(), world.active()), (1, vec![0]));
            assert_eq!(flush_contexts(world), primary);
            assert_eq!(world.driver().calls("cuDevicePrimaryCtxRetain"), 1);
            // SAFETY: `create_context` above made the context.
            check(unsafe { (world.app.functions.ctx_push_current())(context) });
            assert_eq!(flush_contexts(world), [primary[0], context]);
            memory.end_here(&world.app.functions, &parts);
            assert_eq!(flush_contexts(world), primary, "memory without a context was freed");
            world.app.destroy_context(context);
        });
    }
}

/// HM-14
#[test]
fn flush_forgets_freed_exported_memory() {
    over(unordered(), |world| {
        let context = world.app.create_context();
        let asked = |world: &World| world.driver().calls("cuPointerGetAttributes");
        // All of them are allocated before the first free, so that no address is used twice.
        let ranges: Vec<_> = (0..250).map(|_| allocate(world, page())).collect();
        for range in ranges {
            world.cuda.export_peer_memory(range, &nic()).expect("peer memory");
            // SAFETY: the test allocated the memory above, and frees it once.
            check(unsafe { (world.app.functions.mem_free())(range.start().0) });
        }
        let before = asked(world);
        assert_eq!(
            flush_contexts(world),
            [context],
            "the thread's context, as without exported memory"
        );
        assert!(asked(world) - before <= 65, "{} queries", asked(world) - before);
        let before = asked(world);
        flush_contexts(world);
        assert_eq!(asked(world), before, "no exported memory is left to query");
        world.app.destroy_context(context);
    });
}

/// HM-14
///
/// Some drivers answer queries only if the thread has a context. With such a driver, a flush on a
/// thread without a context fails.
#[test]
fn flush_fails_while_the_driver_cannot_be_queried() {
    over(Profile { queries_need_context: true, ..unordered() }, |world| {
        let (context, _) = written_context(world, true);
        let error =
            world.cuda.flush_inbound(DeviceId(0)).expect_err("the driver cannot be queried");
        assert_eq!(error.kind(), ErrorKind::BadState, "{error}");
        assert!(error.remedy_text().is_some(), "{error}");
        assert_eq!(world.driver().flushed(), []);
        let primary = primary(world);
        assert_eq!(flush_contexts(world), [primary, context]);
        destroy(world, context);
        assert_eq!(flush_contexts(world), [primary]);
        assert_eq!(world.driver().undefined_calls(), 0);
    });
}

//! Tests that no resource leaks when a driver call fails.

#[path = "../../tests/subscriber/mod.rs"]
mod subscriber;
mod support;

use hmem_core::{
    Address, AddressRange, AllocationKind, DeviceId, Errno, Iface, IfaceExt, Result,
    iface::{AllocRequest, DmaBufMapping},
};
use hmem_iface_system::{DeviceCall, FreeDetection, Simulated};
use subscriber::Recorder;
use support::*;

/// Uses every operation of the iface, continues after failures, and returns the errors.
fn use_everything(simulated: &Simulated) -> Vec<hmem_core::Error> {
    let mut errors = Vec::new();
    let mut keep = |result: Result<()>| errors.extend(result.err());
    keep(simulated.devices().map(drop));
    keep(simulated.flush_inbound(DeviceId(0)));
    // Longer than a page.
    let host = vec![5_u8; page() as usize + 904];
    let host_address = Address::of_ptr(host.as_ptr());
    // SAFETY: `host` outlives its registration.
    match unsafe { simulated.host_register(AddressRange::of(&host)) } {
        Ok(()) => {
            while let Err(error) = simulated.host_unregister(AddressRange::of(&host)) {
                keep(Err(error));
            }
        }
        failed => keep(failed),
    }
    for kind in DEVICE_KINDS {
        let allocation = match try_allocate(simulated, 5 * page() - 480, kind) {
            Ok(allocation) => allocation,
            Err(error) => {
                keep(Err(error));
                continue;
            }
        };
        keep(simulated.query(allocation.base()).map(drop));
        keep(simulated.physical_segments(allocation.range).map(drop));
        // SAFETY: the copy only reads `host`, and nothing writes to it.
        keep(unsafe { simulated.copy(allocation.base(), host_address, host.len() as u64) });
        // SAFETY: the copy only reads `host`, which outlives the copy.
        keep(
            unsafe { simulated.start_copy(allocation.base(), host_address, host.len() as u64) }
                .and_then(|event| event.wait()),
        );
        if kind == AllocationKind::Device {
            let export =
                simulated.export_dma_buf(allocation.range, &nic("loop0"), DmaBufMapping::Default);
            keep(export.and_then(|export| simulated.release_dma_buf(export)));
            keep(simulated.export_peer_memory(allocation.range, &nic("loop0")).map(drop));
            let opened =
                simulated.ipc_export(&allocation).and_then(|handle| simulated.ipc_open(&handle));
            match opened {
                Ok(opened) => loop {
                    // SAFETY: no reference to the memory exists.
                    match unsafe { simulated.ipc_close(&opened) } {
                        Ok(()) => break,
                        failed => keep(failed),
                    }
                },
                Err(error) => keep(Err(error)),
            }
        }
        let monitor = simulated.start_monitor().unwrap();
        let subscription =
            monitor.subscribe(allocation.range, std::sync::Arc::new(Recorder::default()));
        let subscription = subscription.map_err(|error| keep(Err(error))).ok();
        while let Err(error) = free(simulated, &allocation) {
            keep(Err(error));
        }
        subscription.into_iter().for_each(|subscription| monitor.unsubscribe(subscription));
    }
    errors
}

fn build() -> Simulated {
    let builder = Simulated::builder()
        .segment_len(2 * page())
        .peer_memory(true)
        .free_detection(FreeDetection::Callback);
    builder.arena(1 << 20).build().unwrap()
}

fn assert_nothing_is_left(simulated: &Simulated) {
    let stats = simulated.stats();
    let left = [
        stats.live_allocations,
        stats.live_bytes,
        stats.opened_allocations,
        stats.live_exports,
        stats.subscriptions,
        stats.host_registrations,
        stats.copies_pending,
    ];
    assert_eq!(left, [0; 7], "{stats:?}");
    // The whole memory of the device can be allocated again.
    let request = AllocRequest { len: 16 << 30, device: DeviceId(0), kind: AllocationKind::Device };
    let all = simulated.allocate(&request).unwrap();
    free(simulated, &all).unwrap();
}

#[test]
fn each_failed_call_is_named_and_leaks_nothing() {
    let _turn = turn();
    let simulated = build();
    simulated.faults().start_counting();
    assert!(use_everything(&simulated).is_empty());
    let (fds, maps) = (open_fds(), mappings());
    for call in &DeviceCall::ALL {
        let before = simulated.faults().calls(*call);
        assert!(use_everything(&simulated).is_empty());
        let calls = simulated.faults().calls(*call) - before;
        assert!(calls > 0, "{call:?} is not exercised");
        for nth in 1..=calls {
            simulated.faults().fail_nth(*call, nth, Errno(5));
            let errors = use_everything(&simulated);
            assert_eq!(errors.len(), 1, "{call:?} {nth}: {errors:?}");
            assert_eq!(errors[0].os_errno(), Some(Errno(5)));
            assert_eq!(errors[0].operation(), call.name());
            assert_eq!(errors[0].iface_kind(), Some(simulated.kind()));
            simulated.faults().clear();
            assert_nothing_is_left(&simulated);
        }
    }
    assert_eq!(open_fds(), fds);
    assert!(mappings() < maps + 20, "a mapping leaks with each fault");
}

#[test]
fn call_fails_exactly_as_often_as_requested() {
    let _turn = turn();
    let simulated = Simulated::builder().fault(DeviceCall::Devices, 2, Errno(19)).build().unwrap();
    assert!(simulated.devices().is_ok());
    assert!(simulated.devices().unwrap_err().is_unavailable());
    assert!(simulated.devices().is_ok());

    simulated.faults().fail_always(DeviceCall::Devices, Errno(95));
    for _ in 0..3 {
        assert!(simulated.devices().unwrap_err().is_unsupported());
    }
    simulated.faults().clear();
    assert!(simulated.devices().is_ok());
    assert_eq!(simulated.stats().calls(DeviceCall::Devices), 7);
}

#[test]
fn failed_lookup_is_an_error_not_a_foreign_address() {
    let _turn = turn();
    let simulated = simulated();
    let allocation = device(&simulated, 64);
    simulated.faults().fail_next(DeviceCall::Query, Errno(5));
    assert!(simulated.query(Address(0x1000)).unwrap().is_none());
    assert!(simulated.query(allocation.base()).is_err());
    assert_eq!(simulated.query(allocation.base()).unwrap(), Some(allocation));
}

#[test]
fn gate_holds_an_allocation_until_it_is_released() {
    let _turn = turn();
    let simulated = build();
    let gate = simulated.faults().hold(DeviceCall::CreateMemory);
    std::thread::scope(|scope| {
        let allocated = scope.spawn(|| device(&simulated, 64));
        gate.wait_held();
        assert!(gate.is_holding() && !allocated.is_finished());
        gate.release();
        free(&simulated, &allocated.join().unwrap()).unwrap();
    });
}

//! Tests of opening: errors for missing parts, and acquiring a device if permitted.
#![allow(unsafe_code)]

#[path = "../../tests/unusable_library/mod.rs"]
mod unusable_library;

use std::path::Path;

use hmem_core::{
    AllocationKind, DeviceId, ErrorKind, Iface, IfaceExt, IfaceKind,
    iface::{AllocRequest, Facet},
};
use hmem_fake_accelerators::{Fake, Profile};
use hmem_iface_accelerators::synapseai::{
    Builder, HLTHUNK_LIBRARY_VARIABLE, SynapseAi,
    sys::{hlthunk, synapse},
};

fn synapse(fake: &Fake) -> synapse::Functions {
    // SAFETY: the fake's functions have the signatures of their names and live forever.
    unsafe { synapse::Functions::from_lookup(|name| fake.symbol(name)) }.expect("all functions")
}

fn builder(fake: &Fake) -> Builder {
    // SAFETY: the fake's functions have the signatures of their names and live forever.
    let hlthunk = unsafe { hlthunk::Functions::from_lookup(|name| fake.symbol(name)) };
    SynapseAi::builder().functions(synapse(fake)).hlthunk_functions(hlthunk.expect("all functions"))
}

const REQUEST: AllocRequest =
    AllocRequest { len: 100, device: DeviceId(0), kind: AllocationKind::Device };

/// HM-04
#[test]
fn unusable_library_is_unavailable_with_the_reason() {
    let open = |path: &Path| {
        // SAFETY: `path` names no library, or `libm.so.6`, which any process may load.
        unsafe { SynapseAi::builder().library(path) }.open().expect_err("no library there")
    };
    let variable = SynapseAi::LIBRARY_VARIABLE;
    unusable_library::is_unavailable_with_the_reason(
        IfaceKind::SYNAPSEAI,
        variable,
        synapse::Functions::SYMBOLS[0],
        open,
    );
}

/// HM-04 HM-06
#[test]
fn missing_libhl_thunk_is_the_reason_for_no_dma_bufs() {
    let fake = Fake::start(Profile::running());
    let builder = SynapseAi::builder().functions(synapse(&fake));
    // SAFETY: there is no such file.
    let builder = unsafe { builder.hlthunk("/nowhere/libhl-thunk.so") };
    let gaudi = builder.open().expect("a device");
    assert!(gaudi.dma_buf().is_none());
    let error = gaudi.unavailable(Facet::DmaBuf);
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(
        error.remedy_text().is_some_and(|text| text.contains(HLTHUNK_LIBRARY_VARIABLE)),
        "{error}"
    );
    assert!(error.to_string().contains("/nowhere/libhl-thunk.so"), "{error}");
    let own = gaudi.allocate(&REQUEST).expect("allocate");
    // SAFETY: nothing uses the memory.
    unsafe { gaudi.free(&own) }.expect("free");
}

/// HM-04
#[test]
fn machine_without_gaudi_devices_is_unavailable() {
    let fake = Fake::start(Profile { devices: 0, ..Profile::default() });
    let error = builder(&fake).open().expect_err("no device");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.context_value("devices"), Some("0"));
    for symbol in ["synInitialize", "synDeviceGetCount"] {
        fake.fail(symbol, 26);
        let error = builder(&fake).open().expect_err("no answer");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert_eq!(error.operation(), symbol);
        assert_eq!(error.driver().map(|driver| &*driver.name), Some("synFail"));
    }
}

/// HM-05
#[test]
fn device_is_acquired_only_with_permission() {
    let fake = Fake::start(Profile::default());
    let gaudi = builder(&fake).start_runtime(false).open().expect("a device");
    assert!(!gaudi.is_device_active(DeviceId(0)).expect("a device"));
    let error = gaudi.allocate(&REQUEST).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.remedy_text().is_some_and(|text| text.contains("HMEM_SYNAPSEAI_START_RUNTIME")));
    assert_eq!(fake.calls("synDeviceAcquire"), 0);

    let gaudi = builder(&fake).start_runtime(true).open().expect("a device");
    let own = std::thread::scope(|scope| {
        let threads = [(); 4].map(|()| scope.spawn(|| gaudi.allocate(&REQUEST)));
        threads.map(|thread| thread.join().expect("no panic").expect("allocate"))
    });
    assert_eq!(fake.calls("synDeviceAcquire"), 1);
    let device = &gaudi.devices().expect("devices")[0];
    assert_eq!((device.name.as_str(), device.memory), ("Gaudi 2", 1 << 34));
    assert_eq!(device.pci_bus_id.as_deref(), Some("0000:19:00.0"));
    for own in own {
        // SAFETY: nothing uses the memory.
        unsafe { gaudi.free(&own) }.expect("free");
    }
}

/// HM-03
#[test]
fn dropping_the_iface_releases_its_buffer_and_stream() {
    let fake = Fake::start(Profile::running());
    let gaudi = builder(&fake).open().expect("a device");
    let own = gaudi.allocate(&REQUEST).expect("allocate");
    // SAFETY: the memory is live, and is freed after the copies.
    unsafe {
        gaudi.write(own.base(), &[7; 100]).expect("write");
        gaudi.write(own.base(), &[8; 100]).expect("write");
        let live = fake.live();
        assert_eq!((live.host_buffers, live.streams), (1, 1), "one of each for all copies");
        // The device may still write to the buffer of a failed copy, so the next copy uses a new
        // buffer.
        fake.fail("synStreamSynchronize", 17);
        let error = gaudi.read(own.base(), &mut [0; 100]).unwrap_err();
        assert_eq!(error.driver().map(|driver| driver.code), Some(17));
        let mut back = [0; 100];
        gaudi.read(own.base(), &mut back).expect("read");
        assert_eq!(back, [8; 100]);
        assert_eq!(fake.live().host_buffers, 2, "the buffer of the failed copy is not used again");
        gaudi.free(&own).expect("free");
    }
    drop(gaudi);
    let live = fake.live();
    assert_eq!((live.host_buffers, live.streams), (1, 1), "only those of the failed copy are left");
}

//! Tests of opening: errors for missing parts, and starting the runtime if permitted.
#![allow(unsafe_code)]

#[path = "../../tests/child/mod.rs"]
mod child;
#[path = "../../tests/unusable_library/mod.rs"]
mod unusable_library;

use std::{env, path::Path};

use hmem_core::{
    AllocationKind, DeviceId, ErrorKind, Iface, IfaceExt, IfaceKind, iface::AllocRequest,
};
use hmem_fake_accelerators::{Fake, Profile};
use hmem_iface_accelerators::neuron::{Builder, Neuron, sys::Functions};

fn builder(fake: &Fake) -> Builder {
    // SAFETY: the fake's functions have the signatures of their names and live forever.
    let functions = unsafe { Functions::from_lookup(|name| fake.symbol(name)) };
    Neuron::builder().functions(functions.expect("all functions"))
}

const REQUEST: AllocRequest =
    AllocRequest { len: 100, device: DeviceId(1), kind: AllocationKind::Device };

/// HM-04
#[test]
fn unusable_library_is_unavailable_with_the_reason() {
    let open = |path: &Path| {
        // SAFETY: `path` names no library, or `libm.so.6`, which any process may load.
        unsafe { Neuron::builder().library(path) }.open().expect_err("no library there")
    };
    let variable = Neuron::LIBRARY_VARIABLE;
    unusable_library::is_unavailable_with_the_reason(
        IfaceKind::NEURON,
        variable,
        Functions::SYMBOLS[0],
        open,
    );
}

/// HM-04
#[test]
fn machine_without_neuron_cores_is_unavailable() {
    let fake = Fake::start(Profile { devices: 0, ..Profile::default() });
    let error = builder(&fake).open().expect_err("no device");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.context_value("devices"), Some("0"));
    fake.fail("nrt_get_visible_nc_count", 1);
    let error = builder(&fake).open().expect_err("no answer");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.driver().map(|driver| driver.code), Some(1));
}

/// HM-05
#[test]
fn runtime_is_not_started_without_permission() {
    let fake = Fake::start(Profile::default());
    let neuron = builder(&fake).start_runtime(false).open().expect("two cores");
    assert_eq!(neuron.devices().expect("devices").len(), 2);
    assert!(!neuron.is_device_active(DeviceId(0)).expect("a device"));
    let error = neuron.allocate(&REQUEST).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.remedy_text().is_some_and(|text| text.contains("HMEM_NEURON_START_RUNTIME")));
    assert_eq!(fake.calls("nrt_init"), 0);
}

/// CACHE-12 HM-05
///
/// The variable takes the booleans of libfabric, and any other value is refused. The builder
/// overrides the variable. For each value, the test starts itself again in a process with the value
/// in the environment.
#[test]
fn start_variable_is_a_boolean_and_other_values_are_refused() {
    const NAME: &str = "start_variable_is_a_boolean_and_other_values_are_refused";
    const VARIABLE: &str = Neuron::START_VARIABLE;
    for (value, starts) in [
        ("", Some(false)),
        ("off", Some(false)),
        ("1", Some(true)),
        ("Yes", Some(true)),
        ("2", None),
    ] {
        if !child::alone(NAME, &[(VARIABLE, value)]) || env::var(VARIABLE).unwrap() != value {
            continue;
        }
        let fake = Fake::start(Profile::default());
        match (builder(&fake).open(), starts) {
            (Ok(neuron), Some(starts)) => assert_eq!(neuron.allocate(&REQUEST).is_ok(), starts),
            (Err(error), None) => {
                assert_eq!(error.kind(), ErrorKind::InvalidArgument);
                assert_eq!(error.context_value("variable"), Some(VARIABLE));
                builder(&fake).start_runtime(false).open().expect("the builder decides");
            }
            (opened, _) => panic!("{value:?}: {opened:?}"),
        }
        return;
    }
}

/// HM-05
#[test]
fn first_allocation_starts_the_runtime_once_if_allowed() {
    let fake = Fake::start(Profile::default());
    let neuron = builder(&fake).start_runtime(true).open().expect("two cores");
    assert_eq!(fake.calls("nrt_init"), 0, "opening starts nothing");
    fake.fail("nrt_init", 1);
    assert_eq!(neuron.allocate(&REQUEST).unwrap_err().operation(), "nrt_init");
    let own = std::thread::scope(|scope| {
        let threads = [(); 4].map(|()| scope.spawn(|| neuron.allocate(&REQUEST)));
        threads.map(|thread| thread.join().expect("no panic").expect("allocate"))
    });
    assert_eq!(fake.calls("nrt_init"), 2, "the refused call and one more");
    assert!(neuron.is_device_active(DeviceId(0)).expect("a device"));
    const NRT_RESOURCE: i32 = 4;
    fake.fail("nrt_tensor_allocate", NRT_RESOURCE);
    assert!(neuron.is_device_active(DeviceId(0)).expect("a full device is in use"));
    assert_eq!(neuron.devices().expect("devices")[0].memory, 1 << 34);
    for own in own {
        assert_eq!(own.device, Some(DeviceId(1)));
        // SAFETY: nothing uses the memory.
        unsafe { neuron.free(&own) }.expect("free");
    }
    assert_eq!(fake.live().allocations, 0);
}

//! Tests of closing an iface.

use hmem_core::{DeviceId, Error, ErrorKind, Rejected};
use hmem_fake_accelerators::{Fake, Live, Profile};
use hmem_iface_kit::announced::{Announced, Driver};

use crate::world::{allocate, check_round_trip, free, gaudi, neuron, page, range};

/// Expects the iface to refuse to close, and returns the iface.
fn busy<D: Driver>(closed: Result<(), Rejected<Announced<D>>>) -> Announced<D> {
    let rejected = closed.expect_err("memory is left");
    assert_eq!(rejected.error.kind(), ErrorKind::Busy, "{}", rejected.error);
    assert_eq!(rejected.error.context_value("allocations"), Some("1"), "{}", rejected.error);
    rejected.value
}

/// Checks that closing is refused while memory is allocated. Frees the memory, and returns the
/// iface, which is still open.
fn check_busy_close<D: Driver>(fake: &Fake, iface: Announced<D>) -> Announced<D> {
    let own = allocate(&iface, page());
    assert!(format!("{iface:?}").contains("allocations: 1"), "{iface:?}");
    check_round_trip(&iface, own.base(), page() as usize).expect("copy");
    let iface = busy(iface.close());
    check_round_trip(&iface, own.base(), page() as usize).expect("the iface still works");
    free(&iface, &own).expect("free");
    assert_eq!(fake.live().allocations, 0);
    iface
}

/// REL-01
#[test]
fn closing_is_refused_while_memory_is_allocated() {
    let fake = Fake::start(Profile::running());
    check_busy_close(&fake, neuron(&fake).expect("cores"))
        .close()
        .map_err(Error::from)
        .expect("close");
    check_busy_close(&fake, gaudi(&fake).expect("a device"))
        .close()
        .map_err(Error::from)
        .expect("close");
    assert_eq!(fake.live(), Live::default());
}

/// REL-01
#[test]
fn closing_is_refused_while_memory_is_announced() {
    let fake = Fake::start(Profile::running());
    let gaudi = gaudi(&fake).expect("a device");
    // SAFETY: nothing reads or writes the memory.
    let announced = unsafe { gaudi.announce(range(1 << 40, page()), DeviceId(0), ()) };
    let gaudi = busy(gaudi.close());
    gaudi.withdraw(&announced.expect("announce")).expect("withdraw");
    gaudi.close().map_err(Error::from).expect("close");
}

/// REL-01: the error of a failed close returns the iface, which can be closed again.
#[test]
fn failed_close_hands_the_iface_back_and_can_be_repeated() {
    const FAILED: i32 = 26;
    for symbol in ["synStreamDestroy", "synHostFree"] {
        let fake = Fake::start(Profile::running());
        let iface = check_busy_close(&fake, gaudi(&fake).expect("a device"));
        fake.fail(symbol, FAILED);
        let rejected = iface.close().expect_err("the call fails");
        assert_eq!(rejected.error.operation(), symbol, "{}", rejected.error);
        let iface = rejected.value;
        let own = allocate(&iface, page());
        check_round_trip(&iface, own.base(), page() as usize).expect("the iface still works");
        free(&iface, &own).expect("free");
        iface.close().map_err(Error::from).expect("close");
        assert_eq!(fake.live(), Live::default());
    }
}

//! Tests of an iface in a forked child.

use std::sync::{Arc, atomic::Ordering};

use hmem_core::{Address, DeviceId, ErrorKind, Iface, IfaceExt, Result, iface::DmaBufMapping};
use hmem_fake_accelerators::{Fake, Profile};
use hmem_iface_kit::announced::{Announced, Driver};

use crate::{
    fork::{drop_in_the_child, in_a_child},
    kept::Flagged,
    subscriber::Recorder,
    world::{allocate, check_round_trip, free, gaudi, nic, page, range},
};

fn in_bad_state<T>(result: Result<T>) -> bool {
    result.is_err_and(|error| error.kind() == ErrorKind::BadState)
}

/// Returns true if the iface refuses all operations on the memory at `base`, a live allocation of
/// the parent.
fn refuses_all<D: Driver>(iface: &Announced<D>, base: Address, handle: D::Handle) -> bool {
    let whole = range(base.0, page());
    let Ok(monitor) = iface.start_monitor() else { return false };
    // SAFETY: the iface refuses to announce or copy in a forked child.
    let announced = unsafe { iface.announce(range(1 << 40, page()), DeviceId(0), handle) };
    // SAFETY: the buffer has 8 bytes.
    let copied = unsafe { iface.read(base, &mut [0; 8]) };
    [
        in_bad_state(iface.query(base)),
        in_bad_state(iface.allocate(&crate::world::request(page()))),
        in_bad_state(iface.export_dma_buf(whole, &nic(), DmaBufMapping::Default)),
        in_bad_state(monitor.subscribe(whole, Arc::new(Recorder::default()))),
        in_bad_state(announced),
        in_bad_state(copied),
    ]
    .iter()
    .all(|refused| *refused)
}

/// CACHE-13 HM-06
///
/// The memory is freed while a NIC of the parent may still use it. The driver of the child, which
/// shares the device with that of the parent, must not free it.
#[test]
fn forked_child_frees_no_lingering_memory_of_its_parent() {
    let driver = Flagged::default();
    let (used, live) = (Arc::clone(&driver.used), Arc::clone(&driver.live));
    let live = || live.lock().expect("no panic").clone();
    let iface = Announced::new(driver).expect("open");
    let (exported, plain) = (allocate(&iface, page()), allocate(&iface, page()));
    used.store(true, Ordering::Relaxed);
    drop(iface.export_dma_buf(exported.range, &nic(), DmaBufMapping::Default).expect("export"));
    free(&iface, &exported).expect("free");
    let monitor = iface.start_monitor().expect("a monitor");
    let subscription =
        monitor.subscribe(plain.range, Arc::new(Recorder::default())).expect("subscribe");
    let parents = live();
    assert_eq!(parents, [exported.base().0, plain.base().0]);
    in_a_child(|| {
        // The child's copy of the dma-buf counts as unused, as it does after the child has closed
        // the descriptors that it inherited.
        used.store(false, Ordering::Relaxed);
        let refused = refuses_all(&iface, plain.base(), ())
            && in_bad_state(free(&iface, &plain))
            && in_bad_state(iface.withdraw(&plain));
        // SAFETY: the originals are the parent's. The child neither uses nor drops them.
        let (copy, closed) = unsafe {
            (std::ptr::read(&raw const subscription), std::ptr::read(&raw const iface).close())
        };
        monitor.unsubscribe(copy);
        let refused =
            refused && closed.is_err_and(|rejected| rejected.error.kind() == ErrorKind::BadState);
        refused && live() == parents
    });
    monitor.unsubscribe(subscription);
    free(&iface, &plain).expect("free");
    used.store(false, Ordering::Relaxed);
    drop(iface);
    assert!(live().is_empty());
}

/// CACHE-13
///
/// The driver of Gaudi keeps a stream and a buffer for copies, which its destructor releases.
#[test]
fn forked_child_releases_no_handles_of_its_parents_driver() {
    let fake = Fake::start(Profile::running());
    let iface = gaudi(&fake).expect("a device");
    let own = allocate(&iface, page());
    check_round_trip(&iface, own.base(), page() as usize).expect("copy");
    let parents = fake.live();
    in_a_child(|| {
        let refused = refuses_all(&iface, own.base(), ());
        drop_in_the_child(&iface);
        refused && fake.live() == parents
    });
    check_round_trip(&iface, own.base(), page() as usize).expect("the parent still copies");
    free(&iface, &own).expect("free");
    iface.close().map_err(hmem_core::Error::from).expect("close");
}

//! The iface in a forked child of the process that opened it.

#[path = "../../tests/fork/mod.rs"]
mod fork;
#[path = "../../tests/subscriber/mod.rs"]
mod subscriber;

use std::sync::Arc;

use fork::{drop_in_the_child, in_a_child};
use hmem_core::{
    Address, AllocationKind, DeviceId, Error, ErrorKind, IfaceExt, Result, iface::AllocRequest,
};
use hmem_fake_ze::{FakeDriver, Live, Profile};
use hmem_iface_ze::{LevelZero, sys::Functions};
use subscriber::Recorder;

const LEN: u64 = 4096;

fn in_bad_state<T>(result: Result<T>) -> bool {
    result.is_err_and(|error| error.kind() == ErrorKind::BadState)
}

/// CACHE-13
///
/// The driver of a forked child has the device files of its parent: a free in the child would close
/// the parent's memory.
#[test]
fn forked_child_releases_nothing_of_its_parent() {
    let driver = FakeDriver::start(Profile::default());
    // SAFETY: each function has the signature of its name in `ze_api.h`, and functions live
    // forever.
    let functions = unsafe { Functions::from_lookup(|name| driver.symbol(name)) };
    let iface = LevelZero::builder().functions(functions.expect("the table")).open().expect("open");
    let request = AllocRequest { len: LEN, device: DeviceId(0), kind: AllocationKind::Device };
    let own = iface.allocate(&request).expect("allocate");
    let monitor = iface.start_monitor().expect("a monitor");
    let bytes = [7; LEN as usize];
    let from = Address::of_ptr(bytes.as_ptr());
    // SAFETY: the array outlives the copies, for which this test waits.
    let start = || unsafe { iface.start_copy(own.base(), from, LEN) }.expect("start");
    let (first, copy) = (start(), start());
    first.wait().expect("a copy, whose lane the iface keeps");
    let calls = || ["zeContextDestroy", "zeEventHostSynchronize"].map(|name| driver.calls(name));
    let before = calls();
    let parents = driver.live();
    in_a_child(|| {
        // SAFETY: the calls are refused.
        let (freed, copied) = unsafe { (iface.free(&own), iface.read(own.base(), &mut [0; 8])) };
        let refused = in_bad_state(freed)
            && in_bad_state(copied)
            && in_bad_state(monitor.subscribe(own.range, Arc::new(Recorder::default())));
        let ended = copy.is_done();
        drop_in_the_child(&copy);
        // SAFETY: the original is the parent's. The child neither uses nor drops it.
        let closed = unsafe { std::ptr::read(&raw const iface) }.close();
        // This drops the iface in the child.
        let refused = refused && in_bad_state(closed.map_err(Error::from));
        refused && ended && driver.live() == parents && calls() == before
    });
    copy.wait().expect("wait");
    // SAFETY: no code uses the memory.
    unsafe { iface.free(&own) }.expect("free");
    iface.close().map_err(Error::from).expect("close");
    assert_eq!(driver.live(), Live::default());
}

//! The iface in a forked child of the process that opened it.

#[path = "../../tests/fork/mod.rs"]
mod fork;
#[path = "../../tests/subscriber/mod.rs"]
mod subscriber;

use std::sync::Arc;

use fork::{drop_in_the_child, in_a_child};
use hmem_core::{
    Address, AddressRange, Allocation, AllocationKind, DeviceId, Error, ErrorKind, IfaceExt,
    Result, iface::AllocRequest,
};
use hmem_fake_rocr::{FakeRuntime, Live, Profile};
use hmem_iface_rocr::{Rocr, sys::Functions};
use subscriber::Recorder;

const LEN: u64 = 4096;

fn in_bad_state<T>(result: Result<T>) -> bool {
    result.is_err_and(|error| error.kind() == ErrorKind::BadState)
}

fn free(iface: &Rocr, allocation: &Allocation) -> Result<()> {
    // SAFETY: no code uses the memory.
    unsafe { iface.free(allocation) }
}

/// CACHE-13
///
/// The real runtime aborts or hangs if a forked child releases objects of its parent. A free by the
/// application notifies no subscriber in the child, since the parent's memory is still there.
#[test]
fn forked_child_releases_nothing_of_its_parent_and_notifies_no_subscriber() {
    let runtime = FakeRuntime::start(Profile { slow_copies: true, ..Profile::default() });
    // SAFETY: each function has the signature of its name in AMD's headers, and functions live
    // forever.
    let functions = unsafe { Functions::from_lookup(|name| runtime.symbol(name)) };
    let iface = Rocr::builder().functions(functions.expect("the table")).open().expect("open");
    let request = AllocRequest { len: LEN, device: DeviceId(0), kind: AllocationKind::Device };
    let own = iface.allocate(&request).expect("allocate");
    let foreign = runtime.allocate(0, LEN as usize);
    let watched = AddressRange::new(Address(foreign), LEN).expect("a range");
    let monitor = iface.start_monitor().expect("a monitor");
    let told = Arc::new(Recorder::default());
    let subscription = monitor.subscribe(watched, told.clone()).expect("subscribe");
    let bytes = [7; LEN as usize];
    let from = Address::of_ptr(bytes.as_ptr());
    // SAFETY: the array outlives the copies, for which this test waits.
    let start = || unsafe { iface.start_copy(own.base(), from, LEN) }.expect("start");
    let (first, copy) = (start(), start());
    first.wait().expect("a copy, whose buffer the iface keeps");
    in_a_child(|| {
        runtime.free(foreign);
        let parents = runtime.live();
        // SAFETY: the original is the parent's. The child neither uses nor drops it.
        monitor.unsubscribe(unsafe { std::ptr::read(&raw const subscription) });
        // SAFETY: the call is refused.
        let copied = unsafe { iface.read(own.base(), &mut [0; 8]) };
        let refused = in_bad_state(free(&iface, &own))
            && in_bad_state(iface.host_unregister(own.range))
            && in_bad_state(monitor.subscribe(own.range, told.clone()))
            && in_bad_state(copied);
        let ended = copy.is_done();
        drop_in_the_child(&copy);
        // SAFETY: the original is the parent's. The child neither uses nor drops it.
        let closed = unsafe { std::ptr::read(&raw const iface) }.close();
        // This drops the iface in the child.
        let refused = refused && in_bad_state(closed.map_err(Error::from));
        refused && ended && told.changes().is_empty() && runtime.live() == parents
    });
    copy.wait().expect("wait");
    runtime.free(foreign);
    assert_eq!(told.ranges(), [watched]);
    monitor.unsubscribe(subscription);
    free(&iface, &own).expect("free");
    iface.close().map_err(Error::from).expect("close");
    assert_eq!(runtime.live(), Live::default());
    assert_eq!(runtime.violations(), Vec::<String>::new());
}

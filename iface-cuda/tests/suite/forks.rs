//! Tests of an iface in a forked child.

use std::{sync::Arc, thread};

use hmem_core::{
    Address, AllocationKind, DeviceId, ErrorKind, IfaceExt, Result, iface::AllocRequest,
};
use hmem_fake_cuda::Profile;

use crate::{
    fork::{drop_in_the_child, in_a_child},
    subscriber::Recorder,
    world::over,
};

fn in_bad_state<T>(result: Result<T>) -> bool {
    result.is_err_and(|error| error.kind() == ErrorKind::BadState)
}

/// CACHE-13
///
/// A thread of the parent holds the lock of a device during the fork. In the child, no thread
/// releases the lock.
#[test]
fn forked_child_releases_nothing_of_its_parent_and_waits_for_no_lock() {
    over(Profile { slow_copies: true, ..Profile::default() }, |world| {
        let memory = world.allocate(4096, AllocationKind::Device);
        let monitor = world.cuda.start_monitor().expect("a monitor");
        let subscriber = || Arc::new(Recorder::default());
        let subscription = monitor.subscribe(memory.range, subscriber()).expect("subscribe");
        let bytes = [7; 4096];
        // SAFETY: the array outlives the copy, for which the test waits below.
        let copy =
            unsafe { world.cuda.start_copy(memory.base(), Address::of_ptr(bytes.as_ptr()), 4096) };
        let copy = copy.expect("start");
        let (driver, cuda) = (world.driver(), &world.cuda);
        let other = thread::scope(|scope| {
            let held = driver.hold("cuDevicePrimaryCtxRetain");
            let request =
                AllocRequest { len: 4096, device: DeviceId(1), kind: AllocationKind::Device };
            let other = scope.spawn(move || cuda.allocate(&request).expect("allocate"));
            held.wait_for(1);
            in_a_child(|| {
                let parents = driver.live();
                // SAFETY: the call is refused.
                let refused = in_bad_state(unsafe { cuda.free(&memory) })
                    && in_bad_state(cuda.host_unregister(memory.range))
                    && in_bad_state(monitor.subscribe(memory.range, subscriber()));
                // SAFETY: the original is the parent's. The child neither uses nor drops it.
                monitor.unsubscribe(unsafe { std::ptr::read(&raw const subscription) });
                let ended = copy.is_done();
                drop_in_the_child(&copy);
                drop_in_the_child(cuda);
                refused && ended && driver.live() == parents
            });
            drop(held);
            other.join().expect("no panic")
        });
        assert_eq!(driver.live().copies, 1, "the child waited for the copy");
        copy.wait().expect("wait");
        monitor.unsubscribe(subscription);
        world.free(&memory);
        world.free(&other);
    });
}

//! Subscriptions to frees of an iface.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use hmem_core::{
    Address, AddressRange,
    monitor::{
        FreeSubscriptions, GateToken, InvalidationCause, InvalidationToken, Invalidator,
        Subscription,
    },
};
use parking_lot::Mutex;

/// An invalidator that records its calls.
#[derive(Debug, Default)]
struct Recorder(Mutex<Vec<&'static str>>);

impl Invalidator for Recorder {
    fn invalidate(&self, _range: AddressRange, _cause: InvalidationCause) {
        self.0.lock().push("invalidate");
    }

    fn invalidate_start(&self, _: AddressRange, _: InvalidationCause) -> InvalidationToken {
        self.0.lock().push("start");
        InvalidationToken::unnumbered()
    }

    fn invalidate_end(&self, _change: InvalidationToken) {
        self.0.lock().push("end");
    }

    fn close_gate(&self) -> GateToken {
        GateToken::unnumbered()
    }

    fn open_gate(&self, _: GateToken) {}
}

/// REL-01
#[test]
fn panicking_free_ends_its_invalidations() {
    let subscriptions = FreeSubscriptions::default();
    let range = AddressRange::new(Address(0x1000), 4096).expect("range");
    let (before, during, after) =
        (Arc::<Recorder>::default(), Arc::<Recorder>::default(), Arc::<Recorder>::default());
    subscriptions.add(range, Arc::clone(&before) as _);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        subscriptions.while_freeing(range, || {
            subscriptions.add(range, Arc::clone(&during) as _);
            panic!("the free fails");
        })
    }));
    assert!(panicked.is_err());
    subscriptions.add(range, Arc::clone(&after) as _);
    assert_eq!(*before.0.lock(), ["start", "end"]);
    assert_eq!(*during.0.lock(), ["invalidate"], "the free was in progress");
    assert!(after.0.lock().is_empty(), "no free is in progress any more");
}

/// MON-09
#[test]
fn subscription_of_another_monitor_ends_nothing() {
    let [ours, other] = [(); 2].map(|()| FreeSubscriptions::default());
    let range = AddressRange::new(Address(0x1000), 4096).expect("range");
    let recorder = Arc::<Recorder>::default();
    let subscription = ours.add(range, Arc::clone(&recorder) as _);
    ours.remove(other.add(range, Arc::<Recorder>::default()));
    ours.remove(Subscription::unnumbered());
    ours.while_freeing(range, || ());
    assert_eq!(*recorder.0.lock(), ["start", "end"]);
    ours.remove(subscription);
    ours.while_freeing(range, || ());
    assert_eq!(recorder.0.lock().len(), 2, "unsubscribed");
}

//! Tests of the monitor, which detects frees.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use hmem_core::{
    AddressRange, DeviceId, ErrorKind, IfaceExt,
    monitor::{GateToken, InvalidationCause, InvalidationToken, Invalidator},
};
use hmem_fake_accelerators::Fake;
use hmem_iface_kit::announced::{Announced, Driver};

use crate::world::{Over, World, allocate, free, over_both, page, range};

/// A subscriber that counts the frees that have begun and those that have ended.
#[derive(Debug, Default)]
struct Notices {
    begun: AtomicU64,
    ended: AtomicU64,
}

impl Invalidator for Notices {
    fn invalidate(&self, _: AddressRange, _: InvalidationCause) {
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.ended.fetch_add(1, Ordering::Relaxed);
    }

    fn invalidate_start(&self, _: AddressRange, cause: InvalidationCause) -> InvalidationToken {
        assert_eq!(cause, InvalidationCause::Free);
        self.begun.fetch_add(1, Ordering::Relaxed);
        InvalidationToken::unnumbered()
    }

    fn invalidate_end(&self, _: InvalidationToken) {
        self.ended.fetch_add(1, Ordering::Relaxed);
    }

    fn close_gate(&self) -> GateToken {
        GateToken::unnumbered()
    }
    fn open_gate(&self, _: GateToken) {}
}

impl Notices {
    fn count(&self) -> u64 {
        let ended = self.ended.load(Ordering::Relaxed);
        assert_eq!(self.begun.load(Ordering::Relaxed), ended, "each change is ended");
        ended
    }
}

/// MON-07
#[test]
fn frees_and_withdrawals_notify_the_subscribers_of_their_range() {
    struct Test;
    impl Over for Test {
        fn run<D: Driver>(&self, fake: &Fake, iface: &Announced<D>, world: &World<D>) {
            let monitor = iface.start_monitor().expect("a monitor");
            assert!(
                monitor.detects(InvalidationCause::Free)
                    && !monitor.detects(InvalidationCause::Unmap)
            );
            let (own, other) = (allocate(iface, page()), allocate(iface, page()));
            let (theirs, handle) = (world.allocate)(iface, fake, page());
            // SAFETY: the memory stays allocated until the fake is dropped.
            let theirs = unsafe { iface.announce(theirs, DeviceId(0), handle) }.expect("announce");
            let [of_own, of_other, of_theirs] = [(); 3].map(|()| Arc::new(Notices::default()));
            monitor.subscribe(own.range, Arc::clone(&of_own) as _).expect("subscribe");
            monitor.subscribe(other.range, Arc::clone(&of_other) as _).expect("subscribe");
            let last = monitor.subscribe(theirs.range, Arc::clone(&of_theirs) as _);
            last.expect("subscribe");
            let counts = || [of_own.count(), of_other.count(), of_theirs.count()];
            free(iface, &own).expect("free");
            assert_eq!(counts(), [1, 0, 0]);
            iface.withdraw(&theirs).expect("withdraw");
            assert_eq!(counts(), [1, 0, 1]);
            assert_eq!(
                monitor.subscribe(own.range, Arc::clone(&of_own) as _).unwrap_err().kind(),
                ErrorKind::Unsupported,
                "freed memory is not watched"
            );
            free(iface, &other).expect("free");
            assert_eq!(counts(), [1, 1, 1]);
        }
    }
    over_both(&Test);
}

/// MON-09: a monitor refuses subscriptions after its iface was dropped.
#[test]
fn monitor_of_a_dropped_iface_refuses_to_watch() {
    let fake = Fake::start(hmem_fake_accelerators::Profile::running());
    let iface = crate::world::neuron(&fake).expect("NeuronCores");
    let monitor = iface.start_monitor().expect("a monitor");
    let watched = allocate(&iface, page());
    let subscription = monitor.subscribe(watched.range, Arc::new(Notices::default()));
    free(&iface, &watched).expect("free");
    drop(iface);
    monitor.unsubscribe(subscription.expect("subscribe"));
    let error = monitor.subscribe(range(page(), page()), Arc::new(Notices::default())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
}

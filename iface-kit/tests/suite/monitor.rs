//! Tests of the monitor, which detects frees.

use std::sync::Arc;

use hmem_core::{Allocation, DeviceId, ErrorKind, IfaceExt, monitor::InvalidationCause};
use hmem_fake_accelerators::Fake;
use hmem_iface_kit::announced::{Announced, Driver};

use crate::subscriber::Recorder;
use crate::world::{Over, World, allocate, free, over_both, page, range};

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
            let [of_own, of_other, of_theirs] = [(); 3].map(|()| Arc::new(Recorder::default()));
            monitor.subscribe(own.range, Arc::clone(&of_own) as _).expect("subscribe");
            monitor.subscribe(other.range, Arc::clone(&of_other) as _).expect("subscribe");
            let last = monitor.subscribe(theirs.range, Arc::clone(&of_theirs) as _);
            last.expect("subscribe");
            let of_free = |of: &Allocation| vec![(of.range, InvalidationCause::Free)];
            let seen = || [&of_own, &of_other, &of_theirs].map(|recorder| recorder.changes());
            free(iface, &own).expect("free");
            assert_eq!(seen(), [of_free(&own), vec![], vec![]]);
            iface.withdraw(&theirs).expect("withdraw");
            assert_eq!(seen(), [of_free(&own), vec![], of_free(&theirs)]);
            assert_eq!(
                monitor.subscribe(own.range, Arc::clone(&of_own) as _).unwrap_err().kind(),
                ErrorKind::Unsupported,
                "freed memory is not watched"
            );
            free(iface, &other).expect("free");
            assert_eq!(seen(), [&own, &other, &theirs].map(of_free));
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
    let subscription = monitor.subscribe(watched.range, Arc::new(Recorder::default()));
    free(&iface, &watched).expect("free");
    drop(iface);
    monitor.unsubscribe(subscription.expect("subscribe"));
    let error =
        monitor.subscribe(range(page(), page()), Arc::new(Recorder::default())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
}

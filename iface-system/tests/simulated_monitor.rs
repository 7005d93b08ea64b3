//! Tests of the detection of frees: MON-07, MON-08.

#[path = "../../tests/subscriber/mod.rs"]
mod subscriber;
mod support;

use std::{
    fmt,
    sync::{
        Arc, Barrier, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use hmem_core::{
    Address, AddressRange, AllocationKind, ErrorKind, Iface, IfaceExt,
    monitor::{DetectionMethod, GateToken, InvalidationCause, InvalidationToken, Invalidator},
};
use hmem_iface_system::{AddressReuse, FreeDetection, Simulated};
use parking_lot::Mutex;
use subscriber::{NO_SUBSCRIPTION, Recorder};
use support::*;

fn with_style(free_detection: FreeDetection) -> Arc<Simulated> {
    let builder =
        Simulated::builder().free_detection(free_detection).address_reuse(AddressReuse::JustFreed);
    Arc::new(builder.build().unwrap())
}

/// An invalidator that runs a closure at each notification.
struct RunOnNotify<F>(F);

impl<F> fmt::Debug for RunOnNotify<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RunOnNotify")
    }
}

impl<F: Fn(AddressRange) + Send + Sync> Invalidator for RunOnNotify<F> {
    fn invalidate(&self, range: AddressRange, _: InvalidationCause) {
        (self.0)(range);
    }

    fn invalidate_start(&self, range: AddressRange, cause: InvalidationCause) -> InvalidationToken {
        self.invalidate(range, cause);
        InvalidationToken::unnumbered()
    }

    fn invalidate_end(&self, _: InvalidationToken) {}

    fn close_gate(&self) -> GateToken {
        GateToken::unnumbered()
    }

    fn open_gate(&self, _: GateToken) {}
}

fn doing(action: impl Fn(AddressRange) + Send + Sync + 'static) -> Arc<dyn Invalidator> {
    Arc::new(RunOnNotify(action))
}

/// MON-07
#[test]
fn reused_address_is_invalid_with_either_free_detection() {
    for free_detection in [FreeDetection::Identity, FreeDetection::Callback] {
        let simulated = with_style(free_detection);
        let monitor = simulated.start_monitor().unwrap();
        for kind in DEVICE_KINDS {
            let mut stale = Vec::new();
            for _ in 0..50 {
                let allocation = allocate(&*simulated, 4096, kind);
                assert!(monitor.valid(&NO_SUBSCRIPTION, &allocation).unwrap());
                for before in &stale {
                    assert!(!monitor.valid(&NO_SUBSCRIPTION, before).unwrap());
                }
                free(&*simulated, &allocation).unwrap();
                assert!(!monitor.valid(&NO_SUBSCRIPTION, &allocation).unwrap());
                stale.push(allocation);
            }
            assert!(
                stale.iter().all(|before| before.base() == stale[0].base()),
                "the address was reused"
            );
        }
    }
}

/// MON-07
///
/// A callback may call any method of the iface, since the iface holds no lock during a callback.
#[test]
fn callback_runs_before_the_free_and_may_use_the_iface() {
    let simulated = with_style(FreeDetection::Callback);
    let monitor = simulated.start_monitor().unwrap();
    let allocation = device(&*simulated, 4096);
    simulated.write_bytes(allocation.base(), &[7; 16]).unwrap();
    let seen = Arc::new(Mutex::new(None));
    let callback = {
        let (iface, seen) = (Arc::downgrade(&simulated), Arc::clone(&seen));
        move |range: AddressRange| {
            let iface = Weak::upgrade(&iface).unwrap();
            let mut bytes = [0; 16];
            iface.read_bytes(range.start(), &mut bytes).unwrap();
            let found = iface.query(range.start()).unwrap();
            let other = device(&*iface, 64);
            free(&*iface, &other).unwrap();
            *seen.lock() = Some((bytes, found));
        }
    };
    monitor.subscribe(allocation.range, doing(callback)).unwrap();
    free(&*simulated, &allocation).unwrap();
    assert_eq!(seen.lock().take(), Some(([7; 16], Some(allocation))));
}

#[test]
fn subscriber_added_during_a_free_is_notified() {
    let simulated = with_style(FreeDetection::Callback);
    let monitor = simulated.start_monitor().unwrap();
    let allocation = device(&*simulated, 4096);
    let late = Arc::<Recorder>::default();
    let callback = {
        let (monitor, late) = (Arc::downgrade(&monitor), Arc::clone(&late));
        move |range: AddressRange| {
            monitor.upgrade().unwrap().subscribe(range, Arc::clone(&late) as _).unwrap();
        }
    };
    monitor.subscribe(allocation.range, doing(callback)).unwrap();
    free(&*simulated, &allocation).unwrap();
    assert_eq!(late.ranges(), [allocation.range]);
}

#[test]
fn concurrent_free_of_one_allocation_is_a_double_free() {
    let simulated = with_style(FreeDetection::Callback);
    let monitor = simulated.start_monitor().unwrap();
    let allocation = device(&*simulated, 4096);
    let second = Arc::new(Mutex::new(None));
    let callback = {
        let (iface, second) = (Arc::downgrade(&simulated), Arc::clone(&second));
        move |_| *second.lock() = Some(free(&*iface.upgrade().unwrap(), &allocation))
    };
    monitor.subscribe(allocation.range, doing(callback)).unwrap();
    free(&*simulated, &allocation).unwrap();
    let error = second.lock().take().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

/// MON-09
#[test]
fn subscription_of_another_device_ends_nothing() {
    let [simulated, other] = [(); 2].map(|()| with_style(FreeDetection::Callback));
    let [monitor, stranger] =
        [&simulated, &other].map(|simulated| simulated.start_monitor().unwrap());
    let [allocation, foreign] = [&simulated, &other].map(|simulated| device(&**simulated, 4096));
    let recorder = Arc::<Recorder>::default();
    let subscribed = monitor.subscribe(allocation.range, Arc::clone(&recorder) as _).unwrap();
    monitor.unsubscribe(stranger.subscribe(foreign.range, Arc::<Recorder>::default()).unwrap());
    free(&*simulated, &allocation).unwrap();
    assert_eq!(recorder.ranges(), [allocation.range]);
    monitor.unsubscribe(subscribed);
    free(&*other, &foreign).unwrap();
}

/// MON-08
#[test]
fn unsubscribe_waits_for_a_running_callback() {
    let simulated = with_style(FreeDetection::Callback);
    let monitor = simulated.start_monitor().unwrap();
    let allocation = device(&*simulated, 4096);
    let inside = Arc::new(Barrier::new(2));
    let ended = Arc::new(AtomicBool::new(false));
    let callback = {
        let (inside, ended) = (Arc::clone(&inside), Arc::clone(&ended));
        move |_| {
            inside.wait();
            // An `unsubscribe` that does not wait for the callback would return during this loop.
            (0..1000).for_each(|_| thread::yield_now());
            ended.store(true, Ordering::Release);
        }
    };
    let subscription = monitor.subscribe(allocation.range, doing(callback)).unwrap();
    let freeing = {
        let simulated = Arc::clone(&simulated);
        thread::spawn(move || free(&*simulated, &allocation).unwrap())
    };
    inside.wait();
    monitor.unsubscribe(subscription);
    assert!(ended.load(Ordering::Acquire), "`unsubscribe` returned during the callback");
    freeing.join().unwrap();
}

/// MON-08
#[test]
fn subscriptions_are_counted_with_either_free_detection() {
    for free_detection in [FreeDetection::Identity, FreeDetection::Callback] {
        let simulated = with_style(free_detection);
        let monitor = simulated.start_monitor().unwrap();
        let allocation = device(&*simulated, 1 << 20);
        let recorder = Arc::new(Recorder::with_capacity(1000));
        let subscriptions: Vec<_> = (0..1000)
            .map(|i| {
                let range = allocation.range.slice(i * 100, 1 + i * 37 % 5000).unwrap();
                monitor.subscribe(range, Arc::clone(&recorder) as _).unwrap()
            })
            .collect();
        assert_eq!(simulated.stats().subscriptions, 1000);
        free(&*simulated, &allocation).unwrap();
        let calls = if free_detection == FreeDetection::Callback { 1000 } else { 0 };
        assert_eq!(
            recorder.ranges().len(),
            calls,
            "with FreeDetection::Identity there are no callbacks"
        );
        subscriptions.into_iter().for_each(|subscription| monitor.unsubscribe(subscription));
        assert_eq!(simulated.stats().subscriptions, 0);
    }
}

#[test]
fn freed_memory_cannot_be_watched() {
    let simulated = with_style(FreeDetection::Callback);
    let monitor = simulated.start_monitor().unwrap();
    let allocation = device(&*simulated, 4096);
    free(&*simulated, &allocation).unwrap();
    let host = [0_u8; 16];
    for range in
        [allocation.range, AddressRange::of(&host), AddressRange::new(Address(0), 8).unwrap()]
    {
        let error = monitor.subscribe(range, Arc::<Recorder>::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
    }
    assert_eq!(simulated.stats().subscriptions, 0);
}

/// MON-07
///
/// A free notifies every subscriber of an overlapping range once, and no other subscriber, for
/// ranges of many lengths.
#[test]
fn each_overlapping_subscriber_is_notified_once() {
    let simulated = with_style(FreeDetection::Callback);
    let monitor = simulated.start_monitor().unwrap();
    assert_eq!(monitor.detection(), DetectionMethod::Callback);
    assert!(simulated.capability().free_callback);
    let allocations: Vec<_> =
        (0..40).map(|i| allocate(&*simulated, 1 + i * 7919, AllocationKind::Device)).collect();
    let subscribers: Vec<_> = (0..2000_u64)
        .map(|i| {
            let allocation = &allocations[i as usize % allocations.len()];
            let offset = i * 613 % allocation.range.len();
            let len = 1 + i * 1009 % (allocation.range.len() - offset);
            let recorder = Arc::<Recorder>::default();
            monitor
                .subscribe(allocation.range.slice(offset, len).unwrap(), Arc::clone(&recorder) as _)
                .unwrap();
            (*allocation, recorder)
        })
        .collect();
    for freed in allocations.iter().step_by(3) {
        free(&*simulated, freed).unwrap();
    }
    for (allocation, recorder) in subscribers {
        let was_freed = allocations.iter().step_by(3).any(|freed| freed.id == allocation.id);
        let expected = if was_freed { vec![allocation.range] } else { vec![] };
        assert_eq!(recorder.ranges(), expected);
    }
}

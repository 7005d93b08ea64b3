//! Tests of subscriptions to one monitor that begin and end on several threads at once. The monitor
//! hooks a function of the C library.

use std::{
    mem::transmute,
    ptr::with_exposed_provenance,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
};

use hmem_core::{
    AddressRange, IfaceKind, Result,
    monitor::{GateToken, InvalidationCause, InvalidationToken, Invalidator, Subscription},
};
use hmem_hook::{HookRegistry, Hooks, MonitorName, PatchTarget, Patches, SubscriberTable, clamped};

type GetPpid = unsafe extern "C" fn() -> libc::pid_t;

const NAME: MonitorName =
    MonitorName { name: "test", iface: IfaceKind::SYSTEM, fallback_hint: "do without" };
static REGISTRY: HookRegistry<SubscriberTable> = HookRegistry::new();
static ORIGINAL: AtomicUsize = AtomicUsize::new(0);
/// The lock that lets one test run at a time: each call of the hook notifies every subscriber in
/// the process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The hook of `getppid`, which notifies every subscriber and calls the original.
unsafe extern "C" fn hook() -> libc::pid_t {
    let pass = REGISTRY.subscribers().map(|subscribers| subscribers.table().pass());
    if let Some(pass) = &pass {
        pass.each(|_, invalidator| {
            invalidator.invalidate(clamped(0, u64::MAX), InvalidationCause::Application)
        });
    }
    let original = with_exposed_provenance::<()>(ORIGINAL.load(Ordering::Relaxed));
    // SAFETY: `plan` has written the original, which has no arguments and no precondition.
    unsafe { transmute::<*const (), GetPpid>(original)() }
}

fn plan() -> Result<Patches> {
    let address = |function: GetPpid| (function as *const ()).expose_provenance();
    let getppid = PatchTarget {
        name: "getppid",
        entry: address(libc::getppid),
        hook: address(hook),
        call: Some(libc::SYS_getppid),
        original: &ORIGINAL,
    };
    // SAFETY: the C library stays loaded; the hook has the function's type and its own
    // `original`.
    unsafe { Patches::plan(NAME, &[getppid]) }
}

fn change() {
    // SAFETY: getppid has no precondition.
    unsafe { libc::getppid() };
}

#[derive(Debug, Default)]
struct CallCounter(AtomicU64);

impl CallCounter {
    fn times(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

impl Invalidator for CallCounter {
    fn invalidate(&self, _: AddressRange, _: InvalidationCause) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
    fn invalidate_start(&self, _: AddressRange, _: InvalidationCause) -> InvalidationToken {
        InvalidationToken::unnumbered()
    }
    fn invalidate_end(&self, _: InvalidationToken) {}
    fn close_gate(&self) -> GateToken {
        GateToken::unnumbered()
    }
    fn open_gate(&self, _: GateToken) {}
}

/// A change notifies subscribed invalidators only, while other threads subscribe and unsubscribe.
#[test]
fn only_subscribed_invalidators_are_notified() {
    const ROUNDS: usize = 10_000;
    let _one = ONE_AT_A_TIME.lock().unwrap();
    let hooks = Hooks::start(&REGISTRY, NAME, plan).unwrap();
    let subscribe = |counter: &Arc<CallCounter>| -> Subscription {
        let invalidator: Arc<dyn Invalidator> = Arc::<CallCounter>::clone(counter);
        hooks.subscribe(&invalidator).unwrap()
    };
    let shared = [Arc::new(CallCounter::default()), Arc::new(CallCounter::default())];
    thread::scope(|scope| {
        for number in 0..3 {
            let (hooks, subscribe, shared) = (&hooks, &subscribe, &shared);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    // Several threads share this invalidator. One thread may end its last
                    // subscription just before another thread adds its first one.
                    let ours = &shared[(number + round) % shared.len()];
                    let (first, second) = (subscribe(ours), subscribe(ours));
                    hooks.unsubscribe(first);
                    let before = ours.times();
                    change();
                    assert!(ours.times() > before);
                    hooks.unsubscribe(second);
                    // A new invalidator for each round. Its address may be that of an earlier
                    // invalidator.
                    let own = Arc::new(CallCounter::default());
                    let subscription = subscribe(&own);
                    change();
                    let counter = own.times();
                    assert!(counter > 0);
                    hooks.unsubscribe(subscription);
                    let counter = own.times().max(counter);
                    change();
                    assert_eq!(own.times(), counter);
                    assert_eq!(
                        Arc::strong_count(&own),
                        1,
                        "an unsubscribed invalidator is dropped"
                    );
                }
            });
        }
    });
    let before = shared.each_ref().map(|counter| counter.times());
    change();
    assert_eq!(shared.each_ref().map(|counter| counter.times()), before);
    assert!(hooks.subscribers().table().pass().is_empty());
    // Dropping `hooks` ends its remaining subscriptions. The subscriber of the monitor `other` is
    // still notified.
    let other = Hooks::start(&REGISTRY, NAME, plan).unwrap();
    let [first, second] = &shared;
    subscribe(first);
    subscribe(first);
    let invalidator: Arc<dyn Invalidator> = Arc::<CallCounter>::clone(second);
    other.subscribe(&invalidator).unwrap();
    drop(invalidator);
    let before = first.times();
    change();
    assert_eq!(
        first.times(),
        before + 1,
        "two subscriptions of one invalidator are one notification"
    );
    drop(hooks);
    let before = [first.times(), second.times()];
    change();
    assert_eq!([first.times(), second.times()], [before[0], before[1] + 1]);
    drop(other);
    assert_eq!(shared.each_ref().map(Arc::strong_count), [1, 1]);
}

/// An invalidator subscribes again after another monitor's invalidator has taken its slot. It is
/// dropped when its last subscription ends.
#[test]
fn invalidator_in_a_new_slot_is_dropped_after_unsubscribe() {
    let _one = ONE_AT_A_TIME.lock().unwrap();
    let [first, second] = [(), ()].map(|()| Hooks::start(&REGISTRY, NAME, plan).unwrap());
    let counters = [(); 2].map(|()| Arc::new(CallCounter::default()));
    let [ours, others] = counters
        .each_ref()
        .map(|counter| Arc::<CallCounter>::clone(counter) as Arc<dyn Invalidator>);
    first.unsubscribe(first.subscribe(&ours).unwrap());
    second.subscribe(&others).unwrap();
    let subscriptions = [(); 3].map(|()| first.subscribe(&ours).unwrap());
    change();
    assert_eq!(counters.each_ref().map(|counter| counter.times()), [1, 1]);
    subscriptions.into_iter().for_each(|subscription| first.unsubscribe(subscription));
    change();
    assert_eq!(counters.each_ref().map(|counter| counter.times()), [1, 2]);
    assert_eq!(Arc::strong_count(&ours), 2, "held by the test only");
}

/// MON-09
///
/// Both monitors give their invalidator a slot. A subscription of one monitor ends none of the
/// other, whose slot has the same number.
#[test]
fn subscription_of_another_monitor_ends_nothing() {
    let _one = ONE_AT_A_TIME.lock().unwrap();
    let [ours, other] = [(); 2].map(|()| Hooks::start(&REGISTRY, NAME, plan).unwrap());
    let counter = Arc::new(CallCounter::default());
    let invalidator: Arc<dyn Invalidator> = Arc::<CallCounter>::clone(&counter);
    let subscription = ours.subscribe(&invalidator).unwrap();
    ours.unsubscribe(other.subscribe(&invalidator).unwrap());
    ours.unsubscribe(Subscription::unnumbered());
    drop(other);
    change();
    assert_eq!(counter.times(), 1, "still subscribed");
    ours.unsubscribe(subscription);
    change();
    assert_eq!(counter.times(), 1);
}

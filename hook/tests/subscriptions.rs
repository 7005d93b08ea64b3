//! Subscriptions of one monitor that begin and end on several threads at once, over a hooked
//! function of the C library.

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
    monitor::{InvalidationCause, InvalidationToken, Invalidator, Subscription},
};
use hmem_hook::{HookRegistry, Hooks, MonitorName, PatchTarget, Patches, SubscriberTable, clamped};

type GetPpid = unsafe extern "C" fn() -> libc::pid_t;

const NAME: MonitorName =
    MonitorName { name: "test", iface: IfaceKind::SYSTEM, fallback_hint: "do without" };
static REGISTRY: HookRegistry<SubscriberTable> = HookRegistry::new();
static ORIGINAL: AtomicUsize = AtomicUsize::new(0);
/// Each test's changes are told to all who are subscribed in the process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Runs in place of `getppid`.
unsafe extern "C" fn hook() -> libc::pid_t {
    let pass = REGISTRY.subscribers().map(|subscribers| subscribers.table().pass());
    if let Some(pass) = &pass {
        pass.each(|_, invalidator| {
            invalidator.invalidate(clamped(0, u64::MAX), InvalidationCause::Application)
        });
    }
    let original = with_exposed_provenance::<()>(ORIGINAL.load(Ordering::Relaxed));
    // SAFETY: the plan has written the way into the function, which takes and does nothing.
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
    // SAFETY: the C library stays loaded; the hook is of the function's type and has an `original`
    // to itself.
    unsafe { Patches::plan(NAME, &[getppid]) }
}

fn change() {
    // SAFETY: it takes nothing and cannot fail.
    unsafe { libc::getppid() };
}

#[derive(Debug, Default)]
struct Told(AtomicU64);

impl Told {
    fn times(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

impl Invalidator for Told {
    fn invalidate(&self, _: AddressRange, _: InvalidationCause) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
    fn invalidate_start(&self, _: AddressRange, _: InvalidationCause) -> InvalidationToken {
        InvalidationToken(0)
    }
    fn invalidate_end(&self, _: InvalidationToken) {}
    fn close_gate(&self) {}
    fn open_gate(&self) {}
}

/// Whoever is subscribed is told, and whoever is not any more is not, however many others begin and
/// end meanwhile.
#[test]
fn whoever_is_subscribed_is_told_and_nobody_else() {
    const ROUNDS: usize = 10_000;
    let _one = ONE_AT_A_TIME.lock().unwrap();
    let hooks = Hooks::start(&REGISTRY, NAME, plan).unwrap();
    let subscribe = |told: &Arc<Told>| -> Subscription {
        let invalidator: Arc<dyn Invalidator> = Arc::<Told>::clone(told);
        hooks.subscribe(&invalidator).unwrap()
    };
    let shared = [Arc::new(Told::default()), Arc::new(Told::default())];
    thread::scope(|scope| {
        for number in 0..3 {
            let (hooks, subscribe, shared) = (&hooks, &subscribe, &shared);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    // Of several threads: the last subscription of one may be followed by another's
                    // first.
                    let ours = &shared[(number + round) % shared.len()];
                    let (first, second) = (subscribe(ours), subscribe(ours));
                    hooks.unsubscribe(first);
                    let before = ours.times();
                    change();
                    assert!(ours.times() > before);
                    hooks.unsubscribe(second);
                    // Of this round only: memory of others' is used again for it.
                    let own = Arc::new(Told::default());
                    let subscription = subscribe(&own);
                    change();
                    let told = own.times();
                    assert!(told > 0);
                    hooks.unsubscribe(subscription);
                    let told = own.times().max(told);
                    change();
                    assert_eq!(own.times(), told);
                    assert_eq!(Arc::strong_count(&own), 1, "nobody holds what is told no more");
                }
            });
        }
    });
    let before = shared.each_ref().map(|told| told.times());
    change();
    assert_eq!(shared.each_ref().map(|told| told.times()), before);
    assert!(hooks.subscribers().table().pass().is_empty());
    // One that is left is let go with the hooks, and another monitor of the process is told still.
    let other = Hooks::start(&REGISTRY, NAME, plan).unwrap();
    let [first, second] = &shared;
    subscribe(first);
    subscribe(first);
    let invalidator: Arc<dyn Invalidator> = Arc::<Told>::clone(second);
    other.subscribe(&invalidator).unwrap();
    drop(invalidator);
    let before = first.times();
    change();
    assert_eq!(first.times(), before + 1, "two subscriptions of one invalidator are one telling");
    drop(hooks);
    let before = [first.times(), second.times()];
    change();
    assert_eq!([first.times(), second.times()], [before[0], before[1] + 1]);
    drop(other);
    assert_eq!(shared.each_ref().map(Arc::strong_count), [1, 1]);
}

/// A slot is another's meanwhile, which another monitor has told.
#[test]
fn one_that_comes_back_to_another_slot_is_let_go_once_it_is_subscribed_no_more() {
    let _one = ONE_AT_A_TIME.lock().unwrap();
    let [first, second] = [(), ()].map(|()| Hooks::start(&REGISTRY, NAME, plan).unwrap());
    let tolds = [(); 2].map(|()| Arc::new(Told::default()));
    let [ours, others] =
        tolds.each_ref().map(|told| Arc::<Told>::clone(told) as Arc<dyn Invalidator>);
    first.unsubscribe(first.subscribe(&ours).unwrap());
    second.subscribe(&others).unwrap();
    let subscriptions = [(); 3].map(|()| first.subscribe(&ours).unwrap());
    change();
    assert_eq!(tolds.each_ref().map(|told| told.times()), [1, 1]);
    subscriptions.into_iter().for_each(|subscription| first.unsubscribe(subscription));
    change();
    assert_eq!(tolds.each_ref().map(|told| told.times()), [1, 2]);
    assert_eq!(Arc::strong_count(&ours), 2, "of the test");
}

//! One monitor's share of the hooks of a kind: the patches for as long as it lives, and its own
//! subscriptions.

use std::{
    array,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use hmem_core::{
    Result,
    monitor::{Invalidator, Subscription},
};
use parking_lot::Mutex;

use crate::{
    HasTable, HookRegistry, MonitorName, Patches, SLOTS, Subscribers, process::Process,
    table::identity,
};

/// Functions that are hooked, for one monitor.
///
/// All values of one [`HookRegistry`] share the patches: the first one makes them, and the last one
/// to be dropped undoes them. Dropping one ends its subscriptions.
///
/// # Examples
/// ```
/// use std::{
///     mem::transmute,
///     ptr::with_exposed_provenance,
///     sync::{
///         Arc,
///         atomic::{AtomicU32, AtomicUsize, Ordering},
///     },
/// };
///
/// use hmem_core::{
///     AddressRange, IfaceKind, Result,
///     monitor::{InvalidationCause, InvalidationToken, Invalidator},
/// };
/// use hmem_hook::{
///     HookRegistry, Hooks, MonitorName, PatchTarget, Patches, SubscriberTable, clamped,
/// };
///
/// type GetPpid = unsafe extern "C" fn() -> libc::pid_t;
///
/// const NAME: MonitorName =
///     MonitorName { name: "example", iface: IfaceKind::SYSTEM, fallback_hint: "watch nothing" };
/// static REGISTRY: HookRegistry<SubscriberTable> = HookRegistry::new();
/// static ORIGINAL: AtomicUsize = AtomicUsize::new(0);
///
/// /// What runs in place of `getppid`, as if that took all memory away.
/// unsafe extern "C" fn hook() -> libc::pid_t {
///     let pass = REGISTRY.subscribers().map(|subscribers| subscribers.table().pass());
///     if let Some(pass) = &pass {
///         let everything = clamped(0, u64::MAX);
///         let cause = InvalidationCause::Application;
///         pass.each(|_, invalidator| invalidator.invalidate(everything, cause));
///     }
///     let original = with_exposed_provenance::<()>(ORIGINAL.load(Ordering::Relaxed));
///     // SAFETY: the plan has written the way into the function, which takes and does nothing.
///     unsafe { transmute::<*const (), GetPpid>(original)() }
/// }
///
/// fn plan() -> Result<Patches> {
///     let address = |function: GetPpid| (function as *const ()).expose_provenance();
///     let getppid = PatchTarget {
///         name: "getppid",
///         entry: address(libc::getppid),
///         hook: address(hook),
///         call: Some(libc::SYS_getppid),
///         original: &ORIGINAL,
///     };
///     // SAFETY: the C library stays loaded; the hook is of the function's type and has an `original` to itself.
///     unsafe { Patches::plan(NAME, &[getppid]) }
/// }
///
/// #[derive(Debug, Default)]
/// struct Told(AtomicU32);
///
/// impl Invalidator for Told {
///     fn invalidate(&self, _: AddressRange, _: InvalidationCause) {
///         self.0.fetch_add(1, Ordering::Relaxed);
///     }
///     fn invalidate_start(
///         &self,
///         range: AddressRange,
///         cause: InvalidationCause,
///     ) -> InvalidationToken {
///         self.invalidate(range, cause);
///         InvalidationToken(0)
///     }
///     fn invalidate_end(&self, _: InvalidationToken) {}
///     fn close_gate(&self) {}
///     fn open_gate(&self) {}
/// }
///
/// let told = Arc::new(Told::default());
/// let call = || {
///     // SAFETY: it takes nothing and cannot fail.
///     unsafe { libc::getppid() };
///     told.0.load(Ordering::Relaxed)
/// };
///
/// let hooks = Hooks::start(&REGISTRY, NAME, plan)?;
/// assert_eq!(hooks.functions().collect::<Vec<_>>(), ["getppid"]);
/// let invalidator: Arc<dyn Invalidator> = told.clone();
/// let subscription = hooks.subscribe(&invalidator)?;
/// assert_eq!((call(), call()), (1, 2));
/// hooks.unsubscribe(subscription);
/// assert_eq!(call(), 2);
/// drop(hooks);
/// assert_eq!(call(), 2);
/// # Ok::<(), hmem_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Hooks<T: HasTable + 'static> {
    monitor: MonitorName,
    process: &'static Process<T>,
    patches: &'static Patches,
    mine: [Mine; SLOTS],
    /// Held while one of them begins or ends.
    turning: Mutex<()>,
}

/// The subscriptions that one monitor has in a slot. They hold one of the process's.
#[derive(Debug, Default)]
struct Mine {
    /// How many in the lower half; in the upper, how often the first began.
    count: AtomicU64,
    /// Of whom, by [`identity`]; says so as long as there are any.
    invalidator: AtomicUsize,
}

const COUNT: u64 = (1 << 32) - 1;

impl Mine {
    /// One more, if there are any, and they are of this one.
    fn join(&self, invalidator: usize) -> bool {
        // Acquire: the invalidator that is read next is the one that they are of, or a later one's.
        // It is a later one's only after the last of them ended, and then the exchange
        // fails: the first of others counts up the upper half.
        let mut count = self.count.load(Ordering::Acquire);
        while count & COUNT != 0 && self.invalidator.load(Ordering::Relaxed) == invalidator {
            let (ok, seen) = (Ordering::Acquire, Ordering::Acquire);
            match self.count.compare_exchange_weak(count, count + 1, ok, seen) {
                Ok(_) => return true,
                Err(now) => count = now,
            }
        }
        false
    }

    /// The first one, under the lock.
    fn begin(&self, invalidator: usize) {
        self.invalidator.store(invalidator, Ordering::Relaxed);
        let before = self.count.load(Ordering::Relaxed);
        debug_assert_eq!(before & COUNT, 0, "those there are would have been joined");
        self.count.store((before & !COUNT).wrapping_add(COUNT + 2), Ordering::Release);
    }

    /// One less, if it is not the last.
    fn part(&self) -> bool {
        self.less(|count| count > 1).is_some()
    }

    /// One less if any are left, under the lock; whether it was the last.
    fn end(&self) -> bool {
        self.less(|count| count > 0).is_some_and(|before| before & COUNT == 1)
    }

    fn less(&self, may: impl Fn(u64) -> bool) -> Option<u64> {
        let one_less = |count: u64| may(count & COUNT).then(|| count - 1);
        self.count.fetch_update(Ordering::Release, Ordering::Relaxed, one_less).ok()
    }
}

impl<T: HasTable> Hooks<T> {
    /// Patches the functions of the registry, or joins the hooks that did. The first start of all
    /// makes the patches by `plan`, with no other start under way; they are kept for good, and
    /// `plan` of a later start is not called.
    ///
    /// # Errors
    /// As `plan`; Busy, naming a function that another library patched; PermissionDenied or
    /// AccessDenied where a security policy forbids changing code; OutOfResources without
    /// memory; Unsupported where the kernel cannot tell forked children apart (before Linux
    /// 4.14).
    pub fn start(
        registry: &'static HookRegistry<T>,
        monitor: MonitorName,
        plan: impl FnOnce() -> Result<Patches>,
    ) -> Result<Self> {
        let process = registry.get(monitor)?;
        let patches = process.install(registry, plan)?;
        Ok(Self {
            monitor,
            process,
            patches,
            mine: array::from_fn(|_| Mine::default()),
            turning: Mutex::new(()),
        })
    }

    /// Whether this process made it, and not one that it was forked from.
    #[inline]
    #[must_use]
    pub fn is_own_process(&self) -> bool {
        self.process.is_own_process()
    }

    /// Fails unless every patch is in place. When one is found overwritten, all who are subscribed
    /// are told that everything is gone: what else they were not told of since, nobody knows.
    ///
    /// # Errors
    /// Busy, naming the function and the library that overwrote its patch; Unsupported in a forked
    /// child, for `operation`.
    pub fn check_patches(&self, operation: &'static str) -> Result<()> {
        if !self.is_own_process() {
            return Err(self.monitor.forked(operation));
        }
        self.process.check_patches(self.patches)
    }

    /// The names of the functions.
    pub fn functions(&self) -> impl Iterator<Item = &'static str> {
        self.patches.functions()
    }

    /// Where each function begins, by its name.
    pub fn entries(&self) -> impl Iterator<Item = (&'static str, usize)> {
        self.patches.entries()
    }

    /// Whom the hooks tell, of every monitor of this process.
    #[must_use]
    pub fn subscribers(&self) -> &Subscribers<T> {
        self.process.subscribers()
    }

    /// Has `invalidator` told until unsubscribed. When it returns, every change under way is one
    /// that it is told of. Subscriptions of one invalidator are alike.
    ///
    /// # Errors
    /// Busy, naming the function whose patch was overwritten; OutOfResources with more than
    /// [`SLOTS`] invalidators; Unsupported in a forked child.
    pub fn subscribe(&self, invalidator: &Arc<dyn Invalidator>) -> Result<Subscription> {
        // First: in a child no lock may be taken, since another thread may have held it in the
        // parent.
        self.check_patches("subscribe")?;
        if let Some(subscription) = self.subscribe_again(invalidator) {
            return Ok(subscription);
        }
        let subscription = self.subscribe_first(invalidator)?;
        // Again: when the others were told of a patch that was overwritten meanwhile, this one may
        // not have been among them.
        self.check_patches("subscribe").inspect_err(|_| self.unsubscribe(subscription))?;
        Ok(subscription)
    }

    fn subscribe_first(&self, invalidator: &Arc<dyn Invalidator>) -> Result<Subscription> {
        let _one_at_a_time = self.turning.lock();
        if let Some(subscription) = self.subscribe_again(invalidator) {
            return Ok(subscription);
        }
        let slot = self.subscribers().add(invalidator)?;
        self.mine[usize::from(slot)].begin(identity(invalidator));
        Ok(Subscription(slot.into()))
    }

    /// The same of one that has subscriptions of this monitor: without a lock.
    fn subscribe_again(&self, invalidator: &Arc<dyn Invalidator>) -> Option<Subscription> {
        // Two that live at the same time are not at the same address, and the caller's lives.
        let wanted = identity(invalidator);
        let slot = self.subscribers().table().taken().find(|slot| self.mine[*slot].join(wanted))?;
        Some(Subscription(slot as u64))
    }

    /// Stops telling. Once for each subscription: by a second call, another may have its place. In
    /// a forked child nothing is done.
    pub fn unsubscribe(&self, subscription: Subscription) {
        if !self.is_own_process() {
            return;
        }
        let Some(mine) = self.mine.get(subscription.0 as usize) else { return };
        if mine.part() {
            return;
        }
        let one_at_a_time = self.turning.lock();
        let gone = mine.end().then(|| self.subscribers().remove(subscription.0 as u8));
        drop(one_at_a_time);
        // Whose drop may come here again.
        drop(gone);
    }
}

impl<T: HasTable> Drop for Hooks<T> {
    fn drop(&mut self) {
        if !self.is_own_process() {
            return;
        }
        for (slot, mine) in self.mine.iter_mut().enumerate() {
            if *mine.count.get_mut() & COUNT > 0 {
                self.process.subscribers().remove(slot as u8);
            }
        }
        self.process.uninstall(self.patches);
    }
}

//! The hooks of one monitor: its share of the patches, and its subscriptions.

use std::{
    array,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use hmem_core::{
    Result,
    monitor::{Invalidator, Subscription, TokenIssuer},
};
use parking_lot::Mutex;

use crate::{
    HasTable, HookRegistry, MonitorName, Patches, SLOTS, SlotSubscription, Subscribers,
    process::Process, table::identity,
};

/// Hooked functions and the subscriptions of one monitor.
///
/// All `Hooks` of one [`HookRegistry`] share the patches. Creating the first `Hooks` patches the
/// functions, and dropping the last `Hooks` undoes the patches. Dropping a `Hooks` ends its
/// subscriptions. In a forked child, dropping the parent's `Hooks` does nothing.
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
///     monitor::{GateToken, InvalidationCause, InvalidationToken, Invalidator},
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
/// /// Runs instead of `getppid`, and treats each call as one that frees all memory.
/// unsafe extern "C" fn hook() -> libc::pid_t {
///     let pass = REGISTRY.subscribers().map(|subscribers| subscribers.table().pass());
///     if let Some(pass) = &pass {
///         let everything = clamped(0, u64::MAX);
///         let cause = InvalidationCause::Application;
///         pass.each(|_, invalidator| invalidator.invalidate(everything, cause));
///     }
///     let original = with_exposed_provenance::<()>(ORIGINAL.load(Ordering::Relaxed));
///     // SAFETY: `plan` has written the original, which has no arguments and no precondition.
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
///     // SAFETY: the C library stays loaded; the hook has the type and an `original` of its own.
///     unsafe { Patches::plan(NAME, &[getppid]) }
/// }
///
/// #[derive(Debug, Default)]
/// struct CallCounter(AtomicU32);
///
/// impl Invalidator for CallCounter {
///     fn invalidate(&self, _: AddressRange, _: InvalidationCause) {
///         self.0.fetch_add(1, Ordering::Relaxed);
///     }
///     fn invalidate_start(
///         &self,
///         range: AddressRange,
///         cause: InvalidationCause,
///     ) -> InvalidationToken {
///         self.invalidate(range, cause);
///         InvalidationToken::unnumbered()
///     }
///     fn invalidate_end(&self, _: InvalidationToken) {}
///     fn close_gate(&self) -> GateToken {
///         GateToken::unnumbered()
///     }
///     fn open_gate(&self, _: GateToken) {}
/// }
///
/// let counter = Arc::new(CallCounter::default());
/// let call = || {
///     // SAFETY: getppid has no precondition.
///     unsafe { libc::getppid() };
///     counter.0.load(Ordering::Relaxed)
/// };
///
/// let hooks = Hooks::start(&REGISTRY, NAME, plan)?;
/// assert_eq!(hooks.functions().collect::<Vec<_>>(), ["getppid"]);
/// let invalidator: Arc<dyn Invalidator> = counter.clone();
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
    /// The issuer of this monitor's subscriptions. Each [`Subscription`] carries the slot of the
    /// subscribed invalidator as its number.
    issuer: TokenIssuer,
    /// The subscriptions of each invalidator to this monitor. The index is the invalidator's slot
    /// in the subscriber table of the process.
    own: [OwnSubscriptions; SLOTS],
    /// The entry of each invalidator of this monitor in the subscriber table of the process, by
    /// slot. `None` for a slot that is free, or whose invalidator is not subscribed to this
    /// monitor. The first subscription of an invalidator adds the entry, and the end of the last
    /// one removes the entry, both under this lock.
    in_table: Mutex<[Option<SlotSubscription>; SLOTS]>,
}

/// The subscriptions of one invalidator to this monitor. Together they count as one subscription in
/// the subscriber table of the process.
#[derive(Debug, Default)]
struct OwnSubscriptions {
    /// Lower half: the number of subscriptions. Upper half: how often this number has risen from
    /// zero, so that a compare-and-exchange fails if the slot has got another invalidator
    /// meanwhile.
    count: AtomicU64,
    /// The address of the invalidator, from [`identity`]. Valid while the number of subscriptions
    /// is not zero.
    invalidator: AtomicUsize,
}

/// The mask of the lower half of [`OwnSubscriptions::count`].
const COUNT: u64 = (1 << 32) - 1;

impl OwnSubscriptions {
    /// Adds a subscription if `invalidator` already has one. Returns false if it has none.
    fn join(&self, invalidator: usize) -> bool {
        // `Acquire`: the load of `self.invalidator` below sees the invalidator that this count
        // belongs to, or a later invalidator. A later invalidator is stored only after the last
        // subscription of the earlier one has ended, and its first subscription increments the
        // upper half of the count. So the exchange below then fails.
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

    /// Stores the first subscription of an invalidator. The caller must hold the lock
    /// [`Hooks::in_table`].
    fn begin(&self, invalidator: usize) {
        self.invalidator.store(invalidator, Ordering::Relaxed);
        let before = self.count.load(Ordering::Relaxed);
        debug_assert_eq!(before & COUNT, 0, "the invalidator has no subscription yet");
        self.count.store((before & !COUNT).wrapping_add(COUNT + 2), Ordering::Release);
    }

    /// Removes a subscription unless it is the last one. Returns true if a subscription was
    /// removed.
    fn remove_unless_last(&self) -> bool {
        self.subtract_if(|count| count > 1).is_some()
    }

    /// Removes a subscription. Returns true if it was the last, and false if others are left. The
    /// caller must hold the lock [`Hooks::in_table`].
    fn end(&self) -> bool {
        self.subtract_if(|count| count > 0).is_some_and(|before| before & COUNT == 1)
    }

    fn subtract_if(&self, may: impl Fn(u64) -> bool) -> Option<u64> {
        let one_less = |count: u64| may(count & COUNT).then(|| count - 1);
        self.count.fetch_update(Ordering::Release, Ordering::Relaxed, one_less).ok()
    }
}

impl<T: HasTable> Hooks<T> {
    /// Starts the hooks of a monitor: patches the functions, or shares the patches of a monitor
    /// that already runs.
    ///
    /// The first call calls `plan`, while concurrent calls wait. If `plan` succeeds, the registry
    /// keeps the result forever, and later calls ignore their `plan`. This also holds for calls in
    /// forked children.
    ///
    /// # Errors
    /// - The errors of `plan`.
    /// - Busy: another library patched a function. The error names this function.
    /// - PermissionDenied or AccessDenied: a security policy forbids changing code.
    /// - OutOfResources: no memory or no mapping (`vm.max_map_count`) is left.
    /// - Unsupported: the kernel cannot wipe memory in forked children (before Linux 4.14).
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
            issuer: TokenIssuer::new(),
            own: array::from_fn(|_| OwnSubscriptions::default()),
            in_table: Mutex::new([const { None }; SLOTS]),
        })
    }

    /// Returns true in the process that started the hooks, and false in a forked child.
    #[inline]
    #[must_use]
    pub fn is_own_process(&self) -> bool {
        self.process.is_own_process()
    }

    /// Checks that every patch is in place.
    ///
    /// If another library overwrote a patch, the hooks have missed calls since an unknown moment.
    /// The first call that finds this invalidates all memory for every subscriber. Later calls only
    /// return the error, until the patch is in place again.
    ///
    /// # Errors
    /// - Busy: a patch was overwritten. The error names the function, and the library if known.
    /// - Unsupported: this process is a forked child. The error names `operation`.
    pub fn check_patches(&self, operation: &'static str) -> Result<()> {
        if !self.is_own_process() {
            return Err(self.monitor.forked(operation));
        }
        self.process.check_patches(self.patches)
    }

    /// Returns the names of the hooked functions.
    pub fn functions(&self) -> impl Iterator<Item = &'static str> {
        self.entries().map(|(name, _)| name)
    }

    /// Returns the name and address of each hooked function.
    pub fn entries(&self) -> impl Iterator<Item = (&'static str, usize)> {
        self.patches.entries()
    }

    /// Returns the subscribers of these hooks. All monitors of the process that use the hooks share
    /// the list.
    #[must_use]
    pub fn subscribers(&self) -> &Subscribers<T> {
        &self.process.subscribers
    }

    /// Adds a subscription: the hooks notify `invalidator` when a hooked function changes memory,
    /// until [`Hooks::unsubscribe`]. A hook that is already running when this method returns
    /// notifies the invalidator too. An invalidator may have several subscriptions, and is notified
    /// once for each change.
    ///
    /// The first subscription of an invalidator waits for the hooks that run at the moment. So the
    /// caller must not be inside a notification.
    ///
    /// # Errors
    /// - Busy: a patch was overwritten. The error names the function.
    /// - OutOfResources: [`SLOTS`] other invalidators are subscribed.
    /// - Unsupported: this process is a forked child.
    pub fn subscribe(&self, invalidator: &Arc<dyn Invalidator>) -> Result<Subscription> {
        // This check comes first: a forked child must not lock, since a thread of the parent may
        // have held the lock at the fork.
        self.check_patches("subscribe")?;
        if let Some(subscription) = self.subscribe_again(invalidator) {
            return Ok(subscription);
        }
        let subscription = self.subscribe_first(invalidator)?;
        // Another thread may have detected an overwritten patch and notified all subscribers just
        // before this one was added. So the patches are checked again.
        if let Err(error) = self.check_patches("subscribe") {
            self.unsubscribe(subscription);
            return Err(error);
        }
        Ok(subscription)
    }

    fn subscribe_first(&self, invalidator: &Arc<dyn Invalidator>) -> Result<Subscription> {
        let mut in_table = self.in_table.lock();
        if let Some(subscription) = self.subscribe_again(invalidator) {
            return Ok(subscription);
        }
        let entry = self.subscribers().add(invalidator)?;
        let slot = entry.slot();
        in_table[slot] = Some(entry);
        self.own[slot].begin(identity(invalidator));
        Ok(Subscription::new(&self.issuer, slot as u64))
    }

    /// Adds a subscription without a lock, if the invalidator is already subscribed to this
    /// monitor. Returns `None` otherwise.
    fn subscribe_again(&self, invalidator: &Arc<dyn Invalidator>) -> Option<Subscription> {
        // The caller's invalidator is alive, so no other live invalidator has the same address.
        let wanted = identity(invalidator);
        let slot = self.subscribers().table().taken().find(|slot| self.own[*slot].join(wanted))?;
        Some(Subscription::new(&self.issuer, slot as u64))
    }

    /// Ends a subscription. Does nothing in a forked child, or with the subscription of another
    /// `Hooks`.
    ///
    /// The end of an invalidator's last subscription waits for the hooks that run at the moment.
    /// After this, no hook calls the invalidator, unless the invalidator is subscribed to another
    /// monitor of the registry. The caller must not be inside a notification.
    pub fn unsubscribe(&self, subscription: Subscription) {
        if !self.is_own_process() {
            return;
        }
        let Some(slot) = subscription.redeem(&self.issuer) else { return };
        let slot = slot as usize;
        let own = &self.own[slot];
        if own.remove_unless_last() {
            return;
        }
        let mut in_table = self.in_table.lock();
        let last = if own.end() { in_table[slot].take() } else { None };
        let gone = last.and_then(|entry| self.subscribers().remove(entry));
        drop(in_table);
        // Dropping the invalidator may call this method again, so the lock is released before.
        drop(gone);
    }
}

impl<T: HasTable> Drop for Hooks<T> {
    fn drop(&mut self) {
        if !self.is_own_process() {
            return;
        }
        for entry in self.in_table.get_mut().iter_mut().filter_map(Option::take) {
            self.process.subscribers.remove(entry);
        }
        self.process.uninstall(self.patches);
    }
}

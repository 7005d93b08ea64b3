//! The memhooks monitor: hooks in the C library's functions detect changes before memory is
//! unmapped.
//!
//! glibc's `munmap`, `mmap`, `mremap`, `madvise`, `process_madvise`, `brk` (and so `sbrk`),
//! `shmat`, `shmdt` and `remap_file_pages` are patched at their entries. So calls that the library
//! makes itself (in `free`, or when a thread ends) are seen too. Three kinds of changes are not
//! seen: raw system calls, the dynamic loader's own `munmap` (`dlclose`), and changes made by other
//! processes.
//!
//! `hmem-hook` does the patching. `hook.rs` has the rules that the hooks obey.

mod announced;
mod area_cache;
mod cancellation;
mod function;
mod hook;
mod self_test;

use std::{fmt, sync::Arc};

use hmem_core::{
    AddressRange, Allocation, IfaceKind, Result,
    monitor::{DetectionMethod, InvalidationCause, Invalidator, Monitor, Subscription},
};
use hmem_hook::{Hooks, MonitorName};

use self::{announced::Reading, area_cache::AreaCache, hook::MemhooksState};

const NAME: MonitorName = MonitorName {
    name: "memhooks",
    iface: IfaceKind::SYSTEM,
    fallback_hint: "use the userfaultfd monitor",
};

/// Assigns the kernel's discard event for `start..end` to a hooked call in progress, as
/// [`Announced::account_event`](announced::Announced::account_event) does. Returns false if no
/// hooked call caused the event. Allocates nothing and takes no lock.
pub(super) fn is_hooked_discard(start: u64, end: u64) -> bool {
    let subscribers = hook::REGISTRY.subscribers();
    subscribers.is_some_and(|subscribers| subscribers.shared().announced.account_event(start, end))
}

/// Marks the calling thread as one that reads userfaultfd events and passes them to
/// [`is_hooked_discard`]. Until the thread drops the returned guard, hooked calls of `madvise` do
/// not return.
///
/// Returns `None` if no [`MemHooks`] has started yet. Allocates nothing and takes no lock.
pub(super) fn reading_discards() -> Option<Reading> {
    hook::REGISTRY.subscribers().map(|subscribers| subscribers.shared().announced.reading())
}

/// The monitor that patches the C library.
///
/// All `MemHooks` of a process share the same patches. Creating the first value patches the
/// functions, and dropping the last value removes the patches.
///
/// Changes by raw system calls, by the dynamic loader (`dlclose`) and by other processes are not
/// detected.
pub struct MemHooks {
    hooks: Hooks<MemhooksState>,
    areas: AreaCache,
}

impl MemHooks {
    /// Patches the C library, and tests the hooks like [`MemHooks::check`].
    ///
    /// # Errors
    /// - Unavailable: there is no dynamically linked glibc.
    /// - Unsupported: a function cannot be patched. The error names the function, and the library
    ///   that patched it first, if this is known.
    /// - PermissionDenied or AccessDenied: a security policy forbids changing code.
    /// - Busy: a call of a patched function did not notify subscribers of a change, or another
    ///   library has overwritten a patch.
    /// - OutOfResources: no memory, mapping or slot for an invalidator is left.
    pub fn start() -> Result<Arc<Self>> {
        let hooks = Hooks::start(&hook::REGISTRY, NAME, hook::plan)?;
        let this = Arc::new(Self { hooks, areas: AreaCache::default() });
        this.check()?;
        Ok(this)
    }

    /// Tests that every patch is still in place, and calls the patched functions, to test that they
    /// notify subscribers. Does not call `process_madvise` and `remap_file_pages`.
    ///
    /// # Errors
    /// - Busy: a library overwrote a patch or intercepts a function. The error names the function,
    ///   and the library that overwrote the patch if this is known.
    /// - Unsupported: this process is a forked child.
    /// - OutOfResources: no slot is left for the invalidator of the test, because
    ///   [`hmem_hook::SLOTS`] caches are subscribed.
    pub fn check(&self) -> Result<()> {
        self.hooks.check_patches("check")?;
        self_test::run(self.hooks.subscribers())
    }

    /// Returns true in the process that started the monitor, and false in a forked child.
    pub(super) fn is_own_process(&self) -> bool {
        self.hooks.is_own_process()
    }

    /// Subscribes an invalidator like [`Monitor::subscribe`], but does not check that its range is
    /// anonymous memory or a System V segment. The caller must make this check itself
    /// ([`Maps::check`](super::maps::Maps::check)), after this call.
    pub(super) fn watch(&self, invalidator: &Arc<dyn Invalidator>) -> Result<Subscription> {
        self.hooks.subscribe(invalidator)
    }

    /// Returns the names of the patched functions.
    #[must_use]
    pub fn functions(&self) -> Vec<&'static str> {
        self.hooks.functions().collect()
    }
}

impl fmt::Debug for MemHooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemHooks").finish_non_exhaustive()
    }
}

impl Monitor for MemHooks {
    fn name(&self) -> &str {
        NAME.name
    }

    fn rationale(&self) -> String {
        "notified by hooks of the C library before memory is unmapped".into()
    }

    fn detection(&self) -> DetectionMethod {
        DetectionMethod::Callback
    }

    fn detects(&self, cause: InvalidationCause) -> bool {
        matches!(
            cause,
            InvalidationCause::Unmap
                | InvalidationCause::Remap
                | InvalidationCause::Discard
                | InvalidationCause::Replace
                | InvalidationCause::Shrink
                | InvalidationCause::Detach
        )
    }

    fn subscribe(
        &self,
        range: AddressRange,
        invalidator: Arc<dyn Invalidator>,
    ) -> Result<Subscription> {
        let subscription = self.watch(&invalidator)?;
        // The check follows the subscription: the subscriber is notified of changes from here on,
        // and the check sees the result of earlier changes.
        let found = self.areas.check(self.hooks.subscribers().table(), range);
        if let Err(error) = found {
            self.hooks.unsubscribe(subscription);
            return Err(error);
        }
        Ok(subscription)
    }

    fn unsubscribe(&self, subscription: Subscription) {
        self.hooks.unsubscribe(subscription);
    }

    fn valid(&self, _: &Subscription, _: &Allocation) -> Result<bool> {
        Ok(true)
    }
}

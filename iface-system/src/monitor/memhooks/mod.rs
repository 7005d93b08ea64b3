//! Changes noticed at the entry of the C library's functions, before the memory goes.
//!
//! `munmap`, `mmap`, `mremap`, `madvise`, `process_madvise`, `brk` (and so `sbrk`), `shmat`,
//! `shmdt` and `remap_file_pages` of glibc are patched where they begin, so that the library's own
//! calls (of `free`, of ending threads) are seen too. Raw system calls, the dynamic loader's own
//! `munmap` (`dlclose`), and changes made by other processes are not seen.
//!
//! `hmem-hook` does the patching. `hook.rs` has the rules that the hooks obey, `process.rs` the
//! process-wide state.

mod announced;
mod area_cache;
mod function;
mod hook;
mod process;
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

/// Returns whether a discard event of these addresses is that of a hooked call in progress.
/// Allocates nothing and takes no lock.
pub(super) fn tells_of_discard(start: u64, end: u64) -> bool {
    let subscribers = hook::REGISTRY.subscribers();
    subscribers.is_some_and(|subscribers| subscribers.shared().announced.tells(start, end))
}

/// Makes hooked discards that return wait until the guard is dropped. A thread takes it before it
/// reads events that it compares by [`tells_of_discard`]. Allocates nothing and takes no lock.
pub(super) fn reading_discards() -> Option<Reading> {
    hook::REGISTRY.subscribers().map(|subscribers| subscribers.shared().announced.reading())
}

/// The monitor that patches the C library.
///
/// All values of a process share the patches: the first one puts them in, the last one to be
/// dropped takes them out.
pub struct MemHooks {
    hooks: Hooks<MemhooksState>,
    areas: AreaCache,
}

impl MemHooks {
    /// Patches the C library, and sees through each function that changes arrive.
    ///
    /// # Errors
    /// Unavailable without a dynamically linked glibc. Unsupported naming the function whose entry
    /// does not allow it, and whose code it leads to if another library was there first.
    /// PermissionDenied or AccessDenied where a security policy forbids changing code. Busy if
    /// a change did not arrive.
    pub fn start() -> Result<Arc<Self>> {
        let hooks = Hooks::start(&hook::REGISTRY, NAME, process::plan)?;
        let this = Arc::new(Self { hooks, areas: AreaCache::default() });
        this.check()?;
        Ok(this)
    }

    /// Sees again that every patch is in place, and that a change arrives through each function.
    ///
    /// # Errors
    /// Busy, naming the function and the library that overwrote its patch or stands before it;
    /// Unsupported in a forked child.
    pub fn check(&self) -> Result<()> {
        self.hooks.check_patches("check")?;
        self_test::run(self.hooks.subscribers())
    }

    /// Whether this process made it, and not one that it was forked from.
    pub(super) fn is_own_process(&self) -> bool {
        self.hooks.is_own_process()
    }

    /// The functions that are patched.
    #[must_use]
    pub fn functions(&self) -> Vec<&'static str> {
        self.hooks.functions().collect()
    }
}

impl fmt::Debug for MemHooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemHooks")
            .field("name", &self.name())
            .field("detection", &self.detection())
            .finish_non_exhaustive()
    }
}

impl Monitor for MemHooks {
    fn name(&self) -> &str {
        NAME.name
    }

    fn rationale(&self) -> String {
        "told by the C library's functions before the memory goes".into()
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
        let subscription = self.hooks.subscribe(&invalidator)?;
        // Only now: a change from here on is told, and what one before has left is seen here.
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

    fn valid(&self, _: &Allocation) -> Result<bool> {
        Ok(true)
    }
}

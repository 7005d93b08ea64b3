//! The process-wide state of one set of hooks: patches, subscribers and users.
//!
//! The state is process-wide because a patched function is: several monitors share its patch. A
//! forked child inherits the patched code, and the kernel zeroes the child's copy of the table. If
//! the child starts a monitor, it gets a new table.

use std::{
    ptr,
    sync::atomic::{AtomicBool, AtomicPtr, Ordering},
};

use hmem_core::{Result, monitor::InvalidationCause};
use parking_lot::Mutex;

use crate::{HasTable, MonitorName, Patches, Subscribers, Wipeable, clamped};

/// The subscribers and users of one set of hooks in one process.
#[derive(Debug)]
pub(crate) struct Process<T: Wipeable> {
    subscribers: Subscribers<T>,
    /// Number of monitors that use the patches.
    users: Mutex<usize>,
    /// Set if the last check found a patch overwritten.
    overwritten: AtomicBool,
}

/// The subscribers and patches of one set of hooks. Hooks reach it through a `static`.
#[derive(Debug)]
pub struct HookRegistry<T: Wipeable> {
    process: AtomicPtr<Process<T>>,
    /// Created once and never freed: a thread may run a trampoline at any time, even after the
    /// patches were undone.
    patches: AtomicPtr<Patches>,
}

impl<T: HasTable + 'static> Default for HookRegistry<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: HasTable + 'static> HookRegistry<T> {
    /// Creates a registry without subscribers.
    #[must_use]
    pub const fn new() -> Self {
        Self { process: AtomicPtr::new(ptr::null_mut()), patches: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Returns the subscribers that a hook notifies, or `None` if no monitor was ever started.
    ///
    /// In a forked child that starts no monitor the result is `Some`, but its table is empty,
    /// because the kernel zeroed the child's copy.
    #[inline(always)]
    #[must_use]
    pub fn subscribers(&self) -> Option<&'static Subscribers<T>> {
        // SAFETY: the pointer is null, or comes from `Box::into_raw` in `get` and is never freed,
        // since a hook may read it at any time.
        let process: Option<&'static Process<T>> =
            unsafe { self.process.load(Ordering::Acquire).as_ref() };
        process.map(|process| &process.subscribers)
    }

    /// Returns the state of this process. Creates the state in a process that has none, and in a
    /// forked child that has only its parent's.
    ///
    /// # Errors
    /// The errors of [`Subscribers::new`].
    pub(crate) fn get(&self, monitor: MonitorName) -> Result<&'static Process<T>> {
        let seen = self.process.load(Ordering::Acquire);
        // SAFETY: the pointer is null, or comes from `Box::into_raw` below and is never freed.
        let here: Option<&'static Process<T>> = unsafe { seen.as_ref() };
        if let Some(process) = here.filter(|process| process.is_own_process()) {
            return Ok(process);
        }
        let subscribers = Subscribers::new(monitor)?;
        let process = Box::into_raw(Box::new(Process {
            subscribers,
            users: Mutex::new(0),
            overwritten: AtomicBool::new(false),
        }));
        match self.process.compare_exchange(seen, process, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: `Box::into_raw` just returned the pointer; from now on it is never freed.
            Ok(_) => Ok(unsafe { &*process }),
            Err(theirs) => {
                // SAFETY: `Box::into_raw` just returned the pointer, and no other thread saw it.
                drop(unsafe { Box::from_raw(process) });
                // SAFETY: a failed exchange with `seen` (null, or a parent's) returns the pointer
                // that another thread stored here, from `Box::into_raw`; it is never freed.
                Ok(unsafe { &*theirs })
            }
        }
    }
}

impl<T: HasTable> Process<T> {
    /// Returns the subscribers that hooks notify.
    pub(crate) fn subscribers(&self) -> &Subscribers<T> {
        &self.subscribers
    }

    /// Returns true in the process that created the state, and false in a forked child.
    pub(crate) fn is_own_process(&self) -> bool {
        self.subscribers.shared().is_own_process()
    }

    /// Patches the functions for the first user, or adds a user of the existing patches.
    ///
    /// Calls `plan` if there is no plan yet. Concurrent calls wait for the lock, because `plan`
    /// must write the `original` of each hook before any function is patched.
    ///
    /// # Errors
    /// - The errors of `plan` and [`Patches::patch_all`].
    /// - Busy: another library overwrote an existing patch.
    pub(crate) fn install(
        &self,
        registry: &HookRegistry<T>,
        plan: impl FnOnce() -> Result<Patches>,
    ) -> Result<&'static Patches> {
        let mut users = self.users.lock();
        // SAFETY: the pointer is null, or comes from `Box::into_raw` below and is never freed.
        let planned: Option<&'static Patches> =
            unsafe { registry.patches.load(Ordering::Acquire).as_ref() };
        let patches = match planned {
            Some(patches) => patches,
            None => {
                let patches = Box::into_raw(Box::new(plan()?));
                // No other thread stores: a process has one `Process` at a registry, and this
                // function holds its lock.
                registry.patches.store(patches, Ordering::Release);
                // SAFETY: `Box::into_raw` just returned the pointer; from now on it is never freed.
                unsafe { &*patches }
            }
        };
        if *users > 0 {
            self.check_patches(patches)?;
        } else {
            patches.patch_all()?;
        }
        *users += 1;
        Ok(patches)
    }

    /// Fails unless every patch is in place.
    ///
    /// If a patch was overwritten, the first call that finds it invalidates all memory for every
    /// subscriber. Later calls do not, because no subscription is accepted any more.
    ///
    /// # Errors
    /// The errors of [`Patches::check_patches`].
    #[inline]
    pub(crate) fn check_patches(&self, patches: &Patches) -> Result<()> {
        let found = patches.check_patches();
        if found.is_err() != self.overwritten.load(Ordering::SeqCst) {
            self.patches_changed(found.is_err());
        }
        found
    }

    #[cold]
    fn patches_changed(&self, overwritten: bool) {
        if self.overwritten.swap(overwritten, Ordering::SeqCst) || !overwritten {
            return;
        }
        let everything = clamped(0, u64::MAX);
        let pass = self.subscribers.table().pass();
        pass.each(|_, invalidator| invalidator.invalidate(everything, InvalidationCause::Unmap));
    }

    /// Removes a user, and undoes the patches after the last one. Leaves alone patches that another
    /// library overwrote.
    pub(crate) fn uninstall(&self, patches: &Patches) {
        let mut users = self.users.lock();
        *users -= 1;
        if *users == 0 {
            patches.unpatch_all();
        }
    }
}

//! The process-wide state of one set of hooks: the patches, the subscribers, and the number of
//! monitors.
//!
//! The state is process-wide, because all monitors of a process share one patch for each function.
//! A forked child inherits the patched code, and the kernel zeroes the child's copy of the
//! subscriber table. If the child starts a monitor, a new table is created.

#![allow(unsafe_code, reason = "process-wide state that is never freed, behind pointers")]

use std::{
    ptr,
    sync::atomic::{AtomicBool, AtomicPtr, Ordering},
};

use hmem_core::{Result, Wipeable, monitor::InvalidationCause};
use parking_lot::Mutex;

use crate::{HasTable, MonitorName, Patches, Subscribers, clamped};

/// The state of one set of hooks in one process: the subscribers, and the number of monitors that
/// use the patches.
#[derive(Debug)]
pub(crate) struct Process<T: Wipeable> {
    /// The subscribers that the hooks notify in this process.
    pub(crate) subscribers: Subscribers<T>,
    /// The number of monitors that use the patches. A thread holds this lock while it plans,
    /// applies or undoes the patches.
    users: Mutex<usize>,
    /// True if the last check found that another library had overwritten a patch. Only the first
    /// such check invalidates all memory.
    overwritten: AtomicBool,
}

/// The subscribers and patches of one set of hooks. The registry is a `static`, in which the hooks
/// find their subscribers.
#[derive(Debug)]
pub struct HookRegistry<T: Wipeable> {
    /// The state of the process, which is never freed. Null until a monitor starts. In a forked
    /// child, the state is the parent's until a monitor starts in the child.
    process: AtomicPtr<Process<T>>,
    /// The patches, or null until the first monitor has planned them. They are never freed: a
    /// thread may run a trampoline at any time, even after the patches were undone.
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

    /// Returns the subscribers that a hook notifies. The result is `None` only if no monitor has
    /// started yet.
    ///
    /// In a forked child that has started no monitor, the result is the parent's value with an
    /// empty table, because the kernel zeroed the child's copy of the table.
    #[inline(always)]
    #[must_use]
    pub fn subscribers(&self) -> Option<&'static Subscribers<T>> {
        // SAFETY: the pointer is null, or comes from `Box::into_raw` in `get` and is never freed,
        // since a hook may read it at any time.
        let process: Option<&'static Process<T>> =
            unsafe { self.process.load(Ordering::Acquire).as_ref() };
        process.map(|process| &process.subscribers)
    }

    /// Returns the state of this process. Creates the state if this process has none yet. A forked
    /// child does not use the state of its parent.
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
                // SAFETY: `Box::into_raw` just returned the pointer, and no other thread has seen
                // it.
                drop(unsafe { Box::from_raw(process) });
                // SAFETY: a failed exchange with `seen` (null, or a parent's) returns the pointer
                // that another thread stored here, from `Box::into_raw`; it is never freed.
                Ok(unsafe { &*theirs })
            }
        }
    }
}

impl<T: HasTable> Process<T> {
    /// Returns true in the process that created the state, and false in a forked child.
    pub(crate) fn is_own_process(&self) -> bool {
        self.subscribers.shared().is_own_process()
    }

    /// Adds a monitor that uses the patches. Patches the functions if it is the first monitor.
    ///
    /// Calls `plan` if the registry has no patches yet. Concurrent calls wait for the lock, because
    /// `plan` must write the `original` of each hook before any function is patched.
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
                // No other thread stores to `patches`: a process has one `Process` for each
                // registry, and this function holds its lock `users`.
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

    /// Checks that every patch is in place.
    ///
    /// If a patch was overwritten, the first call that finds this invalidates all memory for every
    /// subscriber. Later calls need not do so, because no subscriber can be added while the patch
    /// is overwritten.
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

    /// Removes a monitor that used the patches. Undoes the patches if it was the last monitor,
    /// except patches that another library overwrote.
    pub(crate) fn uninstall(&self, patches: &Patches) {
        let mut users = self.users.lock();
        *users -= 1;
        if *users == 0 {
            patches.unpatch_all();
        }
    }
}

//! The state that one kind of hooks has once in a process: patches, subscribers and users.
//!
//! The state is process-wide because the patched function is: however many monitors need it, there
//! is one function to patch. A forked child inherits the patches in its copy of the code, with a
//! table that is wiped. If the child starts a monitor, it gets a new table.

use std::{
    ptr,
    sync::atomic::{AtomicBool, AtomicPtr, Ordering},
};

use hmem_core::{Result, monitor::InvalidationCause};
use parking_lot::Mutex;

use crate::{HasTable, MonitorName, Patches, Subscribers, Wipeable, clamped};

/// The subscribers and users of one kind of hooks in one process.
#[derive(Debug)]
pub(crate) struct Process<T: Wipeable> {
    subscribers: Subscribers<T>,
    /// Number of monitors that use the patches.
    users: Mutex<usize>,
    /// Set if a patch was missing at the last check.
    overwritten: AtomicBool,
}

/// The subscribers and patches of one kind of hooks. A hook finds them in a static of this type.
#[derive(Debug)]
pub struct HookRegistry<T: Wipeable> {
    process: AtomicPtr<Process<T>>,
    /// Made once and kept: a thread may run a trampoline at any time, even when nothing is patched.
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

    /// Returns the subscribers that a hook notifies. In a forked child without a monitor these are
    /// the parent's, with a wiped table.
    #[inline(always)]
    #[must_use]
    pub fn subscribers(&self) -> Option<&'static Subscribers<T>> {
        // SAFETY: the pointer is null, or comes from `Box::into_raw` in `get` and is never freed,
        // since a hook may read it at any time.
        let process: Option<&'static Process<T>> =
            unsafe { self.process.load(Ordering::Acquire).as_ref() };
        process.map(|process| &process.subscribers)
    }

    /// Returns the state of this process. Creates it if there is none, or if it is the parent's.
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

    /// Returns true if this process created the state, rather than a parent that forked it.
    pub(crate) fn is_own_process(&self) -> bool {
        self.subscribers.shared().is_own_process()
    }

    /// Patches the functions, or counts one more user of the patches. Calls `plan` if there is no
    /// plan yet. The lock keeps other starts out meanwhile: planning writes the `original` of each
    /// hook, which must precede the patches.
    ///
    /// # Errors
    /// The errors of `plan` and [`Patches::patch_all`]; Busy if a patch was overwritten since.
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

    /// Fails unless every patch is in place. If a patch was overwritten, invalidates all memory for
    /// every subscriber: once, since later subscriptions are refused.
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

    /// Undoes the patches when the last user is gone. Patches that another library overwrote stay
    /// as they are.
    pub(crate) fn uninstall(&self, patches: &Patches) {
        let mut users = self.users.lock();
        *users -= 1;
        if *users == 0 {
            patches.unpatch_all();
        }
    }
}

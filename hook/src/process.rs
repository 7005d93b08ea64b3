//! What a kind of hooks has once in a process: the patches, whom they tell, and who uses them.
//!
//! It is process-wide because a library is: there is one function to patch, however many monitors
//! want it. A forked child has the patches in its own copy of the code, with a table that is wiped;
//! if it starts a monitor, it gets a new table.

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
    /// Monitors that use the patches.
    users: Mutex<usize>,
    /// A patch was not in place when that was looked at last.
    overwritten: AtomicBool,
}

/// The subscribers and patches of one kind of hooks. A hook finds them in a static of this type.
#[derive(Debug)]
pub struct HookRegistry<T: Wipeable> {
    process: AtomicPtr<Process<T>>,
    /// Made once and kept: trampolines may be in use at any time, also when nothing is patched.
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

    /// What a hook finds: the subscribers of this process, or of the one that it was forked from,
    /// whose table is then wiped.
    #[inline(always)]
    #[must_use]
    pub fn subscribers(&self) -> Option<&'static Subscribers<T>> {
        // SAFETY: null, or from `Box::into_raw` in `get` and never freed: a hook may be reading it
        // at any time.
        let process: Option<&'static Process<T>> =
            unsafe { self.process.load(Ordering::Acquire).as_ref() };
        process.map(|process| &process.subscribers)
    }

    /// That of this process; a forked child's own, if it was forked from one that has one.
    ///
    /// # Errors
    /// As [`Subscribers::new`].
    pub(crate) fn get(&self, monitor: MonitorName) -> Result<&'static Process<T>> {
        let seen = self.process.load(Ordering::Acquire);
        // SAFETY: as above.
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
            // SAFETY: just made, and from now on never freed.
            Ok(_) => Ok(unsafe { &*process }),
            Err(theirs) => {
                // SAFETY: just made, and seen by nobody else; the other one is as above.
                drop(unsafe { Box::from_raw(process) });
                // SAFETY: as above.
                Ok(unsafe { &*theirs })
            }
        }
    }
}

impl<T: HasTable> Process<T> {
    /// Whom hooks tell.
    pub(crate) fn subscribers(&self) -> &Subscribers<T> {
        &self.subscribers
    }

    /// Whether this process made it, and not one that it was forked from.
    pub(crate) fn is_own_process(&self) -> bool {
        self.subscribers.shared().is_own_process()
    }

    /// Patches the functions, or counts one more user of the patches. They are planned by `plan` if
    /// they never were, with no other start under way: planning writes where hooks go on, and
    /// patches lead there.
    ///
    /// # Errors
    /// As `plan` and [`Patches::patch_all`]; Busy if a patch was overwritten since.
    pub(crate) fn install(
        &self,
        registry: &HookRegistry<T>,
        plan: impl FnOnce() -> Result<Patches>,
    ) -> Result<&'static Patches> {
        let mut users = self.users.lock();
        // SAFETY: null, or from `Box::into_raw` below and never freed.
        let kept: Option<&'static Patches> =
            unsafe { registry.patches.load(Ordering::Acquire).as_ref() };
        let patches = match kept {
            Some(patches) => patches,
            None => {
                let patches = Box::into_raw(Box::new(plan()?));
                // Nobody else stores: a process has one of this type at a registry, and its
                // lock is held.
                registry.patches.store(patches, Ordering::Release);
                // SAFETY: just made, and from now on never freed.
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

    /// Fails unless every patch is in place. If one was overwritten, invalidates all memory for
    /// every subscriber: once, since later subscriptions are refused.
    ///
    /// # Errors
    /// As [`Patches::check_patches`].
    #[inline]
    pub(crate) fn check_patches(&self, patches: &Patches) -> Result<()> {
        let found = patches.check_patches();
        if found.is_err() != self.overwritten.load(Ordering::SeqCst) {
            self.turned(found.is_err());
        }
        found
    }

    #[cold]
    fn turned(&self, overwritten: bool) {
        if self.overwritten.swap(overwritten, Ordering::SeqCst) || !overwritten {
            return;
        }
        let everything = clamped(0, u64::MAX);
        let pass = self.subscribers.table().pass();
        pass.each(|_, invalidator| invalidator.invalidate(everything, InvalidationCause::Unmap));
    }

    /// Undoes the patches when the last user is gone. Those that another library overwrote stay as
    /// they are.
    pub(crate) fn uninstall(&self, patches: &Patches) {
        let mut users = self.users.lock();
        *users -= 1;
        if *users == 0 {
            patches.unpatch_all();
        }
    }
}

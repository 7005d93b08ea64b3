//! What a kind of hooks has once in a process: the patches, whom they tell, and who uses them.
//!
//! It is process-wide because a library is: there is one function to patch, however many monitors
//! want it. A forked child has the patches in its own copy of the code, with a table that is wiped;
//! if it starts a monitor, it gets a new table.

use std::{
    ptr,
    sync::atomic::{AtomicBool, AtomicPtr, Ordering},
};

use hmem_core::{Result, monitor::Cause};
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

/// Where hooks of one kind find whom they tell, and where their patches are kept: made for a
/// static.
#[derive(Debug)]
pub struct Place<T: Wipeable> {
    process: AtomicPtr<Process<T>>,
    /// Made once and kept: trampolines may be in use at any time, also when nothing is patched.
    patches: AtomicPtr<Patches>,
}

impl<T: HasTable + 'static> Default for Place<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: HasTable + 'static> Place<T> {
    /// With nobody there.
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
        if let Some(process) = here.filter(|process| process.is_ours()) {
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
    pub(crate) fn is_ours(&self) -> bool {
        self.subscribers.shared().is_ours()
    }

    /// Patches the functions, or counts one more user of the patches. They are planned by `plan` if
    /// they never were, with no other start under way: planning writes where hooks go on, and
    /// patches lead there.
    ///
    /// # Errors
    /// As `plan` and [`Patches::put`]; Busy if a patch was overwritten since.
    pub(crate) fn install(
        &self,
        place: &Place<T>,
        plan: impl FnOnce() -> Result<Patches>,
    ) -> Result<&'static Patches> {
        let mut users = self.users.lock();
        // SAFETY: null, or from `Box::into_raw` below and never freed.
        let kept: Option<&'static Patches> =
            unsafe { place.patches.load(Ordering::Acquire).as_ref() };
        let patches = match kept {
            Some(patches) => patches,
            None => {
                let patches = Box::into_raw(Box::new(plan()?));
                // Nobody else stores: a process has one of this type at a place, and its lock is
                // held.
                place.patches.store(patches, Ordering::Release);
                // SAFETY: just made, and from now on never freed.
                unsafe { &*patches }
            }
        };
        if *users > 0 {
            self.in_place(patches)?;
        } else {
            patches.put()?;
        }
        *users += 1;
        Ok(patches)
    }

    /// Fails unless every patch is in place. Where one is found overwritten, all who are subscribed
    /// are told that everything is gone: once, since whoever subscribes after that is refused.
    ///
    /// # Errors
    /// As [`Patches::in_place`].
    #[inline]
    pub(crate) fn in_place(&self, patches: &Patches) -> Result<()> {
        let found = patches.in_place();
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
        pass.each(|_, invalidator| invalidator.invalidate(everything, Cause::Unmap));
    }

    /// Takes the patches back when the last user is gone. Those that another library overwrote stay
    /// as they are.
    pub(crate) fn uninstall(&self, patches: &Patches) {
        let mut users = self.users.lock();
        *users -= 1;
        if *users == 0 {
            patches.take_back();
        }
    }
}

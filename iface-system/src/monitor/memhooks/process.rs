//! The patches of this process.
//!
//! This is process-wide because the C library is: there is one `munmap` to patch, however many monitors want it.
//! What is kept here is the plan of the patches, made once; who uses them; and whom hooks tell. A forked child has
//! the patches in its own copy of the code, with a table that is wiped; if it starts a monitor, it gets a new one.

use std::{
    ffi::{CStr, c_void},
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

use hmem_core::{ErrorKind, Result};
use hmem_hook::{Patches, Subscribers, Target};
use parking_lot::Mutex;

use super::{
    NAME,
    function::Function,
    hook::{self, Shared},
};

/// The hooks of one process.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) subscribers: Subscribers<Shared>,
    /// Monitors that use the patches.
    users: Mutex<usize>,
}

static PROCESS: AtomicPtr<Process> = AtomicPtr::new(ptr::null_mut());

/// Made once and kept: trampolines may be in use at any time, also when nothing is patched.
static PLAN: AtomicPtr<Patches> = AtomicPtr::new(ptr::null_mut());

impl Process {
    /// That of this process; a forked child's own, if it was forked from one that has one.
    pub(super) fn get() -> Result<&'static Self> {
        let seen = PROCESS.load(Ordering::Acquire);
        // SAFETY: null, or from `Box::into_raw` below and never freed.
        let here = unsafe { seen.as_ref() };
        if let Some(process) = here.filter(|process| process.subscribers.shared().is_ours()) {
            return Ok(process);
        }
        let subscribers = Subscribers::new(NAME, |shared: &Shared| &shared.table)?;
        let process = Box::into_raw(Box::new(Self { subscribers, users: Mutex::new(0) }));
        match PROCESS.compare_exchange(seen, process, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                // SAFETY: just made, and from now on never freed.
                let process: &'static Self = unsafe { &*process };
                hook::tell(&process.subscribers);
                Ok(process)
            }
            Err(theirs) => {
                // SAFETY: just made, and seen by nobody else; the other one is as above.
                drop(unsafe { Box::from_raw(process) });
                // SAFETY: as above.
                Ok(unsafe { &*theirs })
            }
        }
    }

    /// Patches the functions, or counts one more user of the patches.
    ///
    /// # Errors
    /// Unavailable without glibc; Unsupported naming the function whose entry does not fit, and who patched it
    /// before us; Busy if a patch of ours was overwritten since; what the kernel refused.
    pub(super) fn install(&self) -> Result<()> {
        let mut users = self.users.lock();
        let patches = plan()?;
        if *users > 0 {
            patches.in_place()?;
        } else {
            patches.put()?;
        }
        *users += 1;
        Ok(())
    }

    /// Takes the patches back when the last user is gone. Those that another library overwrote stay as they are.
    pub(super) fn uninstall(&self) {
        if !self.subscribers.shared().is_ours() {
            return;
        }
        let mut users = self.users.lock();
        *users -= 1;
        if let (0, Ok(patches)) = (*users, plan()) {
            patches.take_back();
        }
    }
}

/// The patches, decoded once.
pub(super) fn plan() -> Result<&'static Patches> {
    // SAFETY: null, or from `Box::into_raw` below and never freed.
    if let Some(patches) = unsafe { PLAN.load(Ordering::Acquire).as_ref() } {
        return Ok(patches);
    }
    let libc = Libc::find()?;
    let mut targets = Vec::new();
    for function in Function::ALL {
        match libc.symbol(function.symbol()) {
            Some(entry) => targets.push(Target {
                name: function.name(),
                entry,
                hook: hook::address(function),
                call: Some(function.nr()),
                original: hook::original_of(function),
            }),
            None if function.optional() => {}
            None => {
                return Err(NAME
                    .error(ErrorKind::Unsupported)
                    .context("function", function.name())
                    .context("why", "the C library has no such symbol"));
            }
        }
    }
    // SAFETY: the entries are the C library's, which is never unloaded; hooks take and pass on whole registers, and have
    // an `original` each. Who loses the race below wrote another way past the same code, which stays mapped too.
    let patches = Box::into_raw(Box::new(unsafe { Patches::plan(NAME, &targets) }?));
    match PLAN.compare_exchange(ptr::null_mut(), patches, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: just made, or theirs; never freed.
        Ok(_) => Ok(unsafe { &*patches }),
        // SAFETY: as above.
        Err(theirs) => Ok(unsafe { &*theirs }),
    }
}

/// The C library, whatever stands before it in the search order.
struct Libc(*mut c_void);

impl Libc {
    fn find() -> Result<Self> {
        // SAFETY: loads nothing: it finds an object that is loaded already, and whose initialisers have run.
        let handle = unsafe { libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        if handle.is_null() {
            return Err(NAME
                .error(ErrorKind::Unavailable)
                .context("library", "libc.so.6")
                .remedy(format!("memhooks patch a dynamically linked glibc: {}", NAME.otherwise)));
        }
        Ok(Self(handle))
    }

    fn symbol(&self, name: &CStr) -> Option<usize> {
        // SAFETY: the handle is that of a loaded library.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!symbol.is_null()).then(|| symbol.expose_provenance())
    }
}

//! The patches of this process: their plan, made once, and whom the hooks tell.

use std::{
    ffi::{CStr, c_void},
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

use hmem_core::{ErrorKind, Result};
use hmem_hook::{Patches, Place, Target};

use super::{
    NAME,
    function::Function,
    hook::{self, Shared},
};

/// The hooks of one process.
pub(super) type Process = hmem_hook::Process<Shared>;

/// Where hooks find those of theirs.
pub(super) static PLACE: Place<Shared> = Place::new();

/// Made once and kept: trampolines may be in use at any time, also when nothing is patched.
static PLAN: AtomicPtr<Patches> = AtomicPtr::new(ptr::null_mut());

/// That of this process.
pub(super) fn get() -> Result<&'static Process> {
    PLACE.get(NAME)
}

/// The patches, decoded once: first of all within [`hmem_hook::Process::install`], where no other start is under way.
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
    // an `original` each, which nobody goes by yet: nothing is patched before a plan is kept.
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

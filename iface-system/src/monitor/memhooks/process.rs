//! The list of the C library's functions to patch.

#![allow(unsafe_code, reason = "finds the C library's functions and plans their patches")]

use std::ffi::c_void;

use hmem_core::{ErrorKind, Result};
use hmem_hook::{PatchTarget, Patches};

use super::{NAME, function::Function, hook};

/// Prepares the patches of the C library's functions. No function is changed yet.
pub(super) fn plan() -> Result<Patches> {
    let libc = find_libc()?;
    let mut targets = Vec::new();
    for function in Function::ALL {
        // SAFETY: `dlopen` returned the handle, and the library stays loaded.
        let entry = unsafe { libc::dlsym(libc, function.symbol().as_ptr()) };
        if !entry.is_null() {
            targets.push(PatchTarget {
                name: function.name(),
                entry: entry.expose_provenance(),
                hook: hook::address(function),
                call: Some(function.nr()),
                original: hook::original_of(function),
            });
        } else if !function.optional() {
            return Err(NAME
                .error(ErrorKind::Unsupported)
                .context("function", function.name())
                .context("why", "the C library has no such symbol"));
        }
    }
    // SAFETY: the entries are functions of the C library, which is never unloaded. Hooks receive
    // and pass on whole registers. Each hook has its own `original`, which no thread uses before
    // the function is patched.
    unsafe { Patches::plan(NAME, &targets) }
}

/// Returns a `dlopen` handle of the C library. A lookup in it finds the library's own functions even
/// if another library overrides them.
fn find_libc() -> Result<*mut c_void> {
    // SAFETY: the call loads nothing and runs no initialiser. It finds a library that is already
    // loaded.
    let handle =
        unsafe { libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return Err(NAME
            .error(ErrorKind::Unavailable)
            .context("library", "libc.so.6")
            .remedy(format!("memhooks patch a dynamically linked glibc: {}", NAME.fallback_hint)));
    }
    Ok(handle)
}

//! A set of functions patched where they begin.
//!
//! A plan is made once for a library and kept for good: trampolines may be in use at any time, also
//! when nothing is patched. `entry.rs` has the rules by which running threads are safe from the
//! patching.

use std::{
    ffi::{CStr, c_void},
    ptr,
    sync::atomic::{AtomicUsize, Ordering},
};

use hmem_core::{Error, ErrorKind, Result};
use rustix::{
    mm::MprotectFlags,
    thread::{MembarrierCommand, membarrier},
};

use crate::{
    MonitorName,
    arch::{self, Patch},
    entry::LOOKED_AT,
    trampoline::{Trampolines, not_allowed},
};

/// A function to patch.
#[derive(Clone, Copy, Debug)]
pub struct PatchTarget {
    /// Its name.
    pub name: &'static str,
    /// Where it begins.
    pub entry: usize,
    /// What runs in its place.
    pub hook: usize,
    /// The number of the system call that it makes, where it is known for one.
    pub call: Option<i64>,
    /// Where the hook finds how to go on: written by [`Patches::plan`], before anything leads to
    /// the hook.
    pub original: &'static AtomicUsize,
}

/// Functions of one library and what replaces an instruction of each.
#[derive(Debug)]
pub struct Patches {
    monitor: MonitorName,
    sites: Vec<Site>,
}

/// One function's patch.
#[derive(Debug)]
struct Site {
    name: &'static str,
    entry: u64,
    patch: Patch,
}

impl Patches {
    /// Decodes the entries and writes the ways to and from the hooks. Nothing leads there yet.
    ///
    /// # Errors
    /// Unsupported naming the function whose entry does not fit, and who patched it before us;
    /// OutOfResources without addresses in a jump's reach; what the kernel refused.
    ///
    /// # Safety
    /// Each entry is that of a function of a library that stays loaded. Its hook is called with its
    /// arguments and by its calling convention, goes on by what `original` holds then, and each
    /// `original` is of one target of one plan.
    pub unsafe fn plan(monitor: MonitorName, targets: &[PatchTarget]) -> Result<Self> {
        let Some(first) = targets.first() else { return Ok(Self { monitor, sites: Vec::new() }) };
        pin_library_of(first.hook);
        let trampolines = Trampolines::new(monitor, first.entry as u64, targets.len())?;
        let sites = targets.iter().enumerate();
        // SAFETY: the caller's promise is the same.
        let sites =
            sites.map(|(slot, target)| unsafe { Site::new(monitor, target, slot, &trampolines) });
        let sites = sites.collect::<Result<_>>()?;
        trampolines.seal()?;
        Ok(Self { monitor, sites })
    }

    /// The names of the functions.
    pub fn functions(&self) -> impl Iterator<Item = &'static str> {
        self.entries().map(|(name, _)| name)
    }

    /// Where each function begins, by its name.
    pub fn entries(&self) -> impl Iterator<Item = (&'static str, usize)> {
        self.sites.iter().map(|site| (site.name, site.entry as usize))
    }

    /// Checks that every patch is in place. The error names the first function whose patch is not.
    ///
    /// # Errors
    /// Busy, with the library that overwrote it.
    pub fn check_patches(&self) -> Result<()> {
        match self.sites.iter().find(|site| !site.patch.is_in_place()) {
            None => Ok(()),
            Some(site) => Err(self.overwritten(site)),
        }
    }

    /// Patches the functions: all of them, or none.
    ///
    /// # Errors
    /// Busy naming a function that another library patched meanwhile; PermissionDenied or
    /// AccessDenied where a security policy forbids changing code. Its context names what could
    /// not be taken back after that.
    pub fn patch_all(&self) -> Result<()> {
        // What is in place already was inherited from the process that this one was forked from.
        let put = |site: &Site| if site.patch.is_in_place() { Ok(()) } else { self.put_one(site) };
        let take_back =
            |site: &Site| if site.patch.is_in_place() { self.take_back_one(site) } else { Ok(()) };
        all_or_none(&self.sites, put, take_back)?;
        if !synchronise_code() {
            tracing::debug!(
                "no membarrier: other processors see the patches at their next interrupt"
            );
        }
        Ok(())
    }

    /// Undoes the patches. Those that another library overwrote stay as they are.
    pub fn unpatch_all(&self) {
        for site in &self.sites {
            if site.patch.is_in_place()
                && let Err(error) = self.take_back_one(site)
            {
                tracing::error!(%error, function = site.name, "a patch stays in place; it tells nobody");
            } else if !site.patch.is_taken_back() {
                tracing::warn!(
                    function = site.name,
                    by = site.owner(),
                    "a patch was overwritten by another library: left as it is"
                );
            }
        }
        if !synchronise_code() {
            tracing::debug!(
                "no membarrier: other processors see the old code at their next interrupt"
            );
        }
    }

    fn overwritten(&self, site: &Site) -> Error {
        let error = self.monitor.error(ErrorKind::Busy).context("function", site.name);
        error.context("overwritten by", site.owner()).remedy(format!(
            "another library patched this function: turn its hooks off, or {}",
            self.monitor.fallback_hint
        ))
    }

    fn put_one(&self, site: &Site) -> Result<()> {
        if !site.patch.is_taken_back() {
            return Err(self.overwritten(site));
        }
        // SAFETY: writable within; the trampolines are sealed and lead to a hook with its original
        // set.
        self.while_writable(site, || unsafe { site.patch.put() })
    }

    fn take_back_one(&self, site: &Site) -> Result<()> {
        // SAFETY: writable within; what was there before is the library's own.
        self.while_writable(site, || unsafe { site.patch.take_back() })
    }

    /// Runs `write` with the page of the patch writable, and executable all the while: threads are
    /// running it.
    fn while_writable(&self, site: &Site, write: impl FnOnce() -> bool) -> Result<()> {
        let page = rustix::param::page_size();
        let at =
            ptr::with_exposed_provenance_mut::<c_void>(site.patch.start() as usize & !(page - 1));
        let code = MprotectFlags::READ | MprotectFlags::EXEC;
        let refused = |errno| {
            not_allowed(self.monitor, errno, "mprotect of a library's code")
                .context("function", site.name)
        };
        // SAFETY: the page is code of the library; it stays readable and executable.
        unsafe { rustix::mm::mprotect(at, page, code | MprotectFlags::WRITE) }.map_err(refused)?;
        let written = write();
        // SAFETY: as above; this is the protection that code is mapped with.
        unsafe { rustix::mm::mprotect(at, page, code) }.map_err(refused)?;
        if written {
            Ok(())
        } else {
            let error = self.monitor.error(ErrorKind::Busy).context("function", site.name);
            Err(error.context("why", "it changes under us"))
        }
    }
}

impl Site {
    /// # Safety
    /// As of [`Patches::plan`].
    unsafe fn new(
        monitor: MonitorName,
        target: &PatchTarget,
        slot: usize,
        trampolines: &Trampolines,
    ) -> Result<Self> {
        let PatchTarget { name, hook, call, original, .. } = *target;
        let entry = target.entry as u64;
        let refused = || monitor.error(ErrorKind::Unsupported).context("function", name);
        let code = code_at(entry);
        let fit = arch::decode(entry, &code, call).map_err(|misfit| {
            let bytes: Vec<_> = code[..24].iter().map(|byte| format!("{byte:02x}")).collect();
            let error =
                refused().context("why", misfit).context("bytes", bytes.join(" ")).remedy(format!(
                    "turn the other library's hooks off where there is one, or {}",
                    monitor.fallback_hint
                ));
            match owner(entry, &code) {
                Some(owner) => error.context("leads to", owner),
                None => error,
            }
        })?;
        let out_of_reach = || refused().context("why", "out of a jump's reach");
        let (to_hook, past) =
            trampolines.write(slot, hook as u64, entry, &fit).ok_or_else(out_of_reach)?;
        original.store(past as usize, Ordering::Release);
        // SAFETY: the entry's code was just read, and so can the rest of its 16 aligned bytes be:
        // code is mapped in pages.
        let patch =
            unsafe { Patch::jump(entry + fit.at as u64, to_hook) }.ok_or_else(out_of_reach)?;
        Ok(Self { name, entry, patch })
    }

    /// Who has patched the entry now, as far as its bytes tell.
    fn owner(&self) -> String {
        owner(self.entry, &code_at(self.entry)).unwrap_or_else(|| "unknown".into())
    }
}

/// Does each, or undoes what was done up to the one that failed, which may be done in part. The
/// error is that of the one that failed, and its context what failed to be undone.
fn all_or_none<S>(
    sites: &[S],
    mut one: impl FnMut(&S) -> Result<()>,
    undo: impl FnMut(&S) -> Result<()>,
) -> Result<()> {
    let Some((at, error)) =
        sites.iter().enumerate().find_map(|(at, site)| Some((at, one(site).err()?)))
    else {
        return Ok(());
    };
    let left = sites[..=at].iter().map(undo).filter_map(Result::err);
    Err(left.fold(error, |error, why| error.context("not taken back", why)))
}

/// Makes every processor that runs this process fetch its code anew; false where the kernel lacks
/// that.
fn synchronise_code() -> bool {
    membarrier(MembarrierCommand::RegisterPrivateExpeditedSyncCore)
        .and_then(|()| membarrier(MembarrierCommand::PrivateExpeditedSyncCore))
        .is_ok()
}

fn code_at(entry: u64) -> [u8; LOOKED_AT] {
    // SAFETY: the entry of a function of a loaded library: its code, and what is linked behind it,
    // is mapped for at least as many bytes; whoever patches it writes other valid bytes.
    unsafe { ptr::with_exposed_provenance::<[u8; LOOKED_AT]>(entry as usize).read_volatile() }
}

/// The file that a patched entry leads to.
fn owner(entry: u64, code: &[u8; LOOKED_AT]) -> Option<String> {
    let target = arch::jump_target(entry, code)?;
    Some(object_of(target as usize)?.to_string_lossy().into_owned())
}

/// The name of the loaded object that an address lies in.
fn object_of(address: usize) -> Option<&'static CStr> {
    let mut object = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr looks the address up and fills the structure.
    if unsafe { libc::dladdr(ptr::with_exposed_provenance(address), object.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: zeroes are valid, and the call has filled it.
    let object = unsafe { object.assume_init() };
    // SAFETY: a name that the dynamic loader keeps while the object is loaded.
    (!object.dli_fname.is_null()).then(|| unsafe { CStr::from_ptr(object.dli_fname) })
}

/// Keeps the object that holds the hooks loaded for good, if it is a shared library: entries lead
/// into it, and threads are in it. The main program, which is not found by this name, is never
/// unloaded.
fn pin_library_of(hook: usize) {
    if let Some(name) = object_of(hook) {
        let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
        // SAFETY: loads nothing: it marks an object that is loaded already.
        unsafe { libc::dlopen(name.as_ptr(), flags) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_set_is_undone_to_its_last_and_its_error_names_what_could_not_be() {
        let mut undone = Vec::new();
        let one = |site: &&'static str| match *site {
            "mremap" => Err(Error::new(ErrorKind::Busy, "put").context("function", *site)),
            _ => Ok(()),
        };
        let undo = |site: &&'static str| {
            undone.push(*site);
            match *site {
                "munmap" => {
                    Err(Error::new(ErrorKind::AccessDenied, "take back").context("function", *site))
                }
                _ => Ok(()),
            }
        };
        let error = all_or_none(&["munmap", "mmap", "mremap", "brk"], one, undo).unwrap_err();
        assert_eq!(undone, ["munmap", "mmap", "mremap"]);
        assert_eq!((error.kind(), error.operation()), (ErrorKind::Busy, "put"));
        assert_eq!(error.context_value("function"), Some("mremap"));
        let left = error.context_value("not taken back").unwrap();
        assert!(left.contains("take back") && left.contains("munmap"), "{left}");
    }
}

//! Patches a set of functions at their entries, and undoes the patches.
//!
//! The patches of a library are planned once and never freed: a thread may run a trampoline at any
//! time, even after the patches were undone. `entry.rs` lists the rules that make patching safe
//! while threads run the functions.

#![allow(unsafe_code, reason = "writes the code of functions")]

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
    entry::ENTRY_LEN,
    trampoline::{Trampolines, code_change_refused},
};

/// A function to patch.
#[derive(Clone, Copy, Debug)]
pub struct PatchTarget {
    /// The name of the function.
    pub name: &'static str,
    /// The address of the function.
    pub entry: usize,
    /// The address of the hook, which runs in place of the patched function.
    pub hook: usize,
    /// The number of the system call that the function makes, or `None` if it makes none or the
    /// number is not known.
    pub call: Option<i64>,
    /// The variable that holds the address by which the hook calls the original function.
    /// [`Patches::plan`] stores the address before any patch leads to the hook.
    pub original: &'static AtomicUsize,
}

/// The functions of one library with their prepared patches.
#[derive(Debug)]
pub struct Patches {
    monitor: MonitorName,
    sites: Vec<Site>,
}

/// A function and its patch.
#[derive(Debug)]
struct Site {
    name: &'static str,
    entry: u64,
    patch: Patch,
}

impl Patches {
    /// Prepares the patches: decodes the entries of the functions and writes the trampolines.
    /// Changes no function yet. The library with the hooks is never unloaded after this.
    ///
    /// # Errors
    /// - Unsupported: an entry cannot be patched. The error names the function, and the library
    ///   that patched the function if this is known.
    /// - OutOfResources: no free memory is near enough to the functions for a jump.
    /// - The error of the kernel if it refuses a mapping, or if `/proc/self/maps` cannot be read.
    ///
    /// # Safety
    /// - Each entry must be the address of a function of a library that stays loaded.
    /// - Each hook must have the function's signature and calling convention. To find the original
    ///   function, the hook must read `original` at each call.
    /// - All hooks must belong to one library, or to the program.
    /// - Each `original` must be used by only one target of one successful plan.
    pub unsafe fn plan(monitor: MonitorName, targets: &[PatchTarget]) -> Result<Self> {
        let Some(first) = targets.first() else { return Ok(Self { monitor, sites: Vec::new() }) };
        pin_library_of(first.hook);
        let trampolines = Trampolines::new(monitor, first.entry as u64, targets.len())?;
        let sites = targets.iter().enumerate();
        // SAFETY: the caller promises that each target meets the conditions of this function, which
        // are those of `Site::new`.
        let sites =
            sites.map(|(slot, target)| unsafe { Site::new(monitor, target, slot, &trampolines) });
        let sites = sites.collect::<Result<_>>()?;
        trampolines.seal()?;
        // The mapping is kept forever: once a patch leads there, a thread may run the code at any
        // time.
        std::mem::forget(trampolines);
        // No jump leads to the trampolines yet. So every processor has executed a serialising
        // instruction between the stores of their code and the first jump.
        synchronise_code("the trampolines");
        Ok(Self { monitor, sites })
    }

    /// Returns the name and address of each function to patch.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (&'static str, usize)> {
        self.sites.iter().map(|site| (site.name, site.entry as usize))
    }

    /// Checks that every patch is in place.
    ///
    /// # Errors
    /// Busy: another library overwrote a patch. The error names the function, and the library if it
    /// is known.
    pub(crate) fn check_patches(&self) -> Result<()> {
        match self.sites.iter().find(|site| !site.patch.is_in_place()) {
            None => Ok(()),
            Some(site) => Err(self.overwritten(site)),
        }
    }

    /// Patches all functions. If one of them fails, undoes the patches and returns the error.
    ///
    /// # Errors
    /// - Busy: another library patched a function since the plan. The error names the function.
    /// - PermissionDenied or AccessDenied: a security policy forbids changing code.
    /// - OutOfResources: the process has no mapping (`vm.max_map_count`) or memory left.
    ///
    /// If a patch cannot be undone after the failure, the context of the error contains the reason.
    pub(crate) fn patch_all(&self) -> Result<()> {
        // A patch that is already in place was applied by the parent of this forked process.
        let apply =
            |site: &Site| if site.patch.is_in_place() { Ok(()) } else { self.apply_one(site) };
        let undo =
            |site: &Site| if site.patch.is_in_place() { self.undo_one(site) } else { Ok(()) };
        all_or_none(&self.sites, apply, undo)?;
        synchronise_code("the patches");
        Ok(())
    }

    /// Undoes the patches. Does not touch patches that another library overwrote. Logs each patch
    /// that is not undone.
    pub(crate) fn unpatch_all(&self) {
        for site in &self.sites {
            if site.patch.is_in_place()
                && let Err(error) = self.undo_one(site)
            {
                tracing::error!(
                    error = %error.full(),
                    function = site.name,
                    "cannot undo a patch: it stays in place without subscribers"
                );
            } else if !site.patch.is_undone() {
                tracing::warn!(
                    function = site.name,
                    by = site.owner(),
                    "a patch was overwritten by another library: left as it is"
                );
            }
        }
        synchronise_code("the old code");
    }

    fn overwritten(&self, site: &Site) -> Error {
        let error = self.monitor.error(ErrorKind::Busy);
        let error = error.context("why", site.name).context("function", site.name);
        error.context("overwritten by", site.owner()).remedy(format!(
            "another library patched this function: turn its hooks off, or {}",
            self.monitor.fallback_hint
        ))
    }

    fn apply_one(&self, site: &Site) -> Result<()> {
        if !site.patch.is_undone() {
            return Err(self.overwritten(site));
        }
        // SAFETY: `while_writable` makes the patched bytes writable for the call. `plan` sealed the
        // trampolines, and set the `original` of each hook that they jump to.
        self.while_writable(site, || unsafe { site.patch.apply() })
    }

    fn undo_one(&self, site: &Site) -> Result<()> {
        // SAFETY: `while_writable` makes the patched bytes writable for the call. The bytes to
        // restore are the library's own code.
        self.while_writable(site, || unsafe { site.patch.undo() })
    }

    /// Makes the page of the patch writable, runs `write`, and makes the page read-only again. The
    /// page stays executable, because other threads run code in it.
    ///
    /// # Errors
    /// - Busy: `write` returned false, because another library has changed the code.
    /// - The error of `mprotect`. If the second `mprotect` fails, `write` has already run.
    fn while_writable(&self, site: &Site, write: impl FnOnce() -> bool) -> Result<()> {
        let page = rustix::param::page_size();
        let at =
            ptr::with_exposed_provenance_mut::<c_void>(site.patch.start() as usize & !(page - 1));
        let code = MprotectFlags::READ | MprotectFlags::EXEC;
        let refused = |errno| {
            code_change_refused(self.monitor, errno, "mprotect of a library's code")
                .context("function", site.name)
        };
        // SAFETY: the page is code of the library; it stays readable and executable.
        unsafe { rustix::mm::mprotect(at, page, code | MprotectFlags::WRITE) }.map_err(refused)?;
        let written = write();
        // SAFETY: the page is code of the library; it stays readable and executable. On aarch64 the
        // page loses the kernel's check of branch targets (PROT_BTI) until the process ends: with
        // it, an indirect call of the function would have to land on an instruction that the patch
        // replaces.
        unsafe { rustix::mm::mprotect(at, page, code) }.map_err(refused)?;
        if written {
            Ok(())
        } else {
            Err(self.overwritten(site).context("why", "its code changed between check and store"))
        }
    }
}

impl Site {
    /// Decodes the entry of a function, and writes the function's trampoline into slot number
    /// `slot` of `trampolines`.
    ///
    /// # Safety
    /// The target must meet the conditions of [`Patches::plan`].
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
        let point = arch::decode(entry, &code, call).map_err(|obstacle| {
            let bytes: Vec<_> = code[..24].iter().map(|byte| format!("{byte:02x}")).collect();
            let error = refused()
                .context("why", format_args!("{name}: {obstacle}"))
                .context("bytes", bytes.join(" "))
                .remedy(format!(
                    "if another library patched the function, turn its hooks off, or {}",
                    monitor.fallback_hint
                ));
            match owner(entry, &code) {
                Some(owner) => error.context("leads to", owner),
                None => error,
            }
        })?;
        let out_of_reach =
            || refused().context("why", "out of a jump's reach").remedy(monitor.fallback_hint);
        let (to_hook, past) =
            trampolines.write(slot, hook as u64, entry, &point).ok_or_else(out_of_reach)?;
        original.store(past as usize, Ordering::Release);
        // SAFETY: the entry's code was just read. The rest of its 16 aligned bytes is readable too,
        // since code is mapped in whole pages.
        let patch =
            unsafe { Patch::jump(entry + point.at as u64, to_hook) }.ok_or_else(out_of_reach)?;
        Ok(Self { name, entry, patch })
    }

    /// Returns the name of the library that patched this function, or `unknown` if the code does
    /// not show the name.
    fn owner(&self) -> String {
        owner(self.entry, &code_at(self.entry)).unwrap_or_else(|| "unknown".into())
    }
}

/// Runs `apply` for each of `sites`. If `apply` fails, runs `undo` for that site and for all sites
/// before it.
///
/// The failed site is included because `apply` may have done half of its work. The returned error
/// is that of `apply`, with the errors of `undo` as context.
fn all_or_none<S>(
    sites: &[S],
    mut apply: impl FnMut(&S) -> Result<()>,
    undo: impl FnMut(&S) -> Result<()>,
) -> Result<()> {
    let Some((at, error)) =
        sites.iter().enumerate().find_map(|(at, site)| Some((at, apply(site).err()?)))
    else {
        return Ok(());
    };
    let left = sites[..=at].iter().map(undo).filter_map(Result::err);
    Err(left.fold(error, |error, why| error.context("not undone", format_args!("{why:#}"))))
}

/// Makes every processor that runs this process execute a serialising instruction, so that the
/// processor fetches the code again. If the kernel does not support this (before Linux 4.16), logs
/// that the processors see the new code later. `code` names the new code in the log.
fn synchronise_code(code: &'static str) {
    let synchronised = membarrier(MembarrierCommand::RegisterPrivateExpeditedSyncCore)
        .and_then(|()| membarrier(MembarrierCommand::PrivateExpeditedSyncCore));
    if synchronised.is_err() {
        tracing::debug!("no membarrier: other processors see {code} at their next interrupt");
    }
}

fn code_at(entry: u64) -> [u8; ENTRY_LEN] {
    // SAFETY: `entry` is the address of a function of a loaded library, as the caller of
    // `Patches::plan` promised. Its code, and the code linked behind it, is mapped for at least as
    // many bytes. Any library that patches it writes valid bytes.
    unsafe { ptr::with_exposed_provenance::<[u8; ENTRY_LEN]>(entry as usize).read_volatile() }
}

/// Returns the file name of the library that patched the function at `entry`. The jump in `code`,
/// the first bytes of the function, leads into that library.
fn owner(entry: u64, code: &[u8; ENTRY_LEN]) -> Option<String> {
    let target = arch::jump_target(entry, code)?;
    Some(object_of(target as usize)?.to_string_lossy().into_owned())
}

/// Returns the file name of the loaded library or program that contains an address.
fn object_of(address: usize) -> Option<&'static CStr> {
    let mut object = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr looks the address up and fills the structure.
    if unsafe { libc::dladdr(ptr::with_exposed_provenance(address), object.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: zeroes are a valid value, and dladdr has filled the structure.
    let object = unsafe { object.assume_init() };
    // SAFETY: the dynamic loader keeps the name while the object is loaded.
    (!object.dli_fname.is_null()).then(|| unsafe { CStr::from_ptr(object.dli_fname) })
}

/// Prevents the shared library that contains the hooks from being unloaded.
///
/// Patched functions jump into this library, and threads run its code. For hooks in the main
/// program the call does nothing: `dlopen` does not find the program by its name, and the program
/// is never unloaded. Errors of `dlopen` are ignored.
fn pin_library_of(hook: usize) {
    if let Some(name) = object_of(hook) {
        let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
        // SAFETY: RTLD_NOLOAD loads nothing; the call only marks an object that is already loaded.
        unsafe { libc::dlopen(name.as_ptr(), flags) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_store_names_the_remedy() {
        let monitor = MonitorName {
            name: "test",
            iface: hmem_core::IfaceKind::SYSTEM,
            fallback_hint: "use the other monitor",
        };
        let len = rustix::param::page_size();
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing one.
        let page = unsafe {
            rustix::mm::mmap_anonymous(
                ptr::null_mut(),
                len,
                rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
                rustix::mm::MapFlags::PRIVATE,
            )
        }
        .unwrap();
        let entry = page.expose_provenance() as u64;
        // SAFETY: the page is readable.
        let patch = unsafe { Patch::jump(entry, entry + 64) }.unwrap();
        let patches = Patches { monitor, sites: vec![Site { name: "munmap", entry, patch }] };
        let error = patches.while_writable(&patches.sites[0], || false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        assert_eq!(error.context_value("function"), Some("munmap"));
        assert!(error.to_string().contains("or use the other monitor"), "{error}");
        // SAFETY: only this test used the page.
        unsafe { rustix::mm::munmap(page, len) }.unwrap();
    }

    #[test]
    fn failed_set_is_undone_and_its_error_lists_failed_undos() {
        let mut undone = Vec::new();
        let apply = |site: &&'static str| match *site {
            "mremap" => Err(Error::new(ErrorKind::Busy, "patch").context("function", *site)),
            _ => Ok(()),
        };
        let undo = |site: &&'static str| {
            undone.push(*site);
            match *site {
                "munmap" => {
                    Err(Error::new(ErrorKind::AccessDenied, "unpatch").context("function", *site))
                }
                _ => Ok(()),
            }
        };
        let error = all_or_none(&["munmap", "mmap", "mremap", "brk"], apply, undo).unwrap_err();
        assert_eq!(undone, ["munmap", "mmap", "mremap"]);
        assert_eq!((error.kind(), error.operation()), (ErrorKind::Busy, "patch"));
        assert_eq!(error.context_value("function"), Some("mremap"));
        let left = error.context_value("not undone").unwrap();
        assert!(left.contains("unpatch") && left.contains("munmap"), "{left}");
    }
}

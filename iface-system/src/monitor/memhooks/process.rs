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

use hmem_core::{Error, ErrorKind, IfaceKind, Result};
use parking_lot::Mutex;
use rustix::{
    mm::MprotectFlags,
    thread::{MembarrierCommand, membarrier},
};

use super::{
    arch::{self, Patch},
    entry::LOOKED_AT,
    function::Function,
    hook::{self, Shared},
    trampoline::{Trampolines, not_allowed},
};
use crate::{monitor::table::Subscribers, sys};

/// The hooks of one process.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) subscribers: Subscribers<Shared>,
    /// Monitors that use the patches.
    users: Mutex<usize>,
}

/// One function's patch.
#[derive(Debug)]
pub(super) struct Site {
    pub(super) function: Function,
    entry: u64,
    patch: Patch,
}

static PROCESS: AtomicPtr<Process> = AtomicPtr::new(ptr::null_mut());

/// Made once and kept: trampolines may be in use at any time, also when nothing is patched.
static PLAN: AtomicPtr<Vec<Site>> = AtomicPtr::new(ptr::null_mut());

impl Process {
    /// That of this process; a forked child's own, if it was forked from one that has one.
    pub(super) fn get() -> Result<&'static Self> {
        let seen = PROCESS.load(Ordering::Acquire);
        // SAFETY: null, or from `Box::into_raw` below and never freed.
        let here = unsafe { seen.as_ref() };
        if let Some(process) = here.filter(|process| process.subscribers.shared().is_ours()) {
            return Ok(process);
        }
        let subscribers = Subscribers::new("memhooks", |shared: &Shared| &shared.table)?;
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
        let sites = plan()?;
        if *users > 0 {
            in_place(sites)?;
        } else {
            put(sites)?;
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
        let (0, Ok(sites)) = (*users, plan()) else { return };
        for site in sites {
            if site.patch.is_in_place()
                && let Err(error) = site.take_back()
            {
                tracing::error!(%error, function = site.function.name(), "a patch stays in place; it tells nobody");
            } else if !site.patch.is_taken_back() {
                tracing::warn!(
                    function = site.function.name(),
                    by = site.owner(),
                    "a patch was overwritten by another library: left as it is"
                );
            }
        }
        let _refused = synchronise_code();
    }
}

/// Fails naming the first function whose patch is not there any more.
///
/// # Errors
/// Busy, with the library that overwrote it.
pub(super) fn in_place(sites: &[Site]) -> Result<()> {
    match sites.iter().find(|site| !site.patch.is_in_place()) {
        None => Ok(()),
        Some(site) => Err(Error::new(ErrorKind::Busy, "memhooks")
            .iface(IfaceKind::SYSTEM)
            .context("function", site.function.name())
            .context("overwritten by", site.owner())
            .remedy("another library patched this function after us: turn its memory hooks off, or use the userfaultfd monitor")),
    }
}

fn put(sites: &[Site]) -> Result<()> {
    for (done, site) in sites.iter().enumerate() {
        if site.patch.is_in_place() {
            // Inherited from the process that this one was forked from.
            continue;
        }
        if let Err(error) = site.put() {
            for site in &sites[..done] {
                site.take_back()?;
            }
            return Err(error);
        }
    }
    if !synchronise_code() {
        tracing::debug!("no membarrier: other processors see the patches at their next interrupt");
    }
    Ok(())
}

/// Makes every processor that runs this process fetch its code anew; false where the kernel lacks that.
fn synchronise_code() -> bool {
    membarrier(MembarrierCommand::RegisterPrivateExpeditedSyncCore)
        .and_then(|()| membarrier(MembarrierCommand::PrivateExpeditedSyncCore))
        .is_ok()
}

/// The patches, decoded once.
pub(super) fn plan() -> Result<&'static [Site]> {
    // SAFETY: null, or from `Box::into_raw` below and never freed.
    if let Some(sites) = unsafe { PLAN.load(Ordering::Acquire).as_ref() } {
        return Ok(sites);
    }
    pin_this_library();
    let libc = Libc::find()?;
    let mut found = Vec::new();
    for function in Function::ALL {
        match libc.symbol(function.symbol()) {
            Some(entry) => found.push((function, entry)),
            None if function.optional() => {}
            None => {
                return Err(refused(ErrorKind::Unsupported, function)
                    .context("why", "the C library has no such symbol"));
            }
        }
    }
    let trampolines = Trampolines::new(found[0].1)?;
    let mut sites = Vec::new();
    for (function, entry) in found {
        sites.push(Site::new(function, entry, &trampolines)?);
    }
    trampolines.seal()?;
    let sites = Box::into_raw(Box::new(sites));
    match PLAN.compare_exchange(ptr::null_mut(), sites, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: just made, or theirs; never freed.
        Ok(_) => Ok(unsafe { &*sites }),
        // SAFETY: as above.
        Err(theirs) => Ok(unsafe { &*theirs }),
    }
}

fn refused(kind: ErrorKind, function: Function) -> Error {
    Error::new(kind, "memhooks").iface(IfaceKind::SYSTEM).context("function", function.name())
}

impl Site {
    fn new(function: Function, entry: u64, trampolines: &Trampolines) -> Result<Self> {
        let code = code_at(entry);
        let fit = arch::decode(entry, &code, function.nr()).map_err(|misfit| {
            let bytes: Vec<_> = code[..24].iter().map(|byte| format!("{byte:02x}")).collect();
            let error = refused(ErrorKind::Unsupported, function)
                .context("why", misfit)
                .context("bytes", bytes.join(" "))
                .remedy("turn the other library's memory hooks off, or use the userfaultfd monitor");
            match owner(entry, &code) {
                Some(owner) => error.context("leads to", owner),
                None => error,
            }
        })?;
        let out_of_reach =
            || refused(ErrorKind::Unsupported, function).context("why", "out of a jump's reach");
        let (to_hook, past) = trampolines.write(function, entry, &fit).ok_or_else(out_of_reach)?;
        // SAFETY: the way past runs what the entry did up to where it goes on; the mapping stays.
        unsafe { hook::set_original(function, past as usize) };
        // SAFETY: the entry's code was just read, and so can the rest of its 16 aligned bytes be: code is
        // mapped in pages.
        let patch = unsafe { Patch::jump(entry + fit.at as u64, to_hook) }.ok_or_else(out_of_reach)?;
        Ok(Self { function, entry, patch })
    }

    fn put(&self) -> Result<()> {
        if !self.patch.is_taken_back() {
            return Err(refused(ErrorKind::Busy, self.function)
                .context("overwritten by", self.owner())
                .remedy("another library patched this function: turn its memory hooks off, or use the userfaultfd monitor"));
        }
        // SAFETY: writable within; the trampolines are sealed and lead to a hook with its original set.
        self.while_writable(|| unsafe { self.patch.put() })
    }

    fn take_back(&self) -> Result<()> {
        // SAFETY: writable within; what was there before is the C library's own.
        self.while_writable(|| unsafe { self.patch.take_back() })
    }

    /// Runs `write` with the page of the patch writable, and executable all the while: threads are running it.
    fn while_writable(&self, write: impl FnOnce() -> bool) -> Result<()> {
        let page = sys::page_size();
        let at = ptr::with_exposed_provenance_mut::<c_void>((self.patch.start() & !(page - 1)) as usize);
        let code = MprotectFlags::READ | MprotectFlags::EXEC;
        // SAFETY: the page is code of the C library; it stays readable and executable.
        unsafe { rustix::mm::mprotect(at, page as usize, code | MprotectFlags::WRITE) }
            .map_err(|errno| not_allowed(errno, "mprotect of the C library's code"))?;
        let written = write();
        // SAFETY: as above; this is the protection that code is mapped with.
        unsafe { rustix::mm::mprotect(at, page as usize, code) }
            .map_err(|errno| not_allowed(errno, "mprotect of the C library's code"))?;
        if written {
            Ok(())
        } else {
            Err(refused(ErrorKind::Busy, self.function).context("why", "it changes under us"))
        }
    }

    /// Who has patched the entry now, as far as its bytes tell.
    fn owner(&self) -> String {
        owner(self.entry, &code_at(self.entry)).unwrap_or_else(|| "unknown".into())
    }
}

fn code_at(entry: u64) -> [u8; LOOKED_AT] {
    // SAFETY: the entry of a function of the C library: its code, and what is linked behind it, is mapped for at
    // least as many bytes; whoever patches it writes other valid bytes.
    unsafe { ptr::with_exposed_provenance::<[u8; LOOKED_AT]>(entry as usize).read_volatile() }
}

/// The file that a patched entry leads to.
fn owner(entry: u64, code: &[u8; LOOKED_AT]) -> Option<String> {
    let target = arch::jump_target(entry, code)?;
    let (name, _) = object_of(target)?;
    Some(name.to_string_lossy().into_owned())
}

/// The name and base address of the loaded object that an address lies in.
fn object_of(address: u64) -> Option<(&'static CStr, usize)> {
    let mut object = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr looks the address up and fills the structure.
    if unsafe { libc::dladdr(ptr::with_exposed_provenance(address as usize), object.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: zeroes are valid, and the call has filled it.
    let object = unsafe { object.assume_init() };
    // SAFETY: a name that the dynamic loader keeps while the object is loaded.
    let name = (!object.dli_fname.is_null()).then(|| unsafe { CStr::from_ptr(object.dli_fname) })?;
    Some((name, object.dli_fbase.addr()))
}

/// Keeps the object that holds the hooks loaded for good, if it is a shared library: entries lead into it, and
/// threads are in it. The main program, which is not found by this name, is never unloaded.
fn pin_this_library() {
    if let Some((name, _)) = object_of(hook::address(Function::Munmap) as u64) {
        let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
        // SAFETY: loads nothing: it marks an object that is loaded already.
        unsafe { libc::dlopen(name.as_ptr(), flags) };
    }
}

/// The C library, whatever stands before it in the search order.
struct Libc(*mut c_void);

impl Libc {
    fn find() -> Result<Self> {
        // SAFETY: loads nothing: it finds an object that is loaded already, and whose initialisers have run.
        let handle = unsafe { libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        if handle.is_null() {
            return Err(Error::new(ErrorKind::Unavailable, "memhooks")
                .iface(IfaceKind::SYSTEM)
                .context("library", "libc.so.6")
                .remedy("memhooks patch a dynamically linked glibc: use the userfaultfd monitor"));
        }
        Ok(Self(handle))
    }

    fn symbol(&self, name: &CStr) -> Option<u64> {
        // SAFETY: the handle is that of a loaded library.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!symbol.is_null()).then(|| symbol.expose_provenance() as u64)
    }
}

//! The driver's frees, hooked where they begin.
//!
//! An application frees by calling the driver, not this crate. Where its exported functions can be patched, a hook tells
//! who wants to know before the memory goes. Every entry of `libcuda` 535 and 550 begins with one comparison that can be
//! replaced, and `cuGetProcAddress` gives out those very entries, so that whoever got a function by that is seen too; a
//! test shows both with the real libraries.
//!
//! # What is hooked
//!
//! | function | what goes |
//! |---|---|
//! | `cuMemFree`, `cuMemFreeHost`, `cuMemFreeAsync`, `cuIpcCloseMemHandle` | the allocation at the pointer, which the driver is asked for before it is freed |
//! | `cuCtxDestroy`, `cuCtxDetach`, `cuDevicePrimaryCtxRelease`, `cuDevicePrimaryCtxReset`, `cuGreenCtxDestroy` | anything: everything cached dies |
//! | `cuModuleUnload`, `cuLibraryUnload` | their global variables: the same |
//! | `cuGraphicsUnmapResources`, `cuGraphicsUnregisterResource`, `cuGLUnmapBufferObject`, `cuGLUnregisterBufferObject` | what other APIs lent: the same |
//!
//! Each with the versions that the ABI has of it (`_v2`, `_ptsz`, `Async`).
//!
//! # What is not
//!
//! `cuMemUnmap`, `cuMemAddressFree`, `cuMemRelease` and `cuMemHostUnregister` take memory that is never cached by this
//! iface's monitor. `cuMemPoolTrimTo` and `cuMemPoolDestroy` take nothing that was not freed before; stream-ordered
//! memory is watched by identity in any case, since it goes when its stream gets there. Not seen: memory of graph nodes
//! (`cuGraphAddMemFreeNode`), which launches free; a checkpoint of the process; `cuEGLStreamConsumerReleaseFrame`; and
//! frees that the CUDA runtime may make by tables of its own (`cuGetExportTable`): 12.9 asks for the functions above by
//! name, and no run over a device has shown that it uses nothing else.

mod function;
mod hook;

use std::{
    ptr,
    sync::{
        Arc,
        atomic::{AtomicPtr, AtomicUsize, Ordering},
    },
};

use hmem_core::{
    ErrorKind, IfaceKind, Result,
    monitor::{Invalidator, Subscription},
};
use hmem_hook::{MonitorName, Patches, Process, SLOTS, Target};
use parking_lot::Mutex;

use self::{
    function::Function,
    hook::{PLACE, Shared},
};
use crate::sys::Functions;

const NAME: MonitorName = MonitorName {
    name: "cuda-hooks",
    iface: IfaceKind::CUDA,
    otherwise: "watch CUDA memory by identity (HMEM_CUDA_MONITOR=identity)",
};

/// The hooks in the driver's frees.
///
/// All values of a process share the patches: the first one puts them in, the last one to be dropped takes them out.
#[derive(Debug)]
pub struct FreeHooks {
    process: &'static Process<Shared>,
    plan: &'static Plan,
    own: Mutex<Own>,
}

#[derive(Debug)]
struct Own {
    next: u64,
    subscriptions: [u64; SLOTS],
}

/// The patches of one library.
#[derive(Debug)]
struct Plan {
    entries: Vec<(Function, usize)>,
    patches: Patches,
}

/// Made once and kept: trampolines may be in use at any time, also when nothing is patched. One for a process, as there
/// is one driver.
static PLAN: AtomicPtr<Plan> = AtomicPtr::new(ptr::null_mut());

/// The first entry of the library that the plan is of: claimed before anything is written for its hooks.
static LIBRARY: AtomicUsize = AtomicUsize::new(0);

impl FreeHooks {
    /// Patches the frees of the library that these functions are of, and sees that each leads to its hook.
    ///
    /// # Errors
    /// Unsupported naming the function whose entry does not allow it, and whose code it leads to if another library was
    /// there first; where the hooks of this process are in another library. PermissionDenied or AccessDenied where a security
    /// policy forbids changing code. Busy if a call did not arrive.
    pub fn start(functions: &Functions) -> Result<Arc<Self>> {
        let process = PLACE.get(NAME)?;
        process.install(|| Ok(&plan(functions)?.patches))?;
        let plan = plan(functions)?;
        let own = Own { next: 0, subscriptions: [0; SLOTS] };
        let this = Arc::new(Self { process, plan, own: Mutex::new(own) });
        this.check()?;
        Ok(this)
    }

    /// Sees again that every patch is in place and leads to its hook.
    ///
    /// # Errors
    /// Busy, naming the function and the library that overwrote its patch; Unsupported in a forked child.
    pub fn check(&self) -> Result<()> {
        if !self.process.is_ours() {
            return Err(NAME.forked("check"));
        }
        self.plan.patches.in_place()?;
        for (function, entry) in &self.plan.entries {
            // SAFETY: the patch of this entry was in place just now, and its hook keeps the call to itself.
            let arrived = unsafe { hook::probe(self.process.subscribers(), *entry) };
            if !arrived {
                let error = NAME.error(ErrorKind::Busy).context("function", function.symbol());
                return Err(error.context("why", "a call of it did not arrive").remedy(NAME.otherwise));
            }
        }
        Ok(())
    }

    /// The functions that are patched.
    #[must_use]
    pub fn functions(&self) -> Vec<&'static str> {
        self.plan.patches.functions().collect()
    }

    /// Tells `invalidator` of every free, until unsubscribed. When it returns, every free under way is told.
    ///
    /// # Errors
    /// Busy, naming the function whose patch was overwritten; OutOfResources with too many invalidators; Unsupported in
    /// a forked child.
    pub fn subscribe(&self, invalidator: Arc<dyn Invalidator>) -> Result<Subscription> {
        if !self.process.is_ours() {
            return Err(NAME.forked("subscribe"));
        }
        self.plan.patches.in_place()?;
        let slot = self.process.subscribers().add(invalidator)?;
        let mut own = self.own.lock();
        own.subscriptions[usize::from(slot)] += 1;
        own.next += 1;
        Ok(Subscription(own.next * SLOTS as u64 + u64::from(slot)))
    }

    /// Stops telling.
    pub fn unsubscribe(&self, subscription: Subscription) {
        if !self.process.is_ours() {
            return;
        }
        let slot = (subscription.0 % SLOTS as u64) as u8;
        let mut own = self.own.lock();
        let Some(left) = own.subscriptions[usize::from(slot)].checked_sub(1) else { return };
        own.subscriptions[usize::from(slot)] = left;
        drop(own);
        self.process.subscribers().remove(slot);
    }
}

impl Drop for FreeHooks {
    fn drop(&mut self) {
        if !self.process.is_ours() {
            return;
        }
        for (slot, count) in self.own.get_mut().subscriptions.iter().enumerate() {
            for _ in 0..*count {
                self.process.subscribers().remove(slot as u8);
            }
        }
        self.process.uninstall(&self.plan.patches);
    }
}

/// The patches of the library that these functions are of, decoded once: first of all within [`Process::install`], where
/// no other start is under way.
fn plan(functions: &Functions) -> Result<&'static Plan> {
    let entries = functions.frees().iter();
    let entries: Vec<_> =
        entries.filter_map(|(symbol, entry)| Some((Function::named(symbol)?, *entry))).collect();
    let refused = |why: &'static str| {
        let error = NAME.error(ErrorKind::Unsupported).context("library", functions.library());
        error.context("why", why).remedy(NAME.otherwise)
    };
    let Some((_, first)) = entries.first() else { return Err(refused("it has none of the functions")) };
    let claimed = LIBRARY.compare_exchange(0, *first, Ordering::AcqRel, Ordering::Acquire);
    if claimed.is_err_and(|theirs| theirs != *first) {
        return Err(refused("the hooks of this process are in another CUDA library"));
    }
    // SAFETY: null, or from `Box::into_raw` below and never freed.
    if let Some(plan) = unsafe { PLAN.load(Ordering::Acquire).as_ref() } {
        return Ok(plan);
    }
    let target = |(function, entry): &(Function, usize)| Target {
        name: function.symbol(),
        entry: *entry,
        hook: function.hook(),
        call: None,
        original: hook::original_of(*function),
    };
    let targets: Vec<_> = entries.iter().map(target).collect();
    // SAFETY: the entries are those of a library that `Functions` keeps loaded for good, or what its injector promised to be
    // functions of these names; hooks take and pass on whole registers, and have an `original` each, which nobody goes by
    // yet: nothing is patched before a plan is kept.
    let patches = unsafe { Patches::plan(NAME, &targets) }?;
    hook::ask_by(functions.pointer_get_attributes);
    let plan = Box::into_raw(Box::new(Plan { entries, patches }));
    match PLAN.compare_exchange(ptr::null_mut(), plan, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: just made, or theirs; never freed.
        Ok(_) => Ok(unsafe { &*plan }),
        // SAFETY: as above.
        Err(theirs) => Ok(unsafe { &*theirs }),
    }
}

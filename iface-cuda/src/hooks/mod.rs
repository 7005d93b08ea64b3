//! Hooks of the driver's frees.
//!
//! An application frees its memory by calling the driver, not this crate. If the driver's exported
//! functions can be patched, a hook notifies subscribers before the memory is freed. Every exported
//! function of `libcuda` 535 and 550 begins with a comparison that can be replaced by a jump.
//! `cuGetProcAddress` returns the addresses of the exported functions, so the hooks also see calls
//! by these addresses. A test shows both facts with the real libraries.
//!
//! # Hooked functions
//!
//! Each function in all its ABI versions (`_v2`, `_ptsz`, `Async`), with the memory that a call
//! invalidates:
//!
//! - `cuMemFree`, `cuMemFreeHost`, `cuMemFreeAsync`, `cuIpcCloseMemHandle`: the allocation at the
//!   pointer, whose range the hook queries before the free.
//! - `cuMemUnmap`, `cuMemAddressFree`: the range of the arguments.
//! - `cuCtxDestroy`, `cuCtxDetach`, `cuDevicePrimaryCtxRelease`, `cuDevicePrimaryCtxReset`,
//!   `cuGreenCtxDestroy`: everything.
//! - `cuModuleUnload`, `cuLibraryUnload`, which free global variables: everything.
//! - `cuGraphicsUnmapResources`, `cuGraphicsUnregisterResource`, `cuGLUnmapBufferObject`,
//!   `cuGLUnregisterBufferObject`, which end mappings of other APIs: everything.
//!
//! A release of a primary context by the application invalidates all memory, even if another part
//! of the process still retains the context. The driver frees the memory of a context at the last
//! release. That may be a release by this crate, which notifies no subscriber if no memory of this
//! crate is left in the context. So the subscribers must be notified of each release by the
//! application. Otherwise the application's memory could be freed while it is registered.
//!
//! # Functions without a hook
//!
//! - `cuMemRelease` frees no memory that is mapped: "the memory allocation will be freed when all
//!   outstanding mappings to the memory are unmapped" (`cuda.h`).
//! - `cuMemHostUnregister` ends the page-locking of memory that is never cached with this iface's
//!   monitor.
//! - `cuMemPoolTrimTo` and `cuMemPoolDestroy` free nothing that was not freed before.
//!   Stream-ordered memory is always monitored by its identity, since the driver frees the memory
//!   later, when the stream reaches the free.
//!
//! The hooks do not see:
//!
//! - memory of graph nodes (`cuGraphAddMemFreeNode`), which a graph launch frees;
//! - a checkpoint of the process;
//! - `cuEGLStreamConsumerReleaseFrame`;
//! - frees that the CUDA runtime may make by tables of its own (`cuGetExportTable`): runtime 12.9
//!   looks up the functions above by name. No test on a device has excluded that it also frees
//!   memory by such a table.

mod hook;
mod own;

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use hmem_core::{
    ErrorKind, IfaceKind, Result,
    monitor::{Invalidator, Subscription},
};
use hmem_hook::{Hooks, MonitorName, PatchTarget, Patches};

use self::hook::{CudaHookState, REGISTRY};
pub(crate) use self::own::without_notifying;
use crate::sys::{Functions, frees::Function};

const NAME: MonitorName = MonitorName {
    name: "cuda-hooks",
    iface: IfaceKind::CUDA,
    fallback_hint: "watch CUDA memory by identity (HMEM_CUDA_MONITOR=identity)",
};

/// Hooks of the driver's frees.
///
/// All values of this type in a process share the patches. The first value patches the functions,
/// and dropping the last value restores the functions.
#[derive(Debug)]
pub struct FreeHooks {
    hooks: Hooks<CudaHookState>,
}

/// Address of the first hooked function, which identifies the patched library. Only one library of
/// a process is hooked. The address is 0 until [`claim`] sets it, before any function is patched.
static LIBRARY: AtomicUsize = AtomicUsize::new(0);

#[allow(unsafe_code, reason = "calls each hooked function for its self-test")]
impl FreeHooks {
    /// Patches the functions that free memory, and checks that each patch leads to its hook.
    ///
    /// # Errors
    /// - Unsupported if the entry of a function cannot be patched. The error names the function,
    ///   and the library that patched it before, if any.
    /// - Unsupported if this process has already hooked another library, or the library exports no
    ///   function that frees memory.
    /// - Unsupported if the kernel cannot wipe memory in forked children (before Linux 4.14).
    /// - PermissionDenied or AccessDenied if a security policy forbids changing code.
    /// - OutOfResources if no memory is left, or none near enough to the functions for a jump.
    /// - Busy if another library overwrote a patch, or a call did not reach its hook.
    pub fn start(functions: &Functions) -> Result<Arc<Self>> {
        claim(functions)?;
        let this = Arc::new(Self { hooks: Hooks::start(&REGISTRY, NAME, || plan(functions))? });
        this.check()?;
        Ok(this)
    }

    /// Checks that every patch is in place and leads to its hook.
    ///
    /// # Errors
    /// - Busy if a patch was overwritten. The error names the function and the library that
    ///   overwrote the patch.
    /// - Busy if a call did not reach its hook. The error names the function.
    /// - Unsupported in a forked child.
    pub fn check(&self) -> Result<()> {
        self.hooks.check_patches("check")?;
        for (function, entry) in self.hooks.entries() {
            // SAFETY: `check_patches` above found the patch of this entry in place, and its hook
            // does not pass the call on.
            let arrived = unsafe { hook::probe(self.hooks.subscribers(), entry) };
            if !arrived {
                let error = NAME.error(ErrorKind::Busy).context("function", function);
                return Err(error
                    .context("why", "a call of the function did not reach its hook")
                    .remedy(NAME.fallback_hint));
            }
        }
        Ok(())
    }

    /// Returns the names of the patched functions.
    #[must_use]
    pub fn functions(&self) -> Vec<&'static str> {
        self.hooks.functions().collect()
    }

    /// Notifies `invalidator` of every free until it is unsubscribed. Frees that are in flight when
    /// this method returns also notify.
    ///
    /// # Errors
    /// - Busy if a patch was overwritten. The error names the function.
    /// - OutOfResources if there are too many subscriptions.
    /// - Unsupported in a forked child.
    pub fn subscribe(&self, invalidator: Arc<dyn Invalidator>) -> Result<Subscription> {
        self.hooks.subscribe(&invalidator)
    }

    /// Ends a subscription.
    pub fn unsubscribe(&self, subscription: Subscription) {
        self.hooks.unsubscribe(subscription);
    }
}

/// Claims the library of these functions as the only library that this process hooks.
fn claim(functions: &Functions) -> Result<()> {
    let refused = |why: &'static str| {
        let error = NAME.error(ErrorKind::Unsupported).context("library", functions.library());
        error.context("why", why).remedy(NAME.fallback_hint)
    };
    let Some((_, first)) = entries(functions).next() else {
        return Err(refused("the library exports no function that frees memory"));
    };
    let claimed = LIBRARY.compare_exchange(0, first, Ordering::AcqRel, Ordering::Acquire);
    if claimed.is_err_and(|theirs| theirs != first) {
        return Err(refused("the hooks of this process are in another CUDA library"));
    }
    Ok(())
}

/// Returns the functions to hook, each with the address of its first instruction.
fn entries(functions: &Functions) -> impl Iterator<Item = (Function, usize)> {
    functions.frees().iter().filter_map(|(symbol, entry)| Some((Function::named(symbol)?, *entry)))
}

/// Plans the patches: decodes the first instruction of each function to hook.
#[allow(unsafe_code, reason = "plans the patches of the driver's functions")]
fn plan(functions: &Functions) -> Result<Patches> {
    let target = |(function, entry): (Function, usize)| PatchTarget {
        name: function.symbol(),
        entry,
        hook: hook::hook_of(function),
        call: None,
        original: hook::original_of(function),
    };
    let targets: Vec<_> = entries(functions).map(target).collect();
    // SAFETY: the entries belong to a library that `Functions` never unloads, or to the functions
    // that the caller of `from_lookup` promised. Hooks receive and pass on whole registers. Each
    // hook has an `original` of its own, which no call uses yet: nothing is patched before the plan
    // is kept.
    let patches = unsafe { Patches::plan(NAME, &targets) }?;
    hook::set_query_function(functions.pointer_get_attributes);
    Ok(patches)
}

//! The driver's frees, hooked where they begin.
//!
//! An application frees by calling the driver, not this crate. Where its exported functions can be
//! patched, a hook tells who wants to know before the memory goes. Every entry of `libcuda` 535 and
//! 550 begins with one comparison that can be replaced, and `cuGetProcAddress` gives out those very
//! entries, so that whoever got a function by that is seen too; a test shows both with the real
//! libraries.
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
//! A release of a primary context is told as everything also where others still hold it, this crate
//! for one: what was allocated there lives on, but only for those who hold the context, and the
//! last of them to let go may be this crate. It releases a context without notifying, as no memory of its
//! own is left in it then, and whoever else had memory there has let go of it and was told of. If
//! neither release were told, that memory would go with its registrations alive.
//!
//! # What is not
//!
//! `cuMemUnmap`, `cuMemAddressFree`, `cuMemRelease` and `cuMemHostUnregister` take memory that is
//! never cached by this iface's monitor. `cuMemPoolTrimTo` and `cuMemPoolDestroy` take nothing that
//! was not freed before; stream-ordered memory is watched by identity in any case, since it goes
//! when its stream gets there. Not seen: memory of graph nodes (`cuGraphAddMemFreeNode`), which
//! launches free; a checkpoint of the process; `cuEGLStreamConsumerReleaseFrame`; and frees that
//! the CUDA runtime may make by tables of its own (`cuGetExportTable`): 12.9 asks for the functions
//! above by name, and no run over a device has shown that it uses nothing else.

mod function;
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
use hmem_hook::{Hooks, MonitorName, Patches, Target};

pub(crate) use self::own::without_notifying;
use self::{
    function::Function,
    hook::{CudaHookState, PLACE},
};
use crate::sys::Functions;

const NAME: MonitorName = MonitorName {
    name: "cuda-hooks",
    iface: IfaceKind::CUDA,
    otherwise: "watch CUDA memory by identity (HMEM_CUDA_MONITOR=identity)",
};

/// The hooks in the driver's frees.
///
/// All values of a process share the patches: the first one puts them in, the last one to be
/// dropped takes them out.
#[derive(Debug)]
pub struct FreeHooks {
    hooks: Hooks<CudaHookState>,
}

/// The first entry of the library that the patches are of, as there is one driver: claimed before
/// anything is written for its hooks.
static LIBRARY: AtomicUsize = AtomicUsize::new(0);

impl FreeHooks {
    /// Patches the frees of the library that these functions are of, and sees that each leads to
    /// its hook.
    ///
    /// # Errors
    /// Unsupported naming the function whose entry does not allow it, and whose code it leads to if
    /// another library was there first; where the hooks of this process are in another library.
    /// PermissionDenied or AccessDenied where a security policy forbids changing code. Busy if
    /// a call did not arrive.
    pub fn start(functions: &Functions) -> Result<Arc<Self>> {
        claim(functions)?;
        let this = Arc::new(Self { hooks: Hooks::start(&PLACE, NAME, || plan(functions))? });
        this.check()?;
        Ok(this)
    }

    /// Sees again that every patch is in place and leads to its hook.
    ///
    /// # Errors
    /// Busy, naming the function and the library that overwrote its patch; Unsupported in a forked
    /// child.
    pub fn check(&self) -> Result<()> {
        self.hooks.in_place("check")?;
        for (function, entry) in self.hooks.entries() {
            // SAFETY: the patch of this entry was in place just now, and its hook keeps the call to
            // itself.
            let arrived = unsafe { hook::probe(self.hooks.subscribers(), entry) };
            if !arrived {
                let error = NAME.error(ErrorKind::Busy).context("function", function);
                return Err(error
                    .context("why", "a call of it did not arrive")
                    .remedy(NAME.otherwise));
            }
        }
        Ok(())
    }

    /// The functions that are patched.
    #[must_use]
    pub fn functions(&self) -> Vec<&'static str> {
        self.hooks.functions().collect()
    }

    /// Tells `invalidator` of every free, until unsubscribed. When it returns, every free under way
    /// is told.
    ///
    /// # Errors
    /// Busy, naming the function whose patch was overwritten; OutOfResources with too many
    /// invalidators; Unsupported in a forked child.
    pub fn subscribe(&self, invalidator: Arc<dyn Invalidator>) -> Result<Subscription> {
        self.hooks.subscribe(&invalidator)
    }

    /// Stops telling.
    pub fn unsubscribe(&self, subscription: Subscription) {
        self.hooks.unsubscribe(subscription);
    }
}

/// Those of the library that is hooked for all of this process.
fn claim(functions: &Functions) -> Result<()> {
    let refused = |why: &'static str| {
        let error = NAME.error(ErrorKind::Unsupported).context("library", functions.library());
        error.context("why", why).remedy(NAME.otherwise)
    };
    let Some((_, first)) = entries(functions).next() else {
        return Err(refused("it has none of the functions"));
    };
    let claimed = LIBRARY.compare_exchange(0, first, Ordering::AcqRel, Ordering::Acquire);
    if claimed.is_err_and(|theirs| theirs != first) {
        return Err(refused("the hooks of this process are in another CUDA library"));
    }
    Ok(())
}

/// The functions to hook, and where each begins.
fn entries(functions: &Functions) -> impl Iterator<Item = (Function, usize)> {
    functions.frees().iter().filter_map(|(symbol, entry)| Some((Function::named(symbol)?, *entry)))
}

/// Decodes the functions of the library that these are of.
fn plan(functions: &Functions) -> Result<Patches> {
    let target = |(function, entry): (Function, usize)| Target {
        name: function.symbol(),
        entry,
        hook: hook::hook_of(function),
        call: None,
        original: hook::original_of(function),
    };
    let targets: Vec<_> = entries(functions).map(target).collect();
    // SAFETY: the entries are those of a library that `Functions` keeps loaded for good, or what
    // its injector promised to be functions of these names; hooks take and pass on whole
    // registers, and have an `original` each, which nobody goes by yet: nothing is patched
    // before a plan is kept.
    let patches = unsafe { Patches::plan(NAME, &targets) }?;
    hook::ask_by(functions.pointer_get_attributes);
    Ok(patches)
}

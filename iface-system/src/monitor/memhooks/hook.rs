//! The hooks, which run in place of the C library's functions, and the plan of their patches.
//!
//! A hook runs on any thread, inside allocators and signal handlers, with any lock held. So the
//! code here does not allocate, lock, log or run destructors. It uses no thread-local storage
//! except `errno` and the thread's cancelability, and restores both. It has no cancellation point
//! (`cancellation.rs`).

#![allow(unsafe_code, reason = "the hooks, which have the signatures of C functions")]

use std::{
    ffi::c_void,
    mem::MaybeUninit,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
};

use hmem_core::{ErrorKind, Result, Wipeable, monitor::InvalidationToken};
use hmem_hook::{
    HasTable, HookRegistry, PatchTarget, Patches, SLOTS, SubscriberTable, TableReadGuard,
};

use super::{
    NAME,
    announced::Announced,
    function::{Args, Function},
};

/// The registry in which the hooks find the subscribers to notify.
pub(super) static REGISTRY: HookRegistry<MemhooksState> = HookRegistry::new();

/// The state that the hooks share with the monitor. The kernel zeroes it in a forked child.
#[repr(C)]
#[derive(Debug)]
pub(super) struct MemhooksState {
    pub(super) table: SubscriberTable,
    /// Number of hooked calls of `brk(NULL)`. The self-test makes such a call and checks that the
    /// hook counted it. A call of `brk` with another address could move the end of the heap, so the
    /// self-test makes no such call.
    pub(super) brk_probes: AtomicU64,
    /// The hooked calls of `madvise` that are discarding pages at the moment.
    pub(super) announced: Announced,
}

// SAFETY: zeroes are a valid state (an empty table, no probes, no announced calls), and threads
// share atomics only.
unsafe impl Wipeable for MemhooksState {}

impl HasTable for MemhooksState {
    #[inline]
    fn table(&self) -> &SubscriberTable {
        &self.table
    }
}

/// The signature of the hooks: six register-sized arguments, and a register-sized result. The hooks
/// call the original functions with this signature too.
type HookedFn = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> usize;

/// Addresses by which the hooks call the original functions, indexed by [`Function`].
/// [`Patches::plan`] sets each address before the function is patched.
static ORIGINALS: [AtomicUsize; Function::ALL.len()] =
    [const { AtomicUsize::new(0) }; Function::ALL.len()];

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
                hook: address(function),
                call: Some(function.nr()),
                original: &ORIGINALS[function as usize],
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

/// Returns a `dlopen` handle of the C library. A lookup in it finds the library's own functions
/// even if another library overrides them.
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

/// Returns the address of the hook of `function`.
fn address(function: Function) -> usize {
    let hook: HookedFn = match function {
        Function::Munmap => hook::<{ Function::Munmap as usize }>,
        Function::Mmap => hook::<{ Function::Mmap as usize }>,
        Function::Mremap => hook::<{ Function::Mremap as usize }>,
        Function::Madvise => hook::<{ Function::Madvise as usize }>,
        Function::ProcessMadvise => hook::<{ Function::ProcessMadvise as usize }>,
        Function::Brk => hook::<{ Function::Brk as usize }>,
        Function::Shmat => hook::<{ Function::Shmat as usize }>,
        Function::Shmdt => hook::<{ Function::Shmdt as usize }>,
        Function::RemapFilePages => hook::<{ Function::RemapFilePages as usize }>,
    };
    (hook as *const ()).expose_provenance()
}

/// The hook of the function `Function::ALL[FUNCTION]`: calls the original function, and notifies
/// the subscribers if the call can change memory.
///
/// # Safety
/// The caller must keep the C function's contract for these arguments.
unsafe extern "C" fn hook<const FUNCTION: usize>(
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> usize {
    let (function, args) = (Function::ALL[FUNCTION], [a, b, c, d, e, f]);
    let subscribers = REGISTRY.subscribers();
    let Some(subscribers) = subscribers.filter(|_| function.may_affect(&args)) else {
        if let (Some(subscribers), Function::Brk) = (subscribers, function) {
            subscribers.shared().brk_probes.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller keeps the function's contract.
        return unsafe { original(function, args) };
    };
    let pass = subscribers.table().pass();
    // The guard `pass` is held during the system call even without subscribers, so that a thread
    // that subscribes meanwhile waits for the end of the call.
    if pass.is_empty() {
        // SAFETY: the caller keeps the function's contract.
        unsafe { original(function, args) }
    } else {
        // SAFETY: the caller keeps the function's contract.
        unsafe { notify_and_call::<FUNCTION>(&pass, &subscribers.shared().announced, args) }
    }
}

/// Calls the original function, and notifies the subscribers before and after the call.
///
/// The compiler makes one copy of this code for each function, which saves a branch at run time.
/// The copies are not inlined, so that calls without subscribers use less stack.
///
/// # Safety
/// The caller must keep the C function's contract for these arguments.
#[inline(never)]
unsafe fn notify_and_call<const FUNCTION: usize>(
    pass: &TableReadGuard<'_>,
    announced: &Announced,
    args: Args,
) -> usize {
    let function = Function::ALL[FUNCTION];
    // SAFETY: libc keeps this thread's `errno` as long as the thread runs. It is accessed only
    // through the pointer, since the original function and invalidators write it too.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: the pointer is this thread's `errno`, which lives as long as the thread.
    let before = unsafe { errno.read() };
    let affected = function.affected(&args);
    let events = function.range_of_events(&args, &affected);
    let mut changes = [const { [const { MaybeUninit::<InvalidationToken>::uninit() }; SLOTS] }; 2];
    for (affected, changes) in affected.iter().zip(&mut changes) {
        if let Some((range, cause)) = *affected {
            pass.each(|slot, invalidator| {
                _ = changes[slot].write(invalidator.invalidate_start(range, cause))
            });
        }
    }
    let call = events.and_then(|range| {
        let start = range.start().0;
        announced.announce(start, start.saturating_add(range.len()))
    });
    // SAFETY: the pointer is this thread's `errno`, which lives as long as the thread.
    unsafe { errno.write(before) };
    // SAFETY: the caller keeps the function's contract.
    let result = unsafe { original(function, args) };
    // SAFETY: the pointer is this thread's `errno`, which lives as long as the thread.
    let after = unsafe { errno.read() };
    if let Some(call) = call {
        announced.retract(call);
    }
    for (affected, changes) in affected.iter().zip(&changes) {
        if affected.is_some() {
            pass.each(|slot, invalidator| {
                // SAFETY: `pass` visits the same slots each time, and the loop above wrote the
                // result of `invalidate_start` to this slot for the same range.
                invalidator.invalidate_end(unsafe { changes[slot].assume_init_read() });
            });
        }
    }
    // SAFETY: the pointer is this thread's `errno`, which lives as long as the thread.
    unsafe { errno.write(after) };
    result
}

/// Calls the C library's own code of `function`, without the hook.
///
/// # Safety
/// The caller must keep the C function's contract for these arguments.
#[inline(always)]
unsafe fn original(function: Function, [a, b, c, d, e, f]: Args) -> usize {
    let original = ORIGINALS[function as usize].load(Ordering::Relaxed);
    // SAFETY: `Patches::plan` stored the address of the trampoline, which has this signature,
    // before the patch that led here was stored. That store orders the two.
    let original: HookedFn =
        unsafe { std::mem::transmute(std::ptr::with_exposed_provenance::<()>(original)) };
    // SAFETY: the caller keeps the function's contract.
    unsafe { original(a, b, c, d, e, f) }
}

//! The hooks, which run in place of the C library's functions.
//!
//! A hook runs on any thread, inside allocators and signal handlers, with any lock held. So the
//! code here does not allocate, lock, log or run destructors. It uses no thread-local storage
//! except `errno`, which it restores.

use std::{
    mem::MaybeUninit,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
};

use hmem_core::monitor::{InvalidationCause, InvalidationToken};
use hmem_hook::{HasTable, HookRegistry, SLOTS, SubscriberTable, TableReadGuard, Wipeable};

use super::{
    announced::Announced,
    function::{AffectedRanges, Args, Function},
};

/// The registry in which hooks find the subscribers of the process.
pub(super) static REGISTRY: HookRegistry<MemhooksState> = HookRegistry::new();

/// The state that hooks share with the rest of the process.
#[repr(C)]
#[derive(Debug)]
pub(super) struct MemhooksState {
    pub(super) table: SubscriberTable,
    /// Number of hooked calls of `brk(NULL)`. The self-test can make no other call of `brk`.
    pub(super) brk_probes: AtomicU64,
    /// Announcements of hooked discards in progress.
    pub(super) announced: Announced,
}

// SAFETY: zeroes are an empty table, no arrivals and no calls; threads share atomics only.
unsafe impl Wipeable for MemhooksState {}

impl HasTable for MemhooksState {
    #[inline]
    fn table(&self) -> &SubscriberTable {
        &self.table
    }
}

/// The type of every hooked function: it takes six whole registers and returns one.
type Call = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> usize;

/// The address at which hooks call each original function, by [`Function`].
static ORIGINALS: [AtomicUsize; Function::ALL.len()] =
    [const { AtomicUsize::new(0) }; Function::ALL.len()];

/// Returns the variable with the address at which hooks call the original of `function`. The plan
/// of the patches sets the variable before the function is patched.
pub(super) fn original_of(function: Function) -> &'static AtomicUsize {
    &ORIGINALS[function as usize]
}

/// Returns the address of the hook of `function`.
pub(super) fn address(function: Function) -> usize {
    let hook: Call = match function {
        Function::Munmap => munmap,
        Function::Mmap => mmap,
        Function::Mremap => mremap,
        Function::Madvise => madvise,
        Function::ProcessMadvise => process_madvise,
        Function::Brk => brk,
        Function::Shmat => shmat,
        Function::Shmdt => shmdt,
        Function::RemapFilePages => remap_file_pages,
    };
    (hook as *const ()).expose_provenance()
}

macro_rules! hooks {
    ($($name:ident = $function:expr;)+) => {$(
        unsafe extern "C" fn $name(
            a: usize,
            b: usize,
            c: usize,
            d: usize,
            e: usize,
            f: usize,
        ) -> usize {
            // SAFETY: a patched entry calls the hook with the function's arguments.
            unsafe { hooked::<{ $function as usize }>([a, b, c, d, e, f]) }
        }
    )+};
}

hooks! {
    munmap = Function::Munmap;
    mmap = Function::Mmap;
    mremap = Function::Mremap;
    madvise = Function::Madvise;
    process_madvise = Function::ProcessMadvise;
    brk = Function::Brk;
    shmat = Function::Shmat;
    shmdt = Function::Shmdt;
    remap_file_pages = Function::RemapFilePages;
}

/// Runs in place of the function with number `FUNCTION`: notifies subscribers if memory changes.
///
/// # Safety
/// The caller keeps the function's contract for these arguments.
#[inline(always)]
unsafe fn hooked<const FUNCTION: usize>(args: Args) -> usize {
    let function = Function::ALL[FUNCTION];
    let subscribers = REGISTRY.subscribers();
    let Some(subscribers) = subscribers.filter(|_| function.takes(&args)) else {
        if let (Some(subscribers), Function::Brk) = (subscribers, function) {
            subscribers.shared().brk_probes.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller keeps the function's contract.
        return unsafe { original(function, args) };
    };
    let pass = subscribers.table().pass();
    // The pass covers the system call even without subscribers: a subscriber that is added
    // meanwhile waits for it.
    if pass.is_empty() {
        // SAFETY: the caller keeps the function's contract.
        unsafe { original(function, args) }
    } else {
        // SAFETY: the caller keeps the function's contract.
        unsafe { notify_and_call::<FUNCTION>(&pass, &subscribers.shared().announced, args) }
    }
}

/// Notifies the subscribers before and after a call of the original function.
///
/// There is one instance for each function, which saves a test at run time. The instances are not
/// inlined, so that calls without subscribers need no stack for them.
///
/// # Safety
/// The caller keeps the function's contract for these arguments.
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
    let AffectedRanges(taken) = function.taken(&args);
    let mut changes = [const { [const { MaybeUninit::<InvalidationToken>::uninit() }; SLOTS] }; 2];
    for (taken, changes) in taken.iter().zip(&mut changes) {
        if let Some((range, cause)) = *taken {
            pass.each(|slot, invalidator| {
                _ = changes[slot].write(invalidator.invalidate_start(range, cause))
            });
        }
    }
    // The addresses of `process_madvise` are not known, nor whether they are this process's.
    let call = match (function, taken) {
        (Function::Madvise, [Some((range, InvalidationCause::Discard)), _]) => {
            let start = range.start().0;
            announced.announce(start, start.saturating_add(range.len()))
        }
        _ => None,
    };
    // SAFETY: the pointer is this thread's `errno`, which lives as long as the thread.
    unsafe { errno.write(before) };
    // SAFETY: the caller keeps the function's contract.
    let result = unsafe { original(function, args) };
    // SAFETY: the pointer is this thread's `errno`, which lives as long as the thread.
    let after = unsafe { errno.read() };
    if let Some(call) = call {
        announced.retract(call);
    }
    for (taken, changes) in taken.iter().zip(&changes) {
        if taken.is_some() {
            pass.each(|slot, invalidator| {
                // SAFETY: this pass has the same slots each time, and `invalidate_start` wrote this
                // one for the same range.
                invalidator.invalidate_end(unsafe { changes[slot].assume_init_read() });
            });
        }
    }
    // SAFETY: the pointer is this thread's `errno`, which lives as long as the thread.
    unsafe { errno.write(after) };
    result
}

/// Calls the original of `function`.
///
/// # Safety
/// The caller keeps the function's contract for these arguments.
#[inline(always)]
unsafe fn original(function: Function, [a, b, c, d, e, f]: Args) -> usize {
    let original = ORIGINALS[function as usize].load(Ordering::Relaxed);
    // SAFETY: the plan has written the way past the replaced instruction before the patch that led
    // here was stored; that store orders it.
    let original: Call =
        unsafe { std::mem::transmute(std::ptr::with_exposed_provenance::<()>(original)) };
    // SAFETY: the caller keeps the function's contract.
    unsafe { original(a, b, c, d, e, f) }
}

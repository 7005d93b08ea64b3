//! Hooks: code that runs in place of the driver's frees, on the thread that calls them.
//!
//! Nothing here allocates, locks or logs. Before a free of one allocation, a hook makes one call of
//! the driver, to query the range of the allocation.

#![allow(unsafe_code, reason = "the hooks, which have the signatures of driver functions")]

use std::{
    ffi::c_void,
    mem::MaybeUninit,
    ptr,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
};

use hmem_core::{
    Address, AddressRange, Wipeable,
    monitor::{InvalidationCause, InvalidationToken},
};
use hmem_hook::{
    HasTable, HookRegistry, SLOTS, SubscriberTable, Subscribers, TableReadGuard, clamped,
};

use super::own;
use crate::sys::{
    self, CuDevicePtr, CuPointerAttribute, CuResult,
    frees::{Args, Freed, Function},
};

/// State of the hooks, which every thread of the process shares.
#[repr(C)]
#[derive(Debug)]
pub(super) struct CudaHookState {
    pub(super) table: SubscriberTable,
    /// Number of probe calls that reached a hook (see [`probe`]).
    probes: AtomicU64,
}

// SAFETY: all-zero bytes are an empty table and a count of 0, and both are accessed by atomics
// alone.
unsafe impl Wipeable for CudaHookState {}

impl HasTable for CudaHookState {
    #[inline]
    fn table(&self) -> &SubscriberTable {
        &self.table
    }
}

/// Type by which hooks call functions of the driver: six registers are the arguments, and one is
/// the result.
type Call = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> usize;

type QueryFunction =
    unsafe extern "C" fn(u32, *mut CuPointerAttribute, *mut *mut c_void, CuDevicePtr) -> CuResult;

/// State and subscribers of the hooks.
pub(super) static REGISTRY: HookRegistry<CudaHookState> = HookRegistry::new();

/// For each [`Function`], the address of code that runs the original function: a copy of its first
/// instructions, and a jump to the rest.
static ORIGINALS: [AtomicUsize; Function::ALL.len()] =
    [const { AtomicUsize::new(0) }; Function::ALL.len()];

/// Address of `cuPointerGetAttributes` in the patched library. Hooks call the function to query the
/// freed range.
static QUERY_FUNCTION: AtomicUsize = AtomicUsize::new(0);

/// The address of this static is the argument of probe calls (see [`probe`]). The driver has no
/// memory at this address.
static PROBE: u8 = 0;

/// Returns the element of `function` in [`ORIGINALS`]. The plan of the patches writes the element
/// before the function is patched.
pub(super) fn original_of(function: Function) -> &'static AtomicUsize {
    &ORIGINALS[function as usize]
}

/// Sets the function that hooks call to query the freed range.
pub(super) fn set_query_function(query: QueryFunction) {
    QUERY_FUNCTION.store((query as *const ()).expose_provenance(), Ordering::Release);
}

macro_rules! hooks {
    ($($number:literal)+) => { [$(hook::<$number>),+] };
}

/// Hooks of all functions, in the order of [`Function::ALL`].
static HOOKS: [Call; Function::ALL.len()] =
    hooks!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23);

/// Returns the address of the hook to which the patched entry of `function` jumps.
pub(super) fn hook_of(function: Function) -> usize {
    (HOOKS[function as usize] as *const ()).expose_provenance()
}

/// Hook of one [`Function`], to which the patched entry of the function jumps.
///
/// # Safety
/// The arguments must be valid for the function with the number `FUNCTION` in [`Function::ALL`].
unsafe extern "C" fn hook<const FUNCTION: usize>(
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> usize {
    // SAFETY: the patched entry jumps here with the arguments of the function's caller.
    unsafe { hooked(const { Function::ALL[FUNCTION] }, [a, b, c, d, e, f]) }
}

/// Calls the patched function at `entry` as a probe: the hook counts the call, and does not call
/// the original function. Returns true if the call reached the hook.
///
/// # Safety
/// The patch of the entry must be in place.
pub(super) unsafe fn probe(subscribers: &Subscribers<CudaHookState>, entry: usize) -> bool {
    let probes = &subscribers.shared().probes;
    let before = probes.load(Ordering::SeqCst);
    // SAFETY: this is the entry of a function with at most six arguments in registers, and so is
    // its hook.
    let call: Call = unsafe { std::mem::transmute(ptr::with_exposed_provenance::<()>(entry)) };
    // SAFETY: the hook returns at once. If other code overwrites the patch at this moment, the
    // driver refuses the argument: the driver has no allocation at the address of a static.
    unsafe { call(ptr::addr_of!(PROBE).addr(), 0, 0, 0, 0, 0) };
    probes.load(Ordering::SeqCst) != before
}

/// Runs a call that reached a hook, and notifies the subscribers unless the call is a probe.
///
/// # Safety
/// The arguments must be valid for the function.
#[inline(always)]
unsafe fn hooked(function: Function, args: Args) -> usize {
    let Some(subscribers) = REGISTRY.subscribers() else {
        // SAFETY: the caller called the function with these arguments.
        return unsafe { original(function, args) };
    };
    if args[0] == ptr::addr_of!(PROBE).addr() {
        subscribers.shared().probes.fetch_add(1, Ordering::SeqCst);
        return 0;
    }
    let pass = subscribers.table().pass();
    // The guard is held during the call even without subscribers, so that a subscription that
    // begins meanwhile waits for the end of the call.
    if pass.is_empty() {
        // SAFETY: the caller called the function with these arguments.
        unsafe { original(function, args) }
    } else {
        // SAFETY: the caller called the function with these arguments.
        unsafe { notified(&pass, function, args) }
    }
}

/// Calls the original function, and notifies the subscribers before and after the call.
///
/// # Safety
/// The arguments must be valid for the function.
#[inline(never)]
unsafe fn notified(pass: &TableReadGuard<'_>, function: Function, args: Args) -> usize {
    let Some(range) = freed_by(function, &args) else {
        // SAFETY: the caller called the function with these arguments.
        return unsafe { original(function, args) };
    };
    let mut changes = [const { MaybeUninit::<InvalidationToken>::uninit() }; SLOTS];
    pass.each(|slot, invalidator| {
        _ = changes[slot].write(invalidator.invalidate_start(range, InvalidationCause::Free))
    });
    // SAFETY: the caller called the function with these arguments.
    let result = unsafe { original(function, args) };
    pass.each(|slot, invalidator| {
        // SAFETY: the guard returns the same slots each time, and the call of `invalidate_start`
        // above wrote this slot.
        invalidator.invalidate_end(unsafe { changes[slot].assume_init_read() });
    });
    result
}

/// Returns the range that a call is about to free. Returns the range of all addresses if the call
/// may free any memory or the driver does not know the allocation. Returns `None` if the call frees
/// nothing.
fn freed_by(function: Function, args: &Args) -> Option<AddressRange> {
    let everything = || clamped(0, u64::MAX);
    match function.freed(args) {
        Freed::Nothing => None,
        Freed::Allocation(pointer) => Some(allocation_at(pointer).unwrap_or_else(everything)),
        Freed::Range(start, len) => Some(clamped(start, len)),
        Freed::Anything => (!own::is_own()).then(everything),
    }
}

fn allocation_at(pointer: u64) -> Option<AddressRange> {
    let address = QUERY_FUNCTION.load(Ordering::Acquire);
    if address == 0 {
        return None;
    }
    // SAFETY: `set_query_function` stored the address of a function of this type.
    let query: QueryFunction =
        unsafe { std::mem::transmute(ptr::with_exposed_provenance::<()>(address)) };
    let mut attributes =
        [sys::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, sys::CU_POINTER_ATTRIBUTE_RANGE_SIZE];
    let mut values = [0u64; 2];
    let mut places = values.each_mut().map(|value| ptr::from_mut(value).cast::<c_void>());
    // SAFETY: both arrays have two elements, and each output has room for 8 bytes. The address is
    // only looked up, never dereferenced.
    let code = unsafe { query(2, attributes.as_mut_ptr(), places.as_mut_ptr(), pointer) };
    let range = clamped(values[0], values[1]);
    (code.is_success() && range.contains(Address(pointer))).then_some(range)
}

/// Calls the original function.
///
/// # Safety
/// The arguments must be valid for the function.
#[inline(always)]
unsafe fn original(function: Function, [a, b, c, d, e, f]: Args) -> usize {
    let original = ORIGINALS[function as usize].load(Ordering::Relaxed);
    // SAFETY: the patch plan stored the address of code for the original function before the entry
    // was patched, and only a patched entry leads here.
    let original: Call =
        unsafe { std::mem::transmute(ptr::with_exposed_provenance::<()>(original)) };
    // SAFETY: the caller called the function with these arguments.
    unsafe { original(a, b, c, d, e, f) }
}

//! What runs in place of the driver's frees.
//!
//! On whatever thread calls them: nothing here allocates, locks or logs. The driver is asked one
//! thing, before it frees: how far the allocation reaches.

use std::{
    ffi::c_void,
    mem::MaybeUninit,
    ptr,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
};

use hmem_core::{
    Address, AddressRange,
    monitor::{Cause, Change},
};
use hmem_hook::{HasTable, Pass, Place, SLOTS, Subscribers, Table, Wipeable, clamped};

use super::{
    function::{Args, Function},
    own,
};
use crate::sys::{self, CuDevicePtr, CuPointerAttribute, CuResult};

/// What hooks share with the rest of the process.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) table: Table,
    /// Calls of a test that arrived.
    probes: AtomicU64,
}

// SAFETY: zeroes are an empty table and no arrivals; both are shared by atomics alone.
unsafe impl Wipeable for Shared {}

impl HasTable for Shared {
    #[inline]
    fn table(&self) -> &Table {
        &self.table
    }
}

/// A function of the driver as the registers see it: whole registers in, whole register out.
type Call = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> usize;

type Ask =
    unsafe extern "C" fn(u32, *mut CuPointerAttribute, *mut *mut c_void, CuDevicePtr) -> CuResult;

/// Where hooks find whom they tell.
pub(super) static PLACE: Place<Shared> = Place::new();

/// Where each function goes on behind the replaced instruction, by [`Function`].
static ORIGINALS: [AtomicUsize; Function::ALL.len()] =
    [const { AtomicUsize::new(0) }; Function::ALL.len()];

/// `cuPointerGetAttributes` of the library that is patched.
static ASK: AtomicUsize = AtomicUsize::new(0);

/// Its address marks the calls of a test, as no memory of the driver's can lie there.
static PROBE: u8 = 0;

/// Where the hook of `function` finds how to go on: written before its entry is patched.
pub(super) fn original_of(function: Function) -> &'static AtomicUsize {
    &ORIGINALS[function as usize]
}

/// Makes hooks ask by this function.
pub(super) fn ask_by(ask: Ask) {
    ASK.store((ask as *const ()).expose_provenance(), Ordering::Release);
}

/// # Safety
/// As for the function of this number.
pub(super) unsafe extern "C" fn hook<const FUNCTION: usize>(
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> usize {
    // SAFETY: called in place of the function with its arguments.
    unsafe { hooked(const { Function::ALL[FUNCTION] }, [a, b, c, d, e, f]) }
}

/// Calls a patched entry so that its hook counts the call and keeps it to itself; whether it did.
///
/// # Safety
/// The patch of the entry is in place.
pub(super) unsafe fn probe(subscribers: &Subscribers<Shared>, entry: usize) -> bool {
    let probes = &subscribers.shared().probes;
    let before = probes.load(Ordering::SeqCst);
    // SAFETY: the entry of a function that takes at most six arguments in registers, as its hook
    // does.
    let call: Call = unsafe { std::mem::transmute(ptr::with_exposed_provenance::<()>(entry)) };
    // SAFETY: the hook returns at once. If somebody overwrote the patch this very moment, the
    // driver refuses the address of a static, which is none of its own.
    unsafe { call(ptr::addr_of!(PROBE).addr(), 0, 0, 0, 0, 0) };
    probes.load(Ordering::SeqCst) != before
}

/// # Safety
/// As for the function with these arguments.
#[inline(always)]
unsafe fn hooked(function: Function, args: Args) -> usize {
    let Some(subscribers) = PLACE.subscribers() else {
        // SAFETY: as the caller's.
        return unsafe { original(function, args) };
    };
    if args[0] == ptr::addr_of!(PROBE).addr() {
        subscribers.shared().probes.fetch_add(1, Ordering::SeqCst);
        return 0;
    }
    let pass = subscribers.table().pass();
    // The pass lasts over the call even with nobody to tell: who subscribes meanwhile waits for it.
    if pass.is_empty() {
        // SAFETY: as the caller's.
        unsafe { original(function, args) }
    } else {
        // SAFETY: as the caller's.
        unsafe { told(&pass, function, args) }
    }
}

/// # Safety
/// As for the function with these arguments.
#[inline(never)]
unsafe fn told(pass: &Pass<'_>, function: Function, args: Args) -> usize {
    let Some(range) = taken(function, &args) else {
        // SAFETY: as the caller's.
        return unsafe { original(function, args) };
    };
    let mut changes = [const { MaybeUninit::<Change>::uninit() }; SLOTS];
    pass.each(|slot, invalidator| _ = changes[slot].write(invalidator.begin(range, Cause::Free)));
    // SAFETY: as the caller's.
    let result = unsafe { original(function, args) };
    pass.each(|slot, invalidator| {
        // SAFETY: this pass has the same slots each time, and `begin` wrote this one.
        invalidator.end(unsafe { changes[slot].assume_init_read() });
    });
    result
}

/// What a call is about to take away: everything, where the driver does not say how far the
/// allocation reaches; `None` for nothing.
fn taken(function: Function, args: &Args) -> Option<AddressRange> {
    let everything = || clamped(0, u64::MAX);
    match function.pointer(args) {
        Some(0) => None,
        Some(pointer) => Some(allocation_at(pointer).unwrap_or_else(everything)),
        None => (!own::is_own()).then(everything),
    }
}

fn allocation_at(pointer: u64) -> Option<AddressRange> {
    let ask = ASK.load(Ordering::Acquire);
    if ask == 0 {
        return None;
    }
    // SAFETY: stored by `ask_by` from a function of this type.
    let ask: Ask = unsafe { std::mem::transmute(ptr::with_exposed_provenance::<()>(ask)) };
    let mut attributes =
        [sys::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, sys::CU_POINTER_ATTRIBUTE_RANGE_SIZE];
    let mut values = [0u64; 2];
    let mut places = values.each_mut().map(|value| ptr::from_mut(value).cast::<c_void>());
    // SAFETY: two attributes, each with a place of 8 bytes; the address is looked up, not followed.
    let code = unsafe { ask(2, attributes.as_mut_ptr(), places.as_mut_ptr(), pointer) };
    let range = clamped(values[0], values[1]);
    (code.is_success() && range.contains(Address(pointer))).then_some(range)
}

/// # Safety
/// As for the function with these arguments.
#[inline(always)]
unsafe fn original(function: Function, [a, b, c, d, e, f]: Args) -> usize {
    let original = ORIGINALS[function as usize].load(Ordering::Relaxed);
    // SAFETY: the plan of the patches, by which an entry led here, has written the way past what it
    // replaced; the store of the patch orders it.
    let original: Call =
        unsafe { std::mem::transmute(ptr::with_exposed_provenance::<()>(original)) };
    // SAFETY: as the caller's.
    unsafe { original(a, b, c, d, e, f) }
}

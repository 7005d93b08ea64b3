//! A CUDA driver for tests: the symbols of `libcuda.so.1` over memory files.
//!
//! Tests call it like the real driver, through a function table. The table comes from
//! [`FakeDriver::symbol`] in the same process, or from the library `libhmem_fake_cuda.so`, loaded
//! in place of `libcuda.so.1`.
//!
//! - The CPU faults on device memory.
//! - A freed address is reused at once, and so is the handle of freed physical memory. An identity
//!   is never reused.
//! - A dma-buf begins where the exported range does, and holds the bytes of the device. It is a
//!   genuine one where `/dev/udmabuf` can be opened, and a memory file otherwise.
//! - Every call can be made to fail.
//!
//! It does not use the memory of hmem's simulated device. That device exports a file and an offset
//! in it, and `cuMemGetHandleForAddressRange` cannot return an offset.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/repository/layers` checks it):
//!
//! - `gdrapi`, `profile`
//! - `state`
//! - `answers`, `ipc`
//! - `entry`
//!
//! # Answers
//!
//! The answers follow `cuda.h` and recorded runs of the real library. A comment "Unspecified, so
//! the fake decides" marks an answer that neither of them gives.
//!
//! On x86-64 each function begins with the same instructions as in the real library, so that hooks
//! patch both alike.
//!
//! # Limits
//!
//! Memory files cannot show two live dma-bufs that overlap with different page bounds, as those of
//! small allocations in one page do. The second export is refused with 801, where a real driver
//! succeeds.
//!
//! # Environment
//!
//! `HMEM_FAKE_CUDA` configures the library: the name of a profile, followed by `;symbol=code` for
//! calls that always fail, `;devices=n`, and `;attributes=n` for the last known device attribute.

#![allow(missing_docs)] // The functions of the driver are documented by cuda.h.

mod answers;
mod entry;
mod gdrapi;
mod ipc;
mod profile;
mod state;

#[cfg(target_arch = "x86_64")]
use std::sync::atomic::AtomicU32;

use hmem_iface_cuda::sys::{CuContext, CuResult};
use parking_lot::Condvar;

pub use entry::*;
pub use profile::Profile;
pub use state::Live;
use state::{CAPTURE_MODE, Fault, IN_CALLBACK, State};

/// Notifies waiting threads when a call is blocked and when blocked calls may continue.
static HELD: Condvar = Condvar::new();
/// State word of x86-64, which every function checks first, as in the real library. In the real
/// library, a special value means that the driver is torn down. The fake driver never sets it.
#[cfg(target_arch = "x86_64")]
static TORN_DOWN: AtomicU32 = AtomicU32::new(0);

/// Runs a call of the function `symbol`: counts it, waits while a test blocks the function, returns
/// an injected fault, and otherwise runs `run`.
fn enter(symbol: &'static str, run: impl FnOnce(&mut State) -> Result<(), CuResult>) -> CuResult {
    let mut state = STATE.lock();
    if let Some(hold) = hold_of(&mut state, symbol) {
        hold.held += 1;
        HELD.notify_all();
        HELD.wait_while(&mut state, |state| hold_of(state, symbol).is_some());
    }
    let state = state.get_or_insert_with(from_environment);
    let needs_start =
        !matches!(symbol, "cuInit" | "cuDriverGetVersion" | "cuMemGetHandleForAddressRange");
    let result = state.call(symbol).and_then(|()| {
        // A recorded run of the real library shows: before a successful `cuInit`, calls return 3.
        if needs_start && !state.started {
            Err(CuResult::CUDA_ERROR_NOT_INITIALIZED)
        } else {
            run(state)
        }
    });
    result.err().unwrap_or(CuResult::CUDA_SUCCESS)
}

/// Returns the record of a function's blocked calls; `None` if no test blocks the function.
fn hold_of<'a>(state: &'a mut Option<State>, symbol: &str) -> Option<&'a mut state::Hold> {
    state.as_mut()?.hold.as_mut().filter(|hold| hold.symbol == symbol)
}

/// Returns the number of calls of a function since the driver started. An empty name counts all
/// functions, an unknown name none. Tests that load this library use it instead of [`FakeDriver`].
///
/// # Safety
/// `symbol` must point to a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_fake_cuda_calls(symbol: *const std::ffi::c_char) -> u64 {
    // SAFETY: the caller passes a C string.
    let symbol = unsafe { std::ffi::CStr::from_ptr(symbol) }.to_string_lossy();
    let state = STATE.lock();
    match (&*state, entry::known(&symbol)) {
        (Some(state), Some(symbol)) => state.calls.of(symbol),
        (Some(state), None) if symbol.is_empty() => state.calls.total(),
        _ => 0,
    }
}

/// Returns a pointer through which the CPU accesses a device address, like a mapping of the
/// device's BAR.
///
/// # Panics
/// Panics without a driver, or if the address is not a device address.
#[must_use]
pub fn reach(address: u64) -> *mut u8 {
    let state = STATE.lock();
    let pages = &state.as_ref().expect("started").pages;
    assert!(pages.holds(address), "an address of a device");
    pages.at(address)
}

hmem_fake_common::fake_driver! {
    /// The fake driver of this process, owned by one test. Other tests wait in
    /// [`FakeDriver::start`] until this handle is dropped.
    FakeDriver, fails with CuResult, set by "HMEM_FAKE_CUDA"
}

impl FakeDriver {
    /// Makes the next call of a function fail, as [`FakeDriver::fail_nth`] does.
    ///
    /// # Panics
    /// Panics if the driver has no such function.
    pub fn fail(&self, symbol: &str, code: CuResult) {
        self.fail_nth(symbol, 1, code);
    }

    /// Simulates the loss of the device: every later call returns `code`.
    pub fn lose_device(&self, code: CuResult) {
        self.with(|state| state.sticky = Some(code));
    }

    /// Simulates the loss of the device in the `nth` next call of a function (1 is the next call).
    /// That call and all later calls of any function return `code`.
    ///
    /// # Panics
    /// Panics if the driver has no such function.
    pub fn lose_device_at(&self, symbol: &str, nth: u64, code: CuResult) {
        self.with(|state| state.calls.fail_nth(known(symbol), nth, Fault { code, loses: true }));
    }

    /// Makes queries report the allocation at `base` as memory that the driver does not know.
    /// Replaces an earlier `base`.
    ///
    /// # Panics
    /// Panics if no allocation begins at `base`.
    pub fn forget(&self, base: u64) {
        self.forget_after(base, 0);
    }

    /// Like [`FakeDriver::forget`], but takes effect after `queries` queries for any address.
    ///
    /// # Panics
    /// Panics if no allocation begins at `base`.
    pub fn forget_after(&self, base: u64, queries: u64) {
        self.with(|state| {
            assert!(state.allocations.contains_key(&base), "an allocation");
            state.forgotten = Some((base, queries));
        });
    }

    /// Blocks every call of a function before it has any effect, until the returned guard is
    /// dropped. Tests use the guard to make calls overlap. Only one function can be blocked at a
    /// time.
    ///
    /// # Panics
    /// Panics if the driver has no such function.
    #[must_use]
    pub fn hold(&self, symbol: &str) -> Held<'_> {
        self.with(|state| state.hold = Some(state::Hold { symbol: known(symbol), held: 0 }));
        Held { _driver: self }
    }

    /// Returns the number of calls of all functions.
    #[must_use]
    pub fn all_calls(&self) -> u64 {
        self.with(|state| state.calls.total())
    }

    /// Returns the number of open files that back the driver's memory.
    #[must_use]
    pub fn files(&self) -> usize {
        self.with(|state| state.files())
    }

    /// Returns true if SYNC_MEMOPS is set on the allocation around an address.
    #[must_use]
    pub fn sync_memops(&self, address: u64) -> bool {
        self.with(|state| {
            state.around(address).is_some_and(|(_, allocation)| allocation.sync_memops)
        })
    }

    /// Returns the flags of a device's primary context.
    #[must_use]
    pub fn context_flags(&self, device: u32) -> u32 {
        self.with(|state| {
            let of_device = |one: &&state::Context| one.primary && one.device == device;
            state.contexts.values().find(of_device).map_or(0, |one| one.flags)
        })
    }

    /// Returns the flags of a context, and 0 for an unknown one.
    #[must_use]
    pub fn flags_of(&self, context: CuContext) -> u32 {
        self.with(|state| state.contexts.get(&context.0).map_or(0, |one| one.flags))
    }

    /// Returns the contexts in which inbound writes were flushed, in order, and clears the list.
    #[must_use]
    pub fn flushed(&self) -> Vec<CuContext> {
        self.with(|state| std::mem::take(&mut state.flushed).into_iter().map(CuContext).collect())
    }

    /// Returns the number of calls that `cuda.h` leaves undefined: attempts to make an unknown
    /// context current, and releases of a handle that is not valid.
    #[must_use]
    pub fn undefined_calls(&self) -> u64 {
        self.with(|state| state.undefined_calls)
    }

    /// Returns the number of queries that look up an allocation: calls of `cuPointerGetAttributes`
    /// for more than two attributes.
    #[must_use]
    pub fn lookups(&self) -> u64 {
        self.with(|state| state.lookups)
    }

    /// Begins a stream capture of another thread in the mode GLOBAL.
    pub fn begin_capture(&self) {
        self.with(|state| state.capture = Some(true));
    }

    /// Ends the capture that [`FakeDriver::begin_capture`] began. Returns true if no call
    /// invalidated the capture.
    #[must_use]
    pub fn end_capture(&self) -> bool {
        self.with(|state| state.capture.take()).unwrap_or(false)
    }

    /// Runs `run` in a callback of a stream: the driver refuses every call of this thread.
    pub fn in_callback<T>(&self, run: impl FnOnce() -> T) -> T {
        IN_CALLBACK.set(true);
        let result = run();
        IN_CALLBACK.set(false);
        result
    }

    /// Returns the calling thread's capture mode.
    #[must_use]
    pub fn capture_mode_of_this_thread(&self) -> u32 {
        CAPTURE_MODE.get()
    }

    /// Returns the calling thread's stack of contexts. The current context is the last one.
    #[must_use]
    pub fn contexts_of_this_thread(&self) -> Vec<usize> {
        self.with(|state| state.stack(|stack| stack.clone()))
    }
}

/// Guard that blocks the calls of a function. They continue when the guard is dropped.
#[derive(Debug)]
pub struct Held<'a> {
    _driver: &'a FakeDriver,
}

impl Held<'_> {
    /// Waits until at least `calls` calls of the function are blocked.
    ///
    /// # Panics
    /// Panics after half a minute.
    pub fn wait_for(&self, calls: usize) {
        let few = |state: &mut Option<State>| {
            state
                .as_ref()
                .and_then(|state| state.hold.as_ref())
                .is_some_and(|hold| hold.held < calls)
        };
        let mut state = STATE.lock();
        let waited = HELD.wait_while_for(&mut state, few, std::time::Duration::from_secs(30));
        assert!(!waited.timed_out(), "{calls} calls are not made at once");
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if let Some(state) = &mut *STATE.lock() {
            state.hold = None;
        }
        HELD.notify_all();
    }
}

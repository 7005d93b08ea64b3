//! A CUDA driver for tests: the symbols of `libcuda.so.1` over memory files.
//!
//! It is entered like the real one, through its function table: within a test's process by
//! [`FakeDriver::symbol`], or as a library (`libhmem_fake_cuda.so`) that is loaded where
//! `libcuda.so.1` would be. Device memory faults under the CPU; its addresses come back as soon as
//! they are freed, its identities never; its dma-bufs are memory files that begin
//! where the exported range does, so that bytes that a NIC moves are bytes of the device. Every
//! call can be made to fail.
//!
//! Its memory is not the simulated device's: that exports a file and an offset in it, which
//! `cuMemGetHandleForAddressRange` has no way to say.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/layers` checks it):
//!
//! - `gdrapi`, `profile`
//! - `state`
//! - `answers`, `ipc`
//! - `entry`
//!
//! # What it cannot show
//!
//! Two dma-bufs that overlap with different page bounds, alive at once: the second export is
//! refused (801), which a real driver does not do; small allocations that share a page are the
//! case. What no header and no recorded run says is marked in the source as decided here.
//!
//! On x86-64 its functions begin with the very instructions that those of the real library begin
//! with, so that they can be hooked as those can.
//!
//! As a library it is told by the environment what to be: `HMEM_FAKE_CUDA` is the name of a
//! profile, followed by `;symbol=code` for calls that fail always, `;devices=n` and `;attributes=n`
//! for the last device attribute that it knows.

#![allow(missing_docs)] // The functions of the driver are documented by cuda.h.

mod answers;
mod entry;
mod gdrapi;
mod ipc;
mod profile;
mod state;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use hmem_iface_cuda::sys::{CuContext, CuResult};
use parking_lot::{Condvar, Mutex, MutexGuard};

pub use entry::*;
pub use profile::Profile;
pub use state::Live;
use state::State;

/// The driver of this process: there is one, as there is of the real one.
static STATE: Mutex<Option<State>> = Mutex::new(None);
/// Told whenever a call comes to be held, and when held calls may go on.
static HELD: Condvar = Condvar::new();
/// Who has it, one test at a time.
static TURN: Mutex<()> = Mutex::new(());
static GENERATION: AtomicU64 = AtomicU64::new(1);
/// The word that every entry compares, as the real library's do: it holds their mark once the
/// driver is torn down, which this one never is.
static TORN_DOWN: AtomicU32 = AtomicU32::new(0);

fn fresh(profile: Profile) -> State {
    State::new(GENERATION.fetch_add(1, Ordering::Relaxed), profile)
}

/// Runs a call of the driver.
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
        // Recorded run: before `cuInit` succeeded calls answer 3.
        if needs_start && !state.started {
            Err(CuResult::CUDA_ERROR_NOT_INITIALIZED)
        } else {
            run(state)
        }
    });
    result.err().unwrap_or(CuResult::CUDA_SUCCESS)
}

/// The hold on a function, if there is one.
fn hold_of<'a>(state: &'a mut Option<State>, symbol: &str) -> Option<&'a mut state::Hold> {
    state.as_mut()?.hold.as_mut().filter(|hold| hold.symbol == symbol)
}

/// What `HMEM_FAKE_CUDA` asks for; the default profile without it.
fn from_environment() -> State {
    let text = std::env::var("HMEM_FAKE_CUDA").unwrap_or_default();
    let mut words = text.split(';').map(str::trim);
    let name = words.next().unwrap_or_default();
    let mut profile = if name.is_empty() {
        Profile::default()
    } else {
        Profile::named(name).unwrap_or_else(|| panic!("HMEM_FAKE_CUDA: no profile {name}"))
    };
    let mut faults = Vec::new();
    for word in words {
        match word.split_once('=') {
            Some(("devices", count)) => {
                profile.devices = count.parse().expect("HMEM_FAKE_CUDA: devices=n")
            }
            Some(("attributes", last)) => {
                profile.last_device_attribute = last.parse().expect("HMEM_FAKE_CUDA: attributes=n");
            }
            Some((symbol, code)) => {
                let code = code.parse().expect("HMEM_FAKE_CUDA: symbol=code");
                faults.push((known(symbol), CuResult(code)));
            }
            None => panic!("HMEM_FAKE_CUDA: {word}"),
        }
    }
    let mut state = fresh(profile);
    for (symbol, code) in faults {
        state.fail_always(symbol, code);
    }
    state
}

fn known(symbol: &str) -> &'static str {
    entry::known(symbol).unwrap_or_else(|| panic!("the driver has no {symbol}"))
}

/// How often a function was called since the driver started: for tests that load this library and
/// so cannot ask a [`FakeDriver`]. Of all functions for an empty name, 0 for a name that is none.
///
/// # Safety
/// `symbol` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hmem_fake_cuda_calls(symbol: *const std::ffi::c_char) -> u64 {
    // SAFETY: as the caller's.
    let symbol = unsafe { std::ffi::CStr::from_ptr(symbol) }.to_string_lossy();
    let state = STATE.lock();
    match (&*state, entry::known(&symbol)) {
        (Some(state), Some(symbol)) => state.calls.of(symbol),
        (Some(state), None) if symbol.is_empty() => state.calls.total(),
        _ => 0,
    }
}

/// Where the CPU reaches the bytes of a device address, as a mapping of the device's BAR does.
///
/// # Panics
/// Without a driver, or for an address that is not a device's.
#[must_use]
pub fn reach(address: u64) -> *mut u8 {
    let state = STATE.lock();
    let pages = &state.as_ref().expect("started").pages;
    assert!(pages.holds(address), "an address of a device");
    pages.at(address)
}

/// The driver, for one test at a time: others wait until it is dropped.
#[derive(Debug)]
pub struct FakeDriver {
    _turn: MutexGuard<'static, ()>,
}

impl FakeDriver {
    /// A driver of a profile, not initialised yet.
    ///
    /// Whoever uses its functions must be gone when this is dropped.
    #[must_use]
    pub fn start(profile: Profile) -> Self {
        let turn = TURN.lock();
        *STATE.lock() = Some(fresh(profile));
        Self { _turn: turn }
    }

    fn with<T>(&self, run: impl FnOnce(&mut State) -> T) -> T {
        run(STATE.lock().as_mut().expect("started"))
    }

    /// The address of a function, unless the profile lacks it.
    #[must_use]
    pub fn symbol(&self, name: &str) -> Option<*const ()> {
        let absent = self.with(|state| state.profile.absent.contains(&name));
        if absent { None } else { entry::symbol(name) }
    }

    /// Changes what the driver is like from now on.
    pub fn change(&self, change: impl FnOnce(&mut Profile)) {
        self.with(|state| change(&mut state.profile));
    }

    /// Makes the `nth` call of a function from now on fail, 1 being the next.
    pub fn fail_nth(&self, symbol: &str, nth: u64, code: CuResult) {
        self.with(|state| state.fail_nth(known(symbol), nth, code));
    }

    /// Makes the next call of a function fail.
    pub fn fail(&self, symbol: &str, code: CuResult) {
        self.fail_nth(symbol, 1, code);
    }

    /// Makes every call of a function fail.
    pub fn fail_always(&self, symbol: &str, code: CuResult) {
        self.with(|state| state.fail_always(known(symbol), code));
    }

    /// Loses the device: every call answers `code` from now on.
    pub fn lose_device(&self, code: CuResult) {
        self.with(|state| state.sticky = Some(code));
    }

    /// Loses the device in the `nth` call of a function from now on: it and every call after it
    /// answer `code`.
    pub fn lose_device_at(&self, symbol: &str, nth: u64, code: CuResult) {
        self.with(|state| state.lose_nth(known(symbol), nth, code));
    }

    /// Has queries say of an allocation what they say of memory that is not the driver's.
    pub fn forget(&self, base: u64) {
        self.forget_after(base, 0);
    }

    /// The same after so many queries of whatever address.
    ///
    /// # Panics
    /// If no allocation begins at `base`.
    pub fn forget_after(&self, base: u64, queries: u64) {
        self.with(|state| {
            assert!(state.allocations.contains_key(&base), "an allocation");
            state.forgotten = Some((base, queries));
        });
    }

    /// Forgets all faults, a lost device included, and knows again what it was told to
    /// [`FakeDriver::forget`].
    pub fn heal(&self) {
        self.with(State::clear_faults);
    }

    /// Holds every call of a function before it does anything, until the answer is dropped: calls
    /// that a test wants at once are.
    #[must_use]
    pub fn hold(&self, symbol: &str) -> Held<'_> {
        self.with(|state| state.hold = Some(state::Hold { symbol: known(symbol), held: 0 }));
        Held { _driver: self }
    }

    /// How often a function was called, failed calls included.
    #[must_use]
    pub fn calls(&self, symbol: &str) -> u64 {
        let symbol = known(symbol);
        self.with(|state| state.calls.of(symbol))
    }

    /// How often any function was called.
    #[must_use]
    pub fn all_calls(&self) -> u64 {
        self.with(|state| state.calls.total())
    }

    /// Returns the numbers of objects that are alive.
    #[must_use]
    pub fn live(&self) -> Live {
        self.with(|state| state.live())
    }

    /// How many files the driver has open for itself, behind the memory that it has or had.
    #[must_use]
    pub fn files(&self) -> usize {
        self.with(|state| state.files())
    }

    /// Whether SYNC_MEMOPS is set on the allocation around an address.
    #[must_use]
    pub fn sync_memops(&self, address: u64) -> bool {
        self.with(|state| {
            state.around(address).is_some_and(|(_, allocation)| allocation.sync_memops)
        })
    }

    /// The flags of a device's primary context.
    #[must_use]
    pub fn context_flags(&self, device: u32) -> u32 {
        self.with(|state| {
            let of_device = |one: &&state::Context| one.primary && one.device == device;
            state.contexts.values().find(of_device).map_or(0, |one| one.flags)
        })
    }

    /// The flags of a context; 0 of one that is not there.
    #[must_use]
    pub fn flags_of(&self, context: CuContext) -> u32 {
        self.with(|state| state.contexts.get(&context.0).map_or(0, |one| one.flags))
    }

    /// The contexts in which inbound writes were flushed since this was asked last, in order.
    #[must_use]
    pub fn flushed(&self) -> Vec<CuContext> {
        self.with(|state| std::mem::take(&mut state.flushed).into_iter().map(CuContext).collect())
    }

    /// How often a context that is not there was to be made current: what a real driver does then
    /// nobody promises.
    #[must_use]
    pub fn strangers(&self) -> u64 {
        self.with(|state| state.strangers)
    }

    /// The calling thread's contexts, the current one last.
    #[must_use]
    pub fn contexts_of_this_thread(&self) -> Vec<usize> {
        self.with(|state| state.stack(|stack| stack.clone()))
    }
}

impl Drop for FakeDriver {
    fn drop(&mut self) {
        *STATE.lock() = None;
    }
}

/// Starts the driver anew as one of a profile, and returns the lookup of its functions. It is for a
/// process in which one test runs at a time, on any thread: without a [`FakeDriver`] nothing keeps
/// others from using the driver.
pub fn restart(profile: Profile) -> impl Fn(&str) -> Option<*const ()> {
    let absent = profile.absent.clone();
    *STATE.lock() = Some(fresh(profile));
    move |name| if absent.contains(&name) { None } else { entry::symbol(name) }
}

/// Calls that are held. They go on when it is dropped.
#[derive(Debug)]
pub struct Held<'a> {
    _driver: &'a FakeDriver,
}

impl Held<'_> {
    /// Waits until so many calls are held.
    ///
    /// # Panics
    /// If they have not come after half a minute.
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

//! An HSA runtime for tests: the symbols of `libhsa-runtime64.so.1` over memory files.
//!
//! It shows what AMD's own runtime cannot show on its model GPU (`tests/rocr`): exports, memory of
//! other processes, page-locking, reserved addresses, faults, and runtimes that lack functions. It
//! is entered like the real one, through its function table: within a test's process by
//! [`FakeRuntime::symbol`], or as a library (`libhmem_fake_rocr.so`).
//!
//! Device memory faults under the CPU. Its addresses come back as soon as they are freed. Each
//! allocation is a memory file, which is its dma-buf. Where AMD's headers call something undefined,
//! the call is refused and counted ([`FakeRuntime::violations`]).
//!
//! As a library it has every function, and is told by the environment what to be: `HMEM_FAKE_ROCR` is
//! the name of a profile, followed by `;symbol=code` for calls that fail always.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/layers` checks it):
//!
//! - `state`
//! - `entry`

#![allow(missing_docs)] // The functions of the runtime are documented by AMD's headers.

mod entry;
mod state;

use std::ffi::c_void;

use hmem_iface_rocr::sys::HsaStatus;
use parking_lot::{Mutex, MutexGuard};

pub use entry::*;
use state::State;
pub use state::{Live, Profile};

/// The runtime of this process: there is one, as there is of the real one.
static STATE: Mutex<Option<State>> = Mutex::new(None);
/// Who has it, one test at a time.
static TURN: Mutex<()> = Mutex::new(());

/// Runs a call of the runtime.
fn enter<T>(
    symbol: &'static str,
    run: impl FnOnce(&mut State) -> Result<T, HsaStatus>,
) -> Result<T, HsaStatus> {
    let mut state = STATE.lock();
    let state = state.get_or_insert_with(from_environment);
    state.calls.enter(symbol).map_or(Ok(()), Err)?;
    if state.counts == 0 && !matches!(symbol, "hsa_init") {
        return Err(HsaStatus::HSA_STATUS_ERROR_NOT_INITIALIZED);
    }
    run(state)
}

/// What `HMEM_FAKE_ROCR` asks for; the newest release without it.
fn from_environment() -> State {
    let text = std::env::var("HMEM_FAKE_ROCR").unwrap_or_default();
    let mut words = text.split(';').map(str::trim);
    let name = words.next().unwrap_or_default();
    let profile = Profile::named(if name.is_empty() { "7.2" } else { name });
    let mut state = State::new(profile.unwrap_or_else(|| panic!("HMEM_FAKE_ROCR: {text}")));
    for word in words {
        let fault = word.split_once('=').and_then(|(symbol, code)| {
            Some((entry::known(symbol)?, HsaStatus(code.parse().ok()?)))
        });
        let (symbol, code) = fault.unwrap_or_else(|| panic!("HMEM_FAKE_ROCR: {word}"));
        state.calls.fail_always(symbol, code);
    }
    state
}

fn known(symbol: &str) -> &'static str {
    entry::known(symbol).unwrap_or_else(|| panic!("the runtime has no {symbol}"))
}

/// The runtime, for one test at a time: others wait until it is dropped.
#[derive(Debug)]
pub struct FakeRuntime {
    _turn: MutexGuard<'static, ()>,
}

impl FakeRuntime {
    /// Starts a runtime of a profile. Whoever uses its functions must be gone when it is dropped.
    #[must_use]
    pub fn start(profile: Profile) -> Self {
        let turn = TURN.lock();
        *STATE.lock() = Some(State::new(profile));
        Self { _turn: turn }
    }

    fn with<T>(&self, run: impl FnOnce(&mut State) -> T) -> T {
        run(STATE.lock().as_mut().expect("started"))
    }

    /// Returns the address of a function, unless the profile lacks it.
    #[must_use]
    pub fn symbol(&self, name: &str) -> Option<*const ()> {
        let absent = self.with(|state| state.profile.absent.contains(&name));
        if absent { None } else { entry::symbol(name) }
    }

    /// Changes the runtime from now on.
    pub fn change(&self, change: impl FnOnce(&mut Profile)) {
        self.with(|state| change(&mut state.profile));
    }

    /// Makes the `nth` call of a function from now on fail, 1 being the next.
    pub fn fail_nth(&self, symbol: &str, nth: u64, code: HsaStatus) {
        self.with(|state| state.calls.fail_nth(known(symbol), nth, code));
    }

    /// Makes every call of a function fail.
    pub fn fail_always(&self, symbol: &str, code: HsaStatus) {
        self.with(|state| state.calls.fail_always(known(symbol), code));
    }

    /// Forgets all faults.
    pub fn heal(&self) {
        self.with(|state| state.calls.heal());
    }

    /// Returns how often a function was called, failed calls included.
    #[must_use]
    pub fn calls(&self, symbol: &str) -> u64 {
        let symbol = known(symbol);
        self.with(|state| state.calls.of(symbol))
    }

    /// Returns the number of live objects.
    #[must_use]
    pub fn live(&self) -> Live {
        self.with(|state| state.live())
    }

    /// Returns what was last written to the register of a device that flushes inbound writes.
    #[must_use]
    pub fn flush_register(&self, device: u32) -> u32 {
        // SAFETY: the register lives as long as the runtime, and is aligned.
        self.with(|state| unsafe { (&raw const state.registers[device as usize]).read_volatile() })
    }

    /// Returns the calls that AMD's headers leave undefined.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        self.with(|state| state.violations.clone())
    }

    /// Allocates device memory as an application does that is not this iface.
    #[must_use]
    pub fn allocate(&self, device: u32, len: usize) -> u64 {
        self.with(|state| state.allocate(state::gpu(device), len, false)).expect("allocate")
    }

    /// Frees memory as an application does.
    pub fn free(&self, address: u64) {
        // SAFETY: an address of `allocate`.
        let code = unsafe { hsa_amd_memory_pool_free(address as *mut c_void) };
        assert_eq!(code, HsaStatus::HSA_STATUS_SUCCESS);
    }
}

impl Drop for FakeRuntime {
    fn drop(&mut self) {
        *STATE.lock() = None;
    }
}

/// Starts the runtime anew as one of a profile, and returns the lookup of its functions. It is for a
/// process in which one test runs at a time: without a [`FakeRuntime`] nothing keeps others from
/// using the runtime.
pub fn restart(profile: Profile) -> impl Fn(&str) -> Option<*const ()> {
    let absent = profile.absent.clone();
    *STATE.lock() = Some(State::new(profile));
    move |name| if absent.contains(&name) { None } else { entry::symbol(name) }
}

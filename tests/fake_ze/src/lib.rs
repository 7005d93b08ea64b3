//! A Level Zero driver for tests: the symbols of `libze_loader.so.1` over memory files.
//!
//! It shows what Intel's driver on its simulated GPU cannot: exports, imports, faults at every
//! call, and older releases. It is entered through its function table: within a test's process by
//! [`FakeDriver::symbol`], or as a library (`libhmem_fake_ze.so`) that is loaded where
//! `libze_loader.so.1` would be. Device memory faults under the CPU. Addresses come back as soon as
//! they are freed, numbers of allocations never.
//!
//! A call that the specification leaves undefined is counted ([`Live::undefined`]): a null pointer
//! to properties, a free of memory that is not there, a copy of memory that the device cannot
//! access.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/layers` checks it):
//!
//! - `profile`
//! - `state`
//! - `entry`
//!
//! As a library it is told by the environment what to be: `HMEM_FAKE_ZE` is the name of a profile,
//! followed by `;symbol=code` for calls that fail always and `;devices=n`.

#![allow(missing_docs)] // The functions of the driver are documented by ze_api.h.

mod entry;
mod profile;
mod state;

use hmem_iface_ze::sys::ZeResult;
use parking_lot::{Mutex, MutexGuard};

pub use entry::*;
pub use profile::Profile;
pub use state::Live;
use state::State;

/// The driver of this process: there is one, as there is of the real one.
static STATE: Mutex<Option<State>> = Mutex::new(None);
/// Held by the test that has it.
static TURN: Mutex<()> = Mutex::new(());

/// Runs a call of the driver.
fn enter(symbol: &'static str, run: impl FnOnce(&mut State) -> Result<(), ZeResult>) -> ZeResult {
    let mut state = STATE.lock();
    let state = state.get_or_insert_with(from_environment);
    let result = state.call(symbol).and_then(|()| {
        if symbol != "zeInit" && !state.started {
            return Err(ZeResult::ZE_RESULT_ERROR_UNINITIALIZED);
        }
        run(state)
    });
    result.err().unwrap_or(ZeResult::ZE_RESULT_SUCCESS)
}

/// What `HMEM_FAKE_ZE` asks for; the default profile without it.
fn from_environment() -> State {
    let text = std::env::var("HMEM_FAKE_ZE").unwrap_or_default();
    let mut words = text.split(';').map(str::trim);
    let name = words.next().unwrap_or_default();
    let mut profile = match name {
        "" => Profile::default(),
        _ => Profile::named(name).unwrap_or_else(|| panic!("HMEM_FAKE_ZE: no profile {name}")),
    };
    let mut faults = Vec::new();
    for word in words {
        match word.split_once('=') {
            Some(("devices", count)) => {
                profile.devices = count.parse().expect("HMEM_FAKE_ZE: devices=n");
            }
            Some((symbol, code)) => {
                faults.push((known(symbol), ZeResult(code.parse().expect("symbol=code"))));
            }
            None => panic!("HMEM_FAKE_ZE: {word}"),
        }
    }
    let mut state = State::new(profile);
    for (symbol, code) in faults {
        state.calls.fail_always(symbol, code);
    }
    state
}

fn known(symbol: &str) -> &'static str {
    entry::known(symbol).unwrap_or_else(|| panic!("the driver has no {symbol}"))
}

/// The driver, for one test at a time: others wait until it is dropped.
#[derive(Debug)]
pub struct FakeDriver {
    _turn: MutexGuard<'static, ()>,
}

impl FakeDriver {
    /// Starts a driver of a profile. Its users must be gone when this is dropped.
    #[must_use]
    pub fn start(profile: Profile) -> Self {
        let turn = TURN.lock();
        *STATE.lock() = Some(State::new(profile));
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
    pub fn fail_nth(&self, symbol: &str, nth: u64, code: ZeResult) {
        self.with(|state| state.calls.fail_nth(known(symbol), nth, code));
    }

    /// Makes every call of a function fail.
    pub fn fail_always(&self, symbol: &str, code: ZeResult) {
        self.with(|state| state.calls.fail_always(known(symbol), code));
    }

    /// Forgets all faults, a lost device included.
    pub fn heal(&self) {
        self.with(|state| {
            state.calls.heal();
            state.lost = false;
        });
    }

    /// How often a function was called, failed calls included.
    #[must_use]
    pub fn calls(&self, symbol: &str) -> u64 {
        let symbol = known(symbol);
        self.with(|state| state.calls.of(symbol))
    }

    /// Returns the numbers of objects that are alive.
    #[must_use]
    pub fn live(&self) -> Live {
        self.with(|state| state.live())
    }

    /// How many files the driver has open for itself, behind the memory that it has.
    #[must_use]
    pub fn files(&self) -> usize {
        self.with(|state| state.files())
    }

    /// Allocates memory as an application does that knows nothing of exports. Returns its address.
    ///
    /// # Panics
    /// If the driver has no context, or refuses.
    #[must_use]
    pub fn allocate_elsewhere(&self, len: usize) -> u64 {
        self.with(|state| {
            let device = state.devices(0)[0];
            state.allocate(state::Request::device(len as u64, device)).expect("allocate")
        })
    }

    /// Frees what [`FakeDriver::allocate_elsewhere`] returned, or memory of an iface behind its
    /// back.
    ///
    /// # Panics
    /// If no allocation begins there.
    pub fn free_elsewhere(&self, address: u64) {
        self.with(|state| state.free(address).expect("an allocation"));
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
    *STATE.lock() = Some(State::new(profile));
    move |name| if absent.contains(&name) { None } else { entry::symbol(name) }
}

//! A Level Zero driver for tests: the symbols of `libze_loader.so.1` over memory files.
//!
//! It implements what Intel's driver lacks on its simulated GPU: exports, imports, faults at every
//! call, and older releases. Tests call it like the real driver, through a function table. The
//! table comes from [`FakeDriver::symbol`] in the same process, or from the library
//! `libhmem_fake_ze.so`, loaded in place of `libze_loader.so.1`.
//!
//! - The CPU faults on device memory.
//! - A freed address is reused at once. An identity is never reused.
//! - A dma-buf is a genuine one where `/dev/udmabuf` can be opened, and a memory file otherwise.
//! - A call that the specification leaves undefined is counted ([`Live::undefined`]): a null
//!   pointer to properties, a free of unknown memory, a copy of memory that the device cannot
//!   access.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/repository/layers` checks it):
//!
//! - `profile`
//! - `state`
//! - `entry`
//!
//! # Environment
//!
//! `HMEM_FAKE_ZE` configures the library: the name of a profile, followed by `;symbol=code` for
//! calls that always fail, and `;devices=n`.

#![allow(missing_docs)] // The functions of the driver are documented by ze_api.h.

mod entry;
mod profile;
mod state;

use hmem_iface_ze::sys::ZeResult;

pub use entry::*;
pub use profile::Profile;
pub use state::Live;
use state::State;

/// Runs a call of the function `symbol`: counts it, returns an injected fault, and otherwise runs
/// `run`.
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

hmem_fake_common::fake_driver! {
    /// The fake driver of this process, owned by one test. Other tests wait in
    /// [`FakeDriver::start`] until this handle is dropped.
    FakeDriver, fails with ZeResult, set by "HMEM_FAKE_ZE"
}

impl FakeDriver {
    /// Returns the number of open files that back the driver's memory.
    #[must_use]
    pub fn files(&self) -> usize {
        self.with(|state| state.files())
    }

    /// Allocates device memory like an application that calls the driver directly. The memory is
    /// not exportable. Returns its address.
    ///
    /// # Panics
    /// Panics if the driver has no context or refuses the allocation.
    #[must_use]
    pub fn allocate_elsewhere(&self, len: usize) -> u64 {
        self.with(|state| {
            let device = state.devices(0)[0];
            state.allocate(state::Request::device(len as u64, device)).expect("allocate")
        })
    }

    /// Frees memory like an application that calls the driver directly.
    ///
    /// # Panics
    /// Panics if no allocation begins at the address.
    pub fn free_elsewhere(&self, address: u64) {
        self.with(|state| state.free(address).expect("an allocation"));
    }
}

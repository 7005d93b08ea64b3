//! An HSA runtime for tests: the symbols of `libhsa-runtime64.so.1` over memory files.
//!
//! It implements what AMD's own runtime lacks on its model GPU (`tests/rocr`): exports, memory of
//! other processes, page-locking, reserved addresses, faults, and older releases. Tests call it
//! like the real runtime, through a function table. The table comes from [`FakeRuntime::symbol`] in
//! the same process, or from the library `libhmem_fake_rocr.so`.
//!
//! - The CPU faults on device memory.
//! - A freed address is reused at once.
//! - A dma-buf holds a whole allocation. It is a genuine one where `/dev/udmabuf` can be opened,
//!   and a memory file otherwise.
//! - A call that AMD's headers leave undefined is refused and recorded
//!   ([`FakeRuntime::violations`]).
//!
//! # Environment
//!
//! `HMEM_FAKE_ROCR` configures the library: the name of a profile, followed by `;symbol=code` for
//! calls that always fail, and `;devices=n`. The library has every function in each profile.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/repository/layers` checks it):
//!
//! - `state`
//! - `entry`

#![allow(missing_docs)] // The functions of the runtime are documented by AMD's headers.

mod entry;
mod state;

use std::ffi::c_void;

use hmem_iface_rocr::sys::HsaStatus;

pub use entry::*;
use state::State;
pub use state::{Live, Profile};

/// Runs a call of the function `symbol`: counts it, returns an injected fault, and otherwise runs
/// `run`.
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

hmem_fake_common::fake_driver! {
    /// The fake runtime of this process, owned by one test. Other tests wait in
    /// [`FakeRuntime::start`] until this handle is dropped.
    FakeRuntime, fails with HsaStatus, set by "HMEM_FAKE_ROCR"
}

impl FakeRuntime {
    /// Returns the value that was last written to a device's HDP flush register.
    #[must_use]
    pub fn flush_register(&self, device: u32) -> u32 {
        // SAFETY: the register lives as long as the runtime, and is aligned.
        self.with(|state| unsafe { (&raw const state.registers[device as usize]).read_volatile() })
    }

    /// Returns descriptions of the calls that broke a rule of AMD's headers.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        self.with(|state| state.violations.clone())
    }

    /// Allocates device memory like an application that calls the runtime directly.
    #[must_use]
    pub fn allocate(&self, device: u32, len: usize) -> u64 {
        self.with(|state| state.allocate(state::gpu(device), len, false)).expect("allocate")
    }

    /// Frees memory like an application that calls the runtime directly.
    pub fn free(&self, address: u64) {
        // SAFETY: `allocate` returned the address.
        let code = unsafe { hsa_amd_memory_pool_free(address as *mut c_void) };
        assert_eq!(code, HsaStatus::HSA_STATUS_SUCCESS);
    }
}

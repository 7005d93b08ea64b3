//! An HSA runtime for tests: the symbols of `libhsa-runtime64.so.1` over memory files.
//!
//! It has the parts that AMD's own runtime lacks on its model GPU (`tests/rocr`): exports, memory
//! of other processes, page-locking, reserved addresses, faults, and older releases. Tests call it
//! through its function table, as they call the real runtime: within their own process by
//! [`FakeRuntime::symbol`], or as a library (`libhmem_fake_rocr.so`).
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
//! A module imports only from those on earlier lines (`tests/layers` checks it):
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

hmem_fake_common::fake_driver! {
    /// The runtime, for one test at a time: others wait until it is dropped.
    FakeRuntime, fails with HsaStatus, told by "HMEM_FAKE_ROCR"
}

impl FakeRuntime {
    /// Returns the last value that was written to a device's flush register.
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

    /// Allocates device memory as the application does, without the iface.
    #[must_use]
    pub fn allocate(&self, device: u32, len: usize) -> u64 {
        self.with(|state| state.allocate(state::gpu(device), len, false)).expect("allocate")
    }

    /// Frees memory as the application does, without the iface.
    pub fn free(&self, address: u64) {
        // SAFETY: an address of `allocate`.
        let code = unsafe { hsa_amd_memory_pool_free(address as *mut c_void) };
        assert_eq!(code, HsaStatus::HSA_STATUS_SUCCESS);
    }
}

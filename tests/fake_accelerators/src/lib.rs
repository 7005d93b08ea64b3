//! Neuron and Gaudi runtimes for tests: the symbols of `libnrt.so.1`, `libSynapse.so` and
//! `libhl-thunk.so` over memory files.
//!
//! Tests call them through their function tables, as they call the real ones: within their own
//! process by [`Fake::symbol`], or as a library (`libhmem_fake_accelerators.so`) that is loaded in
//! place of any of the three.
//!
//! - The CPU faults on device memory.
//! - A freed address is reused at once.
//! - A dma-buf begins where the exported range does. It is a genuine one where `/dev/udmabuf` can
//!   be opened, and a memory file otherwise.
//! - Every call that returns a code can be made to fail.
//!
//! The answers follow the vendors' headers, and for dma-bufs the sources of the Neuron kernel
//! driver and of hl-thunk. If these do not define a behaviour, the fake is strict: a second
//! `nrt_init` fails, a copy of host memory that `synHostMalloc` did not allocate fails, and a copy
//! runs when its stream is synchronised.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/repository/layers` checks it):
//!
//! - `state`: allocations, faults and counters
//! - `nrt`, `synapse`: the entries
//!
//! # Limits
//!
//! Memory files cannot show two live dma-bufs that overlap with different page bounds: the second
//! export is refused.

#![allow(missing_docs)] // The vendors' headers document the functions.

pub mod nrt;
mod state;
pub mod synapse;

use parking_lot::{Mutex, MutexGuard};
pub use state::{Live, Profile};

/// Locked by the test that uses the runtimes, so that one test runs at a time.
static TURN: Mutex<()> = Mutex::new(());

/// The fake runtimes of this process, owned by one test. Other tests wait in [`Fake::start`] until
/// this handle is dropped.
#[derive(Debug)]
pub struct Fake {
    _turn: MutexGuard<'static, ()>,
    absent: Vec<&'static str>,
}

impl Fake {
    /// Starts new runtimes with this profile. Waits until no other test uses the runtimes.
    #[must_use]
    pub fn start(profile: Profile) -> Self {
        let turn = TURN.lock();
        let absent = profile.absent.clone();
        state::restart(profile);
        Self { _turn: turn, absent }
    }

    /// Returns the address of a function, or `None` if the libraries do not define it or the
    /// profile lists it as absent.
    #[must_use]
    pub fn symbol(&self, name: &str) -> Option<*const ()> {
        if self.absent.contains(&name) { None } else { symbol(name) }
    }

    /// Makes the `nth` next call of a function return `code`: 1 is the next call. If the function
    /// has an earlier fault, counting starts after the call that returns its code.
    pub fn fail_nth(&self, symbol: &'static str, nth: u64, code: i32) {
        state::with(|state| state.calls.fail_nth(symbol, nth, code));
    }

    /// Makes the next call of a function return `code`.
    pub fn fail(&self, symbol: &'static str, code: i32) {
        self.fail_nth(symbol, 1, code);
    }

    /// Removes all injected faults.
    pub fn heal(&self) {
        state::with(|state| state.calls.heal());
    }

    /// Returns the number of calls of a function.
    #[must_use]
    pub fn calls(&self, symbol: &str) -> u64 {
        state::with(|state| state.calls.of(symbol))
    }

    /// Counts the live objects.
    #[must_use]
    pub fn live(&self) -> Live {
        state::with(|state| state.live())
    }
}

/// Starts new runtimes with this profile, and returns a lookup of their functions by name. Unlike
/// [`Fake::start`], does not exclude other tests: only one may run in the process.
pub fn restart(profile: Profile) -> impl Fn(&str) -> Option<*const ()> {
    let absent = profile.absent.clone();
    state::restart(profile);
    move |name| if absent.contains(&name) { None } else { symbol(name) }
}

fn symbol(name: &str) -> Option<*const ()> {
    nrt::symbol(name).or_else(|| synapse::symbol(name))
}

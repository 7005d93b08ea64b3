//! The behaviours that every iface and every provider has, as a test suite.
//!
//! The author of a plug-in runs it as a test binary of their own (`harness = false` in the
//! manifest):
//!
//! ```
//! use std::{process::ExitCode, sync::Arc};
//!
//! use hmem_conformance::Suite;
//! use hmem_iface_system::Simulated;
//! use hmem_provider_loopback::Loopback;
//!
//! fn main() -> ExitCode {
//!     let mut suite = Suite::from_args();
//!     suite.iface("simulated", || Ok(Arc::new(Simulated::builder().build()?)));
//!     suite.provider("loopback", || Ok(Arc::new(Loopback::builder().build()?)));
//!     suite.run()
//! }
//! ```
//!
//! Each behaviour is a trial. [`Suite`] runs them as a test binary does; [`iface()`] and
//! [`provider()`] return them for a runner of your own. A behaviour that cannot be shown, because
//! the back end lacks a facet for instance, is reported as ignored with the reason.
//!
//! The suite supplies what the back end needs to work with: host memory and the simulated device
//! for a provider, the software NIC for an iface.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/layers` checks it):
//!
//! - `bytes`, `trial`
//! - `iface`, `provider`
//!
//! # Limits
//!
//! Behaviours run one at a time, since the open files and the address space that they count are
//! those of the process. Nothing else may run in that process meanwhile. A provider is tested on
//! its first NIC, which has to reach itself.

#![deny(unsafe_code)]

mod bytes;
#[allow(unsafe_code)]
mod iface;
#[allow(unsafe_code)]
mod provider;
mod trial;

use std::{process::ExitCode, sync::Arc};

use hmem_core::{Iface, Result, provider::Provider};
pub use libtest_mimic::Trial;
use libtest_mimic::{Arguments, Completion};

/// The trials of an iface. `make` returns an iface without allocations, once per trial; an error of
/// kind [`Unavailable`](hmem_core::ErrorKind::Unavailable) has the trial ignored.
#[must_use]
pub fn iface(make: impl Fn() -> Result<Arc<dyn Iface>> + Send + Sync + 'static) -> Vec<Trial> {
    trial::all("", iface::BEHAVIOURS, make)
}

/// The trials of a provider. `make` returns a provider without open domains, once per trial; an
/// error of kind [`Unavailable`](hmem_core::ErrorKind::Unavailable) has the trial ignored.
#[must_use]
pub fn provider(
    make: impl Fn() -> Result<Arc<dyn Provider>> + Send + Sync + 'static,
) -> Vec<Trial> {
    trial::all("", provider::BEHAVIOURS, make)
}

/// A test binary over ifaces and providers. It takes the arguments of Rust's test binaries.
#[derive(Debug)]
pub struct Suite {
    arguments: Arguments,
    trials: Vec<Trial>,
}

impl Suite {
    /// Creates an empty suite with the arguments of the process. Exits the process if they are
    /// wrong, or ask for help.
    #[must_use]
    pub fn from_args() -> Self {
        Self { arguments: Arguments::from_args(), trials: Vec::new() }
    }

    /// Adds the trials of an iface as `name::behaviour`; see [`iface()`].
    pub fn iface(
        &mut self,
        name: &str,
        make: impl Fn() -> Result<Arc<dyn Iface>> + Send + Sync + 'static,
    ) {
        self.trials.extend(trial::all(&format!("{name}::"), iface::BEHAVIOURS, make));
    }

    /// Adds the trials of a provider as `name::behaviour`; see [`provider()`].
    pub fn provider(
        &mut self,
        name: &str,
        make: impl Fn() -> Result<Arc<dyn Provider>> + Send + Sync + 'static,
    ) {
        self.trials.extend(trial::all(&format!("{name}::"), provider::BEHAVIOURS, make));
    }

    /// Replaces a trial, named `name::behaviour`, by one that is ignored with a reason: for what a
    /// driver or a device is known not to do.
    ///
    /// # Panics
    /// If there is no such trial.
    pub fn ignore(&mut self, name: &str, reason: &'static str) {
        let trial = self.trials.iter_mut().find(|trial| trial.name() == name);
        let trial = trial.unwrap_or_else(|| panic!("there is no trial {name} to ignore"));
        *trial = Trial::ignorable_test(name, move || Ok(Completion::ignored_with(reason)));
    }

    /// Runs the trials that the arguments select, and prints a line for each.
    #[must_use]
    pub fn run(self) -> ExitCode {
        libtest_mimic::run(&self.arguments, self.trials).exit_code()
    }
}

#[cfg(doctest)]
#[doc = include_str!("../../docs/adding-an-iface.md")]
struct AddingAnIface;

#[cfg(doctest)]
#[doc = include_str!("../../docs/adding-a-provider.md")]
struct AddingAProvider;

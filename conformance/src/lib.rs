//! A test suite of the behaviours that every iface and every provider has.
//!
//! The author of a plug-in runs the suite as a test binary of the plug-in's crate (`harness =
//! false` in the manifest). `docs/adding-an-iface.md` and `docs/adding-a-provider.md` are the
//! guides for such authors.
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
//! Each behaviour is a trial. [`Suite`] runs the trials as a test binary does. [`iface()`] and
//! [`provider()`] return them for a runner of your own. A behaviour that cannot be tested, because
//! the back end lacks a facet for example, is reported as ignored with the reason. The name of a
//! behaviour is its rule. A failure also names the requirements that the behaviour tests, if any.
//! `docs/requirements.md` defines them.
//!
//! If every behaviour is ignored, because the driver's library is absent for example, the exit
//! status is 0. In continuous integration, let the function that opens the back end panic instead:
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use hmem_iface_system::Simulated;
//! # let mut suite = hmem_conformance::Suite::from_args();
//! suite.iface("simulated", || {
//!     let device = Simulated::builder().build();
//!     Ok(Arc::new(device.expect("continuous integration has the driver")))
//! });
//! ```
//!
//! The suite tests a provider with host memory and the simulated device, and an iface with the
//! software NIC.
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
//! - Behaviours run one at a time, since they count the open files and the address space of the
//!   process. Nothing else may run in that process.
//! - Forked children are not tested.
//! - A provider is tested on its first NIC, which must reach itself.

#![deny(unsafe_code)]

mod bytes;
#[allow(unsafe_code)]
mod iface;
#[allow(unsafe_code)]
mod provider;
mod trial;

use std::{process::ExitCode, sync::Arc};

use hmem_core::{Iface, Result, provider::Provider};
/// A test for the test runner `libtest-mimic`, version 0.8. To run it, call `libtest_mimic::run` of
/// this version.
pub use libtest_mimic::Trial;
use libtest_mimic::{Arguments, Completion};

/// Returns one trial for each behaviour of an iface.
///
/// Each trial calls `make` once. `make` returns an iface without allocations. If `make` fails with
/// [`Unavailable`](hmem_core::ErrorKind::Unavailable), the trial is ignored. After any other error
/// the trial fails. If a missing driver must fail the test, `make` must panic instead, for example
/// by `expect`.
#[must_use]
pub fn iface(make: impl Fn() -> Result<Arc<dyn Iface>> + Send + Sync + 'static) -> Vec<Trial> {
    trial::all("", iface::BEHAVIOURS, make)
}

/// Returns one trial for each behaviour of a provider.
///
/// Each trial calls `make` once. `make` returns a provider without open domains. If `make` fails
/// with [`Unavailable`](hmem_core::ErrorKind::Unavailable), the trial is ignored. After any other
/// error the trial fails. If a missing driver must fail the test, `make` must panic instead, for
/// example by `expect`.
#[must_use]
pub fn provider(
    make: impl Fn() -> Result<Arc<dyn Provider>> + Send + Sync + 'static,
) -> Vec<Trial> {
    trial::all("", provider::BEHAVIOURS, make)
}

/// A test binary for ifaces and providers. It accepts the same arguments as other Rust test
/// binaries.
#[derive(Debug)]
pub struct Suite {
    arguments: Arguments,
    trials: Vec<Trial>,
}

impl Suite {
    /// Creates an empty suite from the command-line arguments of the process. Exits the process if
    /// the arguments are wrong or ask for help.
    #[must_use]
    pub fn from_args() -> Self {
        Self { arguments: Arguments::from_args(), trials: Vec::new() }
    }

    /// Adds the trials of [`iface()`]. Their names get the prefix `name::`.
    pub fn iface(
        &mut self,
        name: &str,
        make: impl Fn() -> Result<Arc<dyn Iface>> + Send + Sync + 'static,
    ) {
        self.trials.extend(trial::all(&format!("{name}::"), iface::BEHAVIOURS, make));
    }

    /// Adds the trials of [`provider()`]. Their names get the prefix `name::`.
    pub fn provider(
        &mut self,
        name: &str,
        make: impl Fn() -> Result<Arc<dyn Provider>> + Send + Sync + 'static,
    ) {
        self.trials.extend(trial::all(&format!("{name}::"), provider::BEHAVIOURS, make));
    }

    /// Makes the suite report a trial as ignored, with `reason`, instead of running it.
    ///
    /// `name` is the full name of the trial, for example `simulated::monitor_detects_a_free`. Use
    /// this for known faults of a driver or device.
    ///
    /// # Panics
    /// Panics if there is no trial of this name.
    pub fn ignore(&mut self, name: &str, reason: &'static str) {
        let trial = self.trials.iter_mut().find(|trial| trial.name() == name);
        let trial = trial.unwrap_or_else(|| panic!("there is no trial {name} to ignore"));
        *trial = Trial::ignorable_test(name, move || Ok(Completion::ignored_with(reason)));
    }

    /// Runs the trials that the command-line arguments select, and prints one line for each.
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

//! The trials of a back end, and a test binary that runs them.

use std::{process::ExitCode, sync::Arc};

use hmem_core::{Iface, Result, provider::Provider};
/// A test for the test runner `libtest-mimic`, version 0.8. To run it, call `libtest_mimic::run` of
/// this version.
pub use libtest_mimic::Trial;
use libtest_mimic::{Arguments, Completion};

use crate::{control::TestControl, provider::Subject};

/// Returns one trial for each behaviour of an iface.
///
/// Each trial calls `make` once. `make` returns an iface without allocations. If `make` fails with
/// [`Unavailable`](hmem_core::ErrorKind::Unavailable), the trial is ignored. After any other error
/// the trial fails. If a missing driver must fail the test, `make` must panic instead, for example
/// by `expect`.
#[must_use]
pub fn iface(make: impl Fn() -> Result<Arc<dyn Iface>> + Send + Sync + 'static) -> Vec<Trial> {
    crate::trial::all("", crate::iface::BEHAVIOURS, make)
}

/// Returns one trial for each behaviour of a provider.
///
/// Each trial calls `make` once. `make` returns a provider without open domains. The rules for its
/// errors are those of [`iface()`].
#[must_use]
pub fn provider(
    make: impl Fn() -> Result<Arc<dyn Provider>> + Send + Sync + 'static,
) -> Vec<Trial> {
    crate::trial::all("", crate::provider::BEHAVIOURS, uncontrolled(make))
}

/// Returns a function that opens a provider by `make`, without a control over the provider.
fn uncontrolled(
    make: impl Fn() -> Result<Arc<dyn Provider>> + Send + Sync + 'static,
) -> impl Fn() -> Result<Subject> + Send + Sync + 'static {
    move || Ok(Subject { provider: make()?, control: None })
}

/// A provider and a control over it.
pub type Controlled = (Arc<dyn Provider>, Arc<dyn TestControl>);

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
        let prefix = format!("{name}::");
        self.trials.extend(crate::trial::all(&prefix, crate::iface::BEHAVIOURS, make));
    }

    /// Adds the trials of [`provider()`]. Their names get the prefix `name::`.
    pub fn provider(
        &mut self,
        name: &str,
        make: impl Fn() -> Result<Arc<dyn Provider>> + Send + Sync + 'static,
    ) {
        let prefix = format!("{name}::");
        let make = uncontrolled(make);
        self.trials.extend(crate::trial::all(&prefix, crate::provider::BEHAVIOURS, make));
    }

    /// Like [`Suite::provider`], for a provider that tests can control.
    pub fn controlled_provider(
        &mut self,
        name: &str,
        make: impl Fn() -> Result<Controlled> + Send + Sync + 'static,
    ) {
        let prefix = format!("{name}::");
        let make = move || {
            let (provider, control) = make()?;
            Ok(Subject { provider, control: Some(control) })
        };
        self.trials.extend(crate::trial::all(&prefix, crate::provider::BEHAVIOURS, make));
    }

    /// Makes the suite report a trial as ignored, with `reason`, instead of running it.
    ///
    /// `name` is the full name of the trial, for example `simulated::monitor_detects_a_free`. Call
    /// this function for behaviours that fail because of a known fault of a driver or device.
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

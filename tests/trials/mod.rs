//! Harness for tests that learn only while they run that they cannot run here. The harness of rustc
//! knows passed and failed; these tests report ignored, with the reason.
//!
//! The test binary has `harness = false` in its manifest and lists its tests with `trials!`.

use std::process::ExitCode;

use libtest_mimic::{Arguments, Completion, Trial};

/// Reason why a test cannot run here.
#[derive(Debug)]
pub(crate) struct Skipped(pub(crate) String);

/// Result of a test that passed or was skipped. A failed test panics.
pub(crate) type Outcome = Result<(), Skipped>;

/// Name and function of a test.
pub(crate) type Test = (&'static str, fn() -> Outcome);

/// Runs the tests as a test binary does.
pub(crate) fn run(tests: &[Test]) -> ExitCode {
    let trial = |&(name, test): &Test| {
        Trial::ignorable_test(name, move || match test() {
            Ok(()) => Ok(Completion::Completed),
            Err(Skipped(reason)) => Ok(Completion::ignored_with(reason)),
        })
    };
    let trials = tests.iter().map(trial).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Defines the `main` of a test binary, which runs the listed functions. The doc comment of an
/// entry names the requirement that it tests.
macro_rules! trials {
    ($($(#[doc = $doc:expr])* $name:ident,)+) => {
        fn main() -> std::process::ExitCode {
            $crate::trials::run(&[$((stringify!($name), $name),)+])
        }
    };
}
pub(crate) use trials;

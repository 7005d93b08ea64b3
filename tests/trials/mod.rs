//! Harness for tests that find out at run time that they cannot run on this machine. Rust's own
//! harness reports only passed and failed at run time; these tests also report ignored, with the
//! reason.
//!
//! The test binary has `harness = false` in its manifest and lists its tests with `trials!`.

use std::process::ExitCode;

use libtest_mimic::{Arguments, Completion, Trial};

/// Reason why a test cannot run on this machine.
#[derive(Debug)]
pub(crate) struct Skipped(pub(crate) String);

/// Result of a test that passed or was skipped. A failed test panics.
pub(crate) type Outcome = Result<(), Skipped>;

/// Returns an outcome: skipped if there is a reason.
#[allow(dead_code, reason = "a part of the test binaries uses it")]
pub(crate) fn skip(reason: Option<impl Into<String>>) -> Outcome {
    reason.map_or(Ok(()), |reason| Err(Skipped(reason.into())))
}

/// Return type of a test function: an outcome, or nothing if the test is never skipped.
pub(crate) trait Ended {
    fn outcome(self) -> Outcome;
}

impl Ended for () {
    fn outcome(self) -> Outcome {
        Ok(())
    }
}

impl Ended for Outcome {
    fn outcome(self) -> Outcome {
        self
    }
}

/// Name and function of a test.
pub(crate) type Test = (&'static str, fn() -> Outcome);

/// Runs the tests with the command-line arguments of a test binary. Tests whose names begin with
/// `slow_` are of the slow tier, which needs `--ignored`.
pub(crate) fn run(tests: &[Test]) -> ExitCode {
    let trial = |&(name, test): &Test| {
        Trial::ignorable_test(name, move || match test() {
            Ok(()) => Ok(Completion::Completed),
            Err(Skipped(reason)) => Ok(Completion::ignored_with(reason)),
        })
        .with_ignored_flag(name.starts_with("slow_"))
    };
    let trials = tests.iter().map(trial).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Defines the `main` of a test binary, which runs the listed functions. The doc comment of an
/// entry names the requirement that it tests. With `const NAME;` before the entries, defines the
/// list of tests instead, for a binary with a `main` of its own.
macro_rules! trials {
    (const $tests:ident; $($(#[doc = $doc:expr])* $name:ident,)+) => {
        const $tests: &[$crate::trials::Test] = &[$(
            (stringify!($name), || $crate::trials::Ended::outcome($name()))
        ),+];
    };
    ($($(#[doc = $doc:expr])* $name:ident,)+) => {
        fn main() -> std::process::ExitCode {
            $crate::trials::trials! { const TESTS; $($(#[doc = $doc])* $name,)+ }
            $crate::trials::run(TESTS)
        }
    };
}
pub(crate) use trials;

//! Trials. Each trial tests one behaviour on a new iface or provider. Trials run one at a time.

use std::{
    any::Any,
    fmt::Display,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, PoisonError},
};

use hmem_core::{Error, ErrorKind, Result};
use libtest_mimic::{Completion, Trial};

/// The reason why a behaviour cannot be tested.
#[derive(Debug)]
pub(crate) struct Skipped(pub(crate) String);

/// Result of testing a behaviour: success, or the reason why the behaviour cannot be tested. If the
/// behaviour does not hold, the test panics.
pub(crate) type Outcome = std::result::Result<(), Skipped>;

/// Returns the outcome that skips a behaviour, with the reason.
pub(crate) fn skip<T>(reason: impl Into<String>) -> std::result::Result<T, Skipped> {
    Err(Skipped(reason.into()))
}

/// A return type of a test: nothing if the test cannot skip, or an outcome.
pub(crate) trait IntoOutcome {
    fn into_outcome(self) -> Outcome;
}

impl IntoOutcome for () {
    fn into_outcome(self) -> Outcome {
        Ok(())
    }
}

impl IntoOutcome for Outcome {
    fn into_outcome(self) -> Outcome {
        self
    }
}

/// Runs a test. If the test panics, this function panics with the label in front of the message.
pub(crate) fn labeled(label: &dyn Display, test: impl FnOnce() -> Outcome) -> Outcome {
    catch_unwind(AssertUnwindSafe(test))
        .unwrap_or_else(|panic| panic!("{label}: {}", text(&*panic)))
}

/// The name of a behaviour, its doc comment (the requirements behind it, and the behaviour in a
/// sentence), and the function that tests it on a new back end.
pub(crate) type Behaviour<B> = (&'static str, &'static str, fn(&B) -> Outcome);

/// Defines the constant `BEHAVIOURS`, a list of behaviours. The doc comment before a name has the
/// ids of the requirements (`docs/requirements.md`) that the behaviour tests, if any, and says what
/// holds. With `cases`, a behaviour is tested in each case of a provider that has the properties
/// after its name.
macro_rules! behaviours {
    ($backend:ty: $($(#[doc = $doc:literal])* $name:ident,)*) => {
        pub(crate) const BEHAVIOURS: &[$crate::trial::Behaviour<$backend>] =
            &[$((stringify!($name), concat!($($doc),*), $name),)*];
    };
    (cases: $($(#[doc = $doc:literal])* $name:ident $(, $need:ident)*;)*) => {
        pub(crate) const BEHAVIOURS: &[$crate::trial::Behaviour<Subject>] = &[$((
            stringify!($name),
            concat!($($doc),*),
            |subject| Case::each(stringify!($name), subject, &[$(needs::$need),*], $name),
        ),)*];
    };
}
pub(crate) use behaviours;

/// Asserts that an error has the expected kind. `case` names the failed operation in the panic.
#[track_caller]
pub(crate) fn assert_kind(error: &Error, expected: ErrorKind, case: &str) {
    let found = error.kind();
    assert!(found == expected, "{case}: the kind must be {expected:?} and is {found:?}: {error}");
}

/// Returns the message of a panic.
fn text(panic: &(dyn Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    owned.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("panicked without a text")
}

/// Lock that each trial holds while it runs. The trials measure the address space, which belongs to
/// the whole process.
static TURN: Mutex<()> = Mutex::new(());

/// Returns a trial for each behaviour. The names of the trials are those of the behaviours, with
/// `prefix` in front. `make` makes an iface or provider, as [`crate::iface()`] explains.
pub(crate) fn all<B: 'static>(
    prefix: &str,
    behaviours: &'static [Behaviour<B>],
    make: impl Fn() -> Result<B> + Send + Sync + 'static,
) -> Vec<Trial> {
    let make = Arc::new(make);
    let trial = |&(name, requirements, test): &Behaviour<B>| {
        let make = Arc::clone(&make);
        Trial::ignorable_test(format!("{prefix}{name}"), move || {
            let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
            let backend = match make() {
                Ok(backend) => backend,
                Err(why) if why.kind() == ErrorKind::Unavailable => {
                    return Ok(Completion::ignored_with(why.to_string()));
                }
                Err(why) => return Err(why.to_string().into()),
            };
            match catch_unwind(AssertUnwindSafe(|| test(&backend))) {
                Ok(Ok(())) => Ok(Completion::Completed),
                Ok(Err(Skipped(reason))) => Ok(Completion::ignored_with(reason)),
                Err(panic) => {
                    let mut text = text(&*panic).to_owned();
                    if !requirements.is_empty() {
                        text += "\ndocs/requirements.md of hmem has the rule:";
                        text += requirements;
                    }
                    Err(text.into())
                }
            }
        })
    };
    behaviours.iter().map(trial).collect()
}

//! Trials. Each trial tests one behaviour on its own new iface or provider. Trials run one at a
//! time.

use std::sync::{Arc, Mutex, PoisonError};

use hmem_core::{ErrorKind, Result};
use libtest_mimic::{Completion, Trial};

/// The reason why a behaviour cannot be tested.
#[derive(Debug)]
pub(crate) struct Skipped(pub(crate) String);

/// The result of testing a behaviour: success, or the reason why the behaviour cannot be tested. If
/// the behaviour does not hold, the test panics instead.
pub(crate) type Outcome = std::result::Result<(), Skipped>;

/// Returns the outcome that skips a behaviour, for `reason`.
pub(crate) fn skip<T>(reason: impl Into<String>) -> std::result::Result<T, Skipped> {
    Err(Skipped(reason.into()))
}

/// The name of a behaviour, and the function that tests it on a new iface or provider.
pub(crate) type Behaviour<B> = (&'static str, fn(&Arc<B>) -> Outcome);

/// Creates a list of behaviours. The doc comment of each behaviour has the ids of the requirements
/// that it tests.
macro_rules! behaviours {
    ($backend:ty: $($(#[doc = $doc:expr])* $name:ident,)*) => {
        pub(crate) const BEHAVIOURS: &[$crate::trial::Behaviour<$backend>] =
            &[$((stringify!($name), $name),)*];
    };
}
pub(crate) use behaviours;

/// Locked while a behaviour runs. Open files and address space are counted for the whole process.
static TURN: Mutex<()> = Mutex::new(());

/// Returns a trial for each behaviour, with `prefix` in front of its name.
pub(crate) fn all<B: ?Sized + 'static>(
    prefix: &str,
    behaviours: &'static [Behaviour<B>],
    make: impl Fn() -> Result<Arc<B>> + Send + Sync + 'static,
) -> Vec<Trial> {
    let make = Arc::new(make);
    let trial = |&(name, show): &Behaviour<B>| {
        let make = Arc::clone(&make);
        Trial::ignorable_test(format!("{prefix}{name}"), move || {
            let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
            let outcome = match make() {
                Ok(backend) => show(&backend),
                Err(why) if why.kind() == ErrorKind::Unavailable => skip(why.to_string()),
                Err(why) => return Err(why.to_string().into()),
            };
            Ok(match outcome {
                Ok(()) => Completion::Completed,
                Err(Skipped(reason)) => Completion::ignored_with(reason),
            })
        })
    };
    behaviours.iter().map(trial).collect()
}

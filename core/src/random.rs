//! Random numbers, from which providers make keys that peers cannot guess.

use crate::{Error, ErrorKind, Result};

/// Returns a number from the operating system's random generator.
///
/// # Errors
/// [`ErrorKind::Unavailable`] if the generator fails. The error names `provider`.
pub fn random_u64(provider: &'static str) -> Result<u64> {
    getrandom::u64().map_err(|error| {
        Error::new(ErrorKind::Unavailable, "getrandom")
            .provider(provider)
            .caused_by(error)
            .remedy("let the process call getrandom(2), from which keys are made")
    })
}

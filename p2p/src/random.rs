//! Numbers that nobody can guess: keys are made of them.

use hmem_core::{Error, ErrorKind, Result};

/// A number from the operating system's generator.
pub(crate) fn random(provider: &'static str) -> Result<u64> {
    getrandom::u64().map_err(|error| {
        Error::new(ErrorKind::Unavailable, "getrandom")
            .provider(provider)
            .caused_by(error)
            .remedy("keys need the operating system's random numbers")
    })
}

//! Unguessable numbers, from which providers make keys.

use crate::{Error, ErrorKind, Result};

/// Returns a number from the operating system's random generator.
///
/// # Errors
///
/// `Unavailable`, with `provider` as the provider, if the operating system gives no random numbers.
pub fn random_u64(provider: &'static str) -> Result<u64> {
    getrandom::u64().map_err(|error| {
        Error::new(ErrorKind::Unavailable, "getrandom")
            .provider(provider)
            .caused_by(error)
            .remedy("keys need the operating system's random numbers")
    })
}

//! Values of environment variables, for the settings of ifaces and providers.
//!
//! A variable that is unset or empty has no value. A wrong value is an error of kind
//! `InvalidArgument` that names the variable. `hmem::Builder::build` fails with such an error: it
//! does not continue without the iface or provider. The variables of registration caches are read
//! later, when a cache is opened.
//!
//! ```
//! use hmem_core::environment;
//!
//! let starts_runtime = environment::boolean("QUOKKA_START_RUNTIME")?.unwrap_or(false);
//! assert!(!starts_runtime);
//! # Ok::<(), hmem_core::Error>(())
//! ```

use std::{env::VarError, fmt, str::FromStr};

use crate::{Error, ErrorKind, Result};

/// Returns a variable's text, or `None` if the variable is unset or empty.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] if the value is not UTF-8.
pub fn text(name: &'static str) -> Result<Option<String>> {
    match std::env::var(name) {
        Ok(text) if text.is_empty() => Ok(None),
        Ok(text) => Ok(Some(text)),
        Err(VarError::NotPresent) => Ok(None),
        Err(VarError::NotUnicode(text)) => {
            Err(bad_value(name, text.to_string_lossy()).remedy("use text in UTF-8"))
        }
    }
}

/// Returns the value of a variable that is a boolean of libfabric: 0, no, false or off for false,
/// and 1, yes, true or on for true. Upper and lower case are equal. Returns `None` if the variable
/// is unset or empty.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for another value.
pub fn boolean(name: &'static str) -> Result<Option<bool>> {
    let Some(text) = text(name)? else { return Ok(None) };
    parse_boolean(name, &text).map(Some)
}

/// Returns the value of a variable, parsed with the type's `FromStr`. Returns `None` if the
/// variable is unset or empty.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] if the value cannot be parsed, with the remedy of the error that
/// `FromStr` returned.
pub fn parsed<T: FromStr<Err = Error>>(name: &'static str) -> Result<Option<T>> {
    let Some(text) = text(name)? else { return Ok(None) };
    text.parse().map(Some).map_err(|error: Error| {
        let remedy = error.remedy_text().unwrap_or("use a name that the documentation lists");
        bad_value(name, text).remedy(remedy.to_owned())
    })
}

/// Returns the error for a wrong value of a variable. The caller must add the accepted values as
/// the remedy.
#[must_use]
pub fn bad_value(name: &'static str, value: impl fmt::Display) -> Error {
    Error::new(ErrorKind::InvalidArgument, "environment")
        .context("why", format_args!("{name}={value}"))
        .context("variable", name)
        .context("value", value)
}

/// Returns true if the error is about the value of a variable: its kind is
/// [`ErrorKind::InvalidArgument`], and its context has the value `variable`.
#[must_use]
pub fn is_bad_value(error: &Error) -> bool {
    error.kind() == ErrorKind::InvalidArgument && error.context_value("variable").is_some()
}

fn parse_boolean(name: &'static str, text: &str) -> Result<bool> {
    match text.to_ascii_lowercase().as_str() {
        "0" | "no" | "false" | "off" => Ok(false),
        "1" | "yes" | "true" | "on" => Ok(true),
        _ => Err(bad_value(name, text).remedy("use 0, no, false, off, 1, yes, true or on")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn booleans_parse_as_in_libfabric_and_other_values_are_refused() {
        for (text, value) in [("0", false), ("No", false), ("TRUE", true), ("on", true)] {
            assert_eq!(parse_boolean("FI_HMEM_DISABLE_P2P", text).unwrap(), value);
        }
        let error = parse_boolean("FI_HMEM_DISABLE_P2P", "maybe").unwrap_err();
        assert!(is_bad_value(&error));
        assert!(error.to_string().contains("FI_HMEM_DISABLE_P2P"));
        assert!(error.to_string().contains("maybe"));
    }
}

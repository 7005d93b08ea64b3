//! The environment variables of libfabric that apply here. The builder wins over them.

use hmem_core::{Error, ErrorKind, Result};

/// Ifaces to start: names separated by `;` or `,`.
pub(crate) const HMEM: &str = "FI_HMEM";
/// Whether device memory is kept from every NIC.
pub(crate) const DISABLE_P2P: &str = "FI_HMEM_DISABLE_P2P";
/// What notices that host memory went under a cached registration.
pub(crate) const CACHE_MONITOR: &str = "FI_MR_CACHE_MONITOR";

/// A variable's text, if it is set and not empty.
pub(crate) fn text(name: &'static str) -> Result<Option<String>> {
    match std::env::var(name) {
        Ok(text) if text.is_empty() => Ok(None),
        Ok(text) => Ok(Some(text)),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(error) => Err(Error::new(ErrorKind::InvalidArgument, "environment")
            .context("variable", name)
            .caused_by(error)),
    }
}

/// A variable as libfabric reads booleans: 0/1, no/yes, false/true, off/on, in any case.
pub(crate) fn boolean(name: &'static str) -> Result<Option<bool>> {
    let Some(text) = text(name)? else { return Ok(None) };
    parse_boolean(name, &text).map(Some)
}

fn parse_boolean(name: &'static str, text: &str) -> Result<bool> {
    match text.to_ascii_lowercase().as_str() {
        "0" | "no" | "false" | "off" => Ok(false),
        "1" | "yes" | "true" | "on" => Ok(true),
        _ => Err(Error::new(ErrorKind::InvalidArgument, "environment")
            .context("variable", name)
            .context("value", text)
            .remedy("use 0, no, false, off, 1, yes, true or on")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn booleans_are_read_as_libfabric_reads_them_and_others_are_refused_by_name() {
        for (text, value) in [("0", false), ("No", false), ("TRUE", true), ("on", true)] {
            assert_eq!(parse_boolean(DISABLE_P2P, text).unwrap(), value);
        }
        let error = parse_boolean(DISABLE_P2P, "maybe").unwrap_err();
        assert!(error.to_string().contains("FI_HMEM_DISABLE_P2P"));
        assert!(error.to_string().contains("maybe"));
    }
}

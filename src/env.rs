//! The environment variables that the facade reads: libfabric's, and those of the back ends. A
//! setting of the builder overrides its variable, which is then not read.

use std::env::VarError;

use hmem_core::{CacheAttr, Error, ErrorKind, IfaceKind, Result};

/// The variable with the names of the ifaces to start, separated by `;` or `,`.
pub(crate) const HMEM: &str = "FI_HMEM";
/// The variable that disables direct access of NICs to device memory.
pub(crate) const DISABLE_P2P: &str = "FI_HMEM_DISABLE_P2P";
/// The variable with the name of the monitor for cached host memory.
pub(crate) const CACHE_MONITOR: &str = "FI_MR_CACHE_MONITOR";

/// The variable that limits the number of bytes of a registration cache.
pub(crate) const CACHE_MAX_SIZE: &str = "FI_MR_CACHE_MAX_SIZE";
/// The variable that limits the number of entries of a registration cache.
pub(crate) const CACHE_MAX_COUNT: &str = "FI_MR_CACHE_MAX_COUNT";
/// The variable that makes registration caches merge regions that overlap or touch.
pub(crate) const CACHE_MERGE: &str = "FI_MR_CACHE_MERGE_REGIONS";
/// The variables that enable the cache monitor of one iface each, with the kind of the iface.
pub(crate) const CACHE_MONITORS: [(&str, IfaceKind); 3] = [
    ("FI_MR_CUDA_CACHE_MONITOR_ENABLED", IfaceKind::CUDA),
    ("FI_MR_ROCR_CACHE_MONITOR_ENABLED", IfaceKind::ROCR),
    ("FI_MR_ZE_CACHE_MONITOR_ENABLED", IfaceKind::ZE),
];

/// Returns the cache settings of the builder. Settings that the builder lacks come from the
/// environment.
pub(crate) fn cache(by_builder: &CacheAttr) -> Result<CacheAttr> {
    let max_count = match by_builder.max_count {
        Some(count) => Some(count),
        None => number(CACHE_MAX_COUNT)?.map(|count| usize::try_from(count).unwrap_or(usize::MAX)),
    };
    let max_bytes = match by_builder.max_bytes {
        Some(bytes) => Some(bytes),
        None => number(CACHE_MAX_SIZE)?,
    };
    let merge = match by_builder.merge {
        Some(merge) => Some(merge),
        None => boolean(CACHE_MERGE)?,
    };
    let without_monitors = match &by_builder.without_monitors {
        Some(without) => Some(without.clone()),
        None => without_monitors()?,
    };
    let mut cache = CacheAttr::default();
    (cache.max_count, cache.max_bytes) = (max_count, max_bytes);
    (cache.merge, cache.without_monitors) = (merge, without_monitors);
    cache.growth = by_builder.growth;
    Ok(cache)
}

/// Returns the ifaces whose monitors the environment disables, or `None` if it disables none.
fn without_monitors() -> Result<Option<Vec<IfaceKind>>> {
    let mut without = Vec::new();
    for (name, iface) in CACHE_MONITORS {
        if boolean(name)? == Some(false) {
            without.push(iface);
        }
    }
    Ok(Some(without).filter(|without| !without.is_empty()))
}

fn number(name: &'static str) -> Result<Option<u64>> {
    let Some(text) = text(name)? else { return Ok(None) };
    let accepted = "use a decimal number, 0 or more";
    text.parse().map(Some).map_err(|_| bad_value(name, text).remedy(accepted))
}

/// Returns the error for a wrong value of a variable. The caller must add the accepted values as
/// the remedy.
pub(crate) fn bad_value(name: &'static str, value: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::InvalidArgument, "environment")
        .context("variable", name)
        .context("value", value)
}

/// Returns true if the error is about the value of a variable: its kind is `InvalidArgument`, and
/// its context names the variable.
pub(crate) fn is_bad_value(error: &Error) -> bool {
    error.kind() == ErrorKind::InvalidArgument && error.context_value("variable").is_some()
}

/// Adds the variable `name` to an error about the library that the variable selects. Returns other
/// errors unchanged.
#[cfg(any(
    feature = "cuda",
    feature = "neuron",
    feature = "rocr",
    feature = "synapseai",
    feature = "ze"
))]
pub(crate) fn of_library(name: &'static str, error: Error) -> Error {
    let selected = std::env::var_os(name).filter(|path| !path.is_empty());
    let Some(path) = selected.map(|path| path.to_string_lossy().into_owned()) else { return error };
    if error.operation() != "load library" || error.context_value("library") != Some(&path) {
        return error;
    }
    error
        .context("variable", name)
        .remedy(format!("correct {name}, or unset it to load the installed library"))
}

/// Returns a variable's text, or `None` if it is unset or empty.
pub(crate) fn text(name: &'static str) -> Result<Option<String>> {
    match std::env::var(name) {
        Ok(text) if text.is_empty() => Ok(None),
        Ok(text) => Ok(Some(text)),
        Err(VarError::NotPresent) => Ok(None),
        Err(VarError::NotUnicode(text)) => {
            Err(bad_value(name, text.to_string_lossy()).remedy("use text in UTF-8"))
        }
    }
}

/// Parses a variable as libfabric parses booleans: 0/1, no/yes, false/true, off/on, in any case.
pub(crate) fn boolean(name: &'static str) -> Result<Option<bool>> {
    let Some(text) = text(name)? else { return Ok(None) };
    parse_boolean(name, &text).map(Some)
}

/// Parses the value of a variable with the type's `FromStr`.
pub(crate) fn named<T: std::str::FromStr<Err = Error>>(name: &'static str) -> Result<Option<T>> {
    let Some(text) = text(name)? else { return Ok(None) };
    text.parse().map(Some).map_err(|error: Error| {
        let remedy = error.remedy_text().unwrap_or("use a name that the documentation lists");
        bad_value(name, text).remedy(remedy.to_owned())
    })
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
            assert_eq!(parse_boolean(DISABLE_P2P, text).unwrap(), value);
        }
        let error = parse_boolean(DISABLE_P2P, "maybe").unwrap_err();
        assert!(error.to_string().contains("FI_HMEM_DISABLE_P2P"));
        assert!(error.to_string().contains("maybe"));
    }
}

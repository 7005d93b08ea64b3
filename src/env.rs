//! The environment variables of libfabric that this library honours. A setting of the builder takes
//! precedence; its variable is then not read.

use hmem_core::{CacheAttr, Error, ErrorKind, IfaceKind, Result};

/// Ifaces to start: names separated by `;` or `,`.
pub(crate) const HMEM: &str = "FI_HMEM";
/// Disables direct access to device memory for every NIC.
pub(crate) const DISABLE_P2P: &str = "FI_HMEM_DISABLE_P2P";
/// The monitor of cached host memory.
pub(crate) const CACHE_MONITOR: &str = "FI_MR_CACHE_MONITOR";

/// Largest number of bytes in a registration cache.
pub(crate) const CACHE_MAX_SIZE: &str = "FI_MR_CACHE_MAX_SIZE";
/// Largest number of entries in a registration cache.
pub(crate) const CACHE_MAX_COUNT: &str = "FI_MR_CACHE_MAX_COUNT";
/// Merges cached registrations that overlap or touch.
pub(crate) const CACHE_MERGE: &str = "FI_MR_CACHE_MERGE_REGIONS";
/// Enables the cache monitor of an iface.
pub(crate) const CACHE_MONITORS: [(&str, IfaceKind); 3] = [
    ("FI_MR_CUDA_CACHE_MONITOR_ENABLED", IfaceKind::CUDA),
    ("FI_MR_ROCR_CACHE_MONITOR_ENABLED", IfaceKind::ROCR),
    ("FI_MR_ZE_CACHE_MONITOR_ENABLED", IfaceKind::ZE),
];

/// Returns the settings of registration caches: those of the builder, and those of the environment
/// where the builder has none.
pub(crate) fn cache(builder: &CacheAttr) -> Result<CacheAttr> {
    let max_count = match builder.max_count {
        Some(count) => Some(count),
        None => number(CACHE_MAX_COUNT)?.map(|count| usize::try_from(count).unwrap_or(usize::MAX)),
    };
    let max_bytes = match builder.max_bytes {
        Some(bytes) => Some(bytes),
        None => number(CACHE_MAX_SIZE)?,
    };
    let merge = match builder.merge {
        Some(merge) => Some(merge),
        None => boolean(CACHE_MERGE)?,
    };
    let without_monitors = match &builder.without_monitors {
        Some(without) => Some(without.clone()),
        None => without_monitors()?,
    };
    let mut cache = CacheAttr::default();
    (cache.max_count, cache.max_bytes) = (max_count, max_bytes);
    (cache.merge, cache.without_monitors) = (merge, without_monitors);
    cache.growth = builder.growth;
    Ok(cache)
}

/// Returns the ifaces whose monitors the environment disables.
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
    text.parse().map(Some).map_err(|error| {
        Error::new(ErrorKind::InvalidArgument, "environment")
            .context("variable", name)
            .context("value", text)
            .caused_by(error)
            .remedy("use a decimal number, 0 or more")
    })
}

/// Returns the text of a variable, or `None` if it is unset or empty.
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

/// Returns a boolean variable in libfabric's notation: 0/1, no/yes, false/true, off/on, in any
/// case.
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
    fn booleans_have_libfabrics_notation_and_others_are_refused() {
        for (text, value) in [("0", false), ("No", false), ("TRUE", true), ("on", true)] {
            assert_eq!(parse_boolean(DISABLE_P2P, text).unwrap(), value);
        }
        let error = parse_boolean(DISABLE_P2P, "maybe").unwrap_err();
        assert!(error.to_string().contains("FI_HMEM_DISABLE_P2P"));
        assert!(error.to_string().contains("maybe"));
    }
}

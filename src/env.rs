//! The environment variables of libfabric that apply here. The builder wins over them: what it says
//! is not read.

use hmem_core::{CacheAttr, Error, ErrorKind, IfaceKind, Result};

/// Ifaces to start: names separated by `;` or `,`.
pub(crate) const HMEM: &str = "FI_HMEM";
/// Whether device memory is kept from every NIC.
pub(crate) const DISABLE_P2P: &str = "FI_HMEM_DISABLE_P2P";
/// What notices that host memory went under a cached registration.
pub(crate) const CACHE_MONITOR: &str = "FI_MR_CACHE_MONITOR";

/// Bytes that a registration cache may hold.
pub(crate) const CACHE_MAX_SIZE: &str = "FI_MR_CACHE_MAX_SIZE";
/// Entries that a registration cache may hold.
pub(crate) const CACHE_MAX_COUNT: &str = "FI_MR_CACHE_MAX_COUNT";
/// Whether a registration cache merges.
pub(crate) const CACHE_MERGE: &str = "FI_MR_CACHE_MERGE_REGIONS";
/// Whether a registration cache uses an iface's monitor.
pub(crate) const CACHE_MONITORS: [(&str, IfaceKind); 3] = [
    ("FI_MR_CUDA_CACHE_MONITOR_ENABLED", IfaceKind::CUDA),
    ("FI_MR_ROCR_CACHE_MONITOR_ENABLED", IfaceKind::ROCR),
    ("FI_MR_ZE_CACHE_MONITOR_ENABLED", IfaceKind::ZE),
];

/// What `said` says of registration caches, and where it says nothing what the environment does.
pub(crate) fn cache(said: &CacheAttr) -> Result<CacheAttr> {
    let max_count = match said.max_count {
        Some(count) => Some(count),
        None => number(CACHE_MAX_COUNT)?.map(|count| usize::try_from(count).unwrap_or(usize::MAX)),
    };
    let max_bytes = match said.max_bytes {
        Some(bytes) => Some(bytes),
        None => number(CACHE_MAX_SIZE)?,
    };
    let merge = match said.merge {
        Some(merge) => Some(merge),
        None => boolean(CACHE_MERGE)?,
    };
    let without_monitors = match &said.without_monitors {
        Some(without) => Some(without.clone()),
        None => without_monitors()?,
    };
    let mut cache = CacheAttr::default();
    (cache.max_count, cache.max_bytes) = (max_count, max_bytes);
    (cache.merge, cache.without_monitors) = (merge, without_monitors);
    cache.growth = said.growth;
    Ok(cache)
}

/// The ifaces whose monitors the environment leaves out.
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

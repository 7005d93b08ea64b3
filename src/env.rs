//! The environment variables that this crate reads. If the builder has a setting, the variable of
//! that setting is not read.

use hmem_core::{
    CacheAttr, IfaceKind, Result,
    environment::{bad_value, boolean, text},
};

/// The variable with the names of the ifaces to start, separated by `;` or `,`.
pub(crate) const HMEM: &str = "FI_HMEM";
/// The variable that disables direct access of NICs to device memory.
pub(crate) const DISABLE_P2P: &str = "FI_HMEM_DISABLE_P2P";
/// The variable with the direct paths of domains that have no list of their own: `dma-buf`,
/// `dma-buf-pcie`, `dma-buf-data-direct` and `peer-memory`, separated by commas, or `none`.
pub(crate) const DIRECT_PATHS: &str = "HMEM_DIRECT_PATHS";
/// The variable that makes domains check direct paths by transfers, if they have no such setting of
/// their own.
pub(crate) const REACH_CHECK: &str = "HMEM_REACH_CHECK";
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

/// Returns the cache settings of the builder, and those of the environment where the builder has
/// none.
pub(crate) fn cache(by_builder: &CacheAttr) -> Result<CacheAttr> {
    let mut cache = by_builder.clone();
    if cache.max_count.is_none() {
        cache.max_count = number(CACHE_MAX_COUNT, "use a decimal number, 0 or more")?
            .map(|count| usize::try_from(count).unwrap_or(usize::MAX));
    }
    if cache.max_bytes.is_none() {
        cache.max_bytes = number(CACHE_MAX_SIZE, "use a decimal number of bytes, 0 or more")?;
    }
    if cache.merge.is_none() {
        cache.merge = boolean(CACHE_MERGE)?;
    }
    if cache.without_monitors.is_none() {
        cache.without_monitors = without_monitors()?;
    }
    Ok(cache)
}

/// Returns the result of `parse` for the text of a variable, or `None` if the variable is not set.
/// If `parse` fails, the error names the variable and its text, and has the remedy of `parse`.
pub(crate) fn parsed_by<T>(
    name: &'static str,
    parse: impl FnOnce(&str) -> Result<T>,
) -> Result<Option<T>> {
    let Some(text) = text(name)? else { return Ok(None) };
    parse(&text).map(Some).map_err(|error| {
        let remedy = error.remedy_text().unwrap_or_default().to_owned();
        bad_value(name, &text).remedy(remedy)
    })
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

/// Returns the number in a variable. `accepted` is the remedy in the error for a bad value.
fn number(name: &'static str, accepted: &'static str) -> Result<Option<u64>> {
    let Some(text) = text(name)? else { return Ok(None) };
    text.parse().map(Some).map_err(|_| bad_value(name, text).remedy(accepted))
}

/// Adds the variable `name` to an error if the variable names a library that failed to load.
/// Returns other errors unchanged.
#[cfg(any(
    feature = "cuda",
    feature = "neuron",
    feature = "rocr",
    feature = "synapseai",
    feature = "ze"
))]
pub(crate) fn of_library(name: &'static str, error: hmem_core::Error) -> hmem_core::Error {
    let selected = std::env::var_os(name).filter(|path| !path.is_empty());
    let Some(path) = selected.map(|path| path.to_string_lossy().into_owned()) else { return error };
    if error.operation() != "load library" || error.context_value("library") != Some(&path) {
        return error;
    }
    error
        .context("variable", name)
        .remedy(format!("correct {name}, or unset it to load the installed library"))
}

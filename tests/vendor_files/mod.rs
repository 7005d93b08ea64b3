//! Headers and libraries that `tests/VENDOR/fetch` downloads, for tests that need them.
//!
//! The variable `HMEM_VENDOR` (`HMEM_CUDA`, for example) lists what must be present, separated by
//! commas. A listed item that is absent fails its tests. The tests of another absent item report
//! ignored, with the reason.
#![allow(dead_code)] // Each test binary uses a part.

use std::{env, path::PathBuf};

/// Returns true if `HMEM_VENDOR` lists `item`.
pub(crate) fn is_required(vendor: &str, item: &str) -> bool {
    let variable = format!("HMEM_{}", vendor.to_uppercase());
    env::var(variable).is_ok_and(|items| items.split(',').any(|listed| listed.trim() == item))
}

/// Returns the path of a downloaded file, or the reason why a test that needs the file is ignored.
/// Panics if the file is absent and `HMEM_VENDOR` lists the item.
pub(crate) fn downloaded(vendor: &str, item: &str, file: &str) -> Result<PathBuf, String> {
    let home = || PathBuf::from(env::var_os("HOME").unwrap_or_default());
    let cache = env::var_os(format!("HMEM_{}_CACHE", vendor.to_uppercase())).map(PathBuf::from);
    let cache = cache.unwrap_or_else(|| home().join(format!(".cache/hmem-{vendor}")));
    let path = cache.join(file);
    if path.exists() {
        return Ok(path);
    }
    let reason = format!("{} is not there: run tests/{vendor}/fetch", path.display());
    assert!(!is_required(vendor, item), "{item} of {vendor} is required: {reason}");
    Err(reason)
}

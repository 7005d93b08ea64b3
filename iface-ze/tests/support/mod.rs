//! Headers and libraries for the Level Zero tests, which `tests/ze/fetch` downloads.
//!
//! `HMEM_ZE` lists what must be present, separated by commas: `headers`, `driver` (the loader and
//! Intel's driver). If a listed item is absent, the test fails. If another item is absent, the test
//! prints that it is skipped.
#![allow(dead_code)] // Each test binary uses a part.

use std::path::PathBuf;

/// Returns true if `HMEM_ZE` lists `what`.
pub(crate) fn asked_for(what: &str) -> bool {
    std::env::var("HMEM_ZE").is_ok_and(|names| names.split(',').any(|name| name.trim() == what))
}

/// Returns a file of the cache. If it is absent and not required, prints a skip and returns `None`.
pub(crate) fn cached(what: &str, file: &str) -> Option<PathBuf> {
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
    let cache = std::env::var_os("HMEM_ZE_CACHE").map(PathBuf::from);
    let path = cache.unwrap_or_else(|| home().join(".cache/hmem-ze")).join(file);
    if path.exists() {
        return Some(path);
    }
    assert!(
        !asked_for(what),
        "HMEM_ZE names {what}, and {} is not there: run tests/ze/fetch",
        path.display()
    );
    eprintln!("skipped: {} is not there (tests/ze/fetch downloads it)", path.display());
    None
}

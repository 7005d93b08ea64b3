//! Headers and drivers for the CUDA tests, which `tests/cuda/fetch` downloads.
//!
//! `HMEM_CUDA` lists what must be present, separated by commas: `headers`, `driver` (the library
//! without a device), `real` (a GPU). If a listed item is absent, the test fails. If another item
//! is absent, the test prints that it is skipped.
#![allow(dead_code)] // Each test binary uses a part.

use std::path::PathBuf;

/// Returns true if `HMEM_CUDA` lists `what`.
pub(crate) fn asked_for(what: &str) -> bool {
    std::env::var("HMEM_CUDA").is_ok_and(|names| names.split(',').any(|name| name.trim() == what))
}

/// Returns a file of the cache. If it is absent and not required, prints a skip and returns `None`.
pub(crate) fn cached(what: &str, file: &str) -> Option<PathBuf> {
    let cache = match std::env::var_os("HMEM_CUDA_CACHE") {
        Some(cache) => PathBuf::from(cache),
        None => {
            PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache/hmem-cuda")
        }
    };
    let path = cache.join(file);
    if path.exists() {
        return Some(path);
    }
    assert!(
        !asked_for(what),
        "HMEM_CUDA names {what}, and {} is not there: run tests/cuda/fetch",
        path.display()
    );
    eprintln!("skipped: {} is not there (tests/cuda/fetch downloads it)", path.display());
    None
}

//! What the CUDA tests find on the machine: headers and drivers that `tests/cuda/fetch` downloaded.
//!
//! `HMEM_CUDA` names what must be there, with commas between: `headers`, `driver` (the library
//! without a device), `real` (a GPU). What is named and absent is a failure; what is not named and
//! absent is a skip that is said.
#![allow(dead_code)] // Each test binary uses a part.

use std::path::PathBuf;

/// Whether `HMEM_CUDA` names `what`.
pub(crate) fn asked_for(what: &str) -> bool {
    std::env::var("HMEM_CUDA").is_ok_and(|names| names.split(',').any(|name| name.trim() == what))
}

/// A file of the cache. `None`, said on stderr, if it is not there and was not asked for.
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

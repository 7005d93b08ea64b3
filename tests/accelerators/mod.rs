//! The headers and the library that `tests/accelerators/fetch` downloaded, for the tests of Neuron
//! and Gaudi memory.
//!
//! `HMEM_ACCELERATORS=vendor` makes their absence a failure. It is a skip with the reason
//! otherwise.

use std::{env, fs, path::PathBuf};

use crate::trials::Skipped;

/// Returns a file of the cache.
pub(crate) fn cached(file: &str) -> Result<PathBuf, Skipped> {
    let cache = env::var_os("HMEM_ACCELERATORS_CACHE").map_or_else(
        || PathBuf::from(env::var_os("HOME").unwrap_or_default()).join(".cache/hmem-accelerators"),
        PathBuf::from,
    );
    let path = cache.join(file);
    if path.exists() {
        return Ok(path);
    }
    let asked = env::var("HMEM_ACCELERATORS").is_ok_and(|asked| asked == "vendor");
    assert!(!asked, "{} is not there: run tests/accelerators/fetch", path.display());
    Err(Skipped(format!("{} is not there (tests/accelerators/fetch)", path.display())))
}

/// Returns a header with single blanks, and none inside parentheses.
pub(crate) fn header(file: &str) -> Result<String, Skipped> {
    let text = fs::read_to_string(cached(file)?).expect("a header");
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    Ok(text.replace("( ", "(").replace(" )", ")"))
}

/// Checks that a header has each of these texts.
pub(crate) fn has(header: &str, texts: &[&str]) {
    for text in texts {
        assert!(header.contains(text), "the header has no {text}");
    }
}

/// Asserts that a header defines each of these constants with its value.
pub(crate) fn enumerates(header: &str, values: impl IntoIterator<Item = (&'static str, i32)>) {
    for (name, value) in values {
        assert!(
            header.contains(&format!("{name} = {value},")),
            "the header has no {name} = {value}"
        );
    }
}

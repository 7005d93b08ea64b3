//! Access to the headers and the library that `tests/accelerators/fetch` downloaded, for the tests
//! of Neuron and Gaudi memory. `HMEM_ACCELERATORS=vendor` makes their absence a failure.

use std::{fs, path::PathBuf};

use crate::{trials::Skipped, vendor_files::downloaded};

/// Returns the path of a downloaded file.
pub(crate) fn cached(file: &str) -> Result<PathBuf, Skipped> {
    downloaded("accelerators", "vendor", file).map_err(Skipped)
}

/// Returns the text of a header with white space normalised: single blanks, and none inside
/// parentheses.
pub(crate) fn header(file: &str) -> Result<String, Skipped> {
    let text = fs::read_to_string(cached(file)?).expect("a header");
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    Ok(text.replace("( ", "(").replace(" )", ")"))
}

/// Asserts that a header contains each of these texts.
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

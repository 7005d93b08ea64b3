//! Replacement for `archive` while the cargo feature `recordings` is off. No function reads or
//! writes an archive.

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
};

use hmem_core::{Error, ErrorKind, Result};

use super::source::SourceEntry;

fn compiled_out(operation: &'static str) -> Error {
    Error::new(ErrorKind::Unsupported, operation)
        .context("feature", "recordings")
        .remedy("build hmem with the cargo feature `recordings`, or give an unpacked folder")
}

/// Returns `None`: this build cannot decompress files.
pub(super) fn gunzip(_packed: &[u8], _limit: u64) -> Option<io::Result<Vec<u8>>> {
    tracing::debug!("/proc/config.gz is not read without the cargo feature `recordings`");
    None
}

/// Returns an error: this build cannot unpack archives.
pub(super) fn unpack(name: &str, _bytes: impl Read) -> Result<BTreeMap<String, SourceEntry>> {
    Err(compiled_out("read topology").context("file", name))
}

/// Returns an error: this build cannot pack archives.
pub(super) fn pack(_entries: &BTreeMap<String, SourceEntry>, _out: impl Write) -> Result<()> {
    Err(compiled_out("write recording"))
}

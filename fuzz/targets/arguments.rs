//! The command line of `hmem`. An input is the arguments, each on a line of its own.

use std::{ffi::OsStr, os::unix::ffi::OsStrExt};

use clap::Parser;
use hmem_cli::args::Cli;

use super::Verdict;

pub(super) fn target(data: &[u8]) -> Verdict {
    let arguments = data.split(|byte| *byte == b'\n').map(OsStr::from_bytes);
    let parsed = Cli::try_parse_from([OsStr::new("hmem")].into_iter().chain(arguments));
    parsed.map(drop).map_err(|error| format!("{:?}: {error}", error.kind()))
}

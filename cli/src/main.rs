//! The hmem command, without plug-ins.

#![deny(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    hmem_cli::main_with(|builder| builder)
}

//! Tests of the repository: its texts, lists and rules for code.

mod acceptance_ids;
mod architecture;
mod layers;
mod mutants;
mod packages;
mod page_sizes;
mod ports;
#[allow(dead_code, reason = "only `cargo xtask mutants` writes a copy")]
#[path = "../mutants/src/main.rs"]
mod program;
mod sanitizers;
mod text;
mod unsafe_code;
mod window_document;
mod workspace;

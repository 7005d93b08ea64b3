//! Tests of the command `hmem`.

mod compare_paths;
mod explain;
#[path = "../hmem_process/mod.rs"]
mod hmem_process;
#[path = "../../../tests/machine/mod.rs"]
mod machine;
mod operators;
mod perf;
mod pointers;
mod terminal;
mod topo;

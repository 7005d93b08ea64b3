//! Runs one test of this binary in a child process.

#[path = "../../../tests/child/mod.rs"]
mod process;

use crate::world::NOT_OVER_A_GPU;

/// Returns the text that the parent process passed, or `None` outside a child process.
pub(crate) fn passed() -> Option<String> {
    std::env::var("HMEM_CUDA_CHILD").ok()
}

/// Runs only the test `name` in a child process, in which [`passed`] returns `pass`.
pub(crate) fn run(name: &str, pass: &str) {
    let text = process::passes(process::command(name).env("HMEM_CUDA_CHILD", pass));
    // If the child prints why it skips a part, the parent prints it too.
    for (at, _) in text.match_indices(NOT_OVER_A_GPU) {
        println!("{}", text[at..].lines().next().unwrap_or_default());
    }
}

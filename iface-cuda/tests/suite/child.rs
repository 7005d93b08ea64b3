//! Runs one test of this binary in a child process.

use std::process::{Command, Stdio};

use crate::world::NOT_OVER_A_GPU;

/// Returns the text that the parent process passed, or `None` outside a child process.
pub(crate) fn passed() -> Option<String> {
    std::env::var("HMEM_CUDA_CHILD").ok()
}

/// Runs only the test `name` in a child process, in which [`passed`] returns `pass`.
pub(crate) fn run(name: &str, pass: &str) {
    let test = std::env::current_exe().expect("this test");
    let output = Command::new(test)
        .args(["--exact", name, "--nocapture", "--include-ignored", "--test-threads=1"])
        .env("HMEM_CUDA_CHILD", pass)
        .stdin(Stdio::null())
        .output()
        .expect("the test runs");
    let text = [output.stdout, output.stderr]
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .concat();
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    // If the child prints why it skips a part, the parent prints it too.
    for (at, _) in text.match_indices(NOT_OVER_A_GPU) {
        println!("{}", text[at..].lines().next().unwrap_or_default());
    }
}

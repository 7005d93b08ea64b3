//! Runs a test of this binary again in a process of its own, for a test that changes its process or
//! needs another environment.
#![allow(dead_code)] // Each test binary uses a part.

use std::{
    env,
    process::{Command, Stdio},
};

/// Returns the arguments by which a test binary runs only the test `name`.
pub(crate) fn arguments(name: &str) -> [&str; 5] {
    ["--exact", name, "--nocapture", "--include-ignored", "--test-threads=1"]
}

/// Returns a command that runs only the test `name` of this binary.
pub(crate) fn command(name: &str) -> Command {
    let mut command = Command::new(env::current_exe().expect("this test"));
    command.args(arguments(name));
    command
}

/// Runs a command that runs one test, and returns what it printed.
///
/// # Panics
/// Panics if the test failed, was ignored or does not exist.
pub(crate) fn passes(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().expect("the test runs");
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    text
}

/// Runs the test `name`, which calls this function, in a process of its own with variables set.
/// Returns true in that process, and false in the parent process.
///
/// # Panics
/// Panics if the test failed in its own process.
pub(crate) fn alone(name: &str, variables: &[(&str, &str)]) -> bool {
    const ALONE: &str = "HMEM_TEST_ALONE";
    if env::var(ALONE).is_ok_and(|alone| alone == name) {
        return true;
    }
    passes(command(name).env(ALONE, name).envs(variables.iter().copied()));
    false
}

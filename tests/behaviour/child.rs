//! Runs a test in a child process, for properties of a whole process: file descriptors, standard
//! output and the environment.

use std::{
    env,
    process::{Command, Output},
};

use crate::config::TestConfig;

const ALONE: &str = "HMEM_TEST_ALONE";

/// Returns whether [`output`] started this process for the test `name`.
pub(crate) fn is_alone(name: &str) -> bool {
    env::var(ALONE).is_ok_and(|alone| alone == name)
}

/// Runs the test `name` (its path in this binary) in a child process and returns the child's
/// output.
pub(crate) fn output(name: &str, variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env::current_exe().expect("the test binary"));
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]).env(ALONE, name);
    command.envs(variables.iter().copied());
    command.output().expect("start a child")
}

/// Runs `body` in a child process that runs only the calling test, `name` (its path in this
/// binary). Panics if the child fails.
pub(crate) fn alone(name: &str, body: impl FnOnce()) {
    alone_with(name, &[], body);
}

fn alone_with(name: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
    if is_alone(name) {
        return body();
    }
    let output = output(name, variables);
    let text = String::from_utf8_lossy(&output.stdout);
    let ran = text.contains("1 passed") || text.contains("1 failed");
    assert!(ran, "{name} is no test of this binary:\n{text}");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name} failed in its own process:\n{text}\n{errors}");
}

/// Like [`alone`], but the child runs the test in the test configuration `config` only.
pub(crate) fn alone_in(config: &TestConfig, name: &str, body: impl FnOnce()) {
    let config = config.to_string();
    alone_with(name, &[("HMEM_TEST_CONFIG", &*config)], body);
}

/// Returns the number of open file descriptors of this process.
pub(crate) fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("procfs").count()
}

//! Runs `hmem` as a process and checks its output. `HMEM_PROGRAM` overrides the path of the binary,
//! for machines without Cargo.
#![allow(dead_code, reason = "each test binary uses its part")]

pub(crate) mod schema;

use std::{
    io::{BufRead, BufReader},
    process::{Child, ChildStderr, Command, Output, Stdio},
};

use serde_json::Value;

/// Returns the path of the `hmem` executable.
pub(crate) fn program() -> String {
    std::env::var("HMEM_PROGRAM").unwrap_or_else(|_| env!("CARGO_BIN_EXE_hmem").to_owned())
}

/// The environment variables that the command reads.
const VARIABLES: [&str; 24] = [
    "CLICOLOR_FORCE",
    "COLUMNS",
    "FI_HMEM",
    "FI_HMEM_DISABLE_P2P",
    "FI_MR_CACHE_MAX_COUNT",
    "FI_MR_CACHE_MAX_SIZE",
    "FI_MR_CACHE_MERGE_REGIONS",
    "FI_MR_CACHE_MONITOR",
    "FI_MR_CUDA_CACHE_MONITOR_ENABLED",
    "FI_MR_ROCR_CACHE_MONITOR_ENABLED",
    "FI_MR_ZE_CACHE_MONITOR_ENABLED",
    "HMEM_CUDA_LIBRARY",
    "HMEM_CUDA_MONITOR",
    "HMEM_DIRECT_PATHS",
    "HMEM_REACH_CHECK",
    "HMEM_HLTHUNK_LIBRARY",
    "HMEM_NEURON_LIBRARY",
    "HMEM_NEURON_START_RUNTIME",
    "HMEM_ROCR_LIBRARY",
    "HMEM_SYNAPSEAI_START_RUNTIME",
    "HMEM_SYNAPSEAI_LIBRARY",
    "HMEM_VERBS_PCIE_MAPPING",
    "HMEM_ZE_LIBRARY",
    "NO_COLOR",
];

/// Returns the command, cleared of the environment variables that would change its output.
pub(crate) fn hmem(subcommand: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program());
    for name in VARIABLES {
        command.env_remove(name);
    }
    command.arg(subcommand).args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

pub(crate) fn perf(arguments: &[&str]) -> Output {
    hmem("perf", arguments).output().expect("the command runs")
}

pub(crate) fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

/// Asserts that an error is one readable line that contains all `words`.
pub(crate) fn one_line(error: &str, words: &[&str]) {
    assert!(error.starts_with("error: ") && error.trim_end().lines().count() == 1, "{error}");
    assert!(!error.trim_end().contains(|c: char| c.is_control()), "{error:?}");
    for word in words {
        assert!(error.contains(word), "{word} is not in: {error}");
    }
}

/// Asserts that the command failed with exit status `code`, all `words` on stderr and an empty
/// stdout.
pub(crate) fn refused(output: &Output, code: i32, words: &[&str]) {
    assert_eq!(output.status.code(), Some(code), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "");
    let error = text(&output.stderr);
    assert!(error.starts_with("error: "), "{error}");
    assert!(error.lines().skip(1).all(|line| line.starts_with("  ")), "{error}");
    assert!(error.lines().all(|line| !line.contains(|c: char| c.is_control())), "{error:?}");
    for word in words {
        assert!(error.contains(word), "{word} is not in: {error}");
    }
}

/// Returns the JSON document that a successful run printed.
pub(crate) fn document_of(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Asserts that a client's JSON matches its schema and reports verified bytes. `paths`
/// are the expected paths of the client and of the server.
pub(crate) fn is_as_documented(document: &Value, paths: [&str; 2]) {
    schema::matches("perf", document);
    assert_eq!(document["role"], "client");
    for (side, path) in [("local", paths[0]), ("remote", paths[1])] {
        let side = &document[side];
        assert_eq!(side["path"], path, "{side}");
        let trace = side["trace"].as_array().expect("a trace");
        assert!(
            trace.last().is_some_and(|last| last["error"].is_null() && last["path"] == path),
            "{side}"
        );
    }
    for row in document["results"].as_array().expect("results") {
        assert_eq!(row["verified"], true);
        let bandwidth = &row["bandwidth"];
        assert!(bandwidth["gib_per_s"].as_f64().is_some_and(|speed| speed > 0.0), "{row}");
        let latency = &row["latency"];
        let quantiles = ["min_us", "p50_us", "p90_us", "p99_us", "p999_us", "max_us"];
        let us: Vec<_> = quantiles.iter().filter_map(|name| latency[name].as_f64()).collect();
        assert!(us.len() == quantiles.len() && us.is_sorted() && us[0] > 0.0, "{row}");
    }
}

/// A listening `hmem perf` server. Dropping this value kills the process.
pub(crate) struct Server {
    pub(crate) process: Child,
    stderr: BufReader<ChildStderr>,
    pub(crate) port: u16,
}

impl Server {
    pub(crate) fn start(arguments: &[&str]) -> Self {
        let all = ["--server", "--bind", "127.0.0.1", "--port", "0"];
        Self::spawn(hmem("perf", &[&all[..], arguments].concat()))
    }

    /// Starts a server with the port 0, and waits until it listens.
    pub(crate) fn spawn(mut command: Command) -> Self {
        let mut process = command.spawn().expect("the command starts");
        let mut stderr = BufReader::new(process.stderr.take().expect("a pipe"));
        let mut line = String::new();
        stderr.read_line(&mut line).expect("the server says where it listens");
        let address = line.trim().strip_prefix("listening on ");
        let port = address.and_then(|address| address.rsplit(':').next()?.parse().ok());
        Self { port: port.unwrap_or_else(|| panic!("{line}")), process, stderr }
    }

    /// Returns `arguments` plus the arguments that connect a client to this server.
    pub(crate) fn client(&self, arguments: &[&str]) -> Vec<String> {
        let port = self.port.to_string();
        [&["127.0.0.1", "--port", &port], arguments]
            .concat()
            .into_iter()
            .map(str::to_owned)
            .collect()
    }

    pub(crate) fn next_line(&mut self) -> String {
        let mut line = String::new();
        self.stderr.read_line(&mut line).expect("UTF-8");
        line
    }

    pub(crate) fn status(&mut self) -> Option<i32> {
        self.process.wait().expect("the process ends").code()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if matches!(self.process.try_wait(), Ok(None)) {
            self.process.kill().expect("the process is killed");
            self.process.wait().expect("the process ends");
        }
    }
}

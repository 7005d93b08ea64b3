//! Tests of the `cache` benchmark, for `cargo test`. They check the JSON report of one quick run.

use std::{
    collections::BTreeSet,
    process::{Command, ExitCode},
    sync::{Arc, OnceLock},
};

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use serde_json::Value;

use super::{
    figures::{DIFFERENT, MISS, ONE, RANDOM, SAME},
    peers::{FOLDERS, UCX_OF},
    report::SCHEMA,
};

/// Runs the tests of this module as a test binary does, and returns the exit code.
pub(super) fn run() -> ExitCode {
    // Both tests check the report of the same run.
    let run: Arc<OnceLock<Value>> = Arc::default();
    let same = Arc::clone(&run);
    let trials = vec![
        Trial::test("quick_run_reports_every_figure", move || {
            every_figure(run.get_or_init(quick_run));
            Ok(())
        }),
        Trial::ignorable_test(
            "every_cache_figure_is_compared_with_each_installed_ucx",
            move || each_ucx(same.get_or_init(quick_run)),
        ),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn quick_run() -> Value {
    let program = std::env::current_exe().expect("a running program has a path");
    let mut command = Command::new(program);
    command.args(["--quick", "--json"]).env_remove(FOLDERS);
    let output = command.output().expect("this program starts");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {complaint}", output.status);
    serde_json::from_slice(&output.stdout).expect("stdout is one JSON document")
}

fn list<'a>(document: &'a Value, field: &str) -> &'a [Value] {
    document[field].as_array().unwrap_or_else(|| panic!("{field} is not a list: {document}"))
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_else(|| panic!("{field} is not a string: {value}"))
}

fn every_figure(document: &Value) {
    assert_eq!(document["schema"], SCHEMA);
    let rows = list(document, "rows");
    for row in rows {
        for field in ["regions", "threads", "ours_ns"] {
            assert!(row[field].is_number(), "{field}: {row}");
        }
        for field in ["peer_ns", "ratio"] {
            assert_eq!(row[field].is_null(), row["peer"].is_null(), "{field}: {row}");
            assert!(row[field].is_null() || row[field].as_f64() > Some(0.0), "{field}: {row}");
        }
        assert!(row["peer"].is_null() || !text(row, "peer").is_empty(), "{row}");
        assert!(row["target"].is_null() || row["target"].is_number(), "{row}");
        assert!(row["ours_ns"].as_f64() > Some(0.0), "{row}");
    }
    let figures: BTreeSet<_> = rows.iter().map(|row| text(row, "figure")).collect();
    for figure in [
        ONE,
        RANDOM,
        SAME,
        DIFFERENT,
        MISS,
        "lookup, median, while a registration takes 1 s",
        "lookup, 99.9th percentile, while a registration takes 1 s",
        "owner of a host address",
        "owner of a device address",
    ] {
        assert!(figures.contains(figure), "{figure} is not in {figures:?}");
    }
    let skipped: Vec<_> =
        list(document, "skipped").iter().map(|entry| text(entry, "what")).collect();
    let hooks = !skipped.contains(&"hmem with memory hooks");
    assert_eq!(figures.contains("mmap and munmap, memhooks"), hooks);
    let userfaultfd = !skipped.contains(&"userfaultfd");
    assert_eq!(figures.contains("mmap, miss and munmap, userfaultfd"), userfaultfd);
    assert_eq!(list(document, "memory").len(), if hooks { 6 } else { 5 });
}

/// Checks that the report compares every cache figure with each installed UCX. Reports the test as
/// ignored if no UCX is installed.
fn each_ucx(document: &Value) -> Result<Completion, Failed> {
    let peers: BTreeSet<_> = list(document, "peers").iter().map(|peer| peer.as_str()).collect();
    let rows = list(document, "rows");
    for peer in &peers {
        let mut figures: Vec<_> = rows
            .iter()
            .filter(|row| row["peer"].as_str() == *peer)
            .map(|row| (text(row, "figure"), row["regions"].as_u64(), row["threads"].as_u64()))
            .collect();
        figures.sort_unstable();
        let cached: Vec<_> =
            figures.iter().copied().filter(|(figure, ..)| !figure.starts_with("owner")).collect();
        let one_each = [
            (RANDOM, 1_000, 1),
            (RANDOM, 100_000, 1),
            (DIFFERENT, 1_000, 2),
            (ONE, 1, 1),
            (SAME, 1, 2),
            (MISS, 1, 1),
            (MISS, 1_000, 1),
            (MISS, 100_000, 1),
        ];
        assert_eq!(cached, one_each.map(|(figure, n, threads)| (figure, Some(n), Some(threads))));
        assert_eq!(figures.len() - cached.len(), 8, "memory types beside {peer:?}: {figures:?}");
    }
    let absent: Vec<_> = list(document, "skipped")
        .iter()
        .filter(|skipped| text(skipped, "what").starts_with(UCX_OF))
        .map(|skipped| format!("{}: {}", text(skipped, "what"), text(skipped, "why")))
        .collect();
    // Every run looks for the system's UCX and for that of the Python package.
    assert!(peers.len() + absent.len() >= 2, "{peers:?}, {absent:?}");
    Ok(if peers.is_empty() {
        Completion::ignored_with(absent.join("; "))
    } else {
        Completion::Completed
    })
}

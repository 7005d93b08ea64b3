//! `hmem perf --compare-paths`: measures each path to a device's memory, and prints the setting.

use std::process::Output;

use crate::hmem_process::{document_of, perf, refused, schema, text};

const COMPARE: [&str; 5] =
    ["--loopback", "--compare-paths", "--iterations", "50", "--size=8,64KiB"];

fn compare(arguments: &[&str]) -> Output {
    perf(&[&COMPARE[..], arguments].concat())
}

/// LIFE-06
///
/// The software NIC imports dma-bufs, and has neither peer memory nor Data Direct.
#[test]
fn paths_of_a_device_are_measured_and_the_setting_lists_those_that_work() {
    let document = document_of(&compare(&["--iface", "simulated", "--json"]));
    schema::matches("compare-paths", &document);
    assert_eq!((&document["bytes"], &document["device"]), (&65536.into(), &0.into()));
    let paths = document["paths"].as_array().expect("paths");
    let names: Vec<_> = paths.iter().map(|path| path["path"].as_str().expect("a name")).collect();
    let all = ["dma-buf", "dma-buf-pcie", "dma-buf-data-direct", "peer-memory", "staged"];
    assert_eq!(names, all);
    let setting = document["setting"].as_str().expect("a setting");
    let listed = setting.strip_prefix("HMEM_DIRECT_PATHS=").expect("the variable").to_owned();
    for path in paths {
        let name = path["path"].as_str().expect("a name");
        let works = ["dma-buf", "dma-buf-pcie", "staged"].contains(&name);
        assert_eq!(path["error"].is_null(), works, "{path}");
        let speed = |of: &str| path[of]["gib_per_s"].as_f64();
        assert_eq!(speed("write").is_some_and(|speed| speed > 0.0), works, "{path}");
        assert_eq!(speed("read").is_some(), works, "{path}");
        assert!(!path["trace"].as_array().expect("a trace").is_empty(), "{path}");
        assert!(works || !listed.split(',').any(|listed| listed == name), "{setting}");
    }
    let trace = &paths[4]["trace"];
    assert_eq!(trace[trace.as_array().expect("a trace").len() - 1]["path"], "staged");
}

#[test]
fn text_names_the_reason_of_a_path_that_does_not_work_and_the_setting() {
    let output = compare(&["--iface", "simulated"]);
    let printed = text(&output.stdout);
    for words in ["Paths of simulated:0", "peer-memory:", "Data Direct", "HMEM_DIRECT_PATHS="] {
        assert!(printed.contains(words), "{words} is not in: {printed}");
    }
}

#[test]
fn comparison_of_host_memory_of_one_operation_or_with_counts_is_refused() {
    refused(&perf(&COMPARE), 2, &["host memory has one path only", "--iface"]);
    refused(&perf(&[&COMPARE[..], &["--op", "read"]].concat()), 2, &["--op"]);
    refused(&perf(&["--compare-paths", "127.0.0.1"]), 2, &["--compare-paths"]);
    refused(&perf(&[&COMPARE[..], &["--metrics"]].concat()), 2, &["--metrics"]);
}

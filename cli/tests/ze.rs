//! The built command with a fake Level Zero loader library, which `HMEM_ZE_LIBRARY` names.

use std::{
    path::PathBuf,
    process::{Command, Output},
};

use serde_json::Value;

/// Returns the path of the fake loader library, which Cargo builds into the folder of this test.
fn library() -> PathBuf {
    // The only use of the crate by name; otherwise it would be an unused dependency.
    let _: fn() -> Vec<hmem_fake_ze::Profile> = hmem_fake_ze::Profile::all;
    let test = std::env::current_exe().expect("the path of this test");
    let library = test.parent().expect("a folder").join("libhmem_fake_ze.so");
    assert!(library.exists(), "{} was not built", library.display());
    library
}

fn hmem_with(driver: &str, variables: &[(&str, &str)], arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hmem"));
    for name in ["FI_HMEM", "FI_HMEM_DISABLE_P2P", "NO_COLOR", "CLICOLOR_FORCE"] {
        command.env_remove(name);
    }
    command.env("HMEM_ZE_LIBRARY", library()).env("HMEM_FAKE_ZE", driver);
    command.envs(variables.iter().copied());
    command.args(arguments).output().expect("the binary runs")
}

fn hmem(driver: &str, arguments: &[&str]) -> Output {
    hmem_with(driver, &[], arguments)
}

fn text(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&both).into_owned()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("{error}: {}", text(output));
    })
}

/// DIAG-01 HM-12
///
/// An `FI_HMEM` filter that does not name Level Zero excludes its devices.
#[test]
fn info_lists_the_devices_of_a_loader_library_with_path_and_monitor() {
    let output = hmem("current", &["info"]);
    let listed = text(&output);
    assert!(output.status.success(), "{listed}");
    for words in ["Intel Test", "ze:0", "ze:1", "0000:3b:02.1", "dma-buf", "ze-identity"] {
        assert!(listed.contains(words), "{words} is not in:\n{listed}");
    }
    let filtered = text(&hmem_with("current", &[("FI_HMEM", "system")], &["info"]));
    assert!(!filtered.contains("Intel Test"), "{filtered}");
}

/// CACHE-12 MON-09
#[test]
fn info_shows_the_variable_that_disables_the_monitor() {
    const VARIABLE: &str = "FI_MR_ZE_CACHE_MONITOR_ENABLED";
    for (enabled, left_out) in [("1", false), ("0", true)] {
        let info = json(&hmem_with("current", &[(VARIABLE, enabled)], &["info", "--json"]));
        let monitors = info["device_monitors"].as_array().expect("monitors");
        let of_ze = monitors.iter().find(|one| one["iface"] == "ze").expect("ze is listed");
        assert_eq!(of_ze["disabled_by"] == VARIABLE, left_out, "{of_ze}");
        assert_eq!(of_ze["name"] == "ze-identity", !left_out, "{of_ze}");
    }
}

/// HM-04 DIAG-03
///
/// A failing loader does not disable other ifaces.
#[test]
fn loader_that_does_not_start_is_listed_with_its_reason_and_remedy() {
    for (driver, words) in [
        ("current;zeInit=2013265921", ["ZE_RESULT_ERROR_UNINITIALIZED", "/dev/dri/renderD*"]),
        ("current;devices=0", ["zeDeviceGet", "ZE_AFFINITY_MASK"]),
    ] {
        let output = hmem(driver, &["info", "--json"]);
        assert!(output.status.success());
        let info = json(&output);
        let ifaces = info["ifaces"].as_array().expect("ifaces");
        let ze = ifaces.iter().find(|iface| iface["name"] == "ze").expect("ze is listed");
        for word in words {
            assert!(ze.to_string().contains(word), "{word} is not in {ze}");
        }
        assert!(
            info["devices"].to_string().contains("simulated"),
            "the other ifaces stay available"
        );
    }
}

/// DIAG-02
#[test]
fn check_moves_verified_bytes_of_every_kind_of_level_zero_memory() {
    for (driver, exports) in [("current", true), ("1.4", true), ("without-exports", false)] {
        let output = hmem(driver, &["check", "--iface", "ze", "--quick", "--json"]);
        assert!(output.status.success(), "{driver}: {}", text(&output));
        let report = json(&output);
        for kind in ["device", "host", "managed"] {
            assert!(report.to_string().contains(&format!("\"{kind}\"")), "{driver}: no {kind}");
        }
        let rows = report["rows"].as_array().expect("rows");
        let over_dma_buf = rows.iter().any(|row| row["path"] == "dma-buf");
        assert_eq!(over_dma_buf, exports, "{driver}: {report}");
    }
}

/// DIAG-02
#[test]
fn check_fails_with_a_driver_that_cannot_copy() {
    let driver = "current;zeCommandListAppendMemoryCopy=1879048193";
    let output = hmem(driver, &["check", "--iface", "ze", "--quick"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(text(&output).contains("ZE_RESULT_ERROR_DEVICE_LOST"), "{}", text(&output));
}

#[test]
fn perf_measures_transfers_between_level_zero_devices_and_verifies_them() {
    let arguments =
        ["perf", "--loopback", "--iface", "ze", "--size", "4KiB", "--iterations", "20", "--json"];
    let output = hmem("current", &arguments);
    let listed = text(&output);
    assert!(output.status.success(), "{listed}");
    assert!(listed.contains("\"ze\"") && listed.contains("dma-buf"), "{listed}");
}

/// P2P-03 DIAG-03
#[test]
fn explain_shows_the_reason_for_a_refused_export() {
    let arguments = ["explain", "--iface", "ze", "--device", "0"];
    let output = hmem("without-exports", &arguments);
    let listed = text(&output);
    assert!(output.status.success(), "{listed}");
    for words in ["memoryAllocationExportTypes", "staged", "ze_external_memory_export_desc_t"] {
        assert!(listed.contains(words), "{words} is not in:\n{listed}");
    }
    let output = hmem("current", &arguments);
    assert!(output.status.success() && text(&output).contains("dma-buf"), "{}", text(&output));
}

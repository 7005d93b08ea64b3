//! The built command with a fake HSA runtime library, which `HMEM_ROCR_LIBRARY` names.

use std::{
    path::PathBuf,
    process::{Command, Output},
};

use serde_json::Value;

/// Returns the path of the fake runtime library, which Cargo builds into the folder of this test.
fn library() -> PathBuf {
    // The only use of the crate by name; otherwise it would be an unused dependency.
    let _: fn() -> Vec<hmem_fake_rocr::Profile> = hmem_fake_rocr::Profile::all;
    let test = std::env::current_exe().expect("the path of this test");
    let library = test.parent().expect("a folder").join("libhmem_fake_rocr.so");
    assert!(library.exists(), "{} was not built", library.display());
    library
}

fn hmem(runtime: &str, variables: &[(&str, &str)], arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hmem"));
    for name in ["FI_HMEM", "FI_HMEM_DISABLE_P2P", "NO_COLOR", "CLICOLOR_FORCE"] {
        command.env_remove(name);
    }
    command.env("HMEM_ROCR_LIBRARY", library()).env("HMEM_FAKE_ROCR", runtime);
    command.envs(variables.iter().copied());
    command.args(arguments).output().expect("the binary runs")
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("{error}: {}", String::from_utf8_lossy(&output.stderr));
    })
}

fn text(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout);
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn iface(info: &Value) -> &Value {
    let ifaces = info["ifaces"].as_array().expect("ifaces");
    ifaces.iter().find(|iface| iface["name"] == "rocr").expect("rocr is listed")
}

/// DIAG-01 HM-01
#[test]
fn info_lists_the_devices_of_a_runtime_library_and_the_path_to_each_nic() {
    let output = hmem("7.2", &[], &["info"]);
    assert!(output.status.success());
    let said = text(&output);
    for words in ["rocr:1", "0000:c2:02.1", "free-callback", "pcie-mapping", "dma-buf"] {
        assert!(said.contains(words), "{words} is not in: {said}");
    }
}

/// CACHE-12 MON-04
///
/// The value 0 of the variable disables the monitor of ROCr memory. The command refuses a value
/// that it cannot parse.
#[test]
fn info_shows_the_monitor_and_the_variable_that_disables_it() {
    const VARIABLE: &str = "FI_MR_ROCR_CACHE_MONITOR_ENABLED";
    let monitor = |variables: &[(&str, &str)]| {
        let info = json(&hmem("7.2", variables, &["info", "--json"]));
        let monitors = info["device_monitors"].as_array().expect("monitors");
        monitors.iter().find(|one| one["iface"] == "rocr").expect("rocr has one").clone()
    };
    let on = monitor(&[]);
    assert_eq!(on["name"], "rocr-callback", "{on}");
    let off = monitor(&[(VARIABLE, "0")]);
    assert_ne!(off["name"], "rocr-callback", "{off}");
    assert!(off.to_string().contains(VARIABLE), "{off}");
    let output = hmem("7.2", &[(VARIABLE, "maybe")], &["info"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains(VARIABLE), "a bad value is refused");
    assert!(!output.status.success());
}

/// DIAG-01 HM-04
#[test]
fn runtime_that_does_not_start_is_listed_with_its_reason_and_remedy() {
    let output = hmem("7.2;hsa_init=4104", &[], &["info", "--json"]);
    assert!(output.status.success(), "the other ifaces stay available");
    let info = json(&output);
    let rocr = iface(&info).to_string();
    for words in ["HSA_STATUS_ERROR_OUT_OF_RESOURCES", "hsa_init"] {
        assert!(rocr.contains(words), "{words} is not in {rocr}");
    }
}

/// DIAG-02 HM-12
///
/// The check is filtered to ROCr memory.
#[test]
fn check_moves_verified_bytes_of_every_kind_of_memory() {
    let refuses = "7.2;hsa_amd_portable_export_dmabuf_v2=47";
    for (runtime, path) in [("7.2", "dma-buf"), (refuses, "staged")] {
        let variables = [("FI_HMEM", "rocr")];
        let output = hmem(runtime, &variables, &["check", "--iface", "rocr", "--quick", "--json"]);
        let report = json(&output);
        assert!(output.status.success(), "{report}");
        let rows = report["rows"].as_array().expect("rows");
        for kind in ["device", "host"] {
            assert!(
                rows.iter().any(|row| row["memory"] == kind),
                "{kind} was not checked: {report}"
            );
        }
        assert!(rows.iter().any(|row| row["path"] == path), "none by {path}: {report}");
    }
    let broken = "7.2;hsa_amd_memory_async_copy=4096";
    let output = hmem(broken, &[], &["check", "--iface", "rocr", "--quick"]);
    assert_eq!(output.status.code(), Some(1), "a runtime that cannot copy fails the check");
}

/// DIAG-03 P2P-03
#[test]
fn explain_shows_the_reason_for_a_refused_export() {
    let explain =
        |runtime: &str| text(&hmem(runtime, &[], &["explain", "--iface", "rocr", "--device", "0"]));
    let fds = explain("7.2;hsa_amd_portable_export_dmabuf_v2=4104");
    assert!(fds.contains("raise the limit (`ulimit -n`)"), "{fds}");
    let none = explain("7.2;hsa_amd_portable_export_dmabuf_v2=4099");
    assert!(none.contains("allocate from a GPU's pool"), "{none}");
}

#[test]
fn perf_measures_transfers_between_devices_and_verifies_them() {
    let arguments =
        ["perf", "--loopback", "--iface", "rocr", "--size", "4KiB", "--iterations", "20", "--json"];
    let output = hmem("7.2", &[], &arguments);
    let said = text(&output);
    assert!(output.status.success(), "{said} {}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("\"rocr\"") && said.contains("dma-buf"), "{said}");
}

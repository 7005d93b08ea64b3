//! The built command with fake vendor libraries, which environment variables name.

mod accelerators;
mod cuda;
#[path = "../hmem_process/mod.rs"]
mod hmem_process;
#[path = "../../../tests/machine/mod.rs"]
mod machine;

use std::{path::PathBuf, process::Output};

use hmem_fake_accelerators as _;
use hmem_fake_cuda as _;
use hmem_fake_rocr as _;
use hmem_fake_ze as _;
use hmem_process::{hmem, text};
use serde_json::Value;

/// A fake library of one vendor.
#[derive(Clone, Copy, Debug)]
struct Vendor {
    iface: &'static str,
    /// The environment variable that names the library, and the name of the file.
    library: (&'static str, &'static str),
    /// The environment variable that chooses the driver which the library simulates.
    variable: &'static str,
    /// A driver without faults.
    current: &'static str,
}

const CUDA: Vendor = Vendor {
    iface: "cuda",
    library: ("HMEM_CUDA_LIBRARY", "libhmem_fake_cuda.so"),
    variable: "HMEM_FAKE_CUDA",
    current: "580-open",
};
const ROCR: Vendor = Vendor {
    iface: "rocr",
    library: ("HMEM_ROCR_LIBRARY", "libhmem_fake_rocr.so"),
    variable: "HMEM_FAKE_ROCR",
    current: "7.2",
};
const ZE: Vendor = Vendor {
    iface: "ze",
    library: ("HMEM_ZE_LIBRARY", "libhmem_fake_ze.so"),
    variable: "HMEM_FAKE_ZE",
    current: "current",
};

/// Returns the path of a fake library, which Cargo builds into the folder of this test.
fn library(file: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let library = test.parent().expect("a folder").join(file);
    assert!(library.exists(), "{} was not built", library.display());
    library
}

impl Vendor {
    fn run(&self, driver: &str, variables: &[(&str, &str)], arguments: &[&str]) -> Output {
        let (variable, file) = self.library;
        let mut command = hmem(arguments[0], &arguments[1..]);
        command.env(variable, library(file)).env(self.variable, driver);
        command.envs(variables.iter().copied()).output().expect("the binary runs")
    }

    /// Returns the JSON document that `hmem info` prints.
    fn info(&self, driver: &str, variables: &[(&str, &str)]) -> Value {
        json(&self.run(driver, variables, &["info", "--json"]))
    }

    /// Returns the entry of this vendor's iface in a list of `hmem info`.
    fn entry<'a>(&self, info: &'a Value, list: &str, name: &str) -> &'a Value {
        let entries = info[list].as_array().expect("a list");
        entries.iter().find(|entry| entry[name] == self.iface).expect("the iface is listed")
    }
}

/// Returns the output of a successful run, with one space between words.
fn succeeded(output: &Output) -> String {
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout).split_whitespace().collect::<Vec<_>>().join(" ")
}

fn json(output: &Output) -> Value {
    let document = serde_json::from_slice(&output.stdout);
    document.unwrap_or_else(|error| panic!("{error}: {}", text(&output.stderr)))
}

#[track_caller]
fn assert_words(said: &str, words: &[&str]) {
    for words in words {
        assert!(said.contains(words), "{words} is not in: {said}");
    }
}

/// DIAG-01 HM-01 HM-12
///
/// An `FI_HMEM` filter that does not name the vendor's iface excludes its devices.
#[test]
fn info_lists_the_devices_of_a_library_with_paths_and_monitor() {
    for (vendor, words) in [
        (CUDA, &["NVIDIA Fake 580-open 0", "cuda:0", "cuda:1", "0000:3b:00.0", "dma-buf"][..]),
        (ROCR, &["rocr:1", "0000:c2:02.1", "free-callback", "pcie-mapping", "dma-buf"]),
        (ZE, &["Intel Test", "ze:0", "ze:1", "0000:3b:02.1", "dma-buf", "ze-identity"]),
    ] {
        let listed = succeeded(&vendor.run(vendor.current, &[], &["info"]));
        assert_words(&listed, words);
        let filtered = vendor.run(vendor.current, &[("FI_HMEM", "system")], &["info"]);
        assert!(!succeeded(&filtered).contains(words[0]), "{filtered:?}");
    }
}

/// DIAG-01 DIAG-03 HM-04
///
/// A failing driver does not disable other ifaces.
#[test]
fn driver_that_does_not_start_is_listed_with_reason_and_remedy() {
    for (vendor, driver, words) in [
        (
            CUDA,
            "580-open;cuInit=34",
            ["CUDA_ERROR_STUB_LIBRARY (34)", "stub: take its folder out of LD_LIBRARY_PATH"],
        ),
        (CUDA, "580-open;devices=0", ["CUDA_ERROR_NO_DEVICE (100)", "CUDA_VISIBLE_DEVICES"]),
        (
            CUDA,
            "580-open;cuInit=803",
            ["CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)", "reload the module"],
        ),
        (ROCR, "7.2;hsa_init=4104", ["HSA_STATUS_ERROR_OUT_OF_RESOURCES", "hsa_init"]),
        (ZE, "current;zeInit=2013265921", ["ZE_RESULT_ERROR_UNINITIALIZED", "/dev/dri/renderD*"]),
        (ZE, "current;devices=0", ["zeDeviceGet", "ZE_AFFINITY_MASK"]),
    ] {
        let output = vendor.run(driver, &[], &["info", "--json"]);
        assert!(output.status.success(), "{driver}");
        let info = json(&output);
        assert_words(&vendor.entry(&info, "ifaces", "name").to_string(), &words);
        let devices = info["devices"].to_string();
        assert!(devices.contains("simulated"), "the other ifaces stay available: {devices}");
    }
}

/// CACHE-12 MON-04 MON-09
///
/// The value 0 of the variable disables the monitor. The command refuses a value that it cannot
/// parse.
#[test]
fn info_shows_the_variable_that_disables_the_monitor() {
    for (vendor, variable, name) in [
        (ROCR, "FI_MR_ROCR_CACHE_MONITOR_ENABLED", "rocr-callback"),
        (ZE, "FI_MR_ZE_CACHE_MONITOR_ENABLED", "ze-identity"),
    ] {
        for (enabled, left_out) in [("1", false), ("0", true)] {
            let info = vendor.info(vendor.current, &[(variable, enabled)]);
            let monitor = vendor.entry(&info, "device_monitors", "iface");
            assert_eq!(monitor["disabled_by"] == variable, left_out, "{monitor}");
            assert_eq!(monitor["name"] == name, !left_out, "{monitor}");
        }
        let refused = vendor.run(vendor.current, &[(variable, "maybe")], &["info"]);
        assert_eq!(refused.status.code(), Some(2));
        assert_words(text(&refused.stderr), &[variable]);
    }
}

/// DIAG-02 HM-12
#[test]
fn check_moves_verified_bytes_of_every_kind_of_memory() {
    let of_cuda = &["device", "host", "managed", "stream-ordered", "virtual"][..];
    let of_ze = &["device", "host", "managed"];
    let refusing = "7.2;hsa_amd_portable_export_dmabuf_v2=47";
    for (vendor, driver, kinds, over_dma_buf) in [
        (CUDA, "580-open", of_cuda, true),
        (CUDA, "535-closed", of_cuda, false),
        (ROCR, "7.2", &["device", "host"], true),
        (ROCR, refusing, &["device", "host"], false),
        (ZE, "current", of_ze, true),
        (ZE, "1.4", of_ze, true),
        (ZE, "without-exports", of_ze, false),
    ] {
        let arguments = ["check", "--iface", vendor.iface, "--quick", "--json"];
        let output = vendor.run(driver, &[("FI_HMEM", vendor.iface)], &arguments);
        let report = json(&output);
        assert!(output.status.success(), "{driver}: {report}");
        let rows = report["rows"].as_array().expect("rows");
        for kind in kinds {
            let checked = rows.iter().any(|row| row["memory"] == *kind);
            assert!(checked, "{driver}: {kind} was not checked: {report}");
        }
        for (path, expected) in [("dma-buf", over_dma_buf), ("staged", true)] {
            let checked = rows.iter().any(|row| row["memory"] == "device" && row["path"] == path);
            assert_eq!(checked, expected, "{driver}: device memory over {path}: {report}");
        }
    }
}

/// DIAG-02
///
/// A failing driver ends the check with status 1.
#[test]
fn check_fails_with_a_driver_that_cannot_copy() {
    for (vendor, driver, code) in [
        (CUDA, "580-open;cuMemcpyAsync=700", "CUDA_ERROR_ILLEGAL_ADDRESS (700)"),
        (ROCR, "7.2;hsa_amd_memory_async_copy=4096", "HSA_STATUS_ERROR"),
        (ZE, "current;zeCommandListAppendMemoryCopy=1879048193", "ZE_RESULT_ERROR_DEVICE_LOST"),
    ] {
        let output = vendor.run(driver, &[], &["check", "--iface", vendor.iface, "--quick"]);
        assert_eq!(output.status.code(), Some(1), "{driver}: {}", text(&output.stdout));
        assert_words(text(&output.stdout), &[code]);
    }
}

#[test]
fn perf_measures_transfers_between_devices_and_verifies_them() {
    for vendor in [CUDA, ROCR, ZE] {
        let on = ["perf", "--loopback", "--iface", vendor.iface];
        let arguments = [&on[..], &["--size", "4KiB", "--iterations", "20", "--json"]].concat();
        let said = succeeded(&vendor.run(vendor.current, &[], &arguments));
        assert_words(&said, &[&format!("\"{}\"", vendor.iface), "dma-buf"]);
        assert!(!said.contains("staged"), "{said}");
    }
}

/// P2P-03 DIAG-03
///
/// The printed reason is the driver's error.
#[test]
fn explain_shows_the_reason_for_a_refused_export() {
    for (vendor, driver, words) in [
        (CUDA, "535-closed", &["DMA_BUF_SUPPORTED", "staged"][..]),
        (CUDA, "580-open", &["dma-buf"]),
        (ROCR, "7.2;hsa_amd_portable_export_dmabuf_v2=4104", &["raise the limit (`ulimit -n`)"]),
        (ROCR, "7.2;hsa_amd_portable_export_dmabuf_v2=4099", &["allocate from a GPU's pool"]),
        (
            ZE,
            "without-exports",
            &["memoryAllocationExportTypes", "staged", "ze_external_memory_export_desc_t"],
        ),
        (ZE, "current", &["dma-buf"]),
    ] {
        let arguments = ["explain", "--iface", vendor.iface, "--device", "0"];
        assert_words(&succeeded(&vendor.run(driver, &[], &arguments)), words);
    }
}

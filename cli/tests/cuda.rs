//! The built command with a fake CUDA driver library, which `HMEM_CUDA_LIBRARY` names.

use std::{
    path::PathBuf,
    process::{Command, Output},
};

use serde_json::Value;

/// Returns the path of the fake driver library, which Cargo builds into the folder of this test.
fn library() -> PathBuf {
    // The only use of the crate by name; otherwise it would be an unused dependency.
    let _: fn() -> Vec<hmem_fake_cuda::Profile> = hmem_fake_cuda::Profile::all;
    let test = std::env::current_exe().expect("the path of this test");
    let library = test.parent().expect("a folder").join("libhmem_fake_cuda.so");
    assert!(library.exists(), "{} was not built", library.display());
    library
}

fn hmem(driver: &str, arguments: &[&str]) -> Output {
    hmem_with(driver, &[], arguments)
}

fn hmem_with(driver: &str, variables: &[(&str, &str)], arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hmem"));
    for name in
        ["FI_HMEM", "FI_HMEM_DISABLE_P2P", "HMEM_CUDA_MONITOR", "NO_COLOR", "CLICOLOR_FORCE"]
    {
        command.env_remove(name);
    }
    command.env("HMEM_CUDA_LIBRARY", library()).env("HMEM_FAKE_CUDA", driver);
    command.envs(variables.iter().copied());
    command.args(arguments).output().expect("the binary runs")
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("{error}: {}", String::from_utf8_lossy(&output.stderr));
    })
}

fn cuda(info: &Value) -> &Value {
    let ifaces = info["ifaces"].as_array().expect("ifaces");
    ifaces.iter().find(|iface| iface["name"] == "cuda").expect("cuda is listed")
}

/// DIAG-01
#[test]
fn info_lists_the_devices_of_a_driver_library_and_the_path_to_each_nic() {
    let output = hmem("580-open", &["info"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}");
    for words in ["NVIDIA Fake 580-open 0", "cuda:1", "0000:3b:00.0", "dma-buf"] {
        assert!(text.contains(words), "{words} is not in:\n{text}");
    }
    assert!(
        json(&hmem("580-open", &["info", "--json"])).to_string().contains("cuda:0")
            || text.contains("cuda:0")
    );
}

/// DIAG-01
///
/// Text and JSON output contain GDRCopy's state.
#[test]
fn info_shows_gdrcopy_or_the_reason_for_its_absence() {
    let name = format!("hmem-gdrcopy-{}", std::process::id());
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&folder).expect("a folder");
    let place = folder.join("libgdrapi.so.2");
    let path = folder.to_str().expect("UTF-8").to_owned();
    let look = |available: bool, words: &str| {
        let variables = [("LD_LIBRARY_PATH", path.as_str())];
        let info = json(&hmem_with("580-open", &variables, &["info", "--json"]));
        let entry = &info["gdrcopy"];
        assert_eq!(entry["library"], "libgdrapi.so.2");
        assert_eq!(entry["available"], available, "{entry}");
        assert_eq!(
            (entry["reason"].is_null(), entry["remedy"].is_null()),
            (available, available),
            "{entry}"
        );
        let text = hmem_with("580-open", &variables, &["info"]);
        let text = String::from_utf8_lossy(&text.stdout);
        let text: Vec<_> = text.split_whitespace().collect();
        let text = text.join(" ");
        assert!(
            text.contains("libgdrapi.so.2: ") && text.contains(words),
            "{words} is not in {text}"
        );
    };
    // A text file cannot be loaded as a library.
    std::fs::write(&place, "text").expect("a file");
    look(false, "libgdrapi.so.2: unavailable:");
    std::fs::remove_file(&place).expect("written just now");
    std::os::unix::fs::symlink(library(), &place).expect("a link");
    look(true, "libgdrapi.so.2: available");
    std::fs::remove_dir_all(&folder).expect("made above");
}

/// MON-04
///
/// `HMEM_CUDA_MONITOR` selects the monitor. The default is `cuda-hooks+identity` if the driver's
/// functions can be hooked.
#[test]
#[cfg_attr(not(target_arch = "x86_64"), ignore = "the fake driver cannot be hooked there")]
fn info_shows_the_monitor_of_cuda_memory_with_its_reason() {
    for (asked, name, words) in [
        ("", "cuda-hooks+identity", "hooked functions of"),
        ("auto", "cuda-hooks+identity", "notify before the memory is freed"),
        ("hooks", "cuda-hooks", "as selected"),
        ("identity", "cuda-identity", "hooks were not selected"),
    ] {
        let output = hmem_with("580-open", &[("HMEM_CUDA_MONITOR", asked)], &["info", "--json"]);
        let info = json(&output);
        let monitors = info["device_monitors"].as_array().expect("monitors");
        let of_cuda = monitors.iter().find(|one| one["iface"] == "cuda").expect("cuda has one");
        assert_eq!(of_cuda["name"], name, "{of_cuda}");
        assert!(of_cuda["why"].as_str().expect("a reason").contains(words), "{of_cuda}");
        let text = hmem_with("580-open", &[("HMEM_CUDA_MONITOR", asked)], &["info"]);
        assert!(String::from_utf8_lossy(&text.stdout).contains(name));
    }
    let refused = hmem_with("580-open", &[("HMEM_CUDA_MONITOR", "hook")], &["info", "--json"]);
    let error = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{error}");
    assert!(error.contains("HMEM_CUDA_MONITOR") && error.contains("identity"), "{error}");
}

/// CACHE-12
///
/// The command does not start a monitor that a variable disables.
#[test]
#[cfg_attr(not(target_arch = "x86_64"), ignore = "the fake driver cannot be hooked there")]
fn disabled_monitor_is_listed_with_its_variable_and_not_started() {
    const VARIABLE: &str = "FI_MR_CUDA_CACHE_MONITOR_ENABLED";
    // With --verbose, a monitor logs its start.
    for (enabled, left_out) in [("1", false), ("0", true)] {
        let output =
            hmem_with("580-open", &[(VARIABLE, enabled)], &["--verbose", "info", "--json"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let info = json(&output);
        let monitors = info["device_monitors"].as_array().expect("monitors");
        let of_cuda = monitors.iter().find(|one| one["iface"] == "cuda").expect("cuda is listed");
        assert_eq!(of_cuda["disabled_by"] == VARIABLE, left_out, "{of_cuda}");
        assert_eq!(of_cuda["name"].is_null(), left_out, "{of_cuda}");
        assert_eq!(!said.contains("monitor of CUDA memory started"), left_out, "{said}");
        let text = hmem_with("580-open", &[(VARIABLE, enabled)], &["info"]);
        let text =
            String::from_utf8_lossy(&text.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(
            text.contains(&format!("cuda: none: disabled by {VARIABLE}")),
            left_out,
            "{text}"
        );
    }
}

/// DIAG-03
///
/// A failing CUDA driver does not disable other ifaces.
#[test]
fn driver_that_does_not_start_is_listed_with_reason_and_remedy() {
    for (driver, words) in [
        (
            "580-open;cuInit=34",
            ["CUDA_ERROR_STUB_LIBRARY (34)", "stub: take its folder out of LD_LIBRARY_PATH"],
        ),
        ("580-open;devices=0", ["CUDA_ERROR_NO_DEVICE (100)", "CUDA_VISIBLE_DEVICES"]),
        ("580-open;cuInit=803", ["CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)", "reload the module"]),
    ] {
        let output = hmem(driver, &["info", "--json"]);
        assert!(output.status.success());
        let info = json(&output);
        let listed = cuda(&info).to_string();
        for word in words {
            assert!(listed.contains(word), "{word} is not in {listed}");
        }
        assert!(
            info["devices"].to_string().contains("simulated"),
            "the other ifaces stay available"
        );
    }
}

/// DIAG-02
#[test]
fn check_moves_verified_bytes_of_every_kind_of_cuda_memory() {
    for driver in ["580-open", "535-closed"] {
        let output = hmem(driver, &["check", "--iface", "cuda", "--quick", "--json"]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{driver}: {text}");
        for kind in ["device", "host", "managed", "stream-ordered", "virtual"] {
            assert!(
                text.contains(&format!("\"{kind}\"")),
                "{driver}: {kind} was not checked: {text}"
            );
        }
        let report = json(&output);
        let rows = report["rows"].as_array().expect("rows");
        let over_dma_buf = rows.iter().any(|row| row["path"] == "dma-buf");
        assert_eq!(over_dma_buf, driver == "580-open", "{driver}: {text}");
    }
}

/// DIAG-02
#[test]
fn check_names_the_remedy_of_a_refused_path() {
    let arguments = ["check", "--iface", "cuda", "--quick", "--nic", "loopback/hardware"];
    let output = hmem("580-open", &arguments);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}");
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("does not export memory of this stream-ordered pool"), "{text}");
    assert!(words.contains("remedy: allocate with the plain allocator (cuMemAlloc)"), "{text}");
}

/// DIAG-02
///
/// A failing driver ends the check with status 1.
#[test]
fn check_fails_with_a_driver_that_cannot_copy() {
    let output = hmem("580-open;cuMemcpyAsync=700", &["check", "--iface", "cuda", "--quick"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("CUDA_ERROR_ILLEGAL_ADDRESS (700)"), "{text}");
}

#[test]
fn perf_measures_transfers_between_cuda_devices_and_verifies_them() {
    let arguments =
        ["perf", "--loopback", "--iface", "cuda", "--size", "4KiB", "--iterations", "20", "--json"];
    let output = hmem("580-open", &arguments);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(
        text.contains("\"cuda\"") && text.contains("dma-buf") && !text.contains("staged"),
        "{text}"
    );
}

/// P2P-03
///
/// The printed reason is the driver's error.
#[test]
fn explain_shows_the_reason_for_a_refused_export() {
    let output = hmem("535-closed", &["explain", "--iface", "cuda", "--device", "0"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("DMA_BUF_SUPPORTED") && text.contains("staged"), "{text}");
    let output = hmem("580-open", &["explain", "--iface", "cuda", "--device", "0"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.contains("dma-buf"), "{text}");
}

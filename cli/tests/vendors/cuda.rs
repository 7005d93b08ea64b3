//! The monitor of CUDA memory, GDRCopy, and remedies.

use crate::{CUDA, assert_words, hmem_process::text, json, library, succeeded};

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
        let info = CUDA.info("580-open", &variables);
        let entry = &info["gdrcopy"];
        assert_eq!(entry["library"], "libgdrapi.so.2");
        assert_eq!(entry["available"], available, "{entry}");
        assert_eq!(
            (entry["reason"].is_null(), entry["remedy"].is_null()),
            (available, available),
            "{entry}"
        );
        assert_words(&succeeded(&CUDA.run("580-open", &variables, &["info"])), &[words]);
    };
    // A text file cannot be loaded as a library.
    std::fs::write(&place, "text").expect("a file");
    look(false, "libgdrapi.so.2: unavailable:");
    std::fs::remove_file(&place).expect("written just now");
    std::os::unix::fs::symlink(library(CUDA.library.1), &place).expect("a link");
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
        let variables = [("HMEM_CUDA_MONITOR", asked)];
        let info = CUDA.info("580-open", &variables);
        let of_cuda = CUDA.entry(&info, "device_monitors", "iface");
        assert_eq!(of_cuda["name"], name, "{of_cuda}");
        assert!(of_cuda["why"].as_str().expect("a reason").contains(words), "{of_cuda}");
        assert_words(&succeeded(&CUDA.run("580-open", &variables, &["info"])), &[name]);
    }
    let refused = CUDA.run("580-open", &[("HMEM_CUDA_MONITOR", "hook")], &["info", "--json"]);
    assert_eq!(refused.status.code(), Some(2));
    assert_words(text(&refused.stderr), &["HMEM_CUDA_MONITOR", "identity"]);
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
        let variables = [(VARIABLE, enabled)];
        let output = CUDA.run("580-open", &variables, &["--verbose", "info", "--json"]);
        let said = text(&output.stderr);
        let info = json(&output);
        let of_cuda = CUDA.entry(&info, "device_monitors", "iface");
        assert_eq!(of_cuda["disabled_by"] == VARIABLE, left_out, "{of_cuda}");
        assert_eq!(of_cuda["name"].is_null(), left_out, "{of_cuda}");
        assert_eq!(!said.contains("monitor of CUDA memory started"), left_out, "{said}");
        let listed = succeeded(&CUDA.run("580-open", &variables, &["info"]));
        let words = format!("cuda: none: disabled by {VARIABLE}");
        assert_eq!(listed.contains(&words), left_out, "{listed}");
    }
}

/// DIAG-02
#[test]
fn check_names_the_remedy_of_a_refused_path() {
    let arguments = ["check", "--iface", "cuda", "--quick", "--nic", "loopback/hardware"];
    let said = succeeded(&CUDA.run("580-open", &[], &arguments));
    assert_words(
        &said,
        &[
            "does not export memory of this stream-ordered pool",
            "remedy: allocate with the plain allocator (cuMemAlloc)",
        ],
    );
}

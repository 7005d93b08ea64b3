//! The built command with fake Neuron and Gaudi libraries, which environment variables name.

#[path = "../../tests/machine/mod.rs"]
mod machine;

use std::{
    path::PathBuf,
    process::{Command, Output},
};

/// The environment variables that name the vendor libraries.
const LIBRARIES: [&str; 3] =
    ["HMEM_NEURON_LIBRARY", "HMEM_SYNAPSEAI_LIBRARY", "HMEM_HLTHUNK_LIBRARY"];

/// The environment variables that make `hmem` start the vendor runtimes.
const START: [(&str, &str); 2] =
    [("HMEM_NEURON_START_RUNTIME", "1"), ("HMEM_SYNAPSEAI_START_RUNTIME", "1")];

/// Returns the path of the fake library, which Cargo builds into the folder of this test.
fn library() -> PathBuf {
    // The only use of the crate by name; otherwise it would be an unused dependency.
    let _: fn() -> hmem_fake_accelerators::Profile = Default::default;
    let test = std::env::current_exe().expect("the path of this test");
    let library = test.parent().expect("a folder").join("libhmem_fake_accelerators.so");
    assert!(library.exists(), "{} was not built", library.display());
    library
}

fn hmem(variables: &[(&str, &str)], arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hmem"));
    for name in ["FI_HMEM", "FI_HMEM_DISABLE_P2P", "NO_COLOR", "CLICOLOR_FORCE"] {
        command.env_remove(name);
    }
    for (name, _) in START {
        command.env_remove(name);
    }
    command.envs(LIBRARIES.map(|name| (name, library())));
    command.envs(variables.iter().copied()).args(arguments).output().expect("the binary runs")
}

/// Returns what the command printed on stdout, on one line.
fn text(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// DIAG-01
#[test]
fn info_lists_neuron_and_gaudi_devices_and_the_path_to_each_nic() {
    let text = text(&hmem(&START, &["info"]));
    for words in ["neuron 4 available", "synapseai 5 available", "NeuronCore 1", "allocation-table"]
    {
        assert!(text.contains(words), "{words} is not in:\n{text}");
    }
    let pinned = machine::without_pinned_pages().map_or(" dma-buf", |_| "");
    for device in ["neuron:0", "neuron:1", "synapseai:0"] {
        let paths = format!("{device} dma-buf dma-buf staged{pinned}");
        assert!(text.contains(&paths), "{paths} is not in:\n{text}");
    }
}

/// DIAG-01 HM-05
#[test]
fn info_explains_how_to_start_a_runtime() {
    let text = text(&hmem(&[], &["info"]));
    for words in ["NRT_UNINITIALIZED (13)", START[0].0, "acquire a Gaudi device", START[1].0] {
        assert!(text.contains(words), "{words} is not in:\n{text}");
    }
}

/// HM-04
#[test]
fn info_names_the_missing_library_and_its_variable() {
    let absent = LIBRARIES.map(|name| (name, "/nowhere/library.so"));
    let text = text(&hmem(&absent, &["info"]));
    for words in [
        "neuron 4 unavailable",
        "synapseai 5 unavailable",
        "the file /nowhere/library.so in HMEM_NEURON_LIBRARY cannot be loaded",
        LIBRARIES[1],
    ] {
        assert!(text.contains(words), "{words} is not in:\n{text}");
    }
}

/// DIAG-01
#[test]
fn check_moves_verified_bytes_of_neuron_and_gaudi_memory() {
    for iface in ["neuron", "synapseai"] {
        let output = hmem(&START, &["check", "--iface", iface, "--quick"]);
        let text = text(&output);
        assert!(output.status.success(), "{text}");
        assert!(text.contains("combinations verified"), "{text}");
        assert!(text.contains("dma-buf") && text.contains("staged"), "{text}");
    }
}

/// DIAG-01
#[test]
fn perf_and_explain_accept_neuron_and_gaudi_memory() {
    for iface in ["neuron", "synapseai"] {
        let perf = ["perf", "--loopback", "--iface", iface, "--size", "4KiB", "--iterations", "20"];
        let output = hmem(&START, &perf);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let output = hmem(&START, &["explain", "--iface", iface, "--device", "0"]);
        let text = text(&output);
        assert!(output.status.success() && text.contains("path: dma-buf"), "{text}");
        assert!(text.contains("path: staged"), "{text}");
    }
}

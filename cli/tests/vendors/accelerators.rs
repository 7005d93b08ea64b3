//! The command with fake Neuron and Gaudi libraries.

use std::process::Output;

use crate::{assert_words, hmem_process, library, machine, succeeded};

/// The environment variables that name the vendor libraries.
const LIBRARIES: [&str; 3] =
    ["HMEM_NEURON_LIBRARY", "HMEM_SYNAPSEAI_LIBRARY", "HMEM_HLTHUNK_LIBRARY"];

/// The environment variables that make `hmem` start the vendor runtimes.
const START: [(&str, &str); 2] =
    [("HMEM_NEURON_START_RUNTIME", "1"), ("HMEM_SYNAPSEAI_START_RUNTIME", "1")];

fn hmem(variables: &[(&str, &str)], arguments: &[&str]) -> Output {
    let mut command = hmem_process::hmem(arguments[0], &arguments[1..]);
    command.envs(LIBRARIES.map(|name| (name, library("libhmem_fake_accelerators.so"))));
    command.envs(variables.iter().copied()).output().expect("the binary runs")
}

/// DIAG-01
#[test]
fn info_lists_neuron_and_gaudi_devices_and_the_path_to_each_nic() {
    let listed = succeeded(&hmem(&START, &["info"]));
    let words = ["neuron 4 available", "synapseai 5 available", "NeuronCore 1", "allocation-table"];
    assert_words(&listed, &words);
    let pinned = machine::without_pinned_pages().map_or(" dma-buf", |_| "");
    for device in ["neuron:0", "neuron:1", "synapseai:0"] {
        assert_words(&listed, &[&format!("{device} dma-buf dma-buf staged{pinned}")]);
    }
}

/// DIAG-01 HM-05
#[test]
fn info_explains_how_to_start_a_runtime() {
    let words = ["NRT_UNINITIALIZED (13)", START[0].0, "acquire a Gaudi device", START[1].0];
    assert_words(&succeeded(&hmem(&[], &["info"])), &words);
}

/// HM-04
#[test]
fn info_names_the_missing_library_and_its_variable() {
    let absent = LIBRARIES.map(|name| (name, "/nowhere/library.so"));
    let words = [
        "neuron 4 unavailable",
        "synapseai 5 unavailable",
        "the file /nowhere/library.so in HMEM_NEURON_LIBRARY cannot be loaded",
        LIBRARIES[1],
    ];
    assert_words(&succeeded(&hmem(&absent, &["info"])), &words);
}

/// DIAG-01
#[test]
fn check_moves_verified_bytes_of_neuron_and_gaudi_memory() {
    for iface in ["neuron", "synapseai"] {
        let said = succeeded(&hmem(&START, &["check", "--iface", iface, "--quick"]));
        assert_words(&said, &["combinations verified", "dma-buf", "staged"]);
    }
}

/// DIAG-01
#[test]
fn perf_and_explain_accept_neuron_and_gaudi_memory() {
    for iface in ["neuron", "synapseai"] {
        let perf = ["perf", "--loopback", "--iface", iface, "--size", "4KiB", "--iterations", "20"];
        succeeded(&hmem(&START, &perf));
        let said = succeeded(&hmem(&START, &["explain", "--iface", iface, "--device", "0"]));
        assert_words(&said, &["path: dma-buf", "path: staged"]);
    }
}

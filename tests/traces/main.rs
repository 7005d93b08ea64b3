//! Golden traces. `traces.txt` lists path, reason and every attempt of registrations in many test
//! cases. A change of the code must not change a line unless the behaviour changes on purpose.
//! `HMEM_BLESS=1` rewrites the list.
//!
//! Each test case registers memory through every entry point: `fabric::regattr`, the same with
//! tracing on and through an event queue, `Batch::on`, a cache miss, and `explain`. An entry point
//! with the same outcome as `regattr` has no lines of its own.
#![cfg(all(
    feature = "cuda",
    feature = "neuron",
    feature = "rocr",
    feature = "synapseai",
    feature = "ze"
))]
#![allow(unsafe_code)]

mod case;
mod fake;
mod listing;
#[allow(dead_code, reason = "the CUDA tests use the rest")]
#[path = "../cuda/segments.rs"]
mod segments;
mod simulated_and_cuda;
mod vendors;

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use hmem::cuda;

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/traces/traces.txt")
}

/// HM-08, HM-09, P2P-01, P2P-02, P2P-03, P2P-04, DIAG-03
#[test]
fn registrations_decide_as_the_golden_traces_say() {
    let now = listing::of(&[simulated_and_cuda::all(), vendors::all()].concat());
    if env::var_os("HMEM_BLESS").is_some() {
        fs::write(file(), &now).expect("the list can be written");
    }
    let golden = fs::read_to_string(file()).unwrap_or_default();
    let difference = listing::difference(&golden, &now);
    assert!(
        difference.is_empty(),
        "traces changed (- golden, + now); HMEM_BLESS=1 accepts the new ones\n{difference}"
    );
}

/// DIAG-03
#[test]
fn each_cause_of_cuda_is_in_the_traces() {
    let golden = fs::read_to_string(file()).expect("the list");
    for cause in cuda::CAUSES {
        let named = format!("; {}; remedy: {}", cause.name, cause.remedy);
        assert!(golden.contains(&named), "no test case provokes {}", cause.name);
    }
}

#[test]
fn difference_names_the_test_case_and_its_changed_lines() {
    let golden = "== a | policy x, y ==\npath\nreason\n\n== c | policy x ==\nsame\n\n";
    assert_eq!(listing::difference(golden, golden), "");
    let now = "== a | policy x ==\npath\nreason\n\n== a | policy y ==\npath\nother\n\n\
               == c | policy x ==\n== d | policy x ==\nsame\n\n";
    let changed = "== a | policy y ==\n  path\n- reason\n+ other\n\n\
                   == d | policy x ==\n+ same\n\n";
    assert_eq!(listing::difference(golden, now), changed);
    let gone = "== a | policy x ==\n== a | policy y ==\n- path\n- reason\n\n";
    assert_eq!(listing::difference(golden, "== c | policy x ==\nsame\n\n"), gone);
}

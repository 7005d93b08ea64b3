//! The fuzzer: libFuzzer over the target that the variable `HMEM_FUZZ_TARGET` names. `fuzz/run`
//! builds and starts it.

#![no_main]

#[path = "../targets/mod.rs"]
mod targets;

use std::sync::LazyLock;

static TARGET: LazyLock<fn(&[u8]) -> targets::Verdict> = LazyLock::new(|| {
    let name = std::env::var("HMEM_FUZZ_TARGET").expect("HMEM_FUZZ_TARGET names a target");
    let found = targets::TARGETS.iter().find(|(target, _)| *target == name);
    found.unwrap_or_else(|| panic!("no target is named {name}")).1
});

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    // A refusal is an expected result. A panic, a fault or a hang ends the run.
    let _verdict = (*TARGET)(data);
});

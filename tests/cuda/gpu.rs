//! These tests as they run over a GPU: the driver is a library that is loaded, here the fake one, and what cannot be shown over a
//! GPU says why.

use std::{collections::BTreeSet, process::Command};

use crate::link::not_over_a_gpu;

/// The tests that need more of the driver than to be there.
const NOT_OVER_A_GPU: [&str; 7] = [
    "causes::diag_03_each_cause_on_cudas_side_is_named_by_a_registration_that_meets_it",
    "paths::hm_07_handles_that_the_driver_does_not_export_as_one_are_exported_one_by_one",
    "paths::hm_09_the_pcie_mapping_is_tried_first_and_then_without",
    "paths::p2p_01_a_nic_with_peer_memory_alone_gets_device_addresses",
    "paths::p2p_01_one_refused_buffer_demotes_no_other",
    "paths::p2p_03_the_decision_names_each_call_its_error_its_cause_and_its_remedy",
    "reuse::mr_07_a_region_that_outlives_its_memory_reaches_none_of_the_memory_that_took_its_place",
];
/// Those that need two devices, or dma-bufs.
const NOT_OVER_A_SMALL_ONE: [&str; 3] = [
    "cache::cache_02_memory_of_two_devices_is_two_entries_and_each_dies_by_its_own_free",
    "paths::hm_07_a_range_with_a_segment_that_cannot_is_refused_naming_the_first",
    "paths::p2p_04_the_driver_is_asked_for_the_export_of_memory_that_is_not_vmm",
];

#[test]
fn over_a_driver_library_each_test_passes_or_says_why_it_is_not_shown() {
    if not_over_a_gpu("it runs the others") {
        return;
    }
    let program = std::env::current_exe().expect("this program");
    // Cargo builds it beside this program, of whose dependencies it is one.
    let library = program.parent().expect("a folder").join("libhmem_fake_cuda.so");
    for (driver, lacking) in [("580-open", &[][..]), ("550-closed;devices=1", &NOT_OVER_A_SMALL_ONE)] {
        let output = Command::new(&program)
            .args(["--test-threads=1", "--nocapture", "--skip", "over_a_driver_library"])
            .env("HMEM_CUDA", "real")
            .env("HMEM_CUDA_LIBRARY", &library)
            .env("HMEM_FAKE_CUDA", driver)
            .output()
            .expect("it runs");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{driver}: {said}\n{}", String::from_utf8_lossy(&output.stderr));
        let tests = said.lines().filter_map(|line| line.strip_prefix("test ")?.split_once(" ... "));
        let (not_shown, shown): (Vec<_>, Vec<_>) =
            tests.partition(|(_, outcome)| outcome.starts_with("not over a GPU: "));
        let not_shown: BTreeSet<_> = not_shown.into_iter().map(|(name, _)| name).collect();
        let expected = NOT_OVER_A_GPU.iter().chain(lacking).copied().collect();
        assert_eq!(not_shown, expected, "{driver}: {said}");
        assert!(shown.len() > 10, "{driver}: {said}");
    }
}

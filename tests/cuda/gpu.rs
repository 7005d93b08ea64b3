//! These tests as they run over a GPU: the driver is a library that is loaded, here the fake one,
//! and what cannot be shown over a GPU says why.

use std::{collections::BTreeSet, process::Command};

use crate::link::not_over_a_gpu;

/// The tests that need more of the driver than to be there.
const NOT_OVER_A_GPU: [&str; 9] = [
    "causes::a_driver_that_has_the_pcie_mapping_is_not_said_to_lack_it",
    "causes::each_cause_on_cudas_side_is_named_by_a_registration_that_meets_it",
    "contexts::registering_memory_of_the_applications_context_makes_no_other",
    "inbound::a_completion_is_read_after_a_flush_in_the_context_of_the_memory",
    "paths::handles_that_the_driver_does_not_export_as_one_are_exported_one_by_one",
    "paths::the_pcie_mapping_is_tried_first_and_then_without",
    "paths::one_refused_buffer_demotes_no_other",
    "paths::the_decision_names_each_call_its_error_its_cause_and_its_remedy",
    "reuse::a_region_that_outlives_its_memory_reaches_none_of_the_memory_that_took_its_place",
];
/// Those that need two devices, or dma-bufs.
const NOT_OVER_A_SMALL_ONE: [&str; 8] = [
    "cache::memory_of_two_devices_is_two_entries_and_each_dies_by_its_own_free",
    "cache::threads_that_free_what_others_get_at_once_never_hit_what_was_there_before",
    "paths::registrations_of_device_memory_leave_nothing",
    "paths::a_range_over_several_handles_is_registered_whole",
    "paths::a_range_with_a_segment_that_cannot_is_refused_naming_the_first",
    "paths::each_kind_of_memory_goes_its_own_way_and_its_bytes_arrive",
    "paths::the_driver_is_asked_for_the_export_of_memory_that_is_not_vmm",
    "reuse::registering_freeing_and_allocating_again_reaches_the_new_bytes",
];

/// These tests over the fake's library as it is told to be: whether they passed, and what they
/// said.
fn over(driver: &str, words: &[&str]) -> (bool, String) {
    let program = std::env::current_exe().expect("this program");
    // Cargo builds it beside this program, of whose dependencies it is one.
    let library = program.parent().expect("a folder").join("libhmem_fake_cuda.so");
    let output = Command::new(&program)
        // What takes seconds is left to the run over the fake itself.
        .args([
            "--test-threads=1",
            "--nocapture",
            "--skip",
            "over_a_driver_library",
            "--skip",
            "ten_thousand",
        ])
        .args(words)
        .env("HMEM_CUDA", "real")
        .env("HMEM_CUDA_LIBRARY", &library)
        .env("HMEM_FAKE_CUDA", driver)
        .output()
        .expect("it runs");
    (
        output.status.success(),
        [output.stdout, output.stderr]
            .map(|said| String::from_utf8_lossy(&said).into_owned())
            .concat(),
    )
}

#[test]
fn over_a_driver_library_each_test_passes_or_says_why_it_is_not_shown() {
    if not_over_a_gpu("it runs the others") {
        return;
    }
    for (driver, lacking) in
        [("580-open;attributes=152", &[][..]), ("550-closed;devices=1", &NOT_OVER_A_SMALL_ONE)]
    {
        let (passed, said) = over(driver, &[]);
        assert!(passed, "{driver}: {said}");
        let tests = said.lines().filter_map(|line| line.strip_prefix("test ")?.split_once(" ... "));
        let (not_shown, shown): (Vec<_>, Vec<_>) =
            tests.partition(|(_, outcome)| outcome.starts_with("not over a GPU: "));
        let not_shown: BTreeSet<_> = not_shown.into_iter().map(|(name, _)| name).collect();
        let expected = NOT_OVER_A_GPU.iter().chain(lacking).copied().collect();
        assert_eq!(not_shown, expected, "{driver}: {said}");
        assert!(shown.len() > 5, "{driver}: {said}");
    }
}

/// A device that says that its dma-bufs can be mapped owes them: copies in their place are no pass.
#[test]
fn over_a_driver_library_that_exports_none_of_the_dma_bufs_that_it_has_tests_fail() {
    if not_over_a_gpu("it runs the others") {
        return;
    }
    let test = "registrations_of_device_memory_leave_nothing";
    let (passed, said) = over("580-open;attributes=152;cuMemGetHandleForAddressRange=801", &[test]);
    assert!(!passed && said.contains("0 passed; 1 failed"), "{said}");
}

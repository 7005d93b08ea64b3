//! Runs the tests of this program in their GPU mode, with the fake driver's library in place of the
//! real one. Tests that cannot run over a GPU print the reason.

use std::{collections::BTreeSet, process::Command};

use crate::link::not_over_a_gpu;

/// Tests that do not run over a GPU, since they need the controls of the fake driver.
const NOT_OVER_A_GPU: [&str; 9] = [
    "contexts::registration_in_the_applications_context_creates_no_other",
    "inbound::completion_follows_a_flush_in_the_memorys_context",
    "mapped::mapped_memory_without_a_handle_is_uncached_with_the_reason",
    "mapped::peer_memory_of_mapped_memory_is_a_hit_with_hooks_alone",
    "mapped::shorter_mapping_of_the_same_handle_is_never_a_hit",
    "mapped::unmapped_memory_is_freed_when_its_registration_leaves_the_cache",
    "paths::handles_refused_as_one_dma_buf_are_exported_one_by_one",
    "reuse::region_that_outlives_its_memory_reaches_no_new_memory",
    "sparse::peer_memory_that_no_hook_watches_is_refused",
];
/// Tests that need two GPUs, or GPUs that export dma-bufs. They are skipped elsewhere.
const NEED_TWO_GPUS_OR_DMA_BUFS: [&str; 8] = [
    "cache::free_on_one_device_keeps_the_entry_of_the_other",
    "cache::concurrent_reuse_of_addresses_is_never_a_stale_hit",
    "paths::reach_check_transfers_a_page_of_device_memory",
    "paths::registrations_of_device_memory_leave_nothing_open",
    "paths::range_over_several_handles_is_one_region",
    "paths::range_with_an_unexportable_segment_names_it",
    "paths::each_kind_of_memory_moves_its_bytes_by_its_own_path",
    "paths::export_is_tried_for_memory_other_than_vmm",
];

/// Runs this program's tests in GPU mode over the fake driver's library, configured by `driver`.
/// `words` select tests. Returns true if they passed, and their output.
fn over(driver: &str, words: &[&str]) -> (bool, String) {
    let program = std::env::current_exe().expect("this program");
    // Cargo builds the library, a dependency, in the folder of this program.
    let library = program.parent().expect("a folder").join("libhmem_fake_cuda.so");
    let output = Command::new(&program)
        // Leaves out the tests of this file, and those that take seconds.
        .args(["--test-threads=1", "--nocapture", "--skip", "gpu::", "--skip", "ten_thousand"])
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
fn tests_over_a_library_pass_or_give_a_reason() {
    if not_over_a_gpu("it runs the others") {
        return;
    }
    for (driver, lacking) in
        [("580-open;attributes=152", &[][..]), ("550-closed;devices=1", &NEED_TWO_GPUS_OR_DMA_BUFS)]
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

/// If a device reports mappable dma-bufs and does not export them, the tests fail instead of
/// accepting staged copies.
#[test]
fn tests_fail_if_promised_dma_bufs_are_not_exported() {
    if not_over_a_gpu("it runs the others") {
        return;
    }
    let test = "registrations_of_device_memory_leave_nothing_open";
    let (passed, said) = over("580-open;attributes=152;cuMemGetHandleForAddressRange=801", &[test]);
    assert!(!passed && said.contains("0 passed; 1 failed"), "{said}");
}

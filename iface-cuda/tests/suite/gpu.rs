//! Runs this suite in the way in which it runs over a GPU, but with the library of the fake driver.

use std::process::Command;

use crate::world::{NOT_OVER_A_GPU, not_over_a_gpu};

/// Tests that need a second device or dma-bufs. On a GPU that lacks them, each prints why it does
/// not run.
const NEED_A_LARGER_GPU: [&str; 3] = [
    "contexts::page_locking_uses_an_active_context_of_another_device",
    "export::exports_reach_exactly_their_bytes_at_any_offset",
    "export::many_exports_leave_no_fd_open",
];

#[test]
fn suite_over_a_library_reports_what_the_device_lacks() {
    if not_over_a_gpu("it runs others") {
        return;
    }
    let program = std::env::current_exe().expect("this program");
    // Cargo builds the library beside this program, since it is a dependency.
    let library = program.parent().expect("a folder").join("libhmem_fake_cuda.so");
    for (driver, lacks) in [("580-open", false), ("550-closed;devices=1", true)] {
        for test in NEED_A_LARGER_GPU {
            let output = Command::new(&program)
                .args(["--exact", test, "--test-threads=1", "--nocapture"])
                .env("HMEM_CUDA", "real")
                .env("HMEM_CUDA_LIBRARY", &library)
                .env("HMEM_FAKE_CUDA", driver)
                .output()
                .expect("the program starts");
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && said.contains(" 1 passed"), "{driver}: {said}");
            assert_eq!(said.contains(NOT_OVER_A_GPU), lacks, "{driver}: {said}");
        }
    }
}

//! Runs the example `cudarc_slices` over the fake driver.

mod child;

use std::{fs, os::unix::fs::symlink};

#[path = "../examples/cudarc_slices.rs"]
mod example;

/// Variable that marks the child process, in which both cudarc and hmem load the fake driver.
const CHILD: &str = "HMEM_CUDA_CHILD";

#[test]
fn slice_comes_back_with_the_bytes_that_a_nic_wrote() {
    if std::env::var_os(CHILD).is_some() {
        let values = example::run().expect("the example works");
        assert_eq!((values.len(), values[0], values[1023]), (1024, 0.0, 1023.0));
        return;
    }
    // This use of the crate makes Cargo build its library.
    let _: fn() -> Vec<hmem_fake_cuda::Profile> = hmem_fake_cuda::Profile::all;
    let test = std::env::current_exe().expect("this test");
    let library = test.parent().expect("a folder").join("libhmem_fake_cuda.so");
    let folder = std::env::temp_dir().join(format!("hmem-cudarc-example-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder");
    let link = folder.join("libcuda.so");
    symlink(&library, &link).expect("a link");
    child::passes(
        child::command("slice_comes_back_with_the_bytes_that_a_nic_wrote")
            .env(CHILD, "1")
            .env("LD_LIBRARY_PATH", &folder)
            .env("HMEM_CUDA_LIBRARY", &link),
    );
    fs::remove_dir_all(&folder).expect("clean up");
}

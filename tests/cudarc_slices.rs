//! The example with slices of `cudarc`, over the fake driver.

use std::{fs, os::unix::fs::symlink, process::Command};

#[path = "../examples/cudarc_slices.rs"]
mod example;

/// Set in the process in which both cudarc and this library find the fake driver.
const CHILD: &str = "HMEM_CUDA_CHILD";

#[test]
fn slice_comes_back_with_the_bytes_that_a_nic_wrote() {
    if std::env::var_os(CHILD).is_some() {
        let values = example::run().expect("the example works");
        assert_eq!((values.len(), values[0], values[1023]), (1024, 0.0, 1023.0));
        return;
    }
    // Named so that the library is built.
    let _: fn() -> Vec<hmem_fake_cuda::Profile> = hmem_fake_cuda::Profile::all;
    let test = std::env::current_exe().expect("this test");
    let library = test.parent().expect("a folder").join("libhmem_fake_cuda.so");
    let folder = std::env::temp_dir().join(format!("hmem-cudarc-example-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder");
    let link = folder.join("libcuda.so");
    symlink(&library, &link).expect("a link");
    let output = Command::new(&test)
        .args(["--exact", "slice_comes_back_with_the_bytes_that_a_nic_wrote", "--nocapture"])
        .env(CHILD, "1")
        .env("LD_LIBRARY_PATH", &folder)
        .env("HMEM_CUDA_LIBRARY", &link)
        .output()
        .expect("the test runs");
    fs::remove_dir_all(&folder).expect("clean up");
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

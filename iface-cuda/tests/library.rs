//! Tests of opening without a usable library: the result is an error of kind Unavailable that names
//! the path.

use std::{path::Path, process::Command};

use hmem_core::{Error, ErrorKind, Iface, IfaceKind};
use hmem_iface_cuda::{Cuda, sys::Functions};

fn refused(library: impl AsRef<Path>) -> Error {
    let library = library.as_ref();
    let error = Cuda::builder().library(library).open().expect_err("no driver there");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.iface_kind(), Some(IfaceKind::CUDA));
    assert_eq!(error.context_value("library"), Some(library.display().to_string().as_str()));
    assert!(error.remedy_text().is_some());
    error
}

/// HM-04
#[test]
fn absent_library_is_unavailable_with_the_loaders_reason() {
    let error = refused("/nowhere/libcuda.so.1");
    assert!(error.to_string().contains("cannot open shared object file"), "{error}");
}

/// HM-04
///
/// The iface loads the library that the environment names, unless the builder names another one.
/// The test runs itself in a process with that environment.
#[test]
fn library_of_the_builder_overrides_the_environment() {
    const NAME: &str = "library_of_the_builder_overrides_the_environment";
    const NAMED: &str = "/elsewhere/libcuda.so.1";
    if std::env::var(Cuda::LIBRARY_VARIABLE).is_ok_and(|named| named == NAMED) {
        let error = Cuda::open().expect_err("no driver there");
        assert_eq!(error.context_value("library"), Some(NAMED));
        refused("/nowhere/libcuda.so.1");
        return;
    }
    let test = std::env::current_exe().expect("this test");
    let output = Command::new(test)
        .args(["--exact", NAME])
        .env(Cuda::LIBRARY_VARIABLE, NAMED)
        .output()
        .expect("the test runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

/// HM-04
#[test]
fn file_without_elf_header_is_unavailable_with_the_loaders_reason() {
    let error = refused(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
    assert!(error.to_string().contains("invalid ELF header"), "{error}");
}

/// HM-04
#[test]
fn wrong_library_is_unavailable_and_the_absent_symbol_named() {
    let error = refused("libm.so.6");
    assert_eq!(error.context_value("symbol"), Some(Functions::SYMBOLS[0]));
}

/// HM-04
///
/// Passes on machines with and without the driver.
#[test]
fn opening_lists_devices_or_names_the_absent_library() {
    match Cuda::open() {
        Ok(iface) => {
            assert!(!iface.devices().expect("devices").is_empty());
            iface.close().expect("close");
        }
        Err(error) => {
            assert!(error.is_unavailable(), "{error}");
            assert_eq!(error.context_value("library"), Some(Functions::LIBRARY));
        }
    }
}

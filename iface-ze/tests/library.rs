//! Tests of opening without a usable library: the result is an error of kind Unavailable that names
//! the path.

use std::path::Path;

use hmem_core::{Error, ErrorKind, Iface, IfaceKind};
use hmem_iface_ze::{LevelZero, sys::Functions};

fn refused(library: impl AsRef<Path>) -> Error {
    let library = library.as_ref();
    let error = LevelZero::builder().library(library).open().expect_err("no driver there");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.iface_kind(), Some(IfaceKind::ZE));
    assert_eq!(error.context_value("library"), Some(library.display().to_string().as_str()));
    assert!(error.remedy_text().is_some());
    error
}

/// HM-04
#[test]
fn absent_library_is_unavailable_with_the_loaders_reason() {
    let error = refused("/nowhere/libze_loader.so.1");
    assert!(error.to_string().contains("cannot open shared object file"), "{error}");
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
    match LevelZero::open() {
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

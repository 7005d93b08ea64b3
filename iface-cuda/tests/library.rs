//! Tests of opening without a usable library: the result is an error of kind Unavailable that names
//! the path.

#[path = "../../tests/child/mod.rs"]
mod child;
#[path = "../../tests/unusable_library/mod.rs"]
mod unusable_library;

use std::{env, ffi::OsStr, os::unix::ffi::OsStrExt, path::Path};

use hmem_core::{ErrorKind, Iface, IfaceKind};
use hmem_iface_cuda::{Cuda, CudaMonitorKind, sys::Functions};

/// HM-04
///
/// The iface loads the library that the environment names, unless the builder names another one.
/// The test starts itself again in a process with that environment.
#[test]
fn library_of_the_builder_overrides_the_environment() {
    const NAME: &str = "library_of_the_builder_overrides_the_environment";
    const NAMED: &str = "/elsewhere/libcuda.so.1";
    const OTHER: &str = "/nowhere/libcuda.so.1";
    if child::alone(NAME, &[(Cuda::LIBRARY_VARIABLE, NAMED)]) {
        let error = Cuda::open().expect_err("no driver there");
        assert_eq!(error.context_value("library"), Some(NAMED));
        // SAFETY: there is no such file.
        let builder = unsafe { Cuda::builder().library(OTHER) };
        let error = builder.open().expect_err("no driver there");
        assert_eq!(error.context_value("library"), Some(OTHER));
    }
}

/// CACHE-12
///
/// A name of a monitor that is not UTF-8 is refused like any other unknown name. The test starts
/// itself again in a process with that name in the environment.
#[test]
fn monitor_name_that_is_not_utf_8_is_an_invalid_argument() {
    const NAME: &str = "monitor_name_that_is_not_utf_8_is_an_invalid_argument";
    const VARIABLE: &str = Cuda::MONITOR_VARIABLE;
    let not_utf_8 = OsStr::from_bytes(b"hooks\xff");
    if env::var_os(VARIABLE).is_none_or(|name| name != not_utf_8) {
        child::passes(child::command(NAME).env(VARIABLE, not_utf_8));
        return;
    }
    let error = Cuda::open().expect_err("no monitor has this name");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert_eq!(error.context_value("variable"), Some(VARIABLE));
    let builder = Cuda::builder().monitor(CudaMonitorKind::Auto);
    // SAFETY: there is no such file.
    let builder = unsafe { builder.library("/nowhere/libcuda.so.1") };
    assert!(builder.open().expect_err("no driver there").is_unavailable());
}

/// HM-04
#[test]
fn unusable_library_is_unavailable_with_the_reason() {
    let open = |path: &Path| {
        // SAFETY: `path` names no library, or `libm.so.6`, which any process may load.
        unsafe { Cuda::builder().library(path) }.open().expect_err("no library there")
    };
    let variable = Cuda::LIBRARY_VARIABLE;
    unusable_library::is_unavailable_with_the_reason(
        IfaceKind::CUDA,
        variable,
        Functions::SYMBOLS[0],
        open,
    );
}

/// HM-04
///
/// Opening lists the devices, or returns an error that names the absent library. The test passes on
/// machines with and without the driver.
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

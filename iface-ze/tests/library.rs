//! Tests of opening without a usable library: the result is an error of kind Unavailable that names
//! the path.

#[path = "../../tests/unusable_library/mod.rs"]
mod unusable_library;

use std::path::Path;

use hmem_core::{Iface, IfaceKind};
use hmem_iface_ze::{LevelZero, sys::Functions};

/// HM-04
#[test]
fn unusable_library_is_unavailable_with_the_reason() {
    let open = |path: &Path| {
        // SAFETY: `path` names no library, or `libm.so.6`, which any process may load.
        unsafe { LevelZero::builder().library(path) }.open().expect_err("no library there")
    };
    let variable = LevelZero::LIBRARY_VARIABLE;
    unusable_library::is_unavailable_with_the_reason(
        IfaceKind::ZE,
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

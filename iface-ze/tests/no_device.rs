//! Tests of the real loader of two releases, and of Intel's driver, without a device. With
//! `HMEM_ZE=driver`, a missing loader or driver is a failure.
//!
//! The newer release needs the C library of its own packages. So this test starts itself again
//! through the dynamic loader in the folder of the release.

mod support;

use std::{path::Path, process::Command};

use hmem_core::ErrorKind;
use hmem_iface_ze::{LevelZero, sys::Functions};

const RELEASE: &str = "HMEM_ZE_RELEASE";

/// Runs the named test once for each release, in a new process.
fn each(name: &str, show: impl Fn(&str)) {
    if let Ok(release) = std::env::var(RELEASE) {
        return show(&release);
    }
    for release in ["1.8", "1.32"] {
        let file = format!("root/{release}/usr/lib/x86_64-linux-gnu/libze_loader.so.1");
        let Some(library) = support::cached("driver", &file) else { continue };
        let folder = library.parent().expect("a folder");
        let loader = folder.join("ld-linux-x86-64.so.2");
        let output = Command::new(loader)
            .arg("--library-path")
            .arg(folder)
            .arg(std::env::current_exe().expect("this test"))
            .args(["--exact", name, "--nocapture", "--test-threads=1"])
            .env(RELEASE, release)
            .output()
            .expect("the test runs");
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        assert!(output.status.success() && text.contains("1 passed"), "{release}: {text}");
    }
}

fn has_a_device() -> bool {
    let has = Path::new("/dev/dri").exists();
    if has {
        eprintln!("skipped: this machine may have a device");
    }
    has
}

/// HM-04
#[test]
fn real_library_without_a_device_is_unavailable() {
    each("real_library_without_a_device_is_unavailable", |release| {
        if has_a_device() {
            return;
        }
        let error = LevelZero::open().expect_err("no device");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{release}: {error}");
        assert_eq!(error.operation(), "zeInit", "{release}: {error}");
        let code = error.driver().expect("the driver's code");
        assert_eq!(
            (code.name.as_ref(), code.code),
            ("ZE_RESULT_ERROR_UNINITIALIZED", 0x7800_0001),
            "{release}"
        );
        assert_eq!(error.context_value("library"), Some(Functions::LIBRARY));
        assert!(error.remedy_text().is_some_and(|remedy| remedy.contains("/dev/dri")));
    });
}

/// HM-04
///
/// Both releases have every required symbol. Only the newer one has the optional symbols.
#[test]
fn real_library_has_the_symbols_of_its_release() {
    each("real_library_has_the_symbols_of_its_release", |release| {
        let functions = Functions::load(Functions::LIBRARY.as_ref()).expect("load");
        assert_eq!(functions.gives_fds_back(), release == "1.32", "{release}");
    });
}

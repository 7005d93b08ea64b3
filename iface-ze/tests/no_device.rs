//! Tests of the real loader of two releases, and of Intel's driver, without a device. With
//! `HMEM_ZE=driver`, a missing loader or driver is a failure.
//!
//! The newer release needs the C library of its own packages. So this test starts itself again
//! through the dynamic loader in the folder of the release.

#[path = "../../tests/child/mod.rs"]
mod child;
#[path = "../../tests/trials/mod.rs"]
mod trials;
#[path = "../../tests/vendor_files/mod.rs"]
mod vendor_files;

use std::{env, path::Path, process::Command};

use hmem_core::ErrorKind;
use hmem_iface_ze::{LevelZero, sys::Functions};
use trials::{Outcome, Skipped, trials};

const RELEASE: &str = "HMEM_ZE_RELEASE";

/// Runs `test` for each downloaded release of the loader. Each run is in a new process that runs
/// only the test `name`.
fn for_each_release(name: &str, test: impl Fn(&str)) -> Outcome {
    if let Ok(release) = env::var(RELEASE) {
        test(&release);
        return Ok(());
    }
    for release in ["1.8", "1.32"] {
        let file = format!("root/{release}/usr/lib/x86_64-linux-gnu/libze_loader.so.1");
        let library = vendor_files::downloaded("ze", "driver", &file).map_err(Skipped)?;
        let folder = library.parent().expect("a folder");
        let mut command = Command::new(folder.join("ld-linux-x86-64.so.2"));
        command.arg("--library-path").arg(folder).arg(env::current_exe().expect("this test"));
        child::passes(command.args(child::arguments(name)).env(RELEASE, release));
    }
    Ok(())
}

fn real_library_without_a_device_is_unavailable() -> Outcome {
    if Path::new("/dev/dri").exists() {
        return Err(Skipped("this machine may have a device".into()));
    }
    for_each_release("real_library_without_a_device_is_unavailable", |release| {
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
    })
}

/// Both releases of the loader have every required symbol. Only the newer release has the optional
/// symbols.
fn real_library_has_the_symbols_of_its_release() -> Outcome {
    for_each_release("real_library_has_the_symbols_of_its_release", |release| {
        let functions = Functions::find().expect("load");
        assert_eq!(functions.gives_fds_back(), release == "1.32", "{release}");
    })
}

trials! {
    /// HM-04
    real_library_without_a_device_is_unavailable,
    /// HM-04
    real_library_has_the_symbols_of_its_release,
}

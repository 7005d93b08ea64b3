//! Tests of AMD's own runtime without a device. `tests/rocr/run` starts this test through the
//! dynamic loader of each release, and names the release in `HMEM_ROCR`.

#[path = "../../tests/trials/mod.rs"]
mod trials;

use std::{env, path::Path};

use hmem_core::{ErrorKind, IfaceKind};
use hmem_iface_rocr::{Rocr, sys::Functions};
use libloading::os::unix::Library;
use trials::{Outcome, Skipped, trials};

const RELEASES: [&str; 4] = ["5.2", "6.1", "6.4", "7.2"];

/// Returns substrings of the names of optional functions that a release lacks.
fn lacks(release: &str) -> &'static [&'static str] {
    match release {
        "5.2" => &["_dmabuf", "_vmem_"],
        "6.1" | "6.4" => &["_dmabuf_v2"],
        _ => &[],
    }
}

fn release() -> Result<String, Skipped> {
    let asked = env::var("HMEM_ROCR").unwrap_or_default();
    if RELEASES.contains(&asked.as_str()) {
        return Ok(asked);
    }
    Err(Skipped("no release is named in HMEM_ROCR: see tests/rocr/run".into()))
}

fn every_function_of_the_release_is_present() -> Outcome {
    let release = release()?;
    // SAFETY: the library is AMD's runtime, whose initialisers have no precondition.
    let library = unsafe { Library::new(Functions::LIBRARY) }.expect("AMD's runtime");
    // SAFETY: the symbols are only looked up.
    let has = |name: &&str| unsafe { library.get::<*const ()>(*name) }.is_ok();
    let required: Vec<_> = Functions::SYMBOLS.iter().filter(|name| !has(name)).collect();
    assert!(required.is_empty(), "{release} lacks {required:?}");
    for name in Functions::OPTIONAL_SYMBOLS {
        let later = lacks(&release).iter().any(|part| name.contains(part));
        assert_eq!(has(name), !later, "{release}: {name}");
    }
    std::mem::forget(library);
    Ok(())
}

fn runtime_without_a_device_is_unavailable() -> Outcome {
    let release = release()?;
    if Path::new("/dev/kfd").exists() {
        return Err(Skipped("this machine has its own driver".into()));
    }
    for _ in 0..2 {
        let error = Rocr::open().expect_err("no device");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{release}: {error}");
        assert_eq!(error.operation(), "hsa_init", "{release}: {error}");
        assert_eq!(error.iface_kind(), Some(IfaceKind::ROCR));
        let code = error.driver().expect("the runtime's code");
        assert_eq!((code.name.as_ref(), code.code), ("HSA_STATUS_ERROR_OUT_OF_RESOURCES", 0x1008));
        assert_eq!(error.context_value("library"), Some(Functions::LIBRARY));
        assert!(error.remedy_text().expect("a remedy").contains("/dev/kfd"), "{error}");
    }
    Ok(())
}

trials! {
    /// HM-04
    every_function_of_the_release_is_present,
    /// HM-04
    runtime_without_a_device_is_unavailable,
}

//! Checks the dependencies between crates:
//!
//! - `core`, `fake-common` and `xtask` depend on none
//! - `hook -> core`
//! - `iface-kit -> core`; `iface-* -> core, hook, iface-kit`
//! - `p2p -> core`
//! - `provider-* -> core, p2p`
//! - `conformance -> core, p2p, iface-system, provider-loopback`
//! - `hmem` depends on neither `hmem-cli` nor `conformance`
//! - `hmem-cli -> hmem, conformance`
//! - `hmem-c -> hmem, hmem-cli` (the reports)
//! - `fake-* -> fake-common`, and the iface that it fakes
//!
//! Also checks that one function copies memory that a NIC or another thread may change.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use crate::workspace;
use serde_json::Value;

fn workspace_arrows() -> BTreeMap<String, BTreeSet<String>> {
    let packages = workspace::packages();
    let text = |value: &Value| value.as_str().expect("a string").to_owned();
    let names: BTreeSet<_> = packages.iter().map(|package| text(&package["name"])).collect();
    let arrows_of = |package: &Value| {
        let dependencies = package["dependencies"].as_array().expect("dependencies");
        let normal = dependencies.iter().filter(|dependency| dependency["kind"].is_null());
        normal
            .map(|dependency| text(&dependency["name"]))
            .filter(|name| names.contains(name))
            .collect()
    };
    packages.iter().map(|package| (text(&package["name"]), arrows_of(package))).collect()
}

#[test]
fn dependencies_run_one_way() {
    let arrows = workspace_arrows();
    let only_core = BTreeSet::from(["hmem-core".to_owned()]);
    for (package, targets) in &arrows {
        match package.as_str() {
            "hmem-core" => assert!(targets.is_empty(), "core depends on {targets:?}"),
            "hmem-hook" => assert_eq!(targets, &only_core, "hooks know no iface"),
            "hmem-p2p" => assert_eq!(targets, &only_core, "p2p knows no iface and no provider"),
            provider if provider.starts_with("hmem-provider-") => {
                let may = BTreeSet::from(["hmem-core".to_owned(), "hmem-p2p".to_owned()]);
                assert!(targets.is_subset(&may), "{provider} knows core and p2p only: {targets:?}");
            }
            "hmem-conformance" => {
                let partners =
                    ["hmem-core", "hmem-p2p", "hmem-iface-system", "hmem-provider-loopback"];
                let partners: BTreeSet<_> = partners.map(str::to_owned).into();
                assert_eq!(targets, &partners, "the suite knows no vendor and no hardware");
            }
            "hmem" => {
                for other in ["hmem-c", "hmem-cli", "hmem-conformance"] {
                    assert!(!targets.contains(other), "the library does not know {other}");
                }
            }
            "hmem-cli" => {
                let may = ["hmem", "hmem-conformance"].map(str::to_owned).into();
                assert_eq!(targets, &may, "the command knows the library and its stress");
            }
            "hmem-c" => {
                let may = ["hmem", "hmem-cli"].map(str::to_owned).into();
                assert_eq!(targets, &may, "the C library knows the library and the reports");
            }
            "xtask" => assert!(targets.is_empty(), "the task runner only starts commands"),
            "hmem-fake-common" => {
                assert!(targets.is_empty(), "the fakes' common code knows no iface")
            }
            "hmem-iface-kit" => assert_eq!(targets, &only_core, "the kit knows no vendor"),
            fake if fake.starts_with("hmem-fake-") => {
                let iface = fake.replace("-fake-", "-iface-");
                let may = BTreeSet::from(["hmem-fake-common".to_owned(), iface]);
                assert!(
                    targets.is_subset(&may),
                    "{fake} knows the table that it fills and the fakes' common code: {targets:?}"
                );
            }
            iface if iface.starts_with("hmem-iface-") => {
                let may = ["hmem-core", "hmem-hook", "hmem-iface-kit"].map(str::to_owned).into();
                assert!(
                    targets.is_subset(&may),
                    "{iface} knows core, hooks and the kit, and nothing else: {targets:?}"
                );
            }
            other => panic!("say in this test what {other} may depend on"),
        }
    }
    assert!(arrows.len() >= 18, "{arrows:?}");
}

/// Library code that copies raw memory by other means than `racing_copy`, with the reason.
const OTHER_COPIES: [(&str, &str); 5] = [
    ("c/src/call.rs", "arguments and results of a call, which only its caller uses"),
    ("core/src/racing.rs", "the function itself"),
    ("hook/src/trampoline.rs", "machine code in a fresh mapping that nobody else knows"),
    ("cli/src/check/place.rs", "a page of the command, after all transfers have ended"),
    ("conformance/src/memory.rs", "memory of a test, while no transfer is in flight"),
];

/// Returns the sources below `folder`.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder of the workspace").flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// A plain copy of bytes that others change is undefined behaviour. `core/src/racing.rs` has the
/// argument.
#[test]
fn bytes_that_others_may_change_are_copied_by_one_function() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    for package in fs::read_dir(root).expect("the workspace").flatten() {
        let (name, folder) = (package.file_name(), package.path().join("src"));
        let is_library = !["target", "tests", "benches", "examples", "xtask"]
            .iter()
            .any(|other| name.to_str() == Some(other));
        if is_library && folder.is_dir() {
            sources(&folder, &mut found);
        }
    }
    assert!(found.len() > 100, "found the sources: {}", found.len());
    let plain = ["ptr::copy(", "copy_nonoverlapping(", "memmove(", "memcpy(", "AtomicU8::from_ptr"];
    let mut copies = BTreeSet::new();
    for path in found {
        let text = fs::read_to_string(&path).expect("a source");
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        if code.into_iter().any(|line| plain.iter().any(|call| line.contains(call))) {
            let path = path.strip_prefix(root).expect("in the workspace");
            copies.insert(path.to_str().expect("an UTF-8 path").to_owned());
        }
    }
    let expected = OTHER_COPIES.map(|(path, _)| path.to_owned()).into();
    assert_eq!(copies, expected, "use `hmem_core::racing_copy`");
}

//! Checks the manifests of the packages that are published.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::Command,
};

use crate::workspace;
use serde_json::Value;

/// Returns the names of all packages of the workspace, and the metadata of those that are
/// published.
fn packages() -> (BTreeSet<String>, Vec<Value>) {
    let packages = workspace::packages();
    let names = packages.iter().map(|package| text(&package["name"]).to_owned()).collect();
    let published = packages.iter().filter(|package| package["publish"].is_null()).cloned();
    (names, published.collect())
}

fn text(value: &Value) -> &str {
    value.as_str().expect("a string")
}

#[test]
fn published_packages_have_what_a_registry_shows() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (_, published) = packages();
    assert!(published.len() > 10, "{} published packages", published.len());
    for package in published {
        let name = text(&package["name"]);
        for key in ["description", "license", "readme"] {
            assert!(package[key].is_string(), "{name} has no {key}");
        }
        for key in ["keywords", "categories"] {
            assert!(package[key].as_array().is_some_and(|list| !list.is_empty()), "{name}: {key}");
        }
        let docs = &package["metadata"]["docs"]["rs"]["targets"];
        assert!(docs.is_array() || name == "hmem-cli", "{name} has no metadata for docs.rs");
        for licence in ["LICENSE-APACHE", "LICENSE-MIT"] {
            let own = Path::new(text(&package["manifest_path"])).with_file_name(licence);
            let own = fs::read(&own).unwrap_or_else(|error| panic!("{}: {error}", own.display()));
            let expected = fs::read(root.join(licence)).expect("the licence of the workspace");
            assert!(own == expected, "{licence} of {name} differs from that of the workspace");
        }
    }
}

/// Cargo requires a development dependency with a version to be published first. The packages
/// depend on each other in cycles for their tests, so no order would work.
#[test]
fn development_dependencies_of_the_workspace_have_no_version() {
    let (names, published) = packages();
    for package in published {
        for dependency in package["dependencies"].as_array().expect("dependencies") {
            let own = names.contains(text(&dependency["name"]));
            if own && dependency["kind"].as_str() == Some("dev") {
                let name = text(&package["name"]);
                assert_eq!(text(&dependency["req"]), "*", "{name} on {}", dependency["name"]);
            }
        }
    }
}

/// Returns the packages that a build of `package` compiles, each with its features.
fn compiled(package: &str, arguments: &[&str]) -> BTreeMap<String, BTreeSet<String>> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--edges=normal", "--prefix=none", "--format={f} {p}"])
        .args(["--package", package])
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let tree = String::from_utf8(output.stdout).expect("cargo prints UTF-8");
    // A line is, for example: "default,recordings hmem-p2p v0.1.0 (/folder) (*)"
    let entry = |line: &str| {
        let mut words = line.split(' ');
        let features = words.next().expect("features").split(',').map(str::to_owned).collect();
        (words.next().expect("a package").to_owned(), features)
    };
    tree.lines().map(entry).collect()
}

/// The package that contains the ifaces of several vendors, each behind a feature.
const ACCELERATOR_CRATE: &str = "hmem-iface-accelerators";
const ACCELERATORS: [&str; 2] = ["neuron", "synapseai"];

/// DOOR-02
///
/// The default features have all of it, which shows that the names are right.
#[test]
fn build_for_verbs_and_one_vendor_contains_no_testing_or_archive_code() {
    const LEFT_OUT: [&str; 4] = ["hmem-provider-loopback", "io-uring", "flate2", "tar"];
    let simulated = |packages: &BTreeMap<String, BTreeSet<String>>| {
        packages["hmem-iface-system"].contains("simulated")
    };
    let injector =
        |packages: &BTreeMap<String, BTreeSet<String>>| packages["hmem-core"].contains("testing");
    let full = compiled("hmem", &[]);
    assert!(LEFT_OUT.iter().all(|&name| full.contains_key(name)), "{:?}", full.keys());
    assert!(simulated(&full) && injector(&full));
    for vendor in ["cuda", "rocr", "ze", "neuron", "synapseai"] {
        let features = format!("verbs,{vendor}");
        let small = compiled("hmem", &["--no-default-features", "--features", &features]);
        let found: Vec<_> = LEFT_OUT.iter().filter(|&&name| small.contains_key(name)).collect();
        assert!(found.is_empty(), "{features} compiles {found:?}");
        assert!(!simulated(&small), "{features} compiles the simulated device");
        assert!(!injector(&small), "{features} compiles the fault injector");
        assert!(small.contains_key("hmem-provider-verbs"), "{features} lacks the provider");
        match ACCELERATORS.contains(&vendor) {
            true => assert_eq!(small[ACCELERATOR_CRATE], [vendor.to_owned()].into(), "{features}"),
            false => {
                let iface = format!("hmem-iface-{vendor}");
                assert!(small.contains_key(&iface), "{features} lacks {iface}");
            }
        }
    }
}

#[test]
fn ifaces_of_neuron_and_synapseai_are_enabled_by_the_command_alone() {
    let (library, command) = (compiled("hmem", &[]), compiled("hmem-cli", &[]));
    assert!(!library.contains_key(ACCELERATOR_CRATE), "the ifaces are on by default");
    assert_eq!(command[ACCELERATOR_CRATE], ACCELERATORS.map(str::to_owned).into());
}

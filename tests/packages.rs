//! Checks the manifests of the packages that are published.

mod workspace;

use std::{collections::BTreeSet, fs, path::Path};

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

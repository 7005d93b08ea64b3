//! Checks the dependencies between crates:
//!
//! - `core`, `fake-common` and `xtask` depend on none
//! - `hook -> core`
//! - `iface-* -> core, hook`; `iface-neuron, iface-synapseai -> core, iface-announced`
//! - `p2p -> core`
//! - `provider-* -> core, p2p`
//! - `conformance -> core, p2p, iface-system, provider-loopback`
//! - `hmem` depends on neither `hmem-cli` nor `conformance`
//! - `hmem-cli -> hmem, conformance`
//! - `fake-* -> fake-common`, and the iface that it fakes

mod workspace;

use std::collections::{BTreeMap, BTreeSet};

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
                for other in ["hmem-cli", "hmem-conformance"] {
                    assert!(!targets.contains(other), "the library does not know {other}");
                }
            }
            "hmem-cli" => {
                let may = ["hmem", "hmem-conformance"].map(str::to_owned).into();
                assert_eq!(targets, &may, "the command knows the library and its stress");
            }
            "xtask" => assert!(targets.is_empty(), "the task runner only starts commands"),
            "hmem-fake-common" => {
                assert!(targets.is_empty(), "the fakes' common code knows no iface")
            }
            "hmem-iface-neuron" | "hmem-iface-synapseai" => {
                let may = ["hmem-core", "hmem-iface-announced"].map(str::to_owned).into();
                assert_eq!(targets, &may, "{package} is a driver of the iface over a table");
            }
            fake if fake.starts_with("hmem-fake-") => {
                let iface = fake.replace("-fake-", "-iface-");
                let may = BTreeSet::from(["hmem-fake-common".to_owned(), iface]);
                assert!(
                    targets.is_subset(&may),
                    "{fake} knows the table that it fills and the fakes' common code: {targets:?}"
                );
            }
            iface if iface.starts_with("hmem-iface-") => {
                let may = BTreeSet::from(["hmem-core".to_owned(), "hmem-hook".to_owned()]);
                assert!(
                    targets.is_subset(&may),
                    "{iface} knows core and hooks, and nothing else: {targets:?}"
                );
            }
            other => panic!("say in this test what {other} may depend on"),
        }
    }
    assert!(arrows.len() >= 17, "{arrows:?}");
}

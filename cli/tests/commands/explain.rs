//! `hmem explain` and the distances of `hmem info`: the built command, and machines with a recorded
//! topology.

use std::{
    process::{Command, Output},
    sync::Arc,
};

use crate::hmem_process::schema;
use hmem::{
    Errno, Hmem,
    loopback::Loopback,
    p2p::topology::Topology,
    provider::Imports,
    system::{DeviceCall, SIMULATED, Simulated},
};
use hmem_cli::{
    args::ExplainArgs,
    explain::explain,
    info,
    machine::{Absent, Machine},
    problem::Problem,
    table::Style,
};
use serde_json::Value;

fn hmem(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hmem"));
    for name in [
        "FI_HMEM",
        "FI_HMEM_DISABLE_P2P",
        "HMEM_DIRECT_PATHS",
        "HMEM_REACH_CHECK",
        "NO_COLOR",
        "CLICOLOR_FORCE",
    ] {
        command.env_remove(name);
    }
    command.args(arguments).envs(environment.iter().copied()).output().expect("the binary runs")
}

fn ended(output: &Output, code: i32) -> &str {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{errors}");
    std::str::from_utf8(&output.stdout).expect("output is UTF-8")
}

fn json(output: &Output, code: i32) -> Value {
    serde_json::from_str(ended(output, code)).expect("JSON")
}

fn list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value[name].as_array().unwrap_or_else(|| panic!("{name} is no array"))
}

/// DIAG-01
#[test]
fn unavailable_nic_of_a_selected_provider_is_listed() {
    let hmem = Hmem::builder().without_vendor_ifaces().build().expect("hmem");
    let mut machine = Machine::new(hmem);
    let loopback = Loopback::builder().nic("hardware").build().expect("a provider");
    machine.add(Arc::new(loopback), true, "").expect("a NIC");
    let why = Problem::new("no io_uring");
    machine.absent.push(Absent { sort: "NIC", name: "loopback/pinned".into(), why });
    for (nic, listed) in [
        (None, 1),
        (Some("loopback"), 1),
        (Some("loopback/pinned"), 1),
        (Some("loopback/hardware"), 0),
    ] {
        let args = ExplainArgs { nic: nic.map(str::to_owned), ..ExplainArgs::default() };
        let report = explain(&machine, &args).expect("a report");
        assert_eq!(report.skipped.len(), listed, "{nic:?}");
    }
}

/// DIAG-01
///
/// Host memory has a path, and the memory of the device cannot be allocated.
#[test]
fn failed_allocation_fails_the_explanation() {
    for (nth, passed) in [(1, false), (1000, true)] {
        let device = Simulated::builder().fault(DeviceCall::CreateMemory, nth, Errno(12));
        let device = device.build().expect("a device");
        let hmem = Hmem::builder().without_vendor_ifaces().iface(device).build().expect("hmem");
        let mut machine = Machine::new(hmem);
        let loopback = Loopback::builder().nic("hardware").build().expect("a provider");
        machine.add(Arc::new(loopback), true, "").expect("a NIC");
        let report = explain(&machine, &ExplainArgs::default()).expect("a report");
        assert!(report.explanations.iter().any(|entry| entry.iface == "system"));
        assert_eq!((report.passed(), report.skipped.is_empty()), (passed, passed), "{report:?}");
    }
}

/// DIAG-01, P2P-03
#[test]
fn explain_shows_the_path_of_every_pair() {
    let document = json(&hmem(&["explain", "--json"], &[]), 0);
    schema::matches("explain", &document);
    let explanations = list(&document, "explanations");
    let info = json(&hmem(&["info", "--json"], &[]), 0);
    let (devices, nics) = (list(&info, "devices"), list(&info, "providers"));
    let simulated = devices.iter().filter(|device| device["software"] == true).count();
    assert!(explanations.len() >= (simulated + 1) * nics.len());
    for entry in explanations {
        let trace = list(entry, "trace");
        assert!(
            trace
                .last()
                .is_some_and(|last| last["error"].is_null() && last["path"] == entry["path"]),
            "{entry}"
        );
        if entry["iface"] == "simulated" {
            let unknown = entry["wiring"]["unknown"].as_str().expect("a reason");
            assert!(unknown.contains("no PCI address"), "software has no PCI address: {unknown}");
            assert!(
                entry["wiring"]["topo_path"].is_null()
                    && list(&entry["wiring"], "findings").is_empty()
            );
        }
    }
}

/// DIAG-01, P2P-02, P2P-03
///
/// The text output contains the refused paths and the remedies.
#[test]
fn explain_covers_the_selected_pair_under_the_policy() {
    let one = [
        "explain",
        "--iface",
        "simulated",
        "--device",
        "1",
        "--nic",
        "loopback/hardware",
        "--size",
        "64KiB",
    ];
    let output = hmem(&one, &[]);
    let text = ended(&output, 0);
    for word in [
        "simulated:1 to loopback/hardware",
        "64 KiB",
        "path: dma-buf",
        "simulated:1 has no PCI address",
    ] {
        assert!(text.contains(word), "{word} is not in:\n{text}");
    }
    assert_eq!(text.matches("path: ").count(), 1, "{text}");
    assert!(!text.contains('\x1b'));

    let staged = hmem(&[&one[..], &["--policy", "disabled", "--json"]].concat(), &[]);
    let document = json(&staged, 0);
    let entry = &list(&document, "explanations")[0];
    assert_eq!((&entry["path"], &entry["policy"]), (&"staged".into(), &"disabled".into()));
    assert!(!list(entry, "remedies").is_empty(), "what would make it direct: {entry}");

    let forbidden = [("FI_HMEM_DISABLE_P2P", "1")];
    let refused = hmem(&[&one[..], &["--policy", "required", "--json"]].concat(), &forbidden);
    let document = json(&refused, 1);
    let entry = &list(&document, "explanations")[0];
    assert!(entry["path"].is_null() && entry["p2p_disabled"] == true, "{entry}");
    assert!(!list(entry, "remedies").is_empty(), "{entry}");
    assert!(
        ended(&hmem(&[&one[..], &["--policy", "required"]].concat(), &forbidden), 1)
            .contains("path: none")
    );
}

/// LIFE-06
#[test]
fn explanation_follows_and_names_the_order_of_direct_paths() {
    let pair = ["explain", "--iface", "simulated", "--device", "0", "--nic", "loopback/hardware"];
    let json_pair = [&pair[..], &["--json"]].concat();
    let entry = |variables: &[(&str, &str)]| {
        list(&json(&hmem(&json_pair, variables), 0), "explanations")[0].clone()
    };
    let default = entry(&[]);
    assert_eq!((&default["path"], &default["unit"]), (&"dma-buf".into(), &"range".into()));
    assert!(default["direct_paths"].is_null(), "{default}");

    let none = [("HMEM_DIRECT_PATHS", "none")];
    let staged = entry(&none);
    assert_eq!((&staged["path"], &staged["unit"]), (&"staged".into(), &Value::Null));
    assert_eq!(staged["direct_paths"], serde_json::json!([]));
    let reordered = entry(&[("HMEM_DIRECT_PATHS", "peer-memory,dma-buf")]);
    assert_eq!(reordered["direct_paths"], serde_json::json!(["peer-memory", "dma-buf"]));
    assert_eq!(list(&reordered, "trace")[0]["path"], "peer-memory");
    let output = hmem(&pair, &none);
    let text = ended(&output, 0);
    assert!(text.contains("direct paths: none (HMEM_DIRECT_PATHS)"), "{text}");
}

/// DIAG-03, P2P-03
#[test]
fn remedy_of_a_refused_path_is_printed_with_its_attempt() {
    let wide = [("COLUMNS", "140")];
    let pair =
        ["explain", "--iface", "simulated", "--device", "0", "--nic", "loopback/peer-memory"];
    let output = hmem(&pair, &wide);
    let text = ended(&output, 0);
    let lines: Vec<_> = text.lines().map(str::trim).collect();
    let tried = lines.iter().position(|line| line.starts_with("tried peer-memory")).expect(text);
    assert!(lines[tried - 1].starts_with("to use dma-buf: use a NIC"), "{text}");
    assert!(!text.contains("load a peer-memory client") && !text.contains("remedy:"), "{text}");

    let document = json(&hmem(&[&pair[..], &["--json"]].concat(), &wide), 0);
    assert!(!document.to_string().contains("or load a peer-memory client"), "{document}");

    let output = hmem(&["info"], &wide);
    let text = ended(&output, 0);
    let paths = text.split("Paths (").nth(1).and_then(|rest| rest.split("\n\n").nth(1));
    let paths = paths.expect("the reasons of paths");
    assert!(paths.contains("to use dma-buf: use a NIC"), "{paths}");
    assert!(!paths.contains("load a peer-memory client") && !paths.contains("remedy:"), "{paths}");

    // If no path was chosen, the remedies have the label `remedy:`.
    let forbidden = [("FI_HMEM_DISABLE_P2P", "1"), wide[0]];
    let output = hmem(&[&pair[..], &["--policy", "required"]].concat(), &forbidden);
    assert!(ended(&output, 1).contains("\n  remedy: "), "{output:?}");
}

/// DIAG-01
///
/// An unavailable iface fails the command. The error for an unknown name lists the known names.
#[test]
fn explain_lists_unavailable_ifaces_and_refuses_unknown_names() {
    let info = json(&hmem(&["info", "--json"], &[]), 0);
    for iface in list(&info, "ifaces").iter().filter(|iface| iface["available"] == false) {
        let name = iface["name"].as_str().expect("text");
        let document = json(&hmem(&["explain", "--json", "--iface", name], &[]), 1);
        assert!(list(&document, "explanations").is_empty());
        assert!(
            list(&document, "skipped")
                .iter()
                .any(|skipped| skipped["what"] == format!("iface {name}"))
        );
        assert!(
            ended(&hmem(&["explain", "--iface", name], &[]), 1).contains("nothing was explained")
        );
    }
    for (arguments, words) in [
        (&["explain", "--iface", "nonsense"][..], &["--iface", "simulated"][..]),
        (&["explain", "--nic", "nonsense"], &["--nic", "loopback/pinned"]),
        (&["explain", "--iface", "simulated", "--device", "7"], &["--device", "7", "0, 1"]),
        (&["explain", "--device", "0"], &["--iface"]),
        (&["explain", "--policy", "maybe"], &["--policy", "required"]),
        (&["explain", "--size", "0"], &["--size"]),
    ] {
        let output = hmem(arguments, &[]);
        assert_eq!(ended(&output, 2), "");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(error.starts_with("error: ") && error.trim_end().lines().count() == 1, "{error}");
        words.iter().for_each(|word| assert!(error.contains(word), "{word} is not in: {error}"));
    }
}

/// Returns a machine with two devices and two NICs at these addresses of a recorded topology.
fn placed(name: &str, devices: [&str; 2], nics: [(&str, &str); 2]) -> Machine {
    let simulated =
        Simulated::builder().devices(2).pci_bus_ids(devices).memory_per_device(80 << 30).build();
    let hmem = Hmem::builder().without_vendor_ifaces().iface(simulated.unwrap()).build().unwrap();
    let mut machine = Machine::new(hmem);
    machine.software.push((SIMULATED, "simulated".into()));
    for (nic, address) in nics {
        let imports = Imports { staged: true, ..Imports::default() };
        let nic =
            Loopback::builder().nic(nic).pci_bus_id(address).imports(imports).build().unwrap();
        machine.add(Arc::new(nic), true, "for tests").unwrap();
    }
    let path =
        format!("{}/../p2p/tests/fixtures/topology/{name}.tar.gz", env!("CARGO_MANIFEST_DIR"));
    machine.topology = Some(Topology::open(path).unwrap());
    machine
}

fn dgx() -> Machine {
    // Addresses with the eight-digit domain that the CUDA driver reports. Device 0 is the machine's
    // third GPU.
    placed(
        "dgx-a100",
        ["00000000:47:00.0", "00000000:07:00.0"],
        [("near", "0000:0c:00.0"), ("storage", "0000:61:00.0")],
    )
}

/// DIAG-01, P2P-05
///
/// The distance depends on the PCI address of a device, not on its ordinal.
#[test]
fn info_shows_the_distance_of_each_pair() {
    let inventory = info::inventory(&dgx(), None).expect("good variables");
    let distances: Vec<_> = inventory
        .p2p
        .iter()
        .map(|entry| (entry.device, entry.nic.as_str(), entry.distance, entry.path))
        .collect();
    assert_eq!(
        distances,
        [
            (None, "near", None, Some("plain-host")),
            (None, "storage", None, Some("plain-host")),
            (Some(0), "near", Some("SYS"), Some("staged")),
            (Some(0), "storage", Some("SYS"), Some("staged")),
            (Some(1), "near", Some("PXB"), Some("staged")),
            (Some(1), "storage", Some("SYS"), Some("staged")),
        ]
    );
    let mut text = Vec::new();
    info::text(&mut text, &inventory, Style::plain()).unwrap();
    assert!(String::from_utf8(text).unwrap().contains("staged (PXB)"));

    // The distance is unknown, with a reason, for addresses outside the tree and malformed
    // addresses.
    let elsewhere = placed(
        "laptop",
        ["0000:ee:00.0", "0000:01:00.0"],
        [("a", "0000:0c:00.0"), ("b", "nowhere")],
    );
    let inventory = info::inventory(&elsewhere, None).expect("good variables");
    let why: Vec<_> =
        inventory.p2p.iter().filter_map(|entry| entry.distance_unknown.as_deref()).collect();
    assert_eq!(why.len(), 4);
    assert!(why[0].contains("simulated:0: 0000:ee:00.0 is not in the PCIe tree"), "{why:?}");
    assert!(why[2].contains("loopback/a: 0000:0c:00.0 is not in the PCIe tree"), "{why:?}");
    assert!(why[3].contains("nowhere"), "{why:?}");
}

/// DIAG-03, P2P-05
///
/// The explanation lists the obstacles in the wiring.
#[test]
fn explain_names_the_nearer_nic_and_the_small_bar() {
    let arguments = ExplainArgs { iface: Some("simulated".into()), ..ExplainArgs::default() };
    let report = explain(&dgx(), &arguments).unwrap();
    let document = serde_json::to_value(&report).unwrap();
    schema::matches("explain", &document);
    let entries = list(&document, "explanations");
    assert_eq!(entries.len(), 4);
    let of = |device: u32, nic: &str| {
        entries
            .iter()
            .find(|entry| entry["device"] == device && entry["nic"] == nic)
            .expect("an entry")
    };
    for entry in entries {
        assert_eq!(entry["wiring"]["largest_bar"], 64_u64 << 30);
        assert_eq!(entry["wiring"]["iommu"], "passthrough");
    }
    let findings = |entry: &Value| -> Vec<(String, String)> {
        let findings = list(&entry["wiring"], "findings").iter();
        findings.map(|finding| (finding["name"].to_string(), finding["what"].to_string())).collect()
    };
    let near = findings(of(1, "near"));
    assert_eq!(
        near.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
        ["\"bar\""],
        "80 GiB behind 64"
    );
    let far = findings(of(1, "storage"));
    let (_, what) = far.iter().find(|(name, _)| name == "\"distance\"").expect("a nearer NIC");
    assert!(what.contains("mlx5_0") && what.contains("PXB"), "{what}");
}

/// DIAG-03
///
/// On the recorded machine, ACS redirects traffic and the IOMMU translates addresses.
#[test]
fn explain_finds_acs_and_the_iommu() {
    let machine = placed(
        "switch-acs",
        ["0000:3d:00.0", "0000:1a:00.0"],
        [("near", "0000:3f:00.0"), ("other", "0000:3f:00.1")],
    );
    let arguments = ExplainArgs { nic: Some("loopback/near".into()), ..ExplainArgs::default() };
    let report = explain(&machine, &arguments).unwrap();
    let entry = report.explanations.iter().find(|entry| entry.device == Some(0)).unwrap();
    let names: Vec<_> = entry.wiring.findings.iter().map(|finding| finding.name).collect();
    assert_eq!(names, ["acs", "iommu", "bar", "peer-memory"]);
    let acs = &entry.wiring.findings[0];
    assert!(
        acs.what.contains("0000:3c:04.0, 0000:3c:0c.0") && acs.remedy.contains("setpci"),
        "{acs:?}"
    );
    assert!(entry.wiring.findings[1].remedy.contains("iommu=pt"));
    let path = entry.wiring.topo_path.as_ref().unwrap();
    assert_eq!((path.distance, path.redirection), ("PIX", "by-ports"));
    let far = report.explanations.iter().find(|entry| entry.device == Some(1)).unwrap();
    let path = far.wiring.topo_path.as_ref().unwrap();
    assert_eq!((path.distance, path.redirection), ("NODE", "none"));
    assert!(path.hops.iter().any(|hop| hop.contains("host-bridge")), "{path:?}");
    let mut text = Vec::new();
    hmem_cli::explain::text(&mut text, &report, Style::plain()).unwrap();
    let text = String::from_utf8(text).unwrap();
    for word in
        ["distance: PIX", "ACS: redirects at 0000:3c:04.0", "obstacle (acs):", "IOMMU: translating"]
    {
        assert!(text.contains(word), "{word} is not in:\n{text}");
    }
}

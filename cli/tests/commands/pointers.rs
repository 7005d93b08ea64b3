//! `hmem explain --pointer` over the simulated device and the fake libraries of all vendors.

use std::{
    collections::BTreeSet,
    path::PathBuf,
    process::{Command, Output},
    sync::{Arc, Mutex},
};

use crate::hmem_process::schema;
use crate::machine;
use hmem::{
    Address, Allocation, Hmem, Iface, IfaceKind, Result,
    iface::{AllocRequest, Allocator, Device},
    loopback::Loopback,
    system::Simulated,
};
use hmem_cli::{
    args::{ExplainArgs, PointerSort},
    explain::{explain, text},
    machine::Machine,
    table::Style,
};
use serde_json::Value;

const IFACES: [&str; 7] = ["cuda", "neuron", "rocr", "simulated", "synapseai", "system", "ze"];

/// Returns the path of a fake library, which Cargo builds into the folder of this test.
fn library(name: &str) -> PathBuf {
    // The only uses of the crates by name; otherwise they would be unused dependencies.
    let _: fn() -> Vec<hmem_fake_cuda::Profile> = hmem_fake_cuda::Profile::all;
    let _: fn() -> Vec<hmem_fake_rocr::Profile> = hmem_fake_rocr::Profile::all;
    let _: fn() -> Vec<hmem_fake_ze::Profile> = hmem_fake_ze::Profile::all;
    let _: fn() -> hmem_fake_accelerators::Profile = Default::default;
    let test = std::env::current_exe().expect("the path of this test");
    let library = test.parent().expect("a folder").join(format!("libhmem_fake_{name}.so"));
    assert!(library.exists(), "{} was not built", library.display());
    library
}

/// Runs the command with a fake library for each vendor.
fn hmem(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hmem"));
    for name in ["FI_HMEM", "FI_HMEM_DISABLE_P2P", "NO_COLOR", "CLICOLOR_FORCE"] {
        command.env_remove(name);
    }
    for (variable, name) in [
        ("HMEM_CUDA_LIBRARY", "cuda"),
        ("HMEM_ROCR_LIBRARY", "rocr"),
        ("HMEM_ZE_LIBRARY", "ze"),
        ("HMEM_NEURON_LIBRARY", "accelerators"),
        ("HMEM_SYNAPSEAI_LIBRARY", "accelerators"),
        ("HMEM_HLTHUNK_LIBRARY", "accelerators"),
    ] {
        command.env(variable, library(name));
    }
    let profiles =
        [("HMEM_FAKE_CUDA", "580-open"), ("HMEM_FAKE_ROCR", "7.2"), ("HMEM_FAKE_ZE", "current")];
    command.envs(profiles);
    command.env("HMEM_NEURON_START_RUNTIME", "1").env("HMEM_SYNAPSEAI_START_RUNTIME", "1");
    command.arg("explain").args(arguments).output().expect("the binary runs")
}

/// Returns the software NICs that this process can open.
fn nics() -> impl Iterator<Item = &'static str> {
    let pinned = machine::without_pinned_pages().is_none().then_some("loopback/pinned");
    ["loopback/scalable", "loopback/hardware", "loopback/peer-memory"].into_iter().chain(pinned)
}

fn pointers(document: &Value) -> &[Value] {
    document["pointers"].as_array().unwrap_or_else(|| panic!("no pointers: {document}"))
}

/// Returns the words that the error of a refused device pointer must contain.
fn words(entry: &Value) -> &str {
    match entry["sort"].as_str() {
        Some("past-end") => "one past the end of an allocation",
        Some("freed") => "it was freed",
        Some("null") => "which is null",
        Some("foreign") if entry["owner"] == "system" => "is host memory",
        Some("foreign") => "name the iface that owns the memory",
        _ => panic!("{entry}"),
    }
}

/// HM-01 DIAG-03
#[test]
fn each_wrong_pointer_of_each_iface_is_refused_with_a_remedy() {
    for nic in nics() {
        let output = hmem(&["--pointer", "all", "--nic", nic, "--json"]);
        let document: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert!(output.status.success(), "{document}");
        assert_eq!(
            (&document["schema"], &document["explanations"]),
            (&2.into(), &Value::Array(vec![]))
        );
        for iface in IFACES {
            let of_iface: Vec<_> =
                pointers(&document).iter().filter(|entry| entry["iface"] == iface).collect();
            let found: BTreeSet<_> = of_iface
                .iter()
                .map(|entry| (entry["sort"].as_str(), entry["owner"].as_str()))
                .collect();
            let plain = ["interior", "past-end", "freed", "null"].map(|sort| (Some(sort), None));
            let others = IFACES.into_iter().filter(|other| *other != iface);
            let foreign = others.map(|other| (Some("foreign"), Some(other)));
            assert_eq!(found, foreign.chain(plain).collect(), "{iface} to {nic}");
            for entry in of_iface {
                assert_eq!(entry["correct"], true, "{entry}");
                let refused = entry["outcome"] == "refused";
                for name in ["error", "cause", "remedy"] {
                    assert_eq!(entry[name].is_string(), refused, "{name} of {entry}");
                }
                assert_eq!(entry["path"].is_null(), refused, "{entry}");
                let needs_no_pages = iface == "system" && entry["nic"] == "scalable";
                match entry["sort"].as_str() {
                    Some("interior") => assert_eq!(entry["outcome"], "registered", "{entry}"),
                    Some("foreign") => {
                        assert!(entry["error"].as_str().unwrap().contains(words(entry)), "{entry}");
                    }
                    _ if needs_no_pages => assert_eq!(entry["outcome"], "allowed", "{entry}"),
                    _ if iface == "system" => {
                        assert!(
                            entry["error"].as_str().unwrap().contains("not reachable"),
                            "{entry}"
                        );
                    }
                    _ => {
                        assert!(entry["error"].as_str().unwrap().contains(words(entry)), "{entry}")
                    }
                }
            }
        }
        schema::matches("explain", &document);
    }
}

/// DIAG-03
#[test]
fn text_shows_each_selected_sort_with_its_remedy() {
    let one = ["--iface", "rocr", "--device", "0", "--nic", "loopback/hardware"];
    let output = hmem(&[&one[..], &["--pointer", "null,interior", "--pointer", "freed"]].concat());
    let text = String::from_utf8_lossy(&output.stdout);
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(output.status.success(), "{text}");
    for words in [
        "pointers to rocr:0, to loopback/hardware interior: registered by dma-buf",
        "freed: refused:",
        "null: refused:",
        "remedy: register memory that this process allocated",
    ] {
        assert!(text.contains(words), "{words} is not in: {text}");
    }
    assert!(!text.contains("past-end") && !text.contains("foreign"), "{text}");
    assert_eq!(hmem(&["--pointer", "dangling"]).status.code(), Some(2));
}

/// Without a second iface, no foreign pointer can be tried. The command then fails.
#[test]
fn foreign_pointer_without_another_iface_is_skipped_with_the_reason() {
    let mut machine = Machine::new(Hmem::builder().without_vendor_ifaces().build().unwrap());
    machine.add(Arc::new(Loopback::builder().build().unwrap()), true, "for tests").unwrap();
    let pointer = vec![PointerSort::Null, PointerSort::Foreign];
    let report = explain(&machine, &ExplainArgs { pointer, ..ExplainArgs::default() }).unwrap();
    let mut out = Vec::new();
    text(&mut out, &report, Style::plain()).unwrap();
    let out = String::from_utf8(out).unwrap();
    assert!(out.contains("no other iface allocates memory"), "{out}");
    assert!(!report.passed(), "{out}");
}

/// A simulated iface that still reports memory as allocated after it was freed.
#[derive(Debug)]
struct Stale {
    simulated: Simulated,
    last: Mutex<Option<Allocation>>,
}

// SAFETY: the answers of `query` break the contract on purpose. The test copies no bytes, and the
// memory of the simulated device stays mapped.
#[allow(unsafe_code, reason = "the trait is unsafe to implement")]
unsafe impl Iface for Stale {
    fn kind(&self) -> IfaceKind {
        self.simulated.kind()
    }

    fn name(&self) -> &str {
        self.simulated.name()
    }

    fn devices(&self) -> Result<Vec<Device>> {
        self.simulated.devices()
    }

    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        let last = *self.last.lock().unwrap();
        Ok(last.filter(|allocation| allocation.range.contains(address)))
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        // SAFETY: the caller upholds the contract of this method, and the forwarded call has the
        // same contract.
        unsafe { self.simulated.copy(to, from, len) }
    }

    fn allocator(&self) -> Option<&dyn Allocator> {
        Some(self)
    }
}

#[allow(unsafe_code, reason = "freeing is unsafe")]
impl Allocator for Stale {
    fn allocate(&self, request: &AllocRequest) -> Result<Allocation> {
        let allocation =
            self.simulated.allocator().expect("the simulated iface allocates").allocate(request)?;
        *self.last.lock().unwrap() = Some(allocation);
        Ok(allocation)
    }

    unsafe fn free(&self, allocation: &Allocation) -> Result<()> {
        // SAFETY: the caller upholds the contract of this method, and the forwarded call has the
        // same contract.
        unsafe {
            self.simulated.allocator().expect("the simulated iface allocates").free(allocation)
        }
    }
}

/// HM-01
#[test]
fn wrong_pointer_that_registers_is_a_defect() {
    let stale = Stale { simulated: Simulated::builder().build().unwrap(), last: Mutex::default() };
    let hmem = Hmem::builder().without_vendor_ifaces().shared_iface(Arc::new(stale));
    let mut machine = Machine::new(hmem.build().unwrap());
    machine.add(Arc::new(Loopback::builder().build().unwrap()), true, "for tests").unwrap();
    let passes = |sort| {
        let iface = Some("simulated".to_owned());
        let args = ExplainArgs { iface, pointer: vec![sort], ..ExplainArgs::default() };
        let report = explain(&machine, &args).unwrap();
        let mut out = Vec::new();
        text(&mut out, &report, Style::plain()).unwrap();
        (report.passed(), String::from_utf8(out).unwrap())
    };
    assert!(passes(PointerSort::Null).0);
    let (passed, text) = passes(PointerSort::Freed);
    assert!(!passed && text.contains("freed: registered by staged: a defect"), "{text}");
}

/// HM-01
#[test]
fn pointers_leave_nothing_allocated_or_exported() {
    let machine = Machine::find(hmem::Hmem::builder()).unwrap();
    let counts = || machine.watches.iter().map(|watch| (watch.count)()).collect::<Vec<_>>();
    let before = counts();
    let pointer = vec![PointerSort::All];
    for nic in nics() {
        let (iface, nic) = (Some("simulated".to_owned()), Some(nic.to_owned()));
        let args = ExplainArgs { iface, nic, pointer: pointer.clone(), ..ExplainArgs::default() };
        let report = explain(&machine, &args).unwrap();
        assert!(report.passed(), "{report:?}");
    }
    assert_eq!(before.len(), 2);
    assert_eq!(counts(), before);
}

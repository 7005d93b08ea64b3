//! `hmem check` on faulty machines, which must fail and name the fault.

mod faulty;
#[path = "../../../conformance/tests/monitor/mod.rs"]
mod monitor;

// The module `monitor` is shared with the conformance suite and refers to the crate as `hmem_core`.
extern crate hmem as hmem_core;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hmem::{
    Errno, Error, ErrorKind, Hmem, Iface, Path,
    loopback::{self, Loopback},
    provider::{Imports, Provider},
    system::{self, AddressReuse, DmaBufKind, P2pMatrix, SIMULATED, Simulated},
};
use hmem_cli::{
    Outcome,
    args::{CheckArgs, Command},
    check::{Atomic, Report, Selection, check, text},
    machine::{Machine, Watch},
    run_on,
    table::Style,
};

use self::faulty::{Fault, Faulty};

/// Returns a lock that serialises checks, since a check counts the fds of the process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn simulated() -> Arc<Simulated> {
    Arc::new(Simulated::builder().build().unwrap())
}

fn machine(
    iface: Arc<dyn Iface>,
    provider: impl Provider + 'static,
    watch: &Arc<Simulated>,
) -> Machine {
    let hmem = Hmem::builder()
        .without_vendor_ifaces()
        .ifaces("simulated")
        .shared_iface(iface)
        .build()
        .unwrap();
    let watched = Arc::clone(watch);
    let mut machine = Machine::new(hmem);
    machine.software.push((SIMULATED, "simulated".into()));
    machine.watches.push(Watch::open_fds());
    machine.watches.push(Watch {
        what: "allocations",
        count: Box::new(move || watched.stats().live_allocations),
    });
    machine.add(Arc::new(provider), true, "for tests").unwrap();
    machine
}

/// Returns a machine whose NIC counts as hardware, which may lack a feature.
fn hardware(iface: Arc<dyn Iface>, provider: Loopback, watch: &Arc<Simulated>) -> Machine {
    let mut machine = machine(iface, provider, watch);
    machine.nics[0].software = false;
    machine
}

fn loopback() -> Loopback {
    Loopback::builder().build().unwrap()
}

fn quick() -> Selection {
    let mut selection =
        Selection { iface: Some("simulated".into()), measure_ns: 0, ..Selection::default() };
    selection.extents.pop();
    selection
}

fn run(machine: &Machine) -> Report {
    check(machine, &quick(), |_, _, _| {}).expect("good variables")
}

/// Returns the report's row for one sort of memory and one path.
#[track_caller]
fn row<'a>(report: &'a Report, memory: &str, path: &str) -> &'a hmem_cli::check::Row {
    let mut rows = report.rows.iter().filter(|row| row.memory == memory && row.path == path);
    rows.next().unwrap_or_else(|| panic!("no row of {memory} over {path}: {report:?}"))
}

/// Asserts that the check of this memory and path failed, with an error that contains all words.
#[track_caller]
fn failed(report: &Report, memory: &str, path: &str, words: &[&str]) {
    let row = row(report, memory, path);
    let error = row.error.as_deref().unwrap_or_default();
    assert!(!row.verified && row.gib_per_s.is_none(), "{row:?}");
    for word in words {
        assert!(error.contains(word), "{word} is not in: {error}");
    }
    assert!(!report.passed());
}

/// DIAG-02
#[test]
fn check_of_a_sound_machine_passes() {
    let _alone = alone();
    let simulated = simulated();
    let report = run(&machine(Arc::clone(&simulated) as _, loopback(), &simulated));
    assert!(report.passed(), "{report:?}");
    assert_eq!(row(&report, "device", "dma-buf").atomic, Atomic::Verified);
    assert_eq!(row(&report, "device", "staged").atomic, Atomic::Refused);
    // The check for stale registrations is skipped, since this NIC does not keep the pages of a
    // registration.
    let skipped: Vec<_> = report.skipped.iter().map(|skipped| skipped.what.as_str()).collect();
    assert_eq!(skipped, ["stale registrations"]);
    assert!(report.skipped[0].why.contains("over loopback/pinned only"), "{report:?}");
}

/// DIAG-02
#[test]
fn copy_engine_that_flips_a_bit_fails_the_check() {
    let _alone = alone();
    let simulated = simulated();
    let faulty = Faulty { simulated: Arc::clone(&simulated), fault: Fault::FlipsABit };
    let report = run(&machine(Arc::new(faulty), loopback(), &simulated));
    failed(&report, "device", "dma-buf", &["1 of", "bytes are wrong"]);
    failed(&report, "device", "staged", &["bytes are wrong"]);
}

/// DIAG-02 HM-06
#[test]
fn export_that_ignores_the_start_of_its_range_fails_the_check() {
    let _alone = alone();
    let simulated = simulated();
    let faulty = Faulty { simulated: Arc::clone(&simulated), fault: Fault::ExportsFromTheStart };
    let report = run(&machine(Arc::new(faulty), loopback(), &simulated));
    failed(&report, "device", "dma-buf", &["bytes are wrong"]);
    assert!(row(&report, "device", "staged").verified);
}

/// DIAG-02
#[test]
fn leaks_fail_the_check() {
    let _alone = alone();
    for (fault, memory, path, what) in [
        (Fault::LeaksAnFd, "device", "dma-buf", "open fds"),
        (Fault::KeepsMemory, "device", "staged", "allocations"),
    ] {
        let simulated = simulated();
        let faulty = Faulty { simulated: Arc::clone(&simulated), fault };
        let report = run(&machine(Arc::new(faulty), loopback(), &simulated));
        failed(&report, memory, path, &["left behind", what]);
    }
}

/// DIAG-02
///
/// The text and the JSON output contain the driver's error.
#[test]
fn failing_copy_fails_the_command_and_is_named() {
    let _alone = alone();
    let simulated = simulated();
    simulated.faults().fail_always(system::DeviceCall::Copy, Errno(5));
    let machine = machine(Arc::clone(&simulated) as _, loopback(), &simulated);
    for json in [false, true] {
        let mut out = Vec::new();
        let command = Command::Check(CheckArgs { json, quick: true, ..CheckArgs::default() });
        let outcome = run_on(&machine, &command, Style::plain(), &mut out).unwrap();
        assert_eq!(outcome, Outcome::Failed);
        let out = String::from_utf8(out).unwrap();
        assert!(out.contains("EIO (5)") && out.contains("sim_copy"), "{out}");
        if json {
            let document: serde_json::Value = serde_json::from_str(&out).unwrap();
            let rows = document["rows"].as_array().unwrap();
            assert!(rows.iter().any(|row| row["verified"] == true), "host memory still works");
            assert!(rows.iter().any(|row| row["verified"] == false && row["gib_per_s"].is_null()));
        } else {
            assert!(
                out.contains("simulated:0 device to loopback/loop0 over dma-buf")
                    && out.contains("FAILED"),
                "{out}"
            );
        }
    }
}

/// DIAG-02, CACHE-02
///
/// Text and JSON output contain the number of stale rounds.
#[test]
fn monitor_that_misses_frees_fails_the_command() {
    let _alone = alone();
    let device =
        || Arc::new(Simulated::builder().address_reuse(AddressReuse::JustFreed).build().unwrap());
    for (fault, outcome) in
        [(Some(Fault::ConfusesAllocations), Outcome::Failed), (None, Outcome::Passed)]
    {
        let simulated = device();
        let iface: Arc<dyn Iface> = match fault {
            Some(fault) => Arc::new(Faulty { simulated: Arc::clone(&simulated), fault }),
            None => Arc::clone(&simulated) as _,
        };
        // The check takes a NIC of this name for one that keeps pages. All NICs keep a dma-buf's.
        let nic = Loopback::builder().nic("pinned").build().unwrap();
        let machine = machine(iface, nic, &simulated);
        for json in [false, true] {
            let mut out = Vec::new();
            let arguments = CheckArgs {
                json,
                quick: true,
                iface: Some("simulated".into()),
                ..CheckArgs::default()
            };
            let ended =
                run_on(&machine, &Command::Check(arguments), Style::plain(), &mut out).unwrap();
            let out = String::from_utf8(out).unwrap();
            assert_eq!(ended, outcome, "{out}");
            if !json {
                let what = "stale registrations of simulated under identity";
                assert_eq!(out.contains(what), fault.is_some(), "{out}");
                continue;
            }
            let document: serde_json::Value = serde_json::from_str(&out).unwrap();
            let rows = document["stale"].as_array().unwrap();
            let row = rows.iter().find(|row| row["monitor"] == "identity").unwrap();
            assert_eq!(row["verified"], fault.is_none(), "{row}");
            // Every round except the first has a hit on a stale registration.
            let stale = row["rounds"].as_u64().unwrap() - 1;
            assert_eq!(row["stale"], if fault.is_some() { stale } else { 0 }, "{row}");
            // The monitor `callback` has no fault and passes.
            assert!(
                rows.iter().any(|row| row["monitor"] == "callback" && row["verified"] == true),
                "{out}"
            );
            assert!(
                document["rows"].as_array().unwrap().iter().all(|row| row["verified"] == true),
                "{out}"
            );
        }
    }
}

/// DIAG-02
#[test]
fn nic_that_loses_transfers_or_registrations_fails_the_check() {
    let _alone = alone();
    for (call, path, words) in [
        (loopback::NicCall::Transfer, "dma-buf", &["EIO (5)"][..]),
        (loopback::NicCall::Register, "dma-buf", &["register", "EIO (5)"]),
        (loopback::NicCall::Deregister, "staged", &["EIO (5)"]),
        (loopback::NicCall::OpenEndpoint, "plain-host", &["EIO (5)"]),
    ] {
        let simulated = simulated();
        let faults = loopback::Faults::new();
        let nic = Loopback::builder().faults(&faults).build().unwrap();
        let machine = machine(Arc::clone(&simulated) as _, nic, &simulated);
        // Every call fails, since a check makes fewer than 1000.
        (1..1000).for_each(|nth| faults.fail_nth(call, nth, Errno(5)));
        let report = run(&machine);
        let memory = if path == "plain-host" { "host" } else { "device" };
        failed(&report, memory, path, words);
    }
}

/// DIAG-02
///
/// The check fails if a simulated device refuses a supported path.
#[test]
fn device_that_refuses_its_own_export_fails_the_check() {
    let _alone = alone();
    let none = Arc::new(Simulated::builder().p2p(P2pMatrix::none_reachable()).build().unwrap());
    let report = run(&machine(Arc::clone(&none) as _, loopback(), &none));
    failed(&report, "device", "dma-buf", &["export dma-buf", "not reachable"]);
    let trace = &row(&report, "device", "dma-buf").trace;
    assert!(trace.iter().any(|attempt| attempt.error.is_some()), "{trace:?}");
    assert!(row(&report, "device", "staged").verified);
}

/// P2P-01
///
/// The path that the device does not support is skipped with the reason.
#[test]
fn device_without_export_is_checked_only_over_staged() {
    let _alone = alone();
    let none = Arc::new(Simulated::builder().dma_buf(DmaBufKind::None).build().unwrap());
    let report = run(&machine(Arc::clone(&none) as _, loopback(), &none));
    assert!(report.passed(), "{report:?}");
    assert!(report.rows.iter().all(|row| row.path != "dma-buf"));
    assert!(
        report.skipped.iter().any(|skipped| skipped.what.contains("directly")),
        "{:?}",
        report.skipped
    );
}

/// DIAG-02 HM-12
///
/// A check passes only if it verified device memory of each iface that the filter names. Managed
/// memory, which the NIC reaches as host pages, does not count.
#[test]
fn named_iface_without_verified_device_memory_fails_the_check() {
    let _alone = alone();
    let device = Arc::new(Simulated::builder().dma_buf(DmaBufKind::None).build().unwrap());
    let imports = Imports { dma_buf: true, ..Imports::default() };
    let nic = Loopback::builder().imports(imports).build().unwrap();
    let machine = hardware(Arc::clone(&device) as _, nic, &device);
    let report = run(&machine);
    assert!(report.rows.iter().all(|row| row.verified), "{report:?}");
    assert!(row(&report, "managed", "plain-host").device.is_some());
    assert!(!report.passed());
    let failures: Vec<_> = report.failures.iter().map(|failure| failure.what.as_str()).collect();
    assert_eq!(failures, ["iface simulated"]);
    let mut out = Vec::new();
    text(&mut out, &report, Style::plain()).unwrap();
    let out = String::from_utf8(out).unwrap();
    assert!(out.contains("FI_HMEM names the iface, but no memory of its devices"), "{out}");
    assert!(out.contains("FAILED: iface simulated"), "{out}");
    assert!(out.contains("65537 B"), "sizes are exact: {out}");

    for selection in [
        Selection { iface: Some("system".into()), stale_rounds: 0, ..quick() },
        Selection { path: Some(Path::PlainHost), ..quick() },
    ] {
        let report = check(&machine, &selection, |_, _, _| {}).expect("good variables");
        assert!(report.passed(), "device memory was not selected: {report:?}");
    }
}

/// DIAG-02
#[test]
fn devices_that_cannot_be_listed_fail_the_check() {
    let _alone = alone();
    let simulated = simulated();
    let machine = machine(Arc::clone(&simulated) as _, loopback(), &simulated);
    simulated.faults().fail_always(system::DeviceCall::Devices, Errno(5));
    let report = check(&machine, &Selection { iface: None, ..quick() }, |_, _, _| {})
        .expect("good variables");
    assert!(report.rows.iter().all(|row| row.verified), "{report:?}");
    assert!(!report.passed());
    let [failure] = &report.failures[..] else { panic!("{report:?}") };
    assert_eq!(failure.what, "devices of simulated");
    assert!(failure.why.contains("EIO (5)"), "{failure:?}");
}

/// DIAG-02
///
/// A provider that does not start is no failure.
#[test]
fn nic_that_cannot_be_opened_fails_the_check() {
    let _alone = alone();
    for (name, passes) in [("my-nics/nic0", false), ("my-nics", true)] {
        let refused: hmem::Result<Loopback> = Err(Error::new(ErrorKind::Driver, "open"));
        let builder = Hmem::builder().without_vendor_ifaces().provider_or_absent(name, refused);
        let mut machine = Machine::without_software(builder).unwrap();
        machine.add(Arc::new(loopback()), true, "for tests").unwrap();
        for (iface, provider, listed) in [
            (None, None, true),
            (Some("system"), None, !passes),
            (None, Some("my-nics"), true),
            (None, Some("loopback"), false),
        ] {
            let (iface, provider) = (iface.map(str::to_owned), provider.map(str::to_owned));
            let selection = Selection { iface, provider, ..quick() };
            let report = check(&machine, &selection, |_, _, _| {}).expect("good variables");
            let list = if passes { &report.skipped } else { &report.failures };
            let found = list.iter().any(|entry| entry.what.ends_with(name));
            assert_eq!(found, listed, "{report:?}");
            assert_eq!(report.failures.is_empty(), passes || !listed, "{report:?}");
            assert_eq!(report.passed(), !report.rows.is_empty() && (passes || !listed));
        }
    }
}

/// DIAG-02
///
/// Hardware need not support device memory, but must support host memory.
#[test]
fn hardware_that_does_not_register_host_memory_fails_the_check() {
    let _alone = alone();
    let simulated = simulated();
    let faults = loopback::Faults::new();
    let nic = Loopback::builder().faults(&faults).build().unwrap();
    let machine = hardware(Arc::clone(&simulated) as _, nic, &simulated);
    (1..1000).for_each(|nth| faults.fail_nth(loopback::NicCall::Register, nth, Errno(95)));
    let report = check(&machine, &Selection { iface: None, ..quick() }, |_, _, _| {})
        .expect("good variables");
    failed(&report, "heap", "plain-host", &["register", "EOPNOTSUPP (95)"]);
    assert!(report.rows.iter().all(|row| row.iface == "system"), "{report:?}");
    assert!(report.skipped.iter().any(|skipped| skipped.what.contains("device")));
}

/// DIAG-02
///
/// A NIC that registered the memory with one size has the feature, and must not lack it for the
/// next size.
#[test]
fn memory_that_is_refused_after_a_verified_size_fails_the_check() {
    let _alone = alone();
    let simulated = simulated();
    let faults = loopback::Faults::new();
    let nic = Loopback::builder().faults(&faults).build().unwrap();
    let machine = hardware(Arc::clone(&simulated) as _, nic, &simulated);
    // The first size has one byte and registers the memory, a source and a sink.
    faults.fail_nth(loopback::NicCall::Register, 4, Errno(95));
    let report = run(&machine);
    failed(&report, "host", "plain-host", &["EOPNOTSUPP (95)"]);
    assert_eq!(row(&report, "host", "plain-host").sizes, [1]);
}

/// DIAG-02
#[test]
fn leak_of_a_skipped_combination_fails_the_check() {
    let _alone = alone();
    let simulated = simulated();
    let faulty = Faulty { simulated: Arc::clone(&simulated), fault: Fault::KeepsMemory };
    let faults = loopback::Faults::new();
    let nic = Loopback::builder().faults(&faults).build().unwrap();
    let machine = hardware(Arc::new(faulty), nic, &simulated);
    (1..1000).for_each(|nth| faults.fail_nth(loopback::NicCall::Register, nth, Errno(95)));
    let report = run(&machine);
    failed(&report, "device", "dma-buf", &["left behind", "allocations"]);
}

/// DIAG-02
///
/// The check fails if no combination was checked.
#[test]
fn check_of_an_empty_machine_fails() {
    let _alone = alone();
    let machine = Machine::new(Hmem::builder().without_vendor_ifaces().build().unwrap());
    let report = check(&machine, &Selection::default(), |_, _, _| {}).expect("good variables");
    assert!(!report.passed());
    let mut out = Vec::new();
    text(&mut out, &report, Style::plain()).unwrap();
    assert!(String::from_utf8(out).unwrap().contains("nothing was checked"));
}

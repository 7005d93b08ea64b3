//! Compares the JSON documents of the C functions with those of the command.

#![allow(unsafe_code, reason = "calls the C functions")]

use std::{
    ffi::{CStr, CString, c_char},
    fs::File,
    ptr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use hmem::Hmem;
use hmem_c::{
    domain::{hmem_domain_close, hmem_domain_explain, hmem_domain_open},
    error::{hmem_error, hmem_error_kind, hmem_kind, hmem_string_free},
    library::{
        HMEM_OPEN_SOFTWARE, HMEM_REPORT_QUICK, hmem_check, hmem_close, hmem_explain, hmem_info,
        hmem_library, hmem_open, hmem_open_attr, hmem_selection,
    },
};
use hmem_cli::{
    args::{CheckArgs, Command, ExplainArgs, InfoArgs},
    machine::Machine,
    run_on,
    table::Style,
};
use serde_json::Value;

const NIC: &str = "loopback/hardware";

fn opened() -> *mut hmem_library {
    let attr = hmem_open_attr { size: size_of::<hmem_open_attr>(), flags: HMEM_OPEN_SOFTWARE };
    let mut library = ptr::null_mut();
    // SAFETY: the structure states its size, and the place for the result lives.
    succeeded(unsafe { hmem_open(&attr, &mut library) });
    library
}

fn succeeded(error: *mut hmem_error) {
    // SAFETY: null, or an error that is live until the process ends.
    assert_eq!(unsafe { hmem_error_kind(error) }, hmem_kind::None);
}

fn document(call: impl FnOnce(*mut *mut c_char) -> *mut hmem_error) -> Value {
    let mut json = ptr::null_mut();
    succeeded(call(&mut json));
    // SAFETY: the call succeeded, so it stored a string, which is freed once.
    unsafe {
        let document = serde_json::from_slice(CStr::from_ptr(json).to_bytes()).expect("JSON");
        hmem_string_free(json);
        document
    }
}

/// Returns the document that the command prints.
fn printed(command: Command) -> Value {
    let machine = Machine::find(Hmem::builder()).expect("a machine");
    let mut out = Vec::new();
    run_on(&machine, &command, Style::plain(), &mut out).expect("the command runs");
    serde_json::from_slice(&out).expect("JSON")
}

fn selection(memory: &CStr, nic: &CStr, flags: u64) -> hmem_selection {
    let (memory, nic) = (memory.as_ptr(), nic.as_ptr());
    hmem_selection { size: size_of::<hmem_selection>(), memory, nic, bytes: 0, flags }
}

/// Removes the fields that differ from run to run: measurements, and counts of a race.
fn without_measurements(document: &mut Value) {
    match document {
        Value::Object(fields) => {
            for name in ["gib_per_s", "reused", "hits", "stale", "rounds"] {
                fields.remove(name);
            }
            fields.values_mut().for_each(without_measurements);
        }
        Value::Array(items) => items.iter_mut().for_each(without_measurements),
        _ => {}
    }
}

/// Requirement DOOR-07: `hmem_info` has the content of `hmem info --json`.
#[test]
fn info_has_the_content_of_the_command() {
    let (library, nic) = (opened(), CString::new(NIC).expect("a name"));
    // SAFETY: the arguments live during the calls, and the library is closed once.
    let found = unsafe { document(|json| hmem_info(library, nic.as_ptr(), json)) };
    let command = InfoArgs { json: true, nic: Some(NIC.into()) };
    assert_eq!(found, printed(Command::Info(command)));
    // SAFETY: nothing uses the library any more.
    succeeded(unsafe { hmem_close(library) });
}

/// Requirement DOOR-07: `hmem_explain` and `hmem_domain_explain` have the content of `hmem explain
/// --json`.
#[test]
fn explain_has_the_content_of_the_command() {
    let (library, nic) = (opened(), CString::new(NIC).expect("a name"));
    let selection = selection(c"simulated:1", &nic, 0);
    let args = ExplainArgs {
        json: true,
        iface: Some("simulated".into()),
        device: Some(1),
        nic: Some(NIC.into()),
        ..ExplainArgs::default()
    };
    let expected = printed(Command::Explain(args));
    let mut passed = false;
    // SAFETY: the arguments live during the calls, and the objects are closed once.
    unsafe {
        let found = document(|json| hmem_explain(library, &selection, json, &mut passed));
        assert_eq!(found, expected);
        assert!(passed);
        let mut domain = ptr::null_mut();
        succeeded(hmem_domain_open(library, nic.as_ptr(), ptr::null(), &mut domain));
        let found = document(|json| hmem_domain_explain(domain, &selection, json, ptr::null_mut()));
        assert_eq!(found, expected);
        succeeded(hmem_domain_close(domain));
        succeeded(hmem_close(library));
    }
}

/// Requirement DOOR-07: `hmem_check` has the content of `hmem check --json`, measurements aside.
#[test]
fn check_has_the_content_of_the_command() {
    let (library, nic) = (opened(), CString::new(NIC).expect("a name"));
    let selection = selection(c"system", &nic, HMEM_REPORT_QUICK);
    let mut passed = false;
    let ended = AtomicBool::new(false);
    let mut found = thread::scope(|scope| {
        // A check in a program must not take the files of other threads for its own.
        scope.spawn(|| {
            let mut files = Vec::new();
            while !ended.load(Ordering::Relaxed) && files.len() < 500 {
                files.push(File::open("/dev/null").expect("open"));
                // Spreads the opens over the check.
                thread::sleep(Duration::from_micros(200));
            }
        });
        // SAFETY: the arguments live during the call.
        let found = document(|json| unsafe { hmem_check(library, &selection, json, &mut passed) });
        ended.store(true, Ordering::Relaxed);
        found
    });
    // SAFETY: the library is closed once.
    succeeded(unsafe { hmem_close(library) });
    assert!(passed, "{found:#}");
    assert!(found["rows"].as_array().is_some_and(|rows| !rows.is_empty()), "{found:#}");
    let mut expected = printed(Command::Check(CheckArgs {
        json: true,
        iface: Some("system".into()),
        provider: Some(NIC.into()),
        quick: true,
        ..CheckArgs::default()
    }));
    without_measurements(&mut found);
    without_measurements(&mut expected);
    assert_eq!(found, expected);
}

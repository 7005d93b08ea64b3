//! Events of the library in a program that uses the crate `log`.

use std::sync::Mutex;

use hmem::{Access, DomainAttr, Hmem, loopback::Loopback};

/// The messages of all records since the start.
static MESSAGES: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Collector;

impl log::Log for Collector {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let message = format!("{}: {}", record.target(), record.args());
        MESSAGES.lock().expect("lock").push(message);
    }

    fn flush(&self) {}
}

/// DIAG-04
#[test]
fn registration_appears_in_the_log_of_a_program_without_a_subscriber() {
    log::set_logger(&Collector).expect("no other logger");
    log::set_max_level(log::LevelFilter::Trace);
    let loopback = Loopback::builder().build().expect("the software NIC");
    let hmem = Hmem::builder().without_vendor_ifaces().provider(loopback).build().expect("build");
    let domain = hmem.domain("loopback", DomainAttr::default()).expect("a domain");
    let region = domain.register(vec![0_u8; 4096], Access::REMOTE_READ).expect("register");
    drop(region);
    let messages = MESSAGES.lock().expect("lock");
    let mentions = |text: &str| messages.iter().any(|message| message.contains(text));
    assert!(mentions("hmem_core"), "no record of the library: {messages:#?}");
    assert!(mentions("register"), "no record of the registration: {messages:#?}");
}

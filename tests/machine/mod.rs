//! Properties of a machine that tests need and that it may lack.
//!
//! `tests/this_machine.rs` reports each of these as ignored where the machine lacks it, so that a
//! run that shows less says so.
#![allow(dead_code)] // Each test binary uses a part.

use std::{fs, sync::OnceLock};

use hmem::{
    DomainAttr, Hmem,
    loopback::{Loopback, RemapPolicy},
    system::monitor::HostMonitorKind,
};

/// Returns the reason why the software NIC cannot pin pages in this process, or `None` if it can.
pub(crate) fn without_pinned_pages() -> Option<&'static str> {
    static REASON: OnceLock<Option<String>> = OnceLock::new();
    let reason = REASON.get_or_init(|| {
        let pinned = Loopback::builder().remap_policy(RemapPolicy::Pinned).build();
        let hmem = Hmem::builder()
            .without_vendor_ifaces()
            .provider(pinned.expect("a software NIC"))
            .build()
            .expect("the ifaces start");
        hmem.domain("loopback", DomainAttr::default()).err().map(|error| error.to_string())
    });
    reason.as_deref()
}

/// Returns the policy for tests that hold with both: pinned pages, where the software NIC can pin.
pub(crate) fn pages() -> RemapPolicy {
    without_pinned_pages().map_or(RemapPolicy::Pinned, |_| RemapPolicy::Follow)
}

/// Returns the reason why this process cannot use userfaultfd, or `None` if it can.
pub(crate) fn without_userfaultfd() -> Option<String> {
    let builder = Hmem::builder().without_vendor_ifaces();
    let hmem = builder.cache_monitor(HostMonitorKind::UserFaultFd).build();
    let hmem = hmem.expect("the ifaces start");
    hmem.cache_monitor().err().map(|error| error.to_string())
}

/// Returns how many bytes this process may lock: `u64::MAX` with `CAP_IPC_LOCK`.
pub(crate) fn lockable_memory() -> u64 {
    const CAP_IPC_LOCK: u64 = 1 << 14;
    let status = fs::read_to_string("/proc/self/status").expect("procfs");
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).expect("CapEff");
    let effective = u64::from_str_radix(effective.trim(), 16).expect("hexadecimal");
    if effective & CAP_IPC_LOCK != 0 {
        return u64::MAX;
    }
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current.unwrap_or(u64::MAX)
}

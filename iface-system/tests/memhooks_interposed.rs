//! Tests that the self-test detects a program's own `munmap` in place of the C library's: MON-03,
//! MON-04.
#![allow(missing_docs)]

#[path = "monitors/mod.rs"]
mod monitors;

use hmem_iface_system::monitor::{HostMonitorKind, MemHooks, SystemMonitor};

cases! {
    /// MON-03
    interposed_function_is_detected,
    /// MON-04
    auto_falls_back_and_reports_the_reason;
    slow:
}

/// A `munmap` that overrides that of the C library, as a preloaded allocator or profiler may. It
/// makes a raw system call.
#[unsafe(no_mangle)]
extern "C" fn munmap(at: *mut libc::c_void, len: usize) -> libc::c_int {
    // SAFETY: the caller of munmap is responsible for its range.
    unsafe { libc::syscall(libc::SYS_munmap, at, len) as libc::c_int }
}

fn interposed_function_is_detected() {
    let error = MemHooks::start().unwrap_err();
    let text = format!("{error:#}");
    assert!(error.is_busy() && text.contains("function=munmap"), "{text}");
}

fn auto_falls_back_and_reports_the_reason() {
    let chosen = SystemMonitor::start(HostMonitorKind::Auto).unwrap();
    let choice = chosen.choice();
    assert!(["userfaultfd", "none"].contains(&choice.name), "{choice}");
    assert_eq!(choice.candidates[0].name, "memhooks");
    let refused = choice.candidates[0].refused.as_ref().expect("memhooks were refused");
    assert!(
        format!("{refused:#}").contains("munmap") && choice.to_string().contains("munmap"),
        "{choice}"
    );
    let json = serde_json::to_value(choice).unwrap();
    assert!(json["candidates"][0]["refused"].as_str().unwrap().contains("munmap"), "{json}");
}

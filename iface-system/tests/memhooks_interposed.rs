//! A program that has a `munmap` of its own, before the C library's: the self-test notices. MON-03, MON-04.
#![allow(missing_docs)]

use hmem_iface_system::monitor::{MemHooks, MonitorKind, SystemMonitor};
use libtest_mimic::{Arguments, Trial};

/// As a preloaded allocator or profiler has it, past the C library.
#[unsafe(no_mangle)]
extern "C" fn munmap(at: *mut libc::c_void, len: usize) -> libc::c_int {
    // SAFETY: as the caller's.
    unsafe { libc::syscall(libc::SYS_munmap, at, len) as libc::c_int }
}

fn main() -> std::process::ExitCode {
    let trials = vec![
        Trial::test("mon_03_a_function_before_the_c_librarys_is_noticed", || {
            let error = MemHooks::start().unwrap_err();
            let text = error.to_string();
            assert!(error.is_busy() && text.contains("function=munmap"), "{text}");
            Ok(())
        }),
        Trial::test("mon_04_auto_takes_another_monitor_and_says_why", || {
            let chosen = SystemMonitor::start(MonitorKind::Auto).unwrap();
            let choice = chosen.choice();
            assert!(["userfaultfd", "none"].contains(&choice.name), "{choice}");
            assert_eq!(choice.tried[0].name, "memhooks");
            let refused = choice.tried[0].refused.as_ref().expect("memhooks were refused");
            assert!(
                refused.to_string().contains("munmap") && choice.to_string().contains("munmap"),
                "{choice}"
            );
            let json = serde_json::to_value(choice).unwrap();
            assert!(json["tried"][0]["refused"].as_str().unwrap().contains("munmap"), "{json}");
            Ok(())
        }),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

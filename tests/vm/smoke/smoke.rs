//! Checks the VM guest that the other tests rely on: its kernel, its RDMA devices by name, and a
//! libibverbs that opens them and registers memory. These tests do not use hmem: if they fail, the
//! guest is broken.

#![cfg(test)]

use std::{env, fs};

#[cfg(feature = "dma-buf")]
mod dma_buf;
mod verbs;

fn devices_asked_for() -> Vec<String> {
    ["HMEM_VERBS_DEVICE", "HMEM_VERBS_SECOND_DEVICE"]
        .map(|variable| env::var(variable).unwrap_or_else(|_| panic!("{variable} is not set")))
        .to_vec()
}

#[test]
fn the_kernel_has_the_requested_release() {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let asked = env::var("HMEM_VM_KERNEL").expect("HMEM_VM_KERNEL is set");
    assert_eq!(release.trim(), asked);
}

#[test]
fn sysfs_shows_the_devices_with_an_active_port() {
    for device in devices_asked_for() {
        let state =
            fs::read_to_string(format!("/sys/class/infiniband/{device}/ports/1/state")).unwrap();
        assert_eq!(state.trim(), "4: ACTIVE", "{device}");
    }
}

#[test]
fn an_ordinary_user_may_open_the_device() {
    use std::os::unix::fs::MetadataExt;
    assert_eq!(fs::metadata("/dev/infiniband/uverbs0").unwrap().mode() & 0o666, 0o666);
}

#[test]
fn every_device_registers_and_releases_a_page() {
    let verbs = verbs::Verbs::load();
    let mut names = verbs.device_names();
    names.sort();
    assert_eq!(names, devices_asked_for());
    for name in names {
        let domain = verbs.open(&name);
        let mut page = vec![0_u8; 4096];
        let region = domain.register(&mut page, verbs::LOCAL_WRITE).unwrap();
        assert_ne!(region.key(), 0);
        assert_eq!(domain.try_close(), libc::EBUSY, "a domain with a region in it");
        drop(region);
        assert_eq!(domain.try_close(), 0);
        domain.close_device();
    }
}

/// Tests that fail on purpose. `tests/vm/check` runs each by name and expects a reported failure.
mod misbehaviour {
    use std::{fs, io::Write, process, thread, time::Duration};

    #[test]
    #[ignore = "fails"]
    fn an_assertion_fails() {
        panic!("on purpose");
    }

    #[test]
    #[ignore = "dies"]
    fn the_process_dies_in_the_middle_of_a_line() {
        print!("half a line");
        std::io::stdout().flush().unwrap();
        process::abort();
    }

    #[test]
    #[ignore = "never ends"]
    fn a_test_hangs() {
        thread::sleep(Duration::from_hours(1));
    }

    #[test]
    #[ignore = "takes the kernel down"]
    fn the_kernel_panics() {
        fs::write("/proc/sysrq-trigger", "c").unwrap();
    }

    #[test]
    #[ignore = "takes the machine down"]
    fn the_machine_stops() {
        fs::write("/proc/sysrq-trigger", "o").unwrap();
        thread::sleep(Duration::from_hours(1));
    }

    #[test]
    #[ignore = "fills the console"]
    fn the_kernel_talks_over_the_results() {
        let mut kernel_log = fs::File::options().write(true).open("/dev/kmsg").unwrap();
        for line in 0..2000 {
            writeln!(kernel_log, "<0>noise {line}").unwrap();
            println!("result {line}");
        }
    }
}

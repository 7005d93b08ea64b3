//! `hmem info`, `check` and `perf` with the RDMA devices of `HMEM_VERBS_DEVICE` and
//! `HMEM_VERBS_SECOND_DEVICE`, including devices that are unusable.

mod hmem_process;
#[path = "../../tests/trials/mod.rs"]
mod trials;

use std::{
    fs::{self, Permissions},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::PathBuf,
    process::{Command, Output},
    sync::{Mutex, MutexGuard},
};

use hmem_process::{document_of, hmem, program, refused, text};
use serde_json::Value;
use trials::{Outcome, Skipped, trials};

trials! {
    /// DIAG-01
    ///
    /// Needs an RDMA device.
    info_lists_rdma_devices_and_their_paths,
    /// DIAG-02
    ///
    /// Needs an RDMA device.
    check_moves_verified_bytes_through_the_device,
    device_without_permission_is_listed_with_the_reason,
    port_that_is_down_is_reported_once,
    locked_memory_limit_is_reported_with_its_remedy,
}

/// The uid of a user without privileges.
const NOBODY: u32 = 65534;

/// Returns the names of the RDMA devices to test, with a lock. The lock serialises the tests, since
/// some tests disable a device.
fn devices() -> Result<(String, Option<String>, MutexGuard<'static, ()>), Skipped> {
    static ALONE: Mutex<()> = Mutex::new(());
    let named = |variable| std::env::var(variable).ok().filter(|name| !name.is_empty());
    let Some(first) = named("HMEM_VERBS_DEVICE") else {
        return Err(Skipped("HMEM_VERBS_DEVICE names no device".into()));
    };
    let alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    Ok((first, named("HMEM_VERBS_SECOND_DEVICE"), alone))
}

/// Returns the name of the second RDMA device, which a test may disable, with the lock of
/// [`devices`].
fn second() -> Result<(String, MutexGuard<'static, ()>), Skipped> {
    let (_, second, alone) = devices()?;
    let second =
        second.ok_or_else(|| Skipped("HMEM_VERBS_SECOND_DEVICE names no device".into()))?;
    Ok((second, alone))
}

fn run(mut command: Command) -> Output {
    command.output().expect("the command runs")
}

fn rows<'a>(document: &'a Value, field: &str, device: &str) -> Vec<&'a Value> {
    let rows = document[field].as_array().expect("a list");
    rows.iter().filter(|row| row["provider"] == "verbs" && row["nic"] == device).collect()
}

fn info_lists_rdma_devices_and_their_paths() -> Outcome {
    let (first, second, _alone) = devices()?;
    let document = document_of(&run(hmem("info", &["--json"])));
    for device in [Some(first), second].into_iter().flatten() {
        let [nic] = rows(&document, "providers", &device)[..] else {
            panic!("{device}: {document}")
        };
        assert_eq!((&nic["software"], &nic["key_size"]), (&false.into(), &4.into()), "{nic}");
        for bit in ["LOCAL", "VIRT_ADDR", "ALLOCATED", "PROV_KEY"] {
            assert!(
                nic["required_mr_mode"].as_array().expect("bits").contains(&bit.into()),
                "{bit}: {nic}"
            );
        }
        assert!(nic["max_mr_size"].as_u64().is_some_and(|max| max > 0), "{nic}");
        let paths = rows(&document, "p2p", &device);
        let host = paths.iter().find(|entry| entry["iface"] == "system").expect("host memory");
        assert_eq!(host["path"], "plain-host", "{host}");
        if std::env::var("HMEM_VERBS_DMA_BUF").is_ok_and(|value| value == "1") {
            let imports = nic["imports"].as_array().expect("a list");
            assert!(imports.contains(&"dma-buf".into()), "{nic}");
            let device =
                paths.iter().find(|entry| entry["iface"] == "simulated").expect("device memory");
            assert_eq!(device["path"], "dma-buf", "{device}");
        }
        let table = run(hmem("info", &[]));
        assert!(text(&table.stdout).contains(&device), "{}", text(&table.stdout));
    }
    Ok(())
}

fn check_moves_verified_bytes_through_the_device() -> Outcome {
    let (first, _, _alone) = devices()?;
    let nic = format!("verbs/{first}");
    let output = run(hmem("check", &["--json", "--provider", &nic, "--bytes", "4097"]));
    let document: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(output.status.code(), Some(0), "{document:#}");
    let text = document.to_string();
    assert!(text.contains("plain-host"), "{text}");
    if std::env::var("HMEM_VERBS_DMA_BUF").is_ok_and(|value| value == "1") {
        assert!(text.contains("dma-buf"), "{text}");
    }
    Ok(())
}

/// Returns the path of a device's device node in `/dev/infiniband`.
fn node(device: &str) -> PathBuf {
    let verbs = fs::read_dir("/sys/class/infiniband_verbs").expect("the kernel's list");
    let named = |path: &PathBuf| {
        fs::read_to_string(path.join("ibdev")).is_ok_and(|name| name.trim() == device)
    };
    let folder =
        verbs.filter_map(|entry| entry.ok().map(|entry| entry.path()).filter(named)).next();
    PathBuf::from("/dev/infiniband").join(folder.expect("the device").file_name().expect("a name"))
}

/// Restores the permissions of a device node on drop.
struct Restore(PathBuf, Permissions);

impl Drop for Restore {
    fn drop(&mut self) {
        fs::set_permissions(&self.0, self.1.clone()).expect("put back");
    }
}

fn device_without_permission_is_listed_with_the_reason() -> Outcome {
    let (second, _alone) = second()?;
    let node = node(&second);
    let before = fs::metadata(&node).expect("the node").permissions();
    let _restore = Restore(node.clone(), before);
    fs::set_permissions(&node, Permissions::from_mode(0o600)).expect("the permissions are changed");
    let nic = format!("verbs/{second}");

    let nobody = |subcommand, arguments: &[&str]| {
        let mut command = hmem(subcommand, arguments);
        command.uid(NOBODY).gid(NOBODY);
        run(command)
    };
    let document = document_of(&nobody("info", &["--json"]));
    assert!(rows(&document, "providers", &second).is_empty(), "{document}");
    let absent = document["absent"].as_array().expect("a list");
    let entry = absent
        .iter()
        .find(|entry| entry["what"] == format!("NIC {nic}"))
        .expect("the device is listed");
    for word in ["ibv_open_device", "EACCES", "/dev/infiniband"] {
        assert!(entry["why"].as_str().is_some_and(|why| why.contains(word)), "{word}: {entry}");
    }
    for arguments in [&["--loopback", "--nic", &nic][..], &["127.0.0.1", "--nic", &nic]] {
        refused(
            &nobody("perf", arguments),
            1,
            &[&nic, "ibv_open_device", "EACCES", "/dev/infiniband"],
        );
    }
    Ok(())
}

fn port_that_is_down_is_reported_once() -> Outcome {
    let (second, _alone) = second()?;
    let netdev = format!("/sys/class/infiniband/{second}/ports/1/gid_attrs/ndevs/0");
    let netdev = fs::read_to_string(netdev).expect("its network device");
    let link = |state| {
        let status = Command::new("ip").args(["link", "set", netdev.trim(), state]).status();
        assert!(status.expect("ip (iproute2) runs").success(), "{netdev} {state}");
    };
    let nic = format!("verbs/{second}");
    let transfer =
        ["--loopback", "--nic", &nic, "--size", "64", "--iterations", "4", "--depth", "2"];
    link("down");
    let output = run(hmem("perf", &transfer));
    let state = fs::read_to_string(format!("/sys/class/infiniband/{second}/ports/1/state"));
    let info = run(hmem("info", &["--json"]));
    link("up");
    refused(&output, 1, &["ibv_query_port", "PORT_DOWN", "bring the link up"]);
    assert!(state.is_ok_and(|state| state.contains("DOWN")), "the test has taken the port down");
    assert_eq!(
        rows(&document_of(&info), "providers", &second).len(),
        1,
        "the device is there all the same"
    );
    Ok(())
}

fn locked_memory_limit_is_reported_with_its_remedy() -> Outcome {
    let (first, _, _alone) = devices()?;
    let mut shell = Command::new("sh");
    let script = concat!(
        "ulimit -l 64; exec \"$0\" perf --loopback --nic \"$1\" ",
        "--size 1MiB --iterations 4 --depth 2"
    );
    shell.args(["-c", script, &program(), &format!("verbs/{first}")]).uid(NOBODY).gid(NOBODY);
    refused(&run(shell), 1, &["RLIMIT_MEMLOCK", "is 65536 bytes", "ulimit -l"]);
    Ok(())
}

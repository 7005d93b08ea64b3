//! `hmem perf` between two processes over the RDMA device that `HMEM_VERBS_DEVICE` names.

mod hmem_process;
#[path = "hmem_process/relay.rs"]
mod relay;
#[path = "../../tests/trials/mod.rs"]
mod trials;

use std::{
    process::Command,
    sync::{Arc, Mutex, MutexGuard},
};

use hmem::{Addressing, RemoteKey};
use hmem_process::{Server, document_of, hmem, is_as_documented, one_line, perf, refused, text};
use relay::{From, Relay};
use serde_json::{Value, json};
use trials::{Outcome, Skipped, trials};

trials! {
    operations_move_verified_bytes_between_processes,
    /// HM-14, P2P-06
    ///
    /// The simulated device's copies return the bytes that the NIC wrote.
    operations_move_verified_device_bytes_between_processes,
    persistent_server_serves_one_client_after_another,
    client_reports_a_server_killed_mid_transfer,
    server_survives_a_client_killed_mid_transfer,
    altered_handshake_is_refused,
    /// The handshake contains the queue pair and the remote key of a server that has exited.
    stale_handshake_is_refused_on_both_sides,
    unknown_device_is_refused_with_the_known_ones,
}

/// The RDMA device to test, with a lock. Tests run one at a time, since each counts the RDMA
/// resources.
struct Device {
    nic: String,
    _alone: MutexGuard<'static, ()>,
}

/// Returns the device to test. Without a device name the test is skipped. If the named device is
/// absent, the test fails.
fn device() -> Result<Device, Skipped> {
    static ALONE: Mutex<()> = Mutex::new(());
    let Some(name) = std::env::var("HMEM_VERBS_DEVICE").ok().filter(|name| !name.is_empty()) else {
        return Err(Skipped("HMEM_VERBS_DEVICE names no device".into()));
    };
    let alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    Ok(Device { nic: format!("verbs/{name}"), _alone: alone })
}

fn dma_buf() -> bool {
    std::env::var("HMEM_VERBS_DMA_BUF").is_ok_and(|value| value == "1")
}

/// Returns the RDMA resources of all processes: protection domains, queues, regions, contexts.
fn resources() -> String {
    let output =
        Command::new("rdma").args(["resource", "show"]).output().expect("rdma (iproute2) runs");
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout).to_owned()
}

impl Device {
    fn server(&self, arguments: &[&str]) -> Server {
        Server::start(&[&["--nic", &self.nic], arguments].concat())
    }

    /// Runs a client of the server at `port`.
    fn client(&self, port: u16, arguments: &[&str]) -> std::process::Output {
        let port = port.to_string();
        perf(&[&["127.0.0.1", "--port", &port, "--nic", &self.nic, "--json"], arguments].concat())
    }

    fn document(&self, server: &[&str], client: &[&str]) -> Value {
        let mut server = self.server(server);
        let document = document_of(&self.client(server.port, client));
        assert_eq!(server.status(), Some(0), "{}", server.next_line());
        for side in ["local", "remote"] {
            assert_eq!(
                format!("verbs/{}", document[side]["nic"].as_str().expect("a name")),
                self.nic
            );
        }
        document
    }
}

/// Arguments for a short measurement, since the tests may run on a slow emulated processor.
const FEW: [&str; 4] = ["--iterations", "20", "--depth", "3"];

fn operations_move_verified_bytes_between_processes() -> Outcome {
    let device = device()?;
    let before = resources();
    for op in ["write", "read", "send"] {
        let size = ["--op", op, "--size", "1,7,4097,64KiB"];
        let document = device.document(&[], &[&size[..], &FEW].concat());
        is_as_documented(&document, ["plain-host"; 2]);
        let rows = document["results"].as_array().expect("results");
        let of = |order: &str| -> Vec<_> {
            let rows = rows.iter().filter(|row| row["ordering"] == order);
            rows.map(|row| row["bytes"].clone()).collect()
        };
        let sizes = [1, 7, 4097, 64 << 10].map(Value::from);
        assert_eq!((of("strict"), of("relaxed")), (sizes.to_vec(), sizes.to_vec()));
    }
    let document = device.document(&[], &[&["--op", "atomic"], &FEW[..]].concat());
    is_as_documented(&document, ["plain-host"; 2]);
    assert_eq!(resources(), before);
    Ok(())
}

fn operations_move_verified_device_bytes_between_processes() -> Outcome {
    let device = device()?;
    if !dma_buf() {
        return Err(Skipped(
            "HMEM_VERBS_DMA_BUF does not say that the driver registers dma-bufs".into(),
        ));
    }
    let before = resources();
    let simulated = ["--iface", "simulated", "--device", "1"];
    for op in ["write", "read", "send", "atomic"] {
        let sizes: &[&str] = if op == "atomic" { &[] } else { &["--size", "3,4097,64KiB"] };
        let document =
            device.document(&simulated, &[&["--op", op], sizes, &simulated[..], &FEW].concat());
        is_as_documented(&document, ["dma-buf"; 2]);
        assert_eq!(
            (&document["local"]["device"], &document["remote"]["device"]),
            (&1.into(), &1.into())
        );
    }
    let mixed = device.document(&simulated, &[&["--size", "4097"], &FEW[..]].concat());
    is_as_documented(&mixed, ["plain-host", "dma-buf"]);
    assert_eq!(resources(), before);
    Ok(())
}

fn persistent_server_serves_one_client_after_another() -> Outcome {
    let device = device()?;
    let server = device.server(&["--persistent"]);
    let before = resources();
    for size in ["8", "64KiB"] {
        let arguments =
            server.client(&[&["--nic", &device.nic, "--size", size], &FEW[..]].concat());
        let output = hmem("perf", &[]).args(arguments).output().expect("the command runs");
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        for word in ["RMA write to server 127.0.0.1", "plain-host", &device.nic] {
            assert!(
                text(&output.stdout).contains(word),
                "{word} is not in:\n{}",
                text(&output.stdout)
            );
        }
    }
    assert_eq!(resources(), before, "the server keeps nothing of clients that have ended");
    Ok(())
}

fn client_reports_a_server_killed_mid_transfer() -> Outcome {
    let device = device()?;
    let before = resources();
    for op in ["write", "send"] {
        let server = device.server(&[]);
        let (client, relay) = Relay::transferring(server.port, &device.nic, op);
        // Dropping the handle kills the server.
        drop(server);
        let output = client.wait_with_output().expect("the process ends");
        refused(&output, 1, &["; "]);
        relay.join();
    }
    assert_eq!(resources(), before);
    Ok(())
}

fn server_survives_a_client_killed_mid_transfer() -> Outcome {
    let device = device()?;
    let mut server = device.server(&["--persistent"]);
    let before = resources();
    for op in ["write", "send"] {
        let (mut client, relay) = Relay::transferring(server.port, &device.nic, op);
        client.kill().expect("the process is killed");
        client.wait().expect("the process ends");
        one_line(&server.next_line(), &["hung up"]);
        relay.join();
        assert_eq!(resources(), before, "the client leaves nothing behind");
    }
    let document =
        document_of(&device.client(server.port, &["--size", "64", "--iterations", "20"]));
    is_as_documented(&document, ["plain-host"; 2]);
    Ok(())
}

/// A change to a message that the relay forwards.
type Change = fn(&mut Value);

fn flip(bytes: &mut Value, index: usize) {
    let byte = bytes[index].as_u64().expect("a byte");
    bytes[index] = json!(byte ^ 1);
}

/// Replaces a remote key with a well-formed key that no region has.
fn forge(key: &mut Value) {
    let bytes: Vec<u8> = serde_json::from_value(key.clone()).expect("bytes");
    let real = RemoteKey::from_bytes(&bytes).expect("a key");
    let piece = real.pieces().next().expect("a piece");
    let forged = RemoteKey::new(Addressing::Virtual, real.base(), piece.len, piece.key ^ 0x5500);
    *key = json!(forged.to_bytes());
}

fn altered_handshake_is_refused() -> Outcome {
    let device = device()?;
    let before = resources();
    let cases: [(From, &str, Change, &[&str]); 4] = [
        (
            From::Client,
            "request",
            |request| flip(&mut request["endpoint"], 9),
            &["resolve", "unchanged"],
        ),
        (From::Server, "ready", |ready| flip(&mut ready["endpoint"], 9), &["resolve", "unchanged"]),
        (From::Server, "ready", |ready| flip(&mut ready["key"], 20), &["remote key"]),
        (
            From::Server,
            "ready",
            |ready| forge(&mut ready["key"]),
            &["remote access error (10)", "stale"],
        ),
    ];
    for (who, name, change, words) in cases {
        let mut server = device.server(&[]);
        let relay = Relay::to(server.port, move |from, message| {
            if from == who
                && let Some(content) = message.get_mut(name)
            {
                change(content);
            }
        });
        let output = device.client(relay.port, &["--size", "64", "--iterations", "4"]);
        refused(&output, 1, words);
        // One side detects the error, and the server prints it in either case.
        one_line(&server.next_line(), words);
        assert_eq!(server.status(), Some(1));
        relay.join();
    }
    assert_eq!(resources(), before);
    Ok(())
}

fn stale_handshake_is_refused_on_both_sides() -> Outcome {
    let device = device()?;
    let before = resources();
    let stale = Arc::new(Mutex::new(Value::Null));
    let transfer = ["--size", "64", "--iterations", "4"];

    let mut server = device.server(&[]);
    let keep = Arc::clone(&stale);
    let relay = Relay::to(server.port, move |_, message| {
        if let Some(ready) = message.get("ready") {
            *keep.lock().expect("no panic") = ready.clone();
        }
    });
    document_of(&device.client(relay.port, &transfer));
    assert_eq!(server.status(), Some(0));
    relay.join();

    for (part, words) in [
        (&["endpoint", "key"][..], &["retries exceeded (12)", "does not answer"][..]),
        (&["key"], &["remote access error (10)", "stale"]),
    ] {
        let mut server = device.server(&[]);
        let replay = Arc::clone(&stale);
        let relay = Relay::to(server.port, move |_, message| {
            if let Some(ready) = message.get_mut("ready") {
                for field in part {
                    ready[*field] = replay.lock().expect("no panic")[*field].clone();
                }
            }
        });
        refused(&device.client(relay.port, &transfer), 1, words);
        one_line(&server.next_line(), words);
        assert_eq!(server.status(), Some(1));
        relay.join();
    }
    assert_eq!(resources(), before);
    Ok(())
}

fn unknown_device_is_refused_with_the_known_ones() -> Outcome {
    let device = device()?;
    let before = resources();
    for arguments in [&["--server", "--port", "0"][..], &["127.0.0.1"]] {
        let output = perf(&[arguments, &["--nic", "verbs/nonsense"]].concat());
        refused(&output, 2, &["verbs/nonsense", "--nic takes", &device.nic]);
    }
    assert_eq!(resources(), before);
    Ok(())
}

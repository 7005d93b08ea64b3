//! The command with libfabric's NICs, where libfabric is installed (`HMEM_LIBFABRIC_LIBRARY`), and
//! `hmem perf` between two network namespaces without RDMA hardware.

mod hmem_process;
#[path = "hmem_process/hosts.rs"]
mod hosts;
#[path = "hmem_process/relay.rs"]
mod relay;
#[path = "../../tests/trials/mod.rs"]
mod trials;
#[path = "../../provider-libfabric/tests/watchdog/mod.rs"]
mod watchdog;

use std::{collections::BTreeSet, process::Output, time::Duration};

use hmem::libfabric::sys::Functions;
use hmem_process::{Server, document_of, hmem, is_as_documented, one_line, refused, schema, text};
use hosts::{Host, Hosts};
use relay::Relay;
use serde_json::{Value, json};
use trials::{Outcome, Skipped, trials};

trials! {
    absent_library_is_reported_only_if_libfabric_is_named,
    /// DIAG-01, FAB-01
    info_lists_libfabric_nics_with_their_attributes,
    /// DIAG-02
    check_moves_verified_bytes_over_libfabric_nics,
    explain_shows_the_path_to_a_libfabric_nic,
    unknown_names_are_refused_with_those_that_exist,
    /// FAB-04
    perf_moves_verified_bytes_between_two_hosts_without_rdma_hardware,
    server_and_client_of_different_libfabric_providers_are_told_so,
    client_reports_a_server_killed_mid_transfer,
    server_survives_a_client_killed_mid_transfer,
}

const TCP: &str = "libfabric/tcp;ofi_rxm";

/// Skips the test if libfabric cannot be loaded. Limits the time of all tests together.
fn library() -> Outcome {
    watchdog::start(Duration::from_secs(300));
    Functions::find().map(drop).map_err(|error| Skipped(error.to_string()))
}

fn run(subcommand: &str, arguments: &[&str]) -> Output {
    hmem(subcommand, arguments).output().expect("the command runs")
}

fn list<'a>(document: &'a Value, field: &str) -> &'a [Value] {
    document[field].as_array().expect("a list")
}

fn absent_library_is_reported_only_if_libfabric_is_named() {
    let run = |subcommand, arguments: &[&str]| {
        let mut command = hmem(subcommand, arguments);
        command.env("HMEM_LIBFABRIC_LIBRARY", "/nonexistent/libfabric.so");
        command.output().expect("the command runs")
    };
    let mentions = |document: &Value| {
        let absent = list(document, "absent").iter();
        absent.filter(|entry| entry["what"] == "provider libfabric").cloned().collect::<Vec<_>>()
    };
    let default = document_of(&run("info", &["--json"]));
    assert_eq!(mentions(&default), [] as [Value; 0], "libfabric was loaded");
    assert!(!list(&default, "providers").is_empty(), "{default}");

    let named = document_of(&run("info", &["--json", "--nic", "libfabric"]));
    assert!(list(&named, "providers").is_empty(), "{named}");
    let [absent] = &mentions(&named)[..] else { panic!("{named}") };
    for part in ["/nonexistent/libfabric.so", "cannot be loaded", "; install libfabric"] {
        assert!(absent["why"].as_str().is_some_and(|text| text.contains(part)), "{absent}");
    }
    for nic in ["libfabric", TCP, "libfabric/tcp;ofi_rxm:eth0"] {
        let output = run("perf", &["--loopback", "--nic", nic]);
        refused(&output, 1, &["provider libfabric is unavailable", "/nonexistent/libfabric.so"]);
        let output = run("check", &["--nic", nic]);
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    }
}

fn info_lists_libfabric_nics_with_their_attributes() -> Outcome {
    library()?;
    let document = document_of(&run("info", &["--json", "--nic", "libfabric"]));
    schema::matches("info", &document);
    let nics = list(&document, "providers");
    let names: BTreeSet<_> = nics.iter().map(|nic| nic["nic"].as_str().expect("a name")).collect();
    assert_eq!(names.len(), nics.len(), "a NIC is listed twice: {names:?}");
    assert!(names.iter().all(|name| !name.contains("ofi_rxd")), "{names:?}");
    for provider in ["tcp;ofi_rxm:", "shm:"] {
        let of = |nic: &&Value| nic["nic"].as_str().is_some_and(|name| name.starts_with(provider));
        let nic = nics.iter().find(of).unwrap_or_else(|| panic!("{provider}: {names:?}"));
        assert_eq!((&nic["provider"], &nic["progress"]), (&"libfabric".into(), &"manual".into()));
        assert_eq!((&nic["key_size"], &nic["required_mr_mode"]), (&8.into(), &json!([])));
        assert!(list(nic, "order").contains(&"SAS".into()), "{nic}");
        assert!(!list(nic, "imports").contains(&"dma-buf".into()), "{nic}");
        let p2p = list(&document, "p2p").iter();
        let host = p2p.filter(|path| path["nic"] == nic["nic"] && path["iface"] == "system");
        let paths: Vec<_> = host.map(|path| path["path"].clone()).collect();
        assert_eq!(paths, ["plain-host"], "{nic}");
    }
    let table = run("info", &["--nic", TCP]);
    let table = text(&table.stdout);
    for part in [TCP, "kind: software", "progress: manual", "order: RAS, WAS, SAS"] {
        assert!(table.replace("  ", "").contains(part), "{part} is not in:\n{table}");
    }
    assert!(!table.contains("libfabric/shm"), "{table}");
    Ok(())
}

fn check_moves_verified_bytes_over_libfabric_nics() -> Outcome {
    library()?;
    for provider in [TCP, "libfabric/shm"] {
        let output = run("check", &["--json", "--nic", provider, "--bytes", "4097"]);
        let document: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(output.status.code(), Some(0), "{document:#}");
        schema::matches("check", &document);
        let rows = list(&document, "rows");
        for memory in ["heap", "mmap", "memfd", "borrowed"] {
            let row = rows.iter().find(|row| row["memory"] == memory).expect("host memory");
            assert_eq!((&row["verified"], &row["bytes"]), (&true.into(), &4097.into()), "{row}");
            assert_eq!((&row["path"], &row["atomic"]), (&"plain-host".into(), &"verified".into()));
        }
        let prefix = format!("{}:", provider.trim_start_matches("libfabric/"));
        let of = |row: &Value| row["nic"].as_str().is_some_and(|nic| nic.starts_with(&prefix));
        assert!(rows.iter().all(of), "only {provider} was selected: {document:#}");
    }
    Ok(())
}

fn explain_shows_the_path_to_a_libfabric_nic() -> Outcome {
    library()?;
    let document =
        document_of(&run("explain", &["--json", "--nic", "libfabric/shm", "--iface", "system"]));
    schema::matches("explain", &document);
    let [path] = list(&document, "explanations") else { panic!("{document:#}") };
    assert_eq!((&path["provider"], &path["nic"]), (&"libfabric".into(), &"shm:shm".into()));
    assert_eq!(path["path"], "plain-host", "{path}");
    Ok(())
}

fn unknown_names_are_refused_with_those_that_exist() -> Outcome {
    library()?;
    for command in [&["info"][..], &["check"], &["explain"], &["perf", "--server"]] {
        for (nic, words) in [
            ("libfabric/nonsense", ["nonsense", "tcp;ofi_rxm"]),
            ("libfabric/shm:nonsense", ["libfabric/shm:nonsense", "libfabric/shm:shm"]),
        ] {
            let output = run(command[0], &[&command[1..], &["--nic", nic]].concat());
            refused(&output, 2, &words);
        }
    }
    Ok(())
}

fn perf_moves_verified_bytes_between_two_hosts_without_rdma_hardware() -> Outcome {
    library()?;
    let hosts = Hosts::new().map_err(Skipped)?;
    let server = ["--server", "--bind", "10.77.0.1", "--port", "0", "--persistent", "--nic"];
    let nic = [&server[..], &["libfabric/tcp;ofi_rxm:left"]].concat();
    let server = Server::spawn(hosts.hmem(Host::Left, "perf", &nic));
    let port = server.port.to_string();
    for op in ["write", "read", "send", "atomic"] {
        let to = ["10.77.0.1", "--port", &port, "--nic", "libfabric/tcp;ofi_rxm:right", "--json"];
        let sizes: &[&str] =
            if op == "atomic" { &[] } else { &["--size", "1,7,4097,64KiB,256KiB"] };
        let few = ["--op", op, "--iterations", "20", "--depth", "3"];
        let before = [Host::Left, Host::Right].map(|host| hosts.received(host));
        let client = hosts.hmem(Host::Right, "perf", &[&to[..], &few, sizes].concat());
        let document = document_of(&{ client }.output().expect("the command runs"));
        is_as_documented(&document, ["plain-host"; 2]);
        assert_eq!(document["local"]["nic"], "tcp;ofi_rxm:right");
        assert_eq!(document["remote"]["nic"], "tcp;ofi_rxm:left");
        let results = list(&document, "results");
        assert_eq!(results.len(), if op == "atomic" { 1 } else { 5 });
        assert!(results.iter().all(|row| row["ordering"] == "strict"), "{document:#}");
        // The bytes of the measured transfers alone, without the warm-ups.
        let bytes = |row: &Value| 40 * row["bytes"].as_u64().expect("a size");
        let moved: u64 = results.iter().map(bytes).sum();
        let (at, host) = if op == "read" { (1, Host::Right) } else { (0, Host::Left) };
        let received = hosts.received(host) - before[at];
        assert!(received >= moved, "{op}: {received} of {moved} bytes crossed the link");
    }
    Ok(())
}

fn server_and_client_of_different_libfabric_providers_are_told_so() -> Outcome {
    library()?;
    let mut server = Server::start(&["--nic", "libfabric/shm"]);
    let arguments = server.client(&["--nic", TCP]);
    let output = hmem("perf", &[]).args(arguments).output().expect("the command runs");
    refused(&output, 1, &["tcp;ofi_rxm", "shm"]);
    one_line(&server.next_line(), &["tcp;ofi_rxm", "shm"]);
    assert_eq!(server.status(), Some(1));
    Ok(())
}

fn client_reports_a_server_killed_mid_transfer() -> Outcome {
    library()?;
    for op in ["write", "send"] {
        let server = Server::start(&["--nic", TCP]);
        let (client, relay) = Relay::transferring(server.port, TCP, op);
        // Dropping the handle kills the server.
        drop(server);
        let output = client.wait_with_output().expect("the process ends");
        refused(&output, 1, &["peer not reachable"]);
        relay.join();
    }
    Ok(())
}

fn server_survives_a_client_killed_mid_transfer() -> Outcome {
    library()?;
    let mut server = Server::start(&["--nic", TCP, "--persistent"]);
    for op in ["write", "read", "send"] {
        let (mut client, relay) = Relay::transferring(server.port, TCP, op);
        client.kill().expect("the process is killed");
        client.wait().expect("the process ends");
        one_line(&server.next_line(), &["peer not reachable"]);
        relay.join();
        let few = ["--nic", TCP, "--json", "--size", "64", "--iterations", "20"];
        let next = hmem("perf", &[]).args(server.client(&few)).output().expect("the command runs");
        is_as_documented(&document_of(&next), ["plain-host"; 2]);
    }
    Ok(())
}

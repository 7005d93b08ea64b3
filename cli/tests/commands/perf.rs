//! `hmem perf`: the built command with both sides in one process, and with peers that the tests
//! imitate.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    thread,
    time::Duration,
};

use crate::hmem_process::{Server, document_of, is_as_documented, one_line, perf, refused, text};
use clap::Parser;
use hmem_cli::{
    Outcome,
    args::Cli,
    machine::{Absent, Machine},
    run_on,
    table::Style,
};
use serde_json::{Value, json};

const SOFTWARE: &str = "loopback/hardware";

fn document(arguments: &[&str]) -> Value {
    document_of(&perf(&[&["--loopback", "--json", "--iterations", "200"], arguments].concat()))
}

fn server(arguments: &[&str]) -> Server {
    Server::start(&[&["--nic", SOFTWARE], arguments].concat())
}

#[test]
fn every_operation_moves_verified_bytes_between_host_memories() {
    for op in ["write", "read", "send"] {
        let document = document(&["--op", op, "--size", "1,7,8..32,4097,1MiB"]);
        is_as_documented(&document, ["plain-host"; 2]);
        assert_eq!(document["op"], op);
        let sizes: Vec<_> = document["results"]
            .as_array()
            .expect("results")
            .iter()
            .map(|row| row["bytes"].clone())
            .collect();
        assert_eq!(sizes, [1, 7, 8, 16, 32, 4097, 1 << 20].map(Value::from));
    }
    let atomic = document(&["--op", "atomic"]);
    is_as_documented(&atomic, ["plain-host"; 2]);
    assert_eq!(atomic["results"].as_array().map(Vec::len), Some(1));
}

#[test]
fn every_operation_moves_verified_bytes_between_device_memories() {
    for op in ["write", "read", "send", "atomic"] {
        let sizes: &[&str] = if op == "atomic" { &[] } else { &["--size", "3,64KiB"] };
        let document =
            document(&[&["--op", op, "--iface", "simulated", "--device", "1"], sizes].concat());
        is_as_documented(&document, ["dma-buf"; 2]);
        assert_eq!(document["local"]["device"], 1);
    }
}

#[test]
fn every_software_nic_and_depth_works() {
    for nic in ["loopback/scalable", "loopback/hardware"] {
        for depth in ["1", "3", "4096"] {
            for op in ["write", "send", "atomic"] {
                let document =
                    document(&["--nic", nic, "--depth", depth, "--op", op, "--size", "8"]);
                is_as_documented(&document, ["plain-host"; 2]);
            }
        }
    }
}

#[test]
fn perf_measures_one_figure_for_a_duration() {
    let output = perf(&[
        "--loopback",
        "--json",
        "--duration",
        "0.05",
        "--measure",
        "bandwidth",
        "--size",
        "64",
        "--seed",
        "5",
    ]);
    let document: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let row = &document["results"][0];
    assert!(
        row["latency"].is_null() && row["bandwidth"]["seconds"].as_f64().is_some_and(|s| s >= 0.05),
        "{row}"
    );
    assert_eq!(document["seed"], 5);
    let document = self::document(&["--measure", "latency", "--size", "64"]);
    assert!(document["results"][0]["bandwidth"].is_null());
}

/// Both orderings are measured in one connection, also of a server in another process.
#[test]
fn selected_write_orderings_are_measured_one_after_the_other() {
    let of = |document: &Value| -> Vec<(Value, Value, bool)> {
        let rows = document["results"].as_array().expect("results").iter();
        rows.map(|row| (row["bytes"].clone(), row["ordering"].clone(), row["gain"].is_object()))
            .collect()
    };
    let rows = |orders: &[(&str, bool)]| -> Vec<(Value, Value, bool)> {
        let row = |(order, gain): &(&str, bool)| {
            [64, 4096].map(|bytes| (bytes.into(), (*order).into(), *gain))
        };
        orders.iter().flat_map(row).collect()
    };
    for (arguments, expected) in [
        (&[][..], rows(&[("strict", false)])),
        (&["--ordering", "strict"], rows(&[("strict", false)])),
        (&["--ordering", "relaxed"], rows(&[("relaxed", false)])),
        (&["--ordering", "both"], rows(&[("strict", false), ("relaxed", true)])),
    ] {
        for op in ["write", "send"] {
            let all = [&["--size", "64,4096", "--op", op], arguments].concat();
            let document = self::document(&all);
            is_as_documented(&document, ["plain-host"; 2]);
            assert_eq!(of(&document), expected, "{arguments:?}");
        }
    }
    let document = document(&["--size", "8", "--measure", "latency", "--ordering", "both"]);
    let gain = &document["results"][1]["gain"];
    assert!(gain["bandwidth"].is_null() && gain["latency"].is_number(), "{gain}");
}

#[test]
fn table_names_the_gain_of_relaxed_ordering() {
    let both = ["--ordering", "both", "--size", "64,128", "--iterations", "10"];
    let output = perf(&[&["--loopback"], &both[..]].concat());
    let table = text(&output.stdout);
    assert_eq!(table.matches("With relaxed ordering").count(), 1, "{table}");
    assert_eq!(table.matches("gain: bandwidth").count(), 2, "{table}");
    let title = table.find("With relaxed ordering").expect("a title");
    assert!(table.find("gain:").is_some_and(|gain| gain > title), "{table}");
}

#[test]
fn table_shows_operation_path_and_figures() {
    let output = perf(&["--loopback", "--size", "64", "--iterations", "10"]);
    assert_eq!(output.status.code(), Some(0));
    let table = text(&output.stdout);
    for word in [
        "RMA write to server 127.0.0.1",
        "plain-host",
        "loopback/hardware",
        "GiB/s",
        "99.9%",
        "64 B",
        "yes",
    ] {
        assert!(table.contains(word), "{word} is not in:\n{table}");
    }
    assert!(
        table.lines().all(|line| line.chars().count() <= 110 && line == line.trim_end()),
        "{table}"
    );
}

/// LIFE-12
#[test]
fn report_has_counts_of_registrations_only_if_asked_for() {
    let sizes = ["--size", "8", "--iface", "simulated"];
    let document = document(&[&sizes[..], &["--metrics", "--ordering", "both"]].concat());
    is_as_documented(&document, ["dma-buf"; 2]);
    let metrics = document["metrics"].as_array().expect("counts");
    assert_eq!(metrics.len(), 2, "one for each ordering");
    for (counts, ordering) in metrics.iter().zip(["strict", "relaxed"]) {
        assert_eq!((&counts["ordering"], &counts["refusals"]), (&json!(ordering), &json!([])));
        let paths = counts["paths"].as_array().expect("paths");
        assert_eq!((paths.len(), &paths[0]["path"]), (1, &json!("dma-buf")));
        assert_eq!(paths[0]["registrations"], 1);
        assert_eq!(counts["latency"][0]["count"], 1);
    }
    assert!(self::document(&sizes)["metrics"].is_null());
    let output = perf(&["--loopback", "--size", "8", "--iterations", "10", "--metrics"]);
    let table = text(&output.stdout);
    for word in ["Registrations of this side (strict ordering)", "plain-host: ", "1 registered"] {
        assert!(table.contains(word), "{word} is not in:\n{table}");
    }
}

#[test]
fn table_names_the_unit_of_latencies_above_their_columns() {
    let output = perf(&["--loopback", "--size", "64", "--iterations", "10"]);
    let lines: Vec<_> = text(&output.stdout).lines().collect();
    let header = lines.iter().position(|line| line.contains("GiB/s Transfers/s")).expect("a table");
    let latency = lines[header - 1].find("latency in us").expect("a unit");
    let columns = lines[header].find("min").zip(lines[header].find("max"));
    let (min, max) = columns.expect("the columns of latencies");
    assert!(min - 3 <= latency && latency < max, "{}", text(&output.stdout));
}

#[test]
fn failed_first_measurement_prints_the_error_without_a_table() {
    let memory = ["--iface", "simulated", "--nic", "loopback/peer-memory"];
    let output = perf(&[&["--loopback", "--op", "atomic"], &memory[..]].concat());
    refused(&output, 1, &["atomic: not supported"]);
}

#[test]
fn wrong_arguments_are_refused_on_one_line() {
    for (arguments, words) in [
        (&[][..], &["HOST"][..]),
        (&["host", "--server"], &["--server"]),
        (&["host", "--loopback"], &["--loopback"]),
        (&["--loopback", "--op", "teleport"], &["teleport"]),
        (&["--loopback", "--size", "0"], &["--size"]),
        (&["--loopback", "--size", "64..8"], &["upwards"]),
        (&["--loopback", "--size", "2GiB"], &["1 GiB"]),
        (&["--loopback", "--depth", "0"], &["--depth"]),
        (&["--loopback", "--depth", "5000"], &["--depth"]),
        (&["--loopback", "--iterations", "0"], &["--iterations"]),
        (&["--loopback", "--duration", "never"], &["--duration"]),
        (&["--loopback", "--iterations", "5", "--duration", "5"], &["--iterations"]),
        (&["--loopback", "--op", "atomic", "--size", "16"], &["8 bytes"]),
        (&["--loopback", "--iface", "nonsense"], &["nonsense", "simulated"]),
        (&["--loopback", "--iface", "simulated", "--device", "7"], &["--device", "7"]),
        (&["--loopback", "--nic", "nonsense"], &["nonsense", SOFTWARE]),
        (&["--server", "--op", "read"], &["--server"]),
        (&["host", "--bind", "127.0.0.1"], &["--bind"]),
        (&["--server", "--port", "99999"], &["99999"]),
    ] {
        refused(&perf(arguments), 2, words);
    }
}

/// An unavailable iface or NIC ends a command with status 1. An unknown one is a bad command line:
/// status 2.
#[test]
fn unavailable_hardware_exits_with_status_1_and_not_2() {
    let hmem = hmem::Hmem::builder().without_vendor_ifaces().build().expect("host memory");
    let mut machine = Machine::new(hmem);
    let why = "the library libibverbs.so.1 cannot be loaded".into();
    machine.absent.push(Absent { sort: "provider", name: "verbs".into(), why });
    let why = "no io_uring".into();
    machine.absent.push(Absent { sort: "NIC", name: "loopback/pinned".into(), why });
    let status = |words: &[&str]| {
        let cli = Cli::try_parse_from(["hmem"].iter().chain(words)).expect("a valid command line");
        match run_on(&machine, &cli.command, Style::plain(), &mut Vec::new()) {
            Ok(Outcome::Passed) => 0,
            Ok(Outcome::Failed) => 1,
            Err(failure) => failure.status(),
        }
    };
    for (option, name, expected) in [
        ("--nic", "verbs", 1),
        ("--nic", "verbs/mlx5_0", 1),
        ("--nic", "loopback/pinned", 1),
        ("--nic", "loopback/other", 2),
        ("--nic", "nonsense", 2),
        ("--iface", "cuda", 1),
        ("--iface", "nonsense", 2),
    ] {
        for command in [&["check"][..], &["explain"], &["perf", "localhost"], &["perf", "--server"]]
        {
            let words = [command, &[option, name]].concat();
            assert_eq!(status(&words), expected, "{words:?}");
        }
    }
    for command in [&["perf", "localhost"][..], &["perf", "--server"], &["perf", "--loopback"]] {
        assert_eq!(status(command), 1, "{command:?}");
    }
    assert_eq!(status(&["info"]), 0);
}

#[test]
fn connection_without_a_server_names_the_remedy() {
    let port = TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("a port")
        .port();
    refused(
        &perf(&["127.0.0.1", "--port", &port.to_string(), "--nic", SOFTWARE]),
        1,
        &["connect", "--server"],
    );
}

fn greeting(version: u32) -> Vec<u8> {
    [&b"hmemperf"[..], &version.to_be_bytes()].concat()
}

fn message(content: &[u8]) -> Vec<u8> {
    [&greeting(2), &(content.len() as u32).to_be_bytes()[..], content].concat()
}

fn request(change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let side = json!({"iface": "system", "device": null, "provider": "loopback",
        "nic": "x\u{1b}[2J", "path": "", "reason": "", "trace": []});
    let mut request = json!({"op": "write", "ordering": "strict", "sizes": [8], "depth": 1,
        "seed": 1, "endpoint": [1, 2, 3], "side": side});
    change(&mut request);
    message(json!({ "request": request }).to_string().as_bytes())
}

/// Returns malformed byte sequences, each with words of the expected error.
fn malformed() -> Vec<(Vec<u8>, &'static str)> {
    vec![
        (vec![], "hung up"),
        (b"hmem".to_vec(), "hung up"),
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "not hmem perf"),
        (vec![0xff; 100_000], "not hmem perf"),
        (greeting(1), "protocol=1, expected=2"),
        (greeting(2), "hung up"),
        ([greeting(2), vec![0xff; 4]].concat(), "bytes=4294967295"),
        ([greeting(2), vec![0, 0, 1]].concat(), "hung up"),
        ([greeting(2), vec![0, 0, 1, 0, b'{']].concat(), "hung up"),
        (message(b""), "EOF"),
        (message(b"\x1b[2J\n\n"), "expected value"),
        (message(&[b'['; 10_000]), "expected value"),
        (message(br#""nonsense""#), "unknown variant"),
        (message(br#""running""#), "message=running"),
        (message(br#"{"failed":{"why":"first\nsecond\u001b[31m"}}"#), ": first second"),
    ]
}

#[test]
fn malformed_client_is_reported_on_one_line_at_the_server() {
    let mut all = malformed();
    all.extend([
        (request(|_| ()), "resolve"),
        (request(|request| request["sizes"] = json!([])), "sizes=0"),
        (request(|request| request["sizes"] = json!([8, u64::MAX])), "size=18446744073709551615"),
        (request(|request| request["sizes"] = json!([0])), "size=0"),
        (request(|request| request["sizes"] = json!(vec![8; 65])), "sizes=65"),
        (request(|request| request["depth"] = json!(0)), "depth=0"),
        (request(|request| request["depth"] = json!(1_000_000)), "depth=1000000"),
        (request(|request| request["depth"] = json!(-1)), "invalid value"),
        (request(|request| request["op"] = json!("atomic\u{7}")), "unknown variant"),
        (request(|request| request["ordering"] = json!("loose")), "unknown variant"),
        (request(|request| request["extra"] = json!(1)), "unknown field"),
        (
            request(|request| request["side"]["provider"] = json!("verbs\u{1b}[2J")),
            "theirs=verbs [2J",
        ),
        (
            request(|request| {
                request["op"] = json!("atomic");
                request["sizes"] = json!([16]);
            }),
            "size=16",
        ),
    ]);
    let mut persistent = server(&["--persistent"]);
    for (bytes, word) in all {
        let mut server = self::server(&[]);
        for port in [server.port, persistent.port] {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("the server listens");
            // Ignores errors, since the other side may close the connection after the first bytes.
            let _ = stream.write_all(&bytes);
            let _ = stream.shutdown(Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        }
        one_line(&server.next_line(), &[word]);
        assert_eq!(server.next_line(), "");
        assert_eq!(server.status(), Some(1), "{word}");
        one_line(&persistent.next_line(), &[word]);
    }
    assert!(matches!(persistent.process.try_wait(), Ok(None)), "it serves on");
}

#[test]
fn malformed_server_is_reported_at_the_client() {
    let mut all = malformed();
    let ready = |key: Value| {
        let side = json!({"iface": "", "device": null, "provider": "loopback", "nic": "",
            "path": "", "reason": "", "trace": []});
        message(
            json!({"ready": {"endpoint": [1], "key": key, "side": side}}).to_string().as_bytes(),
        )
    };
    let key = |len| {
        hmem::RemoteKey::new(hmem::Addressing::Virtual, hmem::Iova(u64::MAX - 200), len, 1)
            .to_bytes()
    };
    all.extend([
        (ready(Value::Null), "no key"),
        (ready(json!([1, 2, 3])), "remote key"),
        (ready(json!(key(8))), "does not cover"),
        (ready(json!(key(u64::MAX))), "does not cover"),
        (message(br#""go""#), "message=go"),
    ]);
    for (bytes, word) in all {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port().to_string();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("the client connects");
            let _ = stream.write_all(&bytes);
            let _ = stream.shutdown(Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let output = perf(&["127.0.0.1", "--port", &port, "--nic", SOFTWARE, "--size", "8"]);
        server.join().expect("no panic");
        refused(&output, 1, &[word]);
    }
}

/// The deadline for receiving a message applies to the whole message, not to each byte. A test in
/// `src/perf/wire.rs` uses a shorter deadline.
#[test]
#[ignore = "waits for the ten seconds that a peer has to answer"]
fn silent_peer_times_out() {
    let mut server = self::server(&[]);
    let mut stream = TcpStream::connect(("127.0.0.1", server.port)).expect("the server listens");
    stream.read_exact(&mut greeting(1)).expect("the greeting of the server");
    // Sends a byte each second until the server closes the connection.
    stream.set_read_timeout(Some(Duration::from_secs(1))).expect("a socket");
    let trickle = thread::spawn(move || {
        for byte in message(&[b' '; 100]) {
            if stream.write_all(&[byte]).is_err() {
                return;
            }
            match stream.read(&mut [0]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                hung_up => return drop(hung_up),
            }
        }
        panic!("the deadline restarts with every byte");
    });
    one_line(&server.next_line(), &["no answer in time"]);
    assert_eq!(server.status(), Some(1));
    trickle.join().expect("given up before the last byte");
}

#[test]
fn software_nic_refuses_a_peer_in_another_process() {
    let mut server = self::server(&[]);
    let output = perf(&["127.0.0.1", "--port", &server.port.to_string(), "--nic", SOFTWARE]);
    refused(&output, 1, &["--loopback"]);
    one_line(&server.next_line(), &["--loopback"]);
    assert_eq!(server.status(), Some(1));
}

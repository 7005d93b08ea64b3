//! `hmem perf` as a user meets it: both sides in one process, and peers that are no hmem at all.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    process::{Child, ChildStderr, Command, Output, Stdio},
    thread,
};

use serde_json::{Value, json};

const SOFTWARE: &str = "loopback/hardware";
const SCHEMA: &str = include_str!("../../docs/perf-schema.md");

fn hmem(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hmem"));
    for name in ["FI_HMEM", "FI_HMEM_DISABLE_P2P", "NO_COLOR", "CLICOLOR_FORCE"] {
        command.env_remove(name);
    }
    command.arg("perf").args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn perf(arguments: &[&str]) -> Output {
    hmem(arguments).output().expect("the command runs")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

/// One readable line that has the words in it.
fn one_line(error: &str, words: &[&str]) {
    assert!(error.starts_with("error: ") && error.trim_end().lines().count() == 1, "{error}");
    assert!(!error.trim_end().contains(|c: char| c.is_control()), "{error:?}");
    for word in words {
        assert!(error.contains(word), "{word} is not in: {error}");
    }
}

fn refused(output: &Output, code: i32, words: &[&str]) {
    assert_eq!(output.status.code(), Some(code), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "");
    one_line(text(&output.stderr), words);
}

fn document(arguments: &[&str]) -> Value {
    let output = perf(&[&["--loopback", "--json", "--iterations", "200"], arguments].concat());
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Exactly these fields, each of them described in the document.
fn has(object: &Value, fields: &[&str]) {
    let mut names: Vec<_> = object.as_object().expect("an object").keys().map(String::as_str).collect();
    let mut fields = fields.to_vec();
    names.sort_unstable();
    fields.sort_unstable();
    assert_eq!(names, fields, "{object}");
    for name in names {
        assert!(SCHEMA.contains(&format!("`{name}`")), "{name} is not in docs/perf-schema.md");
    }
}

fn is_as_documented(document: &Value, path: &str) {
    has(document, &["schema", "version", "role", "peer", "op", "seed", "local", "remote", "results"]);
    assert_eq!((&document["schema"], &document["role"]), (&1.into(), &"client".into()));
    for side in ["local", "remote"] {
        let side = &document[side];
        has(side, &["iface", "device", "provider", "nic", "path", "reason", "trace"]);
        assert_eq!(side["path"], path, "{side}");
        let trace = side["trace"].as_array().expect("a trace");
        assert!(trace.last().is_some_and(|last| last["error"].is_null() && last["path"] == path), "{side}");
    }
    for row in document["results"].as_array().expect("results") {
        has(row, &["bytes", "verified", "bandwidth", "latency"]);
        assert_eq!(row["verified"], true);
        let bandwidth = &row["bandwidth"];
        has(bandwidth, &["depth", "transfers", "seconds", "gib_per_s", "transfers_per_s"]);
        assert!(bandwidth["gib_per_s"].as_f64().is_some_and(|speed| speed > 0.0), "{row}");
        let latency = &row["latency"];
        let quantiles = ["min_us", "p50_us", "p90_us", "p99_us", "p999_us", "max_us"];
        has(latency, &[&["transfers"], &quantiles[..]].concat());
        let us: Vec<_> = quantiles.iter().filter_map(|name| latency[name].as_f64()).collect();
        assert!(us.len() == quantiles.len() && us.is_sorted() && us[0] > 0.0, "{row}");
    }
}

#[test]
fn every_operation_moves_verified_bytes_between_host_memories() {
    for op in ["write", "read", "send"] {
        let document = document(&["--op", op, "--size", "1,7,8..32,4097,1MiB"]);
        is_as_documented(&document, "plain-host");
        assert_eq!(document["op"], op);
        let sizes: Vec<_> =
            document["results"].as_array().expect("results").iter().map(|row| row["bytes"].clone()).collect();
        assert_eq!(sizes, [1, 7, 8, 16, 32, 4097, 1 << 20].map(Value::from));
    }
    let atomic = document(&["--op", "atomic"]);
    is_as_documented(&atomic, "plain-host");
    assert_eq!(atomic["results"].as_array().map(Vec::len), Some(1));
}

#[test]
fn every_operation_moves_verified_bytes_between_device_memories() {
    for op in ["write", "read", "send", "atomic"] {
        let sizes: &[&str] = if op == "atomic" { &[] } else { &["--size", "3,64KiB"] };
        let document = document(&[&["--op", op, "--iface", "simulated", "--device", "1"], sizes].concat());
        is_as_documented(&document, "dma-buf");
        assert_eq!(document["local"]["device"], 1);
    }
}

#[test]
fn every_software_nic_and_depth_works() {
    for nic in ["loopback/scalable", "loopback/hardware"] {
        for depth in ["1", "3", "4096"] {
            for op in ["write", "send", "atomic"] {
                let document = document(&["--nic", nic, "--depth", depth, "--op", op, "--size", "8"]);
                is_as_documented(&document, "plain-host");
            }
        }
    }
}

#[test]
fn a_run_can_be_bounded_by_time_and_to_one_figure() {
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

#[test]
fn the_table_says_what_was_measured_over_which_path() {
    let output = perf(&["--loopback", "--size", "64", "--iterations", "10"]);
    assert_eq!(output.status.code(), Some(0));
    let table = text(&output.stdout);
    for word in
        ["RMA write to server 127.0.0.1", "plain-host", "loopback/hardware", "GiB/s", "99.9%", "64 B", "yes"]
    {
        assert!(table.contains(word), "{word} is not in:\n{table}");
    }
    assert!(table.lines().all(|line| line.chars().count() <= 110 && line == line.trim_end()), "{table}");
}

#[test]
fn wrong_usage_is_refused_in_one_line() {
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

#[test]
fn nobody_listening_is_one_line() {
    let port =
        TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port").port();
    refused(
        &perf(&["127.0.0.1", "--port", &port.to_string(), "--nic", SOFTWARE]),
        1,
        &["connect", "--server"],
    );
}

/// A server that listens; killed with it.
struct Server {
    process: Child,
    stderr: BufReader<ChildStderr>,
    port: u16,
}

impl Server {
    fn start(arguments: &[&str]) -> Self {
        let all = ["--server", "--bind", "127.0.0.1", "--port", "0", "--nic", SOFTWARE];
        let mut process = hmem(&[&all[..], arguments].concat()).spawn().expect("the command starts");
        let mut stderr = BufReader::new(process.stderr.take().expect("a pipe"));
        let mut line = String::new();
        stderr.read_line(&mut line).expect("the server says where it listens");
        let port = line.trim().strip_prefix("listening on 127.0.0.1:").and_then(|port| port.parse().ok());
        Self { port: port.unwrap_or_else(|| panic!("{line}")), process, stderr }
    }

    fn next_line(&mut self) -> String {
        let mut line = String::new();
        self.stderr.read_line(&mut line).expect("UTF-8");
        line
    }

    fn status(&mut self) -> Option<i32> {
        self.process.wait().expect("it ends").code()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if matches!(self.process.try_wait(), Ok(None)) {
            self.process.kill().expect("it can be killed");
            self.process.wait().expect("it ends");
        }
    }
}

fn greeting(version: u32) -> Vec<u8> {
    [&b"hmemperf"[..], &version.to_be_bytes()].concat()
}

fn message(content: &[u8]) -> Vec<u8> {
    [&greeting(1), &(content.len() as u32).to_be_bytes()[..], content].concat()
}

fn request(change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let side = json!({"iface": "system", "device": null, "provider": "loopback", "nic": "x\u{1b}[2J", "path": "",
        "reason": "", "trace": []});
    let mut request =
        json!({"op": "write", "sizes": [8], "depth": 1, "seed": 1, "endpoint": [1, 2, 3], "side": side});
    change(&mut request);
    message(json!({ "request": request }).to_string().as_bytes())
}

/// What is sent, and what the answer to it names.
fn malformed() -> Vec<(Vec<u8>, &'static str)> {
    vec![
        (vec![], "hung up"),
        (b"hmem".to_vec(), "hung up"),
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "this is no hmem perf"),
        (vec![0xff; 100_000], "this is no hmem perf"),
        (greeting(2), "protocol=2, expected=1"),
        (greeting(1), "hung up"),
        ([greeting(1), vec![0xff; 4]].concat(), "bytes=4294967295"),
        ([greeting(1), vec![0, 0, 1]].concat(), "hung up"),
        ([greeting(1), vec![0, 0, 1, 0, b'{']].concat(), "hung up"),
        (message(b""), "EOF"),
        (message(b"\x1b[2J\n\n"), "expected value"),
        (message(&[b'['; 10_000]), "wrong="),
        (message(br#""nonsense""#), "unknown variant"),
        (message(br#""running""#), "message=running"),
        (message(br#"{"failed":{"why":"first\nsecond\u001b[31m"}}"#), "why=first second"),
    ]
}

#[test]
fn a_malformed_client_is_one_line_at_the_server() {
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
        (request(|request| request["extra"] = json!(1)), "unknown field"),
        (request(|request| request["side"]["provider"] = json!("verbs\u{1b}[2J")), "theirs=verbs [2J"),
        (
            request(|request| {
                request["op"] = json!("atomic");
                request["sizes"] = json!([16]);
            }),
            "size=16",
        ),
    ]);
    let mut persistent = Server::start(&["--persistent"]);
    for (bytes, word) in all {
        let mut server = Server::start(&[]);
        for port in [server.port, persistent.port] {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("it listens");
            // The other side may have hung up over the first bytes.
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
fn a_malformed_server_is_one_line_at_the_client() {
    let mut all = malformed();
    let ready = |key: Value| {
        let side = json!({"iface": "", "device": null, "provider": "loopback", "nic": "", "path": "", "reason": "",
            "trace": []});
        message(json!({"ready": {"endpoint": [1], "key": key, "side": side}}).to_string().as_bytes())
    };
    let key =
        |len| hmem::RemoteKey::new(hmem::Addressing::Virtual, hmem::Iova(u64::MAX - 200), len, 1).to_bytes();
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
            let (mut stream, _) = listener.accept().expect("the client comes");
            let _ = stream.write_all(&bytes);
            let _ = stream.shutdown(Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let output = perf(&["127.0.0.1", "--port", &port, "--nic", SOFTWARE, "--size", "8"]);
        server.join().expect("no panic");
        refused(&output, 1, &[word]);
    }
}

/// The read has a deadline of its own, not one for each byte.
#[test]
fn a_peer_that_says_nothing_is_given_up() {
    let mut server = Server::start(&[]);
    let mut stream = TcpStream::connect(("127.0.0.1", server.port)).expect("it listens");
    let trickle = thread::spawn(move || {
        for byte in greeting(1) {
            if stream.write_all(&[byte]).is_err() {
                break;
            }
            thread::sleep(std::time::Duration::from_secs(2));
        }
        stream
    });
    one_line(&server.next_line(), &["no answer in time"]);
    assert_eq!(server.status(), Some(1));
    trickle.join().expect("no panic");
}

#[test]
fn the_software_nic_does_not_reach_another_process_and_says_so() {
    let mut server = Server::start(&[]);
    let output = perf(&["127.0.0.1", "--port", &server.port.to_string(), "--nic", SOFTWARE]);
    refused(&output, 1, &["--loopback"]);
    one_line(&server.next_line(), &["--loopback"]);
    assert_eq!(server.status(), Some(1));
}

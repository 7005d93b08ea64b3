//! Compares the bandwidth of `hmem perf` with that of perftest's `ib_write_bw`. Both do RMA writes
//! between two processes on the device that `HMEM_VERBS_DEVICE` names, alternately, with equal
//! sizes and queue depths.
//!
//! `tests/vm/run --bench` runs this bench over rdma_rxe on a guest with one processor. The rxe
//! driver competes with the measuring processes for that processor, and `ib_write_bw` always
//! busy-polls. Both effects are part of the measured ratio.
//!
//! `HMEM_PROGRAM` overrides the path of the `hmem` command, and `HMEM_IB_WRITE_BW` that of
//! `ib_write_bw`.

#![allow(missing_docs, reason = "a bench is a program")]

use std::{
    env,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
};

const ROUNDS: usize = 5;
const DEPTH: u32 = 64;
/// The required bandwidth of `hmem perf`, as a fraction of the bandwidth of `ib_write_bw`.
const GOAL: f64 = 0.95;

fn program(variable: &str, otherwise: &str) -> Command {
    let mut command = Command::new(env::var(variable).unwrap_or_else(|_| otherwise.to_owned()));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn output_of(child: Child, what: &str) -> String {
    let output = child.wait_with_output().expect("the process ends");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{what}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Runs `hmem perf` and returns its bandwidth in GiB/s.
fn hmem(device: &str, size: u64, transfers: u64) -> f64 {
    let perf = |arguments: &[&str]| {
        let mut command = program("HMEM_PROGRAM", env!("CARGO_BIN_EXE_hmem"));
        command.args(["perf", "--nic", &format!("verbs/{device}")]).args(arguments);
        command.spawn().expect("hmem starts")
    };
    let mut server = perf(&["--server", "--bind", "127.0.0.1", "--port", "0"]);
    let mut line = String::new();
    // The pipe stays open until the server exits, since the server may still write to it.
    let mut stderr = BufReader::new(server.stderr.take().expect("a pipe"));
    stderr.read_line(&mut line).expect("the server prints its address");
    let port = line.trim().rsplit(':').next().expect("a port");
    let (size, transfers, depth) = (size.to_string(), transfers.to_string(), DEPTH.to_string());
    let amounts =
        ["--size", &size, "--iterations", &transfers, "--depth", &depth, "--measure", "bandwidth"];
    let client = perf(&[&["127.0.0.1", "--port", port, "--json"], &amounts[..]].concat());
    let document: serde_json::Value =
        serde_json::from_str(&output_of(client, "hmem perf")).expect("one document");
    output_of(server, "hmem perf --server");
    document["results"][0]["bandwidth"]["gib_per_s"].as_f64().expect("a number")
}

/// Runs `ib_write_bw` and returns its average bandwidth in GiB/s.
fn perftest(device: &str, size: u64, transfers: u64, port: u16) -> f64 {
    let (size, transfers, depth, port) =
        (size.to_string(), transfers.to_string(), DEPTH.to_string(), port.to_string());
    let start = |peer: Option<&str>| {
        let mut command = program("HMEM_IB_WRITE_BW", "ib_write_bw");
        command
            .args(["-d", device, "-s", &size, "-n", &transfers, "-t", &depth, "-p", &port, "-F"]);
        command.args(peer);
        command.spawn().expect("ib_write_bw starts")
    };
    let mut server = start(None);
    // The server may not listen yet, so the client is started until it succeeds.
    let client = loop {
        let output = start(Some("127.0.0.1")).wait_with_output().expect("the process ends");
        if output.status.success() {
            break String::from_utf8_lossy(&output.stdout).into_owned();
        }
        let gone = server.try_wait().expect("the state of the server");
        assert!(gone.is_none(), "ib_write_bw: {}", String::from_utf8_lossy(&output.stderr));
    };
    output_of(server, "ib_write_bw (server)");
    // Columns: bytes, iterations, peak and average in MB (2^20 bytes) per second, message rate.
    let row = client
        .lines()
        .find(|line| line.trim_start().starts_with(&format!("{size} ")))
        .expect("a row");
    let average = row.split_whitespace().nth(3).expect("five columns");
    average.parse::<f64>().expect("a number") / 1024.0
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let device = match env::var("HMEM_VERBS_DEVICE") {
        Ok(device) if !device.is_empty() => device,
        _ => {
            println!(
                "not measured: HMEM_VERBS_DEVICE names no device (`tests/vm/run --bench` has one)"
            );
            return;
        }
    };
    println!(
        "\n{:<52} {:>11} {:>9} {:>7} {:>9}",
        "medians of pairs, GiB/s", "ib_write_bw", "hmem", "ratio", "at least"
    );
    for (size, transfers, port) in [(64 << 10, 400, 18700), (1 << 20, 40, 18800)] {
        let pairs: Vec<_> = (0..ROUNDS)
            .map(|round| {
                let port = port + round as u16;
                if round % 2 == 0 {
                    let theirs = perftest(&device, size, transfers, port);
                    (theirs, hmem(&device, size, transfers))
                } else {
                    let ours = hmem(&device, size, transfers);
                    (perftest(&device, size, transfers, port), ours)
                }
            })
            .collect();
        let ratio = median(pairs.iter().map(|(theirs, ours)| ours / theirs).collect());
        println!(
            "{:<52} {:>11.4} {:>9.4} {ratio:>7.3} {GOAL:>9.2}{}",
            format!("RMA writes of {} KiB between two processes", size >> 10),
            median(pairs.iter().map(|(theirs, _)| *theirs).collect()),
            median(pairs.iter().map(|(_, ours)| *ours).collect()),
            if ratio >= GOAL { "" } else { "  under" },
        );
    }
}

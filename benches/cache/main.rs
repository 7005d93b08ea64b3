//! Benchmark of the registration cache: lookups compared with UCX's cache, hits of two threads
//! compared with one thread, the cost that monitors add to unmaps, and the memory of a cached
//! region.
//!
//! ```sh
//! cargo bench --bench cache                    # tables
//! cargo bench --bench cache -- --quick --json  # short rounds; docs/bench-schema.md
//! ```
//!
//! The benchmark looks for UCX in three places: the system's loader, the Python package
//! `libucx-cu12`, and the folders that `HMEM_UCX_LIBRARIES` lists (separated by colons). It
//! measures each UCX in a child process, alternating with hmem's cache. `cargo test` checks that a
//! quick run reports every figure.

#![allow(missing_docs, reason = "a bench is a program")]
#![deny(unsafe_code)]

mod check;
mod figures;
mod measure;
mod memory;
mod noop;
mod peers;
mod report;
#[allow(unsafe_code, reason = "calls UCX's exported functions")]
mod ucx;
#[allow(unsafe_code, reason = "maps and unmaps as applications do")]
mod unmaps;

use std::{env, process::ExitCode};

use hmem::Result;

use self::{figures::Bench, measure::Effort, peers::UcxLocation, report::Report};

/// Command-line arguments of a measurement. Without arguments the program runs its tests.
#[derive(Debug)]
struct Arguments {
    quick: bool,
    json: bool,
    /// Location of the UCX to measure, if this process is a child of the benchmark.
    child: Option<UcxLocation>,
}

impl Arguments {
    fn parse(words: &[String]) -> std::result::Result<Self, String> {
        let mut parsed = Self { quick: false, json: false, child: None };
        for word in words {
            match word.as_str() {
                "--quick" => parsed.quick = true,
                "--json" => parsed.json = true,
                // `cargo bench` adds this argument.
                "--bench" => {}
                _ => match word.strip_prefix(peers::ARGUMENT) {
                    Some(location) => parsed.child = Some(UcxLocation::parse(location)),
                    None => {
                        return Err(format!("unknown argument `{word}`; use --quick or --json"));
                    }
                },
            }
        }
        Ok(parsed)
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = env::args().skip(1).collect();
    let measures = |word: &String| {
        ["--bench", "--quick", "--json"].contains(&word.as_str())
            || word.starts_with(peers::ARGUMENT)
    };
    if !words.iter().any(measures) {
        return check::run();
    }
    let arguments = match Arguments::parse(&words) {
        Ok(arguments) => arguments,
        Err(why) => {
            eprintln!("cache: {why}");
            return ExitCode::from(2);
        }
    };
    match measure(&arguments) {
        Ok(report) if arguments.json || arguments.child.is_some() => {
            println!(
                "{}",
                serde_json::to_string(&report).expect("a report can be written as JSON")
            );
            ExitCode::SUCCESS
        }
        Ok(report) => {
            report.print();
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("cache: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the measurements that the arguments ask for, and returns the report.
///
/// # Errors
/// Fails if memory or threads are short, or if a child process fails.
fn measure(arguments: &Arguments) -> Result<Report> {
    let effort = if arguments.quick { Effort::QUICK } else { Effort::FULL };
    if let Some(location) = &arguments.child {
        return peers::beside(location, effort);
    }
    let mut bench = Bench::new(effort, None)?;
    for location in peers::find(&mut bench.report) {
        let report = location.spawn(arguments.quick)?;
        bench.report.add(report);
    }
    if bench.report.peers.is_empty() {
        bench.beside_ucx()?;
    }
    bench.of_our_own()?;
    Ok(bench.report)
}

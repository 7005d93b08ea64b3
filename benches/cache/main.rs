//! The registration cache beside UCX's, hits of two threads beside those of one, what unmapping
//! costs under the monitors, and the memory of a cached region.
//!
//! ```sh
//! cargo bench --bench cache                    # tables
//! cargo bench --bench cache -- --quick --json  # short rounds; docs/bench-schema.md
//! ```
//!
//! Each UCX that is found runs in a child process of its own, in turns with our cache: the UCX of
//! the system's loader, that of the Python package `libucx-cu12`, and those in the folders of
//! `HMEM_UCX_LIBRARIES` (as in `PATH`). `cargo test` checks that a quick run prints every figure.

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

use self::{figures::Bench, measure::Effort, peers::Place, report::Report};

/// Arguments that ask for measurements. Without any of them, this is a test program.
#[derive(Debug)]
struct Arguments {
    quick: bool,
    json: bool,
    /// This is the child process of one UCX.
    child: Option<Place>,
}

impl Arguments {
    fn parse(words: &[String]) -> std::result::Result<Self, String> {
        let mut parsed = Self { quick: false, json: false, child: None };
        for word in words {
            match word.as_str() {
                "--quick" => parsed.quick = true,
                "--json" => parsed.json = true,
                // Cargo's own.
                "--bench" => {}
                _ => match word.strip_prefix(peers::ARGUMENT) {
                    Some(place) => parsed.child = Some(Place::parse(place)),
                    None => {
                        return Err(format!("there is no argument `{word}`; use --quick, --json"));
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
            println!("{}", serde_json::to_string(&report).expect("a report is plain data"));
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

/// # Errors
/// Out of memory or threads; a monitor that cannot start; a child process that failed.
fn measure(arguments: &Arguments) -> Result<Report> {
    let effort = if arguments.quick { Effort::QUICK } else { Effort::FULL };
    if let Some(place) = &arguments.child {
        return peers::beside(place, effort);
    }
    let mut bench = Bench::new(effort, None)?;
    for place in peers::find(&mut bench.report) {
        let report = place.spawn(arguments.quick)?;
        bench.report.add(report);
    }
    if bench.report.peers.is_empty() {
        bench.beside_ucx()?;
    }
    bench.of_our_own()?;
    Ok(bench.report)
}

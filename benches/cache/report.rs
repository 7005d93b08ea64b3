//! Report of a benchmark run. `docs/bench-schema.md` describes its JSON form.

use std::fmt::Display;

use serde::{Deserialize, Serialize};

/// Schema version of the JSON.
pub(super) const SCHEMA: u32 = 2;

/// Result of one time measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Row {
    /// Name of the measured quantity.
    pub(super) figure: String,
    /// Number of cached regions or, for an owner lookup, of device allocations.
    pub(super) regions: u64,
    /// Number of threads that measure at the same time.
    pub(super) threads: usize,
    /// hmem's time per operation, in nanoseconds.
    pub(super) ours_ns: f64,
    /// Name of the thing that hmem is compared with, if any: a UCX release, the raw system calls,
    /// or hmem under other conditions.
    pub(super) peer: Option<String>,
    /// Time per operation of `peer`, in nanoseconds.
    pub(super) peer_ns: Option<f64>,
    /// `ours_ns` divided by `peer_ns`.
    pub(super) ratio: Option<f64>,
    /// Largest `ratio` that meets the goal, if there is a goal.
    pub(super) target: Option<f64>,
}

/// Result of one memory measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct MemoryRow {
    /// Layout of the cached regions, or the name of another measurement of memory growth.
    pub(super) figure: String,
    /// Number of cached regions, or of other measured operations.
    pub(super) regions: u64,
    /// Growth of the process's resident memory in bytes, divided by `regions`.
    pub(super) bytes_each: f64,
    /// Largest `bytes_each` that meets the goal, if there is a goal.
    pub(super) target: Option<f64>,
}

/// A skipped measurement, or a library that was not found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Skipped {
    /// Name of the measurement, or of the missing library.
    pub(super) what: String,
    /// Reason why the measurement was skipped, in one line.
    pub(super) why: String,
}

/// Report of one run of the benchmark.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Report {
    /// Schema version of the report, equal to [`SCHEMA`].
    pub(super) schema: u32,
    /// Names of the UCX releases that were measured.
    pub(super) peers: Vec<String>,
    /// Results of the time measurements.
    pub(super) rows: Vec<Row>,
    /// Results of the memory measurements.
    pub(super) memory: Vec<MemoryRow>,
    /// Measurements that were skipped, and libraries that were not found.
    pub(super) skipped: Vec<Skipped>,
}

impl Default for Report {
    fn default() -> Self {
        let (peers, rows, memory, skipped) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { schema: SCHEMA, peers, rows, memory, skipped }
    }
}

impl Report {
    /// Records a skipped measurement with its reason. A skip that is already recorded is not added
    /// again.
    pub(super) fn skip(&mut self, what: &str, why: impl Display) {
        let skipped = Skipped { what: what.to_owned(), why: why.to_string() };
        if !self.skipped.contains(&skipped) {
            self.skipped.push(skipped);
        }
    }

    /// Adds the results of another report.
    pub(super) fn add(&mut self, other: Self) {
        self.peers.extend(other.peers);
        self.rows.extend(other.rows);
        self.memory.extend(other.memory);
        other.skipped.iter().for_each(|Skipped { what, why }| self.skip(what, why));
    }

    /// Prints the report to stdout as tables.
    pub(super) fn print(&self) {
        println!(
            "\n{:<58} {:>7} {:>7} {:>9}  {:<25} {:>9} {:>6} {:>5}",
            "figure (median of alternating rounds, ns)",
            "regions",
            "threads",
            "ours",
            "peer",
            "peer's",
            "ratio",
            "goal"
        );
        for row in &self.rows {
            println!(
                "{:<58} {:>7} {:>7} {:>9.1}  {:<25} {:>9} {:>6} {:>5}{}",
                row.figure,
                row.regions,
                row.threads,
                row.ours_ns,
                row.peer.as_deref().unwrap_or("-"),
                number(row.peer_ns, 1),
                number(row.ratio, 2),
                number(row.target, 2),
                mark(row.ratio, row.target)
            );
        }
        println!(
            "\n{:<58} {:>7} {:>9} {:>5}",
            "bytes per cached region, without the region itself", "regions", "bytes", "goal"
        );
        for row in &self.memory {
            println!(
                "{:<58} {:>7} {:>9.0} {:>5}{}",
                row.figure,
                row.regions,
                row.bytes_each,
                number(row.target, 0),
                mark(Some(row.bytes_each), row.target)
            );
        }
        for Skipped { what, why } in &self.skipped {
            println!("\nnot measured: {what}: {why}");
        }
    }
}

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}

fn mark(value: Option<f64>, target: Option<f64>) -> &'static str {
    let over = value.zip(target).is_some_and(|(value, target)| value > target);
    if over { "  over" } else { "" }
}

//! The report; `docs/bench-schema.md` describes its JSON.

use std::fmt::Display;

use serde::{Deserialize, Serialize};

/// Schema number of the JSON.
pub(super) const SCHEMA: u32 = 2;

/// One figure.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Row {
    /// Name of the figure.
    pub(super) figure: String,
    /// Regions in the cache, or allocations in the table.
    pub(super) regions: u64,
    /// Threads that measure at the same time.
    pub(super) threads: usize,
    /// Nanoseconds an operation.
    pub(super) ours_ns: f64,
    /// The side that hmem is compared with, if any: a UCX version, the system calls, or hmem under
    /// other conditions.
    pub(super) peer: Option<String>,
    /// Nanoseconds per operation of the peer library.
    pub(super) peer_ns: Option<f64>,
    /// hmem's time divided by the peer library's time.
    pub(super) ratio: Option<f64>,
    /// Largest ratio that meets the goal.
    pub(super) target: Option<f64>,
}

/// Memory that the cache uses for each region, in addition to the region itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct MemoryRow {
    /// The layout of the regions in the cache.
    pub(super) figure: String,
    /// Number of regions.
    pub(super) regions: u64,
    /// Growth of the resident set, in bytes for each region.
    pub(super) bytes_each: f64,
    /// The largest memory growth that meets the goal.
    pub(super) target: Option<f64>,
}

/// A measurement or peer library that was skipped, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Skipped {
    /// Its name.
    pub(super) what: String,
    /// The reason, in one line.
    pub(super) why: String,
}

/// The whole report of a run, as written to JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Report {
    /// The schema version of the report: [`SCHEMA`].
    pub(super) schema: u32,
    /// Names of the UCX releases that were measured.
    pub(super) peers: Vec<String>,
    /// Results of the time measurements.
    pub(super) rows: Vec<Row>,
    /// Results of the memory measurements.
    pub(super) memory: Vec<MemoryRow>,
    /// Skipped measurements and peer libraries.
    pub(super) skipped: Vec<Skipped>,
}

impl Default for Report {
    fn default() -> Self {
        let (peers, rows, memory, skipped) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { schema: SCHEMA, peers, rows, memory, skipped }
    }
}

impl Report {
    /// Records a skipped measurement or peer library, once.
    pub(super) fn skip(&mut self, what: &str, why: impl Display) {
        let skipped = Skipped { what: what.to_owned(), why: why.to_string() };
        if !self.skipped.contains(&skipped) {
            self.skipped.push(skipped);
        }
    }

    /// Adds the report of another process.
    pub(super) fn add(&mut self, other: Self) {
        self.peers.extend(other.peers);
        self.rows.extend(other.rows);
        self.memory.extend(other.memory);
        other.skipped.iter().for_each(|Skipped { what, why }| self.skip(what, why));
    }

    /// Prints tables to stdout.
    pub(super) fn print(&self) {
        println!(
            "\n{:<58} {:>7} {:>7} {:>9}  {:<25} {:>9} {:>6} {:>5}",
            "figure (medians of rounds in turns, ns)",
            "regions",
            "threads",
            "ours",
            "peer",
            "its",
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
            "bytes a cached region, above the region itself", "regions", "bytes", "goal"
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

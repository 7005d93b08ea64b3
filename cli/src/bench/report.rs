//! What `hmem bench` prints; `docs/bench-schema.md` describes the JSON.

use std::io::{self, Write};

use serde::{Deserialize, Serialize};

use crate::{
    json::{SCHEMA, Skipped},
    table::{Style, Tone},
};

/// One figure.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// What was measured.
    pub figure: String,
    /// Regions that the cache held, or allocations that the table held.
    pub regions: u64,
    /// Threads that did it at once.
    pub threads: usize,
    /// Nanoseconds an operation.
    pub ours_ns: f64,
    /// What it is held against: `UCX`, or our own figure under other circumstances.
    pub peer: Option<String>,
    /// Nanoseconds an operation of that.
    pub peer_ns: Option<f64>,
    /// Ours / the peer's.
    pub ratio: Option<f64>,
    /// What the ratio should be at most.
    pub target: Option<f64>,
}

/// The memory that an entry takes above its region.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MemoryRow {
    /// How the regions lie.
    pub figure: String,
    /// How many there were.
    pub regions: u64,
    /// Growth of the resident set, in bytes for each region.
    pub bytes_each: f64,
    /// What it should be at most.
    pub target: Option<f64>,
}

/// The document.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// 1.
    pub schema: u32,
    /// The figures.
    pub rows: Vec<Row>,
    /// Memory of cached regions.
    pub memory: Vec<MemoryRow>,
    /// What could not be measured, and why.
    pub skipped: Vec<Skipped>,
}

impl Default for Report {
    fn default() -> Self {
        Self { schema: SCHEMA, rows: Vec::new(), memory: Vec::new(), skipped: Vec::new() }
    }
}

/// Prints it for people.
///
/// # Errors
/// What the writer reported.
pub fn text(out: &mut dyn Write, report: &Report, style: Style) -> io::Result<()> {
    style.heading(out, "ns an operation, medians of rounds in turns")?;
    let mut table =
        style.table(&["figure", "regions", "threads", "ours", "peer", "its", "ratio", "goal"]);
    for row in &report.rows {
        let number = |value: Option<f64>, digits: usize| {
            style.number(value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}")))
        };
        let met = row.ratio.zip(row.target).is_none_or(|(ratio, target)| ratio <= target);
        let ratio = row.ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"));
        table.add_row(vec![
            style.cell(&row.figure, if met { Tone::Good } else { Tone::Bad }),
            style.number(row.regions),
            style.number(row.threads),
            number(Some(row.ours_ns), 1),
            style.cell(row.peer.as_deref().unwrap_or("-"), Tone::Dim),
            number(row.peer_ns, 1),
            style.number(if met { ratio } else { format!("{ratio} over") }),
            number(row.target, 2),
        ]);
    }
    style.print(out, &table)?;
    if !report.memory.is_empty() {
        writeln!(out)?;
        style.heading(out, "bytes a cached region, above the region itself")?;
        let mut table = style.table(&["regions", "how many", "bytes each", "goal"]);
        for row in &report.memory {
            let met = row.target.is_none_or(|target| row.bytes_each <= target);
            let each = format!("{:.0}", row.bytes_each);
            table.add_row(vec![
                style.cell(&row.figure, if met { Tone::Good } else { Tone::Bad }),
                style.number(row.regions),
                style.number(if met { each } else { format!("{each} over") }),
                style.number(
                    row.target.map_or_else(|| "-".to_owned(), |target| format!("{target:.0}")),
                ),
            ]);
        }
        style.print(out, &table)?;
    }
    for skipped in &report.skipped {
        writeln!(out, "\nnot measured: {}: {}", skipped.what, skipped.why)?;
    }
    Ok(())
}

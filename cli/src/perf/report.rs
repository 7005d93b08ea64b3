//! The report of a measurement. Each side prints one.

use std::{
    io::{self, Write},
    net::SocketAddr,
    ops::Range,
};

use serde::Serialize;

use super::{
    figures::{EndDescription, Latency, Order, Role, Row},
    metrics::Metrics,
    wire::Request,
};
use crate::{
    args::PerfOp,
    json::SCHEMA,
    table::{Style, exact_bytes},
};

/// The results of a measurement.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Report {
    /// The version of the JSON schema.
    pub schema: u32,
    /// The version of `hmem` that printed the document.
    pub version: &'static str,
    /// The side that printed the report.
    pub role: Role,
    /// The TCP address of the other side.
    pub peer: String,
    /// The measured operation.
    pub op: PerfOp,
    /// The seed of the pattern of the transferred bytes.
    pub seed: u64,
    /// The memory, NIC and path of this side.
    pub local: EndDescription,
    /// The memory, NIC and path of the other side.
    pub remote: EndDescription,
    /// The results, in the order of the sizes on the command line.
    pub results: Vec<Row>,
    /// The counts of this side's domains, one for each write ordering; null without `--metrics`.
    pub metrics: Option<Vec<Metrics>>,
}

impl Report {
    /// Returns a report without results.
    pub(super) fn new(
        role: Role,
        peer: SocketAddr,
        request: &Request,
        local: EndDescription,
        remote: EndDescription,
    ) -> Self {
        Self {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION"),
            role,
            peer: peer.to_string(),
            op: request.op,
            seed: request.seed,
            local,
            remote,
            results: Vec::new(),
            metrics: None,
        }
    }
}

/// The columns of the table with their widths. The widths are fixed, since each row is printed
/// before the next one is measured.
const COLUMNS: [(&str, usize); 10] = [
    ("Size", 8),
    ("GiB/s", 6),
    ("Transfers/s", 11),
    ("min", 6),
    ("50%", 6),
    ("90%", 6),
    ("99%", 6),
    ("99.9%", 6),
    ("max", 6),
    ("Verified", 8),
];

/// The columns of `COLUMNS` that contain latencies.
const LATENCY: Range<usize> = 3..9;

/// Prints a whole report as readable text instead of JSON.
pub(super) fn text(out: &mut dyn Write, report: &Report, style: Style) -> io::Result<()> {
    let bandwidth = report.results.iter().find_map(|row| row.bandwidth);
    heading(out, report, bandwidth.map(|bandwidth| bandwidth.depth), style)?;
    let mut before = None;
    for row in &report.results {
        self::row(out, row, before, style)?;
        before = Some(row.ordering);
    }
    writeln!(out)?;
    metrics(out, report, style)
}

/// Prints the counts of this side's domains, if the report has them.
pub(super) fn metrics(out: &mut dyn Write, report: &Report, style: Style) -> io::Result<()> {
    report.metrics.iter().flatten().try_for_each(|metrics| metrics.print(out, style))
}

/// Prints the descriptions of the two sides, and the header of the table if the table fits the
/// width. `depth` is that of the bandwidth measurement; `None` if bandwidth is not measured.
pub(super) fn heading(
    out: &mut dyn Write,
    report: &Report,
    depth: Option<u32>,
    style: Style,
) -> io::Result<()> {
    let (op, role) = match (report.op, report.role) {
        (PerfOp::Write, Role::Client) => ("RMA write to", "server"),
        (PerfOp::Write, Role::Server) => ("RMA write from", "client"),
        (PerfOp::Read, Role::Client) => ("RMA read from", "server"),
        (PerfOp::Read, Role::Server) => ("RMA read by", "client"),
        (PerfOp::Send, Role::Client) => ("Messages to", "server"),
        (PerfOp::Send, Role::Server) => ("Messages from", "client"),
        (PerfOp::Atomic, Role::Client) => ("64-bit fetch-add to", "server"),
        (PerfOp::Atomic, Role::Server) => ("64-bit fetch-add from", "client"),
    };
    let depth = depth.map_or_else(String::new, |depth| format!(", {depth} in flight (latency: 1)"));
    style.heading(out, &format!("{op} {role} {}{depth}", report.peer))?;
    style.item(out, "this side:", &report.local.summary())?;
    style.item(out, "other side:", &report.remote.summary())?;
    writeln!(out)?;
    let width = width_of(&COLUMNS) + 1;
    if width <= style.width {
        let before = " ".repeat(width_of(&COLUMNS[..LATENCY.start]) + 1);
        let within = width_of(&COLUMNS[LATENCY]);
        let group = format!("{before}{:>within$}", "latency in us (percentiles)");
        writeln!(out, "{}", style.bold(&group))?;
        let header = line(&COLUMNS.map(|(name, _)| name.to_owned()));
        writeln!(out, "{}\n{}", style.bold(&header), "\u{2500}".repeat(width))?;
    }
    Ok(())
}

/// Prints one row of the table, or a list item if the columns do not fit the width.
///
/// `before` is the write ordering of the row before; `None` for the first row. A title precedes the
/// rows with relaxed ordering. A line with the gain follows each such row if strict ordering was
/// measured too.
pub(super) fn row(
    out: &mut dyn Write,
    row: &Row,
    before: Option<Order>,
    style: Style,
) -> io::Result<()> {
    if row.ordering == Order::Relaxed && before != Some(Order::Relaxed) {
        style.indented(out, ["", "  "], "With relaxed ordering of PCI Express on both sides:")?;
    }
    figures(out, row, style)?;
    let Some(gain) = row.gain else { return Ok(()) };
    let percent = |what: &str, gain: Option<f64>| {
        gain.map(|gain| format!("{what}\u{a0}{:+.1}\u{a0}%", gain * 100.0))
    };
    let gains = [percent("bandwidth", gain.bandwidth), percent("median latency", gain.latency)];
    let gains: Vec<_> = gains.into_iter().flatten().collect();
    style.indented(out, ["    ", "      "], &format!("gain: {}", gains.join(", ")))
}

/// Prints the figures of a row.
fn figures(out: &mut dyn Write, row: &Row, style: Style) -> io::Result<()> {
    let verified = if row.verified { "yes" } else { "NO" };
    let mut cells = COLUMNS.map(|_| "-".to_owned());
    cells[0] = exact_bytes(row.bytes);
    if let Some(bandwidth) = row.bandwidth {
        cells[1] = significant(bandwidth.gib_per_s);
        cells[2] = format!("{:.0}", bandwidth.transfers_per_s);
    }
    if let Some(Latency { min_us, p50_us, p90_us, p99_us, p999_us, max_us, .. }) = row.latency {
        let times = [min_us, p50_us, p90_us, p99_us, p999_us, max_us];
        cells[LATENCY].clone_from_slice(&times.map(significant));
    }
    cells[9] = verified.to_owned();
    let text = line(&cells);
    if text.chars().count().max(width_of(&COLUMNS) + 1) <= style.width {
        return writeln!(out, "{text}");
    }
    let mut fields = vec![format!("{}: verified: {verified}", cells[0])];
    if row.bandwidth.is_some() {
        fields.push(format!("{} GiB/s", cells[1]));
        fields.push(format!("{} transfers/s", cells[2]));
    }
    if row.latency.is_some() {
        let names = ["min", "50%", "90%", "99%", "99.9%", "max"];
        let times = names.iter().zip(&cells[LATENCY]).map(|(name, us)| format!("{name}\u{a0}{us}"));
        fields.push(format!("latency in us: {}", times.collect::<Vec<_>>().join(", ")));
    }
    style.indented(out, ["  ", "    "], &fields.join("; "))
}

/// Returns a line of the table. The numbers, which are all cells but the last, are aligned to the
/// right.
fn line(cells: &[String; COLUMNS.len()]) -> String {
    let (last, numbers) = cells.split_last().expect("the table has columns");
    let numbers = numbers.iter().zip(COLUMNS).map(|(cell, (_, width))| format!(" {cell:>width$}"));
    format!(" {} {last}", numbers.collect::<String>())
}

/// Returns the width of some columns of the table, with a space before each.
fn width_of(columns: &[(&str, usize)]) -> usize {
    columns.iter().map(|(_, width)| width + 1).sum()
}

/// Formats a number with three significant digits. All digits of the integer part are printed, and
/// at most four decimals.
pub(super) fn significant(number: f64) -> String {
    match number {
        number if number >= 100.0 => format!("{number:.0}"),
        number if number >= 10.0 => format!("{number:.1}"),
        number if number >= 1.0 => format!("{number:.2}"),
        number if number >= 0.1 => format!("{number:.3}"),
        _ => format!("{number:.4}"),
    }
}

//! The report of a measurement, as both sides print it.

use std::{
    io::{self, Write},
    net::SocketAddr,
};

use comfy_table::{Cell, CellAlignment};
use serde::Serialize;

use super::{
    figures::{Row, Side},
    wire::Request,
};
use crate::{
    args::PerfOp,
    json::SCHEMA,
    table::{Style, Tone, bytes},
};

/// The side that printed the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The one that measured.
    Client,
    /// The one that was measured with.
    Server,
}

/// A measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The schema number.
    pub schema: u32,
    /// The command's version.
    pub version: &'static str,
    /// Which side this is.
    pub role: Role,
    /// The other side's TCP address.
    pub peer: String,
    /// What was measured.
    pub op: PerfOp,
    /// The seed of what was moved.
    pub seed: u64,
    /// This side.
    pub local: Side,
    /// The other side.
    pub remote: Side,
    /// The measurements, in the order asked for.
    pub results: Vec<Row>,
}

impl Report {
    pub(super) fn new(
        role: Role,
        peer: SocketAddr,
        request: &Request,
        local: Side,
        remote: Side,
        results: Vec<Row>,
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
            results,
        }
    }
}

/// Prints the report for a person.
///
/// # Errors
/// What the writer reported.
pub fn text(out: &mut dyn Write, report: &Report, style: Style) -> io::Result<()> {
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
    let depth =
        report.results.iter().find_map(|row| row.bandwidth).map(|bandwidth| bandwidth.depth);
    let depth =
        depth.map_or_else(String::new, |depth| format!(", {depth} outstanding (latency: 1)"));
    style.heading(out, &format!("{op} {role} {}{depth}", report.peer))?;
    style.item(out, "this side:", &report.local.summary())?;
    style.item(out, "other side:", &report.remote.summary())?;
    writeln!(out)?;
    let header = [
        "Size",
        "GiB/s",
        "Transfers/s",
        "min us",
        "50%",
        "90%",
        "99%",
        "99.9%",
        "max us",
        "Verified",
    ];
    let mut table = style.table(&header);
    for column in 0..header.len() - 1 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for row in &report.results {
        let mut cells = vec![style.number(bytes(row.bytes))];
        match row.bandwidth {
            Some(bandwidth) => {
                cells.push(style.number(significant(bandwidth.gib_per_s)));
                cells.push(style.number(format!("{:.0}", bandwidth.transfers_per_s)));
            }
            None => cells.extend((0..2).map(|_| style.cell("-", Tone::Dim))),
        }
        match row.latency {
            Some(us) => cells.extend(
                [us.min_us, us.p50_us, us.p90_us, us.p99_us, us.p999_us, us.max_us]
                    .map(|us| style.number(significant(us))),
            ),
            None => cells.extend((0..6).map(|_| style.cell("-", Tone::Dim))),
        }
        let (verified, tone) = if row.verified { ("yes", Tone::Good) } else { ("NO", Tone::Bad) };
        cells.push(style.cell(verified, tone));
        table.add_row::<Vec<Cell>>(cells);
    }
    style.print(out, &table)
}

/// Three significant digits or all of the integer part.
fn significant(number: f64) -> String {
    match number {
        number if number >= 100.0 => format!("{number:.0}"),
        number if number >= 10.0 => format!("{number:.1}"),
        number if number >= 1.0 => format!("{number:.2}"),
        number if number >= 0.1 => format!("{number:.3}"),
        _ => format!("{number:.4}"),
    }
}

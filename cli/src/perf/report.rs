//! What was measured, as both sides print it.

use std::{
    io::{self, Write},
    net::SocketAddr,
    time::Duration,
};

use comfy_table::{Cell, CellAlignment};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use super::wire::{Request, plain};
use crate::{
    args::PerfOp,
    json::{Attempt, SCHEMA},
    table::{Style, Tone, bytes},
};

/// Which side printed the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The one that measured.
    Client,
    /// The one that was measured with.
    Server,
}

/// The memory and the NIC of one side, and the way between them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Side {
    /// The iface of the memory.
    pub iface: String,
    /// The device; null for memory of none.
    pub device: Option<u32>,
    /// The provider.
    pub provider: String,
    /// The NIC within the provider.
    pub nic: String,
    /// The path from memory to NIC.
    pub path: String,
    /// Why that path.
    pub reason: String,
    /// The attempts of the path decision.
    pub trace: Vec<Attempt>,
}

impl Side {
    /// Without what a terminal would act on, for a side that is another's word.
    pub(super) fn plain(self) -> Self {
        let line = |text: Option<String>| text.as_deref().map(plain);
        Self {
            iface: plain(&self.iface),
            device: self.device,
            provider: plain(&self.provider),
            nic: plain(&self.nic),
            path: plain(&self.path),
            reason: plain(&self.reason),
            trace: self
                .trace
                .into_iter()
                .map(|attempt| Attempt {
                    path: plain(&attempt.path).into(),
                    call: plain(&attempt.call),
                    error: line(attempt.error),
                    cause: line(attempt.cause),
                    remedy: line(attempt.remedy),
                })
                .collect(),
        }
    }

    fn summary(&self) -> String {
        let memory = match self.device {
            Some(device) => format!("{}:{device}", self.iface),
            None => self.iface.clone(),
        };
        format!("{memory} on {}/{} over {} ({})", self.provider, self.nic, self.path, self.reason)
    }
}

/// What many transfers at once came to.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bandwidth {
    /// Transfers outstanding.
    pub depth: u32,
    /// Transfers.
    pub transfers: u64,
    /// Seconds from the first post to the last completion.
    pub seconds: f64,
    /// GiB (2^30 bytes) per second.
    pub gib_per_s: f64,
    /// Transfers per second.
    pub transfers_per_s: f64,
}

impl Bandwidth {
    pub(super) fn new(depth: u32, transfers: u64, size: u64, took: Duration) -> Self {
        let seconds = took.as_secs_f64().max(1e-9);
        let transfers_per_s = transfers as f64 / seconds;
        let gib_per_s = transfers_per_s * size as f64 / (1u64 << 30) as f64;
        Self { depth, transfers, seconds, gib_per_s, transfers_per_s }
    }
}

/// How long single transfers took from post to completion, in microseconds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Latency {
    /// Transfers.
    pub transfers: u64,
    /// The quickest.
    pub min_us: f64,
    /// Half took no longer.
    pub p50_us: f64,
    /// 90% took no longer.
    pub p90_us: f64,
    /// 99% took no longer.
    pub p99_us: f64,
    /// 99.9% took no longer.
    pub p999_us: f64,
    /// The slowest.
    pub max_us: f64,
}

impl Latency {
    pub(super) fn new(ns: &Histogram<u64>) -> Self {
        let us = |ns: u64| ns as f64 / 1e3;
        let quantile = |quantile| us(ns.value_at_quantile(quantile));
        Self {
            transfers: ns.len(),
            min_us: us(ns.min()),
            p50_us: quantile(0.5),
            p90_us: quantile(0.9),
            p99_us: quantile(0.99),
            p999_us: quantile(0.999),
            max_us: us(ns.max()),
        }
    }
}

/// The measurements of one size.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Bytes of a transfer.
    pub bytes: u64,
    /// Whether every byte was right after each run of transfers. There is no report otherwise.
    pub verified: bool,
    /// With many transfers outstanding; null if not asked for.
    pub bandwidth: Option<Bandwidth>,
    /// With one; null if not asked for.
    pub latency: Option<Latency>,
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

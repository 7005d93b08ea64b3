//! What came of a check: rows, what was skipped, and whether all is well.

use std::io::{self, Write};

use comfy_table::{Cell, CellAlignment};
use serde::Serialize;

use super::StaleRow;
use crate::{
    json::{Attempt, SCHEMA, Skipped},
    table::{Style, Tone, bytes, some},
};

/// What came of a fetch-add.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Atomic {
    /// Not tried.
    #[default]
    NotTested,
    /// Old and new value were right.
    Verified,
    /// Refused as not supported, as it must be on staged paths.
    Refused,
}

/// One combination of memory, NIC and path.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The iface.
    pub iface: String,
    /// The device; null for memory of none.
    pub device: Option<u32>,
    /// The sort of memory.
    pub memory: &'static str,
    /// The provider.
    pub provider: String,
    /// The NIC.
    pub nic: String,
    /// The path that was checked.
    pub path: &'static str,
    /// Bytes of the largest transfer.
    pub bytes: u64,
    /// Bytes of each transfer that was verified.
    pub sizes: Vec<u64>,
    /// Whether all of it worked and nothing was left behind.
    pub verified: bool,
    /// RMA writes of the last verified size, in GiB/s; null unless verified.
    pub gib_per_s: Option<f64>,
    /// What came of a fetch-add.
    pub atomic: Atomic,
    /// What went wrong.
    pub error: Option<String>,
    /// The attempts of the path decision.
    pub trace: Vec<Attempt>,
}

/// The whole check.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The schema number.
    pub schema: u32,
    /// What was checked.
    pub rows: Vec<Row>,
    /// What came of the registration cache's monitors.
    pub stale: Vec<StaleRow>,
    /// What was not, and why.
    pub skipped: Vec<Skipped>,
}

impl Report {
    pub(super) fn new(skipped: Vec<Skipped>) -> Self {
        Self { schema: SCHEMA, rows: Vec::new(), stale: Vec::new(), skipped }
    }

    /// Whether something was checked and all of it works: what was skipped is no success.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.outcomes().next().is_some() && self.outcomes().all(|verified| verified)
    }

    /// Whether each row is verified.
    fn outcomes(&self) -> impl Iterator<Item = bool> {
        self.rows.iter().map(|row| row.verified).chain(self.stale.iter().map(|row| row.verified))
    }

    /// One line that says how it went.
    #[must_use]
    pub fn summary(&self) -> String {
        let (rows, skipped) = (self.outcomes().count(), self.skipped.len());
        let failed = self.outcomes().filter(|verified| !verified).count();
        match (rows, failed) {
            (0, _) => format!("nothing was checked: {skipped} skipped"),
            (_, 0) => format!("all {rows} combinations verified, {skipped} skipped"),
            _ => format!("{failed} of {rows} combinations FAILED, {skipped} skipped"),
        }
    }
}

/// Prints the report for a person.
///
/// # Errors
/// What the writer reported.
pub fn text(out: &mut dyn Write, report: &Report, style: Style) -> io::Result<()> {
    let mut nics: Vec<_> = report.rows.iter().map(Row::full_nic).collect();
    nics.dedup();
    for nic in nics {
        style.heading(out, &nic)?;
        rows(out, report.rows.iter().filter(|row| row.full_nic() == nic), style)?;
    }
    if !report.stale.is_empty() {
        style.heading(out, "Stale registrations")?;
        stale(out, &report.stale, style)?;
    }
    let failed = report.rows.iter().filter(|row| !row.verified).map(|row| {
        let what =
            format!("{} {} to {} over {}", row.place(), row.memory, row.full_nic(), row.path);
        (row.error.as_deref().unwrap_or("unknown"), what)
    });
    let caught = report.stale.iter().filter(|row| !row.verified).map(|row| {
        let what = format!("stale registrations of {} under {}", row.iface, row.monitor);
        (row.error.as_deref().unwrap_or("unknown"), what)
    });
    reasons(out, "Failed", failed.chain(caught), style)?;
    let skipped = report.skipped.iter().map(|skipped| (skipped.why.as_str(), skipped.what.clone()));
    reasons(out, "Skipped", skipped, style)?;
    let tone = if report.passed() { Tone::Good } else { Tone::Bad };
    writeln!(out, "{}", style.word(&report.summary(), tone))
}

/// Each reason once, with what it holds for.
fn reasons<'a>(
    out: &mut dyn Write,
    heading: &str,
    all: impl Iterator<Item = (&'a str, String)>,
    style: Style,
) -> io::Result<()> {
    let mut reasons: Vec<(&str, Vec<String>)> = Vec::new();
    for (reason, what) in all {
        match reasons.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, whats)) => whats.push(what),
            None => reasons.push((reason, vec![what])),
        }
    }
    if reasons.is_empty() {
        return Ok(());
    }
    style.heading(out, heading)?;
    for (reason, whats) in reasons {
        style.item(out, &format!("{}:", some(&whats)), reason)?;
    }
    writeln!(out)
}

impl Row {
    fn place(&self) -> String {
        match self.device {
            Some(device) => format!("{}:{device}", self.iface),
            None => self.iface.clone(),
        }
    }

    fn full_nic(&self) -> String {
        format!("{}/{}", self.provider, self.nic)
    }
}

fn rows<'a>(
    out: &mut dyn Write,
    rows: impl Iterator<Item = &'a Row>,
    style: Style,
) -> io::Result<()> {
    let mut table =
        style.table(&["Memory", "Kind", "Path", "Up to", "Verified", "Atomics", "GiB/s"]);
    for column in [3, 6] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for row in rows {
        let atomic = match row.atomic {
            Atomic::NotTested => style.cell("-", Tone::Dim),
            Atomic::Verified => style.cell("yes", Tone::Good),
            Atomic::Refused => style.cell("refused", Tone::Dim),
        };
        table.add_row([
            Cell::new(row.place()),
            Cell::new(row.memory),
            Cell::new(row.path),
            style.number(bytes(row.bytes)),
            if row.verified {
                style.cell("yes", Tone::Good)
            } else {
                style.cell("FAILED", Tone::Bad)
            },
            atomic,
            style.number(row.gib_per_s.map_or_else(|| "-".into(), |speed| format!("{speed:.2}"))),
        ]);
    }
    style.print(out, &table)
}

fn stale(out: &mut dyn Write, rows: &[StaleRow], style: Style) -> io::Result<()> {
    let mut table = style
        .table(&["Memory", "Monitor", "Path", "Rounds", "Reused", "Hits", "Stale", "Verified"]);
    for column in 3..7 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for row in rows {
        let count = |count: u64| style.number(count.to_string());
        table.add_row([
            Cell::new(&row.iface),
            Cell::new(&row.monitor),
            Cell::new(row.path),
            count(row.rounds),
            count(row.reused),
            count(row.hits),
            count(row.stale),
            if row.verified {
                style.cell("yes", Tone::Good)
            } else {
                style.cell("FAILED", Tone::Bad)
            },
        ]);
    }
    style.print(out, &table)
}

//! The report of a check: results, skipped subjects, and the verdict.

use std::io::{self, Write};

use hmem::Path;
use serde::Serialize;

use super::StaleRow;
use crate::{
    json::{Attempt, Skipped, memory_name},
    table::{Cell, Style, Table, Tone, abbreviated, exact_bytes, grouped},
};

/// The result of a fetch-add on the checked memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Atomic {
    /// The fetch-add was not tried.
    #[default]
    NotTested,
    /// The word had the correct value before and after the fetch-add.
    Verified,
    /// The NIC refused the fetch-add as not supported. Staged paths must refuse it.
    Refused,
}

/// The result of one combination of memory, NIC and path.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Row {
    /// The iface of the memory.
    pub iface: String,
    /// The device that holds the memory; null for host memory.
    pub device: Option<u32>,
    /// The sort of memory, such as `heap` or `mmap`.
    pub memory: &'static str,
    /// The name of the NIC's provider.
    pub provider: String,
    /// The name of the NIC in its provider.
    pub nic: String,
    /// The path that was checked.
    pub path: &'static str,
    /// Size of the largest verified transfer, in bytes; 0 if no transfer was verified.
    pub bytes: u64,
    /// Size of each verified transfer, in bytes.
    pub sizes: Vec<u64>,
    /// True if all transfers were verified and nothing leaked.
    pub verified: bool,
    /// Throughput of RMA writes of the last verified size, in GiB/s; null if the combination is not
    /// verified.
    pub gib_per_s: Option<f64>,
    /// The result of a fetch-add on the checked memory.
    pub atomic: Atomic,
    /// The failure; null if the combination is verified.
    pub error: Option<String>,
    /// The paths that the path decision tried, in the order of the attempts.
    pub trace: Vec<Attempt>,
}

/// The results of a check.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Report {
    /// The version of the JSON schema.
    pub schema: u32,
    /// The results of all checked combinations.
    pub rows: Vec<Row>,
    /// The results of all checked cache monitors.
    pub stale: Vec<StaleRow>,
    /// The devices, NICs, monitors and combinations that were not checked, with reasons.
    pub skipped: Vec<Skipped>,
    /// The ifaces that `FI_HMEM` names and that are unavailable, with reasons.
    pub missing: Vec<Skipped>,
    /// The NICs that cannot be opened, the ifaces whose devices cannot be listed, and the ifaces
    /// that `FI_HMEM` names and of whose devices no memory was verified, with reasons.
    pub failures: Vec<Skipped>,
    /// The setting of the environment that disables caches or the monitor of host memory; `None` if
    /// both are on.
    #[serde(skip)]
    pub uncached_by: Option<&'static str>,
}

impl Report {
    /// Returns whether the machine passed the check. All of this must be true:
    ///
    /// - At least one combination or monitor was checked, and all of them were verified.
    /// - All ifaces that `FI_HMEM` names are available.
    /// - [`Self::failures`] is empty.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.missing.is_empty()
            && self.failures.is_empty()
            && self.outcomes().next().is_some()
            && self.outcomes().all(|verified| verified)
    }

    /// Returns whether memory of a device of the iface was verified. Device memory that a NIC
    /// reaches as host pages, such as managed memory, does not count.
    pub(super) fn has_verified(&self, iface: &str) -> bool {
        let host = Path::PlainHost.name();
        let mut rows = self.rows.iter().filter(|row| row.iface == iface && row.path != host);
        rows.any(|row| row.verified && row.device.is_some())
    }

    /// Returns the field `verified` of each row: first of the combinations, then of the monitors.
    fn outcomes(&self) -> impl Iterator<Item = bool> {
        self.rows.iter().map(|row| row.verified).chain(self.stale.iter().map(|row| row.verified))
    }

    /// Returns the verdict on one line.
    fn summary(&self) -> String {
        let (rows, skipped) = (self.outcomes().count(), self.skipped.len());
        let failed = self.outcomes().filter(|verified| !verified).count();
        let summary = match (rows, failed) {
            (0, _) => format!("nothing was checked: {skipped} skipped"),
            (_, 0) => format!("all {rows} combinations verified, {skipped} skipped"),
            _ => format!("{failed} of {rows} combinations FAILED, {skipped} skipped"),
        };
        let names = |entries: &[Skipped]| {
            let names: Vec<_> = entries.iter().map(|entry| entry.what.clone()).collect();
            names.join(", ")
        };
        let missing = match names(&self.missing) {
            names if names.is_empty() => names,
            names => format!("; FAILED: FI_HMEM names {names}, which is unavailable"),
        };
        let failures = match names(&self.failures) {
            names if names.is_empty() => names,
            names => format!("; FAILED: {names}"),
        };
        format!("{summary}{missing}{failures}")
    }
}

/// Prints the report as readable text instead of JSON.
///
/// # Errors
/// Fails if writing to `out` fails.
pub fn text(out: &mut dyn Write, report: &Report, style: Style) -> io::Result<()> {
    let mut nics: Vec<_> = report.rows.iter().map(Row::full_nic).collect();
    nics.dedup();
    for nic in nics {
        style.heading(out, &nic)?;
        rows(out, report.rows.iter().filter(|row| row.full_nic() == nic), style)?;
    }
    legend(out, &report.rows, style)?;
    if !report.stale.is_empty() {
        style.heading(out, "Stale registrations")?;
        stale(out, report, style)?;
    }
    let failed = report.rows.iter().filter(|row| !row.verified).map(|row| {
        let what = format!("{} to {} over {}", row.memory_name(), row.full_nic(), row.path);
        (row.error.as_deref().unwrap_or("unknown"), what)
    });
    let caught = report.stale.iter().filter(|row| !row.verified).map(|row| {
        let what = format!("stale registrations of {} under {}", row.iface, row.monitor);
        (row.error.as_deref().unwrap_or("unknown"), what)
    });
    let groups = grouped(failed.chain(caught));
    if !groups.is_empty() || !report.failures.is_empty() {
        style.heading(out, "Failed")?;
        for (error, subjects) in groups {
            style.item(out, &format!("{}:", abbreviated(&subjects)), error)?;
        }
        for failure in &report.failures {
            failure.problem.item(out, &format!("{}:", failure.what), style)?;
        }
        writeln!(out)?;
    }
    if !report.missing.is_empty() {
        style.heading(out, "Missing (named by FI_HMEM)")?;
        for missing in &report.missing {
            missing.problem.item(out, &format!("{}:", missing.what), style)?;
        }
        writeln!(out)?;
    }
    // Missing ifaces are not printed a second time.
    let missing: Vec<_> =
        report.missing.iter().map(|missing| format!("iface {}", missing.what)).collect();
    skipped(out, report.skipped.iter().filter(|entry| !missing.contains(&entry.what)), style)?;
    let tone = if report.passed() { Tone::Good } else { Tone::Bad };
    style.indented(out, ["", "  "], &style.word(&report.summary(), tone))
}

/// Prints the skipped entries, grouped by cause.
fn skipped<'a>(
    out: &mut dyn Write,
    skipped: impl Iterator<Item = &'a Skipped>,
    style: Style,
) -> io::Result<()> {
    let mut skipped = skipped.peekable();
    if skipped.peek().is_none() {
        return Ok(());
    }
    style.heading(out, "Skipped")?;
    // Each skipped provider is a group of its own and so is printed with its own remedy.
    let by_cause = skipped.map(|skipped| {
        let provider = skipped.what.strip_prefix("provider ");
        ((provider, skipped.problem.group.as_str()), skipped)
    });
    for ((_, cause), members) in grouped(by_cause) {
        if let [only] = members.as_slice() {
            only.problem.item(out, &format!("{}:", only.what), style)?;
            continue;
        }
        let names: Vec<_> = members.iter().map(|skipped| skipped.what.clone()).collect();
        style.item(out, &format!("{cause} ({} skipped):", names.len()), &abbreviated(&names))?;
        let remedies = members.iter().map(|skipped| (skipped.problem.remedy.as_deref(), ()));
        match grouped(remedies).as_slice() {
            [(None, _)] => {}
            [(Some(remedy), _)] => style.detail(out, "remedy:", remedy)?,
            _ => style.detail(out, "remedies:", "run `hmem info`, or `hmem check --json`")?,
        }
    }
    writeln!(out)
}

impl Row {
    /// Returns the name and the sort of the memory, such as `cuda:0 device`.
    fn memory_name(&self) -> String {
        format!("{} {}", memory_name(&self.iface, self.device), self.memory)
    }

    fn full_nic(&self) -> String {
        format!("{}/{}", self.provider, self.nic)
    }
}

fn verdict(verified: bool) -> Cell {
    if verified { Cell::in_tone("yes", Tone::Good) } else { Cell::in_tone("FAILED", Tone::Bad) }
}

fn rows<'a>(
    out: &mut dyn Write,
    rows: impl Iterator<Item = &'a Row>,
    style: Style,
) -> io::Result<()> {
    let header = ["Memory", "Path", "Up to", "Verified", "Atomics", "GiB/s"];
    let mut table = Table::new(&header).numbers([2, 5]);
    for row in rows {
        table.row([
            Cell::new(row.memory_name()),
            Cell::new(row.path),
            Cell::new(exact_bytes(row.bytes)),
            verdict(row.verified),
            match row.atomic {
                Atomic::NotTested => Cell::none(),
                Atomic::Verified => Cell::in_tone("yes", Tone::Good),
                Atomic::Refused => Cell::in_tone("refused", Tone::Dim),
            },
            row.gib_per_s.map_or_else(Cell::none, |speed| Cell::new(format!("{speed:.2}"))),
        ]);
    }
    style.print(out, &table)
}

/// Prints the meanings of the words `refused` and `borrowed` if the table of `rows` has them.
fn legend(out: &mut dyn Write, rows: &[Row], style: Style) -> io::Result<()> {
    let refused = rows.iter().any(|row| row.atomic == Atomic::Refused);
    let borrowed = rows.iter().any(|row| row.memory == "borrowed");
    if refused {
        let text = "this path or NIC has no atomics, which is no failure; staged copies have none";
        style.item(out, "atomics refused:", text)?;
    }
    if borrowed {
        let text = "pages that are registered by their address and that the region does not own";
        style.item(out, "borrowed:", text)?;
    }
    if refused || borrowed { writeln!(out) } else { Ok(()) }
}

fn stale(out: &mut dyn Write, report: &Report, style: Style) -> io::Result<()> {
    let header = ["Memory", "Monitor", "Path", "Rounds", "Reused", "Hits", "Stale", "Verified"];
    let mut table = Table::new(&header).numbers(3..7);
    for row in &report.stale {
        table.row([
            Cell::new(&row.iface),
            Cell::new(&row.monitor),
            Cell::new(row.path),
            Cell::new(row.rounds),
            Cell::new(row.reused),
            Cell::new(row.hits),
            Cell::new(row.stale),
            verdict(row.verified),
        ]);
    }
    style.print(out, &table)?;
    let counts = "no stale transfer, a reused address and a cache hit; fewer hits or reuses than \
                  rounds are normal";
    style.item(out, "verified:", counts)?;
    if let Some(setting) = report.uncached_by {
        let text =
            format!("{setting} does not apply: each row has a cache and a monitor of its own");
        style.item(out, "caches:", &text)?;
    }
    writeln!(out)
}

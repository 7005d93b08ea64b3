//! `hmem check`: registers memory of every kind with every NIC, moves bytes, and compares them.
//!
//! `plan` lists the combinations, `run` checks one of them, `stale` checks the registration cache
//! under each monitor, and `report` has the results.

mod link;
mod memory;
pub(crate) mod pattern;
mod place;
mod plan;
mod report;
mod residue;
mod run;
mod stale;
mod target;

use hmem::{Error, ErrorKind, Path, Result, system::monitor::HostMonitorKind};

pub(crate) use self::memory::heap;
use self::{
    memory::MemorySort,
    plan::{Case, Plan, plan},
};
pub use self::{
    report::{Atomic, Report, Row, text},
    stale::{StaleRow, check_deaf_monitor},
};
use crate::{
    Failure,
    args::CheckArgs,
    json::{SCHEMA, Skipped},
    machine::Machine,
    problem::Problem,
};

/// The length of one transfer and its position in a larger region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes of the unregistered part of the allocation before the region. The part after
    /// the region has the same length. Only borrowed host memory and memory of device ifaces have
    /// such parts. Other memory is registered whole.
    pub margin: u64,
    /// Offset of the transfer from the start of the region, in bytes.
    pub offset: u64,
    /// Length of the transfer, in bytes.
    pub len: u64,
}

/// The combinations of memory, NIC and path to check, and the transfers of each.
#[derive(Clone, Debug)]
pub struct Selection {
    /// The only iface to check; `None` for all ifaces.
    pub iface: Option<String>,
    /// The only provider or NIC to check; `None` for all NICs.
    pub provider: Option<String>,
    /// The only path to check; `None` for all paths.
    pub path: Option<Path>,
    /// The transfers of each combination. The throughput is measured with the last two entries.
    pub extents: Vec<Extent>,
    /// Minimum duration of the throughput measurement with the last size, in nanoseconds. The
    /// measurement with the second-to-last size takes at least an eighth of this duration. Each
    /// measurement has at least one transfer.
    pub measure_ns: u64,
    /// Number of times that memory is freed and allocated again under each cache monitor. With 0,
    /// monitors are not checked.
    pub stale_rounds: u64,
}

const SMALL: [Extent; 5] = [
    Extent { margin: 0, offset: 0, len: 1 },
    Extent { margin: 10_000, offset: 8, len: 64 },
    Extent { margin: 0, offset: 0, len: 4096 },
    Extent { margin: 65_536, offset: 5, len: 4099 },
    Extent { margin: 0, offset: 4095, len: 65_537 },
];
const LARGE: Extent = Extent { margin: 0, offset: 0, len: 8 << 20 };

impl Default for Selection {
    /// Selects every combination, with small, unaligned and large transfers.
    fn default() -> Self {
        let extents = SMALL.into_iter().chain([LARGE]).collect();
        Self {
            iface: None,
            provider: None,
            path: None,
            extents,
            measure_ns: 20_000_000,
            stale_rounds: 10_000,
        }
    }
}

impl Selection {
    /// Returns the selection that the command line asks for.
    ///
    /// # Errors
    /// [`Failure::Usage`] for an unknown iface, provider or NIC. [`Failure::Failed`] if the
    /// requested size needs more memory than is available.
    pub fn new(args: &CheckArgs, machine: &Machine) -> Result<Self, Failure> {
        machine.check_names(args.iface.as_deref(), args.provider.as_deref())?;
        let mut selection = Self {
            iface: args.iface.clone(),
            provider: args.provider.clone(),
            path: args.path,
            ..Self::default()
        };
        if let Some(len) = args.bytes {
            enough_memory_for(len)?;
            selection.extents = vec![Extent { margin: 0, offset: 0, len }];
        }
        if args.quick {
            selection.extents.pop();
            selection.measure_ns = 0;
            selection.stale_rounds = 500;
        }
        Ok(selection)
    }
}

/// Number of transfer-sized buffers that the check of one combination holds at the same time.
const COPIES: u64 = 6;

/// Returns an error if transfers of `bytes` need more than the available memory. If `/proc/meminfo`
/// cannot be read, all sizes are allowed.
fn enough_memory_for(bytes: u64) -> Result<()> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    match kib.map(|kib| kib.saturating_mul(1024)) {
        Some(available) if bytes > available / COPIES => {
            Err(Error::new(ErrorKind::OutOfResources, "check --bytes")
                .context("bytes", bytes)
                .context("available", available)
                .context("needed", bytes.saturating_mul(COPIES))
                .remedy("ask for fewer bytes"))
        }
        _ => Ok(()),
    }
}

/// Checks the selected combinations. Before each one the function calls `progress` with the number
/// of completed combinations, the total, and the name of the next combination. It calls `progress`
/// once more at the end, with an empty name.
///
/// # Errors
/// The errors of [`Hmem::cache_defaults`](hmem::Hmem::cache_defaults), and an error if the
/// environment names a monitor of host memory that does not work here.
pub fn check(
    machine: &Machine,
    selection: &Selection,
    mut progress: impl FnMut(usize, usize, &str),
) -> Result<Report> {
    let defaults = machine.hmem.cache_defaults()?;
    if defaults.monitor() != HostMonitorKind::Auto {
        machine.hmem.cache_monitor()?;
    }
    let Plan { cases, mut skipped, failures, required } = plan(machine, selection);
    let stale = match selection.stale_rounds {
        0 => Vec::new(),
        _ => stale::plan(machine, selection, &mut skipped),
    };
    let all = cases.len() + stale.len();
    let missing = machine.hmem.missing_ifaces();
    let missing = missing.map(|(kind, why)| Skipped::new(machine.iface_name(kind), why));
    let mut report = Report {
        schema: SCHEMA,
        rows: Vec::new(),
        stale: Vec::new(),
        skipped,
        missing: missing.collect(),
        failures,
        uncached_by: defaults.off_by(),
    };
    for (done, case) in cases.iter().enumerate() {
        progress(done, all, &case.to_string());
        run::case(machine, case, selection, &mut report);
    }
    for (done, case) in stale.iter().enumerate() {
        progress(cases.len() + done, all, &case.title());
        match case.run(selection.stale_rounds) {
            Ok(row) => report.stale.push(row),
            Err(skipped) => report.skipped.push(skipped),
        }
    }
    progress(all, all, "");
    let unverified: Vec<_> = required.iter().filter(|name| !report.has_verified(name)).collect();
    report.failures.extend(unverified.into_iter().map(|name| {
        let why = "FI_HMEM names the iface, but no memory of its devices was verified with the \
                   selected NICs";
        let remedy = "find the refused combinations in the list of the skipped ones, or run \
                      `hmem explain`";
        Skipped::new(format!("iface {name}"), Problem::new(why).remedy(remedy))
    }));
    report.skipped.sort();
    report.skipped.dedup();
    Ok(report)
}

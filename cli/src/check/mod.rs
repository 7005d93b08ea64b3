//! `hmem check`: registers memory of every kind with every NIC, moves bytes, and compares them.
//!
//! `plan` lists what there is to check, `run` checks one combination, `stale` tortures the
//! registration cache, `report` says what came of it.

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

use hmem::{Error, ErrorKind, Path, Result};

pub(crate) use self::memory::heap;
pub use self::{
    memory::Memory,
    plan::{Case, Plan, Way, plan},
    report::{Atomic, Report, Row, text},
    stale::StaleRow,
};
use crate::{args::CheckArgs, json::Skipped, machine::Machine};

/// One transfer: so many bytes, so far into a region that is larger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes of the allocation before the region, and as many behind it; 0 registers all of the
    /// allocation. Buffers that are no allocation of an iface are registered whole.
    pub margin: u64,
    /// Bytes from the start of the region.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// Combinations and transfers to check.
#[derive(Clone, Debug)]
pub struct Selection {
    /// Only this iface.
    pub iface: Option<String>,
    /// Only this provider or NIC.
    pub provider: Option<String>,
    /// Only this path.
    pub path: Option<Path>,
    /// The transfers, the last of which tells the throughput.
    pub extents: Vec<Extent>,
    /// Nanoseconds to spend on throughput for each combination; one transfer is always measured.
    pub measure_ns: u64,
    /// How often each cache monitor sees memory go and come back; 0 leaves that out.
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
    /// Everything, with small transfers, unaligned ones, and a large one.
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
    /// [`ErrorKind::InvalidArgument`] for an iface or provider that this machine does not know,
    /// naming those that it does; [`ErrorKind::OutOfResources`] for more bytes than its memory
    /// allows.
    pub fn new(args: &CheckArgs, machine: &Machine) -> Result<Self> {
        if let Some(name) = args.iface.as_deref().filter(|name| !machine.knows_iface(name)) {
            return Err(unknown("check --iface", name, &machine.iface_names()));
        }
        let providers = machine.provider_names();
        if let Some(name) = args.provider.as_ref().filter(|name| !providers.contains(name)) {
            return Err(unknown("check --provider", name, &providers));
        }
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

/// Copies of the bytes that one combination keeps, all together.
const COPIES: u64 = 6;

/// Refuses what would drive the machine out of memory. Where the system does not say what it has,
/// all is allowed.
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

pub(crate) fn unknown(option: &'static str, name: &str, known: &[String]) -> Error {
    Error::new(ErrorKind::InvalidArgument, option)
        .context("name", name)
        .remedy(format!("known here: {}", known.join(", ")))
}

/// Checks everything selected; `progress` is told before each combination how many are done, of how
/// many, and which is next.
#[must_use]
pub fn check(
    machine: &Machine,
    selection: &Selection,
    mut progress: impl FnMut(usize, usize, &str),
) -> Report {
    let Plan { cases, mut skipped } = plan(machine, selection);
    let stale = match selection.stale_rounds {
        0 => Vec::new(),
        _ => stale::plan(machine, selection, &mut skipped),
    };
    let all = cases.len() + stale.len();
    let mut report = Report::new(skipped);
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
    report.skipped.sort();
    report.skipped.dedup();
    report
}

/// Something that was not checked.
fn skip(what: impl Into<String>, why: impl ToString) -> Skipped {
    Skipped { what: what.into(), why: why.to_string() }
}

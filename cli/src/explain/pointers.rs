//! `hmem explain --pointer`: registers wrong pointers, which must be refused, and a correct one.
//! Each registration names an iface.

#![allow(unsafe_code, reason = "protects a page, and registers pointers that must be refused")]

use std::{
    io::{self, Write},
    sync::Arc,
};

use hmem::{
    Access, Address, AddressRange, DeviceBuffer, Domain, Error, ErrorKind, Iface, IfaceKind,
    MrMode, Path, Promise, Raw, Request, Result, p2p::path::ExplainRequest, path::Decision,
};
use serde::Serialize;

use super::{Pair, unit_text};
use crate::{
    args::{ExplainArgs, PointerSort},
    json::{Skipped, memory_name},
    machine::{Machine, allocate},
    table::{Style, Tone},
};

/// The outcome of the registration of one pointer.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PointerEntry {
    /// The iface that the registration names.
    pub iface: String,
    /// The number of the device in its iface; null for host memory.
    pub device: Option<u32>,
    /// The name of the NIC's provider.
    pub provider: String,
    /// The name of the NIC in its provider.
    pub nic: String,
    /// The sort of pointer, such as `past-end`.
    pub sort: String,
    /// The iface that owns the memory of a `foreign` pointer; null for other sorts.
    pub owner: Option<String>,
    /// The outcome: `registered`, `refused`, or `allowed` for a range without pages that this NIC
    /// may register.
    pub outcome: &'static str,
    /// True if the outcome is correct for the sort of pointer.
    pub correct: bool,
    /// The chosen path; null if the registration was refused.
    pub path: Option<&'static str>,
    /// The memory that was exported as a dma-buf, such as `allocation`; null for other paths.
    pub unit: Option<&'static str>,
    /// The reason for the path, or for the refusal.
    pub reason: String,
    /// The error of the refusal, on one line; null if the memory was registered.
    pub error: Option<String>,
    /// The cause of the refusal; null if the memory was registered.
    pub cause: Option<String>,
    /// The change that makes the registration succeed; null if unknown or not needed.
    pub remedy: Option<String>,
}

/// An address range to register as memory of an iface.
struct Claim {
    range: AddressRange,
    /// The iface that owns the memory of a `foreign` pointer; `None` for other sorts.
    owner: Option<String>,
    /// The memory that must stay allocated while the range is registered; `None` if the range has
    /// no memory.
    _memory: Option<DeviceBuffer>,
}

/// Registers every selected sort of pointer with the NIC of a pair. Adds to `skipped` the pointers
/// that could not be prepared, with their errors.
///
/// # Errors
/// The error of opening or closing the domain, or of closing a region.
pub(super) fn claim_all(
    machine: &Machine,
    pair: &Pair<'_>,
    args: &ExplainArgs,
    skipped: &mut Vec<Skipped>,
) -> Result<Vec<PointerEntry>> {
    let domain = pair.nic.open(&machine.hmem, args.policy)?;
    let size = args.size.unwrap_or_else(|| ExplainRequest::new(pair.iface.kind()).size);
    let mut entries = Vec::new();
    for sort in PointerSort::selected(&args.pointer) {
        for claim in claims(machine, pair, sort, size) {
            match claim {
                Ok(claim) => {
                    let outcome = register(&domain, pair.iface.kind(), claim.range)?;
                    entries.push(entry(machine, pair, sort, &claim, &domain, outcome));
                }
                Err(error) => {
                    let what = format!("{}, pointer {}", pair.name(machine), sort.name());
                    skipped.push(Skipped::new(what, &error));
                }
            }
        }
    }
    domain.close()?;
    Ok(entries)
}

/// Returns the ranges to register for a sort: a range of each other iface for `Foreign`, and a
/// single range for every other sort. If no other iface allocates memory, returns an error for
/// `Foreign`.
fn claims(machine: &Machine, pair: &Pair<'_>, sort: PointerSort, size: u64) -> Vec<Result<Claim>> {
    let claim = |range, memory| Claim { range, owner: None, _memory: memory };
    match sort {
        PointerSort::Interior => {
            let memory = allocate(pair.iface, pair.device, size.saturating_mul(2));
            vec![memory.and_then(|memory| {
                let range = memory.allocation().range;
                let (half, rest) = (range.len() / 2, range.len() - range.len() / 2);
                let middle = Address(range.start().0 + half);
                Ok(claim(AddressRange::new(middle, rest)?, Some(memory)))
            })]
        }
        PointerSort::PastEnd => {
            vec![past_end(pair, size).map(|(range, memory)| claim(range, Some(memory)))]
        }
        // The memory is freed at the end of the closure.
        PointerSort::Freed => vec![
            allocate(pair.iface, pair.device, size)
                .map(|memory| claim(memory.allocation().range, None)),
        ],
        PointerSort::Null => {
            vec![AddressRange::new(Address(0), size).map(|range| claim(range, None))]
        }
        PointerSort::Foreign => {
            let others = machine.hmem.registry().iter();
            let others = others.filter(|other| other.kind() != pair.iface.kind());
            let others = others.filter(|other| other.allocator().is_some());
            let claims: Vec<_> = others.map(|other| foreign(other, size)).collect();
            if claims.is_empty() {
                let none = Error::new(ErrorKind::Unsupported, "allocate")
                    .context("why", "no other iface allocates memory");
                return vec![Err(none)];
            }
            claims
        }
        PointerSort::All => Vec::new(),
    }
}

/// Returns a range that begins directly after an allocation, and the buffer of that allocation.
fn past_end(pair: &Pair<'_>, size: u64) -> Result<(AddressRange, DeviceBuffer)> {
    if pair.iface.kind() == IfaceKind::SYSTEM {
        return guarded(pair, size);
    }
    let memory = allocate(pair.iface, pair.device, size)?;
    let range = memory.allocation().range;
    let end = Address(range.start().0.saturating_add(range.len()));
    if pair.iface.query(end)?.is_some() {
        return Err(Error::new(ErrorKind::OutOfResources, "allocate")
            .iface(pair.iface)
            .context("why", "another allocation begins where this one ends")
            .remedy("run the command again, with another --size"));
    }
    Ok((AddressRange::new(end, size)?, memory))
}

/// Maps host memory and makes its second half inaccessible. Returns the range of the first
/// `size` bytes of the second half, and the buffer that owns both halves.
fn guarded(pair: &Pair<'_>, size: u64) -> Result<(AddressRange, DeviceBuffer)> {
    let page = rustix::param::page_size() as u64;
    let half = size.checked_next_multiple_of(page).unwrap_or(size);
    let memory = allocate(pair.iface, pair.device, half.saturating_mul(2))?;
    let whole = memory.allocation().range;
    let end = Address(whole.start().0 + whole.len() / 2);
    let guard = std::ptr::with_exposed_provenance_mut::<libc::c_void>(end.0 as usize);
    // SAFETY: `memory` owns these pages, and no reference into them exists.
    if unsafe { libc::mprotect(guard, (whole.len() / 2) as usize, libc::PROT_NONE) } != 0 {
        return Err(Error::new(ErrorKind::OutOfResources, "mprotect")
            .context("why", io::Error::last_os_error())
            .remedy("run the command again, with another --size"));
    }
    Ok((AddressRange::new(end, size)?, memory))
}

/// Allocates memory of another iface than the registration names.
fn foreign(other: &Arc<dyn Iface>, size: u64) -> Result<Claim> {
    let device = other.devices()?.first().map(|device| device.id);
    let memory = allocate(other, device, size)?;
    let owner = Some(other.name().to_owned());
    Ok(Claim { range: memory.allocation().range, owner, _memory: Some(memory) })
}

/// Registers a range, naming `iface` as its owner, and deregisters it at once.
///
/// # Errors
/// The outer result has the error of the deregistration, the inner result that of the registration.
fn register(
    domain: &Domain,
    iface: IfaceKind,
    range: AddressRange,
) -> Result<Result<Arc<Decision>>> {
    // SAFETY: the region grants no right by which the NIC writes. No peer gets its key, so no
    // transfer reads the range, which may have no memory. This function closes the region before
    // memory of the range is freed.
    let memory = unsafe { Raw::new(range, Promise::ReadOnly) };
    let request = Request::new(memory, Access::REMOTE_READ).owner(iface, None);
    let region = match domain.submit(request) {
        Ok(region) => region,
        Err(rejected) => return Ok(Err(rejected.error)),
    };
    let decision = Arc::clone(region.decision()?);
    region.close()?;
    Ok(Ok(decision))
}

/// Returns the entry of a claim with the outcome of its registration.
fn entry(
    machine: &Machine,
    pair: &Pair<'_>,
    sort: PointerSort,
    claim: &Claim,
    domain: &Domain,
    outcome: Result<Arc<Decision>>,
) -> PointerEntry {
    let mut entry = PointerEntry {
        iface: machine.iface_name(pair.iface.kind()),
        device: pair.device.map(|device| device.0),
        provider: pair.nic.attr.nic.provider.clone(),
        nic: pair.nic.attr.nic.name.clone(),
        sort: sort.name(),
        owner: claim.owner.clone(),
        outcome: "registered",
        correct: sort == PointerSort::Interior,
        path: None,
        unit: None,
        reason: String::new(),
        error: None,
        cause: None,
        remedy: None,
    };
    match outcome {
        Ok(decision) => {
            entry.path = Some(decision.path.name());
            entry.unit = (decision.path == Path::DmaBuf).then_some(decision.unit.name());
            entry.reason = decision.reason.clone();
            if !entry.correct && may_lack_pages(pair, sort, domain) {
                entry.outcome = "allowed";
                entry.correct = true;
                entry.reason =
                    "the NIC looks host pages up at each transfer, not at registration".to_owned();
            }
        }
        Err(error) => {
            entry.outcome = "refused";
            // A driver error of unknown cause does not show that the pointer was detected as wrong.
            entry.correct = !entry.correct && error.kind() != ErrorKind::Driver;
            entry.reason = error.reason().to_string();
            entry.error = Some(format!("{error:#}"));
            let known = error.causes().first().map(ToString::to_string);
            let why = error.context_value("why").map(str::to_owned);
            entry.cause = known.or(why).or_else(|| Some(error.kind().text().to_owned()));
            entry.remedy = error.remedy_text().map(str::to_owned);
        }
    }
    entry
}

/// Returns whether the NIC may register a range that has no pages. The pair must have host memory,
/// `sort` must not be `Foreign`, and the domain's mr_mode must permit addresses without pages.
fn may_lack_pages(pair: &Pair<'_>, sort: PointerSort, domain: &Domain) -> bool {
    let mode = domain.mr_mode();
    pair.iface.kind() == IfaceKind::SYSTEM
        && sort != PointerSort::Foreign
        && (!mode.contains(MrMode::ALLOCATED) || mode.contains(MrMode::MMU_NOTIFY))
}

/// Prints the outcomes as readable text, with a heading for each pair of memory and NIC.
pub(super) fn text(out: &mut dyn Write, entries: &[PointerEntry], style: Style) -> io::Result<()> {
    let heading = |entry: &PointerEntry| {
        let memory = memory_name(&entry.iface, entry.device);
        format!("pointers to {memory}, to {}/{}", entry.provider, entry.nic)
    };
    let same_pair = |one: &PointerEntry, other: &PointerEntry| heading(one) == heading(other);
    for of_pair in entries.chunk_by(same_pair) {
        style.heading(out, &heading(&of_pair[0]))?;
        for entry in of_pair {
            one(out, entry, style)?;
        }
        writeln!(out)?;
    }
    Ok(())
}

fn one(out: &mut dyn Write, entry: &PointerEntry, style: Style) -> io::Result<()> {
    let head = match &entry.owner {
        Some(owner) => format!("{} ({owner}):", entry.sort),
        None => format!("{}:", entry.sort),
    };
    let tone = if entry.correct { Tone::Good } else { Tone::Bad };
    let outcome = style.word(entry.outcome, tone);
    let text = match (entry.path, entry.correct) {
        (Some(path), true) => {
            format!("{outcome} by {path} ({}{})", entry.reason, unit_text(entry.unit))
        }
        (Some(path), false) => format!("{outcome} by {path}: a defect, report it"),
        (None, _) => format!("{outcome}: {}", entry.reason),
    };
    style.item(out, &head, &text)?;
    // Most reasons already contain the cause.
    if let Some(cause) = entry.cause.as_ref().filter(|cause| !entry.reason.contains(*cause)) {
        style.detail(out, "cause:", cause)?;
    }
    entry.remedy.iter().try_for_each(|remedy| style.detail(out, "remedy:", remedy))
}

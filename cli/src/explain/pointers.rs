//! Pointers that a registration must refuse, claimed for an iface, and one that it must accept.

use std::{
    io::{self, Write},
    sync::Arc,
};

use hmem::{
    Access, Address, AddressRange, AllocationKind, DeviceBuffer, DeviceId, Domain, Error,
    ErrorKind, Iface, IfaceKind, MrAttr, MrFlags, MrMode, Result, iface::AllocRequest,
    p2p::path::ExplainRequest, path::Decision,
};
use serde::Serialize;

use super::Pair;
use crate::{
    args::{ExplainArgs, PointerSort},
    json::Skipped,
    machine::Machine,
    table::{Style, Tone},
};

/// The outcome of the registration of one pointer.
#[derive(Debug, Serialize)]
pub struct PointerEntry {
    /// The iface that the registration named.
    pub iface: String,
    /// The device of the memory; null for host memory.
    pub device: Option<u32>,
    /// The provider.
    pub provider: String,
    /// The NIC.
    pub nic: String,
    /// The sort of pointer.
    pub sort: &'static str,
    /// The iface that the memory belongs to; null unless it is another iface.
    pub owner: Option<String>,
    /// The outcome: `registered`, `refused`, or `allowed`.
    pub outcome: &'static str,
    /// Set if the outcome is the right one for the sort.
    pub correct: bool,
    /// The path; null unless the memory was registered.
    pub path: Option<&'static str>,
    /// The reason for the path, or for the outcome.
    pub reason: String,
    /// The refusal, on one line.
    pub error: Option<String>,
    /// The cause of the refusal.
    pub cause: Option<String>,
    /// The change that makes the registration succeed.
    pub remedy: Option<String>,
}

/// A range to register, with its memory.
struct Claim {
    range: AddressRange,
    /// The name of the iface that owns the memory, if it is another one.
    owner: Option<String>,
    /// Frees the memory after the registration.
    _memory: Option<DeviceBuffer>,
}

/// Registers every selected sort of pointer with the NIC of a pair.
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
                    skipped.push(Skipped::new(what, machine.problem(&error)));
                }
            }
        }
    }
    domain.close()?;
    Ok(entries)
}

/// Returns the ranges of a sort: one, or one for each other iface.
fn claims(machine: &Machine, pair: &Pair<'_>, sort: PointerSort, size: u64) -> Vec<Result<Claim>> {
    let claim = |range, memory| Claim { range, owner: None, _memory: memory };
    match sort {
        PointerSort::Interior => vec![twice(pair, size).and_then(|memory| {
            let range = memory.allocation().range;
            let (half, rest) = (range.len() / 2, range.len() - range.len() / 2);
            let middle = Address(range.start().0 + half);
            Ok(claim(AddressRange::new(middle, rest)?, Some(memory)))
        })],
        PointerSort::PastEnd => {
            vec![past_end(pair, size).map(|(range, memory)| claim(range, Some(memory)))]
        }
        PointerSort::Freed => vec![allocate(pair.iface, pair.device, size).map(|memory| {
            let range = memory.allocation().range;
            drop(memory);
            claim(range, None)
        })],
        PointerSort::Null => {
            vec![AddressRange::new(Address(0), size).map(|range| claim(range, None))]
        }
        PointerSort::Foreign => {
            let others =
                machine.hmem.registry().iter().filter(|other| {
                    other.kind() != pair.iface.kind() && other.allocator().is_some()
                });
            others.map(|other| foreign(other, size)).collect()
        }
        PointerSort::All => Vec::new(),
    }
}

/// Allocates memory of which one half is one registration.
fn twice(pair: &Pair<'_>, size: u64) -> Result<DeviceBuffer> {
    allocate(pair.iface, pair.device, size.saturating_mul(2))
}

/// Returns a range that begins where an allocation ends. Nothing usable is there.
fn past_end(pair: &Pair<'_>, size: u64) -> Result<(AddressRange, DeviceBuffer)> {
    if pair.iface.kind() == IfaceKind::SYSTEM {
        return guarded(pair, size);
    }
    let memory = allocate(pair.iface, pair.device, size)?;
    let range = memory.allocation().range;
    let end = Address(range.start().0.saturating_add(range.len()));
    if pair.iface.query(end)?.is_some() {
        return Err(Error::new(ErrorKind::OutOfResources, "allocate")
            .iface(pair.iface.kind())
            .context("why", "another allocation begins where this one ends")
            .remedy("run the command again, with another --size"));
    }
    Ok((AddressRange::new(end, size)?, memory))
}

/// Maps host memory, and takes all access from its second half.
#[allow(unsafe_code, reason = "the protection of pages is changed by the C library")]
fn guarded(pair: &Pair<'_>, size: u64) -> Result<(AddressRange, DeviceBuffer)> {
    let page = rustix::param::page_size() as u64;
    let memory = twice(pair, size.checked_next_multiple_of(page).unwrap_or(size))?;
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

fn foreign(other: &Arc<dyn Iface>, size: u64) -> Result<Claim> {
    let device = other.devices()?.first().map(|device| device.id);
    let memory = allocate(other, device, size)?;
    let owner = Some(other.name().to_owned());
    Ok(Claim { range: memory.allocation().range, owner, _memory: Some(memory) })
}

fn allocate(iface: &Arc<dyn Iface>, device: Option<DeviceId>, len: u64) -> Result<DeviceBuffer> {
    let system = iface.kind() == IfaceKind::SYSTEM;
    let kind = if system { AllocationKind::System } else { AllocationKind::Device };
    DeviceBuffer::allocate(
        iface,
        &AllocRequest { len, device: device.unwrap_or(DeviceId(0)), kind },
    )
}

/// Registers a range that the caller claims for an iface, and deregisters it at once.
///
/// # Errors
/// The error of the deregistration. The inner error is the refusal.
fn register(
    domain: &Domain,
    iface: IfaceKind,
    range: AddressRange,
) -> Result<Result<Arc<Decision>>> {
    let ranges = [range];
    let attr = MrAttr { iface: Some(iface), ..MrAttr::new(&ranges, Access::REMOTE_READ) };
    // SAFETY: the region grants no right by which the NIC writes. No peer gets its key, and this
    // function closes it before the memory is freed.
    #[allow(unsafe_code, reason = "the memory is registered by address")]
    let region = match unsafe { domain.regattr(&attr, MrFlags::empty()) } {
        Ok(region) => region,
        Err(error) => return Ok(Err(error)),
    };
    let decision = Arc::clone(region.decision()?);
    region.close()?;
    Ok(Ok(decision))
}

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
        reason: String::new(),
        error: None,
        cause: None,
        remedy: None,
    };
    match outcome {
        Ok(decision) => {
            entry.path = Some(decision.path.name());
            entry.reason = machine.named(decision.reason.clone());
            if !entry.correct && may_lack_pages(pair, sort, domain) {
                entry.outcome = "allowed";
                entry.correct = true;
                entry.reason =
                    "the NIC looks host pages up at each transfer, not at registration".to_owned();
            }
        }
        Err(error) => {
            entry.outcome = "refused";
            // A driver's unknown failure says nothing about the pointer.
            entry.correct = !entry.correct && error.kind() != ErrorKind::Driver;
            entry.reason = machine.named(error.reason().to_string());
            entry.error = Some(machine.named(error.to_string()));
            let known = error.trace().iter().rev().find_map(|attempt| attempt.cause.clone());
            let why = error.context_value("why").map(str::to_owned);
            let cause = known.or(why).unwrap_or_else(|| error.kind().text().to_owned());
            entry.cause = Some(machine.named(cause));
            entry.remedy = error.remedy_text().map(|remedy| machine.named(remedy.to_owned()));
        }
    }
    entry
}

/// Returns true for host addresses without pages if the mode of the domain permits them.
fn may_lack_pages(pair: &Pair<'_>, sort: PointerSort, domain: &Domain) -> bool {
    let mode = domain.mr_mode();
    pair.iface.kind() == IfaceKind::SYSTEM
        && sort != PointerSort::Foreign
        && (!mode.contains(MrMode::ALLOCATED) || mode.contains(MrMode::MMU_NOTIFY))
}

/// Prints the outcomes for people, one heading for each pair.
///
/// # Errors
/// The error of the writer.
pub(super) fn text(out: &mut dyn Write, entries: &[PointerEntry], style: Style) -> io::Result<()> {
    let heading = |entry: &PointerEntry| {
        let device = entry.device.map(|device| format!(":{device}")).unwrap_or_default();
        format!("pointers to {}{device}, to {}/{}", entry.iface, entry.provider, entry.nic)
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
    match (entry.path, entry.correct) {
        (Some(path), true) => {
            style.item(out, &head, &format!("{outcome} by {path} ({})", entry.reason))
        }
        (Some(path), false) => {
            style.item(out, &head, &format!("{outcome} by {path}: a defect, report it"))
        }
        (None, _) => {
            style.item(out, &head, &format!("{outcome}: {}", entry.reason))?;
            // Most refusals say their cause themselves.
            if let Some(cause) = entry.cause.as_ref().filter(|cause| !entry.reason.contains(*cause))
            {
                style.detail(out, "cause:", cause)?;
            }
            entry.remedy.iter().try_for_each(|remedy| style.detail(out, "remedy:", remedy))
        }
    }
}

//! `hmem explain`: the path of each registration, the refused paths, and remedies.

mod pointers;
mod report;

use std::sync::Arc;

use hmem::{
    DeviceId, Error, ErrorKind, Iface, IfaceKind, Result,
    cause::Step,
    p2p::path::{ExplainRequest, Explanation},
};

pub use self::pointers::PointerEntry;
pub use self::report::{FindingEntry, PathEntry, Report, Wiring, text};
use crate::{
    Failure,
    args::ExplainArgs,
    json::{SCHEMA, Skipped, memory_name},
    machine::{Machine, ProviderNic, root},
    problem::unknown_device,
};

/// A pair of memory and NIC to explain.
struct Pair<'a> {
    iface: &'a Arc<dyn Iface>,
    device: Option<DeviceId>,
    /// The size of the device's memory, in bytes; `None` for host memory.
    memory: Option<u64>,
    nic: &'a ProviderNic,
}

/// Explains every selected pair of memory and NIC.
///
/// # Errors
/// [`Failure::Usage`] for an iface, device or NIC that this machine does not know.
pub fn explain(machine: &Machine, args: &ExplainArgs) -> Result<Report, Failure> {
    machine.check_names(args.iface.as_deref(), args.nic.as_deref())?;
    let nics: Vec<_> = machine.nics(args.nic.as_deref()).collect();
    explain_nics(machine, &nics, args)
}

/// Explains the selected memory with one NIC, which need not be among the NICs of the machine.
///
/// # Errors
/// [`Failure::Usage`] for an iface or device that this machine does not know.
pub fn explain_nic(
    machine: &Machine,
    nic: &ProviderNic,
    args: &ExplainArgs,
) -> Result<Report, Failure> {
    machine.check_names(args.iface.as_deref(), None)?;
    let args = ExplainArgs { nic: Some(nic.attr.nic.to_string()), ..args.clone() };
    explain_nics(machine, &[nic], &args)
}

/// Explains the selected memory with each of `nics`. `args.nic` does not restrict `nics`: it
/// selects the unavailable NICs that the report lists as skipped.
fn explain_nics(
    machine: &Machine,
    nics: &[&ProviderNic],
    args: &ExplainArgs,
) -> Result<Report, Failure> {
    let mut skipped = Vec::new();
    let mut explanations = Vec::new();
    let mut pointers = Vec::new();
    let (pairs, mut failed) = pairs(machine, nics, args, &mut skipped)?;
    for pair in pairs {
        if !args.pointer.is_empty() {
            match pointers::claim_all(machine, &pair, args, &mut skipped) {
                Ok(claimed) => pointers.extend(claimed),
                Err(error) => skipped.push(Skipped::new(pair.name(machine), &error)),
            }
            continue;
        }
        let request = ExplainRequest::new(pair.iface.kind())
            .device(pair.device)
            .nic(pair.nic.attr.nic.name.clone())
            .size(args.size.unwrap_or_else(|| ExplainRequest::new(pair.iface.kind()).size))
            .policy(args.policy);
        match found(machine, &pair, &request) {
            Ok(explanation) => explanations.push(PathEntry::new(machine, &pair, &explanation)),
            Err(error) => {
                failed |= pair.can_allocate();
                skipped.push(Skipped::new(pair.name(machine), root(&error)));
            }
        }
    }
    let missing = machine.hmem.missing_ifaces();
    Ok(Report {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION"),
        explanations,
        skipped,
        pointers: (!args.pointer.is_empty()).then_some(pointers),
        missing: missing.map(|(kind, _)| machine.iface_name(kind)).collect(),
        failed,
    })
}

/// Explains a pair. Fails if the pair has device memory and the iface cannot allocate memory.
fn found(machine: &Machine, pair: &Pair<'_>, request: &ExplainRequest) -> Result<Explanation> {
    if !pair.can_allocate() {
        return Err(Error::new(ErrorKind::Unsupported, "allocate")
            .iface(pair.iface)
            .remedy("choose another iface: this one cannot allocate memory to test with"));
    }
    pair.nic.explain(&machine.hmem, request)
}

/// Returns the pairs of each selected memory with each of `nics`. Adds to `skipped` the unavailable
/// ifaces and NICs that the user asked for, and the ifaces whose devices cannot be listed. Also
/// returns true if devices cannot be listed, or if a NIC cannot be opened although its provider
/// started.
fn pairs<'a>(
    machine: &'a Machine,
    nics: &[&'a ProviderNic],
    args: &ExplainArgs,
    skipped: &mut Vec<Skipped>,
) -> Result<(Vec<Pair<'a>>, bool), Failure> {
    let absent = machine.absent.iter().filter(|absent| match &args.nic {
        // A NIC that cannot be opened is listed unless another NIC was selected.
        None => absent.sort == "NIC",
        Some(name) => absent.is_missed_by(name, !nics.is_empty()),
    });
    let mut failed = false;
    for absent in absent {
        failed |= machine.failed_to_open(absent);
        skipped.push(Skipped::from(absent));
    }
    for (kind, why) in machine.hmem.registry().absent() {
        let name = machine.iface_name(kind);
        let missing = machine.hmem.missing_ifaces().any(|(missing, _)| missing == kind);
        // Most machines lack most ifaces. Only those that the user names are listed.
        if missing || args.iface.as_ref() == Some(&name) {
            skipped.push(Skipped::new(
                format!("iface {name}"),
                machine.explained(Step::OpenDevice, why),
            ));
        }
    }
    let mut pairs = Vec::new();
    for iface in machine.ifaces(args.iface.as_deref()) {
        let mut devices = Vec::new();
        if iface.kind() == IfaceKind::SYSTEM {
            devices.push((None, None));
        } else {
            match iface.devices() {
                Ok(found) => devices
                    .extend(found.iter().map(|device| (Some(device.id), Some(device.memory)))),
                Err(error) => {
                    failed = true;
                    let what = format!("devices of {}", iface.name());
                    skipped.push(Skipped::new(what, &error));
                }
            }
        }
        if let Some(number) = args.device {
            let known = devices.iter().filter_map(|(device, _)| Some(device.as_ref()?.to_string()));
            let known: Vec<_> = known.collect();
            devices.retain(|(device, _)| *device == Some(DeviceId(number)));
            if devices.is_empty() {
                return Err(unknown_device(iface.name(), number, &known).into());
            }
        }
        for (device, memory) in devices {
            pairs.extend(nics.iter().map(|nic| Pair { iface, device, memory, nic }));
        }
    }
    Ok((pairs, failed))
}

/// Returns a note about the unit of export for text output. The note is empty if the unit is the
/// range itself, and for a path without an export.
fn unit_text(unit: Option<&str>) -> String {
    match unit {
        None | Some("range") => String::new(),
        Some(unit) => format!(", exported by whole {unit}"),
    }
}

impl Pair<'_> {
    /// Returns false for device memory of an iface that cannot allocate.
    fn can_allocate(&self) -> bool {
        self.device.is_none() || self.iface.allocator().is_some()
    }

    /// Returns the name of the pair, such as `cuda:0 to verbs/mlx5_0`.
    fn name(&self, machine: &Machine) -> String {
        let iface = machine.iface_name(self.iface.kind());
        let memory = memory_name(&iface, self.device.map(|device| device.0));
        format!("{memory} to {}", self.nic.attr.nic)
    }
}
